"""`hf-kvquant eval perplexity`: perplexity and divergence from the unquantised cache on a text, presets side by side.

This file decides what runs in which order. `windows.py` cuts the text into windows, each of which starts with an empty
cache and an exact first token; `fidelity.py` compares one window; `gate.py` checks the run before a number is written;
`perplexity_results.py` aggregates. Results are saved per mode and window, so an interrupted run loses at most one.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from transformers import AutoConfig, PreTrainedModel

from ..cache.cache import KVQuantCache
from ..common.progress import show_progress
from ..config import PRESETS, KVQuantConfig
from ..patching import patched
from . import details, preparation, windows
from .arguments import (
    UsageError,
    add_placement,
    add_presets,
    check_counts,
    fitting_configs,
    load_placed,
    source_of,
)
from .endings import early_end
from .fidelity import compare
from .gate import check_modes, gate_text, run_controls
from .generation import UNQUANTIZED
from .perplexity_results import of_window, show, summarize
from .records import RunRecord, check_record, open_record
from .simulation import why_not_simulated
from .windows import FIRST_CHUNK, WHERE

MODES = ("simulated", "chunked", "decode")


def add_parser(commands: Any) -> None:
    """Add `perplexity` to the evaluations, the sub-parsers of argparse."""
    parser = commands.add_parser(
        "perplexity",
        help="perplexity and divergence on a text",
        description="Perplexity, KL divergence and next-token agreement of presets on a text, against the unquantised "
        "cache in the same run. The run fails if the modes of feeding a text disagree, or if a number was not computed "
        "from codes.",
    )
    parser.add_argument("model", metavar="MODEL", help="a folder or a hub id")
    windows.add_source(parser)
    add_options(parser)
    parser.set_defaults(run=run)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add all options except the model and the text."""
    windows.add_options(parser)
    add_presets(parser, PRESETS, f"; '{UNQUANTIZED}' is always there")
    parser.add_argument(
        "--mode",
        choices=(*MODES, "all"),
        default="chunked",
        help="how the text is fed. simulated: one forward that computes what chunks would; chunked: chunks through the "
        "cache; decode: token by token; all: every mode that the model supports (default: chunked)",
    )
    parser.add_argument("--chunk", type=int, default=32, metavar="N", help="tokens of a chunk (default: 32)")
    preparation.add_options(parser)
    parser.add_argument(
        "--controls", action="store_true", help="also check that an exact cache scores as exact and a broken one fails"
    )
    parser.add_argument(
        "--details",
        action="store_true",
        help="also quantise one layer at a time, and measure the keys channel by channel",
    )
    add_placement(parser)
    parser.add_argument("--output", metavar="FILE", help="write results as JSON; run again to resume")


def run(args: argparse.Namespace) -> None:
    """Run `hf-kvquant eval perplexity`. Raises what `measure` raises."""
    show(Console(highlight=False), measure(args).to_dict())


def measure(args: argparse.Namespace) -> RunRecord:
    """Measure what the arguments ask for.

    Returns:
        The record. Its part `summary` has aggregates per mode and preset.

    Raises:
        Interrupted: Ctrl-C; the message says what was kept.
        Refused: The run failed one of its own checks.
        UsageError: An argument is invalid, does not fit the model or the text, or needs too much memory.
    """
    started = time.monotonic()
    configs = preparation.compared_configs(args, WHERE)
    check_record(args.output, WHERE)
    check_counts(args, ("chunk", "window", "stride", "tokens"), WHERE)
    source, text = windows.read_source(args)
    model, tokenizer = load_placed(args, WHERE)
    configs = fitting_configs(model, args, configs, WHERE)
    prepared = preparation.prepare(model, tokenizer, args, WHERE)
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    pieces, begins = windows.cut(ids, args, model)
    unsimulated = why_not_simulated(model)
    can_simulate, modes = unsimulated is None, modes_of(args, unsimulated)
    window, stride = pieces.shape[1], args.stride or pieces.shape[1]
    kept_in = stored_dtype(model, args.model)
    settings = {
        "evaluation": "perplexity",
        **prepared,
        "tokens_sha256": hashlib.sha256(ids.numpy().tobytes()).hexdigest(),
        "stored_dtype": str(kept_in).removeprefix("torch."),
        "source": source,
        "mode": args.mode,
        "chunk": args.chunk,
        "first_chunk": FIRST_CHUNK,
        "window": window,
        "stride": stride,
        "begins": begins,
        "words_per_token": len(text.split()) / len(ids),
        "presets": {name: config.to_dict() for name, config in configs.items()},
        "controls": args.controls,
    }
    record = open_record(args.output, settings, WHERE)

    def measure_windows(mode: str, indices: Sequence[int]) -> None:
        compared = compare(
            model,
            pieces[indices].to(model.device),
            configs,
            first_chunk=FIRST_CHUNK,
            chunk_size=1 if mode == "decode" else args.chunk,
            simulate=mode == "simulated",
            on_chunk=tell,
        )
        for index, results in zip(indices, compared, strict=True):
            # A window that overlaps the previous one scores only its new tokens.
            newest = None if begins[index] == 0 else stride
            window_of = {name: of_window(name, each, newest) for name, each in results.items()}
            record.put(f"{mode} {begins[index]}", window_of)

    def put(part: str, make: Callable[[], dict[str, Any]]) -> None:
        if record.get(part) is None:
            record.put(part, make())

    gated = gate_text(pieces, configs).to(model.device)

    def gate() -> dict[str, Any]:
        def say(name: str) -> None:
            tell(doing=f"the check of modes, {name}")

        return check_modes(model, gated, configs, args.chunk, can_simulate=can_simulate, say=say)

    # Each step: what the progress line says, and the function that does it.
    steps: list[tuple[str, Callable[[], None]]] = [("the check of modes", functools.partial(put, "gate", gate))]
    if args.controls:
        controls = functools.partial(run_controls, model, gated, configs)
        steps.append(("the controls", functools.partial(put, "controls", controls)))
    ending = early_end(record, WHERE, lower="--window", value=window, more=", or --chunk, or run fewer presets at once")
    try:
        with ending as ongoing:
            sizes = sizes_of(model, configs, kept_in)
            for mode in modes:
                missing = [index for index, begin in enumerate(begins) if record.get(f"{mode} {begin}") is None]
                at_once = 1 if mode == "simulated" else windows_at_once(model, window, sizes)
                for indices in (missing[i : i + at_once] for i in range(0, len(missing), at_once)):
                    which = f"window {indices[0] + 1}" + (f" to {indices[-1] + 1}" if len(indices) > 1 else "")
                    what = f"{mode}, {which} of {len(begins)}"
                    steps.append((what, functools.partial(measure_windows, mode, indices)))
            first = pieces[:1].to(model.device)
            num_details = details.num_steps(model) if args.details else 0
            with show_progress(WHERE, len(steps) + num_details, unit="step") as tell:

                def begin(what: str, done: int = 0) -> None:
                    ongoing.part = what
                    tell(done, doing=what)

                for what, do in steps:
                    begin(what)
                    do()
                    tell(1)
                if args.details:
                    of_details = details.measure(
                        record, model, tokenizer, text, first, configs, args.chunk, tell, simulate=can_simulate
                    )
                    for number, what in enumerate(of_details):
                        begin(what, done=int(number > 0))  # the previous step is done
            ongoing.part = "the summary"
            summary = {mode: summarize(record, mode, sizes, settings) for mode in modes}
            seconds = round(time.monotonic() - started, 1)
            record.put("summary", {"modes": summary, "unsimulated": unsimulated, "seconds": seconds})
    except NotImplementedError as error:
        raise UsageError(f"{WHERE}: {args.model} cannot be measured. {error}") from error
    return record


# Bytes that the caches of all windows in one forward may take together: a small part of a GPU's memory.
CACHE_BYTES = 2**30


def windows_at_once(model: PreTrainedModel, window: int, sizes: Mapping[str, Mapping[str, Any]]) -> int:
    """How many windows of `window` tokens go through one forward.

    One, on a CPU. On a GPU, a chunk of one window takes less time than the host needs to launch it.
    """
    if model.device.type == "cpu":
        return 1
    bytes_per_token = [size["bytes_per_token"] for size in sizes.values()]
    # The unquantised cache of the comparison is as large as any.
    return max(1, int(CACHE_BYTES / (window * (sum(bytes_per_token) + max(bytes_per_token)))))


def modes_of(args: argparse.Namespace, unsimulated: str | None) -> tuple[str, ...]:
    """The modes to run. If the model cannot be simulated, a line on stderr says why.

    Args:
        args: The command's arguments.
        unsimulated: Why the model cannot be simulated; `None` if it can.

    Raises:
        UsageError: `--mode simulated` for such a model.
    """
    if unsimulated is None:
        return MODES if args.mode == "all" else (args.mode,)
    if args.mode == "simulated":
        raise UsageError(
            f"{WHERE}: `--mode` must be chunked, decode or all for {args.model}, got simulated. {unsimulated}"
        )
    print(
        f"{WHERE}: chunked and decode are compared with each other only, not with simulated. {unsimulated}",
        file=sys.stderr,
    )
    return MODES[1:] if args.mode == "all" else (args.mode,)


def stored_dtype(model: PreTrainedModel, name: str) -> torch.dtype:
    """The dtype of an unquantised cache in normal use: that of the checkpoint, whatever `--dtype` measures in."""
    spelled = AutoConfig.from_pretrained(source_of(name)).dtype
    found = getattr(torch, spelled) if isinstance(spelled, str) else spelled
    return found if isinstance(found, torch.dtype) else model.dtype


@torch.inference_mode()
def sizes_of(
    model: PreTrainedModel, configs: Mapping[str, KVQuantConfig], dtype: torch.dtype
) -> dict[str, dict[str, Any]]:
    """Bits per cached value and bytes per token under each config, over the layers whose cache can be quantised.

    Args:
        model: Run on one token, to learn the shapes of its keys and values.
        configs: By name; each the same for all layers.
        dtype: Dtype of what is not quantised.
    """
    cache = KVQuantCache(model.config, UNQUANTIZED)
    with patched(model, UNQUANTIZED):
        model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=model.device), past_key_values=cache)
    sides = [
        (side, storage.shape[1], head_dim)
        for storage in cache.storages
        for side, head_dim in zip(("key", "value"), storage.shape[2:], strict=True)
    ]
    num_values = sum(num_kv_heads * head_dim for _, num_kv_heads, head_dim in sides)
    sizes = {}
    for name, config in configs.items():
        num_bytes = sum(getattr(config, side).bytes_per_token(*shape, dtype) for side, *shape in sides)
        sizes[name] = {"bits_per_value": 8 * num_bytes / num_values, "bytes_per_token": num_bytes}
    return sizes
