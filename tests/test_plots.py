"""That pictures can be read: nothing is cut off or covered, text is large enough, on a light and on a dark page."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hf_kvquant_evals.report import page, plots

if importlib.util.find_spec("matplotlib") is None:
    pytest.skip("matplotlib is optional", allow_module_level=True)

from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 600  # pixels of a picture in a README
SMALLEST = 11  # pixels of its letters
CONTRAST = 4.5  # of text, after WCAG 2.1, level AA

LONG = "int4-channel-untransformed:4+128"
NAMES = ["int8", "k8v4", "int4", "int4-g32", "int4-channel", "fp8", LONG, "int8:0+32"]


@pytest.fixture(scope="module")
def renderer() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patches:
        patches.syspath_prepend(str(ROOT / "evals"))  # as for a script there
        yield importlib.import_module("render_readme")


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every figure that is written, the last one last."""
    written: list[Any] = []
    save = Figure.savefig

    def recorded(figure: Any, *args: Any, **kwargs: Any) -> None:
        written.append(figure)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", recorded)
    return written


# --- what is wrong with a picture -------------------------------------------------------------------------------------


def drawn_texts(figure: Any) -> list[Any]:
    """Texts that are visible, of ticks as well."""
    texts: list[Any] = []
    draw = Text.draw

    def recorded(text: Any, *args: Any, **kwargs: Any) -> None:
        if text.get_visible() and text.get_text():
            texts.append(text)
        draw(text, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(Text, "draw", recorded)
        figure.canvas.draw()
    return texts


def is_within(inner: Any, outer: Any) -> bool:
    """... but for a pixel."""
    return bool((inner.min >= outer.min - 1).all() and (inner.max <= outer.max + 1).all())


def faults(figure: Any) -> list[str]:
    """What a reader could not read in a picture that is WIDTH pixels wide."""
    found = []
    boxes = [(text, text.get_window_extent()) for text in dict.fromkeys(drawn_texts(figure))]
    for text, box in boxes:
        if not is_within(box, figure.bbox):
            found.append(f"cut off: {text.get_text()}")
        if (size := text.get_fontsize() * figure.dpi / 72 * WIDTH / figure.bbox.width) < SMALLEST:
            found.append(f"too small, {size:.1f} pixels: {text.get_text()}")
    for (one, box), (other, behind) in itertools.combinations(boxes, 2):
        if box.padded(-0.5).overlaps(behind.padded(-0.5)):
            found.append(f"on each other: {one.get_text()}, {other.get_text()}")
    for axes in figure.axes:
        for artist in (*axes.lines, *axes.patches, *axes.collections):
            if not is_within(artist.get_window_extent(), axes.bbox):
                found.append(f"outside of its axes: {artist}")
        points = [tuple(point) for line in axes.lines for point in line.get_transform().transform(line.get_xydata())]
        for text, box in ((text, box) for text, box in boxes if isinstance(text, Annotation) and text.axes is axes):
            if any(box.contains(*point) for point in points):
                found.append(f"on a point: {text.get_text()}")
    return found


def misplaced(figure: Any) -> list[str]:
    """Labels that begin nearer to another point than to their own, where points stand alone.

    Points on each other, within the size of a marker, are one to a reader.
    """
    found = []
    for axes in figure.axes:
        lonely = [line for line in axes.lines if len(line.get_xydata()) == 1]
        for text in axes.texts if lonely else ():
            box = text.get_window_extent()
            x = {"left": box.x0, "center": (box.x0 + box.x1) / 2, "right": box.x1}[text.get_ha()]
            points = axes.transData.transform([text.xy, *(line.get_xydata()[0] for line in lonely)])
            own, *others = (math.dist((x, (box.y0 + box.y1) / 2), point) for point in points)
            if own > min(others) + lonely[0].get_markersize():
                found.append(text.get_text())
    return found


# --- every picture ----------------------------------------------------------------------------------------------------


def readme_pictures(renderer: ModuleType) -> dict[str, Callable[[Path], None]]:
    results, drawing = renderer.load_all(), renderer.pictures
    gpu, generate = results["decode"], results["generate"]
    return {
        "presets": lambda path: drawing.draw_presets(drawing.plotted_presets(results), path),
        "decode": lambda path: drawing.draw_decode(drawing.plotted_decode(gpu), path),
        "generate": lambda path: drawing.draw_generate(drawing.plotted_generate(generate), path),
    }


def report_numbers() -> dict[str, dict[str, Any]]:
    """Hard cases: names that are long, points on each other, lines that end together."""
    bits = [8.125, 6.1875, 4.25, 5, 4.25, 8.125, 5.6, 8.125]
    klds = [1.5e-4, 9.4e-3, 3.3e-2, 2.2e-2, 3.3e-2, 1.6e-4, 1.1e-2, 1.5e-4]
    points = {name: [[x, y]] for name, x, y in zip(NAMES, bits, klds, strict=True)}
    ends = {name: [[x, 1e-3 * (1 + x % 3 + 0.1 * i)] for x in range(6)] for i, name in enumerate(NAMES)}
    channels = {"before": [9.0, 1.0, 2.0, 1.0] * 64, "after": [2.0, 1.0, 2.0, 1.0] * 64}
    uneven = {"before": [[0, 4.5], [1, 2.0]], "after": [[0, 1.0], [1, 2.0]]}
    keys = {"layer": 31, **channels, "uneven": uneven}
    panels = ("as it is", "with injected outliers")
    return {
        "quality.svg": dict.fromkeys(panels, points),
        "positions.svg": dict.fromkeys(panels, ends),
        "layers.svg": dict.fromkeys(panels, ends),
        "keys.svg": dict.fromkeys(panels, keys),
    }


def draw_report(name: str, path: Path, num_panels: int = 2) -> None:
    numbers = dict(list(report_numbers()[name].items())[:num_panels])
    page.PICTURES[name].draw(path, numbers)


@pytest.mark.parametrize("name", ["presets", "decode", "generate", *report_numbers()])
def test_a_picture_can_be_read(renderer: ModuleType, figures: list[Any], tmp_path: Path, name: str) -> None:
    paths = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for path in paths:
        if name in page.PICTURES:
            draw_report(name, path)
        else:
            readme_pictures(renderer)[name](path)
    assert not faults(figures[0]) and not misplaced(figures[0])
    written, again = (path.read_text(encoding="utf-8") for path in paths)
    assert written == again
    # Text is text, at most WIDTH pixels wide as it stands, and each colour has one for dark pages.
    assert "<text" in written and f'width="{0.75 * WIDTH:g}pt"' in written
    colours = re.findall(r'(?:fill|stroke): (#[0-9a-f]{6})(?=[;"])', written)
    assert set(colours) <= set(plots.ON_DARK) and plots.dark_rules() in written
    for light, dark in plots.ON_DARK.items():
        assert f'[style*="fill: {light}"]{{fill: {dark} !important}}' in written


def test_titles_of_the_readme_follow_the_numbers(renderer: ModuleType, figures: list[Any], tmp_path: Path) -> None:
    drawing, path = renderer.pictures, tmp_path / "x.svg"
    quality = {"bf16": [1.0, 0.0], "int8": [0.51, 0.0], "int4": [0.27, 0.013]}
    drawing.draw_presets({"quality": quality, "speed": {"bf16": 1.0, "int8": 1.9, "int4": 3.41}, "gpu": "X"}, path)
    time = {"bf16": [[1024, 7.0], [8192, 15.0]], "int4": [[1024, 8.0], [8192, 10.0]]}
    drawing.draw_decode({"time": time, "share": {"int4": [[1.0, 0.25], [8.0, 0.9]]}, "gpu": "X"}, path)
    steps = {
        "1x2k": {"static": 7.0, "int8-static": 6.7, "int4-static": 6.5, "int4-capture": None},
        "8x16k": {"static": 45.0, "int8-static": 8.5, "int4-static": 7.7, "int4-capture": 6.0},
        "64x8k": {"static": None, "int8-static": 15.0, "int4-static": 1.0, "int4-capture": 1.0},
    }
    drawing.draw_generate({"steps": steps, "parameters": 8.03e9, "gpu": "X"}, path)
    assert [figure.get_suptitle() for figure in figures] == [
        "int4 shrinks the cache to 27% and attends 3.4 times as fast",
        "int4 attends 1.5 times as fast as bf16 at 8k tokens",
        "generate is up to 7.5 times as fast with an int4 cache",
    ]
    labels = [text.get_text() for text in figures[-1].axes[0].texts]
    assert labels[3] == "int4 captured, not measured" and labels[4] == "transformers static cache, 45.0 ms"
    assert not any(map(faults, figures))


@pytest.mark.parametrize("name", page.PICTURES)
def test_one_panel_is_enough(figures: list[Any], tmp_path: Path, name: str) -> None:
    draw_report(name, tmp_path / name, num_panels=1)
    assert not faults(figures[0])


def test_what_is_zero_has_no_place_on_a_logarithmic_scale(figures: list[Any], tmp_path: Path) -> None:
    panel = {"int8": [[0, 0.0], [1, 0.0]], "int4": [[0, 1e-3], [1, 0.0]]}
    plots.lines(tmp_path / "x.svg", {"as it is": panel}, "A message", xlabel="layer", ylabel="nats")
    assert not faults(figures[0]) and [text.get_text() for text in figures[0].axes[0].texts] == ["int4"]


def test_messages_follow_the_numbers() -> None:
    numbers = {name: next(iter(panels.values())) for name, panels in report_numbers().items()}
    found = {name: page.PICTURES[name].message(each) for name, each in numbers.items()}
    assert found == {
        "quality.svg": f"int4, int4-channel, int4-g32, {LONG}, k8v4, int8 and int8:0+32 diverge least for their size",
        "positions.svg": "int8:0+32 diverges most in the part from token 2 on",
        "layers.svg": "Layer 5 is the most sensitive to int8:0+32",
        "keys.svg": "Calibration brings layer 31's largest key channel from 6.0 to 1.3 times the median",
    }
    alone = {"int8": [[8.125, 1e-4]], "fp8": [[8.125, 1e-3]]}
    assert page.quality_message(alone) == "int8 is smallest and diverges least"


def luminance(colour: str) -> float:
    """Relative, after WCAG 2.1."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_stands_out_on_light_and_dark_pages() -> None:
    for light, dark in plots.ON_DARK.items():
        if light in (plots.PAPER, plots.GRID):
            continue
        for colour, paper in ((light, plots.PAPER), (dark, plots.ON_DARK[plots.PAPER])):
            low, high = sorted(luminance(each) + 0.05 for each in (colour, paper))
            assert high / low >= CONTRAST, colour


# --- that faults are found --------------------------------------------------------------------------------------------


def cut_bar(axes: Any) -> None:
    axes.barh(["int8"], [5.5])
    axes.set_xlim(0, 4.5)


def cut_point(axes: Any) -> None:
    axes.plot([9.0], [1.0], "o")
    axes.set_xlim(0, 4.5)


def two_texts(axes: Any) -> None:
    axes.text(0.5, 0.5, "int4")
    axes.text(0.5, 0.52, "int4-channel")


def far_text(axes: Any) -> None:
    axes.text(3.0, 0.5, "int4").set_in_layout(False)


def small_text(axes: Any) -> None:
    axes.text(0.5, 0.5, "int4", fontsize=8)


def covered_point(axes: Any) -> None:
    axes.plot([0.0, 0.5, 1.0], [0.0, 0.5, 1.0], "o")
    axes.annotate("int4", (0.5, 0.5), ha="center", va="center")


@pytest.mark.parametrize(
    "draw, fault",
    [
        (cut_bar, "outside of its axes: Rectangle"),
        (cut_point, "outside of its axes: Line2D"),
        (two_texts, "on each other: int4, int4-channel"),
        (far_text, "cut off: int4"),
        (small_text, "too small, 10.7 pixels: int4"),
        (covered_point, "on a point: int4"),
    ],
)
def test_faults_are_found(
    figures: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draw: Callable[[Any], None], fault: str
) -> None:
    monkeypatch.setattr(plots, "place_labels", lambda figure: None)
    with plots.picture(tmp_path / "x.svg", {}, "A message") as ((axes,),):
        draw(axes)
    (found,) = faults(figures[0])
    assert found.startswith(fault)


def test_labels_far_from_their_points_are_found(figures: list[Any], tmp_path: Path) -> None:
    with plots.picture(tmp_path / "x.svg", {}, "A message") as ((axes,),):
        for x, name in ((0.0, "int8"), (1.0, "int4")):
            axes.plot([x], [x], "o")
            plots.label(axes, name, (x, x))
    (figure,) = figures
    assert misplaced(figure) == []
    figure.axes[0].texts[0].set_position((200, 60))
    assert misplaced(figure) == ["int8"]


def test_labels_of_many_points_are_led_to_them(tmp_path: Path) -> None:
    """Where there is no room beside a point, a thin line leads from the label to it."""
    numbers = {"panel": {"x": [[1.0, 1.0]]}}

    def lines(is_linked: bool) -> int:
        path = tmp_path / f"{is_linked}.svg"
        with plots.picture(path, numbers, "Many points") as [[axes]]:
            for number in range(12):
                point = (1.0, 1.0)
                axes.plot(*point, marker="o")
                plots.label(axes, f"label {number}", point, is_linked=is_linked)
        return path.read_text(encoding="utf-8").count("stroke-width: 0.5")

    assert lines(False) == 0 and lines(True) >= 6
