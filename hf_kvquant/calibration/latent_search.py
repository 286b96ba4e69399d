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

from ..models.latent import LATENT_NORM
from ..models.probing import hooked
from ..spec.key_transform import KeyTransform
from .search import KeyStatistics, Search, through_codes
from .text import ERROR_TOKENS, Windows, run_watched, some


class LatentSearch(Search):
    """`Search` over latents. The error is measured on what `kv_b_proj` makes of them: keys without rope, and values."""

    def _statistics(self) -> dict[int, KeyStatistics]:
        seen: dict[int, list[tuple[Tensor, ...]]] = defaultdict(list)

        def look(index: int, latent: Tensor, is_real: Tensor) -> None:
            real = latent[is_real]
            sums = real.double().sum(0), real.double().square().sum(0)
            seen[index].append((real.amin(0), real.amax(0), *sums, torch.tensor(len(real), device="cpu")))

        self._run(self.windows, self.targets, look, self.tell)
        found = {}
        for index, batches in sorted(seen.items()):
            minimum, maximum, total, squares, count = (torch.stack(x).cpu() for x in zip(*batches, strict=True))
            weight = self._projection(index).weight.detach().float().cpu()
            mean, mean_square = ((x.sum(0) / count.sum()).float()[None] for x in (total, squares))
            found[index] = KeyStatistics(
                minimum.amin(0)[None], maximum.amax(0)[None], mean, mean_square, weight.square().sum(0)[None]
            )
        return found

    def _errors(
        self, transforms: Mapping[int, Sequence[KeyTransform]], advance: Callable[[int], Any] = lambda tokens: None
    ) -> dict[int, list[float]]:
        errors = {index: [0.0] * len(choices) for index, choices in transforms.items()}
        sizes = dict.fromkeys(transforms, 0.0)

        def look(index: int, latent: Tensor, is_real: Tensor) -> None:
            if index not in transforms:
                return
            key_format, weight = self.targets[index].key_format, self._projection(index).weight.float()
            sizes[index] += float((latent[is_real] @ weight.mT).double().square().sum())
            kept = (latent * is_real[..., None])[:, None]  # one head
            for number, transform in enumerate(transforms[index]):
                read = through_codes(kept, key_format, transform.to(kept.device), ~is_real)
                wrong = (read - kept)[:, 0][is_real] @ weight.mT
                errors[index][number] += float(wrong.double().square().sum())

        self._run(some(self.windows, ERROR_TOKENS), self.targets, look, advance)
        return {
            index: [(error / size) ** 0.5 if size else 0.0 for error in errors[index]] for index, size in sizes.items()
        }

    def _projection(self, index: int) -> Any:
        layout = self.targets[index].layout
        assert layout is not None
        return self.model.get_submodule(layout.query.name)

    def _run(
        self,
        windows: Windows,
        layers: Mapping[int, Any],
        look: Callable[[int, Tensor, Tensor], None],
        advance: Callable[[int], Any],
    ) -> None:
        """Run the model over windows. `look` gets a layer, its latents `[batch, tokens, rank]`, and which are real."""
        norms = {self.model.get_submodule(f"{self.targets[index].keys.name}.{LATENT_NORM}"): index for index in layers}

        def watching(mask: Tensor) -> AbstractContextManager[None]:
            def watch(module: Any, args: Any, output: Tensor) -> None:
                latent = output.float().view(*mask.shape, -1)
                look(norms[module], latent, mask.to(latent.device, torch.bool))

            return hooked((norm, watch) for norm in norms)

        run_watched(self.model, windows, watching, advance)
