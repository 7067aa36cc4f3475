"""Recipes: typed, frozen, every key explained, and an error that says which key was meant."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from making import Leandit
from pydantic import ValidationError

from leandit.errors import RecipeError
from leandit.precompute import config as precompute_config
from leandit.precompute.config import PrecomputeRecipe
from leandit.recipe import load_recipe, shipped_recipes, to_toml
from leandit.train import config as train_config
from leandit.train.config import TrainRecipe

STAGES = {"precompute": (precompute_config, PrecomputeRecipe), "train": (train_config, TrainRecipe)}
SHIPPED = [(stage, name) for stage in STAGES for name in shipped_recipes(f"leandit.{stage}")]


def load(stage: str, name: str, *overrides: str) -> Any:
    return STAGES[stage][0].load(name, list(overrides))


def test_the_shipped_recipes_are_those_that_users_call_by_name() -> None:
    # If a name goes, commands and scripts of users stop working: a CLI/RECIPE break.
    assert {name for stage, name in SHIPPED if stage == "precompute"} >= {
        *("demo", "imagenet-256", "imagenet-512", "pixart-256", "pixart-512", "pixart-1024"),
        *("sana-512", "sana-1024"),
    }
    assert {name for stage, name in SHIPPED if stage == "train"} >= {
        *("demo", "dit-s-2-256", "dit-b-2-256", "dit-l-2-256", "dit-xl-2-256", "dit-xl-2-512"),
        *("dit-xl-2-256-paper", "pixart-sigma-256", "pixart-sigma-512", "pixart-sigma-1024"),
        *("sana-600m-512", "sana-1600m-1024"),
    }


@pytest.mark.parametrize(("stage", "name"), SHIPPED)
def test_every_shipped_recipe_loads_and_survives_being_written_as_toml(stage: str, name: str, tmp_path: Path) -> None:
    recipe = load(stage, name)
    path = tmp_path / "resolved.toml"
    path.write_text(to_toml(recipe))
    assert load(stage, str(path)) == recipe
    assert to_toml(load(stage, str(path))) == to_toml(recipe)
    # Resolved: every key of every section is there, whatever the default of a later release.
    assert tomllib.loads(path.read_text()).keys() == recipe.model_dump().keys()
    assert tomllib.loads(path.read_text()) == recipe.model_dump(mode="json")


@pytest.mark.parametrize(
    ("stage", "override", "unknown", "nearest"),
    [
        ("train", "optimizer.lrr=1e-3", "optimizer.lrr", "optimizer.lr"),
        ("train", "steps=5", "steps", "run.steps"),
        ("precompute", "images.codec=blosc", "images.codec", "store.codec"),
        ("precompute", "text.qwen.max_token=5", "text.qwen.max_token", "text.qwen.max_tokens"),
    ],
)
def test_an_unknown_key_names_the_nearest(stage: str, override: str, unknown: str, nearest: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(stage, "demo", override)
    assert f"unknown key '{unknown}', did you mean '{nearest}'?" in str(caught.value)
    assert "recipe 'demo'" in str(caught.value)
    assert caught.value.exit_code == 2


MANY = [f"8x{8 * i}" for i in range(1, 2050)]


@pytest.mark.parametrize(
    ("stage", "overrides", "words"),
    [
        ("train", ["run.steps=many"], ["'run.steps'", "integer", "'many'"]),
        ("train", ["optimizer.lr=fast"], ["'optimizer.lr'", "number", "'fast'"]),
        ("train", ["optimizer.lr=nan"], ["'optimizer.lr'"]),
        ("train", ["run.grad_clip=inf"], ["'run.grad_clip'"]),
        ("train", ["optimizer.betas=[0.9]"], ["'optimizer.betas'", "at least 2"]),
        ("train", ["objective.kind=edm"], ["'objective.kind'", "'ddpm'", "'flow'", "'edm'"]),
        ("train", ["run=5"], ["'run'", "5"]),
        ("precompute", ["images.buckets=sqare"], ["'sqare'", "'square'", "'pixart'"]),
        ("precompute", ['images.buckets=["5x"]'], ["'5x'", "HEIGHTxWIDTH"]),
        ("precompute", ["images.crop=adm"], ["'adm'", "squares"]),
        ("train", ["run.steps=0", "optimizer.lr=0"], ["'run.steps'", "equal to 1", "'optimizer.lr'"]),  # all at once
        ("train", ["model.depth=2"], ["unknown key 'model.depth'; [model] has name, ", ", mlp, "]),
        ("train", ["run.steps.more=5"], ["'steps' is a key, not a section"]),
        ("precompute", ["text.Qwen.kind=t5"], ["'text.Qwen': string should match pattern ", "(got 'Qwen')"]),
        (
            "precompute",
            ["images.buckets=pixart", "images.resolution=128"],
            ["2880, 4096 px; for other resolutions use "],
        ),
        ("precompute", [f"images.buckets={MANY}"], ["2049 buckets. Expected at most"]),
    ],
)
def test_a_wrong_value_names_the_key_and_what_is_needed(stage: str, overrides: list[str], words: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        load(stage, "demo", *overrides)
    assert [word for word in words if word not in str(caught.value)] == []


OVERRIDES = {"optimizer.lr=2e-4": 2e-4, "run.steps=400_000": 400_000, 'run.precision="fp16"': "fp16"}
OVERRIDES |= {"optimizer.betas=[0.8, 0.95]": [0.8, 0.95], "model.init_from=true": "true", "model.init_from=a=b": "a=b"}
OVERRIDES |= {"model.init_from=": "", "vae.revision=12e4567": "12e4567", 'images.buckets=["64x64"]': ["64x64"]}


@pytest.mark.parametrize("override", OVERRIDES)
def test_an_override_has_the_type_of_its_key(override: str) -> None:
    section, key = override.split("=")[0].split(".")
    recipe = load("precompute" if section in ("vae", "images") else "train", "demo", override)
    found = getattr(getattr(recipe, section), key)
    assert (found, type(found)) == (OVERRIDES[override], type(OVERRIDES[override]))


def test_the_last_override_wins_and_what_a_file_leaves_out_has_its_default(tmp_path: Path) -> None:
    (path := tmp_path / "mine.toml").write_text("[run]\nsteps = 7\n")
    assert load("train", str(path)) == TrainRecipe(run=TrainRecipe().run.model_copy(update={"steps": 7}))
    assert load("train", str(path), "run.steps=5", "run.steps=6").run.steps == 6
    path.write_text("")
    assert load("precompute", str(path)) == PrecomputeRecipe()


def test_an_override_a_recipe_or_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    for override in ("run.steps", "", "=5", "run..steps=5"):
        with pytest.raises(RecipeError, match=rf"'{override}'.*--set optimizer\.lr=2e-4"):
            load("train", "demo", override)
    for name, said in [
        ("dit-xl-2-255", "Did you mean 'dit-xl-2-256'?"),
        ("pixart-256", "It is a recipe for 'leandit precompute'. Shipped recipes: "),
    ]:
        with pytest.raises(RecipeError, match=rf"'{name}'.*{re.escape(said)}") as caught:
            load("train", name)
        assert all(shipped in str(caught.value) for stage, shipped in SHIPPED if stage == "train")
    for content in (b"[run", b"[run]\nsteps = 1\nsteps = 2\n", b"# \xff\n"):
        (path := tmp_path / "mine.toml").write_bytes(content)
        with pytest.raises(RecipeError, match=r"mine\.toml.*TOML"):
            load_recipe(str(path), TrainRecipe, package="leandit.train")


def test_a_recipe_is_frozen() -> None:
    for recipe in (TrainRecipe(), TrainRecipe().run):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(recipe, next(iter(type(recipe).model_fields)), None)


def test_the_recipes_of_pixart_sigma_are_its_published_configs() -> None:
    for side in (256, 512, 1024):
        recipe = load("train", f"pixart-sigma-{side}")
        optimizer = recipe.optimizer
        assert (optimizer.name, optimizer.weight_decay, optimizer.betas) == ("came", 0, [0.9, 0.999, 0.9999])
        assert recipe.peak_lr == 2e-5  # for 256 images
        assert recipe.data.original_share == 0.5
        assert (recipe.run.grad_clip, recipe.schedule.warmup_steps, recipe.conditioning.drop) == (0.01, 1000, 0.1)
        assert load("train", f"pixart-sigma-{side}", "run.global_batch=1024").peak_lr == pytest.approx(4e-5)


def test_the_recipe_of_the_dit_paper_is_its_published_code() -> None:
    recipe = load("train", "dit-xl-2-256-paper")
    run, optimizer = recipe.run, recipe.optimizer
    assert (run.steps, run.global_batch, run.precision, run.grad_clip) == (7_000_000, 256, "tf32", 0)
    assert (optimizer.name, recipe.peak_lr, optimizer.weight_decay, run.ema_decay) == ("adamw", 1e-4, 0, 0.9999)
    assert (recipe.objective.kind, recipe.objective.variance, recipe.schedule.warmup_steps) == ("ddpm", "learned", 0)


def test_recipes_of_papers_have_their_plain_average_and_others_a_warm_up() -> None:
    plain = {name for name in shipped_recipes("leandit.train") if not load("train", name).ema.warmup}
    papers = ("dit-", "sit-", "lightningdit-", "sr-dit-", "rae-dit-")
    assert plain == {name for name in shipped_recipes("leandit.train") if name.startswith(papers)}


def test_a_rate_is_scaled_by_the_root_of_the_batch_only_where_asked() -> None:
    assert load("train", "demo", "optimizer.lr=1e-3", "run.global_batch=512").peak_lr == 1e-3
    scaled = load("train", "demo", "optimizer.lr=1e-3", "run.global_batch=512", "optimizer.lr_base_batch=128")
    assert scaled.peak_lr == pytest.approx(2e-3)
    with pytest.raises(RecipeError, match="lr_base_batch"):
        load("train", "demo", "optimizer.lr_base_batch=128", "data.batch_tokens=64")


DEEP, LONG = "[" * 5000 + "]" * 5000, "9" * 5000


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("images.resolution", LONG, "an integer is too large"),
        ("images.resolution", f"0x{'f' * 20_000}", "an integer is too large"),
        ("text.layers", f"[{LONG}]", "an integer is too large"),
        ("images.resolution", DEEP, "nested more than 16 deep"),
        (f"images.{'.'.join(['a'] * 3000)}", "1", "nested more than 16 deep"),
    ],
)
def test_a_value_beyond_reason_is_a_mistake_of_the_user(
    key: str, value: str, said: str, tmp_path: Path, leandit: Leandit
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f"{key} = {value}\n")
    for words in (["precompute", recipe], ["train", "dit-s-2-256", "--set", f"{key}={value}"]):
        ended = leandit(*words, "--dry-run")
        assert ended.code == 2
        assert said in ended.err
        assert len(ended.err) < 400


@pytest.mark.parametrize("stage", ["precompute", "train"])
def test_what_a_recipe_is_about_is_no_setting(stage: str, tmp_path: Path) -> None:
    shipped = shipped_recipes(f"leandit.{stage}")["demo"]
    plain = re.sub(r"\[about\]\n(.+\n)*", "", shipped)
    assert plain != shipped
    (path := tmp_path / "mine.toml").write_text(plain)
    assert load(stage, str(path)) == load(stage, "demo")
    assert "about" not in tomllib.loads(to_toml(load(stage, "demo")))
    path.write_text(plain + '[about]\nsumary = "?"\n')
    with pytest.raises(RecipeError, match=r"unknown key 'about\.sumary', did you mean 'about\.summary'\?"):
        load(stage, str(path))
