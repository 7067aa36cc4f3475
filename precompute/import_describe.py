"""What a store says of features that were imported: as far as their headers, their kind and the settings tell."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from .. import __version__
from ..datasets.buckets import bucket_size
from ..datasets.errors import SourceError
from ..datasets.recipe import flatten
from ..datasets.schema import (
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
from .config import TextSection, VaeSection
from .import_config import ImportRecipe
from .import_plan import Common, Looked, bucket_of
from .import_source import Reader, Seen


def describe_import(
    kind: str, reader: Reader, recipe: ImportRecipe, common: Common, found: Sequence[Looked], null_hash: str
) -> StoreSpec:
    """What the store will say of itself.

    Args:
      null_hash: of the null caption, "" where there is none.
    Raises: SourceError: what is needed is not known.
    """
    facts, stored = reader.facts, common.stored_channels
    channels = stored // 2 if facts.latent in POSTERIORS else stored
    downscale = recipe.vae.downscale or facts.downscale
    shift = _per_channel("shift", recipe.vae.shift or facts.shift, channels)
    scale = _per_channel("scale", recipe.vae.scale or facts.scale, channels)
    scale = [factor * recipe.vae.multiplier for factor in scale]
    zero_to_one = facts.zero_to_one if recipe.vae.pixels == "auto" else recipe.vae.pixels == "0..1"
    plain, ones = [0.0] * channels, [1.0] * channels
    decoding = None
    if facts.is_scaled:
        decoding = Decoding(shift=shift, scale=scale, zero_to_one=zero_to_one)
    elif zero_to_one:
        decoding = Decoding(shift=plain, scale=ones, zero_to_one=True)
    buckets = Counter(bucket_of(seen, downscale) for seen in found if isinstance(seen, Seen))
    most_common = bucket_size(buckets.most_common(1)[0][0])
    vae = VaeSection(model=recipe.vae.model or facts.vae, subfolder=recipe.vae.subfolder)
    text = TextSection(kind="t5", model=recipe.text.model or facts.text) if common.caption else TextSection()
    dtypes = [common.dtype, common.caption[2] if common.caption else common.dtype]
    if recipe.store.dtype != "source":
        dtypes = [recipe.store.dtype] * 2
    return StoreSpec(
        format_version=FORMAT_VERSION,
        leandit_version=__version__,
        fingerprint="",
        images=ImageSpec(
            resolution_px=round(math.sqrt(most_common[0] * most_common[1])),
            crop=f"{IMPORTED}{kind}",
            buckets=sorted(buckets, key=bucket_size),
            resize_filter=UNKNOWN,
            colour=UNKNOWN,
            libraries={},
        ),
        latent=LatentSpec(
            array="moments" if facts.latent in POSTERIORS else "latents",
            kind=facts.latent,  # pyright: ignore[reportArgumentType]
            channels=channels,
            stored_channels=stored,
            downscale=downscale,
            dtype=dtypes[0],
            shift=plain if facts.is_scaled else shift,
            scale=ones if facts.is_scaled else scale,
            flip=common.has_flip,
            batch_size=1,
            tile_px=0,
            decoding=decoding,
        ),
        text=_text_spec(common, dtypes[1]),
        vae=_identity(kind, vae.model, common.dtype, {"zero_to_one": zero_to_one}),
        text_encoder=_identity(kind, text.model, common.caption[2], {"null_caption": null_hash})
        if common.caption
        else None,
        classes=_classes(reader, recipe, found),
        shard_mib=recipe.store.shard_mib,
        codec=recipe.store.codec,
        recipe={"import": recipe_of(kind, recipe), "vae": vae.model_dump(), "text": text.model_dump()},
    ).with_fingerprint()


def recipe_of(kind: str, recipe: ImportRecipe) -> dict[str, Any]:
    """Kind and settings of an import, as they stand in the store."""
    return {"kind": kind} | recipe.model_dump()


def differing_settings(spec: StoreSpec, kind: str, recipe: ImportRecipe) -> list[str]:
    """Settings with which a store was imported and that are others now, as "key was 1, is 2"."""
    there, here = flatten(spec.recipe.get("import", {})), flatten(recipe_of(kind, recipe))
    free = ("source.max_reject_share", "source.max_rejects_in_a_row")
    keys = sorted((there.keys() | here.keys()) - set(free))
    return [f"{key} was {there.get(key)!r}, is {here.get(key)!r}" for key in keys if there.get(key) != here.get(key)]


def _text_spec(common: Common, dtype: str) -> TextSpec | None:
    if common.caption is None:
        return None
    length, width, _ = common.caption
    return TextSpec(kind="imported", width=width, max_tokens=length, dtype=dtype, template=UNKNOWN, batch_size=1)


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


def _classes(reader: Reader, recipe: ImportRecipe, found: Sequence[Looked]) -> list[str] | None:
    """Names of the classes: the source's, or their numbers."""
    if reader.classes is not None:
        return list(reader.classes)
    largest = max((seen.label for seen in found if isinstance(seen, Seen)), default=-1)
    count = recipe.source.num_classes or largest + 1
    return [str(label) for label in range(count)] or None
