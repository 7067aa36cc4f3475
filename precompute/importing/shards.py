"""Shards of imported features for the runner of stage 1: their batches are read, their encoder is the identity."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from ...datasets.disk.spill import TakenColumn
from ...datasets.format.layout import Part
from ...datasets.format.token_dtypes import is_storable, measure_quality, narrow
from ...datasets.format.zarr_shard import ArrayLayout
from ...datasets.revisions.plan import FrozenPlan
from ...datasets.revisions.writer import row_checksum
from ...errors import RecordRejected, SourceError
from ..run.shards import Outcomes, Pools, Shard
from .null_caption import read_null
from .source import Entry, Features, Reader

BATCH = 64  # records read ahead together


class ImportShard(Shard):
    """A shard whose items are read one by one."""

    stage = "encode"

    def batches(self) -> list[range]:
        """Items of the shard that are read together."""
        return [range(i, min(i + BATCH, len(self.items))) for i in range(0, len(self.items), BATCH)]

    def load(self, batch: range, pools: Pools) -> Future[list[Any]]:
        """Start reading some items."""
        futures = [pools.decode.submit(self.read, item) for item in batch]
        return pools.stack.submit(lambda: [future.result() for future in futures])

    def read(self, item: int) -> Any:
        """The values of an item; runs in any thread."""
        raise NotImplementedError

    def encode(self, batch: range, inputs: list[Any]) -> list[Any]:
        """The inputs themselves."""
        return inputs


class LatentShard(ImportShard):
    """Latents of some rows, and flipped latents if any."""

    def __init__(self, plan: FrozenPlan, part: Part, number: int, reader: Reader) -> None:
        super().__init__(part, number)
        self._reader = reader
        self._entries = entries_at(plan, plan.positions_of(part)[self.items.start : self.items.stop])

    def read(self, item: int) -> Features | RecordRejected:
        """A record's row of each array, (1, ...) in the store's dtype; rejects are returned."""
        try:
            arrays, checksum = self._reader.read(self._entries[item])
            return _narrowed(arrays, self.part.arrays), checksum
        except RecordRejected as reject:
            return RecordRejected("decode", reject.reason, reject.detail)

    def put(self, batch: range, inputs: Any, outputs: list[Features | RecordRejected]) -> Outcomes:
        """Store the rows, or why they are empty."""
        outcomes = Outcomes()
        for item, read in zip(batch, outputs, strict=True):
            key = self._entries[item].key
            if isinstance(read, RecordRejected):
                self.reject(item, key, read)
                outcomes.append((key, read))
            else:
                self.store(item, read[0], source_checksum=read[1])
                outcomes.append((key, None))
        return outcomes


def _narrowed(arrays: Sequence[np.ndarray], layouts: Sequence[ArrayLayout]) -> list[np.ndarray]:
    """A record's row of each array, (1, ...) in the store's dtype; raises RecordRejected."""
    if len(arrays) < len(layouts):
        raise RecordRejected("decode", "wrong_shape", "there is no flipped copy")
    rows = []
    for values, layout in zip(arrays, layouts, strict=False):
        if values.shape != layout.shape[1:]:
            raise RecordRejected("decode", "wrong_shape", f"shape {values.shape}, planned {layout.shape[1:]}")
        with np.errstate(over="ignore"):  # overflow becomes infinity
            rows.append(values.astype(layout.dtype)[None])
    if not all(np.isfinite(row).all() for row in rows):
        raise RecordRejected("decode", "nonfinite", "NaN or infinity in the features, or beyond store.dtype")
    return rows


class CaptionShard(ImportShard):
    """Captions of one text encoder, or its null caption.

    Args:
      origins: (num_captions,) position of the record that holds each caption's features.
      null: as ``choice`` of ``read_null``.
    """

    def __init__(
        self, plan: FrozenPlan, part: Part, number: int, reader: Reader, origins: np.ndarray, null: str | None
    ) -> None:
        assert part.captions is not None, "a part of captions"
        self._plan, self._layout, self._reader, self._null = plan, part.captions, reader, null
        super().__init__(part, number)
        if not part.is_null:
            self._entries = entries_at(plan, origins[self.items.start : self.items.stop])

    def read(self, item: int) -> np.ndarray:
        """(L, D) tokens, or (P,) a pooled vector.

        Raises: SourceError: it can no longer be read, has another shape than planned, or is another null caption.
        """
        spec, name = self._layout.spec, self._layout.name
        shape = (spec.max_tokens, spec.width) if spec.has_tokens else (spec.pooled_width,)
        if self.part.is_null:
            values = read_null(self._null, self._reader.defaults.texts[name], shape, name).rows
            if f"{row_checksum(values):016x}" != self._plan.spec.text_encoder_of(name).encoder.config["null_caption"]:
                raise SourceError(f"--null '{self._null}': not the null caption that the store was planned with.")
            return values
        entry = self._entries[item]
        try:
            values = self._reader.read_caption(entry, name)
        except RecordRejected as reject:
            raise SourceError(
                f"record '{entry.key}': its caption cannot be read ({reject.detail}), and other records may need it. "
                "Restore it, and run the same command again. Or import into another --store with --set "
                "text.check=content, where such records are rejected."
            ) from reject
        wanted = (int(self._layout.num_tokens[self.items[item]]), *shape[1:]) if spec.has_tokens else shape
        if values.shape != wanted:
            raise SourceError(
                f"record '{entry.key}': its caption features are {values.shape} now, {wanted} when the store was "
                "planned. Restore the source; the same command then continues."
            )
        return values

    def put(self, batch: range, inputs: Any, outputs: list[np.ndarray]) -> Outcomes:
        """Store the captions.

        Raises: SourceError: the store's dtype cannot hold one.
        """
        spec = self._layout.spec
        dtype = spec.dtype if spec.has_tokens else spec.pooled_dtype
        num_layers = spec.num_layers if spec.has_tokens else 1
        for item, values in zip(batch, outputs, strict=True):
            rows = values.reshape(-1, values.shape[-1]).astype(np.float32)
            stored = narrow(rows, dtype, num_layers) if np.isfinite(rows).all() else None
            if stored is None or not is_storable(stored, dtype):
                what = f"--null '{self._null}'" if self.part.is_null else f"record '{self._entries[item].key}'"
                raise SourceError(
                    f"{what}: its caption features are not finite as {dtype}. Import into another --store with --set "
                    "store.dtype=source, or with text.check=content, which rejects what is broken."
                )
            is_narrowed = spec.dtype != "float32" and dtype != values.dtype.name and not self.part.is_null
            measured = measure_quality(rows, stored, dtype, num_layers) if is_narrowed else None
            self.store(item, stored.parts, quality=measured)
        return []


def entries_at(plan: FrozenPlan, positions: np.ndarray) -> list[Entry]:
    """Entries of records of the plan."""
    names = ("key", "source_path", "source_offset", "source_bytes")
    return list(map(Entry, *(TakenColumn(plan.records[name], positions)[:] for name in names)))


def caption_origins(plan: FrozenPlan) -> np.ndarray:
    """(num_captions,) position of the first record with each caption."""
    origins = np.full(plan.captions.num_rows, -1, np.int64)
    for position, ids in enumerate(plan.records["caption_ids"].to_pylist()):
        for caption in ids:
            if origins[caption] < 0:
                origins[caption] = position
    return origins
