"""The table of model families, from `evals/results/families.json` alone.

`families.py` runs the models, and `render_readme.py` puts the table into its page.
"""

from __future__ import annotations

from typing import Any

from parts import Part

from hf_kvquant.common.tables import markdown_table

# What the table says for each result of `families.py`, in the order of its rows.
HEADINGS = {
    "codes": "every layer decodes from codes",
    "rings": "every layer decodes from codes; layers with a sliding window keep only their window",
    "some": "attention layers decode from codes; other layers keep transformers' own cache",
    "latent": "keeps latents (MLA) as codes, and decodes from them",
    "dense": "correct and small, but attends to dequantised tensors, which is slower",
    "others": "refused: picks or compresses its keys itself",
    "states": "refused: keeps a state of fixed size in every layer, and no keys and values",
    "shared": "refused: attends to the cache of the model that it assists, and has none of its own",
    "parts": "refused: combines several models, and its config does not say which layers have a cache",
}


def families_table(results: dict[str, Any]) -> str:
    """A row for each heading, with the families under it."""
    under: dict[str, list[str]] = {heading: [] for heading in HEADINGS}
    for name, heading in {**results["families"], **results["refused"]}.items():
        under[heading].append(f"`{name}`")
    rows = [[text, ", ".join(under[heading])] for heading, text in HEADINGS.items() if under[heading]]
    return markdown_table(["how it is served", "model types"], rows, num_text=2)


def caption(results: dict[str, Any]) -> str:
    """What was run, with which versions."""
    return (
        "Measured by generating with a tiny random model of each type under `int4` and reading `hf_kvquant.report`. "
        f"Refusals are those of the default configs of transformers {results['transformers']} "
        "(`evals/results/families.json`). Tests run each of them again."
    )


PARTS = (Part("families", ("families",), (families_table, caption)),)
