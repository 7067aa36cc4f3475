"""The pictures of a store: decoded by its VAE, or its source pictures cropped as they were encoded."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from ....datasets.errors import RecordRejected, SourceError
from ....datasets.format.buckets import bucket_size
from ....datasets.store import LatentStore
from ....precompute.config import SourceSection
from ....precompute.images.decoders import PicturePlace
from ....precompute.sources.several import SourcePaths, list_sources
from ...inspection.decoder import LatentDecoder
from .pictures import Fit, decoded

DECODED = 16  # pictures decoded at once


class DecodedPictures:
    """The records of a store, decoded by its VAE: bucket after bucket, in order of their rows.

    Such a reference has the VAE's own error, so distances to it do not count that error.

    Args:
      vae: folder or hub id of the decoder; None: the store's own.
    Raises: EncoderError: the VAE cannot be loaded; SourceError: the store is empty.
    """

    def __init__(self, store: LatentStore, vae: str | None, device: torch.device) -> None:
        self._store = store
        self._decoder = LatentDecoder.of_store(store, vae, device)
        self._buckets = [(name, store.index(name).rows) for name in store.buckets]
        self._starts = np.cumsum([0, *(len(rows) for _, rows in self._buckets)])
        if not len(self):
            raise SourceError(f"store '{store.path}': it holds no pictures. Check the path.")
        self.description = {
            "kind": "store, decoded by its VAE",
            "path": str(store.path),
            "count": len(self),
            "key": store.root_hash,
            "decoder_sha256": self._decoder.identity.weights_sha256,
        }

    def __len__(self) -> int:
        return int(self._starts[-1])

    def batches(self, batches: Iterable[np.ndarray]) -> Iterator[list[np.ndarray]]:
        """As ``PictureSet.batches``."""
        for numbers in batches:
            yield [picture for part in self._parts(numbers) for picture in self._decode(*part)]

    def _parts(self, numbers: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Bucket and rows of consecutive pictures of one bucket, at most ``DECODED``."""
        places = np.searchsorted(self._starts, numbers, side="right") - 1
        for place, group in itertools.groupby(zip(places.tolist(), numbers.tolist(), strict=True), lambda one: one[0]):
            name, rows = self._buckets[place]
            chosen = rows[np.array([number for _, number in group]) - self._starts[place]]
            for first in range(0, len(chosen), DECODED):
                yield name, chosen[first : first + DECODED]

    def _decode(self, bucket: str, rows: np.ndarray) -> np.ndarray:
        return self._decoder.decode_rows(self._store.latents(bucket).take(rows))


class SourcePictures:
    """The source pictures of a store's records, in the order of the source, cropped as the store has them.

    Raises: SourceError: the source cannot be read, or lacks pictures of the store.
    """

    def __init__(self, store: LatentStore, source: SourcePaths) -> None:
        images = store.spec.images
        section = SourceSection.model_validate(store.spec.recipe.get("source", {}))  # an imported store has none
        self._listed = list_sources(source, section)
        columns = store.record_columns(["key", "bucket", "status"]).to_pydict()
        entries = zip(columns["key"], columns["bucket"], columns["status"], strict=True)
        buckets = {key: bucket for key, bucket, status in entries if status == "stored"}
        self._places = [
            (record.path, record.offset, record.num_bytes, bucket)
            for record in self._listed.records
            if (bucket := buckets.pop(record.key, None))
        ]
        if buckets:
            raise SourceError(
                f"store '{store.path}': {len(buckets)} of its records are not in the source, the first is "
                f"'{next(iter(buckets))}'. Give the pictures that it was made from with --source."
            )
        self._crop, self._filter, self._turned = images.crop, images.resize_filter, images.exif_orientation
        self.description = {
            "kind": "store, source pictures",
            "path": str(store.path),
            "count": len(self),
            "key": store.root_hash,
        }

    def __len__(self) -> int:
        return len(self._places)

    def batches(self, batches: Iterable[np.ndarray]) -> Iterator[list[np.ndarray]]:
        """As ``PictureSet.batches``."""
        return decoded([self._place(number) for number in numbers.tolist()] for numbers in batches)

    def _place(self, number: int) -> tuple[PicturePlace, Fit]:
        path, offset, num_bytes, bucket = self._places[number]
        try:
            place = self._listed.place(path, offset, num_bytes, stage="decode")
        except RecordRejected as reject:
            raise SourceError(f"picture '{path}': {reject.detail}. Needed all pictures of the store.") from reject
        return place, Fit(bucket_size(bucket), self._crop, self._filter, self._turned)
