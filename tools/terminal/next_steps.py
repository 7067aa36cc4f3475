"""The last lines of a command that makes something: what is most worth running next."""

from __future__ import annotations

import shlex
import sys
import tomllib
from pathlib import Path

from ...datasets.recipe import shipped_recipes
from ...datasets.revisions.catalog import read_spec
from .text import is_quiet, printable

OF_THE_STORE = 0  # of model.channels


def print_next(*commands: list[object]) -> None:
    """Print commands on stderr, ready to paste, unless this one is quiet.

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


def after_store(store: Path, recipe: str) -> list[list[object]]:
    """What to run when a store is complete: look at it, and train on it.

    Args:
      recipe: that made it; a shipped one has a train recipe whose first line names it.
    """
    shipped = shipped_recipes("leandit.train")
    found = [one for one, text in shipped.items() if recipe == one or f"--store {recipe} " in text.partition("\n")[0]]
    if not found:
        return [["inspect", store], ["recipes"]]
    named = tomllib.loads(shipped[found[0]])["model"].get("channels", OF_THE_STORE)
    fits = named in (OF_THE_STORE, read_spec(store).latent.channels)  # else another VAE was set
    other_vae = [] if fits else ["--set", f"model.channels={OF_THE_STORE}"]
    return [["inspect", store], ["train", found[0], "--store", store, "--run", f"runs/{found[0]}", *other_vae]]


def after_run(run: Path) -> list[list[object]]:
    """What to run when a run is finished: draw with it, and look at its curves."""
    return [["sample", run, "--out", f"{run}-samples"], ["report", run, "--out", f"{run}.html"]]
