"""The text that `eval perplexity` measures, and the segments that it is cut into, which the options call windows.

A text can be read in two ways: as it is, or as rows joined by two newlines, as papers read WikiText (`--rows`,
`--dataset`). The segments are spread over the whole text, which may be a sequence of articles.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_kvquant.cli.loading import read_text
from hf_kvquant.common.errors import UsageError
from hf_kvquant.common.naming import sha256
from hf_kvquant.models.text_config import context_of, positions_of

from ..choices import FIELD, SPLIT, TOKENS, WINDOW

ROWS = "rows joined by two newlines"
FIRST_CHUNK = 1  # the prompt of a segment, unless a longer one is asked for


class Segments(NamedTuple):
    """Segments of a text."""

    ids: Tensor  # `[segments, length]` int64
    begins: list[int]
    stride: int  # tokens from one to the next, if all are measured
    prompt: int = FIRST_CHUNK  # tokens of each that fill the cache before a code is read, and so are exact

    @property
    def length(self) -> int:
        """Tokens of a segment."""
        return self.ids.shape[1]

    def newest(self, begin: int) -> int | None:
        """Tokens of the segment from `begin` that are scored, the last ones; `None` if all but the first are."""
        if self.prompt > FIRST_CHUNK:
            return self.length - 1 - self.prompt
        # A segment that overlaps the previous one scores only its new tokens.
        return None if begin == 0 else self.stride


def read_source(
    *,
    text: str | None = None,
    rows: bool = False,
    dataset: str | None = None,
    split: str | None = None,
    field: str | None = None,
) -> tuple[dict[str, Any], str]:
    """Where the text comes from, for the record, and the text. The arguments are the options of these names."""
    if (text is None) == (dataset is None):
        got = "neither" if text is None else "both"
        raise UsageError(f"`--text` or `--dataset` must be given, got {got}. Add --text FILE.")
    for option in (name for name, given in (("split", split), ("field", field)) if given and dataset is None):
        raise UsageError(f"`--{option}` must come with --dataset, got it without. Leave it out.")
    if rows and text is None:
        remedy = "Rows of a data set are joined without it: leave it out."
        raise UsageError(f"`--rows` must come with --text, got it without. {remedy}")
    if text is not None:
        content = read_text("--text", text, "Name another.")
        source = {"text": Path(text).name, "sha256": sha256(Path(text))}
        if not rows:
            return {**source, "convention": "the text as it is"}, content
        # Like the rows of the data set: each line with its newline, blank lines as empty strings.
        lines = (line if line.strip() else "" for line in content.splitlines(keepends=True))
        return {**source, "convention": ROWS}, "\n\n".join(lines)
    assert dataset is not None
    split = split or SPLIT
    content = "\n\n".join(read_rows(dataset, split, field or FIELD))
    if not content.strip():
        raise UsageError(f"`--dataset` {dataset} must hold text, got nothing but white space. Name another.")
    return {"dataset": dataset, "split": split, "convention": ROWS}, content


def read_rows(dataset: str, split: str, field: str) -> list[str]:
    """The rows of a data set, `NAME` or `NAME:CONFIG`."""
    try:
        import datasets  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError as error:
        raise UsageError(
            "`--dataset` needs the package datasets, which is not installed. pip install datasets, or use --text FILE."
        ) from error
    name, _, config = dataset.partition(":")
    try:
        return [str(row) for row in datasets.load_dataset(name, config or None, split=split)[field]]
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(
            f"`--dataset` must be one that can be loaded, with --split {split} and --field {field}, got {dataset}: "
            f"{reason}"
        ) from error


def cut(
    ids: Tensor,
    model: PreTrainedModel,
    *,
    window: int | None = None,
    stride: int | None = None,
    tokens: int | None = None,
    prompt: int = FIRST_CHUNK,
    usual: tuple[int, int] = (WINDOW, TOKENS),
) -> Segments:
    """Cut a tokenised text (`[tokens]` int64) into segments and choose those to measure, spread over the text.

    `window` is the length of a segment, which the model decides if it is left out; `stride` that from one to the next,
    otherwise the window. The first `prompt` tokens of each are fed at once, and not scored. At least `tokens` are
    scored. `usual` has what window and tokens are if left out: at most these, or what the model and the text have.
    """
    context = context_of(model)
    length = window or positions_of(model, usual[0])
    stride = stride or length
    if prompt > FIRST_CHUNK and stride != length:
        raise UsageError(
            f"`--stride` must be left out with --prompt, got {stride}. Windows of a prompt do not overlap."
        )
    least = prompt + 2  # after the exact tokens, one is scored, and one is only predicted
    if length < least or (context is not None and length > context):
        most = "" if context is None else f" and at most the model's {context} positions"
        behind = "" if prompt == FIRST_CHUNK else f" with --prompt {prompt}"
        raise UsageError(f"`--window` must be at least {least}{most}{behind}, got {length}.")
    if stride > length - least + 1 and stride != length:
        raise UsageError(
            f"`--stride` must be the window or less than it by {least - 1}, got {stride} with {length} tokens."
        )
    if len(ids) < length:
        remedy = f"--window {len(ids)} or " if len(ids) >= least else ""
        raise UsageError(f"the text must fill a window of {length} tokens, got {len(ids)}. Use {remedy}a longer text.")
    begins = list(range(0, len(ids) - length + 1, stride))
    scored = min(stride, length - 1 - prompt)
    wanted = -(-(tokens or usual[1]) // scored)
    if tokens is not None and wanted > len(begins):
        raise UsageError(
            f"`--tokens` must be at most {len(begins) * scored} for this text, got {tokens}. Use fewer, or a longer "
            "text."
        )
    # Spread over the text, not only its first articles.
    wanted = min(wanted, len(begins))
    chosen = [begins[index * len(begins) // wanted] for index in range(wanted)]
    return Segments(torch.stack([ids[begin : begin + length] for begin in chosen]), chosen, stride, prompt)
