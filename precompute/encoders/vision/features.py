"""Images to the tokens of a vision transformer, with which REPA and REG align a diffusion transformer.

The model gets the pixels that the autoencoder gets, normalised with its own mean and standard deviation, and then
resized so that its patches fill the grid of ``FeatureSpec.grid``.

Source: Yu et al. 2024, "Representation Alignment for Generation" (REPA): this order, a patch for 16 px of an image.
Wu et al. 2025, "Representation Entanglement for Generation" (REG): the class token beside the patches.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from torch.nn.functional import interpolate

from ....datasets.format.schema import FeatureSpec
from ....errors import EncoderError, RecipeError
from ...config import FeatureSection
from ..model_files import ModelFiles, arithmetic
from ..pretrained import Pretrained, load_transformer
from .families import (
    CLIP,
    CLIP_EMBEDDING,
    GREY_LEVELS,
    PREPROCESSOR,
    Family,
    blocks_of,
    family_of,
    normalisation,
    resample_positions,
)

LOG = logging.getLogger(__name__)
EMBEDDING = "embedding"
PX_A_PATCH = 16  # of an image, where the recipe leaves the resolution open


class FeatureEncoder(Pretrained):
    """A vision transformer.

    Args:
      section: of the recipe.
      images_px: ``images.resolution`` of the recipe.
      device: of the model.
      name: of the section, for messages.
    Raises:
      EncoderError: missing, without weights or preprocessor, of another kind, or its tokens are not finite or always
        equal.
      RecipeError: the model has no such layer or no class token.
    """

    def __init__(self, section: FeatureSection, images_px: int, device: torch.device, *, name: str = "NAME") -> None:
        what = f"features.{name}.model"
        files = ModelFiles(section, what, PREPROCESSOR)
        config = files.read()
        family = family_of(config, files.where)
        if section.output == EMBEDDING:
            family = embedding_family(section, family, f"features.{name}")
        mean, std = normalisation(files.read(PREPROCESSOR), files.where)
        _ = files.weights  # checked before a library opens them
        dtype = arithmetic(section.encoder_dtype, device)
        self._options, self._layer = dict(family.options), section.layer
        self._is_embedding = section.output == EMBEDDING
        if section.layer >= 0:
            self._options["output_hidden_states"] = True

        def load_weights(dtype: torch.dtype) -> Any:
            loaded = load_transformer(family.class_name, files.folder, dtype, files.where)
            check_choices(section, family, len(blocks_of(loaded)), f"features.{name}")
            if section.layer >= 0:
                del blocks_of(loaded)[max(1, section.layer) :]  # the others would be computed for nothing
            if family.positions:
                resample_positions(loaded, family, files.where)
            return loaded

        dtype_key = f"features.{name}.encoder_dtype"
        super().__init__(getattr(torch, dtype), device, load_weights, where=files.where, dtype_key=dtype_key)
        self._model = self._on_device(load_weights(self._dtype))
        self._spec = feature_spec(self._model.config, section, images_px, what)
        registers = getattr(self._model.config, "num_register_tokens", 0)
        self._num_prefix = registers + 1 if family.has_class_token else 0
        self._mean, self._std = (
            torch.tensor(numbers, dtype=torch.float32, device=device)[:, None, None] for numbers in (mean, std)
        )
        self.may_be_constant = section.layer == 0  # before the first block, the class token depends on no image
        self.check_probes(self.encode, images_px)
        LOG.info("%s (%s) computes in %s on %s", files.where, family.class_name, dtype, device)
        known = config.get("vision_config", config) | {"image_mean": mean, "image_std": std}
        self.identity = files.identity(family.class_name, dtype, "transformers", config=known)

    def spec(self) -> FeatureSpec:
        """The spec of the stored tokens."""
        return self._spec

    @torch.inference_mode()
    def encode(self, pixels: np.ndarray) -> list[np.ndarray]:
        """Encode a batch of images of one size.

        Args:
          pixels: (B, height_px, width_px, 3) uint8, as the autoencoder gets them.
        Returns: (B, T, D) float32 tokens of the patches, row by row, and (or) (B, D) of the class token, in this order.
        """
        batch = torch.from_numpy(np.require(pixels, requirements=["C", "W"]))
        batch = batch.to(self._device, non_blocking=True)  # reading the output synchronizes
        batch = batch.permute(0, 3, 1, 2).float() / GREY_LEVELS  # (B, 3, height_px, width_px) in 0..1
        batch = (batch - self._mean) / self._std
        rows, columns = self._spec.grid(*pixels.shape[1:3])
        size = (rows * self._spec.patch_px, columns * self._spec.patch_px)
        output = self._model(interpolate(batch, size, mode="bicubic").to(self._dtype), **self._options)
        if self._is_embedding:
            return [output.image_embeds.float().cpu().numpy()]
        tokens = output.last_hidden_state if self._layer < 0 else output.hidden_states[self._layer]
        parts = {"patches": [tokens[:, self._num_prefix :]], "cls": [tokens[:, 0]]}
        parts["both"] = parts["patches"] + parts["cls"]
        return [part.float().contiguous().cpu().numpy() for part in parts[self._spec.output]]


def feature_spec(config: Any, section: FeatureSection, images_px: int, what: str) -> FeatureSpec:
    """The spec of a model's tokens.

    Args:
      config: of the loaded model, with the defaults of its class.
      images_px: ``images.resolution`` of the recipe.
      what: key of the recipe, for messages.
    Raises:
      EncoderError: patches that are no squares, or other channels than red, green and blue.
      RecipeError: a resolution with more patches than the images have pixels.
    """
    patch_px, channels = config.patch_size, config.num_channels
    if not isinstance(patch_px, int) or patch_px < 1 or channels != 3:
        raise EncoderError(
            f"{what} '{section.model}': its config.json has patches of {str(patch_px)[:80]} px and "
            f"{str(channels)[:80]} channels, expected one number of pixels and 3 channels: red, green and blue."
        )
    resolution_px = section.resolution or max(1, round(images_px / PX_A_PATCH)) * patch_px
    if resolution_px > patch_px * images_px:
        raise RecipeError(
            f"{what.removesuffix('model')}resolution {resolution_px}: more patches than images of {images_px} px "
            f"have pixels. Expected {patch_px * images_px} or less; 0 chooses one."
        )
    return FeatureSpec(
        output="cls" if section.output == EMBEDDING else section.output,
        layer=section.layer,
        width=config.projection_dim if section.output == EMBEDDING else config.hidden_size,
        patch_px=patch_px,
        resolution_px=resolution_px,
        images_px=images_px,
        dtype=section.dtype,
    )


def embedding_family(section: FeatureSection, family: Family, what: str) -> Family:
    """A CLIP with its projection, whose (D,) output for an image lies in the space of captions.

    Raises: RecipeError: another model, or a layer, which is not projected.
    """
    if family is not CLIP or section.layer >= 0:
        raise RecipeError(
            f"{what}.output '{EMBEDDING}': only a CLIP has it, after its last layer; '{section.model}' is a "
            f'{family.class_name}. Use output = "cls" for its class token, or leave out layer.'
        )
    return CLIP_EMBEDDING


def check_choices(section: FeatureSection, family: Family, num_blocks: int, what: str) -> None:
    """Raise if a model does not have what the recipe wants to store.

    Raises: RecipeError: no such layer, or no class token.
    """
    if section.layer > num_blocks:
        raise RecipeError(
            f"{what}.layer {section.layer}: {family.class_name} '{section.model}' has {num_blocks} blocks, expected 0 "
            f"to {num_blocks}, or -1 for its output."
        )
    if section.output != "patches" and not family.has_class_token:
        raise RecipeError(
            f"{what}.output '{section.output}': {family.class_name} '{section.model}' has no class token. "
            'Use output = "patches".'
        )
