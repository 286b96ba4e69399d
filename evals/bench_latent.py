"""A decode step of one layer that keeps latents (MLA), against transformers, which expands them in every step.

    python evals/bench_latent.py --output evals/results/latent.json

Physics: transformers makes keys and values of all tokens and heads from the latents, in every step: for each token as
many multiplications as `kv_b_proj` has weights. Absorbed attention multiplies each latent once with each head's query
and once with its weight, 50 to 200 times less, and reads latents alone.

Method:
- Random weights of a published shape, one layer, batch 1, float32 on a CPU and bfloat16 on a GPU. The MLP is narrow, so
  that a step is the attention layer with its projections.
- Caches are filled with random latents. Each step takes one new token. Systems take turns within one run, and a time is
  the median of the turns.
- The outputs of `none` are compared with those of transformers in the same run; a difference ends it.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from typing import Any

import torch
from results_files import add_run_options, parse_run, write_results
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from hf_kvquant import KVQuantCache, patched
from hf_kvquant.attention.backends import without_cudnn
from hf_kvquant.upstream.releases import CACHE
from hf_kvquant_evals.provenance import card

# By name: the model type, and its sizes where they differ from the defaults of its config.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepSeek-V2-Lite": (
        "deepseek_v2",
        {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None},
    ),
    "GLM-4.7-Flash": ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}),
    "MiniCPM3-4B": ("minicpm3", {}),
}
NARROW = {"num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 256, "first_k_dense_replace": 1}
CONTEXTS = {"cpu": (1024, 8192), "cuda": (8192, 32768)}
# On Hopper, PyTorch's attention is that of cuDNN, which makes a plan for each new number of tokens (35 to 50 ms, torch
# 2.11). transformers is measured without it, too, as a model's other layers share a plan.
SYSTEMS = ("transformers", "no-cudnn", "none", "int8", "int4")
UNPATCHED = SYSTEMS[:2]
WARM_UPS, TURNS = 2, 9


def measure(name: str, context: int, device: torch.device) -> dict[str, Any]:
    """The times of all systems for one shape and context, in milliseconds, and their ratios to transformers."""
    model_type, sizes = SHAPES[name]
    limits = {"max_position_embeddings": context + 64, "eos_token_id": None, "pad_token_id": None, "bos_token_id": None}
    config = AutoConfig.for_model(model_type, **{**NARROW, **limits, **sizes})
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).eval()
    latents = torch.randn(1, 1, context, config.kv_lora_rank, dtype=dtype, device=device)
    ropes = torch.randn(1, 1, context, config.qk_rope_head_dim, dtype=dtype, device=device)
    systems = [name for name in SYSTEMS if name != "no-cudnn" or device.type == "cuda"]
    caches: dict[str, Any] = {
        name: DynamicCache(config=config) if name in UNPATCHED else KVQuantCache(config, name) for name in systems
    }
    for cache in caches.values():
        cache.update(latents, ropes, 0)
    times: dict[str, list[float]] = {system: [] for system in systems}
    outputs: dict[str, torch.Tensor] = {}
    token = torch.tensor([[7]], device=device)
    for turn in range(WARM_UPS + TURNS):
        for system in systems:
            seconds, outputs[system] = step(model, system, token, caches[system])
            if turn >= WARM_UPS:
                times[system].append(1e3 * seconds)
    expected = outputs["transformers"].float()
    error = float((outputs["none"].float() - expected).abs().max() / expected.abs().max())
    if not error < (1e-4 if dtype == torch.float32 else 0.1):
        raise SystemExit(f"{name}: none differs from transformers by {error:.1e} of the largest logit")
    medians = {system: statistics.median(each) for system, each in times.items()}
    rows = [
        {
            "system": system,
            "median_ms": medians[system],
            "p10_ms": sorted(times[system])[TURNS // 10],
            "p90_ms": sorted(times[system])[-1 - TURNS // 10],
            "speedup": medians["transformers"] / medians[system],
            "bytes_per_token": None if system in UNPATCHED else caches[system].bytes_per_token,
        }
        for system in systems
    ]
    return {"shape": name, "context": context, "dtype": str(dtype).removeprefix("torch."), "rows": rows}


@torch.inference_mode()
def step(model: Any, system: str, token: torch.Tensor, cache: Any) -> tuple[float, torch.Tensor]:
    """Seconds of one step, and its logits."""

    def timed() -> tuple[float, torch.Tensor]:
        if token.is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        logits = model(token, **{CACHE: cache}).logits
        if token.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start, logits

    if system in UNPATCHED:
        with without_cudnn() if system == "no-cudnn" else contextlib.nullcontext():
            return timed()
    with patched(model, system):
        return timed()


def main(words: list[str] | None = None) -> None:
    """Measure every shape and context, print a table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    add_run_options(parser, after="all cases")
    arguments = parse_run(parser, words)
    device = arguments.device
    cases = [measure(name, context, device) for name in arguments.shapes for context in CONTEXTS[device.type]]
    results = {**card(), "threads": torch.get_num_threads(), "device": device.type, "cases": cases}
    systems = [row["system"] for row in cases[0]["rows"]]
    table = Table(*("shape", "context", *systems), title="a decode step of one layer, ms (times as fast)")
    for case in cases:
        cells = [f"{row['median_ms']:.2f} ({row['speedup']:.1f})" for row in case["rows"]]
        table.add_row(case["shape"], str(case["context"]), *cells)
    Console().print(table)
    write_results(results, arguments.output)


if __name__ == "__main__":
    main()
