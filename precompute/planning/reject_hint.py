"""What may help where many records are rejected: captions that lie beside the pictures, settings."""

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
    """Sentences about what may help against some reasons: captions that lie beside the pictures, settings."""
    said = []
    if reasons.keys() & {"no_caption", "bad_metadata", "missing_file"} and (beside := _tables_beside(files)):
        said.append(f"Beside the pictures lie {beside}: docs/sources.md says how a table of captions is read.")
    if "no_caption" in reasons:
        said.append("To store pictures without a caption, add --set source.missing_caption=null.")
    return " ".join(said)


def _tables_beside(files: SourceFiles) -> str:
    """Names of a few files, in the source or the folder above it, that may hold captions; "" where there are none."""
    try:
        known = known_table(files)
        names = islice(files.names(), LOOKED_AT)
        some = sorted(name for name in names if name.lower().endswith(TABLE_NAMES) and name != known)
    except SourceError:  # of a URL, say; the error that this is a hint to says more
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
