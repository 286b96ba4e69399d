"""Decays and betas of the gated delta rule by one kernel, while functions are replaced.

Models of Qwen3.5's kind make them of two small projections by eleven kernels, in the middle of a forward that has no
function of its own for it. So `deferred` puts a `Gate` in place of each projection's output and of `A_log`: a tensor
that is computed when somebody needs it. Elementwise functions of gates are gates again. The replaced delta rule asks
for `computed` ones. One kernel (csrc/cuda/fused/delta_gates.cu) computes them if a trial shows that it gives what the
model's own functions do, up to the order of sums. All other code gets tensors, computed as the model would have.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._ops import ops as torch_ops
from .instances import identity, is_plain, only_calls_forward, replaced
from .trials import Chooser, Function, is_close

_A_LOG, _DT_BIAS = "A_log", "dt_bias"
_BETA_FACTORS = (1.0, 2.0)  # of models; 2 allows negative eigenvalues
_TRIED = 4  # sequences, or tokens, of a trial
# What a model does with gates, by the names of Tensor's methods and of functions. The rest computes them first.
_ELEMENTWISE = frozenset("float sigmoid softplus exp neg add mul".split())
_OPERATORS = frozenset("__neg__ __add__ __radd__ __mul__ __rmul__".split())
_OTHER_OPERATORS = "__sub__ __rsub__ __truediv__ __rtruediv__ __pow__ __getitem__ __len__ __iter__".split()


@dataclasses.dataclass(frozen=True)
class _Layer:
    """A layer whose gates are deferred, and the key of what it computes."""

    module: nn.Module
    key: Hashable


class Gate:
    """A tensor that is not computed yet: a projection's output, a parameter, or elementwise functions of them.

    Attributes:
        layer: Whose.
        names: Of the projections and parameters that it is made of.
        x: What the projection takes, `[batch, tokens, inputs]`; `None` for a parameter.
        at: Computes it for another `x`.
    """

    def __init__(self, layer: _Layer, names: frozenset[str], x: Tensor | None, at: Callable[[Any], Tensor]) -> None:
        self.layer, self.names, self.x, self.at = layer, names, x, at
        self._tensor: Tensor | None = None

    @property
    def is_computed(self) -> bool:
        """Whether somebody has its tensor."""
        return self._tensor is not None

    @property
    def tensor(self) -> Tensor:
        """Computed as the model would."""
        if self._tensor is None:
            self._tensor = self.at(self.x)
        return self._tensor

    def __getattr__(self, name: str) -> Any:
        if name in _ELEMENTWISE:
            return functools.partial(_applied, getattr(Tensor, name), self)
        return getattr(self.tensor, name)

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.__name__.removeprefix("__").removesuffix("__")  # `add_` changes a tensor in place
        apply = _applied if name in _ELEMENTWISE else _called
        return apply(func, *args, **(kwargs or {}))


def _applied(func: Function, *args: Any, **kwargs: Any) -> Any:
    """The gate of an elementwise function of gates of one layer and input, or of numbers and tensors besides."""
    args = tuple(map(_settled, args))
    gates = [each for each in args if isinstance(each, Gate)]
    inputs = {id(each.x): each.x for each in gates if each.x is not None}
    if not gates or len(inputs) > 1 or any(each.layer is not gates[0].layer for each in gates):
        return _called(func, *args, **kwargs)

    def at(x: Any) -> Any:
        return func(*(each.at(x) if isinstance(each, Gate) else each for each in args), **kwargs)

    names = frozenset[str]().union(*(each.names for each in gates))
    return Gate(gates[0].layer, names, next(iter(inputs.values()), None), at)


def _settled(argument: Any) -> Any:
    """Once a gate has been computed, somebody may have changed its tensor in place: from then on, it is that tensor."""
    return argument.tensor if isinstance(argument, Gate) and argument.is_computed else argument


def _called(func: Function, *args: Any, **kwargs: Any) -> Any:
    """The result of a function of tensors."""
    return func(*map(_tensors_of, args), **{name: _tensors_of(each) for name, each in kwargs.items()})


def _tensors_of(argument: Any) -> Any:
    if isinstance(argument, Gate):
        return argument.tensor
    if isinstance(argument, (list, tuple)):
        return type(argument)(map(_tensors_of, argument))
    return argument


def _operator(name: str) -> Function:
    apply = _applied if name in _OPERATORS else _called
    return lambda gate, *args: apply(getattr(Tensor, name), gate, *args)


for _name in (*_OPERATORS, *_OTHER_OPERATORS):  # Python looks for these in the class alone
    setattr(Gate, _name, _operator(_name))


def _projections(module: nn.Module) -> dict[str, Any]:
    """The projections of a layer that may be those of its gates: two, with an output for each of its heads."""
    numbers = [module._parameters.get(name) for name in (_A_LOG, _DT_BIAS)]
    sizes = {each.shape for each in numbers if type(each) is nn.Parameter and each.ndim == 1}
    found: dict[str, Any] = {
        name: child
        for name, child in module.named_children()
        if type(child) is nn.Linear and {child.weight.shape[:1]} == sizes and child.bias is None
    }
    are_plain = all(is_plain(child) and type(child.weight) is nn.Parameter for child in found.values())
    return found if len(found) == 2 and are_plain and only_calls_forward(module) else {}


def has_gates(module: nn.Module) -> bool:
    """Whether the gates of a module can be deferred."""
    return bool(_projections(module))


@contextlib.contextmanager
def deferred(module: nn.Module, is_served: Callable[[], bool]) -> Iterator[None]:
    """Within it, the projections of a module's gates and its `A_log` are gates, where `is_served()`."""
    layer = _Layer(module, identity(module, "layer_idx"))  # all layers share a trial
    a_log: Any = module._parameters[_A_LOG]

    def project(name: str, child: nn.Linear, *args: Any, **kwargs: Any) -> Any:
        forward = functools.partial(type(child).forward, child)
        is_known = len(args) == 1 and not kwargs and type(args[0]) is Tensor and args[0].ndim == 3
        if not is_known or not is_served():
            return forward(*args, **kwargs)
        return Gate(layer, frozenset({name}), args[0], forward)

    with contextlib.ExitStack() as stack:
        for name, child in _projections(module).items():
            stack.enter_context(replaced(child, forward=functools.partial(project, name, child)))
        stack.enter_context(replaced(module, **{_A_LOG: Gate(layer, frozenset({_A_LOG}), None, lambda _: a_log)}))
        yield


def computed(chooser: Chooser, g: Any, beta: Any) -> tuple[Any, Any]:
    """The tensors of the gates `g` and `beta`, `[batch, tokens, heads]` each. What is no gate stays as it is."""
    operands = _operands(g, beta)
    if operands is not None:
        few = operands[0][:_TRIED, :_TRIED], *operands[1:]
        kernels = {factor: functools.partial(_kernel, factor) for factor in _BETA_FACTORS}
        chosen = chooser.choose(
            "gates",
            g.layer.key,
            few,
            lambda x, *_: (g.at(x), beta.at(x)),
            {f"one kernel, betas times {factor:g}": kernel for factor, kernel in kernels.items()},
            draws=_draws,
            is_same=functools.partial(is_close, least=torch.finfo(few[0].dtype).eps),
        )
        if chosen is not None:
            decays, betas = chosen(*operands)
            return decays, betas
    return _tensors_of(g), _tensors_of(beta)


def _operands(g: Any, beta: Any) -> tuple[Tensor, ...] | None:
    """What the kernel takes for these gates; `None` if they are no gates of one layer and input."""
    g, beta = _settled(g), _settled(beta)
    if not isinstance(g, Gate) or not isinstance(beta, Gate) or g.layer is not beta.layer or g.x is not beta.x:
        return None
    module, projections = g.layer.module, g.names - {_A_LOG}
    if g.x is None or len(projections) != 1 or len(beta.names) != 1 or beta.names & g.names or _A_LOG not in g.names:
        return None
    weights = (getattr(module, *names).weight for names in (projections, beta.names))
    return g.x, *weights, module._parameters[_A_LOG], module._parameters[_DT_BIAS]


def _kernel(beta_factor: float, *operands: Tensor) -> tuple[Tensor, Tensor]:
    out: tuple[Tensor, Tensor] = torch_ops.delta_gates(*operands, beta_factor)
    return out


def _draws(x: Tensor, *weights: Tensor) -> Iterator[tuple[Tensor, ...]]:
    generator = torch.Generator(x.device).manual_seed(0)
    for magnitude in (1.0, 1e-2, 30.0):
        yield torch.empty_like(x).normal_(generator=generator).mul_(magnitude), *weights
