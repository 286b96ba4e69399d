"""Quantised attention in one forward: what each query of a text would see if the text came chunk by chunk.

A forward over a whole text reads no cache. Here it does: keys and values of a layer go through the very storage of a
`KVQuantCache` (so through the ops that quantise), come back dequantised, and every query attends to codes or to tokens
as they came, whichever it would find: what came with the first chunk is exact, and so is what a tail holds at the end
of the query's chunk. That is many times faster than feeding chunks and says what a *format* does; that kernels and
caches do the same is for `fidelity.py` to find out, which compares both.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from . import own_attention
from .attention import call_previous
from .cache import KVQuantCache, KVQuantLayer
from .config import KVQuantConfig
from .formats import KVFormat
from .lengths import causal_pairs
from .own_simulation import SimulatingLayer
from .patching import set_attention, state_of
from .storage import LayerStorage
from .text_config import text_config_of
from .transforms.of_model import key_transforms

# Implementations whose masks say, for every query and key, whether it is seen.
_SERVED = ("sdpa", "eager")


class SimulatedLayer(DynamicLayer, SimulatingLayer):
    """Keys and values of one layer, as they came and dequantised, of some texts.

    Args:
        storage: Empty; quantises.
        first_chunks: Tokens of the first chunk of every text, or of all texts.
        chunk_size: Tokens of each later one.
    """

    def __init__(self, storage: LayerStorage, first_chunks: Sequence[int], chunk_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storage = storage
        self.first_chunks = tuple(first_chunks)
        self.chunk_size = chunk_size
        self.pairs = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Quantise whole texts.

        Raises:
            ValueError: There are some already.
        """
        if not self.storage.is_empty:
            raise ValueError(
                f"{self.storage.name}: a simulated cache takes a text in one forward, got more of it. Make a new one."
            )
        tokens = key_states.shape[2]
        for begin, end in itertools.pairwise(dict.fromkeys((0, min(*self.first_chunks, tokens), tokens))):
            self.storage.extend(key_states[:, :, begin:end], value_states[:, :, begin:end])
            self.storage.flush()
        if not self.storage.is_quantized:
            return key_states, value_states
        self.raw = key_states, value_states
        self.dequantized = self.storage.dequantize()
        return SimulatedHandle(self, 0), SimulatedHandle(self, 1)

    def attend(self, query: Tensor, mask: Tensor, attend: Callable[..., tuple[Tensor, Any]]) -> Tensor:
        """Attention of whole texts.

        Args:
            query: `[batch, num_q_heads, tokens, head_dim]`.
            mask: `[batch, 1, tokens, tokens]`: bool, True for what is seen, or added to scores.
            attend: Takes query, key, value and mask of the same kind, for fewer queries and more keys.

        Returns:
            `[batch, tokens, num_q_heads, head_dim]`.
        """
        batch, _, tokens, _ = query.shape
        n0 = min(*self.first_chunks, tokens)
        outs = [attend(query[:, :, :n0], *self.raw, mask[..., :n0, :])[0]]
        if tokens > n0:
            sources = [(self.dequantized[0], self.raw[0]), (self.dequantized[1], self.raw[1])]
            is_exact = [self._is_exact(kv_format, n0, tokens, query.device) for kv_format in self._formats()]
            is_causal = torch.ones((tokens - n0, tokens), dtype=torch.bool, device=query.device).tril(n0)
            keys, values, masks = [], [], []
            for key_exact in (False, True):
                for value_exact in (False, True):
                    chosen = (is_exact[0] == key_exact) & (is_exact[1] == value_exact)
                    if (chosen & is_causal).any():
                        keys.append(sources[0][key_exact])
                        values.append(sources[1][value_exact])
                        masks.append(_only(mask[..., n0:, :], chosen.unsqueeze(1)))
            outs.append(attend(query[:, :, n0:], torch.cat(keys, 2), torch.cat(values, 2), torch.cat(masks, -1))[0])
        firsts = self.first_chunks * (batch // len(self.first_chunks))
        self.pairs += sum(causal_pairs(tokens, min(first, tokens), window_of(self.storage)) for first in firsts)
        return torch.cat(outs, dim=1)

    def _formats(self) -> tuple[KVFormat, KVFormat]:
        return self.storage.formats.key, self.storage.formats.value

    def _is_exact(self, kv_format: KVFormat, n0: int, tokens: int, device: torch.device) -> Tensor:
        """Whether queries from `n0` on find a token as it came: `[batch or 1, tokens - n0, tokens]` bool."""
        sink_length, residual_length = self.storage.formats.sink_length, self.storage.formats.residual_length
        position = torch.arange(tokens, device=device)
        first = torch.tensor(self.first_chunks, device=device).unsqueeze(1)
        behind = position[n0:] - first  # [batch or 1, tokens - n0]
        is_exact = (behind < 0).unsqueeze(2)
        if not kv_format.is_quantized or kv_format.tail_rows(sink_length, residual_length) == 0:
            return (is_exact | (not kv_format.is_quantized)).expand(-1, -1, tokens)
        chunk_end = (first + (behind.clamp(min=0) // self.chunk_size + 1) * self.chunk_size).clamp(max=tokens)
        begin = kv_format.tail_begin(chunk_end, residual_length)
        return is_exact | (position < sink_length) | (position >= begin.unsqueeze(2))


class SimulatedHandle:
    """Keys or values of a simulated layer, which only `simulated_attention` can look into.

    Args:
        layer: Shared with the other side's handle.
        side: 0 for keys, 1 for values.
    """

    def __init__(self, layer: SimulatedLayer, side: int) -> None:
        self.layer = layer
        raw = layer.raw[side]
        self.shape, self.dtype, self.device, self.ndim = raw.shape, raw.dtype, raw.device, raw.ndim

    def to(self, *args: Any, **kwargs: Any) -> SimulatedHandle:
        """Itself where nothing changes: layers that share keys and values ask for them on their own device."""
        alike = torch.empty((0, 0, 0, 0), dtype=self.dtype, device=self.device)
        if alike.to(*args, **kwargs) is not alike:
            raise _looked_inside()
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _looked_inside()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        raise _looked_inside()


def _looked_inside() -> NotImplementedError:
    return NotImplementedError(
        "simulate: the model must leave keys and values to its attention function, but looks at them itself. "
        "Feed it in chunks instead."
    )


def simulated_cache(
    model: PreTrainedModel,
    config: str | KVQuantConfig | Mapping[str, Any],
    *,
    first_chunk: int | Sequence[int] = 1,
    chunk_size: int = 1,
) -> KVQuantCache:
    """A cache for one forward over one text, or several of equal length, in a model under `simulated`.

    Args:
        model: As for `KVQuantCache`.
        config: The same.
        first_chunk: Tokens that would fill the cache, of all texts or of each; their queries find everything as it
            came. They must be equal where the newest tokens stay dense or a sequence has one scale, and where a text
            fills a block of tokens that share one.
        chunk_size: Tokens that would come at a time afterwards.

    Raises:
        NotImplementedError, TypeError, ValueError: As for `KVQuantCache`.
    """
    cache = KVQuantCache(model.config, config, key_transforms=key_transforms(model, config))
    if any(isinstance(layer, KVQuantLayer) and layer.holds_state for layer in cache.layers):
        raise NotImplementedError(
            f"simulate: `model` must have keys and values alone in its attention layers, got a {type(model).__name__}, "
            "which has a state there as well. Feed it in chunks."
        )
    first_chunks = (first_chunk,) if isinstance(first_chunk, int) else first_chunk
    cache.layers = [
        SimulatedLayer(_whole(layer.storage), first_chunks, chunk_size) if isinstance(layer, KVQuantLayer) else layer
        for layer in cache.layers
    ]
    return cache


def _whole(storage: LayerStorage) -> LayerStorage:
    """A storage that keeps every token of a text; what is beyond a window is hidden by masks."""
    if not storage.window:
        return storage
    whole = LayerStorage(storage.formats, name=storage.name, key_transform=storage.key_transform)
    whole.window = storage.window
    return whole


def window_of(storage: LayerStorage) -> int:
    """Positions that a query of a layer sees; 0 for all."""
    return storage.window or storage.masked_window


@contextlib.contextmanager
def simulated(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Let a model attend to simulated caches for the length of a `with` block; everything else goes on as before.

    Raises:
        NotImplementedError: Its attention is not one of transformers' own that takes a mask.
    """
    with own_attention.overridden(model) as is_own:
        if is_own:
            yield model
            return
    text_config = text_config_of(model)
    before = text_config._attn_implementation
    state = state_of(model)
    prev = before if state is None else state.previous_attention
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
    """Why a model cannot attend to simulated caches, or `None` if it can. Runs it on two tokens."""
    try:
        with simulated(model):
            ids = torch.zeros((1, 2), dtype=torch.long, device=model.device)
            model(input_ids=ids, past_key_values=simulated_cache(model, "int8"), use_cache=True)
    except NotImplementedError as error:
        return str(error)
    return None


def simulated_mask(*, prev: str, **kwargs: Any) -> Any:
    """The mask of `prev`, never left out."""
    mask_function: Callable[..., Any] = ALL_MASK_ATTENTION_FUNCTIONS[prev]
    return mask_function(**{**kwargs, "allow_is_causal_skip": False})


def simulated_attention(
    module: nn.Module, query: Tensor, key: Any, value: Any, attention_mask: Tensor | None, *, prev: str, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention of one layer, as `transformers.AttentionInterface` asks for it."""
    if not isinstance(key, SimulatedHandle):
        return call_previous(prev, module, query, key, value, attention_mask, **kwargs)
    assert attention_mask is not None

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, Any]:
        return call_previous(prev, module, query, key, value, mask, **kwargs)

    return key.layer.attend(query, attention_mask, attend), None


def _only(mask: Tensor, chosen: Tensor) -> Tensor:
    """A mask that shows, of what it showed, the chosen pairs of query and key."""
    return mask & chosen if mask.dtype == torch.bool else mask.masked_fill(~chosen, torch.finfo(mask.dtype).min)
