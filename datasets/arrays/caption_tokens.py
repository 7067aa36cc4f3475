"""The captions of one text encoder: where their tokens are, as stored, and as numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..disk.cached import cached_property
from ..errors import StoreError
from ..format.caption_layout import (
    EMBEDDINGS,
    NULL_EMBEDDING,
    NULL_POOLED,
    NULL_SCALES,
    POOLED,
    SCALES,
    caption_arrays,
    caption_folder,
    pooled_rows,
)
from ..format.schema import TextSpec
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

    @property
    def starts(self) -> np.ndarray:
        """(num_captions,) first row of each caption's tokens; of pooled vectors alone, its row."""
        return self._spans[0]

    @cached_property
    def pooled_rows(self) -> np.ndarray:
        """(num_captions,) row of each caption's pooled vector."""
        return pooled_rows(self.spec, self.starts)

    @property
    def lengths(self) -> np.ndarray:
        """(num_captions,) stored tokens of each caption."""
        return self._spans[1]

    @property
    def arrays(self) -> list[ShardedArray]:
        """The tokens, (tokens, D) in the dtype on disk; for int8 also the scale of each token, (tokens,) float32.

        Raises: StoreError: only pooled vectors are stored.
        """
        return [self._open(path) for path in self._paths(EMBEDDINGS, SCALES)]

    @property
    def pooled(self) -> ShardedArray:
        """The pooled vectors, (rows, P) in the dtype on disk: ``pooled_rows`` has that of each caption.

        Raises: StoreError: there are none.
        """
        if not self.spec.pooled_width:
            raise StoreError(
                f"text encoder '{self.name}': it stores no pooled vectors. Precompute with output = \"both\"."
            )
        return self._open(f"{caption_folder(self.name)}/{POOLED}")

    @property
    def paths(self) -> list[str]:
        """Paths of tokens, scales and pooled vectors, in the order of a caption's checksum."""
        return [f"{caption_folder(self.name)}/{array}" for array in caption_arrays(self.spec)]

    def stored(self, caption_id: int) -> StoredTokens:
        """The stored tokens of a caption; mapped views if they are uncompressed."""
        return self.stored_at(int(self.starts[caption_id]), int(self.lengths[caption_id]))

    def stored_at(self, start: int, length: int) -> StoredTokens:
        """The stored tokens of the caption that begins at a row; mapped views if they are uncompressed."""
        return StoredTokens.of([array.read(start, start + length) for array in self.arrays])

    def stored_rows(self, caption_id: int) -> list[np.ndarray]:
        """Rows of a caption in each array of ``paths``."""
        tokens = self.stored(caption_id).parts if self.spec.has_tokens else []
        if not self.spec.pooled_width:
            return tokens
        row = int(self.pooled_rows[caption_id])
        return [*tokens, self.pooled.read(row, row + 1)]

    def __getitem__(self, caption_id: int) -> np.ndarray:
        """The embedding of a caption, (L, D): float16 and float32 a mapped view, bfloat16 and int8 a float32 copy."""
        return widen(self.stored(caption_id), self.spec.dtype)

    def pooled_vector(self, caption_id: int) -> np.ndarray:
        """The pooled vector of a caption, (P,); dtype as of ``__getitem__``."""
        row = int(self.pooled_rows[caption_id])
        return widen(StoredTokens(self.pooled[row][None], None), self.spec.pooled_dtype)[0]

    @property
    def stored_null(self) -> StoredTokens:
        """The stored null caption at full length; a copy."""
        return StoredTokens.of([self._whole(path) for path in self._paths(NULL_EMBEDDING, NULL_SCALES)])

    @property
    def stored_null_rows(self) -> list[np.ndarray]:
        """Rows of the null caption in each array, as ``stored_rows``."""
        tokens = self.stored_null.parts if self.spec.has_tokens else []
        return [*tokens, *([self._stored_null_pooled] if self.spec.pooled_width else ())]

    @cached_property
    def null(self) -> np.ndarray:
        """The embedding of the null caption at full length, (max_tokens, D)."""
        return widen(self.stored_null, self.spec.dtype)

    @cached_property
    def null_pooled(self) -> np.ndarray:
        """The pooled vector of the null caption, (P,)."""
        return widen(StoredTokens(self._stored_null_pooled, None), self.spec.pooled_dtype)[0]

    @property
    def _stored_null_pooled(self) -> np.ndarray:
        _ = self.pooled  # raises if there are none
        return self._whole(f"{caption_folder(self.name)}/{NULL_POOLED}")

    def _whole(self, path: str) -> np.ndarray:
        array = self._open(path)
        return np.array(array.read(0, len(array)))

    def _paths(self, tokens: str, scales: str) -> list[str]:
        if not self.spec.has_tokens:
            raise StoreError(
                f"text encoder '{self.name}': it stores only pooled vectors. Precompute with output = \"both\"."
            )
        names = (tokens, scales) if self.spec.dtype == "int8" else (tokens,)
        return [f"{caption_folder(self.name)}/{name}" for name in names]
