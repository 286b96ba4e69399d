"""Renders the tables and pictures of the README and of `docs/`, from `evals/results/` alone.

    python evals/render_readme.py

A page marks the place of a part with `<!-- begin: NAME -->` and `<!-- end -->`. The modules of `MODULES` have the parts
and pictures, in their `PARTS` and `PICTURES` (`parts.py`). A test renders every page again and compares, so every
number on a page comes from a results file. A picture is compared by the numbers in its description, since its bytes
depend on the version of matplotlib (`pip install matplotlib`, needed only for drawing). The other scripts of this
folder and `hf_kvquant_evals/` measure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pictures
import render_ablation
import render_batching
import render_chunks
import render_decode
import render_families
import render_generate
import render_itl
import render_latent
import render_parallel
import render_quality
import render_real
import render_recipes
import render_states
import render_summary
import render_weights

MODULES = (pictures, render_ablation, render_batching, render_chunks, render_decode, render_families, render_generate)
MODULES += (render_itl, render_latent, render_parallel, render_quality, render_real, render_recipes, render_states)
MODULES += (render_summary, render_weights)
PARTS = [part for module in MODULES for part in getattr(module, "PARTS", ())]
PICTURES = [picture for module in MODULES for picture in getattr(module, "PICTURES", ())]
ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "evals" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MARKED = re.compile(r"(<!-- begin: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def load(name: str) -> dict[str, Any]:
    """One results file, by its name without the suffix."""
    results: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return results


def load_all() -> dict[str, dict[str, Any]]:
    """All results files that parts and pictures name, by name; those that are missing are left out."""
    named = {name for made in (*PARTS, *PICTURES) for name in (*made.files, *made.optional)}
    return {name: load(name) for name in sorted(named) if (RESULTS / f"{name}.json").exists()}


def parts(results: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    """The Markdown of every part that a page may ask for, by name."""
    return {part.name: part.text(results) for part in PARTS}


def rendered(page: str, texts: Mapping[str, str]) -> str:
    """A page with the text between its markers rendered again."""
    return MARKED.sub(lambda found: f"{found[1]}\n{texts[found[2]]}\n\n{found[3]}", page)


def main() -> None:
    """Write the pictures and the pages."""
    results = load_all()
    for picture in PICTURES:
        if (found := picture.of(results)) is not None:
            picture.draw(picture.plotted(found), RESULTS / f"{picture.name}.svg")
    texts = parts(results)
    for page in PAGES:
        page.write_text(rendered(page.read_text(encoding="utf-8"), texts), encoding="utf-8")


if __name__ == "__main__":
    main()
