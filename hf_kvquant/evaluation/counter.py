"""Refuses numbers that were not computed from codes: one rule for all evaluations.

`pairs.py` counts the (query, token) pairs that were read from codes, and how many should have been. With fewer, some
layer attended to something else; with more, our picture of the model is wrong. Neither measures the quantised cache.
"""

from __future__ import annotations

from .arguments import Refused
from .pairs import Pairs

# The note on numbers measured without kernels.
DEQUANTIZED = (
    "No kernel serves the model, so it attended to dequantised tensors. The scores are still those of the formats."
)


class NothingRead(Refused):
    """The numbers would not be those of the quantised cache."""


def check_pairs(what: str, pairs: Pairs) -> None:
    """Refuse a measurement that did not read every pair exactly once.

    Args:
        what: What was measured; the start of the message.
        pairs: The pairs read during it.

    Raises:
        NothingRead: The counts differ.
    """
    if not pairs.is_complete:
        found = pairs.pairs_read + pairs.pairs_dequantized
        raise NothingRead(
            f"{what} must read {pairs.pairs_expected:,} (query, token) pairs from codes, got {found:,}. Some layer "
            "attended to something else (see the log above), or more often than it should, so the number would be that "
            "of another cache. Use another model."
        )
