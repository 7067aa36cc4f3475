"""The files of a source: a local folder, or one at a URL of any fsspec file system. Listed in order, read in ranges.

Both implement ``SourceFiles``. Only the names of one folder at a time are in memory, and only regular files are read:
others may never end.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Protocol

from ....datasets.errors import SourceError
from ...images.decoder_child import read_bytes
from ...images.faults import retried
from .entries import FoundFile, LeftOut, depth_first, ordered, people_made, sorted_entries
from .look_ups import LookUps
from .remote import RemoteFiles

STATS_AT_ONCE = 4096  # files of a folder


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
          left_out: called with the name of each hidden or system folder, and of each link to a folder that is listed
            elsewhere; at a URL only with system folders.
        """
        ...

    def look(self, path: str) -> FoundFile | None:
        """One file; None if it does not exist."""
        ...

    def open(self, path: str, *, ahead: bool = True) -> BinaryIO:
        """Open one file for random reads.

        Args:
          ahead: it is read sequentially, so read-ahead pays.
        Raises: SourceError: it cannot be read. ResourceError: a fault, as of ``retried``.
        """
        ...

    def read(self, path: str, offset: int, num_bytes: int, stage: str) -> bytes:
        """Read the bytes of one picture.

        Raises: RecordRejected: unreadable, or changed since the listing. ResourceError: as ``open``.
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
    """A local folder or file; see ``SourceFiles``. Links to folders are followed, each folder once.

    A link to a folder that holds the source would lead back to it, so it is left out.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        if not path.exists():
            raise SourceError(f"source '{path}': there is no such file or folder. Check --source.")
        self.only = None if path.is_dir() else path.name
        self.root = path if path.is_dir() else path.parent
        self._root = str(self.root)
        self._look_ups = LookUps(self._found)
        above = filter(os.path.exists, self.root.resolve().parents)
        self._around = {_identity(folder) for folder in (self.root, *above)}

    def names(self) -> Iterator[str]:
        try:
            with os.scandir(self.root) as found:
                yield from (entry.name for entry in found if not entry.name.startswith(".") and _is(entry.is_file))
        except OSError as error:
            raise _unreadable(self.name, self.root.name, error) from error

    def folders(self) -> Iterator[str]:
        entries = self._entries("", {*self._around}, False, lambda _: None)
        return (entry for entry in entries if isinstance(entry, str))

    def walk(self, *, files_first: bool = False, left_out: LeftOut = lambda _: None) -> Iterator[FoundFile]:
        seen = {*self._around}
        return depth_first(lambda folder: self._entries(folder, seen, files_first, left_out))

    def _entries(
        self, folder: str, seen: set[tuple[int, int]], files_first: bool, left_out: LeftOut
    ) -> Iterator[FoundFile | str]:
        try:
            with os.scandir(self.root / folder) as found:
                entries = sorted_entries(people_made(((e.name, _is(e.is_dir)) for e in found), left_out))
        except OSError as error:
            raise _unreadable(self.name, folder, error) from error
        # All are marked before one is entered: a folder with two links belongs to the higher one.
        new = {name for name, is_folder in entries if is_folder and self._is_new(f"{folder}/{name}", seen)}
        prefix = f"{folder}/" if folder else ""
        entries_in_order = ordered(entries, files_first)
        while some := list(islice(entries_in_order, STATS_AT_ONCE)):
            described = iter(self._look_ups([prefix + name for name, is_folder in some if not is_folder]))
            for name, is_folder in some:
                if not is_folder:
                    yield next(described)
                elif name in new:
                    yield prefix + name
                else:
                    left_out(name)

    def _is_new(self, folder: str, seen: set[tuple[int, int]]) -> bool:
        identity = _identity(self.root / folder.lstrip("/"))
        is_new = identity not in seen
        seen.add(identity)
        return is_new

    def look(self, path: str) -> FoundFile | None:
        try:
            return self._described(path, self._stat(path))
        except (OSError, ValueError):  # missing, or a name that is too long or holds a NUL
            return None

    def _found(self, path: str) -> FoundFile:
        try:
            return self._described(path, self._stat(path))
        except OSError as error:
            return FoundFile(path, problem=("unreadable", f"{error.strerror}: {path}"))

    def _stat(self, path: str) -> os.stat_result:
        return retried(lambda: os.stat(f"{self._root}/{path}"), path)  # Path is slower than the stat

    def _described(self, path: str, found: os.stat_result) -> FoundFile:
        if not stat.S_ISREG(found.st_mode):  # a FIFO or a device may never end
            return FoundFile(path, problem=("unreadable", f"not a regular file: {path}"))
        return FoundFile(path, found.st_size, found.st_mtime_ns)

    def open(self, path: str, *, ahead: bool = True) -> BinaryIO:
        try:
            # Without O_NONBLOCK, opening a FIFO waits for a writer.
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = retried(lambda: os.open(self.root / path, flags), path)
        except OSError as error:
            raise SourceError(f"source '{self.root / path}': it cannot be read ({error.strerror}).") from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise SourceError(f"source '{self.root / path}': not a regular file. Remove it from the source.")
        return open(descriptor, "rb")

    def read(self, path: str, offset: int, num_bytes: int, stage: str) -> bytes:
        return retried(lambda: read_bytes(str(self.root / path), offset, num_bytes, stage), path)


def _is(kind: Callable[[], bool]) -> bool:
    """Whether an entry is of a kind; a link that leads to itself is of none."""
    try:
        return kind()
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
