"""Checks that `eval perplexity` must pass before it writes a number: the gate, a check of the counter, and controls.

A text can be fed in three modes: in one simulated forward, if the model can be simulated, in chunks through the cache,
or token by token. All compute the same function; if two disagree, no number of either can be trusted. The gate compares
them. The counter of pairs (`pairs.py`) is checked against the calls of the op itself. The controls break the cache on
purpose and check that it shows.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...config import KVQuantConfig
from ..errors import Refused
from ..measuring.fidelity import UNQUANTIZED, Chunks, Stream, divergence, route
from ..measuring.pairs import PairCounter
from .segments import FIRST_CHUNK

GATE_TOKENS = 160  # more than the largest block of any preset, 128 tokens
# In float32, two modes may differ by this mean KL divergence, in nats per token, ...
GATE_FLOAT32 = 1e-6
# ... or by this share of their divergence from the unquantised cache. The reference model stays below 2e-8 nats under
# every preset, with and without outliers in its keys. Outliers of 10,000 make scores so large that float32 rounds them
# visibly: up to 1e-4 of a divergence of 2 nats, on eight layers with random weights.
GATE_SHARE = 1e-3
# In 16 bits, rounding alone makes modes differ token by token. Their mean divergences from the unquantised cache may
# differ by a tenth, or by this many standard errors. Two would be too few: a run compares some twenty pairs.
GATE_SHARE_OF_MEAN = 0.1
GATE_ERRORS = 4.0
# Counting is checked on this many tokens, in chunks of this many: the first token, two chunks of four, and one of one.
COUNTED_TOKENS, COUNTED_CHUNK = 10, 4
# With permuted scales, agreement with the unquantised cache must stay below this.
CONTROL_AGREEMENT = 0.5


class Written:
    """Keys and values that one run writes to its cache, so that other runs can write the same.

    Without this, correct runs drift apart. A sum in another order can move a key across a rounding boundary, which
    changes its code and all keys of later layers. After some hundred tokens, two correct runs can be as far from each
    other as from the unquantised cache. From the same keys and values, runs make the same codes, and only attention can
    still make them differ.
    """

    def __init__(self) -> None:
        self._layers: list[list[tuple[Tensor, Tensor]]] = []

    def share(self, stream: Stream) -> None:
        """Record what the first stream, of single tokens, writes, and let later streams write that instead.

        They have not started yet, and have the same text and config.
        """
        is_first = not self._layers
        self._layers = self._layers or [[] for _ in stream.layers]
        for layer, tokens in zip(stream.layers, self._layers, strict=True):
            layer.__dict__["update"] = _shared(layer.update, tokens, is_first)


def _shared(update: Callable[..., Any], tokens: list[tuple[Tensor, Tensor]], is_first: bool) -> Callable[..., Any]:
    """The `update` of a cache layer, which writes to `tokens` first, or takes what was written there."""
    left = iter(tokens)

    def shared(key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_first:
            tokens.append((key, value))
        else:
            keys, values = zip(*itertools.islice(left, key.shape[2]), strict=True)
            key, value = torch.cat(keys, dim=2), torch.cat(values, dim=2)
        return update(key, value, *args, **kwargs)

    return shared


@torch.inference_mode()
def log_probs(
    model: PreTrainedModel,
    ids: Tensor,
    name: str,
    config: KVQuantConfig | None,
    chunks: Chunks,
    *,
    written: Written | None = None,
    on_chunk: Callable[[Stream], Any] = lambda stream: None,
) -> Tensor:
    """Log-probabilities of a whole text (`[1, tokens]`) under one config, `[tokens, vocab_size]`; see `Stream`.

    `written` has keys and values to share with other runs of this text and config. `on_chunk` gets the stream after
    each chunk.
    """
    with route(model, simulate=chunks.simulate):
        stream = Stream(model, ids, config, chunks, name=name)
        if written is not None:
            written.share(stream)
        pieces = []
        for piece in stream:
            pieces.append(piece[0])
            on_chunk(stream)
        return torch.cat(pieces)


@torch.inference_mode()
def check_counting(model: PreTrainedModel, ids: Tensor, configs: Mapping[str, KVQuantConfig]) -> None:
    """Check, on the first tokens of a text (`[1, tokens]`), that caches count the pairs that the op serves."""
    for name, config in configs.items():
        streams: list[Stream] = []
        chunks = Chunks(FIRST_CHUNK, COUNTED_CHUNK)
        with PairCounter() as seen:
            log_probs(model, ids[:, :COUNTED_TOKENS], name, config, chunks, on_chunk=streams.append)
        if streams[-1].pairs_read != seen.pairs:
            raise Refused(
                f"preset {name} must count the {seen.pairs} (query, token) pairs that the op serves, got "
                f"{streams[-1].pairs_read}. A bug, please report it."
            )


def gate_text(segments: Tensor, configs: Mapping[str, KVQuantConfig]) -> Tensor:
    """The text on which modes are compared, `[1, tokens]`: the start of the first segment.

    Long enough that `GATE_TOKENS` tokens remain besides those that a preset keeps dense.
    """
    dense = max(config.sink_length + config.residual_length for config in configs.values())
    return segments[:1, : GATE_TOKENS + dense]


def check_modes(
    model: PreTrainedModel,
    ids: Tensor,
    configs: Mapping[str, KVQuantConfig],
    chunk: int,
    *,
    can_simulate: bool = True,
    say: Callable[[str], Any] = lambda name: None,
) -> dict[str, Any]:
    """Compare the modes on a text (`[1, tokens]`), for every preset.

    All modes get the keys and values of decoding (`Written`). The distance between two modes is their mean KL
    divergence; in 16 bits, the difference of their mean KL divergences from the unquantised cache.

    Returns:
        By preset: `kld`, the mean divergence of decoding from the unquantised cache; `between`, the distance of each
        pair of modes; `bound`, the largest distance allowed. All in nats per token.
    """
    check_counting(model, ids, configs)
    reference = log_probs(model, ids, "the unquantised cache", None, Chunks(FIRST_CHUNK, chunk))
    found: dict[str, Any] = {}
    for name, config in configs.items():
        say(name)
        decode, pairs = _modes(model, ids, name, config, chunk, can_simulate=can_simulate)
        kld = mean(divergence(reference, decode))
        is_exact = name == UNQUANTIZED
        if model.dtype == torch.float32:
            between = {what: mean(divergence(*both)) for what, both in pairs.items()}
            bound = GATE_FLOAT32 if is_exact else max(GATE_FLOAT32, GATE_SHARE * kld)
        else:
            apart = {
                what: divergence(reference, one) - divergence(reference, other) for what, (one, other) in pairs.items()
            }
            between = {what: abs(mean(each)) for what, each in apart.items()}
            error = max((float(each.double().std()) / len(each) ** 0.5 for each in apart.values()), default=0.0)
            # Unquantised modes differ by rounding alone; their row shows by how much.
            bound = math.inf if is_exact else max(GATE_FLOAT32, GATE_SHARE_OF_MEAN * kld, GATE_ERRORS * error)
        found[name] = {"kld": kld, "between": between, "bound": bound}
        for what, each in between.items():
            if not each <= bound:
                _check_model(model, ids, reference, bound)
                raise Refused(
                    f"preset {name} must give the same distribution {what} within {bound:.1e} nats per token, got "
                    f"{each:.1e}. Attention depends on how a text is fed: a bug, please report it."
                )
    return found


def _modes(
    model: PreTrainedModel, ids: Tensor, name: str, config: KVQuantConfig, chunk: int, *, can_simulate: bool
) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """Log-probabilities of a text token by token, and pairs of modes that must have the same ones.

    The simulation of chunks is compared with chunks, and that of single tokens with decoding. Chunks are compared with
    decoding only where both define the same function. They do not with `int4-channel` (a block of tokens can fill
    within a chunk) or with `residual_length` (the dense tokens are counted from the end of the chunk).
    """
    written = Written()

    def run(chunk_size: int, *, simulate: bool = False) -> Tensor:
        return log_probs(model, ids, name, config, Chunks(FIRST_CHUNK, chunk_size, simulate), written=written)

    decode, chunked = run(1), run(chunk)
    knows_chunks = config.key.block_size is not None or config.residual_length > 0
    pairs = {}
    if can_simulate:
        as_decode = run(1, simulate=True)
        as_chunked = run(chunk, simulate=True) if knows_chunks else as_decode
        pairs = {"simulated and decode": (decode, as_decode), "simulated and chunked": (chunked, as_chunked)}
    if not knows_chunks:
        pairs["chunked and decode"] = (decode, chunked)
    return decode, pairs


def _check_model(model: PreTrainedModel, ids: Tensor, reference: Tensor, bound: float) -> None:
    """Refuse a model that itself computes another function for chunks (`reference`) than for single tokens.

    Otherwise our cache would be blamed.
    """
    single = log_probs(model, ids, "the unquantised cache", None, Chunks(FIRST_CHUNK, 1))
    if not (apart := mean(divergence(reference, single))) <= bound:
        raise Refused(
            f"{type(model).__name__} must give the same distribution for chunks and for single tokens within "
            f"{bound:.1e} nats per token, got {apart:.1e} with transformers' own cache. The error is in the model's "
            "code. Use 'hf-kvquant eval tasks', or another version of transformers."
        )


def run_controls(model: PreTrainedModel, ids: Tensor, configs: Mapping[str, KVQuantConfig]) -> dict[str, Any]:
    """Run the controls on a text (`[1, tokens]`): an exact cache must score as exact, a broken one must score badly.

    Returns the divergence of `none`, in nats per token, and as `permuted_scales` the agreement of each other preset
    with the unquantised cache when tokens have the scales of other tokens.
    """
    chunks = Chunks(FIRST_CHUNK, 32)
    reference = log_probs(model, ids, "the unquantised cache", None, chunks)
    exact = mean(divergence(reference, log_probs(model, ids, UNQUANTIZED, configs[UNQUANTIZED], chunks)))
    if model.dtype == torch.float32 and not exact < GATE_FLOAT32:
        raise Refused(f"control: `none` must be within {GATE_FLOAT32} nats of the unquantised cache, got {exact}.")
    found: dict[str, Any] = {"none": exact, "permuted_scales": {}}
    for name, config in configs.items():
        if name == UNQUANTIZED:
            continue
        # Tokens that stay dense have no scales to permute: they would hide the damage.
        broken = permuted(model, ids, name, dataclasses.replace(config, sink_length=0, residual_length=0))
        agreement = mean((broken.argmax(-1) == reference.argmax(-1))[FIRST_CHUNK:])
        found["permuted_scales"][name] = agreement
        if not agreement < CONTROL_AGREEMENT:
            raise Refused(
                f"control: {name} with the scales of its tokens permuted must agree with the unquantised "
                f"cache in fewer than {CONTROL_AGREEMENT:.0%} of the tokens, got {agreement:.1%}. This text or model "
                "cannot show an error of that kind."
            )
    return found


def permuted(model: PreTrainedModel, ids: Tensor, name: str, config: KVQuantConfig) -> Tensor:
    """Log-probabilities with scales and zeros moved to other tokens, `[tokens, vocab_size]`.

    Where a channel has one scale for a block of tokens, scales move to other channels.
    """

    def permute(stream: Stream) -> None:
        for storage in (layer.storage for layer in stream.layers):
            for plane in (plane for planes in storage.planes for plane in (planes.scale, planes.zero)):
                if plane is not None:
                    plane[..., : storage.length] = plane[..., : storage.length].roll(1, -1)

    return log_probs(model, ids, name, config, Chunks(FIRST_CHUNK, 1), on_chunk=permute)


def mean(values: Tensor) -> float:
    """The mean, summed in float64."""
    return float(values.double().mean())
