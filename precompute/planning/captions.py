"""The captions that a revision encodes: each distinct text once, sorted by length, in bounded memory.

Two passes over the texts: the first hashes them to find duplicates; the second counts the tokens of new texts and
groups them by length. In between, each text takes a few bytes of a mapped file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ...datasets.disk.spill import BATCH_ROWS, GrowingArray, map_array, map_table, rebatched
from ...datasets.format.table_schemas import CAPTION_COUNTS, PLAN_SCHEMA, captions_schema_of
from ..encoders.text.tokenizer import of_table
from ..sources.listing.distinct import digests, first_positions

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

TOKENIZE_BATCH = 4096
SORTED_BYTES = 1 << 24  # of captions that are grouped by length at once
NUMBERED = 1 << 20  # captions that get ids at once
WHAT = "the plan's captions"
IDS_SCHEMA = pa.schema([PLAN_SCHEMA.field("caption_ids")])


class Counter(Protocol):
    """Counts tokens: a ``CaptionTokenizer``."""

    def count(self, captions: Sequence[str]) -> list[int]:
        """Number of tokens of each caption, before truncation."""
        ...


class CaptionCounts(NamedTuple):
    """Token counts of a text encoder.

    Args:
      suffix: of its columns in the captions table, empty for the first one.
      max_tokens: longer captions are truncated.
      name: of the text encoder.
    """

    suffix: str
    tokenizer: Counter
    max_tokens: int
    name: str = ""

    def columns(self, texts: pa.StringArray) -> dict[str, pa.Array]:
        """``num_tokens`` and ``truncated`` of some texts, by the name of the column."""
        parts = (texts.slice(start, TOKENIZE_BATCH).to_pylist() for start in range(0, len(texts), TOKENIZE_BATCH))
        with of_table(self.name):
            counts = np.array([count for part in parts for count in self.tokenizer.count(part)], np.int64)
        num_tokens = np.minimum(counts, self.max_tokens).astype(np.int32)
        found = pa.array(num_tokens), pa.array(counts > self.max_tokens)
        return {f"{name}{self.suffix}": values for name, values in zip(CAPTION_COUNTS, found, strict=True)}


def plan_captions(
    texts_of_records: Iterable[pa.ListArray],
    encoders: Sequence[CaptionCounts],
    *,
    revision: int = 1,
    known: pa.Table | None = None,
) -> tuple[pa.Table, pa.ChunkedArray]:
    """Deduplicate captions and sort the new ones by length, then by first appearance.

    Args:
      texts_of_records: captions of batches of records, as lists of texts; iterated twice.
      encoders: all text encoders; the first one's counts are the lengths.
      revision: that encodes the new captions.
      known: captions table of the previous revision; its captions keep their ids, and are counted by the encoders that
        it does not have yet.
    Returns: the captions table (``captions_schema``), known captions first, and the caption ids of each record (list of
      int32); both mapped.
    """
    schema = captions_schema_of(one.suffix for one in encoders if one.suffix)
    before = known if known is not None else schema.empty_table()
    if not encoders:
        none = pa.scalar([], IDS_SCHEMA.field(0).type)
        nothing = (
            pa.RecordBatch.from_arrays([pa.repeat(none, len(some))], schema=IDS_SCHEMA) for some in texts_of_records
        )
        return before, map_table(IDS_SCHEMA, nothing, WHAT)["caption_ids"]
    numbers = GrowingArray("uint16", WHAT)  # of captions of each record
    known_texts = (batch["text"] for batch in before.to_batches())
    first = first_positions(
        (digests(texts) for texts in chain(known_texts, _flattened(texts_of_records, numbers))), WHAT
    )
    lengths = GrowingArray("int32", WHAT)  # of distinct new captions, in order of appearance
    segments: list[int] = []  # length of the captions in each batch below
    new = _new_texts(texts_of_records, first, before.num_rows)
    counted = ["text", *(f"{name}{one.suffix}" for one in encoders for name in CAPTION_COUNTS)]
    sorted_schema = pa.schema([schema.field(name) for name in counted])
    by_length = map_table(
        sorted_schema, _by_length_batches(new, encoders, sorted_schema, lengths, segments), WHAT
    ).to_batches()
    in_order = (by_length[i] for i in np.argsort(np.array(segments, np.int64), kind="stable"))
    completed = (_completed(batch, encoders, schema) for batch in before.to_batches())
    batches = chain(completed, (_with_results(batch, revision, schema) for batch in in_order))
    captions = map_table(schema, rebatched(batches, BATCH_ROWS), WHAT)
    ids = _caption_ids(first, lengths.close(), before.num_rows)
    return captions, map_table(IDS_SCHEMA, _id_lists(numbers.close(), ids[before.num_rows :]), WHAT)["caption_ids"]


def _flattened(texts_of_records: Iterable[pa.ListArray], numbers: GrowingArray) -> Iterator[pa.StringArray]:
    """Flatten the lists and append their lengths to ``numbers``."""
    for lists in texts_of_records:
        numbers.append(pc.list_value_length(lists).to_numpy())
        yield lists.flatten()


def _new_texts(texts_of_records: Iterable[pa.ListArray], first: np.ndarray, start: int) -> Iterator[pa.StringArray]:
    """Texts that appear for the first time.

    Args:
      first: first position of each text, counted from the first known one.
      start: number of known ones.
    """
    for lists in texts_of_records:
        texts = lists.flatten()
        is_first = first[start : start + len(texts)] == np.arange(start, start + len(texts))
        yield texts.filter(pa.array(is_first))
        start += len(texts)


def _by_length_batches(
    new: Iterable[pa.StringArray],
    encoders: Sequence[CaptionCounts],
    schema: pa.Schema,
    lengths: GrowingArray,
    segments: list[int],
) -> Iterator[pa.RecordBatch]:
    """Batches of captions of one length each; appends all lengths, and the length of each batch."""
    waiting: list[pa.StringArray] = []
    for some in chain(new, [None]):
        waiting += [some] if some else []
        if not waiting or (some is not None and sum(texts.nbytes for texts in waiting) < SORTED_BYTES):
            continue
        texts = pa.concat_arrays(waiting)
        columns = {"text": texts}
        for one in encoders:
            columns |= one.columns(texts)
        num_tokens = columns["num_tokens"].to_numpy()
        lengths.append(num_tokens)
        order = np.argsort(num_tokens, kind="stable")
        by_length = pa.RecordBatch.from_pydict(columns, schema).take(pa.array(order))
        bounds = [0, *np.flatnonzero(np.diff(num_tokens[order])) + 1, len(order)]
        for start, stop in pairwise(bounds):
            segments.append(int(num_tokens[order[start]]))
            yield by_length.slice(start, stop - start)
        waiting = []


def _with_results(batch: pa.RecordBatch, revision: int, schema: pa.Schema) -> pa.RecordBatch:
    """Captions of a new revision, with empty results."""
    columns = {name: batch[name] for name in batch.schema.names}
    columns["revision"] = pa.array(np.full(batch.num_rows, revision, np.int32))
    return _with_nulls(columns, batch.num_rows, schema)


def _completed(batch: pa.RecordBatch, encoders: Sequence[CaptionCounts], schema: pa.Schema) -> pa.RecordBatch:
    """Captions of an earlier revision, counted by the encoders that it does not have."""
    columns = {name: batch[name] for name in batch.schema.names}
    for one in encoders:
        if f"{CAPTION_COUNTS[0]}{one.suffix}" not in columns:
            columns |= one.columns(batch["text"])
    return _with_nulls(columns, batch.num_rows, schema)


def _with_nulls(columns: dict[str, pa.Array], num_rows: int, schema: pa.Schema) -> pa.RecordBatch:
    """Columns of a schema, those that are missing with nulls."""
    nulls = {field.name: pa.nulls(num_rows, field.type) for field in schema if field.name not in columns}
    return pa.RecordBatch.from_pydict(columns | nulls, schema)


def _caption_ids(first: np.ndarray, lengths: np.ndarray, num_known: int) -> np.ndarray:
    """Ids of all texts: known texts keep theirs, new ones follow by length, then by appearance.

    Args:
      first: (N,) first position of each text.
      lengths: (num_new,) tokens of the new texts, in order of appearance.
    Returns: (N,) int32, mapped.
    """
    histogram = np.zeros(1, np.int64)
    for start in range(0, len(lengths), NUMBERED):
        more = np.bincount(lengths[start : start + NUMBERED], minlength=len(histogram))
        more[: len(histogram)] += histogram
        histogram = more
    next_id = num_known + np.cumsum(histogram) - histogram  # by length
    ids, done = map_array(len(first), "int32", WHAT), 0
    for start in range(0, len(first), NUMBERED):
        first_of_some = first[start : start + NUMBERED]
        positions = np.arange(start, start + len(first_of_some))
        new = positions[(first_of_some == positions) & (positions >= num_known)]
        new_lengths = lengths[done : done + len(new)]
        order = np.argsort(new_lengths, kind="stable")
        counts = np.bincount(new_lengths, minlength=len(next_id))
        rank = np.arange(len(new)) - np.repeat(np.cumsum(counts) - counts, counts)
        ids[new[order]] = next_id[new_lengths[order]] + rank
        next_id += counts
        done += len(new)
        known_positions = positions[positions < num_known]
        ids[known_positions] = known_positions
        ids[start : start + len(first_of_some)] = ids[first_of_some]  # the first occurrence already has its id
    return ids


def _id_lists(numbers: np.ndarray, ids: np.ndarray) -> Iterator[pa.RecordBatch]:
    first = 0
    for start in range(0, len(numbers), BATCH_ROWS):
        offsets = np.cumsum([0, *numbers[start : start + BATCH_ROWS]], dtype=np.int32)
        values = pa.array(ids[first : first + offsets[-1]])
        first += int(offsets[-1])
        yield pa.RecordBatch.from_arrays([pa.ListArray.from_arrays(pa.array(offsets), values)], schema=IDS_SCHEMA)
