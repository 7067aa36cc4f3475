"""Batches named as diffusers' training scripts read them, for ``make_loader(..., collate_fn=...)``.

    loader = make_loader(store, global_batch=16, collate_fn=adapters.diffusers_sd3(store))

Latents (B, C, H, W) are drawn, shifted and scaled once; tokens (B, L, D) and pooled vectors (B, P) have the values that
the text encoder gave. All are of ``dtype``, that of the trained model. ``docs/other-trainers.md`` has the functions for
NeMo AutoModel and torchtitan, made of ``check_text``, ``tokens_of`` and ``pooled_of``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import RecipeError
from ..store import LatentStore
from .batch import Batch

Named = dict[str, Any]
PROJECTED, PLAIN = "CLIPTextModelWithProjection", "CLIPTextModel"


def diffusers_sd3(
    store: LatentStore,
    clip_l: str = "clip_l",
    clip_g: str = "clip_g",
    t5: str = "t5",
    *,
    dtype: torch.dtype = torch.float32,
) -> Callable[[Batch], Named]:
    """Batches for diffusers' scripts that train Stable Diffusion 3 and 3.5; text encoders are given by their names.

    Returns: a function from a batch to model_input, the latents, which the scripts compute from ``pixel_values``;
      prompt_embeds: CLIP-L and CLIP-G side by side, filled with zeros to the width of T5, then T5;
      pooled_prompt_embeds: of CLIP-L, then CLIP-G.
    Raises: RecipeError: the store lacks what the scripts read.
    Source: Esser et al. 2024 (SD3), appendix B.1.
    """
    for name in (clip_l, clip_g):
        check_text(store, name, pooled_class=PROJECTED)
    check_text(store, t5, attends=True)

    def named(batch: Batch) -> Named:
        clips = torch.cat([tokens_of(batch, name, dtype) for name in (clip_l, clip_g)], dim=2)
        tokens = tokens_of(batch, t5, dtype)
        wide = F.pad(clips, (0, tokens.shape[2] - clips.shape[2]))
        pooled = torch.cat([pooled_of(batch, name, dtype) for name in (clip_l, clip_g)], dim=1)
        embeds = torch.cat([wide, tokens], dim=1)
        return {"model_input": batch.latents.to(dtype), "prompt_embeds": embeds, "pooled_prompt_embeds": pooled}

    return named


def diffusers_sdxl(
    store: LatentStore, clip_l: str = "clip_l", clip_g: str = "clip_g", *, dtype: torch.dtype = torch.float32
) -> Callable[[Batch], Named]:
    """Batches for diffusers' scripts that train Stable Diffusion XL.

    Returns: a function from a batch to model_input, the latents; prompt_embeds: CLIP-L and CLIP-G side by side;
      pooled_prompt_embeds: of CLIP-G;
      time_ids: (B, 6), ``batch.sizes``: height and width of the source image, top and left of the crop that was drawn,
      height and width of the bucket, in pixels.
    Raises: RecipeError: the store lacks what the scripts read.
    Source: Podell et al. 2023 (SDXL), section 2.2.
    """
    check_text(store, clip_l)
    check_text(store, clip_g, pooled_class=PROJECTED)
    for bucket in store.buckets:
        sizes = store.sizes[store.index(bucket).records, :2]
        if num_unknown := int(np.count_nonzero(~sizes.any(axis=1))):
            raise RecipeError(
                f"store '{store.path}': the sizes of {num_unknown} images of bucket '{bucket}' are not known, as in "
                "imported stores, and SDXL is conditioned on them. Precompute the images instead."
            )

    def named(batch: Batch) -> Named:
        return {
            "model_input": batch.latents.to(dtype),
            "prompt_embeds": torch.cat([tokens_of(batch, name, dtype) for name in (clip_l, clip_g)], dim=2),
            "pooled_prompt_embeds": pooled_of(batch, clip_g, dtype),
            "time_ids": batch.sizes.to(batch.latents.device, dtype),
        }

    return named


def check_text(
    store: LatentStore, name: str, *, full_length: bool = True, attends: bool = False, pooled_class: str = ""
) -> None:
    """Raise RecipeError unless a text encoder of the store gives what a trainer reads.

    Args:
      full_length: all its tokens are stored, as the trainer reads no mask.
      attends: T5 saw the padding, as it does in the pipelines: the values of all its tokens depend on it.
      pooled_class: of CLIP: pooled vectors of SD3 and SDXL are projected, those of FLUX are not.
    """
    has = f"store '{store.path}': its text encoders are {store.texts}"
    if name not in store.texts:
        raise RecipeError(f"{has}, expected '{name}'. Precompute it, as the recipe sd3-512 does, or pass another name.")
    text, section = store.spec.text_encoder_of(name), f"text.{name}" if name else "text"
    problem = ""
    if full_length and not (text.spec.has_tokens and text.spec.full_length):
        problem = f"has captions without their padding, and this trainer reads no mask: {section}.full_length = true"
    elif attends and text.spec.kind in ("t5", "umt5") and not text.spec.attend_padding:
        problem = f"has not attended to its padding, as the model's own T5 does: {section}.attend_padding = true"
    elif pooled_class and not text.spec.pooled_width:
        problem = f"has no pooled vectors: {section}.output = 'both'"
    elif pooled_class and text.encoder.class_name in {PROJECTED, PLAIN} - {pooled_class}:
        problem = f"is a {text.encoder.class_name}, expected a {pooled_class}: the model's own text encoder"
    if problem:
        raise RecipeError(f"{has}; '{name or 'text'}' {problem}. Precompute the store with it.")


def tokens_of(batch: Batch, name: str, dtype: torch.dtype) -> Tensor:
    """(B, L, D) tokens of a text encoder."""
    if name not in batch.texts:
        raise RecipeError(f"batch {batch.number}: it has no captions. Make the loader with text='padded'.")
    return batch.texts[name].padded.to(dtype)


def pooled_of(batch: Batch, name: str, dtype: torch.dtype) -> Tensor:
    """(B, P) pooled vectors of a text encoder."""
    vectors = batch.texts[name].pooled
    assert vectors is not None, "check_text has checked the store"
    return vectors.to(dtype)
