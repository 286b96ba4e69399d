"""Checks that `eval perplexity` must pass before it writes a number: the gate, a check of the counter, and controls.

A text can be fed in three modes: in one simulated forward, if the model can be simulated, in chunks through the cache,
or token by token. All compute the same function; if two disagree, no number of either can be trusted. The gate compares
them. The counter of pairs (`measuring/pairs.py`) is checked against the calls of the op itself. The controls break the
cache on purpose and check that it shows.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_kvquant import ops
from hf_kvquant.common.errors import RefusedResult
from hf_kvquant.config import KVQuantConfig
from hf_kvquant.preflight.divergence import divergence
from hf_kvquant.presets import UNQUANTIZED
from hf_kvquant.spec.layout import KVLayout

from ..measuring.fidelity import Chunks, Stream, route
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


# Keys and values of each layer, token by token.
Written = list[list[tuple[Tensor, Tensor]]]


class Gate:
    """The checks of a model on one text, `[1, tokens]` int64: the start of the first of some segments.

    It is long enough that `GATE_TOKENS` tokens remain besides those that a preset keeps dense.
    """

    def __init__(self, model: PreTrainedModel, segments: Tensor, configs: Mapping[str, KVQuantConfig]) -> None:
        self.model, self.configs = model, configs
        dense = max(config.sink_length + config.residual_length for config in configs.values())
        self.ids = segments[:1, : GATE_TOKENS + dense]

    @torch.inference_mode()
    def log_probs(
        self,
        name: str,
        config: KVQuantConfig | None,
        chunk: int,
        *,
        tokens: int | None = None,
        simulate: bool = False,
        written: Written | None = None,
        on_chunk: Callable[[Stream], Any] = lambda stream: None,
    ) -> Tensor:
        """Log-probabilities of the text, or of its first tokens, under one config, `[tokens, vocab_size]`.

        `written` is shared with other runs under this config. `on_chunk` gets the stream after each chunk.
        """
        with route(self.model, simulate=simulate):
            stream = Stream(self.model, self.ids[:, :tokens], config, Chunks(FIRST_CHUNK, chunk, simulate), name=name)
            if written is not None:
                share(stream, written)
            pieces = []
            for piece in stream:
                pieces.append(piece[0])
                on_chunk(stream)
            return torch.cat(pieces)

    def reference(self, chunk: int) -> Tensor:
        """Log-probabilities under transformers' own cache."""
        return self.log_probs("the unquantised cache", None, chunk)

    def check_counting(self) -> None:
        """Check, on the first tokens, that caches count the pairs that the op serves."""
        for name, config in self.configs.items():
            streams: list[Stream] = []
            with PairCounter() as seen:
                self.log_probs(name, config, COUNTED_CHUNK, tokens=COUNTED_TOKENS, on_chunk=streams.append)
            if streams[-1].pairs_read != seen.pairs:
                raise RefusedResult(
                    f"preset {name} must count the {seen.pairs} (query, token) pairs that the op serves, got "
                    f"{streams[-1].pairs_read}. A bug, please report it."
                )

    def check_modes(
        self, chunk: int, *, can_simulate: bool = True, tell: Callable[..., Any] = lambda **doing: None
    ) -> dict[str, Any]:
        """Compare the modes for every preset, and tell which is next, and each forward (`Tell`).

        All modes get the keys and values of decoding (`share`). The distance between two modes is their mean KL
        divergence; in 16 bits, the difference of their mean KL divergences from the unquantised cache.

        Returns:
            By preset: `kld`, the mean divergence of decoding from the unquantised cache; `between`, the distance of
            each pair of modes; `bound`, the largest distance allowed. All in nats per token.
        """
        self.check_counting()
        reference = self.reference(chunk)
        found: dict[str, Any] = {}
        for name, config in self.configs.items():
            tell(doing=f"the check of modes, {name}")
            decode, pairs = self._modes(name, config, chunk, can_simulate, lambda stream: tell())
            kld = mean(divergence(reference, decode))
            is_exact = name == UNQUANTIZED
            if self.model.dtype == torch.float32:
                between = {what: mean(divergence(*both)) for what, both in pairs.items()}
                bound = GATE_FLOAT32 if is_exact else max(GATE_FLOAT32, GATE_SHARE * kld)
            else:
                apart = {
                    what: divergence(reference, one) - divergence(reference, other)
                    for what, (one, other) in pairs.items()
                }
                between = {what: abs(mean(each)) for what, each in apart.items()}
                error = max((float(each.double().std()) / len(each) ** 0.5 for each in apart.values()), default=0.0)
                # Unquantised modes differ by rounding alone; their row shows by how much.
                bound = math.inf if is_exact else max(GATE_FLOAT32, GATE_SHARE_OF_MEAN * kld, GATE_ERRORS * error)
            found[name] = {"kld": kld, "between": between, "bound": bound}
            for what, each in between.items():
                if not each <= bound:
                    self._check_model(reference, bound)
                    raise RefusedResult(
                        f"preset {name} must give the same distribution {what} within {bound:.1e} nats per token, got "
                        f"{each:.1e}. Attention depends on how a text is fed: a bug, please report it."
                    )
        return found

    def _modes(
        self, name: str, config: KVQuantConfig, chunk: int, can_simulate: bool, on_chunk: Callable[[Stream], Any]
    ) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """Log-probabilities token by token, and pairs of modes that must have the same ones.

        The simulation of chunks is compared with chunks, and that of single tokens with decoding. Chunks are compared
        with decoding only where both define the same function. They do not where a chunk sees its own tokens as they
        came, with `int4` (a block of tokens can fill within a chunk) or with `residual_length` (the dense tokens are
        counted from the end of the chunk).
        """
        run = functools.partial(self.log_probs, name, config, written=[], on_chunk=on_chunk)
        decode, chunked = run(1), run(chunk)
        is_own_raw = chunk > ops.largest_step(KVLayout(config.key, config.value))
        knows_chunks = is_own_raw or config.key.block_size is not None or config.residual_length > 0
        pairs = {}
        if can_simulate:
            as_decode = run(1, simulate=True)
            as_chunked = run(chunk, simulate=True) if knows_chunks else as_decode
            pairs = {"simulated and decode": (decode, as_decode), "simulated and chunked": (chunked, as_chunked)}
        if not knows_chunks:
            pairs["chunked and decode"] = (decode, chunked)
        return decode, pairs

    def _check_model(self, reference: Tensor, bound: float) -> None:
        """Refuse a model that itself computes another function for chunks than for single tokens, to blame no cache."""
        if not (apart := mean(divergence(reference, self.reference(1)))) <= bound:
            raise RefusedResult(
                f"{type(self.model).__name__} must give the same distribution for chunks and for single tokens within "
                f"{bound:.1e} nats per token, got {apart:.1e} with transformers' own cache. The error is in the "
                "model's code. Use 'hf-kvquant eval tasks', or another version of transformers."
            )

    def run_controls(self) -> dict[str, Any]:
        """Run the controls: `none` must score as exact, and other presets badly with the scales of other tokens.

        Returns a divergence, in nats per token, and agreements with the unquantised cache.
        """
        reference = self.reference(32)
        exact = mean(divergence(reference, self.log_probs(UNQUANTIZED, self.configs[UNQUANTIZED], 32)))
        if self.model.dtype == torch.float32 and not exact < GATE_FLOAT32:
            raise RefusedResult(
                f"control: `none` must be within {GATE_FLOAT32} nats of the unquantised cache, got {exact}."
            )
        found: dict[str, Any] = {"none": exact, "permuted_scales": {}}
        for name, config in self.configs.items():
            if name == UNQUANTIZED:
                continue
            # Tokens that stay dense have no scales to permute: they would hide the damage.
            config = dataclasses.replace(config, sink_length=0, residual_length=0)
            broken = self.log_probs(name, config, 1, on_chunk=permute)
            agreement = mean((broken.argmax(-1) == reference.argmax(-1))[FIRST_CHUNK:])
            found["permuted_scales"][name] = agreement
            if not agreement < CONTROL_AGREEMENT:
                raise RefusedResult(
                    f"control: {name} with the scales of its tokens permuted must agree with the unquantised "
                    f"cache in fewer than {CONTROL_AGREEMENT:.0%} of the tokens, got {agreement:.1%}. This text or "
                    "model cannot show an error of that kind."
                )
        return found


def share(stream: Stream, written: Written) -> None:
    """Record in `written` what the first stream, of single tokens, writes, and let later streams write that instead.

    They have not started yet, and have the same text and config. Without this, correct runs drift apart. A sum in
    another order can move a key across a rounding boundary, which changes its code and all keys of later layers. After
    some hundred tokens, two correct runs can be as far from each other as from the unquantised cache. From the same
    keys and values, runs make the same codes, and only attention can still make them differ.
    """
    is_first = not written
    if is_first:
        written.extend([] for _ in stream.layers)
    for layer, tokens in zip(stream.layers, written, strict=True):
        layer.__dict__["update"] = _shared(layer.update, tokens, is_first)


def _shared(update: Callable[..., Any], tokens: list[tuple[Tensor, Tensor]], is_first: bool) -> Callable[..., Any]:
    left = iter(tokens)

    def shared(key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_first:
            tokens.append((key, value))
        else:
            keys, values = zip(*itertools.islice(left, key.shape[2]), strict=True)
            key, value = torch.cat(keys, dim=2), torch.cat(values, dim=2)
        return update(key, value, *args, **kwargs)

    return shared


def permute(stream: Stream) -> None:
    """Move scales and zeros to other tokens; where a channel has one scale for a block of tokens, to other channels."""
    for storage in (layer.storage for layer in stream.layers):
        for plane in (plane for planes in storage.planes for plane in (planes.scale, planes.zero)):
            if plane is not None:
                plane[..., : storage.length] = plane[..., : storage.length].roll(1, -1)


def mean(values: Tensor) -> float:
    """The mean, summed in float64."""
    return float(values.double().mean())
