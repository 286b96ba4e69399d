"""Measures how far the next-token distribution under a quantised cache is from that under the unquantised cache.

A forward over a whole text never reads a cache, and the first chunk of a cache is exact by design. So a text is fed in
chunks: a first one that fills the cache, then chunks that attend to codes, as in `generate` or a continued chat. Tokens
of chunks that are no longer than steps of assisted decoding read what they would read one by one (`steps.py`). The
unquantised cache (transformers' `DynamicCache`) gets the same chunks in the same run. `simulation.py` computes the same
in one forward, which is faster. `pairs.py` counts what was read from codes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from hf_kvquant.cache.kvquant_cache import KVQuantCache
from hf_kvquant.cache.layers import KVQuantLayer
from hf_kvquant.common.errors import is_out_of_memory
from hf_kvquant.config import KVQuantConfig
from hf_kvquant.models.probing import chunks_of, forward
from hf_kvquant.patching import patched
from hf_kvquant.preflight.divergence import divergence
from hf_kvquant.transforms.of_model import key_transforms

from ..errors import OutOfMemory
from .pairs import Pairs, count_pairs, expected_pairs, pairs_of
from .simulation import SimulatedLayer, simulated, simulated_cache
from .steps import read_as_single_steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fidelity(Pairs):
    """The scores of one text under one config, token by token. All tensors are on the CPU."""

    # `[scored]` float32, nats: KL divergence of the quantised from the unquantised next-token distribution, for every
    # token after the first chunk.
    kld: Tensor
    agrees: Tensor  # `[scored]` bool: whether the most likely next token is the same
    nll: Tensor  # `[tokens - 1]` float32, nats: negative log-likelihood of each token from the second on
    reference_nll: Tensor  # `nll` under the unquantised cache


@torch.inference_mode()
def compare(
    model: PreTrainedModel,
    input_ids: Tensor,
    configs: Mapping[str, str | KVQuantConfig | Mapping[str, Any]],
    *,
    first_chunk: int = 1,
    chunk_size: int = 1,
    simulate: bool = False,
    on_chunk: Callable[[], Any] = lambda: None,
) -> list[dict[str, Fidelity]]:
    """Feed texts through the unquantised cache and through one cache per config, and compare the distributions.

    All caches advance together, chunk by chunk, so memory holds logits of one chunk instead of a whole text, unless the
    chunks are simulated. The texts of a call do not influence each other unless a format has one scale per tensor. The
    model, any that `patch` accepts, is left unchanged.

    The texts (`input_ids`) are `[texts, tokens]` int64; the last token is only predicted, never fed. See `Chunks` for
    how they are split: tokens of the first chunk are not scored. Per text, there is one result per name of a config.

    Raises:
        NotImplementedError: The model's attention cannot be simulated.
        OutOfMemory: Memory ran out. The error names the config.
        ValueError: A text has no token to score, or a chunk has no token.
    """
    fed, targets = input_ids[:, :-1], input_ids[:, 1:]
    chunks = Chunks(first_chunk, chunk_size, simulate)
    with route(model, simulate=simulate):
        streams = {name: Stream(model, fed, config, chunks, name=name) for name, config in configs.items()}
        pieces: dict[str, list[tuple[Tensor, ...]]] = {name: [] for name in configs}
        position = 0
        for reference in Stream(model, fed, None, chunks, name="the unquantised cache"):
            target = targets[:, position : position + reference.shape[1]]
            position += reference.shape[1]
            reference_nll = surprise(reference, target)
            for name, stream in streams.items():
                log_probs = next(stream)
                agrees = log_probs.argmax(-1) == reference.argmax(-1)
                nll = surprise(log_probs, target)
                pieces[name].append((divergence(reference, log_probs), agrees.cpu(), nll.cpu(), reference_nll.cpu()))
            on_chunk()
    results: list[dict[str, Fidelity]] = [{} for _ in fed]
    for name, stream in streams.items():
        read, dequantized = (dealt(pairs, len(fed)) for pairs in (stream.pairs_read, stream.pairs_dequantized))
        scores = [torch.cat(parts, dim=1) for parts in zip(*pieces[name], strict=True)]
        for index, (kld, agrees, nll, reference_nll) in enumerate(zip(*scores, strict=True)):
            results[index][name] = Fidelity(
                kld=kld[first_chunk:],
                agrees=agrees[first_chunk:],
                nll=nll,
                reference_nll=reference_nll,
                pairs_read=read[index],
                pairs_expected=stream.pairs_expected(fed.shape[1], first_chunk),
                pairs_dequantized=dequantized[index],
            )
    return results


def dealt(total: int, num_texts: int) -> list[int]:
    """Split a count over all texts into one count per text. The sum is exact, so a count off by one still shows."""
    return [total // num_texts + (index < total % num_texts) for index in range(num_texts)]


def surprise(log_probs: Tensor, target: Tensor) -> Tensor:
    """Negative log-likelihood, `[...]` in nats, of tokens `[...]` int64 under log-probabilities `[..., vocab_size]`."""
    return -log_probs.gather(-1, target.unsqueeze(-1)).squeeze(-1)


@dataclasses.dataclass(frozen=True)
class Chunks:
    """How a text is split into chunks."""

    first_chunk: int  # tokens of the first chunk, whose queries see unquantised keys and values
    chunk_size: int  # tokens of each later chunk; the last may have fewer
    simulate: bool = False  # whether to compute all chunks in one forward, without a cache and its kernels

    def fed(self, input_ids: Tensor) -> list[Tensor]:
        """What each forward over texts (`[texts, tokens]`) is fed. `ValueError` if a chunk or the rest has no token."""
        first, size, tokens = self.first_chunk, self.chunk_size, input_ids.shape[1]
        if first < 1 or size < 1:
            raise ValueError(f"feed: `first_chunk` and `chunk_size` must be positive, got {first} and {size}.")
        if tokens <= first:
            raise ValueError(
                f"feed: `input_ids` must have more than the {first} tokens of the first chunk, got {tokens}. Give a "
                "longer text or a smaller first chunk."
            )
        return [input_ids] if self.simulate else chunks_of(input_ids, first, size)


def route(model: PreTrainedModel, *, simulate: bool) -> AbstractContextManager[Any]:
    """Let a model attend to our caches, or to simulated ones, within a `with` block."""
    return simulated(model) if simulate else patched(model, "none")


class Stream:
    """Iterates over the log-probabilities of texts under one config: `[texts, q_len, vocab_size]` float32 per chunk.

    The model is inside `route`, and the texts (`input_ids`) are `[texts, tokens]` int64. Without a config, the cache is
    transformers' own, unquantised. Errors name the config by `name`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        config: str | KVQuantConfig | Mapping[str, Any] | None,
        chunks: Chunks,
        *,
        name: str,
    ) -> None:
        self.name = name
        self._model = model
        self._cache: Cache
        if config is None:
            self._cache = DynamicCache(config=model.config)
        elif chunks.simulate:
            self._cache = simulated_cache(model, config, first_chunk=chunks.first_chunk, chunk_size=chunks.chunk_size)
        else:
            self._cache = KVQuantCache(model.config, config, key_transforms=key_transforms(model, config))
            if chunks.chunk_size > 1:
                read_as_single_steps(self._cache)
        count_pairs(self._cache)
        self._log_probs = feed(model, input_ids, self._cache, chunks)

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Tensor:
        try:
            return next(self._log_probs)
        except (MemoryError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise OutOfMemory(self.name) from error
            raise

    @property
    def pairs_read(self) -> int:
        """(Query, token) pairs read from codes so far, summed over layers."""
        return pairs_of(self._cache)

    @property
    def pairs_dequantized(self) -> int:
        """Pairs read from dequantised tensors so far, summed over layers."""
        return self._cache.pairs_dequantized if isinstance(self._cache, KVQuantCache) else 0

    @property
    def layers(self) -> list[KVQuantLayer | SimulatedLayer]:
        """The cache layers that may be quantised, simulated ones included."""
        return [layer for layer in self._cache.layers if isinstance(layer, (KVQuantLayer, SimulatedLayer))]

    def pairs_expected(self, tokens: int, first_chunk: int) -> int:
        """Pairs to read from codes per text, once the whole text is fed."""
        return expected_pairs(self._model, self._cache, tokens, first_chunk)


@torch.inference_mode()
def feed(model: PreTrainedModel, input_ids: Tensor, cache: Cache, chunks: Chunks) -> Iterator[Tensor]:
    """Feed texts of equal length (`[texts, tokens]` int64) through an empty cache, one forward per iteration.

    Yields:
        `[texts, q_len, vocab_size]` float32 per forward: log-probabilities of the next token, new memory.
    """
    for chunk in chunks.fed(input_ids):
        yield forward(model, chunk, cache=cache).float().log_softmax(-1)
