"""The two encoder roles: pictures to moments (any diffusers autoencoder), captions to embeddings (any T5).

Each encoder knows its identity: what the store's fingerprint hashes. Scale and shift are read from the model's own
config, never assumed. Where the files come from stands in ``model_files.py``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import diffusers
import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoTokenizer, T5EncoderModel
from transformers.utils import logging as transformers_logging

from ..datasets.errors import EncoderError, RecipeError
from ..datasets.hashing import sha256_of
from ..datasets.schema import EncoderIdentity, LatentSpec, TextSpec
from .config import PrecomputeRecipe, TextSection, VaeSection
from .model_files import (
    check_loaded,
    check_tokenizer_files,
    hash_files,
    lasting_config,
    library_majors,
    model_name,
    read_config,
    resolve_model,
    weight_files,
)

PROBE_PX = 256  # a multiple of every published downscale up to 128
# What the libraries raise at a config or a file of others that is not as they need it.
LOADING_ERRORS = (
    OSError,
    ValueError,
    TypeError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    NotImplementedError,
    RuntimeError,
    LookupError,
    ImportError,
    SafetensorError,
    StrictDataclassError,
)
TEMPLATE = "{caption}"  # captions are stripped of white space at both ends, and otherwise left as they are


class ImageEncoder:
    """A diffusers autoencoder.

    Args:
      section: of the recipe.
      device: where it runs.
    Raises: EncoderError: missing, without weights, or no autoencoder.
    """

    def __init__(self, section: VaeSection, device: torch.device) -> None:
        folder, revision = resolve_model(section.model, section.subfolder, section.revision, what="vae.model")
        config = read_config(folder, what="vae.model")
        name = str(config.get("_class_name"))
        model_class: Any = getattr(diffusers, name, None) if name.startswith("Autoencoder") else None
        if torch.nn.Module not in getattr(model_class, "__mro__", ()):
            raise EncoderError(f"vae.model '{folder}': its config.json says '{name}', needed a diffusers autoencoder.")
        weights = weight_files(folder, "diffusion_pytorch_model", what="vae.model")
        dtype = arithmetic(section.dtype, device)
        self._dtype, self._device = getattr(torch, dtype), device
        try:
            model, loading = model_class.from_pretrained(
                folder,
                torch_dtype=self._dtype,
                use_safetensors=True,
                low_cpu_mem_usage=False,  # else diffusers asks for accelerate
                output_loading_info=True,
            )
        except LOADING_ERRORS as error:
            raise EncoderError(f"vae.model '{folder}': cannot be loaded as {name}: {error}") from error
        check_loaded(loading, f"vae.model '{folder}'")
        self._model = model.to(device).eval().requires_grad_(False)
        self._mean_logvar = False
        self._probe = self.encode(np.zeros((1, PROBE_PX, PROBE_PX, 3), np.uint8))
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

    def latent_spec(self, section: VaeSection, dtype: str) -> LatentSpec:
        """What the store will hold, with the model's own shift and scale.

        Raises: RecipeError: the recipe wants moments of an encoder without posterior.
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
        config = self._model.config
        try:
            shift, scale = _shift_and_scale(config, channels)
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise EncoderError(
                f"vae.model '{section.model}': scaling_factor, shift_factor, latents_mean or latents_std of its config "
                f"are not a number each, or one for each of {channels} channels ({error})."
            ) from error
        return LatentSpec(
            array="moments" if kind == "mean_logvar" else "latents",
            kind=kind,
            channels=channels,
            stored_channels=2 * channels if kind == "mean_logvar" else channels,
            downscale=PROBE_PX // self._probe.shape[2],
            dtype=dtype,
            shift=shift,
            scale=scale,
            flip=section.flip,
            batch_size=section.batch_size,
        )

    def encode(self, pixels: np.ndarray) -> np.ndarray:
        """Encode a batch of pictures of one size.

        Args:
          pixels: (B, height_px, width_px, 3) uint8.
        Returns: (B, 2C, H, W) mean then log-variance, or (B, C, H, W) latents, float32, raw.
        """
        return self._forward(pixels)

    def encode_in_float32(self, pixels: np.ndarray) -> np.ndarray:
        """Encode in float32, whatever the recipe's arithmetic, a picture at a time; as ``encode``."""
        dtype, self._dtype = self._dtype, torch.float32
        self._model.float()
        try:
            return np.concatenate([self._forward(pixels[i : i + 1]) for i in range(len(pixels))])
        finally:
            self._dtype = dtype
            self._model.to(dtype)

    @torch.inference_mode()
    def _forward(self, pixels: np.ndarray) -> np.ndarray:
        batch = torch.from_numpy(np.require(pixels, requirements=["C", "W"])).to(self._device)
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
          zero_to_one: the decoder gives pixels from 0 to 1 for them, not from -1 to 1 (imported from EDM2).
        Returns: (B, height_px, width_px, 3) uint8.
        """
        decoded = self._model.decode(torch.from_numpy(latents).to(self._device, self._dtype)).sample
        if zero_to_one:
            decoded = decoded * 2 - 1
        pixels = ((decoded.float().clamp(-1, 1) + 1) * 127.5).round().byte()
        return pixels.permute(0, 2, 3, 1).cpu().numpy()


def _shift_and_scale(config: Any, channels: int) -> tuple[list[float], list[float]]:
    """One shift and one scale for each channel, as a diffusers config gives them.

    Raises: TypeError, ValueError, ZeroDivisionError: they are no numbers, or too few.
    """
    scale = config.get("scaling_factor") or 1.0
    shift = config.get("shift_factor") or 0.0
    means, stds = config.get("latents_mean"), config.get("latents_std")
    shifts = list(means) if means else [shift] * channels
    scales = [scale / std for std in stds] if stds else [scale] * channels
    if not len(shifts) == len(scales) == channels or not all(np.isfinite([*shifts, *scales])):
        raise ValueError(f"{len(shifts)} and {len(scales)} numbers")
    return shifts, scales


class CaptionTokenizer:
    """The tokenizer of a T5: counts tokens when planning, makes ids when encoding.

    Args:
      section: of the recipe.
    Raises: EncoderError: missing, or a vocabulary that cannot be the model's.
    """

    def __init__(self, section: TextSection) -> None:
        self.model_folder, self.revision = resolve_model(
            section.model, section.subfolder, section.revision, what="text.model"
        )
        config = read_config(self.model_folder, what="text.model")
        vocabulary_size = config.get("vocab_size", 0)
        if not isinstance(vocabulary_size, int):
            raise EncoderError(f"text.model '{self.model_folder}': config.json has no whole number as 'vocab_size'.")
        self.vocabulary_size = vocabulary_size
        self._max_tokens = section.max_tokens
        tokenizer_folder, _ = resolve_model(
            section.model, section.tokenizer_subfolder, section.revision, what="text.model"
        )
        check_tokenizer_files(tokenizer_folder, what="text.model")
        try:
            # Said, because without it a library asks on the terminal whether code of the folder may run.
            self._tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder, trust_remote_code=False)
        except Exception as error:  # of a damaged tokenizer.json, its library raises just this class
            if type(error) is not Exception and not isinstance(error, LOADING_ERRORS):
                raise
            raise EncoderError(f"text.model '{tokenizer_folder}': no usable tokenizer: {error}") from error
        # A folder with only spiece.model can load as some hundred tokens that turn every word into <unk>.
        if not 0.9 * self.vocabulary_size <= len(self._tokenizer) <= self.vocabulary_size:
            raise EncoderError(
                f"text.model '{tokenizer_folder}': the tokenizer knows {len(self._tokenizer)} tokens, the encoder "
                f"{self.vocabulary_size}, so they do not belong together. Put the model's own tokenizer.json there."
            )
        self.sha256 = sha256_of(json.loads(self._tokenizer.backend_tokenizer.to_str()))

    def count(self, captions: Sequence[str]) -> list[int]:
        """Number of tokens of each caption, the end mark included, before any cut."""
        if not captions:
            return []
        return [len(ids) for ids in self._tokenizer(list(captions), truncation=False, verbose=False)["input_ids"]]

    def ids(self, captions: Sequence[str]) -> torch.Tensor:
        """Token ids of captions of equal length, cut at max_tokens; (B, L) int64."""
        encoded = self._tokenizer(list(captions), truncation=True, max_length=self._max_tokens)["input_ids"]
        return torch.tensor(encoded)

    def null_ids(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and attention mask of the empty caption, padded to max_tokens; both (1, max_tokens) int64."""
        encoded = self._tokenizer("", padding="max_length", truncation=True, max_length=self._max_tokens)
        return torch.tensor([encoded["input_ids"]]), torch.tensor([encoded["attention_mask"]])


class CaptionEncoder:
    """A T5 encoder.

    Args:
      section: of the recipe.
      tokenizer: of the same section.
      device: where it runs.
    Raises: EncoderError: missing, without weights, or no T5.
    """

    def __init__(self, section: TextSection, tokenizer: CaptionTokenizer, device: torch.device) -> None:
        folder = tokenizer.model_folder
        config = read_config(folder, what="text.model")
        if config.get("model_type") != "t5":
            raise EncoderError(
                f"text.model '{folder}': its config.json says '{config.get('model_type')}', needed 't5'."
            )
        weights = weight_files(folder, "model", what="text.model")
        dtype = arithmetic(section.dtype, device)
        self._dtype, self._device, self.tokenizer = getattr(torch, dtype), device, tokenizer
        transformers_logging.disable_progress_bar()  # of the weights being read; the command shows its own
        try:
            # Loaded in its dtype, not cast after: T5 keeps "wo" in float32 when the rest is float16.
            loaded: Any = T5EncoderModel.from_pretrained(
                folder, dtype=self._dtype, use_safetensors=True, output_loading_info=True
            )
        except LOADING_ERRORS as error:
            raise EncoderError(f"text.model '{folder}': cannot be loaded as a T5 encoder: {error}") from error
        model, loading = loaded
        check_loaded(loading, f"text.model '{folder}'")
        self._model = model.to(device).eval().requires_grad_(False)
        self.width = int(config["d_model"])
        self.identity = EncoderIdentity(
            model=model_name(section, folder),
            revision=tokenizer.revision,
            class_name="T5EncoderModel",
            config=lasting_config(config),
            weights_sha256=hash_files(weights),
            tokenizer_sha256=tokenizer.sha256,
            dtype=dtype,
            libraries=library_majors("torch", "transformers"),
        )

    def text_spec(self, section: TextSection, dtype: str) -> TextSpec:
        """What the store will hold."""
        return TextSpec(
            kind="t5",
            width=self.width,
            max_tokens=section.max_tokens,
            dtype=dtype,
            template=TEMPLATE,
            batch_size=section.batch_size,
        )

    def encode(self, captions: Sequence[str]) -> np.ndarray:
        """Encode captions of equal length, with no padding at all; (B, L, D) float32."""
        ids = self.tokenizer.ids(captions)
        return self._checked(ids, torch.ones_like(ids))

    def encode_null(self) -> np.ndarray:
        """Encode the empty caption at full length, as the trainers pad it; (max_tokens, D) float32."""
        return self._checked(*self.tokenizer.null_ids())[0]

    def _checked(self, ids: torch.Tensor, mask: torch.Tensor) -> np.ndarray:
        embeddings = self._forward(ids, mask)
        if not np.isfinite(embeddings).all():
            raise EncoderError(
                f"text.model: {self.identity.class_name} in {self.identity.dtype} gave NaN or infinity. "
                'Use text.dtype = "bfloat16" or "float32".'
            )
        return embeddings

    @torch.inference_mode()
    def _forward(self, ids: torch.Tensor, mask: torch.Tensor) -> np.ndarray:
        output = self._model(input_ids=ids.to(self._device), attention_mask=mask.to(self._device))
        return output.last_hidden_state.float().cpu().numpy()


@dataclass(frozen=True)
class Encoders:
    """The loaded encoders; no caption encoder where the recipe wants no text."""

    image: ImageEncoder
    caption: CaptionEncoder | None

    @property
    def tokenizer(self) -> CaptionTokenizer | None:
        """Of the caption encoder."""
        return self.caption and self.caption.tokenizer


def load_encoders(recipe: PrecomputeRecipe, device: torch.device) -> Encoders:
    """Load what the recipe names.

    Raises: EncoderError; RecipeError: a kind of text encoder that this release does not have.
    """
    if recipe.text.kind == "gemma2":
        raise RecipeError("text.kind 'gemma2': this release encodes captions with T5 only. Use text.kind = \"t5\".")
    if recipe.text.kind == "none":
        return Encoders(ImageEncoder(recipe.vae, device), None)
    tokenizer = CaptionTokenizer(recipe.text)
    return Encoders(ImageEncoder(recipe.vae, device), CaptionEncoder(recipe.text, tokenizer, device))


def arithmetic(dtype: str, device: torch.device) -> str:
    """Dtype that an encoder computes in: the recipe's, but float32 on a CPU.

    There, 16 bits were seven times slower (TAESD at 256 px, no bf16 units) and are less exact. The identity in
    the store says what was computed in.
    """
    return "float32" if device.type == "cpu" else dtype
