"""Finds a class by its name, its folder or its number, and describes it.

A store names its classes as its source does: by folder, wnid or number (``StoreSpec.classes``). It may also have
display names (``StoreSpec.class_names``). Those of ImageNet's 1000 classes are included.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from importlib import resources
from numbers import Integral

from ...errors import RecipeError
from ..disk.cached import cached_property

NUM_SHOWN = 8  # labels or classes that an error lists


class ClassNames:
    """The classes of a store or of a trained model.

    Args:
      classes: as the source names them, in order of their labels; None without classes.
      names: display names of the classes; None: ImageNet's if all classes are its wnids, else the classes themselves.
    """

    def __init__(self, classes: Sequence[str] | None, names: Sequence[str] | None = None) -> None:
        self.classes = list(classes or ())
        shipped = imagenet_names()
        if names is None and self.classes and all(name in shipped for name in self.classes):
            names = [shipped[name] for name in self.classes]
        self.names = list(names) if names is not None else self.classes

    def __len__(self) -> int:
        return len(self.classes)

    def find(self, wanted: str | int, *, num_labels: int = 0) -> int:
        """Label of a class by its number, its folder (or wnid), or its name.

        Looks for the class as the source names it, then for a name, then for a number. Case, "_" and "-" are ignored in
        names; each part of "tench, Tinca tinca" is a name, and "crane" also finds "crane (bird)".

        Args:
          wanted: 0, "0", "n01440764" or "tench".
          num_labels: of a model, if it may have more labels than there are classes.
        Raises: RecipeError: no class, with the nearest name; or several, which are listed.
        """
        if isinstance(wanted, str):
            if wanted in self._labels_of_classes:
                return self._labels_of_classes[wanted]
            for labels_of in self._labels_of_names:
                labels = labels_of.get(_normalised(wanted), [])
                if len(labels) > 1:
                    some = "; ".join(f"{label} is {self.describe(label)}" for label in labels[:NUM_SHOWN])
                    raise RecipeError(f"class {wanted!r}: {len(labels)} classes have this name: {some}. Use a number.")
                if labels:
                    return labels[0]
            is_number = bool(re.fullmatch(r"[0-9]{1,9}", wanted))
        else:
            is_number = isinstance(wanted, Integral) and not isinstance(wanted, bool)
        if is_number and 0 <= int(wanted) < max(len(self), num_labels):
            return int(wanted)
        raise RecipeError(f"no class {wanted!r}.{self._nearest(str(wanted))} There are {self._counted()}.")

    def describe(self, label: int) -> str:
        """Display name of a label: "tench (n01440764)", or the class alone if it has no other name."""
        if not 0 <= label < len(self):
            return str(label)
        name, class_ = self.names[label], self.classes[label]
        return name if name == class_ else f"{name} ({class_})"

    def summary(self) -> str:
        """The number of classes, the first and the last: "1000: tench (n01440764) ... toilet tissue (n15075141)"."""
        if not len(self):
            return "none"
        ends = [self.describe(0)] if len(self) == 1 else [self.describe(0), self.describe(len(self) - 1)]
        return f"{len(self)}: {' ... '.join(ends)}"

    @cached_property
    def _labels_of_classes(self) -> dict[str, int]:
        return {name: label for label, name in reversed(list(enumerate(self.classes)))}

    @cached_property
    def _labels_of_names(self) -> list[dict[str, list[int]]]:
        """Labels of each name: whole names first, then their parts."""
        whole, parts = defaultdict(list), defaultdict(list)
        for label, name in enumerate(self.names):
            whole[_normalised(name)].append(label)
            for part in dict.fromkeys(_parts(name)):
                parts[part].append(label)
        return [whole, parts]

    def _nearest(self, wanted: str) -> str:
        known = {name.casefold(): name for name in [*self.classes, *self.names]}
        known |= {part: self.names[labels[0]] for part, labels in self._labels_of_names[1].items()}
        near = difflib.get_close_matches(wanted.casefold(), known, n=1)
        return f" Did you mean '{known[near[0]]}'?" if near else ""

    def _counted(self) -> str:
        """The number of classes, with their names if they are few."""
        if not len(self):
            return "no classes"
        counted = f"{len(self)} classes, 0 to {len(self) - 1}"
        if len(self) > NUM_SHOWN or self.classes == [str(label) for label in range(len(self))]:
            return counted
        return f"{counted}: {', '.join(self.describe(label) for label in range(len(self)))}"


@functools.cache
def imagenet_names() -> dict[str, str]:
    """Name of each of the 1000 classes of ImageNet (ILSVRC 2012) by its wnid, in order of their labels."""
    text = resources.files(__package__ or "").joinpath("imagenet_classes.tsv").read_text(encoding="utf-8")
    return dict(line.split("\t") for line in text.splitlines())


def _normalised(name: str) -> str:
    return " ".join(re.sub(r"[_-]", " ", name.casefold()).split())


def _parts(name: str) -> Iterable[str]:
    return filter(None, (_normalised(re.sub(r"\(.*?\)", "", part)) for part in name.split(",")))
