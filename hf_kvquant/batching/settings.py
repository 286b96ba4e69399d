"""Which settings of a generation config hold under continuous batching. All others are refused by name.

transformers ends a request by its number of tokens or an end token, and shows processors of logits the newest token of
each request alone. So what needs earlier tokens, several sequences at once, time or text would be dropped, or would end
the manager. The lists here name what holds: a setting that a later release adds is refused until somebody has looked.

What a config leaves out comes from the model's own, as in generate. transformers takes a config that is passed alone
(5.24): chat models then write on after their end token.
"""

from __future__ import annotations

import copy
import functools
import logging
import reprlib
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from ..config import BACKEND, KVQuantConfig
from ..state import patch_of
from .support import WHERE

logger = logging.getLogger(__name__)

# Done as in generate. Processors of logits are here if they look at the logits of one token alone.
_HOLD = frozenset(
    "max_new_tokens max_length num_return_sequences eos_token_id bos_token_id pad_token_id decoder_start_token_id "
    "do_sample temperature top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff "
    "suppress_tokens renormalize_logits remove_invalid_values "
    "use_cache disable_compile continuous_batching_config transformers_version "
    "early_stopping length_penalty".split()  # of beams alone, which are refused
)
# They say how generate computes or returns its tokens. Pages, steps and results of batches are of their own.
_OF_GENERATE = frozenset(
    "cache_implementation max_cache_len prefill_chunk_size low_memory compile_config "
    "return_dict_in_generate use_mtp prompt_lookup_num_tokens max_matching_ngram_size speculation_type is_assistant "
    "num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold assistant_early_exit "
    "assistant_lookbehind target_lookbehind".split()
)
# Many chat models bring a mild one in their files, and would not be served at all. Left out with a warning, as
# transformers does; refused where the caller asks for it.
_LEFT_OUT_OF_MODEL = frozenset({"repetition_penalty"})
# They say what may not come before some number of tokens: an end token.
_OF_END = frozenset({"min_new_tokens", "min_length"})
# Values that change nothing, beside None, False and transformers' defaults.
_NEUTRAL = {"min_new_tokens": 0, "guidance_scale": 1, "penalty_alpha": 0, "cache_implementation": "paged"}
# The mark of a config that `complete` has made: names with an underscore are no settings.
_IS_COMPLETE = "_hf_kvquant_is_complete"


def complete(model: PreTrainedModel, config: GenerationConfig | None, **arguments: Any) -> GenerationConfig:
    """A copy of a config with what it leaves out: from the model's own config, then from generate's defaults.

    Only a length stays away if neither config nor the model's own has one: then requests end at an end token alone.

    Args:
        model: Patched.
        config: Passed by the caller; `None` for the model's own.
        **arguments: Settings that the caller has passed besides, which count more. `None` switches one off. Others are
            left out.
    """
    given = GenerationConfig() if config is None else config
    completed = copy.deepcopy(given)
    if not hasattr(given, _IS_COMPLETE):
        is_of_answer = "max_length" not in arguments and _has_length_of_answer(given)
        prepare: Any = model._prepare_generation_config
        completed = prepare(config)[0]
        if is_of_answer:
            completed.max_new_tokens = completed.max_length
        if is_of_answer or (given.max_length is None and model.generation_config.max_length is None):
            completed.max_length = None
    completed.update(**arguments)
    if isinstance(completed.eos_token_id, Tensor):  # generate takes one, too
        completed.eos_token_id = completed.eos_token_id.tolist()
    return marked_complete(completed)


def marked_complete(config: GenerationConfig) -> GenerationConfig:
    """A config, to which nothing is added from now on: its `None` means none."""
    setattr(config, _IS_COMPLETE, True)
    return config


def _has_length_of_answer(config: GenerationConfig) -> bool:
    """Whether generate(cache_implementation="paged") has filled in everything. Its default length is the answer's."""
    defaults = GenerationConfig._get_default_generation_params()
    is_filled = all(getattr(config, name, None) is not None for name, value in defaults.items() if value is not None)
    return is_filled and config.max_new_tokens is None and config.max_length == defaults["max_length"]


def check_settings(model: PreTrainedModel, config: GenerationConfig) -> None:
    """Refuse settings that continuous batching would drop, and warn once of those that only generate has.

    Args:
        model: Whose own generation config may have further names, which mean nothing to generate either.
        config: Of the manager, complete. What the model brings and batching leaves out is set to `None`.

    Raises:
        NotImplementedError: A setting does not hold; the message names all of them.
        ValueError: `cache_config` asks for other codes than the pages have.
    """
    _check_cache_config(model, config)
    changed = {name: value for name, value in vars(config).items() if name not in _HOLD and _is_changed(name, value)}
    known, own = vars(GenerationConfig()), vars(model.generation_config or GenerationConfig())
    from_model = [name for name, value in changed.items() if name in own and own[name] == value]
    of_generate = {name: value for name, value in changed.items() if name in _OF_GENERATE}
    of_model = {name: value for name, value in changed.items() if name in _LEFT_OUT_OF_MODEL and name in from_model}
    refused = {
        name: value
        for name, value in changed.items()
        if name not in of_generate
        and name not in of_model
        and not (name in _OF_END and not _end_tokens(config.eos_token_id))
        and not (name == "sequence_bias" and _is_of_single_tokens(value))
        and not (name not in known and name in from_model)
    }
    if refused:
        named = ", ".join(name for name in refused if name in from_model)
        where = f" The model's own generation config (generation_config.json) sets {named}." if named else ""
        where += " To do without, set that to None in model.generation_config." if named else ""
        raise NotImplementedError(
            f"{WHERE}: `generation_config` must only have settings that hold under continuous batching, got "
            f"{_text(refused)}. Leave out what is named, or use generate.{where}"
        )
    if of_generate:
        tell_left_out("settings that are for generate alone", _text(of_generate))
    if of_model:
        for name in of_model:
            setattr(config, name, None)
        tell_left_out("what the model's own generation config sets", _text(of_model))


def new_tokens_of(config: GenerationConfig, num_tokens: int) -> int | None:
    """How many tokens a request may get that brings no number of its own.

    Args:
        config: Of the manager.
        num_tokens: Of the prompt.

    Returns:
        `None` if the config does not say.
    """
    if config.max_new_tokens is not None or config.max_length is None:
        return config.max_new_tokens  # type: ignore[no-any-return]
    return int(config.max_length) - num_tokens


def check_end_tokens(config: GenerationConfig, end_tokens: Collection[int]) -> None:
    """Refuse end tokens of a request if its manager was told that nothing may come before some number of tokens.

    Args:
        config: Of the manager.
        end_tokens: Of the request; negative ones stand for none.

    Raises:
        ValueError: They would come too early.
    """
    asked = {name: getattr(config, name) for name in sorted(_OF_END) if _is_changed(name, getattr(config, name))}
    if asked and _end_tokens(end_tokens) and not _end_tokens(config.eos_token_id):
        raise ValueError(
            f"continuous batching: `eos_token_id` of a request must be left out by a manager with {_text(asked)}, got "
            f"{sorted(end_tokens)}: the end token could come earlier. Leave one of the two out."
        )


def is_alike(config: GenerationConfig, other: GenerationConfig) -> bool:
    """Whether a manager that was made for one serves the other. Lengths are of requests."""

    def settings_of(each: GenerationConfig) -> dict[str, str]:
        lengths = "max_new_tokens", "max_length"
        return {
            name: repr(value) for name, value in vars(each).items() if name not in lengths and not name.startswith("_")
        }

    return settings_of(config) == settings_of(other)


def _is_changed(name: str, value: Any) -> bool:
    """Whether a setting asks for something. Names with an underscore are transformers' notes."""
    if name.startswith("_") or value is None or value is False:
        return False
    return value not in (_defaults().get(name), _NEUTRAL.get(name))


@functools.cache
def _defaults() -> dict[str, Any]:
    """What generate fills in for settings that are `None`."""
    return {**vars(GenerationConfig()), **GenerationConfig._get_default_generation_params()}


def _end_tokens(ids: Any) -> list[int]:
    """The end tokens that `eos_token_id` names. transformers also writes -1 for none."""
    return [each for each in (ids if isinstance(ids, (list, tuple, set)) else [ids]) if each is not None and each >= 0]


def _check_cache_config(model: PreTrainedModel, config: GenerationConfig) -> None:
    """Refuse a cache of another kind than the pages. One of the same kind is what the call gets anyway."""
    given, patch = config.cache_config, patch_of(model)
    if given is None or patch is None:
        return
    wanted = given
    if isinstance(given, Mapping) and given.get("backend", BACKEND) == BACKEND:
        wanted = KVQuantConfig.from_dict({name: value for name, value in given.items() if name != "config"})
    if wanted != patch.config:
        raise ValueError(
            f"{WHERE}: `cache_config` must be left out, or be the config that the model is patched with, since the "
            f"pages of all requests are made for that ({patch.config.to_dict()}), got {given!r}. Patch the model with "
            "the one that you want."
        )
    config.cache_config = config.cache_implementation = None


def _is_of_single_tokens(sequence_bias: Any) -> bool:
    """Whether no bias depends on the tokens before. Entries are `(token, …): bias` or `[[token, …], bias]`."""
    sequences = sequence_bias if isinstance(sequence_bias, dict) else (sequence for sequence, _ in sequence_bias)
    return all(len(sequence) == 1 for sequence in sequences)


def _text(settings: dict[str, Any]) -> str:
    """Names and values, long ones shortened."""
    return ", ".join(f"{name}={reprlib.repr(value)}" for name, value in settings.items())


@functools.cache
def tell_left_out(what: str, settings: str) -> None:
    """Log each text once."""
    logger.warning("%s: continuous batching leaves out %s: %s.", WHERE, what, settings)
