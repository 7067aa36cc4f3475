"""Networks whose features are compared: Inception-v3, or a vision transformer of a folder or the hub."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ....datasets.errors import EncoderError, RecipeError
from ....precompute.encoders.model_files import (
    CONFIG,
    TEXT_WEIGHTS,
    check_depth,
    check_header,
    hash_files,
    read_config,
    resolve_model,
    shortened,
    weight_files,
    weight_names,
)
from ....precompute.encoders.vision.families import CLIP, family_of, load_vision_model
from ....precompute.encoders.vision.normalisation import GREY_LEVELS, PREPROCESSOR, normalisation
from ....precompute.importing.formats.untrusted.torch_files import read_tensors
from ..request import INCEPTION
from . import inception
from .resizing import Resize, squares

INCEPTION_FILES = ("weights-inception-2015-12-05-6726825d.pth", "pt_inception-2015-12-05-6726825d.pth")
WEIGHT_SUFFIXES = (".pth", ".pt", ".safetensors")
WHAT = "--features"
# Embeddings in the space that CLIP's images and captions share; CMMD is defined on them.
CLIP_EMBEDDING = dataclasses.replace(CLIP, class_name="CLIPVisionModelWithProjection")


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
        return _open_inception(_inception_file(name), resize or "antialiased", device)
    if resize == "tensorflow":
        raise RecipeError(f"--resize tensorflow: only Inception has it, not '{name}'. Leave it out.")
    return _open_vision(name, device)


# ---------------------------------------------------------------------------------------------------------- Inception


def _open_inception(weights: Path, resize: Resize, device: torch.device) -> Network:
    """Inception-v3 with published weights; D = 2048.

    Raises: EncoderError: the file does not hold its weights.
    """
    with torch.device("meta"):
        model = inception.Inception()
    model.to_empty(device="cpu").load_state_dict(_inception_tensors(weights, model))
    model.to(device).eval().requires_grad_(False)

    @torch.inference_mode()
    def features(images: Sequence[np.ndarray]) -> np.ndarray:
        return model(squares(images, inception.SIDE_PX, device, resize=resize)).cpu().numpy()

    description = {"network": INCEPTION, "weights_sha256": hash_files([weights])}
    return Network(description | {"side_px": inception.SIDE_PX, "resize": resize}, features)


def _inception_file(name: str) -> Path:
    """The file of the weights: as given, or where torch-fidelity, torchmetrics and pytorch-fid keep it.

    Raises: EncoderError: there is none.
    """
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    places = [folder / file for file in INCEPTION_FILES] if name == INCEPTION else [Path(name).expanduser()]
    found = [place for place in places if place.is_file()]
    if not found:
        looked = ", ".join(f"'{place}'" for place in places)
        raise EncoderError(
            f"{WHAT} {name}: there is no file {looked}. Fetch {INCEPTION_FILES[0]} from the releases of torch-fidelity "
            "(github.com/toshas/torch-fidelity, v0.2.0), and give it with --features FILE; or give the folder of a "
            "vision model, such as DINOv2."
        )
    return found[0]


def _inception_tensors(path: Path, model: inception.Inception) -> dict[str, torch.Tensor]:
    """The weights for a model, of a file of tensors; its classifier is left out.

    Raises: EncoderError.
    """
    try:
        if path.suffix == ".safetensors":
            check_header(path, what=WHAT)
            found = load_file(path)
        else:
            found = read_tensors(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise EncoderError(f"{WHAT} '{path}': {shortened(error)}. Fetch the file again.") from error
    tensors = {}
    for key, wanted in model.state_dict().items():
        tensor = found.get(key) if isinstance(found, dict) else None
        if key.endswith("num_batches_tracked"):  # of training; some conversions leave it out
            tensor = torch.zeros((), dtype=torch.int64)
        if not isinstance(tensor, torch.Tensor) or tensor.shape != wanted.shape:
            shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else "nothing"
            raise EncoderError(
                f"{WHAT} '{path}': not the weights of the FID's Inception: '{key}' is {shape}, expected "
                f"{tuple(wanted.shape)}. Expected {INCEPTION_FILES[0]} of torch-fidelity."
            )
        tensors[key] = tensor
    return tensors


# ----------------------------------------------------------------------------------------------- vision transformers


def _open_vision(name: str, device: torch.device) -> Network:
    """A vision transformer of transformers; one vector an image.

    Of a CLIP the embedding of the image, after the projection; of others the pooled output, which is the class token
    after the final norm (DINOv2, DINOv3) or the attention pool (SigLIP).

    Raises: EncoderError: missing, without weights or preprocessor, or of another kind.
    """
    files = find_model(name, WHAT)
    family = family_of(files.config, files.where)
    is_clip = family is CLIP
    family = CLIP_EMBEDDING if is_clip else family
    model = load_vision_model(family, files.folder, torch.float32, files.where)
    model.to(device).eval().requires_grad_(False)
    prepare = Preprocessing(files, model.config.image_size, device)

    @torch.inference_mode()
    def features(images: Sequence[np.ndarray]) -> np.ndarray:
        output = model(prepare(images), **family.options)
        return (output.image_embeds if is_clip else output.pooler_output).float().cpu().numpy()

    description = {
        "network": name,
        "class": family.class_name,
        "weights_sha256": hash_files(files.weights),
        "side_px": prepare.side_px,
        "resize": "antialiased",
    } | ({"revision": files.revision} if files.revision else {})
    return Network(description, features, is_clip)


class ModelFiles(NamedTuple):
    """The files of a vision model, and what they are called in errors."""

    where: str
    folder: Path
    revision: str | None
    config: dict[str, Any]
    preprocessor: dict[str, Any]
    weights: list[Path]


def find_model(name: str, what: str, *more: str) -> ModelFiles:
    """Find a vision model with its preprocessor, and check its files before a library opens them.

    Args:
      name: folder or hub id.
      more: files that are downloaded too.
    Raises: EncoderError.
    """
    wanted = (CONFIG, PREPROCESSOR, *more, *weight_names(TEXT_WEIGHTS))
    folder, revision = resolve_model(name, "", "", files=wanted, what=what)
    config, preprocessor = (read_config(folder, what=what, name=name) for name in (CONFIG, PREPROCESSOR))
    weights = weight_files(folder, TEXT_WEIGHTS, what=what)
    check_depth(config, weights, what=what)
    return ModelFiles(f"{what} '{folder}'", folder, revision, config, preprocessor, weights)


class Preprocessing:
    """Images as the input of a vision model: squares, with the mean and deviation of its training.

    Args:
      trained_px: side of the squares that it was trained with.
    Raises: EncoderError: the preprocessor is not of such a model.
    """

    def __init__(self, files: ModelFiles, trained_px: Any, device: torch.device) -> None:
        self.side_px, self._device = input_side_px(files.preprocessor, trained_px, files.where), device
        mean, std = normalisation(files.preprocessor, files.where)
        self._mean, self._std = (torch.tensor(numbers, device=device)[:, None, None] for numbers in (mean, std))

    def __call__(self, images: Sequence[np.ndarray]) -> torch.Tensor:
        """(height, width, 3) uint8 each to (B, 3, side_px, side_px) float32."""
        return (squares(images, self.side_px, self._device) / GREY_LEVELS - self._mean) / self._std


def input_side_px(preprocessor: dict[str, Any], trained_px: Any, where: str) -> int:
    """Side of the squares that a model takes: the crop of its preprocessor, else the size, else that of its training.

    Raises: EncoderError: not one positive number of pixels.
    """
    size = preprocessor.get("crop_size") or preprocessor.get("size") or trained_px
    sides = set(size.values()) if isinstance(size, dict) else {size}
    side = sides.pop() if len(sides) == 1 else None
    if not isinstance(side, int) or not 0 < side <= 1 << 12:
        raise EncoderError(f"{where}: the size in its {PREPROCESSOR} is {str(size)[:80]}, expected one side in pixels.")
    return side
