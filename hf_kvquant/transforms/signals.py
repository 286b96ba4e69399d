"""What a model's weights tell of how hard its keys are to quantise, layer by layer, before any text is read.

Two things make keys hard: a constant that all keys of a head share, such as a large bias of the projection, and
channels that are larger than the others, whether by the rows of the projection or by the gains of a norm behind it.
Both are read from the weights; what the model does with them (fused projections, norms, RoPE) is found out by running
it, in `centering.py` and `layout.py`. What cannot be read, as from weights that are on no device or are quantised
themselves, is unknown and said to be. From which size on a signal is a reason for another format is decided here; what
follows from it, and how much harm a format really does, in `preflight.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..cache import layers_of
from ..config import KVQuantConfig, LayerFormats
from ..text_config import count_of, head_dim_of, text_config_of
from .centering import bias_centers
from .key_transform import KeyTransform
from .layout import Scalable, find_layouts, other_caches
from .observation import Observation, forward, observed

# Limits for keys of 4 bits, measured on the reference model as the largest KL divergence of a layer, in nats a token,
# with int4 and no transforms. Keys of 8 bits have 16 times as many steps and bear 16 times as much.
#
# A constant against what varies between keys. None: .0086; 1.2 to 2.2 times: .038; 5.9 to 11 times: 1.05 (with a
# centre .0092; with 8 bits and no centre .0071). A comparison with the median layer would see nothing where all layers
# have a bias, and something where none of them matters.
BIAS_LIMIT = 1.0
# The largest channel of a head against its median one. 1.2 to 1.9: .0086; 4.1 to 5.9: .029; 10 to 15: .16, with 8 bits
# .0007. Rotation takes most of it: .0078 and .020, so there it is no reason to refuse, but another format is better.
CHANNEL_LIMIT = 4.0
ROTATED_CHANNEL_LIMIT = 8.0
EIGHT_BITS = 16.0
# Of channels over which rotation can spread an outlier, and of a head altogether: published results on 4 bits fall off
# below. Not enough for a verdict, since nothing of it shows on every model.
MIN_HEAD_DIM = 128
MIN_ROTATED = 32
SHAPES = ("head_dim", "rotation")  # the signals that are about these

NUM_TOKENS = 8  # arbitrary ones, on which the spread of keys is looked at

Found = TypeVar("Found")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One signal of one layer that is beyond its limit.

    Attributes:
        layer_idx: The layer; `None` for all together.
        signal: What was looked at.
        value: What it is. `None` where it is unknown.
        limit: What it should not exceed (or fall below, for head_dim).
        detail: Both, in words.
        remedy: What to do, a sentence without its full stop.
        is_harmful: Whether it is a reason to refuse, not only to prefer another format.
    """

    layer_idx: int | None
    signal: str
    value: float | None
    limit: float | None
    detail: str
    remedy: str
    is_harmful: bool


@dataclasses.dataclass(frozen=True)
class KeySignals:
    """What is known of one layer's keys. Tensors are float32 on the CPU.

    Attributes:
        layer_idx: The layer.
        num_kv_heads: Heads of keys; `None` where unknown, as in everything below.
        num_q_per_kv: Query heads that share one. Shown, and no reason for anything.
        head_dim: Channels of a head.
        bias: `[num_kv_heads, head_dim]`: the constant in all keys, before RoPE.
        bias_center: The same, averaged over positions as RoPE turns it.
        spread: `[num_kv_heads]`: root mean square norm of what varies between keys.
        channel_ratio: The largest channel over the median one, the largest over heads: of gains where a norm makes
            keys, else of the norms of rows.
        channel_source: Which of the two: `"gains"` or `"rows"`.
        unknown: Per signal that is unknown, the reason.
    """

    layer_idx: int
    num_kv_heads: int | None
    num_q_per_kv: int | None
    head_dim: int | None
    bias: Tensor | None
    bias_center: Tensor | None
    spread: Tensor | None
    channel_ratio: float | None
    channel_source: str | None
    unknown: Mapping[str, str]

    def bias_ratio(self, center: Tensor | None) -> float | None:
        """The constant that a centre leaves in keys, over what varies in them; the largest over heads."""
        if self.bias is None or self.bias_center is None or self.spread is None:
            return None
        # Averaged over positions, |bias turned - center|² = |bias|² - 2 center·mean + |center|².
        taken = torch.zeros_like(self.bias) if center is None else center.to(self.bias)
        left = self.bias.square() - 2 * taken * self.bias_center + taken.square()
        if not bool(self.bias.any()):
            return 0.0  # a centre from data is of the keys themselves then, and not of a bias
        return float((left.sum(1).clamp(min=0).sqrt() / self.spread.clamp(min=1e-12)).max())

    def findings(self, formats: LayerFormats, transform: KeyTransform | None) -> list[Finding]:
        """The signals that are beyond their limits for a layer that is kept in these formats.

        Args:
            formats: Of the layer.
            transform: What its keys go through; `None` for nothing.
        """
        key = formats.key
        if not key.is_quantized or key.granularity == "channel":
            return []
        transform = KeyTransform() if transform is None else transform
        factor = 1.0 if key.storage == "int4" else EIGHT_BITS
        found = []
        ratio, limit = self.bias_ratio(transform.center), factor * BIAS_LIMIT
        if ratio is not None and ratio > limit:
            remedy = (
                "Add 'center' to `transforms`"
                if transform.center is None
                else "Calibrate centres on text (hf_kvquant.smooth_attention)"
            )
            detail = f"a key bias of {ratio:.3g} times what varies in its keys, limit {limit:g}"
            found.append(Finding(self.layer_idx, "key bias", ratio, limit, detail, remedy, True))
        is_rotated, is_smoothed = transform.is_rotated, transform.smoothing is not None
        limit = factor * (ROTATED_CHANNEL_LIMIT if is_rotated else CHANNEL_LIMIT)
        if self.channel_ratio is not None and self.channel_ratio > limit and not is_smoothed:
            remedy = "Calibrate factors (hf_kvquant.smooth_attention)"
            remedy = remedy if is_rotated else "Add 'rotate' to `transforms`, or c" + remedy[1:]
            detail = (
                f"{'norm gains' if self.channel_source == 'gains' else 'projection rows'} of {self.channel_ratio:.3g} "
                f"times the median channel, limit {limit:g}"
            )
            found.append(
                Finding(self.layer_idx, "key channels", self.channel_ratio, limit, detail, remedy, not is_rotated)
            )
        if self.head_dim is not None and key.storage == "int4":
            block = self.head_dim & -self.head_dim
            for name, value, least in (("head_dim", self.head_dim, MIN_HEAD_DIM), ("rotation", block, MIN_ROTATED)):
                if value < least:
                    what = "a head_dim" if name == "head_dim" else "a rotation over blocks"
                    detail = f"{what} of {value}, at least {least} is better at 4 bits"
                    remedy = "Use preset 'int4-channel' or 8 bits"
                    found.append(Finding(self.layer_idx, name, value, least, detail, remedy, False))
        return found


def read_signals(
    model: PreTrainedModel, config: KVQuantConfig | None = None, *, where: str
) -> tuple[dict[int, KeySignals], dict[int, str]]:
    """Read what the weights tell. The model is only run, on a few arbitrary tokens, and left as it was.

    Args:
        model: A decoder that `patch` accepts, whatever its weights are.
        config: Of the cache; `None` for one that quantises whatever layer it can.
        where: Opens error messages.

    Returns:
        signals: Of the layers whose cache would be quantised. Nothing is raised for what cannot be read.
        left_out: The other layers, and why.
    """
    text_config = text_config_of(model)
    left_out = other_caches(model, config)
    biases, no_bias = _attempt(lambda: bias_centers(model, 1))
    centers, _ = _attempt(lambda: bias_centers(model))
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
            if biases is not None and centers is not None:
                zero = torch.zeros((num_kv_heads, head_dim))
                bias = biases[index].cpu() if index in biases else zero
                bias_center = centers[index].cpu() if index in centers else zero
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


def _attempt(read: Callable[[], Found]) -> tuple[Found | None, str]:
    """What was read, or `None` and the reason."""
    try:
        return read(), ""
    except Exception as error:
        # Models may want other inputs than tokens, and weights on no device fail in many ways. What is unknown is no
        # reason to fail, but is shown, and refused by whoever needs it.
        return None, reason_of(error)


def reason_of(error: Exception) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, NotImplementedError) and "`model`" in text else f"{type(error).__name__}: {text}"


@torch.no_grad()
def _arbitrary_keys(model: PreTrainedModel) -> dict[int, tuple[Tensor, int]]:
    """Per layer, keys of a few arbitrary tokens at the first position, which RoPE leaves alone, and the query heads."""
    seen: dict[int, tuple[Tensor, int]] = {}

    def note(observation: Observation) -> None:
        seen[observation.layer_idx] = observation.key[0].float().cpu(), observation.query.shape[1]

    input_ids = torch.arange(5, 5 + NUM_TOKENS)[None] % text_config_of(model).vocab_size
    with observed(model, note):
        forward(model, input_ids, position_ids=torch.zeros_like(input_ids))
    return seen


def _channel_ratio(model: PreTrainedModel, scalable: Scalable) -> tuple[float, str]:
    """The largest channel over the median one, the largest over heads, and what makes channels."""
    module: nn.Module = model.get_submodule(scalable.name)
    parameter: Any = module.weight
    weight = parameter.detach().float().cpu()
    if scalable.rule == "rows":
        size = weight.norm(dim=1)[scalable.index]
    elif scalable.rule == "columns":
        size = weight.norm(dim=0)[scalable.index]
    else:
        gain = weight.flatten() + 1 if scalable.rule == "gain_plus_one" else weight.flatten()
        size = gain.abs()[scalable.index]
    ratio = size.amax(1) / size.median(1).values.clamp(min=1e-12)
    return float(ratio.max()), "gains" if scalable.rule.startswith("gain") else "rows"
