"""Statistics of a model's keys and queries on calibration text, and the error of each choice of smoothing factors.

Both come from running the model over windows of text, one forward at a time; no activations are kept. The error of a
choice is that of the layer's attention output when keys go through the cache's whole transform and the real storage
format (`reference.py`), relative to the output over unquantised keys. The reconstruction error of keys would mislead,
since queries weight the channels. Padding is excluded from both. `search.py` decides which choices there are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..models.text_config import positions_of
from ..spec import reference
from ..spec.formats import KVFormat
from ..spec.key_transform import KeyTransform
from .observation import Observation, forward, observed

MIN_TOKENS = 512  # calibration tokens; fewer say little about the largest key of a channel
MIN_WINDOW = 16  # tokens; the last piece of a text is dropped if it is shorter


@dataclasses.dataclass
class KeyStatistics:
    """Statistics of one layer on calibration text. All tensors are `[num_kv_heads, head_dim]` float32 on the CPU.

    Attributes:
        layer_idx: The layer.
        minimum: Smallest value of each channel of the keys, after RoPE.
        maximum: Largest value of each channel of the keys.
        mean: Mean of the keys.
        mean_square: Mean square of the keys.
        query_mean_square: Mean square of the queries that share the key-value head.
        num_tokens: Tokens seen, padding excluded.
    """

    layer_idx: int
    minimum: Tensor
    maximum: Tensor
    mean: Tensor
    mean_square: Tensor
    query_mean_square: Tensor
    num_tokens: int

    def largest(self, center: Tensor | None) -> Tensor:
        """The largest `|key - center|` of each channel."""
        c = torch.zeros_like(self.mean) if center is None else center.to(self.mean)
        return torch.maximum(self.maximum - c, c - self.minimum)

    def energy(self, center: Tensor | None) -> Tensor:
        """The mean of `(key - center)²` of each channel."""
        if center is None:
            return self.mean_square
        c = center.to(self.mean)
        return (self.mean_square - 2 * c * self.mean + c.square()).clamp(min=0)


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
    """Tokenise texts and cut them into batches of windows.

    Args:
        model: Gives the vocabulary size and the longest window.
        tokenizer: The model's.
        texts: Any number of texts of any length.
        num_tokens: About how many tokens to use (all if there are fewer), spread evenly over the windows of all texts.
        window: Tokens per window.
        batch_size: Windows per forward. Shorter windows are padded on the left.
        where: Opens error messages.

    Returns:
        Batches of token ids and mask (0 for padding), `[batch, tokens]` int64 each, on the CPU.

    Raises:
        TypeError, ValueError: The texts are not strings, blank or too short, or the tokenizer is not the model's.
    """
    if isinstance(texts, str):
        raise TypeError(f"{where}: `texts` must be a list of texts, got one str. Put it into a list.")
    for name, value, least in (("num_tokens", num_tokens, MIN_TOKENS), ("window", window, MIN_WINDOW),
                               ("batch_size", batch_size, 1)):  # fmt: skip
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{where}: `{name}` must be an int of at least {least}, got {value!r}.")
    embeddings: Any = model.get_input_embeddings()
    vocab_size = embeddings.weight.shape[0]
    if len(tokenizer) > vocab_size or len(tokenizer) < 0.9 * vocab_size:
        raise ValueError(
            f"{where}: `tokenizer` must be the model's, whose vocabulary has {vocab_size} entries, got one with "
            f"{len(tokenizer)}. Load both from the same checkpoint."
        )
    length = positions_of(model, window)
    windows: list[Tensor] = []
    total = num_texts = 0
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"{where}: `texts` must hold texts, got {type(text).__name__}.")
        if not text.strip():
            raise ValueError(
                f"{where}: `texts` must hold text, got nothing but white space in text {num_texts}. Leave it out."
            )
        num_texts += 1
        ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
        total += len(ids)
        windows += [piece for piece in ids.split(length) if len(piece) >= min(MIN_WINDOW, length)]
    usable = sum(map(len, windows))
    if usable < MIN_TOKENS:
        raise ValueError(
            f"{where}: `texts` must have at least {MIN_TOKENS} tokens in pieces of {MIN_WINDOW} or more, got {usable} "
            f"of {total} in {num_texts} texts. Add text like the model's future input."
        )
    count = max(1, min(len(windows), round(num_tokens * len(windows) / usable)))
    chosen = [windows[index * len(windows) // count] for index in range(count)]
    batches = []
    for start in range(0, count, batch_size):
        batch = chosen[start : start + batch_size]
        longest = max(map(len, batch))
        ids, mask = (torch.zeros((len(batch), longest), dtype=torch.int64) for _ in range(2))
        for row, piece in enumerate(batch):
            ids[row, longest - len(piece) :] = piece
            mask[row, longest - len(piece) :] = 1
        batches.append((ids, mask))
    return batches


def run_windows(
    model: PreTrainedModel,
    windows: Windows,
    on_layer: Callable[[Observation, Tensor], None],
    advance: Callable[[int], Any],
) -> None:
    """Run the model over windows.

    Args:
        model: Only run.
        windows: As `read_windows` returns them.
        on_layer: Called for each layer's attention. Its second argument is `[batch, tokens]` bool on the layer's
            device, True for real tokens.
        advance: Called after each batch, with its number of tokens.
    """
    for ids, mask in windows:

        def observe(observation: Observation, mask: Tensor = mask) -> None:
            on_layer(observation, mask.to(observation.key.device, torch.bool))

        with observed(model, observe):
            # Attention is faster without a mask, so one that hides nothing is left out.
            kwargs: dict[str, Any] = {} if mask.all() else {"attention_mask": mask}
            forward(model, ids, **kwargs)
        advance(int(mask.sum()))


def collect(
    model: PreTrainedModel, windows: Windows, layers: Iterable[int], advance: Callable[[int], Any] = lambda tokens: None
) -> dict[int, KeyStatistics]:
    """Collect statistics of the keys and queries of some layers. See `run_windows` for the arguments."""
    sums: dict[int, dict[str, Tensor]] = {}
    wanted = set(layers)

    def look(observation: Observation, is_real: Tensor) -> None:
        if observation.layer_idx not in wanted:
            return
        key = observation.key.transpose(1, 2)[is_real].float()  # [real tokens, num_kv_heads, head_dim]
        query = observation.query.transpose(1, 2)[is_real].float().unflatten(1, (key.shape[1], -1))
        seen = {
            "minimum": key.amin(0),
            "maximum": key.amax(0),
            "sum": key.double().sum(0),
            "square": key.double().square().sum(0),
            "query_square": query.double().square().mean(2).sum(0),
            "count": torch.tensor(len(key)),
        }
        total = sums.setdefault(observation.layer_idx, seen)
        if total is not seen:
            for name, value in seen.items():
                combine = {"minimum": torch.minimum, "maximum": torch.maximum}.get(name, torch.add)
                total[name] = combine(total[name], value)

    run_windows(model, windows, look, advance)
    return {
        index: KeyStatistics(
            layer_idx=index,
            minimum=total["minimum"].cpu(),
            maximum=total["maximum"].cpu(),
            mean=(total["sum"].cpu() / total["count"]).float(),
            mean_square=(total["square"].cpu() / total["count"]).float(),
            query_mean_square=(total["query_square"].cpu() / total["count"]).float(),
            num_tokens=int(total["count"]),
        )
        for index, total in sorted(sums.items())
    }


def output_errors(
    model: PreTrainedModel,
    windows: Windows,
    formats: Mapping[int, KVFormat],
    transforms: Mapping[int, Sequence[KeyTransform]],
    advance: Callable[[int], Any] = lambda tokens: None,
) -> dict[int, list[float]]:
    """The relative error of each layer's attention output under each choice of transform, with only keys quantised.

    Args:
        model: No factors are folded into its weights.
        windows: As `read_windows` returns them.
        formats: Per layer, the format of its keys.
        transforms: Per layer, the key transforms to compare.
        advance: As for `run_windows`.

    Returns:
        Per layer and choice: `sqrt(squared error / squared output)`, both sums over all tokens.
    """
    errors = {index: [0.0] * len(choices) for index, choices in transforms.items()}
    sizes = dict.fromkeys(transforms, 0.0)

    def look(observation: Observation, is_real: Tensor) -> None:
        index = observation.layer_idx
        if index not in transforms:
            return
        query, key, value = (x.float() for x in (observation.query, observation.key, observation.value))
        exact = observation.attend(query, key, value)[is_real]
        sizes[index] += float(exact.double().square().sum())
        key = key * is_real[:, None, :, None]  # padding must not widen a scale that several tokens share
        for number, transform in enumerate(transforms[index]):
            out = observation.attend(query, through_cache(key, formats[index], transform.to(key.device)), value)
            errors[index][number] += float((out[is_real] - exact).double().square().sum())

    run_windows(model, windows, look, advance)
    return {
        index: [(error / sizes[index]) ** 0.5 if sizes[index] else 0.0 for error in choices]
        for index, choices in errors.items()
    }


def through_cache(key: Tensor, kv_format: KVFormat, transform: KeyTransform) -> Tensor:
    """Keys as attention over a cache sees them: transformed, quantised, dequantised and transformed back.

    Args:
        key: `[batch, num_kv_heads, tokens, head_dim]` float32.
        kv_format: A quantised format.
        transform: Applied before quantising.
    """
    stored = reference.quantize(reference.transform_key(key, transform), kv_format)
    return reference.undo_key_transform(reference.dequantize(stored, kv_format), transform)
