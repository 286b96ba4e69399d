"""Comparisons that say what differs: the worst element, where it is, both values, how many, and which case it was."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_kvquant.spec.planes import Planes


def assert_same(actual: Tensor, expected: Tensor, what: str) -> None:
    """Equal shape, dtype and elements; a NaN equals a NaN.

    Args:
        actual: On any device.
        expected: The same.
        what: The case, for the message.
    """
    actual, expected = actual.cpu(), expected.cpu()
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    differs = actual != expected
    if actual.is_floating_point():
        differs &= ~(actual.isnan() & expected.isnan())
    if differs.any():
        _fail(actual, expected, differs.float(), what, bound=0.0)


def assert_same_planes(actual: Planes, expected: Planes, what: str) -> None:
    """Equal codes, scales, zeros and tails, plane by plane."""
    for name in ("codes", "scale", "zero", "tail"):
        a, e = getattr(actual, name), getattr(expected, name)
        assert (a is None) == (e is None), f"{what}: {name} is {'missing' if a is None else 'unexpected'}"
        if e is not None:
            assert_same(a, e, f"{what}, {name}")


def assert_close(actual: Tensor, expected: Tensor, bound: float, what: str) -> None:
    """Every finite element within `bound`, and what is not finite in the same places.

    Args:
        actual: On any device, any floating dtype.
        expected: The same, float32.
        bound: Largest absolute difference.
        what: The case, for the message.
    """
    actual, expected = actual.cpu().float(), expected.cpu()
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    same_kind = actual.isfinite() == expected.isfinite()
    if not same_kind.all():
        _fail(actual, expected, (~same_kind).float(), f"{what}, finite or not", bound)
    error = (actual - expected).abs().masked_fill(~expected.isfinite(), 0.0)
    if (error > bound).any():
        _fail(actual, expected, error, what, bound)


def _fail(actual: Tensor, expected: Tensor, error: Tensor, what: str, bound: float) -> None:
    worst = int(error.flatten().argmax())
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), error.shape))
    raise AssertionError(
        f"{what}: {int((error > bound).sum())} of {error.numel()} elements differ; the worst at {where}: "
        f"got {actual.flatten()[worst].item()!r}, expected {expected.flatten()[worst].item()!r}, "
        f"error {error.flatten()[worst].item():.3e}, bound {bound:.3e}"
    )
