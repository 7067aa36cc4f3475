"""``metrics.jsonl`` by columns, whatever a crash has left in it, the state of the run, and its starts."""

from __future__ import annotations

import json
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from making import CPU, train_recipe
from runs import LINES, LOG_EVERY, make_run, report_line

from leandit import __version__
from leandit.datasets.store import LatentStore
from leandit.errors import DamageError
from leandit.train.loop import StopRequest, train
from leandit.train.metrics.history import read_history, read_starts, smoothed


def test_the_figures_come_as_columns_and_the_later_line_of_a_step_counts(tmp_path: Path) -> None:
    again = report_line(4) | {"loss": 7.0, "held_out": None, "gpu_busy_share": 10**400}
    tail = json.dumps(again) + "\n" + json.dumps(report_line(41))[:50]
    run = make_run(tmp_path / "run", change=lambda n, line: line["loss_terms"].update({"align.a": n}), tail=tail)
    history = read_history(run)
    assert history.steps.tolist() == [n * LOG_EVERY for n in range(1, LINES + 1)]
    assert (len(history), history.num_repeated, history.is_cut) == (LINES, 1, True)
    assert history.columns["loss"][[0, 3, -1]].tolist() == pytest.approx([2 - 1 / LINES, 7.0, 1.0])
    assert np.isnan(history.columns["loss_scale"]).all()
    assert np.flatnonzero(np.isnan(history.columns["gpu_busy_share"])).tolist() == [3]  # no figure is that large
    assert (history.loss_by_time.shape, history.held_out_by_time.shape) == ((LINES, 10), (LINES, 8))
    assert history.terms["align.a"][[0, -1]].tolist() == [1, LINES]
    assert history.steps[history.is_evaluated].tolist() == [n * LOG_EVERY for n in range(8, LINES + 1, 4)]
    assert np.array_equal(np.isfinite(history.columns["held_out.averaged_loss"]), history.is_evaluated)
    assert history.is_finite.all()
    assert history.seconds[-1] == pytest.approx(0.5 * LINES * LOG_EVERY)


DAMAGED = ["{", "[]", "[" * 100_000, "\0"]
WRONG: list[dict[str, Any]] = [{"step": "3"}, {"step": -1}, {"step": True}, {"step": None}, {"loss_by_time": [1.0]}]
WRONG += [{"grad_norm": "much"}, {"loss_terms": [1]}, {"held_out": {"loss": "low"}}]
WITHOUT_STEP = json.dumps({name: value for name, value in report_line(3).items() if name != "step"})


@pytest.mark.parametrize("line", [*DAMAGED, WITHOUT_STEP, *(json.dumps(report_line(3) | one) for one in WRONG)])
def test_a_line_that_is_no_report_is_named(line: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tail=line + "\n")
    with pytest.raises(DamageError, match=rf"metrics\.jsonl': line {LINES + 1} is not a report \(.*Remove the line"):
        read_history(run)


HELD_OUT = {"loss", "averaged_loss", "loss_by_time", "averaged_loss_by_time", "num_images", "seconds", "share"}


@pytest.mark.parametrize(
    "name", sorted(report_line(4).keys() - {"step"}) + [f"held_out.{name}" for name in sorted(HELD_OUT)]
)
def test_a_figure_that_another_release_did_not_write_is_not_known_and_the_others_are(name: str, tmp_path: Path) -> None:
    def other_release(number: int, line: dict[str, Any]) -> None:
        outer, _, inner = name.rpartition(".")
        (line[outer] or {} if outer else line).pop(inner, None)
        line["figure_of_a_newer_release"] = {"nested": [1]}

    history, whole = (
        read_history(make_run(tmp_path / "run", change=other_release)),
        read_history(make_run(tmp_path / "o")),
    )
    assert history.steps.tolist() == whole.steps.tolist()
    assert history.is_finite.all()
    for column, values in whole.columns.items():
        expected = np.full(len(values), np.nan) if column == name or name == column.split(".")[0] else values
        assert np.array_equal(history.columns[column], expected, equal_nan=True)
    known = "held_out" not in name or name not in ("held_out", "held_out.averaged_loss_by_time")
    assert np.isfinite(history.held_out_by_time).any() == known


@pytest.mark.parametrize(
    ("steps", "quiet", "line_seconds", "state"),
    [(400, 1e6, 5, "finished"), (500, 1e4, 5, "stopped"), (500, 1e4, 2000, "running")],
)
def test_the_state_of_a_run(steps: int, quiet: float, line_seconds: float, state: str, tmp_path: Path) -> None:
    each = {"seconds_per_step": line_seconds / LOG_EVERY}
    history = read_history(make_run(tmp_path / "run", change=lambda n, line: line.update(each)))
    assert history.state(steps, now=history.written + quiet) == state
    empty = read_history(tmp_path)
    assert (empty.state(10), empty.last_step, len(empty.seconds)) == ("not begun", 0, 0)


@given(
    st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(float("nan"))), min_size=1, max_size=400),
    st.sampled_from([0.02, 0.1, 0.5]),
)
def test_a_smoothed_line_is_the_mean_of_the_points_around(values: list[float], share: float) -> None:
    y, half = np.array(values), max(1, round(len(values) * share / 2))
    for place, mean in enumerate(smoothed(y, share)):
        known = [value for value in y[max(0, place - half) : place + half + 1] if np.isfinite(value)]
        assert np.isnan(mean) if not known else mean == pytest.approx(np.mean(known), abs=1e-6)


@pytest.mark.usefixtures("tiny_models")
def test_each_start_is_noted_with_the_steps_that_were_lost(label_store: LatentStore, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for steps, lost in ((3, 0), (4, 3), (4, 0)):  # a finished run notes none
        if lost:
            shutil.rmtree(run / f"checkpoint-{lost}")  # as if it had been killed before it was written
        recipe = train_recipe("dit-s-4", f"run.steps={steps}", "run.checkpoint_every=2", "run.precision=bf16")
        how = {"device": CPU, "report": lambda _: None, "stop": StopRequest(), "recipe_name": "dit-s-2-256"}
        train(recipe, store_path=label_store.path, run=run, **how)
    first, second = read_starts(run)
    assert (first.from_step, first.reached_step, second.from_step, second.reached_step) == (0, 0, 2, 3)
    assert (first.recipe, first.strategy, first.world_size) == ("dit-s-2-256", "single", 1)
    assert first.precision == "fp32"  # that it computes in, on a CPU
    assert first.versions["leandit"] == __version__
    assert {"torch", "python"} <= first.versions.keys()
    assert datetime.fromisoformat(first.time) <= datetime.fromisoformat(second.time)
    assert "CPU" in first.device


def test_a_line_that_is_no_start_is_named(tmp_path: Path) -> None:
    assert read_starts(tmp_path) == []
    for line in ("{", "[]", json.dumps({"time": 3}), json.dumps({"time": "2026-01-02"}), "[" * 100_000):
        (tmp_path / "starts.jsonl").write_text(line + "\n")
        with pytest.raises(DamageError, match="line 1 is not a start"):
            read_starts(tmp_path)
