"""Everything of a store at a URL except its shards, fetched into a local folder when the store is opened.

``catalog.py`` and ``LatentStore`` read that folder like a store. Every file is checked by the manifest's size and hash.
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
from ..format.caption_layout import CAPTION_PART
from ..format.layout import (
    CAPTIONS,
    GROUP,
    LOCAL,
    MANIFEST,
    PLAN,
    PLAN_FILE,
    RECORDS,
    REMOTE_ABOUT,
    REVISIONS,
    revision_of,
    revision_prefix,
)
from ..format.row_layout import BUCKETS
from ..format.schema import FileEntry, Manifest
from ..revisions.catalog import planned_revisions, read_manifest, sealed_revisions
from ..units import readable_size
from .reader import RemoteReader

OPENING = "opening"
REQUESTS = 8  # at a time
_NAME = re.compile(r"[0-9a-f]{32}-(0|[1-9][0-9]{0,14})")
# Largest manifest whose shard sizes are listed at open: 20 requests to s3. Larger ones would take minutes; their shards
# are checked when they are fetched.
MAX_LISTED = 20_000


def is_name(name: str) -> bool:
    """Whether a name of a shard in the local folder is valid: it cannot leave the folder, and includes the size."""
    return bool(_NAME.fullmatch(name))


def size_of(name: str) -> int:
    """Bytes of a shard, by its name in the local folder."""
    return int(name.rpartition("-")[2])


def is_shard(entry: FileEntry) -> bool:
    """Whether a file of the manifest is a shard, which is fetched on demand."""
    return "/c/" in entry.path


def default_folder(url: str) -> Path:
    """Default local folder of a URL."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "leandit" / sha256_of(url.rstrip("/"))[:16]


def check_folder(folder: Path, shown_url: str) -> None:
    """Refuse a local folder with other files; create it if missing.

    Raises: StoreError.
    """
    make_folder(folder)
    names = set(os.listdir(folder))
    if names and not names & {REMOTE_ABOUT, OPENING}:
        raise StoreError(
            f"folder '{folder}': it holds other files; needed an empty one for store '{shown_url}', since files in it "
            "are removed to make room. Give another one."
        )


def claim_folder(folder: Path, url: str, shown_url: str) -> None:
    """Bind a local folder to a URL; only under its lock.

    Raises: StoreError: it belongs to another URL.
    """
    about = {"url": shown_url, "url_sha256": sha256_of(url.rstrip("/"))}
    for stray in folder.glob(f"{TEMPORARY_PREFIX}*@{REMOTE_ABOUT}"):  # of a killed process
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
    """Refuse shards that can never be fetched, before fetching any."""
    for entry in entries:
        if not is_name(name_of(entry)):  # not trusted, and used as a file name
            raise DamageError(
                f"store '{url}': file '{entry.path}' has no valid hash in the manifest. Copy the store again."
            )
        if entry.bytes > capacity:
            raise ResourceError(
                f"store '{url}': shard '{entry.path}' has {readable_size(entry.bytes)}, the local folder may hold "
                f"{readable_size(capacity)}. Give it more room (capacity_gib)."
            )


def fetch_manifest(reader: RemoteReader, store: Path, revision: int) -> Manifest:
    """Fetch the manifest and ``local.json`` of all complete revisions.

    Args:
      revision: 0 for the newest.
    Returns: the manifest of that revision.
    Raises: StoreNotFound, StoreIncomplete, StoreError, FormatVersionError, DamageError.
    """
    numbers = [name for name in reader.names(REVISIONS) if re.fullmatch(r"[0-9]{6,9}", name)]
    candidates = sorted(n for name in numbers if (n := revision_of(f"{REVISIONS}/{name}/")))
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
    sizes |= _sizes_of(reader, [revision_prefix(number) + LOCAL for number in sealed])
    _forget_others(store, set(sizes))
    for path, size in sizes.items():
        if size > MAX_JSON_BYTES:
            raise DamageError(f"store '{reader.url}': file '{path}' has {size} bytes; needed at most {MAX_JSON_BYTES}.")
    # Manifests last: they make the folder a store.
    unhashed = [FileEntry(path=path, bytes=size, xxh3_128="") for path, size in sizes.items()]
    _for_each(lambda entry: _fetch(reader, store, entry), sorted(unhashed, key=lambda e: e.path.endswith(MANIFEST)))
    with url_in_errors(reader, store):
        return read_manifest(store, wanted)


def check_listing(reader: RemoteReader, manifest: Manifest) -> None:
    """Compare the sizes of all shards with the manifest's, by one listing of the arrays.

    Raises: DamageError: a shard is missing or has another size.
    """
    sizes: dict[str, int] = {}
    for sizes_below in _for_each(reader.sizes, [BUCKETS, CAPTION_PART]):
        sizes |= sizes_below
    for entry in filter(is_shard, manifest.files):
        size = sizes.get(entry.path)
        if size != entry.bytes:
            state = "is missing" if size is None else f"has {size} bytes"
            raise DamageError(
                f"store '{reader.url}': file '{entry.path}' {state}, the manifest says {entry.bytes} bytes. Copy it "
                "there again from a store that passes 'leandit verify'."
            )


def fetch_small_files(reader: RemoteReader, store: Path, manifest: Manifest) -> None:
    """Fetch the tables; local files with the right hash are kept.

    Raises: DamageError, StoreError.
    """
    prefix = revision_prefix(manifest.revision)
    tables = (prefix + RECORDS, prefix + CAPTIONS)
    _for_each(lambda entry: _fetch(reader, store, entry), [one for one in manifest.files if one.path in tables])


def _fetch(reader: RemoteReader, store: Path, entry: FileEntry) -> None:
    local = store / entry.path
    if (
        entry.xxh3_128
        and local.is_file()
        and local.stat().st_size == entry.bytes
        and xxh3_file(local) == entry.xxh3_128
    ):
        return
    reader.checked(entry, lambda: write_atomic(local, reader.pieces(entry)))


def _sizes_of(reader: RemoteReader, paths: list[str]) -> dict[str, int]:
    """Sizes of the files that exist."""
    found = zip(paths, _for_each(reader.size, paths), strict=True)
    return {path: size for path, size in found if size is not None}


def _for_each(work: Callable, items: list) -> list:
    """Call ``work`` for each item, several at a time; the first exception propagates."""
    if not items:
        return []
    with ThreadPoolExecutor(min(REQUESTS, len(items)), thread_name_prefix="leandit-open") as pool:
        return list(pool.map(work, items))


def _refuse_without_manifest(reader: RemoteReader) -> None:
    if _sizes_of(reader, [GROUP, f"{revision_prefix(1)}{PLAN}/{PLAN_FILE}"]):
        raise StoreIncomplete(
            f"store '{reader.url}': it has no complete revision, and only those are read at a URL. Run the same "
            "precompute command again where it was made, then copy the store again."
        )
    raise StoreNotFound(
        f"store '{reader.url}': the URL does not exist or has no manifest, so it is not a leandit store. Check the URL."
    )


def _forget_others(store: Path, remote: set[str]) -> None:
    """Remove local manifests and plans that no longer exist at the URL."""
    local = {revision_prefix(number) + MANIFEST for number in sealed_revisions(store)}
    local |= {f"{revision_prefix(number)}{PLAN}/{PLAN_FILE}" for number in planned_revisions(store)}
    for path in sorted(local - remote):
        remove(store / path)


@contextlib.contextmanager
def url_in_errors(reader: RemoteReader, store: Path) -> Iterator[None]:
    """Replace the local folder by the URL in error messages."""
    try:
        yield
    except LeanditError as error:
        raise type(error)(str(error).replace(str(store), reader.url)) from error
