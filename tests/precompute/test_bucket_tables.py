"""Buckets: the published tables, the nearest ratio, and the sizes on the way to a crop."""

from __future__ import annotations

import re
from typing import Any

import pytest
from diffusers.pipelines.pixart_alpha import pipeline_pixart_alpha, pipeline_pixart_sigma
from diffusers.pipelines.sana import pipeline_sana
from hypothesis import given
from hypothesis import strategies as st

from leandit.datasets.format.buckets import adm_sizes
from leandit.errors import RecipeError
from leandit.precompute.config import ImagesSection
from leandit.precompute.images.bucket_tables import (
    PIXART_1024,
    PIXART_2880,
    PIXART_RESOLUTIONS_PX,
    area_step,
    assign_bucket,
    bucket_table,
    resize_filter,
)

PUBLISHED = {
    256: pipeline_pixart_alpha.ASPECT_RATIO_256_BIN,
    512: pipeline_pixart_alpha.ASPECT_RATIO_512_BIN,
    1024: pipeline_pixart_alpha.ASPECT_RATIO_1024_BIN,
    2048: pipeline_pixart_sigma.ASPECT_RATIO_2048_BIN,
    4096: pipeline_sana.ASPECT_RATIO_4096_BIN,
}
sides = st.integers(1, 20_000)


@pytest.mark.parametrize(("resolution_px", "multiple_px"), [(256, 16), (512, 32), (1024, 64), (2048, 128), (4096, 256)])
def test_the_pixart_table_holds_every_published_bucket_a_multiple_of_those_for_1024(
    resolution_px: int, multiple_px: int
) -> None:
    table = bucket_table("pixart", resolution_px)
    theirs = {(float(ratio), int(height), int(width)) for ratio, (height, width) in PUBLISHED[resolution_px].items()}
    assert theirs <= set(table)  # for inference diffusers keeps 33 of the 40 rows of the smaller tables
    assert resolution_px < 2048 or theirs == set(table)
    assert list(table) == [(r, h * resolution_px / 1024, w * resolution_px / 1024) for r, h, w in PIXART_1024]
    assert all(height % multiple_px == width % multiple_px == 0 for _, height, width in table)


def test_the_table_for_2880_is_one_of_its_own_that_says_its_ratios() -> None:
    table = bucket_table("pixart", 2880)
    sizes = {(height, width) for _, height, width in table}
    assert table == PIXART_2880
    assert len(table) == len(sizes) == 40
    assert [ratio for ratio, _, _ in table] == sorted({ratio for ratio, _, _ in table})
    # The published ratios are rounded to two digits, but for the ends, where they are those of the table for 1024.
    assert all(abs(ratio - height / width) < 0.0051 for ratio, height, width in table[4:-1])
    assert [ratio for ratio, _, _ in (*table[:4], table[-1])] == [0.25, 0.26, 0.27, 0.28, 4.0]
    assert all(height % 64 == width % 64 == 0 for height, width in sizes)
    assert all(0.87 < height * width / 2880**2 <= 1.0 for height, width in sizes)
    assert {size for size in sizes if size[::-1] not in sizes} == {(1920, 3776)}


def test_pixart_takes_lanczos_for_its_tables_of_2048_and_2880_only() -> None:
    wanted = dict.fromkeys(PIXART_RESOLUTIONS_PX, "bicubic") | {2048: "lanczos", 2880: "lanczos"}
    assert {px: resize_filter("pixart", px) for px in PIXART_RESOLUTIONS_PX} == wanted
    assert {resize_filter(buckets, 2048) for buckets in ("square", "area", ("2048x1024",))} == {"bicubic"}


def test_the_area_table_for_1024_stays_as_it_is() -> None:
    # Another table moves images to other buckets: who plans on with a grown store would get both.
    steps = {px: area_step(px) for px in (128, 256, 448, 512)}
    assert steps == {128: 16, 256: 32, 448: 32, 512: 64}  # 48 would make the square of 448 one of 432
    assert area_step(128, 32) == 64
    tall = [row[1:] for row in bucket_table("area", 1024) if row[1] > row[2]]
    assert tall == [
        (1088, 960), (1152, 896), (1216, 832), (1280, 768), (1344, 768), (1408, 704), (1472, 704), (1536, 640),
        (1600, 640), (1664, 576), (1728, 576), (1792, 576), (1856, 512), (1920, 512), (1984, 512), (2048, 512),
    ]  # fmt: skip


def test_a_table_of_ones_own_is_sorted_by_ratio_and_free_of_doubles_and_one_that_is_none_is_refused() -> None:
    table = bucket_table(["80x48", "48x80", "64x64", "80x48"], 64)
    assert table == ((48 / 80, 48, 80), (1.0, 64, 64), (80 / 48, 80, 48))
    for buckets, resolution_px, words in [
        ("pixart", 384, "256, 512, 1024, 2048, 2880, 4096"),
        ("sqare", 256, "sqare"),
        (["64 x 64"], 64, "64 x 64"),
    ]:
        with pytest.raises(RecipeError, match=words):
            bucket_table(buckets, resolution_px)


@given(sides, sides, st.sampled_from([*PUBLISHED, "own"]))
def test_an_image_goes_to_the_nearest_ratio_or_nowhere(height_px: int, width_px: int, which: int | str) -> None:
    own = ["48x80", "64x64", "80x48"]
    table = bucket_table(own, 64) if which == "own" else bucket_table("pixart", int(which))
    found = assign_bucket(height_px, width_px, table)
    # In integers: beyond 4.5 is 2 * long > 9 * short.
    assert (found is None) == (2 * max(height_px, width_px) > 9 * min(height_px, width_px))
    if found is not None:
        distance = {(height, width): abs(ratio - height_px / width_px) for ratio, height, width in table}
        assert distance[found] == min(distance.values())


def published_adm_sizes(width: int, height: int, image_size: int) -> list[tuple[int, int]]:
    """guided-diffusion's center_crop_arr on the size of a PIL image (width first), the resizes written down."""
    size, resizes = (width, height), []
    while min(*size) >= 2 * image_size:
        size = tuple(x // 2 for x in size)
        resizes.append(size)
    scale = image_size / min(*size)
    size = tuple(round(x * scale) for x in size)
    resizes.append(size)
    return resizes


@given(sides, sides, st.integers(1, 1024))
def test_adm_sizes_are_those_of_the_published_loader(height_px: int, width_px: int, side_px: int) -> None:
    sizes = adm_sizes(height_px, width_px, side_px)
    assert [size[::-1] for size in sizes] == published_adm_sizes(width_px, height_px, side_px)
    assert min(sizes[-1]) == side_px
    assert all(side_px <= min(size) for size in sizes[:-1])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"resolution": 128, "step_px": 64}, "2.00 loses 50% .*=32"),
        ({"resolution": 48}, "48 px with images.step_px = 16 makes few"),
        ({"resolution": 128}, ""),
        ({"resolution": 16, "step_px": 16}, "loses 78% .*larger images.resolution"),
        ({"resolution": 128, "buckets": ["128x128", "64x256"]}, ""),
        ({"resolution": 64, "buckets": "square"}, ""),
    ],
)
def test_too_few_buckets_are_warned_of_with_a_step_that_is_fine_enough(changes: dict[str, Any], said: str) -> None:
    warnings = ImagesSection(**{"crop": "bucket", "buckets": "area"} | changes).warnings()
    assert len(warnings) == bool(said)
    assert re.search(said, "".join(warnings))
