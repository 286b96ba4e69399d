"""The counter: how many (query, token) pairs a text must be served from codes, and how many it was.

Numbers of an evaluation that never saw a code look lossless. So pairs are counted where codes are attended to, by
storages (`LayerStorage.attend`) and by simulated layers, and compared with what there is to read, which has a closed
form. That storages count what the op serves is what `PairCounter` proves: it sees the calls of the op itself, at the
price of a look at every op of the model. What becomes of numbers whose counts differ is decided in
`evaluation/counter.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Cache, PreTrainedConfig, PreTrainedModel

from ._ops import ops as torch_ops
from .cache import KVQuantLayer, layers_of
from .lengths import causal_pairs
from .simulation import SimulatedLayer, window_of
from .text_config import text_config_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs:
    """Of one config, summed over layers.

    Attributes:
        pairs_read: (Query, token) pairs that were served from codes, or from what stays dense beside them (of
            `int4-channel`, tokens of the unfinished block).
        pairs_expected: What there was to read in all layers that are quantised.
        pairs_dequantized: Pairs that were served from codes made dense again, where no kernel serves the model.
    """

    pairs_read: int
    pairs_expected: int
    pairs_dequantized: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether every pair came from codes, and none twice."""
        return self.pairs_read + self.pairs_dequantized == self.pairs_expected


def num_readers(text_config: PreTrainedConfig) -> list[int]:
    """How many layers attend to the keys and values of each cache layer: itself, and layers that have none.

    Where `num_kv_shared_layers` are named, so many at the end take those of the last layer of their type before them.
    """
    cache_types, _ = layers_of(text_config)
    readers = [1] * len(cache_types)
    num_shared = getattr(text_config, "num_kv_shared_layers", None) or 0
    if num_shared:
        layer_types: list[str] = text_config.layer_types
        own, shared = layer_types[:-num_shared], layer_types[-num_shared:]
        for layer_type in shared:
            readers[max(index for index, each in enumerate(own) if each == layer_type)] += 1
    return readers


def expected_pairs(model: PreTrainedModel, cache: Cache, tokens: int, first_chunk: int) -> int:
    """What all layers of a model serve from the codes of a cache, of ours or a simulated one. See `causal_pairs`."""
    return sum(
        readers * causal_pairs(tokens, first_chunk, window_of(layer.storage))
        for layer, readers in zip(cache.layers, num_readers(text_config_of(model)), strict=True)
        if isinstance(layer, (KVQuantLayer, SimulatedLayer)) and layer.storage.is_quantized
    )


def pairs_of(cache: Cache) -> int:
    """(Query, token) pairs that were served from the codes of a simulated cache, or one told to count them."""
    read = 0
    for layer in cache.layers:
        if isinstance(layer, KVQuantLayer):
            read += layer.storage.pairs_read or 0
        elif isinstance(layer, SimulatedLayer) and layer.storage.is_quantized:
            read += layer.pairs
    return read


def count_pairs(cache: Cache) -> None:
    """Let a cache count from now on, unless it is simulated and does anyway.

    Steps that are compiled or replayed as a CUDA graph are not counted, and so are missed.
    """
    for layer in cache.layers:
        if isinstance(layer, KVQuantLayer):
            layer.storage.pairs_read = 0


class PairCounter(TorchDispatchMode):
    """Counts the (query, token) pairs that `torch.ops.hf_kvquant.decode` serves while it is active.

    It sees the calls of the op itself, whoever makes them, and reads lengths and windows from the op's arguments.
    Causal attention is assumed; padding counts.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pairs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch_ops.decode.default, torch_ops.decode_reference.default):
            named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
            q_len = named["query"].shape[2]
            # As many as a text of `length` tokens has whose last q_len ones come behind its first chunk.
            window = named["sliding_window"]
            self.pairs += sum(causal_pairs(length, length - q_len, window) for length in named["lengths"].tolist())
        return func(*args, **(kwargs or {}))
