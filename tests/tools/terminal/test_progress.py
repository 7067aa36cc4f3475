"""The progress line: rate, time left and rejects, on a terminal and elsewhere; what to run next."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

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


def test_the_train_recipe_that_is_named_next_fits_the_store(tmp_path: Path) -> None:
    def named(recipe: str, text: bool = False, **store: Any) -> list[str]:
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        make_store(path, {"64x64": 1}, token_counts=[3] if text else [], **store)
        look, train = after_store(path, recipe)
        assert look == ["inspect", path]
        assert train == ["recipes"] or train[2:6] == ["--store", path, "--run", f"runs/{train[1]}"]
        return [str(word) for word in (*train[:2], *train[6:])]

    assert named("pixart-512", text=True) == ["train", "pixart-sigma-512"]
    another_vae = ["train", "pixart-sigma-512", "--set", "model.channels=0"]
    assert named("pixart-512", text=True, channels=16) == another_vae
    assert named("demo", text=True) == ["train", "demo"]
    assert named("imagenet-256") == ["train", "dit-b-2-256"]
    assert named("imagenet-256", channels=32, resolution_px=256) == ["train", "lightningdit-xl-1-256"]
    assert named("imagenet-256", channels=16) == ["train", "dit-b-2-256", "--set", "model.channels=0"]
    assert named("pixart-512", resolution_px=512) == ["train", "dit-xl-2-512"], "there are classes, no captions"
    assert named("imagenet-256", num_classes=0, text=True, resolution_px=256) == ["train", "pixart-sigma-256"]
    assert named("mine.toml", resolution_px=64) == ["recipes"]
    assert named("mine.toml", resolution_px=256) == ["train", "dit-b-2-256"]
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
