"""How fast the GPU reads: a plain kernel that sums a buffer, the denominator of every share of bandwidth.

It does nothing but 16-byte loads and additions, so what it reaches is what memory gives; block size and grid are the
best of a few. It is in a file of its own because it needs triton, which `bench_decode.py` must be importable without.
That script decides sizes, buffer sets and how to time.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# Words of a block, warps, and how often the programs of a grid fill the GPU; 0 for one program per block.
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
        source: int32, contiguous; its size is a multiple of `MAX_BLOCK`, and of at most 2^30 words.
        sums: int32, at least as long as `source` has blocks; the other sums keep their values.
        config: One of `CONFIGS`.
        num_sms: Multiprocessors of the GPU.
    """
    block, warps, fills = config
    num_blocks = source.numel() // block
    programs = min(num_blocks, num_sms * fills) if fills else num_blocks
    _sum[(programs,)](source, sums, source.numel(), BLOCK=block, num_warps=warps)
