"""Simulates quantised attention in one forward: each query sees what it would see if the text was fed in chunks.

A forward over a whole text normally reads no cache. Here, the keys and values of a layer go through the storage of a
`KVQuantCache`, so through the ops that quantise, and come back dequantised. Each query attends to either the
dequantised or the original token, as it would with chunks: queries of the first chunk see all tokens unquantised, later
queries those of their own chunk and those that the tail holds before it. Chunks too small to be some to
`ops.largest_step` see only what the tail holds at their end. This is many times faster than feeding chunks, and shows
the effect of a *format*. `fidelity.py` can do both, which shows whether kernels and caches do the same.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_kvquant.attention import unregistered as own_attention
from hf_kvquant.attention.registry import call_previous, set_attention
from hf_kvquant.attention.unregistered import SimulatingLayer
from hf_kvquant.cache.handle import KVHandle, KVStep
from hf_kvquant.cache.kvquant_cache import KVQuantCache
from hf_kvquant.cache.layers import KVQuantLayer
from hf_kvquant.config import KVQuantConfig
from hf_kvquant.models.probing import arbitrary_ids, forward
from hf_kvquant.models.text_config import text_config_of
from hf_kvquant.spec.formats import KVFormat
from hf_kvquant.state import patch_of
from hf_kvquant.storage.layer_store import LayerStore
from hf_kvquant.storage.tally import causal_pairs
from hf_kvquant.transforms.of_model import key_transforms

# Implementations whose masks say, for every query and key, whether the query sees the key.
_SERVED = ("sdpa", "eager")


class SimulatedLayer(DynamicLayer, SimulatingLayer):
    """Keys and values of one layer for some texts, both original and dequantised by a storage that is empty at first.

    `first_chunks` has the tokens of the first chunk, one number per text or one for all texts; `chunk_size` those of
    each later chunk.
    """

    def __init__(self, storage: LayerStore, first_chunks: Sequence[int], chunk_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storage = storage
        self.first_chunks = tuple(first_chunks)
        self.chunk_size = chunk_size
        storage.tally.pairs_read = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Quantise the keys and values of whole texts. A second call raises `ValueError`."""
        if not self.storage.is_empty:
            raise ValueError(
                f"{self.storage.name}: a simulated cache takes a text in one forward, got more of it. Make a new one."
            )
        tokens = key_states.shape[2]
        for begin, end in itertools.pairwise(dict.fromkeys((0, min(*self.first_chunks, tokens), tokens))):
            self.storage.extend(key_states[:, :, begin:end], value_states[:, :, begin:end])
            self.storage.flush()
        if not self.storage.formats.is_quantized:
            return key_states, value_states
        self.raw = key_states, value_states
        self.dequantized = self.storage.dequantize()
        step = SimulatedStep(self)
        return KVHandle(step, 0), KVHandle(step, 1)

    def attend(self, query: Tensor, mask: Tensor, attend: Callable[..., tuple[Tensor, Any]]) -> Tensor:
        """Compute attention for whole texts, `[batch, tokens, num_q_heads, head_dim]`.

        Args:
            query: `[batch, num_q_heads, tokens, head_dim]`.
            mask: `[batch, 1, tokens, tokens]`: bool, True where a query sees a key; or floating, added to scores.
            attend: Takes query, key, value and a mask of the same kind, with fewer queries and more keys.
        """
        batch, _, tokens, _ = query.shape
        n0 = min(*self.first_chunks, tokens)
        formats = self.storage.formats.key, self.storage.formats.value
        is_exact = [self._is_exact(kv_format, n0, tokens, query.device) for kv_format in formats]
        out = attend_to_sources(query, mask, attend, n0, self.dequantized, self.raw, is_exact)
        firsts = self.first_chunks * (batch // len(self.first_chunks))
        served = sum(causal_pairs(tokens, min(first, tokens), window_of(self.storage)) for first in firsts)
        self.storage.tally.pairs_read = (self.storage.tally.pairs_read or 0) + served
        return out

    def _is_exact(self, kv_format: KVFormat, n0: int, tokens: int, device: torch.device) -> Tensor:
        """Whether queries from `n0` on see a token unquantised: `[batch or 1, tokens - n0, tokens]` bool."""
        sink_length, residual_length = self.storage.formats.sink_length, self.storage.formats.residual_length
        position = torch.arange(tokens, device=device)
        first = torch.tensor(self.first_chunks, device=device).unsqueeze(1)
        behind = position[n0:] - first  # [batch or 1, tokens - n0]
        is_exact = (behind < 0).unsqueeze(2)
        if not kv_format.is_quantized:
            return torch.ones_like(is_exact).expand(-1, -1, tokens)
        chunk_begin = first + behind.clamp(min=0) // self.chunk_size * self.chunk_size
        chunk_end = (chunk_begin + self.chunk_size).clamp(max=tokens)
        is_chunk = chunk_end - chunk_begin > self.storage.largest_step(window_of(self.storage))
        is_exact = is_exact | (is_chunk.unsqueeze(2) & (position >= chunk_begin.unsqueeze(2)))
        if kv_format.tail_rows(sink_length, residual_length) == 0:
            return is_exact.expand(-1, -1, tokens)
        # Other steps have room for a window of each query (`steps.py`).
        begin = kv_format.tail_begin(torch.where(is_chunk, chunk_begin, position[n0:] + 1), residual_length)
        return is_exact | (position < sink_length) | (position >= begin.unsqueeze(2))


def attend_to_sources(
    query: Tensor,
    mask: Tensor,
    attend: Callable[..., tuple[Tensor, Any]],
    first_chunk: int,
    dequantized: tuple[Tensor, Tensor],
    raw: tuple[Tensor, Tensor],
    is_exact: Sequence[Tensor],
) -> Tensor:
    """Attention in which each query sees each token either dequantised or as it came.

    Args:
        query: As for `SimulatedLayer.attend`.
        mask: As for `SimulatedLayer.attend`.
        attend: As for `SimulatedLayer.attend`.
        first_chunk: The first queries, which see all tokens as they came.
        dequantized: Keys and values, `[batch, num_kv_heads, tokens, head_dim]`.
        raw: The same as they came.
        is_exact: For keys and for values, whether the later queries see a token as it came:
            `[batch or 1, tokens - first_chunk, tokens]` bool.

    Returns:
        `[batch, tokens, num_q_heads, head_dim]`.
    """
    tokens = query.shape[2]
    outs = [attend(query[:, :, :first_chunk], *raw, mask[..., :first_chunk, :])[0]]
    if tokens > first_chunk:
        # Each source of keys and values, with the mask of the pairs that read it.
        sources = list(zip(dequantized, raw, strict=True))
        is_causal = torch.ones((tokens - first_chunk, tokens), dtype=torch.bool, device=query.device).tril(first_chunk)
        keys, values, masks = [], [], []
        for key_exact, value_exact in itertools.product((False, True), repeat=2):
            chosen = (is_exact[0] == key_exact) & (is_exact[1] == value_exact)
            if (chosen & is_causal).any():
                keys.append(sources[0][key_exact])
                values.append(sources[1][value_exact])
                later, chosen = mask[..., first_chunk:, :], chosen.unsqueeze(1)
                is_bool = mask.dtype == torch.bool
                masks.append(later & chosen if is_bool else later.masked_fill(~chosen, torch.finfo(mask.dtype).min))
        late = attend(query[:, :, first_chunk:], torch.cat(keys, 2), torch.cat(values, 2), torch.cat(masks, -1))[0]
        outs.append(late)
    return torch.cat(outs, dim=1)


class SimulatedStep(KVStep):
    """Lets handles to keys and values of a simulated layer be read by `simulated_attention` alone."""

    def __init__(self, layer: SimulatingLayer) -> None:
        super().__init__(layer.storage)
        self.layer = layer

    def dense(self, reason: str) -> NoReturn:
        """Refuse to be read as tensors."""
        raise NotImplementedError(
            "simulate: the model must leave keys and values to its attention function, but reads them itself. "
            "Feed it in chunks instead."
        )


def simulated_cache(
    model: PreTrainedModel,
    config: str | KVQuantConfig | Mapping[str, Any],
    *,
    first_chunk: int | Sequence[int] = 1,
    chunk_size: int = 1,
) -> KVQuantCache:
    """A cache for one forward over one text, or several of equal length, in a model inside `simulated`.

    Queries of the first chunk see unquantised keys and values. There is one `first_chunk`, or one per text; these must
    be equal if the newest tokens stay dense, if a scale spans a sequence, or if a text fills a block of tokens that
    share a scale. Raises what `KVQuantCache` raises.
    """
    cache = KVQuantCache(model.config, config, key_transforms=key_transforms(model, config))
    if any(isinstance(layer, KVQuantLayer) and layer.holds_state for layer in cache.layers):
        raise NotImplementedError(
            f"simulate: `model` must keep only keys and values in its attention layers, got a {type(model).__name__}, "
            "which also keeps a state there. Feed it in chunks."
        )
    first_chunks = (first_chunk,) if isinstance(first_chunk, int) else first_chunk
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, KVQuantLayer):
            storage = layer.storage
            if storage.window:  # keep every token of a text; masks hide those outside the sliding window
                storage = LayerStore(storage.formats, name=storage.name, key_transform=storage.key_transform)
                storage.window = layer.storage.window
            cache.layers[index] = SimulatedLayer(storage, first_chunks, chunk_size)
    return cache


def window_of(storage: LayerStore) -> int:
    """How many positions a query of a layer sees; 0 for all."""
    return storage.window or storage.rows.masked_window


@contextlib.contextmanager
def simulated(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Let a model attend to simulated caches, besides others, for the duration of a `with` block.

    Raises `NotImplementedError` if the model's attention is not one of transformers' own that take a mask.
    """
    with own_attention.overridden(model) as is_own:
        if is_own:
            yield model
            return
    text_config = text_config_of(model)
    before = text_config._attn_implementation
    patch = patch_of(model)
    prev = before if patch is None else patch.previous_attention
    if prev not in _SERVED:
        raise NotImplementedError(
            f"simulate: the model's attention implementation must be one of {', '.join(_SERVED)}, got {prev!r}. "
            "Load it with attn_implementation='sdpa', or feed it in chunks."
        )
    name = f"hf_kvquant_simulated-{prev}"
    if name not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        AttentionInterface.register(name, functools.partial(simulated_attention, prev=prev))
        AttentionMaskInterface.register(name, functools.partial(simulated_mask, prev=prev))
    set_attention(model, name)
    try:
        if text_config._attn_implementation != name:
            raise NotImplementedError(
                f"simulate: {type(model).__name__} computes attention by itself, outside transformers' registry. "
                "Feed it in chunks instead."
            )
        yield model
    finally:
        set_attention(model, before)


@torch.inference_mode()
def why_not_simulated(model: PreTrainedModel) -> str | None:
    """Why a model cannot attend to simulated caches, or `None` if it can. Runs the model on two tokens."""
    try:
        with simulated(model):
            forward(model, arbitrary_ids(model, 2), cache=simulated_cache(model, "int8"))
    except NotImplementedError as error:
        return str(error)
    return None


def simulated_mask(*, prev: str, **kwargs: Any) -> Any:
    """The mask of `prev`, made even where `prev` would skip it."""
    mask_function: Callable[..., Any] = ALL_MASK_ATTENTION_FUNCTIONS[prev]
    return mask_function(**{**kwargs, "allow_is_causal_skip": False})


def simulated_attention(
    module: nn.Module, query: Tensor, key: Any, value: Any, attention_mask: Tensor | None, *, prev: str, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention of one layer, with the signature of `transformers.AttentionInterface`."""
    if not (isinstance(key, KVHandle) and isinstance(key.step, SimulatedStep)):
        return call_previous(prev, module, query, key, value, attention_mask, **kwargs)
    assert attention_mask is not None

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, Any]:
        return call_previous(prev, module, query, key, value, mask, **kwargs)

    return key.step.layer.attend(query, attention_mask, attend), None
