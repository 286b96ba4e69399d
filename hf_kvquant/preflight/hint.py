"""Looks at a few weights when a model is patched with 4 bits or fewer, and says in one line if they show trouble.

It runs nothing and reads little, so that `patch` stays quick: biases of key projections, gains of the norm behind them,
the norms of their rows over some columns, and whether attention has learned sinks. It goes by the names that most
families give these modules, and stays silent about the others. The pre-flight goes by no names and measures.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..cache.support import formats_of, other_caches
from ..calibration.layout import latent_layouts
from ..calibration.origins import Output, rule_of
from ..calibration.smoothing import is_smoothed
from ..calibration.smoothing_file import numbered
from ..config import KVQuantConfig
from ..models.latent import keeps_latents
from ..models.text_config import count_of, head_dim_of, positions_of, text_config_of
from ..presets import FEW_BITS
from ..spec.codes import INTEGER_BITS
from ..spec.key_transform import KeyTransform
from ..state import notes_on
from ..transforms.centering import NUM_POSITIONS
from ..transforms.of_model import transforms_of
from .result import measured
from .signals import SHAPES, UNEVEN, Finding, KeySignals, is_readable, latent_growth

logger = logging.getLogger(__name__)

# Columns of a projection that row norms are taken of. Of 4,096 columns, 512 give norms that are 3 % off.
MOST_COLUMNS = 512


def tell(model: PreTrainedModel, config: KVQuantConfig) -> None:
    """Log one line if a model's weights speak against the formats of a config: latents, and keys of 4 bits or fewer.

    Nothing is logged a second time for a model, nor for models that are calibrated or whose config a pre-flight of this
    process has measured. Weights that are quantised or not in memory are left out.
    """
    transforms = transforms_of(model)
    is_calibrated = is_smoothed(model) or transforms.centers is not None or bool(transforms.smoothing)
    if notes_on(model).has_hint or is_calibrated or measured(model, config) is not None:
        return
    if keeps_latents(text_config_of(model)):
        _tell_of_latents(model, config)
        return
    findings = list(_findings(model, config))
    if not findings:
        return
    notes_on(model).has_hint = True
    causes = []
    for signal in dict.fromkeys(finding.signal for finding in findings):
        alike = [finding for finding in findings if finding.signal == signal]
        worst = max(alike, key=lambda finding: finding.value or 0)
        layers = sorted({finding.layer_idx for finding in alike if finding.layer_idx is not None})
        where = f", the most in layer {worst.layer_idx}" if len(layers) > 1 and worst.value is not None else ""
        causes.append(f"{numbered(layers)}: {worst.detail}{where}")
    logger.warning(
        "patch: `preset_or_config` may cost %s much quality in %d bits (%s). Calibrate it with "
        "hf_kvquant.smooth_attention(model, tokenizer, texts, preset_or_config) or hf-kvquant calibrate --preset, or "
        "take preset 'int8'. hf_kvquant.run_preflight(model) measures the cost.",
        type(model).__name__,
        min(config.formats(finding.layer_idx or 0).key.bits for finding in findings),
        "; ".join(causes),
    )


def _tell_of_latents(model: PreTrainedModel, config: KVQuantConfig) -> None:
    """Log one line if the channels of latents (MLA) are uneven, and rounding errors are larger for it."""
    formats, grown = formats_of(text_config_of(model), config), dict[int, float]()
    for index, layout in latent_layouts(model).items():
        growth = latent_growth(model, layout)
        if index in formats and formats[index].key.storage in INTEGER_BITS and growth is not None:
            grown[index] = growth
    uneven = [index for index, growth in grown.items() if growth > UNEVEN]
    if uneven:
        notes_on(model).has_hint = True
        worst = max(uneven, key=grown.__getitem__)
        logger.warning(
            "patch: `preset_or_config` may cost %s much quality (%s: latents with uneven channels, by which rounding "
            "errors are up to %.0f times as large, the most in layer %d). "
            "hf_kvquant.smooth_attention(model, tokenizer, texts, preset_or_config) evens them out.",
            type(model).__name__,
            numbered(uneven),
            grown[worst] ** 0.5,
            worst,
        )


def _findings(model: PreTrainedModel, config: KVQuantConfig) -> Iterator[Finding]:
    left_out = other_caches(model, config)
    decoder, turn = model.get_decoder() or model, _mean_turn(model)
    for layer in decoder.modules():
        for attention in layer.children():
            index = getattr(attention, "layer_idx", None)
            if not isinstance(index, int) or index in left_out or not isinstance(_part(attention, "k_proj"), nn.Linear):
                continue
            formats = config.formats(index)
            if not formats.key.is_quantized or formats.key.bits > FEW_BITS:
                continue
            signals = _signals(model, layer, attention, index, turn)
            if signals is None:
                continue
            center = signals.bias_center if "center" in formats.transforms else None
            transform = KeyTransform(center=center, is_rotated="rotate" in formats.transforms)
            yield from (found for found in signals.findings(formats, transform) if found.signal not in SHAPES)
            if isinstance(getattr(attention, "sinks", None), nn.Parameter):
                detail = "learned attention sinks, next to which errors of keys count more"
                yield Finding(index, "sinks", None, None, detail, "", False)


def _signals(
    model: PreTrainedModel, layer: nn.Module, attention: nn.Module, index: int, turn: Tensor
) -> KeySignals | None:
    """The signals of a layer, as far as its weights are plain numbers in memory; `None` if they are not."""
    projection, norm = _part(attention, "k_proj"), _part(attention, "k_norm")
    before = _part(layer, "input_layernorm")
    if not all(map(is_readable, filter(None, (projection, norm, before)))):
        return None
    configs = text_config_of(model).per_layer_config
    if index >= len(configs):  # of another part, which counts its own layers
        return None
    config = configs[index]
    head_dim = getattr(attention, "head_dim", None) or head_dim_of(config)
    if not isinstance(head_dim, int) or projection.weight.shape[0] % head_dim:
        return None
    weight = projection.weight.detach()
    stride = max(1, weight.shape[1] // MOST_COLUMNS)
    rows = weight[:, ::stride].float()
    gains = getattr(before, "weight", None)
    if gains is not None and gains.shape == weight.shape[1:]:
        rows = rows * (gains.detach()[::stride].float() + _offset(before))
    # What keys vary by, if what comes in is normal: `[num_kv_heads, head_dim]`.
    size = (stride**0.5 * rows.norm(dim=1)).view(-1, head_dim).cpu()
    bias = torch.zeros_like(size)
    source = "rows"
    if norm is not None and getattr(norm, "weight", None) is not None and size.numel() % norm.weight.numel() == 0:
        source, gain = "gains", (norm.weight.detach().float().flatten() + _offset(norm)).abs().cpu()
        size = gain.repeat(size.numel() // gain.numel()).view_as(size)
    elif projection.bias is not None:
        bias = projection.bias.detach().float().view_as(bias).cpu()
    channels = size if source == "gains" else weight[:, ::stride].float().norm(dim=1).view(-1, head_dim).cpu()
    ratio = channels.amax(1) / channels.median(1).values.clamp(min=1e-12)
    num_q_heads = count_of(config, "num_attention_heads")
    return KeySignals(
        layer_idx=index,
        num_kv_heads=len(size),
        num_q_per_kv=None if num_q_heads is None else num_q_heads // len(size),
        head_dim=head_dim,
        bias=bias,
        bias_center=_averaged(bias, turn),
        spread=size.norm(dim=1),
        channel_ratio=float(ratio.max()),
        channel_source=source,
        unknown={},
    )


def _part(module: nn.Module, name: str) -> Any:
    """The module of a name in another one; `None` if there is none."""
    part = getattr(module, name, None)
    return part if isinstance(part, nn.Module) else None


def _offset(norm: Any) -> int:
    """What a norm adds to its weight before use."""
    return int(rule_of(Output(norm, (1, norm.weight.numel()), 0)) == "gain_plus_one")


def _mean_turn(model: PreTrainedModel) -> Tensor:
    """What RoPE multiplies each pair of channels by, averaged over positions, complex. Empty for models without RoPE.

    See `centering.py`.
    """
    found = [each for name, each in model.named_buffers() if name.endswith("inv_freq") and not each.is_meta]
    frequency = found[0].float().cpu() if found else torch.zeros(0, dtype=torch.float32, device="cpu")
    angle = torch.arange(positions_of(model, NUM_POSITIONS), device="cpu")[:, None] * frequency
    return torch.polar(torch.ones_like(angle), angle).mean(0)


def _averaged(bias: Tensor, turn: Tensor) -> Tensor:
    """A bias as RoPE rotates it, averaged over positions, if the pairs are half-split, as behind most such names."""
    if 2 * len(turn) > bias.shape[1]:  # frequencies of layers with wider heads
        return bias
    first, second, rest = bias.split((len(turn), len(turn), bias.shape[1] - 2 * len(turn)), dim=1)
    mean = torch.complex(first, second) * turn
    return torch.cat((mean.real, mean.imag, rest), dim=1)
