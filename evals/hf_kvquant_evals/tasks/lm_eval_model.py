"""The lm-eval model class `hf_kvquant`: log-likelihoods and generation that read the quantised cache.

lm-eval's own class scores a text in one forward without a cache, so every preset looks lossless. Here a text is scored
in one of two modes. *decode*: the context without its last token fills the cache; that token and the continuation then
come in later chunks, through append and the decode kernel, as in a chat. *simulated*: one forward computes the same
function without cache and kernels (`simulation.py`). The pairs read from codes are counted for every batch.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from torch import Tensor

from hf_kvquant import ops
from hf_kvquant.attention.backends import without_cudnn
from hf_kvquant.cache.kvquant_cache import KVQuantCache
from hf_kvquant.cache.layers import KVQuantLayer
from hf_kvquant.common.progress import show_progress
from hf_kvquant.config import DEFAULT_PRESET, KVQuantConfig
from hf_kvquant.models.text_config import text_config_of
from hf_kvquant.patching import patch
from hf_kvquant.transforms.of_model import key_transforms
from hf_kvquant.upstream.releases import with_cache

from ..errors import CannotScore, NothingRead
from ..measuring.pairs import Pairs, check_pairs, count_pairs, expected_pairs, pairs_of
from ..measuring.simulation import simulated, simulated_cache, why_not_simulated
from ..measuring.steps import read_as_single_steps
from .batches import Row, Score, batches, max_padded_length
from .data import MODES
from .paged_generation import Prompt, generate
from .paged_scores import Scorer
from .scoring import Answer, Request, ScoringLM

# Tokens of each chunk after the first: the most that see each other as codes. So the logits of a long text (lm-eval's
# wikitext) are never held at once.
CHUNK_SIZE = ops.MAX_DRAFTED
# Pages of 128 tokens for each row of `batch_size`, when `batching` generates.
GENERATION_PAGES = 32
# What a request of generation may say besides its stop sequences and its length.
_GREEDY = (("do_sample", False), ("temperature", 0.0))


@register_model("hf_kvquant")
class KVQuantLM(ScoringLM):
    """A causal language model with a quantised cache, for lm-eval.

    Scores do not depend on the batch, except through the order of sums, which can flip a code. On the reference model
    (float32, PIQA, root mean squares), `int8` moves scores by 0.088 nats, batches of 8 instead of 1 by 0.005, and
    embeddings changed in their last bit or two by 0.017. lm-eval 0.4.13 knows the name once this module is imported;
    later versions find it by the entry point.

    Args:
        pretrained: A folder, a hub id or a model; it stays patched.
        preset: A preset's name, or a config.
        mode: How log-likelihoods are computed, `"decode"` or `"simulated"`. Generation always decodes.
        batch_size: Rows per forward; a number. With `batching`, rows of 128 tokens.
        batching: Score and generate over pages of codes, without padding: see `paged_scores.py`. Call `close` at the
            end: until then, the model serves nothing else.
        **kwargs: Passed to lm-eval's `HFLM`.

    Raises:
        NotImplementedError: The model's cache cannot be quantised.
        TypeError, ValueError: An argument is invalid.

    Example:
        >>> lm = KVQuantLM(model, "int4", tokenizer=tokenizer, batch_size=8)
        >>> lm_eval.simple_evaluate(lm, tasks=["piqa"])
    """

    def __init__(
        self,
        pretrained: Any,
        preset: str | KVQuantConfig | Mapping[str, Any] = DEFAULT_PRESET,
        mode: str = "decode",
        batch_size: int | str | None = 1,
        batching: bool = False,
        **kwargs: Any,
    ) -> None:
        if batching and mode != "decode":
            raise ValueError(f"KVQuantLM: `mode` must be 'decode' with batching, got {mode!r}. Leave out one of them.")
        if mode not in MODES:
            raise ValueError(f"KVQuantLM: `mode` must be one of {', '.join(MODES)}, got {mode!r}.")
        if not str(batch_size).isdigit() or int(str(batch_size)) < 1:
            raise ValueError(
                f"KVQuantLM: `batch_size` must be a positive number, got {batch_size!r}. Start with 8 and double it."
            )
        super().__init__(pretrained, backend="causal", batch_size=batch_size, **kwargs)
        self.mode = mode
        self._is_batched = batching
        self._scorer: Scorer | None = None
        if batching and self.mixed_precision_dtype is not None:
            raise ValueError(
                f"KVQuantLM: `mixed_precision_dtype` must be None with batching, got {self.mixed_precision_dtype}. "
                "Load the model in that dtype."
            )
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and self.world_size == 1 and kwargs.get("tp_plan") is None:
            # HFLM spreads items over processes only for models that it loads itself, onto GPUs.
            self.accelerator = Accelerator(cpu=self.device.type == "cpu")
            # Without this, gloo's threads can outlive their process group when the interpreter exits, which aborts the
            # process: about 1 in 8 on a busy machine.
            atexit.register(self.accelerator.end_training)
            self._rank, self._world_size = self.accelerator.process_index, self.accelerator.num_processes
        self._unsimulated = why_not_simulated(self.model) if mode == "simulated" else None
        self.use(preset)

    def use(self, preset_or_config: str | KVQuantConfig | Mapping[str, Any]) -> None:
        """Score with another preset from now on. If that raises, as for `patch`, nothing has changed."""
        config = KVQuantConfig.resolve(preset_or_config)
        if self._unsimulated is not None:
            raise NotImplementedError(self._unsimulated)
        self.close()
        patch(self.model, config)
        self.quant_config = config
        self._transforms = key_transforms(self.model, config)
        self.pairs_read = self.pairs_expected = self.pairs_dequantized = 0

    def close(self) -> None:
        """Give back the pages of `batching`. They are made again when they are needed."""
        if self._scorer is not None:
            self._scorer.close()
            self._scorer = None

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[Answer]:
        """See `ScoringLM._answered`.

        `override_bs` is given for the segments of rolling texts, which come in batches and show no progress.
        """
        results: list[Answer] = [(0.0, False)] * len(requests)
        for index, (answer,) in self._answered(requests, is_quiet=disable_tqdm or override_bs is not None):
            results[index] = answer
            text = requests[index][0]
            if text is not None:
                self.cache_hook.add_partial("loglikelihood", text, answer)
        return results

    def _batches(self, rows: Iterable[Row]) -> Iterator[list[Row]]:
        """See `ScoringLM`. Padded only where that does not change scores."""
        if self._is_batched:
            if self._scorer is None:
                self._scorer = Scorer(self.model, self.quant_config, int(self.batch_size), self.max_length)
            return self._scorer.batches(rows)
        num_layers = int(text_config_of(self.model).num_hidden_layers)
        max_padded = max_padded_length([self.quant_config.formats(index) for index in range(num_layers)])
        return batches(rows, self.batch_size, max_padded)

    def _score(self, rows: list[Row]) -> list[list[Score]]:
        """See `ScoringLM`. There is one way: under the preset."""
        if self._scorer is None:
            return [self._decode(rows) if self.mode == "decode" else self._simulate(rows)]
        with torch.inference_mode(), without_cudnn():
            scores, read, expected = self._scorer.score(rows)
        self._add(Pairs(pairs_read=read, pairs_expected=expected))
        return [scores]

    @torch.inference_mode()
    def _decode(self, rows: list[Row]) -> list[Score]:
        """Score rows through the cache. Returns what `_scores` returns."""
        cache = KVQuantCache(self.model.config, self.quant_config, key_transforms=self._transforms)
        read_as_single_steps(cache)
        # Rows with the same context fill the cache once, and each then gets a copy. Only our own layers without a state
        # are copied like this.
        can_share = all(isinstance(layer, KVQuantLayer) and not layer.holds_state for layer in cache.layers)
        keys = [row.context if can_share else index for index, row in enumerate(rows)]
        holders = dict(zip(keys, rows, strict=True))
        places = {key: place for place, key in enumerate(holders)}
        place = torch.tensor([places[key] for key in keys], device=self.device)
        firsts = [row.context[: row.first_chunk] for row in holders.values()]
        width = max(map(len, firsts))
        pads = [width - len(first) for first in firsts]
        ids = self._table([(0,) * pad + first for pad, first in zip(pads, firsts, strict=True)])
        positions = torch.arange(width, device=self.device) - self._table([[pad] for pad in pads])  # [holders, width]
        # Padding after a short row is never seen by its queries, and its logits are not used.
        later = self._table([(row.context + row.fed)[row.first_chunk :] for row in rows])
        longest = later.shape[1]

        def pieces() -> Iterator[Tensor]:
            mask, is_even = positions >= 0, not any(pads)
            first = self._forward(
                cache, ids, None if is_even else mask.long(), positions.clamp(min=0), logits_to_keep=1
            )[place, -1:]
            if len(holders) < len(rows):
                cache.batch_select_indices(place)
            mask, sizes = mask[place], positions[place, -1:] + 1
            count_pairs(cache)
            yield first
            for start in range(0, longest, CHUNK_SIZE):
                chunk = later[:, start : start + CHUNK_SIZE]
                ends = torch.arange(start, start + chunk.shape[1], device=self.device)
                seen = torch.cat((mask, mask.new_ones((len(rows), start + chunk.shape[1]))), dim=1)
                yield self._forward(cache, chunk, None if is_even else seen.long(), sizes + ends)

        scores = self._scores(pieces(), [len(row.context) - row.first_chunk for row in rows], rows)
        self._count(cache, len(rows) * expected_pairs(self.model, cache, width + longest, width))
        return scores

    @torch.inference_mode()
    def _simulate(self, rows: list[Row]) -> list[Score]:
        """Score rows in one forward, in which every query sees what it would see in `_decode`."""
        first_chunks = [row.first_chunk for row in rows]
        cache = simulated_cache(self.model, self.quant_config, first_chunk=first_chunks, chunk_size=CHUNK_SIZE)
        ids = self._table([row.context + row.fed for row in rows])
        width = ids.shape[1]
        # Padding is on the right, where no query of a text sees it.
        with simulated(self.model):
            logits = self._forward(cache, ids, None, torch.arange(width, device=self.device).unsqueeze(0))
        self._count(cache, sum(expected_pairs(self.model, cache, width, first) for first in first_chunks))
        return self._scores(iter([logits]), [len(row.context) - 1 for row in rows], rows)

    def _count(self, cache: KVQuantCache, expected: int) -> None:
        """Add the pairs read from the cache of a batch to the counters of this preset, and check their number."""
        self._add(Pairs(pairs_read=pairs_of(cache), pairs_expected=expected, pairs_dequantized=cache.pairs_dequantized))

    def _add(self, pairs: Pairs) -> None:
        """Add the pairs of a batch to the counters of this preset, after a check of their number."""
        check_pairs(f"loglikelihood: mode '{self.mode}'", pairs)
        self.pairs_read += pairs.pairs_read
        self.pairs_expected += pairs.pairs_expected
        self.pairs_dequantized += pairs.pairs_dequantized

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The most likely text of each request up to its first stop sequence."""
        if not self._is_batched or not requests:
            texts: list[str] = super().generate_until(requests, disable_tqdm=disable_tqdm)
            return texts
        self.close()
        prompts = [self._prompt(*request.args) for request in requests]
        is_shown = not disable_tqdm and self.rank == 0
        with show_progress("generation", len(prompts), unit="item", is_shown=is_shown) as tell:
            num_pages = GENERATION_PAGES * int(self.batch_size)
            found, read = generate(self.model, self.tokenizer, self.quant_config, prompts, num_pages, tell)
        # The first token comes from the prompt. Every later one reads at least that, in every layer with codes.
        config, layers = self.quant_config, range(int(text_config_of(self.model).num_hidden_layers))
        least = sum(
            max(0, len(tokens) - 1) * len(prompt.tokens) for prompt, tokens in zip(prompts, found, strict=True)
        ) * any(config.formats(index).is_quantized for index in layers)
        self._check_generation(sum(map(len, found)), least, read)
        self.pairs_read += read
        results = []
        for request, prompt, tokens in zip(requests, prompts, found, strict=True):
            text = postprocess_generated_text(self.tok_decode(tokens), list(prompt.until), self.think_end_token)
            self.cache_hook.add_partial("generate_until", request.args, text)
            results.append(text)
        return results

    def _prompt(self, context: str, gen_kwargs: dict[str, Any]) -> Prompt:
        """What a request of lm-eval asks for, read as `HFLM.generate_until` does."""
        kwargs: dict[str, Any] = dict(normalize_gen_kwargs(gen_kwargs, self.max_gen_toks))
        eos = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        until = handle_stop_sequences(kwargs.pop("until", None), eos=eos)
        most = int(kwargs.pop("max_gen_toks"))
        others = {name: value for name, value in kwargs.items() if (name, value) not in _GREEDY}
        if others or most >= self.max_length:
            raise CannotScore(
                f"generate_until: with batching, texts must be greedy and shorter than {self.max_length} tokens, got "
                f"{ {**others, 'max_gen_toks': most} }. Leave out batching."
            )
        room = self.max_length - most
        ids, _ = self.tok_batch_encode([context], left_truncate_len=room, truncation=self.truncation)
        return Prompt(ids[0].tolist(), most, until)

    def _check_generation(self, new_tokens: int, least: int, found: int) -> None:
        """Refuse texts of which too little was read from codes."""
        if found < least:
            raise NothingRead(
                f"generate: {new_tokens} tokens must have been decoded from codes, got {found} tokens "
                "read. Some layer attended to something else; the log says why."
            )

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any) -> Tensor:
        """Generate through the quantised cache, and check that its codes were read."""
        cache = KVQuantCache(self.model.config, self.quant_config, key_transforms=self._transforms)
        count_pairs(cache)
        generated: Tensor = super()._model_generate(context, max_length, stop, **with_cache(cache), **generation_kwargs)
        read, dequantized = pairs_of(cache), cache.pairs_dequantized
        new_tokens = generated.shape[1] - context.shape[1]
        is_quantized = any(storage.formats.is_quantized for storage in cache.storages)
        # The first new token comes from exact logits. Every later one is a step whose query reads at least the prompt.
        # Beam search and assisted decoding read more, so this is only a lower bound.
        least = max(0, new_tokens - 1) * context.numel() if is_quantized else 0
        self._check_generation(new_tokens, least, read + dequantized)
        self.pairs_read += read
        self.pairs_dequantized += dequantized
        return generated
