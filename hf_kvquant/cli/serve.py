"""`hf-kvquant serve`: transformers' OpenAI-compatible server over the quantised cache, with continuous batching."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import logging
import math
import socket
from collections.abc import Iterator
from typing import Any

from transformers import ContinuousBatchingConfig
from transformers.utils import logging as transformers_logging

from ..batching.support import check_version, for_command
from ..common.errors import BadTemplate, ConfigDoesNotFit, UsageError, is_out_of_memory
from ..common.progress import without_bars
from ..config import KVQuantConfig
from . import arguments, messages
from .loading import check_folder, checked_device, load_calibration, loading, read_text, set_caches_aside

PACKAGES = ("fastapi", "uvicorn", "openai", "pydantic", "prometheus_client", "accelerate", "psutil")


def run(args: argparse.Namespace) -> None:
    """Run `hf-kvquant serve`."""
    check_packages()
    config = arguments.served_config(args)
    batching = ContinuousBatchingConfig(**arguments.checked_batching(args))
    arguments.check_counts(args, "max_waiting")
    if not 0 <= args.shutdown_timeout < math.inf:
        raise UsageError(f"`--shutdown-timeout` must be at least 0 seconds, got {args.shutdown_timeout}.")
    if not 0 <= args.port < 2**16:
        raise UsageError(f"`--port` must be from 0 to 65535, got {args.port}.")
    for name in ("served_model_name", "api_key"):
        if getattr(args, name) == "":
            raise UsageError(
                f"`{arguments.option(name)}` must have a character, got none. Leave it out for the default."
            )
    device = checked_device(args.device)
    check_folder(args.model)
    set_log_level(args.log_level)
    from ..serving.ranks import follow, joined  # what they need comes with an extra

    with joined(device) as ranks:
        if not ranks.answers:
            with loading(args.model, device):
                generation = started(args, config, batching, ranks)
            follow(generation)
            return
        with checked_socket(args.host, args.port) as listener:
            print(f"Loading {args.model} …", flush=True)
            with loading(args.model, device):
                app = started(args, config, batching, ranks)
            with contextlib.closing(app):
                serve(args, app, listener, ranks)


def serve(args: argparse.Namespace, app: Any, listener: socket.socket, ranks: Any) -> None:
    """Serve until a signal."""
    from ..serving.server import Server  # what it needs comes with an extra

    where = str(ranks.device) if ranks.count == 1 else f"{ranks.count} ranks, the first on {ranks.device}"
    print(f"Serving {args.model} with {args.preset} on {where}: {app.generation.size}.", flush=True)
    how = {"shutdown_timeout": args.shutdown_timeout, "log_level": args.log_level}
    server = Server(app, **how)
    asyncio.run(server.serve(sockets=[listener]))


def started(args: argparse.Namespace, config: KVQuantConfig, batching: ContinuousBatchingConfig, ranks: Any) -> Any:
    """The application that answers, with the model loaded and patched, and its generation running.

    In other ranks than the first, that generation alone.
    """
    from ..serving.generation import Generation  # what they need comes with an extra
    from ..serving.metrics import Metrics
    from ..serving.model import PatchedModels
    from ..serving.requests import OpenRequests
    from ..serving.server import start

    device, file = ranks.device, args.chat_template
    template = file and read_text("--chat-template", file, "Write a Jinja template into it.")
    try:
        with without_bars():
            models = PatchedModels(
                args.model,
                config,
                lambda model: load_calibration(model, args.model),
                ranks.count,
                device=str(device),
                dtype=args.dtype,
                trust_remote_code=args.trust_remote_code,
                attn_implementation=args.attn_implementation,
                served_name=args.served_model_name,
                chat_template=template,
            )
    except ConfigDoesNotFit as error:
        raise UsageError(f"`--preset {args.preset}` does not fit {args.model}. {error}") from error
    except NotImplementedError as error:
        raise not_served(args, error) from error
    except BadTemplate as error:
        raise UsageError(f"`--chat-template` must be a Jinja template, got {file}: {error}. Correct it.") from error
    model = models.model
    messages.tell_if_used(model)
    set_caches_aside(model, args)
    try:
        if not ranks.answers:
            generation = Generation(batching, OpenRequests(Metrics()), args.sample)
            generation.start(model, models.tokenizer)
            return generation
        how = {"max_waiting": args.max_waiting, "is_sampled": args.sample, "enable_cors": args.enable_cors}
        return start(models, batching, **how, api_key=args.api_key)
    except (ImportError, NotImplementedError, ValueError) as error:
        raise not_served(args, error) from error
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise UsageError(
            f"`--cb-num-blocks` and `--cb-max-batch-tokens` must fit into the memory that {type(model).__name__} "
            f"leaves on {device}, got more. Make one smaller. {error}"
        ) from error


def not_served(args: argparse.Namespace, error: Exception) -> UsageError:
    """The error if a model, or a setting for it, is not served."""
    return UsageError(f"{args.model} cannot be served like this. {for_command(error)}")


def check_packages() -> None:
    """Refuse to start without what the server needs."""
    try:
        check_version()
    except NotImplementedError as error:
        raise UsageError(str(error)) from error
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"{', '.join(missing)} must be installed for serving, got no such package. Install it: pip install "
            "'hf-kvquant[serve]'."
        )


@contextlib.contextmanager
def checked_socket(host: str, port: int) -> Iterator[socket.socket]:
    """A socket of the address, which is taken before the model is loaded."""
    from ..serving.server import bind

    try:
        listener = bind(host, port)
    except OSError as error:
        raise UsageError(
            f"`--host` and `--port` must be a free address of this machine, got {host} and {port}: {error}. Use "
            "another, or --port 0 for any."
        ) from error
    with listener:
        yield listener


def set_log_level(name: str) -> None:
    """Set what transformers tells on stderr. It would warn of every request that comes."""
    transformers_logging.set_verbosity(getattr(logging, name.upper()))
    if name == "warning":
        logging.getLogger("transformers.cli.serving").setLevel(logging.ERROR)
