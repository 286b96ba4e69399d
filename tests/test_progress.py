"""What long work shows: lines where no terminal is, bars where one is, and nothing where it is switched off."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator

import models
import pytest
import tqdm.std
from transformers.utils import logging

from hf_kvquant import run_preflight, smooth_attention
from hf_kvquant.common.progress import SECONDS, show_progress

TEXT = 8 * models.SENTENCE


class Clock:
    """Moves when it is told to, or by `step` whenever somebody looks."""

    def __init__(self, step: float = 0.0) -> None:
        self.now, self.step = 1000.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


@pytest.fixture(autouse=True)
def bars() -> Iterator[None]:
    """The tests' switch is off."""
    logging.enable_progress_bar()
    yield
    logging.disable_progress_bar()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(tqdm.std, "time", clock)
    return clock


def test_without_a_terminal_there_is_a_line_every_30_seconds(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress("work", 10) as tell:
        for step in range(10):
            tell(doing=f"step {step}")
            clock.now += 0.4 * SECONDS
            tell(1)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "work: step 2: 30 %, 00:36 so far, 01:24 left",
        "work: step 5: 60 %, 01:12 so far, 00:48 left",
        "work: step 8: 90 %, 01:48 so far, 00:12 left",
    ]


def test_steps_need_not_be_known(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress("work") as tell:
        clock.now += 90
        tell(doing="layer 3")
        tell(doing="layer 4")
    assert capsys.readouterr().err == "work: layer 3, 01:30 so far\n"


def test_short_work_says_nothing(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress("work", 2) as tell:
        clock.now += SECONDS - 1
        tell(1, doing="the end")
    assert capsys.readouterr().err == ""


def test_it_can_be_switched_off(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    def work(is_shown: bool) -> None:
        with show_progress("work", 2, is_shown=is_shown) as tell:
            clock.now += 100
            tell(1, doing="the end")

    work(False)
    logging.disable_progress_bar()
    work(True)
    assert capsys.readouterr().err == ""


def test_a_terminal_has_a_bar(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with show_progress("work", 4, unit="step") as tell:
        tell(doing="layer 3")
        clock.now += 1
        tell(1)
    shown = terminal.getvalue()
    assert "\rwork: layer 3:   0%|" in shown and "25%|" in shown and "1/4" in shown and "\n" not in shown


@pytest.mark.parametrize("progress", [True, False])
def test_calibration_and_pre_flight_show_what_they_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], progress: bool
) -> None:
    monkeypatch.setattr(tqdm.std, "time", Clock(step=40.0))
    model, tokenizer = models.build("llama"), models.tokenizer()
    run_preflight(model, tokenizer=tokenizer, texts=[TEXT], presets=["int4-token", "none"], progress=progress)
    shown = capsys.readouterr().err
    assert ("run_preflight: layer 1, int4-token, " in shown) == progress
    run_preflight(model, "int8", progress=progress)
    shown = capsys.readouterr().err
    assert ("run_preflight: writing a text, token " in shown) == progress
    smooth_attention(model, tokenizer, [TEXT], "int4-token", window=64, progress=progress)
    shown = capsys.readouterr().err
    assert ("smooth_attention: errors of candidates: 50 %, " in shown) == progress
    assert progress or shown == ""
