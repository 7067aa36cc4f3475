"""EXIF is applied, HEIC is read where its library is, tiny images are rejected by request."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from image_files import encoded, exif
from making import encode, label_recipe, smooth_image

from leandit.datasets.errors import RecordRejected
from leandit.datasets.store import LatentStore
from leandit.precompute.images.pixels import COLOUR, read_size
from leandit.precompute.sources.files import record as source_record
from leandit.precompute.sources.source import list_source

pillow_heif = pytest.importorskip("pillow_heif")


def heic() -> bytes:
    """An image of 40x80 px."""
    pillow_heif.register_heif_opener()
    return encoded(smooth_image(0, 40, 80), "HEIF")


def test_the_fingerprint_says_what_is_done_to_colours_in_the_same_words() -> None:
    # Other words would change the fingerprint: no store could resume or grow.
    assert COLOUR == "exif orientation; white under alpha; 16-bit grey scaled; no colour profile"


@pytest.mark.usefixtures("quick")
def test_a_store_has_upright_images_and_no_tiny_ones(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "a").mkdir(parents=True)
    (source / "a/0.jpg").write_bytes(encoded(smooth_image(0, 40, 80), "JPEG", exif=exif(6)))
    (source / "a/1.heic").write_bytes(heic())
    smooth_image(1, 4, 200).save(source / "a/2.png")
    encode(label_recipe("source.max_reject_share=1", "images.min_px=8"), source, tmp_path / "store")
    records = LatentStore(tmp_path / "store").records.select(["key", "height_px", "reason"]).to_pylist()
    wanted = [("a/0.jpg", 80, None), ("a/1.heic", 40, None), ("a/2.png", None, "too_small")]
    assert [tuple(record.values()) for record in records] == wanted


def test_heic_without_its_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = heic()
    assert read_size(data) == (40, 80)
    smooth_image(0).save(tmp_path / "0.png")
    (tmp_path / "1.heic").write_bytes(data)
    assert len(list_source(tmp_path).records) == 2
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    with pytest.raises(RecordRejected, match=r"not_an_image.*leandit\[heif\]"):
        read_size(data)
    known = source_record.IMAGE_EXTENSIONS - source_record.HEIF_EXTENSIONS
    monkeypatch.setattr(source_record, "IMAGE_EXTENSIONS", known)
    source = list_source(tmp_path)
    assert [record.key for record in source.records] == ["0.png"]
    assert source.ignored.lines() == [
        "1 file, not images by name: 1 .heic",
        "HEIC and HEIF are read with pillow-heif: pip install 'leandit[heif]'",
    ]
