"""Decoding from codes in models that compute attention by themselves, outside transformers' attention registry.

Each attention module of such a model gets its own `forward`. If the layer's cache holds codes, it computes query, key
and value as the family does and attends with our op. Everything else (the first chunk, other caches, layers that are
not quantised, masks that are neither causal nor left padding, training) goes to the class's own method, with the same
arguments. The table at the end lists the families, and what each does around attention. `handle.py` serves models for
which there is no function here.

These models build dense masks themselves, so the number of padding tokens is read from the mask's last row. ALiBi:
BLOOM and Falcon count positions from a sequence's first token, MPT from the end of the cache, our op from the query.
The biases differ by a constant in every row, which the softmax ignores as long as the mask has no holes. Slopes are the
model's own, with its rounding. Their products with positions, which BLOOM rounds to the model's dtype and Falcon to
bfloat16, are not rounded here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ..cache.cache import KVQuantCache
from ..cache.handle import KVHandle
from ..cache.layers import KVQuantLayer
from ..cache.support import check_layers
from .masks import is_tracing, num_pads
from .simulated import SimulatingLayer, simulate

# Takes query, key and value, each `[batch, heads, q_len, head_dim]`, and options of `LayerStore.attend`. Returns
# `[batch, q_len, num_q_heads * head_dim]`.
Attend = Callable[..., Tensor]


@dataclasses.dataclass(frozen=True)
class Family:
    """How one attention class computes.

    Attributes:
        forward: Takes the module, an `Attend` and the parameters of the class's `forward`, with the same names in the
            same order. A class with other parameters is left alone. Returns the same, without weights.
        cache: Name of the parameter that holds the cache.
        layer_index: Name of the module's attribute that says which layer it is.
        is_hidden: Whether True in a boolean mask hides a token, as in MPT. In transformers' own masks True shows it.
        is_served: Whether a module of this class computes attention as `forward` does.
    """

    forward: Callable[..., tuple[Tensor, None]]
    cache: str = "layer_past"
    layer_index: str = "layer_idx"
    is_hidden: bool = False
    is_served: Callable[[Any], bool] = lambda module: True


def patch(model: nn.Module) -> bool:
    """Override `forward` of every attention module that we know, unless something else has overridden it already.

    Returns:
        Whether there are such modules, and all of them have our `forward` now.
    """
    known = [module for module in model.modules() if _family_of(module) is not None]
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
        for module in model.modules():
            if _is_ours(module) and module not in before:
                del module.__dict__["forward"]


def is_patched(model: nn.Module) -> bool:
    """Whether there are attention modules that we know, and all of them have our `forward`."""
    known = [module for module in model.modules() if _family_of(module) is not None]
    return bool(known) and all(_is_ours(module) for module in known)


def unpatch(model: nn.Module) -> None:
    """Undo `patch`."""
    for module in model.modules():
        if _is_ours(module):
            del module.__dict__["forward"]


def check_static(model: nn.Module, where: str) -> None:
    """Refuse a static cache for models that build ALiBi from a 2-D mask, if `generate` gives them a 4-D one.

    `generate` does so for every static cache, unless the model has its own `create_masks_for_generate`.

    Raises:
        NotImplementedError: The model is one of them.
    """
    for module in model.modules():
        name = type(module).__name__
        if name == "BloomModel" or (name == "FalconModel" and module.use_alibi):
            if not hasattr(model, "create_masks_for_generate"):
                raise NotImplementedError(
                    f"{where}: `static` must be False for {type(model).__name__}, got True: it builds ALiBi from a "
                    "2-D mask, and generate of this version of transformers makes a 4-D one for static caches. Leave "
                    "static and max_cache_len out."
                )


def _is_ours(module: nn.Module) -> bool:
    forward = module.__dict__.get("forward")
    return isinstance(forward, functools.partial) and forward.func is _forward


def _family_of(module: nn.Module) -> Family | None:
    kind = type(module)
    family = _FAMILIES.get(kind.__name__)
    if family is None or not kind.__module__.startswith("transformers.models."):
        return None
    expected = list(inspect.signature(family.forward).parameters)[2:]
    if list(inspect.signature(kind.forward).parameters)[1:] != expected or not family.is_served(module):
        return None
    return family


# --- the forward of a module ------------------------------------------------------------------------------------------


def _forward(module: Any, num_layers: int, *args: Any, **kwargs: Any) -> Any:
    """Replaces the `forward` of an attention module. The model has `num_layers` of them."""
    family = _FAMILIES[type(module).__name__]
    attend = _attend_of(module, num_layers, family, kwargs)
    if attend is not None:
        return family.forward(module, attend, *args, **kwargs)
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
    check_layers("forward", "past_key_values", len(cache.layers), num_layers)
    index = getattr(module, family.layer_index)
    layer = cache.layers[index]
    if not isinstance(layer, (KVQuantLayer, SimulatingLayer)):
        return None
    storage, notes = layer.storage, cache.notes
    is_left_alone = not storage.is_quantized or module.training or kwargs.get("output_attentions")
    if isinstance(layer, SimulatingLayer):
        return None if is_left_alone else functools.partial(simulate, cache, index, _visible(family, mask))
    starts = _starts_of(family, mask)
    q_len = mask.shape[2]
    if layer is next(each for each in cache.layers if isinstance(each, KVQuantLayer)) and not is_tracing(mask):
        # The first layer does this for all, but not in a decode step on a GPU: reading the mask makes the host wait.
        offset = 0 if storage.lengths is None or storage.is_empty else storage.lengths[0]
        if mask.device.type == "cpu" or q_len > 1:
            notes.has_holes = notes.has_holes or not _is_left_padded(_visible(family, mask), starts, offset)
        if storage.is_empty:
            notes.starts, notes.has_dense_masks = starts, True
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

    Args:
        is_visible: `[batch, q_len, kv_length]` bool.
        starts: `[batch]` int32.
        offset: Position of the first query.
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
        handle.step.storage.masked_window = options.get("sliding_window", 0)
    # CodeGen rotates queries in float32. Round them like the keys, since kernels take the model's dtype.
    out, _ = handle.step.storage.attend(
        query.to(value.dtype), starts=starts.expand(query.shape[0]).contiguous(), **options
    )
    return out.flatten(2)


# --- families ---------------------------------------------------------------------------------------------------------


def _alibi_slopes(module: nn.Module, num_heads: int, device: torch.device) -> Tensor:
    """`[num_heads]` float32, from the bias that the module's own file builds for two tokens: 0 and the slope."""
    build = sys.modules[type(module).__module__].build_alibi_tensor
    return (_build_slopes if torch.compiler.is_compiling() else _kept_slopes)(build, num_heads, device)


def _build_slopes(build: Callable[..., Tensor], num_heads: int, device: torch.device) -> Tensor:
    return build(torch.ones((1, 2), dtype=torch.long, device=device), num_heads, torch.float32)[:, 0, 1].contiguous()


@functools.cache
def _kept_slopes(build: Callable[..., Tensor], num_heads: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return _build_slopes(build, num_heads, device)


def _bloom(
    module: Any,
    attend: Attend,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Tensor,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    query, key, value = module._reshape(module.query_key_value(hidden_states))
    slopes = _alibi_slopes(module, module.num_heads, query.device)
    out = attend(query, key, value, softmax_scale=module.inv_norm_factor, alibi_slopes=slopes)
    return residual + module.dense(out), None


def _falcon(
    module: Any,
    attend: Attend,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Tensor,
    position_ids: Tensor | None = None,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    split = module._split_heads(module.query_key_value(hidden_states))
    query, key, value = (x.transpose(1, 2) for x in split)
    slopes = None
    if alibi is None:
        assert position_embeddings is not None
        query, key = sys.modules[type(module).__module__].apply_rotary_pos_emb(query, key, *position_embeddings)
    else:
        # A 4-D bias has already been added to the mask by the model. Without sdpa, the module adds the bias as well.
        times = int(alibi.ndim == 4) + int(module.config._attn_implementation != "sdpa")
        slopes = _alibi_slopes(module, module.num_heads, query.device) * (times * module.inv_norm_factor)
    out = attend(query, key, value, softmax_scale=module.inv_norm_factor, alibi_slopes=slopes)
    return module.dense(out), None


def _mpt(
    module: Any,
    attend: Attend,
    hidden_states: Tensor,
    position_bias: Tensor | None,
    past_key_values: Any = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    fused = module.Wqkv(hidden_states)
    if module.clip_qkv:
        fused = fused.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    query, key, value = (x.unflatten(-1, (module.n_heads, -1)).transpose(1, 2) for x in fused.chunk(3, dim=-1))
    # The last column, for the newest token, is 0; the one before is lower by the slope.
    slopes = None if position_bias is None else position_bias[:, 0, -1] - position_bias[:, 0, -2]
    out = attend(query, key, value, softmax_scale=module.softmax_scale, alibi_slopes=slopes)
    return module.out_proj(out), None


def _gptj(
    module: Any,
    attend: Attend,
    hidden_states: Tensor,
    layer_past: Any = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    use_cache: bool | None = False,
    output_attentions: bool | None = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    heads = module.num_attention_heads, module.head_dim
    query, key = (project(hidden_states).unflatten(-1, heads) for project in (module.q_proj, module.k_proj))
    value = module.v_proj(hidden_states).unflatten(-1, heads)
    angles = _angles(module, position_ids).to(key.dtype)
    return _rotary_attention(module, attend, query, key, value, angles)


def _codegen(
    module: Any,
    attend: Attend,
    hidden_states: Tensor,
    layer_past: Any = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    use_cache: bool | None = False,
    output_attentions: bool | None = False,
) -> tuple[Tensor, None]:
    # Weights are laid out for four devices: query, value and key of the first quarter of the heads, then of the next.
    fused = module.qkv_proj(hidden_states).unflatten(-1, (4, 3, -1))
    query, value, key = (x.flatten(-2).unflatten(-1, (-1, module.head_dim)) for x in fused.unbind(-2))
    # Angles stay in float32, and so does the query.
    return _rotary_attention(module, attend, query, key, value, _angles(module, position_ids))


def _angles(module: Any, position_ids: Tensor | None) -> Tensor:
    """Sines, then cosines, of GPT-J's or CodeGen's positions: `[batch, q_len, channels]` float32."""
    assert position_ids is not None
    angles: Tensor = module.embed_positions.to(position_ids.device)[position_ids]
    return angles


def _rotary_attention(
    module: Any, attend: Attend, query: Tensor, key: Tensor, value: Tensor, angles: Tensor
) -> tuple[Tensor, None]:
    """What GPT-J and CodeGen do with a query, key and value, `[batch, q_len, heads, head_dim]` each."""
    query, key = _rotated(module, query, angles), _rotated(module, key, angles)
    out = attend(query, key.to(value.dtype), value.transpose(1, 2), softmax_scale=1 / module.scale_attn)
    return module.out_proj(out), None


def _rotated(module: Any, x: Tensor, angles: Tensor) -> Tensor:
    """GPT-J's rotary embedding of the first `rotary_dim` channels, or of all.

    Args:
        module: GPT-J's or CodeGen's.
        x: `[batch, q_len, heads, head_dim]`.
        angles: `[batch, q_len, channels]`: sines, then cosines.

    Returns:
        `[batch, heads, q_len, head_dim]`.
    """
    sin, cos = angles.chunk(2, dim=-1)
    rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
    width = x.shape[-1] if module.rotary_dim is None else module.rotary_dim
    return torch.cat((rotate(x[..., :width], sin, cos), x[..., width:]), dim=-1).transpose(1, 2)


def _gpt_neo(
    module: Any,
    attend: Attend,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    heads = module.num_heads, module.head_dim
    query, key, value = (
        project(hidden_states).unflatten(-1, heads).transpose(1, 2)
        for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    window = module.config.window_size if module.attention_type == "local" else 0
    return module.out_proj(attend(query, key, value, softmax_scale=1.0, sliding_window=window)), None


_FAMILIES: dict[str, Family] = {
    # With these options the class multiplies by slices of the weights, to round as in training. We do not.
    "BloomAttention": Family(
        _bloom, is_served=lambda module: not (module.pretraining_tp > 1 and module.slow_but_exact)
    ),
    "FalconAttention": Family(_falcon),
    "MptAttention": Family(_mpt, cache="past_key_values", is_hidden=True),
    "GPTJAttention": Family(_gptj),
    "CodeGenAttention": Family(_codegen),
    "GPTNeoSelfAttention": Family(_gpt_neo, layer_index="layer_id"),
}
