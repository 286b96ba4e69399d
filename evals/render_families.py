"""The table of model families, from what `families.py` finds."""

from __future__ import annotations

from parts import Part, Results, Row, Table, Text

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


def rows(results: Results) -> list[Row]:
    """A row for each heading, with the families under it."""
    found = {**results["families"], **results["refused"]}
    under = {heading: [f"`{name}`" for name in found if found[name] == heading] for heading in HEADINGS}
    return [{"served": text, "types": ", ".join(under[key])} for key, text in HEADINGS.items() if under[key]]


families_table = Table(rows, {"how it is served": "{served}", "model types": "{types}"}, num_text=2)
caption = Text(
    "Measured by generating with a tiny random model of each type under `int4` and reading `hf_kvquant.report`. "
    "Refusals are those of the default configs of transformers {transformers} (`evals/results/families.json`). Tests "
    "run each of them again."
)
PARTS = (Part("families", ("families",), (families_table, caption)),)
