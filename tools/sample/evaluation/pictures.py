"""Sets of pictures to measure: a folder, the ``arr_0`` of a .npz file, or some pictures of another set."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ....datasets.disk.files import files_below
from ....datasets.disk.hashing import sha256_of
from ....datasets.errors import DamageError, RecordRejected, SourceError
from ....precompute.images.decoders import Decoders, PicturePlace
from .npz import Npz

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".avif", ".heic", ".heif")
MOST_DIGITS = 24  # of a number that is a name, with its suffix
NUM_DECODERS = 2  # child processes; a network takes longer than they do
PICTURES = "arr_0"  # as ADM names them


class PictureSet(Protocol):
    """Numbered pictures.

    Attributes:
      description: what they are, as plain values; ``key`` changes with the pictures, ``path`` is only for people.
    """

    description: dict[str, Any]

    def __len__(self) -> int: ...

    def batches(self, batches: Iterable[np.ndarray]) -> Iterator[list[np.ndarray]]:
        """Read some pictures, (height, width, 3) uint8 each.

        Args:
          batches: numbers of each batch, ascending, and from one batch to the next.
        Raises: SourceError, DamageError: a picture cannot be read.
        """
        ...


@dataclass(frozen=True)
class Fit:
    """How a picture file becomes pixels; the size of ``bucket`` None: as it is."""

    bucket: tuple[int, int] | None
    crop: str = "bucket"
    resize_filter: str = "bicubic"
    exif_orientation: bool = True


def decoded(batches: Iterable[Sequence[tuple[PicturePlace, Fit]]]) -> Iterator[list[np.ndarray]]:
    """Decode picture files in child processes.

    Raises: SourceError: a picture cannot be read; none is left out.
    """
    with Decoders(NUM_DECODERS) as decoders, ThreadPoolExecutor(NUM_DECODERS) as threads:
        for batch in batches:
            yield list(threads.map(lambda one: _decode(decoders, *one), batch))


def _decode(decoders: Decoders, place: PicturePlace, fit: Fit) -> np.ndarray:
    try:
        turned = fit.exif_orientation
        bucket = fit.bucket or decoders.size(*place, exif_orientation=turned)
        how: dict[str, Any] = {"bucket": bucket, "crop": fit.crop, "resize_filter": fit.resize_filter}
        return decoders.picture(*place, **how, exif_orientation=turned).pixels
    except RecordRejected as reject:
        raise SourceError(
            f"picture '{place.path}': {reject.reason} ({reject.detail}). Needed all pictures of the set; repair or "
            "remove it."
        ) from reject


class FolderPictures:
    """The picture files of a folder and its sub-folders, in order of their paths; names that are numbers by number.

    Args:
      crop_px: side of the square that ADM's crop makes of each; 0: as they are.
    Raises: SourceError: it holds none.
    """

    def __init__(self, folder: Path, *, crop_px: int = 0) -> None:
        found = [path for path in files_below(folder) if path.suffix.lower() in SUFFIXES]
        self.paths = sorted(found, key=lambda path: _place(path.relative_to(folder)))
        if not self.paths:
            raise SourceError(f"folder '{folder}': it holds no pictures ({', '.join(SUFFIXES)}). Check the path.")
        self._fit = Fit((crop_px, crop_px), "adm") if crop_px else Fit(None)
        self._sizes = [path.stat().st_size for path in self.paths]
        names = [path.relative_to(folder).as_posix() for path in self.paths]
        self.names = names
        self.description = {
            "kind": "folder",
            "path": str(folder),
            "count": len(self.paths),
            "crop_px": crop_px,
            "key": sha256_of(list(zip(names, self._sizes, strict=True))),
        }

    def __len__(self) -> int:
        return len(self.paths)

    def batches(self, batches: Iterable[np.ndarray]) -> Iterator[list[np.ndarray]]:
        """As ``PictureSet.batches``."""
        return decoded(
            [(PicturePlace(self.paths[number], 0, self._sizes[number]), self._fit) for number in numbers]
            for numbers in batches
        )


def _place(path: Path) -> str:
    """What orders a picture: its path, with a number as its name filled up, since 1000000.png is after 999999.png."""
    return (path.with_name(path.name.zfill(MOST_DIGITS)) if path.stem.isdecimal() else path).as_posix()


class NpzPictures:
    """The pictures of a .npz file: ``arr_0``, (N, height, width, 3) uint8.

    Raises: DamageError: they have another shape.
    """

    def __init__(self, file: Npz) -> None:
        shape, dtype = file.shape(PICTURES)
        if len(shape) != 4 or shape[-1] != 3 or dtype != np.uint8 or not all(shape):
            raise DamageError(
                f"'{file.path}': {PICTURES} is {shape} {dtype}, needed pictures: (N, height, width, 3) uint8."
            )
        self._file, self._count = file, shape[0]
        key = sha256_of([list(shape), file.checksums()[PICTURES]])
        self.description = {"kind": "npz", "path": str(file.path), "count": shape[0], "key": key}

    def __len__(self) -> int:
        return self._count

    def batches(self, batches: Iterable[np.ndarray]) -> Iterator[list[np.ndarray]]:
        """As ``PictureSet.batches``; one batch is in memory."""
        wanted = list(batches)
        ranges = ((number, number + 1) for numbers in wanted for number in numbers.tolist())
        rows = self._file.rows(PICTURES, ranges)
        for numbers in wanted:
            yield [next(rows)[0] for _ in numbers]


class SpreadPictures:
    """So many pictures of a set, spread evenly over it."""

    def __init__(self, pictures: PictureSet, numbers: np.ndarray) -> None:
        self._pictures, self._numbers = pictures, numbers
        self.description = pictures.description | {"count": len(numbers), "of": len(pictures)}

    def __len__(self) -> int:
        return len(self._numbers)

    def batches(self, batches: Iterable[np.ndarray]) -> Iterator[list[np.ndarray]]:
        """As ``PictureSet.batches``."""
        return self._pictures.batches(self._numbers[numbers] for numbers in batches)
