"""The files of a store as another machine may have them: without absolute paths of this one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from ..disk.hashing import canonical_json, read_json, sha256_of
from ..format.layout import GROUP, MANIFEST, PLAN, PLAN_FILE, revision_prefix
from ..format.schema import FileEntry, Manifest
from ..revisions.catalog import sealed_revisions
from ..revisions.commits import file_entry, read_manifest, with_root_hash
from ..revisions.local import portable_spec


class StoreFiles(NamedTuple):
    """All files of the complete revisions of a store.

    Args:
      entries: size and hash by path.
      changed: content by path of those that differ from the files on disk, since they name no local folder.
      manifest: of the newest revision.
    """

    entries: dict[str, FileEntry]
    changed: dict[str, bytes]
    manifest: Manifest


def portable_files(root: Path) -> StoreFiles:
    """The files of a store, without absolute paths in its recipes and encoders.

    Where nothing has to change, every file is as it is on disk. Otherwise metadata, plan and manifest of a revision
    have new hashes, and with them its root hash; shards, tables and commit records stay.

    Raises: DamageError: a manifest is damaged.
    """
    entries: dict[str, FileEntry] = {}
    changed: dict[str, bytes] = {}
    manifest, root_hashes = None, dict[str, str]()  # those on disk, and those of the files here
    for revision in sealed_revisions(root):
        on_disk, prefix = read_manifest(root, revision), revision_prefix(revision)
        group_path, plan_path, manifest_path = (prefix + name for name in (GROUP, f"{PLAN}/{PLAN_FILE}", MANIFEST))
        group, plan = read_json(root / group_path), read_json(root / plan_path)
        contents = {group_path: canonical_json(_portable_group(group))}
        known = {path: file_entry(path, content) for path, content in (changed | contents).items()}
        contents[plan_path] = canonical_json(_portable_plan(plan, known, root_hashes))
        update = {
            "base": root_hashes.get(on_disk.base, on_disk.base),
            "files": [known.get(entry.path, entry) for entry in on_disk.files],
        }
        manifest = with_root_hash(on_disk.model_copy(update=update))
        contents[manifest_path] = canonical_json(manifest.model_dump())
        root_hashes[on_disk.root_hash] = manifest.root_hash
        changed |= {path: content for path, content in contents.items() if content != (root / path).read_bytes()}
        tables = [FileEntry.model_validate(entry) for entry in plan["files"]]
        tables = [entry.model_copy(update={"path": f"{prefix}{PLAN}/{entry.path}"}) for entry in tables]
        described = [file_entry(path, content) for path, content in contents.items()]
        entries |= {entry.path: entry for entry in (*manifest.files, *tables, *described)}
    assert manifest is not None, "the caller has verified the store"
    return StoreFiles(entries, changed, manifest)


def _portable_group(group: dict[str, Any]) -> dict[str, Any]:
    return group | {"attributes": {"leandit": portable_spec(group["attributes"]["leandit"])}}


def _portable_plan(plan: dict[str, Any], known: dict[str, FileEntry], root_hashes: dict[str, str]) -> dict[str, Any]:
    """A plan file with portable paths, and its hash.

    Args:
      known: entries of files that may differ from those on disk, by path.
      root_hashes: new ones by those on disk.
    """
    body = {key: value for key, value in plan.items() if key != "sha256"} | {
        "spec": portable_spec(plan["spec"]),
        "base": root_hashes.get(plan["base"], plan["base"]),
        "carried": [known[one["path"]].model_dump() if one["path"] in known else one for one in plan["carried"]],
    }
    return body | {"sha256": sha256_of(body)}
