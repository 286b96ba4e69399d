"""The folder of a report: records of the evaluations, and the page and pictures made from them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from ...common.output import written
from ..errors import UsageError
from ..provenance import model_name
from ..records import read_record
from . import page, pictures

FILES = {page.PLAIN: "perplexity.json", page.OUTLIERS: "perplexity_outliers.json", page.TASKS: "tasks.json"}
PAGE, HTML = "report.md", "report.html"


def read(model: str, folder: Path) -> dict[str, dict[str, Any]]:
    """The records of a model in a folder, by kind."""
    try:
        records = {kind: read_record(folder / name) for kind, name in FILES.items() if (folder / name).exists()}
    except ValueError as error:
        raise UsageError(f"`--output` must hold nothing but records under these names. {error}") from error
    name = model_name(model)
    for kind, record in records.items():
        found = record["settings"].get("model")
        if found != name:
            raise UsageError(
                f"`--output` must hold records of {name}, got {FILES[kind]} of {found}. Name another folder."
            )
    return records


def render(model: str, folder: Path) -> list[str]:
    """Make the page and its pictures from the records in a folder. Returns the names of the pictures."""
    records = read(model, folder)
    texts = page.of_texts(records)
    if not texts:
        found = ", ".join(FILES[kind] for kind in records) or "none"
        raise UsageError(
            f"`--output` must hold a finished {FILES[page.PLAIN]} or {FILES[page.OUTLIERS]}, got {folder} "
            f"with records: {found}. Run without --render first."
        )
    try:
        with tempfile.TemporaryDirectory(prefix=".", dir=folder) as name:
            drafts = Path(name)
            drawn = pictures.draw(texts, drafts)
            text = page.page(records, FILES, drawn)
            (drafts / PAGE).write_text(text, encoding="utf-8")
            (drafts / HTML).write_text(page.as_html(text, drafts), encoding="utf-8")
            for each in (*drawn, PAGE, HTML):
                with written(folder / each) as path:
                    (drafts / each).replace(path)
    except OSError as error:
        raise UsageError(
            f"`--output` must have room for the page, got {folder}: {error}. Make room, then run the same "
            "command again."
        ) from error
    return drawn
