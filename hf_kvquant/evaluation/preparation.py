"""Loads the model that a command names and prepares it for an evaluation: injects (`injection.py`), then calibrates."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..calibration.choices import CALIBRATED_PRESET
from ..calibration.smoothing import load_smoothing, smooth_attention
from ..calibration.smoothing_file import FILE_NAME
from ..common.progress import without_bars
from ..config import KVQuantConfig
from ..models.hashes import weights_hash
from .choices import OUTLIER_PAIRS
from .errors import UsageError, is_out_of_memory
from .injection import inject_key_bias, inject_key_outliers
from .provenance import model_name, sha256


class CannotInject(UsageError):
    """Nothing can be injected: it is unknown how the model computes its keys, or the number asked for is invalid."""


def read_text(option: str, name: str, remedy: str = "Name another file.") -> str:
    """The content of the text file that an option names. If it holds only white space, the user should do `remedy`."""
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"`{option}` must be a text file, got {name}: {reason}.") from error
    if not text.strip():
        raise UsageError(f"`{option}` {name} must hold text, got nothing but white space. {remedy}")
    return text


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


def load_calibration(model: PreTrainedModel, name: str) -> None:
    """Give a model the centres and factors that `calibrate` saved in its folder, if there are any."""
    path = Path(name).expanduser() / FILE_NAME
    if not path.is_file():
        return
    try:
        load_smoothing(model, path)
    except (NotImplementedError, ValueError) as error:
        # Results are correct without it, but less accurate.
        print(f"hf-kvquant: warning: {path} is ignored. {error}", file=sys.stderr)


@dataclasses.dataclass(frozen=True)
class Subject:
    """What an evaluation measures."""

    name: str  # the model's folder or hub id, as the user typed it
    model: PreTrainedModel  # on its device; `prepare` writes it in place
    tokenizer: PreTrainedTokenizerBase
    configs: Mapping[str, KVQuantConfig]  # by name, first the unquantised cache, with which the others are compared
    inject_outliers: float | None = None  # the factor of `inject_key_outliers`
    inject_bias: float | None = None  # the norm of `inject_key_bias`
    calibrate: str | None = None  # a text file to calibrate on
    calibrate_for: str | None = None  # a preset

    def prepare(self) -> dict[str, Any]:
        """Make the model ready to be measured: load the calibration that is saved with it, inject, then calibrate.

        Returns what the settings of a record say about the model.
        """
        if self.calibrate_for is not None and self.calibrate is None:
            raise UsageError("`--calibrate-for` must come with --calibrate, got it alone. Add --calibrate FILE.")
        text = None if self.calibrate is None else read_text("--calibrate", self.calibrate)
        load_calibration(self.model, self.name)
        saved = Path(self.name).expanduser() / FILE_NAME
        try:
            if self.inject_outliers is not None:
                inject_key_outliers(self.model, OUTLIER_PAIRS, self.inject_outliers)
            if self.inject_bias is not None:
                inject_key_bias(self.model, self.inject_bias)
        except (NotImplementedError, TypeError, ValueError) as error:
            raise CannotInject(f"nothing can be injected into {self.name}. {error}") from error
        calibration = None if text is None else self._calibrated(text)
        return {
            "model": model_name(self.name),
            "weights_sample_sha256": weights_hash(self.model),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": self.model.device.type,
            "smoothing_sha256": sha256(saved) if saved.is_file() else None,
            "injected_outliers": self.inject_outliers,
            "injected_bias": self.inject_bias,
            "calibration": calibration,
        }

    def _calibrated(self, text: str) -> dict[str, Any]:
        """Calibrate the model on a text, and describe it as a record does."""
        assert self.calibrate is not None
        preset = self.calibrate_for or CALIBRATED_PRESET
        try:
            result = smooth_attention(self.model, self.tokenizer, [text], preset)
        except (MemoryError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            if is_out_of_memory(error):
                raise UsageError(
                    f"`--calibrate` must fit into memory, got {self.calibrate}, which does not. Calibrate with "
                    "hf-kvquant calibrate and a smaller --window, and evaluate what it saves."
                ) from error
            raise UsageError(f"{self.name} cannot be calibrated. {error}") from error
        print(result.report(), file=sys.stderr)
        told = ("choice", "placement", "error_before", "error_after")
        return {
            "data": Path(self.calibrate).name,
            "data_sha256": sha256(Path(self.calibrate)),
            "preset": preset,
            "tokens": result.num_tokens,
            "layers": {
                str(layer.layer_idx): {
                    **{name: getattr(layer, name) for name in told},
                    "has_center": layer.center is not None,
                }
                for layer in result.layers
            },
        }
