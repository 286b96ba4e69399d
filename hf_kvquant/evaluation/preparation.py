"""What every evaluation does before it measures: which configs it compares, and what is done to the model.

A model is made harder, calibrated, or left as it is. How keys get outliers or a bias is `transforms/injection.py`'s,
how centres and factors are found `transforms/smoothing.py`'s; here is decided what a user may ask for, in which order
it is done, and what a record says of it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..arguments import UsageError, checked_configs, load_calibration, read_text
from ..config import PRESETS, KVQuantConfig
from ..fidelity import is_out_of_memory
from ..generation import UNQUANTIZED
from ..transforms.folding import weights_hash
from ..transforms.injection import inject_key_bias, inject_key_outliers
from ..transforms.smoothing import smooth_attention
from ..transforms.smoothing_file import FILE_NAME, SmoothingResult
from .provenance import model_name, sha256

OUTLIER_PAIRS = 3  # RoPE pairs per head, of the channels that are made larger
OUTLIER_FACTOR = 10.0  # about what large models have
BIAS_NORM = 100.0
CALIBRATED_PRESET = "int4"


class CannotInject(UsageError):
    """A model whose keys are made in a way that is not known, or cannot be what was asked for."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of evaluations that change a model before it is measured."""
    parser.add_argument(
        "--inject-outliers",
        type=float,
        nargs="?",
        const=OUTLIER_FACTOR,
        metavar="F",
        help=f"first make {OUTLIER_PAIRS} RoPE pairs of every head of keys F times as large, and queries so much "
        f"smaller (F: {OUTLIER_FACTOR:g} if left out)",
    )
    parser.add_argument(
        "--inject-bias",
        type=float,
        nargs="?",
        const=BIAS_NORM,
        metavar="NORM",
        help=f"first add a constant of this norm to every head of keys (NORM: {BIAS_NORM:g} if left out)",
    )
    parser.add_argument("--calibrate", metavar="FILE", help="then calibrate the model on this text")
    parser.add_argument(
        "--calibrate-for",
        choices=tuple(PRESETS),
        help=f"with --calibrate, what for (default: {CALIBRATED_PRESET})",
    )


def compared_configs(args: argparse.Namespace, where: str) -> dict[str, KVQuantConfig]:
    """The configs to run by name, the unquantised cache, which others are compared with, always and first.

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
    """Make a model harder and calibrate it, as far as the arguments ask for that.

    Returns:
        What a record says of the model, among its settings.

    Raises:
        CannotInject: Keys are not made in a way that is known, or a number has no meaning.
        UsageError: An argument has no meaning, the model cannot be calibrated, or memory runs out.
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
    """What a record says of a calibration."""
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
