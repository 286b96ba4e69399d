"""A plain kernel that sums a buffer. Its speed is the read bandwidth that every share is relative to.

It does nothing but 16-byte loads and additions, so memory alone limits it; the best of a few block sizes and grids
counts. It has its own file because it needs triton, and `bench_decode.py` must be importable without triton.
`gpu_timing.py` decides sizes and buffer sets, and times it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# Words of a block, warps, and programs per multiprocessor; 0 for one program per block.
CONFIGS = [(1024, 4, 0), (4096, 4, 0), (4096, 4, 16), (8192, 8, 0), (8192, 8, 8), (16384, 8, 4)]
MAX_BLOCK = max(block for block, _, _ in CONFIGS)


@triton.jit
def _sum(source, sums, num_words, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0)
    words = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for start in range(program * BLOCK, num_words, tl.num_programs(0) * BLOCK):
        total += tl.load(source + start + words)
    tl.store(sums + program, tl.sum(total))


def read(source: Tensor, sums: Tensor, config: tuple[int, int, int], num_sms: int) -> None:
    """Sum a buffer, one sum per program.

    Args:
        source: int32, contiguous; its size is a multiple of `MAX_BLOCK`, and at most 2^30 words.
        sums: int32, with room for one sum per block of `source`; sums that no program writes keep their values.
        config: One of `CONFIGS`.
        num_sms: Multiprocessors of the GPU.
    """
    block, warps, fills = config
    num_blocks = source.numel() // block
    programs = min(num_blocks, num_sms * fills) if fills else num_blocks
    _sum[(programs,)](source, sums, source.numel(), BLOCK=block, num_warps=warps)
