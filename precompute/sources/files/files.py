"""The files of a source: a local folder, or one at a URL of any fsspec file system. Listed in order, read in ranges.

Both implement ``SourceFiles``. Only the names of one folder at a time are in memory, and only regular files are read:
others may never end.
"""

from __future__ import annotations

import io
import itertools
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, cast

import pyarrow as pa
import xxhash

from ....datasets.errors import RecordRejected, SourceError, StoreError
from ....datasets.remote.reader import RemoteReader
from ...images.decoder_child import read_bytes
from .ignored import is_system_folder
from .record import SourceRecord, usable_key

READ_AHEAD_BYTES = 4 << 20  # of a file at a URL that is read from its beginning to its end
NAMES_AT_ONCE = 1 << 16  # of a folder, as Python objects
LeftOut = Callable[[str], None]  # called with the name of a skipped folder
VERSION_KEYS = ("ETag", "etag", "md5Hash", "blob_id", "LastModified", "last_modified", "updated", "mtime", "created")


class FoundFile(NamedTuple):
    """A file of a source: path within it, size, modification time, and why it cannot be used."""

    path: str
    num_bytes: int = 0
    mtime_ns: int = 0
    problem: tuple[str, str] | None = None

    def record(
        self,
        *,
        key: str | None = None,
        label: int = -1,
        captions: tuple[str, ...] = (),
        problem: tuple[str, str] | None = None,
        size: tuple[int, int] = (0, 0),
    ) -> SourceRecord:
        """The record of a picture in this file.

        Args:
          key: default its path.
          problem: of the record, if the file has none.
          size: height and width in pixels, if the source has them.
        """
        name, unusable = usable_key(key or self.path)
        if unusable:
            return SourceRecord(name, name, problem=unusable)
        problem = self.problem or problem
        return SourceRecord(name, self.path, 0, self.num_bytes, self.mtime_ns, label, captions, problem, *size)


class SourceFiles(Protocol):
    """Access to the files of a source.

    Attributes:
      name: path or URL, for messages.
      only: name of the file if the source is one file, or None for a folder.
    """

    name: str
    only: str | None

    def names(self) -> Iterator[str]:
        """Names of the files directly in the source, unordered, without hidden ones."""
        ...

    def folders(self) -> Iterator[str]:
        """Names of the folders directly in the source, in order, without hidden and system folders."""
        ...

    def walk(self, *, files_first: bool = False, left_out: LeftOut = lambda _: None) -> Iterator[FoundFile]:
        """All files, depth first, sorted by name within each folder, without hidden ones.

        Args:
          files_first: files of a folder before its subfolders.
          left_out: called with the name of each hidden or system folder; at a URL only system folders.
        """
        ...

    def look(self, path: str) -> FoundFile | None:
        """One file; None if it does not exist."""
        ...

    def open(self, path: str, *, ahead: bool = True) -> BinaryIO:
        """Open one file for random reads.

        Args:
          ahead: it is read sequentially, so read-ahead pays.
        Raises: SourceError: it cannot be read.
        """
        ...

    def read(self, path: str, offset: int, num_bytes: int, stage: str) -> bytes:
        """Read the bytes of one picture.

        Raises: RecordRejected: unreadable, or changed since the listing.
        """
        ...


def open_source_files(source: Path | str) -> SourceFiles:
    """The files of a source: a folder, or a single file in its folder.

    Raises: SourceError: it does not exist; RecipeError: no file system for the URL.
    """
    return RemoteFiles(str(source)) if "://" in str(source) else LocalFiles(Path(source))


def shown(files: SourceFiles, path: str) -> str:
    """Name of a file of a source, for messages."""
    return files.name if files.only == path else f"{files.name}/{path}"


def _unreadable(source: str, folder: str, error: OSError) -> SourceError:
    return SourceError(
        f"source '{source}': folder '{folder}' cannot be read ({error.strerror}). Allow it, or move it away."
    )


class LocalFiles:
    """A local folder or file; see ``SourceFiles``. Links to folders are followed, each folder once."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        if not path.exists():
            raise SourceError(f"source '{path}': there is no such file or folder. Check --source.")
        self.only = None if path.is_dir() else path.name
        self.root = path if path.is_dir() else path.parent
        self._root = str(self.root)

    def names(self) -> Iterator[str]:
        try:
            with os.scandir(self.root) as found:
                yield from (entry.name for entry in found if not entry.name.startswith(".") and entry.is_file())
        except OSError as error:
            raise _unreadable(self.name, self.root.name, error) from error

    def folders(self) -> Iterator[str]:
        entries = self._entries("", {_identity(self.root)}, False, lambda _: None)
        return (entry for entry in entries if isinstance(entry, str))

    def walk(self, *, files_first: bool = False, left_out: LeftOut = lambda _: None) -> Iterator[FoundFile]:
        seen = {_identity(self.root)}
        return _depth_first(lambda folder: self._entries(folder, seen, files_first, left_out))

    def _entries(
        self, folder: str, seen: set[tuple[int, int]], files_first: bool, left_out: LeftOut
    ) -> Iterator[FoundFile | str]:
        try:
            with os.scandir(self.root / folder) as found:
                entries = sorted_entries(_people_made(((e.name, e.is_dir()) for e in found), left_out))
        except OSError as error:
            raise _unreadable(self.name, folder, error) from error
        # All are marked before one is entered: a folder with two links belongs to the higher one.
        new = {name for name, is_folder in entries if is_folder and self._is_new(f"{folder}/{name}", seen)}
        for name, is_folder in _ordered(entries, files_first):
            path = f"{folder}/{name}" if folder else name
            if not is_folder:
                yield self._found(path)
            elif name in new:
                yield path

    def _is_new(self, folder: str, seen: set[tuple[int, int]]) -> bool:
        identity = _identity(self.root / folder.lstrip("/"))
        is_new = identity not in seen
        seen.add(identity)
        return is_new

    def look(self, path: str) -> FoundFile | None:
        try:
            return self._described(path, os.stat(f"{self._root}/{path}"))  # Path is slower than the stat
        except (OSError, ValueError):  # missing, or a name that is too long or holds a NUL
            return None

    def _found(self, path: str) -> FoundFile:
        try:
            return self._described(path, os.stat(f"{self._root}/{path}"))
        except OSError as error:
            return FoundFile(path, problem=("unreadable", f"{error.strerror}: {path}"))

    def _described(self, path: str, found: os.stat_result) -> FoundFile:
        if not stat.S_ISREG(found.st_mode):  # a FIFO or a device may never end
            return FoundFile(path, problem=("unreadable", f"not a regular file: {path}"))
        return FoundFile(path, found.st_size, found.st_mtime_ns)

    def open(self, path: str, *, ahead: bool = True) -> BinaryIO:
        try:
            # Without O_NONBLOCK, opening a FIFO waits for a writer.
            descriptor = os.open(self.root / path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise SourceError(f"source '{self.root / path}': it cannot be read ({error.strerror}).") from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise SourceError(f"source '{self.root / path}': not a regular file. Remove it from the source.")
        return open(descriptor, "rb")

    def read(self, path: str, offset: int, num_bytes: int, stage: str) -> bytes:
        return read_bytes(str(self.root / path), offset, num_bytes, stage)


class RemoteFiles:
    """A folder or object at a URL; see ``SourceFiles``. Failed requests are retried."""

    def __init__(self, url: str) -> None:
        self._reader = RemoteReader(url, what="source")
        self.name, self.only = self._reader.url, None
        if self._ask_size("") is not None:
            parent, _, self.only = url.rstrip("/").rpartition("/")
            self._reader = RemoteReader(parent, what="source")

    def names(self) -> Iterator[str]:
        for name, info in self._list("").items():
            if info["type"] == "file":
                yield name

    def folders(self) -> Iterator[str]:
        return (entry for entry in self._entries("", False, lambda _: None) if isinstance(entry, str))

    def walk(self, *, files_first: bool = False, left_out: LeftOut = lambda _: None) -> Iterator[FoundFile]:
        return _depth_first(lambda folder: self._entries(folder, files_first, left_out))

    def _entries(self, folder: str, files_first: bool, left_out: LeftOut) -> Iterator[FoundFile | str]:
        listed = self._list(folder)
        named = ((name, info["type"] == "directory") for name, info in listed.items())
        entries = sorted_entries(_people_made(named, left_out))
        for name, is_folder in _ordered(entries, files_first):
            path = f"{folder}/{name}" if folder else name
            yield path if is_folder else _remote_file(path, listed[name])

    def look(self, path: str) -> FoundFile | None:
        try:
            found = self._reader.info(path)
        except StoreError as error:
            raise SourceError(str(error)) from error
        return _remote_file(path, found) if found and found["type"] == "file" else None

    def open(self, path: str, *, ahead: bool = True) -> BinaryIO:
        size = self._ask_size(path)
        if size is None:
            raise SourceError(f"source '{self.name}': there is no '{path}'.")
        raw = _RangedFile(self._reader, path, size)
        return cast(BinaryIO, io.BufferedReader(raw, READ_AHEAD_BYTES if ahead else 1 << 16))

    def read(self, path: str, offset: int, num_bytes: int, stage: str) -> bytes:
        more = 1 if offset == 0 else 0  # detects an object that grew; in a tar no picture is at offset 0
        try:
            data = self._reader.read(path, offset, offset + num_bytes + more)
        except FileNotFoundError as error:
            raise RecordRejected(stage, "unreadable", f"there is no such object any more: {path}") from error
        except StoreError as error:  # of the network or credentials, not of the picture
            raise SourceError(str(error)) from error
        if len(data) != num_bytes:
            detail = f"{path} has other bytes than when it was listed: {len(data)} of {num_bytes}"
            raise RecordRejected(stage, "source_changed", detail)
        return data

    def _list(self, folder: str) -> dict[str, dict[str, Any]]:
        try:
            return self._reader.entries(folder)
        except StoreError as error:
            raise SourceError(str(error)) from error

    def _ask_size(self, path: str) -> int | None:
        found = self.look(path)
        return found.num_bytes if found else None


class _RangedFile(io.RawIOBase):
    """An object at a URL as a file read in ranges."""

    def __init__(self, reader: RemoteReader, path: str, size: int) -> None:
        self._reader, self._path, self._size, self._position = reader, path, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        end = min(self._position + len(buffer), self._size)
        if end <= self._position:
            return 0
        try:
            data = self._reader.read(self._path, self._position, end)
        except (FileNotFoundError, StoreError) as error:
            raise SourceError(f"source '{self._reader.url}': '{self._path}' cannot be read ({error}).") from error
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


class _ArrowEntries:
    """Entries of a huge folder, outside of Python objects."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __iter__(self) -> Iterator[tuple[str, bool]]:
        for batch in self._table.to_batches(NAMES_AT_ONCE):
            for name, is_folder in zip(batch["name"].to_pylist(), batch["folder"].to_pylist(), strict=True):
                yield os.fsdecode(name), is_folder


Entries = list[tuple[str, bool]] | _ArrowEntries
"""Names of a folder, and whether each is a folder."""


def _people_made(entries: Iterable[tuple[str, bool]], left_out: LeftOut) -> Iterator[tuple[str, bool]]:
    """Entries of a folder without hidden ones and system folders."""
    for name, is_folder in entries:
        if is_folder and is_system_folder(name):
            left_out(name)
        elif not name.startswith("."):
            yield name, is_folder


def sorted_entries(found: Iterable[tuple[str, bool]]) -> Entries:
    """Entries of a folder, sorted by the bytes of their names, which for UTF-8 is character order."""
    found = iter(found)
    some = list(itertools.islice(found, NAMES_AT_ONCE))
    if len(some) < NAMES_AT_ONCE:
        return sorted(some, key=lambda entry: os.fsencode(entry[0]))
    tables = []
    while some:
        names = pa.array([os.fsencode(name) for name, _ in some], pa.binary())
        tables.append(pa.table({"name": names, "folder": [is_folder for _, is_folder in some]}))
        some = list(itertools.islice(found, NAMES_AT_ONCE))
    return _ArrowEntries(pa.concat_tables(tables).sort_by("name"))


def _ordered(entries: Entries, files_first: bool) -> Iterator[tuple[str, bool]]:
    if not files_first:
        return iter(entries)
    files = ((name, False) for name, is_folder in entries if not is_folder)
    return itertools.chain(files, ((name, True) for name, is_folder in entries if is_folder))


def _depth_first(entries_of: Callable[[str], Iterator[FoundFile | str]]) -> Iterator[FoundFile]:
    """All files, given a function that yields the files of a folder and, as text, its subfolders."""
    entered = [entries_of("")]
    while entered:
        entry = next(entered[-1], None)
        if entry is None:
            entered.pop()
        elif isinstance(entry, str):
            entered.append(entries_of(entry))
        else:
            yield entry


def _identity(folder: Path) -> tuple[int, int]:
    try:
        found = os.stat(folder)
    except OSError as error:
        raise SourceError(f"source: folder '{folder}' cannot be read ({error.strerror}).") from error
    return found.st_dev, found.st_ino


def _remote_file(path: str, info: Mapping[str, Any]) -> FoundFile:
    """An object at a URL; a hash of its ETag or time stands for its modification time."""
    said = next((str(info[key]) for key in VERSION_KEYS if info.get(key) is not None), "")
    return FoundFile(path, int(info["size"] or 0), xxhash.xxh3_64_intdigest(said.encode()) >> 1)
