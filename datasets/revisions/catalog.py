"""The revisions of a store and their manifests; refuses folders that are not stores."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, TypeVar

from pydantic import ValidationError

from ...errors import (
    DamageError,
    FormatVersionError,
    LeanditError,
    ResourceError,
    StoreError,
    StoreIncomplete,
    StoreNotFound,
    StoreWarning,
)
from ..disk.faults import named_faults
from ..disk.hashing import MAX_JSON_BYTES, read_json, xxh3_parts
from ..disk.strays import find_strays, sweep_strays
from ..format.layout import (
    CAPTIONS,
    COMMITS,
    GROUP,
    INDEX,
    JOURNAL,
    LEASES,
    MANIFEST,
    PLAN,
    PLAN_FILE,
    RECORDS,
    REVISIONS,
    TWIN,
    index_path,
    revision_of,
    revision_prefix,
    revisions_with,
)
from ..format.row_layout import BUCKETS, CAPTION_PART, NULL_POOLED, array_groups, bucket_part, buckets_of
from ..format.schema import FORMAT_VERSION, FileEntry, HashedFile, Manifest
from ..format.table_schemas import index_names, suffixes

File = TypeVar("File", bound=HashedFile)
STORE_FOLDERS = (BUCKETS, CAPTION_PART, REVISIONS)  # in which only this program writes
BUCKET = re.compile("[1-9][0-9]{0,5}x[1-9][0-9]{0,5}")
REPAIR = "Run 'leandit verify STORE --repair --source PATH': it restores damaged files."


def sealed_revisions(path: Path) -> list[int]:
    """Complete revisions of a store, in order: those with a manifest, or at least its twin."""
    return revisions_with(path, MANIFEST, f"{TWIN}/{MANIFEST}")


def planned_revisions(path: Path) -> list[int]:
    """Revisions of a store that are planned and not complete, in order; at most one, but for damage."""
    return sorted({*revisions_with(path, f"{PLAN}/{PLAN_FILE}")} - {*sealed_revisions(path)})


def begun_revision(path: Path) -> int:
    """The newest revision that was begun and is not complete, even if its plan is damaged or missing; 0: none."""
    begun: set[int] = set()
    for name in (PLAN, COMMITS):
        for folder in path.glob(f"{REVISIONS}/*/{name}"):
            if revision := revision_of(f"{folder.relative_to(path).as_posix()}/"):
                begun.add(revision)
    return max(begun - {*sealed_revisions(path)}, default=0)


def lost_revisions(path: Path) -> list[int]:
    """Revisions of a store that were complete and have lost both copies of their manifest, in order."""
    names: dict[int, set[str]] = {}
    for folder in path.glob(f"{REVISIONS}/*"):
        number = revision_of(f"{folder.relative_to(path).as_posix()}/")
        if number and folder.is_dir():
            names[number] = {file.name for file in folder.iterdir()}
    lost = {number for number, inside in names.items() if has_lost_manifest(inside)}
    return sorted(lost - {*sealed_revisions(path)})


def has_lost_manifest(names: Iterable[str]) -> bool:
    """Whether a revision with these files and folders was complete, and has no manifest any more.

    Plan and commit records are removed after the manifest is written, and it is written after tables and index.
    """
    inside = {*names}
    return {RECORDS, INDEX} <= inside and not inside & {PLAN, COMMITS, MANIFEST}


class Link(NamedTuple):
    """What ties a revision to the one before it.

    Args:
      base: the root hash of the revision before it; "" for the first.
      copies: its rows were copied from another store (``leandit compact``), so no revision before it is there.
    """

    base: str
    copies: bool
    root_hash: str


def read_link(root: Path, revision: int) -> Link | None:
    """The link of a revision, unchecked; None if no copy of its manifest can be read.

    Raises: ResourceError: the disk or this machine failed.
    """
    prefix = revision_prefix(revision)
    for path in (root / f"{prefix}{MANIFEST}", root / f"{prefix}{TWIN}/{MANIFEST}"):
        try:
            with named_faults(path):
                status = path.stat()
                if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_JSON_BYTES:
                    continue
                content = json.loads(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError, RecursionError):
            continue
        if isinstance(content, dict) and isinstance(content.get("root_hash"), str):
            return Link(
                base=str(content.get("base", "")),
                copies=content.get("copies") is True,
                root_hash=content["root_hash"],
            )
    return None


def broken_link(revision: int, link: Link, before: Link) -> str:
    """Describe a revision that was not built on the revision before it; "" if it was."""
    if link.copies:
        return f"revision {revision} is the first of a compacted store, and revision {revision - 1} lies before it"
    if link.base == before.root_hash:
        return ""
    return (
        f"revision {revision} was built on root hash {link.base or 'none'}, and revision {revision - 1} has "
        f"{before.root_hash}: one of them is of another store"
    )


def check_not_lost(root: Path) -> None:
    """Check that the newest revision has a manifest, unless it is still being written.

    Raises: DamageError.
    """
    newest = max(sealed_revisions(root), default=0)
    lost = max(lost_revisions(root), default=0)
    if lost > newest:
        raise DamageError(lost_manifest(str(root), lost, newest))


def lost_manifest(store: str, lost: int, newest: int) -> str:
    """The message on a revision whose manifest is lost.

    Args:
      newest: the newest complete revision, 0 if there is none.
    """
    others = "precompute into another --store"
    if newest:
        others = (
            f"read revision {newest}, which is complete, by its number. To give up what revision {lost} added, remove "
            f"'{revision_prefix(lost)}'"
        )
    return (
        f"store '{store}': '{revision_prefix(lost)}{MANIFEST}' is lost, so nothing tells what revision {lost} holds. "
        f"Restore it from a copy of the store, or {others}."
    )


def check_link(root: Path, revision: int, link: Link, before: Link) -> None:
    """Check that a revision was built on the one before it. Raises: DamageError."""
    if problem := broken_link(revision, link, before):
        raise DamageError(
            f"store '{root}': {problem}. Restore the folders in 'revisions' from a copy of the store; 'leandit verify "
            f"{root}' checks them."
        )


def check_chain(root: Path) -> None:
    """Check that each complete revision of a store was built on the one before it.

    A revision that lies before others and is lost is warned of: later manifests name the shards that it wrote.

    Raises: DamageError: a revision is of another store.
    """
    links = {revision: read_link(root, revision) for revision in sealed_revisions(root)}
    for revision, link in links.items():
        before = links.get(revision - 1)
        if link is None or revision == 1:
            continue
        if before is not None:
            check_link(root, revision, link, before)
        elif revision - 1 not in links and not link.copies:
            warnings.warn(
                f"store '{root}': revision {revision - 1} is lost, on which revision {revision} was built. Revision "
                f"{revision} can be read; restore the other from a copy of the store before you add to it.",
                StoreWarning,
                stacklevel=3,
            )


def has_journal(path: Path) -> bool:
    """Whether a program adds records to a folder with ``create_store``, or was stopped before it sealed the store."""
    return (path / revision_prefix(1) / JOURNAL).is_dir()


def unsealed(revision: int) -> str:
    """A sentence on a revision that was begun and has no manifest, and what to do."""
    return f"Revision {revision} was started but not finished: run the same precompute command again."


def sweep_store(root: Path, *, of_all: bool = False) -> None:
    """Remove temporaries of dead processes from a store; those of other files beside its own stay.

    Args:
      of_all: also those of living processes; only safe while nothing writes to the store.
    """
    if (root / REVISIONS).is_dir():  # any other folder may be another project's
        sweep_strays(root, of_all=of_all, below=False, is_output=_is_group)
        for name in STORE_FOLDERS:
            sweep_strays(root / name, of_all=of_all)


def remove_empty_revisions(root: Path) -> None:
    """Remove the folders of revisions that hold nothing: a process died before it had planned one.

    Only safe while no other process plans.
    """
    for folder in (root / REVISIONS).glob("*"):
        with contextlib.suppress(OSError):  # it is not empty
            folder.rmdir()


def has_leftovers(root: Path) -> bool:
    """Whether processes that died have left temporaries, leases or empty revisions in a store."""
    if (root / LEASES).is_dir() or find_strays(root, below=False, is_output=_is_group):
        return True
    if any(find_strays(root / name) for name in STORE_FOLDERS):
        return True
    return any(not os.listdir(folder) for folder in (root / REVISIONS).glob("*") if folder.is_dir())


def _is_group(name: str) -> bool:
    return name == GROUP


def check_store(path: Path) -> None:
    """Check that a folder is a store.

    Raises: StoreNotFound, StoreError (it is something else), StoreIncomplete (it holds only a plan).
    """
    if not path.is_dir():
        raise StoreNotFound(f"store '{path}': no such folder. Create it with 'leandit precompute'.")
    if has_journal(path) and not sealed_revisions(path):
        raise StoreIncomplete(
            f"store '{path}': a program writes it with create_store, and has not sealed it. Run the program to its "
            "end: it continues."
        )
    if not (path / GROUP).is_file() and not sealed_revisions(path):
        if planned_revisions(path):
            raise StoreIncomplete(f"store '{path}': nothing is encoded yet. Run the same precompute command again.")
        raise StoreError(
            f"store '{path}': the folder holds no 'zarr.json', so it is not a leandit store. Check the path."
        )


def file_entry(path: str, content: bytes | memoryview) -> FileEntry:
    """Size and hash of a file's content."""
    size, digest = xxh3_parts([content])
    return FileEntry(path=path, bytes=size, xxh3_128=digest)


def read_hashed(root: Path, name: str, kind: type[File], remedy: str) -> File:
    """Read a JSON file of a store, and compare it with the hash in it.

    Args:
      name: path within the store.
      remedy: what to do about damage, a sentence.
    Raises: DamageError: it is missing, not valid, or does not match its hash; FormatVersionError: another release
      wrote it.
    """
    where = f"store '{root}': '{name}'"
    if not (root / name).is_file():
        raise DamageError(f"{where} is missing. {remedy}")
    try:
        content = read_json(root / name)
    except DamageError as error:
        raise DamageError(f"{where} is not JSON. {remedy}") from error
    version = content.get("format_version") if isinstance(content, dict) else FORMAT_VERSION
    if "format_version" in kind.model_fields and version != FORMAT_VERSION:
        raise FormatVersionError(
            f"store '{root}': format version {version}, this release reads {FORMAT_VERSION}. "
            "Use the release that wrote it, or precompute again."
        )
    try:
        file = kind.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])[:80]
        raise DamageError(f"{where} is not valid: {field}: {first['msg']}. {remedy}") from error
    if getattr(file, kind.HASH) != getattr(file.with_hash(), kind.HASH):
        raise DamageError(f"{where} does not match its own {kind.HASH.replace('_', ' ')}. {remedy}")
    return file


def intact_copies(read: Callable[..., File], root: Path, revision: int) -> list[File]:
    """Both copies of a file of a revision, without damaged ones.

    Args:
      read: the function that reads one, as ``read_manifest``.
    Raises: ResourceError: no copy is intact, and the disk or this machine failed at one of them, so that it may be.
    """
    copies: list[File] = []
    fault: ResourceError | None = None
    for twin in (False, True):
        try:
            copies.append(read(root, revision, twin=twin))
        except ResourceError as error:
            fault = error
        except (LeanditError, OSError):
            continue
    if fault is not None and not copies:
        raise fault
    return copies


def read_manifest(root: Path, revision: int, *, twin: bool = False) -> Manifest:
    """Read the manifest of a revision, and check that its arrays and files belong together.

    Args:
      twin: read the second copy.
    Raises: as ``read_hashed``.
    """
    name = f"{revision_prefix(revision)}{TWIN}/{MANIFEST}" if twin else revision_prefix(revision) + MANIFEST
    remedy = f"Run 'leandit verify {root} --repair': it restores the manifest from its second copy."
    manifest = read_hashed(root, name, Manifest, remedy)
    is_other = manifest.revision != revision
    if problem := f"it is of revision {manifest.revision}" if is_other else arrays_problem(manifest):
        raise DamageError(f"store '{root}': '{name}' is not valid: {problem}. {remedy}")
    return manifest


def arrays_problem(manifest: Manifest) -> str:
    """Describe an array that does not fit the spec or the files of a manifest; "" if there is none.

    Stores are not trusted: what an array claims is checked before a shard of it is mapped.
    """
    spec, arrays, files = manifest.spec, manifest.layouts(), {entry.path for entry in manifest.files}
    num_shards = sum("/c/" in path for path in files)
    named = {*manifest.buckets, *filter(BUCKET.fullmatch, buckets_of(arrays))}  # also those without stored records
    groups = array_groups(spec, named)
    if len(arrays) < len(manifest.arrays):
        return "two arrays have the same path"
    for path, layout in arrays.items():
        if problem := layout.problem():
            return f"array '{path}' has {problem}"
        if layout.row_ranges[-1].revision > manifest.revision:
            return f"array '{path}' has rows of revision {layout.row_ranges[-1].revision}, which is a later one"
        group = groups.get(path)
        if group is None or (layout.shape[1:], layout.dtype) != group.rows[path]:
            return f"array '{path}' has rows of {layout.dtype} {layout.shape[1:]}, unlike the encoders of the store"
        if layout.num_shards > num_shards:
            return f"array '{path}' claims {layout.num_shards} shards, but there are fewer files"
        num_rows = 0
        if group.is_null:
            num_rows = 1 if path.endswith(f"/{NULL_POOLED}") else spec.text_encoder_of(group.name).spec.max_tokens
        if num_rows and layout.shape[0] != num_rows:
            return f"array '{path}' has {layout.shape[0]} rows, expected {num_rows}"
        latents = arrays.get(f"{bucket_part(group.bucket)}/{spec.latent.array}") if group.bucket else layout
        if latents is None or [one[1:] for one in latents.row_ranges] != [one[1:] for one in layout.row_ranges]:
            return f"array '{path}' has different rows from the latents of its bucket"
    for path, group in groups.items():
        may_miss = (
            group.bucket not in manifest.buckets if group.bucket else not (group.is_null or manifest.num_captions)
        )
        if path not in arrays and not may_miss:
            return f"it has no array '{path}'"
    expected = {layout.shard_path(shard) for layout in arrays.values() for shard in layout.shards.tolist()}
    expected |= {revision_prefix(manifest.revision) + name for name in (RECORDS, CAPTIONS)}
    expected |= {index_path(manifest.revision, name) for name in index_names(spec)}
    if expected != files:
        return f"its files do not match its arrays, tables and index: '{min(expected ^ files)}'"
    if len(files) != len(manifest.files):
        return "a file that it names twice"
    return _counts_problem(manifest)


def _counts_problem(manifest: Manifest) -> str:
    """Describe a count that the index does not have numbers for; "" if there is none.

    The index is not compressed, so its size on disk limits what a manifest can claim, and with it what a reader takes
    into memory.
    """
    sizes = {entry.path: entry.bytes for entry in manifest.files}
    counts = {"keys": manifest.num_planned}
    for suffix in suffixes(manifest.spec).values():
        counts[f"caption_checksum{suffix}"] = manifest.num_captions
    for name, count in counts.items():
        num_bytes = sizes[index_path(manifest.revision, name)]
        if num_bytes != 8 * count:
            return f"it counts {count} rows, but '{name}' of its index has {num_bytes} bytes, expected {8 * count}"
    return ""
