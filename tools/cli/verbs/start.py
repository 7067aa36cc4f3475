"""What a newcomer runs first: ``leandit demo``, and ``leandit recipes`` to start one's own from."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

from ....errors import RecipeError
from ...terminal.outcome import print_next
from ...terminal.text import print_result
from ..options import AsJson, Overrides, complete_recipe, output


def demo(
    context: typer.Context,
    out: Annotated[Path, output("Folder for everything the demo makes.")] = Path("leandit-demo"),
    num_images: Annotated[int, Option("--images", min=24, help="Synthetic images to generate.")] = 3000,
    overrides: Overrides = None,
) -> None:
    """Run the full pipeline on synthetic images, on a CPU in minutes; measure whether samples match their captions.

    Example: leandit demo --out leandit-demo
    """
    from ...demo.demo import run_demo

    out.mkdir(parents=True, exist_ok=True)
    run_demo(out, num_images=num_images, overrides=overrides or [], stop=context.obj, say=print)
    caption = "a big red circle above a tiny blue square"
    print_next(
        ["view", out / "store"],
        ["sample", out / "run", "--out", out / "more", "--caption", caption],
        ["precompute", "imagenet-256", "--source", "IMAGENET/train", "--store", "imagenet-256", "--dry-run"],
    )


def recipes(
    name: Annotated[
        str | None,
        Argument(metavar="NAME", help="Print this recipe, with its comments.", autocompletion=complete_recipe),
    ] = None,
    keys: Annotated[
        Literal["precompute", "train", "import"] | None, Option(help="List all recipe keys of this command instead.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the shipped recipes, print one to start your own from, or list all recipe keys with their meaning.

    Example: leandit recipes pixart-256 > mine.toml
    """
    from ....recipe import STAGES, about_recipe, shipped_recipes

    if keys:
        from ..recipe_keys import recipe_keys

        print_result([key._asdict() for key in recipe_keys(keys)], _keys, as_json=as_json)
        return
    shipped = [
        {"stage": stage, "name": recipe, "what": about_recipe(recipe, package=f"leandit.{stage}").summary, "text": text}
        for stage in STAGES
        for recipe, text in shipped_recipes(f"leandit.{stage}").items()
    ]
    if name is None:
        listed = [{key: recipe[key] for key in ("stage", "name", "what")} for recipe in shipped]
        print_result(listed, _listing, as_json=as_json)
        return
    named = [recipe for recipe in shipped if recipe["name"] == name]
    if not named:
        near = difflib.get_close_matches(name, [recipe["name"] for recipe in shipped], n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise RecipeError(f"recipe '{name}': no such recipe is shipped.{hint} 'leandit recipes' lists them.")
    print_result(named, lambda _: "\n".join(recipe["text"].rstrip() for recipe in named), as_json=as_json)


def _keys(keys: Any) -> str:
    return "\n".join(f"{key['name']} = {key['default']}\n    {key['meaning']}" for key in keys)


def _listing(shipped: Any) -> str:
    width, lines = max(len(recipe["name"]) for recipe in shipped), dict[str, list[str]]()
    for recipe in shipped:
        stage = lines.setdefault(recipe["stage"], [f"leandit {recipe['stage']} RECIPE"])
        stage.append(f"  {recipe['name']:<{width}}  {recipe['what']}")
    return "\n".join(line for stage in lines.values() for line in stage)
