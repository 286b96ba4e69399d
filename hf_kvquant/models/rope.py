"""How long a text may be before its model takes other RoPE factors for it, or has no position for it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import GenerationMixin, PreTrainedModel

from .text_config import context_of, text_config_of

# transformers' names of modules and buffers.
_POSITION_TABLES = frozenset({"wpe", "embed_positions", "position_embeddings"})


@dataclasses.dataclass(frozen=True)
class Switch:
    """Of a model with two sets of factors (`longrope`: Phi-3 and relatives, MiniCPM3).

    Attributes:
        border: Tokens of the longest text with the factors of short ones. The longest text of a forward decides.
        recomputes: Whether `generate` computes all keys again where a text outgrows its factors.
    """

    border: int
    recomputes: bool


def recomputes(model: Any) -> bool:
    """Whether `generate` drops the cache of a model where a text outgrows its factors. The config names the length.

    Phi-3 and relatives do so in a method of their own. Configs of other models may have the name, too.
    """
    method = getattr(type(model), "prepare_inputs_for_generation", None)
    is_own = method not in (None, GenerationMixin.prepare_inputs_for_generation)
    return is_own and hasattr(text_config_of(model), "original_max_position_embeddings")


def switch_of(model: PreTrainedModel) -> Switch | None:
    """`None` for a model with one set of factors, or with factors that change with every length (dynamic NTK)."""
    borders = [
        each.get("original_max_position_embeddings") or context_of(model)
        for each in _parameters(model)
        if each.get("rope_type") == "longrope"
    ]
    border = min((each for each in borders if each), default=None)
    return None if border is None else Switch(border, recomputes(model))


def is_dynamic(model: PreTrainedModel) -> bool:
    """Whether factors change with every length beyond the positions that the model supports (dynamic NTK)."""
    return any("dynamic" in str(each.get("rope_type")) for each in _parameters(model))


def has_position_table(model: PreTrainedModel) -> bool:
    """Whether positions are looked up in a table, which has none beyond those that the model supports.

    It is learned (GPT-2, OPT), or holds the sines and cosines of RoPE (GPT-J, CodeGen).
    """
    decoder, context = model.get_decoder() or model, context_of(model)
    tensors = itertools.chain(decoder.named_parameters(), decoder.named_buffers())
    return context is not None and any(
        tensor.ndim == 2 and len(tensor) >= context and not _POSITION_TABLES.isdisjoint(name.split("."))
        for name, tensor in tensors
    )


def _parameters(model: PreTrainedModel) -> Iterator[Mapping[str, Any]]:
    """Of all layers, or of each type of layer."""
    given = getattr(text_config_of(model), "rope_parameters", None) or {}
    yield from (each for each in (given, *given.values()) if isinstance(each, Mapping))
