"""What the pages say about `generate` on a GPU, from what `bench_generate.py` measures."""

from __future__ import annotations

from generate_cases import PROPOSED
from parts import Cell, Part, Results, Row, Table, Text, at, filled, flat, of, origin, shown

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

# The floor, then milliseconds per step and tokens per second of each system, and the caches' sizes.
step_table = Table(
    "cases",
    {
        "batch x context": "{case:x}",
        "floor, ms per step": "{floor.step_ms:.2f}",
        **{heading: of(f"rows.{name}", "{step_ms:.2f} ({tokens_per_s:,.0f})") for name, heading in SYSTEMS.items()},
        "speed-up": "{rows.static.step_ms/rows.int4-capture.step_ms:.1f}x",
        f"cache, GB: {', '.join(CACHES.values())}": lambda row: ", ".join(
            shown("{cache_bytes:giga.2f}", at(f"rows.{name}", row)) for name in CACHES
        ),
    },
)


caption = Text(
    "Greedy `generate` with the shape of Llama-3-8B ({parameters:giga.1f} billion parameters, random {dtype} weights): "
    "milliseconds per decode step and, in brackets, tokens per second of the whole batch. The floor is transformers' "
    "compiled static cache with hardly any context, which is what the rest of the model costs. The speed-up is that of "
    "captured `int4` over transformers' compiled static cache. Starting up takes "
    "{cases.*.rows.int4-static.start_s:range.0f} s with compilation and {cases.*.rows.int4-capture.start_s:range.1f} s "
    "with capture. A dash: not measured.",
    origin("generate", "torch", "transformers"),
)

# --- scenarios --------------------------------------------------------------------------------------------------------


def systems(results: Results) -> list[Row]:
    """A row of each system, with what was measured in each kind of scenario."""
    kinds = {scenario["kind"]: scenario["rows"] for scenario in results["scenarios"]}
    found = [row["system"] for each in results["scenarios"] for row in [*each["rows"], *each["failures"]]]
    names = [name for name in dict.fromkeys([*SCENARIO_SYSTEMS, *found]) if name in found]
    return [
        {"system": SCENARIO_SYSTEMS.get(name, name), **{kind: at(name, rows) for kind, rows in kinds.items()}}
        for name in names
    ]


def proposed(way: str) -> Cell:
    """Tokens per second with proposals and how many were accepted, and what is not as it should be."""

    def cell(speeds: Row) -> str:
        found = speeds[way]
        if found is None:
            return "-"
        notes = [f"{found['accepted']:.1f}"]
        if not found["equal"]:
            notes.append(f"same for {found['equal_tokens']} tokens")
        if speeds["system"].endswith("-capture") and not found["is_captured"]:
            notes.append("not captured")
        return f"{found['tokens_per_s']:.0f} ({', '.join(notes)})"

    return of("assisted", cell)


scenario_table = Table(
    systems,
    {
        "cache": "{system}",
        "next turn, ms": "{turn.first_token_s:milli.0f}",
        "long prompt, s": "{chunked.first_token_s:.1f}",
        "peak memory, GB": "{chunked.peak_bytes:giga.1f}",
        "tokens/s": "{assisted.plain.tokens_per_s:.0f}",
        "with an assistant": proposed("assistant"),
        "with prompt lookup": proposed("lookup"),
    },
)
SCENARIO_TEXTS = {
    "turn": "Next turn: time to the first token after {size:,} new tokens behind {context:,} in the cache.",
    "chunked": (
        "Long prompt: time to the first token of {context:,} tokens in chunks of {size:,}; peak memory with weights."
    ),
    "assisted": (
        f"Tokens per second: {{size:,}} tokens after a prompt of {{context:,}}, alone and with {PROPOSED} proposals a "
        "round, of which the number in brackets was accepted on average. Tokens are those without proposals unless the "
        "table says otherwise. Weights are made so that every cache accepts equally many."
    ),
}


def told(results: Results) -> str:
    """What was measured, by kind."""
    kinds = {found["kind"]: found for found in results["scenarios"]}
    return " ".join(filled(text, kinds[kind]) for kind, text in SCENARIO_TEXTS.items() if kind in kinds)


def reasons(results: Results) -> str:
    """Why numbers are missing, each reason once, in brackets."""
    failures = flat(results, "scenarios", "failures")
    for row in (row for found in results["scenarios"] for row in found["rows"]):
        failures += [{"system": row["system"], "reason": reason} for reason in row.get("failures", {}).values()]
    described = [(SCENARIO_SYSTEMS.get(each["system"], each["system"]), each["reason"]) for each in failures]
    texts = dict.fromkeys(f"{system}: {reason.rstrip('.`')}" for system, reason in described)
    return f" ({'; '.join(texts)})" if texts else ""


scenario_caption = Text(
    "Greedy `generate` for one sequence with the shape of Llama-3-8B (random {dtype} weights). {told} A dash: not "
    "measured{reasons}.",
    origin("scenarios", "torch", "transformers"),
    told=told,
    reasons=reasons,
)
PARTS = (
    Part("generate", ("generate",), (step_table, caption)),
    Part("scenarios", ("scenarios",), (scenario_table, scenario_caption)),
)
