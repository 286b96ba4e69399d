"""Scores rows over pages of codes. The tokens of a batch lie one after the other, so that nothing is padded.

Rows see what they see in `KVQuantLM._decode`: the context without its last token attends to itself, and all later
tokens read codes. Rows with the same context share its full pages, and have a copy of the one that is not full.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from hf_kvquant import ops
from hf_kvquant.batching.batch import Request, groups_of
from hf_kvquant.config import KVQuantConfig
from hf_kvquant.models.layers import layers_of
from hf_kvquant.models.text_config import text_config_of
from hf_kvquant.storage.tally import causal_pairs

from .batches import Row, Score
from .pages import PAGE_SIZE, Pages

# Tokens of a row in a forward after its first chunk, and tokens of a forward for each row of `--batch-size`: as without
# pages, the most that see each other as codes.
CHUNK_SIZE = ops.MAX_DRAFTED


def chunk_size(config: KVQuantConfig, layers: Iterable[int]) -> int:
    """Tokens of a row in a forward, of which each has to read what it would read alone.

    Tails in pages have no rows for a window of each query, so with newest tokens that stay dense this is one token.
    """
    formats = [config.formats(index) for index in layers]
    return 1 if any(each.residual_length or each.key.block_size for each in formats) else CHUNK_SIZE


# Pages for each row of `--batch-size`: room for short rows, of which a forward has many.
PAGES_PER_ROW = 32


@dataclasses.dataclass(frozen=True)
class Held:
    """Memory of a first chunk.

    Attributes:
        pages: Their numbers, in order.
        slot: That of its tail; `None` if no layer has one.
    """

    pages: list[int]
    slot: int | None


@dataclasses.dataclass
class Place:
    """A row in the pages.

    Attributes:
        pages: The row's row of a page table: `[columns]` int32.
        later: The tokens that come after its first chunk.
        first: Tokens of the first chunk.
    """

    pages: Tensor
    later: tuple[int, ...]
    first: int


class Scorer:
    """Scores rows of a patched model. Until `close`, the model serves nothing else.

    Args:
        model: Patched with `config`.
        config: Of its cache.
        batch_size: Rows of 128 tokens that a forward may have.
        max_length: Tokens of the longest row.

    Raises:
        ImportError, NotImplementedError, ValueError: Pages do not serve the model or the config.
    """

    def __init__(self, model: PreTrainedModel, config: KVQuantConfig, batch_size: int, max_length: int) -> None:
        self._model: Any = model
        self._budget = batch_size * CHUNK_SIZE
        # Room for one row at least, and its context. Nothing is captured, since the manager does not run.
        num_pages = 2 * _pages(max_length + 1) + PAGES_PER_ROW * batch_size
        options: dict[str, Any] = {"num_tails": 2, "max_batch_tokens": self._budget, "use_cuda_graph": False}
        self._pages = Pages(model, config, GenerationConfig(), num_pages, **options)
        cache = self._pages.cache
        self._row_of = cache.allocator.row_of
        self._page_bytes: int = cache.allocator.bytes_per_block
        self._tail_bytes: int = 0 if cache.tails is None else cache.tails.bytes_per_block
        self._num_bytes = cache.num_sectors * cache.bytes_per_sector
        self._device = model.device
        self._chunk_size = chunk_size(config, self._pages.quantized)
        types, kwargs = layers_of(text_config_of(model))
        self._windows = [
            kwargs[index].get("sliding_window") or 0 if types[index] == "sliding_attention" else 0
            for index in self._pages.quantized
        ]

    def close(self) -> None:
        """Give the memory back, and the model its attention."""
        self._pages.close()

    def batches(self, rows: Iterable[Row]) -> Iterator[list[Row]]:
        """The rows of each batch: longest contexts first, rows of the same context together."""
        batch: list[Row] = []
        tokens, held, last = [0, 0], 0, None
        for row in sorted(rows, key=lambda row: (-len(row.context), row.context, -len(row.fed), row.fed)):
            is_new = row.context != last
            added = row.first_chunk if is_new else 0, min(self._chunk_size, len(row.fed) + 1)
            needed = self._bytes_of(row, is_new)
            sums = [before + more for before, more in zip(tokens, added, strict=True)]
            if batch and (max(sums) > self._budget or held + needed > self._num_bytes):
                yield batch
                batch, held, sums = [], 0, [row.first_chunk, added[1]]
                needed = self._bytes_of(row, True)
            batch.append(row)
            tokens, held, last = sums, held + needed, row.context
        if batch:
            yield batch

    def _bytes_of(self, row: Row, is_new: bool) -> int:
        """Memory of a row; of its context, too, if that is new: a page that is not full, and a tail."""
        return (_pages(len(row.context) + len(row.fed)) + is_new) * self._page_bytes + (1 + is_new) * self._tail_bytes

    def score(self, rows: Sequence[Row]) -> tuple[list[Score], int, int]:
        """The scores of a batch, the pairs that were read from codes, and those that had to be."""
        firsts = list(dict.fromkeys(row.context[: row.first_chunk] for row in rows))
        places, held = self._place(rows, firsts)
        begun = self._first(firsts, held)
        log_probs: list[list[Tensor]] = [[] for _ in rows]
        hits: list[list[Tensor]] = [[] for _ in rows]
        lasts: dict[int, Tensor] = {}

        def take(index: int, column: int, scored: Tensor) -> None:
            """Keep what consecutive columns of a row predict, `[columns, vocab_size]`; column 0 predicts `fed[0]`."""
            fed = rows[index].fed[column : column + len(scored)]
            target = torch.tensor(fed, dtype=torch.int64, device=scored.device)
            log_probs[index].append(scored[: len(fed)].gather(1, target.unsqueeze(1)).squeeze(1))
            hits[index].append(scored[: len(fed)].argmax(-1) == target)
            if len(scored) > len(fed):
                lasts[index] = scored[len(fed)].clone()

        for index, row in enumerate(rows):
            if len(row.context) == 1:
                take(index, 0, begun[row.context])
        self._later(rows, places, take)
        read, expected = self._pages.take_pairs(), sum(map(self._expected, rows))
        scores = [
            Score(torch.cat(log_probs[index]).cpu(), bool(torch.cat(hits[index]).all()), lasts[index].cpu())
            for index in range(len(rows))
        ]
        return scores, read, expected

    def _expected(self, row: Row) -> int:
        total = len(row.context) + len(row.fed)
        return sum(causal_pairs(total, row.first_chunk, window) for window in self._windows)

    def _place(
        self, rows: Sequence[Row], firsts: Sequence[tuple[int, ...]]
    ) -> tuple[list[Place], dict[tuple[int, ...], Held]]:
        """The memory of every row and of every first chunk. What is to be copied is copied by `_first`.

        Pages are taken from the begin of the cache's memory and slots from its end, so that they do not meet.
        """
        numbers = itertools.count()
        slots: Iterator[int | None] = itertools.repeat(None)
        if self._tail_bytes:
            slots = itertools.count(self._pages.cache.cache_tensor.numel() // self._tail_bytes - 1, -1)
        held = {first: Held([next(numbers) for _ in range(_pages(len(first)))], next(slots)) for first in firsts}
        places = []
        self._moves: dict[int, int] = {}
        self._tail_moves: dict[int, int] = {}
        for row in rows:
            first = row.context[: row.first_chunk]
            pages, slot = held[first].pages, next(slots)
            shared = pages[: len(first) // PAGE_SIZE]
            own = [next(numbers) for _ in range(_pages(len(row.context) + len(row.fed)) - len(shared))]
            if own and len(pages) > len(shared):
                self._moves[own[0]] = pages[-1]
            source = held[first].slot
            if slot is not None and source is not None:
                self._tail_moves[slot] = source
            columns = self._row_of([*shared, *own], slot)
            places.append(Place(columns, (row.context + row.fed)[len(first) :], len(first)))
        return places, held

    def _first(
        self, firsts: Sequence[tuple[int, ...]], held: dict[tuple[int, ...], Held]
    ) -> dict[tuple[int, ...], Tensor]:
        """Fill pages with first chunks. Returns log-probabilities behind those of one token, `[1, vocab_size]`."""
        ends = list(itertools.accumulate(map(len, firsts)))
        singles = [first for first in firsts if len(first) == 1]
        keep = [end - 1 for first, end in zip(firsts, ends, strict=True) if len(first) == 1] or [0]
        requests = [Request(0, len(first), self._row_of(held[first].pages, held[first].slot)) for first in firsts]
        scored = self._forward(requests, firsts, torch.tensor(keep, device=self._device))
        self._pages.copy(self._moves, self._tail_moves)
        return {first: scored[index : index + 1] for index, first in enumerate(singles)}

    def _later(self, rows: Sequence[Row], places: Sequence[Place], take: Callable[[int, int, Tensor], None]) -> None:
        """Feed what comes after the first chunks."""
        for begin in range(0, max(len(place.later) for place in places), self._chunk_size):
            active = [index for index, place in enumerate(places) if len(place.later) > begin]
            pieces = [places[index].later[begin : begin + self._chunk_size] for index in active]
            requests = [
                Request(places[index].first + begin, len(piece), places[index].pages)
                for index, piece in zip(active, pieces, strict=True)
            ]
            scored = self._forward(requests, pieces, None).split([len(piece) for piece in pieces])
            for index, piece in zip(active, scored, strict=True):
                take(index, begin + (len(rows[index].context) == 1), piece)

    def _forward(self, requests: list[Request], pieces: Sequence[tuple[int, ...]], keep: Tensor | None) -> Tensor:
        """Log-probabilities behind tokens of a forward, `[tokens, vocab_size]` float32; behind some with `keep`."""
        cache = self._pages.cache
        cache.groups = [cache.planned(group) for group in groups_of(requests, self._device)]
        ids = torch.tensor([list(itertools.chain.from_iterable(pieces))], device=self._device)
        positions = [range(request.past, request.past + request.q_len) for request in requests]
        options: dict[str, Any] = {}
        if keep is not None and self._model._supports_logits_to_keep():
            options["logits_to_keep"] = keep
        logits: Tensor = self._model(
            input_ids=ids,
            position_ids=torch.tensor([list(itertools.chain.from_iterable(positions))], device=self._device),
            use_cache=False,
            cache=cache,
            **options,
        ).logits[0]
        if keep is not None and not options:
            logits = logits[keep]
        return logits.float().log_softmax(-1)


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE_SIZE)
