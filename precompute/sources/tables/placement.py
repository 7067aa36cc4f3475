"""Where the images of a table are: the folder, and which part of a name is not part of the path.

Tables often come from another machine: names are relative to one folder, lack the extension, or start with a foreign
folder. Existing files decide for the first names.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import PurePosixPath

from ....datasets.errors import SourceError
from ..files.files import FoundFile, SourceFiles
from ..files.record import is_image

LOOKED_NAMES = 16  # of a table, to find where the images lie
MAX_FOLDERS = 20  # of a source, in which they are looked for
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".JPG", ".JPEG", ".PNG")  # of names without one
ANNOTATIONS = "annotations"  # folder of COCO's lists, beside the folders of the images


@dataclass(frozen=True)
class Placement:
    """Maps a name in a row to the path of an image within the source: ``folder/NAME + suffix``.

    Args:
      folder: that names are relative to; "" for the source itself.
      suffix: that names lack.
      prefix: of names that is not part of their path; keys lack it.
    """

    folder: str = ""
    suffix: str = ""
    prefix: str = ""

    def described(self) -> str:
        """The placement in words."""
        parts = [f"in '{self.folder}'" if self.folder else "beside the table"]
        parts += [f"'{self.suffix}' is added to their names"] if self.suffix else []
        parts += [f"'{self.prefix}' before their names is left out"] if self.prefix else []
        return ", ".join(parts)

    def path(self, inside: str) -> str:
        """Path of the image of a name without the prefix."""
        return f"{self.folder}/{inside}{self.suffix}" if self.folder else f"{inside}{self.suffix}"

    def look(self, files: SourceFiles, inside: str) -> FoundFile | None:
        """The image of a name without the prefix; tries other suffixes if it is missing."""
        file = files.look(self.path(inside))
        if file and not file.problem:
            return file
        others = (replace(self, suffix=suffix) for suffix in _suffixes(inside) if suffix != self.suffix)
        looked = (files.look(other.path(inside)) for other in others)
        return next((other for other in looked if other and not other.problem), file)


def find_placement(files: SourceFiles, names: Sequence[str], folders: Iterable[str]) -> Placement | None:
    """Find where the images of a table are, by the files that exist for its first names.

    Args:
      files: of the images.
      names: the first ones of the table.
      folders: candidates within the source; "" for the source itself.
    Returns: the first placement with a file; None if there is none.
    """
    for folder in folders:
        for name in names[:LOOKED_NAMES]:
            for prefix in _prefixes(name):
                inside = os.path.normpath(name.removeprefix(prefix))
                if name == prefix or leaves_source(inside) or inside == ".":
                    continue
                for suffix in _suffixes(name):
                    placement = Placement(folder, suffix, prefix)
                    file = files.look(placement.path(inside))
                    if file is not None and not file.problem:
                        return placement
    return None


def leaves_source(inside: str) -> bool:
    """Whether a normalized path is not below the source."""
    return os.path.isabs(inside) or inside.split(os.sep)[0] == ".."


def normalized_root(root: str) -> str | None:
    """``source.root`` as a path within the source, "" for the source itself; None if it is elsewhere."""
    inside = os.path.normpath(os.path.expanduser(root))
    if "://" in root or leaves_source(inside):
        return None
    return "" if inside == "." else inside


def default_root(files: SourceFiles) -> str:
    """Default of ``source.root``: COCO's lists are in a folder next to the images."""
    is_coco = files.only and files.only.endswith(".json") and files.name.rsplit("/", 2)[-2:-1] == [ANNOTATIONS]
    return ".." if is_coco else ""


def elsewhere(files: SourceFiles, root: str) -> str:
    """Path or URL of a folder of images outside the source.

    Raises: SourceError: it is relative to a URL.
    """
    root = root if "://" in root else os.path.expanduser(root)
    if "://" in root or os.path.isabs(root):
        return root
    if "://" in files.name:
        raise SourceError(f"source '{files.name}': source.root '{root}' leaves it. Give the URL of that folder.")
    return os.path.join(os.path.dirname(files.name) if files.only else files.name, root)


def folders_of(files: SourceFiles) -> Iterator[str]:
    """Folders of a source that may hold the images of a table; none if they cannot be listed."""
    with contextlib.suppress(SourceError):
        yield from islice(files.folders(), MAX_FOLDERS)


def _suffixes(name: str) -> tuple[str, ...]:
    """Suffixes that a name may lack."""
    return ("",) if is_image(name) else ("", *SUFFIXES)


def _prefixes(name: str) -> Iterator[str]:
    """Candidate prefixes of an absolute name, shortest first: the longest existing path wins."""
    if not name.startswith("/"):
        yield ""
        return
    parts = PurePosixPath(name).parts
    for count in range(1, len(parts)):
        prefix = "/" + "".join(f"{part}/" for part in parts[1:count])
        if name.startswith(prefix):
            yield prefix
