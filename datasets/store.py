"""``LatentStore``: open a store, check that it is whole, map its arrays, read records. Knows no torch.

store = LatentStore("imagenet-256")
store.buckets                               # {"256x256": 1281167}
moments = store.latents("256x256")          # a sequence of rows; moments[i] is a mapped view
moments.take(rows, out=buffer)              # (B, 2C, H, W)
store.caption(store.record("n01440764/n01440764_18.JPEG"))     # (L, D), the valid tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
from pydantic import ValidationError

from .buckets import bucket_size
from .commits import merge_captions, merge_records, read_commits, read_plan
from .errors import DamageError, FormatVersionError, StoreError, StoreIncomplete, StoreNotFound
from .files import read_json, sha256_of, xxh3_file
from .layout import (
    CAPTIONS,
    EMBEDDINGS,
    LENGTHS,
    MANIFEST,
    NULL_EMBEDDING,
    OFFSETS,
    RECORDS,
    bucket_part,
    shard_tasks,
)
from .schema import FORMAT_VERSION, Manifest, StoreSpec
from .shards import ArrayLayout, ShardedArray

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them


@dataclass(frozen=True)
class Record:
    """One image with its captions and label, as stored.

    ``index`` is its position in the records table; ``row`` its position in the arrays of its bucket.
    """

    index: int
    key: str
    bucket: str | None
    row: int
    label: int
    caption_ids: tuple[int, ...]
    height_px: int | None
    width_px: int | None
    status: str
    stage: str | None
    reason: str | None
    detail: str | None


@dataclass(frozen=True)
class BucketIndex:
    """What training needs of a bucket's stored records, in order of their rows.

    Args:
      rows: (N,) rows of the bucket's arrays.
      records: (N,) positions in the records table.
      labels: (N,) class index, -1 for none.
      caption_starts: (N + 1,) where each record's captions begin in ``caption_ids``.
      caption_ids: (M,) caption ids, record after record.
    """

    rows: np.ndarray
    records: np.ndarray
    labels: np.ndarray
    caption_starts: np.ndarray
    caption_ids: np.ndarray


class LatentStore:
    """A store, opened for reading.

    Args:
      path: of the store.
      allow_incomplete: open it also while shards are missing; what is not there is then not listed as stored.
    Raises:
      StoreNotFound: there is nothing at the path.
      StoreError: it is something else than a store.
      FormatVersionError: it was written in another format version.
      StoreIncomplete: planned shards are missing.
      DamageError: a file is missing or has not the size that the manifest says.
    """

    def __init__(self, path: str | Path, *, allow_incomplete: bool = False) -> None:
        self.path = Path(path)
        self.spec = read_spec(self.path)
        self.manifest = _read_manifest(self.path)
        if self.manifest:
            self._check_files(self.manifest)
            self.complete = True
            return
        self.complete = False
        self._plan = read_plan(self.path)
        self._commits = read_commits(self.path, self.spec, self._plan)
        tasks = shard_tasks(self.spec, self._plan.bucket_rows, self._plan.num_token_rows(self.spec))
        if not allow_incomplete:
            raise StoreIncomplete(
                f"store '{self.path}': incomplete, {len(self._commits)} of {len(tasks)} shards are committed. "
                "Run the same precompute command again: it goes on where it stopped."
            )

    @property
    def buckets(self) -> dict[str, int]:
        """Stored records per bucket, in order of height, then width."""
        if self.manifest:  # its JSON is sorted as text; here the order is by size
            return {name: self.manifest.buckets[name] for name in sorted(self.manifest.buckets, key=bucket_size)}
        return {bucket: len(self.index(bucket).rows) for bucket in self._plan.bucket_rows}

    @property
    def root_hash(self) -> str | None:
        """Hash that stands for every byte of the store, or None while it is incomplete."""
        return self.manifest.root_hash if self.manifest else None

    @property
    def num_classes(self) -> int:
        """Number of classes, 0 where the records have no labels."""
        return len(self.spec.classes or ())

    @cached_property
    def records(self) -> pa.Table:
        """The records table (schema.RECORDS_SCHEMA), in the order of the source."""
        if self.manifest:
            return self._table(RECORDS)
        return merge_records(self.spec, self._plan, self._commits)

    @cached_property
    def captions(self) -> pa.Table:
        """The captions table (schema.CAPTIONS_SCHEMA); the position is the caption's id."""
        if self.manifest:
            return self._table(CAPTIONS)
        return merge_captions(self.spec, self._plan, self._commits)

    def latents(self, bucket: str) -> ShardedArray:
        """Rows of a bucket as stored, (2C, H, W) moments or (C, H, W) latents, raw: neither shifted nor scaled."""
        return self._array(f"{bucket_part(bucket)}/{self.spec.latent.array}")

    def flipped_latents(self, bucket: str) -> ShardedArray:
        """Rows of the horizontally flipped pictures.

        Raises: StoreError: the store was made without them.
        """
        if not self.spec.latent.flip:
            raise StoreError(f"store '{self.path}': it holds no flipped latents. Precompute with vae.flip = true.")
        return self._array(f"{bucket_part(bucket)}/{self.spec.latent.array}_flip")

    def index(self, bucket: str) -> BucketIndex:
        """Labels and captions of the stored records of a bucket, in order of their rows."""
        if bucket not in self._indexes:
            self._indexes[bucket] = self._build_index(bucket)
        return self._indexes[bucket]

    @cached_property
    def _indexes(self) -> dict[str, BucketIndex]:
        return {}

    def _build_index(self, bucket: str) -> BucketIndex:
        wanted = pc.and_(pc.equal(self.records["bucket"], bucket), pc.equal(self.records["status"], "stored"))
        positions = np.flatnonzero(pc.fill_null(wanted, False).to_numpy(zero_copy_only=False))
        table = self.records.take(pa.array(positions))
        order = np.argsort(table["row"].to_numpy(), kind="stable")
        table, positions = table.take(pa.array(order)), positions[order]
        captions = table["caption_ids"].combine_chunks()
        counts = pc.fill_null(pc.list_value_length(captions), 0).to_numpy(zero_copy_only=False)
        return BucketIndex(
            rows=table["row"].to_numpy(),
            records=positions,
            labels=table["label"].to_numpy(),
            caption_starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            caption_ids=pc.list_flatten(captions).to_numpy(zero_copy_only=False).astype(np.int64),
        )

    def record(self, key: str) -> Record:
        """Find a record by its key.

        Raises: StoreError: there is none; the nearest keys are named.
        """
        position = pc.index(self.records["key"], key).as_py()
        if position < 0:
            near = pc.filter(self.records["key"], pc.match_substring(self.records["key"], key)).to_pylist()[:3]
            hint = f" Keys that contain it: {', '.join(near)}." if near else ""
            raise StoreError(f"store '{self.path}': no record has the key '{key}'.{hint}")
        return self.record_at(position)

    def record_at(self, index: int) -> Record:
        """The record at a position of the records table."""
        values = self.records.slice(index, 1).to_pylist()[0]
        values["caption_ids"] = tuple(values["caption_ids"] or ())
        return Record(index=index, **{name: values[name] for name in Record.__dataclass_fields__ if name != "index"})

    def caption(self, record: Record, which: int = 0) -> np.ndarray:
        """Embedding of one of a record's captions, (L, D): its valid tokens, a mapped view."""
        return self.caption_embedding(record.caption_ids[which])

    def caption_embedding(self, caption_id: int) -> np.ndarray:
        """Embedding of a caption, (L, D): its valid tokens, a mapped view."""
        offset, length = int(self.caption_offsets[caption_id]), int(self.caption_lengths[caption_id])
        return self._array(EMBEDDINGS).read(offset, offset + length)

    @cached_property
    def null_caption(self) -> np.ndarray:
        """Embedding of the empty caption at full length, (max_tokens, D), for classifier-free guidance."""
        return np.array(self._array(NULL_EMBEDDING).read(0, len(self._array(NULL_EMBEDDING))))

    @cached_property
    def caption_offsets(self) -> np.ndarray:
        """(num_captions,) first row of each caption in captions/embeddings."""
        return self._array(OFFSETS).read(0, len(self._array(OFFSETS)))

    @cached_property
    def caption_lengths(self) -> np.ndarray:
        """(num_captions,) tokens of each caption."""
        return self._array(LENGTHS).read(0, len(self._array(LENGTHS)))

    def find_captions(self, texts: Sequence[str]) -> list[int | None]:
        """Ids of captions by their exact text, None where the store has not encoded it."""
        return [i if (i := pc.index(self.captions["text"], text).as_py()) >= 0 else None for text in texts]

    @cached_property
    def _arrays(self) -> dict[str, ShardedArray]:
        return {}

    def _array(self, path: str) -> ShardedArray:
        if path not in self._arrays:
            metadata = self.path / path / "zarr.json"
            if not metadata.is_file():
                raise StoreError(
                    f"store '{self.path}': there is no array '{path}'. Buckets: {', '.join(self.buckets)}."
                )
            self._arrays[path] = ShardedArray(self.path, ArrayLayout.from_metadata(path, read_json(metadata)))
        return self._arrays[path]

    def _table(self, name: str) -> pa.Table:
        assert self.manifest is not None
        entry = next(entry for entry in self.manifest.files if entry.path == name)
        if xxh3_file(self.path / name) != entry.xxh3_128:
            raise DamageError(
                f"store '{self.path}': '{name}' differs from the manifest. "
                f"Delete it and run the same precompute command again: it is made anew from the commits."
            )
        return pq.read_table(self.path / name)

    def _check_files(self, manifest: Manifest) -> None:
        """A missing shard would read as zeros to plain Zarr, a shorter one would kill the process: check first."""
        for entry in manifest.files:
            path = self.path / entry.path
            size = path.stat().st_size if path.is_file() else None
            if size != entry.bytes:
                raise DamageError(
                    f"store '{self.path}': file '{entry.path}' "
                    + ("is missing" if size is None else f"has {size} bytes")
                    + f", the manifest says {entry.bytes} bytes. "
                    "Run the same precompute command again: it makes what is missing anew."
                )
            if entry.path.endswith("zarr.json") and xxh3_file(path) != entry.xxh3_128:
                raise DamageError(
                    f"store '{self.path}': file '{entry.path}' differs from the manifest, so its numbers cannot be "
                    "trusted. Run the same precompute command again: it writes it anew."
                )


def read_spec(path: Path) -> StoreSpec:
    """Read what a store says of itself.

    Raises: StoreNotFound, StoreError (something else is there), FormatVersionError, DamageError.
    """
    if not path.is_dir():
        raise StoreNotFound(f"store '{path}': there is no such folder. Make it with 'leandit precompute'.")
    if not (path / "zarr.json").is_file():
        raise StoreError(f"store '{path}': the folder holds no 'zarr.json', so it is no leandit store. Check the path.")
    group = read_json(path / "zarr.json")
    attributes = (group.get("attributes") or {}).get("leandit") if isinstance(group, dict) else None
    if not isinstance(attributes, dict):
        raise StoreError(
            f"store '{path}': 'zarr.json' is that of a Zarr group, but not a leandit store (no 'leandit' attribute)."
        )
    version = attributes.get("format_version")
    if version != FORMAT_VERSION:
        raise FormatVersionError(
            f"store '{path}': format version {version}, this release reads {FORMAT_VERSION}. "
            "Use the release that wrote it, or precompute again."
        )
    try:
        return StoreSpec.model_validate(attributes)
    except ValidationError as error:
        raise DamageError(f"store '{path}': its attributes are not valid: {error.errors()[0]['msg']}.") from error


def _read_manifest(path: Path) -> Manifest | None:
    if not (path / MANIFEST).is_file():
        return None
    try:
        manifest = Manifest.model_validate(read_json(path / MANIFEST))
    except ValidationError as error:
        raise DamageError(f"store '{path}': '{MANIFEST}' is not valid: {error.errors()[0]['msg']}.") from error
    if sha256_of(manifest.model_dump(exclude={"root_hash"})) != manifest.root_hash:
        raise DamageError(
            f"store '{path}': '{MANIFEST}' does not fit its own root hash. "
            "Delete it and run the same precompute command again: it is made anew from the commits."
        )
    return manifest
