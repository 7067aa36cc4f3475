"""A store that grows: exactly what changed is encoded, nothing is touched, and every revision still opens."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import without_seal
from making import (
    SIZES,
    caption_recipe,
    encode,
    image_bytes,
    label_recipe,
    lasting_digest,
    make_caption_folder,
    make_class_folder,
    read_metadata,
    smooth_image,
    tree_digest,
    write_file,
    write_metadata,
    write_tar,
)
from stores import content

from leandit.datasets.loader import make_loader
from leandit.datasets.store import LatentStore
from leandit.errors import FingerprintMismatch, StoreError
from leandit.precompute import pipeline
from leandit.precompute.config import PrecomputeRecipe
from leandit.precompute.pipeline import Report

pytestmark = pytest.mark.usefixtures("quick")


def run(source: Path, store: Path, recipe: PrecomputeRecipe | None = None, **options: bool) -> Report:
    recipe = recipe or (caption_recipe() if (source / "metadata.jsonl").exists() else label_recipe())
    return encode(recipe, source, store, **options)


@pytest.fixture
def pair(caption_folder: Path, caption_store: LatentStore, tmp_path: Path) -> tuple[Path, Path]:
    """14 captioned images and their store, to be changed; copying keeps the times."""
    return shutil.copytree(caption_folder, tmp_path / "source"), shutil.copytree(caption_store.path, tmp_path / "store")


@pytest.fixture
def label_pair(class_folder: Path, label_store: LatentStore, tmp_path: Path) -> tuple[Path, Path]:
    """3 classes of 5 images and their store, to be changed."""
    return shutil.copytree(class_folder, tmp_path / "source"), shutil.copytree(label_store.path, tmp_path / "store")


def rewrite(source: Path, change: Callable[[list[dict[str, Any]]], Any]) -> None:
    """Change the rows of a ``metadata.jsonl``."""
    change(rows := read_metadata(source))
    write_metadata(source, rows)


def add_images(source: Path, start: int, stop: int) -> None:
    """Go on where ``make_caption_folder`` stopped."""
    for i in range(start, stop):
        smooth_image(i, *SIZES[i % 3]).save(source / f"images/{i}.png")
    rows = [{"file_name": f"images/{i}.png", "captions": [f"a red {i % 5}", f"image {i}"]} for i in range(start, stop)]
    rewrite(source, lambda old: old.extend(rows))


def assert_covers_once(store: LatentStore) -> None:
    """An epoch of training sees every stored record once, from its own bucket and with its own label."""
    seen = [
        (batch.bucket, index, label)
        for batch in make_loader(store, global_batch=4, seed=3)
        for index, label in zip(batch.records.tolist(), batch.labels.tolist(), strict=True)
    ]
    rows = enumerate(store.records.to_pylist())
    assert sorted(seen) == sorted((row["bucket"], i, row["label"]) for i, row in rows if row["status"] == "stored")


@pytest.fixture(autouse=True)
def _revision_1_is_never_touched(request: pytest.FixtureRequest) -> Iterator[None]:
    """Holds for every test of this file that starts with a complete store."""
    name = next((name for name in ("pair", "label_pair") if name in request.fixturenames), None)
    store = request.getfixturevalue(name)[1] if name else None
    before, old = (lasting_digest(store), content(LatentStore(store))) if store else ({}, {})
    yield
    after = lasting_digest(store) if store else {}
    assert [path for path, data in before.items() if after.get(path) != data] == []
    added = after.keys() - before
    assert all("/c/" in path or re.match("revisions/0+[2-9]/", path) for path in added), added
    assert not store or content(LatentStore(store, revision=1)) == old


def test_adding_four_to_fourteen_encodes_exactly_four(pair: tuple[Path, Path], seen: Any, tmp_path: Path) -> None:
    source, path = pair
    old, before = LatentStore(path), content(LatentStore(path))
    add_images(source, 14, 18)
    report = run(source, path)
    manifest = report.manifest
    assert (seen.images, report.num_encoded, manifest.num_planned, manifest.num_stored) == (4, 4, 18, 18)
    assert sorted(seen.texts) == sorted(f"{word}" for i in range(14, 18) for word in (f"a red {i % 5}", f"image {i}"))
    assert (report.changes.num_added, report.changes.num_changed, report.changes.carried.num_rows) == (4, 0, 14)
    store = LatentStore(path)
    assert (store.revision, report.manifest.base) == (2, old.root_hash)
    assert store.records["revision"].to_pylist() == [1] * 14 + [2] * 4
    assert store.buckets == {"48x80": 6, "64x64": 6, "80x48": 6}
    # The new ones have the same bits as in a store of these four alone.
    alone = make_caption_folder(tmp_path / "alone", count=0)
    add_images(alone, 14, 18)
    run(alone, tmp_path / "alone-store")
    assert content(store) == before | content(LatentStore(tmp_path / "alone-store"))
    assert np.array_equal(store.null_caption, old.null_caption)
    assert_covers_once(store)
    seen.forget()
    assert run(source, path).manifest == report.manifest  # and now it is complete
    assert (seen.images, seen.texts) == (0, [])


def assert_classes_fit(store: LatentStore, classes: list[str]) -> None:
    assert store.spec.classes == classes
    assert [classes[label] for label in store.records["label"].to_pylist()] == [
        key.split("/")[0] for key in store.records["key"].to_pylist()
    ]


def test_a_new_class_folder_moves_labels_and_one_that_is_gone_keeps_its_name(
    label_pair: tuple[Path, Path], seen: Any
) -> None:
    source, path = label_pair
    (source / "n0005").mkdir()
    smooth_image(500).save(source / "n0005/0.png")
    report = run(source, path)
    assert (seen.images, report.num_encoded) == (1, 1)
    assert report.changes.num_described == 10
    assert_classes_fit(LatentStore(path), ["n000", "n0005", "n001", "n002"])
    assert_classes_fit(LatentStore(path, revision=1), ["n000", "n001", "n002"])
    assert_covers_once(LatentStore(path))
    # The source's own classes move up; what is kept must not take over the label of another class.
    shutil.rmtree(source / "n000")
    run(source, path)
    assert_classes_fit(LatentStore(path), ["n0005", "n001", "n002", "n000"])
    before = tree_digest(path)
    run(source, path)
    assert tree_digest(path) == before
    run(source, path, drop_gone=True)
    assert_classes_fit(LatentStore(path), ["n0005", "n001", "n002"])


def test_a_record_that_is_gone_stays_until_it_is_dropped(pair: tuple[Path, Path], seen: Any) -> None:
    source, path = pair
    (source / "images/2.png").unlink()  # still listed
    rewrite(source, lambda rows: rows.pop(6))  # not even that
    before = tree_digest(path)
    report = run(source, path)
    assert (report.changes.num_gone, report.changes.num_dropped, tree_digest(path)) == (2, 0, before)
    add_images(source, 14, 15)
    run(source, path)
    report = run(source, path, drop_gone=True)
    store = LatentStore(path)
    assert (seen.images, report.changes.num_dropped, store.revision) == (1, 2, 3)
    assert report.manifest.num_stored == 13
    assert store.record("images/2.png").reason == "missing_file"
    with pytest.raises(StoreError, match=r"images/6\.png"):
        store.record("images/6.png")
    assert not [name for name in tree_digest(path) if name.startswith("revisions/000003/") and "/c/" in name]
    assert_covers_once(store)
    assert LatentStore(path, revision=2).record("images/6.png").status == "stored"


def test_a_key_that_is_listed_twice_is_one_record_and_one_reject_for_ever(tmp_path: Path, seen: Any) -> None:
    source, path = make_caption_folder(tmp_path / "source", count=4), tmp_path / "store"
    rewrite(source, lambda rows: rows.append(rows[1] | {"label": 7}))  # of the same label it would join the first
    for seed in (None, 71, 72):  # the record is changed, so it stands behind its repetition; then again
        seen.forget()
        if seed:
            smooth_image(seed, 60, 100).save(source / "images/1.png")
        manifest = run(source, path).manifest
        rows = [row for row in LatentStore(path).records.to_pylist() if row["key"] == "images/1.png"]
        found = sorted((row["status"], row["reason"]) for row in rows)
        assert found == [("rejected", "duplicate_key"), ("stored", None)]
        assert LatentStore(path).record("images/1.png").status == "stored"
        assert (manifest.num_planned, manifest.num_stored, seen.images) == (5, 4, 1 if seed else 4)
        assert_covers_once(LatentStore(path))
    seen.forget()
    add_images(source, 4, 5)
    run(source, path)
    assert seen.images == 1


def test_a_mended_file_is_taken_up_without_asking_and_others_when_asked(tmp_path: Path, seen: Any) -> None:
    source, path = make_class_folder(tmp_path / "source", classes=2, per_class=3), tmp_path / "store"
    (source / "n000/1.png").write_text("no image")
    cut = source / "n001/2.png"
    cut.write_bytes(cut.read_bytes()[:-200])
    run(source, path)
    before = tree_digest(path)
    run(source, path)
    assert tree_digest(path) == before

    smooth_image(5).save(source / "n000/1.png")
    seen.forget()
    run(source, path)
    store = LatentStore(path)
    mended, broken = store.record("n000/1.png"), store.record("n001/2.png")
    assert (mended.status, mended.attempts, mended.revision, seen.images) == ("stored", 1, 2, 1)
    assert (broken.status, broken.reason, broken.attempts, broken.revision) == ("rejected", "truncated", 1, 1)

    run(source, path, retry_rejected=True)
    broken = LatentStore(path).record("n001/2.png")
    assert (broken.status, broken.reason, broken.attempts, broken.revision) == ("rejected", "truncated", 2, 3)
    assert_covers_once(LatentStore(path))
    smooth_image(6).save(cut)
    run(source, path)
    assert (LatentStore(path).record("n001/2.png").status, LatentStore(path).buckets) == ("stored", {"32x32": 6})
    before = tree_digest(path)
    run(source, path, retry_rejected=True)  # nothing is left to retry
    assert tree_digest(path) == before


def test_a_repacked_tar_encodes_nothing(tmp_path: Path, seen: Any) -> None:
    path, tar = tmp_path / "store", write_file(tmp_path / "source/one.tar")
    samples = [{"__key__": f"{i}", "png": image_bytes(i), "cls": i % 2} for i in range(5)]
    write_tar(tar, *samples)
    run(tar.parent, path)
    before = tree_digest(path)
    seen.forget()
    write_tar(tar, *samples[::-1])  # other offsets, another time
    run(tar.parent, path)
    assert (seen.images, tree_digest(path)) == (0, before)
    samples[2] |= {"png": image_bytes(50)}
    write_tar(tar, *samples[:2], {"__key__": "new", "png": samples[0]["png"], "cls": 0}, *samples[2:])
    run(tar.parent, path)
    assert (seen.images, LatentStore(path).buckets) == (2, {"32x32": 6})
    assert_covers_once(LatentStore(path))


def test_a_source_that_changes_amid_growth_is_finished_first_and_grown_then(pair: tuple[Path, Path]) -> None:
    source, path = pair
    add_images(source, 14, 16)
    without_seal(lambda: run(source, path))
    add_images(source, 16, 17)
    assert run(source, path).manifest.revision == 3
    assert LatentStore(path).records["revision"].to_pylist() == [1] * 14 + [2] * 2 + [3]
    assert_covers_once(LatentStore(path))


def test_a_size_that_a_table_lies_about_costs_that_record_until_it_is_mended(tmp_path: Path) -> None:
    source, store = make_caption_folder(tmp_path / "source", count=3), tmp_path / "store"
    recipe = caption_recipe("source.sizes=manifest", "source.max_reject_share=1")
    for height_px, reason in ((60, "wrong_size"), (64, None)):  # of the first image, which has 64
        sizes = [(height_px, 64), *SIZES[1:]]
        rows = zip(read_metadata(source), sizes, strict=True)
        write_metadata(source, [row | {"height": height, "width": width} for row, (height, width) in rows])
        run(source, store, recipe)
        reasons = LatentStore(store).records["reason"].to_pylist()
        assert reasons == [reason, None, None]


def test_a_process_that_another_one_overtakes_reports_the_newest_revision(
    label_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    smooth_image(77).save(label_pair[0] / "n000/new.png")
    next_plan = pipeline.Stage1.next_plan

    def overtaken(*args: Any) -> Any:
        monkeypatch.setattr(pipeline.Stage1, "next_plan", next_plan)
        assert run(*label_pair).num_encoded == 1
        return next_plan(*args)

    monkeypatch.setattr(pipeline.Stage1, "next_plan", overtaken)
    report = run(*label_pair)
    assert (report.num_encoded, report.manifest.revision) == (0, 2)
    assert report.manifest.root_hash == LatentStore(label_pair[1]).root_hash


def test_an_image_that_changes_behind_the_plan_is_encoded_by_the_next_command(tmp_path: Path) -> None:
    source, path = make_class_folder(tmp_path / "source", classes=1, per_class=3), tmp_path / "store"

    def change_once_planned(stage: str, done: int, total: int) -> None:
        if stage == "scan":
            smooth_image(8, 90, 90).save(source / "n000/1.png")

    encode(label_recipe(), source, path, progress=change_once_planned)
    assert LatentStore(path).record("n000/1.png").reason == "source_changed"
    run(source, path)
    record = LatentStore(path).record("n000/1.png")
    assert (record.status, record.revision, record.height_px) == ("stored", 2, 90)


def test_an_unfinished_store_of_other_settings_says_that_it_must_be_finished_first(tmp_path: Path) -> None:
    source, path = make_class_folder(tmp_path / "source", classes=1, per_class=3), tmp_path / "store"
    without_seal(lambda: run(source, path))
    before = tree_digest(path)
    with pytest.raises(FingerprintMismatch, match="use another --store; or first finish this one"):
        run(source, path, label_recipe("vae.keep=mean"))
    assert tree_digest(path) == before
