"""Images that are no records of their own, such as masks beside their images: counted, and offered as companions."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from ....units import plural

MAX_COLUMNS = 100  # that are counted apart
NUM_SHOWN = 4
OTHERS = "others"
BOX = re.compile(rb"\s*\d+(\s+[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?){4,}\s*")  # a class and four or more coordinates
SEPARATORS = "-_."  # before an ending of names, as in a-mask.png
MASK_WORDS = re.compile(r"mask|seg|matte|alpha", re.IGNORECASE)  # in the columns of companions that are likely masks


@dataclass
class FurtherImages:
    """Counts of images that are left out because they belong to another image, and of texts that are not used.

    Args:
      columns: number of images by the column of the companion that they would be.
      examples: the name of the first of each.
    """

    columns: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    num_unread_texts: int = 0
    unread_text: str = ""
    num_boxes: int = 0
    box_file: str = ""

    def add(self, column: str, example: str = "") -> None:
        """Count an image that belongs to another one."""
        column = column if column in self.columns or len(self.columns) < MAX_COLUMNS else OTHERS
        self.columns[column] += 1
        self.examples.setdefault(column, example)

    def add_fields(self, fields: Iterable[str]) -> None:
        """Count further images of a key of a tar."""
        for name in fields:
            self.add(name)

    def add_unread_text(self, problem: str) -> None:
        """Count a text that cannot be read beside one that can."""
        self.num_unread_texts += 1
        self.unread_text = self.unread_text or problem

    def is_text_of_boxes(self, name: str, content: bytes) -> bool:
        """Whether a text holds rows of numbers, as YOLO's labels do, and no caption; counts it if so.

        Args:
          name: of its file, for messages.
        """
        lines = [line for line in content.splitlines() if line.strip()]
        if not lines or not all(map(BOX.fullmatch, lines)):
            return False
        self.num_boxes += 1
        self.box_file = self.box_file or name
        return True

    def notes(self) -> list[str]:
        """What was left out, and how to store it."""
        notes = []
        for column, count in self.columns.most_common(NUM_SHOWN):
            example = f", such as '{self.examples[column]}'" if self.examples[column] else ""
            notes.append(
                f"left out: {plural(count, 'image')} '{column}', each of another image{example}. To store them as "
                f"companions: {companion_options(column)}"
            )
        if len(self.columns) > NUM_SHOWN:
            notes.append(f"left out: further images, {', '.join(sorted(self.columns)[:MAX_COLUMNS])}")
        if self.num_boxes:
            notes.append(
                f"not captions: {plural(self.num_boxes, 'text')} of rows of numbers, as YOLO's labels, such as "
                f"'{self.box_file}'. Put captions into NAME.caption, or into a folder 'captions' beside 'images'"
            )
        if self.num_unread_texts:
            notes.append(
                f"not used: {plural(self.num_unread_texts, 'text')} beside captions that can be read, such as "
                f"{self.unread_text}"
            )
        return notes


def companion_options(column: str) -> str:
    """The options of the command that store further images as a companion.

    Args:
      column: of the companion: a column of a table, a field of tars, or an ending or a folder of names.
    """
    name = re.sub(r"\.[a-z]+$", "", column.lower().lstrip(SEPARATORS))
    name = re.sub(r"[^a-z0-9]+", "_", name).strip("_")
    if not name[:1].isalpha():
        name = f"image_{name}"
    kind = "mask" if MASK_WORDS.search(column) else "image"
    options = f"--set companions.{name}.kind={kind}"
    if column.lstrip(SEPARATORS) != name:
        options += f" --set {shlex.quote(f'companions.{name}.column={column}')}"
    return options
