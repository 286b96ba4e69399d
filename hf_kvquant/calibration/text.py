"""Calibration text: tokenised, cut into windows, and fed to a model one batch of windows at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..attention.observation import Observation, observed
from ..models.probing import evaluating, forward, in_float32
from ..models.text_config import positions_of

MIN_TOKENS = 512  # calibration tokens; fewer say little about the largest key of a channel
# Errors of candidates are measured on a part of the text: attention under each of them takes longer than all the rest.
# They are compared on the same tokens, so few are enough.
ERROR_TOKENS = 4096
MIN_WINDOW = 16  # tokens; the last piece of a text is dropped if it is shorter
# The proof that nothing has changed runs the model on the last tokens of this many windows: more in float16, where few
# tokens show a rounding.
CHECK_WINDOWS, CHECK_TOKENS, CHECK_TOKENS_FLOAT16 = 4, 64, 1024

# Batches of token ids and mask (0 for padding, on the left), `[batch, tokens]` int64 each, on the CPU.
Windows = Sequence[tuple[Tensor, Tensor]]


def read_windows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str],
    *,
    num_tokens: int,
    window: int,
    batch_size: int,
    where: str,
) -> Windows:
    """Tokenise texts and cut them into batches of `batch_size` windows. Shorter windows are padded on the left.

    About `num_tokens` tokens are used (all if there are fewer), spread evenly over the windows of all texts. Windows
    have `window` tokens, or fewer if the model supports no more.

    Raises:
        TypeError, ValueError: The texts are not strings, blank or too short, or the tokenizer is not the model's.
    """
    if isinstance(texts, str):
        raise TypeError(f"{where}: `texts` must be a list of texts, got one str. Put it into a list.")
    least = {"num_tokens": (num_tokens, MIN_TOKENS), "window": (window, MIN_WINDOW), "batch_size": (batch_size, 1)}
    for name, (value, minimum) in least.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ValueError(f"{where}: `{name}` must be an int of at least {minimum}, got {value!r}.")
    embeddings: Any = model.get_input_embeddings()
    vocab_size = embeddings.weight.shape[0]
    if len(tokenizer) > vocab_size or len(tokenizer) < 0.9 * vocab_size:
        raise ValueError(
            f"{where}: `tokenizer` must be the model's, whose vocabulary has {vocab_size} entries, got one with "
            f"{len(tokenizer)}. Load both from the same checkpoint."
        )
    length = positions_of(model, window)
    pieces = _pieces(tokenizer, texts, length, where)
    count = max(1, min(len(pieces), round(num_tokens * len(pieces) / sum(map(len, pieces)))))
    chosen = [pieces[index * len(pieces) // count] for index in range(count)]
    batches = (chosen[start : start + batch_size] for start in range(0, count, batch_size))
    return [(_padded(batch), _padded(list(map(torch.ones_like, batch)))) for batch in batches]


def _pieces(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], length: int, where: str) -> list[Tensor]:
    """The token ids of all texts, in pieces of `length` tokens. The last piece of a text may be shorter."""
    pieces: list[Tensor] = []
    total = num_texts = 0
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"{where}: `texts` must hold texts, got {type(text).__name__}.")
        if not text.strip():
            raise ValueError(
                f"{where}: `texts` must hold text, got nothing but white space in text {num_texts}. Leave it out."
            )
        num_texts += 1
        ids = torch.tensor(tokenizer(text, verbose=False).input_ids, device="cpu")
        total += len(ids)
        pieces += [piece for piece in ids.split(length) if len(piece) >= min(MIN_WINDOW, length)]
    usable = sum(map(len, pieces))
    if usable < MIN_TOKENS:
        raise ValueError(
            f"{where}: `texts` must have at least {MIN_TOKENS} tokens in pieces of {MIN_WINDOW} or more, got {usable} "
            f"of {total} in {num_texts} texts. Add text like the model's future input."
        )
    return pieces


def _padded(rows: list[Tensor]) -> Tensor:
    return pad_sequence(rows, batch_first=True, padding_side="left")


def some(windows: Windows, num_tokens: int) -> Windows:
    """Every n-th batch, so that about `num_tokens` tokens are left; all batches if there are fewer."""
    step = max(1, count_tokens(windows) // num_tokens)
    return windows[::step]


def count_tokens(windows: Windows) -> int:
    """How many tokens windows have, padding excluded."""
    return sum(int(mask.sum()) for _, mask in windows)


def check_ids(windows: Windows, dtype: torch.dtype) -> Tensor:
    """Text for the proof that nothing has changed: the last tokens of a few windows, `[windows, tokens]` int64."""
    rows = [(ids[row], int(mask[row].sum())) for ids, mask in windows for row in range(len(ids))]
    longest = sorted(rows, key=lambda row: -row[1])[:CHECK_WINDOWS]
    limit = CHECK_TOKENS_FLOAT16 if dtype == torch.float16 else CHECK_TOKENS
    tokens = min(limit, *(length for _, length in longest))
    return torch.stack([ids[-tokens:] for ids, _ in longest])


def run_watched(
    model: PreTrainedModel,
    windows: Windows,
    watching: Callable[[Tensor], AbstractContextManager[Any]],
    advance: Callable[[int], Any],
) -> None:
    """Run the model over windows, without keeping activations. See `in_float32` for the dtype that it computes in.

    `watching` makes the context of each forward from its mask, `[batch, tokens]`. After each batch, `advance` gets its
    number of tokens.
    """
    with in_float32(model), evaluating(model), torch.no_grad():
        for ids, mask in windows:
            with watching(mask):
                # Attention is faster without a mask, so one that hides nothing is left out.
                kwargs: dict[str, Any] = {} if mask.all() else {"attention_mask": mask}
                forward(model, ids, only_last=True, **kwargs)
            advance(int(mask.sum()))


def run_windows(
    model: PreTrainedModel,
    windows: Windows,
    layers: Collection[int],
    on_layer: Callable[[Observation, Tensor], Tensor | None],
    advance: Callable[[int], Any],
) -> None:
    """`run_watched`, with the attention of each of the `layers` passed to `on_layer`.

    It also gets `[batch, tokens]` bool on the layer's device, True for real tokens. It may return what attention
    returns instead, as an observer.
    """

    def watching(mask: Tensor) -> AbstractContextManager[Any]:
        def observe(observation: Observation) -> Tensor | None:
            if observation.layer_idx not in layers:
                return None
            return on_layer(observation, mask.to(observation.key.device, torch.bool))

        return observed(model, observe)

    run_watched(model, windows, watching, advance)
