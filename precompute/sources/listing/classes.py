"""Display names of classes, from ``source.class_names``: ImageNet's, which are included, or a text file.

The file has one name a line, in order of the labels, or "CLASS<tab>NAME", where CLASS is the class as the source names
it, or its label.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ....datasets.format.class_names import imagenet_names
from ....errors import RecipeError, SourceError
from ..files.texts import split_lines

IMAGENET = "imagenet"
MAX_BYTES = 64 << 20
MAX_NAME_CHARS = 1000
NUM_SHOWN = 3


def read_class_names(asked: str) -> dict[str, str]:
    """Display names by class or label, of the file or name in ``source.class_names``.

    Raises: RecipeError: missing, or not a file of class names.
    """
    if asked == IMAGENET:
        names = imagenet_names()
        return names | {str(label): name for label, name in enumerate(names.values())}
    path, names = Path(asked), dict[str, str]()
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES >> 20} MiB")
        lines = [line.strip() for line in split_lines(path.read_text(encoding="utf-8-sig"))]
        lines = [line for line in lines if line]
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RecipeError(
            f"source.class_names '{asked}': {reason}. Expected \"imagenet\", or a text file of names."
        ) from error
    for label, line in enumerate(lines):
        key, tab, name = line.rpartition("\t")
        if not name or len(line) > MAX_NAME_CHARS:
            raise RecipeError(
                f"source.class_names '{asked}': line {label + 1} is {line[:40]!r}; expected a name of at most "
                f"{MAX_NAME_CHARS} characters."
            )
        names[key.strip() if tab else str(label)] = name.strip()
    if not names:
        raise RecipeError(f"source.class_names '{asked}': it names nothing. Expected a name for each class.")
    return names


def names_of_classes(asked: str, names: Mapping[str, str], classes: Sequence[str] | None) -> list[str]:
    """A name for each class of a source.

    Args:
      asked: of the recipe, for messages.
      names: from ``read_class_names``.
      classes: as the source names them, in order of their labels.
    Raises: SourceError: the source has no classes, or some of them have no name.
    """
    if not classes:
        raise SourceError(f"source.class_names '{asked}': the source has no classes to name. Leave it out.")
    known = set(classes)
    if asked == IMAGENET:  # its labels mean nothing for classes with other names
        names = {key: name for key, name in names.items() if key in known}
    display_names = [names.get(name, names.get(str(label), "")) for label, name in enumerate(classes)]
    missing = [name for name, display_name in zip(classes, display_names, strict=True) if not display_name]
    if missing:
        more = f" and {len(missing) - NUM_SHOWN} more" if len(missing) > NUM_SHOWN else ""
        raise SourceError(
            f"source.class_names '{asked}': no name for {len(missing)} of {len(classes)} classes: "
            f"{', '.join(missing[:NUM_SHOWN])}{more}. Add them to the file."
        )
    return display_names
