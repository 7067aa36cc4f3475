"""``leandit recipes``: the recipes that ship with leandit."""

from __future__ import annotations

import difflib
from typing import Annotated, Any

import typer

from ....datasets.errors import RecipeError
from ...terminal.text import print_result
from ..options import AsJson, complete_recipe


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
    from ....datasets.recipe import STAGES, about_recipe, shipped_recipes

    shipped = [
        {"stage": stage, "name": recipe, "what": about_recipe(recipe, package=f"leandit.{stage}").summary, "text": text}
        for stage in STAGES
        for recipe, text in shipped_recipes(f"leandit.{stage}").items()
    ]
    if name is None:
        listed = [{key: recipe[key] for key in ("stage", "name", "what")} for recipe in shipped]
        print_result(listed, _rows, as_json=as_json)
        return
    named = [recipe for recipe in shipped if recipe["name"] == name]
    if not named:
        near = difflib.get_close_matches(name, [recipe["name"] for recipe in shipped], n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise RecipeError(f"recipe '{name}': no such recipe is shipped.{hint} 'leandit recipes' lists them.")
    print_result(named, lambda _: "\n".join(recipe["text"].rstrip() for recipe in named), as_json=as_json)


def _rows(shipped: Any) -> str:
    width, lines = max(len(recipe["name"]) for recipe in shipped), dict[str, list[str]]()
    for recipe in shipped:
        stage = lines.setdefault(recipe["stage"], [f"leandit {recipe['stage']} RECIPE"])
        stage.append(f"  {recipe['name']:<{width}}  {recipe['what']}")
    return "\n".join(line for stage in lines.values() for line in stage)
