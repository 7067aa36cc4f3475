"""The progress line: rate, time left and rejects, on a terminal and elsewhere; what to run next."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest
from rich.console import Console

from leandit.precompute.progress.clock import REJECTED
from leandit.tools.synthetic.store import make_store
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
        line("list", 1234, 0)
        line("pictures", 0, 12_000)
        for done in (4, 8):
            time.sleep(0.05)
            line("pictures", done, 12_000)
        line(REJECTED, 1, 0)
        line("pictures", 9, 12_000)
        assert line._live
        line._live.refresh()
    shown = stream.getvalue()
    assert "1,234/1,234" in shown, "a stage of unknown length has ended when the next one begins"
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


def test_a_store_of_a_shipped_recipe_is_trained_on_by_one_that_names_it(tmp_path: Path) -> None:
    make_store(four := tmp_path / "four", {"64x64": 1}, channels=4)
    make_store(other := tmp_path / "other", {"64x64": 1}, channels=16)
    train = ["train", "pixart-sigma-512", "--store", four, "--run", "runs/pixart-sigma-512"]
    assert after_store(four, "pixart-512") == [["inspect", four], train]
    assert after_store(other, "pixart-512")[1][4:] == [
        "--run",
        "runs/pixart-sigma-512",
        "--set",
        "model.channels=0",
    ], "the store was made with a VAE of other channels than the recipe's"
    assert after_store(four, "demo")[1][:2] == ["train", "demo"]
    assert after_store(four, "imagenet-256")[1][1] == "dit-b-2-256"
    assert after_store(four, "mine.toml") == [["inspect", four], ["recipes"]]
    assert after_run(Path("runs/a"))[0] == ["sample", Path("runs/a"), "--out", "runs/a-samples"]


def test_a_plain_line_is_one_line_and_the_rate_of_a_finished_stage_stays(clock: list[float]) -> None:
    line = ProgressLine(Console(file=(stream := io.StringIO()), width=80))
    line("train", 0, 2)
    clock[0] += 40
    line("train", 1, 2, "a note of many words " * 6)
    line("shards", 0, 2)
    clock[0] += 1
    line("shards", 2, 2)
    clock[0] += 10
    line("shards", 2, 2)
    assert len(stream.getvalue().splitlines()) == 2
    assert line._rate("shards", 2, 2) == pytest.approx(2.0)


def test_a_dry_run_names_the_command_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(next_steps.sys, "argv", ["/bin/leandit", "train", "demo", "--dry-run", "--run", "r"])
    assert next_steps.command_without("--dry-run") == ["train", "demo", "--run", "r"]
