"""One ledger of rejects: listing, planning, decoding and encoding count together, over parts and resumes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from making import CPU, caption_recipe, make_caption_folder, no_progress

from leandit.datasets.errors import SourceError
from leandit.datasets.format.schema import Manifest
from leandit.precompute.pipeline import precompute
from leandit.precompute.sharing.part import Part

pytestmark = pytest.mark.usefixtures("quick")
Run = Callable[..., Manifest | None]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Precompute 25 pictures: 6 have no caption, 6 are cut short, which only their decoder sees; shards of one row."""
    monkeypatch.setattr("leandit.datasets.format.row_layout.MAX_SHARD_ROWS", 1)
    root = make_caption_folder(tmp_path / "source", count=25)
    rows = [json.loads(line) for line in (root / "metadata.jsonl").read_text().splitlines()]
    for i in range(6):
        rows[i].pop("captions")
        path = root / f"images/{10 + i}.png"
        path.write_bytes(path.read_bytes()[:-200])
    (root / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def precomputed(*overrides: str, part: Part | None = None) -> Manifest | None:
        recipe = caption_recipe(*overrides)
        store = tmp_path / "store"
        return precompute(
            recipe, source_path=root, store_path=store, device=CPU, progress=no_progress, part=part
        ).manifest

    return precomputed


def test_rejects_of_listing_and_decoding_count_together(run: Run, tmp_path: Path) -> None:
    for _ in range(2):  # the same command again stops as well
        with pytest.raises(SourceError, match=r"11 of 25 records .*: 6 x no_caption, 5 x truncated.*max_reject_share"):
            run()
        assert not (tmp_path / "store/manifest.json").exists()
    manifest = run("source.max_reject_share=0.5")
    assert manifest is not None
    assert (manifest.num_stored, manifest.num_rejected) == (13, 12)
    assert run() == manifest  # what is sealed is accepted


def test_rejects_of_all_parts_count_together(run: Run, tmp_path: Path) -> None:
    assert run("source.max_reject_share=0.4", part=Part(1, 2)) is None  # ten are allowed
    with pytest.raises(SourceError, match=r"11 of 25 records"):
        run("source.max_reject_share=0.4", part=Part(2, 2))
    assert not (tmp_path / "store/manifest.json").exists()


def test_a_listing_that_rejects_too_much_says_all_reasons_and_what_to_do(run: Run, tmp_path: Path) -> None:
    source = tmp_path / "source"
    rows = [json.loads(line) for line in (source / "metadata.jsonl").read_text().splitlines()]
    for row in rows:
        row.pop("captions", None)
    rows[0]["file_name"] = "images/none.png"
    (source / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(SourceError) as caught:
        run()
    said = str(caught.value)
    assert "25 of 25 records are rejected" in said
    assert ": 24 x no_caption, 1 x missing_file. The first is 'images/none.png'" in said
    assert "docs/sources.md says which tables" in said
    assert "--set source.missing_caption=null" in said
    assert not (tmp_path / "store").exists()
