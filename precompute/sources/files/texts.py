"""The captions and the label of an image, from the texts beside it or in its tar."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ....errors import SourceError
from ....units import plural
from ...config import SourceSection
from .labels import Labels, whole_number
from .record import CAPTION_NAMES, captions_of, decode_text

CAPTION_FILES = ("caption", "txt")  # extensions; the first that is not empty counts
LINE_END = re.compile(r"\r?\n")  # str.splitlines splits at U+2028, U+0085 and form feeds too, which captions contain
LABEL_FIELDS = ("label", "cls")
MAX_FIELDS = 20  # in a message
MAX_COUNTED_FIELDS = 1000


def split_lines(text: str) -> list[str]:
    """The lines of a text, which end in "\\n" or "\\r\\n" alone."""
    return LINE_END.split(text)


class TextReader:
    """Reads the texts of each image of a source, and counts how it read them.

    Args:
      settings: may name the fields of captions and labels, and say how a file of text is read.
      labels: receives each label.
    """

    def __init__(self, settings: SourceSection, labels: Labels) -> None:
        self._settings = settings
        self._labels = labels
        self._num_whole = 0  # files of text that were read as one caption
        self._num_lines = 0  # files of a caption on each line
        self._num_single = 0  # files of a single line
        self._fields: Counter[str] = Counter()  # of .json, by the number of images that have one
        self._num_images = 0
        self._num_uncaptioned = 0  # images without a caption, although they have a .json
        self._num_named: Counter[str] = Counter()  # images that have the field that a key of the recipe names

    def read(self, texts: Mapping[str, bytes]) -> tuple[int, tuple[str, ...]]:
        """Label and captions of an image.

        Args:
          texts: by extension: a label in ``cls``, captions in ``caption`` or ``txt``; else both in ``json``. Where
            ``source.caption`` or ``source.label`` names a field of ``json`` or an extension, only that one counts.
        Returns: the label as ``Labels.read`` gives it, and the captions.
        Raises: ValueError, TypeError, RecursionError: a text is not UTF-8 or not JSON, or its values are no captions
          or no label.
        """
        self._num_images += 1
        row, problem = self._row(texts)
        captions = self._captions(row, texts)
        self._num_uncaptioned += 1 if row and not captions else 0
        if problem and (captions is None or self._labels.is_required):
            raise problem
        if problem and self._labels.is_read:
            self._labels.read_unusable(f"the .json cannot be read: {problem}")
        return self._label(row, texts), captions or ()

    def _row(self, texts: Mapping[str, bytes]) -> tuple[dict[str, Any], Exception | None]:
        """The fields of the .json, and why there are none."""
        if "json" not in texts:
            return {}, None
        try:
            row = json.loads(texts["json"])
        except (ValueError, RecursionError) as error:
            return {}, error
        if not isinstance(row, dict):
            return {}, ValueError(".json is not an object")
        for name in row:
            if name in self._fields or len(self._fields) < MAX_COUNTED_FIELDS:
                self._fields[name] += 1
        return row, None

    def _captions(self, row: Mapping[str, Any], texts: Mapping[str, bytes]) -> tuple[str, ...] | None:
        """The captions of an image; None without any text for them."""
        name = self._settings.caption
        if name:
            if name in row or name in texts:
                self._num_named["caption"] += 1
            if name in row:
                return captions_of(row, [name])
            return self._captions_in_file(decode_text(texts[name], name), row) if name in texts else None
        for extension in CAPTION_FILES:
            text = decode_text(texts.get(extension, b""), extension)
            if text.strip():
                return self._captions_in_file(text, row)
        return captions_of(row) or None

    def _captions_in_file(self, text: str, row: Mapping[str, Any]) -> tuple[str, ...]:
        """The captions of a file of text, as ``source.text_file`` says.

        Args:
          row: of the .json of the same image: img2dataset writes a caption of several lines into both files.
        """
        text = text.strip()
        lines = [line.strip() for line in split_lines(text)]
        if len(lines) == 1:
            if not text:
                return ()
            self._num_single += 1
            return captions_of({"captions": [text]})
        form = self._settings.text_file
        is_one_caption = "" in lines or _is_json(text) or any(_is_text(row.get(name), text) for name in CAPTION_NAMES)
        if form == "whole" or (form == "auto" and is_one_caption):
            self._num_whole += 1
            return captions_of({"captions": [text]})
        self._num_lines += 1
        return captions_of({"captions": [line for line in lines if line]})

    def _label(self, row: Mapping[str, Any], texts: Mapping[str, bytes]) -> int:
        """The label of an image, as ``Labels.read`` gives it."""
        if not self._labels.is_read:
            return -1
        name = self._settings.label
        if name:
            if name in row or name in texts:
                self._num_named["label"] += 1
            if name in row:
                return self._labels.read(row[name])
        if name in ("", "cls") and "cls" in texts:
            text = decode_text(texts["cls"], "cls").strip()
            number = whole_number(text)
            return self._labels.read(text if number is None else number)
        if name:
            return self._labels.read(decode_text(texts[name], name)) if name in texts else -1
        return self._labels.read(next((row[field] for field in LABEL_FIELDS if field in row), None))

    def check_named_fields(self, where: str) -> None:
        """Raise if no image has a field that the recipe names.

        Args:
          where: the source.
        Raises: SourceError.
        """
        for key in ("caption", "label"):
            name = getattr(self._settings, key)
            if name and not self._num_named[key]:
                has = f"The fields of its .json are {self._shown_fields()}." if self._fields else "It has no .json."
                raise SourceError(
                    f"source '{where}': source.{key} '{name}': no image has a .json with this field, nor a text with "
                    f"this extension. {has} Correct the name, or leave the key out."
                )

    def _shown_fields(self) -> str:
        return ", ".join(repr(field[:40]) for field, _ in self._fields.most_common(MAX_FIELDS))

    def notes(self) -> list[str]:
        """How files of text were read, and which images lack a named field or any caption."""
        notes = []
        if self._num_uncaptioned and not self._settings.caption and not self._labels.is_required:
            notes.append(
                f"captions: {plural(self._num_uncaptioned, 'image')} without one, whose .json has other fields: "
                f"{self._shown_fields()}. Name that of captions with --set source.caption=FIELD"
            )
        if self._num_whole or self._num_lines:
            notes.append(
                f"captions: {plural(self._num_whole, 'text file')} of several lines read as one caption, "
                f"{self._num_lines:,} as a caption a line, {self._num_single:,} of a single line; source.text_file "
                '= "whole" or "lines" reads all of them alike'
            )
        for key in ("caption", "label"):
            name = getattr(self._settings, key)
            num_without = self._num_images - self._num_named[key]
            if name and num_without:
                notes.append(f"source.{key} '{name}': {num_without:,} of {plural(self._num_images, 'image')} lack it")
        return notes


def _is_text(value: Any, text: str) -> bool:
    return isinstance(value, str) and value.strip() == text


def _is_json(text: str) -> bool:
    if text[:1] not in ("{", "["):
        return False
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
