"""`hf-kvquant eval long`: that answers are read from codes, what is kept and said of them, and its mistakes."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from rich.console import Console
from transformers import DynamicCache

from hf_kvquant import KVQuantConfig, cli
from hf_kvquant.common.errors import RefusedResult
from hf_kvquant.upstream.releases import with_cache
from hf_kvquant_evals.long_context import long_context_run as long_context
from hf_kvquant_evals.long_context.long_context_run import SUMMARY, Cell, Scores, ask, score
from hf_kvquant_evals.long_context.prompts import Prompt, Writer
from hf_kvquant_evals.measuring.pairs import DEQUANTIZED
from hf_kvquant_evals.records import RunRecord

CONTEXT = 512


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model and its tokenizer."""
    return models.save_llama(tmp_path_factory.mktemp("model"), CONTEXT)


def run(capsys: pytest.CaptureFixture[str], folder: str, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command, on few and small prompts unless told otherwise."""
    small = ("--lengths", "256", "--depths", "0,100", "--samples", "2", "--tests", "needle")
    code = cli.main(("eval", "long", folder, *small, *arguments))
    captured = capsys.readouterr()
    return code, " ".join(captured.out.split()), captured.err


# --- scores -----------------------------------------------------------------------------------------------------------


def asked(*presets: str, model: Any = None, num_prompts: int = 2) -> tuple[list[Prompt], dict[str, Scores]]:
    """Prompts, and what some presets make of them."""
    writer = Writer(models.tokenizer())
    prompts = [writer.prompt("needle", 256, 50, sample) for sample in range(num_prompts)]
    model = models.llama(max_position_embeddings=CONTEXT) if model is None else model
    return prompts, score(model, prompts, {name: KVQuantConfig.from_preset(name) for name in presets})


def test_none_is_the_dynamic_cache() -> None:
    """... through which the whole prompt goes as `generate` would feed it."""
    model = models.llama(max_position_embeddings=CONTEXT)
    prompts, results = asked("none")
    cache = DynamicCache(config=model.config)
    context, question, answer = (
        torch.stack([getattr(prompt, part) for prompt in prompts]) for part in ("context", "question", "answer")
    )
    with torch.inference_mode():
        model(context, **with_cache(cache))
        correct, log_likelihood = ask(model, question, answer, cache)
        whole = model(torch.cat((context, question, answer), dim=1)).logits.log_softmax(-1)
    assert results["none"].correct == correct.tolist()
    assert results["none"].log_likelihood == log_likelihood.tolist()
    expected = whole[:, -answer.shape[1] - 1 : -1].gather(2, answer[:, :, None]).sum((1, 2))
    torch.testing.assert_close(log_likelihood, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_codes_are_read(name: str) -> None:
    model = models.build(
        models.FAMILIES[name].model_type, **{**models.FAMILIES[name].options, "max_position_embeddings": CONTEXT}
    )
    prompts, results = asked("none", "int8", "int4-token", model=model)
    tail = len(prompts[0].question) + len(prompts[0].answer) - 1
    pairs = 2 * sum(len(prompts[0].context) + 1 + index for index in range(tail))
    if name == "gemma2":
        pairs = pairs // 2 + 6 * tail  # one layer has a window of 6 tokens
    for preset, expected in (("none", 0), ("int8", pairs), ("int4-token", pairs)):
        assert results[preset].pairs_read == results[preset].pairs_expected == len(prompts) * expected
    none, int8, int4 = (torch.tensor(results[preset].log_likelihood) for preset in ("none", "int8", "int4-token"))
    assert 0 < (int8 - none).abs().mean() < (int4 - none).abs().mean()


def test_one_reading_of_the_context_serves_all_presets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches that take the keys and values of another one answer as those do that the model fills."""
    _, shared = asked("int4-token", "int4-channel")
    monkeypatch.setattr(long_context, "KVQuantLayer", ())
    _, own = asked("int4-token", "int4-channel")
    assert shared == own


def test_a_batch_is_its_prompts() -> None:
    _, both = asked("int4-token")
    _, one = asked("int4-token", num_prompts=1)
    assert both["int4-token"].log_likelihood[0] == pytest.approx(one["int4-token"].log_likelihood[0], abs=1e-3)


def test_right_is_what_greedy_decoding_writes() -> None:
    """A prompt whose answer is what the model writes is right, and not with another last token."""
    model = models.llama(max_position_embeddings=CONTEXT)
    prompt = Writer(models.tokenizer()).prompt("passkey", 256, 50, 0)
    fed = torch.cat((prompt.context, prompt.question))[None]
    inputs = {"input_ids": fed, "attention_mask": torch.ones_like(fed)}
    written = models.greedy(model, inputs, new_tokens=4).sequences[0, fed.shape[1] :]
    wrong = torch.cat((written[:-1], (written[-1:] + 1) % models.VOCAB_SIZE))
    prompts = [Prompt(prompt.context, prompt.question, answer, prompt.needle) for answer in (written, wrong)]
    assert score(model, prompts, {"none": KVQuantConfig.from_preset("none")})["none"].correct == [True, False]


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command(folder: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    output = tmp_path / "long.json"
    code, text, error = run(
        capsys, folder, "--preset", "int4-token", "--tests", "needle,recall", "--output", str(output)
    )
    assert code == 0 and error == ""
    for test in ("needle", "recall"):
        assert f"{test}, none" in text and f"{test}, int4" in text
    assert "0%, cannot" in text and "The model itself fails in every cell" in text
    assert "0 of 4" in text
    parts = json.loads(output.read_text())["parts"]
    assert list(parts) == ["needle/256/0", "needle/256/100", "recall/256/0", "recall/256/100", SUMMARY]
    cell = parts["needle/256/0"]["int4-token"]
    assert len(cell["correct"]) == len(cell["log_likelihood"]) == 2
    assert cell["pairs_read"] == cell["pairs_expected"] > 0
    assert parts[SUMMARY]["none"]["log_likelihood_change"] == 0 != parts[SUMMARY]["int4-token"]["log_likelihood_change"]


def test_what_is_interrupted_is_resumed(
    folder: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--preset", "int8", "--output", str(tmp_path / "long.json"))
    asked: list[int] = []

    def counted(model: Any, prompts: Sequence[Prompt], configs: Any) -> dict[str, Scores]:
        if len(asked) == 1:
            asked.append(0)
            raise KeyboardInterrupt
        asked.append(len(prompts))
        return score(model, prompts, configs)

    monkeypatch.setattr(long_context, "score", counted)
    code, _, error = run(capsys, folder, *arguments)
    assert code == 130 and "eval long ended in cell 2 of 2 (needle 256 at 100 %). What was measured is in" in error
    first = json.loads((tmp_path / "long.json").read_text())["parts"]
    assert list(first) == ["needle/256/0"]
    assert run(capsys, folder, *arguments)[0] == 0
    assert asked == [2, 0, 2]  # the first cell was not asked again
    resumed = json.loads((tmp_path / "long.json").read_text())["parts"]
    assert resumed["needle/256/0"] == first["needle/256/0"]
    asked.clear()
    asked.extend((2, 2))
    run(capsys, folder, "--preset", "int8", "--output", str(tmp_path / "whole.json"))
    assert json.loads((tmp_path / "whole.json").read_text())["parts"] == resumed


def test_batches_are_as_large_as_asked(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def counted(model: Any, prompts: Sequence[Prompt], configs: Any) -> dict[str, Scores]:
        sizes.append(len(prompts))
        return score(model, prompts, configs)

    monkeypatch.setattr(long_context, "score", counted)
    assert run(capsys, folder, "--samples", "3", "--batch-size", "2", "--depths", "50", "--preset", "int8")[0] == 0
    assert sizes == [2, 1]


def test_difficulties_are_injected(folder: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Outliers leave the unquantised cache as it is, a bias does not; other settings are another record."""
    found = {}
    for option in ((), ("--inject-outliers", "8"), ("--inject-bias", "100")):
        path = tmp_path / f"{len(found)}.json"
        assert run(capsys, folder, "--preset", "int8", "--output", str(path), *option)[0] == 0
        found[option] = json.loads(path.read_text())["parts"]["needle/256/0"]["none"]["log_likelihood"]
    plain, outliers, bias = found.values()
    assert outliers == pytest.approx(plain, abs=1e-2) and bias != pytest.approx(plain, abs=1e-2)
    code, _, error = run(capsys, folder, "--preset", "int8", "--output", str(tmp_path / "0.json"), "--seed", "1")
    assert code == 2 and "`seed` was 0 and is 1" in error


def test_dense_windows_and_chat_templates_are_settings(
    capsys: pytest.CaptureFixture[str], folder: str, tmp_path: Path
) -> None:
    chat = models.save_llama(tmp_path / "chat", CONTEXT, chat_template=models.CHAT_TEMPLATE)
    words = ("--preset", "int4-token", "--preset", "int4-token:0+9", "--sink-length", "2", "--residual-length", "300")
    code, _, error = run(capsys, chat, *words, "--chat-template", "--output", str(tmp_path / "long.json"))
    assert code == 0, error
    content = json.loads((tmp_path / "long.json").read_text())
    configs = content["settings"]["presets"]
    lengths = {name: (config["sink_length"], config["residual_length"]) for name, config in configs.items()}
    assert lengths == {"none": (0, 0), "int4-token": (2, 300), "int4-token:0+9": (0, 9)}
    assert len(content["settings"]["chat_template"]) == 64
    changes = {name: abs(row["log_likelihood_change"]) for name, row in content["parts"][SUMMARY].items()}
    # All tokens stay dense in one of them.
    assert changes["int4-token"] < 1e-3 < changes["int4-token:0+9"]
    code, _, error = run(capsys, folder, "--chat-template")
    assert code == 2 and "eval long: `--chat-template` needs a tokenizer" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "accuracy, text", [(1.0, "80%"), (0.9, "80%"), (0.8, "cannot")], ids=["all", "nine_of_ten", "eight_of_ten"]
)
def test_only_what_the_model_can_do_is_scored(accuracy: float, text: str) -> None:
    result = {
        "none": {"correct": [index < 10 * accuracy for index in range(10)], "log_likelihood": [-1.0] * 10},
        "int4-token": {"correct": [index < 8 for index in range(10)], "log_likelihood": [-1.5, -1.0] * 5},
    }
    assert long_context.cell_text(result, "int4-token") == f"{text}\n-0.250"


def test_the_summary_is_over_what_is_scored() -> None:
    """... but changes of the log-likelihood are over all that was asked."""
    cells = [Cell("needle", 256, depth) for depth in (0, 100)]
    record = RunRecord.open(None, {})
    for cell, is_right in zip(cells, (True, False), strict=True):
        none = {"correct": [is_right] * 2, "log_likelihood": [-1.0, -2.0]}
        record.put(cell.part, {"none": none, "int4-token": {"correct": [True, False], "log_likelihood": [-1.5, -2.0]}})
    summary = long_context.summarize(record, cells, ("none", "int4-token"))
    assert summary["none"] == {
        "num_cells": 2, "num_scored": 1, "accuracy": 1.0, "log_likelihood_change": 0.0, "standard_error": 0.0,
        "pairs_dequantized": 0,
    }  # fmt: skip
    assert (summary["int4-token"]["accuracy"], summary["int4-token"]["log_likelihood_change"]) == (0.5, -0.25)
    assert summary["int4-token"]["standard_error"] == pytest.approx(0.5 / 12**0.5)
    file = io.StringIO()
    record.put(SUMMARY, summary)
    long_context.show(Console(file=file, width=120), record, cells, title="model")
    text = " ".join(file.getvalue().split())
    assert "int4-token │ 1 of 2 │ 50.0% │ -0.2500 ± 0.1443 │" in text and "fails in every cell" not in text


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--tests", "pasky"], "`--tests` must be of passkey, needle, recall, got 'pasky'. Did you mean 'passkey'?"),
        (["--tests", " , "], "`--tests` must name something, got ' , '. Separate words by commas."),
        (["--lengths", "1m"], "`--lengths` must be numbers of tokens such as 512 or 4k, got '1m'."),
        (["--lengths", "0"], "`--lengths` must be numbers of tokens such as 512 or 4k, got '0'."),
        (["--lengths", "256,1k"], "`--lengths` must be at most 512, the positions of "),
        (["--lengths", "64"], "`--lengths` must be at least 112 for the test needle with this tokenizer, got 64."),
        (["--depths", "101"], "`--depths` must be percentages from 0 to 100, got '101'."),
        (["--depths", "deep"], "`--depths` must be percentages from 0 to 100, got 'deep'."),
        (["--samples", "0"], "`--samples` must be at least 1, got 0."),
        (["--batch-size", "0"], "`--batch-size` must be at least 1, got 0."),
        (["--preset", "int9"], "got 'int9'. Did you mean 'int8'?"),
        (["--filler-file", "SHORT"], "`--filler-file` must hold at least 144 tokens for these lengths, got 7."),
        (["--filler-file", "EMPTY"], "empty must hold text, got nothing but white space."),
        (["--filler-file", "ABSENT"], "`--filler-file` must be a text file, got "),
        (["--output", "FOLDER"], "`--output` must be a file in a folder that is there, got "),
    ],
)
def test_mistakes(
    folder: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], message: str
) -> None:
    files = {name: tmp_path / name.lower() for name in ("SHORT", "EMPTY", "ABSENT")}
    files["SHORT"].write_text("Short.")
    files["EMPTY"].write_text(" \n")
    files["FOLDER"] = tmp_path
    found, _, error = run(capsys, folder, *(str(files.get(argument, argument)) for argument in arguments))
    assert found == 2 and message in error and error.count("\n") == 1


def test_where_no_kernel_serves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {**models.FAMILIES["xglm"].options, "max_position_embeddings": CONTEXT}
    folder = models.save(models.build("xglm", **options), tmp_path / "model")
    code, out, error = run(capsys, folder, "--preset", "int8", "--output", str(tmp_path / "out.json"))
    assert code == 0, error
    assert DEQUANTIZED in " ".join(out.split())
    parts = json.loads((tmp_path / "out.json").read_text())["parts"]
    cell = next(part["int8"] for name, part in parts.items() if "/" in name)
    assert cell["pairs_read"] == 0 < cell["pairs_dequantized"] == cell["pairs_expected"]


@pytest.mark.parametrize("read", [4, 6])
def test_what_is_not_read_as_codes_is_refused(monkeypatch: pytest.MonkeyPatch, read: int) -> None:
    counts = {"pairs_read": read, "pairs_expected": 7, "pairs_dequantized": 2}
    monkeypatch.setattr(
        long_context, "score", lambda *_: {"int8": Scores(correct=[True], log_likelihood=[-1.0], **counts)}
    )
    with pytest.raises(
        RefusedResult, match=rf"preset int8 must read 7 .* pairs from codes, got {read + 2}. Some layer"
    ):
        long_context.checked_scores(models.llama(), [], {})


@pytest.mark.parametrize(
    "raised, code, message",
    [
        (torch.OutOfMemoryError("CUDA out of memory"), 2, "`--batch-size` must fit into memory, got 8, "),
        (None, 1, "preset none must give finite log-likelihoods, got [nan]. Use --dtype float32 or bfloat16."),
    ],
    ids=["memory", "nan"],
)
def test_what_the_device_does_not_bear(
    folder: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    raised: Exception | None,
    code: int,
    message: str,
) -> None:
    def broken(model: Any, prompts: Any, configs: Any) -> dict[str, Scores]:
        if raised is not None:
            raise raised
        return {"none": Scores(correct=[False], log_likelihood=[float("nan")], pairs_read=0, pairs_expected=0)}

    monkeypatch.setattr(long_context, "score", broken)
    found, _, error = run(capsys, folder)
    assert found == code and message in error
