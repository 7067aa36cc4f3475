"""Where raw pictures and captions come from: folders, tables, tars and Parquet files, here or at a URL.

A source is listed, never unpacked: each record says where its bytes lie, so that any of them can be read at random,
later, from any thread. Keys are names only; no path is ever made from one. What a source of others can claim is bounded
before it is believed (``docs/security.md``). The kinds stand in ``docs/sources.md``, each in a module ``source_*.py``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ..datasets.errors import RecordRejected, SourceError
from .decoder import PicturePlace
from .source_files import LocalFiles, SourceFiles, open_source_files
from .source_folders import Found, has_sidecars, image_folder, sidecar_folder
from .source_listing import Listing, record_batches, spool
from .source_parquet import RowBytes, holds_pictures, parquet_names, parquet_records
from .source_record import IMAGE_EXTENSIONS, SourceRecord
from .source_tables import METADATA, PIXART_TABLE, find_table, pixart_folder, table_batches
from .source_tars import imagenet, is_imagenet, tar_names, webdataset

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

MAX_SENT_BYTES = 256 << 20  # of a picture that this process reads for a decoder
# What the listing's hash is of.
LISTED = ["key", "path", "offset", "num_bytes", "mtime_ns", "label", "captions", "height_px", "width_px"]
NAMED = ("imagefolder", "imagenet")  # kinds whose classes always have names
RECORDS: dict[str, Callable[[SourceFiles, Found], Iterator[SourceRecord]]] = {
    "imagefolder": image_folder,
    "sidecars": sidecar_folder,
    "webdataset": webdataset,
    "imagenet": imagenet,
    "parquet": parquet_records,
}


@dataclass(frozen=True)
class OpenedSource:
    """A source whose pictures are read by their places, as a plan names them; it needs no listing.

    Args:
      kind: "imagefolder", "sidecars", "metadata", "manifest", "webdataset", "imagenet" or "parquet".
      files: through which the records' paths are read.
    """

    kind: str
    files: SourceFiles
    _rows: RowBytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_rows", RowBytes(self.files))

    @property
    def name(self) -> str:
        """Path or URL, for messages."""
        return self.files.name

    @property
    def is_read_by_decoders(self) -> bool:
        """A decoder reads the pictures itself; else this process reads their bytes and sends them."""
        return self.kind != "parquet" and isinstance(self.files, LocalFiles)

    def place(self, path: str, offset: int, num_bytes: int, *, stage: str) -> PicturePlace:
        """Where a decoder finds the bytes of a picture: it reads a file here itself, all else is read for it.

        Raises: RecordRejected: gone, or not as it was listed; SourceError: the URL cannot be reached.
        """
        if self.is_read_by_decoders and isinstance(self.files, LocalFiles):
            return PicturePlace(self.files.root / path, offset, num_bytes)
        data = self.read(path, offset, num_bytes, stage=stage)
        return PicturePlace(Path(path), 0, len(data), data)

    def read(self, path: str, offset: int, num_bytes: int, *, stage: str) -> bytes:
        """Read the bytes of a picture.

        Raises: as ``place``.
        """
        if num_bytes > MAX_SENT_BYTES:
            raise RecordRejected(stage, "too_large", f"{num_bytes} bytes, at most {MAX_SENT_BYTES >> 20} MiB are read")
        if self.kind == "parquet":
            data = self._rows.read(path, offset, stage)
            if len(data) > MAX_SENT_BYTES:
                raise RecordRejected(stage, "too_large", f"{len(data)} bytes, at most {MAX_SENT_BYTES >> 20} MiB")
            return data
        return self.files.read(path, offset, num_bytes, stage)


@dataclass(frozen=True)
class Source(OpenedSource):
    """A listed source.

    Args:
      records: all that it has, in order.
      classes: names of the classes in order of their index, or None.
      num_ignored: files that are no pictures by their extension.
    """

    records: Listing = field(repr=False)
    classes: list[str] | None
    num_ignored: int

    @property
    def has_class_names(self) -> bool:
        """Labels are places in a list of names, which may move; else a label is its own name."""
        names = self.classes or []
        return self.kind in NAMED or (self.kind == "parquet" and names != [str(i) for i in range(len(names))])

    def listing_hash(self) -> str:
        """Hash of what was listed: changes when a file is added, gone, or written anew."""
        digest = hashlib.sha256()
        for batch in self.records.batches():
            for name in LISTED:
                for buffer in _hashed(batch[name]):
                    digest.update(buffer)
        return digest.hexdigest()


def _hashed(column: pa.Array) -> Iterator[memoryview]:
    """What the values of a column without nulls are, whatever the column was cut from: lengths, and bytes."""
    if pa.types.is_list(column.type):
        yield memoryview(pc.list_value_length(column).to_numpy())
        column = column.flatten()
    if pa.types.is_string(column.type):
        yield memoryview(pc.binary_length(column).to_numpy())
        _, offsets, letters = column.buffers()
        first, last = np.frombuffer(offsets, np.int32)[[column.offset, column.offset + len(column)]]
        yield memoryview(letters)[first:last] if letters else memoryview(b"")
    else:
        yield memoryview(column.to_numpy())


def open_source(path: Path | str, kind: str = "auto") -> OpenedSource:
    """Open a source without listing it.

    Args:
      path: a folder, one tar, one Parquet file or one manifest; or the URL of one.
      kind: of ``OpenedSource``, or "auto" to look.
    Raises: SourceError: it is missing; RecipeError: no file system for the URL.
    """
    files = open_source_files(path)
    if kind != "imagefolder" and (folder := pixart_folder(str(path))) != str(path):
        above = open_source_files(folder)
        files = above if above.look(PIXART_TABLE) else files
    return OpenedSource(_guess_kind(files) if kind == "auto" else kind, files)


def list_source(path: Path | str, kind: str = "auto", *, progress: Callable[[int], None] = lambda _: None) -> Source:
    """List a source.

    Args:
      path, kind: as for ``open_source``.
      progress: called with the number of records so far.
    Raises: SourceError: it is missing, empty, or not of this kind; RecipeError: no file system for the URL.
    """
    opened, found = open_source(path, kind), Found()
    files, kind = opened.files, opened.kind
    if files.only and kind in ("imagefolder", "sidecars", "metadata"):
        raise SourceError(f"source '{files.name}': a file; needed a folder for source.kind \"{kind}\".")
    records = spool(_readable(files, _batches(files, kind, found)), progress)
    if not records:
        raise SourceError(
            f"source '{files.name}': no pictures found as {kind}. Needed: class folders of pictures, *.tar shards, "
            f"*.parquet, or a {METADATA} with 'file_name'; known extensions are {', '.join(sorted(IMAGE_EXTENSIONS))}."
        )
    classes = found.classes
    if classes is None and kind not in NAMED:
        classes = [str(i) for i in range(records.largest_label() + 1)] or None
    return Source(kind, files, records, classes, found.num_ignored)


def _readable(files: SourceFiles, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    try:
        yield from batches
    except OSError as error:
        raise SourceError(
            f"source '{files.name}': it cannot be read ({error}). Look at the disk or the mount."
        ) from error


def _batches(files: SourceFiles, kind: str, found: Found) -> Iterator[pa.RecordBatch]:
    if kind in RECORDS:
        return record_batches(RECORDS[kind](files, found))
    table = METADATA if kind == "metadata" else find_table(files)
    if table is None or files.look(table) is None:
        needed = f"'{METADATA}'" if kind == "metadata" else "manifest (*.jsonl, *.parquet or data_info.json)"
        raise SourceError(f"source '{files.name}': there is no {needed}, which source.kind \"{kind}\" needs.")
    return table_batches(files, table)


def _guess_kind(files: SourceFiles) -> str:
    table = find_table(files)
    if table == METADATA and not files.only:
        return "metadata"
    if table and not (table.endswith(".parquet") and holds_pictures(files, table)):
        return "manifest"
    tars = [] if table else tar_names(files)
    parquet = [] if table or files.only else parquet_names(files)
    # Beside tars a table of another kind may lie, as img2dataset writes one of what it has fetched.
    if table or (parquet and (not tars or holds_pictures(files, parquet[0]))):
        return "parquet"
    if tars:
        return "imagenet" if is_imagenet(files, tars) else "webdataset"
    return "sidecars" if has_sidecars(files) else "imagefolder"
