"""Which keys of [source] each kind of source reads: a key that a kind does not read is refused, never ignored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...errors import SourceError
from ..config import SourceSection

COCO = "coco"  # a manifest that is a list of COCO's captions, whose columns have fixed names
IMAGE = "source.image"
CAPTION = "source.caption"
LABEL = "source.label"
ROOT = "source.root"
SIZES = 'source.sizes "manifest"'
TEXT_FILE = "source.text_file"
WNID = 'source.labels "wnid"'


class KindKeys(NamedTuple):
    """What a kind of source is, and the keys that it reads besides those that every kind reads.

    Args:
      about: what such a source is.
      keys: of [source], with the value that not every kind takes.
    """

    about: str
    keys: frozenset[str]


def _keys(about: str, *keys: str) -> KindKeys:
    return KindKeys(about, frozenset(keys))


# Every kind reads kind, split, labels = "none", class_names, check, missing_caption and the limits of rejects.
KINDS = {
    "metadata": _keys("a table that names images", IMAGE, CAPTION, LABEL, ROOT, SIZES),
    "manifest": _keys("a table that names images", IMAGE, CAPTION, LABEL, ROOT, SIZES),
    COCO: _keys("COCO's captions", ROOT, SIZES),
    "parquet": _keys("a table with images", IMAGE, CAPTION, LABEL),
    "arrow": _keys("a table with images", IMAGE, CAPTION, LABEL),
    "webdataset": _keys("tars of images and texts", IMAGE, CAPTION, LABEL, TEXT_FILE),
    "sidecars": _keys("images with texts beside", CAPTION, LABEL, TEXT_FILE),
    "imagefolder": _keys("a folder of images", WNID),
    "imagenet": _keys("tars of classes"),
}


def check_keys(where: str, kind: str, settings: SourceSection, notes: Sequence[str] = ()) -> None:
    """Raise if a recipe sets a key that a kind of source does not read.

    Args:
      where: the source.
      kind: a key of KINDS.
      notes: on how the kind was chosen.
    Raises: SourceError.
    """
    is_set = {
        IMAGE: bool(settings.image),
        CAPTION: bool(settings.caption),
        LABEL: bool(settings.label),
        ROOT: bool(settings.root),
        SIZES: settings.sizes == "manifest",
        TEXT_FILE: settings.text_file != "auto",
        WNID: settings.labels == "wnid",
    }
    unread = next((key for key, is_given in is_set.items() if is_given and key not in KINDS[kind].keys), None)
    if unread:
        readers = {name: about for name, (about, keys) in KINDS.items() if unread in keys}
        raise SourceError(
            f"source '{where}': {unread} is for {' or '.join(dict.fromkeys(readers.values()))}; this is {kind}, which "
            f"does not read it. The kinds that read it: {', '.join(readers)}. Leave it out, or name another kind with "
            f"--set source.kind=KIND.{''.join(f' ({note})' for note in notes)}"
        )
    if settings.label and settings.labels == "none":
        raise SourceError(
            f"source '{where}': source.label '{settings.label}' would have no effect, because source.labels is "
            '"none". Leave one of them out.'
        )
