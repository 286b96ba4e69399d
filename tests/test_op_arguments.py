"""What fuzzing (`test_fuzz_ops.py`) has found, call by call: of the compiled ops, and of the reference in their place.

Every call here has one thing wrong, or only odd. What is refused for its shape or dtype is in `test_ops.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import Case, filled, queries, tokens
from compare import assert_same
from test_ops import good_arguments, op_arguments
from torch import Tensor

from hf_kvquant import KVFormat, ops, reference
from hf_kvquant.config import PRESETS

INT4 = KVFormat("int4", symmetric=False)
OPS = ("append", "append_reference", "decode", "decode_reference")


def call_of(name: str, kv_format: KVFormat = INT4, device: str = "cpu") -> dict[str, Any]:
    """A good call, by argument."""
    append, decode = op_arguments(device, kv_format)
    names = [argument.name for argument in overload(name)._schema.arguments]
    return dict(zip(names, append if name.startswith("append") else decode, strict=True))


def overload(name: str) -> Any:
    return getattr(torch.ops.hf_kvquant, name).default


def refused(name: str, call: dict[str, Any], message: str) -> None:
    """By a `ValueError` with this message, before anything is written."""
    before = {key: x.clone() for key, x in call.items() if isinstance(x, Tensor) and x.device.type != "meta"}
    with pytest.raises(ValueError, match=f"^{name.partition('_')[0]}: {message}"):
        overload(name)(**call)
    for key, x in before.items():
        assert_same(call[key].to_dense(), x.to_dense().cpu(), key)


def unaligned(x: Tensor) -> Tensor:
    data = bytearray(1) + bytearray(x.contiguous().view(torch.uint8).numpy().tobytes())
    return torch.frombuffer(data, dtype=x.dtype, offset=1).view(x.shape)


@pytest.mark.parametrize("has_new", [False, True])
def test_more_splits_than_tiles_are_as_many_as_there_are_tiles(engine: str, has_new: bool) -> None:
    """They used to take memory each: an error after appending, or a size that no longer fit a number and a crash."""
    results = []
    for num_splits in (2, 1000, 2**31 - 1) if engine == "cpu" else (2, 1000):
        torch.manual_seed(0)
        arguments = good_arguments(engine)
        arguments["new"] = arguments["new"] if has_new else None
        results.append(ops.decode(**arguments, num_splits=num_splits))
    for out, lse in results[1:]:
        assert_same(out, results[0][0].cpu(), "out")
        assert_same(lse, results[0][1].cpu(), "lse")


def test_padding_may_end_where_no_token_can_be(engine: str) -> None:
    """Positions are ints, in kernels and in `starts`, and the end of the sinks behind this padding is none."""
    formats = PRESETS["int4-channel"][0], INT4
    case = Case(formats, 64, q_len=128, lengths=(128,), starts=(2**31 - 1,), sink_length=3, residual_length=0)
    planes, expected = [[filled(Case(formats, 64, lengths=(0,), sink_length=3), side) for side in (0, 1)] for _ in "ab"]
    key, value = tokens(case, 128, 64), tokens(case, 128, 64)
    starts = case.starts_tensor()
    assert starts is not None
    arguments = case.lengths_tensor().to(engine), case.formats, None, starts.to(engine)
    ours = [made.map(lambda plane: plane.to(engine)) for made in planes]
    ops.append(key.to(engine), value.to(engine), *ours, *arguments, **case.windows)
    for x, made, kv_format in zip((key, value), expected, formats, strict=True):
        reference.append(x, made, kv_format, case.lengths_tensor(), None, starts, **case.windows)
    assert not ours[0].codes.any() and not expected[0].codes.any(), "all of it is padding"
    out, lse = ops.decode(
        queries(case).to(engine), None, *ours, *arguments[:2], softmax_scale=1.0, starts=arguments[3], **case.windows
    )
    assert not out.any() and bool((lse == -torch.inf).all())
