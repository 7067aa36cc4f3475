"""Datasets that Hugging Face's ``save_to_disk`` wrote: a folder of Arrow streams, and JSON that lists them.

A stream has no index, so its messages are read once to find the offset and the number of rows of each batch. A local
file is mapped: its pictures stay on disk until their batch is read.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from ....datasets.errors import SourceError
from ...config import SourceSection
from ...images.faults import is_fault
from ..files.files import LocalFiles, SourceFiles, open_source_files, shown
from ..files.folders import Scan
from ..files.splits import ALL, choose_split
from ..listing.duck import database
from .parquet import MAX_GROUP_BYTES, OPEN_FILES, RowBytes, RowRecords, find_columns

STATE, SPLITS = "state.json", "dataset_dict.json"
MAX_STATE_BYTES = 1 << 24
READ_ROWS = 1024  # whose texts are checked at once
ARROW_ERRORS = (pa.ArrowException, OSError, ValueError, EOFError)


class Batch(NamedTuple):
    """A record batch of an Arrow stream: where its message begins in the file, and its number of rows."""

    offset: int
    num_rows: int


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

    Raises: SourceError: the list is damaged, or an index selects rows of the files.
    """
    state = _json(files, STATE)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise SourceError(
            f"source '{files.name}': an index selects its rows. Save it again with "
            "dataset.flatten_indices().save_to_disk(...)."
        )
    listed = state.get("_data_files")
    names = [file.get("filename") for file in listed if isinstance(file, dict)] if isinstance(listed, list) else []
    if not names or not all(isinstance(name, str) and _is_name(name) for name in names):
        raise SourceError(f"source '{shown(files, STATE)}': needed '_data_files' with names of files. Restore it.")
    return [str(name) for name in names]


def arrow_batches(files: SourceFiles, scan: Scan) -> Iterator[pa.RecordBatch]:
    """A record for each row; its key is the file's name without extension and the number of the row, from 0.

    Raises: SourceError: a file is damaged, has no column of images, or other classes than the first.
    """
    with database(f"source '{files.name}'") as connection:
        listed = RowRecords(scan, connection)
        for name in arrow_names(files):
            with _opened(files, name) as file:
                schema, batches = _find_batches(file, shown(files, name))
                listed.begin(files, name, schema)
                for batch in batches:
                    if not listed.columns:
                        yield from listed.plain(batch.num_rows)
                        continue
                    rows = _read_batch(file, batch, schema).select(listed.columns)
                    for start in range(0, rows.num_rows, READ_ROWS):
                        yield listed.batch(rows.slice(start, READ_ROWS))


class ArrowRowBytes(RowBytes):
    """Pictures of Arrow streams by row; a batch takes the place of Parquet's row group."""

    def __init__(self, files: SourceFiles, settings: SourceSection) -> None:
        super().__init__(files, settings)
        self._batches = functools.lru_cache(OPEN_FILES)(self._find_batches)

    def starts(self, path: str) -> tuple[np.ndarray, str]:
        schema, batches = self._batches(path)
        image = find_columns(schema, path, self.settings).image
        return np.cumsum([0, *(batch.num_rows for batch in batches)]), image

    def pictures(self, path: str, group: int, column: str) -> pa.ChunkedArray:
        schema, batches = self._batches(path)
        with _opened(self.files, path) as file:
            values = _read_batch(file, batches[group], schema)[column.removesuffix(".bytes")]
        return pa.chunked_array([values.field("bytes") if pa.types.is_struct(values.type) else values])

    def _find_batches(self, path: str) -> tuple[pa.Schema, list[Batch]]:
        with _opened(self.files, path) as file:
            return _find_batches(file, path)


@contextmanager
def _opened(files: SourceFiles, name: str) -> Iterator[pa.NativeFile]:
    """Open an Arrow stream; a local file is mapped. Raises: SourceError: it is not a readable Arrow stream."""
    where = shown(files, name)
    try:
        with files.open(name, ahead=False) as file:  # a regular file, or an error
            if isinstance(files, LocalFiles):
                with pa.memory_map(str(files.root / name)) as mapped:
                    yield mapped
            else:
                yield pa.PythonFile(file, mode="r")
    except ARROW_ERRORS as error:
        if is_fault(error):
            raise
        raise SourceError(f"source '{where}': not a readable Arrow stream ({str(error)[:200]}). Restore it.") from error


def _find_batches(file: pa.NativeFile, where: str) -> tuple[pa.Schema, list[Batch]]:
    """Schema and batches of a stream.

    Raises: SourceError: it has dictionaries, or a batch is too large.
    """
    schema, batches = pa.ipc.read_schema(pa.ipc.read_message(file)), []
    while True:
        offset = file.tell()
        try:
            message = pa.ipc.read_message(file)
        except EOFError:
            return schema, batches
        if message.type != "record batch":
            raise SourceError(
                f"source '{where}': its batches have dictionaries. Write the dataset as Parquet: "
                "dataset.to_parquet(...)."
            )
        if message.body.size > MAX_GROUP_BYTES:
            raise ValueError(f"a batch of {message.body.size} bytes at byte {offset}")
        batches.append(Batch(offset, pa.ipc.read_record_batch(message, schema).num_rows))


def _read_batch(file: pa.NativeFile, batch: Batch, schema: pa.Schema) -> pa.RecordBatch:
    file.seek(batch.offset)
    rows = pa.ipc.read_record_batch(pa.ipc.read_message(file), schema)
    rows.validate(full=True)
    return rows


def _is_name(name: str) -> bool:
    return bool(name) and "/" not in name and "\0" not in name and name not in (".", "..")


def _json(files: SourceFiles, name: str) -> dict[str, Any]:
    file_found = files.look(name)
    if file_found is None or file_found.problem or file_found.num_bytes > MAX_STATE_BYTES:
        raise SourceError(f"source '{shown(files, name)}': missing, too large, or not a file. Save the dataset again.")
    try:
        with files.open(name) as file:
            state = json.loads(file.read(MAX_STATE_BYTES))
    except (ValueError, RecursionError) as error:
        raise SourceError(f"source '{shown(files, name)}': not JSON ({error}). Save the dataset again.") from error
    if not isinstance(state, dict):
        raise SourceError(f"source '{shown(files, name)}': not a JSON object. Save the dataset again.")
    return state
