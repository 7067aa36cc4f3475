"""Temporary files and folders of dead processes: found by name, removed once nobody holds their lock.

The name has the host that wrote it. A lock of this host's kernel decides at once. Of another host, whose locks this
kernel may not see, and on a file system without flock, a temporary counts as abandoned when nothing was written to it
for STALE_SECONDS.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .files import TEMPORARY_NAME, TEMPORARY_PREFIX, host, move, temporary_beside, write_atomic
from .locks import is_at, open_existing, release_lock, try_lock

STALE_SECONDS = 3600.0  # without a write; file systems cache an mtime for much less


def any_output(name: str) -> bool:
    """Whether a temporary with this final name counts: each does, in a folder in which only this program writes."""
    return True


def find_strays(folder: Path, *, below: bool = True, is_output: Callable[[str], bool] = any_output) -> list[Path]:
    """Temporaries in a folder, of living processes too.

    Args:
      below: also those in subfolders.
      is_output: whether a final name is that of an output; others may be of another project.
    """
    strays = []
    for parent, folders, files in itertools.islice(os.walk(folder), None if below else 1):  # rglob fails if one goes
        names = [name for name in (*folders, *files) if name.startswith(TEMPORARY_PREFIX)]
        strays += [Path(parent) / name for name in names if is_output(_final_name(name))]
        folders[:] = [name for name in folders if name not in names]
    return sorted(strays)


def _final_name(temporary: str) -> str:
    """The name that a temporary would have got; "" if it is not named as ``temporary_beside`` names one."""
    named = TEMPORARY_NAME.fullmatch(temporary)
    return named["final"] if named else ""


def sweep_strays(
    folder: Path, *, of_all: bool = False, below: bool = True, is_output: Callable[[str], bool] = any_output
) -> list[Path]:
    """Remove temporaries of dead processes; a folder that ``write_folder`` moved away, not replaced, is moved back.

    Args:
      of_all: also those of living processes; only safe while nothing writes to the folder.
      below, is_output: as for ``find_strays``.
    Returns: the paths that are gone.
    """
    swept = []
    for path in find_strays(folder, below=below, is_output=is_output):
        try:
            descriptor = open_existing(path)
        except OSError:  # just removed, or of another user
            continue
        try:
            if of_all or _is_abandoned(path, descriptor):
                _remove(path)
                swept.append(path)
        finally:
            release_lock(descriptor)
    return swept


def sweep_beside(output: Path) -> list[Path]:
    """Remove what processes that died while they wrote a file or folder left beside it.

    Args:
      output: the file or folder under its final name; it may be missing.
    Returns: the paths that are gone.
    """
    return sweep_strays(output.parent, below=False, is_output=lambda name: name == output.name)


def write_output(output: Path, content: bytes | Iterable[Any]) -> None:
    """Write a file that the user has named, and remove what earlier processes that died left of it beside it.

    Args:
      content: as ``parts`` of ``write_atomic``.
    Raises: ResourceError: as ``write_atomic``.
    """
    sweep_beside(output)
    write_atomic(output, content)


def _is_abandoned(path: Path, descriptor: int) -> bool:
    """Whether no living process writes a temporary; its lock is taken if the file system has locks."""
    named = TEMPORARY_NAME.fullmatch(path.name)
    is_decisive = bool(named) and named["host"] == host()
    try:
        if not try_lock(descriptor):
            return False
    except OSError:
        is_decisive = False
    return is_at(descriptor, path) and (is_decisive or _is_stale(path))


def _is_stale(path: Path) -> bool:
    """Whether nothing was written to it for long."""
    try:
        return seconds_since_write(path) > STALE_SECONDS
    except OSError:  # just removed, or this user may not write here, and so not sweep
        return False


def seconds_since_write(path: Path) -> float:
    """Time since a file, or a file in a folder, was written, by the clock of the file system: machines' may differ.

    Raises: OSError: it does not exist, or this user may not write beside it.
    """
    probe = temporary_beside(path.with_name("clock"))
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT, 0o666))
        now = probe.stat().st_mtime
        return now - max(each.lstat().st_mtime for each in (path, *path.rglob("*")))
    finally:
        probe.unlink(missing_ok=True)


def _remove(path: Path) -> None:
    named = TEMPORARY_NAME.fullmatch(path.name)
    final = path.with_name(named["final"]) if named and named["replaced"] else path
    if not os.path.lexists(final):
        move(path, final)
    elif path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
