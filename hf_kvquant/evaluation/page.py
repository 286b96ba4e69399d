"""Writes the page of a report, in Markdown, from finished records. Nothing is measured here.

Records of `eval perplexity` and `eval tasks` are read as they stand in their files, so the same files always make the
same page. `report.py` decides which records there are, and `pictures.py` which pictures. What is missing in the records
is left out, and the page says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .generation import UNQUANTIZED
from .perplexity_results import Record, is_finished, passed, rows_of
from .pictures import PICTURES
from .task_files import AVERAGED
from .task_results import HEADINGS, LEGEND, Average, Part, averages, by_task_and_preset, cells

PLAIN, OUTLIERS, TASKS = "plain", "outliers", "tasks"
# How panels and headings name the evaluations of a text.
TITLES = {PLAIN: "as it is", OUTLIERS: "with injected outliers"}


def of_texts(records: Mapping[str, Record]) -> dict[str, Record]:
    """The finished records of `eval perplexity`, by title."""
    return {TITLES[kind]: records[kind] for kind in TITLES if kind in records and is_finished(records[kind])}


# --- numbers as text --------------------------------------------------------------------------------------------------


def scientific(number: float) -> str:
    """A small number as people write it: `1.9·10⁻⁴`."""
    if number == 0:
        return "0"
    mantissa, exponent = f"{number:.1e}".split("e")
    digits = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{mantissa}·10{digits}"


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


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table. The first column is text, all others are numbers."""
    rule = "|---" + "|--:" * (len(headings) - 1) + "|"
    return "\n".join([f"| {' | '.join(headings)} |", rule, *(f"| {' | '.join(row)} |" for row in rows)])


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
    headings = [
        "preset",
        "bits a value",
        "KL, nats a token",
        "median",
        "99 %",
        "same next token",
        "perplexity",
        "change",
    ]
    headings += ["zero-shot average, %"] * bool(averages)
    rows = []
    for name, row in rows_of(record)[1].items():
        error = row["kld_standard_error"]
        cells_of_row = [f"`{name}`", f"{row['bits_per_value']:.4g}"]
        cells_of_row.append(scientific(max(row["kld"], 0.0)) + (f" ± {scientific(error)}" if error else ""))
        cells_of_row += [scientific(max(row[key], 0.0)) for key in ("kld_median", "kld_p99")]
        perplexity = "-" if row["perplexity"] is None else f"{row['perplexity']:.2f}"
        cells_of_row += [f"{row['agreement']:.1%}", perplexity, spelled_change(row["perplexity_change"])]
        rows.append(cells_of_row + [spelled_average(averages.get(name))] * bool(averages))
    return table(headings, rows)


def columns_text(*, has_outliers: bool, has_averages: bool) -> str:
    """What the columns mean."""
    text = (
        "Bits a value: bits per cached value, scales and zeros included. KL: how far the next-token distribution is "
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
        sections += [f"### {task}", table(["preset", *HEADINGS], rows)]
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
