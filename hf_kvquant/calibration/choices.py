"""What users can choose in a calibration, apart from what calibrates, which imports torch and transformers."""

from typing import Literal

Mode = Literal["fold", "online", "auto"]  # see `smooth_attention`
FILE_NAME = "kvquant_smoothing.safetensors"  # the name that `hf-kvquant calibrate` gives the file of factors
CALIBRATED_PRESET = "int4"  # what a calibration is for if no preset is named
