"""Where the pictures lie that a table names: in which folder, and what of a name is not part of their path.

A table of others was often made elsewhere: its names are of one folder, without the folder's name, without an
extension, or begin with a folder of another machine. The first names tell, by the files that are there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import PurePosixPath

from ....datasets.errors import SourceError
from .files import FoundFile, SourceFiles
from .record import ANNOTATIONS, is_picture

LOOKED_NAMES = 16  # of a table, to find where the pictures lie
MAX_FOLDERS = 20  # of a source, in which they are looked for
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".JPG", ".JPEG", ".PNG")  # of names without one


@dataclass(frozen=True)
class Placement:
    """How the name in a row becomes the path of a picture within the source: ``folder/NAME + suffix``.

    Args:
      folder: to which names are relative; "" for the source itself.
      suffix: that the names lack.
      prefix: with which names begin here, and which is no part of their path; the key has none of it.
    """

    folder: str = ""
    suffix: str = ""
    prefix: str = ""

    def said(self) -> str:
        """What was found, for a person."""
        parts = [f"in '{self.folder}'" if self.folder else "beside the table"]
        parts += [f"'{self.suffix}' is added to their names"] if self.suffix else []
        parts += [f"'{self.prefix}' before their names is left out"] if self.prefix else []
        return ", ".join(parts)

    def key(self, name: str) -> str:
        """The name without the prefix."""
        return name.removeprefix(self.prefix)

    def path(self, inside: str) -> str:
        """Path of the picture of a key."""
        return f"{self.folder}/{inside}{self.suffix}" if self.folder else f"{inside}{self.suffix}"

    def look(self, files: SourceFiles, inside: str) -> FoundFile | None:
        """The picture of a key; where it is not there, with another suffix than the first names lack."""
        found = files.look(self.path(inside))
        if found and not found.problem:
            return found
        others = (replace(self, suffix=suffix) for suffix in suffixes_of(inside) if suffix != self.suffix)
        looked = (files.look(other.path(inside)) for other in others)
        return next((other for other in looked if other and not other.problem), found)


def normalized_root(root: str) -> str | None:
    """``source.root`` as a path within the source, "" for the source itself; None where it lies elsewhere."""
    inside = os.path.normpath(os.path.expanduser(root))
    if "://" in root or os.path.isabs(inside) or inside.split(os.sep)[0] == "..":
        return None
    return "" if inside == "." else inside


def default_root(files: SourceFiles) -> str:
    """``source.root`` where the recipe says none: COCO's lists lie in a folder beside those of the pictures."""
    is_coco = files.only and files.only.endswith(".json") and files.name.rsplit("/", 2)[-2:-1] == [ANNOTATIONS]
    return ".." if is_coco else ""


def elsewhere(files: SourceFiles, root: str) -> str:
    """Path or URL of a folder of pictures that lies elsewhere than the table.

    Raises: SourceError: it is relative to a URL.
    """
    root = root if "://" in root else os.path.expanduser(root)
    if "://" in root or os.path.isabs(root):
        return root
    if "://" in files.name:
        raise SourceError(f"source '{files.name}': source.root '{root}' leaves it. Give the URL of that folder.")
    return os.path.join(os.path.dirname(files.name) if files.only else files.name, root)


def folders_of(files: SourceFiles) -> Iterator[str]:
    """Folders of a source in which the pictures of a table may lie; none where they cannot be listed."""
    with contextlib.suppress(SourceError):
        yield from islice(files.folders(), MAX_FOLDERS)


def suffixes_of(name: str) -> tuple[str, ...]:
    """What a name may lack of the path of its picture."""
    return ("",) if is_picture(name) else ("", *SUFFIXES)


def find_placement(files: SourceFiles, names: Sequence[str], folders: Iterable[str]) -> Placement | None:
    """Find out where the pictures of a table lie, by the files that its first names lead to.

    Args:
      files: of the pictures.
      names: the first ones of the table.
      folders: that may hold the pictures, within the source; "" for the source itself.
    Returns: the first that leads to a file; None where none does.
    """
    for folder in folders:
        for name in names[:LOOKED_NAMES]:
            for prefix in _prefixes(name):
                for suffix in suffixes_of(name):
                    placement = Placement(folder, suffix, prefix)
                    if _is_inside(placement.key(name)) and _is_file(
                        files, placement.path(os.path.normpath(placement.key(name)))
                    ):
                        return placement
    return None


def _prefixes(name: str) -> Iterator[str]:
    """What an absolute name may begin with that is no part of its path here: the longest path that is here wins."""
    if not name.startswith("/"):
        yield ""
        return
    parts = PurePosixPath(name).parts
    for count in range(1, len(parts)):
        prefix = "/" + "".join(f"{part}/" for part in parts[1:count])
        if name.startswith(prefix):
            yield prefix


def _is_inside(path: str) -> bool:
    inside = os.path.normpath(path)
    return bool(path) and not os.path.isabs(inside) and inside.split(os.sep)[0] not in ("..", ".")


def _is_file(files: SourceFiles, path: str) -> bool:
    found = files.look(path)
    return found is not None and not found.problem
