"""The tokens of a store's captions: whose lie where, as they are stored, and as numbers again."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..disk.cached import cached_property
from ..format.layout import EMBEDDINGS, NULL_EMBEDDING, NULL_SCALES, SCALES
from ..format.schema import TextSpec
from ..format.token_dtypes import StoredTokens, widen
from .sharded_array import ShardedArray


class CaptionTokens:
    """Caption embeddings of a store, (L, D) each, its valid tokens, one caption after the other.

    Args:
      spec: of the texts.
      open_array: gives an array by its path.
      read_spans: gives (num_captions,) first rows and (num_captions,) lengths, read when they are first needed.
    """

    def __init__(
        self,
        spec: TextSpec,
        open_array: Callable[[str], ShardedArray],
        read_spans: Callable[[], tuple[np.ndarray, np.ndarray]],
    ) -> None:
        self._spec, self._open, self._read_spans = spec, open_array, read_spans

    @cached_property
    def _spans(self) -> tuple[np.ndarray, np.ndarray]:
        return self._read_spans()

    @property
    def offsets(self) -> np.ndarray:
        """(num_captions,) first row of each caption in the arrays, stacked over the revisions."""
        return self._spans[0]

    @property
    def lengths(self) -> np.ndarray:
        """(num_captions,) tokens of each caption."""
        return self._spans[1]

    @property
    def arrays(self) -> list[ShardedArray]:
        """(tokens, D), of the dtype on disk; where that is int8 also (tokens,) float32, by which each is multiplied."""
        return [self._open(path) for path in self._paths(EMBEDDINGS, SCALES)]

    def stored(self, caption_id: int) -> StoredTokens:
        """The tokens of a caption as they lie in the arrays; mapped views where they are uncompressed."""
        start = int(self.offsets[caption_id])
        stop = start + int(self.lengths[caption_id])
        return StoredTokens.of([array.read(start, stop) for array in self.arrays])

    def __getitem__(self, caption_id: int) -> np.ndarray:
        """(L, D): where float16 or float32 is stored a mapped view, where bfloat16 or int8 is, a float32 copy."""
        return widen(self.stored(caption_id), self._spec.dtype)

    @property
    def stored_null(self) -> StoredTokens:
        """The empty caption at full length as it lies in the arrays; a copy."""
        arrays = [self._open(path) for path in self._paths(NULL_EMBEDDING, NULL_SCALES)]
        return StoredTokens.of([np.array(array.read(0, len(array))) for array in arrays])

    @cached_property
    def null(self) -> np.ndarray:
        """The empty caption at full length, (max_tokens, D)."""
        return widen(self.stored_null, self._spec.dtype)

    def _paths(self, tokens: str, scales: str) -> tuple[str, ...]:
        return (tokens, scales) if self._spec.dtype == "int8" else (tokens,)
