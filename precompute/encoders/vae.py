"""Pictures to moments by the autoencoders of ``autoencoders.py``, and loading both encoders of a recipe.

Each encoder has an identity, which the store's fingerprint hashes. Scale and shift come from the model's config
(``model_files.py``); captions are encoded in ``text.py``.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...datasets.errors import EncoderError, RecipeError
from ...datasets.format.schema import EncoderIdentity, LatentSpec
from ..config import PrecomputeRecipe, VaeSection
from .autoencoders import DECODER, check_normalisation, shift_and_scale
from .compiled import compile_encoder, compiling, eager, filled_up
from .model_files import (
    CONFIG,
    LOADING_ERRORS,
    VAE_WEIGHTS,
    arithmetic,
    check_loaded,
    hash_files,
    lasting_config,
    library_majors,
    model_name,
    read_config,
    resolve_model,
    shortened,
    weight_files,
    weight_names,
)
from .text import CaptionEncoder, CaptionTokenizer

PROBE_PX = 256  # a multiple of every published downscale up to 128


@contextlib.contextmanager
def unused_config_keys_unsaid() -> Iterator[None]:
    """Silence diffusers' warning about unused keys in a config.json, which published models have."""

    def is_other(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("The config attributes ")

    logger = logging.getLogger("diffusers.configuration_utils")
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


class ImageEncoder:
    """A diffusers autoencoder.

    Args:
      section: of the recipe.
      device: of the model.
    Attributes:
      turn: lock for threads that share it.
    Raises: EncoderError: missing, without weights, or not an autoencoder.
    """

    def __init__(self, section: VaeSection, device: torch.device) -> None:
        import diffusers  # takes three seconds

        model, subfolder = section.model, section.subfolder
        folder, revision = resolve_model(model, subfolder, section.revision, files=(CONFIG,), what="vae.model")
        config = read_config(folder, what="vae.model")
        check_normalisation(config, f"vae.model '{folder}'")
        name = config["_class_name"]
        model_class: Any = getattr(diffusers, name)
        names = (CONFIG, *weight_names(VAE_WEIGHTS))
        folder, _ = resolve_model(model, subfolder, revision or section.revision, files=names, what="vae.model")
        weights = weight_files(folder, VAE_WEIGHTS, what="vae.model")
        dtype = arithmetic(section.dtype, device)
        self._dtype, self._device = getattr(torch, dtype), device
        self.turn = threading.Lock()
        try:
            with unused_config_keys_unsaid():
                loaded, loading = model_class.from_pretrained(
                    folder,
                    torch_dtype=self._dtype,
                    use_safetensors=True,
                    low_cpu_mem_usage=False,  # otherwise diffusers requires accelerate
                    output_loading_info=True,
                )
        except LOADING_ERRORS as error:
            raise EncoderError(f"vae.model '{folder}': cannot be loaded as {name}: {shortened(error)}") from error
        check_loaded(loading, f"vae.model '{folder}'")
        if left_out := sorted(key for key in loading["unexpected_keys"] if not key.startswith(DECODER)):
            raise EncoderError(
                f"vae.model '{folder}': its weights hold '{left_out[0]}', which its config.json has no place for, so "
                "its latents would be others. Fetch or save the model again."
            )
        self._model = loaded.to(device).eval().requires_grad_(False)
        if device.type == "cuda":  # pixels have channels last, so convolutions need no transpose
            self._model.to(memory_format=torch.channels_last)
        self._mean_logvar = False
        self._probe = self._forward(np.zeros((1, PROBE_PX, PROBE_PX, 3), np.uint8))
        self._shift_and_scale = shift_and_scale(loaded.config, self.num_channels, f"vae.model '{folder}'")
        if section.tile_px:
            set_tiling(self._model, section.tile_px, self.downscale)
        self._is_compiled, self._batch_size = section.compile, section.batch_size
        if section.compile:  # after the probe, whose shape may not occur otherwise
            compile_encoder(self._model)
        self.identity = EncoderIdentity(
            model=model_name(section, folder),
            revision=revision,
            class_name=name,
            config=lasting_config(config),
            weights_sha256=hash_files(weights),
            tokenizer_sha256=None,
            dtype=dtype,
            libraries=library_majors("torch", "diffusers"),
        )

    @property
    def has_posterior(self) -> bool:
        """The encoder gives a mean and a log-variance, not one latent."""
        return self._mean_logvar

    @property
    def num_channels(self) -> int:
        """C of the latents."""
        return self._probe.shape[1] // (2 if self.has_posterior else 1)

    @property
    def downscale(self) -> int:
        """Pixels of height or width for one latent position."""
        return PROBE_PX // self._probe.shape[2]

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self._device

    def latent_spec(self, section: VaeSection, dtype: str, *, batch_size: int = 0) -> LatentSpec:
        """The spec of the stored latents, with the model's shift and scale.

        Args:
          dtype: of the store.
          batch_size: pictures in a forward, if the section leaves it open.
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
            compiled=section.compile,
        )

    def black(self, shape: tuple[int, ...]) -> np.ndarray:
        """Zeroed uint8 pixels to fill and encode; pinned memory for a GPU."""
        return torch.zeros(shape, dtype=torch.uint8, pin_memory=self._device.type == "cuda").numpy()

    def encode(self, pixels: np.ndarray) -> np.ndarray:
        """Encode a batch of pictures of one size.

        Args:
          pixels: (B, height_px, width_px, 3) uint8.
        Returns: (B, 2C, H, W) mean then log-variance, or (B, C, H, W) latents, float32, raw.
        Raises: ResourceError: vae.compile without a working compiler.
        """
        if not self._is_compiled:
            return self._forward(pixels)
        with compiling():
            return self._forward(filled_up(pixels, self._batch_size))[: len(pixels)]

    def encode_in_float32(self, pixels: np.ndarray) -> np.ndarray:
        """Encode in float32 whatever the recipe's dtype, one picture at a time; as ``encode``."""
        dtype = self._dtype
        try:
            self._dtype = torch.float32
            torch.nn.Module.to(self._model, torch.float32)  # diffusers' own method would warn
            with eager():
                return np.concatenate([self._forward(pixels[i : i + 1]) for i in range(len(pixels))])
        finally:
            self._dtype = dtype
            torch.nn.Module.to(self._model, dtype)

    @torch.inference_mode()
    def _forward(self, pixels: np.ndarray) -> np.ndarray:
        batch = torch.from_numpy(np.require(pixels, requirements=["C", "W"]))
        batch = batch.to(self._device, non_blocking=True)  # reading the output synchronizes
        batch = batch.permute(0, 3, 1, 2).to(self._dtype) / 127.5 - 1  # (B, 3, height_px, width_px) in -1..1
        output = self._model.encode(batch)
        if hasattr(output, "latent_dist"):
            self._mean_logvar = True
            moments = output.latent_dist.parameters
        else:
            moments = output.latents if hasattr(output, "latents") else output.latent
        return moments.float().cpu().numpy()

    @torch.inference_mode()
    def decode(self, latents: np.ndarray, *, zero_to_one: bool = False) -> np.ndarray:
        """Decode raw latents (neither shifted nor scaled) to pictures.

        Args:
          latents: (B, C, H, W) float32.
          zero_to_one: the decoder gives pixels from 0 to 1, not from -1 to 1 (imported from EDM2).
        Returns: (B, height_px, width_px, 3) uint8.
        """
        decoded = self._model.decode(torch.from_numpy(latents).to(self._device, self._dtype)).sample
        if zero_to_one:
            decoded = decoded * 2 - 1
        pixels = ((decoded.float().clamp(-1, 1) + 1) * 127.5).round().byte()
        return pixels.permute(0, 2, 3, 1).cpu().numpy()


def set_tiling(model: Any, tile_px: int, downscale: int) -> None:
    """Make a diffusers autoencoder encode large pictures in tiles that overlap by a quarter.

    Raises: RecipeError: its class cannot, or the tile size is not divisible into latent positions.
    """
    if tile_px % (4 * downscale):
        raise RecipeError(f"vae.tile_px {tile_px}: needed a multiple of {4 * downscale}, 4 places of a latent.")
    if hasattr(model, "tile_sample_min_height") and hasattr(model, "tile_sample_stride_height"):
        stride_px = 3 * tile_px // 4
        model.enable_tiling(tile_px, tile_px, stride_px, stride_px)
    elif hasattr(model, "tile_sample_min_size") and type(model).__name__ != "AutoencoderTiny":
        model.tile_sample_min_size, model.tile_latent_min_size = tile_px, tile_px // downscale
        model.tile_overlap_factor = 0.25
        model.enable_tiling()
    else:  # AutoencoderTiny's tiling always makes four channels
        raise RecipeError(
            f"vae.tile_px {tile_px}: {type(model).__name__} cannot encode in tiles. Set vae.tile_px = 0; a smaller "
            "vae.batch_size needs less memory too."
        )


@dataclass(frozen=True)
class Encoders:
    """The loaded encoders; no caption encoder if the recipe has no text."""

    image: ImageEncoder
    caption: CaptionEncoder | None

    @property
    def tokenizer(self) -> CaptionTokenizer | None:
        """Of the caption encoder."""
        return self.caption and self.caption.tokenizer


def load_encoders(recipe: PrecomputeRecipe, device: torch.device) -> Encoders:
    """Load the encoders of a recipe.

    Raises: EncoderError.
    """
    if recipe.text.kind == "none":
        return Encoders(ImageEncoder(recipe.vae, device), None)
    tokenizer = CaptionTokenizer(recipe.text)
    return Encoders(ImageEncoder(recipe.vae, device), CaptionEncoder(recipe.text, tokenizer, device))
