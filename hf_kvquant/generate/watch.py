"""`generate` of a patched model: as before, and a look afterwards whether a cache of ours has held its tokens.

A model may have a `generate` that never asks for a cache, or drop the one that it is given. Nothing is quantised then,
and only the memory that it takes would tell.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from ..cache.kvquant_cache import KVQuantCache
from ..models.parts import stand_ins
from ..state import notes_on
from ..upstream.releases import CACHE_NAMES
from . import continued, positions
from .encoder_decoder import decoder_cache

logger = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class Call:
    """A call of `generate` that is running.

    Attributes:
        is_choice: Whether its arguments ask for another cache, or for none.
        caches: Our caches that it was given or got.
        why_other: Why it got another cache, or none; `None` if it did not.
        thread: The thread that runs it: a model may serve several threads at once.
    """

    is_choice: bool
    caches: list[KVQuantCache] = dataclasses.field(default_factory=list)
    why_other: str | None = None
    thread: int = dataclasses.field(default_factory=threading.get_ident)

    @property
    def chose_other(self) -> bool:
        """Whether it has another cache, or none, because it asked for that."""
        return self.why_other is not None and self.is_choice

    def why_unquantized(self) -> str | None:
        """Why no cache of ours holds its tokens; `None` if one does, or none was asked for."""
        if self.why_other is not None:
            return None if self.is_choice else self.why_other
        if not self.caches:
            return "its generate asks for no cache"
        held = [storage for cache in self.caches for storage in cache.storages]
        return "it has dropped its cache" if held and all(storage.is_empty for storage in held) else None


def generate(model: Any, *args: Any, decode: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
    """Replaces `generate` of a patched model; same arguments, same results.

    `decode` is what runs instead of the class's own method, `None` if that is to run.
    """
    run = decode or type(model).generate
    if kwargs.get("cache_implementation") == "paged":  # goes to a manager, which has pages
        processors = kwargs.get("logits_processor", args[2] if len(args) > 2 else None)
        if processors:  # transformers refuses its like and drops this one (5.24)
            raise NotImplementedError(
                "generate: `logits_processor` must be left out with cache_implementation='paged', got "
                f"{type(processors).__name__}: continuous batching would not call it. Leave it out, or "
                "use another cache_implementation."
            )
        return run(model, *args, **kwargs)
    for given in (decoder_cache(kwargs.get(name)) for name in CACHE_NAMES):
        if given is not None:
            positions.restore(model, given, kwargs)
    call, notes = Call(_is_choice(*args, **kwargs)), [notes_on(each) for each in (model, *stand_ins(model).values())]
    is_outer = not any(each.thread == call.thread for each in notes[0].calls)
    for each in notes:
        each.calls.append(call)
    try:
        result = run(model, *args, **kwargs)
    finally:
        continued.undo(model, call.caches)
        for each in notes:
            each.calls.remove(call)
        for cache in call.caches:
            cache.notes.told = None  # the next prompt has other padding
            positions.keep(model, cache)
    notes[0].why_unquantized, notes[0].chose_other = call.why_unquantized(), call.chose_other
    if is_outer and notes[0].why_unquantized is not None:
        _log_unquantized(type(model).__name__, notes[0].why_unquantized)
    return result


def note_cache(model: PreTrainedModel, cache: KVQuantCache | None) -> None:
    """Tell the calls of `generate` that this thread runs which cache of ours they have; `None` if they want another.

    A call that has a cache of ours already is an outer one: a logits processor of it calls `generate`, for example.
    """
    for call in [each for each in notes_on(model).calls if each.thread == threading.get_ident()]:
        if cache is not None:
            call.caches.append(cache)
        elif not call.caches:
            call.why_other = why_other(model)


def _is_choice(inputs: Any = None, generation_config: Any = None, *args: Any, **kwargs: Any) -> bool:
    """Whether the arguments of a call ask for another cache than ours, or for none."""
    options = {**(vars(generation_config) if generation_config is not None else {}), **kwargs}
    names = {*CACHE_NAMES, "cache_implementation"}
    return options.get("use_cache") is False or any(options.get(name) is not None for name in names)


def why_other(model: PreTrainedModel) -> str:
    """Why a call that does not ask for another cache gets one: checkpoints come with settings, too."""
    settings: Any = getattr(model, "generation_config", None)
    if getattr(settings, "use_cache", None) is False:
        return "model.generation_config has use_cache=False (set it to True, or pass use_cache=False if you mean it)"
    implementation = getattr(settings, "cache_implementation", None)
    if implementation is not None:
        return (
            f"model.generation_config has cache_implementation={implementation!r} (set it to None, or pass "
            "cache_implementation if you mean it)"
        )
    return "its generate passes another cache"


@functools.cache
def _log_unquantized(name: str, why: str) -> None:
    logger.warning(
        "generate: %s has used no cache of hf_kvquant, so nothing was quantised: %s. Leave the model unpatched, or "
        "patch the part of it that generates.",
        name,
        why,
    )
