"""Steps of more tokens than a draft has: their tokens see each other as the model makes them.

`checks.run_decode` compares `Operands.attend_chunk` with the reference, on every device. Here is also who takes that
way, and that all ways to attend agree on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from cases import Case, clone, filled, make_transform, queries, tokens
from checks import run_decode
from compare import assert_close, assert_same, assert_same_planes
from test_chunks import CUDA_ONLY, cases_of, variants
from torch import Tensor

from hf_kvquant import KVQuantCache, ops
from hf_kvquant._ops import ops as torch_ops
from hf_kvquant.config import PRESETS
from hf_kvquant.ops import chunks
from hf_kvquant.presets import preset_formats
from hf_kvquant.spec.formats import KVFormat
from hf_kvquant.spec.layout import KVLayout
from hf_kvquant.storage.layer_store import LayerStore

QUANTIZED = [name for name in PRESETS if name != "none"]
LARGEST = chunks.MAX_DRAFTED


def own_of(case: Case, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """New keys and values for the query's tokens."""
    key_dim, value_dim = case.head_dims()
    return tokens(case, case.q_len, key_dim, scale), tokens(case, case.q_len, value_dim, scale)


@pytest.fixture(params=["one kernel", "two parts"])
def way(request: pytest.FixtureRequest, engine: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways on a GPU: in one kernel, where it serves, and in two parts that are merged."""
    if request.param == "two parts":
        # Twice: CPUs have no other way, so that there the parts of `as_heads` are cut instead.
        monkeypatch.setattr(chunks, "_MAX_ROWS", 100)
        monkeypatch.setattr(torch_ops.serves_chunk, "default", lambda *args: False)
    return str(request.param)


@pytest.mark.sanitize
@variants
def test_chunks_match_the_reference(engine: str, way: str, formats: tuple[KVFormat, KVFormat]) -> None:
    for case, extras in cases_of(formats, [(128, 1), (33, 4), (150, 2), (40, 5), (129, 1)]):
        run_decode(engine, case, own=own_of(case), **extras)
    for case, _ in cases_of(formats, [(33, 1), (60, 1)]):
        run_decode(engine, case, own=own_of(case), num_splits=2)


@pytest.mark.parametrize("preset", ["int8", "int4-token", "int4-channel", "fp8"])
@pytest.mark.parametrize("kind", ["none", "center+smooth+rotate"])
def test_dense_windows_and_transforms(engine: str, way: str, preset: str, kind: str) -> None:
    """First and newest stored tokens, the chunk's own and codes are in tiles together, in any mixture."""
    for i, (sink_length, residual_length) in enumerate([(0, 0), (4, 0), (0, 28), (4, 28), (3, 150)]):
        q_len, lengths, starts = 40 + 50 * (i % 2), (300, 91, 129), (0, 7, 110)
        case = Case(PRESETS[preset], 64, torch.bfloat16, 4, q_len, lengths, starts, 1, capacity=384)
        case = dataclasses.replace(case, sink_length=sink_length, residual_length=residual_length)
        transform = None if kind == "none" else make_transform(kind, 64, 1)
        run_decode(engine, case, own=own_of(case), key_transform=transform, softcap=8.0 if i == 2 else 0.0)
        run_decode(engine, dataclasses.replace(case, starts=None), own=own_of(case), key_transform=transform)


@pytest.mark.parametrize("preset", ["int8", "int4-channel"])
def test_a_sequence_of_which_nothing_is_stored(engine: str, way: str, preset: str) -> None:
    """Few rows, many, and streamed tiles. Kernels make no tile of no tokens, and whatever memory held is no result."""
    for q_len in (40, 150, 2100):
        case = Case(PRESETS[preset], 64, torch.bfloat16, 1, q_len, (q_len, q_len + 100), None, 1, capacity=2304)
        if engine == "cuda":  # what a call allocates next, small and large
            held = [torch.full((size,), torch.nan, device=engine) for size in (*[1 << 17] * 16, *[1 << 22] * 8)]
            del held
        run_decode(engine, case, own=own_of(case))


@pytest.mark.parametrize("preset", ["int8", "int4-channel"])
def test_other_head_dims(engine: str, way: str, preset: str) -> None:
    for head_dim, value_dim in ((256, 256), (192, 128), (72, 72), (64, 32)):
        case = Case(PRESETS[preset], head_dim, torch.bfloat16, 2, 64, (300, 64), None, 1, value_dim, capacity=384)
        run_decode(engine, dataclasses.replace(case, sink_length=4, residual_length=28), own=own_of(case))


def test_sizes_beyond_float16(engine: str, way: str) -> None:
    """The chunk's own keys and values are far larger, or smaller, than what is stored."""
    case = Case(PRESETS["int8"], 64, torch.bfloat16, 4, 40, (500,), None, 1, capacity=512)
    for scale in (1e-4, 1e3, 1e6):
        query = (queries(case).float() / max(scale, 1)).to(case.dtype)
        run_decode(engine, case, query=query, own=own_of(case, scale))


@pytest.mark.parametrize("side", [0, 1])
def test_bad_tokens_stay_with_those_who_see_them(engine: str, way: str, side: int) -> None:
    """A key or value of the chunk that is NaN changes no earlier row, but by PyTorch's flash attention."""
    if way == "two parts" and engine == "cuda":
        pytest.skip("there, 0 times NaN is NaN for all rows of a tile, as it is for a prompt in one piece")
    case = Case(PRESETS["int4-channel"], 64, torch.bfloat16, 4, 40, (300, 200), None, 1, capacity=384)
    stored = dataclasses.replace(case, lengths=(260, 160))
    planes = [clone(filled(stored, each), engine) for each in (0, 1)]
    query, held, good = queries(case).to(engine), case.lengths_tensor().to(engine), own_of(case)
    bad = good[0].clone(), good[1].clone()
    bad[side][0, 0, 30] = torch.nan
    results = []
    for key, value in (good, bad):
        operands = ops.Operands(planes[0], planes[1], case.layout)
        results.append(operands.attend_chunk(query, (key.to(engine), value.to(engine)), held, softmax_scale=0.125)[0])
    bound = torch.finfo(case.dtype).eps * float(results[0].abs().max())
    assert_close(results[1][0, :30], results[0][0, :30].float().cpu(), bound, "before the token")
    assert_same(results[1][1], results[0][1].cpu(), "the other sequence")
    assert results[1][0, 30:].isnan().all()


@pytest.mark.parametrize("preset", QUANTIZED)
def test_the_op_is_what_its_reference_says(engine: str, preset: str) -> None:
    """The op by its name, on the device and on the CPU, where the reference runs."""
    formats = preset_formats(preset)
    case = Case((formats.key, formats.value), 64, torch.bfloat16, 2, 50, (300, 170), None, 2, capacity=384)
    case = dataclasses.replace(case, sink_length=formats.sink_length, residual_length=formats.residual_length)
    planes = [filled(dataclasses.replace(case, lengths=(250, 120)), side) for side in (0, 1)]
    query, own = queries(case), own_of(case)

    def call(device: str) -> list[Tensor]:
        sides = [clone(made, device).tensors() for made in planes]
        query_, key, value, held = (x.to(device) for x in (query, *own, case.lengths_tensor()))
        stored = (query_, key, value, *sides, held)
        if device == "cuda" and not torch_ops.serves_chunk.default(*stored, case.layout.packed):
            pytest.skip("the GPU has no kernel for chunks")
        rest = (None, None, None, 0.125, 0.0, None, None, False, case.layout.packed)
        return [x.cpu() for x in torch_ops.attend_chunk.default(*stored, *rest)]

    (out, lse), (expected, expected_lse) = call(engine), call("cpu")
    bound = 4 * torch.finfo(case.dtype).eps * float(expected.abs().max())
    assert_close(out, expected.float(), bound, f"{case}, out")
    assert_close(lse, expected_lse, bound, f"{case}, lse")
    fake = torch_ops.attend_chunk.default(
        *(x.to("meta") for x in (query, *own)),
        *([x.to("meta") for x in made.tensors()] for made in planes),
        case.lengths_tensor().to("meta"),
        *(None, None, None, 0.125, 0.0, None, None, False, case.layout.packed),
    )
    assert [(x.shape, x.dtype) for x in fake] == [(x.shape, x.dtype) for x in (out, lse)]


def test_kernels_serve_chunks_only_in_half_precision() -> None:
    case = Case(PRESETS["int8"], 64, torch.float32, 2, 50, (300,), None, 2, capacity=384)
    planes = [filled(case, side).tensors() for side in (0, 1)]
    key, value = own_of(case)
    assert not torch_ops.serves_chunk.default(
        queries(case), key, value, *planes, case.lengths_tensor(), case.layout.packed
    )


def test_queries_with_gradients_are_refused(device: str) -> None:
    case = Case(PRESETS["int8"], 64, torch.bfloat16, 2, 50, (300,), None, 2, capacity=384)
    planes = [clone(filled(case, side), device) for side in (0, 1)]
    query, key, value, held = (x.to(device) for x in (queries(case), *own_of(case), case.lengths_tensor()))
    operands = ops.Operands(planes[0], planes[1], case.layout)
    with pytest.raises(RuntimeError, match="attention: `query` must not require gradients over a quantised cache"):
        operands.attend_chunk(query.requires_grad_(), (key, value), held, softmax_scale=0.125)


@CUDA_ONLY
def test_the_kernel_refuses_what_it_does_not_serve() -> None:
    case = Case(PRESETS["int8"], 64, torch.float32, 2, 50, (300,), None, 2, capacity=384)
    planes = [clone(filled(case, side), "cuda").tensors() for side in (0, 1)]
    query, key, value, held = (x.cuda() for x in (queries(case), *own_of(case), case.lengths_tensor()))
    rest = (None, None, None, 0.125, 0.0, None, None, False, case.layout.packed)
    refused = "attend_chunk: `query` must be of a chunk that the kernel serves: wanted "
    with pytest.raises((ValueError, RuntimeError), match=f"{refused}a query in float16 or bfloat16, got float32. Ask"):
        torch_ops.attend_chunk.default(query, key, value, *planes, held, *rest)
    apart = torch.zeros(1, 2, 50, 68, dtype=torch.bfloat16, device="cuda")[..., :64]
    got = f"{refused}new keys in 16 bits with rows at multiples of 16 bytes, got bfloat16, a remainder of 8. Ask"
    with pytest.raises((ValueError, RuntimeError), match=got):
        torch_ops.attend_chunk.default(query.bfloat16(), apart, value.bfloat16(), *planes, held, *rest)


def test_the_largest_step() -> None:
    int8, none = KVFormat("int8"), KVFormat("none")
    assert ops.largest_step(KVLayout(int8, none)) == ops.largest_step(KVLayout(none, int8)) == LARGEST
    for layout, window in (
        (KVLayout(none, none), 0),
        (KVLayout(int8, int8), 64),
        (KVLayout(int8, int8, rows="ring"), 0),
    ):
        assert ops.largest_step(layout, window) > 2**40


def stored_after(preset: str, *sizes: int, **options: Any) -> tuple[LayerStore, tuple[Tensor, ...]]:
    """A layer that has taken chunks of these sizes, the last of them pending, and its query, keys and values."""
    torch.manual_seed(0)
    store = LayerStore(preset_formats(preset), **options)
    for q_len in sizes:
        store.flush()
        key, value = torch.randn(2, 2, 2, q_len, 64)
        store.extend(key, value)
    return store, (torch.randn(2, 4, sizes[-1], 64), key, value)


@pytest.mark.parametrize("is_static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("preset", ["int8", "int4", "k4v2"])
@pytest.mark.parametrize("q_len", [LARGEST, LARGEST + 1])
def test_layers_attend_to_chunks_as_they_are(preset: str, q_len: int, is_static: bool) -> None:
    """From one token more than a draft has; dense tensors for attention and the codes afterwards agree with it."""
    options = {"max_cache_len": 500} if is_static else {}
    store, (query, key, value) = stored_after(preset, 200, q_len, **options)
    other, _ = stored_after(preset, 200, q_len, **options)
    past, _ = stored_after(preset, 200, **options)
    is_chunk = q_len > LARGEST
    dense = [x[:, :, : 200 + q_len] for x in other.dense_step()]
    for x, stored, own in zip(dense, past.dequantize(), (key, value), strict=True):
        if is_chunk:
            assert_same(x, torch.cat((stored[:, :, :200], own), dim=2), "dense tensors for attention")
    out, _ = store.attend(query, softmax_scale=0.125)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query,
        *dense,
        attn_mask=torch.ones(q_len, 200 + q_len, dtype=torch.bool).tril(200),
        scale=0.125,
        enable_gqa=True,
    )
    assert_close(out, expected.transpose(1, 2), 1e-4 if is_chunk or preset != "int4" else 1.0, "attention")
    for mine, theirs, kv_format in zip(store.planes, other.planes, store.layout.formats, strict=True):
        assert_same_planes(mine, theirs, f"codes of {kv_format.describe()}")


def test_layers_that_others_read_have_no_chunks() -> None:
    """Once the first of several layers has attended, the tokens are codes, so the others could not see them raw."""
    store, (query, _, _) = stored_after("int8", 100, 64)
    store.has_chunks = False
    dense = stored_after("int8", 100, 64)[0].dequantize()
    out, _ = store.attend(query, softmax_scale=0.125)
    mask = torch.ones(64, 164, dtype=torch.bool).tril(100)
    attend: Callable[..., Tensor] = torch.nn.functional.scaled_dot_product_attention
    expected = attend(query, *dense, attn_mask=mask, scale=0.125, enable_gqa=True)
    assert_close(out, expected.transpose(1, 2), 1e-5, "attention")


def test_caches_know_which_layers_others_read() -> None:
    cache = KVQuantCache(models.family("gemma3n_text").config, "int8")
    assert [storage.has_chunks for storage in cache.storages] == [False, False]
    cache = KVQuantCache(models.llama().config, "int8")
    assert all(storage.has_chunks for storage in cache.storages)


@CUDA_ONLY
@pytest.mark.parametrize("preset", QUANTIZED)
def test_hopper_has_a_kernel_for_chunks(preset: str) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs compute capability 9.0")
    case = Case(PRESETS[preset], 128, torch.bfloat16, 4, 33, (300,), None, 2, capacity=384)
    planes = [clone(filled(case, side), "cuda").tensors() for side in (0, 1)]
    key, value = (x.cuda() for x in own_of(case))
    held = case.lengths_tensor().cuda()
    assert torch_ops.serves_chunk.default(queries(case).cuda(), key, value, *planes, held, case.layout.packed)
