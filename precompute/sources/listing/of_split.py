"""The records of one split, where the folders of the images tell the splits, and not the names of files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute

from ....errors import SourceError
from ....units import plural
from ..files.splits import UNNAMED, choose_split, splits_of_folders
from .listing import Listing, spool

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

NAME_AT_END = r"/?[^/]*$"  # of a path
FIRST_FOLDER = r"^[^/]*/"


def records_of_split(
    where: str, records: Listing, asked: str, *, is_split: bool, is_table: bool, column: str = "path"
) -> tuple[Listing, bool, list[str]]:
    """The records of the requested split, and rejects that no folder tells the split of, such as rows without a name.

    Args:
      where: the source, for messages.
      asked: of the recipe: "" if there may be only one split.
      is_split: names of folders or files told the split, so its name need not occur again.
      is_table: a table names the images, so no folder of them is a class.
      column: with the path of each image: "path", or "key" for members of a tar, after the name of the tar.
    Returns: the records, whether some were left out, and notes.
    Raises: SourceError: several splits and none named, or none of this name.
    """
    folders: Counter[str] = Counter()
    for batch in records.batches():
        names = _folders(batch, column)
        folders.update(dict.fromkeys(names.unique().to_pylist(), 0))
        counted = pc.value_counts(names.filter(batch["reason"].is_null()))
        folders.update(dict(zip(counted.field("values").to_pylist(), counted.field("counts").to_pylist(), strict=True)))
    split_of = splits_of_folders(folders, is_table=is_table)
    counts: Counter[str] = Counter()
    for folder, count in folders.items():
        counts[split_of[folder]] += count
    if not any(counts.keys()):
        return records, False, []
    try:
        chosen = choose_split(where, counts, asked, lambda count: plural(count, "image"))
    except SourceError:
        if not (asked and is_split):
            raise
        chosen = None
    if chosen is None:
        return records, False, []

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in records.batches():
            splits = pa.array([split_of[folder] for folder in _folders(batch, column).to_pylist()], pa.string())
            is_chosen = pc.equal(splits, chosen)
            is_reject_of_no_split = pc.and_(batch["reason"].is_valid(), pc.equal(splits, ""))  # as a broken row
            yield batch.filter(pc.or_(is_chosen, is_reject_of_no_split))

    left_out = [f"{count:,} of {name or UNNAMED}" for name, count in counts.items() if name != chosen and count]
    note = f"split '{chosen or UNNAMED}' by the folders of the images: {plural(counts[chosen], 'image')}"
    listing = spool(batches(), lambda _: None, check_keys=False)
    return listing, True, [f"{note}; left out: {', '.join(left_out) or 'none'}"]


def _folders(batch: pa.RecordBatch, column: str) -> pa.Array:
    """The folder of each image."""
    paths = batch[column]
    if column == "key":
        paths = pc.replace_substring_regex(paths, FIRST_FOLDER, "")
    return pc.replace_substring_regex(paths, NAME_AT_END, "")
