"""Tables that name pictures: ``metadata.jsonl``, a JSONL, CSV or Parquet manifest, PixArt's ``data_info.json``.

A row names a file by its path relative to the folder of pictures, never outside it. Tables of any size are read in
batches; ``rows.py`` makes the records.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, groupby
from typing import BinaryIO, Self

import pyarrow as pa

from ....datasets.errors import SourceError
from ...config import SourceSection
from ...images.faults import is_fault
from ..files.entries import FoundFile
from ..files.files import SourceFiles, shown
from ..files.folders import Scan
from ..files.placement import Placement, find_placement, folders_of, normalized_root
from ..files.record import SourceRecord
from ..files.splits import ALL, shards_of_split
from ..listing.listing import record_batch
from .coco import coco_names, coco_rows, is_coco
from .columns import choose_columns, columns_note
from .csv_layout import is_text_table
from .csv_rows import described_pictures, text_rows
from .foreign_parquet import MAX_BATCH_BYTES, PARQUET_ERRORS, open_parquet, read_rows
from .json_rows import json_array, json_lines
from .rows import CheckedRows, Rows, check_rows, first_names

METADATA = ("metadata.jsonl", "metadata.csv", "metadata.tsv", "metadata.parquet")  # of a folder of pictures
PIXART = "data_info.json"
PIXART_TABLE, PIXART_PICTURES = f"InternData/{PIXART}", "InternImgs"  # as PixArt's trainer expects them
FOUND = "pictures:"  # beginning of the note that says where they were found
LOOKERS = 32  # threads that look up the files of rows
LOOKED = 64  # files that one of them looks up at a time
PROBED = 16  # files of each batch whose look-ups are timed
SLOW_LOOK_SECONDS = 1e-4  # a longer one is a network message; the kernel's cache answers in microseconds
LISTS = (".csv", ".tsv", "captions.txt", ".token", ".token.txt")  # endings of tables next to pictures
MAX_LISTS = 16  # of them that are opened in a folder
AHEAD = 4  # batches whose files are being looked up


def pixart_folder(source: str) -> str:
    """The parent of ``InternData`` and ``InternImgs`` for a source of PixArt, else the source."""
    inside = source.rstrip("/").removesuffix(f"/{PIXART}")
    return inside.removesuffix("InternData") or "." if f"/{inside}".endswith("/InternData") else source


def known_table(files: SourceFiles) -> str | None:
    """Path of a table with a known name; None if there is none."""
    if files.only is not None:
        return files.only if is_text_table(files.only) or files.only.endswith((".jsonl", ".json", ".parquet")) else None
    return next((name for name in (*METADATA, PIXART, PIXART_TABLE) if files.look(name)), None)


def find_table(files: SourceFiles, split: str) -> str | None:
    """Path of the table of a source; None if there is none.

    Args:
      split: of the recipe; selects one of COCO's lists by name.
    Raises: SourceError: COCO has several lists, or none of this split.
    """
    if known := known_table(files):
        return known
    lists = coco_names(files)
    if lists and split not in ("", ALL):
        lists = shards_of_split(files.name, lists, split)
    if len(lists) > 1:
        raise SourceError(
            f"source '{files.name}': several lists of COCO's captions: {', '.join(lists)}. Name the split of one, as "
            f"--set source.split=train, or give one, as --source '{files.name}/{lists[0]}'."
        )
    return next(iter(lists), None)


def find_caption_table(files: SourceFiles, settings: SourceSection) -> str | None:
    """Path of a text table in a folder of pictures whose first pictures exist.

    Raises: SourceError: there are several.
    """
    if files.only is not None:
        return None
    names = sorted(name for name in files.names() if name.lower().endswith(LISTS))
    folders = ["", *folders_of(files)] if names else []
    tables = [name for name in names[:MAX_LISTS] if _names_pictures(files, name, folders, settings)]
    if len(tables) > 1:
        raise SourceError(
            f"source '{files.name}': several tables name its pictures: {', '.join(tables)}. Give the one to use, as "
            f"--source '{files.name}/{tables[0]}'."
        )
    return next(iter(tables), None)


def _names_pictures(files: SourceFiles, table: str, folders: list[str], settings: SourceSection) -> bool:
    """A text table has captions or labels of existing pictures."""
    try:
        names = described_pictures(files, table, settings)
    except SourceError:
        return False  # a table of something else
    return bool(names) and (bool(settings.root) or find_placement(files, names, folders) is not None)


def table_batches(files: SourceFiles, pictures: SourceFiles, table: str, scan: Scan) -> Iterator[pa.RecordBatch]:
    """A record for each row, in batches of the listing: path, optionally a label and captions.

    Args:
      files: of the table.
      pictures: that the rows' paths are relative to.
      scan: its settings may name the columns and the folder; receives notes.
    Raises: SourceError: a row is not a JSON object with a path; names its number.
    """
    broken: list[SourceRecord] = []
    ahead: deque[tuple[CheckedRows, int, Callable[[], list[FoundFile | None]]]] = deque()
    placement, wrong = None, None
    with _LookUps(pictures) as look_ups:
        try:
            for rows, num_bytes in _rows(files, table, scan, broken):
                rows = replace(rows, of_companions=bool(scan.picture))
                placement = placement or _placement(pictures, table, first_names(rows), scan)
                checked = check_rows(rows, placement)
                ahead.append((checked, num_bytes, look_ups.start(checked.paths.to_pylist())))
                while len(ahead) > AHEAD or sum(size for _, size, _ in ahead) > MAX_BATCH_BYTES:
                    before, _, looked_up = ahead.popleft()
                    yield before.batch(pictures, placement, looked_up())
        except SourceError as error:
            wrong = error  # unless a row before it is wrong as well
        for before, _, looked_up in ahead:
            assert placement, "the first rows tell it"
            yield before.batch(pictures, placement, looked_up())
    if wrong:
        raise wrong
    if broken:
        yield record_batch(broken)


def _rows(files: SourceFiles, table: str, scan: Scan, broken: list[SourceRecord]) -> Iterator[tuple[Rows, int]]:
    """The rows of a table in batches, with their sizes in bytes."""
    if table.endswith((".parquet", ".jsonl", ".json")):
        kind = _parquet_rows if table.endswith(".parquet") else json_lines if table.endswith(".jsonl") else json_array
        if table.endswith(".json") and is_coco(files, table):
            if scan.picture:
                raise SourceError(
                    f"source '{shown(files, table)}': [pictures.{scan.picture}] needs a table with a column for it; "
                    "COCO's list of captions has none. Write a JSONL, CSV or Parquet table."
                )
            yield from coco_rows(files, table, scan)
            return
        with files.open(table) as file:
            yield from kind(file, f"source '{shown(files, table)}'", scan)
    else:
        yield from text_rows(files, table, scan, broken)


def _placement(pictures: SourceFiles, table: str, names: list[str], scan: Scan) -> Placement:
    """Placement of the pictures of a table; adds a note if it was guessed."""
    root = scan.settings.root
    first = PIXART_PICTURES if table == PIXART_TABLE else normalized_root(root) or ""
    others = [] if root or first else folders_of(pictures)
    placement = find_placement(pictures, names, chain([first], others))
    if placement is None and names:
        scan.notes.append(
            f"{FOUND} none of the first {len(names)} that the table names exists, as {names[0]!r}; source.root names "
            "their folder"
        )
    elif placement and not root and placement != Placement(first):
        scan.notes.append(f"{FOUND} {placement.described()}")
    return placement or Placement(first)


class _LookUps:
    """Looks up the files of rows, in threads if each look-up is a network message.

    Threads slow down fast look-ups, so the time is measured.
    """

    def __init__(self, files: SourceFiles) -> None:
        self._files, self._is_slow = files, False
        self._pool = ThreadPoolExecutor(LOOKERS, thread_name_prefix="leandit-list")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def start(self, paths: list[str]) -> Callable[[], list[FoundFile | None]]:
        """Start looking up files; the returned function waits for the results."""
        runs = [(path, sum(1 for _ in same)) for path, same in groupby(paths)]  # several rows of one picture
        found = self._start([path for path, _ in runs])
        return lambda: [file for file, (_, count) in zip(found(), runs, strict=True) for _ in range(count)]

    def _start(self, paths: list[str]) -> Callable[[], list[FoundFile | None]]:
        first: list[FoundFile | None] = []
        if not self._is_slow:
            started = time.perf_counter()
            first = self._look(paths[:PROBED])
            self._is_slow = time.perf_counter() - started > SLOW_LOOK_SECONDS * len(first)
        rest = paths[len(first) :]
        if not self._is_slow:
            first += self._look(rest)
            return lambda: first
        parts = [self._pool.submit(self._look, rest[i : i + LOOKED]) for i in range(0, len(rest), LOOKED)]
        return lambda: [*first, *(found for part in parts for found in part.result())]

    def _look(self, paths: list[str]) -> list[FoundFile | None]:
        return [self._files.look(path) for path in paths]


def _parquet_rows(file: BinaryIO, table: str, scan: Scan) -> Iterator[tuple[Rows, int]]:
    """Rows of a Parquet table with only the columns that describe a picture, and their text sizes."""
    number = 1
    try:
        columns = open_parquet(file).schema_arrow.names
        chosen = choose_columns(columns, scan.settings, table)
        scan.notes.append(columns_note(chosen, columns, scan.companions))
        for batch, num_bytes in read_rows(open_parquet(file, list(chosen)), list(chosen), table):
            named = pa.RecordBatch.from_arrays(batch.columns, names=list(chosen.values()))
            yield Rows(named, lambda i, first=number: f"{table}, row {first + i}"), num_bytes
            number += batch.num_rows
    except PARQUET_ERRORS as error:
        if is_fault(error):
            raise
        raise SourceError(f"{table}: not a readable Parquet file ({error}). Restore it.") from error
