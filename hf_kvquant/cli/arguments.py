"""What the commands of `hf-kvquant` share before a model is loaded: options, checks of their values, names of configs.

argparse parses. Its mistakes and those that the checks find end in the same way: one line on stderr and exit code 2.
Imports neither torch nor transformers.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from ..common.errors import UsageError, did_you_mean
from ..common.output import why_unwritable
from ..config import DEFAULT_PRESET, PRESETS, STATE_DTYPE, WINDOWS, KVQuantConfig
from ..presets import UNQUANTIZED
from ..spec.formats import BLOCK_SIZE

DTYPES = ("auto", "float32", "bfloat16", "float16")
# Suffix of a preset's name for its naive baseline, which shows how much transforms and clipping gain.
UNTRANSFORMED = "-untransformed"
# What most commands run if no preset is named.
COMPARED_PRESETS = (UNQUANTIZED, "int8", "int4")

# What runs a command.
Run = Callable[[argparse.Namespace], None]


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


# --- options ----------------------------------------------------------------------------------------------------------


def add_command(
    commands: Any,
    name: str,
    load: Callable[[argparse.Namespace], Run],
    *,
    help: str,
    description: str | None = None,
    has_model: bool = True,
) -> argparse.ArgumentParser:
    """Add a command to the sub-parsers of argparse. What it parses holds `load`, `command`, `threads` and perhaps
    `model`.

    `load` imports what runs the command, after those checks of its options that need no torch.
    """
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help, description=description)
    parser.set_defaults(load=load, command=parser.prog.partition(" ")[2])
    if has_model:
        parser.add_argument("model", metavar="MODEL", help="a folder or a hub id")
    count = "threads that compute on a CPU (default: OMP_NUM_THREADS, or the cores that the process may use)"
    parser.add_argument("--threads", type=int, metavar="N", help=count)
    return parser


def add_placement(parser: argparse.ArgumentParser, more: str = "") -> None:
    """Add the options that say how a model is loaded. `more` is added to the help of the dtype."""
    add = parser.add_argument
    add("--dtype", choices=DTYPES, default="auto", help=f"dtype of the model{more} (default: the checkpoint's)")
    add("--device", metavar="NAME", help="such as cpu or cuda:0 (default: cuda where there is a GPU)")


def add_presets(parser: argparse.ArgumentParser, default: Iterable[str], more: str = "") -> None:
    """Add the options that say which configs a command runs, by default some presets. `more` is added to the help."""
    parser.add_argument(
        "--preset",
        action="append",
        metavar="NAME",
        help=f"one of {', '.join(PRESETS)}; append {UNTRANSFORMED} for its formats alone, and :4+128 to keep the first "
        f"4 and the newest 128 tokens dense; repeatable (default: {', '.join(default)}){more}",
    )
    parser.set_defaults(default_presets=tuple(default))
    for name, which in zip(WINDOWS, ("first", "newest"), strict=True):
        which = f"how many of the {which} tokens stay dense, unless a preset's name says so (default: the preset's)"
        parser.add_argument(option(name), type=int, metavar="N", help=which)


def add_served_config(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which config a command serves. `served_config` reads them."""
    add = parser.add_argument
    preset = f"preset of the cache, as in hf-kvquant generate (default: {DEFAULT_PRESET})"
    add("--preset", default=DEFAULT_PRESET, metavar="NAME", help=preset)
    dtype = "of the states of gated delta rules, as in Qwen3.5 (default: the model's, float32)"
    add("--state-dtype", choices=(STATE_DTYPE,), help=dtype)


def add_batching(parser: argparse.ArgumentParser) -> None:
    """Add the options of continuous batching, spelled as in `transformers serve`. `checked_batching` reads them."""
    add = parser.add_argument
    size = "tokens of a page, a multiple of 128 (default: 256)"
    add("--cb-page-size", "--cb-block-size", type=int, metavar="N", help=size)
    add("--cb-num-blocks", type=int, metavar="N", help="pages of the cache (default: as many as fit into the memory)")
    batch = "most tokens of one forward; longer prompts come in parts (default: by the memory)"
    add("--cb-max-batch-tokens", type=int, metavar="N", help=batch)
    add("--cb-max-requests-per-batch", type=int, metavar="N", help="most requests of one forward (default: 1024)")
    memory = "share of the free memory for the cache, up to 1 (default: 0.9 on a GPU, 0.8 if it samples, 0.3 elsewhere)"
    add("--cb-max-memory-percent", type=float, metavar="X", help=memory)
    graphs = "replay decode steps as CUDA graphs (default: on a GPU)"
    add("--cb-use-cuda-graph", action=argparse.BooleanOptionalAction, help=graphs)


def given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The values of some options, as keyword arguments of these names."""
    return {name: getattr(args, name) for name in names}


def option(name: str) -> str:
    """How the user types the option that is parsed into `name`."""
    return f"--{name.replace('_', '-')}"


# --- checks -----------------------------------------------------------------------------------------------------------


def check_counts(args: argparse.Namespace, *names: str) -> None:
    """Refuse options that were given and are below 1."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"`{option(name)}` must be at least 1, got {value}.")


def checked_batching(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `add_batching` that were given, as arguments of transformers' `ContinuousBatchingConfig`."""
    counts = ("page_size", "num_blocks", "max_batch_tokens", "max_requests_per_batch")
    check_counts(args, *(f"cb_{name}" for name in counts))
    if args.cb_page_size is not None and args.cb_page_size % BLOCK_SIZE:
        raise UsageError(
            f"`--cb-page-size` must be a multiple of {BLOCK_SIZE} tokens, got {args.cb_page_size}. Leave it out, "
            "or round it up."
        )
    percent = args.cb_max_memory_percent
    if percent is not None and not 0 < percent <= 1:
        raise UsageError(f"`--cb-max-memory-percent` must be above 0 and at most 1, got {percent}.")
    names = (*counts, "max_memory_percent", "use_cuda_graph")
    options = {name: value for name in names if (value := getattr(args, f"cb_{name}")) is not None}
    if "use_cuda_graph" in options:
        options["use_cuda_graph"] = (False, options["use_cuda_graph"])  # of steps with prompts, and of decode steps
    return options


def checked_output(
    name: str, *, option: str = "--output", expected: str = "a file in a folder that is there", **options: bool
) -> Path:
    """The path of an option, after a test that what is `expected` can be written there (`why_unwritable`)."""
    path = Path(name).expanduser()
    reason = why_unwritable(path, **options)
    if reason is not None:
        raise UsageError(f"`{option}` must be {expected}, got {name}: {reason}. Name another.")
    return path


# --- configs ----------------------------------------------------------------------------------------------------------


def checked_configs(args: argparse.Namespace) -> dict[str, KVQuantConfig]:
    """The configs to run, by name, each once and in the order given; the command's defaults if none is given."""
    dense = {name: length for name, length in given(args, *WINDOWS).items() if length is not None}
    for name, length in dense.items():
        if length < 0:
            raise UsageError(f"`{option(name)}` must be at least 0, got {length}.")
    return {name: config_of(name, dense) for name in dict.fromkeys(args.preset or args.default_presets)}


def config_of(name: str, dense: Mapping[str, int] | None = None) -> KVQuantConfig:
    """The config of a name: a preset or its formats alone, also with dense tokens, as in `int4-untransformed:4+128`.

    `dense` is for a name that has no such numbers, if the preset quantises anything. Presets keep what it leaves out.
    """
    formats, has_dense, lengths = name.partition(":")
    preset = formats.removesuffix(UNTRANSFORMED)
    checked_preset(preset, spelled=formats)
    options: dict[str, Any] = {}
    if has_dense:
        found = re.fullmatch(r"(\d+)\+(\d+)", lengths)
        if found is None:
            raise UsageError(
                f"`--preset` must give windows as FIRST+NEWEST tokens, got '{lengths}'. Write for example "
                f"{formats}:4+128."
            )
        options = dict(zip(WINDOWS, map(int, found.groups()), strict=True))
    elif any(side.is_quantized for side in PRESETS[preset]):
        options = dict(dense or {})
    if formats != preset:  # the naive baseline, without transforms and without clipping
        key, value = (dataclasses.replace(side, clip_ratio=1.0) for side in PRESETS[preset])
        options |= {"transforms": [], "key": key, "value": value}
    try:
        return KVQuantConfig.from_preset(preset, **options)
    except ValueError as error:
        raise UsageError(f"`--preset {name}` is invalid. {error}") from error


def served_config(args: argparse.Namespace) -> KVQuantConfig:
    """The config of the options of `add_served_config`."""
    return dataclasses.replace(config_of(args.preset), state_dtype=args.state_dtype)


def checked_preset(name: str, *, spelled: str | None = None) -> str:
    """The name, if it is a preset's. Errors quote `spelled`, which it was taken from."""
    if name not in PRESETS:
        known = [*PRESETS, *(preset + UNTRANSFORMED for preset in PRESETS)]
        spelled = spelled or name
        raise UsageError(
            f"`--preset` must be one of {', '.join(PRESETS)}, got '{spelled}'.{did_you_mean(spelled, known)}"
        )
    return name
