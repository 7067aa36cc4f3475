"""One shard of images or captions, filled batch by batch: a pure function of a slice of the plan and the encoders.

A batch is the next ``batch_size`` rows of a shard of images, or captions of equal length. An image that cannot be
decoded leaves its row empty, so the other rows keep their bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Executor, Future
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ...datasets.format.layout import Part, Task
from ...datasets.format.schema import Fallback, Reject, TextSpec
from ...datasets.format.table_schemas import REJECTED, STORED
from ...datasets.format.token_dtypes import TokenQuality, is_storable, measure_quality, narrow
from ...datasets.revisions.commits import new_results, reject_of_caption
from ...datasets.revisions.plan import FrozenPlan
from ...datasets.revisions.writer import row_checksum
from ...errors import EncoderError, RecordRejected
from ..encoders.text.encoder import CaptionEncoder, EncodedCaptions
from ..encoders.text.tokenizer import of_table
from ..images.decoders import Decoded
from .columns import Column, EncodedBatch, Views, encode_batch, forward_rows_of, stored_row, worst
from .inputs import PartImages

NULL_ADVICE = (
    'It is the null caption, which training needs. Use store.text_dtype = "float16" or "float32", or another '
    "store.on_low_quality."
)

Outcomes = list[tuple[str, RecordRejected | None]]


class Shard:
    """The rows of one task, empty at first, and what became of them.

    Attributes:
      items: rows of the bucket, or captions counted from the first of the part.
      arrays: by path, (n, ...) rows of this shard.
      results: (items, groups) of ROW_RESULTS.
      model: the caption encoder that must be in memory; None for images.
      stage: of the clock, to which ``encode`` counts.
    """

    model: CaptionEncoder | None = None
    stage: str

    def __init__(self, part: Part, number: int) -> None:
        self.part, self.number, self.items = part, number, part.items(number)
        self.arrays = {
            one.path: np.full((len(one.rows_of(number)), *one.shape[1:]), one.fill_value, one.dtype)
            for one in part.arrays
        }
        self.results = new_results(part, len(self.items))
        self.rejects: list[Reject] = []
        self.fallbacks: list[Fallback] = []

    @property
    def task(self) -> Task:
        """The task that writes it."""
        return self.part.name, self.number

    def batches(self) -> Sequence[Any]:
        """What is encoded together, in order."""
        raise NotImplementedError

    def load(self, batch: Any, pools: Pools) -> Future[Any]:
        """Start loading the inputs of a batch."""
        raise NotImplementedError

    def encode(self, batch: Any, inputs: Any) -> Any:
        """Run the encoder, one batch after the other."""
        raise NotImplementedError

    def put(self, batch: Any, inputs: Any, outputs: Any) -> Outcomes:
        """Narrow and store an encoded batch, one after the other; the encoder may run on the next one meanwhile.

        Returns: key and reject (None if stored) of each record or caption.
        """
        raise NotImplementedError

    def store(
        self,
        item: int,
        values: Sequence[np.ndarray],
        *,
        group: int = 0,
        quality: TokenQuality | None = None,
        source_checksum: int = 0,
        size: tuple[int, int] = (0, 0),
    ) -> None:
        """Store the rows of one record or caption.

        Args:
          item: its place among the shard's items.
          values: (rows, ...) of each array of its group.
          group: number of the group of arrays.
          quality: what narrowing cost.
          source_checksum: of the file that was encoded.
          size: height and width in pixels of the image in it.
        """
        part, stored = self.part, []
        layouts = part.arrays if part.captions else list(part.groups.values())[group]
        if part.captions and not part.is_null:
            first_rows = part.captions.starts_of(self.items[item])
        else:
            first_rows = [self.items[item]] * len(layouts)
        for layout, first, rows in zip(layouts, first_rows, values, strict=True):
            start = first - layout.rows_of(self.number).start
            stored.append(self.arrays[layout.path][start : start + len(rows)])
            stored[-1][:] = rows
        result = self.results[item, group]
        result["state"], result["checksum"], result["source_checksum"] = STORED, row_checksum(*stored), source_checksum
        result["height_px"], result["width_px"] = size
        if quality:
            result["min_cosine"], result["max_error"] = quality

    def reject(self, item: int, key: str, reject: RecordRejected) -> None:
        """Leave the rows of a record or caption empty."""
        why = {"stage": reject.stage, "reason": reject.reason, "detail": reject.detail}
        self.rejects.append(Reject(row=self.items[item], key=key, **why))
        self.results["state"][item] = REJECTED


class Pools(NamedTuple):
    """Threads that load ahead: many that fetch and decode, one that stacks a batch."""

    decode: Executor
    stack: Executor


class ImageBatch(NamedTuple):
    """Decoded images of a batch.

    Args:
      images: of each row; None if no record has it.
      views: pixels of all rows, black where none is decoded; None if all are.
    """

    images: list[Decoded | RecordRejected | None]
    views: Views | None


class ImageShard(Shard):
    """One shard of the groups of a bucket that are encoded together.

    Args:
      columns: of each group.
      black: returns zeroed pixels of a shape.
      again: it was made before, and each row is encoded as it was then.
      wanted: rows whose batches alone are encoded; None for all.
    """

    stage = "encode"

    def __init__(
        self,
        images: PartImages,
        number: int,
        columns: Mapping[str, Column],
        black: Callable[[tuple[int, ...]], np.ndarray],
        *,
        again: bool = False,
        wanted: Set[int] | None = None,
    ) -> None:
        super().__init__(images.part, number)
        self._images, self._black, self._again, self._wanted = images, black, again, wanted
        self._columns = [columns[group] for group in images.part.groups]
        self._max_rows = self._batch_size = images.spec.latent.batch_size

    def batches(self) -> list[range]:
        """Rows of each batch."""
        starts = range(self.items.start, self.items.stop, self._batch_size)
        batches = [range(start, min(start + self._batch_size, self.items.stop)) for start in starts]
        return batches if self._wanted is None else [rows for rows in batches if self._wanted & set(rows)]

    def load(self, batch: range, pools: Pools) -> Future[ImageBatch]:
        """Decode the images of some rows."""
        futures = [pools.decode.submit(self._images.decode, row) for row in batch]
        return pools.stack.submit(lambda: self._stacked([future.result() for future in futures]))

    def _stacked(self, images: list[Decoded | RecordRejected | None]) -> ImageBatch:
        decoded = {i: image for i, image in enumerate(images) if isinstance(image, Decoded)}
        if not decoded:
            return ImageBatch(images, None)
        views = {}
        for name in sorted({column.image for column in self._columns}):
            of_rows = {i: image.companions[name] if name else image for i, image in decoded.items()}
            pixels = self._black((len(images), *next(iter(of_rows.values())).pixels.shape))
            for i, image in of_rows.items():
                pixels[i] = image.pixels
            spec = self._images.spec  # in the order of ``view_suffixes``
            crops = np.moveaxis(pixels, 1, 0) if spec.images.variants > 1 else [pixels]
            flips = 2 if spec.latent.flip else 1
            views[name] = [view for crop in crops for view in (crop, crop[:, :, ::-1])[:flips]]
        return ImageBatch(images, views)

    def encode(self, batch: range, inputs: ImageBatch) -> EncodedBatch | None:
        """Run the models; a size of forwards that did not fit is not tried again in this shard."""
        if inputs.views is None:
            return None
        allowed = self._max_rows
        if self._again:
            known = [i for i in batch if self._images.positions[i] >= 0]
            allowed = min(forward_rows_of(self._images.fallbacks[i], allowed) for i in known)
        encoded = encode_batch(inputs.views, self._columns, max_rows=allowed)
        if encoded.forward_rows < min(allowed, len(batch)):
            self._max_rows = encoded.forward_rows
        return encoded

    def put(self, batch: range, inputs: ImageBatch, outputs: EncodedBatch | None) -> Outcomes:
        """Store the rows, or why they are empty."""
        outcomes: Outcomes = []
        for i, (row, image) in enumerate(zip(batch, inputs.images, strict=True)):
            if image is None:
                continue
            item, position = row - self.items.start, int(self._images.positions[row])
            if isinstance(image, Decoded):
                assert outputs is not None
                assert inputs.views is not None
                result = stored_row(outputs, i, inputs.views, position, self._columns)
            else:
                result = image
            if isinstance(result, RecordRejected):
                self.reject(item, self._images.keys[row], result)
                outcomes.append((self._images.keys[row], result))
                continue
            assert isinstance(image, Decoded)
            for number, group in enumerate(self.part.groups):
                file = image.companions[group] if group in self._images.companions else image
                self.store(
                    *(item, [values[None] for values in result.rows[number]]),
                    group=number,
                    quality=result.qualities[number],
                    source_checksum=file.source_checksum,
                    size=file.size,
                )
            notes = {note for file in (image, *image.companions.values()) for note in file.notes}
            fallback = ",".join(filter(None, [result.fallback, *sorted(notes)]))
            if fallback:
                self.fallbacks.append(Fallback(row=row, how=fallback))
            outcomes.append((self._images.keys[row], None))
        return outcomes


class CaptionShard(Shard):
    """One shard of the captions of a text encoder, or its null caption.

    Args:
      wanted: captions whose batches alone are encoded, counted from the first of the part; None for all.
      rejects_below: smallest cosine (``ordinary_cosines``) of a caption that is not rejected.
    """

    stage = "text"

    def __init__(
        self,
        plan: FrozenPlan,
        part: Part,
        number: int,
        encoder: CaptionEncoder,
        wanted: Set[int] | None = None,
        *,
        rejects_below: float = -1.0,
    ) -> None:
        assert part.captions is not None, "a task of captions"
        self._layout, self.model, self._wanted = part.captions, encoder, wanted
        self._rejects_below = rejects_below
        super().__init__(part, number)
        self._texts = [""]
        if not part.is_null:
            texts = plan.captions_of(part)["text"]
            self._texts = texts.slice(self.items.start, len(self.items)).to_pylist()

    def batches(self) -> list[np.ndarray]:
        """Captions of equal length, by their position in the shard."""
        if self.part.is_null:
            return [np.zeros(1, int)]
        lengths = self._layout.num_tokens[self.items.start : self.items.stop]
        batches = equal_length_batches(lengths, self._layout.spec.batch_size)
        if self._wanted is None:
            return batches
        return [batch for batch in batches if self._wanted & set((self.items.start + batch).tolist())]

    def load(self, batch: np.ndarray, pools: Pools) -> Future[list[str]]:
        """The texts; nothing has to be read."""
        return pools.stack.submit(lambda: [self._texts[i] for i in batch])

    def encode(self, batch: np.ndarray, inputs: list[str]) -> EncodedCaptions:
        """Embed the captions."""
        assert self.model is not None
        with of_table(self._layout.name):
            return self.model.encode_null() if self.part.is_null else self.model.encode(inputs, must_be_finite=False)

    def put(self, batch: np.ndarray, inputs: list[str], outputs: EncodedCaptions) -> Outcomes:
        """Store the embeddings in the store's dtype; captions whose embeddings are not finite, or lose too
        much where store.on_low_quality says so, are rejected.

        Raises: EncoderError: a value exceeds its range, or the null caption would be rejected.
        """
        assert self.model is not None
        outcomes, is_finite = Outcomes(), outputs.is_finite
        for number, i in enumerate(batch.tolist()):
            text = inputs[number]
            rows, quality = list[np.ndarray](), None
            if is_finite[number]:
                with of_table(self._layout.name):
                    rows, quality = stored_caption(*outputs.row(number), self._layout.spec)
            reject = None
            if not is_finite[number]:
                reject = reject_of_caption(text, self.model.identity.class_name, None)
            elif quality and quality.min_cosine < self._rejects_below:
                reject = reject_of_caption(text, self.model.identity.class_name, quality.min_cosine)
            if reject and self.part.is_null:
                raise EncoderError(f"{self.model.label}: {reject.detail}. {NULL_ADVICE}")
            if reject:
                self.reject(i, text, reject)
                if quality:  # the table shows the cosine of a caption that was rejected for it
                    self.results["min_cosine"][i], self.results["max_error"][i] = quality
            else:
                self.store(i, rows, quality=quality)
            outcomes.append((text[:80], reject))
        return outcomes


def stored_caption(
    tokens: np.ndarray | None, pooled: np.ndarray | None, spec: TextSpec
) -> tuple[list[np.ndarray], TokenQuality | None]:
    """A caption in the store's dtypes: rows of each array, and what narrowing cost.

    Args:
      tokens: (L, D) float32, None if they are not stored.
      pooled: (P,) float32, None if it is not stored.
    Raises: EncoderError: a value exceeds the range of the dtype.
    """
    rows, measured = list[np.ndarray](), list[TokenQuality]()
    vectors = None if pooled is None else pooled[None]
    for values, dtype, num_layers in ((tokens, spec.dtype, spec.num_layers), (vectors, spec.pooled_dtype, 1)):
        if values is None:
            continue
        stored = narrow(values, dtype, num_layers)
        if not is_storable(stored, dtype):
            raise EncoderError(
                f"store.text_dtype '{dtype}': it cannot hold a caption embedding's {np.abs(values).max():.4g}. Use "
                'store.text_dtype = "bfloat16" or "float32".'
            )
        rows += stored.parts
        if dtype != "float32":
            measured.append(measure_quality(values, stored, dtype, num_layers))
    return rows, worst(measured)


def equal_length_batches(lengths: np.ndarray, batch_size: int) -> list[np.ndarray]:
    """Split captions into batches of one length each, shortest first; within a length in their order.

    Args:
      lengths: (N,) tokens of each. Sorted for the first text encoder of a store; another one may count otherwise.
      batch_size: captions in a full batch.
    Returns: positions of each batch's captions.
    """
    batches, order = [], np.argsort(lengths, kind="stable")
    borders = [0, *(np.flatnonzero(np.diff(lengths[order])) + 1).tolist(), len(lengths)]
    for start, stop in pairwise(borders) if len(lengths) else ():
        batches += [order[i : min(i + batch_size, stop)] for i in range(start, stop, batch_size)]
    return batches
