"""Compare a sample of stored records with a fresh encoding of their source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ..datasets.errors import RecordRejected
from ..datasets.format.layout import Part, is_picture_task
from ..datasets.format.token_dtypes import StoredTokens, widen
from ..datasets.maintenance.findings import Finding
from ..datasets.revisions.catalog import sealed_revisions
from ..datasets.revisions.plan import FrozenPlan, read_plan
from ..datasets.store import LatentStore
from .repair import Tools, fallbacks_in, with_places
from .run.shards import Shard

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

    The runner encodes their original batches, because the rest of a batch changes the bits of a convolution. What a
    later revision added to them was encoded in batches of its own, and so it is here.

    Args:
      num_records: number of records, and of captions, to compare; all if there are fewer.
    """
    store = LatentStore(root)
    rng = np.random.default_rng(seed)
    statuses = np.array(store.records["status"].to_pylist())
    stored = np.flatnonzero(statuses == "stored")
    sample = rng.choice(stored, min(num_records, len(stored)), replace=False)
    records = store.records.take(pa.array(sample)).to_pylist()
    is_finite = np.ones(store.captions.num_rows, bool)
    for name in store.texts:
        is_finite &= store.caption_checksums(name) != 0
    encoded = np.flatnonzero(is_finite)
    captions = np.sort(rng.choice(encoded, min(num_records, len(encoded)), replace=False))
    outcomes = _Outcomes()
    for revision in sealed_revisions(root):
        plan, wanted = with_places(read_plan(root, revision), tools.source), {}
        for part in plan.layout.parts.values():
            for number in part.shards:
                if rows := _sampled(part, number, records, captions):
                    wanted[part.name, number] = rows
        how = {"wanted_of": lambda task, rows=wanted: rows[task].keys(), "fallbacks_of": fallbacks_in(plan)}
        for shard in tools.runner.shards(plan, sorted(wanted, key=is_picture_task), **how):
            for row, what in wanted[shard.task].items():
                if shard.part.captions:
                    _compare_caption(store, plan, shard, row, what, outcomes)
                else:
                    _compare_record(store, plan, shard, row, what, outcomes)
    return outcomes.report()


def _sampled(part: Part, number: int, records: Sequence[dict[str, Any]], captions: np.ndarray) -> dict[int, Any]:
    """Rows of a shard that are in the sample, with their records; or its captions, counted from the first of the part,
    with their ids."""
    if part.is_null:
        return {}
    if part.captions:
        here, first = part.captions.captions_of(number), part.captions.first_caption
        return {int(id) - first: int(id) for id in captions if int(id) - first in here}
    rows = part.arrays[0].rows_of(number)
    return {one["row"]: one for one in records if one["bucket"] == part.bucket and one["row"] in rows}


def _compare_record(
    store: LatentStore, plan: FrozenPlan, shard: Shard, row: int, record: dict[str, Any], outcomes: _Outcomes
) -> None:
    key, part, item = record["key"], shard.part, row - shard.part.arrays[0].rows_of(shard.number).start
    of_shard = Finding("", "not_reproduced", "", plan.revision, part.bucket, shard.number, 1, [key])
    first = replace(of_shard, path=part.arrays[0].shard_path(shard.number))
    if reject := next((one for one in shard.rejects if one.row == row), None):
        if reject.stage == "encode":
            detail = f"cannot be encoded again: {RecordRejected(reject.stage, reject.reason, reject.detail)}"
            outcomes.add(key, OTHER, replace(first, detail=detail))
            return
        detail = f"the picture can no longer be read ({reject.reason}: {reject.detail})"
        outcomes.add(key, NOT_COMPARED, replace(first, cause="source_changed", detail=detail))
        return
    checksums = shard.results["source_checksum"][item].tolist()
    companions = {one.name for one in plan.spec.pictures}
    names = [f"source_checksum_{group}" if group in companions else "source_checksum" for group in part.groups]
    if any(record[name] != checksum for name, checksum in zip(names, checksums, strict=True)):
        detail = "the source holds another picture now; precompute with --set source.check=content encodes it"
        outcomes.add(key, NOT_COMPARED, replace(first, cause="source_changed", detail=detail))
        return
    for layouts in part.groups.values():
        stored = [store.array(layout.path)[row] for layout in layouts]
        encoded = [shard.arrays[layout.path][item] for layout in layouts]
        _judge(key, stored, encoded, replace(of_shard, path=layouts[0].shard_path(shard.number)), outcomes)


def _compare_caption(
    store: LatentStore, plan: FrozenPlan, shard: Shard, caption: int, number: int, outcomes: _Outcomes
) -> None:
    """Compare a caption of a part, counted from its first; ``number`` is its id."""
    layout = shard.part.captions
    assert layout is not None, "a part of captions"
    stored = store.text(layout.name).stored_rows(number)
    encoded = []
    for array, first, rows in zip(shard.part.arrays, layout.starts_of(caption), stored, strict=True):
        start = first - array.rows_of(shard.number).start
        encoded.append(shard.arrays[array.path][start : start + len(rows)])
    text, path = store.captions["text"][number].as_py(), shard.part.arrays[0].shard_path(shard.number)
    finding = Finding(path, "not_reproduced", "", plan.revision, None, shard.number, 1, [text])
    _judge(number, stored, encoded, finding, outcomes)


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
