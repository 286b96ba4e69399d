"""What the commands of `hf-kvquant` share: checked arguments, names of configs, loading a model, early ends.

What a command does is its own module's; `cli.py` turns what is raised here into a line on stderr and an exit code.
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

from ._errors import did_you_mean
from .config import PRESETS, WINDOWS, KVQuantConfig
from .fidelity import is_out_of_memory
from .output import why_unwritable
from .patching import patched
from .progress import without_bars
from .transforms.smoothing import load_smoothing
from .transforms.smoothing_file import FILE_NAME

DTYPES = ("auto", "float32", "bfloat16", "float16")
# Behind a preset's name: the naive baseline, which shows what transforms and clipping are worth.
UNTRANSFORMED = "-untransformed"


class UsageError(Exception):
    """A mistake in what the user gave. Its text is all that is shown."""


class Refused(Exception):
    """An answer of no: a preset that the model does not bear, or a measurement that fails its own checks."""


class Interrupted(KeyboardInterrupt):
    """An interruption, with what is left of the run as its text."""


class Parser(argparse.ArgumentParser):
    """Arguments of a command, of which a mistake is told in one line, without the usage, which is long."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong with the arguments, and exit with 2."""
        program, _, command = self.prog.partition(" ")
        where = f"{command}: " if command else ""
        end = "" if message.endswith("?") else "."
        self.exit(2, f"{program}: error: {where}{message}{end} See {self.prog} --help.\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuse what is not known here already: the parser of the whole command knows other options."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            option = unknown[0].partition("=")[0]
            hint = did_you_mean(option, self._option_string_actions)
            self.error(f"there is no argument '{option}'{'.' if hint else ''}{hint}")
        return known, unknown


def add_placement(parser: argparse.ArgumentParser, more: str = "") -> None:
    """The options that say how a model is loaded. `load_placed` reads them.

    Args:
        parser: Gets them.
        more: What else is to be said of the dtype.
    """
    parser.add_argument(
        "--dtype", choices=DTYPES, default="auto", help=f"of the model{more} (default: the checkpoint's)"
    )
    parser.add_argument("--device", metavar="NAME", help="such as cpu or cuda:0 (default: cuda where there is a GPU)")


def add_presets(parser: argparse.ArgumentParser, default: Iterable[str], more: str = "") -> None:
    """The options that say which configs a command runs. `checked_configs` and `fitting_configs` read them.

    Args:
        parser: Gets them.
        default: Presets of a run that names none.
        more: What else is to be said of them.
    """
    parser.add_argument(
        "--preset",
        action="append",
        metavar="NAME",
        help=f"one of {', '.join(PRESETS)}; with {UNTRANSFORMED} behind it, its formats alone; with :4+128 behind "
        f"that, the first 4 and the newest 128 tokens dense; repeatable (default: {', '.join(default)}){more}",
    )
    parser.set_defaults(default_presets=tuple(default))
    for name, which in zip(WINDOWS, ("first", "newest"), strict=True):
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=int,
            default=0,
            metavar="N",
            help=f"{which} tokens that presets keep as they came, unless their names say (default: 0)",
        )


def checked_configs(args: argparse.Namespace, where: str) -> dict[str, KVQuantConfig]:
    """The configs to run by name, each once, in the order given; the command's defaults where none is.

    Raises:
        UsageError: A name or a length has no meaning.
    """
    windows = {name: getattr(args, name) for name in WINDOWS}
    for name, length in windows.items():
        if length < 0:
            raise UsageError(f"{where}: `--{name.replace('_', '-')}` must be at least 0, got {length}.")
    return {name: config_of(name, where, windows) for name in dict.fromkeys(args.preset or args.default_presets)}


def config_of(name: str, where: str, windows: Mapping[str, int] | None = None) -> KVQuantConfig:
    """The config of a name: a preset, or its formats alone, either one with dense windows: `int4-untransformed:4+128`.

    Args:
        name: As typed.
        where: Opens the message.
        windows: Of a name that says nothing of them, where something is quantised.

    Raises:
        UsageError: The name has no meaning.
    """
    formats, has_windows, lengths = name.partition(":")
    preset = formats.removesuffix(UNTRANSFORMED)
    checked_preset(preset, where, spelled=formats)
    options: dict[str, Any] = {}
    if has_windows:
        found = re.fullmatch(r"(\d+)\+(\d+)", lengths)
        if found is None:
            raise UsageError(
                f"{where}: `--preset` must name windows as first and newest tokens, got '{lengths}'. Such as "
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
        raise UsageError(f"{where}: `--preset {name}` has no meaning. {error}") from error


def untransformed(preset: str) -> dict[str, Any]:
    """What the config of a preset's naive baseline says: clipping is an improvement on it like any transform."""
    key, value = (dataclasses.replace(side, clip_ratio=1.0) for side in PRESETS[preset])
    return {"transforms": [], "key": key, "value": value}


def checked_preset(name: str, where: str, *, spelled: str | None = None) -> str:
    """A preset's name; `spelled` is what it was taken from."""
    if name not in PRESETS:
        known = [*PRESETS, *(preset + UNTRANSFORMED for preset in PRESETS)]
        spelled = spelled or name
        raise UsageError(
            f"{where}: `--preset` must be one of {', '.join(PRESETS)}, got '{spelled}'.{did_you_mean(spelled, known)}"
        )
    return name


def check_counts(args: argparse.Namespace, names: Iterable[str], where: str) -> None:
    """Refuse options below 1, of those that were given.

    Raises:
        UsageError: There is one.
    """
    for name in names:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"{where}: `--{name.replace('_', '-')}` must be at least 1, got {value}.")


def fitting_configs(
    model: PreTrainedModel, args: argparse.Namespace, configs: Mapping[str, KVQuantConfig], where: str
) -> dict[str, KVQuantConfig]:
    """The configs that a model can be patched with, found out before anything is run.

    Presets that the user typed must fit. A default that does not fit is left out, and a line on stderr says why.

    Raises:
        UsageError: A preset that was typed does not fit, or no default that quantises anything does.
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
    """The path of `--output`, once it is certain that something can be written there.

    Args:
        name: As typed.
        where: Opens the message.
        expected: What it must be.
        **options: As `why_unwritable` takes them.

    Raises:
        UsageError: Nothing can be written there.
    """
    path = Path(name).expanduser()
    reason = why_unwritable(path, **options)
    if reason is not None:
        raise UsageError(f"{where}: `--output` must be {expected}, got {name}: {reason}. Name another.")
    return path


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


def load_placed(
    args: argparse.Namespace, where: str, *, default_device: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model of a command, and its tokenizer, to where its options place it.

    Args:
        args: With `model`, and the options of `add_placement`.
        where: Opens messages.
        default_device: Where no device is named; `None` takes the best one.

    Raises:
        UsageError: There is no such device or model, or memory does not suffice.
    """
    return load(args.model, args.dtype, checked_device(args.device or default_device, where), where)


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
    """What `from_pretrained` takes for the model of this name: a folder that is there, else a hub id."""
    path = Path(name).expanduser()
    return str(path) if path.exists() else name


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
