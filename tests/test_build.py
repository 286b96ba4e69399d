"""What setup.py decides before it compiles, and what pip shows of it. CI compiles; nothing does here."""

from __future__ import annotations

import os
import pty
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

ROOT = Path(__file__).parents[1]
VARIABLES = ("CUDA_ARCHS", "SKIP_CUDA", "SANITIZE", "MANYLINUX", "NAMESPACE")


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The definitions in setup.py, in an environment that asks for nothing."""
    for name in VARIABLES:
        monkeypatch.delenv(f"HF_KVQUANT_{name}", raising=False)
    monkeypatch.delenv("PIP_BUILD_TRACKER", raising=False)
    with mock.patch("setuptools.setup"):
        return runpy.run_path(str(ROOT / "setup.py"))


def torch_of(folder: Path, version: str) -> Path:
    """The folder of a torch whose version.py has this line."""
    folder.mkdir()
    (folder / "version.py").write_text(f"from typing import Optional\n__version__ = 'x'\n{version}\nhip = None\n")
    return folder


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("cuda: Optional[str] = None", False),
        ("cuda = None", False),
        ("cuda: Optional[str] = '13.0'", True),
        ("cuda = '12.8'", True),
        ("cuda_of_another_kind = None", True),  # unknown: compile everything, as ever
    ],
)
def test_whether_torch_has_cuda_is_read_from_its_files(
    setup: dict[str, Any], tmp_path: Path, version: str, expected: bool
) -> None:
    assert setup["has_cuda"](torch_of(tmp_path / "torch", version)) is expected


def test_the_torch_of_this_environment_is_read(setup: dict[str, Any]) -> None:
    import torch

    assert setup["has_cuda"](setup["torch_folder"]()) is (torch.version.cuda is not None)


def test_beside_a_torch_without_cuda_no_cuda_is_compiled(
    setup: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without = torch_of(tmp_path / "without", "cuda: Optional[str] = None")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))  # where there is an nvcc, which changes nothing
    for name in ("bin/nvcc", "lib64/libcudart_static.a"):
        (tmp_path / "cuda" / name).parent.mkdir(parents=True)
        (tmp_path / "cuda" / name).touch()
    for is_native in (True, False):
        rules = setup["write_ninja"](without, Path("out.so"), is_native)
        assert ".cu" not in rules and "nvcc" not in rules.partition("rule")[0]
        assert capsys.readouterr().out == (
            "hf_kvquant: this torch was built without CUDA: compiling the CPU kernels only. "
            'For CUDA too: HF_KVQUANT_CUDA_ARCHS="80;90"\n'
        )
    # Who names architectures gets them, and a wheel for other machines has all.
    monkeypatch.setenv("HF_KVQUANT_CUDA_ARCHS", "9.0")
    assert ".cu" in setup["write_ninja"](without, Path("out.so"), False)
    told = "hf_kvquant: compiling the CPU kernels, and CUDA kernels for {}. For others: HF_KVQUANT_CUDA_ARCHS\n"
    assert capsys.readouterr().out == told.format("90")
    monkeypatch.delenv("HF_KVQUANT_CUDA_ARCHS")
    monkeypatch.setenv("HF_KVQUANT_MANYLINUX", "1")
    assert ".cu" in setup["write_ninja"](without, Path("out.so"), False)
    assert capsys.readouterr().out == told.format("80;86;89;90")
    monkeypatch.setenv("HF_KVQUANT_SKIP_CUDA", "1")
    assert ".cu" not in setup["write_ninja"](without, Path("out.so"), False)


def test_beside_a_torch_with_cuda_a_wheel_has_all_architectures(setup: dict[str, Any], tmp_path: Path) -> None:
    torch = torch_of(tmp_path / "torch", "cuda = '13.0'")
    assert setup["cuda_archs"](False, torch) == setup["cuda_archs"](False) == ["80", "86", "89", "90"]


# --- what is compiled for which GPUs

WHEEL = ["80", "86", "89", "90"]
GENERATIONS = [
    ("attend/attend_int8.cu", WHEEL, "80: sm_80 sm_86, 90: sm_90 compute_90"),
    ("attend/attend_int8.cu", ["89"], "80: sm_89 compute_80"),
    ("append/append.sm89.cu", WHEEL, "80: sm_80 sm_86, 89: sm_89, 90: sm_90 compute_90"),
    ("append/append.sm89.cu", ["89"], "89: sm_89 compute_89"),
    ("append/append.sm89.cu", ["86"], "80: sm_86 compute_80"),
    ("sm90/chunk/attend_chunk.cu", WHEEL, "90a: sm_90a compute_90a"),
    ("sm90/chunk/attend_chunk.cu", ["80", "86"], "80: sm_86 compute_80"),  # empty there, but has to link
]


@pytest.mark.parametrize(("source", "archs", "expected"), GENERATIONS)
def test_the_path_says_what_a_source_is_compiled_for(
    setup: dict[str, Any], source: str, archs: list[str], expected: str
) -> None:
    assert (ROOT / "csrc" / "cuda" / source).is_file()
    options = setup["cuda_targets"](Path("csrc", "cuda", source), archs)
    found = re.findall(r"-gencode 'arch=compute_(\w+),code=\[(.*?)\]'", options)
    assert ", ".join(f"{ptx}: {names.replace(',', ' ')}" for ptx, names in found) == expected


# --- what pip shows ---------------------------------------------------------------------------------------------------

# A build as pip runs it: with pipes for what it prints.
PIP = """
import subprocess, sys
print("Building wheel ... ", end="", flush=True)
done = subprocess.run([sys.executable, "-c", sys.argv[1]], capture_output=True, text=True)
assert done.returncode == 0 and "hf_kvquant: said" in done.stdout, done
"""
# Progress as ninja prints it, without its pauses.
BUILD = f"""
import runpy, sys
from unittest import mock
with mock.patch("setuptools.setup"):
    setup = runpy.run_path({str(ROOT / "setup.py")!r})
setup["say"]("said")
setup["run"].__globals__["TELL_S"] = -1
lines = "print('hf_kvquant: [1/2, 7 s] C++ a'); print('a warning'); print('hf_kvquant: [2/2, 9 s] link'); sys.exit(3)"
assert setup["run"]([sys.executable, "-c", "import sys; " + lines], {{}}) == 3
"""
PROGRESS = ["hf_kvquant: said", "hf_kvquant: [1/2, 7 s] C++ a", "hf_kvquant: [2/2, 9 s] link"]


@pytest.mark.parametrize(
    ("words", "variables", "shown"),
    [
        ([], {"PIP_BUILD_TRACKER": "x"}, PROGRESS),
        (["-v"], {"PIP_BUILD_TRACKER": "x"}, []),  # pip shows it all
        (["--quiet"], {"PIP_BUILD_TRACKER": "x"}, []),
        ([], {}, []),  # not pip
    ],
    ids=["plain", "verbose", "quiet", "not-pip"],
)
def test_progress_is_shown_at_the_terminal_of_pip(
    words: list[str], variables: dict[str, str], shown: list[str]
) -> None:
    ours, terminal = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "PIP_BUILD_TRACKER"} | variables
    subprocess.run([sys.executable, "-c", PIP, BUILD, *words], stdout=terminal, check=True, env=environment)
    os.close(terminal)
    assert read(ours).splitlines() == ["Building wheel ... ", *shown]


def test_progress_is_not_shown_where_pip_prints_to_a_file(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w") as log:
        environment = {**os.environ, "PIP_BUILD_TRACKER": "x"}
        subprocess.run([sys.executable, "-c", PIP, BUILD], stdout=log, check=True, env=environment)
    assert (tmp_path / "log").read_text() == "Building wheel ... "


def read(terminal: int) -> str:
    """What has been written to a terminal that is closed by now."""
    parts = []
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # Linux's end of a terminal
            part = b""
        if not part:
            os.close(terminal)
            return b"".join(parts).decode()
        parts.append(part)
