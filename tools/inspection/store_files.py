"""The files of a store: bytes of each part, and revisions."""

from __future__ import annotations

from ...datasets.disk.cached import cached_property
from ...datasets.format.layout import MANIFEST, revision_prefix
from ...datasets.format.row_layout import CAPTION_PART, COMPANIONS, FEATURES
from ...datasets.format.schema import Manifest, TextEncoder
from ...datasets.format.token_dtypes import token_bytes
from ...datasets.revisions.catalog import read_manifest, sealed_revisions
from ...datasets.store import LatentStore


class StoreFiles:
    """The files of a store; each value is computed when it is first used, and once."""

    def __init__(self, store: LatentStore) -> None:
        self._store = store

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of every file of the store."""
        if self._store.manifest:
            return {entry.path: entry.bytes for entry in self._store.manifest.files}
        files = (path for path in self._store.path.rglob("*") if path.is_file())
        return {path.relative_to(self._store.path).as_posix(): path.stat().st_size for path in files}

    @cached_property
    def parts(self) -> dict[str, int]:
        """Bytes on disk of each part of the store, and in total."""
        store = self._store
        groups = [*(f"feature {name}" for name in store.features), *(f"companion {name}" for name in store.companions)]
        texts = [f"captions {name}".strip() for name in store.texts or [""]]
        parts = dict.fromkeys(["latents", *groups, *texts, "tables and metadata"], 0)
        for path, size in self.sizes.items():
            parts[_part_of(path)] += size
        return parts | {"total": sum(self.sizes.values())}

    def array_bytes(self, part: str) -> int:
        """Bytes of the shards whose path contains a part."""
        return sum(size for path, size in self.sizes.items() if part in path and "/c/" in path)

    def bytes_per_record(self, part: str) -> float:
        """As ``array_bytes``, over the stored records."""
        return round(self.array_bytes(part) / max(1, len(self._store)), 1)

    @cached_property
    def revisions(self) -> list[tuple[Manifest, float]]:
        """Complete revisions up to the opened one, in order, and the date of each seal in seconds since 1970."""
        path, newest = self._store.path, self._store.revision if self._store.manifest else 0
        numbers = [number for number in sealed_revisions(path) if number <= newest] if newest else []
        return [
            (read_manifest(path, number), (path / f"{revision_prefix(number)}{MANIFEST}").stat().st_mtime)
            for number in numbers
        ]


def padded_bytes(encoder: TextEncoder) -> int:
    """Bytes of a caption of a text encoder at its largest length, in float16."""
    spec = encoder.spec
    tokens = token_bytes(spec.width, "float16") * spec.max_tokens if spec.has_tokens else 0
    return tokens + token_bytes(spec.pooled_width, "float16")


def _part_of(path: str) -> str:
    """The part of a store that a file belongs to, for a person."""
    folder, _, key = path.partition("/c/")
    names = folder.split("/")
    if not key:
        return "tables and metadata"
    for parent, part in ((FEATURES, "feature"), (COMPANIONS, "companion")):
        if parent in names:
            return f"{part} {names[-2]}"
    if "buckets" in names:
        return "latents"
    return "captions" if names[-2] == CAPTION_PART else f"captions {names[-2]}"
