"""Class-conditional features with one file a record: fast-DiT's .npy pairs and MAR's .npz in class folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ....datasets.revisions.writer import row_checksum
from ....errors import RecordRejected, SourceError
from ...sources.files.ignored import is_system_folder
from ..recipe import ImportRecipe
from ..source import Entry, Features, FormatDefaults, Reader, RecordHeader, files_below, natural_order, rejecting
from ..untrusted import look_npz, parse_npy, read_file, read_npz

FEATURES, LABELS = "_features", "_labels"
MOMENTS = ("moments", "moments_flip")


class FastDit(Reader):
    """``imagenet256_features/N.npy`` (1, C, H, W), scaled samples, and ``imagenet256_labels/N.npy`` (1,).

    A flip was drawn at random when the image was encoded, and stays.

    Raises: SourceError: the two folders are missing.
    """

    kind = "fast-dit"
    defaults = FormatDefaults("sample", is_scaled=True, vae="stabilityai/sd-vae-ft-ema", downscale=8, scale=(0.18215,))

    def __init__(self, root: Path, recipe: ImportRecipe) -> None:
        super().__init__(root, recipe)
        folders = sorted(path.name for path in root.iterdir() if path.is_dir() and path.name.endswith(FEATURES))
        if len(folders) != 1:
            raise SourceError(
                f"source '{root}': {len(folders)} folders whose name ends in '{FEATURES}'; expected one, such as "
                "'imagenet256_features'."
            )
        self._features, self._labels = folders[0], folders[0].removesuffix(FEATURES) + LABELS
        if not (root / self._labels).is_dir():
            raise SourceError(f"source '{root}': there is no '{self._labels}' with the labels of '{folders[0]}'.")

    def entries(self) -> Iterator[Entry]:
        """Files in numeric order; a label without features is a reject."""
        folders = (self.root / self._features, self.root / self._labels)
        names = {name for folder in folders for name in os.listdir(folder) if name.endswith(".npy")}
        for name in sorted(names, key=natural_order):
            yield self.file_entry(f"{self._features}/{name}", name.removesuffix(".npy"))

    def _header(self, entry: Entry) -> RecordHeader:
        shape, dtype = self.look_latent(entry)
        path = f"{self._labels}/{entry.key}.npy"
        with rejecting(path, "no_label"):
            label = parse_npy(read_file(self.root / path))
        if label.size != 1 or label.dtype.kind not in "iu":
            raise RecordRejected(
                "scan", "no_label", f"{path}: {label.dtype} of shape {label.shape}, expected an integer"
            )
        return RecordHeader(shape, dtype, label=int(label.reshape(())))


class Mar(Reader):
    """``CLASS/NAME.npz`` with ``moments`` and ``moments_flip``, (2C, H, W) mean then log-variance.

    Raises: SourceError: there are no class folders.
    """

    kind = "mar"
    defaults = FormatDefaults("mean_logvar", is_scaled=False, vae="mar/kl16", downscale=16, scale=(0.2325,))

    def __init__(self, root: Path, recipe: ImportRecipe) -> None:
        super().__init__(root, recipe)
        folders = (path.name for path in root.iterdir() if path.is_dir())
        self.classes = sorted(name for name in folders if not is_system_folder(name))
        if not self.classes:
            raise SourceError(f"source '{root}': it contains no class folders; expected CLASS/NAME.npz.")
        self._label_of = {name: label for label, name in enumerate(self.classes)}

    def entries(self) -> Iterator[Entry]:
        """Files in the order of their paths, class by class."""
        for name in self._label_of:
            for path in files_below(self.root / name, ".npz"):
                yield self.file_entry(path.relative_to(self.root).as_posix())

    def _header(self, entry: Entry) -> RecordHeader:
        found = look_npz(self.root / entry.path, MOMENTS)
        if "moments" not in found or len(set(found.values())) > 1:
            raise RecordRejected(
                "scan", "wrong_shape", f"{entry.path}: arrays {found}; expected 'moments', and 'moments_flip' like it"
            )
        shape, dtype = found["moments"]
        return RecordHeader(shape, dtype, has_flip=len(found) == 2, label=self._label_of[entry.path.split("/")[0]])

    def _values(self, entry: Entry) -> Features:
        path = self.root / entry.path
        moments = read_npz(path, list(look_npz(path, MOMENTS)))  # of the image, and of the flipped image
        return moments, row_checksum(*moments)
