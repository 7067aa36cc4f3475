"""Tars of pictures: WebDataset shards, and ImageNet's own archives, one of which holds a tar for each class.

Nothing is unpacked: a record says where its bytes lie in the tar, in the outer one where there are two. The plan keeps
these places, so it is the index for random access; a tar is walked again only when its source is listed again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import islice
from typing import BinaryIO

from ....datasets.errors import SourceError
from ..files.files import FoundFile, SourceFiles, shown
from ..files.folders import Found
from ..files.record import MAX_TEXT_BYTES, SourceRecord, captions_of, is_picture, json_row, label_of, usable_key
from ..files.splits import shards_of_split
from .tar_members import TarMember, tar_members

MAX_TAR_NAME = 4096  # as long as a path can be
TEXT_EXTENSIONS = ("cls", "txt", "json")
CLASS_TAR = re.compile(r"(?:.*/)?(n\d{8})\.tar")  # a class of ImageNet: WordNet's number of a noun
VAL_PICTURE = re.compile(r"(?:.*/)?ILSVRC2012_val_(\d{8})\.JPEG")
VAL_LABELS = "imagenet_2012_validation_synset_labels.txt"  # wnid of each picture of the validation set, one a line
MAX_LABELS_BYTES = 1 << 24


def tar_names(files: SourceFiles, split: str) -> list[str]:
    """The tars of a source, in order; of one split, as ``source.split`` says.

    Raises: SourceError: the name of one is not UTF-8; or there are several splits and none is named.
    """
    names = [files.only] if files.only else [name for name in files.names() if fnmatchcase(name, "*.tar")]
    names = names if files.only else shards_of_split(files.name, names, split)
    for name in names:
        if usable_key(name)[1]:
            raise SourceError(f"source '{files.name}': the name of tar {name!r} is not UTF-8 or too long. Rename it.")
    return names


def is_imagenet(files: SourceFiles, names: list[str]) -> bool:
    """The tars are ImageNet's: one of class tars, class tars in a folder, or the validation set."""
    if names and all(CLASS_TAR.fullmatch(name) for name in names):
        return True
    if len(names) != 1:
        return False
    with files.open(names[0]) as file:
        first = next(islice(tar_members(file, shown(files, names[0])), 1), None)
    return first is not None and bool(CLASS_TAR.fullmatch(first.name) or VAL_PICTURE.fullmatch(first.name))


def webdataset(files: SourceFiles, found: Found) -> Iterator[SourceRecord]:
    """Records of WebDataset shards: members that share all up to the first dot are one record."""
    for name in tar_names(files, found.settings.split):
        place = files.look(name) or FoundFile(name)
        with files.open(name) as file:
            groups = _groups(file, shown(files, name), found)
        stem = name.rpartition(".")[0] or name
        for prefix, group in groups.items():
            # A prefix is no path: it often starts again in every tar, so the tar's name stands before it.
            if record := _tar_record(f"{stem}/{prefix}", place, group):
                yield record


def imagenet(files: SourceFiles, found: Found) -> Iterator[SourceRecord]:
    """Records of ILSVRC2012_img_train.tar, of a folder of its class tars, or of ILSVRC2012_img_val.tar.

    The key is the path that unpacking would give, the label the position of the sorted wnid, in the order of an image
    folder. A class tar that is damaged is one reject, beside what stands before the damage.
    """
    names = tar_names(files, found.settings.split)
    if names and all(CLASS_TAR.fullmatch(name) for name in names):
        tars = [(_wnid(name), name, 0, None) for name in names]
    else:
        with files.open(names[0]) as file:
            members = list(islice(tar_members(file, shown(files, names[0])), 1))
            if members and VAL_PICTURE.fullmatch(members[0].name):
                yield from _validation(files, names[0], found)
                return
            inner = [m for m in tar_members(file, shown(files, names[0])) if CLASS_TAR.fullmatch(m.name)]
        tars = [(_wnid(m.name), names[0], m.offset, m) for m in inner]
    for wnid, name, start, member in sorted(tars, key=lambda tar: tar[0]):
        yield from _class_tar(files, name, wnid, start, member, found)


def _wnid(name: str) -> str:
    match = CLASS_TAR.fullmatch(name)
    assert match, "only the names of class tars come here"
    return match[1]


def _class_tar(
    files: SourceFiles, name: str, wnid: str, start: int, member: TarMember | None, found: Found
) -> Iterator[SourceRecord]:
    place, problem, pictures = files.look(name) or FoundFile(name), None, []
    label = found.label(wnid)
    try:
        if member and member.problem:
            raise SourceError(member.problem)
        with files.open(name) as file:
            stop = start + member.size if member else None
            for inner in tar_members(file, shown(files, name), start=start, stop=stop):
                if is_picture(inner.name):
                    pictures.append(inner)
                else:
                    found.ignored.file(inner.name)
    except SourceError as error:  # the rest of the classes is whole
        problem = ("unreadable", f"class tar '{wnid}.tar': {error}")
    for inner in sorted(pictures, key=lambda one: one.name.rpartition("/")[2]):
        yield _picture(f"{wnid}/{inner.name.rpartition('/')[2]}", place, inner, label)
    if problem:
        yield SourceRecord(f"{wnid}.tar", name, start, member.size if member else 0, place.mtime_ns, problem=problem)


def _validation(files: SourceFiles, name: str, found: Found) -> Iterator[SourceRecord]:
    wnids = _validation_labels(files)
    for wnid in sorted(set(wnids)):
        found.label(wnid)
    place, pictures = files.look(name) or FoundFile(name), []
    with files.open(name) as file:
        for member in tar_members(file, shown(files, name)):
            match = VAL_PICTURE.fullmatch(member.name)
            if match:
                pictures.append((int(match[1]), member))
            else:
                found.ignored.file(member.name)
    for number, member in sorted(pictures, key=lambda one: one[0]):
        key = member.name.rpartition("/")[2]
        if wnids and not 1 <= number <= len(wnids):
            yield _picture(key, place, member, -1, ("bad_metadata", f"'{VAL_LABELS}' has no line {number}"))
        else:
            yield _picture(key, place, member, found.label(wnids[number - 1]) if wnids else -1)


def _validation_labels(files: SourceFiles) -> list[str]:
    """Wnid of each picture, from the file beside the tar; none without it."""
    labels = files.look(VAL_LABELS)
    if labels is None:
        return []
    if labels.problem or labels.num_bytes > MAX_LABELS_BYTES:
        raise SourceError(f"source '{files.name}': '{VAL_LABELS}' is no file of wnids. Restore or remove it.")
    with files.open(VAL_LABELS) as file:
        wnids = file.read(MAX_LABELS_BYTES).decode("ascii", "replace").split()
    if wrong := next((wnid for wnid in wnids if not re.fullmatch(r"n\d{8}", wnid)), None):
        raise SourceError(f"source '{files.name}': '{VAL_LABELS}' says {wrong[:40]!r}; needed wnids as n01440764.")
    return wnids


def _picture(
    name: str, place: FoundFile, member: TarMember, label: int, problem: tuple[str, str] | None = None
) -> SourceRecord:
    key, unusable = usable_key(name)
    if member.problem:
        problem = ("bad_metadata", member.problem)
    problem = unusable or problem
    return SourceRecord(key, place.path, member.offset, member.size, place.mtime_ns, label, problem=problem)


@dataclass
class _TarRecord:
    """The members of one key, as they come."""

    images: dict[str, TarMember] = field(default_factory=dict)
    texts: dict[str, bytes] = field(default_factory=dict)
    problem: str = ""


def _groups(file: BinaryIO, tar: str, found: Found) -> dict[str, _TarRecord]:
    from webdataset.tariterators import base_plus_ext  # it loads torch, which other kinds of sources do without

    groups: dict[str, _TarRecord] = {}
    for member in tar_members(file, tar):
        prefix, extension = base_plus_ext(member.name) if len(member.name) <= MAX_TAR_NAME else ("", "")
        extension = (extension or "").lower()
        is_image = is_picture(f"picture.{extension}")
        if not prefix or not (is_image or extension in TEXT_EXTENSIONS):
            found.ignored.file(member.name)  # never opened, whatever it is
            continue
        group = groups.setdefault(prefix, _TarRecord())
        if extension in (group.images if is_image else group.texts):
            group.problem = f"the key has more than one .{extension[:40]}"
        elif is_image:
            if len(group.images) < 2:  # two are one too many already
                group.images[extension] = member
        elif member.problem:
            group.problem = f".{extension} is {member.problem}"
        elif member.size > MAX_TEXT_BYTES:
            group.problem = f".{extension} has {member.size} bytes, at most {MAX_TEXT_BYTES} are read"
        else:
            file.seek(member.offset)
            group.texts[extension] = file.read(member.size)
    return groups


def _tar_record(key: str, place: FoundFile, group: _TarRecord) -> SourceRecord | None:
    """The record of one key; None where it has no picture."""

    if not group.images:
        return None
    key, problem = usable_key(key)
    image = next(iter(group.images.values()))
    label, captions = -1, ()
    try:
        label, captions = _tar_texts(group.texts)
    except (ValueError, TypeError, RecursionError) as error:
        problem = problem or ("bad_metadata", str(error))
    if len(group.images) > 1:
        problem = ("bad_metadata", f"several pictures for one key: {', '.join(e[:40] for e in group.images)}")
    if group.problem:
        problem = ("bad_metadata", group.problem)
    if image.problem:
        problem = ("bad_metadata", image.problem)
    return SourceRecord(key, place.path, image.offset, image.size, place.mtime_ns, label, captions, problem)


def _tar_texts(members: dict[str, bytes]) -> tuple[int, tuple[str, ...]]:
    """Label and captions of a record: ``.cls`` and ``.txt``, else what ``.json`` says."""
    row = json_row(members["json"]) if "json" in members else {}
    label = label_of({"label": int(members["cls"])} if "cls" in members else row)
    captions = captions_of({"text": members["txt"].decode("utf-8")} if "txt" in members else row)
    return label, captions
