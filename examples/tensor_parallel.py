"""One model on several GPUs of a machine: each holds a part of the weights, and the codes of its own heads.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py meta-llama/Llama-3.1-8B-Instruct --prompt "The river"

Every process runs this file. Steps are CUDA graphs with the sums over the GPUs in them, so the host does not hold them
up. Without GPUs, processes share the CPU, which is good for a try only.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch import distributed
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

import hf_kvquant

REFERENCE_MODEL = Path(__file__).resolve().parents[1] / "evals" / "reference_model"


def parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    model = "a folder or a hub id; the number of processes must divide its key-value heads"
    parser.add_argument("model", nargs="?", default=str(REFERENCE_MODEL), help=model)
    parser.add_argument("--preset", default="int4", choices=sorted(hf_kvquant.PRESETS))
    parser.add_argument("--prompt", default="The river")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    return parser


def main() -> None:
    """Load the part of this process, and generate. The first process prints."""
    arguments = parser().parse_args()
    has_gpus, rank = torch.cuda.is_available(), int(os.environ["RANK"])
    if has_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # Nothing else talks while a graph does, and NCCL is slower where it has to expect that.
    os.environ.setdefault("NCCL_GRAPH_MIXING_SUPPORT", "0")
    distributed.init_process_group("nccl" if has_gpus else "gloo")

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    sharding = DistributedConfig(tp_plan="auto", tp_size=distributed.get_world_size())
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype="auto", distributed_config=sharding)
    inputs = tokenizer(arguments.prompt, return_tensors="pt").to(model.device)

    # Graphs must be gone before the processes part: NCCL waits for them. So the model is unpatched first.
    with hf_kvquant.patched(model, arguments.preset, capture=has_gpus):
        output = model.generate(**inputs, max_new_tokens=arguments.max_new_tokens, do_sample=False)
    if rank == 0:
        print(tokenizer.decode(output[0], skip_special_tokens=True))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
