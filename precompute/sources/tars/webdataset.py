"""WebDataset shards: the members of a tar that share a key are one record (``samples.py``).

Nothing is unpacked: a record holds the place of its bytes in the tar. The plan keeps these places, which are the
index for random access; a tar is walked again only when its source is listed again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import BinaryIO

from ....errors import SourceError
from ....units import plural
from ..files.files import FoundFile, SourceFiles
from ..files.folders import Scan
from ..files.record import MAX_TEXT_BYTES, Place, SourceRecord, is_image, usable_key
from ..files.splits import shard_names
from .members import TarMember, tar_members
from .samples import Dot, Part, Sample, choose_dot, choose_image, find_field, group_parts, may_be_part

MAX_NAME = 4096  # as long as a path can be
MAX_COUNTED_FIELDS = 1000  # of images
MAX_SHOWN_FIELDS = 10
TEXT_FIELDS = ("cls", "caption", "txt", "json")


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
    """Records of WebDataset shards: one for each key with an image.

    Every image is a record, a reject, or a further image of its key, which is counted and offered as a companion.
    """
    text_fields = frozenset(name.lower() for name in (*TEXT_FIELDS, scan.settings.caption, scan.settings.label) if name)
    dots: Counter[Dot] = Counter()  # of the tars that have names of several dots
    image_fields: Counter[str] = Counter()
    for name in tar_names(files, scan.settings.split):
        place = files.look(name) or FoundFile(name)
        with files.open(name) as file:
            parts = list(_parts(file, files.shown(name), text_fields, scan))
        dot, is_choice = choose_dot(parts, scan.settings.image, scan.companions, text_fields)
        if is_choice:
            dots[dot] += 1
        stem = name.rpartition(".")[0] or name
        for sample in group_parts(parts, dot, text_fields):
            image_fields.update(name for name in sample.images if len(image_fields) < MAX_COUNTED_FIELDS)
            # A key is no path: it often starts again in every tar, so the tar's name stands before it.
            yield from _records(sample, stem, place, text_fields, scan)
    _check_named_fields(files.name, image_fields, scan)
    _add_notes(scan, dots)


def _parts(file: BinaryIO, tar: str, text_fields: frozenset[str], scan: Scan) -> Iterator[Part]:
    """Images and texts of a tar; other members are never opened, whatever they are."""
    for member in tar_members(file, tar):
        name = member.name.rpartition("/")[2]
        if name.startswith(".") and is_image(name):
            scan.ignored.hidden_file(name)
        elif len(member.name) > MAX_NAME or not may_be_part(member.name, text_fields):
            scan.ignored.file(member.name)
        elif is_image(member.name):
            yield Part(member)
        elif member.problem:
            yield Part(member, problem=f"is {member.problem}")
        elif member.size > MAX_TEXT_BYTES:
            yield Part(member, problem=f"has {member.size} bytes, at most {MAX_TEXT_BYTES} are read")
        else:
            file.seek(member.offset)
            yield Part(member, text=file.read(member.size))


def _records(
    sample: Sample, stem: str, place: FoundFile, text_fields: frozenset[str], scan: Scan
) -> Iterator[SourceRecord]:
    """The record of a sample, or a reject for each of its images; nothing without an image."""
    if not sample.images:
        for part in sample.texts.values():
            scan.ignored.file(part.member.name)
        return
    chosen = choose_image(sample, scan.settings.image, scan.companions)
    if chosen.problem:
        is_alone = len(sample.images) == 1
        for part in sample.images.values():
            key, unusable = usable_key(f"{stem}/{sample.key if is_alone else part.member.name}")
            yield _record(key, place, part.member, problem=unusable or chosen.problem)
        return
    scan.further.add_fields(chosen.left_out)
    texts: dict[str, bytes] = {}
    problem = None
    own_texts = sample.texts_of(chosen.image, text_fields)
    for part in sample.texts.values():
        if part not in own_texts.values():
            scan.ignored.file(part.member.name)
    for name, part in own_texts.items():
        if part.text is not None:
            if name == "json" or not scan.further.is_text_of_boxes(part.member.name, part.text):
                texts[name] = part.text
        elif name == "json" and _has_caption(own_texts):
            scan.further.add_unread_text(f"{part.member.name} {part.problem}")
        else:
            problem = ("bad_metadata", f".{name} {part.problem}")
    label, captions = -1, ()
    try:
        label, captions = scan.texts.read(texts)
    except (ValueError, TypeError, RecursionError) as error:
        problem = problem or ("bad_metadata", str(error))
    image = sample.images[chosen.image].member
    if image.problem:
        problem = ("bad_metadata", f"the image is {image.problem}")
    beside = [sample.images[name].member for name in chosen.companions]
    bad = next((member for member in beside if member.problem), None)
    if bad:
        problem = problem or ("bad_metadata", f"companion '{bad.name}' is {bad.problem}")
    key, unusable = usable_key(f"{stem}/{sample.key}")
    companions = tuple((place.path, member.offset, member.size, place.mtime_ns) for member in beside)
    yield _record(key, place, image, label=label, captions=captions, problem=unusable or problem, companions=companions)


def _has_caption(own_texts: Mapping[str, Part]) -> bool:
    """Whether a text beside the .json holds a caption."""
    texts = [own_texts[name].text or b"" for name in ("caption", "txt") if name in own_texts]
    return any(text.strip() for text in texts)


def _record(
    key: str,
    place: FoundFile,
    image: TarMember,
    *,
    label: int = -1,
    captions: tuple[str, ...] = (),
    problem: tuple[str, str] | None = None,
    companions: tuple[Place, ...] = (),
) -> SourceRecord:
    return SourceRecord(
        key,
        place.path,
        image.offset,
        image.size,
        place.mtime_ns,
        label=label,
        captions=captions,
        problem=problem,
        companions=companions,
    )


def _check_named_fields(where: str, image_fields: Counter[str], scan: Scan) -> None:
    """Raise if no key has an image of a field that the recipe names.

    Args:
      image_fields: number of images of each field.
    Raises: SourceError.
    """
    named = {"source.image": scan.settings.image} if scan.settings.image else {}
    named |= {f"companions.{name}.column": column for name, column in scan.companions.items()}
    for key, name in named.items():
        if image_fields and not any(find_field([each], name) for each in image_fields):
            fields = ", ".join(f"{each[:40]} ({count:,})" for each, count in image_fields.most_common(MAX_SHOWN_FIELDS))
            raise SourceError(
                f"source '{where}': {key} '{name}': no key of its tars has an image of this field. The fields of its "
                f"images are {fields}. A field is what follows the first dot of a name: a.seg.png is seg.png of a."
            )


def _add_notes(scan: Scan, dots: Counter[Dot]) -> None:
    """Say where keys end, if some names have several dots."""
    if dots:
        shares = [f"the {dot} in {plural(count, 'tar')}" for dot, count in sorted(dots.items())]
        scan.notes.append(
            f"keys of names with several dots end at one dot: {', '.join(shares)}, whichever gives more images a "
            "record and a text (first: WebDataset's rule, a.seg.png is field seg.png of a)"
        )
