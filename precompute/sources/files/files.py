"""The files of a source: a local folder, or one at a URL of any fsspec file system. Listed in order, read in ranges.

Only the names of one folder at a time are in memory, and only regular files are read: others may never end.
"""

from __future__ import annotations

import errno
import glob
import io
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast
from urllib.parse import urlsplit

import xxhash
from braceexpand import braceexpand

from ....datasets.remote.reader import RemoteReader
from ....errors import RecordRejected, SourceError, StoreError
from ...images.decoder_child import read_bytes
from ...images.faults import open_regular, retried
from .ignored import is_system_folder
from .record import SourceRecord, usable_key

T = TypeVar("T")

STATS_AT_ONCE = 4096  # files of a folder
MAX_FILES = 1_000_000  # of one pattern
WILD = "*?["
READ_AHEAD_BYTES = 4 << 20  # of a file at a URL that is read from its beginning to its end
VERSION_KEYS = ("ETag", "etag", "md5Hash", "blob_id", "LastModified", "last_modified", "updated", "mtime", "created")
LOOK_UP_THREADS, LOOK_UPS_AT_ONCE = 64, 64

LeftOut = Callable[[str], None]
"""Called with the name of a skipped folder or file."""


class FoundFile(NamedTuple):
    """A file of a source: path within it, size, modification time, and why it cannot be used."""

    path: str
    num_bytes: int = 0
    mtime_ns: int = 0
    problem: tuple[str, str] | None = None

    def record(
        self, *, label: int = -1, captions: tuple[str, ...] = (), problem: tuple[str, str] | None = None
    ) -> SourceRecord:
        """The record of an image in this file; its key is the path, ``problem`` counts if the file has none."""
        name, unusable = usable_key(self.path)
        if unusable:
            return SourceRecord(name, name, problem=unusable)
        return SourceRecord(name, self.path, 0, self.num_bytes, self.mtime_ns, label, captions, self.problem or problem)


class SourceFiles:
    """The files of a source; a subclass lists, describes, opens and reads them.

    Attributes:
      name: path or URL, for messages.
      only: name of the file if the source is one file, or None for a folder.
      chosen: names of the files that a pattern selects, or None.
    """

    name: str
    only: str | None = None
    chosen: frozenset[str] | None = None

    def names(self) -> Iterator[str]:
        """Names of the files directly in the source, unordered, without hidden ones."""
        if self.chosen is not None:
            return iter(sorted(self.chosen))
        listed = self._list("").items()
        return (name for name, info in listed if not name.startswith(".") and not self._is_folder(info))

    def folders(self) -> Iterator[str]:
        """Names of the folders directly in the source, in order, without hidden and system folders."""
        if self.chosen is not None:
            return iter(())
        entries = self._entries("", self._above(), False, lambda _: None)
        return (entry for entry in entries if isinstance(entry, str))

    def names_in(self, folder: str) -> list[str]:
        """Names of the files directly in a folder, unordered, without hidden ones; none if it does not exist."""
        if self.chosen is not None:
            return sorted(self.chosen) if not folder else []
        listed = self._list(folder).items() if self._has_folder(folder) else ()
        return [name for name, info in listed if not name.startswith(".") and not self._is_folder(info)]

    def folders_in(self, folder: str) -> list[str]:
        """Names of the folders directly in a folder, unordered, without hidden ones; none if it does not exist."""
        if self.chosen is not None:
            return []
        listed = self._list(folder).items() if self._has_folder(folder) else ()
        return [name for name, info in listed if self._is_folder(info) and not is_system_folder(name)]

    def walk(
        self, *, files_first: bool = False, left_out: LeftOut = lambda _: None, hidden: LeftOut = lambda _: None
    ) -> Iterator[FoundFile]:
        """All files, depth first, sorted by name within each folder, without hidden ones.

        Args:
          files_first: files of a folder before its subfolders.
          left_out: called with the name of each hidden or system folder, and of each link to a folder that is listed
            elsewhere; at a URL only with system folders.
          hidden: called with the name of each hidden file; at a URL with none.
        """
        if self.chosen is not None:
            for name in sorted(self.chosen):
                yield self.look(name) or FoundFile(name, problem=("unreadable", f"the file no longer exists: {name}"))
            return
        seen = self._above()
        entered = [self._entries("", seen, files_first, left_out, hidden)]
        while entered:
            entry = next(entered[-1], None)
            if entry is None:
                entered.pop()
            elif isinstance(entry, str):
                entered.append(self._entries(entry, seen, files_first, left_out, hidden))
            else:
                yield entry

    def inside(self, folder: str) -> SourceFiles:
        """The files of a folder of the source."""
        return open_source_files(f"{self.name.rstrip('/')}/{folder}")

    def shown(self, path: str) -> str:
        """Name of a file, for messages."""
        return self.name if self.only == path else f"{self.name}/{path}"

    def _entries(
        self,
        folder: str,
        seen: set[Any],
        files_first: bool,
        left_out: LeftOut,
        hidden: LeftOut = lambda _: None,
    ) -> Iterator[FoundFile | str]:
        """The files of a folder, and as text its subfolders, in order."""
        listed = self._list(folder)
        prefix = f"{folder}/" if folder else ""
        folders: set[str] = set()
        names: list[str] = []
        for name, info in listed.items():
            if self._is_folder(info):
                folders.add(name)
            if name in folders and is_system_folder(name):
                left_out(name)
            elif name.startswith("."):
                hidden(name)
            else:
                names.append(name)
        names.sort(key=os.fsencode)  # for UTF-8 the order of characters
        # All are marked before one is entered: a folder with two links belongs to the higher one.
        new = {name for name in names if name in folders and self._is_new(prefix + name, seen)}
        if files_first:
            names.sort(key=folders.__contains__)
        for start in range(0, len(names), STATS_AT_ONCE):
            batch = names[start : start + STATS_AT_ONCE]
            described = iter(self._describe(prefix, [name for name in batch if name not in folders], listed))
            for name in batch:
                if name not in folders:
                    yield next(described)
                elif name in new:
                    yield prefix + name
                else:
                    left_out(name)

    def look(self, path: str) -> FoundFile | None:
        """One file; None if it does not exist."""
        return None if self.chosen is not None and path not in self.chosen else self._look(path)

    def open(self, path: str, *, ahead: bool = True) -> BinaryIO:
        """Open one file for random reads.

        Args:
          ahead: it is read sequentially, so read-ahead pays.
        Raises: SourceError: it cannot be read. ResourceError: a fault, as for ``retried``.
        """
        raise NotImplementedError

    def read(self, path: str, offset: int, num_bytes: int, stage: str, *, at_most: int | None = None) -> bytes:
        """Read the bytes of one image, or at most so many from its beginning.

        Raises: RecordRejected: unreadable, or changed since the listing. ResourceError: as ``open``.
        """
        raise NotImplementedError

    def _list(self, folder: str) -> Mapping[str, Any]:
        """What is known of each entry of a folder, by name."""
        raise NotImplementedError

    def _is_folder(self, info: Any) -> bool:
        raise NotImplementedError

    def _has_folder(self, folder: str) -> bool:
        """Whether a folder exists, where listing one that does not is an error."""
        return True

    def _describe(self, prefix: str, names: Sequence[str], listed: Mapping[str, Any]) -> Sequence[FoundFile]:
        raise NotImplementedError

    def _look(self, path: str) -> FoundFile | None:
        raise NotImplementedError

    def _above(self) -> set[Any]:
        """Identities of the folders in which a walk is, from its beginning."""
        return set()

    def _is_new(self, folder: str, seen: set[Any]) -> bool:
        """Mark a folder as seen; False if it was."""
        return True


class LocalFiles(SourceFiles):
    """A local folder or file. Links to folders are followed, each folder once.

    A link to a folder that holds the source would lead back to it, so it is left out.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        if not path.exists():
            raise SourceError(f"source '{path}': there is no such file or folder. Check --source.")
        self.only = None if path.is_dir() else path.name
        self.root = path if path.is_dir() else path.parent
        self._root = str(self.root)

    def _above(self) -> set[Any]:
        return {_identity(folder) for folder in (self.root, *filter(os.path.exists, self.root.resolve().parents))}

    def _is_new(self, folder: str, seen: set[Any]) -> bool:
        identity = _identity(self.root / folder)
        is_new = identity not in seen
        seen.add(identity)
        return is_new

    def _list(self, folder: str) -> Mapping[str, bool]:
        try:
            with os.scandir(self.root / folder) as entries:
                return {entry.name: _leads_to_folder(entry) for entry in entries}
        except OSError as error:
            raise SourceError(
                f"source '{self.name}': folder '{folder or self.root.name}' cannot be read ({error.strerror}). Make "
                "it readable, or move it away."
            ) from error

    def _is_folder(self, info: Any) -> bool:
        return info

    def _has_folder(self, folder: str) -> bool:
        return os.path.isdir(f"{self._root}/{folder}")

    def _describe(self, prefix: str, names: Sequence[str], listed: Mapping[str, Any]) -> Sequence[FoundFile]:
        return look_up(self._stat_or_problem, [prefix + name for name in names])

    def _stat(self, path: str) -> FoundFile:
        status = retried(lambda: os.stat(f"{self._root}/{path}"), path)  # Path is slower than the stat
        if not stat.S_ISREG(status.st_mode):  # a FIFO or a device may never end
            return FoundFile(path, problem=("unreadable", f"not a regular file: {path}"))
        return FoundFile(path, status.st_size, status.st_mtime_ns)

    def _stat_or_problem(self, path: str) -> FoundFile:
        try:
            return self._stat(path)
        except OSError as error:
            return FoundFile(path, problem=("unreadable", f"{error.strerror}: {path}"))

    def _look(self, path: str) -> FoundFile | None:
        try:
            return self._stat(path)
        except (OSError, ValueError):  # missing, or a name that is too long or holds a NUL
            return None

    def open(self, path: str, *, ahead: bool = True) -> BinaryIO:
        try:
            return retried(lambda: open_regular(self.root / path), path)
        except OSError as error:
            reason = error.strerror or "not a regular file"
            raise SourceError(
                f"source '{self.root / path}': it cannot be read ({reason}). Make it readable, or remove it."
            ) from error

    def read(self, path: str, offset: int, num_bytes: int, stage: str, *, at_most: int | None = None) -> bytes:
        name = str(self.root / path)
        return retried(lambda: read_bytes(name, offset, num_bytes, stage, at_most=at_most), path)


class RemoteFiles(SourceFiles):
    """A folder or object at a URL. Failed requests are retried.

    Args:
      is_folder: do not look whether it is an object.
    """

    def __init__(self, url: str, *, is_folder: bool = False) -> None:
        self._reader = RemoteReader(url, what="source")
        self.name = self._reader.url
        if not is_folder and self._look("") is not None:
            parent, _, self.only = url.rstrip("/").rpartition("/")
            self._reader = RemoteReader(parent, what="source")

    def _list(self, folder: str) -> Mapping[str, Any]:
        if self._reader.is_http:  # a page of links may lack files, or have others
            raise SourceError(
                f"source '{self.name}': no file, and HTTP cannot list a folder. Pass a file (a .tar, a .parquet or a "
                f"table), files of one folder with braces ('{self.name}/{{000..003}}.tar'), or a URL that can be "
                "listed, such as s3:// or hf://."
            )
        try:
            return self._reader.entries(folder)
        except StoreError as error:
            raise SourceError(str(error)) from error

    def _is_folder(self, info: Any) -> bool:
        return info["type"] == "directory"

    def _describe(self, prefix: str, names: Sequence[str], listed: Mapping[str, Any]) -> Sequence[FoundFile]:
        return [_remote_file(prefix + name, listed[name]) for name in names]

    def _look(self, path: str) -> FoundFile | None:
        try:
            info = self._reader.info(path)
        except StoreError as error:
            raise SourceError(str(error)) from error
        return _remote_file(path, info) if info and info["type"] == "file" and not _is_page(info) else None

    def open(self, path: str, *, ahead: bool = True) -> BinaryIO:
        if (file := self._look(path)) is None:
            raise SourceError(f"source '{self.name}': there is no '{path}'.")
        raw = _RangedFile(self._reader, path, file.num_bytes)
        return cast(BinaryIO, io.BufferedReader(raw, READ_AHEAD_BYTES if ahead else 1 << 16))

    def read(self, path: str, offset: int, num_bytes: int, stage: str, *, at_most: int | None = None) -> bytes:
        wanted = num_bytes if at_most is None else min(num_bytes, at_most)
        # One byte more detects an object that grew; in a tar no image is at offset 0.
        more = 1 if offset == 0 and wanted == num_bytes else 0
        try:
            data = self._reader.read(path, offset, offset + wanted + more)
        except FileNotFoundError as error:
            raise RecordRejected(stage, "unreadable", f"the object no longer exists: {path}") from error
        except StoreError as error:  # of the network or credentials, not of the image
            raise SourceError(str(error)) from error
        if len(data) != wanted:
            detail = f"{path} has changed since it was listed: {len(data)} bytes, expected {num_bytes}"
            raise RecordRejected(stage, "source_changed", detail)
        return data


class _RangedFile(io.RawIOBase):
    """An object at a URL as a file read in ranges."""

    def __init__(self, reader: RemoteReader, path: str, size: int) -> None:
        self._reader, self._path, self._size, self._position = reader, path, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

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
        except FileNotFoundError as error:
            raise SourceError(f"source '{self._reader.url}': '{self._path}' no longer exists.") from error
        except StoreError as error:
            raise SourceError(str(error)) from error
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def look_up(look: Callable[[str], T], paths: Sequence[str]) -> list[T]:
    """Call a function that describes a file for many paths, in threads: a network disk answers many at a time."""
    length = max(1, min(LOOK_UPS_AT_ONCE, -(-len(paths) // LOOK_UP_THREADS)))  # all threads have work, also of few
    parts = [paths[start : start + length] for start in range(0, len(paths), length)]
    if len(parts) < 2:
        return [look(path) for path in paths]
    with ThreadPoolExecutor(LOOK_UP_THREADS, thread_name_prefix="leandit-list") as threads:
        looked = threads.map(lambda part: [look(path) for path in part], parts)
        return [result for part in looked for result in part]


def open_source_files(source: Path | str, *, is_folder: bool = False) -> SourceFiles:
    """The files of a source: a folder, or a single file in its folder.

    Args:
      is_folder: a URL is that of a folder, which only some file systems can tell from a file.
    Raises: SourceError: it does not exist; RecipeError: no file system for the URL.
    """
    return RemoteFiles(str(source), is_folder=is_folder) if "://" in str(source) else LocalFiles(Path(source))


def open_files(source: Path | str) -> SourceFiles:
    """The files of a source whose name may have braces (``shards/{000..003}.tar``), a local one also wildcards.

    Raises: SourceError: no file matches, or files of several folders.
    """
    pattern = str(source)
    is_remote = "://" in pattern
    is_plain = "{" not in pattern and (is_remote or not any(letter in pattern for letter in WILD))
    if is_plain or (not is_remote and os.path.exists(pattern)):
        return open_source_files(source)
    paths = _expanded(pattern, is_remote=is_remote)
    if len(paths) == 1:
        return open_source_files(paths[0])
    folders = sorted({path.rpartition("/")[0] or "." for path in paths})
    if len(folders) > 1:
        raise SourceError(
            f"source '{pattern}': it matches files of {len(folders)} folders, '{folders[0]}' and '{folders[1]}'. "
            "Expected files of one folder: link them into one."
        )
    files, names = open_source_files(folders[0], is_folder=True), [path.rpartition("/")[2] for path in paths]
    for name in names:
        info = files.look(name)
        if info and not info.problem:
            continue
        if os.path.isdir(os.path.join(folders[0], name)):
            raise SourceError(
                f"source '{pattern}': it matches the folder '{name}'; expected only files, such as *.tar. Pass each "
                f"folder as a --source of its own, or as one source '{folders[0]}', which holds them."
            )
        raise SourceError(f"source '{pattern}': there is no file '{name}' in '{folders[0]}'. Check the pattern.")
    files.chosen, files.name = frozenset(names), pattern
    return files


def _expanded(pattern: str, *, is_remote: bool) -> list[str]:
    try:
        plain = list(islice(braceexpand(pattern), MAX_FILES + 1))
    except ValueError as error:
        raise SourceError(
            f"source '{pattern}': its braces cannot be read ({error}). Expected a range such as {{000..003}}."
        ) from error
    paths: list[str] = []
    for name in plain:
        is_wild = not is_remote and any(letter in name for letter in WILD)
        paths += sorted(islice(glob.iglob(name), MAX_FILES + 1)) if is_wild else [name]
    if not paths or len(paths) > MAX_FILES:
        raise SourceError(
            f"source '{pattern}': it matches {'no file' if not paths else f'more than {MAX_FILES} files'}. Check it."
        )
    return paths


def _leads_to_folder(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder or a link to one; a link that leads to itself is not."""
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False
        raise


def _identity(folder: Path) -> tuple[int, int]:
    try:
        status = os.stat(folder)
    except OSError as error:
        raise SourceError(f"source: folder '{folder}' cannot be read ({error.strerror}).") from error
    return status.st_dev, status.st_ino


def _is_page(info: Mapping[str, Any]) -> bool:
    """Whether a URL leads to a web page, such as the index of a folder."""
    return info.get("mimetype") == "text/html" or urlsplit(str(info.get("url", ""))).path.endswith("/")


def _remote_file(path: str, info: Mapping[str, Any]) -> FoundFile:
    """An object at a URL; a hash of its ETag or time stands for its modification time."""
    version = next((str(info[key]) for key in VERSION_KEYS if info.get(key) is not None), "")
    return FoundFile(path, int(info["size"] or 0), xxhash.xxh3_64_intdigest(version.encode()) >> 1)
