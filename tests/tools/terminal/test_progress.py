"""The progress line: rate, time left and rejects, on a terminal and elsewhere; what to run next."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest
from rich.console import Console

from leandit.precompute.progress.clock import REJECTED
from leandit.tools.terminal import next_steps, progress
from leandit.tools.terminal.next_steps import after_run, after_store, print_next
from leandit.tools.terminal.progress import ProgressLine


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds; only the test moves them."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_elsewhere_a_plain_line_has_rate_rejects_and_the_time_left(clock: list[float]) -> None:
    stream = io.StringIO()
    with ProgressLine(Console(file=stream, width=200)) as line:
        line("pictures", 0, 12_000)
        clock[0] += 40
        line(REJECTED, 3, 0)
        line("pictures", 80, 12_000)
        clock[0] += 5
        line("pictures", 90, 12_000)  # too soon for another line
        line("pictures", 12_000, 12_000)
    assert stream.getvalue().splitlines() == [
        "pictures: 80 of 12,000  2.0/s, 3 rejected, 1 h 39 min left",
        "pictures: 12,000 of 12,000  266.7/s, 3 rejected",
    ]


def test_a_terminal_has_a_bar_with_counts_rate_time_left_and_rejects() -> None:
    stream = io.StringIO()
    with ProgressLine(Console(file=stream, width=160, force_terminal=True)) as line:
        line("pictures", 0, 12_000)
        for done in (4, 8):
            time.sleep(0.05)
            line("pictures", done, 12_000)
        line(REJECTED, 1, 0)
        line("pictures", 9, 12_000)
        assert line._live
        line._live.refresh()
    shown = stream.getvalue()
    assert "9/12,000" in shown
    assert "/s, 1 rejected" in shown
    assert " left" in shown


def test_what_to_run_next_can_be_pasted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LEANDIT_QUIET", raising=False)
    print_next(["inspect", Path("my stores/a")], ["sample", "run", "--caption", "it's\n"])
    said = capsys.readouterr()
    assert (said.out, said.err) == (
        "",
        "next: leandit inspect 'my stores/a'\nnext: leandit sample run --caption 'it'\"'\"'s\\n'\n",
    )
    monkeypatch.setenv("LEANDIT_QUIET", "1")
    print_next(["inspect", "a"])
    assert capsys.readouterr().err == ""


def test_a_store_of_a_shipped_recipe_is_trained_on_by_one_that_names_it() -> None:
    train = ["train", "pixart-sigma-512", "--store", "s", "--run", "runs/pixart-sigma-512"]
    assert after_store("s", "pixart-512") == [["inspect", "s"], train]
    assert after_store("s", "demo")[1][:2] == ["train", "demo"]
    assert after_store("s", "imagenet-256")[1][1] == "dit-b-2-256"
    assert after_store("s", "mine.toml") == [["inspect", "s"], ["recipes"]]
    assert after_run(Path("runs/a"))[0] == ["sample", Path("runs/a"), "--out", "runs/a-samples"]


def test_a_dry_run_names_the_command_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(next_steps.sys, "argv", ["/bin/leandit", "train", "demo", "--dry-run", "--run", "r"])
    assert next_steps.command_without("--dry-run") == ["train", "demo", "--run", "r"]
