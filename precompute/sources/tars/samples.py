"""The samples of a WebDataset tar: which members belong together, and which of their images is the record's own.

WebDataset ends the key of a member at the first dot of its base name: ``a.seg.png`` is the field ``seg.png`` of ``a``.
Names with dots of their own, such as ``IMG 2021.05.03.jpg``, need the last dot. Both are tried, and the one that leaves
fewer images without a record or a text is taken for the whole tar, which depends on nothing but its names.
"""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ..files.beside import ENDING, IMAGE_FOLDERS, MASKS
from ..files.further import SEPARATORS
from ..files.record import is_image
from .members import TarMember

Dot = Literal["first", "last"]
"""The dot of a base name at which the key of a member ends."""

MAX_FIELD_CHARS = 40  # in a message
MAX_SHOWN = 6


class Part(NamedTuple):
    """A member of a tar that may belong to a sample.

    Args:
      member: its name and place.
      text: content of a text; None for an image.
      problem: why a text cannot be read.
    """

    member: TarMember
    text: bytes | None = None
    problem: str = ""


@dataclass
class Sample:
    """The members of one key, by field in lower case.

    Args:
      key: name of the members up to the dot.
      images, texts: members with the extension of an image, and texts.
      repeated: a field that occurs twice.
    """

    key: str
    images: dict[str, Part] = field(default_factory=dict)
    texts: dict[str, Part] = field(default_factory=dict)
    repeated: str = ""

    def has_text(self, text_fields: frozenset[str]) -> bool:
        """Whether it has one of the fields that are read."""
        return any(self.texts_of(image, text_fields) for image in self.images) or not text_fields.isdisjoint(self.texts)

    def texts_of(self, image: str, text_fields: frozenset[str]) -> dict[str, Part]:
        """The texts of one of its images, by field: ``a.jpg.txt`` is that of ``a.jpg`` alone, else ``a.txt`` is.

        Args:
          image: field of the image.
          text_fields: fields of texts that are read, in lower case.
        """
        own = {name: self.texts.get(f"{image}.{name}", self.texts.get(name)) for name in sorted(text_fields)}
        return {name: part for name, part in own.items() if part}


class Chosen(NamedTuple):
    """What a sample gives.

    Args:
      image: field of the record's own image; empty with a problem.
      companions: field of each companion, in the order of the recipe.
      left_out: fields of further images.
      problem: why the sample is no record, as a reason and a detail.
    """

    image: str
    companions: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    problem: tuple[str, str] | None = None


def split_name(name: str, dot: Dot) -> tuple[str, str]:
    """Key and field of the name of a member; the key is empty if there is none, as of a hidden file."""
    folder, base = posixpath.split(name)
    stem, _, extension = base.partition(".") if dot == "first" else base.rpartition(".")
    return (posixpath.join(folder, stem) if stem else ""), extension.lower()


def group_parts(parts: Sequence[Part], dot: Dot, text_fields: frozenset[str]) -> list[Sample]:
    """Samples of the members of a tar, in the order of their first members.

    Args:
      text_fields: fields of texts that are read, in lower case.
    """
    samples: dict[str, Sample] = {}
    for part in parts:
        key, name = split_name(part.member.name, dot)
        sample = samples.setdefault(key, Sample(key))
        fields = sample.images if part.text is None and not part.problem else sample.texts
        if name in fields:
            sample.repeated = name
        fields[name] = part
    if dot == "last":
        _join_texts(samples)
    _join_masks(samples)
    if dot == "last":
        _join_parts(samples, text_fields)
    return list(samples.values())


def _join_texts(samples: dict[str, Sample]) -> None:
    """Make ``IMG 1.5.jpg.txt`` the field ``jpg.txt`` of ``IMG 1.5``, as it is at the first dot of other names."""
    for key in list(samples):
        whole, _, image = key.rpartition(".")
        sample, owner = samples[key], samples.get(whole)
        if owner and image.lower() in owner.images and not sample.images and not sample.repeated:
            owner.texts |= {f"{image.lower()}.{name}": part for name, part in sample.texts.items()}
            del samples[key]


def _join_masks(samples: dict[str, Sample]) -> None:
    """Make ``a-masklabel.png`` the field ``masklabel.png`` of ``a``, and ``masks/a.png`` its field ``masks.png``."""
    folders = {folder for key in samples for folder in key.split("/")[:-1]}
    image_folders = sorted(folder for folder in folders if folder.lower() in IMAGE_FOLDERS)
    for key in list(samples):
        name, owners = _possible_owners(key, image_folders)
        owner = next((samples[whole] for whole in owners if whole in samples and samples[whole].images), None)
        sample = samples[key]
        if owner and not sample.texts and not sample.repeated:
            _move_images(samples, sample, owner, name)


def _move_images(samples: dict[str, Sample], sample: Sample, owner: Sample, name: str) -> None:
    """Make the images of a sample fields of another, unless it has such a field."""
    images = {f"{name}.{extension}": part for extension, part in sample.images.items()}
    if images.keys().isdisjoint(owner.images):
        owner.images |= images
        del samples[sample.key]


def _possible_owners(key: str, image_folders: Sequence[str]) -> tuple[str, list[str]]:
    """The field that the image of a key would be, and the keys whose field it would be, as ``beside.py`` has it.

    Args:
      image_folders: names of folders of the tar that are usual for images.
    """
    folder, base = posixpath.split(key)
    ending = ENDING.fullmatch(base)
    parts = folder.split("/")
    depth = next((depth for depth, part in enumerate(parts) if MASKS.fullmatch(part)), None)
    if depth is not None:
        middles = [[], *([name] for name in image_folders)]
        bases = [base, ending[1]] if ending else [base]  # images of such a folder may have the ending as well
        owners = [
            "/".join([*parts[:depth], *middle, *parts[depth + 1 :], base]) for base in bases for middle in middles
        ]
        return parts[depth].lower(), owners
    if ending:
        return ending[2].lstrip(SEPARATORS).lower(), [posixpath.join(folder, ending[1])]
    return "", []


def _join_parts(samples: dict[str, Sample], text_fields: frozenset[str]) -> None:
    """Make ``IMG 1.5.seg.png`` a field of ``IMG 1.5``: an image without a text beside an image with one."""
    for key in list(samples):
        whole, dot, name = key.rpartition(".")
        sample, owner = samples[key], samples.get(whole)
        is_whole = owner is not None and owner.images and owner.has_text(text_fields)
        if dot and owner and is_whole and not sample.texts and not sample.repeated:
            _move_images(samples, sample, owner, name.lower())


def choose_image(sample: Sample, image: str, companions: Mapping[str, str]) -> Chosen:
    """Choose the record's own image among those of a sample, and its companions.

    Args:
      image: the field that the recipe names; empty: the only image, or the only one whose field has no dot.
      companions: field of each companion by name, with or without its extension.
    """
    beside = {name: find_field(sample.images, asked) for name, asked in companions.items()}
    others = [name for name in sample.images if name not in beside.values()]
    if image:
        named = find_field(sample.images, image)
        candidates = [named] if named else []
    else:
        candidates = [name for name in others if "." not in name] or others
    if sample.repeated:
        return Chosen("", problem=("bad_metadata", f"the key has more than one .{sample.repeated[:MAX_FIELD_CHARS]}"))
    if len(candidates) != 1:
        return Chosen("", problem=("bad_metadata", _why_none(sample, image, candidates)))
    missing = next((name for name, companion in beside.items() if not companion), None)
    if missing:
        detail = f"companion '{missing}': the key has no field '{companions[missing]}'; its images are {_shown(others)}"
        return Chosen("", problem=("missing_file", detail))
    left_out = tuple(name for name in others if name != candidates[0])
    return Chosen(candidates[0], tuple(beside.values()), left_out)


def find_field(images: Collection[str], asked: str) -> str:
    """The field of an image by its name, with or without the extension; empty if there is none, or several.

    Args:
      asked: of the recipe; a separator before it, as in the ending "-masklabel" of names in folders, does not count.
    """
    asked = asked.lower().lstrip(SEPARATORS)
    if asked in images:
        return asked
    same = [name for name in images if name.rpartition(".")[0] == asked]
    return same[0] if len(same) == 1 else ""


def _why_none(sample: Sample, image: str, candidates: Sequence[str]) -> str:
    if image:
        return f"the key has no image '{image}' (source.image), only {_shown(sample.images)}"
    rule = "a key ends at the first dot of a name, or at the last if that fits the tar better"
    return (
        f"several images for one key: {_shown(candidates)}; {rule}. Choose one with --set source.image="
        f"{next(iter(candidates))}"
    )


def _shown(fields: Sequence[str] | Mapping[str, Part]) -> str:
    names = [name[:MAX_FIELD_CHARS] for name in fields]
    if len(names) > MAX_SHOWN:
        names = [*names[:MAX_SHOWN], "..."]
    return ", ".join(names) or "none"


def choose_dot(
    parts: Sequence[Part], image: str, companions: Mapping[str, str], text_fields: frozenset[str]
) -> tuple[Dot, bool]:
    """The dot at which the keys of a tar end: that with fewer images that are no record or have no text.

    Of equals it is the first, WebDataset's own.

    Args:
      parts, image, companions, text_fields: as for the functions above.
    Returns: the dot, and whether some name has several.
    """
    if not any(posixpath.basename(part.member.name).count(".") > 1 for part in parts):
        return "first", False
    has_texts = any(part.text is not None for part in parts)
    num_lost: dict[Dot, int] = {"first": 0, "last": 0}
    for dot in num_lost:
        for sample in group_parts(parts, dot, text_fields):
            if sample.images and choose_image(sample, image, companions).problem:
                num_lost[dot] += len(sample.images)
            elif sample.images and has_texts and not sample.has_text(text_fields):
                num_lost[dot] += 1
    return ("last" if num_lost["last"] < num_lost["first"] else "first"), True


def may_be_part(name: str, text_fields: frozenset[str]) -> bool:
    """Whether a member is an image or one of the texts that are read, by its name."""
    base = posixpath.basename(name)
    is_hidden = base.startswith(".")
    return not is_hidden and (is_image(base) or base.rpartition(".")[2].lower() in text_fields)
