"""Measures the distributions of a text under recipes, against the unquantised cache in the same run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_kvquant.models.probing import forward
from hf_kvquant.preflight.divergence import divergence

from ..measuring.fidelity import Fidelity, surprise
from ..measuring.simulation import simulated
from ..perplexity.perplexity_results import kld_of, of_segment
from ..perplexity.segments import Segments
from .interface import Recipe
from .recipe_cache import Quantizers, TextLayer, text_cache


@torch.inference_mode()
def compare(
    model: PreTrainedModel,
    segments: Segments,
    index: int,
    recipes: Mapping[str, Recipe],
    quantizers: Mapping[str, Quantizers],
    on_recipe: Callable[[], Any] = lambda: None,
) -> dict[str, dict[str, Any]]:
    """Scores of one segment of a text under each recipe: parts of a record, as `of_segment` makes them.

    Raises `NothingRead` if a number was not computed from codes.
    """
    input_ids, prompt = segments.ids[index : index + 1], segments.prompt
    fed, targets = input_ids[:, :-1], input_ids[:, 1:]
    reference = forward(model, fed).float().log_softmax(-1)
    reference_nll = surprise(reference, targets)[0].cpu()
    found = {}
    for name, recipe in recipes.items():
        with simulated(model):
            cache = text_cache(model, recipe, quantizers[name], prompt)
            log_probs = forward(model, fed, cache=cache).float().log_softmax(-1)
        layers = [layer for layer in cache.layers if isinstance(layer, TextLayer)]
        tokens = fed.shape[1]
        expected = sum(side.coded_pairs(tokens, prompt) for side in (recipe.key, recipe.value))
        scores = Fidelity(
            kld=divergence(reference, log_probs)[0, prompt:],
            agrees=(log_probs.argmax(-1) == reference.argmax(-1))[0, prompt:].cpu(),
            nll=surprise(log_probs, targets)[0].cpu(),
            reference_nll=reference_nll,
            pairs_read=sum(sum(layer.pairs_read) for layer in layers),
            pairs_expected=len(layers) * expected,
        )
        found[name] = of_segment(name, scores, segments.newest(segments.begins[index]))
        on_recipe()
    return found


def summarize(parts: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Aggregates of one recipe over the parts of all windows."""
    klds = [kld_of(part) for part in parts]
    kld, by_window = torch.cat(klds), torch.stack([each.mean() for each in klds])
    total = {key: sum(part[key] for part in parts) for key in ("tokens", "nll", "reference_nll", "agreeing")}
    nll, reference_nll = (torch.tensor(total[key] / total["tokens"]).double() for key in ("nll", "reference_nll"))
    return {
        "scored_tokens": len(kld),
        "kld": float(kld.mean()),
        "kld_standard_error": float(by_window.std() / len(parts) ** 0.5) if len(parts) > 1 else None,
        "kld_p99": float(kld.quantile(0.99)),
        "kld_p999": float(kld.quantile(0.999)),
        "agreement": total["agreeing"] / len(kld),
        "perplexity": float(nll.exp()),
        "perplexity_change": float((nll - reference_nll).exp() - 1),
        "reference_perplexity": float(reference_nll.exp()),
    }
