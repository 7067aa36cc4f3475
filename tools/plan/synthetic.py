"""A run with random weights and batches of noise, without a store, for traces and measurements."""

from __future__ import annotations

import math

import torch

from ...datasets.batches.batch import Batch, FeatureBatch
from ...datasets.batches.captions import Captions
from ...datasets.format.buckets import bucket_size
from ...datasets.format.schema import FeatureSpec, StoreSpec
from ...datasets.format.token_dtypes import scale_shape
from ...train.config import TrainRecipe
from ...train.metrics.flops import latent_size_of
from ...train.models.spec import ModelSpec
from ...train.parallel.ranks import ALONE, Ranks
from ...train.run.state import Run, build_run


def synthetic_run(
    recipe: TrainRecipe,
    spec: ModelSpec,
    max_tokens: int,
    device: torch.device,
    *,
    ranks: Ranks = ALONE,
    store: StoreSpec | None = None,
    compiled: bool = False,
) -> Run:
    """A run, with random weights and without data.

    Args:
      max_tokens: of the null caption as the model sees it, for a model with text.
      ranks, store, compiled: as in ``build_run``.
    """
    null_caption = torch.zeros(max_tokens, spec.caption_width, device=device) if spec.takes_text else None
    null_pooled = torch.zeros(spec.pooled_width, device=device) if spec.pooled_width else None
    how = {"ranks": ranks, "store": store, "compiled": compiled}
    return build_run(recipe, spec, device, nulls=(null_caption, null_pooled), **how)


def synthetic_batch(store: StoreSpec, bucket: str, count: int, tokens: int, device: torch.device) -> Batch:
    """A batch of noise as the loader returns it, created on its device.

    Args:
      bucket: "HxW" in pixels.
      tokens: of each caption of ``[text]``, for a store with text; those of others are of full length. 0: no captions.
    """
    latent = store.latent
    height, width = latent_size_of(bucket, latent)
    texts = {}
    for one in store.text_encoders if tokens > 0 else ():
        length = one.spec.max_tokens if one.name else tokens
        texts[one.name] = Captions.packed(
            torch.randn(count * length, one.spec.width, device=device).half(),
            [length] * count,
            pooled=torch.randn(count, one.spec.pooled_width, device=device).half() if one.spec.pooled_width else None,
        )
    classes = len(store.classes or ())
    labels = torch.arange(count, device=device)
    return Batch(
        stored=torch.randn(count, latent.channels, height, width, device=device).half(),
        labels=labels % classes if classes else torch.full_like(labels, -1),
        records=labels,
        draw_keys=None,
        spec=latent.model_copy(update={"kind": "latent", "stored_channels": latent.channels}),
        bucket=bucket,
        number=0,
        global_size=count,
        epoch=0,
        texts=texts,
        stored_companions={
            one.name: torch.randn(count, latent.channels, height, width, device=device).half()
            for one in store.companions
        },
        features={one.name: _feature(one.spec, bucket, count, device) for one in store.features},
    ).finish()


def _feature(spec: FeatureSpec, bucket: str, count: int, device: torch.device) -> FeatureBatch:
    """An image feature of noise in int8, patches and class tokens."""
    num_patches = math.prod(spec.grid(*bucket_size(bucket)))
    scales = scale_shape(spec.width)
    return FeatureBatch(
        stored_patches=torch.randint(-127, 128, (count, num_patches, spec.width), dtype=torch.int8, device=device),
        patch_scales=torch.rand((count, num_patches, *scales), device=device).half(),
        stored_cls=torch.randint(-127, 128, (count, spec.width), dtype=torch.int8, device=device),
        cls_scales=torch.rand((count, *scales), device=device).half(),
    )
