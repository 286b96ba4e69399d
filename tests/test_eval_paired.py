"""That statistics of paired answers are those of the textbook, or of a simulation."""

from __future__ import annotations

import math

import pytest
import torch

from hf_kvquant_evals import paired


@pytest.mark.parametrize(
    ("lost", "won", "expected"),
    [(0, 0, 1.0), (3, 3, 1.0), (0, 1, 1.0), (5, 0, 2 / 32), (1, 5, 2 * 7 / 64), (2000, 2000, 1.0)],
)
def test_mcnemar(lost: int, won: int, expected: float) -> None:
    assert paired.mcnemar(lost, won) == paired.mcnemar(won, lost) == pytest.approx(expected)


def test_paired_accuracy() -> None:
    found = paired.paired_accuracy([1, 0, 0, 0, 1, 1, 0, 1], [1, 1, 1, 1, 0, 1, 0, 1])
    assert (found.difference, found.p_value) == (-0.25, paired.mcnemar(3, 1))
    per_item = torch.tensor([0.0, -1, -1, -1, 1, 0, 0, 0])
    assert found.standard_error == pytest.approx(float(per_item.std(unbiased=False)) / math.sqrt(8))
    with pytest.raises(ValueError, match="as many items as `reference`, at least one, got 1 and 2"):
        paired.paired_accuracy([1], [1, 0])


def test_bootstrap_average() -> None:
    right = {"one": [1] * 300 + [0] * 100, "two": [1, 0] * 100}
    average, (low, high) = paired.bootstrap_average(right)
    assert average == pytest.approx(0.625)
    error = 0.5 * math.sqrt(0.75 * 0.25 / 400 + 0.25 / 200)
    assert average - low == pytest.approx(1.96 * error, rel=0.1)
    assert high - average == pytest.approx(1.96 * error, rel=0.1)
    assert paired.bootstrap_average(right) == (average, (low, high))
    with pytest.raises(ValueError, match="items for at least one task"):
        paired.bootstrap_average({"one": []})


def test_ratio_and_error() -> None:
    # As often as many sets of texts are drawn, so far do their ratios scatter.
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(50, 150, (2000, 60), generator=generator).double()
    values = -3.0 * sizes + 4 * torch.randn(sizes.shape, generator=generator, dtype=torch.float64) * sizes.sqrt()
    found = [paired.ratio_and_error(row.tolist(), size.tolist()) for row, size in zip(values, sizes, strict=True)]
    ratios, errors = torch.tensor(found, dtype=torch.float64).unbind(1)
    assert float(ratios.mean()) == pytest.approx(-3, abs=0.01)
    assert float(errors.mean()) == pytest.approx(float(ratios.std()), rel=0.05)
    assert paired.ratio_and_error([1.0, 2.0], [1, 1])[1] == paired.mean_and_error([1.0, 2.0])[1]
    assert paired.ratio_and_error([3.0], [2]) == (1.5, None)


def test_averages_over_tasks_weigh_tasks_alike() -> None:
    average, error = paired.average_and_error([[1, 1, 0, 0], [1, 1]])
    assert average == 0.75
    assert error == pytest.approx(math.sqrt(1 / 3 / 4) / 2)
    assert paired.average_and_error([[1, 0], [1]]) == (0.75, None)
