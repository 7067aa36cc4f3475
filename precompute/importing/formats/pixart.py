"""PixArt's features: ``data_info.json``, moments as .npy, padded T5 embeddings with their mask as .npz."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from ....datasets.errors import RecordRejected, SourceError
from ...config import TextSection
from .recipe import ImportRecipe
from .source import CaptionHeader, Entry, FormatDefaults, Reader, RecordHeader, TextHeader, inner_path, rejecting
from .untrusted.arrays import look_member, look_npy, open_npz, open_regular, read_member

PIXART = FormatDefaults(
    latent="mean_std",
    is_scaled=False,
    vae="madebyollin/sdxl-vae-fp16-fix",
    downscale=8,
    scale=(0.13025,),
    one_size=False,
    texts={"": TextSection(kind="t5", model="google/t5-v1_1-xxl")},
)
DESCRIPTION = "data_info.json"
FEATURE, MASK = "caption_feature", "attention_mask"


class Item(NamedTuple):
    """A picture in ``data_info.json``, or why it cannot be used."""

    prompt: str = ""
    size: tuple[int, int] = (0, 0)
    problem: str = ""


class PixArt(Reader):
    """``data_info.json``, a folder of ``.npy`` (2C, H, W) mean then standard deviation, and one of ``.npz``.

    A record's file has the name of its picture, with the parent folder joined by "_" or "/", or omitted: PixArt's
    programs write all three. Sizes differ, so there are several buckets.

    Raises: SourceError: the description or a folder is missing.
    """

    kind, defaults = "pixart", PIXART
    has_labels = False

    def __init__(self, root: Path, recipe: ImportRecipe) -> None:
        super().__init__(root, recipe)
        found = [folder for folder in (root, root / "InternData") if (folder / DESCRIPTION).is_file()]
        if not found:
            raise SourceError(f"source '{root}': there is no '{DESCRIPTION}', which has the keys, captions and sizes.")
        self._latents = _folder(root, found[0], recipe.layout.latents, "latents", "*vae*", "*.npy")
        self._captions = _folder(root, found[0], recipe.layout.captions, "captions", "*caption*", "*.npz")
        self._items = dict(_items(found[0] / DESCRIPTION))

    def entries(self) -> Iterator[Entry]:
        """Pictures in the order of ``data_info.json``; a second picture with the same file is rejected."""
        used, prompts = set(), dict[str, str]()
        for key, item in self._items.items():
            path = "" if item.problem else self._find(self._latents, key, ".npy")
            if path and path in used:
                self._items[key] = item._replace(problem=f"'{path}' is the file of another picture, too")
            used.add(path)
            text = "" if item.problem else self._find(self._captions, key, ".npz")
            if text and prompts.setdefault(text, item.prompt) != item.prompt:
                self._items[key] = item._replace(problem=f"'{text}' is the caption of another picture, too")
            yield self.file_entry(path, key) if path else Entry(key, path)

    def _find(self, folder: str, key: str, suffix: str) -> str:
        """Path of a record's file, relative to the source; "" if missing."""
        stem = PurePosixPath(key).with_suffix("").as_posix()
        for name in dict.fromkeys((stem, "_".join(stem.rsplit("/", 1)), stem.replace("/", "_"), stem.split("/")[-1])):
            path = f"{folder}/{name}{suffix}"
            if (self.root / path).is_file():
                return path
        return ""

    def look(self, entry: Entry) -> RecordHeader:
        """From the headers, and the caption's mask or content."""
        item = self._items[entry.key]
        if item.problem:
            raise RecordRejected("scan", "bad_metadata", item.problem)
        if not entry.path:
            raise RecordRejected("scan", "missing_file", f"{entry.key}: no .npy of it in '{self._latents}'")
        with rejecting(entry.path):
            shape, dtype = look_npy(self.root / entry.path)
        return RecordHeader(shape, dtype, caption=self._look_caption(entry, item.prompt), size=item.size)

    def _look_caption(self, entry: Entry, prompt: str) -> CaptionHeader:
        path = self._caption_path(entry)
        with rejecting(path), open_npz(self.root / path) as arrays:
            shape, dtype = look_member(arrays, FEATURE)
            mask = read_member(arrays, MASK)
            tokens = _valid(read_member(arrays, FEATURE), mask) if self.recipe.text.check == "content" else None
        if len(shape) < 2 or mask.size != shape[-2] or np.prod(shape) != shape[-2] * shape[-1]:
            raise RecordRejected("scan", "wrong_shape", f"{path}: '{FEATURE}' {shape}, '{MASK}' {mask.shape}")
        if tokens is not None and not np.isfinite(tokens).all():
            raise RecordRejected("scan", "nonfinite", f"{path}: NaN or infinity in '{FEATURE}'")
        if dtype not in ("float16", "float32"):
            raise RecordRejected("scan", "wrong_shape", f"{path}: dtype {dtype}; needed float16 or float32")
        if not mask.any():
            raise RecordRejected("scan", "no_caption", f"{path}: not one valid token")
        header = TextHeader(int(np.count_nonzero(mask)), shape[-2], shape[-1], dtype)
        return CaptionHeader(prompt, (header,))

    def _caption_path(self, entry: Entry) -> str:
        path = self._find(self._captions, entry.key, ".npz")
        if not path:
            raise RecordRejected("scan", "no_caption", f"{entry.key}: no .npz of it in '{self._captions}'")
        return path

    def read_caption(self, entry: Entry, name: str) -> np.ndarray:
        """The tokens that the mask keeps, (L, D)."""
        path = self._caption_path(entry)
        with rejecting(path), open_npz(self.root / path) as arrays:
            return _valid(read_member(arrays, FEATURE), read_member(arrays, MASK))


def _valid(feature: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Rows of a padded embedding that its mask keeps; raises ValueError if the shapes do not match."""
    if feature.ndim < 2 or mask.size * feature.shape[-1] != feature.size:
        raise ValueError(f"'{FEATURE}' {feature.shape} and '{MASK}' {mask.shape} do not fit each other")
    return feature.reshape(-1, feature.shape[-1])[mask.reshape(-1) != 0]


def _items(path: Path) -> Iterator[tuple[str, Item]]:
    """Key and description of each picture, with problems; raises SourceError if it is not a list."""
    try:
        with open_regular(path) as file:
            listed: Any = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"source '{path}': cannot be read ({error}).") from error
    if not isinstance(listed, list):
        raise SourceError(f"source '{path}': needed a list of pictures, each with 'path' and 'prompt'.")
    keys = set()
    for i, item in enumerate(listed):
        key, found = f"{DESCRIPTION}:{i}", _item(item)
        if not found.problem:
            key = inner_path(item["path"])
            if key in keys:
                key, found = f"{DESCRIPTION}:{i}", Item(problem=f"'{key}' is there twice")
        keys.add(key)
        yield key, found


def _item(item: Any) -> Item:
    try:
        prompt, sides = item["prompt"], [item.get(name, 0) for name in ("height", "width")]
        inner_path(item["path"])
    except (TypeError, KeyError, AttributeError) as error:
        return Item(problem=f"no 'path' or 'prompt' ({type(error).__name__}: {error})")
    except RecordRejected as reject:
        return Item(problem=reject.detail)
    if not isinstance(prompt, str) or not prompt.strip():
        return Item(problem="its prompt is no text, or empty")
    has_size = all(isinstance(side, int | float) and 1 <= side < 1 << 20 for side in sides)
    return Item(prompt, (int(sides[0]), int(sides[1])) if has_size else (0, 0))


def _folder(root: Path, base: Path, configured: str, key: str, pattern: str, files: str) -> str:
    """The configured folder of features, or the only one that matches; raises SourceError."""
    if configured:
        if not (root / configured).is_dir():
            raise SourceError(f"source '{root}': layout.{key} '{configured}' is not a folder in it.")
        return configured
    tops = [path for path in sorted(base.glob(pattern)) if path.is_dir()]
    inner = [path for top in tops for path in (top, *sorted(top.iterdir())) if path.is_dir()]
    folders = [path.relative_to(root).as_posix() for path in inner if next(path.glob(files), None)]
    if len(folders) != 1:
        listed = f": {', '.join(folders[:5])}" if folders else ""
        raise SourceError(
            f"source '{base}': {len(folders)} folders '{pattern}' with {files}{listed}; needed one. Name it with --set "
            f"layout.{key}=FOLDER, relative to --source."
        )
    return folders[0]
