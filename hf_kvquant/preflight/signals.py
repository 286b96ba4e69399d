"""Reads from a model's weights how hard the keys of each layer are to quantise, without any text.

Two signals make keys hard: a constant that all keys of a head share, such as a large bias of the projection; and
channels that are larger than the others, through rows of the projection or gains of the norm after it. A signal that
cannot be read, because weights are offloaded or themselves quantised, is reported as unknown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..attention.observation import observations
from ..cache.support import other_caches
from ..calibration.layout import LayerLayout, find_layouts, latent_layouts
from ..calibration.origins import Scalable
from ..config import KVQuantConfig, LayerFormats
from ..models.latent import keeps_latents
from ..models.layers import layers_of
from ..models.probing import arbitrary_ids
from ..models.quantized import FLOATS
from ..models.text_config import count_of, head_dim_of, text_config_of
from ..presets import FEW_BITS
from ..spec.codes import INTEGER_BITS
from ..spec.key_transform import KeyTransform
from ..transforms.centering import bias_centers

# Limits for keys of FEW_BITS bits. The numbers below are the largest KL divergence of a layer in nats per token,
# measured on the reference model with int4 and no transforms. Limits grow with the number of steps: for 8-bit keys they
# are 16 times higher.
#
# The shared constant over what varies between keys. None: .0086; 1.2 to 2.2 times: .038; 5.9 to 11 times: 1.05 (with a
# centre .0092; with 8 bits and no centre .0071). Comparing with the median layer instead would miss a bias that all
# layers have, and would report a layer where no bias matters.
BIAS_LIMIT = 1.0
# The largest channel of a head over its median channel. 1.2 to 1.9: .0086; 4.1 to 5.9: .029; 10 to 15: .16, with 8 bits
# .0007. Rotation removes most of the last two: .0078 and .020. With it, the signal is no reason to refuse, though
# another format is better.
CHANNEL_LIMIT = 4.0
ROTATED_CHANNEL_LIMIT = 8.0
# Rotation mixes outliers into all channels, so they also count if channels have scales of their own, though less.
# Channel scales and rotation, 8.2 to 11.8: .0066; 16 to 24: .021; 23 to 34: .035. Without the rotation .0032 always.
CHANNEL_SCALES_LIMIT = 12.0
# Least head_dim, and least number of channels over which rotation spreads an outlier. Published 4-bit results are worse
# below these, but not on every model, so they never decide a verdict.
MIN_HEAD_DIM = 128
MIN_ROTATED = 32
SHAPES = ("head_dim", "rotation")  # the signals about these two

# How many times as large squared errors of latents (MLA) may be as with even channels: half a bit of each number.
# Training by itself left 1.05 at most (the twin of evals/reference_model that keeps latents).
UNEVEN = 2.0

NUM_TOKENS = 8  # arbitrary tokens on which the spread of keys is measured

Found = TypeVar("Found")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One signal of one layer that is beyond its limit."""

    layer_idx: int | None  # `None` for the whole model
    signal: str
    value: float | None  # `None` if unknown
    limit: float | None  # the largest value allowed (for shapes such as head_dim, the smallest)
    detail: str  # value and limit in words
    remedy: str  # what to do, a sentence without its full stop
    # Whether to refuse the format. If false, another format is only better.
    is_harmful: bool


@dataclasses.dataclass(frozen=True)
class KeySignals:
    """What the weights tell about one layer's keys. Tensors are float32 on the CPU."""

    layer_idx: int
    num_kv_heads: int | None  # `None` means unknown, here and below
    num_q_per_kv: int | None  # query heads that share a key-value head; only shown, never a finding
    head_dim: int | None
    bias: Tensor | None  # `[num_kv_heads, head_dim]`: the constant in all keys, before RoPE
    bias_center: Tensor | None  # the bias as RoPE rotates it, averaged over positions
    spread: Tensor | None  # `[num_kv_heads]`: root mean square norm of what varies between keys
    # The largest channel over the median one, in the worst head. Compares gains if a norm makes keys, else norms of
    # rows.
    channel_ratio: float | None
    channel_source: str | None  # which of the two: `"gains"` or `"rows"`
    unknown: Mapping[str, str]  # per unknown signal, the reason
    is_latent: bool = False  # whether it keeps latents (MLA), which have none of the signals of keys
    growth: float | None = None  # `latent_growth` of such a layer

    def bias_ratio(self, center: Tensor | None) -> float | None:
        """The constant that a centre leaves in keys, over what varies in them, in the worst head."""
        if self.bias is None or self.bias_center is None or self.spread is None:
            return None
        # Averaged over positions, |rotated bias - center|² = |bias|² - 2 center·mean + |center|².
        taken = torch.zeros_like(self.bias) if center is None else center.to(self.bias)
        left = self.bias.square() - 2 * taken * self.bias_center + taken.square()
        if not bool(self.bias.any()):
            return 0.0  # without a bias, a centre from data is the mean of keys and leaves no constant
        return float((left.sum(1).clamp(min=0).sqrt() / self.spread.clamp(min=1e-12)).max())

    def findings(self, formats: LayerFormats, transform: KeyTransform | None) -> list[Finding]:
        """The signals that exceed their limits if the layer is stored in these formats, under this transform."""
        key = formats.key
        if self.growth is not None and self.growth > UNEVEN and key.storage in INTEGER_BITS:
            detail = f"latents with uneven channels, squared errors {self.growth:.3g} times as large, limit {UNEVEN:g}"
            remedy = "Even them out (hf_kvquant.smooth_attention)"
            return [Finding(self.layer_idx, "latent channels", self.growth, UNEVEN, detail, remedy, False)]
        transform = transform or KeyTransform()
        has_channel_scales = key.granularity == "channel"  # with zeros, which take the constant away
        if not key.is_quantized or (has_channel_scales and not transform.is_rotated):
            return []
        factor = 2.0 ** (key.bits - FEW_BITS)
        found = []
        ratio, limit = self.bias_ratio(transform.center), factor * BIAS_LIMIT
        if ratio is not None and ratio > limit and not has_channel_scales:
            remedy = "Calibrate centres on text (hf_kvquant.smooth_attention)"
            if transform.center is None:
                remedy = "Add 'center' to `transforms`"
            detail = f"a key bias of {ratio:.3g} times what varies in its keys, limit {limit:g}"
            found.append(Finding(self.layer_idx, "key bias", ratio, limit, detail, remedy, True))
        is_rotated, is_smoothed = transform.is_rotated, transform.smoothing is not None
        limit = factor * (ROTATED_CHANNEL_LIMIT if is_rotated else CHANNEL_LIMIT)
        if has_channel_scales:
            limit = factor * CHANNEL_SCALES_LIMIT
        if self.channel_ratio is not None and self.channel_ratio > limit and not is_smoothed:
            remedy = "Calibrate factors (hf_kvquant.smooth_attention)"
            if not is_rotated:
                remedy = "Add 'rotate' to `transforms`, or calibrate factors (hf_kvquant.smooth_attention)"
            what, ratio = "norm gains" if self.channel_source == "gains" else "projection rows", self.channel_ratio
            detail = f"{what} of {ratio:.3g} times the median channel, limit {limit:g}"
            found.append(Finding(self.layer_idx, "key channels", ratio, limit, detail, remedy, not is_rotated))
        if self.head_dim is not None and key.bits <= FEW_BITS and not has_channel_scales:
            block = self.head_dim & -self.head_dim
            for signal, what, value, least in (
                ("head_dim", "a head_dim", self.head_dim, MIN_HEAD_DIM),
                ("rotation", "a rotation over blocks", block, MIN_ROTATED),
            ):
                if value < least:
                    detail = f"{what} of {value}, at least {least} is better at {key.bits} bits"
                    remedy = "Use preset 'int4' or 8 bits"
                    found.append(Finding(self.layer_idx, signal, value, least, detail, remedy, False))
        return found


def read_signals(
    model: PreTrainedModel, config: KVQuantConfig | None = None, *, where: str
) -> tuple[dict[int, KeySignals], dict[int, str]]:
    """Read the signals of each layer whose cache would be quantised, of any kind, and why other layers are left out.

    The model is only run, on a few arbitrary tokens. A signal that cannot be read is unknown, not an error.
    """
    text_config = text_config_of(model)
    left_out = other_caches(model, config)
    if keeps_latents(text_config):
        return _latent_signals(model), left_out
    biases, no_bias = _attempt(lambda: (bias_centers(model, 1), bias_centers(model)))
    keys, no_keys = _attempt(lambda: _arbitrary_keys(model))
    layouts, no_layout = _attempt(lambda: find_layouts(model, where=where))
    signals: dict[int, KeySignals] = {}
    num_layers = len(layers_of(text_config)[0])
    for index, layer_config in zip(range(num_layers), text_config.per_layer_config, strict=False):
        if index in left_out:
            continue
        unknown: dict[str, str] = {}
        bias = bias_center = spread = ratio = source = None
        num_kv_heads = count_of(layer_config, "num_key_value_heads")
        num_q_heads = count_of(layer_config, "num_attention_heads")
        head_dim = head_dim_of(layer_config)
        if keys is not None and index in keys:
            key, num_q_heads = keys[index]  # [num_kv_heads, tokens, head_dim]
            num_kv_heads, _, head_dim = key.shape
            if biases is not None:
                zero = torch.zeros((num_kv_heads, head_dim), dtype=torch.float32, device="cpu")
                bias, bias_center = (found.get(index, zero).cpu() for found in biases)
                spread = (key - bias[:, None]).square().sum(-1).mean(1).sqrt()
        if bias is None or not bool(bias.isfinite().all()):
            bias = None
            unknown["key bias"] = no_bias or no_keys or "its attention cannot be watched"
        layer_layouts, layer_reasons = layouts or ({}, {})
        if index in layer_layouts:
            ratio, source = _channel_ratio(model, layer_layouts[index].key)
        else:
            unknown["key channels"] = no_layout or layer_reasons.get(index, "its keys are of unknown origin")
        num_q_per_kv = num_q_heads // num_kv_heads if num_q_heads and num_kv_heads else None
        signals[index] = KeySignals(
            index, num_kv_heads, num_q_per_kv, head_dim, bias, bias_center, spread, ratio, source, unknown
        )
    return signals, left_out


def _latent_signals(model: PreTrainedModel) -> dict[int, KeySignals]:
    found = {}
    for index, layout in latent_layouts(model).items():
        growth = latent_growth(model, layout)
        unknown = {} if growth is not None else {"latent channels": "its weights are quantised or not in memory"}
        of_keys: dict[str, Any] = {field.name: None for field in dataclasses.fields(KeySignals)}
        of_latents = {"layer_idx": index, "unknown": unknown, "is_latent": True, "growth": growth}
        found[index] = KeySignals(**{**of_keys, **of_latents})
    return found


def latent_growth(model: PreTrainedModel, layout: LayerLayout) -> float | None:
    """How many times as large squared errors of rotated latents are as with the factors of `latent_search.py`.

    `None` if weights are quantised or not in memory.
    """
    norm, projection = modules = [cast(Any, model.get_submodule(side.name)) for side in (layout.key, layout.query)]
    if type(projection) is not nn.Linear or not all(map(is_readable, modules)):
        return None
    size = norm.weight.detach().float().abs()
    column = projection.weight.detach().float().norm(dim=0)
    return float(size.square().sum() * column.square().sum() / (size * column).sum().square())


def is_readable(module: nn.Module) -> bool:
    """Whether the parameters of a module are plain numbers in memory."""
    is_offloaded = getattr(getattr(module, "_hf_hook", None), "offload", False)
    return not is_offloaded and all(
        not parameter.is_meta and type(parameter.data) is Tensor and parameter.dtype in FLOATS
        for parameter in module.parameters()
    )


def _attempt(read: Callable[[], Found]) -> tuple[Found | None, str]:
    """The result of `read`, or `None` and the reason for its failure."""
    try:
        return read(), ""
    except Exception as error:
        # Some models need other inputs than tokens, and offloaded weights fail in many ways. An unknown signal is
        # reported instead of raised; callers that need it refuse.
        return None, reason_of(error)


def reason_of(error: Exception) -> str:
    """An error's message on one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, NotImplementedError) and "`model`" in text else f"{type(error).__name__}: {text}"


def _arbitrary_keys(model: PreTrainedModel) -> dict[int, tuple[Tensor, int]]:
    """Per layer, keys of a few arbitrary tokens at position 0, which RoPE does not rotate, and how many query heads."""
    ids = arbitrary_ids(model, NUM_TOKENS)
    seen = observations(model, ids, position_ids=torch.zeros_like(ids))
    return {index: (each[-1].key[0].float().cpu(), each[-1].query.shape[1]) for index, each in seen.items()}


def _channel_ratio(model: PreTrainedModel, scalable: Scalable) -> tuple[float, str]:
    """The largest channel over the median one, in the worst head, and what was compared: `"gains"` or `"rows"`."""
    module: Any = model.get_submodule(scalable.name)
    weight = module.weight.detach().float().cpu()
    if scalable.rule in ("rows", "columns"):
        source, size = "rows", scalable.by_feature(weight).norm(dim=1)
    else:
        source, size = "gains", (weight.flatten() + (scalable.rule == "gain_plus_one")).abs()
    size = size[scalable.index]
    ratio = size.amax(1) / size.median(1).values.clamp(min=1e-12)
    return float(ratio.max()), source
