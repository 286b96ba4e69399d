"""How the next token of each line is chosen: by what it asks for, or else by the options and the model's config.

`batching/sampling.py` says how lines that sample share a manager with lines that do not.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from ..batching.sampling import Sampling, greedy_config
from ..serving.fields import Parameters
from .lines import SAMPLING


@dataclasses.dataclass(frozen=True)
class Defaults:
    """What holds for lines that do not say otherwise.

    Attributes:
        max_new_tokens: At most this many tokens are written.
        is_sampled: Whether tokens are sampled.
        sampling: Settings of `batching.sampling.SETTINGS`, for lines that are sampled.
    """

    max_new_tokens: int
    is_sampled: bool
    sampling: Mapping[str, float]

    def of(self, asked: Parameters, vocab_size: int, grammar: str | None) -> Sampling | None:
        """See `Parameters.sampling`."""
        return asked.sampling(self.sampling, is_sampled=self.is_sampled, vocab_size=vocab_size, grammar=grammar)

    def to_dict(self) -> dict[str, Any]:
        """Everything by name, for a file."""
        return {"max_new_tokens": self.max_new_tokens, "sample": self.is_sampled, **dict.fromkeys(SAMPLING)} | dict(
            self.sampling
        )


@dataclasses.dataclass(frozen=True)
class Survey:
    """What is known of an input after one look at all of it.

    Attributes:
        path: Of the file.
        num_lines: Without blank ones.
        sha256: Of the file.
    """

    path: Path
    num_lines: int
    sha256: str


def survey(path: Path) -> Survey:
    """Look at all lines of an input. Holds one line at a time."""
    digest, num_lines = hashlib.sha256(), 0
    with path.open("rb") as file:
        for line in file:
            digest.update(line)
            num_lines += bool(line.strip())
    return Survey(path, num_lines, digest.hexdigest())


def generation_config_of(model: Any, defaults: Defaults) -> GenerationConfig:
    """The generation config of a manager that serves all lines: the model's, without what lines say by themselves."""
    config = greedy_config(model.generation_config)
    config.max_new_tokens, config.max_length = defaults.max_new_tokens, None
    return config
