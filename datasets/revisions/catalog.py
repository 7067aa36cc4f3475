"""The revisions of a store and their manifests; refuses folders that are not stores."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..disk.hashing import read_json, sha256_of, xxh3_parts
from ..errors import DamageError, FormatVersionError, StoreError, StoreIncomplete, StoreNotFound
from ..format.caption_layout import (
    CAPTION_PART,
    EMBEDDINGS,
    NULL_EMBEDDING,
    NULL_POOLED,
    NULL_SCALES,
    POOLED,
    SCALES,
    caption_arrays,
    caption_folder,
)
from ..format.layout import (
    CAPTIONS,
    GROUP,
    MANIFEST,
    PLAN,
    PLAN_FILE,
    RECORDS,
    TWIN,
    revision_prefix,
    revisions_with,
)
from ..format.row_layout import BUCKETS, LATENTS, bucket_part, row_arrays
from ..format.schema import FORMAT_VERSION, FileEntry, Manifest, StoreSpec
from ..format.token_dtypes import ON_DISK
from ..format.zarr_shard import ArrayLayout

BUCKET = re.compile("[1-9][0-9]{0,5}x[1-9][0-9]{0,5}")
REPAIR = "Run 'leandit verify --repair --source PATH': it restores damaged files."


def sealed_revisions(path: Path) -> list[int]:
    """Complete revisions of a store, in order: those with a manifest, or at least its twin."""
    return revisions_with(path, MANIFEST, f"{TWIN}/{MANIFEST}")


def planned_revisions(path: Path) -> list[int]:
    """Revisions of a store that are planned and not complete, in order; at most one, but for damage."""
    return sorted({*revisions_with(path, f"{PLAN}/{PLAN_FILE}")} - {*sealed_revisions(path)})


def unsealed(revision: int) -> str:
    """A sentence on a revision that was begun and has no manifest, and what to do."""
    return f"Revision {revision} was begun and is not finished: run the same precompute command again."


def check_store(path: Path) -> None:
    """Check that a folder is a store.

    Raises: StoreNotFound, StoreError (it is something else), StoreIncomplete (it holds only a plan).
    """
    if not path.is_dir():
        raise StoreNotFound(f"store '{path}': no such folder. Create it with 'leandit precompute'.")
    if not (path / GROUP).is_file() and not sealed_revisions(path):
        if planned_revisions(path):
            raise StoreIncomplete(f"store '{path}': nothing is encoded yet. Run the same precompute command again.")
        raise StoreError(
            f"store '{path}': the folder holds no 'zarr.json', so it is not a leandit store. Check the path."
        )


def root_hash(manifest: Manifest) -> str:
    """Hash of all fields of a manifest except ``root_hash``."""
    return sha256_of(manifest.model_dump(exclude={"root_hash"}))


def file_entry(path: str, content: bytes | memoryview) -> FileEntry:
    """Size and hash of a file's content."""
    size, digest = xxh3_parts([content])
    return FileEntry(path=path, bytes=size, xxh3_128=digest)


def read_manifest(root: Path, revision: int, *, twin: bool = False) -> Manifest:
    """Read the manifest of a revision, and check that its arrays and files belong together.

    Args:
      twin: read the second copy.
    Raises: DamageError; FormatVersionError: another release wrote it.
    """
    name = f"{revision_prefix(revision)}{TWIN}/{MANIFEST}" if twin else revision_prefix(revision) + MANIFEST
    remedy = "Run 'leandit verify --repair': it restores the manifest from its second copy."
    if not (root / name).is_file():
        raise DamageError(f"store '{root}': '{name}' is missing. {remedy}")
    try:
        content = read_json(root / name)
    except DamageError as error:
        raise DamageError(f"store '{root}': '{name}' is not JSON. {remedy}") from error
    check_version(root, content)
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])[:80]
        raise DamageError(f"store '{root}': '{name}' is not valid: {where}: {first['msg']}. {remedy}") from error
    if root_hash(manifest) != manifest.root_hash or manifest.revision != revision:
        raise DamageError(f"store '{root}': '{name}' does not match its own root hash. {remedy}")
    if problem := arrays_problem(manifest):
        raise DamageError(f"store '{root}': '{name}' is not valid: {problem}. {remedy}")
    return manifest


def check_version(root: Path, content: Any) -> None:
    """Raise FormatVersionError if a manifest or plan is of another format version."""
    version = content.get("format_version") if isinstance(content, dict) else None
    if isinstance(content, dict) and version != FORMAT_VERSION:
        raise FormatVersionError(
            f"store '{root}': format version {version}, this release reads {FORMAT_VERSION}. "
            "Use the release that wrote it, or precompute again."
        )


def arrays_problem(manifest: Manifest) -> str:
    """Describe an array that does not fit the spec or the files of a manifest; "" if there is none.

    Stores are not trusted: what an array claims is checked before a shard of it is mapped.
    """
    spec, arrays = manifest.spec, manifest.layouts()
    shards = {entry.path for entry in manifest.files if "/c/" in entry.path}
    if len(arrays) < len(manifest.arrays):
        return "two arrays have one path"
    for path, layout in arrays.items():
        if problem := layout.problem():
            return f"array '{path}' has {problem}"
        if layout.row_ranges[-1].revision > manifest.revision:
            return f"array '{path}' has rows of revision {layout.row_ranges[-1].revision}, which is a later one"
        if (layout.shape[1:], layout.dtype) != _row_of(spec, path):
            return f"array '{path}' has rows of {layout.dtype} {layout.shape[1:]}, unlike the encoders of the store"
        if layout.num_shards > len(shards):
            return f"array '{path}' claims {layout.num_shards} shards, the files are fewer"
        folder, *inside, name = path.split("/")
        longest = _max_tokens(spec, path)
        wanted = {NULL_EMBEDDING: longest, NULL_SCALES: longest, NULL_POOLED: 1}
        if folder == CAPTION_PART and name in wanted and layout.shape[0] != wanted[name]:
            return f"array '{path}' has {layout.shape[0]} rows, expected {wanted[name]}"
        latents = arrays.get(f"{bucket_part(inside[0])}/{spec.latent.array}") if folder == BUCKETS else None
        if folder == BUCKETS and (latents is None or _rows(latents) != _rows(layout)):
            return f"array '{path}' has other rows than the latents of its bucket"
    if missing := [path for path in _needed_arrays(manifest) if path not in arrays]:
        return f"it has no array '{missing[0]}'"
    named = {layout.shard_path(shard) for layout in arrays.values() for shard in layout.shards.tolist()}
    named |= {revision_prefix(manifest.revision) + name for name in (RECORDS, CAPTIONS)}
    files = {entry.path for entry in manifest.files}
    if named != files:
        return f"its files are not the shards of its arrays and its tables: '{min(named ^ files)}'"
    return "a file that it names twice" if len(files) != len(manifest.files) else ""


def _needed_arrays(manifest: Manifest) -> Iterator[str]:
    """Paths of the arrays that a store has by its spec, buckets and captions."""
    spec = manifest.spec
    for bucket in manifest.buckets:
        for group in (LATENTS, *spec.groups):
            yield from (f"{bucket_part(bucket)}/{name}" for name in row_arrays(spec, bucket, group))
    null_of = {EMBEDDINGS: NULL_EMBEDDING, SCALES: NULL_SCALES, POOLED: NULL_POOLED}
    for one in spec.text_encoders:
        names = caption_arrays(one.spec)
        names = [null_of[name] for name in names] + (names if manifest.num_captions else [])
        yield from (f"{caption_folder(one.name)}/{name}" for name in names)


def _rows(layout: ArrayLayout) -> list[tuple[int, int]]:
    return [(first, end) for _, first, end in layout.row_ranges]


def _max_tokens(spec: StoreSpec, path: str) -> int:
    """Longest caption of the text encoder of an array; 0 if the store has none of its name."""
    name = path.split("/")[1] if path.count("/") == 2 else ""
    return next((one.spec.max_tokens for one in spec.text_encoders if one.name == name), 0)


def _row_of(spec: StoreSpec, path: str) -> tuple[tuple[int, ...], str] | None:
    """Shape and dtype of a row of an array by the spec; None if the store has no such array."""
    folder, *inside, name = path.split("/") if "/" in path else ("", path)
    if folder == BUCKETS and inside and BUCKET.fullmatch(inside[0]):
        group = inside[2] if len(inside) == 3 else LATENTS
        if group not in (LATENTS, *spec.groups):
            return None
        return row_arrays(spec, inside[0], group).get("/".join([*inside[1:], name]))
    text = next(
        (one.spec for one in spec.text_encoders if caption_folder(one.name) == "/".join([folder, *inside])), None
    )
    if text is None:
        return None
    if name in (POOLED, NULL_POOLED):
        return ((text.pooled_width,), ON_DISK[text.pooled_dtype]) if text.pooled_width else None
    if not text.has_tokens:
        return None
    if name in (SCALES, NULL_SCALES):
        return ((), "float32") if text.dtype == "int8" else None
    return ((text.width,), ON_DISK[text.dtype]) if name in (EMBEDDINGS, NULL_EMBEDDING) else None
