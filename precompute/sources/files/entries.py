"""Entries of folders: found files, sorted and walked depth first."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import pyarrow as pa

from .ignored import is_system_folder
from .record import SourceRecord, usable_key

NAMES_AT_ONCE = 1 << 16  # of a folder, as Python objects
LeftOut = Callable[[str], None]  # called with the name of a skipped folder


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


def people_made(entries: Iterable[tuple[str, bool]], left_out: LeftOut) -> Iterator[tuple[str, bool]]:
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


def ordered(entries: Entries, files_first: bool) -> Iterator[tuple[str, bool]]:
    """Entries in their order, or files before folders."""
    if not files_first:
        return iter(entries)
    files = ((name, False) for name, is_folder in entries if not is_folder)
    return itertools.chain(files, ((name, True) for name, is_folder in entries if is_folder))


def depth_first(entries_of: Callable[[str], Iterator[FoundFile | str]]) -> Iterator[FoundFile]:
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
