"""Puts a recipe into a model: as a growing cache, and as one forward over a whole text that gives the same.

Both keep float tensors. `recipe_cache` is a transformers cache like any other, so it works wherever the model reads
from its cache, as in decoding. `text_cache` is for one forward over a text: every query sees each token as it would be
in the growing cache at that moment, dense or as its codes, which attention takes care of (`simulation.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from hf_kvquant.attention.unregistered import SimulatingLayer
from hf_kvquant.cache.handle import KVHandle
from hf_kvquant.config import KVQuantConfig
from hf_kvquant.models.latent import keeps_latents
from hf_kvquant.models.layers import layers_of
from hf_kvquant.models.text_config import text_config_of
from hf_kvquant.presets import UNQUANTIZED
from hf_kvquant.storage.layer_store import LayerStore

from ..measuring.simulation import SimulatedStep, attend_to_sources
from .interface import Quantize, Recipe, Storage

# How keys and values are quantised, by layer.
Quantizers = Mapping[int, tuple[Quantize, Quantize]]
# Keys and values by layer, `[batch, num_kv_heads, tokens, head_dim]`, dense.
States = Sequence[tuple[Tensor, ...]]


def check_served(model: PreTrainedModel) -> None:
    """Refuse a model in which some layer does not keep all keys and values. Raises `NotImplementedError`."""
    if keeps_latents(text_config_of(model)):
        raise NotImplementedError(
            f"recipes: `model` must keep keys and values of heads, which is what recipes quantise, got "
            f"{type(model).__name__}, which keeps latents (MLA). Measure presets with 'hf-kvquant eval perplexity' "
            "instead."
        )
    kinds = set(layers_of(text_config_of(model))[0]) - {"full_attention"}
    if kinds:
        raise NotImplementedError(
            f"recipes: `model` must attend to all tokens in every layer, got {type(model).__name__} with "
            f"{', '.join(sorted(kinds))}. Measure presets with 'hf-kvquant eval perplexity' instead."
        )


class RoomyLayer(DynamicLayer):
    """One layer of transformers' growing cache, with room for more tokens than it holds.

    transformers copies all tokens with each new one, to a place of another size. This is for forwards alone: `update`
    does not see what other methods, such as `reorder_cache`, make of the tokens.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._buffers: list[Tensor] = []  # keys and values, `[batch, num_kv_heads, room, head_dim]`

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add tokens, and return all, in memory that stays where it is until the room is full."""
        begin = self.get_seq_length()
        end = begin + key_states.shape[2]
        new = key_states, value_states
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._buffers = [x.new_empty(*x.shape[:2], 0, x.shape[3]) for x in new]
        if end > self._buffers[0].shape[2]:
            room = max(end, begin * 3 // 2)
            grown = [x.new_empty(*x.shape[:2], room, x.shape[3]) for x in new]
            for after, before in zip(grown, self._buffers, strict=True):
                after[:, :, :begin] = before[:, :, :begin]
            self._buffers = grown
        for buffer, x in zip(self._buffers, new, strict=True):
            buffer[:, :, begin:end] = x
        self.keys, self.values = (buffer[:, :, :end] for buffer in self._buffers)
        return self.keys, self.values


class GrowingLayer(RoomyLayer):
    """One layer of a growing cache. Holds each token dense until it gets codes, then what these stand for."""

    def __init__(self, storages: Sequence[Storage], quantizers: Sequence[Quantize]) -> None:
        super().__init__()
        self.sides = tuple(zip(storages, quantizers, strict=True))
        self.tokens = 0
        # By side: a position, and what the codes of tokens from there on stand for.
        self.known: dict[int, tuple[int, Tensor]] = {}

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add tokens, and return what attention sees. The first tokens of a cache see themselves as they come."""
        held = super().update(key_states, value_states, *args, **kwargs)
        return self.settled(held, (key_states, value_states))

    def settled(self, held: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Give codes, in place, to what gets them with new tokens, the last of those held. Returns as `update` does."""
        before = self.tokens
        self.tokens += new[0].shape[2]
        for side, ((storage, _), x) in enumerate(zip(self.sides, held, strict=True)):
            begin, end = storage.coded_end(before), storage.coded_end(self.tokens)
            if end > begin:
                x[:, :, begin:end] = self._of_codes(side, x, begin, end)
        return held if before else new

    def _of_codes(self, side: int, x: Tensor, begin: int, end: int) -> Tensor:
        """What the codes of tokens begin ... end - 1 stand for.

        Asks for all whole blocks that are there, also for tokens that stay dense for now: 129 tokens take two to four
        times as long as one (int4 and k4v2, 4 texts, CPU).
        """
        storage, quantize = self.sides[side]
        first, known = self.known.get(side, (begin, x[:, :, :0]))
        if end > first + known.shape[2]:
            ready = begin + (self.tokens - begin) // storage.block * storage.block
            first, known = begin, quantize(x[:, :, begin:ready].float(), begin).to(x.dtype)
            self.known[side] = first, known
        return known[:, :, begin - first : end - first]

    def take_codes(self, other: GrowingLayer, tokens: int) -> None:
        """Before any token comes: take what codes stand for from a layer of one row, whose first tokens are the same.

        Codes of a block depend on its tokens alone.
        """
        for side, (first, known) in other.known.items():
            block = self.sides[side][0].block
            self.known[side] = first, known[:, :, : max(0, tokens - first) // block * block]

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse: tokens with codes are not kept dense."""
        raise NotImplementedError("recipes: `crop` must not be called, got a crop. Use sampling without assistants.")


class JointLayer(RoomyLayer):
    """One layer of several caches that grow together, each with as many rows of the batch, one after the other."""

    def __init__(self, layers: Sequence[DynamicLayer]) -> None:
        super().__init__()
        self.layers = layers

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add tokens to all caches, and return what attention sees."""
        new = key_states, value_states
        held = super().update(*new, *args, **kwargs)
        is_first = held[0].shape[2] == key_states.shape[2]
        count = len(self.layers)
        for layer, *parts in zip(self.layers, *(x.chunk(count) for x in (*held, *new)), strict=True):
            if isinstance(layer, GrowingLayer):
                layer.settled((parts[0], parts[1]), (parts[2], parts[3]))
        return new if is_first else held


class TextLayer(DynamicLayer, SimulatingLayer):
    """One layer for one forward over whole texts."""

    def __init__(self, storages: Sequence[Storage], quantizers: Sequence[Quantize], prompt: int, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sides = tuple(zip(storages, quantizers, strict=True))
        self.prompt = prompt  # first tokens of a text, which see themselves dense: they fill the cache
        # Of handles, which name it in messages. It holds nothing.
        self.storage = LayerStore(KVQuantConfig.from_preset(UNQUANTIZED).formats(0), name=name)
        self.pairs_read = [0, 0]  # (query, token) pairs that read codes of keys, and of values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Quantise the keys and values of whole texts."""
        self.raw = key_states, value_states
        coded = []
        for (storage, quantize), x in zip(self.sides, self.raw, strict=True):
            # Codes are made in the same pieces as in a growing cache, since tokens are only quantised with their block.
            begin, end = storage.sink, storage.coded_end(x.shape[2])
            copy = x.clone()
            if end > begin:
                copy[:, :, begin:end] = quantize(x[:, :, begin:end].float(), begin).to(x.dtype)
            coded.append(copy)
        self.coded = coded[0], coded[1]
        step = SimulatedStep(self)
        return KVHandle(step, 0), KVHandle(step, 1)

    def attend(self, query: Tensor, mask: Tensor, attend: Callable[..., tuple[Tensor, Any]]) -> Tensor:
        """See `simulation.SimulatedLayer.attend`."""
        tokens = query.shape[2]
        is_exact = [self._is_exact(storage, tokens, query.device) for storage, _ in self.sides]
        is_causal = torch.ones(tokens - self.prompt, tokens, dtype=torch.bool, device=query.device).tril(self.prompt)
        for side, exact in enumerate(is_exact):
            self.pairs_read[side] += int((~exact & is_causal).sum()) * len(query)
        return attend_to_sources(query, mask, attend, self.prompt, self.coded, self.raw, is_exact)

    def _is_exact(self, storage: Storage, tokens: int, device: torch.device) -> Tensor:
        """Whether queries behind the prompt see a token dense: `[1, tokens - prompt, tokens]` bool."""
        ends = torch.tensor([storage.coded_end(length) for length in range(self.prompt + 1, tokens + 1)], device=device)
        position = torch.arange(tokens, device=device)
        return ((position < storage.sink) | (position >= ends.unsqueeze(1))).unsqueeze(0)


def recipe_cache(model: PreTrainedModel, recipe: Recipe, quantizers: Quantizers) -> DynamicCache:
    """An empty growing cache."""
    return _cache(model, lambda index: GrowingLayer((recipe.key, recipe.value), quantizers[index]))


def plain_cache(model: PreTrainedModel) -> DynamicCache:
    """An empty growing cache that quantises nothing."""
    return _cache(model, lambda index: RoomyLayer())


def joint_cache(caches: Sequence[DynamicCache]) -> DynamicCache:
    """One cache for several empty ones, which are growing ones or transformers' own."""
    if len(caches) == 1:
        return caches[0]
    joint = DynamicCache()
    joint.layers = [JointLayer(layers) for layers in zip(*(cache.layers for cache in caches), strict=True)]
    return joint


def states_of(cache: DynamicCache) -> States:
    """What a cache of transformers holds."""
    found = []
    for layer in cache.layers:
        assert isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None
        found.append((layer.keys, layer.values))
    return found


def filled(cache: DynamicCache, states: States) -> DynamicCache:
    """An empty cache, once its first tokens have come."""
    for index, (keys, values) in enumerate(states):
        cache.update(keys, values, index)
    return cache


def begun(cache: DynamicCache, states: States, like: DynamicCache, tokens: int) -> DynamicCache:
    """The same as `filled`, sooner where the first tokens of all rows are those that another cache holds in one row."""
    for layer, other in zip(cache.layers, like.layers, strict=True):
        if isinstance(layer, GrowingLayer) and isinstance(other, GrowingLayer):
            layer.take_codes(other, tokens)
    for part in (slice(tokens), slice(tokens, None)):
        filled(cache, [tuple(x[:, :, part] for x in each) for each in states])
    return cache


def text_cache(model: PreTrainedModel, recipe: Recipe, quantizers: Quantizers, prompt: int) -> DynamicCache:
    """A cache for one forward over texts, in a model inside `simulation.simulated`. See `TextLayer.prompt`."""
    sides = recipe.key, recipe.value
    return _cache(model, lambda index: TextLayer(sides, quantizers[index], prompt, f"layer {index}"))


def _cache(model: PreTrainedModel, make: Callable[[int], DynamicLayer]) -> DynamicCache:
    check_served(model)
    cache = DynamicCache(config=text_config_of(model))
    cache.layers = [make(index) for index in range(len(cache.layers))]
    return cache
