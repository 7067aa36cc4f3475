"""Display names of classes, from ``source.class_names``: ImageNet's, which are included, or a file.

A text file has one name a line, in order of the labels, or "CLASS NAME" as Kaggle's ``LOC_synset_mapping.txt``; a TSV
"CLASS<tab>NAME", or with the label first; a JSON file a list, or an object from class or label to name, as Keras'
``imagenet_class_index.json``. CLASS is the class as the source names it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from ....datasets.errors import RecipeError, SourceError
from ....datasets.format.class_names import imagenet_names

IMAGENET = "imagenet"
MAX_BYTES = 64 << 20
MAX_NAME_CHARS = 1000
NUM_SHOWN = 3

Row = Sequence[str]
"""What a file says of one class: its name is last, before it stand the class, the label, or nothing."""


def read_class_names(asked: str) -> list[Row]:
    """Read the file or name in ``source.class_names``.

    Raises: RecipeError: missing, or not a file of class names.
    """
    if asked == IMAGENET:
        return [(str(label), wnid, name) for label, (wnid, name) in enumerate(imagenet_names().items())]
    path = Path(asked)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES >> 20} MiB")
        text = path.read_text(encoding="utf-8-sig")
        rows = list(_json_rows(json.loads(text)) if path.suffix == ".json" else _text_rows(text))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RecipeError(
            f"source.class_names '{asked}': {reason}. Needed \"imagenet\", or a text, TSV or JSON file of names."
        ) from error
    if not rows:
        raise RecipeError(f"source.class_names '{asked}': it names nothing. Needed a name for each class.")
    return rows


def names_of_classes(asked: str, rows: Sequence[Row], classes: Sequence[str] | None) -> list[str]:
    """A name for each class of a source.

    Args:
      asked: of the recipe, for messages.
      rows: from ``read_class_names``.
      classes: as the source names them, in order of their labels.
    Raises: SourceError: the source has no classes, or some of them have no name.
    """
    if not classes:
        raise SourceError(f"source.class_names '{asked}': the source has no classes to name. Leave it out.")
    known = set(classes)
    rows = [_with_class(row, known) for row in rows]
    names = {str(label): row[-1] for label, row in enumerate(rows)} if all(len(row) == 1 for row in rows) else {}
    by_class: dict[str, str] = {}
    for row in rows:
        names |= {row[0]: row[-1]} if len(row) > 1 else {}
        by_class |= {cell: row[-1] for cell in row[:-1] if cell in known}
    if asked == IMAGENET:  # whose labels mean nothing for classes that are named otherwise
        names = {label: name for label, name in names.items() if label in known}
    found = [by_class.get(name, names.get(str(label))) for label, name in enumerate(classes)]
    missing = [name for name, its_name in zip(classes, found, strict=True) if not its_name]
    if missing:
        more = f" and {len(missing) - NUM_SHOWN} more" if len(missing) > NUM_SHOWN else ""
        raise SourceError(
            f"source.class_names '{asked}': no name for {len(missing)} of {len(classes)} classes: "
            f"{', '.join(missing[:NUM_SHOWN])}{more}. Add them to the file."
        )
    return [str(name) for name in found]


def _with_class(row: Row, known: set[str]) -> Row:
    """Split "n01440764 tench, Tinca tinca" into class and name, if the class exists."""
    first, space, rest = row[0].partition(" ")
    return (first, rest.strip()) if len(row) == 1 and space and first in known and rest.strip() else row


def _text_rows(text: str) -> Iterable[Row]:
    for line in text.splitlines():
        if line.strip():
            yield _row(line.strip().split("\t"))


def _json_rows(value: object) -> Iterable[Row]:
    if isinstance(value, list):
        return [_row([name]) for name in value]
    if isinstance(value, dict):
        return [_row([key, *(name if isinstance(name, list) else [name])]) for key, name in value.items()]
    raise ValueError("neither a list nor an object")


def _row(cells: Sequence[object]) -> Row:
    if not all(isinstance(cell, str) and len(cell) <= MAX_NAME_CHARS for cell in cells):
        raise ValueError(f"a name must be text of at most {MAX_NAME_CHARS} characters")
    return tuple(str(cell).strip() for cell in cells)
