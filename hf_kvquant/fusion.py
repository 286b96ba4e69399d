"""A decode step in fewer kernels: what lies between linear layers, fused while a step is captured, with the same bits.

Run as it is, a step of Llama launches some thirty small kernels a layer: eight for each RMSNorm, ten for the rotary
embedding, two for the product within an MLP, two for residual additions. While `capture.py` runs and records a step,
`fused` has each of these done by one kernel, additions by that of the norm behind them, and then puts everything back.
It replaces forwards of instances and `apply_rotary_pos_emb` in the globals of the model's own code, and watches
additions. Captured tokens stay those of uncaptured steps, because nothing is replaced on trust: the run before the
recording compares each replacement with what it replaces, on the step's own tensors and on random ones laid out like
them, in their dtype and in float32, which shows what rounding to 16 bits would hide. Whatever differs in one bit stays
as it is, and the log says what became of each (level INFO). Modules with hooks, with several parameters or with
forwards of their own are left alone, and so is everything under autograd and autocast.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from . import ops
from ._ops import ops as torch_ops

logger = logging.getLogger(__name__)

Function = Callable[..., Any]

ROTARY = "apply_rotary_pos_emb"
_MLP = ("gate_proj", "up_proj", "down_proj", "act_fn")
_EPS = ("variance_epsilon", "eps")
# Of the random numbers that replacements are tried on.
_MAGNITUDES = (1.0, 1e-3, 100.0)
_ALIGNMENT = 16  # bytes: what kernels load at a time

# Functions in the globals of a module are everybody's: one step at a time may replace them.
_lock = threading.RLock()


@contextlib.contextmanager
def fused(model: nn.Module) -> Iterator[None]:
    """Fuse what can be fused with the same bits, for the length of a `with` block.

    What the first block finds out for a model and tensors of some shape, which waits for the device, later ones know;
    where tensors are new while a graph is recorded, nothing is replaced.

    Args:
        model: On one device. Other threads that use the same modeling code go on using its own functions.
    """
    device = next(model.parameters()).device
    if device.type == "cuda" and not ops.serves_gpu(device.index or 0):
        yield
        return
    with _lock, contextlib.ExitStack() as stack:
        chooser = _choosers.setdefault(model, _Chooser())
        additions = _Additions(chooser)
        for module in model.modules():
            if _is_norm(module):
                stack.enter_context(_forward(module, functools.partial(_norm, chooser, additions, module)))
            elif _is_mlp(module):
                stack.enter_context(_forward(module, functools.partial(_mlp, chooser, module)))
        for namespace in _namespaces(model):
            original = vars(namespace)[ROTARY]
            stack.callback(setattr, namespace, ROTARY, original)
            setattr(namespace, ROTARY, functools.partial(_rotary, chooser, original, threading.get_ident()))
        stack.enter_context(additions)
        yield


@contextlib.contextmanager
def _forward(module: nn.Module, function: Function) -> Iterator[None]:
    """A forward of a module's own, in place of its class's."""
    module.__dict__["forward"] = function
    try:
        yield
    finally:
        del module.__dict__["forward"]


# --- choosing ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Trial:
    """What decides whether something is replaced.

    Attributes:
        inputs: Of the original and of the candidates, as in this step.
        original: What may be replaced.
        candidates: What may do it, in order, and how the log calls it.
        draws: Gives further inputs.
    """

    inputs: tuple[Tensor, ...]
    original: Function
    candidates: Mapping[str, Function]
    draws: Callable[[], Iterator[tuple[Tensor, ...]]]


class _Chooser:
    """Which function serves which tensors, for one model.

    Attributes:
        norms: By the number of an addition within a step: the norm that takes its sum.
        is_trying: Whether what runs is no part of a step.
    """

    def __init__(self) -> None:
        self.norms: dict[int, Any] = {}
        self.is_trying = False
        self._choices: dict[Hashable, Function | None] = {}
        self._said: set[str] = set()

    def choose(self, name: str, key: Hashable, tensors: Sequence[Tensor], trial: Callable[[], _Trial]) -> Any:
        """The first candidate that gives the bits of the original, or `None`.

        Args:
            name: Of what may be replaced, for the log.
            key: What the choice depends on besides how tensors are laid out.
            tensors: Of this call.
            trial: Called where the choice is not known yet.
        """
        device = tensors[0].device
        if torch.is_grad_enabled() or torch.is_autocast_enabled(device.type):
            return None
        if any(type(tensor) not in (Tensor, nn.Parameter) for tensor in tensors):
            return None
        key = (name, key, tuple(_layout_of(tensor) for tensor in tensors))
        if key not in self._choices:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return None
            shapes = " ".join(str(list(tensor.shape)) for tensor in tensors)
            what = f"{name} of {shapes} {str(tensors[0].dtype).removeprefix('torch.')}"
            self.is_trying = True
            try:
                self._choices[key] = self._try(what, trial())
            finally:
                self.is_trying = False
        return self._choices[key]

    def _try(self, what: str, trial: _Trial) -> Function | None:
        for description, candidate in trial.candidates.items():
            reason = _why_not(candidate, trial)
            if reason is None:
                self._say(f"captured steps run {what} as {description}.")
                return candidate
            self._say(f"captured steps do not run {what} as {description}: {reason}")
        return None

    def _say(self, line: str) -> None:
        if line not in self._said:  # layers are alike
            self._said.add(line)
            logger.info(line)


_choosers: WeakKeyDictionary[nn.Module, _Chooser] = WeakKeyDictionary()


def _layout_of(tensor: Tensor) -> Hashable:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % _ALIGNMENT


def _why_not(candidate: Function, trial: _Trial) -> str | None:
    """Why a candidate cannot take the place of the original."""
    for inputs in (trial.inputs, *trial.draws()):
        try:
            if not _is_same(candidate(*inputs), trial.original(*inputs)):
                return "its bits are others."
        except Exception as error:  # a form that the kernel refuses, or code of a model that is fed what it never is
            return f"{type(error).__name__}: {error}"
    return None


def _is_same(actual: Any, expected: Any) -> bool:
    """Whether tensors, or tuples of them, are equal bit for bit and laid out alike. NaNs are equal."""
    if isinstance(expected, tuple):
        return len(actual) == len(expected) and all(map(_is_same, actual, expected))
    if not isinstance(expected, Tensor) or _form_of(actual) != _form_of(expected):
        return False
    bits = torch.int32 if expected.element_size() == 4 else torch.int16
    x, y = (torch.where(each.isnan(), torch.nan, each).view(bits) for each in (actual, expected))
    return torch.equal(x, y)


def _form_of(tensor: Tensor) -> Hashable:
    # The stride of an axis of size 1 says nothing.
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return tensor.shape, tuple(strides), tensor.dtype


def _random(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Random tensors laid out like these, of several magnitudes, in their dtype and in float32."""
    generator = torch.Generator(tensors[0].device).manual_seed(0)  # not the one that sampling draws from
    for dtype in {tensors[0].dtype, torch.float32}:
        for magnitude in _MAGNITUDES:
            empty = [torch.empty_like(tensor, dtype=dtype, requires_grad=False) for tensor in tensors]
            yield tuple(x.normal_(generator=generator).mul_(magnitude) for x in empty)


def _is_plain(module: nn.Module) -> bool:
    """Whether calling a module is calling the forward of its class."""
    return (
        "forward" not in vars(module)
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and module._compiled_call_impl is None
    )


def _identity(module: nn.Module) -> Hashable:
    """What tells a module from others of its model that compute something else."""
    simple = (bool, int, float, str, type(None))
    attributes = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    attributes.pop("forward", None)
    values = (value if isinstance(value, simple) else id(value) for value in attributes.values())
    return type(module), tuple(attributes), tuple(values)


# --- RMSNorm ----------------------------------------------------------------------------------------------------------


def _is_norm(module: nn.Module) -> bool:
    """Whether a module may be an RMSNorm: a weight for every channel, an epsilon, and nothing else."""
    return (
        _is_plain(module)
        and set(module._parameters) == {"weight"}
        and type(module.weight) is nn.Parameter
        and module.weight.ndim == 1
        and not module._buffers
        and not module._modules
        and sum(isinstance(vars(module).get(name), float) for name in _EPS) == 1
    )


def _norm(chooser: _Chooser, additions: _Additions, module: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of an RMSNorm."""
    original = functools.partial(type(module).forward, module)
    if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
        return original(*args, **kwargs)
    x, weight = args[0], module.weight
    normed = additions.normed(module, x)
    if normed is not None:
        return normed
    eps, rms_norm = _eps_of(module), torch_ops.rms_norm

    def trial() -> _Trial:
        candidates = {
            "one kernel": lambda x, weight: rms_norm(x, weight, None, eps),
            "one kernel behind torch's mean": lambda x, weight: rms_norm(x, weight, _mean_of_squares(x), eps),
        }
        original = functools.partial(_norm_with, module)
        return _Trial((x, weight), original, candidates, lambda: _random(x, weight))

    function = chooser.choose(type(module).__name__, _identity(module), (x, weight), trial)
    return original(x) if function is None else function(x, weight)


def _eps_of(module: nn.Module) -> float:
    eps: float = next(vars(module)[name] for name in _EPS if name in vars(module))
    return eps


def _norm_with(module: nn.Module, x: Tensor, weight: Tensor) -> Any:
    """What the class of a norm does, with another weight."""
    twin = copy.copy(module)
    twin.__dict__["_parameters"] = {"weight": weight}
    return type(module).forward(twin, x)


def _mean_of_squares(x: Tensor) -> Tensor:
    return x.float().pow(2).mean(-1, keepdim=True)


@dataclasses.dataclass
class _Addition:
    """One of a step.

    Attributes:
        number: Of those in the step before it.
        addends: Two.
        total: Their sum.
        version: Of the sum when it was new.
        norm: Whose output for the sum is known already.
        normed: That output.
    """

    number: int
    addends: tuple[Tensor, Tensor]
    total: Tensor
    version: int
    norm: nn.Module | None = None
    normed: Tensor | None = None


class _Additions(TorchFunctionMode):
    """Has a sum computed along with the norm that takes it, which is what residual connections come to.

    At an addition it is not known what becomes of the sum, so the run before the recording takes notes. They are hints:
    a norm gets what was computed ahead if it comes with that very sum, untouched since; else it computes by itself, and
    the note is crossed out.
    """

    def __init__(self, chooser: _Chooser) -> None:
        super().__init__()
        self._chooser = chooser
        self._count = 0
        self._last: _Addition | None = None

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_ours = func is torch.Tensor.add and not kwargs and _are_alike(*args)
        # A tensor made in inference mode does not know whether it was changed.
        is_unknown = torch.compiler.is_compiling() or torch.is_inference_mode_enabled()
        if not is_ours or is_unknown or self._chooser.is_trying:
            return func(*args, **(kwargs or {}))
        if self._last is not None and self._last.normed is not None:
            del self._chooser.norms[self._last.number]  # nobody came for it
        self._last = self._add(self._count, *args)
        self._count += 1
        return self._last.total

    def _add(self, number: int, x: Tensor, other: Tensor) -> _Addition:
        norm = self._chooser.norms.get(number)
        function = None if norm is None else self._function(norm, x, other)
        if norm is not None and function is not None:
            total, normed = function(x, other, norm.weight)
            return _Addition(number, (x, other), total, total._version, norm, normed)
        total = torch.add(x, other)
        return _Addition(number, (x, other), total, total._version)

    def _function(self, norm: Any, x: Tensor, other: Tensor) -> Function | None:
        eps, add_rms_norm = _eps_of(norm), torch_ops.add_rms_norm

        def original(x: Tensor, other: Tensor, weight: Tensor) -> tuple[Tensor, Any]:
            total = x + other
            return total, _norm_with(norm, total, weight)

        def trial() -> _Trial:
            candidates = {"one kernel with it": lambda x, other, weight: add_rms_norm(x, other, weight, eps)}
            return _Trial((x, other, norm.weight), original, candidates, lambda: _random(x, other, norm.weight))

        name = f"the addition before {type(norm).__name__}"
        function: Function | None = self._chooser.choose(name, _identity(norm), (x, other, norm.weight), trial)
        return function

    def normed(self, module: nn.Module, x: Tensor) -> Tensor | None:
        """What a norm gives for `x`, where it has been computed along with `x`."""
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
    if len(args) != 2 or any(type(each) is not Tensor for each in args):
        return False
    return bool(args[0].shape == args[1].shape and args[0].dtype == args[1].dtype)


# --- gated MLPs -------------------------------------------------------------------------------------------------------


def _is_mlp(module: nn.Module) -> bool:
    """Whether a module may be down(act(gate(x)) · up(x))."""
    children = dict(module.named_children())
    return (
        _is_plain(module)
        and set(children) == set(_MLP)
        and all(_is_plain(child) for child in children.values())
        and not any(True for _ in children["act_fn"].parameters())
        and not module._parameters
        and not module._buffers
    )


def _mlp(chooser: _Chooser, module: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a gated MLP."""
    original = functools.partial(type(module).forward, module)
    if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
        return original(*args, **kwargs)
    x = args[0]

    def trial() -> _Trial:
        gate, up = module.gate_proj(x), module.up_proj(x)
        candidates = {"one kernel between its linear layers": torch_ops.silu_mul}
        product = functools.partial(_product, module, x)
        return _Trial((gate, up), product, candidates, lambda: _mlp_draws(gate, up))

    function = chooser.choose(type(module).__name__, (_identity(module), _identity(module.act_fn)), (x,), trial)
    if function is None:
        return original(x)
    return module.down_proj(function(module.gate_proj(x), module.up_proj(x)))


def _product(module: Any, x: Tensor, gate: Tensor, up: Tensor) -> Any:
    """What the forward of a gated MLP feeds its last layer where its first ones, fed `x`, give `gate` and `up`.

    `None` where it does anything else than that.
    """
    end = torch.empty_like(x)
    fed: list[tuple[str, Any]] = []

    def layer(name: str, result: Tensor, *inputs: Any, **options: Any) -> Tensor:
        fed.append((name, inputs[0] if len(inputs) == 1 and not options else None))
        return result

    with contextlib.ExitStack() as stack:
        for name, result in (("gate_proj", gate), ("up_proj", up), ("down_proj", end)):
            stack.enter_context(_forward(getattr(module, name), functools.partial(layer, name, result)))
        output = type(module).forward(module, x)
    inputs = dict(fed)
    is_known = len(fed) == len(inputs) == 3 and inputs["gate_proj"] is x and inputs["up_proj"] is x and output is end
    return inputs["down_proj"] if is_known else None


def _mlp_draws(gate: Tensor, up: Tensor) -> Iterator[tuple[Tensor, ...]]:
    yield from _random(gate, up)
    if gate.element_size() == 2:  # every number there is
        numbers = torch.arange(-(2**15), 2**15, device=gate.device).to(torch.int16).view(gate.dtype)
        yield numbers, torch.ones_like(numbers)


# --- rotary embedding -------------------------------------------------------------------------------------------------


def _namespaces(model: nn.Module) -> list[ModuleType]:
    """The modules of code whose functions a model's forwards call, where these have a rotary embedding."""
    names = {base.__module__ for module in model.modules() for base in type(module).__mro__}
    found = [sys.modules[name] for name in sorted(names) if name in sys.modules]
    return [namespace for namespace in found if callable(vars(namespace).get(ROTARY))]


def _rotary(chooser: _Chooser, original: Function, thread: int, *args: Any, **kwargs: Any) -> Any:
    """`apply_rotary_pos_emb`, for one thread; others get the original."""
    is_known = len(args) == 4 and not kwargs and all(isinstance(each, Tensor) for each in args)
    if not is_known or threading.get_ident() != thread:
        return original(*args, **kwargs)

    def trial() -> _Trial:
        return _Trial(args, original, {"one kernel": torch_ops.rotary}, lambda: _random(*args))

    function = chooser.choose(ROTARY, original, args, trial)
    return (original if function is None else function)(*args)
