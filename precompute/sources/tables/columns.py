"""Finds the columns of a table by their role: those that the recipe names, else those with usual names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....errors import SourceError
from ...config import SourceSection
from ..files.beside import MASKS
from ..files.further import companion_options
from ..files.record import CAPTION_NAMES

MAX_SHOWN = 20  # columns in a message
IMAGES, CAPTIONS, LABELS = "images", "captions", "labels"
KNOWN = {IMAGES: ("file_name", "path"), CAPTIONS: CAPTION_NAMES, LABELS: ("label", "cls")}  # the first value counts
SIDES = ("height", "width")
SPLIT_NAMES = ("split", "subset", "partition", "set")
USUAL = {
    IMAGES: (
        *("filename", "image", "img", "image_path", "img_path", "image_file", "image_name", "filepath", "file_path"),
        *("file", "picture_path", "image_id", "img_id", "id", "name"),
    ),
    CAPTIONS: ("sentences", "sentence", "description", "descriptions", "comment", "raw"),
    LABELS: ("class", "class_id", "class_name", "labels", "wnid"),
}


@dataclass(frozen=True)
class Roles:
    """Columns of a table by role; of several, the first with a value counts.

    Args:
      images: names of the images.
      captions, labels: may be empty.
      sides: of height and width in pixels; empty without both.
      companions: names of companion images, each in a column of its own.
      split: the split of each row; empty without such a column.
    """

    images: tuple[str, ...]
    captions: tuple[str, ...]
    labels: tuple[str, ...]
    sides: tuple[str, ...]
    companions: tuple[str, ...]
    split: str = ""

    @property
    def names(self) -> list[str]:
        """All columns that are read, each once."""
        columns = [*self.images, *self.captions, *self.labels, *self.sides, *self.companions, self.split]
        return list(dict.fromkeys(filter(None, columns)))


def choose_columns(
    columns: Sequence[str], settings: SourceSection, where: str, companions: Sequence[str], *, may_vary: bool = False
) -> tuple[Roles, str]:
    """Choose the columns of a table.

    Args:
      columns: names of all columns.
      settings: may name columns.
      where: the table, for errors.
      companions: columns of companion images.
      may_vary: rows may have other columns than the first, as in JSON.
    Returns: the columns by role, and a note for the user.
    Raises: SourceError: a named column is missing or occurs twice, or no column names the images.
    """
    named = {IMAGES: settings.image, CAPTIONS: settings.caption, LABELS: settings.label}
    missing = next((name for name in (*named.values(), *companions) if name and name not in columns), None)
    if missing:
        raise SourceError(f"{where}: it has no column '{missing}'. {shown_columns(columns)}")
    roles_read = set(named)
    if settings.labels == "none":
        roles_read.remove(LABELS)
    chosen: dict[str, list[str]] = {}
    for role, name in named.items():
        if role not in roles_read:
            chosen[role] = []
        elif name:
            chosen[role] = [name]
        else:
            chosen[role] = usual_columns(columns, role)
    if not chosen[IMAGES]:
        raise SourceError(
            f"{where}: no column seems to name the images. {shown_columns(columns)} Name it with "
            "--set source.image=NAME."
        )
    described = [f"{role} {' or '.join(map(repr, names)) if names else 'none'}" for role, names in chosen.items()]
    if companions:
        described.append(f"companions {', '.join(map(repr, companions))}")
    sides = list(SIDES) if may_vary else _side_columns(columns)
    used = {*chosen[IMAGES], *chosen[CAPTIONS], *chosen[LABELS], *sides, *companions}
    split = split_column([name for name in columns if name not in used])
    used.add(split)
    others = [name for name in columns if name not in used]
    note = f"columns: {', '.join(described)}"
    if others:
        note += f"; not used: {', '.join(map(repr, others[:MAX_SHOWN]))}"
    masks = [name for name in others if MASKS.fullmatch(name)]
    if masks:
        note += f"; {companion_options(masks[0])} stores a column of masks or control images (kind=mask or image)"
    if may_vary:
        for role in roles_read:
            if not named[role]:
                chosen[role] = [*KNOWN[role], *chosen[role]]
    roles = Roles(
        images=tuple(dict.fromkeys(chosen[IMAGES])),
        captions=tuple(dict.fromkeys(chosen[CAPTIONS])),
        labels=tuple(dict.fromkeys(chosen[LABELS])),
        sides=tuple(sides),
        companions=tuple(companions),
        split=split,
    )
    lower = [name.lower() for name in columns]
    twice = next((name for name in roles.names if lower.count(name.lower()) > 1), None)
    if twice:
        raise SourceError(f"{where}: two columns are called '{twice}'. Remove or rename one.")
    return roles, note


def _side_columns(columns: Sequence[str]) -> list[str]:
    """The columns of height and width in pixels; none unless there are both."""
    sides = [next((name for name in columns if name.strip().lower() == side), "") for side in SIDES]
    return sides if all(sides) else []


def usual_columns(columns: Sequence[str], role: str) -> list[str]:
    """Columns of one role by their usual names, ignoring case: all known ones, else the first usual one."""
    plain = {column.strip().lower(): column for column in reversed(columns)}
    known = [plain[name] for name in KNOWN[role] if name in plain]
    return known or [plain[name] for name in USUAL[role] if name in plain][:1]


def split_column(columns: Sequence[str]) -> str:
    """The column whose name is that of a column of splits; empty without one, or with several."""
    named = [name for name in columns if name.strip().lower() in SPLIT_NAMES]
    return named[0] if len(named) == 1 else ""


def shown_columns(columns: Sequence[str]) -> str:
    """The columns of a table, for a message."""
    more = f" and {len(columns) - MAX_SHOWN} more" if len(columns) > MAX_SHOWN else ""
    return f"Its columns: {', '.join(repr(name[:40]) for name in columns[:MAX_SHOWN])}{more}."
