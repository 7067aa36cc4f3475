"""A record of a source: one image, and limits on what an untrusted source may claim.

Names, labels and captions are bounded before they are used (``docs/security.md``).
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

HEIF_EXTENSIONS = frozenset([".heic", ".heif", ".hif"])  # read by pillow-heif, where it is installed
IMAGE_EXTENSIONS = frozenset(
    [".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".avif", ".jfif"]
) | (HEIF_EXTENSIONS if importlib.util.find_spec("pillow_heif") else frozenset())
MAX_SIDE_PX = 1 << 20
MAX_CAPTIONS = 256  # of one record
MAX_CAPTION_CHARS = 1 << 16  # far beyond any encoder's cut
MAX_TEXT_BYTES = 1 << 20  # of a .txt, .cls or .json of one record
MAX_KEY_CHARS = 1024
NO_CAPTION = ("no_caption", "no caption, or only white space")
NUL_IN_CAPTION = (
    "a caption has a NUL character: is its file UTF-16? Convert it, for example with iconv -f UTF-16LE -t UTF-8"
)
CAPTION_NAMES = ("captions", "caption", "text", "prompt")  # the first that has a caption counts

Place = tuple[str, int, int, int]
"""Path of a file within the source, offset and number of bytes in it, and its modification time."""


@dataclass(frozen=True)
class SourceRecord:
    """One image of a source.

    Args:
      key: unique name within the source.
      path: of the file that holds the bytes, relative to the source.
      offset, num_bytes: of the bytes in that file; of a Parquet file the row, and 0.
      mtime_ns: modification time of that file; at a URL a number that changes with the object.
      label: class index, or -1.
      captions: as in the source.
      problem: (reason, detail) if the record is known to be unusable.
      height_px, width_px: of the upright image, if the source has them; else 0.
      companions: places of its companion images, in the order of the recipe.
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
    companions: tuple[Place, ...] = ()


def encoded_texts(captions: Sequence[str]) -> list[str]:
    """Captions as encoded: stripped, without empty ones and duplicates."""
    stripped = (caption.strip() for caption in captions)
    return list(dict.fromkeys(text for text in stripped if text))


def is_image(path: str) -> bool:
    """A name has the extension of an image."""
    return os.path.splitext(path)[1].lower() in IMAGE_EXTENSIONS


def usable_key(name: str) -> tuple[str, tuple[str, str] | None]:
    """A valid key for a name, and the problem if the name itself is not one."""
    text = name.encode("utf-8", "backslashreplace").decode()
    if text != name:
        return text[:MAX_KEY_CHARS], ("bad_metadata", "the file name is not UTF-8")
    if len(text) > MAX_KEY_CHARS:
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]  # so that two of them stay two records
        return f"{text[:MAX_KEY_CHARS]}...{digest}", ("bad_metadata", f"the name is longer than {MAX_KEY_CHARS}")
    return text, None


def captions_of(row: Mapping[str, Any], names: Sequence[str] = CAPTION_NAMES) -> tuple[str, ...]:
    """Captions of a row: a list or one text, from the first of ``names`` that has any.

    Raises: ValueError: not text, too many or too long.
    """
    value = next((row[name] for name in names if _has_caption(row.get(name))), ())
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"captions {reprlib.repr(value)} are not text")
    if len(texts) > MAX_CAPTIONS:
        raise ValueError(f"{len(texts)} captions, at most {MAX_CAPTIONS} are allowed")
    if longest := max((len(text) for text in texts if len(text) > MAX_CAPTION_CHARS), default=0):
        raise ValueError(f"a caption of {longest} characters, at most {MAX_CAPTION_CHARS} are allowed")
    for text in texts:
        text.encode("utf-8")  # half a surrogate pair is no text
        if "\0" in text:
            raise ValueError(NUL_IN_CAPTION)
    return tuple(texts)


def _has_caption(value: Any) -> bool:
    """Whether a field has something besides white space; what is no text is found out later."""
    if isinstance(value, str):
        return bool(value.strip())
    if isinstance(value, list | tuple):
        return any(not isinstance(text, str) or text.strip() for text in value)
    return value is not None


def decode_text(content: bytes, extension: str) -> str:
    """The text of a file in UTF-8, without a byte order mark.

    Raises: ValueError: it is not UTF-8.
    """
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        encoding = "UTF-16" if content.startswith((b"\xff\xfe", b"\xfe\xff")) else "LATIN1"
        raise ValueError(
            f"the .{extension} is not UTF-8 (byte {error.start}). Convert it, for example with iconv -f {encoding} -t "
            "UTF-8 OLD > NEW"
        ) from error
