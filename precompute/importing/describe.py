"""The spec of an imported store, from the headers, the kind of features and the settings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ... import __version__
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
    TextEncoder,
    TextSpec,
)
from ...datasets.revisions.writer import row_checksum
from ...errors import SourceError
from ...recipe import flatten, parse_stored
from ..config import TextSection, VaeSection
from .null_caption import NullCaption
from .plan import CommonFormat, ScannedRecord, bucket_of
from .recipe import ImportRecipe
from .source import Reader, RecordHeader


def describe_import(
    reader: Reader, common: CommonFormat, scanned: Sequence[ScannedRecord], nulls: Mapping[str, NullCaption]
) -> StoreSpec:
    """The spec of the store, with its fingerprint.

    Args:
      scanned: header or reject of every record.
      nulls: the null caption of each text encoder, by name.
    Raises: SourceError: a needed setting is unknown.
    """
    recipe, defaults = reader.recipe, reader.defaults
    headers = [header for header in scanned if isinstance(header, RecordHeader)]
    downscale = recipe.vae.downscale or defaults.downscale
    zero_to_one = defaults.zero_to_one if recipe.vae.pixels == "auto" else recipe.vae.pixels == "0..1"
    subfolder = recipe.vae.subfolder or ("" if recipe.vae.model else defaults.vae_subfolder)
    vae = VaeSection(model=recipe.vae.model or defaults.vae, subfolder=subfolder)
    sections, encoders = _text_sections(reader, common), []
    for (name, section), (length, width, dtype) in zip(sections.items(), common.captions, strict=True):
        null_hash = f"{row_checksum(nulls[name].rows):016x}"
        identity = _identity(reader.kind, section.model, dtype, {"null_caption": null_hash})
        spec = _text_spec(reader, section, length, width, dtype)
        spec = spec.model_copy(update={"null_tokens": nulls[name].num_tokens})
        encoders.append(TextEncoder(name=name, spec=spec, encoder=identity))
    unnamed = next((one for one in encoders if not one.name), None)
    named = {name: section.model_dump() for name, section in sections.items() if name}
    largest = max((header.label for header in headers), default=-1)
    numbers = [str(label) for label in range(recipe.source.num_classes or largest + 1)]
    return StoreSpec(
        format_version=FORMAT_VERSION,
        leandit_version=__version__,
        fingerprint="",
        images=_image_spec(reader.kind, Counter(bucket_of(header, downscale) for header in headers)),
        latent=_latent_spec(reader, common, downscale, zero_to_one=zero_to_one),
        text=unnamed and unnamed.spec,
        vae=_identity(reader.kind, vae.model, common.dtype, {"zero_to_one": zero_to_one}),
        text_encoder=unnamed and unnamed.encoder,
        texts=[one for one in encoders if one.name],
        classes=(numbers or None) if reader.classes is None else list(reader.classes),
        shard_mib=recipe.store.shard_mib,
        codec=recipe.store.codec,
        recipe={
            "import": recipe_of(reader),
            "vae": vae.model_dump(),
            "text": sections.get("", TextSection()).model_dump() | named,
        },
    ).with_fingerprint()


def _image_spec(kind: str, buckets: Counter[str]) -> ImageSpec:
    return ImageSpec(
        resolution_px=round(math.sqrt(math.prod(bucket_size(buckets.most_common(1)[0][0])))),
        crop=f"{IMPORTED}{kind}",
        buckets=sorted(buckets, key=bucket_size),
        resize_filter=UNKNOWN,
        colour=UNKNOWN,
        libraries={},
    )


def _latent_spec(reader: Reader, common: CommonFormat, downscale: int, *, zero_to_one: bool) -> LatentSpec:
    defaults, recipe = reader.defaults, reader.recipe
    is_posterior = defaults.latent in POSTERIORS
    channels = common.stored_channels // 2 if is_posterior else common.stored_channels
    scale = _per_channel("scale", recipe.vae.scale or defaults.scale, channels)
    normalization: dict[str, Any] = {
        "shift": _per_channel("shift", recipe.vae.shift or defaults.shift, channels),
        "scale": [factor * recipe.vae.multiplier for factor in scale],
    }
    identity: dict[str, Any] = {"shift": [0.0] * channels, "scale": [1.0] * channels}
    # Features that were scaled before they were stored train as they are; only the decoder needs the scale.
    for_model, for_decoder = (identity, normalization) if defaults.is_scaled else (normalization, identity)
    return LatentSpec(
        array="moments" if is_posterior else "latents",
        kind=defaults.latent,  # pyright: ignore[reportArgumentType]
        channels=channels,
        stored_channels=common.stored_channels,
        downscale=downscale,
        dtype=common.dtype if recipe.store.dtype == "source" else recipe.store.dtype,
        **for_model,
        flip=common.has_flip,
        batch_size=1,
        tile_px=0,
        decoding=Decoding(**for_decoder, zero_to_one=zero_to_one) if defaults.is_scaled or zero_to_one else None,
        patchify=defaults.patchify,
    )


def _text_sections(reader: Reader, common: CommonFormat) -> dict[str, TextSection]:
    """The text encoders as a recipe has them; raises SourceError: ``text.model`` is set, and there are several."""
    model, texts = reader.recipe.text.model, reader.defaults.texts
    if model and len(texts) > 1:
        raise SourceError(
            f"import: text.model '{model}', but these features have {len(texts)} text encoders: {', '.join(texts)}. "
            "Leave text.model out."
        )
    sections = {}
    for (name, section), (length, _, _) in zip(texts.items(), common.captions, strict=True):
        update: dict[str, Any] = {"model": model or section.model}
        sections[name] = section.model_copy(update=update | ({"max_tokens": length} if name else {}))
    return sections


def _text_spec(reader: Reader, section: TextSection, length: int, width: int, dtype: str) -> TextSpec:
    store = reader.recipe.store
    asked = store.dtype if store.text_dtype == "same" else store.text_dtype
    return TextSpec(
        kind="imported",
        width=width,
        max_tokens=length,
        dtype=dtype if asked == "source" else asked,
        template=UNKNOWN,
        batch_size=1,
        output=section.output,
        full_length=section.full_length,
        attend_padding=section.attend_padding,
        pooled_width=width if section.output == "pooled" else 0,
    )


def recipe_of(reader: Reader) -> dict[str, Any]:
    """Kind and settings of an import, as stored."""
    return {"kind": reader.kind} | reader.recipe.model_dump()


def differing_settings(spec: StoreSpec, reader: Reader) -> list[str]:
    """Settings that differ from those of the store, as "key was 1, is 2".

    The store may be of another release: keys that it lacks have their default, keys of the other release are left out.
    """
    stored = dict(spec.recipe.get("import", {}))
    kind = stored.pop("kind", None)
    recipe, _ = parse_stored("recipe of the store", ImportRecipe, stored)
    old = flatten({"kind": kind} | recipe.model_dump())
    new = flatten(recipe_of(reader))
    keys = sorted((old.keys() | new.keys()) - {"source.max_reject_share", "source.max_rejects_in_a_row"})
    return [f"{key} was {old.get(key)!r}, is {new.get(key)!r}" for key in keys if old.get(key) != new.get(key)]


def _identity(kind: str, model: str, dtype: str, config: dict[str, Any]) -> EncoderIdentity:
    """An encoder known by name only; the name is part of the fingerprint."""
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


def _per_channel(name: str, numbers: Sequence[float], channels: int) -> list[float]:
    """One number for each channel; raises SourceError."""
    if not numbers:
        raise SourceError(
            f"import: vae.{name} is unknown for this kind of features, and decoding needs it. Pass the factor that the "
            f"latents were scaled with, such as --set vae.{name}=[0.18215]."
        )
    if len(numbers) not in (1, channels):
        raise SourceError(
            f"import: vae.{name} has {len(numbers)} numbers, the latents have {channels} channels. Expected one, or "
            f"one per channel: check --set vae.{name}=[...], or the statistics that the source has."
        )
    return [float(number) for number in (numbers if len(numbers) == channels else [numbers[0]] * channels)]
