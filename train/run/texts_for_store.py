"""Which text encoders of a store a model reads, and their null caption."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...datasets.batches.captions import CaptionBatch
from ...datasets.errors import RecipeError, RunError
from ...datasets.format.schema import StoreSpec, TextEncoder
from ...datasets.store import LatentStore
from ..config import TrainRecipe
from ..models.conditioning import join_texts
from ..models.diffusers_models.families import TEXT_ROLES, TextRole, family_of
from ..models.spec import ModelSpec, TextInput


def caption_inputs(recipe: TrainRecipe, store: StoreSpec, where: str) -> tuple[int, tuple[TextInput, ...]]:
    """Width of a caption token as the model sees it, and the text encoders that it reads, if it reads several.

    Args:
      where: path of the store, for the messages.
    Raises: RecipeError: ``conditioning.texts`` names others; RunError: the store lacks one, or what is read of it.
    """
    family = family_of(recipe.model.name)
    roles = TEXT_ROLES.get(family, ()) if family else ()
    if roles:
        inputs = _inputs(recipe, roles, store, where)
        return _joined_width(inputs), inputs
    return _width_of_first(recipe.model.name, store, where), ()


def _width_of_first(model: str, store: StoreSpec, where: str) -> int:
    if store.text is None and store.texts:
        names = ", ".join(f"[text.{one.name}]" for one in store.texts)
        raise RunError(
            f"model '{model}': it takes the captions of [text], store '{where}' has those of {names} alone. "
            "Precompute with its text encoder as [text]."
        )
    if store.text is None:
        raise RunError(f"model '{model}': it needs captions, store '{where}' has none. Precompute with text.kind.")
    if not store.text.has_tokens:
        raise RunError(
            f"model '{model}': it takes the tokens of captions, [text] of store '{where}' has pooled vectors alone. "
            "Precompute with a text encoder that gives tokens as [text]."
        )
    return store.text.width


def _inputs(recipe: TrainRecipe, roles: tuple[TextRole, ...], store: StoreSpec, where: str) -> tuple[TextInput, ...]:
    model, encoders = recipe.model.name, {one.name: one for one in store.text_encoders}
    names, needed = recipe.conditioning.texts or list(encoders), [role.encoder for role in roles]
    if len(names) != len(roles) or len(set(names)) != len(names):
        there = ", ".join(map(_table, encoders)) or "none"
        raise RunError(
            f"model '{model}': it reads {len(roles)} text encoders, {', '.join(needed)}, store '{where}' has: {there}. "
            "Precompute with all of them, or name those to read, in this order, in conditioning.texts."
        )
    if missing := [name for name in names if name not in encoders]:
        raise RecipeError(
            f"conditioning.texts: store '{where}' has no text encoder '{missing[0]}'. There are: "
            f"{', '.join(map(repr, encoders)) or 'none'}."
        )
    return tuple(_input(role, encoders[name], model, where) for role, name in zip(roles, names, strict=True))


def _input(role: TextRole, encoder: TextEncoder, model: str, where: str) -> TextInput:
    """What a role reads of an encoder, which must give it.

    Raises: RunError.
    """
    spec, table = encoder.spec, _table(encoder.name)
    of_store = f"model '{model}': it reads {role.encoder} from {table} of store '{where}', which"
    if role.tokens and not spec.has_tokens:
        raise RunError(f'{of_store} has pooled vectors alone. Precompute with output = "both".')
    if role.pooled_width and not spec.pooled_width:
        raise RunError(f'{of_store} has no pooled vectors. Precompute with output = "both".')
    if role.tokens and not spec.full_length:
        raise RunError(
            f"{of_store} has the valid tokens alone. The model has no mask and reads padding too: precompute with "
            "full_length = true."
        )
    return TextInput(
        name=encoder.name,
        tokens=spec.max_tokens if role.tokens else 0,
        width=spec.width,
        pooled_width=spec.pooled_width if role.pooled_width else 0,
        beside=role.beside,
    )


def _table(name: str) -> str:
    return f"[text.{name}]" if name else "[text]"


def _joined_width(inputs: tuple[TextInput, ...]) -> int:
    """Of the widest tokens, with those beside them."""
    widths: list[int] = []
    for one in inputs:
        if one.beside:
            widths[-1] += one.width
        elif one.tokens:
            widths.append(one.width)
    return max(widths)


def longest_caption(spec: ModelSpec, store: StoreSpec) -> int:
    """Caption tokens of an image, at most; 0 for a model of labels."""
    if not spec.takes_text:
        return 0
    return spec.joined_tokens or (store.text.max_tokens if store.text else 0)


def null_captions(spec: ModelSpec, store: LatentStore) -> tuple[Tensor | None, Tensor | None]:
    """The empty caption as the model sees it, (max_tokens, D) and (P,) float32; None for what it does not read."""
    if not spec.takes_text:
        return None, None
    if not spec.texts:
        return torch.from_numpy(store.null_caption).float(), None
    nulls = {}
    for one in spec.texts:
        stored = store.text(one.name)
        nulls[one.name] = null_batch(
            torch.from_numpy(stored.null) if one.tokens else None,
            torch.from_numpy(stored.null_pooled) if one.pooled_width else None,
        )
    return joined_null(spec, nulls)


def null_batch(tokens: Tensor | None, pooled: Tensor | None) -> CaptionBatch:
    """A batch of one empty caption, of its tokens (max_tokens, D) and its pooled vector (P,)."""
    return CaptionBatch(
        tokens=None if tokens is None else tokens[None].float(),
        lengths=None,
        pooled=None if pooled is None else pooled[None].float(),
    )


def joined_null(spec: ModelSpec, nulls: Mapping[str, CaptionBatch]) -> tuple[Tensor, Tensor | None]:
    """The empty caption of several text encoders, (max_tokens, D) and (P,) float32."""
    captions, pooled = join_texts(spec, nulls)
    return captions[0], None if pooled is None else pooled[0]


def zero_texts(
    spec: ModelSpec, store: StoreSpec, count: int, dtype: torch.dtype, device: torch.device
) -> dict[str, CaptionBatch]:
    """Captions of zeros at full length, of the text encoders that a model reads."""
    if not spec.takes_text:
        return {}
    first = TextInput(name="", tokens=longest_caption(spec, store), width=spec.caption_width)
    return {
        one.name: CaptionBatch(
            tokens=torch.zeros(count, one.tokens, one.width, dtype=dtype, device=device),
            lengths=torch.full((count,), one.tokens, device=device),
            pooled=torch.zeros(count, one.pooled_width, device=device),
        )
        for one in spec.texts or (first,)
    }
