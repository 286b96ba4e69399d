"""Presets within a budget of bits: the solver against all combinations, and what a pre-flight makes of it."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import models
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_preflight import build, text, with_gains
from torch import Tensor

from hf_kvquant import KVQuantConfig, LayerFormats, PreflightError, run_preflight
from hf_kvquant.preflight import check, divergence
from hf_kvquant.preflight.budget import RUIN, cheapest
from hf_kvquant.preflight.result import name_of

CHOICES = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 50).map(float)), min_size=1, max_size=4)


def best_of_all(layers: list[list[tuple[int, float]]], budget: int) -> float | None:
    """The least cost of all combinations within a budget."""
    fitting = [each for each in itertools.product(*layers) if sum(size for size, _ in each) <= budget]
    return min((sum(min(cost, RUIN) for _, cost in each) for each in fitting), default=None)


def check_solver(layers: list[list[tuple[int, float]]], budget: int) -> None:
    places = cheapest(layers, budget)
    expected = best_of_all(layers, budget)
    if places is None:
        assert expected is None
        return
    taken = [choices[place] for choices, place in zip(layers, places, strict=True)]
    assert sum(size for size, _ in taken) <= budget
    assert sum(min(cost, RUIN) for _, cost in taken) == expected


@given(layers=st.lists(CHOICES, min_size=1, max_size=5), budget=st.integers(0, 200), unit=st.sampled_from([1, 16]))
def test_the_solver_finds_the_best_of_all_combinations(
    layers: list[list[tuple[int, float]]], budget: int, unit: int
) -> None:
    layers = [[(unit * size, cost) for size, cost in choices] for choices in layers]
    check_solver(layers, unit * budget)


@given(layers=st.lists(CHOICES, min_size=1, max_size=4), off=st.integers(-1, 1))
def test_the_solver_at_the_edges(layers: list[list[tuple[int, float]]], off: int) -> None:
    """Budgets that just allow the smallest and the largest choices, and one unit less or more."""
    for extreme in (min, max):
        check_solver(layers, sum(extreme(size for size, _ in choices) for choices in layers) + off)


def test_infinite_costs_are_taken_only_where_nothing_else_fits() -> None:
    layers = [[(1, math.inf), (2, 1.0)], [(1, math.inf), (2, 5.0)]]
    assert [cheapest(layers, budget) for budget in (1, 2, 4)] == [None, [0, 0], [1, 1]]
    assert cheapest([[(3, 1.0), (2, 1.0)]], 3) == [1], "of equal costs, the smaller size"
    assert cheapest([], 3) == []


# --- the pre-flight ---------------------------------------------------------------------------------------------------


def bits_of(model: Any, names: tuple[str, ...]) -> float:
    """Mean bits of a number if layers have these presets."""
    config = model.config
    each = [
        side.bits_per_value(config.head_dim, config.num_key_value_heads, model.dtype)
        for index, name in enumerate(names)
        for formats in [KVQuantConfig.from_preset(name).formats(index)]
        for side in (formats.key, formats.value)
    ]
    return sum(each) / len(each)


def test_the_best_presets_within_the_budget_are_picked() -> None:
    """All combinations of three layers, by what each preset costs each layer."""
    model = build(num_hidden_layers=3)
    presets = ("int4-token", "int4-g32", "int8", "k8v4")
    alone = [run_preflight(model, name) for name in presets]
    costs = {(i, name): each.layers[i].kld for name, each in zip(presets, alone, strict=True) for i in range(3)}
    sums = {
        names: sum(costs[i, name] or 0.0 for i, name in enumerate(names))
        for names in itertools.product(presets, repeat=3)
    }
    picked = []
    for budget in (4.5, 5.0, 6.0, 7.4, 9.0):
        result = run_preflight(model, presets=presets, bits=budget)
        fitting = {names: cost for names, cost in sums.items() if bits_of(model, names) <= budget}
        assert tuple(layer.name for layer in result.layers) == min(fitting, key=lambda names: fitting[names])
        picked.append(result.kld)
        assert result.bits == pytest.approx(bits_of(model, tuple(layer.name for layer in result.layers)))
        assert result.bits <= budget == result.budget and result.is_safe
        assert f"take {result.bits:.4g} bits per number on average, of {budget:g} allowed." in result.report()
        for layer in result.layers:
            assert {layer.name, *(name for name, _ in layer.tried)} <= set(presets)
    assert picked == sorted(picked, reverse=True) and len(set(picked)) > 3
    assert (
        KVQuantConfig.for_model(model, presets=presets, bits=5.0)
        == run_preflight(model, presets=presets, bits=5.0).approved()
    )


def test_presets_that_are_tried_by_default() -> None:
    result = run_preflight(build(num_hidden_layers=1, max_position_embeddings=600), bits=32)
    assert result.config == KVQuantConfig.from_preset("none") and result.bits == 32
    costs = dict(result.layers[0].tried)
    assert set(costs) == set(check.BUDGETED) - {"none"}
    assert costs["int2"] > costs["int4"] > costs["int8"]


def test_the_smallest_budget_is_named_and_works() -> None:
    """Rounded up, so that the number in the message is one that the next call accepts."""
    model = build(head_dim=48)  # 4 + 32 / 48 bits
    for bits in (4.666, 1e-3):
        with pytest.raises(
            ValueError,
            match=r"^for_model: `bits` must be from 4\.6667 to 32 for this model with `presets` "
            r"\['int8', 'int4-token'\], got [0-9.]+\. Allow more bits\.$",
        ):
            KVQuantConfig.for_model(model, presets=["int8", "int4-token"], bits=bits)
    for bits in (4.6667, 4 + 32 / 48):
        assert KVQuantConfig.for_model(model, presets=["int8", "int4-token"], bits=bits) == KVQuantConfig.from_preset(
            "int4-token"
        )


@pytest.mark.parametrize("bits, remedy", [(2.4, "Allow more bits"), (16.1, "Name fewer than the unquantised cache ta")])
def test_impossible_budgets_are_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, bits: float, remedy: str
) -> None:
    def measure(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("no text is read or written")

    monkeypatch.setattr(check, "read_text", measure)
    model = build().bfloat16()
    presets = re.escape(str(list(check.BUDGETED)))
    expected = rf"`bits` must be from 2\.5 to 16 for this model with `presets` {presets}, got {bits}\. {remedy}"
    with pytest.raises(ValueError, match=expected):
        KVQuantConfig.for_model(model, bits=bits)
    with pytest.raises(AssertionError, match="no text"):
        KVQuantConfig.for_model(model, bits=2.5)


def test_layers_count_by_their_numbers_and_windows_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer 0 has ten times as many numbers as layer 1, so its int8 would exceed the budget."""

    class Meter:
        num_scored, longest = 1, 256

        def __init__(self, model: Any, ids: Tensor) -> None:
            pass

        def reads_codes(self, formats: Any) -> bool:
            return True

        def kld(self, index: int, formats: LayerFormats, is_enough: Any) -> divergence.Estimate:
            return self.cost(divergence.alone(index, formats)).kld

        def cost(self, config: KVQuantConfig) -> divergence.Cost:
            kld = sum((0.02, 0.01)[index] for index in range(2) if config.formats(index).key.storage == "int4")
            return divergence.NO_COST._replace(kld=divergence.Estimate(kld, 0.0))

    def size(self: Any, index: int, formats: LayerFormats) -> tuple[int, int]:
        values = (1280, 128)[index]
        return values * (formats.key.bits if formats.is_quantized else 16) // 8, values

    monkeypatch.setattr(check, "Meter", Meter)
    monkeypatch.setattr(check._Check, "size", size)
    result = run_preflight(build(), presets=["int8", "int4-token"], bits=4.5)
    assert [layer.name for layer in result.layers] == ["int4-token", "int8"]
    assert result.bits == pytest.approx((10 * 4 + 8) / 11) and result.kld == 0.02
    windowed = KVQuantConfig.from_preset("int4-token", sink_length=4, residual_length=8)
    rungs = {"windowed": windowed, "int8": KVQuantConfig.from_preset("int8")}
    monkeypatch.setattr(check, "_checked", lambda *arguments: rungs)
    config = run_preflight(build(), bits=4.5).config
    assert config.formats(0) == windowed.formats(0) and config.formats(1) == rungs["int8"].formats(1)


@pytest.mark.parametrize("more, expected", [(1.0, ["int4-g32", "int4-token"]), (3.0, ["int4-token", "int4-token"])])
def test_a_preset_for_all_layers_is_picked_if_it_costs_less_as_a_whole(
    more: float, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Divergences of single layers need not add up: together, what differs costs more times their sum."""
    alone = {"int4-token": 0.004, "int4-g32": 0.001, "int8": 0.0, "none": 0.0}
    measured = []

    class Meter:
        num_scored, longest = 1, 256

        def __init__(self, model: Any, ids: Tensor) -> None:
            pass

        def reads_codes(self, formats: Any) -> bool:
            return True

        def kld(self, index: int, formats: LayerFormats, is_enough: Any) -> divergence.Estimate:
            return divergence.Estimate(alone[name_of(formats)] / (1 + index), 0.0)

        def cost(self, config: KVQuantConfig) -> divergence.Cost:
            names = [name_of(config.formats(index)) for index in range(2)]
            measured.append(names)
            kld = sum(alone[name] / (1 + index) for index, name in enumerate(names)) * (
                more if len(set(names)) > 1 else 1
            )
            return divergence.NO_COST._replace(kld=divergence.Estimate(kld, 0.0))

    monkeypatch.setattr(check, "Meter", Meter)
    result = run_preflight(build(), presets=["int4-token", "int4-g32", "int8"], bits=4.8)
    assert [layer.name for layer in result.layers] == expected
    assert measured == [["int4-g32", "int4-token"], ["int4-token", "int4-token"]], "`int4-g32` and `int8` are too large"


def test_dense_windows_are_measured_on_longer_text() -> None:
    model = build(max_position_embeddings=512)
    windowed = run_preflight(model, {"preset": "int4-token", "sink_length": 4, "residual_length": 128})
    assert run_preflight(model, "int4").num_tokens == 2 * 511
    assert windowed.num_tokens == 511 and run_preflight(model, "int4-token").num_tokens == divergence.NUM_WINDOWS * 255
    texts: dict[str, Any] = {"tokenizer": models.tokenizer(), "texts": [text()]}
    assert 511 <= run_preflight(model, {"preset": "int4-token", "residual_length": 128}, **texts).num_tokens <= 1024


def test_a_budget_is_measured_on_windows_of_twice_the_length() -> None:
    model = build(max_position_embeddings=1024)
    options: dict[str, Any] = {"tokenizer": models.tokenizer(), "texts": [text()], "presets": ["int4-token", "int8"]}
    assert run_preflight(model, **options).num_tokens == 4 * 255
    assert run_preflight(model, bits=9, **options).num_tokens == 4 * 511


def test_dense_windows_need_texts_that_read_the_codes_behind_them() -> None:
    model = build(max_position_embeddings=1024)
    options: dict[str, Any] = {"tokenizer": models.tokenizer(), "texts": [text()[i : i + 500] for i in (0, 500, 1000)]}
    with pytest.raises(PreflightError, match="windows of 500 tokens, too few to read codes behind the dense tokens"):
        KVQuantConfig.for_model(model, "int2", **options)
    assert run_preflight(model, "int2", **{**options, "texts": [text()]}).kld is not None
    assert run_preflight(build(max_position_embeddings=500), "int2", **options).kld is not None, "its whole context"
    assert "int2" not in {layer.name for layer in run_preflight(model, bits=9, **options).layers}


def test_a_budget_that_corrupts_the_output_is_refused() -> None:
    model = with_gains()
    with torch.no_grad():
        model.get_output_embeddings().weight *= 50
    with pytest.raises(PreflightError) as caught:
        KVQuantConfig.for_model(model, presets=["int4-token", "int8"], bits=4.7)
    assert str(caught.value).startswith("for_model: `bits` must keep the KL divergence of layer 0 within 0.03 nats")
    assert "Allow more bits. force=True accepts it anyway." in str(caught.value)
    config = KVQuantConfig.for_model(model, presets=["int4-token", "int8"], bits=4.7, force=True)
    assert config == KVQuantConfig.from_preset("int4-token")


def test_presets_that_cannot_be_measured_are_not_picked() -> None:
    model = build(max_position_embeddings=512)
    texts = [text()[start : start + 100] for start in range(0, 1000, 100)]
    options: dict[str, Any] = {"tokenizer": models.tokenizer(), "texts": texts, "bits": 4.7}
    assert run_preflight(model, presets=["int4-channel", "int4-token"], **options).spelled() == "'int4-token'"
    with pytest.raises(ValueError) as caught:
        run_preflight(model, presets=["int4-channel"], **options)
    assert str(caught.value) == (
        "run_preflight: `bits` must be left out unless layer 0 can be measured, got no divergence: the texts give "
        "windows of 100 tokens, too few to fill a block of keys. Pass other `texts`, or name a preset."
    )


def test_layers_with_other_caches_do_not_count() -> None:
    model = models.build("mistral", sliding_window=8)
    left_out = run_preflight(model, {"preset": "int8", "sliding": False})
    assert left_out.bits is None and "bits per number" not in left_out.report()


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"bits": "4"}, TypeError, r"run_preflight: `bits` must be a number, got '4'\. For example bits=4\.5\."),
        ({"bits": True}, TypeError, r"`bits` must be a number, got True\."),
        ({"bits": 0}, ValueError, r"`bits` must be positive and finite, got 0\. It is the mean per stored number: "),
        ({"bits": -2.5}, ValueError, r"`bits` must be positive and finite, got -2\.5\."),
        ({"bits": math.inf}, ValueError, r"`bits` must be positive and finite, got inf\."),
        ({"bits": math.nan}, ValueError, r"`bits` must be positive and finite, got nan\."),
        (
            {"bits": 4, "preset_or_config": "int4-token"},
            ValueError,
            r"`bits` must be left out with `preset_or_config`, got 4 with 'int4-token'\. A config already sets every ",
        ),
        (
            {"bits": 4.5, "measure": False},
            ValueError,
            r"`bits` must come with measure=True, got measure=False\. Formats are picked by the divergences that they ",
        ),
        (
            {"bits": 4.5, "max_kld": 0.01},
            ValueError,
            r"`max_kld` must be left out with `bits`, got 0\.01\. With a budget, the smallest divergence within it",
        ),
        ({"bits": 4.5, "presets": ["int5"]}, ValueError, r"`presets` must be names out of"),
    ],
)
def test_mistakes(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run_preflight(build(), **options)
