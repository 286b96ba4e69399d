"""What the commands of `hf-kvquant` share: checked arguments, loading a model, and how one ends early.

What a command does is its own module's; `cli.py` turns what is raised here into a line on stderr and an exit code.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ._errors import did_you_mean
from .config import PRESETS
from .transforms.injection import inject_key_bias, inject_key_outliers
from .transforms.smoothing import load_smoothing
from .transforms.smoothing_file import FILE_NAME

DTYPES = ("auto", "float32", "bfloat16", "float16")


class UsageError(Exception):
    """A mistake in what the user gave. Its text is all that is shown."""


class Refused(Exception):
    """A preset that the model does not bear. Its text is shown below the findings."""


def checked_presets(names: Sequence[str] | None, where: str, default: Sequence[str]) -> list[str]:
    """The presets to run, each once, in the order given; `default` where none is."""
    for name in names or ():
        if name not in PRESETS:
            raise UsageError(
                f"{where}: `--preset` must be one of {', '.join(PRESETS)}, got '{name}'.{did_you_mean(name, PRESETS)}"
            )
    return list(dict.fromkeys(names or default))


def read_text(name: str, where: str) -> str:
    """A text file; `where` opens the message when it is none."""
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"{where} must be a text file, got {name}: {reason}.") from error


def checked_device(name: str | None, where: str) -> torch.device:
    """The device that a user names, or the best one."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"{where}: `--device` must be a torch device such as cpu or cuda:0, got '{name}'.") from error
    available = torch.cuda.device_count() if device.type == "cuda" else 1
    if (device.index or 0) >= available:
        raise UsageError(
            f"{where}: `--device` must be there, got '{name}' with {available} CUDA devices. Use --device cpu, or see "
            "hf-kvquant env."
        )
    return device


def load(name: str, dtype: str, device: torch.device, where: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer."""
    path = Path(name).expanduser()
    # A hub id has at most one slash and no folder here that it could be meant to lie in.
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1 or ("/" in name and path.parent.exists())
    if looks_local and not (path / "config.json").is_file():
        found = "a folder without config.json" if path.is_dir() else "no such folder"
        raise UsageError(
            f"{where}: `MODEL` must be a folder with a transformers model or a hub id, got {name}: {found}."
        )
    transformers.utils.logging.disable_progress_bar()
    source = str(path) if path.exists() else name
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(
            f"{where}: `MODEL` must be a folder with a causal language model and its tokenizer, or a hub id, "
            f"got {name}: {reason}"
        ) from error
    return model.to(device).eval(), tokenizer


def load_calibration(model: PreTrainedModel, name: str) -> None:
    """Give a model the centres and factors that `calibrate` left in its folder, if there are any."""
    path = Path(name).expanduser() / FILE_NAME
    if not path.is_file():
        return
    try:
        load_smoothing(model, path)
    except (NotImplementedError, ValueError) as error:
        # Results are right without; but it is said, for they are less close.
        print(f"hf-kvquant: warning: {path} is left out. {error}", file=sys.stderr)


def add_injections(parser: argparse.ArgumentParser) -> None:
    """The options of evaluations that make keys harder to quantise."""
    parser.add_argument(
        "--inject-outliers",
        type=float,
        metavar="F",
        help="first make three RoPE pairs of every head of keys F times as large, and queries so much smaller",
    )
    parser.add_argument(
        "--inject-bias", type=float, metavar="NORM", help="first add a constant of this norm to every head of keys"
    )


def inject(model: PreTrainedModel, args: argparse.Namespace, where: str) -> None:
    """Make a model harder, as far as the arguments ask for that.

    Raises:
        UsageError: Its keys are not made in a way that is known, or a number has no meaning.
    """
    try:
        if args.inject_outliers is not None:
            inject_key_outliers(model, factor=args.inject_outliers)
        if args.inject_bias is not None:
            inject_key_bias(model, args.inject_bias)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise UsageError(f"{where}: nothing can be injected into {args.model}. {error}") from error
