"""``create_store``: a store from the arrays of any encoder, record by record, in bounded memory.

What is added is checked (``append/records.py``) and becomes rows (``append/values.py``), which fill one open shard for
each bucket and text encoder (``append/open_part.py``). A journal (``append/journal.py``) says what was added: its
commits make the first so many calls of ``add`` last. At the end the plan follows from it (``append/plan.py``), and the
tables and the manifest are written by the code that seals every store.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np

from ..errors import InvalidRecord, RecipeError, StoreError
from .append.declaration import Declaration, declare
from .append.journal import AddedCaption, AddedRecord, Journal, int32_bytes
from .append.open_part import OpenPart, sized_for
from .append.plan import REVISION, plan_of
from .append.records import (
    BucketRows,
    CheckedRecord,
    NewCaptions,
    RecordChecker,
    RecordInput,
    as_batch,
    by_bucket,
    check_key,
)
from .disk.files import make_folder, remove
from .disk.locks import try_locked
from .disk.spill import map_array
from .format.layout import JOURNAL, Part, RevisionLayout, revision_prefix
from .format.row_layout import bucket_part, caption_folder
from .format.schema import Manifest
from .format.table_schemas import REJECT_REASONS, STORED
from .revisions.catalog import has_journal, read_manifest, sealed_revisions, sweep_store
from .revisions.commits import new_results
from .revisions.plan import freeze_plan, read_spec
from .revisions.records import key_hash
from .revisions.seal import finish_seal
from .revisions.writer import StoreWriter, row_checksum

COMMIT_BYTES = 64 << 20  # of rows that wait in memory; a kill costs at most these
COMMIT_ITEMS = 1 << 16  # records and captions that wait likewise
COMMIT_SECONDS = 30.0
LOCK = "lock"  # file of the journal that one writer holds


def create_store(
    path: str | Path,
    *,
    latent: Mapping[str, Any],
    text: Mapping[str, Any] | None = None,
    features: Mapping[str, Mapping[str, Any]] | None = None,
    companions: Mapping[str, Mapping[str, Any]] | None = None,
    classes: Sequence[str] | int | None = None,
    shard_mib: int = 64,
    codec: str = "none",
    expected_records: int = 0,
    invalid: Literal["raise", "reject"] = "raise",
) -> RecordWriter:
    """Write a store from arrays: ``with create_store(...) as store: store.add(...)``.

    Leaving the block seals the store. If an error leaves it, what was added is kept, and the same program continues:
    keys that are committed are skipped.

    Args:
      path: a new folder, or one that an earlier call has begun.
      latent: ``channels`` (or a ``sample``), ``downscale`` (pixels of a position), ``scale``, ``shift`` (0), ``kind``
        ("latent", "sample", "mean", "mean_logvar", "mean_std"), ``dtype`` ("float16", "float32", "int8"), ``flip``
        (False), ``encoder`` (a name).
      text: of the text encoder ``null`` (its output for the empty caption: (L, D), (P,) or a tuple of both),
        ``max_tokens``, ``dtype`` (also "bfloat16"), ``full_length`` (False), ``encoder``; or a dict of these for each
        of several text encoders, by name.
      features: by name ``width`` (or a ``sample``), ``output`` ("patches", "cls", "both"), ``patch_px``, ``dtype``
        ("float16", "int8"), ``resolution_px``, ``images_px``, ``encoder``.
      companions: by name ``kind`` ("image" or "mask").
      classes: names of the classes, or their number; None without labels.
      shard_mib: size of a shard.
      codec: "none", or a codec of FORMAT.md.
      expected_records: about how many there will be, which makes the shards of a very large store larger; 0: not known.
      invalid: "raise" an InvalidRecord for a record that cannot be stored, or "reject" it with its reason.
    Raises: RecipeError: a wrong declaration; FingerprintMismatch: the folder was begun with another one; StoreError:
      the folder is something else, or another process writes it; DamageError: what was added before was changed since.
    """
    if invalid not in ("raise", "reject"):
        raise RecipeError(f"create_store: invalid={invalid!r}; expected 'raise' or 'reject'.")
    declaration = declare(
        latent,
        text,
        features,
        companions,
        classes,
        shard_mib=shard_mib,
        codec=codec,
        expected_records=expected_records,
    )
    if "://" in str(path):
        raise StoreError(f"store '{path}': expected a local folder. Write the store there, then copy or publish it.")
    return RecordWriter(Path(path).absolute(), declaration, rejects_invalid=invalid == "reject")


class RecordWriter:
    """Adds records to a new store; ``create_store`` makes it.

    Attributes:
      num_added, num_rejected, num_skipped: records of this run; skipped are those that an earlier run has committed.
      manifest: None until the store is sealed.
    """

    def __init__(self, root: Path, declaration: Declaration, *, rejects_invalid: bool) -> None:
        self.path = root
        self.num_added = 0
        self.num_rejected = 0
        self.num_skipped = 0
        self.manifest: Manifest | None = None
        self._declaration = declaration
        self._spec = declaration.spec
        self._rejects_invalid = rejects_invalid
        self._turn = threading.RLock()  # threads may add at the same time
        self._closing = ExitStack()
        self._is_open = False
        self._is_whole = True  # no call was interrupted while it changed something
        if sealed_revisions(root):
            self._declaration.check_same(f"store '{root}'", read_spec(root, REVISION))
            self.manifest = read_manifest(root, sealed_revisions(root)[-1])
            sweep_store(root)
            finish_seal(root, self.manifest)
        else:
            self._check_folder()
            self._open()

    # Opening.

    def _check_folder(self) -> None:
        """Raise StoreError if the path is neither free nor a store that was begun."""
        root = self.path
        if root.exists() and not root.is_dir():
            raise StoreError(f"store '{root}': it is a file; expected a folder, or nothing. Use another path.")
        if not root.is_dir() or has_journal(root):
            return
        others = sorted(entry.name for entry in root.iterdir() if not entry.name.startswith("."))
        if others and others != ["revisions"]:
            raise StoreError(
                f"store '{root}': the folder has other files, such as '{others[0]}'. Nothing was changed. Use a new or "
                "empty folder."
            )

    def _open(self) -> None:
        """Go on where the journal ends."""
        self._folder = self.path / revision_prefix(REVISION) / JOURNAL
        make_folder(self._folder)
        try:
            if not self._closing.enter_context(try_locked(self._folder / LOCK)):
                raise StoreError(
                    f"store '{self.path}': another process is writing it. Wait for its end, or use another path."
                )
            sweep_store(self.path)
            self._journal = Journal(self._folder)
            self._closing.callback(self._journal.close)
            stored = self._journal.spec()
            if stored is None:
                self._journal.declare(self._spec)
            else:
                self._declaration.check_same(f"store '{self.path}'", stored)
            self._num_committed = self._journal.num_records  # by earlier runs
            self._is_skipped = map_array(
                self._num_committed, np.bool_, "keys that were committed"
            )  # again, in this run
            self._checker = RecordChecker(self._declaration, self.has_caption)
            self._open_shards = self._journal.open_shards()
            self._parts: dict[str, OpenPart] = {}
            for name in self._open_shards:
                self._part(name)
            self._remove_uncounted_files()
        except BaseException:
            self._closing.close()
            raise
        self._waiting_bytes = 0
        self._committed_at = time.monotonic()
        self._is_open = True

    def _remove_uncounted_files(self) -> None:
        """Remove files of shards that are full, or that were begun and never committed."""
        counted = {LOCK, self._journal.path.name}
        for part in self._parts.values():
            counted |= part.file_names
        for path in self._folder.iterdir():
            if path.name not in counted and not path.name.startswith(self._journal.path.name):
                remove(path)

    def _part(self, name: str) -> OpenPart:
        """The open part of a bucket or of a text encoder."""
        if name not in self._parts:
            self._parts[name] = OpenPart(
                self.path,
                self._folder,
                self._layout_of(name),
                self._spec.latent,
                self._open_shards.get(name),
                self._journal.add_shard,
            )
        return self._parts[name]

    def _layout_of(self, name: str) -> Part:
        """The arrays of a part, of one row or caption, with shards as they were begun, or for the expected records."""
        is_bucket = name.startswith(bucket_part(""))
        new_rows = {name.removeprefix(bucket_part("")): 1} if is_bucket else {}
        num_tokens = {
            encoder.name: np.array([encoder.spec.max_tokens], np.int32) for encoder in self._spec.text_encoders
        }
        part = RevisionLayout(self._spec, REVISION, new_rows, num_tokens).parts[name]
        state = self._open_shards.get(name)
        rows = state.shard_rows if state else sized_for(part, self._declaration.expected_records)
        shard_rows = {part.arrays[0].path: rows}
        return RevisionLayout(self._spec, REVISION, new_rows, num_tokens, shard_rows=shard_rows).parts[name]

    def _check_open(self) -> None:
        """Raise StoreError unless records can be added."""
        if not self._is_open:
            raise StoreError(f"store '{self.path}': its writer is closed. Call create_store again.")
        if not self._is_whole:
            raise StoreError(
                f"store '{self.path}': an earlier call failed while it wrote. Run the program again: it continues with "
                "what is committed."
            )

    # What is in the store.

    def has(self, key: str) -> bool:
        """Whether a record with this key was added, in this run or an earlier one; a rejected one too."""
        with self._turn:
            if self.manifest:
                return bool(np.any(self._sealed_keys == np.uint64(key_hash(key))))
            self._check_open()
            return self._journal.position_of(key) is not None

    @cached_property
    def _sealed_keys(self) -> np.ndarray:
        """(records,) uint64 hashes of the keys of a sealed store."""
        from .store import LatentStore

        return LatentStore(self.path).numbers("keys")

    def has_caption(self, text: str) -> bool:
        """Whether the store has a caption, so that ``add`` needs no embeddings for it; a sealed store needs none."""
        with self._turn:
            if self.manifest:
                return True
            self._check_open()
            return self._journal.caption_id(text) is not None

    def committed_keys(self) -> Iterator[str]:
        """Keys of the stored records that are committed, in the order in which they were added."""
        if self.manifest:
            from .store import LatentStore

            for batch in LatentStore(self.path).record_batches(("key", "status")):
                for record in batch.to_pylist():
                    if record["status"] == "stored":
                        yield record["key"]
            return
        self._check_open()
        yield from self._journal.keys()

    # Adding.

    def add(
        self,
        key: str | Sequence[str],
        *,
        latent: Any,
        label: Any = None,
        caption: Any = None,
        embeddings: Any = None,
        features: Mapping[str, Any] | None = None,
        companions: Mapping[str, Any] | None = None,
        source_size: Any = None,
    ) -> int:
        """Add a record, or a batch: then ``key`` is a list, and each argument has a value for each record.

        A key that an earlier run has committed is skipped.

        Args:
          key: a unique name.
          latent: (C, H, W) floating-point numbers, a numpy array or torch tensor; (2C, H, W) of a posterior.
          label: number or name of a class.
          caption: a text, or a list of texts, each a caption of its own; "" is the null caption.
          embeddings: of the caption: (L, D) its valid tokens, a vector (P,), or a tuple of both; of several captions a
            list; of several text encoders a dict by name. None for a caption that the store has.
          features: by name (T, D), (D,), or a dict with ``patches`` and ``cls``.
          companions: by name, like ``latent``; a mask is (H, W) uint8.
          source_size: height and width of the image in pixels, before it was resized.
        Returns: records that were added.
        Raises: InvalidRecord: a value is not what was declared, or the key was added before; nothing was added.
          StoreError: the store is sealed, and has no such key; ResourceError: the disk is full, committed data stay.
        """
        with self._turn:
            batch = as_batch(
                key,
                latent,
                label,
                caption,
                embeddings,
                features,
                companions,
                source_size,
                has_pairs=self._spec.latent.flip,
            )
            for record_input in batch:
                check_key(record_input.key)
            if self.manifest:
                return self._skip_sealed([record_input.key for record_input in batch])
            self._check_open()
            new, duplicates, skipped = self._divided(batch)
            new_captions: NewCaptions = {}
            records = [self._checker.check(record_input, new_captions) for record_input in new]
            rows = self._checker.narrow(records)
            self._raise_first_problem(records, duplicates)
            self._is_whole = False
            for position in skipped:
                self._is_skipped[position] = True
            self.num_skipped += len(skipped)
            self._note(records, duplicates, new_captions)
            for of_bucket in rows:
                self._add_rows(of_bucket)
            self._is_whole = True
            self._commit_if_due()
            return sum(record.problem is None for record in records)

    def reject(self, key: str, reason: str, detail: str = "") -> None:
        """Note that a record could not be encoded, so that the store says why it is missing.

        Args:
          reason: one of those of FORMAT.md, section 4.
        Raises: RecipeError: another reason; InvalidRecord: the key was added before.
        """
        if reason not in REJECT_REASONS:
            raise RecipeError(f"reject: reason {reason!r}; expected one of {', '.join(REJECT_REASONS)}.")
        check_key(key)
        with self._turn:
            if self.manifest:
                self._skip_sealed([key])
                return
            self._check_open()
            position = self._earlier_position(key)
            if position is not None:
                self._is_skipped[position] = True
                self.num_skipped += 1
                return
            self._journal.add_record(AddedRecord(key, stage="encode", reason=reason, detail=detail))
            self.num_rejected += 1
            self._commit_if_due()

    def _skip_sealed(self, keys: Sequence[str]) -> int:
        """Skip records of a sealed store. Raises: StoreError: it does not have one of them."""
        for key in keys:
            if not self.has(key):
                raise StoreError(
                    f"store '{self.path}': it is sealed, and has no record {key[:200]!r}. Write new records into "
                    "another store; training reads several."
                )
        self.num_skipped += len(keys)
        return 0

    def _earlier_position(self, key: str) -> int | None:
        """Position of a record that an earlier run has committed; None if the key is new.

        Raises: InvalidRecord: this run was given the key before.
        """
        position = self._journal.position_of(key)
        if position is not None and (position >= self._num_committed or self._is_skipped[position]):
            raise InvalidRecord(key, "duplicate_key", "a record with this key was added before; expected unique keys")
        return position

    def _divided(self, batch: Sequence[RecordInput]) -> tuple[list[RecordInput], list[InvalidRecord], list[int]]:
        """The records of a batch that are new, those whose key was added before, and positions of those to be skipped.

        The first of two records with one key counts, in a batch too.
        """
        new = []
        duplicates = []
        skipped = []
        keys = set[str]()
        for record_input in batch:
            try:
                if record_input.key in keys:
                    raise InvalidRecord(
                        record_input.key, "duplicate_key", "the batch has this key twice; expected unique keys"
                    )
                position = self._earlier_position(record_input.key)
            except InvalidRecord as error:
                duplicates.append(error)
                continue
            keys.add(record_input.key)
            if position is None:
                new.append(record_input)
            else:
                skipped.append(position)
        return new, duplicates, skipped

    def _raise_first_problem(self, records: Sequence[CheckedRecord], duplicates: Sequence[InvalidRecord]) -> None:
        """Raise InvalidRecord if a record cannot be stored, unless such records are rejected."""
        if self._rejects_invalid:
            return
        for error in duplicates:
            raise error
        for record in records:
            if record.problem:
                raise InvalidRecord(record.key, record.problem.reason, record.problem.detail)

    def _note(
        self, records: Sequence[CheckedRecord], duplicates: Sequence[InvalidRecord], new_captions: NewCaptions
    ) -> None:
        """Put the records of a batch, and its new captions, into the journal."""
        next_rows = {bucket: self._part(bucket_part(bucket)).next_row for bucket in by_bucket(records)}
        for record in records:
            if record.problem:
                problem = record.problem
                added = AddedRecord(record.key, stage=problem.stage, reason=problem.reason, detail=problem.detail)
                self._journal.add_record(added)
                self.num_rejected += 1
                continue
            caption_ids = [self._caption_id(text, new_captions) for text in record.captions]
            added = AddedRecord(
                record.key,
                bucket=record.bucket,
                row=next_rows[record.bucket],
                label=record.label,
                caption_ids=int32_bytes(caption_ids),
                height_px=record.size[0],
                width_px=record.size[1],
            )
            self._journal.add_record(added)
            next_rows[record.bucket] += 1
            self.num_added += 1
        for error in duplicates:
            added = AddedRecord(error.key, True, stage="scan", reason=error.reason, detail="the key was added before")
            self._journal.add_record(added)
            self.num_rejected += 1

    def _caption_id(self, text: str, new_captions: NewCaptions) -> int:
        """Id of a caption, which is stored now if it is new."""
        number = self._journal.caption_id(text)
        if number is not None:
            return number
        rows = new_captions[text]
        for name, of_encoder in rows.items():
            self._part(caption_folder(name)).add_caption(of_encoder.arrays, of_encoder.result)
            self._waiting_bytes += sum(array.nbytes for array in of_encoder.arrays)
        return self._journal.add_caption(
            AddedCaption(text, int32_bytes([of_encoder.num_tokens for of_encoder in rows.values()]))
        )

    def _add_rows(self, rows: BucketRows) -> None:
        """Put the rows of the records of a bucket that have no problem into its open shard."""
        is_stored = np.array([record.problem is None for record in rows.records])
        arrays = [array[is_stored] for group in rows.groups.values() for array in group.arrays]
        results = np.stack([group.results[is_stored] for group in rows.groups.values()], axis=1)
        self._part(bucket_part(rows.bucket)).add_rows(arrays, results)
        self._waiting_bytes += sum(array.nbytes for array in arrays)

    # Committing.

    def _commit_if_due(self) -> None:
        is_large = self._waiting_bytes >= COMMIT_BYTES or self._journal.num_waiting >= COMMIT_ITEMS
        if is_large or time.monotonic() - self._committed_at >= COMMIT_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Commit what was added, so that a crash does not lose it. It happens by itself, every 64 MiB or 30 s.

        Raises: ResourceError: the disk is full or failing; what was committed before stays.
        """
        with self._turn:
            if self.manifest:
                return
            self._check_open()
            self._is_whole = False
            for part in self._parts.values():
                part.flush()
            self._journal.commit({name: part.state() for name, part in self._parts.items()})
            self._is_whole = True
            for part in self._parts.values():
                part.remove_old()
            self._waiting_bytes = 0
            self._committed_at = time.monotonic()

    # The end.

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._turn:
            try:
                if kind is None and self.manifest is None:
                    self.seal()
                elif self._is_open and self._is_whole:
                    self.flush()
            finally:
                self._is_open = False
                self._closing.close()

    def seal(self) -> Manifest:
        """Complete the store; leaving the ``with`` block does it.

        Returns: its manifest.
        Raises: StoreError: nothing was stored; ResourceError: the same program continues.
        """
        with self._turn:
            if self.manifest:
                return self.manifest
            self.flush()
            buckets = self._journal.num_stored()
            if not buckets:
                rejects = ", ".join(f"{count} as {reason}" for reason, count in self._journal.rejects().items())
                raise StoreError(
                    f"store '{self.path}': no record was stored{f' (rejected: {rejects})' if rejects else ''}, so it "
                    "is not sealed. Add one."
                )
            shard_rows = {part.part.arrays[0].path: part.capacity for part in self._parts.values()}
            plan = plan_of(self._declaration.spec_with(buckets), self._journal, shard_rows)
            freeze_plan(self.path, plan, replace=True)
            writer = StoreWriter(self.path, plan, own=())
            for name, shard, written in self._journal.shards():
                writer.record(name, shard, written)
            for name, part in self._parts.items():
                if part.num_items:
                    writer.record(name, part.shard, part.write(is_last=True))
            for part in plan.layout.parts.values():
                if part.is_null:
                    self._write_null(writer, part)
            self._closing.close()
            self._is_open = False
            self.manifest = writer.seal()
            return self.manifest

    def _write_null(self, writer: StoreWriter, part: Part) -> None:
        """Write the null caption of a text encoder."""
        assert part.captions, "a part of captions"
        rows = self._declaration.nulls[part.captions.name]
        results = new_results(part, 1)
        results["state"] = STORED
        results["checksum"] = row_checksum(*rows)
        arrays = {layout.path: values for layout, values in zip(part.arrays, rows, strict=True)}
        writer.commit(part.name, 0, arrays, results)
