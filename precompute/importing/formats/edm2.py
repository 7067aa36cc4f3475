"""EDM2's dataset of latents: a ZIP of .npy members, or its folder, with labels in ``dataset.json``.

Nothing is unpacked to disk: a member's name is a key, never a path.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

from ....errors import RecordRejected, SourceError
from ...images.faults import open_regular
from ...sources.files.record import usable_key
from ..recipe import ImportRecipe
from ..source import MAX_JSON_BYTES, Entry, FormatDefaults, Reader, RecordHeader, files_below, inner_path
from ..untrusted import MAX_ARRAY_BYTES, MAX_HEADER, Looked, look

RAW_MEAN = (5.81, 3.25, 0.12, -2.15)  # of latents of images from 0 to 1, as EDM2's StabilityVAEEncoder has them
RAW_STD = (4.17, 4.62, 3.71, 3.28)
FINAL_STD = 0.5
LABELS = "dataset.json"


class Edm2(Reader):
    """``NAME.npy`` members (2C, H, W), mean then standard deviation, and ``{"labels": [[NAME.npy, LABEL], ...]}``.

    Raises: SourceError: its labels, or the directory of the ZIP, cannot be read.
    """

    kind = "edm2"
    defaults = FormatDefaults(
        "mean_std",
        is_scaled=False,
        vae="stabilityai/sd-vae-ft-mse",
        downscale=8,
        shift=RAW_MEAN,
        scale=tuple(FINAL_STD / std for std in RAW_STD),
        zero_to_one=True,
    )

    def __init__(self, root: Path, recipe: ImportRecipe) -> None:
        super().__init__(root, recipe)
        self._zip = None
        if not root.is_dir():
            with self.needing(root.name):
                self._zip = zipfile.ZipFile(open_regular(root))
        listed = self.json(LABELS, dict).get("labels") or ()
        try:
            self._labels = {str(name): label for name, label in listed}
        except (TypeError, ValueError) as error:
            raise SourceError(f"source '{root}': '{LABELS}': its labels are not a list of [name, label].") from error
        if wrong := [name for name, label in self._labels.items() if type(label) is not int]:
            raise SourceError(f"source '{root}': '{LABELS}': the label of {wrong[0][:100]!r} is not a class number.")
        self.has_labels = bool(self._labels)

    def listing(self, name: str) -> bytes:
        """The bytes of a member or a file; an empty object without it."""
        if self._zip is None:
            return super().listing(name) if os.path.lexists(self.root / name) else b"{}"
        return self._member(name, MAX_JSON_BYTES) if name in self._zip.namelist() else b"{}"

    def _member(self, name: str, most: int) -> bytes:
        """The first bytes of a member; a whole one's CRC is checked. Raises KeyError, OSError, ZIP_ERRORS."""
        assert self._zip, "a folder has no members"
        with self._zip.open(name) as member:
            return member.read(most)

    def entries(self) -> Iterator[Entry]:
        """Members in the order of their names, then labels without members, which are rejects."""
        listed = set()
        for entry in self._members():
            listed.add(entry.path)
            yield entry
        for label_name in sorted(self._labels.keys() - listed):
            name, problem = usable_key(label_name)
            yield Entry(name.removesuffix(".npy"), name if problem else label_name)

    def _members(self) -> Iterator[Entry]:
        if self._zip is None:
            for path in files_below(self.root, ".npy"):
                yield self.file_entry(path.relative_to(self.root).as_posix())
            return
        for info in sorted(self._zip.infolist(), key=lambda info: info.filename):
            if info.filename.endswith(".npy"):
                yield Entry(info.filename.removesuffix(".npy"), info.filename, info.header_offset, info.file_size)

    def _header(self, entry: Entry) -> RecordHeader:
        inner_path(entry.path)
        shape, dtype = self.look_latent(entry)
        if self.has_labels and entry.path not in self._labels:
            raise RecordRejected("scan", "no_label", f"'{LABELS}' has no label for {entry.path}")
        return RecordHeader(shape, dtype, label=self._labels.get(entry.path, -1))

    def look_latent(self, entry: Entry) -> Looked:
        """Shape and dtype of a member, or a file."""
        if self._zip is None:
            return super().look_latent(entry)
        if entry.path not in self._zip.NameToInfo:
            detail = f"{entry.path}: it has a label in '{LABELS}', but the file is missing"
            raise RecordRejected("scan", "missing_file", detail)
        return look(self._member(entry.path, MAX_HEADER), entry.num_bytes)

    def content(self, entry: Entry) -> bytes:
        """A member, or a file."""
        return self._member(entry.path, MAX_ARRAY_BYTES + MAX_HEADER) if self._zip else super().content(entry)
