"""Prove that a store holds the bytes that were written: every file against its size and hash, every stray named.

Quick: sizes of all files, hashes of all but the shards, and that the records add up. Full: every byte. A finding names
the file, its bucket and shard, the records in it that differ, and the cause; ``repair.py`` undoes what it can. Of a
revision that is not finished, what is committed is checked, by its commit records.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ...errors import LeanditError, ResourceError
from ..disk.files import TEMPORARY_PREFIX
from ..disk.hashing import canonical_json, xxh3_file
from ..format.layout import (
    CAPTIONS,
    COMMITS,
    GROUP,
    HUB_CACHE,
    HUB_FILES,
    JOURNAL,
    LEASES,
    LOCAL,
    MANIFEST,
    PLAN,
    PLAN_FILE,
    RECORDS,
    SOURCES,
    TWIN,
    commit_path,
    index_path,
    revision_of,
    revision_prefix,
    zarr_files,
)
from ..format.row_layout import BUCKETS, CAPTION_PART
from ..format.schema import FileEntry, Manifest
from ..format.table_schemas import index_names
from ..revisions.catalog import (
    Link,
    broken_link,
    check_store,
    file_entry,
    intact_copies,
    lost_revisions,
    planned_revisions,
    read_manifest,
    sealed_revisions,
)
from ..revisions.commits import read_commit
from ..revisions.plan import read_plan
from .copies import UNDECIDED, right_local, right_manifest
from .findings import HARMLESS, Finding, Locator, shard_place

REVISION_FILES = (MANIFEST, RECORDS, CAPTIONS, SOURCES, LOCAL)
LATER_LOST = (
    "no revision names this shard or array, but the 'zarr.json' files are not those of the newest revision, so a later "
    "one may have been complete. Restore its folder in 'revisions'; to give it up, remove this file and repair"
)
TWO_STORES = (
    "an intact copy of it is of another store, and the other revisions, the index and the shards do not tell which. "
    "Nothing is overwritten. Remove what is of the other store, then repair again"
)
Problem = tuple[str, str]
"""Cause and detail of a problem with a file; an empty detail stands for that of the cause."""
Expected = dict[str, FileEntry | Finding | None]
"""What each file of a store should be, by path: its size and hash, what is wrong with it, or anything (None)."""


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
    paths = list(_files_below(root) if paths is None else paths)
    expected: Expected = {}
    lost = lost_revisions(root)
    manifests: dict[int, Manifest] = {}
    for revision in sorted([*sealed, *lost]):
        manifest = _expect_sealed(root, revision, expected)
        if manifest:
            manifests[revision] = manifest
    for revision in planned:
        _expect_unfinished(root, revision, expected)
    if manifests:
        newest = manifests[max(manifests)]
        for path, content in zarr_files(newest.spec, newest.layouts().values()).items():
            expected.setdefault(path, file_entry(path, content))

    check = check or (lambda entry: check_file(root, entry, quick))
    findings = [one for one in expected.values() if isinstance(one, Finding)]
    entries = {path: one for path, one in expected.items() if isinstance(one, FileEntry)}
    locator = Locator(root, manifests)
    with ThreadPoolExecutor(num_threads, thread_name_prefix="leandit-verify") as pool:
        checked = list(zip(entries.values(), pool.map(check, entries.values()), strict=True))
    findings += [locator.finding(entry, *problem) for entry, (_, problem) in checked if problem]
    damaged = {finding.path for finding in findings}
    for manifest in manifests.values():
        if revision_prefix(manifest.revision) + RECORDS not in damaged:
            findings += _check_counts(root, manifest)
    # Without a trace of another revision, what lies where shards lie was left by one that was given up.
    begun = {revision for path in paths if (revision := revision_of(path))}
    knows_all = bool(begun) and begun == manifests.keys()
    detail = LATER_LOST if is_later_lost(findings) else ""
    findings += _strays(paths, expected, sealed, knows_all=knows_all, detail=detail)
    findings += _check_chain(manifests, {*sealed, *lost})
    return Verification(
        store=str(root),
        mode="quick" if quick else "full",
        complete=bool(sealed) and not planned,
        revisions=sealed,
        num_files=len(expected),
        num_bytes=sum(num_bytes for _, (num_bytes, _) in checked),
        num_records=manifests[max(manifests)].num_planned if manifests else 0,
        seconds=time.perf_counter() - start,
        findings=sorted(findings, key=lambda finding: finding.path),
        expected=entries,
    )


def _check_chain(manifests: Mapping[int, Manifest], known: Collection[int]) -> list[Finding]:
    """Check that each revision was built on the one before it.

    Args:
      manifests: intact ones, by revision.
      known: all revisions of which there is a folder that was complete.
    """
    findings: list[Finding] = []
    for revision, manifest in manifests.items():
        before = manifests.get(revision - 1)
        link = Link(base=manifest.base, copies=manifest.copies, root_hash=manifest.root_hash)
        if before is not None:
            earlier = Link(base=before.base, copies=before.copies, root_hash=before.root_hash)
            if problem := broken_link(revision, link, earlier):
                findings += [
                    Finding(f"{revision_prefix(number)}{MANIFEST}", "chain", problem)
                    for number in (revision - 1, revision)
                ]
        elif revision > 1 and not manifest.copies and revision - 1 not in known:
            detail = f"revision {revision} was built on it, and its folder is lost. Restore it from a copy of the store"
            findings.append(Finding(f"{revision_prefix(revision - 1)}{MANIFEST}", "missing", detail))
    return findings


def is_later_lost(findings: Iterable[Finding]) -> bool:
    """Whether a revision after the newest one may have been complete, as its seal changes the ``zarr.json`` files."""
    return any(finding.path.rpartition("/")[2] == GROUP and finding.cause != "abandoned" for finding in findings)


def _expect_sealed(root: Path, revision: int, expected: Expected) -> Manifest | None:
    """Add the files of a sealed revision: its shards, and each of its own files twice."""
    prefix = revision_prefix(revision)
    manifest = right_manifest(root, revision)
    unclear: set[str] = set()  # files whose copies are of different stores
    if manifest == UNDECIDED:
        unclear |= {MANIFEST, RECORDS, CAPTIONS}
        for copy in intact_copies(read_manifest, root, revision):  # what either names is no stray file
            named = [*(entry.path for entry in copy.files), *zarr_files(copy.spec, copy.layouts().values())]
            expected |= {path: None for path in named if path not in expected}
        manifest = None
    local = right_local(root, revision, manifest)
    if local == UNDECIDED:
        unclear |= {LOCAL, SOURCES}
        local = None
    own: dict[str, FileEntry] = {}
    if manifest:
        files = {entry.path: entry for entry in manifest.files}
        expected |= files
        own = {name: files[prefix + name] for name in (RECORDS, CAPTIONS)}
        own[MANIFEST] = file_entry(MANIFEST, canonical_json(manifest.model_dump()))
    if local:
        own |= {LOCAL: file_entry(LOCAL, canonical_json(local.model_dump())), SOURCES: local.sources}
    is_single = not os.path.lexists(root / f"{prefix}{TWIN}")
    if is_single:
        expected[f"{prefix}{TWIN}"] = Finding(f"{prefix}{TWIN}", "single")
    is_finishing = (root / f"{prefix}{PLAN}/{PLAN_FILE}").is_file()  # else the second manifest was written long ago
    for path in [prefix + folder + name for name in REVISION_FILES for folder in ("", f"{TWIN}/")[: 2 - is_single]]:
        if is_finishing and path == f"{prefix}{TWIN}/{MANIFEST}" and not (root / path).exists():
            continue
        name = path.rpartition("/")[2]
        entry = own.get(name)
        if name in unclear and os.path.lexists(root / path):
            expected[path] = Finding(path, "content", TWO_STORES)
        elif entry:
            expected[path] = entry.model_copy(update={"path": path})
        elif os.path.lexists(root / path):
            expected[path] = Finding(path, "content", "damaged, or its hash is lost: neither copy is intact")
        else:
            expected[path] = Finding(path, "missing")
    return manifest


def _expect_unfinished(root: Path, revision: int, expected: Expected) -> None:
    """Add the files of an unfinished revision that its commit records name, and the records themselves.

    An invalid record is reported, although it loses nothing: its shard is encoded again.
    """
    prefix = revision_prefix(revision)
    expected |= dict.fromkeys(f"{prefix}{PLAN}/{name}" for name in (PLAN_FILE, RECORDS, CAPTIONS))
    try:
        plan = read_plan(root, revision)
    except ResourceError:  # says nothing about the plan
        raise
    except (LeanditError, OSError) as error:
        expected[f"{prefix}{PLAN}/{PLAN_FILE}"] = Finding(f"{prefix}{PLAN}/{PLAN_FILE}", "content", str(error))
        return
    for path, content in plan.zarr_files().items():
        if (root / path).is_file():  # else not yet written; a seal that was interrupted has written them
            entry = file_entry(path, content)
            if plan.before is None or xxh3_file(root / path) == entry.xxh3_128:
                expected[path] = entry
    # A seal that was interrupted may have written some of these.
    expected |= dict.fromkeys(f"{prefix}{folder}{name}" for name in REVISION_FILES for folder in ("", f"{TWIN}/"))
    expected |= dict.fromkeys(index_path(revision, name) for name in index_names(plan.spec))
    is_whole = True
    for part, shard in plan.layout.tasks():
        path = commit_path(revision, part, shard)
        if record := read_commit(root, plan, part, shard, check_files=False):
            expected |= {entry.path: entry for entry in record.files}
            expected[path] = file_entry(path, canonical_json(record.model_dump()))
            continue
        is_whole, shards = False, [array.shard_path(shard) for array in plan.layout.parts[part].arrays]
        expected |= dict.fromkeys([*shards, path, path.replace(".json", ".rows")])
        if os.path.lexists(root / path):
            expected[path] = Finding(path, "content", "it does not match its own hash, or belongs to another plan")
    if is_whole:
        expected[prefix + MANIFEST] = Finding(prefix + MANIFEST, "unsealed")


def check_file(root: Path, entry: FileEntry, quick: bool) -> tuple[int, Problem | None]:
    """Check a file by size and hash. Returns: bytes hashed, and the problem if there is one."""
    path = os.path.join(root, entry.path)
    try:
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            return 0, ("link", "")
        if not stat.S_ISREG(status.st_mode):
            return 0, ("missing", "not a regular file")
        if status.st_size != entry.bytes:
            return 0, ("size", f"{status.st_size} bytes, {entry.bytes} were written")
        if quick and shard_place(entry.path):
            return 0, None
        return status.st_size, None if xxh3_file(path) == entry.xxh3_128 else ("content", "")
    except (FileNotFoundError, NotADirectoryError):
        return 0, ("missing", "")
    except OSError as error:
        return 0, ("content", f"it cannot be read: {error.strerror}")


def _check_counts(root: Path, manifest: Manifest) -> list[Finding]:
    """Check that planned = stored + rejected, as in the manifest."""
    path = revision_prefix(manifest.revision) + RECORDS
    try:
        with pq.ParquetFile(root / path) as file:
            statuses = file.read(columns=["status"])["status"]
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        return [Finding(path, "content", f"not a records table ({error})")]
    counts = {entry["values"]: entry["counts"] for entry in statuses.value_counts().to_pylist()}
    counted = (len(statuses), counts.get("stored", 0), counts.get("rejected", 0))
    claimed = (manifest.num_planned, manifest.num_stored, manifest.num_rejected)
    if counted == claimed and claimed[0] == claimed[1] + claimed[2]:
        return []
    detail = f"(planned, stored, rejected) are {counted}, the manifest says {claimed}"
    return [Finding(path, "counts", detail)]


def _strays(
    paths: Iterable[str], expected: Expected, sealed: Collection[int], *, knows_all: bool, detail: str
) -> Iterator[Finding]:
    """Files that belong to no revision, nor to a repository of a hub; temporaries are reported as such.

    Args:
      knows_all: the manifests of all revisions of which there is a trace are intact.
      detail: of shards and arrays that no revision names; empty for that of their cause.
    """
    of_an_array = re.compile(rf"({BUCKETS}|{CAPTION_PART})/([\w/]+/)?{re.escape(GROUP)}")
    for path in paths:
        *folders, name = path.split("/")
        is_litter = any(part.startswith(TEMPORARY_PREFIX) for part in (*folders, name))
        if path in HUB_FILES or path.startswith(HUB_CACHE) or (path in expected and not is_litter):
            continue
        is_work = folders[2:3] in ([PLAN], [COMMITS], [JOURNAL])
        is_litter |= is_work and revision_of(path) in sealed  # of an interrupted seal
        is_abandoned = knows_all and (shard_place(path) or of_an_array.fullmatch(path))
        if is_litter:
            yield Finding(path.rstrip("/"), "temporary")
        elif is_abandoned:
            yield Finding(path, "abandoned", detail)
        else:
            yield Finding(path.rstrip("/"), "stray")


def _files_below(root: Path) -> Iterator[str]:
    """Paths of all files and links, without leases; a temporary folder counts as one path that ends with a slash."""
    top = os.fspath(root)
    for folder, folders, files in os.walk(top):
        parent = "" if folder == top else os.path.relpath(folder, top).replace(os.sep, "/") + "/"
        if not parent and LEASES in folders:
            folders.remove(LEASES)
        litter = [name for name in folders if name.startswith(TEMPORARY_PREFIX)]
        folders[:] = [name for name in folders if name not in litter]
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        yield from (parent + name for name in (*files, *links, *(f"{name}/" for name in litter)))
