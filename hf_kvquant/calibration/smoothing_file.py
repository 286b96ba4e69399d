"""The result of calibration, as an object, a table and a file.

The file is in safetensors format. It holds the factors and the centre of each layer and the few weights that division
cannot restore. The metadata holds everything else as JSON, with SHA-256 hashes of the weights before and after folding
and of the file's content. `smoothing.py` checks whether it fits a model.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor

from ..common.output import written
from ..common.tables import html, plain, table_of
from ..models.hashes import FileKind, content_hash
from .choices import FILE_NAME as FILE_NAME
from .text import ERROR_TOKENS

_KIND = FileKind(
    format="hf_kvquant-smoothing",
    version=1,
    if_folder=f"hf-kvquant calibrate calls the file {FILE_NAME}.",
    if_absent=f"hf-kvquant calibrate calls it {FILE_NAME}.",
    if_foreign=f"hf-kvquant calibrate calls it {FILE_NAME}.",
    if_other_version="of version {}, this is version 1. Calibrate again.",
)
HEADINGS = ("layer", "factors in", "alpha", "factors", "center", "error before", "after")

# Where a layer's factors are: folded into the weights, applied by its caches, or nowhere, since it gets none.
Placement = Literal["weights", "caches", "none"]


@dataclasses.dataclass(frozen=True)
class LayerSmoothing:
    """The result of calibration for one layer."""

    layer_idx: int
    name: str  # the attention module's name in the model
    placement: Placement
    choice: str  # the chosen candidate: an alpha, `"energy"`, or `"0.0"` for no factors
    # `[num_kv_heads, head_dim]` float32, powers of two. Keys are divided by it, queries multiplied.
    factor: Tensor = dataclasses.field(repr=False)
    # `[num_kv_heads, head_dim]` float32, in units of keys without factors. It is subtracted from keys before the
    # factors apply. `None` if no centre was calibrated, or if no centre is better.
    center: Tensor | None = dataclasses.field(repr=False)
    # Per candidate, the relative error of the layer's attention output with only keys quantised.
    errors: Mapping[str, float]
    error_before: float  # before calibration
    error_after: float
    # Whether some factors would have left the range of the weights' dtype, so smaller ones were tried.
    is_limited: bool

    @property
    def is_smoothed(self) -> bool:
        """Whether any factor differs from 1."""
        return bool((self.factor != 1).any())

    def cells(self) -> tuple[str, ...]:
        """The layer's row of the table, a cell for each of `HEADINGS`."""
        factors = ("-", "-", "-")
        if self.is_smoothed:
            factors = self.placement, self.choice, f"{self.factor.min():g} to {self.factor.max():g}"
        center = "-" if self.center is None else f"{self.center.norm(dim=1).max():.3g}"
        return str(self.layer_idx), *factors, center, f"{self.error_before:.2%}", f"{self.error_after:.2%}"

    @property
    def exponents(self) -> Tensor:
        """`[num_kv_heads, head_dim]` int64: base-2 logarithms of the factors."""
        return torch.frexp(self.factor)[1].long() - 1


def numbered(indices: Sequence[int]) -> str:
    """`layer 1`, or `layers 0, 2-31`."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    spelled = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"layer{'s' * (len(indices) > 1)} {', '.join(spelled)}"


@dataclasses.dataclass(frozen=True, repr=False)
class SmoothingResult:
    """The result of `smooth_attention`.

    Attributes:
        layers: The calibrated layers, in order.
        left_out: Per layer that got no factors, or nothing at all, the reason.
        key_formats: Per layer, the key format for which factors were chosen.
        num_tokens: Number of calibration tokens.
        parameters: Names of the tensors that identify the model: the weights that were scaled, and all tensors in the
            attention modules of layers whose caches apply the transform.
        original_hash: SHA-256 of these tensors before folding.
        folded_hash: SHA-256 of these tensors after folding.
        originals: Copies of the weights that division would round, by name.
    """

    layers: tuple[LayerSmoothing, ...]
    left_out: Mapping[int, str]
    key_formats: Mapping[int, str]
    num_tokens: int
    parameters: tuple[str, ...]
    original_hash: str
    folded_hash: str
    originals: Mapping[str, Tensor]

    @property
    def num_smoothed(self) -> int:
        """How many layers have a factor other than 1."""
        return sum(layer.is_smoothed for layer in self.layers)

    def factors(self) -> dict[int, Tensor]:
        """Per layer index, its factors, `[num_kv_heads, head_dim]` float32, even if all of them are 1."""
        return {layer.layer_idx: layer.factor for layer in self.layers if layer.placement != "none"}

    def factors_in(self, placement: Placement) -> dict[int, Tensor]:
        """The factors with this placement: folded into the weights, or applied by caches."""
        return {layer.layer_idx: layer.factor for layer in self.layers if layer.placement == placement}

    def centers(self) -> dict[int, Tensor]:
        """Per layer index, its calibrated centre, `[num_kv_heads, head_dim]` float32, of keys without factors."""
        return {layer.layer_idx: layer.center for layer in self.layers if layer.center is not None}

    def table(self, title: str | None = None) -> Table:
        """The layers as a table for a terminal."""
        return table_of(HEADINGS, [(layer.cells(), None) for layer in self.layers], title=title)

    def report(self) -> str:
        """A readable table: per layer the factors, the centre, and the error before and after, with an explanation."""
        return "\n".join([*plain(self.table()), *self.notes()])

    def __repr__(self) -> str:
        """One line, without tensors."""
        found = f"{self.num_smoothed} of {len(self.layers)} layers with factors, {len(self.centers())} with centers"
        return f"<SmoothingResult: {found}, {self.num_tokens:,} tokens>"

    def _repr_html_(self) -> str:
        """The table of `report`, for a notebook."""
        return html("Calibration of keys", self.table(), self.notes())

    def notes(self) -> list[str]:
        """The notes below the table of layers, one per line."""
        reasons: dict[str, list[int]] = {}
        for index, reason in self.left_out.items():
            reasons.setdefault(reason.rstrip("."), []).append(index)
        lines = [f"Left out: {numbered(indices)}: {reason}." for reason, indices in reasons.items()]
        limited = [layer.layer_idx for layer in self.layers if layer.is_limited]
        if limited:
            lines.append(
                f"The dtype had no room for all factors in {numbered(limited)}. Load the model in float32 for more."
            )
        formats = ", ".join(sorted(set(self.key_formats.values())))
        part = f"some {ERROR_TOKENS:,} of " if self.num_tokens >= 2 * ERROR_TOKENS else ""
        return [
            *lines,
            f"{self.num_smoothed} of {len(self.layers)} layers have factors, {len(self.centers())} have centers. "
            f"{self.describe_placement()}",
            "Alpha: factors are max|key|^alpha; 'energy' balances keys and queries. Center: largest norm over heads of "
            "what is subtracted from keys. Error: relative error of the layer's attention output with keys quantised "
            f"as {formats}, over {part}{self.num_tokens:,} tokens.",
        ]

    def describe_placement(self) -> str:
        """Sentences that say which layers have factors in their weights, from their caches, or none."""
        if not self.factors():
            return "No factors were calibrated."
        places = {"weights": "folded into the weights of", "caches": "applied by the caches of"}
        parts = []
        for placement, where in places.items():
            indices = [layer.layer_idx for layer in self.layers if layer.placement == placement and layer.is_smoothed]
            parts += [f"{where} {numbered(indices)}"] if indices else []
        if not parts:
            return "Factors lower the error of no layer enough to be worth it."
        text = f"Factors are {' and '.join(parts)}."
        rest = [layer.layer_idx for layer in self.layers if layer.placement != "none" and not layer.is_smoothed]
        return text + (f" They lower the error of {numbered(rest)} too little to be worth it." if rest else "")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file that `load` reads, or overwrite it. Its folder must exist."""
        tensors = {f"layers.{layer.layer_idx}.factor": layer.factor for layer in self.layers}
        tensors |= {f"layers.{index}.center": center for index, center in self.centers().items()}
        tensors |= {f"originals.{name}": original for name, original in self.originals.items()}
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        facts = {name: value for name, value in vars(self).items() if name != "originals"}
        facts["layers"] = [
            {name: value for name, value in vars(layer).items() if name not in ("factor", "center")}
            for layer in self.layers
        ]
        text = json.dumps(facts)
        with written(Path(path)) as beside:
            save_file(tensors, beside, metadata=_KIND.metadata(text, tensors))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SmoothingResult:
        """Read what `save` wrote.

        Raises:
            FileNotFoundError, IsADirectoryError: `path` does not exist, or is a folder.
            ValueError: The file is of another kind, damaged, or of an unknown version.
        """
        name = os.fspath(path)
        expected = f"load_smoothing: `path` must be a file written by SmoothingResult.save, got {name}"
        with _KIND.opened(name, expected) as (file, metadata):
            tensors: dict[str, Tensor] = {key: file.get_tensor(key) for key in file.keys()}
        try:
            if metadata["sha256"] != content_hash(metadata["facts"], tensors):
                raise ValueError("its hash is not that of what it holds")
            return cls._from(json.loads(metadata["facts"]), tensors)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{expected}, which is damaged ({error}). Calibrate again.") from error

    @classmethod
    def _from(cls, facts: dict[str, Any], tensors: dict[str, Tensor]) -> SmoothingResult:
        layers = []
        for layer in facts["layers"]:
            factor = tensors.pop(f"layers.{layer['layer_idx']}.factor")
            is_matrix = factor.dtype == torch.float32 and factor.ndim == 2
            if not is_matrix or bool((torch.frexp(factor)[0] != 0.5).any()):
                raise ValueError(f"factors of layer {layer['layer_idx']} are not powers of two")
            center = tensors.pop(f"layers.{layer['layer_idx']}.center", None)
            if center is not None and not (
                center.dtype == torch.float32 and center.shape == factor.shape and bool(center.isfinite().all())
            ):
                raise ValueError(f"the centre of layer {layer['layer_idx']} is not finite or does not fit its factors")
            if layer["placement"] not in get_args(Placement):
                raise ValueError(f"factors of layer {layer['layer_idx']} have unknown placement {layer['placement']!r}")
            layers.append(LayerSmoothing(factor=factor, center=center, **layer))
        originals = {name.removeprefix("originals."): tensor for name, tensor in tensors.items()}
        if any(name not in facts["parameters"] for name in originals):
            raise ValueError(f"unknown tensors {sorted(originals)}")
        for name in ("left_out", "key_formats"):
            facts[name] = {int(index): text for index, text in facts[name].items()}
        facts |= {"layers": tuple(layers), "parameters": tuple(facts["parameters"]), "originals": originals}
        return cls(**facts)
