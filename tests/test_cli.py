"""The command `hf-kvquant`: what it prints, what it returns, and one line for every mistake."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from transformers.utils import logging

import hf_kvquant
from hf_kvquant import KVQuantConfig, cli, ops
from hf_kvquant.cli import arguments, calibrate, env, loading
from hf_kvquant.cli.loading import load, load_calibration
from hf_kvquant.common.errors import RefusedResult, named
from hf_kvquant_evals.injection import inject_key_outliers

CONTEXT = 64
TOKEN_SCALES = ("--preset", "int4-token")  # the model's texts are too short for blocks of keys


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model and its tokenizer."""
    path = tmp_path_factory.mktemp("model")
    models.tokenizer(model_max_length=CONTEXT).save_pretrained(path)
    models.build("llama", torch.bfloat16, max_position_embeddings=CONTEXT).save_pretrained(path)
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command."""
    code = cli.main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def rows(output: str) -> dict[str, list[str]]:
    """The cells of the table's rows, by preset."""
    lines = [[cell.strip() for cell in line.strip("│").split("│")] for line in output.splitlines() if "│" in line]
    return {line[0]: line[1:] for line in lines}


def test_generate_compares_three_presets(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("generate", folder, "--prompt", "Once upon", "--prompt", "a time", "--max-new-tokens", "9")
    code, output, error = run(capsys, *arguments)
    assert code == 0 and error == ""
    assert output.count("Once upon") == output.count("a time") == 1
    table = rows(output)
    assert list(table) == ["none", "int8", "int4"]
    # 2 layers, keys and values, 2 heads of 64 channels: 2 bytes each; or codes, and a scale (int4: and a zero) a head,
    # or a channel and 128 tokens.
    assert [table[name][0] for name in table] == ["1,024", "528", "280"]
    # Less than 64 tokens, the least that is allocated; 128 with `int4`. Dense tokens besides, 16 and 32 (and a block).
    assert [table[name][1] for name in table] == ["64 KiB", "49 KiB", "133 KiB"]
    assert table["none"][3] == "100.00%"
    assert "over the 16 tokens" in " ".join(output.split())
    none, int8, int4 = (float(cells[4]) for cells in table.values())
    _, output, _ = run(capsys, *arguments, "--preset", "none", "--preset", "int8:0+0")
    codes_alone = float(rows(output)["int8:0+0"][4])
    # Nearly all of so few tokens are dense with `int8`, and all with `int4`, but kernels sum in another order.
    assert none < 1e-6 < min(int8, int4) and max(int8, int4) < codes_alone


def test_generate_with_one_preset_compares_nothing(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("generate", folder, "--prompt", "Once", "--preset", "k8v4", "--max-new-tokens", "3", "--no-stream")
    code, output, _ = run(capsys, *arguments)
    assert code == 0
    assert "Once" not in output
    assert list(rows(output)) == ["k8v4"]
    assert rows(output)["k8v4"][3:] == ["-", "-"]
    assert "add --preset none" in " ".join(output.split())


def test_one_new_token_has_nothing_to_compare(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It comes from the prompt alone; `none` was given, so nobody is asked for it."""
    arguments = ("generate", folder, "--prompt", "Once", "--preset", "none", "--preset", "int8", "--no-stream")
    code, output, _ = run(capsys, *arguments, "--max-new-tokens", "1")
    told = " ".join(output.split())
    assert code == 0 and "add --preset none" not in told
    assert "no text has a second one. Use --max-new-tokens 2 or more" in told
    assert "over the 1 tokens" in " ".join(run(capsys, *arguments, "--max-new-tokens", "2")[1].split())


def test_windows_of_everything_lose_nothing(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--dtype", "float32", "--max-new-tokens", "9", "--no-stream", "--sink-length", "2")
    presets = ("--preset", "none", "--preset", "int4-token", "--residual-length", "60")
    _, output, _ = run(capsys, "generate", folder, "--prompt", "Once", *options, *presets)
    assert "sink_length 2, residual_length 60" in " ".join(output.split())
    # 62 rows of 2 heads of 64 channels, 4 bytes each, for keys and values of 2 layers, beside the codes.
    assert rows(output)["int4-token"][:2] == ["288", f"{18 + 2 * 62:,} KiB"]
    assert float(rows(output)["int4-token"][4]) < 1e-6


def test_generate_streams_what_generate_writes(folder: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("A prompt\n", encoding="utf-8")
    arguments = ("--preset", "int8", "--max-new-tokens", "12", "--dtype", "float32")
    _, output, _ = run(capsys, "generate", folder, "--prompt-file", str(tmp_path / "prompt.txt"), *arguments)
    model, tokenizer = load(folder, "float32", torch.device("cpu"))
    hf_kvquant.patch(model, "int8")
    prompt = tokenizer("A prompt", return_tensors="pt")
    ids = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt.input_ids.shape[1] :]
    assert f"int8 …{tokenizer.decode(ids)}\n" in output


def test_sampling_is_seeded(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("generate", folder, "--prompt", "Once", "--preset", "int8", "--max-new-tokens", "20", "--sample")
    texts = [re.sub(r"[^│]*│[^│]*$", "", run(capsys, *arguments, "--seed", seed)[1].split("int8 …")[1].split("┏")[0])
             for seed in ("1", "1", "2")]  # fmt: skip
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["--preset", "int9"],
            f"`--preset` must be one of {', '.join(hf_kvquant.PRESETS)}, got 'int9'. Did you ",
        ),
        (["--max-new-tokens", "0"], "`--max-new-tokens` must be at least 1, got 0."),
        (["--residual-length", "-1"], "`--residual-length` must be at least 0, got -1."),
        (["--prompt", " \n"], "`--prompt` must hold text, got nothing but white space. Write a prompt into it."),
        (["--prompt-file", "EMPTY"], "`--prompt-file` EMPTY must hold text, got nothing but white space."),
        (["--prompt-file", "ABSENT"], "`--prompt-file` must be a text file, got ABSENT: No such file or directory."),
        (["--prompt-file", "BINARY"], "`--prompt-file` must be a text file, got BINARY: it is not UTF-8 text."),
        (["--top-p", "0.9"], "`--top-p` must come with --sample, got it alone. Add --sample."),
        (["--seed", "0"], "`--seed` must come with --sample, got it alone. Add --sample."),
        (["--sample", "--temperature", "0"], "`--temperature` must be positive, got 0.0."),
        (["--sample", "--top-p", "2"], "`--top-p` must be above 0 and at most 1, got 2.0."),
        (["--device", "cpu", "--offloading"], "`--offloading` must come with a GPU, got cpu, where codes are in CPU"),
        (["--device", "abacus"], "`--device` must be a torch device such as cpu or cuda:0, got 'abacus'."),
        (["--device", "cuda:99"], "`--device` must exist, got 'cuda:99' with "),
        (
            ["--prompt", "x" * 60],
            "prompt and `--max-new-tokens` must fit the model's 64 positions, got 60 and 5 tokens. "
            "Use --max-new-tokens 4 or less.",
        ),
        (
            ["--prompt", "x" * 70],
            "prompt and `--max-new-tokens` must fit the model's 64 positions, got 70 and 5 tokens. Shorten the prompt.",
        ),
    ],
)
def test_mistakes(
    folder: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("EMPTY").write_text("\n\n", encoding="utf-8")
    Path("BINARY").write_bytes(b"\xff\xfe\xfa")
    code, output, error = run(capsys, "generate", folder, "--max-new-tokens", "5", "--prompt", "Once", *arguments)
    assert code == 2 and output == ""
    assert error.startswith(f"hf-kvquant: error: generate: {message}")
    assert error.count("\n") == 1


def test_a_prompt_is_needed(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = run(capsys, "generate", folder)
    assert code == 2
    assert "`--prompt` or `--prompt-file` must be given, got neither." in error


@pytest.mark.parametrize("name", ["./absent", "no/such/folder", "/absent"])
def test_a_model_that_is_not_there(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = run(capsys, "generate", name, "--prompt", "Once")
    assert code == 2
    assert error == (
        f"hf-kvquant: error: generate: `MODEL` must be a folder with a transformers model or a hub id, got {name}: "
        "no such folder.\n"
    )


def test_a_folder_that_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = run(capsys, "generate", str(tmp_path), "--prompt", "Once")
    assert code == 2 and "a folder without config.json" in error
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    code, _, error = run(capsys, "generate", str(tmp_path), "--prompt", "Once")
    assert code == 2 and error.count("\n") == 1
    assert "`MODEL` must be a folder with a causal language model and its tokenizer" in error


def test_a_preset_that_does_not_fit(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "narrow"
    models.build("llama", head_dim=40).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((Path(folder) / name).read_bytes())
    code, _, error = run(
        capsys, "generate", str(path), "--prompt", "Once", "--preset", "int4-g32", "--max-new-tokens", "5"
    )
    assert code == 2 and error.count("\n") == 1
    assert "`--preset int4-g32` does not fit" in error and "`group_size` must divide head_dim 40, got 32" in error


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Text of a little more than the tokens that calibration needs."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog; 0123456789. " * 10, encoding="utf-8")
    return str(path)


def test_calibrate_saves_a_model_and_its_factors(
    folder: str, text_file: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    outliers = tmp_path / "outliers"
    model, tokenizer = load(folder, "bfloat16", torch.device("cpu"))
    inject_key_outliers(model, 2, 8.0)
    model.save_pretrained(outliers)
    tokenizer.save_pretrained(outliers)
    output_folder = tmp_path / "new" / "smoothed"
    code, output, error = run(
        capsys, "calibrate", str(outliers), *TOKEN_SCALES, "--text-file", text_file, "--output", str(output_folder)
    )
    assert code == 0 and error == ""
    table = rows(output)
    assert list(table) == ["0", "1"]
    for placement, _, _, center, before, after in table.values():
        assert placement == "weights" and float(center) > 0
        assert float(after.rstrip("%")) < 0.8 * float(before.rstrip("%"))
    assert "Factors are folded into the weights of layers 0, 1." in " ".join(output.split())
    assert f"Saved the model and kvquant_smoothing.safetensors to {output_folder}." in output

    smoothed, _ = load(str(output_folder), "auto", torch.device("cpu"))
    ids = tokenizer("Once upon", return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.equal(model(ids).logits, smoothed(ids).logits)
    hf_kvquant.load_smoothing(smoothed, output_folder / "kvquant_smoothing.safetensors")
    hf_kvquant.unsmooth(smoothed)
    for name, value in model.state_dict().items():
        assert torch.equal(smoothed.state_dict()[name], value)

    code, _, error = run(
        capsys,
        "calibrate",
        str(output_folder),
        *TOKEN_SCALES,
        "--text-file",
        text_file,
        "--output",
        str(tmp_path / "again"),
    )
    assert code == 2 and error.count("\n") == 1
    assert f"calibrate: {output_folder} cannot be calibrated. smooth_attention: `model` must not be smoothed" in error
    assert not (tmp_path / "again").exists()


def test_calibrate_rotates_values(
    folder: str, text_file: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    output, arguments = tmp_path / "rotated", [*TOKEN_SCALES, "--text-file", text_file, "--rotate-values", "--output"]
    code, _, error = run(capsys, "calibrate", folder, *arguments, str(output))
    assert code == 0 and error == ""
    expected, _ = load(folder, "auto", torch.device("cpu"))
    rotated, _ = load(str(output), "auto", torch.device("cpu"))
    hf_kvquant.rotate_values(expected)
    hf_kvquant.load_smoothing(rotated, output / "kvquant_smoothing.safetensors")
    hf_kvquant.unsmooth(rotated)
    for name, value in expected.state_dict().items():
        assert torch.equal(rotated.state_dict()[name], value)

    code, _, error = run(capsys, "calibrate", str(output), *arguments, str(tmp_path / "again"))
    assert code == 2 and "cannot be calibrated. rotate_values: `model` must not be rotated already, got one" in error


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["--preset", "int9"],
            f"`--preset` must be one of {', '.join(hf_kvquant.PRESETS)}, got 'int9'. Did you ",
        ),
        (["--text-file", "EMPTY"], "`--text-file` EMPTY must hold text, got nothing but white space."),
        (["--text-file", "ABSENT"], "`--text-file` must be a text file, got ABSENT: No such file or directory."),
        (["--device", "abacus"], "`--device` must be a torch device such as cpu or cuda:0, got 'abacus'."),
        (["--output", "EMPTY"], "`--output` must be a new or an empty folder, got EMPTY: a file. Name another."),
        (["--output", "FULL"], "`--output` must be a new or an empty folder, got FULL: a folder that is not empty."),
        (
            ["--tokens", "9"],
            "FOLDER cannot be calibrated. smooth_attention: `num_tokens` must be an int of at least 512",
        ),
        (
            ["--preset", "none"],
            "FOLDER cannot be calibrated. smooth_attention: `model` must have a layer whose keys can",
        ),
    ],
)
def test_calibrate_mistakes(
    folder: str,
    text_file: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("EMPTY").write_text("\n\n", encoding="utf-8")
    Path("FULL").mkdir()
    Path("FULL/file").touch()
    code, output, error = run(
        capsys, "calibrate", folder, *TOKEN_SCALES, "--text-file", text_file, "--output", "new", *arguments
    )
    assert code == 2 and output == ""
    assert error.startswith(f"hf-kvquant: error: calibrate: {message.replace('FOLDER', folder)}")
    assert error.count("\n") == 1
    assert not Path("new").exists()


@pytest.mark.parametrize("path", ["/proc/new", "/proc/new/er", "FILE/new", "FILE/new/er"])
def test_calibrate_tries_its_output_before_it_works(
    folder: str,
    text_file: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
) -> None:
    monkeypatch.setattr(calibrate, "load_placed", lambda *args, **options: pytest.fail("the model is loaded"))
    (tmp_path / "FILE").touch()
    monkeypatch.chdir(tmp_path)
    code, output, error = run(capsys, "calibrate", folder, *TOKEN_SCALES, "--text-file", text_file, "--output", path)
    assert code == 2 and output == "" and error.count("\n") == 1
    assert error.startswith(f"hf-kvquant: error: calibrate: `--output` must be a new or an empty folder, got {path}: ")
    assert [each.name for each in tmp_path.iterdir()] == ["FILE"]


def test_calibrate_without_room_for_the_model(
    folder: str, text_file: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_pretrained(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", save_pretrained)
    code, _, error = run(
        capsys, "calibrate", folder, *TOKEN_SCALES, "--text-file", text_file, "--output", str(tmp_path / "new")
    )
    assert code == 2 and error.count("\n") == 1
    assert "calibrate: `--output` must have room for the model, got " in error and "No space left on device" in error


def test_commands_leave_the_progress_bars_of_transformers_as_they_were(
    folder: str, text_file: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What the command saves and loads shows none, and whoever calls it from Python has them afterwards."""
    logging.enable_progress_bar()
    try:
        code, _, error = run(
            capsys,
            "calibrate",
            folder,
            *TOKEN_SCALES,
            "--text-file",
            text_file,
            "--output",
            str(tmp_path / "calibrated"),
        )
        assert code == 0 and error == "" and logging.is_progress_bar_enabled()
    finally:
        logging.disable_progress_bar()


def test_calibrate_leaves_the_weights_alone_where_asked(
    folder: str, text_file: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["calibrate", folder, *TOKEN_SCALES, "--text-file", text_file]
    code, output, error = run(capsys, *arguments, "--output", str(tmp_path / "online"), "--mode", "online")
    assert code == 0 and error == ""
    assert "Factors lower the error of no layer enough to be worth it." in " ".join(output.split())
    found = hf_kvquant.SmoothingResult.load(tmp_path / "online" / "kvquant_smoothing.safetensors")
    assert [layer.placement for layer in found.layers] == ["caches", "caches"]
    code, output, error = run(capsys, *arguments, "--output", str(tmp_path / "centers"), "--no-factors")
    assert code == 0 and error == ""
    assert "No factors were calibrated." in output
    weights = load(folder, "auto", torch.device("cpu"))[0].state_dict()
    for name in ("online", "centers"):
        model, _ = load(str(tmp_path / name), "auto", torch.device("cpu"))
        for key, value in model.state_dict().items():
            assert torch.equal(value, weights[key])
    arguments += ["--no-factors", "--no-centers", "--output", str(tmp_path / "neither")]
    code, _, error = run(capsys, *arguments)
    assert code == 2 and "`centers` or `factors` must be True, got neither" in error


def test_generate_takes_what_calibrate_left(
    folder: str, text_file: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    calibrated = str(tmp_path / "calibrated")
    run(
        capsys, "calibrate", folder, *TOKEN_SCALES, "--text-file", text_file, "--output", calibrated, "--mode", "online"
    )
    given = load(calibrated, "auto", torch.device("cpu"))[0]
    assert {x.describe() for x in hf_kvquant.key_transforms(given, "int4-token").values()} == {"rotate"}
    load_calibration(given, calibrated)
    assert any(x.center is not None for x in hf_kvquant.key_transforms(given, "int4-token").values())
    arguments = ["generate", calibrated, "--prompt", "Once", "--preset", "int4-token", "--max-new-tokens", "2"]
    code, _, error = run(capsys, *arguments)
    assert code == 0 and error == ""
    (tmp_path / "calibrated" / "kvquant_smoothing.safetensors").write_bytes(b"nothing")
    code, _, error = run(capsys, *arguments)
    assert code == 0
    assert error.startswith("hf-kvquant: warning: ") and "safetensors is ignored. load_smoothing: `path` must" in error


def test_calibration_is_found_on_the_hub(
    folder: str, text_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calibrated = tmp_path / "calibrated"
    how = ("--text-file", text_file, "--output", str(calibrated), "--mode", "online")
    assert run(capsys, "calibrate", folder, *TOKEN_SCALES, *how)[0] == 0

    def downloaded(name: str, file: str) -> str:
        assert name == "someone/calibrated"
        if not (calibrated / file).exists():
            raise OSError("no such file")
        return str(calibrated / file)

    monkeypatch.setattr(loading, "cached_file", downloaded)
    given = load(str(calibrated), "auto", torch.device("cpu"))[0]
    load_calibration(given, "someone/calibrated")
    assert any(x.center is not None for x in hf_kvquant.key_transforms(given, "int4-token").values())
    (calibrated / "kvquant_smoothing.safetensors").unlink()
    load_calibration(given, "someone/calibrated")


def test_calibrate_saves_a_model_as_a_whole(
    folder: str, text_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What belongs to pictures stays with the model, and a model of which a part would be saved is refused."""
    pictures, output = tmp_path / "pictures", tmp_path / "output"
    shutil.copytree(folder, pictures)
    (pictures / "preprocessor_config.json").write_text('{"size": 8}')
    arguments = ("calibrate", str(pictures), *TOKEN_SCALES, "--text-file", text_file, "--output", str(output))
    assert run(capsys, *arguments)[0] == 0
    assert (output / "preprocessor_config.json").read_text() == '{"size": 8}'
    shutil.rmtree(output)

    config = json.loads((pictures / "config.json").read_text())
    (pictures / "config.json").write_text(json.dumps({**config, "architectures": ["LlavaForConditionalGeneration"]}))
    code, _, error = run(capsys, *arguments)
    assert code == 2 and not output.exists()
    assert error == (
        f"hf-kvquant: error: calibrate: `MODEL` must be a causal language model as a whole, got {pictures}, a "
        "LlavaForConditionalGeneration, of which LlamaForCausalLM is a part: the folder that calibrate saves would "
        "lack the rest. Load the whole model in Python, call hf_kvquant.smooth_attention on it and save_pretrained. "
        "See docs/calibration.md.\n"
    )


@pytest.mark.parametrize(
    "asked",
    [
        {"cache_implementation": "quantized", "cache_config": {"backend": "hf_kvquant", "preset": "int4"}},
        {"cache_implementation": "static", "num_beams": 2},
        {"use_cache": False, "stop_strings": ["a"]},
    ],
    ids=lambda asked: "+".join(asked),
)
def test_generate_compares_presets_whatever_the_checkpoint_asks_for(
    folder: str, asked: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asking = tmp_path / "asking"
    shutil.copytree(folder, asking)
    config = json.loads((asking / "generation_config.json").read_text())
    (asking / "generation_config.json").write_text(json.dumps({**config, **asked}))
    prompt = tmp_path / "prompt.txt"
    prompt.write_bytes("\ufeffOnce".encode())
    how = ("--prompt-file", str(prompt), "--preset", "none", "--preset", "int8", "--max-new-tokens", "4")
    _, expected, _ = run(capsys, "generate", folder, *how)
    code, output, error = run(capsys, "generate", str(asking), *how)
    assert code == 0 and "\ufeff" not in output
    names = "`, `".join(asked)
    assert f"`{names}` in the generation config of {asking} is left out: every preset writes one text." in error
    for preset, cells in rows(expected).items():
        assert rows(output)[preset][:2] == cells[:2] and rows(output)[preset][3:] == cells[3:]


def test_calibrate_needs_text(folder: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, error = run(capsys, "calibrate", folder, "--output", str(tmp_path / "new"))
    assert code == 2
    assert "calibrate: `--text-file` must be given, got none." in error


def test_env(capsys: pytest.CaptureFixture[str]) -> None:
    code, output, _ = run(capsys, "env")
    assert code == 0
    assert hf_kvquant.__version__ in output and torch.__version__ in output
    assert ops.extension().cpu_capability() in output


def test_env_shows_brackets(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "environment", lambda: {"evaluation": "pip install 'hf-kvquant[eval]'"})
    assert "pip install 'hf-kvquant[eval]'" in run(capsys, "env")[1]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "generate m --max-new 4 --promt x",
            "generate: there is no argument '--promt'. Did you mean '--prompt'? See hf-",
        ),
        (
            "eval perplexity m --windows=4 --text x",
            "eval perplexity: there is no argument '--windows'. Did you mean '--",
        ),
        ("calibrate m --zzz", "calibrate: there is no argument '--zzz'. See hf-kvquant calibrate --help."),
        ("eval tasks m m", "eval tasks: there is no argument 'm'. See hf-kvquant eval tasks --help."),
        ("eval long", "eval long: the following arguments are required: MODEL. See hf-kvquant eval long --help."),
        ("generate m --seed one", "generate: argument --seed: invalid int value: 'one'. See hf-kvquant generate --h"),
        ("", "the following arguments are required: COMMAND. See hf-kvquant --help."),
        ("generat m", "argument COMMAND: invalid choice: 'generat' (choose from"),
    ],
)
def test_arguments_that_are_no_such_are_told_in_a_line(
    words: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(words.split())
    assert stopped.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith(f"hf-kvquant: error: {line}") and told.count("\n") == 1


def test_an_error_names_the_innermost_command_once() -> None:
    with pytest.raises(RefusedResult) as raised, named("eval report"), named("eval tasks"):
        raise RefusedResult("no.")
    assert str(raised.value) == "eval tasks: no."


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"hf-kvquant {hf_kvquant.__version__}\n"


def test_presets_keep_their_own_dense_tokens() -> None:
    """Unless an option or the name says otherwise; 0 says so too."""

    def config(*words: str) -> KVQuantConfig:
        parser = argparse.ArgumentParser()
        arguments.add_presets(parser, ())
        (found,) = arguments.checked_configs(parser.parse_args(["--preset", *words])).values()
        return found

    assert config("int2") == KVQuantConfig.from_preset("int2")
    assert config("int2", "--residual-length", "0") == KVQuantConfig.from_preset("int2", residual_length=0)
    assert config("int2", "--residual-length", "32") == KVQuantConfig.from_preset("int2", residual_length=32)
    none = {"sink_length": 0, "residual_length": 0}
    assert config("int2:0+0", "--residual-length", "32") == KVQuantConfig.from_preset("int2", **none)
