"""``LatentStore``: open a store, check that it is whole, map its arrays, read records. Knows no torch.

store = LatentStore("imagenet-256")
store.buckets                               # {"256x256": 1281167}
moments = store.latents("256x256")          # a sequence of rows; moments[i] is a mapped view
moments.take(rows, out=buffer)              # (B, 2C, H, W)
store.caption(7)                            # (L, D), the valid tokens of the first caption of record 7
store.record("n01440764/n01440764_18.JPEG").index              # a record by its key
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute

from .arrays.bucket_index import INDEX_COLUMNS, BucketIndex, build_indexes
from .arrays.caption_tokens import CaptionTokens
from .arrays.probe import check_of, check_whole
from .arrays.shard_folder import Access, ShardFolder
from .arrays.sharded_array import ShardedArray
from .arrays.stack import ArrayStack
from .disk.cached import cached_property
from .disk.hashing import xxh3_file
from .errors import DamageError, RecipeError, RowOutOfRange, StoreError, StoreIncomplete, UnknownKey
from .format.buckets import bucket_size
from .format.class_names import ClassNames
from .format.layout import CAPTIONS, GROUP, RECORDS, REMOTE_ABOUT, bucket_part, revision_prefix
from .format.schema import Manifest
from .format.tables import read_table, table_problem
from .revisions.catalog import REPAIR, check_store, read_spec, sealed_revisions
from .revisions.commits import missing_work, read_commits, read_manifest
from .revisions.merge import merge_captions, merge_records
from .revisions.plan import planned_revisions, read_plan

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them
NUM_NEAR, MOST_COMPARED = 3, 4000  # keys that an error names; and compares one by one
SIZE_COLUMNS = (
    "height_px",
    "width_px",
    "resized_height_px",
    "resized_width_px",
    "crop_top_px",
    "crop_left_px",
)


@dataclass(frozen=True)
class Record:
    """One image with its captions and label, as stored.

    ``index`` is its position in the records table; ``row`` its position in ``store.latents(bucket)``, -1 for none.
    """

    index: int
    key: str
    revision: int
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
    attempts: int
    fallback: str | None


class LatentStore:
    """A revision of a store, opened for reading.

    Args:
      path: of the store.
      revision: number of the revision; 0 for the newest that is complete.
      allow_incomplete: open the first revision also while shards are missing; what is not there is then not stored.
      access: "map" the shards, or "pread" them: for a network file system, where a map that fails ends the process.
      remote: of a store at a URL: ``folder``, ``capacity_gib``, ``threads``, ``options`` of ``remote.open_remote``.
    Raises:
      StoreNotFound: there is nothing at the path.
      StoreError: it is something else than a store, or has no such revision.
      FormatVersionError: it was written in another format version.
      StoreIncomplete: planned shards are missing.
      DamageError: a file is missing or has not the size that the manifest says.
      RecipeError: an argument is none of those.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        revision: int = 0,
        allow_incomplete: bool = False,
        access: Access = "map",
        remote: Mapping[str, Any] | None = None,
    ) -> None:
        if access not in get_args(Access):
            raise RecipeError(f"access {access!r}: needed one of {', '.join(get_args(Access))}.")
        self.remote = None
        if "://" in str(path):
            from .remote.cache import open_remote

            self.remote = open_remote(str(path), revision=revision, **(remote or {}))
            revision = self.remote.manifest.revision  # others may bring a newer one into the folder meanwhile
        self.path = self.remote.store if self.remote else Path(path)
        self._root = Path(os.path.abspath(self.path))  # shards are opened later, wherever the process stands then
        self._opened_as = path if self.remote else self._root, remote
        check_store(self.path)
        sealed = sealed_revisions(self.path)
        if revision and revision not in (sealed or [1]):
            there = ", ".join(map(str, sealed)) or "none that is complete"
            raise StoreError(f"store '{self.path}': it has no complete revision {revision}. There are: {there}.")
        self.newest_revision = sealed[-1] if sealed else 1
        self.revision = revision or self.newest_revision
        self.complete = bool(sealed)
        self.spec = read_spec(self.path, self.revision)
        self.manifest = read_manifest(self.path, self.revision) if sealed else None
        newest_planned = planned_revisions(self.path)[-1:]
        is_unfinished = newest_planned and newest_planned[0] not in sealed and newest_planned[0] >= self.newest_revision
        self.unfinished_revision = newest_planned[0] if is_unfinished else None
        if self.manifest:
            sizes = {entry.path: entry.bytes for entry in self.manifest.files}
            self._stack = ArrayStack(self._root, self.spec, self.manifest.stack, sizes=sizes, planned={})
            self.folder = ShardFolder(self._root, sizes, access=access, remote=self.remote)
            if self.remote is None:  # else open_remote has checked them
                self._check_files(self.manifest)
            return
        self.folder = ShardFolder(self._root, access=access)
        self._plan = read_plan(self.path, 1)
        self._stack = ArrayStack(self._root, self.spec, [1], sizes=None, planned=self._plan.layout.arrays)
        self._commits = read_commits(self.path, self._plan)
        if not allow_incomplete:
            missing = [task for task in self._plan.layout.tasks() if task not in self._commits]
            what = (
                f"{missing_work(self._plan, missing)} are missing"
                if missing
                else "all shards are there, but not sealed"
            )
            raise StoreIncomplete(
                f"store '{self.path}': not complete; {what}. Run the same precompute command again: it resumes where "
                "it stopped."
            )

    def __repr__(self) -> str:
        where = self.remote.url if self.remote else self.path
        return f"LatentStore('{where}', revision={self.revision}): {len(self)} records in {len(self.buckets)} buckets"

    def __len__(self) -> int:
        """Stored records, over all buckets; the records table has the rejected ones too."""
        return sum(self.buckets.values())

    def __bool__(self) -> bool:
        return True  # also without records

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process opens the store anew."""
        path, remote = self._opened_as
        return _reopen, (path, self.revision, self.manifest is None, self.folder.access, remote)

    @property
    def buckets(self) -> dict[str, int]:
        """Stored records per bucket, in order of height, then width."""
        if self.manifest:  # its JSON is sorted as text; here the order is by size
            return {name: self.manifest.buckets[name] for name in sorted(self.manifest.buckets, key=bucket_size)}
        return {bucket: len(self.index(bucket).rows) for bucket in self._plan.bucket_positions}

    @property
    def root_hash(self) -> str | None:
        """Hash that stands for every byte of the revision, or None while it is incomplete."""
        return self.manifest.root_hash if self.manifest else None

    @property
    def plan_hash(self) -> str:
        """Hash of the revision's plan, which stands for an incomplete one."""
        return self.manifest.plan if self.manifest else self._plan.hash

    @property
    def num_classes(self) -> int:
        """Number of classes, 0 where the records have no labels."""
        return len(self.spec.classes or ())

    @cached_property
    def class_names(self) -> ClassNames:
        """The classes by name: ``store.class_names.find("tench")`` is a label, ``.describe(0)`` what to call it."""
        return ClassNames(self.spec.classes, self.spec.class_names)

    @cached_property
    def records(self) -> pa.Table:
        """The records table (RECORDS_SCHEMA), in the order of the source."""
        return self.record_columns(None)

    @property
    def checksums(self) -> np.ndarray:
        """(records,) uint64 checksum of each record's rows, as the records table has it; 0 where not stored."""
        return self._indexed[1]

    @cached_property
    def sizes(self) -> np.ndarray:
        """(records, 6) int32 pixels, for micro-conditioning: SIZE_COLUMNS of each record of the records table.

        A batch's ``records`` and ``index(bucket).records`` are positions in it. 0 where a record was rejected at scan.
        """
        table = self.record_columns(SIZE_COLUMNS)
        return np.stack([pc.fill_null(table[name], 0).to_numpy() for name in SIZE_COLUMNS], axis=1)

    @cached_property
    def captions(self) -> pa.Table:
        """The captions table (CAPTIONS_SCHEMA); the position is the caption's id."""
        return self._caption_columns(None)

    @cached_property
    def caption_checksums(self) -> np.ndarray:
        """(captions,) uint64 checksum of each caption's tokens, as the captions table has it."""
        return pc.fill_null(self._caption_columns(("checksum",))["checksum"], 0).to_numpy()

    def record_columns(self, columns: Sequence[str] | None) -> pa.Table:
        """Some columns of the records table, or all, read anew; texts may be dictionaries."""
        if not self.manifest:
            table = merge_records(self._plan, self._commits)
            return table.select(columns) if columns else table
        table = self._table(RECORDS, columns)
        if problem := table_problem(self.spec, self.revision, table, self.manifest.num_captions):
            raise DamageError(f"store '{self.path}': its records table says what cannot be: {problem}. {REPAIR}")
        return table

    def _caption_columns(self, columns: Sequence[str] | None) -> pa.Table:
        if not self.manifest:
            table = merge_captions(self._plan, self._commits)
            return table.select(columns) if columns else table
        table = self._table(CAPTIONS, columns)
        if table.num_rows != self.manifest.num_captions:
            raise DamageError(
                f"store '{self.path}': {table.num_rows} captions, the manifest says {self.manifest.num_captions}. "
                f"{REPAIR}"
            )
        return table

    def latents(self, bucket: str) -> ShardedArray:
        """Rows of a bucket as stored, (N, 2C, H, W) moments or (N, C, H, W) latents, raw: neither shifted nor scaled.

        Raises: UnknownKey: there is no such bucket; they are listed.
        """
        return self._array(f"{bucket_part(bucket)}/{self.spec.latent.array}")

    def flipped_latents(self, bucket: str) -> ShardedArray:
        """Rows of the horizontally flipped pictures.

        Raises: StoreError: the store was made without them.
        """
        if not self.spec.latent.flip:
            raise StoreError(f"store '{self.path}': it holds no flipped latents. Precompute with vae.flip = true.")
        return self._array(f"{bucket_part(bucket)}/{self.spec.latent.array}_flip")

    def index(self, bucket: str) -> BucketIndex:
        """Labels and captions of the stored records of a bucket, in order of their rows.

        Raises: UnknownKey: there is no such bucket; they are listed.
        """
        if bucket not in self._indexed[0]:
            raise UnknownKey(f"store '{self.path}': no bucket '{bucket}'. Buckets: {', '.join(self.buckets)}.")
        return self._indexed[0][bucket]

    @cached_property
    def _indexed(self) -> tuple[dict[str, BucketIndex], np.ndarray]:
        """All that is kept of the records table, read once: the indexes of the buckets, and the checksums."""
        buckets = self.manifest.buckets if self.manifest else self._plan.bucket_positions
        table = self.record_columns((*INDEX_COLUMNS, "checksum"))
        indexes = build_indexes(table, buckets, self._stack.rows)
        for bucket, index in indexes.items():
            if len(index) and not -1 <= index.labels.min() <= index.labels.max() < self.num_classes:
                raise DamageError(
                    f"store '{self.path}': bucket '{bucket}' has label {index.labels.max()}, with {self.num_classes} "
                    f"classes. {REPAIR}"
                )
            if self.spec.text and np.any(np.diff(index.caption_starts) == 0):
                raise DamageError(f"store '{self.path}': bucket '{bucket}' has a record without captions. {REPAIR}")
        checksums = pc.fill_null(table["checksum"], 0).to_numpy().copy()  # not a view, which would keep the table
        del table
        pa.default_memory_pool().release_unused()  # the table was ten times what is kept of it
        return indexes, checksums

    def record(self, key: str) -> Record:
        """Find a record by its key.

        Raises: UnknownKey: there is none; the nearest keys are named.
        """
        positions = np.flatnonzero(pc.equal(self.records["key"], key).to_numpy(zero_copy_only=False))
        if not len(positions):
            hint = near_keys(self.records["key"], key)
            raise UnknownKey(f"store '{self.path}': no record has the key '{key}'.{hint}")
        found = [self.record_at(int(position)) for position in positions]  # several: rejected as "duplicate_key"
        return next((record for record in found if record.status == "stored"), found[0])

    def record_at(self, index: int) -> Record:
        """The record at a position of the records table.

        Raises: RowOutOfRange.
        """
        if not 0 <= index < self.records.num_rows:
            raise RowOutOfRange(f"store '{self.path}': record {index}, there are {self.records.num_rows}")
        values = self.records.slice(index, 1).to_pylist()[0]
        values["caption_ids"] = tuple(values["caption_ids"] or ())
        if values["bucket"] and values["row"] >= 0 and values["revision"] in self._stack.revisions:
            place = np.array([values["revision"]]), np.array([values["row"]])
            values["row"] = int(self._stack.rows(values["bucket"], *place)[0])
        return Record(index=index, **{name: values[name] for name in Record.__dataclass_fields__ if name != "index"})

    @cached_property
    def tokens(self) -> CaptionTokens:
        """The tokens of the captions.

        Raises: StoreError: the store was made without captions.
        """
        if self.spec.text is None:
            raise StoreError(f"store '{self.path}': it holds no captions. Precompute with text.kind.")
        return CaptionTokens(self.spec.text, self._array, self._read_spans)

    def caption(self, record: Record | int, which: int = 0) -> np.ndarray:
        """Embedding of one of a record's captions, as ``caption_embedding``.

        Args:
          record: or its position in the records table, as a batch's ``records`` has it.
        Raises: RowOutOfRange: no such record, or it has no such caption; StoreError: the store holds no captions.
        """
        found = record if isinstance(record, Record) else self.record_at(int(record))
        if not 0 <= which < len(found.caption_ids):
            raise RowOutOfRange(
                f"store '{self.path}': caption {which} of record '{found.key}', it has {len(found.caption_ids)}"
            )
        return self.caption_embedding(found.caption_ids[which])

    def caption_embedding(self, caption_id: int) -> np.ndarray:
        """Embedding of a caption, (L, D), its valid tokens: where float16 or float32 is stored a mapped view, where
        bfloat16 or int8 is, a float32 copy.

        Raises: RowOutOfRange: no such caption.
        """
        if not 0 <= caption_id < len(self.tokens.lengths):
            raise RowOutOfRange(f"store '{self.path}': caption {caption_id}, there are {len(self.tokens.lengths)}")
        return self.tokens[caption_id]

    @property
    def null_caption(self) -> np.ndarray:
        """Embedding of the empty caption at full length, (max_tokens, D), for classifier-free guidance; the dtype is
        that of ``caption_embedding``."""
        return self.tokens.null

    def _read_spans(self) -> tuple[np.ndarray, np.ndarray]:
        found = self._stack.caption_spans(self.folder, check_whole(self))
        if self.manifest and len(found[0]) != self.manifest.num_captions:
            raise DamageError(f"store '{self.path}': its captions name tokens that are not there. {REPAIR}")
        return found

    def find_captions(self, texts: Sequence[str]) -> list[int | None]:
        """Ids of captions by their exact text, None where the store has not encoded it."""
        return [i if (i := pc.index(self.captions["text"], text).as_py()) >= 0 else None for text in texts]

    @cached_property
    def _arrays(self) -> dict[str, ShardedArray]:
        return {}

    def _array(self, path: str) -> ShardedArray:
        """An array, stacked over the revisions that hold a part of it."""
        if path in self._arrays:
            return self._arrays[path]
        with self.folder.lock:  # two of one path would map its shards twice
            if path not in self._arrays:
                layouts = self._stack.layouts(path)
                if not layouts:
                    raise UnknownKey(
                        f"store '{self.path}': there is no array '{path}'. Buckets: {', '.join(self.buckets)}."
                    )
                self._arrays[path] = ShardedArray(self.folder, list(layouts.values()), check_of(self, path))
            return self._arrays[path]

    def _table(self, name: str, columns: Sequence[str] | None) -> pa.Table:
        assert self.manifest is not None
        path = revision_prefix(self.revision) + name
        entry = next((entry for entry in self.manifest.files if entry.path == path), None)
        if entry is None or xxh3_file(self._root / path) != entry.xxh3_128:
            raise DamageError(f"store '{self.path}': '{path}' differs from the manifest. {REPAIR}")
        return read_table(self._root / path, columns)

    def _check_files(self, manifest: Manifest) -> None:
        """A missing shard would read as zeros to plain Zarr, a shorter one would kill the process: check first."""
        for entry in manifest.files:
            path = self.path / entry.path
            size = path.stat().st_size if path.is_file() else None
            if size is None and (self.path.parent / REMOTE_ABOUT).is_file():
                raise StoreError(
                    f"store '{self.path}': the local folder of a store at a URL, which holds only what was needed so "
                    "far. Open the URL itself: LatentStore(url)."
                )
            if size != entry.bytes:
                was = "is missing" if size is None else f"has {size} bytes"
                raise DamageError(
                    f"store '{self.path}': file '{entry.path}' {was}, the manifest says {entry.bytes} bytes. {REPAIR}"
                )
            if entry.path.endswith(GROUP) and xxh3_file(path) != entry.xxh3_128:
                raise DamageError(
                    f"store '{self.path}': file '{entry.path}' differs from the manifest, so its numbers cannot be "
                    f"trusted. {REPAIR}"
                )


def _reopen(
    path: str | Path, revision: int, allow_incomplete: bool, access: Access, remote: Mapping[str, Any] | None
) -> LatentStore:
    return LatentStore(path, revision=revision, allow_incomplete=allow_incomplete, access=access, remote=remote)


def near_keys(keys: pa.ChunkedArray, wanted: str) -> str:
    """A sentence that names keys like an unknown one: those that contain it, else the nearest ones, else nothing.

    Of more than ``MOST_COMPARED`` keys, those are compared that begin as the unknown one does.
    """
    if found := keys.filter(pc.match_substring(keys, wanted)).slice(0, NUM_NEAR).to_pylist():
        return f" Keys that contain it: {', '.join(found)}."
    for length in range(1, len(wanted) + 1):
        alike = keys.filter(pc.starts_with(keys, wanted[:length])) if len(keys) > MOST_COMPARED else []
        if not len(alike):
            break
        keys = alike
    near = difflib.get_close_matches(wanted, keys.slice(0, MOST_COMPARED).to_pylist(), n=NUM_NEAR)
    return f" The nearest keys: {', '.join(near)}." if near else ""
