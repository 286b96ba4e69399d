"""Key transforms: their mathematics, kernels bit for bit, centres from biases and from data, and who gets them.

That a transform is exact is tested in `reference.py` against float64; that kernels do what the reference says, in codes
bitwise and in attention within the usual bounds; that storages apply transforms once and undo them, in test_storage.py.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import pickle
import re
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from cases import (
    DTYPES,
    KINDS,
    REFUSED,
    Case,
    clone,
    filled,
    is_repeated,
    make_formats,
    make_transform,
    name_of,
    tokens,
)
from checks import pair, run_append, run_decode
from compare import assert_close, assert_same
from models import ReferenceCache, greedy, left_padded, logits
from tolerances import model_bound
from torch import Tensor

import hf_kvquant
from hf_kvquant import KeyTransform, KVFormat, KVQuantCache, key_transforms, ops, patched
from hf_kvquant.models.probing import whole_cache
from hf_kvquant.spec import reference
from hf_kvquant.transforms import of_model
from hf_kvquant.transforms.centering import bias_centers
from hf_kvquant.upstream.releases import cache_of, with_cache

HEAD_DIMS = (64, 80, 96, 128, 256)
EPS = torch.finfo(torch.float32).eps
half_of_the_formats = pytest.mark.full(
    when=lambda index, head_dim, engine: engine != "cuda" and is_repeated(index, head_dim),
    reason="a transform comes before codes, and knows nothing of them",
)


def hadamard(head_dim: int) -> Tensor:
    """The rotation as a matrix, float64: Sylvester's, block by block."""
    block = torch.ones(1, 1, dtype=torch.float64)
    while head_dim % (2 * block.shape[0]) == 0:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    return torch.block_diag(*[block / block.shape[0] ** 0.5] * (head_dim // block.shape[0]))


# --- mathematics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("head_dim", "block"), [(8, 8), (40, 8), (64, 64), (80, 16), (96, 32), (112, 16), (256, 256)])
def test_a_rotation_is_orthogonal_and_its_own_inverse(head_dim: int, block: int) -> None:
    assert reference.rotation_block(head_dim) == block
    matrix = hadamard(head_dim)
    assert_same(matrix, matrix.mT, "symmetric")
    assert_close((matrix @ matrix).float(), torch.eye(head_dim), 1e-15, "its own inverse")
    x = torch.randn(3, 5, head_dim)
    bound = (block.bit_length() + 1) * EPS * float(x.norm(dim=-1).max())
    assert_close(reference.rotate(x), (x.double() @ matrix).float(), bound, "rotated")
    assert_close(reference.rotate(reference.rotate(x)), x, 2 * bound, "rotated twice")


def test_a_rotation_adds_in_one_order() -> None:
    """The order is part of the format: codes next to a tie depend on it."""
    x = torch.randn(1000, 8)
    channels = list(x.unbind(-1))
    for stride in (1, 2, 4):
        for i in range(8):
            if i & stride == 0:
                a, b = channels[i], channels[i + stride]
                channels[i], channels[i + stride] = a + b, a - b
    expected = torch.stack(channels, -1) * torch.tensor(8.0).double().rsqrt().float()
    assert_same(reference.rotate(x), expected, "rotated")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_scores_are_those_of_plain_keys(head_dim: int, kind: str) -> None:
    transform = make_transform(kind, head_dim)
    query, key = torch.randn(2, 6, 3, head_dim), torch.randn(2, 2, 7, head_dim)
    x, constant = reference.transform_query(query, transform)
    stored = reference.transform_key(key, transform)
    assert x.dtype == stored.dtype == torch.float32 and (constant is None) == ("center" not in kind)
    scores = x.double() @ stored.double().repeat_interleave(3, 1).mT
    if constant is not None:
        scores = scores + constant.double().unsqueeze(-1)
    expected = query.double() @ key.double().repeat_interleave(3, 1).mT
    # Each of the two factors went through 3 steps and up to 8 additions, and a centred key is larger than its own.
    bound = 24 * EPS * float(x.norm(dim=-1).max()) * (float(stored.norm(dim=-1).max()) + 3 * head_dim**0.5)
    assert_close(scores.float(), expected.float(), bound, "scores")
    undone = reference.undo_key_transform(stored, transform)
    assert_close(undone, key, 24 * EPS * 2.25 * (float(stored.norm(dim=-1).max()) + 9), "undone")


EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 3.0, 30.0])},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.05])},
    "window": {"sliding_window": 9},
    "padding": {"starts": torch.tensor([3, 0, 20], dtype=torch.int32)},
}
EXTRAS["all"] = {name: value for extra in EXTRAS.values() for name, value in extra.items()}


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("kind", KINDS)
def test_attention_is_that_of_plain_keys(engine: str, kind: str, extra: str) -> None:
    """Storage type `none`: nothing but rounding may tell transformed keys from plain ones, in `lse` either."""
    case = Case(pair(KVFormat("none")), 64, torch.float32, 2, 3, (64, 33, 37))
    transform = make_transform(kind, 64)
    key, value, query = tokens(case, 128, 64), tokens(case, 128, 64), torch.randn(3, 4, 3, 64)
    options: dict[str, Any] = {"softmax_scale": 0.125, **EXTRAS[extra]}
    expected, expected_lse = reference.decode_attention(query, key, value, case.lengths_tensor(), **options)
    stored = filled(case, 0, reference.transform_key(key, transform))
    moved = {name: x.to(engine) if isinstance(x, Tensor) else x for name, x in options.items()}
    out, lse = ops.decode(
        query.to(engine),
        None,
        clone(stored, engine),
        clone(filled(case, 1, value), engine),
        case.lengths_tensor().to(engine),
        case.layout,
        key_transform=transform.to(engine),
        **moved,
    )
    x, constant = reference.transform_query(query, transform)
    largest = float(x.norm(dim=-1).max()) * float(reference.transform_key(key, transform).norm(dim=-1).max())
    largest = 0.125 * (largest + (0.0 if constant is None else float(constant.abs().max())))
    assert_close(lse, expected_lse, 16 * EPS * (1 + largest), "lse")
    assert_close(out, expected, 32 * EPS * (1 + largest) * float(value.abs().max()), "out")


# --- kernels ----------------------------------------------------------------------------------------------------------


@half_of_the_formats
@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 8, 40, 72])
@pytest.mark.parametrize("index", range(len(make_formats())))
def test_codes_are_those_of_the_reference(engine: str, index: int, head_dim: int) -> None:
    kv_format = make_formats(head_dim)[index]
    for i, kind in enumerate(KINDS):
        dtype, q_len = DTYPES[(index + i) % 3], (1, 3, 66)[(index + head_dim // 8 + i) % 3]
        case = Case((kv_format, kv_format), head_dim, dtype, q_len=q_len, lengths=(q_len, 128))
        x = tokens(case, q_len, head_dim)
        run_append(engine, case, x, tokens(case, q_len, head_dim), make_transform(kind, head_dim))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kv_format", make_formats(), ids=name_of)
def test_what_is_not_finite_stays_so(engine: str, kv_format: KVFormat, value: float) -> None:
    case = Case(pair(kv_format), 64, q_len=3, lengths=(3, 70))
    x = tokens(case, 3, 64)
    x[1, 0, 1, 5] = value
    run_append(engine, case, x, x, make_transform("center+smooth+rotate", 64))


@pytest.mark.parametrize("kv_format", make_formats(), ids=name_of)
def test_strided_keys_are_transformed(engine: str, kv_format: KVFormat) -> None:
    case = Case(pair(kv_format), 64, q_len=5, lengths=(5, 61))
    fused = torch.randn(case.batch, case.q_len, case.num_kv_heads, 3, 64)
    key, value = fused[..., 1, :].transpose(1, 2), fused[..., 2, :].transpose(1, 2)
    run_append(engine, case, key, value, make_transform("center+rotate", 64))


@half_of_the_formats
@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 40])
@pytest.mark.parametrize("index", range(len(make_formats())))
def test_attention_to_transformed_codes(engine: str, index: int, head_dim: int) -> None:
    fitting = make_formats(head_dim)[index]
    for i, kind in enumerate(KINDS):
        q_len, num_q_per_kv = ((1, 4), (5, 1), (2, 8), (33, 2))[(i + head_dim // 8) % 4]
        case = Case(pair(fitting), head_dim, DTYPES[i % 3], num_q_per_kv, q_len, (64 + q_len, 33, 128))
        transform = make_transform(kind, head_dim)
        key = reference.transform_key(tokens(case, case.capacity, head_dim), transform)
        run_decode(engine, case, planes=(filled(case, 0, key), filled(case, 1)), key_transform=transform)


@pytest.mark.parametrize("kv_format", make_formats(), ids=name_of)
def test_queries_just_below_a_power_of_two(engine: str, kv_format: KVFormat) -> None:
    """Kernels make narrower numbers of transformed queries, by powers of two: none may round to infinity."""
    smoothing = torch.full((2, 64), float(torch.nextafter(torch.tensor(2.0), torch.tensor(1.0))))
    for dtype in (torch.bfloat16, torch.float16):
        case = Case(pair(kv_format), 64, dtype, 2, 3, (64, 33, 128))
        transform = KeyTransform(smoothing=smoothing)
        key = reference.transform_key(tokens(case, case.capacity, 64), transform)
        query = torch.randn(3, 4, 3, 64).clamp(-0.9, 0.9)
        query[..., 5] = torch.tensor([1.0, -2.0, 0.5, 4.0]).view(4, 1)
        planes = filled(case, 0, key), filled(case, 1)
        run_decode(engine, case, planes=planes, query=query.to(dtype), key_transform=transform)


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("kv_format", [KVFormat("int8"), KVFormat("int4", symmetric=False)], ids=name_of)
def test_a_constant_does_not_disturb_sinks_caps_and_splits(engine: str, kv_format: KVFormat, extra: str) -> None:
    case = Case(pair(kv_format), 64, torch.float32, 2, 3, (1100, 33, 700), capacity=1152)
    transform = make_transform("center+smooth+rotate", 64)
    key = reference.transform_key(tokens(case, case.capacity, 64), transform)
    planes, query = (filled(case, 0, key), filled(case, 1)), torch.randn(3, 4, 3, 64)
    options = {"planes": planes, "query": query, "key_transform": transform, **EXTRAS[extra]}
    for num_splits in (0, 1, 7):
        run_decode(engine, case, num_splits=num_splits, **options)


def break_dtype(transform: dict[str, Tensor]) -> None:
    transform["center"] = transform["center"].half()


def break_shape(transform: dict[str, Tensor]) -> None:
    transform["center"] = transform["center"][:1]


def break_channels(transform: dict[str, Tensor]) -> None:
    transform["smoothing"] = transform["smoothing"][:, :32].contiguous()


def break_stride(transform: dict[str, Tensor]) -> None:
    transform["smoothing"] = transform["smoothing"].repeat(1, 2)[:, ::2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (break_dtype, "`key_center` must be [2, 64] float32, got [2, 64] float16. Was it made for another model?"),
        (
            break_shape,
            "`key_center` must be [2, 64] float32, got [1, 64] float32. Was it made for another model?",
        ),
        (
            break_channels,
            "`key_smoothing` must be [2, 64] float32, got [2, 32] float32. Was it made for another model?",
        ),
        (break_stride, "`key_smoothing` must be contiguous, got strides that are not. Call .contiguous()."),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_ops_refuse(device: str, change: Callable[[dict[str, Tensor]], None], message: str) -> None:
    case = Case(pair(KVFormat("int8")), 64, q_len=1)
    parts = {"center": torch.randn(2, 64, device=device), "smoothing": torch.ones(2, 64, device=device)}
    change(parts)
    spelled = [clone(filled(case, side), device).tensors() for side in (0, 1)]
    x, lengths = tokens(case, 1, 64).to(device), case.lengths_tensor().to(device)
    kinds = (parts["center"], parts["smoothing"], True, case.layout.packed)
    with pytest.raises(REFUSED, match=re.escape(f"append: {message}")):
        torch.ops.hf_kvquant.append(x, x, *spelled, lengths, None, *kinds)
    extras = (None, None, None, None, 1.0, 0.0, 0, 0)
    with pytest.raises(REFUSED, match=re.escape(f"decode: {message}")):
        torch.ops.hf_kvquant.decode(x, None, None, *spelled, lengths, *extras, *kinds)


# --- the object -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (
            {"center": [1.0]},
            TypeError,
            "KeyTransform: `center` must be a float32 tensor, got list. Call .float().",
        ),
        (
            {"smoothing": torch.ones(2, 64, dtype=torch.bfloat16)},
            TypeError,
            "KeyTransform: `smoothing` must be a float32 tensor, got torch.bfloat16. Call .float().",
        ),
        (
            {"center": torch.zeros(64)},
            ValueError,
            "KeyTransform: `center` must be [num_kv_heads, head_dim], got shape [64].",
        ),
        (
            {"center": torch.full((2, 64), torch.nan)},
            ValueError,
            "KeyTransform: `center` must be finite, got NaN or infinity. Was it taken from broken keys?",
        ),
        (
            {"smoothing": torch.zeros(2, 64)},
            ValueError,
            "KeyTransform: `smoothing` must be positive, got 0.0. Use 1 for channels that stay as they are.",
        ),
        (
            {"center": torch.zeros(2, 64), "smoothing": torch.ones(1, 64)},
            ValueError,
            "KeyTransform: `smoothing` must be [2, 64] like `center`, got shape [1, 64].",
        ),
        ({"is_rotated": 1}, TypeError, "KeyTransform: `is_rotated` must be True or False, got 1."),
    ],
    ids=lambda value: "",
)
def test_a_transform_without_meaning_is_refused(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        KeyTransform(**fields)
    assert str(caught.value) == message


def test_a_transform_describes_itself() -> None:
    assert KeyTransform().describe() == "none" and KeyTransform().is_identity
    assert make_transform("center+smooth+rotate", 8).describe() == "center+smooth+rotate"
    transform = make_transform("center+rotate", 8)
    assert transform.describe() == "center+rotate" and not transform.is_identity
    assert transform.to("cpu") is transform and len(transform.tensors()) == 1
    assert_same(pickle.loads(pickle.dumps(transform)).center, transform.center, "through pickle")  # type: ignore[arg-type]


def test_transforms_are_equal_that_do_the_same() -> None:
    transform = make_transform("center+smooth+rotate", 8)
    assert transform.equals(transform.clone("cpu"))
    assert transform.center is not None and transform.smoothing is not None
    changes: list[dict[str, Any]] = [
        {"center": None},
        {"center": transform.center + 1},
        {"smoothing": None},
        {"smoothing": transform.smoothing * 2},
        {"is_rotated": False},
    ]
    for change in changes:
        other = dataclasses.replace(transform, **change)
        assert not transform.equals(other) and not other.equals(transform), change


# --- centres ----------------------------------------------------------------------------------------------------------

BIASED = ["qwen2", "phi", "gpt_neox", "glm", "gpt_oss", "starcoder2", "gpt2", "gpt_bigcode", "opt", "bloom"]


def without_inputs(model: Any) -> Any:
    """A copy of a model whose projections and norms have biases only."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for module in twin.modules():
            is_leaf = not list(module.children()) and not isinstance(module, torch.nn.Embedding)
            if is_leaf and hasattr(module, "weight"):
                module.weight.zero_()
    return twin


@pytest.mark.parametrize("family", BIASED)
def test_centres_are_the_mean_of_the_rotated_bias(family: str) -> None:
    """Of keys that are nothing but bias, over the same positions: whatever way the family projects and rotates."""
    model, count = models.family(family), 100
    before = {name: x.clone() for name, x in model.state_dict().items()}
    centers = bias_centers(model, count)
    assert centers and not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    for name, x in model.state_dict().items():
        assert_same(x, before[name], name)
    cache = whole_cache(model)
    with torch.no_grad():
        without_inputs(model)(input_ids=torch.ones((1, count), dtype=torch.long), **with_cache(cache))
    assert [*centers] == [*range(len(cache.layers))]
    for index, center in centers.items():
        expected = cache.layers[index].keys[0].double().mean(1).float()
        assert center.dtype == torch.float32 and float(center.norm()) > 0.5
        assert_close(center, expected, 1e-5 * float(center.norm()), f"{family}, layer {index}")


def test_the_formula() -> None:
    """c = β · e^{iω(T-1)/2} · sin(ωT/2) / (T sin(ω/2)) for every pair of half-split channels."""
    model, count = models.family("qwen2"), 37
    omega = model.model.rotary_emb.inv_freq.double()
    factor = torch.polar((omega * count / 2).sin() / (count * (omega / 2).sin()), omega * (count - 1) / 2)
    for index, center in bias_centers(model, count).items():
        bias = model.model.layers[index].self_attn.k_proj.bias.detach().double().view(2, 2, 32)
        rotated = torch.complex(bias[:, 0], bias[:, 1]) * factor
        expected = torch.cat([rotated.real, rotated.imag], dim=1)
        assert_close(center, expected.float(), 1e-5 * float(expected.norm()), f"layer {index}")


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "cohere", "persimmon", "jamba", "gptj"])
def test_without_a_key_bias_there_are_no_centres(family: str) -> None:
    assert bias_centers(models.family(family)) == {}


def test_a_norm_behind_a_biased_projection_leaves_no_centre() -> None:
    model = models.build("qwen3", attention_bias=True)
    assert model.model.layers[0].self_attn.k_proj.bias.any()
    assert bias_centers(model) == {}


def test_centres_found_in_inference_mode_are_plain_tensors() -> None:
    model = copy.deepcopy(models.family("qwen2"))
    with torch.inference_mode():
        found = [*key_transforms(model, "int4-token").values()]
    for transform in found:
        assert transform.center is not None
        assert not transform.center.is_inference() and not transform.center.requires_grad


def test_patch_finds_centres_again() -> None:
    """Weights may have been loaded since they were found."""
    model = copy.deepcopy(models.family("qwen2"))
    hf_kvquant.patch(model, "int4-token")
    before = key_transforms(model, "int4-token")[0].center
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.mul_(2)
    hf_kvquant.patch(model, "int4-token")
    after = key_transforms(model, "int4-token")[0].center
    assert before is not None and after is not None
    torch.testing.assert_close(after, 2 * before)


def test_a_model_in_training_stays_in_training() -> None:
    model = models.build("qwen2").train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    assert bias_centers(model)
    assert [module.training for module in model.modules()] == modes


def test_centering_refuses() -> None:
    model = models.family("qwen2")
    with pytest.raises(ValueError, match=r"bias_centers: `num_positions` must be positive, got 0\."):
        bias_centers(model, 0)


# --- who gets them ----------------------------------------------------------------------------------------------------


def described(transforms: dict[int, KeyTransform]) -> dict[int, str]:
    return {index: transform.describe() for index, transform in transforms.items()}


def test_transforms_of_a_model() -> None:
    biased, plain = models.family("qwen2"), models.family("llama")
    assert described(key_transforms(biased, "int4-token")) == {0: "center+rotate", 1: "center+rotate"}
    assert key_transforms(biased, "int8").keys() == {0, 1}
    assert described(key_transforms(biased, {"transforms": ["center"]})) == {0: "center", 1: "center"}
    assert described(key_transforms(plain, "int4-token")) == {0: "rotate", 1: "rotate"}
    for preset in ("none", "fp8"):
        assert key_transforms(biased, preset) == {}
    assert key_transforms(plain, {"preset": "int8", "transforms": ["center", "smooth"]}) == {}
    layers = {"preset": "int4-token", "layers": {0: {"preset": "int8", "transforms": []}}}
    assert described(key_transforms(biased, layers)) == {1: "center+rotate"}
    sliding = models.family("gpt_oss")
    assert described(key_transforms(sliding, "int4-token")) == {0: "center+rotate", 1: "center+rotate"}
    for left_out in ({"sliding": False}, {"sliding": False, "static": True}):
        assert described(key_transforms(sliding, {"preset": "int4-token", **left_out})) == {1: "center+rotate"}


def test_what_is_given_to_a_model_reaches_its_caches() -> None:
    model = copy.deepcopy(models.family("qwen2"))
    attributes = set(model.__dict__)
    centers, smoothing = {1: torch.ones(2, 64)}, {0: torch.full((2, 64), 2.0)}
    of_model.set_centers(model, centers)
    of_model.set_smoothing(model, smoothing)
    assert described(key_transforms(model, "int4-token")) == {0: "smooth+rotate", 1: "center+rotate"}
    assert described(key_transforms(copy.deepcopy(model), {"transforms": ["center"]})) == {1: "center"}
    with patched(model, "int4-token"):
        cache = cache_of(greedy(model, left_padded()))
    assert [storage.key_transform.describe() for storage in cache.storages] == ["smooth+rotate", "center+rotate"]
    of_model.set_centers(model, None)
    of_model.set_smoothing(model, {})
    assert described(key_transforms(model, "int4-token")) == {0: "center+rotate", 1: "center+rotate"}
    assert set(model.__dict__) == attributes, "nothing is left on a model that nothing is given to"


def test_biases_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(models.family("qwen2"))
    calls = []
    monkeypatch.setattr(of_model, "bias_centers", lambda given: calls.append(given) or bias_centers(given))
    key_transforms(model, "fp8")
    assert not calls
    key_transforms(model, "int8"), key_transforms(model, "int4-token")
    assert len(calls) == 1
    of_model.set_centers(model, None)
    key_transforms(model, "int8")
    assert len(calls) == 2, "weights may have changed"


def test_a_model_that_cannot_be_asked_is_said_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = copy.deepcopy(models.family("qwen2"))

    def refuse(given: Any) -> Any:
        raise TypeError("forward() needs an image")

    monkeypatch.setattr(of_model, "bias_centers", refuse)
    with caplog.at_level(logging.WARNING, "hf_kvquant"):
        assert described(key_transforms(model, "int4-token")) == {0: "rotate", 1: "rotate"}
        key_transforms(model, "int4-token")
    (record,) = caplog.records
    assert "keys are not centred (TypeError: forward() needs an image). Correct, less accurate." in record.getMessage()


def test_a_cache_made_by_hand_is_that_of_generate() -> None:
    model, inputs = models.family("qwen2"), left_padded()
    by_hand = KVQuantCache(model.config, "int4-token")
    given = KVQuantCache(model.config, "int4-token", key_transforms=hf_kvquant.key_transforms(model, "int4-token"))
    untransformed = KVQuantCache(model.config, "int4-token", key_transforms={})
    with patched(model, "int4-token"):
        expected = greedy(model, inputs)
        for cache in (by_hand, given):
            assert_same(logits(greedy(model, inputs, **with_cache(cache))), logits(expected), "logits")
        output = greedy(model, inputs, **with_cache(untransformed))
    assert all(storage.key_transform is None for storage in untransformed.storages), "given transforms are kept"
    assert not torch.equal(logits(output), logits(expected))


def test_a_cache_that_holds_tokens_keeps_its_transforms() -> None:
    model, inputs = models.family("qwen2"), left_padded()
    cache = KVQuantCache(model.config, "int4-token")
    with patched(model, "int4-token"):
        with torch.no_grad():
            model(**inputs, **with_cache(cache))
        assert [storage.key_transform.describe() for storage in cache.storages] == ["rotate", "rotate"]
        mask = torch.cat([inputs["attention_mask"], torch.ones((3, 1), dtype=torch.long)], 1)
        ids = torch.cat([inputs["input_ids"], torch.full((3, 1), 5)], 1)
        greedy(model, {"input_ids": ids, "attention_mask": mask}, **with_cache(cache))
    assert [storage.key_transform.describe() for storage in cache.storages] == ["rotate", "rotate"]
    with pytest.raises(
        ValueError, match=r"layer 0: `key_transform` must be set before the first tokens, got 15 tokens"
    ):
        cache.storages[0].set_key_transform(None)
    cache.reset()
    cache.adopt(key_transforms(model, "int4-token"))
    assert [storage.key_transform.describe() for storage in cache.storages] == ["center+rotate"] * 2


def with_large_bias(norm: float) -> Any:
    """A qwen2 whose key biases have a constant of some norm in the slow RoPE pairs of every head."""
    model = copy.deepcopy(models.build("qwen2", rope_parameters={"rope_type": "default", "rope_theta": 1e6}))
    with torch.no_grad():
        for layer in model.model.layers:
            bias = layer.self_attn.k_proj.bias.view(2, 2, 32)  # [num_kv_heads, half, pair]
            bias.zero_()
            bias[:, :, 26:] = torch.nn.functional.normalize(torch.randn(2, 2, 6), dim=(1, 2)) * norm  # type: ignore[arg-type]
    return model


def test_a_large_key_bias_does_no_harm() -> None:
    """int4 with a bias of norm 100 stays as close to full precision as without it; without centring it is far off."""
    torch.manual_seed(0)
    inputs = left_padded(tokens=12, pads=(0,))

    def error(norm: float, transforms: list[str]) -> float:
        torch.manual_seed(1)
        model = with_large_bias(norm)
        expected = greedy(model, inputs, 8)
        tokens_of = models.forced(expected.sequences)
        with patched(model, {"preset": "int4-token", "transforms": transforms}):
            output = greedy(model, inputs, 8, prefix_allowed_tokens_fn=tokens_of)
        return float((logits(output) - logits(expected))[:, 1:].square().mean().sqrt())

    without = error(0.0, ["center", "rotate"])
    assert error(100.0, ["center", "rotate"]) < 1.3 * without
    assert error(100.0, ["rotate"]) > 3 * without


@pytest.mark.parametrize("kind", ["growing", "static"])
def test_generate_with_all_transforms_is_the_simulated_reference(kind: str) -> None:
    model, inputs = copy.deepcopy(models.family("qwen2")), left_padded()
    of_model.set_smoothing(model, {index: 2.0 ** torch.randint(-2, 3, (2, 64)).float() for index in range(2)})
    transforms = key_transforms(model, "int4-token")
    assert described(transforms) == {0: "center+smooth+rotate", 1: "center+smooth+rotate"}
    expected = greedy(
        model, inputs, **with_cache(ReferenceCache(model.config, "int4-token", key_transforms=transforms))
    )
    with patched(model, {"preset": "int4-token", "static": kind == "static"}):
        output = greedy(model, inputs, disable_compile=True)
    assert_same(output.sequences, expected.sequences, "tokens")
    bound = model_bound(logits(expected), logits(expected), torch.float32)
    assert_close(logits(output), logits(expected), bound, "logits")
