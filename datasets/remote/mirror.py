"""All of a store at a URL but its shards, brought into a local folder when the store is opened.

That folder then looks like a store to ``catalog.py``, ``commits.py`` and ``LatentStore``. Commit records stay where
they are: only who writes or repairs a store reads them. Every file has been checked by the manifest's size and hash.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..disk.files import TEMPORARY_PREFIX, make_folder, remove, write_atomic
from ..disk.hashing import MAX_JSON_BYTES, canonical_json, read_json, sha256_of, xxh3_file
from ..errors import DamageError, LeanditError, ResourceError, StoreError, StoreIncomplete, StoreNotFound
from ..format.layout import (
    CAPTIONS,
    GROUP,
    MANIFEST,
    PLAN,
    PLAN_FILE,
    RECORDS,
    REMOTE_ABOUT,
    REVISIONS,
    revision_prefix,
)
from ..format.schema import FileEntry, Manifest
from ..revisions.catalog import read_spec, sealed_revisions
from ..revisions.commits import read_manifest
from ..revisions.plan import planned_revisions
from .bounded import is_name
from .reader import RemoteReader

OPENING = "opening"
REQUESTS = 8  # at a time
# Files of a manifest up to which the sizes of its shards are looked up: 20 requests of an s3 listing. Beyond, that
# would take minutes, and a shard's size is seen when it comes.
MAX_LISTED = 20_000


def is_shard(entry: FileEntry) -> bool:
    """A file of the manifest is a shard: it comes when it is needed."""
    return "/c/" in entry.path


def default_folder(url: str) -> Path:
    """Where the local folder of a URL is if nothing else is said."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "leandit" / sha256_of(url.rstrip("/"))[:16]


def check_folder(folder: Path, shown_url: str) -> None:
    """Refuse a local folder with files that are not ours; it is made if missing.

    Raises: StoreError.
    """
    make_folder(folder)
    there = set(os.listdir(folder))
    if there and not there & {REMOTE_ABOUT, OPENING}:
        raise StoreError(
            f"folder '{folder}': it holds other files; needed an empty one for store '{shown_url}', since files in it "
            "are removed to make room. Give another one."
        )


def claim_folder(folder: Path, url: str, shown_url: str) -> None:
    """Make a local folder that of a URL; only under its lock.

    Raises: StoreError: it is that of another.
    """
    about = {"url": shown_url, "url_sha256": sha256_of(url.rstrip("/"))}
    for stray in folder.glob(f"{TEMPORARY_PREFIX}*@{REMOTE_ABOUT}"):  # of a process that was killed
        remove(stray)
    if not (folder / REMOTE_ABOUT).is_file():
        write_atomic(folder / REMOTE_ABOUT, canonical_json(about))
    found = read_json(folder / REMOTE_ABOUT)
    if found != about:
        other = found.get("url") if isinstance(found, dict) else found
        raise StoreError(f"folder '{folder}': it belongs to store '{other}', not to '{shown_url}'. Give another one.")


def name_of(entry: FileEntry) -> str:
    """A shard's name in the local folder."""
    return f"{entry.xxh3_128}-{entry.bytes}"


def check_entries(url: str, entries: Iterable[FileEntry], capacity: int) -> None:
    """Refuse what could never be brought, before anything is."""
    for entry in entries:
        if not is_name(name_of(entry)):  # a manifest of others may say anything, and this becomes a name on this disk
            raise DamageError(f"store '{url}': file '{entry.path}' has no valid hash in the manifest. Copy it anew.")
        if entry.bytes > capacity:
            raise ResourceError(
                f"store '{url}': shard '{entry.path}' has {in_mib(entry.bytes)}, the local folder may hold "
                f"{in_mib(capacity)}. Give it more room (capacity_gib)."
            )


def in_mib(size: int) -> str:
    """A size for a message."""
    return f"{size / 2**20:.4g} MiB"


def fetch_manifest(reader: RemoteReader, store: Path, revision: int) -> Manifest:
    """Bring the manifests of all complete revisions, and what the folder needs to be taken for a store.

    Returns: the manifest of the revision asked for, 0 for the newest.
    Raises: StoreNotFound, StoreIncomplete, StoreError, FormatVersionError, DamageError.
    """
    numbers = [name for name in reader.names(REVISIONS) if re.fullmatch(r"[0-9]{6,9}", name)]
    later = (int(name) for name in numbers if int(name) > 1 and revision_prefix(int(name)).split("/")[1] == name)
    candidates = [1, *sorted(later)]
    sizes = _sizes_of(reader, [revision_prefix(number) + MANIFEST for number in candidates])
    sealed = [number for number in candidates if revision_prefix(number) + MANIFEST in sizes]
    if not sealed:
        _refuse_without_manifest(reader)
    wanted = revision or sealed[-1]
    if wanted not in sealed:
        raise StoreError(
            f"store '{reader.url}': it has no complete revision {wanted}. There are: {', '.join(map(str, sealed))}."
        )
    unfinished = [number for number in candidates if number > sealed[-1]]
    sizes |= _sizes_of(reader, [f"{revision_prefix(number)}{PLAN}/{PLAN_FILE}" for number in unfinished])
    sizes |= _sizes_of(reader, [GROUP, revision_prefix(wanted) + GROUP])
    _forget_others(store, set(sizes))
    for path, size in sizes.items():
        if size > MAX_JSON_BYTES:
            raise DamageError(f"store '{reader.url}': file '{path}' has {size} bytes, no such is that large.")
    # The manifests last: with them the folder is a store.
    _for_each(lambda path: _bring(reader, store, _unhashed(path, sizes[path])), sorted(sizes, key=_is_manifest))
    with url_in_errors(reader, store):
        read_spec(store, wanted)  # another format version is named as such, not as damage
        return read_manifest(store, wanted)


def check_listing(reader: RemoteReader, manifest: Manifest) -> None:
    """Compare the sizes of all shards with the manifest's, by one listing of each revision's arrays.

    Raises: DamageError: a shard is missing or has another size.
    """
    folders = [revision_prefix(number) + name for number in manifest.stack for name in ("buckets", "captions")]
    found: dict[str, int] = {}
    for sizes in _for_each(reader.sizes, folders):
        found |= sizes
    for entry in filter(is_shard, manifest.files):
        size = found.get(entry.path)
        if size != entry.bytes:
            was = "is missing" if size is None else f"has {size} bytes"
            raise DamageError(
                f"store '{reader.url}': file '{entry.path}' {was}, the manifest says {entry.bytes} bytes. Copy it "
                "there again from a store that 'leandit verify' finds whole."
            )


def fetch_small_files(reader: RemoteReader, store: Path, manifest: Manifest) -> None:
    """Bring the metadata of all groups and arrays, and the tables; what is here already is kept if its hash is right.

    Raises: DamageError, StoreError.
    """
    prefix = revision_prefix(manifest.revision)
    tables = (prefix + RECORDS, prefix + CAPTIONS)
    small = [entry for entry in manifest.files if entry.path in tables or f"/{entry.path}".endswith(f"/{GROUP}")]
    _for_each(lambda entry: _bring(reader, store, entry), small)


def _bring(reader: RemoteReader, store: Path, entry: FileEntry) -> None:
    local = store / entry.path
    if (
        entry.xxh3_128
        and local.is_file()
        and local.stat().st_size == entry.bytes
        and xxh3_file(local) == entry.xxh3_128
    ):
        return
    reader.checked(entry, lambda: write_atomic(local, reader.pieces(entry)))


def _unhashed(path: str, size: int) -> FileEntry:
    return FileEntry(path=path, bytes=size, xxh3_128="")


def _is_manifest(path: str) -> bool:
    return path.endswith(MANIFEST)


def _sizes_of(reader: RemoteReader, paths: list[str]) -> dict[str, int]:
    """Sizes of those files that are there."""
    found = zip(paths, _for_each(reader.size, paths), strict=True)
    return {path: size for path, size in found if size is not None}


def _for_each(work: Callable, items: list) -> list:
    """Do something for each of some items, several at a time; the first error goes on."""
    if not items:
        return []
    with ThreadPoolExecutor(min(REQUESTS, len(items)), thread_name_prefix="leandit-open") as pool:
        return list(pool.map(work, items))


def _refuse_without_manifest(reader: RemoteReader) -> None:
    if _sizes_of(reader, [GROUP, f"{PLAN}/{PLAN_FILE}"]):
        raise StoreIncomplete(
            f"store '{reader.url}': it has no complete revision, and only those are read at a URL. Run the same "
            "precompute command again where it was made, then copy it anew."
        )
    raise StoreNotFound(
        f"store '{reader.url}': there is no such place, or no 'manifest.json' in it, so it is no leandit store. Check "
        "the URL."
    )


def _forget_others(store: Path, remote: set[str]) -> None:
    """Remove manifests and plans that are not at the URL any more, so that nobody takes them for revisions."""
    here = {revision_prefix(number) + MANIFEST for number in sealed_revisions(store)}
    here |= {f"{revision_prefix(number)}{PLAN}/{PLAN_FILE}" for number in planned_revisions(store)}
    for path in sorted(here - remote):
        remove(store / path)


@contextlib.contextmanager
def url_in_errors(reader: RemoteReader, store: Path) -> Iterator[None]:
    """Errors name the URL, not the local folder, which nobody needs to know."""
    try:
        yield
    except LeanditError as error:
        raise type(error)(str(error).replace(str(store), reader.url)) from error
