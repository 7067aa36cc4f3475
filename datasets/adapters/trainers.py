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
from ..format.buckets import bucket_size
from ..format.schema import TextSpec
from ..store import LatentStore

Named = dict[str, Any]
PROJECTED, PLAIN = "CLIPTextModelWithProjection", "CLIPTextModel"
UNNAMED = "text"  # what stands for the text encoder of the recipe section [text]
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
    Raises: RecipeError: the store has no such text encoders, or their captions are not stored as SD3 reads them.
    Source: Esser et al. 2024 (SD3), appendix B.1.
    """
    names = list(store.texts if texts is None else texts)
    if len(names) != 3:
        raise RecipeError(f"{_place(store)}, needed CLIP-L, CLIP-G and T5. {_how_to_have(store, 3)}")
    specs = [_spec_of(store, name) for name in names]
    for name, spec in zip(names, specs, strict=True):
        _check_full_length(store, name, spec)
    _check_pooled(store, names[0], PROJECTED)
    _check_pooled(store, names[1], PROJECTED)
    _check_attends(store, names[2], specs[2])
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


def diffusers_sdxl(
    store: LatentStore, texts: Sequence[str] | None = None, *, dtype: torch.dtype = torch.float32
) -> Callable[[Batch], Named]:
    """Batches for diffusers' scripts that train Stable Diffusion XL.

    Args:
      texts: names of CLIP-L and CLIP-G; None for the two text encoders of the store in their order.
      dtype: of the tensors, that of the U-Net.
    Returns: a function from a batch to
      model_input: (B, C, H, W); prompt_embeds: (B, L, D), CLIP-L and CLIP-G side by side;
      pooled_prompt_embeds: (B, P), of CLIP-G;
      time_ids: (B, 6), height and width of the source picture, top and left of the crop in the resized picture, height
        and width of the bucket, in pixels.
    Raises: RecipeError: the store has no such text encoders, or their captions are not stored at full length.
    Source: Podell et al. 2023 (SDXL), section 2.2.
    """
    names = list(store.texts if texts is None else texts)
    if len(names) != 2:
        raise RecipeError(f"{_place(store)}, needed CLIP-L and CLIP-G. {_how_to_have(store, 2)}")
    specs = [_spec_of(store, name) for name in names]
    for name, spec in zip(names, specs, strict=True):
        _check_full_length(store, name, spec)
    if not specs[1].pooled_width or specs[0].max_tokens != specs[1].max_tokens:
        raise RecipeError(f"{_place(store)}; '{names[1]}' must be CLIP-G: output = 'both', max_tokens as '{names[0]}'.")
    _check_pooled(store, names[1], PROJECTED)
    known = torch.from_numpy(store.sizes)[:, [0, 1, 4, 5]]  # of the source, then of the crop

    def named(batch: Batch) -> Named:
        target = torch.tensor([bucket_size(batch.bucket)]).expand(len(batch), 2)
        time_ids = torch.cat([known[batch.records.cpu()], target], dim=1)
        return {
            "model_input": batch.latents.to(dtype),
            "prompt_embeds": torch.cat([_tokens(batch, name, dtype) for name in names], dim=2),
            "pooled_prompt_embeds": _pooled(batch, names[1], dtype),
            "time_ids": time_ids.to(batch.latents.device, dtype),
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
      tokens: name of the text encoder whose tokens are read; None for the only one that has tokens.
      pooled: name of the one whose pooled vectors are read; None for the only one that has them. They are left out of
        a store without them.
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
    if pooled is not None:
        _check_pooled(store, pooled, PLAIN)

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
      tokens: name of T5; None for the only text encoder that has tokens.
      pooled: name of CLIP; None for the only one that has pooled vectors.
      dtype: of the tensors.
    Returns: a function from a batch to
      a dictionary of img_encodings (B, C, H, W), t5_encodings (B, L, D) and clip_encodings (B, P);
      the labels of its step, (B, C, H, W): the latents again.
    Raises: RecipeError: the store has no such text encoder, or the captions are not stored as FLUX reads them.
    """
    tokens = _only(store, tokens, "tokens", [one.name for one in store.spec.text_encoders if one.spec.has_tokens])
    pooled = _only(store, pooled, "pooled", [one.name for one in store.spec.text_encoders if one.spec.pooled_width])
    _check_full_length(store, tokens, _spec_of(store, tokens))
    _check_attends(store, tokens, _spec_of(store, tokens))
    _check_pooled(store, pooled, PLAIN)

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
    if not names:
        raise RecipeError(f"{_place(store)}; none has {what}, needed one. Precompute the store with one.")
    raise RecipeError(
        f"{_place(store)}; those with {what} are {[*names]}, got {what}={name!r}. Give '{what}' one of these names."
    )


def _spec_of(store: LatentStore, name: str) -> TextSpec:
    if name not in store.texts:
        raise RecipeError(f"{_place(store)}, got the name {name!r}.")
    return store.spec.text_encoder_of(name).spec


def _check_full_length(store: LatentStore, name: str, spec: TextSpec) -> None:
    """Raise unless every caption has all tokens that the text encoder gives, since the trainer reads no mask."""
    if not spec.has_tokens or not spec.full_length:
        has = "has captions without their padding" if spec.has_tokens else "has no tokens"
        raise RecipeError(
            f"{_place(store)}; '{name or UNNAMED}' {has}, and this trainer reads no mask. Precompute the store with "
            f"{_section(name)}.full_length = true."
        )


def _check_attends(store: LatentStore, name: str, spec: TextSpec) -> None:
    """Raise unless T5 saw the padding, as it does in the pipelines: the values of all its tokens depend on it."""
    if spec.kind in ("t5", "umt5") and not spec.attend_padding:
        raise RecipeError(
            f"{_place(store)}; '{name or UNNAMED}' has not attended to its padding, as the model's own T5 does. "
            f"Precompute the store with {_section(name)}.attend_padding = true."
        )


def _check_pooled(store: LatentStore, name: str, needed: str) -> None:
    """Raise if pooled vectors are of the other class of CLIP: for SD3 and SDXL projected, for FLUX not."""
    found = store.spec.text_encoder_of(name).encoder.class_name
    if found in (PROJECTED, PLAIN) and found != needed:
        raise RecipeError(
            f"{_place(store)}; the pooled vectors of '{name}' are of {found}, this trainer reads those of {needed}. "
            "Precompute the store with the text encoder of the model that is trained."
        )


def _how_to_have(store: LatentStore, num: int) -> str:
    if len(store.texts) < num:
        return "Precompute the store with them, as the recipe sd3-512 does."
    return f"Name these {num} with 'texts'."


def _section(name: str) -> str:
    """The recipe section of a text encoder."""
    return f"text.{name}" if name else "text"


def _place(store: LatentStore) -> str:
    found = store.texts
    has = f"its text encoders are {found}" if any(found) else f"its text encoder is {UNNAMED}"
    return f"store '{store.path}': {has if found else 'it has no text encoder'}"
