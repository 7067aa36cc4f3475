"""Several processes by one command make the bytes of one process, whoever dies; errors and stops are the same."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forked import fork_interpreters
from harness import start
from making import CAPTION_RECIPE, CPU, caption_recipe, make_caption_folder, no_progress, store_digest

from leandit.datasets.errors import RecipeError, ResourceError, SourceError
from leandit.precompute.engines import processes, supervisor
from leandit.precompute.engines.job import Job
from leandit.precompute.engines.processes import LocalProcess, run_on_devices
from leandit.precompute.pipeline import Report, precompute
from leandit.precompute.planning.compare import Options
from leandit.precompute.sources.source import list_source, open_source
from leandit.tools.cli.options import torch_devices
from leandit.tools.terminal.outcome import change_rows

COMMAND = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it
from leandit.tools.cli.main import main
main()
"""
BROKEN_CHILD = """
from pathlib import Path
from leandit.precompute.encoders.vae import ImageEncoder
from leandit.precompute.engines import child
from leandit.precompute.shards import latent_stream

encode, calls = ImageEncoder.encode, []

def breaks(self, pixels):
    calls.append(1)
    if len(calls) > 1 and not (marker := Path(__file__).with_name("broken")).exists():
        marker.touch()
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return encode(self, pixels)

ImageEncoder.encode = breaks
latent_stream.BATCHES_IN_WORK = 1  # so the first batch of a shard is told of before the second breaks
child.main()
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_caption_folder(tmp_path_factory.mktemp("engines") / "pictures", count=36)


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The tree that one process makes."""
    store = tmp_path_factory.mktemp("whole") / "store"
    precompute(caption_recipe(), source_path=source, store_path=store, device=CPU, progress=no_progress)
    return store_digest(store)


@pytest.fixture
def quick(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of all tests; and the processes are forked with all imports."""
    fork_interpreters(processes, monkeypatch)


def with_processes(
    source: Path,
    store: Path,
    *,
    progress: Callable[[list[LocalProcess], str, int, int], None] = lambda *_: None,
    said: list[str] | None = None,
    count: int = 2,
) -> Report:
    """Precompute with several processes.

    Args:
      progress: called with the processes started so far, the first of which leads, and the progress.
    """
    started: list[LocalProcess] = []

    class Noted(LocalProcess):
        def __init__(self, job: Job) -> None:
            super().__init__(job)
            started.append(self)

    job = Job(caption_recipe(), (str(source),), store, Options())
    say = [].append if said is None else said.append
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "LocalProcess", Noted)
        return run_on_devices(job, ["cpu"] * count, progress=lambda *what: progress(started, *what), say=say)


def kill(some: list[LocalProcess]) -> None:
    for process in some:
        process._process.kill()


def test_two_processes_of_which_one_is_killed_make_the_bytes_of_one_and_list_nothing(
    source: Path, whole: dict[str, bytes], tmp_path: Path, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    hidden, said, seen = source / "metadata.jsonl.away", [], []

    def progress(started: list[LocalProcess], stage: str, done: int, total: int) -> None:
        seen.append((stage, done, total))
        if (stage, done) == ("scan", total):
            (source / "metadata.jsonl").rename(hidden)  # whoever lists the source now finds none
            kill(started[1:])

    try:
        with caplog.at_level("INFO", logger="leandit"):
            report = with_processes(source, tmp_path / "store", progress=progress, said=said)
    finally:
        hidden.rename(source / "metadata.jsonl")
    assert store_digest(tmp_path / "store") == whole
    told = {getattr(record, "place", "") for record in caplog.records if record.name.endswith("encoders.vae")}
    assert told == {"cpu (process 1)", "cpu (process 2)"}  # each loads its own, and tells it here
    (line,) = [line for line in said if "columns:" not in line]
    assert "cpu (process 2) is gone: it was ended by signal 9 (Killed). Another is started" in line
    counts = [(done, total) for stage, done, total in seen if stage == "pictures"]
    assert counts[-1] == (36, 36)
    assert counts == sorted(counts)  # of all that is committed, and never back
    assert report.num_encoded == 36
    assert report.seconds["encode"] > 0
    assert report.tokens.num_captions == 10


def test_where_the_process_that_leads_is_killed_another_one_leads_and_what_it_did_counts(
    source: Path, whole: dict[str, bytes], tmp_path: Path, quick: None
) -> None:
    said: list[str] = []

    def progress(started: list[LocalProcess], stage: str, done: int, total: int) -> None:
        if len(started) == 2 and (stage, done) == ("scan", total):
            kill(started[:1])

    report = with_processes(source, tmp_path / "store", progress=progress, said=said)
    assert store_digest(tmp_path / "store") == whole
    assert any("cpu (process 1) is gone: it was ended by signal 9 (Killed)" in line for line in said)
    assert report.num_encoded == 36


def test_several_processes_let_a_store_grow_as_one_does(tmp_path: Path, quick: None) -> None:
    source = make_caption_folder(tmp_path / "pictures", count=12)
    for store in ("one", "two"):
        precompute(caption_recipe(), source_path=source, store_path=tmp_path / store, device=CPU, progress=no_progress)
    shutil.rmtree(source)
    make_caption_folder(source, count=24)
    one = precompute(
        caption_recipe(), source_path=source, store_path=tmp_path / "one", device=CPU, progress=no_progress
    )
    two = with_processes(source, tmp_path / "two")
    assert store_digest(tmp_path / "two") == store_digest(tmp_path / "one")
    assert one.changes
    assert two.changes
    assert change_rows(two.changes) == change_rows(one.changes)
    assert two.num_encoded == one.num_encoded > 0


def test_of_two_processes_one_may_end_by_an_error_of_its_device(
    source: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    (tmp_path / "broken_child.py").write_text(BROKEN_CHILD)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(processes, "CHILD_MODULE", "broken_child")
    said, seen = [], []
    report = with_processes(source, tmp_path / "store", progress=lambda _, *what: seen.append(what), said=said)
    assert store_digest(tmp_path / "store") == whole
    (line,) = [line for line in said if "columns:" not in line]
    assert "is gone: RuntimeError: CUDA error" in line
    assert re.search(r"it held shard 0 of 'buckets/\d+x\d+'", line)
    counts = [(done, total) for stage, done, total in seen if stage == "pictures"]
    assert counts[-1][0] == counts[-1][1]
    assert all(done <= total for done, total in counts)
    assert report.num_encoded == 36


def test_an_error_of_the_stores_folder_is_that_of_one_process(source: Path, tmp_path: Path, quick: None) -> None:
    store, recipe = tmp_path / "store", caption_recipe()

    def in_the_way(_: object, stage: str, done: int, total: int) -> None:
        if (stage, done) == ("scan", total):
            (store / "buckets/64x64/moments/c/0/0/0/0/in the way").mkdir(parents=True)

    with pytest.raises(IsADirectoryError) as several:
        with_processes(source, store, progress=in_the_way, count=1)
    with pytest.raises(IsADirectoryError) as one:
        precompute(recipe, source_path=source, store_path=store, device=CPU, progress=no_progress)
    assert several.value.filename2 == one.value.filename2
    assert several.value.filename2.startswith(str(store / "buckets/64x64"))
    assert not (store / "leases").exists()


@pytest.mark.slow
def test_where_every_process_dies_the_command_fails_and_the_next_one_goes_on(
    source: Path, whole: dict[str, bytes], tmp_path: Path, quick: None
) -> None:
    with pytest.raises(ResourceError, match=r"signal 9 \(Killed\).*No other is left.*the same command goes on"):
        with_processes(source, tmp_path / "store", progress=lambda started, *_: kill(started))
    precompute(caption_recipe(), source_path=source, store_path=tmp_path / "store", device=CPU, progress=no_progress)
    assert store_digest(tmp_path / "store") == whole


@pytest.mark.slow
def test_a_shard_that_ends_process_after_process_is_named(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    (tmp_path / "broken_child.py").write_text(BROKEN_CHILD.replace("marker.touch()", "pass"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(processes, "CHILD_MODULE", "broken_child")
    monkeypatch.setattr(supervisor, "MAX_LOSSES", 100)
    with pytest.raises(ResourceError, match=r"shard 0 of 'buckets/.*: 5 processes were lost.*RuntimeError: CUDA"):
        with_processes(source, tmp_path / "store")


@pytest.mark.slow
def test_the_share_of_rejects_holds_for_all_processes_together(tmp_path: Path) -> None:
    root = make_caption_folder(tmp_path / "pictures", count=36)
    for number in range(0, 36, 2):  # in every bucket some, in none more than ten
        path = root / f"images/{number}.png"
        path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(SourceError, match=r"1[1-8] of 36 records are rejected, more than source\.max_reject_share"):
        with_processes(root, tmp_path / "store")


def descendants_of(pid: int) -> list[int]:
    lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    children = [int(word) for text in lists for word in text.split()]
    return children + [one for child in children for one in descendants_of(child)]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def started_by(pid: int, store: Path, has_ended: Callable[[], bool]) -> list[int]:
    """Processes that a precompute has started when its plan is there."""
    started: list[int] = []
    while len(started) < 2 or not any(store.glob("revisions/*/plan")):
        assert not has_ended(), "it ended before it was stopped"
        with contextlib.suppress(OSError):
            started = list({*started, *descendants_of(pid)})
        time.sleep(0.01)
    return started


def assert_they_end(started: list[int]) -> None:
    end = time.monotonic() + 30
    while any(map(is_alive, started)):
        assert time.monotonic() < end, "a process outlives its parent"
        time.sleep(0.1)


def test_no_process_outlives_its_parent(source: Path, tmp_path: Path) -> None:
    """Decoders and what encodes; the parent is forked, which costs no imports."""
    store = tmp_path / "store"
    parent = start(lambda: with_processes(source, store, count=1) and None)
    started = started_by(parent.pid, store, lambda: not is_alive(parent.pid))
    parent.signal(signal.SIGKILL)
    assert parent.wait().died
    assert_they_end(started)


@pytest.mark.parametrize("seconds", [0.0, 0.7])
def test_a_process_whose_parent_is_gone_while_it_loads_ends_at_once_and_says_nothing(seconds: float) -> None:
    ours, its = socket.socketpair()
    with ours, its:
        command = [sys.executable, "-m", processes.CHILD_MODULE, str(its.fileno())]
        child = subprocess.Popen(command, pass_fds=[its.fileno()], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        time.sleep(seconds)
        _, said = child.communicate(timeout=30)  # closes stdin first, as the end of the parent would
    # By the signal itself: one that has loaded its encoders would unwind.
    assert (child.returncode, said) == (-signal.SIGTERM, b"")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_no_process_outlives_the_command(number: int, code: int, source: Path, tmp_path: Path) -> None:
    settings = [word for override in CAPTION_RECIPE for word in ("--set", override)]
    store = ["--source", str(source), "--store", str(tmp_path / "store"), "--device", "cpu,cpu"]
    command = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "precompute", "demo", *store, *settings], stderr=subprocess.PIPE, text=True
    )
    started = started_by(command.pid, tmp_path / "store", lambda: command.poll() is not None)
    command.send_signal(number)
    command.communicate(timeout=60)
    assert command.returncode == code
    assert_they_end(started)


def test_a_source_that_is_opened_reads_what_one_that_is_listed_reads(source: Path) -> None:
    listed = list_source(source)
    opened = open_source(source, listed.kind)
    for record in listed.records:
        place = record.path, record.offset, record.num_bytes
        assert opened.place(*place, stage="decode") == listed.place(*place, stage="decode")


def test_devices_are_named_with_commas_and_of_one_kind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert [str(device) for device in torch_devices("cpu, cpu")] == ["cpu", "cpu"]
    with pytest.raises(RecipeError, match="of one kind"):
        run_on_devices(
            Job(caption_recipe(), ("",), tmp_path, Options()), ["cuda:0", "cpu"], progress=no_progress, say=print
        )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    for name in ("auto", "cuda"):
        assert [str(device) for device in torch_devices(name)] == ["cuda:0", "cuda:1", "cuda:2"]
    assert [str(device) for device in torch_devices("cuda:1")] == ["cuda:1"]
    assert [str(device) for device in torch_devices("cuda:2,cuda:0")] == ["cuda:2", "cuda:0"]
    with pytest.raises(RecipeError, match="sees 3 GPUs"):
        torch_devices("cuda:0,cuda:3")
