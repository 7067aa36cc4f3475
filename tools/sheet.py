"""Contact sheets: pictures in a grid with their captions below, as one PNG."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from pydantic import ValidationError

from ..datasets.errors import EncoderError, StoreError
from ..datasets.latents import raw_latents
from ..datasets.schema import LatentSpec
from ..datasets.store import LatentStore
from ..precompute.config import VaeSection
from ..precompute.encoders import ImageEncoder

CELL_PX = 192
COLUMNS = 6
CAPTION_LINES = 3
FONT_PX = 13
LINE_PX = 16
MARGIN_PX = 8


def draw_sheet(pictures: Sequence[np.ndarray], captions: Sequence[str]) -> Image.Image:
    """Lay pictures out in a grid, each scaled to its cell and with its caption below.

    Args:
      pictures: (height, width, 3) uint8 each, of any sizes.
      captions: one a picture; long ones are cut.
    """
    columns = min(COLUMNS, len(pictures))
    rows = -(-len(pictures) // columns)
    step_x, step_y = CELL_PX + MARGIN_PX, CELL_PX + MARGIN_PX + CAPTION_LINES * LINE_PX
    sheet = Image.new("RGB", (columns * step_x + MARGIN_PX, rows * step_y + MARGIN_PX), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(FONT_PX)
    for i, (pixels, caption) in enumerate(zip(pictures, captions, strict=True)):
        left, top = MARGIN_PX + i % columns * step_x, MARGIN_PX + i // columns * step_y
        picture = Image.fromarray(pixels)
        scale = CELL_PX / max(picture.size)
        size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
        resample = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
        picture = picture.resize(size, resample)
        sheet.paste(picture, (left + (CELL_PX - size[0]) // 2, top + (CELL_PX - size[1]) // 2))
        lines = textwrap.wrap(_printable(caption), width=CELL_PX // 7)
        if len(lines) > CAPTION_LINES:
            lines = [*lines[: CAPTION_LINES - 1], lines[CAPTION_LINES - 1][:-3] + "..."]
        for number, text in enumerate(lines):
            draw.text((left, top + CELL_PX + 2 + number * LINE_PX), text, fill="black", font=font)
    return sheet


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)


def store_sheet(store: LatentStore, decoder: ImageEncoder, *, count: int, seed: int = 0) -> Image.Image:
    """Contact sheet of decoded records, spread evenly over the store.

    Args:
      decoder: of the store's VAE.
      count: of records.
    """
    sizes = store.buckets
    starts = np.cumsum([0, *sizes.values()])
    places = np.unique(np.linspace(0, starts[-1] - 1, min(count, int(starts[-1]))).round().astype(int))
    which = np.searchsorted(starts, places, side="right") - 1
    chosen = [(list(sizes)[b], int(place - starts[b])) for b, place in zip(which, places, strict=True)]
    if not chosen:
        raise StoreError(f"store '{store.path}': it holds no records, so there is nothing to show.")
    pictures, captions = [], []
    for bucket, position in chosen:
        index = store.index(bucket)
        record = store.record_at(int(index.records[position]))
        latent = stored_to_latent(store, store.latents(bucket).take(index.rows[position : position + 1]))
        pictures.append(decoder.decode(latent, zero_to_one=gives_zero_to_one(store.spec.latent))[0])
        captions.append(caption_of(store, record.caption_ids, record.label, record.key))
    return draw_sheet(pictures, captions)


def stored_to_latent(store: LatentStore, stored: np.ndarray) -> np.ndarray:
    """Raw latents to decode from stored rows: the mean where a posterior is stored; (B, C, H, W) float32."""
    rows = torch.from_numpy(stored.astype(np.float32)[:, : store.spec.latent.channels])
    return raw_latents(rows, store.spec.latent).numpy()


def gives_zero_to_one(spec: LatentSpec) -> bool:
    """The VAE's decoder was used on pictures from 0 to 1."""
    return spec.decoding is not None and spec.decoding.zero_to_one


def caption_of(store: LatentStore, caption_ids: Sequence[int], label: int, key: str) -> str:
    """What to write below a record: its first caption, else its class, else its key."""
    if caption_ids:
        return store.captions["text"][caption_ids[0]].as_py()
    if label >= 0 and store.spec.classes:
        return f"{label}: {store.spec.classes[label]}"
    return key


def load_decoder(section: Any, vae: str | None, device: torch.device) -> ImageEncoder:
    """The VAE that a store or snapshot was made with, or another one that the user names.

    Args:
      section: [vae] of the store's recipe.
      vae: hub id or folder instead.
    Raises: EncoderError: it is not to be had; the message says how to name another.
    """
    chosen = {"model": vae, "subfolder": "", "revision": ""} if vae else {}
    try:
        wanted = VaeSection.model_validate(section | chosen | {"dtype": "float32"})
    except (ValidationError, TypeError) as error:
        raise EncoderError(f"the [vae] of the recipe is none ({error}). Name a VAE with --vae PATH.") from error
    return ImageEncoder(wanted, device)
