"""What a user of one sequence feels: a chat's next turn, a long prompt in chunks, and tokens that are proposed.

`bench_generate.py` measures these with the caches of `generate_systems.py`, by the names `turn`, `chunked` and
`assisted`. Each is warmed up, then measured three times, or less often if that takes long; the median counts.

- `turn`: the time to the first token after new tokens behind a long context. The prefill of the context is not timed.
  A cache is cropped back for the next call; transformers' static cache, which cannot be cropped before
  5.24, is filled again.
- `chunked`: the time to the first token of a long prompt in chunks, and the peak of memory. Nothing is compiled.
- `assisted`: tokens per second after the first ones, without proposals, with an assistant model, and with prompt
  lookup, five proposals a round. Before 5.24, transformers refuses assisted decoding with static caches, and a
  cache of ours that is not captured grows.

Proposals need a model that can be guessed, and random weights cannot: an independent assistant would never be right.
So `predictable` changes the weights. A thousand tokens follow one another in a circle, whatever came before. The
assistant is the model's first eighth, and gets a fifth of these tokens wrong. The prompt runs around the circle and
jumps after a fifth of its tokens, so prompt lookup is right as often. Every system then accepts equally many proposals,
and the time of a round, which depends on shapes only, is that of any weights.

`equal` tells whether the tokens are those without proposals. With such weights this checks the loop (what it accepts,
and how it goes on); that the cache is right after a crop is for the tests.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from generate_cases import MIN_ASSISTED, PROPOSED, Case, Scenario
from generate_systems import (
    SYSTEMS,
    WARM_UP_CONTEXT,
    Clock,
    bytes_per_token,
    call,
    call_on,
    check_served,
    clean_up,
    random_prompt,
)
from rich.table import Table
from torch import Tensor
from torch.nn import Parameter
from transformers import AutoModelForCausalLM, GenerationConfig, StaticCache
from transformers.cache_utils import Cache

from hf_kvquant import KVQuantCache
from hf_kvquant.state import patch_of
from hf_kvquant.upstream.releases import CACHE, cache_of
from hf_kvquant_evals.provenance import describe_error

# Timed calls: fewer when they have taken this long.
CALLS, ENOUGH_SECONDS = 3, 6.0
# Tokens in the circle, and the share of them that the assistant and the prompt get wrong. Token 0 is not in it:
# transformers hides padding tokens within a prompt from an assistant (5.18 to 5.23), which then attends with holes.
CIRCLE, WRONG = 1024, 0.2
# What the layers' outputs are multiplied with, so that the last token decides about the next one.
LAYER_SCALE = 1 / 256


def measure_scenario(model: Any, name: str, scenario: Scenario, assistant: Any) -> dict[str, Any]:
    """The row of one system.

    Args:
        model: The model.
        name: A name of `SYSTEMS`.
        scenario: What to measure.
        assistant: For `assisted`, what `predictable` returned.

    Raises:
        Exception: Whatever the system fails with.
    """
    if scenario.kind == "assisted":
        return _assisted(model, name, scenario, assistant)
    return {"turn": _turn, "chunked": _chunked}[scenario.kind](model, name, scenario)


def _repeat(run: Callable[[], Clock]) -> list[Clock]:
    """Call `run` a few times, less often if that takes long."""
    start, clocks = time.perf_counter(), [run()]
    while len(clocks) < CALLS and time.perf_counter() - start < ENOUGH_SECONDS:
        clocks.append(run())
    return clocks


def _first_token(name: str, clocks: list[Clock], cache_bytes: int | None) -> dict[str, Any]:
    """The row of a system whose calls make one token each."""
    seconds = [clock.times[0] for clock in clocks]
    return {
        "system": name,
        "first_token_s": statistics.median(seconds),
        "calls_s": seconds,
        "cache_bytes": cache_bytes,
        "peak_bytes": clocks[-1].peak_bytes,
    }


def _bytes_of(cache: Cache, tokens: int) -> int | None:
    token_bytes = bytes_per_token(cache)
    return None if token_bytes is None else tokens * token_bytes


# --- a turn, and a prompt in chunks -----------------------------------------------------------------------------------


def _turn(model: Any, name: str, scenario: Scenario) -> dict[str, Any]:
    tokens = scenario.context + scenario.size
    prompt = random_prompt(model, Case(1, tokens))
    with SYSTEMS[name](model, tokens + 1) as arguments:

        def filled() -> Cache:
            options = {"return_dict_in_generate": True, **arguments()}
            cache: Cache = cache_of(call_on(model, prompt[:, : scenario.context], 1, options)[1])
            return cache

        cache = filled()

        def run() -> Clock:
            nonlocal cache
            clock, _ = call_on(model, prompt, 1, {CACHE: cache})
            if isinstance(cache, StaticCache):
                cache = filled()
            else:
                cache.crop(-scenario.size)
            return clock

        run()
        clocks = _repeat(run)
        check_served(cache)
        return _first_token(name, clocks, _bytes_of(cache, tokens))


def _chunked(model: Any, name: str, scenario: Scenario) -> dict[str, Any]:
    options: dict[str, Any] = {"prefill_chunk_size": scenario.size}
    if not name.endswith("-capture"):  # which never compiles, and would be switched off
        options["disable_compile"] = True
    with SYSTEMS[name](model, scenario.context + 1) as arguments:
        short = Case(1, min(scenario.context, 2 * scenario.size))
        _, result = call(model, short, 1, {"return_dict_in_generate": True, **options, **arguments()})
        check_served(cache_of(result))
        cache_bytes = _bytes_of(cache_of(result), scenario.context)
        del result  # frees the cache, or lets the next call reuse its buffers
        case = Case(1, scenario.context)
        clocks = _repeat(lambda: call(model, case, 1, {**options, **arguments()})[0])
    return _first_token(name, clocks, cache_bytes)


# --- proposals --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def predictable(model: Any) -> Any:
    """Change a model's weights so that it can be guessed, and return an assistant that often does.

    Args:
        model: A model like Llama, with random weights. The last linear layer of each block changes, and the output.

    Returns:
        A model of its first eighth, with the same weights but for those of the output.
    """
    embedding = model.get_input_embeddings().weight
    tokens = _circle(model).to(embedding.device)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(LAYER_SCALE)
        layer.mlp.down_proj.weight.mul_(LAYER_SCALE)
    output = model.get_output_embeddings().weight.clone()  # which may be tied to the embedding
    output[_after(tokens)] = embedding[tokens]
    model.get_output_embeddings().weight = Parameter(output)

    config = copy.deepcopy(model.config)
    config.num_hidden_layers = max(1, config.num_hidden_layers // 8)
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    with embedding.device:
        assistant = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    assistant.load_state_dict(model.state_dict(), strict=False, assign=True)
    is_wrong = _is_wrong(len(tokens)).to(tokens.device)
    output = output.clone()
    output[_after(tokens)[is_wrong]] *= -1
    assistant.get_output_embeddings().weight = Parameter(output)
    assistant.generation_config = GenerationConfig(
        pad_token_id=0,
        num_assistant_tokens=PROPOSED,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    clean_up()
    return assistant.eval()


def _circle(model: Any) -> Tensor:
    """The tokens of the circle, in order."""
    return torch.arange(1, 1 + min(CIRCLE, model.config.vocab_size - 1))


def _after(tokens: Tensor) -> Tensor:
    """The next tokens on a circle of `len(tokens)`."""
    return tokens.roll(-1)


def _is_wrong(num: int) -> Tensor:
    """For each of `num` tokens whether a guess there is wrong; the same in every run."""
    return torch.rand(num, generator=torch.Generator().manual_seed(0)) < WRONG


def circling_prompt(model: Any, context: int) -> Tensor:
    """A prompt, `[1, context]`, that runs around the circle with jumps; the same in every run."""
    circle = _circle(model)
    places = torch.arange(context)
    last_jump = torch.where(_is_wrong(context), places, 0).cummax(0).values
    starts = torch.randint(len(circle), (context,), generator=torch.Generator().manual_seed(1))
    return circle[(starts[last_jump] + places - last_jump) % len(circle)][None].to(model.device)


def _assisted(model: Any, name: str, scenario: Scenario, assistant: Any) -> dict[str, Any]:
    proposing = {"assistant": {"assistant_model": assistant}, "lookup": {"prompt_lookup_num_tokens": PROPOSED}}
    row: dict[str, Any] = {"system": name, "plain": None, **dict.fromkeys(proposing), "failures": {}}
    tokens: dict[str, list[int]] = {}
    room = 2 * (PROPOSED + 1)  # for proposals beyond the last token
    capacity = scenario.context + scenario.size + room
    # An assistant is patched like its model. Transformers makes it a cache of its own.
    with SYSTEMS[name](model, capacity) as arguments, SYSTEMS[name](assistant, capacity):
        for way, options in proposing.items():
            try:
                row[way], tokens[way] = _decode(model, scenario, options, arguments)
            except Exception as error:  # a system may be able to do one of them only
                failure = error.with_traceback(None)  # which would keep the failed call's tensors alive
                row["failures"][way] = describe_error(failure)
                clean_up()
        if not tokens:
            raise failure
        row["plain"], plain = _decode(model, scenario, {}, arguments)
    for way, found in tokens.items():
        same = [ours == theirs for ours, theirs in zip(found, plain, strict=True)]
        row[way] |= {"equal": all(same), "equal_tokens": [*same, False].index(False)}
    return row


def _check_assistant(assistant: Any) -> None:
    """Refuse figures of a patched assistant if its attention read dequantised tensors."""
    patch = None if assistant is None else patch_of(assistant)
    reasons = set() if patch is None else {reason for counts in patch.fallbacks.values() for reason in counts}
    if reasons:
        raise RuntimeError(f"the assistant's attention runs on dequantised tensors: {'; '.join(sorted(reasons))}")


def _decode(
    model: Any, scenario: Scenario, options: Mapping[str, Any], arguments: Callable[[], dict[str, Any]]
) -> tuple[dict[str, Any], list[int]]:
    """Speed and acceptance of one way of decoding, and its tokens."""

    def run(context: int, num_new: int, **more: Any) -> tuple[Clock, Any]:
        return call_on(model, circling_prompt(model, context), num_new, {**options, **more, **arguments()})

    short = min(scenario.context, WARM_UP_CONTEXT), MIN_ASSISTED
    _, result = run(*short, return_dict_in_generate=True)
    cache = cache_of(result)
    check_served(cache)
    is_captured = isinstance(cache, KVQuantCache) and cache.quant_config.capture
    del cache, result  # frees the cache, or lets the next call reuse its buffers
    run(*short)
    tokens: list[int] = []

    def timed() -> Clock:
        clock, sequences = run(scenario.context, scenario.size)
        tokens[:] = sequences[0, scenario.context :].tolist()
        return clock

    clocks = _repeat(timed)
    _check_assistant(options.get("assistant_model"))
    speeds = [(scenario.size - clock.arrived[0]) / (clock.times[-1] - clock.times[0]) for clock in clocks]
    figures = {
        "tokens_per_s": statistics.median(speeds),
        "calls_tokens_per_s": speeds,
        "accepted": statistics.mean(clocks[-1].arrived[:-1]) - 1,  # the last round may be cut short
        "is_captured": is_captured,
        "peak_bytes": clocks[-1].peak_bytes,
    }
    return figures, tokens


# --- output -----------------------------------------------------------------------------------------------------------


def scenario_table(found: dict[str, Any]) -> Table:
    """The table of one scenario, a row per system."""
    table = Table(title=found["scenario"], title_justify="left")
    is_assisted = found["kind"] == "assisted"
    columns = ["plain tokens/s"] if is_assisted else ["first token s", "cache GB", "peak GB", "calls"]
    for way in ("assistant", "lookup") if is_assisted else ():
        columns += [f"{way} tokens/s", f"accepted of {PROPOSED}", "same tokens", "captured"]
    for column in ("", *columns):
        table.add_column(column, justify="left" if column == "" else "right")
    for row in found["rows"]:
        if is_assisted:
            table.add_row(row["system"], *_decoding_cells(row))
            continue
        sizes = (row["cache_bytes"], row["peak_bytes"])
        cells = [f"{row['first_token_s']:.4f}", *("" if size is None else f"{size / 1e9:.2f}" for size in sizes)]
        table.add_row(row["system"], *cells, str(len(row["calls_s"])))
    return table


def _decoding_cells(row: dict[str, Any]) -> list[str]:
    cells = [f"{row['plain']['tokens_per_s']:.1f}"]
    for way in ("assistant", "lookup"):
        found = row[way]
        if found is None:
            cells += [row["failures"][way], "", "", ""]
            continue
        same = "yes" if found["equal"] else f"the first {found['equal_tokens']}"
        cells += [
            f"{found['tokens_per_s']:.1f}",
            f"{found['accepted']:.2f}",
            same,
            "yes" if found["is_captured"] else "no",
        ]
    return cells
