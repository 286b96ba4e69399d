"""Builds the ops alone as a kernel for the Hugging Face kernels hub and its `kernels` package: `make hub`.

    python hub/build.py                     # into build/hub

Nothing is kept twice in the repository: `ops/` and the modules that it imports come from `hf_kvquant/`, the sources
from `csrc/`, their flags from `setup.py`, and the few files that only the hub needs from this folder. Together they are
a project for `kernel-builder build`, which needs Nix. Without Nix, this script builds for this machine what
kernel-builder would, into the project's `build/<variant>`: for CPU and CUDA if there is an nvcc, else for the CPU only.
The environment variables are those of setup.py.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import json
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hf_kvquant"
PYTHON = Path("torch-ext", PACKAGE.name)  # where kernel-builder looks for the Python files of a project
# The oldest torch that runs the variants; they carry it in their names.
STABLE_ABI = "2.10"


def build_rules() -> dict[str, Any]:
    """The definitions in setup.py, without running a build."""
    with mock.patch("setuptools.setup"):
        return runpy.run_path(str(ROOT / "setup.py"))


def needed_modules() -> list[Path]:
    """`ops/` and all files that it imports, directly or not, except the package's own `__init__.py`."""
    found: set[Path] = set()
    waiting = [PACKAGE / "ops" / "__init__.py"]
    while waiting:
        path = waiting.pop()
        if path in found or path == PACKAGE / "__init__.py" or not path.is_file():
            continue
        found.add(path)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                target = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
                for module in (target.parent, target, *(target / alias.name for alias in node.names)):
                    waiting += [module.with_suffix(".py"), module / "__init__.py"]
    return sorted(found)


def capabilities(archs: list[str]) -> list[str]:
    """Architectures in the hub's spelling, such as `["8.0", "9.0+PTX"]`. The last one is stored as PTX too."""
    numbers = [f"{arch[:-1]}.{arch[-1]}" for arch in archs]
    return [*numbers[:-1], f"{numbers[-1]}+PTX"]


def kernel_sections(rules: dict[str, Any]) -> str:
    """The sections of build.toml that name sources and flags. The CUDA backend has the CPU kernels too, as in a wheel.

    kernel-builder itself links for old libraries, so `csrc/manylinux` is left out.
    """
    everything = (path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").rglob("*") if path.is_file())
    sources = sorted(path for path in everything if not path.startswith("csrc/manylinux/"))
    sets: dict[str, tuple[str, ...]] = rules["X86_SETS"]
    own = {f"csrc/cpu/kernels_{name}.cpp": name for name in sets}
    common = [*rules["CXX_FLAGS"], *(f"-DHF_KVQUANT_{name.upper()}" for name in sets)]
    archs = rules["WHEEL_CUDA_ARCHS"].split(";")
    lines = []
    for backend in ("cpu", "cuda"):
        options: dict[str, list[str]] = {"depends": ["torch"], "include": ["csrc"]}
        flags = list(common)
        # csrc/requirements.cpp reads headers of csrc/cuda, which need no CUDA.
        mine = [
            source
            for source in sources
            if backend == "cuda" or not source.startswith("csrc/cuda/") or source.endswith(".h")
        ]
        if backend == "cuda":
            flags.append(f"-DHF_KVQUANT_CUDA_ARCHS={','.join(archs)}")
            options |= {"cuda-capabilities": capabilities(archs), "cuda-flags": ["-Xcompiler=-fvisibility=hidden"]}
        parts = {backend: ([source for source in mine if source not in own], flags)}
        for source, name in own.items():
            parts[f"{backend}_{name}"] = ([source], [*flags, *(f"-m{part}" for part in sets[name])])
        for name, (part, part_flags) in parts.items():
            lines += ["", f"[kernel.{name}]", f'backend = "{backend}"']
            lines += [f"{key} = {json.dumps(value)}" for key, value in options.items()]
            lines += [f"cxx-flags = {json.dumps(part_flags)}", f"src = {json.dumps(part, indent=4)}"]
    return "\n".join(lines) + "\n"


def assemble(project: Path) -> None:
    """Make a folder a project for kernel-builder. Earlier builds in it stay.

    Args:
        project: The folder, which may exist.
    """
    for name in ("csrc", "torch-ext"):
        shutil.rmtree(project / name, ignore_errors=True)
    shutil.copytree(ROOT / "csrc", project / "csrc")
    shutil.copytree(ROOT / "hub" / PYTHON, project / PYTHON, ignore=shutil.ignore_patterns("__pycache__"))
    for path in needed_modules():
        target = project / PYTHON / path.relative_to(PACKAGE)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
    shutil.copy2(ROOT / "hub" / "flake.nix", project)
    (project / "build.toml").write_text((ROOT / "hub" / "build.toml").read_text() + kernel_sections(build_rules()))


def namespace_of(project: Path, backend: str) -> str:
    """The namespace of the ops, and the name of the library: unique to the contents of a project.

    Args:
        project: As `assemble` made it.
        backend: `"cpu"` or `"cuda"`.
    """
    digest = hashlib.sha256()
    for part in ("build.toml", "csrc", "torch-ext"):
        for path in sorted([project / part, *(project / part).rglob("*")]):
            if path.is_file():
                digest.update(path.relative_to(project).as_posix().encode() + b"\0" + path.read_bytes())
    return f"_{PACKAGE.name}_{backend}_{digest.hexdigest()[:8]}"


def lay_out(project: Path, variant: Path, namespace: str, archs: list[str], library: Path | None) -> None:
    """Write a folder that `kernels` can load.

    Args:
        project: As `assemble` made it.
        variant: The folder, which is replaced.
        namespace: Of the ops; `kernels` also imports the folder by this name.
        archs: The architectures of the CUDA kernels; empty for a build without.
        library: The extension, registered in that namespace; with `None`, the reference runs all ops.
    """
    shutil.rmtree(variant, ignore_errors=True)
    shutil.copytree(project / PYTHON, variant)
    names = variant / "_ops.py"
    names.write_text(names.read_text().replace(PACKAGE.name, namespace))
    if library is not None:
        shutil.copy2(library, variant)
    general = dict(
        re.findall(r'^(name|version|license) = "?([\w.-]+)', (project / "build.toml").read_text(), re.MULTILINE)
    )
    hashes = {
        path.relative_to(variant).as_posix(): base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
        for path in sorted(variant.rglob("*"))
        if path.is_file()
    }
    metadata = {
        "id": namespace,
        "name": general["name"],
        "version": int(general["version"]),
        "license": general["license"],
        "python-depends": [],
        "backend": {"type": "cuda", "archs": capabilities(archs)} if archs else {"type": "cpu"},
        "digest": {"algorithm": "sha256", "files": hashes},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def variant_name(cuda: Path | None) -> str:
    """The hub's name for a build for this kind of machine, such as `torch-stable-abi210-cu130-x86_64-linux`.

    Args:
        cuda: The toolkit, whose version is part of the name; `None` for the CPU.
    """
    compute = "cpu"
    if cuda is not None:
        shown = subprocess.run([cuda / "bin" / "nvcc", "--version"], capture_output=True, text=True, check=True).stdout
        found = re.search(r"release (\d+)\.(\d+)", shown)
        if found is None:
            raise SystemExit(f"hub: `nvcc --version` must show a release, got {shown!r}. Install a CUDA toolkit.")
        compute = f"cu{found[1]}{found[2]}"
    system = f"{platform.machine()}-{platform.system().lower()}"
    return f"torch-stable-abi{STABLE_ABI.replace('.', '')}-{compute}-{system}"


def compile_library(namespace: str, archs: list[str], folder: Path) -> Path:
    """Compile the extension for a namespace, as for a wheel. Builds share all objects that do not depend on it.

    Args:
        namespace: Of the ops, and the name of the library.
        archs: The architectures of the CUDA kernels; empty for none.
        folder: Where the library goes.
    """
    chosen = {"HF_KVQUANT_CUDA_ARCHS": ";".join(archs)} if archs else {"HF_KVQUANT_SKIP_CUDA": "1"}
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--build-lib", str(folder)]
    subprocess.run(command, cwd=ROOT, env=os.environ | chosen | {"HF_KVQUANT_NAMESPACE": namespace}, check=True)
    return folder / PACKAGE.name / f"{namespace}.abi3.so"


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the ops alone as a kernel for the Hugging Face kernels hub.")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "hub", help="the project; old builds stay")
    project = parser.parse_args().output

    rules = build_rules()
    archs: list[str] = rules["cuda_archs"](is_native=False)
    found = rules["find_cuda"]() if archs else None
    assemble(project)
    for backend, cuda in [("cpu", None), *([("cuda", found[0])] if found else [])]:
        built = archs if cuda else []
        namespace = namespace_of(project, backend)
        variant = project / "build" / variant_name(cuda)
        with tempfile.TemporaryDirectory() as folder:
            lay_out(project, variant, namespace, built, compile_library(namespace, built, Path(folder)))
        print(variant)


if __name__ == "__main__":
    main()
