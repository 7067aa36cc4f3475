"""What a terminal shows: progress, what to run next, and what modules log to "leandit"."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from leandit.precompute.run.clock import REJECTED
from leandit.tools.terminal import outcome, progress
from leandit.tools.terminal.outcome import after_store, command_without, print_next, sample_with
from leandit.tools.terminal.progress import ProgressLine
from leandit.tools.terminal.text import print_result, show_decisions


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds; only the test moves them."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_elsewhere_a_plain_line_has_rate_rejects_and_the_time_left(clock: list[float]) -> None:
    with ProgressLine(Console(file=(stream := io.StringIO()), width=80)) as line:
        line("images", 0, 12_000)
        clock[0] += 40
        line(REJECTED, 3, 0)
        line("images", 80, 12_000)
        clock[0] += 5
        line("images", 90, 12_000)  # too soon for another line
        line("images", 12_000, 12_000)
        clock[0] += 15
        line("images", 12_000, 12_000)  # it has ended
        line("scan", 8, 16)
        clock[0] += 0.1
        line("scan", 16, 16)  # too short for a rate
        line("train", 2, 4)
        clock[0] += 40
        line("train", 3, 4, "a note of many words " * 6 + "[b]")
    assert stream.getvalue().splitlines() == [
        "images: 80 of 12,000  2.0/s, 3 rejected, 1 h 39 min left",
        "images: 12,000 of 12,000  266.7/s, 3 rejected",
        "scan: 16 of 16  3 rejected",
        "train: 3 of 4  " + "a note of many words " * 6 + "[b], 3 rejected, 40.0 s left",
    ]


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
    monkeypatch.setattr(outcome.sys, "argv", ["/bin/leandit", "train", "demo", "--dry-run", "--run", "r"])
    assert command_without("--dry-run") == ["train", "demo", "--run", "r"]


def test_json_has_no_literal_that_only_python_reads(capsys: pytest.CaptureFixture[str]) -> None:
    print_result({"loss": [1.5, float("nan")], "most": {"norm": float("-inf")}, "mfu": None}, str, as_json=True)
    found = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert found == {"loss": [1.5, None], "most": {"norm": None}, "mfu": None}


def test_the_next_recipe_is_that_of_the_precompute_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    look = ["inspect", Path("s")]
    train = ["train", "pixart-sigma-512", "--store", Path("s"), "--run", "runs/pixart-sigma-512"]
    assert after_store(Path("s"), "pixart-512") == [look, train]
    assert after_store(Path("s"), "gone.toml") == after_store(Path("s")) == [look, ["recipes"]]
    Path("mine.toml").write_text('[about]\ntrains = ["./own.toml"]\n')
    assert after_store(Path("s"), "mine.toml")[1][1::4] == ["./own.toml", "runs/own"]
    assert sample_with(Path("runs/a")) == ["sample", Path("runs/a"), "--out", "runs/a-samples"]


# Decisions: shown by --verbose, silent without, and passed on from other processes

LOG = logging.getLogger("leandit.somewhere.inside")


@pytest.fixture(autouse=True)
def nothing_shown() -> Iterator[None]:
    yield
    show_decisions(False)


def test_decisions_have_seconds_rank_and_module(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    show_decisions(True)
    show_decisions(True)
    LOG.info("two decoders for '%s'", "a\x1b[1m")
    LOG.debug("noise")
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("leandit: [0.")
    assert said.err.endswith(" s somewhere.inside] two decoders for 'a\\x1b[1m'\n")
    assert said.err.count("\n") == 1
    show_decisions(False)
    LOG.warning("no longer")
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "2")
    show_decisions(True)
    LOG.info("here")
    assert " s rank 2 somewhere.inside] here" in capsys.readouterr().err


@pytest.mark.parametrize(("settings", "heard"), [("", False), ("logging.basicConfig(); ", True)])
def test_the_library_prints_nothing_by_itself(settings: str, heard: bool) -> None:
    code = f"import logging, leandit; {settings}logging.getLogger('leandit.x').warning('heard')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ("heard" in ended.stderr, bool(ended.stderr)) == (heard, heard)
