"""What a store says of features that were imported: as far as their headers, their kind and the settings tell."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ... import __version__
from ...datasets.errors import SourceError
from ...datasets.format.buckets import bucket_size
from ...datasets.format.schema import (
    FORMAT_VERSION,
    IMPORTED,
    POSTERIORS,
    UNKNOWN,
    Decoding,
    EncoderIdentity,
    ImageSpec,
    LatentSpec,
    StoreSpec,
    TextSpec,
)
from ...datasets.recipe import flatten
from ..config import TextSection, VaeSection
from .formats.source import Reader, RecordHeader
from .plan import CommonFormat, ScannedRecord, bucket_of


def describe_import(reader: Reader, common: CommonFormat, found: Sequence[ScannedRecord], null_hash: str) -> StoreSpec:
    """What the store will say of itself.

    Args:
      null_hash: of the null caption, "" where there is none.
    Raises: SourceError: what is needed is not known.
    """
    defaults, recipe, stored = reader.defaults, reader.recipe, common.stored_channels
    is_posterior = defaults.latent in POSTERIORS
    channels = stored // 2 if is_posterior else stored
    downscale = recipe.vae.downscale or defaults.downscale
    scale = _per_channel("scale", recipe.vae.scale or defaults.scale, channels)
    source_form: dict[str, Any] = {
        "shift": _per_channel("shift", recipe.vae.shift or defaults.shift, channels),
        "scale": [factor * recipe.vae.multiplier for factor in scale],
    }
    as_it_is: dict[str, Any] = {"shift": [0.0] * channels, "scale": [1.0] * channels}
    for_model, for_decoder = (as_it_is, source_form) if defaults.is_scaled else (source_form, as_it_is)
    zero_to_one = defaults.zero_to_one if recipe.vae.pixels == "auto" else recipe.vae.pixels == "0..1"
    buckets = Counter(bucket_of(header, downscale) for header in found if isinstance(header, RecordHeader))
    height_px, width_px = bucket_size(buckets.most_common(1)[0][0])
    vae = VaeSection(model=recipe.vae.model or defaults.vae, subfolder=recipe.vae.subfolder)
    text, text_spec, text_encoder = TextSection(), None, None
    if common.caption:
        length, width, text_dtype = common.caption
        text = TextSection(kind="t5", model=recipe.text.model or defaults.text)
        text_encoder = _identity(reader.kind, text.model, text_dtype, {"null_caption": null_hash})
        stored_dtype = text_dtype if recipe.store.dtype == "source" else recipe.store.dtype
        text_spec = TextSpec(
            kind="imported", width=width, max_tokens=length, dtype=stored_dtype, template=UNKNOWN, batch_size=1
        )
    return StoreSpec(
        format_version=FORMAT_VERSION,
        leandit_version=__version__,
        fingerprint="",
        images=ImageSpec(
            resolution_px=round(math.sqrt(height_px * width_px)),
            crop=f"{IMPORTED}{reader.kind}",
            buckets=sorted(buckets, key=bucket_size),
            resize_filter=UNKNOWN,
            colour=UNKNOWN,
            libraries={},
        ),
        latent=LatentSpec(
            array="moments" if is_posterior else "latents",
            kind=defaults.latent,  # pyright: ignore[reportArgumentType]
            channels=channels,
            stored_channels=stored,
            downscale=downscale,
            dtype=common.dtype if recipe.store.dtype == "source" else recipe.store.dtype,
            **for_model,
            flip=common.has_flip,
            batch_size=1,
            tile_px=0,
            decoding=Decoding(**for_decoder, zero_to_one=zero_to_one) if defaults.is_scaled or zero_to_one else None,
        ),
        text=text_spec,
        vae=_identity(reader.kind, vae.model, common.dtype, {"zero_to_one": zero_to_one}),
        text_encoder=text_encoder,
        classes=_classes(reader, found),
        shard_mib=recipe.store.shard_mib,
        codec=recipe.store.codec,
        recipe={"import": recipe_of(reader), "vae": vae.model_dump(), "text": text.model_dump()},
    ).with_fingerprint()


def recipe_of(reader: Reader) -> dict[str, Any]:
    """Kind and settings of an import, as they stand in the store."""
    return {"kind": reader.kind} | reader.recipe.model_dump()


def differing_settings(spec: StoreSpec, reader: Reader) -> list[str]:
    """Settings with which a store was imported and that are others now, as "key was 1, is 2"."""
    there, here = flatten(spec.recipe.get("import", {})), flatten(recipe_of(reader))
    keys = sorted((there.keys() | here.keys()) - {"source.max_reject_share", "source.max_rejects_in_a_row"})
    return [f"{key} was {there.get(key)!r}, is {here.get(key)!r}" for key in keys if there.get(key) != here.get(key)]


def _identity(kind: str, model: str, dtype: str, config: dict[str, Any]) -> EncoderIdentity:
    """An encoder that nobody has seen: its name is hearsay, so it is part of what the fingerprint hashes."""
    return EncoderIdentity(
        model=model,
        revision=None,
        class_name=f"{IMPORTED}{kind}",
        config={"said_to_be": model} | config,
        weights_sha256=UNKNOWN,
        tokenizer_sha256=None,
        dtype=dtype,
        libraries={},
    )


def _per_channel(name: str, given: Sequence[float], channels: int) -> list[float]:
    """One number for each channel.

    Raises: SourceError.
    """
    if not given:
        raise SourceError(
            f"import: vae.{name} is not known for this kind of features, and decoding needs it. Give what the latents "
            f"were scaled with, as --set vae.{name}=[0.18215]."
        )
    if len(given) not in (1, channels):
        raise SourceError(f"import: vae.{name} has {len(given)} numbers, the latents have {channels} channels.")
    return [float(number) for number in (given if len(given) == channels else [given[0]] * channels)]


def _classes(reader: Reader, found: Sequence[ScannedRecord]) -> list[str] | None:
    """Names of the classes: the source's, or their numbers."""
    if reader.classes is not None:
        return list(reader.classes)
    largest = max((header.label for header in found if isinstance(header, RecordHeader)), default=-1)
    count = reader.recipe.source.num_classes or largest + 1
    return [str(label) for label in range(count)] or None
