"""Shared prefixes of models with states: who takes over pages takes over the states at their end, too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import models
import pytest
import torch
from waiting import next_result, until

from hf_kvquant import patched
from hf_kvquant.upstream.releases import HAS_STATES

if not HAS_STATES:
    pytest.skip("states need transformers 5.24", allow_module_level=True)

from test_batching import (
    K4V2,
    PAGE,
    alone,
    answers,
    check_all_is_free,
    check_nothing_leaks,
    counted_prompts,
    each_alone,
    generation,
    load,
    managed,
    settings,
    text,
)
from test_batching_states import KINDS, large, long, on_a_gpu, scarce
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus

from hf_kvquant.batching.snapshots import SHARE

PREFIX = text(2 * PAGE)
TYPES = [*KINDS, "qwen3_5_text", "granitemoehybrid"]
ROOMY = {"num_blocks": 24, "max_batch_tokens": 512}
few_of_each = pytest.mark.full(
    when=lambda name, preset: preset != "int8" and name not in ("qwen3_next", "qwen3_5_text", "zamba2"),
    reason="a snapshot holds states, which are the same whatever keys are stored as",
)


def with_tails(count: int, prefix: list[int] = PREFIX) -> list[list[int]]:
    """Prompts that begin alike."""
    return [[*prefix, *text(3 + seed, seed + 1)] for seed in range(count)]


@contextlib.contextmanager
def chunks(manager: Any) -> Iterator[list[int]]:
    """How many tokens each chunk of a prompt has, in a list."""
    found: list[int] = []
    scheduler = manager.batch_processor.scheduler
    schedule = scheduler.schedule_batch

    def noted(*args: Any) -> Any:
        scheduled = schedule(*args)
        found.extend(each.query_length for each in scheduled[0] or () if each.query_length > 1)
        return scheduled

    scheduler.schedule_batch = noted
    yield found


# --- what is shared ---------------------------------------------------------------------------------------------------


@few_of_each
@pytest.mark.parametrize("preset", ["int8", "none", K4V2], ids=str)
@pytest.mark.parametrize("name", TYPES)
def test_the_third_prompt_with_a_prefix_begins_with_its_states(name: str, preset: Any) -> None:
    """The second one ends a step at the border. Its pages are read as codes, like those of a chunk in `generate`."""
    page = PAGE if isinstance(preset, str) else 256
    prefix = text(page)
    prompts = [[*prefix, *text(20, seed=1)], *with_tails(3, prefix)]
    with patched(long(name), preset) as model:
        expected = [alone(model, prompts[0])]
        expected += [alone(model, prompt, prefill_chunk_size=page) for prompt in prompts[1:]]
        with managed(model, page_size=page, **ROOMY) as manager, counted_prompts(manager) as counts:
            with chunks(manager) as steps:
                answered = [answers(manager, [prompt])[0] for prompt in prompts]
            cache = manager.batch_processor.cache
            assert cache.snapshots.num_hits == 2 and len(cache.snapshots) == 1
            assert counts == [page + 20, page + 3, 4, 5]
            assert steps == [page + 20, page, 3, 4, 5]
            check_all_is_free(cache)
            assert len(cache.snapshots) == 0
        assert answered == expected


@pytest.mark.full(
    when=lambda name, is_shared: not is_shared and name not in ("qwen3_next", "zamba2"),
    reason="batches of distinct prompts, which share nothing either, are those of test_batching_states.py",
)
@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("name", TYPES)
def test_prompts_that_begin_alike_in_any_company(name: str, is_shared: bool) -> None:
    """With keys as they are, neither prefixes nor chunks show."""
    others = [text(40, seed) for seed in range(3)]
    prompts = [*with_tails(5), *others, *with_tails(3, PREFIX[:PAGE]), *with_tails(2, [*PREFIX, *text(PAGE, 9)])]
    with patched(long(name), "none") as model:
        expected = each_alone(model, prompts)
        with managed(model, num_blocks=48, max_batch_tokens=300, allow_block_sharing=is_shared) as manager:
            assert answers(manager, prompts) == expected
            assert answers(manager, prompts[::-1]) == expected[::-1]
            cache = manager.batch_processor.cache
            assert (cache.snapshots is not None) == is_shared
            if is_shared:
                assert cache.snapshots.num_hits > len(prompts)
            check_all_is_free(cache)


@few_of_each
@pytest.mark.parametrize("preset", ["int8", "none", K4V2], ids=str)
@pytest.mark.parametrize("name", ["qwen3_5_text", "lfm2", "granitemoehybrid"])
def test_a_prompt_of_several_steps_is_kept_at_its_last_border(name: str, preset: Any) -> None:
    page = PAGE if isinstance(preset, str) else 256
    prompt = text(3 * page + 40)
    with patched(long(name), preset) as model:
        with managed(model, page_size=page, num_blocks=24, max_batch_tokens=2 * page) as manager:
            with counted_prompts(manager) as counts, chunks(manager) as steps:
                answered = [answers(manager, [each])[0] for each in (prompt, [*prompt, 7, 8])]
            assert steps == [2 * page, page, 40, 42] and counts == [3 * page + 40, 42]
            assert manager.batch_processor.cache.snapshots.num_hits == 1
        if preset == "none":
            assert answered == [alone(model, each) for each in (prompt, [*prompt, 7, 8])]


def test_prompts_that_differ_are_cut_nowhere() -> None:
    prompts = [text(2 * PAGE + 20, seed) for seed in range(3)]
    with patched(long("lfm2"), "int8") as model, managed(model, num_blocks=24, max_batch_tokens=400) as manager:
        with chunks(manager) as steps:
            for prompt in prompts:
                answers(manager, [prompt])
        assert steps == [2 * PAGE + 20] * 3
        assert len(manager.batch_processor.cache.snapshots) == 0


# --- what snapshots take ----------------------------------------------------------------------------------------------


def test_the_least_recently_used_one_goes_first() -> None:
    prefixes = [text(PAGE, seed) for seed in range(3)]
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(patched(long("qwen3_next"), "int8"))
        manager = stack.enter_context(managed(model, num_blocks=64, max_batch_tokens=512))
        cache = manager.batch_processor.cache
        cache.snapshots.most = 2

        def ask(prefix: list[int], seed: int) -> bool:
            """Whether it begins with known states."""
            before = cache.snapshots.num_hits
            answers(manager, [[*prefix, *text(5, seed)]])
            return bool(cache.snapshots.num_hits > before)

        for prefix in prefixes[:2]:
            assert [ask(prefix, seed) for seed in range(3)] == [False, False, True]
        assert ask(prefixes[0], 4)  # now the other one is the older one
        assert not ask(prefixes[2], 0) and not ask(prefixes[2], 1)
        assert len(cache.snapshots) == 2
        assert ask(prefixes[0], 5) and not ask(prefixes[1], 5) and not ask(prefixes[2], 5)
        check_all_is_free(cache)


def test_snapshots_take_a_share_of_memory() -> None:
    with patched(long("qwen3_next"), "int8") as model, managed(model, num_blocks=64) as manager:
        cache = manager.batch_processor.cache
        assert cache.snapshots.most == int(SHARE * cache.states.num_blocks) > 1


@pytest.mark.parametrize("preset", ["int8", K4V2], ids=str)
def test_slots_come_back(preset: Any) -> None:
    """After many requests, some of them cancelled on their way to a border."""
    page = PAGE if isinstance(preset, str) else 256
    prefix = text(page)
    with patched(long("qwen3_next"), preset) as model:
        with managed(model, 3, page_size=page, num_blocks=24, max_batch_tokens=100) as manager:
            cache = manager.batch_processor.cache
            for start in range(0, 60, 20):
                answers(manager, [[*prefix[: 9 * seed], *text(9, seed)] for seed in range(start, start + 20)])
            prompts = with_tails(30, prefix)
            names = [manager.add_request(each, max_new_tokens=500, streaming=True) for each in prompts]
            next_result(manager, names[0])
            for name in names:
                manager.cancel_request(name)
            until(lambda: not manager.batch_processor.has_pending_requests(), manager.is_running)
            assert cache.states.block_table == {} == cache.allocator.block_table
            assert not cache.snapshots._made and not cache.snapshots._borders
            check_all_is_free(cache)


def test_what_nobody_can_find_ends_with_its_request() -> None:
    """A request is cancelled when its states have been copied, and its page is not known to others yet."""
    with patched(long("qwen3_next"), "int8") as model, managed(model, num_blocks=64) as manager:
        cache = manager.batch_processor.cache
        state = RequestState(request_id="a", initial_tokens=text(PAGE + 5), max_new_tokens=5)
        cache.snapshots.wish("a", {PAGE: None})
        assert cache.can_store_request_tokens(state, PAGE + 5)
        cache.snapshots.take("a", PAGE)
        assert len(cache.snapshots) == 1
        cache.free_blocks("a")
        assert len(cache.snapshots) == 0
        check_all_is_free(cache)


def test_memory_of_snapshots_is_there_for_requests() -> None:
    """A request may fill all pages, also when several prompts have begun like it."""
    prefix = text(PAGE)
    with patched(large(), "none") as model:
        with managed(model, num_blocks=16, max_batch_tokens=2048) as manager:
            cache = manager.batch_processor.cache
            snapshots = cache.snapshots
            answers(manager, [[*prefix, 7]])
            clear, freed = snapshots.clear, []

            def noted() -> bool:
                freed.append(len(snapshots))
                return bool(clear())

            snapshots.clear = noted
            prompt = [*prefix, *text(cache.room - PAGE - 10, seed=5)]
            answered = answers(manager, [[*prefix, 8]]) + answers(manager, [prompt])
            assert freed == [1] and snapshots.num_hits == 1
            check_all_is_free(cache)
        assert answered == [alone(model, each) for each in ([*prefix, 8], prompt)]


def test_snapshots_that_one_prompt_has_use_of_give_way_first() -> None:
    """Those of several prompts stay as long as their pages are in use."""
    with patched(long("qwen3_next"), "int8") as model, managed(model, num_blocks=64) as manager:
        cache = manager.batch_processor.cache
        page_of = {}
        for name, shared in (("own", None), ("shared", 1), ("ended", 2)):
            prompt = text(PAGE + 5, len(name))
            state = RequestState(request_id=name, initial_tokens=prompt, max_new_tokens=5)
            assert cache.search_prefix_match(name, prompt) == 0
            cache.snapshots.wish(name, {PAGE: shared})
            assert cache.can_store_request_tokens(state, len(prompt))
            assert cache.snapshots.next_border(name, 0) == PAGE
            state.position_offset = PAGE
            cache.snapshots.take(name, PAGE)
            assert cache.snapshots.next_border(name, 0) is None
            cache.mark_complete_blocks(state, {"full_attention": 1})
            page_of[name] = cache.allocator.hash_at(name, PAGE)
        cache.free_blocks("ended")
        assert list(cache.snapshots._kept) == list(page_of.values())
        assert cache.evict_cached_blocks()
        assert list(cache.snapshots._kept) == [page_of["shared"]]
        assert not cache.evict_cached_blocks()
        cache.free_blocks("shared", no_cache=True)  # its page goes, and the snapshot with it
        assert len(cache.snapshots) == 0
        cache.free_all_requests()
        check_all_is_free(cache)


def test_the_last_border_is_one_whose_pages_have_codes() -> None:
    """A later prompt would not find the page that the dense window is still in."""
    page, config = 1152, {"preset": "int4-channel", "residual_length": 28}
    with patched(long("lfm2"), config) as model, managed(model, page_size=page) as manager:
        cache = manager.batch_processor.cache
        borders = []
        for num_tokens in (1179, 1180, 2 * page + 27, 2 * page + 28):
            assert cache.search_prefix_match("a", text(num_tokens)) == 0
            borders.append(cache.snapshots.next_border("a", 0))
        assert borders == [None, page, page, 2 * page]


def test_without_memory_there_is_no_snapshot() -> None:
    with patched(long("qwen3_next"), "int8") as model, managed(model, num_blocks=64) as manager:
        cache = manager.batch_processor.cache
        state = RequestState(request_id="a", initial_tokens=text(PAGE + 5), max_new_tokens=5)
        assert cache.can_store_request_tokens(state, PAGE + 5)
        cache.snapshots.wish("a", {PAGE: 1})
        held = []
        while (slot := cache.states.take()) is not None:
            held.append(slot)
        cache.snapshots.take("a", PAGE)
        assert len(cache.snapshots) == 0
        assert cache.search_prefix_match("b", text(PAGE + 5)) == 0
        cache.pool.free_blocks(cache.states.index, held)
        cache.free_all_requests()
        check_all_is_free(cache)


@pytest.mark.parametrize("cpu_offload_space", [0.0, 0.01])
@pytest.mark.parametrize("name", KINDS)
def test_requests_that_starve(monkeypatch: pytest.MonkeyPatch, name: str, cpu_offload_space: float) -> None:
    """They begin again, perhaps with the states of the prefix, or come back from CPU memory to other slots."""
    empty = torch.empty
    # Pinned memory needs a GPU.
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **options: empty(*args, **options))
    prompts = [[*text(PAGE), *text(PAGE - 4 - i, seed=i + 1)] for i in range(6)]
    with patched(long(name), "none") as model:
        expected = each_alone(model, prompts, 12)
        options = {"num_blocks": scarce(model) + 2, "max_batch_tokens": 512, "cpu_offload_space": cpu_offload_space}
        with managed(model, 12, **options) as manager:
            processor, given_way, restored = manager.batch_processor, [], set()
            offload = processor.offloading_manager._offload_to_cpu

            def noted(victims: list[RequestState], tables: Any) -> set[str]:
                found: set[str] = offload(victims, tables)
                given_way.extend(victims)
                restored.update(found)
                return found

            processor.offloading_manager._offload_to_cpu = noted
            assert answers(manager, prompts) == expected
            assert answers(manager, prompts) == expected
            assert given_way and bool(restored) == (cpu_offload_space > 0)
            assert processor.cache.snapshots.num_hits
            check_all_is_free(processor.cache)


@pytest.mark.parametrize("name", KINDS)
def test_forks_of_a_prompt_that_begins_with_known_states(name: str) -> None:
    """... and perhaps has one more token, which children compute."""
    prompts = [*with_tails(8), [*PREFIX, 7]]
    with patched(long(name), "none") as model:
        outputs = model.generate_batch(
            prompts,
            generation(8, num_return_sequences=2, do_sample=True, top_k=1),
            settings(max_batch_tokens=300, num_blocks=32),
            persistent_manager=True,
        )
        assert model._cached_continuous_batching_manager.batch_processor.cache.snapshots.num_hits
        check_nothing_leaks(model)
        answered = [output.generated_tokens for output in outputs.values()]
        assert answered == [each for prompt in prompts for each in [alone(model, prompt, 8)] * 2]


def test_states_of_other_weights_are_forgotten() -> None:
    prompts = with_tails(6)
    with patched(long("qwen3_next"), "none") as model, managed(model, 4, **ROOMY) as manager:
        before = [answers(manager, [prompt])[0] for prompt in prompts[:3]]
        snapshots = manager.batch_processor.cache.snapshots
        assert snapshots.num_hits == 1
        with manager.pause():
            load(model)
        after = [answers(manager, [prompt])[0] for prompt in prompts[:3]]
        assert snapshots.num_hits == 2
        manager.stop(keep_for_next_session=True)
        check_all_is_free(manager.batch_processor.cache)
        assert after == [alone(model, prompt, 4) for prompt in prompts[:3]] and before != after


# --- steps that overlap -----------------------------------------------------------------------------------------------


def test_states_are_copied_before_the_next_step_is_known_to_be_over() -> None:
    """In asynchronous batching, a chunk is reported when the next one is under way and moves the states on."""
    prompt = text(3 * PAGE + 5)
    with patched(long("qwen3_next"), "int8") as model, managed(model, max_batch_tokens=2 * PAGE) as manager:
        processor = manager.batch_processor
        cache, scheduler, snapshots = processor.cache, processor.scheduler, processor.cache.snapshots
        state = RequestState(request_id="a", initial_tokens=list(prompt), max_new_tokens=5)
        scheduler.add_waiting_request(state)
        steps = []
        for mark in range(1, 4):
            (step,), *_ = scheduler.schedule_batch(2 * PAGE, 1)
            state.position_offset += step.query_length
            cache.states._copy_view[cache.states.slot_of("a")] = mark
            snapshots.take("a", state.position_offset)
            steps.append(step)
        assert [step.query_length for step in steps] == [2 * PAGE, PAGE, 5]
        assert state.status == RequestStatus.DECODING and len(snapshots) == 1
        cache.mark_complete_blocks(state, steps[0].complete_blocks)
        assert not snapshots._kept  # its page is not known yet
        state.update_and_check_completion(7, None)
        cache.mark_complete_blocks(state, steps[2].complete_blocks)
        assert len(snapshots._kept) == 1 and not snapshots._made
        scheduler.finish_request("a")
        assert cache.search_prefix_match("b", prompt) == 3 * PAGE
        assert bool((cache.states._copy_view[cache.states.slot_of("b")] == 2).all())
        cache.free_all_requests()
        check_all_is_free(cache)


def test_one_of_several_prompts_goes_to_a_border() -> None:
    """The others that come with it are cut nowhere."""
    with patched(long("qwen3_next"), "none") as model:
        expected = each_alone(model, with_tails(4))
        with managed(model, num_blocks=48, max_batch_tokens=1200) as manager, chunks(manager) as steps:
            cache = manager.batch_processor.cache
            answers(manager, [[*PREFIX, 7]])
            assert answers(manager, with_tails(4)) == expected
            assert len(cache.snapshots) == 1 and len(steps) == 1 + 5
            check_all_is_free(cache)


def test_two_requests_that_make_the_same_snapshot_keep_one() -> None:
    """Who comes first to a border does not know yet that another will have it."""
    with patched(long("qwen3_next"), "int8") as model, managed(model, num_blocks=64) as manager:
        cache, prompt = manager.batch_processor.cache, text(PAGE + 5)
        states = [RequestState(request_id=name, initial_tokens=prompt, max_new_tokens=5) for name in "ab"]
        for state in states:
            cache.snapshots.wish(state.request_id, {PAGE: None})
            assert cache.can_store_request_tokens(state, len(prompt))
            state.position_offset = PAGE
            cache.snapshots.take(state.request_id, PAGE)
        assert len(cache.snapshots) == 2
        for state in states:
            cache.mark_complete_blocks(state, {"full_attention": 1})
        assert len(cache.snapshots) == 1
        ((page_hash, snapshot),) = cache.snapshots._kept.items()
        assert snapshot.shared == page_hash
        cache.free_all_requests()
        check_all_is_free(cache)


@on_a_gpu
@pytest.mark.parametrize("options", [{}, {"use_async_batching": False}, {"use_cuda_graph": False}], ids=str)
@pytest.mark.parametrize("name", ["qwen3_5_text", "lfm2", "bamba"])
def test_captured_and_asynchronous_steps(name: str, options: Any) -> None:
    model = models.on("cuda", long(name))
    prompts = [*with_tails(8), text(70, seed=1)]
    with patched(model, "none"):
        expected = [alone(model, prompt, 12) for prompt in prompts]
        with managed(model, 12, num_blocks=48, max_batch_tokens=512, **options) as manager:
            assert [answers(manager, prompts) for _ in range(2)] == [expected] * 2
            # All that share a prefix find it the second time. The first time, a step that is prepared while the one
            # before it runs does not know what that one leaves.
            is_async = options.get("use_async_batching", options.get("use_cuda_graph", True))
            assert manager.batch_processor.cache.snapshots.num_hits >= len(prompts) - is_async
