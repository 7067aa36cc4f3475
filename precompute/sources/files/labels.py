"""Labels as a source gives them: class indices, or names of classes, which are numbered once all are listed."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....errors import SourceError

MAX_CLASSES = 1_000_000  # a larger label is a mistake, and would fill the memory with names
MAX_CLASS_BYTES = 1 << 26  # of all class names
MAX_LABEL_CHARS = 1000  # of the name of a class; longer text is no label
FIRST_NAME = 1 << 24  # labels from here on are names in the order of their first record, until all are listed
WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,18}(\.0*)?")  # pandas writes integers as 3.0 if other cells are empty
MISSING = frozenset(
    ["nan", "na", "n/a", "<na>", "null", "none"]
)  # in small letters; no classes where others are numbers
AMONG_NUMBERS = "a name of a class, but other records have numbers"


@dataclass
class Labels:
    """The labels of a source during its listing.

    Args:
      is_read: false: every record gets the label -1, whatever its source says.
      is_required: a label that is neither a class index nor a name rejects its record. Otherwise the record is
        stored without a label, counted and reported in a note.
    Attributes:
      num_unusable: records that were given no label although their source has a value.
      example: why the first of them has none.
      has_numbers: some record has a class index.
      mixture: that some names of classes are numbers and some are not; else empty.
      are_too_many: there are more names than there may be classes, so that no record gets a label.
    """

    is_read: bool = True
    is_required: bool = True
    num_unusable: int = 0
    example: str = ""
    has_numbers: bool = False
    are_too_many: bool = False
    mixture: str = ""
    _names: dict[str, int] = field(default_factory=dict)
    _num_chars: int = 0

    @property
    def names(self) -> list[str]:
        """The names of classes so far, in the order of their first record."""
        return list(self._names)

    def read(self, value: Any) -> int:
        """The label of a record: a class index, -1 without one, or FIRST_NAME and more for a name.

        Args:
          value: from JSON.
        Raises: ValueError: neither a class index nor a name, and labels are required.
        """
        if not self.is_read or value is None:
            return -1
        if isinstance(value, str):
            return self.read_name(value.strip())
        number = int(value) if isinstance(value, float) and value.is_integer() else value
        if isinstance(number, int) and not isinstance(number, bool) and -1 <= number < MAX_CLASSES:
            return self.read_index(number)
        return self.read_unusable(f"label {reprlib.repr(value)} is not a class index below {MAX_CLASSES}")

    def read_index(self, index: int) -> int:
        """The label of a record whose source has a class index, or -1."""
        self.has_numbers = self.has_numbers or index >= 0
        return index

    def read_name(self, name: str) -> int:
        """The label of a record whose source has the name of a class; -1 for an empty one.

        Raises: ValueError: it is too long, and labels are required.
        """
        if not name or self.are_too_many:
            return -1
        if len(name) > MAX_LABEL_CHARS:
            return self.read_unusable(
                f"label {reprlib.repr(name)} has {len(name)} characters, at most {MAX_LABEL_CHARS}"
            )
        if name not in self._names:
            self._num_chars += len(name)
            if len(self._names) >= MAX_CLASSES or self._num_chars > MAX_CLASS_BYTES:
                self.are_too_many = True
                self.check_names(len(self._names) + 1, self._num_chars)
                return -1
            self._names[name] = FIRST_NAME + len(self._names)
        return self._names[name]

    def read_unusable(self, problem: str, count: int = 1) -> int:
        """The label -1 of records whose source has something else. Raises: ValueError: labels are required."""
        if self.is_required:
            raise ValueError(problem)
        self.num_unusable += count
        self.example = self.example or problem
        return -1

    def check_names(self, num_names: int, num_chars: int) -> bool:
        """Whether so many names may be those of classes.

        Raises: SourceError: they may not, and labels are required.
        """
        if num_names <= MAX_CLASSES and num_chars <= MAX_CLASS_BYTES:
            return True
        self.are_too_many = True
        if self.is_required:
            raise SourceError(
                f"the column of labels has {num_names} or more different values, so they are not labels. Name another "
                "with --set source.label=NAME, or leave labels out with --set source.labels=none."
            )
        return False

    def number(self, classes: Sequence[str] | None) -> tuple[dict[int, int | None], list[str] | None]:
        """The final label of each name, by the label that ``read_name`` gave it.

        Args:
          classes: that the source itself lists in order of their labels, or None.
        Returns: labels, None for a name that is no label; and the names of all classes, None if they are numbers.
        """
        numbers, names = number_names(self.names, has_numbers=self.has_numbers, classes=classes)
        if self.are_too_many:
            return dict.fromkeys(self._names.values(), -1), None
        if classes is None and names:
            self.note_mixture(names)
        return {code: numbers[name] for name, code in self._names.items()}, names

    def note_mixture(self, classes: Sequence[str]) -> None:
        """Note if some names of classes are numbers: perhaps all should be, and one is misspelt."""
        others = [name for name in classes if whole_number(name) is None]
        num_numbers = len(classes) - len(others)
        if num_numbers and others:
            self.mixture = (
                f"labels: {num_numbers:,} numbers and {len(others):,} names, such as {reprlib.repr(others[0])}; all "
                "are taken as names of classes, which are sorted, so that a number is not the label"
            )

    def notes(self) -> list[str]:
        """What the user should know of labels that were left out, or read as names."""
        notes = [self.mixture] if self.mixture else []
        if self.are_too_many:
            notes.append(
                f"labels: none, because the guessed column has more than {MAX_CLASSES} different values; name another "
                "with source.label, or set source.labels=none"
            )
        if self.num_unusable:
            notes.append(
                f"labels: {self.num_unusable:,} values are neither a class index nor a name, and their records are "
                f"stored without a label (the first: {self.example}). Name another column with source.label, or set "
                "source.labels=none"
            )
        return notes


def number_names(
    names: Sequence[str], *, has_numbers: bool, classes: Sequence[str] | None = None
) -> tuple[Mapping[str, int | None], list[str] | None]:
    """Number the names of classes: by the list of the source, by their own numbers, or by their sorted order.

    Args:
      names: labels that are text, each once.
      has_numbers: other records have numbers as labels, so names are no labels.
      classes: that the source itself lists in order of their labels, or None.
    Returns: the label of each name, -1 for none, None if it is no label; and the names of all classes, None if they are
      numbers.
    """
    if classes is not None:
        places = {name: label for label, name in enumerate(classes)}
        return {name: places.get(name, _own_number(name)) for name in names}, list(classes)
    others = [name for name in names if whole_number(name) is None]
    if has_numbers or not others or (len(others) < len(names) and all(name.lower() in MISSING for name in others)):
        return {name: _own_number(name) for name in names}, None
    ordered = sorted(names)
    return {name: label for label, name in enumerate(ordered)}, ordered


def whole_number(text: str) -> int | None:
    """The number that a text writes in digits, such as "3", "+3" or "3.0"; None if it is no whole number."""
    if not WHOLE_NUMBER.fullmatch(text):
        return None
    return int(text.partition(".")[0])


def _own_number(name: str) -> int | None:
    """The class index that the name of a class is, or -1; None if it is neither."""
    number = whole_number(name)
    return number if number is not None and -1 <= number < MAX_CLASSES else None
