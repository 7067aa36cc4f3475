"""The arrays of one bucket in one revision: latents, features and companion pictures of its records. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .buckets import bucket_size
from .caption_layout import MAX_SHARD_ROWS
from .schema import FeatureSpec, PictureSpec, StoreSpec
from .zarr_shard import ArrayLayout

LATENTS = ""  # the group of the latents, which every record has
FEATURES, PICTURES = "features", "pictures"  # folders of the other groups
MASK = "mask"  # array of a companion that is a mask
FLIP = "_flip"  # suffix of the arrays of flipped pictures


def bucket_part(bucket: str) -> str:
    """Name of the part, and folder, of a bucket."""
    return f"buckets/{bucket}"


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


def row_layouts(
    spec: StoreSpec, bucket: str, num_rows: int, groups: Sequence[str], *, prefix: str = ""
) -> dict[str, list[ArrayLayout]]:
    """Arrays of one bucket by group. All have the same rows and shards; the largest array decides the shards' size.

    Args:
      groups: LATENTS and names of features and pictures.
      prefix: of the revision's folder.
    """
    arrays = {group: row_arrays(spec, bucket, group) for group in groups}
    largest = max(_row_bytes(*row) for of_group in arrays.values() for row in of_group.values())
    shard_rows = max(1, min(MAX_SHARD_ROWS, (spec.shard_mib << 20) // largest))
    folder = f"{prefix}{bucket_part(bucket)}"
    return {
        group: [
            ArrayLayout(f"{folder}/{path}", (num_rows, *shape), dtype, shard_rows, codec=spec.codec)
            for path, (shape, dtype) in of_group.items()
        ]
        for group, of_group in arrays.items()
    }


def _row_bytes(shape: tuple[int, ...], dtype: str) -> int:
    return int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
