"""The interface of readers of imported features, and how they reject records.

A reader lists its records, reads the header of each (shape, label, caption), and reads the values of one by its entry.
It writes nothing, unpickles nothing and follows no path out of its folder.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import ClassVar, NamedTuple

import numpy as np
import xxhash
from safetensors import SafetensorError

from ....datasets.errors import RecordRejected, SourceError
from ...config import TextSection
from ...images.faults import fault_error, is_fault
from .recipe import ImportRecipe
from .untrusted.arrays import parse_npy, read_file

UNREADABLE = (OSError, ValueError, EOFError, LookupError, NotImplementedError, SafetensorError)


@dataclass(frozen=True)
class FormatDefaults:
    """Properties of a kind of features, unless the user overrides them.

    Args:
      latent: kind of the rows, as in ``LatentSpec.kind``.
      is_scaled: shift and scale were applied before the features were stored.
      vae, vae_subfolder: name of the VAE, and the folder inside of it.
      downscale: pixels of a latent position.
      shift, scale: of the VAE, one number or one for each channel; without scale the user must give it.
      zero_to_one: the VAE was given pixels from 0 to 1.
      one_size: all records must have the same size.
      texts: the text encoders by name, as in a recipe; that of ``[text]`` by "". Empty without captions.
      patchify: side of the squares of latent positions that were made channels.
    """

    latent: str
    is_scaled: bool
    vae: str
    downscale: int
    shift: tuple[float, ...] = (0.0,)
    scale: tuple[float, ...] = ()
    zero_to_one: bool = False
    one_size: bool = True
    texts: Mapping[str, TextSection] = field(default_factory=dict)
    vae_subfolder: str = ""
    patchify: int = 1


class Entry(NamedTuple):
    """Location of a record: a file, relative to the source, and an offset that only the reader interprets."""

    key: str
    path: str
    offset: int = 0
    num_bytes: int = 0


class TextHeader(NamedTuple):
    """What a text encoder gave for a caption: number of valid tokens (1 for a pooled vector), padded length, width and
    dtype: "float16", "bfloat16" or "float32"."""

    num_tokens: int
    padded: int
    width: int
    dtype: str


class CaptionHeader(NamedTuple):
    """A caption: its text, and what each text encoder of the kind gave for it."""

    text: str
    of_encoders: tuple[TextHeader, ...]


class RecordHeader(NamedTuple):
    """Header of a record.

    Args:
      shape: (stored channels, H, W).
      dtype: "float16" or "float32", as it will be read.
      has_flip: a second array holds the flipped picture.
      label: -1 for none.
      size: (height_px, width_px) of the source picture, (0, 0) if unknown.
    """

    shape: tuple[int, ...]
    dtype: str
    has_flip: bool = False
    label: int = -1
    caption: CaptionHeader | None = None
    size: tuple[int, int] = (0, 0)


class Features(NamedTuple):
    """Values of a record: (C, H, W) arrays, then the flipped one if any, and the XXH3-64 of their bytes."""

    arrays: Sequence[np.ndarray]
    source_checksum: int


class Reader(ABC):
    """One kind of features in one folder.

    Args:
      root: the source.
      recipe: settings of the import.
    """

    kind: ClassVar[str]
    defaults: FormatDefaults
    """Of the kind, updated from the source (LightningDiT's statistics)."""
    classes: Sequence[str] | None = None
    """Class names, if the source has names."""
    has_labels = True
    """Every record needs a label."""

    def __init__(self, root: Path, recipe: ImportRecipe) -> None:
        self.root, self.recipe = root, recipe

    @abstractmethod
    def entries(self) -> Iterable[Entry]:
        """All records, in stored order."""

    @abstractmethod
    def look(self, entry: Entry) -> RecordHeader:
        """The header of a record; raises RecordRejected."""

    def read(self, entry: Entry) -> Features:
        """The values of a record, by default of one .npy file; raises RecordRejected."""
        with rejecting(entry.path):
            content = self.content(entry)
            array = parse_npy(content)
        return Features([array], xxhash.xxh3_64_intdigest(content))

    def content(self, entry: Entry) -> bytes:
        """All bytes of a record's file.

        Raises: OSError, ValueError.
        """
        return read_file(self.root / entry.path)

    def read_caption(self, entry: Entry, name: str) -> np.ndarray:
        """(L, D) valid tokens of a record's caption by a text encoder, or its pooled vector (P,).

        Raises: RecordRejected.
        """
        raise AssertionError(f"{entry.key}: this kind has no captions, and no text encoder '{name}'")

    def file_entry(self, path: str, key: str = "") -> Entry:
        """A record that is a file; its name is the default key."""
        return Entry(key or path.rpartition(".")[0], path, 0, size_of(self.root, path))


@contextmanager
def rejecting(what: str, reason: str = "") -> Iterator[None]:
    """Turn read errors of a file into a reject of its record; errors of the machine are raised as such.

    Args:
      reason: of the reject, if not "missing_file" or "unreadable".
    Raises: RecordRejected. ResourceError: a fault, as of ``is_fault``, or no room for a temporary file.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise RecordRejected("scan", reason or "missing_file", f"{what}: there is no such file") from error
    except (*UNREADABLE, MemoryError) as error:
        if is_fault(error) or getattr(error, "errno", None) == errno.ENOSPC:
            raise fault_error(what, error) from error
        raise RecordRejected(
            "scan", reason or "unreadable", f"{what}: {type(error).__name__}: {error}"[:500]
        ) from error


def size_of(root: Path, path: str) -> int:
    """Size of a file of the source in bytes; 0 on error: ``look`` then rejects it.

    Raises: as ``rejecting``, except RecordRejected.
    """
    with contextlib.suppress(RecordRejected), rejecting(path):
        return (root / path).stat().st_size
    return 0


def natural_order(name: str) -> list[tuple[int, str]]:
    """Sort key in which 2 comes before 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", name)]


def inner_path(text: str) -> str:
    """A path from an untrusted file, normalized.

    Raises: RecordRejected: it leaves its folder.
    """
    path = PurePosixPath(text)
    if not text or "\x00" in text or path.is_absolute() or ".." in path.parts or path.as_posix() == ".":
        raise RecordRejected("scan", "bad_metadata", f"path {text[:200]!r} does not stay below its folder")
    return path.as_posix()


def files_below(folder: Path, suffix: str) -> Iterator[Path]:
    """Files with a suffix in a folder and its subfolders, without hidden ones.

    Raises: SourceError: a folder cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise SourceError(f"source: '{error.filename}' cannot be read ({error.strerror}). Check its permissions.")

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(parent) / name for name in names if name.endswith(suffix) and not name.startswith("."))
