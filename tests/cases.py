"""The formats, shapes, data and planes that all tests share, and how many examples hypothesis draws."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import settings
from torch import Tensor

from hf_kvquant import KeyTransform, ops
from hf_kvquant.spec import reference
from hf_kvquant.spec.codes import BITS, INTEGER_BITS
from hf_kvquant.spec.formats import KVFormat
from hf_kvquant.spec.layout import KVLayout
from hf_kvquant.spec.planes import Planes

HEAD_DIMS = (64, 80, 96, 128, 256, 8, 40)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NUM_Q_PER_KV = (1, 4, 8)
Q_LENS = (1, 2, 5, 33)
KINDS = ("center", "smooth", "rotate", "center+smooth+rotate")  # of key transforms
# What a compiled op raises for a bad argument. torch 2.15 turns every C++ exception of an op into a RuntimeError; the
# reference raises ValueError there, too.
REFUSED = (ValueError,) if torch.__version__ < (2, 15) else (ValueError, RuntimeError)


def times(count: int, **options: Any) -> settings:
    """Settings of a hypothesis test: `count` examples with `--all`, half of them in the quick tier.

    All other settings are in the profiles of `conftest.py`. `HF_KVQUANT_FUZZ` multiplies the number of examples.
    """
    share = settings.default.max_examples / 100 * float(os.environ.get("HF_KVQUANT_FUZZ", "1"))
    return settings(max_examples=max(1, round(count * share)), **options)


def some(items: Sequence[Any], turn: int) -> Sequence[Any]:
    """All with `--all`, in the quick tier every other one: in odd turns those that even turns leave out."""
    return items if settings.default.max_examples == 100 else items[turn % 2 :: 2]


def engines() -> list[str]:
    """What can run the ops here: every supported instruction set of the CPU kernels, and CUDA if there is a GPU."""
    names = ["cpu"]
    module = ops.extension()
    if not isinstance(module, ImportError):
        names = [f"cpu-{name}" for name in ("portable", "avx2", "avx512") if module.set_cpu_capability(name)]
        module.set_cpu_capability(None)
    return names + (["cuda"] if torch.cuda.is_available() else [])


def make_formats(head_dim: int = 64) -> list[KVFormat]:
    """Every storage type, granularity and symmetry, and clipped formats, with a group size that divides `head_dim`."""
    group_size = next(size for size in (32, 40, 16, 8) if head_dim % size == 0)
    formats = [KVFormat("none")]
    # The same cases run on a GPU where there is one, which refuses some storage types.
    served = [name for name in BITS if not (torch.cuda.is_available() and name in ops.kernels.CPU_STORAGES)]
    for storage in served:
        for symmetric in (True, False) if storage in INTEGER_BITS else (True,):
            for granularity in ("tensor", "token", "head", "group"):
                size = group_size if granularity == "group" else None
                formats.append(KVFormat(storage, granularity, size, symmetric))
    formats.append(KVFormat("int4", symmetric=False, clip_ratio=0.92))
    formats.append(KVFormat("int4", "tensor", symmetric=False, clip_ratio=0.6))
    formats.append(KVFormat("int8", "group", group_size, clip_ratio=0.3))
    return formats


def is_repeated(index: int, head_dim: int) -> bool:
    """Whether the quick tier leaves out this one of `make_formats` with this head dim: half of the integers.

    A format that differs from it in its symmetry alone has the head dim then, and it has the next head dim.
    """
    turn = (64, 80, 96, 128, 256, 8, 40, 72).index(head_dim)
    return make_formats(head_dim)[index].is_integer and (index // 4 + index + turn) % 2 == 1


def name_of(value: object) -> str:
    """A part of a test id: formats and dtypes by name, anything else as it is."""
    if isinstance(value, KVFormat):
        return value.describe()
    return str(value).removeprefix("torch.")


def make_transform(kind: str, head_dim: int, heads: int = 2) -> KeyTransform:
    """A transform of one of `KINDS`, with random numbers."""
    parts = kind.split("+")
    center = 3 * torch.randn(heads, head_dim) if "center" in parts else None
    smoothing = 0.25 + 2 * torch.rand(heads, head_dim) if "smooth" in parts else None
    return KeyTransform(center, smoothing, "rotate" in parts)


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of the ops."""

    formats: tuple[KVFormat, KVFormat]
    head_dim: int
    dtype: torch.dtype = torch.float32
    num_q_per_kv: int = 1
    q_len: int = 1
    lengths: tuple[int, ...] = (64, 1, 37)
    starts: tuple[int, ...] | None = None
    num_kv_heads: int = 2
    value_dim: int | None = None
    capacity: int = 128
    sink_length: int = 0
    residual_length: int = 0
    slack: int = 0

    def __str__(self) -> str:
        keys, values = (kv_format.describe() for kv_format in self.formats)
        formats = keys if keys == values else f"{keys}+{values}"
        text = f"{formats}-hd{self.head_dim}-{name_of(self.dtype)}-gqa{self.num_q_per_kv}-q{self.q_len}"
        text += f"-len{','.join(map(str, self.lengths))}"
        text += f"-dense{self.sink_length}+{self.residual_length}" if any(self.windows.values()) else ""
        return text + (f"-slack{self.slack}" if self.slack else "")

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def num_q_heads(self) -> int:
        return self.num_kv_heads * self.num_q_per_kv

    @property
    def windows(self) -> dict[str, Any]:
        """The numbers of tokens that stay dense, as arguments of ops and reference."""
        return {"sink_length": self.sink_length, "residual_length": self.residual_length}

    @property
    def layout(self) -> KVLayout:
        """The formats with these windows."""
        return KVLayout(*self.formats, **self.windows)

    @property
    def ring(self) -> KVLayout:
        """The same of a ring."""
        return dataclasses.replace(self.layout, rows="ring")

    def head_dims(self) -> tuple[int, int]:
        """The head dims of keys and of values."""
        return self.head_dim, self.value_dim or self.head_dim

    def lengths_tensor(self) -> Tensor:
        return torch.tensor(self.lengths, dtype=torch.int32)

    def starts_tensor(self) -> Tensor | None:
        return None if self.starts is None else torch.tensor(self.starts, dtype=torch.int32)


def tokens(case: Case, count: int, head_dim: int, scale: float = 1.0) -> Tensor:
    """Random keys or values `[batch, num_kv_heads, count, head_dim]` in the case's dtype, one channel an outlier."""
    x = torch.randn(case.batch, case.num_kv_heads, count, head_dim) * scale
    x[..., head_dim // 3] *= 6
    return x.to(case.dtype)


def queries(case: Case) -> Tensor:
    return torch.randn(case.batch, case.num_q_heads, case.q_len, case.head_dim).to(case.dtype)


def poisoned(
    kv_format: KVFormat,
    batch: int,
    heads: int,
    head_dim: int,
    capacity: int,
    dtype: torch.dtype,
    device: str = "cpu",
    **windows: int,
) -> Planes:
    """Planes full of numbers that must never reach an output: NaN, or random codes with NaN scales."""
    planes = kv_format.allocate(batch, heads, head_dim, capacity, dtype=dtype, device=torch.device(device), **windows)
    if not kv_format.is_quantized:
        planes.codes.fill_(torch.nan)
        return planes
    planes.codes.random_(0, 256)
    assert planes.scale is not None
    planes.scale.fill_(torch.nan)
    for plane in (planes.zero, planes.tail):
        if plane is not None:
            plane.fill_(torch.nan)
    return planes


def filled(case: Case, side: int, x: Tensor | None = None, key_transform: KeyTransform | None = None) -> Planes:
    """Planes with tokens `starts … lengths - 1` of `x` (random by default), everything else poisoned.

    With a tail, padding is stored too, but its keys do not count for scales.

    Args:
        case: Gives format, shapes and lengths.
        side: 0 for keys, 1 for values.
        x: `[batch, num_kv_heads, capacity, head_dim]`, on the device where the planes will be.
        key_transform: Applied to keys; on the same device.
    """
    kv_format, head_dim = case.formats[side], case.head_dims()[side]
    if x is None:
        x = tokens(case, case.capacity, head_dim)
    shape = case.batch, case.num_kv_heads, head_dim, case.capacity
    outside = poisoned(kv_format, *shape, case.dtype, device=str(x.device), slack=case.slack, **case.windows)
    if outside.tail is not None:
        starts = case.starts_tensor()
        for b, length in enumerate(case.lengths):
            row = outside.map(lambda plane, b=b: plane[b : b + 1])  # type: ignore[misc]
            start = None if starts is None else starts[b : b + 1].to(x.device)
            lengths = torch.tensor([length], dtype=torch.int32, device=x.device)
            new = x[b : b + 1, :, :length].to(case.dtype)
            if kv_format.granularity == "tensor":
                frozen = reference.compute_scale(x[b : b + 1], kv_format)
                for plane, scale in zip((row.scale, row.zero), frozen, strict=True):
                    if plane is not None and scale is not None:
                        plane.copy_(scale)
            reference.append(new, row, kv_format, lengths, key_transform, start, **case.windows)
        return outside
    if key_transform is not None:
        x = reference.transform_key(x, key_transform)
    if not kv_format.is_quantized:
        inside = Planes(x.to(outside.codes.dtype), None, None)
    else:
        inside = reference.quantize(x, kv_format)
    return merged(case, inside, outside)


def merged(case: Case, inside: Planes, outside: Planes) -> Planes:
    """Planes with stored tokens and frozen scales from `inside`, and everything else from `outside`."""
    column = torch.arange(case.capacity, device=inside.codes.device)
    lengths = case.lengths_tensor().to(column.device).unsqueeze(1)
    is_held = column < lengths  # [batch, capacity]
    starts = case.starts_tensor()
    if starts is not None:
        is_held &= column >= starts.to(column.device).unsqueeze(1)

    def merge(plane: Tensor | None, poison: Tensor | None) -> Tensor | None:
        if plane is None or poison is None or plane.shape[3] == 1:
            return plane
        # Contiguous, as in a storage: other strides may take another path in kernels.
        return torch.where(is_held[:, None, None, :], plane, poison).contiguous()

    codes = torch.where(is_held[:, None, :, None], inside.codes, outside.codes)
    return Planes(codes, merge(inside.scale, outside.scale), merge(inside.zero, outside.zero))


def clone(planes: Planes, device: str = "cpu") -> Planes:
    """A copy with the same strides, on a device."""
    return planes.map(lambda plane: plane.clone().to(device))


def row_of(planes: Planes, b: int) -> Planes:
    """A copy of the planes of one sequence."""
    return planes.map(lambda plane: plane[b : b + 1].clone())
