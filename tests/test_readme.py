"""That what the README and the changelog say is so: code blocks run, numbers are those of results files."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import hf_kvquant
from hf_kvquant import PRESETS

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def renderer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("render_readme", ROOT / "evals" / "render_readme.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_code_blocks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks run one after the other, as a reader would type them; a `text` block behind one is its output.

    The prompt there is one whose continuation is never near a tie (0.18 between the two largest logits, at least), so
    another processor, which rounds in another order, writes the same.
    """
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    blocks = re.findall(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", README, flags=re.DOTALL)
    assert len(blocks) >= 3 and any(output for _, output in blocks)
    namespace: dict[str, Any] = {}
    for code, expected in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "README.md", "exec"), namespace)
        if expected:
            assert printed.getvalue() == expected


def test_table_and_picture_are_those_of_the_results(renderer: ModuleType) -> None:
    results = renderer.load("fidelity.json"), renderer.load("cpu_decode.json")
    assert renderer.rendered(README, *results) == README, "run: python evals/render_readme.py"
    assert renderer.described(renderer.PICTURE) == renderer.plotted(*results)


def test_results_are_those_of_the_model_that_ships(renderer: ModuleType) -> None:
    weights = (ROOT / "evals" / "reference_model" / "model.safetensors").read_bytes()
    recorded = renderer.load("fidelity.json")["weights_sha256"]["model.safetensors"]
    assert recorded == hashlib.sha256(weights).hexdigest(), "run: python evals/fidelity.py"


def test_every_preset_is_in_the_readme() -> None:
    rows = re.findall(r"^\| `([a-z0-9-]+)` \|", README, flags=re.MULTILINE)
    assert sorted(rows) == sorted([*PRESETS, *PRESETS])  # once in the table of numbers, once in that of formats


@pytest.mark.parametrize("path", sorted((ROOT / "evals" / "results").glob("*.json")), ids=lambda path: path.name)
def test_results_name_no_machine_path(path: Path) -> None:
    for word in strings(json.loads(path.read_text(encoding="utf-8"))):
        assert not any(part.startswith("/") for part in word.split()), word


def strings(value: Any) -> list[str]:
    """Every string in a parsed JSON file."""
    if isinstance(value, dict):
        return [word for key, item in value.items() for word in [key, *strings(item)]]
    if isinstance(value, list):
        return [word for item in value for word in strings(item)]
    return [value] if isinstance(value, str) else []


def test_links_lead_somewhere() -> None:
    for name in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", text) + re.findall(r"`((?:evals|tests)/[^` ]*)`", text):
            assert (ROOT / target).exists(), f"{name}: {target}"


def test_commands_of_the_first_screen_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    first_screen = "\n".join(README.splitlines()[:30])
    for target in ("demo", "test"):
        assert f"make {target}" in first_screen and re.search(rf"^{target}:", makefile, flags=re.MULTILINE)
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_changelog_has_this_version() -> None:
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert versions[0] == hf_kvquant.__version__


def test_demo_prompts_are_there() -> None:
    prompts = sorted((ROOT / "evals" / "demo_prompts").glob("*.txt"))
    assert prompts and all(prompt.read_text(encoding="utf-8").strip() for prompt in prompts)
