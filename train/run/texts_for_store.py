"""Which text encoders of a store a model reads, and their null caption."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ...datasets.batches.captions import CaptionBatch
from ...datasets.errors import RecipeError
from ...datasets.format.schema import StoreSpec, TextEncoder
from ...datasets.store import LatentStore
from ..config import TrainRecipe
from ..models.conditioning import join_texts
from ..models.diffusers.families import TEXT_ROLES, family_of
from ..models.diffusers.model import TextRole
from ..models.spec import ModelSpec, TextInput


def caption_inputs(recipe: TrainRecipe, store: StoreSpec) -> tuple[int, tuple[TextInput, ...]]:
    """Width of a caption token as the model sees it, and the text encoders that it reads, if it reads several.

    Args:
      store: which lacks nothing by ``caption_lacks``.
    """
    if roles := _roles(recipe):
        inputs = tuple(_input(role, encoder) for role, encoder in _pairs(recipe, roles, store))
        return _joined_width(inputs), inputs
    assert store.text is not None
    return store.text.width, ()


def caption_lacks(recipe: TrainRecipe, store: StoreSpec, where: str) -> list[str]:
    """What a store lacks of the captions that a model reads, a phrase with what to do for each.

    Args:
      where: path of the store, for the messages.
    Raises: RecipeError: ``conditioning.texts`` is not valid for model and store.
    """
    if not (roles := _roles(recipe)):
        return _lacks_of_first(store)
    needed, there = [role.encoder for role in roles], [one.name for one in store.text_encoders]
    if names := recipe.conditioning.texts:
        _check_texts(names, needed, there, where)
    elif len(there) != len(roles):
        known = ", ".join(map(_table, there)) or "none"
        do = ": name those to read, in this order, in conditioning.texts" if len(there) > len(roles) else ""
        return [f"it reads {len(roles)} text encoders, {', '.join(needed)}, and there are {known}{do}"]
    return [lack for role, encoder in _pairs(recipe, roles, store) for lack in _lacks_of(role, encoder)]


def _roles(recipe: TrainRecipe) -> tuple[TextRole, ...]:
    """Of a model that reads several text encoders; otherwise none."""
    family = family_of(recipe.model.name)
    return TEXT_ROLES.get(family, ()) if family else ()


def _pairs(
    recipe: TrainRecipe, roles: tuple[TextRole, ...], store: StoreSpec
) -> Iterator[tuple[TextRole, TextEncoder]]:
    encoders = {one.name: one for one in store.text_encoders}
    return zip(roles, (encoders[name] for name in recipe.conditioning.texts or encoders), strict=True)


def _lacks_of_first(store: StoreSpec) -> list[str]:
    if store.text is None and store.texts:
        names = ", ".join(_table(one.name) for one in store.texts)
        return [f"it takes the captions of [text], and there are {names} alone: precompute with its encoder as [text]"]
    if store.text is None:
        return ["it needs captions, and there are none: precompute with text.kind"]
    if not store.text.has_tokens:
        return [
            "it takes the tokens of captions, and [text] has pooled vectors alone: precompute with a text encoder that "
            "gives tokens as [text]"
        ]
    return []


def _check_texts(names: list[str], needed: list[str], there: list[str], where: str) -> None:
    said = f"conditioning.texts {json.dumps(names)}:"
    if repeated := [name for place, name in enumerate(names) if name in names[:place]]:
        raise RecipeError(f"{said} {_said(repeated[0])} is named twice. Needed {', '.join(needed)}, in this order.")
    if missing := [name for name in names if name not in there]:
        known = ", ".join(map(_said, there)) or "none"
        raise RecipeError(f"{said} store '{where}' has no {_table(missing[0])}. Its text encoders: {known}.")
    if len(names) != len(needed):
        raise RecipeError(f"{said} {len(names)} names. Needed {len(needed)}: {', '.join(needed)}, in this order.")


def _lacks_of(role: TextRole, encoder: TextEncoder) -> Iterator[str]:
    """What an encoder does not give of what a role reads."""
    spec, reads = encoder.spec, f"it reads {role.encoder} from {_table(encoder.name)}, which has"
    if role.tokens and not spec.has_tokens:
        yield f'{reads} pooled vectors alone: precompute with output = "both"'
    if role.pooled_width and not spec.pooled_width:
        yield f'{reads} no pooled vectors: precompute with output = "both", or set the order in conditioning.texts'
    if role.tokens and spec.has_tokens and not spec.full_length:
        yield f"{reads} the valid tokens alone, and the model reads padding too: precompute with full_length = true"


def _input(role: TextRole, encoder: TextEncoder) -> TextInput:
    spec = encoder.spec
    return TextInput(
        name=encoder.name,
        tokens=spec.max_tokens if role.tokens else 0,
        width=spec.width,
        pooled_width=spec.pooled_width if role.pooled_width else 0,
        beside=role.beside,
    )


def _table(name: str) -> str:
    return f"[text.{name}]" if name else "[text]"


def _said(name: str) -> str:
    """As a recipe says it."""
    return f'"{name}"' if name else '"" ([text])'


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
