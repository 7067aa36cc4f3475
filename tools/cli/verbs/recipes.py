"""``leandit recipes``: the recipes that ship with leandit."""

from __future__ import annotations

import difflib
import re
import textwrap
from typing import Annotated, Any

import typer

from ....datasets.errors import RecipeError
from ....datasets.recipe import STAGES, shipped_recipes
from ...terminal.text import print_result
from ..options import AsJson, complete_recipe

Shipped = list[dict[str, str]]
LEAST_CHARS, MOST_CHARS = 30, 100  # of the line on a recipe


def recipes(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Print this recipe, with its comments.", autocompletion=complete_recipe),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the shipped recipes of both stages, or print one to start your own from.

    Example: leandit recipes pixart-256 > mine.toml
    """
    shipped = shipped_of_both()
    if name is None:
        print_result([{key: one[key] for key in ("stage", "name", "what")} for one in shipped], _rows, as_json=as_json)
        return
    found = [one for one in shipped if one["name"] == name]
    if not found:
        near = difflib.get_close_matches(name, [one["name"] for one in shipped], n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise RecipeError(f"recipe '{name}': none of that name is shipped.{hint} 'leandit recipes' lists them.")
    print_result(found, lambda _: "\n".join(one["text"].rstrip() for one in found), as_json=as_json)


def shipped_of_both() -> Shipped:
    """Stage, name, one line and text of every shipped recipe, stage by stage."""
    return [
        {"stage": stage, "name": name, "what": first_sentence(text), "text": text}
        for stage in STAGES
        for name, text in shipped_recipes(f"leandit.{stage}").items()
    ]


def first_sentence(text: str) -> str:
    """What a recipe is for: the beginning of its comment, after the line with its command."""
    comment = re.match(r"(?:#.*\n)*", text)
    about = (comment[0] if comment else "").partition("\n#\n")[2]
    words = " ".join(line.lstrip("# ") for line in about.splitlines())
    first = re.match(rf".{{{LEAST_CHARS},}}?(?=[.:](?: |$))", words)
    return textwrap.shorten(first[0] if first else words, MOST_CHARS, placeholder=" ...")


def _rows(shipped: Any) -> str:
    width = max(len(one["name"]) for one in shipped)
    lines = []
    for stage in STAGES:
        lines.append(f"leandit {stage} RECIPE")
        lines += [f"  {one['name']:<{width}}  {one['what']}" for one in shipped if one["stage"] == stage]
    return "\n".join(lines)
