"""The demo's pictures: the chart of the loss, the same captions at four steps, and their places in its table."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from making import CPU, train_recipe
from PIL import Image

from leandit.datasets.store import LatentStore
from leandit.tools.demo import demo
from leandit.tools.demo.charts import MEAN_COLOUR, draw_loss, loss_ticks, step_ticks
from leandit.tools.demo.pictures import COLOURS, draw_scene, make_scenes, nearest_colours
from leandit.tools.demo.vision import KINDS, train_vision
from leandit.tools.inspection.grid import CELL_PX, MARGIN_PX
from leandit.train.config import load
from leandit.train.loop import StopRequest, train
from leandit.train.weights.folders import METRICS

pytestmark = pytest.mark.usefixtures("tiny_models")


@pytest.fixture(scope="module")
def out(caption_store: LatentStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's folder after a run of eight steps, with the test's own store."""
    out = tmp_path_factory.mktemp("demo")
    (out / "store").symlink_to(caption_store.path)
    recipe = train_recipe("pixart-tiny", "run.steps=8", "run.checkpoint_every=1", "optimizer.lr=1e-2")
    train(recipe, store_path=out / "store", run=out / "run", device=CPU, report=lambda _: None, stop=StopRequest())
    return out


def test_progress_shows_the_same_captions_at_four_steps(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SAMPLE_STEPS", 2)
    assert demo.progress_steps(out / "run") == [1, 2, 4, 8]
    buckets = len(LatentStore(out / "store").buckets)
    num_cells, size = demo._sample_progress(out)
    assert num_cells == 4 * buckets * demo.PROGRESS_PER_BUCKET
    path = out / "progress.png"
    assert path.stat().st_size == size
    pixels = np.asarray(Image.open(path))
    lefts = [MARGIN_PX + column * (CELL_PX + MARGIN_PX) for column in range(4)]
    assert pixels.shape[1] == lefts[-1] + CELL_PX + MARGIN_PX
    first, *_, last = (pixels[MARGIN_PX : MARGIN_PX + CELL_PX, left : left + CELL_PX].astype(int) for left in lefts)
    assert np.abs(first - last).max() > 0  # other weights draw another picture


def test_progress_takes_the_steps_that_were_saved(tmp_path: Path) -> None:
    for step in (300, 600, 900, 1000):
        (tmp_path / f"snapshot-{step}").mkdir()
    assert demo.progress_steps(tmp_path) == [300, 600, 1000]  # 300 is the nearest to 125 and to 250


def test_the_recipe_saves_what_progress_shows() -> None:
    run = load("demo", []).run
    wanted = [run.steps * share for share in demo.PROGRESS_SHARES]
    assert [step % run.checkpoint_every for step in wanted] == [0, 0, 0, 0]


@pytest.mark.parametrize(("count", "factor"), [(1, 1.0), (2, 1.0), (40, 1e-4), (40, 1e5)])
def test_the_chart_holds_every_report(count: int, factor: float, tmp_path: Path) -> None:
    losses = [factor * (0.3 + 1 / (i + 1)) for i in range(count)]
    lines = [json.dumps({"step": 10 * (i + 1), "loss": loss}) + "\n" for i, loss in enumerate(losses)]
    (tmp_path / METRICS).write_text("".join(lines))
    pixels = np.asarray(draw_loss(tmp_path)).astype(int)
    ticks = loss_ticks(min(losses), max(losses))
    assert ticks[0] <= min(losses) <= max(losses) <= ticks[-1]
    drawn = (np.abs(pixels[46:-54] - MEAN_COLOUR).sum(axis=2) < 120).any(axis=0)
    assert drawn.sum() > 650 if count == 40 else drawn.any()  # one line over the whole run, or a dot


@pytest.mark.parametrize(
    ("last_step", "ticks"),
    [(1, [0, 1]), (7, [0, 1, 2, 3, 4, 5, 6, 7]), (1200, [0, 200, 400, 600, 800, 1000, 1200])],
)
def test_steps_have_round_ticks(last_step: int, ticks: list[int]) -> None:
    assert step_ticks(last_step) == ticks


def test_the_table_names_every_picture() -> None:
    text = demo.render_result([demo.Stage("train", 2.0, 4, 0)], demo.Score(1, 0.5), demo.Score(0, 0), 4, Path("out"))
    for name in ("contact-sheet.png", "loss.png", "progress.png", "samples.png"):
        assert f"out/{name}" in text


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
