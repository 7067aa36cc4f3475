"""Networks whose features are compared: Inception-v3, or a vision transformer of a folder or the hub."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from .....datasets.errors import EncoderError, RecipeError
from .....precompute.encoders.model_files import (
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
from .....precompute.encoders.vision.families import CLIP, Family, family_of, load_vision_model
from .....precompute.encoders.vision.normalisation import GREY_LEVELS, PREPROCESSOR, normalisation
from .....precompute.importing.formats.untrusted.torch_files import read_tensors
from . import inception
from .resizing import Resize, squares

INCEPTION = "inception"
INCEPTION_FILES = ("weights-inception-2015-12-05-6726825d.pth", "pt_inception-2015-12-05-6726825d.pth")
WEIGHT_SUFFIXES = (".pth", ".pt", ".safetensors")
WHAT = "--features"
# Embeddings in the space that CLIP's pictures and captions share; CMMD is defined on them.
CLIP_EMBEDDING = dataclasses.replace(CLIP, class_name="CLIPVisionModelWithProjection")


class Network(Protocol):
    """Pictures to features.

    Attributes:
      description: what determines the features, as plain values.
      is_clip: the features are CLIP's embeddings of pictures.
    """

    description: dict[str, Any]
    is_clip: bool

    def features(self, pictures: Sequence[np.ndarray]) -> np.ndarray:
        """Features of pictures.

        Args:
          pictures: (height, width, 3) uint8 each, of any sizes.
        Returns: (B, D) float32.
        """
        ...


def open_network(name: str, resize: Resize | None, device: torch.device) -> Network:
    """The network that ``--features`` names.

    Args:
      name: "inception", a file of its weights, or a folder or hub id of a vision model.
      resize: None: antialiased.
    Raises: EncoderError: it is not there, or not usable; RecipeError: a resize that only Inception has.
    """
    if name == INCEPTION or Path(name).suffix in WEIGHT_SUFFIXES:
        return InceptionNetwork(_inception_file(name), resize or "antialiased", device)
    if resize == "tensorflow":
        raise RecipeError(f"--resize tensorflow: it is a part of Inception, not of '{name}'. Leave it out.")
    return VisionNetwork(name, device)


# ---------------------------------------------------------------------------------------------------------- Inception


class InceptionNetwork:
    """Inception-v3 with published weights.

    Args:
      resize: "tensorflow": as in the original FID and ADM's evaluator.
    Raises: EncoderError: the file does not hold its weights.
    """

    is_clip = False

    def __init__(self, weights: Path, resize: Resize, device: torch.device) -> None:
        self._device = device
        self._resize: Resize = resize
        with torch.device("meta"):
            model = inception.Inception()
        model.to_empty(device="cpu").load_state_dict(_inception_tensors(weights, model))
        self._model = model.to(device).eval().requires_grad_(False)
        self.description = {
            "network": INCEPTION,
            "weights_sha256": hash_files([weights]),
            "side_px": inception.SIDE_PX,
            "resize": resize,
        }

    @torch.inference_mode()
    def features(self, pictures: Sequence[np.ndarray]) -> np.ndarray:
        """As ``Network.features``; D = 2048."""
        batch = squares(pictures, inception.SIDE_PX, self._device, resize=self._resize)
        return self._model(batch).cpu().numpy()


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
                f"{WHAT} '{path}': not the weights of the FID's Inception: '{key}' is {shape}, needed "
                f"{tuple(wanted.shape)}. Needed {INCEPTION_FILES[0]} of torch-fidelity."
            )
        tensors[key] = tensor
    return tensors


# ----------------------------------------------------------------------------------------------- vision transformers


class VisionNetwork:
    """A vision transformer of transformers; one vector a picture.

    Of a CLIP the embedding of the picture, after the projection; of others the pooled output, which is the class token
    after the final norm (DINOv2, DINOv3) or the attention pool (SigLIP).

    Args:
      model: folder or hub id.
    Raises: EncoderError: missing, without weights or preprocessor, or of another kind.
    """

    def __init__(self, model: str, device: torch.device) -> None:
        names = (CONFIG, PREPROCESSOR, *weight_names(TEXT_WEIGHTS))
        folder, revision = resolve_model(model, "", "", files=names, what=WHAT)
        where = f"{WHAT} '{folder}'"
        config = read_config(folder, what=WHAT)
        preprocessor = read_config(folder, what=WHAT, name=PREPROCESSOR)
        family = family_of(config, where)
        self.is_clip = family is CLIP
        weights = weight_files(folder, TEXT_WEIGHTS, what=WHAT)
        check_depth(config, weights, what=WHAT)
        self._family: Family = CLIP_EMBEDDING if self.is_clip else family
        self._model = load_vision_model(self._family, folder, torch.float32, where)
        self._model.to(device).eval().requires_grad_(False)
        self._device, self._side_px = device, input_side_px(preprocessor, self._model.config.image_size, where)
        mean, std = normalisation(preprocessor, where)
        self._mean, self._std = (torch.tensor(numbers, device=device)[:, None, None] for numbers in (mean, std))
        self.description = {
            "network": model,
            "class": self._family.class_name,
            "weights_sha256": hash_files(weights),
            "side_px": self._side_px,
            "resize": "antialiased",
        } | ({"revision": revision} if revision else {})

    @torch.inference_mode()
    def features(self, pictures: Sequence[np.ndarray]) -> np.ndarray:
        """As ``Network.features``."""
        batch = squares(pictures, self._side_px, self._device)
        batch = (batch / GREY_LEVELS - self._mean) / self._std
        output = self._model(batch, **self._family.options)
        return (output.image_embeds if self.is_clip else output.pooler_output).float().cpu().numpy()


def input_side_px(preprocessor: dict[str, Any], trained_px: Any, where: str) -> int:
    """Side of the squares that a model takes: the crop of its preprocessor, else the size, else that of its training.

    Raises: EncoderError: not one positive number of pixels.
    """
    size = preprocessor.get("crop_size") or preprocessor.get("size") or trained_px
    sides = set(size.values()) if isinstance(size, dict) else {size}
    side = sides.pop() if len(sides) == 1 else None
    if not isinstance(side, int) or not 0 < side <= 1 << 12:
        raise EncoderError(f"{where}: the size in its {PREPROCESSOR} is {str(size)[:80]}, needed one side in pixels.")
    return side
