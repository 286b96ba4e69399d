"""The decode step of a static cache under `torch.compile`: one graph, no breaks, no recompilation, the same tokens.

`generate` compiles by itself as soon as a cache says that it is compileable; here it is told to do so on the CPU too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import compare
import models
import pytest
import tolerances
import torch
from cases import REFUSED
from models import FAMILIES, greedy, left_padded, logits
from torch import Tensor
from torch._dynamo.utils import counters
from transformers.generation.configuration_utils import CompileConfig

from hf_kvquant import KVQuantCache, patched
from hf_kvquant.generate import hook
from hf_kvquant.transforms import of_model
from hf_kvquant.upstream.releases import ASSISTS_STATIC_CACHES, CACHE, cache_of, with_cache


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """No graphs of other tests; any recompilation is an error."""
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


def compiled_for(backend: str) -> dict[str, Any]:
    config = CompileConfig(backend=backend, mode=None, fullgraph=True, dynamic=False)
    config._compile_all_devices = True
    return {"compile_config": config}


def check_one_graph() -> None:
    assert counters["stats"]["unique_graphs"] == 1, dict(counters["stats"])
    assert not counters["graph_break"], dict(counters["graph_break"])


def check_same_generation(model: Any, config: dict[str, Any], compiled: dict[str, Any], **options: Any) -> Any:
    """Compare eager and compiled generation, the latter twice: the second call has a cache of its own."""
    inputs = options.pop("inputs", left_padded())
    with patched(model, config):
        expected = greedy(model, inputs, **options, disable_compile=True)  # on a GPU it would be compiled, too
        for _ in range(2):
            output = greedy(model, inputs, **options, **compiled)
            compare.assert_same(output.sequences, expected.sequences.cpu(), "tokens")
            bound = tolerances.model_bound(logits(expected), logits(expected), torch.float32)
            compare.assert_close(logits(output), logits(expected), bound, "logits")
    return output


@pytest.mark.full(
    when=lambda helper, is_compiled, family: (
        is_compiled and (helper, family) in {("lookup", "llama"), ("assistant", "gemma2")}
    ),
    reason="each compiles chunks of several lengths; eager steps crop caches of both families for both helpers",
)
@pytest.mark.skipif(not ASSISTS_STATIC_CACHES, reason="caches grow in assisted decoding of this transformers")
@pytest.mark.parametrize("family", ["llama", "gemma2", "lfm2"])
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("helper", ["lookup", "assistant"])
def test_assisted_decoding_crops_static_caches(helper: str, is_compiled: bool, family: str) -> None:
    """... of layers that can take back any number of tokens. Chunks of several lengths are compiled more than once."""
    # Proposals of prompt lookup go beyond the end.
    assistant = {"assistant_model": models.build("llama", num_hidden_layers=1)}
    options: dict[str, Any] = {"prompt_lookup_num_tokens": 10} if helper == "lookup" else assistant
    compiled = compiled_for("eager") if is_compiled else {}
    prompt = {"input_ids": torch.tensor([[5, 9, 5, 9, 5, 9, 7, 5, 9]])}
    model = models.family(family)
    with patched(model, "int8"):
        expected = greedy(model, prompt, 12)
    with patched(model, {"preset": "int8", "static": True}), torch._dynamo.config.patch(error_on_recompile=False):
        output = greedy(model, prompt, 12, **options, **compiled)
    compare.assert_same(output.sequences, expected.sequences, "tokens")
    assert cache_of(output).is_compileable == (family != "lfm2")
    assert not any(storage.tally.fallbacks for storage in cache_of(output).storages)
    assert not counters["graph_break"]
    assert bool(counters["stats"]["unique_graphs"]) == (is_compiled and family != "lfm2")


@pytest.mark.skipif(not ASSISTS_STATIC_CACHES, reason="caches grow in assisted decoding of this transformers")
def test_proposals_that_a_static_cache_has_no_room_for(caplog: pytest.LogCaptureFixture) -> None:
    hook._log_growing.cache_clear()
    model, prompt = models.family("llama"), {"input_ids": torch.tensor([[5, 9, 5, 9, 5, 9, 7, 5, 9]])}
    with patched(model, "int8"):
        expected = greedy(model, prompt, 12)
    with patched(model, {"preset": "int8", "max_cache_len": 20}), caplog.at_level("WARNING", "hf_kvquant"):
        output = greedy(model, prompt, 12, prompt_lookup_num_tokens=10)
    compare.assert_same(output.sequences, expected.sequences, "tokens")
    assert not cache_of(output).is_compileable
    assert [record.message for record in caplog.records if record.name == "hf_kvquant.generate.hook"] == [
        "generate keeps no static cache for this assisted decoding: `max_cache_len` must be at least 30 for this "
        "prompt, max_new_tokens and the proposals, got 20. Correct, slower."
    ]


@pytest.mark.full(
    when=lambda preset: preset not in ("none", "int8"),
    reason="to the compiler, formats are arguments of an op like others",
)
@pytest.mark.parametrize("preset", ["none", "int8", "k8v4", "int4-g32", "fp8"])
def test_generate_compiles_one_graph(preset: str) -> None:
    config = {"preset": preset, "sink_length": 0, "residual_length": 0, "max_cache_len": 32}
    output = check_same_generation(models.build("llama"), config, compiled_for("eager"))
    assert not cache_of(output).storages[0].tally.fallbacks
    check_one_graph()


def test_without_padding() -> None:
    config, inputs = {"preset": "int4-token", "max_cache_len": 32}, left_padded(pads=(0,))
    check_same_generation(models.build("llama"), config, compiled_for("eager"), inputs=inputs)
    check_one_graph()


def test_transforms_with_numbers_compile_one_graph() -> None:
    model = models.build("qwen2")
    of_model.set_smoothing(model, {index: torch.full((2, models.HEAD_DIM), 2.0) for index in range(2)})
    output = check_same_generation(model, {"preset": "int4-token", "max_cache_len": 32}, compiled_for("aot_eager"))
    transforms = [storage.key_transform.describe() for storage in cache_of(output).storages]
    assert transforms == ["center+smooth+rotate"] * 2
    check_one_graph()


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "gemma3n_text"])
def test_softcaps_sinks_and_shared_keys_compile_one_graph(family: str) -> None:
    options = dict(FAMILIES[family].options)
    options["layer_types"] = ["full_attention"] * 2
    if family == "gemma3n_text":
        options |= {"num_hidden_layers": 2, "num_kv_shared_layers": 1, "activation_sparsity_pattern": [0.0] * 2}
    model = models.build(FAMILIES[family].model_type, **options)
    check_same_generation(model, {"preset": "int4-token", "max_cache_len": 32}, compiled_for("eager"), new_tokens=4)
    check_one_graph()


@pytest.mark.parametrize("family", ["falcon_h1", "zamba2"])
def test_states_beside_keys_and_values_compile_one_graph(family: str) -> None:
    model = models.build(FAMILIES[family].model_type, **FAMILIES[family].options)
    check_same_generation(model, {"preset": "int4-token", "max_cache_len": 32}, compiled_for("eager"), new_tokens=4)
    check_one_graph()


def test_sliding_layers_of_transformers_break_no_graph() -> None:
    """They count on the host, so that the compiler looks again when a count changes; it is not ours to change."""
    model = models.build("gemma2", **FAMILIES["gemma2"].options)
    with torch._dynamo.config.patch(error_on_recompile=False):
        compiled = compiled_for("eager")
        compiled["compile_config"].dynamic = None
        check_same_generation(model, {"preset": "int4-token", "max_cache_len": 32, "sliding": False}, compiled)
    assert not counters["graph_break"]


@pytest.mark.full(
    when=lambda family, preset, tokens: (
        (family, preset, tokens) not in {("gpt_oss", "int4-token", 250), ("gemma2", "int4-channel", 250)}
        and (family, preset) != ("gemma2", "int4-token")
    ),
    reason="each is compiled anew; families and lengths meet every preset outside of compiled steps too",
)
@pytest.mark.parametrize("tokens", [8, 250], ids=["short", "round_the_end"])
@pytest.mark.parametrize("preset", ["none", "int4-token", "int4-channel"])
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_sliding_windows_compile_one_graph(family: str, preset: str, tokens: int) -> None:
    model = models.build(family, **{**FAMILIES[family].options, "max_position_embeddings": 512})
    options = {"inputs": left_padded(tokens=tokens, pads=(3, 0, 5)), "new_tokens": 12}
    config = {"preset": preset, "max_cache_len": 400, "residual_length": 0 if preset == "none" else 3}
    output = check_same_generation(model, config, compiled_for("eager"), **options)
    assert cache_of(output).storages[0].is_ring
    check_one_graph()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_sliding_windows_compile_through_the_ops(backend: str, device: str) -> None:
    if (backend, device) == ("inductor", "cpu"):
        pytest.skip("there are no graphs to replay")
    model, compiled = models.on(device, models.build("gemma2", **FAMILIES["gemma2"].options)), compiled_for(backend)
    if backend == "inductor":
        compiled["compile_config"].mode = "reduce-overhead"
    check_same_generation(model, {"preset": "int4-token", "max_cache_len": 400}, compiled)
    check_one_graph()


def test_models_that_look_inside_compile_one_graph() -> None:
    model = models.build("jetmoe", **FAMILIES["jetmoe"].options)
    check_same_generation(model, {"preset": "int4-token", "max_cache_len": 32}, compiled_for("eager"))
    check_one_graph()


@pytest.mark.full(when=lambda preset: preset == "none", reason="to the compiler, both are arguments of one op")
@pytest.mark.parametrize("preset", ["none", "int8"])
def test_latents_compile_one_graph(preset: str) -> None:
    model = models.build("minicpm3", **FAMILIES["minicpm3"].options)
    output = check_same_generation(model, {"preset": preset, "max_cache_len": 32}, compiled_for("eager"))
    assert not cache_of(output).storages[0].tally.fallbacks
    check_one_graph()


# The compiler looks at BLOOM's GELU in a way that torch itself calls deprecated.
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function:DeprecationWarning")
@pytest.mark.full(
    when=lambda family: family in ("codegen", "mpt"),
    reason="keys like those of GPT-Neo and ALiBi like BLOOM's; uncompiled, test_own_attention.py has all of them",
)
@pytest.mark.parametrize("family", ["bloom", "codegen", "falcon", "gpt_neo", "mpt"])
def test_models_that_compute_attention_by_themselves_compile_one_graph(family: str) -> None:
    model = models.build(FAMILIES[family].model_type, **FAMILIES[family].options)
    if family == "bloom" and not hasattr(model, "create_masks_for_generate"):
        pytest.skip("this version of transformers has no static caches for BLOOM but its own")
    output = check_same_generation(model, {"preset": "int4-token", "max_cache_len": 32}, compiled_for("eager"))
    assert not any(storage.tally.fallbacks for storage in cache_of(output).storages)
    check_one_graph()


# Inductor imports parts of torch that torch itself calls deprecated.
@pytest.mark.full(
    when=lambda backend, device: (backend, device) == ("inductor", "cpu"),
    reason="test_ops.py has Inductor compile a step of the ops in the quick tier",
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_backends_that_trace_through_the_ops(backend: str, device: str) -> None:
    """These see fakes and functionalised mutations; on a GPU, Inductor replays the step as a CUDA graph."""
    model, compiled = models.on(device, models.build("llama", num_hidden_layers=1)), compiled_for(backend)
    if (backend, device) == ("inductor", "cuda"):
        compiled["compile_config"].mode = "reduce-overhead"
    check_same_generation(model, {"preset": "int4-token", "max_cache_len": 32}, compiled)
    check_one_graph()


@pytest.mark.full(
    when=lambda config, pads: (config["preset"], pads) not in {("int4-token", (3, 0, 5)), ("int8", (0,))},
    reason="two graphs are compiled for each; padding is in the inputs, and formats are arguments of an op like others",
)
@pytest.mark.parametrize("pads", [(3, 0, 5), (0,)], ids=["left_pad", "no_pad"])
@pytest.mark.parametrize(
    "config",
    [
        {"preset": "int4-token", "max_cache_len": 32},
        {"preset": "int8", "static": True},
        {"preset": "int4-channel", "static": True, "sink_length": 2},
    ],
    ids=lambda config: config["preset"],
)
def test_chunked_prefill_is_compiled_too(config: dict[str, Any], pads: tuple[int, ...]) -> None:
    model, inputs = models.build("llama"), left_padded(tokens=16, pads=pads)
    compiled = compiled_for("eager")
    compiled["compile_config"].fullgraph = False  # as transformers has it by default; breaks are counted
    with patched(model, config):
        expected = greedy(model, inputs, prefill_chunk_size=4).sequences.cpu()
        with torch._dynamo.config.patch(error_on_recompile=False):  # a chunk has another shape than a token
            greedy(model, inputs, prefill_chunk_size=4, **compiled)
        output = greedy(model, inputs, prefill_chunk_size=4, **compiled)
    compare.assert_same(output.sequences, expected, "tokens")
    assert not counters["graph_break"]


def places(output: Any) -> list[int]:
    return [tensor.data_ptr() for storage in cache_of(output).storages for tensor in storage.step_tensors()]


def test_calls_of_other_lengths_reuse_graph_and_buffers() -> None:
    """Within what the first call had room for: longer prompts, other padding, none, more tokens, sampling."""
    model, compiled = models.build("llama"), compiled_for("eager")
    with patched(model, {"preset": "int4-token", "static": True}):
        first = places(greedy(model, left_padded(), **compiled))
        for pads, tokens, count in (((0, 4, 9), 20, 5), ((0, 0, 0), 9, 12), ((30, 1, 2), 60, 3)):
            inputs = left_padded(pads=pads, tokens=tokens)
            expected = greedy(model, inputs, count).sequences.cpu()
            output = greedy(model, inputs, count, **compiled)
            compare.assert_same(output.sequences, expected, "tokens")
            assert places(output) == first
            del output
        greedy(model, left_padded(), do_sample=True, **compiled)
    check_one_graph()


@pytest.mark.parametrize("num_layers", [1, 4])
def test_a_step_advances_one_length(num_layers: int) -> None:
    writes: list[list[Any]] = []

    def backend(graph: Any, inputs: Any) -> Any:
        methods = [node.target for node in graph.graph.nodes if node.op == "call_method"]
        writes.append([name for name in methods if name.endswith("_") and not name.endswith("__")])
        return graph.forward

    model = models.build("llama", num_hidden_layers=num_layers)
    with patched(model, {"preset": "int4-token", "static": True}):
        cache = KVQuantCache(model.config, "int4-token", max_cache_len=32)
        step = torch.compile(model, fullgraph=True, backend=backend, dynamic=False)
        decode(step, model, cache, left_padded(), 3)
    assert writes == [["add_"]]


def decode(step: Any, model: Any, cache: KVQuantCache, inputs: dict[str, Tensor], count: int) -> Tensor:
    """Greedy decoding without `generate`: prefill eagerly, then `count` steps."""
    mask = inputs["attention_mask"]
    starts = (mask == 0).sum(1, keepdim=True)
    with torch.no_grad():
        first = (mask.cumsum(1) - 1).clamp(min=0)
        token = model(**inputs, position_ids=first, **with_cache(cache), use_cache=True).logits[:, -1:].argmax(-1)
        tokens = [token]
        for index in range(count):
            position = mask.shape[1] + index - starts
            bounds = torch.stack([starts[:, 0], torch.full_like(starts[:, 0], mask.shape[1] + index)])
            token = step(
                input_ids=token,
                attention_mask=bounds.int().view(2, -1, 1, 1),
                position_ids=position,
                **with_cache(cache),
                use_cache=True,
            ).logits[:, -1:].argmax(-1)  # fmt: skip
            tokens.append(token)
    return torch.cat(tokens, 1)


def test_a_compiled_forward_serves_every_cache_of_one_shape() -> None:
    model, inputs = models.build("llama"), left_padded()
    with patched(model, "int4-token"):
        config = {"preset": "int4-token", "max_cache_len": 32}
        expected = greedy(model, inputs, 8, **with_cache(KVQuantCache(model.config, config))).sequences[:, -8:]
        step = torch.compile(model, fullgraph=True, backend="eager", dynamic=False)
        caches = [KVQuantCache(model.config, config) for _ in range(3)]
        for cache in caches:
            compare.assert_same(decode(step, model, cache, inputs, 7), expected, "tokens")
        caches[0].reset()
        compare.assert_same(decode(step, model, caches[0], inputs, 7), expected, "tokens after a reset")
    check_one_graph()


def test_a_full_cache_in_a_compiled_loop() -> None:
    """The host does not know the length there. The op does, on a CPU; any step that is not compiled does again."""
    model, inputs = models.build("llama"), left_padded()
    # Codes alone: a step that fails moves the window of newest tokens on, and the cache shows the codes behind it.
    with patched(model, models.INT8_CODES):
        cache = KVQuantCache(model.config, models.INT8_CODES, max_cache_len=64)
        step = torch.compile(model, fullgraph=True, backend="eager", dynamic=False)
        decode(step, model, cache, inputs, 55)
        assert int(cache.get_seq_length()) == 64
        full = [layer.keys.clone() for layer in cache.layers]
        bounds = torch.zeros((2, 3, 1, 1), dtype=torch.int32)
        token = {"input_ids": torch.ones((3, 1), dtype=torch.long), "attention_mask": bounds, CACHE: cache}
        with torch.no_grad(), pytest.raises(REFUSED, match="`lengths` must be between 0 and the cache's capacity"):
            step(**token, position_ids=torch.full((3, 1), 64), use_cache=True)
        with torch.no_grad(), pytest.raises(ValueError, match="layer 0: `max_cache_len` must be at least 66"):
            model(**token, position_ids=torch.full((3, 1), 65), use_cache=True)
        for layer, expected in zip(cache.layers, full, strict=True):
            compare.assert_same(layer.keys, expected, "keys of the full cache")
        cache.reset()
        expected = greedy(model, inputs, 4).sequences
        compare.assert_same(greedy(model, inputs, 4, **with_cache(cache)).sequences, expected, "tokens after a reset")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_full_cache_in_a_compiled_loop_on_a_gpu() -> None:
    """Nobody knows before the scores come, and they are NaN, not those of a text that lacks a token."""
    model = models.on("cuda", models.build("llama"))
    inputs = {name: tensor.cuda() for name, tensor in left_padded().items()}
    with patched(model, "int8"), torch.no_grad():
        cache = KVQuantCache(model.config, "int8", max_cache_len=64)
        step = torch.compile(model, fullgraph=True, backend="eager", dynamic=False)
        decode(step, model, cache, inputs, 55)
        bounds = torch.zeros((2, 3, 1, 1), dtype=torch.int32, device="cuda")
        token = {"input_ids": torch.ones((3, 1), dtype=torch.long, device="cuda"), "attention_mask": bounds}
        position = torch.full((3, 1), 64, device="cuda")
        assert step(**token, **with_cache(cache), position_ids=position, use_cache=True).logits.isnan().all()
        cache.reset()
        expected = greedy(model, inputs, 4).sequences
        output = greedy(model, inputs, 4, **with_cache(cache), disable_compile=True)
        compare.assert_same(output.sequences, expected, "tokens after a reset")


def test_the_host_reads_lengths_after_compiled_steps() -> None:
    """A compiled step advances the device's length only; cropping and looking ask for it again."""
    model, inputs = models.build("llama"), left_padded()
    with patched(model, {"preset": "int4-token", "max_cache_len": 32}):
        cache = cache_of(greedy(model, inputs, **compiled_for("eager")))
        eager = cache_of(greedy(model, inputs))
    assert [storage.length for storage in cache.storages] == [14, 14]
    for each in (cache, eager):
        each.crop(-3)
    assert int(cache.get_seq_length()) == 11
    for layer, other in zip(cache.layers, eager.layers, strict=True):
        compare.assert_same(layer.keys[:, :, :11], other.keys[:, :, :11], "keys")


def test_a_growing_cache_under_a_forward_that_the_user_compiled() -> None:
    """torch compiles the first layers and runs the others as they are: no step has ended early."""
    model = models.build("llama", num_hidden_layers=torch._dynamo.config.recompile_limit + 3)
    with torch._dynamo.config.patch(error_on_recompile=False), patched(model, "int8"):
        expected = greedy(model, left_padded())
        model.forward = torch.compile(model.forward, backend="eager")
        try:
            outputs = [greedy(model, left_padded()) for _ in range(2)]
        finally:
            del model.forward
        for output in outputs:
            compare.assert_same(output.sequences, expected.sequences, "tokens")
        cache = cache_of(outputs[0])
        assert cache._steps.is_unwatched
        cache.reset()
        assert not cache._steps.is_unwatched
