"""What recurrent states cost in fewer bits: how far the next token drifts over 8k tokens, against float32.

    python evals/state_drift.py --model twin --text wikitext2.test.raw --output evals/results/state_drift.json

A state of the gated delta rule is read, decayed, changed and stored again at every token. A format that keeps fewer
bits rounds it every time, so errors may pile up as long as a head remembers; and where a head hardly forgets, a decay
or an addition below half a unit of the last place is lost altogether.

Method:
- The model runs token by token, as decode steps do. All formats (`state_formats.py`) are rows of one batch, each with
  states, keys and values of its own, and all of them read the same tokens. The model computes in float32.
- After each step, the new states are rounded in place to what the format would have stored. The step's output comes
  from the state before: a kernel has it in registers.
- For each token: KL divergence of the next token from that of float32 states, whether the likeliest token is the same,
  the loss of the token that follows in the text, and how far the state of each head is from that in float32.
- Texts: windows of a file; what the model itself goes on to write with float32 states, greedily or sampled, behind a
  prompt from a window. Then all rows read what the float32 row chose.
- Two rows show how much is noise: float32 a second time, whose divergence must be 0, and the whole model in bf16 with
  states in float32.
- `--slower 16` is a stress: all heads remember 16 times as long. That changes what the model says, so it is its own
  baseline.

On a GPU a step is one CUDA graph; `--eager` does without. What it relies on in transformers: a cache layer of linear
attention keeps its states in `conv_states` and `recurrent_states`, where `update_recurrent_state` copies them in place,
and the model takes its recurrent path for one token if `has_previous_state`.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import itertools
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from results_files import add_run_options, parse_run, write_results
from rich.console import Console
from rich.table import Table
from state_formats import FORMATS, StateFormat
from torch import Tensor
from transformers import PreTrainedModel, StaticCache

from hf_kvquant.attention.backends import without_cudnn
from hf_kvquant.cli.loading import load
from hf_kvquant.common.naming import model_name, sha256
from hf_kvquant.upstream.releases import CACHE
from hf_kvquant_evals.provenance import card, gpu_card

TEXTS = ("text", "greedy", "sampled")
PROMPT = 64  # tokens of a window before the model goes on by itself
BASELINE, MODEL_IN_BF16 = "float32", "model-in-bf16"
# Positions from one edge to the next are one bucket; shares of the length.
EDGES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)
SLOW = 1 / 4  # share of heads that are called slow: those that take longest to forget half of their state
NOISE = 1e-9  # nats a token: more between two equal rows is a mistake
# Multiplied by more than 1 minus this, a bf16 number is rounded back to what it was: half a unit of its last place.
LOST_DECAY = 2.0**-9
WARM_UPS = 3


class Lane:
    """A model with rows of formats, their caches and states.

    Args:
        model: With layers of the gated delta rule.
        formats: Row `f * sequences + s` is sequence `s` in format `f`.
        sequences: Sequences that each format reads.
        length: Tokens that the cache has room for.
    """

    def __init__(self, model: PreTrainedModel, formats: tuple[StateFormat, ...], sequences: int, length: int) -> None:
        self.model, self.formats, self.sequences, self.length = model, formats, sequences, length
        config: Any = model.config
        self.layers: list[Any] = [layer.linear_attn for layer in model.model.layers if hasattr(layer, "linear_attn")]
        first, rows = self.layers[0], len(formats) * sequences
        heads, keys, values = first.num_v_heads, first.head_k_dim, first.head_v_dim
        # All layers in one tensor, so that rounding is a few large operations.
        self.states = torch.zeros(len(self.layers), rows, heads, keys, values, device=model.device)
        width = first.conv_dim, first.conv_kernel_size
        self.convs = torch.zeros(len(self.layers), rows, *width, dtype=model.dtype, device=model.device)
        self.cache = StaticCache(config, max_cache_len=length)
        for layer, state, conv in zip(self.layers, self.states, self.convs, strict=True):
            cached: Any = self.cache.layers[layer.layer_idx]
            cached.lazy_initialization(conv_states=conv, recurrent_states=state)
            cached.conv_states[0], cached.recurrent_states[0] = conv, state
        self.gates: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            layer.in_proj_a.register_forward_hook(lambda _, __, out, index=index: self.gates.update({index: out}))
        self.reset()

    def reset(self) -> None:
        """Begin new sequences, in the same memory."""
        self.cache.reset()
        # States of zeros are states: the first token then takes the path of all others.
        for layer in self.layers:
            self.cache.layers[layer.layer_idx].has_previous_state[0] = True

    def forward(self, tokens: Tensor) -> Tensor:
        """Read one token of each sequence (`[sequences]`).

        Returns:
            Log-probabilities of the next token, `[formats, sequences, vocabulary]` float32.
        """
        rows = tokens.repeat(len(self.formats))[:, None]
        logits = self.model(rows, **{CACHE: self.cache}, use_cache=True).logits[:, -1]
        return logits.float().log_softmax(-1).unflatten(0, (-1, self.sequences))

    def round(self, at: Tensor) -> None:
        """Store the states as their formats do, after the token at position `at` (`[1]`)."""
        for index, kind in enumerate(self.formats):
            rows = slice(index * self.sequences, (index + 1) * self.sequences)
            if kind.is_conv_bf16:
                self.convs[:, rows] = self.convs[:, rows].bfloat16().to(self.convs.dtype)
            if kind.storage == "float32":
                continue
            states = self.states[:, rows]
            stored = kind.rounded(states)
            if kind.every > 1 or kind.exact_share:
                is_due = ((at + 1) % kind.every == 0) & (at >= kind.exact_share * self.length)
                stored = torch.where(is_due, stored, states)
            states.copy_(stored)

    def decays(self) -> Tensor:
        """What the newest token took from the states of the first format, minus its logarithm: `[layers, heads]`, the
        mean over sequences, and the share of sequences in which bf16 would have lost it, stacked."""
        gates = []
        for index, layer in enumerate(self.layers):
            inputs = self.gates[index][: self.sequences, 0].float()
            gates.append(layer.A_log.float().exp() * F.softplus(inputs + layer.dt_bias))
        decays = torch.stack(gates)  # [layers, sequences, heads]
        return torch.stack((decays.mean(1), (-torch.expm1(-decays) < LOST_DECAY).float().mean(1)))

    def norms(self, of: Tensor) -> Tensor:
        """Squared norms of states (`[layers, rows, heads, keys, values]`): `[layers, formats, heads]`, summed over
        sequences."""
        return of.square().sum((-2, -1)).unflatten(1, (-1, self.sequences)).sum(2)


class Steps:
    """Decode steps of all rows, and what they measured: tensors with a row for each position.

    Args:
        lanes: The first one's first format is the baseline.
        capture: Whether to make a step one CUDA graph.
    """

    def __init__(self, lanes: list[Lane], *, capture: bool) -> None:
        self.lanes, lane = lanes, lanes[0]
        device, length, sequences = lane.states.device, lane.length, lane.sequences
        self.tokens = torch.zeros(sequences, dtype=torch.long, device=device)
        self.targets = torch.zeros_like(self.tokens)
        self.at = torch.zeros(1, dtype=torch.long, device=device)
        self.baseline: Tensor = torch.zeros(sequences, lane.model.config.vocab_size, device=device)
        rows = length, sum(len(each.formats) for each in lanes), sequences
        heads = length, len(lane.layers), len(lane.formats), lane.states.shape[2]
        shapes = {"kld": rows, "agreement": rows, "nll": rows, "norm": heads, "error": heads}
        shapes["decay"] = (length, 2, len(lane.layers), lane.states.shape[2])
        self.found = {name: torch.zeros(shape, device=device) for name, shape in shapes.items()}
        self.graph: torch.cuda.CUDAGraph | None = None
        if capture:
            self._capture()

    def _capture(self) -> None:
        # On a stream of its own, as torch asks for before a capture. Kernels are compiled and memory is taken there.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._step()
        self.reset()

    def reset(self) -> None:
        """Begin new sequences."""
        self.at.zero_()
        for lane in self.lanes:
            lane.reset()

    def _step(self) -> None:
        lane = self.lanes[0]
        found = torch.cat([each.forward(self.tokens) for each in self.lanes])  # [formats, sequences, vocabulary]
        baseline = found[0]
        self.baseline.copy_(baseline)
        for each in self.lanes:
            each.round(self.at)
        states = lane.states.unflatten(1, (-1, lane.sequences))
        change = found - baseline
        measured = {
            # Both distributions sum to 1, so this is the sum of p · -change. Each of its terms is small and at least 0;
            # with those, rounding would leave 1e-7.
            "kld": (baseline.exp() * (torch.expm1(change) - change)).sum(-1),
            "agreement": (found.argmax(-1) == baseline.argmax(-1)).float(),
            "nll": -found.gather(-1, self.targets.expand(len(found), -1)[..., None])[..., 0],
            "norm": lane.norms(lane.states),
            "error": lane.norms((states - states[:, :1]).flatten(1, 2)),
            "decay": lane.decays(),
        }
        for name, value in measured.items():
            self.found[name].index_copy_(0, self.at, value[None])
        self.at.add_(1)

    def run(self, windows: Tensor, text: str, seed: int) -> None:
        """Read one text.

        Args:
            windows: `[sequences, length + 1]` tokens of the file.
            text: One of `TEXTS`.
            seed: Of what is sampled, and of stochastic rounding.
        """
        self.reset()
        torch.manual_seed(seed)
        for at in range(windows.shape[1] - 1):
            if text == "text" or at < PROMPT:
                self.tokens.copy_(windows[:, at])
            elif text == "greedy":
                self.tokens.copy_(self.baseline.argmax(-1))
            else:
                # The largest of probabilities divided by exponential noise is a sample, without waiting for a GPU.
                noise = torch.empty_like(self.baseline).exponential_()
                self.tokens.copy_((self.baseline.exp() / noise).argmax(-1))
            self.targets.copy_(windows[:, at + 1])
            if self.graph is None:
                self._step()
            else:
                self.graph.replay()


def buckets(length: int) -> Iterator[tuple[int, int]]:
    """Where the buckets of positions begin and end."""
    edges = [0, *(round(share * length) for share in EDGES)]
    return itertools.pairwise(edges)


def summary(steps: Steps, text: str) -> dict[str, Any]:
    """What one text has shown, by format and by bucket of positions."""
    found, lane, length = steps.found, steps.lanes[0], steps.lanes[0].length
    begin = 0 if text == "text" else PROMPT
    spans = [(max(first, begin), last) for first, last in buckets(length) if last > begin]
    half_lives = math.log(2) / found["decay"][begin:, 0].mean(0)  # [layers, heads], tokens
    is_slow = half_lives >= half_lives.flatten().sort().values[-math.ceil(SLOW * half_lives.numel())]
    groups = {"slow": is_slow, "fast": ~is_slow}
    rows: list[dict[str, Any]] = []
    for index, kind in enumerate(kind for each in steps.lanes for kind in each.formats):
        kld, nll = found["kld"][:, index], found["nll"][:, index]
        row: dict[str, Any] = {
            "method": kind.method,
            "format": dataclasses.asdict(kind),
            "kld": [float(kld[first:last].mean()) for first, last in spans],
            "kld_p99": [float(kld[first:last].flatten().float().quantile(0.99)) for first, last in spans],
            "agreement": [float(found["agreement"][first:last, index].mean()) for first, last in spans],
            "kld_of_sequences": [kld[first:last].mean(0).tolist() for first, last in spans],
            "mean_kld": float(kld[begin:].mean()),
            "mean_agreement": float(found["agreement"][begin:, index].mean()),
        }
        if text == "text":
            row["perplexity"] = math.exp(float(nll.double().mean()))
            row["perplexity_change"] = row["perplexity"] / rows[0]["perplexity"] - 1 if rows else 0.0
        if index < len(lane.formats):
            row["bytes"] = sum(kind.num_bytes(*lane.states.shape[2:]) for _ in lane.layers)
            row["conv_bytes"] = lane.convs[:, 0].numel() * (2 if kind.is_conv_bf16 else lane.convs.element_size())
            for name, members in groups.items():
                sums = [found["norm"][f:t, :, 0][:, members].sum() for f, t in spans]
                errors = [found["error"][f:t, :, index][:, members].sum() for f, t in spans]
                norms = [found["norm"][f:t, :, index][:, members].sum() for f, t in spans]
                row[f"{name}_error"] = [float((e / s).sqrt()) for e, s in zip(errors, sums, strict=True)]
                row[f"{name}_norm"] = [float((n / s).sqrt()) for n, s in zip(norms, sums, strict=True)]
        rows.append(row)
    return {
        "kind": text,
        "spans": spans,
        "half_lives": [[round(each, 2) for each in layer] for layer in half_lives.tolist()],
        **{f"{name}_half_lives": sorted(half_lives[members].tolist()) for name, members in groups.items()},
        "lost_decays": float(found["decay"][begin:, 1].mean()),
        "rows": rows,
    }


def shown(found: dict[str, Any]) -> Table:
    """The table of one text."""
    table = Table(title=f"{found['kind']}: KL divergence, nats a token", title_justify="left")
    ends = [str(last) for _, last in found["spans"]]
    for column in ("states", "bytes", *(f"to {end}" for end in ends), "same token", "perplexity", "slow, fast error"):
        table.add_column(column, justify="left" if column == "states" else "right")
    for row in found["rows"]:
        errors = ", ".join(f"{row[name][-1]:.1e}" for name in ("slow_error", "fast_error") if name in row)
        table.add_row(
            row["method"],
            f"{row['bytes']:,}" if "bytes" in row else "",
            *(f"{each:.1e}" for each in row["kld"]),
            f"{row['mean_agreement']:.2%}",
            f"{row['perplexity_change']:+.3%}" if "perplexity" in row else "",
            errors,
        )
    return table


def cut(ids: Tensor, sequences: int, length: int) -> tuple[Tensor, list[int]]:
    """Windows spread over a text, `[sequences, length + 1]`, and where they begin."""
    if len(ids) < sequences * (length + 1):
        raise SystemExit(
            f"state_drift: `--text` must have {sequences} windows of {length + 1} tokens, got {len(ids)} tokens. Lower "
            "--sequences or --length."
        )
    begins = [index * (len(ids) // sequences) for index in range(sequences)]
    return torch.stack([ids[begin : begin + length + 1] for begin in begins]), begins


def parse(words: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", required=True, metavar="FOLDER", help="a checkpoint with states")
    parser.add_argument("--text", required=True, type=Path, metavar="FILE", help="lines, joined by two newlines")
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=list(TEXTS), help="what is read (default: all)")
    names = [kind.method for kind in FORMATS]
    parser.add_argument("--formats", nargs="+", choices=names, default=names, metavar="NAME", help="(default: all)")
    parser.add_argument("--sequences", type=int, default=4, help="windows that each format reads (default: 4)")
    parser.add_argument("--length", type=int, default=8192, help="tokens of a window (default: 8192)")
    parser.add_argument("--seed", type=int, default=0)
    told = "first let all heads forget so many times slower; the baseline is then that model (default: 1)"
    parser.add_argument("--slower", type=float, default=1.0, metavar="F", help=told)
    parser.add_argument("--eager", action="store_true", help="do not capture steps as a CUDA graph")
    add_run_options(parser, after="every text")
    return parse_run(parser, words)


@torch.inference_mode()
@without_cudnn()  # one kernel of attention for all, and none that plans while a step is captured
def main(words: list[str] | None = None) -> None:
    """Measure all texts. Print the tables, and the results as one line of JSON."""
    arguments, started, console = parse(words), time.perf_counter(), Console(width=160)
    device = arguments.device
    # Sums in TF32 would be noise larger than what is measured.
    torch.set_float32_matmul_precision("highest")
    model, tokenizer = load(arguments.model, "float32", device)
    text = "\n\n".join(arguments.text.read_text(encoding="utf-8").splitlines())
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    windows, begins = cut(ids, arguments.sequences, arguments.length)
    chosen = tuple(kind for kind in FORMATS if kind.method in {BASELINE, *arguments.formats})
    formats = (chosen[0], dataclasses.replace(chosen[0], method="float32-again"), *chosen[1:])
    in_bf16, _ = load(arguments.model, "bfloat16", device)
    for layer in (each for one in (model, in_bf16) for each in one.model.layers if hasattr(each, "linear_attn")):
        layer.linear_attn.A_log.sub_(math.log(arguments.slower))
    lanes = [
        Lane(model, formats, arguments.sequences, arguments.length),
        Lane(in_bf16, (StateFormat(MODEL_IN_BF16),), arguments.sequences, arguments.length),
    ]
    steps = Steps(lanes, capture=device.type == "cuda" and not arguments.eager)
    folder = Path(arguments.model)
    package = "flash-linear-attention"
    results: dict[str, Any] = {
        **card(),
        **(gpu_card() if device.type == "cuda" else {}),
        "fla": importlib.metadata.version(package) if importlib.util.find_spec("fla") else None,
        "device": device.type,
        "dtype": "float32",
        "model": model_name(arguments.model),
        "parameters": sum(each.numel() for each in model.parameters()),
        "layers": model.config.layer_types,
        "state": list(lanes[0].states.shape[2:]),
        "weights_sha256": {path.name: sha256(path) for path in sorted(folder.glob("*.safetensors"))},
        "tokenizer_sha256": sha256(folder / "tokenizer.json"),
        "data": arguments.text.name,
        "data_sha256": sha256(arguments.text),
        "convention": "rows joined by two newlines",
        "begins": begins,
        "length": arguments.length,
        "sequences": arguments.sequences,
        "seed": arguments.seed,
        "slower": arguments.slower,
        "texts": [],
    }
    for kind in arguments.texts:
        begun = time.perf_counter()
        steps.run(windows.to(device), kind, arguments.seed)
        found = summary(steps, kind)
        console.print(shown(found))
        noise = found["rows"][1]["mean_kld"]
        if not abs(noise) < NOISE:
            raise SystemExit(f"state_drift: two equal rows differ by {noise:.1e} nats a token. Nothing was written.")
        results["texts"].append({**found, "seconds": round(time.perf_counter() - begun)})
        results["seconds"] = round(time.perf_counter() - started)
        write_results(results, arguments.output)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
