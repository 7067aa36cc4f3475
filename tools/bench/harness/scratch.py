"""A folder of a benchmark's own inside its scratch folder: whatever is removed there, the benchmark itself had made."""

from __future__ import annotations

import shutil
from pathlib import Path

from ....datasets.errors import RecipeError

MARKER = "made-by-leandit-bench"  # an empty file in such a folder


def own_folder(scratch: Path, name: str) -> Path:
    """The folder of a benchmark inside the scratch folder, made unless it is there.

    Raises: RecipeError: something of that name is there, and no benchmark made it.
    """
    folder = scratch / name
    is_empty = folder.is_dir() and not any(folder.iterdir())
    if folder.exists() and not is_empty and not (folder / MARKER).is_file():
        raise RecipeError(
            f"--scratch '{scratch}': it has a '{name}' that no benchmark made (there is no '{MARKER}' in it). A "
            "benchmark removes what is in its folder, so nothing was done. Give another --scratch, or move it away."
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).touch()
    return folder


def fresh_folder(own: Path, name: str, *, make: bool = True) -> Path:
    """A place inside a benchmark's own folder where nothing lies; what was there is removed.

    Args:
      own: as ``own_folder`` gave it.
      make: an empty folder there.
    """
    assert (own / MARKER).is_file(), f"'{own}' is no folder of a benchmark"
    folder = own / name
    if folder.exists():
        shutil.rmtree(folder)
    if make:
        folder.mkdir()
    return folder
