"""Zero-shot tasks of `eval recipes`: that scores are those of each recipe's cache, and what the command does."""

from __future__ import annotations

import functools
import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

pytest.importorskip("lm_eval")

from hf_kvquant import cli
from hf_kvquant.common.errors import UsageError
from hf_kvquant.models.probing import forward
from hf_kvquant.presets import UNQUANTIZED
from hf_kvquant_evals.preparation import Subject
from hf_kvquant_evals.recipes import recipe_run, tasks
from hf_kvquant_evals.recipes.catalogue import RECIPES
from hf_kvquant_evals.recipes.interface import Recipe, Storage
from hf_kvquant_evals.recipes.lm_eval_model import RecipesLM
from hf_kvquant_evals.recipes.recipe_cache import plain_cache, recipe_cache
from hf_kvquant_evals.recipes.recipe_run import fitting
from hf_kvquant_evals.recipes.sample import layers_of_model

# lm-eval says so of every model that is handed to it, and its dependencies of each other.
pytestmark = [pytest.mark.filterwarnings("ignore")]

POSITIONS, TEXT = 512, 160
FLOAT_NOISE = 1e-4  # of sums in another order


def tiny() -> PreTrainedModel:
    """A model whose head_dim many recipes serve."""
    model: PreTrainedModel = models.llama(head_dim=32, max_position_embeddings=POSITIONS)
    return model


def drawn(seed: int, tokens: int) -> list[int]:
    found: list[int] = torch.randint(2, 90, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
    return found


def requests() -> list[tuple[None, list[int], list[int]]]:
    """Contexts of one token, of many, and of more than the text; continuations that differ in the last token."""
    pairs = [(drawn(seed, 3 * seed + 1), drawn(100 + seed, 1 + seed % 3)) for seed in range(6)]
    pairs += [(drawn(9, 20), [*drawn(10, 4), last]) for last in (5, 6)]
    pairs.append((drawn(11, TEXT + 9), drawn(12, 2)))
    return [(None, *pair) for pair in pairs]


def lm_of(recipes: dict[str, Recipe], text: int = TEXT, batch_size: int = 8) -> RecipesLM:
    model = tiny()
    quantizers = fitting(layers_of_model(model, None), recipes, True) if recipes else {}
    caches: dict[str, Callable[[], DynamicCache]] = {UNQUANTIZED: functools.partial(plain_cache, model)}
    for name, recipe in recipes.items():
        caches[name] = functools.partial(recipe_cache, model, recipe, quantizers[name])
    tokenizer = models.tokenizer(bos_token="!", eos_token="~")
    return RecipesLM(model, tokenizer, torch.tensor(drawn(0, text), dtype=torch.int64), caches, batch_size)


def scores(lm: RecipesLM, name: str) -> Tensor:
    lm.name = name
    return torch.tensor([score for score, _ in lm._loglikelihood_tokens(requests(), disable_tqdm=True)])


# --- log-likelihoods --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [0, TEXT])
def test_dense_scores_are_those_of_one_forward(text: int) -> None:
    """Of the unquantised cache, and of a recipe that keeps everything dense."""
    lm = lm_of({"dense": RECIPES["naive-2"].with_dense(POSITIONS, 0)}, text)
    expected = []
    for _, context, continuation in requests():
        before = drawn(0, text)[: max(0, text + 1 - len(context))] + context
        with torch.inference_mode():
            logits = forward(tiny(), torch.tensor([before + continuation]))[0, len(before) - 1 : -1]
        expected.append(float(logits.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None]).sum()))
    for name in (UNQUANTIZED, "dense"):
        torch.testing.assert_close(scores(lm, name), torch.tensor(expected), atol=FLOAT_NOISE, rtol=0)


@pytest.mark.parametrize("name", ["naive-2", "kivi-2", "kvarn-k2v2"])
def test_scores_are_those_of_codes(name: str) -> None:
    """The context is read dense; then everything that has codes by the end of the chunk is read as these."""
    recipe = RECIPES[name].with_dense(4, 9)
    quantizers = fitting(layers_of_model(tiny(), None), {name: recipe}, True)[name]

    class Coded(DynamicCache):
        """Keeps all tokens dense, and quantises them whenever they are read."""

        def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            held = super().update(key, value, layer_idx)
            if held[0].shape[2] == key.shape[2]:
                return held
            shown = []
            for x, storage, quantize in zip(held, (recipe.key, recipe.value), quantizers[layer_idx], strict=True):
                begin, end = storage.sink, storage.coded_end(x.shape[2])
                shown.append(torch.cat((x[:, :, :begin], quantize(x[:, :, begin:end], begin), x[:, :, end:]), dim=2))
            return tuple(shown)

    lm = lm_of({name: recipe})
    found = scores(lm, name)
    expected = []
    for _, context, continuation in requests():
        ids = torch.tensor([drawn(0, TEXT)[: max(0, TEXT + 1 - len(context))] + context + continuation])
        first = ids.shape[1] - len(continuation) - 1
        cache = Coded()
        with torch.inference_mode():
            forward(tiny(), ids[:, :first], cache=cache)
            logits = forward(tiny(), ids[:, first:-1], cache=cache)[0]
        expected.append(float(logits.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None]).sum()))
    # Sums in another order may flip a code.
    apart = (found - torch.tensor(expected)).abs()
    assert apart.median() < FLOAT_NOISE
    assert apart.mean() < 0.05 * (found - scores(lm, UNQUANTIZED)).abs().mean()


def test_batch_size_does_not_change_scores() -> None:
    names = ("int4-token", "kivi-2", "int4-channel")
    one, eight = (lm_of({name: RECIPES[name] for name in names}, batch_size=size) for size in (1, 8))
    torch.testing.assert_close(scores(one, UNQUANTIZED), scores(eight, UNQUANTIZED), atol=FLOAT_NOISE, rtol=0)
    for name in names:
        apart, effect = (
            (scores(one, name) - scores(lm, which)).abs() for lm, which in ((eight, name), (eight, "none"))
        )
        assert apart.median() < FLOAT_NOISE
        assert apart.mean() < 0.05 * effect.mean() or effect.max() < FLOAT_NOISE


def test_caches_are_filled_alike_and_rows_fed_once() -> None:
    lm = lm_of({"int4-token": RECIPES["int4-token"]})
    forwards: list[Any] = []
    hook = lm.model.register_forward_pre_hook(lambda *_: forwards.append(None))
    scores(lm, UNQUANTIZED)
    count = len(forwards)
    assert {held for held, _ in lm.chunks} == {TEXT, TEXT + 8}  # one context is longer
    assert sum(lm.chunks.values()) == len(requests()) - 1  # two differ in their last token
    assert count == 3 * len(lm.chunks)  # one reads the contexts of a batch, then one for each cache
    scores(lm, "int4-token")
    hook.remove()
    assert len(forwards) == count  # remembered


def test_the_share_of_codes_is_that_of_the_pairs() -> None:
    key, value = Storage(code_bits=2, sink=3, recent=5, block=4), Storage(code_bits=2)
    recipe = types.SimpleNamespace(key=key, value=value)
    pairs = [(query, token) for query in range(20, 27) for token in range(query + 1)]
    coded = sum(key.sink <= token < key.coded_end(27) for _, token in pairs) + len(pairs)
    found = tasks.read_from_codes(recipe, [[20, 7, 3]])  # type: ignore[arg-type]
    assert found == pytest.approx(coded / (2 * len(pairs)))


def test_changes_are_paired_and_averaged_over_tasks() -> None:
    def part(right: list[int], answer: list[int], gold: list[float]) -> dict[str, Any]:
        return {"items": {"acc": right, "answer": answer, "gold_log_likelihood": gold}}

    exact = part([1, 1, 0, 0], [0, 1, 0, 1], [-1.0, -2.0, -3.0, -4.0])
    first = {"recipes": {"none": exact, "x": part([1, 0, 0, 0], [0, 0, 0, 1], [-1.5, -2.5, -3.5, -4.5])}, "chunks": []}
    pair = part([1, 0], [0, 1], [-1.0, -1.0])
    second = {"recipes": {"none": pair, "x": pair}, "chunks": [[8, 2, 1]]}
    found = tasks.summarize([first, second], "x", RECIPES["int4-token"])
    assert found["num_items"] == 6 and found["read_from_codes"] == 1
    assert found["accuracy"] == pytest.approx((0.25 + 0.5) / 2) and found["reference_accuracy"] == 0.5
    assert found["change"] == pytest.approx(-0.125) and found["change_standard_error"] == pytest.approx(0.125)
    assert found["log_likelihood_change"] == pytest.approx(-0.25) and found["standard_error"] == 0
    assert found["same"] == pytest.approx((0.75 + 1) / 2)


# --- the command ------------------------------------------------------------------------------------------------------


ITEMS: dict[str, list[dict[str, Any]]] = {
    "piqa": [
        {"query": "It rises in" + " the" * n, "choices": [" north", " the south"], "gold": n % 2} for n in (1, 2, 4)
    ],
    "winogrande": [{"context_options": ["The river", "A country"], "continuation": " flows.", "gold": 1}] * 2,
    "lambada_openai": [{"context": "It flows south for", "continuation": "miles"}] * 2,
    "wikitext": [{"page": "The river rises."}],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    return models.save(tiny(), path, model_max_length=POSITIONS, bos_token="!", eos_token="~")


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """JSON lines of some tasks, and a text."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # and afterwards whatever it was
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setattr(recipe_run, "SAMPLE_TOKENS", 100)
    for name, rows in ITEMS.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "text.txt").write_text(models.SENTENCE * 8, encoding="utf-8")
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], folder: str, data: Path, *arguments: object) -> tuple[int, str, str]:
    small = "--window 200 --tokens 150 --drift 0 --needles 0 --recipes int4-token,naive-2 --dtype float32".split()
    code = cli.main(("eval", "recipes", folder, "--text", str(data / "text.txt"), *small, *map(str, arguments)))
    captured = capsys.readouterr()
    return code, " ".join(captured.out.split()), captured.err


def test_command(folder: str, data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    record = data / "record.json"
    names = ["piqa", "winogrande", "lambada_openai"]
    options = ("--tasks", "piqa,winogrande", "lambada_openai", "--data", data, "--task-context", 64)
    options += ("--output", record)
    seen: list[str] = []
    of_task = tasks.of_task

    def interrupted(lm: Any, name: str, *rest: Any) -> Any:
        seen.append(name)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return of_task(lm, name, *rest)

    monkeypatch.setattr(tasks, "of_task", interrupted)
    code, _, error = run(capsys, folder, data, *options)
    assert code == 130 and "eval recipes ended in task winogrande. What was measured is in" in error
    code, shown, error = run(capsys, folder, data, *options)
    assert code == 0, error
    assert seen == ["piqa", "winogrande", "winogrande", "lambada_openai"]
    content = json.loads(record.read_text(encoding="utf-8"))
    assert content["settings"]["tasks"] == names and content["settings"]["task_context"] == 64
    for name in names:
        part = content["parts"][f"task {name}"]
        assert list(part["recipes"]) == ["none", "int4-token", "naive-2"] and len(part["data_sha256"]) == 64
        assert all(held == 64 for held, _, _ in part["chunks"])
        for found in part["recipes"].values():
            lists = [found["items"][key] for key in ("acc", "answer", "gold_log_likelihood")]
            assert [len(each) for each in lists] == [len(ITEMS[name])] * 3
            assert found["metrics"]["acc"] == pytest.approx(sum(found["items"]["acc"]) / len(ITEMS[name]))
    rows = {name: row["tasks"] for name, row in content["parts"]["summary"]["recipes"].items()}
    assert all(row["num_items"] == 7 and row["read_from_codes"] == 1 for row in rows.values())
    assert 0 < abs(rows["int4-token"]["log_likelihood_change"]) < abs(rows["naive-2"]["log_likelihood_change"])
    assert "7 items of piqa, winogrande, lambada_openai" in shown and "fills the cache with 64 tokens" in shown
    with (data / "piqa.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(ITEMS["piqa"][0]) + "\n")
    code, _, error = run(capsys, folder, data, *options)
    assert code == 2 and "must hold results on the same data, got other data for piqa" in error
    code, _, error = run(capsys, folder, data, *options, "--limit", 1)
    assert code == 2 and "`limit` was null and is 1" in error


def test_records_without_tasks_know_nothing_of_them(
    folder: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, shown, error = run(capsys, folder, data, "--output", data / "record.json")
    assert code == 0 and "items of" not in shown, error
    content = json.loads((data / "record.json").read_text(encoding="utf-8"))
    assert not {"tasks", "limit", "task_context", "lm_eval"} & content["settings"].keys()
    assert all(row["tasks"] is None for row in content["parts"]["summary"]["recipes"].values())


MISTAKES = {
    "name": (("--tasks", "piqua"), "`--tasks` must name a task file, got 'piqua'. Did you mean 'piqa'?"),
    "rolling": (
        ("--tasks", "wikitext", "--task-context", 8),
        "`--tasks` must name tasks that compare log-likelihoods, got wikitext, which asks for loglikelihood_rolling. "
        "Leave it out",
    ),
    "missing": (("--tasks", "copa"), "`--data` must hold copa.jsonl for task copa, got"),
    "limit": (("--tasks", "piqa", "--limit", 0), "`--limit` must be at least 1, got 0"),
    "batch size": (("--tasks", "piqa", "--batch-size", 0), "`--batch-size` must be at least 1, got 0"),
    "context": (("--tasks", "piqa", "--task-context", -1), "`--task-context` must be at least 0, got -1"),
    "long context": (
        ("--tasks", "piqa", "--task-context", POSITIONS),
        f"`--task-context` must be at most {POSITIONS - 1}, got {POSITIONS}: there are 668 tokens of text to measure",
    ),
    "data alone": ((), "`--data` must come with --tasks, got"),
}


@pytest.mark.parametrize(("arguments", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(
    arguments: tuple[object, ...], message: str, folder: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, error = run(capsys, folder, data, "--data", data, *arguments)
    assert code == 2 and message in error, error


def test_limit_alone(folder: str, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = run(capsys, folder, data, "--limit", 3)
    assert code == 2 and "`--limit` must come with --tasks, got 3 without. Name tasks." in error


def test_items_that_do_not_fit(folder: str, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    item = {"context": "It flows", "continuation": "south" * POSITIONS}
    (data / "lambada_openai.jsonl").write_text(json.dumps(item) + "\n", encoding="utf-8")
    code, _, error = run(capsys, folder, data, "--data", data, "--tasks", "lambada_openai", "--task-context", 8)
    assert code == 2 and "`--tasks` lambada_openai does not fit" in error and "behind --task-context 8" in error


def test_memory_that_runs_out(
    folder: str, data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_task(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(tasks, "of_task", of_task)
    code, _, error = run(capsys, folder, data, "--data", data, "--tasks", "piqa", "--task-context", 8)
    assert code == 2 and "`--batch-size` must fit into memory, got 8, too much for task piqa. Lower it." in error


def test_tasks_without_right_answers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.SimpleNamespace(OUTPUT_TYPE="multiple_choice", aggregation=lambda: {"mcc": None})
    monkeypatch.setattr(tasks, "load_tasks", lambda names, data: {"cola": fake})
    subject = Subject("tiny", tiny(), models.tokenizer(bos_token="!"), {})
    with pytest.raises(
        UsageError, match="must name tasks with one of the metrics acc, exact_match, acc_norm, got cola with mcc"
    ):
        tasks.load(subject, torch.arange(20), tasks.Options(tasks=["cola"], task_context=8))
