"""``leandit inspect``: contents and statistics of a store or a record. Needs no torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ...datasets.format.caption_layout import CAPTION_PART, LENGTHS, OFFSETS, caption_arrays, caption_folder
from ...datasets.format.layout import commit_path
from ...datasets.format.row_layout import FEATURES, PICTURES
from ...datasets.format.schema import FeatureEncoder, PictureSpec, TextEncoder
from ...datasets.format.table_schemas import suffixes
from ...datasets.format.token_dtypes import token_bytes
from ...datasets.revisions.latent_statistics import merge_statistics, statistics_of
from ...datasets.store import LatentStore, Record

pc: Any = pyarrow.compute  # defined at run time, so type checkers do not know its functions

SCAN_BYTES = 2 << 30  # of latents; a larger store is sampled evenly
SCAN_BYTES_AT_URL = 256 << 20  # of a remote store, in whole shards
SCAN_ROWS = 512  # read at a time
# Models expect latents of about zero mean and unit deviation. Beyond these limits the scale is probably another VAE's.
MEAN_LIMIT, STD_LIMITS = 0.5, (0.5, 2.0)
PERCENTILES = (0, 50, 95, 100)


def summarise(store: LatentStore, *, scan_bytes: int = SCAN_BYTES) -> dict[str, Any]:
    """Contents and statistics of a store, as plain values.

    Args:
      scan_bytes: latents that are read for the statistics; of a larger store an even sample.
    """
    records, spec = store.record_columns(("status", "reason", "fallback")), store.spec
    statuses = _counts(records["status"])
    rejected = records.filter(pc.equal(records["status"], "rejected"))
    tokens = store.captions["num_tokens"].to_numpy()
    summary = {
        "store": store.remote.url if store.remote else str(store.path),
        "format_version": spec.format_version,
        "complete": store.complete,
        "revision": store.revision,
        "newest_revision": store.newest_revision,
        "unfinished_revision": store.unfinished_revision,
        "num_planned": records.num_rows,
        "num_stored": statuses.get("stored", 0),
        "num_rejected": statuses.get("rejected", 0),
        "rejects": _counts(rejected["reason"]),
        "fallbacks": _counts(records["fallback"]),
        "buckets": store.buckets,
        "num_classes": store.num_classes,
        "classes": store.class_names.summary(),
        "num_captions": len(tokens),
        "num_caption_tokens": int(tokens.sum()),
        "caption_tokens": caption_lengths(store, store.texts[0]) if store.texts else None,
        "caption_quality": caption_quality(store, store.texts[0]) if store.texts else None,
        "bytes": bytes_per_part(store),
        "fingerprint": spec.fingerprint,
        "root_hash": store.root_hash,
        "images": spec.images.model_dump(),
        "latent": spec.latent.model_dump(),
        "text": spec.text and spec.text.model_dump(),
        "texts": {one.name: describe_text(store, one) for one in spec.texts},
        "features": {one.name: describe_feature(store, one) for one in spec.features},
        "pictures": {one.name: describe_picture(store, one) for one in spec.pictures},
        "encoders": {
            "vae": spec.vae.model_dump(exclude={"config"}),
            "text": spec.text_encoder and spec.text_encoder.model_dump(exclude={"config"}),
            **{one.name: one.encoder.model_dump(exclude={"config"}) for one in (*spec.texts, *spec.features)},
        },
        "codec": spec.codec,
        "self_check": self_check(store),
    }
    return summary | {"latent_statistics": latent_statistics(store, scan_bytes)}


def self_check(store: LatentStore) -> dict[str, Any] | None:
    """What came back of a few pictures before the store was planned; None without a check."""
    check = store.manifest and store.manifest.self_check
    if not check:
        return None
    median = float(np.median([picture.psnr_db for picture in check.pictures]))
    return check.model_dump() | {"median_psnr_db": round(median, 2)}


def _counts(column: pa.ChunkedArray) -> dict[str, int]:
    """Count of each text in a column, sorted; without nulls."""
    counts = {entry["values"]: entry["counts"] for entry in column.value_counts().to_pylist()}
    return {text: counts[text] for text in sorted(text for text in counts if text is not None)}


def describe_text(store: LatentStore, encoder: TextEncoder) -> dict[str, Any]:
    """A named text encoder: what is stored of a caption, lengths, quality."""
    return {
        "spec": encoder.spec.model_dump(),
        "caption_tokens": caption_lengths(store, encoder.name),
        "caption_quality": caption_quality(store, encoder.name),
    }


def describe_feature(store: LatentStore, encoder: FeatureEncoder) -> dict[str, Any]:
    """A feature: what is stored of a record, bytes, quality.

    The cosine of a record is the smallest cosine between one of its tokens as encoded and as stored.
    """
    cosines, errors = (
        store.record_columns((f"{name}_{encoder.name}",))[0].drop_null().to_numpy()
        for name in ("min_cosine", "max_error")
    )
    return {
        "spec": encoder.spec.model_dump(),
        "bytes_per_record": round(_array_bytes(store, f"/features/{encoder.name}/") / max(1, len(store)), 1),
        "min_cosine": _rounded(cosines.min(), 8) if len(cosines) else None,
        "median_cosine": _rounded(np.median(cosines), 8) if len(cosines) else None,
        "max_error": _rounded(errors.max(), 8) if len(errors) else None,
    }


def describe_picture(store: LatentStore, picture: PictureSpec) -> dict[str, Any]:
    """A companion picture: its column and kind, the shape of a row in the first bucket, bytes."""
    bucket = next(iter(store.buckets), None)
    return {
        "column": picture.column,
        "kind": picture.kind,
        "row_shape": list(store.picture(picture.name, bucket).row_shape) if bucket else None,
        "bytes_per_record": round(_array_bytes(store, f"/pictures/{picture.name}/") / max(1, len(store)), 1),
    }


def _array_bytes(store: LatentStore, part: str) -> int:
    """Bytes of the shards whose path has a part in it."""
    return sum(size for path, size in file_sizes(store).items() if part in path and "/c/" in path)


def caption_lengths(store: LatentStore, name: str) -> dict[str, Any] | None:
    """Lengths of the captions in tokens of a text encoder; None without captions."""
    if not store.captions.num_rows:
        return None
    suffix = suffixes(store.spec)[name]
    tokens = store.captions[f"num_tokens{suffix}"].to_numpy()
    edges = [0, 8, 16, 32, 64, 128, 256, 512, 4096]
    counts, _ = np.histogram(tokens, bins=[edge + 0.5 for edge in edges])
    table = {f"{low + 1}-{high}": int(n) for low, high, n in zip(edges, edges[1:], counts, strict=False) if n}
    low, median, p95, high = (int(value) for value in np.percentile(tokens, PERCENTILES, method="higher"))
    padded = len(tokens) * store.spec.text_encoder_of(name).spec.max_tokens
    return {
        "min": low,
        "median": median,
        "p95": p95,
        "max": high,
        "table": table,
        "num_truncated": int(pc.sum(store.captions[f"truncated{suffix}"]).as_py() or 0),
        "padding_avoided": round(padded / max(1, int(tokens.sum())), 2),  # times fewer tokens than padded to max_tokens
    }


def caption_quality(store: LatentStore, name: str) -> dict[str, Any] | None:
    """Error and saving of storing the captions of a text encoder in a narrower dtype; None without captions.

    The cosine of a caption is the smallest cosine between one of its tokens as encoded and as stored.
    """
    if not store.captions.num_rows:
        return None
    suffix, spec = suffixes(store.spec)[name], store.spec.text_encoder_of(name).spec
    cosines = store.captions[f"min_cosine{suffix}"].drop_null().to_numpy()
    errors = store.captions[f"max_error{suffix}"].drop_null().to_numpy()
    arrays = caption_arrays(spec)
    each = sum(_array_bytes(store, f"{caption_folder(name)}/{array}/c/") for array in arrays) / store.captions.num_rows
    padded = token_bytes(spec.width, "float16") * spec.max_tokens if spec.has_tokens else 0
    padded += token_bytes(spec.pooled_width, "float16")
    return {
        "num_measured": len(cosines),
        "min_cosine": _rounded(cosines.min(), 8) if len(cosines) else None,
        "median_cosine": _rounded(np.median(cosines), 8) if len(cosines) else None,
        "max_error": _rounded(errors.max(), 8) if len(errors) else None,
        "bytes_per_caption": round(each, 1),
        "fewer_than_padded_float16": round(padded / max(each, 1), 2),
    }


def file_sizes(store: LatentStore) -> dict[str, int]:
    """Bytes of every file of the store."""
    if store.manifest:
        return {entry.path: entry.bytes for entry in store.manifest.files}
    files = (path for path in store.path.rglob("*") if path.is_file())
    return {path.relative_to(store.path).as_posix(): path.stat().st_size for path in files}


def bytes_per_part(store: LatentStore) -> dict[str, int]:
    """Bytes on disk of each part of the store."""
    sizes = file_sizes(store)
    parts = {"latents": 0, **{f"feature {name}": 0 for name in store.features}}
    parts |= {f"picture {name}": 0 for name in store.pictures}
    parts |= {f"captions {name}".strip(): 0 for name in store.texts or [""]} | {"tables and metadata": 0}
    for path, size in sizes.items():
        parts[_part_of(path)] += size
    return parts | {"total": sum(sizes.values())}


def _part_of(path: str) -> str:
    """The part of a store that a file belongs to, for a person."""
    folder, _, key = path.partition("/c/")
    names = folder.split("/")
    if not key or names[-1] in (OFFSETS, LENGTHS):
        return "tables and metadata"
    for folder, what in ((FEATURES, "feature"), (PICTURES, "picture")):
        if folder in names:
            return f"{what} {names[-2]}"
    if "buckets" in names:
        return "latents"
    return "captions" if names[-2] == CAPTION_PART else f"captions {names[-2]}"


def latent_statistics(store: LatentStore, scan_bytes: int = SCAN_BYTES) -> dict[str, Any]:
    """Mean and standard deviation of each channel as the model sees it, and rows that are not finite, read now."""
    spec, num_rows, nonfinite, parts = store.spec.latent, 0, [], []
    for bucket, rows in _rows_to_scan(store, scan_bytes).items():
        array = store.latents(bucket)
        for start in range(0, len(rows), SCAN_ROWS):
            chunk = rows[start : start + SCAN_ROWS]
            values = array.take(chunk)
            finite = np.isfinite(values).all(axis=(1, 2, 3))
            nonfinite += [f"{bucket}, row {row}" for row in chunk[~finite]]
            parts.append(statistics_of([values[finite]], spec))
            num_rows += len(chunk)
    found = merge_statistics(parts or [statistics_of([], spec)])
    mean, std = np.array(found.channel_mean), np.array(found.channel_std)
    suspicious = (np.abs(mean) > MEAN_LIMIT) | (std < STD_LIMITS[0]) | (std > STD_LIMITS[1])
    return {
        "num_rows_read": num_rows,
        "num_nonfinite": len(nonfinite),
        "nonfinite": nonfinite[:20],
        "channel_mean": [round(value, 4) for value in found.channel_mean],
        "channel_std": [round(value, 4) for value in found.channel_std],
        "suspicious_channels": np.flatnonzero(suspicious).tolist() if num_rows else [],
    }


def _rows_to_scan(store: LatentStore, scan_bytes: int) -> dict[str, np.ndarray]:
    """Rows to read of each bucket: all up to ``scan_bytes``, else an even sample."""
    rows = {bucket: store.index(bucket).rows for bucket in store.buckets}
    sizes = {bucket: store.latents(bucket).row_bytes for bucket in rows}
    total = sum(len(rows[bucket]) * sizes[bucket] for bucket in rows)
    if store.remote is None:
        step = max(1, -(-total // scan_bytes))
        return {bucket: bucket_rows[::step] for bucket, bucket_rows in rows.items()}
    step = max(1, -(-total // min(scan_bytes, SCAN_BYTES_AT_URL)))
    chosen, num_shards = {}, 0
    for bucket, bucket_rows in rows.items():
        shard_rows = store.latents(bucket).shard_rows
        shards = num_shards + bucket_rows // shard_rows
        num_shards += -(-len(bucket_rows) // shard_rows)
        chosen[bucket] = bucket_rows[shards % step == 0]
    return chosen


def ledger(store: LatentStore) -> list[dict[str, Any]]:
    """Every rejected record: key, stage, reason, detail, attempts and revision."""
    columns = ("key", "stage", "reason", "detail", "attempts", "revision")
    records = store.record_columns((*columns, "status"))
    return records.filter(pc.equal(records["status"], "rejected")).select(columns).to_pylist()


def describe_record(store: LatentStore, record: Record) -> dict[str, Any]:
    """All fields of a record, its captions, and statistics of its latent."""
    values: dict[str, Any] = {name: getattr(record, name) for name in Record.__dataclass_fields__}
    values["caption_ids"] = list(record.caption_ids)
    if store.spec.classes and record.label >= 0:
        values["class"] = store.spec.classes[record.label]
        values["class_name"] = store.class_names.names[record.label]
    if record.caption_ids:
        texts = store.captions["text"]
        values["captions"] = [
            {"text": texts[i].as_py(), "num_tokens": int(store.captions["num_tokens"][i].as_py())}
            for i in record.caption_ids
        ]
    if record.status != "stored" or record.bucket is None:
        return values
    array = store.latents(record.bucket)
    layout, shard = array.locate(record.row)
    row = array[record.row].astype(np.float64)
    values["shard"] = layout.shard_path(shard)
    values["commit"] = commit_path(record.revision, f"buckets/{record.bucket}", shard)
    values["stored_shape"] = list(row.shape)
    values["finite"] = bool(np.isfinite(row).all())
    values["channel_mean"] = [_rounded(value) for value in row.mean(axis=(1, 2))]
    values["channel_std"] = [_rounded(value) for value in row.std(axis=(1, 2))]
    return values


def _rounded(value: float, digits: int = 4) -> float | None:
    """The rounded value; None if it is not finite, which JSON cannot hold."""
    return round(float(value), digits) if np.isfinite(value) else None
