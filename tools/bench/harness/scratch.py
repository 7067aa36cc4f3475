"""A benchmark's folder inside the scratch folder: a benchmark removes only files that a benchmark made."""

from __future__ import annotations

import shutil
from pathlib import Path

from ....datasets.errors import RecipeError

MARKER = "made-by-leandit-bench"  # an empty file that marks such a folder


def benchmark_folder(scratch: Path, name: str) -> Path:
    """The folder of a benchmark inside the scratch folder; created if missing.

    Raises: RecipeError: a folder of that name exists, and no benchmark made it.
    """
    folder = scratch / name
    is_empty = folder.is_dir() and not any(folder.iterdir())
    if folder.exists() and not is_empty and not (folder / MARKER).is_file():
        raise RecipeError(
            f"--scratch '{scratch}': it has a '{name}' that no benchmark made (it lacks the file '{MARKER}'). A "
            "benchmark deletes files in its folder, so nothing was done. Give another --scratch, or move '{name}' away."
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).touch()
    return folder


def fresh_folder(parent: Path, name: str, *, make: bool = True) -> Path:
    """An empty folder inside a benchmark's folder; an old one is deleted first.

    Args:
      parent: from ``benchmark_folder``.
      make: create the folder, not just its path.
    """
    assert (parent / MARKER).is_file(), f"'{parent}' is not the folder of a benchmark"
    folder = parent / name
    if folder.exists():
        shutil.rmtree(folder)
    if make:
        folder.mkdir()
    return folder
