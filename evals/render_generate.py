"""What the pages say about `generate` on a GPU, from `generate.json` and `scenarios.json` in `evals/results/` alone.

`bench_generate.py` measures, and `render_readme.py` puts this into the pages.
"""

from __future__ import annotations

from typing import Any

from generate_cases import PROPOSED
from parts import Part

from hf_kvquant.common.tables import markdown_table as table

# The columns and their headings, in order. Names are those of bench_generate.py.
SYSTEMS = {
    "static": "transformers, static",
    "int8-static": "`int8`, compiled",
    "int4-static": "`int4`, compiled",
    "int4-capture": "`int4`, captured",
    "int4-token-capture": "`int4-token`, captured",
}
SCENARIO_SYSTEMS = {
    "dynamic": "transformers, dynamic",
    "dynamic-no-cudnn": "transformers, dynamic, without cuDNN",
    "static": "transformers, static",
    "int8": "`int8`",
    "int4": "`int4`",
    "int4-token": "`int4-token`",
    "int8-capture": "`int8`, captured",
    "int4-capture": "`int4`, captured",
    "int4-token-capture": "`int4-token`, captured",
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
    """How many times as fast captured `int4` is as transformers' static cache."""
    theirs, ours = rows.get("static"), rows.get("int4-capture")
    return "-" if theirs is None or ours is None else f"{theirs['step_ms'] / ours['step_ms']:.1f}x"


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
        "the model costs. The speed-up is that of captured `int4` over transformers' compiled static cache. "
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


# --- scenarios --------------------------------------------------------------------------------------------------------


def scenario_table(results: dict[str, Any]) -> str:
    """What users of one sequence feel, a row per system: a turn, a long prompt, and tokens per second."""
    found = {scenario["kind"]: scenario for scenario in results["scenarios"]}
    names = {kind: {row["system"]: row for row in scenario["rows"]} for kind, scenario in found.items()}
    headings = ["cache", "next turn, ms", "long prompt, s", "peak memory, GB", "tokens/s", "with an assistant"]
    lines = []
    for system in _systems(results):
        turn, long, speeds = (names.get(kind, {}).get(system) for kind in ("turn", "chunked", "assisted"))
        cells = ["-" if turn is None else f"{1e3 * turn['first_token_s']:.0f}"]
        cells += ["-", "-"] if long is None else [f"{long['first_token_s']:.1f}", f"{long['peak_bytes'] / 1e9:.1f}"]
        cells.append("-" if speeds is None else f"{speeds['plain']['tokens_per_s']:.0f}")
        cells += [_proposed(speeds, way) for way in ("assistant", "lookup")]
        lines.append([SCENARIO_SYSTEMS.get(system, system), *cells])
    return table([*headings, "with prompt lookup"], lines)


def _systems(results: dict[str, Any]) -> list[str]:
    found = [row["system"] for scenario in results["scenarios"] for row in [*scenario["rows"], *scenario["failures"]]]
    return [name for name in dict.fromkeys([*SCENARIO_SYSTEMS, *found]) if name in found]


def _proposed(speeds: dict[str, Any] | None, way: str) -> str:
    """Tokens per second with proposals and how many were accepted, and what is not as it should be."""
    found = None if speeds is None else speeds[way]
    if speeds is None or found is None:
        return "-"
    notes = [f"{found['accepted']:.1f}"]
    if not found["equal"]:
        notes.append(f"same for {found['equal_tokens']} tokens")
    if speeds["system"].endswith("-capture") and not found["is_captured"]:
        notes.append("not captured")
    return f"{found['tokens_per_s']:.0f} ({', '.join(notes)})"


def scenario_caption(results: dict[str, Any]) -> str:
    """What was measured, on what and when, and why there are dashes."""
    sizes = {found["kind"]: (f"{found['context']:,}", f"{found['size']:,}") for found in results["scenarios"]}
    sentences = []
    if "turn" in sizes:
        context, size = sizes["turn"]
        sentences.append(f"Next turn: time to the first token after {size} new tokens behind {context} in the cache.")
    if "chunked" in sizes:
        context, size = sizes["chunked"]
        sentences.append(
            f"Long prompt: time to the first token of {context} tokens in chunks of {size}; peak memory with weights."
        )
    if "assisted" in sizes:
        context, size = sizes["assisted"]
        sentences.append(
            f"Tokens per second: {size} tokens after a prompt of {context}, alone and with {PROPOSED} "
            "proposals a round, of which the number in brackets was accepted on average. Tokens are those "
            "without proposals unless the table says otherwise. Weights are made so that every cache accepts equally "
            "many."
        )
    reasons = f" ({'; '.join(_reasons(results))})" if _reasons(results) else ""
    return (
        f"Greedy `generate` for one sequence with the shape of Llama-3-8B (random {results['dtype']} weights). "
        f"{' '.join(sentences)} A dash: not measured{reasons}. {results['gpu']}, torch {results['torch']}, "
        f"transformers {results['transformers']}, {results['date'][:10]}, `evals/results/scenarios.json`."
    )


def _reasons(results: dict[str, Any]) -> list[str]:
    """Why numbers are missing, each reason once."""
    failures = [failure for found in results["scenarios"] for failure in found["failures"]]
    for row in (row for found in results["scenarios"] for row in found["rows"]):
        failures += [{"system": row["system"], "reason": reason} for reason in row.get("failures", {}).values()]
    described = [(SCENARIO_SYSTEMS.get(each["system"], each["system"]), each["reason"]) for each in failures]
    return list(dict.fromkeys(f"{system}: {reason.rstrip('.`')}" for system, reason in described))


PARTS = (
    Part("generate", ("generate",), (step_table, caption)),
    Part("scenarios", ("scenarios",), (scenario_table, scenario_caption)),
)
