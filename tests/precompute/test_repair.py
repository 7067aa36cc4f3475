"""``verify --repair`` and ``--deep``: what is damaged comes back to the byte, or is named and left as it is."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults import DAMAGES, dies_at, encode_wrongly, flip, num_operations, without_seal
from making import caption_recipe, encode, smooth_image, store_digest, tree_digest
from stores import ImageSource, checked, copy_of, deep, files_of, make_added, make_grown, make_plain, small_shards

from leandit.datasets.disk.files import TEMPORARY_PREFIX
from leandit.datasets.format.layout import commit_path
from leandit.datasets.maintenance.verify import verify_store
from leandit.datasets.store import LatentStore
from leandit.errors import FingerprintMismatch, RecipeError, StoreError

FIRST = "revisions/000001/"


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
    return make_plain(tmp_path_factory.mktemp("flipped"), "vae.flip=true", "store.codec=blosc")


mended = functools.partial(checked, repair=True)


WAYS = ("a flipped bit", "gone", "half", "a space")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("name", "step", "turn"),
    [
        *(("plain", 3, 0), ("added", 20, 1), ("flipped", 12, 2)),
        *(pytest.param(name, 1, i, marks=pytest.mark.slow) for name in ("plain", "added", "flipped") for i in range(4)),
    ],
)
def test_every_file_is_repaired_to_the_byte(
    name: str, step: int, turn: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """From any damage, with the source; each file is damaged alone."""
    images, store = request.getfixturevalue(name)
    root, whole = copy_of(store, tmp_path / "store"), tree_digest(store)
    for number, path in enumerate(files_of(store)[::step]):
        how = WAYS[(number + turn) % 4]
        if how == "a space":  # within JSON it leaves the values as they are
            (root / path).write_bytes(whole[path].replace(b'": ', b'":  ', 1) + b" " * (b'": ' not in whole[path]))
        else:
            DAMAGES[how][0](root / path)
        found, done = mended(root, images.root)
        assert (found.findings, found.damaged) == ([], False), (how, path)
        assert done["before"] >= 1
        assert tree_digest(root) == whole, path


def test_a_row_is_repaired_though_other_images_of_its_shard_are_gone(
    grown: tuple[ImageSource, Path], tmp_path: Path
) -> None:
    # Rows 0 and 1 of revision 1 are image 0, which was dropped, and image 3, which is as it was.
    root, whole = copy_of(grown[1], tmp_path / "store"), tree_digest(grown[1])
    shard, row_bytes = "buckets/64x64/moments/c/0/0/0/0", LatentStore(root, revision=1).latents("64x64").row_bytes
    flip(root / shard, 100)
    found, _ = mended(root, grown[0].root)
    assert [(f.cause, f.records) for f in found.findings] == [("not_reproduced", ["images/0.png"])]
    (root / shard).write_bytes(whole[shard])
    flip(root / shard, 8 * row_bytes + 100)
    assert verify_store(root).findings[0].records == ["images/3.png"]
    assert mended(root, grown[0].root)[0].findings == []
    assert tree_digest(root) == whole


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


@pytest.mark.parametrize("path", ["revisions/000001/manifest.json", "zarr.json", "buckets/64x64/moments/c/0/0/0/0"])
def test_a_folder_or_link_in_the_place_of_a_file_gives_way(
    path: str, plain: tuple[ImageSource, Path], tmp_path: Path
) -> None:
    root = copy_of(plain[1], tmp_path / "store")
    (root / path).rename(tmp_path / "target")
    (root / path).symlink_to(tmp_path / "target")
    assert verify_store(root).damaged
    assert mended(root, plain[0].root)[0].findings == []
    assert not (root / path).is_symlink()
    assert (tmp_path / "target").exists()
    for _ in range(2):
        assert mended(root, plain[0].root)[0].findings == []
        (root / path).unlink()
        (root / path).mkdir()
    (root / path / "notes.txt").write_text("mine")
    with pytest.raises(StoreError, match="folder with files"):
        mended(root, plain[0].root)
    assert (root / path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("step", [31, pytest.param(1, marks=pytest.mark.slow)])
def test_a_repair_that_is_killed_goes_on(step: int, plain: tuple[ImageSource, Path], tmp_path: Path) -> None:
    work = tmp_path / "store"

    def damaged() -> Path:
        root = copy_of(plain[1], work)
        for path in ("buckets/64x64/moments/c/0/0/0/0", "captions/null/c/0/0", "zarr.json", FIRST + "manifest.json"):
            flip(root / path, 99)
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


def test_an_unfinished_store_is_for_precompute_to_finish_and_a_pending_seal_is_made(
    plain: tuple[ImageSource, Path], tmp_path: Path
) -> None:
    images, root, damaged = plain[0].root, tmp_path / "store", "buckets/48x80/moments/c/0/0/0/0"
    without_seal(lambda: encode(caption_recipe(), images, root))
    pending = copy_of(root, tmp_path / "pending")
    assert [finding.cause for finding in verify_store(pending).findings] == ["unsealed"]
    assert mended(pending, None)[0].findings == []
    assert store_digest(pending) == store_digest(plain[1])
    (root / commit_path(1, "buckets/64x64", 1)).unlink()
    flip(root / damaged, 50)
    found, _ = mended(root, images)
    assert ([finding.path for finding in found.findings], found.complete) == ([damaged], False)
    assert encode(caption_recipe(), images, root).num_encoded == 4
    assert store_digest(root) == store_digest(plain[1])


def test_another_encoder_is_refused_and_foreign_files_are_named_and_left(
    plain: tuple[ImageSource, Path], tmp_path: Path
) -> None:
    root = copy_of(plain[1], tmp_path / "store")
    (root / "buckets/64x64/moments/c/0/0/0/0").unlink()
    (root / "notes.txt").write_text("mine")
    before = tree_digest(root)
    with pytest.raises(FingerprintMismatch, match="batch_size"):
        mended(root, plain[0].root, "vae.batch_size=2")
    assert tree_digest(root) == before
    (root / f"revisions/000001/{TEMPORARY_PREFIX}host@1-2@x").write_text("half")
    found, _ = mended(root, plain[0].root)
    assert [(finding.path, finding.cause) for finding in found.findings] == [("notes.txt", "stray")]
    assert tree_digest(root) == tree_digest(plain[1]) | {"notes.txt": b"mine"}


def test_deep_names_a_changed_image_and_finds_no_fault_in_the_store(
    plain: tuple[ImageSource, Path], tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match="--source"):
        checked(plain[1], deep=True)
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
