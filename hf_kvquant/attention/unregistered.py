"""Decoding from codes in models that compute attention by themselves, outside transformers' attention registry.

Each attention module of a family that `families.py` lists gets its own `forward`. If the layer's cache holds codes, it
computes query, key and value as the family does and attends with our op. Everything else (the first chunk, other
caches, layers that are not quantised, masks that are neither causal nor left padding, training) goes to the class's own
method, with the same arguments. `handle.py` serves models of no family.

These models build dense masks themselves, so the number of padding tokens is read from the mask's last row.
"""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from ..cache.handle import KVHandle
from ..cache.kvquant_cache import KVQuantCache
from ..cache.layers import KVQuantLayer
from ..cache.support import check_layers
from ..models.layers import layers_of
from ..models.text_config import text_config_of
from ..ops import is_uneven
from ..storage.layer_store import LayerStore
from ..upstream.releases import CACHE
from .families import FAMILIES, Attend, Family, family_of
from .masks import follow_padding, has_masks, is_tracing, num_pads
from .registry import is_ours, joins_masks, previous_of


def patch(model: nn.Module) -> bool:
    """Override `forward` of every attention module that we know, unless something else has. Returns `is_patched`."""
    known = [module for module in model.modules() if family_of(module) is not None]
    for module in known:
        if "forward" not in module.__dict__:
            # A partial of a module-level function survives pickle and deepcopy with the model.
            module.forward = functools.partial(_forward, module, len(known))
    return is_patched(model)


@contextlib.contextmanager
def overridden(model: nn.Module) -> Iterator[bool]:
    """`patch` within a `with` block, yielding its result. Afterwards the modules are as they were before."""
    before = {module for module in model.modules() if _is_ours(module)}
    try:
        yield patch(model)
    finally:
        unpatch(model, but=before)


def is_patched(model: nn.Module) -> bool:
    """Whether there are attention modules that we know, and all of them have our `forward`."""
    known = [module for module in model.modules() if family_of(module) is not None]
    return bool(known) and all(_is_ours(module) for module in known)


def unpatch(model: nn.Module, *, but: Collection[nn.Module] = ()) -> None:
    """Undo `patch`, `but` for some modules."""
    for module in model.modules():
        if _is_ours(module) and module not in but:
            del module.__dict__["forward"]


# Decoders that compute attention by themselves. Kosmos-2 and ProphetNet raise with transformers' own static cache, too
# (5.24).
_ATTEND_BY_THEMSELVES = {"GitModel", "Kosmos2TextTransformer", "ProphetNetDecoder"}


def check_static(model: PreTrainedModel, where: str) -> None:
    """Refuse a static cache for models that would compute something else over its capacity.

    For every static cache, `generate` makes a 4-D mask, unless the model has its own `create_masks_for_generate`; BLOOM
    and Falcon need a 2-D one for ALiBi. LED and FSMT mask the tokens that a cache holds, but not the capacity after.
    """
    reason = None
    names = {type(module).__name__ for module in model.modules() if getattr(module, "use_alibi", True)}
    if names & {"BloomModel", "FalconModel"} and not hasattr(model, "create_masks_for_generate"):
        reason = (
            "builds ALiBi from a 2-D mask, and generate of this version of transformers makes a 4-D one for static "
            "caches"
        )
    layer_types, _ = layers_of(text_config_of(model))
    if "hybrid_sliding" in layer_types and not hasattr(model, "create_masks_for_generate"):
        # Inkling. The function of transformers knows windows under the name `sliding_attention` only.
        reason = "has sliding windows that the masks of transformers' generate for static caches leave out"
    attends_by_itself = bool(names & _ATTEND_BY_THEMSELVES)
    if model.config.is_encoder_decoder:
        can_set: Callable[[], bool] = getattr(model.get_decoder(), "_can_set_attn_implementation", lambda: False)
        attends_by_itself = attends_by_itself or not can_set()
    if attends_by_itself:
        reason = (
            "computes attention by itself, outside transformers' registry, over the whole capacity of a static cache"
        )
    if "CpmAntModel" in names:
        reason = "puts tokens of its own before the prompt, for which generate leaves no room in static caches"
    if joins_masks(model):
        reason = "joins the masks of its own and the encoder's tokens, of which static caches get one alone"
    name = text_config_of(model)._attn_implementation
    prev = previous_of(name) if is_ours(name) else name
    if not has_masks(prev):
        reason = (
            f"attends by {prev!r}, for which AttentionMaskInterface has no mask function, so that nothing hides the "
            "capacity of a static cache"
        )
    if reason is not None:
        raise NotImplementedError(
            f"{where}: `static` must be False for {type(model).__name__}, got True: it {reason}. Leave static and "
            "max_cache_len out."
        )


def _is_ours(module: nn.Module) -> bool:
    forward = module.__dict__.get("forward")
    return isinstance(forward, functools.partial) and forward.func is _forward


def _forward(module: Any, num_layers: int, *args: Any, **kwargs: Any) -> Any:
    """Replaces the `forward` of an attention module. The model has `num_layers` of them."""
    family = FAMILIES[type(module).__name__]
    attend = _attend_of(module, num_layers, family, kwargs)
    if attend is not None:
        return family.compute(module, attend, *args, **kwargs), None
    bias, mask = kwargs.get("alibi"), kwargs.get("attention_mask")
    if isinstance(bias, Tensor) and isinstance(mask, Tensor):
        # For static caches BLOOM builds a bias as long as the capacity. Our first chunk attends only to itself.
        kwargs["alibi"] = bias[..., : mask.shape[-1]]
    return type(module).forward(module, *args, **kwargs)


def _attend_of(module: Any, num_layers: int, family: Family, kwargs: dict[str, Any]) -> Attend | None:
    """Attention over the codes of a layer, or `None` if the class's own method has to run."""
    cache, mask = kwargs.get(family.cache), kwargs.get("attention_mask")
    if not isinstance(cache, KVQuantCache) or not isinstance(mask, Tensor) or mask.ndim != 4:
        return None
    check_layers("forward", CACHE, len(cache.layers), num_layers)
    index = getattr(module, family.layer_index)
    layer = cache.layers[index]
    if not isinstance(layer, (KVQuantLayer, SimulatingLayer)):
        return None
    storage, notes = layer.storage, cache.notes
    is_left_alone = not storage.formats.is_quantized or module.training or kwargs.get("output_attentions")
    if isinstance(layer, SimulatingLayer):
        return None if is_left_alone else functools.partial(_simulate, cache, index, _visible(family, mask))
    starts = _starts_of(family, mask)
    q_len = mask.shape[2]
    if layer is next(each for each in cache.layers if isinstance(each, KVQuantLayer)) and not is_tracing(mask):
        # The first layer does this for all, but not in a decode step on a GPU: reading the mask makes the host wait.
        offset = 0 if storage.is_empty else storage.lengths[0]
        if mask.device.type == "cpu" or q_len > 1:
            notes.has_holes = notes.has_holes or not _is_left_padded(_visible(family, mask), starts, offset)
        if storage.is_empty or q_len > 1:
            notes.is_uneven = is_uneven(starts, offset + q_len)
        if storage.is_empty:
            notes.starts, notes.has_dense_masks = starts, True
        else:
            follow_padding(notes, starts, may_wait=mask.device.type == "cpu" or q_len > 1)
    if is_left_alone or storage.is_empty or notes.has_holes:
        return None
    return functools.partial(_attend, cache, index, starts)


# For every mask that is alive: its version, and `_starts_of` it. All layers of a step share one mask.
_starts = WeakIdKeyDictionary()


def _starts_of(family: Family, mask: Tensor) -> Tensor:
    """Left-padding tokens of each sequence, `[batch or 1]` int32, counted in what its last query sees."""
    # A tensor made in inference mode has no version.
    if is_tracing(mask) or mask.is_inference():
        return num_pads(_visible(family, mask[:, :, -1:])[:, -1])
    known: tuple[int, Tensor] | None = _starts.get(mask)
    if known is None or known[0] != mask._version:
        known = _starts[mask] = mask._version, num_pads(_visible(family, mask[:, :, -1:])[:, -1])
    return known[1]


def _visible(family: Family, mask: Tensor) -> Tensor:
    """Which tokens queries see, `[batch or 1, q_len, kv_length]` bool."""
    # All heads share a mask, but for the ALiBi that Falcon adds to it, which is far from the value that hides a token.
    visible = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] > torch.finfo(mask.dtype).min / 2
    return ~visible if family.is_hidden else visible


def _is_left_padded(is_visible: Tensor, starts: Tensor, offset: int | Tensor) -> bool:
    """Whether every query sees exactly the tokens from `starts` to itself. What padding sees does not matter.

    `is_visible` is as `_visible` makes it, `starts` `[batch]` int32, and `offset` the position of the first query.
    """
    q_len, kv_length = is_visible.shape[1:]
    column = torch.arange(kv_length, device=is_visible.device)
    position = (torch.arange(q_len, device=is_visible.device) + offset).view(1, -1, 1)
    first = starts.view(-1, 1, 1)
    return not bool(((is_visible != ((column >= first) & (column <= position))) & (position >= first)).any())


def _attend(
    cache: KVQuantCache, index: int, starts: Tensor, query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> Tensor:
    handle, _ = cache.update(key, value, index)
    assert isinstance(handle, KVHandle)
    if not torch.compiler.is_compiling():
        handle.step.storage.rows.masked_window = options.get("sliding_window", 0)
    # CodeGen rotates queries in float32. Round them like the keys, since kernels take the model's dtype.
    out, _ = handle.step.storage.attend(
        query.to(value.dtype),
        starts=starts.expand(query.shape[0]).contiguous(),
        is_uneven=handle.step.is_uneven,
        **options,
    )
    return out.flatten(2)


# --- simulated caches -------------------------------------------------------------------------------------------------


class SimulatingLayer(abc.ABC):
    """A cache layer that decides itself what each query of a text sees."""

    storage: LayerStore  # quantises its keys and values

    @abc.abstractmethod
    def attend(self, query: Tensor, mask: Tensor, attend: Callable[..., tuple[Tensor, Any]]) -> Tensor:
        """See `simulation.SimulatedLayer.attend`."""


def _simulate(
    cache: KVQuantCache,
    index: int,
    is_visible: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    softmax_scale: float,
    alibi_slopes: Tensor | None = None,
    sliding_window: int = 0,
) -> Tensor:
    """An `Attend` over whole texts: dense, with a mask that includes ALiBi and windows.

    `is_visible`, `[batch or 1, tokens, tokens]` bool, says which keys a query sees, without the sliding window. Like
    the kernels, this sums in float32 and does not round biases, in the first chunk as well, which a real cache leaves
    to the model. Falcon with ALiBi rounds them to bfloat16 there.
    """
    layer = cache.layers[index]
    assert isinstance(layer, SimulatingLayer)
    cache.update(key, value, index)
    layer.storage.rows.masked_window = sliding_window
    position = torch.arange(query.shape[2], device=query.device)
    distance = position - position.unsqueeze(1)  # [tokens, tokens], of a key from a query
    mask = is_visible.unsqueeze(1)
    if sliding_window:
        mask = mask & (distance > -sliding_window)
    if alibi_slopes is not None:
        bias = alibi_slopes.view(-1, 1, 1) * distance  # [num_q_heads, tokens, tokens]
        mask = torch.where(mask, bias, torch.finfo(bias.dtype).min)

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, None]:
        out = F.scaled_dot_product_attention(
            query.float(), key.float(), value.float(), attn_mask=mask, scale=softmax_scale, enable_gqa=True
        )
        return out.transpose(1, 2), None

    return layer.attend(query.to(value.dtype), mask, attend).flatten(2).to(value.dtype)
