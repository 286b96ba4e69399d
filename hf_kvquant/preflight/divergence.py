"""Measures, on a little text, how far cache formats move a model's next-token distribution from the unquantised one.

The text is the user's, or sampled from the model. It is fed to caches in several windows at once: first one token that
fills the cache, then chunks whose queries read codes, as in `generate` or a continued chat.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from ..cache.kvquant_cache import KVQuantCache
from ..cache.layers import KVQuantLayer
from ..calibration.text import MIN_TOKENS, read_windows
from ..common.errors import CannotMeasure
from ..config import KVQuantConfig, LayerFormats
from ..models.probing import arbitrary_ids, chunks_of, forward
from ..models.text_config import positions_of, text_config_of
from ..spec.layout import Shape
from ..storage.rewind import expect_crops
from ..transforms.of_model import key_transforms
from .replay import Replay
from .signals import reason_of

# The text: this many windows of this many tokens, fed in chunks of this size after the first token. Divergences of int4
# on the reference model, summed over layers: .0286; two windows of 512 tokens .0289, one of 2048 .0279; other parts of
# the text .0296 to .0330; five texts that the model sampled .0297 to .0426. Random tokens give .0655, so they are
# unsuitable. Chunks of 64 or 255 change nothing where nothing is dense. In bfloat16 no layer measures below some 4e-4,
# as any changed code makes later layers round differently.
NUM_WINDOWS = 4
WINDOW = 256
CHUNK = 32
# Formats that keep tokens dense are measured on fewer and longer windows, `int4` on two. The longest is a single window
# of all these tokens. With 132 dense tokens, 60 % of what its queries see are codes; in windows of 256 tokens 14 %.
LONG_WINDOW = NUM_WINDOWS * WINDOW
# Where formats are compared with each other, windows are this many times as long. That halves the share of dense
# tokens, which flatter formats with many of them, and doubles the tokens to measure on.
COMPARED_TIMES = 2
# Keys with a scale per channel are read as codes only from the first full block on. To measure them, a window has to be
# longer than a block by this share of one. Behind dense windows, it needs this many times their tokens: then a third of
# what queries see are codes.
BLOCK_MARGIN = 0.5
DENSE_TIMES = 4
# The share of the text, at its end, on which single layers are measured.
TAIL_SHARE = 0.25
# The least tokens of it after which nothing more may be needed.
LEAST_TOKENS = 128
# Divergences are computed for this many logits at a time, which stay in a CPU's caches: two to three times as fast.
_LOGITS_AT_ONCE = 2**18


def alone(index: int, formats: LayerFormats) -> KVQuantConfig:
    """A config that quantises only one layer."""
    return KVQuantConfig.from_preset("none", layers={index: formats})


def tokens_needed(formats: LayerFormats) -> float:
    """How long a window has to be for its queries to read codes."""
    num_dense = formats.sink_length + formats.residual_length
    return DENSE_TIMES * num_dense + (1 + BLOCK_MARGIN) * (formats.key.block_size or 0)


def window_for(formats: Iterable[LayerFormats]) -> int:
    """The length of windows on which all of these formats are measured."""
    needed, window = max(map(tokens_needed, formats), default=0), WINDOW
    while window < min(needed, LONG_WINDOW):
        window *= 2
    return window


def read_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    texts: Iterable[str] | None,
    say: Callable[[str], Any],
    *,
    window: int = WINDOW,
    times: int = 1,
    where: str,
) -> tuple[Tensor, str]:
    """Token ids to measure on, `[windows, tokens]` int64 on the CPU, and a description of their source.

    Windows of given texts are `times` as long, and as many. The model would take too long to write these.
    """
    if tokenizer is None or texts is None:
        return own_text(model, say, window), "text that the model wrote"
    num_tokens, window = max(times * NUM_WINDOWS * WINDOW, MIN_TOKENS), times * window
    batches = read_windows(model, tokenizer, texts, num_tokens=num_tokens, window=window, batch_size=1, where=where)
    windows = [ids[0] for ids, _ in batches]
    longest = max(map(len, windows))
    kept = [window for window in windows if 2 * len(window) >= longest]
    shortest = min(map(len, kept))
    return torch.stack([window[:shortest] for window in kept]), "the texts"


def own_text(model: PreTrainedModel, say: Callable[[str], Any] = lambda text: None, window: int = WINDOW) -> Tensor:
    """Text that the model samples after its BOS token (else EOS, else 0). Tokens that end a text are never drawn."""
    text_config = text_config_of(model)
    ends = _ids(text_config, "eos_token_id") + _ids(getattr(model, "generation_config", None), "eos_token_id")
    first = (_ids(text_config, "bos_token_id") + ends + [0])[0] % text_config.vocab_size
    never = ends + _ids(text_config, "pad_token_id")
    generator = torch.Generator().manual_seed(0)
    cache = DynamicCache(config=text_config)
    ids = [torch.full((NUM_WINDOWS * WINDOW // window, 1), first, device="cpu")]
    length = positions_of(model, window)
    for position in range(1, length):
        say(f"writing a text, token {position} of {length}")
        logits = _logits(model, ids[-1], cache)[:, -1].float().cpu()
        logits[:, [token for token in never if token < logits.shape[1]]] = -math.inf
        # The argmax of logits plus Gumbel noise is a sample from their softmax.
        noise = torch.empty_like(logits).exponential_(generator=generator).log_()
        ids.append((logits - noise).argmax(1, keepdim=True))
    return torch.cat(ids, 1)


def _ids(config: Any, name: str) -> list[int]:
    """The token ids that a config has under a name: none, one or several."""
    given = getattr(config, name, None)
    return [given] if isinstance(given, int) else [int(each) for each in given or ()]


def _logits(model: PreTrainedModel, input_ids: Tensor, cache: Cache) -> Tensor:
    """Logits of a chunk, `[windows, tokens, vocab_size]`."""
    try:
        logits = forward(model, input_ids, cache=cache)
    except Exception as error:
        # Offloaded weights, inputs other than tokens, out of memory: whatever the reason, the model cannot be measured,
        # and the caller reports why.
        raise CannotMeasure(f"the model could not be run ({reason_of(error)})") from error
    if logits.is_meta:
        raise CannotMeasure("its weights are on the meta device. Load them first.")
    return logits


def divergence(exact: Tensor, other: Tensor) -> Tensor:
    """The KL divergence of each next-token distribution (`other`) from an exact one, nats: `[...]` float32 on the CPU.

    Both are `[..., vocab_size]` float32 log-probabilities, which may be minus infinity, as for the padding of a
    vocabulary: what the exact one excludes adds nothing, and what only the other excludes makes it infinite.
    """
    probabilities = exact.exp()
    terms = (probabilities * (exact - other)).masked_fill_(probabilities == 0, 0.0)
    return terms.sum(-1).cpu()


def _log_probabilities(*logits: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Log-probabilities of logits `[windows, tokens, vocab_size]`, a few rows at a time, `[rows, vocab_size]`."""
    rows = max(1, _LOGITS_AT_ONCE // logits[0].shape[-1])
    for parts in zip(*(each.flatten(0, 1).split(rows) for each in logits), strict=True):
        yield tuple(part.float().log_softmax(-1) for part in parts)


def stored_shapes(model: PreTrainedModel) -> dict[int, tuple[Shape, torch.dtype]]:
    """By layer, the shape and the dtype of what it caches. Sends one token through the model, which is patched.

    Raises:
        CannotMeasure: The model cannot be run.
    """
    cache = KVQuantCache(model.config, "none")
    _logits(model, arbitrary_ids(model, 1), cache)
    layers = {index: layer.storage for index, layer in enumerate(cache.layers) if isinstance(layer, KVQuantLayer)}
    return {index: (layer.shape, layer.dtype) for index, layer in layers.items() if layer.dtype is not None}


class Estimate(NamedTuple):
    """A mean over tokens and its standard error, which is infinite if the mean is."""

    mean: float
    error: float

    @classmethod
    def of(cls, each: Tensor) -> Estimate:
        """The estimate from a number for each token, 1-d."""
        each = each.double()
        mean, error = float(each.mean()), float(each.std()) / len(each) ** 0.5 if len(each) > 1 else 0.0
        return cls(mean, error) if math.isfinite(mean) else cls(math.inf, math.inf)


class Cost(NamedTuple):
    """What a config costs on a text, against the unquantised cache."""

    kld: Estimate  # KL divergence of the next token, in nats
    same: Estimate  # share of tokens after which the most likely next token is the same
    perplexity: Estimate  # relative change of the perplexity of the text: .01 is 1 % more

    def __str__(self) -> str:
        same, perplexity = self.same, self.perplexity
        return (
            f"the same next token after {same.mean:.1%} ± {100 * same.error:.1f} of tokens, perplexity "
            f"{perplexity.mean:+.1%} ± {100 * perplexity.error:.1f}"
        )


NO_COST = Cost(Estimate(0.0, 0.0), Estimate(1.0, 0.0), Estimate(0.0, 0.0))  # of a config that quantises nothing


class Meter:
    """Feeds one text (`ids`, `[windows, tokens]`) to caches of a patched model, and compares logits.

    The reference is our cache without quantisation. A cache of transformers would sum in another order. With ours,
    layers before the quantised one are the same to the bit, so measurements in 16 bits show the format instead of that
    noise.

    That is also why one layer alone costs less to measure than all (`Replay`): the layers before it are not run.

    Args:
        model: Patched.
        ids: The text.
    """

    def __init__(self, model: PreTrainedModel, ids: Tensor) -> None:
        self.model, self.ids = model, ids
        self.chunks = chunks_of(ids, 1, CHUNK)
        self.num_scored = ids[:, 1:].numel()
        self.longest = ids.shape[1]
        # Single layers are measured on the last quarter of the text.
        self._num_last = max(1, round(TAIL_SHARE * (len(self.chunks) - 1)))
        cache = self._cache(KVQuantConfig.from_preset("none"))
        self._replay = Replay.of(model, cache, len(self.chunks) - self._num_last)
        with contextlib.nullcontext() if self._replay is None else self._replay.recording():
            self.reference = list(self._run(cache))
        if any(bool(exact.isnan().any()) for logits in self.reference for (exact,) in _log_probabilities(logits)):
            raise CannotMeasure("its logits are not finite. Check the checkpoint, or load it in bfloat16 or float32.")
        if self._replay is not None and not self._is_replayed(0, len(cache.layers) - 1):
            self._replay = None

    def cost(self, config: KVQuantConfig) -> Cost:
        """What a config costs.

        Raises:
            CannotMeasure: The model cannot be run with this config.
        """
        divergences, same, losses = [], [], []
        # What was said next; nothing is known of it behind the last token.
        nexts = F.pad(self.ids[:, 2:], (0, 1), value=-1).split([chunk.shape[1] for chunk in self.chunks[1:]], dim=1)
        for reference, logits, chunk in zip(self.reference, self._run(self._cache(config)), nexts, strict=True):
            said = chunk.flatten().to(logits.device)
            for exact, other in _log_probabilities(reference, logits):
                divergences.append(divergence(exact, other))
                same.append(exact.argmax(-1) == other.argmax(-1))
                word, said = said[: len(exact), None], said[len(exact) :]
                likely, now = (each.gather(1, word.clamp(min=0))[word >= 0] for each in (exact, other))
                losses.append((likely - now).masked_fill(likely == now, 0.0))  # both may be minus infinity
        loss = Estimate.of(torch.cat(losses))
        ratio = math.exp(min(loss.mean, 700.0))
        perplexity = Estimate(ratio - 1, ratio * loss.error)
        return Cost(Estimate.of(torch.cat(divergences)), Estimate.of(torch.cat(same)), perplexity)

    def kld(
        self, index: int, formats: LayerFormats, is_enough: Callable[[Estimate], bool] = lambda found: False
    ) -> Estimate:
        """Mean KL divergence in nats per token with only one layer quantised; infinite if the logits contain NaN.

        It is measured on the last quarter of the text, or only on the start of the quarter once `is_enough` accepts the
        estimate from the chunks so far. What precedes it is read as `generate` reads a prompt: exactly, and then
        quantised. Where a layer cannot be measured that way, it is measured like a config, on the whole text.

        Raises:
            CannotMeasure: The model cannot be run with these formats.
        """
        config = alone(index, formats)
        if self._replay is None:
            return self.cost(config).kld
        found = torch.empty(0, dtype=torch.float32, device="cpu")
        with contextlib.closing(self._replayed(config, index)) as replayed:
            for reference, logits in zip(self.reference[-self._num_last :], replayed, strict=True):
                found = torch.cat([found, *(divergence(*each) for each in _log_probabilities(reference, logits))])
                if len(found) >= LEAST_TOKENS and is_enough(Estimate.of(found)):
                    break
        return Estimate.of(found)

    def reads_codes(self, formats: LayerFormats) -> bool:
        """Whether the text is long enough for keys to be read as codes, or the model's context is too short anyway."""
        needed = tokens_needed(formats)
        return self.longest >= needed or positions_of(self.model, LONG_WINDOW) < needed

    def _cache(self, config: KVQuantConfig) -> KVQuantCache:
        transforms = key_transforms(self.model, config)
        cache = KVQuantCache(self.model.config, config, key_transforms=transforms)
        for storage in cache.storages:
            # Each token of a chunk then reads what it would read in a step of its own: the others as codes, and the
            # same newest tokens dense, for which tails need the rows that they have for crops.
            storage.has_chunks = False
            expect_crops(storage)
        return cache

    def _run(self, cache: KVQuantCache) -> Iterator[Tensor]:
        """Logits of all chunks but the first, which fills the cache."""
        for number, chunk in enumerate(self.chunks):
            logits = _logits(self.model, chunk, cache)
            if number > 0:
                yield logits
        self._check_read(cache, self.longest)

    def _replayed(self, config: KVQuantConfig, first: int) -> Generator[Tensor, None, None]:
        """Logits of the last quarter of the text, for which layers before `first` are not run."""
        assert self._replay is not None
        cache = self._cache(config)
        num_read = self.longest - sum(chunk.shape[1] for chunk in self.chunks[-self._num_last :])
        with self._replay.playing(cache, first):
            for chunk in self.chunks[-self._num_last :]:
                logits = _logits(self.model, chunk, cache)
                num_read += chunk.shape[1]
                self._check_read(cache, num_read)
                yield logits

    def _is_replayed(self, *firsts: int) -> bool:
        """Whether a replay that begins at these layers gives the logits that were recorded, to the bit."""
        none = KVQuantConfig.from_preset("none")
        try:
            replayed = [list(self._replayed(none, first)) for first in firsts]
        except CannotMeasure:
            return False
        return all(all(map(torch.equal, each, self.reference[-self._num_last :])) for each in replayed)

    def _check_read(self, cache: KVQuantCache, num_tokens: int) -> None:
        for index, layer in enumerate(cache.layers):
            # Attention sees tokens only through the cache, so a layer that holds all tokens has had them all read.
            if not isinstance(layer, KVQuantLayer) or not layer.storage.formats.is_quantized:
                continue
            if layer.storage.length != num_tokens:
                raise CannotMeasure(f"layer {index} kept {layer.storage.length} of {num_tokens} tokens")
