"""Why some layers are hard to quantise: the largest magnitude of each key channel, before and after calibration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...calibration.search import collect
from ...calibration.smoothing import is_smoothed, smooth_attention, smoothing_of, unsmooth

# The preset that keys are calibrated for here, and on how many tokens. Calibrating on the measured text would flatter a
# divergence, but none is computed here: only the keys of this text are shown.
CALIBRATED_FOR = "int4"
CALIBRATION_TOKENS = 4096


def key_magnitudes(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, ids: Tensor
) -> dict[str, Any]:
    """The largest magnitude of each key channel over some tokens (`[1, tokens]` int64), before and after calibration.

    The model is left as it was. If it is calibrated already, its own centres and factors are used, else those that
    calibrating on the text finds.

    Returns:
        `layers`: by index, `before` and `after` (`[num_kv_heads, head_dim]`; after: of the keys minus their centre,
        divided by their factors), and `choice`, what calibration chose. Or `unmeasured`: why nothing was measured.
    """
    is_calibrated = is_smoothed(model)
    state = smoothing_of(model)
    if is_calibrated and state is None:
        return {"unmeasured": "the checkpoint is calibrated, and its factors did not come with it"}
    options: dict[str, Any] = {"mode": "auto", "num_tokens": CALIBRATION_TOKENS, "window": ids.shape[1]}
    try:
        result = (
            smooth_attention(model, tokenizer, [text], CALIBRATED_FOR, **options) if state is None else state.result
        )
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return {"unmeasured": " ".join(str(error).split())}
    try:
        keys = collect(model, [(ids.cpu(), torch.ones_like(ids.cpu()))], [layer.layer_idx for layer in result.layers])
    finally:
        if not is_calibrated:
            unsmooth(model)
    layers = {}
    for layer in result.layers:
        # Factors folded into the weights have already divided the keys, and must divide the centre as well.
        in_weights = layer.factor if layer.placement == "weights" else torch.ones_like(layer.factor)
        center = None if layer.center is None else layer.center / in_weights
        seen = keys[layer.layer_idx]
        layers[layer.layer_idx] = {
            "choice": layer.choice,
            "before": _short(seen.largest(None) * in_weights),
            "after": _short(seen.largest(center) / (layer.factor / in_weights)),
        }
    return {"preset": CALIBRATED_FOR, "tokens": ids.shape[1], "is_calibrated": is_calibrated, "layers": layers}


def _short(values: Tensor) -> list[list[float]]:
    """Nested lists, rounded to the four digits that a picture needs."""
    return [[float(f"{value:.3e}") for value in row] for row in values.tolist()]
