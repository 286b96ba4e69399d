"""What every evaluation does before it measures: choose the configs to compare, and prepare the model.

A model can be made harder to quantise, calibrated, or left as it is. `transforms/injection.py` puts outliers or a bias
into keys, `transforms/smoothing.py` calibrates. This file decides which options there are, in which order they apply,
and what a record says about them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..calibration.smoothing import smooth_attention
from ..calibration.smoothing_file import FILE_NAME, SmoothingResult
from ..config import PRESETS, KVQuantConfig
from ..models.hashes import weights_hash
from .arguments import UsageError, checked_configs, load_calibration, read_text
from .fidelity import is_out_of_memory
from .generation import UNQUANTIZED
from .injection import inject_key_bias, inject_key_outliers
from .provenance import model_name, sha256

OUTLIER_PAIRS = 3  # RoPE pairs per head whose channels are made larger
OUTLIER_FACTOR = 10.0  # about that of large models
BIAS_NORM = 100.0
CALIBRATED_PRESET = "int4"


class CannotInject(UsageError):
    """Nothing can be injected: it is unknown how the model computes its keys, or the number asked for is invalid."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that change a model before it is measured."""
    parser.add_argument(
        "--inject-outliers",
        type=float,
        nargs="?",
        const=OUTLIER_FACTOR,
        metavar="F",
        help=f"first make {OUTLIER_PAIRS} RoPE pairs of every key head F times as large, and the same channels of the "
        f"queries F times as small (F: {OUTLIER_FACTOR:g} if left out)",
    )
    parser.add_argument(
        "--inject-bias",
        type=float,
        nargs="?",
        const=BIAS_NORM,
        metavar="NORM",
        help=f"first add a constant vector of this norm to every key head (NORM: {BIAS_NORM:g} if left out)",
    )
    parser.add_argument("--calibrate", metavar="FILE", help="then calibrate the model on this text")
    parser.add_argument(
        "--calibrate-for",
        choices=tuple(PRESETS),
        help=f"preset to calibrate for, with --calibrate (default: {CALIBRATED_PRESET})",
    )


def compared_configs(args: argparse.Namespace, where: str) -> dict[str, KVQuantConfig]:
    """The configs to run, by name. The unquantised cache always comes first: the others are compared with it.

    Raises:
        UsageError: As for `checked_configs`.
    """
    configs = checked_configs(args, where)
    return {UNQUANTIZED: KVQuantConfig.from_preset(UNQUANTIZED), **configs}


def prepare(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    args: argparse.Namespace,
    where: str,
) -> dict[str, Any]:
    """Inject outliers or a bias into a model and calibrate it, as far as the arguments ask for it.

    Returns:
        Settings of the record that describe the model.

    Raises:
        CannotInject: It is unknown how the model computes its keys, or a number is invalid.
        UsageError: An argument is invalid, the model cannot be calibrated, or memory runs out.
    """
    if args.calibrate_for is not None and args.calibrate is None:
        raise UsageError(f"{where}: `--calibrate-for` must come with --calibrate, got it alone. Add --calibrate FILE.")
    preset = args.calibrate_for or CALIBRATED_PRESET
    text = None if args.calibrate is None else read_text(args.calibrate, f"{where}: `--calibrate`")
    if text is not None and not text.strip():
        raise UsageError(
            f"{where}: `--calibrate` {args.calibrate} must hold text, got nothing but white space. Name another file."
        )
    load_calibration(model, args.model)
    calibrated = Path(args.model).expanduser() / FILE_NAME
    try:
        if args.inject_outliers is not None:
            inject_key_outliers(model, OUTLIER_PAIRS, args.inject_outliers)
        if args.inject_bias is not None:
            inject_key_bias(model, args.inject_bias)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise CannotInject(f"{where}: nothing can be injected into {args.model}. {error}") from error
    calibration = None
    if text is not None:
        try:
            result = smooth_attention(model, tokenizer, [text], preset)
        except (MemoryError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            if is_out_of_memory(error):
                raise UsageError(
                    f"{where}: `--calibrate` must fit into memory, got {args.calibrate}, which does not. Calibrate "
                    "with hf-kvquant calibrate and a smaller --window, and evaluate what it saves."
                ) from error
            raise UsageError(f"{where}: {args.model} cannot be calibrated. {error}") from error
        print(result.report(), file=sys.stderr)
        calibration = describe(result, Path(args.calibrate), preset)
    return {
        "model": model_name(args.model),
        "weights_sample_sha256": weights_hash(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "smoothing_sha256": sha256(calibrated) if calibrated.is_file() else None,
        "injected_outliers": args.inject_outliers,
        "injected_bias": args.inject_bias,
        "calibration": calibration,
    }


def describe(result: SmoothingResult, path: Path, preset: str) -> dict[str, Any]:
    """A calibration, as a record describes it."""
    return {
        "data": path.name,
        "data_sha256": sha256(path),
        "preset": preset,
        "tokens": result.num_tokens,
        "layers": {
            str(layer.layer_idx): {
                "choice": layer.choice,
                "placement": layer.placement,
                "has_center": layer.center is not None,
                "error_before": layer.error_before,
                "error_after": layer.error_after,
            }
            for layer in result.layers
        },
    }
