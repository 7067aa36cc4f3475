"""The description of a store of noise, with which a plan begins where there is no store yet. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ... import __version__
from ...datasets.format.schema import (
    FORMAT_VERSION,
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

DOWNSCALE, RESOLUTION_PX = 8, 256


def noise_spec(
    buckets: Iterable[str],
    channels: int,
    num_classes: int,
    max_tokens: int,
    text_width: int,
    shard_mib: int,
    codec: str,
    *,
    text_dtype: str = "float16",
    texts: Mapping[str, TextSpec] = {},
    features: Mapping[str, FeatureSpec] = {},
    companions: Sequence[str] = (),
    downscale: int = DOWNSCALE,
    resolution_px: int = RESOLUTION_PX,
) -> StoreSpec:
    """The description of a store of noise: float16 latents and, with ``max_tokens``, captions.

    Args:
      buckets: "HxW" in pixels.
      num_classes: 0: no labels.
      max_tokens, text_width, text_dtype: of ``[text]``, which there is only if neither number is 0.
      texts, features: further text encoders and image features, by name.
      companions: names of companion images.
      downscale: pixels of a side of a latent position.
      resolution_px: that the store says it was made for.
    """
    numbers: dict[str, Any] = {"config": {}, "weights_sha256": "0" * 64, "tokenizer_sha256": None, "libraries": {}}
    noise = EncoderIdentity(model="noise", revision=None, class_name="Noise", dtype="float32", **numbers)
    own_text: dict[str, Any] = {"kind": "t5", "width": text_width, "max_tokens": max_tokens, "dtype": text_dtype}
    text = TextSpec(**own_text, template="", batch_size=64) if max_tokens and text_width else None
    images: dict[str, Any] = {"crop": "bucket", "resize_filter": "none", "colour": "none", "libraries": {}}
    latent: dict[str, Any] = {"array": "latents", "kind": "latent", "dtype": "float16", "flip": False, "tile_px": 0}
    latent |= {"channels": channels, "stored_channels": channels, "downscale": downscale, "batch_size": 32}
    return StoreSpec(
        format_version=FORMAT_VERSION,
        leandit_version=__version__,
        fingerprint="",
        images=ImageSpec(resolution_px=resolution_px, buckets=list(buckets), **images),
        latent=LatentSpec(**latent, shift=[0.0] * channels, scale=[1.0] * channels),
        text=text,
        vae=noise,
        text_encoder=noise if text else None,
        texts=[TextEncoder(name=name, spec=one, encoder=noise) for name, one in texts.items()],
        features=[FeatureEncoder(name=name, spec=one, encoder=noise) for name, one in features.items()],
        companions=[CompanionSpec(name=name, column=name, kind="image") for name in companions],
        classes=[f"{label:04d}" for label in range(num_classes)] or None,
        shard_mib=shard_mib,
        codec=codec,
        recipe={"vae": {"model": "noise"}, "text": {"model": "noise"}},
    ).with_fingerprint()
