"""`MostLikely`: lets some requests of a manager that samples take the most likely token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor
from transformers.generation.continuous_batching.requests import FutureRequestState


class MostLikely(ContinuousBatchingLogitsProcessor):
    """Leaves one token to requests with `do_sample=False`. Comes last of all processors."""

    supported_kwargs: dict[str, type] = {"do_sample": bool}  # noqa: RUF012, as in the base class
    ignored_kwargs: tuple[str, ...] = ()

    @classmethod
    def install(cls, manager: Any) -> None:
        """Add it to the processors of a manager that has no cache yet."""
        processors = manager.logit_processor
        processors.logits_processor.append(cls())
        processors.tensors_required += 1
        processors.supported_keys |= cls.supported_kwargs
        processors.do_processing = True

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        """Sample."""
        int32_tensor.fill_(1)

    def prepare_tensor_args(self, requests_with_new_token: list[FutureRequestState]) -> Tensor:
        """Whether each request samples, `[requests]` int32."""
        kwargs = (request.state.logit_processor_kwargs for request in requests_with_new_token)
        return torch.tensor([int(each.get("do_sample", True)) for each in kwargs], dtype=torch.int32)

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        """`[requests, vocab_size]` scores, of which greedy requests keep the first of the largest."""
        is_sampled = tensor_arg[: scores.shape[0]].bool().unsqueeze(-1)
        best = scores.argmax(-1, keepdim=True)
        return torch.where(is_sampled, scores, torch.full_like(scores, float("-inf")).scatter(-1, best, 0.0))
