"""Files whose rows hold the images themselves: Parquet, and the Arrow streams that ``Dataset.save_to_disk`` writes.

Listing reads labels and captions only. Images are read a row group (of Arrow, a record batch) at a time, and the last
groups stay in memory, so files that are read in order are read once.
"""

from __future__ import annotations

import json
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from ....datasets.disk.faults import is_fault
from ....datasets.disk.spill import BATCH_ROWS
from ....errors import RecordRejected, SourceError, StoreError
from ...config import SourceSection
from ...images.faults import retried
from ..files.files import FoundFile, LocalFiles, SourceFiles
from ..files.folders import Scan
from ..files.labels import Labels
from ..files.record import CAPTION_NAMES, usable_key
from ..files.splits import ALL, choose_split, shard_names, values_of_split
from ..listing.duck import database, identifier, literal
from ..listing.listing import PLACES_SQL, SCHEMA, distinct_texts
from .columns import CAPTIONS, LABELS, USUAL, Roles, shown_columns, split_column, usual_columns
from .rows import POSITION, row_columns, typed_cell

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

PARQUET, ARROW = "parquet", "arrow"  # kinds of sources
IMAGE_NAMES = ("image", "img", "jpg", "jpeg", "png", "webp", "image_bytes", "bytes")
LABEL_NAMES = ("label", "labels", "cls", "fine_label")
STATE, SPLITS = "state.json", "dataset_dict.json"  # of save_to_disk: of a dataset, of several splits
MAX_STATE_BYTES = 1 << 24
LISTED_ROWS = 1024  # whose texts are checked at once
DICTIONARY_ROWS = 1 << 16  # read at once where texts are dictionaries: each batch carries a whole one
MAX_BATCH_BYTES = 256 << 20  # of text in LISTED_ROWS
BUFFER_BYTES = 1 << 20  # of each column of Parquet, as it is read
GROUPS_AT_ONCE = 2  # that are read at the same time
CACHE_BYTES = 256 << 20  # of groups that stay in memory
MAX_GROUP_BYTES = 1 << 30  # of the images of a group
READ_ROWS = 16  # images that are decoded from a row group of Parquet at once
OPEN_FILES = 64  # whose footers are cached
READ_ERRORS = (pa.ArrowException, OSError, ValueError, EOFError)  # what pyarrow raises for a damaged file


class ParquetRows:
    """An opened Parquet file.

    Args:
      where: its name, for messages.
      index: of the same file when it was opened before.
    Raises: SourceError: a row group is too large.
    Attributes:
      starts: (G + 1,) first row of each group, and the number of rows.
    """

    def __init__(self, file: BinaryIO, where: str, index: Any = None) -> None:
        self.index = metadata = index or pq.read_metadata(file)
        leaves = [metadata.schema.column(i) for i in range(metadata.num_columns)]
        # A repeated text takes memory once as a dictionary; pyarrow 26 cannot read lists of text this way.
        texts = [leaf.path for leaf in leaves if leaf.path in CAPTION_NAMES and leaf.physical_type == "BYTE_ARRAY"]
        file.seek(0)
        self._file = pq.ParquetFile(file, metadata=metadata, read_dictionary=texts, buffer_size=BUFFER_BYTES)
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        self.schema, self._where = self._file.schema_arrow, where
        self.starts = np.cumsum([0, *(group.num_rows for group in groups)])
        for number, group in enumerate(groups):
            if group.total_byte_size > MAX_GROUP_BYTES:
                raise SourceError(
                    f"source '{where}': row group {number} has {group.total_byte_size / 2**30:.1f} GiB; expected at "
                    f"most {MAX_GROUP_BYTES / 2**30:.0f} GiB. Rewrite it with smaller row groups."
                )

    def rows(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Some columns, LISTED_ROWS at a time. Raises: SourceError: their texts would fill the memory."""
        if twice := [name for name in names if len(self.schema.get_all_field_indices(name)) > 1]:
            raise SourceError(f"source '{self._where}': two columns are called '{twice[0]}'. Remove or rename one.")
        kinds = [self.schema.field(name).type for name in names]
        is_small = all(pa.types.is_dictionary(kind) or pa.types.is_primitive(kind) for kind in kinds)
        done = 0
        for batch in self._file.iter_batches(DICTIONARY_ROWS if is_small else LISTED_ROWS, columns=list(names)):
            batch.validate(full=True)  # indices, and that text is UTF-8
            for start in range(0, batch.num_rows, LISTED_ROWS):
                rows = batch.slice(start, LISTED_ROWS)
                for name, column in zip(names, rows.columns, strict=True):
                    if (total := _text_bytes(column)) > MAX_BATCH_BYTES:
                        raise SourceError(
                            f"source '{self._where}', after row {done}: column '{name}' has {total >> 20} MiB in "
                            f"{rows.num_rows} rows; expected at most {MAX_BATCH_BYTES >> 20} MiB. Shorten its texts."
                        )
                plain = [c.dictionary.take(c.indices) if pa.types.is_dictionary(c.type) else c for c in rows.columns]
                yield pa.RecordBatch.from_arrays(plain, names=list(names))
                done += rows.num_rows

    def images(self, group: int, column: str) -> pa.ChunkedArray:
        """Bytes of the images of a row group. Raises: SourceError: more than its footer claims."""
        chunks, total = [], 0
        for batch in self._file.iter_batches(READ_ROWS, row_groups=[group], columns=[column], use_threads=False):
            chunks.append(_image_bytes(batch.column(0)))
            total += chunks[-1].nbytes
            if total > MAX_GROUP_BYTES:
                raise SourceError(f"{self._where}, row group {group}: more than {MAX_GROUP_BYTES >> 20} MiB of images")
        return pa.chunked_array(chunks)


class ArrowRows:
    """An opened Arrow stream. It has no index, so its messages are read once to find where each batch begins."""

    def __init__(self, file: pa.NativeFile, where: str, index: Any = None) -> None:
        self._file = file
        self.index = self.schema, self._offsets, self.starts = index or self._find_batches(file, where)

    @staticmethod
    def _find_batches(file: pa.NativeFile, where: str) -> tuple[pa.Schema, list[int], np.ndarray]:
        schema, offsets, sizes = pa.ipc.read_schema(pa.ipc.read_message(file)), list[int](), [0]
        while True:
            offset = file.tell()
            try:
                message = pa.ipc.read_message(file)
            except EOFError:
                return schema, offsets, np.cumsum(sizes)
            if message.type != "record batch":
                raise SourceError(
                    f"source '{where}': its batches have dictionaries. Write the dataset as Parquet: "
                    "dataset.to_parquet(...)."
                )
            if message.body.size > MAX_GROUP_BYTES:
                raise ValueError(f"a batch of {message.body.size} bytes at byte {offset}")
            offsets.append(offset)
            sizes.append(pa.ipc.read_record_batch(message, schema).num_rows)

    def rows(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Some columns, LISTED_ROWS at a time."""
        for group in range(len(self._offsets)):
            rows = self._read(group).select(list(names))
            for start in range(0, rows.num_rows, LISTED_ROWS):
                yield rows.slice(start, LISTED_ROWS)

    def images(self, group: int, column: str) -> pa.ChunkedArray:
        """Bytes of the images of a record batch."""
        return pa.chunked_array([_image_bytes(self._read(group)[column.removesuffix(".bytes")])])

    def _read(self, group: int) -> pa.RecordBatch:
        self._file.seek(self._offsets[group])
        rows = pa.ipc.read_record_batch(pa.ipc.read_message(self._file), self.schema)
        rows.validate(full=True)
        return rows


def _text_bytes(column: pa.Array) -> int:
    if not pa.types.is_dictionary(column.type):
        return column.nbytes
    lengths = pc.cast(pc.binary_length(column.dictionary), pa.int64())
    return pc.sum(lengths.take(column.indices)).as_py() or 0


def _image_bytes(values: pa.Array) -> pa.Array:
    return values.field("bytes") if pa.types.is_struct(values.type) else values


@contextmanager
def _opened(files: SourceFiles, name: str, kind: str, index: Any = None) -> Iterator[ParquetRows | ArrowRows]:
    """Open a file of rows. Raises: SourceError: it is not a readable one, then or while it is read."""
    where = files.shown(name)
    with files.open(name, ahead=False) as file:  # a regular file, or an error
        try:
            if kind == PARQUET:
                yield ParquetRows(file, where, index)
            elif isinstance(files, LocalFiles):  # mapped: its images stay on disk until their batch is read
                with pa.memory_map(str(files.root / name)) as mapped:
                    yield ArrowRows(mapped, where, index)
            else:
                yield ArrowRows(pa.PythonFile(file, mode="r"), where, index)
        except READ_ERRORS as error:
            if is_fault(error):
                raise
            what = "Parquet file" if kind == PARQUET else "Arrow stream"
            raise SourceError(f"source '{where}': not a readable {what} ({str(error)[:200]}). Restore it.") from error


# ------------------------------------------------------------------------------------------------------- files


def holds_images(files: SourceFiles, name: str) -> bool:
    """Whether a Parquet file has a column of images, not only of paths."""
    with _opened(files, name, PARQUET) as file:
        return _image_column(file.schema, _features(file.schema)) is not None


def is_saved_dataset(files: SourceFiles) -> bool:
    """Whether ``Dataset.save_to_disk`` wrote a folder."""
    return files.only is None and files.look(STATE) is not None


def is_saved_dict(files: SourceFiles) -> bool:
    """Whether ``DatasetDict.save_to_disk`` wrote a folder, with a folder for each split."""
    return files.only is None and files.look(SPLITS) is not None


def saved_split(files: SourceFiles, split: str) -> tuple[SourceFiles, list[str]]:
    """The folder of one split of a saved ``DatasetDict``, and notes for the user.

    Args:
      split: of the recipe; "" if there may be only one.
    Raises: SourceError: several splits and none named; no split of this name; the list of splits is damaged.
    """
    names = _names(files, SPLITS, _json(files, SPLITS).get("splits"), "'splits' with names of folders")
    if split in ("", ALL) and len(names) > 1:
        raise SourceError(
            f"source '{files.name}': it holds several splits, each a dataset: {', '.join(names)[:500]}. Name the one "
            f"to store, for example with --set source.split={names[0]}."
        )
    chosen = choose_split(files.name, Counter(names), split) or names[0]
    return files.inside(chosen), [f"split '{chosen}' of {', '.join(names)[:500]}"]


def arrow_names(files: SourceFiles) -> list[str]:
    """The Arrow files of a saved dataset, in order.

    Raises: SourceError: the list is damaged, or an index selects rows of the files.
    """
    state = _json(files, STATE)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise SourceError(
            f"source '{files.name}': an index selects its rows. Save it again with "
            "dataset.flatten_indices().save_to_disk(...)."
        )
    listed = state.get("_data_files")
    listed = [file.get("filename") for file in listed if isinstance(file, dict)] if isinstance(listed, list) else []
    return _names(files, STATE, listed, "'_data_files' with names of files")


def _names(files: SourceFiles, name: str, listed: Any, expected: str) -> list[str]:
    names = listed if isinstance(listed, list) else []
    if not names or not all(isinstance(n, str) and n not in ("", ".", "..") and not {"/", "\0"} & {*n} for n in names):
        raise SourceError(f"source '{files.shown(name)}': expected {expected}. Restore it.")
    return names


def _json(files: SourceFiles, name: str) -> dict[str, Any]:
    file = files.look(name)
    state = None
    if file is None:
        raise SourceError(f"source '{files.shown(name)}': the file is missing. Save the dataset again.")
    if not file.problem and file.num_bytes <= MAX_STATE_BYTES:
        with files.open(name) as opened, suppress(ValueError, RecursionError):
            state = json.loads(opened.read(MAX_STATE_BYTES))
    if not isinstance(state, dict):
        raise SourceError(
            f"source '{files.shown(name)}': expected a JSON object of at most {MAX_STATE_BYTES >> 20} MiB. Save the "
            "dataset again."
        )
    return state


# ------------------------------------------------------------------------------------------------------- columns


def find_columns(
    schema: pa.Schema, where: str, settings: SourceSection, companions: Sequence[str] = ()
) -> tuple[Roles, list[str] | None]:
    """Find the columns of a file: by the settings, by the features that Hugging Face writes, or by usual names.

    Args:
      companions: columns of companion images.
    Returns: columns by role, one of images each, as "image.bytes"; and names of classes, or None.
    Raises: SourceError: a column has no images, or one that the settings name is missing.
    """
    for asked in (settings.image, settings.caption, settings.label, *companions):
        if asked and asked not in schema.names:
            raise SourceError(f"source '{where}': it has no column '{asked}'. {shown_columns(schema.names)}")
    features = _features(schema)
    images = [_image_column(schema, features, asked) for asked in (settings.image, *companions)]
    if None in images:
        raise SourceError(
            f"source '{where}': no column of images. Expected 'image' as a struct with 'bytes', or as binary. "
            f"{shown_columns(schema.names)}"
        )
    image, *beside = filter(None, images)
    label = _label_column(schema, features, settings)
    captions = [settings.caption] if settings.caption else usual_columns(schema.names, CAPTIONS)[:1]
    classes = features.get(label, {}).get("names")
    if not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
        classes = None
    used = {image.removesuffix(".bytes"), *captions, label, *companions}
    texts = [name for name in schema.names if name not in used and _is_text(schema.field(name).type)]
    labels = (label,) if label else ()
    return Roles((image,), tuple(captions), labels, (), tuple(beside), split_column(texts)), classes


def _label_column(schema: pa.Schema, features: dict[str, dict[str, Any]], settings: SourceSection) -> str:
    """The column of labels; empty without one, or if labels are not read."""
    if settings.labels == "none":
        return ""
    if settings.label:
        return settings.label
    named = [name for name, feature in features.items() if feature.get("_type") == "ClassLabel"]
    usual = [name for name in (*LABEL_NAMES, *USUAL[LABELS]) if name in schema.names]
    may_be_labels = [name for name in usual if _is_label(schema.field(name).type)]
    return next((name for name in [*named, *may_be_labels] if name in schema.names), "")


def _is_label(kind: pa.DataType) -> bool:
    """Whether a column may hold class indices or names of classes."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    return is_number or pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


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


# ------------------------------------------------------------------------------------------------------- records


def embedded_batches(files: SourceFiles, scan: Scan) -> Iterator[pa.RecordBatch]:
    """A record for each row; its key is the file's name without extension and the number of the row, from 0.

    Raises: SourceError: a file is damaged, has no column of images, or other classes than the first.
    """
    kind, settings = scan.settings.kind, scan.settings
    names = shard_names(files, ".parquet", settings.split) if kind == PARQUET else arrow_names(files)
    texts_column = SCHEMA.get_field_index("captions")
    values = _values_of_split(files, names, scan)
    with database(f"source '{files.name}'") as connection:
        for name in names:
            with _opened(files, name, kind) as file:
                where = files.shown(name)
                roles, classes = find_columns(file.schema, where, settings, list(scan.companions.values()))
                if name == names[0]:
                    image = roles.images[0].removesuffix(".bytes")
                    captions = f"'{roles.captions[0]}'" if roles.captions else "none"
                    labels = f"'{roles.labels[0]}'" if roles.labels else "none"
                    scan.notes.append(f"columns: images '{image}', captions {captions}, labels {labels}")
                    scan.classes = classes
                elif classes != scan.classes:
                    raise SourceError(
                        f"source '{where}': its classes differ from the first file's. Write all files with the same "
                        "classes, or leave labels out with --set source.labels=none."
                    )
                query = _records_query(files.look(name) or FoundFile(name), file.schema, roles)
                split = [roles.split] if roles.split and values is not None else []
                for rows in _numbered(file, [*roles.labels, *roles.captions, *split]):
                    connection.register("rows", rows)
                    (records,) = connection.sql(query).to_arrow_table().combine_chunks().to_batches()
                    batch = _with_labels(records, scan.labels)  # of all splits, so that each has the same labels
                    if values is not None:
                        splits = rows[roles.split] if roles.split else pa.nulls(rows.num_rows, pa.string())
                        is_in_split = pc.is_in(_split_texts(splits), pa.array(values, pa.string()))
                        batch = batch.filter(is_in_split.combine_chunks())
                    is_usable = batch["reason"].is_null().to_numpy(zero_copy_only=False)
                    texts = distinct_texts(batch["captions"], is_usable)
                    yield batch.set_column(texts_column, SCHEMA.field(texts_column), texts)


def _values_of_split(files: SourceFiles, names: Sequence[str], scan: Scan) -> list[str] | None:
    """Values of the column of splits that are those of the requested split; None for all rows.

    If the first file has no such column, the others are not looked at.
    """
    values: Counter[str] = Counter()
    for name in names:
        with _opened(files, name, scan.settings.kind) as file:
            roles, _ = find_columns(file.schema, files.shown(name), scan.settings, list(scan.companions.values()))
            if not roles.split:
                if name == names[0]:
                    return None
                values[""] += int(file.starts[-1])
                continue
            for rows in file.rows([roles.split]):
                counted = pc.value_counts(_split_texts(pa.chunked_array([rows[roles.split]])))
                values.update({pair["values"].as_py(): pair["counts"].as_py() for pair in counted})
    return values_of_split(files.name, values, scan)


def _split_texts(splits: pa.ChunkedArray | pa.Array) -> pa.ChunkedArray:
    """A column of splits as text, empty where it has none."""
    column = splits if isinstance(splits, pa.ChunkedArray) else pa.chunked_array([splits])
    return pc.fill_null(pc.cast(column, pa.string()), "")


def _with_labels(rows: pa.RecordBatch, labels: Labels) -> pa.RecordBatch:
    """Records of SCHEMA of rows that have their labels as text; names become numbers once all are known."""
    texts = rows["label"].to_pylist()
    is_number = rows["label_is_number"].to_pylist()
    problems = rows["label_problem"].to_pylist()
    columns = {name: rows[name] for name in SCHEMA.names if name != "label"}
    numbers = np.full(len(texts), -1, np.int32)
    for row, text in enumerate(texts):
        if text is not None:
            numbers[row] = labels.read_index(int(text)) if is_number[row] else labels.read_name(text)
    has_problem = rows["label_problem"].is_valid().to_numpy(zero_copy_only=False)
    if has_problem.any() and not labels.is_required:
        labels.read_unusable(next(filter(None, problems)), int(has_problem.sum()))
    elif has_problem.any():
        columns["reason"] = pc.if_else(rows["label_problem"].is_valid(), "bad_metadata", rows["reason"])
        columns["detail"] = pc.coalesce(rows["label_problem"], rows["detail"])
    numbers[columns["reason"].is_valid().to_numpy(zero_copy_only=False)] = -1
    return pa.RecordBatch.from_pydict(columns | {"label": pa.array(numbers)}, SCHEMA)


def _numbered(file: ParquetRows | ArrowRows, names: list[str]) -> Iterator[pa.Table]:
    """Some columns of a file in parts, and POSITION; without any, nothing of the file has to be read."""
    total = int(file.starts[-1])
    empty = (pa.table({"nothing": pa.nulls(min(BATCH_ROWS, total - i))}) for i in range(0, total, BATCH_ROWS))
    start = 0
    for rows in file.rows(names) if names else empty:
        positions = pa.array(np.arange(start, start + rows.num_rows))
        start += rows.num_rows
        yield pa.table([positions, *rows.columns], [POSITION.strip('"'), *rows.schema.names])


def _records_query(place: FoundFile, schema: pa.Schema, roles: Roles) -> str:
    """SQL that makes records of the listing of ``rows``: some columns of a file, and POSITION."""
    key, unusable = usable_key(place.path.rpartition(".")[0])
    cells = [
        f"{typed_cell(identifier(name), _duck_type(schema.field(name).type))} AS {identifier(name)}"
        for name in (*roles.labels, *roles.captions)
    ]
    columns = row_columns(replace(roles, images=(), companions=(), split=""))
    companion = f"row({literal(place.path)}, position, 0, {place.mtime_ns})"
    places = f"[{', '.join([companion] * len(roles.companions))}]"
    return f"""SELECT {literal(key)} || '/' || position AS key, {literal(place.path)} AS path, position AS "offset",
        0 AS num_bytes, {place.mtime_ns}::BIGINT AS mtime_ns,
        label, label_is_number, label_problem, captions,
        CASE WHEN detail IS NOT NULL THEN 'bad_metadata' END AS reason, detail, 0 AS height_px, 0 AS width_px,
        {places}::{PLACES_SQL} AS companions
        FROM (SELECT *, {literal(unusable[1]) if unusable else "problem"} AS detail
        FROM (SELECT {columns} FROM (SELECT {", ".join([POSITION, *cells])} FROM rows))) ORDER BY position"""


def _duck_type(kind: pa.DataType) -> str:
    """What ``typed_cell`` has to know of a type."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return "BLOB" if _is_bytes(kind) else "DOUBLE" if pa.types.is_floating(kind) else ""


# ------------------------------------------------------------------------------------------------------- images


class EmbeddedImages:
    """Images of Parquet files or Arrow streams by row, from any thread.

    Args:
      files: of the source.
      settings: its kind is "parquet" or "arrow"; may name the column of images.
      companions: column of each companion image, by name.
    """

    def __init__(self, files: SourceFiles, settings: SourceSection, companions: Mapping[str, str]) -> None:
        self.files, self.settings, self._lock = files, settings, threading.Lock()
        self._companions, self._readers = companions, threading.BoundedSemaphore(GROUPS_AT_ONCE)
        self._groups: OrderedDict[tuple[str, int, str], Future[pa.ChunkedArray]] = OrderedDict()
        self._file = lru_cache(OPEN_FILES)(self._describe)

    def read(self, path: str, row: int, stage: str, companion: str = "") -> bytes:
        """Bytes of an image of a row: the record's own, or a companion.

        Raises: RecordRejected: the file is missing or damaged, has fewer rows, or the row has no image.
          SourceError: the URL cannot be reached. ResourceError: a fault, as for ``retried``.
        """
        return retried(lambda: self._try(path, row, stage, companion), path)

    def _try(self, path: str, row: int, stage: str, companion: str) -> bytes:
        """Read an image once; raises OSError or MemoryError at a fault."""
        try:
            starts, columns, index = self._file(path)
            if not 0 <= row < starts[-1]:
                raise RecordRejected(stage, "source_changed", f"{path} has {starts[-1]} rows; row {row} was planned")
            group = int(np.searchsorted(starts, row, "right")) - 1
            data = self._group(path, group, columns[companion], index)[row - int(starts[group])].as_py()
        except SourceError as error:
            if isinstance(error.__cause__, StoreError):  # of the network or credentials, not of the file
                raise
            raise RecordRejected(stage, "unreadable", str(error)) from error
        except (*READ_ERRORS, IndexError) as error:
            if is_fault(error):
                raise
            raise RecordRejected(stage, "unreadable", f"{path}, row {row}: {error}") from error
        if data is None:
            raise RecordRejected(stage, "unreadable", f"{path}, row {row} has no bytes of an image")
        return data

    def _describe(self, path: str) -> tuple[np.ndarray, dict[str, str], Any]:
        """First row of each group and the number of rows, the columns of images, and the index of a file."""
        with _opened(self.files, path, self.settings.kind) as file:
            roles, _ = find_columns(file.schema, path, self.settings, list(self._companions.values()))
            columns = dict(zip(["", *self._companions], [*roles.images, *roles.companions], strict=True))
            return file.starts, columns, file.index

    def _group(self, path: str, group: int, column: str, index: Any) -> pa.ChunkedArray:
        """Images of a group; waits if another thread is reading it.

        An error must not stay in memory, because its frames hold what was read. So no frame of it may hold the future
        that holds the error.
        """
        with self._lock:
            future = self._groups.get((path, group, column))
            must_read = future is None
            if future is None:
                future = self._groups[path, group, column] = Future()
            self._groups.move_to_end((path, group, column))
        if not must_read:
            try:
                return future.result()
            finally:
                del future
        try:
            # A group may take a GiB, for each thread.
            with self._readers, _opened(self.files, path, self.settings.kind, index) as file:
                future.set_result(file.images(group, column))
        except BaseException as error:
            with self._lock:
                del self._groups[path, group, column]
            future.set_exception(error)
            del future
            raise
        with self._lock:
            sizes = {key: future.result().nbytes for key, future in self._groups.items() if future.done()}
            for key in list(sizes)[:-1]:  # the last one stays, however large
                if sum(sizes.values()) <= CACHE_BYTES:
                    break
                del self._groups[key], sizes[key]
        return future.result()
