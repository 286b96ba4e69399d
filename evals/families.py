"""What becomes of each model family: run, told by `hf_kvquant.report`, and kept in `evals/results/families.json`.

    python evals/families.py

The models are the tiny random ones of `tests/models.py`: each generates under `int4` on a CPU, and `report` says what
served its layers. Which of transformers' models are refused is asked of `KVQuantCache` by their default configs. A test
does the same with each that is in the file, and compares; `render_families.py` makes the README's table of it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hf_kvquant
from hf_kvquant import KVQuantCache
from hf_kvquant.evaluation.provenance import card

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "evals" / "results" / "families.json"
sys.path.insert(0, str(ROOT / "tests"))
import models  # noqa: E402

UNTOLD = "untold"  # of model types about which a default config says nothing


def how_served(name: str) -> str:
    """Which heading of render_families.py a family of `tests/models.py` belongs under."""
    model = models.family(name)
    with hf_kvquant.patched(model, "int4"), torch.inference_mode():
        output = models.greedy(model, models.left_padded(), 4)
        report = hf_kvquant.report(model, output.past_key_values)
    # Whether layers that read what another keeps are listed at all depends on the version of transformers.
    layers = [layer for layer in report.layers if layer.layer_type != "dummy"]
    ours = [layer for layer in layers if layer.formats is not None]
    if not ours or not all(layer.is_served for layer in ours):
        return "dense"
    if len(ours) < len(layers):
        return "some"
    return "rings" if any(layer.layer_type == "sliding_attention" for layer in ours) else "codes"


def how_refused(model_type: str) -> str | None:
    """Which heading one of transformers' models belongs under.

    Returns:
        `None` where its cache is taken; `"untold"` where the default config is none, or of a size that no model has.
    """
    try:
        KVQuantCache(AutoConfig.for_model(model_type), "int4")
    except NotImplementedError as error:
        marks = {"(MLA)": "latent", "`num_hidden_layers`": "parts", "no keys and values": "states"}
        return next((heading for mark, heading in marks.items() if mark in str(error)), "others")
    except Exception:  # transformers' own mistakes in default configs are of many kinds
        return UNTOLD
    return None


def measured() -> dict[str, Any]:
    """What `families.json` holds: for each family, and for each refused model type of transformers, its heading.

    And what was run: the card of every results file.
    """
    # Not of those that run: default configs of two hybrids have no attention at all.
    others = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - {family.model_type for family in models.FAMILIES.values()}
    headings = {model_type: how_refused(model_type) for model_type in sorted(others)}
    return {
        **card(),
        "families": {name: how_served(name) for name in sorted(models.FAMILIES)},
        "refused": {model_type: heading for model_type, heading in headings.items() if heading not in (None, UNTOLD)},
        UNTOLD: [model_type for model_type, heading in headings.items() if heading == UNTOLD],
    }


def main() -> None:
    """Run every family, and write the results."""
    RESULTS.write_text(json.dumps(measured(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
