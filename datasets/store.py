"""``LatentStore``: open a store, check that it is complete, map its arrays, read records. Without torch.

store = LatentStore("imagenet-256")
store.buckets                               # {"256x256": 1281167}
moments = store.latents("256x256")          # a sequence of rows; moments[i] is a mapped view
moments.take(rows, out=buffer)              # (B, 2C, H, W)
store.caption(7)                            # (L, D), the valid tokens of the first caption of record 7
store.record("n01440764/n01440764_18.JPEG").index              # a record by its key
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ..errors import DamageError, RecipeError, RowOutOfRange, StoreError, UnknownKey
from .arrays.shard_check import check_shard
from .arrays.shard_folder import ShardFolder
from .arrays.sharded_array import ShardedArray
from .arrays.tokens import CaptionTokens, FeatureArrays
from .disk.cached import cached_property
from .disk.file_systems import Access, choose_access
from .format.buckets import bucket_size
from .format.class_names import ClassNames
from .format.layout import CAPTIONS, RECORDS
from .format.row_layout import (
    BUCKETS,
    CAPTION_PART,
    COMPANIONS,
    EMBEDDINGS,
    LATENTS,
    POOLED,
    ArrayGroup,
    array_groups,
    bucket_part,
    buckets_of,
    caption_folder,
    companion_rows,
    view_suffix,
)
from .format.schema import TextEncoder
from .format.table_schemas import PLACEMENT, suffixes
from .format.zarr_shard import ArrayLayout
from .revisions.catalog import REPAIR
from .revisions.opened import OpenedRevision
from .revisions.records import BucketIndex, Record, bucket_indexes, key_hash, near_keys, spans_fit

if TYPE_CHECKING:
    import zarr

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them


class LatentStore(OpenedRevision):
    """A revision of a store, opened for reading.

    Args:
      path: folder or URL of the store.
      revision: number of the revision; 0 for the newest complete one.
      allow_incomplete: open the first revision even while shards are missing; their records count as not stored.
      access: "map" the files, or "pread" them: on a network file system, where a failed map ends the process; "auto":
        as the file system needs it. ``store.access`` says which, and why.
      remote: for a store at a URL: ``folder``, ``capacity_gib``, ``threads``, ``options`` of ``remote.open_remote``.
    Raises:
      StoreNotFound: the path does not exist.
      StoreError: it is not a store, or has no such revision.
      FormatVersionError: it has another format version.
      StoreIncomplete: planned shards are missing.
      DamageError: a file is missing or does not have the size in the manifest.
      RecipeError: an argument has an unknown value.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        revision: int = 0,
        allow_incomplete: bool = False,
        access: Access = "auto",
        remote: Mapping[str, Any] | None = None,
    ) -> None:
        if access not in get_args(Access):
            raise RecipeError(f"access {access!r}: expected one of {', '.join(get_args(Access))}.")
        self.remote = None
        if "://" in str(path):
            from .remote.opening import open_remote

            self.remote = open_remote(str(path), revision=revision, **(remote or {}))
            revision = self.remote.manifest.revision  # another process may add a newer one to the folder
        super().__init__(self.remote.store if self.remote else Path(path), revision, allow_incomplete=allow_incomplete)
        self.complete = self.manifest is not None
        self._arguments = path if self.remote else self.root, remote
        self._asked_access: Access = access
        self.access = choose_access([self.root, self.root / BUCKETS, self.root / CAPTION_PART], access)
        sizes = {path: entry.bytes for path, entry in self.files.items()} if self.manifest else None
        self.folder = ShardFolder(self.root, sizes, access=self.access.mode, remote=self.remote)
        if self.remote is None:  # ``open_remote`` has checked them already
            self.check_files()
        self._arrays: dict[str, ShardedArray] = {}
        self._texts: dict[str, CaptionTokens] = {}

    def __repr__(self) -> str:
        where = self.remote.url if self.remote else self.path
        return f"LatentStore('{where}', revision={self.revision}): {len(self)} records in {len(self.buckets)} buckets"

    def __len__(self) -> int:
        """Stored records in all buckets; the records table also lists the rejected ones."""
        return sum(self.buckets.values())

    def __bool__(self) -> bool:
        return True  # even without records

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled store is opened again where it is unpickled."""
        path, remote = self._arguments
        arguments = {"revision": self.revision, "allow_incomplete": self.manifest is None}
        arguments |= {"access": self._asked_access, "remote": remote}
        return functools.partial(LatentStore, path, **arguments), ()

    @property
    def may_map(self) -> bool:
        """Whether files of the store may be mapped."""
        return self.access.mode == "map"

    @property
    def buckets(self) -> dict[str, int]:
        """Stored records per bucket, in order of height, then width."""
        if self.manifest:  # sorted as text in its JSON
            return {name: self.manifest.buckets[name] for name in sorted(self.manifest.buckets, key=bucket_size)}
        return self._plan_counts

    @cached_property
    def _plan_counts(self) -> dict[str, int]:
        """Stored records per bucket of an incomplete revision, from its commit records."""
        counts = dict.fromkeys(self._plan.new_rows, 0)
        for batch in self.record_batches(("bucket", "status")):
            stored = batch["bucket"].filter(pc.equal(batch["status"], "stored"))
            for entry in pc.value_counts(stored).to_pylist():
                counts[entry["values"]] += entry["counts"]
        return counts

    @property
    def root_hash(self) -> str | None:
        """Hash over every byte of the revision; None while it is incomplete."""
        return self.manifest.root_hash if self.manifest else None

    @property
    def content_hash(self) -> str:
        """Identifies the records, wherever the store lies: the root hash, or the plan while the store is incomplete."""
        return self.root_hash or content_hash_of_plan(self.plan_hash)

    @property
    def num_classes(self) -> int:
        """Number of classes; 0 if the records have no labels."""
        return len(self.spec.classes or ())

    @cached_property
    def class_names(self) -> ClassNames:
        """Names of the classes: ``store.class_names.find("tench")`` returns a label, ``.describe(0)`` a name."""
        return ClassNames(self.spec.classes, self.spec.class_names)

    # Tables.

    @cached_property
    def records(self) -> pa.Table:
        """The records table (RECORDS_SCHEMA), in the order of the source."""
        return self.record_columns(None)

    def record_columns(self, columns: Sequence[str] | None) -> pa.Table:
        """Read some columns of the records table, or all, from disk; texts may be dictionaries."""
        return self.table(RECORDS, columns)

    def record_batches(self, columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
        """Like ``record_columns``, a batch of rows at a time."""
        return self.batches(RECORDS, columns)

    @cached_property
    def captions(self) -> pa.Table:
        """The captions table (CAPTIONS_SCHEMA); the position is the caption's id."""
        return self.table(CAPTIONS, None)

    def checksums(self, group: str = LATENTS) -> np.ndarray:
        """(records,) uint64 checksum of each record's latents, or of its feature or companion; 0 if not stored."""
        return self.numbers(f"checksum_{group}" if group else "checksum")

    def caption_checksums(self, name: str = "") -> np.ndarray:
        """(captions,) uint64 checksum of each caption's rows of a text encoder, from the captions table."""
        return self.numbers(f"caption_checksum{suffixes(self.spec)[name]}")

    @cached_property
    def sizes(self) -> np.ndarray:
        """(records, 6) int32 pixels, for micro-conditioning: PLACEMENT of each record of the records table.

        ``Batch.records`` and ``index(bucket).records`` are positions in it. 0 for records rejected at scan.
        """
        table = self.record_columns(PLACEMENT)
        return np.stack([pc.fill_null(table[name], 0).to_numpy() for name in PLACEMENT], axis=1)

    # Records.

    def index(self, bucket: str) -> BucketIndex:
        """Labels and captions of the stored records of a bucket, in order of their rows.

        Raises: UnknownKey: the bucket does not exist; the message lists the buckets.
        """
        if bucket not in self._indexes:
            raise UnknownKey(f"store '{self.path}': no bucket '{bucket}'. Buckets: {', '.join(self.buckets)}.")
        return self._indexes[bucket]

    @cached_property
    def _indexes(self) -> dict[str, BucketIndex]:
        counts = self.manifest.buckets if self.manifest else self._plan_counts
        indexes = bucket_indexes(self.numbers, counts)
        for bucket, index in indexes.items():
            latents = self.layout(f"{bucket_part(bucket)}/{self.spec.latent.array}")
            problem = index.problem(self.spec, latents, self.num_records, self.num_captions)
            if problem or len(index) != counts[bucket]:
                raise DamageError(f"store '{self.path}': bucket '{bucket}' {problem or 'lacks records'}. {REPAIR}")
        return indexes

    def record(self, key: str) -> Record:
        """Find a record by its key.

        Raises: UnknownKey: no record has it; the message names the nearest keys.
        """
        positions = np.flatnonzero(self.numbers("keys") == np.uint64(key_hash(key))).tolist()
        records = [record for position in positions if (record := self.record_at(position)).key == key]
        if not records:
            keys = self.record_columns(("key",))["key"].cast(pa.string())
            raise UnknownKey(f"store '{self.path}': no record has the key '{key}'.{near_keys(keys, key)}")
        return next((record for record in records if record.status == "stored"), records[0])  # all others are rejects

    def record_at(self, index: int) -> Record:
        """The record at a position of the records table, of which only a row group is read.

        Raises: RowOutOfRange.
        """
        if not 0 <= index < self.num_records:
            raise RowOutOfRange(f"store '{self.path}': record {index} out of range: it has {self.num_records}")
        values = self.row(RECORDS, index)
        values["caption_ids"] = tuple(values["caption_ids"] or ())
        return Record(index=index, **{name: values[name] for name in Record.__dataclass_fields__ if name != "index"})

    # Arrays of images.

    def latents(self, bucket: str, *, variant: int = 0, flipped: bool = False) -> ShardedArray:
        """Rows of a bucket as stored, (N, 2C, H, W) moments or (N, C, H, W) latents, raw: neither shifted nor scaled.

        Rows of int8 have more channels, the bytes of the scales: ``format.token_dtypes.widen_latents`` makes numbers
        of them.

        Args:
          variant: the crop: 0 for the planned one, up to ``spec.images.variants - 1``.
          flipped: of the horizontally flipped crops.
        Raises: UnknownKey: the bucket does not exist; the message lists the buckets. StoreError: the store was encoded
          without such crops.
        """
        suffix = self._view_suffix(variant, flipped=flipped)
        return self.array(f"{bucket_part(bucket)}/{self.spec.latent.array}{suffix}")

    def _view_suffix(self, variant: int, *, flipped: bool) -> str:
        if flipped and not self.spec.latent.flip:
            raise StoreError(f"store '{self.path}': it holds no flipped latents. Precompute with vae.flip = true.")
        if not 0 <= variant < self.spec.images.variants:
            raise StoreError(
                f"store '{self.path}': variant {variant}, expected 0 to {self.spec.images.variants - 1}. "
                "Precompute with a larger images.variants."
            )
        return view_suffix(variant, flipped=flipped)

    @property
    def features(self) -> list[str]:
        """Names of the image features."""
        return [one.name for one in self.spec.features]

    def feature(self, name: str, bucket: str) -> FeatureArrays:
        """Rows of a feature of a bucket, in the order of ``latents``.

        Raises: UnknownKey: the bucket or the feature does not exist; the message lists those that do.
        """
        spec = self._named("feature", name, self.spec.features).spec
        self.latents(bucket)  # raises if the bucket does not exist
        return FeatureArrays(spec, bucket, name, self.array)

    @property
    def companions(self) -> list[str]:
        """Names of the companions."""
        return [one.name for one in self.spec.companions]

    def companion(self, name: str, bucket: str, *, variant: int = 0, flipped: bool = False) -> ShardedArray:
        """Rows of a companion of a bucket, in the order of ``latents``.

        Args:
          variant: a crop, as in ``latents``.
          flipped: of the horizontally flipped crops.
        Returns: as stored: like ``latents``, or for a mask (N, H, W) uint8, the gray of each position of a latent.
        Raises: UnknownKey: the bucket or the companion does not exist; the message lists those that do. StoreError: the
          store holds no such crops.
        """
        spec = self._named("companion", name, self.spec.companions)
        suffix = self._view_suffix(variant, flipped=flipped)
        self.latents(bucket)  # raises if the bucket does not exist
        (array,) = companion_rows(self.spec, spec, bucket)
        return self.array(f"{bucket_part(bucket)}/{COMPANIONS}/{name}/{array}{suffix}")

    def _named(self, what: str, name: str, known: Sequence[Any]) -> Any:
        if name not in (names := [one.name for one in known]):
            raise UnknownKey(f"store '{self.path}': no {what} '{name}'. Available: {', '.join(names) or 'none'}.")
        return known[names.index(name)]

    # Captions.

    @property
    def texts(self) -> list[str]:
        """Names of the text encoders; that of ``[text]`` is empty."""
        return [one.name for one in self.spec.text_encoders]

    def text(self, name: str = "") -> CaptionTokens:
        """Captions of a text encoder.

        Args:
          name: as in ``texts``; empty for the first one.
        Raises: StoreError: the store was encoded without captions; UnknownKey: it has no such text encoder.
        """
        if name not in self._texts:
            if not self.texts:
                raise StoreError(f"store '{self.path}': it holds no captions. Precompute with text.kind.")
            one = self._named("text encoder", name or self.texts[0], self.spec.text_encoders)
            self._texts[name] = CaptionTokens(one.name, one.spec, self.array, lambda: self._spans(one))
        return self._texts[name]

    @property
    def null_caption(self) -> np.ndarray:
        """Embedding of the empty caption at full length by the first text encoder, (max_tokens, D), for classifier-free
        guidance; its dtype is that of ``caption_embedding``."""
        return self.text().null

    def caption(self, record: Record | int, which: int = 0, text: str = "") -> np.ndarray:
        """Embedding of one of a record's captions, as ``caption_embedding``.

        Args:
          record: a record, or its position in the records table, as in ``Batch.records``.
          text: the text encoder; empty for the first.
        Raises: RowOutOfRange: no such record or caption; StoreError: the store holds no captions.
        """
        record = record if isinstance(record, Record) else self.record_at(int(record))
        if not 0 <= which < len(record.caption_ids):
            raise RowOutOfRange(
                f"store '{self.path}': caption {which} of record '{record.key}' is out of range: it has "
                f"{len(record.caption_ids)}"
            )
        return self.caption_embedding(record.caption_ids[which], text)

    def caption_embedding(self, caption_id: int, text: str = "") -> np.ndarray:
        """Embedding of a caption, (L, D), its valid tokens: a mapped view of stored float16 or float32, a float32 copy
        of stored bfloat16 or int8.

        Args:
          text: the text encoder; empty for the first.
        Raises: RowOutOfRange: no such caption.
        """
        if not 0 <= caption_id < self.num_captions:
            raise RowOutOfRange(f"store '{self.path}': caption {caption_id} out of range: it has {self.num_captions}")
        return self.text(text)[caption_id]

    def find_captions(self, texts: Sequence[str]) -> list[int | None]:
        """Ids of captions by their exact text; None for a text that the store does not hold in finite numbers."""
        ids, wanted, first = dict[str, int](), pa.array(list(texts), pa.string()), 0
        for batch in self.batches(CAPTIONS, ("text",)):
            column = batch["text"].cast(pa.string())
            for position in np.flatnonzero(pc.is_in(column, wanted).to_numpy(zero_copy_only=False)).tolist():
                ids.setdefault(column[position].as_py(), position + first)
            first += batch.num_rows
        known = {text: i for text, i in ids.items() if all(self.caption_checksums(name)[i] for name in self.texts)}
        return [known.get(text) for text in texts]

    def _spans(self, one: TextEncoder) -> tuple[np.ndarray, np.ndarray]:
        """First row and rows of every caption of a text encoder, (num_captions,) each.

        Raises: DamageError: a caption does not lie within a shard.
        """
        starts, lengths = (
            self.numbers(f"caption_{what}{suffixes(self.spec)[one.name]}") for what in ("start", "length")
        )
        layout = self.layouts.get(f"{caption_folder(one.name)}/{EMBEDDINGS if one.spec.has_tokens else POOLED}")
        if not spans_fit(one.spec, layout, starts, lengths):
            raise DamageError(f"store '{self.path}': its captions name tokens that do not exist. {REPAIR}")
        return starts, lengths

    # All arrays.

    def layout(self, path: str) -> ArrayLayout:
        """Shape, dtype and shards of an array. Raises: UnknownKey."""
        if path not in self.layouts:
            raise UnknownKey(f"store '{self.path}': no array '{path}'. Buckets: {', '.join(self.buckets)}.")
        return self.layouts[path]

    def array(self, path: str) -> ShardedArray:
        """An array by its path, such as "buckets/256x256/moments". Raises: UnknownKey."""
        if path in self._arrays:
            return self._arrays[path]
        layout = self.layout(path)
        check = functools.partial(check_shard, self, self._groups[path], path)
        with self.folder.lock:  # two arrays of one path would map its shards twice
            return self._arrays.setdefault(path, ShardedArray(self.folder, layout, check))

    @cached_property
    def _groups(self) -> dict[str, ArrayGroup]:
        """The group of each array, by path."""
        return array_groups(self.spec, buckets_of(self.layouts))

    @cached_property
    def zarr(self) -> zarr.Group:
        """The store as a group of zarr-python, read-only: ``store.zarr["buckets/256x256/moments"][:4]``.

        Its arrays have the rows of the newest revision, including those that no record names (FORMAT.md). Nothing is
        checked. bfloat16 arrays are float32 numbers here; their files hold the bits as uint16. xarray opens
        ``store.zarr.store``.

        Raises: StoreError: the store is at a URL, and its shards are not local.
        """
        import zarr

        from .format.zarr_numbers import NumbersStore

        if self.remote:
            raise StoreError(f"store '{self.remote.url}': zarr-python reads local stores. Download it first.")
        return zarr.open_group(NumbersStore(self.folder.root), mode="r")


def content_hash_of_plan(plan_hash: str) -> str:
    """``LatentStore.content_hash`` of an incomplete store, whose plan has this hash."""
    return f"plan {plan_hash}"
