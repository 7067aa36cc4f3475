"""Compare a sample of stored records with a fresh encoding of their source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ..datasets.errors import RecordRejected
from ..datasets.format.buckets import bucket_size
from ..datasets.format.layout import Part
from ..datasets.format.token_dtypes import StoredTokens, widen
from ..datasets.maintenance.findings import Finding
from ..datasets.revisions.catalog import sealed_revisions
from ..datasets.revisions.plan import FrozenPlan, read_plan
from ..datasets.store import LatentStore
from .encoders.forwards import EncodedRow, encode_batch, rows_of_a_forward
from .images.decoders import Decoded
from .repair import Tools, with_places
from .shards.caption_shard import caption_batches, stored_rows
from .shards.latent_shard import batch_views
from .shards.picture_batches import BucketSource, Picture, decode_row

CLOSE = 2e-2  # of the largest value of an array; tolerance for another device or library version
EXACT, WITHIN, OTHER, NOT_COMPARED = range(4)  # how a record or caption came out, the worst last


@dataclass
class DeepReport:
    """Result of a deep check.

    Args:
      num_records, num_captions: compared, with all their features and text encoders, those that were added later too.
      num_exact: equal bit for bit.
      num_close: equal within ``CLOSE``, as from another kind of device or library version.
      findings: all others.
    """

    num_records: int
    num_captions: int
    num_exact: int
    num_close: int
    findings: list[Finding]


@dataclass
class _Outcomes:
    """The worst outcome of each record, by its key, and of each caption, by its number."""

    worst: dict[str | int, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def add(self, what: str | int, outcome: int, finding: Finding | None = None) -> None:
        """Count an outcome; what is found of a record whose picture is gone is found once."""
        if self.worst.get(what) == NOT_COMPARED:
            return
        self.worst[what] = max(outcome, self.worst.get(what, EXACT))
        self.findings += [finding] if finding else []

    def report(self) -> DeepReport:
        """The counts."""
        outcomes = list(self.worst.values())
        num_captions = sum(isinstance(what, int) for what in self.worst)
        counts = (len(outcomes) - num_captions, num_captions, outcomes.count(EXACT), outcomes.count(WITHIN))
        return DeepReport(*counts, self.findings)


def deep_check(root: Path, tools: Tools, *, num_records: int, seed: int) -> DeepReport:
    """Encode a random sample of records and captions again and compare them with the store.

    Records are encoded in their original batches, because the rest of a batch changes the bits of a convolution. What a
    later revision added to them was encoded in batches of its own, and so it is here.

    Args:
      num_records: number of records, and of captions, to compare; all if there are fewer.
    """
    store = LatentStore(root)
    rng = np.random.default_rng(seed)
    statuses = np.array(store.records["status"].to_pylist())
    stored = np.flatnonzero(statuses == "stored")
    sample = rng.choice(stored, min(num_records, len(stored)), replace=False)
    rows = store.records.take(pa.array(sample)).to_pylist()
    captions = rng.choice(store.captions.num_rows, min(num_records, store.captions.num_rows), replace=False)
    result = _Outcomes()
    for revision in sealed_revisions(root):
        plan = with_places(read_plan(root, revision), tools.source)
        for part in plan.layout.parts.values():
            if part.captions:
                _deep_captions(store, plan, part, tools, np.sort(captions).tolist(), result)
                continue
            new, shard_rows = set(part.shards), part.arrays[0].shard_rows
            wanted = {one["row"]: one for one in rows if one["bucket"] == part.bucket}
            wanted = {row: one for row, one in wanted.items() if row // shard_rows in new}
            _deep_pictures(store, plan, part, tools, wanted, result)
    return result.report()


def _deep_pictures(
    store: LatentStore,
    plan: FrozenPlan,
    part: Part,
    tools: Tools,
    wanted: dict[int, dict[str, Any]],
    result: _Outcomes,
) -> None:
    """Compare some rows of a part.

    Args:
      wanted: records by row.
    """
    latent, bucket, source = plan.spec.latent, bucket_size(part.bucket), BucketSource(plan, part)
    encoders = [one for one in tools.encoders.rows_encoders(latent) if one.group in part.groups]
    for shard, rows in sorted(
        {_batch_of(part, row, latent.batch_size) for row in wanted}, key=lambda one: one[1].start
    ):
        decoded = [decode_row(plan, source, row, tools.source, tools.decoders, bucket=bucket) for row in rows]
        how = {row: one["fallback"] for row, one in wanted.items()}
        here = [row for row in rows if row in wanted]
        max_rows = min(rows_of_a_forward(how[row], latent.batch_size) for row in here)
        found: list[EncodedRow] = []
        if any(isinstance(picture, Decoded) for picture in decoded):
            names, num_views = {one.picture for one in encoders}, 2 if latent.flip else 1
            views = batch_views(decoded, names, tools.encoders.image.black, num_views)
            found, _ = encode_batch(views, source.positions[rows.start : rows.stop], encoders, max_rows=max_rows)
        for row in here:
            picture, encoded = decoded[row - rows.start], found[row - rows.start] if found else None
            _compare_record(store, plan, part, shard, wanted[row], picture, encoded, result)


def _batch_of(part: Part, row: int, size: int) -> tuple[int, range]:
    """Shard of a row, and rows that shared a forward with it."""
    shard = row // part.arrays[0].shard_rows
    rows = part.arrays[0].rows_of(shard)
    start = rows.start + (row - rows.start) // size * size
    return shard, range(start, min(start + size, rows.stop))


def _compare_record(
    store: LatentStore,
    plan: FrozenPlan,
    part: Part,
    shard: int,
    record: dict[str, Any],
    decoded: Picture | None,
    found: EncodedRow | None,
    result: _Outcomes,
) -> None:
    key = record["key"]
    of_shard = Finding("", "not_reproduced", "", plan.revision, part.bucket, shard, 1, [key])
    first = replace(of_shard, path=part.arrays[0].shard_path(shard))
    if isinstance(decoded, RecordRejected):
        detail = f"the picture can no longer be read ({decoded.reason}: {decoded.detail})"
        result.add(key, NOT_COMPARED, replace(first, cause="source_changed", detail=detail))
        return
    if decoded is None or found is None or not _is_same_source(decoded, record):
        detail = "the source holds another picture now; precompute with --set source.check=content encodes it"
        result.add(key, NOT_COMPARED, replace(first, cause="source_changed", detail=detail))
        return
    if found.reject:
        result.add(key, OTHER, replace(first, detail=f"cannot be encoded again: {found.reject}"))
        return
    row = store.record(key).row
    for group, layouts in part.groups.items():
        stored = [store.array(layout.path)[row] for layout in layouts]
        finding = replace(of_shard, path=layouts[0].shard_path(shard))
        _judge(key, stored, found.groups[group], finding, result)


def _is_same_source(decoded: Decoded, record: dict[str, Any]) -> bool:
    """Whether the files of a record, of its own picture and of companions, are those that were encoded."""
    now = {"source_checksum": decoded.source_checksum}
    now |= {f"source_checksum_{name}": one.source_checksum for name, one in decoded.companions.items()}
    return all(record[name] == checksum for name, checksum in now.items())


def _numbers(rows: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Rows of arrays as the numbers that they are: int8 tokens times the scales that follow them, bits of bfloat16."""
    found, rest = [], [np.asarray(one) for one in rows]
    while rest:
        one = rest.pop(0)
        if one.dtype == np.int8:
            scales = np.asarray(rest.pop(0))
            found.append(widen(StoredTokens(one, scales), "int8"))
        else:
            found.append(widen(StoredTokens(one, None), "bfloat16" if one.dtype == np.uint16 else "float32"))
    return [one.astype(np.float64) for one in found]


def _judge(
    what: str | int,
    stored: Sequence[np.ndarray],
    found: Sequence[np.ndarray],
    finding: Finding,
    result: _Outcomes,
) -> None:
    """Compare the rows of a record or caption, array by array.

    Args:
      stored, found: as on disk, int8 tokens before their scales.
    """
    if all(np.array_equal(one, other) for one, other in zip(stored, found, strict=True)):
        result.add(what, EXACT)
        return
    pairs = zip(_numbers(stored), _numbers(found), strict=True)
    errors = [(float(np.max(np.abs(one - other))), float(np.max(np.abs(other)))) for one, other in pairs]
    if far := [error for error, largest in errors if not error <= CLOSE * largest]:  # NaN is far, too
        result.add(what, OTHER, replace(finding, detail=f"encoded again it differs by up to {max(far):.4g}"))
    else:
        result.add(what, WITHIN)


def _deep_captions(
    store: LatentStore, plan: FrozenPlan, part: Part, tools: Tools, captions: list[int], result: _Outcomes
) -> None:
    """Compare some captions of the store with a fresh encoding, as far as they are of a part."""
    layout = part.captions
    if layout is None or part.is_null:
        return
    first, texts = layout.first_caption, plan.captions_of(part)["text"].to_pylist()
    wanted = {caption - first: caption for caption in captions if 0 <= caption - first < len(texts)}
    encoder = tools.encoders.captions[layout.name]
    for shard in {shard for _, shard in part.tasks} if wanted else ():
        here = layout.captions_of(shard)
        for batch in caption_batches(layout.num_tokens[here.start : here.stop], layout.spec, encoder):
            ids = [here.start + i for i in batch.tolist()]
            if not wanted.keys() & set(ids):
                continue
            encoded = encoder.encode([texts[i] for i in ids])
            for number, i in enumerate(ids):
                if i in wanted:
                    path = part.arrays[0].shard_path(shard)
                    finding = Finding(path, "not_reproduced", "", plan.revision, None, shard, 1, [texts[i]])
                    found = stored_rows(encoded.row(number), layout.spec).rows
                    _judge(wanted[i], store.text(layout.name).stored_rows(wanted[i]), found, finding, result)
    encoder.release()
