"""The interface of readers of imported features, and how they reject records.

A reader lists its records, reads the header of each (shape, label, caption), and reads the values of one by its entry.
It writes nothing, unpickles nothing and follows no path out of its folder.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, NamedTuple

import numpy as np
import xxhash
from safetensors import SafetensorError

from ...datasets.disk.faults import is_fault
from ...errors import RecordRejected, SourceError
from ..config import TextSection
from ..images.faults import fault_error
from .recipe import ImportRecipe
from .untrusted import ZIP_ERRORS, Looked, look_npy, parse_npy, read_file

UNREADABLE = (OSError, ValueError, EOFError, LookupError, NotImplementedError, SafetensorError, *ZIP_ERRORS)
MAX_JSON_BYTES = 1 << 30


@dataclass(frozen=True)
class FormatDefaults:
    """Properties of a kind of features, unless the user overrides them.

    Args:
      latent: kind of the rows, as in ``LatentSpec.kind``.
      is_scaled: shift and scale were applied before the features were stored.
      vae, vae_subfolder: name of the VAE, and the folder inside of it.
      downscale: pixels of a latent's side.
      shift, scale: of the VAE, one number or one for each channel; without scale the user must give it.
      zero_to_one: the VAE was given pixels from 0 to 1.
      one_size: all records must have the same size.
      texts: the text encoders by name, as in a recipe; that of ``[text]`` by "". Empty without captions.
      patchify: side of the squares of latent pixels that were made channels.
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
    """Output of a text encoder for a caption: valid tokens (1 for a pooled vector), padded length, width, and dtype
    ("float16", "bfloat16" or "float32")."""

    num_tokens: int
    padded: int
    width: int
    dtype: str


class RecordHeader(NamedTuple):
    """Header of a record.

    Args:
      shape: (stored channels, H, W).
      dtype: "float16" or "float32", as it will be read.
      has_flip: a second array holds the flipped image.
      label: -1 for none.
      text: of its caption.
      texts: of each text encoder; empty without a caption.
      size: (height_px, width_px) of the source image, (0, 0) if unknown.
    """

    shape: tuple[int, ...]
    dtype: str
    has_flip: bool = False
    label: int = -1
    text: str = ""
    texts: tuple[TextHeader, ...] = ()
    size: tuple[int, int] = (0, 0)


class ListedImage(NamedTuple):
    """An image that a source lists in JSON, or why it cannot be used.

    Args:
      size: (height_px, width_px) of the source image, (0, 0) if unknown.
      path: of its features, where the listing names it.
      bucket: (height_px, width_px) that it was encoded at, where the listing names it.
    """

    prompt: str = ""
    size: tuple[int, int] = (0, 0)
    path: str = ""
    bucket: tuple[int, int] = (0, 0)
    problem: str = ""


Features = tuple[list[np.ndarray], int]
"""Values of a record: a (C, H, W) array, then the flipped one if any; and the XXH3-64 of their bytes or file."""


class Reader(ABC):
    """One kind of features in one folder; by default a ``.npy`` file of latents for each record.

    Attributes:
      defaults: of the kind, updated from the source (LightningDiT's statistics).
      classes: class names, if the source has names.
      has_labels: every record needs a label.
    """

    kind: ClassVar[str]
    defaults: FormatDefaults
    classes: Sequence[str] | None = None
    has_labels = True

    def __init__(self, root: Path, recipe: ImportRecipe) -> None:
        self.root, self.recipe = root, recipe

    @abstractmethod
    def entries(self) -> Iterable[Entry]:
        """All records, in stored order."""

    def look(self, entry: Entry) -> RecordHeader:
        """The header of a record; raises RecordRejected."""
        with rejecting(place_of(entry)):
            return self._header(entry)

    def read(self, entry: Entry) -> Features:
        """The values of a record; raises RecordRejected."""
        with rejecting(place_of(entry)):
            return self._values(entry)

    def read_caption(self, entry: Entry, name: str) -> np.ndarray:
        """(L, D) valid tokens of a record's caption by a text encoder, or its pooled vector (P,).

        Raises: RecordRejected.
        """
        with rejecting(place_of(entry)):
            return self._caption(entry, name)

    # Of a kind of features: these raise RecordRejected, or an error of UNREADABLE, which becomes one.

    @abstractmethod
    def _header(self, entry: Entry) -> RecordHeader: ...

    def _values(self, entry: Entry) -> Features:
        content = self.content(entry)
        array = parse_npy(content)
        return [array.reshape(without_batch(array.shape, 3))], xxhash.xxh3_64_intdigest(content)

    def _caption(self, entry: Entry, name: str) -> np.ndarray:
        raise AssertionError(f"{entry.key}: this kind has no captions, and no text encoder '{name}'")

    def content(self, entry: Entry) -> bytes:
        """All bytes of a record's .npy file."""
        return read_file(self.root / entry.path)

    def look_latent(self, entry: Entry) -> Looked:
        """Shape and dtype of a record's .npy file."""
        shape, dtype = look_npy(self.root / entry.path)
        return without_batch(shape, 3), dtype

    def file_entry(self, path: str, key: str = "") -> Entry:
        """A record that is a file; its name is the default key. The size is 0 on error: ``look`` then rejects it."""
        num_bytes = 0
        with contextlib.suppress(RecordRejected), rejecting(path):
            num_bytes = (self.root / path).stat().st_size
        return Entry(key or path.rpartition(".")[0], path, 0, num_bytes)

    def listing(self, name: str) -> bytes:
        """The bytes of a file that describes the source."""
        return read_file(self.root / name, MAX_JSON_BYTES)

    def json(self, name: str, kind: type, advice: str = "Restore it.") -> Any:
        """The content of a JSON file of the source, a ``kind``; raises SourceError."""
        with self.needing(name, advice):
            content = json.loads(self.listing(name))
        if not isinstance(content, kind):
            raise SourceError(f"source '{self.root}': '{name}' needs a {kind.__name__}. {advice}")
        return content

    @contextmanager
    def needing(self, name: str, advice: str = "Restore it.") -> Iterator[None]:
        """Turn read errors of a file that all records need into a SourceError; faults as in ``rejecting``."""
        try:
            with rejecting(name):
                yield
        except (RecordRejected, TypeError, ArithmeticError) as error:  # a value of JSON may be of any type
            is_read = isinstance(error, RecordRejected)
            why = error.detail.removeprefix(f"{name}: ") if is_read else f"{type(error).__name__}: {error}"
            raise SourceError(f"source '{self.root}': '{name}' cannot be read ({why}). {advice}") from error


def place_of(entry: Entry) -> str:
    """The file of a record, or its key if the file holds several."""
    return entry.path if entry.path.startswith(entry.key) else entry.key


@contextmanager
def rejecting(what: str, reason: str = "") -> Iterator[None]:
    """Turn read errors of a file into a reject of its record; errors of the machine are raised as such.

    Args:
      reason: of the reject, if not "missing_file" or "unreadable".
    Raises: RecordRejected. ResourceError: a fault (``is_fault``), or no room for a temporary file.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise RecordRejected("scan", reason or "missing_file", f"{what}: there is no such file") from error
    except (*UNREADABLE, MemoryError) as error:
        if is_fault(error) or getattr(error, "errno", None) == errno.ENOSPC:
            raise fault_error(what, error) from error
        detail = f"{what}: {type(error).__name__}: {error}"[:500]
        raise RecordRejected("scan", reason or "unreadable", detail) from error


def add_listed(
    images: dict[str, ListedImage], listed: Sequence[Any], place: str, parse: Callable[[Any], tuple[str, ListedImage]]
) -> None:
    """Add the images of a listing by their keys; one without a key of its own, by its place in the listing.

    Args:
      place: name of the listing.
      parse: key and image of an entry; raises TypeError, KeyError, AttributeError, RecordRejected.
    """
    for i, entry in enumerate(listed):
        try:
            key, image = parse(entry)
            problem = f"'{key}' occurs twice" if key in images else ""
        except RecordRejected as reject:
            problem = reject.detail
        except (TypeError, KeyError, AttributeError) as error:
            problem = f"it lacks what is needed of an image ({type(error).__name__}: {error})"
        if problem:
            key, image = f"{place}:{i}", ListedImage(problem=problem)
        images[key] = image


def without_batch(shape: tuple[int, ...], sides: int) -> tuple[int, ...]:
    """A shape without a leading batch of one; raises RecordRejected if it has another number of sides."""
    inner = shape[1:] if len(shape) == sides + 1 and shape[0] == 1 else shape
    if len(inner) != sides or min(inner) < 1:
        raise RecordRejected("scan", "wrong_shape", f"shape {shape}; expected {sides} sides")
    return inner


def natural_order(name: str) -> list[tuple[int, str]]:
    """Sort key in which 2 comes before 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", name)]


def inner_path(text: str) -> str:
    """A path from an untrusted file, normalized; raises RecordRejected if it leaves its folder."""
    path = PurePosixPath(text)
    if not text or "\x00" in text or path.is_absolute() or ".." in path.parts or path.as_posix() == ".":
        raise RecordRejected("scan", "bad_metadata", f"path {text[:200]!r} does not stay below its folder")
    return path.as_posix()


def files_below(folder: Path, suffix: str) -> list[Path]:
    """Files with a suffix in a folder and its subfolders, without hidden ones, sorted by path.

    Raises: SourceError: a folder cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise SourceError(f"source: '{error.filename}' cannot be read ({error.strerror}). Check its permissions.")

    found = []
    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(parent) / name for name in names if name.endswith(suffix) and not name.startswith(".")]
    return sorted(found)
