"""Tiny random models, one per family, and the caches and prompts that the tests over them share.

A family is built from its config alone, with weights large enough that attention is far from uniform, so that an error
in one key moves the logits. `ReferenceCache` is what every quantised path is compared with: transformers' own growing
layers, whose tokens are quantised and dequantised by `hf_kvquant.spec.reference` and by nothing else of the package.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import compare
import pytest
import tolerances
import torch
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    Mistral4ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionAndFullAttentionLayer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_kvquant import KVQuantCache, KVQuantConfig, key_transforms, patched
from hf_kvquant.attention.registry import attention
from hf_kvquant.cache.layers import KVQuantLayer
from hf_kvquant.cache.support import formats_of
from hf_kvquant.config import LayerFormats
from hf_kvquant.models.latent import latent_attentions
from hf_kvquant.models.layers import layers_of
from hf_kvquant.ops import MAX_DRAFTED
from hf_kvquant.spec import reference
from hf_kvquant.spec.key_transform import KeyTransform
from hf_kvquant.spec.planes import Planes
from hf_kvquant.upstream.releases import DO_MODELS_UPDATE_PAGES, HAS_STATES, with_cache

VOCAB_SIZE = 96
PAD, BOS = 0, 1
HEAD_DIM = 64
# The codes of `int8` alone, without its dense tokens, for tests of anything else: their texts are short.
INT8_CODES = {"preset": "int8", "sink_length": 0, "residual_length": 0}
LEFT_OUT = object()  # an option with this value takes the common one away
HIDDEN_SIZE = 128  # not the 4 heads times HEAD_DIM, where a config has a head_dim of its own
SENTENCE = "The river rises in the north of the country and flows south for about three hundred kilometres. "
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content | trim }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclasses.dataclass(frozen=True)
class Family:
    """How to build one tiny model.

    Attributes:
        model_type: transformers' name.
        options: What the config needs beyond `COMMON`.
        is_served: Whether the kernel serves its full-attention layers; otherwise they fall back.
    """

    model_type: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    is_served: bool = True


COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 128,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": None,  # every generation has the length that it was asked for
    "tie_word_embeddings": False,  # tied ones make random models repeat one token
}
_MOE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# For configs that know no head_dim.
_WIDE = {"hidden_size": 4 * HEAD_DIM}
# GPT-2 has names of its own for sizes, and every query head has a key-value head.
_GPT = {"n_embd": 4 * HEAD_DIM, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 48, "rotary_dim": 8}
_NEO = {"num_layers": 2, "num_heads": 4}
_FALCON = {**_WIDE, "head_dim": LEFT_OUT, "num_kv_heads": 2}
_SHARED = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 6,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}
# Multi-head Latent Attention: a latent of 64 channels and a rope part of 16 for all heads. One layer has experts.
_LATENT = {
    "head_dim": LEFT_OUT,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
}
_LATENT_MOE = {
    **_LATENT,
    **_MOE,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "mlp_layer_types": ["dense", "sparse"],
}
# RoPE for four times 32 positions, and queries that grow with their position.
_STRETCHED = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}

_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}

FAMILIES: dict[str, Family] = {
    "llama": Family("llama"),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3"),
    "qwen3_moe": Family("qwen3_moe", _MOE),
    "qwen3_next": Family("qwen3_next", {**_MOE, **_LINEAR, "shared_expert_intermediate_size": 32}),
    "qwen3_5_text": Family("qwen3_5_text", _LINEAR),
    "qwen3_5_moe_text": Family("qwen3_5_moe_text", {**_MOE, **_LINEAR, "shared_expert_intermediate_size": 32}),
    "olmo_hybrid": Family("olmo_hybrid", {**_WIDE, **_LINEAR, "head_dim": LEFT_OUT}),
    "mistral": Family("mistral", {"sliding_window": None}),
    "mixtral": Family("mixtral", {**_MOE, "sliding_window": None}),
    "gemma": Family("gemma"),
    "gemma2": Family("gemma2", {**_MIXED, "query_pre_attn_scalar": HEAD_DIM, "attn_logit_softcapping": 3.0}),
    "gemma3_text": Family("gemma3_text", {**_MIXED, "query_pre_attn_scalar": HEAD_DIM}),
    "phi": Family("phi", _WIDE),
    "phi3": Family("phi3", {**_WIDE, "sliding_window": None}),
    "gpt_neox": Family("gpt_neox", _WIDE),
    "gpt2": Family("gpt2", _GPT),
    "gpt_bigcode": Family("gpt_bigcode", {**_GPT, "multi_query": True}),
    "opt": Family("opt", {**_WIDE, "ffn_dim": 48, "word_embed_proj_dim": 4 * HEAD_DIM}),
    "cohere": Family("cohere", _WIDE),
    "cohere2": Family("cohere2", _MIXED),
    "glm": Family("glm"),
    "glm4": Family("glm4"),
    "olmo": Family("olmo", _WIDE),
    "olmo2": Family("olmo2", _WIDE),
    "olmo3": Family("olmo3", {**_WIDE, **_MIXED}),
    "olmoe": Family("olmoe", {**_WIDE, **_MOE}),
    "granite": Family("granite", _WIDE),
    "granitemoe": Family("granitemoe", {**_WIDE, **_MOE}),
    "gpt_oss": Family("gpt_oss", {**_MOE, **_MIXED}),
    "smollm3": Family("smollm3", {"no_rope_layers": [1, 0]}),
    "starcoder2": Family("starcoder2", {**_WIDE, "sliding_window": None}),
    "stablelm": Family("stablelm", _WIDE),
    "persimmon": Family("persimmon", _WIDE),
    "exaone4": Family("exaone4", _MIXED),
    "nemotron": Family("nemotron"),
    "helium": Family("helium", {**_WIDE}),
    "ernie4_5": Family("ernie4_5"),
    "seed_oss": Family("seed_oss"),
    "arcee": Family("arcee"),
    "apertus": Family("apertus"),
    "hunyuan_v1_dense": Family("hunyuan_v1_dense"),
    "phimoe": Family("phimoe", {**_WIDE, **_MOE, "sliding_window": None}),
    "minimax_m2": Family("minimax_m2", {**_MOE}),
    "dots1": Family("dots1", {**_MOE, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}),
    "lfm2": Family("lfm2", {**_WIDE, "layer_types": ["conv", "full_attention"]}),
    "lfm2_moe": Family("lfm2_moe", {**_WIDE, **_MOE, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
    "llama4_text": Family(
        "llama4_text",
        {
            **_MOE,
            "layer_types": ["chunked_attention", "full_attention"],
            "attention_chunk_size": 8,
            "intermediate_size_mlp": 48,
        },
    ),
    # The last two layers attend to the keys and values of the first two.
    "gemma3n_text": Family("gemma3n_text", {**_SHARED, "laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 4}),
    "gemma4_text": Family("gemma4_text", {**_SHARED, "global_head_dim": HEAD_DIM}),
    "jamba": Family("jamba", {**_WIDE, **_MOE, "attn_layer_offset": 1, "attn_layer_period": 2, "mamba_d_state": 4}),
    "bamba": Family("bamba", {**_WIDE, "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_state": 4}),
    "granitemoehybrid": Family(
        "granitemoehybrid",
        {
            **_WIDE,
            **_MOE,
            "layer_types": ["linear_attention", "full_attention"],
            "mamba_n_heads": 4,
            "mamba_d_head": 2 * HEAD_DIM,
            "mamba_d_state": 4,
            "shared_intermediate_size": 48,
        },
    ),
    # A feed-forward layer counts as a layer.
    "nemotron_h": Family(
        "nemotron_h",
        {
            **_WIDE,
            **_MOE,
            "layer_types": ["linear_attention", "moe", "full_attention"],
            "num_hidden_layers": 3,
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "ssm_state_size": 4,
            "n_groups": 1,
            "chunk_size": 8,
            "n_routed_experts": 4,
            "moe_shared_expert_intermediate_size": 32,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    # Attention and a state in one layer.
    "falcon_h1": Family(
        "falcon_h1",
        {
            "mamba_d_ssm": 4 * HEAD_DIM,
            "mamba_n_heads": 4,
            "mamba_d_head": HEAD_DIM,
            "mamba_n_groups": 1,
            "mamba_d_state": 4,
            "mamba_chunk_size": 8,
        },
    ),
    "zamba2": Family(
        "zamba2",
        {
            "hidden_size": 4 * HEAD_DIM,
            "layers_block_type": ["mamba", "hybrid"],
            "mamba_d_state": 4,
            "n_mamba_heads": 4,
            "mamba_headdim": 2 * HEAD_DIM,
            "num_mem_blocks": 1,
            "chunk_size": 8,
            "num_key_value_heads": 4,
        },
    ),
    # Latents for all heads in place of keys and values.
    "deepseek_v2": Family("deepseek_v2", _LATENT_MOE),
    "deepseek_v3": Family("deepseek_v3", _LATENT_MOE),
    "glm4_moe_lite": Family("glm4_moe_lite", _LATENT_MOE),
    "minicpm3": Family("minicpm3", _LATENT),
    "mistral4": Family("mistral4", {**_LATENT_MOE, "rope_parameters": _STRETCHED}),
    "youtu": Family("youtu", _LATENT),
    "sarvam_mla": Family("sarvam_mla", _LATENT_MOE),
    "axk1": Family("axk1", _LATENT_MOE),
    "longcat_flash": Family(
        "longcat_flash",
        {
            **_LATENT,
            "head_dim": 16,
            "num_hidden_layers": LEFT_OUT,
            "num_layers": 1,  # each has two layers of the cache
            "ffn_hidden_size": 48,
            "expert_ffn_hidden_size": 32,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 2,
        },
    ),
    "kimi_linear": Family(
        "kimi_linear",
        {
            **_LATENT_MOE,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_head_dim": 16,
            "linear_num_heads": 4,
        },
    ),
    "bailing_hybrid": Family(
        "bailing_hybrid",
        {**_LATENT_MOE, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "jetmoe": Family("jetmoe", {**_MOE, "kv_channels": HEAD_DIM}, is_served=False),
    "diffllama": Family("diffllama", is_served=False),
    "xglm": Family("xglm", {"d_model": 4 * HEAD_DIM, "attention_heads": 4, "ffn_dim": 48}, is_served=False),
    # Attention outside transformers' registry.
    "gptj": Family("gptj", _GPT),
    "codegen": Family("codegen", _GPT),
    "gpt_neo": Family("gpt_neo", {**_WIDE, **_NEO, "attention_types": [[["global", "local"], 1]], "window_size": 6}),
    "bloom": Family("bloom", _WIDE),
    "falcon": Family("falcon", _FALCON),
    "falcon_alibi": Family("falcon", {**_FALCON, "alibi": True, "multi_query": False, "num_kv_heads": 4}),
    "falcon_new": Family("falcon", {**_FALCON, "new_decoder_architecture": True}),
    "mpt": Family("mpt", {"d_model": 4 * HEAD_DIM, "n_heads": 4, "n_layers": 2, "use_cache": True}),
}

# Some are younger than the oldest release that is supported.
FAMILIES = {name: family for name, family in FAMILIES.items() if family.model_type in CONFIG_MAPPING}

# Those that continuous batching serves.
_BATCHED = {
    "llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma", "gemma2", "gemma3_text", "phi", "phi3",
    "gpt_neox", "gpt2", "gpt_bigcode", "opt", "cohere", "cohere2", "glm", "glm4", "olmo", "olmo2", "olmo3", "olmoe",
    "granite", "granitemoe", "gpt_oss", "smollm3", "starcoder2", "persimmon", "exaone4", "helium", "ernie4_5",
    "seed_oss", "arcee", "apertus", "hunyuan_v1_dense", "phimoe", "minimax_m2", "dots1",
}  # fmt: skip
# Their models pass the cache on since 5.24.
_BATCHED |= {"stablelm", "nemotron", "gptj", "codegen"} if DO_MODELS_UPDATE_PAGES else set()
# Those that have states, likewise since 5.24.
STATES = {
    "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "lfm2", "lfm2_moe", "bamba", "granitemoehybrid",
    "nemotron_h", "falcon_h1", "zamba2",
}  # fmt: skip
WITH_STATES = [name for name in FAMILIES if name in STATES and HAS_STATES]
# Those that keep latents (MLA), which they hand to the cache of batches since 5.24.
WITH_LATENTS = [name for name, family in FAMILIES.items() if "kv_lora_rank" in family.options]
BATCHED = [
    name
    for name in FAMILIES
    if name in _BATCHED or name in WITH_STATES or (name in WITH_LATENTS and DO_MODELS_UPDATE_PAGES)
]


# One family for each way to a cache: plain, with key biases, windows and softcaps, sinks, layers that share keys, a
# state beside keys, an attention of its own, and none that a kernel serves. The quick tier runs every preset over them.
VARIED = ("llama", "qwen2", "gemma2", "gpt_oss", "gemma4_text", "falcon_h1", "bloom", "xglm")


def build(model_type: str, dtype: torch.dtype = torch.float32, attention: str | None = None, **options: Any) -> Any:
    """A model with random weights, in evaluation mode.

    Args:
        model_type: transformers' name of the family.
        dtype: Of the weights.
        attention: The attention implementation; `None` leaves it to transformers.
        **options: Override the common small sizes.
    """
    torch.manual_seed(1234)
    sizes = {name: value for name, value in {**COMMON, **options}.items() if value is not LEFT_OUT}
    config = AutoConfig.for_model(model_type, **sizes)
    kwargs = {} if attention is None else {"attn_implementation": attention}
    # Mistral 4 is part of a model that sees pictures, and not among those that the class for all knows.
    kind = Mistral4ForCausalLM._from_config if model_type == "mistral4" else AutoModelForCausalLM.from_config
    model = kind(config, **kwargs)
    return randomized(model).to(dtype).eval()


def randomized(model: PreTrainedModel) -> PreTrainedModel:
    """The model with weights of unit gain: what `from_config` draws is too small for attention to choose anything."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed" in name or "wte" in name:
                parameter.normal_(0.0, 1.0)
            elif parameter.ndim >= 2:
                parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)
            elif "norm" not in name and "ln" not in name:  # biases, and the sinks of gpt-oss
                parameter.normal_(0.0, 0.5)
    return model


def checkpoint_gradients(model: PreTrainedModel, is_on: bool = True) -> None:
    """Turn gradient checkpointing on or off, by the name that the installed transformers has for it."""
    kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    getattr(model, f"{kind}_checkpointing_{'enable' if is_on else 'disable'}")()


def tokenizer(**options: Any) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are the printable characters of ASCII; byte-level BPE spells the space Ġ."""
    alphabet = ["Ġ", *map(chr, range(ord("!"), ord("~") + 1)), "Ċ"]
    assert len(alphabet) == VOCAB_SIZE
    inner = RawTokenizer(BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, **options)


def save_llama(path: Path, context: int, **options: Any) -> str:
    """Save a tiny llama of so many positions, and its tokenizer with these options. Returns the folder's name."""
    return save(build("llama", max_position_embeddings=context), path, model_max_length=context, **options)


def save(model: PreTrainedModel, path: Path, **options: Any) -> str:
    """Save a model, and our tokenizer with these options. Returns the folder's name."""
    tokenizer(**options).save_pretrained(path)
    model.save_pretrained(path)
    return str(path)


SHARED: list[Any] = []  # models that tests share: whoever patches one unpatches it (shared.py looks)


def shared(make: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes a model once, for all tests."""

    @functools.cache
    @functools.wraps(make)
    def made(*arguments: Any, **options: Any) -> Any:
        SHARED.append(make(*arguments, **options))
        return SHARED[-1]

    return made


@shared
def family(name: str) -> Any:
    """The float32 model of a family."""
    return build(FAMILIES[name].model_type, **FAMILIES[name].options)


@shared
def llama(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A tiny llama with other sizes."""
    return build("llama", dtype, **options)


@shared
def bart() -> Any:
    """A tiny encoder-decoder."""
    torch.manual_seed(1234)
    config = BartConfig(
        vocab_size=VOCAB_SIZE,
        d_model=4 * HEAD_DIM,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=64,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=VOCAB_SIZE - 1,
        forced_eos_token_id=None,
    )
    model = BartForConditionalGeneration(config)
    model.generation_config.eos_token_id = None
    return randomized(model).eval()


def check_masks_agree(query: Tensor, handles: tuple[Any, Any], bounds: Tensor, dense_mask: Tensor | None) -> None:
    """Attention from codes with our bounds, and over keys that came of handles, is that of `prev` with its own mask."""
    key, value = (handle * 1.0 for handle in handles)
    module = llama().model.layers[0].self_attn
    out, _ = attention(module, query, key, value, bounds, prev="sdpa", scaling=0.3)
    expected, _ = attention(module, query, key, value, dense_mask, prev="sdpa", scaling=0.3)
    compare.assert_same(out, expected, "attention")
    codes, _ = attention(module, query, *handles, bounds, prev="sdpa", scaling=0.3)
    compare.assert_close(codes, expected, 1e-4, "attention over codes")


def on(device: str, model: Any) -> Any:
    """The model itself on the CPU, a copy elsewhere: others use it too."""
    return model if device == "cpu" else copy.deepcopy(model).to(device)


def stretch(model: Any, layer: int | None = None) -> Any:
    """Make channels of latents (MLA) up to 64 times as large, and what reads them as small. No logit changes."""
    factors = None
    for module in latent_attentions(model):
        if layer in (None, module.layer_idx):
            norm, projection = module.kv_a_layernorm, module.kv_b_proj
            factors = torch.exp2(torch.arange(norm.weight.numel()) % 7.0)
            with torch.no_grad():
                norm.weight.mul_(factors.to(norm.weight))
                projection.weight.div_(factors.to(projection.weight))
    assert factors is not None
    return model


def left_padded(batch: int = 3, tokens: int = 9, pads: tuple[int, ...] = (3, 0, 5)) -> dict[str, Tensor]:
    """Prompts as `generate` takes them: `input_ids` and `attention_mask`, `pads[i]` tokens of left padding each."""
    generator = torch.Generator().manual_seed(7)
    input_ids = torch.randint(3, VOCAB_SIZE, (batch, tokens), generator=generator)
    mask = torch.ones_like(input_ids)
    for row in range(batch):
        mask[row, : pads[row % len(pads)]] = 0
    return {"input_ids": input_ids.masked_fill(mask == 0, PAD), "attention_mask": mask}


def greedy(model: Any, inputs: Mapping[str, Tensor], new_tokens: int = 6, **options: Any) -> Any:
    """What `generate` returns for greedy decoding, raw logits and cache included. Inputs go to the model's device."""
    defaults = {
        "do_sample": False,
        "max_new_tokens": new_tokens,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    placed = {name: value.to(model.device) for name, value in inputs.items()}
    return model.generate(**placed, **{**defaults, **options})


def logits(output: Any) -> Tensor:
    """The raw logits of an output, `[batch, new tokens, vocabulary]` float32, on the CPU."""
    return torch.stack(output.logits, dim=1).float().cpu()


def forced(sequences: Tensor) -> Any:
    """A `prefix_allowed_tokens_fn` that makes `generate` repeat `sequences`, whatever the logits say."""
    return lambda batch, ids: [int(sequences[batch, ids.shape[-1]])]


class RecordingCache(KVQuantCache):
    """A `KVQuantCache` that remembers what its own layers were given: per layer, keys and values call by call."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.recorded: dict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.recorded[layer_idx].append((key_states.clone(), value_states.clone()))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


class ReferenceLayer(DynamicLayer):
    """Dense keys and values that went through the specification; the first chunk comes back as given.

    Where tokens stay dense, channels are twice as many: what codes stand for, and what a token was given as.

    Args:
        formats: Of the layer.
        replay: What another cache was given, to be kept in place of what this one is given. Two runs that differ in the
            order of a sum only may still round one value to two codes; with the same values they cannot.
        mask: `[batch, tokens]` of the prompt, 0 for padding, where what is replayed need not agree.
        transform: What keys go through before they are quantised.
    """

    def __init__(
        self,
        formats: LayerFormats,
        replay: list[tuple[Tensor, Tensor]] | None = None,
        mask: Tensor | None = None,
        transform: KeyTransform | None = None,
    ) -> None:
        super().__init__()
        self.formats = (formats.key, formats.value)
        self.windows = {"sink_length": formats.sink_length, "residual_length": formats.residual_length}
        self.transform = transform or KeyTransform()
        self.slack = 0  # tokens behind the dense windows that are remembered as they were given
        self.is_lost = [torch.zeros(0, dtype=torch.bool) for _ in range(2)]  # by side and position: they no longer are
        self.frozen: list[Planes | None] = [None, None]  # per-tensor scales of the first chunk
        self.replay = None if replay is None else iter(replay)
        self.mask = mask
        self.has_chunks = True  # many new tokens see each other as they come: not with a sliding window

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.replay is not None:
            key, value = next(self.replay)
            for own, other, name in ((key_states, key, "keys"), (value_states, value, "values")):
                if self.mask is not None and self.get_seq_length() == 0:
                    # Behind the first layer, padding holds whatever a backend makes of rows that see nothing.
                    is_padding = self.mask.to(own.device)[:, None, :, None] == 0
                    own, other = own.masked_fill(is_padding, 0), other.masked_fill(is_padding, 0)
                bound = tolerances.projection_bound(own, other.dtype)
                compare.assert_close(other, own.float().cpu(), bound, f"{name} that go into the cache")
            key_states, value_states = key.to(key_states.dtype), value.to(value_states.dtype)
        length = self.get_seq_length()
        is_first_chunk, is_chunk = length == 0, self.has_chunks and key_states.shape[2] > MAX_DRAFTED
        before = [] if is_first_chunk else [self.seen(0), self.seen(1)]
        both = [
            torch.cat((self._through_codes(side, x), x), dim=-1)
            if self._has_tail(side)
            else self._through_codes(side, x)
            for side, x in enumerate((key_states, value_states))
        ]
        super().update(*both)
        for side in range(2):
            added = torch.zeros(key_states.shape[2], dtype=torch.bool)
            self.is_lost[side] = torch.cat((self.is_lost[side], added))
            self.is_lost[side][: self._remembered_from(side)] = True
        if self.formats[0].block_size is not None:
            residual_length = self.windows["residual_length"]
            self._close_blocks(
                *(self.formats[0].tail_begin(tokens, residual_length) for tokens in (length, self.get_seq_length()))
            )
        if is_first_chunk:
            return key_states, value_states
        if is_chunk and any(each.is_quantized for each in self.formats):
            # It sees what was there before, and its own tokens as they come.
            key, value = (torch.cat(pair, 2) for pair in zip(before, (key_states, value_states), strict=True))
            return key, value
        return self.seen(0), self.seen(1)

    def _has_tail(self, side: int) -> bool:
        return self.formats[side].tail_rows(**self.windows) > 0

    def activate_past_recording(self) -> None:
        """Remember more tokens as they were given, from now on."""
        self.slack = 64

    def _remembered_from(self, side: int) -> int:
        kv_format, residual_length = self.formats[side], self.windows["residual_length"]
        slack = self.slack if kv_format.block_size is None else -(-self.slack // 128) * 128
        return kv_format.tail_begin(self.get_seq_length(), residual_length + slack)

    def _starts(self) -> Tensor:
        batch = self.keys.shape[0]
        if self.mask is None:
            return torch.zeros(batch, dtype=torch.int64, device=self.keys.device)
        starts = (self.mask.cumsum(1) == 0).sum(1).to(self.keys.device)
        return starts.repeat_interleave(batch // starts.shape[0], 0)  # beams

    def window_begin(self, side: int, num_behind: int) -> int:
        """The first of the newest tokens that are dense for a query with `num_behind` of a step's tokens behind it.

        Of tokens that have left the window of the last query, those are dense that a tail has rows for.
        """
        kv_format, length, num_kept = self.formats[side], self.get_seq_length(), self.windows["residual_length"]
        begin = kv_format.tail_begin(length - num_behind, num_kept)
        if num_behind == 0:
            return begin
        num_kept += self.slack if num_kept or kv_format.block_size else 0
        return max(
            begin, kv_format.tail_begin(length, num_kept if kv_format.block_size is None else -(-num_kept // 32) * 32)
        )

    def seen(self, side: int, num_behind: int = 0) -> Tensor:
        """What attention gets of a side, for a query with `num_behind` of a step's tokens behind it."""
        x = (self.keys, self.values)[side]
        if not self._has_tail(side):
            return x
        coded, given = x.chunk(2, dim=-1)
        begin = self.window_begin(side, num_behind)
        column, starts = torch.arange(x.shape[2], device=x.device), self._starts().unsqueeze(1)
        is_sink = (column >= starts) & (column < starts + self.windows["sink_length"])
        return torch.where((is_sink | (column >= begin))[:, None, :, None], given, coded)

    def crop(self, tokens_to_remove: int) -> None:
        """Tokens that become the newest ones again go on as they were seen, unless they are remembered."""
        length = max(0, self.get_seq_length() + tokens_to_remove)
        for side in range(2):
            begin = self.formats[side].tail_begin(length, self.windows["residual_length"])
            is_reopened = self.is_lost[side].clone()
            is_reopened[:begin] = False
            if self._has_tail(side) and is_reopened.any():
                given = (self.keys, self.values)[side].chunk(2, dim=-1)[1]
                given[:, :, is_reopened] = self.seen(side)[:, :, is_reopened]
            self.is_lost[side] = (self.is_lost[side] & ~is_reopened)[:length]
        super().crop(tokens_to_remove)

    def _through_codes(self, side: int, x: Tensor) -> Tensor:
        kv_format = self.formats[side]
        if not kv_format.is_quantized or kv_format.block_size is not None:
            return x
        dtype, transform = x.dtype, KeyTransform() if side else self.transform
        x = reference.transform_key(x, transform)
        frozen = self.frozen[side]
        planes = reference.quantize(x, kv_format, *((frozen.scale, frozen.zero) if frozen else ()))
        if kv_format.granularity == "tensor":
            self.frozen[side] = planes
        return reference.dequantize(planes, kv_format, dtype, key_transform=transform)

    def _close_blocks(self, begin: int, end: int) -> None:
        """Keys with a scale for every channel: dense until a block is full."""
        if end > begin:
            first = self._starts().unsqueeze(1) + self.windows["sink_length"]
            is_left_out = torch.arange(begin, end, device=self.keys.device) < first
            coded, given = self.keys.chunk(2, dim=-1)
            keys = reference.transform_key(given[:, :, begin:end], self.transform)
            planes = reference.quantize(keys, self.formats[0], is_padding=is_left_out)
            coded[:, :, begin:end] = reference.dequantize(planes, self.formats[0], key_transform=self.transform)


class ReferenceHybridLayer(ReferenceLayer, LinearAttentionAndFullAttentionLayer):
    """The same, with the state that a layer has besides."""


class ReferenceCache(DynamicCache):
    """A `DynamicCache` whose layers that ours quantises attend to dequantised tensors, for an unpatched model.

    Args:
        config: The model's config.
        preset_or_config: As for `KVQuantCache`.
        replay: What a `RecordingCache` recorded.
        mask: `[batch, tokens]` of the prompt, 0 for padding, where what is replayed need not agree.
        key_transforms: As for `KVQuantCache`: `None` rotates where the config says so.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        preset_or_config: Any,
        replay: Mapping[int, list[tuple[Tensor, Tensor]]] | None = None,
        mask: Tensor | None = None,
        key_transforms: Mapping[int, KeyTransform] | None = None,
    ) -> None:
        super().__init__(config=config)
        quant_config = KVQuantConfig.resolve(preset_or_config)
        text_config = config.get_text_config(decoder=True)
        layer_types, _ = layers_of(text_config)
        for index, formats in formats_of(text_config, quant_config).items():
            if layer_types[index] == "sliding_attention":
                # All tokens are kept, and what lies before the window is hidden by the mask alone.
                formats = dataclasses.replace(formats, sink_length=0)
            transform = KeyTransform(is_rotated="rotate" in formats.transforms)
            if key_transforms is not None:
                transform = key_transforms.get(index, KeyTransform())
            replayed = None if replay is None else replay[index]
            kind = ReferenceHybridLayer if layer_types[index] == "hybrid" else ReferenceLayer
            self.layers[index] = kind(formats, replayed, mask, transform)
            self.layers[index].has_chunks = layer_types[index] != "sliding_attention"


def check_against_reference(
    model: Any, config: Any, inputs: Mapping[str, Tensor], exact_model: Any = None, new_tokens: int = 6
) -> tuple[Tensor, Any]:
    """Compare the logits of a patched model with those over a `ReferenceCache` that was given the same keys and values.

    Args:
        model: Unpatched.
        config: A preset's name or a dictionary.
        inputs: A prompt.
        exact_model: The same model in float32, where `model` is not.
        new_tokens: To generate.

    Returns:
        The reference's logits, and the cache of the patched model.
    """
    cache = RecordingCache(model.config, config)
    with patched(model, config):
        # A replayed CUDA graph would overwrite what has been recorded.
        output = greedy(model, inputs, new_tokens, **with_cache(cache), disable_compile=True)
    transforms = key_transforms(model, config)
    kept = {storage.name: storage.key_transform for storage in cache.storages if storage.key_transform is not None}
    assert kept.keys() == {f"layer {index}" for index in transforms}, "the cache has not taken the model's transforms"

    def run(which: Any) -> Tensor:
        replayed = ReferenceCache(which.config, config, cache.recorded, inputs["attention_mask"], transforms)
        tokens = forced(output.sequences)
        return logits(greedy(which, inputs, new_tokens, **with_cache(replayed), prefix_allowed_tokens_fn=tokens))

    torch_logits = run(model)
    expected = torch_logits if exact_model is None else run(exact_model)
    bound = tolerances.model_bound(expected, torch_logits, model.dtype)
    compare.assert_close(logits(output), expected, bound, f"{model.config.model_type}, {config}")
    tokens = output.sequences[:, -expected.shape[1] :].cpu()
    chosen = expected.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    assert (chosen >= expected.amax(-1) - 2 * bound).all(), "a token is not the most probable one"
    return expected, cache


def read_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let caches quantise and models attend to what is not quantised all the same, as stock tools measure it."""
    update = KVQuantLayer.update

    def unquantized(layer: Any, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        before = () if layer.storage.is_empty else layer.given
        update(layer, key, value, *args, **kwargs)
        layer.storage.flush()
        layer.given = key, value
        if before:
            layer.given = torch.cat((before[0], key), 2), torch.cat((before[1], value), 2)
        return layer.given

    monkeypatch.setattr(KVQuantLayer, "update", unquantized)
