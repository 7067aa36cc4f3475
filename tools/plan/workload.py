"""What a recipe trains on: the store's description, its buckets and the model, from a store or for a resolution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...datasets.format.schema import StoreSpec
from ...datasets.store import LatentStore
from ...train.config import TrainRecipe
from ...train.metrics.flops import latent_size_of, tokens_per_image, train_flops
from ...train.models.spec import ModelSpec
from ...train.run.model_for_store import check_sizes, model_spec
from ..synthetic.store import noise_spec

TOKENS, TEXT_WIDTH = 300, 4096  # of a caption, without a store: PixArt-Sigma's
CHANNELS, CLASSES = 4, 1000  # of latents and labels, if neither recipe nor store gives them: SD-VAE, ImageNet
STORED_BYTES = 2  # bytes of a stored number, at most: float16


@dataclass(frozen=True)
class TrainingWorkload:
    """A recipe and everything that its store decides.

    Args:
      store: description of a store; it need not exist.
      buckets: records of each bucket.
      tokens: tokens of the longest caption; 0 without captions.
    """

    recipe: TrainRecipe
    store: StoreSpec
    spec: ModelSpec
    buckets: Mapping[str, int]
    tokens: int

    @property
    def largest_bucket(self) -> str:
        """The bucket with most image tokens."""
        return max(self.buckets, key=self.image_tokens)

    def image_tokens(self, bucket: str) -> int:
        """Tokens of an image of a bucket."""
        return tokens_per_image(self.spec, latent_size_of(bucket, self.store.latent))

    def batch_bytes(self, images: int) -> int:
        """Bytes of a batch on the device: latents as stored and as float32, captions as stored and padded."""
        height, width = latent_size_of(self.largest_bucket, self.store.latent)
        latents = self.store.latent.channels * height * width * (STORED_BYTES + 4)
        return images * (latents + self.tokens * self.spec.caption_width * STORED_BYTES)

    @property
    def flops(self) -> float:
        """FLOPs of training on one image, the mean over the records."""
        sizes = {bucket: latent_size_of(bucket, self.store.latent) for bucket in self.buckets}
        total = sum(train_flops(self.spec, sizes[bucket], self.tokens) * n for bucket, n in self.buckets.items())
        return total / sum(self.buckets.values())


def workload_of_store(recipe: TrainRecipe, path: Path | str) -> TrainingWorkload:
    """The workload of a recipe on a store.

    Raises: StoreError, RecipeError, RunError: as training does.
    """
    store = LatentStore(path, revision=recipe.run.revision, allow_incomplete=True)
    spec = model_spec(recipe, store.spec, str(path))
    tokens = store.spec.text.max_tokens if store.spec.text and spec.takes_text else 0
    return TrainingWorkload(recipe, store.spec, spec, dict(store.buckets), tokens)


def workload_at_resolution(recipe: TrainRecipe, resolution_px: int) -> TrainingWorkload:
    """The workload of a recipe on square pictures, before there is a store."""
    bucket = f"{resolution_px}x{resolution_px}"
    channels = recipe.model.channels or CHANNELS
    classes = recipe.model.num_classes or CLASSES
    store = noise_spec({bucket: 1}, channels, classes, TOKENS, TEXT_WIDTH, 64, "none")
    images = store.images.model_copy(update={"resolution_px": resolution_px})
    store = store.model_copy(update={"images": images})
    spec = model_spec(recipe, store, "a store of this resolution")
    check_sizes(spec, store.latent, [bucket])
    return TrainingWorkload(recipe, store, spec, {bucket: 1}, TOKENS if spec.takes_text else 0)
