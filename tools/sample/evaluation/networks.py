"""The networks of an evaluation: Inception-v3 or a vision transformer for features, and CLIP for captions.

Images become squares of the side that a network takes, float32 from 0 to 255. "antialiased" is bicubic, with the filter
as wide as the image is reduced, as Pillow has it; values are not rounded. "tensorflow" is the bilinear resize of
TensorFlow 1, without a filter and with corners that do not correspond: it is part of the Inception graph that ADM's
evaluator and the original FID run.

Sources: Parmar et al. 2022, "On Aliased Resizing and Surprising Subtleties in GAN Evaluation" (clean-fid); Hessel et
al. 2021, "CLIPScore", with the factor 100 of torchmetrics in place of 2.5.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cosine_similarity, interpolate

from ....datasets.errors import EncoderError, RecipeError
from ....precompute.encoders.model_files import (
    CONFIG,
    TEXT_WEIGHTS,
    TOKENIZER_FILES,
    check_depth,
    check_header,
    hash_files,
    read_config,
    resolve_model,
    shortened,
    weight_files,
    weight_names,
)
from ....precompute.encoders.text.tokenizer import load_tokenizer
from ....precompute.encoders.vision.families import CLIP, Family, family_of, load_vision_model
from ....precompute.encoders.vision.normalisation import GREY_LEVELS, PREPROCESSOR, normalisation
from ....precompute.importing.formats.untrusted.torch_files import read_tensors
from ..request import INCEPTION
from .inception import SIDE_PX, Inception

Resize = Literal["antialiased", "tensorflow"]
Images = Sequence[np.ndarray]
"""(height, width, 3) uint8 each, of any sizes."""
INCEPTION_FILES = ("weights-inception-2015-12-05-6726825d.pth", "pt_inception-2015-12-05-6726825d.pth")
WEIGHT_SUFFIXES = (".pth", ".pt", ".safetensors")
LARGEST_SIDE_PX = 1 << 12
# Embeddings in the space that CLIP's images and captions share; CMMD is defined on them.
CLIP_EMBEDDING = dataclasses.replace(CLIP, class_name="CLIPVisionModelWithProjection")
CLIP_TOWERS = dataclasses.replace(CLIP, class_name="CLIPModel")


@dataclass(frozen=True)
class Network:
    """Images to features.

    Args:
      description: what determines the features, as plain values.
      features: (B, D) float32 of images.
      is_clip: the features are CLIP's embeddings of images.
    """

    description: dict[str, Any]
    features: Callable[[Images], np.ndarray]
    is_clip: bool = False


def open_network(name: str, resize: Resize | None, device: torch.device) -> Network:
    """The network that ``--features`` names.

    Args:
      name: "inception", a file of its weights, or a folder or hub id of a vision model.
      resize: None: antialiased. "tensorflow": as in the original FID and ADM's evaluator.
    Raises: EncoderError: missing, or not usable; RecipeError: a resize that only Inception has.
    """
    if name == INCEPTION or Path(name).suffix in WEIGHT_SUFFIXES:
        return _open_inception(name, resize or "antialiased", device)
    if resize == "tensorflow":
        raise RecipeError(f"--resize tensorflow: only Inception has it, not '{name}'. Leave it out.")
    return _open_vision(name, device)


# ----------------------------------------------------------------------------------------------------------- Inception


def _open_inception(name: str, resize: Resize, device: torch.device) -> Network:
    """Inception-v3 with published weights, where torch-fidelity, torchmetrics and pytorch-fid keep them; D = 2048.

    Raises: EncoderError: no such file, or it does not hold its weights.
    """
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    places = [folder / file for file in INCEPTION_FILES] if name == INCEPTION else [Path(name).expanduser()]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        looked = ", ".join(f"'{place}'" for place in places)
        raise EncoderError(
            f"--features {name}: there is no file {looked}. Fetch "
            f"{INCEPTION_FILES[0]} from the releases of torch-fidelity (github.com/toshas/torch-fidelity, v0.2.0), and "
            "give it with --features FILE; or give the folder of a vision model, such as DINOv2."
        )
    with torch.device("meta"):
        model = Inception()
    load_inception(model.to_empty(device="cpu"), path)
    model.to(device).eval().requires_grad_(False)

    @torch.inference_mode()
    def features(images: Images) -> np.ndarray:
        return model(squares(images, SIDE_PX, device, resize=resize)).cpu().numpy()

    description = {"network": INCEPTION, "weights_sha256": hash_files([path]), "side_px": SIDE_PX, "resize": resize}
    return Network(description, features)


def load_inception(model: Inception, path: Path) -> None:
    """Load the weights of a file of tensors, without those of its classifier.

    Raises: EncoderError.
    """
    try:
        if path.suffix == ".safetensors":
            check_header(path, what="--features")
            saved = load_file(path)
        else:
            saved = read_tensors(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise EncoderError(f"--features '{path}': {shortened(error)}. Fetch the file again.") from error
    saved = saved if isinstance(saved, dict) else {}
    counts = torch.zeros((), dtype=torch.int64)  # num_batches_tracked: of training; some conversions leave it out
    tensors = {key: counts if key.endswith("tracked") else saved.get(key) for key in model.state_dict()}
    try:
        model.load_state_dict({key: tensor for key, tensor in tensors.items() if tensor is not None})
    except (RuntimeError, AttributeError) as error:
        raise EncoderError(
            f"--features '{path}': not the weights of the FID's Inception: {shortened(error)} Expected "
            f"{INCEPTION_FILES[0]} of torch-fidelity."
        ) from error


# -------------------------------------------------------------------------------------------------- vision transformers


def _open_vision(name: str, device: torch.device) -> Network:
    """A vision transformer of transformers; one vector an image.

    CLIP gives the embedding of the image, after the projection; others the pooled output, which is the class token
    after the final norm (DINOv2, DINOv3) or the attention pool (SigLIP).
    """
    loaded = LoadedModel(name, "--features", device)

    @torch.inference_mode()
    def features(images: Images) -> np.ndarray:
        output = loaded.model(loaded.prepare(images), **loaded.family.options)
        return (output.image_embeds if is_clip else output.pooler_output).float().cpu().numpy()

    is_clip = loaded.family is CLIP_EMBEDDING
    return Network(loaded.description | {"class": loaded.family.class_name, "resize": "antialiased"}, features, is_clip)


class LoadedModel:
    """A vision model with its preprocessor; its files are checked before a library opens them.

    Args:
      name: folder or hub id.
      what: the option that names it, for errors.
      towers: load a CLIP with its text tower, and download its tokenizer.
    Raises: EncoderError: missing, without weights or preprocessor, or of another kind.
    """

    def __init__(self, name: str, what: str, device: torch.device, *, towers: bool = False) -> None:
        files = (CONFIG, PREPROCESSOR, *(TOKENIZER_FILES if towers else ()), *weight_names(TEXT_WEIGHTS))
        self.folder, revision = resolve_model(name, "", "", files=files, what=what)
        config, preprocessor = (read_config(self.folder, what=what, name=file) for file in (CONFIG, PREPROCESSOR))
        weights, where = weight_files(self.folder, TEXT_WEIGHTS, what=what), f"{what} '{self.folder}'"
        check_depth(config, weights, what=what)
        if towers and (config.get("model_type") != "clip" or not isinstance(config.get("text_config"), dict)):
            raise EncoderError(f"{where}: its {CONFIG} is not that of a CLIP of two towers.")
        family = family_of(config, where)
        self.family: Family = (CLIP_TOWERS if towers else CLIP_EMBEDDING) if family is CLIP else family
        self.model = load_vision_model(self.family, self.folder, torch.float32, where)
        self.model.to(device).eval().requires_grad_(False)
        sizes = self.model.config.vision_config if towers else self.model.config
        self._side_px, self._device = input_side_px(preprocessor, sizes.image_size, where), device
        numbers = normalisation(preprocessor, where)
        self._mean, self._std = (torch.tensor(values, device=device)[:, None, None] for values in numbers)
        self.description = {"network": name, "weights_sha256": hash_files(weights), "side_px": self._side_px}
        if revision and not towers:
            self.description["revision"] = revision

    def prepare(self, images: Images) -> Tensor:
        """Squares with the mean and deviation of the model's training, (B, 3, side_px, side_px) float32."""
        return (squares(images, self._side_px, self._device) / GREY_LEVELS - self._mean) / self._std


def input_side_px(preprocessor: dict[str, Any], trained_px: Any, where: str) -> int:
    """Side of the squares that a model takes: the crop of its preprocessor, else the size, else that of its training.

    Raises: EncoderError: not one positive number of pixels.
    """
    size = preprocessor.get("crop_size") or preprocessor.get("size") or trained_px
    sides = set(size.values()) if isinstance(size, dict) else {size}
    side = sides.pop() if len(sides) == 1 else None
    if not isinstance(side, int) or not 0 < side <= LARGEST_SIDE_PX:
        raise EncoderError(f"{where}: the size in its {PREPROCESSOR} is {str(size)[:80]}, expected one side in pixels.")
    return side


class ClipScore:
    """A CLIP of two towers that compares images with captions: 100 * max(cosine, 0).

    Its mean over the images is the CLIP score; torchmetrics takes the maximum after the mean.

    Args:
      name: folder or hub id, with tokenizer and preprocessor.
    Raises: EncoderError: missing, or not a CLIP.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._loaded, self._device = LoadedModel(name, "--clip", device, towers=True), device
        sizes, self.description = self._loaded.model.config.text_config, self._loaded.description
        self._tokenizer = load_tokenizer(self._loaded.folder, sizes.vocab_size, what="--clip")
        self._most_tokens = sizes.max_position_embeddings

    @torch.inference_mode()
    def scores(self, images: Images, captions: Sequence[str]) -> np.ndarray:
        """Score of each image with its caption.

        Args:
          images: the center square of each counts.
          captions: longer ones than the model reads are cut.
        Returns: (B, 2) float64: the score from 0 to 100, and 1 where the caption was cut.
        """
        limit = {"truncation": True, "max_length": self._most_tokens, "padding": "max_length"}
        tokens = self._tokenizer(list(captions), return_tensors="pt", **limit).to(self._device)
        lengths = np.array([len(ids) for ids in self._tokenizer(list(captions))["input_ids"]])
        output = self._loaded.model(
            pixel_values=self._loaded.prepare([center_square(image) for image in images]),
            input_ids=tokens["input_ids"],
            attention_mask=tokens["attention_mask"],
        )
        cosines = cosine_similarity(output.image_embeds.double(), output.text_embeds.double())
        return np.stack([100 * cosines.clamp(min=0).cpu().numpy(), lengths > self._most_tokens], axis=1)


# ------------------------------------------------------------------------------------------------------------ resizing


def squares(images: Images, side_px: int, device: torch.device, *, resize: Resize = "antialiased") -> Tensor:
    """Images squeezed to squares; (B, 3, side_px, side_px) float32, 0 to 255.

    Each image is resized alone, so it does not depend on the batch that it is in.
    """
    resized = _antialiased if resize == "antialiased" else _tensorflow_bilinear
    planes = (torch.from_numpy(np.array(image)).to(device).permute(2, 0, 1).float() for image in images)
    return torch.stack([resized(image, side_px) for image in planes])


def _antialiased(image: Tensor, side_px: int) -> Tensor:
    """Bicubic with antialiasing; (3, height, width) to (3, side_px, side_px)."""
    size = (side_px, side_px)
    return interpolate(image[None], size, mode="bicubic", antialias=True, align_corners=False)[0].clamp(0, GREY_LEVELS)


def _tensorflow_bilinear(image: Tensor, side_px: int) -> Tensor:
    """TensorFlow 1's ``resize_bilinear`` with ``align_corners=False``; (3, height, width) to (3, side_px, side_px)."""
    for axis in (1, 2):
        length = image.shape[axis]
        places = torch.arange(side_px, dtype=torch.float32, device=image.device) * (length / side_px)
        low = places.long()
        share = (places - low).unsqueeze(1) if axis == 1 else places - low
        first, second = (image.index_select(axis, i.clamp(max=length - 1)) for i in (low, low + 1))
        image = first + (second - first) * share
    return image


def center_square(image: np.ndarray) -> np.ndarray:
    """The largest square in the middle of an image (height, width, 3)."""
    height, width = image.shape[:2]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return image[top : top + side, left : left + side]
