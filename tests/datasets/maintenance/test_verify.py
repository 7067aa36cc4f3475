"""``verify``: every flipped bit and every misplaced file is found; a reader gets right numbers or an error."""

from __future__ import annotations

import functools
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import (
    SEAL,
    Pictures,
    content,
    copy_of,
    encode,
    files_of,
    flip,
    make_grown,
    make_plain,
    read_after,
    read_all,
    small_shards,
)
from making import caption_recipe

from leandit.datasets.disk.files import TEMPORARY_PREFIX
from leandit.datasets.disk.hashing import canonical_json
from leandit.datasets.format.table_schemas import RECORDS_SCHEMA
from leandit.datasets.maintenance.findings import CAUSES, Finding, revision_of, shard_place
from leandit.datasets.maintenance.verify import verify_store
from leandit.datasets.revisions.commits import read_commits, read_manifest, with_root_hash
from leandit.datasets.revisions.plan import read_plan
from leandit.datasets.store import LatentStore


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    with small_shards():
        yield


class Whole:
    """An intact store, and a copy of it to be damaged."""

    def __init__(self, source: Pictures, path: Path, work: Path) -> None:
        self.source, self.path = source, path
        self.files = files_of(path)
        self.copy = copy_of(path, work)
        self.read: dict[str, Any] = read_all(path)

    def again(self) -> Path:
        """The copy, intact again."""
        return copy_of(self.path, self.copy)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    root = tmp_path_factory.mktemp("plain")
    return Whole(*make_plain(root), root / "copy")


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    root = tmp_path_factory.mktemp("grown")
    return Whole(*make_grown(root), root / "copy")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    root = tmp_path_factory.mktemp("packed")
    return Whole(*make_plain(root, "store.codec=zstd", "vae.flip=true"), root / "copy")


@pytest.fixture
def whole(request: pytest.FixtureRequest) -> Whole:
    return request.getfixturevalue(request.param)


SLOW = pytest.mark.slow
STORES = pytest.mark.parametrize("whole", ["plain", "grown", "packed"], indirect=True)
GROWN_FIRST = pytest.mark.parametrize(
    "whole", ["grown", pytest.param("plain", marks=SLOW), pytest.param("packed", marks=SLOW)], indirect=True
)
SMALL_FIRST = pytest.mark.parametrize("whole", ["plain", "packed", pytest.param("grown", marks=SLOW)], indirect=True)


def names_of_shard(root: Path, path: str) -> tuple[str | None, int | None, list[str]]:
    """Bucket, shard and records of a shard, from the plan; the records are texts where they are captions."""
    if shard_place(path) is None:
        return None, None, []
    plan = read_plan(root, revision_of(path))
    part = plan.layout.task_of(path)
    assert part is not None
    bucket = part[0].removeprefix("buckets/") if part[0].startswith("buckets/") else None
    if bucket:
        rows = plan.layout.rows_of(*part)
        keys = plan.records["key"].to_pylist()
        return bucket, part[1], [keys[i] for i in plan.bucket_positions[bucket][rows.start : rows.stop]]
    if part[0] == "captions":
        captions = plan.layout.captions_of(*part)
        return None, part[1], plan.own_captions["text"].to_pylist()[captions.start : captions.stop]
    return None, part[1], []


def test_every_kind_of_file_is_there_to_be_damaged(plain: Whole, grown: Whole) -> None:
    layout = read_plan(plain.path, 1).layout
    assert {task[0] for path in plain.files if (task := layout.task_of(path))} == {
        *("buckets/64x64", "buckets/48x80", "buckets/80x48", "captions", "null_caption")
    }
    assert max(shard for path in plain.files if (place := shard_place(path)) for shard in [place[2]]) >= 1
    assert {revision_of(path) for path in grown.files} == {1, 2, 3}
    for one in (plain, grown):
        rejects = LatentStore(one.path).manifest
        assert rejects is not None
        assert rejects.num_rejected == 2


@STORES
def test_an_intact_store_is_whole_and_nothing_is_written(whole: Whole) -> None:
    before = {path.as_posix(): path.stat().st_mtime_ns for path in whole.path.rglob("*")}
    for quick in (False, True):
        found = verify_store(whole.path, quick=quick)
        assert (found.findings, found.damaged, found.complete) == ([], False, True)
        assert found.num_files == len(whole.files)
        assert found.num_records == len(LatentStore(whole.path).records)
    assert {path.as_posix(): path.stat().st_mtime_ns for path in whole.path.rglob("*")} == before


def check_flips(whole: Whole, count: int) -> None:
    """Flip single bits, at least one in every file; each is found, and its file, shard and record are named."""
    root, rng = whole.again(), random.Random(1)
    sizes = [os.path.getsize(root / path) for path in whole.files]
    chosen = [*whole.files, *rng.choices(whole.files, k=count // 2)]
    chosen += rng.choices(whole.files, sizes, k=max(0, count - len(chosen)))  # half of the rest by file, half by byte
    missed, located = [], 0
    for path in chosen:
        bit = rng.randrange(8 * os.path.getsize(root / path))
        flip(root / path, bit)
        findings = verify_store(root).findings
        named = [finding for finding in findings if finding.path == path and finding.cause == "content"]
        if len(named) != 1 or any(f.path != path for f in findings):
            missed.append((path, bit, findings))
        else:
            located += check_place(root, named[0], bit)
        flip(root / path, bit)
    assert missed == []
    assert located > count // 20  # of a grown store, most files hold no rows
    assert verify_store(root).findings == []


def check_place(root: Path, finding: Finding, bit: int) -> bool:
    """The finding of a flipped bit names its shard and just the record; tells whether there was one to name."""
    bucket, shard, records = names_of_shard(root, finding.path)
    assert (finding.bucket, finding.shard, finding.revision) == (bucket, shard, revision_of(finding.path))
    assert set(finding.records) <= set(records)
    assert finding.num_records == len(finding.records)
    if bucket is None or LatentStore(root).spec.codec != "none":
        return bool(finding.records)
    array = LatentStore(root).latents(bucket)
    row = bit // 8 // array.row_bytes
    stored = {r["key"] for r in LatentStore(root, revision=finding.revision).records.to_pylist() if r["checksum"]}
    if row < len(records):
        assert finding.records == [key for key in records[row : row + 1] if key in stored]
    else:  # in the index: then the file cannot be opened, and all of it is concerned
        assert finding.records == records
    return True


@SMALL_FIRST
def test_every_flipped_bit_is_found_and_named(whole: Whole) -> None:
    check_flips(whole, 60)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@STORES
def test_ten_thousand_flipped_bits_are_found_and_named(whole: Whole) -> None:
    check_flips(whole, 3334)


def shard_files(root: Path) -> list[str]:
    return [path for path in files_of(root) if shard_place(path)]


def equal_sizes(root: Path, paths: list[str]) -> list[tuple[str, str]]:
    """Pairs of files of one size and other content."""
    pairs = []
    for i, first in enumerate(paths):
        for second in paths[i + 1 :]:
            one, two = root / first, root / second
            if one.stat().st_size == two.stat().st_size and one.read_bytes() != two.read_bytes():
                pairs.append((first, second))
    return pairs


@SMALL_FIRST
def test_a_file_of_any_other_length_is_found_and_never_read_as_if_it_were_whole(whole: Whole) -> None:
    rng, root = random.Random(2), whole.again()
    lengths = 0
    for path in whole.files:
        data = (root / path).read_bytes()
        cuts = {rng.randrange(len(data)) for _ in range(3)} if shard_place(path) else {rng.randrange(len(data))}
        cuts |= {0, len(data) - 1} if shard_place(path) else set()
        for length in sorted(cuts - {len(data)}):
            (root / path).write_bytes(data[:length])
            found = verify_store(root, quick=rng.random() < 0.5)
            assert [f.path for f in found.findings if f.cause in ("size", "content")] == [path], (path, length)
            lengths += 1
        (root / path).write_bytes(data)
    assert lengths >= 64


def faulty_files(whole: Whole) -> list[str]:
    """One file of every kind, and some more."""
    rng = random.Random(3)
    shards = [path for path in whole.files if shard_place(path)]
    chosen = [*rng.sample(shards, 4), *rng.sample(whole.files, 4), "manifest.json", "zarr.json", "records.parquet"]
    chosen += ["captions.parquet", "plan/plan.json", "captions/offsets/c/0", "captions/null/c/0/0"]
    chosen += [f"revisions/000003/{name}" for name in ("manifest.json", "records.parquet", "zarr.json")]
    return [path for path in dict.fromkeys(chosen) if path in whole.files]


FAULTS = ("half", "empty", "zeros", "gone", "folder", "link")


def cause_of(what: str, path: str, newest: str) -> str:
    """The cause that verify names; the newest manifest may also not be written yet."""
    if path == newest and what in ("gone", "folder"):
        return "unsealed"
    if what in ("half", "empty"):
        return "content" if path.endswith(("manifest.json", "plan.json")) else "size"
    return {"zeros": "content", "gone": "missing", "folder": "missing", "link": "link"}[what]


def bring_about(what: str, file: Path) -> None:
    size = file.stat().st_size
    if what in ("half", "empty"):
        os.truncate(file, size // 2 if what == "half" else 0)
    elif what == "zeros":
        file.write_bytes(bytes(size))
    else:
        content = file.read_bytes()
        file.unlink()
        if what == "folder":
            file.mkdir()
        elif what == "link":
            elsewhere = file.with_name("elsewhere-" + file.name)
            elsewhere.write_bytes(content)
            file.symlink_to(elsewhere)


def undo(file: Path, content: bytes) -> None:
    file.with_name("elsewhere-" + file.name).unlink(missing_ok=True)
    if file.is_dir():
        file.rmdir()
    file.unlink(missing_ok=True)
    file.write_bytes(content)


@GROWN_FIRST
def test_each_fault_of_a_file_is_found_and_its_reader_is_never_misled(whole: Whole) -> None:
    root, faults = whole.again(), []
    newest = max((path for path in whole.files if path.endswith("manifest.json")), key=revision_of)
    for path in faulty_files(whole):
        file, before = root / path, (root / path).read_bytes()
        for what in FAULTS:
            bring_about(what, file)
            found = {f.path: f.cause for f in verify_store(root).findings}
            assert found.get(path) == cause_of(what, path, newest), (what, path, found)
            assert set(found.values()) <= set(CAUSES)
            undo(file, before)
            if path.endswith("000003/manifest.json") and what in ("gone", "folder"):
                continue  # the reader takes revision 3 for unfinished, and opens revision 2, which is whole
            make = functools.partial(bring_about, what, file)
            faults.append((f"{what} {path}", make, functools.partial(undo, file, before)))
    assert read_after(faults, root, whole.read) > 0  # a link, or a damaged plan, hinders no reader
    assert verify_store(root).findings == []


def swap(root: Path, first: str, second: str) -> None:
    (root / first).rename(root / "third")
    (root / second).rename(root / first)
    (root / "third").rename(root / second)


@STORES
def test_two_files_in_each_others_place_are_found_and_their_reader_is_never_misled(whole: Whole) -> None:
    root, faults = whole.again(), []
    pairs = equal_sizes(whole.path, whole.files)
    shards = [pair for pair in pairs if shard_place(pair[0]) and shard_place(pair[1])]
    assert shards or whole.path.parent.name.startswith("packed")  # packed shards differ in size
    for pair in [*shards[:15], *[pair for pair in pairs if pair not in shards][:15]]:
        swap(root, *pair)
        found = {f.path: f.cause for f in verify_store(root).findings}
        assert {path: found.get(path) for path in pair} == dict.fromkeys(pair, "content")
        swap(root, *pair)
        faults.append((str(pair), functools.partial(swap, root, *pair), functools.partial(swap, root, *pair)))
    read_after(faults, root, whole.read)


def test_a_file_of_another_store_is_found_and_its_reader_is_never_misled(plain: Whole, tmp_path: Path) -> None:
    other = Pictures(tmp_path / "other")
    for i in range(10):
        other.put(i, seed=i + 500)  # the same shapes and captions, other pixels
    other.write()
    encode(caption_recipe(), other.root, tmp_path / "store")
    root, faults = plain.again(), []
    for path in files_of(tmp_path / "store"):
        foreign, before = (tmp_path / "store" / path).read_bytes(), (root / path).read_bytes()
        if foreign == before:
            continue
        (root / path).write_bytes(foreign)
        found = verify_store(root)
        assert found.damaged, path
        assert path in {f.path for f in found.findings} or path.endswith(("plan.json", "manifest.json"))
        (root / path).write_bytes(before)
        put = functools.partial(write_bytes, root / path)
        faults.append((path, functools.partial(put, foreign), functools.partial(put, before)))
    assert len(faults) > 10
    read_after(faults, root, plain.read)


def write_bytes(path: Path, content: bytes) -> None:
    path.write_bytes(content)


@STORES
def test_what_does_not_belong_is_named_and_hinders_no_reader(whole: Whole) -> None:
    root = whole.again()
    (root / "notes.txt").write_text("mine")
    (root / "buckets/64x64/.DS_Store").write_text("")
    (root / "revisions/000009").mkdir(parents=True)
    (root / "revisions/000009/records.parquet").write_text("")
    (root / "revisions/²/plan").mkdir(parents=True)
    (root / "revisions/²/plan/plan.json").write_text("{}")
    (root / "revisions/9/plan").mkdir(parents=True)
    (root / "revisions/9/plan/plan.json").write_text("{}")
    (root / "elsewhere").symlink_to(root / "buckets")
    temporary = f"{TEMPORARY_PREFIX}host@1-2@0.json"
    (root / "commits" / temporary).write_text("half")
    found = {f.path: f.cause for f in verify_store(root).findings}
    assert found == {
        "notes.txt": "stray",
        "buckets/64x64/.DS_Store": "stray",
        "revisions/000009/records.parquet": "stray",
        "revisions/²/plan/plan.json": "stray",
        "revisions/9/plan/plan.json": "stray",
        "elsewhere": "stray",
        f"commits/{temporary}": "temporary",
    }
    assert read_after([("strays", nothing, nothing)], root, whole.read) == 1


def nothing() -> None:
    pass


def test_what_a_killed_process_left_does_no_harm(plain: Whole) -> None:
    root = plain.again()
    (root / f"{TEMPORARY_PREFIX}host@1-2@plan").mkdir()
    (root / f"{TEMPORARY_PREFIX}host@1-2@plan/plan.json").write_text("half")
    (root / "plan.leandit-replaced").mkdir()
    found = verify_store(root)
    assert {f.cause for f in found.findings} == {"temporary"}
    assert (len(found.findings), found.damaged, found.complete) == (2, False, True)


def unfinished(whole: Whole, revision: int) -> Path:
    """The store as it was while a revision was being encoded: two of its shards are not committed."""
    root = whole.again()
    prefix = root if revision == 1 else root / f"revisions/{revision:06d}"
    for name in SEAL:
        (prefix / name).unlink()
    for number, commit in enumerate(sorted(prefix.glob("commits/buckets/*/*.json"))):
        if number < (2 if revision == 1 else 1):
            for entry in json.loads(commit.read_text())["files"]:
                (root / entry["path"]).unlink()
            commit.unlink()
    return root


@pytest.mark.parametrize(("name", "revision"), [("plain", 1), ("grown", 3)])
def test_of_an_unfinished_revision_what_is_committed_is_checked(
    name: str, revision: int, request: pytest.FixtureRequest
) -> None:
    whole = request.getfixturevalue(name)
    root = unfinished(whole, revision)
    found = verify_store(root)
    assert (found.findings, found.complete, found.damaged) == ([], False, False)
    before = {} if revision == 1 else read_all(root)
    assert (found.revisions == []) == (revision == 1)
    assert read_after([("unfinished", nothing, nothing)], root, before) == (revision > 1)
    commits = read_commits(root, read_plan(root, revision))
    entry = list(commits.values())[-1].files[0]
    flip(root / entry.path, 77)
    finding = next(f for f in verify_store(root).findings if f.path == entry.path)
    assert (finding.cause, finding.bucket) == ("content", names_of_shard(root, entry.path)[0])
    flip(root / entry.path, 77)
    (root / entry.path).unlink()
    assert [(f.path, f.cause) for f in verify_store(root).findings] == [(entry.path, "missing")]


def test_a_lost_manifest_is_named_and_the_rest_is_still_checked(plain: Whole) -> None:
    root = plain.again()
    (root / "manifest.json").unlink()
    found = verify_store(root)
    assert [(f.path, f.cause) for f in found.findings] == [("manifest.json", "unsealed")]
    assert (found.complete, found.damaged) == (False, False)  # as after a crash in the seal
    shard = shard_files(root)[0]
    flip(root / shard, 5)
    assert {f.path for f in verify_store(root).findings} == {"manifest.json", shard}


def test_a_store_that_does_not_add_up_is_found(plain: Whole) -> None:
    root = plain.again()
    manifest = read_manifest(root, 1)
    wrong = with_root_hash(manifest.model_copy(update={"num_stored": 3, "num_rejected": manifest.num_planned - 3}))
    (root / "manifest.json").write_bytes(canonical_json(wrong.model_dump()))
    assert "counts" in {f.cause for f in verify_store(root, quick=True).findings}


def test_quick_reads_no_shard_and_still_finds_what_is_missing(plain: Whole) -> None:
    root = plain.again()
    shards = shard_files(root)
    flip(root / shards[0], 9)
    assert verify_store(root, quick=True).findings == []
    assert [f.path for f in verify_store(root).findings] == [shards[0]]
    (root / shards[1]).unlink()
    assert [f.path for f in verify_store(root, quick=True).findings] == [shards[1]]
    full, quick = verify_store(root), verify_store(root, quick=True)
    assert quick.num_bytes < full.num_bytes
    assert quick.num_files == full.num_files


def test_the_result_is_json_with_all_that_was_found(plain: Whole) -> None:
    root = plain.again()
    shard = next(path for path in shard_files(root) if "buckets/" in path)
    flip(root / shard, 0)
    values = json.loads(json.dumps(verify_store(root).to_json(), allow_nan=False))
    assert {key: values[key] for key in ("store", "mode", "complete", "revisions", "damaged", "num_records")} == {
        **{"store": str(root), "mode": "full", "complete": True, "revisions": [1], "damaged": True, "num_records": 12}
    }
    assert values["num_bytes"] == sum((root / path).stat().st_size for path in plain.files if path in values_of(root))
    assert values["seconds"] > 0
    assert values["mib_per_second"] > 0
    (finding,) = values["findings"]
    bucket, number, keys = names_of_shard(root, shard)
    assert finding | {"detail": ""} == {
        **{"path": shard, "cause": "content", "detail": "", "revision": 1, "bucket": bucket, "shard": number},
        **{"num_records": 1, "records": keys[:1]},
    }


def values_of(root: Path) -> set[str]:
    return {entry.path for entry in read_manifest(root, 1).files}


def test_a_finding_of_many_records_names_the_first_and_counts_all(plain: Whole) -> None:
    finding = Finding("buckets/1x1/latents/c/0/0/0/0", "missing", "gone", 1, "1x1", 0, 5, ["a", "b", "c", "d"])
    assert finding.line() == (
        "bucket '1x1', shard 0: file 'buckets/1x1/latents/c/0/0/0/0': gone (5 records: a, b, c, ...)"
    )


def test_the_right_numbers_are_those_of_the_first_read(plain: Whole) -> None:
    again = content(LatentStore(plain.path))
    assert again == plain.read["content"]
    assert set(RECORDS_SCHEMA.names) >= {"key", "checksum"}
    assert np.isfinite(np.frombuffer(plain.read["batches"][0][0], np.float32)).all()
