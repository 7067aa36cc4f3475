"""Contact sheets of a store: decoded records, their source pictures and rejected records, as one PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from ...datasets.errors import RecordRejected, StoreError
from ...datasets.format.buckets import bucket_size
from ...datasets.store import LatentStore
from ...precompute.config import SourceSection
from ...precompute.images.decoders import Decoders
from ...precompute.planning.compare import DUPLICATE
from ...precompute.sources.several import SourcePaths, list_sources
from .decoder import LatentDecoder
from .grid import Cell, draw_sheet
from .summary import ledger

Originals = Mapping[str, np.ndarray]
"""Source pictures by record key, (height, width, 3) uint8 each."""


@dataclass(frozen=True)
class SheetOptions:
    """What a contact sheet shows.

    Args:
      key: this record alone.
      rejects: rejected records, with their source pictures if ``source`` is given and they can be read.
      count: largest number of pictures.
      bucket, class_name: records of these alone.
      source: the pictures that the store was made from.
      with_originals: the source picture on the left of each decoded one.
      vae: hub id or folder of the decoder; None: the store's own.
    """

    key: str | None = None
    rejects: bool = False
    count: int = 24
    bucket: str | None = None
    class_name: str | None = None
    source: SourcePaths | None = None
    with_originals: bool = False
    vae: str | None = None


def write_sheet(store: LatentStore, path: Path, options: SheetOptions) -> str:
    """Write the contact sheet of ``leandit inspect --sheet`` as PNG.

    Returns: a count of what it shows, for the user.
    Raises: StoreError, SourceError, EncoderError, UnknownKey, RecipeError: an unknown class.
    """
    if options.rejects:
        rejects = ledger(store)[: options.count]
        if not rejects:
            raise StoreError(f"store '{store.path}': it has no rejects, so there is nothing to show.")
        keys = [reject["key"] for reject in rejects]
        image = rejects_sheet(rejects, read_originals(store, options.source, keys) if options.source else {})
        shown = f"{len(rejects)} rejected records"
    else:
        positions = _chosen_positions(store, options)
        keys = [store.record_at(position).key for position in positions]
        originals = read_originals(store, options.source, keys) if options.source and options.with_originals else None
        decoder = LatentDecoder.of_store(store, options.vae, torch.device("cpu"))
        image, shown = store_sheet(store, decoder, positions, originals=originals), f"{len(keys)} records"
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, format="PNG")
    return shown


def _chosen_positions(store: LatentStore, options: SheetOptions) -> list[int]:
    if not options.key:
        label = store.class_names.find(options.class_name) if options.class_name else None
        return choose_records(store, count=options.count, bucket=options.bucket, label=label)
    record = store.record(options.key)
    if record.status != "stored":
        raise StoreError(f"record '{options.key}': it is {record.status}, so there is nothing to decode.")
    return [record.index]


def choose_records(store: LatentStore, *, count: int, bucket: str | None = None, label: int | None = None) -> list[int]:
    """Positions of stored records in the records table, bucket after bucket, spread evenly over the store.

    Args:
      bucket, label: choose from these alone.
    Raises: StoreError: no record matches; UnknownKey: the store has no such bucket.
    """
    indexes = [store.index(name) for name in ([bucket] if bucket else store.buckets)]
    parts = [index.records if label is None else index.records[index.labels == label] for index in indexes]
    positions = np.concatenate(parts) if parts else np.empty(0, np.int64)
    if not len(positions):
        raise StoreError(f"store '{store.path}': it holds no such records, so there is nothing to show.")
    chosen = np.unique(np.linspace(0, len(positions) - 1, min(count, len(positions))).round().astype(int))
    return positions[chosen].tolist()


def store_sheet(
    store: LatentStore, decoder: LatentDecoder, positions: Sequence[int], *, originals: Originals | None = None
) -> Image.Image:
    """Contact sheet of decoded records.

    Args:
      positions: in the records table (``choose_records``).
      originals: source pictures by key, drawn on the left.
    """
    cells = []
    for position in positions:
        record = store.record_at(position)
        assert record.bucket is not None
        pixels = decoder.decode_rows(store.latents(record.bucket).take(np.array([record.row])))[0]
        caption = caption_of(store, record.caption_ids, record.label)
        cells.append(Cell(pixels, caption, record.key, originals.get(record.key) if originals else None))
    return draw_sheet(cells, with_originals=originals is not None)


def rejects_sheet(rejects: Sequence[Mapping[str, Any]], originals: Originals) -> Image.Image:
    """Contact sheet of rejected records: the source picture if it can be read, and the reason.

    A duplicate key shows no picture: the source picture with that key belongs to the accepted record.

    Args:
      rejects: at least one entry of ``summary.ledger``.
    """
    cells = [
        Cell(reject_picture(one, originals), f"{one['reason']}: {one['detail'] or ''}", one["key"]) for one in rejects
    ]
    return draw_sheet(cells)


def reject_picture(reject: Mapping[str, Any], originals: Originals) -> np.ndarray | None:
    """The source picture of a rejected record; None if it cannot be read or has the key of another record."""
    return None if reject["reason"] == DUPLICATE else originals.get(reject["key"])


def read_originals(store: LatentStore, source: SourcePaths, keys: Sequence[str]) -> Originals:
    """Readable source pictures of some records, cropped and resized as the store has them.

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


def caption_of(store: LatentStore, caption_ids: Sequence[int], label: int) -> str:
    """First caption of a record, else its class, else nothing."""
    if caption_ids:
        return store.captions["text"][caption_ids[0]].as_py()
    if label >= 0 and store.spec.classes:
        return f"{label}: {store.class_names.describe(label)}"
    return ""
