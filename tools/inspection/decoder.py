"""From the rows of a store, and from latents that a model has drawn, to RGB images."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

from ...datasets.batches.latents import raw_latents
from ...datasets.errors import EncoderError
from ...datasets.format.schema import LatentSpec
from ...datasets.revisions.encoder_paths import vae_of
from ...datasets.store import LatentStore
from ...precompute.config import VaeSection
from ...precompute.encoders.model_files import nothing_fetched
from ...precompute.encoders.vae import ImageEncoder

TINY = "AutoencoderTiny"


class LatentDecoder:
    """The VAE of a store or run, or the one that the user names.

    Only a VAE that the user names is fetched from the hub; that of a store or run has to be on this machine.

    Args:
      made_by: the VAE of the latents, as of ``vae_of``.
      spec: of the latents.
      vae: hub id or folder of another VAE for the same latents, such as a tiny one; None: that of ``made_by``.
      where: whose latents they are, for errors.
    Raises: EncoderError: it cannot be loaded, or is for other latents.
    """

    def __init__(
        self, made_by: Mapping[str, Any], spec: LatentSpec, vae: str | None, device: torch.device, *, where: str
    ) -> None:
        self._spec = spec
        self._encoder = encoder = _load(made_by["model"], vae, device)
        self.identity = encoder.identity
        self.is_own = self.identity.weights_sha256 == made_by["weights_sha256"]
        self.fixed_side_px = encoder.fixed_side_px
        if (encoder.num_channels, encoder.downscale) != (spec.channels, spec.downscale) or not encoder.has_decoder:
            raise EncoderError(
                f"vae '{self.identity.model}': it decodes {encoder.num_channels if encoder.has_decoder else 'no'} "
                f"channels of 1/{encoder.downscale} of the pixels, the latents of {where} have {spec.channels} of "
                f"1/{spec.downscale}. Give a VAE for these latents with --vae."
            )
        # The latents of a tiny VAE are those of its large one after shift and scale.
        is_rescaled = (self.identity.class_name == TINY) != (made_by.get("class_name") == TINY)
        self._rescaling = _rescaling(made_by, spec, encoder, where) if is_rescaled else None

    @classmethod
    def of_store(cls, store: LatentStore, vae: str | None, device: torch.device) -> LatentDecoder:
        """The decoder of a store's rows; arguments and errors as of the class."""
        made_by = vae_of(store.spec, store.path)
        return cls(made_by, store.spec.latent, vae, device, where=f"store '{store.path}'")

    def raw(self, rows: np.ndarray) -> np.ndarray:
        """Raw latents of rows as stored; the mean of a stored posterior.

        Args:
          rows: (B, 2C, H, W) moments or (B, C, H, W) latents.
        Returns: (B, C, H, W) float32.
        """
        means = torch.from_numpy(rows[:, : self._spec.channels].astype(np.float32))
        return raw_latents(means, self._spec).numpy()

    def decode(self, raw: np.ndarray) -> np.ndarray:
        """Images of raw latents.

        Args:
          raw: (B, C, H, W) float32, neither shifted nor scaled.
        Returns: (B, height_px, width_px, 3) uint8.
        """
        if self._rescaling:
            shift, scale, own_shift, own_scale = self._rescaling
            raw = (raw - shift) * scale / own_scale + own_shift
        decoding = self._spec.decoding
        return self._encoder.decode(raw, zero_to_one=decoding is not None and decoding.zero_to_one)

    def decode_rows(self, rows: np.ndarray) -> np.ndarray:
        """Images of rows as stored, (B, height_px, width_px, 3) uint8."""
        return self.decode(self.raw(rows))


def _load(section: Any, vae: str | None, device: torch.device) -> ImageEncoder:
    other = {"model": vae, "subfolder": "", "revision": "", "config": ""} if vae else {}
    try:
        vae_section = VaeSection.model_validate(section | other | {"dtype": "float32"})
    except (ValidationError, TypeError) as error:
        raise EncoderError(f"section [vae] of the recipe is invalid ({error}). Give a VAE with --vae PATH.") from error
    try:
        with contextlib.nullcontext() if vae else nothing_fetched():
            return ImageEncoder(vae_section, device)
    except EncoderError as error:
        raise EncoderError(f"{error} If the VAE is in another folder, give it with --vae.") from error


def _rescaling(made_by: Mapping[str, Any], spec: LatentSpec, encoder: ImageEncoder, where: str) -> list[np.ndarray]:
    """Shift and scale of the VAE of the latents, then of the decoder, (C, 1, 1) float32 each."""
    own = encoder.latent_spec(VaeSection(), "float32")
    # Snapshots of earlier releases have the normalization of the recipe only.
    numbers = made_by.get("shift", spec.shift), made_by.get("scale", spec.scale), own.shift, own.scale
    try:
        return [np.array(each, np.float32).reshape(spec.channels, 1, 1) for each in numbers]
    except (TypeError, ValueError) as error:
        raise EncoderError(
            f"vae '{encoder.identity.model}': it takes latents after the shift and scale of their VAE, and {where} "
            "does not have these. Give the VAE itself with --vae."
        ) from error
