"""Which of PyTorch's kernels compute attention."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch

from hf_kvquant import patched
from hf_kvquant.attention.backends import without_cudnn
from hf_kvquant.batching import attention


@pytest.mark.parametrize("was_enabled", [True, False])
def test_cudnn_is_off_until_the_last_block_ends(was_enabled: bool) -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(was_enabled)
    try:
        one, other = without_cudnn(), without_cudnn()
        one.__enter__()
        other.__enter__()
        one.__exit__(None, None, None)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        other.__exit__(None, None, None)
        assert torch.backends.cuda.cudnn_sdp_enabled() == was_enabled
        with pytest.raises(KeyError), without_cudnn():
            raise KeyError
        assert torch.backends.cuda.cudnn_sdp_enabled() == was_enabled
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_prompts_of_a_batch_are_not_planned_by_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan for each new number of requests and tokens takes longer than their attention."""
    enabled: list[bool] = []
    plain = attention.call_previous

    def note(*args: Any, **kwargs: Any) -> Any:
        if args[2].shape[2] > 1:  # a prompt; one token is the manager's, which looks at the model
            enabled.append(torch.backends.cuda.cudnn_sdp_enabled())
        return plain(*args, **kwargs)

    model = models.family("llama")
    monkeypatch.setattr(attention, "call_previous", note)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with patched(model, "int8"):
        model.generate_batch([[5, 6, 7], [8, 9, 10, 11]], max_new_tokens=2, do_sample=False, progress_bar=False)
    assert len(enabled) == 2 * model.config.num_hidden_layers and not any(enabled)
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
