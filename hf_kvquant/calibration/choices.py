"""What users can choose in a calibration, apart from what calibrates, which imports torch and transformers."""

from typing import Literal

from ..presets import DEFAULT_PRESET

Mode = Literal["fold", "online", "auto"]  # see `smooth_attention`
FILE_NAME = "kvquant_smoothing.safetensors"  # the name that `hf-kvquant calibrate` gives the file of factors
# What a calibration is for if no preset is named. `int4` gains nothing from one where no channel of keys stands out:
# each has a scale of its own (0 of the 30 layers of SmolLM2-135M-Instruct).
CALIBRATED_PRESET = DEFAULT_PRESET
