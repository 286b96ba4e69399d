"""Other kernels for decode attention on a GPU: PyTorch in bf16, FlashInfer in bf16, fp8 and nvfp4, FBGEMM in int4.

Each is a `Peer` over contiguous buffers of its own, with all forms worth trying (layout, tensor cores or not, number of
splits), of which the fastest counts. Packages are optional: one that is missing is left out, and one that fails is
named. `bench_decode.py` compares these with our op; `gpu_timing.py` times both.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from importlib import metadata
from typing import Any

import torch
from decode_cases import DEVICE, DTYPE, Shape, bytes_held, layout_of
from gpu_timing import Forms, ReadBandwidth, best_of, figures, sets_needed
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from hf_kvquant_evals.provenance import describe_error

PAGE_SIZE = 64


@dataclasses.dataclass(frozen=True)
class Peer:
    """Another kernel: its forms, over `num_sets` buffer sets of `num_bytes` each.

    The name starts with the type of its keys and values.
    """

    name: str
    forms: Forms
    num_sets: int
    num_bytes: int


def torch_peers(shape: Shape) -> Iterable[Peer]:
    """PyTorch's attention, with the query heads of a group as heads or as rows of one head. Not for ragged batches."""
    if shape.is_ragged:
        return
    num_bytes = bytes_held(shape, layout_of("none"))
    num_sets = sets_needed(num_bytes)
    rows = (num_sets, shape.batch, shape.num_kv_heads, shape.context, shape.head_dim)
    keys, values = (torch.empty(rows, dtype=DTYPE, device=DEVICE).normal_() for _ in range(2))
    query = torch.randn(shape.batch, shape.num_q_heads, 1, shape.head_dim, dtype=DTYPE, device=DEVICE)
    packed = query.view(shape.batch, shape.num_kv_heads, -1, shape.head_dim)

    def form(backend: SDPBackend, is_packed: bool) -> Callable[[int], object]:
        def run(i: int) -> object:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(
                    packed if is_packed else query, keys[i], values[i], enable_gqa=not is_packed
                )

        return run

    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
        forms = {"groups as heads": form(backend, False), "groups as rows": form(backend, True)}
        yield Peer(f"bf16 torch {name}", forms, num_sets, num_bytes)


def flashinfer_peers(shape: Shape) -> Iterable[Peer]:
    """FlashInfer over pages of 64 tokens: its decode wrapper in bf16, fp8 and nvfp4, and XQA in bf16 and fp8."""
    if shape.head_dim != 128:  # compiling another head_dim takes minutes
        return
    from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper, xqa_batch_decode_with_kv_cache

    lengths = shape.lengths()
    pages = [math.ceil(length / PAGE_SIZE) for length in lengths]
    starts = [0]
    for count in pages:
        starts.append(starts[-1] + count)
    first_page = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
    page_ids = torch.arange(starts[-1], dtype=torch.int32, device=DEVICE)
    last_tokens = torch.tensor([(length - 1) % PAGE_SIZE + 1 for length in lengths], dtype=torch.int32, device=DEVICE)
    table = torch.zeros(shape.batch, max(pages), dtype=torch.int32, device=DEVICE)
    for i, count in enumerate(pages):
        table[i, :count] = page_ids[starts[i] : starts[i] + count]
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE).view(torch.uint32)
    query = torch.randn(shape.batch, shape.num_q_heads, shape.head_dim, dtype=DTYPE, device=DEVICE)
    group = shape.num_q_heads // shape.num_kv_heads
    workspace = torch.zeros(256 * 2**20, dtype=torch.uint8, device=DEVICE)
    xqa_workspace = torch.zeros(256 * 2**20, dtype=torch.uint8, device=DEVICE)
    softmax_scale = shape.head_dim**-0.5

    for kind in ("bf16", "fp8", "nvfp4"):
        row_bytes = {"bf16": 2 * shape.head_dim, "fp8": shape.head_dim, "nvfp4": shape.head_dim // 2}[kind]
        scale_bytes = shape.head_dim // 16 if kind == "nvfp4" else 0
        num_bytes = 2 * sum(lengths) * shape.num_kv_heads * (row_bytes + scale_bytes)
        num_sets = sets_needed(num_bytes)
        size = (num_sets, 2, starts[-1], PAGE_SIZE * shape.num_kv_heads)
        if kind == "bf16":
            dtype = DTYPE
            data = torch.empty(*size, shape.head_dim, dtype=DTYPE, device=DEVICE).normal_()
        else:
            data = torch.empty(*size, row_bytes, dtype=torch.uint8, device=DEVICE)
            data.view(torch.int32).random_(-(2**31), 2**31)
            dtype = torch.uint8 if kind == "nvfp4" else torch.float8_e4m3fn
            data = data if kind == "nvfp4" else data.bitwise_and_(0xBF).view(dtype)
        block_scales = torch.full((*size, max(scale_bytes, 1)), 0.5, device=DEVICE).to(torch.float8_e4m3fn)

        def layouts(x: Tensor, layout: str) -> Tensor:
            heads = (PAGE_SIZE, shape.num_kv_heads) if layout == "NHD" else (shape.num_kv_heads, PAGE_SIZE)
            return x.view(*x.shape[:3], *heads, x.shape[-1])

        def wrapper_form(
            layout: str,
            has_tensor_cores: bool,
            data: Tensor = data,
            block_scales: Tensor = block_scales,
            dtype: torch.dtype = dtype,
        ) -> Callable[[int], object]:
            wrapper: Any = None
            caches, scales = layouts(data, layout), layouts(block_scales, layout)

            def run(i: int) -> object:
                nonlocal wrapper
                if wrapper is None:  # planned in the warm-up; a form that cannot be planned is left out
                    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, layout, use_tensor_cores=has_tensor_cores)
                    wrapper.plan(
                        first_page,
                        page_ids,
                        last_tokens,
                        shape.num_q_heads,
                        shape.num_kv_heads,
                        shape.head_dim,
                        PAGE_SIZE,
                        q_data_type=DTYPE,
                        kv_data_type=dtype,
                    )
                extra = {"kv_cache_sf": (scales[i, 0], scales[i, 1])} if dtype == torch.uint8 else {}
                return wrapper.run(query, (caches[i, 0], caches[i, 1]), **extra)

            return run

        def xqa_form(layout: str, data: Tensor = data) -> Callable[[int], object]:
            caches = layouts(data, layout)
            return lambda i: xqa_batch_decode_with_kv_cache(
                query,
                (caches[i, 0], caches[i, 1]),
                xqa_workspace,
                table,
                seq_lens,
                table.shape[1] * PAGE_SIZE,
                bmm1_scale=softmax_scale,
                kv_layout=layout,
            )

        forms = {
            f"{layout}, {'tensor cores' if has_tensor_cores else 'CUDA cores'}": wrapper_form(layout, has_tensor_cores)
            for layout in ("NHD", "HND")
            for has_tensor_cores in ((True,) if kind == "nvfp4" else (True, False))
        }
        yield Peer(f"{kind} FlashInfer wrapper", forms, num_sets, num_bytes)
        if kind != "nvfp4" and group in (4, 8):
            yield Peer(f"{kind} FlashInfer XQA", {f: xqa_form(f) for f in ("NHD", "HND")}, num_sets, num_bytes)


def fbgemm_peers(shape: Shape) -> Iterable[Peer]:
    """FBGEMM's int4 attention with one or four groups of channels. Only for one key-value head of 128."""
    if shape.num_kv_heads != 1 or shape.head_dim != 128 or shape.is_ragged:
        return
    import fbgemm_gpu.experimental.gen_ai  # noqa: F401

    query = torch.randn(shape.batch, 1, shape.num_q_heads, shape.head_dim, dtype=DTYPE, device=DEVICE)
    newest = torch.full((shape.batch,), shape.context - 1, dtype=torch.int32, device=DEVICE)
    for groups in (1, 4):
        row_bytes = shape.head_dim // 2 + 4 * groups
        num_bytes = 2 * shape.batch * shape.context * row_bytes
        num_sets = sets_needed(num_bytes)
        data = torch.empty(num_sets, 2, shape.batch, shape.context, 1, row_bytes, dtype=torch.uint8, device=DEVICE)
        data.view(torch.int32).random_(-(2**31), 2**31)
        scales = torch.full((2 * groups,), 0.1, dtype=torch.float16, device=DEVICE)  # and offsets
        data[..., : 4 * groups] = scales.view(torch.uint8)

        def form(num_splits: int, data: Tensor = data, groups: int = groups) -> Callable[[int], object]:
            return lambda i: torch.ops.fbgemm.gqa_attn_splitk(
                query,
                data[i, 0],
                data[i, 1],
                newest,
                qk_scale=shape.head_dim**-0.5,
                num_split_ks=num_splits,
                kv_cache_quant_num_groups=groups,
            )

        forms = {f"{num_splits} splits": form(num_splits) for num_splits in (1, 2, 4, 8, 16, 32, 64)}
        yield Peer(f"int4 FBGEMM, {groups} group{'s' * (groups > 1)}", forms, num_sets, num_bytes)


PEERS: dict[str, Callable[[Shape], Iterable[Peer]]] = {
    "torch": torch_peers,
    "flashinfer-python": flashinfer_peers,
    "fbgemm-gpu-genai": fbgemm_peers,
}


def peer_versions(*more: str) -> dict[str, str | None]:
    """Versions of the packages that peers come from, and of others; `None` for one that is missing."""
    versions: dict[str, str | None] = {}
    for package in (*PEERS, *more):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def measure_peers(shape: Shape, bandwidth: ReadBandwidth, replays: int) -> tuple[list[dict[str, Any]], list[str]]:
    """The results of all peers at one shape, and the reasons why others failed."""
    rows, failures = [], []
    for package, make in PEERS.items():
        if peer_versions()[package] is None:
            continue
        peers = iter(make(shape))
        while True:
            try:
                peer = next(peers, None)
                if peer is None:
                    break
                form, timing = best_of(peer.forms, peer.num_sets, replays, can_fall_back=True)
            except Exception as error:
                failures.append(f"{package}: {describe_error(error)}")
                continue
            row = {"peer": peer.name, "form": form, **figures(timing, peer.num_bytes, bandwidth)}
            rows.append(row)
            del peer
        torch.cuda.empty_cache()
    return rows, failures
