"""Folders of pictures: class folders, as torchvision's ImageFolder; and pictures with a text file beside each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..datasets.errors import RecordRejected
from .source_files import FoundFile, SourceFiles
from .source_record import MAX_TEXT_BYTES, SourceRecord, captions_of, is_picture, json_row, label_of, usable_key

SIDECARS = (".txt", ".json")
LOOKED_AT = 1000  # files, to see whether texts lie beside pictures


@dataclass
class Found:
    """What a walk comes upon beside the records.

    Args:
      classes: names of the classes in order of their index; None where they are numbers, and are counted.
      num_ignored: files that are no pictures by their extension.
    """

    classes: list[str] | None = None
    num_ignored: int = 0
    _labels: dict[str, int] = field(default_factory=dict)

    def label(self, name: str) -> int:
        """Index of a class; classes must come in order."""
        name, _ = usable_key(name)
        if self.classes is None:
            self.classes = []
        label = self._labels.setdefault(name, len(self.classes))
        if label == len(self.classes):
            self.classes.append(name)
        return label


def image_folder(files: SourceFiles, found: Found) -> Iterator[SourceRecord]:
    """Pictures below class folders (label = position of the folder's sorted name), or in one folder without labels.

    A class folder without pictures has its label all the same, so that a part of a set has the labels of the whole.
    """
    has_classes = any("/" in file.path for file in files.walk() if is_picture(file.path))
    for name in files.folders() if has_classes else ():
        found.label(name)
    for file in files.walk():
        if not is_picture(file.path):
            found.num_ignored += 1
            continue
        name, slash, _ = file.path.partition("/")
        outside = ("bad_metadata", "the picture lies outside the class folders") if has_classes and not slash else None
        yield file.record(label=found.label(name) if slash else -1, problem=outside)


def has_sidecars(files: SourceFiles) -> bool:
    """Among the first files, a text lies beside a picture of the same name."""
    some = list(itertools.islice(files.walk(files_first=True), LOOKED_AT))
    texts = {file.path.rpartition(".")[0] for file in some if file.path.endswith(SIDECARS)}
    return any(is_picture(file.path) and file.path.rpartition(".")[0] in texts for file in some)


def sidecar_folder(files: SourceFiles, found: Found) -> Iterator[SourceRecord]:
    """Pictures with ``NAME.txt`` beside ``NAME.jpg``, one caption a line, and ``NAME.json`` for label and captions."""
    # All names with one beginning up to the first dot follow each other, so a picture and its texts come together.
    for _, group in itertools.groupby(files.walk(files_first=True), key=_until_dot):
        together = list(group)
        texts = {file.path: file for file in together if file.path.endswith(SIDECARS)}
        used = set()
        for file in together:
            if is_picture(file.path):
                stem = file.path.rpartition(".")[0]
                beside = {suffix: texts[stem + suffix] for suffix in SIDECARS if stem + suffix in texts}
                used |= {text.path for text in beside.values()}
                yield _with_texts(files, file, beside)
        found.num_ignored += sum(not is_picture(file.path) and file.path not in used for file in together)


def _until_dot(file: FoundFile) -> str:
    folder, _, name = file.path.rpartition("/")
    return f"{folder}/{name.partition('.')[0]}"


def _with_texts(files: SourceFiles, picture: FoundFile, beside: dict[str, FoundFile]) -> SourceRecord:
    try:
        contents = {suffix: _text(files, file) for suffix, file in beside.items()}
        row = json_row(contents[".json"]) if ".json" in contents else {}
        captions = captions_of(row)
        if ".txt" in contents:
            lines = [line for line in contents[".txt"].decode("utf-8-sig").splitlines() if line.strip()]
            captions = captions_of({"captions": lines})
        return picture.record(label=label_of(row), captions=captions)
    except (ValueError, TypeError, RecursionError) as error:
        return picture.record(problem=("bad_metadata", str(error)))
    except RecordRejected as reject:
        # Not the reason of the text's own file: mended, the record would still count as looked at.
        return picture.record(problem=("bad_metadata", f"{reject.reason}: {reject.detail}"))


def _text(files: SourceFiles, file: FoundFile) -> bytes:
    if file.problem:
        raise RecordRejected("scan", *file.problem)
    if file.num_bytes > MAX_TEXT_BYTES:
        raise ValueError(f"'{file.path}' has {file.num_bytes} bytes, at most {MAX_TEXT_BYTES} are read")
    return files.read(file.path, 0, file.num_bytes, "scan")
