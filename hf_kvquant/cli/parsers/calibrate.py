"""The options of `hf-kvquant calibrate`."""

from __future__ import annotations

import argparse
from typing import Any, get_args

from ...calibration.choices import CALIBRATED_PRESET, FILE_NAME, Mode
from ...common.errors import UsageError
from ...config import PRESETS
from ..arguments import Run, add_command, add_placement, checked_preset, option

# Options that say how to calibrate, and their defaults.
CALIBRATION: dict[str, Any] = {"mode": "auto", "no_centers": False, "no_factors": False, "rotate_values": False}
CALIBRATION |= {"tokens": 16384, "window": 2048, "batch_size": 1}


def add_parser(commands: Any) -> None:
    """Add `calibrate` to the commands, the sub-parsers of argparse."""
    parser = add_command(
        commands,
        "calibrate",
        load,
        help="find centres and smoothing factors of keys, and save the model with them",
        description="Find what the transforms of a preset need, on the given text: the centre of each layer's keys, "
        "and factors that make outlier channels of keys smaller and those of queries larger, where that reduces the "
        "error. Factors are folded into the weights where that leaves logits bitwise the same; otherwise, as with "
        "quantised weights, caches apply them. The model is saved, and "
        f"next to it {FILE_NAME} with the rest. With --check, nothing is changed or saved: the command looks at the "
        "weights and at how much quantising a layer changes the next token, and says which preset each layer "
        "tolerates, or whether all layers tolerate the given one.",
    )
    add = parser.add_argument
    add("--text-file", action="append", default=[], metavar="FILE", help="text to calibrate on; repeatable")
    add("--output", metavar="DIR", help="a new folder for the model and the factors; not with --check")
    add(
        "--preset",
        metavar="NAME",
        help=f"one of {', '.join(PRESETS)} (default: {CALIBRATED_PRESET}; with --check, the smallest that each layer "
        "tolerates)",
    )
    add("--check", action="store_true", help="only check; without --text-file, on text that the model writes")
    add(
        "--bits",
        type=float,
        metavar="N",
        help="with --check, find the presets that change the next token least and take at most N bits per stored "
        "number on average, scales and zeros included",
    )
    add("--weights-only", action="store_true", help="with --check, do not run the model on text")
    add("--force", action="store_true", help="with --check, exit with 0 whatever is found")
    add(
        "--mode",
        choices=get_args(Mode),
        help="fold: factors go into the weights, or an error; online: caches apply them; auto: into the weights where "
        "possible (default: %(default)s)",
    )
    add("--no-centers", action="store_true", help="leave centres as they are")
    add("--no-factors", action="store_true", help="find centres only")
    rotating = "first rotate values, through the weights, which rounds these once"
    add("--rotate-values", action="store_true", help=rotating)
    add("--tokens", type=int, metavar="N", help="most tokens to calibrate on (default: %(default)s)")
    add("--window", type=int, metavar="N", help="tokens per forward (default: %(default)s)")
    add("--batch-size", type=int, metavar="N", help="windows per forward (default: %(default)s)")
    add_placement(parser)
    parser.set_defaults(**CALIBRATION)


def load(args: argparse.Namespace) -> Run:
    """Import what runs the command, after a check that its options fit together."""
    for name in ("bits", "weights_only", "force"):
        if getattr(args, name) not in (None, False) and not args.check:
            raise UsageError(f"`{option(name)}` must come with --check, got it alone. Add --check.")
    for name, default in CALIBRATION.items() if args.check else ():
        if getattr(args, name) != default:
            raise UsageError(
                f"`{option(name)}` must come without --check, which calibrates nothing, got both. Leave out one."
            )
    if args.weights_only and args.text_file:
        raise UsageError(
            "`--text-file` must come without --weights-only, which reads no text, got both. Leave out one."
        )
    for name in ("preset", "weights_only"):
        if args.bits is not None and getattr(args, name):
            raise UsageError(
                f"`--bits` must come without {option(name)}, got both. Leave out one: within these bits, presets are "
                "picked by measuring them."
            )
    if args.preset is not None:
        checked_preset(args.preset)
    from ..calibrate import run

    return run
