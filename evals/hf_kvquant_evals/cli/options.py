"""Options that several evaluations have, and the checks of their values. Imports neither torch nor transformers."""

from __future__ import annotations

import argparse
import importlib.util
import re

from hf_kvquant.calibration.choices import CALIBRATED_PRESET
from hf_kvquant.cli.arguments import check_counts, checked_configs, checked_output
from hf_kvquant.common.errors import UsageError
from hf_kvquant.config import PRESETS, KVQuantConfig
from hf_kvquant.presets import UNQUANTIZED

from ..choices import BIAS_NORM, FIELD, OUTLIER_FACTOR, OUTLIER_PAIRS, SPLIT


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add the options that name the text."""
    add = parser.add_argument
    add("--text", metavar="FILE", help="the text to measure, as it is; either this or --dataset")
    add("--rows", action="store_true", help="join the lines of --text by two newlines, as papers do with WikiText")
    add("--dataset", metavar="NAME[:CONFIG]", help="rows of a data set instead, joined by two newlines")
    add("--split", metavar="NAME", help=f"with --dataset (default: {SPLIT})")
    add("--field", metavar="NAME", help=f"field with the text of a row, with --dataset (default: {FIELD})")


def add_prompt(parser: argparse.ArgumentParser) -> None:
    """Add the option for evaluations that read a text as `generate` reads a prompt and what follows."""
    described = "first tokens of each window to feed at once, as the prompt of generate, and not to score (default: 1)"
    parser.add_argument("--prompt", type=int, default=1, metavar="N", help=described)


def add_preparation(parser: argparse.ArgumentParser) -> None:
    """Add the options that change a model before it is measured."""
    add = parser.add_argument
    outliers = (
        f"first make {OUTLIER_PAIRS} RoPE pairs of every key head F times as large, and the same channels of the "
        f"queries F times as small (F: {OUTLIER_FACTOR:g} if left out)"
    )
    add("--inject-outliers", type=float, nargs="?", const=OUTLIER_FACTOR, metavar="F", help=outliers)
    bias = f"first add a constant vector of this norm to every key head (NORM: {BIAS_NORM:g} if left out)"
    add("--inject-bias", type=float, nargs="?", const=BIAS_NORM, metavar="NORM", help=bias)
    add("--calibrate", metavar="FILE", help="then calibrate the model on this text")
    preset = f"preset to calibrate for, with --calibrate (default: {CALIBRATED_PRESET})"
    add("--calibrate-for", choices=tuple(PRESETS), help=preset)


def tokens(word: str) -> int:
    """A number of tokens as an option has it; 1k is 1024."""
    match = re.fullmatch(r"(\d+)(k?)", word.lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"must be a number of tokens such as 512 or 4k, got '{word}'")
    return int(match[1]) * (1024 if match[2] else 1)


def check_installed(package: str, purpose: str, more: str = "") -> None:
    """Refuse a run that would end for lack of an optional package. `more` says what else the user can do."""
    if importlib.util.find_spec(package.replace("-", "_")) is None:
        raise UsageError(
            f"{package} must be installed for {purpose}, got no such package. Install it: pip install "
            f"'hf-kvquant[eval]'{more}."
        )


def compared_configs(args: argparse.Namespace, *counts: str) -> dict[str, KVQuantConfig]:
    """The configs that an evaluation compares, by name, after checks of the options that all evaluations have.

    The unquantised cache comes first: the others are compared with it.
    """
    configs = {UNQUANTIZED: KVQuantConfig.from_preset(UNQUANTIZED), **checked_configs(args)}
    if args.output is not None:
        checked_output(args.output)
    check_counts(args, *counts)
    return configs
