"""PixArt's features: ``data_info.json``, moments as .npy, padded T5 embeddings with their mask as .npz."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from ....errors import RecordRejected, SourceError
from ...config import TextSection
from ..recipe import ImportRecipe
from ..source import (
    Entry,
    FormatDefaults,
    ListedImage,
    Reader,
    RecordHeader,
    TextHeader,
    add_listed,
    inner_path,
    rejecting,
)
from ..untrusted import look_npz, read_npz

LISTING = "data_info.json"
FEATURE, MASK = "caption_feature", "attention_mask"


class PixArt(Reader):
    """``data_info.json``, a folder of ``.npy`` (2C, H, W) mean then standard deviation, and one of ``.npz``.

    A record's file has the name of its image, with the parent folder joined by "_" or "/", or omitted: PixArt's
    programs write all three. Sizes differ, so there are several buckets.

    Raises: SourceError: the description or a folder is missing.
    """

    kind = "pixart"
    defaults = FormatDefaults(
        "mean_std",
        is_scaled=False,
        vae="madebyollin/sdxl-vae-fp16-fix",
        downscale=8,
        scale=(0.13025,),
        one_size=False,
        texts={"": TextSection(kind="t5", model="google/t5-v1_1-xxl")},
    )
    has_labels = False

    def __init__(self, root: Path, recipe: ImportRecipe) -> None:
        super().__init__(root, recipe)
        folder = next((name for name in ("", "InternData/") if (root / name / LISTING).is_file()), None)
        if folder is None:
            raise SourceError(f"source '{root}': there is no '{LISTING}', which has the keys, captions and sizes.")
        self._latents = self._folder(root / folder, recipe.layout.latents, "latents", "*vae*", "*.npy")
        self._captions = self._folder(root / folder, recipe.layout.captions, "captions", "*caption*", "*.npz")
        self._images: dict[str, ListedImage] = {}
        add_listed(self._images, self.json(f"{folder}{LISTING}", list), LISTING, _image)

    def _folder(self, base: Path, configured: str, key: str, pattern: str, files: str) -> str:
        """The configured folder of features, or the only one that matches; raises SourceError."""
        if configured:
            if not (self.root / configured).is_dir():
                raise SourceError(f"source '{self.root}': layout.{key} '{configured}' is not a folder in it.")
            return configured
        tops = [path for path in sorted(base.glob(pattern)) if path.is_dir()]
        inner = [path for top in tops for path in (top, *sorted(top.iterdir())) if path.is_dir()]
        folders = [path.relative_to(self.root).as_posix() for path in inner if next(path.glob(files), None)]
        if len(folders) != 1:
            listed = f": {', '.join(folders[:5])}" if folders else ""
            raise SourceError(
                f"source '{base}': {len(folders)} folders '{pattern}' with {files}{listed}; expected one. Name it with "
                f"--set layout.{key}=FOLDER, relative to --source."
            )
        return folders[0]

    def entries(self) -> Iterator[Entry]:
        """Images in the order of the listing; a second image with the same file is rejected."""
        used, prompts = set(), dict[str, str]()
        for key, image in self._images.items():
            path = "" if image.problem else self._find(self._latents, key, ".npy")
            if path and path in used:
                self._images[key] = image._replace(problem=f"'{path}' is also the file of another image")
            used.add(path)
            text = "" if image.problem else self._find(self._captions, key, ".npz")
            if text and prompts.setdefault(text, image.prompt) != image.prompt:
                self._images[key] = image._replace(problem=f"'{text}' is also the caption of another image")
            yield self.file_entry(path, key) if path else Entry(key, path)

    def _find(self, folder: str, key: str, suffix: str) -> str:
        """Path of a record's file, relative to the source; "" if missing."""
        stem = PurePosixPath(key).with_suffix("").as_posix()
        for name in dict.fromkeys((stem, "_".join(stem.rsplit("/", 1)), stem.replace("/", "_"), stem.split("/")[-1])):
            path = f"{folder}/{name}{suffix}"
            if (self.root / path).is_file():
                return path
        return ""

    def _header(self, entry: Entry) -> RecordHeader:
        image = self._images[entry.key]
        if image.problem:
            raise RecordRejected("scan", "bad_metadata", image.problem)
        if not entry.path:
            raise RecordRejected("scan", "missing_file", f"{entry.key}: no .npy for it in '{self._latents}'")
        shape, dtype = self.look_latent(entry)
        return RecordHeader(shape, dtype, text=image.prompt, texts=(self._look_caption(entry),), size=image.size)

    def _look_caption(self, entry: Entry) -> TextHeader:
        path = self._caption_path(entry)
        with rejecting(path):
            shape, dtype = look_npz(self.root / path, [FEATURE])[FEATURE]
            (mask,) = read_npz(self.root / path, [MASK])
            if self.recipe.text.check == "content" and not np.isfinite(self._tokens(path)).all():
                raise RecordRejected("scan", "nonfinite", f"{path}: NaN or infinity in '{FEATURE}'")
        if len(shape) < 2 or mask.size != shape[-2] or np.prod(shape) != shape[-2] * shape[-1]:
            raise RecordRejected("scan", "wrong_shape", f"{path}: '{FEATURE}' {shape}, '{MASK}' {mask.shape}")
        if not mask.any():
            raise RecordRejected("scan", "no_caption", f"{path}: no valid token")
        return TextHeader(int(np.count_nonzero(mask)), shape[-2], shape[-1], dtype)

    def _caption_path(self, entry: Entry) -> str:
        path = self._find(self._captions, entry.key, ".npz")
        if not path:
            raise RecordRejected("scan", "no_caption", f"{entry.key}: no .npz for it in '{self._captions}'")
        return path

    def _caption(self, entry: Entry, name: str) -> np.ndarray:
        path = self._caption_path(entry)
        with rejecting(path):
            return self._tokens(path)

    def _tokens(self, path: str) -> np.ndarray:
        feature, mask = read_npz(self.root / path, [FEATURE, MASK])
        if feature.ndim < 2 or mask.size * feature.shape[-1] != feature.size:
            raise ValueError(f"'{FEATURE}' {feature.shape} and '{MASK}' {mask.shape} do not match")
        return feature.reshape(-1, feature.shape[-1])[mask.reshape(-1) != 0]


def _image(found: Any) -> tuple[str, ListedImage]:
    """Key and description of an image of the listing, as for ``add_listed``."""
    key, prompt = inner_path(found["path"]), found["prompt"]
    sides = [found.get(name, 0) for name in ("height", "width")]
    if not isinstance(prompt, str) or not prompt.strip():
        raise RecordRejected("scan", "bad_metadata", "its prompt is not text, or empty")
    has_size = all(isinstance(side, int | float) and 1 <= side < 1 << 20 for side in sides)
    return key, ListedImage(prompt, (int(sides[0]), int(sides[1])) if has_size else (0, 0))
