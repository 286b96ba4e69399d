"""Renders the README's table and picture from `evals/results/`, and from nothing else.

    python evals/render_readme.py

A test compares what this file makes with what is committed, so a number in the README is always one of a results file.
The picture is written as text, element by element: the same input gives the same bytes, with no plotting library to
install or to change its mind. What is measured, and how, is decided in the scripts beside this file.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "evals" / "results"
README = ROOT / "README.md"
PICTURE = RESULTS / "presets.svg"
BEGIN, END = "<!-- begin: evals/render_readme.py -->\n", "<!-- end -->"

INK, GRID, POINT, BAR = "#333333", "#d8d8d8", "#b5432e", "#3e6fa3"
# One panel, in pixels: its frame, and the room around it for axes and titles.
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 330, 210, 60, 34, 44


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
        "| preset | bits a value | cache | KL, nats a token | same next token | perplexity change | CPU decode, times PyTorch |",
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


def text(x: float, y: float, content: str, *, anchor: str = "start", size: int = 12, weight: str = "normal") -> str:
    """One line of text at a point."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" '
        f'fill="{INK}">{content}</text>'
    )


def line(x1: float, y1: float, x2: float, y2: float) -> str:
    """A grid line."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{GRID}"/>'


def quality_panel(fidelity: dict[str, Any], left: float) -> list[str]:
    """KL divergence on a logarithmic axis over bits per value, one point per quantised preset."""
    rows = {name: row for name, row in fidelity["presets"].items() if name != "none"}
    low = math.floor(math.log10(min(row["kld"] for row in rows.values())))
    high = math.ceil(math.log10(max(row["kld"] for row in rows.values())))

    def x_of(bits: float) -> float:
        return left + (bits - 3) / (10 - 3) * WIDTH

    def y_of(kld: float) -> float:
        return TOP + (high - math.log10(kld)) / (high - low) * HEIGHT

    parts = [text(left, TOP - 14, "KL divergence from the unquantised cache, nats", weight="bold")]
    for exponent in range(low, high + 1):
        y = y_of(10.0**exponent)
        parts += [line(left, y, left + WIDTH, y), text(left - 6, y + 4, scientific(10.0**exponent)[4:], anchor="end")]
    for bits in range(3, 11):
        parts.append(text(x_of(bits), TOP + HEIGHT + 18, str(bits), anchor="middle"))
    parts.append(text(left + WIDTH / 2, TOP + HEIGHT + 36, "bits a value, scales and zeros included", anchor="middle"))
    for name, row in rows.items():
        x, y = x_of(row["bits_per_value"]), y_of(row["kld"])
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{POINT}"/>', text(x + 9, y + 4, name)]
    return parts


def speed_panel(cpu: dict[str, Any], left: float) -> list[str]:
    """Speed of decode attention as bars, PyTorch's over the unquantised cache being 1."""
    ratios = {"PyTorch, unquantised": 1.0, **speedups(cpu)}
    top = math.ceil(max(ratios.values()))
    row_height = HEIGHT / len(ratios)
    label_width = 130
    start, width = left + label_width, WIDTH - label_width
    parts = [text(left, TOP - 14, "CPU decode attention, times as fast as PyTorch", weight="bold")]
    for tick in range(top + 1):
        x = start + tick / top * width
        parts += [line(x, TOP, x, TOP + HEIGHT), text(x, TOP + HEIGHT + 18, str(tick), anchor="middle")]
    for index, (name, ratio) in enumerate(ratios.items()):
        y = TOP + (index + 0.2) * row_height
        length = ratio / top * width
        parts += [
            text(start - 8, y + row_height * 0.3 + 4, name, anchor="end"),
            f'<rect x="{start:.1f}" y="{y:.1f}" width="{length:.1f}" height="{row_height * 0.6:.1f}" fill="{BAR}"/>',
            text(start + length - 6, y + row_height * 0.3 + 4, f"{ratio:.1f}", anchor="end").replace(INK, "#ffffff"),
        ]
    return parts


def picture(fidelity: dict[str, Any], cpu: dict[str, Any]) -> str:
    """Quality and speed side by side, as SVG."""
    total_width, total_height = 2 * (LEFT + WIDTH) + 30, TOP + HEIGHT + BOTTOM
    parts = quality_panel(fidelity, LEFT) + speed_panel(cpu, 2 * LEFT + WIDTH)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total_width} {total_height}" '
            f'width="{total_width}" height="{total_height}" font-family="sans-serif">',
            f'<rect width="{total_width}" height="{total_height}" fill="#ffffff"/>',
            *parts,
            "</svg>\n",
        ]
    )


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
    PICTURE.write_text(picture(fidelity, cpu), encoding="utf-8")
    README.write_text(rendered(README.read_text(encoding="utf-8"), fidelity, cpu), encoding="utf-8")


if __name__ == "__main__":
    main()
