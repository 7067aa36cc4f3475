"""The images of a plan's rows, decoded; one that cannot be decoded is a reject with a reason."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...datasets.disk.spill import TakenColumn
from ...datasets.errors import RecordRejected
from ...datasets.format.layout import Part
from ...datasets.format.row_layout import LATENTS, MASK
from ...datasets.format.schema import ImageSpec
from ...datasets.format.table_schemas import PLACES
from ...datasets.revisions.plan import FrozenPlan
from ..images.decoders import Decoded, Decoders
from ..sources.source import OpenedSource
from .clock import StageClock

Place = tuple[str, int, int]
"""Path, offset and number of bytes of an image."""


@dataclass(frozen=True)
class PlannedRow:
    """The images of a record in the plan.

    Args:
      place, size: of its own image; size is height and width in pixels.
      companions: places of the companions that are encoded with it, by name.
      checksum: of the file of its own image if its latents are already stored, else None.
    """

    place: Place
    size: tuple[int, int]
    companions: Mapping[str, Place]
    checksum: int | None = None


class PlannedRows:
    """Keys, places and sizes of the images of a part, by row.

    ``positions`` is (N,) in the records table, -1 for a row that no record has; ``companions`` names those of the part.
    """

    def __init__(self, plan: FrozenPlan, part: Part) -> None:
        self.positions = plan.positions_of(part)
        self.companions = [one.name for one in plan.spec.pictures if one.name in part.groups]
        known = np.maximum(self.positions, 0)

        def columns(*names: str, suffix: str = "") -> list[TakenColumn]:
            return [TakenColumn(plan.records[f"{name}{suffix}"], known) for name in names]

        (self.keys,), self._place = columns("key"), columns(*PLACES[:3])
        self._size, checksums = columns("height_px", "width_px"), columns("source_checksum")
        self._companion_places = {name: columns(*PLACES[:3], suffix=f"_{name}") for name in self.companions}
        self._checksums = checksums if LATENTS not in part.groups else []

    def __getitem__(self, row: int) -> PlannedRow:
        return PlannedRow(
            _at(self._place, row),
            _at(self._size, row),
            {name: _at(columns, row) for name, columns in self._companion_places.items()},
            *_at(self._checksums, row),
        )


def _at(columns: Sequence[TakenColumn], row: int) -> Any:
    return tuple(column[row] for column in columns)


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
          how: ``beside`` and ``mask_px`` of a companion, as for ``Decoders.picture``.
        """
        start = time.perf_counter()
        try:
            where = self.source.place(*place, stage="decode", companion=companion)
            fetch_seconds = time.perf_counter() - start
            images = self.images
            settings = {"crop": images.crop, "resize_filter": images.resize_filter}
            decoded = self.decoders.decode(
                *where, bucket=bucket, exif_orientation=images.exif_orientation, **settings, **how
            )
        except RecordRejected as reject:
            return reject
        self.clock.add({"read": fetch_seconds + decoded.read_seconds, "decode": decoded.decode_seconds})
        return decoded

    def decode_planned(self, place: Place, size: tuple[int, int], bucket: tuple[int, int]) -> Decoded | RecordRejected:
        """Decode a record's own image, which must have its planned height and width in pixels."""
        decoded = self.decode(place, bucket)
        if isinstance(decoded, RecordRejected) or (decoded.height_px, decoded.width_px) == size:
            return decoded
        planned = "{}x{}".format(*size)
        detail = f"the image has {decoded.height_px}x{decoded.width_px} px, planned were {planned} px"
        return RecordRejected("decode", "wrong_size", detail)

    def decode_row(
        self, planned: PlannedRow, bucket: tuple[int, int], kinds: Mapping[str, str], downscale: int
    ) -> Decoded | RecordRejected:
        """Decode a record's own image and its companions.

        Args:
          kinds: of companions, by name.
          downscale: pixels of a latent's side, for masks.
        """
        decoded = self.decode_planned(planned.place, planned.size, bucket)
        if isinstance(decoded, RecordRejected):
            return decoded
        if planned.checksum is not None and decoded.source_checksum != planned.checksum:
            return RecordRejected("decode", "source_changed", "its latents are of another image")
        companions = {}
        for name, place in planned.companions.items():
            mask_px = downscale if kinds[name] == MASK else 0
            image = self.decode(place, bucket, companion=name, beside=planned.size, mask_px=mask_px)
            if isinstance(image, RecordRejected):
                return RecordRejected(image.stage, image.reason, f"companion '{name}', '{place[0]}': {image.detail}")
            companions[name] = image
        return replace(decoded, companions=companions) if companions else decoded
