"""Splits of a source (train, validation, test), recognized by names: several are never stored as one by accident.

The names are those of Hugging Face's hub and common archives: shards ``train-00000-of-00005.parquet`` or
``imagenet-val-0003.tar``, in the source, its folder ``data`` or a configuration's folder; or folders ``train`` and
``val`` of shards, class folders or images.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, takewhile
from typing import TYPE_CHECKING

from ....errors import SourceError
from ....units import plural
from ...config import SourceSection
from .files import SourceFiles
from .record import is_image

if TYPE_CHECKING:
    from .folders import Scan

ALL = "all"  # of source.split: whatever the names say, all of it
SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
USUAL = {name: split for split, names in SPLITS.items() for name in names}
SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}")  # as the hub's libraries number the files of a split
CONTENT = "images?|imgs?|photos?|pictures?|data|set|split"
WORD = re.compile(rf"(?<![a-z0-9])({'|'.join(USUAL)})(?:{CONTENT})?(?![a-z])", re.IGNORECASE)  # "my-testset-0"
FOLDER = re.compile(  # "train", "val2017", "test_images", "images-test", "testset"
    rf"(?:(?:{CONTENT})[-_ ]?)?({'|'.join(USUAL)})(?:[-_ ]?(?:\d+|{CONTENT}))?", re.IGNORECASE
)
UNNAMED = "unnamed"  # of source.split: what is in no split by its name, beside some that is
HELD_OUT = ("validation", "test")
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
    tell = tell_split(names)
    if not tell:  # folders in the shards, or a column, may tell
        return names
    chosen = choose_split(
        where, Counter(_split_of_shard(name) for name in names), split, lambda count: plural(count, "file")
    )
    return names if chosen is None else [name for name in names if _split_of_shard(name) == chosen]


def tell_split(names: Iterable[str]) -> bool:
    """Whether the names of some shards tell their split."""
    return any(map(_split_of_shard, names))


def folder_of_split(files: SourceFiles, settings: SourceSection) -> tuple[SourceFiles, list[str]]:
    """The folder that holds the images of the split: the folder of the source, or one inside it.

    Returns: its files, and notes.
    Raises: SourceError: several splits or configurations, and none named.
    """
    if files.only is not None:
        return files, []
    if any(name.endswith(SHARD_ENDS) for name in files.names()):
        return files, []  # their names tell the splits
    folders = list(islice(files.folders(), MAX_CONFIGS + 1))
    splits = [folder for folder in folders if FOLDER.fullmatch(folder)]
    if len(splits) > 1 and len(folders) <= MAX_CONFIGS and _have_same_folders(files, splits):
        # They hold the same classes, so they are no classes: what is beside them is a split too, such as "extra".
        splits = [folder for folder in folders if folder in splits or _holds_images(files, folder)]
    shard_folders = _shard_folders(files, folders) if settings.kind in SHARD_KINDS else []
    if splits and _are_splits(files, folders, splits, settings.split):
        if settings.split == ALL and set(splits) & set(shard_folders):
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
    if len(shard_folders) > 1:
        raise SourceError(
            f"source '{files.name}': several configurations: {', '.join(shard_folders)}. Pass one of them, such as "
            f"--source {files.name}/{shard_folders[0]}."
        )
    if shard_folders:
        inner, notes = folder_of_split(files.inside(shard_folders[0]), settings)
        return inner, [f"shards in folder '{shard_folders[0]}'", *notes]
    return files, []


def check_has_splits(where: str, split: str) -> None:
    """Raise if a split is named but the source has no recognizable splits.

    Raises: SourceError.
    """
    if split not in ("", ALL) and not _is_folder_of_split(where, split):
        raise SourceError(
            f"source '{where}': no split '{split}': nothing in it is named train, validation or test. Leave "
            "source.split out to store all of it."
        )


def _is_folder_of_split(where: str, split: str) -> bool:
    """Whether the folder of the source is itself named like the split."""
    folder = where.rstrip("/").rpartition("/")[2]
    return bool(FOLDER.fullmatch(folder)) and _usual(folder) == _usual(split)


def _are_splits(files: SourceFiles, folders: list[str], splits: list[str], asked: str) -> bool:
    """Whether folders that are named like splits are splits and not classes: no other folder may hold images.

    A lone one is no split if images lie beside it; then the paths of the images tell their splits
    (``splits_of_folders``).
    """
    if len(folders) > MAX_CONFIGS:
        return False
    if len(splits) == 1 and (asked == ALL or any(map(is_image, files.names()))):
        return False
    return not any(_holds_images(files, folder) for folder in folders if folder not in splits)


def _have_same_folders(files: SourceFiles, folders: list[str]) -> bool:
    """Whether some folder is in each of several folders, as a class in each split."""
    inside = [set(islice(files.inside(folder).folders(), LOOKED_AT)) for folder in folders]
    return bool(set.intersection(*inside))


def _shard_folders(files: SourceFiles, folders: list[str]) -> list[str]:
    """Folders that hold shards, directly or in folders of splits."""
    if len(folders) > MAX_CONFIGS or any(is_image(name) for name in files.names()):
        return []
    shard_folders = []
    for folder in folders:
        inside = files.inside(folder)
        if _has_shards(inside):
            shard_folders.append(folder)
        elif not FOLDER.fullmatch(folder):
            below = [name for name in islice(inside.folders(), MAX_CONFIGS) if FOLDER.fullmatch(name)]
            if any(_has_shards(inside.inside(name)) for name in below):
                shard_folders.append(folder)
    return shard_folders


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
    """The requested split; None for all, "" for what is in no split by its name.

    Args:
      counts: of the entries of each split, and as "" of those whose names tell none.
      show: formats a count for the message.
    Raises: SourceError: several and none named; or none of this name. What has no name beside a split for validation or
      test is a split too: it is likely the training split.
    """
    splits = [name for name in counts if name]
    has_held_out = any(_usual(name) in HELD_OUT for name in splits)
    if counts[""] and has_held_out:
        splits.append("")
    listed = ", ".join(f"{name or UNNAMED} ({show(counts[name])})" for name in splits)
    if asked == ALL or (not asked and len(splits) < 2):
        return None
    if not asked:
        raise SourceError(
            f"source '{where}': it holds several splits: {listed}. Name the one to store, for example with --set "
            f"source.split={_likely(splits)}; 'all' takes all of them as one source."
        )
    same = [name for name in splits if (name or UNNAMED) == asked]
    same = same or [name for name in splits if name and _usual(name) == _usual(asked)]
    if not same and "" in splits and _usual(asked) == "train":
        same = [""]
    if len(same) != 1:
        raise SourceError(f"source '{where}': no split '{asked}'. It holds: {listed or 'no recognizable splits'}.")
    return same[0]


def _likely(splits: list[str]) -> str:
    """The split to suggest in a message: the training split if there is one."""
    return next((name for name in splits if _usual(name) == "train"), UNNAMED if "" in splits else splits[0])


def _usual(name: str) -> str:
    """ "validation" of "val" and "imagenet-val", so that any usual name finds a split."""
    match = FOLDER.fullmatch(name) or WORD.search(name)
    return USUAL[match[1].lower()] if match else name


def values_of_split(where: str, values: Counter[str], scan: Scan) -> list[str] | None:
    """The values of a column of splits that are those of the requested split; None for all rows.

    It is such a column only if it names a usual split. Adds a note to the scan, which then knows of the column.

    Args:
      values: number of rows of each value, and as "" of those without.
    Raises: SourceError: several splits and none named, or none of this name.
    """
    split_of = {value: _usual_value(value.strip()) for value in values}
    if not any(split in SPLITS for split in split_of.values()):
        return None
    scan.has_split_column = True
    counts: Counter[str] = Counter()
    for value, count in values.items():
        counts[split_of[value]] += count
    chosen = choose_split(where, counts, scan.settings.split, lambda count: plural(count, "row"))
    if chosen is None:
        return None
    scan.notes.append(f"split '{chosen or UNNAMED}' by the table's column of splits: {plural(counts[chosen], 'row')}")
    return [value for value in values if split_of[value] == chosen]


def _usual_value(value: str) -> str:
    """ "validation" of the values "val", "VAL2017" and "val_set" of a column of splits; else the value itself."""
    match = FOLDER.fullmatch(value)
    return USUAL[match[1].lower()] if match else value


def splits_of_folders(folders: Counter[str], *, is_table: bool) -> dict[str, str]:
    """The usual split of each folder of images, "" for none.

    In a table every folder that is named like a split is one, below those that all images share. Elsewhere such a name
    may be that of a class, so its folder is a split only if all folders of images beside it are: those of several
    splits, or of one beside images.

    Args:
      folders: number of images of each folder, by its path.
    """
    paths = {folder: folder.split("/") if folder else [] for folder in folders}
    if is_table:
        levels = zip(*paths.values(), strict=False)
        num_shared = sum(1 for _ in takewhile(lambda level: len(set(level)) == 1, levels))
        return {folder: _first_split(parts[num_shared:]) for folder, parts in paths.items()}
    children: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for parts in paths.values():
        for depth, name in enumerate(parts):
            children[tuple(parts[:depth])].add(name)
    direct = {tuple(parts) for parts in paths.values()}
    parents = {
        parent
        for parent, names in children.items()
        if all(map(FOLDER.fullmatch, names)) and (len({_usual(name) for name in names}) > 1 or parent in direct)
    }
    splits = {}
    for folder, parts in paths.items():
        depth = next((depth for depth in range(len(parts)) if tuple(parts[:depth]) in parents), None)
        splits[folder] = "" if depth is None else _usual(parts[depth])
    return splits


def _first_split(parts: Sequence[str]) -> str:
    return next((_usual(name) for name in parts if FOLDER.fullmatch(name)), "")
