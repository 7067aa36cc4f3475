"""Each rule warns of the run that breaks it, and of no healthy one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from runs import LINES, LOG_EVERY, Change, make_run, report_line

from leandit.tools.inspection.report.rules import alerts_of
from leandit.tools.inspection.report.run_facts import RunFacts

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
