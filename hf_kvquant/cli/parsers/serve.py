"""The options of `hf-kvquant serve`."""

from __future__ import annotations

import argparse
from typing import Any

from .. import arguments

LOG_LEVELS = ("debug", "info", "warning", "error")


def add_parser(commands: Any) -> None:
    """Add `serve` to the commands, the sub-parsers of argparse."""
    parser = arguments.add_command(
        commands,
        "serve",
        load,
        help="answer OpenAI's API over a quantised cache",
        description="Serve one model over OpenAI's API (chat completions and completions), with continuous batching "
        "over pages of codes. GET /metrics is for Prometheus, GET /health for a supervisor.",
    )
    add = parser.add_argument
    arguments.add_served_config(parser)
    add("--host", default="localhost", help="address to listen on (default: localhost)")
    add("--port", type=int, default=8000, metavar="N", help="port to listen on, 0 for any (default: 8000)")
    arguments.add_placement(parser)
    add("--attn-implementation", metavar="NAME", help="attention of prompts (default: the model's)")
    add("--trust-remote-code", action="store_true", help="run code that comes with the model")
    arguments.add_batching(parser)
    add("--sample", action="store_true", help="sample requests that do not say; without, these are greedy")
    waiting = "requests that may wait; more are answered with 429 (default: 1024)"
    add("--max-waiting", type=int, default=1024, metavar="N", help=waiting)
    stop = "from a signal to the end; most of it is for running requests to finish (default: 25)"
    add("--shutdown-timeout", type=float, default=25, metavar="SECONDS", help=stop)
    add("--served-model-name", metavar="NAME", help="by which clients call the model (default: MODEL)")
    add("--api-key", metavar="KEY", help="what clients must send, on all routes but /health and / (default: nothing)")
    add("--chat-template", metavar="FILE", help="a Jinja template in place of the tokenizer's own")
    add("--enable-cors", action="store_true", help="let web pages of other sites ask")
    add("--log-level", choices=LOG_LEVELS, default="warning", help="of the log on stderr (default: warning)")


def load(args: argparse.Namespace) -> arguments.Run:
    """Import what runs the command."""
    arguments.served_config(args)
    arguments.checked_batching(args)
    from ..serve import run

    return run
