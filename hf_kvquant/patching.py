"""`patch`, `unpatch`, `patched`, `enable` and `disable`: how a model comes to use our cache and our attention.

A patched model has our attention implementation in its config, which passes everything but our handles on to the one it
had before. It also has three instance methods: `_prepare_cache_for_generation`, which makes our cache in `generate`,
`generate_batch`, which takes settings as arguments, and `init_continuous_batching`, which makes its manager. With
`capture=True` it has two more: `generate`, which decodes in our loop, and `get_compiled_call`, from which transformers'
loops get the function that runs their steps.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from transformers import GenerationMixin, PreTrainedModel

from .attention import unregistered as own_attention
from .attention.registry import implementation_name, is_ours, is_upstream, not_upstream, set_attention
from .batching import hook as batching
from .cache.support import check_model
from .config import DEFAULT_PRESET, KVQuantConfig, register_preflight
from .generate.hook import HOOK, asks_for_us, check_folded, prepare_cache
from .graphs.capture import Forward, check_capturable, check_graphs
from .graphs.decode_loop import generate
from .models.layers import keeps_cache, layers_of
from .models.sharding import check_heads
from .models.text_config import check_is_model, text_config_of
from .presets import FEW_BITS
from .state import Patch, keep, noted_models, notes_on, patch_of
from .upstream.contracts import check_release

logger = logging.getLogger(__name__)

_CAPTURE_HOOKS: dict[str, Callable[..., Any]] = {"generate": generate, "get_compiled_call": Forward}
Model = TypeVar("Model", bound=PreTrainedModel)


def patch(model: Model, preset_or_config: str | KVQuantConfig | Mapping[str, Any] = DEFAULT_PRESET) -> Model:
    """Make `model.generate` keep keys and values as codes and attend to them directly.

    So does continuous batching (`generate_batch`), for the models that `batching/support.py` lists. A cache that the
    user passes, `use_cache=False`, any other `cache_implementation` of transformers and assistant models work as
    before. Patching again replaces the config. With `static=True` the model keeps the buffers of a call until
    `unpatch`, so that the next call reuses them and the compiled steps. Steps captured with `capture=True` are kept,
    too. If weights, modules, hooks or adapters change, the next call captures new ones.

    With keys of 4 bits or fewer, a look at some weights tells whether the model needs calibration first. If so, the log
    says it in one line (`preflight/hint.py`).

    Args:
        model: A transformers model with a decoder. In an encoder-decoder, the self-attention cache is quantised.
        preset_or_config: A preset's name, a dictionary or a `KVQuantConfig`.

    Returns:
        The same model.

    Raises:
        NotImplementedError: The model's cache cannot be quantised, or its decode step cannot be captured. The model is
            unchanged. `capture=True` needs a machine with a GPU; the model may be moved to the GPU after `patch`.
        TypeError, ValueError: The config is invalid or does not fit the model.

    Example:
        >>> hf_kvquant.patch(model, "int4")
        >>> model.generate(**inputs, max_new_tokens=100)
        >>> hf_kvquant.patch(model, {"preset": "int4", "capture": True})  # decode steps as CUDA graphs
    """
    config = KVQuantConfig.resolve(preset_or_config)
    check_patchable(model, config)
    if config.capture:
        check_release("patch", "graphs")
        check_graphs(model)
    before = patch_of(model)
    previous = text_config_of(model)._attn_implementation if before is None else before.previous_attention
    _route_attention(model, previous)
    if config.capture and not is_ours(text_config_of(model)._attn_implementation):
        if before is None:
            own_attention.unpatch(model)
        raise NotImplementedError(
            f"patch: `capture` must be False for {type(model).__name__}, got True: it computes attention by itself, "
            "outside transformers' registry. Pass static=True instead, and generate compiles."
        )
    _install(model, Patch(config, previous))
    formats = (config, *config.layers.values())
    if any(each.key.is_quantized and each.key.bits <= FEW_BITS for each in formats):
        _preflight("hint").tell(model, config)
    return model


def _preflight(module: str) -> Any:
    """A module of the pre-flight. It is above this file and imports it, so it is looked up when it is needed."""
    return importlib.import_module(f".preflight.{module}", __package__)


register_preflight(lambda *args, **options: _preflight("check").run_preflight(*args, where="for_model", **options))


def _install(model: PreTrainedModel, patch: Patch | None) -> None:
    """Give a model the methods that its patch asks for, and remove what an earlier one left. `None` asks for none."""
    batching.close(model)
    for name in (HOOK, *batching.HOOKS, *_CAPTURE_HOOKS):
        model.__dict__.pop(name, None)
    notes_on(model).drop_buffers()
    keep(model, patch=patch)
    if patch is None:
        return
    # Partials of module-level functions survive pickle and deepcopy with the model; bound methods would not.
    check = check_capturable if patch.config.capture else None
    setattr(model, HOOK, functools.partial(prepare_cache, model, check_capturable=check))
    for name, function in {**batching.HOOKS, **(_CAPTURE_HOOKS if patch.config.capture else {})}.items():
        setattr(model, name, functools.partial(function, model))


def unpatch(model: Model) -> Model:
    """Undo `patch`, and return the model with the attention implementation and the methods it had.

    Raises:
        TypeError: `model` is not a transformers model.
        ValueError: The model is not patched.
    """
    check_is_model(model, "unpatch")
    patch = patch_of(model)
    if patch is None:
        raise ValueError(
            f"unpatch: `model` must be patched, got an unpatched {type(model).__name__}. Call patch first."
        )
    _install(model, None)
    own_attention.unpatch(model)
    set_attention(model, patch.previous_attention)
    return model


@contextlib.contextmanager
def patched(
    model: Model, preset_or_config: str | KVQuantConfig | Mapping[str, Any] = DEFAULT_PRESET
) -> Iterator[Model]:
    """`patch` within a `with` block. Afterwards the model is as it was before, patched or not."""
    check_is_model(model, "patched")
    before = patch_of(model)
    patch(model, preset_or_config)
    try:
        yield model
    finally:
        if before is None:
            unpatch(model)
        else:
            _install(model, before)


def enable() -> None:
    """Make `cache_implementation="quantized", cache_config={"backend": "hf_kvquant"}` work on every model.

    For servers and code that never calls `patch`. A model gets our attention implementation on the first call that asks
    for our backend, and keeps it; calls with other caches work as before. Without `enable`, such a call raises an error
    in transformers unless the model is patched: transformers does not know our backend.
    """
    check_release("enable")
    if getattr(GenerationMixin, HOOK) is not _hook_for_all:
        global _original_hook
        _original_hook = getattr(GenerationMixin, HOOK)
        setattr(GenerationMixin, HOOK, _hook_for_all)


def disable() -> None:
    """Undo `enable`. Does nothing if it was not called."""
    if getattr(GenerationMixin, HOOK) is _hook_for_all:
        setattr(GenerationMixin, HOOK, _original_hook)
        for model in noted_models():
            if patch_of(model) is None:
                notes_on(model).drop_buffers()


_original_hook: Callable[..., Any] = getattr(GenerationMixin, HOOK)


def _hook_for_all(self: PreTrainedModel, generation_config: Any, model_kwargs: dict[str, Any], *args: Any) -> Any:
    if asks_for_us(generation_config):
        previous = text_config_of(self)._attn_implementation
        if not is_ours(previous):
            _route_attention(self, previous)
    return prepare_cache(self, generation_config, model_kwargs, *args, fall_through=_original_hook)


def check_patchable(model: PreTrainedModel, config: KVQuantConfig) -> None:
    """Refuse a model that `patch` cannot serve, with the errors of `patch`."""
    check_is_model(model, "patch")
    check_release("patch")
    check_folded(model, "patch")
    if model.config.is_encoder_decoder and config.capture:
        raise NotImplementedError(
            f"patch: `capture` must be False for {type(model).__name__}, got True: it is an encoder-decoder, whose "
            "cross-attention reads tensors that are new in every call. Pass static=True instead, and generate compiles."
        )
    if not keeps_cache(model):
        raise NotImplementedError(
            f"patch: {type(model).__name__} does not keep its state in a cache of transformers, so there are no keys "
            "and values to quantise. Leave the model unpatched."
        )
    text_config = text_config_of(model)
    layer_types, _ = layers_of(text_config)
    check_model(text_config, layer_types, config)
    check_heads(model, "patch")
    if config.static:
        own_attention.check_static(model, "patch")


def _route_attention(model: PreTrainedModel, previous: str) -> None:
    """Set our attention over `previous`. Models outside transformers' registry get ours by hand, or fall back."""
    name = implementation_name(previous)
    if own_attention.patch(model):
        return
    set_attention(model, name)
    reason = why_dense(model)
    if reason is not None and not notes_on(model).is_told:
        notes_on(model).is_told = True
        logger.warning("patch: %s, so it attends to dequantised tensors. Correct, slower.", reason)


def why_dense(model: PreTrainedModel) -> str | None:
    """Why a patched model always attends to dequantised tensors, or `None` if it does not."""
    if own_attention.is_patched(model):
        return None
    if is_ours(text_config_of(model)._attn_implementation):
        patch = patch_of(model)
        prev = "eager" if patch is None else patch.previous_attention
        return None if is_upstream(prev) else not_upstream(prev)
    return f"{type(model).__name__} computes attention by itself, outside transformers' registry"
