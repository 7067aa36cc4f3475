"""The documentation is complete and true: commands, options, recipe keys, files, and the commands that it shows."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import typer
from making import CPU, TRAIN_RECIPE, all_commands

from leandit.datasets.store import LatentStore
from leandit.precompute.config import PrecomputeRecipe
from leandit.precompute.importing.recipe import ImportRecipe
from leandit.recipe import Section
from leandit.tools.cli.commands import app
from leandit.tools.cli.recipe_keys import recipe_keys
from leandit.tools.cli.verbs.start import recipes
from leandit.train.config import TrainRecipe, load
from leandit.train.loop import StopRequest, train

ROOT = Path(__file__).parents[2]
COMMANDS = (ROOT / "docs/commands.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ALL = all_commands(typer.main.get_command(app))


def shown_commands() -> list[tuple[str, list[str]]]:
    """Every ``leandit ...`` line in a code block of the documentation."""
    found = []
    for page in PAGES:
        for block in re.findall(r"```\w*\n(.*?)```", page.read_text(), re.DOTALL):
            joined = block.replace("\\\n", " ")
            lines = re.findall(r"^(?:\$ )?(leandit .*)$", joined, re.MULTILINE)
            found += [(page.name, shlex.split(line, comments=True)[1:]) for line in lines]
    return found


@pytest.mark.parametrize("name", sorted(ALL))
def test_every_command_is_documented_and_each_of_its_options_has_help(name: str) -> None:
    command: Any = ALL[name]
    assert command.help
    assert "Example: leandit" in command.help
    assert f"`leandit {name}" in COMMANDS
    assert [it.name for it in command.params if not getattr(it, "help", "") and it.name != "help"] == []


@pytest.mark.parametrize(
    ("stage", "model"), [("precompute", PrecomputeRecipe), ("train", TrainRecipe), ("import", ImportRecipe)]
)
def test_every_recipe_key_is_listed_with_its_default_and_meaning(
    stage: str, model: type[Section], capsys: pytest.CaptureFixture[str]
) -> None:
    recipes(keys=stage)
    listed = capsys.readouterr().out
    assert all(key.meaning for key in recipe_keys(stage))
    for section, field in model.model_fields.items():
        inner: Any = field.annotation
        if get_origin(inner) is dict:  # sections with names; [text.NAME] has the keys of [text]
            section, inner = section if section == "text" else f"{section}.NAME", get_args(inner)[1]
        for key, of_key in inner.model_fields.items():
            default = "required" if of_key.is_required() else json.dumps(of_key.get_default(call_default_factory=True))
            assert f"{section}.{key} = {default}\n    " in listed
            for table in get_args(of_key.annotation):  # the sections of a list
                fields = table.model_fields.keys() - inner.model_fields if hasattr(table, "model_fields") else ()
                assert [name for name in fields if f"{section}.{key}.{name} = " not in listed] == []


def test_the_commands_shown_exist_with_their_options() -> None:
    shown = shown_commands()
    assert len(shown) > 5
    everywhere = {option for it in typer.main.get_command(app).params for option in it.opts}
    for page, words in shown:
        while words[0] in everywhere:
            words = words[1:]
        command = ALL.get(" ".join(words[:2])) or ALL[words[0]]
        known = {option for it in command.params for option in (*it.opts, *it.secondary_opts)} | {"--help"}
        used = {word.split("=")[0] for word in words[1:] if word.startswith("--")}
        assert used <= known, f"{page}: {words}"


def test_the_code_about_batches_runs(
    caption_store: LatentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "S2").symlink_to(caption_store.path)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs/batches.md").read_text(), re.DOTALL):
        exec(block.replace("global_batch=16", "global_batch=4"), names)
    assert names["batch"].number == 5
    assert names["again"].dataset.number == 3  # after the third batch


def test_the_code_about_own_encoders_makes_stores_that_train(
    class_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_models: None
) -> None:
    (tmp_path / "photos").symlink_to(class_folder)
    monkeypatch.chdir(tmp_path)
    first, *others = re.findall(r"```python\n(.*?)```", (ROOT / "docs/own-encoders.md").read_text(), re.DOTALL)
    assert len(first.strip().splitlines()) <= 20
    names: dict[str, Any] = {}
    for block in (first, first, *others):  # twice: a sealed store takes the same records again
        exec(block, names)
    assert LatentStore("photos-64").buckets == {"64x64": 15}
    assert LatentStore("captioned").buckets == {"64x64": 4, "64x96": 4, "96x64": 4}
    recipe = load("dit-s-2-256", ["model.num_classes=0", "run.compile=false", *TRAIN_RECIPE])
    where = {"store_path": "photos-64", "run": Path("run"), "device": CPU}
    outcome = train(recipe, **where, report=print, stop=StopRequest(), warn=print)
    assert (outcome.step, outcome.finished) == (6, True)


@pytest.mark.integration
def test_the_recipes_about_batches_train(
    label_store: LatentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_models: None
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/batches.md").read_text(), re.DOTALL)
    assert len(blocks) == 2
    for number, block in enumerate(blocks):
        Path("recipe.toml").write_text(re.sub(r"steps = \d+", "steps = 2", block).replace("65536", "512"))
        tiny = ["model.name=DiT-S/4", "run.compile=false", *TRAIN_RECIPE]
        recipe = load("recipe.toml", tiny)
        for turn in recipe.turns(None):
            if not Path(turn.section.store).exists():
                Path(turn.section.store).symlink_to(label_store.path)
        run = Path(f"run-{number}")
        outcome = train(recipe, run=run, device=CPU, report=print, stop=StopRequest(), warn=print)
        assert (outcome.step, outcome.finished) == (6, True)
        assert len(json.loads((run / "run.json").read_text())["stores"]) == len(recipe.turns(None))


@pytest.mark.integration
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """As ``make docs``: a broken link, or a docstring that is not understood, ends it."""
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    ended = subprocess.run(build, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    for page, text in {"api": "make_loader", "options": "--dry-run", "keys": "run.global_batch"}.items():
        assert text in (tmp_path / f"{page}.html").read_text()
