"""What the planner says of memory is what a real step takes."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked import fork_interpreters, run_forked
from making import CPU, shrink_models
from planner import CASES, Case, measured_peak, planner_job, predicted_peak
from runs import report_line

from leandit.errors import RecipeError, RunError
from leandit.tools.plan import step_memory
from leandit.tools.plan.scaling import LAUNCH_SECONDS
from leandit.tools.plan.step_memory import (
    ACTIVATIONS,
    EMA,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    STATES,
    Strategy,
    Traced,
    TraceError,
    TraceRequest,
    run_trace,
    trace_steps,
)
from leandit.tools.plan.strategies import SINGLE, with_ds_config
from leandit.tools.plan.synthetic import synthetic_run
from leandit.tools.plan.tracing import check_line
from leandit.tools.plan.training import measured_mfu, plan, render
from leandit.tools.plan.workload import TrainingWorkload, workload_at_resolution
from leandit.train.config import load

ADAMW = "optimizer.name=adamw"  # the demo takes Muon
SMALL = ["model.num_classes=10", "run.precision=fp32", "run.compile=false", "run.global_batch=8"]
DIT = "dit-s-2-256"  # where blocks take most; in the demo captions do


MEASURE = """
import json, sys, pytest
from making import shrink_models
from planner import measured_peak
shrink_models(pytest.MonkeyPatch())
print(measured_peak(json.loads(sys.argv[1])))
"""


def measured_apart(job: dict[str, Any]) -> int:
    """``measured_peak`` in a process of its own, which may join a process group."""
    return int(run_forked(["-c", MEASURE, json.dumps(job)], check=True).stdout.split()[-1])  # DeepSpeed prints too


@pytest.fixture(autouse=True, scope="module")
def _traced_once() -> Iterator[None]:
    """Plans of the same step share its trace, which does not depend on the size of the batch."""
    traces: dict[str, Traced] = {}

    def traced_once(request: TraceRequest) -> Traced:
        recipe = request.workload.recipe
        recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update={"global_batch": 8})})
        key = repr(dataclasses.replace(request, workload=dataclasses.replace(request.workload, recipe=recipe)))
        if key not in traces:
            traces[key] = run_trace(request)
        return traces[key]

    with pytest.MonkeyPatch.context() as patch:
        shrink_models(patch)
        fork_interpreters(step_memory, patch, shrunk=True)
        patch.setattr(step_memory, "run_trace", traced_once)
        yield


@functools.cache
def work(*overrides: str, name: str = "demo") -> TrainingWorkload:
    return workload_at_resolution(load(name, [*SMALL, ADAMW, *overrides]), 64)


def traced(*overrides: str, name: str = "demo", device_type: str = "cuda", strategy: Strategy = SINGLE) -> Traced:
    it = work(*overrides, name=name)
    known = [SINGLE] if strategy is SINGLE else [SINGLE, strategy]
    return trace_steps(it, "64x64", known, precision=it.recipe.run.precision, device_type=device_type)[strategy.name]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("dit-s-2-256", 128, 4, 1, ("run.seed=0",)), marks=pytest.mark.slow),
        Case("dit-s-2-256", 128, 8, 1, ("run.activation_checkpointing=true",)),
        pytest.param(Case("demo", 128, 4, 2, (ADAMW, "run.activation_checkpointing=true")), marks=pytest.mark.slow),
        pytest.param(Case("demo", 128, 2, 1, (ADAMW, "objective.kind=ddpm")), marks=pytest.mark.slow),
        pytest.param(Case("dit-s-2-256", 128, 2, 1, ("optimizer.name=adamw8bit",)), marks=pytest.mark.slow),
        pytest.param(Case("demo", 128, 4, 1, (ADAMW, "lora.rank=4")), marks=pytest.mark.integration),
    ],
    ids=str,
)
def test_the_peak_is_the_one_of_real_steps(case: Case, tmp_path: Path) -> None:
    job = planner_job(case, CPU, tmp_path, *SMALL)
    assert 0.97 < predicted_peak(job) / measured_peak(job) < 1.05


OF_TWO_RANKS = ("ddp", 2), ("zero-1", 1), ("zero-2", 1), ("zero-3", 1)


@pytest.mark.parametrize(
    ("strategy", "microbatches"), [("fsdp", 1), *(pytest.param(*one, marks=pytest.mark.slow) for one in OF_TWO_RANKS)]
)
def test_the_peak_of_one_of_several_ranks_is_the_real_one(strategy: str, microbatches: int, tmp_path: Path) -> None:
    """With several microbatches DDP has the gradients twice: in its buckets, and summed outside until the last one."""
    case = Case("demo", 128, 4, microbatches, (ADAMW,), strategy=strategy, ranks=2)
    job = planner_job(case, CPU, tmp_path, *SMALL)
    assert 0.97 < predicted_peak(job) / measured_apart(job) < 1.05


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_peak_of_every_benchmarked_configuration_is_the_one_of_real_steps(case: Case, tmp_path: Path) -> None:
    job = planner_job(case, CPU, tmp_path)
    assert 0.97 < predicted_peak(job) / measured_apart(job) < 1.05


def test_the_states_are_those_of_the_model_and_as_many_images_fit_as_there_is_room_for() -> None:
    learner = synthetic_run(work().recipe, work().spec, work().tokens, CPU)
    parameters = list(learner.engine.model.parameters())
    found, num_bytes = traced(device_type="cpu").whole, sum(p.nbytes for p in parameters)
    assert found.states[GRADIENTS] == found.states[EMA] == found.states[PARAMETERS] == num_bytes
    assert found.states[OPTIMIZER] == 2 * num_bytes + 4 * len(parameters)
    in_blocks = sum(p.nbytes for block in learner.engine.model.blocks for p in block.parameters())
    assert found.outside_blocks == num_bytes - in_blocks
    room = found.total(50) + 1
    assert (found.largest(room), found.largest(room, most=20)) == (50, 20)
    assert found.largest(sum(found.states[name] for name in STATES) / 2) == 0
    assert found.offloaded((OPTIMIZER,)).total(50) == found.total(50) - found.states[OPTIMIZER]
    assert found.total(51) > room


@pytest.mark.integration
def test_checkpointing_takes_less_and_accumulation_keeps_the_gradients() -> None:
    plain, checkpointed = (traced(*kept, name=DIT) for kept in ([], ["run.activation_checkpointing=blocks"]))
    assert checkpointed.whole.peak(256)[ACTIVATIONS] < 0.6 * plain.whole.peak(256)[ACTIVATIONS]
    assert plain.split.peak(64)[GRADIENTS] >= plain.whole.states[GRADIENTS]
    assert plain.whole.peak(64)[GRADIENTS] < 0.2 * plain.whole.states[GRADIENTS]


def test_a_trace_that_fails_says_so() -> None:
    with pytest.raises(TraceError, match=r"exited with 1: .*KeyError"):
        run_trace(TraceRequest(work(), "64x64", "fp32", "abacus", SINGLE))
    memory = traced().whole
    check_line("64x64", memory, round(memory.total(5)))
    with pytest.raises(TraceError, match="The memory of other microbatches is unknown"):
        check_line("64x64", memory, round(1.02 * memory.total(5)))


@pytest.mark.slow  # what waits on the host is traced above by default
def test_a_plan_of_deepspeed_reads_the_file_and_shows_what_it_changes_and_every_stage(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    path = tmp_path / "ds.json"

    def planned(**zero: object) -> dict[str, Any]:
        path.write_text(json.dumps({"zero_optimization": {"stage": 2} | zero}))
        recipe, _ = with_ds_config(load("demo", [*SMALL, ADAMW, f"parallel.deepspeed_config={path}"]), 2)
        how: dict[str, Any] = {"gpu": "H200", "num_gpus": 2, "images": 0, "run": None}
        return plan(workload_at_resolution(recipe, 64), **how, changes=["run.grad_clip  1.0  0.5"])

    found = planned(reduce_bucket_size=1000)
    assert re.search("\nstrategy    deepspeed with .*\n *run.grad_clip  1.0  0.5\n", render(found))
    rows = {row["strategy"]: row for row in found["strategies"]}
    assert {"zero-1", "zero-2", "zero-3", "zero-2, offloaded"} <= rows.keys()
    assert rows["zero-2, offloaded"]["host"] > rows["zero-2"]["host"] == 0
    assert rows["zero-2, offloaded"]["total"] < rows["zero-2"]["total"]
    with pytest.raises(RecipeError, match="reduce_bucket_size"):
        planned(reduce_bucket_size="many")


@pytest.mark.slow
def test_a_gpu_without_the_precision_has_dashes_and_cannot_be_planned_for() -> None:
    it = work("run.precision=bf16")
    result = plan(it, gpu="H200", num_gpus=2, images=0, run=None)
    t4 = next(row for row in result["known_gpus"] if row["gpu"] == "T4")
    assert (t4["microbatch_whole"], t4["seconds"]) == (None, None)
    assert "the GPU has no bf16" in render(result)
    with pytest.raises(RecipeError, match="it has no bf16"):
        plan(it, gpu="T4", num_gpus=2, images=0, run=None)


@pytest.mark.integration
def test_a_small_model_is_not_promised_more_than_its_launches_allow(tmp_path: Path) -> None:
    def rates(run: Path | None = None, **changes: Any) -> dict[str, dict[str, Any]]:
        it = work("run.precision=bf16")
        recipe = it.recipe.model_copy(update={"run": it.recipe.run.model_copy(update=changes)})
        result = plan(dataclasses.replace(it, recipe=recipe), gpu="H200", num_gpus=2, images=1000, run=run)
        assert ("bound by launching" in render(result)) == any(row["launch_bound"] for row in result["known_gpus"])
        return {row["gpu"]: row for row in result["known_gpus"]}

    small = rates(global_batch=8)
    operations = 8 / small["H200"]["images_per_second"] / LAUNCH_SECONDS
    assert 100 < operations < 3000  # of a forward, a backward and an update of a few blocks
    assert small["H200"]["launch_bound"]
    assert small["B200"]["images_per_second"] == pytest.approx(small["H200"]["images_per_second"], rel=0.02)
    assert small["H200"]["seconds"] == pytest.approx(1000 / small["H200"]["images_per_second"])
    assert not any(row["launch_bound"] for row in rates(global_batch=2**20).values())

    (tmp_path / "metrics.jsonl").write_text(json.dumps(report_line(1) | {"mfu": 0.3}) + "\n")
    assert not rates(tmp_path, global_batch=8)["H200"]["launch_bound"]  # measured, so its launches are in it


def test_a_plan_says_what_each_strategy_and_gpu_takes(tmp_path: Path) -> None:
    result = plan(work(), gpu="NVIDIA A100-SXM4-40GB", num_gpus=4, images=1000, run=None)
    assert result["gpu"] == "A100-40"
    assert not result["mfu_is_measured"]
    rows = {row["strategy"]: row for row in result["strategies"]}
    assert rows["ddp"]["microbatch"] == 2
    parts = rows["ddp"]["bytes"]
    assert sum(parts.values()) == pytest.approx(rows["ddp"]["total"], abs=10)
    assert rows["fsdp"]["bytes"][OPTIMIZER] == pytest.approx(parts[OPTIMIZER] / 4, rel=0.12)  # rounded up
    assert rows["fsdp, offloaded"]["bytes"][OPTIMIZER] == 0 < rows["fsdp, offloaded"]["host"]
    assert rows["hsdp"]["total"] == rows["fsdp"]["total"]  # of one machine
    h200 = next(row for row in result["known_gpus"] if row["gpu"] == "H200")
    assert h200["images_per_second"] * h200["seconds"] == pytest.approx(1000)
    assert "estimated from published trainers" in render(result)
    a100 = next(row for row in result["known_gpus"] if row["gpu"] == "A100-40")
    scaled = {row["gpus"]: row for row in result["scaling"]["rows"]}
    assert list(scaled)[:3] == [1, 4, 8]
    assert scaled[4]["images_per_second"] == a100["images_per_second"]
    assert scaled[4]["seconds"] == a100["seconds"]
    assert scaled[16]["seconds"] is None  # a batch of 8
    assert all(0 < row["of_linear"] <= 1 for row in scaled.values() if row["of_linear"])
    assert scaled[1]["of_linear"] == 1
    assert not any(name.startswith("zero") for name in rows)  # the recipe has no ds_config.json
    run, states = work().recipe.run, traced().whole.states
    saved = -(-run.steps // run.checkpoint_every)
    one = states[GRADIENTS] + states[OPTIMIZER] + states[EMA]
    assert result["run_bytes"] == min(saved, run.keep_checkpoints + 1) * one + saved * states[GRADIENTS]
    assert "of checkpoints and snapshots at the end" in render(result)

    lines = [json.dumps(report_line(number) | {"mfu": mfu}) + "\n" for number, mfu in ((1, 0.1), (2, 0.4))]
    (tmp_path / "metrics.jsonl").write_text("".join([*lines, '{"step": 3, "mf']))  # of a run that was killed
    measured = plan(work(), gpu="H200", num_gpus=1, images=0, run=tmp_path)
    assert (measured["mfu"], measured["images"]) == (0.4, 8 * work().recipe.run.steps)
    assert measured["strategies"][0]["strategy"] == "single"
    with pytest.raises(RecipeError, match="not known"):
        plan(work(), gpu="GTX 1080", num_gpus=1, images=0, run=None)
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(RecipeError, match="has no MFU"):
        measured_mfu(tmp_path)


def test_without_a_store_sizes_are_those_that_the_model_is_trained_with() -> None:
    for recipe, side_px, tokens, width in (
        ("dit-xl-2-256", 256, 256, 0),
        ("lightningdit-xl-1-256", 256, 256, 0),
        ("sana-1600m-1024", 1024, 1024, 2304),
    ):
        found = workload_at_resolution(load(recipe, []), side_px)
        assert found.image_tokens(found.largest_bucket) == tokens
        assert found.spec.caption_width == width
    with pytest.raises(RunError, match="is not divisible by the patch size"):
        workload_at_resolution(load("dit-s-2-256", SMALL), 250)
