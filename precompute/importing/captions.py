"""Caption embeddings of a source in the store's dtype: the rows of a shard, and the null caption."""

from __future__ import annotations

import numpy as np

from ...datasets.errors import SourceError
from ...datasets.format.layout import Part
from ...datasets.format.schema import StoreSpec, TextSpec
from ...datasets.format.token_dtypes import StoredTokens, is_storable, narrow, quality
from ...datasets.revisions.writer import row_checksum
from ..run.shards import Shard
from .null_caption import read_null


class CaptionRows:
    """The rows of a shard of captions of one text encoder."""

    def __init__(self, part: Part, shard: int) -> None:
        assert part.captions is not None, "a part of captions"
        self._layout, captions = part.captions, part.captions.captions_of(shard)
        self.shard, self._first = Shard(part, shard, len(captions)), captions.start

    def add(self, caption: int, text: str, values: np.ndarray) -> None:
        """Add the next caption.

        Args:
          caption: its number.
          values: (L, D) tokens, or (P,) a pooled vector.
        Raises: SourceError: another shape than planned, or the store's dtype cannot hold it.
        """
        spec = self._layout.spec
        wanted = (int(self._layout.num_tokens[caption]), spec.width) if spec.has_tokens else (spec.pooled_width,)
        if values.shape != wanted:
            raise SourceError(
                f"caption {text[:80]!r}: its features are {values.shape} now, {wanted} when the store was planned. "
                "Restore the source; the same command then goes on."
            )
        if (stored := stored_caption(values, spec)) is None:
            raise SourceError(
                f"caption {text[:80]!r}: its features are not finite as {stored_dtype(spec)}. Import into another "
                "--store with --set store.dtype=source, or with text.check=content, which rejects what is broken."
            )
        is_narrowed = spec.dtype != "float32" and stored_dtype(spec) != values.dtype.name
        before = values.reshape(-1, values.shape[-1]).astype(np.float32)
        measured = quality(before, stored, stored_dtype(spec)) if is_narrowed else None
        starts = self._layout.starts_of(caption)
        self.shard.store(caption - self._first, self.shard.part.arrays, starts, stored.parts, quality=measured)


def null_shard(part: Part, spec: StoreSpec, choice: str | None) -> Shard:
    """The null caption of a text encoder.

    Args:
      choice: as of ``read_null``.
    Raises: SourceError: it is not the planned one.
    """
    assert part.captions is not None, "a part of captions"
    text, name = part.captions.spec, part.captions.name
    shape = (text.max_tokens, text.width) if text.has_tokens else (text.pooled_width,)
    null = read_null(choice, shape, name)
    if f"{row_checksum(null):016x}" != spec.text_encoder_of(name).encoder.config.get("null_caption"):
        raise SourceError(f"--null '{choice}': not the null caption that the store was planned with.")
    if (stored := stored_caption(null, text)) is None:
        raise SourceError(f"--null '{choice}': not finite as {stored_dtype(text)}. Use --set store.dtype=source.")
    shard = Shard(part, 0, 1)
    shard.store(0, part.arrays, [0] * len(part.arrays), stored.parts)
    return shard


def stored_caption(values: np.ndarray, spec: TextSpec) -> StoredTokens | None:
    """A caption, (L, D) or (P,), in the store's dtype, as rows; None if not finite, or out of its range."""
    rows, dtype = values.reshape(-1, values.shape[-1]).astype(np.float32), stored_dtype(spec)
    if not np.isfinite(rows).all():
        return None
    stored = narrow(rows, dtype)
    return stored if is_storable(stored, dtype) else None


def stored_dtype(spec: TextSpec) -> str:
    """Of what is stored of a caption."""
    return spec.dtype if spec.has_tokens else spec.pooled_dtype
