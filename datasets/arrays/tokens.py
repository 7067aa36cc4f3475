"""Captions of a text encoder and rows of an image feature: as stored, and as numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...errors import StoreError
from ..disk.cached import cached_property
from ..format.row_layout import (
    EMBEDDINGS,
    FEATURES,
    POOLED,
    SCALES,
    bucket_part,
    caption_folder,
    caption_rows,
    null_array,
    pooled_rows,
    view_suffix,
)
from ..format.schema import FeatureSpec, TextSpec
from ..format.token_dtypes import StoredTokens, widen
from .sharded_array import ShardedArray


class CaptionTokens:
    """The captions of one text encoder: embeddings of (L, D) each, without padding, and (or) a pooled vector (P,).

    Args:
      name: of the text encoder; empty for that of ``[text]``.
      spec: of its captions.
      open_array: returns the array at a path.
      read_spans: returns ``starts`` and ``lengths``; called on first use.
    """

    def __init__(
        self,
        name: str,
        spec: TextSpec,
        open_array: Callable[[str], ShardedArray],
        read_spans: Callable[[], tuple[np.ndarray, np.ndarray]],
    ) -> None:
        self.name, self.spec, self._open, self._read_spans = name, spec, open_array, read_spans

    @cached_property
    def _spans(self) -> tuple[np.ndarray, np.ndarray]:
        return self._read_spans()

    @cached_property
    def starts(self) -> np.ndarray:
        """(num_captions,) first row of each caption's tokens; of pooled vectors alone, its row."""
        return self._spans[0]

    @cached_property
    def lengths(self) -> np.ndarray:
        """(num_captions,) stored tokens of each caption."""
        return self._spans[1]

    @cached_property
    def pooled_rows(self) -> np.ndarray:
        """(num_captions,) row of each caption's pooled vector."""
        return pooled_rows(self.spec, self.starts)

    @cached_property
    def arrays(self) -> list[ShardedArray]:
        """The tokens, (tokens, D) in the dtype on disk; for int8 also the scales, (tokens, layers, groups) float16.

        Raises: StoreError: only pooled vectors are stored.
        """
        return [self._array(EMBEDDINGS), *([self._array(SCALES)] if self.spec.dtype == "int8" else ())]

    @cached_property
    def pooled(self) -> ShardedArray:
        """The pooled vectors, (rows, P) in the dtype on disk: ``pooled_rows`` has that of each caption.

        Raises: StoreError: there are none.
        """
        return self._array(POOLED)

    def _stored(self, caption_id: int) -> StoredTokens:
        """The stored tokens of a caption; mapped views if they are uncompressed."""
        start, length = int(self.starts[caption_id]), int(self.lengths[caption_id])
        return StoredTokens.of([array.read(start, start + length) for array in self.arrays])

    def shard_paths(self, caption_id: int) -> list[str]:
        """Paths within the store of the shards that hold the rows of a caption."""
        paths: list[str] = []
        if self.spec.has_tokens:
            for array in self.arrays:
                paths += array.shard_paths(self.starts[caption_id : caption_id + 1])
        if self.spec.pooled_width:
            paths += self.pooled.shard_paths(self.pooled_rows[caption_id : caption_id + 1])
        return paths

    def stored_rows(self, caption_id: int) -> list[np.ndarray]:
        """Rows of a caption in each array that it has: tokens, scales, pooled vectors."""
        rows = self._stored(caption_id).parts if self.spec.has_tokens else []
        if self.spec.pooled_width:
            rows.append(self.pooled[int(self.pooled_rows[caption_id])][None])
        return rows

    def __getitem__(self, caption_id: int) -> np.ndarray:
        """The embedding of a caption, (L, D): float16 and float32 a mapped view, bfloat16 and int8 a float32 copy."""
        return widen(self._stored(caption_id), self.spec.dtype)

    def pooled_vector(self, caption_id: int) -> np.ndarray:
        """The pooled vector of a caption, (P,); dtype as in ``__getitem__``."""
        row = self.pooled[int(self.pooled_rows[caption_id])]
        return widen(StoredTokens(row[None], None), self.spec.pooled_dtype)[0]

    @property
    def stored_null_rows(self) -> list[np.ndarray]:
        """Rows of the null caption at full length, as ``stored_rows``; copies."""
        return [self._null(name) for name in caption_rows(self.spec)]

    @cached_property
    def null(self) -> np.ndarray:
        """The embedding of the null caption at full length, (max_tokens, D)."""
        _ = self.arrays  # raises if there are no tokens
        names = [name for name in caption_rows(self.spec) if name != POOLED]
        return widen(StoredTokens.of([self._null(name) for name in names]), self.spec.dtype)

    @cached_property
    def null_pooled(self) -> np.ndarray:
        """The pooled vector of the null caption, (P,)."""
        _ = self.pooled  # raises if there are none
        return widen(StoredTokens(self._null(POOLED), None), self.spec.pooled_dtype)[0]

    def _null(self, name: str) -> np.ndarray:
        return np.array(self._open(f"{caption_folder(self.name)}/{null_array(name)}")[:])

    def _array(self, name: str) -> ShardedArray:
        if name not in caption_rows(self.spec):
            stored = "no pooled vectors" if name == POOLED else "only pooled vectors"
            raise StoreError(f"text encoder '{self.name}': it stores {stored}. Precompute with output = \"both\".")
        return self._open(f"{caption_folder(self.name)}/{name}")


class FeatureArrays:
    """The rows of one image feature in one bucket, in the order of the latents.

    Args:
      spec: of the feature.
      bucket: its name.
      name: of the feature.
      open_array: returns the array at a path.
    """

    def __init__(self, spec: FeatureSpec, bucket: str, name: str, open_array: Callable[[str], ShardedArray]) -> None:
        self.spec, self._name, self._open = spec, name, open_array
        self._folder = f"{bucket_part(bucket)}/{FEATURES}/{name}"

    @property
    def outputs(self) -> list[str]:
        """ "patches", "cls", or both."""
        return ["patches", "cls"] if self.spec.output == "both" else [self.spec.output]

    def arrays(self, output: str, *, variant: int = 0, flipped: bool = False) -> list[ShardedArray]:
        """Tokens in the dtype on disk; for int8 also the scales, float16.

        Args:
          output: "patches", (N, T, D) with scales (N, T, 1, groups); or "cls", (N, D) with scales (N, 1, groups).
          variant, flipped: of this crop of the images, and of the flipped one.
        Raises: StoreError: the feature has no such output; UnknownKey: there is no such crop.
        """
        if output not in self.outputs:
            raise StoreError(
                f'feature \'{self._name}\': it stores no {output}. Precompute with output = "{output}" or "both".'
            )
        names = {"patches": ("patches", "patch_scales"), "cls": ("cls", "cls_scales")}[output]
        names = names if self.spec.dtype == "int8" else names[:1]
        return [self._open(f"{self._folder}/{name}{view_suffix(variant, flipped=flipped)}") for name in names]

    def row(self, row: int, output: str = "patches") -> np.ndarray:
        """One record's patches (T, D), or its class token (D,): stored float16, or float32 of stored int8."""
        return widen(StoredTokens.of([array.read(row, row + 1) for array in self.arrays(output)]), self.spec.dtype)[0]
