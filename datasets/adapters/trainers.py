"""Batches named as other trainers read them: one function per trainer, for ``make_loader(..., collate_fn=...)``.

    loader = make_loader(store, global_batch=16, collate_fn=adapters.diffusers_sd3(store))

Each looks up the text encoders of the store once, and raises where the store lacks what the trainer reads. Latents are
drawn, shifted and scaled once; captions have the values that the text encoder gave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..batches.batch import Batch
from ..errors import RecipeError
from ..format.schema import TextSpec
from ..store import LatentStore

Named = dict[str, Any]
TOKEN_MULTIPLE = 8  # NeMo AutoModel's collate function pads captions to a multiple of it


def diffusers_sd3(
    store: LatentStore, texts: Sequence[str] | None = None, *, dtype: torch.dtype = torch.float32
) -> Callable[[Batch], Named]:
    """Batches for diffusers' scripts that train Stable Diffusion 3 and 3.5.

    Args:
      texts: names of CLIP-L, CLIP-G and T5; None for the three text encoders of the store in their order.
      dtype: of the tensors, that of the transformer.
    Returns: a function from a batch to
      model_input: (B, C, H, W), what the scripts compute from ``pixel_values``;
      prompt_embeds: (B, L, D), CLIP-L and CLIP-G side by side, filled with zeros to the width D of T5, then T5;
      pooled_prompt_embeds: (B, P), of CLIP-L, then CLIP-G.
    Raises: RecipeError: the store has no such text encoders, or their captions are not stored at full length.
    Source: Esser et al. 2024 (SD3), appendix B.1.
    """
    names = list(store.texts if texts is None else texts)
    if len(names) != 3:
        raise RecipeError(f"{_place(store)}, needed CLIP-L, CLIP-G and T5. Name these three with 'texts'.")
    specs = [_spec_of(store, name) for name in names]
    for name, spec in zip(names, specs, strict=True):
        _check_full_length(store, name, spec)
    clip_l, clip_g, t5 = specs
    if not (clip_l.pooled_width and clip_g.pooled_width and clip_l.max_tokens == clip_g.max_tokens):
        raise RecipeError(
            f"{_place(store)}; of {names} the first two must be CLIP-L and CLIP-G: output = 'both', equal max_tokens."
        )
    if clip_l.width + clip_g.width > t5.width:
        raise RecipeError(f"{_place(store)}; '{names[2]}' must be T5, at least as wide as both CLIPs side by side.")

    def named(batch: Batch) -> Named:
        tokens = [_tokens(batch, name, dtype) for name in names]
        clips = torch.cat(tokens[:2], dim=2)
        wide = F.pad(clips, (0, tokens[2].shape[2] - clips.shape[2]))
        return {
            "model_input": batch.latents.to(dtype),
            "prompt_embeds": torch.cat([wide, tokens[2]], dim=1),
            "pooled_prompt_embeds": torch.cat([_pooled(batch, name, dtype) for name in names[:2]], dim=1),
        }

    return named


def nemo_automodel(
    store: LatentStore,
    *,
    tokens: str | None = None,
    pooled: str | None = None,
    reads_mask: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Callable[[Batch], Named]:
    """Batches for NeMo AutoModel's diffusion recipe: its ``FlowMatchingPipeline.step``.

    Args:
      tokens, pooled: names of the text encoders whose tokens and pooled vectors are read; None for the only one that
        has them. Pooled vectors are left out of a store without them.
      reads_mask: the model's adapter reads ``text_attention_mask``; else captions must be stored at full length.
      dtype: of the tensors.
    Returns: a function from a batch to
      image_latents: (B, C, H, W); data_type: "image";
      text_embeddings: (B, L, D), L a multiple of 8; text_attention_mask: (B, L) bool, True for a caption's tokens;
      pooled_prompt_embeds: (B, P).
    Raises: RecipeError: the store has no such text encoder, or its captions are not stored at full length.
    """
    tokens = _only(store, tokens, "tokens", [one.name for one in store.spec.text_encoders if one.spec.has_tokens])
    with_pooled = [one.name for one in store.spec.text_encoders if one.spec.pooled_width]
    pooled = _only(store, pooled, "pooled", with_pooled) if pooled is not None or with_pooled else None
    if not reads_mask:
        _check_full_length(store, tokens, _spec_of(store, tokens))

    def named(batch: Batch) -> Named:
        lengths, embeddings = batch.texts[tokens].lengths, _tokens(batch, tokens, dtype)
        assert lengths is not None
        embeddings = F.pad(embeddings, (0, 0, 0, -embeddings.shape[1] % TOKEN_MULTIPLE))
        positions = torch.arange(embeddings.shape[1], device=lengths.device)
        values: Named = {
            "image_latents": batch.latents.to(dtype),
            "text_embeddings": embeddings,
            "text_attention_mask": positions < lengths[:, None],
            "data_type": "image",
        }
        return values if pooled is None else values | {"pooled_prompt_embeds": _pooled(batch, pooled, dtype)}

    return named


def torchtitan_flux(
    store: LatentStore, *, tokens: str | None = None, pooled: str | None = None, dtype: torch.dtype = torch.float32
) -> Callable[[Batch], tuple[Named, Tensor]]:
    """Batches for torchtitan's FLUX trainer, as they are after its ``preprocess_data``.

    Args:
      tokens, pooled: names of T5 and CLIP; None for the only one that has tokens and the only one with pooled vectors.
      dtype: of the tensors.
    Returns: a function from a batch to
      a dictionary of img_encodings (B, C, H, W), t5_encodings (B, L, D) and clip_encodings (B, P);
      the labels of its step, (B, C, H, W): the latents again.
    Raises: RecipeError: the store has no such text encoder, or the captions are not stored at full length.
    """
    tokens = _only(store, tokens, "tokens", [one.name for one in store.spec.text_encoders if one.spec.has_tokens])
    pooled = _only(store, pooled, "pooled", [one.name for one in store.spec.text_encoders if one.spec.pooled_width])
    _check_full_length(store, tokens, _spec_of(store, tokens))

    def named(batch: Batch) -> tuple[Named, Tensor]:
        latents = batch.latents.to(dtype)
        captions = {
            "t5_encodings": _tokens(batch, tokens, dtype),
            "clip_encodings": _pooled(batch, pooled, dtype),
        }
        return {"img_encodings": latents, **captions}, latents

    return named


def _tokens(batch: Batch, name: str, dtype: torch.dtype) -> Tensor:
    """(B, L, D)."""
    embeddings = batch.texts[name].embeddings if name in batch.texts else None
    if embeddings is None or embeddings.ndim != 3:
        raise RecipeError(f"batch {batch.number}: it has no padded captions. Make the loader with text='padded'.")
    return embeddings.to(dtype)


def _pooled(batch: Batch, name: str, dtype: torch.dtype) -> Tensor:
    """(B, P)."""
    vectors = batch.texts[name].pooled
    assert vectors is not None
    return vectors.to(dtype)


def _only(store: LatentStore, name: str | None, what: str, names: Sequence[str]) -> str:
    """The text encoder of a name among those that have what is read; without a name, the only one."""
    if name is not None and name in names:
        return name
    if name is None and len(names) == 1:
        return names[0]
    found = f"those with {what} are {[*names]}" if names else f"none has {what}"
    raise RecipeError(f"{_place(store)}; {found}, got {what}={name!r}. Give '{what}' one of these names.")


def _spec_of(store: LatentStore, name: str) -> TextSpec:
    if name not in store.texts:
        raise RecipeError(f"{_place(store)}, got the name {name!r}.")
    return store.spec.text_encoder_of(name).spec


def _check_full_length(store: LatentStore, name: str, spec: TextSpec) -> None:
    """Raise unless every caption has all tokens that the text encoder gives, since the trainer reads no mask."""
    if not spec.has_tokens or not spec.full_length:
        has = "has captions without their padding" if spec.has_tokens else "has no tokens"
        raise RecipeError(
            f"{_place(store)}; '{name}' {has}, and this trainer reads no mask. Precompute the store with "
            f"text.{name}.full_length = true."
        )


def _place(store: LatentStore) -> str:
    return f"store '{store.path}': its text encoders are {store.texts}"
