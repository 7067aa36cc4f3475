"""Repair without encoding: of each small file that is written twice, the intact copy replaces the damaged one.

``zarr.json`` files follow from the manifest. Shards are encoded again by ``precompute/repair.py``.
"""

from __future__ import annotations

from pathlib import Path

from ..disk.files import remove, write_atomic
from ..disk.hashing import xxh3_file
from ..disk.strays import sweep_strays
from ..errors import LeanditError, StoreError
from ..format.layout import COMMITS, TWIN, revision_of, revision_prefix
from ..revisions.catalog import planned_revisions, sealed_revisions
from ..revisions.plan import read_plan
from ..revisions.seal import finish_seal, write_zarr_files
from ..revisions.writer import StoreWriter
from .findings import Finding, shard_place
from .verify import Verification, intact_manifest, verify_store


def repair_without_encoding(root: Path, found: Verification) -> Verification:
    """Repair everything that needs no encoder, and remove temporaries of killed processes.

    Args:
      found: a verification of the store.
    Returns: a verification after the repair.
    Raises: StoreError: a folder with files replaces a file of the store; then nothing is changed.
    """
    _clear_obstructions(root, found)
    remove_litter(root)
    for finding in found.findings:
        if finding.cause not in ("stray", "temporary") and not shard_place(finding.path):
            _restore_copy(root, finding, found)
    for revision in planned_revisions(root):
        _repair_unfinished(root, revision, found)
    manifests = [(revision, intact_manifest(root, revision)) for revision in sealed_revisions(root)]
    for _, manifest in manifests:
        if manifest:
            finish_seal(root, manifest)
    if manifests and manifests[-1][1]:
        write_zarr_files(root, manifests[-1][1])
    return verify_store(root)


def remove_litter(root: Path) -> list[Path]:
    """Remove the temporaries of all processes; only safe while nothing writes to the store."""
    return sweep_strays(root, of_all=True)


def _clear_obstructions(root: Path, found: Verification) -> None:
    """Replace links and empty folders in place of a file of the store."""
    for finding in found.findings:
        path = root / finding.path
        if finding.cause in ("missing", "content") and path.is_dir() and not path.is_symlink():
            if any(inner.is_symlink() or not inner.is_dir() for inner in path.rglob("*")):
                raise StoreError(
                    f"store '{root}': '{finding.path}' is a folder with files; needed a file. "
                    "Nothing was changed. Move the folder out of the store, then repair again."
                )
            remove(path)
        elif finding.cause == "link":
            entry = found.expected.get(finding.path)
            is_intact = entry is not None and path.is_file() and xxh3_file(path) == entry.xxh3_128
            if is_intact:
                write_atomic(path, path.read_bytes())
            elif not shard_place(finding.path):
                remove(path)  # the target stays; the file is restored


def _restore_copy(root: Path, finding: Finding, found: Verification) -> None:
    """Write a damaged file of a revision again from its other copy, if that is intact."""
    revision, entry = revision_of(finding.path), found.expected.get(finding.path)
    if revision is None or entry is None:
        return
    prefix = revision_prefix(revision)
    name = finding.path.removeprefix(prefix)
    other = root / prefix / (name.removeprefix(f"{TWIN}/") if name.startswith(f"{TWIN}/") else f"{TWIN}/{name}")
    if other.is_file() and xxh3_file(other) == entry.xxh3_128:
        write_atomic(root / finding.path, other.read_bytes())


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
    except LeanditError:
        return  # the plan is damaged, or a record of it: the finding says what to do
