"""Which numbers are refused for what was read: one rule for all evaluations.

How pairs are counted, and what there is to read, is in `pairs.py`. Fewer than that, and some layer attended to
something else; more, and what a model attends to is not what is thought of it. Neither is a number of the quantised
cache.
"""

from __future__ import annotations

from ..arguments import Refused
from ..pairs import Pairs

# What is said of numbers that came so.
DEQUANTIZED = "No kernel serves the model, which attended to dequantised tensors: the formats' scores all the same."


class NothingRead(Refused):
    """Numbers that would not be those of the quantised cache."""


def check_pairs(what: str, pairs: Pairs) -> None:
    """Abort where a number would not be one of the quantised cache.

    Args:
        what: Was measured; opens the message.
        pairs: That were read meanwhile.

    Raises:
        NothingRead: It would not.
    """
    if not pairs.is_complete:
        found = pairs.pairs_read + pairs.pairs_dequantized
        raise NothingRead(
            f"{what} must read {pairs.pairs_expected:,} (query, token) pairs from codes, got {found:,}. Some layer "
            "attended to something else, as the log above says, or more often than it should; the number would be that "
            "of another cache. Use another model."
        )
