"""What this package keeps for a model: one attribute on the model, and notes that stay with the process.

`ModelState`, the attribute, holds what the user asked for: the patch, the transforms and the results of calibration.
`copy` and `pickle` carry it along, `save_pretrained` drops it. A model that is neither patched nor calibrated has no
such attribute. `ModelNotes` holds what belongs to this very object: buffers, captured steps, and what was found out by
looking at the model. A copy starts without notes, and they end with the model.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from .config import KVQuantConfig
from .models.adapters import weight_sample
from .storage.pool import BufferPool

_ATTRIBUTE = "_hf_kvquant"
# The most new tokens of a captured forward, and so the most graphs that a model keeps for several tokens. Assistants
# propose 20 by default, and transformers' schedules seldom go far beyond. Longer chunks run uncaptured.
MOST_NEW_TOKENS = 32


@dataclasses.dataclass(frozen=True)
class Patch:
    """What `patch` left on a model.

    Attributes:
        config: How `generate` caches by default.
        previous_attention: The attention implementation to restore.
        unrounded: The attention modules that no longer round keys and values to scales of the checkpoint.
        fallbacks: By layer, how many steps of `generate` attended to dequantised tensors, and why.
    """

    config: KVQuantConfig
    previous_attention: str
    unrounded: tuple[str, ...] = ()
    fallbacks: dict[int, Counter[str]] = dataclasses.field(default_factory=dict, compare=False)


@dataclasses.dataclass(frozen=True)
class ModelTransforms:
    """Transforms that were set on a model. All tensors are `[num_kv_heads, head_dim]` float32, by layer index.

    With tensor parallelism, the heads are all of the model's, or only this rank's.

    Attributes:
        centers: `None` if none were set; centres of the key biases are used then.
        smoothing: Factors that caches apply, as they are not folded into the weights.
    """

    centers: dict[int, Tensor] | None = None
    smoothing: dict[int, Tensor] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ModelState:
    """What the user asked for; `None` stands for nothing.

    Attributes:
        patch: What `patch` left.
        transforms: What `set_centers` and `set_smoothing` left.
        smoothing: What `smooth_attention` left.
        value_rotation: What `rotate_values` left.
        folded: By function that changed weights in this process, the modules that have them: a sample of each weight.
    """

    patch: Patch | None = None
    transforms: ModelTransforms | None = None
    smoothing: Any = None
    value_rotation: Any = None
    folded: Mapping[str, Mapping[str, Tensor]] | None = None


class Captures:
    """The most recently used captured steps of one model."""

    # Enough for a model that alternates between a few batch sizes. A graph takes the memory of one step.
    LIMIT = 4

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._steps: OrderedDict[Hashable, Any] = OrderedDict()

    def __len__(self) -> int:
        return len(self._steps)

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The step kept under a key. If there is none, make it and drop the least recently used one."""
        if key not in self._steps:
            while len(self._steps) >= self._limit:
                self._steps.popitem(last=False)
            self._steps[key] = make()
        self._steps.move_to_end(key)
        return self._steps[key]


@dataclasses.dataclass
class Assisted:
    """An assisted call of `generate` that is running.

    Attributes:
        max_length: Tokens that static caches of this call must hold; `None` before the model's cache is made.
    """

    max_length: int | None = None


class ModelNotes:
    """What belongs to one model object in this process.

    Attributes:
        pool: Free buffers of static caches.
        captures: Captured decode steps.
        chunk_captures: Captured forwards over several new tokens, which must not evict decode steps.
        assisted: The assisted call that this model or its assistant is to make static caches for.
        fusion: Which kernels of the model are fused in captured steps; `None` before the first one.
        bias_centers: Centres found in the key biases; `None` before they are looked for.
        balancing: Smoothing factors of heads with large outliers; `None` before they are looked for.
        num_kv_heads: By layer, how many key-value heads this rank computes; `None` before they are counted.
        offset_modules: The modules that keep offsets of positions (`generate/positions.py`); `None` before they are
            looked for.
        manager: Weak reference to the newest manager of continuous batching; `None` before the first one.
        has_hint: Whether the log has said that the model's weights speak against few bits.
        preflights: What pre-flights have measured, each with the calibration that the model had then.
        calls: The calls of `generate` that are running (`generate/watch.py`).
        why_unquantized: Why the last of them used no cache of ours; `None` if it did, or asked for none.
        chose_other: Whether the last of them asked for another cache, or for none.
        is_told: Whether the log says that the model attends to dequantised tensors.
        keeps_attention: Whether the model has been found not to let its attention implementation be set.
    """

    def __init__(self) -> None:
        self.pool = BufferPool()
        self.captures = Captures()
        self.chunk_captures = Captures(MOST_NEW_TOKENS)
        self.assisted: Assisted | None = None
        self.fusion: Any = None
        self.bias_centers: dict[int, Tensor] | None = None
        self.balancing: dict[int, Tensor] | None = None
        self.num_kv_heads: dict[int, int] | None = None
        self.offset_modules: list[str] | None = None
        self.manager: Any = None
        self.has_hint = False
        self.preflights: list[tuple[tuple[Any, ...], Any]] = []
        self.calls: list[Any] = []
        self.why_unquantized: str | None = None
        self.chose_other = False
        self.is_told = False
        self.keeps_attention = False

    def drop_buffers(self) -> None:
        """Free the pooled buffers, also those that come back later, and the captured steps, which work on them."""
        self.pool.close()
        self.pool = BufferPool()
        self.captures = Captures()
        self.chunk_captures = Captures(MOST_NEW_TOKENS)


_notes: WeakKeyDictionary[nn.Module, ModelNotes] = WeakKeyDictionary()


def state_of(model: nn.Module) -> ModelState:
    """What the user asked for on a model. All is `None` on a model that is neither patched nor calibrated."""
    state: ModelState = model.__dict__.get(_ATTRIBUTE, ModelState())
    return state


def patch_of(model: nn.Module) -> Patch | None:
    """What `patch` left on a model, or `None` if it is not patched."""
    return state_of(model).patch


def keep(model: nn.Module, **changes: Any) -> None:
    """Replace attributes of a model's `ModelState`; `None` removes one. A state without content leaves the model."""
    state = dataclasses.replace(state_of(model), **changes)
    if any(value is not None for value in vars(state).values()):
        setattr(model, _ATTRIBUTE, state)
    else:
        model.__dict__.pop(_ATTRIBUTE, None)


def keep_folded(model: nn.Module, function: str, names: Iterable[str]) -> None:
    """Note the modules whose weights a function has changed, so that adapters no longer fit; none if it undid that."""
    noted = {each: tuple(samples) for each, samples in (state_of(model).folded or {}).items()}
    noted[function] = tuple(names)
    # All of them anew: a fused projection may be changed by several functions.
    samples = {each: {name: weight_sample(model, name) for name in names} for each, names in noted.items() if names}
    keep(model, folded=samples or None)


def notes_on(model: nn.Module) -> ModelNotes:
    """The notes on a model, made when first needed."""
    return _notes.setdefault(model, ModelNotes())


def noted_models() -> list[nn.Module]:
    """The models that there are notes on."""
    return list(_notes)
