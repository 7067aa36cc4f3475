"""Stores at a URL: shards come whole and checked, the folder keeps to its room, and what goes wrong is named."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import xxhash
from aiohttp import ClientPayloadError
from faults import Child, start
from fsspec.implementations.memory import MemoryFileSystem
from making import CPU, train_recipe, tree_digest
from s3_server import s3_server
from typer.testing import CliRunner

from leandit.datasets.disk import files
from leandit.datasets.format.schema import FileEntry, Manifest
from leandit.datasets.loader import make_loader
from leandit.datasets.maintenance.verify import verify_store
from leandit.datasets.remote import cache, failures, opening
from leandit.datasets.remote import reader as remote_reader
from leandit.datasets.remote.cache import RemoteFolder, is_shard, name_of
from leandit.datasets.remote.opening import default_folder, open_remote
from leandit.datasets.remote.reader import RemoteReader
from leandit.datasets.store import LatentStore
from leandit.errors import (
    DamageError,
    FormatVersionError,
    LeanditError,
    RecipeError,
    ResourceError,
    StoreError,
    StoreIncomplete,
    StoreNotFound,
)
from leandit.tools.cli.commands import app
from leandit.tools.inspection.remote_verify import verify_remote
from leandit.tools.inspection.store_facts import StoreFacts
from leandit.tools.plan.dry_run import describe_train
from leandit.tools.plan.workload import workload_of_stores
from leandit.train.loop import train
from leandit.train.metrics.history import StepReport
from leandit.train.parallel.stop import StopRequest

MOMENTS = "buckets/64x64/moments/c/0/0/0/0"
OWN = "revisions/000001/"  # of the only revision
SIZES = [700, 900, 1100, 1300, 500, 1500, 800, 1000]  # bytes of the made-up shards
PATHS = [f"buckets/8x8/moments/c/{i}" for i in range(len(SIZES))]
CONTENT = {path: random.Random(i).randbytes(SIZES[i]) for i, path in enumerate(PATHS)}


# ------------------------------------------------------------ a file system with faults


class FaultyFileSystem(MemoryFileSystem):
    """Files in memory; requests are counted, and fail in turn as a test says."""

    protocol = "faulty"
    store: dict[str, Any] = {}  # noqa: RUF012 - that of the class above belongs to others
    pseudo_dirs = [""]  # noqa: RUF012
    faults: dict[str, list[Any]] = {}  # noqa: RUF012
    requests: Counter[str] = Counter()  # noqa: RUF012
    watch: Callable[[], Any] | None = None

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("faulty://", "memory://"))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        FaultyFileSystem.requests[path] += 1
        if FaultyFileSystem.watch:
            FaultyFileSystem.watch()
        fault = next((faults for name, faults in self.faults.items() if path.endswith(name) and faults), None)
        what = fault.pop(0) if fault else None
        if isinstance(what, BaseException):
            raise what
        content = super().cat_file(path, start=start, end=end, **kwargs)
        return what(content) if what else content


fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_reader, "FIRST_WAIT_SECONDS", 0.001)
    FaultyFileSystem.store, FaultyFileSystem.faults, FaultyFileSystem.watch = {}, {}, None
    FaultyFileSystem.requests.clear()


def flip(content: bytes) -> bytes:
    return bytes([content[0] ^ 1]) + content[1:]


def made_up_manifest() -> Manifest:
    """A manifest over the made-up shards and nothing else."""
    files = [FileEntry(path=p, bytes=len(c), xxh3_128=xxhash.xxh3_128_hexdigest(c)) for p, c in CONTENT.items()]
    return Manifest.model_construct(files=files)


def made_up(local: Path, capacity: int = 10_000, *, url: str = "faulty://made-up", threads: int = 2) -> RemoteFolder:
    """A folder over the made-up shards."""
    reader = RemoteReader(url)
    for path, data in CONTENT.items():
        put(reader._fs, f"{reader._root}/{path}", data)
    local.mkdir(exist_ok=True)
    return RemoteFolder(reader, local, made_up_manifest(), capacity=capacity, threads=threads)


def bytes_in(local: Path) -> int:
    """Bytes of all that lies in the folder's room, temporaries too."""
    total = 0
    for path in (local / "shards").iterdir():
        with contextlib.suppress(FileNotFoundError):  # gone since
            total += path.stat().st_size
    return total


def here(folder: RemoteFolder) -> set[str]:
    """The made-up shards that are in the folder."""
    names = {path.name for path in folder._shards.iterdir()}
    return {path for path in PATHS if name_of(folder._entry(path)) in names}


def wait_until(condition: Callable[[], Any], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)


# ------------------------------------------------------------ s3


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """A server of the S3 protocol, with the bucket "latents"."""
    with s3_server("latents") as url:
        yield url


def put(fs: Any, path: str, content: bytes) -> None:
    if fs.protocol[0] == "file":
        fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    fs.pipe_file(path, content)


def upload(store: Path, url: str) -> Any:
    """Copy a store to a URL; returns the file system."""
    fs, root = fsspec.core.url_to_fs(url)
    fs.invalidate_cache()
    files = {f"{root}/{name}": content for name, content in tree_digest(store).items()}
    if url.startswith("s3"):
        fs.pipe(files)  # several at a time
    else:
        for path, content in files.items():
            put(fs, path, content)
    return fs


def shards_of(store: LatentStore) -> list[FileEntry]:
    assert store.manifest
    found = [entry for entry in store.manifest.files if is_shard(entry)]
    assert len(found) >= 5
    return found


MANIFEST, TABLE = OWN + "manifest.json", OWN + "records.parquet"


def set_object(change: Callable[[bytes], bytes] | None, path: str = MOMENTS) -> Callable[[Any, str], None]:
    def spoil(fs: Any, root: str) -> None:
        if change is None:
            fs.rm_file(f"{root}/{path}")
        else:
            fs.pipe_file(f"{root}/{path}", change(fs.cat_file(f"{root}/{path}")))

    return spoil


def only(*files: tuple[str, bytes]) -> Callable[[Any, str], None]:
    """Nothing is left but these."""

    def spoil(fs: Any, root: str) -> None:
        for path in fs.find(root):
            fs.rm_file(path)
        for name, content in files:
            put(fs, f"{root}/{name}", content)

    return spoil


def replaced(old: bytes, new: bytes) -> Callable[[Any, str], None]:
    return set_object(lambda content: content.replace(old, new), MANIFEST)


NOT_OPENED: dict[str, tuple[Callable[[Any, str], None], type[LeanditError], list[str]]] = {
    "nothing there": (only(), StoreNotFound, ["has no manifest", "Check the URL"]),
    "not sealed": (set_object(None, MANIFEST), StoreIncomplete, ["no complete revision", "precompute"]),
    "only a plan": (only((OWN + "plan/plan.json", b"{}")), StoreIncomplete, ["no complete revision"]),
    "missing shard": (set_object(None), DamageError, [MOMENTS, "is missing", "leandit verify"]),
    "cut shard": (set_object(lambda c: c[:-1]), DamageError, [MOMENTS, "bytes, the manifest says"]),
    "missing table": (set_object(None, TABLE), DamageError, [TABLE, "is missing"]),
    "damaged table": (set_object(flip, TABLE), DamageError, [TABLE, "hash", "manifest says"]),
    "cut table": (set_object(lambda c: c[:-9], TABLE), DamageError, [TABLE, "bytes, the"]),
    "longer table": (set_object(lambda c: c + b"x", TABLE), DamageError, [TABLE, "more than"]),
    "damaged manifest": (set_object(flip, MANIFEST), DamageError, [MANIFEST, "JSON"]),
    "edited manifest": (replaced(b'"num_rejected": 0', b'"num_rejected": 1'), DamageError, [MANIFEST, "root hash"]),
    "newer version": (replaced(b'_version": 1', b'_version": 2'), FormatVersionError, ["version 2", "reads 1"]),
}


@pytest.mark.parametrize("case", NOT_OPENED)
def test_a_store_that_is_not_whole_is_named_when_opened(case: str, caption_store: LatentStore, tmp_path: Path) -> None:
    spoil, error, words = NOT_OPENED[case]
    url = "faulty://store"
    spoil(upload(caption_store.path, url), fsspec.core.url_to_fs(url)[1])
    with pytest.raises(error) as caught:
        open_remote(url, folder=tmp_path / "local")
    message = str(caught.value)
    assert all(word in message for word in [url, *words]), message
    assert str(tmp_path) not in message
    assert "\n" not in message


def test_a_shard_that_changes_after_opening_is_named(s3: str, caption_store: LatentStore, tmp_path: Path) -> None:
    fs = upload(caption_store.path, f"{s3}/changes")
    folder = open_remote(f"{s3}/changes", folder=tmp_path / "local")
    content = fs.cat_file(f"latents/changes/{MOMENTS}")
    for new, words in ((content + b"x", "more than"), (content[:-9], "bytes, the manifest"), (b"", "has 0 bytes")):
        fs.pipe_file(f"latents/changes/{MOMENTS}", new)
        with pytest.raises(DamageError, match=f"{MOMENTS}.*{words}"):
            folder.fetch(MOMENTS)


def test_a_bucket_credentials_or_a_protocol_that_is_not_there_is_one_line(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StoreNotFound, match=r"s3://no-such-bucket/store.*Check the URL"):
        open_remote("s3://no-such-bucket/store", folder=tmp_path / "a")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(StoreError, match=r"cannot be accessed.*credentials.*AWS_") as caught:
        open_remote(f"{s3}/whole", folder=tmp_path / "b", options={"skip_instance_cache": True})
    assert "\n" not in str(caught.value)
    with pytest.raises(RecipeError, match=r"no-such-protocol.*Check the URL"):
        open_remote("no-such-protocol://x/y", folder=tmp_path / "a")
    with pytest.raises(RecipeError, match=r"its extra .remote."):
        open_remote("gs://bucket/store", folder=tmp_path / "b")  # gcsfs is not among our dependencies
    assert remote_reader.redact_url("s3://key:secret@bucket/x?token=secret") == "s3://bucket/x"


def test_a_folder_of_another_store_or_with_other_files_is_refused(
    caption_store: LatentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder("s3://a/b") == default_folder("s3://a/b/") != default_folder("s3://a/c")
    assert default_folder("s3://a/b").parent == tmp_path / "leandit"
    upload(caption_store.path, "faulty://one")
    upload(caption_store.path, "faulty://two")
    open_remote("faulty://one", folder=tmp_path / "local")
    folder = open_remote("faulty://one/", folder=tmp_path / "local")
    with pytest.raises(StoreError, match=r"local folder of a store at a URL.*Open the URL itself"):
        LatentStore(folder.store)
    with pytest.raises(StoreError, match=r"belongs to store 'faulty://one'"):
        open_remote("faulty://two", folder=tmp_path / "local")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years of work")
    with pytest.raises(StoreError, match=r"holds other files"):
        open_remote("faulty://two", folder=tmp_path / "mine")
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match=r"cannot be used"):
        open_remote("faulty://two", folder=tmp_path / "file")


def test_a_shard_that_is_truncated_in_the_local_folder_is_named(caption_store: LatentStore, tmp_path: Path) -> None:
    upload(caption_store.path, "faulty://one")
    store = LatentStore("faulty://one", access="pread", remote={"folder": tmp_path / "local"})
    bucket = next(iter(store.buckets))
    store.latents(bucket).take([0])
    (shard,) = (path for path in store.latents(bucket).shard_paths(np.array([0])))
    assert store.remote is not None
    os.truncate(store.remote.fetch(shard), 10)
    with pytest.raises(DamageError, match=r"local/shards/.*Remove this file: it is fetched again"):
        store.latents(bucket).take([0])


def test_a_loader_that_is_closed_or_dropped_brings_no_more_shards(caption_store: LatentStore, tmp_path: Path) -> None:
    upload(caption_store.path, "faulty://one")
    store = LatentStore("faulty://one", remote={"folder": tmp_path / "local"})
    lists: list[int] = []
    assert store.remote is not None
    store.remote.prefetch = lambda paths: lists.append(len(list(paths)))  # type: ignore[method-assign]
    for end in ("close", "drop"):
        loader = make_loader(store, global_batch=2)
        next(iter(loader))
        assert lists.pop() > 0
        if end == "close":
            loader.dataset.close()
        del loader
        gc.collect()
        wait_until(
            lambda: gc.collect() < 0 or lists, 120
        )  # a thread that reads ahead holds it until its batch is there
        assert lists == [0], end
        lists.clear()


def test_manifests_that_went_or_came_are_seen(grown_store: Path, tmp_path: Path) -> None:
    fs, plan = upload(grown_store, "faulty://grows"), "revisions/000003/plan/plan.json"
    newest = {path: fs.cat_file(path) for path in fs.find("/grows/revisions/000003")}

    def revision(wanted: int | None = None) -> int:
        return open_remote("faulty://grows", folder=tmp_path / "local", revision=wanted).manifest.revision

    fs.rm("/grows/revisions/000003", recursive=True)
    fs.pipe_file(f"/grows/{plan}", b"{}")
    assert revision() == 2
    assert (tmp_path / "local/store" / plan).exists()  # so it is known as unfinished
    for path, content in newest.items():
        fs.pipe_file(path, content)
    assert (revision(), revision(1)) == (3, 1)
    with pytest.raises(StoreError, match=r"no complete revision 4. Available: 1, 2, 3"):
        revision(4)
    fs.rm("/grows/revisions/000003", recursive=True)
    assert revision() == 2
    assert not list((tmp_path / "local/store/revisions/000003").rglob("*.json"))


def test_small_files_come_once_and_again_where_they_are_damaged(caption_store: LatentStore, tmp_path: Path) -> None:
    upload(caption_store.path, "faulty://small")
    folder = open_remote("faulty://small", folder=tmp_path / "local")
    table = folder.store / OWN / "records.parquet"
    FaultyFileSystem.requests.clear()
    open_remote("faulty://small", folder=tmp_path / "local")
    assert {path.rpartition("/")[2] for path in FaultyFileSystem.requests} == {"manifest.json", "local.json"}
    assert len(FaultyFileSystem.requests) == 2
    table.write_bytes(flip(table.read_bytes()))
    open_remote("faulty://small", folder=tmp_path / "local")
    assert table.read_bytes() == (caption_store.path / OWN / "records.parquet").read_bytes()


def test_a_large_store_is_opened_without_a_listing(
    caption_store: LatentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = upload(caption_store.path, "faulty://large")
    fs.rm_file(f"/large/{MOMENTS}")
    monkeypatch.setattr(opening, "MAX_LISTED", 3)
    folder = open_remote("faulty://large", folder=tmp_path / "local")
    with pytest.raises(DamageError, match=f"{MOMENTS}' is missing"):
        folder.fetch(MOMENTS)
    table = folder.store / TABLE
    table.write_bytes(flip(table.read_bytes()))  # what is damaged here comes again
    open_remote("faulty://large", folder=tmp_path / "local")
    assert table.read_bytes() == (caption_store.path / TABLE).read_bytes()


# ------------------------------------------------------------ faults


class OfALibrary(Exception):
    """As libraries raise it that know no OSError: with a status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


PASSING = [OSError(16, "SlowDown"), ConnectionResetError("reset"), TimeoutError("no answer"), OfALibrary(503)]
PASSING += [OfALibrary(429), ClientPayloadError("closed")]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(failures._ERRORS, __name__, ("OfALibrary",))
    monkeypatch.setitem(failures.sys.modules, __name__, type("Module", (), {"OfALibrary": OfALibrary}))


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("fault", PASSING, ids=repr)
def test_what_passes_is_tried_again_for_a_bounded_number_of_times(fault: Exception, tmp_path: Path) -> None:
    FaultyFileSystem.faults = {PATHS[0]: [fault] * 100, PATHS[1]: [fault] * (remote_reader.ATTEMPTS - 1)}
    folder = made_up(tmp_path / "local")
    with pytest.raises(StoreError, match=rf"faulty://made-up.*{PATHS[0]}.*{remote_reader.ATTEMPTS} attempts.*network"):
        folder.fetch(PATHS[0])
    assert FaultyFileSystem.requests.total() == remote_reader.ATTEMPTS
    assert bytes_in(tmp_path / "local") == 0
    assert folder.fetch(PATHS[1]).read_bytes() == CONTENT[PATHS[1]]


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        (PermissionError("Access Denied"), StoreError, "cannot be accessed.*Access Denied.*credentials"),
        (FileNotFoundError("gone"), DamageError, "is missing"),
        (OSError(22, "bucket name"), StoreError, "cannot be read.*bucket name"),
        (OfALibrary(400), StoreError, "status 400"),
    ],
)
def test_what_lasts_is_named_at_once(fault: Exception, error: type[Exception], words: str, tmp_path: Path) -> None:
    FaultyFileSystem.faults = {PATHS[0]: [fault] * 9}
    with pytest.raises(error, match=words):
        made_up(tmp_path / "local").fetch(PATHS[0])
    assert FaultyFileSystem.requests.total() == 1


@pytest.mark.parametrize("wrong", [flip, lambda c: c[:-1], lambda c: c + b"x"], ids=["flipped", "short", "long"])
def test_wrong_bytes_are_tried_again_once(wrong: Callable[[bytes], bytes], tmp_path: Path) -> None:
    FaultyFileSystem.faults = {PATHS[0]: [wrong], PATHS[1]: [wrong, wrong]}
    folder = made_up(tmp_path / "local")
    assert folder.fetch(PATHS[0]).read_bytes() == CONTENT[PATHS[0]]
    with pytest.raises(
        DamageError, match=f"faulty://made-up.*{PATHS[1]}.*the manifest says {SIZES[1]} bytes with hash"
    ):
        folder.fetch(PATHS[1])
    local = folder.fetch(PATHS[1])
    assert local.read_bytes() == CONTENT[PATHS[1]]
    local.write_bytes(wrong(CONTENT[PATHS[1]]))  # damaged on this disk since
    folder = made_up(tmp_path / "local")
    assert folder.fetch(PATHS[1]).read_bytes() == CONTENT[PATHS[1]]
    assert folder.num_fetched == 1


def test_a_shard_comes_in_pieces_and_a_broken_one_alone_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_reader, "PIECE_BYTES", 100)
    FaultyFileSystem.faults = {PATHS[0]: [lambda c: c, lambda c: c, ConnectionResetError()]}
    assert made_up(tmp_path / "local").fetch(PATHS[0]).read_bytes() == CONTENT[PATHS[0]]
    assert FaultyFileSystem.requests.total() == 7 + 1


def test_a_path_that_is_no_shard_and_a_hash_that_is_no_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DamageError, match=r"\.\./zarr.json' is not a shard"):
        made_up(tmp_path / "local").fetch("../zarr.json")
    manifest = made_up_manifest()
    evil = manifest.files[0].model_copy(update={"xxh3_128": "../../evil"})
    with pytest.raises(DamageError, match="no valid hash"):
        RemoteFolder(
            RemoteReader("faulty://x"), tmp_path / "b", manifest.model_copy(update={"files": [evil]}), capacity=10**6
        )


# ------------------------------------------------------------ the bound


def test_a_shard_larger_than_the_room_is_refused_at_once(caption_store: LatentStore, tmp_path: Path) -> None:
    upload(caption_store.path, "faulty://narrow")
    with pytest.raises(ResourceError, match=r"shard '.*' has .*iB, the local folder may hold .* B.*capacity_gib"):
        open_remote("faulty://narrow", folder=tmp_path / "local", capacity_gib=1e-7)
    assert not [path for path in FaultyFileSystem.requests if path.endswith("parquet") or "/c/" in path]


def test_the_shard_that_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    folder, gone = made_up(tmp_path / "local", sum(SIZES[:4])), list[str]()
    folder.on_evict = gone.append
    for path in (*PATHS[:4], PATHS[0]):
        folder.fetch(path)
    assert folder.use(PATHS[1])
    mapped = folder.open(PATHS[2], lambda local: np.memmap(local, np.uint8, mode="r"))
    for path in (PATHS[3], PATHS[0], PATHS[1], PATHS[4]):  # 500 bytes
        folder.fetch(path)
    assert (gone, folder.use(PATHS[2]), folder.num_evicted) == ([PATHS[2]], False, 1)
    assert mapped.tobytes() == CONTENT[PATHS[2]]  # a map outlives its file


def test_waiting_for_room_comes_to_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "PATIENCE_SECONDS", 0.1)
    gate, entered = threading.Event(), threading.Event()
    folder = made_up(tmp_path / "local", 1500)
    FaultyFileSystem.watch = lambda: (entered.set(), gate.wait(20))
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(folder.fetch, PATHS[0])
        assert entered.wait(20)
        with pytest.raises(ResourceError, match=rf"{PATHS[5]}.*used by shards that other processes download"):
            folder.fetch(PATHS[5])
        gate.set()
        assert coming.result(240).read_bytes() == CONTENT[PATHS[0]]
    assert folder.fetch(PATHS[5]).stat().st_size == 1500


def test_prefetch_brings_in_order_and_no_more_than_fits(tmp_path: Path) -> None:
    folder = made_up(tmp_path / "local", sum(SIZES[:3]), threads=1)
    folder.fetch(PATHS[7])
    folder.prefetch(PATHS)
    wait_until(lambda: not folder._threads)
    assert here(folder) == set(PATHS[:3])
    came = [path.removeprefix("/made-up/") for path in FaultyFileSystem.requests]
    assert came == [PATHS[7], *PATHS[:3]]
    folder.prefetch([*PATHS[1:3], PATHS[4]])  # what is not wished for any more makes room
    wait_until(lambda: not folder._threads)
    assert here(folder) == {*PATHS[1:3], PATHS[4]}
    folder.fetch(PATHS[0])  # needed now: the last wish goes, where what nobody wishes for is not enough
    assert here(folder) == {*PATHS[:3]}


def test_a_new_list_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    gate, entered = threading.Event(), threading.Event()
    folder = made_up(tmp_path / "local", threads=1)
    FaultyFileSystem.watch = lambda: (entered.set(), gate.wait(20))
    folder.prefetch(PATHS[:4])
    assert entered.wait(20)
    folder.prefetch([PATHS[6], PATHS[6], PATHS[5]])
    gate.set()
    wait_until(lambda: not folder._threads)
    assert here(folder) == {PATHS[0], PATHS[5], PATHS[6]}  # the first was coming already
    folder.prefetch(PATHS)
    folder.close()
    assert not folder._threads


def test_what_goes_wrong_ahead_is_told_by_the_fetch(tmp_path: Path) -> None:
    FaultyFileSystem.faults = {PATHS[0]: [PermissionError("no")] * 2, PATHS[1]: [PermissionError("no")]}
    folder = made_up(tmp_path / "local", threads=1)
    folder.prefetch(PATHS[:3])
    wait_until(lambda: PATHS[2] in here(folder), 120)
    with pytest.raises(StoreError, match=rf"{PATHS[0]}.*cannot be accessed"):
        folder.fetch(PATHS[0])
    assert folder.fetch(PATHS[1]).read_bytes() == CONTENT[PATHS[1]]


def test_threads_in_a_narrow_folder_read_right_bytes_and_never_exceed_it(tmp_path: Path) -> None:
    local, capacity = tmp_path / "local", 5000  # at least three shards, so that two threads never wait for each other
    seen: list[int] = []
    folder = made_up(local, capacity, threads=2)
    FaultyFileSystem.watch = lambda: seen.append(bytes_in(local))

    def read(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(40):
            path = rng.choice(PATHS)
            assert folder.open(path, Path.read_bytes) == CONTENT[path]
            if rng.random() < 0.2:
                folder.prefetch(rng.sample(PATHS, 5))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, range(4)))
    folder.close()
    assert max(seen) <= capacity
    assert bytes_in(local) <= capacity


# ------------------------------------------------------------ earlier runs, other processes


def test_shards_of_an_earlier_run_are_used_again_and_count(tmp_path: Path) -> None:
    folder = made_up(tmp_path / "local")
    for path in PATHS[:4]:
        folder.fetch(path)
    FaultyFileSystem.requests.clear()
    folder = made_up(tmp_path / "local", sum(SIZES[:4]))
    assert [folder.fetch(path).read_bytes() for path in PATHS[:4]] == [CONTENT[path] for path in PATHS[:4]]
    assert not FaultyFileSystem.requests
    folder.fetch(PATHS[4])
    assert here(folder) == set(PATHS[1:5])
    made_up(tmp_path / "local", 1500).fetch(PATHS[5])
    assert here(folder) == {PATHS[5]}  # it had more room before


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., RemoteFolder]:
    """Opens a local folder over the made-up shards as files, which processes can share."""
    url = made_up(tmp_path / "local", url=f"file://{tmp_path}/origin").url
    return lambda capacity=10_000: RemoteFolder(
        RemoteReader(url), tmp_path / "local", made_up_manifest(), capacity=capacity
    )


def test_a_download_that_was_killed_leaves_nothing_that_is_believed(
    opened: Callable[..., RemoteFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local, signal = tmp_path / "local", tmp_path / "half"
    monkeypatch.setattr(remote_reader, "PIECE_BYTES", 100)
    read = RemoteReader._request

    def slow(self: RemoteReader, path: str, start: int, end: int) -> bytes:
        if start >= 300:
            signal.touch()
            time.sleep(60)
        return read(self, path, start, end)

    def work() -> None:
        RemoteReader._request = slow  # type: ignore[method-assign]  # of this child alone
        opened().fetch(PATHS[5])

    child = start(work)
    wait_until(signal.exists)
    assert bytes_in(local) == 300
    other = opened(2000)  # 1500 are coming, so there is no room for 700 as long as it lives
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.fetch, PATHS[0])
        time.sleep(0.2)
        assert not waiting.done()
        child.signal(9)
        assert child.wait().died
        assert waiting.result(240).read_bytes() == CONTENT[PATHS[0]]
    assert bytes_in(local) == 700
    assert other.fetch(PATHS[5]).read_bytes() == CONTENT[PATHS[5]]


def test_processes_that_share_a_narrow_folder_keep_to_it(opened: Callable[..., RemoteFolder], tmp_path: Path) -> None:
    local, capacity = tmp_path / "local", 4000

    def work(seed: int) -> int:
        folder, rng = opened(capacity), random.Random(seed)
        most = 0
        for _ in range(60):
            path = rng.choice(PATHS)
            mapped = folder.open(path, lambda file: np.memmap(file, np.uint8, mode="r"))
            assert mapped.tobytes() == CONTENT[path]
            most = max(most, min(bytes_in(local), bytes_in(local)))  # a look may count a file before and after a rename
        return most

    children: list[Child] = [start(lambda seed=seed: work(seed)) for seed in range(3)]
    outcomes = [child.wait() for child in children]
    assert [outcome.message for outcome in outcomes] == [""] * 3
    assert max(outcome.value for outcome in outcomes) <= capacity
    assert bytes_in(local) <= capacity


def test_processes_and_threads_that_want_the_same_shards_bring_them_once(
    opened: Callable[..., RemoteFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = RemoteReader._request

    def slow(*args: Any) -> bytes:
        time.sleep(0.05)
        return read(*args)

    monkeypatch.setattr(RemoteReader, "_request", slow)

    def work() -> int:
        folder = opened()
        folder.prefetch(PATHS)
        with ThreadPoolExecutor(8) as pool:
            for path, local in zip(PATHS * 8, pool.map(folder.fetch, PATHS * 8), strict=True):
                assert local.read_bytes() == CONTENT[path]
        return folder.num_fetched

    children = [start(work) for _ in range(3)]
    outcomes = [child.wait() for child in children]
    assert [outcome.message for outcome in outcomes] == [""] * 3
    assert sum(outcome.value for outcome in outcomes) == len(PATHS)


def test_a_fork_reads_on(s3: str, caption_store: LatentStore, tmp_path: Path) -> None:
    upload(caption_store.path, f"{s3}/fork")
    folder = open_remote(f"{s3}/fork", folder=tmp_path / "local")
    paths = [entry.path for entry in shards_of(caption_store)]
    folder.fetch(paths[0])

    def work() -> bool:
        folder.prefetch(paths[3:])
        wait_until(lambda: folder.num_fetched)
        return all(folder.fetch(path).read_bytes() == (caption_store.path / path).read_bytes() for path in paths)

    def close() -> bool:
        folder.prefetch([])
        folder.close()
        return True

    with folder._lock:  # as if another thread had it at this moment
        child, closes = start(work), start(close)
    assert closes.wait().value is True
    outcome = child.wait()
    assert (outcome.value, outcome.message) == (True, "")
    assert folder.fetch(paths[2]).read_bytes() == (caption_store.path / paths[2]).read_bytes()


def test_a_full_disk_is_named_and_leaves_nothing(opened: Callable[..., RemoteFolder], tmp_path: Path) -> None:
    opened().fetch(PATHS[0])

    def work() -> None:
        folder = opened()
        assert files.failpoint
        files.failpoint.kind, files.failpoint.at = "enospc", 0
        folder.fetch(PATHS[1])

    outcome = start(work).wait()
    assert "ResourceError" in outcome.error
    assert "No space left" in outcome.message
    assert {path.name for path in (tmp_path / "local/shards").iterdir()} == {name_of(made_up_manifest().files[0])}


# ------------------------------------------------------------ a store at a URL, read as any other


@pytest.mark.parametrize("is_tight", [False, True], ids=["roomy", "tight"])
def test_the_batches_of_a_store_on_s3_are_those_of_the_local_one(
    is_tight: bool, s3: str, caption_store: LatentStore, tmp_path: Path
) -> None:
    url = f"{s3}/batches"
    upload(caption_store.path, url)
    assert caption_store.manifest is not None
    sizes = [entry.bytes for entry in caption_store.manifest.files if is_shard(entry)]
    capacity = int(max(sizes) * 1.4) if is_tight else 10**9
    store = LatentStore(url, remote={"folder": tmp_path / "l", "capacity_gib": capacity / 2**30})
    assert store.remote is not None
    for seed in range(2):
        local, away = (make_loader(one, global_batch=4, seed=seed) for one in (caption_store, store))
        for batch, wanted in zip(away, local, strict=True):
            assert (batch.bucket, batch.records.tolist()) == (wanted.bucket, wanted.records.tolist())
            np.testing.assert_array_equal(batch.stored, wanted.stored)
            np.testing.assert_array_equal(batch.captions, wanted.captions)  # pyright: ignore[reportArgumentType]
        assert bytes_in(tmp_path / "l") <= capacity
    assert bool(store.remote.num_evicted) == is_tight
    store.remote.close()


def test_a_run_trains_on_a_store_at_a_url_as_on_the_local_one(
    caption_store: LatentStore, tmp_path: Path, tiny_models: None
) -> None:
    upload(caption_store.path, f"file://{tmp_path}/origin")
    away = [f"run.remote_folder={tmp_path}/folder", "run.remote_gib=0.1"]
    recipe = train_recipe("pixart-tiny", "schedule.kind=constant", "schedule.warmup_steps=1", *away)
    losses, in_memory = {}, recipe.run.model_copy(update={"remote_folder": f"{tmp_path}/memory"})
    own = recipe.run.model_copy(update={"remote_folder": ""})
    for name, path, run in (
        ("local", caption_store.path, own),
        ("away", f"file://{tmp_path}/origin", recipe.run),
        ("copied", caption_store.path, in_memory),  # a store at a path, as on a network file system
    ):
        for steps in (2, 3):  # the second goes on with the first
            seen: list[StepReport] = []
            now = recipe.model_copy(update={"run": run.model_copy(update={"steps": steps})})
            train(now, store_path=path, run=tmp_path / name, device=CPU, report=seen.append, stop=StopRequest())
            losses.setdefault(name, []).extend(figures.loss for figures in seen)
    assert losses["away"] == losses["copied"] == losses["local"]
    assert len(losses["away"]) == 3
    shards = [path for path in (tmp_path / "memory/shards").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in shards) > 0
    assert not [name for name in tree_digest(tmp_path / "folder/store") if "/c/" in name]  # shards lie beside it
    shown = describe_train(recipe, f"file://{tmp_path}/origin", CPU)
    assert re.search(rf"mirror +'{tmp_path}/folder': \S+ .iB at most \(run.remote_gib\), \S+ .iB free", shown)
    assert 0 < workload_of_stores(recipe, f"file://{tmp_path}/origin").mirror_bytes < 0.1 * 2**30
    mirrored = [recipe.model_copy(update={"run": run}) for run in (own, in_memory)]
    sizes = [workload_of_stores(each, caption_store.path).mirror_bytes for each in mirrored]
    assert sizes[0] == 0 < sizes[1]


# ------------------------------------------------------------ inspect and verify at a URL


def test_a_store_at_a_url_is_verified_there(caption_store: LatentStore, tmp_path: Path) -> None:
    upload(caption_store.path, "faulty://sound")
    found, there = verify_remote("faulty://sound"), verify_store(caption_store.path)
    assert (found.store, found.findings, found.complete) == ("faulty://sound", [], True)
    assert (found.num_files, found.num_bytes, found.num_records) == (there.num_files, there.num_bytes, 14)
    FaultyFileSystem.requests.clear()
    assert verify_remote("faulty://sound", quick=True).findings == []
    assert not any("/moments/c/" in path for path in FaultyFileSystem.requests)  # sizes come from the listing


FLIPPED = [OWN + name for name in ("manifest.json", "local.json", "twin/records.parquet")]
SPOILT: list[tuple[Callable[[Any, str], None], str, str]] = [
    (set_object(lambda c: c[:-1]), MOMENTS, "size"),
    (set_object(None), MOMENTS, "missing"),
    *((set_object(flip, path), path, "content") for path in (MOMENTS, "buckets/64x64/moments/zarr.json", *FLIPPED)),
    (lambda fs, root: put(fs, f"{root}/notes.txt", b"x"), "notes.txt", "stray"),
    (lambda fs, root: put(fs, f"{root}/a/../../plan.json", b"x"), "a/../../plan.json", "stray"),
]


@pytest.mark.parametrize(("change", "path", "cause"), SPOILT)
def test_what_is_wrong_at_a_url_is_found(
    change: Callable[[Any, str], None], path: str, cause: str, caption_store: LatentStore
) -> None:
    change(upload(caption_store.path, "faulty://spoilt"), "spoilt")
    found = verify_remote("faulty://spoilt")
    assert [(finding.path, finding.cause) for finding in found.findings] == [(path, cause)]
    assert found.damaged


def test_inspect_and_verify_read_a_url(
    s3: str, caption_store: LatentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(caption_store.path, f"{s3}/shown")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    runner = CliRunner()
    told = runner.invoke(app, ["inspect", f"{s3}/shown", "--json"])
    values, there = json.loads(told.stdout), StoreFacts(caption_store).to_json()
    assert values == there | {"store": f"{s3}/shown"}
    key = caption_store.records["key"][0].as_py()
    assert f"key                 {key}" in runner.invoke(app, ["inspect", f"{s3}/shown", key]).stdout
    checked = runner.invoke(app, ["verify", f"{s3}/shown"])
    assert (checked.exit_code, checked.stdout.splitlines()[-1].split()) == (0, ["state", "whole"])
    refused = runner.invoke(app, ["verify", f"{s3}/shown", "--deep", "--source", "x"])
    assert "need the store in a folder" in str(refused.exception)
