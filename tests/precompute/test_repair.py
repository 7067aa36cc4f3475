"""``verify --repair`` and ``--deep``: what is damaged comes back to the byte, or is named and left as it is."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults import DAMAGES, REVISION_FILES, dies_at, encode_wrongly, flip, num_operations, without_seal
from making import Leandit, caption_recipe, encode, smooth_image, store_digest, tree_digest
from stores import ImageSource, checked, copy_of, deep, files_of, make_added, make_grown, make_plain, small_shards

from leandit.datasets.disk.files import TEMPORARY_PREFIX
from leandit.datasets.errors import FingerprintMismatch, RecipeError, StoreError
from leandit.datasets.format.layout import commit_path
from leandit.datasets.maintenance.verify import verify_store
from leandit.datasets.revisions.catalog import sealed_revisions
from leandit.datasets.revisions.plan import read_plan
from leandit.datasets.store import LatentStore
from leandit.precompute.run.tasks import Runner

FIRST = "revisions/000001/"


def every(step: int) -> Any:
    """A sample by default, all in the long form."""
    return pytest.mark.parametrize(
        "step", [pytest.param(step, id="sample"), pytest.param(1, id="all", marks=pytest.mark.slow)]
    )


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    with small_shards():
        yield


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[ImageSource, Path]:
    return make_plain(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> tuple[ImageSource, Path]:
    return make_grown(tmp_path_factory.mktemp("grown"))


@pytest.fixture(scope="module")
def added(tmp_path_factory: pytest.TempPathFactory) -> tuple[ImageSource, Path]:
    return make_added(tmp_path_factory.mktemp("added"))


@pytest.fixture(scope="module")
def flipped(tmp_path_factory: pytest.TempPathFactory) -> tuple[ImageSource, Path]:
    return make_plain(tmp_path_factory.mktemp("flipped"), "vae.flip=true", "store.codec=zstd")


mended = functools.partial(checked, repair=True)


@pytest.fixture
def tasks_encoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Spies on the shards that a repair encodes."""
    seen: list[tuple[str, int]] = []
    real = Runner.remake

    def spy(self: Runner, plan: Any, tasks: Any, *more: Any) -> Any:
        seen.extend(tasks)
        return real(self, plan, tasks, *more)

    monkeypatch.setattr(Runner, "remake", spy)
    return seen


def damage(file: Path, how: str) -> None:
    DAMAGES[how][0](file)


ROTATED = [["a flipped bit", "gone", "half"], ["gone", "half", "a flipped bit"], ["half", "a flipped bit", "gone"]]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("name", "step", "turn"),
    [
        *(("plain", 3, 0), ("added", 20, 0), ("flipped", 12, 0)),
        *(pytest.param(name, 1, i, marks=pytest.mark.slow) for name in ("plain", "added", "flipped") for i in range(3)),
    ],
)
def test_every_file_is_repaired_to_the_byte(
    name: str, step: int, turn: int, request: pytest.FixtureRequest, tmp_path: Path, tasks_encoded: list
) -> None:
    """From any damage, with the source; each file is damaged alone."""
    images, store = request.getfixturevalue(name)
    root, whole = copy_of(store, tmp_path / "store"), tree_digest(store)
    for number, path in enumerate(files_of(store)[::step]):
        how = ROTATED[turn][number % 3]
        damage(root / path, how)
        tasks_encoded.clear()
        found, done = mended(root, images.root)
        assert (found.findings, found.damaged) == ([], False), (how, path)
        assert done["before"] >= 1
        task = task_of(store, path)
        assert tasks_encoded == ([task] if task else []), path
        assert tree_digest(root) == whole, path


def test_a_row_is_repaired_though_other_images_of_its_shard_are_gone(
    grown: tuple[ImageSource, Path], tmp_path: Path
) -> None:
    # Of revision 1, image 4 is gone and image 1 is another now; they share a shard. Image 3 is as it was.
    root, whole = copy_of(grown[1], tmp_path / "store"), tree_digest(grown[1])
    records = {r["key"]: r for r in LatentStore(root, revision=1).records.to_pylist()}
    row = {key: records[f"images/{key}.png"] for key in (0, 1, 3, 4)}
    assert {(r["bucket"], r["row"]) for r in (row[1], row[4])} == {("48x80", 0), ("48x80", 1)}
    path = root / "buckets/48x80/moments/c/0/0/0/0"
    for damaged in range(2):
        flip(path, 8 * damaged * LatentStore(root, revision=1).latents("48x80").row_bytes + 100)
        found, _ = mended(root, grown[0].root)
        assert [(f.cause, f.records) for f in found.findings] == [("not_reproduced", [f"images/{(1, 4)[damaged]}.png"])]
        path.write_bytes(whole["buckets/48x80/moments/c/0/0/0/0"])
    assert {(r["bucket"], r["row"]) for r in (row[0], row[3])} == {("64x64", 0), ("64x64", 1)}
    gone = root / "buckets/64x64/moments/c/0/0/0/0"  # of images 0, which was dropped, and 3
    flip(gone, 8 * LatentStore(root, revision=1).latents("64x64").row_bytes + 100)
    assert verify_store(root).findings[0].records == ["images/3.png"]
    assert mended(root, grown[0].root)[0].findings == []
    assert tree_digest(root) == whole


@every(3)
def test_without_a_source_all_but_shards_is_mended(
    step: int, plain: tuple[ImageSource, Path], tmp_path: Path, tasks_encoded: list[tuple[str, int]]
) -> None:
    whole = tree_digest(plain[1])
    root = copy_of(plain[1], tmp_path / "store")
    for number, path in enumerate(files_of(plain[1])[::step]):
        damage(root / path, ROTATED[1][number % 3])
        found, _ = mended(root, None)
        if task_of(plain[1], path):
            assert [finding.path for finding in found.findings] == [path]
            assert found.damaged
        else:
            assert found.findings == [], path
        (root / path).write_bytes(whole[path])
    assert tasks_encoded == []


def test_a_changed_source_is_never_written_in_the_place_of_what_was_encoded(
    plain: tuple[ImageSource, Path], tmp_path: Path
) -> None:
    root, source = copy_of(plain[1], tmp_path / "store"), copy_of(plain[0].root, tmp_path / "source")
    record = next(r for r in LatentStore(root).records.to_pylist() if r["row"] == 0 and r["bucket"] == "64x64")
    smooth_image(99, 64, 64).save(source / record["key"])
    path = "buckets/64x64/moments/c/0/0/0/0"
    flip(root / path, 100)
    before = tree_digest(root)
    found, _ = mended(root, source)
    assert [(finding.path, finding.cause) for finding in found.findings] == [(path, "not_reproduced")]
    assert "another image in the source" in found.findings[0].detail
    assert (found.damaged, found.findings[0].bucket, found.findings[0].shard) == (True, "64x64", 0)
    assert tree_digest(root) == before
    (source / record["key"]).unlink()
    found, _ = mended(root, source)
    assert f"such as '{record['key']}': unreadable" in found.findings[0].detail
    assert tree_digest(root) == before
    (source / record["key"]).write_bytes((plain[0].root / record["key"]).read_bytes())
    assert mended(root, source)[0].findings == []
    assert tree_digest(root) == tree_digest(plain[1])


def test_another_encoder_is_refused_and_nothing_is_written(plain: tuple[ImageSource, Path], tmp_path: Path) -> None:
    root = copy_of(plain[1], tmp_path / "store")
    (root / "buckets/64x64/moments/c/0/0/0/0").unlink()
    before = tree_digest(root)
    with pytest.raises(FingerprintMismatch, match="batch_size"):
        mended(root, plain[0].root, "vae.batch_size=2")
    assert tree_digest(root) == before


def test_foreign_files_are_named_and_left(plain: tuple[ImageSource, Path], tmp_path: Path) -> None:
    root = copy_of(plain[1], tmp_path / "store")
    (root / "notes.txt").write_text("mine")
    (root / f"{TEMPORARY_PREFIX}host@1-2@x").write_text("half")
    (root / "buckets/64x64/moments/c/0/0/0/0").unlink()
    found, _ = mended(root, plain[0].root)
    assert [(finding.path, finding.cause) for finding in found.findings] == [("notes.txt", "stray")]
    assert (root / "notes.txt").read_text() == "mine"
    (root / "notes.txt").unlink()
    assert tree_digest(root) == tree_digest(plain[1])


@pytest.mark.parametrize(
    "path",
    [
        "revisions/000001/manifest.json",
        "revisions/000001/sources.parquet",
        "zarr.json",
        "buckets/64x64/moments/c/0/0/0/0",
    ],
)
def test_a_folder_or_link_in_the_place_of_a_file_gives_way(
    path: str, plain: tuple[ImageSource, Path], tmp_path: Path
) -> None:
    root = copy_of(plain[1], tmp_path / "store")
    for elsewhere in ("right", "wrong"):
        target = tmp_path / elsewhere
        target.write_bytes((plain[1] / path).read_bytes() if elsewhere == "right" else b"other")
        (root / path).unlink()
        (root / path).symlink_to(target)
        assert verify_store(root).damaged
        assert mended(root, plain[0].root)[0].findings == []
        assert not (root / path).is_symlink()
        assert target.exists()
    (root / path).unlink()
    (root / path).mkdir()
    assert mended(root, plain[0].root)[0].findings == []
    (root / path).unlink()
    (root / path).mkdir()
    (root / path / "notes.txt").write_text("mine")
    with pytest.raises(StoreError, match="folder with files"):
        mended(root, plain[0].root)
    assert (root / path / "notes.txt").read_text() == "mine"


@every(31)
def test_a_repair_that_is_killed_goes_on(step: int, plain: tuple[ImageSource, Path], tmp_path: Path) -> None:
    work = tmp_path / "store"

    def damaged() -> Path:
        root = copy_of(plain[1], work)
        for path in ("buckets/64x64/moments/c/0/0/0/0", "captions/null/c/0/0", "zarr.json", FIRST + "manifest.json"):
            damage(root / path, "a flipped bit")
        (root / FIRST / "records.parquet").unlink()
        return root

    repair = functools.partial(mended, work, plain[0].root)
    damaged()
    total = num_operations(repair)
    assert total > 20
    for at in range(0, total, step):
        damaged()
        assert dies_at(at, repair), at
        found, _ = mended(work, plain[0].root)
        assert found.findings == [], at
        assert tree_digest(work) == tree_digest(plain[1])


@pytest.mark.parametrize("rounds", [4, pytest.param(12, marks=pytest.mark.slow)])
def test_several_faults_at_once_never_make_it_worse(
    rounds: int, grown: tuple[ImageSource, Path], tmp_path: Path
) -> None:
    rng, mended_all = random.Random(4), 0
    for _ in range(rounds):
        root = copy_of(grown[1], tmp_path / "store")
        for path in rng.sample(files_of(grown[1]), rng.randrange(2, 6)):
            damage(root / path, rng.choice(ROTATED[0]))
        before = {finding.path for finding in verify_store(root).findings}
        intact = {*files_of(grown[1])} - before
        left = {finding.path for finding in mended(root, grown[0].root)[0].findings}
        mended_all += not left
        for path in intact:
            assert (root / path).read_bytes() == (grown[1] / path).read_bytes()
        LatentStore(root, allow_incomplete=True) if not left else None
    assert mended_all >= rounds * 2 // 3


def unsealed(images: ImageSource, root: Path) -> Path:
    """A store whose shards are all committed, and that is not sealed."""
    without_seal(lambda: encode(caption_recipe(), images.root, root))
    return root


def test_an_unfinished_store_is_for_precompute_to_finish(
    plain: tuple[ImageSource, Path], tmp_path: Path, tasks_encoded: list[tuple[str, int]]
) -> None:
    root = unsealed(plain[0], tmp_path / "store")
    (root / commit_path(1, "buckets/64x64", 1)).unlink()
    damaged = "buckets/48x80/moments/c/0/0/0/0"
    flip(root / damaged, 50)
    found, _ = mended(root, plain[0].root)
    assert ([finding.path for finding in found.findings], found.complete) == ([damaged], False)
    assert tasks_encoded == []
    assert encode(caption_recipe(), plain[0].root, root).num_encoded == 4
    assert store_digest(root) == store_digest(plain[1])


def test_a_seal_that_is_pending_is_made_by_a_repair(plain: tuple[ImageSource, Path], tmp_path: Path) -> None:
    root = unsealed(plain[0], tmp_path / "store")
    assert [finding.cause for finding in verify_store(root).findings] == ["unsealed"]
    assert mended(root, None)[0].findings == []
    assert store_digest(root) == store_digest(plain[1])


@pytest.mark.parametrize("name", ["plain", "grown", "flipped"])
def test_encoding_again_gives_the_same_bits(name: str, request: pytest.FixtureRequest) -> None:
    images, store = request.getfixturevalue(name)
    opened, found = LatentStore(store), deep(store, images.root)
    assert opened.manifest is not None
    num_captions = opened.captions.num_rows
    assert (found.num_records, found.num_captions) == (opened.manifest.num_stored, num_captions)
    assert (found.findings, found.num_close, found.num_exact) == ([], 0, found.num_records + num_captions)
    few = deep(store, images.root, num_records=3, seed=5)
    assert (few.num_records, few.num_captions, few.num_exact) == (3, 3, 6)


def test_deep_names_a_changed_image_and_finds_no_fault_in_the_store(
    plain: tuple[ImageSource, Path], tmp_path: Path
) -> None:
    source = copy_of(plain[0].root, tmp_path / "source")
    smooth_image(77, 64, 64).save(source / "images/0.png")
    (source / "images/3.png").unlink()
    found, done = checked(plain[1], source, deep=True)
    assert sorted((f.cause, *f.records) for f in found.findings) == [
        ("source_changed", "images/0.png"),
        ("source_changed", "images/3.png"),
    ]
    assert not found.damaged
    assert done["deep"]["findings"] == 2
    # Those whose neighbours in the batch changed may differ in their last bits, no more.
    assert done["deep"]["num_exact"] + done["deep"]["num_close"] == 8 + done["deep"]["num_captions"]


def task_of(root: Path, path: str) -> tuple[str, int] | None:
    """The task that wrote a shard."""
    tasks = (read_plan(root, revision).layout.task_of_file.get(path) for revision in sealed_revisions(root))
    return next(filter(None, tasks), None)


@pytest.mark.parametrize("array", ["buckets/64x64/moments", "captions/embeddings"])
def test_deep_finds_a_wrong_row_that_fits_all_checksums(
    array: str, plain: tuple[ImageSource, Path], tmp_path: Path
) -> None:
    root = tmp_path / "store"
    encode_wrongly(caption_recipe(), plain[0].root, root, [array], 1.0)
    assert verify_store(root).findings == []
    (finding,) = deep(root, plain[0].root).findings
    assert (finding.cause, finding.num_records) == ("not_reproduced", 1)
    assert finding.path.startswith(f"{array}/c/0/")
    store = LatentStore(root)
    first = store.record_at(int(store.index("64x64").records[0])).key
    assert finding.records == ([first] if "moments" in array else store.captions["text"].to_pylist()[:1])


def test_deep_needs_a_source_and_says_so_first(plain: tuple[ImageSource, Path]) -> None:
    with pytest.raises(RecipeError, match="--source"):
        checked(plain[1], deep=True)


def one_of_each_kind(store: Path) -> list[str]:
    """A file of each kind that is no shard, of each revision; the kind is its path without names and numbers."""
    kinds: dict[str, str] = {}
    for path in files_of(store):
        if task_of(store, path) is None and not path.endswith("/c/0"):
            kinds.setdefault(re.sub(r"\d+x\d+|/\d+(\.json)?$", "", path), path)
    return list(kinds.values())


@pytest.mark.parametrize(
    ("name", "turns"),
    [("plain", 1), pytest.param("plain", 3, marks=pytest.mark.slow), pytest.param("grown", 3, marks=pytest.mark.slow)],
)
def test_metadata_of_every_kind_comes_back_to_the_byte_at_once(
    name: str, turns: int, request: pytest.FixtureRequest, tmp_path: Path, leandit: Leandit
) -> None:
    """Each kind is harmed in one way by default, in three in the long form."""
    store = request.getfixturevalue(name)[1]
    root, whole = copy_of(store, tmp_path / "store"), tree_digest(store)

    kinds = one_of_each_kind(store)
    assert {Path(path).name for path in kinds} >= {"zarr.json", *REVISION_FILES}
    assert any("/twin/" in path for path in kinds)
    for number, path in enumerate(kinds * turns):
        how, written = ("newline", "space", "gone")[(number + number // len(kinds)) % 3], whole[path]
        if how == "gone":
            (root / path).unlink()
        else:  # a space within JSON leaves its values as they are
            spaced = written.replace(b'": ', b'":  ', 1) if path.endswith(".json") else b" " + written
            (root / path).write_bytes(written + b"\n" if how == "newline" else spaced)
        assert leandit("verify", root).code == 4, path
        assert leandit("verify", root, "--repair").code == 0, path
        assert tree_digest(root) == whole, path
    assert leandit("verify", root).code == 0
