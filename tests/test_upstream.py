"""What this package relies on in transformers, held against the installed release: which file of ours must follow."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import transformers
from transformers import GenerationMixin

import hf_kvquant
from hf_kvquant import cli
from hf_kvquant.environment import environment
from hf_kvquant.upstream import contracts, releases
from hf_kvquant.upstream.contracts import CONTRACTS, Contract, changed_overrides

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hf_kvquant"
# Evaluations, whose files are named with their package here.
EVALS = "hf_kvquant_evals"
# What the server and evaluations need, and is not installed everywhere.
EXTRAS = ("fastapi", "lm_eval", "matplotlib", "jinja2")


def names_of(contract: Contract) -> str:
    return f"{contract.ours}-{contract.theirs.rpartition('.')[2]}"


def why_absent(path: str) -> str | None:
    """Why a file of ours cannot be used here."""
    if path.startswith(("batching/", "serving/")) and not releases.HAS_PAGES:
        return "transformers' paged cache has another design"
    try:
        importlib.import_module(module_of(path))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in EXTRAS:
            return f"needs {error.name}"
        raise
    return None


def module_of(path: str) -> str:
    package = "" if path.startswith(EVALS) else "hf_kvquant."
    return package + path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def source_of(path: str) -> str:
    return ((ROOT / "evals" if path.startswith(EVALS) else PACKAGE) / path).read_text()


def skip_absent(path: str) -> None:
    reason = why_absent(path)
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("contract", CONTRACTS, ids=names_of)
def test_theirs_is_as_ours_expects(contract: Contract) -> None:
    skip_absent(contract.ours)
    why = contract.why_broken()
    assert why is None, f"transformers {transformers.__version__} {why}: hf_kvquant/{contract.ours} must follow"


@pytest.mark.parametrize("contract", CONTRACTS, ids=names_of)
def test_each_contract_is_needed_by_its_file(contract: Contract) -> None:
    source = source_of(contract.ours)
    if contract.ours == "upstream/releases.py":
        assert releases.CACHE in contract.parameters + contract.mentions
    else:
        # Masks and attention are called by name of the parameter, not of the function.
        wanted = contract.theirs.rpartition(".")[2], *re.findall(r"\w+", contract.mentions + contract.parameters)
        assert any(re.search(rf"\b{name}\b", source) for name in wanted), contract.ours


def files() -> list[str]:
    roots = (PACKAGE, PACKAGE), (ROOT / "evals", ROOT / "evals" / EVALS)
    return sorted(str(path.relative_to(root)) for root, folder in roots for path in folder.rglob("*.py"))


def imports_of(path: str) -> Iterator[tuple[str, str]]:
    """Module and name of everything that a file of ours imports from transformers, wherever it does."""
    for node in ast.walk(ast.parse(source_of(path))):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith("transformers"):
            yield from ((node.module or "", alias.name) for alias in node.names)


@pytest.mark.parametrize("path", [path for path in files() if any(True for _ in imports_of(path))])
def test_what_a_file_imports_is_there(path: str) -> None:
    skip_absent(path)
    for module, name in imports_of(path):
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}: {module_of(path)} must follow"


def modules() -> list[str]:
    return [module_of(path) for path in files() if not path.endswith("__main__.py") and why_absent(path) is None]


def classes_over_theirs() -> list[type]:
    found: dict[str, type] = {}
    for name in modules():
        for kind in vars(importlib.import_module(name)).values():
            if inspect.isclass(kind) and kind.__module__ == name:
                if any(each.__module__.startswith("transformers.") for each in kind.__mro__):
                    found[f"{name}.{kind.__name__}"] = kind
    return list(found.values())


def test_what_we_override_takes_what_theirs_takes() -> None:
    kinds = classes_over_theirs()
    assert len(kinds) > 10
    changed = {f"{kind.__module__}: {each}" for kind in kinds for each in changed_overrides(kind)}
    assert not changed


def private_names() -> dict[str, set[str]]:
    """Names with an underscore that files of ours read on objects of others, with the files."""
    own: set[str] = set()
    read: dict[str, set[str]] = {}
    for path in files():
        for node in ast.walk(ast.parse(source_of(path))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Attribute) and re.fullmatch(r"_[a-z]\w*", node.attr):
                is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                if is_own and isinstance(node.ctx, ast.Store):
                    own.add(node.attr)
                elif not is_own:
                    read.setdefault(node.attr, set()).add(path)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                own.add(node.target.id)
            elif isinstance(node, ast.Constant) and re.fullmatch(r"_[a-z]\w*", str(node.value)):
                read.setdefault(str(node.value), set()).add(path)
    return {name: paths for name, paths in read.items() if name not in own}


def test_every_private_name_of_theirs_has_a_contract() -> None:
    """A name that only their code defines is in the table, so that its loss is noticed."""
    known = " ".join(f"{each.theirs} {each.mentions}" for each in CONTRACTS)
    folder = Path(transformers.__file__).parent
    theirs = "\n".join(
        (folder / path).read_text()
        for path in ("modeling_utils.py", "configuration_utils.py", "generation/utils.py", "cache_utils.py")
    )
    # Documented for users of transformers, or set by us.
    left_out = {"_attn_implementation", "_commit_hash", "_version"}
    defined = {
        name for name in private_names() if re.search(rf"def {name}\b|self\.{name} = |^    {name}\b", theirs, re.M)
    }
    missing = {name: private_names()[name] for name in defined - left_out if not re.search(rf"\b{name}\b", known)}
    assert not missing


# --- releases that are newer than those tested ------------------------------------------------------------------------


def test_the_versions_are_those_that_are_installed_and_pinned() -> None:
    bound = re.search(r'"transformers>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    pin = re.search(r'^transformers==([\d.]+); python_version >= "3.11"', (ROOT / "requirements.txt").read_text(), re.M)
    assert bound is not None and bound[1] == releases.OLDEST
    assert pin is not None and pin[1].startswith(f"{releases.NEWEST}.")


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A transformers with the version 6.0.0 that is otherwise the installed one."""
    contracts._changed.cache_clear()
    monkeypatch.setattr(releases, "VERSION", "6.0.0")
    yield monkeypatch
    contracts._changed.cache_clear()


REMEDY = f"This version of hf_kvquant works with {releases.TESTED}. Install one of these, or a newer hf_kvquant."


@pytest.mark.usefixtures("newer")
def test_a_newer_release_that_has_changed_nothing_works_and_is_named() -> None:
    model = models.build("llama")
    hf_kvquant.patch(model, "int4-token")
    assert models.greedy(model, models.left_padded(), 2).sequences.shape[1] > 2
    assert environment()["transformers"] == f"6.0.0, newer than those tested ({releases.TESTED})"


def test_a_tested_release_is_not_called_newer() -> None:
    assert not releases.is_untested() and "newer" not in environment()["transformers"]


def test_a_newer_release_that_calls_the_hook_otherwise_is_refused(newer: pytest.MonkeyPatch) -> None:
    def other(self: Any, generation_config: Any, inputs: Any) -> None:
        """Stands for a change: "cache" "past_key_values"."""

    model = models.build("llama")
    before = dict(vars(model))
    newer.setattr(GenerationMixin, "_prepare_cache_for_generation", other)
    expected = CONTRACTS[[each.theirs.endswith("_prepare_cache_for_generation") for each in CONTRACTS].index(True)]
    for where, call in {
        "patch": lambda: hf_kvquant.patch(model, "int4-token"),
        "enable": hf_kvquant.enable,
        "KVQuantCache": lambda: hf_kvquant.KVQuantCache(model.config, "int4-token"),
    }.items():
        with pytest.raises(NotImplementedError) as raised:
            call()
        assert str(raised.value) == (
            f"{where}: transformers 6.0.0 has {expected.theirs} with the parameters "
            f"['self', 'generation_config', 'inputs'], not {expected.parameters.split()}. {REMEDY}"
        )
    assert vars(model) == before


def test_a_newer_release_without_something_is_refused(newer: pytest.MonkeyPatch) -> None:
    newer.delattr(GenerationMixin, "_valid_auto_compile_criteria")
    with pytest.raises(NotImplementedError) as raised:
        hf_kvquant.patch(models.build("llama"), "int4-token")
    assert str(raised.value) == (
        "patch: transformers 6.0.0 has no transformers.generation.utils.GenerationMixin._valid_auto_compile_criteria. "
        + REMEDY
    )


@pytest.mark.skipif(not releases.HAS_PAGES, reason="transformers' paged cache has another design")
def test_a_newer_release_with_other_batching_serves_generate(newer: pytest.MonkeyPatch) -> None:
    from transformers.generation.continuous_batching.continuous_api import ContinuousMixin

    def other(self: Any, generation_config: Any = None) -> None:
        """Stands for a change."""

    model = models.build("llama")
    newer.setattr(ContinuousMixin, "init_continuous_batching", other)
    hf_kvquant.patch(model, "int4-token")
    with pytest.raises(NotImplementedError) as raised:
        model.init_continuous_batching()
    assert str(raised.value).endswith(REMEDY) and "init_continuous_batching" in str(raised.value)


def lacking() -> ImportError:
    return ImportError("cannot import name 'x' from 'transformers.cache_utils'", name="transformers.cache_utils")


LACKING = (
    "hf_kvquant: transformers 6.0.0 lacks what this version needs (cannot import name 'x' from "
    f"'transformers.cache_utils'). It works with {releases.TESTED}. Install one of these, or a newer hf_kvquant."
)


def fail(*_: Any) -> None:
    raise lacking()


def test_an_import_that_a_tested_release_lacks_is_a_bug() -> None:
    error = lacking()
    assert releases.explained(error) is error


@pytest.mark.parametrize("version", ["6.0.0", "5.16.1"])
def test_an_import_that_another_release_lacks_is_explained(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "VERSION", version)
    assert str(releases.explained(lacking())) == LACKING.replace("6.0.0", version)
    of_others = ImportError("no module named 'x'", name="x")
    assert releases.explained(of_others) is of_others


def test_a_name_of_the_package_that_cannot_be_imported(newer: pytest.MonkeyPatch) -> None:
    newer.setattr(hf_kvquant.importlib, "import_module", fail)
    newer.delitem(vars(hf_kvquant), "patch", raising=False)
    with pytest.raises(ImportError) as raised:
        hf_kvquant.patch  # noqa: B018
    assert str(raised.value) == LACKING and isinstance(raised.value.__cause__, ImportError)


def test_a_command_that_cannot_be_imported_ends_in_a_line(
    newer: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = cli.parser().parse_args(["env"])
    args.load = fail
    assert cli.run(args) == 2
    assert capsys.readouterr().err == f"hf-kvquant: error: {LACKING}\n"


def test_contracts_say_what_their_source_lacks() -> None:
    contract = Contract("cache/kvquant_cache.py", "transformers.cache_utils.Cache.update", mentions="no_such_name")
    assert contract.why_broken() == "has transformers.cache_utils.Cache.update without ['no_such_name']"
    assert Contract("", "transformers.no_such_module.x").why_broken() == "has no transformers.no_such_module.x"


def test_a_method_that_ours_replaces_may_not_take_more() -> None:
    update = "transformers.cache_utils.Cache.update"
    names = list(inspect.signature(contracts._resolve(update)).parameters)[1:]
    assert Contract("", update, " ".join(names), is_replaced=True).why_broken() is None
    assert Contract("", update, " ".join(names[:-1])).why_broken() is None
    expected = f"has {update} with the parameters {['self', *names]}, not {names[:-1]}"
    assert Contract("", update, " ".join(names[:-1]), is_replaced=True).why_broken() == expected


def test_an_override_that_cannot_take_what_theirs_takes_is_found() -> None:
    class Ours(transformers.DynamicCache):
        def reorder_cache(self) -> None: ...

        def crop(self, **kwargs: Any) -> None: ...

    (found,) = changed_overrides(Ours)
    assert found == "Ours.reorder_cache takes ['self'], and theirs ['self', 'beam_idx']"
