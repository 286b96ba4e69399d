"""`hf-kvquant eval perplexity`: perplexity and divergence from the unquantised cache on a text, presets side by side.

A text is cut into windows, each of which starts with an empty cache whose first token is exact. `fidelity.py` compares
one window; here are decided the windows, what is added up over them, and what a run must pass before a number is
written: the ways of feeding a text must agree, and every layer must have been read from codes, by count. Results are
kept per mode and window, so that an interrupted run loses no more than one.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from ..arguments import (
    DTYPES,
    Refused,
    UsageError,
    add_injections,
    checked_device,
    checked_presets,
    inject,
    load,
    load_calibration,
    read_text,
)
from ..config import PRESETS, KVQuantConfig
from ..fidelity import Chunks, Fidelity, OutOfMemory, Stream, compare, divergence, is_out_of_memory, route
from ..generation import UNQUANTIZED
from .provenance import place, sha256
from .records import RunRecord

WHERE = "eval perplexity"
MODES = ("simulated", "chunked", "decode")
WINDOW = 2048
TOKENS = 16384
FIRST_CHUNK = 1
GATE_TOKENS = 160  # of which the largest block of any preset is 128
# What the gate allows between two modes, in mean KL divergence: in float32 without quantisation this much ...
GATE_NONE = 1e-6
# ... and with it, this share of the divergence from the unquantised cache. Sums in another order flip codes at rounding
# boundaries, layer after layer, which no two modes can avoid: on the reference model in float32 up to 0.15 of it
# (int4-g32, 600 tokens), where scales of other tokens take agreement from 90 to below 50 %.
GATE_SHARE = 1 / 3
# In 16 bits rounding flips so many that tokens differ and only their mean is the same: the mean divergences from the
# unquantised cache may differ by a tenth, or by so many standard errors. Not two: a run has some twenty such pairs.
GATE_SHARE_OF_MEAN = 0.1
GATE_ERRORS = 4.0
# Agreement with the unquantised cache that permuted scales must not reach.
CONTROL_AGREEMENT = 0.5


def add_parser(commands: Any) -> None:
    """Add `perplexity` to the evaluations, the sub-parsers of argparse."""
    parser = commands.add_parser(
        "perplexity",
        help="perplexity and divergence on a text",
        description="Perplexity, KL divergence and next-token agreement of presets on a text, against the unquantised "
        "cache in the same run. Before anything is measured, the modes must agree; every number must have come from "
        "codes, by count.",
    )
    parser.add_argument("model", metavar="MODEL", help="a folder or a hub id")
    parser.add_argument("--text", metavar="FILE", help="the text, as it is")
    parser.add_argument("--dataset", metavar="NAME[:CONFIG]", help="rows of a data set instead, joined by two newlines")
    parser.add_argument("--split", default="test", metavar="NAME", help="with --dataset (default: test)")
    parser.add_argument("--field", default="text", metavar="NAME", help="of a row, with --dataset (default: text)")
    parser.add_argument("--preset", action="append", metavar="NAME", help="repeatable (default: all)")
    parser.add_argument(
        "--mode",
        choices=(*MODES, "all"),
        default="chunked",
        help="simulated: one forward does what chunks would; chunked: through the cache; decode: token by token "
        "(default: chunked)",
    )
    parser.add_argument("--chunk", type=int, default=32, metavar="N", help="tokens of a chunk (default: 32)")
    parser.add_argument("--window", type=int, metavar="N", help=f"tokens (default: {WINDOW}, or the model's context)")
    parser.add_argument(
        "--stride", type=int, metavar="N", help="tokens from one window to the next (default: the window)"
    )
    parser.add_argument("--tokens", type=int, metavar="N", help=f"to score, at least (default: {TOKENS} or all)")
    add_injections(parser)
    parser.add_argument(
        "--controls", action="store_true", help="check that what is exact scores so, and what is broken fails"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of the model (default: the checkpoint's)")
    parser.add_argument("--device", metavar="NAME", help="such as cpu or cuda:0 (default: cuda where there is a GPU)")
    parser.add_argument("--output", metavar="FILE", help="results as JSON; a second run goes on where one stopped")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """`hf-kvquant eval perplexity`.

    Raises:
        Refused: The run has failed its own checks, or memory has run out.
        UsageError: An argument has no meaning, or does not fit the model or the text.
    """
    started = time.monotonic()
    presets = checked_presets(args.preset, WHERE, tuple(PRESETS))
    presets = [UNQUANTIZED, *(name for name in presets if name != UNQUANTIZED)]
    check_positive(args)
    device = checked_device(args.device, WHERE)
    source, text = read_source(args)
    try:
        model, tokenizer = load(args.model, args.dtype, device, WHERE)
        load_calibration(model, args.model)
        inject(model, args, WHERE)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise Refused(
            f"{WHERE}: memory must suffice for {args.model}, which it does not. Use --dtype bfloat16."
        ) from error
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    windows, begins = cut(ids, args, model)
    stride = args.stride or windows.shape[1]
    settings = {
        "evaluation": "perplexity",
        "model": place(Path(args.model)) if Path(args.model).exists() else args.model,
        "weights_sha256": weights_hash(model),
        "tokens_sha256": hashlib.sha256(ids.numpy().tobytes()).hexdigest(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(device),
        "source": source,
        "mode": args.mode,
        "chunk": args.chunk,
        "first_chunk": FIRST_CHUNK,
        "window": windows.shape[1],
        "stride": stride,
        "begins": begins,
        "words_per_token": len(text.split()) / len(ids),
        "injected_outliers": args.inject_outliers,
        "injected_bias": args.inject_bias,
        "presets": {name: KVQuantConfig.from_preset(name).to_dict() for name in presets},
        "controls": args.controls,
    }
    try:
        record = RunRecord.open(Path(args.output).expanduser() if args.output else None, settings)
    except ValueError as error:
        raise UsageError(f"{WHERE}: `--output` cannot be used. {error}") from error
    modes = MODES if args.mode == "all" else (args.mode,)
    console = Console(highlight=False)
    steps = [(mode, index) for mode in modes for index in range(len(begins))]
    try:
        with bar(console) as progress:
            task = progress.add_task("modes agree?", total=len(steps) + 1 + args.controls)
            if record.get("gate") is None:
                record.put("gate", check_modes(model, windows[:1, :GATE_TOKENS].to(device), presets, args.chunk))
            progress.advance(task)
            if args.controls:
                progress.update(task, description="controls")
                if record.get("controls") is None:
                    record.put("controls", run_controls(model, windows[:1, :GATE_TOKENS].to(device), presets))
                progress.advance(task)
            for mode, index in steps:
                progress.update(task, description=f"{mode}, window {index + 1} of {len(begins)}")
                part = f"{mode} {begins[index]}"
                if record.get(part) is None:
                    compared = compare(
                        model,
                        windows[index : index + 1].to(device),
                        {name: name for name in presets},
                        first_chunk=FIRST_CHUNK,
                        chunk_size=1 if mode == "decode" else args.chunk,
                        simulate=mode == "simulated",
                    )
                    # Of a window that overlaps the one before, what is new.
                    newest = None if begins[index] == 0 else stride
                    record.put(part, {name: of_window(name, each, newest) for name, each in compared.items()})
                progress.advance(task)
    except OutOfMemory as error:
        kept = f" What was measured before is in {args.output}." if args.output else ""
        raise Refused(
            f"{WHERE}: memory must suffice for {error.name}, which it does not. Use a smaller --window, fewer "
            f"--preset, or --mode chunked with a smaller --chunk.{kept}"
        ) from error
    except NotImplementedError as error:
        raise UsageError(f"{WHERE}: {args.model} cannot be measured. {error}") from error
    summary = {mode: summarize(record, mode, presets, settings) for mode in modes}
    record.put("summary", {"modes": summary, "seconds": round(time.monotonic() - started, 1)})
    show(console, summary, settings)


def check_positive(args: argparse.Namespace) -> None:
    """Refuse numbers that have no meaning."""
    for name in ("chunk", "window", "stride", "tokens", "inject_outliers", "inject_bias"):
        value = getattr(args, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UsageError(f"{WHERE}: `--{name.replace('_', '-')}` must be positive, got {value}.")


def bar(console: Console) -> Progress:
    """A progress bar with the time that is left, gone when it is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console, transient=True)


def read_source(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """What is measured, and where it is from."""
    if (args.text is None) == (args.dataset is None):
        got = "neither" if args.text is None else "both"
        raise UsageError(f"{WHERE}: `--text` or `--dataset` must be given, got {got}. Add --text FILE.")
    if args.text is not None:
        text, name = read_text(args.text, f"{WHERE}: `--text`"), args.text
        source = {"text": Path(name).name, "sha256": sha256(Path(name)), "convention": "the text as it is"}
    else:
        name = args.dataset
        text = "\n\n".join(read_rows(args))
        source = {"dataset": name, "split": args.split, "convention": "rows joined by two newlines"}
    if not text.strip():
        raise UsageError(
            f"{WHERE}: `--{'dataset' if args.text is None else 'text'}` {name} must hold text, got nothing but white "
            "space. Name another."
        )
    return source, text


def read_rows(args: argparse.Namespace) -> list[str]:
    """The rows of a data set."""
    try:
        import datasets  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError as error:
        raise UsageError(
            f"{WHERE}: `--dataset` needs the package datasets, which is not installed. pip install datasets, or use "
            "--text FILE."
        ) from error
    name, _, config = args.dataset.partition(":")
    try:
        rows = datasets.load_dataset(name, config or None, split=args.split)
        return [str(row) for row in rows[args.field]]
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(
            f"{WHERE}: `--dataset` must be one that can be loaded, with --split {args.split} and --field {args.field}, "
            f"got {args.dataset}: {reason}"
        ) from error


def cut(ids: Tensor, args: argparse.Namespace, model: PreTrainedModel) -> tuple[Tensor, list[int]]:
    """The windows to measure (`[windows, window]` int64), spread over the text, and where each begins."""
    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    window = args.window or min(WINDOW, context or WINDOW)
    stride = args.stride or window
    least = FIRST_CHUNK + 2  # of which one is exact, one is scored, and one is only predicted
    if window < least or (context is not None and window > context):
        most = "" if context is None else f" and at most the model's {context} positions"
        raise UsageError(f"{WHERE}: `--window` must be at least {least}{most}, got {window}.")
    if stride > window - least + 1 and stride != window:
        raise UsageError(
            f"{WHERE}: `--stride` must be the window or less than it by {least - 1}, got {stride} with {window} tokens."
        )
    if len(ids) < window:
        raise UsageError(
            f"{WHERE}: the text must fill a window of {window} tokens, got {len(ids)}. Use --window {len(ids)} or a "
            "longer text."
        )
    begins = list(range(0, len(ids) - window + 1, stride))
    scored = min(stride, window - 1 - FIRST_CHUNK)
    wanted = -(-(args.tokens or TOKENS) // scored)
    if args.tokens is not None and wanted > len(begins):
        raise UsageError(
            f"{WHERE}: `--tokens` must be at most {len(begins) * scored} for this text, got {args.tokens}. Use fewer, "
            "or a longer text."
        )
    # Spread over the text, which may be a sequence of articles, rather than its first few.
    wanted = min(wanted, len(begins))
    chosen = [begins[index * len(begins) // wanted] for index in range(wanted)]
    return torch.stack([ids[begin : begin + window] for begin in chosen]), chosen


def weights_hash(model: PreTrainedModel) -> str:
    """A hash of what the model computes with, injected or calibrated weights included."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# --- what a run must pass ---------------------------------------------------------------------------------------------


def check_counter(name: str, result: Fidelity) -> None:
    """Abort where a number would not be one of the quantised cache.

    Raises:
        Refused: It would not.
    """
    if result.pairs_read != result.pairs_expected:
        raise Refused(
            f"{WHERE}: preset {name} must read {result.pairs_expected} (query, token) pairs from codes, got "
            f"{result.pairs_read}. Some layer attended to something else, as the log above says; the number would be "
            "that of another cache."
        )


@torch.inference_mode()
def log_probs(model: PreTrainedModel, ids: Tensor, config: str | None, chunks: Chunks) -> Tensor:
    """`[tokens, vocab_size]`: all log-probabilities of a text under one config; `None` is transformers' own cache."""
    with route(model, simulate=chunks.simulate):
        name = f"preset {config}" if config else "the unquantised cache"
        return torch.cat(list(Stream(model, ids, config, chunks, name=name)))


def check_modes(model: PreTrainedModel, ids: Tensor, presets: Sequence[str], chunk: int) -> dict[str, Any]:
    """How far the modes are apart, per preset, on a text (`[1, tokens]`): in mean KL divergence from each other, or, in
    16 bits, in that from the unquantised cache.

    Modes are compared where they are the same function: the simulation of chunks with chunks, that of single tokens
    with decoding, and chunks with decoding unless a block of tokens that ends within a chunk makes them differ.

    Raises:
        Refused: Two modes disagree.
    """
    reference = log_probs(model, ids, None, Chunks(FIRST_CHUNK, chunk))
    found: dict[str, Any] = {}
    for name in presets:
        config = KVQuantConfig.from_preset(name)
        decode, chunked, as_decode = (
            log_probs(model, ids, name, Chunks(FIRST_CHUNK, *how)) for how in ((1,), (chunk,), (1, True))
        )
        has_blocks = config.key.block_size is not None
        as_chunked = log_probs(model, ids, name, Chunks(FIRST_CHUNK, chunk, True)) if has_blocks else as_decode
        pairs = {"simulated and decode": (decode, as_decode), "simulated and chunked": (chunked, as_chunked)}
        if not has_blocks:
            pairs["chunked and decode"] = (decode, chunked)
        distance = mean(divergence(reference, decode))
        bound = GATE_NONE if name == UNQUANTIZED else max(GATE_NONE, GATE_SHARE * distance)
        means = {what: mean(divergence(*both)) for what, both in pairs.items()}
        if model.dtype != torch.float32:
            apart = [divergence(reference, one) - divergence(reference, other) for one, other in pairs.values()]
            means = {what: abs(mean(each)) for what, each in zip(pairs, apart, strict=True)}
            error = max(float(each.double().std()) / len(each) ** 0.5 for each in apart)
            bound = max(GATE_NONE, GATE_SHARE_OF_MEAN * distance, GATE_ERRORS * error)
            if name == UNQUANTIZED:
                bound = math.inf  # it is nothing but rounding, which is what this row is there to show
        found[name] = {"kld": distance, "between": means, "bound": bound}
        for what, each in means.items():
            if not each <= bound:
                raise Refused(
                    f"{WHERE}: preset {name} must give the same distribution {what} within {bound:.1e} nats a token, "
                    f"got {each:.1e}. Attention depends on how a text comes: a bug, please report it."
                )
    return found


def run_controls(model: PreTrainedModel, ids: Tensor, presets: Sequence[str]) -> dict[str, Any]:
    """Negative controls on a text (`[1, tokens]`): what is exact must score so, and what is broken must fail.

    Raises:
        Refused: A control does not come out as it must.
    """
    chunks = Chunks(FIRST_CHUNK, 32)
    reference = log_probs(model, ids, None, chunks)
    exact = mean(divergence(reference, log_probs(model, ids, UNQUANTIZED, chunks)))
    if model.dtype == torch.float32 and not exact < GATE_NONE:
        raise Refused(
            f"{WHERE}: control: `none` must be within {GATE_NONE} nats of the unquantised cache, got {exact}."
        )
    found: dict[str, Any] = {"none": exact, "permuted_scales": {}}
    for name in presets:
        if name == UNQUANTIZED:
            continue
        broken = permuted(model, ids, name)
        agreement = mean((broken.argmax(-1) == reference.argmax(-1))[FIRST_CHUNK:])
        found["permuted_scales"][name] = agreement
        if not agreement < CONTROL_AGREEMENT:
            raise Refused(
                f"{WHERE}: control: {name} with the scales of its tokens permuted must agree with the unquantised "
                f"cache in fewer than {CONTROL_AGREEMENT:.0%} of the tokens, got {agreement:.1%}. This text or model "
                "cannot show an error of that kind."
            )
    # A count of nothing must not pass for the one that there is.
    counted = compare(model, ids, {name: name for name in presets}, first_chunk=FIRST_CHUNK, chunk_size=32)
    for name, result in counted.items():
        check_counter(name, result)
        if result.pairs_expected:
            try:
                check_counter(name, Fidelity(**{**vars(result), "pairs_read": 0}))
            except Refused:
                continue
            raise Refused(f"{WHERE}: control: a count of 0 must abort for {name}, but did not.")
    found["count_of_0_aborts"] = True
    return found


@torch.inference_mode()
def permuted(model: PreTrainedModel, ids: Tensor, name: str) -> Tensor:
    """`[tokens, vocab_size]`: log-probabilities where tokens have the scales and zeros of other tokens.

    Where a channel has a scale for a block of tokens, it gets that of another channel.
    """
    with route(model, simulate=False):
        stream = Stream(model, ids, name, Chunks(FIRST_CHUNK, 1), name=f"preset {name}")
        pieces = []
        for piece in stream:
            pieces.append(piece)
            for storage in stream.storages:
                for planes in (storage.key_planes, storage.value_planes):
                    assert planes is not None
                    for plane in (planes.scale, planes.zero):
                        if plane is not None:
                            plane[..., : storage.length] = plane[..., : storage.length].roll(1, -1)
        return torch.cat(pieces)


# --- what is added up -------------------------------------------------------------------------------------------------


def mean(values: Tensor) -> float:
    """In float64."""
    return float(values.double().mean())


def of_window(name: str, result: Fidelity, newest: int | None) -> dict[str, Any]:
    """What a window says about a preset.

    Args:
        name: The preset.
        result: Of the comparison.
        newest: How many tokens at the end count; `None` for all.

    Raises:
        Refused: The counter differs from its closed form.
    """
    check_counter(name, result)
    last = slice(None) if newest is None else slice(-newest, None)
    nll, reference_nll = result.nll.double()[last], result.reference_nll.double()[last]
    return {
        "pairs_read": result.pairs_read,
        "pairs_expected": result.pairs_expected,
        "tokens": len(nll),
        "nll": float(nll.sum()),
        "reference_nll": float(reference_nll.sum()),
        "squared_delta_p": float((torch.exp(-nll) - torch.exp(-reference_nll)).square().sum()),
        "agreeing": int(result.agrees[last].sum()),
        # Four digits suffice for quantiles, and for the divergence by position.
        "kld": [float(f"{max(value, 0.0):.3e}") for value in result.kld[last].tolist()],
    }


def summarize(
    record: RunRecord, mode: str, presets: Sequence[str], settings: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """One mode's aggregates over all windows, per preset."""
    parts = [record.get(f"{mode} {begin}") or {} for begin in settings["begins"]]
    rows = {}
    for name in presets:
        windows = [part[name] for part in parts]
        kld = torch.tensor([value for window in windows for value in window["kld"]], dtype=torch.float64)
        total = {key: sum(window[key] for window in windows) for key in windows[0] if key != "kld"}
        by_window = torch.tensor([sum(window["kld"]) / len(window["kld"]) for window in windows], dtype=torch.float64)
        nll, reference_nll = total["nll"] / total["tokens"], total["reference_nll"] / total["tokens"]
        rows[name] = {
            "scored_tokens": len(kld),
            "kld": float(kld.mean()),
            "kld_standard_error": float(by_window.std() / len(windows) ** 0.5) if len(windows) > 1 else None,
            "kld_median": float(kld.median()),
            "kld_p99": float(kld.quantile(0.99)),
            "kld_max": float(kld.max()),
            "agreement": total["agreeing"] / len(kld),
            "rms_delta_p": (total["squared_delta_p"] / total["tokens"]) ** 0.5,
            "perplexity": math.exp(nll),
            "perplexity_per_word": _exp(nll / settings["words_per_token"]),
            "perplexity_change": math.exp(nll - reference_nll) - 1,
            "pairs_read": total["pairs_read"],
            "pairs_expected": total["pairs_expected"],
        }
    return rows


def _exp(value: float) -> float:
    """What is too large for a float is infinite, and so unknown in a record."""
    return math.exp(value) if value < 700 else math.inf


def show(console: Console, summary: Mapping[str, Mapping[str, Any]], settings: Mapping[str, Any]) -> None:
    """Print a table per mode, and below it what its columns mean."""
    for mode, rows in summary.items():
        how = f", chunks of {settings['chunk']}" if mode != "decode" else ""
        table = Table(
            title=f"{settings['model']}, {settings['dtype']}, {mode}{how}", title_justify="left", title_style="bold"
        )
        likelihoods = Table()
        for each, headings in (
            (table, ("KL, nats/token", "median", "99 %", "max", "agreement")),
            (likelihoods, ("perplexity", "change", "per word", "RMS Δp")),
        ):
            each.add_column("preset")
            for heading in headings:
                each.add_column(heading, justify="right")
        for name, row in rows.items():
            divergences = [f"{row[key]:.1e}" for key in ("kld", "kld_median", "kld_p99", "kld_max")]
            table.add_row(name, *divergences, f"{row['agreement']:.2%}")
            likelihoods.add_row(
                name,
                f"{row['perplexity']:.3f}",
                f"{row['perplexity_change']:+.2%}",
                f"{row['perplexity_per_word']:.1f}",
                f"{row['rms_delta_p']:.2%}",
            )
        console.print(table)
        console.print(likelihoods)
    first = next(iter(summary.values()))[UNQUANTIZED]
    console.print(
        f"{first['scored_tokens']:,} tokens in windows of {settings['window']}, each from an empty cache whose first "
        "token is exact. KL, agreement of the most likely next token and RMS change of the true token's probability: "
        "against the unquantised cache in the same run. Per word: of white space, by its tokens per "
        "word. All presets read as many (query, token) pairs from codes as they must, and modes agree.",
        style="dim",
    )
