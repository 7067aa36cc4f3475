"""The plan of an import: every record's place, shape, label and captions, by headers, and what the store will say.

What most records are, all must be: a record with other channels, another dtype or no flipped copy is rejected.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ..datasets.buckets import bucket_name, bucket_size
from ..datasets.errors import RecordRejected, SourceError
from ..datasets.frozen import FrozenPlan, first_plan
from ..datasets.schema import (
    PLAN_SCHEMA,
    POSTERIORS,
    StoreSpec,
)
from .import_config import ImportRecipe
from .import_source import CaptionSeen, Entry, Facts, Reader, Seen
from .picture_plan import num_threads
from .rejects import RejectLedger, RejectLimit

CHUNK = 4096  # records looked at before the next are asked for
MAX_CLASSES = 1 << 20
MAX_SIDE = 1 << 14  # places of a latent
DTYPES = ("float16", "float32")

Looked = Seen | RecordRejected


@dataclass(frozen=True)
class Common:
    """What all records of a store have in common.

    Args:
      stored_channels, dtype, has_flip: of the latents.
      caption: (length, width, dtype) that the captions' features are padded to, or None.
    """

    stored_channels: int
    dtype: str
    has_flip: bool
    caption: tuple[int, int, str] | None


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
    if reader.facts.text and not seen.captions:
        raise RecordRejected("scan", "no_caption", "no caption features")
    return seen


def refuse_others(found: Sequence[Looked], reader: Reader, recipe: ImportRecipe) -> tuple[Common, list[Looked]]:
    """Find what most records are, and reject all that are something else.

    Raises: SourceError: no record is left.
    """
    kinds = Counter(_kind(seen, reader.facts) for seen in found if isinstance(seen, Seen))
    if not kinds:
        first = f"; the first: {found[0]}" if found else ""
        raise SourceError(f"source: not one of {len(found)} records can be imported{first}. Nothing was written.")
    wanted = kinds.most_common(1)[0][0]
    kept: list[Looked] = []
    for seen in found:
        if isinstance(seen, Seen) and _kind(seen, reader.facts) != wanted:
            detail = f"{_said(_kind(seen, reader.facts))}; the other records: {_said(wanted)}"
            kept.append(RecordRejected("scan", "wrong_shape", detail))
        elif isinstance(seen, Seen) and 0 < recipe.source.num_classes <= seen.label:
            detail = f"label {seen.label}, there are {recipe.source.num_classes} classes (source.num_classes)"
            kept.append(RecordRejected("scan", "bad_metadata", detail))
        else:
            kept.append(seen)
    channels, dtype, has_flip, caption, _ = wanted
    return Common(channels, dtype, has_flip, caption), kept


def _kind(seen: Seen, facts: Facts) -> tuple[int, str, bool, tuple[int, int, str] | None, tuple[int, ...]]:
    """What must be the same in all records."""
    captions = {(caption.padded, caption.width, caption.dtype) for caption in seen.captions}
    caption = min(captions) if captions else None
    size = seen.shape[1:] if facts.one_size else ()
    return seen.shape[0], seen.dtype, seen.has_flip, caption, size


def _said(kind: tuple[int, str, bool, tuple[int, int, str] | None, tuple[int, ...]]) -> str:
    channels, dtype, has_flip, caption, size = kind
    said = f"{channels} channels{''.join(f' x {side}' for side in size)} of {dtype}"
    said += ", with a flipped copy" if has_flip else ", without a flipped copy"
    return said + (f", captions of {caption[0]} x {caption[1]} {caption[2]}" if caption else "")


def count_rejects(entries: Sequence[Entry], found: Sequence[Looked], recipe: ImportRecipe) -> None:
    """Stop where too many are rejected.

    Raises: SourceError.
    """
    limit = RejectLimit(recipe.source.limits(), RejectLedger(recipe.source.limits(), len(entries)))
    for entry, seen in zip(entries, found, strict=True):
        limit.count(entry.key, seen if isinstance(seen, RecordRejected) else None)


def plan_import(spec: StoreSpec, entries: Sequence[Entry], found: Sequence[Looked], listing: str) -> FrozenPlan:
    """Give every record its row, and every distinct caption its id.

    Of records with the same text, the first one's features are kept.
    """
    lengths, ids = _plan_captions([seen.captions if isinstance(seen, Seen) else () for seen in found])
    columns: dict[str, list[Any]] = {name: [] for name in PLAN_SCHEMA.names}
    next_row: dict[str, int] = {}
    for entry, seen, caption_ids in zip(entries, found, ids, strict=True):
        row: dict[str, Any] = {"key": entry.key, "revision": 1, "row": -1, "label": -1, "caption_ids": caption_ids}
        row |= {"attempts": 1, "source_path": entry.path, "source_offset": entry.offset}
        row |= {"source_bytes": entry.num_bytes, "source_mtime_ns": 0}
        if isinstance(seen, RecordRejected):
            row |= {"status": "rejected", "stage": seen.stage, "reason": seen.reason, "detail": seen.detail}
        else:
            bucket = bucket_of(seen, spec.latent.downscale)
            height_px, width_px = bucket_size(bucket)
            size = seen.size if all(seen.size) else (height_px, width_px)
            row |= {"status": "planned", "bucket": bucket, "row": next_row.get(bucket, 0), "label": seen.label}
            row |= {"height_px": size[0], "width_px": size[1], "crop_top_px": 0, "crop_left_px": 0}
            row |= {"resized_height_px": height_px, "resized_width_px": width_px}
            next_row[bucket] = row["row"] + 1
        for name, values in columns.items():
            values.append(row.get(name))
    records = pa.table(columns, schema=PLAN_SCHEMA)
    return first_plan(spec, listing, records, texts=list(lengths), num_tokens=list(lengths.values()))


def _plan_captions(captions: Iterable[Sequence[CaptionSeen]]) -> tuple[dict[str, int], list[list[int]]]:
    """Deduplicate captions and sort them by length: the length of each by its text, and the ids of each record."""
    lengths: dict[str, int] = {}
    texts: list[list[str]] = []
    for seen in captions:
        texts.append([caption.text for caption in seen])
        for caption in seen:
            lengths.setdefault(caption.text, caption.num_tokens)
    order = sorted(lengths, key=lambda text: lengths[text])  # stable: then by first appearance
    ids = {text: i for i, text in enumerate(order)}
    return {text: lengths[text] for text in order}, [[ids[text] for text in each] for each in texts]


def caption_origins(plan: FrozenPlan) -> np.ndarray:
    """Of each caption, (num_captions, 2): position of the first record that has it, and which of its captions it is."""
    origins = np.full((plan.captions.num_rows, 2), -1, np.int64)
    for position, ids in enumerate(plan.records["caption_ids"].to_pylist()):
        for number, caption in enumerate(ids):
            if origins[caption, 0] < 0:
                origins[caption] = position, number
    return origins


def bucket_of(seen: Seen, downscale: int) -> str:
    """Bucket of a record, by the size of its latent."""
    return bucket_name(seen.shape[1] * downscale, seen.shape[2] * downscale)
