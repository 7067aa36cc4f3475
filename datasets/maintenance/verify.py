"""Prove that a store holds the bytes that were written: every file against its size and hash, every stray named.

Quick: sizes of all files, hashes of all but the shards, and that the records add up. Full: every byte. A finding names
the file, its bucket and shard, the records in it that differ, and the cause; ``repair.py`` undoes what it can. Of a
revision that is not finished, what is committed is checked, by its commit records.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..disk.owners import is_temporary
from ..format.layout import HUB_CACHE, HUB_FILES, LEASES, RECORDS, revision_prefix
from ..format.schema import FileEntry, Manifest
from ..revisions.catalog import check_store, sealed_revisions
from ..revisions.plan import planned_revisions
from .expected import Problem, check_file, expect_revision
from .findings import CAUSES, HARMLESS, Finding, Locator, revision_of


@dataclass
class Verification:
    """Result of a verification.

    Args:
      complete: the newest planned revision is sealed.
      revisions: complete ones, in order.
      num_files, num_bytes: files checked, bytes hashed.
      expected: size and hash of every file, by path.
    """

    store: str
    mode: str
    complete: bool
    revisions: list[int]
    num_files: int = 0
    num_bytes: int = 0
    num_records: int = 0
    seconds: float = 0.0
    findings: list[Finding] = field(default_factory=list)
    expected: dict[str, FileEntry] = field(default_factory=dict, repr=False)

    @property
    def damaged(self) -> bool:
        """Some finding is more than litter."""
        return any(finding.cause not in HARMLESS for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Plain values, as ``--json`` prints them."""
        values = {name: value for name, value in vars(self).items() if name not in ("expected", "findings")}
        return values | {
            "findings": [asdict(finding) for finding in self.findings],
            "damaged": self.damaged,
            "mib_per_second": round(self.mib_per_second, 1),
        }

    @property
    def mib_per_second(self) -> float:
        """MiB hashed a second."""
        return self.num_bytes / 2**20 / max(self.seconds, 1e-9)


def verify_store(
    root: Path,
    *,
    quick: bool = False,
    num_threads: int = 4,
    check: Callable[[FileEntry], tuple[int, Problem | None]] | None = None,
    paths: Iterable[str] | None = None,
) -> Verification:
    """Check a store against its manifests.

    Args:
      quick: sizes of all files, hashes of all but the shards.
      check: for a store whose shards are elsewhere: returns the bytes it hashed of a file, and the problem.
      paths: for such a store: all its files.
    Raises: StoreError: it is not a store.
    """
    start = time.perf_counter()
    planned, sealed = planned_revisions(root), sealed_revisions(root)
    if not planned:
        check_store(root)
    revisions = [expect_revision(root, revision, sealed) for revision in sorted({*planned, *sealed})]
    manifests = {one.manifest.revision: one.manifest for one in revisions if one.manifest}
    expected = {path: entry for one in revisions for path, entry in one.entries.items()}
    known = expected.keys() | {path for one in revisions for path in one.unlisted}
    findings = [finding for one in revisions for finding in one.findings]

    check = check or (lambda entry: check_file(root, entry, quick))
    num_bytes, wrong_files = _check_files(expected.values(), check, Locator(root, manifests), num_threads)
    findings += wrong_files
    damaged = {finding.path for finding in findings}
    for manifest in manifests.values():
        if (records := revision_prefix(manifest.revision) + RECORDS) in expected and records not in damaged:
            findings += _check_counts(root, manifest)
    findings += _strays(_files_below(root) if paths is None else paths, known)
    return Verification(
        store=str(root),
        mode="quick" if quick else "full",
        complete=bool(sealed) and sealed[-1] == max([*planned, *sealed]),
        revisions=sealed,
        num_files=len(known),
        num_bytes=num_bytes,
        num_records=manifests[max(manifests)].num_planned if manifests else 0,
        seconds=time.perf_counter() - start,
        findings=sorted(findings, key=lambda finding: finding.path),
        expected=expected,
    )


def _check_files(
    entries: Collection[FileEntry],
    check: Callable[[FileEntry], tuple[int, Problem | None]],
    locator: Locator,
    num_threads: int,
) -> tuple[int, list[Finding]]:
    """Check files in threads. Returns: bytes hashed, findings."""
    with ThreadPoolExecutor(num_threads, thread_name_prefix="leandit-verify") as pool:
        checked = list(zip(entries, pool.map(check, entries), strict=True))
    findings = [locator.finding(entry, *problem) for entry, (_, problem) in checked if problem]
    return sum(num_bytes for _, (num_bytes, _) in checked), findings


def _check_counts(root: Path, manifest: Manifest) -> list[Finding]:
    """Check that planned = stored + rejected, as in the manifest."""
    path = revision_prefix(manifest.revision) + RECORDS
    try:
        with pq.ParquetFile(root / path) as file:
            statuses = file.read(columns=["status"])["status"]
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        return [Finding(path, "content", f"not a records table ({error})", manifest.revision)]
    counts = {entry["values"]: entry["counts"] for entry in statuses.value_counts().to_pylist()}
    found = (len(statuses), counts.get("stored", 0), counts.get("rejected", 0))
    wanted = (manifest.num_planned, manifest.num_stored, manifest.num_rejected)
    if found == wanted and wanted[0] == wanted[1] + wanted[2]:
        return []
    detail = f"(planned, stored, rejected) are {found}, the manifest says {wanted}"
    return [Finding(path, "counts", detail, manifest.revision)]


def _strays(paths: Iterable[str], known: set[str]) -> Iterator[Finding]:
    """Files that belong to no revision, nor to a repository of a hub; temporaries are reported as such."""
    for path in paths:
        *folders, name = path.split("/")
        is_litter = any(is_temporary(part, is_folder=True) for part in folders) or is_temporary(name, is_folder=False)
        if path in HUB_FILES or path.startswith(HUB_CACHE):
            continue
        if path in known and not is_litter:
            continue
        cause = "temporary" if is_litter else "stray"
        yield Finding(path.rstrip("/"), cause, CAUSES[cause], revision_of(path))


def _files_below(root: Path) -> Iterator[str]:
    """Paths of all files and links, without leases; a temporary folder counts as one path that ends with a slash."""
    top = os.fspath(root)
    for folder, folders, files in os.walk(top):
        here = "" if folder == top else os.path.relpath(folder, top).replace(os.sep, "/") + "/"
        if not here and LEASES in folders:
            folders.remove(LEASES)
        litter = [name for name in folders if is_temporary(name, is_folder=True)]
        folders[:] = [name for name in folders if name not in litter]
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        yield from (here + name for name in (*files, *links, *(f"{name}/" for name in litter)))
