"""The options of `hf-kvquant bench`."""

from __future__ import annotations

import argparse
import importlib.util
import math
from typing import Any
from urllib.parse import urlsplit

from ...common.errors import UsageError
from .. import arguments

MAX_CONCURRENCY = 1000  # connections that the client opens
ROUTES = ("completions", "chat")


def add_parser(commands: Any) -> None:
    """Add `bench` to the commands, the sub-parsers of argparse."""
    parser = arguments.add_command(
        commands,
        "bench",
        load,
        help="measure an OpenAI-compatible server",
        description="Ask an OpenAI-compatible server many things at once, and show its tokens a second, the time to "
        "the first token and other latencies, as clients see them.",
        has_model=False,
    )
    add = parser.add_argument
    add("url", metavar="URL", help="of the server, such as http://localhost:8000")
    add("--model", metavar="NAME", help="which model to ask (default: the first that the server names)")
    add("--route", choices=ROUTES, default="completions", help="what to ask for (default: completions)")
    add("--requests", type=int, default=100, metavar="N", help="how many (default: 100)")
    add("--concurrency", type=int, default=8, metavar="N", help="requests at a time (default: 8)")
    words = "tokens of a prompt of random words, about (default: 256)"
    add("--prompt-tokens", type=int, metavar="N", help=words)
    add("--prompts", metavar="FILE", help="a prompt a line, again from the top if there are fewer than requests")
    add("--max-tokens", type=int, default=128, metavar="N", help="most tokens of an answer (default: 128)")
    add("--seed", type=int, default=0, metavar="N", help="of the random words (default: 0)")
    add("--api-key", metavar="KEY", help="for the server (default: OPENAI_API_KEY of the environment, or none)")
    add("--timeout", type=float, default=600, metavar="SECONDS", help="most for an answer (default: 600)")
    add("--json", action="store_true", help="print a JSON document instead of a table")


def load(args: argparse.Namespace) -> arguments.Run:
    """Import what runs the command."""
    parts = urlsplit(args.url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UsageError(f"`URL` must begin with http:// or https:// and a host, got '{args.url}'.")
    arguments.check_counts(args, "requests", "concurrency", "prompt_tokens", "max_tokens")
    if args.concurrency > MAX_CONCURRENCY:
        raise UsageError(f"`--concurrency` must be at most {MAX_CONCURRENCY}, got {args.concurrency}.")
    if not 0 < args.timeout < math.inf:
        raise UsageError(f"`--timeout` must be above 0 seconds, got {args.timeout}.")
    if args.prompts is not None and args.prompt_tokens is not None:
        raise UsageError("`--prompts` and `--prompt-tokens` must not come together, got both. Leave one out.")
    if importlib.util.find_spec("openai") is None:
        raise UsageError(
            "openai must be installed to measure a server, got no such package. Install it: pip install "
            "'hf-kvquant[serve]'."
        )
    from ..bench import run

    return run
