"""That pairs are counted where codes are attended to, as the op sees them, and that anything else is missed."""

from __future__ import annotations

import dataclasses
from typing import Any

import models
import pytest
import torch

from hf_kvquant import KVQuantCache, KVQuantConfig
from hf_kvquant.common.errors import RefusedResult
from hf_kvquant.models.layers import num_readers
from hf_kvquant.patching import patched
from hf_kvquant.storage.layer_store import LayerStore
from hf_kvquant.storage.tally import causal_pairs
from hf_kvquant.upstream.releases import with_cache
from hf_kvquant_evals.errors import NothingRead
from hf_kvquant_evals.measuring.fidelity import Chunks, Stream, compare, route
from hf_kvquant_evals.measuring.pairs import PairCounter, Pairs, check_pairs, count_pairs, expected_pairs, pairs_of
from hf_kvquant_evals.perplexity import gate

TOKENS = 23
SHARING = ["gemma3n_text", "gemma4_text"]


def ids(batch: int = 1) -> torch.Tensor:
    return torch.randint(3, models.VOCAB_SIZE, (batch, TOKENS))


@pytest.mark.parametrize(
    "num_shared, expected", [(0, [1, 1, 1, 1]), (1, [1, 1, 2]), (2, [2, 2])], ids=["none", "one", "two"]
)
@pytest.mark.parametrize("family", SHARING)
def test_layers_that_have_no_cache_read_that_of_another(family: str, num_shared: int, expected: list[int]) -> None:
    """The last one of their type; how transformers lists layers that share depends on its version."""
    options = {**models.FAMILIES[family].options, "num_kv_shared_layers": num_shared}
    if num_shared == 1:
        options["layer_types"] = ["full_attention", "sliding_attention", "full_attention", "full_attention"]
    model = models.build(family, **options)
    found = num_readers(model.config)
    assert found[: len(expected)] == expected and set(found[len(expected) :]) <= {1}
    cache = KVQuantCache(model.config, "int8")
    windows = [0, 6, 0] if num_shared == 1 else [6, 0, 6, 0]
    pairs = sum(n * causal_pairs(TOKENS, 1, window) for n, window in zip(expected, windows, strict=False))
    assert expected_pairs(model, cache, TOKENS, 1) == pairs
    assert expected_pairs(model, KVQuantCache(model.config, "none"), TOKENS, 1) == 0


@pytest.mark.parametrize("chunks", [(1, 1), (3, 5)])
@pytest.mark.parametrize("family", ["llama", "gemma2", "bloom", "gpt_neo", "xglm", *SHARING])
def test_what_is_counted_is_what_the_op_serves(family: str, chunks: tuple[int, int]) -> None:
    """Windows, ALiBi, models with an attention of their own, layers that read those of others, and no kernel at all."""
    model, text = models.family(family), ids()
    with route(model, simulate=False), PairCounter() as seen, torch.inference_mode():
        stream = Stream(model, text, "int4-token", Chunks(*chunks), name="int4-token")
        assert sum(piece.shape[1] for piece in stream) == TOKENS
    assert stream.pairs_read == seen.pairs
    assert stream.pairs_read + stream.pairs_dequantized == stream.pairs_expected(TOKENS, chunks[0]) > 0
    assert (stream.pairs_read == 0) == (family == "xglm")
    if family != "xglm":
        simulated = compare(model, text, {"int4-token": "int4-token"}, first_chunk=chunks[0], simulate=True)[0][
            "int4-token"
        ]
        assert simulated.pairs_read == simulated.pairs_expected == stream.pairs_expected(TOKENS - 1, chunks[0])


@pytest.mark.parametrize("family", ["llama", "gemma3n_text"])
def test_batches_and_padding_count(family: str) -> None:
    model, text = models.family(family), ids(3)
    mask = torch.ones_like(text)
    mask[1, :4] = 0
    cache = KVQuantCache(model.config, "int8")
    with patched(model, "none"), torch.inference_mode(), PairCounter() as seen:
        model(text[:, :9], attention_mask=mask[:, :9], **with_cache(cache))
        assert pairs_of(cache) == 0
        count_pairs(cache)
        model(text[:, 9:], attention_mask=mask, **with_cache(cache))
    assert pairs_of(cache) == seen.pairs == 3 * expected_pairs(model, cache, TOKENS, 9)


@pytest.mark.parametrize("family", SHARING)
def test_every_layer_that_falls_back_counts(family: str) -> None:
    """A hole in the mask is nothing for a kernel. Layers that share read the same dequantised tensors."""
    model, text = models.family(family), ids()
    mask = torch.ones_like(text)
    mask[:, 3] = 0
    cache = KVQuantCache(model.config, "int8")
    count_pairs(cache)
    with patched(model, "none"), torch.inference_mode():
        model(text[:, :9], attention_mask=mask[:, :9], **with_cache(cache))
        model(text[:, 9:], attention_mask=mask, **with_cache(cache))
    assert pairs_of(cache) == 0
    assert cache.pairs_dequantized == expected_pairs(model, cache, TOKENS, 9) > 0


def test_nothing_is_counted_that_nobody_asked_for() -> None:
    model, cache = models.llama(), KVQuantCache(models.llama().config, "int8")
    with patched(model, "none"), torch.inference_mode():
        for chunk in ids().split(9, dim=1):
            model(chunk, **with_cache(cache))
    assert [storage.tally.pairs_read for storage in cache.storages] == [None, None] and pairs_of(cache) == 0


# --- what must fail ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [1, 7])
def test_a_run_that_read_nothing_is_refused(chunk_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """... though every number of it is a good one."""
    models.read_nothing(monkeypatch)
    result = compare(models.llama(), ids(), {"int4-token": "int4-token"}, chunk_size=chunk_size)[0]["int4-token"]
    assert result.kld.mean() < 1e-6 and result.pairs_read == result.pairs_dequantized == 0
    with pytest.raises(NothingRead, match=r"int4-token must read 550 \(query, token\) pairs from codes, got 0\. Some"):
        check_pairs("int4-token", dataclasses.replace(result, pairs_expected=550))


@pytest.mark.parametrize("read, dequantized, is_complete", [(7, 0, True), (4, 3, True), (0, 7, True), (6, 0, False),
                                                           (8, 0, False), (7, 1, False), (0, 0, False)])  # fmt: skip
def test_the_rule(read: int, dequantized: int, is_complete: bool) -> None:
    pairs = Pairs(pairs_read=read, pairs_expected=7, pairs_dequantized=dequantized)
    assert pairs.is_complete == is_complete
    if is_complete:
        check_pairs("int8", pairs)
    else:
        with pytest.raises(NothingRead) as raised:
            check_pairs("eval: preset int8", pairs)
        assert str(raised.value) == (
            f"eval: preset int8 must read 7 (query, token) pairs from codes, got {read + dequantized}. Some layer "
            "attended to something else (see the log above), or more often than it should, so the number would be that "
            "of another cache. Use another model."
        )


def test_a_counter_that_runs_without_the_op_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = LayerStore.attend

    def doubled(storage: LayerStore, *args: Any, **options: Any) -> Any:
        result = attend(storage, *args, **options)
        assert storage.tally.pairs_read is not None
        storage.tally.pairs_read += 1
        return result

    model, configs = models.llama(), {"int8": KVQuantConfig.from_preset("int8")}
    gate.Gate(model, ids(), configs).check_counting()
    monkeypatch.setattr(LayerStore, "attend", doubled)
    with pytest.raises(
        RefusedResult, match=r"int8 must count the 108 .* pairs that the op serves, got 114\. A bug, please"
    ):
        gate.Gate(model, ids(), configs).check_counting()
