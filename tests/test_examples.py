"""That the programs of `examples/` run, each as its own process, with the reference model on a CPU."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from programs import Program, finish, ranks
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_kvquant

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "evals" / "reference_model"
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(name: str, *arguments: str, where: Path) -> str:
    """The output of an example, which must end well."""
    ((output, _),) = finish(Program(str(ROOT / "examples" / name), *arguments, where=where))
    return output


def save_in_float32(folder: Path) -> str:
    """Save the reference model, whose bfloat16 takes nine times as long on CPUs that have no instructions for it."""
    model = AutoModelForCausalLM.from_pretrained(REFERENCE, dtype=torch.float32)
    for each in model, AutoTokenizer.from_pretrained(REFERENCE):
        each.save_pretrained(folder)
    return str(folder)


def test_chat_continues_from_turn_to_turn_and_from_run_to_run(tmp_path: Path) -> None:
    """Nothing is computed twice: all that the cache holds is part of the next turn."""
    options = "--max-new-tokens", "6", "--file", "chat.safetensors", "--preset", "int4-token"
    first = run("chat.py", "--prompt", "The village is located in", "--prompt", "It has a", *options, where=tmp_path)
    reused = [(int(held), int(all_)) for held, all_ in re.findall(r"\[(\d+) of (\d+) tokens", first)]
    assert reused[0][0] == 0 and 0 < reused[1][0] < reused[1][1]
    held, size = re.search(r"cache: (\d+) tokens in ([\d,]+) bytes, int4", first).groups()  # type: ignore[union-attr]
    assert int(size.replace(",", "")) > 0
    assert len(json.loads((tmp_path / "chat.json").read_text(encoding="utf-8"))["held"]) == int(held)
    again = run("chat.py", "--prompt", "The river is", *options, where=tmp_path)
    assert f"[{held} of " in again


def test_long_document_is_read_in_chunks(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("The village is located in the north of the country. " * 30, encoding="utf-8")
    output = run("long_document.py", "--document", "text", "--chunk", "64", "--max-new-tokens", "4", where=tmp_path)
    assert "in chunks of 64" in output and "int4 on cpu" in output and "LlamaForCausalLM, growing cache" in output


def test_batch_job_answers_every_prompt(tmp_path: Path) -> None:
    """Batches of two, of which the last one is filled up."""
    prompts = ["The village is", "The river rises in the mountains and", "The university was founded"]
    (tmp_path / "prompts").write_text("\n\n".join(prompts), encoding="utf-8")
    options = "--prompts", "prompts", "--batch-size", "2", "--max-new-tokens", "4", "--output", "answers"
    assert "3 prompts, " in run("batch_job.py", *options, where=tmp_path)
    answers = [json.loads(line) for line in (tmp_path / "answers").read_text(encoding="utf-8").splitlines()]
    assert [each["prompt"] for each in answers] == prompts and all(each["answer"].strip() for each in answers)


def test_two_processes_share_a_model(tmp_path: Path) -> None:
    """They write what the whole model writes.

    That is checked in float32, since the order of sums decides between near tokens in bfloat16.
    """
    saved = save_in_float32(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(saved)
    model = AutoModelForCausalLM.from_pretrained(saved)
    options = saved, "--max-new-tokens", "8", "--preset", "int8"
    (output, _), (other, _) = finish(*ranks(2, str(ROOT / "examples" / "tensor_parallel.py"), *options, where=tmp_path))
    assert other == ""
    with hf_kvquant.patched(model, "int8"):
        ids = model.generate(**tokenizer("The river", return_tensors="pt"), max_new_tokens=8, do_sample=False)
    found, expected = output.strip().splitlines()[-1], tokenizer.decode(ids[0], skip_special_tokens=True)
    assert found == expected and found.startswith("The river")


@pytest.mark.slow
def test_calibrate_lowers_the_divergence(tmp_path: Path) -> None:
    text = (REFERENCE / "README.md").read_text(encoding="utf-8")
    (tmp_path / "text").write_text(text[:1800], encoding="utf-8")  # 600 tokens
    model = save_in_float32(tmp_path / "model")
    output = run("calibrate.py", model, "--text", "text", "--output", "calibrated", where=tmp_path)
    before, after = (float(x) for x in re.findall(r"All layers together: .* (\S+) ± \S+ nats", output))
    assert after < before
    assert (tmp_path / "calibrated" / "kvquant_smoothing.safetensors").is_file()
    assert "The village is located in the" in output


# Ray's own models use options of Field that pydantic has deprecated.
@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`:DeprecationWarning")
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_docstrings_show_commands_that_parse(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if path.stem.startswith("ray_"):
        pytest.importorskip("ray", reason="Ray is pinned for Python 3.11 and later")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    start = rf"(?:python|torchrun --nproc-per-node 2) examples/{path.name}"
    commands = re.findall(rf"^    {start} (.*)$", example.__doc__ or "", re.MULTILINE)
    commands += re.findall(rf"^{start} (.*)$", (ROOT / "docs/examples.md").read_text(), re.MULTILINE)
    assert len(commands) >= 2
    for command in commands:
        example.parser().parse_args(shlex.split(command, comments=True))  # exits where they are wrong
