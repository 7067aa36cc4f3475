"""The arrays of a store's revisions, stacked, and checked against the store's spec.

Each revision writes its rows to arrays of its own (layout.revision_prefix). A reader sees one array: the rows of
revision 1, then those of the next revision in the stack. All values of an array's ``zarr.json`` are checked before use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ..disk.cached import cached_property
from ..disk.hashing import read_json
from ..errors import DamageError
from ..format.caption_layout import (
    CAPTION_PART,
    EMBEDDINGS,
    LENGTHS,
    NULL_EMBEDDING,
    NULL_POOLED,
    NULL_SCALES,
    OFFSETS,
    POOLED,
    SCALES,
    caption_folder,
)
from ..format.layout import GROUP, revision_prefix
from ..format.row_layout import LATENTS, bucket_part, row_arrays
from ..format.schema import StoreSpec, TextSpec
from ..format.token_dtypes import ON_DISK
from ..format.zarr_shard import ArrayLayout
from ..revisions.catalog import REPAIR
from .shard_folder import ShardCheck, ShardFolder
from .sharded_array import ShardedArray

MAX_METADATA_BYTES = 1 << 20  # of an array's zarr.json


class ArrayStack:
    """Layouts of every array in each revision that a reader sees.

    Args:
      root: folder of the store.
      spec: of the store.
      revisions: of the stack, in order.
      sizes: bytes of each file in the manifest; None while the store is incomplete.
      planned: arrays of the plan, for an incomplete store.
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

        Raises: DamageError: it does not match the spec, the manifest or the plan.
        """
        layouts = {}
        for revision in self.revisions:
            array = revision_prefix(revision) + path
            metadata = self.root / array / GROUP
            if f"{array}/{GROUP}" in self._sizes if self._sizes is not None else metadata.is_file():
                layouts[revision] = self._read_layout(array)
                self._check_layout(path, layouts[revision])
        return layouts

    def rows(self, bucket: str, revisions: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Positions in the stacked arrays of a bucket, from rows of each revision's own array.

        Raises: DamageError: they do not exist.
        """
        layouts = self.layouts(f"{bucket_part(bucket)}/{self.spec.latent.array}")
        if not len(rows):
            return rows.astype(np.int64)
        stacked = np.array(list(layouts), np.int64)
        counts = np.array([layout.shape[0] for layout in layouts.values()], np.int64)
        index = np.searchsorted(stacked, revisions)
        known = index < len(stacked)
        known[known] = stacked[index[known]] == revisions[known]
        if not known.all() or np.any(rows < 0) or np.any(rows >= counts[index]):
            raise DamageError(
                f"store '{self.root}': records of bucket '{bucket}' name rows that do not exist. {REPAIR}"
            )
        return rows + (np.cumsum(counts) - counts)[index]

    def caption_spans(self, name: str, folder: ShardFolder, check: ShardCheck) -> tuple[np.ndarray, np.ndarray]:
        """First row and number of rows of every caption in the stacked embeddings of a text encoder.

        Returns: (num_captions,) int64 each.
        Raises: DamageError: a caption does not lie within the embeddings of its revision.
        """
        spec, captions = self.spec.text_encoder_of(name).spec, caption_folder(name)
        embeddings, base = self.layouts(f"{captions}/{EMBEDDINGS}"), 0
        offset_layouts, length_layouts = (self.layouts(f"{captions}/{path}") for path in (OFFSETS, LENGTHS))
        offsets, lengths = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        fits = embeddings.keys() == offset_layouts.keys() == length_layouts.keys()
        if spec.dtype == "int8":
            scales = self.layouts(f"{captions}/{SCALES}")
            token_counts = [
                {number: array.shape[0] for number, array in arrays.items()} for arrays in (scales, embeddings)
            ]
            fits = fits and token_counts[0] == token_counts[1]
        for revision, layout in embeddings.items() if fits else ():
            first, count = (
                ShardedArray(folder, [spans], check).read(0, spans.shape[0])
                for spans in (offset_layouts[revision], length_layouts[revision])
            )
            # In this order, because the sum of two hostile numbers can wrap around.
            fits = fits and len(first) == len(count) and bool(np.all((count >= 1) & (count <= spec.max_tokens)))
            fits = fits and bool(np.all((first >= 0) & (first <= layout.shape[0] - count)))
            if not fits:
                break
            offsets.append(first + base)
            lengths.append(count)
            base += layout.shape[0]
        if not fits:
            raise DamageError(f"store '{self.root}': its captions name tokens that do not exist. {REPAIR}")
        return np.concatenate(offsets), np.concatenate(lengths)

    def _check_layout(self, path: str, layout: ArrayLayout) -> None:
        """Raise DamageError if an array does not match the spec, the manifest or the plan."""
        if self._sizes is None:  # incomplete: it must be the planned array
            if self._planned.get(layout.path) != layout:
                raise DamageError(f"store '{self.root}': array '{layout.path}' is not as planned. {REPAIR}")
            return
        if (layout.shape[1:], layout.dtype) != self._row_of(path):
            raise DamageError(
                f"store '{self.root}': array '{layout.path}' has rows of {layout.dtype} {layout.shape[1:]}, unlike "
                f"the encoders of the store. {REPAIR}"
            )
        needed = self._rows_needed(path, layout)
        if needed is not None and layout.shape[0] != needed:
            raise DamageError(
                f"store '{self.root}': array '{layout.path}' has {layout.shape[0]} rows, needed {needed}. {REPAIR}"
            )
        if self._shard_counts[layout.path] != layout.num_shards:
            raise DamageError(
                f"store '{self.root}': array '{layout.path}' claims {layout.num_shards} shards, the manifest lists "
                f"{self._shard_counts[layout.path]}. {REPAIR}"
            )

    @cached_property
    def _shard_counts(self) -> Counter[str]:
        """Number of shard files of each array in the manifest."""
        return Counter(path.partition("/c/")[0] for path in self._sizes or () if "/c/" in path)

    def _rows_needed(self, path: str, layout: ArrayLayout) -> int | None:
        """Rows that an array must have: those of a null caption, or of the latents in the same bucket; None for any."""
        folder, *inside, name = path.split("/")
        if folder == CAPTION_PART:
            spec = self._text_spec(path)
            longest = spec.max_tokens if spec else 0
            return {NULL_EMBEDDING: longest, NULL_SCALES: longest, NULL_POOLED: 1}.get(name)
        if len(inside) < 3:  # these are the latents: others lie in folders of the bucket
            return None
        latents = f"{layout.path.rsplit('/', 3)[0]}/{self.spec.latent.array}"
        return self._read_layout(latents).shape[0]

    def _read_layout(self, array: str) -> ArrayLayout:
        try:
            metadata = read_json(self.root / array / GROUP, max_bytes=MAX_METADATA_BYTES)
        except FileNotFoundError as error:  # it was there when the store was opened
            raise DamageError(f"store '{self.root}': file '{array}/{GROUP}' is missing. {REPAIR}") from error
        return ArrayLayout.from_metadata(array, metadata)

    def _row_of(self, path: str) -> tuple[tuple[int, ...], str] | None:
        """Shape and dtype of a row of an array by the spec; None if the store has no such array."""
        folder, *_, name = path.split("/")
        if folder != CAPTION_PART:
            bucket, inside = path.split("/", 2)[1:]
            group = inside.split("/")[1] if inside.count("/") == 2 else LATENTS
            return row_arrays(self.spec, bucket, group).get(inside)
        if (spec := self._text_spec(path)) is None:
            return None
        tokens, scales, pooled = ((spec.width,), ON_DISK[spec.dtype]), ((), "float32"), spec.pooled_width
        found = {OFFSETS: ((), "int64"), LENGTHS: ((), "int64"), EMBEDDINGS: tokens, NULL_EMBEDDING: tokens}
        found = found if spec.has_tokens else {}
        if spec.has_tokens and spec.dtype == "int8":
            found |= {SCALES: scales, NULL_SCALES: scales}
        if pooled:
            found |= dict.fromkeys((POOLED, NULL_POOLED), ((pooled,), ON_DISK[spec.pooled_dtype]))
        return found.get(name)

    def _text_spec(self, path: str) -> TextSpec | None:
        """Of the text encoder of an array; None if the store has none of its name."""
        return next((one.spec for one in self.spec.text_encoders if one.name == _encoder_name(path)), None)


def _encoder_name(path: str) -> str:
    """Name of the text encoder of an array, from its path."""
    return path.split("/")[1] if path.count("/") == 2 else ""
