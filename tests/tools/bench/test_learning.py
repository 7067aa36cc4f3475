"""``leandit bench learning``: the whole comparison in small, what its table says, and its chart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from leandit.tools.bench.training import learning
from leandit.tools.bench.training.learning import PLAIN, RECIPES, LearningRequest, first_below, render, run
from leandit.tools.bench.training.learning_chart import draw
from leandit.tools.demo import demo
from leandit.tools.demo.pictures import COLOURS, draw_scene, make_scenes, nearest_colours
from leandit.tools.demo.vision import KINDS, train_vision
from leandit.tools.terminal.progress import ProgressLine
from leandit.train.models.dit import SIZES


def test_recipes_train_on_the_same_store_and_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "Ti", (5, 32, 2))
    monkeypatch.setattr(demo, "SAMPLE_STEPS", 2)
    monkeypatch.delitem(RECIPES, "contrastive")
    monkeypatch.delitem(RECIPES, "TREAD")
    for name, value in {"NUM_EVALUATIONS": 2, "NUM_SNAPSHOTS": 1, "ROUNDS": 1, "STEPS": 1}.items():
        monkeypatch.setattr(learning, name, value)
    request = LearningRequest(tmp_path, 1, 2, 48, ("run.global_batch=8",), teacher_steps=2, per_bucket=3)
    with ProgressLine() as progress:
        result = run(request, progress)
        assert run(request, progress)["runs"] == result["runs"]  # nothing trains again
    assert list(result["runs"]) == list(RECIPES)
    for name, runs in result["runs"].items():
        assert [one["seed"] for one in runs] == [0]
        assert all(list(one["held_out"]) == ["1", "2"] and list(one["frechet"]) == ["2"] for one in runs), name
    first = [runs[0]["held_out"]["2"] for runs in result["runs"].values()]
    assert len(set(first)) == len(RECIPES)  # each recipe learns something else
    draw(result, tmp_path / "chart.png")
    assert np.asarray(Image.open(tmp_path / "chart.png")).std() > 0


def test_the_table_compares_with_the_last_loss_of_the_plain_recipe() -> None:
    def of(*losses: float) -> list[dict]:
        return [{"held_out": dict(zip("1234", losses, strict=True)), "frechet": {"4": losses[-1]}}]

    runs = {PLAIN: of(4, 3, 2, 1), "half": of(4, 1, 0.9, 0.8), "worse": of(4, 4, 4, 4)}
    seconds = {PLAIN: 1.0, "half": 1.5, "worse": 1.0}
    lines = render({"steps": 4, "runs": runs, "seconds_per_step": seconds}).splitlines()
    assert lines[1].split()[-2:] == ["100%", "100%"]
    assert lines[2].split()[-2:] == ["50%", "75%"]
    assert lines[3].split()[-2:] == ["never", "never"]


def test_where_a_curve_comes_down_to_a_value() -> None:
    curve = {10: 3.0, 20: 2.0, 30: 1.0}
    assert first_below(curve, 1.5) == pytest.approx(25)
    assert first_below(curve, 3.0) == 10
    assert first_below(curve, 0.5) is None


def test_the_vision_model_learns_what_lies_in_a_patch(tmp_path: Path) -> None:
    known = train_vision(tmp_path, seed=0, steps=60, num_pictures=128, progress=lambda step, steps: None)
    assert known > 0.6  # two thirds of the patches are background
    assert {path.name for path in tmp_path.iterdir()} >= {
        "config.json",
        "model.safetensors",
        "preprocessor_config.json",
    }


def test_each_pixel_of_an_object_has_its_colour() -> None:
    scene = next(scene for scene in make_scenes(20, seed=3) if scene.relation)
    found = nearest_colours(np.asarray(draw_scene(scene)))
    names = {list(COLOURS)[number] for number in np.unique(found) if number >= 0 and (found == number).sum() > 20}
    assert names == {scene.colour, scene.other_colour}
    assert (scene.colour, scene.shape) in KINDS
