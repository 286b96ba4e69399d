"""Prefetch weights into the L2 cache while attention runs, in a branch of a captured step.

Attention over a short context is limited by latency rather than bandwidth, and the linear layer after it then waits for
its weights. So a branch of the CUDA graph starts after the last linear layer before attention (in Llama, the value
projection), runs in parallel to the rotary embedding and attention, and prefetches the first bytes of the next weight.
It changes no data, so no result depends on it.

A step of Llama 3 8B with an int4 cache at 1 x 2k took 5.33 ms with it instead of 5.50 (H200, 2026-11). Any branch gives
0.1 ms of that, even one with a kernel that prefetches nothing. The reason is not known: graphs of small kernels alone
replay no faster with a branch. Prefetching elsewhere (before an MLP, within it, before the projections) gained less,
and prefetching in several places gained less than here alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .. import ops  # noqa: F401  (defines the ops)
from .._ops import ops as torch_ops

# Limits for one weight. 4 to 20 MB made no difference; the bytes must not be evicted from the L2 cache before use.
MAX_BYTES = 8 * 2**20
MAX_PART_OF_L2 = 1 / 8

Function = Callable[..., Any]


def _weight_of(name: str, args: tuple[Any, ...]) -> Tensor | None:
    """The weight that a call multiplies with, as it lies in memory; `None` for other calls and other weights.

    Args:
        name: Of the function that is called: `linear`, or an operator with its namespace and overload.
        args: Its arguments.
    """
    if name == "linear" and len(args) > 1:
        return _stored(args[1])
    if name in ("aten._weight_int4pack_mm.default", f"{torch_ops.name}.packed_linear.default"):
        return _stored(args[1])
    if name == "gemlite.forward_functional.default":
        return _stored(args[2][0])  # the codes; scales and zeros follow
    if name in ("humming.launch_kernel.default", "humming.launch_kernel.out"):
        return _stored(args[2])
    return None


def _stored(weight: Any) -> Tensor | None:
    """A plain weight itself, or the largest tensor that a quantised one wraps; `None` if there is no such thing."""
    if type(weight) in (Tensor, nn.Parameter):
        plain: Tensor = weight
        return plain
    # Others may compute their weight when they are asked for it. Those that wrap tensors name them. Weights that are
    # placed on several GPUs are left alone: nothing was measured there.
    if not hasattr(weight, "__tensor_flatten__") or hasattr(weight, "placements"):
        return None
    parts = [_stored(getattr(weight, name)) for name in weight.__tensor_flatten__()[0]]
    return max((part for part in parts if part is not None), key=lambda part: part.nbytes, default=None)


class _Watch(TorchFunctionMode):
    """Calls functions with the weight of each linear layer that has run, and when attention over our cache has run."""

    def __init__(self, see_linear: Callable[[Tensor], None], see_attention: Callable[[], None]) -> None:
        super().__init__()
        self._see_linear = see_linear
        self._see_attention = see_attention

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not torch.compiler.is_compiling():
            if func is torch_ops.decode.default:
                self._see_attention()
            elif (weight := _weight_of("linear" if func is functional.linear else str(func), args)) is not None:
                self._see_linear(weight)
        return result


class Prefetch:
    """The weights that a step on one GPU prefetches. They are found in one run and recorded in the graph."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # The weight of the linear layer after each attention call, by the address of the weight before it. Weak values:
        # weights that the model has replaced must not stay alive.
        self.behind: MutableMapping[int, Tensor] = WeakValueDictionary()

    def noted(self) -> contextlib.AbstractContextManager[Any]:
        """A context manager: run a step in it to find which weights come after attention."""
        before: Tensor | None = None
        is_between = False

        def see_linear(weight: Tensor) -> None:
            nonlocal before, is_between
            if is_between and before is not None and weight.is_contiguous():
                self.behind[before.data_ptr()] = weight
            before, is_between = weight, False

        def see_attention() -> None:
            nonlocal is_between
            is_between = True

        return _Watch(see_linear, see_attention)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """A context manager: the CUDA graph that is captured in it gets the prefetch branch."""
        stream, branch = torch.cuda.current_stream(self._device), torch.cuda.Stream(self._device)
        l2_bytes: int = torch.cuda.get_device_properties(self._device).L2_cache_size
        most = min(MAX_BYTES, int(l2_bytes * MAX_PART_OF_L2))
        is_joined = True

        def fetch(before: Tensor) -> None:
            nonlocal is_joined
            weight = self.behind.get(before.data_ptr())
            if weight is not None and weight.device == self._device:
                branch.wait_stream(stream)
                is_joined = False
                with torch.cuda.stream(branch):
                    torch_ops.prefetch(weight, min(weight.nbytes, most))

        with _Watch(fetch, lambda: None):
            yield
        if not is_joined:
            stream.wait_stream(branch)  # every branch of a graph must join again
