"""The frozen plan of a revision: every row's place, fixed before the first encode, in a folder written as one.

Whoever writes the folder first has planned the revision; all others go on with that plan. So coordinators that start at
the same moment, or from a source that changes meanwhile, still make one store.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
from pydantic import ValidationError

from .buckets import bucket_size
from .cached import cached_property
from .errors import DamageError, FormatVersionError, RecipeError, StoreIncomplete
from .files import write_folder
from .hashing import canonical_json, read_json, sha256_of, xxh3_file, xxh3_parts
from .layout import CAPTIONS, PLAN, PLAN_HEAD, RECORDS, RevisionLayout, revision_prefix, revisions_with
from .mapped import BATCH_ROWS, map_array, map_table, map_written, one_chunk
from .schema import CAPTIONS_SCHEMA, FALLBACK, FORMAT_VERSION, RECORDS_SCHEMA, FileEntry, PlanHead, StoreSpec

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

VOLATILE_COLUMN = "source_mtime_ns"  # it says when a file was written, not what is in it
MAX_LABEL = 1 << 31
# How much a table may grow when it is read, for each byte of its file; far more than any of ours. A stored record has
# 16 bytes of checksums alone, which no encoding shortens.
MAX_ROWS_PER_BYTE, MAX_VALUES_PER_BYTE, MAX_TEXT_PER_BYTE = 4, 16, 256
ROW_GROUP = 1 << 20  # rows; pyarrow's own default
SMALL_TABLE = 1 << 16  # bytes that every table is allowed


@dataclass(frozen=True)
class FrozenPlan:
    """The plan of one revision.

    Args:
      spec: what the revision says of itself.
      revision: its number, from 1.
      base: root hash of the revision that it builds on, "" for the first.
      stack: earlier revisions whose arrays stay in use.
      carried: files of earlier revisions that it reads: the root's metadata, and the arrays of its stack.
      copies: its rows are copied from the base, not encoded (``leandit compact``).
      listing: hash of the source's listing (keys, sizes, times), to tell whether the source has changed.
      records: all records of the revision: RECORDS_SCHEMA's columns, then where each picture lies in the source. What
        this revision makes has its number in ``revision``; the rest is carried over as it is.
      captions: CAPTIONS_SCHEMA; those that this revision adds come last, sorted so that equal lengths lie together.
      recorded_hash: as the store says it; computed where the plan is new.
    """

    spec: StoreSpec
    revision: int
    base: str
    stack: tuple[int, ...]
    carried: tuple[FileEntry, ...]
    copies: bool
    listing: str
    records: pa.Table
    captions: pa.Table
    recorded_hash: str = ""

    @cached_property
    def hash(self) -> str:
        """What commit records name: a hash of all that decides the bytes."""
        if self.recorded_hash:
            return self.recorded_hash
        parts = [parquet_file(self.records.drop_columns([VOLATILE_COLUMN])), parquet_file(self.captions)]
        tables = [xxh3_parts([part])[1] for part in parts]
        return sha256_of([self.spec.fingerprint, self.revision, self.base, self.stack, self.copies, *tables])

    @cached_property
    def bucket_positions(self) -> dict[str, np.ndarray]:
        """Of each bucket, (N,) positions in the records table by row, mapped; buckets in order of their size."""
        counts = {name: rows for name, rows in _count_rows(self).items() if rows}
        names = sorted(counts, key=bucket_size)
        positions = map_array(sum(counts.values()), "int64", "the rows of the plan")
        ends = np.cumsum([counts[name] for name in names])
        found = {name: positions[end - counts[name] : end] for name, end in zip(names, ends, strict=True)}
        for name, rows, here in _own_rows(self):
            assert name is not None, "a row has a bucket"
            found[name][rows] = here
        return found

    @cached_property
    def own_captions(self) -> pa.Table:
        """The captions that this revision adds."""
        return self.captions.slice(self.first_caption)

    @cached_property
    def first_caption(self) -> int:
        """Id of the first caption that this revision adds."""
        return int(pc.sum(pc.less(self.captions["revision"], self.revision)).as_py() or 0)

    @cached_property
    def layout(self) -> RevisionLayout:
        """Where everything of the revision lies."""
        return RevisionLayout(
            spec=self.spec,
            revision=self.revision,
            bucket_rows={name: len(positions) for name, positions in self.bucket_positions.items()},
            num_tokens=self.own_captions["num_tokens"].to_numpy(),
            has_null=self.spec.text is not None and not self.stack,
        )


def freeze_plan(root: Path, plan: FrozenPlan) -> FrozenPlan:
    """Write the plan of a revision, unless there is one.

    Returns: the plan that holds: this one, or the one that was there.
    """
    return plan if write_plan(root, plan, replace=False) else read_plan(root, plan.revision)


def write_plan(root: Path, plan: FrozenPlan, *, replace: bool) -> bool:
    """Write the folder of a plan; returns False where there is one that stays."""
    tables = {RECORDS: [parquet_file(plan.records)], CAPTIONS: [parquet_file(plan.captions)]}
    entries = []
    for name, content in tables.items():
        size, digest = xxh3_parts(content)
        entries.append(FileEntry(path=name, bytes=size, xxh3_128=digest).model_dump())
    head = {
        "format_version": FORMAT_VERSION,
        "revision": plan.revision,
        "base": plan.base,
        "stack": list(plan.stack),
        "carried": [entry.model_dump() for entry in plan.carried],
        "copies": plan.copies,
        "listing": plan.listing,
        "plan": plan.hash,
        "spec": plan.spec.model_dump(),
        "files": entries,
    }
    head |= {"sha256": sha256_of(head)}
    folder = root / revision_prefix(plan.revision) / PLAN
    return write_folder(folder, [*tables.items(), (PLAN_HEAD, canonical_json(head))], replace=replace)


def planned_revisions(root: Path) -> list[int]:
    """Revisions of a store that have a plan, in order."""
    return revisions_with(root, f"{PLAN}/{PLAN_HEAD}")


def read_plan(root: Path, revision: int) -> FrozenPlan:
    """Read the frozen plan of a revision.

    Raises: StoreIncomplete: there is none; DamageError: a file of it is not what was written.
    """
    folder = root / revision_prefix(revision) / PLAN
    if not (folder / PLAN_HEAD).is_file():
        raise StoreIncomplete(f"store '{root}': its plan is not finished. Run the same precompute command again.")
    head = read_json(folder / PLAN_HEAD)
    damaged = DamageError(
        f"store '{root}': the plan of revision {revision} is damaged. Run 'leandit verify --repair --source PATH'."
    )
    if not isinstance(head, dict) or head.pop("sha256", None) != sha256_of(head):
        raise damaged
    if head.get("format_version") != FORMAT_VERSION:
        raise FormatVersionError(
            f"store '{root}': its plan has format version {head.get('format_version')}, this release reads "
            f"{FORMAT_VERSION}. Use the release that wrote it, or precompute again."
        )
    try:
        said = PlanHead.model_validate(head)
    except ValidationError as error:
        raise damaged from error
    if said.revision != revision:
        raise damaged
    for name, entry in zip((RECORDS, CAPTIONS), said.files, strict=True):
        if not (folder / name).is_file() or xxh3_file(folder / name) != entry.xxh3_128:
            raise damaged
    records, captions = map_plan_table(folder / RECORDS), map_plan_table(folder / CAPTIONS)
    plan = FrozenPlan(
        spec=said.spec,
        revision=revision,
        base=said.base,
        stack=tuple(said.stack),
        carried=tuple(said.carried),
        copies=said.copies,
        listing=said.listing,
        records=records,
        captions=captions,
        recorded_hash=said.plan,
    )
    if problem := table_problem(said.spec, revision, records, captions.num_rows, captions) or _place_problem(plan):
        raise DamageError(f"{damaged} It says what cannot be: {problem}.")
    return plan


def table_problem(
    spec: StoreSpec, revision: int, records: pa.Table, num_captions: int, captions: pa.Table | None = None
) -> str:
    """What cannot be in the tables of a revision, or "": numbers that would lead outside of its arrays and tables.

    Args:
      records: all columns of the table, or some.
    """
    columns = records.column_names
    for name in pc.unique(records["bucket"]).drop_null().to_pylist() if "bucket" in columns else ():
        try:
            sides = bucket_size(name)
        except RecipeError:
            return f"a bucket named {name[:40]!r}"
        if min(sides) < spec.latent.downscale:
            return f"bucket {name!r}, smaller than one place of a latent"
    for how in pc.unique(records["fallback"]).drop_null().to_pylist() if "fallback" in columns else ():
        if not re.fullmatch(FALLBACK, how):
            return f"a record encoded as {how[:40]!r}"
    limits = {"revision": (1, revision), "row": (-1, 1 << 40), "label": (-1, MAX_LABEL)}
    bounds = [(name, records[name], *limit) for name, limit in limits.items() if name in columns]
    if "caption_ids" in columns:
        bounds.append(("caption id", pc.list_flatten(records["caption_ids"]), 0, num_captions - 1))
    if captions is not None:
        longest = spec.text.max_tokens if spec.text else 0
        bounds += [("revision", captions["revision"], 1, revision), ("length", captions["num_tokens"], 1, longest)]
        if _falls(captions["revision"]):
            return "captions that are not in order of their revision"
    for what, values, low, high in bounds:
        found = pc.min_max(values).as_py()
        if values.null_count or (len(values) and not low <= found["min"] <= found["max"] <= high):
            return f"a {what} of {found['min']} to {found['max']}, it must be {low} to {high}"
    return ""


def _falls(numbers: pa.ChunkedArray) -> bool:
    """A number is smaller than the one before it."""
    last = -1
    for chunk in numbers.chunks:
        here = chunk.to_numpy()
        if len(here) and (here[0] < last or np.any(np.diff(here) < 0)):
            return True
        last = here[-1] if len(here) else last
    return False


def _own_rows(plan: FrozenPlan) -> Iterator[tuple[str | None, np.ndarray, np.ndarray]]:
    """Records with a row in the plan's own arrays, a few at a time: their bucket, rows, and positions in the table."""
    first = 0
    for batch in plan.records.select(["bucket", "revision", "row"]).to_batches():
        rows = batch["row"].to_numpy()
        own = np.flatnonzero((batch["revision"].to_numpy() == plan.revision) & (rows >= 0))
        if len(own):
            buckets = batch["bucket"].take(pa.array(own)).dictionary_encode()
            codes = pc.fill_null(buckets.indices, -1).to_numpy()
            for code, name in [*enumerate(buckets.dictionary.to_pylist()), (-1, None)]:
                here = own[codes == code]
                if len(here):
                    yield name, rows[here], here + first
        first += batch.num_rows


def _count_rows(plan: FrozenPlan) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name, rows, _ in _own_rows(plan):
        assert name is not None, "a row has a bucket"
        counts[name] = counts.get(name, 0) + len(rows)
    return counts


def _place_problem(plan: FrozenPlan) -> str:
    """Rows of a bucket that are not 0, 1, 2, ..., or ""."""
    counts: dict[str, int] = {}
    for name, rows, _ in _own_rows(plan):
        if name is None:
            return "a row without a bucket"
        counts[name] = counts.get(name, 0) + len(rows)
    seen = {name: np.zeros(rows, bool) for name, rows in counts.items()}
    for name, rows, _ in _own_rows(plan):
        assert name is not None, "looked at above"
        if rows.max() < counts[name]:
            seen[name][rows] = True
    for name, there in seen.items():
        if not there.all():
            return f"rows of bucket {name!r} that do not follow each other"
    return ""


def parquet_file(table: pa.Table) -> memoryview:
    """A table as the bytes of a Parquet file, in a mapped temporary file; the same bytes whatever chunks it has."""

    def write(file: BinaryIO) -> None:
        with pq.ParquetWriter(file, table.schema, compression="zstd", write_statistics=True) as writer:
            for start in range(0, max(1, table.num_rows), ROW_GROUP):
                group = table.slice(start, ROW_GROUP)
                whole = [one_chunk(column) for column in group.columns]  # else pages would end where chunks do
                writer.write_table(pa.table(whole, schema=table.schema), ROW_GROUP)

    return map_written(write, "a table of the store")


def table_bytes(table: pa.Table) -> bytes:
    """A table as the bytes of a Parquet file."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_statistics=True)
    return sink.getvalue().to_pybytes()


def read_table(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a Parquet table of ours, whose hash was checked before.

    Args:
      columns: only these, with texts as dictionaries; else all.
    Raises: DamageError: it is none, has not the columns of its name, or claims more than its file can hold.
    """
    wanted = {RECORDS: RECORDS_SCHEMA, CAPTIONS: CAPTIONS_SCHEMA}[path.name]
    try:
        # Arrow's own memory, not Python's: one of its threads may let go of it when the process is ending, and to ask
        # for Python's lock then would abort a command that has just succeeded.
        with pa.OSFile(str(path)) as file:
            content = file.read_buffer()
        _check_parquet(pa.BufferReader(content), wanted, expand=columns is None)
        texts = None if columns is None else _texts(wanted)
        # In one thread, as fast for these few columns: what threads allocate stays with their heaps when it is freed.
        table = pq.ParquetFile(pa.BufferReader(content), read_dictionary=texts).read(columns=columns, use_threads=False)
        table.validate(full=True)  # offsets, and that text is UTF-8
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    _check_nulls(path, table)
    return table


def map_plan_table(path: Path) -> pa.Table:
    """Read a table of a plan, whose hash was checked before, into a mapped temporary file.

    Raises: as ``read_table``; ResourceError: the folder for temporary files is full.
    """
    wanted = {RECORDS: RECORDS_SCHEMA, CAPTIONS: CAPTIONS_SCHEMA}[path.name]
    try:
        with pa.OSFile(str(path)) as file:
            _check_parquet(file, wanted, expand=True)
            parquet = pq.ParquetFile(file)
            table = map_table(parquet.schema_arrow, _valid_batches(parquet), f"table '{path}'")
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    _check_nulls(path, table)
    return table


def _valid_batches(parquet: pq.ParquetFile) -> Iterator[pa.RecordBatch]:
    for batch in parquet.iter_batches(BATCH_ROWS, use_threads=False):
        batch.validate(full=True)  # offsets, and that text is UTF-8
        yield batch


def _unreadable(path: Path, error: Exception) -> DamageError:
    return DamageError(f"table '{path}': not a readable Parquet file of ours ({error}).")


def _check_nulls(path: Path, table: pa.Table) -> None:
    never_null = ("key", "revision", "row", "label", "status", "text", "num_tokens", "truncated")
    if nulls := [name for name in never_null if name in table.column_names and table[name].null_count]:
        raise DamageError(f"table '{path}': nulls in column '{nulls[0]}', where there are none.")


def _texts(schema: pa.Schema) -> list[str]:
    return [field.name for field in schema if field.type == pa.string()]


def _check_parquet(content: pa.NativeFile, wanted: pa.Schema, *, expand: bool) -> None:
    """Refuse a table that would fill the memory: repeated values take no space in a file.

    Args:
      expand: texts will be read as they are, not as dictionaries.

    Raises: ValueError, pa.ArrowException.
    """
    file_bytes = content.size()
    room = file_bytes + SMALL_TABLE
    file = pq.ParquetFile(content)
    if [(field.name, field.type) for field in file.schema_arrow][: len(wanted)] != [(f.name, f.type) for f in wanted]:
        raise ValueError("its columns are not those of its name")
    metadata = file.metadata
    if metadata.num_rows > MAX_ROWS_PER_BYTE * room:
        raise ValueError(f"it claims {metadata.num_rows} rows in {file_bytes} bytes")
    # Reads every value, a few at a time, and keeps none. Without it, asking a damaged footer what a column claims ends
    # the process: that pyarrow does not turn into an exception (26.0).
    if file.scan_contents() != metadata.num_rows:
        raise ValueError(f"it has not the {metadata.num_rows} rows that it claims")
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    for column in range(metadata.num_columns):
        parts = [group.column(column) for group in groups]
        values, size = sum(p.num_values for p in parts), sum(p.total_uncompressed_size for p in parts)
        if values > MAX_VALUES_PER_BYTE * room or size > MAX_TEXT_PER_BYTE * room:
            raise ValueError(f"column {column} claims {values} values of {size} bytes in {file_bytes} bytes")
    texts = _texts(wanted)
    file = pq.ParquetFile(content, read_dictionary=texts)
    for name in texts if expand else ():  # a long text that stands there once can be named in every row
        size = 0
        for batch in file.iter_batches(BATCH_ROWS, columns=[name], use_threads=False):
            column = batch.column(0)
            lengths = pc.binary_length(column.dictionary).take(column.indices)
            size += pc.sum(pc.cast(lengths, pa.int64())).as_py() or 0
        if size > MAX_TEXT_PER_BYTE * room:
            raise ValueError(f"column '{name}' would be {size} bytes, from a file of {file_bytes}")
