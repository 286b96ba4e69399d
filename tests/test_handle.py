"""`KVHandle`: to attention an opaque token, to everybody else a tensor that is dequantised when somebody looks.

Whatever is done to a handle has to give what is given for the dense tensor. How attention serves a handle from codes
is tested in test_attention.py.
"""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import assert_same
from torch import Tensor

from hf_kvquant import ops
from hf_kvquant.cache.handle import LOOKED_INSIDE, KVHandle, KVLength, KVStep, MaskNotes
from hf_kvquant.config import LayerFormats
from hf_kvquant.spec.formats import KVFormat
from hf_kvquant.spec.key_transform import KeyTransform
from hf_kvquant.storage import tally as tally_module
from hf_kvquant.storage.layer_store import LayerStore

INT8 = LayerFormats(KVFormat("int8"), KVFormat("int4", symmetric=False))
NONE = LayerFormats(KVFormat("none"), KVFormat("none"))


def make_handles(
    formats: LayerFormats = INT8, *, max_cache_len: int | None = None, device: str = "cpu", **options: Any
) -> tuple[KVHandle, KVHandle]:
    """The handles of a step of 2 tokens, still pending, over 5 older ones."""
    storage = LayerStore(formats, max_cache_len=max_cache_len, **options)
    for count in (5, 2):
        storage.extend(torch.randn(2, 2, count, 16).to(device), torch.randn(2, 2, count, 8).to(device))
    step = KVStep(storage)
    return KVHandle(step, 0), KVHandle(step, 1)


def dense_of(handle: KVHandle) -> Tensor:
    """The dense tensor, from a copy, so that nobody has looked inside the handle yet."""
    return copy.deepcopy(handle.step.storage).dequantize()[handle.side]


def is_untouched(handle: KVHandle) -> bool:
    storage = handle.step.storage
    return not storage.tally.fallbacks and storage.pending is not None


# --- what needs no look inside ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_cache_len", "tokens"), [(None, 7), (10, 10)], ids=["growing", "static"])
def test_attributes(max_cache_len: int | None, tokens: int, device: str) -> None:
    key, value = make_handles(max_cache_len=max_cache_len, device=device)
    assert key.shape == torch.Size((2, 2, tokens, 16)) and isinstance(key.shape, torch.Size)
    assert value.shape == torch.Size((2, 2, tokens, 8))
    for handle in (key, value):
        assert handle.dtype == torch.float32 and handle.device.type == device and handle.ndim == 4
        assert not isinstance(handle, Tensor)
        assert handle.step is key.step
    assert is_untouched(key)
    assert dense_of(key).shape == key.shape and dense_of(value).shape == value.shape


def test_looking_from_outside_dequantises_nothing() -> None:
    key, value = make_handles()
    assert repr(key) == "KVHandle(key, [2, 2, 7, 16], key int8-head-symmetric, value int4-head-asymmetric)"
    assert repr(value).startswith("KVHandle(value, [2, 2, 7, 8], ")
    assert not hasattr(key, "__array__") and not hasattr(key, "__cuda_array_interface__")
    assert key is not None and len({key, value}) == 2
    assert is_untouched(key)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        (("cpu",), {}),
        ((torch.device("cpu"),), {}),
        ((torch.float32,), {}),
        (("cpu", torch.float32), {}),
        (("cpu",), {"non_blocking": True}),
        ((), {"device": "cpu", "dtype": torch.float32}),
        ((torch.zeros(1),), {}),
    ],
    ids=str,
)
def test_to_what_it_is_already(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    key, _ = make_handles()
    assert key.to(*args, **kwargs) is key
    assert is_untouched(key)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((torch.float16,), {}),
        (("cpu", torch.bfloat16), {}),
        (("cpu",), {"dtype": torch.bfloat16}),
        (("cpu",), {"copy": True}),
        ((torch.zeros(1, dtype=torch.float64),), {}),
    ],
    ids=str,
)
def test_to_something_else(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    key, _ = make_handles()
    expected = dense_of(key).to(*args, **kwargs)
    moved = key.to(*args, **kwargs)
    assert isinstance(moved, Tensor)
    assert_same(moved, expected, "to")


# --- what does --------------------------------------------------------------------------------------------------------

X = torch.linspace(-1, 1, 2 * 2 * 7 * 16).view(2, 2, 7, 16)
LOOKS: dict[str, Callable[[Any], Any]] = {
    "transpose": lambda key: key.transpose(1, 2),
    "mT": lambda key: key.mT,
    "size": lambda key: key.size(),
    "size of an axis": lambda key: key.size(-2),
    "sum": lambda key: key.sum(-1),
    "view": lambda key: key.view(2, -1),
    "numel": lambda key: key.numel(),
    "contiguous": lambda key: key.contiguous(),
    "dim": lambda key: key.dim(),
    "requires_grad": lambda key: key.requires_grad,
    "index": lambda key: key[0],
    "slice": lambda key: key[:, :, -2:],
    "ellipsis": lambda key: key[..., 3],
    "mask": lambda key: key[X > 0],
    "new axis": lambda key: key[:, :, None],
    "iterate": lambda key: torch.stack(list(key)),
    "len": lambda key: len(key),
    "add": lambda key: key + X,
    "add reflected": lambda key: X + key,
    "add a number": lambda key: 1.5 + key,
    "add itself": lambda key: key + key,
    "sub": lambda key: key - X,
    "sub reflected": lambda key: X - key,
    "sub from a number": lambda key: 1 - key,
    "mul": lambda key: key * 3,
    "mul reflected": lambda key: 3 * key,
    "div": lambda key: key / 3,
    "div a number": lambda key: 3 / (key + 100),
    "pow": lambda key: key**2,
    "exponent": lambda key: 2**key,
    "neg": lambda key: -key,
    "abs": lambda key: abs(key),
    "matmul": lambda key: key @ X.mT,
    "matmul reflected": lambda key: X.mT @ key,
    "less": lambda key: key < 0.1,
    "less reflected": lambda key: 0.1 < key,
    "at least": lambda key: key >= X,
    "equal": lambda key: key == key[..., :1],
    "unequal": lambda key: key != X,
    "torch.matmul": lambda key: torch.matmul(X, key.transpose(-1, -2)),
    "torch.cat": lambda key: torch.cat([key, X], dim=-2),
    "torch.stack of a tuple": lambda key: torch.stack((X, key)),
    "torch.split": lambda key: torch.cat(torch.split(key, 3, dim=2)[1:], dim=2),
    "torch.where": lambda key: torch.where(X > 0, key, 0.0),
    "torch.einsum": lambda key: torch.einsum("bhtd,bhsd->bhts", key, key),
    "torch.repeat_interleave": lambda key: torch.repeat_interleave(key, dim=1, repeats=2),
    "torch.isnan": lambda key: torch.isnan(key),
    "keyword": lambda key: torch.nn.functional.layer_norm(input=key, normalized_shape=(16,)),
    "attention": lambda key: F.scaled_dot_product_attention(X, key, key),
    "attention by keyword": lambda key: F.scaled_dot_product_attention(query=X, key=key, value=key),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_look_inside_is_a_look_at_the_dense_tensor(look: str) -> None:
    key, _ = make_handles()
    expected = LOOKS[look](dense_of(key))
    result = LOOKS[look](key)
    assert type(result) is type(expected)
    if isinstance(expected, Tensor):
        assert_same(result, expected, look)
    else:
        assert result == expected
    assert key.step.storage.tally.fallbacks == {LOOKED_INSIDE: 1}


def test_handles_in_nested_arguments_are_replaced() -> None:
    key, value = make_handles()
    expected = dense_of(key), dense_of(value)

    def collect(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    args, kwargs = KVHandle.__torch_function__(
        collect, (KVHandle,), ([key, 1, (value,)], {"deep": [{"key": key}]}), {"value": value, "other": "text"}
    )
    assert isinstance(args[0], list) and isinstance(args[0][2], tuple) and args[0][1] == 1
    for ours, side in ((args[0][0], 0), (args[0][2][0], 1), (args[1]["deep"][0]["key"], 0), (kwargs["value"], 1)):
        assert_same(ours, expected[side], "nested argument")
    assert kwargs["other"] == "text"


def test_what_a_tensor_refuses_a_handle_refuses() -> None:
    key, _ = make_handles()
    with pytest.raises(AttributeError, match="'Tensor' object has no attribute 'keys_only'"):
        _ = key.keys_only
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(key)
    with pytest.raises(IndexError):
        key[5]
    with pytest.raises(
        TypeError, match=r"must not be changed in place, .* Change a copy \(clone\(\)\), and attend to that"
    ):
        key[0] = 1.0


def test_dense_tensors_are_in_the_basis_of_the_model() -> None:
    doubling = KeyTransform(smoothing=torch.full((2, 16), 0.5))
    torch.manual_seed(1)
    plain, _ = make_handles(NONE)
    torch.manual_seed(1)
    doubled, _ = make_handles(NONE, key_transform=doubling)
    assert_same(doubled.dense(), plain.dense(), "keys")


# --- once -------------------------------------------------------------------------------------------------------------


def test_a_step_is_dequantised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    key, value = make_handles()
    calls = []
    dense_step = LayerStore.dense_step

    def counted(self: LayerStore) -> tuple[Tensor, Tensor]:
        calls.append(self)
        return dense_step(self)

    monkeypatch.setattr(LayerStore, "dense_step", counted)
    assert key.dense() is key.dense() and value.dense() is value.dense()
    _ = key + 1, key[0], torch.cat([key, key]), value.mT, len(value)
    assert len(calls) == 1
    assert key.step.storage.tally.fallbacks == {LOOKED_INSIDE: 1}
    next_step = KVStep(key.step.storage)
    KVHandle(next_step, 0).dense()
    assert len(calls) == 2
    assert key.step.storage.tally.fallbacks == {LOOKED_INSIDE: 2}


def test_a_fallback_is_said_once_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    tally_module._log_fallback.cache_clear()
    with caplog.at_level(logging.WARNING, logger="hf_kvquant"):
        for _ in range(3):
            key, value = make_handles()
            key.dense(), value.dense()
    assert [record.getMessage() for record in caplog.records] == [
        "attention runs on dequantised tensors: the model or its attention implementation looks at keys and values "
        "itself (is the model patched?). Correct, slower."
    ]
    with caplog.at_level(logging.WARNING, logger="hf_kvquant"):
        key.step.storage.note_fallback("another reason")
    assert caplog.records[-1].getMessage() == "attention runs on dequantised tensors: another reason. Correct, slower."


def test_where_nothing_is_quantised_nothing_falls_back(caplog: pytest.LogCaptureFixture) -> None:
    tally_module._log_fallback.cache_clear()
    key, _ = make_handles(NONE)
    key.dense()
    assert not key.step.storage.tally.fallbacks and not caplog.records


@pytest.mark.parametrize(
    "consumers",
    [
        "attend",
        "attend attend",  # layers that share keys and values
        "attend dense attend",
        "key",
        "value",
        "key attend",
        "value attend value",
    ],
)
def test_tokens_are_appended_once_whoever_comes_first(
    consumers: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    expected = make_handles(device=device)[0].step.storage
    torch.manual_seed(1)
    key, value = make_handles(device=device)
    storage = key.step.storage
    query = torch.randn(2, 4, 2, 16).to(device)
    expected_out, _ = expected.attend(query, softmax_scale=0.25)
    appends = []
    append, decode = ops.Operands.append, ops.Operands.decode

    def counted_append(*args: Any, **kwargs: Any) -> None:
        appends.append("append")
        append(*args, **kwargs)

    def counted_decode(self: ops.Operands, query: Tensor, new: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if new is not None:
            appends.append("decode")
        return decode(self, query, new, *args, **kwargs)

    monkeypatch.setattr(ops.Operands, "append", counted_append)
    monkeypatch.setattr(ops.Operands, "decode", counted_decode)
    for consumer in consumers.split():
        if consumer == "attend":
            assert_same(storage.attend(query, softmax_scale=0.25)[0], expected_out.cpu(), consumers)
        else:
            (value if consumer == "value" else key).dense()
    assert len(appends) == 1
    for ours, theirs in zip(storage.dequantize(), expected.dequantize(), strict=True):
        assert_same(ours, theirs.cpu(), consumers)


# --- copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy, lambda key: pickle.loads(pickle.dumps(key))])
def test_copies_do_not_recurse(copier: Callable[[KVHandle], KVHandle]) -> None:
    key, _ = make_handles()
    expected = dense_of(key)
    twin = copier(key)
    assert isinstance(twin, KVHandle) and twin.side == 0 and twin.shape == key.shape
    assert not key.step.storage.tally.fallbacks
    assert_same(twin.dense(), expected, "copy")


def test_a_handle_that_is_not_built_yet_has_no_attributes() -> None:
    blank = KVHandle.__new__(KVHandle)
    for name in ("step", "side", "anything", "__setstate__", "__deepcopy__"):
        assert not hasattr(blank, name)


# --- marked lengths ---------------------------------------------------------------------------------------------------


def test_a_marked_length_is_an_integer() -> None:
    notes = MaskNotes()
    length = KVLength(7, notes, is_first_chunk=True)
    assert length == 7 and isinstance(length, int) and length + 1 == 8 and not isinstance(length + 1, KVLength)
    assert length.notes is notes and length.is_first_chunk and not notes.has_holes
    assert torch.zeros(length).shape == (7,)
