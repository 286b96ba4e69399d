"""Runs the end of a text again through the last layers of a model only.

If one layer is quantised, the layers before it do what they did without quantisation. So their outputs and all keys and
values are recorded once. Each further run begins at the quantised layer, behind the text that the cache has been given.
For the layers in the middle of a model that takes about half of the time, and the text before the end takes none.

Nothing is known of how a model passes its states from layer to layer. Whoever replays compares one replay with what was
recorded, and leaves it if they differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..cache.kvquant_cache import KVQuantCache
from ..cache.layers import KVQuantLayer
from ..models.probing import hooked


class Replay:
    """The recorded run of one text. Takes memory for its keys and values, and for the outputs of layers at its end.

    Args:
        layers: The model's layers, as caches count them.
        cache: A new cache, which records the keys and values that the run gives it.
        num_given: How many chunks of the text a replay gives to its cache. It runs the others.
    """

    def __init__(self, layers: list[nn.Module], cache: KVQuantCache, num_given: int) -> None:
        self._layers, self._cache, self._num_given = layers, cache, num_given
        # By layer: keys and values of the chunks that are given, as one, and what the layer does in each of the others.
        self._given: list[tuple[Tensor, Tensor]] = []
        self._states: list[list[tuple[Tensor, Tensor]]] = [[] for _ in layers]
        self._outputs: list[list[Any]] = [[] for _ in layers]

    @classmethod
    def of(cls, model: PreTrainedModel, cache: KVQuantCache, num_given: int) -> Replay | None:
        """A replay for a model, or `None` if its layers are not found or keep more than keys and values."""
        num_layers = len(cache.layers)
        is_known = all(isinstance(layer, KVQuantLayer) and not layer.holds_state for layer in cache.layers)
        decoder = model.get_decoder() or model
        lists = [
            list(part) for part in decoder.modules() if isinstance(part, nn.ModuleList) and len(part) == num_layers
        ]
        if not is_known or len(lists) != 1:
            return None
        [layers] = lists
        indices = [
            {part.layer_idx for part in layer.modules() if isinstance(getattr(part, "layer_idx", None), int)}
            for layer in layers
        ]
        return cls(layers, cache, num_given) if indices == [{place} for place in range(num_layers)] else None

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record what the model does while the block runs: one forward for each chunk, into the cache."""

        def noting(index: int, update: Any) -> Any:
            def note(key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
                self._states[index].append((key, value))
                return update(key, value, *args, **kwargs)

            return note

        def keeping(index: int) -> Any:
            def keep(module: nn.Module, args: Any, output: Any) -> None:
                is_given = len(self._states[index]) <= self._num_given
                self._outputs[index] += [] if is_given else [output]

            return keep

        caches: list[Any] = self._cache.layers
        for index, layer in enumerate(caches):
            layer.update = noting(index, layer.update)
        try:
            with hooked((layer, keeping(index)) for index, layer in enumerate(self._layers)):
                yield
        finally:
            for layer in caches:
                del layer.update
        for states in self._states:
            key, value = (torch.cat(side, dim=2) for side in zip(*states[: self._num_given], strict=True))
            self._given.append((key, value))
            del states[: self._num_given]

    @contextlib.contextmanager
    def playing(self, cache: KVQuantCache, first: int) -> Iterator[None]:
        """Give a new cache the chunks before the end. Layers before `first` repeat what they did in those that follow.

        So the block has to run the model once for each of these.
        """
        for index, (key, value) in enumerate(self._given):
            cache.update(key, value, index)

        def repeating(index: int) -> Any:
            recorded = zip(self._states[index], self._outputs[index], strict=True)

            def repeat(*args: Any, **kwargs: Any) -> Any:
                (key, value), output = next(recorded)
                cache.update(key, value, index)
                return output

            return repeat

        own: list[tuple[nn.Module, Any]] = []
        try:
            for index, layer in enumerate(self._layers[:first]):
                own.append((layer, layer.__dict__.get("forward")))  # an instance has one if a hook wraps it
                layer.forward = repeating(index)
            yield
        finally:
            for layer, forward in own:
                del layer.forward
                if forward is not None:
                    layer.forward = forward
