"""What a recipe is: where its dense tokens are, how many bits the others take, and what attention sees of them.

A recipe treats keys and values of one layer as a real cache would while it grows. A token is dense when it is written.
It gets codes later or at once, from what is known by then, and never changes again. `Storage` says which tokens have
codes at any length, and counts bits. A `Quantize` turns dense tokens into what their codes stand for.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

DENSE_BITS = 16  # of a value that is not quantised, and of every scale, zero and norm unless a recipe says otherwise

# Takes whole blocks of tokens, `[batch, num_kv_heads, tokens, head_dim]` float32, after RoPE, and the position of the
# first one. Returns what their codes stand for: new memory of the same shape.
Quantize = Callable[[Tensor, int], Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Storage:
    """How keys or values are stored.

    Attributes:
        code_bits: Of the code of a value.
        token_bits: Of what one token of one head has besides its codes, such as a scale and a zero.
        group_bits: Of what `group` consecutive channels of one token and head share.
        group: Channels of a group.
        channel_bits: Of what `channel_tokens` consecutive tokens of one channel share.
        channel_tokens: Tokens of such a group.
        layer_token_bits: Of what one token has once for all heads of a layer.
        sink: First tokens that stay dense.
        recent: Newest tokens that stay dense.
        block: Tokens that get codes together, counted from the end of the sink.
    """

    code_bits: float
    token_bits: float = 0.0
    group_bits: float = 0.0
    group: int = 1
    channel_bits: float = 0.0
    channel_tokens: int = 1
    layer_token_bits: Callable[[int], float] = lambda values: 0.0
    sink: int = 0
    recent: int = 0
    block: int = 1

    def coded_end(self, tokens: int) -> int:
        """The position behind the last token with codes, in a cache of `tokens` tokens. The first is at `sink`."""
        return self.sink + max(0, tokens - self.sink - self.recent) // self.block * self.block

    def coded(self, tokens: int) -> int:
        """How many of `tokens` tokens have codes."""
        return self.coded_end(tokens) - self.sink

    def value_bits(self, num_kv_heads: int, head_dim: int) -> float:
        """Bits of a value that has a code, with its share of scales and all else."""
        return (
            self.code_bits
            + self.token_bits / head_dim
            + self.group_bits / self.group
            + self.channel_bits / self.channel_tokens
            + self.layer_token_bits(num_kv_heads * head_dim) / (num_kv_heads * head_dim)
        )

    def bits(self, tokens: int, num_kv_heads: int, head_dim: int) -> float:
        """Bits of a value in a cache of `tokens` tokens, dense ones included.

        Averaged over the last `block` lengths, because the tokens that wait for their block are anything from none to
        nearly a block.
        """
        lengths = range(max(1, tokens - self.block + 1), tokens + 1)
        share = sum(self.coded(length) / length for length in lengths) / len(lengths)
        return share * self.value_bits(num_kv_heads, head_dim) + (1 - share) * DENSE_BITS

    def bits_read(self, tokens: int, num_kv_heads: int, head_dim: int) -> float:
        """Bits of a value, averaged over what attention reads while a text of `tokens` tokens goes by."""
        pairs = tokens * (tokens + 1) // 2
        share = self.coded_pairs(tokens, 0) / pairs
        return share * self.value_bits(num_kv_heads, head_dim) + (1 - share) * DENSE_BITS

    def coded_pairs(self, tokens: int, first_chunk: int) -> int:
        """(Query, token) pairs that read a code, in a text of `tokens` tokens whose first chunk reads none."""
        return sum(self.coded(length) for length in range(first_chunk + 1, tokens + 1))


class Rope:
    """Undoes and redoes the rotary embedding of keys, for recipes that quantise them before it.

    `rotary` is the model's module. It must rotate all channels in halves: channel i with channel `i + head_dim / 2`.
    """

    def __init__(self, rotary: nn.Module) -> None:
        self.rotary = rotary

    def undone(self, keys: Tensor, start: int) -> Tensor:
        """Keys before RoPE, from keys of consecutive positions after it."""
        cos, sin = self._angles(keys, start)
        return (keys * cos - _half_turned(keys) * sin) / (cos.square() + sin.square())

    def redone(self, keys: Tensor, start: int) -> Tensor:
        """Keys after RoPE."""
        cos, sin = self._angles(keys, start)
        return keys * cos + _half_turned(keys) * sin

    def _angles(self, keys: Tensor, start: int) -> tuple[Tensor, Tensor]:
        position = keys.new_ones(1, keys.shape[2]).cumsum(1).long() - 1 + start
        cos, sin = self.rotary(keys.float(), position)
        return cos.unsqueeze(1), sin.unsqueeze(1)


def _half_turned(x: Tensor) -> Tensor:
    """The other channel of each RoPE pair, with its sign."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


@dataclasses.dataclass(frozen=True)
class Sample:
    """What one layer computes on a text that recipes may learn from, on the CPU, in float32.

    The text is not measured. All are `[heads, tokens, head_dim]`, after RoPE.
    """

    window: int  # tokens of each window that the text was fed in; positions start again at 0
    query: Tensor
    key: Tensor
    value: Tensor
    key_gradient: Tensor  # of the mean loss of the text
    value_gradient: Tensor


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer whose keys and values are quantised."""

    index: int
    num_kv_heads: int
    head_dim: int
    model: PreTrainedModel
    rope: Rope | None  # `None` if RoPE cannot be undone
    sample: Sample | None  # `None` if no recipe asks for one

    def learned(self, recipe: Recipe) -> Sample:
        """The sample, for a recipe that needs one."""
        if self.sample is None:
            raise ValueError(f"{recipe.name}: `sample` must be given, got none. The recipe learns from a text.")
        return self.sample


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe(abc.ABC):
    """One way of quantising a cache.

    Attributes:
        name: As users type it.
        family: Recipes of a family differ in their bits.
        source: Where it is defined.
        key: How keys are stored.
        value: How values are stored.
        has_sample: Whether it learns from a text (`Sample`).
    """

    name: str
    family: str
    source: str
    key: Storage
    value: Storage
    has_sample: bool = False

    @abc.abstractmethod
    def quantizers(self, layer: Layer) -> tuple[Quantize, Quantize]:
        """How keys and values of a layer are quantised. `NotImplementedError` if the recipe does not fit the layer."""

    def shared_bytes(self, num_kv_heads: int, head_dim: int) -> float:
        """Bytes that a layer needs once for all sequences, such as codebooks and rotations that are not computed."""
        return 0.0

    def bits(self, tokens: int, num_kv_heads: int, head_dim: int) -> dict[str, float]:
        """Bits of a value in a cache of `tokens` tokens: of keys, of values, and of both together.

        Scales, zeros, outliers and dense tokens count. What is shared by all sequences does not (`shared_bytes`).
        """
        return _both(*(side.bits(tokens, num_kv_heads, head_dim) for side in (self.key, self.value)))

    def bits_read(self, tokens: int, num_kv_heads: int, head_dim: int) -> dict[str, float]:
        """Like `bits`, averaged over what attention reads while a text of `tokens` tokens goes by."""
        return _both(*(side.bits_read(tokens, num_kv_heads, head_dim) for side in (self.key, self.value)))

    def with_dense(self, sink: int, recent: int) -> Recipe:
        """The recipe with as many dense tokens instead of its own. Blocks still wait until they are full."""
        key, value = (dataclasses.replace(side, sink=sink, recent=recent) for side in (self.key, self.value))
        return dataclasses.replace(self, key=key, value=value)

    def to_dict(self) -> dict[str, Any]:
        """What a record says of the recipe."""
        sides = {
            name: {field: getattr(side, field) for field in ("sink", "recent", "block")}
            for name, side in (("key", self.key), ("value", self.value))
        }
        return {"family": self.family, "source": self.source, "has_sample": self.has_sample, **sides}

    def refuse(self, layer: Layer, wanted: str, got: object) -> NotImplementedError:
        """The error for a layer that does not fit."""
        return NotImplementedError(
            f"{self.name}: `model` must have {wanted}, got {got} in layer {layer.index}. Leave the recipe out."
        )


def _both(key: float, value: float) -> dict[str, float]:
    return {"key": key, "value": value, "both": (key + value) / 2}
