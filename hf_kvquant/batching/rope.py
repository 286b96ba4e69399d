"""`RopeByRequest`: RoPE factors by the length of each request, where a model chooses them by the longest of a forward.

Phi-3 and its relatives have two sets of factors (`longrope`): for texts of up to `original_max_position_embeddings`
tokens, and for longer ones. All requests of a step are one row, so one long request would give all others its factors.
Here the module that makes cosines and sines is asked for both sets, and each token gets those of its request.

Where a text outgrows its factors, `generate` computes all keys again with Phi-3 and relatives
(`generate/switching.py`), so such a request begins again. Others go on over the keys that they have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState

from ..models.rope import Switch, switch_of
from .batch import past_of
from .forwards import Wrapper
from .sampling import sampling_of


class RopeByRequest:
    """Gives the tokens of a step the factors of their requests.

    Args:
        model: Whose modules make cosines and sines.
        switch: Of the model.

    Attributes:
        switch: Of the model.
        wrapper: Lets the modules give each token the factors of its request.
    """

    def __init__(self, model: PreTrainedModel, switch: Switch) -> None:
        self.switch = switch
        self.wrapper = Wrapper((module for module in model.modules() if _has_switch(module)), self._forward)
        # Of the tokens of the next forward, [tokens]; None: positions tell.
        self._is_long: Tensor | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> RopeByRequest | None:
        """`None` for models with one set of factors."""
        switch = switch_of(model)
        return None if switch is None else cls(model, switch)

    def is_long(self, state: RequestState) -> bool:
        """Whether all tokens of a request have the factors of long texts, the first ones included."""
        begun = _begun_with(state)
        if self.switch.recomputes:
            return max(begun, len(state.initial_tokens) + len(state.generated_tokens)) > self.switch.border
        return begun > self.switch.border

    def outgrows(self, state: RequestState) -> bool:
        """Whether a request that has begun with the factors of short texts needs the others for its next token."""
        begun = max(_begun_with(state), len(state.initial_tokens))
        known = len(state.initial_tokens) + len(state.generated_tokens)
        return self.switch.recomputes and begun <= self.switch.border < known

    def is_told_by_positions(self, requests: Sequence[FutureRequestState]) -> bool:
        """Whether no token of the next forward that belongs to a long text is before the border."""
        return all(past_of(each) >= self.switch.border or not self.is_long(each.state) for each in requests)

    def prepare(self, requests: Sequence[FutureRequestState], device: torch.device) -> None:
        """Note which tokens of the next forward belong to long texts."""
        self._is_long = None
        if not self.is_told_by_positions(requests):
            counts = torch.tensor([each.query_length for each in requests])
            is_long = torch.tensor([self.is_long(each.state) for each in requests])
            self._is_long = is_long.repeat_interleave(counts).to(device)

    def _forward(
        self, _: nn.Module, forward: Callable[..., Any], x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, ...]:
        """Replaces the `forward` of a module that makes cosines and sines, `[batch, tokens, channels]` each.

        Args:
            _: The module.
            forward: What it would call otherwise.
            x: Gives the dtype.
            position_ids: `[batch, tokens]`.
            *args: What else the module takes.
            **kwargs: Likewise.
        """
        border = self.switch.border
        # The largest position decides, on the device. Tokens of the other kind get what nobody reads.
        of_short = forward(x, position_ids.clamp(max=border - 1), *args, **kwargs)
        of_long = forward(x, pad(position_ids, (0, 1), value=border), *args, **kwargs)
        is_long = position_ids >= border
        if self._is_long is not None:
            is_long = is_long | pad(self._is_long, (0, position_ids.shape[-1] - len(self._is_long)))
        return tuple(
            torch.where(is_long.unsqueeze(-1), long[..., :-1, :], short)
            for long, short in zip(of_long, of_short, strict=True)
        )


def _begun_with(state: RequestState) -> int:
    """The length of the text that a request came with.

    What follows the prompt of one that has been taken up again is its answer. A prompt whose tokens are scored comes in
    steps of one token.
    """
    sampling = sampling_of(state)
    num_forced = 0 if sampling is None else len(sampling.forced)
    return max(state._true_initial_tokens or len(state.initial_tokens), num_forced)


def _has_switch(module: nn.Module) -> bool:
    kinds = getattr(module, "rope_type", None)  # one, or one for each type of layer
    return "longrope" in (kinds.values() if isinstance(kinds, dict) else [kinds])
