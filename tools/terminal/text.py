"""Text for a terminal: results, aligned columns, no control characters."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import Any

Rows = list[tuple[str, str]]
QUIET = "LEANDIT_QUIET"  # set in the environment, so that the processes of a command are as quiet as it is


def is_quiet() -> bool:
    """Whether a command prints results and errors alone, no progress and no notes."""
    return os.environ.get(QUIET, "") not in ("", "0")


def printable(text: str) -> str:
    """Text with control characters escaped; keys and captions may contain some."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def print_text(text: str) -> None:
    """Print lines on stdout, with control characters escaped."""
    print("\n".join(map(printable, text.split("\n"))))


def print_rows(rows: Rows) -> None:
    """Print names and values in two columns."""
    for name, value in rows:
        print(f"{name:<12}{printable(value)}")


def print_result(result: Any, render: Callable[[Any], str | Rows], *, as_json: bool) -> None:
    """Print a result on stdout: as JSON, or as ``render`` shows it."""
    if as_json:
        print(json.dumps(result, indent=1))
    elif isinstance(shown := render(result), str):
        print_text(shown)
    else:
        print_rows(shown)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: the first column left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows)
    return ["  ".join(cells).rstrip() for cells in lines]
