"""Images that belong to another image of a folder: masks, control images and thumbnails, by their names.

Trainers keep them beside the image, as ``NAME-masklabel.png`` of OneTrainer, or under the same name in a folder
``masks`` or ``control``. They are no images to train on. A companion of the recipe stores those whose ending or folder
is its column.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import lru_cache

from .files import FoundFile, SourceFiles
from .further import SEPARATORS, FurtherImages
from .record import Place, is_image

KINDS = "masklabel|condlabel|masks?|controls?|conditioning|cond|thumbnails?|thumbs?"
# The name of a folder, or of a column.
MASKS = re.compile(rf"(?:images?[-_ ])?(?:{KINDS})(?:[-_ ]images?)?", re.IGNORECASE)
ENDING = re.compile(rf"(.+)([-_.](?:{KINDS}))", re.IGNORECASE)  # of a name without its extension
IMAGE_FOLDERS = ("images", "image", "imgs", "img", "photos", "targets", "target")
MIN_SHARE = 0.5  # of the images of a folder that must have the names of other images
CACHED_FOLDERS = 16


class ImagesBeside:
    """Tells which images of a folder belong to others.

    Args:
      files: of the source.
      companions: of the recipe: the ending of names, such as "-masklabel", or the folder, by name. An ending without
        a separator may have any.
      further: counts the images that no companion stores.
    Attributes:
      num_found: companions that were found, by name.
    """

    def __init__(self, files: SourceFiles, companions: Mapping[str, str], further: FurtherImages) -> None:
        self._files = files
        self._companions = companions
        self._further = further
        self.num_found = dict.fromkeys(companions, 0)
        self._names = lru_cache(CACHED_FOLDERS)(self._list_names)
        self._names_without_endings = lru_cache(CACHED_FOLDERS)(
            lambda folder: {_without_ending(stem): name for stem, name in self._names(folder).items()}
        )
        self._is_of_others = lru_cache(CACHED_FOLDERS)(self._folder_belongs_to_images)

    def belongs_to_another(self, path: str) -> bool:
        """Whether an image belongs to another one; counts it if no companion stores it."""
        column = self._column(path)
        if column and not any(self._is_column(column, asked) for asked in self._companions.values()):
            self._further.add(column, path)
        return bool(column)

    def holds_only_images_of_others(self, folder: str) -> bool:
        """Whether a folder directly in the source has images, at any depth, and all belong to others by its name."""
        if not self._may_hold_images_of_others(folder):
            return False
        paths = (f"{folder}/{file.path}" for file in self._files.inside(folder).walk() if is_image(file.path))
        columns = {self._column(path) for path in paths}
        return bool(columns) and "" not in columns

    def companions_of(self, path: str) -> tuple[tuple[Place, ...], tuple[str, str] | None]:
        """The places of an image's companions in the order of the recipe, and why one is missing."""
        places: list[Place] = []
        for name, column in self._companions.items():
            file = self._find(path, column)
            if file is None:
                detail = f"companion '{name}': no image beside '{path}' ends in '{column}', and none is in '{column}'"
                return (), ("missing_file", detail)
            if file.problem:
                return (), (file.problem[0], f"companion '{name}': {file.problem[1]}")
            self.num_found[name] += 1
            places.append((file.path, 0, file.num_bytes, file.mtime_ns))
        return tuple(places), None

    def _find(self, path: str, column: str) -> FoundFile | None:
        """The companion of an image."""
        folder, stem = os.path.split(os.path.splitext(path)[0])
        endings = [column] if column[0] in SEPARATORS else [f"{mark}{column}" for mark in SEPARATORS]
        for ending in endings:
            name = self._names(folder).get(stem + ending)
            if name:
                return self._files.look(os.path.join(folder, name))
        parts = folder.split("/") if folder else []
        folders = [[*parts[:i], column, *parts[i:]] for i in range(len(parts) + 1)]
        for i, part in enumerate(parts):
            if part.lower() in IMAGE_FOLDERS:
                folders.append([*parts[:i], column, *parts[i + 1 :]])
        for path_parts in folders:
            beside = "/".join(path_parts)
            name = self._names_without_endings(beside).get(stem)
            if name:
                return self._files.look(f"{beside}/{name}")
        return None

    def _column(self, path: str) -> str:
        """The ending or the folder by which an image belongs to another; empty if it does not."""
        folder, stem = os.path.split(os.path.splitext(path)[0])
        ending = ENDING.fullmatch(stem)
        if ending and ending[1] in self._names(folder):
            return ending[2]
        for column in self._companions.values():
            whole = stem.removesuffix(column)
            if column[0] not in SEPARATORS:
                whole = whole[:-1] if whole != stem and whole.endswith(tuple(SEPARATORS)) else stem
            if whole != stem and whole in self._names(folder):
                return column
        return self._is_of_others(folder)

    def _folder_belongs_to_images(self, folder: str) -> str:
        """The part of a folder's path that is that of masks or the like, if its images have the names of others."""
        parts = folder.split("/") if folder else []
        for i in reversed(range(len(parts))):
            if not self._may_hold_images_of_others(parts[i]):
                continue
            stems = self._names_without_endings(folder).keys()
            partners = [[*parts[:i], *parts[i + 1 :]]]
            partners += [[*parts[:i], name, *parts[i + 1 :]] for name in self._image_folders("/".join(parts[:i]))]
            for partner in partners:
                same = stems & self._names("/".join(partner)).keys()
                if stems and len(same) >= MIN_SHARE * len(stems):
                    return parts[i]
        return ""

    def _may_hold_images_of_others(self, name: str) -> bool:
        """Whether a folder is called like masks and the like, or like the column of a companion."""
        return bool(MASKS.fullmatch(name)) or name in self._companions.values()

    def _image_folders(self, folder: str) -> list[str]:
        return [name for name in self._files.folders_in(folder) if name.lower() in IMAGE_FOLDERS]

    def _list_names(self, folder: str) -> dict[str, str]:
        """The images directly in a folder: their names by those without extension."""
        return {os.path.splitext(name)[0]: name for name in sorted(self._files.names_in(folder)) if is_image(name)}

    @staticmethod
    def _is_column(column: str, asked: str) -> bool:
        return asked in (column, column.lstrip(SEPARATORS))


def _without_ending(stem: str) -> str:
    ending = ENDING.fullmatch(stem)
    return ending[1] if ending else stem
