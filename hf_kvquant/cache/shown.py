"""Keys and values of a layer as tensors that are not to be changed: the cache holds codes, and would not see it.

Programs that steer a model change the keys and values of its cache in place: `cache.layers[3].values[:, :, -1] += x`.
Those of a quantised layer are made of codes at every access, so the change would be lost without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# Those that change no number.
_NAMES_LIKE_CHANGES = frozenset(("requires_grad_", "rename_"))
_OPERATORS_LIKE_CHANGES = frozenset(("__index__", "__int__", "__invert__", "__iter__"))


class Shown(Tensor):
    """A tensor that refuses to be changed in place, like its views. What else is computed of it is a plain tensor."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if _changes(func.__name__, args, kwargs):
            raise RuntimeError(
                f"KVQuantLayer: `keys` and `values` must not be changed in place, got {func.__name__}: the cache holds "
                "codes, from which they are dequantised at every access. Change a copy (clone()), and give a new cache "
                "the tokens by update()."
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        return _views_shown(result, [each for each in args if isinstance(each, Shown)])

    def __deepcopy__(self, memo: Any) -> Tensor:
        """A copy may be changed."""
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as a plain tensor, so that it can be loaded without this package."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)


def shown(tensor: Tensor, held: Tensor) -> Tensor:
    """The tensor as one that refuses to be changed, unless it has the memory of `held`, so that changes are kept."""
    return tensor if _share(tensor, held) else tensor.as_subclass(Shown)


def _share(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same memory."""
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def _changes(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function of this name changes a `Shown`: its first argument, or `out`."""
    given = kwargs.get("out")
    if isinstance(given, Shown) or (isinstance(given, (tuple, list)) and any(isinstance(x, Shown) for x in given)):
        return True
    is_operator = name == "__setitem__" or (name.startswith("__i") and name not in _OPERATORS_LIKE_CHANGES)
    is_method = name.endswith("_") and not name.endswith("__") and name not in _NAMES_LIKE_CHANGES
    return (is_operator or is_method) and bool(args) and isinstance(args[0], Shown)


def _views_shown(result: Any, given: Sequence[Shown]) -> Any:
    """`result` with every tensor that has the memory of one of these refusing to be changed, too."""
    if isinstance(result, (tuple, list)):
        found = [_views_shown(each, given) for each in result]
        return type(result)(found) if type(result) in (tuple, list) else result
    if type(result) is Tensor and any(_share(result, each) for each in given):
        return result.as_subclass(Shown)
    return result
