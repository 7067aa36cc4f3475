"""Which of two intact copies of a revision's files is right: one of them may belong to another store.

A copy carries its own hash, so a manifest of another store looks as intact as the right one. What else is in the store
decides: the revisions before and after, the tables, the index, and the shards. If these disagree, or say nothing, no
copy is right, and nothing is overwritten.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from ...errors import LeanditError, ResourceError
from ..disk.hashing import xxh3_file
from ..format.layout import INDEX, RECORDS, SOURCES, TWIN, revision_prefix
from ..format.schema import FileEntry, LocalFile, Manifest
from ..format.tables import read_batches
from ..order.slices import spread
from ..revisions.catalog import file_entry, intact_copies, read_manifest
from ..revisions.local import read_local_file
from ..revisions.records import build_index
from ..revisions.seal import index_files

MOST_SHARDS = 16  # of those that two manifests name differently, which are hashed for each

UNDECIDED = "undecided"
Undecided = Literal["undecided"]
File = TypeVar("File", Manifest, LocalFile)


def right_manifest(root: Path, revision: int) -> Manifest | Undecided | None:
    """The manifest of a revision, from the copy that belongs to the store.

    Returns: None if no copy is intact; UNDECIDED if two differ, and the store does not tell which is right, or if the
      only one has nothing of this store.
    """
    copies = intact_copies(read_manifest, root, revision)
    if not copies:
        return None
    if len(copies) == 1:
        had_other = (root / revision_prefix(revision) / TWIN).is_dir()  # else it is of a published store
        return UNDECIDED if had_other and _has_other_index(root, copies[0]) else copies[0]
    if copies[0].root_hash == copies[1].root_hash:
        return copies[0]
    measures = (_fit_in_chain, _has_records_table, _share_of_index, _share_of_shards)
    return _decided(copies, [functools.partial(measure, root) for measure in measures])


def right_local(root: Path, revision: int, manifest: Manifest | None) -> LocalFile | Undecided | None:
    """``local.json`` of a revision, as ``right_manifest``.

    Args:
      manifest: of the revision, if it is known.
    """
    copies = intact_copies(read_local_file, root, revision)
    if len(copies) < 2 or copies[0].sources == copies[1].sources:
        return copies[0] if copies else None

    def has_table(copy: LocalFile, _: LocalFile) -> float:
        return float(_intact_table(root, revision, SOURCES, copy.sources) is not None)

    def has_rows(copy: LocalFile, _: LocalFile) -> float:
        table = _intact_table(root, revision, SOURCES, copy.sources)
        return float(manifest is not None and table is not None and _num_rows(table) == manifest.num_planned)

    return _decided(copies, [has_table, has_rows])


def _decided(copies: Sequence[File], measures: Iterable[Callable[[File, File], float]]) -> File | Undecided:
    """The one of two copies that fits the store better by every measure that tells them apart.

    Args:
      measures: functions of a copy and the other one; higher for the copy that fits better, equal if they cannot tell.
    """
    first, second = copies
    votes_first = False
    votes_second = False
    for measure in measures:
        of_first = measure(first, second)
        of_second = measure(second, first)
        votes_first |= of_first > of_second
        votes_second |= of_second > of_first
    if votes_first == votes_second:
        return UNDECIDED
    return first if votes_first else second


def _fit_in_chain(root: Path, manifest: Manifest, _: Manifest) -> float:
    """To how many of its neighbors a manifest fits: the revision before it, and the one after it."""
    before = {each.root_hash for each in intact_copies(read_manifest, root, manifest.revision - 1)}
    after = {each.base for each in intact_copies(read_manifest, root, manifest.revision + 1) if not each.copies}
    return float(not manifest.copies and manifest.base in before) + float(manifest.root_hash in after)


def _has_records_table(root: Path, manifest: Manifest, _: Manifest) -> float:
    """1 if the records table of a manifest is there, in either copy, else 0."""
    path = revision_prefix(manifest.revision) + RECORDS
    entry = next(entry for entry in manifest.files if entry.path == path)
    return float(_intact_table(root, manifest.revision, RECORDS, entry) is not None)


def _share_of_index(root: Path, manifest: Manifest, other: Manifest) -> float:
    """Share of the files of the index that a manifest names, and the other does not, which are there."""
    prefix = f"{revision_prefix(manifest.revision)}{INDEX}/"
    return _share_there(root, [entry for entry in _only_in(manifest, other) if entry.path.startswith(prefix)])


def _share_of_shards(root: Path, manifest: Manifest, other: Manifest) -> float:
    """Share of the shards that a manifest names, and the other does not, which are there; some are looked at."""
    shards = [entry for entry in _only_in(manifest, other) if "/c/" in entry.path]
    return _share_there(root, [shards[i] for i in spread(len(shards), MOST_SHARDS)])


def _has_other_index(root: Path, manifest: Manifest) -> bool:
    """Whether the index in the store belongs to other tables than those of a manifest.

    It does if none of its files is as the manifest says, or if one that differs follows from the tables in the store.
    """
    prefix = f"{revision_prefix(manifest.revision)}{INDEX}/"
    entries = [entry for entry in manifest.files if entry.path.startswith(prefix) and (root / entry.path).is_file()]
    differing = [entry for entry in entries if not _is_there(root / entry.path, entry)]
    if not differing:
        return False
    if not any(entry.bytes for entry in entries if entry not in differing):
        return True
    return any(_follows_from(root, manifest, folder, differing) for folder in ("", f"{TWIN}/"))


def _follows_from(root: Path, manifest: Manifest, folder: str, differing: Sequence[FileEntry]) -> bool:
    """Whether a file of the index that differs from its manifest has the content that follows from the tables.

    Args:
      folder: of the tables, within that of the revision.
    Raises: ResourceError: the disk or this machine failed, which says nothing about the tables.
    """
    prefix = revision_prefix(manifest.revision)
    try:
        numbers = build_index(
            manifest.spec,
            manifest.layouts(),
            manifest.num_planned,
            manifest.num_captions,
            lambda name, columns: read_batches(root / f"{prefix}{folder}{name}", columns),
        )
    except ResourceError:
        raise
    except (LeanditError, pa.ArrowException, OSError, ValueError, LookupError):
        return False  # they are damaged, or of another number of records
    contents = {prefix + name: content for name, content in index_files(numbers).items()}
    return any(
        file_entry(entry.path, contents[entry.path]).xxh3_128 == xxh3_file(root / entry.path) for entry in differing
    )


def _only_in(manifest: Manifest, other: Manifest) -> list[FileEntry]:
    """Files of a manifest that the other does not have, or has with other bytes."""
    others = {entry.path: entry for entry in other.files}
    return [entry for entry in manifest.files if others.get(entry.path) != entry]


def _share_there(root: Path, entries: Sequence[FileEntry]) -> float:
    num_there = sum(_is_there(root / entry.path, entry) for entry in entries)
    return num_there / max(1, len(entries))


def _is_there(path: Path, entry: FileEntry) -> bool:
    try:
        return path.is_file() and path.stat().st_size == entry.bytes and xxh3_file(path) == entry.xxh3_128
    except OSError:
        return False


def _intact_table(root: Path, revision: int, name: str, entry: FileEntry) -> Path | None:
    """The copy of a table of a revision that has the bytes of an entry."""
    prefix = root / revision_prefix(revision)
    return next((path for path in (prefix / name, prefix / TWIN / name) if _is_there(path, entry)), None)


def _num_rows(path: Path) -> int:
    try:
        return pq.read_metadata(path).num_rows
    except (pa.ArrowException, OSError):
        return -1
