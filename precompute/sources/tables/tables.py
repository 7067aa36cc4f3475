"""Tables that name images: CSV, JSON, Parquet, COCO's captions.

DuckDB loads a table (``formats.py``), brings the rows of one image together and sorts them; each group becomes one
record, in the order of the first rows. Memory is bounded for any number of rows.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ....datasets.disk.spill import BATCH_ROWS
from ....errors import SourceError
from ...config import SourceSection
from ..files.files import FoundFile, LocalFiles, SourceFiles, look_up
from ..files.folders import Scan
from ..files.labels import AMONG_NUMBERS, MAX_CLASSES, Labels, number_names
from ..files.record import MAX_CAPTIONS, MAX_KEY_CHARS, MAX_SIDE_PX, usable_key
from ..files.splits import ALL, shards_of_split, values_of_split
from ..listing.duck import database, literal, readable_path
from ..listing.listing import PLACE_NAMES, SCHEMA, distinct_texts, record_batch
from .formats import (
    described_images,
    image_in_header,
    is_text_table,
    load_table,
    memory_mib,
    missing_header,
    read_layout,
    rejects_of,
)
from .text_rows import TextRow, without_long_lines

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

METADATA = ("metadata.jsonl", "metadata.csv", "metadata.tsv", "metadata.parquet")  # of a folder of images
PIXART = "data_info.json"
PIXART_TABLE, PIXART_IMAGES = f"InternData/{PIXART}", "InternImgs"  # as PixArt's trainer expects them
ANNOTATIONS = "annotations"  # folder of COCO's lists, beside the folders of the images
LOOKED_NAMES = 16  # of a table, to find where the images are
MAX_FOLDERS = 20  # of a source, in which they are looked for
LISTS = (".csv", ".tsv", "captions.txt", ".token", ".token.txt")  # endings of tables next to images
MAX_SPLITS = 10_000  # values of a column that are looked at
MAX_LISTS = 16  # of them that are opened in a folder
ODD_PATH = r"(^|/)\.{0,2}(/|$)"  # some part is empty, "." or ".."
# Of a row of ``loaded`` beside the number of its label.
LABEL_PROBLEM = f"""coalesce(label_problem, CASE WHEN label IS NULL OR number IS NOT NULL THEN NULL
    WHEN regexp_full_match(label, '[+-]?[0-9.]+') THEN 'label ' || label || ' is not a class index below {MAX_CLASSES}'
    ELSE 'label ' || label || ' is {AMONG_NUMBERS}' END)"""
NO_NAME = ("bad_metadata", "the row names no image; expected its path as text in UTF-8")


def coco_names(files: SourceFiles) -> list[str]:
    """Paths of COCO's lists of captions in the folder ``annotations`` of a source."""
    if files.only is not None or ANNOTATIONS not in files.folders():
        return []
    names = files.inside(ANNOTATIONS).names()
    return sorted(f"{ANNOTATIONS}/{name}" for name in names if name.startswith("captions_") and name.endswith(".json"))


def find_table(files: SourceFiles, settings: SourceSection) -> str | None:
    """Path of the table of a source with a known name; None if there is none.

    Args:
      settings: its split selects one of COCO's lists by name.
    Raises: SourceError: COCO has several lists, or none of this split.
    """
    if files.only is not None:
        is_table = is_text_table(files.only) or files.only.endswith((".jsonl", ".json", ".parquet"))
        return files.only if is_table else None
    for name in (*METADATA, PIXART, PIXART_TABLE):
        if files.look(name):
            return name
    lists = coco_names(files)
    if lists and settings.split not in ("", ALL):
        lists = shards_of_split(files.name, lists, settings.split)
    if len(lists) > 1:
        raise SourceError(
            f"source '{files.name}': several lists of COCO's captions: {', '.join(lists)}. Name the split of one, such "
            f"as --set source.split=train, or give one, such as --source '{files.name}/{lists[0]}'."
        )
    return next(iter(lists), None)


def find_caption_table(files: SourceFiles, settings: SourceSection, notes: list[str]) -> str | None:
    """Path of a text table in a folder of images whose first images exist.

    Args:
      notes: gets one for each table of captions or labels that is left out because its images do not exist.
    Raises: SourceError: there are several, or one without a header: its captions must not be left out in silence.
    """
    if files.only is not None:
        return None
    names = sorted(name for name in files.names() if name.lower().endswith(LISTS))
    tables = [name for name in names[:MAX_LISTS] if _names_images(files, name, settings, notes)]
    if len(tables) > 1:
        likely = next((name for name in tables if "train" in name.lower()), tables[0])
        raise SourceError(
            f"source '{files.name}': several tables name its images: {', '.join(tables)}. Pass the one to use, such as "
            f"--source '{files.name}/{likely}'."
        )
    return next(iter(tables), None)


def _names_images(files: SourceFiles, table: str, settings: SourceSection, notes: list[str]) -> bool:
    """A text table has captions or labels of existing images. Raises: SourceError: but no header."""
    try:
        layout = read_layout(files, table)
        image = image_in_header(layout) if len(layout.columns) > 1 else ""
        names = [image] if image else described_images(layout, table, settings)
    except SourceError as error:  # a table of something else
        if settings.image or settings.caption or settings.label:
            notes.append(f"table '{table}' is not used: {error}")
        return False
    if not names:
        return False
    if not settings.root and find_folder(files, names) is None:
        if not image:
            notes.append(
                f"'{table}' is not used: of the first {len(names[:LOOKED_NAMES])} images that it names, none exists "
                f"('{names[0]}'). Correct its paths, or pass their folder with --set source.root=FOLDER."
            )
        return False
    if image:
        raise missing_header(files, table, image)
    return True


# ------------------------------------------------------------------------------------------------------- images


def root_elsewhere(files: SourceFiles, root: str) -> str | None:
    """Path or URL of ``source.root``; None if it is inside the source. Raises: SourceError: it is relative to a URL."""
    if "://" in root:
        return root
    root = os.path.expanduser(root)
    if not leaves_source(os.path.normpath(root)):
        return None
    if "://" in files.name and not os.path.isabs(root):
        raise SourceError(f"source '{files.name}': source.root '{root}' lies outside it. Pass the URL of that folder.")
    return os.path.join(os.path.dirname(files.name) if files.only else files.name, root)


def leaves_source(inside: str) -> bool:
    """Whether a normalized path is not below the source."""
    return os.path.isabs(inside) or inside.split(os.sep)[0] == ".."


def find_folder(files: SourceFiles, names: Sequence[str], first: str = "", *, searched: bool = True) -> str | None:
    """The folder of a source that has one of the first images of a table.

    Args:
      first: folder that is tried first; "" for the source itself.
      searched: the folders directly in the source are tried too.
    """
    inside = (os.path.normpath(name.removeprefix(_prefix(files))) for name in names[:LOOKED_NAMES])
    paths = [path for path in inside if not leaves_source(path)]
    folders = [first]
    if searched:
        with contextlib.suppress(SourceError):  # it cannot be listed
            folders += islice(files.folders(), MAX_FOLDERS)
    for folder in folders:
        looked = (files.look(f"{folder}/{path}" if folder else path) for path in paths)
        if any(file and not file.problem for file in looked):
            return folder
    return None


def _prefix(files: SourceFiles) -> str:
    """Beginning of absolute names of images that are in the source; keys lack it."""
    if isinstance(files, LocalFiles):
        return f"{os.path.abspath(files.root)}/"
    return f"{files.name.removesuffix(files.only or '').rstrip('/')}/"


def _folder(images: SourceFiles, table: str, names: list[str], scan: Scan, companion: str) -> str:
    """Folder of the images of a column; adds a note if it was searched, or if there are none."""
    root = scan.settings.root
    first = ""
    if table == PIXART_TABLE:
        first = PIXART_IMAGES
    elif root and root_elsewhere(images, root) is None:
        first = os.path.normpath(os.path.expanduser(root)).removeprefix("./")
        first = "" if first == "." else first
    folder = find_folder(images, names, first, searched=not (root or first))
    about = f"companion '{companion}': images" if companion else "images"
    if folder is None and names:
        scan.notes.append(
            f"{about}: none of the first {len(names)} that the table names exists, such as {names[0]!r}; set "
            "source.root to their folder, relative to that of the table"
        )
    elif folder and folder != first:
        scan.notes.append(f"{about}: in '{folder}'")
    return folder or first


# ------------------------------------------------------------------------------------------------------- records


def table_batches(files: SourceFiles, images: SourceFiles, table: str, scan: Scan) -> Iterator[pa.RecordBatch]:
    """A record for each image of a table, in batches of the listing; last the rows that could not be read.

    Args:
      files: of the table.
      images: that the rows' paths are relative to.
      scan: its settings may name the columns and the folder; receives notes and names of classes.
    Raises: SourceError: not a table that names images; ResourceError: too little memory or disk.
    """
    where = f"source '{files.shown(table)}'"
    with (
        readable_path(files, table) as whole,
        _readable_rows(table, whole) as (path, long_lines),
        database(where, path, memory_mib=memory_mib(files, table, path)) as connection,
    ):
        broken = load_table(connection, files, table, path, scan) + rejects_of(long_lines)
        connection.register("classes", _classes(connection, scan))  # of all splits, so that each has the same labels
        _keep_split(connection, files.shown(table), scan)
        columns = {"": "name"} | {name: f"companions[{i}]" for i, name in enumerate(scan.companions, 1)}
        folders: dict[str, str] = {}
        for companion, column in columns.items():
            query = f"SELECT {column} FROM loaded WHERE {column} <> '' ORDER BY position LIMIT {LOOKED_NAMES}"
            first = [name for (name,) in connection.execute(query).fetchall()]
            folders[companion] = _folder(images, table, first, scan, companion)
        is_required = scan.labels.is_required
        if not is_required and not scan.labels.are_too_many:
            _count_unusable_labels(connection, scan.labels)
        prefix = literal(_prefix(images))
        connection.execute(
            f"""CREATE TEMP VIEW rows AS SELECT position,
            CASE WHEN starts_with(name, {prefix}) THEN substr(name, length({prefix}) + 1) ELSE name END AS name,
            CASE WHEN problem IS NULL THEN coalesce(number, -1) ELSE -1 END AS label,
            CASE WHEN problem IS NULL THEN captions ELSE [] END AS captions,
            coalesce({f"{LABEL_PROBLEM}, " if is_required else ""}problem) AS problem,
            height, width, companions, hash(companions) AS beside
            FROM loaded LEFT JOIN classes ON label = class"""
        )
        grouped = connection.sql(
            """WITH firsts AS (SELECT name, min(position) AS first, arg_min(label, position) AS first_label,
            arg_min(beside, position) AS first_beside FROM rows WHERE name IS NOT NULL GROUP BY name)
            SELECT CASE WHEN (len(captions) > 0 OR problem IS NOT NULL) AND (label = -1 OR label = first_label)
            AND beside = first_beside THEN first ELSE position END AS leader, rows.* EXCLUDE (position, beside)
            FROM rows LEFT JOIN firsts USING (name) ORDER BY leader, position"""
        )
        for rows, begins in _groups(grouped.to_arrow_reader(BATCH_ROWS)):
            yield _records(rows, begins, images, folders)
    if broken:
        yield record_batch(broken)


def _keep_split(connection: Any, where: str, scan: Scan) -> None:
    """Drop the rows of other splits, if a column of the table tells them.

    Raises: SourceError: several splits and none named, or none of this name.
    """
    rows = connection.execute(
        f"SELECT coalesce(split, ''), count(*) FROM loaded GROUP BY 1 ORDER BY 1 LIMIT {MAX_SPLITS}"
    ).fetchall()
    values = values_of_split(where, Counter(dict(rows)), scan)
    if values is not None:
        connection.execute("DELETE FROM loaded WHERE NOT list_contains(?, coalesce(split, ''))", [values])


@contextmanager
def _readable_rows(table: str, path: str) -> Iterator[tuple[str, list[TextRow]]]:
    """The path of a table that DuckDB can read, and lines that it could not."""
    if not table.endswith(".jsonl"):
        yield path, []
        return
    with without_long_lines(path) as (readable, long_lines):
        yield readable, long_lines


def _classes(connection: Any, scan: Scan) -> pa.Table:
    """The number of each label that is one: its own, or its place among the sorted names of classes.

    Labels that are neither are counted, unless they reject their rows.
    """
    labels = scan.labels
    query = f"""SELECT label, bool_or(label_is_number) FROM loaded WHERE label IS NOT NULL
        GROUP BY label LIMIT {MAX_CLASSES + 1}"""
    found = connection.execute(query).fetchall()
    names = sorted(name for name, _ in found)
    numbers: Mapping[str, int | None] = {}
    if labels.check_names(len(names), sum(map(len, names))):
        has_numbers = any(is_number and name != "-1" for name, is_number in found)
        numbers, scan.classes = number_names(names, has_numbers=has_numbers)
        labels.note_mixture(scan.classes or ())
    numbers = {name: number for name, number in numbers.items() if number is not None}
    return pa.table({"class": pa.array(numbers, pa.string()), "number": pa.array(numbers.values(), pa.int64())})


def _count_unusable_labels(connection: Any, labels: Labels) -> None:
    """Count the labels that were left out."""
    count, example = connection.execute(
        f"""SELECT count(*), arg_min({LABEL_PROBLEM}, position) FROM loaded LEFT JOIN classes ON label = class
        WHERE {LABEL_PROBLEM} IS NOT NULL"""
    ).fetchall()[0]
    if count:
        labels.read_unusable(example, count)


def _groups(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[pa.RecordBatch, np.ndarray]]:
    """Sorted rows of whole records, and where each record begins; of one that has too many rows only the first."""
    waiting: list[pa.RecordBatch] = []
    for batch in batches:
        (rows,) = pa.Table.from_batches([*waiting, batch]).combine_chunks().to_batches()
        leaders = rows["leader"].to_numpy()
        last = int(np.searchsorted(leaders, leaders[-1]))
        waiting = [rows.slice(last, MAX_CAPTIONS + 1)]
        if last:
            yield rows.slice(0, last), np.flatnonzero(np.diff(leaders[:last], prepend=-1))
    for rows in waiting:
        yield rows, np.zeros(1, np.int64)


def _records(
    rows: pa.RecordBatch,
    begins: np.ndarray,
    images: SourceFiles,
    folders: Mapping[str, str],
) -> pa.RecordBatch:
    """One record for each group of rows, with all their captions; the first problem of a row rejects it.

    Args:
      folders: of the images, as "", and of each companion by its name.
    """
    count, first = len(begins), rows.take(pa.array(begins))
    ends = np.append(begins, rows.num_rows)
    captions = pa.ListArray.from_arrays(rows["captions"].offsets.take(pa.array(ends)), rows["captions"].values)
    captions = distinct_texts(captions, np.ones(count, bool))
    problems: list[tuple[str, str] | None] = [None] * count
    for row in np.flatnonzero(rows["problem"].is_valid().to_numpy(zero_copy_only=False))[::-1].tolist():
        problems[np.searchsorted(begins, row, "right") - 1] = ("bad_metadata", rows["problem"][row].as_py())
    for record in np.flatnonzero(pc.list_value_length(captions).to_numpy() > MAX_CAPTIONS):
        problems[record] = ("bad_metadata", f"more than {MAX_CAPTIONS} captions")
    keys, files = _locate(first["name"], images, folders[""])
    companions = {
        name: _locate(pc.list_element(first["companions"], i), images, folder)[1]
        for i, (name, folder) in enumerate(list(folders.items())[1:])
    }
    for record, file in enumerate(files):
        if problems[record] and file.problem != NO_NAME:
            continue
        beside = ((name, places[record].problem) for name, places in companions.items())
        missing = next(((problem[0], f"companion '{name}': {problem[1]}") for name, problem in beside if problem), None)
        problems[record] = file.problem or missing or problems[record]
    is_usable = np.array([problem is None for problem in problems], bool)
    sides = [pc.fill_null(first[name], 0).to_numpy() for name in ("height", "width")]
    has_size = np.logical_and.reduce([is_usable, *((side > 0) & (side <= MAX_SIDE_PX) for side in sides)])
    beside = [list(places) for places in zip(*companions.values(), strict=True)] or [[]] * count
    columns = {
        "key": [key or f"row {leader + 1}" for key, leader in zip(keys, first["leader"].to_pylist(), strict=True)],
        "path": [file.path for file in files],
        "offset": np.zeros(count, np.int64),
        "num_bytes": [file.num_bytes for file in files],
        "mtime_ns": [file.mtime_ns for file in files],
        "label": np.where(is_usable, first["label"].to_numpy(), -1).astype(np.int32),
        "captions": distinct_texts(captions, is_usable),
        "reason": [problem and problem[0] for problem in problems],
        "detail": [problem and problem[1] for problem in problems],
        "height_px": np.where(has_size, sides[0], 0).astype(np.int32),
        "width_px": np.where(has_size, sides[1], 0).astype(np.int32),
        "companions": [
            [dict(zip(PLACE_NAMES, (place.path, 0, place.num_bytes, place.mtime_ns), strict=True)) for place in places]
            for places in beside
        ],
    }
    return pa.RecordBatch.from_pydict(columns, SCHEMA)


def _locate(names: pa.Array, images: SourceFiles, folder: str) -> tuple[list[str], list[FoundFile]]:
    """Keys and files of images by their names in a table."""
    prefix, before = _prefix(images), f"{folder}/" if folder else ""
    keys = [(name or "").removeprefix(prefix) for name in names.to_pylist()]
    is_odd = pc.or_kleene(pc.match_substring_regex(names, ODD_PATH), pc.greater(pc.utf8_length(names), MAX_KEY_CHARS))
    inside, problems = list(keys), dict[int, tuple[str, str]]()
    for i in np.flatnonzero(pc.fill_null(is_odd, True).to_numpy(zero_copy_only=False)).tolist():
        keys[i], problem = usable_key(keys[i])
        inside[i] = keys[i] if problem or not keys[i] else os.path.normpath(keys[i])
        if not keys[i]:
            problem = NO_NAME
        elif not problem and leaves_source(inside[i]):
            why = "is an absolute path outside the source: see source.root"
            problem = ("bad_metadata", f"file_name {why if keys[i].startswith('/') else 'leaves the source folder'}")
        if problem:
            problems[i] = problem
    looked = iter(look_up(images.look, [before + path for i, path in enumerate(inside) if i not in problems]))
    files = []
    for i, path in enumerate(inside):
        file = FoundFile(path, problem=problems[i]) if i in problems else next(looked)
        files.append(file or FoundFile(path, problem=("missing_file", f"there is no '{before}{path}'")))
    return keys, files
