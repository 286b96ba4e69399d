"""That what the README and `docs/` say is so: code blocks run, commands parse, links and names lead somewhere.

Blocks of Python run one after the other, as a reader of the page would type them, and a `text` block right behind one
is its output. One that cannot run says why behind its language, as in "python no-run: needs a GPU", and must still
compile. Commands of a `sh` block are not run; they have to parse, and their targets and files must be there.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig

import hf_kvquant
from hf_kvquant import PRESETS
from hf_kvquant.batching.support import check_served
from hf_kvquant.calibration.choices import CALIBRATED_PRESET
from hf_kvquant.cli import parser
from hf_kvquant.spec.codes import BITS
from hf_kvquant.upstream.releases import HAS_PAGES

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "evals" / "reference_model"
# Run as well as read; the others are written for the site that includes them.
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
RUN_OPTIONS = (ROOT / "evals" / "results_files.py").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
EXTRAS = re.findall(r"^(\w+) = \[", PROJECT.split("[project.optional-dependencies]")[1].split("\n[")[0], re.MULTILINE)
NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve".split()
TEXT_LENGTH = 1800  # characters, of more tokens than the 528 that presets with dense windows are measured on
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


# --- what a page must be ----------------------------------------------------------------------------------------------


def check_kinds(page: Path) -> None:
    """Its blocks are of a kind that is checked, or say why not."""
    for block in blocks_of(page):
        assert block.language in ("python", "sh", "text") or block.language.startswith("{"), block
        if block.note and not block.language.startswith("{"):
            assert re.fullmatch(r"no-run: \w.{10,}", block.note), f"a note must be `no-run: REASON`, got {block.note!r}"


def check_code(page: Path) -> None:
    """Its Python runs, and prints what it says."""
    namespace: dict[str, Any] = {}
    printed = None
    for block in blocks_of(page):
        if block.language == "python":
            code = compile(block.code, page.name, "exec")
            printed = None
            if block.is_run:
                with contextlib.redirect_stdout(io.StringIO()) as output:
                    exec(code, namespace)
                printed = output.getvalue()
        elif block.language == "text" and block.follows and printed is not None:
            assert printed == block.code


def check_commands(page: Path) -> None:
    """Its commands are ones that there are, in the prose too, where they are complete."""
    commands = [words for block in blocks_of(page) if block.language == "sh" for words in commands_of(block.code)]
    inline = re.findall(r"`((?:hf-kvquant [^`]*MODEL|make )[^`]*)`", FENCED.sub("", page.read_text(encoding="utf-8")))
    for words in [*commands, *(shlex.split(command) for command in inline)]:
        check_command(words)


def check_command(words: list[str]) -> None:
    program, *arguments = words
    if program == "make":
        for target in (word for word in arguments if "=" not in word):
            assert re.search(rf"^{re.escape(target)}:", MAKEFILE, re.MULTILINE), words
    elif words[:2] == ["accelerate", "launch"]:
        check_command(["hf-kvquant", *words[words.index("hf_kvquant") + 1 :]])
    elif program == "hf-kvquant":
        parser().parse_args(arguments)  # exits where they are wrong
    elif words[:2] == ["torchrun", "--nproc-per-node"]:
        is_ours = words[3:5] == ["-m", "hf_kvquant"]
        check_command(["hf-kvquant", *words[5:]] if is_ours else ["python", *words[3:]])
    elif Path(program).name == "python":
        script = ROOT / arguments[0]
        assert script.is_file(), words
        source = script.read_text(encoding="utf-8")
        if "add_run_options(" in source:
            source += RUN_OPTIONS
            assert "--resume" not in arguments or "resumed=" in source, words
            assert "--device" not in arguments or "device=False" not in source, words
        for option in (word for word in arguments[1:] if word.startswith("--")):
            assert f'"{option}"' in source, words
    elif program.endswith(".sh"):
        assert os.access(ROOT / program, os.X_OK), words
    else:
        # No index has the package: it is installed from a clone.
        assert words[:2] == ["pip", "install"], f"nothing checks this command: {words}"
        found = re.fullmatch(r"\.(?:\[(\w+)\])?", words[2])
        assert found and (found[1] is None or found[1] in EXTRAS), words


def check_links(page: Path) -> None:
    """Its links lead to files, and to headings of pages. Sphinx checks those of the site as well."""
    prose = FENCED.sub("", page.read_text(encoding="utf-8"))
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", prose):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), target
        assert not anchor or anchor in headings_of(path), f"{target}#{anchor}"


def check_pictures(page: Path) -> None:
    """Its pictures are described for those who do not see them, in a sentence."""
    for described in re.findall(r"!\[([^\]]*)\]\(", FENCED.sub("", page.read_text(encoding="utf-8"))):
        assert described.endswith(".") and len(described.split()) >= 10, described


def check_names(page: Path) -> None:
    """Files and names of the package that it speaks of exist."""
    text = page.read_text(encoding="utf-8")
    for path in re.findall(r"`((?:csrc|docs|evals|examples|hf_kvquant|tests)/[^`\s]*)`", text):
        assert (ROOT / path).exists(), path
    for name in re.findall(r"\bhf_kvquant\.(\w+)", text):
        assert hasattr(hf_kvquant, name) or importlib.util.find_spec(f"hf_kvquant.{name}"), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
@pytest.mark.parametrize(
    "check", [check_kinds, check_commands, check_links, check_pictures, check_names], ids=lambda check: check.__name__
)
def test_pages(check: Callable[[Path], None], page: Path) -> None:
    check(page)


def lay_out(evals: Path, is_float32: bool) -> None:
    """What pages read: the reference model, and of the text beside it as much as a calibration needs."""
    model, text = evals / "reference_model", "README.md"
    model.mkdir(parents=True)
    if is_float32:
        AutoModelForCausalLM.from_pretrained(REFERENCE, dtype=torch.float32).save_pretrained(model)
    for path in REFERENCE.iterdir():
        if path.name != text and not (model / path.name).exists():
            (model / path.name).symlink_to(path)
    whole = (REFERENCE / text).read_text(encoding="utf-8")
    (model / text).write_text(whole[:TEXT_LENGTH], encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_blocks_run(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The prompts are ones whose continuation is never near a tie, so another processor, which rounds in another
    order, writes the same."""
    if page.stem == "batching" and not HAS_PAGES:
        pytest.skip("transformers' paged cache has another design")
    if page.stem == "quantized-weights":
        for name in ("torchao", "peft"):
            pytest.importorskip(name, reason="pinned for Python 3.11 and later")
    monkeypatch.chdir(tmp_path)
    # Calibration runs the model a hundred times, in bfloat16 nine times as slowly on CPUs without instructions for it.
    lay_out(tmp_path / "evals", is_float32=page.stem == "calibration")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    try:
        check_code(page)
    finally:
        hf_kvquant.disable()


WRONG = {
    "output": (check_code, "```python\nprint(1)\n```\n\n```text\n2\n```\n"),
    "error": (check_code, "```python\nassert x == 1\n```\n"),
    "syntax": (check_code, "```python no-run: needs a GPU\nx = = 1\n```\n"),
    "language": (check_kinds, "```bash\nls\n```\n"),
    "no reason": (check_kinds, "```python no-run:\nx = 1\n```\n"),
    "target": (check_commands, "```sh\nmake nonsense\n```\n"),
    "evaluation": (check_commands, "```sh\nhf-kvquant eval nonsense MODEL\n```\n"),
    "target in a sentence": (check_commands, "Run `make nonsense`.\n"),
    "option": (check_commands, "Try `hf-kvquant generate MODEL --nonsense`.\n"),
    "script": (check_commands, "```sh\npython evals/none.py\n```\n"),
    "option of a script": (check_commands, "```sh\npython examples/chat.py --nonsense\n```\n"),
    "program": (check_commands, "```sh\ncurl x\n```\n"),
    "package of an index": (check_commands, "```sh\npip install 'hf-kvquant[serve]'\n```\n"),
    "extra": (check_commands, "```sh\npip install '.[nonsense]'\n```\n"),
    "link": (check_links, "[a page](none.md)\n"),
    "heading": (check_links, "# One\n\n[a heading](#two)\n"),
    "picture": (check_pictures, "![](none.svg)\n"),
    "file": (check_names, "See `hf_kvquant/none.py`.\n"),
    "name": (check_names, "Call `hf_kvquant.none(model)`.\n"),
}


@pytest.mark.parametrize(("check", "text"), WRONG.values(), ids=WRONG)
def test_pages_that_are_wrong_are_found(check: Callable[[Path], None], text: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    with pytest.raises((AssertionError, NameError, SyntaxError, SystemExit)):
        check(page)


# --- the site ---------------------------------------------------------------------------------------------------------


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


# --- what pages and docstrings say of the package ---------------------------------------------------------------------


def page_of(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_counts_in_words_are_right() -> None:
    """Of what is listed elsewhere, so that a new one changes the sentence."""
    examples = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
    page = page_of("examples")
    assert page.splitlines()[2].startswith(f"{NUMBERS[len(examples)].capitalize()} programs ")
    assert set(re.findall(r"\(\.\./examples/(\w+)\.py\)", page)) == {*examples}
    tasks = [*(ROOT / "evals" / "hf_kvquant_evals" / "tasks" / "offline").glob("*.yaml")]
    assert f"{NUMBERS[len(tasks)]} tasks run from JSON lines" in page_of("evaluation").replace("\n", " ")
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    variables = {*re.findall(r"HF_KVQUANT_[A-Z]+_?[A-Z]*|MAX_JOBS", page_of("install"))}
    assert f"{NUMBERS[len(variables)].capitalize()} environment variables change what is compiled" in page_of("install")
    assert all(name in setup for name in variables)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_examples_run_the_reference_model_by_default(path: Path) -> None:
    """As their page says."""
    source = path.read_text(encoding="utf-8")
    assert re.search(r'add_argument\(\s*"model", nargs="\?", default=', source)
    assert '"evals" / "reference_model"' in source


def default_of(*words: str) -> list[str]:
    """The presets that a command takes if none is named."""
    args = parser().parse_args([*words])
    args.load(args)  # which takes other presets with --full
    return [args.preset] if args.preset else [*args.default_presets]


def test_presets_taken_by_default_are_those_of_the_page() -> None:
    """The page names the commands, and what they and functions take."""
    paragraph = page_of("presets").partition("Where you name none, ")[2].partition("\n\n")[0]
    one, calibrated, several, reported, every = re.split(r"\. |; ", paragraph.replace("\n", " "))
    taken = {
        name: inspect.signature(getattr(hf_kvquant, name)).parameters["preset_or_config"].default
        for name in ("patch", "patched", "KVQuantCache", "smooth_attention")
    }
    assert taken == {"patch": "int8", "patched": "int8", "KVQuantCache": "int8", "smooth_attention": "int8"}
    assert default_of("serve", "M") == default_of("batch", "M", "IN", "--output", "OUT") == ["int8"]
    assert one == "`patch`, `KVQuantCache`, `hf-kvquant serve` and `hf-kvquant batch` take `int8`"
    assert calibrated.startswith(f"`smooth_attention` and `hf-kvquant calibrate` take `{CALIBRATED_PRESET}`")
    assert default_of("generate", "M") == default_of("eval", "tasks", "M") == default_of("eval", "long", "M")
    assert re.findall(r"`([^`]+)`", several.rpartition(" take ")[2]) == default_of("generate", "M")
    assert re.findall(r"`([^`]+)`", reported)[1:] == default_of("eval", "report", "M", "--output", "D")
    assert default_of("eval", "perplexity", "M") == default_of("eval", "report", "M", "--output", "D", "--full")
    assert default_of("eval", "perplexity", "M") == [*PRESETS]
    assert every == "`eval perplexity` and `eval report --full` take all."


@pytest.mark.parametrize("command", ["serve", "bench", "batch"])
def test_tables_of_options_are_complete(command: str) -> None:
    """Every option of the command is in the table of its page, and every one of the table is an option."""
    choices = next(iter(action.choices for action in parser()._actions if isinstance(action.choices, dict)))
    known = {name for action in choices[command]._actions for name in action.option_strings} - {"-h", "--help"}
    rows = [line for line in page_of(command).splitlines() if line.startswith("| `--")]
    assert {name for line in rows for name in re.findall(r"--[a-z][a-z-]+", line)} == known


def test_options_of_evaluations_are_those_of_their_table() -> None:
    """All of the table for three evaluations, the last four for `recipes`, the first three for `report`."""
    table = page_of("evaluation").partition("## Options of these")[2].partition("\n## ")[0]
    rows = [
        [shlex.split(cell) for cell in re.findall(r"`(--[^`]+)`", line)]
        for line in table.splitlines()
        if "| `--" in line
    ]
    found = {
        name: [row for row in rows if all(is_parsed("eval", name, "M", *required, *cell) for cell in row)]
        for name, required in {
            "perplexity": [],
            "tasks": [],
            "long": [],
            "recipes": [],
            "report": ["--output", "D"],
        }.items()
    }
    assert found["perplexity"] == found["tasks"] == found["long"] == rows
    assert found["recipes"] == rows[-4:] and "`eval recipes` has the last four" in table
    assert found["report"][:3] == rows[:3] and "`eval report` the\nfirst three" in table


def is_parsed(*words: str) -> bool:
    try:
        parser().parse_args(words)
    except SystemExit:
        return False
    return True


def test_rooms_stand_in_the_order_that_imports_have() -> None:
    """The maps of CONTRIBUTING have the rooms of pyproject.toml, each above those that it may import."""
    layers_of_packages = re.findall(r"^layers = \[\n(.*?)^\]", PROJECT, re.MULTILINE | re.DOTALL)
    maps = (block for block in blocks_of(ROOT / "CONTRIBUTING.md") if block.code.startswith("cli "))
    for layers, rooms in zip(layers_of_packages, maps, strict=True):
        place = {room: number for number, layer in enumerate(layers.split(",")) for room in re.findall(r"\w+", layer)}
        named = re.findall(r"(?:^|  )([a-z_]+)(?=  )", rooms.code, re.MULTILINE)
        assert named == sorted(named, key=place.__getitem__)
        assert {*named} == place.keys() - {"__main__", "_ops"}


def test_rooms_that_import_graphs_are_those_that_are_named() -> None:
    importers = {
        path.relative_to(ROOT / "hf_kvquant").parts[0].removesuffix(".py")
        for path in (ROOT / "hf_kvquant").rglob("*.py")
        if re.search(r"^\s*from \.+graphs\b", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert f"only {' and '.join(sorted(importers))} import it" in CONTRIBUTING


def test_the_diagram_says_what_bits_codes_have() -> None:
    """Once, those of the presets, and the page says the same."""
    diagram = (ROOT / "docs" / "data-flow.svg").read_text(encoding="utf-8")
    text = " ".join(re.findall(r"<text[^>]*>([^<]*)</text>", diagram))
    names = {side.storage for sides in PRESETS.values() for side in sides if side.is_quantized}
    *most, least = sorted({BITS[name] for name in names}, reverse=True)
    spelled = f"{', '.join(map(str, most))} or {least} bits"
    assert f"of {spelled} " in text and text.count("bits") == 1
    assert f"reads {spelled} per value" in page_of("how-it-works")


def test_chunks_begin_where_contributing_says() -> None:
    source = (ROOT / "csrc" / "requirements.cpp").read_text(encoding="utf-8")
    names = "kMinFewRows", "kMinChunkRows", "kMinChunkRowsOfShort"
    few, rows, short = re.search(", ".join(f"{name} = (\\d+)" for name in names), source).groups()  # type: ignore[union-attr]
    text = " ".join(CONTRIBUTING.split())
    assert f"From {rows} query rows on ({short} in short contexts)" in text and f"from {few} to 64 without" in text


def test_batching_serves_every_preset_as_its_pages_say() -> None:
    """Each page refers to the one that says what is refused, which names no preset."""
    if not HAS_PAGES:
        pytest.skip("transformers' paged cache has another design")
    model = AutoModelForCausalLM.from_pretrained(REFERENCE)
    for name in PRESETS:
        config = hf_kvquant.KVQuantConfig.from_preset(name)
        with hf_kvquant.patched(model, config):
            check_served(model, config, ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=64))
    assert "serves every preset" in page_of("models")
    refused = page_of("batching").partition("## What is refused")[2]
    assert not any(f"`{name}`" in refused for name in PRESETS)


def public_docstrings() -> Iterator[tuple[str, str]]:
    for name in hf_kvquant.__all__:
        value = getattr(hf_kvquant, name)
        members = vars(value).items() if inspect.isclass(value) else ()
        for where, each in [(name, value), *((f"{name}.{member}", each) for member, each in members)]:
            if not where.rpartition(".")[2].startswith("_"):
                yield where, inspect.getdoc(each) or ""


def test_public_docstrings_send_nobody_to_a_source_file() -> None:
    """Users read them on the page of the API, without the source at hand."""
    found = {where: re.findall(r"\S+\.(?:py|h|cpp|cuh?)\b", text) for where, text in public_docstrings()}
    assert len(found) > 50 and {where: files for where, files in found.items() if files} == {}
