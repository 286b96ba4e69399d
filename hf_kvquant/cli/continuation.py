"""Continues prompts under several presets and measures what each costs.

Each preset continues each prompt with `model.generate` on a patched model. The text that the unquantised cache wrote is
then fed through every cache (teacher forcing), so that presets are compared on equal text.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from ..cache.kvquant_cache import KVQuantCache
from ..config import KVQuantConfig
from ..models.probing import chunks_of, forward
from ..patching import patched
from ..preflight.divergence import divergence
from ..presets import UNQUANTIZED
from ..transforms.of_model import key_transforms
from ..upstream.releases import cache_of

# Tokens generated before anything is timed, so that no preset pays for the start of threads and allocators.
WARM_UP_TOKENS = 4


@dataclasses.dataclass(frozen=True)
class Summary:
    """One preset over all prompts: a row of the table."""

    preset: str
    bytes_per_token: int  # of the cache
    peak_bytes: int  # allocated by the largest cache at its end; a growing cache never shrinks
    tokens_per_second: float | None  # one over the median decode step; `None` when no prompt got a second token
    # Compared with the unquantised cache, if that is among the presets: share of tokens after which the most likely
    # next token is the same, mean KL divergence in nats per token, and the number of tokens.
    agreement: float | None = None
    kld: float | None = None
    num_scored: int = 0
    is_served: bool | None = None  # whether decoding attended to codes in every quantised layer


def run_presets(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Tensor],
    presets: Mapping[str, KVQuantConfig],
    *,
    max_new_tokens: int,
    sampling: Mapping[str, Any],
    seed: int,
    on_start: Callable[[int, str], None],
    on_text: Callable[[str], None],
) -> list[Summary]:
    """Continue every prompt under every preset, then compare with the unquantised cache if it is among them.

    Prompts are `[1, tokens]` int64 each, on the model's device. `sampling` has further arguments of `generate`, such as
    `do_sample`; the seed is set before each continuation, so that presets draw the same numbers. `on_start` is called
    with a prompt's index and a preset before its text, `on_text` with each piece of text and a new line at its end.
    """
    for config in presets.values():
        continue_prompt(model, tokenizer, prompts[0], config, max_new_tokens=WARM_UP_TOKENS)
    written: dict[str, list[Continuation]] = {preset: [] for preset in presets}
    for index, prompt in enumerate(prompts):
        for preset, config in presets.items():
            on_start(index, preset)
            torch.manual_seed(seed)
            text = continue_prompt(model, tokenizer, prompt, config, on_text, max_new_tokens=max_new_tokens, **sampling)
            written[preset].append(text)
    results: dict[str, list[Comparison]] = {preset: [] for preset in presets}
    for prompt, text in zip(prompts, written.get(UNQUANTIZED, ()), strict=False):
        first_chunk = prompt.shape[1]
        if text.ids.shape[1] > first_chunk + 1:  # the first new token comes from the prefill, which is exact
            for preset, result in compare(model, text.ids, first_chunk, presets).items():
                results[preset].append(result)
    return [_summary(preset, written[preset], results[preset]) for preset in presets]


class Continuation(NamedTuple):
    """What one preset wrote after one prompt."""

    ids: Tensor  # `[1, tokens]` int64, prompt included
    step_seconds: list[float]  # of each decode step, from one new token to the next, without the prefill
    bytes_per_token: int
    peak_bytes: int


def continue_prompt(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Tensor,
    config: KVQuantConfig,
    on_text: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> Continuation:
    """Continue one prompt (`[1, tokens]` int64) under one config, greedily unless the options of `generate` say."""
    streamer = _Stream(tokenizer, on_text)
    pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    with patched(model, config):
        generate: Any = model.generate
        result = generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            pad_token_id=pad_token_id,
            streamer=streamer,
            return_dict_in_generate=True,
            **{"do_sample": False, **options},
        )
    cache = cache_of(result)
    step_seconds = [after - before for before, after in itertools.pairwise(streamer.times)]
    return Continuation(result.sequences, step_seconds, cache.bytes_per_token, cache.num_bytes)


class Comparison(NamedTuple):
    """What one preset's cache made of a text that the unquantised cache wrote, token by token, on the CPU."""

    kld: Tensor  # `[scored]` float32, nats: KL divergence of the next token, for every token after the prompt
    agrees: Tensor  # `[scored]` bool: whether the most likely next token is the same
    is_served: bool  # whether all quantised layers attended to codes


@torch.inference_mode()
def compare(
    model: PreTrainedModel, ids: Tensor, first_chunk: int, presets: Mapping[str, KVQuantConfig]
) -> dict[str, Comparison]:
    """Feed a text (`[1, tokens]` int64) through the unquantised cache and each preset's, the prompt at once, the rest
    one by one. The last token is only predicted.
    """
    exact: Cache = DynamicCache(config=model.config)
    found: dict[str, list[tuple[Tensor, Tensor]]] = {preset: [] for preset in presets}
    with patched(model, "none"):  # its attention serves every cache of ours
        caches = {
            preset: KVQuantCache(model.config, config, key_transforms=key_transforms(model, config))
            for preset, config in presets.items()
        }
        for number, chunk in enumerate(chunks_of(ids[:, :-1], first_chunk, 1)):
            expected = forward(model, chunk, cache=exact)[0].float().log_softmax(-1)
            for preset, cache in caches.items():
                log_probs = forward(model, chunk, cache=cache)[0].float().log_softmax(-1)
                if number > 0:  # the prompt is exact
                    agrees = log_probs.argmax(-1) == expected.argmax(-1)
                    found[preset].append((divergence(expected, log_probs), agrees.cpu()))
    scores = {preset: [torch.cat(parts) for parts in zip(*pairs, strict=True)] for preset, pairs in found.items()}
    return {
        preset: Comparison(kld, agrees, caches[preset].pairs_dequantized == 0)
        for preset, (kld, agrees) in scores.items()
    }


class _Stream(TextStreamer):
    """Passes text on as soon as it is certain, and notes when each token came."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.on_text = on_text
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """Take the prompt first, then one token at a time."""
        if not self.next_tokens_are_prompt:
            self.times.append(time.perf_counter())
        super().put(value)  # type: ignore[no-untyped-call]

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Pass text on."""
        self.on_text(text + "\n" if stream_end else text)


def _summary(preset: str, written: Sequence[Continuation], results: Sequence[Comparison]) -> Summary:
    scores: dict[str, Any] = {}
    if results:
        kld, agrees = (torch.cat([getattr(result, name) for result in results]).double() for name in ("kld", "agrees"))
        scores = {"agreement": float(agrees.mean()), "kld": float(kld.mean()), "num_scored": kld.numel()}
        scores["is_served"] = all(result.is_served for result in results)
    # The median, because a busy machine stretches some steps and never shortens one.
    steps = [seconds for text in written for seconds in text.step_seconds]
    return Summary(
        preset,
        bytes_per_token=max(text.bytes_per_token for text in written),
        peak_bytes=max(text.peak_bytes for text in written),
        tokens_per_second=1 / statistics.median(steps) if steps else None,
        **scores,
    )
