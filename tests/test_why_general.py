"""Why only the general CUDA kernel serves a call, and why none attends to latents: each requirement has its sentence.

The lists of requirements need no GPU: on a CPU, the ops answer what any GPU would. Tests of what a GPU must have, and
of what the plans of a GPU choose, need one.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import mmap
from typing import Any

import pytest
import torch
from models import family, llama
from torch import Tensor

from hf_kvquant import KVQuantConfig, ops, patch, patched, report
from hf_kvquant._ops import ops as torch_ops
from hf_kvquant.cache import support
from hf_kvquant.config import PRESETS
from hf_kvquant.ops import kernels
from hf_kvquant.patching import _log_general
from hf_kvquant.spec.formats import KVFormat
from hf_kvquant.spec.layout import KVLayout
from hf_kvquant.spec.planes import Planes

NONE, INT8, FP8 = KVFormat("none"), KVFormat("int8"), KVFormat("fp8")
INT4, INT2 = KVFormat("int4", symmetric=False), KVFormat("int2", symmetric=False)
UNEVEN = KVFormat("int8", symmetric=False)
CHANNEL = PRESETS["int4-channel"][0]
PAIRS = "none+none, int8+int8, int8+int4, int4+int4, fp8+fp8, int4+int2 or int2+int2"
CPU = torch.device("cpu")
CUDA_ONLY = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def group(size: int, storage: str = "int4", symmetric: bool = False) -> KVFormat:
    return KVFormat(storage, "group", size, symmetric)


@dataclasses.dataclass
class Call:
    """The operands of a decode. Tests change one of them."""

    key: KVFormat = INT8
    value: KVFormat = INT8
    head_dims: tuple[int, int] = (128, 128)
    num_heads: tuple[int, int] = (4, 2)  # of queries and of keys
    q_len: int = 1
    dtype: torch.dtype = torch.bfloat16
    planes_dtype: torch.dtype | None = None
    windows: dict[str, int] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    device: torch.device = CPU

    def __post_init__(self) -> None:
        self.layout = KVLayout(self.key, self.value, **self.windows)
        self.planes = self.layout.allocate(
            (2, self.num_heads[1], *self.head_dims), 128, dtype=self.planes_dtype or self.dtype, device=self.device
        )
        self.query = torch.zeros(2, self.num_heads[0], self.q_len, self.head_dims[0]).to(self.device, self.dtype)
        self.lengths = torch.full((2,), self.q_len, dtype=torch.int32, device=self.device)

    def change(self, side: int, **planes: Tensor) -> Call:
        changed = list(self.planes)
        changed[side] = dataclasses.replace(changed[side], **planes)
        self.planes = changed[0], changed[1]
        return self

    def why(self) -> str:
        defaults = {"softcap": 0.0, "center": None, "smoothing": None, "rotates": False, "page_table": None}
        options = defaults | self.options
        key, value = (side.tensors() for side in self.planes)
        why: str = torch_ops.why_general.default(
            *(self.query, None, None, key, value, self.lengths, None, None, None, None, 1.0, options["softcap"], 0, 0),
            *(options["center"], options["smoothing"], options["rotates"], self.layout.packed),
            *(options["page_table"], None),
        )
        return why


# --- formats and dtypes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("preset", PRESETS)
def test_fast_kernels_serve_every_preset(preset: str, head_dim: int) -> None:
    if not any(each.group_size and head_dim % each.group_size for each in PRESETS[preset]):
        assert Call(*PRESETS[preset], head_dims=(head_dim, head_dim)).why() == ""


FORMATS = {
    "a pair of storage types": (Call(INT8, NONE), f"wanted keys and values as {PAIRS}, got int8+none"),
    "groups of a pair": (
        Call(group(32, "int8", True), group(32, "int8", True)),
        "wanted one scale for a row for int8+int8, got scales for groups of channels",
    ),
    "channels of a pair": (
        Call(CHANNEL, INT2),
        "wanted one scale for a row for int4+int2, got scales for channels of keys",
    ),
    "zeros of keys": (Call(UNEVEN, INT8), "wanted symmetric int8 keys, got asymmetric ones"),
    "zeros of values": (Call(INT8, UNEVEN), "wanted symmetric int8 values, got asymmetric ones"),
    "groups of values beside channels": (
        Call(CHANNEL, group(32)),
        "wanted one scale for a row of values beside scales for channels of keys, got groups of 32",
    ),
    "small groups of keys": (
        Call(group(16), INT4),
        "wanted groups of a multiple of 32 channels, got 16 for keys",
    ),
    "odd groups of values": (
        Call(INT4, group(40), head_dims=(80, 80)),
        "wanted groups of a multiple of 32 channels, got 40 for values",
    ),
    "a query of 32 bits": (
        Call(dtype=torch.float32),
        "wanted a query in float16 or bfloat16, got float32",
    ),
    "unquantised keys of another dtype": (
        Call(NONE, NONE, planes_dtype=torch.float16),
        "wanted unquantised keys in the query's bfloat16, got float16",
    ),
    "a center of unquantised keys": (
        Call(NONE, NONE, options={"center": torch.zeros(2, 128)}),
        "wanted no transform of unquantised keys, got a center",
    ),
    "smoothing of unquantised keys": (
        Call(NONE, NONE, options={"smoothing": torch.ones(2, 128)}),
        "wanted no transform of unquantised keys, got smoothing",
    ),
    "a rotation of unquantised keys": (
        Call(NONE, NONE, options={"rotates": True}),
        "wanted no transform of unquantised keys, got a rotation",
    ),
    "dense tokens of another dtype": (
        Call(windows={"residual_length": 32}, planes_dtype=torch.float16),
        "wanted dense tokens in the query's bfloat16, got float16 for keys",
    ),
    "large heads": (Call(head_dims=(320, 320)), "wanted at most 256 channels, got 320 for keys"),
    "large heads of values": (Call(head_dims=(64, 264)), "wanted at most 256 channels, got 264 for values"),
}


@pytest.mark.parametrize("case", FORMATS)
def test_formats_and_dtypes(case: str) -> None:
    call, expected = FORMATS[case]
    assert call.why() == expected


# --- where planes are in memory ---------------------------------------------------------------------------------------


def shifted(x: Tensor, num_bytes: int) -> Tensor:
    """The same numbers, so many bytes further on."""
    raw = torch.zeros(x.numel() * x.element_size() + num_bytes, dtype=torch.uint8)
    moved = raw[num_bytes:].view(x.dtype).view(x.shape)
    return moved.copy_(x)


def spaced(x: Tensor, factor: int) -> Tensor:
    """The same numbers, with gaps between those of the last axis."""
    return x.repeat_interleave(factor, dim=-1)[..., ::factor]


def part(call: Call, name: str, side: int = 0) -> Tensor:
    found: Tensor = getattr(call.planes[side], name)
    return found


def test_rows_of_codes_are_copied_in_words() -> None:
    call = Call()
    assert call.change(0, codes=shifted(part(call, "codes"), 2)).why() == (
        "wanted rows of codes at multiples of 4 bytes, got a remainder of 2 for keys"
    )
    call = Call(INT2, INT2, head_dims=(40, 40))  # rows of 10 bytes
    assert call.why() == "wanted rows of codes at multiples of 4 bytes, got a remainder of 2 for keys"
    assert Call(INT2, INT2, head_dims=(48, 48)).why() == ""


def test_scales_of_tokens_are_side_by_side() -> None:
    call = Call(INT8, INT4)
    call.change(1, scale=spaced(part(call, "scale", 1), 3))
    assert call.why() == (
        "wanted scales and zeros of tokens side by side, or one for all tokens, got strides of 3 and 1 for values"
    )
    call = Call()
    call.change(0, scale=spaced(part(call, "scale"), 2))
    assert call.why() == (
        "wanted scales and zeros of tokens side by side, or one for all tokens, got a stride of 2 for keys"
    )
    frozen = KVFormat("int8", "tensor")
    assert Call(frozen, frozen).why() == "", "all tokens share one"


@pytest.mark.parametrize("name", ["scale", "zero"])
@pytest.mark.parametrize("key", [INT4, CHANNEL], ids=["tokens", "channels"])
def test_scales_are_copied_in_vectors(key: KVFormat, name: str) -> None:
    call = Call(key, INT4)
    call.change(0, **{name: shifted(part(call, name), 6)})
    assert call.why() == "wanted scales and zeros at multiples of 16 bytes, got a remainder of 6 for keys"
    frozen = KVFormat("int8", "tensor")
    call = Call(frozen, frozen)
    assert call.change(0, scale=shifted(part(call, "scale"), 6)).why() == "", "a single one is not copied"


def test_dense_tokens_are_loaded_in_vectors() -> None:
    call = Call(windows={"residual_length": 32})
    assert call.why() == ""
    call.change(1, tail=shifted(part(call, "tail", 1), 8))
    assert call.why() == "wanted dense tokens at multiples of 16 bytes, got a remainder of 8 for values"


def test_windows_of_several_queries_need_equally_long_tails() -> None:
    """A query would else read a key from the tail and its value as codes."""
    for q_len in (1, 2):
        call = Call(windows={"residual_length": 32}, q_len=q_len)
        call.change(1, tail=torch.zeros(2, 2, 40, 128, dtype=torch.bfloat16))
        wanted = "wanted tails of keys and values with room for equally many of the newest tokens, got 32 and 40"
        assert call.why() == ("" if q_len == 1 else wanted)
    blocks = Call(CHANNEL, INT4, windows={"residual_length": 20}, q_len=2)
    assert blocks.why() == "", "keys in blocks stay dense for longer"


def reserved(num_bytes: int) -> Tensor:
    """Addresses without memory behind them: pages that nobody writes take none."""
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
    except OSError as error:
        pytest.skip(f"this machine reserves no {num_bytes} bytes: {error}")
    return torch.frombuffer(memory, dtype=torch.uint8)


def test_sequences_are_near_enough() -> None:
    call = Call(num_heads=(2, 1))
    codes, stride = part(call, "codes"), 2**35
    far = reserved(stride + codes.numel()).as_strided(codes.shape, (stride, 128, 128, 1))
    assert call.change(0, codes=far).why() == (
        f"wanted sequences and heads less than 2^35 bytes apart, got {stride} for keys"
    )
    call.change(0, codes=far.as_strided(codes.shape, (stride - 16, 128, 128, 1)))
    assert call.why() == ""


def test_scales_are_near_enough() -> None:
    call = Call(num_heads=(2, 1))
    scale, stride = part(call, "scale", 1), 2**34
    far = reserved(2 * stride + 2 * scale.numel()).view(torch.float16).as_strided(scale.shape, (stride, 128, 128, 1))
    assert call.change(1, scale=far).why() == (
        f"wanted sequences and heads less than 2^35 bytes apart, got {2 * stride} for values"
    )


def test_rows_are_near_enough() -> None:
    call = Call(num_heads=(2, 1))
    codes, most = part(call, "codes"), (2**31 - 1) // 128
    far = reserved(256 * (most + 13)).as_strided(codes.shape, (128 * (most + 13), 128, most + 13, 1))
    assert call.change(0, codes=far).why() == (
        f"wanted rows of codes at most {most} bytes apart, got {most + 13} for keys"
    )
    call.change(0, codes=far.as_strided(codes.shape, (128 * (most - 3), 128, most - 3, 1)))
    assert call.why() == ""


def test_queries_span_32_bits() -> None:
    call = Call(num_heads=(2, 1))
    spread = reserved(2**32).view(torch.bfloat16)
    call.query = spread.as_strided((2, 2, 1, 128), (2**30, 128, 128, 1))
    assert call.why() == f"wanted a query that spans less than 2^31 numbers, got {2**31 + 3 * 128}"
    call.query = spread.as_strided((2, 2, 1, 128), (2**30 - 256, 128, 128, 1))
    assert call.why() == ""


def repeated(planes: Planes, count: int) -> Planes:
    """The planes of a sequence, as those of many without memory of their own."""
    return planes.map(lambda x: x[:1].expand(count, *x.shape[1:]))


def test_a_grid_has_limits() -> None:
    for batch in (65535, 65536):
        call = Call(num_heads=(2, 1))
        call.planes = repeated(call.planes[0], batch), repeated(call.planes[1], batch)
        call.query, call.lengths = call.query[:1].expand(batch, 2, 1, 128), torch.ones(batch, dtype=torch.int32)
        expected = f"wanted at most 65535 sequences and key-value heads, got {batch} and 1"
        assert call.why() == ("" if batch == 65535 else expected)


def test_page_numbers_have_limits() -> None:
    for num_pages in (2**28, 2**28 + 1):
        call = Call(num_heads=(2, 1), options={"page_table": torch.zeros(2, 1, dtype=torch.int32)})
        call.planes = repeated(call.planes[0], num_pages), repeated(call.planes[1], num_pages)
        expected = f"wanted at most {2**28} pages, got {num_pages}"
        assert call.why() == ("" if num_pages == 2**28 else expected)


# --- many query rows --------------------------------------------------------------------------------------------------

# Of a call that the attention kernel does not serve either.
UNEVEN_KEYS = "wanted symmetric int8 keys, got asymmetric ones"


def many(key: KVFormat = UNEVEN, value: KVFormat = INT8, q_len: int = 64, **options: Any) -> Call:
    return Call(key, value, q_len=q_len, **options)


def test_the_chunk_kernel_serves_many_rows_of_codes() -> None:
    assert many(q_len=64).why() == "", "128 rows of a head: two query heads have 64 tokens each"
    assert many(q_len=63).why() == UNEVEN_KEYS, "too few rows to ask for it in a short cache"
    assert many(q_len=32).why() == many(q_len=17).why() == "", "64 and 34 rows, which are few"
    assert many(q_len=16).why() == UNEVEN_KEYS, "too few even of those"
    assert many(q_len=32, options={"softcap": 5.0}).why() == UNEVEN_KEYS, "for which few rows have no kernel"


MANY = {
    "codes of values": (
        many(value=NONE),
        f"wanted keys and values as {PAIRS}, got int8+none; for many query rows: wanted codes, or 16 bits and 1024 "
        "query rows of a key-value head, got bfloat16 values and 128",
    ),
    "channels": (
        many(head_dims=(72, 72)),
        f"{UNEVEN_KEYS}; for many query rows: wanted a multiple of 16 channels, got 72 for keys",
    ),
    "groups": (
        many(group(24), INT4, head_dims=(48, 48)),
        "wanted groups of a multiple of 32 channels, got 24 for keys; for many query rows: wanted groups of a multiple "
        "of 16 channels, got 24 for keys",
    ),
    "queries": (
        many(dtype=torch.float32),
        f"{UNEVEN_KEYS}; for many query rows: wanted a query in float16 or bfloat16, got float32",
    ),
}


@pytest.mark.parametrize("case", MANY)
def test_many_rows(case: str) -> None:
    call, expected = MANY[case]
    assert call.why() == expected


def test_the_chunk_kernel_loads_a_unit_of_codes_at_once() -> None:
    call = many()
    call.change(0, codes=shifted(part(call, "codes"), 8))
    assert call.why() == (
        f"{UNEVEN_KEYS}; for many query rows: wanted rows of codes at multiples of 16 bytes, got a remainder of 8 for "
        "keys"
    )


# --- latents ----------------------------------------------------------------------------------------------------------

INT4_OF_128 = group(128)


def latents(key: KVFormat = INT8, value: KVFormat = NONE, rank: int = 512, rope: int = 64, **options: Any) -> Call:
    options.setdefault("num_heads", (4, 1))
    call = Call(key, value, (rank, rope), **options)
    call.query = torch.zeros(2, 4, 1, rank + rope, dtype=call.dtype)
    return call


def why_no_latent_kernel(call: Call) -> str:
    key, value = (side.tensors() for side in call.planes)
    why: str = torch_ops.why_no_latent_kernel.default(
        call.query, key, value, call.lengths, None, 1.0, 0, False, call.layout.packed
    )
    return why


@pytest.mark.parametrize("rank", [256, 512])
@pytest.mark.parametrize("formats", [(INT8, NONE), (FP8, NONE), (INT4_OF_128, INT8)])
def test_kernels_for_latents(formats: tuple[KVFormat, KVFormat], rank: int) -> None:
    for rope in (16, 48, 64):
        assert why_no_latent_kernel(latents(*formats, rank, rope)) == ""


LATENTS = {
    "a pair": (
        latents(INT8, FP8),
        "wanted latents and rope parts as int8+none, fp8+none or int4+int8, got int8+fp8",
    ),
    "a pair of int4": (
        latents(INT4_OF_128, INT4),
        "wanted latents and rope parts as int8+none, fp8+none or int4+int8, got int4+int4",
    ),
    "zeros of latents": (latents(UNEVEN), "wanted symmetric int8 latents, got asymmetric ones"),
    "no zeros of latents": (
        latents(group(128, symmetric=True), INT8),
        "wanted asymmetric int4 latents, got symmetric ones",
    ),
    "zeros of rope parts": (latents(INT4_OF_128, UNEVEN), "wanted symmetric int8 rope parts, got asymmetric ones"),
    "channels": (latents(rank=384), "wanted latents of 256 or 512 channels, got 384"),
    "channels of rope parts": (
        latents(rope=40),
        "wanted rope parts of a multiple of 16 channels up to 64, got 40",
    ),
    "wide rope parts": (latents(rope=80), "wanted rope parts of a multiple of 16 channels up to 64, got 80"),
    "groups of int4": (latents(group(64), INT8), "wanted 4 scales in a row, got 8 for latents"),
    "groups of int8": (
        latents(group(128, "int8", True)),
        "wanted one scale in a row, got 4 for latents",
    ),
    "groups of rope parts": (
        latents(INT4_OF_128, group(32, "int8", True)),
        "wanted one scale in a row, got 2 for rope parts",
    ),
    "heads": (latents(num_heads=(4, 2)), "wanted latents of one head, got 2"),
    "queries": (latents(dtype=torch.float32), "wanted a query in float16 or bfloat16, got float32"),
    "dense rope parts": (
        latents(planes_dtype=torch.float16),
        "wanted unquantised rope parts in the query's bfloat16, got float16",
    ),
    "one scale for all tokens": (
        latents(KVFormat("int8", "tensor")),
        "wanted scales and zeros of each token, side by side, got a stride of 0 for latents",
    ),
}


@pytest.mark.parametrize("case", LATENTS)
def test_latents(case: str) -> None:
    call, expected = LATENTS[case]
    assert why_no_latent_kernel(call) == expected


def test_latents_in_memory() -> None:
    call = latents()
    call.change(1, codes=part(call, "codes", 1).repeat_interleave(2, dim=2)[:, :, ::2])
    assert why_no_latent_kernel(call) == ("wanted rows of codes 128 bytes apart, without gaps, got 256 for rope parts")
    call = latents()
    call.change(0, scale=spaced(part(call, "scale"), 2))
    assert why_no_latent_kernel(call) == (
        "wanted scales and zeros of each token, side by side, got a stride of 2 for latents"
    )
    for name in ("codes", "scale"):
        call = latents(INT4_OF_128, INT8)
        call.change(1, **{name: shifted(part(call, name, 1), 8)})
        assert why_no_latent_kernel(call) == (
            "wanted codes, scales and zeros at multiples of 16 bytes, got a remainder of 8 for rope parts"
        )


def test_latents_have_as_many_dense_tokens_as_rope_parts() -> None:
    assert why_no_latent_kernel(latents(windows={"residual_length": 32})) == "", "dense rope parts have no tail"
    call = latents(INT4_OF_128, INT8, windows={"residual_length": 32})
    assert why_no_latent_kernel(call) == ""
    longer = torch.zeros(2, 1, 48, 64, dtype=torch.bfloat16)
    assert why_no_latent_kernel(call.change(1, tail=longer)) == (
        "wanted as many dense tokens of latents as of rope parts, got 32 and 48"
    )


def test_python_and_c_agree_on_formats_of_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ops.serves_latent` decides before there are planes."""
    monkeypatch.setattr(kernels, "_serves_gpu", lambda index: True)
    monkeypatch.setattr(kernels, "_shared_memory", lambda index: 2**20)
    formats = [
        NONE,
        INT8,
        FP8,
        INT4,
        UNEVEN,
        INT4_OF_128,
        group(64),
        group(128, symmetric=True),
        KVFormat("int8", "tensor"),
    ]
    for key in formats:
        for value in formats[:6]:
            for rank, rope in ((512, 64), (256, 32), (384, 64), (512, 72), (512, 128)):
                if not any(each.group_size and rope % each.group_size for each in (value,)):
                    layout = KVLayout(key, value)
                    why = ops.why_no_latent_kernel(layout, (rank, rope), torch.bfloat16)
                    assert ops.serves_latent(torch.device("cuda", 0), layout, rank, rope) is (why == ""), why


# --- what users are told ----------------------------------------------------------------------------------------------


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU that is not there, of which the ops say on the CPU what they would say."""
    device, ask = torch.device("cuda", 0), ops.why_general
    monkeypatch.setattr(ops, "why_general", lambda device, *args: ask(CPU, *args))
    monkeypatch.setattr(ops, "has_kernels", lambda kind: True)
    monkeypatch.setattr(ops, "why_reference", lambda device, *head_dims: None)
    monkeypatch.setattr(ops, "kernel_name", lambda device, *head_dims: "CUDA kernel")
    monkeypatch.setattr(ops, "serves_latent", lambda device, layout, rank, rope: rank in (256, 512))
    monkeypatch.setattr(ops, "scratch_bytes", lambda device: ops.MAX_SCRATCH_BYTES)
    for name in ("report", "patching"):
        module = importlib.import_module(f"hf_kvquant.{name}")
        monkeypatch.setattr(module, "layer_devices", lambda model: dict.fromkeys(range(8), device))
    return device


def test_a_report_says_why_the_general_kernel_serves(on_gpu: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    _log_general.cache_clear()
    model = copy.deepcopy(llama()).to(torch.bfloat16)
    with patched(model, "int8"):
        assert {(layer.kernel, layer.why_general) for layer in report(model).layers} == {("CUDA kernel", "")}
        assert report(model).scratch_bytes == ops.MAX_SCRATCH_BYTES
        assert "general" not in caplog.text
    reason = "wanted a query in float16 or bfloat16, got float32"
    model = llama()
    with patched(model, "int8"):
        result = report(model)
        assert {(layer.kernel, layer.why_general) for layer in result.layers} == {("CUDA kernel, general", reason)}
        assert result.is_served, "from codes, only slower"
        assert result.scratch_bytes == 0
        assert reason in str(result) and result.to_dict()["layers"][0]["why_general"] == reason
        told = (
            f"the general CUDA kernel serves layers 0, 1 of LlamaForCausalLM: correct, several times slower ({reason})."
        )
        assert caplog.text.count(told) == 1
        patch(model, "int8")
        assert caplog.text.count(told) == 1


def test_a_report_says_why_no_kernel_attends_to_latents(on_gpu: torch.device) -> None:
    model = copy.deepcopy(family("deepseek_v3")).to(torch.bfloat16)
    with patched(model, "int8"):
        [reason] = {layer.reason for layer in report(model).layers}
    assert reason.startswith(
        f"no compiled kernel attends to latents (MLA) of this format on {on_gpu.type}: wanted latents"
    )


def test_only_gpus_are_asked(on_gpu: torch.device) -> None:
    formats = KVQuantConfig.from_preset("int8").formats(0)
    for device in (CPU, torch.device("meta")):
        assert support.why_general(formats, device, (64, 64), torch.float32) == "", "there is no choice of kernels"
    assert support.why_general(formats, on_gpu, (), torch.float32) == "", "head_dims are unknown"
    assert support.why_general(formats, on_gpu, (64, 64), torch.float32) != ""


# --- what needs a GPU -------------------------------------------------------------------------------------------------


@CUDA_ONLY
@pytest.mark.parametrize("case", FORMATS)
def test_a_gpu_says_the_same(case: str) -> None:
    call, expected = FORMATS[case]
    if max(call.head_dims) > ops.MAX_CUDA_HEAD_DIM:
        pytest.skip("kernels refuse it before they plan")
    on_gpu = dataclasses.replace(call, device=torch.device("cuda"))
    on_gpu.options = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in call.options.items()}
    assert on_gpu.why() == expected


@CUDA_ONLY
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_fits_this_gpu(preset: str) -> None:
    for head_dim in (64, 128, 256):
        call = Call(*PRESETS[preset], head_dims=(head_dim, head_dim), device=torch.device("cuda"))
        assert call.why() == "", "shared memory counts too"


@CUDA_ONLY
def test_the_chunk_kernel_needs_its_gpu() -> None:
    call = many(device=torch.device("cuda"))
    capability = torch.cuda.get_device_capability()
    if capability == (9, 0):
        assert call.why() == ""
        grouped = many(group(16), INT4, device=torch.device("cuda"))
        assert grouped.why().endswith("wanted at most 4 groups in a row, got 8 for keys and 1 for values")
    else:
        got = ".".join(map(str, capability))
        assert call.why().endswith(f"for many query rows: wanted a GPU of compute capability 9.0, got {got}")
