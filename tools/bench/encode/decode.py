"""``leandit bench decode``: pictures that one core decodes, crops and checksums a second, and what would change it.

It runs what a decoder child runs (``decoder_child.answer``), here and one picture after the other, and counts
processor time, so it is steady on a busy machine. Beside it: the same with another JPEG decoder, simplejpeg, for the
files that it can take.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import xxhash
from PIL import Image

from ....datasets.errors import RecordRejected, ResourceError, SourceError
from ....precompute.images.decoder_child import answer, read_bytes
from ....precompute.images.pixels import FORMATS, ORIENTATION_TAG, UPRIGHT, crop_picture
from ....precompute.sources.source import Source, list_source
from ..harness.meters import hardware

Job = dict[str, Any]


def run(source_path: str, side_px: int, rounds: int, records: int) -> dict[str, Any]:
    """Measure on the first pictures of a source, the ways in turn.

    Args:
      side_px: of the square that a picture becomes.
      records: to be measured, at most.
    Raises: SourceError: no picture can be decoded; ResourceError: simplejpeg is not installed.
    """
    jobs = _jobs(list_source(source_path), side_px, records)
    ways = _ways()
    differing = [job["path"] for job in jobs if not np.array_equal(ways["simplejpeg, adm"](job), ways["adm"](job))]
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.process_time()
            for job in jobs:
                way(job)
            seconds[name].append(time.process_time() - start)
    return {
        "source": source_path,
        "pictures": len(jobs),
        "side_px": side_px,
        "rounds": rounds,
        "hardware": hardware(),
        "taken_by_simplejpeg": sum(_is_plain_jpeg(_read(job)) for job in jobs),
        "differing": differing,
        "images_per_second": {name: [len(jobs) / one for one in found] for name, found in seconds.items()},
    }


def render(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Name and value of each line: the median of all rounds, the least and the most."""
    machine, rates = result["hardware"], result["images_per_second"]
    taken, total = result["taken_by_simplejpeg"], result["pictures"]
    rows = [
        ("machine", f"{machine['cpu']}, {machine['cores']} cores"),
        ("pictures", f"{total} of {result['source']}, to {result['side_px']} px"),
        ("simplejpeg", f"takes {taken} of {total}; {len(result['differing'])} come out with other pixels"),
    ]
    for name, found in rates.items():
        base = rates["bucket" if "bucket" in name else "adm"]
        ratio = median(one / other for one, other in zip(found, base, strict=True))
        spread = f"{min(found):.0f} to {max(found):.0f}"
        rows.append(("", f"{name:<20}{median(found):>6.0f} images/s a core ({spread}), {ratio:.2f}x"))
    return rows


def _jobs(source: Source, side_px: int, records: int) -> list[Job]:
    """Jobs of the pictures that can be decoded."""
    jobs = []
    for record in source.records[:records]:
        try:
            path, offset, num_bytes, data = source.place(record.path, record.offset, record.num_bytes, stage="decode")
            job: Job = {"stage": "decode", "path": str(path), "offset": offset, "num_bytes": num_bytes}
            job |= {} if data is None else {"data": data}
            job |= {"bucket": (side_px, side_px), "resize_filter": "bicubic"}
            answer({**job, "crop": "adm"})
        except RecordRejected:
            continue
        jobs.append(job)
    if not jobs:
        raise SourceError(f"source '{source.name}': none of its first {records} pictures can be decoded.")
    return jobs


def _ways() -> dict[str, Callable[[Job], np.ndarray]]:
    """What is measured, by name."""
    return {
        "adm": lambda job: _with_pillow(job, "adm"),
        "simplejpeg, adm": lambda job: _with_simplejpeg(job, "adm"),
        "bucket": lambda job: _with_pillow(job, "bucket"),
        "simplejpeg, bucket": lambda job: _with_simplejpeg(job, "bucket"),
    }


def _with_pillow(job: Job, crop: str) -> np.ndarray:
    """As a decoder child does it."""
    pixels = answer({**job, "crop": crop})[1]
    assert pixels is not None, "a decode is answered with pixels"
    return pixels


def _with_simplejpeg(job: Job, crop: str) -> np.ndarray:
    """As a decoder child would do it with simplejpeg for plain JPEGs."""
    try:
        import simplejpeg
    except ModuleNotFoundError as error:
        raise ResourceError("bench decode: it needs simplejpeg. Install leandit with its extra 'bench'.") from error
    data = _read(job)
    if not _is_plain_jpeg(data):
        return _with_pillow(job, crop)
    with Image.open(io.BytesIO(data), formats=FORMATS) as header:
        orientation = header.getexif().get(ORIENTATION_TAG, 1)
    picture = Image.fromarray(simplejpeg.decode_jpeg(data, "RGB"))
    if orientation in UPRIGHT:
        picture = picture.transpose(UPRIGHT[orientation])
    xxhash.xxh3_64_intdigest(data)  # as the child does
    return crop_picture(picture, job["bucket"], crop, job["resize_filter"])


def _is_plain_jpeg(data: bytes) -> bool:
    """A JPEG of three components, neither CMYK nor grey."""
    with Image.open(io.BytesIO(data), formats=FORMATS) as header:
        return header.format == "JPEG" and header.mode == "RGB"


def _read(job: Job) -> bytes:
    return job.get("data") or read_bytes(job["path"], job["offset"], job["num_bytes"], job["stage"])
