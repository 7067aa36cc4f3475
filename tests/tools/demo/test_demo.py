"""The demo: its images, the rule that judges them, the same captions at four steps, and its table."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from making import CPU, train_recipe
from PIL import Image

from leandit.datasets.store import LatentStore
from leandit.tools.demo import demo
from leandit.tools.demo.judge import main_object_of, match_rates, read_main_object
from leandit.tools.demo.scenes import draw_scene, make_scenes, write_image_folder
from leandit.tools.inspection.images import CELL_PX, MARGIN_PX
from leandit.train.loop import StopRequest, train

pytestmark = pytest.mark.usefixtures("tiny_models")


@pytest.fixture(scope="module")
def out(caption_store: LatentStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's folder after a run of eight steps, with the test's own store."""
    out = tmp_path_factory.mktemp("demo")
    (out / "store").symlink_to(caption_store.path)
    recipe = train_recipe("pixart-tiny", "run.steps=8", "run.checkpoint_every=1", "optimizer.lr=1e-2")
    train(recipe, store_path=out / "store", run=out / "run", device=CPU, report=lambda _: None, stop=StopRequest())
    return out


def test_progress_shows_captions_at_four_steps(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert np.abs(first - last).max() > 0  # other weights draw another image
    for step in (300, 600, 900, 1000):
        (tmp_path / f"snapshot-{step}").mkdir()
    assert demo.progress_steps(tmp_path) == [300, 600, 1000]  # 300 is the nearest to 125 and to 250


def test_the_table_names_every_image() -> None:
    rates = {"score": {"colour": 1.0, "shape": 0.5}, "score_shuffled": {"colour": 0.0, "shape": 0.25}}
    lines = demo.render_result([demo.Stage("train", 2.0, 4, 0)], rates, Path("out")).splitlines()
    assert lines[1].split() == ["train", "2.0", "s", "4", "2", "-"]
    assert [line.split()[-2:] for line in lines if "captions" in line] == [["100%", "50%"], ["0%", "25%"]]
    assert {line.split()[-1] for line in lines if line} >= {f"out/{name}" for name in demo.OUTPUTS.values()}


def test_images_are_drawn_once(tmp_path: Path) -> None:
    drawn: list[int] = []
    size = write_image_folder(tmp_path, 30, lambda _stage, number, _total: drawn.append(number))
    assert drawn == [*range(1, 31)]
    before = (tmp_path / "images/00000.png").stat().st_mtime_ns
    assert write_image_folder(tmp_path, 30, lambda *_: pytest.fail("drew again")) == size
    assert (tmp_path / "images/00000.png").stat().st_mtime_ns == before
    rows = [json.loads(line) for line in (tmp_path / "metadata.jsonl").read_text().splitlines()]
    assert all((tmp_path / row["file_name"]).is_file() and len(row["captions"]) == 2 for row in rows)


def test_the_judge_reads_every_drawn_image_at_the_size_of_the_demo() -> None:
    scenes = make_scenes(400, seed=3)
    images = [
        np.asarray(draw_scene(scene).resize((scene.width_px // 2, scene.height_px // 2), Image.Resampling.BICUBIC))
        for scene in scenes
    ]
    wrong = [
        (caption, read_main_object(image))
        for scene, image in zip(scenes, images, strict=True)
        for caption in scene.captions
        if read_main_object(image) != main_object_of(caption)
    ]
    assert wrong == []
    captions = ["a red circle", "a red square", "a blue circle", "a blue square"]
    red_circle = next(image for image in images if read_main_object(image) == ("red", "circle"))
    assert match_rates([red_circle] * 4, captions) == {"colour": 0.5, "shape": 0.5}
    gray = np.full((64, 64, 3), 200, np.uint8)
    assert match_rates([gray], ["a red circle"]) == {"colour": 0, "shape": 0}
