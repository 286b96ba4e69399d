"""`hf-kvquant calibrate`: saves a model with centres and factors, or says which preset each of its layers tolerates."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence

from rich.console import Console
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.utils import IMAGE_PROCESSOR_NAME, PROCESSOR_NAME, VIDEO_PROCESSOR_NAME

from ..calibration.choices import CALIBRATED_PRESET, FILE_NAME
from ..calibration.smoothing import smooth_attention
from ..calibration.value_rotation import rotate_values
from ..common.errors import PreflightError, RefusedResult, UsageError
from ..common.progress import without_bars
from ..preflight.check import run_preflight
from ..preflight.signals import reason_of
from .arguments import checked_output
from .loading import file_of, load_calibration, load_placed, read_text


def run(args: argparse.Namespace) -> None:
    """Run `hf-kvquant calibrate`."""
    if args.check:
        check(args, args.preset)
    else:
        calibrate(args, args.preset or CALIBRATED_PRESET)


def calibrate(args: argparse.Namespace, preset: str) -> None:
    """Calibrate a model and save it."""
    texts = checked_texts(args.text_file)
    if args.output is None:
        raise UsageError("`--output` must be given, got none. Name a new folder, or add --check to look only.")
    expected = "a new or an empty folder"
    output = checked_output(args.output, expected=expected, is_folder=True, with_parents=True)
    if output.exists() and any(output.iterdir()):
        raise UsageError(f"`--output` must be {expected}, got {args.output}: a folder that is not empty. Name another.")
    model, tokenizer = load_placed(args)
    check_whole(model, args.model)
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
        raise UsageError(f"{args.model} cannot be calibrated. {error}") from error
    try:
        output.mkdir(parents=True, exist_ok=True)
        result.save(output / FILE_NAME)  # first: it took the time
        with without_bars():
            model.save_pretrained(output)
        tokenizer.save_pretrained(output)
        for name in (PROCESSOR_NAME, IMAGE_PROCESSOR_NAME, VIDEO_PROCESSOR_NAME):
            if (path := file_of(args.model, name)) is not None:
                shutil.copyfile(path, output / name)  # of pictures and sounds, which calibrate does not read
    except (NotImplementedError, ValueError) as error:
        raise UsageError(
            f"{args.model} must have weights that transformers can save, got others ({reason_of(error)}). The factors "
            f"are in {output / FILE_NAME}. Copy this file into the folder of the model, where commands find it."
        ) from error
    except (OSError, SafetensorError) as error:
        raise UsageError(
            f"`--output` must have room for the model, got {args.output}: {error}. Make room, or name another folder, "
            "and run it again."
        ) from error
    console = Console(highlight=False)
    console.print(result.table(f"{args.model}, {preset}, {model.dtype}".replace("torch.", "")))
    for note in result.notes():
        console.print(note, markup=False)
    console.print(f"Saved the model and {FILE_NAME} to {output}.", soft_wrap=True)


def check_whole(model: PreTrainedModel, name: str) -> None:
    """Refuse a checkpoint of which only the text model was loaded: what is saved would lack the rest.

    Raises:
        UsageError: The checkpoint is of another class.
    """
    path = file_of(name, "config.json")
    held = json.loads(path.read_text(encoding="utf-8")).get("architectures") if path is not None else None
    if held and type(model).__name__ not in held:
        raise UsageError(
            f"`MODEL` must be a causal language model as a whole, got {name}, a {held[0]}, of which "
            f"{type(model).__name__} is a part: the folder that calibrate saves would lack the rest. Load the whole "
            "model in Python, call hf_kvquant.smooth_attention on it and save_pretrained. See docs/calibration.md."
        )


def check(args: argparse.Namespace, preset: str | None) -> None:
    """Check which preset each layer tolerates, or whether all layers tolerate the given one."""
    if args.output is not None:
        raise UsageError(
            f"`--output` must be left out with --check, got {args.output}. Nothing is saved: check the model that "
            "calibrate has saved."
        )
    texts = checked_texts(args.text_file) if args.text_file else None
    model, tokenizer = load_placed(args)
    load_calibration(model, args.model)
    try:
        reader = None if texts is None else tokenizer
        result = run_preflight(
            model, preset, tokenizer=reader, texts=texts, bits=args.bits, measure=not args.weights_only
        )
    except (NotImplementedError, TypeError, ValueError) as error:
        raise UsageError(f"{args.model} cannot be checked. {error}") from error
    console = Console(highlight=False)
    for index, reason in result.left_out.items():
        console.print(f"layer {index} is left out: {reason}", style="dim")
    console.print(result.table(f"{args.model}, {model.dtype} on {model.device}".replace("torch.", "")))
    for note in result.notes():
        console.print(note)
    console.print(
        "Key bias: the constant in all keys of a head, divided by their spread. Channels: the largest channel divided "
        "by the median one. KL: divergence of the next token if only this layer is quantised.",
        style="dim",
    )
    try:
        result.approved()
    except PreflightError as error:
        if not args.force:
            text = str(error).removeprefix("run_preflight: ")  # the command names itself
            raise RefusedResult(text.replace("force=True", "--force")) from error
        console.print(f"Not safe: {error}", style="bold red")
    console.print(f"Use it with: hf_kvquant.patch(model, {result.spelled()})", soft_wrap=True)


def checked_texts(names: Sequence[str]) -> list[str]:
    """The texts of `--text-file`."""
    if not names:
        raise UsageError("`--text-file` must be given, got none. Name a file of a few thousand words.")
    return [read_text("--text-file", name) for name in names]
