"""The details of `eval perplexity`: where in a window quantising costs most, in which layer, and why.

Divergence by position is computed from numbers that every window keeps anyway. For divergence by layer, the text is fed
again with one layer quantised at a time: simulated, or in chunks if the model cannot be simulated. The keys of a text
are measured channel by channel, as they are and as they would be quantised after calibration. `perplexity.py` decides
which windows there are and what is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..cache.cache import KVQuantCache
from ..cache.layers import KVQuantLayer
from ..calibration.smoothing import is_smoothed, smooth_attention, smoothing_of, unsmooth
from ..calibration.text import collect
from ..config import KVQuantConfig
from ..preflight.divergence import alone
from .counter import check_pairs
from .fidelity import compare
from .generation import UNQUANTIZED
from .records import RunRecord
from .windows import FIRST_CHUNK, WHERE

# Parts of a window. In a window of 2048 tokens, each has 128, the tokens of a block, so that effects of blocks show.
NUM_PARTS = 16
# Tokens on which one layer at a time is quantised. More are not needed, since the cost of a layer hardly depends on the
# text (`divergence.py`), and attention in one forward is quadratic in their number.
LAYER_TOKENS = 1024
# The preset that keys are calibrated for here, and on how many tokens. Calibrating on the measured text would flatter a
# divergence, but none is computed here: only the keys of this text are shown.
CALIBRATED_FOR = "int4"
CALIBRATION_TOKENS = 4096


def by_position(windows: Sequence[Tensor], window: int) -> dict[str, list[float]]:
    """Mean divergence over each part of a window.

    Args:
        windows: Per window, `[scored]` float64: the divergence of its last tokens, without the very last one, which is
            only predicted.
        window: Tokens of a window.

    Returns:
        `begin`: the first position of each part that has scored tokens; `kld`: its mean divergence, nats a token.
    """
    num_parts = min(NUM_PARTS, window)
    begins = [-(-part * window // num_parts) for part in range(num_parts)]
    positions = torch.cat([torch.arange(window - 1 - len(kld), window - 1) for kld in windows])
    part = torch.bucketize(positions, torch.tensor(begins[1:]), right=True)
    totals = torch.zeros(num_parts, dtype=torch.float64).index_add_(0, part, torch.cat(list(windows)))
    counts = torch.bincount(part, minlength=num_parts)
    kept = [i for i in range(num_parts) if counts[i] > 0]
    return {"begin": [begins[i] for i in kept], "kld": [float(totals[i] / counts[i]) for i in kept]}


def quantizable_layers(model: PreTrainedModel) -> list[int]:
    """Indices of the layers whose cache is ours."""
    cache = KVQuantCache(model.config, UNQUANTIZED)
    return [index for index, layer in enumerate(cache.layers) if isinstance(layer, KVQuantLayer)]


def num_steps(model: PreTrainedModel) -> int:
    """How many steps `measure` yields."""
    return len(quantizable_layers(model)) + 1


def measure(
    record: RunRecord,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    ids: Tensor,
    configs: Mapping[str, KVQuantConfig],
    chunk: int,
    on_chunk: Callable[[], Any] = lambda: None,
    *,
    simulate: bool = True,
) -> Iterator[str]:
    """Fill the parts `layers` and `keys` of a record; what is already there is kept.

    Args:
        record: The run's record.
        model: The model; left as it was.
        tokenizer: The model's.
        text: The whole text.
        ids: One window of it, `[1, tokens]` int64.
        configs: By name.
        chunk: Tokens of a chunk.
        on_chunk: Called after each chunk.
        simulate: Whether to simulate instead of feeding chunks.

    Yields:
        What is done next, in words.

    Raises:
        NothingRead: The pairs read differ from those expected.
    """
    quantized = {name: config for name, config in configs.items() if name != UNQUANTIZED}
    for index in quantizable_layers(model):
        yield f"layer {index} alone"
        known = record.get("layers") or {}
        if str(index) in known:
            continue
        there = {name: alone(index, config.formats(index)) for name, config in quantized.items()}
        (compared,) = compare(
            model,
            ids[:, :LAYER_TOKENS],
            there,
            first_chunk=FIRST_CHUNK,
            chunk_size=chunk,
            simulate=simulate,
            on_chunk=on_chunk,
        )
        for name, each in compared.items():
            check_pairs(f"{WHERE}: preset {name}", each)
        found = {
            name: {"kld": float(each.kld.double().mean()), "tokens": len(each.kld)} for name, each in compared.items()
        }
        record.put("layers", {**known, str(index): found})
    yield "keys"
    if record.get("keys") is None:
        record.put("keys", key_magnitudes(model, tokenizer, text, ids))


def key_magnitudes(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, ids: Tensor
) -> dict[str, Any]:
    """The largest magnitude of each key channel over a text, before and after calibration.

    Args:
        model: The model; left as it was. If it is calibrated already, its own centres and factors are used.
        tokenizer: The model's.
        text: The text to calibrate on.
        ids: The tokens whose keys are measured, `[1, tokens]` int64.

    Returns:
        `layers`: by index, `before` and `after` (`[num_kv_heads, head_dim]`; after: of the keys minus their centre,
        divided by their factors), and `choice`, what calibration chose. Or `unmeasured`: why nothing was measured.
    """
    is_calibrated = is_smoothed(model)
    state = smoothing_of(model)
    if is_calibrated and state is None:
        return {"unmeasured": "the checkpoint is calibrated, and its factors did not come with it"}
    try:
        result = (
            state.result
            if state is not None
            else smooth_attention(
                model,
                tokenizer,
                [text],
                CALIBRATED_FOR,
                mode="auto",
                num_tokens=CALIBRATION_TOKENS,
                window=ids.shape[1],
            )
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
