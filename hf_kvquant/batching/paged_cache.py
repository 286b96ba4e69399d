"""transformers' paged cache with our pages: the allocator that lays them out.

transformers gives out blocks (the pages of all layers for the same tokens) to requests, shares, copies, offloads and
frees them. It moves bytes and does not look at them. What is ours is how many bytes a page has, how they become
planes, how much memory all of it takes (`memory.py`), and what a request has besides pages: tails and states. When a
request ends, is cancelled or is offloaded, transformers calls `PagedCache.free_blocks`.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators import (
    FULL_ATTENTION,
    CacheAllocator,
    CachePool,
    FullAttentionCacheAllocator,
)
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.input_outputs import PagedAttentionArgs
from transformers.generation.continuous_batching.requests import RequestState

from .. import ops
from ..attention.registry import is_ours
from ..cache.handle import noted
from ..graphs.state_chunks import Sequences
from ..spec import reference
from ..spec.key_transform import KeyTransform
from ..spec.pages import PageLayout
from ..spec.tails import TailLayout
from ..upstream.releases import DO_MODELS_UPDATE_PAGES
from .batch import Group
from .memory import PageMemory, zeros
from .rope import RopeByRequest
from .sinks import KeptSinks
from .slots import Sector, SlotAllocator, sector_of
from .snapshots import Snapshots
from .states import STATES, StateAllocator, StateLayout
from .tails import TAILS, TailAllocator

logger = logging.getLogger(__name__)

# What transformers passes through the model besides `cache`. Here `PagedCache.groups` says all of it.
OF_BATCHES = frozenset(PagedAttentionArgs.__annotations__)


@dataclasses.dataclass(frozen=True)
class PagedLayer:
    """How one layer keeps its keys and values.

    Attributes:
        page: The bytes of its pages.
        key_transform: Of its keys; `None` for none.
    """

    page: PageLayout
    key_transform: KeyTransform | None


class PageAllocator(FullAttentionCacheAllocator):
    """Gives out blocks of our pages. All pages of a block have the size of the largest one.

    Tails are in slots of their own. So a request that takes over blocks of another one reads their tokens as codes,
    also those that are in its own dense window, except sinks (`KeptSinks`). It can do so once a block has codes: with
    granularity channel, when it has left the window of the request that filled it.

    Args:
        layers: By layer index; their pages have equally many tokens.
        allow_block_sharing: Whether requests may share blocks of the same tokens.
        tails: Gives out the slots for tails; `None` if no layer has one.

    Attributes:
        num_columns: Of a page table, before the blocks of tokens.
        operands: Of the ops, by layer index.
    """

    def __init__(
        self, layers: Mapping[int, PagedLayer], allow_block_sharing: bool, tails: TailAllocator | None = None
    ) -> None:
        pages = [layer.page for layer in layers.values()]
        self._layers, self._tails = layers, tails
        self.head_dim, self.num_key_value_heads = pages[0].head_dims[0], pages[0].num_kv_heads
        self.cache_dtype = pages[0].dtype
        self.operands: dict[int, ops.Operands] = {}
        self._layers_with_tail = frozenset(() if tails is None else tails.layer_indices)
        self.num_columns = 0 if tails is None else reference.NUM_TAIL_COLUMNS
        # Of the layers whose keys get their codes when their block has left the window: the longest window.
        in_blocks = [page.layout for page in pages if page.layout.key.block_size is not None]
        self._window = max((layout.residual_length for layout in in_blocks), default=0)
        # Of requests that have taken over tokens: how many. See `reference.Tails`.
        self._tail_from: dict[str, int] = {}
        self._epoch = 0  # how often all pages have been forgotten
        self._began: dict[str, int] = {}  # of each request: the epoch
        self._apart: set[str] = set()  # requests that share pages among themselves alone
        self._pages: dict[str, tuple[int | None, list[int], Tensor]] = {}  # slot, blocks and row of each request
        self._before_cache_tensor_init(
            index=0,
            layer_indices=list(layers),
            tokens_per_page=pages[0].num_tokens,
            bytes_per_page=_bytes_per_page(layers),
            allow_block_sharing=allow_block_sharing,
        )

    def register_cache_tensor(
        self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: Tensor, pool: CachePool
    ) -> None:
        """Make the planes of every layer over the cache's bytes. A block and its pages have the same number."""
        self.bytes_per_sector = bytes_per_sector
        self._copy_view = cache_tensor.view(-1, self.bytes_per_block)
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)
        tails = {} if self._tails is None else self._tails.layout.planes(cache_tensor, self._tails.bytes_per_block)
        for position, (index, layer) in enumerate(self._layers.items()):
            sides = layer.page.planes(cache_tensor, position * self.bytes_per_page, self.bytes_per_block)
            key, value = (
                dataclasses.replace(side, tail=tail)
                for side, tail in zip(sides, tails.get(index, (None, None)), strict=True)
            )
            transform = None if layer.key_transform is None else layer.key_transform.to(cache_tensor.device)
            self.operands[index] = ops.Operands(key, value, layer.page.layout, transform)

    @property
    def _sinks(self) -> KeptSinks | None:
        return None if self._tails is None else self._tails.sinks

    def page_table_of(self, layer_idx: int, page_table: Tensor) -> Tensor:
        """The part of a page table, `[requests, pages]`, that the ops of a layer take: without tails if it has none."""
        return page_table if layer_idx in self._layers_with_tail else page_table[:, self.num_columns :]

    def allocate_cache_to_request(self, request_id: str, past_length: int, query_length: int) -> None:
        """See `CacheAllocator`."""
        if past_length == 0:
            self._tail_from.pop(request_id, None)  # it was to be offloaded, and begins anew
            self._began[request_id] = self._epoch
        super().allocate_cache_to_request(request_id, past_length, query_length)

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """See `CacheAllocator`. Without `no_cache`, the request ends; with it, its blocks may come back.

        transformers says both, one after the other, of a request that it offloads.
        """
        if not no_cache and request_id in self.block_table:
            self._tail_from.pop(request_id, None)
            self._began.pop(request_id, None)
        if not no_cache:
            self._apart.discard(request_id)
        self._pages.pop(request_id, None)
        super().free_blocks(request_id, no_cache)

    def keep_apart(self, request_id: str) -> None:
        """Let a request share pages only with others that are kept apart: the same tokens have other keys there."""
        self._apart.add(request_id)

    def is_apart(self, request_id: str) -> bool:
        """Whether `keep_apart` was called for a request that has not ended."""
        return request_id in self._apart

    def told_apart(self, request_id: str, token_ids: list[int]) -> list[int]:
        """What hashes of a request's pages are made from: its tokens, or other numbers if it is kept apart."""
        return [~token for token in token_ids] if request_id in self._apart else token_ids

    def num_complete(self, length: int) -> int:
        """Blocks of a request with `length` tokens in which all tokens have their codes, in every layer.

        Tokens of a block of channel scales get them together, but a page is several such blocks.
        """
        return max(length - self._window, 0) // int(self.tokens_per_page)

    def num_marked(self, request_id: str) -> int:
        """Blocks of a request, from the first one on, that others may take over already."""
        blocks = self.block_table.get(request_id, [])
        unknown = (at for at, block in enumerate(blocks) if block not in self.ledger.block_to_hash)
        return next(unknown, len(blocks))

    def hash_at(self, request_id: str, num_tokens: int) -> int | None:
        """The hash of the block of a request that ends after `num_tokens` tokens; `None` if others do not find it."""
        blocks = self.block_table.get(request_id, [])
        at = num_tokens // int(self.tokens_per_page) - 1
        found: int | None = self.ledger.block_to_hash.get(blocks[at]) if at < len(blocks) else None
        return found

    def match_prefix_blocks(self, prompt_ids: list[int]) -> list[int]:
        """See `CacheAllocator`. Without its sinks, a block is not found."""
        blocks: list[int] = super().match_prefix_blocks(prompt_ids)
        is_found = self._sinks is None or (blocks and self._sinks.get(blocks[0]) is not None)
        return blocks if is_found else []

    def acquire_prefix_blocks(self, request_id: str, prefix_len: int, block_ids: list[int]) -> None:
        """See `CacheAllocator`. The tail that the request will have lacks these tokens, and gets their sinks."""
        super().acquire_prefix_blocks(request_id, prefix_len, block_ids)
        self._tail_from[request_id], self._began[request_id] = prefix_len, self._epoch
        if self._tails is not None:
            self._tails.take_over(request_id, block_ids[0])

    def count_shareable_blocks(self, source_request_id: str, past_length: int) -> int:
        """See `CacheAllocator`. A block that is to get codes is none of them."""
        num_tokens = self.num_complete(past_length) * self.tokens_per_page
        shareable: int = super().count_shareable_blocks(source_request_id, num_tokens)
        return shareable

    def fork_blocks(
        self, source_request_id: str, dest_request_id: str, past_length: int
    ) -> tuple[list[int], list[int]]:
        """See `CacheAllocator`. The tail of a fork, a copy, begins where the tail of its source does."""
        copied: tuple[list[int], list[int]] = super().fork_blocks(source_request_id, dest_request_id, past_length)
        if source_request_id in self._tail_from:
            self._tail_from[dest_request_id] = self._tail_from[source_request_id]
        self._began[dest_request_id] = self._began[source_request_id]
        if source_request_id in self._apart:
            self._apart.add(dest_request_id)
        return copied

    def mark_complete_blocks(self, request_id: str, token_ids: list[int], new_new_blocks: int) -> None:
        """See `CacheAllocator`. The sinks of a first block are kept for those that take it over."""
        if self._began[request_id] < self._epoch:
            return
        blocks, known = self.block_table[request_id], self.ledger.block_to_hash
        unknown = {blocks[0]} - known.keys()
        super().mark_complete_blocks(request_id, self.told_apart(request_id, token_ids), new_new_blocks)
        first, sinks = blocks[0], self._sinks  # the block is by now perhaps that of another request with these tokens
        if sinks is not None and first in known and (first in unknown or sinks.get(first) is None):
            assert self._tails is not None
            sinks.keep(first, self._tails.slot_of(request_id))

    def forget_pages(self) -> None:
        """Let no later request take over tokens of earlier ones. Call `PagedCache.forget_pages`."""
        self._epoch += 1
        self.ledger.hash_to_block.clear()
        self.ledger.block_to_hash.clear()

    def pages_of(self, request_id: str) -> Tensor:
        """The row of a request in a page table, `[columns]` int32 on the host, to be read only.

        Every step takes them for all of its requests. Making a tensor of a list takes longer the more tokens a request
        holds: 3 ms a step for 64 requests of 64k tokens (host of an H200, 2026-11). So the tensor is kept until its
        numbers have changed. To compare two lists takes a hundredth of the time.
        """
        pages, slot = self.block_table[request_id], None if self._tails is None else self._tails.slot_of(request_id)
        noted = self._pages.get(request_id)
        if noted is None or noted[0] != slot or noted[1] != pages:
            row = self.row_of(pages, slot, self._tail_from.get(request_id, 0))
            noted = self._pages[request_id] = slot, pages.copy(), row
        return noted[2]

    def row_of(self, pages: Sequence[int], slot: int | None = None, tail_from: int = 0) -> Tensor:
        """A row of a page table, `[columns]` int32: what `reference.Tails` has, where there are tails, and pages."""
        columns = [] if slot is None else [slot, tail_from]
        return torch.tensor([*columns, *pages], dtype=torch.int32)

    def fill_block_table(self, request_id: str, past_length: int, query_length: int, block_table: Tensor) -> None:
        """Write the row of a request to the start of `block_table`, `[columns]` int32."""
        pages = self.pages_of(request_id)
        block_table[: len(pages)] = pages

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, read_index: Tensor, write_index: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Refused: our attention never asks for dense keys and values."""
        raise _other_attention()

    def get_cache_for_block_table(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Refused, too."""
        raise _other_attention()


def _bytes_per_page(layers: Mapping[int, PagedLayer]) -> int:
    """Bytes of the pages of all layers, which have the size of the largest one."""
    return max(layer.page.num_bytes for layer in layers.values())


def tails_of(layers: Mapping[int, PagedLayer]) -> TailLayout | None:
    """The slot for the tails of a request; `None` if no layer has one."""
    return TailLayout.of({index: layer.page for index, layer in layers.items()})


def sector_for(layers: Mapping[int, PagedLayer], states: StateLayout | None) -> Sector:
    """The sectors of a cache for these layers and states."""
    tails, bytes_per_block = tails_of(layers), len(layers) * _bytes_per_page(layers)
    tail, state = (0 if each is None else each.num_bytes for each in (tails, states))
    return sector_of(bytes_per_block, tail, state)


def blocks_for_tails(layers: Mapping[int, PagedLayer], count: int) -> int:
    """Blocks of pages that take as much memory as the tails of some requests, in whole sectors; 0 without tails."""
    sector = sector_for(layers, None)
    num_sectors = -(-count * sector.bytes_per_tail // sector.num_bytes)
    return num_sectors * sector.num_bytes // (len(layers) * _bytes_per_page(layers))


def check_room(
    layers: Mapping[int, PagedLayer], states: StateLayout | None, num_blocks: int, *, is_given: bool
) -> None:
    """Refuse memory that is too small for the slots of one request and a page of its tokens.

    Args:
        layers: See `PagedCache`.
        states: Likewise.
        num_blocks: Memory, in blocks of pages.
        is_given: Whether the user has set it.

    Raises:
        ValueError: It is too small.
    """
    sector = sector_for(layers, states)
    sizes = {"dense tokens": sector.bytes_per_tail, "states": sector.bytes_per_state}
    kinds = [name for name, size in sizes.items() if size]
    blocks_per_sector = sector.num_bytes // (len(layers) * _bytes_per_page(layers))
    least = (len(kinds) + 1) * blocks_per_sector
    # transformers rounds what is given up to sectors.
    if kinds and num_blocks <= least - blocks_per_sector:
        remedy = "Leave more memory free, raise `max_memory_percent`, or set a smaller `page_size`."
        if is_given:  # in blocks, which are larger with larger pages
            remedy = "Set a larger one, or a larger `page_size`."
        raise ValueError(
            f"continuous batching: `num_blocks` must be at least {least}, since the {' and the '.join(kinds)} of a "
            f"request take as much memory as {least - blocks_per_sector} of them, got {num_blocks}. {remedy}"
        )


class PagedCache(PagedAttentionCache):
    """A `PagedAttentionCache` whose pages hold codes.

    Args:
        config: Of the text model.
        continuous_batching_config: Resolved.
        layers: All layers of the model that have keys and values, by index.
        device: Of the pages.
        supports_logits_to_keep: Whether the model computes only the logits that are sampled from.
        ranks: The ranks of tensor parallelism. All of them get the number of pages of the rank with the fewest.
        states: Of a request; `None` if no layer has a state.

    Attributes:
        tails: Gives out the slots for tails; `None` if no layer has one.
        states: Gives out the slots for states; `None` likewise.
        slots: These two, as far as there are any. A request has a slot of each.
        snapshots: States at the end of prefixes; `None` if no layer has a state, or nothing is shared.
        groups: The requests of the present forward.
        sequences: The same in one row, for layers with a state; `None` where all of them decode, or no layer has one.
        rope: Whose RoPE factors each request gets; `None` where all get the same.
        counters: Scratch of the ops. Layers share it, because they run one after the other.

    Raises:
        MemoryError, ValueError: Raised by transformers if the cache does not fit into memory.
        ValueError: See `check_room`.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        continuous_batching_config: ContinuousBatchingConfig,
        layers: Mapping[int, PagedLayer],
        device: torch.device,
        supports_logits_to_keep: bool,
        ranks: DistributedHelper,
        states: StateLayout | None = None,
    ) -> None:
        # The request that fills a first block has all sinks then.
        has_sinks_in_block = all(each.page.layout.sink_length <= each.page.num_tokens for each in layers.values())
        self.allow_block_sharing = continuous_batching_config.allow_block_sharing and has_sinks_in_block
        sector, self.tails = sector_for(layers, states), None
        tails = tails_of(layers)
        if tails is not None:
            self.tails = TailAllocator(1, tails, sector.bytes_per_tail, keeps_sinks=self.allow_block_sharing)
        self.allocator = allocator = PageAllocator(layers, self.allow_block_sharing, self.tails)
        self.config, self.dtype, self.device = config, allocator.cache_dtype, device
        self.groups: list[Group] = []
        self.sequences: Sequences | None = None
        self.rope: RopeByRequest | None = None
        self.counters = ops.new_counters(torch.device(device))
        self.cache_allocators: dict[str, CacheAllocator] = {FULL_ATTENTION: allocator}
        self.layer_to_allocator = dict.fromkeys(layers, allocator)
        self.bytes_per_sector = sector.num_bytes
        if self.tails is not None:
            self.cache_allocators[TAILS] = self.tails
        self.states: StateAllocator | None = None
        if states is not None:
            self.states = StateAllocator(len(self.cache_allocators), states, sector.bytes_per_state)
            self.cache_allocators[STATES] = self.states
        blocks_per_sector = self.bytes_per_sector // allocator.bytes_per_block
        self.tokens_per_sector = blocks_per_sector * allocator.tokens_per_page
        self.slots: list[SlotAllocator] = [each for each in (self.tails, self.states) if each is not None]
        sizes = PageMemory(
            states,
            self.device,
            self._sectors_of,
            config=config,
            cb_config=continuous_batching_config,
            dtype=self.dtype,
            bytes_per_sector=self.bytes_per_sector,
            tokens_per_sector=self.tokens_per_sector,
            bytes_per_block=allocator.bytes_per_block,
            attn_types=list(self.cache_allocators),
            model_supports_logits_to_keep=supports_logits_to_keep,
        ).infer_max_batch_tokens_and_num_sectors()
        self.max_batch_tokens, self.num_sectors = ranks.tp_all_reduce_min(torch.tensor(sizes, device=device)).tolist()
        self.num_blocks = self.num_sectors * blocks_per_sector
        is_given = continuous_batching_config.num_blocks is not None
        check_room(layers, states, self.num_blocks, is_given=is_given)
        # Zeros, since kernels read whole tiles: see `KVFormat.allocate`. The first two sectors are transformers' trash.
        num_bytes = self.num_sectors * self.bytes_per_sector
        self.cache_tensor = zeros(num_bytes + 2 * self.bytes_per_sector, torch.device(device))
        self.pool = CachePool(self.num_sectors, len(self.cache_allocators))
        for each in self.cache_allocators.values():
            each.register_cache_tensor(self.bytes_per_sector, num_bytes, self.cache_tensor, self.pool)
        self.use_prefix_sharing = self.allow_block_sharing
        self.snapshots: Snapshots | None = None
        if self.states is not None and self.use_prefix_sharing:
            self.snapshots = Snapshots(self.states)
        # Nothing is gathered before it is attended to, so a batch may read any number of tokens, none of them through
        # the index that transformers would keep for this many.
        self.read_cache_limit, self.max_tokens_read = 0, 1
        # With a block table, decode steps are captured. Longer requests than it has room for are served without.
        max_blocks = continuous_batching_config.max_blocks_per_request or 0
        self.max_blocks_per_request = max_blocks + allocator.num_columns if max_blocks else 0
        self.max_decode_fast_path_length = allocator.tokens_per_page * max_blocks

    @property
    def room(self) -> int:
        """Tokens of the longest request that all pages together hold."""
        num_sectors: int = self.num_sectors - len(self.slots)  # one for each slot of it
        return num_sectors * self.tokens_per_sector

    @property
    def pages_of_a_state(self) -> float:
        """Blocks of pages that take as much memory as the slot of a request; 0 if no layer has a state."""
        return 0.0 if self.states is None else self.states.bytes_per_block / self.allocator.bytes_per_block

    @property
    def most_requests(self) -> int | None:
        """Requests that all memory has room for, with a page of tokens each; `None` if no layer has a state."""
        if self.states is None:
            return None
        most = 0
        while self._sectors_of(most + 1, 1) <= self.num_sectors:
            most += 1
        return most

    def _sectors_of(self, count: int, num_tokens: int) -> int:
        """Sectors for `count` requests with `num_tokens` tokens each."""
        return self.sectors_for(count * -(-num_tokens // self.allocator.tokens_per_page), count)

    def sectors_for(self, num_blocks: int, num_requests: int) -> int:
        """Sectors for blocks of pages, and for the slots of requests."""
        needs = [num_blocks * self.allocator.bytes_per_block]
        needs += [num_requests * each.bytes_per_block for each in self.slots]
        return sum(-(-num_bytes // self.bytes_per_sector) for num_bytes in needs)

    def can_store_request_tokens(self, state: RequestState, request_len: int, dry_run: bool = False) -> bool:
        """See `PagedAttentionCache`. Nearly all steps of a request find room in what it has, and allocate nothing."""
        name, pages = state.request_id, self.allocator
        room = len(pages.block_table.get(name, ())) * pages.tokens_per_page
        if state.current_len() + request_len <= room and all(name in each.block_table for each in self.slots):
            return True
        return bool(super().can_store_request_tokens(state, request_len, dry_run))

    def planned(self, group: Group) -> Group:
        """A group, with a split plan if the GPU's kernel for single tokens serves it.

        One sequence alone gets none, since the kernel cuts it better: with a plan, steps over 1k to 128k tokens took up
        to 21 % longer (H200, 2026-11). Only `int8` and `int4-channel` at 128k gained, 1 and 2 %.
        """
        if self.counters is None or group.q_len > 1 or not group.has_past or len(group.lengths) == 1:
            return group
        num_heads = self.allocator.num_key_value_heads
        num_slots, most_slots = ops.num_slots_of(self.counters.device, num_heads, len(group.lengths))
        return dataclasses.replace(group, split_plan=ops.split_plan(group.lengths, num_slots, None, most_slots))

    def extend_read_and_write_indices(
        self,
        request_id: str,
        past_length: int,
        query_length: int,
        read_index: list[list[int]] | None,
        write_index: list[list[int]],
    ) -> None:
        """Do nothing: the op finds tokens by their page, not by an index for each."""

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        """See `PagedAttentionCache`. With states, a request takes over pages up to a border whose states are known.

        Where it finds more pages than that, its steps will end at the border at their end, so that the next one finds
        the states there. They end at the last border of a prompt that takes several steps, too.

        Long texts with RoPE factors of their own share pages among themselves, if all of their keys have these.
        """
        if not self.use_prefix_sharing:
            return 0
        if self.rope is not None and len(prompt_ids) > self.rope.switch.border:
            if not self.rope.switch.recomputes:
                return 0
            self.allocator.keep_apart(request_id)
        blocks = self._blocks_to_take_over(request_id, self.allocator.told_apart(request_id, prompt_ids))
        num_tokens: int = len(blocks) * self.allocator.tokens_per_page
        if blocks:
            logger.debug("found the first %d tokens of request %s", num_tokens, request_id)
            self.allocator.acquire_prefix_blocks(request_id, num_tokens, blocks)
        return num_tokens

    def _blocks_to_take_over(self, request_id: str, prompt_ids: list[int]) -> list[int]:
        """Blocks of a prompt's first tokens. With states, these are in the request's slot from then on."""
        if self.snapshots is None:
            return self.allocator.match_prefix_blocks(prompt_ids)
        # Requests that wait are asked for in every step, and hashes of long prompts take time.
        needs = sum(each.needs_new_sectors(request_id, 0, 1) for each in self.cache_allocators.values())
        if needs > self.pool.num_free_sectors:
            return []
        page, num_tokens = int(self.allocator.tokens_per_page), len(prompt_ids)
        blocks = self.allocator.match_prefix_blocks(prompt_ids)
        hashes = [self.allocator.ledger.block_to_hash[block] for block in blocks]
        count = self.snapshots.num_covered(hashes)
        if count and not self.snapshots.give(hashes[count - 1], request_id):
            return []
        borders: dict[int, int | None] = {}
        if num_tokens - count * page > self.max_batch_tokens:
            # Where the last tokens must be computed, and the pages before have their codes.
            borders[min((num_tokens - 1) // page, self.allocator.num_complete(num_tokens)) * page] = None
        if hashes:
            borders[len(hashes) * page] = hashes[-1]
        self.snapshots.wish(request_id, {at: shared for at, shared in borders.items() if at > count * page})
        return blocks[:count]

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """See `PagedAttentionCache`. A snapshot of states goes with its pages."""
        super().free_blocks(request_id, no_cache)
        if self.snapshots is not None:
            self.snapshots.end(request_id)
            if no_cache:
                self.snapshots.drop_lost(self.allocator.ledger.hash_to_block)

    def free_all_requests(self, clear_ledgers: bool = False) -> None:
        """See `PagedAttentionCache`, likewise."""
        super().free_all_requests(clear_ledgers)
        if self.snapshots is not None:
            self.snapshots.end_all()
            self.snapshots.drop_lost(self.allocator.ledger.hash_to_block)

    def evict_cached_blocks(self) -> bool:
        """See `PagedAttentionCache`. Snapshots of states go, too, unless several prompts begin with pages in use."""
        evicted: bool = super().evict_cached_blocks()
        if self.snapshots is not None:
            evicted |= self.snapshots.drop_idle(self.allocator.ledger.hash_to_block)
        return evicted

    def count_new_complete_blocks(self, state: RequestState, request_len: int) -> dict[str, int]:
        """See `PagedAttentionCache`. A block is complete when it has its codes."""
        if not self._shares(state):
            return {}
        held = state.current_len()
        before, after = self.allocator.num_complete(held), self.allocator.num_complete(held + request_len)
        return {FULL_ATTENTION: after - before} if after > before else {}

    def mark_complete_blocks(self, state: RequestState, complete_blocks: dict[str, int]) -> None:
        """See `PagedAttentionCache`. A request that was offloaded counts all of its blocks anew.

        With asynchronous batching, transformers leaves out what the last chunk but one of a prompt completes: the last
        one is under way by then, and the prompt counts as done (5.24). Later prompts would find half of a prefix of two
        chunks. So once a request has its first new token, all that it holds is counted, but for the newest token.
        """
        num_new = state.generated_len()
        if not complete_blocks and num_new != 1:  # in nearly all steps
            return
        if not self._shares(state):
            return
        if num_new:
            held = self.allocator.num_complete(len(state.initial_tokens) + num_new - 1)
            complete_blocks = {FULL_ATTENTION: held - self.allocator.num_marked(state.request_id)}
        most = self.allocator.num_complete(state.current_len())
        # Of a request that comes back from CPU memory, transformers counts slots, too.
        count = complete_blocks.get(FULL_ATTENTION, 0)
        super().mark_complete_blocks(state, {FULL_ATTENTION: min(count, most)})
        if self.snapshots is not None:
            self.snapshots.keep(state.request_id, functools.partial(self.allocator.hash_at, state.request_id))

    def _shares(self, state: RequestState) -> bool:
        """Whether others may take over the pages of a request: not those of a text that has become long."""
        if not self.use_prefix_sharing or self.rope is None:
            return self.use_prefix_sharing
        num_tokens = len(state.initial_tokens) + len(state.generated_tokens)
        is_short = num_tokens <= self.rope.switch.border and not self.rope.is_long(state)
        return is_short or self.allocator.is_apart(state.request_id)

    def forget_pages(self) -> None:
        """Let no later request take over tokens of earlier ones. Requests go on with those that they hold."""
        self.evict_cached_blocks()
        self.allocator.forget_pages()
        if self.snapshots is not None:
            self.snapshots.clear()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0, for models that ask although they are told positions, such as OPT; others are refused."""
        return 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Let new keys and values pass to our attention, which writes them. See `releases.DO_MODELS_UPDATE_PAGES`.

        Args:
            key_states: `[1, num_kv_heads, tokens, head_dim]`, returned with a note of this cache: see `noted_on`.
            value_states: Likewise, returned as they are.
            layer_idx: Of the layer. It is noted, too: Zamba2's layers share modules.
            kwargs: Not needed. Some models of transformers 5.24 do not pass it, such as GPT-NeoX.

        Raises:
            RuntimeError: Another attention than ours asks for dense keys and values, or would compute without pages.
        """
        if not DO_MODELS_UPDATE_PAGES or not is_ours(self.config._attn_implementation):
            raise _other_attention()
        return noted(key_states, self, layer_idx), value_states


def _other_attention() -> RuntimeError:
    return RuntimeError(
        "continuous batching: the attention implementation must stay the one that the manager has set, got a call of "
        "another over pages of codes. Stop the manager before changing the model's attention."
    )
