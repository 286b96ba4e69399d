"""How each model family is served: runs one model of each, and writes `evals/results/families.json`.

    python evals/families.py

The models are the tiny random ones of `tests/models.py`. Each generates under `int4` on a CPU, and `hf_kvquant.report`
says what served its layers. For all other model types of transformers, `KVQuantCache` is built from their default
config, to see which are refused. A test repeats every entry of the file and compares. `render_families.py` makes the
table on `docs/models.md` from it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from results_files import write_results
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hf_kvquant
from hf_kvquant import KVQuantCache
from hf_kvquant.models.latent import keeps_latents
from hf_kvquant.models.text_config import text_config_of
from hf_kvquant.upstream.releases import cache_of
from hf_kvquant_evals.provenance import card

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "evals" / "results" / "families.json"
sys.path.insert(0, str(ROOT / "tests"))
import models  # noqa: E402

UNTOLD = "untold"  # model types whose default config does not tell


def how_served(name: str) -> str:
    """The heading of render_families.py under which a family of `tests/models.py` belongs."""
    model = models.family(name)
    with hf_kvquant.patched(model, "int4"), torch.inference_mode():
        output = models.greedy(model, models.left_padded(), 4)
        report = hf_kvquant.report(model, cache_of(output))
    # Whether layers that share another layer's cache are listed depends on the version of transformers.
    layers = [layer for layer in report.layers if layer.reads is None]
    ours = [layer for layer in layers if layer.formats is not None]
    if not ours or not all(layer.is_served for layer in ours):
        return "dense"
    if keeps_latents(text_config_of(model)):
        return "latent"
    if len(ours) < len(layers):
        return "some"
    return "rings" if any(layer.layer_type == "sliding_attention" for layer in ours) else "codes"


def how_refused(model_type: str) -> str | None:
    """The heading under which a refused model type of transformers belongs.

    Returns:
        `None` if it is not refused; `"untold"` if its default config cannot be built or used.
    """
    try:
        KVQuantCache(AutoConfig.for_model(model_type), "int4")
    except NotImplementedError as error:
        marks = {
            "cache of another model": "shared",
            "`num_hidden_layers`": "parts",
            "no keys and values": "states",
        }
        return next((heading for mark, heading in marks.items() if mark in str(error)), "others")
    except Exception:  # default configs of transformers fail in many ways of their own
        return UNTOLD
    return None


def measured() -> dict[str, Any]:
    """The content of `families.json`: the card, and the heading of each family and of each refused model type."""
    # Families that run are left out: the default configs of two hybrids have no attention at all.
    others = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - {family.model_type for family in models.FAMILIES.values()}
    headings = {model_type: how_refused(model_type) for model_type in sorted(others)}
    return {
        **card(),
        "families": {name: how_served(name) for name in sorted(models.FAMILIES)},
        "refused": {model_type: heading for model_type, heading in headings.items() if heading not in (None, UNTOLD)},
        UNTOLD: [model_type for model_type, heading in headings.items() if heading == UNTOLD],
    }


def main() -> None:
    """Run every family and write the results."""
    write_results(measured(), RESULTS)


if __name__ == "__main__":
    main()
