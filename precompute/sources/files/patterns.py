"""Sources that select files of a folder: ``shards/{000..003}.tar`` as in WebDataset, ``shards/*.tar``."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from braceexpand import braceexpand

from ....datasets.errors import SourceError
from .entries import FoundFile, LeftOut
from .files import LocalFiles, SourceFiles, open_source_files
from .remote import RemoteFiles

MAX_FILES = 1_000_000  # of one pattern
WILD = "*?["


class _Chosen:
    """Selected files of a folder."""

    chosen: frozenset[str]

    def names(self) -> Iterator[str]:
        return iter(sorted(self.chosen))

    def folders(self) -> Iterator[str]:
        return iter(())

    def walk(self, *, files_first: bool = False, left_out: LeftOut = lambda _: None) -> Iterator[FoundFile]:
        for name in sorted(self.chosen):
            yield self.look(name) or FoundFile(name, problem=("unreadable", f"there is no file any more: {name}"))

    def look(self, path: str) -> FoundFile | None:
        return super().look(path) if path in self.chosen else None  # pyright: ignore


class _ChosenLocal(_Chosen, LocalFiles):
    pass


class _ChosenRemote(_Chosen, RemoteFiles):
    pass


def open_files(source: Path | str) -> SourceFiles:
    """As ``open_source_files``; the name may have braces, and local names also ``*``, ``?`` and ``[...]``.

    Raises: SourceError: no file matches, or files of several folders.
    """
    pattern = str(source)
    is_remote = "://" in pattern
    if "{" not in pattern and (is_remote or not any(letter in pattern for letter in WILD)):
        return open_source_files(source)
    if not is_remote and os.path.exists(pattern):
        return open_source_files(source)
    paths = _expanded(pattern, is_remote=is_remote)
    if len(paths) == 1:
        return open_source_files(paths[0])
    folders = sorted({path.rpartition("/")[0] for path in paths})
    if len(folders) > 1:
        raise SourceError(
            f"source '{pattern}': it leads to files of {len(folders)} folders, '{folders[0]}' and '{folders[1]}'. "
            "Needed files of one folder: link them into one."
        )
    files = (_ChosenRemote if is_remote else _ChosenLocal)(folders[0] if is_remote else Path(folders[0] or "."))  # type: ignore[arg-type]
    files.chosen = frozenset()
    inner = open_source_files(folders[0] if is_remote else Path(folders[0] or "."))
    names = [path.rpartition("/")[2] for path in paths]
    for name in names:
        found = inner.look(name)
        if found and not found.problem:
            continue
        if os.path.isdir(os.path.join(folders[0], name)):
            raise SourceError(
                f"source '{pattern}': it matches the folder '{name}'; needed files alone, as *.tar. Give each folder "
                f"as a --source of its own, or as one source '{folders[0] or '.'}', which holds them."
            )
        raise SourceError(f"source '{pattern}': there is no file '{name}' in '{folders[0]}'. Check the pattern.")
    files.chosen, files.name = frozenset(names), pattern
    return files


def _expanded(pattern: str, *, is_remote: bool) -> list[str]:
    try:
        plain = list(islice(braceexpand(pattern), MAX_FILES + 1))
    except ValueError as error:
        raise SourceError(
            f"source '{pattern}': its braces cannot be read ({error}). Needed as {{000..003}}."
        ) from error
    paths: list[str] = []
    for one in plain:
        is_wild = not is_remote and any(letter in one for letter in WILD)
        paths += sorted(islice(glob.iglob(one), MAX_FILES + 1)) if is_wild else [one]
    if not paths or len(paths) > MAX_FILES:
        raise SourceError(
            f"source '{pattern}': it leads to {'no file' if not paths else f'more than {MAX_FILES} files'}. Check it."
        )
    return paths
