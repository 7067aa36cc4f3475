"""The files that a revision should have: from its manifest, or from its plan and commit records."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import NamedTuple

from ..disk.hashing import canonical_json, read_json, sha256_of, xxh3_file
from ..errors import DamageError, LeanditError
from ..format.layout import CAPTIONS, MANIFEST, PLAN, PLAN_FILE, RECORDS, commit_path, revision_prefix
from ..format.schema import FileEntry, Manifest
from ..revisions.commits import file_entry, read_commit, read_manifest, read_record, seal_files
from ..revisions.plan import FrozenPlan, read_plan
from .findings import CAUSES, Finding, shard_place

Problem = tuple[str, str]
"""Cause and detail of a problem with a file."""


class ExpectedFiles(NamedTuple):
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


def expect_revision(root: Path, revision: int, sealed: list[int]) -> ExpectedFiles:
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
        return ExpectedFiles(manifest, {entry.path: entry for entry in manifest.files}, _unlisted(revision), findings)
    if plan is None:
        return ExpectedFiles(None, {}, _unlisted(revision), findings)
    entries, problems = _committed_files(root, plan)
    return ExpectedFiles(None, entries, _unlisted(revision) | _planned_paths(plan), findings + problems)


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
    manifest = seal_files(root, plan)[1]
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
