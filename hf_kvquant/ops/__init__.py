"""The ops of the package, their fakes, and the loading of the compiled extension.

`torch.ops.hf_kvquant.append` quantises new tokens into planes. `torch.ops.hf_kvquant.decode` does the same with new
tokens, if it is given any, and then attends to everything stored. The schemas are defined here and nowhere else;
`csrc/` registers kernels for them under the CPU and CUDA keys. Where there is no kernel, `reference.py` runs instead,
and the log says so once: under the same op names if the build has no kernels for the device type, and as
`append_reference` and `decode_reference` if its kernels do not fit the GPU or the head_dim. The rest of the package
calls `Operands` below, which chooses between kernel and reference and unpacks the planes. `handle.py` and
`attention.py` decide which layer calls it, and when.

`rms_norm`, `add_rms_norm`, `rotary` and `silu_mul` compute what lies between a model's linear layers, in one CUDA
kernel each, rounding exactly like the kernels they replace. Only `fusion.py` calls them. `prefetch` loads weights into
a GPU's L2 cache before a linear layer needs them. Only `prefetch.py` calls it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
import re
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .._ops import add_op_namespace_prefix
from .._ops import ops as torch_ops
from ..spec import reference
from ..spec.formats import BLOCK_SIZE, STORAGE_IDS, TOKEN_ALIGNMENT, KVFormat, Planes, format_of
from ..spec.key_transform import KeyTransform
from . import arguments as op_arguments

logger = logging.getLogger(__name__)

# Increment this, here and in csrc/format.h, when a schema below or the meaning of an argument changes. A stale build is
# then refused at load instead of reading its arguments in the wrong order.
OPS_VERSION = 8

# The thread blocks of a CUDA decode that share a sequence find the last of them with an atomic counter; that one
# combines their parts. Mirrored in csrc/format.h.
NUM_COUNTERS = 4096
# The CUDA kernels keep a row of a head in registers. Mirrored in csrc/format.h.
MAX_CUDA_HEAD_DIM = 256

# To be run in a clone. pip reinstalls from a folder even if the version is the same.
REINSTALL = "pip install --no-build-isolation ."

_PLANES = (
    "Tensor(a!) key_codes, Tensor(b!)? key_scale, Tensor(c!)? key_zero, Tensor(d!)? key_tail, "
    "Tensor(e!) value_codes, Tensor(f!)? value_scale, Tensor(g!)? value_zero, Tensor(h!)? value_tail"
)
# Dense windows, whether rows form a ring, a `KeyTransform`, then clip ratio and storage type of keys and of values.
_KINDS = (
    "int sink_length, int residual_length, bool is_ring, Tensor? key_center, Tensor? key_smoothing, bool rotates_key, "
    "float key_clip_ratio, float value_clip_ratio, int key_storage, int value_storage"
)
APPEND_SCHEMA = f"append(Tensor key, Tensor value, {_PLANES}, Tensor lengths, Tensor? starts, {_KINDS}) -> ()"
DECODE_SCHEMA = (
    f"decode(Tensor query, Tensor? key, Tensor? value, {_PLANES}, Tensor lengths, Tensor(i!)? counters, "
    "Tensor? starts, Tensor? sinks, Tensor? alibi_slopes, float softmax_scale, float softcap, int sliding_window, "
    f"int num_splits, {_KINDS}) -> (Tensor out, Tensor lse)"
)
FUSED_SCHEMAS = (
    "rms_norm(Tensor x, Tensor weight, Tensor? mean, float eps) -> Tensor",
    "add_rms_norm(Tensor x, Tensor other, Tensor weight, float eps) -> (Tensor total, Tensor normed)",
    "rotary(Tensor query, Tensor key, Tensor cos, Tensor sin) -> (Tensor query, Tensor key)",
    "silu_mul(Tensor gate, Tensor up) -> Tensor",
)
PREFETCH_SCHEMA = "prefetch(Tensor weight, int num_bytes) -> ()"

_library = torch.library.Library(torch_ops.name, "DEF")
_library.define(APPEND_SCHEMA)
_library.define(DECODE_SCHEMA)
# These are ops, not Python functions, so that the compiler sees a call instead of a data-dependent branch.
for _schema in (APPEND_SCHEMA, DECODE_SCHEMA):
    _library.define(_schema.replace("(", "_reference(", 1), tags=torch.Tag.cudagraph_unsafe)
for _schema in (*FUSED_SCHEMAS, PREFETCH_SCHEMA):
    _library.define(_schema)


# --- the reference under the names of the ops -------------------------------------------------------------------------


def _append_reference(
    key: Tensor,
    value: Tensor,
    key_codes: Tensor,
    key_scale: Tensor | None,
    key_zero: Tensor | None,
    key_tail: Tensor | None,
    value_codes: Tensor,
    value_scale: Tensor | None,
    value_zero: Tensor | None,
    value_tail: Tensor | None,
    lengths: Tensor,
    starts: Tensor | None,
    sink_length: int,
    residual_length: int,
    is_ring: bool,
    key_center: Tensor | None,
    key_smoothing: Tensor | None,
    rotates_key: bool,
    key_clip_ratio: float,
    value_clip_ratio: float,
    key_storage: int,
    value_storage: int,
) -> None:
    _warn_reference(key.device, key.shape[-1], value.shape[-1])
    transform = _transform_of(key_center, key_smoothing, rotates_key)
    windows = sink_length, residual_length
    for x, planes, storage_id, clip_ratio, key_transform in (
        (key, Planes(key_codes, key_scale, key_zero, key_tail), key_storage, key_clip_ratio, transform),
        (value, Planes(value_codes, value_scale, value_zero, value_tail), value_storage, value_clip_ratio, None),
    ):
        kv_format = dataclasses.replace(format_of(planes, storage_id, x.shape[-1], *windows), clip_ratio=clip_ratio)
        reference.append(x, planes, kv_format, lengths, key_transform, starts, *windows, is_ring)


def _decode_reference(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    key_codes: Tensor,
    key_scale: Tensor | None,
    key_zero: Tensor | None,
    key_tail: Tensor | None,
    value_codes: Tensor,
    value_scale: Tensor | None,
    value_zero: Tensor | None,
    value_tail: Tensor | None,
    lengths: Tensor,
    counters: Tensor | None,
    starts: Tensor | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    softmax_scale: float,
    softcap: float,
    sliding_window: int,
    num_splits: int,
    sink_length: int,
    residual_length: int,
    is_ring: bool,
    key_center: Tensor | None,
    key_smoothing: Tensor | None,
    rotates_key: bool,
    key_clip_ratio: float,
    value_clip_ratio: float,
    key_storage: int,
    value_storage: int,
) -> tuple[Tensor, Tensor]:
    key_planes = Planes(key_codes, key_scale, key_zero, key_tail)
    value_planes = Planes(value_codes, value_scale, value_zero, value_tail)
    value_dim = head_dim_of(value_codes, value_storage)
    _warn_reference(query.device, query.shape[-1], value_dim)
    if key is not None and value is not None:
        _append_reference(
            key,
            value,
            key_codes,
            key_scale,
            key_zero,
            key_tail,
            value_codes,
            value_scale,
            value_zero,
            value_tail,
            lengths,
            starts,
            sink_length,
            residual_length,
            is_ring,
            key_center,
            key_smoothing,
            rotates_key,
            key_clip_ratio,
            value_clip_ratio,
            key_storage,
            value_storage,
        )
    windows = sink_length, residual_length
    key_format = format_of(key_planes, key_storage, query.shape[-1], *windows)
    value_format = format_of(value_planes, value_storage, value_dim, *windows)
    position = reference.ring_positions(lengths, key_codes.shape[2]) if is_ring else None
    held = lengths, starts, *windows
    return reference.decode_attention(
        query,
        reference.dequantize(key_planes, key_format, torch.float32, *held, position=position),
        reference.dequantize(value_planes, value_format, torch.float32, *held, position=position),
        lengths,
        softmax_scale=softmax_scale,
        starts=starts,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        softcap=softcap,
        sliding_window=sliding_window,
        key_transform=_transform_of(key_center, key_smoothing, rotates_key),
        is_dense=reference.dense_tokens(key_planes, key_format, *held, position)[0],
        key_position=position,
    )


def _transform_of(center: Tensor | None, smoothing: Tensor | None, is_rotated: bool) -> KeyTransform | None:
    if center is None and smoothing is None and not is_rotated:
        return None
    return KeyTransform.of_checked(center, smoothing, is_rotated)


def _arguments_of(op: str, args: Iterable[object]) -> dict[str, Any]:
    """The arguments of an op, by their names in its schema."""
    schema = getattr(torch_ops, op).default._schema
    return dict(zip((argument.name for argument in schema.arguments), args, strict=True))


def _checked_append(*args: Any) -> None:
    op_arguments.check_append("append", _arguments_of("append", args))
    with torch.no_grad():  # as the kernels do
        _append_reference(*args)


def _checked_decode(*args: Any) -> tuple[Tensor, Tensor]:
    op_arguments.check_decode(_arguments_of("decode", args), NUM_COUNTERS)
    with torch.no_grad():
        return _decode_reference(*args)


def _resolving(op: str) -> Callable[..., Any]:
    """An op that first resolves lazily negated tensors. torch's own fallback cannot do so for ops that mutate."""

    def resolve(*args: Any) -> Any:
        overload = getattr(torch_ops, op).default
        return overload(*op_arguments.without_lazy_negation(op.removesuffix("_reference"), overload._schema, args))

    return resolve


for _name in ("append", "append_reference"):
    _library.impl(_name, _checked_append, "CompositeExplicitAutograd")
    _library.impl(_name, _resolving(_name), "Negative")
for _name in ("decode", "decode_reference"):
    _library.impl(_name, _checked_decode, "CompositeExplicitAutograd")
    _library.impl(_name, _resolving(_name), "Negative")
_library.impl("rms_norm", reference.rms_norm, "CompositeExplicitAutograd")
_library.impl("add_rms_norm", reference.add_rms_norm, "CompositeExplicitAutograd")
_library.impl("rotary", reference.rotary, "CompositeExplicitAutograd")
_library.impl("silu_mul", reference.silu_mul, "CompositeExplicitAutograd")
_library.impl("prefetch", op_arguments.check_prefetch, "CompositeExplicitAutograd")  # a hint, ignored


# torch calls a fake, which computes nothing, as soon as one tensor is on `meta`, even if the others hold numbers.


@torch.library.register_fake(add_op_namespace_prefix("append"), lib=_library)
@torch.library.register_fake(add_op_namespace_prefix("append_reference"), lib=_library)
def _append_fake(*args: object) -> None:
    op_arguments.check_devices("append", _arguments_of("append", args))


@torch.library.register_fake(add_op_namespace_prefix("decode"), lib=_library)
@torch.library.register_fake(add_op_namespace_prefix("decode_reference"), lib=_library)
def _decode_fake(*args: object) -> tuple[Tensor, Tensor]:
    arguments = _arguments_of("decode", args)
    op_arguments.check_results(arguments)
    query = arguments["query"]
    batch, num_q_heads, q_len, _ = query.shape
    value_dim = head_dim_of(arguments["value_codes"], arguments["value_storage"])
    out = query.new_empty(batch, q_len, num_q_heads, value_dim)
    return out, query.new_empty((batch, num_q_heads, q_len), dtype=torch.float32)


def _fake_like(op: str, *like: str) -> Callable[..., Any]:
    """The fake of an op whose results have the shapes and dtypes of some of its arguments."""

    def fake(*args: object) -> Any:
        arguments = _arguments_of(op, args)
        op_arguments.check_devices(op, arguments)
        results = tuple(torch.empty_like(arguments[name]) for name in like)
        return results if len(results) > 1 else results[0]

    return fake


for _name, _like in (
    ("rms_norm", ("x",)),
    ("add_rms_norm", ("x", "other")),
    ("rotary", ("query", "key")),
    ("silu_mul", ("gate",)),
):
    torch.library.register_fake(add_op_namespace_prefix(_name), _fake_like(_name, *_like), lib=_library)


@torch.library.register_fake(add_op_namespace_prefix("prefetch"), lib=_library)
def _prefetch_fake(weight: Tensor, num_bytes: int) -> None:
    pass


def head_dim_of(codes: Tensor, storage_id: int) -> int:
    """Channels of a head, from a codes plane."""
    return codes.shape[-1] * (2 if storage_id == STORAGE_IDS["int4"] else 1)


# --- the extension ----------------------------------------------------------------------------------------------------


@functools.cache
def extension() -> ModuleType | ImportError:
    """The compiled extension, loaded on the first call, or the error that kept it from loading."""
    try:
        module = importlib.import_module(f"{__package__.rpartition('.')[0]}._C")
    except ImportError as error:
        return error
    expected = {
        "OPS_VERSION": OPS_VERSION,
        "TOKEN_ALIGNMENT": TOKEN_ALIGNMENT,
        "NUM_COUNTERS": NUM_COUNTERS,
        "MAX_CUDA_HEAD_DIM": MAX_CUDA_HEAD_DIM,
        "BLOCK_SIZE": BLOCK_SIZE,
        "MAX_RING_LENGTH": op_arguments.MAX_RING_LENGTH,
    }
    expected |= {f"STORAGE_{name.upper()}": number for name, number in STORAGE_IDS.items()}
    for name, number in expected.items():
        found = getattr(module, name, None)
        if found != number:
            # By now the kernels are registered, so going on would call them with the wrong arguments.
            raise RuntimeError(
                f"ops: the extension must be built from this version of the package ({name} {number}), got {found}. "
                f"Reinstall: {REINSTALL}"
            )
    return module


def has_kernels(device_type: str) -> bool:
    """Whether the extension has kernels for a device type, `"cpu"` or `"cuda"`. See also `serves_gpu`."""
    module = extension()
    return isinstance(module, ModuleType) and bool(getattr(module, f"HAS_{device_type.upper()}", 0))


def covers(archs: str, capability: tuple[int, int]) -> bool:
    """Whether code compiled for these architectures runs on a GPU of this compute capability.

    Args:
        archs: As in `HF_KVQUANT_CUDA_ARCHS`, such as `"80;86;90"`. Machine code runs on GPUs with the same major number
            and the same or a higher minor number. The last architecture is also built as PTX, which every later GPU can
            compile. The suffix `a` stands for features that no other GPU has.
        capability: Major and minor number.
    """
    built = []
    for major, minor, suffix in re.findall(r"(\d+)(\d)([af]?)", archs):
        arch = int(major), int(minor)
        if capability == arch or (suffix != "a" and capability[0] == arch[0] and capability[1] >= arch[1]):
            return True
        built.append((arch, suffix))
    return bool(built) and not built[-1][1] and capability >= built[-1][0]


@functools.cache
def serves_gpu(index: int) -> bool:
    """Whether the compiled kernels run on this GPU of the process. `False` also if there are no CUDA kernels."""
    module = extension()
    if isinstance(module, ImportError) or not has_kernels("cuda"):
        return False
    return covers(module.cuda_archs(), torch.cuda.get_device_capability(index))


# The compiler cannot trace this check. It may take the result for a constant, since the GPU stays the same.
@torch.compiler.assume_constant_result
def _serves_gpu(index: int) -> bool:
    return serves_gpu(index)


def _has_kernel(device: torch.device, *head_dims: int) -> bool:
    """Whether to call the op itself, not its `_reference`. Always so on devices other than CUDA."""
    if device.type != "cuda":
        return True
    return max(head_dims) <= MAX_CUDA_HEAD_DIM and _serves_gpu(0 if device.index is None else device.index)


@dataclasses.dataclass(frozen=True)
class NoKernel:
    """Why the PyTorch reference runs.

    Attributes:
        what: What the compiled kernels do not support: a device, or a head_dim on one.
        reason: Why not.
        remedy: What to do.
    """

    what: str
    reason: str
    remedy: str


def why_reference(device: torch.device, *head_dims: int) -> NoKernel | None:
    """Why calls on a device run the reference, or `None` if they run compiled kernels.

    Args:
        device: Of the codes.
        *head_dims: Of keys and of values; leave them out if they are not known.
    """
    module = extension()
    if isinstance(module, ImportError) or not has_kernels(device.type):
        reason = module if isinstance(module, ImportError) else f"it was built without kernels for {device.type}"
        remedy = f"Install a compiler and reinstall: {REINSTALL}"
        return NoKernel(device.type, str(reason), remedy)
    if device.type != "cuda":
        return None
    if not serves_gpu(device.index):
        major, minor = torch.cuda.get_device_capability(device.index)
        return NoKernel(
            f"{torch.cuda.get_device_name(device.index)}, compute capability {major}.{minor}",
            f"they were built for {module.cuda_archs()}",
            f"Reinstall: HF_KVQUANT_CUDA_ARCHS={major}{minor} {REINSTALL} (8.0 or later)",
        )
    if max(head_dims, default=0) > MAX_CUDA_HEAD_DIM:
        return NoKernel(
            f"head_dim {max(head_dims)} on {device.type}",
            f"they support head_dim up to {MAX_CUDA_HEAD_DIM}",
            "Leave this model unpatched where speed matters more than memory.",
        )
    return None


def kernel_name(device: torch.device, *head_dims: int) -> str:
    """The name of what runs calls on a device, for display. See `why_reference`."""
    module = extension()
    if isinstance(module, ImportError) or why_reference(device, *head_dims) is not None:
        return "PyTorch reference"
    return f"CPU kernel, {module.cpu_capability()}" if device.type == "cpu" else f"{device.type.upper()} kernel"


def _warn_reference(device: torch.device, *head_dims: int) -> None:
    """Log why the reference runs, once per reason."""
    without = why_reference(device, *head_dims)
    if without is not None:
        _log_reference(without.what, without.reason, without.remedy)


@functools.cache
def _log_reference(what: str, reason: str, remedy: str) -> None:
    logger.warning(
        "ops: no compiled kernels for %s, the PyTorch reference runs: correct, slower (%s). %s", what, reason, remedy
    )


# --- what the package calls -------------------------------------------------------------------------------------------


class Operands:
    """The arguments of `append` and `decode` that stay the same from step to step, unpacked once per layer.

    Args:
        key_planes: Of one layer.
        value_planes: The same for values.
        formats: Of keys and of values.
        key_transform: Applied to new keys, as it was to the stored ones; on the same device. The op transforms the
            query. `None` for granularity `channel`.
        sink_length: How many of the first tokens stay dense. The planes must have been allocated with the same number.
        residual_length: How many of the newest tokens stay dense; likewise.
        is_ring: Whether the rows of the planes form a ring: a token is in row `position % capacity`, and new tokens
            overwrite those that have left the `sliding_window` of `decode`. The capacity must be a multiple of
            `BLOCK_SIZE`.
    """

    def __init__(
        self,
        key_planes: Planes,
        value_planes: Planes,
        formats: tuple[KVFormat, KVFormat],
        key_transform: KeyTransform | None = None,
        sink_length: int = 0,
        residual_length: int = 0,
        is_ring: bool = False,
    ) -> None:
        key_storage, value_storage = formats[0].storage_id, formats[1].storage_id
        self._planes = (*_spell(key_planes), *_spell(value_planes))
        clip_ratios = formats[0].clip_ratio, formats[1].clip_ratio
        storages = key_storage, value_storage
        windows = sink_length, residual_length, is_ring
        self._kinds = (*windows, *_spell_transform(key_transform), *clip_ratios, *storages)
        codes = key_planes.codes
        head_dims = head_dim_of(codes, key_storage), head_dim_of(value_planes.codes, value_storage)
        has_kernel = _has_kernel(codes.device, *head_dims)
        # Overloads: looking up a name in every call would take 2 of 17 us on a CPU.
        self._append = (torch_ops.append if has_kernel else torch_ops.append_reference).default
        self._decode = (torch_ops.decode if has_kernel else torch_ops.decode_reference).default

    def append(self, key: Tensor, value: Tensor, lengths: Tensor, starts: Tensor | None = None) -> None:
        """Quantise new tokens into the planes, as `reference.append` defines it.

        Args:
            key: `[batch, num_kv_heads, q_len, head_dim]`, fp32, bf16 or fp16. Read only.
            value: The same; its head_dim may differ.
            lengths: `[batch]` int32 on the same device: tokens held, including the new ones, which are written at
                `lengths - q_len … lengths - 1`.
            starts: `[batch]` int32 on the same device: first position that is not padding. Granularity `channel` leaves
                padding out of its scales, and the first `sink_length` tokens are counted from here.
        """
        self._append(key, value, *self._planes, lengths, starts, *self._kinds)

    def decode(
        self,
        query: Tensor,
        new: tuple[Tensor, Tensor] | None,
        lengths: Tensor,
        *,
        softmax_scale: float,
        counters: Tensor | None = None,
        starts: Tensor | None = None,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        softcap: float = 0.0,
        sliding_window: int = 0,
        num_splits: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Append new tokens if there are any, then attend to everything stored: see `reference.decode_attention`.

        Kernels dequantise codes tile by tile: they never build a `[length, head_dim]` tensor and never synchronise with
        the host. The reference does both.

        Args:
            query: `[batch, num_q_heads, q_len, head_dim]`, fp32, bf16 or fp16. Read only.
            new: The key and value of these tokens, appended first; `None` if they have been appended already.
            lengths: `[batch]` int32: tokens held, including those of the query. A CPU refuses more than the capacity.
                On a GPU, where the host does not know the lengths, the results of that sequence are NaN instead.
            softmax_scale: Multiplies query · key.
            counters: `[NUM_COUNTERS]` int32 on the same device, all zero: scratch of the CUDA kernel, which sets it to
                zero again. Calls that may run at the same time, on two streams, must not share it. With `None`, the
                CUDA kernel clears its own, which takes one more launch. Other devices need none.
            starts: `[batch]` int32: first position that is not padding; for new tokens too, as in `append`.
            sinks: `[num_q_heads]`: logits that join the softmax without a value.
            alibi_slopes: `[num_q_heads]`.
            softcap: 0 for none.
            sliding_window: Positions visible to a query, itself included; 0 for all. With `is_ring`, from 1 to
                `capacity + 1 - q_len`, so that the new tokens do not overwrite what the first query sees.
            num_splits: How many parts a sequence is cut into, at most; 0 lets the kernel choose. With a fixed number, a
                sequence gives bitwise the same output in every batch, all other arguments being equal. Kernels use
                fewer parts if the capacity is too small for so many, and at most 127 or 255 for a ring on a GPU;
                neither depends on the batch or its lengths. The reference does not cut sequences.

        Returns:
            out: `[batch, q_len, num_q_heads, value head_dim]`, dtype of `query`, new memory. Zero where nothing is
                attended.
            lse: `[batch, num_q_heads, q_len]` float32, natural log. `-inf` where nothing is attended.

        Raises:
            ValueError: A shape or dtype does not fit; the message names the argument. From torch 2.15 on, which
                turns every C++ exception into one, a RuntimeError.
            RuntimeError: `query` requires gradients, which kernels do not compute; or, on a GPU, `num_splits` needs
                more thread blocks than a grid can hold.
        """
        if query.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                "attention: `query` must not require gradients over a quantised cache, got one that does: kernels "
                "compute none, so those of the model's weights would be wrong. Call the model under torch.no_grad(), "
                "or train it with use_cache=False."
            )
        key, value = (None, None) if new is None else new
        result: tuple[Tensor, Tensor] = self._decode(
            query,
            key,
            value,
            *self._planes,
            lengths,
            counters,
            starts,
            None if sinks is None else sinks.float(),
            None if alibi_slopes is None else alibi_slopes.float(),
            softmax_scale,
            softcap,
            sliding_window,
            num_splits,
            *self._kinds,
        )
        return result


def append(
    key: Tensor,
    value: Tensor,
    key_planes: Planes,
    value_planes: Planes,
    lengths: Tensor,
    formats: tuple[KVFormat, KVFormat],
    key_transform: KeyTransform | None = None,
    starts: Tensor | None = None,
    sink_length: int = 0,
    residual_length: int = 0,
    is_ring: bool = False,
) -> None:
    """`Operands.append` for a single call."""
    operands = Operands(key_planes, value_planes, formats, key_transform, sink_length, residual_length, is_ring)
    operands.append(key, value, lengths, starts)


def decode(
    query: Tensor,
    new: tuple[Tensor, Tensor] | None,
    key_planes: Planes,
    value_planes: Planes,
    lengths: Tensor,
    formats: tuple[KVFormat, KVFormat],
    *,
    key_transform: KeyTransform | None = None,
    sink_length: int = 0,
    residual_length: int = 0,
    is_ring: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`Operands.decode` for a single call; `options` are its keyword arguments."""
    operands = Operands(key_planes, value_planes, formats, key_transform, sink_length, residual_length, is_ring)
    return operands.decode(query, new, lengths, **options)


def _spell(planes: Planes) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    return planes.codes, planes.scale, planes.zero, planes.tail


def _spell_transform(transform: KeyTransform | None) -> tuple[Tensor | None, Tensor | None, bool]:
    return (None, None, False) if transform is None else (transform.center, transform.smoothing, transform.is_rotated)


extension()
