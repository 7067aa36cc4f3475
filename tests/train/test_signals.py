"""SIGTERM at any moment of a command: it ends with 75, what it leaves can be gone on with, and not a bit is lost."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from faults import start
from forked import ForkedPython, run_forked
from making import CPU, TRAIN_RECIPE, train_recipe
from runs import bits, read_all

from leandit.datasets.disk.strays import find_strays
from leandit.datasets.store import LatentStore
from leandit.tools.cli.main import main
from leandit.train import loop
from leandit.train.loop import train
from leandit.train.parallel.stop import EXIT_RESUMABLE, StopRequest, Terminated
from leandit.train.run import opening
from leandit.train.run.state import Run
from leandit.train.weights import checkpoint

pytestmark = pytest.mark.usefixtures("tiny_models")

STEPS = 20
SETTINGS = [
    *("model.name=DiT-S/4", "model.num_classes=0", "run.compile=false", *TRAIN_RECIPE),
    *(f"run.steps={STEPS}", "run.checkpoint_every=2", "run.keep_checkpoints=2", "schedule.kind=constant"),
]
# The model is made small inside of main(), since that imports torch: half of the start shall be open to signals.
TINY_LEANDIT = """
from leandit.tools.cli.main import main
from leandit.train import config
load = config.load
def load_tiny(*args):
    from leandit.train.models.dit import SIZES
    SIZES["S"] = (2, 32, 2)
    return load(*args)
config.load = load_tiny
from leandit.train.parallel.stop import StopRequest
catch = StopRequest.catch
def catch_and_say(stop, number):
    catch(stop, number)
    StopRequest.catch = catch
    print("main", flush=True)
StopRequest.catch = catch_and_say
main()
"""


def begin_training(store: Path, run: Path, *, forked: bool) -> subprocess.Popen[str]:
    """Start the command in a process of its own; returns when its ``main()`` has begun, and catches SIGTERM.

    Args:
      forked: it has imported everything; otherwise most of its start are imports.
    """
    settings = [word for override in SETTINGS for word in ("--set", override)]
    command = ["-c", TINY_LEANDIT, "train", "dit-s-2-256", "--store", str(store), "--run", str(run), *settings]
    how: Any = {"env": os.environ | {"OMP_NUM_THREADS": "1"}, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if forked:
        process: subprocess.Popen[str] = ForkedPython(command, **how)
    else:
        process = subprocess.Popen([sys.executable, *command], text=True, **how)
    assert process.stdout is not None
    assert process.stdout.readline() == "main\n"
    return process


def train_here(store: Path, run: Path, stop: StopRequest | None = None, *overrides: str) -> loop.Outcome:
    """The same command in this process."""
    recipe, stop = train_recipe("dit-s-4", *SETTINGS, *overrides), StopRequest() if stop is None else stop
    return train(recipe, store_path=store, run=run, device=CPU, stop=stop, report=lambda _: None)


class Undisturbed(NamedTuple):
    """An uninterrupted run: what it leaves, and its seconds from ``main()`` on, and from its first checkpoint on."""

    saved: dict[str, bytes]
    seconds: float
    stepping_seconds: float


def undisturbed_run(store: Path, run: Path, *, forked: bool) -> Undisturbed:
    process = begin_training(store, run, forked=forked)
    begun = time.monotonic()
    wait_for_a_checkpoint(run, process)
    stepping = time.monotonic()
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    ended = time.monotonic()
    return Undisturbed(bits(run, STEPS), ended - begun, ended - stepping)


def wait_for_a_checkpoint(run: Path, process: subprocess.Popen[str]) -> None:
    while not checkpoint.find("checkpoint", run) and process.poll() is None:
        time.sleep(0.005)


def check_moments(count: int, store: Path, undisturbed: Undisturbed, root: Path, *, forked: bool) -> dict[str, int]:
    """Send SIGTERM at random moments, in turn of all of the command's time and of that after its first checkpoint.

    Half of the commands get a second one right after.

    Args:
      forked: only a command that is stopped at its start is an interpreter, which has its imports before it.
    Returns: how often the run was stopped before its first checkpoint, after it, or not at all.
    """
    draw, met = random.Random(11), {"startup": 0, "stepping": 0, "finished": 0}
    for number in range(count):
        run = root / f"run-{number}"
        process = begin_training(store, run, forked=forked and number % 2 == 1)
        if number % 2:
            wait_for_a_checkpoint(run, process)
        share = (number + draw.random()) / count
        delay = share * (undisturbed.stepping_seconds if number % 2 else undisturbed.seconds)
        time.sleep(delay)
        process.send_signal(signal.SIGTERM)
        if draw.random() < 0.5:
            time.sleep(draw.random() / 20)
            process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=240)
        said = f"number {number}, after {delay:.2f} of {undisturbed[1:]} s: {process.returncode}\n{out}{err}"
        assert process.returncode in (0, EXIT_RESUMABLE), said
        # What is raised in a finalizer is dropped by Python, with a note of its own.
        assert "Traceback" not in err or "Exception ignored in" in err, said
        found = checkpoint.find("checkpoint", run)
        finished = (run / f"checkpoint-{STEPS}").is_dir()
        assert process.returncode == EXIT_RESUMABLE or finished, said
        met["finished" if finished else "stepping" if found else "startup"] += 1
        for path in found:
            read_all(path)
        outcome = train_here(store, run)
        assert outcome.finished, said
        if found:
            reached = int(found[-1].name.partition("-")[2])
            assert outcome.first_step == (None if finished else reached + 1), said
        assert bits(run, STEPS) == undisturbed.saved, said
        assert find_strays(run) == [], said
        shutil.rmtree(run)
    return met


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_sigterm_at_any_moment_ends_with_75_and_costs_no_bit(
    count: int, label_store: LatentStore, tmp_path: Path
) -> None:
    forked = count == 2
    undisturbed = undisturbed_run(label_store.path, tmp_path / "undisturbed", forked=forked)
    met = check_moments(count, label_store.path, undisturbed, tmp_path, forked=forked)
    assert forked or min(met["startup"], met["stepping"]) > 5, met


@pytest.mark.parametrize("held", [False, True])
def test_a_signal_during_an_import_ends_the_process_unless_there_is_a_step_to_save(held: bool, tmp_path: Path) -> None:
    (tmp_path / "killed_amid.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n")
    script = f"""
import signal, sys
from leandit.train.parallel.stop import StopRequest
stop = StopRequest()
stop.catch(signal.SIGTERM)
if {held}:
    stop.hold()
sys.path.insert(0, {str(tmp_path)!r})
try:
    import killed_amid
finally:
    print(bool(stop), stop.is_terminated)
"""
    ended = run_forked(["-c", script])
    if held:
        assert (ended.returncode, ended.stdout) == (0, "True True\n")
    else:
        assert (ended.returncode, ended.stdout) == (EXIT_RESUMABLE, "")
        assert ended.stderr == "leandit: terminated; run the same command again to resume\n"


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_while_a_checkpoint_is_written_lets_it_finish_and_makes_one_of_the_step(
    label_store: LatentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, write_folder = StopRequest(), checkpoint.write_folder
    stop.catch(signal.SIGTERM)

    def write_while_killed(final: Path, files: Any, *, replace: bool) -> bool:
        def killing() -> Iterator[Any]:
            for number, file in enumerate(files):
                if final.name == "checkpoint-4" and number == 1:
                    for _ in range(3):
                        kill_self()
                yield file

        return write_folder(final, killing(), replace=replace)

    monkeypatch.setattr(checkpoint, "write_folder", write_while_killed)
    outcome = train_here(label_store.path, tmp_path / "run", stop, "run.async_checkpoint=false")
    # Looked at once a step: the signal came after step 4 had been looked at, so step 5 is done and saved as well.
    assert (outcome.step, outcome.finished, stop.is_terminated) == (5, False, True)
    assert [path.name for path in checkpoint.find("checkpoint", tmp_path / "run")] == ["checkpoint-4", "checkpoint-5"]
    read_all(tmp_path / "run/checkpoint-4")


def test_of_the_snapshots_of_stops_the_newest_stays(
    label_store: LatentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, make_step = tmp_path / "run", loop.train_step
    every = ["run.steps=20", "run.checkpoint_every=5", "ema.kind=power", "run.keep_checkpoints=1"]

    def stopped_at(step: int) -> list[str]:
        stop = StopRequest()
        stop.catch(signal.SIGTERM)

        def step_while_killed(trained: Run, batch: Any) -> Any:
            if trained.step == step - 1:
                kill_self()
            return make_step(trained, batch)

        with monkeypatch.context() as patch:
            patch.setattr(loop, "train_step", step_while_killed)
            train_here(label_store.path, run, stop, *every)
        kept = [path.name.rpartition("-")[2] for path in checkpoint.find("snapshot", run)]
        assert [path.name.rpartition("-")[2] for path in checkpoint.find("average", run)] == kept
        return kept

    assert stopped_at(2) == ["2"]
    assert stopped_at(4) == ["4"]
    assert stopped_at(7) == ["5", "7"]
    assert stopped_at(9) == ["5", "9"]
    assert stopped_at(15) == ["5", "9", "10", "15"]  # 15 is a step of the recipe
    assert stopped_at(17) == ["5", "10", "15", "17"]
    assert train_here(label_store.path, run, None, *every).finished
    assert [path.name for path in checkpoint.find("snapshot", run)] == [f"snapshot-{n}" for n in (5, 10, 15, 17, 20)]


BEGINNING = {"open_stores": opening, "start_or_resume": opening, "Log": loop, "train_step": loop}


@pytest.mark.parametrize("place", BEGINNING)
def test_sigterm_before_there_is_a_step_stops_at_once(
    place: str, label_store: LatentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, work = StopRequest(), getattr(BEGINNING[place], place)
    stop.catch(signal.SIGTERM)

    def killed(*args: Any, **kwargs: Any) -> Any:
        done = work(*args, **kwargs)
        kill_self()
        return done

    with monkeypatch.context() as patch:
        patch.setattr(BEGINNING[place], place, killed)
        with pytest.raises(Terminated):
            train_here(label_store.path, tmp_path / "run", stop)
    assert checkpoint.find("checkpoint", tmp_path / "run") == []
    assert train_here(label_store.path, tmp_path / "run").first_step == 1


def test_a_signal_that_an_import_turns_into_another_error_still_ends_with_75(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def turn(*_args: object, **_kwargs: object) -> None:
        try:
            kill_self()
        except Terminated:
            raise ImportError("numpy.core.multiarray failed to import") from None

    monkeypatch.setattr("leandit.precompute.pipeline.precompute", turn)
    monkeypatch.setattr(sys, "argv", ["leandit", "precompute", "demo", "--source", ".", "--store", str(tmp_path / "s")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == EXIT_RESUMABLE
    assert "terminated" in capsys.readouterr().err


def test_a_second_sigterm_while_the_first_is_carried_out_ends_at_once_with_75() -> None:
    def work() -> None:
        StopRequest().catch(signal.SIGTERM)
        try:
            kill_self()
        except Terminated:
            kill_self()

    child = start(work)
    assert child.wait().code == EXIT_RESUMABLE


def test_a_signal_after_the_end_changes_no_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["leandit", "--version"])
    with pytest.raises(SystemExit) as ended:
        main()
    kill_self()
    assert not ended.value.code


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (None, 75)])
def test_a_rank_that_stops_because_another_was_terminated_ends_as_that_one(number: int | None, code: int) -> None:
    stop = StopRequest()
    stop.hold()
    if number:
        stop.catch(number)
        os.kill(os.getpid(), number)
    assert stop.exit_code == code


@pytest.mark.parametrize(("first", "asked"), [(signal.SIGINT, False), (signal.SIGTERM, True)])
def test_a_second_ctrl_c_does_not_wait_for_the_step(first: int, asked: bool) -> None:
    stop = StopRequest()
    for number in (signal.SIGTERM, signal.SIGINT):
        stop.catch(number)
    stop.hold()
    os.kill(os.getpid(), first)
    assert stop
    assert stop.is_terminated == asked
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    kill_self()  # waits, whatever came before
    stop.release()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
