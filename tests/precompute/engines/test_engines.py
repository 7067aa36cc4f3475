"""Several processes by one command make the bytes of one process, whoever dies; errors and stops are the same."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from faults import descendants_of, gone_within
from forked import fork_interpreters
from making import CAPTION_RECIPE, caption_recipe, encode, make_caption_folder, store_digest

from leandit.errors import RecipeError, ResourceError, SourceError
from leandit.precompute.engines import devices
from leandit.precompute.engines.devices import LocalProcess, run_on_devices
from leandit.tools.cli.options import torch_devices

MAIN = "leandit.tools.cli.main"
SETTINGS = [word for override in CAPTION_RECIPE for word in ("--set", override)]
COMMAND = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it
from leandit.tools.cli.main import main
main()
"""
BROKEN_MAIN = """
from pathlib import Path
from leandit.precompute.encoders.vae import ImageEncoder
from leandit.tools.cli.main import main

encode, calls = ImageEncoder.encode, []

def breaks(self, pixels):
    calls.append(1)
    if len(calls) > 1 and not (marker := Path(__file__).with_name("broken")).exists():
        marker.touch()
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return encode(self, pixels)

ImageEncoder.encode = breaks
main()
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_caption_folder(tmp_path_factory.mktemp("engines") / "images", count=36)


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The tree that one process makes."""
    store = tmp_path_factory.mktemp("whole") / "store"
    encode(caption_recipe(), source, store)
    return store_digest(store)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes are forked with all imports."""
    fork_interpreters(devices, monkeypatch)


def with_processes(
    source: Path,
    store: Path,
    *,
    module: str = MAIN,
    check: Callable[[list[LocalProcess]], None] = lambda started: None,
    said: list[str] | None = None,
) -> dict[str, str]:
    """Precompute with several processes.

    Args:
      check: called often, with the processes started so far.
    """
    started: list[LocalProcess] = []

    class Noted(LocalProcess):
        def __init__(self, *how: object) -> None:
            super().__init__(*how)
            started.append(self)

    def words_of(device: str) -> list[str]:
        where = ["--source", str(source), "--store", str(store), "--device", device]
        return [module, "precompute", "demo", *where, *SETTINGS]

    say = [].append if said is None else said.append
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "LocalProcess", Noted)
        patch.setattr(devices, "WAIT_SECONDS", 0.05)
        how = {"num_threads": torch.get_num_threads(), "say": say, "check": lambda: check(started)}
        return run_on_devices(words_of, ["cpu"] * 2, store=store, **how)


def test_two_processes_of_which_one_is_killed_make_the_bytes_of_one(
    source: Path, whole: dict[str, bytes], tmp_path: Path, forked: None
) -> None:
    said: list[str] = []

    def check(started: list[LocalProcess]) -> None:
        if len(started) == 2 and (tmp_path / "store").is_dir():  # later it may have ended already
            started[0]._process.kill()

    outputs = with_processes(source, tmp_path / "store", check=check, said=said)
    assert store_digest(tmp_path / "store") == whole
    assert any("died: it was killed by signal 9 (Killed). Restarting it" in line for line in said)
    assert sum("columns:" in line for line in said) <= 2  # whoever lists
    assert any("36 planned" in output for output in outputs.values())


def test_of_two_processes_one_may_end_by_an_error_of_its_device(
    source: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked: None
) -> None:
    (tmp_path / "broken_main.py").write_text(BROKEN_MAIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    said: list[str] = []
    with_processes(source, tmp_path / "store", module="broken_main", said=said)
    assert store_digest(tmp_path / "store") == whole
    assert sum("died: unexpected RuntimeError: CUDA error" in line for line in said) == 1


def test_where_every_process_dies_the_command_fails(source: Path, tmp_path: Path, forked: None) -> None:
    def check(started: list[LocalProcess]) -> None:
        for process in started:
            process._process.kill()

    with pytest.raises(ResourceError, match=r"signal 9 \(Killed\).*None is left.*the same command resumes"):
        with_processes(source, tmp_path / "store", check=check)


def test_the_share_of_rejects_holds_for_all_processes_together(tmp_path: Path, forked: None) -> None:
    root = make_caption_folder(tmp_path / "images", count=36)
    for number in range(0, 36, 2):  # in every bucket some, in none more than ten
        path = root / f"images/{number}.png"
        path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(SourceError, match=r"^1[1-8] of 36 records are rejected, more than source\.max_reject_share"):
        with_processes(root, tmp_path / "store")


SCRIPTED = """
import sys, time
device, begun = sys.argv[1], sys.argv[2]
print("begun", device, file=sys.stderr, flush=True)
code = {"1": 9, "2": int(sys.argv[3])}.get(begun)
if code is None:
    time.sleep(300)
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("code", "error"),
    [(SourceError.exit_code, SourceError), (9, KeyboardInterrupt)],
    ids=["another process ends by the user's error", "the command is interrupted while both are started again"],
)
def test_no_process_that_is_started_again_outlives_the_command(
    code: int, error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked: None
) -> None:
    (tmp_path / "scripted.py").write_text(SCRIPTED)
    monkeypatch.syspath_prepend(str(tmp_path))
    started, begun = list[LocalProcess](), itertools.count(1)

    class Noted(LocalProcess):
        def __init__(self, *how: object) -> None:
            super().__init__(*how)
            started.append(self)

    def words_of(device: str) -> list[str]:
        number = next(begun)
        if number > 2:
            time.sleep(0.2)  # the command stops meanwhile
        return ["scripted", device, str(number), str(code)]

    def check() -> None:
        """Wait until both have ended, so that both are handled together; then interrupt."""
        first = started[:2]
        if len(started) > 2 or (code == 9 and next(checks) > 0):
            raise KeyboardInterrupt
        while len(first) < 2 or any(process._process.poll() is None for process in first):
            time.sleep(0.01)
            first = started[:2]
        time.sleep(0.2)  # their threads have seen it too

    checks = itertools.count()
    monkeypatch.setattr(devices, "LocalProcess", Noted)
    monkeypatch.setattr(devices, "WAIT_SECONDS", 0.01)
    store, threads = tmp_path / "store", torch.get_num_threads()
    with pytest.raises(error):
        run_on_devices(words_of, ["cpu"] * 2, store=store, num_threads=threads, say=lambda line: None, check=check)
    assert len(started) >= 2
    assert all(process._process.poll() is not None for process in started)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_no_process_outlives_the_command(number: int, code: int, source: Path, tmp_path: Path) -> None:
    store, started = tmp_path / "store", set[int]()
    words = ["precompute", "demo", "--source", str(source), "--store", str(store), "--device", "cpu,cpu", *SETTINGS]
    command = subprocess.Popen([sys.executable, "-c", COMMAND, *words], stderr=subprocess.PIPE, text=True)
    while len(started) < 2 or not any(store.glob("revisions/*/plan")):
        assert command.poll() is None, "it ended before it was stopped"
        started |= {*descendants_of(command.pid)}
        time.sleep(0.01)
    command.send_signal(number)
    command.communicate(timeout=240)
    assert command.returncode == code
    assert all(gone_within(pid, 120) for pid in started), "a process outlives its parent"


def test_devices_are_named_with_commas_and_of_one_kind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert [str(device) for device in torch_devices("cpu, cpu")] == ["cpu", "cpu"]
    with pytest.raises(RecipeError, match="of one kind"):
        run_on_devices(lambda device: [], ["cuda:0", "cpu"], store=tmp_path, num_threads=1, say=print)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    for name in ("auto", "cuda"):
        assert [str(device) for device in torch_devices(name)] == ["cuda:0", "cuda:1", "cuda:2"]
    assert [str(device) for device in torch_devices("cuda:2,cuda:0")] == ["cuda:2", "cuda:0"]
    with pytest.raises(RecipeError, match="sees 3 GPUs"):
        torch_devices("cuda:0,cuda:3")
