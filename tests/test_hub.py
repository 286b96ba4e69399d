"""Tests of hub/: the ops alone as a kernel for the kernels hub, which is laid out, imported and run as its users do."""

from __future__ import annotations

import ast
import base64
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cases import make_transform
from waiting import run

from hf_kvquant import KVFormat, ops

ROOT = Path(__file__).resolve().parents[1]
NAMESPACES = ("_hf_kvquant_cpu_first", "_hf_kvquant_cpu_second")
FORMATS = (
    (KVFormat("none"), KVFormat("fp8")),
    (KVFormat("int8"), KVFormat("int4", symmetric=False)),
    (KVFormat("int4", "group", 32), KVFormat("int4", "group", 32)),
)


def load(name: str, path: Path) -> ModuleType:
    """Imports a file as `kernels` does: under a name that is no file's, from outside the path."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def build() -> ModuleType:
    return load("hub_build", ROOT / "hub" / "build.py")


@pytest.fixture(scope="module")
def project(build: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    build.assemble(folder)
    return folder


@pytest.fixture(scope="module")
def kernels(build: ModuleType, project: Path, tmp_path_factory: pytest.TempPathFactory) -> list[ModuleType]:
    """Two builds without an extension, in one process beside the installed package, where they stay: ops cannot go."""
    folder = tmp_path_factory.mktemp("variants")
    for namespace in NAMESPACES:
        build.lay_out(project, folder / namespace, namespace, [], None)
    return [load(namespace, folder / namespace / "__init__.py") for namespace in NAMESPACES]


def step(owner: Any, formats: tuple[KVFormat, KVFormat], suffix: str = "") -> list[torch.Tensor]:
    """What is stored and what is attended after an append and a decode, through one build of the ops.

    Args:
        owner: Has `KVFormat`, `KVLayout`, `KeyTransform` and `Operands`, all of the same build.
        formats: Of the installed package.
        suffix: Of the ops to call instead of those that `Operands` chose.
    """
    torch.manual_seed(0)
    transform = make_transform("center+smooth+rotate", 64)
    layout = owner.KVLayout(*(owner.KVFormat.from_dict(kv_format.to_dict()) for kv_format in formats))
    sides = layout.allocate((2, 2, 64, 64), 128, dtype=torch.float32, device=torch.device("cpu"))
    for planes in sides:
        planes.map(lambda plane: plane.zero_())
    operands = owner.Operands(*sides, layout, owner.KeyTransform(**vars(transform)))
    if suffix:
        operands._append = getattr(torch.ops.hf_kvquant, f"append{suffix}").default
        operands._decode = getattr(torch.ops.hf_kvquant, f"decode{suffix}").default
    old, new = torch.randn(2, 2, 2, 37, 64), torch.randn(2, 2, 2, 1, 64)
    operands.append(*old, torch.tensor([37, 37], dtype=torch.int32))
    lengths = torch.tensor([38, 38], dtype=torch.int32)
    out, lse = operands.decode(torch.randn(2, 4, 1, 64), tuple(new), lengths, softmax_scale=0.125)
    return [*(plane for planes in sides for plane in planes.tensors()), out, lse]


class Installed:
    """The package's own, as `step` takes it."""

    from hf_kvquant import KeyTransform, KVFormat
    from hf_kvquant.ops import Operands
    from hf_kvquant.spec.layout import KVLayout


def same_bits(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(a, b, strict=True))


# --- the files --------------------------------------------------------------------------------------------------------


def test_imports_are_relative_or_of_torch_or_the_standard_library(project: Path) -> None:
    allowed = {*sys.stdlib_module_names, "torch"}
    for path in (project / "torch-ext").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [str(node.module)]
            assert {name.partition(".")[0] for name in names} <= allowed, path


def test_no_file_is_a_second_copy(project: Path) -> None:
    folder = project / "torch-ext" / "hf_kvquant"
    own = {path.name for path in (ROOT / "hub" / "torch-ext" / "hf_kvquant").glob("*.py")}
    assert own == {"__init__.py", "_C.py"}
    copied = {path.relative_to(folder) for path in folder.rglob("*.py")} - {Path(name) for name in own}
    assert Path("ops/__init__.py") in copied and Path("spec/key_transform.py") in copied
    for name in copied:
        assert (folder / name).read_bytes() == (ROOT / "hf_kvquant" / name).read_bytes()


def test_build_toml_names_every_source(project: Path) -> None:
    tomllib = pytest.importorskip("tomllib")
    sections = tomllib.loads((project / "build.toml").read_text())["kernel"]
    csrc = ROOT / "csrc"
    expected = {path for path in csrc.rglob("*") if path.is_file() and path.parent.name != "manylinux"}
    for backend in ("cpu", "cuda"):
        named = [source for part in sections.values() if part["backend"] == backend for source in part["src"]]
        assert len(named) == len(set(named)) and all((project / source).is_file() for source in named)
        found = {ROOT / source for source in named}
        assert found == {
            path for path in expected if backend == "cuda" or csrc / "cuda" not in path.parents or path.suffix == ".h"
        }
    # Contracted, sums would round differently from the reference.
    assert all("-ffp-contract=off" in part["cxx-flags"] for part in sections.values())
    assert "-mavx2" in sections["cpu_avx2"]["cxx-flags"] and "-mavx2" not in sections["cpu"]["cxx-flags"]


def test_the_namespace_is_unique_to_what_is_built(build: ModuleType, project: Path, tmp_path: Path) -> None:
    before = build.namespace_of(project, "cpu")
    assert before.startswith("_hf_kvquant_cpu_") and before.isidentifier()
    assert build.namespace_of(project, "cuda") != before
    changed = shutil.copytree(project, tmp_path / "changed")
    assert build.namespace_of(changed, "cpu") == before
    with open(changed / "csrc" / "format.h", "a") as file:
        file.write("// changed\n")
    assert build.namespace_of(changed, "cpu") != before


def test_metadata_names_the_namespace_and_every_file(build: ModuleType, project: Path, tmp_path: Path) -> None:
    build.lay_out(project, tmp_path / "variant", NAMESPACES[0], ["80", "90"], None)
    metadata = json.loads((tmp_path / "variant" / "metadata.json").read_text())
    assert metadata["id"] == NAMESPACES[0] and metadata["name"] == "hf-kvquant"
    assert metadata["backend"] == {"type": "cuda", "archs": ["8.0", "9.0+PTX"]}
    files = metadata["digest"]["files"]
    for path in (tmp_path / "variant").rglob("*.py"):
        digest = base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
        assert files.pop(path.relative_to(tmp_path / "variant").as_posix()) == digest
    assert not files


def test_variants_are_named_as_the_hub_names_them(build: ModuleType, tmp_path: Path) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V12.8.93'\n")
    nvcc.chmod(0o755)
    system = f"{os.uname().machine}-linux"
    assert build.variant_name(None) == f"torch-stable-abi210-cpu-{system}"
    assert build.variant_name(tmp_path) == f"torch-stable-abi210-cu128-{system}"
    nvcc.write_text("#!/bin/sh\necho nothing\n")
    with pytest.raises(SystemExit) as caught:
        build.variant_name(tmp_path)
    assert str(caught.value) == "hub: `nvcc --version` must show a release, got 'nothing\\n'. Install a CUDA toolkit."


# --- loading ----------------------------------------------------------------------------------------------------------


def test_it_runs_where_there_is_nothing_but_torch(build: ModuleType, project: Path, tmp_path: Path) -> None:
    build.lay_out(project, tmp_path / "variant", NAMESPACES[0], [], None)
    # torch imports what it likes; of what else the package needs, and of the package itself, there is nothing.
    script = """
        import sys
        for name in ("transformers", "safetensors", "rich", "huggingface_hub", "hf_kvquant"):
            sys.modules[name] = None
        import importlib.util
        import torch
        name, path = sys.argv[1:]
        spec = importlib.util.spec_from_file_location(name, path)
        kernel = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(kernel)
        layout = kernel.KVLayout(kernel.KVFormat("int8"), kernel.KVFormat("int4"))
        shape = dict(dtype=torch.float32, device=torch.device("cpu"))
        planes = layout.allocate((1, 1, 64, 64), 64, **shape)
        tokens, lengths = torch.ones(1, 1, 3, 64), torch.tensor([3], dtype=torch.int32)
        out, _ = kernel.decode(tokens, (tokens, tokens), *planes, lengths, layout, softmax_scale=1.0)
        assert (out - 1).abs().max() < 1e-3  # 2**-12, from a scale of 1/127 in half precision
    """
    arguments = [NAMESPACES[0], str(tmp_path / "variant" / "__init__.py")]
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(script), *arguments]
    run(command, cwd=tmp_path)


@pytest.mark.parametrize("formats", FORMATS, ids=lambda formats: "+".join(f.describe() for f in formats))
def test_two_builds_beside_the_package_have_the_bits_of_the_reference(
    formats: tuple[KVFormat, KVFormat], kernels: list[ModuleType]
) -> None:
    expected = step(Installed, formats, suffix="_reference")
    for kernel, namespace in zip(kernels, NAMESPACES, strict=True):
        assert not kernel.has_kernels("cpu")
        assert getattr(torch.ops, namespace).append.default is not torch.ops.hf_kvquant.append.default
        assert same_bits(step(kernel, formats), expected)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "c++")) is None, reason="needs a C++ compiler")
def test_two_compiled_builds_have_the_codes_of_the_reference(build: ModuleType, project: Path, tmp_path: Path) -> None:
    names = [f"{namespace}_compiled" for namespace in NAMESPACES]
    for namespace in names:
        library = build.compile_library(namespace, [], tmp_path)
        build.lay_out(project, tmp_path / namespace, namespace, [], library)
    builds = [load(namespace, tmp_path / namespace / "__init__.py") for namespace in names]
    assert all(kernel.has_kernels("cpu") for kernel in builds)
    for formats in FORMATS:
        results = [step(kernel, formats) for kernel in builds]
        *codes, out, lse = step(Installed, formats, suffix="_reference")
        assert same_bits(*results) and same_bits(results[0][:-2], codes)
        torch.testing.assert_close(results[0][-2:], [out, lse])
        if ops.has_kernels("cpu"):
            assert same_bits(results[0], step(Installed, formats))
