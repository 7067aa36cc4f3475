"""Verify a store at a URL: every file there against its size and hash, without keeping the shards."""

from __future__ import annotations

import tempfile
from collections import deque
from pathlib import Path

from pydantic import ValidationError

from ...datasets.disk.files import write_atomic
from ...datasets.format.layout import GROUP, LEASES, REVISIONS
from ...datasets.format.schema import FileEntry
from ...datasets.maintenance.findings import shard_place
from ...datasets.maintenance.verify import Problem, Verification, check_file, verify_store
from ...datasets.remote.opening import url_in_errors
from ...datasets.remote.reader import RemoteReader
from ...errors import DamageError, StoreNotFound

REQUESTS = 8  # at a time


def verify_remote(url: str, *, quick: bool = False) -> Verification:
    """Check a store at a URL against its manifests, as ``verify_store`` does; nothing is written there.

    Tables, manifests and metadata are fetched into a temporary folder; shards are hashed as they arrive, and not kept.

    Args:
      quick: sizes of all files, hashes of all but the shards.
    Raises: StoreNotFound; StoreError: it is not a store, or cannot be read; RecipeError: the URL is not supported.
    """
    reader = RemoteReader(url)
    sizes = {path: size for path, size in reader.sizes("").items() if not path.startswith(f"{LEASES}/")}
    if not sizes:
        raise StoreNotFound(f"store '{reader.url}': nothing exists at this URL. Check the URL.")
    with tempfile.TemporaryDirectory(prefix="leandit-verify-") as scratch:
        store = Path(scratch)

        def check(entry: FileEntry) -> tuple[int, Problem | None]:
            size = sizes.get(entry.path)
            if size is None:
                return 0, ("missing", "")
            if size != entry.bytes:
                return 0, ("size", f"{size} bytes, {entry.bytes} were written")
            if (store / entry.path).is_file():
                return check_file(store, entry, quick)
            if quick and shard_place(entry.path):
                return 0, None
            try:
                reader.checked(entry, lambda: deque(reader.pieces(entry), maxlen=0))
            except DamageError:
                return entry.bytes, ("content", "")
            return entry.bytes, None

        with url_in_errors(reader, store):
            _fetch_metadata(reader, store, sizes)
            result = verify_store(store, quick=quick, num_threads=REQUESTS, check=check, paths=sizes)
    result.store = reader.url
    return result


def _fetch_metadata(reader: RemoteReader, store: Path, sizes: dict[str, int]) -> None:
    """Fetch the files of all revisions, and the metadata of the arrays."""
    for path, size in sizes.items():
        if not path.startswith(f"{REVISIONS}/") and path.rpartition("/")[2] != GROUP:
            continue
        try:
            entry = FileEntry(path=path, bytes=size, xxh3_128="")
        except ValidationError:
            continue  # a stray: the name is not valid in a store
        reader.checked(entry, lambda entry=entry: write_atomic(store / entry.path, reader.pieces(entry)))
