"""Small sources for the tests: pictures, tars and tables, and what a listing says of them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import webdataset
from making import picture

from leandit.precompute.sources.source import Source

NAMES = ("a.jpg", "b.jpg", "c.jpg")


def put(path: Path, content: bytes | str = b"") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def pictures(folder: Path, *names: str) -> Path:
    for i, name in enumerate(names or NAMES):
        buffer = io.BytesIO()
        picture(i, 8, 8).save(buffer, "JPEG")
        put(folder / name, buffer.getvalue())
    return folder


def said(source: Source) -> list[tuple[str, str, int, tuple[str, ...]]]:
    """Key, path, label and captions of the good records, or the reason of a reject."""
    return [
        (r.key, r.problem[0], -1, ()) if r.problem else (r.key, r.path, r.label, r.captions) for r in source.records
    ]


def write_tar(path: Path, *samples: dict[str, Any]) -> Path:
    with webdataset.TarWriter(str(path)) as tar:
        for sample in samples:
            tar.write(sample)
    return path
