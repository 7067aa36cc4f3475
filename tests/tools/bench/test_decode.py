"""The decode benchmark: it measures what a decoder child does, and notices pixels that differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
from making import picture
from pictures import encoded, exif

from leandit.datasets.errors import SourceError
from leandit.tools.bench.encode import decode as bench_decode


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JPEGs: plain, turned, progressive, with less colour, grey, CMYK; a PNG; and one that ends too early."""
    root = tmp_path_factory.mktemp("decode")
    image = picture(1, 70, 51)
    files = {f"{way}.jpg": encoded(image, "JPEG", subsampling=way) for way in ("4:4:4", "4:2:2", "4:2:0")}
    files |= {f"turned{way}.jpg": encoded(image, "JPEG", exif=exif(way)) for way in range(2, 9)}
    files |= {"progressive.jpg": encoded(image, "JPEG", progressive=True)}
    files |= {f"{mode}.jpg": encoded(image.convert(mode), "JPEG") for mode in ("L", "CMYK")}
    files |= {"plain.png": encoded(image, "PNG"), "cut.jpg": encoded(image, "JPEG")[:400]}
    (root / "class").mkdir()
    for name, data in files.items():
        (root / "class" / name.replace(":", "")).write_bytes(data)
    return root


def test_every_way_is_measured_and_the_pixels_are_compared(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = bench_decode.run(str(source), 16, rounds=2, records=99)
    assert (result["pictures"], result["taken_by_simplejpeg"], result["differing"]) == (14, 11, [])
    assert all(len(found) == 2 and min(found) > 0 for found in result["images_per_second"].values())
    assert len(bench_decode.render(result)) == 3 + len(result["images_per_second"])

    def wrong(data: bytes, *_: Any) -> np.ndarray:
        return decode(data, "RGB") ^ 1

    decode = simplejpeg.decode_jpeg
    monkeypatch.setattr(simplejpeg, "decode_jpeg", wrong)
    assert len(bench_decode.run(str(source), 16, rounds=1, records=99)["differing"]) == 11


def test_a_source_of_which_nothing_can_be_decoded_is_refused(source: Path) -> None:
    with pytest.raises(SourceError, match="can be decoded"):
        bench_decode.run(str(source), 16, rounds=1, records=0)
