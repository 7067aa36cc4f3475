"""What ``save_to_disk`` of Hugging Face Datasets writes: a folder of Arrow streams, and JSON that lists them.

A stream has no index, so the heads of its messages are walked once: each says how long its body is. Pictures stay
where they are until their batch is read.
"""

from __future__ import annotations

import functools
import json
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ....datasets.errors import SourceError
from ...config import SourceSection
from ..files.entries import FoundFile
from ..files.files import LocalFiles, SourceFiles, open_source_files, shown
from ..files.folders import Scan
from ..files.splits import ALL, choose_split
from .columns import CAPTIONS
from .parquet import MAX_GROUP_BYTES, OPEN_FILES, Columns, RowBytes, find_columns, row_record

STATE, SPLITS = "state.json", "dataset_dict.json"
MAX_STATE_BYTES = 1 << 24
MAX_HEAD_BYTES = 1 << 24  # of one message, without its body
CONTINUATION = 0xFFFFFFFF
SCHEMA_MESSAGE, BATCH_MESSAGE = 1, 3
ARROW_ERRORS = (pa.ArrowException, OSError, ValueError, struct.error, IndexError)


@dataclass(frozen=True)
class Message:
    """One message of an Arrow stream.

    Args:
      kind: SCHEMA_MESSAGE, BATCH_MESSAGE or another.
      offset, num_bytes: where it lies in the file, with its body.
      num_rows: of a batch.
      is_compressed: the body is; reading it may take any memory.
    """

    kind: int
    offset: int
    num_bytes: int
    num_rows: int
    is_compressed: bool


def is_saved_dataset(files: SourceFiles) -> bool:
    """A folder was written by ``Dataset.save_to_disk``."""
    return files.only is None and files.look(STATE) is not None


def is_saved_dict(files: SourceFiles) -> bool:
    """A folder was written by ``DatasetDict.save_to_disk``: each split lies in a folder of its own."""
    return files.only is None and files.look(SPLITS) is not None


def saved_split(files: SourceFiles, split: str) -> tuple[SourceFiles, list[str]]:
    """The folder of one split of a saved ``DatasetDict``, and what was chosen, for a person.

    Args:
      split: of the recipe; "" where there may be only one.
    Raises: SourceError: there are several splits and none is named; none of this name; the file of names is damaged.
    """
    splits = _json(files, SPLITS).get("splits")
    names = [name for name in splits if isinstance(name, str)] if isinstance(splits, list) else []
    if not names or not all(map(_is_name, names)):
        raise SourceError(f"source '{shown(files, SPLITS)}': needed 'splits' with names of folders. Restore it.")
    if split in ("", ALL) and len(names) > 1:
        raise SourceError(
            f"source '{files.name}': it holds several splits, each a dataset: {', '.join(names)[:500]}. Name the one "
            f"to store, as --set source.split={names[0]}."
        )
    chosen = choose_split(files.name, Counter(names), split) or names[0]
    return open_source_files(f"{files.name.rstrip('/')}/{chosen}"), [f"split '{chosen}' of {', '.join(names)[:500]}"]


def arrow_names(files: SourceFiles) -> list[str]:
    """The Arrow files of a saved dataset, in order.

    Raises: SourceError: the file that lists them is damaged, or rows were chosen from the files by an index.
    """
    state = _json(files, STATE)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise SourceError(
            f"source '{files.name}': its rows are chosen by an index beside them. Save it again with "
            "dataset.flatten_indices().save_to_disk(...)."
        )
    listed = state.get("_data_files")
    names = [one.get("filename") for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    if not names or not all(isinstance(name, str) and _is_name(name) for name in names):
        raise SourceError(f"source '{shown(files, STATE)}': needed '_data_files' with names of files. Restore it.")
    return [str(name) for name in names]


def arrow_records(files: SourceFiles, scan: Scan) -> Iterator[Any]:
    """A record for each row; its key is the file's name without extension, and the number of the row from 0.

    Raises: SourceError: a file is damaged, has no column of pictures, or has other classes than the first.
    """
    for number, name in enumerate(arrow_names(files)):
        place, position = files.look(name) or FoundFile(name), 0
        where = shown(files, name)
        with _opened(files, name) as file:
            schema, messages = _messages(file, where)
            columns = find_columns(schema, where, scan.settings)
            columns.tell(scan, where, is_first=not number)
            for message in messages:
                for row in _described(_batch(file, message, schema), columns):
                    yield row_record(f"{name.rpartition('.')[0]}/{position}", place, position, row)
                    position += 1


class ArrowRowBytes(RowBytes):
    """Pictures of Arrow streams by row; a batch is what a row group is in Parquet."""

    def __init__(self, files: SourceFiles, settings: SourceSection) -> None:
        super().__init__(files, settings)
        self._heads = functools.lru_cache(OPEN_FILES)(self._read_heads)

    def starts(self, path: str) -> tuple[np.ndarray, str]:
        schema, messages = self._heads(path)
        image = find_columns(schema, path, self.settings).image
        return np.cumsum([0, *(message.num_rows for message in messages)]), image

    def pictures(self, path: str, group: int, column: str) -> pa.ChunkedArray:
        schema, messages = self._heads(path)
        with _opened(self.files, path) as file:
            values = _batch(file, messages[group], schema)[column.removesuffix(".bytes")]
        return pa.chunked_array([values.field("bytes") if pa.types.is_struct(values.type) else values])

    def _read_heads(self, path: str) -> tuple[pa.Schema, list[Message]]:
        with _opened(self.files, path) as file:
            return _messages(file, path)


def _described(batch: pa.RecordBatch, columns: Columns) -> Iterator[dict[str, Any]]:
    """Label and captions of each row, under the names that a record's row has."""
    for start in range(0, batch.num_rows, 1024):
        part = batch.slice(start, 1024)
        labels = part[columns.label].to_pylist() if columns.label else [None] * part.num_rows
        texts = part[columns.captions].to_pylist() if columns.captions else [None] * part.num_rows
        for label, text in zip(labels, texts, strict=True):
            yield {CAPTIONS: text} | ({} if label is None else {"label": label})


@contextmanager
def _opened(files: SourceFiles, name: str) -> Iterator[pa.NativeFile]:
    """Open an Arrow stream, mapped where it is a file here. Raises: SourceError: it is none."""
    where = shown(files, name)
    try:
        with files.open(name, ahead=False) as file:  # a regular file, or an error
            if isinstance(files, LocalFiles):
                with pa.memory_map(str(files.root / name)) as mapped:
                    yield mapped
            else:
                yield pa.PythonFile(file, mode="r")
    except ARROW_ERRORS as error:
        raise SourceError(f"source '{where}': not a readable Arrow stream ({str(error)[:200]}). Restore it.") from error


def _messages(file: pa.NativeFile, where: str) -> tuple[pa.Schema, list[Message]]:
    """Schema and batches of a stream, from the heads of its messages.

    Raises: SourceError: the batches are of a kind that is not read.
    """
    size, position, schema, batches = file.size(), 0, None, []
    while position + 8 <= size:
        file.seek(position)
        mark, length = struct.unpack("<Ii", file.read(8))
        if mark != CONTINUATION or not 0 <= length <= MAX_HEAD_BYTES:
            raise ValueError(f"no message at byte {position}")
        if not length:
            break
        message = _message(file.read(length), position)
        position += message.num_bytes
        if position > size or not 0 <= message.num_bytes <= MAX_GROUP_BYTES:
            raise ValueError(f"a message of {message.num_bytes} bytes at byte {message.offset}")
        if schema is None:
            if message.kind != SCHEMA_MESSAGE:
                raise ValueError("it does not begin with a schema")
            file.seek(0)
            schema = pa.ipc.read_schema(pa.ipc.read_message(file.read_buffer(message.num_bytes)))
        elif message.kind != BATCH_MESSAGE or message.is_compressed:
            raise SourceError(
                f"source '{where}': its batches are compressed, or have dictionaries. Write the dataset as Parquet: "
                "dataset.to_parquet(...)."
            )
        else:
            batches.append(message)
    if schema is None:
        raise ValueError("it is empty")
    return schema, batches


def _batch(file: pa.NativeFile, message: Message, schema: pa.Schema) -> pa.RecordBatch:
    file.seek(message.offset)
    buffer = file.read_buffer(message.num_bytes)
    batch = pa.ipc.read_record_batch(pa.ipc.read_message(buffer), schema)
    batch.validate(full=True)
    return batch


def _message(head: bytes, offset: int) -> Message:
    """Read the head of a message (a FlatBuffer of Message.fbs of the Arrow format)."""
    (root,) = struct.unpack_from("<I", head)
    kind = _field(head, root, 1, "<B") or 0
    body = _field(head, root, 3, "<q") or 0
    rows, is_compressed = 0, False
    if kind == BATCH_MESSAGE:
        table = _reference(head, root, 2)
        rows, is_compressed = _field(head, table, 0, "<q") or 0, _field(head, table, 3, "<I") is not None
    if body < 0 or rows < 0:
        raise ValueError("a negative size")
    return Message(kind, offset, 8 + len(head) + body, rows, is_compressed)


def _field(buffer: bytes, table: int, index: int, kind: str) -> int | None:
    """A number of a table of a FlatBuffer; None where it is left out."""
    place = _place(buffer, table, index)
    return None if place is None else struct.unpack_from(kind, buffer, place)[0]


def _reference(buffer: bytes, table: int, index: int) -> int:
    """Where the table lies that a field refers to."""
    place = _place(buffer, table, index)
    if place is None:
        raise ValueError("a message without content")
    return place + struct.unpack_from("<I", buffer, place)[0]


def _place(buffer: bytes, table: int, index: int) -> int | None:
    vtable = table - struct.unpack_from("<i", buffer, table)[0]
    if vtable < 0:
        raise ValueError("a table outside of its message")
    (size,) = struct.unpack_from("<H", buffer, vtable)
    if 4 + 2 * index + 2 > size:
        return None
    (offset,) = struct.unpack_from("<H", buffer, vtable + 4 + 2 * index)
    return table + offset if offset else None


def _is_name(name: str) -> bool:
    return bool(name) and "/" not in name and "\0" not in name and name not in (".", "..")


def _json(files: SourceFiles, name: str) -> dict[str, Any]:
    found = files.look(name)
    if found is None or found.problem or found.num_bytes > MAX_STATE_BYTES:
        raise SourceError(
            f"source '{shown(files, name)}': it is missing, too long, or no file. Save the dataset again."
        )
    try:
        with files.open(name) as file:
            said = json.loads(file.read(MAX_STATE_BYTES))
    except (ValueError, RecursionError) as error:
        raise SourceError(f"source '{shown(files, name)}': not JSON ({error}). Save the dataset again.") from error
    if not isinstance(said, dict):
        raise SourceError(f"source '{shown(files, name)}': not a JSON object. Save the dataset again.")
    return said
