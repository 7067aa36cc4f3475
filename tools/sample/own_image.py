"""An image of the user to edit: resized and cropped at the center, to a bucket of the run."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ...datasets.errors import RecordRejected, SourceError
from ...datasets.format.buckets import bucket_size
from ...precompute.images.decoders import Decoders


def read_own_image(path: Path, buckets: list[str]) -> tuple[np.ndarray, str]:
    """Decode an image in a process of its own, and crop it to the bucket with the nearest aspect ratio.

    Returns: (height_px, width_px, 3) uint8, and the bucket.
    Raises: SourceError: it is not a readable image.
    """
    ratios = {name: height / width for name in buckets for height, width in [bucket_size(name)]}
    try:
        place = path, 0, path.stat().st_size
        with Decoders(1) as decoders:
            size = decoders.size(*place)
            assert size, "a file has all bytes"
            bucket = min(buckets, key=lambda name: abs(ratios[name] - size[0] / size[1]))
            decoded = decoders.decode(*place, bucket=bucket_size(bucket), crop="bucket")
    except (OSError, RecordRejected) as error:
        raise SourceError(f"--image '{path}': it cannot be read ({error}). Check the path.") from error
    return decoded.pixels, bucket
