"""Smoothing factors that need no text, for heads whose keys have outlier channels.

A rotation spreads every channel of a key over all channels, so outlier channels make all codes coarse. Keys divided by
factors, and queries multiplied by them, give the same logits. If a channel's keys have variance v and its queries mean
square m, the rotated codes cost the logits least with

    λ = (v / m)^(1/4)

up to a constant of the head: the error that a factor takes from its own channel, it adds to the others. Calibration
(`smooth_attention`) tries the same factors, among others, on real text, and its results go before these. Here v and m
come from one forward over random tokens. That is a rough measure, so only heads with large outliers get factors: in
SmolLM2-135M-Instruct, exponents from 512 random tokens correlate by 0.8 with exponents from text, from 128 by 0.7.
(Norms of the rows of projections, which need no forward, do not at all: -0.16.)

Factors are powers of two, so they round nothing. Variances leave out what all keys share: a centre, or the zeros of
channels, take that.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..attention.observation import Observation, observed
from ..models.probing import forward, in_float32
from ..models.text_config import positions_of, text_config_of

NUM_TOKENS = 256
# Of these, the first ones are left out: models give them keys that are unlike all others.
NUM_FIRST = 4
# A head gets factors if one of them would be so far above the mean of the head, in octaves. At 1.5, keys of a channel
# are 8 times as large, relative to its queries, as in others. Where three pairs of each head have keys 8 times as large
# and queries 8 times as small (reference model), int4, int8 and rotated channel scales diverge by 0.0048, 0.00020 and
# 0.0026, and with factors by 0.0022, 0.00012 and 0.0009. Smaller factors gain nothing on SmolLM2-135M-Instruct.
MIN_OCTAVES = 1.5


# Inference tensors could only be used in inference mode, and factors outlive the call that first needs them.
@torch.inference_mode(False)
@torch.no_grad()
def balancing_factors(model: PreTrainedModel) -> dict[int, Tensor]:
    """Smoothing factors from one forward over random tokens.

    Args:
        model: A decoder whose attention can be watched. Encoder-decoders have no factors.

    Returns:
        Per layer index, `[num_kv_heads, head_dim]` float32 on the layer's device: powers of two, and 1 in heads without
        large outliers. Layers without such heads are absent.
    """
    if model.config.is_encoder_decoder:
        return {}
    factors: dict[int, Tensor] = {}

    def look(observation: Observation) -> None:
        found = _factors(observation.query[0, :, NUM_FIRST:].float(), observation.key[0, :, NUM_FIRST:].float())
        if bool((found != 1).any()):
            factors[observation.layer_idx] = found

    # Special tokens are at the ends of most vocabularies; some models look for images behind them.
    vocab_size, generator = text_config_of(model).vocab_size, torch.Generator().manual_seed(0)
    num_tokens = positions_of(model, NUM_TOKENS)
    bounds = min(5, vocab_size - 1), max(6, vocab_size // 2)
    ids = torch.randint(*bounds, (1, num_tokens), generator=generator, device="cpu")
    with in_float32(model), observed(model, look):
        forward(model, ids.clamp(max=vocab_size - 1), only_last=True)
    return factors


def _factors(query: Tensor, key: Tensor) -> Tensor:
    """Of one layer, from `[heads, tokens, head_dim]` float32 each."""
    if key.shape[1] < 2:
        return key.new_ones(key.shape[0], key.shape[2])
    queries = query.square().mean(1).unflatten(0, (key.shape[0], -1)).mean(1)
    octaves = (key.var(1) / queries).log2() / 4
    octaves = octaves - octaves.mean(-1, keepdim=True)
    # A channel without keys or queries makes these infinite or NaN, which no comparison holds for.
    is_large = (octaves.amax(-1, keepdim=True) >= MIN_OCTAVES) & octaves.isfinite().all(-1, keepdim=True)
    return torch.where(is_large, octaves, 0.0).round().exp2()
