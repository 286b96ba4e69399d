"""Turns the Markdown page of a report (`page.py`) into one self-contained HTML file.

Pictures are embedded, nothing is loaded from the network, and the page follows the reader's light or dark theme.
"""

from __future__ import annotations

import base64
import html
from pathlib import Path

from markdown_it import MarkdownIt

STYLE = """
:root { color-scheme: light dark; --text: #1f2328; --dim: #59636e; --line: #d1d9e0; --back: #fff; --stripe: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e8eb; --dim: #a2abb5; --line: #3a424b; --back: #16191d; --stripe: #1e2328; }
}
body { margin: 0 auto; max-width: 64rem; padding: 1.5rem 1.25rem 4rem; color: var(--text); background: var(--back);
  font: 1rem/1.55 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.7rem; line-height: 1.25; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); padding-bottom: .25rem; font-size: 1.3rem; }
h3 { font-size: 1.05rem; }
p, li { max-width: 48rem; }
p:has(img) { max-width: none; }
table { display: block; width: max-content; max-width: 100%; overflow-x: auto; border-collapse: collapse;
  font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .75rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { min-width: 4.5rem; color: var(--dim); font-weight: 600; white-space: normal; vertical-align: bottom; }
th:first-child { text-align: left; }
tbody tr:nth-child(even) { background: var(--stripe); }
code { border-radius: .25rem; padding: .1em .3em; background: var(--stripe); font: .9em ui-monospace, monospace; }
img { display: block; max-width: 100%; height: auto; border-radius: .4rem; }
"""


def page_as_html(markdown: str, folder: Path) -> str:
    """The page as HTML.

    Args:
        markdown: The page; its first line is the title.
        folder: The folder with its pictures, all SVG.
    """
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(markdown)
    for token in tokens:
        for child in token.children or ():
            if child.type == "image":
                picture = base64.b64encode((folder / str(child.attrs["src"])).read_bytes()).decode("ascii")
                child.attrs["src"] = f"data:image/svg+xml;base64,{picture}"
    title = html.escape(markdown.partition("\n")[0].removeprefix("# "))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"{parser.renderer.render(tokens, parser.options, {})}</body>\n</html>\n"
    )
