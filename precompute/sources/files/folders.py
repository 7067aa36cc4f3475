"""Folders of images: class folders, as torchvision's ImageFolder, and images with text files."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ....datasets.errors import RecordRejected
from ...config import SourceSection
from .files import FoundFile, SourceFiles
from .ignored import Ignored
from .record import MAX_TEXT_BYTES, SourceRecord, captions_of, is_image, json_row, label_of, text_lines, usable_key

SIDECARS = (".caption", ".txt", ".json")  # captions come from the first of the first two that exists
IMAGE_FOLDER, TEXT_FOLDERS = "images", ("captions", "labels", "texts", "prompts")  # beside each other, of equal names
OUTSIDE = 'the image lies outside the class folders; with source.labels = "none" all are taken, without labels'
LOOKED_AT = 1000  # files, to see whether texts lie beside images


@dataclass
class Scan:
    """State of a listing, besides its records.

    Args:
      settings: how to read the source.
      classes: class names in order of their labels; None if they are numbers.
      ignored: files and folders that were skipped.
      notes: on how the source was read.
      companions: column of each companion image, by name.
    """

    settings: SourceSection = field(default_factory=SourceSection)
    classes: list[str] | None = None
    ignored: Ignored = field(default_factory=Ignored)
    notes: list[str] = field(default_factory=list)
    companions: Mapping[str, str] = field(default_factory=dict)
    _labels: dict[str, int] = field(default_factory=dict)

    def label(self, name: str) -> int:
        """Label of a class; classes must come in order. -1 if labels are off."""
        if self.settings.labels == "none":
            return -1
        name, _ = usable_key(name)
        self.classes = self.classes or []
        label = self._labels.setdefault(name, len(self.classes))
        if label == len(self.classes):
            self.classes.append(name)
        return label


def image_folder(files: SourceFiles, scan: Scan) -> Iterator[SourceRecord]:
    """Images in class folders (label = index of the sorted folder name), or in one folder without labels.

    A class folder without images also counts, so that part of a dataset has the labels of the whole. Without labels all
    images count, wherever they are.
    """
    is_labelled = scan.settings.labels == "auto"
    has_classes = is_labelled and any("/" in file.path and is_image(file.path) for file in files.walk())
    for name in files.folders() if has_classes else ():
        scan.label(name)
    for file in files.walk(left_out=scan.ignored.folder):
        if not is_image(file.path):
            scan.ignored.file(file.path)
            continue
        name = file.path.rpartition("/")[0].partition("/")[0]
        problem = ("bad_metadata", OUTSIDE) if has_classes and not name else None
        yield file.record(label=scan.label(name) if name else -1, problem=problem)


def has_sidecars(files: SourceFiles) -> bool:
    """Whether among the first files a text has the name of an image."""
    first = [file.path for file in itertools.islice(files.walk(files_first=True), LOOKED_AT)]
    texts = {path.rpartition(".")[0] for path in first if path.endswith(SIDECARS)}
    return bool(_text_folder(files)) or any(is_image(path) and path.rpartition(".")[0] in texts for path in first)


def _text_folder(files: SourceFiles) -> str | None:
    """The folder of texts next to a folder ``images``: same names, other extensions."""
    folders = set(itertools.islice(files.folders(), LOOKED_AT))
    for folder in TEXT_FOLDERS if IMAGE_FOLDER in folders else ():
        first = itertools.islice(files.inside(folder).walk(), LOOKED_AT) if folder in folders else ()
        if any(file.path.endswith(SIDECARS) for file in first):
            return folder
    return None


def sidecar_folder(files: SourceFiles, scan: Scan) -> Iterator[SourceRecord]:
    """Images with captions in ``NAME.caption`` or ``.txt``, one a line, and a label in ``NAME.json``.

    The texts may also be in a folder next to ``images``.
    """
    folder = _text_folder(files)
    if folder:
        scan.notes.append(f"captions: texts of folder '{folder}' for images of '{IMAGE_FOLDER}'")
    # Names that are equal up to the first dot are consecutive, so an image and its texts come together.
    listed = files.walk(files_first=True, left_out=scan.ignored.folder)
    for _, group in itertools.groupby(listed, key=_until_dot):
        together = list(group)
        texts = {file.path: file for file in together if file.path.endswith(SIDECARS)}
        used = {path for path in texts if folder and path.startswith(f"{folder}/")}
        for file in together:
            if is_image(file.path):
                stem = file.path.rpartition(".")[0]
                beside = {suffix: texts[stem + suffix] for suffix in SIDECARS if stem + suffix in texts}
                if folder and stem.startswith(f"{IMAGE_FOLDER}/"):
                    stem = folder + stem.removeprefix(IMAGE_FOLDER)
                    beside |= {suffix: text for suffix in SIDECARS if (text := files.look(stem + suffix))}
                used |= {text.path for text in beside.values()}
                yield _with_texts(files, file, beside)
        for file in together:
            if not is_image(file.path) and file.path not in used:
                scan.ignored.file(file.path)


def _until_dot(file: FoundFile) -> str:
    folder, _, name = file.path.rpartition("/")
    return f"{folder}/{name.partition('.')[0]}"


def _with_texts(files: SourceFiles, image: FoundFile, beside: dict[str, FoundFile]) -> SourceRecord:
    try:
        contents = {suffix: _text(files, file) for suffix, file in beside.items()}
        row = json_row(contents[".json"]) if ".json" in contents else {}
        captions = captions_of(row)
        if text := contents.get(".caption", contents.get(".txt")):
            captions = captions_of({"captions": text_lines(text)})
        return image.record(label=label_of(row), captions=captions)
    except (ValueError, TypeError, RecursionError) as error:
        return image.record(problem=("bad_metadata", str(error)))
    except RecordRejected as reject:
        # bad_metadata, not the reason of the text file: the record is planned again once the text is repaired.
        return image.record(problem=("bad_metadata", f"{reject.reason}: {reject.detail}"))


def _text(files: SourceFiles, file: FoundFile) -> bytes:
    if file.problem:
        raise RecordRejected("scan", *file.problem)
    if file.num_bytes > MAX_TEXT_BYTES:
        raise ValueError(f"'{file.path}' has {file.num_bytes} bytes, at most {MAX_TEXT_BYTES} are read")
    return files.read(file.path, 0, file.num_bytes, "scan")
