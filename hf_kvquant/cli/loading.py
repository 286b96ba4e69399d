"""What commands share once they have something to load: the device, the model, the configs that fit it, the text."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..config import KVQuantConfig
from ..evaluation.errors import UsageError
from ..evaluation.perplexity.segments import read_source
from ..evaluation.preparation import Subject, load
from ..patching import patched
from . import messages
from .arguments import given


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


def source_of(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """`read_source` with the options of `add_source`."""
    return read_source(**given(args, "text", "rows", "dataset", "split", "field"))


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


def load_placed(
    args: argparse.Namespace, *, default_device: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model of a command onto the device that its options name, else the default or the best one."""
    model, tokenizer = load(args.model, args.dtype, checked_device(args.device or default_device))
    messages.tell_if_used(model)
    return model, tokenizer


def load_subject(
    args: argparse.Namespace, configs: Mapping[str, KVQuantConfig], *, default_device: str | None = None
) -> Subject:
    """Load the model that an evaluation measures, with the configs that fit it. The evaluation prepares it."""
    model, tokenizer = load_placed(args, default_device=default_device)
    fitting = fitting_configs(model, args, configs)
    options = given(args, "inject_outliers", "inject_bias", "calibrate", "calibrate_for")
    return Subject(args.model, model, tokenizer, fitting, **options)
