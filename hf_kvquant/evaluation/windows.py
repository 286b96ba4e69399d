"""The text that `eval perplexity` measures, and the windows that it is cut into.

A text can be read in two ways: as it is, or as rows joined by two newlines, as papers read WikiText (`--rows`,
`--dataset`). It is tokenised once. The windows are spread over the whole text, which may be a sequence of articles, and
each starts with an empty cache.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..models.text_config import context_of, positions_of
from .arguments import UsageError, read_text
from .provenance import sha256

WHERE = "eval perplexity"
WINDOW = 2048
TOKENS = 16384
SPLIT, FIELD = "test", "text"
ROWS = "rows joined by two newlines"
FIRST_CHUNK = 1  # tokens of each window that fill the cache before a code is read, and so are exact


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add the options that name the text."""
    parser.add_argument("--text", metavar="FILE", help="the text to measure, as it is; either this or --dataset")
    parser.add_argument(
        "--rows", action="store_true", help="join the lines of --text by two newlines, as papers do with WikiText"
    )
    parser.add_argument("--dataset", metavar="NAME[:CONFIG]", help="rows of a data set instead, joined by two newlines")
    parser.add_argument("--split", metavar="NAME", help=f"with --dataset (default: {SPLIT})")
    parser.add_argument(
        "--field", metavar="NAME", help=f"field with the text of a row, with --dataset (default: {FIELD})"
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how much of the text is measured."""
    parser.add_argument(
        "--window", type=int, metavar="N", help=f"tokens of a window (default: {WINDOW}, or the model's context)"
    )
    parser.add_argument(
        "--stride", type=int, metavar="N", help="tokens from one window to the next (default: the window)"
    )
    parser.add_argument("--tokens", type=int, metavar="N", help=f"score at least N tokens (default: {TOKENS} or all)")


def read_source(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Where the text comes from, for the record, and the text.

    Raises:
        UsageError: Options contradict each other, the text cannot be read, or it is empty.
    """
    if (args.text is None) == (args.dataset is None):
        got = "neither" if args.text is None else "both"
        raise UsageError(f"{WHERE}: `--text` or `--dataset` must be given, got {got}. Add --text FILE.")
    for option, wanted, remedy in (
        ("split", "dataset", "Leave it out."),
        ("field", "dataset", "Leave it out."),
        ("rows", "text", "Rows of a data set are joined without it: leave it out."),
    ):
        if getattr(args, option) and getattr(args, wanted) is None:
            raise UsageError(f"{WHERE}: `--{option}` must come with --{wanted}, got it without. {remedy}")
    if args.text is not None:
        text, name = read_text(args.text, f"{WHERE}: `--text`"), args.text
        convention = ROWS if args.rows else "the text as it is"
        source = {"text": Path(name).name, "sha256": sha256(Path(name)), "convention": convention}
        if args.rows:
            # Like the rows of the data set: each line with its newline, blank lines as empty strings.
            text = "\n\n".join(line if line.strip() else "" for line in text.splitlines(keepends=True))
    else:
        name = args.dataset
        text = "\n\n".join(read_rows(args))
        source = {"dataset": name, "split": args.split or SPLIT, "convention": ROWS}
    if not text.strip():
        raise UsageError(
            f"{WHERE}: `--{'dataset' if args.text is None else 'text'}` {name} must hold text, got nothing but white "
            "space. Name another."
        )
    return source, text


def read_rows(args: argparse.Namespace) -> list[str]:
    """The rows of a data set.

    Raises:
        UsageError: The package `datasets` is not installed, or the data set cannot be loaded.
    """
    try:
        import datasets  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError as error:
        raise UsageError(
            f"{WHERE}: `--dataset` needs the package datasets, which is not installed. pip install datasets, or use "
            "--text FILE."
        ) from error
    name, _, config = args.dataset.partition(":")
    split, field = args.split or SPLIT, args.field or FIELD
    try:
        rows = datasets.load_dataset(name, config or None, split=split)
        return [str(row) for row in rows[field]]
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(
            f"{WHERE}: `--dataset` must be one that can be loaded, with --split {split} and --field {field}, "
            f"got {args.dataset}: {reason}"
        ) from error


def cut(ids: Tensor, args: argparse.Namespace, model: PreTrainedModel) -> tuple[Tensor, list[int]]:
    """Cut a tokenised text (`[tokens]` int64) into windows.

    Returns:
        The windows to measure (`[windows, window]` int64), spread over the text, and the token where each begins.

    Raises:
        UsageError: `--window`, `--stride` or `--tokens` does not fit the text or the model.
    """
    context = context_of(model)
    window = args.window or positions_of(model, WINDOW)
    stride = args.stride or window
    least = FIRST_CHUNK + 2  # one token is exact, one is scored, and one is only predicted
    if window < least or (context is not None and window > context):
        most = "" if context is None else f" and at most the model's {context} positions"
        raise UsageError(f"{WHERE}: `--window` must be at least {least}{most}, got {window}.")
    if stride > window - least + 1 and stride != window:
        raise UsageError(
            f"{WHERE}: `--stride` must be the window or less than it by {least - 1}, got {stride} with {window} tokens."
        )
    if len(ids) < window:
        remedy = f"--window {len(ids)} or " if len(ids) >= least else ""
        raise UsageError(
            f"{WHERE}: the text must fill a window of {window} tokens, got {len(ids)}. Use {remedy}a longer text."
        )
    begins = list(range(0, len(ids) - window + 1, stride))
    scored = min(stride, window - 1 - FIRST_CHUNK)
    wanted = -(-(args.tokens or TOKENS) // scored)
    if args.tokens is not None and wanted > len(begins):
        raise UsageError(
            f"{WHERE}: `--tokens` must be at most {len(begins) * scored} for this text, got {args.tokens}. Use fewer, "
            "or a longer text."
        )
    # Spread over the text, not only its first articles.
    wanted = min(wanted, len(begins))
    chosen = [begins[index * len(begins) // wanted] for index in range(wanted)]
    return torch.stack([ids[begin : begin + window] for begin in chosen]), chosen
