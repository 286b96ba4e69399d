"""The pre-flight: known killers are refused with the reason and a remedy, everything else gets what it bears.

The models are tiny and random; their logits are quietened, so that int4 costs them about what it costs trained ones.
What the limits are and where they come from is measured on the reference model, whose weights are looked at here too.
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from accelerate import cpu_offload
from test_smoothing import Adapter, EightBits, snapshot
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hf_kvquant
from hf_kvquant import KVQuantConfig, PreflightError, cli, run_preflight
from hf_kvquant.cli.loading import load
from hf_kvquant.common.errors import CannotMeasure
from hf_kvquant.models import probing
from hf_kvquant.models.probing import hooked
from hf_kvquant.preflight import check as preflight
from hf_kvquant.preflight import divergence
from hf_kvquant.preflight import result as preflight_result
from hf_kvquant.preflight.signals import read_signals
from hf_kvquant.spec.key_transform import KeyTransform
from hf_kvquant.state import patch_of
from hf_kvquant.upstream.releases import cache_of
from hf_kvquant_evals.injection import inject_key_bias, inject_key_outliers
from hf_kvquant_evals.measuring.fidelity import compare

UNTRANSFORMED: dict[str, Any] = {"preset": "int4-token", "transforms": []}
ROTATED: dict[str, Any] = {"preset": "int4-token", "transforms": ["rotate"]}
UNSMOOTHED: dict[str, Any] = {"preset": "int4-token", "transforms": ["center", "rotate"]}
REFERENCE = Path(__file__).resolve().parents[1] / "evals" / "reference_model"


def build(model_type: str = "llama", **options: Any) -> Any:
    """A tiny model whose next token is less of a surprise."""
    model = models.build(model_type, **options)
    with torch.no_grad():
        model.get_output_embeddings().weight *= 0.4
    return model


def biased() -> Any:
    """Keys that share a large constant, as in Qwen2."""
    model = build("qwen2")
    inject_key_bias(model, 200.0)
    return model


def with_outliers(factor: float = 8.0) -> Any:
    """Keys with outlier channels, in every layer."""
    model = build()
    inject_key_outliers(model, 3, factor)
    return model


def with_gains() -> Any:
    """A norm behind the keys with outlier gains, in layer 0, as in Qwen3."""
    model = build("qwen3")
    with torch.no_grad():
        model.model.layers[0].self_attn.k_norm.weight[[3, 3 + models.HEAD_DIM // 2]] *= 50
    return model


def text(characters: int = 2400) -> str:
    """Random printable characters, of which each is a token of `models.tokenizer`."""
    generator = torch.Generator().manual_seed(3)
    return "".join(chr(33 + int(code)) for code in torch.randint(0, 90, (characters,), generator=generator))


def state(model: Any) -> dict[str, Any]:
    """Everything that a pre-flight could leave behind."""
    return {
        "config": model.config.to_dict(),
        "attention": model.config._attn_implementation,
        "patch": patch_of(model),
        "attributes": sorted(model.__dict__),
        "training": [module.training for module in model.modules()],
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        "gradients": [(parameter.requires_grad, parameter.grad) for parameter in model.parameters()],
    }


# --- picking ----------------------------------------------------------------------------------------------------------


def test_the_smallest_preset_that_is_good_enough_is_picked() -> None:
    model = build()
    result = run_preflight(model)
    assert result.is_safe and result.kld is not None and result.kld <= preflight.GOAL
    assert result.num_tokens == 2 * 127 and result.source == "text that the model wrote"
    for layer in result.layers:
        assert layer.kld is not None and layer.kld <= preflight.GOAL * preflight.LAYER_SHARE
        assert [name for name, _ in layer.tried] == list(preflight.LADDER[: preflight.LADDER.index(layer.name)])
        assert layer.formats == result.config.formats(layer.layer_idx)
    assert KVQuantConfig.for_model(model) == result.config == result.approved()


def test_layers_are_measured_one_by_one_and_together() -> None:
    """A layer costs more with fewer bits, and all together cost about what they cost one by one."""
    model = build()
    costs = {name: run_preflight(model, name) for name in ("int8", "int4-token", "none")}
    for coarse, fine in zip(costs["int4-token"].layers, costs["int8"].layers, strict=True):
        assert coarse.kld is not None and fine.kld is not None
        assert coarse.kld > 20 * fine.kld > 0
    for result in costs.values():
        assert result.kld == pytest.approx(sum(layer.kld or 0 for layer in result.layers), rel=0.3)
    assert costs["none"].kld == 0


def test_a_tighter_goal_takes_more_bits() -> None:
    model = build()
    bits = {"int4": 4, "int4-token": 4.5, "k8v4": 6, "int8": 8, "none": 16}
    totals = []
    for goal in (0.5, 3e-3, 3e-5, 1e-9):
        result = run_preflight(model, max_kld=goal)
        assert result.kld is not None and result.kld <= goal
        totals.append(sum(bits[layer.name] for layer in result.layers))
    assert totals == sorted(set(totals))
    assert result.config == KVQuantConfig.from_preset("none")


@pytest.mark.parametrize("bits", [None, 4.7])
def test_few_tokens_are_run(bits: float | None) -> None:
    """A layer is measured on the end of the text alone, and the layers before it are not run for that."""
    model = build(num_hidden_layers=4, max_position_embeddings=256)
    options: dict[str, Any] = {
        "tokenizer": models.tokenizer(),
        "texts": [text()],
        "presets": ["int4-token", "int8", "none"],
    }
    options |= {"max_kld": 0.5} if bits is None else {"bits": bits}
    num_tokens = [0] * 4

    def count(index: int, module: Any, args: Any, output: Tensor) -> None:
        num_tokens[index] += output.shape[0] * output.shape[1]

    # Modules inside a layer: they do not run while the layer repeats what it did.
    hooks = ((layer.mlp.down_proj, functools.partial(count, i)) for i, layer in enumerate(model.model.layers))
    with hooked(hooks):
        result = run_preflight(model, **options)
    first, *_, last = num_tokens
    num_measured = sum(1 + len(layer.tried) for layer in result.layers)
    assert num_tokens == sorted(num_tokens) and first < last
    assert last - first < 0.3 * num_measured * result.num_tokens


def test_a_replay_gives_the_same_numbers() -> None:
    """To the bit, wherever it begins. A model whose layers do more than they show is measured on all of its text."""
    model, ids = build(num_hidden_layers=3, max_position_embeddings=256), torch.randint(3, models.VOCAB_SIZE, (2, 200))
    formats = KVQuantConfig.from_preset("int4-token").formats(0)
    with hf_kvquant.patched(model, "none"), torch.no_grad():
        meter = divergence.Meter(model, ids)
        assert meter._replay is not None and meter._is_replayed(0, 1, 2)
        whole = list(meter._replayed(divergence.alone(1, formats), 0))
        assert all(map(torch.equal, whole, meter._replayed(divergence.alone(1, formats), 1)))
        assert not any(map(torch.equal, whole, meter.reference[-len(whole) :]))
        kld = meter.cost(divergence.alone(1, formats)).kld
        assert 0.3 * kld.mean < meter.kld(1, formats).mean < 3 * kld.mean and 0 < kld.error < kld.mean
        # Adds something of its own in each forward.
        steps = itertools.count()
        with hooked([(model.model.layers[1], lambda module, args, output: output + 1e-3 * next(steps))]):
            meter = divergence.Meter(model, ids)
        assert meter._replay is None
        assert meter.kld(1, formats) == meter.cost(divergence.alone(1, formats)).kld


@pytest.mark.parametrize("preset", ["int4-token", "int4-channel"])
def test_chunks_read_what_single_steps_read(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, generator = build(max_position_embeddings=256), torch.Generator().manual_seed(0)
    ids = torch.randint(3, models.VOCAB_SIZE, (2, 161), generator=generator)
    bare = models.INT8_CODES
    config = KVQuantConfig.from_preset(preset, sink_length=4, residual_length=20, layers={1: bare})
    steps = compare(model, ids, {"config": config}, first_chunk=1, chunk_size=1, simulate=True)
    expected = torch.cat([each["config"].kld for each in steps]).mean()
    found = []
    for _ in range(2):
        with hf_kvquant.patched(model, "none"), torch.no_grad():
            found.append(divergence.Meter(model, ids[:, :-1]).cost(config).kld.mean / float(expected))
        monkeypatch.setattr(divergence, "expect_crops", lambda storage: None)
    assert found[0] == pytest.approx(1, abs=0.01) and found[1] > 1.1


def test_doubtful_layers_are_measured_on_all_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(max_position_embeddings=256)
    quick = run_preflight(model, "int4-token")
    for layer in quick.layers:
        assert layer.kld is not None and layer.error is not None and layer.kld + preflight.DOUBT * layer.error < 0.01
    monkeypatch.setattr(preflight, "DOUBT", math.inf)
    thorough = run_preflight(model, "int4-token")
    for layer, other in zip(quick.layers, thorough.layers, strict=True):
        assert layer.kld != other.kld == pytest.approx(layer.kld, rel=0.7)


def test_a_clear_layer_is_measured_on_fewer_tokens() -> None:
    model, ids = build(num_hidden_layers=3, max_position_embeddings=640), torch.randint(3, models.VOCAB_SIZE, (2, 440))
    formats = KVQuantConfig.from_preset("int4-token").formats(0)
    found: list[divergence.Estimate] = []

    def is_enough(estimate: divergence.Estimate) -> bool:
        found.append(estimate)
        return True

    with hf_kvquant.patched(model, "none"), torch.no_grad():
        few, all_of_them = (divergence.Meter(model, each) for each in (ids[:1], ids))
        early, late = all_of_them.kld(1, formats, is_enough), all_of_them.kld(1, formats)
        assert found == [early] and early != late == pytest.approx(early, rel=0.5)
        # The last quarter of a single window has fewer tokens than the least.
        assert few.kld(1, formats, is_enough) == few.kld(1, formats) and found == [early]


@pytest.mark.parametrize("bits", [None, 4.7])
def test_a_budget_compares_divergences_of_as_many_tokens(bits: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    ends_early = []
    measure = divergence.Meter.kld

    def kld(meter: divergence.Meter, index: int, formats: Any, is_enough: Any) -> divergence.Estimate:
        limit = preflight.LAYER_SHARE * preflight.GOAL
        ends_early.append([is_enough(divergence.Estimate(limit / 2, limit / errors)) for errors in (10, 14)])
        return measure(meter, index, formats, is_enough)

    monkeypatch.setattr(divergence.Meter, "kld", kld)
    run_preflight(build(), presets=["int4-token", "int8", "none"], bits=bits)
    assert set(map(tuple, ends_early)) == {(False, bits is None)}


def test_the_cost_is_said_in_words() -> None:
    result = run_preflight(build(), "int4-token")
    assert result.cost is not None and result.kld == result.cost.kld.mean
    same, perplexity = result.cost.same, result.cost.perplexity
    assert 0.5 < same.mean < 1 and 0 < same.error < 0.05 and abs(perplexity.mean) < 0.2 and 0 < perplexity.error < 0.1
    assert (
        f"All layers together: the same next token after {same.mean:.1%} ± {100 * same.error:.1f} of tokens, "
        f"perplexity {perplexity.mean:+.1%} ± {100 * perplexity.error:.1f}, {result.kld:.2e} ± "
        f"{result.cost.kld.error:.0e} nats per token, over {result.num_tokens:,} tokens of text that the model wrote."
    ) in result.report()


def test_next_tokens_and_perplexity_against_plain_sums() -> None:
    model, ids = build(), torch.randint(3, models.VOCAB_SIZE, (2, 100))
    with hf_kvquant.patched(model, "none"), torch.no_grad():
        meter = divergence.Meter(model, ids)
        config = KVQuantConfig.from_preset("int4-token")
        logits = torch.cat(list(meter._run(meter._cache(config))), dim=1)  # of tokens 1 to 99
        cost = meter.cost(config)
    exact, other = (each.float().log_softmax(-1) for each in (torch.cat(meter.reference, dim=1), logits))
    assert cost.same.mean == pytest.approx(float((exact.argmax(-1) == other.argmax(-1)).float().mean()))
    said = ids[:, 2:, None]
    losses = [-each[:, :-1].gather(2, said).mean() for each in (exact, other)]
    assert cost.perplexity.mean == pytest.approx(float((losses[1] - losses[0]).exp()) - 1, rel=1e-3)
    assert cost.kld.mean == pytest.approx(float((exact.exp() * (exact - other)).sum(-1).mean()), rel=1e-3)


def test_bfloat16_is_measured_in_float32_where_it_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the CPU that runs this; the model keeps its tensors, and caches count in its own dtype."""
    model = build().bfloat16()
    monkeypatch.setattr(probing, "has_bfloat16_matmul", lambda: False)
    pointers, dtypes = [each.data_ptr() for each in model.parameters()], set()
    with hooked([(model.model.layers[0].mlp.down_proj, lambda module, args, output: dtypes.add(output.dtype))]):
        result = run_preflight(model, "none")
        assert dtypes == {torch.float32} and result.bits == 16
        assert [each.data_ptr() for each in model.parameters()] == pointers and model.dtype == torch.bfloat16
        monkeypatch.setattr(probing, "has_bfloat16_matmul", lambda: True)
        dtypes.clear()
        run_preflight(model, "none")
        assert dtypes == {torch.bfloat16}


def test_a_copy_that_does_not_fit_is_said_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = build().bfloat16()
    monkeypatch.setattr(probing, "has_bfloat16_matmul", lambda: False)
    monkeypatch.setattr(probing, "_free_bytes", lambda: 10**5)
    with caplog.at_level(logging.WARNING, "hf_kvquant"), probing.in_float32(model) as stored_as:
        assert stored_as is None and model.dtype == torch.bfloat16
    [message] = [record.message for record in caplog.records]
    assert message.startswith("LlamaForCausalLM in bfloat16 is slow on this CPU, and 0.0 GB of free memory are too li")


def test_tensors_that_share_numbers_still_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "has_bfloat16_matmul", lambda: False)
    model = build().bfloat16()
    one, other = (layer.mlp.up_proj for layer in model.model.layers)
    other.weight.data = one.weight.data
    with probing.in_float32(model) as stored_as:
        assert stored_as == torch.bfloat16 and one.weight.data_ptr() == other.weight.data_ptr()
        assert one.weight.dtype == torch.float32


def test_for_model_is_the_first_thing_that_a_process_may_use() -> None:
    code = "import hf_kvquant; hf_kvquant.KVQuantConfig.for_model('a model')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "TypeError: for_model: `model` must be a transformers PreTrainedModel, got str." in done.stderr


@pytest.mark.parametrize("preset", ["k4v2", "int2"])
def test_dense_windows_of_a_preset_are_picked_with_it(preset: str) -> None:
    # Weights alone speak against four bits and fewer below head_dim 128.
    result = run_preflight(build(head_dim=128), presets=[preset, "none"], measure=False)
    assert result.config == KVQuantConfig.from_preset(preset) and result.spelled() == repr(preset)
    assert preflight_result.name_of(result.config.formats(0)) == preset
    without = KVQuantConfig.from_preset(preset, residual_length=0)
    assert preflight_result.name_of(without.formats(0)).endswith("first 4 and last 0 tokens dense")


def test_layers_move_on_while_their_sum_costs_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer alone is within the goal, both are not: the one that costs more moves on."""
    costs = {"int4-token": 0.009, "int8": 0.001}

    class Meter:
        num_scored, longest = 1, 256

        def __init__(self, model: Any, ids: Tensor) -> None:
            pass

        def reads_codes(self, formats: Any) -> bool:
            return True

        def kld(self, index: int, formats: Any, is_enough: Any) -> divergence.Estimate:
            return self.cost(divergence.alone(index, formats)).kld

        def cost(self, config: KVQuantConfig) -> divergence.Cost:
            names = [preflight_result.name_of(config.formats(index)) for index in range(2)]
            weights = (3.0, 2.9) if "none" not in names else (1.0, 0.9)
            kld = sum(weight * costs.get(name, 0.0) for weight, name in zip(weights, names, strict=True))
            return divergence.NO_COST._replace(kld=divergence.Estimate(kld, 0.0))

    monkeypatch.setattr(preflight, "Meter", Meter)
    result = run_preflight(build(), presets=["int4-token", "int8"], max_kld=0.05)
    assert [layer.name for layer in result.layers] == ["int8", "int4-token"]
    assert result.spelled() in (
        "{'preset': 'int8', 'layers': {1: 'int4-token'}}",
        "{'preset': 'int4-token', 'layers': {0: 'int8'}}",
    )


def test_presets_that_do_not_fit_a_layer_are_passed_over() -> None:
    model = build(head_dim=48)
    assert run_preflight(model, presets=["int4-g32", "int8"]).spelled() == "'int8'"
    with pytest.raises(
        ValueError, match=r"`presets` must include one that fits layer 0, got \['int4-g32'\]: .*Add 'none'"
    ):
        run_preflight(model, presets=["int4-g32"])


def test_layers_with_other_caches_are_left_out() -> None:
    family = models.FAMILIES["gemma3_text"]
    model = models.build(family.model_type, **family.options)
    assert [layer.layer_idx for layer in run_preflight(model, "int8").layers] == [0, 1]
    result = run_preflight(model, {"preset": "int8", "sliding": False})
    assert [layer.layer_idx for layer in result.layers] == [1]
    assert result.left_out == {0: "its cache (sliding_attention) is not quantised"}
    assert "    0  left out: its cache (sliding_attention) is not quantised" in result.report()


def test_a_model_without_caches_of_ours_gets_the_first_preset() -> None:
    model = build("mistral", sliding_window=8)
    assert run_preflight(model).layers, "windows are judged"
    config = KVQuantConfig.from_preset("int4-token", sliding=False)
    result = run_preflight(model, config)
    assert result.layers == () and result.config == config and result.kld is None


# --- refusing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("measure", [True, False], ids=["measured", "weights"])
@pytest.mark.parametrize(
    "killer, config, signal, cause, remedy",
    [
        (biased, ROTATED, "key bias", "a key bias of 1", "Add 'center' to `transforms`"),
        (with_outliers, UNTRANSFORMED, "key channels", "projection rows of 8", "Add 'rotate' to `transforms`, or cal"),
        (with_gains, UNTRANSFORMED, "key channels", "norm gains of 50 times", "Add 'rotate' to `transforms`, or cal"),
    ],
    ids=["bias", "outliers", "gains"],
)
def test_known_killers(killer: Any, config: Any, signal: str, cause: str, remedy: str, measure: bool) -> None:
    model = killer()
    with pytest.raises(PreflightError) as caught:
        KVQuantConfig.for_model(model, config, measure=measure)
    error, message = caught.value, str(caught.value)
    assert isinstance(error, ValueError) and error.layer_idx in (0, 1)
    assert error.value is not None and error.limit is not None and error.value > error.limit
    assert error.remedy.startswith(remedy) and remedy in message
    assert cause in message and message.endswith(" force=True accepts it anyway.")
    of_layer = f"of layer {error.layer_idx}"
    if measure:
        assert error.signal == "KL divergence" and error.limit == pytest.approx(0.03)
        expected = (
            f"for_model: `preset_or_config` must keep the KL divergence {of_layer} within 0.03 nats per token, got"
        )
    else:
        assert error.signal == signal
        expected = f"for_model: `preset_or_config` must fit the weights {of_layer}, got int4-token ("
    assert message.startswith(expected)
    # With the transforms of the preset, the same format serves.
    assert run_preflight(model, "int4-token", measure=measure).is_safe
    assert KVQuantConfig.for_model(model, "int4-token", measure=measure) == KVQuantConfig.from_preset("int4-token")


def test_calibration_is_a_remedy() -> None:
    """Factors that are folded into the weights take the signal away, and those that caches apply answer it."""
    model = with_outliers(32.0)
    with pytest.raises(PreflightError, match=r"times the median channel, limit 8\)\. Calibrate factors \(hf_kvquant"):
        KVQuantConfig.for_model(model, UNSMOOTHED, presets=["int4-token"])
    for mode in ("fold", "online"):
        hf_kvquant.smooth_attention(model, models.tokenizer(), [text()], "int4-token", mode=mode, progress=False)
        for measure in (True, False):
            assert run_preflight(model, "int4-token", measure=measure).is_safe
        hf_kvquant.unsmooth(model)


def test_the_remedy_is_one() -> None:
    model = with_gains()
    result = run_preflight(model, UNTRANSFORMED)
    assert result.problems[0].layer_idx == 0 and 0 in result.remedies
    config = KVQuantConfig.from_preset("int4-token", transforms=[], layers=result.remedies)
    assert KVQuantConfig.for_model(model, config) == config
    with pytest.raises(PreflightError, match=r"Or use layers=\{0: '[a-z0-9-]+'\}, which is good enough\. force"):
        result.approved()


def test_a_remedy_may_have_no_name() -> None:
    """Formats of no preset, which their usual transforms save, are spelled out."""
    grouped = {"storage": "int4", "granularity": "group", "group_size": 64, "symmetric": False}
    config = KVQuantConfig.from_dict({"key": grouped, "value": "int8", "transforms": []})
    result = run_preflight(with_gains(), config, max_kld=0.5)
    assert result.remedies[0].key == config.key and "rotate" in result.remedies[0].transforms
    with pytest.raises(PreflightError, match=r"layers=\{0: \{'key': \{'storage': 'int4', .*'transforms': \['center', "):
        result.approved()


def test_a_remedy_that_is_the_same_for_all_layers_is_said_once() -> None:
    with pytest.raises(PreflightError, match=r"`transforms`\. Or use 'int4', which is good enough\. f"):
        KVQuantConfig.for_model(biased(), ROTATED, measure=False)


def test_all_layers_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that are bearable one by one need not be so together."""
    monkeypatch.setattr(preflight, "LIMIT", 1e-3)
    monkeypatch.setattr(preflight, "LAYER_SHARE", 1e9)
    with pytest.raises(PreflightError) as caught:
        KVQuantConfig.for_model(build(), "int4-token")
    assert caught.value.layer_idx is None and caught.value.value is not None
    message = str(caught.value)
    assert message.startswith(
        "for_model: `preset_or_config` must keep the KL divergence of all layers together within 0.001 nats per token, "
        "got 0.0"
    )
    assert "with this config. Let for_model pick presets: KVQuantConfig.for_model(model). force=True" in message


def test_picked_presets_may_be_too_few() -> None:
    model = with_gains()
    with torch.no_grad():
        model.get_output_embeddings().weight *= 50
    with pytest.raises(PreflightError, match=r"End `presets` with 'none'\. force=True"):
        KVQuantConfig.for_model(model, presets=["int4-token"])


def test_force(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="hf_kvquant"):
        config = KVQuantConfig.for_model(biased(), ROTATED, measure=False, force=True)
    assert config == KVQuantConfig.from_dict(ROTATED)
    assert "a key bias of 1" in caplog.text and "Accepted anyway, since `force` is True." in caplog.text


def test_logits_that_are_no_numbers() -> None:
    model = build()
    with torch.no_grad():
        model.get_output_embeddings().weight[5, 5] = math.nan
    with pytest.raises(PreflightError) as caught:
        KVQuantConfig.for_model(model)
    assert caught.value.signal == "unknown" and caught.value.value is None
    assert str(caught.value) == (
        "for_model: `model` must be checked in layer 0 before int4 is used, got no verdict: its logits are not "
        "finite. Check the checkpoint, or load it in bfloat16 or float32. Load the weights, or pass `tokenizer` and "
        "`texts` to measure it. force=True accepts it anyway."
    )


def test_divergence_is_right_at_minus_infinity() -> None:
    """As in PyTorch where logits are finite; where they are not, by the definition of p · log(p / q)."""
    exact, other = torch.randn(2, 3, 7, 11).log_softmax(-1)
    expected = torch.nn.functional.kl_div(other, exact, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(divergence.divergence(exact, other), expected, rtol=0, atol=0)
    p, q = (torch.tensor(each).double() for each in ((0.5, 0.25, 0.25, 0), (0.25, 0.25, 0.5, 0)))
    wanted = float((p * (p / q).log()).nansum())
    found = divergence.divergence(p.log().float(), q.log().float())
    assert float(found) == pytest.approx(wanted) and wanted > 0, "both exclude a token: 0 · log(0 / 0) is 0"
    only_exact, everywhere = torch.tensor([1.0, 0.0]).log(), torch.tensor([0.5, 0.5]).log()
    assert float(divergence.divergence(only_exact, everywhere)) == pytest.approx(math.log(2))
    assert float(divergence.divergence(everywhere, only_exact)) == math.inf, "p > 0 where q = 0"
    bad = torch.tensor([math.nan, 0.0])
    assert divergence.divergence(bad, everywhere).isnan() and divergence.divergence(everywhere, bad).isnan()


def test_a_vocabulary_may_have_padding() -> None:
    """Logits of minus infinity for tokens that do not exist, in both models and in the text."""

    class Padded(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.index_fill(-1, torch.tensor([models.VOCAB_SIZE - 1]), -math.inf)

    model = build()
    model.set_output_embeddings(torch.nn.Sequential(model.get_output_embeddings(), Padded()))
    ids = torch.randint(3, models.VOCAB_SIZE, (2, 40))
    ids[:, 9] = models.VOCAB_SIZE - 1
    with hf_kvquant.patched(model, "none"), torch.no_grad():
        meter = divergence.Meter(model, ids)
        assert meter.cost(KVQuantConfig.from_preset("none")) == divergence.NO_COST
        cost = meter.cost(KVQuantConfig.from_preset("int4-token"))
    assert 0 < cost.kld.mean < 1 and math.isfinite(cost.perplexity.mean)


def test_a_format_that_gives_no_numbers_is_ruin(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    ids = torch.randint(3, models.VOCAB_SIZE, (2, 40))
    with hf_kvquant.patched(model, "none"), torch.no_grad():
        meter = divergence.Meter(model, ids)
        assert meter.cost(KVQuantConfig.from_preset("none")) == divergence.NO_COST
        ruined = [logits * math.nan for logits in meter.reference]
        for name, given in (("_run", ruined), ("_replayed", ruined[-1:])):
            monkeypatch.setattr(meter, name, lambda *arguments, given=given: (each for each in given))
        config = KVQuantConfig.from_preset("int8")
        assert meter.cost(config).kld.mean == meter.kld(0, config.formats(0)).mean == math.inf


def test_models_that_cannot_be_patched_are_refused_as_ever() -> None:
    with pytest.raises(
        NotImplementedError, match="run_preflight: `model` must be a decoder that keeps keys and values"
    ):
        run_preflight(models.bart())
    with pytest.raises(ValueError, match=r"`layers` must name layers below 2"):
        run_preflight(build(), {"preset": "int4-token", "layers": {7: "int8"}})
    with pytest.raises(TypeError, match=r"^run_preflight: `model` must be a transformers PreTrainedModel, got str\."):
        run_preflight("int4-token")  # type: ignore[arg-type]


# --- what the weights tell --------------------------------------------------------------------------------------------


def test_a_bias_is_seen_in_fused_projections_and_without_rope() -> None:
    for name in ("phi", "gpt_neox", "gpt2", "qwen2"):
        family = models.FAMILIES[name]
        model = models.build(family.model_type, **family.options)
        before, _ = read_signals(model, where="test")
        added = inject_key_bias(model, 50.0)
        after, _ = read_signals(model, where="test")
        for index, bias in added.items():
            signals, old = after[index], before[index]
            assert signals.bias is not None and old.bias is not None and not signals.unknown
            torch.testing.assert_close(signals.bias, old.bias + bias, rtol=1e-4, atol=1e-4)
            ratio = signals.bias_ratio(None)
            assert ratio is not None and ratio > 3
            # Its own average over positions takes nearly all of it away again.
            left = signals.bias_ratio(signals.bias_center)
            assert left is not None and left < 0.3 * ratio


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt_neox", "gpt2", "qwen3", "gemma"])
def test_outlier_channels_are_seen_wherever_keys_are_made(name: str) -> None:
    family = models.FAMILIES[name]
    model = models.build(family.model_type, **family.options)
    before, _ = read_signals(model, where="test")
    inject_key_outliers(model, 2, 8.0)
    after, _ = read_signals(model, where="test")
    for index, signals in after.items():
        ratio = before[index].channel_ratio
        assert ratio is not None and ratio < 4 and signals.channel_ratio is not None and signals.channel_ratio > 6
        assert signals.channel_source == ("gains" if name == "qwen3" else "rows")


def test_eight_bits_bear_more() -> None:
    model = with_outliers(16.0)
    signals, _ = read_signals(model, where="test")
    ratio = signals[0].channel_ratio
    assert ratio is not None and 16 < ratio < 64
    for preset, expected in (
        ("int4-token", ["key channels"]),
        ("int8", []),
        ("fp8", []),
        ("none", []),
        ("int4-channel", []),
    ):
        config = KVQuantConfig.from_preset(preset, transforms=[])
        found = signals[0].findings(config.formats(0), None)
        assert [finding.signal for finding in found if finding.is_harmful] == expected


def test_a_rotation_is_not_all_that_outliers_want() -> None:
    """Rotated outliers are no reason to refuse, but one to pick something else where nothing is measured."""
    signals, _ = read_signals(with_outliers(16.0), where="test")
    for preset, limit in (("int4-token", 8), ("int4-channel", 12)):
        formats = KVQuantConfig.from_preset(preset).formats(0)
        [found] = [x for x in signals[0].findings(formats, KeyTransform(is_rotated=True)) if x.signal == "key channels"]
        assert found.limit == limit and not found.is_harmful and found.detail.startswith("projection rows of 1")
        smoothed = KeyTransform(smoothing=torch.ones(2, models.HEAD_DIM), is_rotated=True)
        assert not [x for x in signals[0].findings(formats, smoothed) if x.signal == "key channels"]


def test_small_heads() -> None:
    result = run_preflight(build(head_dim=48), "int4-token", measure=False)
    assert result.is_safe
    notes = result.notes()
    assert "head_dim 48, 2 query heads per key-value head." in notes
    assert "A head_dim of 48, at least 128 is better at 4 bits." in notes
    assert "A rotation over blocks of 16, at least 32 is better at 4 bits." in notes


def test_the_reference_model_and_its_killers() -> None:
    """The limits, on weights that were trained."""

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(REFERENCE, dtype=torch.float32)

    assert run_preflight(load(), UNTRANSFORMED, measure=False).is_safe
    assert run_preflight(load(), measure=False).spelled() == "'int4'"
    for spoil, config in ((inject_key_bias, ROTATED), (inject_key_outliers, UNTRANSFORMED)):
        model = load()
        spoil(model)
        assert len(run_preflight(model, config, measure=False).problems) == 7
        assert run_preflight(model, "int4-token", measure=False).is_safe


# --- weights that cannot be read --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["quantised", "adapter", "offloaded"])
def test_weights_that_cannot_be_read_are_unknown(kind: str) -> None:
    model = build()
    attention = model.model.layers[1].self_attn
    if kind == "quantised":
        attention.k_proj = EightBits(attention.k_proj)
    elif kind == "adapter":
        attention.q_proj = Adapter(attention.q_proj)
    else:
        cpu_offload(model, torch.device("cpu"))
    result = run_preflight(model, "int8")
    assert result.is_safe and result.kld is not None
    for layer in result.layers:
        assert layer.signals.channel_ratio is None and "key channels" in layer.signals.unknown
        assert layer.signals.bias_ratio(None) == 0  # which is found by running the model
        assert preflight_result.cells(layer)[1] == "?" and "key channels unknown" in layer.remarks()
    assert "Unknown: run_preflight: `model` must " in result.report()
    assert len(run_preflight(model).layers) == 2
    with pytest.raises(
        PreflightError, match="must be checked in layer 0 before int8 is used, got no verdict: key chan"
    ) as raised:
        KVQuantConfig.for_model(model, "int8", measure=False)
    message = str(raised.value)
    assert message.count("for_model: ") == 1 and "Load the weights, or leave out measure=False. " in message
    assert ("unknown: EightBits with int8 Parameter at " in message) == (kind == "quantised")
    assert "Or use 'none', which is good enough. force" in message, "a preset of which nothing is known is no remedy"
    assert "Smooth the" not in message and "pass `tokenizer`" not in message


def test_weights_that_are_nowhere() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**{**models.COMMON, "eos_token_id": 2}))
    for options in ({}, {"measure": False}):
        result = run_preflight(model, **options)
        assert not result.is_safe and result.kld is None
        assert [preflight_result.cells(layer) for layer in result.layers] == [("?", "?", "-")] * 2
        assert all(layer.signals.head_dim == 64 and layer.signals.num_q_per_kv == 2 for layer in result.layers)
        assert "Divergences were not measured: " in result.report()
        with pytest.raises(PreflightError, match="must be checked in layer 0 before int4 is used, got no verdi"):
            result.approved()
        assert isinstance(result.approved(force=True), KVQuantConfig)


def test_a_model_that_cannot_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no room\nleft")

    monkeypatch.setattr(divergence, "forward", fail)
    with pytest.raises(
        PreflightError, match=r"verdict: the model could not be run \(RuntimeError: no room left\)\. Lo"
    ):
        KVQuantConfig.for_model(model, "int4-token")
    # A layer that nobody quantises needs no verdict.
    assert KVQuantConfig.for_model(model, "none") == KVQuantConfig.from_preset("none")


def test_no_room_for_a_format_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, *arguments: Any) -> float:
        raise CannotMeasure("the model could not be run (no room)")

    monkeypatch.setattr(divergence.Meter, "kld", fail)
    with pytest.raises(
        PreflightError, match=r"before int8 is used, got no verdict: the model could not be run \(no ro"
    ):
        KVQuantConfig.for_model(build(), "int8")


def test_a_number_that_never_saw_all_codes_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    original = divergence.forward

    def forgetful(model: Any, input_ids: Tensor, *, cache: Any) -> Tensor:
        logits = original(model, input_ids, cache=cache)
        if isinstance(cache, hf_kvquant.KVQuantCache):
            cache.crop(-1)
        return logits

    monkeypatch.setattr(divergence, "forward", forgetful)
    with pytest.raises(PreflightError, match=r"got no verdict: layer 0 kept 12\d of 128 tokens\. "):
        KVQuantConfig.for_model(build(), "int8")


# --- the text ---------------------------------------------------------------------------------------------------------


def test_texts_are_measured_on_where_they_are_given() -> None:
    result = run_preflight(build(), "int8", tokenizer=models.tokenizer(), texts=[text(), text(900)])
    assert result.source == "the texts" and result.is_safe
    assert 600 < result.num_tokens <= 1024


def test_the_model_writes_without_ending() -> None:
    model = build(eos_token_id=[7, 8])
    model.generation_config.eos_token_id = 9
    with torch.no_grad():
        first = divergence.own_text(model)
        again = divergence.own_text(model)
    assert torch.equal(first, again) and first.shape == (divergence.NUM_WINDOWS, 128)
    assert (first[:, 0] == models.BOS).all()
    assert not torch.isin(first[:, 1:], torch.tensor([7, 8, 9, models.PAD])).any()
    assert len({tuple(row) for row in first.tolist()}) == divergence.NUM_WINDOWS
    assert len(first.unique()) > 40  # drawn, and not the likeliest over and over


def test_blocks_need_texts_that_fill_them() -> None:
    """Keys of `int4-channel` stay dense up to a block: a short text shows nothing of what its codes do."""
    model = build(max_position_embeddings=512)
    texts = [text()[start : start + 100] for start in range(0, 1000, 100)]
    options: dict[str, Any] = {"tokenizer": models.tokenizer(), "texts": texts}
    with pytest.raises(PreflightError, match=r"got no verdict: the texts give windows of 100 tokens, too few to fill"):
        KVQuantConfig.for_model(model, "int4-channel", **options)
    result = run_preflight(model, max_kld=1e-3, **options)
    assert result.is_safe and "int4-channel" not in {layer.name for layer in result.layers}
    # A model that reads no more than that never fills a block either.
    assert run_preflight(build(max_position_embeddings=128), "int4-channel", **options).kld is not None
    assert run_preflight(model, "int4-channel").kld is not None


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"presets": "int4-token"},
            r"run_preflight: `presets` must be a list of names, got 'int4-token'\. The default is \['int4', ",
        ),
        ({"presets": []}, r"run_preflight: `presets` must be a list of names, got \[\]\."),
        (
            {"presets": ["int5"]},
            r"run_preflight: `presets` must be names out of \[.*\], got 'int5'\. Did you mean 'int",
        ),
        (
            {"max_kld": 0.0},
            r"run_preflight: `max_kld` must be positive, got 0\.0\. The default is 0\.05 nats per token\.",
        ),
        ({"max_kld": math.nan}, r"run_preflight: `max_kld` must be positive, got nan\."),
        (
            {"texts": ["a"]},
            r"run_preflight: `tokenizer` must come with `texts`, got None\. Give both, or neither: the mode",
        ),
        ({"tokenizer": models.tokenizer()}, r"run_preflight: `texts` must come with `tokenizer`, got None\."),
        (
            {"tokenizer": models.tokenizer(), "texts": ["a"]},
            r"run_preflight: `texts` must have at least 512 tokens in pi",
        ),
        ({"preset_or_config": "int5"}, r"KVQuantConfig: `preset` must be one of"),
    ],
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_preflight(build(), **options)


# --- the model afterwards ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_patched", [False, True], ids=["unpatched", "patched"])
def test_the_model_is_as_it_was(is_patched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_gains()
    if is_patched:
        hf_kvquant.patch(model, "int8")
    model.model.layers[1].train()
    weights, before, random = snapshot(model), copy.deepcopy(state(model)), torch.get_rng_state()

    def check() -> None:
        assert state(model) == before and torch.equal(torch.get_rng_state(), random)
        for name, value in model.state_dict().items():
            assert torch.equal(value, weights[name]), name

    run_preflight(model)
    check()
    with pytest.raises(PreflightError):
        KVQuantConfig.for_model(model, UNTRANSFORMED)
    check()

    def interrupt(self: Any, index: int, formats: Any, is_enough: Any) -> float:
        for _ in self._replayed(divergence.alone(index, formats), index):
            raise KeyboardInterrupt
        return 0.0

    monkeypatch.setattr(divergence.Meter, "kld", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_preflight(model)
    check()


def test_what_is_picked_can_be_used() -> None:
    model = with_outliers()
    config = KVQuantConfig.for_model(model, max_kld=0.01)
    assert KVQuantConfig.from_dict(config.to_dict()) == config
    with hf_kvquant.patched(model, config):
        output = models.greedy(model, models.left_padded())
    assert cache_of(output).quant_config == config


def test_a_static_config_is_checked_and_handed_out_as_it_is() -> None:
    config = KVQuantConfig.from_preset("int8", max_cache_len=16)
    result = run_preflight(build(), config)
    assert result.config == config and result.is_safe
    assert result.spelled() == repr(config.to_dict())


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Saved models: an easy one, and one whose output a rotation does not save."""
    made = {"easy": build(), "biased": biased()}
    with torch.no_grad():
        made["biased"].get_output_embeddings().weight *= 30
    paths = {name: tmp_path_factory.mktemp(name) for name in made}
    for name, model in made.items():
        model.save_pretrained(paths[name])
        models.tokenizer().save_pretrained(paths[name])
    return {name: str(path) for name, path in paths.items()}


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout in one line, and stderr of the command."""
    code = cli.main(["calibrate", *arguments])
    captured = capsys.readouterr()
    return code, " ".join(captured.out.split()), captured.err


def test_the_command_picks(folders: dict[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, output, error = run(capsys, folders["easy"], "--check")
    assert code == 0 and error == ""
    result = run_preflight(load(folders["easy"], "auto", torch.device("cpu"))[0])
    for layer in result.layers:
        assert f"│ {layer.layer_idx} │ {layer.name} │ 0.00 │" in output
    assert output.endswith(f"Use it with: hf_kvquant.patch(model, {result.spelled()})")
    code, output, error = run(capsys, folders["easy"], "--check", "--bits", "4")
    assert code == 0 and error == ""
    result = run_preflight(load(folders["easy"], "auto", torch.device("cpu"))[0], bits=4)
    assert f"take {result.bits:.4g} bits per number on average, of 4 allowed." in output
    assert output.endswith(f"Use it with: hf_kvquant.patch(model, {result.spelled()})")
    file = tmp_path / "text.txt"
    file.write_text(text(), encoding="utf-8")
    code, output, error = run(capsys, folders["easy"], "--check", "--preset", "int8", "--text-file", str(file))
    assert code == 0 and error == ""
    assert "tokens of the texts." in output and output.endswith("hf_kvquant.patch(model, 'int8')")


def test_the_command_refuses(folders: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (folders["biased"], "--check", "--preset", "fp8")
    code, output, error = run(capsys, *arguments)
    assert code == 1 and error.count("\n") == 1
    assert error.startswith("hf-kvquant: refused: calibrate: `preset_or_config` must keep the KL divergence of layer ")
    assert error.endswith(" --force accepts it anyway.\n")
    assert "│ 0 │ fp8 │ 1" in output and "Use it with" not in output
    code, output, error = run(capsys, *arguments, "--force")
    assert code == 0 and error == ""
    assert "Not safe: run_preflight: " in output and output.endswith("hf_kvquant.patch(model, 'fp8')")
    code, output, error = run(capsys, *arguments[:2], "--preset", "int4-token", "--weights-only")
    assert code == 0 and "Divergences were not measured" in output


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--check", "--output", "new"], "`--output` must be left out with --check, got new. Nothing is saved"),
        (["--force"], "`--force` must come with --check, got it alone. Add --check."),
        (["--weights-only"], "`--weights-only` must come with --check, got it alone. Add --check."),
        (["--bits", "4"], "`--bits` must come with --check, got it alone. Add --check."),
        (
            ["--check", "--bits", "4", "--preset", "int4-token"],
            "`--bits` must come without --preset, got both. Leave out ",
        ),
        (["--check", "--bits", "4", "--weights-only"], "`--bits` must come without --weights-only, got both. Leave "),
        (["--check", "--bits", "0"], "FOLDER cannot be checked. run_preflight: `bits` must be positive and finite, "),
        (["--check", "--rotate-values"], "`--rotate-values` must come without --check, which calibrates nothing"),
        (["--check", "--no-factors"], "`--no-factors` must come without --check, which calibrates nothing, got both."),
        (["--check", "--mode", "fold"], "`--mode` must come without --check, which calibrates nothing, got both."),
        (["--check", "--tokens", "512"], "`--tokens` must come without --check, which calibrates nothing, got both."),
        (
            ["--check", "--weights-only", "--text-file", "TEXT"],
            "`--text-file` must come without --weights-only, which reads no text, got both. Leave out one.",
        ),
        (["--check", "--preset", "int9"], "`--preset` must be one of none, int8"),
        (
            ["--text-file", "TEXT"],
            "`--output` must be given, got none. Name a new folder, or add --check to look only.",
        ),
        (["--check", "--text-file", "TEXT"], "FOLDER cannot be checked. run_preflight: `texts` must have at least 512"),
    ],
)
def test_mistakes_of_the_command(
    folders: dict[str, str], arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("short", encoding="utf-8")
    places = {"TEXT": str(tmp_path / "text.txt")}
    code, output, error = run(capsys, folders["easy"], *[places.get(word, word) for word in arguments])
    assert code == 2 and output == "" and error.count("\n") == 1
    assert error.startswith(f"hf-kvquant: error: calibrate: {message.replace('FOLDER', folders['easy'])}")
