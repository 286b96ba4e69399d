"""The command `hf-kvquant`: its arguments, how it shows results, and what it prints when something is wrong.

`generate` continues prompts under one or more presets and prints a table (`generation.py`). `calibrate` finds centres
and smoothing factors of keys and saves the model with them (`transforms/smoothing.py`); with `--check` it only says
which preset each layer tolerates (`preflight.py`). `eval` measures quality (`evaluation/cli.py`). `env` says what is
installed, what is missing and how to get it.

A mistake in the arguments ends with one line on stderr and exit code 2. A refused preset, or a measurement that fails
its own checks, ends with one line and exit code 1. A bug ends with a traceback.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.table import Table
from rich.text import Text
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .calibration.smoothing import Mode, smooth_attention
from .calibration.smoothing_file import FILE_NAME, HEADINGS, SmoothingResult
from .calibration.smoothing_file import cells as smoothing_cells
from .calibration.value_rotation import rotate_values
from .common.progress import without_bars
from .common.version import __version__
from .config import PRESETS, WINDOWS
from .environment import environment
from .evaluation import cli as evaluation
from .evaluation.arguments import (
    Interrupted,
    Parser,
    Refused,
    UsageError,
    add_placement,
    add_presets,
    check_counts,
    checked_configs,
    checked_device,
    checked_output,
    checked_preset,
    fitting_configs,
    load,
    load_calibration,
    load_placed,
    read_text,
)
from .evaluation.generation import UNQUANTIZED, Summary, run_presets
from .models.text_config import context_of
from .preflight.check import run_preflight
from .preflight.verdict import Preflight, PreflightError, cells
from .storage.offloading import HOMES

COMPARED_PRESETS = (UNQUANTIZED, "int8", "int4")
# Options that say how to calibrate, and their defaults.
CALIBRATION: dict[str, Any] = {"mode": "fold", "no_centers": False, "no_factors": False, "rotate_values": False}
CALIBRATION |= {"tokens": 16384, "window": 2048, "batch_size": 1}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Arguments without the program's name; `None` takes those of the process.

    Returns:
        The exit code: 0, 1 for a refused preset, 2 for a mistake in the arguments, 130 when interrupted.
    """
    return run(parser().parse_args(argv))


def run(args: argparse.Namespace) -> int:
    """Run the command in `args.run`, and print in a line why it ended early. Returns the exit code."""
    try:
        args.run(args)
    except UsageError as error:
        print(f"hf-kvquant: error: {error}", file=sys.stderr)
        return 2
    except Refused as error:
        print(f"hf-kvquant: refused: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:
        left = f" {interrupt}" if isinstance(interrupt, Interrupted) else ""
        print(f"hf-kvquant: interrupted.{left}", file=sys.stderr)
        return 130
    return 0


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    root = Parser(
        prog="hf-kvquant", description="Generate text with a quantised key-value cache, and see what it costs."
    )
    root.add_argument("--version", action="version", version=f"hf-kvquant {__version__}")
    commands = root.add_subparsers(required=True, metavar="COMMAND")
    generate = commands.add_parser(
        "generate",
        help="continue prompts under one or more presets",
        description="Continue prompts under each preset, streaming the text, and print a table. If the unquantised "
        f"cache ('{UNQUANTIZED}') is among the presets, the text that it wrote is fed token by token through each "
        "preset's own cache (teacher forcing), to compare them.",
    )
    generate.add_argument("model", metavar="MODEL", help="a folder or a hub id")
    generate.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="text to continue; repeatable")
    generate.add_argument(
        "--prompt-file", action="append", default=[], metavar="FILE", help="a file that holds one prompt; repeatable"
    )
    add_presets(generate, COMPARED_PRESETS)
    generate.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="per prompt (default: 128)")
    add_placement(generate)
    generate.add_argument("--sample", action="store_true", help="sample instead of taking the most likely token")
    generate.add_argument("--temperature", type=float, metavar="X", help="with --sample (default: 1)")
    generate.add_argument("--top-p", type=float, metavar="X", help="with --sample (default: 1)")
    generate.add_argument(
        "--repetition-penalty", type=float, metavar="X", help="above 1 makes repeated tokens less likely (default: 1)"
    )
    generate.add_argument("--seed", type=int, metavar="N", help="with --sample, set before each text (default: 0)")
    generate.add_argument(
        "--offloading", action="store_true", help="on a GPU: keep codes in CPU memory, except those of two layers"
    )
    generate.add_argument("--no-stream", action="store_true", help="print only the table, not the text")
    generate.set_defaults(run=run_generate)
    calibrate = commands.add_parser(
        "calibrate",
        help="find centres and smoothing factors of keys, and save the model with them",
        description="Find what the transforms of a preset need, on the given text: the centre of each layer's keys, "
        "and factors that make outlier channels of keys smaller and those of queries larger, where that reduces the "
        "error. Factors are folded into the weights, which leaves logits bitwise the same. The model is saved, and "
        f"next to it {FILE_NAME} with the rest. With --check, nothing is changed or saved: the command looks at the "
        "weights and at how much quantising a layer changes the next token, and says which preset each layer "
        "tolerates, or whether all layers tolerate the given one.",
    )
    calibrate.add_argument("model", metavar="MODEL", help="a folder or a hub id")
    calibrate.add_argument(
        "--text-file", action="append", default=[], metavar="FILE", help="text to calibrate on; repeatable"
    )
    calibrate.add_argument(
        "--output", metavar="DIR", help="a new folder for the model and the factors; not with --check"
    )
    calibrate.add_argument(
        "--preset",
        metavar="NAME",
        help=f"one of {', '.join(PRESETS)} (default: int4; with --check, the smallest that each layer tolerates)",
    )
    calibrate.add_argument(
        "--check", action="store_true", help="only check; without --text-file, on text that the model writes"
    )
    calibrate.add_argument("--weights-only", action="store_true", help="with --check, do not run the model on text")
    calibrate.add_argument("--force", action="store_true", help="with --check, exit with 0 whatever is found")
    calibrate.add_argument(
        "--mode",
        choices=get_args(Mode),
        help="fold: factors go into the weights; online: caches apply them; auto: into the weights where possible "
        "(default: %(default)s)",
    )
    calibrate.add_argument("--no-centers", action="store_true", help="leave centres as they are")
    calibrate.add_argument("--no-factors", action="store_true", help="find centres only")
    calibrate.add_argument(
        "--rotate-values", action="store_true", help="first rotate values, through the weights, which rounds these once"
    )
    calibrate.add_argument("--tokens", type=int, metavar="N", help="most tokens to calibrate on (default: %(default)s)")
    calibrate.add_argument("--window", type=int, metavar="N", help="tokens per forward (default: %(default)s)")
    calibrate.add_argument("--batch-size", type=int, metavar="N", help="windows per forward (default: %(default)s)")
    add_placement(calibrate)
    calibrate.set_defaults(run=run_calibrate, **CALIBRATION)
    evaluation.add_parser(commands)
    env = commands.add_parser("env", help="show versions, kernels and devices, and what is missing")
    env.set_defaults(run=run_env)
    return root


# --- generate ---------------------------------------------------------------------------------------------------------


def run_generate(args: argparse.Namespace) -> None:
    """`hf-kvquant generate`.

    Raises:
        UsageError: An argument is invalid, or does not fit the model.
    """
    presets = checked_configs(args, "generate")
    texts = checked_prompts(args)
    sampling = checked_sampling(args)
    check_counts(args, ("max_new_tokens",), "generate")
    device = checked_device(args.device, "generate")
    if args.offloading:
        if device.type not in HOMES:
            raise UsageError(
                f"generate: `--offloading` must come with a GPU, got {device}, where codes are in CPU memory anyway. "
                "Leave it out."
            )
        presets = {name: dataclasses.replace(config, offloading=True) for name, config in presets.items()}
    model, tokenizer = load(args.model, args.dtype, device, "generate")
    load_calibration(model, args.model)
    prompts = tokenize(model, tokenizer, texts, args.max_new_tokens)
    presets = fitting_configs(model, args, presets, "generate")

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

    summaries = run_presets(
        model,
        tokenizer,
        prompts,
        presets,
        max_new_tokens=args.max_new_tokens,
        sampling=sampling,
        seed=args.seed or 0,
        on_start=start,
        on_text=show,
    )
    where = f"{model.dtype} on {model.device}".removeprefix("torch.")
    windows = "".join(f", {name} {length}" for name in WINDOWS if (length := getattr(args, name)))
    windows += ", offloaded" if args.offloading else ""
    show_summaries(console, summaries, title=f"{args.model}, {where}, {len(prompts)} prompts{windows}")


def show_summaries(console: Console, summaries: Sequence[Summary], *, title: str) -> None:
    """Print the table of presets, and below it how its columns were measured."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("preset")
    for heading in ("cache B/token", "peak cache", "tokens/s", "agreement", "KL, nats/token"):
        table.add_column(heading, justify="right")
    for row in summaries:
        table.add_row(
            row.preset,
            f"{row.bytes_per_token:,}",
            f"{row.peak_bytes / 1024:,.0f} KiB",
            "-" if row.tokens_per_second is None else f"{row.tokens_per_second:.1f}",
            "-" if row.agreement is None else f"{row.agreement:.2%}",
            "-" if row.kld is None else f"{row.kld:.2e}",
        )
    console.print()
    console.print(table)
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
    for note in notes:
        console.print(note, style="dim")


def checked_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts of `--prompt` and `--prompt-file`, without white space at their ends."""
    prompts = [("`--prompt`", text) for text in args.prompt]
    for name in args.prompt_file:
        prompts.append((f"`--prompt-file` {name}", read_text(name, "generate: `--prompt-file`")))
    if not prompts:
        raise UsageError(
            "generate: `--prompt` or `--prompt-file` must be given, got neither. Add --prompt 'Some text'."
        )
    for where, text in prompts:
        if not text.strip():
            raise UsageError(f"generate: {where} must hold text, got nothing but white space. Write a prompt into it.")
    return [text.strip() for _, text in prompts]


def checked_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `model.generate` that say how the next token is chosen."""
    given = [name for name in ("temperature", "top_p", "seed") if getattr(args, name) is not None]
    if given and not args.sample:
        option = "--" + given[0].replace("_", "-")
        raise UsageError(f"generate: `{option}` must come with --sample, got it alone. Add --sample.")
    chosen = {name: getattr(args, name) for name in given if name != "seed"}
    if args.repetition_penalty is not None:
        chosen["repetition_penalty"] = args.repetition_penalty
    for name, value in chosen.items():
        if value <= 0 or (name == "top_p" and value > 1):
            expected = "above 0 and at most 1" if name == "top_p" else "positive"
            raise UsageError(f"generate: `--{name.replace('_', '-')}` must be {expected}, got {value}.")
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
                f"generate: prompt and `--max-new-tokens` must fit the model's {context} positions, got {ids.shape[1]} "
                f"and {max_new_tokens} tokens. {remedy}"
            )
        prompts.append(ids.to(model.device))
    return prompts


# --- calibrate --------------------------------------------------------------------------------------------------------


def run_calibrate(args: argparse.Namespace) -> None:
    """`hf-kvquant calibrate`.

    Raises:
        UsageError: An argument is invalid, or does not fit the model.
    """
    for option in ("weights_only", "force"):
        if getattr(args, option) and not args.check:
            name = option.replace("_", "-")
            raise UsageError(f"calibrate: `--{name}` must come with --check, got it alone. Add --check.")
    for option, default in CALIBRATION.items() if args.check else ():
        if getattr(args, option) != default:
            name = option.replace("_", "-")
            raise UsageError(
                f"calibrate: `--{name}` must come without --check, which calibrates nothing, got both. Leave out one."
            )
    if args.weights_only and args.text_file:
        raise UsageError(
            "calibrate: `--text-file` must come without --weights-only, which reads no text, got both. Leave out one."
        )
    preset = None if args.preset is None else checked_preset(args.preset, "calibrate")
    if args.check:
        run_check(args, preset)
        return
    preset = preset or "int4"
    texts = checked_texts(args.text_file)
    output = new_folder(args.output)
    model, tokenizer = load_placed(args, "calibrate")
    try:
        if args.rotate_values:
            rotate_values(model)  # first: the file of factors identifies the weights that are saved
        result = smooth_attention(
            model,
            tokenizer,
            texts,
            preset,
            mode=args.mode,
            centers=not args.no_centers,
            factors=not args.no_factors,
            num_tokens=args.tokens,
            window=args.window,
            batch_size=args.batch_size,
        )
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise UsageError(f"calibrate: {args.model} cannot be calibrated. {error}") from error
    try:
        with without_bars():
            model.save_pretrained(output)
        tokenizer.save_pretrained(output)
        result.save(output / FILE_NAME)
    except (OSError, SafetensorError) as error:
        raise UsageError(
            f"calibrate: `--output` must have room for the model, got {args.output}: {error}. Make room, or name "
            "another folder, and run it again."
        ) from error
    console = Console(highlight=False)
    show_smoothing(console, result, title=f"{args.model}, {preset}, {model.dtype}".replace("torch.", ""))
    console.print(f"Saved the model and {FILE_NAME} to {output}.", soft_wrap=True)


def show_smoothing(console: Console, result: SmoothingResult, *, title: str) -> None:
    """Print the table of layers, and below it what its columns mean."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for layer in result.layers:
        table.add_row(*smoothing_cells(layer))
    console.print(table)
    for note in result.notes():
        console.print(note, markup=False)


def run_check(args: argparse.Namespace, preset: str | None) -> None:
    """`hf-kvquant calibrate --check`.

    Raises:
        Refused: The given preset would corrupt what the model writes, or cannot be judged.
        UsageError: An argument is invalid, or does not fit the model.
    """
    if args.output is not None:
        raise UsageError(
            f"calibrate: `--output` must be left out with --check, got {args.output}. Nothing is saved: check the "
            "model that calibrate has saved."
        )
    texts = checked_texts(args.text_file) if args.text_file else None
    model, tokenizer = load_placed(args, "calibrate")
    load_calibration(model, args.model)
    try:
        result = run_preflight(
            model,
            preset,
            tokenizer=None if texts is None else tokenizer,
            texts=texts,
            measure=not args.weights_only,
        )
    except (NotImplementedError, TypeError, ValueError) as error:
        raise UsageError(f"calibrate: {args.model} cannot be checked. {error}") from error
    console = Console(highlight=False)
    where = f"{model.dtype} on {model.device}".removeprefix("torch.")
    show_preflight(console, result, title=f"{args.model}, {where}")
    try:
        result.approved()
    except PreflightError as error:
        if not args.force:
            raise Refused(str(error).replace("force=True", "--force")) from error
        console.print(f"Not safe: {error}", style="bold red")
    console.print(f"Use it with: hf_kvquant.patch(model, {result.spelled()})", soft_wrap=True)


def show_preflight(console: Console, result: Preflight, *, title: str) -> None:
    """Print the table of layers, and below it what its columns mean."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for heading in ("layer", "formats", "key bias", "channels", "KL, nats/token", "remarks"):
        table.add_column(heading, justify="left" if heading in ("formats", "remarks") else "right", overflow="fold")
    harmful = {finding.layer_idx for finding in result.problems}
    for layer in result.layers:
        style = "red" if layer.layer_idx in harmful else None
        table.add_row(str(layer.layer_idx), layer.name, *cells(layer), Text(layer.remarks()), style=style)
    for index, reason in result.left_out.items():
        console.print(f"layer {index} is left out: {reason}", style="dim")
    console.print(table)
    for note in result.notes():
        console.print(note)
    console.print(
        "Key bias: the constant in all keys of a head, divided by their spread. Channels: the largest channel divided "
        "by the median one. KL: divergence of the next token if only this layer is quantised.",
        style="dim",
    )


def checked_texts(names: Sequence[str]) -> list[str]:
    """The texts of `--text-file`."""
    if not names:
        raise UsageError("calibrate: `--text-file` must be given, got none. Name a file of a few thousand words.")
    texts = [read_text(name, "calibrate: `--text-file`") for name in names]
    for name, text in zip(names, texts, strict=True):
        if not text.strip():
            raise UsageError(
                f"calibrate: `--text-file` {name} must hold text, got nothing but white space. Name another file."
            )
    return texts


def new_folder(name: str | None) -> Path:
    """The folder of `--output`, which must not hold anything yet."""
    if name is None:
        raise UsageError(
            "calibrate: `--output` must be given, got none. Name a new folder, or add --check to look only."
        )
    expected = "a new or an empty folder"
    path = checked_output(name, "calibrate", expected=expected, is_folder=True, with_parents=True)
    if path.exists() and any(path.iterdir()):
        raise UsageError(
            f"calibrate: `--output` must be {expected}, got {name}: a folder that is not empty. Name another."
        )
    return path


# --- env --------------------------------------------------------------------------------------------------------------


def run_env(args: argparse.Namespace) -> None:
    """`hf-kvquant env`."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in environment().items():
        table.add_row(name, Text(value))  # brackets, as in hf-kvquant[eval], are no markup here
    Console(highlight=False).print(table)
