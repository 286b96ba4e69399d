"""Counts the (query, token) pairs that attention reads from codes, and computes how many it has to read.

An evaluation that never reads a code looks lossless. So storages (`LayerStore.attend`) and simulated layers count the
pairs that attend to codes, and the count is compared with the expected number, which has a closed form. With fewer,
some layer attended to something else; with more, our picture of the model is wrong. `PairCounter`, which is slower,
proves that storages count what the op serves.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Cache, PreTrainedModel

from hf_kvquant._ops import ops as torch_ops
from hf_kvquant.cache.layers import KVQuantLayer
from hf_kvquant.models.layers import num_readers
from hf_kvquant.models.text_config import text_config_of
from hf_kvquant.spec.layout import KVLayout
from hf_kvquant.storage.tally import causal_pairs

from ..errors import NothingRead
from .simulation import SimulatedLayer, window_of

_COUNTED = tuple(
    getattr(torch_ops, name).default
    for name in ("decode", "decode_reference", "attend_latent", "attend_latent_reference")
)
# The note on numbers measured without kernels.
DEQUANTIZED = (
    "No kernel serves the model, so it attended to dequantised tensors. The scores are still those of the formats."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs:
    """The (query, token) pairs of one config, summed over layers."""

    # Read from codes, or from the dense tokens that belong to them (the unfinished block of `int4`).
    pairs_read: int
    pairs_expected: int  # to be read in all quantised layers
    pairs_dequantized: int = 0  # read from dequantised tensors, where no kernel serves the model

    @property
    def is_complete(self) -> bool:
        """Whether every pair was read from codes, and only once."""
        return self.pairs_read + self.pairs_dequantized == self.pairs_expected

    @property
    def counts(self) -> dict[str, int]:
        """The three counts by name, as records keep them."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(Pairs)}


def check_pairs(what: str, pairs: Pairs) -> None:
    """Refuse a measurement that did not read every pair exactly once. `what` was measured, and starts the message."""
    if not pairs.is_complete:
        found = pairs.pairs_read + pairs.pairs_dequantized
        raise NothingRead(
            f"{what} must read {pairs.pairs_expected:,} (query, token) pairs from codes, got {found:,}. Some layer "
            "attended to something else (see the log above), or more often than it should, so the number would be that "
            "of another cache. Use another model."
        )


def expected_pairs(model: PreTrainedModel, cache: Cache, tokens: int, first_chunk: int) -> int:
    """Pairs that all layers of a model have to read from a cache of ours or a simulated one. See `causal_pairs`."""
    return sum(
        readers * causal_pairs(tokens, first_chunk, window_of(layer.storage))
        for layer, readers in zip(cache.layers, num_readers(text_config_of(model)), strict=True)
        if isinstance(layer, (KVQuantLayer, SimulatedLayer)) and layer.storage.formats.is_quantized
    )


def pairs_of(cache: Cache) -> int:
    """Pairs read so far from the codes of a simulated cache, or of a cache after `count_pairs`."""
    ours = (layer for layer in cache.layers if isinstance(layer, (KVQuantLayer, SimulatedLayer)))
    return sum(layer.storage.tally.pairs_read or 0 for layer in ours)


def count_pairs(cache: Cache) -> None:
    """Let a cache count pairs from now on. Simulated caches always do.

    Steps that are compiled, or replayed as a CUDA graph, are not counted.
    """
    for layer in cache.layers:
        if isinstance(layer, KVQuantLayer):
            layer.storage.tally.pairs_read = 0


class PairCounter(TorchDispatchMode):
    """Counts the (query, token) pairs that `torch.ops.hf_kvquant.decode` serves while this mode is active.

    So it does for `attend_latent`, which also serves latents that are not quantised; these do not count. Lengths and
    windows are those of the op's arguments. Attention is assumed to be causal; padding counts.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pairs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _COUNTED:
            named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
            is_counted = "rotates_latent" not in named or KVLayout.of_packed(named["layout"]).key.is_quantized
            q_len = named["query"].shape[2]
            # Equal to a text of `length` tokens of which the last `q_len` come after its first chunk.
            window = named.get("sliding_window", 0)
            for length in named["lengths"].tolist() if is_counted else ():
                self.pairs += causal_pairs(length, length - q_len, window)
        return func(*args, **(kwargs or {}))
