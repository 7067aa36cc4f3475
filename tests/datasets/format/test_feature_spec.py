"""The spec of image features: its grid of patches, and what no vision model has."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from leandit.datasets.format.schema import FeatureSpec

DINOV2 = {"output": "patches", "layer": -1, "width": 768, "patch_px": 14, "resolution_px": 224, "images_px": 256}


def spec(**more: Any) -> FeatureSpec:
    return FeatureSpec(**DINOV2 | {"dtype": "float16"} | more)


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((256, 256), (16, 16)),
        ((192, 320), (12, 20)),
        ((320, 192), (20, 12)),
        ((8, 2048), (1, 128)),
        ((200, 248), (13, 16)),
    ],
)
def test_a_bucket_has_a_patch_for_16_px_as_in_repa(size: tuple[int, int], grid: tuple[int, int]) -> None:
    assert spec().grid(*size) == grid
    # The same at 512 px, and for a model with larger patches that sees more pixels.
    assert spec(images_px=512, resolution_px=448).grid(*size) == grid
    assert spec(patch_px=16, resolution_px=256).grid(*size) == grid


@given(st.integers(1, 5000), st.integers(1, 64), st.integers(1, 64), st.integers(1, 4000))
def test_the_grid_is_the_nearest_and_never_has_more_tokens_than_pixels(
    side_px: int, patch_px: int, images_px: int, resolution_px: int
) -> None:
    if resolution_px > patch_px * images_px:
        with pytest.raises(ValidationError, match="more patches than"):
            spec(patch_px=patch_px, images_px=images_px, resolution_px=resolution_px)
        return
    rows, _ = spec(patch_px=patch_px, images_px=images_px, resolution_px=resolution_px).grid(side_px, 1)
    exact = Fraction(side_px * resolution_px, images_px * patch_px)
    assert 1 <= rows <= side_px
    assert abs(rows - exact) <= Fraction(1, 2) or (exact < Fraction(1, 2) and rows == 1)
