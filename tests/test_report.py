"""That a report says what became of each layer, in the words of those who decide it."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import pytest
import torch
from accelerate import cpu_offload
from models import greedy, left_padded
from transformers import DynamicCache

import hf_kvquant
from hf_kvquant import (
    KVQuantCache,
    LayerReport,
    Report,
    environment,
    ops,
    patched,
    report,
    run_preflight,
    smooth_attention,
)
from hf_kvquant.attention.registry import NOT_QUANTIZED
from hf_kvquant.cache.handle import LOOKED_INSIDE
from hf_kvquant.graphs import capture
from hf_kvquant.models.layers import count_layers
from hf_kvquant.ops import kernels
from hf_kvquant.storage import offloading
from hf_kvquant.upstream.releases import cache_of, is_since, with_cache

KERNEL = {"cpu": f"CPU kernel, {ops.extension().cpu_capability()}", "cuda": "CUDA kernel"}  # type: ignore[union-attr]
REINSTALL = ops.REINSTALL


def found(model: Any, cache: KVQuantCache | None = None) -> list[tuple[str | None, str, str]]:
    return [(layer.formats, layer.kernel, layer.reason) for layer in report(model, cache).layers]


# --- layers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after", "cache"])
@pytest.mark.parametrize("config", ["int4-token", "int8", "int4-channel", {"preset": "fp8", "static": True}])
def test_layers_that_a_kernel_serves(config: Any, when: str, device: str) -> None:
    model = models.on(device, models.llama())
    with patched(model, config):
        cache = None if when == "before" else cache_of(greedy(model, left_padded(), disable_compile=True))
        result = report(model, cache if when == "cache" else None)
    preset = config["preset"] if isinstance(config, dict) else config
    assert [(layer.formats, layer.kernel, layer.reason) for layer in result.layers] == [
        (preset, KERNEL[device], "")
    ] * 2
    assert result.is_served and result.cache == ("static" if isinstance(config, dict) else "growing")
    assert [layer.device for layer in result.layers] == [str(model.device)] * 2
    assert "0-1" in str(result) and KERNEL[device] in str(result)


def test_layers_of_their_own_formats() -> None:
    model = models.llama(num_hidden_layers=4)
    config = {"preset": "int4-token", "layers": {1: "none", 2: {"preset": "int8", "transforms": []}}}
    with patched(model, config):
        layers = found(model)
    assert layers == [
        ("int4-token", KERNEL["cpu"], ""),
        ("none", "transformers, over unquantised keys and values", NOT_QUANTIZED),
        ("int8 (no transforms)", KERNEL["cpu"], ""),
        ("int4-token", KERNEL["cpu"], ""),
    ]


def test_layers_that_transformers_keeps() -> None:
    model = models.family("gemma2")
    with patched(model, {"preset": "int4-token", "sliding": False}):
        output = greedy(model, left_padded())
        for result in (report(model), report(model, cache_of(output))):
            assert [layer.formats for layer in result.layers] == [None, "int4-token"] and result.cache == "growing"
            assert result.layers[0].kernel == "transformers' own cache"
            assert result.layers[0].reason == "its cache (sliding_attention) is not quantised"
            assert result.is_served, "in the layers whose cache is ours"
            assert re.search(r"^0 +sliding_attention +cpu ", str(result), flags=re.MULTILINE)


def test_layers_with_a_window_are_ours() -> None:
    model = models.family("gemma2")
    with patched(model, "int4-token"):
        cache = cache_of(greedy(model, left_padded()))
        static = KVQuantCache(model.config, "int4-token", max_cache_len=64)
        for result in (report(model), report(model, cache), report(model, static)):
            assert [(layer.layer_type, layer.formats) for layer in result.layers] == [
                ("sliding_attention", "int4-token"),
                ("full_attention", "int4-token"),
            ]
            assert result.is_served


@pytest.mark.parametrize("family", ["gemma3n_text", "gemma4_text"])
def test_layers_that_read_the_cache_of_another(family: str) -> None:
    model = models.family(family)
    if count_layers(model.config) == 2:
        pytest.skip("this version of transformers has no cache layers for them")
    with patched(model, {"preset": "int4-token", "layers": {1: "int8"}}):
        cache = cache_of(greedy(model, left_padded()))
        for result in (report(model), report(model, cache)):
            assert [(layer.layer_type, layer.formats, layer.reads) for layer in result.layers] == [
                ("sliding_attention", "int4-token", None),
                ("full_attention", "int8", None),
                ("sliding_attention", "int4-token", 0),
                ("full_attention", "int8", 1),
            ]
            assert result.is_served and not re.search("dummy", str(result))
            assert re.search(rf"^3 +reads layer 1 +cpu +{KERNEL['cpu']}", str(result), flags=re.MULTILINE)
    with patched(model, {"preset": "int4-token", "sliding": False}):
        layer = report(model).layers[2]
    assert (layer.formats, layer.reads) == (None, 0)
    assert layer.reason == "its cache (sliding_attention) is not quantised"


@pytest.mark.skipif(not is_since("5.24"), reason="it has no such model")
def test_a_cache_that_the_model_adds_layers_to() -> None:
    """Dory copies the layers over which it loops. Its cache still is one of its own."""
    looped = {"n_input_layers": 1, "n_output_layers": 1, "sliding_window": 6, "recurrent_kv_cache_mode": "per_loop"}
    model = models.build("dory", **{**models.COMMON, "num_hidden_layers": 4, **looped})
    inputs = left_padded()
    expected = greedy(model, inputs)
    with patched(model, "none"):
        cache = cache_of(greedy(model, inputs))
        assert len(cache.layers) > len(report(model, cache).layers) == 4
        text = expected.sequences[:, : cache.get_seq_length() + 2]
        mask = torch.cat([inputs["attention_mask"], torch.ones_like(text[:, inputs["input_ids"].shape[1] :])], 1)
        output = greedy(model, {"input_ids": text, "attention_mask": mask}, 1, **with_cache(cache))
    assert cache_of(output) is cache, "it may be continued"


def test_what_a_model_does_shows_after_it_has_run() -> None:
    """Also where nobody keeps the cache; patching again starts anew."""
    model = models.family("jetmoe")
    with patched(model, "int4-token"):
        assert report(model).is_served, "nobody can know"
        for steps in (5, 10):
            cache = cache_of(greedy(model, left_padded()))
            assert [layer.fallbacks for layer in report(model).layers] == [{LOOKED_INSIDE: steps}] * 2
        result = report(model, cache)
        assert [layer.fallbacks for layer in result.layers] == [{LOOKED_INSIDE: 5}] * 2, "of one cache"
        assert not result.is_served
        assert f"5 steps on dequantised tensors: {LOOKED_INSIDE}" in str(result)
        hf_kvquant.patch(model, "int4-token")
        assert report(model).is_served


def test_a_model_that_is_not_routed_through_us(caplog: pytest.LogCaptureFixture) -> None:
    model = models.build("xglm", **models.FAMILIES["xglm"].options)  # one that has not been told of
    reason = "XGLMForCausalLM computes attention by itself, outside transformers' registry"
    with patched(model, "int4-token"):
        assert f"patch: {reason}, so it attends to dequantised tensors." in caplog.text
        assert found(model) == [("int4-token", "transformers, over dequantised tensors", reason)] * 2


def test_a_model_whose_attention_was_set_again() -> None:
    model = models.llama()
    with patched(model, "int8"):
        model.set_attn_implementation("eager")
        reason = "its attention was set to 'eager' after it was patched; patch it again"
        assert found(model) == [("int8", "transformers, over dequantised tensors", reason)] * 2
        hf_kvquant.patch(model, "int8")
        assert found(model) == [("int8", KERNEL["cpu"], "")] * 2


@pytest.mark.parametrize("family", ["bloom", "gptj"])
def test_attention_outside_the_registry_that_we_know(family: str) -> None:
    model = models.family(family)
    with patched(model, "int4-token"):
        assert found(model) == [("int4-token", KERNEL["cpu"], "")] * 2


def test_a_model_that_is_not_patched() -> None:
    model = models.llama()
    cache = KVQuantCache(model.config, "int8")
    expected = [("int8", "transformers, over dequantised tensors", LOOKED_INSIDE)] * 2
    assert found(model, cache) == expected
    greedy(model, left_padded(), **with_cache(cache))
    assert found(model, cache) == expected and report(model, cache).layers[0].fallbacks == {LOOKED_INSIDE: 5}


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({}, "growing"),
        ({"static": True}, "static"),
        ({"capture": True}, "captured"),
        ({"offloading": True}, "offloaded"),
    ],
)
def test_kinds_of_caches(config: dict[str, Any], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloading, "HOMES", frozenset(("cpu", "cuda")))
    monkeypatch.setitem(capture.RUNNERS, "cpu", capture.CudaGraph)
    model = models.llama()
    with patched(model, {"preset": "int4-token", **config}):
        assert report(model).cache == kind
    if not config:
        assert report(model, KVQuantCache(model.config, "int4-token", max_cache_len=64)).cache == "static"


def test_the_preset_is_that_of_the_generation_config() -> None:
    """It is what `generate` takes, whatever the model was patched with."""
    model = models.build("llama")
    model.generation_config.cache_implementation = "quantized"
    model.generation_config.cache_config = {"backend": "hf_kvquant", "preset": "int4-token", "static": True}
    hf_kvquant.patch(model, "int8")
    for _ in range(2):
        assert found(model) == [("int4-token", KERNEL["cpu"], "")] * 2 and report(model).cache == "static"
        cache = cache_of(greedy(model, left_padded(), disable_compile=True))
        assert report(model, cache).layers == report(model).layers
    model.generation_config.cache_config = {"backend": "hf_kvquant"}
    assert report(model).layers[0].formats == "int8"
    model.generation_config.cache_config = {"backend": "hfkvquant"}
    with pytest.raises(ValueError, match="generate: `backend` in cache_config must be 'hf_kvquant'"):
        report(model)
    model.generation_config.cache_config = None
    model.generation_config.cache_implementation = "hybrid"  # transformers leaves it out
    assert report(model).layers[0].formats == "int8" and not report(model).unused


# --- where there are no kernels ---------------------------------------------------------------------------------------


def test_without_an_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "extension", lambda: ImportError("no file"))
    model = models.llama()
    with patched(model, "int4-token"):
        result = report(model)
    reason = (
        "no compiled kernels for cpu (no file). Install a compiler and reinstall: pip install --no-build-isolation ."
    )
    assert {(layer.kernel, layer.reason) for layer in result.layers} == {("PyTorch reference", reason)}
    assert not result.is_served and result.environment["extension"].startswith("missing (no file)")


class Gpu:
    """A GPU that is not there, and an extension that was built for others."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
        module = SimpleNamespace(
            HAS_CUDA=1, HAS_CPU=1, cuda_archs=lambda: "90a", cpu_capability=lambda: "avx2", __file__="_C.so"
        )
        monkeypatch.setattr(kernels, "extension", lambda: module)
        monkeypatch.setattr(kernels, "has_kernels", lambda kind: True)
        monkeypatch.setattr(kernels, "serves_gpu", lambda index: ops.covers("90a", capability))
        monkeypatch.setattr(environment, "ModuleType", SimpleNamespace)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Some GPU")
        properties = SimpleNamespace(name="Some GPU", major=capability[0], minor=capability[1], total_memory=80 * 2**30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)


GPU_CASES: dict[str, tuple[tuple[int, int], tuple[int, ...], str, str]] = {
    "served": ((9, 0), (128, 128), "CUDA kernel", ""),
    "head_dim": (
        (9, 0),
        (320,),
        "PyTorch reference",
        "head_dim 320 on cuda: they support head_dim up to 256: Leave this model unpatched where speed matters more "
        "than memory.",
    ),
    "architecture": (
        (8, 0),
        (),
        "PyTorch reference",
        "Some GPU, compute capability 8.0: they were built for 90a: Reinstall: HF_KVQUANT_CUDA_ARCHS=80 pip install "
        "--no-build-isolation . (8.0 or later)",
    ),
}


@pytest.mark.parametrize("case", GPU_CASES)
def test_kernels_of_a_gpu(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    capability, head_dims, kernel, reason = GPU_CASES[case]
    Gpu(monkeypatch, capability)
    device = torch.device("cuda", 0)
    without = ops.why_reference(device, *head_dims)
    assert ops.kernel_name(device, *head_dims) == kernel
    assert ("" if without is None else f"{without.what}: {without.reason}: {without.remedy}") == reason


def test_weights_that_are_not_in_memory() -> None:
    with patched(cpu_offload(copy.deepcopy(models.llama()), torch.device("cpu")), "int8") as offloaded:
        assert {(layer.device, layer.kernel) for layer in report(offloaded).layers} == {("cpu", KERNEL["cpu"])}
    model = copy.deepcopy(models.llama()).to("meta")
    with patched(model, "int8"):
        assert {(layer.device, layer.kernel) for layer in report(model).layers} == {
            ("meta", "not known before the first tokens")
        }


# --- the object, and what it refuses ----------------------------------------------------------------------------------


def test_the_cost_is_reported_where_it_was_measured() -> None:
    model = models.build("llama")
    measured = run_preflight(model, "int4-token", max_kld=10.0)
    with patched(model, "int8"):
        assert report(model).cost == ""
    with patched(model, {"preset": "int4-token", "static": True}):
        result = report(model)
        assert result.cost == measured.described_cost() and str(result).endswith(result.cost)
        assert result.cost.startswith("All layers together: the same next token after ")
    text = "".join(chr(33 + number % 90) for number in range(0, 7 * 2400, 7))
    calibration = smooth_attention(model, models.tokenizer(), [text], progress=False)
    with patched(model, "int4-token"):
        layers = calibration.layers
        errors = [(layer.error_before, layer.error_after) for layer in layers]
        before, after = (sum(each) / len(layers) for each in zip(*errors, strict=True))
        assert report(model).cost == (
            f"Calibration: the error of attention is {after:.2%} instead of {before:.2%}, mean of layers."
        ), "the divergence was that of other caches"


def test_memory_for_long_chunks_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with patched(models.llama(), "int8") as model:
        assert report(model).scratch_bytes == 0
        monkeypatch.setattr(ops, "scratch_bytes", lambda device: 2**26 if device.type == "cpu" else 0)
        result = report(model)
        assert result.scratch_bytes == 2**26 and "take up to 67 MB beside the cache, which layers share." in str(result)
    with patched(models.family("jetmoe"), "int8") as model:
        greedy(model, left_padded())
        assert report(model).scratch_bytes == 0, "no kernel serves it"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_scratch_is_of_hopper() -> None:
    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    assert ops.scratch_bytes(torch.device("cuda")) == (ops.MAX_SCRATCH_BYTES if is_hopper else 0)
    assert ops.scratch_bytes(torch.device("cpu")) == 0


def test_a_report_is_data() -> None:
    model = models.family("jetmoe")
    with patched(model, "int4-token"):
        greedy(model, left_padded())
        result = report(model)
    assert isinstance(result, Report) and isinstance(result.layers[0], LayerReport)
    data = json.loads(json.dumps(result.to_dict()))
    assert data["layers"][1] == {
        "layer_idx": 1,
        "layer_type": "full_attention",
        "formats": "int4-token",
        "device": "cpu",
        "kernel": KERNEL["cpu"],
        "reason": "",
        "fallbacks": {LOOKED_INSIDE: 5},
        "reads": None,
        "why_general": "",
    }
    assert data["model"] == "JetMoeForCausalLM" and data["is_served"] is False
    assert data["environment"]["hf-kvquant"] == hf_kvquant.__version__


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a pipeline": (
        lambda: report("model"),  # type: ignore[arg-type]
        TypeError,
        "report: `model` must be a transformers PreTrainedModel, got str. Pass the model itself, not a pipeline",
    ),
    "another cache": (
        lambda: report(models.llama(), DynamicCache()),  # type: ignore[arg-type]
        TypeError,
        "report: `cache` must be a KVQuantCache or None, got DynamicCache. Other caches hold no codes: leave it out.",
    ),
    "an unpatched model": (
        lambda: report(models.llama()),
        ValueError,
        "report: `model` must be patched or come with a cache, got an unpatched LlamaForCausalLM alone. Call patch",
    ),
    "another model's": (
        lambda: report(models.llama(), KVQuantCache(models.llama(num_hidden_layers=3).config)),
        ValueError,
        "report: `cache` must have 2 layers like the model's own cache, got a cache with 3. Was it made for another",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case: str) -> None:
    call, error, message = REFUSED[case]
    with pytest.raises(error, match=re.escape(message)):
        call()


# --- what is installed ------------------------------------------------------------------------------------------------


def test_environment_says_how_to_get_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "extension", lambda: ImportError("no file"))
    monkeypatch.setattr(environment, "EVALUATION", ("lm-eval", "nobody-has-this"))
    monkeypatch.setenv("CXX", "no-such-compiler -O3")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert environment.environment()["CUDA kernels"] == "none: this torch is built for CPUs only"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    facts = environment.environment()
    assert facts["extension"].startswith("missing (no file)") and REINSTALL in facts["extension"]
    assert facts["CUDA kernels"].startswith("missing") and REINSTALL in facts["CUDA kernels"]
    assert facts["evaluation"].startswith("missing ") and "pip install 'hf-kvquant[eval]'" in facts["evaluation"]
    assert facts["to build"].startswith("C++ compiler missing, nvcc ")
    assert facts["torch"].startswith(f"{torch.__version__}, built for C")


@pytest.mark.parametrize("capability", [(9, 0), (8, 6)])
def test_environment_names_gpus(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    Gpu(monkeypatch, capability)
    facts = environment.environment()
    assert facts["CUDA kernels"] == "compute capabilities 90a"
    start = f"Some GPU ({capability[0]}.{capability[1]}), 80 GiB: "
    remedy = "Reinstall: HF_KVQUANT_CUDA_ARCHS=86 pip install --no-build-isolation . (8.0 or later)"
    expected = "supported" if capability == (9, 0) else f"not supported (they were built for 90a). {remedy}"
    assert facts["GPU 0"] == start + expected


def test_environment_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert environment.environment()["GPUs"] == "none found by this torch, built for CUDA 13.0"
    monkeypatch.setattr(torch.version, "cuda", None)
    assert environment.environment()["GPUs"] == "none: this torch is built for CPUs only"


def test_the_extra_is_that_of_the_package() -> None:
    text = (Path(__file__).resolve().parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    [line] = re.findall(r"^eval = \[(.*)\]$", text, flags=re.MULTILINE)
    assert [re.split("[=>]", name)[0] for name in re.findall(r'"([^"]+)"', line)] == list(environment.EVALUATION)


# --- in a notebook ----------------------------------------------------------------------------------------------------


def test_results_are_tables_in_a_notebook_and_one_line_elsewhere() -> None:
    """Without a tensor in either."""
    model = models.build("llama", hidden_size=128, max_position_embeddings=128)
    texts, tokenizer = [60 * models.SENTENCE], models.tokenizer(model_max_length=128)
    found = [
        hf_kvquant.smooth_attention(model, tokenizer, texts, "int4-token", window=64),
        hf_kvquant.run_preflight(model, "int4-token", tokenizer=tokenizer, texts=texts),
        hf_kvquant.report(hf_kvquant.patch(model, "int4-token")),
    ]
    lines = [repr(each) for each in found]
    for line, page in zip(lines, (each._repr_html_() for each in found), strict=True):
        assert "\n" not in line and len(line) < 150 and "tensor" not in line.lower()
        assert "tensor(" not in page and page.count("<tr>") >= 2 and page.count("<td>") % (page.count("<tr>") - 1) == 0
    smoothing, preflight, report = lines
    assert smoothing.startswith("<SmoothingResult: ") and " of 2 layers with factors, " in smoothing
    assert preflight.startswith("<Preflight: 'int4-token', ") and " nats per token, " in preflight
    assert report.startswith("<Report: LlamaForCausalLM, growing cache, ") and "2 quantised layers" in report
    assert "tensor" not in repr(found[0].layers[0])  # type: ignore[attr-defined]
