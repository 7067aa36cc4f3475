"""The last lines of a command that makes something: the commands to run next."""

from __future__ import annotations

import contextlib
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ...datasets.errors import RecipeError
from .text import is_quiet, printable

if TYPE_CHECKING:  # pyarrow and pydantic's models take half of a second
    from ...datasets.format.schema import StoreSpec
    from ...train.config import TrainRecipe

OF_THE_STORE = 0  # of model.channels


def print_next(*commands: list[object]) -> None:
    """Print commands on stderr, ready to paste, unless the command is quiet.

    Args:
      commands: the words after "leandit" of each; placeholders in capitals are for the user to fill in.
    """
    if is_quiet():
        return
    sys.stdout.flush()  # so that they come last
    for words in commands:
        print(f"next: leandit {printable(shlex.join(map(str, words)))}", file=sys.stderr, flush=True)


def command_without(*flags: str) -> list[object]:
    """The words of this command, without some flags."""
    return [word for word in sys.argv[1:] if word not in flags]


def after_store(store: Path, recipe: str = "") -> list[list[object]]:
    """What to run when a store is complete: look at it, and train on it.

    Args:
      recipe: name or path of the precompute recipe that made it. Of the train recipes that fit the store, those that
        its ``about.trains`` names come first, then the shipped ones for the resolution of the store.
    """
    from ...datasets.recipe import about_recipe, shipped_recipes
    from ...datasets.revisions.catalog import read_spec, sealed_revisions
    from ...train.config import load

    spec = read_spec(store, max(sealed_revisions(store), default=1))
    recipes = list[str]()
    with contextlib.suppress(RecipeError):  # an import has none, and a file may have changed meanwhile
        recipes += about_recipe(recipe, package="leandit.precompute").trains
    shipped = shipped_recipes("leandit.train")
    recipes += [name for name in shipped if name.endswith(f"-{spec.images.resolution_px}")]
    for settings in ([], [f"model.channels={OF_THE_STORE}"]):  # the latter of a store with another VAE
        for name in recipes:
            with contextlib.suppress(RecipeError):  # the user's own may name what is gone
                if _fits(load(name, settings), spec):
                    changes = [word for setting in settings for word in ("--set", setting)]
                    run = f"runs/{Path(name).name.removesuffix('.toml')}"
                    return [["inspect", store], ["train", name, "--store", store, "--run", run, *changes]]
    return [["inspect", store], ["recipes"]]


def _fits(recipe: TrainRecipe, store: StoreSpec) -> bool:
    """Whether a recipe trains on a store, as far as that is known without torch; the trainer checks all of it."""
    from ...train.models.diffusers.families import TEXT_ROLES, family_of

    family = family_of(recipe.model.name)
    if not recipe.takes_captions:
        has_inputs = 0 < len(store.classes or ()) <= (recipe.model.num_classes or sys.maxsize)
    elif family and (roles := TEXT_ROLES.get(family)):
        has_inputs = len(store.text_encoders) == len(roles)
    else:
        has_inputs = store.text is not None and store.text.has_tokens
    has_features = recipe.align.keys() <= {feature.name for feature in store.features}
    return has_inputs and has_features and recipe.model.channels in (OF_THE_STORE, store.latent.channels)


def after_run(run: Path) -> list[list[object]]:
    """What to run when a run is finished: draw with it, and look at its curves."""
    return [sample_with(run), ["report", run, "--out", f"{run}.html"]]


def sample_with(run: Path) -> list[object]:
    """The command that draws with a run; one that was trained without a null condition cannot be guided."""
    from ...datasets.disk.hashing import read_json
    from ...train.weights.folders import SNAPSHOT, STATE, find

    snapshots = find(SNAPSHOT, run)
    state = read_json(snapshots[-1] / STATE) if snapshots else None
    unguided = isinstance(state, dict) and state.get("drop") == 0
    return ["sample", run, "--out", f"{run}-samples", *(["--guidance", 1] if unguided else [])]
