"""What the planner says of memory is what a real step takes."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from making import CPU
from planner import CASES, Case, measured_apart, measured_peak, planner_job, predicted_peak
from torch.autograd.graph import save_on_cpu

from leandit.datasets.errors import RecipeError, RunError
from leandit.tools.plan import training
from leandit.tools.plan.dry_run import held_bytes
from leandit.tools.plan.memory_tracker import (
    ACTIVATIONS,
    CATEGORIES,
    EMA,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    STATES,
    MemoryTracker,
)
from leandit.tools.plan.scaling import LAUNCH_SECONDS
from leandit.tools.plan.step_memory import StepMemory, StepTrace, step_memory, trace_step
from leandit.tools.plan.strategies import strategies, with_ds_config
from leandit.tools.plan.training import measured_mfu, plan, render
from leandit.tools.plan.workload import TrainingWorkload, workload_at_resolution
from leandit.tools.synthetic.batches import synthetic_batch, synthetic_learner
from leandit.train.config import ParallelSection, load
from leandit.train.models.activation_checkpointing import checkpoint_blocks
from leandit.train.models.build import PIXART_SIZES, build_model
from leandit.train.models.dit import SIZES
from leandit.train.step.train_step import train_step

SIZE, PIXART_SIZE = (3, 192, 3), (2, 4, 48, 2)  # small, yet a kernel's own scratch is nothing beside
SMALL = ["model.num_classes=10", "run.precision=fp32", "run.compile=false", "run.global_batch=8"]


@pytest.fixture(autouse=True, scope="module")
def _traced_once() -> Iterator[None]:
    """Plans of the same step share its trace, which is of one process: whatever ``parallel`` says."""
    traced: dict[str, StepMemory] = {}

    def trace(workload: TrainingWorkload, bucket: str, **settings: Any) -> StepMemory:
        recipe = workload.recipe.model_copy(update={"parallel": ParallelSection()})
        key = repr((dataclasses.replace(workload, recipe=recipe), bucket, settings))
        if key not in traced:
            traced[key] = step_memory(workload, bucket, **settings)
        return traced[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "step_memory", trace)
        yield


@pytest.fixture(autouse=True)
def _small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "S", SIZE)
    monkeypatch.setitem(PIXART_SIZES, "pixart-tiny", PIXART_SIZE)


@functools.cache
def work(name: str = "dit-s-2-256", *overrides: str) -> TrainingWorkload:
    return workload_at_resolution(load(name, [*SMALL, *overrides]), 64)


@functools.cache
def memory(*overrides: str, accumulates: bool = False, device_type: str = "cuda") -> StepMemory:
    it = work("dit-s-2-256", *overrides)
    # Whether it is linear is asked of microbatch 40, below.
    settings: dict[str, Any] = {"accumulates": accumulates, "device_type": device_type, "check_linear": False}
    return step_memory(it, "64x64", autocast=None, **settings)


def test_no_table_of_fake_numbers_stays_with_the_optimizer_of_8_bits() -> None:
    from torchao.optim.subclass_8bit import get_qmap_signed

    trace_step(work("dit-s-2-256", "optimizer.name=adamw8bit"), "64x64", microbatch=2, autocast=None)
    assert (min(get_qmap_signed()), max(get_qmap_signed())) == pytest.approx((-1, 1), abs=0.01)


@pytest.mark.parametrize(
    ("recipe", "microbatch", "count", "change"),
    [
        pytest.param("dit-s-2-256", 4, 1, "run.seed=0", marks=pytest.mark.slow),
        ("dit-s-2-256", 8, 1, "run.activation_checkpointing=true"),
        ("demo", 4, 2, "run.activation_checkpointing=true"),
        pytest.param("demo", 2, 1, "objective.kind=ddpm", marks=pytest.mark.slow),
        ("dit-s-2-256", 2, 1, "optimizer.name=adamw8bit"),
        ("demo", 4, 1, "lora.rank=4"),
    ],
)
def test_the_peak_is_the_one_of_real_steps(
    recipe: str, microbatch: int, count: int, change: str, tmp_path: Path
) -> None:
    job = planner_job(Case(recipe, 128, microbatch, count, (change,)), CPU, tmp_path, *SMALL)
    assert 0.97 < predicted_peak(job) / measured_peak(job) < 1.05


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_peak_of_every_benchmarked_configuration_is_the_one_of_real_steps(
    case: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.undo()  # the published sizes
    job = planner_job(case, CPU, tmp_path)
    assert 0.97 < predicted_peak(job) / measured_apart(job) < 1.05


def test_a_microbatch_that_was_not_traced_lies_on_the_lines() -> None:
    it = work()
    for accumulates in (False, True):
        found = memory(accumulates=accumulates, device_type="cpu")
        for microbatch in (40,):
            traced = trace_step(
                it,
                "64x64",
                microbatch=microbatch,
                autocast=None,
                count=2 if accumulates else 1,
                device_type="cpu",
            )
            assert found.total(microbatch) == pytest.approx(traced.peak(), rel=0.005)


def test_the_states_are_those_of_the_model() -> None:
    learner = synthetic_learner(work().recipe, work().spec, 0, CPU)
    parameters = sum(p.nbytes for p in learner.engine.model.parameters())
    found = memory(device_type="cpu")
    assert found.states[GRADIENTS] == found.states[EMA] == found.states[PARAMETERS] == parameters
    assert found.states[OPTIMIZER] == 2 * parameters + 4 * len(list(learner.engine.model.parameters()))
    assert found.block_bytes * SIZE[0] + found.other_bytes == found.states[PARAMETERS]


def test_frozen_weights_have_no_other_states() -> None:
    it = work("demo", "lora.rank=4")
    with torch.device("meta"):
        model = build_model(it.spec, seed=0)
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    found = trace_step(it, "64x64", microbatch=2, autocast=None, device_type="cpu")
    assert found.states[GRADIENTS] == found.states[EMA] == trained
    assert found.states[OPTIMIZER] == pytest.approx(2 * trained, rel=0.01)
    assert found.states[PARAMETERS] > 5 * trained
    assert held_bytes(it.recipe, model) == pytest.approx(sum(found.states.values()), rel=2e-3)
    made = {one.name: one for one in strategies(found, 4)}
    assert made["ddp"].buffers == trained
    assert made["zero-3, offloaded"].host == (found.states[OPTIMIZER] + 2 * trained) / 4
    planned = plan(it, gpu="H100", num_gpus=1, images=1, run=None)
    assert planned["checkpoint_bytes"] == pytest.approx(4 * trained, rel=0.05)
    assert f"of which {trained / 4e3:.1f} k train" in render(planned)


@pytest.mark.parametrize(
    "change",
    [
        "run.seed=0",
        "ema.kind=power",
        *(pytest.param(f"optimizer.name={name}", marks=pytest.mark.slow) for name in ("came", "adamw8bit")),
    ],
)
def test_a_dry_run_tells_the_bytes_that_the_trace_finds(change: str) -> None:
    it, found = work("dit-s-2-256", change), memory(change, device_type="cpu")
    with torch.device("meta"):
        model = build_model(it.spec, seed=0)
    buffers = sum(b.nbytes for b in model.buffers())
    assert held_bytes(it.recipe, model) + buffers == pytest.approx(sum(found.states.values()), rel=2e-3)


def test_checkpointing_takes_less_and_accumulation_keeps_the_gradients() -> None:
    plain, checkpointed = memory(), memory("run.activation_checkpointing=true")
    assert checkpointed.peak(256)[ACTIVATIONS] < 0.6 * plain.peak(256)[ACTIVATIONS]
    assert memory(accumulates=True).peak(64)[GRADIENTS] == plain.states[GRADIENTS]
    assert plain.peak(64)[GRADIENTS] < 0.1 * plain.states[GRADIENTS]


def test_what_waits_on_the_host_is_what_a_real_step_sends_there(monkeypatch: pytest.MonkeyPatch) -> None:
    it = work("dit-s-2-256", "run.activation_checkpointing=blocks")
    of = [step_memory(it, "64x64", autocast=None, to_host=to) for to in (False, True)]
    stays, waits = (found.peak(256)[ACTIVATIONS] for found in of)
    assert waits < stays - 0.9 * (SIZE[0] - 1) * 256 * 16 * SIZE[1] * 4  # the tokens of all blocks but one
    sent: list[int] = []

    class Counting(save_on_cpu):
        """torch's, with the bytes of each tensor that it takes noted."""

        def __init__(self, **settings: bool) -> None:
            super().__init__(**settings)
            take = self.pack_hook
            self.pack_hook = lambda tensor: (sent.append(tensor.nbytes), take(tensor))[1]

    monkeypatch.setattr("leandit.train.models.activation_checkpointing.save_on_cpu", Counting)
    learner = synthetic_learner(it.recipe, it.spec, 0, CPU)
    checkpoint_blocks(learner.engine.model.blocks, "blocks", to_cpu=True)
    train_step(learner, synthetic_batch(it.store, "64x64", 7, 0, CPU))
    assert (of[0].on_host(7), of[1].on_host(7)) == (0, sum(sent))
    assert sum(sent) > 0


@pytest.mark.slow  # what waits on the host is traced above by default
def test_a_plan_counts_the_activations_of_zero_on_the_host_where_the_file_says_so(tmp_path: Path) -> None:
    def rows(**file: Any) -> dict[str, dict[str, Any]]:
        path = tmp_path / "ds.json"
        path.write_text(json.dumps({"zero_optimization": {"stage": 2}} | file))
        recipe, _ = with_ds_config(
            load("dit-s-2-256", [*SMALL, "run.global_batch=512", f"parallel.deepspeed_config={path}"]), 2
        )
        found = plan(workload_at_resolution(recipe, 64), gpu="H200", num_gpus=2, images=0, run=None)
        return {row["strategy"]: row for row in found["strategies"]}

    stay = rows(activation_checkpointing={"cpu_checkpointing": False})
    wait = rows(activation_checkpointing={"cpu_checkpointing": True})
    for name in ("zero-1", "zero-3", "zero-2, offloaded"):
        assert wait[name]["bytes"][ACTIVATIONS] < stay[name]["bytes"][ACTIVATIONS]
        assert wait[name]["host"] > stay[name]["host"]
    assert (wait["ddp"], wait["fsdp, offloaded"]) == (stay["ddp"], stay["fsdp, offloaded"])


def test_a_bf16_residual_stream_takes_less_memory() -> None:
    it, found = work("dit-s-2-256", "run.precision=bf16"), {}
    for residual in ("float32", "bf16"):
        run = it.recipe.run.model_copy(update={"residual": residual})
        changed = dataclasses.replace(it, recipe=it.recipe.model_copy(update={"run": run}))
        trace = trace_step(changed, "64x64", microbatch=64, autocast=torch.bfloat16)
        found[residual] = trace.moments[:, CATEGORIES.index(ACTIVATIONS)].max()
    assert found["bf16"] < 0.85 * found["float32"]


def test_fp8_is_planned_as_the_bf16_that_it_keeps() -> None:
    plain, eight = (
        trace_step(work("dit-s-2-256", f"run.fp8={fp8}"), "64x64", microbatch=2, autocast=torch.bfloat16)
        for fp8 in ("none", "rowwise")
    )
    assert (eight.moments == plain.moments).all()


def test_the_largest_microbatch_fits_and_the_next_one_does_not() -> None:
    found = memory()
    room = found.total(50) + 1
    assert found.largest(room) == 50
    assert found.largest(room, most=20) == 20
    assert found.largest(sum(found.states[name] for name in STATES) / 2) == 0
    assert found.largest(room, shares={OPTIMIZER: 0.0}) > 50
    assert found.total(51) > room


def test_the_tracker_counts_a_storage_once_and_only_while_it_lives() -> None:
    with MemoryTracker(round_to=512) as tracker:
        one = torch.zeros(100)
        tracker.assign(PARAMETERS, [one])
        two = one.view(10, 10) + 1
        del one
        again = two.t()
    assert tracker.live[PARAMETERS] == 0
    assert tracker.live[ACTIVATIONS] == 512
    del two
    assert tracker.live[ACTIVATIONS] == 512
    del again
    assert tracker.live[ACTIVATIONS] == 0
    assert [sum(moment) for moment in tracker.moments] == [512, 1024]


def test_nothing_fake_is_left_for_those_who_train_afterwards() -> None:
    memory()
    learner = synthetic_learner(work().recipe, work().spec, 0, CPU)
    batch = synthetic_batch(work().store, "64x64", 2, 0, CPU)
    assert torch.isfinite(batch.latents).all()
    assert all(type(p) is torch.nn.Parameter for p in learner.engine.model.parameters())
    trace = train_step(learner, batch)
    assert type(trace.loss) is torch.Tensor
    assert torch.isfinite(trace.loss)
    assert torch.isfinite(trace.grad_norm)


def test_a_plan_says_what_is_asked_for_and_reads_the_buckets_of_a_ds_config(tmp_path: Path) -> None:
    def rows(zero: dict[str, object]) -> dict[str, dict[str, Any]]:
        (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": zero}))
        it = work("dit-s-2-256", f"parallel.deepspeed_config={tmp_path / 'ds.json'}")
        result = plan(it, gpu="H200", num_gpus=2, images=0, run=None, changes=["run.grad_clip  1.0  0.5"])
        assert re.search("\nstrategy    deepspeed with .*\n *run.grad_clip  1.0  0.5\n", render(result))
        return {row["strategy"]: row["bytes"] for row in result["strategies"]}

    small, large = rows({"stage": 2, "reduce_bucket_size": 1000}), rows({"stage": 2, "reduce_bucket_size": 1_001_000})
    for name in ("zero-1", "zero-2", "zero-3", "zero-2, offloaded"):
        assert large[name]["workspace"] - small[name]["workspace"] == 4_000_000
    twice = rows({"stage": 2, "reduce_bucket_size": 1_001_000, "overlap_comm": True})
    assert twice["zero-2"]["workspace"] - large["zero-2"]["workspace"] == 4_004_000
    default = rows({"stage": 2, "reduce_bucket_size": "auto"})
    assert default["zero-2"]["workspace"] - small["zero-2"]["workspace"] == 4 * (500_000_000 - 1000)
    with pytest.raises(RecipeError, match="reduce_bucket_size is '5e8', needed a number"):
        rows({"stage": 2, "reduce_bucket_size": "5e8"})


def test_the_bytes_of_zero_are_written_down() -> None:
    """Four states of 100 and blocks of 10; each term of the rules stands alone in one of the figures."""
    states = {PARAMETERS: 100, GRADIENTS: 100, OPTIMIZER: 200, EMA: 100}
    moments = np.array([[100, 10, 200, 100, 50]])
    trace = StepTrace(moments, states, block_bytes=10, other_bytes=5)
    few_live = {"reduce_bucket_size": 1, "stage3_prefetch_bucket_size": 2, "stage3_max_live_parameters": 10}
    all_live = few_live | {"stage3_max_live_parameters": 1000, "stage3_prefetch_bucket_size": 3}

    def total(name: str, *, accumulates: bool = False, zero: dict[str, int] = few_live) -> float:
        known = {it.name: it for it in strategies(trace, 2, zero, accumulates=accumulates)}
        return trace.peak(known[name].shares) + known[name].buffers

    # weights 100, optimizer 100 and its copy of weights 50, averages 50; a bucket of 4; then backward or update
    assert total("zero-1") == 300 + 4 + max(10 + 50, 150)
    # what is made fills a bucket, and then a buffer for this rank's part of all
    assert total("zero-2") == 300 + 4 + max(4 + 50 + 50, 100)
    assert total("zero-2", zero={"reduce_bucket_size": 5}) == 300 + 20 + max(10 + 50, 100)
    assert total("zero-2", accumulates=True) == 300 + 4 + 50 + max(4 + 50 + 50, 50)
    assert total("zero-2, offloaded") == 100 + 4 + 4 + 50
    # weights, optimizer, averages, activations; bucket, gradients that stay, weights alive, what was gathered last
    assert total("zero-3") == 50 + 150 + 50 + 50 + 4 + 50 + 40 + 8
    assert total("zero-3", zero=all_live) == 50 + 150 + 50 + 50 + 4 + 50 + 100 + 100 % 12
    assert total("ddp") == 100 + 200 + 100 + 50 + 100
    # parts of all; the block that computes, the next one and the buffer that it comes in, and what is in no block
    assert total("fsdp") == (100 + 10 + 200 + 100) / 2 + 50 + 3 * 10 + 5
    assert total("fsdp, gradients") == (100 + 10 + 200 + 100) / 2 + 50 + 100 + 10


def test_a_gpu_without_the_precision_has_dashes_and_cannot_be_planned_for() -> None:
    it = work("dit-s-2-256", "run.precision=bf16")
    result = plan(it, gpu="H200", num_gpus=2, images=0, run=None)
    t4 = next(row for row in result["known_gpus"] if row["gpu"] == "T4")
    assert (t4["microbatch_whole"], t4["seconds"]) == (None, None)
    assert "it has no bf16" in render(result)
    with pytest.raises(RecipeError, match="it has no bf16"):
        plan(it, gpu="T4", num_gpus=2, images=0, run=None)


def test_a_small_model_is_not_promised_more_than_its_launches_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The size of the batch is not in the traces, so each is made once here.
    traced = {accumulates: memory(accumulates=accumulates) for accumulates in (False, True)}
    monkeypatch.setattr(training, "trace_workload", lambda workload, *, accumulates: traced[accumulates])

    def rates(run: Path | None = None, **changes: Any) -> dict[str, dict[str, Any]]:
        it = work("dit-s-2-256", "run.precision=bf16")
        recipe = it.recipe.model_copy(update={"run": it.recipe.run.model_copy(update=changes)})
        result = plan(dataclasses.replace(it, recipe=recipe), gpu="H200", num_gpus=2, images=1000, run=run)
        assert ("bound by launching" in render(result)) == any(row["launch_bound"] for row in result["known_gpus"])
        return {row["gpu"]: row for row in result["known_gpus"]}

    small = rates(global_batch=8)
    operations = 8 / small["H200"]["images_per_second"] / LAUNCH_SECONDS
    assert 100 < operations < 1000  # of a forward, a backward and an update of three blocks
    assert small["H200"]["launch_bound"]
    assert small["B200"]["images_per_second"] == pytest.approx(small["H200"]["images_per_second"], rel=0.02)
    assert small["H200"]["seconds"] == pytest.approx(1000 / small["H200"]["images_per_second"])
    assert rates(global_batch=8, microbatch=2)["H200"]["images_per_second"] < small["H200"]["images_per_second"]
    assert not any(row["launch_bound"] for row in rates(global_batch=2**20).values())

    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "mfu": 0.3}) + "\n")
    assert not rates(tmp_path, global_batch=8)["H200"]["launch_bound"]  # measured, so its launches are in it


def test_pictures_that_are_no_whole_patches_are_refused() -> None:
    with pytest.raises(RunError, match="is not divisible by the patch size"):
        workload_at_resolution(load("dit-s-2-256", SMALL), 250)


def test_a_plan_says_what_each_strategy_and_gpu_takes(tmp_path: Path) -> None:
    result = plan(work(), gpu="NVIDIA A100-SXM4-40GB", num_gpus=4, images=1000, run=None)
    assert result["gpu"] == "A100-40"
    assert not result["mfu_is_measured"]
    rows = {row["strategy"]: row for row in result["strategies"]}
    assert rows["ddp"]["microbatch"] == 2
    parts = rows["ddp"]["bytes"]
    assert sum(parts.values()) == pytest.approx(rows["ddp"]["total"], abs=10)
    assert rows["fsdp"]["bytes"][OPTIMIZER] == pytest.approx(parts[OPTIMIZER] / 4, rel=0.01)
    assert rows["zero-1, offloaded"]["bytes"][OPTIMIZER] == 0 < rows["zero-1, offloaded"]["host"]
    h200 = next(row for row in result["known_gpus"] if row["gpu"] == "H200")
    assert h200["images_per_second"] * h200["seconds"] == pytest.approx(1000)
    assert "an estimate, not measured" in render(result)
    a100 = next(row for row in result["known_gpus"] if row["gpu"] == "A100-40")
    scaled = {row["gpus"]: row for row in result["scaling"]["rows"]}
    assert list(scaled)[:3] == [1, 4, 8]
    assert scaled[4]["images_per_second"] == a100["images_per_second"]
    assert scaled[4]["seconds"] == a100["seconds"]
    assert scaled[16]["seconds"] is None  # a batch of 8
    assert "worth it up to" in render(result)
    slower = plan(work(), gpu="A100-40", num_gpus=16, images=1000, run=None, network_gbit=1)["scaling"]["rows"]
    assert slower[2]["grown_images_per_second"] < scaled[16]["grown_images_per_second"]

    lines = [json.dumps({"step": step, "mfu": mfu}) + "\n" for step, mfu in ((1, 0.1), (2, 0.4))]
    (tmp_path / "metrics.jsonl").write_text("".join([*lines, '{"step": 3, "mf']))  # of a run that was killed
    measured = plan(work(), gpu="H200", num_gpus=1, images=0, run=tmp_path)
    assert (measured["mfu"], measured["images"]) == (0.4, 8 * work().recipe.run.steps)
    assert measured["strategies"][0]["strategy"] == "single"


def test_a_plan_is_refused_where_it_could_only_guess(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="not known"):
        plan(work(), gpu="GTX 1080", num_gpus=1, images=0, run=None)
    with pytest.raises(RecipeError, match="has no MFU"):
        measured_mfu(tmp_path)


@pytest.mark.parametrize(
    ("recipe", "side_px", "tokens"),
    [("dit-xl-2-256", 256, 256), ("lightningdit-xl-1-256", 256, 256), ("sana-1600m-1024", 1024, 1024)],
)
def test_without_a_store_latents_are_those_that_the_model_is_trained_with(
    recipe: str, side_px: int, tokens: int
) -> None:
    found = workload_at_resolution(load(recipe, []), side_px)
    assert found.image_tokens(found.largest_bucket) == tokens


def test_without_a_store_sana_reads_captions_of_gemma() -> None:
    assert workload_at_resolution(load("sana-600m-512", []), 512).spec.caption_width == 2304
