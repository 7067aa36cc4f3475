"""From the arrays of a caller to the rows of a store: shapes and dtypes are checked, numbers narrowed and hashed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...errors import RecordRejected
from ..format.buckets import bucket_name
from ..format.row_layout import LATENTS, MASK, caption_rows, feature_rows, latent_shape, view_suffixes
from ..format.schema import CompanionSpec, FeatureSpec, LatentSpec, StoreSpec, TextSpec
from ..format.table_schemas import ROW_RESULTS, STORED
from ..format.token_dtypes import INT8_RANGE, StoredTokens, is_storable, measure_quality, narrow, narrow_latents
from ..revisions.writer import row_checksum

MAX_SIDE = 1 << 14  # positions of a latent
STAGE = "encode"  # of every reject: what came from the encoder cannot be stored


def is_tensor(value: Any) -> bool:
    """Whether a value is a torch tensor; torch is not imported for it."""
    return type(value).__module__.partition(".")[0] == "torch"


def as_numbers(value: Any) -> np.ndarray:
    """A numpy array of anything that has numbers; of a torch tensor on any device too, bfloat16 as float32."""
    if is_tensor(value):
        tensor = value.detach().cpu()
        return (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
    return np.asarray(value)


def _numbers(name: str, value: Any) -> np.ndarray:
    """The array of a record. Raises: RecordRejected: it is none."""
    try:
        return as_numbers(value)
    except (ValueError, TypeError) as error:
        raise rejected("wrong_shape", f"{name} is no array ({error})") from None


def rejected(reason: str, detail: str) -> RecordRejected:
    """Why a record cannot be added."""
    return RecordRejected(STAGE, reason, detail)


class Output(NamedTuple):
    """One array that ``add`` takes for a record.

    Args:
      name: for messages.
      shape: of the values.
      dtype: of the rows in the store: a name of ``narrow``, "latent" for latents, "uint8" for masks.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


def outputs_of(spec: StoreSpec, group: str, bucket: str) -> list[Output]:
    """What ``add`` takes of a group of arrays for each view of a record of a bucket, in the order of the arrays."""
    latent = (spec.latent.stored_channels, *latent_shape(spec, bucket)[1:])
    if group == LATENTS:
        return [Output("latent", latent, "latent")]
    for companion in spec.companions:
        if companion.name == group:
            return [_companion_output(companion, latent)]
    feature = next(feature.spec for feature in spec.features if feature.name == group)
    return _feature_outputs(group, feature, bucket)


def _companion_output(companion: CompanionSpec, latent: tuple[int, ...]) -> Output:
    name = f"companions['{companion.name}']"
    if companion.kind == MASK:
        return Output(name, latent[1:], "uint8")
    return Output(name, latent, "latent")


def _feature_outputs(group: str, spec: FeatureSpec, bucket: str) -> list[Output]:
    """Patches, the class token, or both: the arrays of a feature without those of their scales."""
    outputs = []
    for path, (shape, _) in feature_rows(spec, bucket).items():
        if path in ("patches", "cls"):
            name = f"features['{group}']['{path}']" if spec.output == "both" else f"features['{group}']"
            outputs.append(Output(name, shape, spec.dtype))
    return outputs


def latent_views(spec: StoreSpec, latent: Any) -> tuple[str, list[np.ndarray]]:
    """The bucket of a record, and its latents of each view. Raises: RecordRejected."""
    views = [_numbers("latent", view) for view in _views(spec, "latent", latent)]
    shape = views[0].shape
    channels = spec.latent.stored_channels
    if len(shape) != 3 or shape[0] != channels or not 1 <= min(shape[1:]) <= max(shape[1:]) <= MAX_SIDE:
        raise rejected("wrong_shape", f"latent of shape {shape}; expected ({channels}, height, width)")
    output = Output("latent", shape, "latent")
    for view in views:
        _check_values(output, view)
    return bucket_name(shape[1] * spec.latent.downscale, shape[2] * spec.latent.downscale), views


def group_views(spec: StoreSpec, group: str, bucket: str, value: Any) -> list[np.ndarray]:
    """The values of a feature or companion of a record: each output of the first view, then of the next one.

    Raises: RecordRejected.
    """
    outputs = outputs_of(spec, group, bucket)
    values = []
    for view in _views(spec, outputs[0].name, value):
        if len(outputs) == 1:
            of_view = [_numbers(outputs[0].name, view)]
        elif isinstance(view, Mapping) and view.keys() == {"patches", "cls"}:
            of_view = [
                _numbers(output.name, view[name]) for output, name in zip(outputs, ("patches", "cls"), strict=True)
            ]
        else:
            raise rejected("wrong_shape", f"features['{group}']: expected a dict with 'patches' and 'cls'")
        for output, array in zip(outputs, of_view, strict=True):
            _check_values(output, array)
        values += of_view
    return values


def _views(spec: StoreSpec, name: str, value: Any) -> Sequence[Any]:
    """The value of each view: of a store with flips a pair, else the value alone."""
    if value is None:
        raise rejected("wrong_shape", f"{name} is missing; the store was declared with it")
    if not spec.latent.flip:
        return [value]
    if not isinstance(value, (tuple, list)) or len(value) != len(view_suffixes(spec)):
        raise rejected("wrong_shape", f"{name}: expected a pair, of the image and of its mirror image (flip=True)")
    return value


def _check_values(output: Output, values: np.ndarray) -> None:
    """Raise RecordRejected for another shape or kind of number than declared."""
    if values.shape != output.shape:
        raise rejected("wrong_shape", f"{output.name} of shape {values.shape}; expected {output.shape}")
    if output.dtype == "uint8" and values.dtype != np.uint8:
        raise rejected("wrong_shape", f"{output.name} of dtype {values.dtype}; expected uint8")
    if output.dtype != "uint8" and values.dtype.kind != "f":
        raise rejected("wrong_shape", f"{output.name} of dtype {values.dtype}; expected floating-point numbers")


class GroupRows(NamedTuple):
    """Rows of a group of arrays for some records of a bucket.

    Args:
      arrays: (B, ...) rows of each array of the group, in order.
      results: (B,) of ROW_RESULTS; ``state`` is 0 where numbers are not finite.
    """

    arrays: list[np.ndarray]
    results: np.ndarray


def narrow_group(spec: StoreSpec, group: str, bucket: str, records: Sequence[Sequence[np.ndarray]]) -> GroupRows:
    """Narrow the values of a group of some records of a bucket.

    Args:
      records: of each record, the values of every output of every view, as ``group_views`` returns them.
    """
    outputs = outputs_of(spec, group, bucket) * len(view_suffixes(spec))
    arrays = list[np.ndarray]()
    is_finite = np.ones(len(records), bool)
    results = np.zeros(len(records), ROW_RESULTS)
    results["min_cosine"] = results["max_error"] = np.nan
    for number, output in enumerate(outputs):
        values = np.stack([record[number] for record in records])
        if output.dtype == "uint8":
            arrays.append(values)
        elif output.dtype == "latent":
            rows = _narrow_latents(values, spec.latent)
            is_finite &= _finite_rows(rows)
            if spec.latent.dtype == "int8":
                is_finite &= np.all(np.abs(values) <= INT8_RANGE, axis=(1, 2, 3))
            arrays.append(rows)
        else:
            is_finite &= _finite_rows(values)
            parts = narrow(_without_nan(values), output.dtype).parts
            for part in parts:
                is_finite &= _finite_rows(part)
            _measure(results, values, parts, output.dtype)
            arrays += parts
    for i in np.flatnonzero(is_finite).tolist():
        results["checksum"][i] = row_checksum(*(rows[i] for rows in arrays))
    results["state"][is_finite] = STORED
    return GroupRows(arrays, results)


def _narrow_latents(values: np.ndarray, spec: LatentSpec) -> np.ndarray:
    """(B, row_channels, H, W) rows; what a dtype cannot hold becomes infinity."""
    if spec.dtype == "int8":
        return narrow_latents(_without_nan(values))
    with np.errstate(over="ignore"):
        return values.astype(spec.dtype)


def _without_nan(values: np.ndarray) -> np.ndarray:
    """Numbers as float32; those that are not finite, whose record is rejected, as something that can be rounded."""
    wide = values.astype(np.float32)
    return wide if np.isfinite(wide).all() else np.nan_to_num(wide, posinf=0.0, neginf=0.0)


def _finite_rows(rows: np.ndarray) -> np.ndarray:
    """(B,) whether all numbers of a row are finite."""
    return np.asarray(np.isfinite(rows).reshape(len(rows), -1).all(axis=1))


def _measure(results: np.ndarray, values: np.ndarray, parts: Sequence[np.ndarray], dtype: str) -> None:
    """Note what narrowing cost the tokens of each record, beside what it cost those of other outputs."""
    if dtype == values.dtype.name:
        return
    for i in range(len(values)):
        tokens = values[i].reshape(-1, values.shape[-1]).astype(np.float32)
        if np.isfinite(tokens).all():
            stored = StoredTokens.of([part[i].reshape(len(tokens), *part.shape[values.ndim - 1 :]) for part in parts])
            cosine, error = measure_quality(tokens, stored, dtype)
            results["min_cosine"][i] = np.fmin(results["min_cosine"][i], cosine)
            results["max_error"][i] = np.fmax(results["max_error"][i], error)


def split_embedding(value: Any) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Tokens and pooled vector of a caption, from one of them or a tuple of both.

    Returns: arrays of any shape; None for what is missing.
    """
    if isinstance(value, tuple):
        tokens, pooled = value
        return as_numbers(tokens), as_numbers(pooled)
    array = as_numbers(value)
    return (None, array) if array.ndim == 1 else (array, None)


class CaptionRows(NamedTuple):
    """Rows of a caption in the arrays of one text encoder.

    Args:
      num_tokens: stored tokens; 1 for a pooled vector alone.
      arrays: (rows, ...) of each array, in order.
      result: of ROW_RESULTS.
    """

    num_tokens: int
    arrays: list[np.ndarray]
    result: np.ndarray


def narrow_caption(name: str, spec: TextSpec, embedding: Any) -> CaptionRows:
    """Check and narrow the embedding of a caption, as ``split_embedding`` takes it. Raises: RecordRejected."""
    where = f"embeddings['{name}']" if name else "embeddings"
    try:
        tokens, pooled = split_embedding(embedding)
    except (ValueError, TypeError):
        raise rejected("wrong_shape", f"{where}: expected {_expected_embedding(spec)}") from None
    rows = list[np.ndarray]()
    result = np.zeros((), ROW_RESULTS)
    result["min_cosine"] = result["max_error"] = np.nan
    for values, is_declared in ((tokens, spec.has_tokens), (pooled, bool(spec.pooled_width))):
        if (values is not None) != is_declared:
            raise rejected("wrong_shape", f"{where}: expected {_expected_embedding(spec)}")
        if values is None:
            continue
        if values.dtype.kind != "f":
            raise rejected("wrong_shape", f"{where} of dtype {values.dtype}; expected floating-point numbers")
        _check_embedding(where, spec, values)
        dtype = spec.dtype if values.ndim == 2 else spec.pooled_dtype
        wide = values.reshape(-1, values.shape[-1]).astype(np.float32)
        is_finite = bool(np.isfinite(wide).all())
        num_layers = spec.num_layers if values.ndim == 2 else 1
        stored = narrow(wide, dtype, num_layers) if is_finite else None
        if stored is None or not is_storable(stored, dtype):
            raise rejected("nonfinite_caption", f"{where}: NaN or infinity, in {values.dtype} or as {dtype}")
        if dtype != values.dtype.name:
            cosine, error = measure_quality(wide, stored, dtype, num_layers)
            result["min_cosine"] = np.fmin(result["min_cosine"], cosine)
            result["max_error"] = np.fmax(result["max_error"], error)
        rows += stored.parts
    assert len(rows) == len(caption_rows(spec)), "rows for each array"
    result["state"] = STORED
    result["checksum"] = row_checksum(*rows)
    return CaptionRows(len(tokens) if tokens is not None else 1, rows, result)


def _check_embedding(where: str, spec: TextSpec, values: np.ndarray) -> None:
    if values.ndim == 1:
        fits = values.shape == (spec.pooled_width,)
    else:
        fits = values.ndim == 2 and values.shape[1] == spec.width
        fits = fits and (len(values) == spec.max_tokens if spec.full_length else 1 <= len(values) <= spec.max_tokens)
    if not fits:
        raise rejected("wrong_shape", f"{where} of shape {values.shape}; expected {_expected_embedding(spec)}")


def _expected_embedding(spec: TextSpec) -> str:
    """The shape of an embedding, in words."""
    length = str(spec.max_tokens) if spec.full_length else f"1 to {spec.max_tokens}"
    tokens = f"({length} tokens, {spec.width})"
    pooled = f"({spec.pooled_width},)"
    if spec.output == "both":
        return f"a tuple of {tokens} and {pooled}"
    return pooled if spec.output == "pooled" else tokens
