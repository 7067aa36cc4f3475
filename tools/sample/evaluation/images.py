"""Images to measure: of a folder, of an .npz file, or of a store."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ....datasets.disk.files import files_below
from ....datasets.disk.hashing import read_json, sha256_of
from ....datasets.errors import DamageError, RecordRejected, SourceError
from ....datasets.format.buckets import bucket_size
from ....datasets.store import LatentStore
from ....precompute.config import SourceSection
from ....precompute.images.decoders import Decoders, PicturePlace
from ....precompute.sources.several import list_sources
from ...inspection.pictures import LatentDecoder
from ..npz import Npz
from ..sampler import decode_in_parts
from ..subjects import evenly_spread

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".avif", ".heic", ".heif")
MOST_DIGITS = 24  # of a number that is a name, with its suffix
NUM_DECODERS = 2  # child processes; a network takes longer than they do
TEXT_KEYS = ("text", "caption", "captions")  # of several the first counts
IMAGES = "arr_0"  # as ADM names them


@dataclass(frozen=True)
class ImageSet:
    """Numbered images.

    Args:
      description: what they are, as plain values; ``key`` changes with the images, ``path`` is only for people.
      count: of the images.
      read: from the numbers of each batch, ascending, to its images, (height, width, 3) uint8 each.
      names: of the images in their folder; else their numbers are their names.
    """

    description: dict[str, Any]
    count: int
    read: Callable[[Iterable[np.ndarray]], Iterator[list[np.ndarray]]]
    names: list[str] = field(default_factory=list)

    def spread(self, most: int) -> ImageSet:
        """At most so many of the images, evenly spread."""
        if most >= self.count:
            return self
        few = self.some(evenly_spread(self.count, most))
        return dataclasses.replace(few, description=self.description | {"count": most, "of": self.count})

    def some(self, numbers: np.ndarray) -> ImageSet:
        """Images of some numbers, ascending."""
        names = [self.names[number] for number in numbers.tolist()] if self.names else []
        return ImageSet(
            self.description, len(numbers), lambda batches: self.read(numbers[batch] for batch in batches), names
        )


def folder_images(folder: Path, crop_px: int = 0) -> ImageSet:
    """The image files of a folder and its sub-folders, in order of their paths; names that are numbers by number.

    Args:
      crop_px: side of the square that ADM's crop makes of each; 0: as they are.
    Raises: SourceError: it holds none; while reading: an image cannot be read.
    """
    paths = [path for path in files_below(folder) if path.suffix.lower() in SUFFIXES]
    paths.sort(key=lambda path: _order(path.relative_to(folder)))
    if not paths:
        raise SourceError(f"folder '{folder}': it holds no images ({', '.join(SUFFIXES)}). Check the path.")
    fit = _Fit((crop_px, crop_px), "adm") if crop_px else _Fit()
    sizes = [path.stat().st_size for path in paths]
    names = [path.relative_to(folder).as_posix() for path in paths]
    description = {
        "kind": "folder",
        "path": str(folder),
        "count": len(paths),
        "crop_px": crop_px,
        "key": sha256_of(list(zip(names, sizes, strict=True))),
    }
    return _decoded_files(description, lambda number: (PicturePlace(paths[number], 0, sizes[number]), fit), names)


def _order(path: Path) -> str:
    """What orders an image: its path, with a number as its name filled up, since 1000000.png is after 999999.png."""
    return (path.with_name(path.name.zfill(MOST_DIGITS)) if path.stem.isdecimal() else path).as_posix()


def npz_images(file: Npz) -> ImageSet:
    """The images of a .npz file: ``arr_0``, (N, height, width, 3) uint8; one batch is in memory.

    Raises: DamageError: they have another shape.
    """
    shape, dtype = file.shape(IMAGES)
    if len(shape) != 4 or shape[-1] != 3 or dtype != np.uint8 or not all(shape):
        raise DamageError(f"'{file.path}': {IMAGES} is {shape} {dtype}, expected images: (N, height, width, 3) uint8.")

    def read(batches: Iterable[np.ndarray]) -> Iterator[list[np.ndarray]]:
        wanted = list(batches)
        rows = file.rows(IMAGES, ((number, number + 1) for batch in wanted for number in batch.tolist()))
        for batch in wanted:
            yield [next(rows)[0] for _ in batch]

    key = sha256_of([list(shape), file.checksum(IMAGES)])
    return ImageSet({"kind": "npz", "path": str(file.path), "count": shape[0], "key": key}, shape[0], read)


def decoded_images(store: LatentStore, vae: str | None, device: torch.device) -> ImageSet:
    """The records of a store, decoded by its VAE: bucket after bucket, in order of their rows.

    Such a reference has the VAE's own error, so distances to it do not count that error.

    Args:
      vae: folder or hub id of the decoder; None: the store's own.
    Raises: EncoderError: the VAE cannot be loaded; SourceError: the store is empty.
    """
    decoder = LatentDecoder.of_store(store, vae, device)
    buckets = [(store.latents(name), store.index(name).rows) for name in store.buckets]
    starts = np.cumsum([0, *(len(rows) for _, rows in buckets)])
    if not (count := int(starts[-1])):
        raise SourceError(f"store '{store.path}': it holds no images. Check the path.")

    def read(batches: Iterable[np.ndarray]) -> Iterator[list[np.ndarray]]:
        for numbers in batches:
            images: list[np.ndarray] = []
            for (latents, rows), start, stop in zip(buckets, starts, starts[1:], strict=False):
                chosen = rows[numbers[(start <= numbers) & (numbers < stop)] - start]
                images += decode_in_parts(lambda part, latents=latents: decoder.decode_rows(latents.take(part)), chosen)
            yield images

    description = {
        "kind": "store, decoded by its VAE",
        "path": str(store.path),
        "count": count,
        "key": store.root_hash,
        "decoder_sha256": decoder.identity.weights_sha256,
    }
    return ImageSet(description, count, read)


def source_images(store: LatentStore, source: Sequence[str]) -> ImageSet:
    """The source images of a store's records, in the order of the source, cropped as the store has them.

    Raises: SourceError: the source cannot be read, or lacks images of the store.
    """
    section = SourceSection.model_validate(store.spec.recipe.get("source", {}))  # an imported store has none
    listed = list_sources(source, section)
    columns = store.record_columns(["key", "bucket", "status"]).to_pydict()
    entries = zip(columns["key"], columns["bucket"], columns["status"], strict=True)
    buckets = {key: bucket for key, bucket, status in entries if status == "stored"}
    places = [
        (record.path, record.offset, record.num_bytes, bucket)
        for record in listed.records
        if (bucket := buckets.pop(record.key, None))
    ]
    if buckets:
        raise SourceError(
            f"store '{store.path}': {len(buckets)} of its records are not in the source, the first is "
            f"'{next(iter(buckets))}'. Give the images that it was made from with --source."
        )
    images = store.spec.images

    def place_of(number: int) -> tuple[PicturePlace, _Fit]:
        path, offset, num_bytes, bucket = places[number]
        try:
            place = listed.place(path, offset, num_bytes, stage="decode")
        except RecordRejected as reject:
            raise SourceError(f"image '{path}': {reject.detail}. Expected all images of the store.") from reject
        return place, _Fit(bucket_size(bucket), images.crop, images.resize_filter, images.exif_orientation)

    description = {"kind": "store, source pictures", "path": str(store.path), "count": len(places)}
    return _decoded_files(description | {"key": store.root_hash}, place_of)


@dataclass(frozen=True)
class _Fit:
    """How an image file becomes pixels; ``bucket`` None: of its own size."""

    bucket: tuple[int, int] | None = None
    crop: str = "bucket"
    resize_filter: str = "bicubic"
    exif_orientation: bool = True


def _decoded_files(
    description: dict[str, Any], place_of: Callable[[int], tuple[PicturePlace, _Fit]], names: list[str] | None = None
) -> ImageSet:
    """Image files, decoded in child processes; an image that cannot be read is a SourceError, none is left out."""

    def read(batches: Iterable[np.ndarray]) -> Iterator[list[np.ndarray]]:
        with Decoders(NUM_DECODERS) as decoders, ThreadPoolExecutor(NUM_DECODERS) as threads:
            for numbers in batches:
                places = map(place_of, numbers.tolist())
                yield list(threads.map(lambda each: _decode(decoders, *each), places))

    return ImageSet(description, description["count"], read, names or [])


def _decode(decoders: Decoders, place: PicturePlace, fit: _Fit) -> np.ndarray:
    try:
        how: dict[str, Any] = {"exif_orientation": fit.exif_orientation}
        bucket = fit.bucket or decoders.size(*place, **how)
        return decoders.picture(*place, bucket=bucket, crop=fit.crop, resize_filter=fit.resize_filter, **how).pixels
    except RecordRejected as reject:
        raise SourceError(
            f"image '{place.path}': {reject.reason} ({reject.detail}). Expected all images of the set; repair or "
            "remove it."
        ) from reject


def read_captions(file: Path, names: Sequence[str]) -> list[str]:
    """The caption of each image.

    Args:
      file: ``samples.json`` of ``leandit sample``, in the order of the images; or lines of JSON with ``file_name`` and
        ``text`` (or ``caption``).
      names: of the images, relative to their folder; numbers for those of a .npz.
    Raises: SourceError: it has no caption for an image.
    """
    if not file.is_file():
        raise SourceError(f"captions '{file}': there is no such file. Give one with --captions.")
    if file.suffix == ".jsonl":
        with open(file, "rb") as lines:
            by_name = dict(_row(file, number, line) for number, line in enumerate(lines, 1))
        if missing := [name for name in names if name not in by_name]:
            raise SourceError(f"captions '{file}': none for image '{missing[0]}', and {len(missing) - 1} others.")
        return [by_name[name] for name in names]
    found = read_json(file)
    listed = found.get("samples") if isinstance(found, dict) else None
    if not isinstance(listed, list) or len(listed) != len(names):
        got = len(listed) if isinstance(listed, list) else "no"
        raise SourceError(f"captions '{file}': {got} 'samples' for {len(names)} images. Expected one of each.")
    captions = list(map(str, listed))
    if all(caption.isdigit() for caption in captions):
        raise SourceError(f"captions '{file}': its 'samples' are classes. Expected captions, or no --clip.")
    return captions


def _row(file: Path, number: int, line: bytes) -> tuple[str, str]:
    try:
        row = json.loads(line)
        text = next(row[key] for key in TEXT_KEYS if key in row)
        return str(row["file_name"]), str(text[0] if isinstance(text, list) else text)
    except (ValueError, TypeError, LookupError, StopIteration, RecursionError) as error:
        raise SourceError(f"captions '{file}', line {number}: expected an object with file_name and text.") from error
