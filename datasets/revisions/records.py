"""One record of a store, and what an error says of a key that no record has."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them
NUM_NEAR, MOST_COMPARED = 3, 4000  # keys in an error; keys compared one by one


@dataclass(frozen=True)
class Record:
    """One image with its captions and label, as stored.

    ``index`` is its position in the records table, ``row`` its position in ``store.latents(bucket)``, -1 for none.
    """

    index: int
    key: str
    revision: int
    bucket: str | None
    row: int
    label: int
    caption_ids: tuple[int, ...]
    height_px: int | None
    width_px: int | None
    status: str
    stage: str | None
    reason: str | None
    detail: str | None
    attempts: int
    fallback: str | None


def near_keys(keys: pa.ChunkedArray, wanted: str) -> str:
    """A sentence for an error: keys that contain an unknown one, else the nearest keys, else "".

    Among more than ``MOST_COMPARED`` keys, only those with the longest common prefix are compared.
    """
    if matching := keys.filter(pc.match_substring(keys, wanted)).slice(0, NUM_NEAR).to_pylist():
        return f" Keys that contain it: {', '.join(matching)}."
    for length in range(1, len(wanted) + 1):
        alike = keys.filter(pc.starts_with(keys, wanted[:length])) if len(keys) > MOST_COMPARED else []
        if not len(alike):
            break
        keys = alike
    near = difflib.get_close_matches(wanted, keys.slice(0, MOST_COMPARED).to_pylist(), n=NUM_NEAR)
    return f" The nearest keys: {', '.join(near)}." if near else ""
