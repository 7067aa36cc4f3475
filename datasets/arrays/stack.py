"""The arrays of a store's revisions, one on top of the other, each found to be what the store says of itself.

A revision adds rows in arrays of its own (layout.revision_prefix). A reader sees one array: the rows of revision 1,
then those of the next in the stack. Every number that an array's ``zarr.json`` claims is compared before it is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ..disk.cached import cached_property
from ..disk.hashing import read_json
from ..errors import DamageError
from ..format.buckets import bucket_size
from ..format.layout import (
    EMBEDDINGS,
    GROUP,
    LENGTHS,
    NULL_EMBEDDING,
    NULL_SCALES,
    OFFSETS,
    SCALES,
    bucket_part,
    revision_prefix,
)
from ..format.schema import StoreSpec
from ..format.token_dtypes import ON_DISK
from ..format.zarr_shard import ArrayLayout
from ..revisions.catalog import REPAIR
from .shard_folder import ShardCheck, ShardFolder
from .sharded_array import ShardedArray

MAX_METADATA_BYTES = 1 << 20  # of an array's zarr.json


class ArrayStack:
    """Layouts of every array in each revision that a reader sees.

    Args:
      root: of the store.
      spec: what the store says of itself.
      revisions: of the stack, in order.
      sizes: bytes of each file that the manifest lists, None while the store is incomplete.
      planned: arrays that the plan names, for an incomplete store.
    """

    def __init__(
        self,
        root: Path,
        spec: StoreSpec,
        revisions: list[int],
        *,
        sizes: Mapping[str, int] | None,
        planned: Mapping[str, ArrayLayout],
    ) -> None:
        self.root, self.spec, self.revisions = root, spec, revisions
        self._sizes, self._planned = sizes, planned

    def layouts(self, path: str) -> dict[int, ArrayLayout]:
        """Layout of an array in each revision of the stack that has it.

        Raises: DamageError: it is not the array that the store speaks of.
        """
        found = {}
        for revision in self.revisions:
            array = revision_prefix(revision) + path
            metadata = self.root / array / GROUP
            if f"{array}/{GROUP}" in self._sizes if self._sizes is not None else metadata.is_file():
                found[revision] = ArrayLayout.from_metadata(array, read_json(metadata, max_bytes=MAX_METADATA_BYTES))
                self._check_layout(path, found[revision])
        return found

    def rows(self, bucket: str, revisions: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Positions in the stacked arrays of a bucket, from rows of each revision's own array.

        Raises: DamageError: there are no such rows.
        """
        layouts = self.layouts(f"{bucket_part(bucket)}/{self.spec.latent.array}")
        if not len(rows):
            return rows.astype(np.int64)
        there = np.array(list(layouts), np.int64)
        counts = np.array([layout.shape[0] for layout in layouts.values()], np.int64)
        which = np.searchsorted(there, revisions)
        known = which < len(there)
        known[known] = there[which[known]] == revisions[known]
        if not known.all() or np.any(rows < 0) or np.any(rows >= counts[which]):
            raise DamageError(
                f"store '{self.root}': records of bucket '{bucket}' name rows that are not there. {REPAIR}"
            )
        return rows + (np.cumsum(counts) - counts)[which]

    def caption_spans(self, folder: ShardFolder, check: ShardCheck) -> tuple[np.ndarray, np.ndarray]:
        """First row and number of rows of every caption in the stacked embeddings, (num_captions,) int64 each.

        Raises: DamageError: a caption does not lie within the embeddings of its revision.
        """
        embeddings, base = self.layouts(EMBEDDINGS), 0
        offset_layouts, length_layouts = self.layouts(OFFSETS), self.layouts(LENGTHS)
        offsets, lengths = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        longest = self.spec.text.max_tokens if self.spec.text else 0
        fits = embeddings.keys() == offset_layouts.keys() == length_layouts.keys()
        if self.spec.text and self.spec.text.dtype == "int8":
            scales = self.layouts(SCALES)
            fits = fits and {n: one.shape[0] for n, one in scales.items()} == {
                n: one.shape[0] for n, one in embeddings.items()
            }
        for revision, layout in embeddings.items() if fits else ():
            first, count = (
                ShardedArray(folder, [one], check).read(0, one.shape[0])
                for one in (offset_layouts[revision], length_layouts[revision])
            )
            # Asked in this order, because a sum of two hostile numbers can wrap around.
            fits = fits and len(first) == len(count) and bool(np.all((count >= 1) & (count <= longest)))
            fits = fits and bool(np.all((first >= 0) & (first <= layout.shape[0] - count)))
            if not fits:
                break
            offsets.append(first + base)
            lengths.append(count)
            base += layout.shape[0]
        if not fits:
            raise DamageError(f"store '{self.root}': its captions name tokens that are not there. {REPAIR}")
        return np.concatenate(offsets), np.concatenate(lengths)

    def _check_layout(self, path: str, layout: ArrayLayout) -> None:
        """An array that is not what the store says of itself is refused before anything is made of its numbers."""
        if self._sizes is None:  # incomplete: the plan says what it must be
            if self._planned.get(layout.path) != layout:
                raise DamageError(
                    f"store '{self.root}': array '{layout.path}' is not the one that was planned. {REPAIR}"
                )
            return
        if (layout.shape[1:], layout.dtype) != self._row_of(path):
            raise DamageError(
                f"store '{self.root}': array '{layout.path}' has rows of {layout.dtype} {layout.shape[1:]}, which are "
                f"not those of the store's encoders. {REPAIR}"
            )
        longest = self.spec.text.max_tokens if self.spec.text else 0
        if path in (NULL_EMBEDDING, NULL_SCALES) and layout.shape[0] != longest:
            raise DamageError(
                f"store '{self.root}': array '{layout.path}' has {layout.shape[0]} rows, a null caption has {longest}. "
                f"{REPAIR}"
            )
        if self._shard_counts[layout.path] != layout.num_shards:
            raise DamageError(
                f"store '{self.root}': array '{layout.path}' claims {layout.num_shards} shards, the manifest lists "
                f"{self._shard_counts[layout.path]}. {REPAIR}"
            )

    @cached_property
    def _shard_counts(self) -> Counter[str]:
        """Shard files of each array, as the manifest lists them."""
        return Counter(path.partition("/c/")[0] for path in self._sizes or () if "/c/" in path)

    def _row_of(self, path: str) -> tuple[tuple[int, ...], str] | None:
        """Shape and dtype of a row of an array, as the store's own description has them; None where it has no such."""
        if path in (OFFSETS, LENGTHS):
            return (), "int64"
        if path in (EMBEDDINGS, NULL_EMBEDDING):
            return self.spec.text and ((self.spec.text.width,), ON_DISK[self.spec.text.dtype])
        if path in (SCALES, NULL_SCALES):
            return ((), "float32") if self.spec.text and self.spec.text.dtype == "int8" else None
        bucket, latent = path.split("/")[1], self.spec.latent
        height, width = (side // latent.downscale for side in bucket_size(bucket))
        return (latent.stored_channels, height, width), latent.dtype
