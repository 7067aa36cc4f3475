"""The files of a source at a URL of any fsspec file system, read in ranges."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, cast

import xxhash

from ....datasets.errors import RecordRejected, SourceError, StoreError
from ....datasets.remote.reader import RemoteReader
from .entries import FoundFile, LeftOut, depth_first, ordered, people_made, sorted_entries

READ_AHEAD_BYTES = 4 << 20  # of a file at a URL that is read from its beginning to its end
VERSION_KEYS = ("ETag", "etag", "md5Hash", "blob_id", "LastModified", "last_modified", "updated", "mtime", "created")


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
        return depth_first(lambda folder: self._entries(folder, files_first, left_out))

    def _entries(self, folder: str, files_first: bool, left_out: LeftOut) -> Iterator[FoundFile | str]:
        listed = self._list(folder)
        named = ((name, info["type"] == "directory") for name, info in listed.items())
        entries = sorted_entries(people_made(named, left_out))
        for name, is_folder in ordered(entries, files_first):
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
        file = self.look(path)
        return file.num_bytes if file else None


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


def _remote_file(path: str, info: Mapping[str, Any]) -> FoundFile:
    """An object at a URL; a hash of its ETag or time stands for its modification time."""
    version = next((str(info[key]) for key in VERSION_KEYS if info.get(key) is not None), "")
    return FoundFile(path, int(info["size"] or 0), xxhash.xxh3_64_intdigest(version.encode()) >> 1)
