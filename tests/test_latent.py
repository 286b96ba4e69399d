"""Latents (MLA): they are kept as codes, and attention over them is absorbed.

`test_generate.py` runs every family over a `ReferenceCache`, which gives the model's own attention dequantised latents
to expand. Here is what is special about them.
"""

from __future__ import annotations

import copy
import functools
import logging
import pickle
import re
from pathlib import Path
from typing import Any

import compare
import models
import pytest
import tolerances
import torch
import torch.nn.functional as F
from accelerate import cpu_offload
from models import ReferenceCache, greedy, left_padded, logits
from peft import LoraConfig, get_peft_model
from test_preflight import text
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.kimi_k25.configuration_kimi_k25 import Kimi_K25Config, Kimi_K25VisionConfig
from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25ForConditionalGeneration

import hf_kvquant
from hf_kvquant import PRESETS, KVQuantCache, KVQuantConfig, patched
from hf_kvquant.attention.latent import largest_absorbed
from hf_kvquant.common.errors import PreflightError
from hf_kvquant.models.dequantized import dequantized_weight
from hf_kvquant.models.latent import latent_attentions
from hf_kvquant.preflight.result import Preflight, name_of
from hf_kvquant.presets import latent_formats, preset_formats
from hf_kvquant.report import _served_over_latents
from hf_kvquant.spec.formats import KVFormat
from hf_kvquant.storage.layer_store import LayerStore
from hf_kvquant.storage.tally import _log_fallback
from hf_kvquant.upstream.releases import cache_of, with_cache
from hf_kvquant_evals.perplexity.gate import Gate
from hf_kvquant_evals.perplexity.perplexity_run import sizes_of

SERVED = [name for name in PRESETS if name not in ("none", "k8v4", "k4v2", "int2")]
# The first layer has no experts, whose choice would turn a rounding into another token, and the second is unquantised.
FIRST_LAYER = {"preset": "int4-token", "layers": {1: "none"}}
CONFIGS: dict[str, Any] = {
    "none": "none",
    "int8": {"preset": "int8", "layers": {1: "none"}},
    "int4": FIRST_LAYER,
    "static": {**FIRST_LAYER, "static": True},
    "windowed": {**FIRST_LAYER, "sink_length": 2, "residual_length": 3},
}
FEATURES: dict[str, dict[str, Any]] = {
    "sampling": {"do_sample": True, "top_k": 30, "temperature": 1.5},
    "samples": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5},
    "chunks": {"prefill_chunk_size": 4},
}


def deepseek(dtype: torch.dtype = torch.float32, attention: str | None = None, **options: Any) -> Any:
    """A tiny DeepSeek-V3 of its own, to be changed."""
    return models.build("deepseek_v3", dtype, attention, **{**models.FAMILIES["deepseek_v3"].options, **options})


def check_logits(output: Any, expected: Any, what: str = "logits") -> None:
    compare.assert_same(output.sequences, expected.sequences, f"{what}: tokens")
    bound = tolerances.model_bound(logits(expected), logits(expected), torch.float32)
    compare.assert_close(logits(output), logits(expected), bound, what)


def fallbacks(output: Any) -> list[str]:
    return [reason for storage in cache_of(output).storages for reason in storage.tally.fallbacks]


# --- what generate can do ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("config", CONFIGS)
def test_generate_features(config: str, feature: str) -> None:
    model, inputs, options = models.family("deepseek_v3"), left_padded(), FEATURES[feature]
    torch.manual_seed(5)
    simulated = ReferenceCache(model.config, CONFIGS[config], mask=inputs["attention_mask"])
    expected = greedy(model, inputs, **with_cache(simulated), **options)
    torch.manual_seed(5)
    with patched(model, CONFIGS[config]):
        output = greedy(model, inputs, **options)
    check_logits(output, expected)
    assert not fallbacks(output)


@pytest.mark.parametrize("preset", SERVED)
def test_presets(preset: str) -> None:
    config = {"preset": preset, "sink_length": 0, "residual_length": 0}
    models.check_against_reference(models.family("minicpm3"), config, left_padded())


@pytest.mark.parametrize("config", ["none", "int8", "static"])
def test_an_assistant(config: str) -> None:
    """Its proposals are taken back from latents, where they are wrong.

    The first ones come with the prompt and see it unquantised, so configs that cost more may have other tokens.
    """
    model, assistant, prompt = models.family("deepseek_v3"), models.build("llama", num_hidden_layers=1), left_padded(1)
    expected = greedy(model, prompt, **with_cache(ReferenceCache(model.config, CONFIGS[config])))
    with patched(model, CONFIGS[config]):
        output = greedy(model, prompt, assistant_model=assistant)
    compare.assert_same(output.sequences, expected.sequences, "tokens")


@pytest.mark.parametrize("config", CONFIGS)
def test_prompt_lookup(config: str) -> None:
    model, prompt = models.family("deepseek_v3"), {"input_ids": torch.tensor([[5, 9, 5, 9, 5, 9, 7, 5, 9]])}
    expected = greedy(model, prompt, **with_cache(ReferenceCache(model.config, CONFIGS[config])))
    with patched(model, CONFIGS[config]):
        output = greedy(model, prompt, prompt_lookup_num_tokens=3)
    compare.assert_same(output.sequences, expected.sequences, "tokens")


@pytest.mark.parametrize("size", [7, 40, 100])
def test_long_prompts_in_chunks(size: int) -> None:
    """Chunks of few tokens see codes; of more, their own tokens as they come; of too many, expanded latents."""
    model = deepseek(max_position_embeddings=512)
    most = [largest_absorbed(module) for module in latent_attentions(model)]
    assert most == [49, 49]  # 64 * (32 + 24) // (2 * 64 - 32 - 24), so 100 tokens are expanded
    inputs = left_padded(batch=2, tokens=250, pads=(11, 0))
    config = {**FIRST_LAYER, "sink_length": 4, "residual_length": 28}
    simulated = ReferenceCache(model.config, config, mask=inputs["attention_mask"])
    expected = greedy(model, inputs, prefill_chunk_size=size, **with_cache(simulated))
    with patched(model, config):
        output = greedy(model, inputs, prefill_chunk_size=size)
    check_logits(output, expected)
    assert not fallbacks(output)


def test_a_second_turn_and_a_mask_with_holes() -> None:
    model, inputs = models.family("deepseek_v3"), left_padded()
    new = torch.randint(3, 90, (3, 4))
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]])

    def chat(cache: Any, new_mask: Tensor) -> Any:
        first = greedy(model, inputs, 4, **with_cache(cache))
        ones = torch.ones((3, 4), dtype=torch.long)
        turn = {
            "input_ids": torch.cat([first.sequences, new], 1),
            "attention_mask": torch.cat([inputs["attention_mask"], ones, new_mask], 1),
        }
        return greedy(model, turn, 4, **with_cache(cache_of(first)))

    for new_mask in (torch.ones_like(mask), mask):
        expected = chat(ReferenceCache(model.config, FIRST_LAYER), new_mask)
        with patched(model, FIRST_LAYER):
            output = chat(None, new_mask)
        check_logits(output, expected)
        assert not fallbacks(output)


def test_a_file_continues_bit_for_bit(tmp_path: Path) -> None:
    model, inputs = models.family("deepseek_v3"), left_padded()
    with patched(model, "int4"):
        first = greedy(model, inputs, 4)
        cache_of(first).save(tmp_path / "latents.safetensors", model)
        again = KVQuantCache.load(tmp_path / "latents.safetensors", model)
        turn = {
            "input_ids": first.sequences,
            "attention_mask": torch.cat([inputs["attention_mask"], torch.ones((3, 4), dtype=torch.long)], 1),
        }
        expected = greedy(model, turn, 4, **with_cache(cache_of(first)))
        output = greedy(model, turn, 4, **with_cache(again))
    compare.assert_same(logits(output), logits(expected), "logits")
    assert again.layers[0].keys.shape == (3, 1, 16, 64) and again.layers[0].values.shape == (3, 1, 16, 16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("preset", ["int8", "int4-token"])
def test_half_precision(preset: str, dtype: torch.dtype) -> None:
    model = models.build("minicpm3", dtype, **models.FAMILIES["minicpm3"].options)
    models.check_against_reference(model, preset, left_padded(), copy.deepcopy(model).float())


def test_eager_attention_before_ours() -> None:
    model = models.build("minicpm3", attention="eager", **models.FAMILIES["minicpm3"].options)
    models.check_against_reference(model, "int8", left_padded())


def test_the_decoder_of_a_model_that_sees_pictures() -> None:
    """Kimi K2.5, whose text model is a DeepSeek-V3."""
    vision = Kimi_K25VisionConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    config = Kimi_K25Config(text_config=deepseek().config, vision_config=vision)
    torch.manual_seed(1234)
    model: Any = models.randomized(Kimi_K25ForConditionalGeneration(config)).eval()
    model.generation_config.eos_token_id = None
    expected = greedy(model, left_padded())
    with patched(model, "none"):
        output = greedy(model, left_padded())
    check_logits(output, expected)
    assert repr(cache_of(output).layers) == "[KVQuantLayer(none), KVQuantLayer(none)]"


# --- what the model looks like ----------------------------------------------------------------------------------------


def test_unpatch_restores_the_modules() -> None:
    model = deepseek()
    before = [dict(module.__dict__) for module in model.modules()]
    expected = greedy(model, left_padded())
    hf_kvquant.unpatch(hf_kvquant.patch(model, "int8"))
    assert [module.__dict__.keys() for module in model.modules()] == [each.keys() for each in before]
    compare.assert_same(logits(greedy(model, left_padded())), logits(expected), "logits")


def test_our_cache_in_a_model_that_is_not_patched() -> None:
    model, inputs = deepseek(), left_padded()
    output = greedy(model, inputs, **with_cache(KVQuantCache(model.config, FIRST_LAYER)))
    simulated = ReferenceCache(model.config, FIRST_LAYER, mask=inputs["attention_mask"])
    check_logits(output, greedy(model, inputs, **with_cache(simulated)))


def test_another_attention_set_later_gets_expanded_latents() -> None:
    model, inputs = deepseek(), left_padded()
    hf_kvquant.patch(model, FIRST_LAYER)
    model.set_attn_implementation("eager")
    output = greedy(model, inputs, **with_cache(KVQuantCache(model.config, FIRST_LAYER)))
    simulated = ReferenceCache(model.config, FIRST_LAYER, mask=inputs["attention_mask"])
    check_logits(output, greedy(model, inputs, **with_cache(simulated)))


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "file"]
)
def test_copies_have_weights_of_their_own(again: Any) -> None:
    model = hf_kvquant.patch(deepseek(), "int8")
    expected = greedy(model, left_padded())
    made = again(model)
    with torch.no_grad():
        for module in latent_attentions(model):
            module.kv_b_proj.weight.zero_()
    compare.assert_same(logits(greedy(made, left_padded())), logits(expected), "logits")


def test_new_weights_are_followed() -> None:
    model, other = hf_kvquant.patch(deepseek(), "int8"), deepseek()
    for parameter in other.parameters():
        parameter.data.mul_(1.125)
    greedy(model, left_padded())
    model.load_state_dict(other.state_dict())
    expected = greedy(hf_kvquant.patch(other, "int8"), left_padded())
    compare.assert_same(logits(greedy(model, left_padded())), logits(expected), "logits")


def adapted(model: Any) -> Any:
    torch.manual_seed(3)
    config = LoraConfig(r=4, target_modules=["kv_b_proj"], init_lora_weights=False)
    return get_peft_model(model, config).get_base_model()


def hooked(model: Any) -> Any:
    for module in latent_attentions(model):
        module.kv_b_proj.register_forward_hook(lambda module, inputs, output: output * 1.25)
    return model


def biased(model: Any) -> Any:
    for module in latent_attentions(model):
        module.kv_b_proj.bias = nn.Parameter(torch.randn(module.kv_b_proj.out_features))
    return model


def parametrized(model: Any) -> Any:
    for module in latent_attentions(model):
        register_parametrization(module.kv_b_proj, "weight", nn.Tanh())
    return model


def replaced(model: Any) -> Any:
    for module in latent_attentions(model):
        module.kv_b_proj.forward = lambda x, weight=module.kv_b_proj.weight: F.linear(x, 2 * weight)
    return model


class Squared(nn.Linear):
    """No matrix has the results of this."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.square())


def of_a_class(model: Any, is_quantized: bool = False) -> Any:
    for module in latent_attentions(model):
        weight = module.kv_b_proj.weight
        module.kv_b_proj = Squared(weight.shape[1], weight.shape[0], bias=False)
        if is_quantized:
            module.kv_b_proj.register_buffer("codes", torch.zeros(1, dtype=torch.int8))
    return model


def offloaded(model: Any) -> Any:
    for module in latent_attentions(model):
        cpu_offload(module.kv_b_proj, execution_device=torch.device("cpu"))
    return model


EXPANDED = {
    "offloaded": (offloaded, "kv_b_proj has hooks, so latents are expanded"),
    "parametrized": (parametrized, "kv_b_proj has a parametrization, so latents are expanded"),
    "replaced": (replaced, "kv_b_proj has a forward of its own, so latents are expanded"),
    "of a class": (of_a_class, "kv_b_proj is of the type test_latent.Squared, so latents are expanded"),
    "no matrix": (
        functools.partial(of_a_class, is_quantized=True),
        "kv_b_proj is quantised, and no matrix has its results, so latents are expanded",
    ),
    "adapted": (adapted, "kv_b_proj has an adapter, so latents are expanded"),
    "hooked": (hooked, "kv_b_proj has hooks, so latents are expanded"),
    "biased": (biased, "kv_b_proj has a bias, so latents are expanded"),
}


class Coded(nn.Module):
    """A projection whose weight is codes and scales, and whose inputs are rounded or not, by no library."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("codes", (weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.codes * self.scale)


def coded(model: Any) -> Any:
    for module in latent_attentions(model):
        module.kv_b_proj = Coded(module.kv_b_proj.weight.detach())
    return model


def test_quantised_projections_are_absorbed_and_followed() -> None:
    model, inputs, seen = hf_kvquant.patch(coded(deepseek()), FIRST_LAYER), left_padded(), []
    for _ in range(2):
        simulated = ReferenceCache(model.config, FIRST_LAYER, mask=inputs["attention_mask"])
        output = greedy(model, inputs)
        assert not fallbacks(output)
        check_logits(output, greedy(model, inputs, **with_cache(simulated)))
        seen.append(logits(output))
        with torch.no_grad():
            for module in latent_attentions(model):
                module.kv_b_proj.codes.div_(2, rounding_mode="trunc")
    assert not torch.equal(*seen)


class Blocks(nn.Module):
    """8-bit floats with a scale for each block, and inputs that are divided by the largest number of their block."""

    def __init__(self, block_size: tuple[int, int] | None, shape: tuple[int, int] = (80, 100)) -> None:
        super().__init__()
        self.block_size = block_size
        weight = torch.randn(shape).to(torch.float8_e4m3fn)
        self.weight = nn.Parameter(weight, requires_grad=False)
        blocks = (
            () if block_size is None else [-(-size // block) for size, block in zip(shape, block_size, strict=True)]
        )
        self.weight_scale_inv = nn.Parameter(torch.rand(blocks) + 0.5, requires_grad=False)

    def dequantized(self) -> Tensor:
        weight = self.weight.float()
        if self.block_size is None:
            return weight * self.weight_scale_inv
        rows, columns = (torch.arange(size) // block for size, block in zip(weight.shape, self.block_size, strict=True))
        return weight * self.weight_scale_inv[rows][:, columns]

    def forward(self, x: Tensor) -> Tensor:
        blocks = x.split(self.block_size[1] if self.block_size else x.shape[-1], -1)
        largest = [block.abs().amax(-1, keepdim=True) / 448 for block in blocks]
        coded = [(block / scale).to(torch.float8_e4m3fn) for block, scale in zip(blocks, largest, strict=True)]
        rounded = [block.float() * scale for block, scale in zip(coded, largest, strict=True)]
        return F.linear(torch.cat(rounded, -1), self.dequantized())


@pytest.mark.parametrize("block_size", [None, (32, 48), (128, 128)])
def test_blocks_of_8_bit_floats(block_size: tuple[int, int] | None) -> None:
    torch.manual_seed(0)
    layer = Blocks(block_size)
    if block_size == (32, 48):
        assert not layer(torch.eye(100)).isfinite().all(), "a block of zeros is divided by zero"
    weight = dequantized_weight(layer, 100, torch.zeros(1))
    compare.assert_same(weight, layer.dequantized(), "weight")


@pytest.mark.parametrize("case", EXPANDED)
def test_other_projections_are_called(case: str, caplog: pytest.LogCaptureFixture) -> None:
    change, reason = EXPANDED[case]
    model, inputs = change(deepseek()), left_padded()
    simulated = ReferenceCache(model.config, FIRST_LAYER, mask=inputs["attention_mask"])
    expected = greedy(model, inputs, **with_cache(simulated))
    _log_fallback.cache_clear()
    with caplog.at_level(logging.WARNING, "hf_kvquant"), patched(model, FIRST_LAYER):
        output = greedy(model, inputs)
    check_logits(output, expected)
    assert set(fallbacks(output)) == {reason}
    assert f"attention runs on dequantised tensors: {reason}. Correct, slower." in caplog.text


def test_a_report() -> None:
    model = models.family("deepseek_v3")
    with patched(model, "int4"):
        lines = str(hf_kvquant.report(model)).splitlines()
    assert lines[2].split("  ")[0] == "0-1"
    for part in (
        "latent int4-head-asymmetric, rope part int8-head-symmetric, first 4 and last 28 tokens dense",
        "CPU kernel, ",
    ):
        assert part in lines[2]
    # On any GPU, of 64 channels; a CPU has a kernel.
    formats = latent_formats("test", preset_formats("int8"), 64)
    kernel, reason = _served_over_latents(formats, torch.device("cuda", 0), (64, 16), torch.bfloat16)
    assert kernel == "PyTorch, absorbed"
    assert reason.startswith("no compiled kernel attends to latents (MLA) of this format on cuda")


# --- formats ----------------------------------------------------------------------------------------------------------


def test_formats() -> None:
    none, int8, grouped = KVFormat("none"), KVFormat("int8"), KVFormat("int4", "group", 128, symmetric=False)
    made = {name: latent_formats("test", preset_formats(name), 512) for name in ("none", *SERVED)}
    assert (made["int8"].key, made["int8"].value, made["int8"].transforms) == (int8, none, ("rotate",))
    for name in ("int4", "int4-channel", "int4-token"):
        assert (made[name].key, made[name].value, made[name].transforms) == (grouped, int8, ("rotate",))
    assert made["int4-g32"].key == KVFormat("int4", "group", 32, symmetric=False)
    assert (made["fp8"].key, made["fp8"].value, made["fp8"].transforms) == (KVFormat("fp8"), none, ())
    assert made["none"] == preset_formats("none")
    assert (made["int4"].sink_length, made["int4"].residual_length) == (4, 28)


def test_bytes_of_a_token() -> None:
    """Of a latent of 512 channels and a rope part of 64, at 16 bits each 1,152."""
    config = AutoConfig.for_model("deepseek_v3", num_hidden_layers=1)
    sizes = {}
    for preset in ("none", "int8", "int4", "int4-g32"):
        cache = KVQuantCache(
            config, {"preset": preset, "sink_length": 0, "residual_length": 0} if preset[3:] else "none"
        )
        cache.layers[0].lazy_initialization(torch.zeros((1, 1, 0, 512)).half(), torch.zeros((1, 1, 0, 64)).half())
        sizes[preset] = cache.bytes_per_token
    assert sizes == {"none": 1152, "int8": 642, "int4": 338, "int4-g32": 386}


# --- on GPUs ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("preset", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("rank", [256, 512])
def test_kernels_on_a_gpu(rank: int, preset: str) -> None:
    """Steps run the kernel, with the logits of the model's own attention over dequantised latents."""
    sizes = {**models.FAMILIES["minicpm3"].options, "kv_lora_rank": rank, "qk_rope_head_dim": 64}
    model = models.build("minicpm3", torch.bfloat16, None, **sizes).cuda()
    inputs, config = left_padded(), {"preset": preset}
    expected = greedy(model, inputs, **with_cache(ReferenceCache(model.config, config)))
    outputs = {}
    for name, further in (("plain", {}), ("static", {"static": True})):
        with patched(model, {**config, **further}):
            outputs[name] = greedy(model, inputs, new_tokens=40)
        assert not fallbacks(outputs[name])
    served = {storage.serves_latent(torch.bfloat16) for storage in cache_of(outputs["plain"]).storages}
    assert served == {True}
    bound = tolerances.model_bound(logits(expected), logits(expected), torch.bfloat16)
    for name, output in outputs.items():  # the first step after the prompt; later ones may have other tokens
        compare.assert_close(logits(output)[:, :2], logits(expected)[:, :2], bound, name)


REFUSALS: dict[str, tuple[Any, type[Exception], str]] = {
    "k8v4": (
        "k8v4",
        ValueError,
        "KVQuantCache: `key` and `value` must have one storage type in a layer that keeps latents (MLA), got int8 and "
        "int4: a latent is the key and the value of a token at once. Choose the preset int8, fp8 or int4.",
    ),
    "k4v2": (
        "k4v2",
        ValueError,
        "KVQuantCache: `key` and `value` must have one storage type in a layer that keeps latents (MLA), got int4 and "
        "int2: a latent is the key and the value of a token at once. Choose the preset int8, fp8 or int4.",
    ),
    "int2": (
        {"preset": "int8", "layers": {1: "int2"}},
        ValueError,
        "KVQuantCache: `key` and `value` must have 4 bits or more in a layer that keeps latents (MLA), got int2, whose "
        "quality there is not known. Choose the preset int4.",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str) -> None:
    config, kind, message = REFUSALS[case]
    model = models.family("deepseek_v3")
    for call in (lambda: hf_kvquant.patch(model, config), lambda: KVQuantCache(model.config, config, max_cache_len=64)):
        with pytest.raises(kind) as raised:
            call()
        assert str(raised.value) == message
    assert not any("expand_kv" in module.__dict__ for module in model.modules())


PICK_TOKENS = {
    "axk2",
    "deepseek_v32",
    "dots3_note_text",
    "glm5_next_text",
    "glm_moe_dsa",
    "hy_v4",
    "hy_v4_vl_text",
    "mistral_large4_text",
}


@pytest.mark.parametrize("model_type", sorted(PICK_TOKENS & set(CONFIG_MAPPING)))
def test_models_that_pick_tokens_are_refused_whole(model_type: str) -> None:
    with pytest.raises(NotImplementedError) as raised:
        KVQuantCache(AutoConfig.for_model(model_type))
    assert str(raised.value) == (
        f"KVQuantCache: {model_type} selects the keys that it attends to, which attention over codes does not support. "
        "Leave the model unpatched."
    )


@pytest.mark.parametrize("model_type", sorted({"deepseek_v32", "glm_moe_dsa"} & set(CONFIG_MAPPING)))
def test_patch_refuses_models_that_pick_tokens(model_type: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, num_hidden_layers=1))
    before = [dict(module.__dict__) for module in model.modules()]
    with pytest.raises(NotImplementedError, match=f"{model_type} selects the keys that it attends to"):
        hf_kvquant.patch(model, "int8")
    assert [module.__dict__.keys() for module in model.modules()] == [each.keys() for each in before]


def test_modules_of_another_form_are_refused() -> None:
    llama = models.build("llama")
    llama.config.kv_lora_rank, llama.config.qk_rope_head_dim = 16, 8
    nameless, wider = deepseek(), deepseek()
    for module in latent_attentions(nameless):
        del module.kv_b_proj, module.v_head_dim
    for module in latent_attentions(wider):
        base = type(module)
        module.__class__ = type(base.__name__, (base,), {"expand_kv": lambda self, latent, rope, more: None})
    ends = {
        "got LlamaForCausalLM, which has no module with expand_kv": llama,
        "got DeepseekV3ForCausalLM, whose DeepseekV3Attention has no v_head_dim and no kv_b_proj": nameless,
        "got DeepseekV3ForCausalLM, whose DeepseekV3Attention has an expand_kv of 3 arguments": wider,
    }
    for end, model in ends.items():
        with pytest.raises(NotImplementedError) as raised:
            hf_kvquant.patch(model, "int8")
        assert str(raised.value) == (
            f"patch: `model` must keep latents (MLA) as transformers' own models do, {end}. Leave the model unpatched."
        )


def preflight(model: Any, *args: Any, **options: Any) -> Preflight:
    result: Preflight = hf_kvquant.run_preflight(
        model, *args, tokenizer=models.tokenizer(), texts=[text()], progress=False, **options
    )
    return result


def test_a_preflight_picks_presets_that_latents_can_have() -> None:
    model = models.family("minicpm3")  # without experts, whose choice would make a cost out of a rounding
    result = preflight(model)
    assert {name_of(layer.formats) for layer in result.layers} == {"int4"}
    assert result.kld is not None and result.bits is not None and 4 < result.bits < 8
    report = result.report()
    assert "Latents and rope parts take" in report and "head_dim" not in report
    # The budget is for the bytes of latents and rope parts.
    within = preflight(model, bits=8.5)
    assert within.bits is not None and within.bits <= 8.5


def test_a_preflight_knows_uneven_latents() -> None:
    model = models.stretch(models.build("deepseek_v3", **models.FAMILIES["deepseek_v3"].options), layer=1)
    for result in (preflight(model, "int4"), hf_kvquant.run_preflight(model, "int4", measure=False)):
        even, uneven = result.layers
        assert not even.findings
        [finding] = uneven.findings
        assert (finding.signal, finding.is_harmful) == ("latent channels", False)
        assert re.fullmatch(r"latents with uneven channels, squared errors \S+ times as large, limit 2", finding.detail)
    assert result.approved() == result.config


def test_a_preflight_names_presets_that_latents_cannot_have() -> None:
    with pytest.raises(ValueError) as raised:
        preflight(models.family("deepseek_v3"), presets=["k8v4"])
    assert str(raised.value) == (
        "run_preflight: `presets` must include one that fits layer 0, got ['k8v4']: run_preflight: `key` and `value` "
        "must have one storage type in a layer that keeps latents (MLA), got int8 and int4: a latent is the key and "
        "the value of a token at once. Choose the preset int8, fp8 or int4. Add 'none'."
    )


def test_a_preflight_of_weights_that_are_not_numbers() -> None:
    model = models.build("deepseek_v3", **models.FAMILIES["deepseek_v3"].options)
    for module in latent_attentions(model):
        module.kv_b_proj = type("Packed", (nn.Linear,), {})(module.kv_lora_rank, module.kv_b_proj.out_features, False)
    result = hf_kvquant.run_preflight(model, "int4", measure=False)
    with pytest.raises(PreflightError, match="latent channels unknown: its weights are quantised or not in memory"):
        result.approved()


def test_perplexity_is_measured() -> None:
    """Every pair is read from codes, and a number takes the bits of latents and rope parts."""
    model = models.family("minicpm3")
    configs = {name: KVQuantConfig.from_preset(name) for name in ("none", "int8", "int4")}
    sizes = sizes_of(model, configs, torch.bfloat16)
    bits = {name: round(each["bits_per_value"], 2) for name, each in sizes.items()}
    # Of 64 + 16 channels: one number of 16 bits beside them and 16 bits for the last 16, or three numbers.
    assert bits == {"none": 16.0, "int8": 9.8, "int4": 5.4}
    gate = Gate(model, torch.randint(3, 90, (1, 128)), configs)
    gate.check_counting()


def test_latents_without_a_kernel_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of float32 models on GPUs."""
    monkeypatch.setattr(LayerStore, "serves_latent", lambda *args: False)
    model = models.family("minicpm3")
    Gate(model, torch.randint(3, 90, (1, 128)), {"int8": KVQuantConfig.from_preset("int8")}).check_counting()
    cache = KVQuantCache(model.config, "int8")
    with patched(model, "int8"):
        greedy(model, left_padded(), 4, **with_cache(cache))
    # Each of 3 steps after a prompt of 9 tokens reads all tokens, itself included, in each layer and sequence.
    assert cache.pairs_dequantized == 3 * len(cache.layers) * (10 + 11 + 12)


def test_chunks_that_are_expanded_are_counted() -> None:
    """As a long question behind a text."""
    model = models.family("minicpm3")
    largest = largest_absorbed(next(latent_attentions(model)))
    cache, tokens = KVQuantCache(model.config, "int8"), torch.randint(3, 90, (1, 16 + largest + 1))
    with patched(model, "int8"), torch.no_grad():
        model(tokens[:, :16], **with_cache(cache), use_cache=True)
        model(tokens[:, 16:], **with_cache(cache), use_cache=True)
    assert cache.pairs_dequantized == len(cache.layers) * sum(range(17, 16 + largest + 2))
    assert not any(storage.tally.fallbacks for storage in cache.storages)
