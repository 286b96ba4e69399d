"""That a text is compared through the real cache, chunk by chunk, and that what was read as codes is counted."""

from __future__ import annotations

import models
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import hf_kvquant
from hf_kvquant import KVQuantConfig
from hf_kvquant.common.errors import is_out_of_memory
from hf_kvquant.storage.tally import causal_pairs
from hf_kvquant_evals.measuring.fidelity import Chunks, compare, dealt, feed

TOKENS = 41


@pytest.fixture
def text() -> Tensor:
    return torch.randint(3, models.VOCAB_SIZE, (1, TOKENS))


@pytest.mark.parametrize("window", [0, 1, 2, 5, 8, 20])
def test_causal_pairs_are_those_of_a_double_loop(window: int) -> None:
    for tokens, first_chunk in ((2, 1), (7, 3), (9, 9)):
        pairs = sum(
            1
            for query in range(first_chunk, tokens)
            for key in range(tokens)
            if key <= query and (window == 0 or key > query - window)
        )
        assert causal_pairs(tokens, first_chunk, window) == pairs


@pytest.mark.parametrize("first_chunk, chunk_size", [(1, 1), (1, 7), (5, 1), (5, 16)])
def test_compare(text: Tensor, first_chunk: int, chunk_size: int) -> None:
    model = models.llama()
    presets = ("none", "int8", "int4-token")
    (results,) = compare(model, text, {name: name for name in presets}, first_chunk=first_chunk, chunk_size=chunk_size)
    none, int8, int4 = (results[name] for name in presets)
    for result in results.values():
        assert result.kld.shape == result.agrees.shape == (TOKENS - 1 - first_chunk,)
        assert result.nll.shape == result.reference_nll.shape == (TOKENS - 1,)
    assert none.kld.abs().max() < 1e-6 and none.agrees.all()
    assert 0 < int8.kld.mean() < int4.kld.mean()
    torch.testing.assert_close(none.nll, none.reference_nll)
    assert int8.reference_nll.equal(none.reference_nll)
    # Nothing behind the first chunk was served from anything but codes, and nothing at all where there are none.
    expected = 2 * causal_pairs(TOKENS - 1, first_chunk)
    assert int8.pairs_read == int8.pairs_expected == expected
    assert none.pairs_read == none.pairs_expected == 0


@pytest.mark.parametrize("chunk_size, simulate", [(7, False), (1, False), (7, True)])
def test_texts_of_one_length_are_compared_as_each_alone(chunk_size: int, simulate: bool) -> None:
    model = models.llama()
    texts = torch.randint(3, models.VOCAB_SIZE, (3, TOKENS))
    presets = {name: name for name in ("none", "int8", "int4-g32")}
    together = compare(model, texts, presets, chunk_size=chunk_size, simulate=simulate)
    for index, results in enumerate(together):
        (alone,) = compare(model, texts[index : index + 1], presets, chunk_size=chunk_size, simulate=simulate)
        for name, result in results.items():
            for field in ("nll", "reference_nll", "kld"):
                torch.testing.assert_close(getattr(result, field), getattr(alone[name], field), rtol=1e-3, atol=1e-4)
            assert result.agrees.equal(alone[name].agrees)
            assert result.pairs_read == result.pairs_expected == alone[name].pairs_read


def test_a_pair_too_many_shows_in_some_text() -> None:
    assert [dealt(total, 3) for total in (12, 13, 11)] == [[4, 4, 4], [5, 4, 4], [4, 4, 3]]


def test_compare_is_what_the_model_says(text: Tensor) -> None:
    """The unquantised likelihoods are those of one plain forward over the text."""
    model = models.llama()
    result = compare(model, text, {"none": "none"}, chunk_size=8)[0]["none"]
    with torch.inference_mode():
        logits = model(text).logits[0, :-1].float()
    expected = torch.nn.functional.cross_entropy(logits, text[0, 1:], reduction="none")
    torch.testing.assert_close(result.reference_nll, expected, rtol=1e-4, atol=1e-5)


def test_compare_leaves_the_model_as_it_was(text: Tensor) -> None:
    model = models.llama()
    before = model.config._attn_implementation
    compare(model, text, {"int8": "int8"}, chunk_size=16)
    assert model.config._attn_implementation == before
    with hf_kvquant.patched(model, "int4-token"):
        patch = hf_kvquant.state.patch_of(model)
        compare(model, text, {"int8": "int8"}, chunk_size=16)
        assert hf_kvquant.state.patch_of(model) is patch


@pytest.mark.parametrize("simulate", [False, True])
@pytest.mark.parametrize("sliding", [True, False])
def test_what_a_window_hides_and_layers_that_stay_dense_are_not_expected(
    sliding: bool, simulate: bool, text: Tensor
) -> None:
    """Of two layers, one has a sliding window of 6 tokens."""
    config = {"preset": "int8", "sliding": sliding}
    model = models.family("gemma2")
    result = compare(model, text, {"int8": KVQuantConfig.from_dict(config)}, chunk_size=4, simulate=simulate)[0]["int8"]
    expected = causal_pairs(TOKENS - 1, 1)
    if sliding:
        expected += sum(min(6, position + 1) for position in range(1, TOKENS - 1))
    assert result.pairs_read == result.pairs_expected == expected


def test_what_is_not_read_as_codes_is_missed(text: Tensor) -> None:
    """A family that looks at keys itself gets dequantised tensors, and the count says so."""
    result = compare(models.family("xglm"), text, {"int8": "int8"}, chunk_size=4)[0]["int8"]
    assert result.pairs_read == 0
    assert result.pairs_expected == 2 * causal_pairs(TOKENS - 1, 1)


@pytest.mark.parametrize(
    "shape, chunks, message",
    [
        ((1, 9), (0, 1), "feed: `first_chunk` and `chunk_size` must be positive, got 0 and 1."),
        ((1, 9), (1, 0), "feed: `first_chunk` and `chunk_size` must be positive, got 1 and 0."),
        (
            (1, 9),
            (9, 1),
            "feed: `input_ids` must have more than the 9 tokens of the first chunk, got 9. "
            "Give a longer text or a smaller first chunk.",
        ),
    ],
)
def test_errors(shape: tuple[int, int], chunks: tuple[int, int], message: str) -> None:
    ids = torch.ones(shape, dtype=torch.long)
    stream = feed(models.llama(), ids, DynamicCache(), Chunks(*chunks))
    with pytest.raises(ValueError) as error:
        next(stream)
    assert str(error.value) == message


def test_what_says_that_memory_has_run_out() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60, dtype=torch.int8)
    assert is_out_of_memory(raised.value)
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert not is_out_of_memory(RuntimeError("shapes differ")) and not is_out_of_memory(ValueError("out of memory"))
