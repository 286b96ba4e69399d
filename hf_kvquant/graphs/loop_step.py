"""The captured step of the decode loop: a forward, the choice of the next token, and the inputs of the next step."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria

from ..attention.masks import is_bounds
from ..cache.cache import KVQuantCache
from .runner import CapturedStep, fill


class Choice:
    """How the next token is chosen from logits, and which tokens end a sequence."""

    def __init__(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: Any,
    ) -> None:
        self.device = input_ids.device
        self.processors = logits_processor
        self.do_sample: bool = generation_config.do_sample
        ids = [criteria.eos_token_id for criteria in stopping_criteria if isinstance(criteria, EosTokenCriteria)]
        self.eos = torch.cat([each.flatten() for each in ids]).to(self.device) if ids else None
        self.pad = generation_config._pad_token_tensor.to(self.device) if ids else None

    @property
    def key(self) -> Hashable:
        """Everything about the choice that is fixed in a captured step."""
        processors = tuple((type(each), tuple(sorted(vars(each).items()))) for each in self.processors)
        tokens = tuple(None if each is None else tuple(each.view(-1).tolist()) for each in (self.eos, self.pad))
        return self.do_sample, processors, tokens

    def __call__(self, logits: Tensor, report: Tensor) -> None:
        """Choose a token for every sequence from `logits`, `[batch, 1, vocabulary]`.

        `report`, `[2, batch]` int64, is written in place: the tokens (padding for finished sequences), and 1 for every
        sequence that is not finished.
        """
        token, unfinished = report
        scores = logits[:, -1].to(copy=True, dtype=torch.float32)
        scores = self.processors(token[:, None], scores)
        if self.do_sample:
            # What torch.multinomial computes for one sample, without its check of the probabilities on the host.
            probabilities = torch.softmax(scores, dim=-1)
            scores = probabilities / torch.empty_like(probabilities).exponential_()
        chosen = scores.argmax(dim=-1)
        if self.eos is not None and self.pad is not None:
            chosen = chosen * unfinished + self.pad * (1 - unfinished)
            unfinished.mul_((chosen[:, None] != self.eos).all(dim=1))
        token.copy_(chosen)


class LoopStep(CapturedStep):
    """One decode step over static tensors: the model, the choice of the next token, and the inputs of the next step."""

    def __init__(self, inputs: Mapping[str, Any], report: Tensor, choice: Choice) -> None:
        super().__init__(inputs, report.device)
        self.report = report.clone()
        self._choice = choice  # the graph reads its tensors

    def start(self, inputs: Mapping[str, Any], report: Tensor) -> None:
        """Set the inputs of the first step after a prompt."""
        fill(self.inputs, inputs)
        self.report.copy_(report)

    def _finish(self, output: Any, cache: KVQuantCache) -> None:
        self._choice(output.logits, self.report)
        self.inputs["input_ids"].copy_(self.report[0][:, None])
        if "position_ids" in self.inputs:
            self.inputs["position_ids"].add_(1)
        mask = self.inputs.get("attention_mask")  # some models have a dictionary, with one for each kind of layer
        for bounds in mask.values() if isinstance(mask, Mapping) else [mask]:
            if bounds is not None:
                assert is_bounds(bounds)
                bounds[1].add_(1)
