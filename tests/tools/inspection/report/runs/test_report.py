"""The page of a run: what stands in it, what it asks for, and how large it may be."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from made_runs import LINES, make_grid, make_run
from making import CPU, train_recipe
from PIL import Image
from shown_runs import HOLDOUT, run_to

from leandit.datasets.errors import DamageError, RecipeError
from leandit.datasets.store import LatentStore
from leandit.tools.cli.verbs.look import report as report_command
from leandit.tools.inspection.report.runs import report
from leandit.tools.inspection.report.runs.report import report_runs
from leandit.train.loop import StopRequest, train

MARKUP = "<script>alert(1)</script><img src=x onerror=alert(2)>\" onload='x"
MARKS = "a\u202eb\u2066\x1b"


class Page(HTMLParser):
    """Elements, attributes and text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html, self.names, self.attributes, self.parts = html, list[str](), list[tuple[str, str]](), list[str]()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.parts.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.parts))

    @property
    def charts(self) -> list[str]:
        return [value for name, value in self.attributes if name == "aria-label"]


def page_of(*runs: Path) -> Page:
    out = runs[0].parent / "page.html"
    report_runs([str(run) for run in runs], out, progress=lambda *_: None)
    return Page(out.read_text())


def shown_side(uri: str) -> int:
    """Pixels of the width of a picture inside a page."""
    kind, _, encoded = uri.partition(",")
    assert kind == "data:image/webp;base64"
    return Image.open(io.BytesIO(base64.b64decode(encoded))).width


@pytest.fixture
def without_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Charts take most of the time of a page."""
    for name in ("loss_charts", "step_charts", "speed_charts"):
        monkeypatch.setattr(report, name, lambda runs: [])


@pytest.mark.usefixtures("tiny_models")
def test_the_page_of_a_run_that_was_trained_and_resumed(label_store: LatentStore, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for steps in (4, 6):
        recipe = train_recipe(
            "dit-s-4", HOLDOUT, "run.evaluate_every=2", f"run.steps={steps}", "run.checkpoint_every=2"
        )
        path = label_store.path
        train(
            recipe,
            store_path=path,
            run=run,
            device=CPU,
            report=print,
            stop=StopRequest(),
            recipe_name="dit-s-2-256",
        )
    (run / "samples").mkdir()
    make_grid(run, 2)
    make_grid(run, 6)
    page = page_of(run)
    assert "it was resumed once, from step 4" in page.text
    assert "6 of 6" in page.text
    assert "Made from the shipped recipe dit-s-2-256" in page.text
    assert "model.name DiT-S/2 DiT-S/4" in page.text
    assert label_store.root_hash in page.text
    assert "15 in 1 bucket" in page.text
    assert f"weights {label_store.spec.vae.weights_sha256[:16]}" in page.text
    titles = " ".join(page.charts)
    for title in ("Training loss", "Loss of held-out records", "Gradient norm", "Learning rate", "Images a second"):
        assert title in titles
    assert "Model FLOPs" not in titles  # a CPU has none
    pictures = [value for name, value in page.attributes if name == "src"]
    assert [shown_side(picture) for picture in pictures] == [40, 40]
    assert "2 of 2 grids" in page.text


@pytest.mark.usefixtures("without_charts")
def test_warnings_stand_first_and_link_to_what_they_are_of(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "run", change=lambda n, line: line.update(data_wait_share=0.5)))
    assert page.text.index("1 warning") < page.text.index("Summary")
    links = [value for name, value in page.attributes if name == "href"]
    ids = {value for name, value in page.attributes if name == "id"}
    assert {link.removeprefix("#") for link in links} <= ids


def test_the_page_asks_for_nothing_and_is_the_same_each_time(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    make_grid(run, 40)
    page = page_of(run)
    assert page.html == page_of(run).html
    sources = [value for name, value in page.attributes if name in ("src", "href", "xlink:href")]
    assert [one for one in sources if not one.startswith(("#", "data:image/webp;base64,"))] == []
    assert "script" not in page.names


def test_several_runs_share_charts_and_a_table_of_what_differs(tmp_path: Path) -> None:
    one = make_run(tmp_path / "one")
    two = make_run(tmp_path / "two", "optimizer.lr=3e-4", change=lambda n, line: line.update(data_wait_share=0.5))
    page = page_of(one, two)
    assert "optimizer.lr 0.0001 0.0003" in page.text
    assert "two: 50.0% of the time was spent waiting" in page.text
    assert "one, two" in page.text  # they read the same store
    assert page.charts.count("Training loss") == 1
    assert "Held-out loss of averaged weights, less that of one" in page.charts
    assert {"one", "two"} <= set(page.parts)


@pytest.mark.usefixtures("without_charts")
def test_runs_of_the_same_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / folder / "run") for folder in ("a", "b")]
    page = page_of(*runs)
    assert all(str(run) in page.text for run in runs)


def test_texts_of_a_run_are_harmless(tmp_path: Path) -> None:
    harmless = page_of(make_run(tmp_path / "a" / "run", change=lambda n, line: line.update(loss_terms={"t": 1})))
    for number, text in enumerate((MARKUP.replace("/", "|"), MARKS)):
        run = make_run(
            tmp_path / str(number) / text,
            change=lambda n, line, text=text: line.update(loss_terms={text: 1}),
            starts=[{"machine": text, "device": text, "versions": {text: text}}],
        )
        (run / "recipe.toml").write_text(f"# {text}\n")
        (run / "fid.json").write_text(json.dumps({"pictures": {"kind": text, "path": text}, "frechet": 3.25}))
        page = page_of(run)
        assert not {"script", "iframe", "object"} & set(page.names)
        assert "img" not in page.names
        assert {name for name, _ in page.attributes} <= {name for name, _ in harmless.attributes} | {"class"}
        assert [c for c in page.html if not c.isprintable() and c != "\n"] == []
        assert text[:1] in page.text


@pytest.mark.usefixtures("without_charts")
def test_evaluations_in_the_folder_are_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    pictures = {"kind": "run", "path": "runs/xl", "count": 50000, "sampler": "euler", "guidance": 1.5, "steps": 50}
    value = {"pictures": pictures, "reference": {"kind": "npz", "path": "ref.npz"}, "frechet": 12.34567, "kid": None}
    (run / "fid.json").write_text(json.dumps(value))
    (run / "other.json").write_text("3.0")
    (run / "broken.json").write_text("{")
    page = page_of(run)
    assert "fid.json run runs/xl (count 50000, sampler euler, steps 50, guidance 1.5) npz ref.npz 12.346" in page.text
    assert "other.json" not in page.text


def test_a_long_run_makes_a_small_page_that_keeps_a_spike(tmp_path: Path) -> None:
    def change(number: int, line: dict[str, float]) -> None:
        line["loss"] += 0.1 * np.sin(number)
        if number == 12_345:
            line["loss"] = 77.0

    run = make_run(tmp_path / "run", lines=20_000, change=change)
    page = page_of(run)
    assert len(page.html) < 1_000_000
    assert "the highest is 77" in page.text
    assert "100" in page.parts or any("100" in part for part in page.parts)  # the axis of the loss reaches the spike


def test_a_slow_line_is_named_and_does_not_press_the_chart_together(tmp_path: Path) -> None:
    slow = make_run(
        tmp_path / "slow", change=lambda n, line: line.update(seconds_per_step=60.0 if n in {1, 20} else 0.5)
    )
    page = page_of(slow)
    assert "Time of a step; 2 lines are above the chart, the highest 60 s at step 10" in page.charts
    chart = page.html[page.html.index("Time of a step; 2 lines") :].partition("</svg>")[0]
    assert max(float(text) for text in re.findall(r">([0-9.]+)</text>", chart) if "." in text) < 0.6
    assert "the longest is 60 s, 120 times" in page.text
    both = page_of(make_run(tmp_path / "even"), slow)
    assert "Time of a step; 2 lines are above the chart, the highest 60 s at step 10 of slow" in both.charts
    assert "Images a second, of all ranks" in both.charts


@pytest.mark.usefixtures("without_charts")
def test_many_grids_are_thinned_and_made_smaller_until_they_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "PICTURE_BYTES", 400_000)
    monkeypatch.setattr(report, "SIDES_PX", (400, 200, 100))
    run = make_run(tmp_path / "run")
    noise = np.random.default_rng(0).integers(0, 256, (400, 400, 3), np.uint8)
    for step in range(10, 410, 10):
        Image.fromarray(np.roll(noise, step)).save(run / f"samples/step-{step}.png", compress_level=1)
    page = page_of(run)
    assert len(page.html) < 450_000
    assert [shown_side(value) for name, value in page.attributes if name == "src"] == [200] * 8
    assert "8 of 40 grids" in page.text
    assert "step 10 " in page.text
    assert "step 400 " in page.text


@pytest.mark.usefixtures("without_charts")
def test_a_grid_that_is_no_picture_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "samples/step-40.png").write_bytes(b"no picture")
    with pytest.raises(DamageError, match=r"step-40\.png': it cannot be read"):
        page_of(run)


def test_a_run_without_a_step_or_a_store_has_a_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "metrics.jsonl").unlink()
    (run / "starts.jsonl").unlink()
    shutil.rmtree(run / "samples")
    page = page_of(run)
    assert "No step has been reported." in page.text
    assert "machines and versions are not known" in page.text
    assert "not opened" in page.text


def test_a_real_run_without_held_out_records_says_what_is_missing(label_store: LatentStore, tmp_path: Path) -> None:
    run_to(train_recipe("dit-s-4", "run.steps=2", "model.name=DiT-Ti/4"), label_store, tmp_path / "run")
    page = page_of(tmp_path / "run")
    assert "No held-out loss: set data.holdout" in page.text
    assert f"0 of {LINES}" not in page.text


def test_runs_and_stores_are_not_mixed_and_options_of_stores_are_refused(tmp_path: Path) -> None:
    run, store = str(make_run(tmp_path / "run")), str(tmp_path / "store")
    with pytest.raises(RecipeError, match=r"is a run, .* is not"):
        report_command([run, store], tmp_path / "page.html")
    with pytest.raises(RecipeError, match="--source, --vae and --scores are of stores"):
        report_command([run], tmp_path / "page.html", vae="taesd")
