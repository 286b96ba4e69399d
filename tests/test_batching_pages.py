"""The bytes of pages, the memory of a paged cache, and that our classes still fit between those of transformers."""

from __future__ import annotations

import inspect
import re
from typing import Any

import models
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import cache as theirs
from transformers.generation.continuous_batching import continuous_api

from hf_kvquant import KVQuantCache, KVQuantConfig, patched
from hf_kvquant.batching.batch import Request, groups_of
from hf_kvquant.config import PRESETS
from hf_kvquant.spec.formats import KVFormat
from hf_kvquant.spec.layout import KVLayout
from hf_kvquant.spec.pages import PART_ALIGNMENT, PageLayout
from hf_kvquant.spec.tails import TailLayout
from hf_kvquant.upstream.releases import HAS_PAGES, with_cache

needs_pages = pytest.mark.skipif(not HAS_PAGES, reason="transformers' paged cache has another design")
FORMATS = [
    KVFormat("none"),
    KVFormat("int8"),
    KVFormat("int4", symmetric=False),
    KVFormat("int4", "group", 32, symmetric=False),
    KVFormat("fp8", "token"),
]
WHERE: Any = {"dtype": torch.float16, "device": torch.device("cpu")}


# --- the bytes of a page ----------------------------------------------------------------------------------------------


@given(
    formats=st.tuples(st.sampled_from(FORMATS), st.sampled_from(FORMATS)),
    heads=st.integers(1, 3),
    head_dims=st.tuples(st.sampled_from([32, 64, 96]), st.sampled_from([32, 64])),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    num_tokens=st.sampled_from([128, 256]),
)
def test_planes_fill_their_pages_and_do_not_overlap(
    formats: tuple[KVFormat, KVFormat],
    heads: int,
    head_dims: tuple[int, int],
    dtype: torch.dtype,
    num_tokens: int,
) -> None:
    page = PageLayout(KVLayout(*formats), heads, head_dims, dtype, num_tokens)
    begin, stride, num_pages = 256, page.num_bytes + 384, 3
    memory = torch.zeros(num_pages * stride + begin, dtype=torch.uint8)
    sides = page.planes(memory, begin, stride)
    planes = [plane for side in sides for plane in side.tensors()]
    made = page.layout.allocate((num_pages, heads, *head_dims), num_tokens, dtype=dtype, device=memory.device)
    like = [plane for side in made for plane in side.tensors()]
    assert [(plane.shape, plane.dtype) for plane in planes] == [(plane.shape, plane.dtype) for plane in like]
    for plane in planes:
        plane.fill_(1)
    assert all(bool((plane == 1).all()) for plane in planes), "one plane has written over another"
    for number, plane in enumerate(planes):  # 0 in one plane changes as many bytes as it has
        before = memory.clone()
        plane.zero_()
        changed = (memory != before).sum()
        assert changed == (before != 0).sum() - sum((p != 0).sum() * nonzero_bytes(p) for p in planes[number + 1 :])
    assert (memory == 0).all()
    needed = sum(plane[0].nbytes for plane in planes)
    assert needed <= page.num_bytes < needed + PART_ALIGNMENT * len(planes)
    assert page.num_bytes % PART_ALIGNMENT == 0
    assert all(part.begin % PART_ALIGNMENT == 0 for part in page.parts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("preset", ["int4-channel", "k4v2", "k8v4"])
def test_a_page_holds_tokens_alone(preset: str, dtype: torch.dtype) -> None:
    """Whatever is dense besides them."""
    formats = PRESETS[preset]
    pages = [PageLayout(KVLayout(*formats, *windows), 8, (128, 128), dtype, 128) for windows in ((0, 0), (4, 128))]
    assert pages[0].parts == pages[1].parts and pages[0].num_bytes == pages[1].num_bytes
    assert {part.name for part in pages[1].parts} == {"codes", "scale", "zero"}
    assert pages[1].layout.has_tail
    for side in pages[1].planes(torch.zeros(3 * pages[1].num_bytes, dtype=torch.uint8), 0, pages[1].num_bytes):
        assert side.tail is None


def test_a_slot_holds_the_tails_of_all_layers() -> None:
    """Each begins at aligned bytes, and none lies over another. Layers may differ, and not all have a tail."""
    windows = KVLayout(*PRESETS["k4v2"], 4, 39)
    layouts = {1: windows, 2: KVLayout(*PRESETS["int8"]), 5: KVLayout(*PRESETS["int4-channel"]), 7: windows}
    pages = {
        index: PageLayout(layout, heads, (64, 32), torch.float16, 128)
        for heads, (index, layout) in enumerate(layouts.items(), start=1)
    }
    tails = TailLayout.of(pages)
    assert tails is not None and tails.parts.keys() == {1, 5, 7}
    assert [part.shape for part in tails.parts[7]] == [(4, 43, 64), (4, 43, 32)]
    assert [(part.side, part.shape) for part in tails.parts[5]] == [(0, (3, 128, 64))]
    stride, num_slots = tails.num_bytes + PART_ALIGNMENT, 3
    memory = torch.zeros(num_slots * stride + PART_ALIGNMENT, dtype=torch.uint8)
    found = tails.planes(memory, stride)
    planes = [plane for sides in found.values() for plane in sides if plane is not None]
    assert found[5][1] is None and len(planes) == 5
    for index, sides in found.items():
        whole = layouts[index].allocate((num_slots, pages[index].num_kv_heads, 64, 32), 128, **WHERE)
        for mine, made in zip(sides, whole, strict=True):
            assert (mine is None) == (made.tail is None)
            assert mine is None or (mine.shape, mine.dtype) == (made.tail.shape, made.tail.dtype)  # type: ignore[union-attr]
    for number, plane in enumerate(planes):
        assert plane.data_ptr() % PART_ALIGNMENT == memory.data_ptr() % PART_ALIGNMENT
        assert not plane.any(), "another one lies over it"
        plane.fill_(number + 1)
    needed = sum(plane[0].nbytes for plane in planes)
    assert needed <= tails.num_bytes < needed + PART_ALIGNMENT * len(planes)
    memory.zero_()
    for sides in (found[1], found[7]):
        for plane in sides:
            assert plane is not None
            plane[1, :, :4] = 1
    for begin, end in tails.sink_ranges:
        held = memory[stride + begin : stride + end].view(torch.float16)
        assert (held == 1).all()
        held.zero_()
    assert not memory.any(), "no other bytes hold sinks"
    assert TailLayout.of({2: pages[2]}) is None


@needs_pages
def test_the_sector_that_wastes_little() -> None:
    """Of Llama-3-8B: 32 layers with 8 heads of 128 channels."""
    from hf_kvquant.batching.slots import sector_of

    # Seventeen slots in four blocks instead of four in each would save 6 %.
    assert sector_of(8704, 2048) == (8704, 2176, 0)
    found = {}
    for preset in ("k8v4", "int4", "k4v2", "int2"):
        config = KVQuantConfig.from_preset(preset).formats(0)
        layout = KVLayout(config.key, config.value, config.sink_length, config.residual_length)
        for num_tokens in (128, 256):
            page = PageLayout(layout, 8, (128, 128), torch.bfloat16, num_tokens)
            tails, block = TailLayout.of(dict.fromkeys(range(32), page)), 32 * page.num_bytes
            assert tails is not None
            sector = sector_of(block, tails.num_bytes)
            assert sector.num_bytes % block == sector.num_bytes % sector.bytes_per_tail == sector.bytes_per_state == 0
            assert sector.bytes_per_tail % PART_ALIGNMENT == 0 <= sector.bytes_per_tail - tails.num_bytes
            found[preset, num_tokens] = sector.num_bytes // block, sector.num_bytes // sector.bytes_per_tail
    assert found == {
        ("k8v4", 128): (2, 3), ("k8v4", 256): (1, 3), ("int4", 128): (3, 1), ("int4", 256): (3, 2),
        ("k4v2", 128): (6, 1), ("k4v2", 256): (3, 1), ("int2", 128): (8, 1), ("int2", 256): (4, 1),
    }  # fmt: skip
    assert sector_of(12800) == (12800, 0, 0)
    # Where a larger sector saves less than a tenth, it stays as it is.
    assert sector_of(1280, 1152) == (1280, 1280, 0)
    assert sector_of(12800, 128 * 61) == (3 * 12800, 9600, 0)


@needs_pages
def test_sectors_of_states() -> None:
    """They are as large as a slot needs; tails beside them divide them, too."""
    from hf_kvquant.batching.slots import sector_of

    assert sector_of(3 * 4096, state=4096) == (3 * 4096, 0, 4096)
    assert sector_of(4096 * 7 + 128, state=4096) == (28800, 0, 5760)  # 225 units of 128 bytes: 5 slots of 45
    assert sector_of(4096, state=4096) == (4096, 0, 4096)
    assert sector_of(4096 - 128, state=4096) == (2 * 3968, 0, 2 * 3968)
    assert sector_of(4096, 1024, 5 * 4096) == (5 * 4096, 1024, 5 * 4096)
    assert sector_of(4096, 3 * 4096, 4096) == (3 * 4096, 3 * 4096, 4096)


def nonzero_bytes(plane: torch.Tensor) -> int:
    """Bytes other than 0 of a one in a plane."""
    return int((torch.ones(1, dtype=plane.dtype).view(torch.uint8) != 0).sum())


@pytest.mark.parametrize(
    ("layout", "num_tokens", "message"),
    [
        (KVLayout(*PRESETS["int8"]), 64, "`num_tokens` must be a positive multiple of 128, got 64. Set `page_size` of"),
        (KVLayout(*PRESETS["int8"]), 0, "`num_tokens` must be a positive multiple of 128, got 0."),
        (
            KVLayout(KVFormat("int8"), KVFormat("int8", "tensor")),
            128,
            "`value` must not have granularity 'tensor', got it: sequences share pages",
        ),
        (KVLayout(*PRESETS["int4-g32"]), 128, "KVFormat: `group_size` must divide head_dim 48, got 32."),
    ],
)
def test_what_has_no_page_is_refused(layout: KVLayout, num_tokens: int, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        PageLayout(layout, 2, (48, 48), torch.float32, num_tokens)


# --- the requests of a forward ----------------------------------------------------------------------------------------


def page_numbers(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def test_requests_with_equally_many_new_tokens_attend_together() -> None:
    x = torch.arange(14).view(1, 1, 14, 1)
    requests = [
        Request(5, 1, page_numbers(3)),
        Request(0, 4, page_numbers(4)),
        Request(200, 1, page_numbers(5, 6)),
        Request(0, 4, page_numbers(7)),
        Request(128, 4, page_numbers(8, 9)),
    ]
    groups = groups_of(requests, torch.device("cpu"))
    found = [
        (group.has_past, group.lengths.tolist(), group.page_table.tolist(), group.take(x).flatten(1).tolist())
        for group in groups
    ]
    assert found == [
        (True, [6, 201], [[3, -1], [5, 6]], [[0], [5]]),
        (False, [4, 4], [[4], [7]], [[1, 2, 3, 4], [6, 7, 8, 9]]),
        (True, [132], [[8, 9]], [[10, 11, 12, 13]]),
    ]
    assert [isinstance(group.tokens, slice) for group in groups] == [False, False, True]
    assert all(group.page_table.dtype == group.lengths.dtype == torch.int32 for group in groups)


# --- memory -----------------------------------------------------------------------------------------------------------


@needs_pages
@pytest.mark.parametrize("preset", ["int8", "k8v4", "int4-token", "int4-g32", "fp8", "none"])
def test_a_token_takes_the_bytes_that_it_takes_in_a_cache_of_generate(preset: str) -> None:
    with patched(models.llama(), preset) as model:
        cache = KVQuantCache(model.config, preset)
        models.greedy(model, {"input_ids": torch.tensor([[5, 6, 7]])}, 1, **with_cache(cache))
        manager = model.init_continuous_batching(
            continuous_batching_config=ContinuousBatchingConfig(num_blocks=6, max_batch_tokens=64)
        )
        manager.warmup()
        pages = manager.batch_processor.cache
        manager.destroy()
    assert pages.num_blocks == 6
    assert pages.cache_tensor.nbytes == (pages.num_sectors + 2) * pages.bytes_per_sector  # two of them are trash
    num_bytes = pages.bytes_per_sector / pages.tokens_per_sector
    assert sum(storage.bytes_per_token for storage in cache.storages) == num_bytes


@needs_pages
def test_pages_of_a_request_are_made_a_tensor_when_they_change() -> None:
    _, _, _, _, (allocator, _) = ours_and_theirs()
    allocator.block_table["a"] = [7, 8]
    first = allocator.pages_of("a")
    assert first.tolist() == [7, 8] and first.dtype == torch.int32 and allocator.pages_of("a") is first
    allocator.block_table["a"][1] = 5  # as transformers does when two requests turn out to hold the same tokens
    assert allocator.pages_of("a").tolist() == [7, 5] and first.tolist() == [7, 8]
    allocator.block_table["a"].append(9)
    table = torch.full((4,), -1, dtype=torch.int32)
    allocator.fill_block_table("a", 0, 0, table)
    assert table.tolist() == [7, 5, 9, -1]
    allocator.block_table["a"].clear()
    assert allocator.pages_of("a").tolist() == []
    allocator.free_blocks("a")
    assert allocator._pages == {}
    with pytest.raises(KeyError):
        allocator.pages_of("a")


@needs_pages
def test_memory_holds_as_many_more_tokens_as_they_are_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a token that is held is gathered, so its bytes are those of the cache."""
    from hf_kvquant.batching import memory
    from hf_kvquant.batching import paged_cache as ours

    monkeypatch.setattr(memory, "free_memory", lambda: 1 << 28)
    monkeypatch.setattr(ours.PagedCache, "_sectors_of", lambda self, count, num_tokens: 1 << 28)  # all of it is of use
    held = {}
    for preset in ("int4-token", "none"):
        with patched(models.llama(), preset) as model:
            manager = model.init_continuous_batching(
                continuous_batching_config=ContinuousBatchingConfig(max_batch_tokens=64, max_requests_per_batch=4)
            )
            cache = manager._create_batch_processor().cache
            manager.destroy()
        held[preset] = cache.num_blocks * cache.bytes_per_sector
    assert held["int4-token"] == pytest.approx(0.3 * (1 << 28), rel=0.05)
    assert held["none"] == pytest.approx(0.3 * (1 << 28), rel=0.05)


@needs_pages
def test_a_cache_that_does_not_fit_is_refused() -> None:
    with patched(models.llama(), "int8") as model:
        manager = model.init_continuous_batching(
            continuous_batching_config=ContinuousBatchingConfig(max_batch_tokens=64, num_blocks=1 << 40)
        )
        with pytest.raises(MemoryError):
            manager.warmup()
        manager.destroy()


# --- transformers' classes --------------------------------------------------------------------------------------------


def ours_and_theirs() -> list[tuple[Any, Any]]:
    """Of each class that we derive from, our object and theirs."""
    settings = ContinuousBatchingConfig(page_size=128, num_blocks=4, max_batch_tokens=64)
    managers, processors = [], []
    with patched(models.llama(), models.INT8_CODES) as model:  # dense tokens take a slot beside pages
        managers.append(model.init_continuous_batching(continuous_batching_config=settings))
        processors.append(managers[0]._create_batch_processor())
        managers[0].destroy()
    managers.append(models.llama().init_continuous_batching(continuous_batching_config=settings))
    processors.append(managers[1]._create_batch_processor())
    runners = [processor.model_runner for processor in processors]
    caches = [processor.cache for processor in processors]
    allocators = [cache.cache_allocators["full_attention"] for cache in caches]
    pairs: list[Any] = [managers, processors, runners, caches, allocators]
    return [(ours, theirs) for ours, theirs in pairs]


@needs_pages
def test_our_objects_have_every_attribute_of_theirs() -> None:
    """A new version of transformers fails here, and not where a user meets it."""
    # Views of dense keys and values, which only methods that we refuse read.
    left_out = {"_kv_token_views", "_kv_page_views"}
    for ours, other in ours_and_theirs():
        assert vars(other).keys() - left_out <= vars(ours).keys(), type(ours)


@needs_pages
def test_what_we_override_is_there_with_the_same_parameters() -> None:
    """All methods of ours are theirs, too, but for those that are named here."""
    own = {
        "Manager": {"_restore_attention", "_leave_model"},
        "Processor": {"_add_if_it_fits", "_taken_with_logprobs", "_end_outgrown", "_wait_for_device", "look_at_model"}
        | {"room", "_limit", "_begin_again"}
        | {"_offload_without_those_in_flight", "_offload_or_drop_snapshots", "_schedule_to_border"},
        "Runner": {"_states", "_choosing", "_graph_to_follow", "max_requests", "forget_graphs", "grammars"}
        | {"_decode_group", "_request_of", "_sequences_of", "_prepare_rope"},
        "PagedCache": {"room", "allocator", "planned", "get_seq_length", "forget_pages", "_sectors_of"}
        | {"pages_of_a_state", "most_requests", "_blocks_to_take_over", "sectors_for", "_shares"},
        "SlotAllocator": {"slot_of"},
        "StateAllocator": {"take", "copy_slot", "read_trash_slot", "write_trash_slot"},
        "TailAllocator": {"take_over", "_give_sinks"},
        "PageAllocator": {"page_table_of", "pages_of", "row_of", "num_complete", "num_marked", "_sinks"}
        | {"forget_pages", "hash_at", "keep_apart", "is_apart", "told_apart"},
        "PageMemory": {"_is_cpu", "_sectors_of"},
    }
    from hf_kvquant.batching.memory import PageMemory
    from hf_kvquant.batching.slots import SlotAllocator
    from hf_kvquant.batching.states import StateAllocator
    from hf_kvquant.batching.tails import TailAllocator

    pairs = [(type(ours), type(other)) for ours, other in ours_and_theirs()]
    slots = [(each, theirs.FullAttentionCacheAllocator) for each in (SlotAllocator, StateAllocator, TailAllocator)]
    for ours, other in [*pairs, (PageMemory, theirs.PagedAttentionMemoryHandler), *slots]:
        for name in vars(ours).keys() - own[ours.__name__]:
            if name.startswith("__"):
                continue
            mine, original = (inspect.getattr_static(each, name) for each in (ours, other))
            if callable(original) and "**" not in str(inspect.signature(mine)):
                assert list(inspect.signature(mine).parameters) == list(inspect.signature(original).parameters), name
    assert {"num_attention_masks", "kv_heads_at_peak", "io_multiplier", "num_groups"} <= set(
        re.findall(r"self\.(\w+)", inspect.getsource(theirs.PagedAttentionMemoryHandler))
    )


@needs_pages
def test_what_our_manager_does_like_theirs_is_still_like_theirs() -> None:
    """`_create_batch_processor` is written anew, so what it passes is what theirs passes."""
    source = inspect.getsource(continuous_api.ContinuousBatchingManager._create_batch_processor)
    passed = set(re.findall(r"^ {12}(\w+)=", source, re.MULTILINE))
    assert passed == {
        "config", "continuous_batching_config", "device", "distributed_helper", "dtype",
        "model_supports_logits_to_keep", "cb_config", "num_blocks", "max_batch_tokens", "cache", "safety_margin",
        "max_requests_per_batch", "generation_config", "logit_processor", "input_queue", "cancel_queue",
        "output_router", "background_thread_status", "model_device", "model_dtype", "scheduler",
    }  # fmt: skip


@needs_pages
def test_pages_have_the_shapes_that_the_model_makes() -> None:
    with patched(models.family("gpt_bigcode"), "int8") as model:  # one key-value head, which its config does not say
        manager = model.init_continuous_batching(continuous_batching_config=ContinuousBatchingConfig())
        manager.destroy()
    pages = [layer.page for layer in manager._layers.values()]
    assert [(page.num_kv_heads, page.head_dims) for page in pages] == [(1, (32, 32))] * 2
