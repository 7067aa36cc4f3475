"""``verify``: every flipped bit and every misplaced file is found; a reader gets right numbers or an error."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from faults import DAMAGES, REVISION_FILES, flip, read_after, undo_damage, without_seal
from making import caption_recipe, encode, write_file
from stores import ImageSource, copy_of, files_of, make_grown, make_plain, read_all

from leandit.datasets.disk.files import TEMPORARY_PREFIX
from leandit.datasets.disk.hashing import canonical_json
from leandit.datasets.format.layout import revision_of
from leandit.datasets.maintenance.findings import Finding, shard_place
from leandit.datasets.maintenance.repair import repair_without_encoding
from leandit.datasets.maintenance.verify import verify_store
from leandit.datasets.revisions.catalog import read_manifest
from leandit.datasets.revisions.commits import read_commit
from leandit.datasets.revisions.plan import read_plan
from leandit.datasets.store import LatentStore

pytestmark = pytest.mark.usefixtures("small")


class Whole:
    """An intact store, and a copy of it to be damaged."""

    def __init__(self, source: ImageSource, path: Path, work: Path) -> None:
        self.source, self.path = source, path
        self.files = files_of(path)
        self.copy = copy_of(path, work)
        self.read: dict[str, Any] = read_all(path)

    def again(self) -> Path:
        """The copy, intact again."""
        return copy_of(self.path, self.copy)


def made(make: Callable[..., tuple[ImageSource, Path]], *overrides: str) -> Any:
    """A fixture of such a store."""

    @pytest.fixture(scope="module")
    def fixture(tmp_path_factory: pytest.TempPathFactory) -> Whole:
        root = tmp_path_factory.mktemp("grown" if make is make_grown else "packed" if overrides else "plain")
        return Whole(*make(root, *overrides), root / "copy")

    return fixture


plain, grown = made(make_plain), made(make_grown)
packed = made(make_plain, "store.codec=blosc", "vae.flip=true")


@pytest.fixture(scope="module")
def not_sealed(plain: Whole, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plain store before its seal."""
    root = tmp_path_factory.mktemp("unsealed") / "store"
    without_seal(lambda: encode(caption_recipe(), plain.source.root, root))
    return root


@pytest.fixture
def whole(request: pytest.FixtureRequest) -> Whole:
    return request.getfixturevalue(request.param)


SLOW = pytest.mark.slow
STORES = pytest.mark.parametrize("whole", ["plain", "grown", "packed"], indirect=True)
GROWN_FIRST = pytest.mark.parametrize(
    "whole", ["grown", pytest.param("plain", marks=SLOW), pytest.param("packed", marks=SLOW)], indirect=True
)


class Place(NamedTuple):
    """Where a shard file belongs: bucket and shard (None for others), revision, records by row, or captions."""

    bucket: str | None
    shard: int | None
    revision: int
    records: dict[int, str]


def place_of(store: LatentStore, path: str) -> Place:
    """The place of a file of an intact store, by its tables."""
    place = shard_place(path)
    if place is None:
        return Place(None, None, revision_of(path) or 1, {})
    array, bucket, shard = place
    layout = store.layout(array)
    rows = layout.rows_of(shard)
    (revision,) = [one.revision for one in layout.row_ranges if one.first <= rows.start < one.end]
    if bucket:
        index, keys = store.index(bucket), store.records["key"].to_pylist()
        named = {row: keys[i] for row, i in zip(index.rows.tolist(), index.records.tolist(), strict=True)}
    else:
        starts = [] if "/null" in array else store.text().starts.tolist()
        named = dict(zip(starts, store.captions["text"].to_pylist(), strict=False))
    return Place(bucket, shard, revision, {row - rows.start: name for row, name in named.items() if row in rows})


@STORES
def test_an_intact_store_is_whole_and_nothing_is_written(whole: Whole) -> None:
    before = {path.as_posix(): path.stat().st_mtime_ns for path in whole.path.rglob("*")}
    for quick in (False, True):
        found = verify_store(whole.path, quick=quick)
        assert (found.findings, found.damaged, found.complete) == ([], False, True)
        assert found.num_files == len(whole.files)
        assert found.num_records == len(LatentStore(whole.path).records)
    assert {path.as_posix(): path.stat().st_mtime_ns for path in whole.path.rglob("*")} == before


FLIPS = [*(pytest.param(name, 30, id=f"sample-{name}") for name in ("plain", "packed"))]
FLIPS += [pytest.param(name, 3334, id=f"all-{name}", marks=SLOW) for name in ("plain", "grown", "packed")]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("whole", "count"), FLIPS, indirect=["whole"])
def test_every_flipped_bit_is_found_and_its_file_shard_and_record_are_named(whole: Whole, count: int) -> None:
    """Single bits, at least one in every file."""
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
            located += check_place(whole, named[0], bit)
        flip(root / path, bit)
    assert missed == []
    assert located > count // 20  # of a grown store, most files hold no rows
    assert verify_store(root).findings == []


def check_place(whole: Whole, finding: Finding, bit: int) -> bool:
    """The finding of a flipped bit names its shard and just the record; tells whether there was one to name."""
    store = LatentStore(whole.path, revision=finding.revision)  # that wrote it: a later one may have dropped records
    place = place_of(store, finding.path)
    assert (finding.bucket, finding.shard, finding.revision) == (place.bucket, place.shard, place.revision)
    assert set(finding.records) <= set(place.records.values())
    assert finding.num_records == len(finding.records)
    if place.bucket is None or store.spec.codec != "none":
        return bool(finding.records)
    array = store.latents(place.bucket)
    row = bit // 8 // array.row_bytes
    if row < len(store.layout(array.path).rows_of(place.shard or 0)):
        assert finding.records == [key for i, key in place.records.items() if i == row]
    else:  # in the index: then the file cannot be opened, and all of it is concerned
        assert set(finding.records) == set(place.records.values())
    return True


def shard_files(root: Path) -> list[str]:
    return [path for path in files_of(root) if shard_place(path)]


def damaged_files(whole: Whole) -> list[str]:
    """One file of every kind, and some more."""
    rng, newest = random.Random(3), f"revisions/{LatentStore(whole.path).revision:06d}"
    shards = [path for path in whole.files if shard_place(path)]
    chosen = [*rng.sample(shards, 4), *rng.sample(whole.files, 4), "zarr.json", "captions/null/c/0/0"]
    chosen += [f"{newest}/{folder}{name}" for name in REVISION_FILES for folder in ("", "twin/")]
    chosen += ["revisions/000001/manifest.json", "revisions/000001/records.parquet", "revisions/000001/local.json"]
    return [path for path in dict.fromkeys(chosen) if path in whole.files]


EVERY = pytest.mark.parametrize("step", [pytest.param(5, id="sample"), pytest.param(1, id="all", marks=SLOW)])


@GROWN_FIRST
@EVERY
def test_each_damage_is_found_undone_where_a_copy_is_left_and_misleads_no_reader(whole: Whole, step: int) -> None:
    """Every so manieth damage of each file, another one of the next."""
    root, faults = whole.again(), []
    for number, path in enumerate(damaged_files(whole)):
        file, before = root / path, (root / path).read_bytes()
        linked = f"{path.rpartition('/')[0]}/elsewhere-{file.name}".lstrip("/")
        for name, (damage, cause) in [*DAMAGES.items()][number % step :: step]:
            damage(file)
            found = verify_store(root)
            assert found.damaged
            assert {f.path: f.cause for f in found.findings if f.path != linked} == {path: cause}, (name, path)
            if not shard_place(path):
                assert {f.path for f in repair_without_encoding(root, found).findings} <= {linked}, (name, path)
                assert file.read_bytes() == before, (name, path)
            undo_damage(file, before)
            faults.append(
                (f"{name} {path}", functools.partial(damage, file), functools.partial(undo_damage, file, before))
            )
    assert read_after(faults, root, whole.read) > 0  # a link, a twin, or what trains nothing, hinders no reader
    assert verify_store(root).findings == []


def test_a_file_of_another_store_or_place_is_found_and_its_reader_is_never_misled(plain: Whole, tmp_path: Path) -> None:
    other = ImageSource(tmp_path / "other")
    for i in range(10):
        other.put(i, seed=i + 500)  # the same shapes and captions, other pixels
    other.write()
    encode(caption_recipe(), other.root, tmp_path / "store")
    root, faults = plain.again(), []
    foreign = [(path, (tmp_path / "store" / path).read_bytes()) for path in files_of(tmp_path / "store")]
    contents = {path: (root / path).read_bytes() for path in plain.files}
    same_size = [pair for pair in itertools.permutations(contents.items(), 2) if len(pair[0][1]) == len(pair[1][1])]
    moved = [(one, content) for (one, before), (_, content) in same_size if content != before]
    for path, content in [*foreign, *moved[:: len(moved) // 12]]:
        if content == contents[path]:
            continue
        put = (root / path).write_bytes
        put(content)
        assert [f.path for f in verify_store(root).findings] == [path]  # and not its second copy, which is right
        put(contents[path])
        faults.append((path, functools.partial(put, content), functools.partial(put, contents[path])))
    assert {"manifest.json", "local.json", "records.parquet"} <= {path.rpartition("/")[2] for path, *_ in faults}
    read_after(faults, root, plain.read)


@STORES
def test_what_does_not_belong_is_named_and_hinders_no_reader(whole: Whole) -> None:
    root = whole.again()
    temporary = f"{TEMPORARY_PREFIX}host@1-2@0.json"
    strays = ["notes.txt", "buckets/64x64/.DS_Store", "revisions/000009/records.parquet"]
    strays += [f"revisions/{name}/plan/plan.json" for name in ("²", "9", "0" * 200)]
    for name in (*strays, f"revisions/000001/{temporary}", f"revisions/000002/{temporary}/plan.json"):
        write_file(root / name, "mine")
    (root / "elsewhere").symlink_to(root / "buckets")
    found = {f.path: f.cause for f in verify_store(root).findings}
    temporaries = dict.fromkeys([f"revisions/00000{i}/{temporary}" for i in (1, 2)], "temporary")
    assert found == dict.fromkeys([*strays, "elsewhere"], "stray") | temporaries
    assert read_all(root) == whole.read


def test_work_that_a_killed_seal_did_not_remove_does_no_harm(plain: Whole, not_sealed: Path) -> None:
    root = plain.again()
    for name in ("plan", "commits"):
        shutil.copytree(not_sealed / "revisions/000001" / name, root / "revisions/000001" / name)
    (root / "revisions/000001/twin/manifest.json").unlink()  # the seal writes it behind the manifest
    found = verify_store(root)
    assert {f.cause for f in found.findings} == {"temporary"}
    assert (found.complete, found.damaged) == (True, False)
    assert read_all(root) == plain.read
    assert repair_without_encoding(root, found).findings == []
    assert files_of(root) == plain.files


def unfinished(whole: Whole, work: Path) -> tuple[Path, int]:
    """The store while the next revision, or the first, is encoded: some of its shards are not committed."""
    source, root = copy.copy(whole.source), work / "store"
    source.root = shutil.copytree(whole.source.root, work / "source")
    revision = 1
    if whole.path.parent.name.startswith("grown"):
        shutil.copytree(whole.path, root)
        revision = LatentStore(root).revision + 1
        for i in (30, 31, 32, 33):
            source.put(i)
        source.write()
    without_seal(lambda: encode(caption_recipe(), source.root, root))
    commits = sorted((root / f"revisions/{revision:06d}/commits/buckets").glob("*/*.json"))
    for commit in commits[: 2 if revision == 1 else 1]:
        for entry in json.loads(commit.read_text())["files"]:
            (root / entry["path"]).unlink()
        commit.unlink()
    return root, revision


@pytest.mark.parametrize("whole", ["plain", "grown"], indirect=True)
def test_of_an_unfinished_revision_what_is_committed_is_checked(whole: Whole, tmp_path: Path) -> None:
    root, revision = unfinished(whole, tmp_path)
    found = verify_store(root)
    assert (found.findings, found.complete, found.damaged) == ([], False, False)
    assert found.revisions == list(range(1, revision))
    assert revision == 1 or read_all(root) == whole.read
    plan = read_plan(root, revision)
    part, shard = [task for task in plan.layout.tasks() if read_commit(root, plan, *task)][-1]
    commit = read_commit(root, plan, part, shard)
    assert commit is not None
    for entry in commit.files:
        flip(root / entry.path, 77)
        assert [(f.path, f.cause) for f in verify_store(root).findings] == [(entry.path, "content")]
        flip(root / entry.path, 77)
        data = (root / entry.path).read_bytes()
        (root / entry.path).unlink()
        assert [(f.path, f.cause) for f in verify_store(root).findings] == [(entry.path, "missing")]
        (root / entry.path).write_bytes(data)
    for name in ("plan/plan.json", "plan/records.parquet", f"commits/{part}/{shard:06d}.json"):
        path = f"revisions/{revision:06d}/{name}"
        flip(root / path, 1001)
        found = verify_store(root)
        assert found.damaged
        assert {f.path for f in found.findings} & {path, f"revisions/{revision:06d}/plan/plan.json"}
        flip(root / path, 1001)
    assert verify_store(root).findings == []


def test_a_revision_whose_seal_is_pending_is_named_so(not_sealed: Path, tmp_path: Path) -> None:
    root = copy_of(not_sealed, tmp_path / "store")
    found = verify_store(root)
    assert [(f.path, f.cause) for f in found.findings] == [("revisions/000001/manifest.json", "unsealed")]
    assert (found.complete, found.damaged) == (False, False)
    shard = shard_files(root)[0]
    flip(root / shard, 5)
    assert {f.path for f in verify_store(root).findings} == {"revisions/000001/manifest.json", shard}


def test_a_store_that_does_not_add_up_is_found(plain: Whole) -> None:
    root = plain.again()
    manifest = read_manifest(root, 1)
    wrong = manifest.model_copy(update={"num_stored": 3, "num_rejected": manifest.num_planned - 3})
    wrong = wrong.with_hash()
    for folder in ("", "twin/"):
        (root / f"revisions/000001/{folder}manifest.json").write_bytes(canonical_json(wrong.model_dump()))
    assert [f.cause for f in verify_store(root, quick=True).findings] == ["counts"]


def test_the_result_is_json_with_all_that_was_found_and_quick_reads_no_shard(plain: Whole) -> None:
    root = plain.again()
    shard, other = [path for path in shard_files(root) if "buckets/" in path][:2]
    flip(root / shard, 0)
    assert verify_store(root, quick=True).findings == []
    values = json.loads(json.dumps(verify_store(root).to_json(), allow_nan=False))
    said = {"store": str(root), "mode": "full", "complete": True, "revisions": [1], "damaged": True, "num_records": 12}
    assert values | said == values
    assert values["num_bytes"] == sum((root / path).stat().st_size for path in plain.files)
    assert min(values["seconds"], values["mib_per_second"]) > 0
    (finding,) = values["findings"]
    place = place_of(LatentStore(plain.path), shard)
    assert finding | {"detail": ""} == {
        **{"path": shard, "cause": "content", "detail": "", "revision": 1, "bucket": place.bucket},
        **{"shard": place.shard, "num_records": 1, "records": [place.records[0]]},
    }
    (root / other).unlink()
    quick = verify_store(root, quick=True)
    assert [f.path for f in quick.findings] == [other]
    assert quick.num_bytes < values["num_bytes"]
