"""`hf-kvquant bench`: what clients of an OpenAI-compatible server get, and when."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

from ..common.errors import RefusedResult, ServerFailed, UsageError
from ..common.progress import show_progress
from ..common.tables import table_of
from ..serving import load
from .arguments import given
from .loading import read_text

PROMPT_TOKENS = 256
TRIAL_WORDS = 16
LATENCIES = {
    "first_token": "first token",
    "inter_token": "inter-token",
    "per_output_token": "per output token",
    "request": "whole request",
}


def run(args: argparse.Namespace) -> None:
    """Run `hf-kvquant bench`."""
    key = args.api_key or os.environ.get("OPENAI_API_KEY") or "none"
    url = args.url.rstrip("/") + ("" if urlsplit(args.url).path.strip("/") else "/v1")
    text = "" if args.prompts is None else read_text("--prompts", args.prompts, "Write a prompt a line.")
    lines = [line for line in text.splitlines() if line.strip()]
    try:
        model = args.model or asyncio.run(load.models_of(url, key, args.timeout))[0]
        ask = load.Ask(url, model, args.route == "chat", args.max_tokens, key, args.timeout)
        prompts = prompts_of(args, ask, lines)
    except ServerFailed as error:
        raise UsageError(f"`URL` must be a server that answers OpenAI's API, got {url}: {error}.") from error
    with show_progress("bench", len(prompts), unit="request", is_shown=not args.json) as tell:
        answers = asyncio.run(load.run(ask, prompts, args.concurrency, tell))
    results = load.results_of(answers)
    settings = {**given(args, "route", "requests", "concurrency", "max_tokens", "prompts", "seed"), "model": model}
    if args.json:
        print(json.dumps({"url": url, **settings, **results}, indent=2))
    else:
        show({"url": url, **settings}, results)
    if results["failed"]:
        reason = next(answer.error for answer in answers if answer.error is not None)
        raise RefusedResult(f"{results['failed']} of {len(answers)} requests failed, the first of them with: {reason}.")


def prompts_of(args: argparse.Namespace, ask: load.Ask, lines: Sequence[str]) -> list[str]:
    """The prompts that the options name: `lines` again and again, or random words if there are none.

    How many tokens words and the chat template make is for the server to say: it is asked twice for one token first,
    with few and with more words. That also shows whether it answers at all.

    Raises:
        ServerFailed: The server does not answer.
    """
    wanted = args.prompt_tokens or PROMPT_TOKENS
    longest = load.prompts_of(1, 2 * TRIAL_WORDS, args.seed - 1)[0].split()
    trials = lines[:1] or [" ".join(longest[:TRIAL_WORDS]), " ".join(longest)]
    answers = asyncio.run(load.run(dataclasses.replace(ask, max_tokens=1), trials, 1))
    for answer in answers:
        if answer.error is not None:
            raise ServerFailed(answer.error)
    if lines:
        return list(itertools.islice(itertools.cycle(lines), args.requests))
    few, more = (answer.num_prompt for answer in answers)
    a_word = max(more - few, 0) / TRIAL_WORDS or 1.0  # a server without `usage` gives 0
    words = round((wanted - (few - TRIAL_WORDS * a_word if few else 0)) / a_word)
    return load.prompts_of(args.requests, max(words, 1), args.seed)


def show(settings: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """Print results as tables."""
    console = Console(highlight=False)
    mean = results["prompt_tokens"] / results["finished"] if results["finished"] else math.nan
    console.print(
        f"{settings['model']} at {settings['url']}: {results['finished']} of {settings['requests']} requests in "
        f"{results['seconds']:,.1f} s, {settings['concurrency']} at a time, with {mean:,.0f} tokens in and up to "
        f"{settings['max_tokens']:,} out",
        markup=False,
        soft_wrap=True,
    )
    rates = {
        "output tokens/s": results["output_tokens_per_second"],
        "all tokens/s": results["total_tokens_per_second"],
        "requests/s": results["requests_per_second"],
    }
    console.print(table_of(list(rates), [([_spelled(value, 2) for value in rates.values()], None)]))
    headings = ("latency, ms", *next(iter(results["latency_s"].values())))
    rows = [
        ((shown, *(_spelled(value, 1, 1000) for value in results["latency_s"][name].values())), None)
        for name, shown in LATENCIES.items()
    ]
    console.print(table_of(headings, rows, left=headings[:1]))


def _spelled(value: float | None, digits: int, scale: float = 1) -> str:
    return "-" if value is None else f"{value * scale:,.{digits}f}"
