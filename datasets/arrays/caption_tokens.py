"""The caption embeddings of a store: where they are, as stored, and as numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..disk.cached import cached_property
from ..format.layout import EMBEDDINGS, NULL_EMBEDDING, NULL_SCALES, SCALES
from ..format.schema import TextSpec
from ..format.token_dtypes import StoredTokens, widen
from .sharded_array import ShardedArray


class CaptionTokens:
    """The caption embeddings of a store, (L, D) each, without padding.

    Args:
      spec: of the captions.
      open_array: returns the array at a path.
      read_spans: returns the first row and the length of each caption, (num_captions,) each; called on first use.
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
        """The tokens, (tokens, D) in the dtype on disk; for int8 also the scale of each token, (tokens,) float32."""
        return [self._open(path) for path in self._paths(EMBEDDINGS, SCALES)]

    def stored(self, caption_id: int) -> StoredTokens:
        """The stored tokens of a caption; mapped views if they are uncompressed."""
        start = int(self.offsets[caption_id])
        stop = start + int(self.lengths[caption_id])
        return StoredTokens.of([array.read(start, stop) for array in self.arrays])

    def __getitem__(self, caption_id: int) -> np.ndarray:
        """The embedding of a caption, (L, D): float16 and float32 a mapped view, bfloat16 and int8 a float32 copy."""
        return widen(self.stored(caption_id), self._spec.dtype)

    @property
    def stored_null(self) -> StoredTokens:
        """The stored null caption at full length; a copy."""
        arrays = [self._open(path) for path in self._paths(NULL_EMBEDDING, NULL_SCALES)]
        return StoredTokens.of([np.array(array.read(0, len(array))) for array in arrays])

    @cached_property
    def null(self) -> np.ndarray:
        """The embedding of the null caption at full length, (max_tokens, D)."""
        return widen(self.stored_null, self._spec.dtype)

    def _paths(self, tokens: str, scales: str) -> tuple[str, ...]:
        return (tokens, scales) if self._spec.dtype == "int8" else (tokens,)
