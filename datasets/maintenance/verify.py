"""Prove that a store holds the bytes that were written: every file against its size and hash, every stray named.

Quick: sizes of all files, hashes of all but the shards, and that the records add up. Full: every byte. A finding names
the file, its bucket and shard, the records in it that differ, and the cause; ``repair.py`` undoes what it can. Of a
revision that is not finished, what is committed is checked, by its commit records.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from ..disk.hashing import canonical_json, xxh3_file
from ..disk.owners import is_temporary
from ..errors import LeanditError
from ..format.layout import (
    CAPTIONS,
    COMMITS,
    HUB_CACHE,
    HUB_FILES,
    LEASES,
    LOCAL,
    MANIFEST,
    PLAN,
    PLAN_FILE,
    RECORDS,
    SOURCES,
    TWIN,
    commit_path,
    revision_of,
    revision_prefix,
    zarr_files,
)
from ..format.schema import FileEntry, LocalFile, Manifest
from ..revisions.catalog import check_store, file_entry, planned_revisions, read_manifest, sealed_revisions
from ..revisions.commits import read_commit
from ..revisions.local import intact_locals, read_local_file
from ..revisions.plan import read_plan
from .findings import CAUSES, HARMLESS, Finding, Locator, shard_place

Problem = tuple[str, str]
"""Cause and detail of a problem with a file."""
_Copy = TypeVar("_Copy", Manifest, LocalFile)


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


@dataclass
class _Expected:
    """What a store should hold.

    Args:
      entries: size and hash of files, by path.
      unhashed: other files that belong to it.
      findings: problems of files that carry their own hash.
    """

    entries: dict[str, FileEntry] = field(default_factory=dict)
    unhashed: set[str] = field(default_factory=set)
    findings: list[Finding] = field(default_factory=list)


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
    expected, manifests = _Expected(), dict[int, Manifest]()
    for revision in sealed:
        if manifest := _expect_sealed(root, revision, expected):
            manifests[revision] = manifest
    for revision in planned:
        _expect_unfinished(root, revision, expected)
    if manifests:
        newest = manifests[max(manifests)]
        for path, content in zarr_files(newest.spec, newest.layouts().values()).items():
            expected.entries.setdefault(path, file_entry(path, content))

    check = check or (lambda entry: check_file(root, entry, quick))
    num_bytes, wrong_files = _check_files(expected.entries.values(), check, Locator(root, manifests), num_threads)
    findings = [*expected.findings, *wrong_files]
    damaged = {finding.path for finding in findings}
    for manifest in manifests.values():
        if revision_prefix(manifest.revision) + RECORDS not in damaged:
            findings += _check_counts(root, manifest)
    known = expected.entries.keys() | expected.unhashed
    findings += _strays(_files_below(root) if paths is None else paths, known, sealed)
    return Verification(
        store=str(root),
        mode="quick" if quick else "full",
        complete=bool(sealed) and not planned,
        revisions=sealed,
        num_files=len(known),
        num_bytes=num_bytes,
        num_records=manifests[max(manifests)].num_planned if manifests else 0,
        seconds=time.perf_counter() - start,
        findings=sorted(findings, key=lambda finding: finding.path),
        expected=expected.entries,
    )


def intact_manifest(root: Path, revision: int) -> Manifest | None:
    """The manifest of a revision, or its second copy; None if both are damaged.

    Where both are intact and differ, one is of another store: then the one whose records table is there.
    """
    found = []
    for twin in (False, True):
        with contextlib.suppress(LeanditError, OSError):
            found.append(read_manifest(root, revision, twin=twin))
    table = revision_prefix(revision) + RECORDS
    return _fitting(root, found, lambda one: next(entry for entry in one.files if entry.path == table))


def _intact_local(root: Path, revision: int) -> LocalFile | None:
    """``local.json`` likewise, by the table of the images' places."""
    return _fitting(root, intact_locals(root, revision), lambda one: one.sources)


def _fitting(root: Path, copies: Sequence[_Copy], table_of: Callable[[_Copy], FileEntry]) -> _Copy | None:
    """The first of the intact copies of a file; of two that differ, the one whose table is there."""
    if len(copies) < 2 or copies[0] == copies[1]:
        return copies[0] if copies else None
    for one in copies:
        folder, _, name = table_of(one).path.rpartition("/")
        for path in (root / folder / name, root / folder / TWIN / name):
            if path.is_file() and xxh3_file(path) == table_of(one).xxh3_128:
                return one
    return copies[0]


def _expect_sealed(root: Path, revision: int, expected: _Expected) -> Manifest | None:
    """Files of a sealed revision: its shards, and each of its own files twice."""
    prefix, manifest, local = revision_prefix(revision), intact_manifest(root, revision), _intact_local(root, revision)
    of_revision: dict[str, FileEntry] = {}
    if manifest:
        content = canonical_json(manifest.model_dump())
        of_revision[MANIFEST] = file_entry(MANIFEST, content)
        expected.entries |= {entry.path: entry for entry in manifest.files}
        of_revision |= {name: expected.entries[prefix + name] for name in (RECORDS, CAPTIONS)}
    if local:
        of_revision[LOCAL] = file_entry(LOCAL, canonical_json(local.model_dump()))
        of_revision[SOURCES] = local.sources
    is_finishing = (root / f"{prefix}{PLAN}/{PLAN_FILE}").is_file()  # else the second manifest was written long ago
    for name in (MANIFEST, RECORDS, CAPTIONS, SOURCES, LOCAL):
        for path in (prefix + name, f"{prefix}{TWIN}/{name}"):
            if is_finishing and path == f"{prefix}{TWIN}/{MANIFEST}" and not (root / path).exists():
                continue
            if entry := of_revision.get(name):
                expected.entries[path] = entry.model_copy(update={"path": path})
            else:
                expected.unhashed.add(path)
                expected.findings.append(_own_problem(root, path, revision))
    return manifest


def _own_problem(root: Path, path: str, revision: int) -> Finding:
    """The finding of a file of which no intact copy tells the hash."""
    if not os.path.lexists(root / path):
        return Finding(path, "missing", CAUSES["missing"], revision)
    detail = "neither copy of it is intact"
    try:
        if path.endswith(LOCAL):
            read_local_file(root / path, revision)
        elif path.endswith(MANIFEST):
            read_manifest(root, revision, twin=f"/{TWIN}/" in path)
        else:
            detail = "the file that names its hash is damaged, in both copies"
    except (LeanditError, OSError) as error:
        detail = str(error)
    return Finding(path, "content", detail, revision)


def _expect_unfinished(root: Path, revision: int, expected: _Expected) -> None:
    """Files of an unfinished revision that its commit records name, and the records themselves.

    An invalid record is reported, although it loses nothing: its shard is encoded again.
    """
    prefix = revision_prefix(revision)
    expected.unhashed |= {f"{prefix}{PLAN}/{name}" for name in (PLAN_FILE, RECORDS, CAPTIONS)}
    try:
        plan = read_plan(root, revision)
    except (LeanditError, OSError) as error:
        expected.findings.append(Finding(f"{prefix}{PLAN}/{PLAN_FILE}", "content", str(error), revision))
        return
    for path, content in plan.zarr_files().items():
        if (root / path).is_file():  # else not yet written; a seal that was interrupted has written them
            entry = file_entry(path, content)
            if plan.before is None or xxh3_file(root / path) == entry.xxh3_128:
                expected.entries[path] = entry
    is_whole = True
    for part, shard in plan.layout.tasks():
        path = commit_path(revision, part, shard)
        expected.unhashed |= {array.shard_path(shard) for array in plan.layout.parts[part].arrays}
        expected.unhashed |= {path, path.replace(".json", ".rows")}
        if record := read_commit(root, plan, part, shard, check_files=False):
            expected.entries |= {entry.path: entry for entry in record.files}
            expected.entries[path] = file_entry(path, canonical_json(record.model_dump()))
        else:
            is_whole = False
            if os.path.lexists(root / path):
                detail = "it does not match its own hash, or belongs to another plan"
                expected.findings.append(Finding(path, "content", detail, revision))
    names = (RECORDS, CAPTIONS, SOURCES, LOCAL, MANIFEST)  # a seal that was interrupted may have written some
    expected.unhashed |= {f"{prefix}{folder}{name}" for name in names for folder in ("", f"{TWIN}/")}
    if is_whole:
        expected.findings.append(Finding(prefix + MANIFEST, "unsealed", CAUSES["unsealed"], revision))


def check_file(root: Path, entry: FileEntry, quick: bool) -> tuple[int, Problem | None]:
    """Check a file by size and hash. Returns: bytes hashed, and the problem if there is one."""
    path = os.path.join(root, entry.path)
    try:
        found = os.lstat(path)
        if stat.S_ISLNK(found.st_mode):
            return 0, ("link", CAUSES["link"])
        if not stat.S_ISREG(found.st_mode):
            return 0, ("missing", "not a regular file")
        if found.st_size != entry.bytes:
            return 0, ("size", f"{found.st_size} bytes, {entry.bytes} were written")
        if quick and shard_place(entry.path):
            return 0, None
        same = xxh3_file(path) == entry.xxh3_128
        return found.st_size, None if same else ("content", CAUSES["content"])
    except (FileNotFoundError, NotADirectoryError):
        return 0, ("missing", CAUSES["missing"])
    except OSError as error:
        return 0, ("content", f"it cannot be read: {error.strerror}")


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


def _strays(paths: Iterable[str], known: Collection[str], sealed: Collection[int]) -> Iterator[Finding]:
    """Files that belong to no revision, nor to a repository of a hub; temporaries are reported as such."""
    for path in paths:
        *folders, name = path.split("/")
        is_litter = any(is_temporary(part, is_folder=True) for part in folders) or is_temporary(name, is_folder=False)
        if path in HUB_FILES or path.startswith(HUB_CACHE) or (path in known and not is_litter):
            continue
        is_litter |= folders[2:3] in ([PLAN], [COMMITS]) and revision_of(path) in sealed  # of an interrupted seal
        cause = "temporary" if is_litter else "stray"
        yield Finding(path.rstrip("/"), cause, CAUSES[cause], revision_of(path) or 1)


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
