"""``--dry-run`` of a precompute: its bytes are those of the store, and a disk that is too small is refused."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import namedtuple
from pathlib import Path

import pytest
from making import (
    COMPANIONS,
    CPU,
    caption_recipe,
    encode,
    make_caption_folder,
    make_companion_folder,
    read_metadata,
    tree_digest,
    write_metadata,
)
from tiny_models import make_dinov2

from leandit.datasets.store import LatentStore
from leandit.errors import FingerprintMismatch, ResourceError, SourceError
from leandit.tools.plan import precompute_cost
from leandit.tools.plan.dry_run import describe_precompute
from leandit.tools.plan.precompute_cost import check_room

Usage = namedtuple("Usage", "total used free")


SLACK = 4 << 10  # of a store so small that its heads are most of its tables


def written_bytes(store: Path, *names: str) -> int:
    return sum(path.stat().st_size for name in names for path in (store / name).rglob("*") if path.is_file())


@pytest.mark.parametrize(
    "settings",
    [
        ['store.text_dtype="int8"', "store.shard_mib=1", "vae.flip=true"],
        ['store.text_dtype="bfloat16"', 'store.codec="blosc"'],
        *(pytest.param(settings, marks=pytest.mark.slow) for settings in ([], ['store.dtype="float32"'])),
    ],
)
def test_the_predicted_bytes_are_those_of_the_store(settings: list[str], tmp_path: Path) -> None:
    recipe, store = caption_recipe(*settings), tmp_path / "store"
    source = make_caption_folder(tmp_path / "source", count=30)
    shutil.copy(source / "images/0.png", source / "images/more.png")
    with (source / "metadata.jsonl").open("a") as lines:  # and one with captions enough to fill chunks
        captions = [f"a green square number {i} beside {'a small red circle ' * (i % 9)}" for i in range(250)]
        lines.write(json.dumps({"file_name": "images/more.png", "captions": captions}) + "\n")
    found = describe_precompute(recipe, source, CPU).new_bytes
    encode(recipe, source, store)
    written = written_bytes(store, "")
    assert written <= sum(found.values()) <= 1.3 * written + SLACK
    arrays = written_bytes(store, "buckets", "captions")
    assert abs(arrays - (found["latents"] + found["captions"])) <= 0.01 * arrays + SLACK
    assert abs(written_bytes(store, "captions") - found["captions"]) <= 0.01 * arrays + SLACK


def test_an_addition_to_a_finished_store_is_predicted_and_not_refused(tmp_path: Path) -> None:
    source, store = make_companion_folder(tmp_path / "source"), tmp_path / "store"
    more = [f"features.dino.model={make_dinov2(tmp_path / 'dinov2')}", *COMPANIONS]
    more += ["text.short.kind=t5", "text.short.model=shipped:t5", "text.short.max_tokens=5"]
    encode(caption_recipe(), source, store)
    before, was = written_bytes(store, "buckets", "captions"), tree_digest(store)
    found = describe_precompute(caption_recipe(*more), source, CPU, store=store)
    assert tree_digest(store) == was
    assert found.refusal is None
    for words in ("would add encoders or images to it", "would complete      8 images", "after startup", "iB"):
        assert words in found.text
    assert found.new_bytes["latents"] == 0
    encode(caption_recipe(*more), source, store)
    predicted = sum(size for name, size in found.new_bytes.items() if name != "tables")
    assert abs(written_bytes(store, "buckets", "captions") - before - predicted) <= SLACK
    with pytest.raises(FingerprintMismatch, match=r"latent\.batch_size"):
        describe_precompute(caption_recipe(*more, "vae.batch_size=5"), source, CPU, store=store)


def test_a_probe_leaves_nothing_behind(caption_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    before = tree_digest(caption_folder)
    text = describe_precompute(caption_recipe(), caption_folder, CPU, store=tmp_path / "store").text
    for words in ("iB before any codec", "9 distinct", "from 14 images", "iB on this machine", "after startup"):
        assert words in text
    assert tree_digest(caption_folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["temporary"]
    assert not list((tmp_path / "temporary").glob("leandit-probe-*"))


def test_a_disk_that_is_too_small_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompute_cost, "disk_usage", lambda path: Usage(0, 0, 1000))
    store = tmp_path / "not" / "there"
    check_room(store, 1000)
    with pytest.raises(ResourceError, match=r"the disk has 1000 B free, .* more are needed"):
        check_room(store, 1001)
    store.mkdir(parents=True)
    (store / "shard").write_bytes(bytes(500))
    check_room(store, 1500)  # a third of it is written
    with pytest.raises(ResourceError):
        check_room(store, 1501)


def test_growth_says_what_would_be_encoded(caption_folder: Path, caption_store: LatentStore, tmp_path: Path) -> None:
    source, store = shutil.copytree(caption_folder, tmp_path / "source"), tmp_path / "store"
    shutil.copytree(caption_store.path, store)
    assert "would encode        nothing" in describe_precompute(caption_recipe(), source, CPU, store=store).text
    shutil.copy(source / "images/4.png", source / "images/3.png")
    with (source / "metadata.jsonl").open("a") as lines:
        lines.write(json.dumps({"file_name": "images/none.png", "caption": "no file"}) + "\n")
        lines.write(json.dumps({"file_name": "images/more.png", "caption": "a new caption"}) + "\n")
    shutil.copy(source / "images/5.png", source / "images/more.png")
    before = tree_digest(store)
    heard: list[str] = []
    said = describe_precompute(caption_recipe(), source, CPU, store=store, say=heard.append)
    assert heard == ["encoding 2 of 2 images, and captions, to measure time and memory"]
    assert tree_digest(store) == before
    words = [" ".join(line.split()) for line in said.text.splitlines()]
    for line in (
        "source since the previous revision: 2 new, 1 changed",
        "would encode 2 images",
        "would reject 1 x missing_file",
    ):
        assert line in words
    assert "1 distinct" in said.text
    assert said.store_bytes == sum(said.new_bytes.values()) + sum(map(len, before.values()))
    report = encode(caption_recipe(), source, store)
    assert report.num_encoded == 2
    assert written_bytes(store, "revisions") <= sum(said.new_bytes.values())


def test_what_a_run_would_refuse_a_dry_run_refuses_alike(caption_folder: Path, tmp_path: Path) -> None:
    source, store = shutil.copytree(caption_folder, tmp_path / "source"), tmp_path / "store"
    rows = read_metadata(source)
    write_metadata(source, [{"file_name": row["file_name"]} for row in rows[:8]] + rows[8:])
    said = describe_precompute(caption_recipe(), source, CPU, store=store)
    assert "would reject 8 x no_caption" in " ".join(said.text.split())
    with pytest.raises(SourceError) as caught:
        encode(caption_recipe(), source, store)
    wanted = "8 of 14 records are rejected, more than source.max_reject_share = 0.01: 8 x no_caption."
    assert str(caught.value).startswith(wanted)
    assert str(said.refusal).startswith(wanted)
