"""Repair without encoding: of each small file that is written twice, the intact copy replaces the damaged one.

``zarr.json`` files follow from the manifest, the numbers that training reads from the tables. Shards of an unfinished
revision whose folder was removed to give it up are removed, unless a later revision may have been complete, or another
process writes to the store. Other shards are encoded again by ``precompute/remake.py``.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from ...errors import LeanditError, ResourceError, StoreError
from ..disk.files import remove, write_atomic
from ..disk.hashing import xxh3_file
from ..disk.strays import seconds_since_write
from ..format.layout import COMMITS, INDEX, LEASES, TWIN, revision_prefix
from ..format.schema import FileEntry, Manifest
from ..revisions.catalog import lost_revisions, planned_revisions, sealed_revisions, sweep_store
from ..revisions.plan import read_plan
from ..revisions.seal import finish_seal, write_index, write_zarr_files
from ..revisions.writer import StoreWriter
from .copies import UNDECIDED, right_manifest
from .findings import Finding, shard_place
from .verify import REVISION_FILES, Verification, is_later_lost, verify_store

ACTIVE_SECONDS = 60.0  # without a touch, after which a lease counts as that of a dead process


def repair_without_encoding(root: Path, found: Verification) -> Verification:
    """Repair everything that needs no encoder, and remove what killed processes left behind.

    Only safe while nothing writes to the store.

    Args:
      found: a verification of the store.
    Returns: a verification after the repair.
    Raises: StoreError: a folder with files replaces a file of the store; then nothing is changed.
    """
    for finding in found.findings:
        _clear_obstruction(root, finding, found.expected.get(finding.path))
    sweep_store(root, of_all=True)
    is_lost = is_later_lost(found.findings) or any(finding.cause == "chain" for finding in found.findings)
    if not is_lost and not _is_written(root):
        _remove_abandoned(root, found)
    for finding in found.findings:
        if finding.cause == "single":
            for name in REVISION_FILES:
                _restore_copy(
                    root, f"{finding.path}/{name}", found.expected.get(revision_prefix(finding.revision) + name)
                )
        elif finding.cause not in ("stray", "abandoned", "temporary") and not shard_place(finding.path):
            _restore_copy(root, finding.path, found.expected.get(finding.path))
    for revision in planned_revisions(root):
        _repair_unfinished(root, revision, found)
    manifests = [_manifest_of(root, revision) for revision in sealed_revisions(root)]
    for manifest in filter(None, manifests):
        finish_seal(root, manifest)
        index = revision_prefix(manifest.revision) + INDEX
        if any(finding.path.startswith(f"{index}/") for finding in found.findings):
            try:
                write_index(root, manifest)
            except ResourceError:
                raise
            except LeanditError:
                pass  # both copies of a table are lost: the finding says so
    # Where shards are left of a revision that may have been complete, these files are all that tells of it.
    tells_of_lost = is_lost and any(finding.cause in ("abandoned", "chain") for finding in found.findings)
    tells_of_lost |= bool(lost_revisions(root))
    if manifests and manifests[-1] and not tells_of_lost:
        write_zarr_files(root, manifests[-1])
    return verify_store(root)


def _manifest_of(root: Path, revision: int) -> Manifest | None:
    """The manifest of a revision; None if it is lost, or its two copies are of different stores."""
    manifest = right_manifest(root, revision)
    return None if manifest == UNDECIDED else manifest


def _is_written(root: Path) -> bool:
    """Whether a process may be encoding shards of the store: its leases are touched every few seconds."""
    for lease in (root / LEASES).glob("*.lock"):
        with contextlib.suppress(FileNotFoundError):
            if seconds_since_write(lease) < ACTIVE_SECONDS:
                return True
    return False


def _remove_abandoned(root: Path, found: Verification) -> None:
    """Remove shards and arrays that no revision names, and the folders that are empty then."""
    for finding in found.findings:
        if finding.cause != "abandoned":
            continue
        remove(root / finding.path)
        for folder in list((root / finding.path).relative_to(root).parents)[:-1]:
            try:
                (root / folder).rmdir()
            except OSError:
                break  # it holds other files


def _clear_obstruction(root: Path, finding: Finding, entry: FileEntry | None) -> None:
    """Replace a link or an empty folder in place of a file of the store."""
    path = root / finding.path
    if finding.cause in ("missing", "content") and path.is_dir() and not path.is_symlink():
        if any(inner.is_symlink() or not inner.is_dir() for inner in path.rglob("*")):
            raise StoreError(
                f"store '{root}': '{finding.path}' is a folder with files; expected a file. "
                "Nothing was changed. Move the folder out of the store, then repair again."
            )
        remove(path)
    elif finding.cause == "link":
        if entry and path.is_file() and xxh3_file(path) == entry.xxh3_128:
            write_atomic(path, path.read_bytes())
        elif not shard_place(finding.path):
            remove(path)  # the target stays; the file is restored


def _restore_copy(root: Path, path: str, entry: FileEntry | None) -> None:
    """Write a file of a revision again from its other copy, if that is intact."""
    folder, _, name = path.rpartition("/")
    other = root / (folder.removesuffix(f"/{TWIN}") if folder.endswith(f"/{TWIN}") else f"{folder}/{TWIN}") / name
    if entry and other.is_file() and xxh3_file(other) == entry.xxh3_128:
        write_atomic(root / path, other.read_bytes())


def _repair_unfinished(root: Path, revision: int, found: Verification) -> None:
    """Remove invalid commit records, whose shards are encoded again, and seal the revision if nothing is missing."""
    folder = f"{revision_prefix(revision)}{COMMITS}/"
    for finding in found.findings:
        if finding.path.startswith(folder):
            remove(root / finding.path)
    try:
        writer = StoreWriter(root, read_plan(root, revision))
        if not writer.missing_tasks() and (writer.num_stored or writer.plan.before):
            writer.seal()
    except ResourceError:
        raise
    except LeanditError:
        return  # the plan is damaged, or a record of it: the finding says what to do
