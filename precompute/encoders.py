"""The two encoder roles: pictures to moments (any diffusers autoencoder), captions to embeddings (any T5).

Weights come from a hub id, a folder, or from this package ("shipped:vae"), as safetensors only. Each encoder knows its
identity: what the store's fingerprint hashes. Scale and shift are read from the model's own config, never assumed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from transformers import AutoTokenizer, T5EncoderModel
from transformers.utils import logging as transformers_logging

from ..datasets.errors import EncoderError, RecipeError
from ..datasets.files import sha256_file, sha256_of
from ..datasets.schema import EncoderIdentity, LatentSpec, TextSpec
from .config import PrecomputeRecipe, TextSection, VaeSection

SHIPPED = "shipped:"
CONFIG = "config.json"
PROBE_PX = 256  # a multiple of every published downscale up to 128
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
        config = _read_config(folder, what="vae.model")
        name = str(config.get("_class_name"))
        model_class = getattr(diffusers, name, None) if name.startswith("Autoencoder") else None
        if model_class is None:
            raise EncoderError(f"vae.model '{folder}': its config.json says '{name}', needed a diffusers autoencoder.")
        weights = _weight_files(folder, "diffusion_pytorch_model", what="vae.model")
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
        except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
            raise EncoderError(f"vae.model '{folder}': cannot be loaded as {name}: {error}") from error
        _check_loaded(loading, f"vae.model '{folder}'")
        self._model = model.to(device).eval().requires_grad_(False)
        self._mean_logvar = False
        self._probe = self.encode(np.zeros((1, PROBE_PX, PROBE_PX, 3), np.uint8))
        self.identity = EncoderIdentity(
            model=_model_name(section, folder),
            revision=revision,
            class_name=name,
            config=_lasting(config),
            weights_sha256=_hash_files(weights),
            tokenizer_sha256=None,
            dtype=dtype,
            libraries=_majors("torch", "diffusers"),
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
        scale = config.get("scaling_factor") or 1.0
        shift = config.get("shift_factor") or 0.0
        means, stds = config.get("latents_mean"), config.get("latents_std")
        return LatentSpec(
            array="moments" if kind == "mean_logvar" else "latents",
            kind=kind,
            channels=channels,
            stored_channels=2 * channels if kind == "mean_logvar" else channels,
            downscale=PROBE_PX // self._probe.shape[2],
            dtype=dtype,
            shift=list(means) if means else [shift] * channels,
            scale=[scale / std for std in stds] if stds else [scale] * channels,
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
    def decode(self, latents: np.ndarray) -> np.ndarray:
        """Decode raw latents (neither shifted nor scaled) to pictures.

        Args:
          latents: (B, C, H, W) float32.
        Returns: (B, height_px, width_px, 3) uint8.
        """
        decoded = self._model.decode(torch.from_numpy(latents).to(self._device, self._dtype)).sample
        pixels = ((decoded.float().clamp(-1, 1) + 1) * 127.5).round().byte()
        return pixels.permute(0, 2, 3, 1).cpu().numpy()


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
        config = _read_config(self.model_folder, what="text.model")
        self.vocabulary_size = int(config.get("vocab_size", 0))
        self._max_tokens = section.max_tokens
        tokenizer_folder, _ = resolve_model(
            section.model, section.tokenizer_subfolder, section.revision, what="text.model"
        )
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
        except (OSError, ValueError, ImportError) as error:
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
        config = _read_config(folder, what="text.model")
        if config.get("model_type") != "t5":
            raise EncoderError(
                f"text.model '{folder}': its config.json says '{config.get('model_type')}', needed 't5'."
            )
        weights = _weight_files(folder, "model", what="text.model")
        dtype = arithmetic(section.dtype, device)
        self._dtype, self._device, self.tokenizer = getattr(torch, dtype), device, tokenizer
        transformers_logging.disable_progress_bar()  # of the weights being read; the command shows its own
        try:
            # Loaded in its dtype, not cast after: T5 keeps "wo" in float32 when the rest is float16.
            loaded: Any = T5EncoderModel.from_pretrained(
                folder, dtype=self._dtype, use_safetensors=True, output_loading_info=True
            )
        except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
            raise EncoderError(f"text.model '{folder}': cannot be loaded as a T5 encoder: {error}") from error
        model, loading = loaded
        _check_loaded(loading, f"text.model '{folder}'")
        self._model = model.to(device).eval().requires_grad_(False)
        self.width = int(config["d_model"])
        self.identity = EncoderIdentity(
            model=_model_name(section, folder),
            revision=tokenizer.revision,
            class_name="T5EncoderModel",
            config=_lasting(config),
            weights_sha256=_hash_files(weights),
            tokenizer_sha256=tokenizer.sha256,
            dtype=dtype,
            libraries=_majors("torch", "transformers"),
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


def resolve_model(model: str, subfolder: str, revision: str, *, what: str) -> tuple[Path, str | None]:
    """Find the folder of a model, fetching it from the hub if it is a hub id.

    Returns: the folder, and the commit where it came from the hub.
    Raises: EncoderError: there is no such folder, and the hub does not give it.
    """
    folder = local_folder(model)
    if folder is not None:
        if (folder / CONFIG).is_file():
            return folder, None  # the model itself, not a pipeline that holds it
        if not (folder / subfolder).is_dir():
            raise EncoderError(
                f"{what} '{model}': there is no such folder as '{folder / subfolder}'. Check the recipe."
            )
        return folder / subfolder, None
    prefix = f"{subfolder}/" if subfolder else "**/"
    patterns = [pattern for name in ("*.json", "*.safetensors", "*.model") for pattern in (prefix + name, name)]
    try:
        fetched = Path(snapshot_download(model, revision=revision or None, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise EncoderError(
            f"{what} '{model}': not a folder here, and the hub does not give it ({reason}). "
            f"Check the name, log in with 'hf auth login', or give a folder with --set {what}=PATH."
        ) from error
    return fetched / subfolder, fetched.name


def local_folder(model: str) -> Path | None:
    """Folder of a model that needs no hub, or None for a hub id."""
    if model.startswith(SHIPPED):
        name = model.removeprefix(SHIPPED)
        folder = Path(__file__).parent / "demo_encoders" / name
        if not name.isidentifier() or not folder.is_dir():
            raise EncoderError(f"'{model}': no such encoder ships with leandit; there are shipped:vae and shipped:t5.")
        return folder
    path = Path(model).expanduser()
    if path.is_dir() or model.startswith((".", "/", "~")) or model.count("/") != 1:
        return path
    return None


def _read_config(folder: Path, *, what: str) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise EncoderError(f"{what} '{folder}': there is no 'config.json'. Needed a folder saved by save_pretrained.")
    try:
        config = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise EncoderError(f"{what} '{path}': not valid JSON ({error}).") from error
    if not isinstance(config, dict):
        raise EncoderError(f"{what} '{path}': needed a JSON object.")
    return config


def _weight_files(folder: Path, stem: str, *, what: str) -> list[Path]:
    files = sorted(path for path in folder.glob(f"{stem}*.safetensors") if ".fp16." not in path.name)
    if not files:
        others = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
        raise EncoderError(
            f"{what} '{folder}': there are no weights '{stem}*.safetensors' (found: {others}). "
            "Only safetensors are read; convert other weights with save_pretrained(..., safe_serialization=True)."
        )
    return files


def _check_loaded(loading: dict[str, Any], where: str) -> None:
    """The libraries fill what a file lacks with random numbers: refuse that."""
    if missing := sorted(loading.get("missing_keys") or ()):
        raise EncoderError(
            f"{where}: {len(missing)} weights are missing from its safetensors, the first is '{missing[0]}'. "
            "Fetch or save the model again."
        )


def _model_name(section: VaeSection | TextSection, folder: Path) -> str:
    """What the recipe names, with its subfolder where the model lies in it."""
    in_subfolder = section.subfolder and folder != local_folder(section.model)
    return f"{section.model}/{section.subfolder}" if in_subfolder else section.model


def _hash_files(files: list[Path]) -> str:
    return sha256_of([[path.name, sha256_file(path)] for path in files])


def _lasting(config: dict[str, Any]) -> dict[str, Any]:
    """A config without what does not change the numbers."""
    volatile = ("_diffusers_version", "transformers_version", "_name_or_path", "architectures", "torch_dtype", "dtype")
    return {key: value for key, value in sorted(config.items()) if key not in volatile}


def _majors(*packages: str) -> dict[str, str]:
    """Major versions of libraries; of those before 1.0, the minor too."""
    majors = {}
    for name in packages:
        major, minor = metadata.version(name).split(".")[:2]
        majors[name] = f"0.{minor}" if major == "0" else major
    return majors
