"""Ranks that train together: whatever the strategy, the run is that of one process; who differs or dies is named."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from forked import ForkedPython
from making import train_recipe
from ranks import Job, free_port, run_ranks, start_ranks
from runs import lines, run_to
from safetensors.torch import load_file

from leandit.datasets.store import LatentStore
from leandit.errors import RecipeError
from leandit.train.config import ParallelSection
from leandit.train.parallel.ranks import ALONE, SRUN, Ranks, choose_strategy, read_ranks

STEPS, HALF = 6, 3  # an epoch and a half, of four batches
EXACT = 4e-6  # of losses, in float32
# 15 records in batches of 4, the last of 3: unequal slices, and microbatches of which one rank has fewer.
SETTINGS = [f"run.steps={STEPS}", "run.global_batch=4", "run.microbatch=1", "optimizer.lr=1e-3", "run.log_every=1"]
SETTINGS += [f"run.checkpoint_every={HALF}", "run.keep_checkpoints=3", "schedule.kind=constant"]

pytestmark = pytest.mark.usefixtures("tiny_models")


def job(store: LatentStore, run: Path, *overrides: str, recipe: str = "dit-s-4", **more: Any) -> Job:
    return {"recipe": recipe, "set": [*SETTINGS, *overrides], "store": str(store.path), "run": str(run), **more}


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in lines(run)]


def alone(store: LatentStore | None, run: Path, *overrides: str, recipe: str = "dit-s-4") -> list[float]:
    """Losses of the same training in this process."""
    run_to(train_recipe(recipe, *SETTINGS, *overrides), store, run)
    return losses(run)


FSDP = "parallel.strategy=fsdp"
STRATEGIES = {
    "ddp": ["parallel.strategy=ddp"],
    "fsdp": [FSDP, "run.activation_checkpointing=selective"],
    "fsdp-gradient": [FSDP, "parallel.shard=gradient"],
    "fsdp-offload": [FSDP, "parallel.cpu_offload=true"],
    "hsdp": ["parallel.strategy=hsdp", "parallel.replicas=2"],  # of four ranks, the others of two
}
ZEROS = ("zero-1", "zero-2", "zero-3", "offloaded")
STRATEGIES |= {name: [f"parallel.deepspeed_config={{folder}}/{name}.json"] for name in ZEROS}
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
ON_HOST, AUTO = {"offload_optimizer": {"device": "cpu"}}, {"train_batch_size": "auto"}
ZERO: dict[str, dict[str, Any]] = {
    "zero-1": {"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 2, **AUTO},
    "zero-2": {
        "zero_optimization": {"stage": 2, "stage3_max_reuse_parameters": 1},
        "activation_checkpointing": {"partition_activations": True},
        **ADAMW,
    },
    "zero-3": {"zero_optimization": {"stage": 3, **ON_HOST}, "gradient_clipping": "auto"},
    "offloaded": {"zero_optimization": {"stage": 2, **ON_HOST}, **AUTO, **ADAMW},
    "fp16": {"zero_optimization": {"stage": 2}, "fp16": {"enabled": True}, **ADAMW},
}
# All that looks into the model; alignment stops, so that its projector has gradients of zero at last.
ALIGNED = ["objective.kind=flow", "model.name=DiT-S/1", "align.dino.block=1", "align.dino.projector_width=8"]
ALIGNED += ["align.dino.class_weight=0.03", "align.dino.stop_step=2", "self_align.weight=0.5", "self_align.block=1"]
ALIGNED += ["self_align.teacher_block=2", "self_align.projector_width=8", "routing.kind=sprint", "run.steps=4"]
ALIGNED += ["routing.first_block=2", "routing.last_block=2", "routing.stop_step=3", "routing.path_drop=0.3"]
ALIGNED += ["model.value_residual=true", "objective.contrastive_weight=0.05", "objective.dispersive_weight=0.5"]
ALIGNED += ["objective.dispersive_block=1"]


class Training(NamedTuple):
    """What every strategy must repeat: fixture of its store, recipe, settings, and strategies, few of them quick."""

    store: str
    recipe: str
    settings: list[str]
    strategies: tuple[str, ...]
    quick: tuple[str, ...] = ("fsdp",)


ADAPTERS = ["lora.rank=4", "model.init_from={folder}/frozen", "schedule.warmup_steps=0"]
TWO_GROUPS = ["run.steps=3", "optimizer.weight_decay=0.1", "optimizer.decay_all=false"]
SHARDED = ("ddp", "fsdp", "fsdp-gradient", "fsdp-offload", "hsdp", "zero-2", "zero-3")
TRAININGS = {
    "plain": Training("label_store", "dit-s-4", [], tuple(STRATEGIES)[:-1], ("ddp", "fsdp", "zero-2")),
    "aligned": Training("feature_store", "dit-s-4", ALIGNED, ("ddp", "fsdp", "zero-2")),
    "wide head": Training("label_store", "dit-dh-s", ["run.steps=2"], ("ddp", "fsdp")),
    "adapters": Training("caption_store", "pixart-tiny", [*ADAPTERS, "run.steps=4"], SHARDED),
    "8-bit": Training("caption_store", "pixart-tiny", [*ADAPTERS, "lora.frozen=int8", "run.steps=2"], ("ddp",), ()),
    # Of SD3: two streams, blocks of three shapes, a table of positions that is no parameter; two groups of parameters.
    "two streams": Training("three_text_store", "sd3-tiny", TWO_GROUPS, ("ddp", "fsdp", "offloaded")),
}
# checkpoint of -> resumed with
CHAIN = [("one", "fsdp"), ("fsdp", "ddp")]
MORE = sorted({*permutations(("ddp", "fsdp", "fsdp-offload", "zero-1", "zero-2", "zero-3"), 2)} - {*CHAIN})


def cases(*names: str, strategies: Sequence[str] = ()) -> Any:
    """A test of trainings with their strategies, or those given, of which only some are quick."""
    return pytest.mark.parametrize(
        ("training", "name"),
        [
            pytest.param(training, name, marks=[] if name in TRAININGS[training].quick else [pytest.mark.slow])
            for training in names or TRAININGS
            for name in strategies or TRAININGS[training].strategies
        ],
    )


@pytest.fixture(scope="module")
def one(label_store: LatentStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All steps in one process."""
    run = tmp_path_factory.mktemp("one") / "run"
    alone(label_store, run)
    return run


@pytest.fixture(scope="module")
def folder(caption_store: LatentStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a ds_config.json for each stage of ZeRO, and weights for adapters."""
    made = tmp_path_factory.mktemp("many")
    for name, config in ZERO.items():
        (made / f"{name}.json").write_text(json.dumps(config))
    alone(caption_store, made / "frozen", "run.steps=1", "optimizer.lr=3e-2", "run.ema_decay=0", recipe="pixart-tiny")
    return made


def mixture_of(store: LatentStore) -> str:
    """Two parts of a store, as an override."""
    parts = [f"{{store='{store.path}', labels={of}, weight={weight}}}" for of, weight in (("[0]", 1), ("[1, 2]", 3))]
    return f"data.mixture=[{', '.join(parts)}]"


@pytest.fixture(scope="module")
def job_of(request: pytest.FixtureRequest, folder: Path) -> Callable[..., Job]:
    """The job of a training with a strategy, and more settings."""

    def make(training: str, name: str, *more: str, run: str = "", **other: Any) -> Job:
        store, recipe, settings, *_ = TRAININGS[training]
        overrides = [entry.format(folder=folder) for entry in (*STRATEGIES[name], *settings)]
        path = folder / (run or f"{training} {name}")
        return job(request.getfixturevalue(store), path, *overrides, *more, recipe=recipe, **other)

    return make


@pytest.fixture(scope="module")
def whole(request: pytest.FixtureRequest, one: Path, folder: Path) -> Callable[[str], Path]:
    """The run of a training in one process."""
    runs = {"plain": one}

    def run(training: str) -> Path:
        if training not in runs:
            store, recipe, settings, *_ = TRAININGS[training]
            runs[training], overrides = folder / training, [entry.format(folder=folder) for entry in settings]
            alone(request.getfixturevalue(store), runs[training], *overrides, recipe=recipe)
        return runs[training]

    return run


@pytest.fixture(scope="module")
def said(
    one: Path, job_of: Callable[..., Job], folder: Path, label_store: LatentStore, caption_store: LatentStore
) -> list[list[dict[str, Any]]]:
    """What two ranks do for the quick tests, in one pair of processes; what each said of each job."""
    jobs = [job_of("plain", name) for name in TRAININGS["plain"].quick]
    jobs += [resumed(job_of, was, now, one if was == "one" else folder / f"plain {was}") for was, now in CHAIN]
    jobs.append(job(label_store, folder / "stopped", stop_at=3))
    jobs.append(job(label_store, folder / "stopped"))
    jobs.append(job(label_store, folder / "other rate", set_1=["optimizer.lr=2e-3"]))
    jobs.append(job(label_store, folder / "other store", store_1=str(caption_store.path)))
    jobs += [job_of(training, name) for training, its in TRAININGS.items() if training != "plain" for name in its.quick]
    jobs.append(job(label_store, folder / "mixture", mixture_of(label_store)) | {"store": None})
    fp16 = [f"parallel.deepspeed_config={folder}/fp16.json", "run.checkpoint_every=2"]  # the first before any update
    for steps in (14, 16):
        jobs.append(job(label_store, folder / "fp16", *fp16, f"run.steps={steps}", first_scale=2.0**28))
    jobs.append(job_of("plain", "fsdp", "run.steps=1", run="counted", counts=True))
    return run_ranks(jobs, 2)


def resumed(job_of: Callable[..., Job], was: str, now: str, run: Path) -> Job:
    return job_of("plain", now, run=f"{was} to {now}", begin_with=str(run), begin_at=HALF)


@pytest.fixture(scope="module")
def long_form(said: list[Any], job_of: Callable[..., Job], folder: Path) -> None:
    """What two ranks do in the long form, and four."""
    all_of_them = [(training, name) for training, its in TRAININGS.items() for name in its.strategies]
    others = [(training, name) for training, name in all_of_them if name not in (*TRAININGS[training].quick, "hsdp")]
    others.sort(key=lambda other: other[1] == "zero-3")  # from then on DeepSpeed's linear layers, which take no int8
    jobs = [job_of(*other) for other in others]
    jobs += [resumed(job_of, was, now, folder / f"plain {was}") for was, now in MORE]
    for name in ("ddp", "fsdp"):
        jobs.append(job_of("plain", name, "run.precision=fp16", run=f"fp16 {name}"))
    for name in ("ddp", "fsdp", "zero-1", "zero-3"):  # the last ones: all that follows is bf16
        jobs.append(job_of("plain", name, run=f"bf16 {name}", bf16=True))
    run_ranks(jobs, 2)
    run_ranks([job_of("plain", "zero-2", run="compiled", compiled=True)], 2)
    for world_size in (1, 2):
        run_ranks([job_of("plain", "zero-1", run=f"srun {world_size}")], world_size, SRUN)
    for of_rank in run_ranks([job_of("plain", "hsdp"), job_of("adapters", "hsdp")], 4):
        assert [line["step"] for line in of_rank] == [STEPS, 4]


@pytest.fixture
def trained(request: pytest.FixtureRequest) -> None:
    """The trainings that a test looks at: those of the long form are made for slow tests only."""
    request.getfixturevalue("long_form" if request.node.get_closest_marker("slow") else "said")


@cases()
def test_losses_and_checkpoints_are_those_of_one_process(
    training: str, name: str, whole: Callable[[str], Path], trained: None, folder: Path
) -> None:
    run, wanted = folder / f"{training} {name}", whole(training)
    assert losses(run) == pytest.approx(losses(wanted), abs=EXACT)
    ours, theirs = ([line["loss_terms"] for line in lines(each)] for each in (run, wanted))
    for found, terms in zip(ours, theirs, strict=True):
        assert found == pytest.approx(terms, abs=EXACT)
    if training == "aligned":
        names = {"align.dino", "class.dino", "align.self-alignment", "contrastive", "dispersive"}
        assert ours[0].keys() == names
        assert [terms["align.dino"] > 0 for terms in ours] == [True, True, False, False]
        return
    for kind in (f"checkpoint-{len(ours)}", f"snapshot-{len(ours)}"):  # names, shapes, and values but for rounding
        for path in sorted((wanted / kind).glob("*.safetensors")):
            saved, expected = load_file(run / kind / path.name), load_file(path)
            assert saved.keys() == expected.keys()
            for key, tensor in expected.items():
                torch.testing.assert_close(saved[key], tensor, atol=2e-4, rtol=0)


def test_fp16_under_deepspeed_resumes_with_its_loss_scale(said: list[Any], one: Path, folder: Path) -> None:
    written = lines(folder / "fp16")
    scales, skipped = ([line[key] for line in written] for key in ("loss_scale", "skipped_steps"))
    first = skipped.index(0)  # from 2^28 on, which is far too large, each overflow halves it
    assert first >= 2
    assert skipped[:first] == [1] * first
    assert scales[:first] == [2.0 ** (27 - step) for step in range(first)]
    assert [line["step"] for line in written] == list(range(1, 17))
    assert scales[14] == scales[13] / 2 ** skipped[14], "resumed with the scale of before"
    assert np.isfinite([line["loss"] for line in written]).all()
    assert written[STEPS - 1]["loss"] != pytest.approx(losses(one)[-1], abs=1e-7)
    ema = load_file(folder / "fp16/checkpoint-16/ema.safetensors")
    assert ema.keys() == load_file(one / f"checkpoint-{STEPS}/ema.safetensors").keys()


@pytest.mark.slow
@pytest.mark.usefixtures("long_form")
def test_compiled_blocks_srun_and_16_bits_give_the_same_with_every_strategy(one: Path, folder: Path) -> None:
    for name in ("compiled", "srun 1", "srun 2"):
        assert losses(folder / name) == pytest.approx(losses(one), abs=EXACT)
    for precision, name in (("fp16", "fsdp"), ("bf16", "fsdp"), ("bf16", "zero-1"), ("bf16", "zero-3")):
        wanted = losses(folder / f"{precision} ddp")
        assert len(wanted) == STEPS
        assert wanted != losses(one)
        assert losses(folder / f"{precision} {name}") == pytest.approx(wanted, rel=5e-3)


def test_only_the_first_rank_builds_a_whole_model_that_is_to_be_sharded(said: list[Any]) -> None:
    (whole, part), (nothing, other) = [next(it["weights"] for it in of_rank if "weights" in it) for of_rank in said]
    assert nothing == 0
    assert part + other == whole
    assert other <= 0.52 * whole


def test_what_of_the_file_holds_or_is_passed_over_is_said_by_one_rank(said: list[Any]) -> None:
    warned = [[line["warn"] for line in of_rank if "warn" in line] for of_rank in said]
    assert any("no key 'zero_optimization.stage3_max_reuse_parameters'" in line for line in warned[0])
    assert any(line.split() == ["run.activation_checkpointing", "none", "blocks"] for line in warned[0])
    assert not any("ds_config.json" in line for line in warned[1])


@pytest.mark.parametrize(("was", "now"), [*CHAIN, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in MORE)])
def test_a_checkpoint_resumes_in_another_strategy(was: str, now: str, one: Path, trained: None, folder: Path) -> None:
    assert losses(folder / f"{was} to {now}") == pytest.approx(losses(one)[HALF:], abs=EXACT)


@cases("plain", "adapters", strategies=("fsdp", "hsdp", "zero-3"))
@pytest.mark.usefixtures("trained")
def test_a_sharded_checkpoint_resumes_in_one_process_bit_for_bit_as_often_as_one_likes(
    training: str, name: str, whole: Callable[[str], Path], folder: Path, request: Any, tmp_path: Path
) -> None:
    store, recipe, settings, *_ = TRAININGS[training]
    overrides, found = [entry.format(folder=folder) for entry in settings], []
    for copy in (tmp_path / "0", tmp_path / "1"):
        copy.mkdir()
        shutil.copy(folder / f"{training} {name}/run.json", copy)
        shutil.copytree(folder / f"{training} {name}/checkpoint-{HALF}", copy / f"checkpoint-{HALF}")
        found.append(alone(request.getfixturevalue(store), copy, *overrides, recipe=recipe))
    assert found[0] == found[1]
    assert found[0] == pytest.approx(losses(whole(training))[HALF:], abs=EXACT)


def test_ranks_with_other_settings_or_another_store_are_refused_at_start(said: list[Any], folder: Path) -> None:
    for of_rank in said:
        errors = [line["error"] for line in of_rank if line.get("error")]
        assert errors[0].startswith("rank 1: optimizer.lr is 0.002, that of rank 0 is 0.001. Start all ranks")
        assert "rank 1: " in errors[1]
        assert "root hash is" in errors[1]
        assert len(errors) == 2
    assert not (folder / "other rate").exists()


def test_a_mixture_is_the_same_for_two(said: list[Any], folder: Path, label_store: LatentStore, tmp_path: Path) -> None:
    runs = [folder / "mixture", tmp_path / "run"]
    assert losses(runs[0]) == pytest.approx(alone(None, runs[1], mixture_of(label_store)), abs=EXACT)
    states = [json.loads((run / f"checkpoint-{STEPS}/state.json").read_text()) for run in runs]
    assert states[0]["loader"] == states[1]["loader"]


def test_a_stop_on_one_rank_stops_all_and_the_run_goes_on(one: Path, said: list[Any], folder: Path) -> None:
    jobs = len(TRAININGS["plain"].quick) + len(CHAIN)
    for of_rank in said:
        steps = [line["step"] for line in of_rank if "step" in line]
        assert steps[jobs : jobs + 2] == [4, STEPS]  # known to all a step later
    assert losses(folder / "stopped") == pytest.approx(losses(one), abs=EXACT)


@pytest.mark.parametrize(
    ("settings", "ranks", "message"),
    [
        ({"strategy": "single"}, Ranks(0, 2, 0, 2), "2 ranks were started"),
        ({"strategy": "fsdp"}, ALONE, "there is only one rank. Start more"),
        ({"strategy": "ddp", "cpu_offload": True}, Ranks(0, 2, 0, 2), "keeps everything on the GPU"),
        ({"strategy": "hsdp", "replicas": 3}, Ranks(0, 4, 0, 4), "cannot form 3 equal groups"),
        ({"strategy": "hsdp"}, Ranks(0, 4, 0, 4), "on 1 machines cannot form 1 equal groups"),
        ({"strategy": "deepspeed"}, Ranks(0, 2, 0, 2), "path of a ds_config.json"),
        ({"strategy": "ddp", "deepspeed_config": "x.json"}, Ranks(0, 2, 0, 2), "or neither"),
    ],
)
def test_a_strategy_that_does_not_fit_is_refused(settings: dict[str, Any], ranks: Ranks, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        choose_strategy(ParallelSection(**settings), ranks)


def test_auto_is_one_process_alone_and_ddp_together() -> None:
    for section, ranks, strategy in (
        (ParallelSection(), ALONE, "single"),
        (ParallelSection(), Ranks(0, 2, 0, 2), "ddp"),
        (ParallelSection(deepspeed_config="ds.json"), Ranks(0, 2, 0, 2), "deepspeed"),
    ):
        assert choose_strategy(section, ranks) == strategy


TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
SLURM = {"PROCID": "5", "LOCALID": "1", "STEP_NUM_TASKS": "8", "STEP_TASKS_PER_NODE": "4(x2)"}
MEETING = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}


def test_the_place_is_read_from_the_launcher() -> None:
    for environment in (TORCHRUN, {f"SLURM_{name}": value for name, value in SLURM.items()}):
        ranks = read_ranks(environment | MEETING)
        assert ranks == Ranks(rank=5, world_size=8, local_rank=1, local_world_size=4)
        assert ranks.num_machines == 2
    for environment in ({}, {"WORLD_SIZE": "1", "RANK": "0"}, {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}):
        assert read_ranks(environment) == ALONE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "8"}, "there is no such rank"),
        ({"LOCAL_RANK": "4"}, "there is no such rank"),
        ({"RANK": "one"}, "expected the rank of this process"),
        ({"MASTER_PORT": None}, "MASTER_PORT is not set"),
    ],
)
def test_an_environment_that_says_nonsense_is_refused(changes: dict[str, str | None], message: str) -> None:
    environment = {k: v for k, v in (TORCHRUN | MEETING | changes).items() if v is not None}
    with pytest.raises(RecipeError, match=message):
        read_ranks(environment)


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_killed_rank_ends_the_others_soon(victim: int, label_store: LatentStore, tmp_path: Path) -> None:
    """Without a launcher that would end them."""
    ranks = start_ranks([job(label_store, tmp_path / "run", "run.steps=100000")], 2)
    wait_for(tmp_path / "run/metrics.jsonl", ranks)
    ranks[victim].kill()
    out, _ = ranks[1 - victim].communicate(timeout=240)  # a collective alone waits for half an hour
    (error,) = [json.loads(line)["error"] for line in out.splitlines() if '"error"' in line]
    assert "lost the connection to another rank" in error
    assert "run the same command again" in error
    ranks[victim].communicate()


def test_a_rank_that_fails_alone_ends_the_others(label_store: LatentStore, tmp_path: Path) -> None:
    ranks = start_ranks([job(label_store, tmp_path / "run", "run.steps=100000", fail_1=5)], 2)
    ended = [rank.communicate(timeout=240) for rank in ranks]
    assert "lost the connection to another rank" in ended[0][0]
    assert ranks[1].returncode in (1, -signal.SIGABRT)  # gloo's threads may abort a process that ends with an error
    assert "ValueError: a disk that is full" in ended[1][1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "reason"),
    [("dit-s-2-256", "no such folder. Create it"), ("no-such-recipe", "neither a file nor a shipped recipe")],
)
def test_under_torchrun_an_error_of_all_ranks_is_printed_once(recipe: str, reason: str, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    train = ["-m", "leandit.tools.cli.main", "train", recipe, "--store", tmp_path / "none", "--run", tmp_path / "run"]
    command = [*launch, "--no-python", "--", sys.executable, *map(str, train), "--device", "cpu"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode
    (said,) = [line for line in ended.stderr.splitlines() if line.startswith("leandit: rank ")]
    assert reason in said
    assert "typer" not in ended.stderr  # torchrun's summary has the message, not our traceback


def wait_for(path: Path, ranks: list[ForkedPython]) -> None:
    """Until a file has content."""
    deadline = time.monotonic() + 120
    while not (path.is_file() and path.stat().st_size):
        assert time.monotonic() < deadline, [rank.poll() for rank in ranks]
        time.sleep(0.1)
