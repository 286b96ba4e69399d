"""That the scripts in `evals/` measure what they say, and abort where a number would mean nothing.

`fidelity.py` runs on a few tokens. `bench_decode.py` and `bench_chunks.py` need a GPU to time anything: here they run
on the CPU with their clock replaced, over tiny shapes, so that everything but the times is real. `bench_generate.py`
runs on a CPU as it is, with a tiny model. Timing decides no test.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import models
import pytest
import torch
from rich.console import Console
from test_capture import Recorded
from test_preflight import build

from hf_kvquant import PRESETS, KVQuantCache
from hf_kvquant.graphs import capture
from hf_kvquant.upstream.releases import ASSISTS_STATIC_CACHES, CACHE

ROOT = Path(__file__).resolve().parents[1]
TEXT = """
 = A heading =

 The village is located in the centre of the city . It was first settled in 1868 , and its population was 2,000 .
 The river rises in the north of the country and flows south for about 300 kilometres before it reaches the sea .

 = Another heading =

 The university was founded in 1868 by a group of local merchants . It is a public research university .
"""
# Bytes of a token of `int4` in 2 layers with 2 heads of 32: keys have a scale and a zero a channel and 128 tokens.
FOUR_BITS = 4 * (16 + 32 * 4 // 128) + 4 * (16 + 4)


@pytest.fixture(scope="module")
def fidelity() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "evals"))
        yield importlib.import_module("fidelity")


def run(fidelity: ModuleType, folder: Path, *more: str) -> dict[str, Any]:
    """The results of a short run; the JSON line and the file hold the same."""
    (folder / "text.raw").write_text(TEXT, encoding="utf-8")
    arguments = ["--data", str(folder / "text.raw"), "--window", "36", "--tokens", "60", "--chunk", "5"]
    arguments += ["--preset", "int8", "--preset", "int4-token", "--output", str(folder / "out.json")]
    arguments += more
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr(sys, "argv", [str(ROOT / "evals" / "fidelity.py"), *arguments])
        assert fidelity.main() == 0
    results: dict[str, Any] = json.loads((folder / "out.json").read_text(encoding="utf-8"))
    assert json.loads(printed.getvalue().splitlines()[-1]) == results
    return results


@pytest.fixture(scope="module")
def plain(fidelity: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of a run without more words."""
    return run(fidelity, tmp_path_factory.mktemp("plain"))


def test_results(plain: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    results = plain
    assert results["command"].startswith("python evals/fidelity.py --data text.raw --window 36")
    assert str(tmp_path_factory.getbasetemp()) not in json.dumps(results)
    # 36 tokens, of which the last is only predicted and the first is the exact first chunk.
    assert results["scored_tokens"] == 2 * 34
    assert results["window_indices"][0] == 0 and len(results["window_indices"]) == 2
    assert results["convention"] == "rows joined by two newlines, whole windows, per token"
    presets = results["presets"]
    assert list(presets) == ["none", "int8", "int4-token"]
    for preset, row in presets.items():
        layers = 0 if preset == "none" else 7
        assert row["pairs_read"] == row["pairs_expected"] == 2 * layers * (35 * 36 // 2 - 1)
        assert len(row["windows"]) == 2
        assert row["kld"] == pytest.approx(sum(window["kld"] for window in row["windows"]) / 2)
        assert row["perplexity"] == pytest.approx(results["reference_perplexity"] * (1 + row["perplexity_change"]))
    assert presets["none"]["kld"] < 1e-6 < presets["int8"]["kld"] < presets["int4-token"]["kld"]
    # The checkpoint's 16 bits, though it is measured in float32.
    assert results["dtype"] == "float32"
    assert presets["none"]["bytes_per_token"] == 7168 and presets["none"]["bits_per_value"] == 16


def test_injection_and_calibration_are_told(fidelity: ModuleType, plain: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text(
        40 * "Another text, of which there is enough to calibrate on.\n", encoding="utf-8"
    )
    hard = ["--inject-outliers", "--inject-bias", "--preset", "int4-token-untransformed"]
    calibrate = ["--calibrate", str(tmp_path / "other.txt"), "--calibrate-for", "int4-token"]
    assert plain["injected_outliers"] is plain["injected_bias"] is plain["calibration"] is None
    injected = run(fidelity, tmp_path, *hard)
    assert injected["injected_outliers"] == {"pairs_per_head": 3, "factor": 10.0}
    assert injected["injected_bias"] == {"norm": 100.0} and injected["calibration"] is None
    calibrated = run(fidelity, tmp_path, *hard, *calibrate)
    told = calibrated["calibration"]
    assert told["data"] == "other.txt" and len(told["data_sha256"]) == 64 and told["preset"] == "int4-token"
    assert 512 <= told["tokens"] <= 16384 and len(told["layers"]) == 7
    assert all(layer["has_center"] and layer["placement"] == "weights" for layer in told["layers"].values())
    # The same function but for the bias, which softmax nearly ignores; and what calibration is for.
    assert calibrated["reference_perplexity"] == pytest.approx(injected["reference_perplexity"], rel=1e-3)
    rows = calibrated["presets"]
    without, added, left = (each["presets"]["int4-token"]["kld"] for each in (plain, injected, calibrated))
    hurt = injected["presets"]["int4-token-untransformed"]["kld"]
    for kld in (added, left):
        assert kld - without < 0.05 * (hurt - without), "with or without calibration, most of it is undone"
    assert rows["int4-token"]["kld"] < rows["int4-token-untransformed"]["kld"]
    assert rows["int4-token-untransformed"]["config"]["transforms"] == []


def test_what_is_found_within_a_budget_is_measured(
    fidelity: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    other = tmp_path / "other.txt"
    other.write_text(30 * "Another text, of which there is enough to find a config.\n", encoding="utf-8")
    model = build(max_position_embeddings=2048)
    with torch.no_grad():
        model.get_output_embeddings().weight *= 0.25  # so that rounding is far below what ways of feeding may differ by
    folder = models.save(model, tmp_path / "model")
    results = run(fidelity, tmp_path, "--model", folder, "--bits", "8.125", "--bits-text", str(other))
    assert list(results["presets"]) == ["none", "int8", "int4-token", "bits-8.125"]
    assert results["presets"]["bits-8.125"]["bits_per_value"] <= 8.125
    assert results["bits_text"]["text"] == "other.txt" and len(results["bits_text"]["sha256"]) == 64
    monkeypatch.setattr(sys, "argv", ["fidelity.py", "--data", "x", "--bits", "4"])
    with pytest.raises(SystemExit):
        fidelity.main()
    assert "--bits must come with --bits-text, got it alone." in capsys.readouterr().err


def test_a_run_that_cannot_be_is_told_in_a_line(
    fidelity: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["fidelity.py", "--data", str(tmp_path / "nowhere.raw")])
    assert fidelity.main() == 2
    error = capsys.readouterr().err
    assert "`--text` must be a text file, got" in error and len(error.splitlines()) == 1


@pytest.mark.parametrize("option", ["--text", "--dataset", "--rows"])
def test_what_is_measured_is_data(
    fidelity: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    """Options that `hf-kvquant eval perplexity` has beside it used to be taken, and to replace it or to do nothing."""
    monkeypatch.setattr(sys, "argv", ["fidelity.py", "--data", "text.raw", option, "other.raw"])
    with pytest.raises(SystemExit):
        fidelity.main()
    assert f"unrecognized arguments: {option} other.raw" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["fidelity.py", "--data", "x", "--mode", "all"])
    with pytest.raises(SystemExit):
        fidelity.main()
    assert "--mode must be a single mode, got all. Run each by itself." in capsys.readouterr().err


# --- the GPU benchmark ------------------------------------------------------------------------------------------------


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`bench_decode.py` over two tiny shapes on the CPU, where every call takes 10 us and memory reads 100 GB/s."""
    monkeypatch.syspath_prepend(str(ROOT / "evals"))
    bench = importlib.import_module("bench_decode")
    cases, peers, timing = (importlib.import_module(name) for name in ("decode_cases", "decode_peers", "gpu_timing"))

    def time_calls(run: Callable[[int], object], num_sets: int, replays: int, can_fall_back: bool = False) -> Any:
        for i in range(num_sets):
            run(i)
        return timing.Timing(10.0, 9.0, 11.0, num_sets, True)

    shapes = {
        "64x8k": cases.Shape(2, 4, 2, 64, 100),
        "64x16k-ragged": cases.Shape(3, 2, 2, 40, 70, is_ragged=True),
        "64x16k-padded": cases.Shape(3, 2, 2, 40, 300, is_ragged=True, is_padded=True),
    }
    cpu = torch.device("cpu")
    for module in (bench, peers):
        monkeypatch.setattr(module, "DEVICE", cpu)
        monkeypatch.setattr(module, "sets_needed", lambda num_bytes: 2)
    monkeypatch.setattr(bench, "time_calls", time_calls)
    monkeypatch.setattr(timing, "time_calls", time_calls)
    monkeypatch.setattr(bench, "CASES", shapes)
    monkeypatch.setattr(bench, "PROMPT", (1, 2, 64, 48))
    monkeypatch.setattr(bench, "gpu_card", lambda: {"gpu": "none", "driver": None, "cuda": None})
    monkeypatch.setattr(bench, "gpu_state", dict)
    monkeypatch.setattr(timing.ReadBandwidth, "gbps", lambda self, num_bytes: 100.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench.ops, "has_kernels", lambda device_type: True)
    monkeypatch.setattr(bench.ops, "num_slots_of", lambda device, num_kv_heads, num_sequences: (4, 8))
    decode = bench.ops.decode
    monkeypatch.setattr(bench.ops, "decode", lambda *args, counters, **kwargs: decode(*args, **kwargs))
    return bench


def run_bench(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], path: Path, *words: str
) -> tuple[dict[str, Any], str]:
    """The results of a run and what it printed; the JSON line and the file hold the same."""
    monkeypatch.setattr(sys, "argv", [str(ROOT / "evals" / "bench_decode.py"), "--output", str(path), *words])
    bench.main()
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    printed = capsys.readouterr().out
    assert json.loads(printed.splitlines()[-1]) == results
    return results, printed


def test_bench_results(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    results, printed = run_bench(bench, monkeypatch, capsys, tmp_path / "decode.json")
    assert results["command"] == "python evals/bench_decode.py --output decode.json"
    case, ragged, padded = results["cases"]
    rows = {row["preset"]: row for row in case["rows"]}
    assert list(rows) == ["int8", "int4", "int4-channel", "int4-token", "int4-g32", "k8v4", "fp8"]
    # 2 sequences of 100 tokens, 2 heads of 64, keys and values: codes, and two bytes for each scale and zero.
    assert rows["fp8"]["bytes"] == 2 * 100 * 2 * 2 * (64 + 2)
    assert rows["int4-g32"]["bytes"] == 2 * 100 * 2 * 2 * (32 + 2 * 4)
    # The first 4 and the newest 12 are dense.
    assert rows["int8"]["bytes"] == 2 * 2 * 2 * ((4 + 12) * 2 * 64 + (100 - 4 - 12) * (64 + 2))
    # Half a block less; the keys of what is left are dense.
    assert rows["int4-channel"]["bytes"] == 2 * (100 - 64) * 2 * (2 * 64 + 32 + 2 * 2)
    # And the values of the first 4 and the newest 28.
    assert rows["int4"]["bytes"] == 2 * 2 * ((36 + 4 + 28) * 2 * 64 + 4 * (32 + 2 * 2))
    assert rows["int8"]["gbps"] == pytest.approx(rows["int8"]["bytes"] / 10e-6 / 1e9)
    assert rows["int8"]["share"] == pytest.approx(rows["int8"]["gbps"] / 100)
    assert all(row["relative_error"] < 0.02 and row["speedup"] is None for row in rows.values())
    # Groups of 32 do not divide 40 channels; a ragged batch counts the tokens that it holds.
    assert [row["preset"] for row in ragged["rows"]] == ["int8", "int4", "int4-channel", "int4-token", "k8v4", "fp8"]
    assert 3 <= ragged["shape"]["num_tokens"] < 3 * 70
    assert ragged["rows"][-1]["bytes"] == ragged["shape"]["num_tokens"] * 2 * 2 * (40 + 2)
    assert [row["preset"] for row in results["prompt"]] == [
        "int8",
        "int4",
        "int4-channel",
        "int4-token",
        "int4-g32",
        "k8v4",
        "fp8",
    ]
    dense = results["prompt"][-1]["dense"]  # the way back: as many bytes in as many microseconds
    assert dense["share"] == results["prompt"][-1]["share"] and "fp8, dequantised" in printed
    # Presets that transform keys are timed without as well.
    assert rows["int8"]["plain"]["share"] == rows["int8"]["share"] and "plain" not in rows["fp8"]
    assert list(rows["int4-token"]["single"]) == ["center", "smooth", "rotate"] and "single" not in rows["fp8"]
    assert ragged["rows"][0]["single"] == {}
    assert "int8, plain keys" in printed and "fp8, plain keys" not in printed
    # Presets are measured over pages, too.
    assert rows["fp8"]["pages"]["share"] == rows["fp8"]["share"] and rows["fp8"]["pages"]["split_plan_us"] == 10
    assert all(row["pages"]["relative_error"] < 0.02 for row in rows.values())
    assert "fp8, pages" in printed and "pages" in ragged["rows"][0]
    # Padded batches are measured with a split plan, too. Padding does not count as read.
    row = padded["rows"][-1]
    assert row["bytes"] == padded["shape"]["num_tokens"] * 2 * 2 * (40 + 2) and padded["shape"]["num_tokens"] < 900
    assert row["planned"]["split_plan_us"] == 10 and all(each["planned"]["share"] for each in padded["rows"])
    assert "int8, split plan" in printed and "planned" not in ragged["rows"][0]
    checks = {(check["unit"], check["case"], check["preset"]): check for check in results["checks"]}
    assert checks["planned", "64x16k-padded", "int4-token"]["measured"] == padded["rows"][3]["planned"]["share"]
    assert checks["dense", "prompt", "int8"]["measured"] == results["prompt"][0]["dense"]["share"]
    assert "int8 at prompt: dequantised at 80% of copy bandwidth or more" in printed
    assert "int4-token at 64x16k-padded: at least 80% of read bandwidth with a split plan" in printed
    # A few GB/s of 100 miss a share; what was not measured is neither reached nor missed.
    assert checks["share", "64x8k", "int8"]["reached"] is False
    assert (
        checks["points", "64x8k", "int8"]["measured"] == pytest.approx(0)
        and checks["points", "64x8k", "int8"]["reached"] is True
    )
    assert "int8 at 64x8k: a transform takes at most 3 points of read bandwidth" in printed
    assert checks["us", "1x8k", "int8"]["reached"] is checks["times", "64x8k", "int8"]["reached"] is None
    assert "int8 at 64x8k: at least 96% of read bandwidth" in printed and "missed" in printed
    assert str(tmp_path) not in json.dumps(results)


def test_bench_lengths(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Padded batches of any lengths: one row for no plan, with the figures for a plan and for pages in it."""
    words = ("--lengths", "1-60", "40-60", "--batches", "5", "2", "--presets", "int8", "int4-token")
    results, printed = run_bench(bench, monkeypatch, capsys, tmp_path / "uneven.json", *words)
    assert [case["case"] for case in results["cases"]] == ["5x1-60", "5x40-60", "2x1-60", "2x40-60"]
    for case in results["cases"]:
        shape = case["shape"]
        assert shape["is_padded"] and shape["shortest"] * shape["batch"] <= shape["num_tokens"] <= 60 * shape["batch"]
        assert [row["preset"] for row in case["rows"]] == ["int8", "int4-token"] and not case["failures"]
        for row in case["rows"]:
            assert row["planned"]["share"] == row["pages"]["share"] == row["share"] > 0
    assert not results["prompt"] and "5 x 40 to 60, padded" in printed and "goals" not in printed
    for words, message in (
        (("--lengths", "60-40"), "must be two lengths such as 1024-16384, got '60-40'"),
        (("--lengths", "1-60", "--cases", "64x8k"), "argument --cases: not allowed with argument --lengths"),
        (("--lengths", "1-60", "--batches", "0"), "argument --batches: must be at least 1, got 0"),
    ):
        with pytest.raises(SystemExit):
            bench.parse(list(words))
        assert message in capsys.readouterr().err


def test_bench_peers(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A peer that fails is named and left out; the fastest bf16 kernel is what ours are compared with."""
    peers = sys.modules["decode_peers"]

    def make(shape: Any) -> Iterator[Any]:
        def fail(i: int) -> None:
            raise RuntimeError("no kernel in /somewhere/else.so\nat all")

        yield peers.Peer("bf16 broken", {"only": fail}, 2, 100)
        yield peers.Peer("bf16 slow", {"broken": fail, "whole": lambda i: None}, 2, 100)
        yield peers.Peer("int4 FBGEMM, 1 group", {"whole": lambda i: None}, 2, 25)

    monkeypatch.setattr(peers, "PEERS", {"torch": make, "not-installed-at-all": make})
    words = ("--peers", "--cases", "64x8k", "--presets", "none", "int8")
    results, printed = run_bench(bench, monkeypatch, capsys, tmp_path / "decode.json", *words)
    (case,) = results["cases"]
    assert results["peer_versions"]["torch"] and results["peer_versions"]["not-installed-at-all"] is None
    assert [(row["peer"], row["form"]) for row in case["peers"]] == [
        ("bf16 slow", "whole"),
        ("int4 FBGEMM, 1 group", "whole"),
    ]
    assert case["failures"] == ["torch: RuntimeError: no form of ['only'] runs (RuntimeError: no kernel in else.so)"]
    assert case["best_bf16"]["peer"] == "bf16 slow" and "no kernel in else.so" in printed
    assert [row["speedup"] for row in case["rows"]] == [1.0, 1.0]
    assert [row["preset"] for row in results["prompt"]] == ["int8"]


def test_bench_torch_peers(bench: ModuleType) -> None:
    """The forms of PyTorch's attention compute the same; the others are not for every shape."""
    cases, peers = sys.modules["decode_cases"], sys.modules["decode_peers"]
    shape = cases.Shape(2, 4, 2, 64, 100)
    flash, cudnn = peers.torch_peers(shape)
    assert flash.num_bytes == cudnn.num_bytes == 2 * 100 * 2 * 2 * 64 * 2
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        monkey = pytest.MonkeyPatch()
        monkey.setattr(peers, "sdpa_kernel", lambda backend: contextlib.nullcontext())
        as_heads, as_rows = (run(1) for run in flash.forms.values())
        monkey.undo()
    torch.testing.assert_close(as_rows.reshape(as_heads.shape), as_heads)
    assert not list(peers.torch_peers(cases.Shape(2, 4, 2, 64, 100, is_ragged=True)))
    assert not list(peers.flashinfer_peers(shape)) and not list(peers.fbgemm_peers(shape))


def test_bench_wrong_result_aborts(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    decode = bench.ops.decode

    def wrong(*args: Any, **kwargs: Any) -> Any:
        out, lse = decode(*args, **kwargs)
        out[-1] *= 1.1  # the last sequence alone
        return out, lse

    monkeypatch.setattr(bench.ops, "decode", wrong)
    with pytest.raises(SystemExit, match=r"2 x 100, 4/2 heads of 64, int8: relative error .* exceeds its bound"):
        run_bench(bench, monkeypatch, capsys, tmp_path / "decode.json", "--presets", "int8")


def test_bench_failure_is_named(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A preset that cannot run at one shape does not take the others along."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("decode: too large")

    monkeypatch.setattr(bench.ops, "decode", fail)
    results, _ = run_bench(bench, monkeypatch, capsys, tmp_path / "decode.json", "--presets", "int8", "int4-token")
    assert all(case["rows"] == [] for case in results["cases"])
    assert results["cases"][0]["failures"] == [
        f"{name}: RuntimeError: decode: too large" for name in ("int8", "int4-token")
    ]
    assert all(check["reached"] is None for check in results["checks"] if check["case"] != "prompt")


def test_bench_sets_exceed_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "evals"))
    timing = importlib.import_module("gpu_timing")
    for num_bytes in (1e6, 59e6, 60e6, 61e6, 4e9):
        num_sets = timing.sets_needed(num_bytes)
        assert num_sets >= 4 and num_sets * num_bytes >= 240e6
        assert timing.calls_needed(num_sets) >= 16 and timing.calls_needed(num_sets) % num_sets == 0
        assert timing.calls_needed(num_sets, min_calls=1) == num_sets


def test_bench_goals_are_of_cases_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "evals"))
    cases = importlib.import_module("decode_cases")
    for goal in cases.GOALS:
        assert goal.preset in PRESETS and (goal.case == "prompt" or goal.case in cases.CASES)
        if goal.unit == "share" and goal.case != "prompt":
            num_bytes = cases.bytes_held(cases.CASES[goal.case], cases.layout_of(goal.preset))
            low, high = {"128x16k": (2e9, 5e9), "16x8k": (130e6, 170e6), "8x8k": (130e6, 170e6)}.get(
                goal.case, (0.5e9, 2e9)
            )
            assert low <= num_bytes <= high, goal.describe()


@pytest.mark.parametrize(
    ("unit", "value", "measured", "reached"),
    [("us", 5, 5.0, True), ("us", 5, 5.1, False), ("share", 0.96, 0.96, True), ("share", 0.96, 0.95, False)],
)
def test_bench_goals(monkeypatch: pytest.MonkeyPatch, unit: str, value: float, measured: float, reached: bool) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "evals"))
    cases = importlib.import_module("decode_cases")
    monkeypatch.setattr(cases, "GOALS", [cases.Goal(unit, "1x1k", "int8", value)])
    row = {"preset": "int8", "median_us": measured, "share": measured}
    (check,) = cases.check_goals({"cases": [{"case": "1x1k", "rows": [row], "peers": []}], "prompt": []})
    assert check["measured"] == measured and check["reached"] is reached


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--cases", "64x9k"], "invalid choice: '64x9k'"), (["--presets", "int5"], "invalid choice: 'int5'")],
)
def test_bench_argument_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "evals"))
    with pytest.raises(SystemExit):
        importlib.import_module("bench_decode").parse(words)
    assert message in capsys.readouterr().err


def test_bench_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "evals"))
    bench = importlib.import_module("bench_decode")
    quick, whole = bench.parse(["--quick", "--presets", "fp8"]), bench.parse([])
    assert quick.cases == bench.QUICK_CASES and quick.presets == ["fp8"] and quick.replays < whole.replays
    assert whole.cases == list(bench.CASES) and whole.presets == bench.DEFAULT_PRESETS
    monkeypatch.setattr(sys, "argv", ["bench_decode.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="there is no GPU"):
        bench.main()


# --- the benchmark of generate ----------------------------------------------------------------------------------------


@pytest.fixture
def generating(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`bench_generate.py`, where memory reads 10 GB/s."""
    monkeypatch.syspath_prepend(str(ROOT / "evals"))
    bench = importlib.import_module("bench_generate")
    monkeypatch.setattr(bench, "bandwidth_of", lambda device: 10.0)
    return bench


def run_generating(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], path: Path, *words: str
) -> tuple[dict[str, Any], str]:
    """The results of a run on the CPU and what it printed; the JSON line and the file hold the same."""
    arguments = ["--model", "tiny", "--device", "cpu", "--new-tokens", "8", "--output", str(path), *words]
    monkeypatch.setattr(sys, "argv", [str(ROOT / "evals" / "bench_generate.py"), *arguments])
    bench.main()
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    printed = capsys.readouterr().out
    assert json.loads(printed.splitlines()[-1]) == results
    return results, printed


def test_generate_results(
    generating: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail(model: Any, capacity: int) -> Any:
        raise ImportError("no such package in /somewhere/else.so")

    monkeypatch.setitem(generating.SYSTEMS, "absent", fail)
    words = ("--cases", "1x20,2x12", "--systems", "dynamic,static,absent,int8,int4-static")
    results, printed = run_generating(generating, monkeypatch, capsys, tmp_path / "generate.json", *words)
    # Weights of two layers, the last norm and the output; of the embedding a step reads a row.
    assert results["weight_bytes_read"] == 2 * (2 * (3 * 64 * 128 + 3 * 64 * 96 + 2 * 64) + 64 + 96 * 64)
    first, second = results["cases"]
    assert (first["case"], second["batch"], second["context"]) == ("1x20", 2, 12)
    rows = {row["system"]: row for row in second["rows"]}
    assert list(rows) == ["dynamic", "static", "int8", "int4-static"]
    # Two layers, keys and values, two heads of 32: bf16, or codes with scales, and zeros for int4.
    assert [row["bytes_per_token"] for row in rows.values()] == [512, 512, 8 * (32 + 2), FOUR_BITS]
    for row in (second["floor"], *rows.values()):
        context = 64 if row is second["floor"] else 12
        assert row["cache_bytes"] == 2 * (context + 8) * row["bytes_per_token"]
        assert row["roofline_ms"] == pytest.approx((results["weight_bytes_read"] + row["cache_bytes"]) / 10e6)
        assert row["tokens_per_s"] == pytest.approx(2e3 / row["step_ms"]) and row["prefill_ms"] > 0
        assert row["share"] == pytest.approx(row["roofline_ms"] / row["step_ms"]) and row["calls"] == 2
        assert row["largest"] is row["prefill_peak_bytes"] is row["prefill_chunk"] is None
    assert second["failures"] == [{"system": "absent", "reason": "ImportError: no such package in else.so"}]
    assert "absent: ImportError: no such package in else.so" in printed and "floor (static)" in printed
    assert results["checks"] == [] and str(tmp_path) not in json.dumps(results)


def test_generate_chunks_what_does_not_fit(
    generating: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    call = generating.call

    def small(model: Any, case: Any, num_new: int, arguments: Any) -> Any:
        if case.batch == 2 and arguments.get("prefill_chunk_size", case.context) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return call(model, case, num_new, arguments)

    monkeypatch.setattr(generating, "call", small)
    words = ("--cases", "2x16,2x64", "--systems", "dynamic,int4-static")
    results, _ = run_generating(generating, monkeypatch, capsys, tmp_path / "generate.json", *words)
    fits, does_not = results["cases"]
    assert [row["prefill_chunk"] for row in fits["rows"]] == [2, 2]
    reason = "OutOfMemoryError: CUDA out of memory."
    assert does_not["rows"] == [] and does_not["floor"] is None
    assert does_not["failures"] == [{"system": name, "reason": reason} for name in ("floor", "dynamic", "int4-static")]


def test_generate_refuses_a_fallback(
    generating: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    @contextlib.contextmanager
    def unpatched(model: Any, capacity: int) -> Iterator[Any]:
        yield lambda: {CACHE: KVQuantCache(model.config, "int8")}

    monkeypatch.setitem(generating.SYSTEMS, "unpatched", unpatched)
    words = ("--cases", "1x8", "--systems", "unpatched")
    results, _ = run_generating(generating, monkeypatch, capsys, tmp_path / "generate.json", *words)
    (failure,) = results["cases"][0]["failures"]
    assert failure["reason"].startswith("RuntimeError: attention runs on dequantised tensors: the model or its")


def test_generate_goes_on_with_results(
    generating: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, words = tmp_path / "generate.json", ("--systems", "dynamic", "--resume", "--cases")
    first, _ = run_generating(generating, monkeypatch, capsys, path, *words, "1x8")
    both, _ = run_generating(generating, monkeypatch, capsys, path, *words, "1x8,1x12")
    assert both["cases"][0] == first["cases"][0] and both["cases"][1]["case"] == "1x12"
    assert first["commands"] == [first["command"]] and both["commands"] == [first["command"], both["command"]]
    assert "1x8 " not in both["command"] and "1x8,1x12" in both["command"]
    assert both["cases"][1]["read_gbps"] == 10.0
    path.write_text(json.dumps(both | {"gpu": "another"}), encoding="utf-8")
    message = f"bench_generate: `--resume` must find results of the same gpu, None, got another in {path}. Name another"
    with pytest.raises(SystemExit, match=re.escape(message)):
        run_generating(generating, monkeypatch, capsys, path, *words, "1x16")
    assert json.loads(path.read_text(encoding="utf-8"))["gpu"] == "another"


def test_generate_goals(generating: ModuleType) -> None:
    cases = sys.modules["generate_cases"]
    assert {goal.case for goal in cases.GOALS} == {case.name for case in generating.DEFAULT_CASES}
    assert all(goal.system in generating.SYSTEMS for goal in cases.GOALS)
    steps = {"int4-static": 6.7, "int8-static": 6.8, "int4": 10.6, "dynamic": 10.0}
    rows = [{"system": name, "step_ms": step, "cache_bytes": 4e9} for name, step in steps.items()]
    found = {"case": "1x2k", "floor": {"step_ms": 6.4}, "rows": rows}
    results: dict[str, Any] = {"model": cases.GOALS_OF, "cases": [found, {**found, "case": "8x16k", "floor": None}]}
    results["checks"] = cases.check_goals(results)
    reached = {(check["case"], check["system"], check["unit"]): check["reached"] for check in results["checks"]}
    assert reached["1x2k", "int4-static", "over_floor"] is True
    assert reached["1x2k", "int8-static", "over_floor"] is False
    assert reached["1x2k", "int4", "times"] is False and reached["8x16k", "int4-static", "cache_gb"] is True
    assert reached["1x2k", "int4-capture", "ms"] is reached["8x16k", "int4-static", "over_floor"] is None
    assert reached["64x8k", "int4-static", "over_floor"] is None
    table, console = generating.goals_table(results), Console(file=io.StringIO(), width=300)
    assert table.row_count == 4
    with console.capture() as capture:
        console.print(table)
    text = capture.get()
    assert (
        "6.70, at most floor + 0.3 ms (6.70): reached" in text and "10.60, at most 1.05 times dynamic (10.50)" in text
    )
    assert cases.check_goals({**results, "model": "tiny"}) == []


def test_generate_arithmetic(generating: ModuleType) -> None:
    cases = sys.modules["generate_cases"]
    case = cases.Case.parse("8x16k")
    assert (case.batch, case.context, case.name) == (8, 16384, "8x16k") and cases.Case.parse("2x100").name == "2x100"
    assert cases.roofline_ms(15e9, 5e9, 4000.0) == pytest.approx(5.0) and cases.roofline_ms(15e9, None, 4e3) is None
    # 100 GB, of which 97 can be filled; 20 are no cache, and a token takes 1 MB.
    found = cases.largest(cases.Case(2, 900), total_bytes=100e9, peak_bytes=22e9, cache_bytes=2e9, tokens=1000)
    assert found == {"context": 38500, "batch": 77}
    assert cases.largest(case, total_bytes=None, peak_bytes=1, cache_bytes=1, tokens=1) is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cases", "8k16"], "a case must be batch and context, such as 8x16k or 2x100, got '8k16'"),
        (["--systems", "int4,int5"], "unknown systems ['int5']"),
        (["--new-tokens", "7"], "--new-tokens must be at least 8, got 7"),
        (["--resume"], "--resume needs --output, the results to resume"),
        (["--cases", "turn:8"], "a scenario must be one of turn, chunked, assisted, alone or with two sizes such as "),
        (["--cases", "chat:8:8"], "a scenario must be one of turn, chunked, assisted, alone or with two sizes such as"),
        (["--cases", "assisted:8:12"], "assisted must make at least 13 tokens, got 12"),
        (["--cases", "assisted", "--model", "a/b"], "assisted changes weights, so --model must be one of llama-3-8b"),
    ],
)
def test_generate_argument_errors(
    generating: ModuleType, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        generating.parse(words)
    assert message in capsys.readouterr().err


def test_scenario_results(
    generating: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(capture.RUNNERS, "cpu", Recorded)
    systems = ["dynamic", "static", "int8", "int4-static", "int4-capture"]
    words = ("--cases", "turn:40:8,chunked:50:16,assisted:60:32", "--systems", ",".join(systems))
    results, printed = run_generating(generating, monkeypatch, capsys, tmp_path / "scenarios.json", *words)
    assert results["cases"] == []
    turn, chunked, assisted = results["scenarios"]
    assert (turn["scenario"], turn["kind"], chunked["context"], chunked["size"]) == ("turn:40:8", "turn", 50, 16)
    for scenario, tokens in ((turn, 48), (chunked, 50)):
        rows = {row["system"]: row for row in scenario["rows"]}
        assert list(rows) == systems and scenario["failures"] == []
        # Two layers, keys and values, two heads of 32: bf16, or codes with scales, and zeros for int4.
        sizes = [row["cache_bytes"] for row in rows.values()]
        assert sizes == [tokens * size for size in (512, 512, 8 * (32 + 2), FOUR_BITS, FOUR_BITS)]
        for row in rows.values():
            assert len(row["calls_s"]) == 3 and row["first_token_s"] == sorted(row["calls_s"])[1]
            assert row["peak_bytes"] is None
    # Every system accepts as many proposals as transformers' dynamic cache, and goes on as without.
    rows = {row["system"]: row for row in assisted["rows"]}
    refused = [] if ASSISTS_STATIC_CACHES else ["static"]
    assert list(rows) == [name for name in systems if name not in refused]
    assert rows["int4-capture"]["plain"]["is_captured"] is True
    for way in ("assistant", "lookup"):
        assert 0.5 < rows["dynamic"][way]["accepted"] < 5
        for row in rows.values():
            assert row["plain"]["accepted"] == 0 and row["failures"] == {}
            assert row[way]["accepted"] == rows["dynamic"][way]["accepted"]
            assert row[way]["equal"] is True and row[way]["equal_tokens"] == 32
    assert rows["int8"]["plain"]["is_captured"] is rows["int8"]["lookup"]["is_captured"] is False
    assert [failure["system"] for failure in assisted["failures"]] == refused
    assert "assistant tokens/s" in printed and ("static: ValueError: assisted generate" in printed) == bool(refused)
    again, _ = run_generating(generating, monkeypatch, capsys, tmp_path / "scenarios.json", "--resume", *words)
    assert again["scenarios"] == results["scenarios"]


def test_scenario_of_which_a_part_fails(
    generating: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The other ways of decoding are measured; so is where tokens begin to differ."""
    scenarios = sys.modules["generate_scenarios"]
    decode = scenarios._decode

    def fail(model: Any, scenario: Any, options: Any, arguments: Any) -> Any:
        if "assistant_model" in options:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        figures, tokens = decode(model, scenario, options, arguments)
        return figures, tokens if options else [*tokens[:7], -1, *tokens[8:]]

    monkeypatch.setattr(scenarios, "_decode", fail)
    words = ("--cases", "assisted:60:32", "--systems", "int4-token")
    results, printed = run_generating(generating, monkeypatch, capsys, tmp_path / "scenarios.json", *words)
    (row,) = results["scenarios"][0]["rows"]
    assert row["assistant"] is None and row["failures"] == {"assistant": "OutOfMemoryError: CUDA out of memory."}
    assert row["lookup"]["equal"] is False and row["lookup"]["equal_tokens"] == 7 and "the first 7" in printed
    assert row["plain"]["tokens_per_s"] > 0 and "OutOfMemoryError" in printed


@pytest.mark.parametrize(("model_type", "is_tied"), [("llama", False), ("llama", True), ("qwen2", False)])
def test_weights_that_can_be_guessed(generating: ModuleType, model_type: str, is_tied: bool) -> None:
    """The model goes around the circle; the assistant, its first eighth, is wrong about a fifth of it."""
    scenarios, cases = (sys.modules[name] for name in ("generate_scenarios", "generate_cases"))
    sizes = {**cases.MODELS["tiny"][1], "num_hidden_layers": 16, "vocab_size": 2000, "tie_word_embeddings": is_tied}
    config = generating.AutoConfig.for_model(model_type, **sizes)
    model = generating.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    assistant = scenarios.predictable(model)
    assert len(assistant.model.layers) == 2 and len(model.model.layers) == 16
    shared = [each.model.layers[1].mlp.up_proj.weight.data_ptr() for each in (model, assistant)]
    assert shared[0] == shared[1]
    tokens = torch.arange(1, 1025)  # not the padding token
    with torch.no_grad():
        expected, guessed = (each(tokens[None]).logits[0].argmax(dim=-1) for each in (model, assistant))
    assert torch.equal(expected, tokens.roll(-1))
    assert 0.15 < (guessed != expected).float().mean() < 0.25
    # The prompt goes around as well, but for jumps from a fifth of its tokens.
    prompt = scenarios.circling_prompt(model, 2000)
    assert prompt.shape == (1, 2000) and torch.equal(prompt, scenarios.circling_prompt(model, 2000))
    assert 0.15 < (prompt[0, 1:] != prompt[0, :-1] % 1024 + 1).float().mean() < 0.25


# --- the benchmark of many new tokens ---------------------------------------------------------------------------------


@pytest.fixture
def chunking(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`bench_chunks.py` over tiny shapes on the CPU, where a call takes as many microseconds as it has new tokens."""
    chunks = importlib.import_module("bench_chunks")

    def time_calls(run: Callable[[int], object], num_sets: int, replays: int, **options: Any) -> Any:
        assert options["can_fall_back"]
        shape = run(num_sets - 1).shape  # type: ignore[attr-defined]
        return sys.modules["gpu_timing"].Timing(10.0 * shape[1], 9.0, 11.0, num_sets, shape[1] < 8)

    def peers(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> dict[str, Callable[[int], object]]:
        assert keys.shape == values.shape and len(keys) == 2
        return {name: lambda i: query.transpose(1, 2) for name in ("flash", "cudnn")}

    for name, value in {"time_calls": time_calls, "peers": peers, "sets_needed": lambda num_bytes: 2}.items():
        monkeypatch.setattr(chunks, name, value)
    monkeypatch.setattr(chunks, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(chunks, "CASES", [(1, 200, 1), (1, 200, 4), (2, 100, 16)])
    monkeypatch.setattr(chunks, "gpu_card", lambda: {"gpu": "none"})
    monkeypatch.setattr(chunks, "gpu_state", dict)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return chunks


def run_chunking(chunks: ModuleType, monkeypatch: pytest.MonkeyPatch, path: Path, *words: str) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", [str(ROOT / "evals" / "bench_chunks.py"), "--output", str(path), *words])
    chunks.main()
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return results


def test_chunk_results(
    chunking: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    results = run_chunking(chunking, monkeypatch, tmp_path / "chunks.json", "--presets", "int8", "int4-token", "fp8")
    printed = capsys.readouterr().out
    assert json.loads(printed.splitlines()[-1]) == results
    one, four, sixteen = results["cases"]
    assert list(one["us"]) == ["flash", "cudnn", "int8", "int4-token", "fp8"]
    assert one["us"]["int8"] == 10 and four["us"]["int4-token"] == 40 and four["timings"]["int8"]["num_sets"] == 2
    assert list(four["speedup"]) == ["int8", "int4-token", "fp8"] and four["speedup"]["int8"] == 1.0
    assert four["over_one"]["int4-token"] == 4.0 and list(four["over_one"]) == list(four["us"])
    # One token is not compared with itself, nor 16 with one of another batch.
    assert one["over_one"] is sixteen["over_one"] is None
    assert "1 x 200 + 4" in printed and "160.0*" in printed and "40.0*" not in printed


def test_chunks_over_pages(
    chunking: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options: list[dict[str, Any]] = []
    decode = chunking.ops.Operands.decode

    def noted(*args: Any, **kwargs: Any) -> Any:
        options.append(kwargs)
        return decode(*args, **kwargs)

    monkeypatch.setattr(chunking.ops.Operands, "decode", noted)
    presets = ["fp8", "int8", "int4-channel"]
    results = run_chunking(chunking, monkeypatch, tmp_path / "pages.json", "--pages", "--presets", *presets)
    printed = capsys.readouterr().out
    assert json.loads(printed.splitlines()[-1]) == results and "speedup" not in results["cases"][0]
    for case in results["cases"]:
        assert list(case["us"]) == list(case["pages_us"]) == presets  # no peers
        for preset in presets:
            assert case["pages_us"][preset] == case["pages_timings"][preset]["median_us"] == 10 * case["num_new"]
    assert "1 x 200 + 4" in printed and "160.0 (+0.0%)" in printed
    # A result that is checked and one that is timed, per case, preset and layout.
    tables = [each.get("page_table") for each in options]
    assert [table is None for table in tables] == [True, True, False, False] * 9
    # int8 and int4-channel have tails, too
    assert tables[2].shape == (1, 1) and tables[6].shape == (1, 3) and tables[-1].shape == (2, 3)


def test_chunk_wrong_result_aborts(chunking: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    decode = chunking.ops.Operands.decode

    def wrong(*args: Any, **kwargs: Any) -> Any:
        out, lse = decode(*args, **kwargs)
        return out * 1.1, lse

    monkeypatch.setattr(chunking.ops.Operands, "decode", wrong)
    with pytest.raises(SystemExit, match=r"bench_chunks: 1 x 200 \+ 1, int8: relative error"):
        run_chunking(chunking, monkeypatch, tmp_path / "chunks.json", "--presets", "int8")

    def wrong_in_pages(*args: Any, **kwargs: Any) -> Any:
        return (decode if kwargs.get("page_table") is None else wrong)(*args, **kwargs)

    monkeypatch.setattr(chunking.ops.Operands, "decode", wrong_in_pages)
    with pytest.raises(SystemExit, match=r"bench_chunks: 1 x 200 \+ 1, int8, pages: relative error"):
        run_chunking(chunking, monkeypatch, tmp_path / "chunks.json", "--pages", "--presets", "int8")


def test_chunks_attend_to_their_own_tokens_as_they_are(
    chunking: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    attend, calls = chunking.ops.Operands.attend_chunk, []

    def noted(self: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(query.shape[2])
        return attend(self, query, *args, **kwargs)

    monkeypatch.setattr(chunking.ops.Operands, "attend_chunk", noted)
    monkeypatch.setattr(chunking, "CASES", [(2, 200, 40)])
    run_chunking(chunking, monkeypatch, tmp_path / "chunks.json", "--presets", "int8", "int4")
    assert calls == [40] * 4  # each is checked and timed


def test_long_chunks_take_few_calls(chunking: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def time_calls(run: Any, num_sets: int, replays: int, **options: Any) -> None:
        asked.append((replays, options["min_calls"]))

    monkeypatch.setattr(chunking, "time_calls", time_calls)
    for num_new in (1023, 1024):
        chunking.timed(lambda i: None, 4, num_new)
    assert asked == [(20, 16), (5, 1)]


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        ("bench_cpu_decode", ["--cases", "0"], "--cases must be at least 1, got 0"),
        ("bench_cpu_decode", ["--turns", "0"], "--turns must be at least 1, got 0"),
        ("reference_model.train", ["evaluate", "--out", "x"], "--wikitext or --data must be given, or there is noth"),
    ],
)
def test_nothing_is_measured_in_vain(
    script: str,
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "evals"))
    monkeypatch.setattr(sys, "argv", [script, *words])
    with pytest.raises(SystemExit):
        importlib.import_module(script).main()
    assert message in capsys.readouterr().err


def test_commit_without_history(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A copy without `.git`, or with an older one, is told what it is a copy of."""
    monkeypatch.syspath_prepend(str(ROOT / "evals"))
    provenance = importlib.import_module("hf_kvquant_evals.provenance")
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.delenv(provenance.COMMIT_VARIABLE, raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert provenance.checkout() == (None, None)
    for state, is_dirty in (("dirty", True), ("clean", False)):
        monkeypatch.setenv(provenance.COMMIT_VARIABLE, f"0123abc {state}")
        assert provenance.checkout() == ("0123abc", is_dirty)
    for bad in ("", "clean", "0123abc tidy", "0123abc clean now"):
        monkeypatch.setenv(provenance.COMMIT_VARIABLE, bad)
        message = f"`HF_KVQUANT_COMMIT` must be a commit and clean or dirty, got {bad!r}"
        with pytest.raises(ValueError, match=re.escape(message)):
            provenance.checkout()


# --- the benchmark of continuous batching -----------------------------------------------------------------------------


def test_batching_results(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("transformers.generation.continuous_batching.cache_allocators")
    monkeypatch.syspath_prepend(str(ROOT / "evals"))
    bench = importlib.import_module("bench_batching")
    workloads = {"W1": bench.Workload(6, 40, (5, 12)), "W4": bench.Workload(4, 600, (6, 6), is_shared=True)}
    monkeypatch.setattr(bench, "WORKLOADS", workloads)
    path = tmp_path / "batching.json"
    words = [
        "--model",
        "tiny",
        "--device",
        "cpu",
        "--cache-gb",
        "0.002",
        "--systems",
        "transformers",
        "none",
        "int4-token",
    ]
    monkeypatch.setattr(sys, "argv", ["bench_batching.py", *words, "--share", "0.5", "--output", str(path)])
    bench.main()
    results = json.loads(path.read_text(encoding="utf-8"))
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == results
    for found, requests in zip(results["workloads"], (3, 2), strict=True):
        assert found["requests"] == requests and found["failures"] == []
        rows = {row["system"]: row for row in found["rows"]}
        assert list(rows) == ["transformers", "none", "int4-token"]
        # The same bytes hold more codes; both caches hold whole pages.
        assert (
            rows["transformers"]["room_tokens"] == rows["none"]["room_tokens"] < rows["int4-token"]["room_tokens"] / 2
        )
        for row in rows.values():
            assert 0 < row["most_held_tokens"] <= row["room_tokens"] and 0 < row["mixed_share"] <= 1
            assert 1 <= row["mean_running"] <= requests
            assert row["host_s"] is None  # on a CPU, batching is not asynchronous
    # A second run adds the systems that are missing.
    monkeypatch.setattr(
        sys, "argv", [*sys.argv[:-6], "int4-token", "int8", "--share", "0.5", "--resume", *sys.argv[-2:]]
    )
    bench.main()
    more = json.loads(path.read_text(encoding="utf-8"))
    assert len(more["commands"]) == 2 and [len(found["rows"]) for found in more["workloads"]] == [4, 4]
    assert [found["rows"][:3] for found in more["workloads"]] == [found["rows"] for found in results["workloads"]]
    # A system that takes too long is listed as failed, and the next one has its turn.
    monkeypatch.setattr(sys, "argv", ["bench_batching.py", *words, "--workloads", "W1", "--limit-s", "1e-9"])
    bench.main()
    (slow,) = json.loads(capsys.readouterr().out.splitlines()[-1])["workloads"]
    assert slow["rows"] == [] and [failure["system"] for failure in slow["failures"]] == list(rows)
    assert "0 of 4 requests were answered in 1e-09 s" in slow["failures"][0]["reason"]
    prompts = workloads["W4"].prompts(96)
    assert prompts[0][:584] == prompts[1][:584] and prompts[0] != prompts[1]
    assert workloads["W1"].new_tokens() == workloads["W1"].new_tokens()


def test_the_time_of_the_host_is_that_between_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers.generation.continuous_batching.cache_allocators")
    monkeypatch.syspath_prepend(str(ROOT / "evals"))
    bench = importlib.import_module("bench_batching")
    now = [0.0]
    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])

    def step(query_length: int, prepare_s: float) -> None:
        now[0] += prepare_s
        processor.scheduler.schedule_batch(query_length)
        assert processor.inputs_and_outputs.prepare_batch_update() == "updated"

    def wait() -> str:
        now[0] += 100
        return "updated"

    state = SimpleNamespace(current_len=lambda: 7)
    processor: Any = SimpleNamespace(
        use_async_batching=True,
        scheduler=SimpleNamespace(
            active_requests={"a": state}, schedule_batch=lambda length: ([SimpleNamespace(query_length=length)],)
        ),
        inputs_and_outputs=SimpleNamespace(prepare_batch_update=wait),
    )
    watch = bench.Watch(processor)
    for query_length, prepare_s in ((5, 1.0), (1, 2.0), (5, 3.0), (1, 4.0)):
        step(query_length, prepare_s)
    assert watch.host_s == [2.0, 4.0] and watch.is_mixed == [True, False, True, False] and watch.held == [7] * 4
    watch.clear()
    step(1, 5.0)  # nobody knows when the host began with it
    step(1, 6.0)
    assert watch.host_s == [6.0] and watch.running == [1, 1]


def test_batching_with_memory_in_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Smaller weights leave more room, and rows are told apart by their weights."""
    pytest.importorskip("transformers.generation.continuous_batching.cache_allocators")
    monkeypatch.syspath_prepend(str(ROOT / "evals"))
    bench, methods = importlib.import_module("bench_batching"), importlib.import_module("weight_methods")

    def half(linear: torch.nn.Linear) -> torch.nn.Module:
        linear.weight = torch.nn.Parameter(linear.weight.to(torch.float8_e4m3fn), requires_grad=False)
        linear.forward = lambda x: torch.nn.functional.linear(x, linear.weight.to(x.dtype))
        return linear

    monkeypatch.setitem(methods.METHODS, "half", methods.Method("float8", (), half))
    monkeypatch.setattr(bench, "WORKLOADS", {"W1": bench.Workload(2, 40, (5, 8))})
    monkeypatch.setattr(bench, "WORKING_GB", 0.0001)
    path = tmp_path / "batching.json"
    words = ["--model", "tiny", "--device", "cpu", "--workloads", "W1", "--total-gb", "0.0001", "0.002"]
    words += ["--weights", "bf16", "half", "--systems", "none", "int4-token", "--output", str(path), "--resume"]
    monkeypatch.setattr(sys, "argv", ["bench_batching.py", *words])
    bench.main()
    results = json.loads(path.read_text(encoding="utf-8"))
    assert "0.002 GB in all" in capsys.readouterr().out
    few, enough = results["workloads"]
    arms = [("bf16", "none"), ("bf16", "int4-token"), ("half", "none"), ("half", "int4-token")]
    assert [bench.arm_of(failure) for failure in few["failures"]] == arms
    assert "0.0001 GB hold no cache beside 0.0 GB of weights" in few["failures"][0]["reason"]
    assert [bench.arm_of(row) for row in enough["rows"]] == arms and enough["failures"] == []
    plain, _, half_plain, _ = enough["rows"]
    for row in enough["rows"]:
        pages = (2_000_000 - 100_000 - row["weight_bytes"]) // (row["bytes_per_token"] * bench.PAGE_SIZE)
        assert abs(row["room_tokens"] / bench.PAGE_SIZE - pages) <= 1
    assert half_plain["room_tokens"] > plain["room_tokens"] and plain["peak_bytes"] is None
    bench.main()  # nothing is missing
    again = json.loads(path.read_text(encoding="utf-8"))
    assert again["workloads"] == results["workloads"]


@pytest.mark.parametrize(
    "words, message",
    [
        (["--cache-gb", "0"], "--cache-gb must be positive, got 0.0"),
        (["--total-gb", "24", "-1"], "--total-gb must be positive, got -1.0"),
        (["--total-gb", "24", "--cache-gb", "8"], "--total-gb takes the place of --cache-gb, got both"),
        (["--limit-s", "0"], "--limit-s must be positive, got 0.0"),
        (["--share", "2"], "--share must be above 0 and at most 1, got 2.0"),
        (["--systems", "int5"], "invalid choice: 'int5'"),
        (["--resume"], "--resume needs --output, the results to resume"),
    ],
)
def test_batching_arguments(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers.generation.continuous_batching.cache_allocators")
    monkeypatch.syspath_prepend(str(ROOT / "evals"))
    bench = importlib.import_module("bench_batching")
    with pytest.raises(SystemExit):
        bench.parse(words)
    assert message in capsys.readouterr().err
