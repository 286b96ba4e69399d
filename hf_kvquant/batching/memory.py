"""How much memory a paged cache takes, and that memory itself.

transformers takes what `max_memory_percent` leaves it, whoever comes. On a GPU, which serves one model, that is right.
On a CPU, other programs need memory, too: there a cache takes no more than its requests can use, and at most 30 % of
what is free. Its pages become resident when they are first written.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.generation.continuous_batching.cache import PagedAttentionMemoryHandler
from transformers.generation.continuous_batching.utils import find_head_dim
from transformers.utils.import_utils import is_psutil_available

from .. import ops
from ..models.latent import channels_at_peak, head_dims_of, keeps_latents
from ..models.text_config import count_of
from .states import StateLayout

# Of the free memory of a machine, if nobody says how much.
CPU_SHARE = 0.3
_CGROUP = Path("/sys/fs/cgroup")


def _widest(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the layer with the widest heads. transformers asks for one head_dim, which raises if layers differ.

    As in Gemma 4 (5.24).
    """
    if not getattr(config, "is_heterogeneous", False):
        return config
    return max(config.per_layer_config, key=lambda each: max(head_dims_of(each), default=0))


class PageMemory(PagedAttentionMemoryHandler):
    """Sizes a cache whose pages are attended to in place: no mask, and no keys and values that are gathered first.

    Args:
        states: Of a request; `None` if no layer has a state.
        device: Of the pages.
        sectors_of: Sectors for a number of requests with a number of tokens each.
        **options: See `PagedAttentionMemoryHandler`.
    """

    def __init__(
        self,
        states: StateLayout | None = None,
        device: torch.device | None = None,
        sectors_of: Callable[[int, int], int] | None = None,
        **options: Any,
    ) -> None:
        self._states, self._sectors_of = states, sectors_of
        self._is_cpu = device is not None and torch.device(device).type == "cpu"
        self._scratch_bytes = 0 if device is None else ops.scratch_bytes(torch.device(device))
        super().__init__(**{**options, "config": _widest(options["config"])})
        self.num_attention_masks = 0
        # For each new token: its keys and values by group, and repeated for every query head where a prompt attends to
        # itself.
        num_kv_heads = getattr(self.config, "num_key_value_heads", None) or self.config.num_attention_heads
        self.kv_heads_at_peak = 2 * num_kv_heads + 2 * self.config.num_attention_heads
        if keeps_latents(self.config):
            self.kv_heads_at_peak = -(-channels_at_peak(self.config) // find_head_dim(self.config))

    @property
    def bytes_per_cache_token(self) -> int:
        """Bytes that a token held takes besides the cache: none."""
        return 0

    @property
    def bytes_per_batch_token(self) -> int:
        """Bytes that a new token takes. Layers with a state may take more than attention, and less."""
        num_bytes: int = super().bytes_per_batch_token
        return num_bytes if self._states is None else max(num_bytes, self._states.bytes_of_new_token)

    @property
    def fixed_overhead_bytes(self) -> int:
        """See `PagedAttentionMemoryHandler`. Attention of prompts has a scratch, which layers share.

        A layer reads the states of a step into tensors of their own. Each exists three times: as it was, as it becomes,
        and as it is written. As many requests take part as fit into all memory with a state and a page each.
        """
        num_bytes: int = super().fixed_overhead_bytes + self._scratch_bytes
        if self._states is None:
            return num_bytes
        fitting = self.available_memory // (self._states.num_bytes + self.bytes_per_block)
        most = min(self.cb_config.max_requests_per_batch or fitting, fitting)
        return num_bytes + 3 * most * self._states.num_bytes_of_layer

    def get_available_memory(self) -> int:
        """See `PagedAttentionMemoryHandler`, which counts the memory of other processes as free (5.24)."""
        if not (self._is_cpu and is_psutil_available()):
            available: int = super().get_available_memory()
            return available
        share = self.cb_config.max_memory_percent
        assert share is not None  # transformers has a default
        return int(free_memory() * share)

    def infer_max_batch_tokens_and_num_sectors(self) -> tuple[int, int]:
        """See `PagedAttentionMemoryHandler`. On a CPU, memory that no request can use is left to others."""
        tokens, sectors = super().infer_max_batch_tokens_and_num_sectors()
        if self._is_cpu and self._sectors_of is not None and self.cb_config.num_blocks is None:
            requests = self.cb_config.max_requests_per_batch
            positions = count_of(self.config, "max_position_embeddings")
            if requests is not None and positions is not None:
                sectors = min(sectors, self._sectors_of(requests, positions))
        return tokens, sectors

    def _check_footprint(self, max_batch_tokens: int, num_sectors: int) -> tuple[int, int]:
        is_given = self.cb_config.num_blocks is not None and self.cb_config.max_batch_tokens is not None
        if is_given and not is_psutil_available():  # the free memory is unknown
            return max_batch_tokens, num_sectors
        checked: tuple[int, int] = super()._check_footprint(max_batch_tokens, num_sectors)
        return checked


def free_memory(cgroup: Path = _CGROUP) -> int:
    """Bytes that this process can still take: of the machine, or of its container if that has less."""
    import psutil  # type: ignore[import-untyped]  # optional, and whoever asks has looked

    free: int = psutil.virtual_memory().available
    for folder, limit, usage, reclaimed in (
        (cgroup, "memory.max", "memory.current", "inactive_file"),  # version 2
        (cgroup / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # version 1
    ):
        try:
            most, taken = (int((folder / name).read_text()) for name in (limit, usage))
            kept = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        # Files that were read once are in the memory of a container, too, and give way to others.
        free = min(free, max(most - taken + int(kept.get(reclaimed, 0)), 0))
    return free


def zeros(num_bytes: int, device: torch.device) -> Tensor:
    """`[num_bytes]` uint8. On a CPU, what nobody has written takes no memory.

    `torch.zeros` writes all of it: 14.8 GB resident for a model of 15M parameters (2026-11).

    Raises:
        MemoryError: There is not that much.
    """
    if device.type != "cpu" or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    try:
        untouched = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"continuous batching: {num_bytes:,} bytes for pages cannot be had: {error}") from error
    return torch.frombuffer(untouched, dtype=torch.uint8)
