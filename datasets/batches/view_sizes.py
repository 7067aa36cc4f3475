"""Size and crop of the view of each image that a batch has drawn, as models with micro-conditioning read them.

They are looked up only if they are asked for: the first time, the sizes of all records are read, and their keys where
a store has further crops. A pickled batch, as of a worker process, opens its store again for that, once a process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ...errors import StoreError
from ..disk.cached import cached_property
from ..disk.spill import map_table
from ..format.buckets import bucket_size
from ..format.crops import Crop, variant_crop
from ..store import LatentStore


class ViewSizes:
    """Sizes and crops of all views of the images of a store."""

    def __init__(self, store: LatentStore) -> None:
        self._store = store

    @cached_property
    def _keys(self) -> pa.ChunkedArray:
        """The keys of all records, mapped from a temporary file."""
        schema = pa.schema([("key", pa.string())])
        batches = (batch.cast(schema) for batch in self._store.record_batches(("key",)))
        return map_table(schema, batches, "the keys of the records")["key"]

    def of(self, bucket: str, records: np.ndarray, views: np.ndarray | None) -> np.ndarray:
        """Sizes and crops of views, (B, 6) int64, as ``Batch.sizes``.

        Args:
          records: (B,) positions in the records table.
          views: (B,) as ``view_suffixes`` numbers them; None if the store has one view.
        Raises: StoreError: the size of an image is not known.
        """
        spec = self._store.spec
        height, width = bucket_size(bucket)
        sizes = np.empty((len(records), 6), np.int64)
        for i, record in enumerate(records.tolist()):
            source_height, source_width, *planned = self._store.sizes[record].tolist()
            if not source_height and not source_width:
                raise StoreError(
                    f"store '{self._store.path}': the size of the image of record '{self._keys[record].as_py()}' is "
                    "not known, so neither is its crop. Imported stores have none: precompute the images instead."
                )
            view = 0 if views is None else int(views[i])
            variant, flipped = divmod(view, 2) if spec.latent.flip else (view, 0)
            crop = Crop(*planned)
            if variant:
                key = self._keys[record].as_py()
                crop = variant_crop(key, (source_height, source_width), bucket, variant, spec.images)
            if flipped:
                crop = crop.flipped(width)
            sizes[i] = source_height, source_width, crop.top, crop.left, height, width
        return sizes

    def __reduce__(self) -> tuple[Callable[[], ViewSizes], tuple[()]]:
        return _Opened(self._store.__reduce__()[0]), ()


class _Opened:
    """Opens a store for its sizes, unless this process has opened it before."""

    def __init__(self, open_store: functools.partial[LatentStore]) -> None:
        self._open_store = open_store

    def __call__(self) -> ViewSizes:
        arguments = repr((self._open_store.args, sorted(self._open_store.keywords.items())))
        if arguments not in _opened:
            _opened[arguments] = ViewSizes(self._open_store())
        return _opened[arguments]


_opened: dict[str, ViewSizes] = {}


@dataclass(frozen=True)
class DrawnViews:
    """The views of a batch, before their sizes are looked up.

    Args:
      sizes: of the store.
      bucket: "HxW" in pixels.
      records, views: as for ``ViewSizes.of``.
    """

    sizes: ViewSizes
    bucket: str
    records: np.ndarray
    views: np.ndarray | None

    def look_up(self) -> np.ndarray:
        """(B, 6) int64, as ``Batch.sizes``. Raises: StoreError: the size of an image is not known."""
        return self.sizes.of(self.bucket, self.records, self.views)
