"""Builds `hf_kvquant/_C.abi3.so` from `csrc/` with ninja, for every Python from 3.10 and every torch from 2.10 on.

An editable build (`pip install -e .`, `setup.py build_ext --inplace`) compiles only what this machine can run: CPU
kernels for its instruction sets, and CUDA kernels for its GPUs. A wheel (`pip install .`) compiles everything. Beside a
torch that was built without CUDA, both compile the CPU kernels only, unless they are told otherwise: CUDA kernels need
nvcc to be compiled, but no such torch.

torch is never imported. Its headers are found next to the interpreter that installs, even from inside pip's isolated
build, which downloads a torch of its own only if none is installed. One binary serves all versions because the sources
use only the torch stable ABI and Python's limited API. All sources in `csrc/` are compiled. Metadata and tool settings
are in `pyproject.toml`.

Environment:
    HF_KVQUANT_CUDA_ARCHS   compute capabilities without dots, separated by `;` (in a wheel `80;86;89;90`); the last
                            one is also stored as PTX, which newer GPUs compile when they first load it. If set, CUDA
                            sources are compiled whatever torch is installed.
    HF_KVQUANT_SKIP_CUDA=1  compile no CUDA source
    HF_KVQUANT_SANITIZE=1   compile the CPU kernels under the address and undefined-behaviour sanitizers, into
                            build/sanitized; `make sanitize-cpu` builds and runs it
    HF_KVQUANT_MANYLINUX=1  link for manylinux_2_28, as `make wheel` does, with zig's linker, which knows the symbols of
                            glibc 2.28 whatever glibc this machine has. The compilers stay the same; no other build
                            needs zig. Since it is for other machines, the torch of this one does not decide on CUDA.
    MAX_JOBS                compiler processes at a time (default: the number of processors)
    CUDA_HOME, CXX          where CUDA is, which C++ compiler to use
    HF_KVQUANT_NAMESPACE    name of the op namespace and of the library, for a build that is loaded together with the
                            package: `make hub`
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import TextIO

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
IS_SANITIZED = os.environ.get("HF_KVQUANT_SANITIZE", "0") not in ("", "0")
NAMESPACE = os.environ.get("HF_KVQUANT_NAMESPACE", "")
LIBRARY = NAMESPACE or "_C"
# Relative to ROOT. A fixed folder, not setuptools' temporary one, so that ninja finds its objects again and compiles
# only what has changed.
OBJECTS = Path("build", "sanitized" if IS_SANITIZED else "ninja")
# Where the package with a sanitized extension goes. Only a Python with libasan preloaded can load that extension.
SANITIZED_LIB = Path("build", "sanitized", "lib")

# Isolated builds use the headers of this version if no torch is installed. The binary does not depend on it.
FALLBACK_TORCH = "torch==2.13.0"
# The linker of HF_KVQUANT_MANYLINUX, and the glibc that its output runs on.
ZIG = "ziglang==0.17.1"
ZIG_TARGET = f"{platform.machine()}-linux-gnu.2.28"

DEFINES = ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-DPy_LIMITED_API=0x03090000"]
# Neither fast-math nor contraction: codes and scales are bitwise those of reference.py. No -march either: a wheel runs
# on any processor of its architecture, and the code of X86_SETS below runs only if the processor supports it.
CXX_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra"]
# The first error ends the run. Memory that torch allocates is checked too, though torch itself is not instrumented.
SANITIZE_FLAGS = [
    "-O1",
    "-g1",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
]
# The x86 instruction sets that have their own kernels, csrc/cpu/kernels_*.cpp, and gcc's names for their parts.
X86_SETS = {
    "avx2": ("avx2", "fma", "f16c"),
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni", "fma", "f16c"),
}
TELL_S = 5.0  # between two lines of progress at pip's terminal
WHEEL_CUDA_ARCHS = "80;86;89;90"
NVCC_FLAGS = ["-std=c++17", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden"]

NINJA_RULES = """
rule cxx
  command = $cxx $flags $file_flags -MMD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = C++ $in

rule cuda
  command = $nvcc $nvcc_flags $targets -MMD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = CUDA $in

rule link
  command = $linker -shared $in -o $out $link_flags
  description = link $out
"""


def torch_folder() -> Path | None:
    """The folder of the installed torch, found without importing it.

    pip's isolated builds run the same interpreter and hide the environment's packages, but their folder is still known.
    """
    spec = importlib.util.find_spec("torch")
    found = [] if spec is None or spec.origin is None else [Path(spec.origin).parent]
    found += [Path(sysconfig.get_path(name)) / "torch" for name in ("platlib", "purelib")]
    return next((path for path in found if (path / "include/torch/csrc/stable/library.h").is_file()), None)


def has_cuda(torch: Path) -> bool:
    """Whether a torch was built for CUDA, read from its folder."""
    # `cuda: Optional[str] = None`, or a version in quotes.
    found = re.search(r"^cuda\b[^=\n]*=\s*(\S+)", (torch / "version.py").read_text(), re.MULTILINE)
    return found is None or found[1] != "None"


@functools.cache
def pip_terminal() -> TextIO | None:
    """The terminal that pip prints to, if pip runs this build and shows nothing of it; else `None`.

    pip keeps what a build prints to itself, also for minutes, and has no other way to show progress. Whoever calls it
    with `-v` sees it anyway, and with `-q` wants to see nothing.
    """
    if "PIP_BUILD_TRACKER" not in os.environ:
        return None
    pip = Path("/proc", str(os.getppid()))
    try:
        words = (pip / "cmdline").read_text().split("\0")
        if any(re.fullmatch(r"-[vq]+|--verbose|--quiet", word) for word in words):
            return None
        output = pip / "fd" / "1"
        if not output.is_char_device():  # a file, which opening it would empty
            return None
        terminal = open(output, "w")
    except OSError:
        return None
    if not terminal.isatty():
        terminal.close()
        return None
    terminal.write("\n")  # below the line on which pip waits
    return terminal


def say(text: str) -> None:
    """Prints a line, which pip shows with `-v`, and without at its terminal."""
    print(f"hf_kvquant: {text}", flush=True)
    tell(f"hf_kvquant: {text}\n")


def tell(line: str) -> None:
    """Shows a line at the terminal of pip, if there is one."""
    terminal = pip_terminal()
    if terminal is not None:
        with contextlib.suppress(OSError):  # closed meanwhile
            terminal.write(line)
            terminal.flush()


def is_set(variable: str) -> bool:
    return os.environ.get(variable, "0") not in ("", "0")


def find_cuda() -> tuple[Path, Path] | None:
    """The CUDA toolkit and its folder of libraries, or `None` if there is none."""
    on_path = shutil.which("nvcc")
    beside_nvcc = Path(on_path).resolve().parents[1] if on_path else None
    for candidate in (os.environ.get("CUDA_HOME"), beside_nvcc, "/usr/local/cuda"):
        if not candidate or not (Path(candidate) / "bin" / "nvcc").is_file():
            continue
        for libraries in (Path(candidate) / "lib64", Path(candidate) / "lib"):
            # An nvcc on the PATH may be only a link to the toolkit, without libraries.
            if (libraries / "libcudart_static.a").is_file():
                return Path(candidate), libraries
    missing = "no CUDA toolkit at CUDA_HOME, nvcc on PATH or /usr/local/cuda"
    if "HF_KVQUANT_CUDA_ARCHS" in os.environ:
        raise SystemExit(f"setup: `HF_KVQUANT_CUDA_ARCHS` must come with a CUDA toolkit, found {missing}. Install one.")
    say(f"{missing}: compiling the CPU kernels only.")
    return None


def visible_archs() -> str:
    """The compute capabilities of this machine's GPUs, such as `"86;90"`; empty if the driver shows none."""
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    shown = subprocess.run(command, capture_output=True, text=True)
    return ";".join(sorted(set(re.findall(r"^\d+\.\d+$", shown.stdout, re.MULTILINE)))) if not shown.returncode else ""


def cuda_archs(is_native: bool, torch: Path | None = None) -> list[str]:
    """The compute capabilities to compile for, such as `["80", "90"]`; empty: no CUDA kernels.

    `torch` is the folder of the torch that will run them, where that is known.
    """
    if IS_SANITIZED or is_set("HF_KVQUANT_SKIP_CUDA"):
        say("HF_KVQUANT_SKIP_CUDA or HF_KVQUANT_SANITIZE is set: compiling the CPU kernels only.")
        return []
    named = os.environ.get("HF_KVQUANT_CUDA_ARCHS")
    if named is None:
        if torch is not None and not has_cuda(torch):
            say(
                "this torch was built without CUDA: compiling the CPU kernels only. "
                'For CUDA too: HF_KVQUANT_CUDA_ARCHS="80;90"'
            )
            return []
        named = visible_archs() if is_native else WHEEL_CUDA_ARCHS
        if not named:
            say('no GPU is visible: compiling the CPU kernels only. For CUDA too: HF_KVQUANT_CUDA_ARCHS="80;90"')
            return []
    archs = [arch.strip().replace(".", "") for arch in named.replace(",", ";").split(";") if arch.strip()]
    if not archs:
        raise SystemExit(
            "setup: `HF_KVQUANT_CUDA_ARCHS` must name at least one architecture, got ''. "
            "Use for example '80;90', or HF_KVQUANT_SKIP_CUDA=1."
        )
    return archs


def cuda_targets(source: Path, archs: list[str]) -> str:
    """Options for nvcc to compile a source for some architectures, and to store the PTX of the last one too.

    The path says what a source has of its own for a generation of GPUs:

    - In a folder such as `sm90`, it uses instructions that only 9.0 has, under the name of 9.0a. For other GPUs it is
      empty.
    - With a name such as `append.sm89.cu`, it has separate code for 8.9, which has instructions to convert fp8
      (`__CUDA_ARCH__ >= 890`).

    Others have the same PTX for all of 8.x, and ptxas makes the same bytes for 8.6 and 8.9, so GPUs of 8.9 run those
    for 8.6.
    """
    code: dict[str, list[str]] = {}
    only = [part[2:] for part in source.parts if re.fullmatch(r"sm\d+", part)]
    if only:
        archs = [f"{only[0]}a"] if only[0] in archs else archs[-1:]
    for arch in archs:
        has_own_ptx = not arch.startswith("8") or f".sm{arch}." in source.name
        if arch == "89" and "86" in archs and not has_own_ptx:
            continue
        ptx = f"compute_{arch if has_own_ptx else 80}"
        code.setdefault(ptx, []).append(f"sm_{arch}")
    code[ptx].append(ptx)
    return " ".join(f"-gencode 'arch={ptx},code=[{','.join(names)}]'" for ptx, names in code.items())


def x86_sets(is_native: bool) -> list[str]:
    """The instruction sets of `X86_SETS` to compile for: all of them, or those that this machine has."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return []
    if not is_native or not Path("/proc/cpuinfo").is_file():
        return list(X86_SETS)
    # Linux spells vnni with an underscore.
    found = set(Path("/proc/cpuinfo").read_text().replace("avx512_vnni", "avx512vnni").split())
    return [name for name, parts in X86_SETS.items() if found.issuperset(parts)]


def ninja_command() -> str:
    """ninja from its package, else from PATH."""
    spec = importlib.util.find_spec("ninja")
    if spec is not None:
        import ninja

        return str(Path(ninja.BIN_DIR) / "ninja")
    found = shutil.which("ninja")
    if found is None:
        raise SystemExit("setup: ninja must be installed, found neither the package nor the program. pip install ninja")
    return found


def jobs_option(ninja: str) -> list[str]:
    """ninja's option for the number of compilers that run at a time: `MAX_JOBS`, else the number of processors.

    By default ninja runs one or two more, which then compete for caches: on 2 cores of one machine, the whole build
    took 404, 467 and 469 s with three, and 320, 362 and 370 s with two. ninja counts processors by affinities and
    cgroups, and shows in its help how many it counted.
    """
    if os.environ.get("MAX_JOBS"):
        return ["-j", os.environ["MAX_JOBS"]]
    found = re.search(r"default=(\d+) on this", subprocess.run([ninja, "-h"], capture_output=True, text=True).stderr)
    if found is None:
        return []
    default = int(found[1])
    return ["-j", str(default - 1 if default <= 3 else default - 2)]


def write_ninja(torch: Path, output: Path, is_native: bool) -> str:
    """The ninja file that builds `output` from `csrc/`. Paths in it are relative to this folder.

    Args:
        torch: The folder of torch, for its headers and libraries.
        output: The library to link.
        is_native: Whether to compile only what this machine can run.
    """
    archs = cuda_archs(is_native, None if is_set("HF_KVQUANT_MANYLINUX") else torch)
    found_cuda = find_cuda() if archs else None
    sets = x86_sets(is_native)
    includes = ["-Icsrc", f'-isystem "{torch / "include"}"', f'-isystem "{sysconfig.get_path("include")}"']
    linker = "$cxx"
    link_flags = [f'-L"{torch / "lib"}"', "-ltorch_cpu", "-pthread"]
    sources = sorted(ROOT.glob("csrc/*.cpp")) + sorted(ROOT.glob("csrc/cpu/*.cpp"))
    if is_set("HF_KVQUANT_MANYLINUX"):
        linker = f'"{sys.executable}" -m ziglang cc -target {ZIG_TARGET}'
        # gcc's libraries instead of zig's: exceptions cross into torch, which uses gcc's C++ library and unwinder. And
        # libgcc.a detects what the processor supports, which zig's replacement for it does not.
        gcc_libraries = ("libstdc++.so", "libgcc.a", "libgcc_s.so.1")
        link_flags += [f"$$($cxx -print-file-name={name})" for name in gcc_libraries]
        link_flags += ["-Wl,--version-script=csrc/manylinux/exports.map", "-Wl,--strip-debug"]
        sources += sorted(ROOT.glob("csrc/manylinux/*.cpp"))
    else:
        link_flags.append("-Wl,--exclude-libs,ALL")
    sources = [
        path for path in sources if path.stem not in {f"kernels_{name}" for name in X86_SETS if name not in sets}
    ]
    # Flags of single files, so that objects are the same in an editable build and in a wheel.
    flags_of = {f"kernels_{name}": " ".join(f"-m{part}" for part in X86_SETS[name]) for name in sets}
    flags_of["module"] = f"-DTORCH_EXTENSION_NAME={NAMESPACE}" if NAMESPACE else ""
    flags_of["cpu"] = " ".join(f"-DHF_KVQUANT_{name.upper()}" for name in sets)
    lines = [f"builddir = {OBJECTS}", f"cxx = {os.environ.get('CXX', 'c++')}"]
    if found_cuda is not None:
        cuda, libraries = found_cuda
        say(f"compiling the CPU kernels, and CUDA kernels for {';'.join(archs)}. For others: HF_KVQUANT_CUDA_ARCHS")
        includes.append(f'-isystem "{cuda / "include"}"')
        flags_of["module"] += f" '-DHF_KVQUANT_CUDA_ARCHS={';'.join(archs)}'"
        # ninja starts them in this order: sources that take minutes come first, so that no core is idle at the end.
        sources = sorted(ROOT.glob("csrc/cuda/**/*.cu")) + sorted(ROOT.glob("csrc/cuda/**/*.cpp")) + sources
        lines += [f'nvcc = "{cuda / "bin" / "nvcc"}"', f"nvcc_flags = {' '.join([*NVCC_FLAGS, '-Icsrc'])}"]
        # Linked statically, so that the binary works with any CUDA runtime of torch, or with none.
        link_flags += [f'-L"{libraries}"', "-lcudart_static", "-ldl", "-lrt"]
    flags = list(CXX_FLAGS)
    if IS_SANITIZED:
        flags += SANITIZE_FLAGS  # after -O3, as the last -O counts
        link_flags += SANITIZE_FLAGS
    lines.append(f"flags = {' '.join(flags + DEFINES + includes)}")
    lines += [f"linker = {linker}", f"link_flags = {' '.join(link_flags)}", NINJA_RULES]
    objects = []
    for source in sources:
        source = source.relative_to(ROOT)
        # Only this object depends on the namespace; builds for all namespaces share the others.
        suffix = f".{LIBRARY}.o" if source.stem == "module" else ".o"
        target = OBJECTS / source.with_suffix(source.suffix + suffix)
        if source.suffix == ".cu":
            lines += [f"build {target}: cuda {source}", f"  targets = {cuda_targets(source, archs)}"]
        else:
            lines += [f"build {target}: cxx {source}", f"  file_flags = {flags_of.get(source.stem, '')}"]
        objects.append(str(target))
    lines += [f"build {output}: link {' '.join(objects)}", f"default {output}", ""]
    return "\n".join(lines)


def run(command: list[str], env: dict[str, str]) -> int:
    """Runs ninja and returns its exit code. A line of its progress is shown at pip's terminal every few seconds."""
    if pip_terminal() is None:
        return subprocess.run(command, env=env).returncode
    told = time.monotonic()
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as ninja:
        assert ninja.stdout is not None
        for line in ninja.stdout:
            print(line, end="", flush=True)
            if line.startswith("hf_kvquant: [") and time.monotonic() - told > TELL_S:
                told = time.monotonic()
                tell(line)
    return ninja.returncode


class NinjaBuild(build_ext):
    """Runs ninja instead of setuptools' compiler classes, which support neither nvcc nor incremental builds."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.is_native = bool(self.inplace or self.editable_mode)  # setuptools resets `inplace` while it builds
        if IS_SANITIZED and (self.inplace or Path(self.build_lib) != SANITIZED_LIB):
            raise SystemExit(
                f"setup: `HF_KVQUANT_SANITIZE` must come with `setup.py build --build-lib {SANITIZED_LIB}`, so that no "
                "other build is replaced, got another place. Use make sanitize-cpu, or unset it."
            )

    def build_extension(self, ext: Extension) -> None:
        torch = torch_folder()
        if torch is None:
            raise SystemExit("setup: torch >= 2.10 must be installed for its headers, found none. pip install torch")
        (ROOT / OBJECTS).mkdir(parents=True, exist_ok=True)
        output = OBJECTS / f"{LIBRARY}.abi3.so"
        # Two installs at a time, such as of an editable and a wheel, would run two ninjas in one folder.
        with open(ROOT / OBJECTS / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (ROOT / OBJECTS / "build.ninja").write_text(write_ninja(torch, output, self.is_native))
            ninja = ninja_command()
            command = [ninja, "-C", str(ROOT), "-f", str(OBJECTS / "build.ninja"), *jobs_option(ninja)]
            if not self.distribution.verbose:
                command.append("--quiet")
            status = {"NINJA_STATUS": "hf_kvquant: [%f/%t, %e s] "}
            if run(command, status | os.environ) != 0:
                raise SystemExit("setup: compiling csrc/ must succeed, got the errors above.")
            target = Path(self.get_ext_fullpath(ext.name))
            target.parent.mkdir(parents=True, exist_ok=True)
            # Renamed into place: overwriting a library would crash the processes that have it mapped.
            shutil.copy2(ROOT / output, target.with_suffix(".new"))
            os.replace(target.with_suffix(".new"), target)


setup(
    ext_modules=[Extension(f"hf_kvquant.{LIBRARY}", sources=[], py_limited_api=True)],
    cmdclass={"build_ext": NinjaBuild},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
    # pip installs these before an isolated build; torch only if none has been found.
    setup_requires=([] if torch_folder() else [FALLBACK_TORCH]) + ([ZIG] if is_set("HF_KVQUANT_MANYLINUX") else []),
)
