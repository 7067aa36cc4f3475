"""Training: resuming bit for bit, what is refused, and what a run writes."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from making import CPU, label_recipe, make_class_folder, no_progress, train_recipe, tree_digest
from safetensors.torch import load_file

from leandit.datasets.errors import LeanditError, RecipeError, RunError, StoreIncomplete
from leandit.datasets.store import LatentStore
from leandit.precompute.pipeline import precompute
from leandit.train import checkpoint
from leandit.train.config import ScheduleSection, TrainRecipe
from leandit.train.ema import Ema
from leandit.train.loop import Outcome, StopRequest, train
from leandit.train.meters import StepReport
from leandit.train.optimizers import learning_rate

MODELS = ("dit-s-4", "pixart-tiny")
EVERY = "run.checkpoint_every=1"


pytestmark = pytest.mark.usefixtures("tiny_models")


@pytest.fixture(scope="module")
def stores(label_store: LatentStore, caption_store: LatentStore) -> dict[str, Path]:
    """Store of each model."""
    return {"dit-s-4": label_store.path, "pixart-tiny": caption_store.path}


def run_to(
    recipe: TrainRecipe, store: Path, run: Path, *, stop_at: int | None = None
) -> tuple[Outcome, list[StepReport]]:
    """Train; with ``stop_at``, ask to stop while that step is reported."""
    stop, seen = StopRequest(), []

    def report(figures: StepReport) -> None:
        seen.append(figures)
        if figures.step == stop_at:
            stop.set()

    return train(recipe, store_path=store, run=run, device=CPU, report=report, stop=stop), seen


def constant(name: str, *overrides: str) -> TrainRecipe:
    return train_recipe(name, "schedule.kind=constant", "schedule.warmup_steps=2", *overrides)


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint and its snapshot."""
    files = [*(run / f"checkpoint-{step}").glob("*.safetensors"), *(run / f"snapshot-{step}").glob("*.safetensors")]
    assert files
    return {f"{path.parent.name}/{path.name}/{n}": t for path in files for n, t in load_file(path).items()}


def assert_equal_bits(one: Path, other: Path, step: int) -> None:
    first, second = weights(one, step), weights(other, step)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    states = [json.loads((run / f"checkpoint-{step}/state.json").read_text()) for run in (one, other)]
    assert position(states[0]["loader"]) == position(states[1]["loader"])
    assert states[0]["num_images"] == states[1]["num_images"]
    assert metrics(one) == metrics(other)


def position(loader: dict[str, Any]) -> list[tuple[int, int]]:
    """(epoch, batch) wherever the loader's state holds it; torchdata's own counters beside it may differ."""
    found = [(loader["epoch"], loader["index"])] if "index" in loader else []
    return found + [place for value in loader.values() if isinstance(value, dict) for place in position(value)]


def metrics(run: Path) -> list[tuple[int, int, int, float, float, float]]:
    """What must be equal of the lines of metrics.jsonl."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(m["step"], m["num_images"], m["epoch"], m["loss"], m["grad_norm"], m["learning_rate"]) for m in lines]


@pytest.fixture(scope="module")
def whole(stores: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Six steps in one go, a checkpoint at each, for both models."""
    runs = {}
    for name in MODELS:
        runs[name] = tmp_path_factory.mktemp("whole") / "run"
        recipe = constant(name, EVERY, "run.keep_checkpoints=10")
        assert run_to(recipe, stores[name], runs[name])[0].finished
    return runs


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])
def test_resuming_at_any_step_gives_the_bits_of_one_go(
    name: str, step: int, whole: dict[str, Path], stores: dict[str, Path], tmp_path: Path
) -> None:
    first, _ = run_to(constant(name, f"run.steps={step}"), stores[name], tmp_path / "run")
    assert (first.step, first.finished) == (step, True)
    second, seen = run_to(constant(name), stores[name], tmp_path / "run")
    assert (second.first_step, second.step, second.finished) == (step + 1, 6, True)
    assert [figures.step for figures in seen] == list(range(step + 1, 7))
    assert_equal_bits(whole[name], tmp_path / "run", 6)


@pytest.mark.parametrize("name", MODELS)
def test_a_run_that_was_stopped_twice_gives_the_bits_of_one_go(
    name: str, whole: dict[str, Path], stores: dict[str, Path], tmp_path: Path
) -> None:
    recipe = constant(name, "run.checkpoint_every=100")
    for stop_at in (2, 4):  # ends of epochs
        outcome, _ = run_to(recipe, stores[name], tmp_path / "run", stop_at=stop_at)
        assert (outcome.step, outcome.finished) == (stop_at, False)
    assert run_to(recipe, stores[name], tmp_path / "run")[0].finished
    assert_equal_bits(whole[name], tmp_path / "run", 6)


def test_a_crash_loses_only_the_steps_after_its_checkpoint_and_repeats_no_line(
    whole: dict[str, Path], stores: dict[str, Path], tmp_path: Path
) -> None:
    class Crash(Exception):
        pass

    def report(figures: StepReport) -> None:
        if figures.step == 5:
            raise Crash

    recipe, run, store = constant("dit-s-4", "run.checkpoint_every=3"), tmp_path / "run", stores["dit-s-4"]
    with pytest.raises(Crash):
        train(recipe, store_path=store, run=run, device=CPU, report=report, stop=StopRequest())
    assert [line[0] for line in metrics(run)] == [1, 2, 3, 4, 5]
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "num_ima')  # cut off by the crash
    outcome, seen = run_to(recipe, store, run)
    assert (outcome.first_step, [figures.step for figures in seen]) == (4, [4, 5, 6])
    assert_equal_bits(whole["dit-s-4"], run, 6)


def test_a_finished_run_does_nothing(stores: dict[str, Path], tmp_path: Path) -> None:
    recipe, run = train_recipe("dit-s-4", "run.steps=1"), tmp_path / "run"
    run_to(recipe, stores["dit-s-4"], run)
    before = tree_digest(run)
    outcome, seen = run_to(recipe, stores["dit-s-4"], run)
    assert (outcome.first_step, outcome.finished, seen) == (None, True, [])
    assert tree_digest(run) == before


@pytest.mark.parametrize("microbatch", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_accumulating_gradients_changes_only_rounding(
    name: str, microbatch: int, stores: dict[str, Path], tmp_path: Path
) -> None:
    runs = []
    for size in (0, microbatch):
        # Two steps of plain descent directions: AdamW would blow the rounding of a tiny gradient up to its sign.
        recipe = train_recipe(name, f"run.microbatch={size}", "run.steps=3", "optimizer.lr=1e-5")
        runs.append(tmp_path / str(size))
        run_to(recipe, stores[name], runs[-1])
    for one, other in zip(metrics(runs[0]), metrics(runs[1]), strict=True):
        assert one[:3] == other[:3]
        assert one[3:] == pytest.approx(other[3:], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_falls(name: str, stores: dict[str, Path], tmp_path: Path) -> None:
    recipe = train_recipe(
        name, "objective.kind=flow", "run.steps=30", "optimizer.lr=3e-3", "run.log_every=10", "run.checkpoint_every=60"
    )
    outcome, _ = run_to(recipe, stores[name], tmp_path / "run")
    assert outcome.losses is not None
    assert outcome.losses[1] < 0.9 * outcome.losses[0]


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        (["optimizer.lr=2e-3"], "optimizer.lr"),
        (["run.seed=1"], "run.seed"),
        (["run.global_batch=4"], "run.global_batch"),
        (["run.ema_decay=0.5"], "run.ema_decay"),
        (["objective.kind=flow"], "objective.kind"),
        (["conditioning.drop=0.2"], "conditioning.drop"),
        (["model.name=DiT-S/2"], "model.name"),
        (["optimizer.betas=[0.9, 0.95]"], "optimizer.betas"),
    ],
)
def test_going_on_with_another_recipe_is_refused_and_names_the_field(
    changed: list[str], field: str, whole: dict[str, Path], stores: dict[str, Path]
) -> None:
    before = tree_digest(whole["dit-s-4"])
    with pytest.raises(RunError, match=field):
        run_to(constant("dit-s-4", *changed), stores["dit-s-4"], whole["dit-s-4"])
    assert tree_digest(whole["dit-s-4"]) == before


def test_going_on_with_another_store_is_refused(whole: dict[str, Path], tmp_path: Path) -> None:
    other = make_class_folder(tmp_path / "pictures", per_class=4)
    precompute(label_recipe(), source_path=other, store_path=tmp_path / "s", device=CPU, progress=no_progress)
    with pytest.raises(RunError, match="root_hash"):
        run_to(constant("dit-s-4", EVERY, "run.keep_checkpoints=10"), tmp_path / "s", whole["dit-s-4"])


def test_going_on_with_a_moved_store_is_allowed(stores: dict[str, Path], tmp_path: Path) -> None:
    run_to(train_recipe("dit-s-4", "run.steps=1"), stores["dit-s-4"], tmp_path / "run")
    shutil.copytree(stores["dit-s-4"], tmp_path / "moved")
    outcome, _ = run_to(constant_steps(2), tmp_path / "moved", tmp_path / "run")
    assert (outcome.first_step, outcome.step) == (2, 2)
    assert json.loads((tmp_path / "run/run.json").read_text())["store"] == "../moved"


def constant_steps(steps: int, *overrides: str) -> TrainRecipe:
    return train_recipe("dit-s-4", f"run.steps={steps}", *overrides)


def test_more_steps_may_be_asked_for_with_a_constant_rate_but_not_with_a_cosine(
    stores: dict[str, Path], tmp_path: Path
) -> None:
    store = stores["dit-s-4"]
    for kind in ("constant", "cosine"):
        assert run_to(constant_steps(2, f"schedule.kind={kind}"), store, tmp_path / kind)[0].step == 2
    outcome, _ = run_to(constant_steps(3, "schedule.kind=constant"), store, tmp_path / "constant")
    assert (outcome.first_step, outcome.step) == (3, 3)
    with pytest.raises(RunError, match=r"run\.steps"):
        run_to(constant_steps(3, "schedule.kind=cosine"), store, tmp_path / "cosine")


def test_a_folder_with_something_else_is_refused_and_left_alone(stores: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/thesis.txt").write_text("do not touch")
    with pytest.raises(RunError, match="not empty"):
        run_to(train_recipe(), stores["dit-s-4"], tmp_path / "run")
    assert tree_digest(tmp_path / "run") == {"thesis.txt": b"do not touch"}


def test_an_incomplete_store_is_refused_unless_allowed(stores: dict[str, Path], tmp_path: Path) -> None:
    store, run = tmp_path / "store", tmp_path / "run"
    shutil.copytree(stores["dit-s-4"], store)
    (store / "manifest.json").unlink()
    with pytest.raises(StoreIncomplete):
        run_to(constant_steps(1), store, run)
    assert not run.exists()
    outcome, _ = run_to(constant_steps(1, "run.allow_incomplete=true"), store, run)
    assert outcome.finished


def test_metrics_have_their_keys_with_units_and_one_line_a_report(stores: dict[str, Path], tmp_path: Path) -> None:
    run_to(constant_steps(5, "run.log_every=2", "run.checkpoint_every=100"), stores["dit-s-4"], tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 5]
    assert all(
        line.keys()
        == {
            "step",
            "num_images",
            "epoch",
            "loss",
            "grad_norm",
            "learning_rate",
            "seconds_per_step",
            "images_per_second",
            "data_wait_share",
        }
        for line in lines
    )
    # 15 records in batches of 8: epochs of 8 + 7 images in some order, so 15 after two steps and 30 after four.
    assert [line["num_images"] for line in lines[:2]] == [15, 30]
    assert all(0 <= line["data_wait_share"] <= 1 and line["images_per_second"] > 0 for line in lines)


@pytest.mark.parametrize("log_every", [1, 100])
def test_a_loss_that_is_not_finite_stops_the_run_and_nothing_of_it_is_saved(
    log_every: int, stores: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from leandit.train import loop

    calls = []

    def spoil(*args: object) -> torch.Tensor:
        calls.append(1)
        loss = loss_per_image(*args)
        return loss * float("nan") if len(calls) >= 3 else loss

    loss_per_image = loop.loss_per_image
    monkeypatch.setattr(loop, "loss_per_image", spoil)
    recipe = constant_steps(6, EVERY, "run.keep_checkpoints=10", f"run.log_every={log_every}")
    with pytest.raises(RunError, match="loss is nan"):
        run_to(recipe, stores["dit-s-4"], tmp_path / "run")
    saved = [path.name for kind in ("checkpoint", "snapshot") for path in checkpoint.find(kind, tmp_path / "run")]
    assert saved == ["checkpoint-1", "checkpoint-2", "snapshot-1", "snapshot-2"]
    assert all(tensor.isfinite().all() for step in (1, 2) for tensor in weights(tmp_path / "run", step).values())


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run.precision=fp16", "fp16"),
        ("parallel.strategy=deepspeed", "deepspeed"),
        ("parallel.strategy=fsdp", "fsdp"),
        ("parallel.deepspeed_config=ds.json", "ds.json"),
        ("model.init_from=facebook/DiT-XL-2-256", "init_from"),
        ("optimizer.name=came", "came"),
        ("optimizer.name=muon", "muon"),
    ],
)
def test_what_this_release_does_not_have_is_refused(
    override: str, words: str, stores: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=words):
        run_to(constant_steps(1, override), stores["dit-s-4"], tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_several_processes_are_refused(
    stores: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RecipeError, match="WORLD_SIZE is 2"):
        run_to(constant_steps(1), stores["dit-s-4"], tmp_path / "run")


def test_a_missing_store_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(LeanditError, match="nowhere"):
        run_to(constant_steps(1), tmp_path / "nowhere", tmp_path / "run")


@pytest.mark.parametrize(
    ("kind", "warmup", "step", "share"),
    [
        ("constant", 0, 1, 1.0),
        ("constant", 10, 1, 0.1),
        ("constant", 10, 10, 1.0),
        ("constant", 10, 90, 1.0),
        ("cosine", 10, 5, 0.5),
        ("cosine", 10, 10, 1.0),
        ("cosine", 10, 60, 0.5),
        ("cosine", 10, 35, 0.5 * (1 + math.cos(math.pi / 4))),
        ("cosine", 10, 110, 0.0),
        ("cosine", 0, 110, 0.0),
        ("cosine", 110, 110, 1.0),
    ],
)
def test_the_learning_rate_is_warm_up_then_constant_or_cosine(kind: str, warmup: int, step: int, share: float) -> None:
    schedule = ScheduleSection.model_validate({"kind": kind, "warmup_steps": warmup})
    assert learning_rate(3e-4, schedule, step, steps=110) == pytest.approx(3e-4 * share, abs=1e-12)


def test_the_average_follows_its_formula() -> None:
    model = torch.nn.Linear(3, 2)
    ema, wanted = Ema(model, 0.9), {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(5):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step)))
        ema.update(model)
        wanted = {name: 0.9 * wanted[name] + 0.1 * p.detach() for name, p in model.named_parameters()}
    for name, value in ema.state_dict().items():
        torch.testing.assert_close(value, wanted[name])


def test_only_the_newest_checkpoints_are_kept_and_every_snapshot(stores: dict[str, Path], tmp_path: Path) -> None:
    run_to(constant_steps(4, EVERY, "run.keep_checkpoints=2"), stores["dit-s-4"], tmp_path / "run")
    names = {path.name for path in (tmp_path / "run").glob("*-*")}
    assert names == {"checkpoint-3", "checkpoint-4", *(f"snapshot-{step}" for step in (1, 2, 3, 4))}


def test_conditioning_is_dropped_at_the_rate_of_the_recipe(
    stores: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from leandit.train.models import Conditioner, Conditioning

    seen: list[torch.Tensor] = []
    drop = Conditioner.drop

    def watch(self: Conditioner, conditioning: Conditioning, where: torch.Tensor) -> Conditioning:
        seen.append(where)
        return drop(self, conditioning, where)

    monkeypatch.setattr(Conditioner, "drop", watch)
    run_to(constant_steps(30, "conditioning.drop=0.3", "run.checkpoint_every=100"), stores["dit-s-4"], tmp_path / "run")
    assert torch.cat(seen).float().mean() == pytest.approx(0.3, abs=0.1)  # of 225 draws: three standard deviations
