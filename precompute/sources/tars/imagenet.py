"""ImageNet's own archives: a tar of class tars, a folder of them, or the tar of the validation set.

Nothing is unpacked: a record holds the place of its bytes in the outer tar.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

from ....errors import SourceError
from ..files.files import FoundFile, SourceFiles
from ..files.folders import Scan
from ..files.record import SourceRecord, is_image, usable_key
from .members import TarMember, tar_members
from .webdataset import tar_names

CLASS_TAR = re.compile(r"(?:.*/)?(n\d{8})\.tar")  # a class of ImageNet: WordNet's number of a noun
VAL_IMAGE = re.compile(r"(?:.*/)?ILSVRC2012_val_(\d{8})\.JPEG")
VAL_LABELS = "imagenet_2012_validation_synset_labels.txt"  # wnid of each image of the validation set, one a line
MAX_LABELS_BYTES = 1 << 24


def is_imagenet(files: SourceFiles, names: list[str]) -> bool:
    """The tars are ImageNet's: one of class tars, class tars in a folder, or the validation set."""
    if names and all(CLASS_TAR.fullmatch(name) for name in names):
        return True
    if len(names) != 1:
        return False
    with files.open(names[0]) as file:
        first = next(islice(tar_members(file, files.shown(names[0])), 1), None)
    return first is not None and bool(CLASS_TAR.fullmatch(first.name) or VAL_IMAGE.fullmatch(first.name))


def imagenet(files: SourceFiles, scan: Scan) -> Iterator[SourceRecord]:
    """Records of ILSVRC2012_img_train.tar, of a folder of its class tars, or of ILSVRC2012_img_val.tar.

    The key is the path after unpacking, the label the index of the sorted wnid, in the order of an image folder. A
    damaged class tar is one reject; its images before the damage are kept.
    """
    names = tar_names(files, scan.settings.split)
    if names and all(CLASS_TAR.fullmatch(name) for name in names):
        tars = [(_wnid(name), name, 0, None) for name in names]
    else:
        with files.open(names[0]) as file:
            members = list(islice(tar_members(file, files.shown(names[0])), 1))
            if members and VAL_IMAGE.fullmatch(members[0].name):
                yield from _validation(files, names[0], scan)
                return
            inner = [m for m in tar_members(file, files.shown(names[0])) if CLASS_TAR.fullmatch(m.name)]
        tars = [(_wnid(m.name), names[0], m.offset, m) for m in inner]
    for wnid, name, start, member in sorted(tars, key=lambda tar: tar[0]):
        yield from _class_tar(files, name, wnid, start, member, scan)


def _wnid(name: str) -> str:
    match = CLASS_TAR.fullmatch(name)
    assert match, "only the names of class tars come here"
    return match[1]


def _class_tar(
    files: SourceFiles, name: str, wnid: str, start: int, member: TarMember | None, scan: Scan
) -> Iterator[SourceRecord]:
    place, problem, images = files.look(name) or FoundFile(name), None, []
    label = scan.label(wnid)
    try:
        if member and member.problem:
            raise SourceError(member.problem)
        with files.open(name) as file:
            stop = start + member.size if member else None
            for inner in tar_members(file, files.shown(name), start=start, stop=stop):
                if is_image(inner.name):
                    images.append(inner)
                else:
                    scan.ignored.file(inner.name)
    except SourceError as error:  # the rest of the classes is whole
        problem = ("unreadable", f"class tar '{wnid}.tar': {error}")
    for inner in sorted(images, key=lambda member: member.name.rpartition("/")[2]):
        yield _image(f"{wnid}/{inner.name.rpartition('/')[2]}", place, inner, label)
    if problem:
        yield SourceRecord(f"{wnid}.tar", name, start, member.size if member else 0, place.mtime_ns, problem=problem)


def _validation(files: SourceFiles, name: str, scan: Scan) -> Iterator[SourceRecord]:
    wnids = _validation_labels(files)
    for wnid in sorted(set(wnids)):
        scan.label(wnid)
    place, images = files.look(name) or FoundFile(name), []
    with files.open(name) as file:
        for member in tar_members(file, files.shown(name)):
            match = VAL_IMAGE.fullmatch(member.name)
            if match:
                images.append((int(match[1]), member))
            else:
                scan.ignored.file(member.name)
    for number, member in sorted(images, key=lambda numbered: numbered[0]):
        key = member.name.rpartition("/")[2]
        if wnids and not 1 <= number <= len(wnids):
            yield _image(key, place, member, -1, ("bad_metadata", f"'{VAL_LABELS}' has no line {number}"))
        else:
            yield _image(key, place, member, scan.label(wnids[number - 1]) if wnids else -1)


def _validation_labels(files: SourceFiles) -> list[str]:
    """Wnid of each image, from the file next to the tar; empty without it."""
    labels = files.look(VAL_LABELS)
    if labels is None:
        return []
    if labels.problem or labels.num_bytes > MAX_LABELS_BYTES:
        raise SourceError(f"source '{files.name}': '{VAL_LABELS}' is not a file of wnids. Restore or remove it.")
    with files.open(VAL_LABELS) as file:
        wnids = file.read(MAX_LABELS_BYTES).decode("ascii", "replace").split()
    if wrong := next((wnid for wnid in wnids if not re.fullmatch(r"n\d{8}", wnid)), None):
        raise SourceError(
            f"source '{files.name}': '{VAL_LABELS}' says {wrong[:40]!r}; expected wnids such as n01440764."
        )
    return wnids


def _image(
    name: str, place: FoundFile, member: TarMember, label: int, problem: tuple[str, str] | None = None
) -> SourceRecord:
    key, unusable = usable_key(name)
    if member.problem:
        problem = ("bad_metadata", member.problem)
    problem = unusable or problem
    return SourceRecord(key, place.path, member.offset, member.size, place.mtime_ns, label, problem=problem)
