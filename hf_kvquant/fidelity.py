"""How far the next-token distribution under a quantised cache is from the one under the unquantised cache.

A forward over a whole text never reads a cache, and the first chunk of a cache is exact by design. So a text is fed in
chunks: a first one of `first_chunk` tokens that fills the cache, then chunks that attend to codes, each in the mode in
which `generate` or a continued chat would. The unquantised cache (transformers' `DynamicCache`) gets the very same
chunks in the same run. What was read as codes is counted where the op is called, so that a number that never saw a
code cannot pass for a good one. `generation.py` uses this for the text that it has just written, `evals/fidelity.py`
for a text file.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Cache, DynamicCache, PreTrainedModel

from .cache import KVQuantCache
from .config import KVQuantConfig
from .patching import patched
from .transforms.of_model import key_transforms


@dataclasses.dataclass(frozen=True)
class Fidelity:
    """One text under one config, token by token. All tensors are on the CPU.

    Attributes:
        kld: `[scored]` float32, nats: KL divergence of the quantised from the unquantised next-token distribution, for
            every token behind the first chunk.
        agrees: `[scored]` bool: whether the most likely next token is the same.
        nll: `[tokens - 1]` float32, nats: negative log-likelihood of each next token, from the text's second token on.
        reference_nll: The same under the unquantised cache.
        pairs_read: (Query, token) pairs that were served from codes, or from what stays dense beside them, summed over
            layers.
        pairs_expected: What that number has to be when every layer that is quantised was read as codes.
    """

    kld: Tensor
    agrees: Tensor
    nll: Tensor
    reference_nll: Tensor
    pairs_read: int
    pairs_expected: int


@torch.inference_mode()
def compare(
    model: PreTrainedModel,
    input_ids: Tensor,
    configs: Mapping[str, str | KVQuantConfig | Mapping[str, Any]],
    *,
    first_chunk: int = 1,
    chunk_size: int = 1,
) -> dict[str, Fidelity]:
    """Feed one text through the unquantised cache and through one cache per config, and compare the distributions.

    All caches advance chunk by chunk together, so no more than a chunk of logits is held.

    Args:
        model: Any model that `patch` accepts, patched or not; left as it was.
        input_ids: `[1, tokens]` int64. The last token is only predicted, never fed.
        configs: What to compare, by name: presets, dictionaries or configs.
        first_chunk: Tokens that fill the cache before the first code is read. They are not scored.
        chunk_size: Tokens fed at a time afterwards; 1 is what `generate` does.

    Returns:
        One result per name.

    Raises:
        ValueError: The text has no token to score, or a chunk has no token.
    """
    fed, targets = input_ids[:, :-1], input_ids[0, 1:]
    with patched(model, "none"):
        caches = {
            name: KVQuantCache(model.config, config, key_transforms=key_transforms(model, config))
            for name, config in configs.items()
        }
        streams = {
            name: feed(model, fed, cache, first_chunk=first_chunk, chunk_size=chunk_size)
            for name, cache in caches.items()
        }
        counters = {name: PairCounter() for name in configs}
        pieces: dict[str, list[tuple[Tensor, ...]]] = {name: [] for name in configs}
        position = 0
        for reference in feed(
            model, fed, DynamicCache(config=model.config), first_chunk=first_chunk, chunk_size=chunk_size
        ):
            target = targets[position : position + len(reference)]
            position += len(reference)
            reference_nll = F.nll_loss(reference, target, reduction="none")
            for name, stream in streams.items():
                with counters[name]:
                    log_probs = next(stream)
                kld = F.kl_div(log_probs, reference, log_target=True, reduction="none").sum(-1)
                agrees = log_probs.argmax(-1) == reference.argmax(-1)
                nll = F.nll_loss(log_probs, target, reduction="none")
                pieces[name].append((kld.cpu(), agrees.cpu(), nll.cpu(), reference_nll.cpu()))
    results = {}
    for name, cache in caches.items():
        kld, agrees, nll, reference_nll = (torch.cat(parts) for parts in zip(*pieces[name], strict=True))
        num_quantized = sum(storage.is_quantized for storage in cache.storages)
        results[name] = Fidelity(
            kld=kld[first_chunk:],
            agrees=agrees[first_chunk:],
            nll=nll,
            reference_nll=reference_nll,
            pairs_read=counters[name].pairs,
            pairs_expected=num_quantized * causal_pairs(fed.shape[1], first_chunk),
        )
    return results


@torch.inference_mode()
def feed(
    model: PreTrainedModel, input_ids: Tensor, cache: Cache, *, first_chunk: int, chunk_size: int
) -> Iterator[Tensor]:
    """Feed one text through an empty cache, chunk by chunk.

    Args:
        model: Patched where `cache` is ours.
        input_ids: `[1, tokens]` int64, more tokens than the first chunk.
        cache: Filled as the chunks are asked for.
        first_chunk: Tokens of the first chunk.
        chunk_size: Tokens of each later one; the last may have fewer.

    Yields:
        `[q_len, vocab_size]` float32 per chunk: log-probabilities of the next token, new memory.

    Raises:
        ValueError: There is more than one text, it ends with the first chunk, or a chunk has no token.
    """
    num_texts, tokens = input_ids.shape
    if num_texts != 1:
        raise ValueError(f"feed: `input_ids` must hold one text, got {num_texts}. Call once per text.")
    if first_chunk < 1 or chunk_size < 1:
        raise ValueError(f"feed: `first_chunk` and `chunk_size` must be positive, got {first_chunk} and {chunk_size}.")
    if tokens <= first_chunk:
        raise ValueError(
            f"feed: `input_ids` must have more than the {first_chunk} tokens of the first chunk, got {tokens}. "
            "Give a longer text or a smaller first chunk."
        )
    for start, stop in itertools.pairwise([0, *range(first_chunk, tokens, chunk_size), tokens]):
        output = model(input_ids=input_ids[:, start:stop], past_key_values=cache, use_cache=True)
        yield output.logits[0].float().log_softmax(-1)


def causal_pairs(tokens: int, first_chunk: int) -> int:
    """(Query, token) pairs that one layer serves from codes for a text fed in chunks, however large they are."""
    return (tokens * (tokens + 1) - first_chunk * (first_chunk + 1)) // 2


class PairCounter(TorchDispatchMode):
    """Counts the (query, token) pairs that `torch.ops.hf_kvquant.decode` serves while it is active.

    It sees the calls of the op itself, whoever makes them, and reads lengths from the op's arguments. Causal attention
    over full-length layers without padding is assumed, which is what `compare` feeds.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pairs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.hf_kvquant.decode.default, torch.ops.hf_kvquant.decode_reference.default):
            named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
            q_len = named["query"].shape[2]
            # The newest of q_len queries sees `length` tokens, each earlier one a token less.
            self.pairs += sum(q_len * length - q_len * (q_len - 1) // 2 for length in named["lengths"].tolist())
        return func(*args, **(kwargs or {}))
