"""The spec of image features: its grid of patches, and what no vision model has."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from leandit.datasets.format.schema import FeatureSpec

DINOV2 = {"output": "patches", "layer": -1, "width": 768, "patch_px": 14, "resolution_px": 224, "images_px": 256}


def spec(**more: Any) -> FeatureSpec:
    return FeatureSpec(**DINOV2 | {"dtype": "float16"} | more)


GRIDS = {(256, 256): (16, 16), (192, 320): (12, 20), (320, 192): (20, 12), (8, 2048): (1, 128), (200, 248): (13, 16)}


def test_a_bucket_has_a_patch_for_16_px_as_in_repa() -> None:
    for size, grid in GRIDS.items():
        assert spec().grid(*size) == grid
        # The same at 512 px, and for a model with larger patches that sees more pixels.
        assert spec(images_px=512, resolution_px=448).grid(*size) == grid
        assert spec(patch_px=16, resolution_px=256).grid(*size) == grid
    with pytest.raises(ValidationError, match="more patches than"):
        spec(patch_px=1, images_px=64, resolution_px=65)
