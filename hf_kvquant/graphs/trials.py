"""Chooses a replacement for a function only if it gives the same results, by default bitwise, by trying it.

A trial compares a candidate with the original on the tensors of one step and on random tensors of the same layout, in
their dtype and in float32, which shows differences that rounding to 16 bits would hide. If one bit differs, the
original stays. The log tells the outcome of each (level INFO).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

Function = Callable[..., Any]

# Magnitudes of the random numbers that replacements are tried on.
_MAGNITUDES = (1.0, 1e-3, 100.0)
_ALIGNMENT = 16  # bytes that kernels load at a time
# How far results may be off, in units of rounding of the largest: sums of up to 256 products in float32, and one
# rounding to the dtype of results on either side.
_ROUNDINGS, _SUM_ROUNDINGS = 2.0, 64.0
# Numbers of the largest random tensor. One of 8,192 tokens in an MLP of Llama-3-8B would have 470 MB in float32.
_MOST_NUMBERS = 2**22


def random_like(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Random tensors with the layout of these, of several magnitudes, in their dtype and in float32."""
    tensors = _few_rows(tensors)
    generator = torch.Generator(tensors[0].device).manual_seed(0)  # leaves the generator used for sampling alone
    for dtype in {tensors[0].dtype, torch.float32}:
        for magnitude in _MAGNITUDES:
            empty = [torch.empty_like(tensor, dtype=dtype, requires_grad=False) for tensor in tensors]
            yield tuple(x.normal_(generator=generator).mul_(magnitude) for x in empty)


def _few_rows(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The first rows of tensors that share many. Of the step's own tensors, which a trial begins with, it takes all."""
    counts = {tensor.shape[-2] for tensor in tensors if tensor.ndim > 1}
    most = max(tensor.numel() for tensor in tensors)
    if most <= _MOST_NUMBERS or len(counts) != 1:
        return tensors
    count = max(1, counts.pop() * _MOST_NUMBERS // most)
    return tuple(tensor.narrow(-2, 0, count) if tensor.ndim > 1 else tensor for tensor in tensors)


class Chooser:
    """Chooses replacements for one model, and remembers the choices."""

    def __init__(self) -> None:
        self.norms: dict[int, Any] = {}  # by the number of an addition within a step, the norm that takes its sum
        self.is_trying = False  # whether a comparison is running, which is not part of the step
        self._choices: dict[Hashable, Function | None] = {}
        self._said: set[str] = set()

    def choose(
        self,
        name: str,
        key: Hashable,
        tensors: Sequence[Tensor],
        original: Function,
        candidates: Mapping[str, Function],
        *,
        inputs: Callable[[], Sequence[Tensor]] | None = None,
        draws: Callable[..., Iterator[Sequence[Tensor]]] = random_like,
        is_same: Callable[[Any, Any], bool] | None = None,
    ) -> Function | None:
        """The first candidate that gives the same bits as the original, or `None`.

        `key` is what the choice depends on besides the layout of `tensors`, which belong to this call. `inputs` makes
        the inputs of the functions, if they are not `tensors`, and `draws` further inputs like these. `is_same`
        compares results where the same bits are too much to ask. The log calls the original `name`.
        """
        device = tensors[0].device
        are_plain = all(type(tensor) in (Tensor, nn.Parameter) for tensor in tensors)
        if torch.is_grad_enabled() or torch.is_autocast_enabled(device.type) or not are_plain:
            return None
        key = (name, key, tuple(_layout_of(tensor) for tensor in tensors))
        if key not in self._choices:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return None
            shapes = " ".join(str(list(tensor.shape)) for tensor in tensors)
            what = f"{name} of {shapes} {str(tensors[0].dtype).removeprefix('torch.')}"
            was_trying, self.is_trying = self.is_trying, True  # a trial may run modules that are replaced as well
            try:
                first = tensors if inputs is None else inputs()
                chosen = None
                for description, candidate in candidates.items():
                    trials = itertools.chain((first,), draws(*first))
                    reason = _why_not(candidate, original, trials, is_same or _is_same)
                    if reason is None:
                        self._say(f"captured steps run {what} as {description}.")
                        chosen = candidate
                        break
                    self._say(f"captured steps do not run {what} as {description}: {reason}")
                self._choices[key] = chosen
            finally:
                self.is_trying = was_trying
        return self._choices[key]

    def _say(self, line: str) -> None:
        if line not in self._said:  # layers repeat the same lines
            self._said.add(line)
            logger.info(line)


def _layout_of(tensor: Tensor) -> Hashable:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % _ALIGNMENT


def _why_not(
    candidate: Function,
    original: Function,
    trials: Iterable[Sequence[Tensor]],
    is_same: Callable[[Any, Any], bool],
) -> str | None:
    """Why a candidate cannot replace the original, or `None` if it can."""
    for inputs in trials:
        try:
            if not is_same(candidate(*inputs), original(*inputs)):
                return "its bits differ." if is_same is _is_same else "its results differ."
        except Exception as error:  # a shape or dtype that the kernel refuses, or that the model's code does not expect
            return f"{type(error).__name__}: {error}"
    return None


def _is_same(actual: Any, expected: Any) -> bool:
    """Whether tensors, or tuples of them, are equal bit for bit and have the same layout. NaNs are equal."""
    if isinstance(expected, tuple):
        return len(actual) == len(expected) and all(map(_is_same, actual, expected))
    if not isinstance(expected, Tensor) or _form_of(actual) != _form_of(expected):
        return False
    bits = torch.int32 if expected.element_size() == 4 else torch.int16
    x, y = (torch.where(each.isnan(), torch.nan, each).view(bits) for each in (actual, expected))
    return torch.equal(x, y)


def is_close(actual: Any, expected: Any, least: float = 0.0) -> bool:
    """Whether tensors, or tuples of them, differ by no more than the order of sums and a rounding explain.

    `least` is the least unit of that rounding, relative to the largest number of a tensor.
    """
    if isinstance(expected, tuple):
        pairs = zip(actual, expected, strict=False)
        return len(actual) == len(expected) and all(is_close(x, y, least) for x, y in pairs)
    if not isinstance(expected, Tensor) or (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return False
    largest = float(expected.abs().max())
    unit = _ROUNDINGS * max(torch.finfo(expected.dtype).eps, least) + _SUM_ROUNDINGS * torch.finfo(torch.float32).eps
    return bool(((actual - expected).abs() <= unit * largest).all())


def _form_of(tensor: Tensor) -> Hashable:
    # The stride of an axis of size 1 is meaningless.
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return tensor.shape, tuple(strides), tensor.dtype
