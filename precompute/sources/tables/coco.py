"""COCO's captions: one JSON object with a list of images and a list of annotations, joined by image id.

The file is read as a stream, once for each list; both lists are joined in mapped temporary files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from ....datasets.disk.spill import map_table, one_chunk
from ....datasets.errors import SourceError
from ..files.files import SourceFiles, open_source_files, shown
from ..files.folders import Scan
from ..files.record import ANNOTATIONS, MAX_CAPTIONS, SIDES
from .foreign_parquet import TABLE_ROWS
from .json_rows import WHITE_SPACE, JsonText
from .rows import Rows

WHAT = "COCO's captions"
IMAGES = pa.schema([("id", pa.int64()), ("file_name", pa.string()), ("height", pa.int64()), ("width", pa.int64())])
CAPTIONS = pa.schema([("image_id", pa.int64()), ("caption", pa.string())])


def coco_names(files: SourceFiles) -> list[str]:
    """Paths of the lists of captions in the folder ``annotations`` of a source."""
    if files.only is not None or ANNOTATIONS not in files.folders():
        return []
    names = open_source_files(f"{files.name.rstrip('/')}/{ANNOTATIONS}").names()
    return sorted(f"{ANNOTATIONS}/{name}" for name in names if name.startswith("captions_") and name.endswith(".json"))


def is_coco(files: SourceFiles, table: str) -> bool:
    """Whether a JSON file is an object, as COCO's, not a list of rows."""
    with files.open(table) as file:
        return file.read(1 << 16).decode("utf-8-sig", "replace").lstrip("".join(WHITE_SPACE))[:1] == "{"


def coco_rows(files: SourceFiles, path: str, scan: Scan) -> Iterator[tuple[Rows, int]]:
    """Batches of rows, one for each image with all its captions, and their sizes in bytes.

    Raises: SourceError: the file does not hold COCO's captions.
    """
    table = f"source '{shown(files, path)}'"
    with files.open(path) as file:
        images = map_table(IMAGES, _batches(_items(file, table, "images"), IMAGES, table), WHAT)
    with files.open(path) as file:
        captions = map_table(CAPTIONS, _batches(_items(file, table, "annotations"), CAPTIONS, table), WHAT)
    ids = captions["image_id"].to_numpy()
    order = np.argsort(ids, kind="stable")
    ids, texts, done, used = ids[order], one_chunk(captions["caption"]), 1, 0
    scan.notes.append(f"COCO: {len(images)} images, {len(captions)} captions")
    for batch in images.to_batches(TABLE_ROWS):
        first, last = (np.searchsorted(ids, batch["id"].to_numpy(), side) for side in ("left", "right"))
        used += int((last - first).sum())
        counts = np.minimum(last - first, MAX_CAPTIONS + 1)  # one too many is a reject
        begins = np.append(0, np.cumsum(counts))
        taken = order[np.arange(begins[-1]) - np.repeat(begins[:-1] - first, counts)]
        values = texts.take(pa.array(taken)).combine_chunks()
        lists = pa.ListArray.from_arrays(pa.array(begins, pa.int32()), values)
        columns = [batch["file_name"], lists, *(batch[side] for side in SIDES)]
        rows = pa.RecordBatch.from_arrays(columns, names=["file_name", "captions", *SIDES])
        yield Rows(rows, lambda i, start=done: f"{table}, image {start + i}"), rows.nbytes
        done += batch.num_rows
    if used < len(captions):
        scan.notes.append(f"COCO: {len(captions) - used} captions name no image of the list")


def _items(file: BinaryIO, table: str, wanted: str) -> Iterator[dict[str, Any]]:
    """Objects of one list of the file."""
    text, where, has_list = JsonText(file), "its beginning", False
    try:
        text.expect("{")
        while text.peek() != "}":
            if where != "its beginning":
                text.expect(",")
            name, _ = text.value()
            text.expect(":")
            where = f"'{str(name)[:40]}'"
            if name not in ("images", "annotations"):
                text.value()
                continue
            has_list = has_list or name == wanted
            number = 0
            text.expect("[")
            while text.peek() != "]":
                if number:
                    text.expect(",")
                number += 1
                where = f"'{name}', item {number}"
                value, _ = text.value()
                if name == wanted:
                    if not isinstance(value, dict):
                        raise ValueError("not an object")
                    yield value
            text.expect("]")
        text.expect("}")
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{table}: not COCO's captions, at {where} ({str(error)[:200]}).") from error
    if not has_list:
        raise SourceError(f"{table}: a JSON object without '{wanted}'; needed COCO's captions, or a list of rows.")


def _batches(items: Iterator[dict[str, Any]], schema: pa.Schema, table: str) -> Iterator[pa.RecordBatch]:
    rows: list[dict[str, Any]] = []
    for item in items:
        row = {name: item.get(name) for name in schema.names}
        if "caption" in row and row["caption"] is None:
            raise SourceError(f"{table}: its annotations have no 'caption' but {', '.join(map(repr, item))[:200]}.")
        rows.append(row)
        if len(rows) == TABLE_ROWS:
            yield _batch(rows, schema, table)
            rows = []
    if rows:
        yield _batch(rows, schema, table)


def _batch(rows: list[dict[str, Any]], schema: pa.Schema, table: str) -> pa.RecordBatch:
    try:
        return pa.RecordBatch.from_pylist(rows, schema)
    except (pa.ArrowException, TypeError, OverflowError, UnicodeError) as error:
        raise SourceError(
            f"{table}: not COCO's captions: 'id' and 'image_id' must be whole numbers, 'file_name' and 'caption' text "
            f"({str(error)[:200]})."
        ) from error
