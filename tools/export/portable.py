"""The files of a store as another machine may have them: without absolute paths of this one, each once."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ...datasets.disk.hashing import canonical_json, xxh3_file
from ...datasets.format.layout import LOCAL, MANIFEST, revision_prefix, zarr_files
from ...datasets.format.schema import FileEntry, Manifest
from ...datasets.revisions.catalog import file_entry, read_manifest, sealed_revisions
from ...datasets.revisions.local import portable, read_local
from ...errors import DamageError


class StoreFiles(NamedTuple):
    """All files of the complete revisions of a store, without second copies.

    Args:
      entries: size and hash by path.
      changed: content by path of those that differ from the files on disk, since they name no local folder.
      manifest: of the newest revision.
    """

    entries: dict[str, FileEntry]
    changed: dict[str, bytes]
    manifest: Manifest


def portable_files(root: Path) -> StoreFiles:
    """The files of a store, without absolute paths in its recipes and encoders; no hash of the data changes.

    A hub keeps its own history and checks what it serves, so the second copies of the tables stay where they are.

    Raises: DamageError: a file of a revision is damaged.
    """
    entries: dict[str, FileEntry] = {}
    contents: dict[str, bytes] = {}
    revisions = sealed_revisions(root)
    for revision in revisions:
        manifest, local, prefix = read_manifest(root, revision), read_local(root, revision), revision_prefix(revision)
        if local is None:
            raise DamageError(f"store '{root}': '{prefix}{LOCAL}' is damaged. Run 'leandit verify {root} --repair'.")
        contents[prefix + MANIFEST] = canonical_json(manifest.model_dump())
        contents[prefix + LOCAL] = canonical_json(portable(local).model_dump())
        entries |= {entry.path: entry for entry in (*manifest.files, local.sources)}
    newest = read_manifest(root, revisions[-1])
    contents |= zarr_files(newest.spec, newest.layouts().values())
    entries |= {path: file_entry(path, content) for path, content in contents.items()}
    changed = {path: content for path, content in contents.items() if xxh3_file(root / path) != entries[path].xxh3_128}
    return StoreFiles(entries, changed, newest)
