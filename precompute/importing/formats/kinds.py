"""The kinds of features that can be imported, by name."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from ....datasets.errors import RecipeError, SourceError
from .classes import FastDit, Mar
from .edm2 import Edm2
from .lightningdit import LightningDit
from .mds import Mds
from .mlperf_flux import MlperfFlux
from .nemo import Nemo
from .pixart import PixArt
from .recipe import ImportRecipe, Kind
from .source import Reader

READERS: dict[str, type[Reader]] = {
    one.kind: one for one in (FastDit, LightningDit, Mar, Edm2, PixArt, Mds, MlperfFlux, Nemo)
}


def open_reader(kind: str, root: Path, recipe: ImportRecipe) -> Reader:
    """The reader of a kind of features.

    Raises: RecipeError: unknown kind; SourceError: the source does not match it.
    """
    if kind not in READERS:
        raise RecipeError(f"import '{kind}': no such kind of features. Needed one of {', '.join(get_args(Kind))}.")
    if not (root.is_dir() or (kind == "edm2" and root.is_file())):
        file = " a .zip, or" if kind == "edm2" else ""
        raise SourceError(f"source '{root}': not found. An import of '{kind}' needs{file} a folder; check --source.")
    return READERS[kind](root, recipe)
