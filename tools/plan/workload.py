"""What a recipe trains on: description and buckets of its stores and the model, from stores or for a resolution."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...datasets.format.buckets import bucket_size
from ...datasets.format.schema import FeatureSpec, StoreSpec, TextSpec
from ...datasets.store import LatentStore
from ...train.config import TrainRecipe
from ...train.data_recipe import batch_shares
from ...train.metrics.flops import latent_size_of, tokens_per_image, train_flops
from ...train.models.build import FAMILIES, family_of
from ...train.models.spec import ModelSpec
from ...train.run.data import longest_caption
from ...train.run.fit import model_for_stores, model_spec
from ...train.run.manifest import describe_access, open_stores
from ...train.techniques.registry import features_of
from .noise_spec import noise_spec

TOKENS, TEXT_WIDTH = 300, 4096  # of a caption, without a store: PixArt-Sigma's
CLIP_TOKENS = 77
CHANNELS, CLASSES = 4, 1000  # of latents and labels, if neither recipe nor store gives them: SD-VAE, ImageNet
VA_VAE_CHANNELS = 32  # of latents at 1/16 of the pixels, with which LightningDiT is trained
FEATURE_WIDTH, FEATURE_PX = 768, 16  # of DINOv2-B, with a patch for 16 px of the image, as in REPA
STORED_BYTES = 2  # bytes of a stored number, at most: float16


@dataclass(frozen=True)
class TrainingWorkload:
    """A recipe and everything that its stores decide; features and companions are those that it reads.

    Args:
      store: description of the store of the largest images; it need not exist.
      buckets: records of each bucket, over all stores.
      shares: of the batches, by bucket; of any sum.
      tokens: tokens of the longest caption; 0 without captions.
      mirror_bytes: of local folders for shards of stores at URLs, when all are full.
      access: how each store is read, and why, in words.
    """

    recipe: TrainRecipe
    store: StoreSpec
    spec: ModelSpec
    buckets: Mapping[str, int]
    shares: Mapping[str, float]
    tokens: int
    mirror_bytes: int = 0
    access: Sequence[str] = ()

    @property
    def largest_bucket(self) -> str:
        """The bucket with most image tokens."""
        return max(self.buckets, key=self.image_tokens)

    def image_tokens(self, bucket: str) -> int:
        """Tokens of an image of a bucket."""
        return tokens_per_image(self.spec, latent_size_of(bucket, self.store.latent))

    def batch_bytes(self, images: int) -> int:
        """Bytes of a batch on the device: latents and features as stored and as float32, captions as stored, padded."""
        height, width = latent_size_of(self.largest_bucket, self.store.latent)
        latents = self.store.latent.channels * height * width * (STORED_BYTES + 4)
        size = bucket_size(self.largest_bucket)
        features = sum((1 + math.prod(one.spec.grid(*size))) * one.spec.width for one in self.store.features)
        captions = self.tokens * self.spec.caption_width * STORED_BYTES
        if self.spec.texts:
            captions = sum(one.tokens * one.width + one.pooled_width for one in self.spec.texts) * STORED_BYTES
        seen = 2 if self.spec.reference else 1  # the latents, and those of the image to edit
        return images * (seen * latents + captions + features * (STORED_BYTES + 4))

    @property
    def flops(self) -> float:
        """FLOPs of training on one image, the mean over the run."""
        sizes = {bucket: latent_size_of(bucket, self.store.latent) for bucket in self.buckets}
        total = sum(train_flops(self.spec, sizes[bucket], self.tokens) * n for bucket, n in self.shares.items())
        return total / sum(self.shares.values())


def workload_of_stores(recipe: TrainRecipe, path: Path | str | None) -> TrainingWorkload:
    """The workload of a recipe on its stores.

    Args:
      path: of the store; None where the recipe names its stores.
    Raises: StoreError, RecipeError, RunError: as training does.
    """
    store_shares = batch_shares(recipe.store_sections(path))
    buckets, shares = Counter[str](), Counter[str]()
    changed = recipe.model_copy(update={"run": recipe.run.model_copy(update={"allow_incomplete": True})})
    stores = open_stores(changed, path, Path(), None, lambda _: None)
    for share, store in zip(store_shares, stores, strict=True):
        buckets.update(store.buckets)
        weight = share * recipe.run.steps / max(1, len(store))
        shares.update({bucket: weight * count for bucket, count in store.buckets.items()})  # pyright: ignore
    spec, largest = model_for_stores(recipe, stores)
    features = [one for one in largest.spec.features if one.name in features_of(recipe)]
    companions = [one for one in largest.spec.companions if one.name == spec.reference]
    read = largest.spec.model_copy(update={"features": features, "companions": companions})
    tokens = longest_caption(spec, read)
    mirror_bytes = sum(mirror_size(recipe, store) for store in dict.fromkeys(stores))
    return TrainingWorkload(
        recipe=recipe,
        store=read,
        spec=spec,
        buckets=dict(buckets),
        shares=dict(shares),
        tokens=tokens,
        mirror_bytes=mirror_bytes,
        access=describe_access(stores),
    )


def mirror_size(recipe: TrainRecipe, store: LatentStore) -> int:
    """Bytes of the local folder of a store at a URL, when all that fits into it was read; 0 of a local store."""
    if not store.remote:
        return 0
    return min(round(recipe.run.remote_gib * 2**30), sum(entry.bytes for entry in store.remote.manifest.files))


def workload_at_resolution(recipe: TrainRecipe, resolution_px: int) -> TrainingWorkload:
    """The workload of a recipe on square images, before there is a store."""
    bucket = f"{resolution_px}x{resolution_px}"
    channels = recipe.model.channels or CHANNELS
    classes = recipe.model.num_classes or CLASSES
    feature = FeatureSpec(
        output="both",
        layer=-1,
        width=FEATURE_WIDTH,
        patch_px=FEATURE_PX,
        resolution_px=resolution_px,
        images_px=resolution_px,
        dtype="int8",
    )
    features = dict.fromkeys(features_of(recipe), feature)
    texts = published_texts(recipe.model.name)
    family = FAMILIES.get(family_of(recipe.model.name) or "")
    width = 0 if texts else family.text_width if family else TEXT_WIDTH
    store = noise_spec(
        [bucket],
        channels,
        classes,
        TOKENS,
        width,
        64,
        "none",
        texts=texts,
        features=features,
        companions=[recipe.model.reference] if recipe.model.reference else [],
        downscale=published_downscale(recipe.model.name, channels),
        resolution_px=resolution_px,
    )
    spec = model_spec(recipe, store, "a store of this resolution", [bucket])
    return TrainingWorkload(recipe, store, spec, {bucket: 1}, {bucket: 1.0}, longest_caption(spec, store))


def published_downscale(model: str, channels: int) -> int:
    """Pixels a latent place, of the autoencoder that a model is trained with; of a DiT by its channels."""
    if family := family_of(model):
        return FAMILIES[family].downscale
    return 16 if channels >= VA_VAE_CHANNELS else 8


def published_texts(model: str) -> dict[str, TextSpec]:
    """The text encoders of a model that reads several, with their published sizes."""
    family = family_of(model)
    return {
        role.name.lower().replace("-", "_"): TextSpec(
            kind="clip" if role.pooled_width else "t5",
            width=role.width,
            max_tokens=role.tokens or CLIP_TOKENS,
            dtype="float16",
            template="",
            batch_size=1,
            output="pooled" if not role.tokens else "both" if role.pooled_width else "tokens",
            full_length=True,
            pooled_width=role.pooled_width,
        )
        for role in (FAMILIES[family].texts if family else ())
    }
