"""The only way to write to disk: temporary file in the same folder, fsync, rename, fsync of the folder.

A file or folder exists completely or not at all, even after a power failure. Nothing is written through a memory map.
A writer locks its temporary until it is renamed; those that a killed process leaves are swept at the next start
(``strays.py``). Tests can make any single step fail (``Failpoint``).
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ...errors import ResourceError
from ...units import readable_size
from .faults import FAULTS, fault_of, named_faults
from .locks import hold

FAILPOINT_VARIABLE = "LEANDIT_FAILPOINT"
EXIT_DIED = 137  # exit code after kill -9
TEMPORARY_PREFIX = ".leandit-tmp-"
REPLACED = ".replaced"  # marks a folder while another one replaces it
TEMPORARY_NAME = re.compile(
    rf"{re.escape(TEMPORARY_PREFIX)}(?P<host>[A-Za-z0-9._-]*)-[0-9a-f]{{8}}(?P<replaced>{re.escape(REPLACED)})?@(?P<final>.+)",
    re.DOTALL,
)
NEEDS_SPACE = frozenset(["create", "write", "sync", "folder"])


@dataclass
class Failpoint:
    """Makes one operation of this module fail, for tests; from ``LEANDIT_FAILPOINT=KIND@NUMBER`` or set in code.

    Args:
      kind: "die" ends the process at operation ``at``, in the middle of a write; "eio" makes that operation fail;
        "enospc" also all later ones that need space; "short" makes every write take half of its bytes.
      at: number of the operation, counted from 0; -1 counts only.
    """

    kind: Literal["die", "eio", "enospc", "short", "count"] = "count"
    at: int = -1
    seen: list[str] = field(default_factory=list)
    _numbers: Any = field(default_factory=itertools.count, repr=False)

    def step(self, operation: str, path: Path) -> bool:
        """Count an operation, and fail at number ``at``.

        Returns: True if a write must stop halfway and end the process.
        """
        number = next(self._numbers)
        self.seen.append(f"{operation} {path.name}")
        if self.kind == "enospc" and 0 <= self.at <= number and operation in NEEDS_SPACE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        if number != self.at:
            return False
        if self.kind == "eio":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        if self.kind == "die" and operation != "write":
            os._exit(EXIT_DIED)
        return self.kind == "die"

    def takes(self, view: memoryview) -> memoryview:
        """The part of a buffer that one write takes."""
        return view[: max(1, len(view) // 2)] if self.kind == "short" else view


def _failpoint_of_environment() -> Failpoint | None:
    kind, _, at = os.environ.get(FAILPOINT_VARIABLE, "").partition("@")
    return Failpoint(kind, int(at or -1)) if kind else None  # pyright: ignore[reportArgumentType]


failpoint: Failpoint | None = _failpoint_of_environment()


def _step(operation: str, path: Path) -> bool:
    return failpoint.step(operation, path) if failpoint else False


def temporary_beside(path: Path, mark: str = "") -> Path:
    """A new path in the same folder for a temporary file or folder; its name includes host and final name."""
    return path.with_name(f"{TEMPORARY_PREFIX}{host()}-{secrets.token_hex(4)}{mark}@{path.name}")


def host() -> str:
    """The name of this machine, as file names have it."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", socket.gethostname())[:64]


def write_atomic(path: Path, parts: bytes | Iterable[Any]) -> None:
    """Write a file atomically.

    Args:
      path: the file; its folder is created if missing.
      parts: the content, or consecutive buffers of it.
    Raises: ResourceError: the disk is full, over quota or failing, or the file too large; nothing remains.
    """
    temporary = temporary_beside(path)
    try:
        make_folder(path.parent)
        with hold(temporary, Path.touch):
            _write_file(temporary, parts)
            _rename(temporary, path)
        fsync_folder(path.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        raise_resource_error(error, path)
        raise


Content = bytes | Iterable[Any] | Callable[[Path], Any]


def write_folder(final: Path, files: Iterable[tuple[str, Content]], *, replace: bool) -> bool:
    """Write a folder of files atomically.

    Args:
      final: the folder; its parent is created if missing.
      files: relative path and content of each, consumed one at a time; a function as content writes the file itself.
      replace: replace an existing folder and remove it last (``sweep_strays`` restores it if the process dies in
        between); otherwise an existing folder stays.
    Returns: False if an existing folder stayed.
    Raises: ResourceError: the disk is full, over quota or failing, or the file too large; nothing remains.
    """
    with temporary_folder(final) as temporary:
        inner = set[Path]()
        for name, content in files:
            path = temporary / name
            make_folder(path.parent)
            if callable(content):
                _let_write(content, path)
            else:
                _write_file(path, content)
            inner |= {path.parent} - {temporary}
        for folder in (*sorted(inner), temporary):
            fsync_folder(folder)
        if replace and final.exists():
            _replace_folder(temporary, final)
            return True
        try:
            move(temporary, final)
        except OSError as error:
            if replace or error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            return False
        return True


@contextlib.contextmanager
def temporary_folder(final: Path) -> Iterator[Path]:
    """An empty folder next to ``final``, to be filled and moved there by the block; otherwise it is removed.

    Raises: ResourceError: the disk is full, over quota or failing, or the file too large.
    """
    temporary = temporary_beside(final)
    try:
        make_folder(final.parent)
        _step("folder", temporary)
        with hold(temporary, lambda path: path.mkdir(exist_ok=True)):
            fsync_folder(final.parent)
            yield temporary
    except BaseException as error:
        raise_resource_error(error, final)
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _replace_folder(temporary: Path, final: Path) -> None:
    replaced = temporary_beside(final, REPLACED)
    with hold(final):
        _renew_time(final)
        _rename(final, replaced)
        try:
            _rename(temporary, final)
        except BaseException:
            if not final.exists():
                os.rename(replaced, final)
            raise
        fsync_folder(final.parent)  # first: a power failure must not lose both
        _step("remove", replaced)
        shutil.rmtree(replaced)  # if it fails, the next command sweeps the rest


def extend(path: Path, size: int, parts: Iterable[Any]) -> None:
    """Write at the end of a file of which the first bytes count, and sync it; what is behind them is cut off.

    A crash leaves these bytes as they were, so the same call may be repeated.

    Args:
      path: the file; it is created with its folder if ``size`` is 0.
      size: bytes of the file that count.
      parts: consecutive buffers to write.
    Raises: ResourceError: as ``write_atomic``; FileNotFoundError.
    """
    try:
        make_folder(path.parent)
        _step("create", path)
        descriptor = os.open(path, os.O_WRONLY | (0 if size else os.O_CREAT), 0o666)
        try:
            os.ftruncate(descriptor, size)
            os.lseek(descriptor, size, os.SEEK_SET)
            _write_parts(descriptor, path, parts)
        finally:
            os.close(descriptor)
        if not size:
            fsync_folder(path.parent)
    except BaseException as error:
        raise_resource_error(error, path)
        raise


def remove(path: Path) -> None:
    """Remove a file or folder; a folder is renamed to a temporary first, so that it never looks complete."""
    if path.is_dir() and not path.is_symlink():
        temporary = temporary_beside(path)
        with named_faults(path), hold(path):
            _renew_time(path)
            _rename(path, temporary)
            try:
                _step("remove", temporary)
                shutil.rmtree(temporary)
            except OSError:
                shutil.rmtree(temporary, ignore_errors=True)  # one file that cannot be removed keeps no other
                raise
    elif os.path.lexists(path):
        with named_faults(path):
            _step("remove", path)
            path.unlink(missing_ok=True)


def _renew_time(folder: Path) -> None:
    """Set the mtime to now, before a rename makes it a candidate for sweeps on a file system without flock."""
    with contextlib.suppress(OSError):
        os.utime(folder)


def move(source: Path, target: Path) -> None:
    """Rename a file or folder within its folder, durably."""
    with named_faults(target):
        _rename(source, target)
        fsync_folder(target.parent)


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, each durably."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    _step("folder", folder)
    folder.mkdir(exist_ok=True)
    fsync_folder(folder.parent)


def fsync_folder(folder: Path) -> None:
    """Sync the names in a folder."""
    _step("sync", folder)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def drop_cached(path: Path) -> None:
    """Ask the system to forget its copy of a synced file in memory, so that the next read comes from the disk."""
    if hasattr(os, "posix_fadvise"):  # not on macOS
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _write_file(path: Path, parts: bytes | Iterable[Any]) -> None:
    _step("create", path)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        _write_parts(descriptor, path, [parts] if isinstance(parts, bytes) else parts)
    finally:
        os.close(descriptor)


def _write_parts(descriptor: int, path: Path, parts: Iterable[Any]) -> None:
    """Write buffers to an open file, and sync it."""
    for part in parts:
        stops_halfway = _step("write", path)
        view = memoryview(part)
        view = view.cast("B") if view.nbytes else memoryview(b"")  # an empty array cannot be cast
        left = view[: len(view) // 2] if stops_halfway else view
        while left:
            left = left[os.write(descriptor, failpoint.takes(left) if failpoint else left) :]
        if stops_halfway:
            os._exit(EXIT_DIED)
    _step("sync", path)
    os.fsync(descriptor)


def _let_write(write: Callable[[Path], Any], path: Path) -> None:
    stops_halfway = _step("write", path)
    write(path)
    if stops_halfway:
        os._exit(EXIT_DIED)
    _step("sync", path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _rename(source: Path, target: Path) -> None:
    _step("rename", target)
    os.rename(source, target)


def raise_resource_error(error: BaseException, path: Path) -> None:
    """Turn an error of the disk while a file is written into a ResourceError; return at any other error.

    "No space left" is reported with the free space, "file too large" with the limits, a fault with the path.
    """
    if not isinstance(error, OSError):
        return
    if error.errno in FAULTS:
        raise fault_of(path, error) from error
    if error.errno == errno.EFBIG:
        problem = ": more than this process ('ulimit -f') or the file system (FAT32: 4 GiB) allows in one file"
        advice = "Raise the limit or use another file system"
    elif error.errno in (errno.ENOSPC, errno.EDQUOT):
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        problem = f" ({readable_size(shutil.disk_usage(folder).free)} free on this disk)"
        advice = "Free some space"
    else:
        return
    raise ResourceError(
        f"file '{path}': {error.strerror}{problem}. {advice}, then run the same command again: it resumes."
    ) from error


def files_below(folder: Path) -> Iterator[Path]:
    """Every file in a folder and its subfolders; links are followed."""
    for home, _, names in os.walk(folder, followlinks=True):
        yield from (Path(home) / name for name in names)
