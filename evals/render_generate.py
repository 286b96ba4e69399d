"""What the pages say about `generate` on a GPU, from `evals/results/generate.json` alone.

`bench_generate.py` measures, and `render_readme.py` puts this into the pages.
"""

from __future__ import annotations

from typing import Any

from hf_kvquant.common.tables import markdown_table as table

# The columns and their headings, in order. Names are those of bench_generate.py.
SYSTEMS = {
    "static": "transformers, static",
    "int8-static": "`int8`, compiled",
    "int4-static": "`int4`, compiled",
    "int4-capture": "`int4`, captured",
}
# Systems whose cache size is shown, and the names it is shown under.
CACHES = {"static": "bf16", "int8-static": "`int8`", "int4-static": "`int4`"}


def step_table(results: dict[str, Any]) -> str:
    """Per case: the floor, then milliseconds per step and tokens per second of each system, and the caches' sizes."""
    headings = ["batch x context", "floor, ms per step", *SYSTEMS.values(), "speed-up"]
    headings.append(f"cache, GB: {', '.join(CACHES.values())}")
    lines = []
    for case in results["cases"]:
        rows = {row["system"]: row for row in case["rows"]}
        cells = [case["case"].replace("x", " x "), f"{case['floor']['step_ms']:.2f}"]
        cells += [_speed(rows.get(name)) for name in SYSTEMS]
        lines.append([*cells, _ratio(rows), ", ".join(_gigabytes(rows.get(name)) for name in CACHES)])
    return table(headings, lines)


def _speed(row: dict[str, Any] | None) -> str:
    return "-" if row is None else f"{row['step_ms']:.2f} ({row['tokens_per_s']:,.0f})"


def _ratio(rows: dict[str, Any]) -> str:
    """How many times as fast our fastest system is as transformers' static cache."""
    ours = [rows[name]["step_ms"] for name in SYSTEMS if name != "static" and name in rows]
    return f"{rows['static']['step_ms'] / min(ours):.1f}x" if "static" in rows and ours else "-"


def _gigabytes(row: dict[str, Any] | None) -> str:
    return "-" if row is None else f"{row['cache_bytes'] / 1e9:.2f}"


def caption(results: dict[str, Any]) -> str:
    """What was measured, on what and when."""
    starts = {
        name: [row["start_s"] for case in results["cases"] for row in case["rows"] if row["system"] == name]
        for name in ("int4-static", "int4-capture")
    }
    return (
        f"Greedy `generate` with the shape of Llama-3-8B ({results['parameters'] / 1e9:.1f} billion parameters, random "
        f"{results['dtype']} weights): milliseconds per decode step and, in brackets, tokens per second of the whole "
        "batch. The floor is transformers' compiled static cache with hardly any context, which is what the rest of "
        "the model costs. The speed-up is that of our fastest column over transformers' compiled static cache. "
        f"Starting up takes {_seconds(starts['int4-static'])} with compilation and {_seconds(starts['int4-capture'])} "
        f"with capture. A dash: not measured. {results['gpu']}, torch {results['torch']}, transformers "
        f"{results['transformers']}, {results['date'][:10]}, `evals/results/generate.json`."
    )


def compared(results: dict[str, Any], name: str) -> tuple[tuple[float, float], float, tuple[float, float]]:
    """Compare transformers' static cache with captured `int4` on one case.

    Returns:
        Milliseconds per step of both, how many times as fast ours is, and gigabytes of both caches.
    """
    (case,) = (case for case in results["cases"] if case["case"] == name)
    rows = {row["system"]: row for row in case["rows"]}
    theirs, ours = rows["static"], rows["int4-capture"]
    sizes = theirs["cache_bytes"] / 1e9, ours["cache_bytes"] / 1e9
    return (theirs["step_ms"], ours["step_ms"]), theirs["step_ms"] / ours["step_ms"], sizes


def _seconds(starts: list[float]) -> str:
    low, high = min(starts), max(starts)
    return f"{low:.0f} to {high:.0f} s" if high >= 2 else f"{low:.1f} to {high:.1f} s"
