"""Caches of NeMo AutoModel's diffusion preprocessing: a file of tensors for each picture, and JSON that lists them.

Latents are already normalised. Each model has its own tensors; those of pictures whose layout is known are read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import torch

from ....datasets.errors import RecordRejected, SourceError
from ....datasets.revisions.writer import row_checksum
from ...config import load
from ...sources.files.record import MAX_CAPTION_CHARS
from .recipe import ImportRecipe
from .source import (
    CaptionHeader,
    Entry,
    Features,
    FormatDefaults,
    Reader,
    RecordHeader,
    TextHeader,
    inner_path,
    rejecting,
)
from .untrusted.arrays import MAX_ARRAY_BYTES, read_file
from .untrusted.torch_files import read_tensors

# Of AutoencoderKLQwenImage, whose model takes (z - mean) / std.
QWEN_MEAN = (-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508)
QWEN_MEAN += (0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921)
QWEN_STD = (2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743)
QWEN_STD += (3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160)


class Model(NamedTuple):
    """A processor of NeMo, and the shipped recipe of the same encoders."""

    recipe: str
    defaults: FormatDefaults


def _scaled(latent: str, downscale: int, shift: tuple[float, ...], scale: tuple[float, ...]) -> FormatDefaults:
    return FormatDefaults(latent, is_scaled=True, vae="", downscale=downscale, shift=shift, scale=scale, one_size=False)


MODELS = {
    "flux": Model("flux1-1024", _scaled("sample", 8, (0.1159,), (0.3611,))),
    "flux2": Model("flux2-1024", replace(_scaled("mean", 16, (), ()), patchify=2)),
    "qwen_image": Model("qwen-image-1024", _scaled("sample", 8, QWEN_MEAN, tuple(1 / std for std in QWEN_STD))),
}
DESCRIPTION = "metadata.json"
MAX_DESCRIPTION = 1 << 30
MAX_FILE = 1 << 30
LATENT, TOKENS, POOLED = "latent", "prompt_embeds", "pooled_prompt_embeds"
DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}


class Item(NamedTuple):
    """A picture in the listing, with (width_px, height_px), or why it cannot be used."""

    prompt: str = ""
    original: tuple[int, int] = (0, 0)
    bucket: tuple[int, int] = (0, 0)
    problem: str = ""


class Nemo(Reader):
    """``metadata.json``, its ``metadata_shard_*.json``, and ``WIDTHxHEIGHT/HASH.pt``.

    The listing has absolute paths; only the last two parts of each are read, so the cache may have moved.

    Raises: SourceError: the listing is missing or damaged, or of a model whose layout is not known.
    """

    kind, defaults = "nemo", MODELS["flux"].defaults
    has_labels = False

    def __init__(self, root: Path, recipe: ImportRecipe) -> None:
        super().__init__(root, recipe)
        described = _json(root, DESCRIPTION, dict)
        self._model = str(described.get("model_type"))
        if self._model not in MODELS:
            raise SourceError(
                f"source '{root}': '{DESCRIPTION}' is of model_type '{self._model[:80]}'. An import reads caches of "
                f"{', '.join(MODELS)}; videos and edits of pictures have other tensors."
            )
        self.defaults = _defaults(self._model, described.get("model_name"))
        if not self.defaults.scale and not recipe.vae.scale:
            raise SourceError(
                f"source '{root}': its latents are normalised by the batch norm of the VAE, which a cache of "
                f"'{self._model}' lacks, and decoding needs it. Give it, one number a channel: "
                "--set vae.shift=[running_mean, ...] --set vae.scale=[1/sqrt(running_var + eps), ...]."
            )
        shards = described.get("shards")
        if not isinstance(shards, list) or not all(isinstance(name, str) for name in shards):
            raise SourceError(f"source '{root}': '{DESCRIPTION}' needs 'shards', a list of files. Restore it.")
        self._items: dict[str, Item] = {}
        self._paths: dict[str, str] = {}
        for name in shards:
            for i, found in enumerate(_json(root, _inner(root, name), list)):
                self._list(f"{name}:{i}", found)

    def _list(self, place: str, found: Any) -> None:
        """Add a picture of the listing; one whose file was named before has its place as a key."""
        try:
            path = inner_path("/".join(PurePosixPath(found["cache_file"]).parts[-2:]))
            key, item = path.rpartition(".")[0], _item(found, self._model)
        except (TypeError, KeyError) as error:
            path, key, item = "", place, Item(problem=f"no 'cache_file' ({type(error).__name__}: {error})")
        except RecordRejected as reject:
            path, key, item = "", place, Item(problem=reject.detail)
        if key in self._items:
            key, item = place, Item(problem=f"'{path}' is there twice")
        self._items[key], self._paths[key] = item, "" if item.problem else path

    def entries(self) -> Iterator[Entry]:
        """Pictures in the order of the listing."""
        for key, path in self._paths.items():
            yield self.file_entry(path, key) if path else Entry(key, path)

    def look(self, entry: Entry) -> RecordHeader:
        """From its tensors, which are read whole."""
        item = self._items[entry.key]
        if item.problem:
            raise RecordRejected("scan", "bad_metadata", item.problem)
        with rejecting(entry.path):
            tensors = self._tensors(entry)
            latent = _array(tensors, LATENT, 3)
            headers = tuple(self._look_text(tensors, name) for name in self.defaults.texts)
        pixels = (latent.shape[2] * self.defaults.downscale, latent.shape[1] * self.defaults.downscale)
        if pixels != item.bucket:
            detail = f"a latent of {latent.shape}, listed as {item.bucket[0]} x {item.bucket[1]} px"
            raise RecordRejected("scan", "wrong_shape", f"{entry.path}: {detail}")
        caption = CaptionHeader(item.prompt, headers)
        return RecordHeader(latent.shape, latent.dtype.name, caption=caption, size=(item.original[1], item.original[0]))

    def _look_text(self, tensors: dict[str, Any], name: str) -> TextHeader:
        section = self.defaults.texts[name]
        values, stored = self._text(tensors, name), DTYPES[tensors[_key(section.output)].dtype]
        if self.recipe.text.check == "content" and not np.isfinite(values).all():
            raise RecordRejected("scan", "nonfinite", f"NaN or infinity in '{_key(section.output)}'")
        if values.ndim == 1:
            return TextHeader(1, section.max_tokens, len(values), stored)
        length, width = values.shape
        if not 1 <= length <= section.max_tokens:
            raise RecordRejected("scan", "wrong_shape", f"{length} tokens; needed 1 to {section.max_tokens}")
        return TextHeader(length, length if section.full_length else section.max_tokens, width, stored)

    def read(self, entry: Entry) -> Features:
        """The latent."""
        with rejecting(entry.path):
            latent = _array(self._tensors(entry), LATENT, 3)
        return Features([latent], row_checksum(latent))

    def read_caption(self, entry: Entry, name: str) -> np.ndarray:
        """All tokens, (L, D), or the pooled vector (P,)."""
        with rejecting(entry.path):
            return self._text(self._tensors(entry), name)

    def _text(self, tensors: dict[str, Any], name: str) -> np.ndarray:
        output = self.defaults.texts[name].output
        return _array(tensors, _key(output), 1 if output == "pooled" else 2)

    def _tensors(self, entry: Entry) -> dict[str, Any]:
        """Content of a picture's file; raises OSError, ValueError."""
        path = self.root / entry.path
        if path.stat().st_size > MAX_FILE:
            raise ValueError(f"more than {MAX_FILE} bytes")
        tensors = read_tensors(path)
        if not isinstance(tensors, dict):
            raise ValueError("not a dictionary of tensors")
        return tensors


def _defaults(model: str, model_name: Any) -> FormatDefaults:
    """The properties of a model, with the encoders of its shipped recipe, or those that the cache names."""
    recipe = load(MODELS[model].recipe, [])
    vae = model_name if isinstance(model_name, str) and model_name else recipe.vae.model
    texts = {name: section.model_copy(update={"model": vae}) for name, section in recipe.texts.items()}
    return replace(MODELS[model].defaults, vae=vae, vae_subfolder=recipe.vae.subfolder, texts=texts)


def _key(output: str) -> str:
    return POOLED if output == "pooled" else TOKENS


def _array(tensors: dict[str, Any], key: str, sides: int) -> np.ndarray:
    """A tensor without a leading batch of one, bfloat16 as float32; raises ValueError."""
    tensor = tensors.get(key)
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in DTYPES or tensor.layout != torch.strided:
        raise ValueError(f"'{key}' is missing, or no tensor of float16, bfloat16 or float32")
    if tensor.numel() * 4 > MAX_ARRAY_BYTES:
        raise ValueError(f"'{key}' of {tensor.numel()} numbers")
    tensor = tensor[0] if tensor.ndim == sides + 1 and len(tensor) == 1 else tensor
    if tensor.ndim != sides or 0 in tensor.shape:
        raise ValueError(f"'{key}' of shape {tuple(tensor.shape)}; needed {sides} sides")
    return np.ascontiguousarray((tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy())


def _item(found: Any, model: str) -> Item:
    """A picture of the listing; raises TypeError."""
    prompt, sides = found.get("prompt"), [found.get(f"{name}_resolution") for name in ("original", "bucket")]
    if found.get("model_type", model) != model:
        return Item(problem=f"of model_type {str(found['model_type'])[:80]!r}, the cache is of '{model}'")
    if not isinstance(prompt, str) or not prompt.strip() or len(prompt) > MAX_CAPTION_CHARS:
        return Item(problem="its prompt is no text, empty, or too long")
    if not all(isinstance(side, list) and len(side) == 2 and all(map(_is_side, side)) for side in sides):
        return Item(problem="its original_resolution or bucket_resolution is no [width, height]")
    original, bucket = ((int(width), int(height)) for width, height in sides)
    return Item(prompt, original, bucket)


def _is_side(value: Any) -> bool:
    return isinstance(value, int) and 1 <= value < 1 << 20


def _inner(root: Path, name: str) -> str:
    try:
        return inner_path(name)
    except RecordRejected as reject:
        raise SourceError(f"source '{root}': '{DESCRIPTION}': {reject.detail}. Restore it.") from reject


def _json(root: Path, name: str, kind: type) -> Any:
    """The content of a file of JSON; raises SourceError."""
    try:
        content = json.loads(read_file(root / name, MAX_DESCRIPTION))
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(
            f"source '{root}': '{name}' cannot be read ({type(error).__name__}: {str(error)[:200]}). NeMo writes it "
            "when all pictures are done: let the preprocessing end, or restore it."
        ) from error
    if not isinstance(content, kind):
        raise SourceError(f"source '{root}': '{name}' needs a {kind.__name__}. Restore it.")
    return content
