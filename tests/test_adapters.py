"""Adapters of peft on patched, captured and calibrated models: the result of an unpatched model, or an error.

A CPU has no CUDA graphs; `test_capture.Recorded` takes their place, which repeats what a step did when it was recorded.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import compare
import models
import pytest
import torch
from models import left_padded
from test_capture import Recorded
from test_compile import compiled_for
from test_smoothing import assert_weights, smooth, snapshot
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.integrations import peft as transformers_peft
from waiting import next_result

import hf_kvquant
from hf_kvquant import KVQuantCache, load_smoothing, patch, patched, rotate_values, unpatch, unrotate_values, unsmooth
from hf_kvquant.graphs import capture
from hf_kvquant.models.hashes import weights_hash
from hf_kvquant.upstream.releases import HAS_PAGES, with_cache
from hf_kvquant_evals.injection import inject_key_outliers

peft = pytest.importorskip("peft")
# It warns of merged adapters, and uses what transformers is about to rename.
pytestmark = pytest.mark.filterwarnings("ignore")

NEW_TOKENS = 9
TARGETS = ["q_proj", "k_proj", "v_proj", "down_proj"]
CONFIGS: dict[str, dict[str, Any]] = {
    "growing": {"preset": "none"},
    "static": {"preset": "none", "static": True},
    "captured": {"preset": "none", "capture": True},
}


@pytest.fixture(autouse=True)
def runners(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What takes the place of a CUDA graph on a CPU."""
    monkeypatch.setitem(capture.RUNNERS, "cpu", Recorded)
    Recorded.made = 0
    yield


def build() -> Any:
    return copy.deepcopy(models.llama())


def lora(**options: Any) -> Any:
    return peft.LoraConfig(**{"r": 2, "target_modules": TARGETS, **options})


def adapted(model: Any, *names: str, **options: Any) -> Any:
    """A model with an adapter of each name, whose weights are the same in every call; the first one is active."""
    wrapped = peft.get_peft_model(model, lora(**options), adapter_name=names[0])
    for name in names[1:]:
        wrapped.add_adapter(name, lora(**options))
    fill(model)
    return wrapped.eval()


def fill(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


def tokens_of(model: Any, **options: Any) -> Tensor:
    defaults: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    tokens: Tensor = model.generate(**left_padded(), **{**defaults, **options})
    return tokens


def blend(wrapped: Any) -> None:
    wrapped.add_weighted_adapter(["one", "two"], [0.3, 0.7], "both", combination_type="linear")
    wrapped.set_adapter("both")


def scale(wrapped: Any) -> None:
    for module in wrapped.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("one", 3.0)


# What a user may do with adapters, one after the other.
STEPS: dict[str, Callable[[Any], Any]] = {
    "load": lambda wrapped: None,
    "switch": lambda wrapped: wrapped.set_adapter("two"),
    "switch back": lambda wrapped: wrapped.set_adapter("one"),
    "scale": scale,
    "disable": lambda wrapped: wrapped.base_model.disable_adapter_layers(),
    "enable": lambda wrapped: wrapped.base_model.enable_adapter_layers(),
    "blend": blend,
    "merge": lambda wrapped: wrapped.merge_adapter(),
    "unmerge": lambda wrapped: wrapped.unmerge_adapter(),
    "delete": lambda wrapped: wrapped.delete_adapter("two"),
    "merge and unload": lambda wrapped: wrapped.merge_and_unload(),
}


# --- tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS)
def test_adapters_around_a_patched_model(config: str) -> None:
    model, unpatched = build(), build()
    options = {} if config == "captured" else {"disable_compile": True}
    patch(model, CONFIGS[config])
    compare.assert_same(tokens_of(model, **options), tokens_of(unpatched), "before")
    wrapped, other = adapted(model, "one", "two"), adapted(unpatched, "one", "two")
    seen = []
    for name, step in STEPS.items():
        step(wrapped)
        step(other)
        expected = tokens_of(unpatched)
        for _ in range(2):
            compare.assert_same(tokens_of(model, **options), expected, name)
        seen.append(expected)
    assert len({tuple(tokens.flatten().tolist()) for tokens in seen}) > 4  # adapters do something
    unpatch(model)
    compare.assert_same(tokens_of(model), expected, "unpatched")


def test_graphs_of_adapters_are_found_again() -> None:
    model = build()
    wrapped = adapted(model, "one", "two")
    patch(model, CONFIGS["captured"])
    for name in ("one", "two", "one", "two"):
        wrapped.set_adapter(name)
        tokens_of(model)
    assert Recorded.made == 2


def test_hooks_are_noticed() -> None:
    model = build()
    patch(model, CONFIGS["captured"])
    before = tokens_of(model)
    hook = model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: -output)
    changed = tokens_of(model)
    assert not torch.equal(changed, before)
    hook.remove()
    compare.assert_same(tokens_of(model), before, "tokens")
    unpatch(model)
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: -output)
    compare.assert_same(tokens_of(model), changed, "tokens")


@pytest.mark.skipif(not HAS_PAGES, reason="transformers' paged cache has another design")
@pytest.mark.parametrize("is_kept", [False, True], ids=["running", "kept"])
def test_batches_share_no_pages_of_other_adapters(is_kept: bool) -> None:
    """In a manager that runs all the time, and in one that is kept between calls."""
    model = copy.deepcopy(models.llama(max_position_embeddings=1024))
    unpatched = copy.deepcopy(model)
    prompt = torch.randint(3, models.VOCAB_SIZE, (150,), generator=torch.Generator().manual_seed(0))
    config = GenerationConfig(do_sample=False, max_new_tokens=NEW_TOKENS)
    batching = ContinuousBatchingConfig(num_blocks=8, page_size=128, max_batch_tokens=512)
    patch(model, "none")
    wrapped, other = adapted(model, "one", "two"), adapted(unpatched, "one", "two")
    with contextlib.ExitStack() as stack:
        if not is_kept:
            manager = stack.enter_context(model.continuous_batching_context_manager(config, True, None, batching))
        seen = []
        for name, step in STEPS.items():
            step(wrapped)
            step(other)
            expected = unpatched.generate(prompt[None], generation_config=config)[0, len(prompt) :].tolist()
            for _ in range(2):
                if is_kept:
                    options = {"continuous_batching_config": batching, "persistent_manager": True}
                    (found,) = model.generate_batch([prompt.tolist()], config, **options).values()
                else:
                    manager.add_request(prompt.tolist())
                    found = next_result(manager)
                assert found.generated_tokens == expected, name
            seen.append(tuple(expected))
    assert len(set(seen)) > 4
    unpatch(model)


def test_compiled_steps_follow_the_adapter() -> None:
    torch._dynamo.reset()
    model, unpatched = build(), build()
    wrapped, other = adapted(model, "one", "two"), adapted(unpatched, "one", "two")
    with patched(model, {"preset": "none", "max_cache_len": 32}):
        for name in ("one", "two", "one"):
            wrapped.set_adapter(name)
            other.set_adapter(name)
            compare.assert_same(tokens_of(model, **compiled_for("eager")), tokens_of(unpatched), name)
    torch._dynamo.reset()


@pytest.mark.parametrize("config", CONFIGS)
def test_the_wrapper_generates(config: str) -> None:
    wrapped = adapted(build(), "one", "two")
    expected = tokens_of(wrapped)
    rows = len(expected)
    mixed = {"adapter_names": ["one", "two", "__base__"][:rows]}
    several = tokens_of(wrapped, **mixed)
    options = {} if config == "captured" else {"disable_compile": True}
    patch(wrapped.get_base_model(), CONFIGS[config])
    compare.assert_same(tokens_of(wrapped, **options), expected, "one adapter")
    compare.assert_same(tokens_of(wrapped, **mixed, **options), several, "an adapter a row")
    compare.assert_same(tokens_of(wrapped, **options), expected, "one adapter again")


def test_adapters_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers 5.24 asks for peft 0.22, which was not released with it. What is tested here works with 0.21.
    monkeypatch.setattr(transformers_peft, "check_peft_version", lambda **_: None)
    model, unpatched = build(), build()
    patch(model, CONFIGS["captured"])
    tokens_of(model)
    for each in (model, unpatched):
        each.add_adapter(lora(), adapter_name="one")
        each.add_adapter(lora(), adapter_name="two")
        fill(each)
        each.eval()
    for change in (
        lambda each: each.set_adapter("one"),
        lambda each: each.set_adapter("two"),
        lambda each: each.disable_adapters(),
        lambda each: each.enable_adapters(),
    ):
        change(model)
        change(unpatched)
        compare.assert_same(tokens_of(model), tokens_of(unpatched), "tokens")


@pytest.mark.parametrize("function", [patch, hf_kvquant.report, rotate_values, smooth], ids=lambda each: each.__name__)
def test_the_wrapper_itself_is_refused(function: Callable[..., Any]) -> None:
    wrapped = adapted(build(), "one")
    with pytest.raises(TypeError, match=r"got PeftModel\. Pass model\.get_base_model\(\), which has the adapters"):
        function(wrapped)


# --- weights that were changed ----------------------------------------------------------------------------------------


def with_outliers() -> Any:
    model = build()
    inject_key_outliers(model)
    return model


@pytest.mark.full(
    when=lambda target, when: (target == "k_proj") != (when == "patch"),
    reason="both calls look at the same list of modules",
)
@pytest.mark.parametrize("when", ["patch", "generate"])
@pytest.mark.parametrize("target", ["k_proj", "q_proj"])
def test_adapters_on_folded_weights_are_refused(target: str, when: str) -> None:
    model = with_outliers()
    weights = snapshot(model)
    expected = tokens_of(adapted(copy.deepcopy(model), "one", target_modules=[target]))
    assert smooth(model, mode="auto").factors_in("weights")
    if when == "generate":
        patch(model, "none")
        tokens_of(model)
    wrapped = adapted(model, "one", target_modules=[target])
    message = (
        rf"{when}: `model` must not have adapters on weights that smooth_attention has changed, got one at .*{target}"
    )
    with pytest.raises(ValueError, match=message):
        patch(model, "int4-token") if when == "patch" else tokens_of(model)
    unsmooth(model)  # what the message says
    patch(model, "none")
    compare.assert_same(tokens_of(model), expected, "tokens")
    result = smooth(model, mode="auto")
    assert {layer.placement for layer in result.layers} == {"caches"} and result.num_smoothed > 0
    compare.assert_same(tokens_of(model), expected, "tokens")
    unpatch(unsmooth(model))
    wrapped.unload()
    assert_weights(model, weights)


def test_adapters_on_rotated_weights_are_refused() -> None:
    model = build()
    expected = tokens_of(adapted(build(), "one", target_modules=["v_proj"]))
    rotate_values(model)
    adapted(model, "one", target_modules=["v_proj"])
    message = (
        r"must not have adapters on weights that rotate_values has changed, got one at .*v_proj\. Call hf_kvquant\.un"
    )
    with pytest.raises(ValueError, match=message):
        patch(model, "int4-token")
    patch(unrotate_values(model), "none")
    compare.assert_same(tokens_of(model), expected, "tokens")


@pytest.mark.parametrize("change", [smooth, rotate_values], ids=["smooth_attention", "rotate_values"])
def test_adapters_merged_into_changed_weights_are_refused(
    change: Callable[..., Any], request: pytest.FixtureRequest
) -> None:
    model = with_outliers()
    change(model)
    patch(model, "none")
    tokens_of(model)
    adapted(model, "one").merge_and_unload()
    message = rf"must have the weights that {request.node.callspec.id} left, got others at .*_proj\. If an adapter"
    with pytest.raises(ValueError, match=f"generate: `model` {message}"):
        tokens_of(model)
    with pytest.raises(ValueError, match=f"patch: `model` {message}"):
        patch(model, "int8")


def test_changed_weights_may_be_changed_again_and_cast() -> None:
    model = models.build("phi3")  # whose projections of queries, keys and values are one
    inject_key_outliers(model)
    with patched(model, "int8"):
        for change in (smooth, rotate_values, unrotate_values):
            change(model)
            tokens_of(model)
        model.bfloat16()
        tokens_of(model)


def test_adapters_elsewhere_do_not_matter() -> None:
    model = with_outliers()
    expected = tokens_of(adapted(copy.deepcopy(model), "one", target_modules=["v_proj", "up_proj"]))
    smooth(model)
    adapted(model, "one", target_modules=["v_proj", "up_proj"])
    with patched(model, "none"):
        compare.assert_same(tokens_of(model), expected, "tokens")


def test_adapters_of_a_smoothed_checkpoint(tmp_path: Path) -> None:
    model = with_outliers()
    smooth(model).save(tmp_path / "factors")
    model.save_pretrained(tmp_path / "model")
    loaded = type(model).from_pretrained(tmp_path / "model")
    load_smoothing(loaded, tmp_path / "factors")
    adapted(loaded, "one")
    expected = tokens_of(loaded)
    with patched(loaded, "none"):
        compare.assert_same(tokens_of(loaded), expected, "tokens")


def test_calibrated_caches_serve_every_adapter(caplog: pytest.LogCaptureFixture) -> None:
    model = with_outliers()
    wrapped = adapted(model, "one", "two")
    with caplog.at_level(logging.WARNING, "hf_kvquant"):
        result = smooth(model, mode="auto")
    assert {layer.placement for layer in result.layers} == {"caches"} and result.num_smoothed > 0
    assert "must have no adapters on keys and queries" in caplog.text
    for name in ("one", "two"):
        wrapped.set_adapter(name)
        models.check_against_reference(model, "int4-token", left_padded())


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_saved_cache_is_of_one_adapter(tmp_path: Path) -> None:
    model = build()
    plain = weights_hash(model)
    wrapped = adapted(model, "one", "two")
    cache = KVQuantCache(model.config, "int8")
    with patched(model, "int8"):
        tokens_of(model, **with_cache(cache))
    cache.save(tmp_path / "cache", model)
    KVQuantCache.load(tmp_path / "cache", model)
    wrapped.set_adapter("two")
    with pytest.raises(ValueError, match="its weights differ"):
        KVQuantCache.load(tmp_path / "cache", model)
    wrapped.set_adapter("one")
    KVQuantCache.load(tmp_path / "cache", model)
    assert plain == weights_hash(wrapped.unload())
