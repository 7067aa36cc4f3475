"""The images of a plan's rows, decoded; one that cannot be decoded is a reject with a reason."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...datasets.disk.spill import TakenColumn
from ...datasets.format.buckets import bucket_size
from ...datasets.format.crops import variant_draws
from ...datasets.format.layout import Part
from ...datasets.format.row_layout import LATENTS, MASK
from ...datasets.format.schema import ImageSpec
from ...datasets.format.table_schemas import PLACES
from ...datasets.revisions.plan import FrozenPlan
from ...errors import RecordRejected
from ..images.decoders import Decoded, Decoders
from ..images.pixels import color_of
from ..sources.source import OpenedSource
from .clock import StageClock

Place = tuple[str, int, int]
"""Path, offset and number of bytes of an image."""


@dataclass(frozen=True)
class ImageReader:
    """Fetches and decodes the images of a plan.

    Args:
      clock: gets the seconds of reading and decoding, without waiting.
    """

    images: ImageSpec
    source: OpenedSource
    decoders: Decoders
    clock: StageClock

    def decode(
        self, place: Place, bucket: tuple[int, int], *, companion: str = "", **how: Any
    ) -> Decoded | RecordRejected:
        """Decode one image; rejects are returned.

        Args:
          how: ``variants``, and ``beside`` and ``mask_px`` of a companion, as for ``pixels.decode_image``.
        """
        start = time.perf_counter()
        try:
            where = self.source.place(*place, stage="decode", companion=companion)
            fetch_seconds = time.perf_counter() - start
            images = self.images
            decoded = self.decoders.decode(
                *where,
                bucket=bucket,
                crop=images.crop,
                resize_filter=images.resize_filter,
                color=color_of(images.colour),
                **how,
            )
        except RecordRejected as reject:
            return reject.without_traceback()
        self.clock.add({"read": fetch_seconds + decoded.read_seconds, "decode": decoded.decode_seconds})
        return decoded

    def decode_planned(
        self, place: Place, size: tuple[int | None, int | None], bucket: tuple[int, int], **how: Any
    ) -> Decoded | RecordRejected:
        """Decode a record's own image; reject it if its height and width in pixels differ from those planned, if any
        were."""
        decoded = self.decode(place, bucket, **how)
        if isinstance(decoded, RecordRejected) or size in ((None, None), decoded.size):
            return decoded
        detail = "the image has {}x{} px, expected {}x{} px as planned".format(*decoded.size, *size)
        return RecordRejected("decode", "wrong_size", detail)


class PartImages:
    """The images of a part, by row: of each record its own, and the companions that are encoded with it.

    Attributes:
      positions: (N,) in the records table, -1 for a row that no record has.
      keys: of the records.
      fallbacks: how a row was encoded, if not as planned; only a sealed revision knows.
      companions: names of the companions of the part.
    """

    def __init__(self, plan: FrozenPlan, part: Part, reader: ImageReader) -> None:
        self.spec, self.part, self.reader = plan.spec, part, reader
        self.positions = plan.positions_of(part)
        self.companions = {one.name: one.kind for one in plan.spec.companions if one.name in part.groups}
        known = self.positions.clip(0)

        def columns(*names: str, suffix: str = "") -> list[TakenColumn]:
            return [TakenColumn(plan.records[f"{name}{suffix}"], known) for name in names]

        self.keys, self.fallbacks = columns("key", "fallback")
        self._place, self._size = columns(*PLACES[:3]), columns("height_px", "width_px")
        self._companion_places = {name: columns(*PLACES[:3], suffix=f"_{name}") for name in self.companions}
        # Of an image whose latents are already stored.
        self._checksum = [] if LATENTS in part.groups else columns("source_checksum")

    def decode(self, row: int) -> Decoded | RecordRejected | None:
        """Decode a record's own image and its companions; None for a row that no record has."""
        if self.positions[row] < 0:
            return None
        bucket = bucket_size(self.part.bucket)
        variants = variant_draws(self.keys[row], self.spec.images.variants, self.spec.images.variant_zoom)
        how = {"variants": variants} if variants else {}
        decoded = self.reader.decode_planned(_at(self._place, row), _at(self._size, row), bucket, **how)
        if isinstance(decoded, RecordRejected):
            return decoded
        if any(checksum not in (None, decoded.source_checksum) for checksum in _at(self._checksum, row)):
            return RecordRejected("decode", "source_changed", "its latents are of another image")
        companions = {}
        for name, columns in self._companion_places.items():
            place, mask_px = _at(columns, row), self.spec.latent.downscale if self.companions[name] == MASK else 0
            image = self.reader.decode(place, bucket, companion=name, beside=decoded.size, mask_px=mask_px, **how)
            if isinstance(image, RecordRejected):
                return RecordRejected(image.stage, image.reason, f"companion '{name}', '{place[0]}': {image.detail}")
            companions[name] = image
        return replace(decoded, companions=companions) if companions else decoded


def _at(columns: Sequence[TakenColumn], row: int) -> Any:
    return tuple(column[row] for column in columns)
