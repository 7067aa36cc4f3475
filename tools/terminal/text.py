"""Text for a terminal: results, aligned columns, decisions of ``--verbose``; no control characters."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

Rows = list[tuple[str, str]]
QUIET = "LEANDIT_QUIET"  # set in the environment, so that the processes of a command are as quiet as it is
LOGGER = __name__.partition(".")[0]


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
        print(json.dumps(finite(result), indent=1, allow_nan=False))
    elif isinstance(shown := render(result), str):
        print_text(shown)
    else:
        print_rows(shown)


def finite(value: Any) -> Any:
    """A JSON value with null for NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: the first column left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows)
    return ["  ".join(cells).rstrip() for cells in lines]


class DecisionLines(logging.Handler):
    """Prints what is logged with the seconds since the command began, the process where there are several, the module.

    rich's RichHandler would wrap lines and drop the module, so these lines could not be searched.
    """

    start = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record; ``sys.stderr`` is looked up each time, because a live progress bar replaces it."""
        rank = f"rank {os.environ.get('RANK', '0')}" if os.environ.get("WORLD_SIZE", "1") != "1" else ""
        seconds = f"{max(0.0, record.created - self.start):.1f} s"
        where = (seconds, rank, getattr(record, "place", ""), record.name.removeprefix(f"{LOGGER}."))
        line = f"leandit: [{' '.join(filter(None, where))}] {printable(record.getMessage())}"
        print(line, file=sys.stderr, flush=True)


_DECISIONS = DecisionLines()


def show_decisions(wanted: bool) -> None:
    """Print on stderr what modules log to the logger "leandit" from here on, or no longer."""
    logger, _DECISIONS.start = logging.getLogger(LOGGER), time.time()
    logger.removeHandler(_DECISIONS)
    if wanted:
        logger.addHandler(_DECISIONS)
    logger.setLevel(logging.INFO if wanted else logging.NOTSET)
