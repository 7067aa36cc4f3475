"""The captions that a revision encodes: each distinct text once, sorted by length, in bounded memory.

DuckDB finds the distinct texts and joins them with the records; only their tokens are counted here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ...datasets.disk.spill import BATCH_ROWS, map_array, map_table, rebatched
from ...datasets.format.table_schemas import CAPTION_COUNTS, PLAN_SCHEMA, captions_schema_of
from ..encoders.text.tokenizer import CaptionTokenizer, of_table
from ..sources.listing.duck import database, numbered

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

TOKENIZE_BATCH = 4096
WHAT = "the plan's captions"
TEXT_SCHEMA = pa.schema([("text", pa.string())])
IDS_SCHEMA = pa.schema([PLAN_SCHEMA.field("caption_ids")])


class CaptionCounts(NamedTuple):
    """Token counts of a text encoder.

    Args:
      suffix: of its columns in the captions table, empty for the first one.
      max_tokens: longer captions are truncated.
      name: of the text encoder.
    """

    suffix: str
    tokenizer: CaptionTokenizer
    max_tokens: int
    name: str = ""

    def columns(self, texts: pa.StringArray) -> dict[str, pa.Array]:
        """``num_tokens`` and ``truncated`` of some texts, by the name of the column."""
        parts = (texts.slice(start, TOKENIZE_BATCH).to_pylist() for start in range(0, len(texts), TOKENIZE_BATCH))
        with of_table(self.name):
            counts = np.array([count for part in parts for count in self.tokenizer.count(part)], np.int64)
        num_tokens = np.minimum(counts, self.max_tokens).astype(np.int32)
        counted = pa.array(num_tokens), pa.array(counts > self.max_tokens)
        return {f"{name}{self.suffix}": values for name, values in zip(CAPTION_COUNTS, counted, strict=True)}


def plan_captions(
    texts_of_records: Iterable[pa.ListArray],
    encoders: Sequence[CaptionCounts],
    *,
    num_records: int,
    revision: int = 1,
    known: pa.Table | None = None,
) -> tuple[pa.Table, pa.ChunkedArray]:
    """Deduplicate captions and sort the new ones by length, then by first appearance.

    Args:
      texts_of_records: captions of batches of records, as lists of texts.
      encoders: all text encoders; the first one's counts are the lengths.
      num_records: in all batches.
      revision: that encodes the new captions.
      known: captions table of the previous revision; its captions keep their ids, and are counted by the encoders that
        it does not have yet.
    Returns: the captions table (``captions_schema``), known captions first, and the caption ids of each record (list of
      int32); both mapped.
    """
    schema = captions_schema_of(encoder.suffix for encoder in encoders if encoder.suffix)
    before = known if known is not None else schema.empty_table()
    if not encoders:
        none = pa.scalar([], IDS_SCHEMA.field(0).type)
        nothing = (
            pa.RecordBatch.from_arrays([pa.repeat(none, len(lists))], schema=IDS_SCHEMA) for lists in texts_of_records
        )
        return before, map_table(IDS_SCHEMA, nothing, WHAT)["caption_ids"]
    num_known, numbers = before.num_rows, map_array(num_records, "uint16", WHAT)  # of captions of each record
    known_texts = (pa.RecordBatch.from_arrays([batch["text"]], schema=TEXT_SCHEMA) for batch in before.to_batches())
    with database(WHAT) as connection:
        connection.register("stream", numbered(TEXT_SCHEMA, chain(known_texts, _flattened(texts_of_records, numbers))))
        connection.execute("CREATE TEMP TABLE texts AS SELECT * FROM stream")
        connection.execute("CREATE TEMP TABLE firsts AS SELECT text, min(position) AS first FROM texts GROUP BY text")
        total: int = connection.sql("SELECT count(*) FROM texts").fetchall()[0][0]
        id_of = map_array(total, "int32", WHAT)  # of each text, at the position where it stands first
        id_of[:num_known] = np.arange(num_known)
        new = connection.sql(f"SELECT first, text FROM firsts WHERE first >= {num_known} ORDER BY first")
        count_fields = [schema.field(f"{name}{encoder.suffix}") for encoder in encoders for name in CAPTION_COUNTS]
        counted_schema = pa.schema([("first", pa.int64()), *TEXT_SCHEMA, *count_fields])
        counts = _counted(new.to_arrow_reader(BATCH_ROWS), encoders, counted_schema)
        connection.register("counted", map_table(counted_schema, counts, WHAT))
        in_order = connection.sql("SELECT * FROM counted ORDER BY num_tokens, first").to_arrow_reader(BATCH_ROWS)
        completed = (_completed(batch, encoders, schema) for batch in before.to_batches())
        added = (_completed(batch, encoders, schema, revision) for batch in _numbered(in_order, id_of, num_known))
        captions = map_table(schema, rebatched(chain(completed, added), BATCH_ROWS), WHAT)
        # One join alone, unsorted: two of them, or a sort behind one, need more memory than one may have.
        ids, pairs = map_array(total, "int32", WHAT), "SELECT position, first FROM texts JOIN firsts USING (text)"
        for batch in connection.sql(pairs).to_arrow_reader(BATCH_ROWS):
            ids[batch["position"].to_numpy()] = id_of[batch["first"].to_numpy()]
    return captions, map_table(IDS_SCHEMA, _id_lists(numbers, ids[num_known:]), WHAT)["caption_ids"]


def _numbered(batches: Iterable[pa.RecordBatch], id_of: np.ndarray, next_id: int) -> Iterator[pa.RecordBatch]:
    """The same batches; the ids of their captions, one after the other, are written into ``id_of``."""
    for batch in batches:
        id_of[batch["first"].to_numpy()] = np.arange(next_id, next_id + batch.num_rows)
        next_id += batch.num_rows
        yield batch


def _flattened(texts_of_records: Iterable[pa.ListArray], numbers: np.ndarray) -> Iterator[pa.RecordBatch]:
    """Flatten the lists, and write their lengths into ``numbers``."""
    start = 0
    for lists in texts_of_records:
        numbers[start : start + len(lists)] = pc.list_value_length(lists).to_numpy()
        start += len(lists)
        yield pa.RecordBatch.from_arrays([lists.flatten()], schema=TEXT_SCHEMA)


def _counted(
    batches: Iterable[pa.RecordBatch], encoders: Sequence[CaptionCounts], schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        columns = {name: batch[name] for name in batch.schema.names}
        for encoder in encoders:
            columns |= encoder.columns(batch["text"])
        yield pa.RecordBatch.from_pydict(columns, schema)


def _completed(
    batch: pa.RecordBatch, encoders: Sequence[CaptionCounts], schema: pa.Schema, revision: int | None = None
) -> pa.RecordBatch:
    """Captions of a plan, counted by the encoders that have not, with nulls for results that they do not have.

    Args:
      revision: of new captions; None for those of an earlier one.
    """
    columns = {name: batch[name] for name in batch.schema.names if name != "first"}
    if revision is not None:
        columns["revision"] = pa.array(np.full(batch.num_rows, revision, np.int32))
    for encoder in encoders:
        if f"{CAPTION_COUNTS[0]}{encoder.suffix}" not in columns:
            columns |= encoder.columns(batch["text"])
    nulls = {field.name: pa.nulls(batch.num_rows, field.type) for field in schema if field.name not in columns}
    return pa.RecordBatch.from_pydict(columns | nulls, schema)


def _id_lists(numbers: np.ndarray, ids: np.ndarray) -> Iterator[pa.RecordBatch]:
    first = 0
    for start in range(0, len(numbers), BATCH_ROWS):
        offsets = np.cumsum([0, *numbers[start : start + BATCH_ROWS]], dtype=np.int32)
        values = pa.array(ids[first : first + offsets[-1]])
        first += int(offsets[-1])
        yield pa.RecordBatch.from_arrays([pa.ListArray.from_arrays(pa.array(offsets), values)], schema=IDS_SCHEMA)
