"""The encoders of a recipe, and the spec of the store that they make: how its images are cropped and encoded."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ... import __version__
from ...datasets.format.buckets import bucket_name
from ...datasets.format.schema import FORMAT_VERSION, CompanionSpec, FeatureEncoder, ImageSpec, StoreSpec, TextEncoder
from ...errors import RecipeError
from ..config import PrecomputeRecipe
from ..images.bucket_tables import resize_filter
from ..images.pixels import ADM_FILTER, colour_handling
from ..sources.source import Source
from .model_files import library_majors
from .text.encoder import CaptionEncoder
from .text.tokenizer import CaptionTokenizer, of_table
from .vae import ImageEncoder

if TYPE_CHECKING:  # transformers takes seconds to import
    from .vision.features import FeatureEncoder as VisionEncoder

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Encoders:
    """The encoders of a recipe; caption encoders, features and the kinds of companions by name."""

    image: ImageEncoder
    captions: Mapping[str, CaptionEncoder] = field(default_factory=dict)
    features: Mapping[str, VisionEncoder] = field(default_factory=dict)
    companions: Mapping[str, str] = field(default_factory=dict)

    @property
    def tokenizers(self) -> dict[str, CaptionTokenizer]:
        """Tokenizers of the caption encoders, by name."""
        return {name: encoder.tokenizer for name, encoder in self.captions.items()}


def load_encoders(recipe: PrecomputeRecipe, device: torch.device) -> Encoders:
    """Load the encoders of a recipe; those of captions load their weights when they encode.

    Raises: EncoderError.
    """
    sections, tokenizers, captions, features = recipe.text, {}, {}, {}
    for name, section in sections.items():
        with of_table(name):
            tokenizers[name] = CaptionTokenizer(section)
    image = ImageEncoder(recipe.vae, device)
    for name, section in sections.items():
        with of_table(name):
            captions[name] = CaptionEncoder(section, tokenizers[name], device)
    for name, section in recipe.features.items():
        from .vision.features import FeatureEncoder as VisionEncoder

        features[name] = VisionEncoder(section, recipe.images.resolution, device, name=name)
    return Encoders(image, captions, features, {name: one.kind for name, one in recipe.companions.items()})


def describe_store(
    recipe: PrecomputeRecipe, source: Source | None, encoders: Encoders, *, known: StoreSpec | None = None
) -> StoreSpec:
    """The spec of the store, with its fingerprint.

    Args:
      source: supplies the class names; None to omit them.
      known: present spec. Its text encoders and features come first, in its order, wherever the recipe has them; its
        sample captions stay, and what was decided for store.on_low_quality. With vae.batch_size = 0 its batch size is
        kept, otherwise the largest that fits is measured.
    Raises: RecipeError: the VAE cannot encode images of a bucket's size. ResourceError: not even one image fits.
    """
    downscale, batch_size = encoders.image.downscale, recipe.vae.batch_size
    images = recipe.images.for_vae(downscale)
    table = images.table
    side_px = encoders.image.fixed_side_px
    for _, height_px, width_px in table:
        if height_px % downscale or width_px % downscale:
            raise RecipeError(
                f"bucket '{bucket_name(height_px, width_px)}': the VAE makes one latent position of {downscale} px, so "
                f"both sides must be multiples of {downscale}. Use another resolution, table or VAE."
            )
        if side_px and (height_px, width_px) != (side_px, side_px):
            raise RecipeError(
                f"bucket '{bucket_name(height_px, width_px)}': {encoders.image.identity.class_name} encodes squares of "
                f"{side_px} px, and would squeeze all others into them. Set images.resolution = {side_px} and "
                'images.buckets = "square".'
            )
    text_dtypes = {name: _text_dtype(recipe, name, known) for name in recipe.text}
    if not batch_size and known:
        batch_size = known.latent.batch_size
    elif not batch_size:  # one number for all buckets: what fits the largest
        _, height_px, width_px = max(table, key=lambda row: (row[1] * row[2], row))
        batch_size = encoders.image.largest_batch(height_px, width_px)
        LOG.info("vae.batch_size 0: %d images of %dx%d px fit in one forward pass", batch_size, height_px, width_px)
    unnamed = encoders.captions.get("")
    latent = encoders.image.latent_spec(recipe.vae, recipe.store.dtype, batch_size=batch_size)
    return StoreSpec(
        format_version=FORMAT_VERSION,
        leandit_version=__version__,
        fingerprint="",
        images=ImageSpec(
            resolution_px=images.resolution,
            crop=images.crop,
            buckets=[bucket_name(height_px, width_px) for _, height_px, width_px in table],
            resize_filter=ADM_FILTER if images.crop == "adm" else resize_filter(images.buckets, images.resolution),
            colour=colour_handling(images.color),
            libraries=library_majors("pillow"),
            variants=images.variants,
            variant_zoom=images.variant_zoom if images.variants > 1 else 1.0,
        ),
        latent=latent,
        text=unnamed and unnamed.text_spec(recipe.text[""], text_dtypes[""]),
        vae=encoders.image.identity,
        text_encoder=unnamed and unnamed.identity,
        texts=[
            TextEncoder(
                name=name, spec=encoder.text_spec(recipe.text[name], text_dtypes[name]), encoder=encoder.identity
            )
            for name in _in_order(filter(None, recipe.text), known.texts if known else ())
            for encoder in [encoders.captions[name]]
        ],
        features=[
            FeatureEncoder(name=name, spec=encoder.spec(), encoder=encoder.identity)
            for name in _in_order(encoders.features, known.features if known else ())
            for encoder in [encoders.features[name]]
        ],
        companions=[
            CompanionSpec(name=name, column=column, kind=recipe.companions[name].kind)
            for name, column in recipe.companion_columns.items()
        ],
        classes=source and source.classes,
        sample_captions=[*dict.fromkeys([*(known.sample_captions if known else ()), *recipe.captions.sample])],
        shard_mib=recipe.store.shard_mib,
        codec=recipe.store.codec,
        recipe=recipe.model_dump(),
    ).with_fingerprint()


def _text_dtype(recipe: PrecomputeRecipe, name: str, known: StoreSpec | None) -> str:
    """Dtype of the captions of a text encoder; of a planned store, as store.on_low_quality was decided then."""
    dtype = recipe.store.caption_dtype
    if dtype == "int8" and recipe.store.on_low_quality == "float16" and known:
        planned = {encoder.name: encoder.spec.dtype for encoder in known.text_encoders}
        if planned.get(name) == "float16":
            return "float16"
    return dtype


def _in_order(names: Iterable[str], known: Sequence[TextEncoder | FeatureEncoder]) -> list[str]:
    """Names of a recipe: those that a store has in its order, then new ones."""
    places = {one.name: i for i, one in enumerate(known)}
    return sorted(names, key=lambda name: places.get(name, len(places)))
