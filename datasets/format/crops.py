"""Where each view of an image was cropped: the planned crop, its further crops, and the same flipped. Pure functions.

Only the planned crop is in the records table. Further crops follow from the record's key and sizes (FORMAT.md,
section 4), so what encodes them and what tells a model where they were both ask here.
"""

from __future__ import annotations

from typing import NamedTuple

import xxhash

from .buckets import adm_sizes, bucket_size, centre_crop, cover_size
from .schema import ImageSpec

Variant = tuple[float, float, float]
"""A random crop: enlargement of the image, and the shares of the room that lie above and left of it, below 1."""


class Crop(NamedTuple):
    """A crop of an image that was resized, in pixels.

    Args:
      resized_height, resized_width: of the image after the resize.
      top, left: of the crop, in the resized image.
    """

    resized_height: int
    resized_width: int
    top: int
    left: int

    def flipped(self, width: int) -> Crop:
        """The same crop in the image that was resized, then flipped horizontally.

        Args:
          width: of the crop.
        """
        return self._replace(left=self.resized_width - self.left - width)


def variant_draws(key: str, count: int, zoom: float) -> list[Variant]:
    """The further crops of a record, ``count`` with the planned one; a function of its key and of each number alone.

    Args:
      zoom: largest enlargement.
    """
    return [variant_draw(key, number, zoom) for number in range(1, count)]


def variant_draw(key: str, number: int, zoom: float) -> Variant:
    """A further crop of a record, by its number from 1."""
    bits = xxhash.xxh3_128_intdigest(key.encode("utf-8", "surrogatepass"), seed=number)
    shares = [(bits >> shift & 0xFFFFFFFF) / 2**32 for shift in (0, 32, 64)]
    return 1 + (zoom - 1) * shares[0], shares[1], shares[2]


def crop_geometry(
    height_px: int, width_px: int, bucket: tuple[int, int], crop: str, variant: Variant | None = None
) -> tuple[list[tuple[int, int]], int, int]:
    """Sizes and corner of the planned crop, as ``centre_crop`` returns them, or of a variant.

    Source of variants: the random crop of the published data loader of Dhariwal and Nichol 2021, which resizes the
    image to a random size that is at least the crop's, and crops anywhere.
    """
    if variant is None:
        return centre_crop(height_px, width_px, bucket, crop)
    zoom, *shares = variant
    height, width = (round(zoom * side_px) for side_px in bucket)
    sizes = [cover_size(height_px, width_px, (height, width))]
    if crop == "adm":
        sizes = adm_sizes(height_px, width_px, height)
    top, left = (int(share * (sizes[-1][i] - bucket[i] + 1)) for i, share in enumerate(shares))
    return sizes, top, left


def variant_crop(key: str, size: tuple[int, int], bucket: str, number: int, images: ImageSpec) -> Crop:
    """A further crop of a record.

    Args:
      size: height and width of the source image, upright, in pixels.
      number: of the crop, from 1.
    """
    draw = variant_draw(key, number, images.variant_zoom)
    sizes, top, left = crop_geometry(*size, bucket_size(bucket), images.crop, draw)
    return Crop(*sizes[-1], top, left)
