"""WebDataset shards: the members of a tar that share all up to the first dot are one record.

Nothing is unpacked: a record holds the place of its bytes in the tar. The plan keeps these places, which are the
index for random access; a tar is walked again only when its source is listed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

from ....datasets.errors import SourceError
from ..files.files import FoundFile, SourceFiles
from ..files.folders import Scan
from ..files.record import MAX_TEXT_BYTES, SourceRecord, is_image, usable_key
from ..files.splits import shard_names
from .members import TarMember, tar_members

MAX_NAME = 4096  # as long as a path can be
TEXT_EXTENSIONS = ("cls", "txt", "json")


def tar_names(files: SourceFiles, split: str) -> list[str]:
    """The tars of a source, in order; of one split, as in ``source.split``.

    Raises: SourceError: a name is not UTF-8; or several splits and none named.
    """
    names = shard_names(files, ".tar", split)
    for name in names:
        if usable_key(name)[1]:
            raise SourceError(f"source '{files.name}': the name of tar {name!r} is not UTF-8 or too long. Rename it.")
    return names


def webdataset(files: SourceFiles, scan: Scan) -> Iterator[SourceRecord]:
    """Records of WebDataset shards: members that are equal up to the first dot are one record."""
    for name in tar_names(files, scan.settings.split):
        place = files.look(name) or FoundFile(name)
        with files.open(name) as file:
            groups = _groups(file, files.shown(name), scan)
        stem = name.rpartition(".")[0] or name
        for prefix, group in groups.items():
            # A prefix is no path: it often starts again in every tar, so the tar's name stands before it.
            if record := _tar_record(f"{stem}/{prefix}", place, group, scan):
                yield record


@dataclass
class _TarRecord:
    """The members of one key so far."""

    images: dict[str, TarMember] = field(default_factory=dict)
    texts: dict[str, bytes] = field(default_factory=dict)
    problem: str = ""


def _groups(file: BinaryIO, tar: str, scan: Scan) -> dict[str, _TarRecord]:
    groups: dict[str, _TarRecord] = {}
    for member in tar_members(file, tar):
        folder, slash, name = member.name.rpartition("/")
        stem, _, extension = name.partition(".")
        prefix, extension = f"{folder}{slash}{stem}" if stem and len(member.name) <= MAX_NAME else "", extension.lower()
        has_pixels = is_image(f"image.{extension}")
        if not prefix or not (has_pixels or extension in TEXT_EXTENSIONS):
            scan.ignored.file(member.name)  # never opened, whatever it is
            continue
        group = groups.setdefault(prefix, _TarRecord())
        if extension in (group.images if has_pixels else group.texts):
            group.problem = f"the key has more than one .{extension[:40]}"
        elif has_pixels:
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


def _tar_record(key: str, place: FoundFile, group: _TarRecord, scan: Scan) -> SourceRecord | None:
    """The record of one key; None without an image."""

    if not group.images:
        return None
    key, problem = usable_key(key)
    image = next(iter(group.images.values()))
    label, captions = -1, ()
    try:
        label, captions = scan.texts.read(group.texts)
    except (ValueError, TypeError, RecursionError) as error:
        problem = problem or ("bad_metadata", str(error))
    if len(group.images) > 1:
        problem = ("bad_metadata", f"several images for one key: {', '.join(e[:40] for e in group.images)}")
    if group.problem:
        problem = ("bad_metadata", group.problem)
    if image.problem:
        problem = ("bad_metadata", image.problem)
    return SourceRecord(key, place.path, image.offset, image.size, place.mtime_ns, label, captions, problem)
