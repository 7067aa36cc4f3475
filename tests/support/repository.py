"""The files of this repository, for tests that read them as text."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("datasets", "precompute", "train", "tools")
SHARED = [ROOT / f"{name}.py" for name in ("effects", "errors", "recipe", "units")]  # what every room imports
MODULES = [*SHARED, *(path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py")))]


def name_of(path: Path) -> str:
    """Relative to the root."""
    return path.relative_to(ROOT).as_posix()


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a module."""
    return ast.parse(path.read_text())
