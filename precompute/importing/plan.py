"""The plan of an import: location, shape, label and caption of every record, from headers.

All records must match the majority: one with other channels, another dtype or no flipped copy is rejected.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pyarrow as pa

from ...datasets.format.buckets import bucket_name, bucket_size
from ...datasets.format.schema import POSTERIORS, StoreSpec
from ...datasets.format.table_schemas import PLAN_SCHEMA
from ...datasets.revisions.plan import FrozenPlan, first_plan
from ...errors import RecordRejected, SourceError
from ..planning.images import num_threads
from .source import Entry, FormatDefaults, Reader, RecordHeader

CHUNK = 4096  # records scanned at once
MAX_CLASSES = 1 << 20
MAX_SIDE = 1 << 14  # pixels of a latent
DTYPES = ("float16", "float32")
TEXT_DTYPES = ("float16", "bfloat16", "float32")

ScannedRecord = RecordHeader | RecordRejected


class CommonFormat(NamedTuple):
    """Properties that all records of a store share.

    Args:
      stored_channels, dtype, has_flip: of the latents.
      captions: (length, width, dtype) of the padded captions, of each text encoder.
      size: of the latents; empty if sizes may differ.
    """

    stored_channels: int
    dtype: str
    has_flip: bool
    captions: tuple[tuple[int, int, str], ...]
    size: tuple[int, ...]

    @classmethod
    def of(cls, header: RecordHeader, defaults: FormatDefaults) -> CommonFormat:
        """The properties of one record."""
        captions = tuple((one.padded, one.width, one.dtype) for one in header.texts)
        size = header.shape[1:] if defaults.one_size else ()
        return cls(header.shape[0], header.dtype, header.has_flip, captions, size)

    def __str__(self) -> str:
        text = f"{self.stored_channels} channels{''.join(f' x {side}' for side in self.size)} of {self.dtype}"
        text += ", with a flipped copy" if self.has_flip else ", without a flipped copy"
        captions = " and ".join(f"{length} x {width} {dtype}" for length, width, dtype in self.captions)
        return text + (f", captions of {captions}" if captions else "")


def listing_hash(entries: Sequence[Entry]) -> str:
    """Hash of names, locations and sizes of a source; without times, so it may be copied."""
    digest = hashlib.sha256()
    for entry in entries:
        digest.update(repr(tuple(entry)).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def scan_records(reader: Reader, entries: Sequence[Entry], progress: Callable[[int], None]) -> list[ScannedRecord]:
    """Read the header of every record; rejects are returned."""

    def look(entry: Entry) -> ScannedRecord:
        try:
            header = reader.look(entry)
        except RecordRejected as reject:
            return RecordRejected("scan", reject.reason, reject.detail)
        return _problem(header, reader) or header

    headers: list[ScannedRecord] = []
    keys: set[str] = set()
    with ThreadPoolExecutor(num_threads(), thread_name_prefix="leandit-look") as pool:
        for start in range(0, len(entries), CHUNK):
            part = entries[start : start + CHUNK]
            for entry, header in zip(part, pool.map(look, part), strict=True):
                again = entry.key in keys
                keys.add(entry.key)
                headers.append(RecordRejected("scan", "duplicate_key", entry.key) if again else header)
            progress(len(headers))
    return headers


def _problem(header: RecordHeader, reader: Reader) -> RecordRejected | None:
    """Why no store can hold a record, or None."""
    reason, (channels, *sides) = "wrong_shape", header.shape
    other = next((one.dtype for one in header.texts if one.dtype not in TEXT_DTYPES), "")
    if max(sides) > MAX_SIDE or (reader.defaults.latent in POSTERIORS and channels % 2):
        detail = f"shape {header.shape}; expected (channels, height, width)"
    elif header.dtype not in DTYPES:
        detail = f"dtype {header.dtype}; expected float16 or float32"
    elif reader.has_labels and header.label < 0:
        reason, detail = "no_label", f"label {header.label}"
    elif header.label >= MAX_CLASSES:
        reason, detail = "bad_metadata", f"label {header.label}; expected a class number"
    elif other:
        detail = f"a caption of dtype {other}; expected float16, bfloat16 or float32"
    else:
        return None
    return RecordRejected("scan", reason, detail)


def reject_outliers(headers: Sequence[ScannedRecord], reader: Reader) -> tuple[CommonFormat, list[ScannedRecord]]:
    """Find the format of most records, and reject all others.

    Raises: SourceError: no record is left.
    """
    kinds = Counter(CommonFormat.of(header, reader.defaults) for header in headers if isinstance(header, RecordHeader))
    if not kinds:
        first = f"; the first: {headers[0]}" if headers else ""
        raise SourceError(f"source: none of {len(headers)} records can be imported{first}. Nothing was written.")
    wanted, classes = kinds.most_common(1)[0][0], reader.recipe.source.num_classes

    def checked(header: ScannedRecord) -> ScannedRecord:
        if isinstance(header, RecordRejected):
            return header
        if (kind := CommonFormat.of(header, reader.defaults)) != wanted:
            return RecordRejected("scan", "wrong_shape", f"{kind}; the other records: {wanted}")
        if 0 < classes <= header.label:
            detail = f"label {header.label}; expected 0 to {classes - 1} (source.num_classes)"
            return RecordRejected("scan", "bad_metadata", detail)
        return header

    return wanted, list(map(checked, headers))


def plan_import(
    spec: StoreSpec, entries: Sequence[Entry], headers: Sequence[ScannedRecord], listing: str
) -> FrozenPlan:
    """Assign every record its row and every distinct caption its id: sorted by length for the first text encoder, then
    by first appearance.

    Of records with the same text, the features of the first one are kept.
    """
    lengths: dict[str, list[int]] = {}
    for header in headers:
        if isinstance(header, RecordHeader) and header.texts:
            lengths.setdefault(header.text, [one.num_tokens for one in header.texts])
    lengths = dict(sorted(lengths.items(), key=lambda caption: caption[1][0]))
    ids = {text: i for i, text in enumerate(lengths)}
    next_row, rows = Counter[str](), list[dict[str, Any]]()
    for entry, header in zip(entries, headers, strict=True):
        row: dict[str, Any] = {"key": entry.key, "revision": 1, "row": -1, "label": -1, "caption_ids": []}
        row |= {"attempts": 1, "source_path": entry.path, "source_offset": entry.offset}
        row |= {"source_bytes": entry.num_bytes, "source_mtime_ns": 0}
        if isinstance(header, RecordRejected):
            row |= {"status": "rejected", "stage": header.stage, "reason": header.reason, "detail": header.detail}
        else:
            bucket = bucket_of(header, spec.latent.downscale)
            height_px, width_px = bucket_size(bucket)
            size = header.size if all(header.size) else (height_px, width_px)
            row |= {"status": "planned", "bucket": bucket, "row": next_row[bucket], "label": header.label}
            row |= {"height_px": size[0], "width_px": size[1], "crop_top_px": 0, "crop_left_px": 0}
            row |= {"resized_height_px": height_px, "resized_width_px": width_px}
            row |= {"caption_ids": [ids[header.text]] if header.texts else []}
            next_row[bucket] += 1
        rows.append(row)
    by_encoder = {one.name: [of[i] for of in lengths.values()] for i, one in enumerate(spec.text_encoders)}
    first, *others = by_encoder or [""]
    return first_plan(
        spec,
        listing,
        pa.Table.from_pylist(rows, schema=PLAN_SCHEMA),
        texts=list(lengths),
        num_tokens=by_encoder.get(first, []),
        further={name: by_encoder[name] for name in others},
    )


def bucket_of(header: RecordHeader, downscale: int) -> str:
    """Bucket of a record, by the size of its latent."""
    return bucket_name(header.shape[1] * downscale, header.shape[2] * downscale)
