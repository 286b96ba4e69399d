"""Which rows of a task come together: all of them once, few batches, and no padding where it would change scores."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from hf_kvquant import KVQuantConfig
from hf_kvquant.spec.formats import BLOCK_SIZE
from hf_kvquant_evals.tasks.batches import Row, batches, max_padded_length

BATCH_SIZE = 8
BELOW_A_BLOCK = BLOCK_SIZE - 1
INT8 = {"preset": "int8", "sink_length": 0, "residual_length": 0}  # codes alone


def rows(seed: int, max_context: int, max_fed: int, num_contexts: int = 40) -> list[Row]:
    """Contexts with some continuations each, of any lengths."""
    generator = random.Random(seed)

    def tokens(minimum: int, maximum: int) -> tuple[int, ...]:
        return tuple(generator.randrange(9) for _ in range(generator.randint(minimum, maximum)))

    contexts = [tokens(1, max_context) for _ in range(num_contexts)]
    found = {Row(context, tokens(0, max_fed)) for context in contexts for _ in range(3)}
    return sorted(found, key=lambda row: generator.random())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        *(({"preset": preset}, math.inf) for preset in ("none", "int4-token", "int4-g32", "fp8")),
        *(({"preset": preset}, 0) for preset in ("int8", "k8v4", "int4")),  # their newest tokens are dense
        (INT8, math.inf),
        ({"preset": "int4-token", "sink_length": 2}, math.inf),
        ({"preset": "int4-token", "residual_length": 3}, 0),
        ({**INT8, "value": {"storage": "int8", "granularity": "tensor"}}, 0),
        ({**INT8, "value": {"storage": "int8", "granularity": "token"}}, math.inf),
        ({"preset": "int4-channel"}, BELOW_A_BLOCK),
        ({"preset": "int4-channel", "sink_length": 2}, BELOW_A_BLOCK),
        ({"preset": "int4-channel", "residual_length": 3}, 0),
        ({"preset": "int4-token", "layers": {1: "int4-channel"}}, BELOW_A_BLOCK),
        ({"preset": "int4-channel", "layers": {1: {"preset": "int4-token", "residual_length": 3}}}, 0),
    ],
    ids=str,
)
def test_where_padding_may_be(options: dict[str, object], expected: float) -> None:
    config = KVQuantConfig.from_dict(options)
    assert max_padded_length([config.formats(index) for index in range(2)]) == expected


@pytest.mark.parametrize("max_padded", [0, BELOW_A_BLOCK, math.inf])
@pytest.mark.parametrize(("max_context", "max_fed"), [(1, 3), (60, 8), (120, 30), (140, 1), (20, 200)])
def test_every_row_comes_once_and_unpadded_where_it_must(max_padded: float, max_context: int, max_fed: int) -> None:
    every = rows(0, max_context, max_fed)
    found = list(batches(every, BATCH_SIZE, max_padded))
    assert sorted(row for batch in found for row in batch) == sorted(every)
    assert found == list(batches(every[::-1], BATCH_SIZE, max_padded))
    for batch in found:
        assert len(batch) <= BATCH_SIZE
        width = max(row.first_chunk for row in batch)
        longest = max(len(row.context + row.fed) - row.first_chunk for row in batch)
        assert len({row.lengths for row in batch}) == 1 or width + longest <= max_padded


@pytest.mark.parametrize("max_padded", [BELOW_A_BLOCK, math.inf])
def test_longest_contexts_come_first_and_equal_ones_together(max_padded: float) -> None:
    found = [row.context for batch in batches(rows(1, 100, 20), BATCH_SIZE, max_padded) for row in batch]
    assert [len(context) for context in found] == sorted(map(len, found), reverse=True)
    assert sum(a != b for a, b in itertools.pairwise(found)) == len(set(found)) - 1


def test_too_long_rows_come_before_all_others() -> None:
    found = list(batches(rows(2, 140, 40), BATCH_SIZE, BELOW_A_BLOCK))
    is_too_long = [sum(row.lengths) > BELOW_A_BLOCK for batch in found for row in batch]
    assert any(is_too_long) and is_too_long == sorted(is_too_long, reverse=True)


def test_below_a_block_batches_are_as_few_as_without() -> None:
    every = rows(3, 100, 20)
    found, free, equal = (list(batches(every, BATCH_SIZE, limit)) for limit in (BELOW_A_BLOCK, math.inf, 0))
    assert found == free and len(found) == -(-len(every) // BATCH_SIZE) < len(equal)


@pytest.mark.parametrize(("lengths", "is_one"), [((100, 27), True), ((100, 28), False)])
def test_a_batch_ends_one_token_before_the_block(lengths: tuple[int, int], is_one: bool) -> None:
    context, fed = lengths
    pair = [Row((1,) * context, ()), Row((2,) * (context - 1), (3,) * fed)]
    assert (len(list(batches(pair, BATCH_SIZE, BELOW_A_BLOCK))) == 1) == is_one
