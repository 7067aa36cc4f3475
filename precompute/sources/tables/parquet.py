"""Parquet in Hugging Face's layout: columns for the bytes of a picture, its label and captions.

Listing reads labels and captions only. Pictures are read a row group at a time, and the last row groups stay in memory,
so files that are read in order are read once.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from ....datasets.disk.spill import BATCH_ROWS
from ....datasets.errors import RecordRejected, SourceError, StoreError
from ...config import SourceSection
from ...images.faults import is_fault, retried
from ..files.entries import FoundFile
from ..files.files import SourceFiles, shown
from ..files.folders import Scan
from ..files.record import CAPTION_NAMES, MAX_CLASSES, usable_key
from ..files.splits import shards_of_split
from ..listing.duck import database, identifier
from ..listing.listing import SCHEMA, distinct_texts
from .columns import CAPTIONS, Roles, shown_columns, usual_columns
from .foreign_parquet import PARQUET_ERRORS, open_parquet, read_rows
from .values import parquet_values, row_columns

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

IMAGE_NAMES = ("image", "img", "jpg", "jpeg", "png", "webp", "image_bytes", "bytes")
LABEL_NAMES = ("label", "labels", "cls", "fine_label")
GROUPS_AT_ONCE = 2  # row groups that are read at the same time
CACHE_BYTES = 256 << 20  # of row groups that stay in memory
MAX_GROUP_BYTES = 1 << 30  # of the pictures of a row group
READ_ROWS = 16  # pictures that are decoded from a row group at once
OPEN_FILES = 64  # whose footers are cached


@dataclass(frozen=True)
class Columns:
    """The columns of a Parquet file, by role.

    Args:
      image: path of the column of bytes, as "image.bytes".
      label, captions: names of columns, or None.
      classes: names of the classes, if the file has them.
    """

    image: str
    label: str | None
    captions: str | None
    classes: list[str] | None

    def described(self) -> str:
        """The columns in words."""
        captions, labels = (f"'{name}'" if name else "none" for name in (self.captions, self.label))
        return f"images '{self.image.removesuffix('.bytes')}', captions {captions}, labels {labels}"

    def tell(self, scan: Scan, where: str, *, is_first: bool) -> None:
        """Record the columns and classes of the first file; later ones must have the same classes.

        Raises: SourceError: the classes differ, so labels would mean other classes.
        """
        if is_first:
            scan.notes.append(f"columns: {self.described()}")
            scan.classes = self.classes
        elif self.classes != scan.classes and scan.settings.labels != "none":
            raise SourceError(
                f"source '{where}': it names other classes than the first file. Write all files with the same classes, "
                "or leave labels out with --set source.labels=none."
            )


def parquet_names(files: SourceFiles, split: str) -> list[str]:
    """The Parquet files of a source, in order; of one split, as in ``source.split``.

    Raises: SourceError: several splits and none named.
    """
    if files.only:
        return [files.only]
    return shards_of_split(files.name, (name for name in files.names() if fnmatchcase(name, "*.parquet")), split)


def holds_pictures(files: SourceFiles, name: str) -> bool:
    """Whether a Parquet file has a column of pictures, not only of paths."""
    with _opened(files, name) as file:
        return _image_column(file.schema_arrow, _features(file.schema_arrow)) is not None


def parquet_batches(files: SourceFiles, scan: Scan) -> Iterator[pa.RecordBatch]:
    """A record for each row; its key is the file's name without extension and the number of the row, from 0.

    Raises: SourceError: a file is damaged, has no column of images, or other classes than the first.
    """
    with database(f"source '{files.name}'") as connection:
        listed = RowRecords(scan, connection)
        for name in parquet_names(files, scan.settings.split):
            with _opened(files, name) as file:
                _check_groups(file, shown(files, name))
                listed.begin(files, name, file.schema_arrow)
                if not listed.columns:
                    yield from listed.plain(file.metadata.num_rows)
                else:
                    yield from map(listed.batch, read_rows(file, listed.columns, f"source '{shown(files, name)}'"))


class RowRecords:
    """Makes the records of files that hold their images, from the columns of labels and captions.

    Args:
      scan: receives notes and names of classes.
      connection: to an empty database.
    """

    def __init__(self, scan: Scan, connection: duckdb.DuckDBPyConnection) -> None:
        self._scan, self._connection, self._is_first, self.columns = scan, connection, True, list[str]()

    def begin(self, files: SourceFiles, name: str, schema: pa.Schema) -> None:
        """Begin the next file.

        Raises: SourceError: a column is missing, or its classes differ from those of the first file.
        """
        where, settings = shown(files, name), self._scan.settings
        chosen = find_columns(schema, where, settings)
        for column in self._scan.companions.values():
            find_columns(schema, where, settings.model_copy(update={"image": column}))
        chosen.tell(self._scan, where, is_first=self._is_first)
        self._is_first, self._file, self._stem = False, files.look(name) or FoundFile(name), name.rpartition(".")[0]
        self._position = 0
        self.columns = [column for column in (chosen.label, chosen.captions) if column]
        self._roles = Roles((), tuple(filter(None, [chosen.captions])), tuple(filter(None, [chosen.label])), (), ())

    def plain(self, num_rows: int) -> Iterator[pa.RecordBatch]:
        """Records without label and captions."""
        while num_rows > 0:
            count = min(num_rows, BATCH_ROWS)
            empty = pa.ListArray.from_arrays(pa.array(np.zeros(count + 1, np.int32)), pa.array([], pa.string()))
            nothing = pa.nulls(count, pa.string())
            yield self._records(pa.array(np.full(count, -1, np.int32)), empty, nothing)
            num_rows -= count

    def batch(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Records of the next rows, which have the columns ``columns``."""
        self._connection.register("batch", pa.Table.from_batches([rows]))
        described = self._connection.execute("DESCRIBE batch").fetchall()
        values = parquet_values({identifier(name): kind for name, kind, *_ in described}, has_class_names=False)
        query = f"""SELECT {row_columns(self._roles, values, "position")}
            FROM (SELECT row_number() OVER () AS position, * FROM batch) ORDER BY position"""
        (checked,) = self._connection.sql(query).to_arrow_table().combine_chunks().to_batches()
        problems, labels = checked["problem"], pc.fill_null(checked["label"].cast(pa.int64()), -1)
        is_class = pc.and_(pc.greater_equal(labels, -1), pc.less(labels, MAX_CLASSES))
        wrong = [f"label {label} is not a class index below {MAX_CLASSES}" for label in labels.to_pylist()]
        problems = pc.if_else(pc.or_(is_class, problems.is_valid()), problems, pa.array(wrong))
        return self._records(
            pc.if_else(problems.is_null(), labels, -1).cast(pa.int32()),
            distinct_texts(checked["captions"], problems.is_null().to_numpy(zero_copy_only=False)),
            problems,
        )

    def _records(self, labels: pa.Array, captions: pa.Array, problems: pa.Array) -> pa.RecordBatch:
        count, beside, file = len(labels), len(self._scan.companions), self._file
        positions = np.arange(self._position, self._position + count)
        self._position += count
        places = np.stack([positions, np.zeros(count, np.int64), np.full(count, file.mtime_ns)], axis=1)
        starts = np.arange(count + 1, dtype=np.int32) * beside
        reason = pa.scalar("bad_metadata", pa.string())
        key, unusable = usable_key(self._stem)
        if unusable:
            problems = pa.array([unusable[1]] * count)
        columns = {
            "key": pc.binary_join_element_wise(key, pa.array(positions).cast(pa.string()), "/"),
            "path": pa.array([file.path] * count),
            "offset": positions,
            "num_bytes": np.zeros(count, np.int64),
            "mtime_ns": np.full(count, file.mtime_ns),
            "label": labels,
            "captions": captions,
            "reason": pc.if_else(problems.is_valid(), reason, None),
            "detail": problems,
            "height_px": np.zeros(count, np.int32),
            "width_px": np.zeros(count, np.int32),
            "picture_paths": pa.ListArray.from_arrays(
                pa.array(starts), pa.array([file.path] * count * beside, pa.string())
            ),
            "picture_places": pa.ListArray.from_arrays(
                pa.array(3 * starts), pa.array(np.repeat(places, beside, axis=0).ravel())
            ),
        }
        return pa.RecordBatch.from_pydict(columns, SCHEMA)


def find_columns(schema: pa.Schema, where: str, settings: SourceSection) -> Columns:
    """Find the columns of a file: by the settings, by the features that Hugging Face writes, or by usual names.

    Raises: SourceError: no column has pictures, or one that the settings name is missing.
    """
    for asked in (settings.image, settings.caption, settings.label):
        if asked and asked not in schema.names:
            raise SourceError(f"source '{where}': it has no column '{asked}'. {shown_columns(schema.names)}")
    features = _features(schema)
    image = _image_column(schema, features, settings.image)
    if image is None:
        raise SourceError(
            f"source '{where}': no column of pictures. Needed 'image' as a struct with 'bytes', or as binary. "
            f"{shown_columns(schema.names)}"
        )
    named = [name for name, feature in features.items() if feature.get("_type") == "ClassLabel"]
    whole = [name for name in LABEL_NAMES if name in schema.names and pa.types.is_integer(schema.field(name).type)]
    label = settings.label or next((name for name in [*named, *whole] if name in schema.names), None)
    captions = settings.caption or next(iter(usual_columns(schema.names, CAPTIONS)), None)
    classes = features.get(label or "", {}).get("names")
    if not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
        classes = None
    return Columns(image, label, captions, classes)


def _features(schema: pa.Schema) -> dict[str, dict[str, Any]]:
    try:
        metadata = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = metadata["info"]["features"]
        return {name: feature for name, feature in features.items() if isinstance(feature, dict)}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}  # another program wrote it


def _image_column(schema: pa.Schema, features: dict[str, dict[str, Any]], asked: str = "") -> str | None:
    named = [name for name, feature in features.items() if feature.get("_type") == "Image"]
    for name in [asked] if asked else [*named, *IMAGE_NAMES]:
        kind = schema.field(name).type if schema.names.count(name) == 1 else None
        if kind is not None and pa.types.is_struct(kind):
            inner = kind.get_field_index("bytes")
            if inner >= 0 and _is_bytes(kind.field(inner).type):
                return f"{name}.bytes"
        elif kind is not None and _is_bytes(kind):
            return name
    return None


def _is_bytes(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _check_groups(file: pq.ParquetFile, where: str) -> None:
    for group in range(file.metadata.num_row_groups):
        size = file.metadata.row_group(group).total_byte_size
        if size > MAX_GROUP_BYTES:
            raise SourceError(
                f"source '{where}': row group {group} has {size / 2**30:.1f} GiB; needed at most "
                f"{MAX_GROUP_BYTES / 2**30:.0f} GiB. Write it again with smaller row groups."
            )


class RowBytes:
    """Pictures of Parquet files by row, from any thread.

    Args:
      files: of the source.
      settings: may name the column of pictures.
    """

    def __init__(self, files: SourceFiles, settings: SourceSection) -> None:
        self.files, self.settings, self._lock = files, settings, threading.Lock()
        self._readers = threading.BoundedSemaphore(GROUPS_AT_ONCE)
        self._starts: OrderedDict[str, tuple[np.ndarray, str]] = OrderedDict()
        self._groups: OrderedDict[tuple[str, int], Future[pa.ChunkedArray]] = OrderedDict()

    def read(self, path: str, row: int, stage: str) -> bytes:
        """Bytes of the picture of a row.

        Raises: RecordRejected: the file is missing or damaged, has fewer rows, or the row has no picture.
          SourceError: the URL cannot be reached. ResourceError: a fault, as of ``retried``.
        """
        return retried(lambda: self._try(path, row, stage), path)

    def _try(self, path: str, row: int, stage: str) -> bytes:
        """As ``read``; raises OSError or MemoryError at a fault."""
        try:
            starts, column = self._known_starts(path)
            if not 0 <= row < starts[-1]:
                raise RecordRejected(stage, "source_changed", f"{path} has {starts[-1]} rows, the row was {row}")
            group = int(np.searchsorted(starts, row, "right")) - 1
            value = self._group(path, group, column)[row - int(starts[group])]
        except SourceError as error:
            if isinstance(error.__cause__, StoreError):  # of the network or credentials, not of the file
                raise
            raise RecordRejected(stage, "unreadable", str(error)) from error
        except (*PARQUET_ERRORS, IndexError) as error:
            if is_fault(error):
                raise
            raise RecordRejected(stage, "unreadable", f"{path}, row {row}: {error}") from error
        data = value.as_py()
        if data is None:
            raise RecordRejected(stage, "unreadable", f"{path}, row {row} has no bytes of a picture")
        return data

    def starts(self, path: str) -> tuple[np.ndarray, str]:
        """First row of each row group and the number of rows, and the column of pictures."""
        with _opened(self.files, path) as file:
            sizes = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
            return np.cumsum([0, *sizes]), find_columns(file.schema_arrow, path, self.settings).image

    def pictures(self, path: str, group: int, column: str) -> pa.ChunkedArray:
        """Bytes of the pictures of a row group."""
        return _read_group(self.files, path, group, column)

    def _known_starts(self, path: str) -> tuple[np.ndarray, str]:
        with self._lock:
            if path in self._starts:
                return self._starts[path]
        starts = self.starts(path)
        with self._lock:
            self._starts[path] = starts
            while len(self._starts) > OPEN_FILES:
                self._starts.popitem(last=False)
        return starts

    def _group(self, path: str, group: int, column: str) -> pa.ChunkedArray:
        """Pictures of a row group; waits if another thread is reading it."""
        with self._lock:
            future = self._groups.get((path, group))
            must_read = future is None
            if future is None:
                future = self._groups[path, group] = Future()
            self._groups.move_to_end((path, group))
        if not must_read:
            return future.result()
        try:
            with self._readers:  # a group may take a GiB, for each thread
                future.set_result(self.pictures(path, group, column))
        except BaseException as error:
            with self._lock:
                del self._groups[path, group]
            future.set_exception(error)
            raise
        with self._lock:
            self._forget_oldest()
        return future.result()

    def _forget_oldest(self) -> None:
        sizes = {key: future.result().nbytes for key, future in self._groups.items() if future.done()}
        for key in list(sizes)[:-1]:  # the last one stays, however large
            if sum(sizes.values()) <= CACHE_BYTES:
                return
            del self._groups[key], sizes[key]


def _read_group(files: SourceFiles, path: str, group: int, column: str) -> pa.ChunkedArray:
    chunks, total = [], 0
    with _opened(files, path) as file:
        for batch in file.iter_batches(READ_ROWS, row_groups=[group], columns=[column], use_threads=False):
            values = batch.column(0)
            values = values.field("bytes") if pa.types.is_struct(values.type) else values
            total += values.nbytes
            if total > MAX_GROUP_BYTES:  # more than its footer claims
                raise SourceError(f"{path}, row group {group}: more than {MAX_GROUP_BYTES >> 20} MiB of pictures")
            chunks.append(values)
    return pa.chunked_array(chunks)


@contextmanager
def _opened(files: SourceFiles, name: str) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file. Raises: SourceError: it is not a readable one, then or while it is read."""
    with files.open(name, ahead=False) as file:
        try:
            yield open_parquet(file, CAPTION_NAMES)
        except PARQUET_ERRORS as error:
            if is_fault(error):
                raise
            raise SourceError(
                f"source '{shown(files, name)}': not a readable Parquet file ({error}). Restore it."
            ) from error
