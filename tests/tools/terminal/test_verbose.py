"""What modules log to "leandit": shown by --verbose, silent without, and passed on from other processes."""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
from collections.abc import Iterator

import pytest

from leandit.precompute.engines.told import level_told, tell, told_to
from leandit.tools.terminal.text import show_decisions

LOG = logging.getLogger("leandit.somewhere.inside")


@pytest.fixture(autouse=True)
def nothing_shown() -> Iterator[None]:
    yield
    show_decisions(False)


def test_decisions_are_shown_once_with_seconds_rank_and_module(
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


def test_what_another_process_logs_is_shown_here_with_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    sent: list[bytes] = []
    show_decisions(True)
    level = level_told()
    show_decisions(False)
    with told_to(lambda message: sent.append(pickle.dumps(message)), level):
        LOG.info("%d decoders", 3)
        LOG.debug("noise")
    LOG.info("after its end")
    assert level_told() > logging.INFO
    with told_to(lambda message: sent.append(pickle.dumps(message)), level_told()):
        LOG.info("nobody listens")
    (record,) = map(pickle.loads, sent)
    tell(record, "cuda:1 (process 2)")
    assert capsys.readouterr().err == ""
    show_decisions(True)
    tell(record, "cuda:1 (process 2)")
    assert " s cuda:1 (process 2) somewhere.inside] 3 decoders\n" in capsys.readouterr().err


def test_a_process_whose_reader_is_gone_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    def gone(message: object) -> None:
        raise ConnectionError

    with told_to(gone, logging.INFO):
        LOG.info("into the void")
    assert capsys.readouterr().err == ""
