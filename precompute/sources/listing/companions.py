"""The companion pictures of records: each is another column of the same table, listed like the records themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ....datasets.disk.spill import BATCH_ROWS, rebatched
from ....datasets.errors import SourceError

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them


def with_pictures(
    batches: Iterable[pa.RecordBatch], companions: Mapping[str, Iterable[pa.RecordBatch]], where: str
) -> Iterator[pa.RecordBatch]:
    """Records with the places of their companions; a problem of a companion rejects its record.

    Args:
      batches: of the listing, a record for each row of the source.
      companions: by name, the listing of the same rows with the column of the companion.
      where: the source, for errors.
    Raises: SourceError: the source changed while it was listed.
    """
    streams = [rebatched(one, BATCH_ROWS) for one in (batches, *companions.values())]
    for batch, *others in zip_longest(*streams):
        if batch is None or any(other is None or len(other) != len(batch) for other in others):
            raise SourceError(f"{where}: it has other rows than a moment ago. Run the same command again.")
        yield _joined(batch, dict(zip(companions, others, strict=True)))


def _joined(batch: pa.RecordBatch, others: Mapping[str, pa.RecordBatch]) -> pa.RecordBatch:
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    for name, other in others.items():
        reason, detail = other["reason"], pc.binary_join_element_wise(f"picture '{name}': ", other["detail"], "")
        is_own = columns["reason"].is_valid()  # the record's own problem comes first
        columns["detail"] = pc.if_else(is_own, columns["detail"], detail)
        columns["reason"] = pc.if_else(is_own, columns["reason"], reason)
    count, rows = len(others), len(batch)
    by_record = np.arange(count * rows).reshape(count, rows).T.ravel()
    paths = pa.concat_arrays([other["path"] for other in others.values()]).take(pa.array(by_record))
    names = ("offset", "num_bytes", "mtime_ns")
    places = np.stack([[other[name].to_numpy() for name in names] for other in others.values()])  # (count, 3, rows)
    columns["picture_paths"] = _lists(paths, count)
    columns["picture_places"] = _lists(pa.array(places.transpose(2, 0, 1).ravel()), 3 * count)
    return pa.RecordBatch.from_pydict(columns, batch.schema)


def _lists(values: pa.Array, count: int) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(np.arange(0, len(values) + 1, count), pa.int32()), values)
