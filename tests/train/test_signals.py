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
from making import CPU, TRAIN_RECIPE, Leandit, train_recipe
from runs import bits, read_all

from leandit.datasets.disk.strays import find_strays
from leandit.datasets.store import LatentStore
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
    process = ForkedPython(command, **how) if forked else subprocess.Popen([sys.executable, *command], text=True, **how)
    assert process.stdout.readline() == "main\n"
    return process


def train_here(store: Path, run: Path, stop: StopRequest | None = None, *overrides: str) -> loop.Outcome:
    """The same command in this process."""
    recipe, stop = train_recipe("dit-s-4", *SETTINGS, *overrides), StopRequest() if stop is None else stop
    return train(recipe, store_path=store, run=run, device=CPU, stop=stop, report=lambda _: None)


class Undisturbed(NamedTuple):
    """An uninterrupted run: what it leaves, and its seconds from ``main()`` on, and from first to last checkpoint.

    What follows the last checkpoint takes longer than the steps of a model this small, so it is not part of them.
    """

    saved: dict[str, bytes]
    seconds: float
    stepping_seconds: float


def undisturbed_run(store: Path, run: Path, *, forked: bool) -> Undisturbed:
    process = begin_training(store, run, forked=forked)
    begun = time.monotonic()
    wait_for_a_checkpoint(run, process)
    first_checkpoint = time.monotonic()
    wait_for_a_checkpoint(run, process, step=STEPS)
    last_checkpoint = time.monotonic()
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return Undisturbed(
        saved=bits(run, STEPS),
        seconds=time.monotonic() - begun,
        stepping_seconds=last_checkpoint - first_checkpoint,
    )


def wait_for_a_checkpoint(run: Path, process: subprocess.Popen[str], step: int | None = None) -> None:
    """Return when the checkpoint of ``step``, or any, is written, or the process has ended."""
    while process.poll() is None:
        found = checkpoint.find("checkpoint", run)
        if found and step in (None, int(found[-1].name.partition("-")[2])):
            return
        time.sleep(0.005)


def check_moments(count: int, store: Path, undisturbed: Undisturbed, root: Path) -> dict[str, int]:
    """Send SIGTERM, or SIGINT, at random moments, in turn of all of a command's time and of that of its steps.

    Half of the commands get a second one right after. Only those stopped at their start have their imports before it.

    Returns: how often the run was stopped before its first checkpoint, after it, or not at all.
    """
    draw, met = random.Random(11), {"startup": 0, "stepping": 0, "finished": 0}
    for number in range(count):
        run = root / f"run-{number}"
        process = begin_training(store, run, forked=number % 2 == 1)
        if number % 2:
            wait_for_a_checkpoint(run, process)
        share = (number + draw.random()) / count
        delay = share * (undisturbed.stepping_seconds if number % 2 else undisturbed.seconds)
        time.sleep(delay)
        signal_sent, code = (signal.SIGINT, 130) if number % 4 == 1 else (signal.SIGTERM, EXIT_RESUMABLE)
        process.send_signal(signal_sent)
        if draw.random() < 0.5:
            time.sleep(draw.random() / 20)
            process.send_signal(signal_sent)
        out, err = process.communicate(timeout=240)
        said = f"number {number}, after {delay:.2f} of {undisturbed[1:]} s: {process.returncode}\n{out}{err}"
        # What is raised in a finalizer is dropped by Python, with a note of its own.
        assert "Traceback" not in err or "Exception ignored in" in err, said
        found, finished = checkpoint.find("checkpoint", run), (run / f"checkpoint-{STEPS}").is_dir()
        assert process.returncode in ((0, code) if finished else (code,)), said
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
def test_sigterm_at_any_moment_costs_no_bit(count: int, label_store: LatentStore, tmp_path: Path) -> None:
    undisturbed = undisturbed_run(label_store.path, tmp_path / "undisturbed", forked=count == 2)
    met = check_moments(count, label_store.path, undisturbed, tmp_path)
    assert count == 2 or min(met["startup"], met["stepping"]) > 5, met


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

    def killing(final: Path, files: Any) -> Iterator[Any]:
        for number, file in enumerate(files):
            for _ in range(3 if (final.name, number) == ("checkpoint-4", 1) else 0):
                kill_self()
            yield file

    monkeypatch.setattr(checkpoint, "write_folder", lambda to, of, **how: write_folder(to, killing(to, of), **how))
    outcome = train_here(label_store.path, tmp_path / "run", stop, "run.async_checkpoint=false")
    # Looked at once a step: the signal came after step 4 had been looked at, so step 5 is done and saved as well.
    assert (outcome.step, outcome.finished, stop.is_terminated) == (5, False, True)
    assert [path.name for path in checkpoint.find("checkpoint", tmp_path / "run")] == ["checkpoint-4", "checkpoint-5"]
    read_all(tmp_path / "run/checkpoint-4")


def test_the_newest_snapshot_of_a_stop_stays(
    label_store: LatentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, make_step = tmp_path / "run", loop.train_step
    every = ["run.steps=14", "run.checkpoint_every=5", "ema.kind=power", "run.keep_checkpoints=1"]

    def kept_at(stop_step: int) -> list[int]:
        """Steps of the snapshots, once the run was stopped at one."""
        stop = StopRequest()
        stop.catch(signal.SIGTERM)

        def step_while_killed(trained: Run, batch: Any) -> Any:
            if trained.step == stop_step - 1:
                kill_self()
            return make_step(trained, batch)

        with monkeypatch.context() as patch:
            patch.setattr(loop, "train_step", step_while_killed)
            train_here(label_store.path, run, stop, *every)
        kinds = [
            [int(path.name.rpartition("-")[2]) for path in checkpoint.find(k, run)] for k in ("snapshot", "average")
        ]
        assert kinds[0] == kinds[1]
        return kinds[0]

    assert [kept_at(step) for step in (2, 4, 7)] == [[2], [4], [5, 7]]
    assert [kept_at(step) for step in (10, 12)] == [[5, 7, 10], [5, 10, 12]]  # 10 is a step of the recipe
    assert kept_at(14) == [5, 10, 12, 14]


BEGINNING = {"open_stores": opening, "train_step": loop}


@pytest.mark.parametrize("place", BEGINNING)
def test_sigterm_before_a_step_stops(
    place: str, label_store: LatentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, work = StopRequest(), getattr(BEGINNING[place], place)
    stop.catch(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(BEGINNING[place], place, lambda *args, **how: (work(*args, **how), kill_self())[0])
        with pytest.raises(Terminated):
            train_here(label_store.path, tmp_path / "run", stop)
    assert checkpoint.find("checkpoint", tmp_path / "run") == []
    assert train_here(label_store.path, tmp_path / "run").first_step == 1


def test_a_signal_that_an_import_turns_into_another_error_still_ends_with_75(
    leandit: Leandit, monkeypatch: pytest.MonkeyPatch
) -> None:
    def turn(*_args: object, **_kwargs: object) -> None:
        try:
            kill_self()
        except Terminated:
            raise ImportError("numpy.core.multiarray failed to import") from None

    monkeypatch.setattr("leandit.precompute.pipeline.precompute", turn)
    ended = leandit("precompute", "demo", "--source", ".", "--store", "s")
    assert (ended.code, "terminated" in ended.err) == (EXIT_RESUMABLE, True)


def test_a_second_sigterm_while_the_first_is_carried_out_ends_at_once_with_75() -> None:
    def work() -> None:
        StopRequest().catch(signal.SIGTERM)
        try:
            kill_self()
        except Terminated:
            kill_self()

    child = start(work)
    assert child.wait().code == EXIT_RESUMABLE


def test_a_rank_that_stops_because_another_was_terminated_ends_as_that_one() -> None:
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 75), (None, 75)):
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
