"""KL divergence, next-token agreement and perplexity of every preset against the unquantised cache, on a text file.

    python evals/fidelity.py --data wikitext2.test.raw --output evals/results/fidelity.json

The text is cut as papers do it (rows joined by two newlines, whole windows, each from an empty cache) and fed in chunks
through the real cache of a patched model: a first chunk of one token, so that everything from the second token on reads
codes. The unquantised cache gets the same chunks in the same run. Two things abort the run: a count of (query, token)
pairs read from codes that differs from its closed form, and, before anything is measured, a preset whose divergence
depends on the size of the chunks. `none` is a row as well: it is the noise floor. The model can be made harder before
(`--inject-outliers`, `--inject-bias`: key channels ten times as large, a constant in all keys) and calibrated on a text
that is not the one measured (`--calibrate`). How one text is compared is in `hf_kvquant/fidelity.py`; what becomes of
the results file, in `render_readme.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_kvquant
from hf_kvquant import PRESETS, KVQuantConfig
from hf_kvquant.evaluation.provenance import ROOT, card, place, sha256
from hf_kvquant.fidelity import Fidelity, compare
from hf_kvquant.transforms.injection import inject_key_bias, inject_key_outliers

GATE_TOKENS = 256
GATE_CHUNKS = (1, 32, 128)
# Where keys have a scale for every channel, a chunk that fills a block sees all of it as codes; one token at a time,
# only the last of them does. That is so by definition and the gate must not see it, so its chunks are short against a
# block (int4-channel, 256 tokens: 1.16e-2 nats in chunks of 1, 1.24e-2 of 32, 1.53e-2 of 128). Likewise with a window
# of newest tokens, which ends with a chunk, and not with each of its tokens.
GATE_BLOCK_SHARE = 0.25
GATE_WINDOW_SHARE = 0.1
# What the gate allows between chunk sizes, in mean KL divergence from the unquantised cache: a share of it, or so many
# standard errors of the difference. Not less: sums in another order flip codes at rounding boundaries, layer after
# layer, and multiplying the reference model's embeddings by 1 ± 1e-7 already moves int8 by 2.6e-5 nats of some 2e-4.
GATE_SHARE = 0.10
GATE_ERRORS = 2.0
# What is not quantised may differ from the unquantised cache by the order of sums alone, in float32.
GATE_NONE = 1e-6
OUTLIER_FACTOR = 10.0  # of the channels that `--inject-outliers` makes larger: about what large models have
# Formats that show what transforms and clipping of a preset are worth, beside the presets.
UNTRANSFORMED = "-untransformed"


def config_of(name: str) -> KVQuantConfig:
    """The config of a preset, or of its formats without any transform, either one with dense windows: `int4:4+128`.

    Raises:
        ValueError: The name is none of these.
    """
    preset, has_windows, lengths = name.partition(":")
    options: dict[str, Any] = {}
    if has_windows:
        found = re.fullmatch(r"(\d+)\+(\d+)", lengths)
        if found is None:
            raise ValueError(
                f"fidelity: `--preset` must name windows as first and newest tokens, got '{lengths}'. "
                "Such as int4:4+128."
            )
        options = {"sink_length": int(found[1]), "residual_length": int(found[2])}
    if preset.endswith(UNTRANSFORMED):
        # Clipping is an improvement on naive quantisation like any transform.
        preset, options["transforms"] = preset.removesuffix(UNTRANSFORMED), []
        for side in ("key", "value"):
            kv_format = getattr(KVQuantConfig.from_preset(preset), side)
            options[side] = dataclasses.replace(kv_format, clip_ratio=1.0)
    return KVQuantConfig.from_preset(preset, **options)


def preset_name(name: str) -> str:
    """An argument that `config_of` understands."""
    try:
        config_of(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return name


def read_windows(tokenizer: Any, path: Path, window: int) -> Tensor:
    """Token ids of the file's whole windows, `[windows, window]` int64.

    The convention of papers: rows as the data set gives them (the line with its newline, blank lines as empty strings),
    joined by two newlines, tokenised once, the rest after the last whole window dropped.
    """
    rows = [line if line.strip() else "" for line in path.read_text(encoding="utf-8").splitlines(keepends=True)]
    ids = tokenizer("\n\n".join(rows), return_tensors="pt", verbose=False).input_ids[0]
    return ids[: len(ids) // window * window].view(-1, window)


def gate_chunks(preset: str) -> list[int]:
    """The sizes of chunks between which a preset's result must not differ."""
    config = config_of(preset)
    longest = math.inf if config.key.block_size is None else GATE_BLOCK_SHARE * config.key.block_size
    if config.residual_length > 0:
        longest = min(longest, GATE_WINDOW_SHARE * config.residual_length)
    return [chunk for chunk in GATE_CHUNKS if chunk == 1 or chunk <= longest]


def check_chunk_sizes(model: PreTrainedModel, text: Tensor, presets: list[str], n0: int) -> dict[str, dict[str, float]]:
    """Mean KL divergence from the unquantised cache over a text (`[1, tokens]`), per preset and size of the chunks.

    Raises:
        SystemExit: A preset's result depends on the size of the chunks, or `none` is not the unquantised cache.
    """
    configs = {name: config_of(name) for name in presets}
    runs = {chunk: compare(model, text, configs, first_chunk=n0, chunk_size=chunk) for chunk in GATE_CHUNKS}
    chunks = {preset: gate_chunks(preset) for preset in presets}
    means = {
        preset: {str(chunk): float(runs[chunk][preset].kld.double().mean()) for chunk in chunks[preset]}
        for preset in presets
    }
    for preset in presets:
        one_by_one = runs[GATE_CHUNKS[0]][preset].kld.double()
        for chunk in chunks[preset][1:]:
            difference = runs[chunk][preset].kld.double() - one_by_one
            error = float(difference.std()) / len(difference) ** 0.5
            bound = max(GATE_SHARE * float(one_by_one.mean()), GATE_ERRORS * error)
            if preset == "none":
                bound = GATE_NONE if model.dtype == torch.float32 else math.inf
            if not abs(float(difference.mean())) <= bound:
                raise SystemExit(
                    f"fidelity: preset {preset} must have the same mean KL divergence in chunks of {GATE_CHUNKS[0]} "
                    f"and {chunk} tokens within {bound:.1e}, got {means[preset]}. Appending or attention depends on "
                    "the chunk: a bug."
                )
    return means


def prepare(model: PreTrainedModel, tokenizer: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Make a model harder and calibrate it, as far as the arguments ask for that.

    Returns:
        What the results file says of it.
    """
    told: dict[str, Any] = {"injected_outliers": None, "injected_bias": None, "calibration": None}
    if args.inject_outliers:
        inject_key_outliers(model, args.inject_outliers, OUTLIER_FACTOR)
        told["injected_outliers"] = {"pairs_per_head": args.inject_outliers, "factor": OUTLIER_FACTOR}
    if args.inject_bias:
        inject_key_bias(model, args.inject_bias)
        told["injected_bias"] = {"norm": args.inject_bias}
    if args.calibrate:
        text = args.calibrate.read_text(encoding="utf-8")
        result = hf_kvquant.smooth_attention(model, tokenizer, [text], args.calibrate_for)
        print(result.report(), flush=True)
        told["calibration"] = {
            "data": args.calibrate.name,
            "data_sha256": sha256(args.calibrate),
            "preset": args.calibrate_for,
            "tokens": result.num_tokens,
            "layers": {
                str(layer.layer_idx): {
                    "choice": layer.choice,
                    "placement": layer.placement,
                    "has_center": layer.center is not None,
                    "error_before": layer.error_before,
                    "error_after": layer.error_after,
                }
                for layer in result.layers
            },
        }
    return told


def check_counter(preset: str, result: Fidelity) -> None:
    """Abort where a number would not be one of the quantised cache."""
    if result.pairs_read != result.pairs_expected:
        raise SystemExit(
            f"fidelity: preset {preset} must read {result.pairs_expected} (query, token) pairs from codes, "
            f"got {result.pairs_read}. Some layer attended to something else; the log says why."
        )


def summarize(preset: str, results: list[Fidelity], model: PreTrainedModel, dtype: torch.dtype) -> dict[str, Any]:
    """One preset over all windows: aggregates first, then what they came from.

    Args:
        preset: Its name.
        results: One per window.
        model: For the shape of its cache.
        dtype: In which an unquantised cache would keep its values.
    """
    config = config_of(preset)
    text_config = model.config.get_text_config(decoder=True)
    head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // text_config.num_attention_heads
    num_kv_heads = text_config.num_key_value_heads
    kld = torch.cat([result.kld for result in results]).double()
    agreement = torch.cat([result.agrees for result in results]).double().mean()
    nll = torch.cat([result.nll for result in results]).double()
    reference_nll = torch.cat([result.reference_nll for result in results]).double()
    window_kld = torch.stack([result.kld.double().mean() for result in results])
    delta = (torch.exp(-nll) - torch.exp(-reference_nll)).square().mean().sqrt()
    num_windows = len(results)
    return {
        "bits_per_value": sum(side.bits_per_value(head_dim, num_kv_heads, dtype) for side in (config.key, config.value))
        / 2,
        "bytes_per_token": text_config.num_hidden_layers
        * sum(side.bytes_per_token(num_kv_heads, head_dim, dtype) for side in (config.key, config.value)),
        "kld": float(kld.mean()),
        "kld_standard_error": float(window_kld.std() / num_windows**0.5) if num_windows > 1 else None,
        "kld_median": float(kld.median()),
        "kld_p99": float(kld.quantile(0.99)),
        "kld_max": float(kld.max()),
        "agreement": float(agreement),
        "rms_delta_p": float(delta),
        "perplexity": math.exp(float(nll.mean())),
        "perplexity_change": math.exp(float((nll - reference_nll).mean())) - 1,
        "pairs_read": sum(result.pairs_read for result in results),
        "pairs_expected": sum(result.pairs_expected for result in results),
        "windows": [
            {
                "kld": float(result.kld.double().mean()),
                "agreement": float(result.agrees.double().mean()),
                "nll": float(result.nll.double().mean()),
                "reference_nll": float(result.reference_nll.double().mean()),
            }
            for result in results
        ],
        "config": config.to_dict(),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the comparison that the arguments ask for.

    Returns:
        What the results file holds.
    """
    started = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    model = model.to(args.device).eval()
    told = prepare(model, tokenizer, args)
    all_windows = read_windows(tokenizer, args.data, args.window)
    wanted = -(-args.tokens // (args.window - 1 - args.n0))
    if wanted > len(all_windows):
        raise SystemExit(
            f"fidelity: `--tokens` must fit the {len(all_windows)} windows of {args.window} tokens in "
            f"{args.data.name}, got {args.tokens}, which takes {wanted}. Use fewer tokens, or a longer text."
        )
    # Spread over the text, which is a sequence of articles, rather than its first few.
    chosen = [index * len(all_windows) // wanted for index in range(wanted)]
    windows = all_windows[chosen].to(args.device)
    gate = check_chunk_sizes(model, windows[:1, :GATE_TOKENS], args.preset, args.n0)
    results: dict[str, list[Fidelity]] = {preset: [] for preset in args.preset}
    for number, ids in enumerate(windows):
        print(f"window {number + 1} of {wanted}, {time.monotonic() - started:.0f} s", flush=True)
        compared = compare(
            model,
            ids[None],
            {name: config_of(name) for name in args.preset},
            first_chunk=args.n0,
            chunk_size=args.chunk,
        )
        for preset, result in compared.items():
            check_counter(preset, result)
            results[preset].append(result)
    # Bytes are those of the dtype in which the model is used, whatever it is measured in.
    stored_dtype = getattr(torch, AutoConfig.from_pretrained(args.model).to_dict().get("dtype") or args.dtype)
    return {
        **card(),
        "model": place(args.model),
        "weights_sha256": {path.name: sha256(path) for path in sorted(args.model.glob("*.safetensors"))},
        "tokenizer_sha256": sha256(args.model / "tokenizer.json"),
        **told,
        "dtype": args.dtype,
        "device": args.device,
        "data": args.data.name,
        "data_sha256": sha256(args.data),
        "convention": "rows joined by two newlines, whole windows, per token",
        "window": args.window,
        "window_indices": chosen,
        "n0": args.n0,
        "mode": "decode" if args.chunk == 1 else "chunked",
        "chunk": args.chunk,
        "scored_tokens": sum(len(result.kld) for result in results[args.preset[0]]),
        "gate": {"tokens": GATE_TOKENS, "share": GATE_SHARE, "standard_errors": GATE_ERRORS, "kld_by_chunk": gate},
        "reference_perplexity": math.exp(
            float(torch.cat([result.reference_nll for result in results[args.preset[0]]]).double().mean())
        ),
        "presets": {preset: summarize(preset, results[preset], model, stored_dtype) for preset in args.preset},
        "seconds": round(time.monotonic() - started, 1),
    }


def show(results: dict[str, Any]) -> None:
    """Print the card and the table."""
    console = Console(highlight=False)
    for key in (
        "command",
        "commit",
        "cpu",
        "threads",
        "cpu_kernels",
        "model",
        "dtype",
        "data",
        "mode",
        "scored_tokens",
    ):
        console.print(f"{key:>14} {results[key]}")
    table = Table()
    table.add_column("preset")
    for heading in ("bits", "KL, nats/token", "p99", "agreement", "perplexity", "change"):
        table.add_column(heading, justify="right")
    for preset, row in results["presets"].items():
        table.add_row(
            preset,
            f"{row['bits_per_value']:.3f}",
            f"{row['kld']:.2e}",
            f"{row['kld_p99']:.2e}",
            f"{row['agreement']:.2%}",
            f"{row['perplexity']:.3f}",
            f"{row['perplexity_change']:+.3%}",
        )
    console.print(table)


def main() -> None:
    """Parse the command line, measure, print, and write the results file."""
    parser = argparse.ArgumentParser(description="Compare presets with the unquantised cache on a text file.")
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help="raw text, such as WikiText-2's test")
    parser.add_argument("--model", type=Path, default=ROOT / "evals/reference_model", metavar="FOLDER")
    parser.add_argument(
        "--preset",
        action="append",
        type=preset_name,
        metavar="NAME",
        help=f"repeatable (default: all presets); with {UNTRANSFORMED} behind it, without its transforms; with :4+128 "
        "behind that, with the first 4 and the newest 128 tokens dense",
    )
    parser.add_argument("--calibrate", type=Path, metavar="FILE", help="calibrate on this text, with defaults")
    parser.add_argument("--calibrate-for", choices=list(PRESETS), default="int4", help="a preset (default: int4)")
    parser.add_argument(
        "--inject-outliers",
        type=int,
        nargs="?",
        const=3,
        default=0,
        metavar="N",
        help=f"make so many RoPE pairs per head of keys {OUTLIER_FACTOR:g} times as large (default: 3)",
    )
    parser.add_argument(
        "--inject-bias",
        type=float,
        nargs="?",
        const=100.0,
        default=0.0,
        metavar="X",
        help="add a bias of this norm to every head of keys (default: 100)",
    )
    parser.add_argument("--tokens", type=int, default=8192, metavar="N", help="at least so many are scored")
    parser.add_argument("--window", type=int, default=2048, metavar="N", help="tokens of a window")
    parser.add_argument("--n0", type=int, default=1, metavar="N", help="tokens of the first chunk, which is exact")
    parser.add_argument("--chunk", type=int, default=32, metavar="N", help="tokens of a later chunk; 1 is decoding")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write the results, as JSON")
    args = parser.parse_args()
    args.preset = list(dict.fromkeys(args.preset or PRESETS))
    results = measure(args)
    show(results)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
