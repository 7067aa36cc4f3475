"""What a source says of one picture, and how much of what it claims is believed.

What a source of others can claim is bounded before it is believed (``docs/security.md``): names, labels, captions.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

HEIF_EXTENSIONS = frozenset([".heic", ".heif", ".hif"])  # read by pillow-heif, where it is installed
IMAGE_EXTENSIONS = frozenset(
    [".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".avif", ".jfif"]
) | (HEIF_EXTENSIONS if importlib.util.find_spec("pillow_heif") else frozenset())
MAX_CLASSES = 1_000_000  # a larger label is a mistake, and would fill the memory with names
MAX_SIDE_PX = 1 << 20
MAX_CAPTIONS = 256  # of one record
MAX_CAPTION_CHARS = 1 << 16  # far beyond any encoder's cut
MAX_TEXT_BYTES = 1 << 20  # of a .txt, .cls or .json of one record
MAX_KEY_CHARS = 1024
NO_CAPTION = ("no_caption", "no caption, or only white space")
PATH_NAMES = ("file_name", "path")  # of each of these, the first that is there counts
CAPTION_NAMES = ("captions", "caption", "text", "prompt")
LABEL_NAMES = ("label", "cls")
SIDES = ("height", "width")
ANNOTATIONS = "annotations"  # folder of COCO's lists, beside the folders of the pictures


@dataclass(frozen=True)
class SourceRecord:
    """One image of a source.

    Args:
      key: unique name within the source.
      path: of the file that holds the bytes, relative to the source.
      offset, num_bytes: where the bytes lie in that file; of a Parquet file the row, and 0.
      mtime_ns: when that file was written; at a URL a number that changes with the object.
      label: class index, or -1.
      captions: as the source gives them.
      problem: (reason, detail) where the record is already known to be unusable.
      height_px, width_px: of the upright picture, where the source says them; else 0.
    """

    key: str
    path: str
    offset: int = 0
    num_bytes: int = 0
    mtime_ns: int = 0
    label: int = -1
    captions: tuple[str, ...] = ()
    problem: tuple[str, str] | None = None
    height_px: int = 0
    width_px: int = 0

    @property
    def place(self) -> tuple[str, int, int, int]:
        """Where the bytes lie, and since when: as long as it is the same, they are taken for the same."""
        return self.path, self.offset, self.num_bytes, self.mtime_ns


def caption_texts(record: SourceRecord) -> list[str]:
    """Captions of a record as they are encoded: without white space at their ends, no empty one, none twice."""
    return encoded_texts(record.captions)


def encoded_texts(captions: Sequence[str]) -> list[str]:
    """As ``caption_texts``, of the captions alone."""
    return list(dict.fromkeys(text for caption in captions if (text := caption.strip())))


def planned_texts(record: SourceRecord) -> list[str]:
    """Captions that are encoded for a record that has a row; one without any has the empty caption, which is null."""
    return caption_texts(record) or [""]


def listing_problem(record: SourceRecord, *, needs_caption: bool) -> tuple[str, str] | None:
    """Reason and detail where the listing alone decides that a record is rejected."""
    return record.problem or (NO_CAPTION if needs_caption and not caption_texts(record) else None)


def is_picture(path: str) -> bool:
    """A name has the extension of a picture."""
    return os.path.splitext(path)[1].lower() in IMAGE_EXTENSIONS


def usable_key(name: str) -> tuple[str, tuple[str, str] | None]:
    """A name that a table can hold, and the problem of a record whose own name is not one."""
    text = name.encode("utf-8", "backslashreplace").decode()
    if text != name:
        return text[:MAX_KEY_CHARS], ("bad_metadata", "the file name is not UTF-8")
    if len(text) > MAX_KEY_CHARS:
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]  # so that two of them stay two records
        return f"{text[:MAX_KEY_CHARS]}...{digest}", ("bad_metadata", f"the name is longer than {MAX_KEY_CHARS}")
    return text, None


def label_of(row: Mapping[str, Any]) -> int:
    """Class index that a row says, or -1.

    Raises: ValueError: it is none.
    """
    label = row.get("label", row.get("cls", -1))
    label = -1 if label is None else label
    if isinstance(label, bool) or not isinstance(label, int) or not -1 <= label < MAX_CLASSES:
        raise ValueError(f"label {reprlib.repr(label)} is not a class index below {MAX_CLASSES}")
    return label


def size_of(row: Mapping[str, Any]) -> tuple[int, int]:
    """Height and width in pixels that a row says, or (0, 0)."""
    height, width = row.get("height"), row.get("width")
    sides = [side for side in (height, width) if type(side) is int and 0 < side <= MAX_SIDE_PX]
    return (sides[0], sides[1]) if len(sides) == 2 else (0, 0)


def captions_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Captions that a row says: a list or one text, under the first of ``CAPTION_NAMES`` that is there.

    Raises: ValueError: they are no text, too many or too long.
    """
    value = next((row[name] for name in CAPTION_NAMES if row.get(name) is not None), ())
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"captions {reprlib.repr(value)} are not text")
    if len(texts) > MAX_CAPTIONS:
        raise ValueError(f"{len(texts)} captions, at most {MAX_CAPTIONS} are taken")
    if longest := max((len(text) for text in texts if len(text) > MAX_CAPTION_CHARS), default=0):
        raise ValueError(f"a caption of {longest} characters, at most {MAX_CAPTION_CHARS} are taken")
    for text in texts:
        text.encode("utf-8")  # half a surrogate pair is no text
    return tuple(texts)


def json_row(content: bytes) -> dict[str, Any]:
    """The object that a ``.json`` beside a picture holds.

    Raises: ValueError, RecursionError: it is none.
    """
    row = json.loads(content)
    if not isinstance(row, dict):
        raise ValueError(".json is not an object")
    return row
