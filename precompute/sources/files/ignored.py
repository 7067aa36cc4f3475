"""Files and folders that a listing skips, with counts."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field

from ....units import plural
from .record import HEIF_EXTENSIONS, is_image

# Of macOS archives, network storage, Windows and Linux disks, and Python; all in lower case.
SYSTEM_FOLDERS = {
    *("__macosx", "@eadir", "@recycle", "@tmp", "#recycle", "#snapshot", "$recycle.bin", "recycler"),
    *("system volume information", "lost+found", "__pycache__"),
}
MAX_EXTENSIONS = 100  # that are counted apart
MAX_EXTENSION_CHARS = 12
NUM_SHOWN = 6
OTHERS = "others"


def is_system_folder(name: str) -> bool:
    """Hidden, or created by an operating system."""
    return name.startswith(".") or name.casefold() in SYSTEM_FOLDERS


@dataclass
class Ignored:
    """Counts of skipped files and folders.

    Args:
      extensions: of files that are not images, with the dot and in lower case.
      folders: names of skipped folders.
      num_hidden_images: hidden files with the extension of an image, such as the ones that macOS writes.
      hidden_image: name of the first.
    """

    extensions: Counter[str] = field(default_factory=Counter)
    folders: Counter[str] = field(default_factory=Counter)
    num_hidden_images: int = 0
    hidden_image: str = ""

    @property
    def num_files(self) -> int:
        """Files without the extension of an image."""
        return self.extensions.total()

    def file(self, path: str) -> None:
        """Count a file."""
        extension = os.path.splitext(path)[1].lower() or "without extension"
        is_usual = len(extension) <= MAX_EXTENSION_CHARS or extension == "without extension"
        is_kept = extension in self.extensions or len(self.extensions) < MAX_EXTENSIONS
        self.extensions[extension if is_usual and is_kept else OTHERS] += 1

    def folder(self, name: str) -> None:
        """Count a folder."""
        is_kept = name in self.folders or len(self.folders) < MAX_EXTENSIONS
        self.folders[name if is_kept else OTHERS] += 1

    def hidden_file(self, name: str) -> None:
        """Count a hidden file, if it has the extension of an image."""
        if is_image(name):
            self.num_hidden_images += 1
            self.hidden_image = self.hidden_image or name

    def lines(self) -> list[str]:
        """A line for files, for hidden images and for folders, if any."""
        lines = []
        if self.extensions:
            lines.append(f"{plural(self.num_files, 'file')}, not images by name: {_most(self.extensions)}")
        if HEIF_EXTENSIONS & self.extensions.keys():
            lines.append("HEIC and HEIF are read with pillow-heif: pip install 'leandit[heif]'")
        if ".jxl" in self.extensions:
            lines.append("JPEG XL is not read: convert it first, for example with djxl of libjxl")
        if self.num_hidden_images:
            count = plural(self.num_hidden_images, "hidden file")
            lines.append(f"{count} with the extension of an image, such as {self.hidden_image}")
        if self.folders:
            count = plural(self.folders.total(), "folder")
            lines.append(f"{count}, hidden, system or linked twice: {_most(self.folders)}")
        return lines


def _most(counts: Counter[str]) -> str:
    shown = [f"{count} {name}" for name, count in counts.most_common(NUM_SHOWN)]
    return ", ".join([*shown, "..."] if len(counts) > NUM_SHOWN else shown)
