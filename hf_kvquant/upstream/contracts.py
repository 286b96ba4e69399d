"""What this package relies on in transformers besides its documented interface, and a check that it is still there.

`tests/test_upstream.py` holds all of it against the installed release. With a release newer than those tested,
`check_release` does so before anything is changed: a user reads one sentence, and gets no other results.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

from . import releases
from .releases import CACHE, DO_MODELS_UPDATE_PAGES, HAS_STATES, TESTED


@dataclasses.dataclass(frozen=True)
class Contract:
    """One thing of theirs.

    Attributes:
        ours: The file of this package that must follow if it changes.
        theirs: Its dotted name, module first.
        parameters: The parameters that it must have, or the fields of a dataclass.
        mentions: What its source must contain: names that ours reads or sets on objects that pass through it.
        is_replaced: Whether ours is called in its place, so that it may have no others.
    """

    ours: str
    theirs: str
    parameters: str = ""
    mentions: str = ""
    is_replaced: bool = False

    def why_broken(self) -> str | None:
        """What has changed, as the end of a sentence; `None` if all is as expected."""
        try:
            found = _resolve(self.theirs)
        except (AttributeError, ImportError):
            return f"has no {self.theirs}"
        if self.parameters:
            names = list(inspect.signature(found).parameters)
            expected = self.parameters.split()
            missing = [name for name in expected if name not in names]
            if missing or (self.is_replaced and [name for name in names if name != "self"] != expected):
                return f"has {self.theirs} with the parameters {names}, not {expected}"
        if self.mentions:
            source = inspect.getsource(found)
            absent = [name for name in self.mentions.split() if name not in source]
            if absent:
                return f"has {self.theirs} without {absent}"
        return None


_GENERATE = "transformers.generation.utils.GenerationMixin"
_MODEL = "transformers.modeling_utils.PreTrainedModel"
_LLAMA = "transformers.models.llama.modeling_llama"
_SERVING = "transformers.cli.serving"

CONTRACTS = (
    # What calls a cache by which name.
    Contract("upstream/releases.py", f"{_LLAMA}.LlamaForCausalLM.forward", CACHE),
    Contract("upstream/releases.py", f"{_LLAMA}.LlamaAttention.forward", CACHE, f"{CACHE}.update("),
    Contract("upstream/releases.py", "transformers.masking_utils.create_causal_mask", CACHE),
    Contract("upstream/releases.py", "transformers.modeling_outputs.CausalLMOutputWithPast", f"logits {CACHE}"),
    Contract("upstream/releases.py", f"{_GENERATE}._prefill", mentions=f'"{CACHE}" outputs.{CACHE}'),
    # What `patch` and each call of `generate` meet.
    Contract(
        "generate/hook.py",
        f"{_GENERATE}._prepare_cache_for_generation",
        "generation_config model_kwargs generation_mode batch_size max_cache_length",
        "is_assistant num_beams num_return_sequences cache_implementation cache_config",
        is_replaced=True,
    ),
    Contract("generate/hook.py", f"{_GENERATE}._valid_auto_compile_criteria", "model_kwargs generation_config"),
    Contract("generate/hook.py", f"{_GENERATE}._get_static_cache_init_shape"),
    Contract("generate/hook.py", f"{_MODEL}._can_set_attn_implementation"),
    Contract("generate/watch.py", f"{_GENERATE}.generate", mentions="_prepare_cache_for_generation( paged"),
    Contract(
        "generate/switching.py",
        "transformers.models.phi3.modeling_phi3.Phi3ForCausalLM.prepare_inputs_for_generation",
        f"input_ids {CACHE} attention_mask",
        "original_max_position_embeddings",
    ),
    Contract("report.py", f"{_GENERATE}._prepare_generation_config", "generation_config"),
    Contract("models/layers.py", f"{_GENERATE}._supports_default_dynamic_cache"),
    Contract("models/layers.py", "transformers.cache_utils.get_layer_types_and_kwargs", "config"),
    Contract("models/text_config.py", "transformers.PreTrainedConfig.get_text_config", "decoder"),
    Contract("cache/support.py", "transformers.PreTrainedConfig.per_layer_config"),
    Contract("cache/kvquant_cache.py", "transformers.cache_utils.Cache.update", "key_states value_states layer_idx"),
    Contract("cache/layers.py", "transformers.cache_utils.DYNAMIC_LAYER_TYPE_MAPPING"),
    Contract("cache/layers.py", "transformers.cache_utils.STATIC_LAYER_TYPE_MAPPING"),
    Contract("attention/registry.py", f"{_MODEL}.set_attn_implementation", "attn_implementation"),
    Contract(
        "attention/registry.py",
        "transformers.integrations.sdpa_attention.sdpa_attention_forward",
        "module query key value attention_mask dropout scaling",
    ),
    Contract(
        "attention/masks.py",
        "transformers.masking_utils.create_causal_mask",
        mentions="batch_size= q_length= kv_length= q_offset= kv_offset= mask_function= attention_mask= config= "
        "allow_is_causal_skip= use_vmap= device=",
    ),
    Contract(
        "attention/masks.py", "transformers.masking_utils.create_sliding_window_causal_mask", mentions="local_size="
    ),
    Contract("cache/layers.py", "transformers.masking_utils._preprocess_mask_arguments", mentions="get_mask_sizes("),
    Contract("attention/observation.py", f"{_MODEL}._supports_sdpa"),
    Contract("attention/observation.py", "transformers.AttentionMaskInterface._global_mapping"),
    # What captured steps call.
    Contract("graphs/decode_loop.py", f"{_GENERATE}.generate", "custom_generate streamer assistant_model synced_gpus"),
    Contract("graphs/decode_loop.py", f"{_GENERATE}._sample", "input_ids logits_processor stopping_criteria streamer"),
    Contract("graphs/decode_loop.py", f"{_GENERATE}._prefill", "input_ids generation_config model_kwargs"),
    Contract("graphs/decode_loop.py", f"{_GENERATE}._prepare_generation_config", "generation_config"),
    Contract("graphs/decode_loop.py", f"{_GENERATE}._update_model_kwargs_for_generation", "outputs model_kwargs"),
    Contract("graphs/decode_loop.py", f"{_GENERATE}.prepare_inputs_for_generation", f"next_sequence_length {CACHE}"),
    Contract("graphs/decode_loop.py", f"{_GENERATE}._optimize_model_for_decode"),
    Contract("graphs/decode_loop.py", "transformers.generation.utils.GenerateDecoderOnlyOutput", f"sequences {CACHE}"),
    Contract("graphs/capture.py", f"{_MODEL}.get_compiled_call", "compile_config", is_replaced=True),
    Contract("graphs/assisted.py", f"{_GENERATE}._assisted_decoding", "input_ids streamer inputs_tensor"),
    Contract("graphs/assisted.py", f"{_GENERATE}._validate_generation_mode", "generation_mode generation_config"),
    # What continuous batching and the server read on objects of theirs. `changed_overrides` knows what they override.
    Contract(
        "batching/hook.py",
        "transformers.generation.continuous_batching.continuous_api.ContinuousMixin.init_continuous_batching",
        "generation_config continuous_batching_config workload_hints",
        "_cached_continuous_batching_manager",
        is_replaced=True,
    ),
    Contract(
        "batching/hook.py",
        "transformers.generation.continuous_batching.continuous_api.ContinuousMixin.generate_batch",
        "inputs generation_config",
    ),
    Contract(
        "batching/paged_cache.py",
        f"{_LLAMA}.LlamaAttention.forward",
        mentions=f"{CACHE}.update( kwargs=kwargs **kwargs" if DO_MODELS_UPDATE_PAGES else "**kwargs",
    ),
    # States: layers ask the cache for them, and get it by name; decode steps change them in place.
    *(
        Contract("batching/state_layers.py", f"transformers.models.{name}.forward", f"hidden_states {CACHE}")
        for name in ("qwen3_5.modeling_qwen3_5.Qwen3_5GatedDeltaNet", "lfm2.modeling_lfm2.Lfm2ShortConv")
        if HAS_STATES
    ),
    *(
        Contract("batching/state_layers.py", f"transformers.cache_utils.Cache.{name}", "layer_idx")
        for name in ("get_conv_state", "update_conv_state", "get_recurrent_state", "update_recurrent_state")
        if HAS_STATES
    ),
    Contract(
        "batching/states.py",
        "transformers.cache_utils.LinearAttentionCacheLayerMixin.__init__",
        "number_of_states",
        "self.conv_states self.recurrent_states self.is_conv_states_initialized self.is_recurrent_states_initialized "
        "self.has_previous_state self.conv_kernel_size",
    ),
    Contract(
        "batching/manager.py",
        "transformers.generation.continuous_batching.offloading_manager.OffloadingManager._offload_to_cpu",
        "victims",
    ),
    # Chunks end where states are to be kept: the scheduler gives them their length, and counts it then.
    Contract(
        "batching/manager.py",
        "transformers.generation.continuous_batching.scheduler.Scheduler._schedule_request",
        "state request_tokens token_budget",
        "request_tokens[:token_budget]",
    ),
    Contract(
        "batching/manager.py",
        "transformers.generation.continuous_batching.scheduler.Scheduler._process_candidates",
        mentions="self._schedule_request(state, len(state.tokens_to_process)",
    ),
    Contract(
        "batching/manager.py",
        "transformers.generation.continuous_batching.offloading_manager.OffloadingManager.offload_requests",
    ),
    Contract("batching/manager.py", f"{_GENERATE}._supports_logits_to_keep"),
    Contract("batching/settings.py", f"{_GENERATE}._prepare_generation_config", "generation_config"),
    Contract("batching/settings.py", "transformers.GenerationConfig._get_default_generation_params"),
    Contract("serving/server.py", f"{_SERVING}.server.build_server"),
)

# Rooms whose contracts are asked for only where they are used; the others belong to every call.
_OPTIONAL = ("batching", "graphs", "serving")


def check_release(where: str, room: str | None = None) -> None:
    """Refuse a release newer than those tested if it has changed what is relied on. Costs nothing with a tested one.

    Args:
        where: Begins the message.
        room: Of this package, one of `_OPTIONAL`, or `None` for what all calls need.

    Raises:
        NotImplementedError: Something has changed.
    """
    changed = _changed(room) if releases.is_untested() else None
    if changed is not None:
        raise NotImplementedError(
            f"{where}: transformers {releases.VERSION} {changed}. This version of hf_kvquant works with "
            f"{TESTED}. Install one of these, or a newer hf_kvquant."
        )


@functools.cache
def _changed(room: str | None) -> str | None:
    for contract in CONTRACTS:
        own_room = contract.ours.partition("/")[0]
        if (own_room if own_room in _OPTIONAL else None) == room:
            reason = contract.why_broken()
            if reason is not None:
                return reason
    return None


def _resolve(name: str) -> Any:
    """What a dotted name, module first, stands for."""
    module, _, rest = name.rpartition(".")
    while module:
        try:
            found: Any = importlib.import_module(module)
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            rest = f"{last}.{rest}"
            continue
        for part in rest.split("."):
            found = inspect.getattr_static(found, part) if inspect.isclass(found) else getattr(found, part)
        return found
    raise ImportError(name)


def changed_overrides(ours: type) -> Iterator[str]:
    """Methods of a class of ours that cannot take what the method of theirs takes that they override."""
    for name, mine in vars(ours).items():
        theirs = next((vars(each)[name] for each in ours.__mro__[1:] if _is_theirs(each) and name in vars(each)), None)
        if not (inspect.isfunction(mine) and inspect.isfunction(theirs)) or name == "__init__":
            continue
        parameters = inspect.signature(mine).parameters
        takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        required = [
            each.name
            for each in inspect.signature(theirs).parameters.values()
            if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        ]
        if not takes_all and not set(required) <= set(parameters):
            yield f"{ours.__name__}.{name} takes {list(parameters)}, and theirs {required}"


def _is_theirs(kind: type) -> bool:
    return kind.__module__.split(".")[0] == "transformers"
