"""Which settings of a generation config hold under continuous batching. All others are refused by name.

transformers ends a request by its number of tokens or an end token, and shows processors of logits the newest token of
each request alone. So what needs earlier tokens, several sequences at once, time or text would be dropped, or would end
the manager. The lists here name what holds: a setting that a later release adds is refused until somebody has looked.
"""

from __future__ import annotations

import functools
import logging
import reprlib
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

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
    "cache_implementation cache_config max_cache_len prefill_chunk_size low_memory compile_config "
    "return_dict_in_generate use_mtp prompt_lookup_num_tokens max_matching_ngram_size speculation_type is_assistant "
    "num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold assistant_early_exit "
    "assistant_lookbehind target_lookbehind".split()
)
# Many chat models bring a mild one in their files, and would not be served at all. Left out with a warning, as
# transformers does; refused where the caller asks for it.
_LEFT_OUT_OF_MODEL = frozenset({"repetition_penalty"})
# Values that change nothing, beside None, False and transformers' defaults.
_NEUTRAL = {"min_new_tokens": 0, "guidance_scale": 1, "penalty_alpha": 0, "cache_implementation": "paged"}


def check_settings(model: PreTrainedModel, config: GenerationConfig) -> None:
    """Refuse settings that continuous batching would drop, and warn once of those that only generate has.

    Args:
        model: Whose own generation config may have further names, which mean nothing to generate either.
        config: Of the manager. What the model brings and batching leaves out is set to `None`.

    Raises:
        NotImplementedError: A setting does not hold; the message names all of them.
    """
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
        and not (name == "sequence_bias" and _is_of_single_tokens(value))
        and not (name not in known and name in from_model)
    }
    if refused:
        named = ", ".join(name for name in refused if name in from_model)
        where = f" The model's own generation config (generation_config.json) sets {named}." if named else ""
        raise NotImplementedError(
            f"{WHERE}: `generation_config` must only have settings that hold under continuous batching, got "
            f"{_text(refused)}. Leave out what is named, or use generate.{where}"
        )
    if of_generate:
        _tell_left_out("settings that are for generate alone", _text(of_generate))
    if of_model:
        for name in of_model:
            setattr(config, name, None)
        _tell_left_out("what the model's own generation config sets", _text(of_model))


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
    defaults = GenerationConfig._get_default_generation_params()
    # generate(cache_implementation="paged") has filled in everything. Its default length is that of the answer.
    is_filled = all(getattr(config, name, None) is not None for name, value in defaults.items() if value is not None)
    is_of_answer = is_filled and config.max_length == defaults["max_length"]
    return int(config.max_length) - (0 if is_of_answer else num_tokens)


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


def _is_of_single_tokens(sequence_bias: Any) -> bool:
    """Whether no bias depends on the tokens before. Entries are `(token, …): bias` or `[[token, …], bias]`."""
    sequences = sequence_bias if isinstance(sequence_bias, dict) else (sequence for sequence, _ in sequence_bias)
    return all(len(sequence) == 1 for sequence in sequences)


def _text(settings: dict[str, Any]) -> str:
    """Names and values, long ones shortened."""
    return ", ".join(f"{name}={reprlib.repr(value)}" for name, value in settings.items())


@functools.cache
def _tell_left_out(what: str, settings: str) -> None:
    """Log each text once."""
    logger.warning("%s: continuous batching leaves out %s: %s.", WHERE, what, settings)
