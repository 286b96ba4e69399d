"""What pages and pictures are made of, as data: a module that renders lists its `Part`s and `Picture`s, and
`render_readme.py` collects them.

A part or picture that needs one results file gets its content; one that needs several gets a mapping of their contents,
by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Results = Mapping[str, Any]
NOT_MEASURED = "Not measured yet."


@dataclasses.dataclass(frozen=True)
class Made:
    """What is made from results files.

    Attributes:
        name: A part's is that of its markers; a picture's that of its file.
        files: Results files that it needs, by their names without the suffix.
        optional: Those that it also shows where they exist. If it needs no others, it needs one of these.
    """

    name: str
    files: tuple[str, ...]
    optional: tuple[str, ...] = dataclasses.field(default=(), kw_only=True)

    def of(self, results: Results) -> Any:
        """What of all results it is made from; `None` if a file that it needs is missing."""
        present = {name: results[name] for name in (*self.files, *self.optional) if name in results}
        if not present or any(name not in present for name in self.files):
            return None
        return present[self.files[0]] if len(self.files) == 1 and not self.optional else present


@dataclasses.dataclass(frozen=True)
class Part(Made):
    """The Markdown between two markers. Each paragraph is a text, or a function that makes one of the results."""

    paragraphs: tuple[str | Callable[[Any], str], ...]

    def text(self, results: Results) -> str:
        """Its paragraphs."""
        found = self.of(results)
        if found is None:
            return NOT_MEASURED
        return "\n\n".join(each if isinstance(each, str) else each(found) for each in self.paragraphs)


@dataclasses.dataclass(frozen=True)
class Picture(Made):
    """A picture: the numbers that it takes from results, and how it is drawn from them."""

    plotted: Callable[[Any], dict[str, Any]]
    draw: Callable[[dict[str, Any], Path], None]
