"""Prove that a store holds the bytes that were written: every file against its size and hash, every stray named.

Quick: sizes of all files, hashes of all but the shards, and that the records add up. Full: every byte. A finding names
the file, its bucket and shard, the records in it that differ, and the cause; ``repair.py`` undoes what it can. Of a
revision that is not finished, what is committed is checked, by its commit records.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from ..disk.hashing import canonical_json, read_json, sha256_of, xxh3_file
from ..disk.owners import is_temporary
from ..errors import DamageError, LeanditError
from ..format.layout import CAPTIONS, LEASES, MANIFEST, PLAN, PLAN_FILE, RECORDS, commit_path, revision_prefix
from ..format.schema import FileEntry, Manifest
from ..revisions.catalog import check_store, sealed_revisions
from ..revisions.commits import CommitFiles, file_entry, read_commit, read_manifest, read_record, seal_files
from ..revisions.plan import FrozenPlan, planned_revisions, read_plan
from .findings import CAUSES, HARMLESS, Finding, Locator, revision_of, shard_place


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


Problem = tuple[str, str]
"""Cause and detail of a problem with a file."""


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
    revisions = [_expect_revision(root, revision, sealed) for revision in sorted({*planned, *sealed})]
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


class _Expected(NamedTuple):
    """The files that a revision should have.

    Args:
      manifest: the sealed one, or the one that plan and commit records give; None while shards are missing.
      entries: size and hash of its files, by path.
      unlisted: paths of files that no manifest lists.
      findings: problems of plan, manifest and commit records.
    """

    manifest: Manifest | None
    entries: dict[str, FileEntry]
    unlisted: set[str]
    findings: list[Finding]


def _expect_revision(root: Path, revision: int, sealed: list[int]) -> _Expected:
    """Read a revision's files from its manifest; without an intact one, from its plan and commit records."""
    findings, manifest, plan = _check_plan(root, revision), None, None
    is_plan_intact = not findings
    if revision in sealed:
        manifest, problems = _sealed_manifest(root, revision)
        findings += problems
    if manifest is None and is_plan_intact and (plan := _intact_plan(root, revision)):
        manifest, problems = _unsealed_manifest(root, plan, sealed)
        findings += problems
    if manifest:
        return _Expected(manifest, {entry.path: entry for entry in manifest.files}, _unlisted(revision), findings)
    if plan is None:
        return _Expected(None, {}, _unlisted(revision), findings)
    entries, problems = _committed_files(root, plan)
    return _Expected(None, entries, _unlisted(revision) | _planned_paths(plan), findings + problems)


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


def _check_plan(root: Path, revision: int) -> list[Finding]:
    """Damage in the folder of a plan."""
    folder = revision_prefix(revision) + PLAN
    head_path = f"{folder}/{PLAN_FILE}"
    try:
        if (root / head_path).is_symlink():
            return [Finding(head_path, "link", CAUSES["link"], revision)]
        raw = (root / head_path).read_bytes()
        head = read_json(root / head_path)
        body = {key: value for key, value in head.items() if key != "sha256"} if isinstance(head, dict) else None
        if body is None or head["sha256"] != sha256_of(body) or raw != canonical_json(head):
            raise DamageError("it does not match its own hash")
        findings = []
        for name, entry in zip((RECORDS, CAPTIONS), head["files"], strict=True):
            _, problem = check_file(root, FileEntry(**entry | {"path": f"{folder}/{name}"}), False)
            if problem:
                findings.append(Finding(f"{folder}/{name}", *problem, revision))
        return findings
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return [Finding(head_path, "missing", CAUSES["missing"], revision)]
    except (DamageError, KeyError, TypeError, ValueError, OSError) as error:
        return [Finding(head_path, "content", f"it differs from what was written ({error})", revision)]


def _intact_plan(root: Path, revision: int) -> FrozenPlan | None:
    """A plan with intact files; None if this release cannot read it."""
    try:
        return read_plan(root, revision)
    except LeanditError:
        return None


def _sealed_manifest(root: Path, revision: int) -> tuple[Manifest | None, list[Finding]]:
    """The manifest of a revision; None if it is damaged."""
    path = revision_prefix(revision) + MANIFEST
    try:
        manifest = read_manifest(root, revision)
        if (root / path).is_symlink():
            return manifest, [Finding(path, "link", CAUSES["link"], revision)]
        if (root / path).read_bytes() != canonical_json(manifest.model_dump()):
            return manifest, [Finding(path, "content", CAUSES["content"], revision)]
        return manifest, []
    except (LeanditError, OSError) as error:
        return None, [Finding(path, "content", str(error), revision)]


def _unsealed_manifest(root: Path, plan: FrozenPlan, sealed: list[int]) -> tuple[Manifest | None, list[Finding]]:
    """The manifest that plan and commit records give; None while shards are missing."""
    if not all(read_commit(root, plan, *task) for task in plan.layout.tasks()):
        return None, []  # unfinished, or too much is missing
    manifest = seal_files(plan, CommitFiles(root, plan))[1]
    if plan.revision in sealed:
        return manifest, []
    prefix = revision_prefix(plan.revision)
    if plan.revision > max(sealed, default=0):  # after a crash in the seal the tables may be missing
        cause, own = "unsealed", {prefix + RECORDS, prefix + CAPTIONS}
        entries = [e for e in manifest.files if e.path not in own or os.path.lexists(root / e.path)]
        manifest = manifest.model_copy(update={"files": entries})
    else:
        cause = "missing"
    return manifest, [Finding(prefix + MANIFEST, cause, CAUSES[cause], plan.revision)]


def _committed_files(root: Path, plan: FrozenPlan) -> tuple[dict[str, FileEntry], list[Finding]]:
    """Files of an unfinished revision that its commit records name, and the records themselves.

    An invalid record is reported, although it loses nothing: its shard is encoded again.
    """
    entries, findings = {}, []
    for path, content in plan.layout.static_files().items():
        if (root / path).is_file():  # else not yet written
            entries[path] = file_entry(path, content)
    for task in plan.layout.tasks():
        path = commit_path(plan.revision, *task)
        record = read_record(root, plan, *task)
        if record:
            entries |= {entry.path: entry for entry in record.files}
            entries[path] = file_entry(path, canonical_json(record.model_dump()))
        elif os.path.lexists(root / path):
            findings.append(
                Finding(path, "content", "it does not match its own hash, or belongs to another plan", plan.revision)
            )
    return entries, findings


def _unlisted(revision: int) -> set[str]:
    """Files of a revision that no manifest lists: its plan and the manifest itself."""
    prefix = revision_prefix(revision)
    return {f"{prefix}{PLAN}/{name}" for name in (PLAN_FILE, RECORDS, CAPTIONS)} | {prefix + MANIFEST}


def _planned_paths(plan: FrozenPlan) -> set[str]:
    """All files that an unfinished revision will have, written or not."""
    layout = plan.layout
    paths = set(layout.static_files()) | {layout.prefix + name for name in (RECORDS, CAPTIONS)}
    paths |= {commit_path(plan.revision, *task) for task in layout.tasks()}
    return paths | {array.shard_path(s) for array in layout.arrays.values() for s in range(array.num_shards)}


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


def _strays(paths: Iterable[str], known: set[str]) -> Iterator[Finding]:
    """Files that belong to no revision; temporaries are reported as such."""
    for path in paths:
        *folders, name = path.split("/")
        is_litter = any(is_temporary(part, is_folder=True) for part in folders) or is_temporary(name, is_folder=False)
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
