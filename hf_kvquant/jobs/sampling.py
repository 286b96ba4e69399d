"""How the next token of each line is chosen: a manager samples as soon as one line does, by what lines ask for.

`batching/sampling.py` says how lines that sample share a manager with lines that do not.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from ..batching.sampling import NEUTRAL, SAMPLING, sampling_config
from .lines import Job, parse


@dataclasses.dataclass(frozen=True)
class Defaults:
    """What holds for lines that do not say otherwise.

    Attributes:
        max_new_tokens: At most this many tokens are written.
        is_sampled: Whether tokens are sampled.
        sampling: Settings of `SAMPLING`, for lines that are sampled.
    """

    max_new_tokens: int
    is_sampled: bool
    sampling: Mapping[str, float]

    def of(self, job: Job) -> dict[str, float] | None:
        """The settings by which a job is sampled; `None` if it takes the most likely tokens.

        A job that has a setting is sampled, unless its temperature is 0.
        """
        settings = {**self.sampling, **job.sampling}
        if not (self.is_sampled or job.sampling) or settings.get("temperature") == 0:
            return None
        return {name: value for name, value in settings.items() if value != NEUTRAL.get(name)}

    def to_dict(self) -> dict[str, Any]:
        """Everything by name, for a file."""
        return {"max_new_tokens": self.max_new_tokens, "sample": self.is_sampled, **dict.fromkeys(SAMPLING)} | dict(
            self.sampling
        )


@dataclasses.dataclass(frozen=True)
class Survey:
    """What is known of an input after one look at all of it.

    Attributes:
        num_lines: Without blank ones.
        sha256: Of the file.
        is_sampled: Whether any line is sampled.
        settings: The settings of `SAMPLING` that sampled lines use.
    """

    num_lines: int
    sha256: str
    is_sampled: bool
    settings: frozenset[str]

    @property
    def used(self) -> frozenset[str] | None:
        """The settings; `None` if no line is sampled."""
        return self.settings if self.is_sampled else None


def survey(path: Path, defaults: Defaults) -> Survey:
    """Look at all lines of an input. Holds one line at a time."""
    digest, num_lines, is_sampled, used = hashlib.sha256(), 0, False, set[str]()
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            digest.update(line)
            if not line.strip():
                continue
            num_lines += 1
            settings = defaults.of(parse(number, line))
            if settings is not None:
                is_sampled = True
                used |= settings.keys()
    return Survey(num_lines, digest.hexdigest(), is_sampled, frozenset(used))


def generation_config_of(model: Any, defaults: Defaults, found: Survey) -> GenerationConfig:
    """The generation config of a manager that serves all lines: the model's, with all the processors they need."""
    config = sampling_config(model.generation_config, found.used)
    config.max_new_tokens, config.max_length = defaults.max_new_tokens, None
    return config
