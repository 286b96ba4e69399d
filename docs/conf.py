"""How Sphinx makes the site: `make docs`, which needs no network. Pages are Markdown, the API comes from docstrings."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import hf_kvquant

project = "hf_kvquant"
author = copyright = "The hf_kvquant authors"
version = release = hf_kvquant.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["requirements.txt"]

html_theme = "furo"
html_title = f"hf_kvquant {release}"
html_show_sourcelink = False
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["pages.css"]
pygments_dark_style = "github-dark"

# Links to headings are checked like links to pages.
myst_heading_anchors = 3

# Docstrings quote code with single backticks, as Markdown does.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Source", "notes_style")]
