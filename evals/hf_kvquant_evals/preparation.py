"""What an evaluation measures, and how it is made ready: injected (`injection.py`), then calibrated."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_kvquant.calibration.choices import CALIBRATED_PRESET
from hf_kvquant.calibration.smoothing import smooth_attention
from hf_kvquant.calibration.smoothing_file import FILE_NAME
from hf_kvquant.cli.loading import load_calibration, read_text
from hf_kvquant.common.errors import UsageError, is_out_of_memory
from hf_kvquant.common.naming import model_name, sha256
from hf_kvquant.config import KVQuantConfig
from hf_kvquant.models.hashes import weights_hash

from .choices import OUTLIER_PAIRS
from .errors import CannotInject
from .injection import inject_key_bias, inject_key_outliers


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
