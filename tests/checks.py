"""One call of the ops on a device and in `reference.py`, compared: what the tests of the kernels have in common.

Memory that must not be read is poisoned (`cases.py`), whole planes are compared, and attention has to keep within a
bound that is derived from what PyTorch makes of the same keys and values in the same dtype (`tolerances.py`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from cases import Case, clone, filled, poisoned, queries
from compare import assert_close, assert_same, assert_same_planes
from tolerances import attention_bound, lse_bound, max_logit_terms
from torch import Tensor

from hf_kvquant import ops
from hf_kvquant.spec import reference
from hf_kvquant.spec.formats import KVFormat
from hf_kvquant.spec.key_transform import KeyTransform
from hf_kvquant.spec.planes import Planes


def pair(kv_format: KVFormat) -> tuple[KVFormat, KVFormat]:
    return kv_format, kv_format


def to(device: str, *tensors: Tensor | None) -> list[Any]:
    return [None if tensor is None else tensor.to(device) for tensor in tensors]


def run_append(engine: str, case: Case, key: Tensor, value: Tensor, key_transform: KeyTransform | None = None) -> None:
    """Appends to poisoned planes on the device and in the reference, and compares all of them."""
    planes = []
    for side, x in enumerate((key, value)):
        kv_format = case.formats[side]
        shape = case.batch, case.num_kv_heads, case.head_dims()[side], case.capacity
        made = poisoned(kv_format, *shape, case.dtype, slack=case.slack, **case.windows)
        if kv_format.granularity == "tensor":
            # The scale of an earlier, smaller chunk: the new tokens run into the clamps.
            frozen = reference.compute_scale(torch.randn(x.shape), kv_format)
            made = Planes(made.codes, *frozen, made.tail)
        planes.append(made)
    ours = [clone(made, engine) for made in planes]
    lengths = case.lengths_tensor()
    new = to(engine, key, value)
    before = [x.clone() for x in new]
    transform = None if key_transform is None else key_transform.to(engine)
    starts = case.starts_tensor()
    ops.append(*new, *ours, lengths.to(engine), case.layout, transform, *to(engine, starts))
    for side, x in enumerate((key, value)):
        kv_format = case.formats[side]
        reference.append(x, planes[side], kv_format, lengths, None if side else key_transform, starts, **case.windows)
        assert_same_planes(ours[side], planes[side], f"{case}, {'value' if side else 'key'}")
        assert_same(new[side], before[side].cpu(), f"{case}, input")


def plain_attention(
    case: Case,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    softmax_scale: float,
    coded_query: Tensor | None = None,
    constant: Tensor | None = None,
    is_dense: Tensor | None = None,
    starts: Tensor | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    sliding_window: int = 0,
) -> tuple[Tensor, Tensor]:
    """What eager PyTorch makes of the same keys and values in the working dtype: its error is the measure of ours.

    Keys that are not dense meet `coded_query`, and their products get `constant` added.
    """
    key = key.nan_to_num(0, 0, 0).to(case.dtype).repeat_interleave(case.num_q_per_kv, 1)
    value = value.nan_to_num(0, 0, 0).to(case.dtype).repeat_interleave(case.num_q_per_kv, 1)
    scores = query @ key.mT
    if coded_query is not None and is_dense is not None:
        coded_scores = coded_query.to(case.dtype) @ key.mT
        if constant is not None:
            coded_scores = coded_scores + constant.to(case.dtype).unsqueeze(-1)
        scores = torch.where(is_dense[:, None, None, :], scores, coded_scores)
    scores = scores * softmax_scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    column = torch.arange(case.capacity)
    position = case.lengths_tensor().view(-1, 1, 1, 1) - case.q_len + torch.arange(case.q_len).view(1, 1, -1, 1)
    if alibi_slopes is not None:
        scores = scores + (alibi_slopes.view(1, -1, 1, 1) * (column - position)).to(case.dtype)
    is_visible = column <= position
    if starts is not None:
        is_visible = is_visible & (column >= starts.view(-1, 1, 1, 1))
    if sliding_window:
        is_visible = is_visible & (column > position - sliding_window)
    scores = scores.masked_fill(~is_visible, -torch.inf).float()
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), dim=-1)
    weights = scores.softmax(-1)[..., : case.capacity].nan_to_num(0).to(case.dtype)
    return (weights @ value).transpose(1, 2), scores.logsumexp(-1)


def run_decode(
    engine: str,
    case: Case,
    *,
    planes: tuple[Planes, Planes] | None = None,
    query: Tensor | None = None,
    num_splits: int = 0,
    softmax_scale: float | None = None,
    key_transform: KeyTransform | None = None,
    ring: tuple[Planes, Planes] | None = None,
    own: tuple[Tensor, Tensor] | None = None,
    **extras: Any,
) -> tuple[Tensor, Tensor]:
    """Attends on the device and in the reference, to equal planes, and compares output and lse.

    With a transform, plain PyTorch gets queries and keys in the basis of the codes, rounded to the working dtype. With
    a ring, which holds the newest of the same tokens, the device attends to that. With `own`, the keys and values of
    the query's tokens, these are not in the planes, and are attended to as they are.
    """
    stored = case
    if own is not None:
        stored = dataclasses.replace(case, lengths=tuple(length - case.q_len for length in case.lengths))
    planes = planes or (filled(stored, 0, None, key_transform), filled(stored, 1))
    query = queries(case) if query is None else query
    softmax_scale = softmax_scale or case.head_dim**-0.5
    if case.starts is not None:
        extras["starts"] = case.starts_tensor()
    on_device = {name: x.to(engine) if isinstance(x, Tensor) else x for name, x in extras.items()}
    operands = ops.Operands(
        *(clone(made, engine) for made in ring or planes),
        case.layout if ring is None else case.ring,
        None if key_transform is None else key_transform.to(engine),
    )
    held = case.lengths_tensor().to(engine)
    on_device["softmax_scale"] = softmax_scale
    if own is None:
        out, lse = operands.decode(query.to(engine), None, held, num_splits=num_splits, **on_device)
    else:
        out, lse = operands.attend_chunk(query.to(engine), (own[0].to(engine), own[1].to(engine)), held, **on_device)
    expected, by_torch = [], []
    max_query = max_key = max_value = max_constant = max_terms = 0.0
    for some, num_behind in [(slice(None), 0)] if own else runs_of_queries(case, planes):
        x = query[:, :, some]
        seen = dataclasses.replace(
            case, q_len=x.shape[2], lengths=tuple(length - num_behind for length in case.lengths)
        )
        held = {"lengths": stored.lengths_tensor(), "starts": case.starts_tensor(), "num_behind": num_behind}
        key, value = (
            reference.dequantize(made, kv_format, torch.float32, **held, **case.windows)
            for made, kv_format in zip(planes, case.formats, strict=True)
        )
        is_dense, _ = reference.dense_tokens(planes[0], case.formats[0], **held, **case.windows)
        if own is not None:
            row = stored.lengths_tensor().long().unsqueeze(1) + torch.arange(case.q_len)
            key, value = (
                y.scatter(2, row[:, None, :, None].expand_as(new), new.float())
                for y, new in zip((key, value), own, strict=True)
            )
            is_dense = is_dense.scatter(1, row, value=True)
        options = {"softmax_scale": softmax_scale, "is_dense": is_dense, **extras}
        expected.append(
            reference.decode_attention(
                x.float(), key, value, seen.lengths_tensor(), key_transform=key_transform, **options
            )
        )
        coded_query = constant = None
        # In float64: squares of numbers that float32 holds need not fit it.
        size = largest(x.double().norm(dim=-1))
        if key_transform is not None:
            coded_query, constant = reference.transform_query(x, key_transform)
            max_coded = largest(coded_query.double().norm(dim=-1))
            size = max(max_coded, size) if is_dense.any() else max_coded
        by_torch.append(
            plain_attention(seen, x.to(case.dtype), key, value, coded_query=coded_query, constant=constant, **options)
        )
        max_query, max_key = max(max_query, size), max(max_key, largest(key.double().norm(dim=-1)))
        max_value = max(max_value, largest(value))
        max_constant = max(max_constant, 0.0 if constant is None else largest(constant))
        if case.formats[0].is_integer:
            terms = max_logit_terms(x if coded_query is None else coded_query, key, abs(softmax_scale))
            max_terms = max(max_terms, terms)
    (expected_out, expected_lse), (torch_out, torch_lse) = (
        (torch.cat([out for out, _ in parts], dim=1), torch.cat([lse for _, lse in parts], dim=2))
        for parts in (expected, by_torch)
    )
    max_logit = (max_query * max_key + max_constant) * abs(softmax_scale)
    bound = attention_bound(expected_out, torch_out, case.dtype, max_logit, max_value)
    what = f"{case} {sorted(extras)}"
    assert out.dtype == case.dtype and out.is_contiguous(), what
    assert lse.dtype == torch.float32 and lse.is_contiguous(), what
    assert_close(out, expected_out, bound, f"{what}, out")
    assert_same(lse.cpu() == -torch.inf, expected_lse == -torch.inf, f"{what}, rows that attend to nothing")
    # Kernels take the zero out of a logit's sum. In low precision without a softcap, PyTorch's error hides that.
    max_logit = max(max_logit, max_terms)
    assert_close(lse, expected_lse, lse_bound(expected_lse, torch_lse, max_logit), f"{what}, lse")
    return out, lse


def runs_of_queries(case: Case, planes: tuple[Planes, Planes]) -> list[tuple[slice, int]]:
    """Queries in a row whose windows have the same tokens, and how many of the case's tokens are behind them."""

    def windows(i: int) -> list[Tensor]:
        held = {"lengths": case.lengths_tensor(), "starts": case.starts_tensor(), "num_behind": case.q_len - 1 - i}
        return [
            reference.dense_tokens(made, kv_format, **held, **case.windows)[0]
            for made, kv_format in zip(planes, case.formats, strict=True)
        ]

    every = [windows(i) for i in range(case.q_len)]
    firsts = [i for i in range(case.q_len) if i == 0 or not all(map(torch.equal, every[i - 1], every[i]))]
    ends = [*firsts[1:], case.q_len]
    return [(slice(first, end), case.q_len - end) for first, end in zip(firsts, ends, strict=True)]


def largest(x: Tensor) -> float:
    finite = x[x.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
