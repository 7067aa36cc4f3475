"""The arrays of one bucket: latents, features and companion pictures of its records. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .buckets import bucket_size
from .caption_layout import MAX_SHARD_ROWS
from .schema import FeatureSpec, PictureSpec, StoreSpec
from .zarr_shard import ArrayLayout, RowRange

BUCKETS = "buckets"  # folder of all buckets
LATENTS = ""  # the group of the latents, which every record has
FEATURES, PICTURES = "features", "pictures"  # folders of the other groups
MASK = "mask"  # array of a companion that is a mask
FLIP = "_flip"  # suffix of the arrays of flipped pictures


def bucket_part(bucket: str) -> str:
    """Name of the part, and folder, of a bucket."""
    return f"{BUCKETS}/{bucket}"


def latent_shape(spec: StoreSpec, bucket: str) -> tuple[int, int, int]:
    """Shape of a row of latents: channels, height, width."""
    height_px, width_px = bucket_size(bucket)
    latent = spec.latent
    return latent.stored_channels, height_px // latent.downscale, width_px // latent.downscale


def feature_rows(spec: FeatureSpec, bucket: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of a row of each array of a feature, by name, in order.

    ``patches`` (T, D) and, for int8, ``patch_scales`` (T,); ``cls`` (D,) and, for int8, ``cls_scales`` ().
    """
    rows, columns = spec.grid(*bucket_size(bucket))
    arrays: dict[str, tuple[tuple[int, ...], str]] = {}
    for name, scales, shape in (("patches", "patch_scales", (rows * columns,)), ("cls", "cls_scales", ())):
        if spec.output in (name, "both"):
            arrays[name] = (*shape, spec.width), spec.dtype
            if spec.dtype == "int8":
                arrays[scales] = shape, "float32"
    return arrays


def picture_rows(spec: StoreSpec, picture: PictureSpec, bucket: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of a row of the array of a companion picture, by name: as the latents, or ``mask`` (H, W)."""
    shape = latent_shape(spec, bucket)
    if picture.kind == MASK:
        return {MASK: (shape[1:], "uint8")}
    return {spec.latent.array: (shape, spec.latent.dtype)}


def row_arrays(spec: StoreSpec, bucket: str, group: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of a row of each array of a group, by path within the bucket's folder, in order.

    Args:
      group: LATENTS, or the name of a feature or of a companion picture.
    """
    picture = next((one for one in spec.pictures if one.name == group), None)
    if group == LATENTS:
        arrays = {spec.latent.array: (latent_shape(spec, bucket), spec.latent.dtype)}
    elif picture:
        arrays = {f"{PICTURES}/{group}/{name}": row for name, row in picture_rows(spec, picture, bucket).items()}
    else:
        feature = next(one.spec for one in spec.features if one.name == group)
        arrays = {f"{FEATURES}/{group}/{name}": row for name, row in feature_rows(feature, bucket).items()}
    flipped = {f"{path}{FLIP}": row for path, row in arrays.items()} if spec.latent.flip else {}
    return {**arrays, **flipped}


def shard_rows_of(spec: StoreSpec, bucket: str, groups: Sequence[str]) -> int:
    """Rows of a shard of groups that are written together: as many as fit ``shard_mib`` in the largest array.

    A power of two, at most MAX_SHARD_ROWS: what a later revision adds begins at a shard in every array of the bucket.
    """
    largest = max(_row_bytes(*row) for group in groups for row in row_arrays(spec, bucket, group).values())
    fitting = max(1, min(MAX_SHARD_ROWS, (spec.shard_mib << 20) // largest))
    return 1 << (fitting.bit_length() - 1)


def row_layouts(
    spec: StoreSpec, bucket: str, groups: Sequence[str], ranges: Sequence[RowRange], shard_rows: int
) -> dict[str, list[ArrayLayout]]:
    """Arrays of one bucket by group, with the same rows and shards.

    Args:
      groups: LATENTS and names of features and pictures.
      ranges: as of ``ArrayLayout``.
    """
    folder, end = bucket_part(bucket), ranges[-1].end
    return {
        group: [
            ArrayLayout(f"{folder}/{path}", (end, *shape), dtype, shard_rows, codec=spec.codec, ranges=tuple(ranges))
            for path, (shape, dtype) in row_arrays(spec, bucket, group).items()
        ]
        for group in groups
    }


def _row_bytes(shape: tuple[int, ...], dtype: str) -> int:
    return int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
