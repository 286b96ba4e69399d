"""`LayerStore` against a plain list of dense tensors: random histories, growth, refusals that change nothing.

The model of a storage is what anybody would write without caring about speed: tokens are quantised and dequantised by
`reference.py` once, when they come, and kept dense. Whatever happens to a storage afterwards, its dense tensors agree
with the model bitwise and its attention within the bound of tolerances.py.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import REFUSED, make_formats, name_of, times
from compare import assert_close, assert_same
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tolerances import attention_bound, lse_bound, max_logit_terms
from torch import Tensor

from hf_kvquant import ops
from hf_kvquant.config import PRESETS, LayerFormats
from hf_kvquant.spec import reference
from hf_kvquant.spec.formats import KVFormat
from hf_kvquant.spec.key_transform import KeyTransform
from hf_kvquant.spec.planes import Planes
from hf_kvquant.storage import rewind, saved
from hf_kvquant.storage.layer_store import LayerStore

HEADS, KEY_DIM, VALUE_DIM = 2, 64, 32
MAX_BATCH, MAX_CACHE_LEN = 6, 150
FORMATS = make_formats(KEY_DIM)
BLOCKS = KVFormat("int4", "channel", symmetric=False, block_size=128)
INT8 = LayerFormats(KVFormat("int8"), KVFormat("int8"))
INT4 = LayerFormats(KVFormat("int4", symmetric=False), KVFormat("int4", symmetric=False))
TENSOR = LayerFormats(KVFormat("int8", "tensor", symmetric=False), KVFormat("int4", "tensor"))
NONE = LayerFormats(KVFormat("none"), KVFormat("none"))
SOME_FORMATS = [NONE, INT8, INT4, TENSOR, LayerFormats(KVFormat("fp8", "token"), KVFormat("int4", "group", 32))]
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def new_tokens(
    batch: int, count: int, dtype: torch.dtype = torch.float32, device: str = "cpu", scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Random keys and values, drawn on the CPU so that they are the same on every device."""
    key = torch.randn(batch, HEADS, count, KEY_DIM) * scale
    value = torch.randn(batch, HEADS, count, VALUE_DIM) * scale
    return key.to(device, dtype), value.to(device, dtype)


def new_transform(kind: str) -> KeyTransform | None:
    """A transform of the parts that `kind` names, such as `center+rotate`; `None` for none."""
    parts = set(kind.split("+")) - {""}
    assert parts <= {"center", "smooth", "rotate"}
    if not parts:
        return None
    center = 3 * torch.randn(HEADS, KEY_DIM) if "center" in parts else None
    smoothing = 0.25 + 2 * torch.rand(HEADS, KEY_DIM) if "smooth" in parts else None
    return KeyTransform(center, smoothing, "rotate" in parts)


TRANSFORMS = ["center", "smooth", "rotate", "center+smooth+rotate"]


class DenseModel:
    """What a storage stands for: dense keys and values, float32, on the CPU.

    Attributes:
        sides: What codes stand for, keys transformed; of no meaning where a token has none.
        given: What a tail would hold: tokens as they came, or as a crop made them of codes.
        starts: `[batch]`: first position that is not padding.
    """

    def __init__(self, formats: LayerFormats, transform: KeyTransform | None = None) -> None:
        self.formats = formats
        self.transform = transform
        self.starts: Tensor | None = None
        self.slack = 0  # tokens behind the dense windows that are remembered as they came
        self.is_lost = [torch.zeros(0, dtype=torch.bool) for _ in range(2)]  # by side and position: they no longer are
        self.sides: list[Tensor] = []
        self.given: list[Tensor] = []
        self.frozen: list[tuple[Tensor | None, Tensor | None]] = []

    @property
    def length(self) -> int:
        return self.sides[0].shape[2] if self.sides else 0

    def tail_begin(self, side: int, length: int) -> int:
        begin = max(0, length - self.formats.residual_length)
        return begin // 128 * 128 if self.of_side(side).block_size is not None else begin

    def of_side(self, side: int) -> KVFormat:
        return (self.formats.key, self.formats.value)[side]

    def is_first(self) -> Tensor:
        """`[batch, length]`: the first tokens, which stay dense."""
        starts = torch.zeros(self.sides[0].shape[0]) if self.starts is None else self.starts
        behind_start = torch.arange(self.length) - starts.unsqueeze(1)
        return (behind_start >= 0) & (behind_start < self.formats.sink_length)

    def is_dense(self, side: int, num_own: int = 0, num_behind: int = 0) -> Tensor:
        """`[batch, length]`: tokens that a query takes as they came, the last `num_own` among them.

        The last `num_behind` tokens are behind the query. Of tokens that have left the window of the last query, it
        takes those that the slack has kept.
        """
        if not self.of_side(side).is_quantized:
            return torch.zeros_like(self.is_first())
        begin = self.tail_begin(side, self.length - num_own - num_behind)
        if num_behind:
            kept = self.formats.residual_length + self.slack if self.formats.residual_length else 0
            if self.of_side(side).block_size is not None:
                kept = -(-(self.formats.residual_length + self.slack) // 32) * 32
            oldest = max(0, self.length - kept)
            begin = max(begin, oldest if self.of_side(side).block_size is None else oldest // 128 * 128)
        return self.is_first() | (torch.arange(self.length) >= min(begin, self.length - num_own or begin))

    def extend(self, key: Tensor, value: Tensor) -> None:
        if key.shape[2] == 0:
            self.sides = self.sides or [key.cpu().float(), value.cpu().float()]
            self.given = self.given or self.sides
            return
        new, given, old_length = [], [key.cpu().float(), value.cpu().float()], self.length
        for side, (x, kv_format) in enumerate(zip((key, value), (self.formats.key, self.formats.value), strict=True)):
            x = x.cpu()
            if side == 0 and self.transform is not None:
                transformed = reference.transform_key(x, self.transform)
                x = transformed if kv_format.is_quantized else transformed.to(x.dtype)
            if self.length == 0:  # the first tokens freeze the scale of granularity `tensor`
                is_frozen = kv_format.granularity == "tensor"
                self.frozen[side:] = [reference.compute_scale(x, kv_format) if is_frozen else (None, None)]
            planes = Planes(x, None, None)
            if kv_format.block_size is not None:
                new.append(torch.zeros_like(x, dtype=torch.float32))  # until its block leaves the window
                continue
            if kv_format.is_quantized:
                planes = reference.quantize(x, kv_format, *self.frozen[side])
            new.append(reference.dequantize(planes, kv_format))
        self.sides = [torch.cat(pair, dim=2) for pair in zip(self.sides, new, strict=True)] if self.sides else new
        self.given = [torch.cat(pair, dim=2) for pair in zip(self.given, given, strict=True)] if self.given else given
        self.dtype = key.dtype
        self.is_lost = [torch.cat((x, torch.zeros(key.shape[2], dtype=torch.bool))) for x in self.is_lost]
        self.forget_slack()
        if self.formats.key.block_size is not None:
            begin, end = (self.tail_begin(0, length) for length in (old_length, self.length))
            if end > begin:
                starts = torch.zeros(key.shape[0]) if self.starts is None else self.starts
                is_left_out = torch.arange(begin, end) < starts.unsqueeze(1) + self.formats.sink_length
                x = self.given[0][:, :, begin:end]
                x = x if self.transform is None else reference.transform_key(x, self.transform)
                planes = reference.quantize(x, self.formats.key, is_padding=is_left_out)
                self.sides[0][:, :, begin:end] = reference.dequantize(planes, self.formats.key)

    def forget_slack(self) -> None:
        """Tokens behind the dense windows and the slack are only remembered as codes."""
        for side in range(2) if self.sides else ():
            slack = self.slack if self.of_side(side).block_size is None else -(-self.slack // 128) * 128
            self.is_lost[side][: self.tail_begin(side, self.length - slack)] = True

    @property
    def decoded(self) -> list[Tensor]:
        """What codes stand for, in the model's basis."""
        key, value = self.sides
        return [key if self.transform is None else reference.undo_key_transform(key, self.transform), value]

    def mixed(self, coded: list[Tensor], *num: int) -> list[Tensor]:
        dense = [self.is_dense(side, *num)[:, None, :, None] for side in range(2)]
        return [torch.where(dense[side], self.given[side], coded[side]) for side in range(2)]

    @property
    def dense(self) -> list[Tensor]:
        """Keys in the model's basis, and values."""
        return self.mixed(self.decoded)

    def stored(self, *num: int) -> list[Tensor]:
        """The same for a query (`is_dense`), but for keys that have codes, which are transformed."""
        return self.mixed(self.sides, *num)

    def crop(self, count: int) -> None:
        length = max(0, self.length - count)
        for side in range(2) if self.sides else ():
            is_reopened = self.is_lost[side].clone()
            is_reopened[: self.tail_begin(side, length)] = False
            is_reopened[length:] = False
            if is_reopened.any():  # newest tokens again, as codes have left them
                x = self.decoded[side].to(self.dtype).float()
                is_coded = is_reopened & ~self.is_first()
                self.given[side] = torch.where(is_coded[:, None, :, None], x, self.given[side])
            self.is_lost[side] = (self.is_lost[side] & ~is_reopened)[:length]
        self.sides, self.given = ([x[:, :, :length].clone() for x in each] for each in (self.sides, self.given))

    def select(self, index: Tensor) -> None:
        self.sides, self.given = ([x[index] for x in each] for each in (self.sides, self.given))
        self.starts = None if self.starts is None else self.starts[index]
        self.frozen = [
            tuple(None if x is None else x[index] for x in pair)  # type: ignore[misc]
            for pair in self.frozen
        ]


def assert_dense(storage: LayerStore, model: DenseModel) -> None:
    """Dense keys and values agree bitwise."""
    assert storage.dtype is not None
    for x, expected in zip(storage.dequantize(), model.dense, strict=True):
        if storage.is_static:
            assert x.shape[2] == storage.max_cache_len
            x = x[:, :, : model.length]
        assert_same(x, expected.to(storage.dtype), storage.formats.describe())


def plain_attention(
    query: Tensor, model: DenseModel, is_visible: Tensor, softmax_scale: float, *num: int
) -> tuple[Tensor, Tensor]:
    """What eager PyTorch makes of the same keys and values in the working dtype: its error is the measure of ours."""
    key, value = (x.to(query.dtype).repeat_interleave(query.shape[1] // HEADS, dim=1) for x in model.stored(*num))
    scores = query @ key.mT * softmax_scale
    if model.transform is not None:  # queries and keys in the basis of the codes, rounded as they are
        x, constant = reference.transform_query(query, model.transform)
        coded_scores = x.to(query.dtype) @ key.mT * softmax_scale
        if constant is not None:
            coded_scores = coded_scores + (softmax_scale * constant).to(query.dtype).unsqueeze(-1)
        scores = torch.where(model.is_dense(0, *num)[:, None, None, :], scores, coded_scores)
    scores = scores.masked_fill(~is_visible, -torch.inf).float()
    weights = scores.softmax(-1).nan_to_num(0).to(query.dtype)  # a row that sees nothing is 0 / 0
    return (weights @ value).transpose(1, 2), scores.logsumexp(-1)


def assert_attends(
    storage: LayerStore, model: DenseModel, q_len: int, *, starts: Tensor | None = None, sliding_window: int = 0
) -> None:
    """Attention of new random queries agrees with the reference, within what the working dtype allows."""
    # A chunk's own tokens are attended to as they came.
    pending, formats = storage.pending, (storage.formats.key, storage.formats.value)
    is_chunk = pending is not None and q_len > ops.MAX_DRAFTED and not sliding_window
    num_own = q_len if is_chunk and any(each.is_quantized for each in formats) else 0
    key, value = model.stored(num_own)
    batch, length, softmax_scale = len(key), model.length, KEY_DIM**-0.5
    starts = torch.zeros(batch, dtype=torch.int32) if starts is None else starts
    assert storage.dtype is not None
    query = torch.randn(batch, 2 * HEADS, q_len, KEY_DIM).to(storage.dtype)
    column, position = torch.arange(length), torch.arange(length - q_len, length).view(1, 1, -1, 1)
    is_visible = (column <= position) & (column >= starts.view(-1, 1, 1, 1))
    if sliding_window:
        is_visible &= column > position - sliding_window

    def attend(some: slice, num_behind: int) -> tuple[Tensor, ...]:
        by_hand = reference.decode_attention(
            query[:, :, some].float(),
            *model.stored(num_own, num_behind),
            torch.full((batch,), length - num_behind, dtype=torch.int32),
            softmax_scale=softmax_scale,
            starts=starts,
            sliding_window=sliding_window,
            key_transform=model.transform,
            is_dense=model.is_dense(0, num_own, num_behind),
        )
        plain = plain_attention(query[:, :, some], model, is_visible[:, :, some], softmax_scale, num_own, num_behind)
        return *by_hand, *plain

    # But for a chunk, each query has a window of its own.
    has_windows = any(each.is_quantized for each in formats) and not num_own
    queries = [(slice(i, i + 1), q_len - 1 - i) for i in range(q_len)] if has_windows else [(slice(None), 0)]
    expected, expected_lse, plain, plain_lse = (
        torch.cat(parts, dim=1 + i % 2)
        for i, parts in enumerate(zip(*(attend(*each) for each in queries), strict=True))
    )
    out, lse = storage.attend(
        query.to(storage.device),
        softmax_scale=softmax_scale,
        starts=starts.to(storage.device),
        sliding_window=sliding_window,
    )
    assert out.dtype == storage.dtype and lse.dtype == torch.float32
    what = storage.formats.describe()
    max_logit = max_logit_terms(query.float(), key, softmax_scale)
    if model.transform is not None:
        x, constant = reference.transform_query(query, model.transform)
        max_logit = max(max_logit_terms(x, key, softmax_scale), max_logit if model.is_dense(0, num_own).any() else 0.0)
        max_logit += softmax_scale * float(constant.abs().max()) if constant is not None else 0.0
    bound = attention_bound(expected, plain, storage.dtype, max_logit, float(value.abs().max()))
    assert_close(out, expected, bound, f"{what}, out")
    assert_close(lse, expected_lse, lse_bound(expected_lse, plain_lse, max_logit), f"{what}, lse")


def snapshot(storage: LayerStore) -> list[Tensor]:
    """Copies of everything that a storage holds in tensors."""
    tensors = [*(x for side in storage.planes for x in side.tensors()), storage.lengths] if storage.is_allocated else []
    return [x.clone() for x in tensors]


def addresses(storage: LayerStore) -> list[int]:
    tensors = storage.step_tensors()
    return [tensor.data_ptr() for tensor in tensors]


# --- random histories -------------------------------------------------------------------------------------------------


class StorageMachine(RuleBasedStateMachine):
    """Does to a storage, in any order, what transformers does to caches, and the same to the model."""

    @initialize(
        key_format=st.sampled_from(FORMATS),
        value_format=st.sampled_from(FORMATS),
        max_cache_len=st.sampled_from([None, None, MAX_CACHE_LEN]),
        batch=st.integers(1, 3),
        dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]),
        device=st.sampled_from(DEVICES),
        transform=st.sampled_from(["", *TRANSFORMS]),
    )
    def build(
        self,
        key_format: KVFormat,
        value_format: KVFormat,
        max_cache_len: int | None,
        batch: int,
        dtype: torch.dtype,
        device: str,
        transform: str,
    ) -> None:
        torch.manual_seed(0)
        formats, key_transform = LayerFormats(key_format, value_format), new_transform(transform)
        self.storage = LayerStore(formats, max_cache_len=max_cache_len, key_transform=key_transform)
        self.model = DenseModel(formats, key_transform)
        self.batch, self.dtype, self.device = batch, dtype, device
        self.pinned: list[int] = []

    @rule(count=st.sampled_from([0, 1, 1, 1, 2, 5, 17, 63, 64, 65]), scale=st.sampled_from([1.0, 0.1, 30.0]))
    def extend(self, count: int, scale: float) -> None:
        new = new_tokens(self.batch, count, self.dtype, self.device, scale)
        if self.storage.is_static and self.storage.length + count > MAX_CACHE_LEN:
            before, pending = snapshot(self.storage), self.storage.pending
            with pytest.raises(ValueError, match="`max_cache_len` must be at least"):
                self.storage.extend(*new)
            assert self.storage.pending is pending
            for x, expected in zip(snapshot(self.storage), before, strict=True):
                assert_same(x, expected.cpu(), "a full storage")
            return
        self.storage.extend(*new)
        self.model.extend(*new)
        assert (self.storage.pending is not None) == (count > 0 or self.storage.pending is not None)
        if self.storage.is_static and not self.pinned:
            self.pinned = addresses(self.storage)

    @precondition(lambda self: self.model.length > 0)
    @rule(
        q_len=st.integers(1, 4),
        padding=st.sampled_from([0, 0, 1, 20]),
        sliding_window=st.sampled_from([0, 0, 3]),
    )
    def attend(self, q_len: int, padding: int, sliding_window: int) -> None:
        if self.storage.pending is not None:
            q_len = self.storage.pending[0].shape[2]
            if self.storage.formats.key.block_size is not None:
                padding = 0  # it would enter the scales, which the model knows nothing of; see test_blocks.py
        starts = torch.arange(self.batch, dtype=torch.int32) * padding if padding else None
        assert_attends(self.storage, self.model, q_len, starts=starts, sliding_window=sliding_window)
        assert self.storage.pending is None

    @rule()
    def flush(self) -> None:
        self.storage.flush()
        assert self.storage.pending is None

    @precondition(lambda self: self.storage.is_allocated)
    @rule()
    def dequantize(self) -> None:
        assert_dense(self.storage, self.model)

    @rule(count=st.sampled_from([0, 1, 3, 64, 1000]))
    def crop(self, count: int) -> None:
        rewind.crop(self.storage, count)
        self.model.crop(count)

    @rule()
    def expect_crops(self) -> None:
        rewind.expect_crops(self.storage)
        self.model.slack = 64
        if self.pinned:
            self.pinned = addresses(self.storage)

    @precondition(lambda self: self.storage.is_allocated)
    @rule(data=st.data())
    def select(self, data: st.DataObject) -> None:
        kind = data.draw(st.sampled_from(["permutation", "permutation", "any", "mask"]), "kind")
        if kind == "permutation":
            index = torch.tensor(data.draw(st.permutations(range(self.batch)), "index"))
        elif kind == "any":
            picks = st.lists(st.integers(0, self.batch - 1), min_size=1, max_size=MAX_BATCH)
            index = torch.tensor(data.draw(picks, "index"))
        else:
            picks = st.lists(st.booleans(), min_size=self.batch, max_size=self.batch).filter(any)
            index = torch.tensor(data.draw(picks, "index"))
        self.storage.select(index.to(data.draw(st.sampled_from(DEVICES), "index device")))
        self.model.select(index)
        self._batch_is(int(index.sum()) if index.dtype == torch.bool else index.numel())

    @precondition(lambda self: self.storage.is_allocated and self.batch <= MAX_BATCH // 2)
    @rule(repeats=st.integers(1, 2))
    def repeat(self, repeats: int) -> None:
        self.storage.repeat(repeats)
        self.model.select(torch.arange(self.batch).repeat_interleave(repeats))
        self._batch_is(self.batch * repeats)

    def _batch_is(self, batch: int) -> None:
        if batch != self.batch and self.storage.is_static:
            self.pinned = addresses(self.storage)
        self.batch = batch

    @rule()
    def reset(self) -> None:
        self.storage.reset()
        self.model.crop(self.model.length)

    @rule(batch=st.integers(1, 3), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
    def release(self, batch: int, dtype: torch.dtype) -> None:
        self.storage.release()
        assert not self.storage.is_allocated and self.storage.num_bytes == 0
        slack, self.model = self.model.slack, DenseModel(self.model.formats, self.model.transform)
        self.batch, self.dtype, self.pinned, self.model.slack = batch, dtype, [], slack

    @rule(copier=st.sampled_from([copy.deepcopy, lambda storage: pickle.loads(pickle.dumps(storage))]))
    def duplicate(self, copier: Callable[[LayerStore], LayerStore]) -> None:
        twin = copier(self.storage)
        # The one left behind must not share memory with its copy.
        for tensor in self.storage.planes[0].tensors() if self.storage.is_allocated else ():
            tensor.fill_(7)
        self.storage.reset()
        self.storage = twin
        self.pinned = addresses(twin) if twin.is_static and twin.is_allocated else []

    @precondition(lambda self: self.model.length > 0)
    @rule()
    def save_and_restore(self) -> None:
        old = self.storage
        old.flush()
        shape = (old.batch, HEADS, KEY_DIM, VALUE_DIM)
        assert old.dtype is not None
        held, planned = saved.held_planes(old), saved.planned_planes(old, shape, old.length, old.capacity, old.dtype)
        for side, planned_side in zip(held, planned, strict=True):
            for plane, planned_plane in zip(side.tensors(), planned_side.tensors(), strict=True):
                assert (plane.shape, plane.dtype) == (planned_plane.shape, planned_plane.dtype)
        twin = LayerStore(old.formats, max_cache_len=old.max_cache_len, key_transform=old.key_transform)
        saved.restore(
            twin,
            held,
            shape=shape,
            length=old.length,
            capacity=old.capacity,
            dtype=old.dtype,
            device=old.device,
            starts=old.starts,
        )
        assert twin.capacity == old.capacity and (twin.num_bytes == old.num_bytes or old.rows.slack)
        self.model.slack = 0
        self.model.forget_slack()
        for planes in old.planes:
            for tensor in planes.tensors():
                tensor.fill_(7)  # the one left behind must not share memory with its twin
        self.storage = twin
        self.pinned = addresses(twin) if twin.is_static else []

    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        self.device = data.draw(st.sampled_from(DEVICES), "device")
        self.storage.move(self.device)
        if self.storage.is_allocated:
            self._batch_is(self.batch)
            self.pinned = addresses(self.storage) if self.storage.is_static else []

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "storage"):
            return
        storage = self.storage
        assert storage.length == self.model.length
        assert storage.is_empty == (self.model.length == 0)
        if not storage.is_allocated:
            return
        assert storage.batch == self.batch
        assert storage.lengths.tolist() == [self.model.length] * self.batch
        assert storage.capacity >= max(storage.length, storage.max_cache_len or 0) and storage.capacity % 64 == 0
        assert storage.device.type == self.device
        if storage.is_static:
            assert addresses(storage) == self.pinned


class BlockMachine(StorageMachine):
    """The same where every channel of the keys has a scale."""

    @initialize(
        max_cache_len=st.sampled_from([None, MAX_CACHE_LEN]),
        batch=st.integers(1, 2),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        device=st.sampled_from(DEVICES),
        transform=st.sampled_from(["", *TRANSFORMS]),
    )
    def build(  # type: ignore[override]
        self, max_cache_len: int | None, batch: int, dtype: torch.dtype, device: str, transform: str
    ) -> None:
        super().build(BLOCKS, FORMATS[0], max_cache_len, batch, dtype, device, transform)


class WindowMachine(StorageMachine):
    """The same with dense windows, and with padding that is known from the start, since one window lies behind it."""

    @initialize(
        key_format=st.sampled_from([*FORMATS, BLOCKS, BLOCKS, BLOCKS]),
        value_format=st.sampled_from(FORMATS[1:]),
        sink_length=st.sampled_from([0, 1, 4, 33]),
        residual_length=st.sampled_from([0, 1, 7, 64, 128, 130]),
        padding=st.sampled_from([(0,), (0, 5), (20, 0, 140)]),
        max_cache_len=st.sampled_from([None, None, MAX_CACHE_LEN]),
        batch=st.integers(1, 3),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        device=st.sampled_from(DEVICES),
        transform=st.sampled_from(["", *TRANSFORMS]),
        is_announced=st.booleans(),
    )
    def build(  # type: ignore[override]
        self,
        key_format: KVFormat,
        value_format: KVFormat,
        sink_length: int,
        residual_length: int,
        padding: tuple[int, ...],
        max_cache_len: int | None,
        batch: int,
        dtype: torch.dtype,
        device: str,
        transform: str,
        is_announced: bool,
    ) -> None:
        self.padding = padding
        super().build(key_format, value_format, max_cache_len, batch, dtype, device, transform)
        formats = LayerFormats(key_format, value_format, (), sink_length, residual_length)
        self.storage = LayerStore(formats, max_cache_len=max_cache_len, key_transform=self.storage.key_transform)
        self.model = DenseModel(formats, self.model.transform)
        self.pad()
        if is_announced:
            self.expect_crops()

    def pad(self) -> None:
        starts = [self.padding[b % len(self.padding)] for b in range(self.batch)]
        self.model.starts = torch.tensor(starts, dtype=torch.int32)
        self.storage.starts = self.model.starts.to(self.device)

    @precondition(lambda self: self.model.length > 0)
    @rule(q_len=st.integers(1, 4), sliding_window=st.sampled_from([0, 0, 3, 90]))
    def attend(self, q_len: int, sliding_window: int) -> None:  # type: ignore[override]
        if self.storage.pending is not None:
            q_len = self.storage.pending[0].shape[2]
        q_len = min(q_len, self.model.length)
        assert_attends(self.storage, self.model, q_len, starts=self.model.starts, sliding_window=sliding_window)

    @rule()
    def reset(self) -> None:
        super().reset()
        self.pad()

    @rule(batch=st.integers(1, 3), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
    def release(self, batch: int, dtype: torch.dtype) -> None:
        super().release(batch, dtype)
        self.pad()


TestHistories = StorageMachine.TestCase
TestBlockHistories = BlockMachine.TestCase
TestWindowHistories = WindowMachine.TestCase
TestHistories.settings = times(200, stateful_step_count=30)
TestBlockHistories.settings = times(60, stateful_step_count=30)
TestWindowHistories.settings = times(150, stateful_step_count=30)


# --- fixed histories --------------------------------------------------------------------------------------------------


def filled(
    formats: LayerFormats, counts: list[int], *, max_cache_len: int | None = None, device: str = "cpu", batch: int = 2
) -> tuple[LayerStore, DenseModel]:
    """A storage that took chunks of these lengths, the last one still pending, and its model."""
    storage, model = LayerStore(formats, max_cache_len=max_cache_len, name="layer 3"), DenseModel(formats)
    for count in counts:
        new = new_tokens(batch, count, device=device)
        storage.extend(*new)
        model.extend(*new)
    return storage, model


@pytest.mark.parametrize("max_cache_len", [None, 200], ids=["growing", "static"])
@pytest.mark.parametrize("kv_format", FORMATS, ids=name_of)
def test_prefill_and_decode(kv_format: KVFormat, max_cache_len: int | None, device: str) -> None:
    storage, model = filled(LayerFormats(kv_format, kv_format), [60], max_cache_len=max_cache_len, device=device)
    storage.flush()
    for count in (1, 1, 1, 1, 1, 1, 5, 1):  # over the border of the first 64
        new = new_tokens(2, count, device=device)
        storage.extend(*new)
        model.extend(*new)
        assert_attends(storage, model, count)
    assert_dense(storage, model)


@pytest.mark.parametrize("consumers", ["attend", "flush", "dequantize", "attend flush attend", "dequantize attend"])
@pytest.mark.parametrize("formats", SOME_FORMATS, ids=LayerFormats.describe)
def test_tokens_are_appended_exactly_once(
    formats: LayerFormats, consumers: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Written a second time they would land in the same place, so the writes themselves are counted.
    storage, model = filled(formats, [7, 2], device=device)
    appended: list[int] = []
    for name in ("append", "decode"):
        monkeypatch.setattr(ops.Operands, name, counting(name, appended))
    for consumer in consumers.split():
        if consumer == "attend":
            assert_attends(storage, model, 2)
        else:
            getattr(storage, consumer)()
    assert appended == [2]
    assert_dense(storage, model)
    assert appended == [2]


def counting(name: str, appended: list[int]) -> Callable[..., Any]:
    """The op, noting the number of tokens whenever it writes some."""
    op = getattr(ops.Operands, name)

    def call(self: ops.Operands, first: Tensor, second: Any, *args: Any, **kwargs: Any) -> Any:
        new = second if name == "decode" else (first, second)
        if new is not None:
            appended.append(new[0].shape[2])
        return op(self, first, second, *args, **kwargs)

    return call


def test_a_bad_token_spoils_attention_until_it_is_cropped(device: str) -> None:
    storage, model = filled(INT8, [7], device=device)
    key, value = new_tokens(2, 1, device=device)
    bad = key.clone()
    bad[1, 0, 0, 5] = torch.nan
    storage.extend(bad, value)
    out, _ = storage.attend(torch.randn(2, 4, 1, KEY_DIM).to(device), softmax_scale=0.1)
    spoiled = out.isnan().all(-1).squeeze(1)
    assert spoiled.tolist() == [[False] * 4, [True, True, False, False]]
    rewind.crop(storage, 1)
    storage.extend(key, value)
    model.extend(key, value)
    assert_attends(storage, model, 1)
    assert_dense(storage, model)


def test_a_bad_token_spoils_a_frozen_scale_until_the_storage_is_reset(device: str) -> None:
    storage, _ = filled(TENSOR, [7], device=device)
    bad = new_tokens(2, 1, device=device)
    bad[0][1, 0, 0, 5] = torch.inf
    storage.extend(*bad)
    key, value = storage.dequantize()
    assert key[0].isfinite().all() and key[1].isnan().all() and value.isfinite().all()
    rewind.crop(storage, 1)
    assert storage.dequantize()[0][1].isnan().all()
    storage.reset()
    model, new = DenseModel(TENSOR), new_tokens(2, 3, device=device)
    storage.extend(*new)
    model.extend(*new)
    assert_dense(storage, model)


def test_nothing_quantised_is_handed_out_without_a_copy(device: str) -> None:
    storage, _ = filled(NONE, [7], device=device)
    assert storage.dequantize()[0].data_ptr() == storage.planes[0].codes.data_ptr()
    assert not storage.formats.is_quantized and LayerStore(INT8).formats.is_quantized


def test_sizes() -> None:
    storage, _ = filled(INT4, [7], batch=3)
    assert storage.bytes_per_token == HEADS * (KEY_DIM // 2 + 4) + HEADS * (VALUE_DIM // 2 + 4)
    assert storage.num_bytes == 3 * 64 * storage.bytes_per_token
    storage.release()
    assert storage.num_bytes == 0 and storage.capacity == 0


def test_query_offset() -> None:
    growing, _ = filled(INT8, [7, 3])
    assert growing.query_offset(3) == 7
    static, _ = filled(INT8, [7, 3], max_cache_len=64)
    offset = static.query_offset(3)
    assert isinstance(offset, Tensor) and offset.ndim == 0 and offset.item() == 7


def test_no_tokens_allocate_and_change_nothing(device: str) -> None:
    storage, model = filled(INT8, [0], device=device)
    assert storage.is_allocated and storage.is_empty and storage.pending is None and storage.length == 0
    assert [x.shape[2] for x in storage.dequantize()] == [0, 0]
    new = new_tokens(2, 3, device=device)
    storage.extend(*new)
    storage.extend(*new_tokens(2, 0, device=device))
    model.extend(*new)
    assert storage.pending is not None, "no tokens are no reason to write the pending ones"
    assert_dense(storage, model)


def test_what_is_not_allocated_has_nothing_to_change() -> None:
    storage = LayerStore(INT8)
    storage.flush()
    rewind.crop(storage, 3)
    storage.select(torch.tensor([1, 0]))
    storage.repeat(2)
    storage.move("cpu")
    storage.reset()
    storage.release()
    assert not storage.is_allocated and storage.is_empty and storage.length == 0


def test_names_of_storages_are_those_of_their_formats() -> None:
    assert {LayerStore(INT8).is_static, LayerStore(INT8, max_cache_len=5).is_static} == {False, True}
    assert LayerStore(INT8, max_cache_len=5).max_cache_len == 5


# --- growth -----------------------------------------------------------------------------------------------------------


def test_growth_is_geometric() -> None:
    storage = LayerStore(INT8)
    x = torch.randn(1, 1, 1, 8)
    capacities: list[int] = []
    copied = 0
    for length in range(1, 5001):
        storage.extend(x, x)
        storage.flush()
        if not capacities or storage.capacity != capacities[-1]:
            copied += length - 1
            capacities.append(storage.capacity)
        assert storage.capacity <= max(64, 1.5 * length + 64)
    assert len(capacities) <= 12, f"5000 tokens took the capacities {capacities}"
    assert copied <= 3 * 5000


def test_a_long_first_chunk_is_not_rounded_up_by_half() -> None:
    storage, _ = filled(INT8, [130])
    assert storage.capacity == 192
    storage.reset()
    storage.extend(*new_tokens(2, 1000))
    assert storage.capacity == 1024


@pytest.mark.parametrize("kv_format", FORMATS, ids=name_of)
def test_growth_keeps_planes(kv_format: KVFormat, device: str) -> None:
    storage, model = filled(LayerFormats(kv_format, kv_format), [64], device=device)
    storage.flush()
    before = snapshot(storage)[:-1]
    new = new_tokens(2, 1, device=device, scale=100.0)
    storage.extend(*new)
    assert storage.capacity == 128
    for plane, old in zip(snapshot(storage)[:-1], before, strict=True):
        if old.shape[-1] == 1:
            assert_same(plane, old.cpu(), "a frozen scale")
        elif old.shape[2] == 64:  # codes: [batch, heads, tokens, row]
            assert_same(plane[:, :, :64], old.cpu(), "codes")
        else:
            assert_same(plane[..., :64], old.cpu(), "scale or zero")
    model.extend(*new)
    assert_dense(storage, model)


def test_memory_that_runs_out_while_growing_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    storage, model = filled(LayerFormats(KVFormat("int8"), KVFormat("int4")), [60])
    storage.flush()
    before = snapshot(storage)
    allocate = KVFormat.allocate

    def fails_for_values(self: KVFormat, *args: Any, **kwargs: Any) -> Planes:
        if self.storage == "int4":
            raise torch.OutOfMemoryError("no memory left")
        return allocate(self, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(KVFormat, "allocate", fails_for_values)
        with pytest.raises(torch.OutOfMemoryError):
            storage.extend(*new_tokens(2, 10))
    for x, expected in zip(snapshot(storage), before, strict=True):
        assert_same(x, expected, "after running out of memory")
    new = new_tokens(2, 10)
    storage.extend(*new)
    model.extend(*new)
    assert_dense(storage, model)


# --- static storages --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("formats", SOME_FORMATS, ids=LayerFormats.describe)
def test_static_addresses_never_change(formats: LayerFormats, device: str) -> None:
    storage, _ = filled(formats, [30], max_cache_len=100, device=device, batch=3)
    before = storage.step_tensors()
    pinned = addresses(storage)
    assert storage.capacity == 128
    storage.extend(*new_tokens(3, 60, device=device))
    storage.attend(torch.randn(3, 4, 60, KEY_DIM).to(device), softmax_scale=0.1)
    storage.select(torch.tensor([2, 0, 0]))
    rewind.crop(storage, 5)
    storage.repeat(1)
    storage.move(device)
    storage.reset()
    storage.extend(*new_tokens(3, 100, device=device))
    storage.dequantize()
    assert addresses(storage) == pinned
    # The compiler knows a tensor, not an address, to be static.
    assert all(now is then for now, then in zip(storage.step_tensors(), before, strict=True))


def test_static_buffers_are_marked_for_the_compiler() -> None:
    storage, _ = filled(INT4, [30], max_cache_len=100)
    for change in (
        lambda: None,
        lambda: storage.repeat(2),
        lambda: storage.select(torch.tensor([0])),
    ):
        change()
        assert all(hasattr(tensor, "_dynamo_static_input_type") for tensor in storage.step_tensors())
    twin = copy.deepcopy(storage)
    assert all(hasattr(tensor, "_dynamo_static_input_type") for tensor in twin.step_tensors())


@pytest.mark.parametrize("held", [0, 1, 99, 100])
@pytest.mark.parametrize("formats", SOME_FORMATS, ids=LayerFormats.describe)
def test_a_full_static_storage_refuses_before_anything_changes(formats: LayerFormats, held: int, device: str) -> None:
    storage, model = filled(formats, [held] if held else [], max_cache_len=100, device=device)
    before, pending = snapshot(storage), storage.pending
    with pytest.raises(ValueError) as caught:
        storage.extend(*new_tokens(2, 101 - held, device=device))
    assert str(caught.value) == (
        f"layer 3: `max_cache_len` must be at least 101 for these tokens, got 100 ({held} held, {101 - held} new). "
        "Build the cache with a larger max_cache_len, or reset it."
    )
    assert storage.pending is pending and storage.length == held and storage.is_allocated == (held > 0)
    for x, expected in zip(snapshot(storage), before, strict=True):
        assert_same(x, expected.cpu(), "a full storage")
    if held < 100:
        new = new_tokens(2, 100 - held, device=device)
        storage.extend(*new)
        model.extend(*new)
    assert_dense(storage, model)


def test_a_compiled_step_advances_the_length_on_the_device_only(device: str) -> None:
    eager, model = filled(INT4, [9], max_cache_len=64, device=device)
    eager.flush()
    compiled = copy.deepcopy(eager)

    def step(storage: LayerStore, key: Tensor, value: Tensor, query: Tensor) -> Tensor:
        storage.extend(key, value)
        return storage.attend(query, softmax_scale=0.1)[0]

    compiled_step = torch.compile(step, fullgraph=True, backend="eager")
    for _ in range(3):
        new = new_tokens(2, 1, device=device)
        query = torch.randn(2, 4, 1, KEY_DIM).to(device)
        model.extend(*new)
        assert_same(compiled_step(compiled, *new, query), step(eager, *new, query).cpu(), "compiled step")
    assert compiled.length == eager.length == 12
    assert_dense(compiled, model)


# --- captured steps ---------------------------------------------------------------------------------------------------


def test_a_replayed_step_is_counted_on_the_host() -> None:
    """A graph that is replayed does to the device what the step did that was captured."""
    replayed, model = filled(INT4, [9], max_cache_len=64)
    new = new_tokens(2, 1)
    eager = copy.deepcopy(replayed)
    eager.extend(*new)
    model.extend(*new)
    eager.flush()
    for tensor, other in zip(replayed.step_tensors(), eager.step_tensors(), strict=True):
        tensor.copy_(other)
    replayed.length_group.note_replayed(1)
    assert (replayed.length, replayed.room) == (10, 54)
    assert_dense(replayed, model)
    rewind.crop(replayed, 1)
    assert_same(replayed.lengths, torch.tensor([9, 9], dtype=torch.int32), "lengths after a crop")


def test_a_capture_that_fails_leaves_no_tokens_behind() -> None:
    storage, model = filled(INT4, [9], max_cache_len=64)
    storage.flush()
    lengths = storage.lengths.clone()
    storage.extend(*new_tokens(2, 1))
    storage.lengths.copy_(lengths)  # the device has not run what a capture records
    storage.length_group.forget_capture(9)
    storage.pending = None
    assert_dense(storage, model)


@pytest.mark.parametrize("kind", ["", "smooth", "center"])
def test_addresses_tell_whether_a_captured_step_serves(kind: str, device: str) -> None:
    """They change with any buffer, and with nothing else."""
    storage = LayerStore(INT4, max_cache_len=64, key_transform=new_transform(kind))
    storage.extend(*new_tokens(2, 9, device=device))
    before = storage.addresses()
    assert len(before) == len(storage.step_tensors())
    storage.reset()
    storage.extend(*new_tokens(2, 5, device=device))
    assert storage.addresses() == before
    twin = copy.deepcopy(storage)
    assert not set(twin.addresses()) & set(before)
    storage.repeat(2)
    transform = 0 if storage.key_transform is None else len(storage.key_transform.tensors())
    counters = storage.buffers.counters is not None
    assert not set(storage.addresses()[: len(before) - transform - counters]) & set(before)


@pytest.mark.parametrize(
    ("formats", "has_tail"),
    [
        (INT4, False),
        (LayerFormats(KVFormat("none"), KVFormat("none")), False),
        (LayerFormats(INT4.key, INT4.value, residual_length=4), True),
        (LayerFormats(INT4.key, INT4.value, sink_length=4), True),
    ],
    ids=str,
)
def test_only_dense_windows_make_a_crop_inexact(formats: LayerFormats, has_tail: bool) -> None:
    assert LayerStore(formats, max_cache_len=64).layout.has_tail == has_tail


# --- counters ---------------------------------------------------------------------------------------------------------


def test_only_a_gpu_has_counters(device: str) -> None:
    storage, _ = filled(INT8, [7], device=device)
    assert (storage.buffers.counters is not None) == (device == "cuda")
    storage.attend(torch.randn(2, 4, 7, KEY_DIM).to(device), softmax_scale=0.1)
    storage.move("cpu")
    assert storage.buffers.counters is None


@pytest.mark.parametrize("max_cache_len", [None, 100], ids=["growing", "static"])
def test_counters_stay_with_the_buffers(max_cache_len: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, told to have some: the op checks them there and leaves them alone."""
    monkeypatch.setattr(
        "hf_kvquant.ops.new_counters",
        lambda device: torch.zeros(ops.NUM_COUNTERS, dtype=torch.int32, device=device),
    )
    passed: list[Tensor] = []
    decode = ops.Operands.decode

    def noting(*args: Any, **options: Any) -> Any:
        passed.append(options["counters"])
        return decode(*args, **options)

    monkeypatch.setattr(ops.Operands, "decode", noting)
    storage, model = filled(INT8, [30], max_cache_len=max_cache_len, batch=3)
    counters = storage.buffers.counters
    assert counters is not None and counters.dtype == torch.int32 and counters.shape == (ops.NUM_COUNTERS,)
    assert hasattr(counters, "_dynamo_static_input_type") == storage.is_static
    assert_attends(storage, model, 30)
    storage.select(torch.tensor([2, 0, 0]))
    storage.select(torch.tensor([1, 0]))
    rewind.crop(storage, 5)
    storage.extend(*new_tokens(2, 60))
    storage.reset()
    assert storage.buffers.counters is counters and passed[0] is counters and not counters.any()
    twin = copy.deepcopy(storage)
    assert (
        twin.buffers.counters is not None
        and twin.buffers.counters.data_ptr() != counters.data_ptr()
        and not twin.buffers.counters.any()
    )
    assert hasattr(twin.buffers.counters, "_dynamo_static_input_type") == storage.is_static
    storage.move("meta")
    assert storage.buffers.counters is not None and storage.buffers.counters.device.type == "meta"
    storage.release()
    assert not storage.is_allocated


# --- refusals ---------------------------------------------------------------------------------------------------------

AS_CACHE = (
    "Start a new cache for another batch or model, or use reset, batch_select_indices or batch_repeat_interleave."
)


def tokens_of(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


KEY, VALUE = (2, HEADS, 3, KEY_DIM), (2, HEADS, 3, VALUE_DIM)
MISFITS: dict[str, tuple[Tensor, Tensor, str]] = {
    "key batch": (
        tokens_of(3, HEADS, 3, KEY_DIM),
        tokens_of(3, HEADS, 3, VALUE_DIM),
        f"layer 3: `key` must have batch 2, 2 key-value heads and head_dim 64 like the cache, got shape "
        f"[3, 2, 3, 64]. {AS_CACHE}",
    ),
    "value batch": (
        tokens_of(*KEY),
        tokens_of(1, HEADS, 3, VALUE_DIM),
        f"layer 3: `value` must have batch 2, 2 key-value heads and head_dim 32 like the cache, got shape "
        f"[1, 2, 3, 32]. {AS_CACHE}",
    ),
    "key heads": (
        tokens_of(2, 4, 3, KEY_DIM),
        tokens_of(2, 4, 3, VALUE_DIM),
        f"layer 3: `key` must have batch 2, 2 key-value heads and head_dim 64 like the cache, got shape "
        f"[2, 4, 3, 64]. {AS_CACHE}",
    ),
    "key head_dim": (
        tokens_of(2, HEADS, 3, 128),
        tokens_of(*VALUE),
        f"layer 3: `key` must have batch 2, 2 key-value heads and head_dim 64 like the cache, got shape "
        f"[2, 2, 3, 128]. {AS_CACHE}",
    ),
    "value head_dim": (
        tokens_of(*KEY),
        tokens_of(*KEY),
        f"layer 3: `value` must have batch 2, 2 key-value heads and head_dim 32 like the cache, got shape "
        f"[2, 2, 3, 64]. {AS_CACHE}",
    ),
    "key ndim": (
        tokens_of(2, 3, KEY_DIM),
        tokens_of(*VALUE),
        f"layer 3: `key` must have batch 2, 2 key-value heads and head_dim 64 like the cache, got shape "
        f"[2, 3, 64]. {AS_CACHE}",
    ),
    "key dtype": (
        tokens_of(*KEY, dtype=torch.bfloat16),
        tokens_of(*VALUE, dtype=torch.bfloat16),
        "layer 3: `key` must be torch.float32 on cpu like the cache, got torch.bfloat16 on cpu. "
        "Start a new cache after moving or casting the model.",
    ),
    "value dtype": (
        tokens_of(*KEY),
        tokens_of(*VALUE, dtype=torch.float16),
        "layer 3: `value` must be torch.float32 on cpu like the cache, got torch.float16 on cpu. "
        "Start a new cache after moving or casting the model.",
    ),
    "key device": (
        tokens_of(*KEY, device="meta"),
        tokens_of(*VALUE, device="meta"),
        "layer 3: `key` must be torch.float32 on cpu like the cache, got torch.float32 on meta. "
        "Start a new cache after moving or casting the model.",
    ),
    "value tokens": (
        tokens_of(*KEY),
        tokens_of(2, HEADS, 4, VALUE_DIM),
        "layer 3: `value` must have 3 tokens like `key`, got 4.",
    ),
}


@pytest.mark.parametrize("max_cache_len", [None, 64], ids=["growing", "static"])
@pytest.mark.parametrize("formats", SOME_FORMATS, ids=LayerFormats.describe)
@pytest.mark.parametrize("misfit", MISFITS)
def test_misfits_change_nothing(misfit: str, formats: LayerFormats, max_cache_len: int | None) -> None:
    storage, model = filled(formats, [5, 2], max_cache_len=max_cache_len)
    key, value, message = MISFITS[misfit]
    before, pending = snapshot(storage), storage.pending
    with pytest.raises(ValueError) as caught:
        storage.extend(key, value)
    assert str(caught.value) == message
    assert storage.pending is pending and storage.length == 7
    for x, expected in zip(snapshot(storage), before, strict=True):
        assert_same(x, expected, "after a refusal")
    assert_attends(storage, model, 2)
    assert_dense(storage, model)


@pytest.mark.parametrize(
    ("key", "value", "error", "message"),
    [
        (
            tokens_of(2, 3, KEY_DIM),
            tokens_of(*VALUE),
            ValueError,
            "layer 3: `key` must be [batch, num_kv_heads, tokens, head_dim], got shape [2, 3, 64].",
        ),
        (
            tokens_of(*KEY),
            tokens_of(2, 3, VALUE_DIM),
            ValueError,
            "layer 3: `value` must be [batch, num_kv_heads, tokens, head_dim], got shape [2, 3, 32].",
        ),
        (
            tokens_of(*KEY, dtype=torch.float64),
            tokens_of(*VALUE, dtype=torch.float64),
            TypeError,
            "layer 3: `key` must be float32, bfloat16 or float16, got torch.float64. "
            "Load the model in one of these dtypes.",
        ),
        (
            tokens_of(2, HEADS, 3, 20),
            tokens_of(*VALUE),
            ValueError,
            "KVFormat: `head_dim` must be a positive multiple of 8, got 20. Leave the model unpatched.",
        ),
        (
            tokens_of(*KEY),
            tokens_of(2, HEADS, 4, VALUE_DIM),
            ValueError,
            "layer 3: `value` must have the batch, heads, tokens, dtype and device of `key` "
            "([2, 2, 3], torch.float32, cpu), got [2, 2, 4], torch.float32, cpu.",
        ),
        (
            tokens_of(*KEY),
            tokens_of(*VALUE, dtype=torch.float16),
            ValueError,
            "layer 3: `value` must have the batch, heads, tokens, dtype and device of `key` "
            "([2, 2, 3], torch.float32, cpu), got [2, 2, 3], torch.float16, cpu.",
        ),
        (
            tokens_of(*KEY),
            tokens_of(*VALUE, device="meta"),
            ValueError,
            "layer 3: `value` must have the batch, heads, tokens, dtype and device of `key` "
            "([2, 2, 3], torch.float32, cpu), got [2, 2, 3], torch.float32, meta.",
        ),
    ],
    ids=["key ndim", "value ndim", "dtype", "head_dim", "value tokens", "value dtype", "value device"],
)
def test_what_cannot_be_served_allocates_nothing(
    key: Tensor, value: Tensor, error: type[Exception], message: str
) -> None:
    storage = LayerStore(INT8, name="layer 3")
    for call in (storage.extend, storage.allocate_for):
        with pytest.raises(error) as caught:
            call(key, value)
        assert str(caught.value) == message
        assert not storage.is_allocated and storage.is_empty and storage.num_bytes == 0
    model, new = DenseModel(INT8), new_tokens(1, 3)
    storage.extend(*new)
    model.extend(*new)
    assert_dense(storage, model)


def test_a_refused_query_does_not_lose_pending_tokens() -> None:
    storage, model = filled(INT8, [5, 2])
    for query, message in (
        (
            torch.randn(3, 4, 2, KEY_DIM),
            "decode: `query` must have batch 2 like the cache, got 3. Was this cache filled for another batch? "
            "Use batch_select_indices, batch_repeat_interleave or reset.",
        ),
        (
            torch.randn(2, 3, 2, KEY_DIM),
            "decode: `query` must have a multiple of 2 heads, the cache's key-value heads, got 3. "
            "Was this cache filled by another model?",
        ),
    ):
        with pytest.raises(REFUSED) as caught:
            storage.attend(query, softmax_scale=0.1)
        assert str(caught.value) == message
        assert storage.pending is not None
    assert_attends(storage, model, 2)
    assert_dense(storage, model)


# --- key transforms ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TRANSFORMS)
@pytest.mark.parametrize("max_cache_len", [None, 64], ids=["growing", "static"])
def test_a_transform_of_unquantised_keys_changes_nothing_but_rounding(
    max_cache_len: int | None, kind: str, device: str
) -> None:
    torch.set_float32_matmul_precision("highest")
    transform = new_transform(kind)
    storage = LayerStore(NONE, max_cache_len=max_cache_len, key_transform=transform)
    model = DenseModel(NONE, transform)
    keys = []
    for count in (9, 2):
        new = new_tokens(2, count, device=device)
        storage.extend(*new)
        model.extend(*new)
        keys.append(new[0].cpu())
    assert_attends(storage, model, 2)
    key, value = (x[:, :, :11] for x in storage.dequantize())
    assert_same(value, model.sides[1], "values")
    # Two rotations of 6 additions each, a factor of at most 2.25 and its inverse, a centre of about 3 times 3.
    bound = 32 * torch.finfo(torch.float32).eps * (10 + float(model.sides[0].norm(dim=-1).max()))
    assert_close(key, torch.cat(keys, dim=2), bound, "keys in the model's basis")


@pytest.mark.parametrize("kind", TRANSFORMS)
@pytest.mark.parametrize("formats", SOME_FORMATS, ids=LayerFormats.describe)
def test_transformed_keys_are_what_is_quantised(formats: LayerFormats, kind: str, device: str) -> None:
    transform = new_transform(kind)
    assert transform is not None
    storage = LayerStore(formats, key_transform=transform)
    plain, model = LayerStore(formats), DenseModel(formats, transform)
    for count in (9, 2):
        key, value = new_tokens(2, count)
        storage.extend(key.to(device), value.to(device))
        plain.extend(reference.transform_key(key, transform), value)
        model.extend(key, value)
    for x, expected in zip(storage.dequantize(), model.dense, strict=True):
        assert_same(x, expected, "dense, in the model's basis")
    assert_same(plain.dequantize()[0], model.sides[0], "keys as they are stored")


def test_a_transform_that_changes_nothing_is_none() -> None:
    assert LayerStore(INT8, key_transform=KeyTransform()).key_transform is None


def test_a_transform_goes_where_the_keys_are(device: str) -> None:
    storage = LayerStore(INT8, max_cache_len=64, key_transform=new_transform("center+rotate"))
    storage.extend(*new_tokens(1, 3, device=device))
    assert storage.key_transform is not None and storage.key_transform.center is not None
    assert storage.key_transform.center.device.type == device
    storage.move("cpu")
    assert storage.key_transform.center.device.type == "cpu" and storage.key_transform.is_rotated


def test_a_transform_of_other_heads_is_refused() -> None:
    storage = LayerStore(INT8, name="layer 3", key_transform=KeyTransform(center=torch.zeros(HEADS + 1, KEY_DIM)))
    with pytest.raises(ValueError) as caught:
        storage.extend(*new_tokens(1, 3))
    assert str(caught.value) == (
        "layer 3: `key_transform.center` must be [2, 64] like the keys, got shape [3, 64]. "
        "Was it made for another model, or before its heads were sharded?"
    )
    assert not storage.is_allocated and storage.is_empty
    with pytest.raises(TypeError) as caught_type:
        LayerStore(INT8, name="layer 3", key_transform=torch.zeros(2, 64))  # type: ignore[arg-type]
    assert str(caught_type.value) == (
        "layer 3: `key_transform` must be a KeyTransform or None, got Tensor. "
        "hf_kvquant.key_transforms returns those of a model."
    )


@pytest.mark.parametrize("preset", ["none", "int8", "int4-token"])
def test_a_cropped_nan_is_gone_from_a_static_storage(preset: str) -> None:
    storage = LayerStore(LayerFormats(*PRESETS[preset]), max_cache_len=16)
    good = torch.randn(1, 2, 3, 32)
    storage.extend(good, good)
    storage.flush()
    before = storage.dequantize()
    storage.extend(torch.full((1, 2, 2, 32), torch.nan), torch.full((1, 2, 2, 32), torch.nan))
    assert all(x[:, :, 3:5].isnan().all() for x in storage.dequantize())
    rewind.crop(storage, 2)
    for x, expected in zip(storage.dequantize(), before, strict=True):
        assert torch.equal(x, expected) and not x[:, :, 3:].any()


@pytest.mark.parametrize("max_cache_len", [None, 300], ids=["growing", "static"])
@pytest.mark.parametrize(
    "formats",
    [
        INT4,
        NONE,
        LayerFormats(*PRESETS["int4-channel"], residual_length=9),
        LayerFormats(INT4.key, INT4.value, (), 3, 20),
    ],
    ids=["int4-token", "none", "channel", "windows"],
)
def test_every_sequence_has_its_own_length(formats: LayerFormats, max_cache_len: int | None) -> None:
    """A batch of unequal sequences does what each of them does alone."""
    counts = 140, 9, 77
    alone = []
    for count in counts:
        storage = LayerStore(formats, max_cache_len=max_cache_len)
        storage.extend(*new_tokens(1, count))
        storage.flush()
        alone.append(storage)
    batch = LayerStore(formats, max_cache_len=max_cache_len)
    batch.extend(*new_tokens(3, max(counts)))
    batch.flush()
    for b, storage in enumerate(alone):
        for planes, own in zip(batch.planes, storage.planes, strict=True):
            for plane, part in zip(planes.tensors(), own.tensors(), strict=True):
                axes = tuple(slice(0, size) for size in part.shape[1:])
                plane[(b, *axes)] = part[0]
    batch.place(counts)
    assert batch.is_ragged and batch.count() == counts and batch.length == 140
    for crop in (0, 5):
        rewind.crop(batch, crop)
        for storage in alone:
            rewind.crop(storage, crop)
        new = new_tokens(3, 2)
        query = torch.randn(3, 4, 2, KEY_DIM)
        batch.extend(*new)
        out, lse = batch.attend(query, softmax_scale=0.1)
        for b, storage in enumerate(alone):
            storage.extend(*(x[b : b + 1] for x in new))
            expected, expected_lse = storage.attend(query[b : b + 1], softmax_scale=0.1)
            torch.testing.assert_close(out[b : b + 1], expected)
            torch.testing.assert_close(lse[b : b + 1], expected_lse)
            for side, own in zip(batch.dequantize(), storage.dequantize(), strict=True):
                assert_same(side[b : b + 1, :, : storage.length], own[:, :, : storage.length], f"sequence {b}")
    batch.select(torch.tensor([2, 0, 0]))
    assert batch.count() == tuple(alone[b].length for b in (2, 0, 0))
    batch.select(torch.tensor([1]))
    assert batch.count() == alone[0].length and not batch.is_ragged
