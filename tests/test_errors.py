"""The exceptions of the package and of its evaluations: one tree each, drawn at the top of one file."""

from __future__ import annotations

import ast
import builtins
import inspect
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
from waiting import run

import hf_kvquant
import hf_kvquant_evals.errors
from hf_kvquant.common import errors

FILES = [errors, hf_kvquant_evals.errors]
ROOT = Path(hf_kvquant.__file__).parents[1]


def is_builtin(exception: type) -> bool:
    return vars(builtins).get(exception.__name__) is exception


def exceptions_of(module: ModuleType) -> list[type[BaseException]]:
    """The exceptions that a module defines, in its order."""
    classes = [each for each in vars(module).values() if inspect.isclass(each) and each.__module__ == module.__name__]
    return [each for each in classes if issubclass(each, BaseException)]


def drawn(module: ModuleType) -> str:
    """The tree of a module's exceptions, with those above them in other modules."""
    parents: dict[type, type | None] = {}
    for exception in exceptions_of(module):
        ours = [each for each in exception.mro() if not is_builtin(each)]
        for each, parent in reversed([*zip(ours, [*ours[1:], None], strict=True)]):
            parents.setdefault(each, parent)

    def lines(parent: type | None) -> list[str]:
        found = []
        for each in (each for each, its_parent in parents.items() if its_parent is parent):
            also = [base.__name__ for base in each.__bases__ if is_builtin(base) and base is not Exception]
            found += [" ".join([each.__name__, *(f"({name})" for name in also)]), *(f"    {x}" for x in lines(each))]
        return found

    return "\n".join(lines(None))


@pytest.mark.parametrize("module", FILES, ids=lambda module: module.__name__)
def test_the_docstring_draws_the_tree(module: ModuleType) -> None:
    assert f"\n\n{textwrap.indent(drawn(module), '    ')}\n\n" in (module.__doc__ or ""), drawn(module)


def test_all_exceptions_are_in_these_files() -> None:
    known = {name for name, each in vars(builtins).items() if inspect.isclass(each) and issubclass(each, BaseException)}
    known |= {each.__name__ for module in FILES for each in exceptions_of(module)}
    files = {path for folder in ("hf_kvquant", "evals") for path in (ROOT / folder).rglob("*.py")}
    files -= {Path(str(module.__file__)) for module in FILES}
    for path in sorted(files):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
                assert not bases & known, f"{path.relative_to(ROOT)}: {node.name} belongs into errors.py"


def test_they_import_nothing_that_is_slow() -> None:
    names = [module.__name__ for module in FILES]
    script = f"""
        import sys
        before = set(sys.modules)
        import {", ".join(names)}
        packages = {{name.partition(".")[0] for name in set(sys.modules) - before}}
        print(sorted(packages - sys.stdlib_module_names))
    """
    assert run([sys.executable, "-c", textwrap.dedent(script)]).stdout == "['hf_kvquant', 'hf_kvquant_evals']\n"
