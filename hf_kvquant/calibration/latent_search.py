"""Finds smoothing factors of latents (MLA), whose channels may be uneven: gains of their norm, and weights behind it.

A rotation spreads rounding errors over all channels alike. So channels that are small, and that large columns of
`kv_b_proj` make up for, lose most. With rms r of a channel and norm w of its column, the error is `sum(w² f²) sum(r² /
f²)` under factors f. By Cauchy's inequality `f = sqrt(r / w)` makes it least: the candidate `"energy"`, with columns in
place of queries.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..models.latent import LATENT_NORM
from ..models.probing import hooked
from ..spec.key_transform import KeyTransform
from .search import KeyStatistics, Search, through_codes
from .text import ERROR_TOKENS, Windows, run_watched, some

Look = Callable[[int, Tensor, Tensor], None]


def collect_latents(
    model: PreTrainedModel,
    windows: Windows,
    names: Mapping[int, str],
    advance: Callable[[int], Any] = lambda tokens: None,
) -> dict[int, KeyStatistics]:
    """`search.collect` of the latents of some layers, by the names of their attention modules.

    In place of queries, it has the columns of `kv_b_proj`.
    """
    seen: dict[int, list[tuple[Tensor, ...]]] = defaultdict(list)

    def look(index: int, latent: Tensor, is_real: Tensor) -> None:
        real = latent[is_real]
        sums = real.double().sum(0), real.double().square().sum(0)
        seen[index].append((real.amin(0), real.amax(0), *sums, torch.tensor(len(real), device="cpu")))

    _run_over_latents(model, windows, names, look, advance)
    found = {}
    for index, batches in sorted(seen.items()):
        minimum, maximum, total, squares, count = (torch.stack(x).cpu() for x in zip(*batches, strict=True))
        weight = _projection(model, names[index]).weight.detach().float().cpu()
        mean, mean_square = ((x.sum(0) / count.sum()).float()[None] for x in (total, squares))
        found[index] = KeyStatistics(
            minimum.amin(0)[None], maximum.amax(0)[None], mean, mean_square, weight.square().sum(0)[None]
        )
    return found


def _projection(model: PreTrainedModel, name: str) -> Any:
    return model.get_submodule(name).kv_b_proj


def _run_over_latents(
    model: PreTrainedModel, windows: Windows, names: Mapping[int, str], look: Look, advance: Callable[[int], Any]
) -> None:
    """Run the model over windows. `look` gets a layer, its latents `[batch, tokens, rank]`, and which are real."""
    norms = {model.get_submodule(f"{name}.{LATENT_NORM}"): index for index, name in names.items()}

    def watching(mask: Tensor) -> AbstractContextManager[None]:
        def watch(module: Any, args: Any, output: Tensor) -> None:
            latent = output.float().view(*mask.shape, -1)
            look(norms[module], latent, mask.to(latent.device, torch.bool))

        return hooked((norm, watch) for norm in norms)

    run_watched(model, windows, watching, advance)


class LatentSearch(Search):
    """`Search` over latents. The error is measured on what `kv_b_proj` makes of them: keys without rope, and values."""

    def _statistics(self) -> dict[int, KeyStatistics]:
        return collect_latents(self.model, self.windows, self._names(), self.tell)

    def _names(self) -> dict[int, str]:
        return {index: target.keys.name for index, target in self.targets.items()}

    def _errors(
        self, transforms: Mapping[int, Sequence[KeyTransform]], advance: Callable[[int], Any] = lambda tokens: None
    ) -> dict[int, list[float]]:
        names, errors = self._names(), {index: [0.0] * len(choices) for index, choices in transforms.items()}
        sizes = dict.fromkeys(transforms, 0.0)

        def look(index: int, latent: Tensor, is_real: Tensor) -> None:
            if index not in transforms:
                return
            key_format, weight = self.targets[index].key_format, _projection(self.model, names[index]).weight.float()
            sizes[index] += float((latent[is_real] @ weight.mT).double().square().sum())
            kept = (latent * is_real[..., None])[:, None]  # one head
            for number, transform in enumerate(transforms[index]):
                read = through_codes(kept, key_format, transform.to(kept.device), ~is_real)
                wrong = (read - kept)[:, 0][is_real] @ weight.mT
                errors[index][number] += float(wrong.double().square().sum())

        _run_over_latents(self.model, some(self.windows, ERROR_TOKENS), names, look, advance)
        return {
            index: [(error / size) ** 0.5 if size else 0.0 for error in errors[index]] for index, size in sizes.items()
        }
