"""Every kind of source, read natively and as the folder that it stands for: the same records, the same bytes."""

from __future__ import annotations

import errno
import io
import itertools
import json
import os
import re
import tarfile
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from making import (
    bytes_of,
    caption_recipe,
    encode,
    image_bytes,
    label_recipe,
    no_free_files,
    tree_digest,
    write_file,
)
from s3_server import s3_server

from leandit.datasets.remote.reader import RemoteReader
from leandit.datasets.store import LatentStore
from leandit.errors import RecordRejected, ResourceError, SourceError
from leandit.precompute.config import SourceSection
from leandit.precompute.images import faults
from leandit.precompute.images.decoder_child import HEADER_BYTES
from leandit.precompute.images.decoders import Decoders
from leandit.precompute.planning.images import plan_images
from leandit.precompute.run.rejects import RejectLimits
from leandit.precompute.sources.files.files import LocalFiles
from leandit.precompute.sources.source import Source, list_source
from leandit.precompute.sources.tables import embedded

pytestmark = pytest.mark.usefixtures("quick")

WNIDS = ("n01440764", "n01443537", "n02084071")
PER_CLASS = 3
SIZES = ((64, 64), (60, 100), (100, 60))


def jpeg(seed: int, *size_px: int) -> bytes:
    return image_bytes(seed, *size_px, kind="JPEG")


LABELLED = [(f"{wnid}/{wnid}_{i}.JPEG", c, jpeg(10 * c + i)) for c, wnid in enumerate(WNIDS) for i in range(PER_CLASS)]
CAPTIONED = [(f"images/{i}.jpg", f"a red thing of kind {i % 4}", jpeg(i, *SIZES[i % 3])) for i in range(9)]


def rows_of(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def tar_of(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def parquet_of(columns: dict[str, Any], *, classes: list[str] | None = None, rows: int = 2) -> bytes:
    features, buffer = {"label": {"_type": "ClassLabel", "names": classes}}, io.BytesIO()
    about = {"huggingface": json.dumps({"info": {"features": features}})} if classes else None
    pq.write_table(pa.table(columns).replace_schema_metadata(about), buffer, row_group_size=rows)
    return buffer.getvalue()


def struct_column(contents: list[bytes]) -> pa.Array:
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    return pa.array([{"bytes": content, "path": f"{i}.jpg"} for i, content in enumerate(contents)], kind)


class Kind(NamedTuple):
    """A way to hand images over: the kind that is found, files by path, keys of the records, and the source itself."""

    kind: str
    files: dict[str, bytes]
    keys: list[str]
    classes: list[str] | None = None
    source: str = ""

    def write(self, root: Path) -> Path:
        for name, content in self.files.items():
            write_file(root / name, content)
        return root / self.source


FOLDER, IMAGES = {key: data for key, _, data in LABELLED}, {key: data for key, _, data in CAPTIONED}
NAMES, NUMBERS, LIST = [*WNIDS], ["0", "1", "2"], "list.jsonl"
CLASS_TARS = {  # in another order than the folder's, as the archive may have them
    f"{wnid}.tar": tar_of({Path(key).name: data for key, c, data in reversed(LABELLED) if c == label})
    for label, wnid in reversed([*enumerate(WNIDS)])
}
PARTS = {0: LABELLED[:5], 5: LABELLED[5:]}
SHARDS = {
    f"shard-{start}.tar": tar_of(
        {
            f"{i}.{end}": content
            for i, (_, label, data) in enumerate(part, start)
            for end, content in (("jpg", data), ("cls", b"%d" % label))
        }
    )
    for start, part in PARTS.items()
}
HUB = {
    f"train-0000{i}-of-00002.parquet": parquet_of(
        {"image": struct_column([data for *_, data in part]), "label": [c for _, c, _ in part]}, classes=NAMES
    )
    for i, part in enumerate(PARTS.values())
}
BINARY = parquet_of({"jpg": [data for *_, data in LABELLED], "cls": [c for _, c, _ in LABELLED]})
LABEL_KINDS = {
    "class folders": Kind("imagefolder", FOLDER, [*FOLDER], NAMES),
    "train tar": Kind("imagenet", {"ILSVRC2012_img_train.tar": tar_of(CLASS_TARS)}, [*FOLDER], NAMES),
    "class tars": Kind("imagenet", CLASS_TARS, [*FOLDER], NAMES),
    "tars": Kind("webdataset", SHARDS, [f"shard-{i // 5 * 5}/{i}" for i in range(9)], NUMBERS),
    "hub parquet": Kind("parquet", HUB, [f"train-0000{i // 5}-of-00002/{i % 5}" for i in range(9)], NAMES),
    "binary parquet": Kind("parquet", {"all.parquet": BINARY}, [f"all/{i}" for i in range(9)], NUMBERS, "all.parquet"),
    "jsonl": Kind(
        "manifest",
        FOLDER | {LIST: rows_of([{"path": k, "label": c} for k, c, _ in LABELLED])},
        [*FOLDER],
        NUMBERS,
        LIST,
    ),
}
METADATA = rows_of([{"file_name": key, "caption": caption} for key, caption, _ in CAPTIONED])
TEXTS = {f"images/{i}.txt": f"\n {caption}\n\n".encode() for i, (_, caption, _) in enumerate(CAPTIONED)}
PIXART = [{"width": 64, "height": 64, "path": key, "prompt": caption, "x": ""} for key, caption, _ in CAPTIONED]
PIXART_FILES = {f"InternImgs/{key}": data for key, data in IMAGES.items()}
TAR = tar_of({Path(name).name: data for name, data in sorted((IMAGES | TEXTS).items())})
COLUMNS = {"text": [caption for _, caption, _ in CAPTIONED], "image": struct_column([*IMAGES.values()])}
NUMBERED = [f"images/{i}" for i in range(9)]
CAPTION_KINDS = {
    "metadata": Kind("metadata", IMAGES | {"metadata.jsonl": METADATA}, [*IMAGES]),
    "txt": Kind("sidecars", IMAGES | TEXTS, [*IMAGES]),
    "pixart": Kind(
        "manifest", PIXART_FILES | {"InternData/data_info.json": json.dumps(PIXART, indent=2).encode()}, [*IMAGES]
    ),
    "tar": Kind("webdataset", {"images.tar": TAR}, NUMBERED),
    "parquet": Kind("parquet", {"images.parquet": parquet_of(COLUMNS)}, NUMBERED),
}


def arrays_of(store: Path) -> dict[str, bytes]:
    """The bytes of all latents and embeddings."""
    return {name: content for name, content in tree_digest(store).items() if "/c/" in name}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Stores of the folders that the other kinds stand for."""
    root = tmp_path_factory.mktemp("references")
    encode(label_recipe(), LABEL_KINDS["class folders"].write(root / "folder"), root / "label")
    encode(caption_recipe(), CAPTION_KINDS["metadata"].write(root / "metadata"), root / "caption_ids")
    return {name: root / name for name in ("label", "caption_ids")}


@pytest.mark.parametrize("case", LABEL_KINDS | CAPTION_KINDS)
def test_images_give_the_same_bytes_however_they_come(case: str, references: dict[str, Path], tmp_path: Path) -> None:
    kind = (LABEL_KINDS | CAPTION_KINDS)[case]
    source, column = kind.write(tmp_path / "source"), "label" if kind.classes else "caption_ids"
    listed = list_source(source)
    assert (listed.kind, listed.classes) == (kind.kind, kind.classes)
    assert kind.classes or listed.ignored.num_files == 0
    encode(label_recipe() if kind.classes else caption_recipe(), source, tmp_path / "store")
    found, wanted = LatentStore(tmp_path / "store").records, LatentStore(references[column]).records
    assert found["key"].to_pylist() == kind.keys
    values = ["bucket", "row", column, "height_px", "width_px", "status", "checksum", "source_checksum"]
    assert found.select(values).equals(wanted.select(values))
    assert arrays_of(tmp_path / "store") == arrays_of(references[column])


def test_sidecars_are_those_of_the_same_name_and_a_bad_one_rejects_its_image(tmp_path: Path) -> None:
    good = {
        "a.txt": b"one\n  two \r\nthree",
        "a.json": b'{"label": 2, "caption": "not this one"}',
        "a-b.caption": b"of kohya, sitting",
        "a-b.txt": b"not this one",
        "a.b.txt": b"\xef\xbb\xbfwith a mark",
        "b.json": b'{"captions": ["from json"]}',
        "notes.txt": b"of nothing",
    }
    bad = {"0.json": b"{", "1.json": b"[" * 100_000, "2.json": b'{"label": "cat"}'}
    bad |= {"3.txt": b"\xff\xfe", "4.txt": b"x\n" * 300, "5.txt": b"x" * (1 << 20) + b"x", "6.json": b'{"text": 5}'}
    for name, content in (good | bad).items():
        write_file(tmp_path / name, content)
    os.mkfifo(tmp_path / "7.txt")
    for name in ("a.png", "a.b.png", "a-b.png", "b.png", "a.d/a.png", *(f"{i}.png" for i in range(8))):
        write_file(tmp_path / name, jpeg(0))
    source = list_source(tmp_path)
    assert {r.key: (r.label, r.captions) for r in source.records if not r.problem} == {
        "a.png": (2, ("one", "two", "three")),
        "a.b.png": (-1, ("with a mark",)),
        "a-b.png": (-1, ("of kohya, sitting",)),
        "b.png": (-1, ("from json",)),
        "a.d/a.png": (-1, ()),
    }
    rejected = {r.key: r.problem[0] for r in source.records if r.problem}
    assert rejected == {f"{i}.png": "bad_metadata" for i in range(8)}
    assert (source.kind, source.ignored.num_files, source.classes) == ("sidecars", 1, ["0", "1", "2"])


def test_a_damaged_class_tar_costs_what_comes_after_the_damage(tmp_path: Path) -> None:
    whole = CLASS_TARS["n01443537.tar"]
    damaged = bytearray(whole)
    damaged[damaged.index(b"n01443537_1")] ^= 1  # the second of three headers
    for content in (bytes(damaged), whole[:700], b"", b"no tar at all" * 100):
        source = list_source(write_file(tmp_path / "train.tar", tar_of(CLASS_TARS | {"n01443537.tar": content})))
        assert {r.key: r.problem[0] for r in source.records if r.problem} == {"n01443537.tar": "unreadable"}
        assert source.classes == list(WNIDS)
        good = {r.key for r in source.records if not r.problem}
        kept = {"n01443537/n01443537_2.JPEG"} if content == bytes(damaged) else set()  # the last of the folder is first
        assert good == kept | {key for key in FOLDER if "n01443537" not in key}
        for record in source.records:
            assert record.problem or bytes_of(source, record) == FOLDER[record.key]


def test_the_validation_tar_takes_its_labels_from_the_list_beside_it(tmp_path: Path) -> None:
    members = {f"ILSVRC2012_val_{i:08d}.JPEG": jpeg(i) for i in (2, 1, 3, 4)}
    tar = write_file(tmp_path / "ILSVRC2012_img_val.tar", tar_of(members))
    assert [(r.key[-6], r.label) for r in list_source(tar).records] == [(str(i), -1) for i in (1, 2, 3, 4)]
    write_file(tmp_path / "imagenet_2012_validation_synset_labels.txt", "\n".join((WNIDS[2], *WNIDS[:2])).encode())
    source = list_source(tar)
    assert source.classes == list(WNIDS)
    assert [r.label for r in source.records] == [2, 0, 1, -1]
    assert source.records[3].problem
    assert bytes_of(source, source.records[0]) == jpeg(1)
    write_file(tmp_path / "imagenet_2012_validation_synset_labels.txt", b"490\n361\n")  # the devkit's numbers
    with pytest.raises(SourceError, match="expected wnids"):
        list_source(tar)


def test_a_parquet_file_that_changed_rejects_what_is_not_there_any_more(tmp_path: Path) -> None:
    columns = {"image": struct_column([jpeg(i) for i in range(4)])}
    path = tmp_path / "a.parquet"
    for row, reason, change in (
        (3, "source_changed", lambda: path.write_bytes(parquet_of({"image": struct_column([jpeg(0)])}))),
        (0, "unreadable", path.unlink),
        (0, "unreadable", lambda: path.write_bytes(b"\0" * 3000 + path.read_bytes()[3000:])),
    ):
        path.write_bytes(parquet_of(columns))
        source = list_source(tmp_path)
        change()
        with pytest.raises(RecordRejected) as caught:
            bytes_of(source, source.records[row])
        assert caught.value.reason == reason


def test_a_label_without_a_class_is_refused_and_left_out_where_labels_are(tmp_path: Path) -> None:
    columns = {"image": struct_column([jpeg(0), jpeg(1)]), "label": [1, 5]}
    write_file(tmp_path / "a.parquet", parquet_of(columns, classes=["cat", "dog"]))
    with pytest.raises(SourceError, match=r"label 5, but it names 2 classes.*source\.labels=none"):
        list_source(tmp_path)
    assert list_source(tmp_path, SourceSection(labels="none")).records.largest_label() == -1


def test_row_groups_beyond_what_is_kept_are_read_and_too_large_ones_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = [os.urandom(1000) for _ in range(40)]
    write_file(tmp_path / "a.parquet", parquet_of({"image": contents}, rows=4))
    monkeypatch.setattr(embedded, "CACHE_BYTES", 9000)
    source = list_source(tmp_path)
    assert [bytes_of(source, record) for record in source.records] == contents
    monkeypatch.setattr(embedded, "MAX_GROUP_BYTES", 3000)
    with pytest.raises(SourceError, match=r"row group 0.*smaller row groups"):
        list_source(tmp_path)


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """A server of the S3 protocol, with the bucket "images"."""
    with s3_server("images") as url:
        yield url


def at_url(base: str, root: Path, source: Path) -> str:
    """Upload what lies below a folder; returns the URL of the source in it."""
    fs, top = fsspec.core.url_to_fs(base)
    for name, content in tree_digest(root).items():
        fs.pipe_file(f"{top}/{name}", content)
    relative = source.relative_to(root).as_posix()
    return base if relative == "." else f"{base}/{relative}"


@pytest.mark.parametrize(("where", "every"), [("s3", 6), pytest.param("s3", 1, marks=pytest.mark.slow), ("memory", 1)])
def test_every_kind_at_a_url_lists_and_reads_as_here(where: str, every: int, s3: str, tmp_path: Path) -> None:
    for case, kind in [*(LABEL_KINDS | CAPTION_KINDS).items()][::every]:
        root = tmp_path / case.replace(" ", "-")
        source = kind.write(root)
        base = f"{s3 if where == 's3' else 'memory://every'}/{tmp_path.name}/{root.name}"
        here, there = list_source(source), list_source(at_url(base, root, source))
        for name in ("kind", "classes"):
            assert getattr(there, name) == getattr(here, name), case
        for ours, theirs in zip(here.records, there.records, strict=True):
            assert replace(theirs, mtime_ns=0) == replace(ours, mtime_ns=0)
            assert bytes_of(there, theirs) == bytes_of(here, ours)


@pytest.mark.parametrize("where", ["s3", "memory"])
def test_an_object_that_changed_or_went_is_rejected_with_its_reason(where: str, s3: str, tmp_path: Path) -> None:
    root = LABEL_KINDS["class folders"].write(tmp_path / "source")
    base = f"{s3 if where == 's3' else 'memory://changes'}/{tmp_path.name}"
    source = list_source(at_url(base, root, root))
    fs, top = fsspec.core.url_to_fs(base)
    before = source.listing_hash()
    longer, shorter, gone, alike = (source.records[i] for i in range(4))
    fs.pipe_file(f"{top}/{alike.path}", bytes(alike.num_bytes))  # another object of the same size
    assert list_source(base).listing_hash() != before
    fs.pipe_file(f"{top}/{longer.path}", jpeg(77, 90, 90))
    fs.pipe_file(f"{top}/{shorter.path}", b"x")
    fs.rm_file(f"{top}/{gone.path}")
    for record, reason in ((longer, "source_changed"), (shorter, "source_changed"), (gone, "unreadable")):
        with pytest.raises(RecordRejected) as caught:
            bytes_of(source, record)
        assert caught.value.reason == reason


def bytes_read(patch: pytest.MonkeyPatch) -> Counter[str]:
    """How many bytes of each object are read from here on."""
    read, original = Counter[str](), RemoteReader.read

    def counting(self: RemoteReader, path: str, start: int, end: int) -> bytes:
        data = original(self, path, start, end)
        read[path] += len(data)
        return data

    patch.setattr(RemoteReader, "read", counting)
    return read


def planned_images(source: Source) -> pa.Table:
    recipe = label_recipe("source.labels=none", "images.min_px=2")
    with Decoders(1) as decoders:
        limits = RejectLimits(recipe.source, len(source.records), is_planning=True)
        return plan_images(source, source.records, recipe, decoders, limits)


def test_planning_from_a_url_reads_the_first_bytes_of_a_jpeg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large, small = jpeg(1, 700, 900), jpeg(2)
    content = large[:2] + (b"\xff\xfe\x80\x00" + bytes(0x7FFE)) * 3 + large[2:]  # comments before the size
    for name, data in (("small", small), ("large", large + bytes(200_000)), ("late", content)):
        write_file(tmp_path / f"source/{name}.jpg", data)
    source = list_source(at_url(f"memory://heads/{tmp_path.name}", tmp_path / "source", tmp_path / "source"))
    read = bytes_read(monkeypatch)
    planned = planned_images(source)
    assert planned["height_px"].to_pylist() == [700, 700, 40]
    assert read["small.jpg"] == len(small)
    assert read["large.jpg"] == HEADER_BYTES
    assert read["late.jpg"] == HEADER_BYTES + len(content)


@pytest.mark.parametrize("crop", ["adm", "bucket"])
def test_where_there_is_one_bucket_a_url_is_read_once_and_the_store_is_that_of_a_folder(
    crop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = {f"{number}.jpg": jpeg(number, *size) for number, size in enumerate([(64, 64), (60, 190), (100, 33)])}
    for name, content in contents.items():
        write_file(tmp_path / "source" / name, content)
    url = at_url(f"memory://once-{crop}/{tmp_path.name}", tmp_path / "source", tmp_path / "source")
    read = bytes_read(monkeypatch)
    recipe = label_recipe("source.labels=none", f"images.crop={crop}", "vae.min_psnr=0")
    here = encode(recipe, tmp_path / "source", tmp_path / "here").manifest
    there = encode(recipe, url, tmp_path / "there").manifest
    assert dict(read) == {name: len(content) for name, content in contents.items()}
    assert there.root_hash == here.root_hash  # sizes and crops among the rest
    assert LatentStore(tmp_path / "there").records["height_px"].to_pylist() == [64, 60, 100]


def test_planning_from_a_url_has_many_fetches_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(256):
        write_file(tmp_path / f"source/{number}.jpg", jpeg(number % 3))
    source = list_source(at_url(f"memory://many/{tmp_path.name}", tmp_path / "source", tmp_path / "source"))
    together, begun, original = threading.Barrier(32), itertools.count(), RemoteReader.read

    def read(*where: Any) -> bytes:
        if next(begun) < 32:
            together.wait(timeout=240)  # for 31 others
        return original(*where)

    monkeypatch.setattr(RemoteReader, "read", read)
    assert planned_images(source)["row"].to_pylist() == list(range(256))


def test_a_url_with_nothing_or_no_file_system_is_an_error_that_names_it(s3: str) -> None:
    with pytest.raises(SourceError, match=r"s3://images/nowhere'.*no images found"):
        list_source(f"{s3}/nowhere")
    with pytest.raises(SourceError, match=r"source 's3://no-such-bucket/x'"):
        list_source("s3://no-such-bucket/x")
    with pytest.raises(ValueError, match=r"source 'nothing://x/y'.*Check the URL"):
        list_source("nothing://x/y")


class Ranges(SimpleHTTPRequestHandler):
    """Answers ranges as well, which ``python -m http.server`` does not."""

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        wanted = re.fullmatch(r"bytes=([0-9]+)-([0-9]+)", self.headers.get("Range", ""))
        if not wanted or not path.is_file():
            super().do_GET()
            return
        data = path.read_bytes()[int(wanted[1]) : int(wanted[2]) + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def http(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of the test's folder, on a server of the kind that is the fixture's parameter."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(request.param, directory=str(tmp_path))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("http", [Ranges], indirect=True)
def test_braces_and_a_root_over_http_are_read_where_folders_answer_with_a_page(http: str, tmp_path: Path) -> None:
    LABEL_KINDS["tars"].write(tmp_path / "tars")
    LABEL_KINDS["jsonl"].write(tmp_path / "images")
    listed = list_source(f"{http}/tars/shard-{{0,5}}.tar")
    assert [bytes_of(listed, record) for record in listed.records] == [data for *_, data in LABELLED]
    listed = list_source(tmp_path / "images/list.jsonl", SourceSection(root=f"{http}/images"))
    assert [bytes_of(listed, record) for record in listed.records] == [data for *_, data in LABELLED]


@pytest.mark.parametrize("http", [SimpleHTTPRequestHandler], indirect=True)
def test_what_http_cannot_do_is_one_error_and_no_reject(http: str, tmp_path: Path) -> None:
    write_file(tmp_path / "tars/big.tar", tar_of({"0.jpg": bytes(5 << 20)}))
    for source, message in (
        ("tars/big.tar", "ignores Range requests.*nginx or S3, or copy the files"),
        ("tars", "HTTP cannot list a folder.*braces.*s3://"),
        ("nowhere", "HTTP cannot list a folder.*braces.*s3://"),
    ):
        with pytest.raises(SourceError, match=message):
            list_source(f"{http}/{source}")
    write_file(tmp_path / "a.jpg", jpeg(1) + bytes(HEADER_BYTES))
    write_file(tmp_path / "list.jsonl", rows_of([{"path": "a.jpg"}]))
    with pytest.raises(SourceError, match="ignores Range requests"):
        planned_images(list_source(f"{http}/list.jsonl"))


class FailingFile(io.BytesIO):
    """A file whose disk fails for a number of reads."""

    def __init__(self, file: BinaryIO, failures: list[OSError]) -> None:
        with file:
            super().__init__(file.read())
        self._failures = failures

    def read(self, size: int | None = -1) -> bytes:
        if self._failures:
            raise self._failures.pop()
        return super().read(size)


def test_a_disk_that_fails_or_too_few_open_files_are_no_reject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "PAUSES", (0.0, 0.0, 0.0))
    write_file(tmp_path / "a.parquet", parquet_of({"image": struct_column([jpeg(0), jpeg(1)])}))
    source, failures, opened = list_source(tmp_path), list[OSError](), LocalFiles.open
    too_few = r"Too many open files.*ulimit -n.*No record was rejected"
    with no_free_files(), pytest.raises(ResourceError, match=too_few):
        bytes_of(source, source.records[0])
    monkeypatch.setattr(LocalFiles, "open", lambda self, *a, **k: FailingFile(opened(self, *a, **k), failures))
    failures[:] = [OSError(errno.EIO, "Input/output error")] * 3
    assert bytes_of(source, source.records[1]) == jpeg(1)  # three tries met it
    source = list_source(tmp_path)
    failures[:] = [OSError(errno.ESTALE, "Stale file handle")] * 100
    with pytest.raises(ResourceError, match=r"a\.parquet.*No record was rejected") as caught:
        bytes_of(source, source.records[1])
    assert caught.value.exit_code == 5
    with pytest.raises(ResourceError, match="No record was rejected"):
        list_source(tmp_path)
