"""The methods of a patched model through which transformers comes to every manager, and to its settings."""

from __future__ import annotations

import inspect
import reprlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..common.errors import did_you_mean
from ..state import notes_on
from .settings import check_settings, complete, is_alike
from .support import WHERE, check_version


def init_continuous_batching(
    model: PreTrainedModel,
    generation_config: Any = None,
    continuous_batching_config: Any = None,
    workload_hints: Any = None,
) -> Any:
    """Replaces `ContinuousMixin.init_continuous_batching`: makes a manager over pages of codes, or returns a kept one.

    Settings that the config leaves out come from the model's own, as in generate. A kept manager serves the same
    settings only. Others get a new one.

    Arguments and result are as in transformers' method.

    Raises:
        ImportError, NotImplementedError, ValueError: The model or a setting is not served. The model is unchanged.
        RuntimeError: A manager of this model is running.
    """
    check_version()
    # Not at the top: releases without these modules, or with others of these names, serve all but batching.
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    from .manager import Manager

    generation_config = complete(model, generation_config)
    check_settings(model, generation_config)
    if generation_config.eos_token_id is None:
        generation_config.eos_token_id = -1  # transformers' spelling of none, for its logits processors
    kept = getattr(model, "_cached_continuous_batching_manager", None)
    if (
        isinstance(kept, Manager)
        and kept.made_for.is_that_of(model)
        and is_alike(kept.generation_config, generation_config)
    ):
        kept.generation_config = generation_config  # its lengths
        kept.switch_to_cb_friendly_attn(model)
        return kept
    if _manager_of(model) is not None and _manager_of(model).is_running():
        raise RuntimeError(
            f"{WHERE}: `model` must have no running manager, got one that has. Add requests to it, or stop it."
        )
    close(model)
    if continuous_batching_config is None:
        continuous_batching_config = getattr(generation_config, "continuous_batching_config", None)
    if continuous_batching_config is None:
        continuous_batching_config = ContinuousBatchingConfig()
    return Manager(model, generation_config, continuous_batching_config, workload_hints)


def generate_batch(
    model: PreTrainedModel, inputs: list[list[int]], generation_config: Any = None, *args: Any, **options: Any
) -> Any:
    """Calls `ContinuousMixin.generate_batch`, with settings that are arguments, which it would drop (5.24).

    Settings that neither has come from the model's own config, as in generate. Arguments and result are as in
    transformers' method.

    Raises:
        ImportError, NotImplementedError, ValueError: See `init_continuous_batching`; or `attention_mask` hides tokens.
        TypeError: An argument is not served, which transformers would drop (5.24); or a prompt is no list.
    """
    check_version()
    _check_known(model, options)
    for prompt in () if inputs is None else inputs:
        if isinstance(prompt, str) or getattr(prompt, "ndim", 1) == 0 or not hasattr(prompt, "__len__"):
            raise TypeError(
                "generate_batch: `inputs` must be a list of prompts, each a list of token ids, got "
                f"{reprlib.repr(prompt)} in it. Call the tokenizer with a list of texts, and pass its `input_ids`."
            )
    mask = options.get("attention_mask")
    if mask is not None and not torch.as_tensor(mask).all():
        raise NotImplementedError(
            "generate_batch: `attention_mask` must be left out or all ones, got one that hides tokens: padding would "
            "be read as text. Pass each prompt without its padding, as a list of tokens."
        )
    config = complete(
        model,
        generation_config,
        **{name: value for name, value in options.items() if name != "continuous_batching_config"},
    )
    theirs: Any = type(model)
    return theirs.generate_batch(model, inputs, config, *args, **options)


# Arguments of generate that say nothing here: `generate(cache_implementation="paged")` passes them on.
_OF_INPUT = ("inputs", "input_ids", "attention_mask", "tokenizer", "processing_class")


def _check_known(model: PreTrainedModel, options: Mapping[str, Any]) -> None:
    """Refuse arguments that are neither settings nor transformers' own: nobody would look at them."""
    theirs: Any = type(model)
    own = inspect.signature(theirs.generate_batch).parameters
    known = {*own, *_OF_INPUT, *vars(GenerationConfig()), *vars(model.generation_config or GenerationConfig())}
    for name, value in options.items():
        if name not in known and value is not None:
            raise TypeError(
                f"generate_batch: `{name}` must be left out, since continuous batching has nothing of that name, got "
                f"{type(value).__name__}.{did_you_mean(name, known)} Leave it out, or use generate."
            )


HOOKS: dict[str, Callable[..., Any]] = {
    "init_continuous_batching": init_continuous_batching,
    "generate_batch": generate_batch,
}


def close(model: PreTrainedModel) -> None:
    """Stop and destroy the managers of a model, including transformers' own that it keeps."""
    manager = _manager_of(model)
    if manager is not None:
        if manager.is_running():
            manager.stop(hard_stop=True)
        manager.destroy()
        notes_on(model).manager = None
    if getattr(model, "_cached_continuous_batching_manager", None) is not None:
        destroy: Any = model.destroy_cached_continuous_batching_manager
        destroy()
    # Of a manager that was dropped without being stopped. Where none was ever made, the module is not imported either.
    forwards = sys.modules.get(f"{__package__}.forwards")
    if forwards is not None:
        forwards.unwrap(model.modules())


def _manager_of(model: PreTrainedModel) -> Any:
    """The newest manager that was made here for a model, if it is still in use."""
    reference = notes_on(model).manager
    return None if reference is None else reference()
