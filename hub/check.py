"""Checks a project that hub/build.py made with the hub's own packages, without a network: `make hub`.

    PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 python hub/check.py build/hub

Bytecode must not be written, since the digest does not list it. The last check loads the kernel as the hub's users do.
CONTRIBUTING.md says what is not checked.
"""

from __future__ import annotations

import sys
from pathlib import Path

import kernel_abi_check
import kernels
from kernels._rust import Build, Digest, DigestAlgorithm, Metadata
from kernels.variants import parse_variant

# From the hub's page "Kernel requirements".
PYTHON_ABI, MANYLINUX = "3.9", "manylinux_2_28"


def main() -> None:
    project = Path(sys.argv[1]).resolve()
    print("build.toml:", ", ".join(str(backend) for backend in Build.open(project).general.backends))
    violations = []
    for variant in sorted((project / "build").iterdir()):
        parsed = parse_variant(variant.name)
        metadata = Metadata.read_from_file(variant / "metadata.json")
        metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
        print(f"{parsed.variant_str}: {metadata.name} {metadata.version}, torch.ops.{metadata.id}, digest valid")
        library = kernel_abi_check.ObjectFile(variant / f"{metadata.id}.abi3.so")
        for name, found in (
            (f"Python ABI {PYTHON_ABI}", library.check_python_abi(PYTHON_ABI)),
            (MANYLINUX, library.check_manylinux(MANYLINUX)),
        ):
            print(f"{parsed.variant_str}: {name}: {'compatible' if not found else 'NOT compatible'}")
            violations += found
    for violation in violations:
        print(f"    {violation}")
    kernel = kernels.get_local_kernel(project, backend="cpu")
    print(f"loaded: {kernel.__name__}, CPU kernels: {kernel.has_kernels('cpu')}")
    if violations or not kernel.has_kernels("cpu"):
        raise SystemExit("hub: every check must pass, got what is above.")


if __name__ == "__main__":
    main()
