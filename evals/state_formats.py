"""Formats in which a state of the gated delta rule could be stored between two decode steps, simulated exactly.

A decode kernel loads a state `[key channels, value channels]` of a head, decays it, adds the new token, reads it with
the query, all in float32, and stores it again. So what a format does is round once a step, after the output is
computed: `StateFormat.rounded` returns the float32 values of what a kernel would store. As in
`hf_kvquant/spec/reference.py`, scales are float16, and codes are computed from the scale as stored:

    scale = max(rn16(a / L), 2^-24)    a = the largest magnitude of the values that share it
    code  = clamp(rn(x / scale), -L, L), rn = round half to even; stochastic: floor(x / scale + u), u uniform in [0, 1)
    fp8   = e4m3(clamp(x / scale, -448, 448)), L = 448

Stochastic rounding to bf16 adds 16 random bits below the last one that stays, and cuts them off.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor

Storage = Literal["float32", "bf16", "fp16", "fp8", "int8", "int4"]
Shared = Literal["head", "key", "value"]

BITS: dict[Storage, int] = {"float32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "int4": 4}
LARGEST: dict[Storage, float] = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}
MIN_SCALE = 2.0**-24  # the smallest positive float16
# What has one scale: a head; a key channel, with a scale for all values; a value channel, with one for all keys.
DIMENSIONS: dict[Shared, tuple[int, ...]] = {"head": (-2, -1), "key": (-1,), "value": (-2,)}


@dataclasses.dataclass(frozen=True)
class StateFormat:
    """How the recurrent states of a model are stored.

    Attributes:
        method: Its name in results.
        storage: Of one value.
        scale_per: What shares a scale, if values are codes.
        is_stochastic: Whether values are rounded up with a probability that makes the mean exact.
        every: Tokens from one rounding to the next. More than 1 stands for a kernel that adds several tokens at once,
            as chunked prefill does: the state is exact in between.
        exact_share: Share of the positions that come before the first rounding: a prompt that is read in one chunk.
        is_conv_bf16: Whether the state of the convolution is stored in bf16.
    """

    method: str
    storage: Storage = "float32"
    scale_per: Shared | None = None
    is_stochastic: bool = False
    every: int = 1
    exact_share: float = 0.0
    is_conv_bf16: bool = False

    def rounded(self, state: Tensor) -> Tensor:
        """The values of `state` (`[..., key channels, value channels]` float32) as stored, in new memory."""
        if self.storage == "float32":
            return state.clone()
        if self.storage == "bf16" and self.is_stochastic:
            noise = torch.randint(0, 1 << 16, state.shape, dtype=torch.int32, device=state.device)
            return ((state.view(torch.int32) + noise) & -(1 << 16)).view(torch.float32)
        if self.storage == "bf16" or self.storage == "fp16":
            return state.to(torch.bfloat16 if self.storage == "bf16" else torch.float16).float()
        largest = LARGEST[self.storage]
        assert self.scale_per is not None
        extent = state.abs().amax(DIMENSIONS[self.scale_per], keepdim=True)
        scale = (extent / largest).half().float().clamp_min(MIN_SCALE)
        code = state / scale
        if self.storage == "fp8":
            return code.clamp(-largest, largest).to(torch.float8_e4m3fn).float() * scale
        code = (code + torch.rand_like(code)).floor() if self.is_stochastic else code.round()
        return code.clamp(-largest, largest) * scale

    def num_bytes(self, heads: int, keys: int, values: int) -> int:
        """Bytes of a layer's recurrent state: codes or values, and scales of 2 bytes."""
        scales = {None: 0, "head": 1, "key": keys, "value": values}[self.scale_per]
        return heads * (keys * values * BITS[self.storage] // 8 + 2 * scales)


FORMATS = (
    StateFormat("float32"),
    StateFormat("bf16", "bf16"),
    StateFormat("bf16-stochastic", "bf16", is_stochastic=True),
    StateFormat("fp16", "fp16"),
    StateFormat("fp8-head", "fp8", "head"),
    StateFormat("fp8-key", "fp8", "key"),
    StateFormat("int8-key", "int8", "key"),
    StateFormat("int8-value", "int8", "value"),
    StateFormat("int8-key-stochastic", "int8", "key", is_stochastic=True),
    StateFormat("int4-key", "int4", "key"),
    StateFormat("conv-bf16", is_conv_bf16=True),
    StateFormat("bf16-every-64", "bf16", every=64),
    StateFormat("int8-key-every-64", "int8", "key", every=64),
    StateFormat("int4-key-every-64", "int4", "key", every=64),
    StateFormat("bf16-after-half", "bf16", exact_share=0.5),
    StateFormat("int8-key-after-half", "int8", "key", exact_share=0.5),
)
