"""`hf-kvquant eval perplexity`: what it measures and keeps, what fails the run, and one line for every mistake."""

from __future__ import annotations

import contextlib
import copy
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import pytest
import torch

from hf_kvquant import KVQuantConfig, cli
from hf_kvquant.common.errors import RefusedResult
from hf_kvquant.spec.formats import KVFormat
from hf_kvquant.storage.tally import causal_pairs
from hf_kvquant_evals.errors import OutOfMemory
from hf_kvquant_evals.injection import inject_key_outliers
from hf_kvquant_evals.measuring.simulation import SimulatedLayer
from hf_kvquant_evals.perplexity import gate, perplexity_run, segments

WINDOW = 24
TEXT = 8 * models.SENTENCE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model and its tokenizer."""
    return models.save_llama(tmp_path_factory.mktemp("model"), 64)


def run(capsys: pytest.CaptureFixture[str], folder: str, tmp_path: Path, *more: str, text: str = TEXT) -> Any:
    """Exit code, results and stderr of a short run."""
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    output = tmp_path / "out.json"
    words = ["--text", str(tmp_path / "text.txt"), "--dtype", "float32", "--window", str(WINDOW), "--tokens", "50"]
    words += ["--chunk", "5", "--output", str(output), "--preset", "int8", *more]
    code = cli.main(["eval", "perplexity", folder, *words])
    found = json.loads(output.read_text(encoding="utf-8")) if output.exists() else None
    return code, found, capsys.readouterr().err


def test_all_modes(folder: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, found, error = run(capsys, folder, tmp_path, "--mode", "all")
    assert code == 0, error
    assert str(tmp_path) not in json.dumps(found)
    modes = found["parts"]["summary"]["modes"]
    assert list(modes) == ["simulated", "chunked", "decode"]
    for rows in modes.values():
        assert list(rows) == ["none", "int8"]
        assert rows["none"]["kld"] < 1e-6 < rows["int8"]["kld"] <= rows["int8"]["kld_max"]
        assert rows["int8"]["pairs_read"] == 3 * 2 * causal_pairs(WINDOW - 1, 1) and rows["none"]["pairs_read"] == 0
        assert rows["int8"]["scored_tokens"] == 3 * (WINDOW - 2)
        assert rows["none"]["perplexity_per_word"] > rows["none"]["perplexity"]
    checked = found["parts"]["gate"]["int8"]
    assert max(checked["between"].values()) <= checked["bound"]


def test_controls(
    folder: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "CONTROL_AGREEMENT", 1.01)
    code, found, error = run(capsys, folder, tmp_path, "--controls", "--inject-outliers", "8", "--mode", "simulated")
    assert code == 0, error
    controls = found["parts"]["controls"]
    assert controls["none"] < 1e-6 and list(controls["permuted_scales"]) == ["int8"]
    assert found["settings"]["injected_outliers"] == 8.0
    (tmp_path / "out.json").unlink()
    monkeypatch.setattr(gate, "CONTROL_AGREEMENT", 0.0)
    code, _, error = run(capsys, folder, tmp_path, "--controls")
    assert code == 1 and "control: int8 with the scales of its tokens permuted must agree" in error


def test_windows_and_the_naive_baseline(
    folder: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """... are presets like others, and the modes agree on them too."""
    monkeypatch.setattr(gate, "CONTROL_AGREEMENT", 1.01)
    names = ("int4-token:2+6", "int4-token-untransformed", "int4-channel:0+3")
    words = [word for name in names for word in ("--preset", name)]
    code, found, error = run(capsys, folder, tmp_path, *words, "--sink-length", "1", "--mode", "all", "--controls")
    assert code == 0, error
    configs = found["settings"]["presets"]
    assert list(configs) == ["none", "int8", *names]
    lengths = {name: (config["sink_length"], config["residual_length"]) for name, config in configs.items()}
    assert lengths == dict(zip(configs, [(0, 0), (1, 12), (2, 6), (1, 0), (0, 3)], strict=True))
    for rows in found["parts"]["summary"]["modes"].values():
        assert rows["int4-token:2+6"]["kld"] < rows["int4-token-untransformed"]["kld"]
        assert rows["none"]["bits_per_value"] == 32 and 4 < rows["int4-token:2+6"]["bits_per_value"] < 5


def test_rows_follow_the_convention(tmp_path: Path) -> None:
    """Lines keep their newline, blank ones become empty, two newlines join them; the rest of a window is dropped."""
    (tmp_path / "text.raw").write_text(" a\n \nb\n", encoding="utf-8")
    path = str(tmp_path / "text.raw")
    assert segments.read_source(text=path)[1] == " a\n \nb\n"
    source, text = segments.read_source(text=path, rows=True)
    assert text == " a\n\n\n\n\nb\n" and source["convention"] == "rows joined by two newlines"
    found = segments.cut(torch.arange(len(text)), models.llama(), window=4)
    assert found.ids.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]] and found.begins == [0, 4]


def test_calibration_is_told(folder: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("Another text, of which there is enough.\n" * 40, encoding="utf-8")
    words = ("--calibrate", str(tmp_path / "other.txt"), "--calibrate-for", "int8", "--mode", "simulated")
    code, found, error = run(capsys, folder, tmp_path, *words)
    assert code == 0, error
    told = found["settings"]["calibration"]
    assert told["data"] == "other.txt" and told["preset"] == "int8" and list(told["layers"]) == ["0", "1"]
    code, _, error = run(capsys, folder, tmp_path, "--mode", "simulated")
    assert code == 2 and "`--output` cannot be used" in error


def test_a_prompt_is_fed_at_once_and_not_scored(
    folder: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ("--prompt", "12", "--mode", "all", "--chunk", "1", "--preset", "int4-token:2+3")
    code, found, error = run(capsys, folder, tmp_path, *words)
    assert code == 0, error
    assert found["settings"]["first_chunk"] == 12 and found["settings"]["begins"][0] == 0
    scored = WINDOW - 1 - 12
    for mode, rows in found["parts"]["summary"]["modes"].items():
        windows = len(found["settings"]["begins"])
        assert rows["int8"]["pairs_read"] == windows * 2 * causal_pairs(WINDOW - 1, 12), mode
        assert rows["int8"]["scored_tokens"] == windows * scored and rows["int8"]["by_position"]["begin"][0] >= 12
        assert {part["int8"]["tokens"] for name, part in found["parts"].items() if name.startswith(mode)} == {scored}
        other = found["parts"]["summary"]["modes"]["decode"]
        assert all(rows[name]["kld"] == pytest.approx(other[name]["kld"], rel=1e-2, abs=1e-7) for name in rows), mode


def test_overlapping_windows_score_what_is_new(folder: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, found, _ = run(capsys, folder, tmp_path, "--stride", "10", "--mode", "simulated")
    parts = found["parts"]
    assert [parts[f"simulated {begin}"]["int8"]["tokens"] for begin in found["settings"]["begins"][:2]] == [23, 10]


def test_windows_of_one_forward_score_as_alone(
    folder: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """... whichever of them a record has already: here the second of three."""
    _, alone, _ = run(capsys, folder, tmp_path)
    begins = alone["settings"]["begins"]
    kept = dict(alone, parts={part: alone["parts"][part] for part in ("gate", f"chunked {begins[1]}")})
    (tmp_path / "out.json").write_text(json.dumps(kept), encoding="utf-8")
    monkeypatch.setattr(perplexity_run, "segments_at_once", lambda *_: 2)
    code, together, error = run(capsys, folder, tmp_path)
    assert code == 0, error
    for begin in begins:
        for name, window in together["parts"][f"chunked {begin}"].items():
            expected = alone["parts"][f"chunked {begin}"][name]
            assert window["nll"] == pytest.approx(expected["nll"], rel=1e-4)
            assert window["kld"] == pytest.approx(expected["kld"], rel=1e-2, abs=1e-5)
            assert window["pairs_read"] == expected["pairs_read"]


def test_as_many_windows_at_once_as_caches_may_take() -> None:
    sizes = {"none": {"bytes_per_token": 2**17}, "int4-token": {"bytes_per_token": 2**15}}
    assert perplexity_run.segments_at_once(SimpleNamespace(device=torch.device("cpu")), 2048, sizes) == 1
    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    assert [perplexity_run.segments_at_once(on_gpu, window, sizes) for window in (2048, 512, 2**15)] == [1, 7, 1]


def test_steps_move_with_every_forward(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps together tell as many tokens as were announced, in many parts, and none more than its own."""
    told: list[list[int]] = []
    announced: list[int] = []

    @contextlib.contextmanager
    def measuring(record: Any, where: str, total: int, **options: Any) -> Iterator[Any]:
        announced.append(total)

        def tell(done: int = 0, /, doing: str | None = None) -> None:
            if doing is not None and not doing.startswith("the check of modes, "):
                told.append([])
            told[-1].append(done)

        yield tell

    monkeypatch.setattr(perplexity_run, "measuring", measuring)
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    words = ["--text", str(tmp_path / "text.txt"), "--window", "24", "--tokens", "50", "--chunk", "5", "--details"]
    assert cli.main(["eval", "perplexity", folder, "--dtype", "float32", "--preset", "int8", *words]) == 0
    assert sum(map(sum, told)) == announced[0] and min(min(parts) for parts in told) >= 0
    of_check, of_window = told[0], told[1]
    assert sum(part > 0 for part in of_check) > 40 and sum(part > 0 for part in of_window) >= 5


def test_an_estimate_is_told_of_long_work(capsys: pytest.CaptureFixture[str]) -> None:
    perplexity_run.tell_estimate(29.0, None)
    assert capsys.readouterr().err == ""
    perplexity_run.tell_estimate(90.0, None)
    assert capsys.readouterr().err == "eval perplexity: about 1.5 minutes.\n"
    perplexity_run.tell_estimate(600.0, time.monotonic() + 299.9)
    assert capsys.readouterr().err == "eval perplexity: about 10.0 minutes. What does not fit into 5.0 is left out.\n"


def test_an_interrupted_run_goes_on(
    folder: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def compare(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    original = perplexity_run.compare
    monkeypatch.setattr(perplexity_run, "compare", compare)
    monkeypatch.setattr(perplexity_run, "segments_at_once", lambda *_: 1)  # on a GPU, all fit into one forward
    code, found, _ = run(capsys, folder, tmp_path)
    assert code == 130 and list(found["parts"]) == ["gate", "chunked 0", "summary"]
    code, found, error = run(capsys, folder, tmp_path)
    assert code == 0 and len(calls) == 4, error
    code, _, error = run(capsys, folder, tmp_path, "--chunk", "6")
    assert code == 2 and "`chunk` was 5 and is 6. Name another file, or remove this one." in error


def test_what_fails_the_run(
    folder: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(gate.Gate, "check_modes", lambda *_, **__: {})  # which would see it first
        models.read_nothing(patch)
        code, found, error = run(capsys, folder, tmp_path)
    assert code == 1 and "preset int8 must read 550 (query, token) pairs from codes, got 0. Some layer" in error
    assert list(found["parts"]) == ["gate"]

    def out_of_memory(*args: Any, **kwargs: Any) -> Any:
        raise OutOfMemory("int8")

    monkeypatch.setattr(perplexity_run, "compare", out_of_memory)
    code, _, error = run(capsys, folder, tmp_path)
    assert code == 2 and "`--window` must fit into memory, got 24, too much for chunked, window 1" in error
    (tmp_path / "out.json").unlink()
    monkeypatch.setattr(gate, "GATE_FLOAT32", -1.0)  # rounding can make a divergence of zero negative
    code, _, error = run(capsys, folder, tmp_path)
    assert code == 1 and "must give the same distribution " in error


@pytest.mark.parametrize(
    "words, message",
    [
        (["--preset", "int9"], "`--preset` must be one of none, int8, "),
        (["--window", "65"], "`--window` must be at least 3 and at most the model's 64 positions, got 65."),
        (["--stride", "23"], "`--stride` must be the window or less than it by 2, got 23 with 24 tokens."),
        (["--chunk", "0"], "`--chunk` must be at least 1, got 0."),
        (["--prompt", "0"], "`--prompt` must be at least 1, got 0."),
        (
            ["--prompt", "23"],
            "`--window` must be at least 25 and at most the model's 64 positions with --prompt 23, got 24.",
        ),
        (
            ["--prompt", "9", "--stride", "9"],
            "`--stride` must be left out with --prompt, got 9. Windows of a prompt do not overlap.",
        ),
        (["--inject-outliers", "0"], "nothing can be injected into "),
        (["--tokens", "100000"], "`--tokens` must be at most "),
        (["--dataset", "x"], "`--text` or `--dataset` must be given, got both. Add --text FILE."),
        (["--split", "train"], "`--split` must come with --dataset, got it without. Leave it out."),
        (["--field", "page"], "`--field` must come with --dataset, got it without. Leave it out."),
        (["--calibrate-for", "int8"], "`--calibrate-for` must come with --calibrate, got it alone. Add --calibrate "),
        (["--device", "nowhere"], "`--device` must be a torch device"),
    ],
)
def test_argument_errors(
    folder: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], message: str
) -> None:
    code, found, error = run(capsys, folder, tmp_path, *words)
    assert code == 2 and found is None and message in error and len(error.splitlines()) == 1


@pytest.mark.parametrize("text, message", [(" \n", "must hold text, got nothing but white space."), ("A", "must fill")])
def test_text_errors(folder: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, message: str) -> None:
    code, _, error = run(capsys, folder, tmp_path, text=text)
    assert code == 2 and message in error and len(error.splitlines()) == 1


def test_data_sets_that_cannot_be_read(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_dataset(*args: Any, **kwargs: Any) -> Any:
        raise FileNotFoundError("no route to host")

    words = ["eval", "perplexity", folder, "--dataset", "wikitext:wikitext-2-raw-v1"]
    for module, message in (
        (None, "`--dataset` needs the package datasets, which is not installed."),
        (
            SimpleNamespace(load_dataset=load_dataset),
            "`--dataset` must be one that can be loaded, with --split test and --field text, got "
            "wikitext:wikitext-2-raw-v1: no route to host",
        ),
    ):
        monkeypatch.setitem(sys.modules, "datasets", module)
        assert cli.main(words) == 2
        assert message in capsys.readouterr().err
    assert cli.main([*words, "--rows"]) == 2
    assert "`--rows` must come with --text, got it without. Rows of a data set are joined" in capsys.readouterr().err


def test_the_gate_lets_flipped_codes_pass() -> None:
    """A sum in another order flips codes at rounding boundaries. Layer after layer, that takes correct modes apart."""
    model = copy.deepcopy(models.llama(num_hidden_layers=8))
    inject_key_outliers(model, 3, 100.0)
    ids = torch.randint(3, models.VOCAB_SIZE, (1, gate.GATE_TOKENS))
    for name in ("int8", "int4-token", "int4-g32"):
        (found,) = gate.Gate(model, ids, {name: KVQuantConfig.from_preset(name)}).check_modes(32).values()
        assert max(found["between"].values()) < 1e-5 * found["kld"]


def test_the_gate_sees_one_token_that_is_exact_in_one_mode_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_more(self: SimulatedLayer, kv_format: KVFormat, n0: int, tokens: int, device: torch.device) -> torch.Tensor:
        is_exact = original(self, kv_format, n0, tokens, device)
        is_exact[..., n0] = True
        return is_exact

    original = SimulatedLayer._is_exact
    monkeypatch.setattr(SimulatedLayer, "_is_exact", one_more)
    ids = torch.randint(3, models.VOCAB_SIZE, (1, gate.GATE_TOKENS))
    config = KVQuantConfig.from_preset("int4-token", sink_length=1, residual_length=9)
    with pytest.raises(
        RefusedResult, match="preset int4-token must give the same distribution simulated and decode within "
    ):
        gate.Gate(models.llama(), ids, {"int4-token": config}).check_modes(32)


def test_the_gate_says_when_the_model_is_wrong_by_itself() -> None:
    """transformers' Jamba forgets its state at the second chunk, with any cache."""
    ids = torch.randint(3, models.VOCAB_SIZE, (1, gate.GATE_TOKENS))
    message = r"JambaForCausalLM must give the same distribution for chunks and for single tokens within 1\.0e-06"
    with pytest.raises(RefusedResult, match=message):
        gate.Gate(models.family("jamba"), ids, {"none": KVQuantConfig.from_preset("none")}).check_modes(32)


def test_an_inexact_control_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "GATE_FLOAT32", -1.0)
    ids = torch.randint(3, models.VOCAB_SIZE, (1, 12))
    with pytest.raises(
        RefusedResult, match=r"control: `none` must be within -1\.0 nats of the unquantised cache, got "
    ):
        gate.Gate(models.llama(), ids, {"none": KVQuantConfig.from_preset("none")}).run_controls()
