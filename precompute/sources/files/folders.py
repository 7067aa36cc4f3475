"""Folders of images: class folders, as torchvision's ImageFolder, and images with text files."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ....datasets.errors import RecordRejected
from ...config import SourceSection
from .files import FoundFile, SourceFiles
from .further import FurtherImages
from .ignored import Ignored
from .labels import Labels
from .record import MAX_TEXT_BYTES, SourceRecord, is_image, usable_key
from .texts import TextReader

SIDECARS = (".caption", ".txt", ".json")  # captions come from the first of the first two that exists
IMAGE_FOLDER, TEXT_FOLDERS = "images", ("captions", "labels", "texts", "prompts")  # beside each other, of equal names
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
    has_classes = labels == "auto" and any("/" in file.path for file in _images(files))
    has_wnids = labels == "wnid" or (labels == "auto" and not has_classes and _guess_wnids(files, scan))
    classes = list(files.folders()) if has_classes else []
    if has_wnids:
        classes = sorted({_wnid(file.path) for file in _images(files)} - {""})
    for name in classes:
        scan.label(name)
    for file in files.walk(left_out=scan.ignored.folder):
        if not is_image(file.path):
            scan.ignored.file(file.path)
            continue
        name = _wnid(file.path) if has_wnids else file.path.rpartition("/")[0].partition("/")[0]
        why = OUTSIDE if has_classes else NO_WNID if labels == "wnid" else ""
        yield file.record(
            label=scan.label(name) if name else -1, problem=("bad_metadata", why) if why and not name else None
        )


def _images(files: SourceFiles) -> Iterator[FoundFile]:
    return (file for file in files.walk() if is_image(file.path))


def _wnid(path: str) -> str:
    """The wnid that the name of a file begins with, or an empty text."""
    match = WNID.fullmatch(path.rpartition("/")[2])
    return match[1] if match else ""


def _guess_wnids(files: SourceFiles, scan: Scan) -> bool:
    """Whether most names of files begin with a wnid; adds a note if they do, or are those of unlabelled images."""
    total = unlabelled = with_wnid = 0
    for file in _images(files):
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
        scan.notes.append(f"captions: texts in folder '{folder}' for images of '{IMAGE_FOLDER}'")
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
                yield _with_texts(files, file, beside, scan)
        for file in together:
            if not is_image(file.path) and file.path not in used:
                scan.ignored.file(file.path)


def _until_dot(file: FoundFile) -> str:
    folder, _, name = file.path.rpartition("/")
    return f"{folder}/{name.partition('.')[0]}"


def _with_texts(files: SourceFiles, image: FoundFile, beside: dict[str, FoundFile], scan: Scan) -> SourceRecord:
    try:
        label, captions = scan.texts.read({suffix[1:]: _text(files, file) for suffix, file in beside.items()})
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
