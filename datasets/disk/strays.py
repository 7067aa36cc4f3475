"""Temporary files of killed processes: found by name, removed once their owner is dead."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from .cached import cached_property
from .files import move, remove
from .owners import REPLACED_NAME, STALE_SECONDS, TEMPORARY_PREFIX, parse_owner, temporary_beside


def find_strays(folder: Path, *, below: bool = True) -> list[Path]:
    """All temporaries below a folder, or only those directly in it, of any owner."""
    strays = []
    for parent, folders, files in _walk(folder, below):
        names = [name for name in (*folders, *files) if name.startswith(TEMPORARY_PREFIX)]
        strays += [Path(parent) / name for name in names]
        folders[:] = [name for name in folders if name not in names]
    return sorted(strays)


def _walk(folder: Path, below: bool) -> Iterable[tuple[str, list[str], list[str]]]:
    # Not rglob, which raises if another process removes a folder.
    return os.walk(folder) if below else itertools.islice(os.walk(folder), 1)


def sweep_strays(folder: Path, *, of_all: bool = False, below: bool = True) -> list[Path]:
    """Remove temporaries whose owner is dead.

    An owner in this container is dead if its process is; any other owner if its heartbeat has stopped. A folder that
    ``write_folder`` moved away but did not replace is moved back.

    Args:
      of_all: also those of living owners; only safe while nothing writes to the folder.
      below: also those in subfolders.
    Returns: the removed paths.
    """
    clock = _Clock(folder)
    walked = ((Path(parent), names) for parent, names, _ in _walk(folder, below))
    for path in sorted(parent / name for parent, names in walked for name in names):
        if (named := REPLACED_NAME.fullmatch(path.name)) and (of_all or clock.is_abandoned(path, named["owner"])):
            kept = path.with_name(named["kept"])
            if kept.exists():
                remove(path)
            else:
                move(path, kept)
    owners = {path: path.name.removeprefix(TEMPORARY_PREFIX) for path in find_strays(folder, below=below)}
    swept = [path for path, text in owners.items() if of_all or clock.is_abandoned(path, "@".join(text.split("@")[:2]))]
    for path in swept:
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    return swept


class _Clock:
    """The clock of a folder's file system: the clocks of machines that share it may differ.

    Args:
      folder: read once, and only if a heartbeat decides.
    """

    def __init__(self, folder: Path) -> None:
        self._probe = temporary_beside(folder / "clock")

    def is_abandoned(self, path: Path, owner: str | None) -> bool:
        """Whether the owner of a temporary is dead.

        Args:
          owner: from its name.
        """
        known = parse_owner(owner or "")
        is_alive = known.is_alive if known else None
        if is_alive is not None:
            return not is_alive
        try:
            return self._now - path.lstat().st_mtime > STALE_SECONDS
        except OSError:  # just removed, or this user may not write here, and so not sweep
            return False

    @cached_property
    def _now(self) -> float:
        """Seconds since the epoch. Raises: OSError."""
        try:
            os.close(os.open(self._probe, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666))
            return self._probe.stat().st_mtime
        finally:
            self._probe.unlink(missing_ok=True)
