"""The third stage of a batch: its rows are gathered from the shards into reused memory, in the dtypes of the store.

Only the groups that are asked for are read: the latents, and some text encoders, image features and companion images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...errors import RecipeError
from ..arrays.sharded_array import ShardedArray
from ..format.row_layout import EMBEDDINGS, LATENTS, POOLED, SCALES, bucket_part, row_arrays, view_suffixes
from ..order.alike import check_alike, store_names
from ..store import LatentStore
from .buffer_pool import BufferPool
from .resolve import ResolvedBatch


class GatheredCaptions(NamedTuple):
    """The captions of a batch by one text encoder.

    Args:
      lengths: (B,) stored tokens of each caption; empty if only pooled vectors are stored.
      arrays: rows by the name of their array, in the order of the checksum: EMBEDDINGS (n, D) and SCALES (n, layers,
        groups), the tokens of one caption after the other; POOLED (B, P).
    """

    lengths: np.ndarray
    arrays: Mapping[str, np.ndarray]


class GatheredBatch(NamedTuple):
    """The rows of a batch, as stored.

    Args:
      records: (B, ...) rows of each array of the latents (LATENTS), of each feature and companion image, by the name of
        the group and of the array, in the order of the checksum; each of the view that was drawn.
      captions: captions by the name of their text encoder.
    """

    records: Mapping[str, Mapping[str, np.ndarray]]
    captions: Mapping[str, GatheredCaptions]


class Gatherer:
    """Gathers the rows of batches. Thread-safe.

    Args:
      stores: the stores that batches are read from.
      texts: names of the text encoders to read; None for all in the stores, empty for none.
      features: names of the image features to read; None for all in the first store.
      companions: names of the companion images to read; None for all in the first store.
      pin: use page-locked memory, which a GPU copies asynchronously.
    Raises: RecipeError: a store lacks one of these, or the stores cannot be mixed.
    """

    def __init__(
        self,
        stores: Sequence[LatentStore],
        *,
        texts: Sequence[str] | None = None,
        features: Sequence[str] | None = None,
        companions: Sequence[str] | None = None,
        pin: bool = False,
    ) -> None:
        first = stores[0]
        self.stores = list(stores)
        self.texts = list(first.texts if texts is None else texts)
        self.features = list(first.features if features is None else features)
        self.companions = list(first.companions if companions is None else companions)
        named_specs = [(name, store.spec) for name, store in zip(store_names(stores), stores, strict=True)]
        check_alike(named_specs, captions=bool(self.texts) or texts is None, features=self.features)
        for store in stores:
            _check_has(store, "text encoder", self.texts, store.texts)
            _check_has(store, "feature", self.features, store.features)
            _check_has(store, "companion", self.companions, store.companions)
            _check_kinds(store, first, self.companions)
        self._groups = [LATENTS, *self.companions, *self.features]
        self._buffers = BufferPool(pin=pin)
        self._arrays: dict[tuple[int, str, str], dict[str, list[ShardedArray]]] = {}

    def gather(self, resolved: ResolvedBatch) -> GatheredBatch:
        """Read the rows of a batch.

        Raises: DamageError: a shard is not what was written.
        """
        records = dict[str, dict[str, np.ndarray]]()
        for group in self._groups:
            arrays = self.arrays(resolved.store, resolved.bucket, group)
            records[group] = {name: self._take(views, resolved) for name, views in arrays.items()}
        captions = dict[str, GatheredCaptions]()
        if resolved.caption_ids is not None:
            for name in self.texts:
                captions[name] = self._take_captions(self.stores[resolved.store], name, resolved.caption_ids)
        return GatheredBatch(records, captions)

    def shard_paths(self, resolved: ResolvedBatch) -> list[str]:
        """Paths of the shards that a batch may read."""
        paths = list[str]()
        for group in self._groups:
            for views in self.arrays(resolved.store, resolved.bucket, group).values():
                for array in views:
                    paths += array.shard_paths(resolved.rows)
        if resolved.caption_ids is not None:
            for name in self.texts:
                tokens = self.stores[resolved.store].text(name)
                if tokens.spec.has_tokens:
                    for array in tokens.arrays:
                        paths += array.shard_paths(tokens.starts[resolved.caption_ids])
                if tokens.spec.pooled_width:
                    paths += tokens.pooled.shard_paths(tokens.pooled_rows[resolved.caption_ids])
        return paths

    def arrays(self, store: int, bucket: str, group: str) -> dict[str, list[ShardedArray]]:
        """The arrays of a group of records, by name: of each all views of an image.

        Args:
          store: index of the store.
          group: LATENTS, or the name of a feature or companion image.
        """
        key = store, bucket, group
        if key not in self._arrays:
            self._arrays[key] = record_arrays(self.stores[store], bucket, group)
        return self._arrays[key]

    def _take(self, views: Sequence[ShardedArray], resolved: ResolvedBatch) -> np.ndarray:
        """(B, ...) stored rows, each of the view that was drawn.

        Args:
          views: the array of each view.
        """
        rows = resolved.rows
        stored = self._buffers.take((len(rows), *views[0].row_shape), views[0].dtype)
        views[0].take(rows, out=stored)
        if resolved.views is not None:
            for view, array in enumerate(views[1:], 1):
                drawn = resolved.views == view
                stored[drawn] = array.take(rows[drawn])
        return stored

    def _take_captions(self, store: LatentStore, name: str, caption_ids: np.ndarray) -> GatheredCaptions:
        tokens = store.text(name)
        arrays = dict[str, np.ndarray]()
        lengths = np.zeros(0, np.int64)
        if tokens.spec.has_tokens:
            starts = tokens.starts[caption_ids]
            lengths = tokens.lengths[caption_ids]
            num_tokens = int(lengths.sum())
            for array_name, array in zip((EMBEDDINGS, SCALES), tokens.arrays, strict=False):
                memory = self._buffers.take((num_tokens, *array.row_shape), array.dtype)
                arrays[array_name] = array.take_ranges(starts, lengths, out=memory)
        if tokens.spec.pooled_width:
            array = tokens.pooled
            memory = self._buffers.take((len(caption_ids), *array.row_shape), array.dtype)
            arrays[POOLED] = array.take(tokens.pooled_rows[caption_ids], out=memory)
        return GatheredCaptions(lengths, arrays)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_arrays": {}}  # the stores are opened again where this is unpickled


def record_arrays(store: LatentStore, bucket: str, group: str) -> dict[str, list[ShardedArray]]:
    """The arrays of the latents, a feature or a companion image, by name: of each all views, as ``view_suffixes``."""
    arrays = [store.array(f"{bucket_part(bucket)}/{path}") for path in row_arrays(store.spec, bucket, group)]
    count = len(arrays) // len(view_suffixes(store.spec))  # the arrays of a view follow each other
    return {arrays[i].path.rpartition("/")[2]: arrays[i::count] for i in range(count)}


def _check_has(store: LatentStore, kind: str, names: Sequence[str], available: Sequence[str]) -> None:
    """Raises: RecipeError: a store lacks a text encoder, a feature or a companion."""
    missing = set(names) - set(available)
    if missing:
        raise RecipeError(
            f"store '{store.path}': it has no {kind} '{min(missing)}'. Available: {', '.join(available) or 'none'}."
        )


def _check_kinds(store: LatentStore, first: LatentStore, names: Sequence[str]) -> None:
    """Raises: RecipeError: a companion is a mask in one store and an image in the other."""
    kinds = {companion.name: companion.kind for companion in store.spec.companions}
    first_kinds = {companion.name: companion.kind for companion in first.spec.companions}
    for name in names:
        if kinds[name] != first_kinds[name]:
            raise RecipeError(
                f"store '{store.path}': '{name}' is of kind '{kinds[name]}', of '{first_kinds[name]}' in "
                f"'{first.path}'. Leave it out, or mix other stores."
            )
