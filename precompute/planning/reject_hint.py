"""Advice for many rejects: tables of captions near the pictures, and settings."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from ...datasets.errors import SourceError
from ..sources.files.files import LocalFiles, SourceFiles
from ..sources.tables.manifests import known_table

TABLE_NAMES = (".csv", ".tsv", ".txt", ".json", ".jsonl", ".parquet", ".xlsx")
LOOKED_AT = 10_000  # files, to see whether captions lie beside the pictures
MANY_TABLES = 5


def reject_hint(files: SourceFiles, reasons: Mapping[str, int]) -> str:
    """Advice against some reject reasons: tables of captions near the pictures, and settings."""
    advice = []
    if reasons.keys() & {"no_caption", "bad_metadata", "missing_file"} and (beside := _tables_beside(files)):
        advice.append(f"Beside the pictures lie {beside}: docs/sources.md says how a table of captions is read.")
    if "no_caption" in reasons:
        advice.append("To store pictures without a caption, add --set source.missing_caption=null.")
    return " ".join(advice)


def _tables_beside(files: SourceFiles) -> str:
    """Names of files in the source or its parent folder that may hold captions; empty if none."""
    try:
        known = known_table(files)
        names = islice(files.names(), LOOKED_AT)
        some = sorted(name for name in names if name.lower().endswith(TABLE_NAMES) and name != known)
    except SourceError:  # the original error matters more
        return ""
    if len(some) > MANY_TABLES:  # a text beside each picture
        some = []
    if isinstance(files, LocalFiles) and not files.only:
        above = files.root.resolve().parent.glob("*")
        names = (path.name for path in islice(above, LOOKED_AT) if path.is_file())
        some += sorted(
            f"../{name}" for name in names if name.lower().endswith(TABLE_NAMES) and "caption" in name.lower()
        )
    return ", ".join(f"'{name}'" for name in some[:MANY_TABLES])
