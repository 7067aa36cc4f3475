"""Images to moments by the autoencoders of ``autoencoders.py``."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch

from ...datasets.format.schema import LatentSpec
from ...errors import EncoderError, RecipeError, ResourceError
from ..config import VaeSection
from .autoencoders import (
    DECODER,
    RAE,
    RAE_POSITIONS,
    family_of,
    fixed_side_px,
    name_siglip_layers,
    patchify,
    set_decoder_positions,
    set_tiling,
    shift_and_scale,
    unpatchify,
)
from .model_files import VAE_WEIGHTS, ModelFiles, arithmetic, read_weight
from .pretrained import Pretrained, encode_if_it_fits, load_model

LOG = logging.getLogger(__name__)
CPU_BATCH = 32  # on a CPU more rows in a forward are no faster
MAX_BATCH = 256
MAX_BATCH_BYTES = 96 << 20  # of decoded pixels: up to eight batches are in host memory
SMALL_PX = 64
PROBE_PX = 256  # a multiple of every published downscale up to 128


class ImageEncoder(Pretrained):
    """A diffusers autoencoder.

    Args:
      section: of the recipe.
      device: of the model.
    Attributes:
      fixed_side_px: side of the only images that it takes, squares; None for any.
    Raises: EncoderError: missing, without weights, not an autoencoder, or its latents are not finite or always equal.
    """

    def __init__(self, section: VaeSection, device: torch.device) -> None:
        import diffusers  # takes three seconds

        files = ModelFiles(section, "vae.model", stem=VAE_WEIGHTS)
        place, config = files.where, files.read()
        self._family = family_of(config, place)
        self.fixed_side_px = fixed_side_px(config)
        name = config["_class_name"]
        model_class: Any = getattr(diffusers, name)
        if config.get("encoder_type") == "siglip2":
            name_siglip_layers()
        _ = files.weights  # checked before a library opens them
        dtype = arithmetic(section.dtype, device)

        def load() -> tuple[Any, dict[str, Any]]:
            options = {"torch_dtype": torch.float32, "use_safetensors": True, "output_loading_info": True}
            options["low_cpu_mem_usage"] = False  # otherwise diffusers requires accelerate
            model, loading = load_model(
                model_class.from_pretrained, files.folder, where=place, class_name=name, **options
            )
            if name == RAE and getattr(model, "decoder", None) is not None:
                set_decoder_positions(model, read_weight(files.weights, RAE_POSITIONS))
            return model, loading

        # In float32 first, so that the recipe's dtype does not round a batch norm.
        super().__init__(torch.float32, device, lambda _: self._tiled(load()[0]), where=place, dtype_key="vae.dtype")
        loaded, loading = load()
        if left_out := sorted(key for key in loading["unexpected_keys"] if not key.startswith(DECODER)):
            raise EncoderError(
                f"{place}: its weights hold '{left_out[0]}', which its config.json has no place for, so "
                "its latents would be wrong. Fetch or save the model again."
            )
        self._tile_px = section.tile_px
        self._model = self._on_device(loaded)
        self._probe_px = self.fixed_side_px or PROBE_PX
        self._probe_shape = self.encode(np.zeros((1, self._probe_px, self._probe_px, 3), np.uint8)).shape
        self._shift_and_scale = shift_and_scale(loaded, self._family, self.num_channels, place)
        self._dtype = getattr(torch, dtype)
        torch.nn.Module.to(self._model, self._dtype)  # diffusers' own method would warn
        self._tiled(self._model)
        self.check_probes(lambda pixels: [self.encode(pixels)], self.fixed_side_px or max(SMALL_PX, 2 * self.downscale))
        LOG.info("%s (%s) computes in %s on %s", place, name, dtype, device)
        self.identity = files.identity(name, dtype, "diffusers")

    @property
    def has_posterior(self) -> bool:
        """The encoder gives a mean and a log-variance, not one latent."""
        return self._family.has_posterior

    @property
    def has_decoder(self) -> bool:
        """Its latents can be decoded to images."""
        return getattr(self._model, "decoder", None) is not None

    @property
    def num_channels(self) -> int:
        """C of the latents, after patchify."""
        return self._probe_shape[1] // (2 if self.has_posterior else 1)

    @property
    def downscale(self) -> int:
        """Pixels of height or width for one latent position."""
        return self._probe_px // self._probe_shape[2]

    def latent_spec(self, section: VaeSection, dtype: str, *, batch_size: int = 0) -> LatentSpec:
        """The spec of the stored latents, with the model's shift and scale.

        Args:
          dtype: of the store.
          batch_size: images in a forward, if the section leaves it open.
        Raises: RecipeError: moments requested of an encoder without posterior.
        """
        keep = section.keep
        if keep in ("moments", "sample") and not self.has_posterior:
            raise RecipeError(
                f"vae.keep '{keep}': {self.identity.class_name} '{section.model}' is deterministic, it has no "
                'posterior. Use keep = "auto".'
            )
        kinds = {"auto": "mean_logvar", "moments": "mean_logvar", "mean": "mean", "sample": "sample"}
        kind: Any = kinds[keep] if self.has_posterior else "latent"
        if dtype == "int8" and kind == "mean_logvar":
            raise RecipeError(
                'store.dtype "int8": expected latents without a posterior, got mean and log-variance. Set vae.keep = '
                '"mean", or store.dtype = "float16".'
            )
        channels = self.num_channels
        shift, scale = self._shift_and_scale
        return LatentSpec(
            array="moments" if kind == "mean_logvar" else "latents",
            kind=kind,
            channels=channels,
            stored_channels=2 * channels if kind == "mean_logvar" else channels,
            downscale=self.downscale,
            dtype=dtype,
            shift=shift,
            scale=scale,
            flip=section.flip,
            batch_size=section.batch_size or batch_size,
            tile_px=section.tile_px,
            patchify=self._family.patchify,
        )

    def check_size(self, height_px: int, width_px: int) -> None:
        """Raise RecipeError for images of a size that the model would resize, or whose latents it would."""
        side_px = self.fixed_side_px
        if side_px and (height_px, width_px) != (side_px, side_px):
            raise RecipeError(
                f"vae '{self.identity.model}': {self.identity.class_name} encodes and decodes squares of {side_px} px "
                f"alone, got {height_px}x{width_px}. Use images of {side_px}x{side_px} px, or the autoencoder of "
                "another size."
            )

    def black(self, shape: tuple[int, ...]) -> np.ndarray:
        """Zeroed uint8 pixels to fill and encode; pinned memory for a GPU."""
        return torch.zeros(shape, dtype=torch.uint8, pin_memory=self._device.type == "cuda").numpy()

    def largest_batch(self, height_px: int, width_px: int) -> int:
        """The largest power of two of images of one size that fit into one forward, found by doubling.

        CPU_BATCH on a CPU; at most MAX_BATCH and MAX_BATCH_BYTES on any device.

        Raises: ResourceError: not even one fits.
        """
        max_rows = min(MAX_BATCH, max(1, MAX_BATCH_BYTES // (3 * height_px * width_px)))
        if self.device.type == "cpu":
            return min(CPU_BATCH, max_rows)
        fits, size = 0, 1
        while (
            size <= max_rows
            and encode_if_it_fits(self.encode, np.zeros((size, height_px, width_px, 3), np.uint8)) is not None
        ):
            fits, size = size, 2 * size
        if not fits:
            raise ResourceError(
                f"vae.batch_size 0: one image of {height_px}x{width_px} px does not fit into the memory of "
                f"{self.device}. Use vae.tile_px, a smaller vae.dtype, or another device."
            )
        return fits

    def _on_device(self, model: Any) -> Any:
        model = super()._on_device(model)
        if self._device.type == "cuda" and self._family.rank == 4:  # pixels have channels last: no transpose
            model.to(memory_format=torch.channels_last)
        return model

    def _tiled(self, model: Any) -> Any:
        if self._tile_px:
            set_tiling(model, self._tile_px, self.downscale // self._family.patchify)
        return model

    @torch.inference_mode()
    def encode(self, pixels: np.ndarray) -> np.ndarray:
        """Encode a batch of images of one size.

        Args:
          pixels: (B, height_px, width_px, 3) uint8.
        Returns: (B, 2C, H, W) mean then log-variance, or (B, C, H, W) latents, float32, raw, patchified.
        """
        batch = torch.from_numpy(np.require(pixels, requirements=["C", "W"]))
        batch = batch.to(self._device, non_blocking=True)  # reading the output synchronizes
        batch = batch.permute(0, 3, 1, 2).to(self._dtype)  # (B, 3, height_px, width_px)
        batch = batch / 255 if self._family.zero_to_one else batch / 127.5 - 1
        output = self._model.encode(batch.unsqueeze(2) if self._family.rank == 5 else batch)
        if self._family.has_posterior:
            moments = output.latent_dist.parameters
        else:
            moments = output.latents if hasattr(output, "latents") else output.latent
        if self._family.rank == 5:
            moments = moments.squeeze(2)
        if self._family.patchify > 1:  # the mean and the log-variance each
            moments = torch.cat([patchify(half, self._family.patchify) for half in moments.chunk(2, 1)], 1)
        return moments.float().cpu().numpy()

    @torch.inference_mode()
    def decode(self, latents: np.ndarray, *, zero_to_one: bool = False) -> np.ndarray:
        """Decode raw latents (neither shifted nor scaled, but patchified) to images.

        Args:
          latents: (B, C, H, W) float32.
          zero_to_one: the decoder gives pixels from 0 to 1, not from -1 to 1 (imported from EDM2).
        Returns: (B, height_px, width_px, 3) uint8.
        Raises: RecipeError: the latents are of another size than the model's only one.
        """
        self.check_size(latents.shape[2] * self.downscale, latents.shape[3] * self.downscale)
        raw = unpatchify(torch.from_numpy(latents).to(self._device, self._dtype), self._family.patchify)
        decoded = self._model.decode(raw.unsqueeze(2) if self._family.rank == 5 else raw).sample
        if self._family.rank == 5:
            decoded = decoded[:, :, 0]
        if zero_to_one or self._family.zero_to_one:
            decoded = decoded * 2 - 1
        pixels = ((decoded.float().clamp(-1, 1) + 1) * 127.5).round().byte()
        return pixels.permute(0, 2, 3, 1).cpu().numpy()
