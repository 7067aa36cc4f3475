"""Networks that look at images: Inception-v3 or a vision transformer for features, a CLIP for the score of captions.

Images become squares of one side: "antialiased" is bicubic, with the filter as wide as the image is reduced, as Pillow
has it, and not rounded; "tensorflow" is the bilinear resize of TensorFlow 1, which is part of the Inception graph of
ADM's evaluator and the original FID.

Sources: Parmar et al. 2022, "On Aliased Resizing and Surprising Subtleties in GAN Evaluation" (clean-fid); Hessel et
al. 2021, "CLIPScore".
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

from ....datasets.remote.failures import one_line
from ....errors import EncoderError, RecipeError
from ....precompute.config import FeatureSection
from ....precompute.encoders.model_files import CONFIG, TOKENIZER_FILES, ModelFiles, check_header, hash_files
from ....precompute.encoders.pretrained import load_transformer
from ....precompute.encoders.text.tokenizer import load_tokenizer
from ....precompute.encoders.vision.families import (
    CLIP,
    CLIP_EMBEDDING,
    GREY_LEVELS,
    PREPROCESSOR,
    Family,
    family_of,
    normalisation,
)
from ....precompute.importing.untrusted import read_tensors
from ..request import INCEPTION
from .inception import SIDE_PX, Inception

INCEPTION_FILES = ("weights-inception-2015-12-05-6726825d.pth", "pt_inception-2015-12-05-6726825d.pth")
WEIGHT_SUFFIXES = (".pth", ".pt", ".safetensors")
FEATURES, SCORE = "--features", "--clip"
TWO_TOWERS = dataclasses.replace(CLIP, class_name="CLIPModel")
MAX_SIDE_PX = 1 << 12
Resize = Literal["antialiased", "tensorflow"]


@dataclass(frozen=True)
class Network:
    """Images to features.

    Args:
      description: what determines the features, as plain values.
      features: of (height, width, 3) uint8 images of any sizes; (B, D) float32.
      is_clip: the features are CLIP's embeddings of images.
    """

    description: dict[str, Any]
    features: Callable[[Sequence[np.ndarray]], np.ndarray]
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
    vision = VisionModel(name, FEATURES, None, device)
    is_clip, options = vision.family is CLIP_EMBEDDING, vision.family.options

    @torch.inference_mode()
    def features(images: Sequence[np.ndarray]) -> np.ndarray:
        output = vision.model(vision.prepare(images), **options)
        return (output.image_embeds if is_clip else output.pooler_output).float().cpu().numpy()

    description = vision.description | {"class": vision.family.class_name, "resize": "antialiased"}
    return Network(description | ({"revision": vision.revision} if vision.revision else {}), features, is_clip)


# ---------------------------------------------------------------------------------------------------------- Inception


def _open_inception(name: str, resize: Resize, device: torch.device) -> Network:
    """Inception-v3 with published weights: a file, or where torch-fidelity, torchmetrics and pytorch-fid keep it."""
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    places = [folder / file for file in INCEPTION_FILES] if name == INCEPTION else [Path(name).expanduser()]
    path = next((place for place in places if place.is_file()), None)
    if not path:
        looked = ", ".join(f"'{place}'" for place in places)
        raise EncoderError(
            f"{FEATURES} {name}: there is no file {looked}. Fetch {INCEPTION_FILES[0]} from the releases of "
            "torch-fidelity (github.com/toshas/torch-fidelity, v0.2.0), and pass it with --features FILE; or give the "
            "folder of a vision model, such as DINOv2."
        )
    with torch.device("meta"):
        model = Inception()
    model.to_empty(device="cpu").load_state_dict(_inception_tensors(path, model))
    model.to(device).eval().requires_grad_(False)

    @torch.inference_mode()
    def features(images: Sequence[np.ndarray]) -> np.ndarray:
        return model(squares(images, SIDE_PX, device, resize=resize)).cpu().numpy()

    description = {"network": INCEPTION, "weights_sha256": hash_files([path]), "side_px": SIDE_PX, "resize": resize}
    return Network(description, features)


def _inception_tensors(path: Path, model: Inception) -> dict[str, Tensor]:
    """The weights for a model, of a file of tensors; its classifier is left out."""
    try:
        if path.suffix == ".safetensors":
            check_header(path, what=FEATURES)
            loaded = load_file(path)
        else:
            loaded = read_tensors(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise EncoderError(f"{FEATURES} '{path}': {one_line(error)}. Fetch the file again.") from error
    tensors = {}
    for key, expected in model.state_dict().items():
        tensor = loaded.get(key) if isinstance(loaded, dict) else None
        if key.endswith("num_batches_tracked"):  # of training; some conversions leave it out
            tensor = torch.zeros((), dtype=torch.int64)
        shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else "nothing"
        if shape != tuple(expected.shape):
            raise EncoderError(
                f"{FEATURES} '{path}': not the weights of the FID's Inception: '{key}' is {shape}, expected "
                f"{tuple(expected.shape)}. Expected {INCEPTION_FILES[0]} of torch-fidelity."
            )
        tensors[key] = tensor
    return tensors


# ------------------------------------------------------------------------------------------------- vision transformers


class VisionModel:
    """A vision transformer of transformers with its preprocessor.

    Of a CLIP its embedding of an image counts, after the projection; of others the pooled output, which is the class
    token after the final norm (DINOv2, DINOv3) or the attention pool (SigLIP).

    Args:
      name: folder or hub id; its files are checked before a library opens them.
      what: the option that names it.
      family: None: that of its config.json.
      more: files that are downloaded too.
    Raises: EncoderError: missing, without weights or preprocessor, or of another kind.
    """

    def __init__(self, name: str, what: str, family: Family | None, device: torch.device, *more: str) -> None:
        files = ModelFiles(FeatureSection(model=name), what, PREPROCESSOR, *more)
        config, preprocessor, weights, where = files.read(), files.read(PREPROCESSOR), files.weights, files.where
        self.folder, self.revision = files.folder, files.revision
        if family is TWO_TOWERS and not (
            config.get("model_type") == "clip" and isinstance(config.get("text_config"), dict)
        ):
            raise EncoderError(f"{where}: its {CONFIG} is not that of a two-tower CLIP.")
        found = family or family_of(config, where)
        self.family = CLIP_EMBEDDING if found is CLIP else found
        self.model = load_transformer(self.family.class_name, self.folder, torch.float32, where)
        self.model.to(device)
        trained_px = getattr(self.model.config, "vision_config", self.model.config).image_size
        self.side_px, self._device = input_side_px(preprocessor, trained_px, where), device
        numbers = normalisation(preprocessor, where)
        self._mean, self._std = (torch.tensor(number, device=device)[:, None, None] for number in numbers)
        self.description = {"network": name, "weights_sha256": hash_files(weights), "side_px": self.side_px}

    def prepare(self, images: Sequence[np.ndarray]) -> Tensor:
        """(height, width, 3) uint8 each to (B, 3, side_px, side_px) float32, as the model was trained."""
        return (squares(images, self.side_px, self._device) / GREY_LEVELS - self._mean) / self._std


def input_side_px(preprocessor: dict[str, Any], trained_px: Any, where: str) -> int:
    """Side of the squares that a model takes: the crop of its preprocessor, else the size, else that of its training.

    Raises: EncoderError: not one positive number of pixels.
    """
    size = preprocessor.get("crop_size") or preprocessor.get("size") or trained_px
    side, *others = set(size.values()) if isinstance(size, dict) else {size}
    if others or not isinstance(side, int) or not 0 < side <= MAX_SIDE_PX:
        raise EncoderError(f"{where}: the size in its {PREPROCESSOR} is {str(size)[:80]}, expected one side in pixels.")
    return side


class ClipScore:
    """A CLIP of two towers that compares images with captions: 100 * max(cosine, 0).

    The factor is torchmetrics' in place of 2.5; it takes the maximum after the average over the images, not before.

    Args:
      name: folder or hub id, with tokenizer and preprocessor.
    Raises: EncoderError: missing, or not a CLIP.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._vision, self._device = VisionModel(name, SCORE, TWO_TOWERS, device, *TOKENIZER_FILES), device
        text = self._vision.model.config.text_config
        self._tokenizer = load_tokenizer(self._vision.folder, text.vocab_size, what=SCORE)
        self._most_tokens, self.description = text.max_position_embeddings, self._vision.description

    @torch.inference_mode()
    def scores(self, images: Sequence[np.ndarray], captions: Sequence[str]) -> np.ndarray:
        """Score of each image with its caption.

        Args:
          images: (height, width, 3) uint8 each; the centre square counts.
          captions: longer ones than the model reads are cut.
        Returns: (B, 2) float64: the score from 0 to 100, and 1 where the caption was cut.
        """
        limit = {"truncation": True, "max_length": self._most_tokens, "padding": "max_length"}
        tokens = self._tokenizer(list(captions), return_tensors="pt", **limit).to(self._device)
        output = self._vision.model(
            pixel_values=self._vision.prepare([centre_square(image) for image in images]),
            input_ids=tokens["input_ids"],
            attention_mask=tokens["attention_mask"],
        )
        cosines = cosine_similarity(output.image_embeds.double(), output.text_embeds.double())
        was_cut = [len(ids) > self._most_tokens for ids in self._tokenizer(list(captions))["input_ids"]]
        return np.stack([100 * cosines.clamp(min=0).cpu().numpy(), was_cut], axis=1)


# ------------------------------------------------------------------------------------------------------------- resizing


def squares(
    images: Sequence[np.ndarray], side_px: int, device: torch.device, *, resize: Resize = "antialiased"
) -> Tensor:
    """Images squeezed to squares; (B, 3, side_px, side_px) float32, 0 to 255.

    Each image is resized alone, so it does not depend on the batch that it is in.

    Args:
      images: (height, width, 3) uint8 each, of any sizes.
    """
    resized = []
    for image in images:
        planes = torch.from_numpy(np.array(image)).to(device).permute(2, 0, 1).float()
        if resize == "tensorflow":
            resized.append(tensorflow_bilinear(planes, side_px))
        else:
            square = interpolate(planes[None], (side_px, side_px), mode="bicubic", antialias=True, align_corners=False)
            resized.append(square[0].clamp(0, GREY_LEVELS))
    return torch.stack(resized)


def tensorflow_bilinear(image: Tensor, side_px: int) -> Tensor:
    """TensorFlow 1's ``resize_bilinear`` with ``align_corners=False``; (3, height, width) to (3, side_px, side_px)."""
    for axis in (1, 2):
        length = image.shape[axis]
        places = torch.arange(side_px, dtype=torch.float32, device=image.device) * (length / side_px)
        low = places.long()
        share = (places - low).unsqueeze(1) if axis == 1 else places - low
        first, second = image.index_select(axis, low), image.index_select(axis, (low + 1).clamp(max=length - 1))
        image = first + (second - first) * share
    return image


def centre_square(image: np.ndarray) -> np.ndarray:
    """The largest square in the middle of an image (height, width, 3)."""
    height, width = image.shape[:2]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return image[top : top + side, left : left + side]
