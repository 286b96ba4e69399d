"""`hf-kvquant generate`: continues prompts under several presets, and prints what each costs."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common.errors import UsageError
from ..common.tables import or_dash, print_table
from ..config import WINDOWS
from ..models.text_config import context_of
from ..presets import UNQUANTIZED
from ..storage.offloading import HOMES
from . import arguments, loading
from .continuation import Summary, run_presets
from .loading import load_calibration, read_text

# What a checkpoint's generation config may ask for although presets are compared here: a cache of its own, none at all,
# or more than one text, of which a stream cannot tell.
_COMPARED = {
    **loading.OTHER_CACHES,
    "use_cache": True,
    "num_beams": 1,
    "num_return_sequences": 1,
    "prompt_lookup_num_tokens": None,
    "stop_strings": None,
}


def run(args: argparse.Namespace) -> None:
    """Run `hf-kvquant generate`."""
    presets = arguments.checked_configs(args)
    texts = checked_prompts(args)
    sampling = checked_sampling(args)
    arguments.check_counts(args, "max_new_tokens")
    device = loading.checked_device(args.device)
    if args.offloading:
        if device.type not in HOMES:
            raise UsageError(
                f"`--offloading` must come with a GPU, got {device}, where codes are in CPU memory anyway. Leave it "
                "out."
            )
        presets = {name: dataclasses.replace(config, offloading=True) for name, config in presets.items()}
    model, tokenizer = loading.load_placed(args)
    load_calibration(model, args.model)
    loading.set_aside(model, args, _COMPARED, "every preset writes one text")
    prompts = tokenize(model, tokenizer, texts, args.max_new_tokens)
    presets = loading.fitting_configs(model, args, presets)
    console = Console(highlight=False)

    def start(index: int, preset: str) -> None:
        if args.no_stream:
            return
        if preset == next(iter(presets)):
            console.rule(f"prompt {index + 1} of {len(texts)}", align="left")
            console.out(texts[index], style="italic")
        console.print(f"[bold cyan]{preset:>{max(map(len, presets))}}[/] …", end="")

    def show(text: str) -> None:
        if not args.no_stream:
            console.out(text, end="")
            console.file.flush()

    how: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "sampling": sampling, "seed": args.seed or 0}
    summaries = run_presets(model, tokenizer, prompts, presets, on_start=start, on_text=show, **how)
    where = f"{model.dtype} on {model.device}".removeprefix("torch.")
    more = "".join(f", {name} {length}" for name in WINDOWS if (length := getattr(args, name)) is not None)
    more += ", offloaded" if args.offloading else ""
    show_summaries(console, summaries, title=f"{args.model}, {where}, {len(prompts)} prompts{more}")


def show_summaries(console: Console, summaries: Sequence[Summary], *, title: str) -> None:
    """Print the table of presets, and below it how its columns were measured."""
    notes = ["Peak cache: bytes allocated at the end of the longest text. tokens/s: 1 / the median decode step."]
    num_scored = max(row.num_scored for row in summaries)
    if num_scored:
        notes.append(
            f"Agreement of the most likely next token and KL divergence: against transformers' DynamicCache, over the "
            f"{num_scored} tokens that '{UNQUANTIZED}' wrote, fed one by one through each preset's cache."
        )
    elif UNQUANTIZED in (row.preset for row in summaries):
        notes.append(
            "Agreement and KL divergence: nothing to compare. The first new token comes from the prompt alone, not "
            "from the cache, and no text has a second one. Use --max-new-tokens 2 or more, or other prompts."
        )
    else:
        notes.append(f"Agreement and KL divergence: add --preset {UNQUANTIZED} to compare with the unquantised cache.")
    if any(row.is_served is False for row in summaries):
        notes.append("Some layers attended to dequantised tensors; the log above says why. Correct, slower.")
    rows = [
        (
            row.preset,
            f"{row.bytes_per_token:,}",
            f"{row.peak_bytes / 1024:,.0f} KiB",
            or_dash(row.tokens_per_second, ".1f"),
            or_dash(row.agreement, ".2%"),
            or_dash(row.kld, ".2e"),
        )
        for row in summaries
    ]
    console.print()
    headings = ("preset", "cache B/token", "peak cache", "tokens/s", "agreement", "KL, nats/token")
    print_table(console, headings, rows, title=title, notes=notes)


def checked_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts of `--prompt` and `--prompt-file`, without white space at their ends."""
    remedy = "Write a prompt into it."
    if not all(text.strip() for text in args.prompt):
        raise UsageError(f"`--prompt` must hold text, got nothing but white space. {remedy}")
    prompts = [*args.prompt, *(read_text("--prompt-file", name, remedy) for name in args.prompt_file)]
    if not prompts:
        raise UsageError("`--prompt` or `--prompt-file` must be given, got neither. Add --prompt 'Some text'.")
    return [text.strip() for text in prompts]


def checked_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `model.generate` that say how the next token is chosen."""
    given = [name for name in ("temperature", "top_p", "seed") if getattr(args, name) is not None]
    if given and not args.sample:
        raise UsageError(f"`{arguments.option(given[0])}` must come with --sample, got it alone. Add --sample.")
    chosen = {name: getattr(args, name) for name in given if name != "seed"}
    if args.repetition_penalty is not None:
        chosen["repetition_penalty"] = args.repetition_penalty
    for name, value in chosen.items():
        if value <= 0 or (name == "top_p" and value > 1):
            expected = "above 0 and at most 1" if name == "top_p" else "positive"
            raise UsageError(f"`{arguments.option(name)}` must be {expected}, got {value}.")
    return {"do_sample": args.sample, **chosen}


def tokenize(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], max_new_tokens: int
) -> list[Tensor]:
    """Token ids of each prompt, `[1, tokens]` int64 on the model's device, checked against the model's context."""
    context = context_of(model)
    prompts = []
    for text in texts:
        ids = tokenizer(text, return_tensors="pt").input_ids
        if context is not None and ids.shape[1] + max_new_tokens > context:
            room = context - ids.shape[1]
            remedy = f"Use --max-new-tokens {room} or less." if room > 0 else "Shorten the prompt."
            raise UsageError(
                f"prompt and `--max-new-tokens` must fit the model's {context} positions, got {ids.shape[1]} and "
                f"{max_new_tokens} tokens. {remedy}"
            )
        prompts.append(ids.to(model.device))
    return prompts
