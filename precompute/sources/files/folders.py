"""Folders of images: class folders, as torchvision's ImageFolder, and images with text files."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from unicodedata import normalize

from ....errors import RecordRejected, SourceError
from ...config import SourceSection
from .beside import CACHED_FOLDERS, ImagesBeside
from .files import FoundFile, SourceFiles
from .further import FurtherImages
from .ignored import Ignored
from .labels import Labels
from .record import MAX_TEXT_BYTES, SourceRecord, is_image, usable_key
from .texts import TextReader

SIDECARS = (".caption", ".txt", ".json")  # captions come from the first of the first two that exists
IMAGE_FOLDER = "images"
TEXT_FOLDERS = ("captions", "labels", "texts", "prompts")  # beside IMAGE_FOLDER, with texts of the same names
OUTSIDE = 'the image lies outside the class folders; with source.labels = "none" all are taken, without labels'
WNID = re.compile(r"(n[0-9]{8})_[0-9]+\.[^.]+")  # ILSVRC's names of training images
UNLABELLED = re.compile(r"ILSVRC[0-9]{4}_(val|test)_[0-9]{8}\.[^.]+")
NO_WNID = 'the file name does not begin with a wnid, as in n01440764_18.JPEG; source.labels = "none" stores no labels'
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
      further: images that belong to other images.
      has_split_column: a column of the table told the split.
      needs_labels: a label that is neither a class index nor a name rejects its record, also if its column is guessed.
    Attributes:
      labels: of the records, by what the source says of each.
      texts: reads the texts beside images.
    """

    settings: SourceSection = field(default_factory=SourceSection)
    classes: list[str] | None = None
    ignored: Ignored = field(default_factory=Ignored)
    notes: list[str] = field(default_factory=list)
    companions: Mapping[str, str] = field(default_factory=dict)
    further: FurtherImages = field(default_factory=FurtherImages)
    has_split_column: bool = False
    needs_labels: bool = True
    labels: Labels = field(init=False)
    texts: TextReader = field(init=False)
    _labels: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.labels = Labels(
            is_read=self.settings.labels != "none",
            is_required=self.settings.labels != "none" and (self.needs_labels or bool(self.settings.label)),
        )
        self.texts = TextReader(self.settings, self.labels)

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
    """Images in class folders (label = index of the sorted folder name), or in one folder.

    A class folder without images also counts, so that part of a dataset has the labels of the whole. In one folder,
    labels are those of the wnids in the names of files, if most have one. Without labels all images count, wherever
    they are.
    """
    labels = scan.settings.labels
    beside = ImagesBeside(files, scan.companions, FurtherImages())  # counts nothing yet
    has_classes = labels == "auto" and any("/" in file.path for file in _images(files, beside))
    has_wnids = labels == "wnid" or (labels == "auto" and not has_classes and _guess_wnids(files, beside, scan))
    classes: list[str] = []
    if has_classes:
        classes = [name for name in files.folders() if not beside.holds_only_images_of_others(name)]
    elif has_wnids:
        classes = sorted({_wnid(file.path) for file in _images(files, beside)} - {""})
    for name in classes:
        scan.label(name)
    beside = ImagesBeside(files, scan.companions, scan.further)
    for file in files.walk(left_out=scan.ignored.folder, hidden=scan.ignored.hidden_file):
        if not is_image(file.path):
            scan.ignored.file(file.path)
            continue
        if beside.belongs_to_another(file.path):
            continue
        class_name = _wnid(file.path) if has_wnids else file.path.rpartition("/")[0].partition("/")[0]
        if class_name:
            record = file.record(label=scan.label(class_name))
        elif has_classes:
            record = file.record(problem=("bad_metadata", OUTSIDE))
        elif labels == "wnid":
            record = file.record(problem=("bad_metadata", NO_WNID))
        else:
            record = file.record()
        yield with_companions(record, beside)
    check_companions(files, beside, scan)


def with_companions(record: SourceRecord, beside: ImagesBeside) -> SourceRecord:
    """The record of a file with the places of its companions, or a reject if one is missing."""
    if record.problem:
        return record
    places, problem = beside.companions_of(record.path)
    return replace(record, companions=places, problem=problem)


def check_companions(files: SourceFiles, beside: ImagesBeside, scan: Scan) -> None:
    """Raise if no image of a folder has a companion that the recipe names.

    Raises: SourceError.
    """
    missing = next((name for name, count in beside.num_found.items() if not count), None)
    if missing:
        column = scan.companions[missing]
        raise SourceError(
            f"source '{files.name}': [companions.{missing}] needs a table with a column for it (JSONL, CSV, Parquet or "
            f"Arrow), a field '{column}' of tars, or images beside: 'NAME-{column.lstrip('-')}.png' beside 'NAME.jpg', "
            f"or a folder '{column}' of images with the same names; this is {scan.settings.kind}."
        )


def _images(files: SourceFiles, beside: ImagesBeside) -> Iterator[FoundFile]:
    return (file for file in files.walk() if is_image(file.path) and not beside.belongs_to_another(file.path))


def _wnid(path: str) -> str:
    """The wnid that the name of a file begins with, or an empty text."""
    match = WNID.fullmatch(path.rpartition("/")[2])
    return match[1] if match else ""


def _guess_wnids(files: SourceFiles, beside: ImagesBeside, scan: Scan) -> bool:
    """Whether most names of files begin with a wnid; adds a note if they do, or are those of unlabelled images."""
    total = unlabelled = with_wnid = 0
    for file in _images(files, beside):
        total += 1
        with_wnid += bool(_wnid(file.path))
        unlabelled += bool(UNLABELLED.fullmatch(file.path))
    if 2 * with_wnid > total:
        others = "" if with_wnid == total else ", and the others have none"
        scan.notes.append(
            f"labels: the wnid at the start of {with_wnid:,} of {total:,} file names, as in n01440764_18.JPEG{others} "
            "(source.labels=none: no labels)"
        )
    elif 2 * unlabelled > total:
        scan.notes.append(
            "labels: none, and names such as ILSVRC2012_val_00000001.JPEG contain no class. Write a table next to the "
            "images, such as labels.csv with the header 'image,wnid' and a row for each image"
        )
    return 2 * with_wnid > total


def has_sidecars(files: SourceFiles) -> bool:
    """Whether among the first files a text has the name of an image."""
    first = [file.path for file in itertools.islice(files.walk(files_first=True), LOOKED_AT)]
    texts = frozenset(filter(is_text, first))
    return bool(_text_folder(files)) or any(is_image(path) and texts_of(path, texts) for path in first)


def is_text(path: str) -> bool:
    """A name has the extension of a text beside an image."""
    return path.lower().endswith(SIDECARS)


def texts_of(image: str, names: frozenset[str]) -> dict[str, str]:
    """The texts of an image among some names, by extension in lower case.

    ``a.jpg.txt`` is that of ``a.jpg`` alone, ``a.txt`` that of any image ``a``. Extensions may have any case, and
    letters with accents either of their two forms, of which macOS writes the other one.
    """
    beginnings = []
    for name in (image, os.path.splitext(image)[0]):
        beginnings += [name, normalize("NFC", name), normalize("NFD", name)]
    texts = {}
    for extension in SIDECARS:
        endings = (extension, extension.upper(), extension.title())
        candidates = (beginning + ending for beginning in beginnings for ending in endings)
        text = next((name for name in candidates if name in names), None)
        if text:
            texts[extension] = text
    return texts


def _text_folder(files: SourceFiles) -> str | None:
    """The folder of texts next to a folder ``images``: same names, other extensions."""
    folders = set(itertools.islice(files.folders(), LOOKED_AT))
    if IMAGE_FOLDER not in folders:
        return None
    for folder in TEXT_FOLDERS:
        if folder in folders:
            first = itertools.islice(files.inside(folder).walk(), LOOKED_AT)
            if any(is_text(file.path) for file in first):
                return folder
    return None


def sidecar_folder(files: SourceFiles, scan: Scan) -> Iterator[SourceRecord]:
    """Images with captions in ``NAME.caption`` or ``.txt``, one a line, and a label in ``NAME.json``.

    The texts may also be in a folder next to ``images``.
    """
    text_folder = _text_folder(files)
    if text_folder:
        scan.notes.append(f"captions: texts in folder '{text_folder}' for images of '{IMAGE_FOLDER}'")
    texts = _Texts(files, text_folder)
    beside = ImagesBeside(files, scan.companions, scan.further)
    listed = files.walk(files_first=True, left_out=scan.ignored.folder, hidden=scan.ignored.hidden_file)
    for folder, in_folder in itertools.groupby(listed, key=lambda file: os.path.dirname(file.path)):
        # Names that are equal up to the first dot are consecutive, so an image and most of its texts come together.
        for _, group in itertools.groupby(in_folder, key=lambda file: os.path.basename(file.path).partition(".")[0]):
            together = {file.path: file for file in group}
            for file in together.values():
                if is_image(file.path) and not beside.belongs_to_another(file.path):
                    record = _with_texts(files, file, texts.of_image(file.path, together), scan)
                    yield with_companions(record, beside)
                elif not is_image(file.path) and not is_text(file.path):
                    scan.ignored.file(file.path)
        for name in texts.unused(folder):
            scan.ignored.file(name)
    check_companions(files, beside, scan)


class _Texts:
    """The texts of the images of a source.

    Args:
      files: of the source.
      text_folder: folder of texts beside that of the images, or None.
    """

    def __init__(self, files: SourceFiles, text_folder: str | None) -> None:
        self._files = files
        self._text_folder = text_folder
        self._used: set[str] = set()  # paths, of the images of the present folder
        self._names = lru_cache(CACHED_FOLDERS)(lambda folder: frozenset(filter(is_text, files.names_in(folder))))

    def of_image(self, path: str, together: Mapping[str, FoundFile]) -> dict[str, FoundFile]:
        """The texts of an image by extension, in the order of SIDECARS; one in the folder of texts counts first.

        Args:
          together: files that are listed already, by path.
        """
        folder, name = os.path.split(path)
        paths: dict[str, str] = {}
        for text_folder in self._text_folders(folder):
            for extension, text in texts_of(name, self._names(text_folder)).items():
                paths[extension] = os.path.join(text_folder, text)
                self._used.add(paths[extension])
        texts = {}
        for extension in SIDECARS:
            if extension in paths:
                file = together.get(paths[extension]) or self._files.look(paths[extension])
                if file:
                    texts[extension] = file
        return texts

    def unused(self, folder: str) -> list[str]:
        """Paths of the texts that no image of a folder has, once all of its images were listed."""
        if self._text_folder and _is_in(folder, self._text_folder):
            images = IMAGE_FOLDER + folder.removeprefix(self._text_folder)
            if any(map(is_image, self._files.names_in(images))):
                return []  # they are counted with the images
        text_folders = self._text_folders(folder)
        texts = {os.path.join(text_folder, text) for text_folder in text_folders for text in self._names(text_folder)}
        unused = sorted(texts - self._used)
        self._used.clear()
        return unused

    def _text_folders(self, folder: str) -> list[str]:
        """The folders in which the texts of the images of a folder may be; those of the last one count first."""
        if self._text_folder and _is_in(folder, IMAGE_FOLDER):
            return [folder, self._text_folder + folder.removeprefix(IMAGE_FOLDER)]
        return [folder]


def _is_in(folder: str, other: str) -> bool:
    """Whether a folder is another one, or in it."""
    return f"{folder}/".startswith(f"{other}/")


def _with_texts(files: SourceFiles, image: FoundFile, beside: dict[str, FoundFile], scan: Scan) -> SourceRecord:
    """The record of an image with its texts, by extension."""
    texts: dict[str, bytes] = {}
    try:
        for extension, file in beside.items():
            is_large = file.num_bytes > MAX_TEXT_BYTES and not file.problem
            if is_large and extension == ".json" and any(text.strip() for text in texts.values()):
                scan.further.add_unread_text(f"'{file.path}' of {file.num_bytes} bytes")
                continue
            content = _text(files, file)
            if extension == ".json" or not scan.further.is_text_of_boxes(file.path, content):
                texts[extension] = content
        label, captions = scan.texts.read({extension[1:]: content for extension, content in texts.items()})
        return image.record(label=label, captions=captions)
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
