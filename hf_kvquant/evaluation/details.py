"""What `eval perplexity` says of a model beyond totals: where in a window quantising costs, in which layer, and why.

Divergence by position comes from the numbers that every window leaves anyway. With one layer quantised at a time the
text is fed anew, simulated, which the gate allows; in chunks where the model cannot be simulated. The keys of a text
are looked at channel by channel, as they are and as they would be quantised after calibration. Which windows there are
and what is kept is decided in `perplexity.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..cache import KVQuantCache, KVQuantLayer
from ..config import KVQuantConfig
from ..divergence import alone
from ..fidelity import compare
from ..generation import UNQUANTIZED
from ..transforms.calibration import collect
from ..transforms.smoothing import is_smoothed, smooth_attention, state_of, unsmooth
from .counter import check_pairs
from .records import RunRecord
from .windows import FIRST_CHUNK, WHERE

# Parts of a window: of 2048 tokens, 128 each, so that blocks of that many tokens show.
NUM_PARTS = 16
# Tokens of which one layer at a time is quantised: costs of layers are steady over texts (`divergence.py`), and
# attention of a forward is quadratic in them.
LAYER_TOKENS = 1024
# For which keys are calibrated here, and on so many tokens. The text is the one that is measured, which would flatter a
# divergence; the picture of its keys is what it is there for.
CALIBRATED_FOR = "int4"
CALIBRATION_TOKENS = 4096


def by_position(windows: Sequence[Tensor], window: int) -> dict[str, list[float]]:
    """Mean divergence over each part of a window.

    Args:
        windows: Per window, `[scored]` float64: the divergence of its last tokens but the very last one, which is only
            predicted.
        window: Tokens of each.

    Returns:
        `begin`: the first position of each part with tokens; `kld`: its mean, nats a token.
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
    """How often `measure` says what it is at."""
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
    """Fill the parts `layers` and `keys` of a record, as far as they are not there yet.

    Args:
        record: Of the run.
        model: As it is left.
        tokenizer: The model's.
        text: Of which there are windows.
        ids: `[1, tokens]` int64, one of them.
        configs: By name.
        chunk: Tokens that come at a time.
        on_chunk: Called after each chunk.
        simulate: Whether one forward does what chunks would, layer by layer.

    Yields:
        What is done next, in words.

    Raises:
        NothingRead: A counter differs from its closed form.
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
    """The largest keys of a text channel by channel, as they come and as they are quantised after calibration.

    Args:
        model: As it is left. Where it is calibrated, its own centres and factors are looked at.
        tokenizer: The model's.
        text: To calibrate on.
        ids: `[1, tokens]` int64: where keys are looked at.

    Returns:
        `layers`: by index, `before` and `after` (`[num_kv_heads, head_dim]`, what is quantised: keys, less their centre
        and divided by their factors), and `choice`, that of calibration. Or `unmeasured`: why there is nothing.
    """
    is_calibrated = is_smoothed(model)
    state = state_of(model)
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
        # Keys come divided already where factors are in the weights, and so does what is subtracted from them.
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
    """With the digits that a picture shows."""
    return [[float(f"{value:.3e}") for value in row] for row in values.tolist()]
