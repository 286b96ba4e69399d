"""Reads what the options of an evaluation name: the text, and the model with the configs that fit it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from hf_kvquant.cli import loading
from hf_kvquant.cli.arguments import given
from hf_kvquant.config import KVQuantConfig

from ..perplexity.segments import read_source
from ..preparation import Subject


def source_given(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """`read_source` with the options of `add_source`."""
    return read_source(**given(args, "text", "rows", "dataset", "split", "field"))


def load_subject(
    args: argparse.Namespace, configs: Mapping[str, KVQuantConfig], *, default_device: str | None = None
) -> Subject:
    """Load the model that an evaluation measures, with the configs that fit it. The evaluation prepares it."""
    model, tokenizer = loading.load_placed(args, default_device=default_device)
    fitting = loading.fitting_configs(model, args, configs)
    options = given(args, "inject_outliers", "inject_bias", "calibrate", "calibrate_for")
    return Subject(args.model, model, tokenizer, fitting, **options)
