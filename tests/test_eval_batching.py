"""`eval tasks --batching`: the scores and texts of the present path, over pages of codes that are counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import pytest
import torch

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from test_eval_tasks import CONTEXT, FLOAT_NOISE, differences, requests, text, tokenizer

from hf_kvquant import KVQuantConfig, cli
from hf_kvquant.patching import patched
from hf_kvquant.upstream.releases import HAS_PAGES
from hf_kvquant_evals.errors import CannotScore, NothingRead
from hf_kvquant_evals.tasks import pages
from hf_kvquant_evals.tasks.lm_eval_model import KVQuantLM

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # lm-eval says so of every model that is handed to it
    pytest.mark.skipif(not HAS_PAGES, reason="transformers' paged cache has another design"),
]


def scored(family: str, preset: str, some: list[Any], **options: Any) -> list[tuple[float, bool]]:
    model = models.family(family)
    with patched(model, "none"):
        lm = KVQuantLM(model, preset, tokenizer=tokenizer(), **options)
        found = lm._loglikelihood_tokens(some, disable_tqdm=True)
        assert lm.pairs_read == lm.pairs_expected
        assert (lm.pairs_expected > 0) == (preset != "none")
        lm.close()
        model(torch.tensor([[3, 4]]))  # has its attention again
    return found


def check_equal(found: list[tuple[float, bool]], expected: list[tuple[float, bool]], preset: str) -> None:
    difference = differences(found, expected)
    if preset == "none":
        assert difference.max() < FLOAT_NOISE
        assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    # Sums in another order flip some codes.
    assert (difference < FLOAT_NOISE).float().mean() > 0.6
    assert difference.mean() < 0.02


@pytest.mark.parametrize("preset", ["none", "int8", "k8v4", "int4", "int4-token", "int4-channel", "fp8"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_scores_are_those_without(family: str, preset: str) -> None:
    """gemma2 has sliding windows, qwen2 centres its keys."""
    expected = scored(family, preset, requests(), batch_size=4)
    check_equal(scored(family, preset, requests(), batch_size=4, batching=True), expected, preset)


@pytest.mark.parametrize("preset", ["none", "int8", "int4", "int4-token", "int4-channel"])
@pytest.mark.parametrize("batch_size", [1, 8])
def test_rows_that_cross_pages(preset: str, batch_size: int) -> None:
    """First chunks that end with a page, before and after it; shared ones; more tokens than a forward has."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(129, 3), (130, 9), (128, 1), (100, 60), (20, 150), (5, 130), (1, 140), (1, 1), (300, 2)]
    some = [(None, *(torch.randint(2, 90, (size,), generator=generator).tolist() for size in pair)) for pair in sizes]
    some += [(None, context, [*continuation, 7, 8]) for _, context, continuation in some]
    model = models.llama(max_position_embeddings=512)
    found = []
    for batching in (False, True):
        with patched(model, "none"):
            lm = KVQuantLM(
                model, preset, tokenizer=tokenizer(), batch_size=batch_size, batching=batching, max_length=400
            )
            found.append(lm._loglikelihood_tokens(some, disable_tqdm=True))
            assert lm.pairs_read == lm.pairs_expected
            lm.close()
    difference, effect = differences(*found), 0.05 * abs(sum(value for value, _ in found[0])) / len(some)
    assert difference.max() < (5 * FLOAT_NOISE if preset == "none" else effect)


def test_rolling_texts() -> None:
    long = text(3, 60)
    rolling = [Instance("loglikelihood_rolling", {}, (long,), 0)]
    model = models.family("llama")
    found = []
    for batching in (False, True):
        with patched(model, "none"):
            lm = KVQuantLM(model, "int8", batch_size=2, tokenizer=tokenizer(), batching=batching)
            found += lm.loglikelihood_rolling(rolling, disable_tqdm=True)
            assert lm.pairs_read == lm.pairs_expected > 0
            lm.close()
    assert found[1] == pytest.approx(found[0], abs=0.02)


def test_shared_contexts_are_fed_once() -> None:
    tokens: list[int] = []
    model = models.family("llama")
    with patched(model, "none"):
        lm = KVQuantLM(model, "int4-token", batch_size=8, tokenizer=tokenizer(), batching=True)
        lm._loglikelihood_tokens([(None, [3, 4], [5])], disable_tqdm=True)  # looks at the model first
        hook = model.register_forward_pre_hook(
            lambda module, args, kwargs: tokens.append(kwargs["input_ids"].numel()), with_kwargs=True
        )
        context = [3, 4, 5, 6, 7, 8]
        some = [(None, context, ending) for ending in ([9], [10], [9, 10], [11, 12, 13])]
        lm._loglikelihood_tokens(some, disable_tqdm=True)
        hook.remove()
        lm.close()
    assert tokens == [5, 1 + 2 + 3]  # the last of the context, then of the endings what is not last


def prompts(count: int) -> list[Any]:
    options = {"until": ["e", " q"], "max_gen_toks": 24}
    return [Instance("generate_until", {}, (text(n, 2 + n % 5), options), n) for n in range(count)]


@pytest.mark.parametrize("preset", ["none", "int8", "int4-channel"])
def test_texts_are_those_without(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """... with more prompts than a forward has tokens for.

    Without batching one text at a time: in a batch, lm-eval keeps what a text says after its end token, as long as
    others go on.
    """
    monkeypatch.setattr("hf_kvquant_evals.tasks.paged_generation.LEAST_TOKENS", 64)
    model = models.family("llama")
    found = []
    for batching in (False, True):
        with patched(model, "none"):
            size = 4 if batching else 1
            lm = KVQuantLM(model, preset, batch_size=size, tokenizer=tokenizer(), batching=batching)
            found.append(lm.generate_until(prompts(12), disable_tqdm=True))
            assert (lm.pairs_read > 0) == (preset != "none")
            lm.close()
    assert len({len(answer) for answer in found[0]}) > 2  # stopped at unequal lengths
    assert sum(one == other for one, other in zip(*found, strict=True)) >= (12 if preset == "none" else 10)


def test_what_is_not_read_as_codes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        pages.CountedOperands, "decode", lambda self, *args, **options: self._operands.decode(*args, **options)
    )
    model = models.family("llama")
    with patched(model, "none"):
        lm = KVQuantLM(model, "int8", tokenizer=tokenizer(), batching=True)
        with pytest.raises(NothingRead, match=r"must read \d+ .* pairs from codes, got 0\."):
            lm._loglikelihood_tokens([(None, [3, 4, 5], [6, 7])], disable_tqdm=True)
        with pytest.raises(NothingRead, match="must have been decoded from codes, got 0 tokens read"):
            lm.generate_until(prompts(1), disable_tqdm=True)


@pytest.mark.parametrize(
    "options, told",
    [
        ({"do_sample": True, "temperature": 0.5}, "must be greedy and shorter than 128 tokens, got .'do_sample': True"),
        ({"num_beams": 2}, "got .'num_beams': 2"),
        ({"max_gen_toks": CONTEXT}, f"got .'max_gen_toks': {CONTEXT}"),
    ],
)
def test_texts_that_are_not_batched(options: dict[str, Any], told: str) -> None:
    some = [Instance("generate_until", {}, ("a king", {"until": ["~"], "max_gen_toks": 5, **options}), 0)]
    model = models.family("llama")
    with patched(model, "none"):
        lm = KVQuantLM(model, "int8", tokenizer=tokenizer(), batching=True)
        with pytest.raises(CannotScore, match=told):
            lm.generate_until(some, disable_tqdm=True)


def test_arguments_that_do_not_go_together() -> None:
    model = models.family("llama")
    with pytest.raises(ValueError, match="`mode` must be 'decode' with batching, got 'simulated'"):
        KVQuantLM(model, "int8", "simulated", tokenizer=tokenizer(), batching=True)
    with pytest.raises(ValueError, match="`mixed_precision_dtype` must be None with batching"):
        KVQuantLM(model, "int8", tokenizer=tokenizer(), batching=True, mixed_precision_dtype="bfloat16")


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path: Path) -> Path:
    lines = [{"query": text(n, 4), "choices": [text(n + 1, 2), text(n + 2, 1)], "gold": n % 2} for n in range(6)]
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "piqa.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return folder


def evaluated(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = cli.main(["eval", "tasks", *arguments])
    return code, capsys.readouterr().err


def test_the_command_scores_alike(data: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = models.save_llama(tmp_path / "model", CONTEXT, bos_token="!", eos_token="~")
    arguments = [folder, "--data", str(data), "--device", "cpu", "--preset", "int4-token", "--output"]
    files = [tmp_path / "without.json", tmp_path / "with.json"]
    for file, more in zip(files, ([], ["--batching"]), strict=True):
        code, error = evaluated(capsys, *arguments, str(file), *more)
        assert code == 0, error
    one, other = (json.loads(file.read_text(encoding="utf-8")) for file in files)
    assert "batching" not in one["settings"] and other["settings"]["batching"] is True
    for name, part in one["parts"].items():
        found = other["parts"][name]
        assert found["metrics"] == part["metrics"] and found["items"]["answer"] == part["items"]["answer"]
        golds = (torch.tensor(each["items"]["gold_log_likelihood"]) for each in (part, found))
        assert torch.stack([*golds]).diff(dim=0).abs().max() < (FLOAT_NOISE if name.endswith("none") else 0.1)
        assert found["pairs_read"] == found["pairs_expected"]
    code, error = evaluated(capsys, *arguments, str(files[0]), "--batching")
    assert code == 2 and "`batching` was null and is true" in error


def test_what_pages_do_not_serve_is_refused(data: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = models.save_llama(tmp_path / "llama", CONTEXT, bos_token="!", eos_token="~")
    bloom = models.save(models.build("bloom"), tmp_path / "bloom", bos_token="!", eos_token="~")
    for arguments, told in (
        ([folder, "--mode", "simulated"], "`--batching` must come with --mode decode, got simulated."),
        ([bloom], "`--batching` must come with what pages serve, got none. init_continuous_batching: BloomForCausalLM"),
    ):
        code, error = evaluated(capsys, *arguments, "--batching", "--data", str(data), "--device", "cpu")
        assert code == 2 and told in error


def test_a_check_leaves_the_model_as_it_was() -> None:
    model = models.family("llama")
    before = model.config._attn_implementation
    pages.check_batched(model, KVQuantConfig.from_preset("int8"))
    assert model.config._attn_implementation == before
