"""Models with quantised weights, as transformers loads them: the tokens of the unpatched model, and calibrated caches.

A part of the reference model is loaded with each library's config. Checkpoints for loaders that take only quantised
weights are made here: by compressed-tensors itself, and by packing the codes of GPTQ and AWQ. Libraries that are not
installed are skipped; `docs/quantized-weights.md` says which ran where.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import compare
import models
import pytest
import tolerances
import torch
from safetensors.torch import save_file
from test_capture import Recorded
from test_cli import run
from test_compile import compiled_for
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    QuantoConfig,
    TorchAoConfig,
)

import hf_kvquant
from hf_kvquant import (
    KVQuantCache,
    KVQuantConfig,
    key_transforms,
    load_smoothing,
    patch,
    patched,
    report,
    smooth_attention,
    unpatch,
    unsmooth,
)
from hf_kvquant.calibration.smoothing_file import FILE_NAME
from hf_kvquant.graphs import capture
from hf_kvquant.models import probing
from hf_kvquant.models.dequantized import dequantized_weight
from hf_kvquant.models.hashes import plain_tensors, weights_hash
from hf_kvquant.models.latent import latent_attentions
from hf_kvquant.models.probing import chunks_of
from hf_kvquant.models.rounding import rounded
from hf_kvquant.preflight.divergence import divergence
from hf_kvquant.transforms.centering import bias_centers
from hf_kvquant.transforms.of_model import transforms_of
from hf_kvquant.upstream.releases import CACHE, DO_MODELS_UPDATE_PAGES, cache_of, with_cache
from hf_kvquant_evals.injection import inject_key_outliers

# The libraries warn about their own use of PyTorch.
pytestmark = pytest.mark.filterwarnings("ignore")

REFERENCE = Path(__file__).resolve().parents[1] / "evals" / "reference_model"
PROMPT = "The river rises in the north of the country and flows south"
TEXT = (REFERENCE / "README.md").read_text(encoding="utf-8")
NEW_TOKENS = 10
GROUP = 32
ROWS = list(range(8))  # the order in which GPTQ packs eight codes into a number
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def loaded(path: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, **{"dtype": torch.float32, "device_map": "cpu", **options})


def torchao(name: str, **options: Any) -> Callable[..., Any]:
    def load(folder: Path, **how: Any) -> Any:
        quantization = pytest.importorskip("torchao.quantization")
        return loaded(
            folder / "plain", quantization_config=TorchAoConfig(getattr(quantization, name)(**options)), **how
        )

    return load


def bitsandbytes(**options: Any) -> Callable[..., Any]:
    def load(folder: Path, **how: Any) -> Any:
        pytest.importorskip("bitsandbytes")
        return loaded(folder / "plain", quantization_config=BitsAndBytesConfig(**options), **how)

    return load


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    return torch.cat([packed >> shift & 2**bits - 1 for shift in range(0, 8, bits)])


def quanto(weights: str) -> Callable[..., Any]:
    def load(folder: Path, **how: Any) -> Any:
        pytest.importorskip("optimum.quanto")
        from optimum.quanto.library import extensions

        # quanto would compile this, which takes 40 s.
        extensions.get_extension("quanto_cpp")._lib = SimpleNamespace(unpack=unpack)
        return loaded(folder / "plain", quantization_config=QuantoConfig(weights=weights), **how)

    return load


def compressed_tensors(scheme: str) -> Callable[..., Any]:
    def load(folder: Path, **how: Any) -> Any:
        pytest.importorskip("compressed_tensors")
        if not (folder / scheme).exists():
            compress(folder / scheme, scheme)
        return loaded(folder / scheme, **how)

    return load


def compress(folder: Path, scheme: str) -> None:
    """Write the plain model in the format of compressed-tensors, its weights rounded to nearest."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    model = loaded(folder.parent / "plain")
    groups = {"group_0": preset_name_to_scheme(scheme, ["Linear"])}
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            args = module.quantization_scheme.weights
            weight = module.weight.detach()
            grouped = weight.unflatten(1, (-1, args.group_size)) if args.strategy == "group" else weight.unsqueeze(1)
            scale, _ = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
            module.weight_scale.data.copy_(scale)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)


def gptqmodel(method: str) -> Callable[..., Any]:
    def load(folder: Path, **how: Any) -> Any:
        pytest.importorskip("gptqmodel")
        if not (folder / method).exists():
            write_packed(folder / method, method)
        return loaded(folder / method, **how)

    return load


def packed(codes: Tensor, order: list[int], dim: int) -> Tensor:
    """Eight codes of 4 bits a number, along a dimension."""
    parts = codes.movedim(dim, -1).unflatten(-1, (-1, 8))[..., order].long()
    numbers = sum(parts[..., place] << (4 * place) for place in range(8))
    numbers = torch.where(numbers >= 2**31, numbers - 2**32, numbers).int()
    return numbers.movedim(-1, dim).contiguous()


def write_packed(folder: Path, method: str) -> None:
    """Write the plain model as a checkpoint of GPTQ (version 1) or AWQ, its weights rounded to nearest."""
    model = loaded(folder.parent / "plain")
    tensors = {}
    for name, weight in model.state_dict().items():
        if not name.endswith("proj.weight"):
            tensors |= {} if name == "lm_head.weight" else {name: weight.clone()}
            continue
        base, groups = name.removesuffix("weight"), weight.unflatten(1, (-1, GROUP))
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scale = ((high - low) / 15).clamp(min=1e-8).half()
        zero = (-low / scale.float()).round().clamp(0, 15)
        codes = ((groups / scale.float()[..., None]).round() + zero[..., None]).clamp(0, 15).flatten(1)
        tensors[base + "scales"] = scale.T.contiguous()
        if method == "gptq":
            tensors[base + "qweight"] = packed(codes.T, ROWS, 0)
            tensors[base + "qzeros"] = packed((zero.T - 1) % 16, ROWS, 1)
            tensors[base + "g_idx"] = (torch.arange(weight.shape[1]) // GROUP).int()
        else:
            tensors[base + "qweight"] = packed(codes.T, AWQ_ORDER, 1)
            tensors[base + "qzeros"] = packed(zero.T, AWQ_ORDER, 1)
    options = {"gptq": {"desc_act": False, "sym": False}, "awq": {"version": "gemm", "zero_point": True}}[method]
    quantization = {"quant_method": method, "bits": 4, "group_size": GROUP, **options}
    folder.mkdir()
    config = json.dumps({**model.config.to_dict(), "quantization_config": quantization})
    (folder / "config.json").write_text(config, encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


METHODS: dict[str, Callable[..., Any]] = {
    "torchao int4": torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4),
    "torchao int8": torchao("Int8WeightOnlyConfig"),
    "torchao int8 on int4": torchao("Int8DynamicActivationIntxWeightConfig"),
    "torchao fp8": torchao("Float8WeightOnlyConfig"),
    "bitsandbytes nf4": bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "bitsandbytes int8": bitsandbytes(load_in_8bit=True),
    "quanto int4": quanto("int4"),
    "quanto int8": quanto("int8"),
    "compressed-tensors fp8": compressed_tensors("FP8_DYNAMIC"),
    "compressed-tensors w4a16": compressed_tensors("W4A16"),
    "compressed-tensors w8a8": compressed_tensors("W8A8"),
    "gptq": gptqmodel("gptq"),
    "awq": gptqmodel("awq"),
}


FEW = pytest.mark.full(
    when=lambda load: load in ("torchao fp8", "torchao int8 on int4", "quanto int4") or load.endswith(("fp8", "w8a8")),
    reason="other formats of the same libraries, which differ in the tokens alone",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the checkpoints are: the first layers of the reference model, with outlier channels in their keys.

    Quantised ones are made when they are first needed.
    """
    made = tmp_path_factory.mktemp("checkpoints")
    model = loaded(REFERENCE, num_hidden_layers=2)
    inject_key_outliers(model)
    model.save_pretrained(made / "plain")
    return made


@pytest.fixture(params=METHODS)
def load(request: pytest.FixtureRequest, folder: Path) -> Callable[..., Any]:
    """Loads a model anew."""
    return lambda **how: METHODS[request.param](folder, **how)


@pytest.fixture(autouse=True)
def runners(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What takes the place of a CUDA graph on a CPU."""
    monkeypatch.setitem(capture.RUNNERS, "cpu", Recorded)
    yield


def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(REFERENCE)


def inputs() -> dict[str, Tensor]:
    return dict(tokenizer()(PROMPT, return_tensors="pt"))


def tokens_of(model: Any, **options: Any) -> Tensor:
    tokens: Tensor = model.generate(**inputs(), max_new_tokens=NEW_TOKENS, do_sample=False, **options)
    return tokens


def numbers_of(model: Any) -> list[Tensor]:
    tensors = (*model.parameters(), *model.buffers())
    return [part.detach().clone() for tensor in tensors for part in plain_tensors(tensor)]


def calibrated(model: Any) -> Any:
    options: dict[str, Any] = {"num_tokens": 512, "window": 256, "candidates": (0.5,), "progress": False}
    return smooth_attention(model, tokenizer(), [TEXT], "int4-token", **options)


def check_factors_help(model: Any) -> None:
    """Compare a calibrated model with the same factors and centres in plain PyTorch, and with neither."""
    transforms = key_transforms(model, "int4-token")
    exact = log_probs(model, DynamicCache(config=model.config))
    expected = log_probs(model, models.ReferenceCache(model.config, "int4-token", key_transforms=transforms))
    rough = log_probs(model, models.ReferenceCache(model.config, "int4-token", key_transforms={}))
    with patched(model, "int4-token"):
        found = log_probs(model, KVQuantCache(model.config, "int4-token", key_transforms=transforms))
    assert divergence(exact, found).mean() < 0.2 * divergence(exact, rough).mean()
    # Not to the bit: sums in another order may move an 8-bit code of an activation, and all after it.
    assert divergence(expected, found).mean() < 0.2 * divergence(exact, expected).mean()


@torch.no_grad()
def log_probs(model: Any, cache: Any, first_chunk: int = 16, tokens: int = 48) -> Tensor:
    """What a model says of a text, `[tokens, vocabulary]`, read token by token behind a first chunk."""
    ids = tokenizer()(TEXT[:1000], return_tensors="pt").input_ids[:, :tokens]
    chunks = chunks_of(ids, first_chunk, 1)
    return torch.cat([model(chunk, **with_cache(cache), use_cache=True).logits for chunk in chunks], 1)[0].log_softmax(
        -1
    )


# --- tokens -----------------------------------------------------------------------------------------------------------


def test_tokens_of_the_unpatched_model(load: Callable[..., Any]) -> None:
    model = load()
    growing = tokens_of(model)
    static = tokens_of(model, cache_implementation="static", disable_compile=True)
    before = numbers_of(model)
    with patched(model, "none"):
        compare.assert_same(tokens_of(model), growing, "growing")
    with patched(model, {"preset": "none", "static": True}):
        compare.assert_same(tokens_of(model, disable_compile=True), static, "static")
    patch(model, {"preset": "none", "capture": True})
    if model.hf_quantizer.is_compileable:
        compare.assert_same(tokens_of(model), static, "captured")
    else:
        with pytest.raises(NotImplementedError, match="its quantised weights do not work in a static graph"):
            tokens_of(model)
    patch(model, "int4-token")
    tokens_of(model)
    unpatch(model)
    for now, then in zip(numbers_of(model), before, strict=True):
        assert torch.equal(now, then)
    compare.assert_same(tokens_of(model), growing, "unpatched")


@pytest.mark.full(
    when=lambda load: (
        load not in ("torchao int8", "bitsandbytes nf4", "quanto int8", "compressed-tensors w4a16", "gptq")
    ),
    reason="other formats of the same libraries, each of which is compiled for seconds",
)
def test_compiled_tokens_of_the_unpatched_model(load: Callable[..., Any]) -> None:
    model = load()
    static = tokens_of(model, cache_implementation="static", disable_compile=True)
    compiled = compiled_for("aot_eager")
    compiled["compile_config"].fullgraph = False  # as generate's own; compressed-tensors breaks the graph
    with patched(model, {"preset": "none", "static": True}):
        if model.hf_quantizer.is_compileable:
            compare.assert_same(tokens_of(model, **compiled), static, "compiled")
        else:
            pytest.skip("transformers compiles nothing with such weights")


# --- latents (MLA), which are absorbed through the weight of `kv_b_proj` ---------------------------------------------

LATENT_SIZES = {"kv_lora_rank": 128, "q_lora_rank": 128, "hidden_size": 128, "intermediate_size": 128, "v_head_dim": 32}
# What these libraries do to inputs, too, absorbed attention leaves out.
ROUNDS_INPUTS = "torchao int8 on int4", "compressed-tensors fp8", "compressed-tensors w8a8"


@pytest.fixture(scope="module")
def latent_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("latents")
    options = {**models.FAMILIES["minicpm3"].options, **LATENT_SIZES}
    models.build("minicpm3", torch.float32, None, **options).save_pretrained(made / "plain")
    return made


@pytest.mark.parametrize("method", METHODS)
def test_latents_are_absorbed(method: str, latent_folder: Path) -> None:
    model, prompts = METHODS[method](latent_folder), models.left_padded()
    expected = models.greedy(
        model, prompts, **with_cache(models.ReferenceCache(model.config, "int8", mask=prompts["attention_mask"]))
    )
    with patched(model, "int8"):
        output = models.greedy(model, prompts)
    assert not any(storage.tally.fallbacks for storage in cache_of(output).storages)
    compare.assert_same(output.sequences, expected.sequences, "tokens")
    if method not in ROUNDS_INPUTS:
        bound = tolerances.model_bound(models.logits(expected), models.logits(expected), torch.float32)
        compare.assert_close(models.logits(output), models.logits(expected), bound, "logits")
    for module in latent_attentions(model):
        weight = dequantized_weight(module.kv_b_proj, module.kv_lora_rank, module.kv_a_layernorm.weight)
        inputs_of_layer = torch.randn(32, module.kv_lora_rank)
        made, rounded_inputs = inputs_of_layer @ weight.t(), module.kv_b_proj(inputs_of_layer)
        limit = 0.03 if method in ROUNDS_INPUTS else 1e-6  # 8-bit floats with 3 bits of mantissa: 0.027
        assert torch.linalg.vector_norm(made - rounded_inputs) < limit * torch.linalg.vector_norm(rounded_inputs)


@pytest.mark.parametrize("method", [name for name in METHODS if name not in ROUNDS_INPUTS])
def test_latents_are_not_calibrated(method: str, latent_folder: Path) -> None:
    model = METHODS[method](latent_folder)
    models.greedy(model, models.left_padded())  # compressed-tensors decompresses weights
    before = numbers_of(model)
    with pytest.raises(NotImplementedError) as raised:
        smooth_attention(model, models.tokenizer(), [30 * models.SENTENCE], "int8", num_tokens=512, window=64)
    assert str(raised.value) == (
        "smooth_attention: `model` must have a layer whose latents can be calibrated, got MiniCPM3ForCausalLM with "
        "none (its kv_b_proj is quantised, so nothing can be folded into it). Leave it as it is."
    )
    assert all(torch.equal(now, then) for now, then in zip(numbers_of(model), before, strict=True))


@pytest.mark.skipif(not DO_MODELS_UPDATE_PAGES, reason="attention gets keys and values made of latents")
@pytest.mark.parametrize("method", [name for name in METHODS if name not in ROUNDS_INPUTS])
def test_latents_in_pages(method: str, latent_folder: Path) -> None:
    model, prompts = METHODS[method](latent_folder), [[3, 4, 5, 6, 7, 8, 9], [10, 11]]
    settings = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(page_size=128, num_blocks=8)
    with patched(model, "int8"):
        made = model.generate_batch(prompts, settings, continuous_batching_config=batching)
        answers = [output.generated_tokens for output in made.values()]
        alone = [model.generate(torch.tensor([prompt]), settings)[0, len(prompt) :].tolist() for prompt in prompts]
    assert answers == alone


# --- calibration ------------------------------------------------------------------------------------------------------


@pytest.mark.full(
    when=lambda load: load in ("torchao fp8", "torchao int8 on int4", "quanto int4", "compressed-tensors fp8"),
    reason="other formats of the same libraries; w8a8 is one that quantises activations",
)
def test_caches_apply_the_factors(load: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load()
    tokens, before = tokens_of(model), numbers_of(model)
    with caplog.at_level(logging.WARNING, "hf_kvquant"):
        result = calibrated(model)
    (record,) = (record for record in caplog.records if record.name.startswith("hf_kvquant"))
    assert "must have plain weights in float32" in record.getMessage()
    assert record.getMessage().endswith("Factors are applied by caches instead.")
    assert {layer.placement for layer in result.layers} == {"caches"} and result.num_smoothed > 0
    for now, then in zip(numbers_of(model), before, strict=True):
        assert torch.equal(now, then)
    check_factors_help(model)
    result.save(tmp_path / "factors")
    other = load()
    load_smoothing(other, tmp_path / "factors")
    for name in ("centers", "smoothing"):
        of_other, own = getattr(transforms_of(other), name), getattr(transforms_of(model), name)
        assert own.keys() == of_other.keys() and all(torch.equal(own[index], of_other[index]) for index in own)
    unsmooth(model)
    assert transforms_of(model).centers is None and not transforms_of(model).smoothing
    compare.assert_same(tokens_of(model), tokens, "tokens")


@FEW
def test_folding_is_refused(load: Callable[..., Any]) -> None:
    model = load()
    tokens_of(model)  # some weights are unpacked or packed in the first forward
    before = numbers_of(model)
    with pytest.raises(NotImplementedError, match=r"must have plain weights in .* Or use mode='online'"):
        smooth_attention(model, tokenizer(), [TEXT], "int4-token", mode="fold", progress=False)
    with pytest.raises(
        NotImplementedError, match=r"rotate_values: `model` must have plain weights in .* behind values"
    ):
        hf_kvquant.rotate_values(model)
    for now, then in zip(numbers_of(model), before, strict=True):
        assert torch.equal(now, then)


def quantize_in_place(model: Any, name: str) -> None:
    """Quantise the weights of a model in memory, as a loader does."""
    if name.startswith("torchao"):
        quantization = pytest.importorskip("torchao.quantization")
        quantization.quantize_(model.model, quantization.Int8WeightOnlyConfig())
    else:
        quanto = pytest.importorskip("optimum.quanto")
        quanto.quantize(model, weights=quanto.qint8, exclude="lm_head")
        quanto.freeze(model)


def refuse_to_undo(model: Any, undo: Callable[[Any], Any]) -> None:
    before = numbers_of(model)
    with pytest.raises(
        ValueError, match=r"must have the weights that .* left, got .*quantised .*the original checkpoi"
    ):
        undo(model)
    for now, then in zip(numbers_of(model), before, strict=True):
        assert torch.equal(now, then)


@pytest.mark.parametrize("name", ["torchao int8", "quanto int8", "compressed-tensors w4a16", "gptq"])
def test_weights_quantised_after_calibration(name: str, folder: Path, tmp_path: Path) -> None:
    model = loaded(folder / "plain")
    result = calibrated(model)
    assert {layer.placement for layer in result.layers} == {"weights"} and result.centers()
    model.save_pretrained(tmp_path / "plain")
    result.save(tmp_path / "factors")
    reloaded = METHODS[name](tmp_path)
    load_smoothing(reloaded, tmp_path / "factors")
    found, expected = transforms_of(reloaded), transforms_of(model)
    assert found.centers is not None and expected.centers is not None and not found.smoothing
    assert all(torch.equal(found.centers[index], center) for index, center in expected.centers.items())
    tokens = tokens_of(patch(reloaded, "int4-token"))
    refuse_to_undo(reloaded, unsmooth)
    if name.startswith(("torchao", "quanto")):
        quantize_in_place(model, name)
        compare.assert_same(tokens_of(patch(model, "int4-token")), tokens, "tokens")
        refuse_to_undo(model, unsmooth)


@pytest.mark.parametrize("name", ["torchao int8", "quanto int8"])
def test_weights_quantised_after_rotation(name: str, folder: Path, tmp_path: Path) -> None:
    model = loaded(folder / "plain")
    hf_kvquant.rotate_values(model)
    model.save_pretrained(tmp_path / "plain")
    quantize_in_place(model, name)
    expected = tokens_of(patch(METHODS[name](tmp_path), "int4-token"))
    compare.assert_same(tokens_of(patch(model, "int4-token")), expected, "tokens")
    refuse_to_undo(model, hf_kvquant.unrotate_values)


def test_factors_of_another_calibration_than_that_before_quantisation(folder: Path, tmp_path: Path) -> None:
    model = loaded(folder / "plain")
    result = calibrated(model)
    model.save_pretrained(tmp_path / "plain")
    dataclasses.replace(result, folded_hash="0" * 64).save(tmp_path / "factors")
    other = METHODS["torchao int8"](tmp_path)
    with pytest.raises(ValueError, match=r"whose hash after folding differs from that in the model's config\. Use the"):
        load_smoothing(other, tmp_path / "factors")
    assert transforms_of(other).centers is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["torchao int8", "quanto int4", "quanto int8"])
def test_weights_in_other_dtypes_are_calibrated(name: str, dtype: torch.dtype, folder: Path) -> None:
    model = METHODS[name](folder, dtype=dtype)
    assert calibrated(model).num_smoothed > 0
    unsmooth(model)


@FEW
def test_preflight(load: Callable[..., Any]) -> None:
    model = load()
    result = hf_kvquant.run_preflight(model, "int8", tokenizer=tokenizer(), texts=[TEXT[:2000]], progress=False)
    assert result.is_safe and result.kld is not None and result.kld < 0.05
    assert "Unknown: run_preflight: `model` must have plain weights" in result.report()
    assert all(layer.signals.channel_ratio is None for layer in result.layers)


# --- which weights a file is for --------------------------------------------------------------------------------------


@FEW
def test_a_saved_cache_knows_the_weights(load: Callable[..., Any], tmp_path: Path) -> None:
    model = load()
    cache = KVQuantCache(model.config, "int8")
    with patched(model, "int8"):
        expected = tokens_of(model, **with_cache(cache))
    cache.crop(len(inputs()["input_ids"][0]) - 1 - (cache.get_seq_length()))
    cache.save(tmp_path / "cache", model)
    other = load()  # which has not run yet
    found = KVQuantCache.load(tmp_path / "cache", other)
    with patched(other, "int8"):
        compare.assert_same(tokens_of(other, **with_cache(found)), expected, "tokens")


def test_a_hash_sees_the_codes_of_weights(folder: Path) -> None:
    model = METHODS["quanto int8"](folder)
    before = weights_hash(model)
    assert weights_hash(METHODS["quanto int8"](folder)) == before
    model.model.layers[1].self_attn.v_proj.weight._data.neg_()
    assert weights_hash(model) != before


def test_configs_of_calibrated_models_are_unmarked(folder: Path) -> None:
    model = METHODS["torchao int8"](folder)
    calibrated(model)
    assert "hf_kvquant_smoothing" not in model.config.to_dict()
    assert KVQuantConfig.for_model(model, "int8", tokenizer=tokenizer(), texts=[TEXT[:2000]]) is not None


@pytest.mark.parametrize("name", ["torchao int8", "compressed-tensors w4a16"])
def test_the_command_calibrates_quantised_checkpoints(
    name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, source, output = METHODS[name](folder), str(tmp_path / "model"), str(tmp_path / "calibrated")
    model.save_pretrained(source)
    tokenizer().save_pretrained(source)
    options = ["--text-file", str(REFERENCE / "README.md"), "--tokens", "512", "--window", "256"]
    code, _, error = run(capsys, "calibrate", source, *options, "--output", output)
    if name.startswith("torchao"):  # which transformers cannot save again
        assert code == 2 and f"{source} must have weights that transformers can save, got others (NotImpl" in error
        shutil.copy(Path(output) / FILE_NAME, source)
        output = source
    else:
        assert code == 0
    code, found, _ = run(
        capsys, "generate", output, "--prompt", PROMPT, "--preset", "int4-token", "--max-new-tokens", "4"
    )
    assert code == 0 and found


KV_SCALE = 0.05
KV_SCHEME: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


class Rounding(DynamicCache):
    """What a `kv_cache_scheme` does, in plain PyTorch: keys and values on a grid of float8, scaled."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        codes = ((x / KV_SCALE).clamp(-448, 448).to(torch.float8_e4m3fn) for x in (key_states, value_states))
        return super().update(*(each.float() * KV_SCALE for each in codes), *args, **kwargs)


@pytest.fixture(scope="module")
def rounding(folder: Path) -> Path:
    """A checkpoint with plain weights that rounds keys and values to float8."""
    model, made = loaded(folder / "plain"), folder / "rounding"
    names = [f"model.layers.{index}.self_attn.{side}_scale" for index in range(2) for side in "kv"]
    scales = {name: torch.tensor([KV_SCALE]) for name in names}
    quantization = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}}
    quantization |= {"kv_cache_scheme": KV_SCHEME}
    made.mkdir()
    config = json.dumps({**model.config.to_dict(), "quantization_config": quantization})
    (made / "config.json").write_text(config, encoding="utf-8")
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file({**state, **scales}, made / "model.safetensors", metadata={"format": "pt"})
    return made


def logits_of(model: Any, cache: Any) -> list[Tensor]:
    return [probing.forward(model, chunk, cache=cache) for chunk in chunks_of(inputs()["input_ids"], 4, 4)]


def hook_for_5_24(model: Any) -> None:
    """Do what compressed-tensors does with older releases, under the new name of a cache."""
    from compressed_tensors.modeling import QuantizedKVCache
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, QuantizationStatus

    def replace(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        module.kv_cache.add_past_key_values(kwargs[CACHE])
        return args, {**kwargs, CACHE: module.kv_cache}

    for layer in model.model.layers:
        attention = layer.self_attn
        scheme = QuantizationArgs(**KV_SCHEME)
        attention.quantization_scheme = QuantizationScheme(targets=[], input_activations=scheme)
        attention.quantization_status = QuantizationStatus.COMPRESSED
        attention.k_scale = attention.v_scale = nn.Parameter(torch.tensor([KV_SCALE]))
        attention.register_module("kv_cache", QuantizedKVCache(model.config, attention))
        attention.register_forward_pre_hook(replace, with_kwargs=True)


def keys_of(model: Any) -> Tensor:
    """The keys of the last layer in the cache of a call."""
    output = model.generate(**inputs(), max_new_tokens=NEW_TOKENS, do_sample=False, return_dict_in_generate=True)
    keys: Tensor = cache_of(output).layers[-1].keys
    return keys


def check_logits(model: Any, plain: Any, cache: DynamicCache) -> None:
    """A model over transformers' cache gives what the plain one gives over a cache."""
    both = zip(logits_of(model, DynamicCache()), logits_of(plain, cache), strict=True)
    for index, (got, expected) in enumerate(both):
        compare.assert_same(got, expected, f"logits of chunk {index}")


def test_which_releases_round_by_the_scales_of_a_checkpoint(folder: Path, rounding: Path) -> None:
    """compressed-tensors 0.20 looks for the name that a cache had before transformers 5.24."""
    pytest.importorskip("compressed_tensors")
    model, is_old = loaded(rounding), CACHE == "past_key_values"
    assert bool(rounded(model)) == is_old
    check_logits(model, loaded(folder / "plain"), Rounding() if is_old else DynamicCache())


def test_the_rounding_of_a_checkpoint_is_said_and_can_be_left_out(folder: Path, rounding: Path) -> None:
    pytest.importorskip("compressed_tensors")
    model, plain = loaded(rounding), loaded(folder / "plain")
    if not rounded(model):
        hook_for_5_24(model)
    check_logits(model, plain, Rounding())
    said = "The checkpoint rounds keys and values to 8-bit float before they are quantised here. "
    with patched(model, "int4-token"):
        assert said in str(report(model)) and report(model).is_served
        assert not torch.equal(keys_of(model), keys_of(patch(plain, "int4-token")))
    for _ in range(2):  # patching again changes nothing
        patch(model, "int4-token", checkpoint_rounding=False)
        assert not rounded(model) and "own rounding of keys and values is left out" in str(report(model))
        compare.assert_same(keys_of(model), keys_of(plain), "keys of the last layer")
    with patched(model, "none"), patched(plain, "none"):
        check_logits(model, plain, DynamicCache())
    with patched(model, "int4-token", checkpoint_rounding=True):
        assert rounded(model)
    assert not rounded(model), "as before the block"
    patch(model, "int8")
    assert rounded(model), "patching again replaces what was asked for"
    patch(model, "int8", checkpoint_rounding=False)
    unpatch(model)
    assert rounded(model) and not any("quantization_enabled" in vars(module) for module in model.modules())
    check_logits(model, unpatch(plain), Rounding())


class Packed(nn.Module):
    """A linear layer without parameters, as of GPTQ and AWQ: codes in a buffer of integers."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.step = float(linear.weight.detach().abs().max()) / 2**20
        self.register_buffer("qweight", (linear.weight.detach() / self.step).round().int())
        self.register_buffer("bias", linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.qweight * self.step, self.bias)


def test_centres_of_packed_weights() -> None:
    model = models.build("qwen2")
    expected = bias_centers(model)
    for layer in model.model.layers:
        layer.self_attn.k_proj = Packed(layer.self_attn.k_proj)
    found = bias_centers(model)
    assert found.keys() == expected.keys() and found
    for index, center in found.items():
        torch.testing.assert_close(center, expected[index])
