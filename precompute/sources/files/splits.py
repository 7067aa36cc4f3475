"""Splits of a source (train, validation, test), recognized by names: several are never stored as one by accident.

The names are those of Hugging Face's hub and common archives: shards ``train-00000-of-00005.parquet`` or
``imagenet-val-0003.tar``, in the source, its folder ``data`` or a configuration's folder; or folders ``train`` and
``val`` of shards, class folders or images.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice

from ....datasets.errors import SourceError
from ....datasets.units import plural
from ...config import SourceSection
from .files import SourceFiles
from .record import is_image

ALL = "all"  # of source.split: whatever the names say, all of it
SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
USUAL = {name: split for split, names in SPLITS.items() for name in names}
SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}")  # as the hub's libraries number the files of a split
WORD = re.compile(rf"(?<![a-z0-9])({'|'.join(USUAL)})(?![a-z])", re.IGNORECASE)
FOLDER = re.compile(rf"({'|'.join(USUAL)})[-_ ]?\d*", re.IGNORECASE)  # "train", "val2017"
SHARD_ENDS = (".parquet", ".tar")
LOOKED_AT = 1000  # files, to see whether a folder holds images or shards
MAX_CONFIGS = 64  # folders beside each other that may be configurations; more are classes
SHARD_KINDS = ("auto", "parquet", "webdataset", "imagenet")


def shard_names(files: SourceFiles, extension: str, split: str) -> list[str]:
    """The files of a source with an extension, in order; of one split, as in ``source.split``.

    Raises: SourceError: several splits and none named.
    """
    if files.only:
        return [files.only]
    return shards_of_split(files.name, (name for name in files.names() if name.endswith(extension)), split)


def shards_of_split(where: str, names: Iterable[str], split: str) -> list[str]:
    """The files of one split among the names of shards, in order.

    Args:
      where: the source, for messages.
      split: of the recipe: "" if there may be only one, "all" for every file.
    Raises: SourceError: several splits and none named, or none of this name.
    """
    names = sorted(names)
    tell = any(_split_of_shard(name) for name in names)
    if not names or (not tell and _is_split(where, split)):
        return names
    chosen = choose_split(
        where, Counter(_split_of_shard(name) for name in names), split, lambda count: plural(count, "file")
    )
    return names if chosen is None else [name for name in names if _split_of_shard(name) == chosen]


def folder_of_split(files: SourceFiles, settings: SourceSection) -> tuple[SourceFiles, list[str]]:
    """The folder that holds the images of the split: the source itself, or one inside it.

    Returns: its files, and notes.
    Raises: SourceError: several splits or configurations, and none named.
    """
    if files.only is not None:
        return files, []
    if any(name.endswith(SHARD_ENDS) for name in files.names()):
        return files, []  # their names tell the splits
    folders = list(islice(files.folders(), MAX_CONFIGS + 1))
    splits = [folder for folder in folders if FOLDER.fullmatch(folder)]
    holds_shards = _shard_folders(files, folders) if settings.kind in SHARD_KINDS else []
    if splits and _are_splits(files, folders, splits, settings.split):
        if settings.split == ALL and set(splits) & set(holds_shards):
            raise SourceError(
                f"source '{files.name}': its splits are folders of shards, which make one store each: "
                f"{', '.join(splits)}. Name one of them with --set source.split={_likely(splits)}."
            )
        if len(splits) == 1 and not settings.split:  # ImageNet's train/ alone is no class
            return files.inside(splits[0]), [
                f"the only folder, '{splits[0]}', is a split: keys and classes are those inside it, as with --source "
                f"{files.name.rstrip('/')}/{splits[0]}; source.split=all makes it a class"
            ]
        counts = Counter({folder: _num_entries(files, folder) for folder in splits})
        chosen = choose_split(files.name, counts, settings.split, lambda count: plural(count, "item"))
        if chosen is not None:
            return files.inside(chosen), [f"split '{chosen}' of {', '.join(splits)}"]
        return files, []
    if len(holds_shards) > 1:
        raise SourceError(
            f"source '{files.name}': several configurations: {', '.join(holds_shards)}. Pass one of them, such as "
            f"--source {files.name}/{holds_shards[0]}."
        )
    if holds_shards:
        inner, notes = folder_of_split(files.inside(holds_shards[0]), settings)
        return inner, [f"shards in folder '{holds_shards[0]}'", *notes]
    return files, []


def check_has_splits(where: str, split: str) -> None:
    """Raise if a split is named but the source has no recognizable splits.

    Raises: SourceError.
    """
    if split not in ("", ALL) and not _is_split(where, split):
        raise SourceError(
            f"source '{where}': no split '{split}': nothing in it is named train, validation or test. Leave "
            "source.split out to store all of it."
        )


def _is_split(where: str, split: str) -> bool:
    """The source folder itself is the split."""
    folder = where.rstrip("/").rpartition("/")[2]
    return split not in ("", ALL) and bool(FOLDER.fullmatch(folder)) and _usual(folder) == _usual(split)


def _are_splits(files: SourceFiles, folders: list[str], splits: list[str], asked: str) -> bool:
    """Folders named like splits are splits, not classes, if no other folder holds images; a lone one, if no image
    lies beside it."""
    others = [folder for folder in folders if folder not in splits]
    is_lone = len(splits) == 1 and not any(map(is_image, files.names()))
    enough = len(splits) > 1 or asked not in ("", ALL) or (is_lone and not asked)
    return enough and len(folders) <= MAX_CONFIGS and not any(_holds_images(files, folder) for folder in others)


def _shard_folders(files: SourceFiles, folders: list[str]) -> list[str]:
    """Folders that hold shards, directly or in folders of splits."""
    if len(folders) > MAX_CONFIGS or any(is_image(name) for name in files.names()):
        return []
    with_shards = []
    for folder in folders:
        inside = files.inside(folder)
        if _has_shards(inside):
            with_shards.append(folder)
        elif not FOLDER.fullmatch(folder):
            below = [name for name in islice(inside.folders(), MAX_CONFIGS) if FOLDER.fullmatch(name)]
            if any(_has_shards(inside.inside(name)) for name in below):
                with_shards.append(folder)
    return with_shards


def _has_shards(files: SourceFiles) -> bool:
    return any(name.endswith(SHARD_ENDS) for name in islice(files.names(), LOOKED_AT))


def _holds_images(files: SourceFiles, folder: str) -> bool:
    files_inside = islice(files.inside(folder).walk(files_first=True), LOOKED_AT)
    return any(is_image(file.path) or file.path.endswith(SHARD_ENDS) for file in files_inside)


def _num_entries(files: SourceFiles, folder: str) -> int:
    inside = files.inside(folder)
    return sum(1 for _ in inside.names()) + sum(1 for _ in inside.folders())


def _split_of_shard(name: str) -> str:
    """ "train" of "train-00000-of-00005.parquet" or "imagenet-train-0003.tar"; "" if unknown."""
    stem = name.rpartition(".")[0]
    if numbered := SHARD.fullmatch(stem):
        return numbered[1]
    word = WORD.search(stem)
    return word[1] if word else ""


def choose_split(where: str, counts: Counter[str], asked: str, show: Callable[[int], str] = str) -> str | None:
    """The requested split; None for all.

    Args:
      counts: of the entries of each split.
      show: formats a count for the message.
    Raises: SourceError: several and none named; or none of this name.
    """
    splits = [name for name in counts if name]
    listed = ", ".join(f"{name} ({show(counts[name])})" for name in splits)
    if asked == ALL or (not asked and len(splits) < 2):
        return None
    if not asked:
        raise SourceError(
            f"source '{where}': it holds several splits: {listed}. Name the one to store, for example with --set "
            f"source.split={_likely(splits)}; 'all' takes all of them as one source."
        )
    same = [name for name in splits if name == asked]
    same = same or [name for name in splits if _usual(name) == _usual(asked)]
    if len(same) != 1:
        raise SourceError(f"source '{where}': no split '{asked}'. It holds: {listed or 'no recognizable splits'}.")
    return same[0]


def _likely(splits: list[str]) -> str:
    """The split to suggest in a message: the training split if there is one."""
    return next((name for name in splits if _usual(name) == "train"), splits[0])


def _usual(name: str) -> str:
    """ "validation" of "val" and "imagenet-val", so that any usual name finds a split."""
    word = WORD.search(name)
    return USUAL[word[1].lower()] if word else name
