"""Compare a sample of stored records with a fresh encoding of their source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ..datasets.errors import RecordRejected
from ..datasets.format.buckets import bucket_size
from ..datasets.format.row_layout import bucket_part
from ..datasets.maintenance.findings import Finding
from ..datasets.revisions.plan import FrozenPlan, read_plan
from ..datasets.store import LatentStore
from .encoders.forwards import EncodedRow, encode_batch, rows_of_a_forward
from .repair import Tools, with_places
from .shards.caption_shard import caption_batches, stored_rows
from .shards.picture_batches import Picture, decode_planned

CLOSE = 2e-2  # of the largest value; tolerance for another device or library version


@dataclass
class DeepReport:
    """Result of a deep check.

    Args:
      num_records, num_captions: compared.
      num_exact: equal bit for bit.
      num_close: equal within ``CLOSE``, as from another kind of device or library version.
      findings: all others.
    """

    num_records: int
    num_captions: int
    num_exact: int
    num_close: int
    findings: list[Finding]


def deep_check(root: Path, tools: Tools, *, num_records: int, seed: int) -> DeepReport:
    """Encode a random sample of records and captions again and compare them with the store.

    Records are encoded in their original batches, because the rest of a batch changes the bits of a convolution.

    Args:
      num_records: number of records, and of captions, to compare; all if there are fewer.
    """
    store = LatentStore(root)
    rng = np.random.default_rng(seed)
    statuses = np.array(store.records["status"].to_pylist())
    stored = np.flatnonzero(statuses == "stored")
    sample = rng.choice(stored, min(num_records, len(stored)), replace=False)
    result = DeepReport(0, 0, 0, 0, [])
    rows = store.records.take(pa.array(sample)).to_pylist()
    captions = rng.choice(store.captions.num_rows, min(num_records, store.captions.num_rows), replace=False)
    revision_of_caption = store.captions["revision"].to_numpy()
    for revision in store.manifest.stack if store.manifest else []:
        plan = with_places(read_plan(root, revision), tools.source)
        wanted = {(row["bucket"], row["row"]): row for row in rows if row["revision"] == revision}
        _deep_pictures(store, plan, tools, wanted, result)
        own = np.sort(captions[revision_of_caption[captions] == revision])
        _deep_captions(store, plan, tools, own.tolist(), result)
    return result


def _deep_pictures(
    store: LatentStore,
    plan: FrozenPlan,
    tools: Tools,
    wanted: dict[tuple[str, int], dict[str, Any]],
    result: DeepReport,
) -> None:
    size, images = plan.spec.latent.batch_size, plan.spec.images
    batches = sorted({(bucket, *_batch_of(plan, bucket, row, size)) for bucket, row in wanted})
    for bucket, start, stop in batches:
        positions = plan.bucket_positions[bucket][start:stop]
        table = plan.records.take(pa.array(positions)).to_pylist()
        decoded: list[Picture] = []
        for row in table:
            place = row["source_path"], row["source_offset"], row["source_bytes"]
            planned = row["height_px"], row["width_px"]
            decoded.append(
                decode_planned(images, tools.source, tools.decoders, place, size=planned, bucket=bucket_size(bucket))
            )
        pixels = np.zeros((len(decoded), *bucket_size(bucket), 3), np.uint8)
        for i, picture in enumerate(decoded):
            if not isinstance(picture, RecordRejected):
                pixels[i] = picture.pixels
        views = [pixels, pixels[:, :, ::-1]][: 2 if plan.spec.latent.flip else 1]
        here = {i: wanted[bucket, row] for i, row in enumerate(range(start, stop)) if (bucket, row) in wanted}
        max_rows = min(rows_of_a_forward(record["fallback"], size) for record in here.values())
        found, _ = encode_batch(views, positions, tools.encoders.rows_encoders(plan.spec.latent), max_rows=max_rows)
        for i, record in here.items():
            _compare_record(store, plan, record, decoded[i], found[i], result)


def _batch_of(plan: FrozenPlan, bucket: str, row: int, size: int) -> tuple[int, int]:
    """Rows that shared a forward with a row."""
    shard_rows = plan.layout.part_arrays(bucket_part(bucket))[0].shard_rows
    rows = plan.layout.rows_of(bucket_part(bucket), row // shard_rows)
    start = rows.start + (row - rows.start) // size * size
    return start, min(start + size, rows.stop)


def _compare_record(
    store: LatentStore,
    plan: FrozenPlan,
    record: dict[str, Any],
    decoded: Picture,
    found: EncodedRow,
    result: DeepReport,
) -> None:
    array = plan.layout.part_arrays(bucket_part(record["bucket"]))[0]
    path = array.shard_path(record["row"] // array.shard_rows)
    place = (plan.revision, record["bucket"], record["row"] // array.shard_rows, 1, [record["key"]])
    result.num_records += 1
    if isinstance(decoded, RecordRejected):
        detail = f"the picture can no longer be read ({decoded.reason}: {decoded.detail})"
        result.findings.append(Finding(path, "source_changed", detail, *place))
        return
    if decoded.source_checksum != record["source_checksum"]:
        detail = "the source holds another picture now; precompute with --set source.check=content encodes it"
        result.findings.append(Finding(path, "source_changed", detail, *place))
        return
    if found.reject:
        result.findings.append(Finding(path, "not_reproduced", f"cannot be encoded again: {found.reject}", *place))
        return
    row = store.record(record["key"]).row
    arrays = [
        array for layouts in plan.layout.parts[bucket_part(record["bucket"])].groups.values() for array in layouts
    ]
    stored = [store.array(array.path.removeprefix(plan.layout.prefix))[row] for array in arrays]
    encoded = [rows for group in found.groups.values() for rows in group]
    _judge(_flat(stored), _flat(encoded), Finding(path, "not_reproduced", "", *place), result)


def _flat(rows: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.ravel(row).astype(np.float32) for row in rows])


def _judge(stored: np.ndarray, found: np.ndarray, finding: Finding, result: DeepReport) -> None:
    if np.array_equal(stored, found):
        result.num_exact += 1
        return
    difference = float(np.max(np.abs(stored.astype(np.float64) - found.astype(np.float64))))
    if difference <= CLOSE * max(1.0, float(np.max(np.abs(found.astype(np.float64))))):
        result.num_close += 1
        return
    result.findings.append(replace(finding, detail=f"encoded again it differs by up to {difference:.4g}"))


def _deep_captions(store: LatentStore, plan: FrozenPlan, tools: Tools, captions: list[int], result: DeepReport) -> None:
    """Compare some captions of a revision with a fresh encoding, one text encoder after the other."""
    texts = plan.own_captions["text"].to_pylist()
    wanted = {caption - plan.first_caption: caption for caption in captions}
    for part in plan.layout.parts.values():
        layout = part.captions
        if not layout or part.is_null or part.revision != plan.revision or not captions:
            continue
        encoder = tools.encoders.captions[layout.name]
        for shard in {shard for _, shard in part.tasks}:
            here = layout.captions_of(shard)
            for batch in caption_batches(layout.num_tokens[here.start : here.stop], layout.spec, encoder):
                ids = [here.start + i for i in batch.tolist()]
                if not wanted.keys() & set(ids):
                    continue
                encoded = encoder.encode([texts[i] for i in ids])
                for number, i in enumerate(ids):
                    if i in wanted:
                        result.num_captions += 1
                        path = part.arrays[0].shard_path(shard)
                        place = (path, "not_reproduced", "", plan.revision, None, shard, 1, [texts[i]])
                        found = stored_rows(encoded.row(number), layout.spec).rows
                        stored = store.text(layout.name).stored_rows(wanted[i])
                        _judge(_flat(stored), _flat(found), Finding(*place), result)
        encoder.release()
