"""Images to measure: of a folder, of a .npz file, or of a store; and their captions."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ....datasets.disk.files import files_below
from ....datasets.disk.hashing import read_json, sha256_of
from ....datasets.format.buckets import bucket_size
from ....datasets.store import LatentStore
from ....errors import DamageError, RecordRejected, SourceError
from ....precompute.config import SourceSection
from ....precompute.images.decoders import Decoders, ImagePlace
from ....precompute.images.opening import MAX_MEGAPIXELS
from ....precompute.images.pixels import color_of, max_megapixels_of
from ....precompute.sources.several import list_sources
from ....recipe import parse_stored
from ...inspection.images import LatentDecoder
from ..npz import Npz
from ..sampler import decode_in_parts
from .distances import Moments

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".avif", ".heic", ".heif")
MOST_DIGITS = 24  # of a number that is a name, with its suffix
NUM_DECODERS = 2  # child processes; a network takes longer than they do
IMAGES = "arr_0"  # as ADM names them
TEXT_KEYS = ("text", "caption", "captions")  # of several the first counts
Read = Callable[[Iterable[np.ndarray]], Iterator[list[np.ndarray]]]
"""From the numbers of each batch, ascending, to its images, (height, width, 3) uint8 each."""


@dataclass(frozen=True)
class ImageSet:
    """Numbered images.

    Args:
      description: what they are, as plain values: ``count``; ``key`` changes with the images, ``path`` is for people.
      read: None: only their statistics are known.
      names: of the images in their folder; else their numbers are their names.
      statistics: of a file. With ``read`` too, mean and covariance are of other images, as in ADM's reference batches:
        of all of ImageNet, beside 10,000 images.
    """

    description: dict[str, Any]
    read: Read | None
    names: list[str] = field(default_factory=list)
    statistics: Moments | None = None

    @property
    def count(self) -> int:
        """Number of images."""
        return self.description["count"]

    def some(self, numbers: np.ndarray, **description: Any) -> ImageSet:
        """Images of some numbers, ascending, and what to add to their description."""
        names = [self.names[number] for number in numbers.tolist()] if self.names else []
        description = self.description | {"count": len(numbers)} | description
        read = self.read
        assert read
        return replace(self, description=description, read=lambda few: read(numbers[each] for each in few), names=names)


def folder_images(folder: Path, crop_px: int = 0) -> ImageSet:
    """The image files of a folder and its sub-folders, in order of their paths; names that are numbers by number.

    Args:
      crop_px: side of the square that ADM's crop makes of each; 0: as they are.
    Raises: SourceError: it holds none; while reading: an image cannot be read.
    """

    def order(path: Path) -> str:  # 1000000.png is after 999999.png
        path = path.relative_to(folder)
        return (path.with_name(path.name.zfill(MOST_DIGITS)) if path.stem.isdecimal() else path).as_posix()

    paths = sorted((path for path in files_below(folder) if path.suffix.lower() in SUFFIXES), key=order)
    if not paths:
        raise SourceError(f"folder '{folder}': it holds no images ({', '.join(SUFFIXES)}). Check the path.")
    places = [ImagePlace(path, 0, path.stat().st_size) for path in paths]
    names = [path.relative_to(folder).as_posix() for path in paths]
    key = sha256_of([[name, place.num_bytes] for name, place in zip(names, places, strict=True)])
    description = {"kind": "folder", "path": str(folder), "count": len(paths), "crop_px": crop_px, "key": key}
    bucket = (crop_px, crop_px) if crop_px else None
    crop = "adm" if crop_px else "bucket"
    read = _read_files(lambda number: (places[number], bucket), crop=crop, resize_filter="bicubic")
    return ImageSet(description, read, names)


def npz_images(file: Npz) -> ImageSet:
    """The images of a .npz file: ``arr_0``, (N, height, width, 3) uint8; one batch is in memory.

    Raises: DamageError: they have another shape.
    """
    shape, dtype = file.shape(IMAGES)
    if len(shape) != 4 or shape[-1] != 3 or dtype != np.uint8 or not all(shape):
        raise DamageError(f"'{file.path}': {IMAGES} is {shape} {dtype}, expected images: (N, height, width, 3) uint8.")

    def read(batches: Iterable[np.ndarray]) -> Iterator[list[np.ndarray]]:
        ours, numbers = itertools.tee(batches)
        rows = file.rows(IMAGES, (number for batch in numbers for number in batch.tolist()))
        for batch in ours:
            yield list(itertools.islice(rows, len(batch)))

    key = sha256_of([list(shape), file.checksum(IMAGES)])
    return ImageSet({"kind": "npz", "path": str(file.path), "count": shape[0], "key": key}, read)


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

    description = {"kind": "store, decoded by its VAE", "path": str(store.path), "count": count}
    description |= {"key": store.root_hash, "decoder_sha256": decoder.identity.weights_sha256}
    return ImageSet(description, read)


def source_images(store: LatentStore, source: Sequence[str]) -> ImageSet:
    """The source images of a store's records, in the order of the source, cropped as the store has them.

    Raises: SourceError: the source cannot be read, or lacks images of the store.
    """
    stored = store.spec.recipe.get("source", {})  # an imported store has none
    section, _ = parse_stored(f"recipe of store '{store.path}'", SourceSection, stored)
    listed = list_sources(source, section, needs_labels=False)
    columns = store.record_columns(["key", "bucket", "status"]).to_pydict()
    entries = zip(columns["key"], columns["bucket"], columns["status"], strict=True)
    buckets = {key: bucket for key, bucket, status in entries if status == "stored"}
    records = [
        (record.path, record.offset, record.num_bytes, bucket)
        for record in listed.records
        if (bucket := buckets.pop(record.key, None))
    ]
    if buckets:
        raise SourceError(
            f"store '{store.path}': {len(buckets)} of its records are not in the source, the first is "
            f"'{next(iter(buckets))}'. Pass the images that it was made from with --source."
        )

    def place_of(number: int) -> tuple[ImagePlace, tuple[int, int]]:
        path, offset, num_bytes, bucket = records[number]
        try:
            return listed.place(path, offset, num_bytes, stage="decode"), bucket_size(bucket)
        except RecordRejected as reject:
            raise SourceError(f"image '{path}': {reject.detail}. Expected all images of the store.") from reject

    images = store.spec.images
    description = {"kind": "store, source images", "path": str(store.path), "count": len(records)}
    read = _read_files(
        place_of,
        crop=images.crop,
        resize_filter=images.resize_filter,
        color=color_of(images.colour),
        max_megapixels=max_megapixels_of(store.spec.recipe),
    )
    return ImageSet(description | {"key": store.root_hash}, read)


def _read_files(
    place_of: Callable[[int], tuple[ImagePlace, tuple[int, int] | None]],
    *,
    crop: str,
    resize_filter: str,
    color: str = "srgb",
    max_megapixels: int = MAX_MEGAPIXELS,
) -> Read:
    """Reads image files, decoded in child processes; one that cannot be read is a SourceError, none is left out.

    Args:
      place_of: number of an image to its place and its size (height, width); None: its own.
      crop, resize_filter, color, max_megapixels: of each, as for ``pixels.decode_image``.
    """

    def read(batches: Iterable[np.ndarray]) -> Iterator[list[np.ndarray]]:
        def decode(place: ImagePlace, bucket: tuple[int, int] | None) -> np.ndarray:
            try:
                bucket = bucket or decoders.size(*place)
                decoded = decoders.decode(*place, bucket=bucket, crop=crop, resize_filter=resize_filter, color=color)
                return decoded.pixels
            except RecordRejected as reject:
                raise SourceError(
                    f"image '{place.path}': {reject.reason} ({reject.detail}). Expected all images of the set; repair "
                    "or remove it."
                ) from reject

        with (
            Decoders(NUM_DECODERS, max_megapixels=max_megapixels) as decoders,
            ThreadPoolExecutor(NUM_DECODERS) as threads,
        ):
            for numbers in batches:
                yield list(threads.map(decode, *zip(*map(place_of, numbers.tolist()), strict=True)))

    return read


# ------------------------------------------------------------------------------------------------------------- captions


def read_captions(file: Path, names: Sequence[str]) -> list[str]:
    """The caption of each image.

    Args:
      file: ``samples.json`` of ``leandit sample``, in the order of the images; or lines of JSON with ``file_name`` and
        ``text`` (or ``caption``).
      names: of the images, relative to their folder; numbers for those of a .npz.
    Raises: SourceError: it has no caption for an image.
    """
    if not file.is_file():
        raise SourceError(f"captions '{file}': there is no such file. Pass one with --captions.")
    if file.suffix == ".jsonl":
        with open(file, "rb") as lines:
            by_name = dict(_caption_of(file, number, line) for number, line in enumerate(lines, 1))
        if missing := [name for name in names if name not in by_name]:
            raise SourceError(f"captions '{file}': none for image '{missing[0]}', and {len(missing) - 1} others.")
        return [by_name[name] for name in names]
    content = read_json(file)
    listed = content.get("samples") if isinstance(content, dict) else None
    if not isinstance(listed, list) or len(listed) != len(names):
        got = len(listed) if isinstance(listed, list) else "no"
        raise SourceError(f"captions '{file}': {got} 'samples' for {len(names)} images. Expected one of each.")
    captions = list(map(str, listed))
    if all(caption.isdigit() for caption in captions):
        raise SourceError(f"captions '{file}': its 'samples' are classes. Expected captions, or no --clip.")
    return captions


def _caption_of(file: Path, number: int, line: bytes) -> tuple[str, str]:
    """Name and caption of an image, from a line."""
    try:
        row = json.loads(line)
        text = next(row[key] for key in TEXT_KEYS if key in row)
        return str(row["file_name"]), str(text[0] if isinstance(text, list) else text)
    except (ValueError, TypeError, LookupError, StopIteration, RecursionError) as error:
        raise SourceError(f"captions '{file}', line {number}: expected an object with file_name and text.") from error
