"""Renders the README's table and picture from `evals/results/`, and from nothing else.

    python evals/render_readme.py

A test compares what this file makes with what is committed, so a number in the README is always one of a results file;
the picture carries its numbers along for that, since its bytes depend on the version of matplotlib, which only drawing
needs (`pip install matplotlib`). What is measured, and how, is decided in the scripts beside this file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "evals" / "results"
README = ROOT / "README.md"
PICTURE = RESULTS / "presets.svg"
BEGIN, END = "<!-- begin: evals/render_readme.py -->\n", "<!-- end -->"


def load(name: str) -> dict[str, Any]:
    """One results file."""
    results: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return results


def speedups(cpu: dict[str, Any]) -> dict[str, float]:
    """Per preset, how many times as fast as the faster of PyTorch's fp32 and bf16 attention."""
    return {row["preset"]: row["speedup"] for row in cpu["rows"]}


def table(fidelity: dict[str, Any], cpu: dict[str, Any]) -> str:
    """The README's table, with a line that says where its numbers come from."""
    ratios = speedups(cpu)
    unquantised = fidelity["presets"]["none"]["bytes_per_token"]
    lines = [
        "| preset | bits a value | cache | KL, nats a token | same next token | perplexity change "
        "| CPU decode, times PyTorch |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for preset, row in fidelity["presets"].items():
        ratio = f"{ratios[preset]:.1f}" if preset in ratios else "-"
        lines.append(
            f"| `{preset}` | {row['bits_per_value']:.4g} | {row['bytes_per_token'] / unquantised:.0%} "
            f"| {scientific(row['kld'])} | {row['agreement']:.1%} | {row['perplexity_change']:+.2%} | {ratio} |"
        )
    return "\n".join(lines)


def scientific(number: float) -> str:
    """A small number as people write it: `1.9·10⁻⁴`."""
    if number == 0:
        return "0"
    mantissa, exponent = f"{number:.1e}".split("e")
    digits = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{mantissa}·10{digits}"


def caption(fidelity: dict[str, Any], cpu: dict[str, Any]) -> str:
    """What was measured, on what, when and by which command."""
    shape = cpu["shape"]
    return (
        f"Quality: the reference model of this repository (15.5 million parameters, {fidelity['dtype']}), "
        f"{fidelity['scored_tokens']:,} tokens of WikiText-2 in windows of {fidelity['window']}, against the "
        f"unquantised cache; {fidelity['date'][:10]}, `evals/results/fidelity.json`. "
        f"CPU decode: attention of one token, batch {shape['batch']}, {shape['num_q_heads']} query and "
        f"{shape['num_kv_heads']} key-value heads of {shape['head_dim']}, {shape['length']:,} tokens, "
        f"{cpu['threads']} threads, times as fast as the faster of PyTorch's fp32 and bf16 attention over the "
        f"unquantised cache; {cpu['cpu']}, {cpu['date'][:10]}, `evals/results/cpu_decode.json`."
    )


# --- the picture ------------------------------------------------------------------------------------------------------


def plotted(fidelity: dict[str, Any], cpu: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """The numbers in the picture: per panel and label, what is drawn."""
    return {
        "quality": {
            name: [row["bits_per_value"], row["kld"]] for name, row in fidelity["presets"].items() if name != "none"
        },
        "speed": {name: [ratio] for name, ratio in {"PyTorch, unquantised": 1.0, **speedups(cpu)}.items()},
    }


def draw(numbers: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Quality and speed side by side, as SVG with text as text and the numbers in its description."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "hf_kvquant", "font.family": "sans-serif"})
    figure, (quality, speed) = pyplot.subplots(1, 2, figsize=(9.5, 3.2), layout="constrained")
    for name, (bits, kld) in numbers["quality"].items():
        quality.scatter(bits, kld, color="#b5432e")
        quality.annotate(name, (bits, kld), xytext=(7, -3), textcoords="offset points")
    quality.set(title="KL divergence from the unquantised cache", xlim=(3.5, 9.5), yscale="log")
    quality.set(xlabel="bits a value, scales and zeros included", ylabel="nats a token")
    labels = list(numbers["speed"])
    bars = speed.barh(labels, [ratio for (ratio,) in numbers["speed"].values()], color="#3e6fa3")
    speed.bar_label(bars, fmt="%.1f", padding=3)
    speed.set(title="Decode attention on a CPU", xlabel="times as fast as PyTorch", xlim=(0, 4.5))
    speed.invert_yaxis()
    for axes in (quality, speed):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y" if axes is quality else "x", color="#d8d8d8")
        axes.set_axisbelow(True)
    figure.savefig(path, metadata={"Date": None, "Creator": None, "Description": json.dumps(numbers)})


def described(path: Path) -> dict[str, dict[str, list[float]]]:
    """The numbers that a picture by `draw` says it shows."""
    found = ElementTree.parse(path).find(".//{http://purl.org/dc/elements/1.1/}description")
    numbers: dict[str, dict[str, list[float]]] = json.loads("" if found is None or found.text is None else found.text)
    return numbers


# --- the README -------------------------------------------------------------------------------------------------------


def rendered(readme: str, fidelity: dict[str, Any], cpu: dict[str, Any]) -> str:
    """The README with what stands between the markers made anew."""
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    place = PICTURE.relative_to(ROOT).as_posix()
    parts = [f"![Quality and speed of the presets]({place})", table(fidelity, cpu), caption(fidelity, cpu)]
    return before + BEGIN + "\n" + "\n\n".join(parts) + "\n\n" + END + after


def main() -> None:
    """Write the picture and the README."""
    fidelity, cpu = load("fidelity.json"), load("cpu_decode.json")
    draw(plotted(fidelity, cpu), PICTURE)
    README.write_text(rendered(README.read_text(encoding="utf-8"), fidelity, cpu), encoding="utf-8")


if __name__ == "__main__":
    main()
