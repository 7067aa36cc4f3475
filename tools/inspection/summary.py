"""``leandit inspect``: what a store holds, and whether its numbers are what they should be. Needs no torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ...datasets.format.layout import EMBEDDINGS, NULL_EMBEDDING, NULL_SCALES, SCALES, commit_path
from ...datasets.format.schema import LOGVAR_RANGE, LatentSpec
from ...datasets.format.token_dtypes import token_bytes
from ...datasets.store import LatentStore, Record
from ..terminal.text import printable

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

SCAN_BYTES = 2 << 30  # latents are read up to this; of a larger store, rows spread evenly over it
SCAN_BYTES_AT_URL = 256 << 20  # of a store at a URL: whole shards, which come from there
SCAN_ROWS = 512  # read at a time
# A model wants latents of about zero mean and unit deviation. Beyond these the scale is probably another VAE's.
MEAN_LIMIT, STD_LIMITS = 0.5, (0.5, 2.0)
FALLBACKS = {
    "float32": "not finite before, so encoded again",
    "batch": "the batch ran out of memory, so fewer rows in a forward",
}
PERCENTILES = (0, 50, 95, 100)


def summarise(store: LatentStore) -> dict[str, Any]:
    """Everything ``inspect`` says of a store, as plain values (what ``--json`` prints)."""
    records, spec = store.records, store.spec
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
        "caption_tokens": caption_lengths(store),
        "caption_quality": caption_quality(store),
        "bytes": bytes_per_part(store),
        "fingerprint": spec.fingerprint,
        "root_hash": store.root_hash,
        "images": spec.images.model_dump(),
        "latent": spec.latent.model_dump(),
        "text": spec.text and spec.text.model_dump(),
        "encoders": {
            "vae": spec.vae.model_dump(exclude={"config"}),
            "text": spec.text_encoder and spec.text_encoder.model_dump(exclude={"config"}),
        },
        "codec": spec.codec,
    }
    return summary | {"latent_statistics": latent_statistics(store)}


def _counts(column: pa.ChunkedArray) -> dict[str, int]:
    """How often each text stands in a column, in order; nulls are not counted."""
    found = {entry["values"]: entry["counts"] for entry in column.value_counts().to_pylist()}
    return {text: found[text] for text in sorted(text for text in found if text is not None)}


def caption_lengths(store: LatentStore) -> dict[str, Any] | None:
    """How long the captions are, in tokens; None where there are none."""
    if store.spec.text is None or not store.captions.num_rows:
        return None
    tokens = store.captions["num_tokens"].to_numpy()
    edges = [0, 8, 16, 32, 64, 128, 256, 512, 4096]
    counts, _ = np.histogram(tokens, bins=[edge + 0.5 for edge in edges])
    table = {f"{low + 1}-{high}": int(n) for low, high, n in zip(edges, edges[1:], counts, strict=False) if n}
    low, median, p95, high = (int(value) for value in np.percentile(tokens, PERCENTILES, method="higher"))
    padded = len(tokens) * store.spec.text.max_tokens
    return {
        "min": low,
        "median": median,
        "p95": p95,
        "max": high,
        "table": table,
        "num_truncated": int(pc.sum(store.captions["truncated"]).as_py() or 0),
        "padding_avoided": round(padded / max(1, int(tokens.sum())), 2),  # times fewer tokens than padded to max_tokens
    }


def caption_quality(store: LatentStore) -> dict[str, Any] | None:
    """What it cost to store captions in a narrower dtype, and what it saved; None where there are none.

    The cosine of a caption is the smallest of its tokens, between what the encoder gave and what is stored.
    """
    if store.spec.text is None or not store.captions.num_rows:
        return None
    cosines = store.captions["min_cosine"].drop_null().to_numpy()
    errors = store.captions["max_error"].drop_null().to_numpy()
    sizes, arrays = file_sizes(store), (f"{EMBEDDINGS}/c/", f"{SCALES}/c/")
    each = sum(size for path, size in sizes.items() if any(name in path for name in arrays)) / store.captions.num_rows
    padded = token_bytes(store.spec.text.width, "float16") * store.spec.text.max_tokens
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
    tokens = tuple(f"{name}/c/" for name in (EMBEDDINGS, SCALES, NULL_EMBEDDING, NULL_SCALES))
    parts = {"latents": 0, "captions": 0, "tables and metadata": 0}
    for path, size in sizes.items():
        in_array = "/c/" in path or path.endswith("/c")
        part = "latents" if "buckets/" in path and in_array else "tables and metadata"
        if any(name in path for name in tokens):
            part = "captions"
        parts[part] += size
    return parts | {"total": sum(sizes.values())}


def latent_statistics(store: LatentStore) -> dict[str, Any]:
    """Mean and standard deviation of each channel as the model sees it, and rows that are not finite.

    The figures are those of the final latents: after shift and scale, with the posterior's variance counted in.
    """
    spec = store.spec.latent
    count, num_rows, nonfinite = 0, 0, []
    total, squares = np.zeros(spec.channels), np.zeros(spec.channels)
    for bucket, rows in _rows_to_scan(store).items():
        array = store.latents(bucket)
        for start in range(0, len(rows), SCAN_ROWS):
            chunk = rows[start : start + SCAN_ROWS]
            values = array.take(chunk).astype(np.float64)
            finite = np.isfinite(values).all(axis=(1, 2, 3))
            nonfinite += [f"{bucket}, row {row}" for row in chunk[~finite]]
            mean, square = _moments_of(values[finite], spec)
            count += mean.shape[0] * mean.shape[2] * mean.shape[3]
            total += mean.sum(axis=(0, 2, 3))
            squares += square.sum(axis=(0, 2, 3))
            num_rows += len(chunk)
    mean = total / max(count, 1)
    std = np.sqrt(np.maximum(squares / max(count, 1) - mean**2, 0))
    shift, scale = np.array(spec.shift), np.array(spec.scale)
    mean, std = (mean - shift) * scale, std * np.abs(scale)
    suspicious = (np.abs(mean) > MEAN_LIMIT) | (std < STD_LIMITS[0]) | (std > STD_LIMITS[1])
    return {
        "num_rows_read": num_rows,
        "num_nonfinite": len(nonfinite),
        "nonfinite": nonfinite[:20],
        "channel_mean": [round(float(value), 4) for value in mean],
        "channel_std": [round(float(value), 4) for value in std],
        "suspicious_channels": np.flatnonzero(suspicious).tolist() if num_rows else [],
    }


def _moments_of(values: np.ndarray, spec: LatentSpec) -> tuple[np.ndarray, np.ndarray]:
    """First and second moment of a raw latent at each place, over the posterior's draw."""
    if not spec.has_posterior:
        return values, values**2
    mean, spread = np.split(values, 2, axis=1)
    return mean, mean**2 + (spread**2 if spec.kind == "mean_std" else np.exp(np.clip(spread, *LOGVAR_RANGE)))


def _rows_to_scan(store: LatentStore) -> dict[str, np.ndarray]:
    """Rows of each bucket that are read: all of a store up to SCAN_BYTES, else evenly spread ones."""
    rows = {bucket: store.index(bucket).rows for bucket in store.buckets}
    sizes = {bucket: store.latents(bucket).row_bytes for bucket in rows}
    total = sum(len(rows[bucket]) * sizes[bucket] for bucket in rows)
    if store.remote is None:
        step = max(1, -(-total // SCAN_BYTES))
        return {bucket: found[::step] for bucket, found in rows.items()}
    step = max(1, -(-total // SCAN_BYTES_AT_URL))
    chosen, num_shards = {}, 0
    for bucket, found in rows.items():
        shards = num_shards + found // store.latents(bucket).shard_rows
        num_shards += -(-len(found) // store.latents(bucket).shard_rows)
        chosen[bucket] = found[shards % step == 0]
    return chosen


def render(summary: dict[str, Any]) -> str:
    """The summary as aligned text."""
    stats, lines = summary["latent_statistics"], []

    def line(name: str, value: object) -> None:
        lines.append(f"{name:<20}{value}")

    line("store", summary["store"])
    line("state", "complete" if summary["complete"] else "INCOMPLETE: run the same precompute command again")
    if summary["unfinished_revision"] and summary["complete"]:
        line("", f"revision {summary['unfinished_revision']} is unfinished: run the same precompute command again")
    line("revision", f"{summary['revision']} of {summary['newest_revision']}")
    said = f"{summary['num_planned']} planned = {summary['num_stored']} stored + {summary['num_rejected']} rejected"
    missing = summary["num_planned"] - summary["num_stored"] - summary["num_rejected"]
    line("records", f"{said} + {missing} missing" if missing else said)
    for reason, count in summary["rejects"].items():
        line("", f"{count} x {reason}")
    for how, count in summary["fallbacks"].items():
        line("", f"{count} stored as {how}: {FALLBACKS[how.split(':')[0]]}")
    line("classes", summary["classes"])
    line("fingerprint", summary["fingerprint"])
    line("root hash", summary["root_hash"] or "none yet")
    lines += ["", f"{'bucket':<20}{'records':>10}"]
    lines += [f"{bucket:<20}{count:>10}" for bucket, count in summary["buckets"].items()]
    lines += ["", f"{'part':<20}{'MiB':>10}"]
    lines += [f"{part:<20}{size / 2**20:>10.2f}" for part, size in summary["bytes"].items()]
    lines += ["", *_render_encoders(summary)]
    if lengths := summary["caption_tokens"]:
        lines += ["", f"{'caption tokens':<20}{'captions':>10}"]
        lines += [f"{span:<20}{count:>10}" for span, count in lengths["table"].items()]
        lines.append(
            f"{summary['num_captions']} captions, {summary['num_caption_tokens']} tokens: min {lengths['min']}, "
            f"median {lengths['median']}, 95 % {lengths['p95']}, max {lengths['max']}; {lengths['num_truncated']} cut "
            f"at {summary['text']['max_tokens']}; {lengths['padding_avoided']}x fewer tokens than padded"
        )
    if found := summary["caption_quality"]:
        lines.append(
            f"{found['bytes_per_caption']:.0f} bytes a caption, {found['fewer_than_padded_float16']}x fewer than "
            f"float16 padded to {summary['text']['max_tokens']} tokens"
        )
        if found["min_cosine"] is not None and found["max_error"] is not None:
            lines.append(
                f"stored tokens against the encoder's: cosine at least {found['min_cosine']}, median of captions "
                f"{found['median_cosine']}; largest error {found['max_error']:.4g}"
            )
    lines.append("")
    figures = list(zip(stats["channel_mean"], stats["channel_std"], strict=True)) if stats["num_rows_read"] else []
    if figures:
        head = f"{'latent channel':<20}{'mean':>10}{'std':>10}"
        lines.append(f"{head}   as the model sees them; expected about 0 and 1")
    for channel, (mean, std) in enumerate(figures):
        mark = "   <- unusual: is this the VAE's own scale?" if channel in stats["suspicious_channels"] else ""
        lines.append(f"{channel:<20}{mean:>10.3f}{std:>10.3f}{mark}")
    lines.append(f"{stats['num_nonfinite']} rows are not finite, of {stats['num_rows_read']} read")
    lines += [f"  {where}" for where in stats["nonfinite"]]
    return "\n".join(printable(line) for line in lines)


def _render_encoders(summary: dict[str, Any]) -> list[str]:
    latent, text = summary["latent"], summary["text"]
    lines = []
    for role, identity in summary["encoders"].items():
        if identity:
            revision = f" at {identity['revision']}" if identity["revision"] else ""
            lines.append(f"{role + ' encoder':<20}{identity['class_name']} '{identity['model']}'{revision}")
            lines.append(
                f"{'':<20}weights sha256 {identity['weights_sha256'][:16]}..., computed in {identity['dtype']}"
            )
    lines.append(
        f"{'latents':<20}{latent['kind']}, {latent['stored_channels']} channels stored as {latent['dtype']}, "
        f"1/{latent['downscale']} of the pixels, codec {summary['codec']}, flip {'yes' if latent['flip'] else 'no'}"
    )
    if text:
        lines.append(
            f"{'captions':<20}{text['width']} wide, stored as {text['dtype']}, at most {text['max_tokens']} tokens"
        )
    return lines


def ledger(store: LatentStore) -> list[dict[str, Any]]:
    """Every rejected record: key, stage, reason, detail, attempts, and the revision that rejected it."""
    rejected = store.records.filter(pc.equal(store.records["status"], "rejected"))
    return rejected.select(["key", "stage", "reason", "detail", "attempts", "revision"]).to_pylist()


def render_ledger(rejects: list[dict[str, Any]]) -> str:
    """The rejects as text, one a line."""
    lines = [
        f"{reject['reason']:<18}{reject['stage']:<8}{reject['key']}: {reject['detail']}"
        + (f" (tried {reject['attempts']} times)" if reject["attempts"] > 1 else "")
        for reject in rejects
    ]
    return "\n".join(printable(line) for line in [*lines, f"{len(rejects)} rejected"])


def describe_record(store: LatentStore, record: Record) -> dict[str, Any]:
    """Everything known of one record."""
    values: dict[str, Any] = {name: getattr(record, name) for name in Record.__dataclass_fields__}
    values["caption_ids"] = list(record.caption_ids)
    if store.spec.classes and record.label >= 0:
        values["class"] = store.spec.classes[record.label]
        values["class_name"] = store.class_names.names[record.label]
    if record.caption_ids:
        texts = store.captions["text"]
        values["captions"] = [
            {"text": texts[i].as_py(), "num_tokens": int(store.tokens.lengths[i])} for i in record.caption_ids
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
    """A few digits, or None where JSON has no number for it."""
    return round(float(value), digits) if np.isfinite(value) else None


def render_record(values: dict[str, Any]) -> str:
    """One record as aligned text."""
    lines = []
    for name, value in values.items():
        if name == "captions":
            lines += [
                f"{'caption':<20}{caption['text'] or 'none: the null caption'}  ({caption['num_tokens']} tokens)"
                for caption in value
            ]
        elif value is not None:
            lines.append(f"{name:<20}{value}")
    return "\n".join(printable(line) for line in lines)
