"""The results of ``leandit bench gpu`` on disk: one JSON line a cell, each written before the next cell begins."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....datasets.errors import RecipeError
from .cells import Cell

FILE = "cells.jsonl"
DONE, FAILED, CUT, SKIPPED = "done", "failed", "cut", "skipped"  # the status of a cell
Record = dict[str, Any]


def read_results(out: Path) -> dict[str, Record]:
    """The last record of each cell, by its name; a line that was cut while it was written counts for nothing.

    Raises: RecipeError: a line is no record.
    """
    path, records = out / FILE, {}
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # its cell is not among the finished ones, and is run again
        if not isinstance(record, dict) or not {"cell", "status"} <= record.keys():
            raise RecipeError(f"'{path}', line {number}: needed a record of 'leandit bench gpu'. Give another folder.")
        records[record["cell"]] = record
    return records


def append_result(out: Path, record: Mapping[str, Any]) -> None:
    """Add a line and wait until it is on the disk."""
    with (out / FILE).open("ab+") as file:
        is_torn = file.tell() > 0 and not _ends_a_line(file)
        file.write(("\n" if is_torn else "").encode() + json.dumps(record).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def is_finished(cell: Cell, record: Record | None, *, again: bool) -> bool:
    """Whether a cell need not run: it is done with the same arguments, or has failed and is not to be tried again."""
    if record is None or record["arguments"] != cell.arguments:
        return False
    return record["status"] == DONE or (record["status"] in (FAILED, SKIPPED) and not again)


def _ends_a_line(file: Any) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"
