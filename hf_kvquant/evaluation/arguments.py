"""Shared by the commands of `hf-kvquant`: checked arguments, names of configs, loading a model, exceptions.

Each command is in a module of its own. `cli.py` turns the exceptions into a line on stderr and an exit code.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..calibration.smoothing import load_smoothing
from ..calibration.smoothing_file import FILE_NAME
from ..common.errors import did_you_mean
from ..common.output import why_unwritable
from ..common.progress import without_bars
from ..config import PRESETS, WINDOWS, KVQuantConfig
from ..patching import patched
from .fidelity import is_out_of_memory

DTYPES = ("auto", "float32", "bfloat16", "float16")
# Suffix of a preset's name for its naive baseline, which shows how much transforms and clipping gain.
UNTRANSFORMED = "-untransformed"


class UsageError(Exception):
    """A mistake in the user's input. Only its text is shown."""


class Refused(Exception):
    """A negative result: a preset that the model does not tolerate, or a measurement that fails its own checks."""


class Interrupted(KeyboardInterrupt):
    """An interruption. Its text says what has been kept of the run."""


class Parser(argparse.ArgumentParser):
    """A parser that reports a mistake in one line, without the long usage text."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong with the arguments and exit with code 2."""
        program, _, command = self.prog.partition(" ")
        where = f"{command}: " if command else ""
        end = "" if message.endswith("?") else "."
        self.exit(2, f"{program}: error: {where}{message}{end} See {self.prog} --help.\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuse unknown arguments here, so that hints name the options of this command and not of the root parser."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            option = unknown[0].partition("=")[0]
            hint = did_you_mean(option, self._option_string_actions)
            self.error(f"there is no argument '{option}'{'.' if hint else ''}{hint}")
        return known, unknown


def add_placement(parser: argparse.ArgumentParser, more: str = "") -> None:
    """Add the options that say how a model is loaded. `load_placed` reads them.

    Args:
        parser: Receives them.
        more: Added to the help of the dtype.
    """
    parser.add_argument(
        "--dtype", choices=DTYPES, default="auto", help=f"dtype of the model{more} (default: the checkpoint's)"
    )
    parser.add_argument("--device", metavar="NAME", help="such as cpu or cuda:0 (default: cuda where there is a GPU)")


def add_presets(parser: argparse.ArgumentParser, default: Iterable[str], more: str = "") -> None:
    """Add the options that say which configs a command runs. `checked_configs` and `fitting_configs` read them.

    Args:
        parser: Receives them.
        default: Presets to run if none is named.
        more: Added to the help of the presets.
    """
    parser.add_argument(
        "--preset",
        action="append",
        metavar="NAME",
        help=f"one of {', '.join(PRESETS)}; append {UNTRANSFORMED} for its formats alone, and :4+128 to keep the first "
        f"4 and the newest 128 tokens dense; repeatable (default: {', '.join(default)}){more}",
    )
    parser.set_defaults(default_presets=tuple(default))
    for name, which in zip(WINDOWS, ("first", "newest"), strict=True):
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=int,
            default=0,
            metavar="N",
            help=f"how many of the {which} tokens stay dense, unless a preset's name says (default: 0)",
        )


def checked_configs(args: argparse.Namespace, where: str) -> dict[str, KVQuantConfig]:
    """The configs to run, by name, each once and in the order given; the command's defaults if none is given.

    Raises:
        UsageError: A name or a length is invalid.
    """
    windows = {name: getattr(args, name) for name in WINDOWS}
    for name, length in windows.items():
        if length < 0:
            raise UsageError(f"{where}: `--{name.replace('_', '-')}` must be at least 0, got {length}.")
    return {name: config_of(name, where, windows) for name in dict.fromkeys(args.preset or args.default_presets)}


def config_of(name: str, where: str, windows: Mapping[str, int] | None = None) -> KVQuantConfig:
    """The config that a name stands for: a preset or its formats alone, also with windows: `int4-untransformed:4+128`.

    Args:
        name: As typed.
        where: Starts error messages.
        windows: For a name that has none, if the preset quantises anything.

    Raises:
        UsageError: The name is invalid.
    """
    formats, has_windows, lengths = name.partition(":")
    preset = formats.removesuffix(UNTRANSFORMED)
    checked_preset(preset, where, spelled=formats)
    options: dict[str, Any] = {}
    if has_windows:
        found = re.fullmatch(r"(\d+)\+(\d+)", lengths)
        if found is None:
            raise UsageError(
                f"{where}: `--preset` must give windows as FIRST+NEWEST tokens, got '{lengths}'. Write for example "
                f"{formats}:4+128."
            )
        options = dict(zip(WINDOWS, map(int, found.groups()), strict=True))
    elif any(side.is_quantized for side in PRESETS[preset]):
        options = dict(windows or {})
    if formats != preset:
        options.update(untransformed(preset))
    try:
        return KVQuantConfig.from_preset(preset, **options)
    except ValueError as error:
        raise UsageError(f"{where}: `--preset {name}` is invalid. {error}") from error


def untransformed(preset: str) -> dict[str, Any]:
    """Options that turn a preset into its naive baseline, without transforms and without clipping."""
    key, value = (dataclasses.replace(side, clip_ratio=1.0) for side in PRESETS[preset])
    return {"transforms": [], "key": key, "value": value}


def checked_preset(name: str, where: str, *, spelled: str | None = None) -> str:
    """The name, if it is a preset's. Errors quote `spelled`, which it was taken from."""
    if name not in PRESETS:
        known = [*PRESETS, *(preset + UNTRANSFORMED for preset in PRESETS)]
        spelled = spelled or name
        raise UsageError(
            f"{where}: `--preset` must be one of {', '.join(PRESETS)}, got '{spelled}'.{did_you_mean(spelled, known)}"
        )
    return name


def check_counts(args: argparse.Namespace, names: Iterable[str], where: str) -> None:
    """Refuse options that were given and are below 1.

    Raises:
        UsageError: One is.
    """
    for name in names:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"{where}: `--{name.replace('_', '-')}` must be at least 1, got {value}.")


def fitting_configs(
    model: PreTrainedModel, args: argparse.Namespace, configs: Mapping[str, KVQuantConfig], where: str
) -> dict[str, KVQuantConfig]:
    """The configs that a model can be patched with, found before anything runs.

    Presets that the user typed must fit. A default that does not fit is left out, and a line on stderr says why.

    Raises:
        UsageError: A preset that the user typed does not fit, or no default that quantises anything fits.
    """
    fitting: dict[str, KVQuantConfig] = {}
    left_out: dict[str, Exception] = {}
    for preset, config in configs.items():
        try:
            with patched(model, config):
                fitting[preset] = config
        except (NotImplementedError, TypeError, ValueError) as error:
            if args.preset:
                raise UsageError(f"{where}: `--preset {preset}` does not fit {args.model}. {error}") from error
            left_out[preset] = error
    if left_out and not any(config.key.is_quantized or config.value.is_quantized for config in fitting.values()):
        reason = next(iter(left_out.values()))
        raise UsageError(f"{where}: none of {', '.join(left_out)} fits {args.model}. {reason}") from reason
    for preset, reason in left_out.items():
        print(f"hf-kvquant: {where}: {preset} does not fit {args.model} and is left out. {reason}", file=sys.stderr)
    return fitting


def checked_output(
    name: str, where: str, *, expected: str = "a file in a folder that is there", **options: bool
) -> Path:
    """The path of `--output`, after a test that it can be written.

    Args:
        name: As typed.
        where: Starts error messages.
        expected: What the path must be.
        **options: Of `why_unwritable`.

    Raises:
        UsageError: Nothing can be written there.
    """
    path = Path(name).expanduser()
    reason = why_unwritable(path, **options)
    if reason is not None:
        raise UsageError(f"{where}: `--output` must be {expected}, got {name}: {reason}. Name another.")
    return path


def read_text(name: str, where: str) -> str:
    """The content of a text file. `where` starts the message if it is not one."""
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"{where} must be a text file, got {name}: {reason}.") from error


def checked_device(name: str | None, where: str) -> torch.device:
    """The device that a user names, or the best one there is."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"{where}: `--device` must be a torch device such as cpu or cuda:0, got '{name}'.") from error
    available = torch.cuda.device_count() if device.type == "cuda" else 1
    if (device.index or 0) >= available:
        raise UsageError(
            f"{where}: `--device` must exist, got '{name}' with {available} CUDA devices. Use --device cpu, or see "
            "hf-kvquant env."
        )
    return device


def load_placed(
    args: argparse.Namespace, where: str, *, default_device: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model of a command onto the device that its options name, and its tokenizer.

    Args:
        args: With `model`, and the options of `add_placement`.
        where: Starts error messages.
        default_device: Used if no device is named; `None` takes the best one.

    Raises:
        UsageError: The device or model does not exist, or the model does not fit into memory.
    """
    return load(args.model, args.dtype, checked_device(args.device or default_device, where), where)


def load(name: str, dtype: str, device: torch.device, where: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer."""
    path = Path(name).expanduser()
    # A hub id has at most one slash, and what precedes it is no local folder.
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1 or ("/" in name and path.parent.exists())
    if looks_local and not (path / "config.json").is_file():
        found = "a folder without config.json" if path.is_dir() else "no such folder"
        raise UsageError(
            f"{where}: `MODEL` must be a folder with a transformers model or a hub id, got {name}: {found}."
        )
    source = source_of(name)
    try:
        with without_bars():
            tokenizer = AutoTokenizer.from_pretrained(source)
            model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
        return model.to(device).eval(), tokenizer
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(
            f"{where}: `MODEL` must be a folder with a causal language model and its tokenizer, or a hub id, "
            f"got {name}: {reason}"
        ) from error
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise UsageError(
            f"{where}: `MODEL` must fit into the memory of {device}, got {name}, which does not. Use --dtype bfloat16, "
            "another --device or a smaller model."
        ) from error


def source_of(name: str) -> str:
    """What to pass to `from_pretrained`: the path, if there is such a folder, else the name as a hub id."""
    path = Path(name).expanduser()
    return str(path) if path.exists() else name


def load_calibration(model: PreTrainedModel, name: str) -> None:
    """Give a model the centres and factors that `calibrate` saved in its folder, if there are any."""
    path = Path(name).expanduser() / FILE_NAME
    if not path.is_file():
        return
    try:
        load_smoothing(model, path)
    except (NotImplementedError, ValueError) as error:
        # Results are correct without it, but less accurate.
        print(f"hf-kvquant: warning: {path} is ignored. {error}", file=sys.stderr)
