"""Fuses the small kernels between linear layers while a decode step is captured, with the same results.

A decode step of Llama launches some thirty small kernels per layer: eight for each RMSNorm, ten for the rotary
embedding, two for the product in the MLP, two for residual additions. While a step is recorded, `fused` replaces each
of these by one kernel (an addition joins the kernel of the norm after it): it replaces the forwards of instances and
`apply_rotary_pos_emb` in the globals of the model's own code, and intercepts additions. The run before the recording
verifies each replacement (`trials.py`). `state_steps.py`, `state_chunks.py` and `gates.py` do the same for layers with
states, up to the order in which sums are added. Modules with hooks or with their own forwards are never replaced, nor
is anything under autograd or autocast. An MLP's linear layers may have their own forwards, as in libraries for
quantised weights. `packed_linear.py` has the linear layers that cost an extra kernel.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .. import ops
from .._ops import ops as torch_ops
from ..state import notes_on
from . import gates, state_chunks, state_steps
from .instances import identity, is_plain, only_calls_forward, replaced
from .packed_linear import is_tile_packed, packed_linear
from .trials import Chooser, Function, random_like

ROTARY = "apply_rotary_pos_emb"
_MLP = ("gate_proj", "up_proj", "down_proj", "act_fn")
_EPS = ("variance_epsilon", "eps")
# What takes gates that are not computed yet.
_GATED: dict[str, Function] = {
    state_steps.DELTA: state_steps.delta_step,
    state_chunks.DELTA_CHUNKS: state_chunks.delta_chunks,
}

# All threads share the functions in a module's globals, so only one step at a time may replace them.
_lock = threading.RLock()


@contextlib.contextmanager
def fused(model: nn.Module) -> Iterator[None]:
    """Fuse whatever gives the same bits in a model on one device, for the duration of a `with` block.

    The first block with a model and tensor layout compares results, which synchronises with the device; later blocks
    reuse the outcome. Tensors of a new layout are left alone while a graph is recorded. Other threads that use the same
    modeling code keep its original functions.
    """
    device = next(model.parameters()).device
    if device.type == "cuda" and not ops.serves_gpu(device.index or 0):
        yield
        return
    with _lock, contextlib.ExitStack() as stack:
        notes = notes_on(model)
        notes.fusion = chooser = notes.fusion or Chooser()
        additions = _Additions(chooser)
        modules = list(model.modules())
        for module in modules:
            fuse: Callable[..., Tensor | None]
            count = 1
            if _is_norm(module) and _is_gated(type(module).forward):
                fuse, count = functools.partial(_gated_norm, chooser, module), 2
            elif _is_norm(module):
                fuse = functools.partial(_norm, chooser, additions, module)
            elif _is_mlp(module):
                fuse = functools.partial(_mlp, chooser, module)
            elif is_plain(module) and is_tile_packed(module):
                fuse = functools.partial(packed_linear, chooser, module)
            else:
                continue
            stack.enter_context(replaced(module, forward=functools.partial(_fused_forward, module, fuse, count)))
        for layer in filter(gates.has_gates, modules):
            stack.enter_context(gates.deferred(layer, functools.partial(state_steps.takes_slots, layer, _GATED)))
        functions = {ROTARY: _rotary, **state_steps.REPLACED, **state_chunks.REPLACED}
        _replace(stack, chooser, _namespaces(modules), functions)
        stack.enter_context(additions)
        yield


@contextlib.contextmanager
def fused_prompts(model: nn.Module) -> Iterator[None]:
    """Like `fused`, for prompts of `generate`: only what layers with states do with many tokens.

    The rest takes its time from linear layers and attention there, and would be tried anew for each length.
    """
    device, namespaces = next(model.parameters()).device, _namespaces(list(model.modules()))
    has_states = any(name in vars(namespace) for namespace in namespaces for name in state_chunks.REPLACED)
    if not has_states or device.type != "cuda" or not ops.serves_gpu(device.index or 0):
        yield
        return
    with _lock, contextlib.ExitStack() as stack:
        notes = notes_on(model)
        notes.fusion = chooser = notes.fusion or Chooser()
        _replace(stack, chooser, namespaces, state_chunks.REPLACED)
        yield


def _namespaces(modules: list[nn.Module]) -> list[ModuleType]:
    """The Python modules that define the classes of a model's modules."""
    names = {base.__module__ for kind in {type(module) for module in modules} for base in kind.__mro__}
    return [sys.modules[each] for each in sorted(names) if each in sys.modules]


def _replace(
    stack: contextlib.ExitStack, chooser: Chooser, namespaces: list[ModuleType], functions: Mapping[str, Function]
) -> None:
    """Replace functions of these names in the Python modules of a model's code, for this thread, until `stack` ends."""
    for namespace in namespaces:
        for name, function in functions.items():
            original = vars(namespace).get(name)
            if callable(original):
                stack.callback(setattr, namespace, name, original)
                setattr(namespace, name, functools.partial(function, chooser, original, threading.get_ident()))


def _fused_forward(module: Any, fuse: Callable[..., Tensor | None], count: int, *args: Any, **kwargs: Any) -> Any:
    """The replaced forward of a module: `fuse` for `count` tensors, unless it returns `None`."""
    is_known = len(args) == count and not kwargs and all(isinstance(each, Tensor) for each in args)
    out = fuse(*args) if is_known else None
    return type(module).forward(module, *args, **kwargs) if out is None else out


def _is_norm(module: nn.Module) -> bool:
    """Whether a module may be an RMSNorm: it has a weight per channel, an epsilon, and nothing else."""
    return (
        is_plain(module)
        and set(module._parameters) == {"weight"}
        and type(module.weight) is nn.Parameter
        and module.weight.ndim == 1
        and not module._buffers
        and not module._modules
        and sum(isinstance(vars(module).get(name), float) for name in _EPS) == 1
    )


@functools.cache
def _is_gated(forward: Function) -> bool:
    """Whether the forward of a norm takes a gate, too."""
    return "gate" in inspect.signature(forward).parameters


def _norm(chooser: Chooser, additions: _Additions, module: Any, x: Tensor) -> Any:
    """The output of an RMSNorm, or `None` if its own forward has to compute it."""
    weight = module.weight
    normed = additions.normed(module, x)
    if normed is not None:
        return normed
    original = functools.partial(_norm_with, module)
    function = chooser.choose(type(module).__name__, identity(module), (x, weight), original, _norms(_eps_of(module)))
    return None if function is None else function(x, weight)


def _gated_norm(chooser: Chooser, module: Any, x: Tensor, gate: Tensor) -> Any:
    """The output of an RMSNorm with a gate, or `None` if its own forward has to compute it."""

    def original(x: Tensor, weight: Tensor, gate: Tensor) -> Any:
        return _norm_with(module, x, weight, gate)

    tensors = x, module.weight, gate
    function = chooser.choose(type(module).__name__, identity(module), tensors, original, _norms(_eps_of(module)))
    return None if function is None else function(*tensors)


def _norms(eps: float) -> dict[str, Function]:
    """What a norm may be, of `(x, weight)` or `(x, weight, gate)`."""
    rms_norm = torch_ops.rms_norm

    def after_mean(x: Tensor, weight: Tensor, gate: Tensor | None = None, is_zero_centered: bool = False) -> Any:
        return rms_norm(x, weight, x.float().pow(2).mean(-1, keepdim=True), eps, is_zero_centered, gate)

    return {
        "one kernel": lambda x, weight, gate=None: rms_norm(x, weight, None, eps, False, gate),
        "one kernel after torch's mean": after_mean,
        "one kernel with 1 + weight": lambda x, weight, gate=None: rms_norm(x, weight, None, eps, True, gate),
        "one kernel with 1 + weight after torch's mean": functools.partial(after_mean, is_zero_centered=True),
    }


def _eps_of(module: nn.Module) -> float:
    eps: float = next(vars(module)[name] for name in _EPS if name in vars(module))
    return eps


def _norm_with(module: nn.Module, x: Tensor, weight: Tensor, *gate: Tensor) -> Any:
    """The output of a norm's original forward, with another weight."""
    twin = copy.copy(module)
    twin.__dict__["_parameters"] = {"weight": weight}
    return type(module).forward(twin, x, *gate)


@dataclasses.dataclass
class _Addition:
    number: int  # how many additions came before it in the step
    addends: tuple[Tensor, Tensor]
    total: Tensor
    version: int  # the version counter of the sum when it was made
    norm: nn.Module | None = None  # the norm whose output for the sum is already computed
    normed: Tensor | None = None


class _Additions(TorchFunctionMode):
    """Computes a residual addition and the norm after it in one kernel.

    An addition does not know which module takes its sum, so the run before the recording notes it. A note is only a
    hint: a norm gets the output computed ahead only if its input is that very sum, unmodified. Otherwise it computes
    the output itself and the note is deleted.
    """

    def __init__(self, chooser: Chooser) -> None:
        super().__init__()
        self._chooser = chooser
        self._count = 0
        self._last: _Addition | None = None

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_ours = func is torch.Tensor.add and not kwargs and _are_alike(*args)
        # Tensors made in inference mode have no version counter, so changes to them cannot be noticed.
        is_unknown = torch.compiler.is_compiling() or torch.is_inference_mode_enabled()
        if not is_ours or is_unknown or self._chooser.is_trying:
            return func(*args, **(kwargs or {}))
        if self._last is not None and self._last.normed is not None:
            del self._chooser.norms[self._last.number]  # no norm took the output
        norm = self._chooser.norms.get(self._count)
        if norm is None or (function := self._function(norm, *args)) is None:
            total, norm, normed = torch.add(*args), None, None
        else:
            total, normed = function(*args, norm.weight)
        self._last = _Addition(self._count, args, total, total._version, norm, normed)
        self._count += 1
        return total

    def _function(self, norm: Any, x: Tensor, other: Tensor) -> Function | None:
        eps, add_rms_norm = _eps_of(norm), torch_ops.add_rms_norm

        def original(x: Tensor, other: Tensor, weight: Tensor) -> tuple[Tensor, Any]:
            total = x + other
            return total, _norm_with(norm, total, weight)

        candidates: dict[str, Function] = {
            "one kernel with the norm": lambda x, other, weight: add_rms_norm(x, other, weight, eps),
            "one kernel with the norm's 1 + weight": lambda x, other, weight: add_rms_norm(x, other, weight, eps, True),
        }
        name = f"the addition before {type(norm).__name__}"
        return self._chooser.choose(name, identity(norm), (x, other, norm.weight), original, candidates)

    def normed(self, module: nn.Module, x: Tensor) -> Tensor | None:
        """The output of a norm for `x` if it was computed together with `x`, else `None`."""
        last, self._last = self._last, None
        if last is None:
            return None
        if last.total is not x or x._version != last.version:
            if last.normed is not None:
                del self._chooser.norms[last.number]
            return None
        if last.norm is module:
            return last.normed
        if self._function(module, *last.addends) is not None:
            self._chooser.norms[last.number] = module
        return None


def _are_alike(*args: Any) -> bool:
    """Whether these are two plain tensors of one shape and dtype."""
    are_two = len(args) == 2 and all(type(each) is Tensor for each in args)
    return are_two and (args[0].shape, args[0].dtype) == (args[1].shape, args[1].dtype)


def _is_mlp(module: nn.Module) -> bool:
    """Whether a module may be down(act(gate(x)) · up(x))."""
    children = dict(module.named_children())
    return (
        is_plain(module)
        and set(children) == set(_MLP)
        and all(map(only_calls_forward, children.values()))
        and is_plain(children["act_fn"])
        and not any(True for _ in children["act_fn"].parameters())
        and not module._parameters
        and not module._buffers
    )


def _mlp(chooser: Chooser, module: Any, x: Tensor) -> Any:
    """The output of a gated MLP, or `None` if its own forward has to compute it."""
    function = chooser.choose(
        type(module).__name__,
        (identity(module), identity(module.act_fn)),
        (x,),
        functools.partial(_product, module, x),
        {"one kernel between its linear layers": torch_ops.silu_mul},
        inputs=lambda: (module.gate_proj(x), module.up_proj(x)),
        draws=_mlp_draws,
    )
    return None if function is None else module.down_proj(function(module.gate_proj(x), module.up_proj(x)))


def _product(module: Any, x: Tensor, gate: Tensor, up: Tensor) -> Any:
    """What a gated MLP passes to `down_proj`, given the outputs `gate` and `up`; `None` if it does anything else."""
    end = torch.empty_like(x)
    fed: list[tuple[str, Any]] = []

    def layer(name: str, result: Tensor, *inputs: Any, **options: Any) -> Tensor:
        fed.append((name, inputs[0] if len(inputs) == 1 and not options else None))
        return result

    with contextlib.ExitStack() as stack:
        for name, result in (("gate_proj", gate), ("up_proj", up), ("down_proj", end)):
            stack.enter_context(replaced(getattr(module, name), forward=functools.partial(layer, name, result)))
        output = type(module).forward(module, x)
    inputs = dict(fed)
    is_known = len(fed) == len(inputs) == 3 and inputs["gate_proj"] is x and inputs["up_proj"] is x and output is end
    return inputs["down_proj"] if is_known else None


def _mlp_draws(gate: Tensor, up: Tensor) -> Iterator[tuple[Tensor, ...]]:
    yield from random_like(gate, up)
    if gate.element_size() == 2:  # every 16-bit number
        numbers = torch.arange(-(2**15), 2**15, device=gate.device).to(torch.int16).view(gate.dtype)
        yield numbers, torch.ones_like(numbers)


def _rotary(chooser: Chooser, original: Function, thread: int, *args: Any, **kwargs: Any) -> Any:
    """The replaced `apply_rotary_pos_emb`. Threads other than `thread` get the original."""
    is_known = len(args) == 4 and not kwargs and all(isinstance(each, Tensor) for each in args)
    if not is_known or threading.get_ident() != thread:
        return original(*args, **kwargs)
    function = chooser.choose(ROTARY, original, args, original, {"one kernel": torch_ops.rotary})
    return (original if function is None else function)(*args)
