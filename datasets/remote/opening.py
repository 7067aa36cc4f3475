"""Open a store at a URL: everything except its shards comes into a local folder, which is read like a store.

    folder = open_remote("s3://bucket/imagenet-256", capacity_gib=200)
    folder.store                        # a local folder with the store except its shards
    folder.fetch("buckets/256x256/moments/c/7/0/0/0")   # a complete local file; a map of it outlives the file
    folder.prefetch(paths)              # fetched by threads, in this order

Every file is checked by the manifest's size and hash.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ...errors import DamageError, LeanditError, RecipeError, ResourceError, StoreError, StoreIncomplete, StoreNotFound
from ...units import readable_size
from ..disk.files import make_folder, remove, write_atomic
from ..disk.hashing import MAX_JSON_BYTES, canonical_json, read_json, sha256_of, xxh3_file
from ..disk.locks import locked
from ..disk.strays import sweep_strays
from ..format.layout import (
    GROUP,
    LOCAL,
    MANIFEST,
    PLAN,
    PLAN_FILE,
    REMOTE_ABOUT,
    REVISIONS,
    revision_of,
    revision_prefix,
)
from ..format.row_layout import BUCKETS, CAPTION_PART
from ..format.schema import FileEntry, Manifest
from ..revisions.catalog import has_lost_manifest, lost_manifest, read_manifest
from .cache import DEFAULT_THREADS, STORE, RemoteFolder, is_shard
from .reader import RemoteReader

LOG = logging.getLogger(__name__)
DEFAULT_CAPACITY_GIB = 64.0
OPENING = "opening"
REQUESTS = 8  # at a time
# Largest manifest whose shard sizes are listed at open: 20 requests to s3. Larger ones would take minutes; their shards
# are checked when they are fetched.
MAX_LISTED = 20_000


def open_remote(
    url: str,
    *,
    folder: str | Path | None = None,
    capacity_gib: float = DEFAULT_CAPACITY_GIB,
    revision: int = 0,
    threads: int = DEFAULT_THREADS,
    options: Mapping[str, Any] | None = None,
) -> RemoteFolder:
    """Open the local folder of a store at a URL: fetch and check everything except the shards.

    Args:
      url: of the store, for any file system of fsspec: s3://, gs://, hf://, ...
      folder: the local folder; by default one for this URL below ~/.cache/leandit.
      capacity_gib: of its shards, in GiB.
      revision: number of the revision; 0 for the newest complete one.
      threads: for ``prefetch``.
      options: of the fsspec file system.
    Raises: StoreNotFound, StoreIncomplete (it has no complete revision), StoreError (it cannot be read, or has no such
      revision), DamageError (a file is missing, or not what the manifest says), ResourceError (no room), RecipeError
      (the URL cannot be read here).
    """
    if not isinstance(capacity_gib, (int, float)) or not 0 < capacity_gib < 2**40:
        raise RecipeError(f"capacity_gib {capacity_gib!r}: expected a positive, finite number.")
    reader, capacity = RemoteReader(url, options), int(capacity_gib * 2**30)
    local = Path(os.path.abspath(folder or default_folder(url)))
    try:
        _check_folder(local, reader.url)
        with locked(local / OPENING):  # a second process finds everything done
            _claim_folder(local, url, reader.url)
            manifest = _fetch_manifest(reader, local / STORE, revision)
            opened = RemoteFolder(reader, local, manifest, capacity=capacity, threads=threads)
            if len(manifest.files) <= MAX_LISTED:
                _check_listing(reader, manifest)
            _fetch(reader, local / STORE, (entry for entry in manifest.files if not is_shard(entry)))
            LOG.info(
                "store '%s': shards are downloaded to '%s', at most %s", reader.url, local, readable_size(capacity)
            )
            return opened
    except LeanditError:
        raise
    except OSError as error:
        raise ResourceError(
            f"folder '{local}': it cannot be used for a store at a URL ({error.strerror or error}). Use another one."
        ) from error


def default_folder(url: str) -> Path:
    """Default local folder of a URL."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "leandit" / sha256_of(url.rstrip("/"))[:16]


@contextlib.contextmanager
def url_in_errors(reader: RemoteReader, store: Path) -> Iterator[None]:
    """Replace the local folder by the URL in error messages."""
    try:
        yield
    except LeanditError as error:
        raise type(error)(str(error).replace(str(store), reader.url)) from error


def _check_folder(folder: Path, shown_url: str) -> None:
    make_folder(folder)
    names = set(os.listdir(folder))
    if names and not names & {REMOTE_ABOUT, OPENING}:
        raise StoreError(
            f"folder '{folder}': it holds other files; expected an empty one for store '{shown_url}', since files in "
            "it are removed to make room. Use another one."
        )


def _claim_folder(folder: Path, url: str, shown_url: str) -> None:
    """Bind a local folder to a URL. Raises: StoreError: it belongs to another URL."""
    about = {"url": shown_url, "url_sha256": sha256_of(url.rstrip("/"))}
    sweep_strays(folder, below=False)
    if not (folder / REMOTE_ABOUT).is_file():
        write_atomic(folder / REMOTE_ABOUT, canonical_json(about))
    found = read_json(folder / REMOTE_ABOUT)
    if not isinstance(found, dict) or found.get("url_sha256") != about["url_sha256"]:
        other = found.get("url") if isinstance(found, dict) else found
        raise StoreError(f"folder '{folder}': it belongs to store '{other}', not to '{shown_url}'. Use another one.")


def _fetch_manifest(reader: RemoteReader, store: Path, revision: int) -> Manifest:
    """Fetch manifest and ``local.json`` of all complete revisions; returns the manifest of one, 0 for the newest."""
    listed = reader.sizes(REVISIONS)
    numbers = {number for path in listed if (number := revision_of(path))}
    sealed = sorted(number for number in numbers if revision_prefix(number) + MANIFEST in listed)
    if not sealed:
        if listed or reader.info(GROUP):
            raise StoreIncomplete(
                f"store '{reader.url}': it has no complete revision, and only those are read at a URL. Run the same "
                "precompute command again where it was made, then copy the store again."
            )
        raise StoreNotFound(
            f"store '{reader.url}': the URL does not exist or has no manifest, so it is not a leandit store. Check the "
            "URL."
        )
    names: dict[int, set[str]] = {number: set() for number in numbers}
    for path in listed:
        if number := revision_of(path):
            names[number].add(path.split("/")[2])
    lost = [number for number, inside in names.items() if number > sealed[-1] and has_lost_manifest(inside)]
    if lost and not revision:
        raise DamageError(lost_manifest(reader.url, max(lost), sealed[-1]))
    wanted = revision or sealed[-1]
    if wanted not in sealed:
        raise StoreError(
            f"store '{reader.url}': it has no complete revision {wanted}. Available: {', '.join(map(str, sealed))}."
        )
    wanted_files = [revision_prefix(number) + name for number in sealed for name in (LOCAL, MANIFEST)]
    wanted_files += [f"{revision_prefix(number)}{PLAN}/{PLAN_FILE}" for number in numbers if number > sealed[-1]]
    sizes = {path: listed[path] for path in wanted_files if path in listed}
    for old in store.glob(f"{REVISIONS}/*"):
        if revision_of(f"{old.relative_to(store).as_posix()}/") not in numbers - {*lost}:
            remove(old)  # of a revision that no longer exists at the URL
    for old in store.glob(f"{REVISIONS}/*/**/*.json"):  # manifests and plans that no longer exist at the URL
        if old.relative_to(store).as_posix() not in sizes:
            remove(old)
    for path, size in sizes.items():
        if size > MAX_JSON_BYTES:
            raise DamageError(
                f"store '{reader.url}': file '{path}' has {size} bytes; expected at most {MAX_JSON_BYTES}."
            )
    manifests_last = sorted(sizes.items(), key=lambda item: item[0].endswith(MANIFEST))  # they make it a store
    _fetch(reader, store, (FileEntry(path=path, bytes=size, xxh3_128="") for path, size in manifests_last))
    with url_in_errors(reader, store):
        return read_manifest(store, wanted)


def _check_listing(reader: RemoteReader, manifest: Manifest) -> None:
    """Compare the sizes of all shards with the manifest's, by one listing of the arrays. Raises: DamageError."""
    sizes = reader.sizes(BUCKETS) | reader.sizes(CAPTION_PART)
    for entry in filter(is_shard, manifest.files):
        size = sizes.get(entry.path)
        if size != entry.bytes:
            state = "is missing" if size is None else f"has {size} bytes"
            raise DamageError(
                f"store '{reader.url}': file '{entry.path}' {state}, the manifest says {entry.bytes} bytes. Copy it "
                "there again from a store that passes 'leandit verify'."
            )


def _fetch(reader: RemoteReader, store: Path, entries: Iterable[FileEntry]) -> None:
    """Fetch files, several at a time; local ones with the right hash are kept. Raises: DamageError, StoreError."""

    def fetch(entry: FileEntry) -> None:
        local = store / entry.path
        if not (entry.xxh3_128 and local.is_file() and xxh3_file(local) == entry.xxh3_128):
            reader.checked(entry, lambda: write_atomic(local, reader.pieces(entry)))

    with ThreadPoolExecutor(REQUESTS, thread_name_prefix="leandit-open") as pool:
        list(pool.map(fetch, entries))
