"""Mutations: each finds its line, once. A line that has moved would go untested without a word."""

from __future__ import annotations

from pathlib import Path

from mutate import MUTATIONS

ROOT = Path(__file__).parents[1]


def test_each_mutation_finds_its_line() -> None:
    texts = {path: (ROOT / path).read_text(encoding="utf-8") for path in {each.path for each in MUTATIONS}}
    assert [each.old for each in MUTATIONS if texts[each.path].count(each.old) != 1] == []
