"""Files of others (docs/security.md): hostile ones end in one clear error, or in right numbers."""

from __future__ import annotations

import ast
import contextlib
import copy
import hashlib
import io
import itertools
import json
import os
import pickle
import random
import resource
import shutil
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from faults import start
from features import Evil
from forked import run_forked
from making import (
    CPU,
    LABEL_RECIPE,
    NO_CHECK,
    Leandit,
    image_bytes,
    make_class_folder,
    train_recipe,
    tree_digest,
    write_file,
)
from repository import MODULES, name_of, parsed
from stores import Everything, copy_of
from tiny_models import make_dinov2, save_qwen3

from leandit.datasets.arrays.shard_file import ShardFile
from leandit.datasets.disk.hashing import read_json, sha256_of
from leandit.datasets.format.schema import CommitRecord, LocalFile, Manifest
from leandit.datasets.format.table_schemas import CAPTIONS_SCHEMA, PLACES, PLAN_SCHEMA, RECORDS_SCHEMA
from leandit.datasets.format.tables import map_parquet, parquet_file
from leandit.datasets.format.zarr_shard import CODECS, ArrayLayout, pack_chunk
from leandit.datasets.revisions.catalog import file_entry
from leandit.datasets.store import LatentStore
from leandit.errors import DamageError, EncoderError, LeanditError, RunError, SourceError, StoreError
from leandit.precompute.config import FeatureSection, TextSection, VaeSection
from leandit.precompute.encoders.model_files import local_folder
from leandit.precompute.encoders.text.encoder import CaptionEncoder
from leandit.precompute.encoders.text.tokenizer import CaptionTokenizer
from leandit.precompute.encoders.vae import ImageEncoder
from leandit.precompute.encoders.vision.features import FeatureEncoder
from leandit.precompute.sources.files.record import MAX_CAPTION_CHARS, MAX_CAPTIONS, MAX_TEXT_BYTES, SourceRecord
from leandit.precompute.sources.source import list_source
from leandit.precompute.sources.tables.formats import MAX_ROW_BYTES
from leandit.tools.inspection.store_facts import StoreFacts, describe_record
from leandit.tools.sample.request import SampleRequest
from leandit.tools.sample.sample import sample_grid
from leandit.train.loop import StopRequest, train
from leandit.train.weights.checkpoint import find

ROOM_BYTES = 4 << 30  # of address space beyond what the libraries take
MAX_SECONDS = 10.0  # of the processor, so that other processes do not count
Spoil = Callable[[Path], Any]


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """No test may be given much more memory than it has: what would fill it ends in an error instead."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    if pages:
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM_BYTES, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


def peak_mib() -> float:
    """Memory that this process had at most since its peak was last forgotten, in MiB."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024


@contextlib.contextmanager
def cheap(most_mib: float = 200) -> Iterator[None]:
    """What happens within takes little time and memory, and any error of ours is one short line."""
    Path("/proc/self/clear_refs").write_text("5")
    before, start = peak_mib(), time.process_time()
    try:
        yield
    except LeanditError as error:
        assert "\n" not in str(error)  # noqa: PT017 - either outcome is right
        assert len(str(error)) < 3000  # noqa: PT017
        raise
    finally:
        assert time.process_time() - start < MAX_SECONDS
        assert peak_mib() - before < most_mib


REVISION = "revisions/000001"
MANIFEST, RECORDS = f"{REVISION}/manifest.json", f"{REVISION}/records.parquet"


def forge(root: Path, manifest: str = MANIFEST) -> None:
    """Fit the manifest to what is in the store now, so that every hash is right and only validation stands."""
    value = json.loads((root / manifest).read_text())
    for entry in value["files"]:
        if (root / entry["path"]).is_file():
            entry |= file_entry(entry["path"], (root / entry["path"]).read_bytes()).model_dump()
    write_manifest(root, value, manifest)


def write_manifest(root: Path, value: Any, manifest: str = MANIFEST) -> None:
    """Write a manifest with the hash that a reader computes, where it can be computed."""
    try:
        value["root_hash"] = Manifest.model_validate(value).with_hash().root_hash
    except (ValueError, TypeError):
        if isinstance(value, dict):
            value["root_hash"] = "0" * 64
    (root / manifest).write_text(json.dumps(value))


def changed(change: Callable[[Any], Any], manifest: str = MANIFEST) -> Spoil:
    """A manifest that is changed, with the hash that fits."""

    def spoil(root: Path) -> None:
        change(value := json.loads((root / manifest).read_text()))
        write_manifest(root, value, manifest)

    return spoil


def put(value: Any, *place: Any, manifest: str = MANIFEST) -> Spoil:
    """Another value at a place of a manifest."""

    def change(document: Any) -> None:
        for key in place[:-1]:
            document = document[key]
        document[place[-1]] = value

    return changed(change, manifest)


def in_array(name: str, manifest: str = MANIFEST, *, rows: int | None = None, **values: Any) -> Spoil:
    """Other values of an array; ``rows``: in shape and ranges, so that it is consistent in itself."""

    def change(document: Any) -> None:
        (entry,) = (entry for entry in document["arrays"] if entry["path"] == name)
        entry |= values if rows is None else {"shape": [rows, *entry["shape"][1:]], "ranges": [[1, 0, rows]], **values}

    return changed(change, manifest)


def change_column(path: Path, column: str, change: Callable[[list[Any]], Any]) -> None:
    """Change a column of a table in place."""
    table = pq.read_table(path)
    change(values := table[column].to_pylist())
    at = table.schema.get_field_index(column)
    pq.write_table(table.set_column(at, table.schema.field(at), pa.array(values, table.schema.field(at).type)), path)


def read_all(path: Path, *, allow_incomplete: bool = False) -> str:
    """Read all of a store by every way that there is; a digest of its numbers."""
    store = LatentStore(path, allow_incomplete=allow_incomplete)
    digest = hashlib.sha256()
    for bucket in store.buckets:
        index = store.index(bucket)
        digest.update(store.latents(bucket).take(index.rows).tobytes())
        digest.update(index.labels.tobytes())
    for i in range(store.captions.num_rows):
        digest.update(store.caption_embedding(i).tobytes())
    digest.update(store.null_caption.tobytes())
    for i in range(store.records.num_rows):
        record = store.record_at(i)
        if store.complete:
            describe_record(store, record)
    facts = StoreFacts(store)
    _ = facts.rejected
    if store.complete:
        facts.to_json()
    return digest.hexdigest()


def refused_or_right(path: Path, wanted: str, **options: Any) -> str:
    """Read a forged store: the error's class, or "right" where the numbers are those of the store as it was."""
    try:
        with cheap():
            return "right" if read_all(path, **options) == wanted else "other numbers"
    except LeanditError as error:
        return type(error).__name__


# ------------------------------------------------------------ stores

MOMENTS, HUGE = "buckets/64x64/moments", 10**12


def without_array(name: str) -> Spoil:
    """A manifest without an array and its shards."""

    def change(document: Any) -> None:
        document["arrays"] = [entry for entry in document["arrays"] if entry["path"] != name]
        document["files"] = [entry for entry in document["files"] if not entry["path"].startswith(f"{name}/c/")]

    return changed(change)


def at(column: str, value: Any) -> Spoil:
    """Another first value in a column of the records."""

    def spoil(root: Path) -> None:
        change_column(root / RECORDS, column, lambda values: values.__setitem__(0, value))
        forge(root)

    return spoil


def in_index(name: str, value: int | None) -> Spoil:
    """Another first number in a file of the index, or, for None, one number less."""

    def spoil(root: Path) -> None:
        path = root / REVISION / "index" / f"{name}.bin"
        numbers = np.fromfile(path, "<i4")
        numbers[0] = numbers[0] if value is None else value
        numbers[: len(numbers) - (value is None)].tofile(path)
        forge(root)

    return spoil


def each(what: str, spoil: Callable[[str, Any], Spoil], table: Mapping[str, Sequence[Any]]) -> dict[str, Spoil]:
    """A case for each value of each key."""
    return {f"{what}: {key} {str(value)[:20]!r}": spoil(key, value) for key in table for value in table[key]}


def rows(name: str, count: int, manifest: str = MANIFEST, **values: Any) -> Spoil:
    """So many rows of an array, in one shard of one chunk unless others are given."""
    return in_array(name, manifest, rows=count, **{"shard_rows": count, "chunk_rows": count} | values)


OF_ARRAY = {"shape": ([], [5, 8, 64]), "dtype": ("|O", "float32"), "codec": ("numcodecs.pickle", "zstd", "blosc")}
OF_ARRAY |= {"shard_rows": (0,), "path": ("buckets/64x64/features/x/cls", "../../x", "buckets/9999x9999/moments")}
OF_ARRAY |= {"ranges": ([], [[1, 0, 5], [1, 0, 5]], [[1, 0, 2], [1, 3, 5]], [[2, 0, 5]], [[1, -5, 5]])}
OF_INDEX = {"rows": (10**6, -1, None), "records": (10**6, -1), "labels": (10**6, -2), "caption_ids": (10**6, 2**31 - 1)}
OF_INDEX |= {"caption_starts": (-5, 2**31 - 1), "caption_start": (10**6, -1), "caption_length": (2**31 - 1, -1, None)}
OF_RECORDS = {"caption_ids": ([10**6], [-1], [None]), "row": (10**6, -7, None), "key": (None,)}
OF_RECORDS |= {"revision": (2**31 - 1,), "label": (-(2**63),), "bucket": ("../x", "9999999x9999999")}
OF_MANIFEST = {"buckets": ({"../x": 1}, {"9999999x9999999": 1}, {"64x64": -1}), "revision": (HUGE,)}
OF_MANIFEST |= {"num_captions": (10**9,)}
OF_LATENT = {"channels": (0, 10**9), "downscale": (0, 1000), "dtype": ("object",), "scale": ([1.0],)}
PATHS = {"path": ("../../x", "/etc/passwd", "a\0b", "a" * 5000, "\ud800")}
CLAIMS: dict[str, Spoil] = {
    "10^12 rows": rows(MOMENTS, HUGE, chunk_rows=1),
    "10^12 rows in one chunk": rows(MOMENTS, HUGE),
    "10^12 shards": rows(MOMENTS, HUGE, shard_rows=1, chunk_rows=1),
    "10^12 tokens": rows("captions/embeddings", HUGE),
    "10^12 tokens of the empty caption": rows("captions/null", HUGE),
    **{f"{count} rows": in_array(MOMENTS, rows=count) for count in (10**30, 0, -5, 4)},
    **each("array", lambda key, value: in_array(MOMENTS, **{key: value}), OF_ARRAY),
    "an array twice": changed(lambda manifest: manifest["arrays"].append(manifest["arrays"][0])),
    **{f"no {name}": without_array(name) for name in (MOMENTS, "captions/embeddings", "captions/null")},
    "deep JSON": lambda root: (root / MANIFEST).write_text("[" * 10_000 + "]" * 10_000),
    "a long JSON": lambda root: (root / MANIFEST).write_text(f'"{"x" * (2 << 20)}"'),
    **each("index", in_index, OF_INDEX),
    **each("records", at, OF_RECORDS),
    **each("files", lambda key, value: put(value, "files", 0, key), PATHS),
    **each("manifest", lambda key, value: put(value, key), OF_MANIFEST),
    **each("latent", lambda key, value: put(value, "spec", "latent", key), OF_LATENT),
    **each("text", lambda key, value: put(value, "spec", "text", key), {"width": (HUGE,), "max_tokens": (HUGE,)}),
}


@pytest.mark.parametrize("spoil", CLAIMS.values(), ids=CLAIMS.keys())
def test_a_claim_that_cannot_be_is_refused_with_all_hashes_right(spoil: Spoil, copied: Path) -> None:
    spoil(copied)
    with pytest.raises((DamageError, StoreError)), cheap():
        read_all(copied)


@pytest.mark.parametrize("spoil", each("index", in_index, OF_INDEX).values(), ids=each("index", in_index, OF_INDEX))
def test_inspecting_an_index_of_numbers_that_cannot_be_takes_no_memory(
    spoil: Spoil, copied: Path, leandit: Leandit
) -> None:
    """A count of what such numbers name would ask for 17 GB."""
    spoil(copied)
    with cheap():
        ended = leandit("inspect", copied)
    assert ended.code in (0, 4), ended  # not all of these numbers are shown
    assert "unexpected" not in ended.err


def test_no_metadata_of_zarr_is_trusted(copied: Path) -> None:
    wanted = read_all(copied)
    pickled = '{"zarr_format": 2, "filters": [{"id": "pickle"}], "dtype": "|O", "shape": [1], "chunks": [1]}'
    for name, content in itertools.product(["zarr.json", f"{MOMENTS}/zarr.json"], [pickled, "[" * 10_000]):
        (copied / name).write_text(content)
        assert read_all(copied) == wanted


ADDED, DINO = "revisions/000003/manifest.json", "buckets/64x64/features/dino"


def in_named(kind: str, key: str, value: Any) -> Spoil:
    """Another value in the spec of the first named text encoder or feature."""
    return put(value, "spec", kind, 0, "spec", key, manifest=ADDED)


def in_files(change: Callable[[list[Any]], Any]) -> Spoil:
    return changed(lambda manifest: change(manifest["files"]), ADDED)


def without_file(ending: str) -> Spoil:
    return in_files(lambda files: files.remove(next(entry for entry in files if entry["path"].endswith(ending))))


def with_file(path: str) -> Spoil:
    return in_files(lambda files: files.append(files[0] | {"path": path}))


def renamed(new: str) -> Spoil:
    """The array of the class tokens under another path."""

    def change(manifest: Any) -> None:
        for array in manifest["arrays"]:
            array["path"] = new if array["path"] == f"{DINO}/cls" else array["path"]
        for entry in manifest["files"]:
            entry["path"] = entry["path"].replace(f"{DINO}/cls/c/", f"{new}/c/")

    return changed(change, ADDED)


OF_FEATURE = {"width": (0, HUGE), "patch_px": (0,), "resolution_px": (HUGE,), "images_px": (0,), "dtype": ("object",)}
OF_FEATURE |= {"output": ("patches; cls",)}
OF_PATCHES = {"ranges": ([[3, 0, 2], [1, 2, 4]],), "shard_rows": (4,), "chunk_rows": (3,)}
NAMES = {"features": ("../../x", "", "a\0b", "x" * 5000, "other"), "texts": ("/etc", "other")}
OF_MANY: dict[str, Spoil] = {
    "nothing is spoilt": forge,
    **each("feature", partial(in_named, "features"), OF_FEATURE),
    **each("text", partial(in_named, "texts"), {"width": (HUGE,), "max_tokens": (0,), "pooled_width": (-1,)}),
    **each("name", lambda kind, name: put(name, "spec", kind, 0, "name", manifest=ADDED), NAMES),
    **{name: rows(name, HUGE, ADDED) for name in (f"{DINO}/patches", f"{DINO}/cls_scales", "captions/vector/pooled")},
    "10^12 tokens": rows("captions/llm/embeddings", HUGE, ADDED),
    "one row less": rows(f"{DINO}/patches", 1, ADDED),
    **each("patches", lambda key, value: in_array(f"{DINO}/patches", ADDED, **{key: value}), OF_PATCHES),
    "flipped latents of other rows": in_array(f"{MOMENTS}_flip", ADDED, rows=2),
    "a shard is not in the files": without_file(f"{DINO}/cls/c/0/0"),
    "a table is missing": without_file("captions.parquet"),
    **{path: with_file(path) for path in (f"{MOMENTS}/c/99/0/0/0", "zarr.json", "captions/../../c/0")},
    "a file twice": in_files(lambda files: files.append(files[0])),
    **{f"an array {path}": renamed(path) for path in ("buckets/64x64/other", "cls")},
}


def read_named(path: Path) -> None:
    """Read all text encoders and features of a store."""
    store = LatentStore(path)
    for bucket in store.buckets:
        for name in store.features:
            feature = store.feature(name, bucket)
            for record, output in itertools.product(store.index(bucket).rows, feature.outputs):
                feature.row(int(record), output)
    for name in store.texts:
        text = store.text(name)
        for caption in range(store.captions.num_rows):
            text.stored_rows(caption)
        text.stored_null_rows  # noqa: B018
    StoreFacts(store).to_json()


@pytest.mark.parametrize("spoil", OF_MANY.values(), ids=OF_MANY.keys())
def test_a_false_claim_of_a_feature_or_text_is_refused(spoil: Spoil, everything: Everything, tmp_path: Path) -> None:
    forge(root := copy_of(everything.added, tmp_path / "copied"), ADDED)
    spoil(root)
    with pytest.raises((DamageError, StoreError)) if spoil is not forge else contextlib.nullcontext(), cheap():
        read_named(root)


def test_a_link_is_read_as_numbers_of_the_right_hash_only(copied: Path, tmp_path: Path) -> None:
    """Download caches keep the files of a folder elsewhere and link to them, so a link is no attack by itself."""
    wanted = read_all(copied)
    shard = copied / MOMENTS / "c/0/0/0/0"
    shard.rename(tmp_path / "blob")
    shard.symlink_to(tmp_path / "blob")
    assert refused_or_right(copied, wanted) == "right"
    shard.unlink()
    shard.symlink_to("/etc/passwd")
    assert refused_or_right(copied, wanted) == "DamageError"
    forge(copied)
    assert refused_or_right(copied, wanted) == "DamageError"
    for name in ("captions.parquet", "manifest.json"):
        path = copied / REVISION / name
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(DamageError):
            LatentStore(copied)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(LeanditError):
        read_json(path)


OTHER_VALUES: list[Any] = [None, True, -1, 0, 10**12, 10**400, 1e300, "", "x" * 3000, "../../x", "\ud800"]
OTHER_VALUES += [[], [[]], {}, {"a": {}}]


def fuzzed(document: Any, rng: random.Random, count: int) -> Iterator[Any]:
    """The document with one value of it replaced by one of another type, at each place in turn."""

    def places(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, child in items:
            yield (*path, key)
            yield from places(child, (*path, key))

    found = list(itertools.product(places(document, ()), OTHER_VALUES))
    for path, other in rng.sample(found, min(count, len(found))):
        parent = mutant = copy.deepcopy(document)
        for key in path[:-1]:
            parent = parent[key]
        parent[path[-1]] = other
        yield mutant


def write_hashed(path: Path, kind: Any, value: Any, field: str) -> None:
    """Write a file that has its own hash, in a field."""
    try:
        value[field] = getattr(kind.model_validate(value).with_hash(), field)
    except ValueError:
        value[field] = "0" * 64
    path.write_text(json.dumps(value))


def write_plan(root: Path, head: Any) -> None:
    head.pop("sha256", None)
    try:
        head["sha256"] = sha256_of(head)
    except ValueError:
        head["sha256"] = "0" * 64
    (root / REVISION / "plan/plan.json").write_text(json.dumps(head))


PLAN, COMMITS = "plan/plan.json", ("commits/buckets/64x64/000000.json", "commits/captions/000000.json")


@pytest.mark.parametrize("name", ["manifest.json", "local.json", "twin/local.json", PLAN, *COMMITS])
def test_any_json_of_a_store_with_wrong_types_is_refused_or_harmless(
    name: str, caption_store: LatentStore, unsealed_store: Path, tmp_path: Path
) -> None:
    how = {"allow_incomplete": name in (PLAN, *COMMITS)}
    root = copy_of(unsealed_store if how["allow_incomplete"] else caption_store.path, tmp_path / "store")
    wanted, path, outcomes = read_all(root, **how), root / REVISION / name, set[str]()
    for mutant in fuzzed(json.loads(path.read_text()), random.Random(name), 25):
        if name == "manifest.json":
            write_manifest(root, mutant)
        elif name == PLAN:
            write_plan(root, mutant)
        elif name in COMMITS:
            write_hashed(path, CommitRecord, mutant, "record_hash")
        else:
            write_hashed(path, LocalFile, mutant, "sha256")
        outcomes.add(refused_or_right(root, wanted, **how))
    if name == "manifest.json":
        assert "DamageError" in outcomes
    if "local" in name:  # training needs none of it
        assert outcomes == {"right"}
    # A commit record that does not hold is as one that is not there: its rows are not stored, then.
    assert "other numbers" not in outcomes or name in COMMITS


@pytest.mark.parametrize("part", ["buckets/64x64", "captions"])
def test_results_of_rows_with_any_bytes_are_refused_or_harmless(part: str, unfinished: Path) -> None:
    wanted, rng = read_all(unfinished, allow_incomplete=True), random.Random(0)
    results, record = (unfinished / REVISION / f"commits/{part}/000000.{kind}" for kind in ("rows", "json"))
    intact, document, outcomes = results.read_bytes(), read_json(record), set[str]()
    for size in [len(intact)] * 8 + [0, 5, len(intact) - 1, len(intact) + 1]:
        mutant = bytearray(intact.ljust(size, b"x")[:size])
        for at in rng.sample(range(size), min(size, 4)):
            mutant[at] = rng.randrange(256)
        results.write_bytes(mutant)
        document["files"][-1] = file_entry(document["files"][-1]["path"], bytes(mutant)).model_dump()
        write_hashed(record, CommitRecord, document, "record_hash")
        outcomes.add(refused_or_right(unfinished, wanted, allow_incomplete=True))
    assert "DamageError" in outcomes
    assert outcomes <= {"DamageError", "right", "other numbers"}  # of a size that does not fit: as if not there


OF_PLAN = [
    ("records", "row", HUGE),
    ("records", "bucket", "../x"),
    ("records", "bucket", None),
    ("records", "bucket", "1x1"),
]
OF_PLAN += [("records", "caption_ids", [99]), ("captions", "num_tokens", 2**31 - 1), ("captions", "num_tokens", -1)]


@pytest.mark.parametrize(("name", "column", "value"), [*OF_PLAN, ("captions", "revision", 5)])
def test_a_plan_that_cannot_be_is_refused(name: str, column: str, value: Any, unfinished: Path) -> None:
    plan = unfinished / REVISION / "plan"
    change_column(plan / f"{name}.parquet", column, lambda values: values.__setitem__(0, value))
    head = json.loads((plan / "plan.json").read_text())
    for entry in head["files"]:
        entry |= file_entry(entry["path"], (plan / entry["path"]).read_bytes()).model_dump()
    write_plan(unfinished, head)
    with pytest.raises(DamageError, match="plan"):
        read_all(unfinished, allow_incomplete=True)


LAYOUT = ArrayLayout("a", (6, 16, 8, 8), "float16", 6, 1, "blosc")


def shard_file(path: Path, chunks: list[bytes], index: Callable[[np.ndarray], Any] = lambda index: None) -> Path:
    """A shard of given chunks, each with its right checksum, and an index that may be changed; all checksums fit."""
    parts = [chunk + google_crc32c.value(chunk).to_bytes(4, "little") for chunk in chunks]
    lengths = np.array([len(part) for part in parts], np.uint64)
    places = np.stack([np.cumsum(lengths) - lengths, lengths], axis=1).astype("<u8")
    index(places)
    path.write_bytes(b"".join(parts) + places.tobytes() + google_crc32c.value(places.tobytes()).to_bytes(4, "little"))
    return path


OUTSIDE = [(0, 10**6, 100), (0, 0, 10**6), (3, 2**63, 2**63 + 8), (5, 2**64 - 1, 24)]
OUTSIDE += [(3, 2**64 - 8, 16), (2, 10, 3)]  # their sum wraps around to 8; shorter than a checksum


@pytest.mark.parametrize(("row", "offset", "length"), OUTSIDE)
@pytest.mark.parametrize("codec", CODECS)
def test_a_shard_index_that_leads_outside_is_refused(
    row: int, offset: int, length: int, codec: str, tmp_path: Path
) -> None:
    def index(places: np.ndarray) -> None:
        places[row] = offset, length

    layout = ArrayLayout("a", LAYOUT.shape, "float16", 6, 1, codec)
    chunk = np.zeros(LAYOUT.shape[1:], np.float16)
    encoded = chunk.tobytes() if codec == "none" else pack_chunk(chunk)
    with pytest.raises(DamageError):
        ShardFile(shard_file(tmp_path / "s", [encoded] * 6, index), layout, 6).read(0, 6)


def in_header(field: int, value: int) -> Callable[[bytes], bytes]:
    """Another number in the header of a chunk of blosc: 4 its bytes, 8 those of a block, 12 the compressed ones."""
    return lambda chunk: chunk[:field] + value.to_bytes(4, "little") + chunk[field + 4 :]


HEADERS = {
    "it claims 2 GiB": in_header(4, 2**31 - 17),
    "it claims one byte": in_header(4, 1),
    "blocks of 2 GiB": in_header(8, 2**31 - 17),
    "blocks of no byte": in_header(8, 0),
    "it claims to be longer than the shard": in_header(12, 2**31 - 1),
    "it claims to be shorter": in_header(12, 20),
    "half a header": lambda chunk: chunk[:9],
    "no header": lambda chunk: b"",
}


@pytest.mark.parametrize("change", HEADERS.values(), ids=HEADERS.keys())
def test_a_chunk_of_a_false_header_is_refused_without_memory_for_it(
    change: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    chunk = change(pack_chunk(np.zeros(LAYOUT.shape[1:], np.float16)))
    shard = ShardFile(shard_file(tmp_path / "s", [chunk] * 6), LAYOUT, 6)
    with pytest.raises(DamageError), cheap(60):
        shard.read(0, 6)


def test_damaged_chunks_with_right_checksums_kill_no_process(tmp_path: Path) -> None:
    layout = ArrayLayout("a", (1, 16, 8, 8), "float16", 1, 1, "blosc")
    rows = np.random.default_rng(0).standard_normal(layout.shape[1:]).astype(np.float16)
    intact, rng = pack_chunk(rows), random.Random(0)

    def read_mutants() -> int:
        refused = 0
        for _ in range(250):
            mutant = bytearray(intact)
            for _ in range(rng.choice([1, 1, 4, 30])):
                mutant[rng.randrange(rng.choice([24, 64, len(mutant)]))] = rng.randrange(256)
            if rng.random() < 0.3:
                del mutant[rng.randrange(len(mutant)) :]
            try:
                ShardFile(shard_file(tmp_path / "shard", [bytes(mutant)]), layout, 1).read(0, 1)
            except DamageError:
                refused += 1
        return refused

    outcome = start(read_mutants).wait()
    assert outcome.code == 0, outcome.message
    assert outcome.value > 75


def claim_records(root: Path, number: int) -> None:
    """Let a manifest count more records."""
    value = json.loads((root / MANIFEST).read_text())
    value["num_planned"] = number
    value["num_rejected"] = number - value["num_stored"]
    (root / MANIFEST).write_text(json.dumps(value))


@pytest.mark.parametrize("bomb", ["many rows", "one long text", "one long list"])
def test_a_table_that_would_fill_the_memory_is_refused(bomb: str, copied: Path) -> None:
    path = copied / RECORDS
    table = pq.read_table(path)
    if bomb == "many rows":
        table = table.take(pa.array(np.zeros(600_000, np.int64)))
        claim_records(copied, 600_000)  # which the index does not have
    elif bomb == "one long text":
        table = table.take(pa.array(np.zeros(20_000, np.int64)))
        claim_records(copied, 20_000)
        (copied / f"{REVISION}/index/keys.bin").write_bytes(bytes(8 * 20_000))
        column = pa.DictionaryArray.from_arrays(np.zeros(20_000, np.int32), [os.urandom(9000).hex()])
        table = table.set_column(table.schema.get_field_index("detail"), "detail", column)
    else:
        at = table.schema.get_field_index("caption_ids")
        lists = pa.array([np.zeros(20_000_000, np.int32), *[[]] * (table.num_rows - 1)], pa.list_(pa.int32()))
        table = table.set_column(at, table.schema.field(at), lists)
    pq.write_table(table, path, compression="zstd", store_schema=False)
    forge(copied)
    with pytest.raises(DamageError, match=r"Parquet|bytes, expected 4800000"), cheap():
        LatentStore(copied).records  # noqa: B018


@pytest.mark.parametrize(
    ("name", "schema", "row"),
    [
        (
            "sources.parquet",
            pa.schema([PLAN_SCHEMA.field(name) for name in PLACES]),
            {"source_path": "a/long/path/of/one/file.parquet", "source_offset": 0},
        ),
        ("records.parquet", RECORDS_SCHEMA, {"key": "k", "revision": 1, "row": -1, "label": -1, "status": "rejected"}),
        ("captions.parquet", CAPTIONS_SCHEMA, {"text": "a" * 500, "revision": 1, "num_tokens": 1, "truncated": False}),
    ],
)
def test_an_honest_table_that_compresses_to_almost_nothing_is_read(
    name: str, schema: pa.Schema, row: dict[str, Any], tmp_path: Path
) -> None:
    """A million images of one Parquet file share a path, a million captions of one template its words."""
    num_rows = 700_000
    columns = {field.name: pa.repeat(pa.scalar(row.get(field.name), field.type), num_rows) for field in schema}
    path = write_file(tmp_path / name, bytes(parquet_file(pa.table(columns))))
    assert path.stat().st_size < num_rows / 4
    assert map_parquet(path, num_rows).num_rows == num_rows
    with pytest.raises(DamageError, match="the manifest counts 699999"):
        map_parquet(path, num_rows - 1)


def test_a_damaged_table_with_a_right_hash_is_refused_or_read(copied: Path) -> None:
    rng, intact = random.Random(0), (copied / RECORDS).read_bytes()
    path = copied / RECORDS
    for _ in range(80):
        mutant = bytearray(intact)
        start = rng.choice([0, len(mutant) * 2 // 3])
        for _ in range(rng.choice([1, 3, 20])):
            mutant[rng.randrange(start, len(mutant))] = rng.randrange(256)
        path.write_bytes(bytes(mutant))
        try:
            map_parquet(path)
        except DamageError as error:
            assert "records.parquet" in str(error)  # noqa: PT017 - either outcome is right


@pytest.mark.parametrize("columns", [{}, {"key": ["a"]}, {"key": [1], "revision": [1]}])
def test_a_table_of_other_columns_is_refused(columns: dict[str, list[Any]], copied: Path) -> None:
    pq.write_table(pa.table(columns), copied / RECORDS)
    forge(copied)
    with pytest.raises(DamageError, match="columns"):
        LatentStore(copied).records  # noqa: B018


# ------------------------------------------------------------ sources

Member = tuple[str, bytes | int, bytes]  # name, content or a claimed size, type
FILE, PNG = tarfile.REGTYPE, image_bytes(0, 8, 8)


def make_tar(path: Path, *members: Member, kind: int = tarfile.PAX_FORMAT) -> Path:
    """A tar with a good record "good" at its end."""
    with tarfile.open(path, "w", format=kind) as tar:
        for name, content, member_type in [*members, ("good.png", PNG, FILE)]:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = member_type, "/etc/passwd"
            if isinstance(content, bytes):
                info.size = len(content) if member_type == FILE else 0
                tar.addfile(info, io.BytesIO(content))
            else:
                info.size = content
                tar.fileobj.write(info.tobuf(kind))  # type: ignore[union-attr]
    return path


def listed(path: Path) -> dict[str, SourceRecord]:
    return {record.key: record for record in list_source(path).records}


def reasons(path: Path) -> dict[str, str]:
    return {key: record.problem[0] if record.problem else "" for key, record in listed(path).items()}


BAD = {"t/a": "bad_metadata"}


MEMBERS: list[tuple[list[Member], dict[str, str]]] = [
    ([("../../evil.png", PNG, FILE), ("/etc/evil.png", PNG, FILE)], {"t/../../evil": "", "t//etc/evil": ""}),
    ([("a.png", b"", tarfile.SYMTYPE), ("b.png", b"", tarfile.LNKTYPE)], {**BAD, "t/b": "bad_metadata"}),
    ([("a.png", PNG, FILE), ("a.txt", b"", tarfile.LNKTYPE)], BAD),
    ([("a.png", b"", tarfile.CHRTYPE), ("b.png", b"", tarfile.FIFOTYPE), ("c.png", b"", tarfile.BLKTYPE)], {}),
    ([("a", b"", tarfile.SYMTYPE), ("a.pyd", b"x", FILE), ("a.pkl", b"x", FILE)], {}),
    ([("a.png", PNG, FILE), ("a.txt", b"x" * (MAX_TEXT_BYTES + 1), FILE)], BAD),
    ([("a.png", PNG, FILE), ("a.json", b"[" * 10_000, FILE)], BAD),
    ([("a.png", PNG, FILE), ("a.json", b'{"label": NaN}', FILE)], BAD),
    ([("a.png", PNG, FILE), ("a.cls", b"9" * 5000, FILE)], BAD),
    ([("a.png", PNG, FILE), ("a.txt", b"x" * (MAX_CAPTION_CHARS + 1), FILE)], BAD),
    ([("a.png", PNG, FILE)] * 3, BAD),
    ([("a.png", b"", FILE)] * 3000, BAD),
    ([("a.0.png", b"", FILE), ("a.1.png", b"", FILE)], {"t/a.0": "", "t/a.1": ""}),  # by their last dots
    ([("a.png", PNG, FILE), ("a.cls", b"1", FILE), ("a.cls", b"2", FILE)], BAD),
    ([("caf\udce9.png", PNG, FILE)], {"t/caf\\udce9": "bad_metadata"}),
    ([("a" * 200_000 + ".png", PNG, FILE), ("e.png", b"", FILE)], {"t/e": ""}),  # no image: rejected when it is read
]


@pytest.mark.parametrize(("members", "found"), MEMBERS)
def test_a_member_of_a_tar_is_a_name_and_a_place_and_nothing_else(
    members: list[Member], found: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    tar = make_tar(tmp_path / "t.tar", *members)
    before = tree_digest(tmp_path)
    assert reasons(tar) == {"t/good": "", **found}
    assert tree_digest(tmp_path) == before  # nothing is unpacked


def test_a_sparse_member_is_rejected_and_those_after_it_are_found(tmp_path: Path) -> None:
    with open(tmp_path / "sparse.png", "wb") as file:
        for i in range(30):  # so many parts that their list needs blocks of its own
            file.seek(i * 200_000)
            file.write(b"x" * 4096)
    (tmp_path / "good.png").write_bytes(PNG)
    for form in ("gnu", "posix"):
        tar = tmp_path / f"{form}.tar"
        command = f"tar --sparse --format={form} -cf {tar} -C {tmp_path} sparse.png good.png"
        subprocess.run(command.split(), check=True)
        assert reasons(tar) == {f"{form}/sparse": "bad_metadata", f"{form}/good": ""}
        good = listed(tar)[f"{form}/good"]
        assert tar.read_bytes()[good.offset : good.offset + good.num_bytes] == PNG


@pytest.mark.parametrize(("name", "size"), [("a.png", 10**9), ("a.txt", 8**11 - 1), ("a.pkl", 2**62)])
def test_a_member_that_claims_more_than_its_tar_has_is_refused(name: str, size: int, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"t\.tar.*are left"):
        list_source(make_tar(tmp_path / "t.tar", (name, size, FILE), kind=tarfile.GNU_FORMAT))


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
def test_an_extended_header_of_a_gigabyte_is_refused_without_reading_it(kind: bytes, tmp_path: Path) -> None:
    header = tarfile.TarInfo("x")
    header.type, header.size = kind, 1 << 30
    with open(tmp_path / "t.tar", "wb") as file:
        file.write(header.tobuf(tarfile.GNU_FORMAT))
        file.truncate((1 << 30) + 4096)  # a hole: the bytes are there, and take no disk
    with pytest.raises(SourceError, match="extended header"), cheap(20):
        list_source(tmp_path / "t.tar")


@pytest.mark.parametrize("content", [b"99999999 path=x\n", b"x path=y\n", b"30 path\n", b"0 a=b\n", b"12 size=-5x\n"])
def test_a_damaged_pax_header_is_refused(content: bytes, tmp_path: Path) -> None:
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, len(content)
    rest = make_tar(tmp_path / "rest.tar").read_bytes()
    (tmp_path / "t.tar").write_bytes(header.tobuf() + content.ljust(512, b"\0") + rest)
    with pytest.raises(SourceError, match=r"t\.tar"):
        list_source(tmp_path / "t.tar")


def test_any_tar_with_changed_bytes_is_listed_or_refused(tmp_path: Path) -> None:
    intact = make_tar(tmp_path / "t.tar", ("a.png", PNG, FILE), ("a.json", b'{"label": 1}', FILE)).read_bytes()
    rng = random.Random(0)
    for _ in range(150):
        mutant = bytearray(intact)
        for _ in range(rng.choice([1, 5, 40])):
            place = rng.choice([rng.randrange(512), rng.randrange(124, 157)])
            mutant[rng.randrange(5) * 512 + place] = rng.randrange(256)
        if rng.random() < 0.5:  # half of them with a checksum that fits
            mutant[148:156] = b" " * 8
            mutant[148:156] = b"%06o\0 " % sum(mutant[:512])
        (tmp_path / "t.tar").write_bytes(mutant[: rng.choice([len(mutant), rng.randrange(len(mutant))])])
        try:
            list_source(tmp_path / "t.tar")
        except SourceError as error:
            assert "t.tar" in str(error)  # noqa: PT017 - either outcome is right
    content = bytearray(intact)
    content[content.index(b"good.png")] ^= 1
    (tmp_path / "t.tar").write_bytes(content)
    with pytest.raises(SourceError, match="checksum"):  # a damaged header in the middle is no end of the archive
        list_source(tmp_path / "t.tar")


ROWS: list[tuple[Any, str]] = [
    (b'{"file_name": "' + b"x" * MAX_ROW_BYTES + b'"}', "bad_metadata"),
    (b"[" * 100_000, "bad_metadata"),
    (b'{"file_name": ' + b"[" * 900 + b"]" * 900 + b"}", "bad_metadata"),
    (b'{"file_name": "b.png", "label": ' + b"9" * 5000 + b"}", "bad_metadata"),
    *(({"file_name": name}, "bad_metadata") for name in (7, "", "\ud800.png", "x" * 100_000)),
    *(({"file_name": name}, "missing_file") for name in ("a\0.png", "loop.png")),
    *(({"file_name": name}, "unreadable") for name in ("fifo.png", "zero.png")),
    ({"file_name": "b.png", "label": float("nan")}, "bad_metadata"),
    ({"file_name": "b.png", "captions": ["x"] * (MAX_CAPTIONS + 1)}, "bad_metadata"),
    ({"file_name": "b.png", "caption": "x" * (MAX_CAPTION_CHARS + 1)}, "bad_metadata"),
    ({"file_name": "b.png", "captions": {"a": [[[1]]]}}, "bad_metadata"),
]


def test_a_row_of_a_list_is_rejected_and_the_rest_is_listed(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(PNG)
    os.mkfifo(tmp_path / "fifo.png")
    (tmp_path / "zero.png").symlink_to("/dev/zero")
    (tmp_path / "loop.png").symlink_to("loop.png")
    for row, reason in ROWS:
        line = row if isinstance(row, bytes) else json.dumps(row).encode()
        (tmp_path / "metadata.jsonl").write_bytes(line + b'\n{"file_name": "a.png", "caption": "fine"}\n')
        records = list_source(tmp_path).records
        reasons_in_order = [record.problem and record.problem[0] for record in records]
        is_too_long = len(line) > MAX_ROW_BYTES  # such a line is no row, so it comes after the rows
        assert reasons_in_order == ([None, reason] if is_too_long else [reason, None]), line[:100]
        rejected = records[1 if is_too_long else 0]
        assert rejected.problem
        assert len(rejected.key) + len(rejected.problem[1]) < 3000
        pa.table({"key": [r.key for r in records]}).validate(full=True)


# ------------------------------------------------------------ models, checkpoints, runs


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each kind of model."""
    root = tmp_path_factory.mktemp("models")
    make_dinov2(root / "dinov2")
    save_qwen3(root / "saved")
    shutil.copytree(root / "saved/tokenizer", root / "qwen3")
    shutil.copytree(root / "saved/text_encoder", root / "qwen3", dirs_exist_ok=True)
    found = {kind: local_folder(f"shipped:{kind}") for kind in ("vae", "t5")}
    return {kind: path for kind, path in found.items() if path} | {name: root / name for name in ("dinov2", "qwen3")}


def load_model(kind: str, folder: Path) -> None:
    if kind == "vae":
        ImageEncoder(VaeSection(model=str(folder)), CPU).latent_spec(VaeSection(model=str(folder)), "float16")
    elif kind == "dinov2":
        FeatureEncoder(FeatureSection(model=str(folder)), 64, CPU).encode(np.zeros((1, 64, 64, 3), np.uint8))
    else:
        section = TextSection(kind="t5" if kind == "t5" else "causal_lm", model=str(folder), max_tokens=20)
        CaptionEncoder(section, CaptionTokenizer(section), CPU).encode(["a cat"])


def set_in(file: str, key: str, value: Any) -> Spoil:
    return lambda f: (f / file).write_text(json.dumps(json.loads((f / file).read_text()) | {key: value}))


def written(file: str, content: str) -> Spoil:
    return lambda folder: (folder / file).write_text(content)


def long_file(file: str) -> Spoil:
    return lambda folder: os.truncate(folder / file, 1 << 30)


def pickled_weights(folder: Path) -> None:
    next(folder.glob("*.safetensors")).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(folder.parent / "marker")))


def pickle_in_the_index(folder: Path) -> None:
    """The libraries load the files that an index names."""
    stem = next(folder.glob("*.safetensors")).stem
    (folder.parent / "evil.bin").write_bytes(pickle.dumps(Evil(folder.parent / "marker")))
    index = {"metadata": {}, "weight_map": {"x": "../evil.bin"}}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index))


def header(length: int, text: bytes = b"") -> Spoil:
    return lambda folder: next(folder.glob("*.safetensors")).write_bytes(length.to_bytes(8, "little") + text)


WRONG_OFFSETS = b'{"x": {"dtype": "F32", "shape": [1000000000], "data_offsets": [0, 4000000000]}}'
DEEP = "[" * 100_000
ANY_MODEL: dict[str, Spoil] = {
    "weights of a pickle": pickled_weights,
    "index of a pickle": pickle_in_the_index,
    "wrong offsets": header(len(WRONG_OFFSETS), WRONG_OFFSETS),
    "deep config": written("config.json", DEEP),
}
AUTOENCODER = {"_class_name": ("UNet2DModel", ["AutoencoderKL"]), "block_out_channels": ("x",), "act_fn": ("evil",)}
AUTOENCODER |= {"latent_channels": (-1,), "scaling_factor": ("x",), "latents_mean": ([1],), "latents_std": ([0] * 4,)}
PREPROCESSOR = {"image_mean": ("x", [0.5] * 2, [1e999] * 3, [10**400] * 3), "image_std": ([0, 0, 0], [True] * 3)}
PREPROCESSOR |= {"rescale_factor": (1, "x"), "do_normalize": ("evil",)}
VISION = {"hidden_size": ("x", -8, HUGE, [8]), "num_hidden_layers": (None, 10**9), "num_attention_heads": (0, 3)}
VISION |= {"patch_size": (0, [10**9], 10**30), "image_size": ("x", 10**6), "num_channels": (1, HUGE)}
VISION |= {"mlp_ratio": (-1, HUGE), "hidden_act": ("../evil",), "model_type": (None, ["dinov2"], "../dinov2", "clip")}
VISION |= {"vision_config": (7,)}
LANGUAGE = {"hidden_size": (0, HUGE), "num_hidden_layers": (10**9,), "num_attention_heads": (0, 3)}
LANGUAGE |= {"vocab_size": (1.5, HUGE), "head_dim": ("x", HUGE), "model_type": ("../qwen3", "bert")}
LANGUAGE |= {"rope_parameters": ("evil", {"rope_type": "evil", "rope_theta": 1.0}), "layer_types": (["evil"] * 4,)}
TOKENIZER = {"tokenizer_class": ("TransfoXLTokenizer",), "auto_map": ({"AutoTokenizer": ["evil.Evil", None]},)}
of_config = partial(each, "config", partial(set_in, "config.json"))
BY_KIND = {
    "vae": {
        "header of 2^60": header(1 << 60),
        "deep header": header(50_000, b"[" * 50_000),
        "config of a list": written("config.json", "[]"),
        "NaN in config": written("config.json", '{"a": NaN}'),
        **of_config(AUTOENCODER),
    },
    "t5": {
        **each("tokenizer", partial(set_in, "tokenizer_config.json"), TOKENIZER),
        "deep tokenizer": written("tokenizer.json", DEEP),
        "empty tokenizer": written("tokenizer.json", "{}"),
        "wrong tokenizer": set_in("tokenizer.json", "model", 7),
        "long tokenizer": long_file("tokenizer.json"),
        **of_config({"d_model": ("x",), "num_heads": (0,), "vocab_size": (1.5,), "model_type": ("evil",)}),
    },
    "dinov2": {
        "no preprocessor": lambda folder: (folder / "preprocessor_config.json").unlink(),
        "deep preprocessor": written("preprocessor_config.json", DEEP),
        "long preprocessor": long_file("preprocessor_config.json"),
        **each("preprocessor", partial(set_in, "preprocessor_config.json"), PREPROCESSOR),
        **of_config(VISION),
    },
    "qwen3": of_config(LANGUAGE),
}
MODELS = [
    pytest.param(kind, spoil, id=f"{kind}, {name}")
    for kind, of_kind in BY_KIND.items()
    for name, spoil in (ANY_MODEL | of_kind).items()
]


def model_with_trap(model: Path, tmp_path: Path) -> Path:
    """A copy of a model, and code beside it that leaves a mark."""
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')")
    return folder


@pytest.mark.parametrize(("kind", "spoil"), MODELS)
def test_a_hostile_model_is_one_clear_error_and_runs_no_code(
    kind: str, spoil: Spoil, models: dict[str, Path], tmp_path: Path
) -> None:
    spoil(folder := model_with_trap(models[kind], tmp_path))
    with pytest.raises(EncoderError) as error, cheap(600):
        load_model(kind, folder)
    assert len(str(error.value)) < 1000
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("kind", ["vae", "t5", "dinov2", "qwen3"])
def test_code_and_pickles_beside_a_model_are_not_run(kind: str, models: dict[str, Path], tmp_path: Path) -> None:
    folder = model_with_trap(models[kind], tmp_path)
    set_in("config.json", "auto_map", {"AutoModel": "evil.Evil", "AutoConfig": "evil.Evil"})(folder)
    if kind == "dinov2":
        set_in("preprocessor_config.json", "auto_map", {"AutoImageProcessor": "evil.Evil"})(folder)
    if kind == "qwen3":
        (folder / "chat_template.jinja").write_text("{{ cycler.__init__.__globals__.os.mkdir('marker') }}")
    for name in ("pytorch_model.bin", "diffusion_pytorch_model.bin"):
        (folder / name).write_bytes(pickle.dumps(Evil(tmp_path / "marker")))
    load_model(kind, folder)
    if kind in ("dinov2", "qwen3"):  # of a kind that only code of its own could load
        remote = {"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil", "AutoTokenizer": ["evil.Evil", None]}
        for key, value in (("auto_map", remote), ("model_type", "evil"), ("architectures", ["Evil"])):
            set_in("config.json", key, value)(folder)
        with pytest.raises(EncoderError, match=r"config\.json"):
            load_model(kind, folder)
    assert not (tmp_path / "marker").exists()


@pytest.mark.usefixtures("tiny_models")
def test_pickles_in_a_run_are_never_loaded(label_store: LatentStore, tmp_path: Path) -> None:
    run, marker = tmp_path / "run", tmp_path / "marker"
    pickle.loads(pickle.dumps(Evil(marker))).close()
    assert marker.exists()  # the payload works
    marker.unlink()

    def go_on(steps: int) -> None:
        recipe = train_recipe("dit-s-4", f"run.steps={steps}")
        train(recipe, store_path=label_store.path, run=run, device=CPU, report=lambda figures: None, stop=StopRequest())

    go_on(3)
    for folder in (run, *find("checkpoint", run), *find("snapshot", run)):
        for name in ("state.pt", ".metadata", "pytorch_model.bin", "optimizer.bin", "model.pt", "state.pkl"):
            (folder / name).write_bytes(pickle.dumps(Evil(marker)))
    # A reader may refuse a folder with files that are none of its own.
    with contextlib.suppress(RunError, DamageError):
        go_on(6)
    with contextlib.suppress(RunError, DamageError):
        one = SampleRequest(count=1, steps=1, vae="shipped:vae")
        sample_grid(run, one, out=tmp_path / "o", device=CPU)
    assert not marker.exists()


def test_a_token_of_the_environment_is_in_no_file_and_no_output(tmp_path: Path) -> None:
    canary = "hf_CANARYcanary0123456789"
    source, store = make_class_folder(tmp_path / "source", classes=2, per_class=2), str(tmp_path / "store")
    secrets = dict.fromkeys(["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY"], canary)
    small = ["--set", "images.resolution=32", "--set", "vae.model=shipped:vae", "--set", "vae.batch_size=4"]
    small += ["--set", NO_CHECK]
    command = ["precompute", "imagenet-256", "--source", str(source), "--store", store, "--device", "cpu", *small]
    done = run_forked(
        ["-c", "from leandit.tools.cli.main import main; main()", *command],
        env=os.environ | secrets | {"HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert canary not in done.stdout + done.stderr
    assert [name for name, content in tree_digest(tmp_path).items() if canary.encode() in content] == []


# ------------------------------------------------------------ lint

# Modules that write beside datasets/disk/files.py: into memory, into a temporary folder that it renames, or images for
# people to look at, which nothing reads again; metrics.jsonl grows by a line at a time.
ALLOWED_WRITERS = {
    *("train/metrics/writer.py", "train/weights/published.py", "train/weights/checkpoint.py", "train/parallel/stop.py"),
    *("tools/inspection/report/page.py", "tools/inspection/view/images.py", "tools/inspection/images.py"),
    *("tools/demo/scenes.py", "tools/bench/loader.py"),
}
WRITING = {"write_text", "write_bytes", "save", "save_file", "tofile", "savez", "copyfile", "copytree", "touch"}
MOVING = {"os.replace", "os.rename", "shutil.move", "shutil.copy", "np.save"}
CALLS = {*WRITING, "load", "open", "replace", "rename", "move", "copy"}
OURS = ("save", "checkpoint.save", "safetensors.torch.save")  # held to this themselves


def test_no_module_can_run_what_a_file_says_and_bytes_reach_the_disk_through_one() -> None:
    """Options that let a file run code or a map write to it; ruff's rules S and TID251 find the rest."""
    assert len(MODULES) > 30  # so that an empty scan is no success
    unsafe, writers = [], set[str]()
    for path in MODULES:
        for call in (node for node in ast.walk(parsed(path)) if isinstance(node, ast.Call)):
            last = getattr(call.func, "attr", getattr(call.func, "id", ""))
            name = ast.unparse(call.func) if last in CALLS else last
            options = {keyword.arg: getattr(keyword.value, "value", "not a literal") for keyword in call.keywords}
            places = [getattr(argument, "value", None) for argument in call.args]
            mode = next(iter(places[0 if "." in name else 1 :][:1]), options.get("mode"))
            unsafe += [name] * (name.endswith("torch.load") and options.get("weights_only") is not True)
            unsafe += [name for one in ("allow_pickle", "trust_remote_code") if options.get(one, False) is not False]
            unsafe += [name] * (last in ("memmap", "open_memmap") and "r" not in (options.get("mode"), *places[2:3]))
            is_opened = last == "open" and isinstance(mode, str) and bool(set(mode) & set("wax+"))
            if is_opened or name in MOVING or (last in WRITING and name not in OURS):
                writers.add(name_of(path))
    assert unsafe == []
    assert writers - {"datasets/disk/files.py"} == ALLOWED_WRITERS


def test_rows_of_parquet_that_unpack_to_too_much_are_rejected_without_keeping_what_was_read(
    leandit: Leandit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    """A dictionary names one long value in every row; each reject would keep all that was read of its row group."""
    monkeypatch.setattr("leandit.precompute.sources.tables.embedded.MAX_GROUP_BYTES", 8 << 20)
    overrides = [*LABEL_RECIPE, "source.max_reject_share=1", "source.max_rejects_in_a_row=1000", "source.labels=none"]
    words = [word for override in overrides for word in ("--set", override)]
    make_class_folder(tmp_path / "images", classes=1, per_class=1)
    assert (
        leandit(
            "precompute", "imagenet-256", "--source", tmp_path / "images", "--store", tmp_path / "warm", *words
        ).code
        == 0
    )

    num_groups = 100
    source = tmp_path / "source"
    source.mkdir()
    schema = pa.schema([("image", pa.binary())])
    with pq.ParquetWriter(source / "all.parquet", schema, compression="zstd") as writer:
        writer.write_table(pa.table({"image": pa.array([PNG], pa.binary())}))
        bomb = pa.array([bytes(4 << 20)] * 3, pa.binary())
        for _ in range(num_groups):
            writer.write_table(pa.table({"image": bomb}))
    assert (source / "all.parquet").stat().st_size < 1 << 20
    with cheap(900):  # all row groups together hold 1,200 MiB; allocators keep up to 600 of what was freed
        ended = leandit("precompute", "imagenet-256", "--source", source, "--store", tmp_path / "store", *words)
    assert ended.code == 0, ended
    assert LatentStore(tmp_path / "store").records["status"].to_pylist() == ["stored"] + ["rejected"] * 3 * num_groups
