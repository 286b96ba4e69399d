"""Assisted decoding over captured forwards, by an assistant model or by prompt lookup.

transformers' own loop runs. It calls a stand-in for the model, whose forward over a few new tokens replays a CUDA
graph, one for each number of tokens. An assistant patched with `capture=True` replays its steps in the same way.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from transformers.generation.configuration_utils import GenerationMode

from ..models.layers import layers_of
from ..models.text_config import text_config_of
from ..state import Assisted, notes_on, patch_of
from ..upstream.releases import CACHE
from .capture import Forward, is_captured

logger = logging.getLogger(__name__)


class Replayed:
    """A model whose forward replays captured steps over a captured cache. Everything else is the model's own."""

    def __init__(self, model: Any) -> None:
        self._replayed_model = model
        self._replayed_forward = Forward(model, None, are_chunks_captured=True)

    def __call__(self, **inputs: Any) -> Any:
        return self._replayed_forward(**inputs)

    def get_compiled_call(self, compile_config: Any) -> Any:
        """See `PreTrainedModel`. Since 5.24, transformers' assisted loop asks for it, as its others do."""
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replayed_model, name)


def decode(model: Any, input_ids: Tensor, *, inputs_tensor: Any = None, **call: Any) -> Any:
    """A decoding method for `custom_generate` of `generate`; arguments as transformers' `_assisted_decoding`."""
    caller = Replayed(model) if is_captured(call.get(CACHE)) else model
    return type(model)._assisted_decoding(caller, input_ids, inputs_tensor=inputs_tensor, **call)


def decoding_method(model: Any, config: Any, options: Mapping[str, Any]) -> Callable[..., Any] | None:
    """What `generate` is to run for an assisted call, `None` if transformers' own method. Refuses what that refuses.

    `config` is the call's generation config, `options` are the arguments of `generate`.
    """
    reason = _why_not(model, config, options)
    if reason is not None:
        _log_uncaptured(reason)
        return None
    # generate does not pass these to a custom method, and checks them only for its own.
    kept = {
        name: options[name] for name in ("assistant_model", "tokenizer", "streamer") if options.get(name) is not None
    }
    model._validate_generation_mode(GenerationMode.ASSISTED_GENERATION, config, kept)
    return functools.partial(decode, **kept)


def _why_not(model: Any, config: Any, options: Mapping[str, Any]) -> str | None:
    assistant = options.get("assistant_model")
    if config.assistant_early_exit is not None:
        return "the model assists itself by its first layers"
    if config.prompt_lookup_num_tokens is None:
        if config.use_mtp or config.speculation_type or "Assistant" in type(assistant).__name__:
            return "proposals are made from the model's hidden states"
        if options.get("assistant_tokenizer") is not None:
            return "the assistant has another tokenizer"
    if not _are_layers_croppable(model):
        return f"{type(model).__name__} has layers other than full attention"
    return None


def _are_layers_croppable(model: Any) -> bool:
    """Whether a static cache can take back any number of tokens: a ring cannot take back many, a state none."""
    return set(layers_of(text_config_of(model))[0]) == {"full_attention"}


@contextlib.contextmanager
def sized(model: Any, assistant: Any) -> Iterator[None]:
    """Within it, `generate` makes static caches for a model and its assistant that have room for all proposals.

    An assistant without `capture=True` keeps its growing cache.
    """
    assisted = Assisted()
    patch = None if assistant is None else patch_of(assistant)
    served = [model]
    if patch is not None and patch.config.capture and _are_layers_croppable(assistant):
        served.append(assistant)
    before = [notes_on(each).assisted for each in served]
    for each in served:
        notes_on(each).assisted = assisted
    try:
        yield
    finally:
        for each, note in zip(served, before, strict=True):
            notes_on(each).assisted = note


@functools.cache
def _log_uncaptured(reason: str) -> None:
    logger.warning("generate does not capture this assisted decoding: %s. Correct, slower.", reason)
