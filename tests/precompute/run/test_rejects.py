"""One ledger of rejects: listing, planning, decoding and encoding count together, over parts and resumes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from making import (
    caption_recipe,
    encode,
    image_bytes,
    label_recipe,
    make_caption_folder,
    read_metadata,
    write_file,
    write_metadata,
    write_tar,
)

from leandit.datasets.format.schema import Manifest
from leandit.errors import SourceError
from leandit.precompute.sharing.leases import ALL_SHARDS, part_of

pytestmark = pytest.mark.usefixtures("quick")
Run = Callable[..., Manifest | None]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Precompute 25 images: 6 have no caption, 6 are cut short, which only their decoder sees; shards of one row."""
    monkeypatch.setattr("leandit.datasets.format.row_layout.MAX_SHARD_ROWS", 1)
    root = make_caption_folder(tmp_path / "source", count=25)
    rows = read_metadata(root)
    for i in range(6):
        rows[i].pop("captions")
        path = root / f"images/{10 + i}.png"
        path.write_bytes(path.read_bytes()[:-200])
    write_metadata(root, rows)

    def precomputed(*overrides: str, part: slice = ALL_SHARDS) -> Manifest | None:
        return encode(caption_recipe(*overrides), root, tmp_path / "store", part=part).manifest

    return precomputed


def test_rejects_of_all_parts_count_together(run: Run, tmp_path: Path) -> None:
    assert run("source.max_reject_share=0.4", part=part_of("1/2")) is None  # ten are allowed
    with pytest.raises(SourceError, match=r"1[12] of 25 records"):
        run("source.max_reject_share=0.4", part=part_of("2/2"))
    assert not (tmp_path / "store/revisions/000001/manifest.json").exists()


def test_a_listing_that_rejects_too_much_says_all_reasons_and_what_to_do(run: Run, tmp_path: Path) -> None:
    source = tmp_path / "source"
    rows = read_metadata(source)
    for row in rows:
        row.pop("captions", None)
    rows[0]["file_name"] = "images/none.png"
    write_metadata(source, rows)
    with pytest.raises(SourceError) as caught:
        run()
    said = str(caught.value)
    assert "25 of 25 records are rejected" in said
    assert ": 24 x no_caption, 1 x missing_file. The first is 'images/none.png'" in said
    assert "Captions are read from tables that name the images (metadata.jsonl" in said
    assert "--set source.missing_caption=null" in said
    assert not (tmp_path / "store").exists()


def test_a_tar_that_is_cut_short_during_a_run_stops_it(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name, count in (("a", 30), ("b", 90)):
        samples = [{"__key__": f"{name}{i}", "png": image_bytes(), "cls": i % 3} for i in range(count)]
        write_file(source / f"{name}.tar")
        write_tar(source / f"{name}.tar", *samples)
    whole = (source / "b.tar").read_bytes()

    def run(*overrides: str, cut: bool = False) -> Manifest | None:
        def progress(stage: str, done: int, total: int) -> None:
            if cut and stage == "scan" and done == total:
                os.truncate(source / "b.tar", 0)

        return encode(label_recipe(*overrides), source, tmp_path / "store", progress=progress).manifest

    why = r"50 records or captions in a row are rejected .*: 50 x source_changed\. .*0 bytes of \d+ are left in b"
    with pytest.raises(SourceError, match=why) as raised:
        run("source.max_reject_share=0.9", "source.max_rejects_in_a_row=50", cut=True)
    assert raised.value.exit_code == 3
    assert "cut short, replaced or rewritten" in str(raised.value)
    assert "restore them and run the same command again" in str(raised.value)
    (source / "b.tar").write_bytes(whole)
    manifest = run()
    assert manifest is not None
    assert (manifest.num_stored, manifest.num_rejected) == (120, 0)
