"""The details of `eval perplexity`: in which layer quantising costs most, and why.

For divergence by layer, the text is fed again with one layer quantised at a time: simulated, or in chunks if the model
cannot be simulated. The keys of a text are measured channel by channel, as they are and as they would be quantised
after calibration.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...cache.cache import KVQuantCache
from ...cache.layers import KVQuantLayer
from ...calibration.smoothing import is_smoothed, smooth_attention, state_of, unsmooth
from ...calibration.text import collect
from ...common.progress import Tell
from ...preflight.divergence import alone
from ..measuring.fidelity import UNQUANTIZED, compare
from ..measuring.pairs import check_pairs
from ..preparation import Subject
from ..records import RunRecord
from .segments import FIRST_CHUNK

# Tokens on which one layer at a time is quantised. More are not needed, since the cost of a layer hardly depends on the
# text (`preflight/divergence.py`), and attention in one forward is quadratic in their number.
LAYER_TOKENS = 1024
# The preset that keys are calibrated for here, and on how many tokens. Calibrating on the measured text would flatter a
# divergence, but none is computed here: only the keys of this text are shown.
CALIBRATED_FOR = "int4"
CALIBRATION_TOKENS = 4096

# What is done next, in words, and the function that does it and tells its progress.
Step = tuple[str, Callable[[Tell], None]]


def detail_steps(
    record: RunRecord, subject: Subject, text: str, ids: Tensor, chunk: int, *, can_simulate: bool = True
) -> list[Step]:
    """Steps that fill the parts `layers` and `keys` of a record; what is already there is kept.

    Args:
        record: The run's record.
        subject: The model and its configs.
        text: The whole text, to calibrate on.
        ids: One segment of it, `[1, tokens]` int64.
        chunk: Tokens of a chunk.
        can_simulate: Whether to simulate instead of feeding chunks.
    """
    model = subject.model
    ids = ids.to(model.device)

    def measure_layer(index: int, tell: Tell) -> None:
        known = record.get("layers") or {}
        if str(index) in known:
            return
        (compared,) = compare(
            model,
            ids[:, :LAYER_TOKENS],
            {
                name: alone(index, config.formats(index))
                for name, config in subject.configs.items()
                if name != UNQUANTIZED
            },
            first_chunk=FIRST_CHUNK,
            chunk_size=chunk,
            simulate=can_simulate,
            on_chunk=tell,
        )
        for name, each in compared.items():
            check_pairs(f"preset {name}", each)
        found = {
            name: {"kld": float(each.kld.double().mean()), "tokens": len(each.kld)} for name, each in compared.items()
        }
        record.put("layers", {**known, str(index): found})

    def measure_keys(tell: Tell) -> None:
        record.fill("keys", lambda: key_magnitudes(model, subject.tokenizer, text, ids))

    cache = KVQuantCache(model.config, UNQUANTIZED)
    quantizable = [index for index, layer in enumerate(cache.layers) if isinstance(layer, KVQuantLayer)]
    layers: list[Step] = [(f"layer {index} alone", functools.partial(measure_layer, index)) for index in quantizable]
    return [*layers, ("keys", measure_keys)]


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
    state = state_of(model)
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
