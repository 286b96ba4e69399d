"""How much memory a paged cache takes on a CPU: what its requests can use, a share of what is free, and no more yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import psutil
import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from hf_kvquant import patched
from hf_kvquant.upstream.releases import HAS_PAGES, HAS_STATES

if not HAS_PAGES:
    pytest.skip("transformers' paged cache has another design", allow_module_level=True)

from hf_kvquant.batching import memory

GB = 10**9


def cache_of(model: Any, **batching: Any) -> Any:
    """The cache that a manager makes."""
    manager = model.init_continuous_batching(
        GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1),
        ContinuousBatchingConfig(**{"page_size": 128, "max_batch_tokens": 64, **batching}),
    )
    try:
        return manager._create_batch_processor().cache
    finally:
        manager.destroy()


def test_a_cpu_gives_what_requests_can_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 4 * GB)
    with patched(models.llama(), models.INT8_CODES) as model:
        sizes = {"max_requests_per_batch": 3}
        assert cache_of(model, **sizes).num_blocks == 3 * -(-model.config.max_position_embeddings // 128)
        assert cache_of(model, **sizes, num_blocks=2).num_blocks == 2
    with patched(models.llama(), "int4") as model:  # each request has a tail, too
        cache = cache_of(model, **sizes)
        pages = -(-model.config.max_position_embeddings // 128)
        of_pages = -(-3 * pages // cache.allocator.blocks_per_sector)
        of_tails = -(-3 // cache.tails.blocks_per_sector)
        assert cache.num_sectors == of_pages + of_tails == cache._sectors_of(3, model.config.max_position_embeddings)
        assert cache.num_sectors * cache.bytes_per_sector >= 3 * (
            pages * cache.allocator.bytes_per_block + cache.tails.layout.num_bytes
        )


@pytest.mark.skipif(not HAS_STATES, reason="states need transformers 5.24")
def test_requests_with_states_have_room_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 4 * GB)
    with patched(models.family("lfm2"), "int8") as model:
        cache = cache_of(model, max_requests_per_batch=3)
        pages = 3 * -(-model.config.max_position_embeddings // 128)
        assert pages < cache.num_blocks <= pages + 3
        assert cache.most_requests >= 3


@pytest.mark.parametrize(("options", "share"), [({}, 0.3), ({"max_memory_percent": 0.5}, 0.5)], ids=["default", "set"])
def test_a_cpu_gives_a_share_of_its_free_memory(
    options: dict[str, Any], share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: GB // 10)
    with patched(models.llama(), "none") as model:
        cache = cache_of(model, max_requests_per_batch=1024, **options)
        assert 0.8 * share * GB / 10 < cache.cache_tensor.numel() <= share * GB / 10


def test_what_nobody_has_written_takes_no_memory() -> None:
    before = psutil.Process().memory_info().rss
    found = memory.zeros(2 * GB, torch.device("cpu"))
    assert found.dtype == torch.uint8 and found.shape == (2 * GB,) and found.data_ptr() % 4096 == 0
    found[GB : GB + 8] += torch.arange(8, dtype=torch.uint8)
    assert found[GB - 8 : GB + 16].tolist() == [0] * 8 + list(range(8)) + [0] * 8
    assert psutil.Process().memory_info().rss - before < GB / 10


def test_memory_that_is_not_there() -> None:
    with pytest.raises(MemoryError, match="100,000,000,000,000,000 bytes for pages cannot be had: "):
        memory.zeros(10**17, torch.device("cpu"))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"memory.max": "3000", "memory.current": "2000", "memory.stat": "anon 5\ninactive_file 500\n"}, 1500),
        ({"memory.max": "max", "memory.current": "2000", "memory.stat": "anon 5\n"}, 10**6),
        ({"memory.max": "1000", "memory.current": "2000", "memory.stat": "anon 5\n"}, 0),
        (
            {
                "memory/memory.limit_in_bytes": "3000",
                "memory/memory.usage_in_bytes": "2900",
                "memory/memory.stat": "total_inactive_file 7\n",
            },
            107,
        ),
        ({}, 10**6),
    ],
    ids=["limit", "no limit", "full", "version 1", "no files"],
)
def test_free_memory_of_a_container(
    files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Machine:
        available = 10**6

    monkeypatch.setattr(psutil, "virtual_memory", Machine)
    (tmp_path / "memory").mkdir()
    for name, content in files.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    assert memory.free_memory(tmp_path) == expected
