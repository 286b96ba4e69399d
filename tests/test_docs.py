"""That what the README and `docs/` say is so: code blocks run, commands parse, links and names lead somewhere.

Blocks of Python run one after the other, as a reader of the page would type them, and a `text` block right behind one
is its output. One that cannot run says why behind its language, as in "python no-run: needs a GPU", and must still
compile. Commands of a `sh` block are not run; they have to parse, and their targets and files must be there.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import hf_kvquant
from hf_kvquant.cli import parser

ROOT = Path(__file__).resolve().parents[1]
# Run as well as read; the others are written for the site that includes them.
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
FENCED = re.compile(r"^(`{3,})([^\n]*)\n(.*?)^\1$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block: its language, what stands behind it, its lines, and whether it follows another directly."""

    language: str
    note: str
    code: str
    follows: bool

    @property
    def is_run(self) -> bool:
        return not self.note.startswith("no-run:")


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found, end = [], 0
    for match in FENCED.finditer(text):
        language, _, note = match[2].partition(" ")
        found.append(Block(language, note.strip(), match[3], not text[end : match.start()].strip()))
        end = match.end()
    return found


def commands_of(code: str) -> Iterator[list[str]]:
    """The words of each command of a `sh` block, without assignments in front and comments behind."""
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_0-9]+=.*", words[0]):
            words = words[1:]
        if words:
            yield words


def headings_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    prose = FENCED.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@each_page
def test_blocks_are_of_a_kind_that_is_checked(page: Path) -> None:
    for block in blocks_of(page):
        assert block.language in ("python", "sh", "text") or block.language.startswith("{"), block
        if block.note and not block.language.startswith("{"):
            assert re.fullmatch(r"no-run: \w.{10,}", block.note), f"a note must be `no-run: REASON`, got {block.note!r}"


@each_page
def test_code_blocks_run(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The prompts are ones whose continuation is never near a tie, so another processor, which rounds in another
    order, writes the same."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evals").symlink_to(ROOT / "evals")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    blocks = blocks_of(page)
    namespace: dict[str, Any] = {}
    printed = None
    for block in blocks:
        if block.language == "python":
            code = compile(block.code, page.name, "exec")
            printed = None
            if block.is_run:
                with contextlib.redirect_stdout(io.StringIO()) as output:
                    exec(code, namespace)
                printed = output.getvalue()
        elif block.language == "text" and block.follows and printed is not None:
            assert printed == block.code
    hf_kvquant.disable()


@each_page
def test_commands_are_ones_that_there_are(page: Path) -> None:
    commands = [words for block in blocks_of(page) if block.language == "sh" for words in commands_of(block.code)]
    # In the prose too, where a command is complete.
    prose = FENCED.sub("", page.read_text(encoding="utf-8"))
    inline = re.findall(r"`(hf-kvquant [^`]*MODEL[^`]*)`", prose)
    for words in [*commands, *(shlex.split(command) for command in inline)]:
        check_command(words)


def check_command(words: list[str]) -> None:
    program, *arguments = words
    if program == "make":
        for target in (word for word in arguments if "=" not in word):
            assert re.search(rf"^{re.escape(target)}:", MAKEFILE, re.MULTILINE), words
    elif program == "hf-kvquant":
        parser().parse_args(arguments)  # exits where they are wrong
    elif Path(program).name == "python":
        script = ROOT / arguments[0]
        assert script.is_file(), words
        for option in (word for word in arguments[1:] if word.startswith("--")):
            assert f'"{option}"' in script.read_text(encoding="utf-8"), words
    else:
        assert words[:2] == ["pip", "install"], f"nothing checks this command: {words}"


@pytest.mark.parametrize(
    "command", ["make nonsense", "hf-kvquant eval nonsense", "python evals/none.py", "curl x", "hf-kvquant env --all"]
)
def test_commands_that_there_are_not_are_found(command: str) -> None:
    with pytest.raises((AssertionError, SystemExit)):
        check_command(shlex.split(command))


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    prose = FENCED.sub("", page.read_text(encoding="utf-8"))
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", prose):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), target
        assert not anchor or anchor in headings_of(path), f"{target}#{anchor}"


@each_page
def test_files_and_names_that_are_spoken_of_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for path in re.findall(r"`((?:csrc|docs|evals|examples|hf_kvquant|tests)/[^`\s]*)`", text):
        assert (ROOT / path).exists(), path
    for name in re.findall(r"\bhf_kvquant\.(\w+)", text):
        assert hasattr(hf_kvquant, name) or importlib.util.find_spec(f"hf_kvquant.{name}"), name


def test_every_page_is_reached_from_the_first() -> None:
    """Sphinx says so as well, where it is installed; the README lists the pages too."""
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")} - {"index"}
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert {Path(target).stem for target in re.findall(r"\]\(([\w-]+\.md)\)", index)} == pages
    (tree,) = (block for block in blocks_of(ROOT / "docs" / "index.md") if block.language == "{toctree}")
    assert {line for line in tree.code.splitlines() if line and not line.startswith(":")} == pages


def test_the_api_page_has_every_public_name() -> None:
    api = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(?:auto\w+|py:data):: hf_kvquant\.(\w+)", api))
    assert named == {*hf_kvquant.__all__} - {"__version__"}
