"""The report of a run: what its page says and draws, how large it may be, and the warning of each rule."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from making import CPU, train_recipe
from PIL import Image
from runs import HOLDOUT, LINES, LOG_EVERY, Change, make_grid, make_run, report_line
from view_sites import Elements

from leandit.datasets.store import LatentStore
from leandit.errors import DamageError, RecipeError
from leandit.tools.cli.verbs.look import report as report_command
from leandit.tools.inspection.report import run as report
from leandit.tools.inspection.report.rules import alerts_of
from leandit.tools.inspection.report.run_facts import RunFacts, differing
from leandit.train.loop import StopRequest, train

SVG, WEBP = "data:image/svg+xml;base64,", "data:image/webp;base64,"


class Page(Elements):
    """A page, its text in one line, its charts by their headings, and its other images."""

    def __init__(self, html: str) -> None:
        super().__init__(html)
        self.html, self.line = html, re.sub(r"\s+", " ", " ".join(self.text))
        sources = [value for name, value in self.attributes if name == "src"]
        titles = [value for name, value in self.attributes if name == "alt"]
        pairs = zip(titles, sources, strict=True)
        svgs = {title: base64.b64decode(uri.removeprefix(SVG)).decode() for title, uri in pairs if uri.startswith(SVG)}
        self.charts = {title: re.findall(r">([^<>]+)</text>", svg) for title, svg in svgs.items()}
        self.images = [
            Image.open(io.BytesIO(base64.b64decode(uri.removeprefix(WEBP)))) for uri in sources if uri.startswith(WEBP)
        ]


def page_of(run: Path) -> Page:
    out = run.parent / "page.html"
    report.report_run(run, out)
    return Page(out.read_text())


@pytest.fixture
def without_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Charts take most of the time of a page."""
    monkeypatch.setattr(report, "draw_charts", lambda _: {"losses": [], "steps": [], "speed": []})


@pytest.mark.usefixtures("tiny_models")
def test_the_report_of_a_real_run_that_was_resumed(label_store: LatentStore, tmp_path: Path) -> None:
    run, name = tmp_path / "run", "dit-s-2-256"
    for steps in (4, 6):
        every = (HOLDOUT, "run.log_every=1", "run.evaluate_every=2", "run.checkpoint_every=2")
        places = {"store_path": label_store.path, "run": run, "device": CPU, "recipe_name": name}
        recipe = train_recipe("dit-s-4", f"run.steps={steps}", *every)
        train(recipe, report=lambda _: None, stop=StopRequest(), **places)
    (run / "samples").mkdir()
    make_grid(run, 2)
    make_grid(run, 6)
    images = {"kind": "run", "path": "runs/xl", "count": 50000, "sampler": "euler", "guidance": 1.5, "steps": 50}
    value = {"images": images, "reference": {"kind": "npz", "path": "ref.npz"}, "frechet": 12.34567, "kid": None}
    (run / "evaluations.jsonl").write_text(json.dumps(value) + "\n3.0\n" + '{"cut')
    page = page_of(run)
    for text in (
        "it was resumed once, from step 4",
        "6 of 6",
        f"Made from the shipped recipe {name}",
        'model.name "DiT-S/2" "DiT-S/4"',
        label_store.root_hash,
        "15 in 1 bucket",
        f"weights {label_store.spec.vae.weights_sha256[:16]}",
        "2 of 2 grids",
        "run runs/xl (count 50000, sampler euler, steps 50, guidance 1.5) npz ref.npz 12.346",
    ):
        assert text in page.line
    assert [image.width for image in page.images] == [40, 40]
    titles = ["Training loss", "Loss of held-out records", "Learning rate", "Images a second, of all ranks"]
    assert set(titles) <= page.charts.keys()
    assert not any("Model FLOPs" in title for title in page.charts)  # a CPU has none
    assert {"averaged weights", "weights", "resumed"} <= set(page.charts["Loss of held-out records"])
    assert page.html == page_of(run).html
    links = {value.removeprefix("#") for name, value in page.attributes if name == "href"}
    assert links <= {value for name, value in page.attributes if name == "id"}
    assert all(value.startswith((SVG, WEBP)) for name, value in page.attributes if name == "src")
    assert "script" not in page.names


def test_a_long_run_makes_a_small_page_that_keeps_a_spike(tmp_path: Path) -> None:
    def change(number: int, line: dict[str, float]) -> None:
        line["loss"] = 77.0 if number == 12_345 else line["loss"] + 0.1 * np.sin(number)

    page = page_of(make_run(tmp_path / "run", lines=20_000, change=change))
    assert len(page.html) < 1_000_000
    assert "the highest is 77" in page.line
    assert "10" in page.charts["Training loss"]  # the axis reaches the spike


@pytest.mark.usefixtures("without_charts")
def test_many_grids_are_thinned_and_made_smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "GRID_BYTES", 100_000)
    run = make_run(tmp_path / "run")
    noise = np.random.default_rng(0).integers(0, 256, (200, 200, 3), np.uint8)
    for step in range(10, 410, 10):
        Image.fromarray(np.roll(noise, step)).save(run / f"samples/step-{step}.png", compress_level=1)
    page = page_of(run)
    assert len(page.html) < 150_000
    assert [image.width > 75 for image in page.images] == [True] * 8
    for text in ("8 of 40 grids", "step 10 ", "step 400 "):
        assert text in page.line
    (run / "samples/step-400.png").write_bytes(b"no image")
    with pytest.raises(DamageError, match=r"step-400\.png': it cannot be read"):
        page_of(run)


def test_a_run_without_a_step_or_a_store_has_a_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", change=lambda n, line: line.update(held_out=None))
    assert "No held-out loss: set data.holdout" in page_of(run).line
    for name in ("metrics.jsonl", "starts.jsonl"):
        (run / name).unlink()
    (run / "samples").rmdir()
    line = page_of(run).line
    for text in ("No step has been reported.", "machines and versions are not known", "not opened", "not shipped with"):
        assert text in line


def test_a_recipe_is_compared_with_the_shipped_one_that_the_run_names(tmp_path: Path) -> None:
    named = RunFacts(make_run(tmp_path / "named", "optimizer.lr=3e-4", recipe="dit-b-2-256"))
    assert named.shipped == "dit-b-2-256"
    assert named.changed[:2] == [("data.holdout", "0.0", "0.1"), ("optimizer.lr", "0.0001", "0.0003")]
    own = RunFacts(make_run(tmp_path / "own", starts=[{"recipe": "mine.toml"}]))
    assert (own.shipped, own.changed) == ("", [])
    assert differing({"a": 1, "b": True}, {"a": 1, "c": {"d": ""}}) == [("b", "true", "-"), ("c.d", "-", '""')]


def test_what_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="--vae is for stores"):
        report_command(str(make_run(tmp_path / "run")), tmp_path / "page.html", vae="taesd")
    with pytest.raises(DamageError, match="it has not trained"):
        RunFacts(tmp_path)
    (tmp_path / "run.json").write_text('{"recipe": {}, "stores": [{"path": 3}]}')
    with pytest.raises(DamageError, match=r"'stores\.0\.path'"):
        RunFacts(tmp_path)


NOW = 2e9  # long after any run of the tests has written


def warned(run: Path, *, now: float = NOW) -> list[str]:
    return [alert.text for alert in alerts_of("run", RunFacts(run, now=now))]


def every(**values: Any) -> Change:
    return lambda number, line: line.update(values)


def at(places: set[int], **values: Any) -> Change:
    return lambda number, line: line.update(values) if number in places else None


def held_out(losses: dict[int, float], **values: Any) -> Change:
    def change(number: int, line: dict[str, Any]) -> None:
        if line["held_out"]:
            line["held_out"] |= {"loss": losses.get(number, 1.0), "averaged_loss": losses.get(number, 1.0)} | values

    return change


@pytest.mark.parametrize("loss", [lambda n: 2.0 - n / LINES, lambda n: 3.0 / n])
def test_a_healthy_run_breaks_no_rule_also_where_its_loss_falls_fast(loss: Any, tmp_path: Path) -> None:
    assert warned(make_run(tmp_path / "run", change=lambda n, line: line.update(loss=loss(n)))) == []


BROKEN: dict[str, tuple[Change, str]] = {
    "loss": (at({3, 5}, loss=float("nan")), "a loss is not finite at steps 30, 50"),
    "term": (at({7}, loss_terms={"align.a": float("inf")}), "a loss is not finite at step 70"),
    "held-out": (
        held_out({}, loss=None, averaged_loss=None),
        "a loss is not finite at steps 40, 80, 120, 160, 200, and 5 more",
    ),
    "skipped": (at({2}, skipped_steps=4), "4 updates were skipped, 1.00% of the steps"),
    "diverged": (lambda n, line: line.update(loss=1.0 + (n > 30) * (n - 30) / 10), "the smoothed loss is 1."),
    "spike": (at({20}, loss=9.0), "the loss is over 2 times the median around it at step 200; the highest is 9"),
    "norm": (at({20, 40}, grad_norm=6.0), "the gradient norm is over 5 times the median around it at steps 200, 400"),
    "overfitting": (
        held_out({8: 0.5, 32: 1.1, 36: 1.2, 40: 1.3}),
        "the held-out loss has risen from 0.5 at step 80 to 1.3",
    ),
    "average": (
        held_out({}, averaged_loss=1.2),
        "the averaged weights have a held-out loss of 1.2, the weights themselves 1",
    ),
    "waiting": (every(data_wait_share=0.02), "2.0% of the time was spent waiting for batches"),
    "idle": (every(gpu_busy_share=0.8), "the GPU was busy for only 80.0% of the time"),
    "slower": (
        lambda n, line: line.update(images_per_second=16.0 if n < 35 else 8.0),
        "the last lines have 8 images/s",
    ),
    "slow": (
        at({26, 29}, seconds_per_step=4.0),
        "a step takes over 3 times the median of the surrounding lines at steps 260, 290; the longest is 4 s, 8 times; "
        "together 25.9% of the time",
    ),
    "clipped": (every(grad_norm=1.5), "100% of the lines have a gradient norm above run.grad_clip 1"),
    "evaluating": (held_out({}, share=0.1), "evaluations take 10.0% of the time"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_rule_warns_of_the_run_that_breaks_it(name: str, tmp_path: Path) -> None:
    change, text = BROKEN[name]
    overrides = {"clipped": ("schedule.warmup_steps=0",)}.get(name, ())
    (warning,) = warned(make_run(tmp_path / "run", *overrides, change=change))
    assert warning.startswith(text)


def test_a_run_that_stopped_says_where_and_what_a_restart_repeated(tmp_path: Path) -> None:
    starts = [{}, {"from_step": 100, "reached_step": 130}, {"from_step": 200, "reached_step": 200}]
    run = make_run(tmp_path / "run", "run.steps=1000", starts=starts)
    resumed = "it was resumed 2 times, from steps 100, 200; 30 steps were lost and repeated"
    assert warned(run) == [resumed, "it has stopped at step 400 of 1,000 before its end; no checkpoint"]
    (run / "checkpoint-300").mkdir()
    (run / "damaged-checkpoint-350").mkdir()
    _, stopped, damaged = warned(run)
    assert stopped.endswith("; the newest checkpoint is of step 300")
    assert damaged == "checkpoints were damaged and set aside: damaged-checkpoint-350"


def test_lines_that_do_not_count_and_grids_that_wait_are_told_unless_the_run_goes_on(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "run.steps=1000", tail=json.dumps(report_line(LINES)) + '\n{"step"')
    (run / "samples/step-400.safetensors").touch()
    _, grids, file = warned(run)
    assert grids.startswith("1 grids of images are not decoded")
    assert "its last line is cut off" in file
    repeated = "1 lines are of steps that a later line reports again"
    assert repeated in file
    running, file = warned(run, now=(run / "metrics.jsonl").stat().st_mtime)
    assert running == "it is still running, at step 400 of 1,000"
    assert file.startswith(f"metrics.jsonl: {repeated}")


def test_the_first_line_of_each_start_is_neither_slow_nor_waiting(tmp_path: Path) -> None:
    first = at({1, 21}, seconds_per_step=20.0, data_wait_share=0.9)
    starts = [{}, {"from_step": 20 * LOG_EVERY, "reached_step": 20 * LOG_EVERY}]
    (warning,) = warned(make_run(tmp_path / "run", change=first, starts=starts))
    assert warning.startswith("it was resumed once")
