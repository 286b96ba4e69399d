"""The README's table of model families, from `evals/results/families.json` and from nothing else.

`families.py` runs them, and `render_readme.py` puts the table into the README.
"""

from __future__ import annotations

from typing import Any

# What the table calls what `families.py` says, in its order.
HEADINGS = {
    "codes": "every layer decodes from codes",
    "rings": "the same, those with a sliding window in rings of their window",
    "some": "full attention (and sliding windows) from codes; other layers stay with transformers",
    "dense": "correct and small, but attends to dequantised tensors, which is slower",
    "latent": "refused: a latent (MLA) cache has no keys and values per head",
    "others": "refused: attends to keys that it picks or compresses itself",
    "states": "refused: keeps a state of fixed size in every layer, and no keys and values",
    "parts": "refused: several models in one, whose config does not say which layers a cache has",
}


def families_table(results: dict[str, Any]) -> str:
    """A row for each heading, with the families under it."""
    under: dict[str, list[str]] = {heading: [] for heading in HEADINGS}
    for name, heading in {**results["families"], **results["refused"]}.items():
        under[heading].append(f"`{name}`")
    rows = [f"| {text} | {', '.join(under[heading])} |" for heading, text in HEADINGS.items() if under[heading]]
    return "\n".join(["| what becomes of it | families and model types |", "|---|---|", *rows])


def caption(results: dict[str, Any]) -> str:
    """What was run, with which versions."""
    return (
        "Tiny random models of these types generated under `int4`, and `hf_kvquant.report` said what served each "
        f"layer; refusals are those of the default configs of transformers {results['transformers']}. "
        "`evals/results/families.json`; tests run each again."
    )
