"""Contact sheets of a store: decoded records, their source images and rejected records, as one PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from PIL import Image

from ...datasets.errors import RecordRejected, StoreError
from ...datasets.format.buckets import bucket_size
from ...datasets.store import LatentStore
from ...precompute.config import SourceSection
from ...precompute.images.decoders import Decoders
from ...precompute.planning.compare import DUPLICATE
from ...precompute.sources.several import SourcePaths, list_sources
from .grid import Cell, draw_sheet, spread
from .store_facts import StoreFacts

if TYPE_CHECKING:
    from .decoder import LatentDecoder

Originals = Mapping[str, np.ndarray]
"""Source images by record key, (height, width, 3) uint8 each."""


class ShownRecord(NamedTuple):
    """A stored record that is shown as an image; the caption is its first one, else its class, else empty."""

    position: int  # in the records table
    key: str
    bucket: str
    row: int  # in ``store.latents(bucket)``
    caption: str


def write_sheet(
    store: LatentStore,
    path: Path,
    *,
    key: str | None = None,
    rejects: bool = False,
    count: int = 24,
    bucket: str | None = None,
    class_name: str | None = None,
    source: SourcePaths | None = None,
    with_originals: bool = False,
    vae: str | None = None,
) -> str:
    """Write the contact sheet of ``leandit inspect --sheet`` as PNG.

    Args:
      key: of the only record to show.
      rejects: show rejected records, with their source images if ``source`` is given and they can be read.
      count: largest number of images.
      bucket, class_name: show records of these only.
      source: the images that the store was made from.
      with_originals: draw the source image to the left of each decoded one.
      vae: hub id or folder of the decoder; None: the store's own.
    Returns: what it shows, for the user.
    Raises: StoreError, SourceError, EncoderError, UnknownKey, RecipeError: an unknown class.
    """
    if rejects:
        rejected = StoreFacts(store).rejected.slice(0, count).to_pylist()
        if not rejected:
            raise StoreError(f"store '{store.path}': it has no rejects, so there is nothing to show.")
        originals = read_originals(store, source, [reject["key"] for reject in rejected]) if source else {}
        image, shown = draw_sheet(reject_cells(rejected, originals)), f"{len(rejected)} rejected records"
    else:
        if key:
            records = [_record(store, key)]
        else:
            label = store.class_names.find(class_name) if class_name else None
            records = choose_records(store, count=count, bucket=bucket, label=label)
        keys = [record.key for record in records]
        originals = read_originals(store, source, keys) if source and with_originals else None
        import torch

        from .decoder import LatentDecoder

        decoder = LatentDecoder.of_store(store, vae, torch.device("cpu"))
        image, shown = store_sheet(store, decoder, records, originals=originals), f"{len(records)} records"
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, format="PNG")
    return shown


def _record(store: LatentStore, key: str) -> ShownRecord:
    record = store.record(key)
    if record.status != "stored" or record.bucket is None:
        raise StoreError(f"record '{key}': it is {record.status}, so there is nothing to decode.")
    places = np.flatnonzero(store.index(record.bucket).records == record.index)
    return shown_records(store, {record.bucket: places})[0]


def choose_records(
    store: LatentStore, *, count: int, bucket: str | None = None, label: int | None = None
) -> list[ShownRecord]:
    """Stored records, bucket after bucket, spread evenly over the store.

    Args:
      bucket, label: choose from these only.
    Raises: StoreError: no record matches; UnknownKey: the store has no such bucket.
    """
    buckets = [bucket] if bucket else list(store.buckets)
    indexes = [store.index(name) for name in buckets]
    parts = [np.arange(len(one)) if label is None else np.flatnonzero(one.labels == label) for one in indexes]
    numbers = np.repeat(np.arange(len(buckets)), [len(part) for part in parts])
    if not len(numbers):
        raise StoreError(f"store '{store.path}': it holds no such records, so there is nothing to show.")
    places, chosen = np.concatenate(parts), spread(len(numbers), count)
    return shown_records(store, {name: places[chosen[numbers[chosen] == i]] for i, name in enumerate(buckets)})


def shown_records(store: LatentStore, places: Mapping[str, np.ndarray]) -> list[ShownRecord]:
    """Records by their positions in the index of each bucket, in the order given."""
    indexes = {bucket: store.index(bucket) for bucket in places}
    positions = [int(indexes[bucket].records[place]) for bucket in places for place in places[bucket]]
    keys = iter(store.record_columns(("key",))["key"].take(pa.array(positions, pa.int64())).to_pylist())
    shown = []
    for bucket, index in indexes.items():
        for place in places[bucket].tolist():
            caption, label = "", int(index.labels[place])
            if index.caption_starts[place] < index.caption_starts[place + 1]:
                caption = store.captions["text"][int(index.caption_ids[index.caption_starts[place]])].as_py()
            elif label >= 0 and store.num_classes:
                caption = f"{label}: {store.class_names.describe(label)}"
            shown.append(ShownRecord(int(index.records[place]), next(keys), bucket, int(index.rows[place]), caption))
    return shown


def store_sheet(
    store: LatentStore, decoder: LatentDecoder, records: Sequence[ShownRecord], *, originals: Originals | None = None
) -> Image.Image:
    """Contact sheet of decoded records.

    Args:
      originals: source images by key, drawn on the left.
    """
    cells = []
    for record in records:
        pixels = decoder.decode_rows(store.latents(record.bucket).take(np.array([record.row])))[0]
        cells.append(Cell(pixels, record.caption, record.key, originals.get(record.key) if originals else None))
    return draw_sheet(cells, with_originals=originals is not None)


def reject_cells(rejects: Sequence[Mapping[str, Any]], originals: Originals) -> list[Cell]:
    """Rejected records: their source images if they can be read, and the reasons.

    A duplicate key has no image: the source image with that key belongs to the accepted record.
    """
    return [
        Cell(
            None if one["reason"] == DUPLICATE else originals.get(one["key"]),
            f"{one['reason']}: {one['detail'] or ''}",
            one["key"],
        )
        for one in rejects
    ]


def read_originals(store: LatentStore, source: SourcePaths, keys: Sequence[str]) -> Originals:
    """Readable source images of some records, cropped and resized as the store has them.

    Raises: SourceError.
    """
    images = store.spec.images
    section = SourceSection.model_validate(store.spec.recipe.get("source", {}))  # an imported store has none
    listed = list_sources(source, section)
    remaining, originals = set(keys), dict[str, np.ndarray]()
    with Decoders(1) as decoders:
        for record in listed.records:
            if not remaining:
                break
            if record.key not in remaining:
                continue
            remaining.remove(record.key)
            bucket = store.record(record.key).bucket or f"{images.resolution_px}x{images.resolution_px}"
            try:
                place = listed.place(record.path, record.offset, record.num_bytes, stage="decode")
                originals[record.key] = decoders.picture(
                    *place,
                    bucket=bucket_size(bucket),
                    crop=images.crop,
                    resize_filter=images.resize_filter,
                    exif_orientation=images.exif_orientation,
                ).pixels
            except RecordRejected:
                continue  # its cell stays grey
    return originals
