"""That one forward gives every query what it would find in a cache that the text went through chunk by chunk."""

from __future__ import annotations

import models
import pytest
import torch
from models import greedy

from hf_kvquant import KVQuantConfig
from hf_kvquant.ops import MAX_DRAFTED
from hf_kvquant.patching import patched, why_dense
from hf_kvquant.preflight.divergence import divergence
from hf_kvquant.storage.tally import causal_pairs
from hf_kvquant.upstream.releases import cache_of, with_cache
from hf_kvquant_evals.measuring.fidelity import Chunks, Stream, compare, route
from hf_kvquant_evals.measuring.pairs import expected_pairs, pairs_of
from hf_kvquant_evals.measuring.simulation import simulated, simulated_cache

TOKENS = 41
OWN = ["gptj", "codegen", "gpt_neo", "bloom", "falcon", "falcon_alibi", "falcon_new", "mpt"]
CONFIGS = {
    "none": KVQuantConfig.from_preset("none"),
    "k8v4": KVQuantConfig.from_preset("k8v4", sink_length=0, residual_length=0),
    "int4-windows": KVQuantConfig.from_preset("int4-token", sink_length=2, residual_length=9),
    "fp8": KVQuantConfig.from_preset("fp8"),
}


@torch.inference_mode()
def log_probs(model: models.PreTrainedModel, ids: torch.Tensor, config: KVQuantConfig, chunks: Chunks) -> torch.Tensor:
    with route(model, simulate=chunks.simulate):
        return torch.cat(list(Stream(model, ids, config, chunks, name="test")), dim=1)[0]


@pytest.mark.parametrize(
    "family, implementation", [("llama", "sdpa"), ("llama", "eager"), ("gemma2", "eager"), ("gemma3_text", "sdpa")]
)
@pytest.mark.parametrize("first_chunk, chunk_size", [(1, 1), (3, 7)])
@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_the_cache(family: str, implementation: str, first_chunk: int, chunk_size: int, name: str) -> None:
    model = models.family(family)
    model.set_attn_implementation(implementation)
    ids = torch.randint(3, models.VOCAB_SIZE, (1, TOKENS))
    simulation, cache = (
        log_probs(model, ids, CONFIGS[name], Chunks(first_chunk, chunk_size, simulate)) for simulate in (True, False)
    )
    # Half of the tokens: sums in another order may flip a code, from where on the others differ.
    assert divergence(cache, simulation).quantile(0.5) < 1e-5
    dense = log_probs(model, ids, CONFIGS["none"], Chunks(first_chunk, chunk_size))
    distance = divergence(dense, cache).mean()
    assert divergence(cache, simulation).mean() < max(1e-6, 0.1 * distance)
    assert model.config.get_text_config()._attn_implementation == implementation


@pytest.mark.parametrize("simulate", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_short_chunks_read_what_single_steps_read(family: str, simulate: bool) -> None:
    model, ids = models.family(family), torch.randint(3, models.VOCAB_SIZE, (1, TOKENS))
    chunks, steps = (
        log_probs(model, ids, CONFIGS["int4-windows"], Chunks(1, size, simulate)) for size in (MAX_DRAFTED, 1)
    )
    dense = log_probs(model, ids, CONFIGS["none"], Chunks(1, 1))
    assert divergence(steps, chunks).quantile(0.5) < 1e-5
    assert divergence(steps, chunks).mean() < 0.1 * divergence(dense, steps).mean()


@pytest.mark.parametrize("chunks", [(1, 1), (3, 7)])
@pytest.mark.parametrize("name", ["k8v4", "int4-windows"])
@pytest.mark.parametrize("family", OWN)
def test_it_is_the_cache_of_models_that_compute_attention_by_themselves(
    family: str, name: str, chunks: tuple[int, int]
) -> None:
    model = models.family(family)
    ids = torch.randint(3, models.VOCAB_SIZE, (1, TOKENS))
    simulation, cache, dense = (
        log_probs(model, ids, config, Chunks(*chunks, simulate))
        for config, simulate in ((CONFIGS[name], True), (CONFIGS[name], False), (CONFIGS["none"], True))
    )
    assert divergence(cache, simulation).quantile(0.5) < 1e-5
    assert divergence(cache, simulation).mean() < 0.1 * divergence(dense, cache).mean()
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_pairs_are_counted() -> None:
    ids = torch.randint(3, models.VOCAB_SIZE, (1, TOKENS))
    (results,) = compare(models.llama(), ids, CONFIGS, first_chunk=2, chunk_size=4, simulate=True)
    for name, result in results.items():
        expected = 0 if name == "none" else 2 * causal_pairs(TOKENS - 1, 2)
        assert result.pairs_read == result.pairs_expected == expected


@pytest.mark.parametrize("family, implementation", [("llama", "sdpa"), ("llama", "eager"), ("bloom", "eager")])
@pytest.mark.parametrize("name", ["k8v4", "fp8"])
def test_texts_may_have_first_chunks_of_their_own(family: str, implementation: str, name: str) -> None:
    model = models.family(family)
    model.set_attn_implementation(implementation)
    ids = torch.randint(3, models.VOCAB_SIZE, (3, TOKENS))
    firsts = [5, 1, TOKENS]
    with torch.inference_mode(), simulated(model):
        together = simulated_cache(model, CONFIGS[name], first_chunk=firsts)
        logits = model(ids, **with_cache(together)).logits
        for index, first in enumerate(firsts):
            alone = simulated_cache(model, CONFIGS[name], first_chunk=first)
            expected = model(ids[index : index + 1], **with_cache(alone)).logits[0]
            # Sums in another order may flip a code.
            assert (logits[index] - expected).abs().amax(-1).quantile(0.5) < 1e-4
    assert pairs_of(together) == sum(expected_pairs(model, together, TOKENS, first) for first in firsts)
    assert pairs_of(together) == 2 * sum(causal_pairs(TOKENS, first) for first in firsts)


@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_a_patched_model_stays_patched(family: str) -> None:
    model, ids = models.family(family), torch.randint(3, models.VOCAB_SIZE, (1, TOKENS))
    compared = [compare(model, ids, {"int8": "int8"}, simulate=True)[0]["int8"].kld]
    with patched(model, "int4-token"):
        compared.append(compare(model, ids, {"int8": "int8"}, simulate=True)[0]["int8"].kld)
        assert why_dense(model) is None and cache_of(greedy(model, {"input_ids": ids})).num_bytes > 0
    assert torch.equal(*compared)


def test_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(3, models.VOCAB_SIZE, (1, 8))
    model = models.llama()
    with simulated(model):
        cache = simulated_cache(model, "int8")
        model(ids, **with_cache(cache))
        with pytest.raises(ValueError, match=r"layer 0: a simulated cache takes a text in one forward, got more"):
            model(ids, **with_cache(cache))
    handle, _ = simulated_cache(model, "int8").update(torch.ones(1, 2, 8, 64), torch.ones(1, 2, 8, 64), 0)
    assert handle.to(handle.device) is handle.to(torch.float32) is handle
    for look in (lambda: handle.transpose(1, 2), lambda: torch.cat((handle,)), lambda: handle.to(torch.float16)):
        with pytest.raises(NotImplementedError, match="simulate: the model must leave keys and values to its"):
            look()
    with pytest.raises(NotImplementedError, match="simulate: XGLMForCausalLM computes attention by itself"):
        compare(models.family("xglm"), ids, {"int8": "int8"}, simulate=True)
    monkeypatch.setattr(model.config, "_attn_implementation", "flex_attention")
    with pytest.raises(NotImplementedError, match="must be one of sdpa, eager, got 'flex_attention'"):
        with simulated(model):
            pass
