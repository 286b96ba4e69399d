"""The models, cases, scenarios and goals of the benchmark of `generate`, and numbers computed from its results.

Nothing here needs a GPU or a model. `generate_systems.py` has the systems that are compared, `bench_generate.py` and
`generate_scenarios.py` measure.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from decode_cases import thousands
from goals import is_reached

# Model types of transformers and their sizes. Weights are random.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3-8b": (
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
    ),
    "llama-3.2-1b": (
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
            "tie_word_embeddings": True,
        },
    ),
    "qwen2.5-7b": (
        "qwen2",
        {
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "tie_word_embeddings": False,
        },
    ),
    # Those with latents (MLA); the first two with experts.
    "deepseek-v2-lite": (
        "deepseek_v2",
        {
            "vocab_size": 102400,
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "max_position_embeddings": 163840,
        },
    ),
    "glm-4.7-flash": ("glm4_moe_lite", {"max_position_embeddings": 202752}),
    "minicpm3-4b": ("minicpm3", {"max_position_embeddings": 163840}),
    # Three of four layers have a state alone: a gated delta rule.
    "qwen3.5-4b": (
        "qwen3_5_text",
        {
            "vocab_size": 248320,
            "hidden_size": 2560,
            "intermediate_size": 9216,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "max_position_embeddings": 262144,
            "tie_word_embeddings": True,
        },
    ),
    # The dense model beside it: as many bytes of weights in a step.
    "qwen3-4b": (
        "qwen3",
        {
            "vocab_size": 151936,
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "tie_word_embeddings": True,
        },
    ),
    "tiny": (
        "llama",
        {
            "vocab_size": 96,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 4096,
        },
    ),
}
# The context of the floor, a step that reads hardly any cache.
FLOOR_CONTEXT = 64
# Tokens that are proposed in a round of assisted decoding, and the least to be made: two rounds and a token.
PROPOSED = 5
MIN_ASSISTED = 2 * (PROPOSED + 1) + 1
# Share of a GPU's memory that can be used. The rest is for the driver and fragmentation.
USABLE = 0.97


@dataclasses.dataclass(frozen=True)
class Case:
    """`batch` sequences with prompts of `context` tokens."""

    batch: int
    context: int

    @property
    def name(self) -> str:
        """`8x16k`."""
        return f"{self.batch}x{thousands(self.context)}"

    @staticmethod
    def parse(name: str) -> Case:
        """The case of a name like `8x16k` or `2x100`.

        Raises:
            ValueError: The name has another form.
        """
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*k?)", name)
        if match is None:
            raise ValueError(f"a case must be batch and context, such as 8x16k or 2x100, got {name!r}")
        return Case(int(match[1]), _tokens(match[2]))


def _tokens(text: str) -> int:
    return int(text.removesuffix("k")) * (1024 if text.endswith("k") else 1)


DEFAULT_CASES = [Case(1, 2048), Case(1, 32768), Case(8, 16384), Case(64, 8192)]


@dataclasses.dataclass(frozen=True)
class Scenario:
    """What a user of one sequence feels.

    Attributes:
        kind: `"turn"`: the first token after `size` new tokens behind `context` tokens in the cache; `"chunked"`: a
            prompt of `context` tokens in chunks of `size`; `"assisted"`: `size` tokens after a prompt of `context`, of
            which some are proposed.
        context: Tokens.
        size: Tokens.
    """

    kind: str
    context: int
    size: int

    @property
    def name(self) -> str:
        """`turn:32k:512`."""
        return f"{self.kind}:{thousands(self.context)}:{thousands(self.size)}"

    @staticmethod
    def parse(name: str) -> Scenario:
        """The scenario of a name like `turn`, for its usual sizes, or `turn:1k:64`.

        Raises:
            ValueError: The name has another form.
        """
        kind, _, sizes = name.partition(":")
        if kind in SCENARIOS and name == kind:
            return SCENARIOS[kind]
        match = re.fullmatch(r"([1-9]\d*k?):([1-9]\d*k?)", sizes)
        if kind not in SCENARIOS or match is None:
            raise ValueError(
                f"a scenario must be one of {', '.join(SCENARIOS)}, alone or with two sizes such as turn:32k:512, got "
                f"{name!r}"
            )
        scenario = Scenario(kind, _tokens(match[1]), _tokens(match[2]))
        if kind == "assisted" and scenario.size < MIN_ASSISTED:
            raise ValueError(f"assisted must make at least {MIN_ASSISTED} tokens, got {scenario.size}")
        return scenario


# With their usual sizes. The long prompt leaves room for new tokens within the 128k positions of the models.
SCENARIOS = {
    "turn": Scenario("turn", 32768, 512),
    "chunked": Scenario("chunked", 131072 - 64, 2048),
    "assisted": Scenario("assisted", 32768, 128),
}


def parse_case(name: str) -> Case | Scenario:
    """A case or a scenario, by its name.

    Raises:
        ValueError: The name has another form.
    """
    return Case.parse(name) if name[:1].isdigit() else Scenario.parse(name)


# --- goals ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Goal:
    """An upper limit for a figure of the `llama-3-8b` shape.

    Attributes:
        case: Name of a case.
        system: Name of a system.
        unit: `"over_floor"`: ms per step above the floor; `"ms"` per step; `"cache_gb"`; or `"times"` the step of
            `other`.
        value: The limit.
        other: Name of a system, for `"times"`.
    """

    case: str
    system: str
    unit: str
    value: float
    other: str = ""

    def describe(self) -> str:
        """The goal in words, for tables."""
        what = {
            "over_floor": f"floor + {self.value:g} ms",
            "ms": f"{self.value:g} ms",
            "cache_gb": f"{self.value:g} GB of cache",
            "times": f"{self.value:g} times {self.other}",
        }
        return f"at most {what[self.unit]}"


GOALS_OF = "llama-3-8b"
_OVER_FLOOR = {"1x2k": (0.3, 0.35), "1x32k": (0.6, 0.9), "8x16k": (1.5, 2.6), "64x8k": (5.3, 9.3)}
GOALS = [
    *(
        Goal(case, system, "over_floor", value)
        for case, values in _OVER_FLOOR.items()
        for system, value in zip(("int4-static", "int8-static"), values, strict=True)
    ),
    Goal("1x2k", "int4-capture", "ms", 5.4),
    Goal("8x16k", "int4-capture", "ms", 6.9),
    Goal("8x16k", "int4-static", "cache_gb", 4.7),
    Goal("1x2k", "int4", "times", 1.05, "dynamic"),
]


def check_goals(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Every goal with its limit and what was measured, `None` if the run left it out. Other models have no goals."""
    checks = []
    for goal in GOALS if results["model"] == GOALS_OF else []:
        case = next((case for case in results["cases"] if case["case"] == goal.case), None)
        rows = {} if case is None else {row["system"]: row for row in case["rows"]}
        row, limit = rows.get(goal.system), goal.value
        measured = None if row is None else row["cache_bytes"] / 1e9 if goal.unit == "cache_gb" else row["step_ms"]
        known: float | None = limit
        if goal.unit == "over_floor":
            known = None if case is None or case["floor"] is None else case["floor"]["step_ms"] + limit
        elif goal.unit == "times":
            known = rows[goal.other]["step_ms"] * limit if goal.other in rows else None
        checks.append(
            {
                **dataclasses.asdict(goal),
                "limit": known,
                "measured": measured,
                "reached": is_reached(measured, known),
            }
        )
    return checks


# --- computed from bytes ----------------------------------------------------------------------------------------------


def roofline_ms(weight_bytes: int, cache_bytes: int | None, read_gbps: float) -> float | None:
    """The time to read weights and cache once; `None` if the bytes of the cache are unknown."""
    return None if cache_bytes is None else (weight_bytes + cache_bytes) / read_gbps / 1e6


def largest(
    case: Case, *, total_bytes: int | None, peak_bytes: int | None, cache_bytes: int | None, tokens: int
) -> dict[str, int] | None:
    """Estimate the longest context at a case's batch, and the largest batch at its context, from the memory it took.

    Assumes that all memory besides the cache (weights, and what prefill needs) stays the same. This holds if prompts
    are prefilled in chunks with as many tokens in total as in the case.

    Args:
        case: The case that ran.
        total_bytes: Memory of the GPU.
        peak_bytes: The most that was allocated.
        cache_bytes: How much of that was the cache.
        tokens: Tokens per sequence in the cache, prompt and new ones.

    Returns:
        `context` and `batch`; `None` if an argument is unknown.
    """
    if total_bytes is None or peak_bytes is None or cache_bytes is None:
        return None
    room = total_bytes * USABLE - (peak_bytes - cache_bytes)
    num_tokens = int(room // (cache_bytes / (case.batch * tokens)))
    return {"context": num_tokens // case.batch, "batch": num_tokens // tokens}
