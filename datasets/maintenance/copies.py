"""Which of two intact copies of a revision's files is right: one of them may belong to another store.

A copy carries its own hash, so a manifest of another store looks as intact as the right one. What else is in the store
decides: the revisions before and after, the tables, the index, and the shards. If these disagree, or say nothing, no
copy is right, and nothing is overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from ..disk.hashing import xxh3_file
from ..errors import LeanditError
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
    evidence = (_fits_chain, _share_of_tables, _share_of_index, _share_of_shards)
    return _decided(copies, [lambda one, other, about=about: about(root, one, other) for about in evidence])


def right_local(root: Path, revision: int, manifest: Manifest | None) -> LocalFile | Undecided | None:
    """``local.json`` of a revision, as ``right_manifest``.

    Args:
      manifest: of the revision, if it is known.
    """
    copies = intact_copies(read_local_file, root, revision)
    if len(copies) < 2 or copies[0].sources == copies[1].sources:
        return copies[0] if copies else None

    def has_table(one: LocalFile, _: LocalFile) -> float:
        return float(_intact_table(root, revision, SOURCES, one.sources) is not None)

    def has_rows(one: LocalFile, _: LocalFile) -> float:
        table = _intact_table(root, revision, SOURCES, one.sources)
        return float(manifest is not None and table is not None and _num_rows(table) == manifest.num_planned)

    return _decided(copies, [has_table, has_rows])


def _decided(copies: Sequence[File], evidence: Iterable[Callable[[File, File], float]]) -> File | Undecided:
    """The copy for which all evidence speaks that speaks for either.

    Args:
      evidence: functions of a copy and the other, whose value is higher for the right one, or equal for both.
    """
    one, other = copies
    favoured = set[int]()
    for about in evidence:
        values = about(one, other), about(other, one)
        if values[0] != values[1]:
            favoured.add(0 if values[0] > values[1] else 1)
    return copies[favoured.pop()] if len(favoured) == 1 else UNDECIDED


def _fits_chain(root: Path, one: Manifest, _: Manifest) -> float:
    """How many of the revisions before and after it fit to a manifest."""
    before = {manifest.root_hash for manifest in intact_copies(read_manifest, root, one.revision - 1)}
    after = {manifest.base for manifest in intact_copies(read_manifest, root, one.revision + 1) if not manifest.copies}
    return float(not one.copies and one.base in before) + float(one.root_hash in after)


def _share_of_tables(root: Path, one: Manifest, _: Manifest) -> float:
    """Whether the records table of a manifest is there, in either copy."""
    path = revision_prefix(one.revision) + RECORDS
    entry = next(entry for entry in one.files if entry.path == path)
    return float(_intact_table(root, one.revision, RECORDS, entry) is not None)


def _share_of_index(root: Path, one: Manifest, other: Manifest) -> float:
    """Share of the files of the index that a manifest names, and the other does not, which are there."""
    prefix = f"{revision_prefix(one.revision)}{INDEX}/"
    return _share_there(root, [entry for entry in _only_in(one, other) if entry.path.startswith(prefix)])


def _share_of_shards(root: Path, one: Manifest, other: Manifest) -> float:
    """Share of the shards that a manifest names, and the other does not, which are there; some are looked at."""
    shards = [entry for entry in _only_in(one, other) if "/c/" in entry.path]
    return _share_there(root, [shards[i] for i in spread(len(shards), MOST_SHARDS)])


def _has_other_index(root: Path, one: Manifest) -> bool:
    """Whether the index that is there is of other tables than those of a manifest.

    So it is if no file of it is as the manifest says, or if one that is not follows from another table of records.
    """
    prefix = f"{revision_prefix(one.revision)}{INDEX}/"
    entries = [entry for entry in one.files if entry.path.startswith(prefix) and (root / entry.path).is_file()]
    differing = [entry for entry in entries if not _is_there(root / entry.path, entry)]
    if not differing:
        return False
    if not any(entry.bytes for entry in entries if entry not in differing):
        return True
    return any(_follows_from(root, one, folder, differing) for folder in ("", f"{TWIN}/"))


def _follows_from(root: Path, one: Manifest, folder: str, differing: Sequence[FileEntry]) -> bool:
    """Whether one of some files of the index has the content that follows from the tables in a folder."""
    prefix = revision_prefix(one.revision)
    try:
        numbers = build_index(
            one.spec,
            one.layouts(),
            one.num_planned,
            one.num_captions,
            lambda name, columns: read_batches(root / f"{prefix}{folder}{name}", columns),
        )
    except (LeanditError, pa.ArrowException, OSError, ValueError, LookupError):
        return False  # they are damaged, or of another number of records
    contents = {prefix + name: content for name, content in index_files(numbers).items()}
    return any(
        file_entry(entry.path, contents[entry.path]).xxh3_128 == xxh3_file(root / entry.path) for entry in differing
    )


def _only_in(one: Manifest, other: Manifest) -> list[FileEntry]:
    """Files of a manifest that the other does not have, or has with other bytes."""
    others = {entry.path: entry for entry in other.files}
    return [entry for entry in one.files if others.get(entry.path) != entry]


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
