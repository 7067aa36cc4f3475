"""Caches of NeMo AutoModel's diffusion preprocessing: a file of tensors for each image, and JSON that lists them.

Latents are already normalized. Each model has its own tensors; those of image models whose layout is known are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch

from ....datasets.revisions.writer import row_checksum
from ....errors import RecordRejected, SourceError
from ...config import load
from ...sources.files.record import MAX_CAPTION_CHARS
from ..recipe import ImportRecipe
from ..source import (
    Entry,
    Features,
    FormatDefaults,
    ListedImage,
    Reader,
    RecordHeader,
    TextHeader,
    add_listed,
    inner_path,
    without_batch,
)
from ..untrusted import MAX_ARRAY_BYTES, read_tensors

# Of AutoencoderKLQwenImage, whose model takes (z - mean) / std.
QWEN_MEAN = (-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508)
QWEN_MEAN += (0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921)
QWEN_STD = (2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743)
QWEN_STD += (3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160)


def _scaled(latent: str, downscale: int, shift: tuple[float, ...], scale: tuple[float, ...]) -> FormatDefaults:
    return FormatDefaults(latent, is_scaled=True, vae="", downscale=downscale, shift=shift, scale=scale, one_size=False)


# The shipped recipe of the encoders of each model, and the format of its latents.
MODELS = {
    "flux": ("flux1-1024", _scaled("sample", 8, (0.1159,), (0.3611,))),
    "flux2": ("flux2-1024", replace(_scaled("mean", 16, (), ()), patchify=2)),
    "qwen_image": ("qwen-image-1024", _scaled("sample", 8, QWEN_MEAN, tuple(1 / std for std in QWEN_STD))),
}
LISTING = "metadata.json"
ADVICE = "NeMo writes it when all images are done: let the preprocessing finish, or restore it."
MAX_FILE = 1 << 30
LATENT, TOKENS, POOLED = "latent", "prompt_embeds", "pooled_prompt_embeds"
MASK = "prompt_embeds_mask"  # of Qwen-Image's tokens; None or missing: all are valid
BUCKET_KEYS = ("bucket_resolution", "crop_resolution")  # of the listing; NeMo takes the second where the first is not
DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}


class Nemo(Reader):
    """``metadata.json``, its ``metadata_shard_*.json``, and ``WIDTHxHEIGHT/HASH.pt``.

    The listing has absolute paths; only the last two parts of each are read, so the cache may have moved.

    Raises: SourceError: the listing is missing or damaged, or of a model whose layout is not known.
    """

    kind, defaults = "nemo", MODELS["flux"][1]
    has_labels = False

    def __init__(self, root: Path, recipe: ImportRecipe) -> None:
        super().__init__(root, recipe)
        described = self.json(LISTING, dict, ADVICE)
        model = str(described.get("model_type"))
        if model not in MODELS:
            raise SourceError(
                f"source '{root}': '{LISTING}' is of model_type '{model[:80]}'. An import reads caches of "
                f"{', '.join(MODELS)}; videos and edits of images have other tensors."
            )
        self.defaults = _defaults(model, described.get("model_name"))
        if not self.defaults.scale and not recipe.vae.scale:
            raise SourceError(
                f"source '{root}': its latents are normalized by the batch norm of the VAE, which a cache of "
                f"'{model}' lacks, and decoding needs it. Give it, one number per channel: "
                "--set vae.shift=[running_mean, ...] --set vae.scale=[1/sqrt(running_var + eps), ...]."
            )
        shards = described.get("shards")
        if not isinstance(shards, list) or not all(isinstance(name, str) for name in shards):
            raise SourceError(f"source '{root}': '{LISTING}' needs 'shards', a list of files. Restore it.")
        self._images: dict[str, ListedImage] = {}
        for name in shards:
            with self.needing(LISTING):
                path = inner_path(name)
            add_listed(self._images, self.json(path, list, ADVICE), name, lambda found: _image(found, model))

    def entries(self) -> Iterator[Entry]:
        """Images in the order of the listing."""
        for key, image in self._images.items():
            yield Entry(key, "") if image.problem else self.file_entry(image.path, key)

    def _header(self, entry: Entry) -> RecordHeader:
        image = self._images[entry.key]
        if image.problem:
            raise RecordRejected("scan", "bad_metadata", image.problem)
        tensors = self._tensors(entry)
        latent = _array(tensors, LATENT, 3)
        texts = tuple(self._look_text(tensors, name) for name in self.defaults.texts)
        if tuple(side * self.defaults.downscale for side in latent.shape[1:]) != image.bucket:
            detail = f"a latent of {latent.shape}, listed as {image.bucket[1]} x {image.bucket[0]} px"
            raise RecordRejected("scan", "wrong_shape", f"{entry.path}: {detail}")
        return RecordHeader(latent.shape, latent.dtype.name, text=image.prompt, texts=texts, size=image.size)

    def _look_text(self, tensors: dict[str, Any], name: str) -> TextHeader:
        section = self.defaults.texts[name]
        key = POOLED if section.output == "pooled" else TOKENS
        values = self._text(tensors, name)
        stored = DTYPES[tensors[key].dtype]
        if self.recipe.text.check == "content" and not np.isfinite(values).all():
            raise RecordRejected("scan", "nonfinite", f"NaN or infinity in '{key}'")
        if values.ndim == 1:
            return TextHeader(1, section.max_tokens, len(values), stored)
        length, width = values.shape
        if length > section.max_tokens:
            raise RecordRejected("scan", "wrong_shape", f"{length} tokens; expected 1 to {section.max_tokens}")
        return TextHeader(length, length if section.full_length else section.max_tokens, width, stored)

    def _values(self, entry: Entry) -> Features:
        latent = _array(self._tensors(entry), LATENT, 3)
        return [latent], row_checksum(latent)

    def _caption(self, entry: Entry, name: str) -> np.ndarray:
        return self._text(self._tensors(entry), name)

    def _text(self, tensors: dict[str, Any], name: str) -> np.ndarray:
        """A pooled vector (P,), or tokens (L, D), of which a model that does not read padding has the valid ones."""
        section = self.defaults.texts[name]
        if section.output == "pooled":
            return _array(tensors, POOLED, 1)
        tokens = _array(tensors, TOKENS, 2)
        return tokens if section.full_length else tokens[_valid(tensors, len(tokens))]

    def _tensors(self, entry: Entry) -> dict[str, Any]:
        """Content of an image's file; raises OSError, ValueError."""
        path = self.root / entry.path
        if path.stat().st_size > MAX_FILE:
            raise ValueError(f"more than {MAX_FILE} bytes")
        tensors = read_tensors(path)
        if not isinstance(tensors, dict):
            raise ValueError("not a dictionary of tensors")
        return tensors


def _defaults(model: str, model_name: Any) -> FormatDefaults:
    """The properties of a model, with the encoders of its shipped recipe, or those that the cache names."""
    name, defaults = MODELS[model]
    recipe = load(name, [])
    vae = model_name if isinstance(model_name, str) and model_name else recipe.vae.model
    texts = {name: section.model_copy(update={"model": vae}) for name, section in recipe.text.items()}
    return replace(defaults, vae=vae, vae_subfolder=recipe.vae.subfolder, texts=texts)


def _array(tensors: dict[str, Any], key: str, sides: int) -> np.ndarray:
    """A tensor without a leading batch of one, bfloat16 as float32; raises ValueError, RecordRejected."""
    tensor = tensors.get(key)
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in DTYPES or tensor.layout != torch.strided:
        raise ValueError(f"'{key}' is missing, or not a tensor of float16, bfloat16 or float32")
    if tensor.numel() * 4 > MAX_ARRAY_BYTES:
        raise ValueError(f"'{key}' of {tensor.numel()} numbers")
    tensor = tensor.reshape(without_batch(tuple(tensor.shape), sides))
    return np.ascontiguousarray((tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy())


def _valid(tensors: dict[str, Any], length: int) -> np.ndarray:
    """Which tokens of a caption are no padding, (L,) bool; raises ValueError, RecordRejected."""
    mask = tensors.get(MASK)
    if mask is None:
        return np.ones(length, bool)
    if not isinstance(mask, torch.Tensor) or mask.layout != torch.strided or mask.is_complex():
        raise ValueError(f"'{MASK}' is not a tensor of numbers")
    if mask.numel() != length:
        raise RecordRejected("scan", "wrong_shape", f"'{MASK}' of {tuple(mask.shape)} for {length} tokens")
    valid = (mask.reshape(-1) != 0).numpy()
    if not valid.any():
        raise RecordRejected("scan", "no_caption", f"'{MASK}' has no valid token")
    return valid


def _image(found: Any, model: str) -> tuple[str, ListedImage]:
    """Key and description of an image of the listing, as for ``add_listed``."""
    path = inner_path("/".join(PurePosixPath(found["cache_file"]).parts[-2:]))
    prompt = found.get("prompt")
    problem = ""
    key = next((key for key in BUCKET_KEYS if key in found), BUCKET_KEYS[0])
    sides = [found.get("original_resolution"), found.get(key)]
    if found.get("model_type", model) != model:
        problem = f"of model_type {str(found['model_type'])[:80]!r}, the cache is of '{model}'"
    elif not isinstance(prompt, str) or not prompt.strip() or len(prompt) > MAX_CAPTION_CHARS:
        problem = "its prompt is not text, empty, or too long"
    elif not all(isinstance(side, list) and len(side) == 2 and all(map(_is_side, side)) for side in sides):
        problem = f"its original_resolution or {key} is not [width, height]"
    if problem:
        size = bucket = (0, 0)
    else:
        size, bucket = ((height, width) for width, height in sides)
    return path.rpartition(".")[0], ListedImage(str(prompt), size, path, bucket, problem)


def _is_side(value: Any) -> bool:
    return isinstance(value, int) and 1 <= value < 1 << 20
