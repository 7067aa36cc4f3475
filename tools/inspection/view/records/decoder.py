"""Decoders of a store's pictures, at their size or as smaller previews."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .....datasets.errors import EncoderError
from .....datasets.format.buckets import bucket_size
from .....datasets.store import LatentStore

if TYPE_CHECKING:
    from .....precompute.encoders.vae import ImageEncoder

PREVIEW_PX, PREVIEW_LATENTS = 128, 16  # sides that a preview has at least, of its picture and of its latent

Decode = Callable[[np.ndarray, int], np.ndarray]
"""From rows as stored, (B, 2C, H, W) or (B, C, H, W), and a divisor of the sides, 1 for none, to pictures
(B, height_px, width_px, 3) uint8."""


def preview_divisor(store: LatentStore, bucket: str) -> int:
    """Sides of a picture of a bucket over those of its preview: a power of two, 1 where it is small already."""
    side_px, divisor = min(bucket_size(bucket)), 1
    smallest_px = max(PREVIEW_PX, PREVIEW_LATENTS * store.spec.latent.downscale)
    while side_px >= 2 * divisor * smallest_px:
        divisor *= 2
    return divisor


def decoder_of(store: LatentStore, vae: str | None, device: Callable[[], Any]) -> Decode:
    """The decoder of a store, or the one that the user names.

    Args:
      vae: hub id or folder of a VAE for the same latents, such as a tiny one; None: the store's own.
      device: returns that of the decoder.
    Raises: EncoderError: it cannot be loaded, or is for other latents.
    """
    try:
        from ...contact_sheet import gives_zero_to_one, load_decoder, stored_to_latent
    except ModuleNotFoundError as error:
        raise EncoderError(
            f"{error.name} is not installed. Install it with: pip install 'leandit[precompute]'."
        ) from error
    from .....datasets.revisions.encoder_paths import encoder_section

    spec = store.spec.latent
    section = encoder_section(store.spec, "vae", store.path)
    decoder: ImageEncoder = load_decoder(section if vae else _on_this_machine(section), vae, device())
    if decoder.num_channels != spec.channels or decoder.downscale != spec.downscale or not decoder.has_decoder:
        raise EncoderError(
            f"the VAE decodes {decoder.num_channels} channels of 1/{decoder.downscale} of the pixels, the store has "
            f"{spec.channels} of 1/{spec.downscale}. Give one for these latents with --vae."
        )
    own = _shift_and_scale(decoder) if vae and spec.decoding is None else None

    def decode(rows: np.ndarray, divisor: int) -> np.ndarray:
        raw = stored_to_latent(store, rows)
        if not decoder.fixed_side_px:
            raw = shrunk(raw, divisor)
        if own is not None:  # by what the model sees: a tiny VAE takes latents that its large one has yet to scale
            shift, scale = (np.array(values, np.float32)[:, None, None] for values in (spec.shift, spec.scale))
            raw = (raw - shift) * scale / own[1] + own[0]
        return decoder.decode(raw.astype(np.float32), zero_to_one=gives_zero_to_one(spec))

    return decode


def shrunk(latents: np.ndarray, divisor: int) -> np.ndarray:
    """(B, C, H / divisor, W / divisor), the means of squares; rows and columns that fill no square are left out."""
    height, width = (side // divisor for side in latents.shape[2:])
    whole = latents[:, :, : height * divisor, : width * divisor].astype(np.float32)
    return whole.reshape(*latents.shape[:2], height, divisor, width, divisor).mean((3, 5))


def _on_this_machine(section: dict[str, Any]) -> dict[str, Any]:
    """A store's section [vae] with folders instead of hub ids: nothing is fetched because a store names it.

    Raises: EncoderError: a model is not on this machine.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    from .....datasets.revisions.encoder_paths import PATHS
    from .....precompute.encoders.model_files import local_folder

    found = dict(section)
    for key in PATHS:
        model = section.get(key)
        if not isinstance(model, str) or not model or local_folder(model) is not None:
            continue
        revision = section.get("revision") if key == "model" else None
        try:
            found[key] = snapshot_download(model, revision=revision or None, local_files_only=True)
        except (HFValidationError, LocalEntryNotFoundError, OSError) as error:
            raise EncoderError(
                f"vae.{key} '{model}': it is not on this machine, and nothing is fetched because a store names it. "
                "Give a folder or a hub id with --vae."
            ) from error
    return found


def _shift_and_scale(decoder: Any) -> tuple[np.ndarray, np.ndarray]:
    """Of a VAE, for (B, C, H, W)."""
    from .....precompute.config import VaeSection

    spec = decoder.latent_spec(VaeSection(), "float32")
    return tuple(np.array(values, np.float32)[:, None, None] for values in (spec.shift, spec.scale))  # pyright: ignore
