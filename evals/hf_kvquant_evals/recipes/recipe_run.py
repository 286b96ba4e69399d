"""Runs `eval recipes`. Results are kept per window and per recipe, so an interrupted run loses at most one of them."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_kvquant.attention.backends import without_cudnn
from hf_kvquant.common.errors import UsageError
from hf_kvquant.common.naming import sha256
from hf_kvquant.models.text_config import context_of
from hf_kvquant.presets import UNQUANTIZED

from ..choices import SAMPLE_TOKENS
from ..long_context.prompts import Prompt, Writer
from ..perplexity.segments import FIRST_CHUNK, Segments, cut
from ..preparation import Subject
from ..records import RunRecord, measuring, open_record
from . import drift, needles, quality, tasks
from .interface import Layer, Recipe
from .ours import of_budget
from .recipe_cache import Quantizers, plain_cache, recipe_cache
from .sample import layers_of_model

WHERE = "eval recipes"
PROMPT_TOKENS = 32
SUMMARY = "summary"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(tasks.Options):
    """What is measured: the options of `hf-kvquant eval recipes` with these names."""

    window: int | None = None
    tokens: int | None = None
    prompt: int = FIRST_CHUNK
    context: int = 32768  # at which bits are counted, besides those of the windows
    drift: int = 512
    drift_prompts: int = 8
    drift_together: int = 1  # recipes that write in one batch
    needles: int = 8
    seed: int = 0


class Plan(NamedTuple):
    """What is measured, in tokens."""

    segments: Segments
    prompts: Tensor  # `[texts, tokens]` int64
    asked: list[Prompt]  # needles
    tasks: Mapping[str, Any]  # of lm-eval, by name
    options: Options


def measure(
    subject: Subject,
    source: Mapping[str, Any],
    text: str,
    recipes: Mapping[str, Recipe],
    options: Options,
    *,
    budgets: Sequence[float] = (),
    is_chosen: bool = True,
    output: str | None = None,
) -> RunRecord:
    """Measure a text under recipes, and keep the results in the file `output`, or in memory.

    Each budget of bits is a further recipe, see `ours.of_budget`. Recipes that do not fit the model or the windows are
    left out with a note, or refused if the user has chosen them. The record's part `SUMMARY` has a row per recipe.
    """
    started = time.monotonic()
    model = subject.model
    ids = subject.tokenizer(text, return_tensors="pt", verbose=False).input_ids[0].to(model.device)
    sample, rest = ids[:SAMPLE_TOKENS], ids[SAMPLE_TOKENS:]
    plan = plan_of(subject, rest, options)
    length = plan.segments.length
    recipes = reading(recipes, length, is_chosen)
    prepared = subject.prepare()  # before anything is learned from the model
    recipes = {**recipes, **reading(within(budgets, subject, sample), length, is_chosen)}
    try:
        layers = layers_of_model(model, sample_windows(sample, length, recipes))
        quantizers = fitting(layers, recipes, is_chosen)
    except NotImplementedError as error:
        raise UsageError(f"{subject.name} cannot be measured. {error}") from error
    recipes = {name: recipe for name, recipe in recipes.items() if name in quantizers}
    settings = {
        "evaluation": "recipes",
        **prepared,
        "tokens_sha256": sha256(ids.cpu().numpy().tobytes()),
        "source": source,
        "window": length,
        "begins": plan.segments.begins,
        "first_chunk": options.prompt,
        "sample_tokens": SAMPLE_TOKENS,
        "context": options.context,
        "drift_tokens": options.drift,
        "drift_prompts": options.drift_prompts,
        "drift_together": options.drift_together,
        "needle_prompts": options.needles,
        "seed": options.seed,
        "recipes": {name: recipe.to_dict() for name, recipe in recipes.items()},
        **options.settings(),
    }
    record = open_record(output, settings)
    undone = tasks.undone(record, plan.tasks, options.data, output)
    fill(record, plan, recipes, quantizers, layers)
    tasks.fill(record, WHERE, subject, rest, plan.tasks, undone, recipes, quantizers, options)
    rows = {name: row_of(record, plan, name, recipe, layers[0]) for name, recipe in recipes.items()}
    record.put(SUMMARY, {"recipes": rows, "seconds": round(time.monotonic() - started, 1)})
    return record


def plan_of(subject: Subject, ids: Tensor, options: Options) -> Plan:
    """Cut what is measured out of a tokenised text, `[tokens]` int64."""
    segments = cut(ids, subject.model, window=options.window, tokens=options.tokens, prompt=options.prompt)
    check_drift(subject, options.drift)
    writer = Writer(subject.tokenizer, seed=options.seed) if options.needles else None
    asked = [] if writer is None else needles.prompts(writer, segments.length, options.needles)
    return Plan(segments, prompts_of(ids, options.drift_prompts), asked, tasks.load(subject, ids, options), options)


def check_drift(subject: Subject, drift_tokens: int) -> None:
    """Refuse to write more tokens than the model has positions for."""
    positions = context_of(subject.model)
    if positions is not None and PROMPT_TOKENS + drift_tokens > positions:
        raise UsageError(
            f"`--drift` must be at most {positions - PROMPT_TOKENS}, got {drift_tokens}: {subject.name} has "
            f"{positions} positions, and prompts have {PROMPT_TOKENS} tokens."
        )


def reading(recipes: Mapping[str, Recipe], length: int, is_chosen: bool) -> dict[str, Recipe]:
    """The recipes that have codes in windows of a length. The others would look lossless."""
    found = {}
    for name, recipe in recipes.items():
        if recipe.key.coded(length - 1) and recipe.value.coded(length - 1):
            found[name] = recipe
        elif is_chosen:
            raise UsageError(
                f"`--window` must be longer for {name}, got {length}, of which it keeps every token dense. Leave the "
                "recipe out, or give --dense 0+0."
            )
        else:
            print(f"{WHERE}: {name} is left out: it keeps all {length} tokens of a window dense.", file=sys.stderr)
    return found


def within(budgets: Sequence[float], subject: Subject, sample: Tensor) -> dict[str, Recipe]:
    """The recipes of budgets, found on tokens that are not measured."""
    found: dict[str, Recipe] = {}
    text = str(subject.tokenizer.decode(sample)) if budgets else ""
    for bits in budgets:
        try:
            recipe = of_budget(bits, subject.model, subject.tokenizer, text)
        except (NotImplementedError, ValueError) as error:
            raise UsageError(f"`--bits` must fit {subject.name}, got {bits:g}. {error}") from error
        found[recipe.name] = recipe
    return found


def sample_windows(sample: Tensor, length: int, recipes: Mapping[str, Recipe]) -> Tensor | None:
    """The windows that recipes may learn from, `[windows, tokens]` int64, or `None` if none learns."""
    if not any(recipe.has_sample for recipe in recipes.values()):
        return None
    length = min(length, len(sample))
    return sample[: len(sample) // length * length].view(-1, length)


def prompts_of(ids: Tensor, count: int) -> Tensor:
    """Prompts from evenly spaced places of a text, `[count, tokens]` int64."""
    last = max(0, len(ids) - PROMPT_TOKENS)
    begins = [last * index // count for index in range(count)]
    return torch.stack([ids[begin : begin + PROMPT_TOKENS] for begin in begins])


def fitting(layers: list[Layer], recipes: Mapping[str, Recipe], is_chosen: bool) -> dict[str, Quantizers]:
    """How each recipe that fits quantises each layer."""
    found: dict[str, Quantizers] = {}
    for name, recipe in recipes.items():
        try:
            found[name] = {layer.index: recipe.quantizers(layer) for layer in layers}
        except NotImplementedError as error:
            if is_chosen:
                raise
            print(f"{WHERE}: {name} is left out. {error}", file=sys.stderr)
    if not found:
        raise UsageError("`--recipes` must name one that fits the model, got none that does. See the notes above.")
    return found


def fill(
    record: RunRecord,
    plan: Plan,
    recipes: Mapping[str, Recipe],
    quantizers: Mapping[str, Quantizers],
    layers: list[Layer],
) -> None:
    """Measure what the record does not have yet."""
    model = layers[0].model
    missing = [index for index, begin in enumerate(plan.segments.begins) if record.get(f"window {begin}") is None]
    writers = [UNQUANTIZED, *recipes] if plan.options.drift else []
    writers = [name for name in writers if record.get(f"drift {name}") is None]
    asked = plan.asked if record.get("needles") is None else []
    total = len(missing) * len(recipes) + len(writers) + len(asked)
    with measuring(record, WHERE, total, lower="--window", value=plan.segments.length) as tell:
        for index in missing:
            tell(doing=f"window {index + 1} of {len(plan.segments.begins)}")
            found = quality.compare(model, plan.segments, index, recipes, quantizers, lambda: tell(1))
            record.put(f"window {plan.segments.begins[index]}", found)
        together = plan.options.drift_together
        for names in (writers[begin : begin + together] for begin in range(0, len(writers), together)):
            tell(doing=f"texts of {', '.join(names)}")
            caches = [
                recipe_cache(model, recipes[name], quantizers[name]) if name in recipes else plain_cache(model)
                for name in names
            ]
            seed = plan.options.seed
            with without_cudnn():
                written = drift.write(
                    model, plan.prompts, plan.options.drift, caches, seed=seed, on_token=lambda: tell(0)
                )
            for name, each in zip(names, written, strict=True):
                record.put(f"drift {name}", drift.to_part(each))
                tell(1)
        if asked:
            tell(doing="needles")
            record.put("needles", needles.score(model, asked, recipes, quantizers, lambda: tell(1)))


def row_of(record: RunRecord, plan: Plan, name: str, recipe: Recipe, layer: Layer) -> dict[str, Any]:
    """The row of a recipe: its bits, its quality, its drift, its needles and its tasks."""
    shape = layer.num_kv_heads, layer.head_dim
    windows = [(record.get(f"window {begin}") or {})[name] for begin in plan.segments.begins]
    row = {
        "family": recipe.family,
        "source": recipe.source,
        "bits": recipe.bits(plan.options.context, *shape),
        "bits_read": recipe.bits_read(plan.segments.length - 1, *shape),
        "shared_bytes": recipe.shared_bytes(*shape),
        **quality.summarize(windows),
        "drift": None,
        "needles": None,
        "tasks": None,
    }
    asked = record.get("needles")
    if asked is not None:
        row["needles"] = needles.summarize(asked, name)
    part, baseline = record.get(f"drift {name}"), record.get(f"drift {UNQUANTIZED}")
    if part is not None and baseline is not None:
        row["drift"] = drift.summarize(part, baseline)
    if plan.tasks:
        parts = [record.get(tasks.PART + task) or {} for task in plan.tasks]
        row["tasks"] = tasks.summarize(parts, name, recipe)
    return row
