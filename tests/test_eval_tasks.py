"""`hf-kvquant eval tasks`: log-likelihoods that read codes, whatever the batch; the command; its errors."""

from __future__ import annotations

import functools
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import yaml
from programs import Program, finish, ranks

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from hf_kvquant import KVQuantCache, KVQuantConfig, cli, report
from hf_kvquant.jobs.processes import tell_one_process
from hf_kvquant.patching import patched
from hf_kvquant.upstream.releases import CACHE
from hf_kvquant_evals.errors import NothingRead
from hf_kvquant_evals.measuring.fidelity import Chunks, feed
from hf_kvquant_evals.measuring.steps import read_as_single_steps
from hf_kvquant_evals.tasks import data as task_files
from hf_kvquant_evals.tasks import lm_eval_model
from hf_kvquant_evals.tasks import task_run as tasks
from hf_kvquant_evals.tasks.data import MODES
from hf_kvquant_evals.tasks.lm_eval_model import KVQuantLM

# lm-eval says so of every model that is handed to it, and its dependencies of each other.
pytestmark = [pytest.mark.filterwarnings("ignore")]

PRESETS = ("none", "int4-token")
WORDS = "once upon a time there was some old king who had three sons and no crown".split()
CONTEXT = 128
# Sums in another order move keys by an ulp or so, which now and then rounds to another code.
FLOAT_NOISE = 1e-4
# Of what quantising changes, the share that such codes may change.
FLIP_SHARE = 1 / 3


def text(seed: int, num_words: int) -> str:
    """Words by a seed."""
    generator = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[int(i)] for i in torch.randint(len(WORDS), (num_words,), generator=generator))


def tokenizer() -> Any:
    return models.tokenizer(model_max_length=CONTEXT, bos_token="!", eos_token="~")


def items() -> dict[str, list[dict[str, Any]]]:
    """A few items of every task."""
    found: dict[str, list[dict[str, Any]]] = {}
    for task, name in enumerate(task_files.offline_names()):
        seeds = range(100 * task, 100 * task + 30, 6)
        if name == "winogrande":
            found[name] = [
                {"context_options": [text(s, 2), text(s + 1, 4)], "continuation": text(s + 2, 3), "gold": s % 2}
                for s in seeds
            ]
        elif name == "lambada_openai":
            found[name] = [{"context": text(s, 5), "continuation": WORDS[s % 7]} for s in seeds]
        elif name == "wikitext":
            found[name] = [{"page": f" = a = \n {text(s, 9 + s % 5)} , {text(s + 1, 3)} . \n"} for s in seeds]
        else:
            found[name] = [
                {"query": text(s, 1 + s % 5), "choices": [text(s + 1, 2), text(s + 2, 1), "a"], "gold": s % 3}
                for s in seeds
            ]
    return found


def requests() -> list[tuple[tuple[str, str], list[int], list[int]]]:
    """Pairs of tokens: contexts of one token and of many, shared ones, continuations that differ in the last token."""
    encode = tokenizer().encode
    pairs = []
    for seed in range(8):
        context = encode(text(seed, 1 + seed))
        pairs += [(context, encode(" " + text(100 + 3 * seed + choice, 1 + choice))) for choice in range(3)]
        pairs += [(context, [5]), (context, [6])]
    pairs.append(([1], encode("a time")))
    return [(("", ""), context, continuation) for context, continuation in pairs]


def score(lm: HFLM) -> list[tuple[float, bool]]:
    return lm._loglikelihood_tokens(requests(), disable_tqdm=True)


@functools.cache
def scores(preset: str, mode: str = "decode", batch_size: int = 1, family: str = "llama") -> list[tuple[float, bool]]:
    with patched(models.family(family), "none"):
        lm = KVQuantLM(models.family(family), preset, mode, batch_size=batch_size, tokenizer=tokenizer())
        result = score(lm)
        assert lm.pairs_read + lm.pairs_dequantized == lm.pairs_expected
        assert (lm.pairs_expected > 0) == (preset != "none")
    return result


def differences(one: list[tuple[float, bool]], other: list[tuple[float, bool]]) -> torch.Tensor:
    return torch.tensor([abs(a[0] - b[0]) for a, b in zip(one, other, strict=True)])


# --- log-likelihoods --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_unquantised_scores_are_those_of_lm_eval(mode: str) -> None:
    expected = score(HFLM(models.family("llama"), tokenizer=tokenizer(), batch_size=4))
    found = scores("none", mode, 4)
    assert differences(found, expected).max() < FLOAT_NOISE
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("preset", ["none", "int8", "int4-token", "int4-channel", "fp8"])
def test_batch_size_and_padding_do_not_change_scores(preset: str, mode: str) -> None:
    one, eight = scores(preset, mode, 1), scores(preset, mode, 8)
    difference = differences(one, eight)
    if preset == "none":
        assert difference.max() < FLOAT_NOISE
    # Had padding any influence, nearly every row of a batch would differ; what a code flips is far from what codes do.
    effect = differences(one, scores("none", mode, 1))
    assert (difference < FLOAT_NOISE).float().mean() > 0.6
    assert difference.mean() < max(FLOAT_NOISE, 0.05 * float(effect.mean()))
    assert [greedy for _, greedy in one] == [greedy for _, greedy in eight]


@pytest.mark.parametrize("options", [{"sink_length": 2}, {"residual_length": 3}])
def test_dense_windows_do_not_depend_on_the_batch(options: dict[str, int]) -> None:
    config = KVQuantConfig.from_preset("int4-token", **options)
    one, eight = (scores.__wrapped__(config, batch_size=size) for size in (1, 8))
    assert (differences(one, eight) < FLOAT_NOISE).float().mean() > 0.6


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sink_length", [0, 2])
def test_padding_changes_nothing_around_a_block(sink_length: int, mode: str) -> None:
    """Keys in blocks of 128 tokens: rows that fill one, rows that do not, and rows that would if padded like others."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(120, 3), (119, 9), (118, 10), (118, 11), (100, 2), (90, 38), (20, 107), (20, 3), (5, 130), (1, 4)]
    some = [(None, *(torch.randint(2, 96, (size,), generator=generator).tolist() for size in pair)) for pair in sizes]
    model = models.family("llama")
    with patched(model, "none"):
        found = {}
        for preset, batch_size in (("none", 1), ("int4-channel", 1), ("int4-channel", 8)):
            windows = {} if preset == "none" else {"sink_length": sink_length}
            config = KVQuantConfig.from_preset(preset, **windows)
            lm = KVQuantLM(model, config, mode, batch_size=batch_size, tokenizer=tokenizer(), max_length=200)
            found[preset, batch_size] = lm._loglikelihood_tokens(some, disable_tqdm=True)
            assert lm.pairs_read == lm.pairs_expected
    one, eight = found["int4-channel", 1], found["int4-channel", 8]
    assert (differences(one, eight) < FLOAT_NOISE).float().mean() > 0.6
    assert differences(one, eight).mean() < 0.05 * differences(one, found["none", 1]).mean()


@pytest.mark.parametrize("preset", ["int8", "int4-token"])
def test_decode_scores_are_those_of_the_cache(preset: str) -> None:
    model = models.family("llama")
    expected = []
    with patched(model, preset):
        for _, context, continuation in requests():
            n0 = max(1, len(context) - 1)
            ids = torch.tensor([context + continuation])
            if n0 == ids.shape[1] - 1:  # nothing to read: one token after one
                expected.append(float(model(ids[:, :-1]).logits[0, -1].log_softmax(-1)[continuation[-1]]))
                continue
            cache = KVQuantCache(model.config, preset)
            read_as_single_steps(cache)
            pieces = feed(model, ids[:, :-1], cache, Chunks(n0, CONTEXT))
            log_probs = torch.cat(list(pieces), dim=1)[0, -len(continuation) :]
            expected.append(float(log_probs.gather(1, torch.tensor(continuation)[:, None]).sum()))
    found = torch.tensor([value for value, _ in scores(preset)])
    assert ((found - torch.tensor(expected)).abs() < FLOAT_NOISE).float().mean() > 0.6
    assert (found - torch.tensor(expected)).abs().mean() < 0.01


WINDOWED = KVQuantConfig.from_preset("int4-token", sink_length=2, residual_length=3)


@pytest.mark.parametrize("config", ["int8", "int4-token", "int4-g32", "int4-channel", "fp8", WINDOWED], ids=str)
@pytest.mark.parametrize("batch_size", [1, 8])
def test_modes_are_the_same_function(config: str | KVQuantConfig, batch_size: int, family: str = "llama") -> None:
    """Item by item: sums in another order flip codes, which is far from what codes do."""
    dense, decoded, simulated = (
        scores.__wrapped__(*how, batch_size, family)
        for how in (("none", "decode"), (config, "decode"), (config, "simulated"))
    )
    between, effect = differences(decoded, simulated), differences(decoded, dense)
    assert (between < FLOAT_NOISE).float().mean() > 0.6
    assert FLOAT_NOISE < effect.mean()
    assert between.mean() <= FLIP_SHARE * effect.mean()


def test_modes_are_exact_where_nothing_is_quantised() -> None:
    assert differences(scores("none"), scores("none", "simulated")).max() < FLOAT_NOISE


def rows_of_forwards(preset: str | KVQuantConfig, some: list[Any]) -> list[int]:
    """Rows of each forward that scores."""
    rows: list[int] = []
    model = models.family("llama")
    with patched(model, "none"):
        lm = KVQuantLM(model, preset, batch_size=8, tokenizer=tokenizer())
        hook = model.register_forward_pre_hook(
            lambda module, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
        )
        lm._loglikelihood_tokens(some, disable_tqdm=True)
        hook.remove()
    return rows


def test_what_differs_in_its_last_token_is_fed_once() -> None:
    some = [(None, [3, 4, 5], last) for last in ([6], [7], [6, 7])]
    codes_alone = KVQuantConfig.from_preset("int8", sink_length=0, residual_length=0)
    assert rows_of_forwards(codes_alone, some) == [1, 2]  # one context, then "" and "6" behind it


def test_below_a_block_channels_take_as_few_forwards_as_others() -> None:
    assert rows_of_forwards("int4-channel", requests()) == rows_of_forwards("int4-token", requests())


@pytest.mark.parametrize("family", ["xglm", "bloom", "gemma2", "qwen3_next"])
def test_other_families(family: str) -> None:
    assert differences(scores("none", "decode", 8, family), scores("none", "decode", 1, family)).max() < 1e-3


@pytest.mark.parametrize("family", ["bloom", "falcon", "mpt"])
def test_models_that_compute_attention_by_themselves_are_simulated(family: str) -> None:
    test_modes_are_the_same_function("int8", 8, family)


def test_where_no_kernel_serves() -> None:
    """Scores are those of the formats all the same, and what came so is counted apart."""
    assert 0 < differences(scores("int8", "decode", 1, "xglm"), scores("none", "decode", 1, "xglm")).mean() < 0.5
    with pytest.raises(NotImplementedError, match=r"simulate: .* computes attention by itself"):
        scores("int8", "simulated", 8, "xglm")
    until = [Instance("generate_until", {}, (text(2, 5), {"until": ["~"], "max_gen_toks": 9}), 0)]
    model = models.family("xglm")
    with patched(model, "none"):
        lm = KVQuantLM(model, "int8", batch_size=2, tokenizer=tokenizer())
        lm._loglikelihood_tokens(requests(), disable_tqdm=True)
        assert lm.pairs_read == 0 < lm.pairs_expected == lm.pairs_dequantized
        assert all(lm.generate_until(until, disable_tqdm=True))
        assert lm.pairs_read == 0 and lm.pairs_dequantized > lm.pairs_expected


def test_whether_a_model_can_be_simulated_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(lm_eval_model, "why_not_simulated", asked.append)
    model = models.family("llama")
    with patched(model, "none"):
        lm = KVQuantLM(model, "int8", "simulated", tokenizer=tokenizer())
        for preset in ("int4-token", "fp8"):
            lm.use(preset)
        KVQuantLM(model, "int8", "decode", tokenizer=tokenizer())
    assert asked == [model]


def test_rolling_and_generation_read_the_cache() -> None:
    long = text(3, 60)
    assert len(tokenizer().encode(long)) > 1.5 * CONTEXT
    rolling = [Instance("loglikelihood_rolling", {}, (long,), 0)]
    until = [Instance("generate_until", {}, (text(n, 2 + n), {"until": ["~"], "max_gen_toks": 9}), n) for n in range(3)]
    model = models.family("llama")
    stock = HFLM(model, tokenizer=tokenizer(), batch_size=2)
    expected = stock.loglikelihood_rolling(rolling, disable_tqdm=True)
    dense = stock.generate_until(until, disable_tqdm=True)
    with patched(model, "none"):
        lm = KVQuantLM(model, "none", batch_size=2, tokenizer=tokenizer())
        assert lm.loglikelihood_rolling(rolling, disable_tqdm=True) == pytest.approx(expected, abs=0.01)
        assert lm.generate_until(until, disable_tqdm=True) == dense
        lm.use("int8")
        assert lm.loglikelihood_rolling(rolling, disable_tqdm=True) == pytest.approx(expected, rel=0.02)
        read = lm.pairs_read
        assert read == lm.pairs_expected > 0
        assert all(lm.generate_until(until, disable_tqdm=True))
        assert lm.pairs_read > read


def test_the_class_of_lm_eval_reads_codes_only_where_it_generates() -> None:
    """As docs/evaluation.md says: its log-likelihoods are one forward without `generate`, and so without our cache."""
    model = models.family("llama")
    expected = score(HFLM(model, tokenizer=tokenizer()))
    until = [Instance("generate_until", {}, (text(4, 40), {"until": ["~"], "max_gen_toks": 9}), 0)]
    with patched(model, {"preset": "int2", "sink_length": 0, "residual_length": 0}) as crude:
        stock = HFLM(crude, tokenizer=tokenizer())
        assert score(stock) == expected, "not a code was read"
        assert not report(crude).layers[0].fallbacks
        caches: list[Any] = []
        hook = model.register_forward_pre_hook(lambda _, args, kwargs: caches.append(kwargs[CACHE]), with_kwargs=True)
        stock.generate_until(until, disable_tqdm=True)
        hook.remove()
        assert isinstance(caches[-1], KVQuantCache), "of the last step"


@pytest.mark.parametrize("mode", MODES)
def test_cudnn_serves_generation_alone(mode: str) -> None:
    seen: list[bool] = []
    model = models.family("llama")
    with patched(model, "none"):
        lm = KVQuantLM(model, "int8", mode, tokenizer=tokenizer())
        hook = model.register_forward_pre_hook(lambda *_: seen.append(torch.backends.cuda.cudnn_sdp_enabled()))
        lm._loglikelihood_tokens([(None, [3, 4, 5], [6, 7])], disable_tqdm=True)
        assert seen and not any(seen)
        seen.clear()
        lm.generate_until([Instance("generate_until", {}, ("a king", {"until": ["~"], "max_gen_toks": 5}), 0)])
        hook.remove()
    assert seen and all(seen)


def test_what_is_not_read_as_codes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.family("llama")
    with patched(model, "none"):
        lm = KVQuantLM(model, "int8", tokenizer=tokenizer())
        models.read_nothing(monkeypatch)
        with pytest.raises(NothingRead, match=r"mode 'decode' must read \d+ .* pairs from codes, got 0\."):
            lm._loglikelihood_tokens([(None, [3, 4, 5], [6, 7])], disable_tqdm=True)
        with pytest.raises(NothingRead, match="must have been decoded from codes, got 0 tokens read"):
            lm.generate_until([Instance("generate_until", {}, ("a king", {"until": ["~"], "max_gen_toks": 5}), 0)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "fast"}, "`mode` must be one of decode, simulated, got 'fast'"),
        ({"batch_size": "auto"}, "`batch_size` must be a positive number, got 'auto'. Start with 8"),
        ({"batch_size": 0}, "`batch_size` must be a positive number, got 0"),
        ({"preset": "int5"}, "`preset` must be one of"),
    ],
)
def test_arguments_that_have_no_meaning(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVQuantLM(models.family("llama"), tokenizer=tokenizer(), **options)


@pytest.mark.parametrize("tokens", [([3], []), ([], [3]), ([3], [4] * (CONTEXT + 1))])
def test_continuations_that_cannot_be_scored(tokens: tuple[list[int], list[int]]) -> None:
    model = models.family("llama")
    with patched(model, "none"):
        lm = KVQuantLM(model, "int8", tokenizer=tokenizer())
        with pytest.raises(ValueError, match="a continuation must have from 1 to 128 tokens and a context"):
            lm._loglikelihood_tokens([(None, *tokens)], disable_tqdm=True)


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model and its tokenizer."""
    return models.save_llama(tmp_path_factory.mktemp("model"), CONTEXT, bos_token="!", eos_token="~")


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """JSON lines of every task."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # and afterwards whatever it was
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    path = tmp_path / "data"
    path.mkdir()
    for name, rows in items().items():
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def run(capsys: pytest.CaptureFixture[str], folder: str, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command."""
    code = cli.main(["eval", "tasks", folder, *arguments])
    captured = capsys.readouterr()
    return code, " ".join(captured.out.split()), captured.err


def test_all_offline_tasks(folder: str, data: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    code, shown, error = run(capsys, folder, "--data", str(data), "--preset", "int4-token", "--output", str(output))
    assert code == 0, error
    parts = json.loads(output.read_text(encoding="utf-8"))["parts"]
    assert list(parts) == [
        f"{name}/{preset}" for name in task_files.offline_names() for preset in ("none", "int4-token")
    ]
    for name, part in parts.items():
        assert part["num_items"] == 5
        assert part["pairs_read"] == part["pairs_expected"]
        assert (part["pairs_read"] > 0) == name.endswith("int4-token")
        if name.startswith("wikitext"):
            continue
        assert part["metrics"]["acc"] == pytest.approx(sum(part["items"]["acc"]) / 5)
        assert len(part["items"]["answer"]) == len(part["items"]["gold_log_likelihood"]) == 5
        row = items()[name.partition("/")[0]]
        if "gold" in row[0]:
            right = [int(answer == item["gold"]) for answer, item in zip(part["items"]["answer"], row, strict=True)]
            assert part["items"]["acc"] == right
    for name in ("piqa", "hellaswag", "openbook_qa"):
        assert "acc_norm" in parts[f"{name}/none"]["metrics"]
    lambada = parts["lambada_openai/none"]
    golds = lambada["items"]["gold_log_likelihood"]
    assert lambada["metrics"]["perplexity"] == pytest.approx(math.exp(-sum(golds) / 5), rel=1e-4)
    wikitext = parts["wikitext/none"]
    found, total = wikitext["items"], sum(wikitext["items"]["gold_log_likelihood"])
    assert found["words"] == [len(re.split(r"\s+", row["page"])) for row in items()["wikitext"]]
    assert found["bytes"] == [len(row["page"].encode()) for row in items()["wikitext"]]
    assert wikitext["metrics"]["word_perplexity"] == pytest.approx(math.exp(-total / sum(found["words"])), rel=1e-4)
    assert wikitext["metrics"]["bits_per_byte"] == pytest.approx(-total / sum(found["bytes"]) / math.log(2), rel=1e-4)
    errors = wikitext["standard_errors"]
    assert errors["byte_perplexity"] == pytest.approx(
        wikitext["metrics"]["byte_perplexity"] * errors["bits_per_byte"] * math.log(2)
    )
    perplexities = "lambada_openai, int4-token: perplexity", "wikitext, int4-token: word_perplexity"
    for words in ("piqa none 5", "int4-token 5", *perplexities, "average, int4-token:", "exact McNemar test"):
        assert words in shown
    assert "1 of 20: arc_challenge, none" in error


def test_a_second_run_resumes(
    folder: str, data: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "results.json"
    arguments = ("--data", str(data), "--tasks", "copa,boolq", "--preset", "int8", "--output", str(output))
    seen: list[str] = []
    evaluate = tasks.evaluate

    def interrupted(lm: Any, name: str, *rest: Any) -> Any:
        seen.append(name)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return evaluate(lm, name, *rest)

    monkeypatch.setattr(tasks, "evaluate", interrupted)
    code, _, error = run(capsys, folder, *arguments)
    assert code == 130
    assert "hf-kvquant: interrupted. eval tasks ended in part 3 of 4 (boolq, none). What was measured is in" in error
    assert "Traceback" not in error
    assert list(json.loads(output.read_text(encoding="utf-8"))["parts"]) == ["copa/none", "copa/int8"]
    code, shown, error = run(capsys, folder, *arguments, "--preset", "int4-token")
    assert code == 0, error
    assert seen == ["copa", "copa", "boolq", "copa", "boolq", "boolq", "boolq"]
    assert "No average" in shown and "piqa" in shown
    with (data / "copa.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"query": "a", "choices": ["b", "c"], "gold": 0}) + "\n")
    code, _, error = run(capsys, folder, *arguments)
    assert code == 2 and "must hold results on the same data, got other data for copa" in error
    code, _, error = run(capsys, folder, *arguments, "--limit", "2")
    assert code == 2 and "`limit` was null and is 2" in error


# `None`: processes that the test starts with the variables of a launcher.
LAUNCHERS = {
    "none": None,
    # That for GPUs; the one for CPUs (--cpu) starts one process unless there is MPI.
    "accelerate": "accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no "
    "--dynamo_backend no --main_process_port 0",
    "torchrun": "torch.distributed.run --standalone --nproc_per_node 2",
}


@pytest.mark.slow
@pytest.mark.full(
    when=lambda launcher: launcher != "none", reason="the processes of both launchers find the same environment"
)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_items_are_spread_over_processes(
    folder: str, data: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, launcher: str
) -> None:
    """... with the results of one: to the bit, where batches and threads are the same."""
    alone, together = tmp_path / "alone.json", tmp_path / "together.json"
    arguments = ["--data", str(data), "--tasks", "copa", "lambada_openai", "--preset", "int4-token", "--device", "cpu"]
    arguments += ["--batch-size", "1", "--output"]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert run(capsys, folder, *arguments, str(alone))[0] == 0
    finally:
        torch.set_num_threads(num_threads)
    command = "-m", "hf_kvquant", "eval", "tasks", folder, *arguments, str(together)
    if (words := LAUNCHERS[launcher]) is None:
        ((out, err), (other_out, _)) = finish(*ranks(2, *command))
        assert other_out == ""
    else:
        ((out, err),) = finish(Program("-m", *words.split(), *command))
    assert " ".join(out.split()).count("exact McNemar test") == 1  # one table
    # Three of five items of three choices on the first process, the others on the second; in the order of the file.
    assert "/9 " in err and "/15 " not in err
    one, other = (json.loads(path.read_text(encoding="utf-8"))["parts"] for path in (alone, together))
    assert list(one) == list(other) == [f"{task}/{preset}" for task in ("copa", "lambada_openai") for preset in PRESETS]
    for name, part in one.items():
        assert other[name]["num_items"] == 5
        assert (other[name]["items"], other[name]["metrics"]) == (part["items"], part["metrics"])


def test_one_process_where_several_were_asked_for_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`accelerate launch --cpu --num_processes 2` without MPI starts one, and leaves these."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    tell_one_process("eval tasks")
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    tell_one_process("eval tasks")
    assert "eval tasks: accelerate started one process, not several" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    tell_one_process("eval tasks")
    assert capsys.readouterr().err == ""


def test_memory_that_runs_out(
    folder: str, data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluate(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(tasks, "evaluate", evaluate)
    code, _, error = run(capsys, folder, "--data", str(data), "--tasks", "copa")
    assert code == 2
    assert "`--batch-size` must fit into memory, got 8, too much for part 1 of 3 (copa, none). Lower it. N" in error


@pytest.mark.parametrize("injection", [("--inject-outliers", "8"), ("--inject-bias", "100")])
def test_injections(folder: str, data: Path, capsys: pytest.CaptureFixture[str], injection: tuple[str, str]) -> None:
    output = data / "results.json"
    code, _, error = run(
        capsys, folder, "--data", str(data), "--tasks", "copa", "--preset", "int8", "--output", str(output), *injection
    )
    assert code == 0, error
    settings = json.loads(output.read_text(encoding="utf-8"))["settings"]
    assert settings[injection[0].removeprefix("--").replace("inject", "injected").replace("-", "_")] == float(
        injection[1]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tasks", "winograde"), "`--tasks` must name a task file, got 'winograde'. Did you mean 'winogrande'?"),
        (("--preset", "int5"), "`--preset` must be one of"),
        (("--limit", "0"), "`--limit` must be at least 1, got 0"),
        (("--batch-size", "0"), "`--batch-size` must be at least 1, got 0"),
        (("--output", "nowhere/results.json"), "`--output` must be a file in a folder that is there, got "),
        (("--inject-outliers", "-1"), "nothing can be injected into"),
    ],
)
def test_mistakes_in_arguments(
    folder: str, data: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    code, shown, error = run(capsys, folder, "--data", str(data), *arguments)
    assert (code, shown) == (2, "")
    assert error.startswith("hf-kvquant: error: eval tasks: ") and message in error


def test_what_is_declared_is_there() -> None:
    assert set(task_files.AVERAGED) <= set(task_files.offline_names())
    for path in task_files.FOLDER.iterdir():
        assert yaml.safe_load(path.read_text(encoding="utf-8"))["task"] == path.stem
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'hf_kvquant = "{KVQuantLM.__module__}:{KVQuantLM.__name__}"' in project
    assert 'hf_kvquant_evals = ["py.typed", "**/*.jinja", "**/*.yaml"]' in project


def test_lm_eval_that_is_not_installed(
    folder: str, data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    code, _, error = run(capsys, folder, "--data", str(data))
    assert code == 2 and "lm-eval must be installed, got: " in error and "pip install 'hf-kvquant[eval]'" in error
