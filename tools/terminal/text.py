"""Text for a terminal: aligned columns, and no control characters of others."""

from __future__ import annotations

from collections.abc import Sequence


def printable(text: str) -> str:
    """Text without control characters, which a key or caption of others could bring onto the terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def print_rows(rows: list[tuple[str, str]]) -> None:
    """Print names and values, the values under each other."""
    for name, value in rows:
        print(f"{name:<12}{value}")


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: the first column to the left, the others to the right."""
    widths = column_widths(rows)
    return [
        "  ".join(
            [f"{row[0]:<{widths[0]}}", *(f"{text:>{width}}" for text, width in zip(row[1:], widths[1:], strict=True))]
        ).rstrip()
        for row in rows
    ]


def column_widths(rows: Sequence[Sequence[str]]) -> list[int]:
    """Characters of the widest cell of each column."""
    return [max(map(len, column)) for column in zip(*rows, strict=True)]
