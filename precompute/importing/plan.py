"""The plan of an import: every record's place, shape, label and captions, by headers, and what the store will say.

What most records are, all must be: a record with other channels, another dtype or no flipped copy is rejected.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from ...datasets.errors import RecordRejected, SourceError
from ...datasets.format.buckets import bucket_name, bucket_size
from ...datasets.format.schema import POSTERIORS, StoreSpec
from ...datasets.format.table_schemas import PLAN_SCHEMA
from ...datasets.revisions.plan import FrozenPlan, first_plan
from ..planning.pictures import num_threads
from .formats.source import Entry, Facts, Reader, Seen

CHUNK = 4096  # records looked at before the next are asked for
MAX_CLASSES = 1 << 20
MAX_SIDE = 1 << 14  # places of a latent
DTYPES = ("float16", "float32")

Looked = Seen | RecordRejected


class Common(NamedTuple):
    """What all records of a store have in common.

    Args:
      stored_channels, dtype, has_flip: of the latents.
      caption: (length, width, dtype) that the captions' features are padded to, or None.
      size: of the latents; empty where sizes may differ.
    """

    stored_channels: int
    dtype: str
    has_flip: bool
    caption: tuple[int, int, str] | None
    size: tuple[int, ...]

    @classmethod
    def of(cls, seen: Seen, facts: Facts) -> Common:
        """What a record is of it."""
        caption = seen.caption and (seen.caption.padded, seen.caption.width, seen.caption.dtype)
        return cls(seen.shape[0], seen.dtype, seen.has_flip, caption, seen.shape[1:] if facts.one_size else ())

    def __str__(self) -> str:
        """In words."""
        said = f"{self.stored_channels} channels{''.join(f' x {side}' for side in self.size)} of {self.dtype}"
        said += ", with a flipped copy" if self.has_flip else ", without a flipped copy"
        return said + (", captions of {} x {} {}".format(*self.caption) if self.caption else "")


def listing_hash(entries: Sequence[Entry]) -> str:
    """Hash of what a source lists: names, places and sizes, not times, so that it may be copied."""
    digest = hashlib.sha256()
    for entry in entries:
        digest.update(repr(tuple(entry)).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def look_at(reader: Reader, entries: Sequence[Entry], progress: Callable[[int], None]) -> list[Looked]:
    """Look at every record; a reject is kept, not raised."""

    def look(entry: Entry) -> Looked:
        try:
            return _checked(reader.look(entry), reader)
        except RecordRejected as reject:
            return RecordRejected("scan", reject.reason, reject.detail)

    found: list[Looked] = []
    keys: set[str] = set()
    with ThreadPoolExecutor(num_threads(), thread_name_prefix="leandit-look") as pool:
        for start in range(0, len(entries), CHUNK):
            part = entries[start : start + CHUNK]
            for entry, seen in zip(part, pool.map(look, part), strict=True):
                again = entry.key in keys
                keys.add(entry.key)
                found.append(RecordRejected("scan", "duplicate_key", entry.key) if again else seen)
            progress(len(found))
    return found


def _checked(seen: Seen, reader: Reader) -> Seen:
    """Refuse what no store can hold, whatever the others are.

    Raises: RecordRejected.
    """
    halves = reader.facts.latent in POSTERIORS
    if len(seen.shape) != 3 or not all(1 <= side <= MAX_SIDE for side in seen.shape) or (halves and seen.shape[0] % 2):
        raise RecordRejected("scan", "wrong_shape", f"shape {seen.shape}; needed (channels, height, width)")
    if seen.dtype not in DTYPES:
        raise RecordRejected("scan", "wrong_shape", f"dtype {seen.dtype}; needed float16 or float32")
    if reader.has_labels and seen.label < 0:
        raise RecordRejected("scan", "no_label", f"label {seen.label}")
    if seen.label >= MAX_CLASSES:
        raise RecordRejected("scan", "bad_metadata", f"label {seen.label}; needed a class number")
    if reader.facts.text and not seen.caption:
        raise RecordRejected("scan", "no_caption", "no caption features")
    return seen


def refuse_others(found: Sequence[Looked], reader: Reader) -> tuple[Common, list[Looked]]:
    """Find what most records are, and reject all that are something else.

    Raises: SourceError: no record is left.
    """
    kinds = Counter(Common.of(seen, reader.facts) for seen in found if isinstance(seen, Seen))
    if not kinds:
        first = f"; the first: {found[0]}" if found else ""
        raise SourceError(f"source: not one of {len(found)} records can be imported{first}. Nothing was written.")
    wanted, classes = kinds.most_common(1)[0][0], reader.recipe.source.num_classes

    def refuse(seen: Looked) -> Looked:
        if isinstance(seen, RecordRejected):
            return seen
        if (kind := Common.of(seen, reader.facts)) != wanted:
            return RecordRejected("scan", "wrong_shape", f"{kind}; the other records: {wanted}")
        if 0 < classes <= seen.label:
            detail = f"label {seen.label}, there are {classes} classes (source.num_classes)"
            return RecordRejected("scan", "bad_metadata", detail)
        return seen

    return wanted, [refuse(seen) for seen in found]


def plan_import(spec: StoreSpec, entries: Sequence[Entry], found: Sequence[Looked], listing: str) -> FrozenPlan:
    """Give every record its row, and every distinct caption its id: sorted by length, then by first appearance.

    Of records with the same text, the first one's features are kept.
    """
    lengths: dict[str, int] = {}
    for seen in found:
        if isinstance(seen, Seen) and seen.caption:
            lengths.setdefault(seen.caption.text, seen.caption.num_tokens)
    lengths = dict(sorted(lengths.items(), key=lambda caption: caption[1]))
    ids = {text: i for i, text in enumerate(lengths)}
    columns: dict[str, list[Any]] = {name: [] for name in PLAN_SCHEMA.names}
    next_row: Counter[str] = Counter()
    for entry, seen in zip(entries, found, strict=True):
        row: dict[str, Any] = {"key": entry.key, "revision": 1, "row": -1, "label": -1, "caption_ids": []}
        row |= {"attempts": 1, "source_path": entry.path, "source_offset": entry.offset}
        row |= {"source_bytes": entry.num_bytes, "source_mtime_ns": 0}
        if isinstance(seen, RecordRejected):
            row |= {"status": "rejected", "stage": seen.stage, "reason": seen.reason, "detail": seen.detail}
        else:
            bucket = bucket_of(seen, spec.latent.downscale)
            height_px, width_px = bucket_size(bucket)
            size = seen.size if all(seen.size) else (height_px, width_px)
            row |= {"status": "planned", "bucket": bucket, "row": next_row[bucket], "label": seen.label}
            row |= {"height_px": size[0], "width_px": size[1], "crop_top_px": 0, "crop_left_px": 0}
            row |= {"resized_height_px": height_px, "resized_width_px": width_px}
            row |= {"caption_ids": [ids[seen.caption.text]] if seen.caption else []}
            next_row[bucket] += 1
        for name, values in columns.items():
            values.append(row.get(name))
    records = pa.table(columns, schema=PLAN_SCHEMA)
    return first_plan(spec, listing, records, texts=list(lengths), num_tokens=list(lengths.values()))


def caption_origins(plan: FrozenPlan) -> np.ndarray:
    """Of each caption, (num_captions,): position of the first record that has it."""
    origins = np.full(plan.captions.num_rows, -1, np.int64)
    for position, ids in enumerate(plan.records["caption_ids"].to_pylist()):
        for caption in ids:
            if origins[caption] < 0:
                origins[caption] = position
    return origins


def bucket_of(seen: Seen, downscale: int) -> str:
    """Bucket of a record, by the size of its latent."""
    return bucket_name(seen.shape[1] * downscale, seen.shape[2] * downscale)
