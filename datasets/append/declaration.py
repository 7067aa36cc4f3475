"""What a new store will hold, as its writer declares it: the arguments of ``create_store`` become a spec."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import Field, ValidationError

from ... import __version__
from ...errors import FingerprintMismatch, RecipeError
from ...recipe import Section, describe_problems, flatten
from ..format.buckets import bucket_size
from ..format.row_layout import caption_rows
from ..format.schema import (
    FORMAT_VERSION,
    IMPORTED,
    POSTERIORS,
    UNKNOWN,
    CompanionSpec,
    EncoderIdentity,
    FeatureEncoder,
    FeatureSpec,
    ImageSpec,
    LatentSpec,
    StoreSpec,
    TextEncoder,
    TextSpec,
)
from ..format.token_dtypes import is_storable, narrow
from ..format.zarr_shard import CODECS
from ..revisions.writer import row_checksum
from .values import as_numbers, split_embedding

KIND = f"{IMPORTED}arrays"  # class name of an encoder that is known by its output alone
Side = Annotated[int, Field(ge=1, le=1 << 20)]
NO_RESOLUTION_PX = 1  # of the images, until the store is sealed
PerChannel = float | list[float]
SectionT = TypeVar("SectionT", bound=Section)


class LatentSection(Section):
    """The latents."""

    downscale: Side
    """Pixels of the image for each position of a latent."""
    channels: Side | None = None
    """Channels of the model's input; a row of ``mean_logvar`` or ``mean_std`` has twice as many."""
    scale: PerChannel
    """The model's input is (z - shift) * scale; one number, or one for each channel."""
    shift: PerChannel = 0.0
    kind: Literal["latent", "sample", "mean", "mean_logvar", "mean_std"] = "latent"
    dtype: Literal["float16", "float32", "int8"] = "float16"
    flip: bool = False
    """Latents, features and companions are pairs: of the image, and of its mirror image."""
    encoder: str = UNKNOWN


class TextSection(Section):
    """A text encoder."""

    max_tokens: Side | None = None
    """Tokens of the longest caption; by default those of ``null``."""
    dtype: Literal["float16", "bfloat16", "float32", "int8"] = "float16"
    full_length: bool = False
    """Every caption has ``max_tokens`` rows, because the model reads its padding."""
    encoder: str = UNKNOWN


class FeatureSection(Section):
    """A vision model."""

    width: Side | None = None
    output: Literal["patches", "cls", "both"] = "patches"
    patch_px: Side = 16
    resolution_px: Side | None = None
    images_px: Side | None = None
    dtype: Literal["float16", "int8"] = "float16"
    encoder: str = UNKNOWN


class CompanionSection(Section):
    """A second image of each record."""

    kind: Literal["image", "mask"]


class ShardSection(Section):
    """The files."""

    shard_mib: Annotated[int, Field(ge=1, le=4096)] = 64
    codec: str = "none"
    expected_records: Annotated[int, Field(ge=0, le=1 << 40)] = 0


@dataclass(frozen=True)
class Declaration:
    """What a new store will hold.

    Args:
      spec: of the store, without its buckets and its fingerprint, which follow from the records.
      nulls: stored rows of the empty caption in each array of a text encoder, by name of the encoder.
      expected_records: records by which shards are sized; 0 if nobody knows.
    """

    spec: StoreSpec
    nulls: Mapping[str, list[np.ndarray]]
    expected_records: int

    def spec_with(self, buckets: Mapping[str, int]) -> StoreSpec:
        """The whole spec, once the number of records of each bucket is known."""
        largest = max(buckets, key=lambda bucket: (buckets[bucket], bucket))
        images = self.spec.images.model_copy(
            update={
                "resolution_px": round(math.sqrt(math.prod(bucket_size(largest)))),
                "buckets": sorted(buckets, key=bucket_size),
            }
        )
        return self._spec_for(images).with_fingerprint()

    def _spec_for(self, images: ImageSpec) -> StoreSpec:
        """The spec with these images; what was declared of patches in pixels of the image refers to their size."""
        features = []
        for feature in self.spec.features:
            spec = feature.spec
            if spec.resolution_px == spec.images_px == self.spec.images.resolution_px:
                sides = {"resolution_px": images.resolution_px, "images_px": images.resolution_px}
                spec = spec.model_copy(update=sides)
            features.append(feature.model_copy(update={"spec": spec}))
        return self.spec.model_copy(update={"images": images, "features": features})

    def check_same(self, where: str, stored: StoreSpec) -> None:
        """Raise FingerprintMismatch if a store was declared otherwise, naming each field.

        Args:
          stored: spec of the store, with or without its buckets.
        """
        specs = [stored, self._spec_for(stored.images)]
        old, new = (flatten(spec.identity() | {"classes": spec.classes}) for spec in specs)
        differing = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
        if differing:
            lines = [f"\n  {name} was {old.get(name)!r}, is {new.get(name)!r}" for name in differing]
            raise FingerprintMismatch(
                f"{where}: it was declared otherwise. Nothing was changed. Declare what it was made with, or use "
                f"another folder. What differs:{''.join(lines)}"
            )


def declare(
    latent: Mapping[str, Any],
    text: Mapping[str, Any] | None,
    features: Mapping[str, Mapping[str, Any]] | None,
    companions: Mapping[str, Mapping[str, Any]] | None,
    classes: Sequence[str] | int | None,
    **files: Any,
) -> Declaration:
    """Check the arguments of ``create_store``.

    Args:
      files: as ``ShardSection``.
    Raises: RecipeError: names the argument, its value and what is expected.
    """
    shards = _parse("create_store", ShardSection, files)
    if shards.codec not in CODECS:
        raise RecipeError(f"create_store: codec {shards.codec!r}; expected one of {', '.join(CODECS)}.")
    encoders = []
    nulls = {}
    for name, section in _by_name(text).items():
        encoder, nulls[name] = _text_encoder(name, section)
        encoders.append(encoder)
    unnamed = next((encoder for encoder in encoders if not encoder.name), None)
    latent_section = _latent_section(latent)
    feature_encoders = [_feature_encoder(name, section) for name, section in (features or {}).items()]
    companion_specs = [
        CompanionSpec(name=name, column=name, kind=_parse(f"companions['{name}']", CompanionSection, section).kind)
        for name, section in (companions or {}).items()
    ]
    try:
        spec = StoreSpec(
            format_version=FORMAT_VERSION,
            leandit_version=__version__,
            fingerprint="",
            images=ImageSpec(
                resolution_px=NO_RESOLUTION_PX,
                crop=KIND,
                buckets=[],
                resize_filter=UNKNOWN,
                colour=UNKNOWN,
                libraries={},
            ),
            latent=_latent_spec(latent_section),
            text=unnamed and unnamed.spec,
            vae=_identity(latent_section.encoder),
            text_encoder=unnamed and unnamed.encoder,
            texts=[encoder for encoder in encoders if encoder.name],
            features=feature_encoders,
            companions=companion_specs,
            classes=_class_names(classes),
            shard_mib=shards.shard_mib,
            codec=shards.codec,
            recipe={"vae": {"model": latent_section.encoder}},
        )
    except ValidationError as error:
        raise RecipeError(f"create_store: {describe_problems(error, StoreSpec)}") from error
    return Declaration(spec, nulls, shards.expected_records)


def _parse(where: str, section: type[SectionT], values: Mapping[str, Any]) -> SectionT:
    """Plain values as a section; raises RecipeError, which names every wrong key."""
    if not isinstance(values, Mapping):
        raise RecipeError(f"{where}: {type(values).__name__}; expected a dict of its keys.")
    try:
        return section.model_validate(dict(values))
    except ValidationError as error:
        raise RecipeError(f"{where}: {describe_problems(error, section)}") from error


def _by_name(text: Mapping[str, Any] | None) -> dict[str, Mapping[str, Any]]:
    """The text encoders by name; a single one is declared without a name."""
    if not text:
        return {}
    return dict(text) if all(isinstance(section, Mapping) for section in text.values()) else {"": text}


def _without_arrays(values: Mapping[str, Any], *arrays: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in arrays}


def _latent_section(latent: Mapping[str, Any]) -> LatentSection:
    plain = dict(latent) if isinstance(latent, Mapping) else latent
    if isinstance(plain, dict):
        sample = plain.pop("sample", None)
        for name in ("scale", "shift"):
            if name in plain and not isinstance(plain[name], (int, float)):
                plain[name] = as_numbers(plain[name]).astype(np.float64).ravel().tolist()
        if sample is not None:
            shape = as_numbers(sample[0] if plain.get("flip") is True else sample).shape
            if len(shape) != 3:
                raise RecipeError(f"latent: a sample of shape {shape}; expected (channels, height, width).")
            plain["channels"] = shape[0] // (2 if plain.get("kind") in POSTERIORS else 1)
    section = _parse("latent", LatentSection, plain)
    if section.channels is None:
        raise RecipeError("latent: 'channels' is missing; expected the channels of a latent, or a 'sample' of one.")
    return section


def _latent_spec(section: LatentSection) -> LatentSpec:
    assert section.channels, "checked before"
    has_posterior = section.kind in POSTERIORS
    return LatentSpec(
        array="moments" if has_posterior else "latents",
        kind=section.kind,
        channels=section.channels,
        stored_channels=section.channels * (2 if has_posterior else 1),
        downscale=section.downscale,
        dtype=section.dtype,
        shift=_for_each_channel("shift", section.shift, section.channels),
        scale=_for_each_channel("scale", section.scale, section.channels),
        flip=section.flip,
        batch_size=1,
        tile_px=0,
    )


def _for_each_channel(name: str, numbers: PerChannel, channels: int) -> list[float]:
    listed = numbers if isinstance(numbers, list) else [numbers]
    if len(listed) not in (1, channels):
        raise RecipeError(f"latent: '{name}' has {len(listed)} numbers; expected one, or one for each of {channels}.")
    return [float(number) for number in (listed if len(listed) == channels else listed * channels)]


def _text_encoder(name: str, values: Mapping[str, Any]) -> tuple[TextEncoder, list[np.ndarray]]:
    """A text encoder, and the stored rows of its empty caption in each array."""
    where = f"text['{name}']" if name else "text"
    section = _parse(where, TextSection, _without_arrays(values, "null"))
    if values.get("null") is None:
        raise RecipeError(
            f"{where}: 'null' is missing; expected the output for the empty caption, (L, D), (P,) or a tuple of both: "
            "training replaces some captions by it."
        )
    tokens, pooled = split_embedding(values["null"])
    for array, sides in ((tokens, 2), (pooled, 1)):
        if array is not None and (array.ndim != sides or not array.size or not np.isfinite(array).all()):
            raise RecipeError(f"{where}: 'null' of shape {array.shape}; expected finite numbers, (L, D) or (P,).")
    output = "both" if tokens is not None and pooled is not None else "pooled" if tokens is None else "tokens"
    num_tokens = len(tokens) if tokens is not None else 0
    max_tokens = section.max_tokens or max(num_tokens, 1)
    if num_tokens > max_tokens or (section.full_length and num_tokens != max_tokens):
        exactly = "exactly " if section.full_length else "at most "
        raise RecipeError(f"{where}: 'null' has {num_tokens} tokens; expected {exactly}max_tokens, {max_tokens}.")
    if output == "both" and not section.full_length:
        raise RecipeError(f"{where}: tokens and a pooled vector need full_length=True, or declare two text encoders.")
    spec = TextSpec(
        kind="imported",
        width=tokens.shape[1] if tokens is not None else len(pooled if pooled is not None else ()),
        max_tokens=max_tokens,
        dtype=section.dtype,
        template=UNKNOWN,
        batch_size=1,
        output=output,
        full_length=section.full_length,
        attend_padding=section.full_length,
        pooled_width=len(pooled) if pooled is not None else 0,
        null_tokens=num_tokens,
    )
    rows = []
    if tokens is not None:
        padded = np.zeros((max_tokens, spec.width), np.float32)
        padded[:num_tokens] = tokens
        stored = narrow(padded, spec.dtype)
        rows += stored.parts
        _check_storable(where, is_storable(stored, spec.dtype), spec.dtype)
    if pooled is not None:
        stored = narrow(pooled[None].astype(np.float32), spec.pooled_dtype)
        rows += stored.parts
        _check_storable(where, is_storable(stored, spec.pooled_dtype), spec.pooled_dtype)
    assert len(rows) == len(caption_rows(spec)), "a row for each array"
    identity = _identity(section.encoder, null_caption=f"{row_checksum(*rows):016x}")
    try:
        return TextEncoder(name=name, spec=spec, encoder=identity), rows
    except ValidationError as error:
        raise RecipeError(f"{where}: {describe_problems(error, TextEncoder)}") from error


def _check_storable(where: str, is_finite: bool, dtype: str) -> None:
    if not is_finite:
        raise RecipeError(f"{where}: 'null' is not finite as {dtype}. Declare a dtype that can hold it.")


def _feature_encoder(name: str, values: Mapping[str, Any]) -> FeatureEncoder:
    where = f"features['{name}']"
    section = _parse(where, FeatureSection, _without_arrays(values, "sample"))
    width = section.width
    if values.get("sample") is not None:
        sample = values["sample"]
        width = as_numbers(sample["cls"] if isinstance(sample, Mapping) else sample).shape[-1]
    if width is None:
        raise RecipeError(f"{where}: 'width' is missing; expected the numbers of a token, or a 'sample'.")
    if (section.resolution_px is None) != (section.images_px is None):
        raise RecipeError(f"{where}: 'resolution_px' and 'images_px' belong together; only one is given.")
    try:
        return FeatureEncoder(
            name=name,
            spec=FeatureSpec(
                output=section.output,
                layer=-1,
                width=width,
                patch_px=section.patch_px,
                resolution_px=section.resolution_px or NO_RESOLUTION_PX,
                images_px=section.images_px or NO_RESOLUTION_PX,
                dtype=section.dtype,
            ),
            encoder=_identity(section.encoder),
        )
    except ValidationError as error:
        raise RecipeError(f"{where}: {describe_problems(error, FeatureEncoder)}") from error


def _identity(model: str, **config: Any) -> EncoderIdentity:
    """An encoder of which only a name is known, which is part of the fingerprint."""
    return EncoderIdentity(
        model=model,
        revision=None,
        class_name=KIND,
        config={"said_to_be": model} | config,
        weights_sha256=UNKNOWN,
        tokenizer_sha256=None,
        dtype=UNKNOWN,
        libraries={},
    )


def _class_names(classes: Sequence[str] | int | None) -> list[str] | None:
    if classes is None:
        return None
    names = [str(label) for label in range(classes)] if isinstance(classes, int) else list(classes)
    if not names or not all(isinstance(name, str) for name in names) or len(set(names)) != len(names):
        raise RecipeError(f"classes: {classes!r:.200}; expected different names, or their number.")
    return names
