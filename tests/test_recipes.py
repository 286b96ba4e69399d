"""Cache recipes: that each is what its source says, that bits are those of the bytes, and what the command does.

Quantisers are restated here one value at a time, as their papers put it. The growing cache, the forward over a whole
text and our own reference must agree on what attention sees.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import re
import types
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

from hf_kvquant import KVQuantConfig, cli, ops
from hf_kvquant.models.probing import chunks_of, forward
from hf_kvquant.preflight.divergence import divergence
from hf_kvquant.spec.reference import rotate
from hf_kvquant.transforms.of_model import key_transforms
from hf_kvquant_evals.long_context.prompts import Writer
from hf_kvquant_evals.measuring.simulation import simulated
from hf_kvquant_evals.perplexity.segments import Segments
from hf_kvquant_evals.recipes import (
    arithmetic,
    drift,
    engines,
    float4,
    kvarn,
    kvquant,
    needles,
    oscar,
    ours,
    polarquant,
    quality,
    recipe_run,
    turboquant,
    uniform,
)
from hf_kvquant_evals.recipes.catalogue import RECIPES
from hf_kvquant_evals.recipes.interface import Layer, Rope, Sample, Storage
from hf_kvquant_evals.recipes.recipe_cache import GrowingLayer, TextLayer, recipe_cache, text_cache
from hf_kvquant_evals.recipes.recipe_run import fitting, prompts_of
from hf_kvquant_evals.recipes.sample import collected, layers_of_model, rope_of

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "evals" / "reference_model"
HEADS, HEAD_DIM = 2, 128
CODED_TOKENS = 512  # enough for every recipe to have codes


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """The first layers of the reference model, whose head_dim of 128 every recipe serves."""
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, num_hidden_layers=3)
    return loaded.eval()


@pytest.fixture(scope="module")
def text() -> Tensor:
    """Tokens that look like a text: each is drawn from a few."""
    return torch.randint(300, 900, (1, 640), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def layers(model: PreTrainedModel, text: Tensor) -> list[Layer]:
    return layers_of_model(model, text[:, :256])


def drawn(tokens: int = CODED_TOKENS, heads: int = HEADS, seed: int = 1) -> Tensor:
    """Keys or values with a few large channels."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, heads, tokens, HEAD_DIM, generator=generator)
    return x * torch.where(torch.arange(HEAD_DIM) % 41 == 0, 6.0, 1.0)


# --- bits -------------------------------------------------------------------------------------------------------------


def test_bits_are_those_of_the_bytes() -> None:
    """Bytes of a cache, counted by hand: 8 heads of 128 channels."""
    heads, values = 8, 8 * 128
    tokens = 1024
    # KIVI: keys have codes in whole blocks of 128, with scale and zero per channel and 32 tokens. Of 1,023 tokens, 127
    # wait. Values have codes but for the newest 128, with scale and zero per 32 channels.
    key = sum((n // 128 * 128) * (values * 2 + values * 32 / 32) + (n % 128) * values * 16 for n in [tokens])
    assert RECIPES["kivi-2"].key.coded(tokens) == tokens and RECIPES["kivi-2"].key.coded(tokens - 1) == 896
    waiting = sum((n % 128) / n for n in range(tokens - 127, tokens + 1)) / 128
    assert key / (tokens * values) == 3
    found = RECIPES["kivi-2"].bits(tokens, heads, 128)
    assert found["key"] == pytest.approx(3 * (1 - waiting) + 16 * waiting)
    assert found["value"] == pytest.approx((896 * values * (2 + 32 / 32) + 128 * values * 16) / (tokens * values))
    # OSCAR at 128k, as its authors state it.
    assert RECIPES["oscar-2"].bits(131072, heads, 128)["both"] == pytest.approx(2.28, abs=0.005)
    # KVarN, as its code lays out a tile of 128 tokens and 128 channels, in bytes.
    tile = RECIPES["kvarn-k4v2"]
    assert tile.key.value_bits(heads, 128) * 128 * 128 / 8 == 128 * 128 // 2 + 2 * (128 + 128 + 128)
    assert tile.value.value_bits(heads, 128) * 128 * 128 / 8 == 128 * 128 // 4 + 2 * (128 + 128 + 128)
    # KVQuant: 3 bits, and per token 6 + 6 outliers of 16 bits at places of 16 bits; for values a scale and a zero.
    assert RECIPES["kvquant-3"].key.value_bits(heads, 128) == 3 + 12 * 32 / values
    assert RECIPES["kvquant-3"].value.value_bits(heads, 128) == 3 + 12 * 32 / values + 32 / values
    assert RECIPES["polarquant"].key.value_bits(heads, 128) == 3.875
    assert RECIPES["nvfp4"].key.value_bits(heads, 128) == 4.5 and RECIPES["mxfp4"].key.value_bits(heads, 128) == 4.25
    assert RECIPES["turboquant-prod-3"].key.value_bits(heads, 128) == 3 + 2 * 16 / 128


@pytest.mark.parametrize("name", [name for name in RECIPES if RECIPES[name].family == "hf_kvquant"])
def test_bits_of_our_presets_are_those_of_their_formats(name: str) -> None:
    config = RECIPES[name].config
    for side, kv_format in ((RECIPES[name].key, config.key), (RECIPES[name].value, config.value)):
        assert (side.sink, side.recent) == (config.sink_length, config.residual_length)
        expected = 8 * kv_format.bytes_per_token(HEADS, HEAD_DIM, torch.bfloat16) / (HEADS * HEAD_DIM)
        assert side.value_bits(HEADS, HEAD_DIM) == pytest.approx(expected)


def test_bits_read_are_those_of_the_pairs() -> None:
    side = Storage(code_bits=2, sink=3, recent=5, block=4)
    pairs = [(query, token) for query in range(40) for token in range(query + 1)]
    coded = [side.sink <= token < side.coded_end(query + 1) for query, token in pairs]
    assert side.coded_pairs(40, 0) == sum(coded)
    assert side.bits_read(40, HEADS, HEAD_DIM) == pytest.approx(sum(2 if is_coded else 16 for is_coded in coded) / 820)
    assert [side.coded(tokens) for tokens in (3, 11, 12, 15, 16)] == [0, 0, 4, 4, 8]


# --- quantisers, restated ---------------------------------------------------------------------------------------------


def rounded(values: list[float], bits: int) -> list[float]:
    """Round to nearest between minimum and maximum, with scale and zero in float16."""
    low, high = min(values), max(values)
    scale = float(torch.tensor((high - low) / (2**bits - 1)).half())
    zero = float(torch.tensor(low).half())
    return [min(max(round((x - zero) / scale), 0), 2**bits - 1) * scale + zero for x in values]


@pytest.mark.parametrize("bits", [2, 4])
def test_naive_rounds_each_token(bits: int, layers: list[Layer]) -> None:
    x = drawn(3)
    for quantize in RECIPES[f"naive-{bits}"].quantizers(layers[0]):
        found = quantize(x, 0)
        for head in range(HEADS):
            for token in range(3):
                expected = torch.tensor(rounded(x[0, head, token].tolist(), bits))
                torch.testing.assert_close(found[0, head, token], expected, atol=1e-5, rtol=0)


def test_kivi_rounds_keys_by_channel_and_values_by_token(layers: list[Layer]) -> None:
    x = drawn(128)
    key, value = (quantize(x, 0) for quantize in RECIPES["kivi-2"].quantizers(layers[0]))
    for begin in (0, 96):
        channel, token = x[0, 1, begin : begin + 32, 7], x[0, 1, 5, begin : begin + 32]
        torch.testing.assert_close(key[0, 1, begin : begin + 32, 7], torch.tensor(rounded(channel.tolist(), 2)))
        torch.testing.assert_close(value[0, 1, 5, begin : begin + 32], torch.tensor(rounded(token.tolist(), 2)))


def test_quarot_has_an_integer_zero_and_clips() -> None:
    x = torch.tensor([-1.0, 0.0, 0.5, 3.0])
    scale = float(torch.tensor(0.95 * 4 / 3).half())
    zero = round(0.95 / scale)
    expected = [(min(max(round(v / scale) + zero, 0), 3) - zero) * scale for v in x.tolist()]
    torch.testing.assert_close(uniform.integer_zero(x, 2), torch.tensor(expected))
    assert uniform.integer_zero(torch.zeros(4), 2).eq(0).all()


@pytest.mark.parametrize("name", ["saw-4", "naive-4"])
def test_many_bits_are_exact(name: str, layers: list[Layer]) -> None:
    """With 16 bits, rotations cancel; QuaRot's do so without its clipping."""
    fine = dataclasses.replace(RECIPES[name], code_bits=16)  # type: ignore[call-arg]
    x = drawn(8)
    for quantize in fine.quantizers(layers[0]):
        assert (quantize(x, 0) - x).abs().max() < 0.02
    quarot = arithmetic.rotated(x, functools.partial(uniform.integer_zero, bits=16, clip=1.0))
    assert (quarot - x).abs().max() < 0.02


def test_codebooks_are_sorted_and_best() -> None:
    books = [turboquant.codebook(HEAD_DIM, bits) for bits in (1, 2, 3, 4)]
    books += [polarquant.codebook(level) for level in (1, 2, 3, 4)]
    assert all((book.diff() > 0).all() for book in books)
    # The best two and four numbers for a normal distribution, which a channel of 128 nearly has.
    torch.testing.assert_close(books[0] * HEAD_DIM**0.5, torch.tensor([-0.798, 0.798]), atol=5e-3, rtol=0)
    torch.testing.assert_close(
        books[1] * HEAD_DIM**0.5, torch.tensor([-1.510, -0.453, 0.453, 1.510]), atol=2e-2, rtol=0
    )
    assert torch.allclose(books[4], (torch.arange(16) + 0.5) * 2 * math.pi / 16, atol=1e-3)  # uniform
    assert all(torch.allclose(book + book.flip(0), torch.tensor(math.pi / 2), atol=1e-4) for book in books[5:])


def test_weighted_means_weigh() -> None:
    x = torch.tensor([0.0, 1.0, 10.0, 11.0, 12.0])
    weight = torch.tensor([1.0, 3.0, 1.0, 1.0, 2.0])
    torch.testing.assert_close(arithmetic.weighted_means(x, weight, 1), torch.tensor([0.75, 11.25]))


def test_turboquant_is_as_exact_as_its_paper_says() -> None:
    """Squared errors of unit vectors: 0.117 and 0.03 for 2 and 3 bits; products are unbiased with signs."""
    unit = torch.nn.functional.normalize(torch.randn(4000, HEAD_DIM), dim=1)
    for bits, expected in ((2, 0.117), (3, 0.034), (4, 0.0095)):
        error = (turboquant.for_squares(unit, bits) - unit).square().sum(1).mean()
        assert float(error) == pytest.approx(expected, rel=0.05)
    query = torch.randn(HEAD_DIM, 200)
    shares = {
        name: float((quantize(unit, bits=2) @ query * (unit @ query)).sum() / (unit @ query).square().sum())
        for name, quantize in (("squares", turboquant.for_squares), ("products", turboquant.for_products))
    }
    # The codebook shrinks products by its squared error; the signs undo that.
    assert shares["squares"] == pytest.approx(1 - 0.117, abs=0.02) and shares["products"] == pytest.approx(1, abs=0.03)


def test_polar_coordinates_are_exact_without_codes() -> None:
    x = torch.randn(50, 16)
    radius, angles = polarquant.to_polar(x)
    torch.testing.assert_close(radius[:, 0], x.norm(dim=1))
    assert [angle.shape[1] for angle in angles] == [8, 4, 2, 1]
    assert all((angle >= 0).all() and (angle <= math.pi / 2).all() for angle in angles[1:])
    torch.testing.assert_close(polarquant.from_polar(radius, angles), x, atol=1e-5, rtol=1e-4)


def test_kvarn_evens_out_both_axes() -> None:
    tile = torch.randn(16, 32) * torch.linspace(1, 30, 16)[:, None] * torch.linspace(1, 9, 32)
    row, column = kvarn.evened(tile)
    # It does not reach the least possible, 2: scales have a lower bound, so the smallest rows stay small.
    assert kvarn.imbalance(tile / row / column) < 0.1 * kvarn.imbalance(tile)
    assert float(row.min()) == pytest.approx(math.exp(-0.3))
    even = torch.randn(16, 32)
    assert kvarn.imbalance(even / kvarn.evened(even)[0] / kvarn.evened(even)[1]) <= kvarn.imbalance(even)


def test_kvarn_rounds_rows(layers: list[Layer]) -> None:
    x = drawn(128)
    key, value = (quantize(x, 0) for quantize in RECIPES["kvarn-k4v2"].quantizers(layers[0]))
    turned = rotate(x)[0, 1]
    for found, tile, bits in ((key, turned.T, 4), (value, turned, 2)):
        row, column = kvarn.evened(tile)
        even = tile / row / column
        low, high = even.amin(1, keepdim=True), even.amax(1, keepdim=True)
        codes = ((even - low) / (high - low) * (2**bits - 1)).round()
        expected = (codes * (high - low) / (2**bits - 1) + low) * row * column
        back = rotate(found)[0, 1]
        # Scales are float16.
        torch.testing.assert_close(back.T if bits == 4 else back, expected, atol=2e-2, rtol=5e-3)


def test_oscar_learns_what_queries_look_at() -> None:
    """Queries of each head along one channel, and values that matter in another."""
    query, key, value = torch.zeros(4, 300, 8), torch.randn(2, 300, 8), torch.randn(2, 300, 8)
    query[..., 3] = torch.randn(4, 300)
    key[:, :150, 3] = 0.0  # the first half is never looked at
    value[:, 150:, 5] *= 10
    sample = Sample(300, query, key, value, torch.zeros_like(key), torch.zeros_like(value))
    for learned, channel in zip(oscar.learned_rotations(sample, 2), (3, 5), strict=True):
        torch.testing.assert_close(learned @ learned.T, torch.eye(8), atol=1e-5, rtol=0)
        # The most important direction comes last of the eigenvectors, and the Hadamard rotation spreads it.
        assert rotate(learned)[channel].abs().argmax() == 7
    clipped = oscar.clipped(torch.arange(-50.0, 50.0), 0.96)
    assert clipped.max() == 48 and clipped.min() == -48


def test_float4_rounds_to_even() -> None:
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, -0.3, -2.6, 1.2])
    expected = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, -0.5, -3.0, 1.0])
    torch.testing.assert_close(float4.e2m1(x), expected)
    if hasattr(torch, "float4_e2m1fn_x2"):  # torch cannot cast to it, so the magnitudes are checked instead
        assert set(float4.e2m1(torch.randn(5000) * 3).abs().tolist()) == set(float4.MAGNITUDES)


def test_float4_scales() -> None:
    """A largest magnitude of 7 has the power of two 4, so MXFP4's scale is 1 and 7 saturates; NVFP4 keeps it."""
    x = torch.tensor([7.0, 3.4, 0.2, 0.0] * 8)
    torch.testing.assert_close(float4.mx_rounded(x)[:4], torch.tensor([6.0, 3.0, 0.0, 0.0]))
    factor = 7 / (6 * 448)
    found = float4.nv_rounded(x[:16], factor)
    torch.testing.assert_close(found[:4], torch.tensor([7.0, 3.5, 0.0, 0.0]), atol=1e-6, rtol=1e-6)
    assert float4.mx_rounded(torch.zeros(32)).eq(0).all() and float4.nv_rounded(torch.zeros(16), factor).eq(0).all()


def test_kvquant_keeps_outliers_and_undoes_rope(model: PreTrainedModel, layers: list[Layer]) -> None:
    rope = rope_of(model)
    assert rope is not None
    x = drawn(9)
    torch.testing.assert_close(rope.redone(rope.undone(x, 5), 5), x, atol=1e-5, rtol=0)
    # Outliers: of 256 values of a token, the two largest and the two smallest.
    is_extreme = kvquant.is_extreme(x)
    assert is_extreme.sum((1, 3)).eq(4).all()
    assert x[is_extreme].abs().min() > x[~is_extreme].abs().median()
    key, value = (quantize(x, 5) for quantize in RECIPES["kvquant-4"].quantizers(layers[0]))
    torch.testing.assert_close(value[is_extreme], x[is_extreme].half().float())
    # Of the rest, each token has at most 16 distances from its middle.
    unit, _, _, _ = kvquant.per_token(value.masked_fill(is_extreme, 0.0))
    assert len(torch.unique((unit[0, :, 4] * 1e3).round())) <= 17
    assert torch.corrcoef(torch.stack((key.flatten(), x.flatten())))[0, 1] > 0.5


@pytest.mark.parametrize("bits", [4, 2])
def test_quanto_is_that_of_transformers(bits: int, layers: list[Layer]) -> None:
    pytest.importorskip("optimum.quanto")
    from transformers.cache_utils import QuantoQuantizedLayer

    recipe, x = RECIPES[f"quanto-{bits}"], torch.randn(1, 2, 300, 64)
    layer = dataclasses.replace(layers[0], head_dim=64)
    ours = GrowingLayer((recipe.key, recipe.value), recipe.quantizers(layer))
    theirs = QuantoQuantizedLayer(nbits=bits)
    for begin, end in itertools.pairwise((0, 128, *range(129, 301))):
        new = x[:, :, begin:end], 2 * x[:, :, begin:end]
        for one, other in zip(ours.update(*new), theirs.update(*new), strict=True):
            # Their scales are float32, ours float16, so a number near the middle of two codes may get the other one.
            assert one.shape == other.shape and ((one - other).abs() > 1e-2).float().mean() < 0.01


def test_codes_of_other_engines() -> None:
    x = torch.randn(5, 32)
    x[1] = 0
    scale = x.abs().amax(-1, keepdim=True) / 127
    assert (engines.q8_0(x) - x).abs().max() <= 0.51 * scale.max() and not engines.q8_0(x)[1].any()
    found, place = engines.q4_0(x), x.abs().argmax(-1, keepdim=True)
    torch.testing.assert_close(found.gather(-1, place), x.gather(-1, place), rtol=1e-3, atol=0)
    steps = x.gather(-1, place).abs() / 8
    # The code of the largest number is -8, and there is no 8: what is as large with another sign is off by a step.
    assert ((found - x).abs() <= 1.01 * steps).all() and ((found - x).abs() <= 0.51 * steps).float().mean() > 0.9
    assert not found[1].any()
    found = engines.vllm_int4(x)
    steps = (x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)) / 15
    assert ((found - x).abs() <= 1.01 * steps).all() and len(found[0].unique()) <= 16
    assert engines.vllm_int4(x + 100)[0].max() < 10  # a zero of four bits does not reach that far


# --- what attention sees ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_the_two_caches_show_the_same(name: str, layers: list[Layer]) -> None:
    """Token by token, each query sees what the forward over the whole text gives it. A token is written once."""
    recipe = RECIPES[name]
    quantizers = recipe.quantizers(layers[0])
    key, value = drawn(seed=2), drawn(seed=3)
    storages = (recipe.key, recipe.value)
    growing, whole = GrowingLayer(storages, quantizers), TextLayer(storages, quantizers, 1, "layer 0")
    whole.update(key, value)
    seen: tuple[Tensor, Tensor] | None = None
    for token in range(CODED_TOKENS):
        seen = growing.update(key[:, :, token : token + 1], value[:, :, token : token + 1])
        if token % 37 == 0 or token > CODED_TOKENS - 3:
            for side, (storage, found) in enumerate(zip(storages, seen, strict=True)):
                # The first token sees itself dense.
                end = min(storage.coded_end(token + 1), token + 1) if token else 0
                assert torch.equal(found[:, :, end:], whole.raw[side][:, :, end : token + 1])
                torch.testing.assert_close(found[:, :, :end], whole.coded[side][:, :, :end], atol=2e-5, rtol=1e-5)
    assert recipe.key.coded(CODED_TOKENS) > 0 and seen is not None and not torch.equal(seen[0], key)
    with pytest.raises(NotImplementedError, match="crop"):
        growing.crop(3)


def test_a_prompt_sees_itself_dense(layers: list[Layer]) -> None:
    recipe = RECIPES["naive-2"]
    layer = GrowingLayer((recipe.key, recipe.value), recipe.quantizers(layers[0]))
    x = drawn(5)
    assert layer.update(x, x)[0] is x
    assert not torch.equal(layer.update(x[:, :, :1], x[:, :, :1])[0][:, :, :5], x)


@torch.inference_mode()
def log_probs(model: PreTrainedModel, ids: Tensor, cache: DynamicCache, prompt: int = 1) -> Tensor:
    pieces = [forward(model, piece, cache=cache).log_softmax(-1) for piece in chunks_of(ids, prompt, 1)]
    return torch.cat(pieces, dim=1)[0]


@pytest.mark.parametrize("name, prompt", [("int8", 1), ("kivi-4", 1), ("kivi-4", 140)])
def test_a_forward_over_a_text_is_decoding(
    name: str, prompt: int, model: PreTrainedModel, text: Tensor, layers: list[Layer]
) -> None:
    recipe, ids = RECIPES[name], text[:, :150]
    quantizers = fitting(layers, {name: recipe}, True)[name]
    with simulated(model), torch.inference_mode():
        cache = text_cache(model, recipe, quantizers, prompt)
        at_once = forward(model, ids, cache=cache).log_softmax(-1)[0]
        dense = forward(model, ids).log_softmax(-1)[0]
    decoded = log_probs(model, ids, recipe_cache(model, recipe, quantizers), prompt)
    # Half of the tokens: sums in another order may flip a code, from where on the others differ.
    assert divergence(decoded, at_once).quantile(0.5) < 1e-5
    assert divergence(decoded, at_once)[prompt:].mean() < 0.1 * divergence(dense, decoded)[prompt:].mean()
    assert sum(cache.layers[0].pairs_read) == sum(s.coded_pairs(150, prompt) for s in (recipe.key, recipe.value))


@pytest.mark.parametrize("name", ["int8", "int4-token", "int4-channel"])
def test_our_presets_are_our_cache(name: str, model: PreTrainedModel, layers: list[Layer]) -> None:
    """What the harness shows of keys and values is what a real cache holds, bit for bit."""
    config = KVQuantConfig.from_preset(name)
    reference = models.ReferenceCache(model.config, config)
    recipe = ours.preset(name)
    growing = GrowingLayer((recipe.key, recipe.value), recipe.quantizers(layers[0]))
    key, value = drawn(seed=4), drawn(seed=5)
    steps = itertools.pairwise((0, 300, *range(301, CODED_TOKENS, ops.MAX_DRAFTED), CODED_TOKENS))
    for begin, end in steps:  # none of them a chunk, which would see itself as it comes
        expected = reference.update(key[:, :, begin:end], value[:, :, begin:end], 0)
        found = growing.update(key[:, :, begin:end], value[:, :, begin:end])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("tokens", [1, 129])
@pytest.mark.parametrize("recipe", ours.RECIPES, ids=lambda recipe: recipe.name)
def test_ops_show_what_the_reference_shows(device: str, recipe: ours.Preset, tokens: int, layers: list[Layer]) -> None:
    """Bitwise."""
    formats = recipe.config.formats(0)
    sides = (formats.key, key_transforms(layers[0].model, recipe.config).get(0)), (formats.value, None)
    for (side, transform), quantize in zip(sides, recipe.quantizers(layers[0]), strict=True):
        whole = tokens if side.block_size is None else side.block_size
        x = drawn(seed=6)[:, :, :whole].to(device)
        assert torch.equal(quantize(x, 0), ours._by_reference(side, transform)(x, 0))


def test_dense_tokens_can_be_the_same_for_all() -> None:
    recipe = RECIPES["oscar-2"].with_dense(0, 0)
    assert recipe.bits(4096, 8, 128)["both"] == 2.25 and recipe.name == "oscar-2"
    assert RECIPES["kivi-2"].with_dense(4, 12).key.coded_end(128 + 16) == 132


# --- what recipes learn -----------------------------------------------------------------------------------------------


def test_gradients_are_those_of_the_loss(model: PreTrainedModel, text: Tensor) -> None:
    """A small step of one value changes the loss as its gradient says."""
    ids = text[:, :48]
    sample = collected(model, ids)[2]

    class Moved(DynamicCache):
        step = 0.0

        def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            if layer_idx == 2:
                value = value.clone()
                value[0, 1, 7, 5] += self.step
            return super().update(key, value, layer_idx)

    losses = []
    for step in (-0.05, 0.05):
        cache = Moved(config=model.config)
        cache.step = step
        with torch.inference_mode():
            logits = forward(model, ids, cache=cache)[0, :-1].double()
        losses.append(float(torch.nn.functional.cross_entropy(logits, ids[0, 1:])))
    assert (losses[1] - losses[0]) / 0.1 == pytest.approx(float(sample.value_gradient[1, 7, 5]), rel=0.05, abs=1e-6)
    assert sample.query.shape == (4, 48, 128) and sample.key.shape == (2, 48, 128)


@pytest.mark.parametrize("family, is_known", [("llama", True), ("gptj", False), ("cohere", False), ("opt", False)])
def test_rope_is_proved(family: str, is_known: bool) -> None:
    """Interleaved pairs, other modules and learned positions are not taken for rotation in halves."""
    if family not in models.FAMILIES:
        pytest.fail(f"there is no tiny {family}")
    assert (rope_of(models.family(family)) is not None) == is_known


def test_models_that_do_not_fit_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="must attend to all tokens in every layer"):
        layers_of_model(models.family("gemma2"), None)
    message = r"must keep keys and values of heads, .* MiniCPM3ForCausalLM, which keeps latents \(MLA\)\. Measure"
    with pytest.raises(NotImplementedError, match=message):
        layers_of_model(models.family("minicpm3"), None)
    small = layers_of_model(models.llama(head_dim=24), None)
    for name in ("kivi-2", "mxfp4", "nvfp4", "polarquant", "oscar-2"):
        with pytest.raises(NotImplementedError, match=f"{name}: `model` must have a head_dim"):
            RECIPES[name].quantizers(small[0])
    with pytest.raises(NotImplementedError, match="kvquant-3: `model` must have rotary embeddings"):
        RECIPES["kvquant-3"].quantizers(dataclasses.replace(small[0], rope=None))
    with pytest.raises(ValueError, match="kvquant-3: `sample` must be given"):
        RECIPES["kvquant-3"].quantizers(small[0])
    with pytest.raises(NotImplementedError, match="`config` must have scales for each head"):
        ours.storage(dataclasses.replace(KVQuantConfig.from_preset("int8").key, granularity="token"), KVQuantConfig())


# --- drift ------------------------------------------------------------------------------------------------------------


def test_the_unquantised_cache_does_not_drift(model: PreTrainedModel, text: Tensor, layers: list[Layer]) -> None:
    prompts = prompts_of(text[0], 2)
    (written,) = drift.write(model, prompts, 70, [DynamicCache(config=model.config)], seed=3)
    assert written.ids.shape == (2, 70) and written.kld.abs().max() < 1e-5
    # What was drawn is what the model gives for the whole text.
    whole = torch.cat([prompts, written.ids], dim=1)
    with torch.inference_mode():
        at_once = forward(model, whole).log_softmax(-1)[:, prompts.shape[1] - 1 : -1]
    expected = -at_once.gather(-1, written.ids.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(written.nll, expected, atol=1e-3, rtol=1e-3)
    (again,) = drift.write(model, prompts, 70, [DynamicCache(config=model.config)], seed=3)
    assert torch.equal(again.ids, written.ids)
    recipe = RECIPES["naive-2"]
    quantizers = fitting(layers, {"naive-2": recipe}, True)["naive-2"]
    (coarse,) = drift.write(model, prompts, 70, [recipe_cache(model, recipe, quantizers)], seed=3)
    assert coarse.kld[:, 0].abs().max() < 1e-5  # the prompt is read dense
    assert coarse.kld[:, 1:].mean() > 0.1


def test_recipes_that_write_together_write_what_they_write_alone(
    model: PreTrainedModel, text: Tensor, layers: list[Layer]
) -> None:
    """Up to the order of sums: blocks that fill up, dense windows and the unquantised cache share a batch."""
    prompts = prompts_of(text[0], 2)
    names = [None, "int8", "kvarn-k4v4", "oscar-2"]
    recipes = {name: RECIPES[name].with_dense(0, 8) for name in names if name is not None}
    quantizers = fitting(layers, recipes, True)

    def cache(name: str | None) -> DynamicCache:
        found = DynamicCache(config=model.config)
        return found if name is None else recipe_cache(model, recipes[name], quantizers[name])

    together = drift.write(model, prompts, 140, [cache(name) for name in names], seed=3)
    for name, each in zip(names, together, strict=True):
        (alone,) = drift.write(model, prompts, 140, [cache(name)], seed=3)
        # A sum in another order can draw another token, after which the texts differ.
        same = (alone.ids == each.ids).long().cumprod(1).bool()
        assert same[:, :20].all() and same.float().mean() > 0.5, name
        torch.testing.assert_close(each.nll[same], alone.nll[same], atol=2e-2, rtol=2e-2)
    assert together[0].kld.abs().max() < 1e-5 < together[3].kld[:, 20:].mean()


def test_tokens_are_those_of_multinomial() -> None:
    log_probs = torch.randn(3, 50).log_softmax(-1)
    drawn = [drift._drawn(log_probs, 1, torch.Generator().manual_seed(1)) for _ in range(2)]
    expected = torch.multinomial(log_probs.exp(), 1, generator=torch.Generator().manual_seed(1))
    assert torch.equal(drawn[0], expected) and torch.equal(drawn[1], expected)


def test_drift_is_told_by_length() -> None:
    assert drift.buckets(100) == [(0, 100)]
    assert drift.buckets(600) == [(0, 128), (128, 256), (256, 512), (512, 600)]
    drifted = drift.Drift(torch.zeros(2, 200), torch.ones(2, 200) * torch.arange(200), torch.ones(2, 200))
    part = json.loads(json.dumps(drift.to_part(drifted)))
    rows = drift.summarize(part, {**part, "nll": [[0.5, 0.7], [0.5, 0.7]]})
    assert [row["end"] for row in rows] == [128, 200]
    assert rows[0]["kld"] == pytest.approx(63.5) and rows[1]["nll_change"] == pytest.approx(0.4)


# --- needles ----------------------------------------------------------------------------------------------------------


def test_needles_of_an_exact_recipe_do_not_change(model: PreTrainedModel, layers: list[Layer]) -> None:
    asked = needles.prompts(Writer(models.tokenizer()), 256, 2)
    exact = dataclasses.replace(RECIPES["naive-4"], code_bits=16)  # type: ignore[call-arg]
    recipes = {"exact": exact, "naive-2": RECIPES["naive-2"]}
    part = needles.score(model, asked, recipes, fitting(layers, recipes, True))
    changes = {name: needles.summarize(part, name)["log_likelihood_change"] for name in recipes}
    assert abs(changes["exact"]) < 0.05 < abs(changes["naive-2"])
    right = {"correct": [True, True], "log_likelihood": [-1.0, -1.0]}
    assert needles.summarize({"none": right, "x": {**right, "correct": [True, False]}}, "x")["accuracy"] == 0.5


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of more tokens than recipes learn from."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    places = ("north", "south", "east", "west", "middle")
    path.write_text("".join(models.SENTENCE.replace("north", places[i * i % 5]) for i in range(120)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def folder(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the same layers are, with their tokenizer."""
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(path)
    return path


def run(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: object) -> tuple[int, str, str]:
    code = cli.main(("eval", "recipes", str(folder), *map(str, arguments)))
    captured = capsys.readouterr()
    return code, " ".join(captured.out.split()), captured.err


def small(file: Path) -> list[object]:
    """Options of a run that takes seconds."""
    amounts = "--window 400 --tokens 300 --drift 24 --drift-prompts 2 --needles 3 --dtype float32"
    return ["--text", file, *amounts.split()]


@pytest.fixture
def short_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes learn from few tokens, which takes a fraction of the time."""
    monkeypatch.setattr(recipe_run, "SAMPLE_TOKENS", 400)


@pytest.mark.usefixtures("short_sample")
def test_command(capsys: pytest.CaptureFixture[str], folder: Path, file: Path, tmp_path: Path) -> None:
    record, picture = tmp_path / "record.json", tmp_path / "picture.svg"
    names = "int4-token,naive-2,kvquant-3,oscar-2,kvarn-k2v2"
    options = (*small(file), "--recipes", names, "--inject-outliers", 8)
    code, out, err = run(capsys, folder, *options, "--output", record, "--picture", picture)
    assert code == 0, err
    content = json.loads(record.read_text(encoding="utf-8"))
    rows = content["parts"]["summary"]["recipes"]
    assert list(rows) == names.split(",") and content["settings"]["injected_outliers"] == 8
    assert rows["naive-2"]["kld"] > 5 * rows["int4-token"]["kld"] > 0
    assert rows["int4-token"]["bits_read"]["both"] == rows["int4-token"]["bits"]["both"] == 4.25
    assert rows["oscar-2"]["bits_read"]["both"] > 10 > 3 > rows["oscar-2"]["bits"]["both"]
    assert all(len(row["drift"]) == 1 and row["drift"][0]["end"] == 24 for row in rows.values())
    # The reference model finds no needles, but with better caches it finds them less unlikely.
    assert all(row["needles"]["accuracy"] is None for row in rows.values())
    changes = {name: abs(row["needles"]["log_likelihood_change"]) for name, row in rows.items()}
    assert changes["int4-token"] < changes["naive-2"]
    assert "kvarn-k2v2" in out and "2 texts that the model wrote" in out
    assert "naive-2" in picture.read_text(encoding="utf-8")
    # A second run has nothing left to measure.
    before = record.read_bytes()
    code, again, _ = run(capsys, folder, *options, "--output", record)
    assert code == 0 and again == out
    after = json.loads(record.read_bytes())
    assert {**json.loads(before), "parts": {**after["parts"]}} == after


@pytest.mark.usefixtures("short_sample")
def test_dense_tokens_on_the_command_line(capsys: pytest.CaptureFixture[str], folder: Path, file: Path) -> None:
    options = ("--recipes", "oscar-2", "--dense", "0+0", "--window", 128, "--tokens", 100, "--drift", 0, "--needles", 0)
    code, out, err = run(capsys, folder, "--text", file, *options, "--dtype", "float32")
    assert code == 0, err
    assert " 2.25 2.25 " in out and "texts that the model wrote" not in out


@pytest.mark.usefixtures("short_sample")
def test_a_budget_of_bits(
    capsys: pytest.CaptureFixture[str], folder: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pre-flight is asked for a config, which is measured like any other. test_budget.py tests what it finds."""
    config = KVQuantConfig.from_dict({"preset": "int2", "layers": {1: "k4v2"}})

    def found(model: PreTrainedModel, **options: Any) -> Any:
        assert options["bits"] == 2.5 and options["presets"] == ["k4v2", "int2"]
        (learned,) = options["texts"]
        assert learned and file.read_text(encoding="utf-8").startswith(learned[:200])
        return types.SimpleNamespace(config=config)

    monkeypatch.setattr(ours, "run_preflight", found)
    record = tmp_path / "record.json"
    options = ("--recipes", "int2,k4v2", "--bits", "2.5", "--tokens", 300, "--drift", 0, "--needles", 0)
    options += ("--window", 400, "--dtype", "float32", "--output", record)
    code, _, err = run(capsys, folder, "--text", file, *options)
    assert code == 0, err
    content = json.loads(record.read_text(encoding="utf-8"))
    rows = content["parts"]["summary"]["recipes"]
    assert list(rows) == ["int2", "k4v2", "bits-2.5"]
    small, large, mixed = (row["bits"] for row in rows.values())
    for side in ("key", "value", "both"):
        assert mixed[side] == pytest.approx((2 * small[side] + large[side]) / 3)
    assert rows["k4v2"]["kld"] < rows["bits-2.5"]["kld"] < rows["int2"]["kld"]
    assert list(content["settings"]["recipes"]["bits-2.5"]["layers"]) == ["1"]


def test_layers_with_dense_tokens_of_their_own_are_no_recipe() -> None:
    config = KVQuantConfig.from_dict({"preset": "int2", "layers": {0: "int4-token"}})
    with pytest.raises(NotImplementedError, match="must have the same dense windows and groups in all layers"):
        ours.of_config("mixed", config, 2)


MISTAKES: dict[str, tuple[tuple[object, ...], str]] = {
    "bits": (("--bits", "2.5,x"), r"`--bits` must be positive numbers, got '2.5,x'"),
    "bits and dense": (
        ("--bits", "2.5", "--dense", "4+128"),
        r"`--bits` must stand without --dense, got --dense 4\+128",
    ),
    "short text": (("--bits", "2.5"), "`--bits` must fit .*, got 2.5. .*`texts` must have at least 512 tokens"),
    "few bits": (("--bits", "2"), "`--bits` must fit .*, got 2. .*`bits` must be from 2.25 to 32 for this model"),
    "recipe": (("--recipes", "kivi-3"), "`--recipes` must be of int8, .*, got 'kivi-3'. Did you mean"),
    "none": (("--recipes", ","), "`--recipes` must name something, got ','"),
    "dense": (("--dense", "4"), r"`--dense` must be FIRST\+NEWEST tokens, got '4'"),
    "drift": (("--drift", -1), "`--drift` must be at least 0, got -1"),
    "needles": (("--needles", -1), "`--needles` must be at least 0, got -1"),
    "long drift": (("--drift", 2017), "`--drift` must be at most 2016, got 2017"),
    "window": (("--window", 200, "--recipes", "oscar-2"), "`--window` must be longer for oscar-2, got 200"),
    "context": (("--context", 0), "`--context` must be at least 1, got 0"),
    "picture": (("--picture", "/nowhere/x.svg"), "`--picture` must be a file in a folder that is there"),
}


@pytest.mark.usefixtures("short_sample")
@pytest.mark.parametrize(("arguments", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(
    arguments: tuple[object, ...], message: str, capsys: pytest.CaptureFixture[str], folder: Path, file: Path
) -> None:
    code, _, err = run(capsys, folder, "--text", file, *arguments)
    assert code == 2
    assert re.search(message, err), err


@pytest.mark.usefixtures("short_sample")
def test_recipes_that_do_not_fit_are_left_out(capsys: pytest.CaptureFixture[str], file: Path, tmp_path: Path) -> None:
    """By default, with a note: the tiny model has a head_dim of 24, and windows are too short for some."""
    folder = models.save(models.llama(head_dim=24, max_position_embeddings=512), tmp_path / "model")
    options = (
        "--text",
        str(file),
        "--window",
        "200",
        "--tokens",
        "150",
        "--drift",
        "0",
        "--needles",
        "0",
        "--dtype",
        "float32",
    )
    assert cli.main(("eval", "recipes", folder, *options)) == 0
    out, err = capsys.readouterr()
    assert "oscar-2 is left out: it keeps all 200 tokens of a window dense" in err
    assert "mxfp4 is left out. mxfp4: `model` must have a head_dim that 32 divides, got 24" in err
    assert "naive-4" in out and "kvquant-4" in out and "oscar-2" not in out


def test_quality_refuses_what_reads_no_codes(model: PreTrainedModel, text: Tensor, layers: list[Layer]) -> None:
    """A model that attends to something else looks lossless; the counted pairs tell."""
    recipe = RECIPES["int8"]
    quantizers = fitting(layers, {"int8": recipe}, True)
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(TextLayer, "update", lambda self, key, value, *args, **kwargs: (key, value))
        with pytest.raises(Exception, match="preset int8 must read"):
            quality.compare(model, Segments(text[:, :40], [0], 40), 0, {"int8": recipe}, quantizers)
    found = quality.compare(model, Segments(text[:, :40], [0], 40), 0, {"int8": recipe}, quantizers)["int8"]
    assert quality.summarize([found])["kld"] > 0 and found["tokens"] == 39
    found = quality.compare(model, Segments(text[:, :40], [0], 40, 30), 0, {"int8": recipe}, quantizers)["int8"]
    assert len(found["kld"]) == found["tokens"] == 9


def test_rope_that_is_scaled_is_undone() -> None:
    class Scaled(torch.nn.Module):
        def forward(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
            angle = position[..., None] * torch.tensor([1.0, 0.1] * 2)
            return 1.5 * angle.cos(), 1.5 * angle.sin()

    x = torch.randn(1, 2, 6, 4)
    rope = Rope(Scaled())
    torch.testing.assert_close(rope.redone(rope.undone(x, 3), 3), x)
