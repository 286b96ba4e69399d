"""Writes a report into the folder of its records: a page in Markdown and as one self-contained HTML file.

Records of `eval perplexity` and `eval tasks` are read as they stand in their files, so the same files always make the
same page. What is missing in the records is left out, and the page says so.
"""

from __future__ import annotations

import base64
import html
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from ...common.output import written
from ..errors import UsageError
from ..measuring.fidelity import UNQUANTIZED
from ..perplexity.results import is_finished, passed, rows_of
from ..provenance import model_name
from ..records import Record, read_record
from ..rendering import markdown_table, or_dash, scientific
from ..tasks.data import AVERAGED
from ..tasks.results import HEADINGS, LEGEND, Average, Part, averages, by_task_and_preset, cells
from .pictures import PICTURES, draw

PLAIN, OUTLIERS, TASKS = "plain", "outliers", "tasks"
FILES = {PLAIN: "perplexity.json", OUTLIERS: "perplexity_outliers.json", TASKS: "tasks.json"}
PAGE, HTML = "report.md", "report.html"
# How panels and headings name the evaluations of a text.
TITLES = {PLAIN: "as it is", OUTLIERS: "with injected outliers"}


def of_texts(records: Mapping[str, Record]) -> dict[str, Record]:
    """The finished records of `eval perplexity`, by title."""
    return {TITLES[kind]: records[kind] for kind in TITLES if kind in records and is_finished(records[kind])}


# --- numbers as text --------------------------------------------------------------------------------------------------


def spelled_change(change: float) -> str:
    """`+1.28%`; without a sign if it rounds to zero."""
    text = f"{change:+.2%}"
    return text if text.strip("+-0.%") else "0.00%"


def spelled_average(average: Average | None) -> str:
    """`38.1`, or `37.9 (-0.6 to +0.2)` with the interval of the change, in points."""
    if average is None:
        return "-"
    value = f"{100 * average.value:.1f}"
    if average.change_interval is None:
        return value
    low, high = average.change_interval
    return f"{value} ({100 * low:+.1f} to {100 * high:+.1f})"


# --- the page ---------------------------------------------------------------------------------------------------------


def page(records: Mapping[str, Record], files: Mapping[str, str], pictures: Sequence[str]) -> str:
    """The page, in Markdown.

    Args:
        records: By kind; at least one of `eval perplexity` is finished.
        files: Names of their files, by kind.
        pictures: Names of the files that `draw` has drawn.
    """
    texts = of_texts(records)
    first = next(iter(texts.values()))
    sections = [f"# Quantised caches of {first['settings']['model']}", opening(first)]
    of_tasks = by_task_and_preset(records[TASKS]["parts"]) if TASKS in records else {}
    means = averages(of_tasks)
    for title, record in texts.items():
        sections += [f"## Quality, {title}", quality_table(record, means if title == TITLES[PLAIN] else {})]
    sections.append(columns_text(has_outliers=TITLES[OUTLIERS] in texts, has_averages=bool(means)))
    for name in pictures:
        picture = PICTURES[name]
        sections += [f"## {picture.heading}"] * bool(picture.heading) + [f"![{picture.alt}]({name})", picture.text]
    for title, record in texts.items():
        reason = record["parts"].get("keys", {}).get("unmeasured")
        sections += [f"Keys were not measured {title}: {reason.rstrip('.')}."] if reason else []
    if TASKS in records:
        sections += ["## Zero-shot tasks", *task_sections(of_tasks, records[TASKS]["settings"]["limit"])]
    sections += ["## How these numbers came about", provenance(records, files)]
    return "\n\n".join(sections) + "\n"


def opening(record: Record) -> str:
    """What was measured, on what."""
    card, settings = record["card"], record["settings"]
    source = settings["source"]
    name = source.get("text") or f"{source.get('dataset')}, {source.get('split')}"
    threads = f"{card['threads']} thread{'s' * (card['threads'] != 1)}"
    machine = card.get("gpu") if settings["device"].startswith("cuda") else f"{card['cpu']}, {threads}"
    mode, rows = rows_of(record)
    how = {"chunked": f"in chunks of {settings['chunk']} tokens", "decode": "token by token"}.get(mode, mode)
    return (
        "What each preset of a quantised key-value cache costs this model in quality, and how much memory it saves, "
        "compared with the unquantised cache in the same run. Measured on "
        f"{rows[UNQUANTIZED]['scored_tokens']:,} tokens of {name} ({source['convention']}) in windows of "
        f"{settings['window']}, {how}, {settings['dtype']} on {machine}. "
        f"hf_kvquant {card['hf_kvquant']}, torch {card['torch']}, transformers {card['transformers']}."
    )


def quality_table(record: Record, averages: Mapping[str, Average]) -> str:
    """The table of `eval perplexity`, one row per preset."""
    headings = ["preset", "bits per value", "KL, nats per token", "median", "99 %", "same next token", "perplexity"]
    headings += ["change", *(["zero-shot average, %"] if averages else [])]
    rows = []
    for name, row in rows_of(record)[1].items():
        error = row["kld_standard_error"]
        cells_of_row = [f"`{name}`", f"{row['bits_per_value']:.4g}"]
        cells_of_row.append(scientific(max(row["kld"], 0.0)) + (f" ± {scientific(error)}" if error else ""))
        cells_of_row += [scientific(max(row[key], 0.0)) for key in ("kld_median", "kld_p99")]
        cells_of_row += [f"{row['agreement']:.1%}", or_dash(row["perplexity"], ".2f")]
        cells_of_row.append(spelled_change(row["perplexity_change"]))
        rows.append(cells_of_row + ([spelled_average(averages.get(name))] if averages else []))
    return markdown_table(headings, rows)


def columns_text(*, has_outliers: bool, has_averages: bool) -> str:
    """What the columns mean."""
    text = (
        "Bits per value: of the cache, scales and zeros included. KL: how far the next-token distribution is "
        "from that of the unquantised cache, with its standard error over windows; 0 means equal. Median and 99 %: "
        "percentiles of the KL over tokens. Same next token: how often the most likely token stays the same. "
        "Perplexity: per token."
    )
    if has_outliers:
        text += (
            " With injected outliers, some channels of the keys are made larger, as in some large models, and the same "
            "channels of the queries smaller. The unquantised model computes the same; only quantising becomes harder."
        )
    if has_averages:
        text += (
            f" Zero-shot average: accuracy over {', '.join(AVERAGED)}, and the change from the unquantised cache on "
            "the same items with its 95 % interval, in points."
        )
    return text


def task_sections(parts: Mapping[tuple[str, str], Part], limit: int | None) -> list[str]:
    """What the columns mean, then a table for each task that was run."""
    items = "All items" if limit is None else f"The first {limit} items"
    sections = [f"{items} of each task. {LEGEND}"]
    for task in dict.fromkeys(task for task, _ in parts):
        by_preset = {preset: part for (name, preset), part in parts.items() if name == task}
        reference = by_preset.get(UNQUANTIZED)
        rows = [[f"`{preset}`", *cells(preset, part, reference)[1:]] for preset, part in by_preset.items()]
        sections += [f"### {task}", markdown_table(["preset", *HEADINGS], rows)]
    return sections


def provenance(records: Mapping[str, Record], files: Mapping[str, str]) -> str:
    """The file and checks of each record, which records are missing, and the commands."""
    lines = []
    commands = dict.fromkeys(record["card"]["command"] for record in records.values())
    for kind, name in files.items():
        if kind not in records:
            lines.append(f"- `{name}`: missing.")
            continue
        record = records[kind]
        card = record["card"]
        made = [card["date"]]
        if card["commit"]:
            made.append(f"commit {card['commit'][:10]}{', with uncommitted changes' if card['is_dirty'] else ''}")
        line = f"- `{name}`: {', '.join(made)}."
        if kind != TASKS and not is_finished(record):
            line += " Not finished, so not shown. Run the command again."
        elif kind != TASKS:
            line += f" {passed(record)}"
        lines.append(line)
    return "\n".join([*lines, *(f"- Command: `{command}`" for command in commands)])


# --- as HTML ----------------------------------------------------------------------------------------------------------

STYLE = """
:root { color-scheme: light dark; --text: #1f2328; --dim: #59636e; --line: #d1d9e0; --back: #fff; --stripe: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e8eb; --dim: #a2abb5; --line: #3a424b; --back: #16191d; --stripe: #1e2328; }
}
body { margin: 0 auto; max-width: 64rem; padding: 1.5rem 1.25rem 4rem; color: var(--text); background: var(--back);
  font: 1rem/1.55 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.7rem; line-height: 1.25; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); padding-bottom: .25rem; font-size: 1.3rem; }
h3 { font-size: 1.05rem; }
p, li { max-width: 48rem; }
p:has(img) { max-width: none; }
table { display: block; width: max-content; max-width: 100%; overflow-x: auto; border-collapse: collapse;
  font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .75rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { min-width: 4.5rem; color: var(--dim); font-weight: 600; white-space: normal; vertical-align: bottom; }
th:first-child { text-align: left; }
tbody tr:nth-child(even) { background: var(--stripe); }
code { border-radius: .25rem; padding: .1em .3em; background: var(--stripe); font: .9em ui-monospace, monospace; }
img { display: block; max-width: 100%; height: auto; border-radius: .4rem; }
"""


def as_html(markdown: str, folder: Path) -> str:
    """The Markdown page as HTML, with its pictures, all SVG, from a folder. The first line is the title."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(markdown)
    for token in tokens:
        for child in token.children or ():
            if child.type == "image":
                picture = base64.b64encode((folder / str(child.attrs["src"])).read_bytes()).decode("ascii")
                child.attrs["src"] = f"data:image/svg+xml;base64,{picture}"
    title = html.escape(markdown.partition("\n")[0].removeprefix("# "))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"{parser.renderer.render(tokens, parser.options, {})}</body>\n</html>\n"
    )


# --- in a folder ------------------------------------------------------------------------------------------------------


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
    texts = of_texts(records)
    if not texts:
        found = ", ".join(FILES[kind] for kind in records) or "none"
        raise UsageError(
            f"`--output` must hold a finished {FILES[PLAIN]} or {FILES[OUTLIERS]}, got {folder} "
            f"with records: {found}. Run without --render first."
        )
    try:
        with tempfile.TemporaryDirectory(prefix=".", dir=folder) as name:
            drafts = Path(name)
            drawn = draw(texts, drafts)
            text = page(records, FILES, drawn)
            (drafts / PAGE).write_text(text, encoding="utf-8")
            (drafts / HTML).write_text(as_html(text, drafts), encoding="utf-8")
            for each in (*drawn, PAGE, HTML):
                with written(folder / each) as path:
                    (drafts / each).replace(path)
    except OSError as error:
        raise UsageError(
            f"`--output` must have room for the page, got {folder}: {error}. Make room, then run the same "
            "command again."
        ) from error
    return drawn
