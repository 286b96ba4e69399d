"""Pages of codes for evaluations: a manager of continuous batching, whose reads are counted.

Scoring calls the model over the pages directly, with tokens that are given. Generation lets the manager run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from hf_kvquant import ops
from hf_kvquant.batching.support import check_version
from hf_kvquant.config import KVQuantConfig
from hf_kvquant.patching import patched
from hf_kvquant.upstream.releases import HAS_PAGES

if HAS_PAGES:
    from transformers import ContinuousBatchingConfig

    from hf_kvquant.batching.paged_cache import blocks_for_tails

PAGE_SIZE = 128  # tokens: the least that there is, since most texts of tasks are short


class CountedOperands:
    """The operands of one layer, which count the (query, token) pairs that are read from their codes.

    Args:
        operands: Of the layer.
        pairs: `[]` int64 on the device, added to in place. So replays of a CUDA graph count, too.
    """

    def __init__(self, operands: ops.Operands, pairs: Tensor) -> None:
        self._operands, self._pairs = operands, pairs
        self.append, self.layout = operands.append, operands.layout

    def decode(self, query: Tensor, new: Any, lengths: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """See `ops.Operands.decode`."""
        self._count(query, lengths, options)
        return self._operands.decode(query, new, lengths, **options)

    def attend_chunk(self, query: Tensor, new: Any, lengths: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """See `ops.Operands.attend_chunk`."""
        self._count(query, lengths, options)
        return self._operands.attend_chunk(query, new, lengths, **options)

    def _count(self, query: Tensor, lengths: Tensor, options: dict[str, Any]) -> None:
        window = options.get("sliding_window") or 0
        ends = lengths.long()
        self._pairs += (_seen(ends, window) - _seen(ends - query.shape[2], window)).sum()


def _seen(tokens: Tensor, window: int) -> Tensor:
    """Pairs of the first tokens of each text, as in `causal_pairs`. Padding of a batch has less than no tokens."""
    tokens = tokens.clamp(min=0)
    clipped = tokens.clamp(max=window) if window else tokens
    return clipped * (clipped + 1) // 2 + (tokens - clipped) * window


class Pages:
    """The pages of a patched model and the manager that has them. Until `close`, the model serves nothing else.

    Args:
        model: Patched with `config`.
        config: Of its cache.
        generation_config: Of the manager.
        num_pages: Of tokens.
        num_tails: Requests whose tails have room besides, if the config keeps some tokens dense.
        **batching: Arguments of `ContinuousBatchingConfig`.

    Attributes:
        manager: Not started.
        quantized: Indices of the layers that have codes.

    Raises:
        ImportError, NotImplementedError, ValueError: Pages do not serve the model or the config.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: KVQuantConfig,
        generation_config: GenerationConfig,
        num_pages: int,
        num_tails: int,
        **batching: Any,
    ) -> None:
        check_version()
        init: Any = model.init_continuous_batching
        options = {"page_size": PAGE_SIZE, **batching}
        self.manager = init(generation_config, ContinuousBatchingConfig(**options))
        # Only now is known what a tail takes.
        num_blocks = num_pages + blocks_for_tails(self.manager._layers, num_tails)
        self.manager.continuous_batching_config.num_blocks = num_blocks
        # Counted before `warmup` captures what is counted.
        self.manager.batch_processor = self.manager._create_batch_processor()
        self.cache = self.manager.batch_processor.cache
        self._pairs = torch.zeros((), dtype=torch.int64, device=model.device)
        operands: dict[int, Any] = self.cache.allocator.operands
        formats = {index: config.formats(index) for index in operands}
        self.quantized = [index for index, each in formats.items() if each.key.is_quantized or each.value.is_quantized]
        for index in self.quantized:
            operands[index] = CountedOperands(operands[index], self._pairs)
        self.manager.warmup()
        self._pairs.zero_()

    def take_pairs(self) -> int:
        """The pairs read since the last call, over all layers. Waits for the device."""
        found = int(self._pairs)
        self._pairs.zero_()
        return found

    def copy(self, pages: Mapping[int, int], tails: Mapping[int, int]) -> None:
        """Copy pages of all layers, and tails, by the number of the page or slot to write."""
        for allocator, moves in ((self.cache.allocator, pages), (self.cache.tails, tails)):
            if moves:
                allocator.copy_blocks(list(moves.values()), list(moves))

    def close(self) -> None:
        """Give the memory back, and the model its attention."""
        if self.manager.is_running():
            self.manager.stop(hard_stop=True)
        self.manager.destroy()


def check_batched(model: PreTrainedModel, config: KVQuantConfig) -> None:
    """Refuse what pages do not serve. The model is left as it was.

    Raises:
        ImportError, NotImplementedError, ValueError: Pages do not serve the model or the config.
    """
    with patched(model, config):
        Pages(model, config, GenerationConfig(), num_pages=2, num_tails=1, max_batch_tokens=1).close()
