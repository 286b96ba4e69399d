"""What commands share once they have something to load: the device, the model, its calibration, configs, texts."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from ..calibration.smoothing import load_smoothing
from ..calibration.smoothing_file import FILE_NAME
from ..common.errors import UsageError, is_out_of_memory
from ..common.progress import without_bars
from ..config import KVQuantConfig
from ..patching import patched
from . import messages

# What a checkpoint's generation config may ask for although `--preset` says what the cache is.
OTHER_CACHES = {"cache_implementation": None, "cache_config": None}


def checked_device(name: str | None) -> torch.device:
    """The device that a user names, or the best one there is."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"`--device` must be a torch device such as cpu or cuda:0, got '{name}'.") from error
    available = torch.cuda.device_count() if device.type == "cuda" else 1
    if (device.index or 0) >= available:
        raise UsageError(
            f"`--device` must exist, got '{name}' with {available} CUDA devices. Use --device cpu, or see hf-kvquant "
            "env."
        )
    return device


def read_text(option: str, name: str, remedy: str = "Name another file.") -> str:
    """The content of the text file that an option names. If it holds only white space, the user should do `remedy`."""
    try:
        text = Path(name).read_text(encoding="utf-8-sig")  # a mark of the encoding is no text
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"`{option}` must be a text file, got {name}: {reason}.") from error
    if not text.strip():
        raise UsageError(f"`{option}` {name} must hold text, got nothing but white space. {remedy}")
    return text


def fitting_configs(
    model: PreTrainedModel, args: argparse.Namespace, configs: Mapping[str, KVQuantConfig]
) -> dict[str, KVQuantConfig]:
    """The configs that a model can be patched with, found before anything runs.

    Presets that the user typed must fit. A default that does not fit is left out, and a line on stderr says why.
    """
    fitting: dict[str, KVQuantConfig] = {}
    left_out: dict[str, Exception] = {}
    for preset, config in configs.items():
        try:
            with patched(model, config):
                fitting[preset] = config
        except (NotImplementedError, TypeError, ValueError) as error:
            if args.preset:
                raise UsageError(f"`--preset {preset}` does not fit {args.model}. {error}") from error
            left_out[preset] = error
    if left_out and not any(config.key.is_quantized or config.value.is_quantized for config in fitting.values()):
        reason = next(iter(left_out.values()))
        raise UsageError(f"none of {', '.join(left_out)} fits {args.model}. {reason}") from reason
    for preset, reason in left_out.items():
        why = f"{preset} does not fit {args.model} and is left out. {reason}"
        print(f"hf-kvquant: {args.command}: {why}", file=sys.stderr)
    return fitting


def load(name: str, dtype: str, device: torch.device) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer from a folder or the hub."""
    check_folder(name)
    source = source_of(name)
    with loading(name, device):
        with without_bars():
            tokenizer = AutoTokenizer.from_pretrained(source)
            model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
        return model.to(device).eval(), tokenizer


def check_folder(name: str) -> None:
    """Refuse a name that looks like a folder and is none with a model."""
    path = Path(name).expanduser()
    # A hub id has at most one slash, and what precedes it is no local folder.
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1 or ("/" in name and path.parent.exists())
    if looks_local and not (path / "config.json").is_file():
        found = "a folder without config.json" if path.is_dir() else "no such folder"
        raise UsageError(f"`MODEL` must be a folder with a transformers model or a hub id, got {name}: {found}.")


@contextlib.contextmanager
def loading(name: str, device: torch.device) -> Iterator[None]:
    """Say in one line why the model in a `with` block cannot be loaded."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(
            "`MODEL` must be a folder with a causal language model and its tokenizer, or a hub id, got "
            f"{name}: {reason}"
        ) from error
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise UsageError(
            f"`MODEL` must fit into the memory of {device}, got {name}, which does not. Use --dtype bfloat16, another "
            "--device or a smaller model."
        ) from error


def source_of(name: str) -> str:
    """What to pass to `from_pretrained`: the path, if there is such a folder, else the name as a hub id."""
    path = Path(name).expanduser()
    return str(path) if path.exists() else name


def load_placed(
    args: argparse.Namespace, *, default_device: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model of a command onto the device that its options name, else the default or the best one."""
    model, tokenizer = load(args.model, args.dtype, checked_device(args.device or default_device))
    messages.tell_if_used(model)
    return model, tokenizer


def file_of(name: str, file: str) -> Path | None:
    """A file beside the weights of a model, in its folder or, by a hub id, on the hub; `None` if there is none."""
    try:
        found = cached_file(source_of(name), file)
    except OSError:
        return None
    return Path(found) if found is not None else None


def load_calibration(model: PreTrainedModel, name: str) -> None:
    """Give a model the centres and factors that `calibrate` saved beside it, if there are any."""
    path = file_of(name, FILE_NAME)
    if path is None:
        return
    try:
        load_smoothing(model, path)
    except (NotImplementedError, ValueError) as error:
        # Results are correct without it, but less accurate.
        print(f"hf-kvquant: warning: {path} is ignored. {error}", file=sys.stderr)


def set_aside(model: PreTrainedModel, args: argparse.Namespace, settings: Mapping[str, Any], why: str) -> None:
    """Give the generation config of a checkpoint these settings where it asks for others. A line on stderr says so."""
    config, left_out = model.generation_config, []
    for setting, value in settings.items():
        if getattr(config, setting, None) not in (None, value):
            setattr(config, setting, value)
            left_out.append(setting)
    if left_out:
        told = f"`{'`, `'.join(left_out)}` in the generation config of {args.model} is left out: {why}."
        print(f"hf-kvquant: {args.command}: {told}", file=sys.stderr)


def set_caches_aside(model: PreTrainedModel, args: argparse.Namespace) -> None:
    """`set_aside` where all requests share the pages of one preset."""
    set_aside(model, args, OTHER_CACHES, "--preset says what the cache is")
