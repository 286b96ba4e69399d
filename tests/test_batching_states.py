"""Continuous batching of models with states: slots beside pages, and each request as `generate` alone gives it."""

from __future__ import annotations

import functools
import re
import types
from typing import Any

import models
import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from waiting import next_result, until

from hf_kvquant import patched
from hf_kvquant.batching import support
from hf_kvquant.upstream.releases import CACHE, HAS_STATES

if not HAS_STATES:
    pytest.skip("states need transformers 5.24", allow_module_level=True)

from test_batching import (
    K4V2,
    PAGE,
    PROMPTS,
    Steps,
    alone,
    answers,
    batched,
    check_as_generate,
    check_nothing_leaks,
    each_alone,
    generation,
    managed,
    settings,
    text,
    with_tables,
)
from transformers.generation.continuous_batching.cache import ATTN_TYPE_TO_ALLOCATOR

from hf_kvquant.batching.batch import Group, Request, groups_of
from hf_kvquant.batching.forwards import Wrapper, unwrap
from hf_kvquant.batching.memory import PageMemory
from hf_kvquant.batching.paged_cache import PagedCache
from hf_kvquant.batching.runner import Runner
from hf_kvquant.batching.slots import add_lengths
from hf_kvquant.batching.state_layers import StateLayers, StateProbe, forward_of_state, why_not_grouped
from hf_kvquant.batching.states import STATES, GroupLayer, StateLayout, StatePart
from hf_kvquant.batching.tails import TAILS

# A gated delta rule, a convolution alone, Mamba-2, and states beside keys in one layer, with modules that layers share.
KINDS = ["qwen3_next", "lfm2", "bamba", "zamba2"]
# Codes alone: the only slots are those of states.
INT8 = models.INT8_CODES


@models.shared
def long(name: str) -> Any:
    """A family with room for several pages."""
    return models.build(
        models.FAMILIES[name].model_type, **{**models.FAMILIES[name].options, "max_position_embeddings": 1024}
    )


@models.shared
def large() -> Any:
    """A model whose states take more memory than a page of all layers."""
    options = {"linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
    return models.build("qwen3_5_text", **{**models.FAMILIES["qwen3_5_text"].options, **options})


def scarce(model: Any) -> int:
    """Blocks that four requests of a page each have room in, with too few left when they need the next page."""
    with managed(model, num_blocks=32) as manager:
        cache = manager.batch_processor.cache
        pages = cache.allocator.blocks_per_sector
        num_sectors = sum(-(-4 // each.blocks_per_sector) for each in cache.slots) - (-5 // pages)
        return int(num_sectors * pages)


# --- equal to generate ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", models.WITH_STATES)
def test_each_request_gets_what_generate_gives_it(name: str) -> None:
    check_as_generate(name)


@pytest.mark.parametrize("preset", ["int4-token", "int4-channel", K4V2, "none"], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_presets(name: str, preset: Any) -> None:
    with patched(models.family(name), preset) as model:
        assert batched(model, PROMPTS, num_blocks=32) == each_alone(model, PROMPTS)


@pytest.mark.parametrize("scheduler", ["fifo", "prefill_first"])
@pytest.mark.parametrize("name", KINDS)
def test_chunks_of_prompts_ride_with_decode_steps(name: str, scheduler: str) -> None:
    """Seven tokens a step, cut anywhere: with keys as they are, that shows in nothing."""
    prompts = [text(3 + 5 * seed, seed) for seed in range(8)]
    with patched(models.family(name), "none") as model:
        assert batched(model, prompts, max_batch_tokens=7, scheduler_type=scheduler) == each_alone(model, prompts)


@pytest.mark.parametrize("name", KINDS)
def test_requests_that_starve_start_again(name: str) -> None:
    prompts = [text(PAGE - 4 - i, seed=i) for i in range(4)]
    with patched(long(name), "none") as model:
        expected = each_alone(model, prompts, 12)
        assert batched(model, prompts, 12, num_blocks=scarce(model), max_batch_tokens=512) == expected
        # Too few for two requests at once.
        assert batched(model, prompts[:2], 12, num_blocks=4, max_batch_tokens=512) == expected[:2]


@pytest.mark.parametrize("preset", ["int4-token", K4V2], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_requests_that_starve_take_their_states_along(monkeypatch: pytest.MonkeyPatch, name: str, preset: Any) -> None:
    """They wait in CPU memory, and come back to other slots."""
    empty = torch.empty
    # Pinned memory needs a GPU.
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **options: empty(*args, **options))
    prompts = [text(PAGE - 4 - i, seed=i) for i in range(4)]
    with patched(long(name), preset) as model:
        expected = [alone(model, prompt, 12) for prompt in prompts]
        with managed(model, 12, num_blocks=scarce(model), max_batch_tokens=512, cpu_offload_space=0.01) as manager:
            processor, restored = manager.batch_processor, []
            offload = processor._offload

            def noted(victims: Any, tables: Any) -> set[str]:
                found: set[str] = offload(victims, tables)
                restored.extend(found)
                # Whoever comes next finds something else in their slots.
                cache = processor.cache
                for victim in victims:
                    for slots in cache.slots:
                        slots._copy_view[tables[victim.request_id][slots.layer_type]] = 255
                return found

            processor._offload = noted
            assert answers(manager, prompts) == expected
            assert restored


@pytest.mark.parametrize("name", KINDS)
def test_forks_have_states_of_their_own(name: str) -> None:
    """A prompt of one token has no state yet when it is forked."""
    prompts = [text(PAGE + 40), [9, 6, 7], [8]]
    with patched(long(name), "int4-token") as model:
        outputs = model.generate_batch(
            prompts,
            generation(8, num_return_sequences=3, do_sample=True, top_k=1),
            settings(max_batch_tokens=512, num_blocks=24),
            persistent_manager=True,
        )
        check_nothing_leaks(model)
        answered = [output.generated_tokens for output in outputs.values()]
        for at, prompt in enumerate(prompts):
            chunks = {"prefill_chunk_size": len(prompt) - 1} if len(prompt) > 1 else {}
            assert answered[3 * at : 3 * at + 3] == [alone(model, prompt, 8, **chunks)] * 3


def test_a_prompt_of_one_token_is_forked_alone() -> None:
    """transformers makes a step without a token of it first, in models without states, too."""
    with patched(models.llama(), "int8") as model:
        options = generation(8, num_return_sequences=2, do_sample=True, top_k=1)
        outputs = model.generate_batch([[9]], options, settings(), persistent_manager=True)
        assert [output.generated_tokens for output in outputs.values()] == [alone(model, [9], 8)] * 2
        check_nothing_leaks(model)


def test_forks_that_find_no_slot_start_from_the_prompt() -> None:
    prompt = text(40)
    with patched(large(), "none") as model:
        with managed(model, 8, num_blocks=8) as manager:
            most = manager.batch_processor.cache.most_requests
        outputs = model.generate_batch(
            [prompt],
            generation(8, num_return_sequences=most + 2, do_sample=True, top_k=1),
            settings(num_blocks=8),
            persistent_manager=True,
        )
        check_nothing_leaks(model)
        assert [each.generated_tokens for each in outputs.values()] == [alone(model, prompt, 8)] * (most + 2)


def test_what_others_left_in_memory_does_not_show() -> None:
    """Slots become pages, and pages slots. Sector 0 is what padding reads."""
    for name in KINDS:
        for preset in ("int8", "fp8", "int4-channel"):
            with patched(models.family(name), preset) as model:
                expected = each_alone(model, PROMPTS)
                with managed(model, num_blocks=32) as manager:
                    cache = manager.batch_processor.cache
                    cache.cache_tensor[cache.bytes_per_sector :].fill_(255)
                    assert answers(manager, PROMPTS) == expected, (name, preset)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_the_text_of_vision_models(name: str) -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(1)
    family = models.FAMILIES[f"{name}_text"]
    sizes = {**models.COMMON, **family.options, "rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2]}}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 128}
    config = AutoConfig.for_model(name, text_config=sizes, vision_config=vision)
    model = models.randomized(AutoModelForImageTextToText.from_config(config)).eval()
    with patched(model, "int8"):
        expected = [alone(model, prompt) for prompt in PROMPTS]
        with managed(model) as manager:
            assert answers(manager, PROMPTS) == expected


# --- on a GPU ---------------------------------------------------------------------------------------------------------

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="captures CUDA graphs")


@on_a_gpu
@pytest.mark.parametrize("options", [{}, {"use_async_batching": False}, {"use_cuda_graph": False}], ids=str)
@pytest.mark.parametrize("name", ["qwen3_5_text", "olmo_hybrid", "lfm2", "bamba", "falcon_h1", "zamba2"])
def test_captured_and_asynchronous_steps(name: str, options: Any) -> None:
    """Requests come and go, so captured steps find other slots in the same table."""
    model = models.on("cuda", long(name))
    prompts = [*PROMPTS, text(PAGE - 4), text(70, seed=1)]
    with patched(model, "int8"):
        expected = [alone(model, prompt, 12) for prompt in prompts]
        with managed(model, 12, num_blocks=24, max_batch_tokens=256, **options) as manager:
            assert [answers(manager, prompts) for _ in range(2)] == [expected] * 2


@on_a_gpu
@pytest.mark.parametrize("use_async_batching", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_requests_that_starve_on_a_gpu(name: str, use_async_batching: bool) -> None:
    """Those that a step moves on begin again, so keys are as they are: they attend to each other as a prompt does."""
    model = models.on("cuda", long(name))
    prompts = [text(PAGE - 4 - i, seed=i) for i in range(4)]
    with patched(model, "none"):
        expected = [alone(model, prompt, 60) for prompt in prompts]
        options = {"cpu_offload_space": 0.01, "use_async_batching": use_async_batching}
        with managed(model, 60, num_blocks=scarce(model), max_batch_tokens=1024, **options) as manager:
            assert answers(manager, prompts) == expected


@on_a_gpu
def test_forks_on_a_gpu() -> None:
    """The first step of a manager is launched before the requests of the step before it are forked."""
    model = models.on("cuda", long("qwen3_5_text"))
    with patched(model, "none"):
        expected = [alone(model, prompt, 8) for prompt in (text(40), [8])]
        options = generation(8, num_return_sequences=3, do_sample=True, top_k=1)
        outputs = model.generate_batch([text(40), [8]], options, settings(num_blocks=24))
        answered = [output.generated_tokens for output in outputs.values()]
        assert answered == [each for each in expected for _ in range(3)]


# --- slots ------------------------------------------------------------------------------------------------------------


def test_slots_come_back() -> None:
    """After many requests, some cancelled while they run, and some that wait."""
    with patched(models.family("qwen3_next"), "int8") as model, managed(model, 4, num_blocks=12) as manager:
        cache = manager.batch_processor.cache
        for start in range(0, 60, 20):
            answers(manager, [text(1 + seed % 9, seed) for seed in range(start, start + 20)])
        names = [manager.add_request(text(5, seed), max_new_tokens=10**6, streaming=True) for seed in range(40)]
        next_result(manager, names[0])
        assert 0 < len(cache.states.block_table) <= cache.most_requests
        for name in names:
            manager.cancel_request(name)
        until(lambda: not manager.batch_processor.has_pending_requests(), manager.is_running)
        assert cache.states.block_table == {} == cache.allocator.block_table
        cache.pool.try_to_free_sectors()
        assert cache.pool.num_free_sectors == cache.num_sectors


def test_states_that_take_more_than_a_page() -> None:
    """A sector is a slot, and several pages. Requests are as many as slots leave pages for."""
    with patched(large(), INT8) as model:
        expected = [alone(model, text(3 + seed, seed)) for seed in range(7)]
        check_large(model, expected)


def check_large(model: Any, expected: list[Any]) -> None:
    with managed(model, num_blocks=16) as manager:
        cache = manager.batch_processor.cache
        pages = cache.bytes_per_sector // cache.allocator.bytes_per_block
        assert pages == cache.pages_of_a_state == 5 and cache.states.blocks_per_sector == 1
        # Given memory is rounded up to sectors.
        assert (cache.num_sectors, cache.num_blocks, cache.room) == (4, 20, 15 * PAGE)
        assert cache.most_requests == 3
        seen, schedule = [], manager.batch_processor.scheduler.schedule_batch

        def noted(*args: Any) -> Any:
            found = schedule(*args)
            seen.append(len(cache.states.block_table))
            return found

        manager.batch_processor.scheduler.schedule_batch = noted
        assert answers(manager, [text(3 + seed, seed) for seed in range(7)]) == expected
        assert max(seen) == 3


def test_several_slots_in_a_sector() -> None:
    """They divide a block of pages, with as little between them as that allows."""
    assert StateLayout({0: (StatePart(False, 0, 0, (1000,), torch.float32),)}).num_bytes == 4096
    with patched(models.family("lfm2"), "int8") as model, managed(model) as manager:
        states = manager.batch_processor.cache.states
        assert states.blocks_per_sector > 1
        assert states.bytes_per_block * states.blocks_per_sector == manager.batch_processor.cache.bytes_per_sector
        assert (states.read_trash_slot, states.write_trash_slot) == (0, states.blocks_per_sector)


@pytest.mark.parametrize("page", [128, 256])
def test_states_and_tails(page: int) -> None:
    """A request has a slot of each kind, and a page table names that of its tail."""
    prompts = [*PROMPTS, text(150, seed=1), text(300, seed=2)]
    with patched(long("qwen3_5_text"), "int4") as model:
        expected = [alone(model, prompt) for prompt in prompts]
        with managed(model, page_size=page, num_blocks=64, max_batch_tokens=512) as manager:
            cache = manager.batch_processor.cache
            assert (cache.allocator.index, cache.tails.index, cache.states.index) == (0, 1, 2)
            assert answers(manager, prompts) == expected
            assert cache.tails.block_table == cache.states.block_table == cache.allocator.block_table == {}
            per_request = [each.bytes_per_block * each.blocks_per_sector for each in (cache.allocator, *cache.slots)]
            assert per_request == [cache.bytes_per_sector] * 3
            most = cache.most_requests
            assert cache._sectors_of(most, 1) <= cache.num_sectors < cache._sectors_of(most + 1, 1)
            assert cache.room == (cache.num_sectors - 2) * cache.tokens_per_sector


def test_decode_steps_read_slots_of_both_kinds() -> None:
    """As captured steps do."""
    with patched(models.family("qwen3_5_text"), "int4") as model:
        expected = [alone(model, prompt) for prompt in PROMPTS]
        with with_tables(model, num_blocks=2) as manager:
            steps = Steps(manager)
            assert answers(manager, PROMPTS) == expected
            assert steps.decode > 0
            table = torch.full((3, 2, 4), -1, dtype=torch.int32)
            table[0, 0, :3], table[1, 0, 0], table[2, 0, 0] = torch.tensor([6, 0, 9]), 6, 4
            group = manager.batch_processor.model_runner._decode_group(table, torch.tensor([4, 0]))
            assert group.page_table.tolist() == [[6, 0, 9, -1], [-1] * 4]
            assert group.read_slots.tolist() == [4, 0]


def test_memory_without_room_for_both_kinds_is_refused() -> None:
    message = "since the dense tokens and the states of a request take as much memory as [0-9]+ of them, got 1"
    with patched(large(), "int4") as model, pytest.raises(ValueError, match=message):
        model.init_continuous_batching(generation(4), settings(num_blocks=1))


def test_memory_for_the_states_of_a_step_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers take states out of their slots, and more for a token than attention."""
    monkeypatch.setattr(PageMemory, "get_available_memory", lambda self: 64 * 10**6)
    monkeypatch.setattr(PagedCache, "_sectors_of", lambda self, count, num_tokens: 10**6)  # all memory is of use
    found = []
    with patched(large(), "int8") as model:
        for most in (4, 24):
            with managed(model, num_blocks=None, max_requests_per_batch=most) as manager:
                cache = manager.batch_processor.cache
                found.append(cache.num_sectors * cache.bytes_per_sector)
                per_request = 3 * cache.states.layout.num_bytes_of_layer
    assert per_request == 3 * cache.states.layout.num_bytes > 2 * cache.bytes_per_sector
    assert abs(found[0] - found[1] - 20 * per_request) < 2 * cache.bytes_per_sector
    parts = {
        0: (StatePart(True, 0, 0, (100, 4), torch.float32), StatePart(False, 0, 0, (8, 16, 32), torch.float32)),
        1: (StatePart(True, 0, 0, (10, 4), torch.float32),),
    }
    assert StateLayout(parts).bytes_of_new_token == 4 * (3 * 100 + 8 * (4 * 48 + 3 * 64))


@pytest.mark.parametrize("name", KINDS)
def test_decode_steps_read_slots_of_transformers_tables(name: str) -> None:
    """As captured steps do."""
    with patched(models.family(name), INT8) as model:
        expected = [alone(model, prompt) for prompt in PROMPTS]
        with with_tables(model, num_blocks=2) as manager:
            steps = Steps(manager)
            assert answers(manager, PROMPTS) == expected
            assert steps.decode > 0
            table = torch.tensor([[[9], [8], [-1]], [[3], [5], [-1]]], dtype=torch.int32)
            group = manager.batch_processor.model_runner._decode_group(table, torch.tensor([4, 5, 0]))
            trash = manager.batch_processor.cache.states.blocks_per_sector
            assert group.read_slots.tolist() == [3, 5, 0] and group.write_slots.tolist() == [3, 5, trash]


def test_padding_reads_zeros_and_writes_trash() -> None:
    """A padded row of a captured step moves the state of no request on, nor that of the next padding."""
    with patched(models.family("qwen3_next"), INT8) as model, managed(model) as manager:
        cache = manager.batch_processor.cache
        runner = manager.batch_processor.model_runner
        ((part, plane), *_) = cache.states.planes[0]
        table = torch.tensor([[[4], [-1], [-1]], [[cache.states.blocks_per_sector * 2], [-1], [-1]]]).int()
        group = runner._decode_group(table, torch.tensor([4, 0, 0]))
        layer = GroupLayer(cache.states.planes[0], group)
        layer.conv_states[0] += 1
        layer.store()
        assert part.is_conv and not plane[0].any()
        assert plane[group.write_slots].all()
        plane[cache.states.blocks_per_sector :].zero_()


def test_tokens_of_padded_steps_stay_out() -> None:
    with patched(models.family("qwen3_next"), "int8") as model:
        expected = [alone(model, prompt) for prompt in PROMPTS]
        with managed(model, max_batch_tokens=300) as manager:
            manager.batch_processor.model_runner.use_cuda_graph_decode = True
            assert answers(manager, PROMPTS) == expected


def test_requests_without_a_new_token_are_in_no_group() -> None:
    pages = torch.zeros(1, dtype=torch.int32)
    requests = [Request(0, 2, pages, 7), Request(3, 0, pages, 8), Request(0, 2, pages, 9), Request(5, 1, pages, 4)]
    first, second = groups_of(requests, torch.device("cpu"))
    assert first.read_slots.tolist() == first.write_slots.tolist() == [7, 9] and not first.has_past
    assert second.read_slots.tolist() == [4] and second.has_past
    assert groups_of([Request(0, 2, pages)], torch.device("cpu"))[0].read_slots is None


def test_requests_that_a_step_moves_on_begin_again() -> None:
    """transformers takes back the token of a step that is under way, and a state cannot."""
    with patched(models.family("qwen3_next"), "int8") as model, managed(model) as manager:
        processor, given = manager.batch_processor, []

        def offload(victims: list[Any], tables: Any) -> set[str]:
            given.extend(victims)
            return {each.name for each in victims}

        def request(name: str, held: int) -> Any:
            return types.SimpleNamespace(
                name=name, initial_tokens=[1, 2, 3], generated_len=lambda: 2, current_len=lambda: held
            )

        processor._offload = offload
        victims = [request("in flight", 5), request("at rest", 4)]
        assert processor.offloading_manager._offload_to_cpu(victims, {}) == {"at rest"}
        assert given == victims[1:]


def test_inputs_of_steps_have_lengths_for_every_allocator() -> None:
    inputs = types.SimpleNamespace(
        cumulative_seqlens_k={"full_attention": torch.ones(3)}, total_seqlen_k={}, max_length_k={}
    )
    add_lengths(inputs, [types.SimpleNamespace(layer_type=name) for name in (TAILS, STATES)])
    assert inputs.cumulative_seqlens_k.keys() == {"full_attention", TAILS, STATES}
    assert not inputs.cumulative_seqlens_k[TAILS].any() and not inputs.cumulative_seqlens_k[STATES].any()
    assert inputs.total_seqlen_k == inputs.max_length_k == {TAILS: 0, STATES: 0}


def test_a_slot_keeps_no_keys() -> None:
    with patched(models.family("qwen3_next"), "int8") as model, managed(model) as manager:
        states = manager.batch_processor.cache.states
        for call in (states.update, states.get_cache_for_block_table):
            with pytest.raises(NotImplementedError, match="a slot for linear_attention must get no keys and values"):
                call(0)
        assert states.get_read_indices("a", 1, 2) == states.get_write_indices("a", 1, 2) == []


# --- what a manager does to a model -----------------------------------------------------------------------------------


def test_the_model_is_as_before_when_a_manager_has_stopped() -> None:
    model = models.family("qwen3_next")
    before, types_before = [dict(module.__dict__) for module in model.modules()], dict(ATTN_TYPE_TO_ALLOCATOR)
    with patched(model, "int8"):
        expected = alone(model, [5, 6, 7])
        with managed(model) as manager:
            assert answers(manager, [[5, 6, 7]]) == [expected]
            assert "forward" in model.model.layers[0].linear_attn.__dict__
        assert alone(model, [5, 6, 7]) == list(expected)
        manager = model.init_continuous_batching(generation(4), settings())
        del manager  # not stopped
    assert [module.__dict__.keys() for module in model.modules()] == [each.keys() for each in before]
    assert types_before == ATTN_TYPE_TO_ALLOCATOR


def test_a_forward_of_somebody_else_is_called_and_comes_back() -> None:
    module = torch.nn.Linear(2, 2)
    module.layer_idx = 0
    own = functools.partial(torch.nn.functional.linear, weight=module.weight)
    module.forward = own
    wrapper = Wrapper([module], forward_of_state)
    wrapper.wrap()
    given = module.forward
    wrapper.wrap()
    x = torch.ones(1, 2)
    assert torch.equal(module(x), own(x)) and module.forward is given is not own
    unwrap([module])
    assert module.forward is own
    unwrap([module])
    assert module.forward is own
    wrapper.wrap()
    assert module.forward is given
    module.forward = torch.nn.functional.relu  # meanwhile
    wrapper.wrap()
    assert torch.equal(module(-x), torch.zeros(1, 2))


@pytest.mark.parametrize("name", ["qwen3_next", "zamba2"])
def test_a_manager_that_starts_keeps_pages_and_captured_steps(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """It replaces forwards of modules anew whenever it starts, and the model stays the same by that."""
    forgotten: list[str] = []
    for owner, method in ((PagedCache, "forget_pages"), (Runner, "forget_graphs")):
        monkeypatch.setattr(owner, method, lambda _, method=method: forgotten.append(method))
    with patched(models.family(name), INT8) as model:
        for _ in range(2):  # the second time by the manager that is kept
            model.generate_batch(PROMPTS, generation(4), settings(), persistent_manager=True, warmup=True)
            assert forgotten == []
        check_nothing_leaks(model)


# --- what is refused --------------------------------------------------------------------------------------------------


def check_refused(model: Any, message: str, error: type[Exception] = NotImplementedError, **options: Any) -> None:
    """It is refused with this message, before anything is changed."""
    before = [module.__dict__.keys() for module in model.modules()]
    with patched(model, INT8):
        attention = model.config._attn_implementation
        with pytest.raises(error, match=re.escape(message)):
            model.init_continuous_batching(generation(4), ContinuousBatchingConfig(**options))
        assert model.config._attn_implementation == attention
    assert [module.__dict__.keys() for module in model.modules()] == before


def test_states_that_end_with_a_chunk_are_refused() -> None:
    message = (
        "init_continuous_batching: JambaForCausalLM has a JambaMambaMixer that forgets its state between two chunks of "
        "a prompt. Use generate, or unpatch the model."
    )
    check_refused(models.family("jamba"), message)


def test_modules_that_attend_and_keep_a_state_are_refused() -> None:
    message = "ZayaForCausalLM calls its ZayaCCAProjection without `hidden_states` or `cache` by name. Use generate"
    check_refused(models.build("zaya"), message)


def test_releases_that_give_layers_another_cache_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "HAS_STATES", False)
    monkeypatch.setattr(support, "VERSION", "5.23.0")
    message = (
        "init_continuous_batching: Qwen3NextForCausalLM has layers of type ['linear_attention'], whose states need "
        "transformers 5.24 or newer, got 5.23.0. Use generate, or unpatch the model."
    )
    check_refused(models.family("qwen3_next"), message)


def test_memory_that_holds_no_request_is_refused() -> None:
    message = (
        "continuous batching: `num_blocks` must be at least 10, since the states of a request take as much memory as 5 "
        "of them, got 4. Set a larger one, or a larger `page_size`."
    )
    check_refused(large(), message, ValueError, num_blocks=4, page_size=PAGE)


def test_memory_that_is_left_and_holds_no_request_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageMemory, "infer_max_batch_tokens_and_num_sectors", lambda self: (64, 1))
    with patched(large(), "int8") as model:
        manager = model.init_continuous_batching(generation(4), settings(num_blocks=None))
        message = "got 5. Leave more memory free, raise `max_memory_percent`, or set a smaller `page_size`."
        with pytest.raises(ValueError, match=re.escape(message)):
            manager.warmup()
        manager.destroy()


def test_layers_that_keep_their_states_elsewhere_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.family("qwen3_next")
    kind = type(model.model.layers[0].linear_attn)
    monkeypatch.setattr(kind, "forward", lambda self, hidden_states, cache=None, **kwargs: hidden_states)
    message = "Qwen3NextForCausalLM asks its cache for the states of layers [], not of [0]. Use generate"
    check_refused(model, message)
    monkeypatch.setattr(kind, "forward", lambda self, hidden_states, cache=None, **kwargs: cache.own_state)
    message = "Qwen3NextForCausalLM asks its cache for `own_state`, which caches of batches do not have. Use generate"
    check_refused(model, message)


class Layer(torch.nn.Module):
    """A layer with a state, for what may be wrong with one."""

    def __init__(self, layer_idx: int = 0) -> None:
        super().__init__()
        self.layer_idx = layer_idx

    def forward(self, hidden_states: torch.Tensor, cache: Any = None) -> Any:
        state = cache.get_conv_state(0)
        out = hidden_states if state is None else hidden_states + state.sum()
        cache.update_conv_state(hidden_states.mT, 0, conv_kernel_size=2)
        return out


def probed(model: Any, *args: Any, **kwargs: Any) -> StateLayers:
    probe = StateProbe(DynamicCache(config=models.family("qwen3_next").config))
    with probe.watching(model), torch.no_grad():
        kwargs.get(CACHE, types.SimpleNamespace()).__dict__.update(
            get_conv_state=functools.partial(probe.ask, "get_conv_state"),
            update_conv_state=functools.partial(probe.ask, "update_conv_state"),
            note=probe.note_attention,
        )
        model(*args, **kwargs)
    return probe.found()


HIDDEN = torch.ones(1, 1, 4)


def test_what_a_probe_finds() -> None:
    layer = Layer()
    found = probed(layer, HIDDEN, cache=types.SimpleNamespace())
    assert found.modules == {0: layer} and found.why_not is None and why_not_grouped(found) is None
    assert found.layout.parts == {0: (StatePart(True, 0, 0, (4, 2), torch.float32),)}


def test_layers_that_are_called_in_another_way_are_refused() -> None:
    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = Layer(), Layer(), Layer(1)

        def forward(self, hidden: torch.Tensor, cache: Any, which: str) -> None:
            if which == "several":
                self.first(hidden, cache=cache)
                self.second(hidden, cache=cache)
            elif which == "position":
                self.first(hidden, cache)
            else:
                self.third(hidden, cache=cache)

    def why_not(which: str) -> str | None:
        return probed(Outer(), HIDDEN, cache=types.SimpleNamespace(), which=which).why_not

    assert why_not("several") == "asks for the states of layer 0 in several modules"
    assert why_not("position") == why_not("index") == "calls its Layer without `hidden_states` or `cache` by name"


def test_layers_that_do_something_else_are_refused() -> None:
    class Attends(Layer):
        def forward(self, hidden_states: torch.Tensor, cache: Any = None) -> Any:
            out = super().forward(hidden_states, cache)
            cache.note()
            return out

    class Returns(Layer):
        def forward(self, hidden_states: torch.Tensor, cache: Any = None) -> Any:
            return super().forward(hidden_states, cache), None

    class Forgets(Layer):
        def forward(self, hidden_states: torch.Tensor, cache: Any = None) -> Any:
            super().forward(hidden_states, cache)
            return hidden_states

    def why_not(layer: Any) -> str | None:
        found = probed(layer, HIDDEN, cache=types.SimpleNamespace())
        return found.why_not or why_not_grouped(found)

    assert why_not(Attends()) == "attends in a module that has a state, too"
    assert why_not(Returns()) == "has a Returns that returns more than hidden states"
    assert why_not(Forgets()) == "has a Forgets that forgets its state between two chunks of a prompt"


def test_groups_hold_what_transformers_layers_hold() -> None:
    """After a prompt, the next chunk and a token, the states of a group are those of a cache of one sequence."""
    module = models.family("qwen3_next").model.layers[0].linear_attn
    config = models.family("qwen3_next").config
    torch.manual_seed(0)
    hidden = torch.randn(2, 9, 128)
    own = DynamicCache(config=config)
    with torch.no_grad():
        expected = torch.cat([module(each, **{CACHE: own}) for each in hidden.split((5, 3, 1), dim=1)], dim=1)
    layout = StateLayout.of({0: own.layers[0]})
    planes = layout.planes(torch.full((5 * layout.num_bytes,), 255, dtype=torch.uint8), layout.num_bytes)[0]
    slots, outs = torch.tensor([3, 1]), []
    for each in hidden.split((5, 3, 1), dim=1):
        group = Group(slice(0, 0), 0, slots, slots, has_past=bool(outs), read_slots=slots, write_slots=slots)
        layer = GroupLayer(planes, group)
        with torch.no_grad():
            outs.append(module(each, **{CACHE: layer.as_cache(0)}))
        layer.store()
    torch.testing.assert_close(torch.cat(outs, dim=1), expected)
    assert isinstance(own.layers[0], LinearAttentionLayer)
    for part, plane in planes:
        states = own.layers[0].conv_states if part.is_conv else own.layers[0].recurrent_states
        torch.testing.assert_close(plane[slots], states[0])
