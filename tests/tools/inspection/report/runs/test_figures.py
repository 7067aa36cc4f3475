"""What a report reads of a run, and what it keeps of long lines."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import LINES, LOG_EVERY, make_run, report_line

from leandit.datasets.errors import DamageError
from leandit.tools.inspection.report.runs.facts import read_run
from leandit.tools.inspection.report.runs.lines import axis_top, running_median, smoothed, thinned
from leandit.tools.inspection.report.runs.metrics import read_metrics
from leandit.tools.inspection.report.runs.recipes import diff_to_shipped, differing
from leandit.train.config import load

NUMBERS = st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(float("nan"))), min_size=1, max_size=400)


def test_the_figures_come_as_columns_in_order_of_the_steps(tmp_path: Path) -> None:
    metrics = read_metrics(make_run(tmp_path / "run", change=lambda n, line: line["loss_terms"].update({"align.a": n})))
    assert metrics.steps.tolist() == [n * LOG_EVERY for n in range(1, LINES + 1)]
    assert metrics.columns["loss"][[0, -1]].tolist() == pytest.approx([2 - 1 / LINES, 1.0])
    assert np.isnan(metrics.columns["loss_scale"]).all()
    assert metrics.by_time.shape == (LINES, 10)
    assert metrics.terms["align.a"].tolist() == list(range(1, LINES + 1))
    assert metrics.held_out.steps.tolist() == [n * LOG_EVERY for n in range(4, LINES + 1, 4)]
    assert metrics.held_out.averaged_by_time.shape == (LINES // 4, 8)
    assert metrics.seconds[-1] == pytest.approx(0.5 * LINES * LOG_EVERY)


def test_the_later_line_of_a_step_counts_and_a_cut_line_does_not(tmp_path: Path) -> None:
    again = report_line(3) | {"loss": 7.0, "held_out": None}
    tail = json.dumps(again) + "\n" + json.dumps(report_line(41))[:50]
    metrics = read_metrics(make_run(tmp_path / "run", tail=tail))
    assert (len(metrics), metrics.num_repeated, metrics.num_cut) == (LINES, 1, 1)
    assert metrics.columns["loss"][2] == 7.0
    assert metrics.columns["loss"][3] != 7.0


@pytest.mark.parametrize("line", ["{", "[]", '{"step": "3"}', '{"step": -1}', '{"step": true}', "[" * 100_000, "\0"])
def test_a_line_that_is_no_report_is_named(line: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tail=line + "\n")
    with pytest.raises(DamageError, match=f"line {LINES + 1} is not a report"):
        read_metrics(run)


def test_values_of_other_kinds_are_no_numbers(tmp_path: Path) -> None:
    odd = {"grad_norm": "much", "loss_by_time": 3, "loss_terms": [1], "memory_gib": 10**400, "held_out": {"loss": {}}}
    metrics = read_metrics(make_run(tmp_path / "run", change=lambda n, line: line.update(odd)))
    assert np.isnan(metrics.columns["grad_norm"]).all()
    assert np.isnan(metrics.columns["memory_gib"]).all()
    assert (metrics.by_time.shape, metrics.terms) == ((LINES, 0), {})
    assert np.isnan(metrics.held_out.columns["loss"]).all()


@given(NUMBERS, st.integers(4, 60))
def test_a_thinned_line_is_short_and_keeps_every_extreme(values: list[float], most: int) -> None:
    y = np.array(values)
    x = np.arange(len(y))
    kept_x, kept_y = thinned(x, y, most)
    assert len(kept_x) <= max(most, 2)
    assert (np.diff(kept_x) > 0).all()
    np.testing.assert_array_equal(kept_y, y[kept_x])
    if np.isfinite(y).any():
        assert (np.nanmin(kept_y), np.nanmax(kept_y)) == (np.nanmin(y), np.nanmax(y))


@given(NUMBERS, st.sampled_from([0.02, 0.1, 0.5]))
def test_a_smoothed_line_is_the_mean_of_what_is_around(values: list[float], share: float) -> None:
    y, half = np.array(values), max(1, round(len(values) * share / 2))
    for place, found in enumerate(smoothed(y, share)):
        known = [one for one in y[max(0, place - half) : place + half + 1] if np.isfinite(one)]
        assert np.isnan(found) if not known else found == pytest.approx(np.mean(known), abs=1e-6)


@given(NUMBERS, st.sampled_from([3, 21]))
def test_the_running_median_is_that_of_the_points_around(values: list[float], points: int) -> None:
    y, half = np.array(values), points // 2
    found = running_median(y, points)
    assert len(found) == len(y)
    for place in range(half, len(y) - half):
        known = [one for one in y[place - half : place + half + 1] if np.isfinite(one)]
        assert np.isnan(found[place]) if not known else found[place] == np.median(known)


def test_a_single_spike_does_not_stretch_an_axis() -> None:
    usual = np.full(50, 0.5)
    assert axis_top(usual) == pytest.approx(0.55)
    assert axis_top(np.r_[usual, 40.0, np.nan]) == pytest.approx(0.55)
    assert axis_top(np.r_[usual, 1.2]) == pytest.approx(1.32)  # seen well beside the others
    assert axis_top(np.r_[usual, [40.0] * 20]) == pytest.approx(44)  # a part of the run
    assert axis_top(np.r_[[0.0] * 50, 40.0]) == pytest.approx(44)
    assert axis_top(np.array([0.5, 0.5, 40.0])) == pytest.approx(44)


def test_the_diff_is_to_the_recipe_that_was_named_else_to_the_nearest() -> None:
    recipe = load("dit-b-2-256", ["optimizer.lr=3e-4", "data.holdout=0.1"]).model_dump()
    named, nearest = diff_to_shipped(recipe, "dit-b-2-256"), diff_to_shipped(recipe, "mine.toml")
    assert (named.shipped, named.is_nearest) == ("dit-b-2-256", False)
    assert (nearest.shipped, nearest.is_nearest) == ("dit-b-2-256", True)
    assert named.rows == nearest.rows == [("data.holdout", "0", "0.1"), ("optimizer.lr", "0.0001", "0.0003")]
    assert len(diff_to_shipped(recipe, "demo").rows) > 5


def test_a_key_that_is_newer_than_the_run_has_its_default() -> None:
    recipe = load("dit-s-2-256", []).model_dump()
    del recipe["routing"], recipe["run"]["residual"]
    assert diff_to_shipped(recipe, "dit-s-2-256").rows == []


def test_keys_of_one_run_alone_are_shown_as_absent_in_others() -> None:
    assert differing([{"a": 1, "b": True}, {"a": 1, "c": ""}]) == [("b", "true", "-"), ("c", "-", '""')]


@pytest.mark.parametrize(
    ("steps", "quiet", "state"), [(400, 1e6, "finished"), (500, 60, "running"), (500, 1e4, "stopped")]
)
def test_a_run_is_finished_running_or_stopped(steps: int, quiet: float, state: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", f"run.steps={steps}")
    written = (run / "metrics.jsonl").stat().st_mtime
    assert read_run(run, "run", now=written + quiet).state == state


def test_a_run_without_lines_has_not_begun(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "metrics.jsonl").unlink()
    found = read_run(run, "run")
    assert (found.state, found.last_step) == ("not begun", 0)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DamageError, match="no run that trained"):
        read_run(tmp_path, "run")
    (tmp_path / "run.json").write_text('{"recipe": {}, "stores": [{"path": 3}]}')
    with pytest.raises(DamageError, match=r"'stores\.0\.path'"):
        read_run(tmp_path, "run")
