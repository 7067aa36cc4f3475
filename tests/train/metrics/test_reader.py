"""``metrics.jsonl`` by columns, whatever a crash has left in it, and the state of the run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import LINES, LOG_EVERY, make_run, report_line

from leandit.datasets.errors import DamageError
from leandit.train.metrics.reader import read_metrics, smoothed


def test_the_figures_come_as_columns_in_order_of_the_steps(tmp_path: Path) -> None:
    metrics = read_metrics(make_run(tmp_path / "run", change=lambda n, line: line["loss_terms"].update({"align.a": n})))
    assert metrics.steps.tolist() == [n * LOG_EVERY for n in range(1, LINES + 1)]
    assert metrics.columns["loss"][[0, -1]].tolist() == pytest.approx([2 - 1 / LINES, 1.0])
    assert np.isnan(metrics.columns["loss_scale"]).all()
    assert metrics.loss_by_time.shape == (LINES, 10)
    assert metrics.terms["align.a"].tolist() == list(range(1, LINES + 1))
    assert metrics.steps[metrics.is_evaluated].tolist() == [n * LOG_EVERY for n in range(4, LINES + 1, 4)]
    assert np.array_equal(np.isfinite(metrics.columns["held_out.averaged_loss"]), metrics.is_evaluated)
    assert metrics.held_out_by_time.shape == (LINES, 8)
    assert metrics.is_finite.all()
    assert metrics.seconds[-1] == pytest.approx(0.5 * LINES * LOG_EVERY)


def test_the_later_line_of_a_step_counts_and_a_cut_line_does_not(tmp_path: Path) -> None:
    again = report_line(4) | {"loss": 7.0, "held_out": None}
    tail = json.dumps(again) + "\n" + json.dumps(report_line(41))[:50]
    metrics = read_metrics(make_run(tmp_path / "run", tail=tail))
    assert (len(metrics), metrics.num_repeated, metrics.is_cut) == (LINES, 1, True)
    assert metrics.columns["loss"][3] == 7.0
    assert metrics.steps[metrics.is_evaluated][0] == 8 * LOG_EVERY


@pytest.mark.parametrize("line", ["{", "[]", '{"step": "3"}', '{"step": -1}', '{"step": true}', "[" * 100_000, "\0"])
def test_a_line_that_is_not_a_report_is_named(line: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tail=line + "\n")
    with pytest.raises(DamageError, match=f"line {LINES + 1} is not a report"):
        read_metrics(run)


def test_values_of_other_types_are_no_numbers(tmp_path: Path) -> None:
    odd = {"grad_norm": "much", "loss_by_time": 3, "loss_terms": [1], "memory_gib": 10**400, "held_out": {"loss": {}}}
    metrics = read_metrics(make_run(tmp_path / "run", change=lambda n, line: line.update(odd)))
    for column in ("grad_norm", "memory_gib", "held_out.loss"):
        assert np.isnan(metrics.columns[column]).all()
    assert (metrics.loss_by_time.shape, metrics.terms) == ((LINES, 0), {})
    assert not metrics.is_finite.any()


@pytest.mark.parametrize(
    ("steps", "quiet", "state"), [(400, 1e6, "finished"), (500, 60, "running"), (500, 1e4, "stopped")]
)
def test_a_run_is_finished_running_or_stopped(steps: int, quiet: float, state: str, tmp_path: Path) -> None:
    metrics = read_metrics(make_run(tmp_path / "run"))
    assert metrics.state(steps, now=metrics.written + quiet) == state


def test_a_line_that_takes_long_is_waited_for(tmp_path: Path) -> None:
    metrics = read_metrics(make_run(tmp_path / "run", change=lambda n, line: line.update(seconds_per_step=200.0)))
    assert metrics.state(500, now=metrics.written + 1e4) == "running"


def test_a_run_without_a_file_has_not_begun(tmp_path: Path) -> None:
    metrics = read_metrics(tmp_path)
    assert (metrics.state(10), metrics.last_step, len(metrics.seconds)) == ("not begun", 0, 0)


@given(
    st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(float("nan"))), min_size=1, max_size=400),
    st.sampled_from([0.02, 0.1, 0.5]),
)
def test_a_smoothed_line_is_the_mean_of_the_points_around(values: list[float], share: float) -> None:
    y, half = np.array(values), max(1, round(len(values) * share / 2))
    for place, mean in enumerate(smoothed(y, share)):
        known = [value for value in y[max(0, place - half) : place + half + 1] if np.isfinite(value)]
        assert np.isnan(mean) if not known else mean == pytest.approx(np.mean(known), abs=1e-6)
