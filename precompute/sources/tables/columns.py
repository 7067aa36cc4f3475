"""Finds the columns of a table by their role: those that the recipe names, else those with usual names."""

from __future__ import annotations

from collections.abc import Sequence

from ....datasets.errors import SourceError
from ...config import SourceSection
from ..files.record import CAPTION_NAMES, LABEL_NAMES, PATH_NAMES, SIDES

MAX_SHOWN = 20  # columns in a message
PICTURES, CAPTIONS, LABELS = "file_name", "captions", "label"  # names in a row of columns with other names
USUAL = {
    PICTURES: (
        *("filename", "image", "img", "image_path", "img_path", "image_file", "image_name", "filepath", "file_path"),
        *("file", "picture_path", "image_id", "img_id", "id", "name"),
    ),
    CAPTIONS: ("sentences", "sentence", "description", "descriptions", "comment", "raw"),
    LABELS: ("class", "class_id", "class_name", "labels"),
}
KNOWN = {PICTURES: PATH_NAMES, CAPTIONS: CAPTION_NAMES, LABELS: LABEL_NAMES}  # names that a row may keep
ROLES = {PICTURES: "pictures", CAPTIONS: "captions", LABELS: "labels"}


def choose_columns(columns: Sequence[str], settings: SourceSection, where: str) -> dict[str, str]:
    """Map the useful columns to their names in a row.

    Args:
      columns: names of all columns.
      settings: may name columns.
      where: the table, for errors.
    Returns: name of the column -> name in a row (``rows.ROW_NAMES``).
    Raises: SourceError: a column that the settings name is missing, or no column names the pictures.
    """
    chosen: dict[str, str] = {}
    for role, asked in ((PICTURES, settings.image), (CAPTIONS, settings.caption), (LABELS, settings.label)):
        if asked and asked not in columns:
            raise SourceError(f"{where}: it has no column '{asked}'. {shown_columns(columns)}")
        chosen |= {asked: role} if asked else usual_columns(columns, role)
    if PICTURES not in (KNOWN_ROLE[name] for name in chosen.values()):
        raise SourceError(
            f"{where}: no column is known to name the pictures. {shown_columns(columns)} Name it with "
            "--set source.image=NAME."
        )
    sides = {column: column.strip().lower() for column in columns if column.strip().lower() in SIDES}
    return chosen | {column: name for column, name in sides.items() if column not in chosen}


def usual_columns(columns: Sequence[str], role: str) -> dict[str, str]:
    """Columns of one role by their usual names, ignoring case; as ``choose_columns``."""
    plain = {column.strip().lower(): column for column in reversed(columns)}
    if known := {plain[name]: name for name in KNOWN[role] if name in plain}:
        return known
    return next(({plain[name]: role} for name in USUAL[role] if name in plain), {})


KNOWN_ROLE = {name: role for role, names in KNOWN.items() for name in names}


def choose_keys(keys: Sequence[str], settings: SourceSection, where: str) -> dict[str, str]:
    """As ``choose_columns``, for JSON rows, which may have other keys than the first row.

    Raises: SourceError: the first row lacks a key that the settings name.
    """
    asked = {PICTURES: settings.image, CAPTIONS: settings.caption, LABELS: settings.label}
    chosen = {name: name for role, names in KNOWN.items() if not asked[role] for name in names}
    chosen |= {side: side for side in SIDES}
    if any(asked.values()) or usual_columns(keys, PICTURES):
        chosen |= choose_columns(keys, settings, where)
    return chosen


def shown_columns(columns: Sequence[str]) -> str:
    """The columns of a table, for a message."""
    more = f" and {len(columns) - MAX_SHOWN} more" if len(columns) > MAX_SHOWN else ""
    return f"Its columns: {', '.join(repr(name[:40]) for name in columns[:MAX_SHOWN])}{more}."


def columns_note(chosen: dict[str, str], columns: Sequence[str], companions: Sequence[str]) -> str:
    """The roles of the columns, as a note for the user.

    Args:
      companions: columns of companion pictures.
    """
    roles: dict[str, list[str]] = {role: [] for role in ROLES}
    for column, name in chosen.items():
        if name in KNOWN_ROLE and column in columns:
            roles[KNOWN_ROLE[name]].append(repr(column))
    described = [f"{ROLES[role]} {' or '.join(names) if names else 'none'}" for role, names in roles.items()]
    if beside := [repr(column) for column in companions if column in columns]:
        described.append(f"companions {', '.join(beside)}")
    others = [column for column in columns if column not in chosen and column not in companions]
    return f"columns: {', '.join(described)}" + (
        f"; not used: {', '.join(map(repr, others[:MAX_SHOWN]))}" if others else ""
    )
