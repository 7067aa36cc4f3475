"""Decoding in children: an image costs a child at worst, never the run, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest
from faults import gone_within
from image_files import encoded, exif, noise
from making import SUPPORT, encode, label_recipe, make_class_folder, no_free_files

from leandit.datasets.format.schema import Manifest
from leandit.datasets.format.table_schemas import REJECT_REASONS
from leandit.errors import RecordRejected, ResourceError
from leandit.precompute import pipeline
from leandit.precompute.images import faults
from leandit.precompute.images.decoders import Decoded, Decoders, ImagePlace
from leandit.precompute.images.pixels import read_size

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="looks at processes through /proc")

STUB = "decoder_stub"
BUCKET = (32, 48)


@pytest.fixture(scope="module")
def shared() -> Iterator[Decoders]:
    """Two children that misbehave when asked to."""
    with Decoders(2, timeout_seconds=5, _child_module=STUB) as decoders:
        yield decoders


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    """A good image."""
    path = tmp_path / "photo.png"
    path.write_bytes(encoded(noise(40, 60), "PNG", exif=exif(6)))
    return path


def named(folder: Path, name: str) -> Path:
    """A file that the stub obeys."""
    path = folder / name
    path.write_bytes(b"\0")
    return path


def decode(decoders: Decoders, path: Path) -> Decoded:
    return decoders.decode(path, 0, path.stat().st_size, bucket=BUCKET, crop="bucket")


def rejected(work: Callable[[], object]) -> RecordRejected:
    with pytest.raises(RecordRejected) as caught:
        work()
    assert caught.value.reason in REJECT_REASONS
    return caught.value


def children() -> set[int]:
    """Process ids of this process's children, dead ones that nobody waited for too."""
    return {child.pid for child in psutil.Process().children()}


def open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    ("stage", "name", "reason", "detail"),
    [
        ("decode", "kill", "decoder_crash", "signal 9"),
        ("scan", "segfault", "decoder_crash", "signal 11"),
        ("decode", "exit", "decoder_crash", "status 3"),
        ("decode", "nonsense", "decoder_crash", "is not valid"),
        ("decode", "memory", "too_large", "memory"),
    ],
)
def test_a_child_that_dies_costs_one_image(
    shared: Decoders, tmp_path: Path, photo: Path, name: str, reason: str, detail: str, stage: str
) -> None:
    path = named(tmp_path, name)
    for _ in range(1 if name == "nonsense" else 3):  # more often than there are children; nonsense is slow to judge
        found = rejected(lambda: shared.size(path, 0, 1) if stage == "scan" else decode(shared, path))
        assert (found.stage, found.reason) == (stage, reason)
        assert detail in found.detail
    assert decode(shared, photo).size == (60, 40)


def test_an_image_whose_child_was_killed_from_outside_is_not_rejected(tmp_path: Path, photo: Path) -> None:
    path = tmp_path / "kill once"
    path.write_bytes(photo.read_bytes())
    with Decoders(1, _child_module=STUB) as decoders:
        assert decode(decoders, path).pixels.shape == (*BUCKET, 3)
    assert (tmp_path / "killed").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_idle_child_leaves_stop_requests_to_its_parent_and_is_replaced_if_it_is_killed(
    photo: Path, number: int
) -> None:
    processes = children()
    with Decoders(1) as decoders:
        decode(decoders, photo)
        (child,) = children() - processes
        os.kill(child, number)
        assert gone_within(child, 240 if number == signal.SIGKILL else 0.1) == (number == signal.SIGKILL)
        assert decode(decoders, photo).size[0] == 60
        assert (children() - processes == {child}) == (number != signal.SIGKILL)


def test_a_file_that_is_larger_than_the_memory_of_a_child_is_rejected(shared: Decoders, tmp_path: Path) -> None:
    path = tmp_path / "sparse.png"
    with open(path, "wb") as file:
        file.truncate(8 << 30)
    assert rejected(lambda: shared.size(path, 0, 8 << 30)).reason == "too_large"


@pytest.mark.parametrize(("name", "reason"), [("kill", "decoder_crash"), ("sleep", "decoder_timeout")])
def test_of_many_sizes_only_that_of_the_culprit_is_lost(tmp_path: Path, photo: Path, name: str, reason: str) -> None:
    good = ImagePlace(photo, 0, photo.stat().st_size)
    broken, gone = named(tmp_path, "broken"), tmp_path / "gone"
    places = [good, ImagePlace(named(tmp_path, name), 0, 1), good, ImagePlace(broken, 0, 1)]
    with Decoders(1, timeout_seconds=0.5, _child_module=STUB) as decoders:
        found = decoders.sizes([*places, ImagePlace(gone, 0, 1), good])
        assert decoders.sizes([good, good]) == [(60, 40)] * 2
        assert decoders.sizes([]) == []
    reasons = [one.reason if isinstance(one, RecordRejected) else one for one in found]
    assert reasons == [(60, 40), reason, (60, 40), rejected(lambda: read_size(b"x")).reason, "unreadable", (60, 40)]


def test_a_child_that_does_not_end_costs_one_image_and_its_time(tmp_path: Path, photo: Path) -> None:
    path = named(tmp_path, "stop")
    processes = children()
    with Decoders(1, timeout_seconds=0.5, _child_module=STUB) as decoders:
        decode(decoders, photo)
        (first,) = children() - processes
        found = rejected(lambda: decode(decoders, path))
        assert (found.stage, found.reason, found.detail) == ("decode", "decoder_timeout", "no answer in 2 s")
        assert first not in children()
        assert decode(decoders, photo).size[0] == 60


@pytest.mark.parametrize("kind", ["NameError", "TypeError"])
def test_a_mistake_in_the_code_is_no_reject(shared: Decoders, tmp_path: Path, photo: Path, kind: str) -> None:
    path = named(tmp_path, kind.replace("Error", " error").lower())
    for read in (lambda: decode(shared, path), lambda: shared.size(path, 0, 1)):
        with pytest.raises(RuntimeError, match=rf"(?s)image '{path}': a bug.*Traceback.*{kind}"):
            read()
    assert decode(shared, photo).size[0] == 60


def test_what_is_no_regular_file_never_blocks(shared: Decoders, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.jpg")
    (tmp_path / "folder.jpg").mkdir()
    (tmp_path / "loop.jpg").symlink_to(tmp_path / "loop.jpg")
    paths = [tmp_path / name for name in ("fifo.jpg", "folder.jpg", "loop.jpg", "missing.jpg")]
    for path in [*paths, Path("/dev/zero"), Path("/dev/null"), Path("a\0b.jpg")]:
        for stage, work in (
            ("scan", lambda path=path: shared.size(path, 0, 9)),
            ("decode", lambda path=path: shared.decode(path, 0, 9, bucket=BUCKET, crop="bucket")),
        ):
            found = rejected(work)
            assert (found.stage, found.reason) == (stage, "unreadable"), path  # and no timeout


PARENT = """
import sys, threading, time
from pathlib import Path
from leandit.precompute.images.decoders import Decoders
decoders = Decoders(1, timeout_seconds=0.5, _child_module="decoder_stub")
decoders.size(Path(sys.argv[1]), 0, int(sys.argv[2]))
print(decoders._children[0]._process.pid, flush=True)
if sys.argv[3]:
    threading.Thread(target=decoders.size, args=(Path(sys.argv[3]), 0, 1)).start()
time.sleep(60)
"""


@pytest.mark.parametrize("busy", [False, True])
def test_a_child_does_not_outlive_a_parent_that_is_killed(tmp_path: Path, photo: Path, busy: bool) -> None:
    arguments = [str(photo), str(photo.stat().st_size), str(named(tmp_path, "sleep")) if busy else ""]
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, *arguments], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        try:
            child = int(parent.stdout.readline())
            time.sleep(0.2 if busy else 0)
        finally:
            parent.kill()
    assert gone_within(child, 240)  # an idle one by the end of its socket, a busy one by its alarm


@pytest.mark.parametrize("how", ["end", "error", "crash"])
def test_nothing_is_left_behind(tmp_path: Path, photo: Path, how: str) -> None:
    files, processes = open_files(), children()

    with contextlib.suppress(KeyboardInterrupt), Decoders(2, timeout_seconds=0.5, _child_module=STUB) as decoders:
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda _: decode(decoders, photo), range(12)))
        assert children() - processes
        if how == "crash":
            for name in ("kill", "sleep", "exit"):
                rejected(lambda name=name: decode(decoders, named(tmp_path, name)))
        if how == "error":
            raise KeyboardInterrupt
    assert open_files() == files
    assert children() == processes


@pytest.mark.parametrize("seconds", [0.05, 1.0])  # while children start, and while they work
def test_closing_wakes_threads_that_wait(tmp_path: Path, seconds: float) -> None:
    files, processes, path = open_files(), children(), named(tmp_path, "sleep")
    decoders = Decoders(2, timeout_seconds=60, _child_module=STUB)
    with ThreadPoolExecutor(5) as pool:  # two of them have a child, three wait for one
        waiting = [pool.submit(decoders.size, path, 0, 1) for _ in range(5)]
        time.sleep(seconds)
        decoders.close()
        for future in waiting:
            with pytest.raises(RuntimeError, match="closed"):
                future.result(240)
    decoders.close()  # twice is no mistake
    with pytest.raises(RuntimeError, match="closed"):
        decoders.size(path, 0, 1)
    assert open_files() == files
    assert children() == processes


@pytest.mark.parametrize("when", ["while it starts", "while it works"])
def test_an_interrupted_question_does_not_answer_the_next_one(tmp_path: Path, photo: Path, when: str) -> None:
    other = tmp_path / "other.png"
    other.write_bytes(encoded(noise(8, 9), "PNG"))
    with Decoders(1) as decoders:
        if when == "while it works":
            decode(decoders, photo)
        interrupted = patch("multiprocessing.connection.Connection.recv_bytes", side_effect=KeyboardInterrupt)
        with interrupted, pytest.raises(KeyboardInterrupt):
            decoders.size(photo, 0, photo.stat().st_size)
        assert decoders.size(other, 0, other.stat().st_size) == (8, 9)


def test_too_few_free_files_are_an_error_of_resources(photo: Path) -> None:
    with Decoders(1) as decoders:
        with no_free_files(), pytest.raises(ResourceError, match="Too many open files"):
            decoders.size(photo, 0, 9)
        assert decode(decoders, photo).size[0] == 60


def test_a_child_that_cannot_start_is_an_error_of_resources(photo: Path) -> None:
    files = open_files()
    message = r"does not start \(the decoder exited with status 1\).*Expected"
    with Decoders(1, _child_module="leandit.no_such") as decoders, pytest.raises(ResourceError, match=message):
        decode(decoders, photo)
    assert open_files() == files


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses between tries that a test can wait for."""
    monkeypatch.setattr(faults, "PAUSES", (0.01, 0.02, 0.05))


@pytest.mark.usefixtures("impatient")
def test_a_disk_that_fails_for_a_moment_costs_nothing_and_for_longer_is_no_reject(
    shared: Decoders, tmp_path: Path
) -> None:
    path = tmp_path / "eio.png"
    path.write_bytes(encoded(noise(40, 60), "PNG"))
    place = ImagePlace(path, 0, path.stat().st_size)
    (tmp_path / "broken").write_text("3")
    assert decode(shared, path).size[0] == 40
    (tmp_path / "broken").write_text("1")
    assert shared.sizes([place, place]) == [(40, 60)] * 2
    (tmp_path / "broken").write_text("100")
    for work in (lambda: decode(shared, path), lambda: shared.size(*place), lambda: shared.sizes([place])):
        with pytest.raises(ResourceError, match=r"eio\.png.*Input/output error.*No record was rejected") as caught:
            work()
        assert caught.value.exit_code == 5


@pytest.mark.usefixtures("impatient")
def test_a_network_folder_that_stalls_is_no_reject(tmp_path: Path) -> None:
    path = tmp_path / "stall"
    path.write_bytes(encoded(noise(40, 60), "PNG"))
    (tmp_path / "stalls").touch()
    with Decoders(1, timeout_seconds=0.2, _child_module=STUB) as decoders:
        with pytest.raises(ResourceError, match=r"stall.*no bytes in 0\.8 s"):
            decode(decoders, path)
        waiter = threading.Timer(0.5, (tmp_path / "stalls").unlink)
        waiter.start()
        assert decode(decoders, path).size[0] == 40
        waiter.join()


@pytest.mark.usefixtures("impatient")
def test_a_precompute_stops_at_a_failing_disk_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, broken = make_class_folder(tmp_path / "source", classes=1, per_class=3), tmp_path / "source/n000/broken"
    (source / "n000/1.png").rename(source / "n000/eio.png")
    monkeypatch.setattr(pipeline, "Decoders", lambda count, **limits: Decoders(count, _child_module=STUB, **limits))

    def run(*, fails_after: str = "") -> Manifest | None:
        def progress(stage: str, done: int, total: int) -> None:
            if stage == fails_after and done >= total:
                broken.write_text("100")

        return encode(label_recipe(), source, tmp_path / "store", progress=progress).manifest

    for stage in ("list", "scan"):
        with pytest.raises(ResourceError, match=r"eio\.png.*run the same command again; it resumes"):
            run(fails_after=stage)
        assert not (tmp_path / "store/revisions/000001/manifest.json").exists()
        broken.unlink()
    manifest = run()
    assert manifest
    assert (manifest.num_stored, manifest.num_rejected) == (3, 0)
