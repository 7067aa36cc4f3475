"""Training: resuming bit for bit, what is refused, and what a run writes."""

from __future__ import annotations

import errno
import json
import math
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import without_seal
from forked import ForkedPython
from making import CPU, encode, label_recipe, make_class_folder, no_progress, smooth_image, train_recipe, tree_digest
from ranks import start_ranks
from runs import bits, lines

from leandit.datasets.store import LatentStore
from leandit.errors import DamageError, RunError, StoreError, StoreIncomplete
from leandit.precompute.pipeline import precompute
from leandit.train import loop
from leandit.train import step as step_module
from leandit.train.config import ScheduleSection, TrainRecipe
from leandit.train.loop import Outcome, StopRequest, train
from leandit.train.metrics.history import StepReport
from leandit.train.metrics.meter import Meter
from leandit.train.models.conditioning import Conditioner
from leandit.train.optim.build import learning_rate
from leandit.train.run import checkpoints
from leandit.train.run.manifest import run_lock
from leandit.train.weights import checkpoint

MODELS = ("dit-s-4", "pixart-tiny", "sd3-tiny")
EVERY = "run.checkpoint_every=1"


pytestmark = pytest.mark.usefixtures("tiny_models")


@pytest.fixture(scope="module")
def stores(store_of: dict[str, LatentStore]) -> dict[str, Path]:
    return {name: store.path for name, store in store_of.items()}


def run_to(recipe: TrainRecipe, store: Path, run: Path, *, stop_at: int = 0, said: list[str] | None = None) -> Outcome:
    """Train; with ``stop_at``, ask to stop while that step is reported; ``said`` takes the warnings."""
    stop, warn = StopRequest(), [].append if said is None else said.append

    def report(figures: StepReport) -> None:
        if figures.step == stop_at:
            stop.set()

    return train(recipe, store_path=store, run=run, device=CPU, report=report, stop=stop, warn=warn)


def constant(name: str, *overrides: str) -> TrainRecipe:
    return train_recipe(name, "schedule.kind=constant", "schedule.warmup_steps=2", *overrides)


def assert_equal_bits(one: Path, other: Path, step: int) -> None:
    assert len(bits(one, step)) > 3
    assert bits(one, step) == bits(other, step)
    states = [json.loads((run / f"checkpoint-{step}/state.json").read_text()) for run in (one, other)]
    assert states[0]["loader"] == states[1]["loader"]
    assert states[0]["num_images"] == states[1]["num_images"]
    assert metrics(one) == metrics(other)


def metrics(run: Path) -> list[tuple[Any, ...]]:
    """What must be equal of the lines of metrics.jsonl."""
    keys = ("step", "num_images", "epoch", "loss", "grad_norm", "learning_rate")
    return [tuple(line[key] for key in keys) for line in lines(run)]


@pytest.fixture(scope="module")
def whole(stores: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Six steps in one go, a checkpoint at each, for each model."""
    runs = {}
    for name in MODELS:
        runs[name] = tmp_path_factory.mktemp("whole") / "run"
        recipe = constant(name, EVERY, "run.keep_checkpoints=10")
        assert run_to(recipe, stores[name], runs[name]).finished
    return runs


@pytest.mark.parametrize("name", [*MODELS[:2], pytest.param(MODELS[2], marks=pytest.mark.slow)])
def test_stops_change_no_bit(name: str, whole: dict[str, Path], stores: dict[str, Path], tmp_path: Path) -> None:
    recipe = constant(name, "run.checkpoint_every=100")
    for first, stop_at in ((1, 1), (2, 2), (3, 5)):  # within an epoch, at its end, at the step before the last
        outcome = run_to(recipe, stores[name], tmp_path / "run", stop_at=stop_at)
        assert (outcome.first_step, outcome.step, outcome.finished) == (first, stop_at, False)
        assert [line[0] for line in metrics(tmp_path / "run")] == list(range(1, stop_at + 1))
    outcome = run_to(recipe, stores[name], tmp_path / "run")
    assert (outcome.first_step, outcome.finished) == (6, True)
    assert_equal_bits(whole[name], tmp_path / "run", 6)


def test_a_crash_costs_steps_after_its_checkpoint(
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
    outcome = run_to(recipe, store, run)
    assert outcome.first_step == 4
    assert_equal_bits(whole["dit-s-4"], run, 6)


def test_a_killed_run_gives_the_bits_of_one_go(whole: dict[str, Path], stores: dict[str, Path], tmp_path: Path) -> None:
    name = "pixart-tiny"
    run, recipe = tmp_path / "run", constant(name, EVERY, "run.keep_checkpoints=10")
    settings = ["schedule.kind=constant", "schedule.warmup_steps=2", EVERY, "run.keep_checkpoints=10"]
    job = {"recipe": name, "set": settings, "store": str(stores[name]), "run": str(run), "kill_at": 4}
    (killed,) = start_ranks([job], 1)
    killed.communicate(timeout=120)
    assert killed.returncode == -signal.SIGKILL
    outcome = run_to(recipe, stores[name], run)
    assert 2 <= outcome.first_step <= 5, "the checkpoint of the last step may not have been written"
    assert_equal_bits(whole[name], run, 6)


@pytest.mark.parametrize("name", MODELS)
def test_accumulating_gradients_changes_only_rounding(name: str, stores: dict[str, Path], tmp_path: Path) -> None:
    for size in (0, 3):
        # Two steps of plain descent directions: AdamW would blow the rounding of a tiny gradient up to its sign.
        recipe = train_recipe(name, f"run.microbatch={size}", "run.steps=3", "optimizer.lr=1e-5")
        run_to(recipe, stores[name], tmp_path / f"{size}")
    for one, other in zip(metrics(tmp_path / "0"), metrics(tmp_path / "3"), strict=True):
        assert one[:3] == other[:3]
        assert one[3:] == pytest.approx(other[3:], rel=1e-6, abs=1e-6)


OTHER_RECIPES = ["optimizer.lr=2e-3", "model.name=DiT-S/2", "latent.normalise=store", "optimizer.betas=[0.9, 0.95]"]


@pytest.mark.parametrize("changed", OTHER_RECIPES)
def test_another_recipe_is_refused_and_names_the_field(
    changed: str, whole: dict[str, Path], stores: dict[str, Path]
) -> None:
    before, field = tree_digest(whole["dit-s-4"]), changed.partition("=")[0]
    with pytest.raises(RunError, match=rf"They differ in:\n  {re.escape(field)} was .*$") as refused:  # nothing else
        run_to(constant("dit-s-4", changed), stores["dit-s-4"], whole["dit-s-4"])
    assert str(refused.value).count(" was ") == 1
    assert tree_digest(whole["dit-s-4"]) == before


def constant_steps(steps: int, *overrides: str) -> TrainRecipe:
    return train_recipe("dit-s-4", f"run.steps={steps}", *overrides)


def test_a_finished_run_goes_on_with_a_constant_rate_alone(stores: dict[str, Path], tmp_path: Path) -> None:
    store = stores["dit-s-4"]
    for kind in ("constant", "linear", "cosine"):
        assert run_to(constant_steps(2, f"schedule.kind={kind}"), store, tmp_path / kind).step == 2
    for first_step in (3, None):
        before = tree_digest(tmp_path / "constant")
        outcome = run_to(constant_steps(3, "schedule.kind=constant"), store, tmp_path / "constant")
        assert (outcome.first_step, outcome.step, outcome.finished) == (first_step, 3, True)
    assert tree_digest(tmp_path / "constant") == before
    for kind in ("linear", "cosine"):
        with pytest.raises(RunError, match=r"run\.steps"):
            run_to(constant_steps(3, f"schedule.kind={kind}"), store, tmp_path / kind)


def test_a_folder_with_something_else_is_refused_and_left_alone(stores: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/thesis.txt").write_text("do not touch")
    with pytest.raises(RunError, match="not empty"):
        run_to(train_recipe(), stores["dit-s-4"], tmp_path / "run")
    assert tree_digest(tmp_path / "run") == {"thesis.txt": b"do not touch"}


HOLDS = """
import sys
from pathlib import Path
from leandit.train.run.manifest import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    input()
"""


def test_a_run_that_another_process_trains_is_untouched(whole: dict[str, Path], stores: dict[str, Path]) -> None:
    run = whole["dit-s-4"]
    before = tree_digest(run)
    with ForkedPython(["-c", HOLDS, run], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(RunError, match="another process is training it"):
            run_to(constant("dit-s-4", EVERY, "run.keep_checkpoints=10"), stores["dit-s-4"], run)
        other.kill()
    assert tree_digest(run) == before
    run_to(constant("dit-s-4", EVERY, "run.keep_checkpoints=10"), stores["dit-s-4"], run)  # its lock died with it


def test_where_folders_cannot_be_locked_nobody_is_kept_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with run_lock(tmp_path), run_lock(tmp_path):
        pass


def test_damaged_metrics_are_named_and_a_lost_checkpoint_is_told(stores: dict[str, Path], tmp_path: Path) -> None:
    run, said = tmp_path / "run", list[str]()
    run_to(constant_steps(2, EVERY), stores["dit-s-4"], run)
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b"\xff\x00\n")
    with pytest.raises(DamageError, match=r"metrics.jsonl': line 3 is not a report"):
        run_to(constant_steps(3, EVERY), stores["dit-s-4"], run)
    (run / "metrics.jsonl").unlink()
    for path in checkpoint.find(checkpoint.CHECKPOINT, run):
        shutil.rmtree(path)
    run_to(constant_steps(3, EVERY), stores["dit-s-4"], run, said=said)
    assert said == [f"run '{run}' starts from scratch: it has 'snapshot-2' but no checkpoint"]


def test_an_incomplete_store_is_refused_unless_allowed(class_folder: Path, tmp_path: Path) -> None:
    store, run = tmp_path / "store", tmp_path / "run"
    without_seal(lambda: encode(label_recipe(), class_folder, store))
    with pytest.raises(StoreIncomplete):
        run_to(constant_steps(1), store, run)
    assert not run.exists()
    outcome = run_to(constant_steps(1, "run.allow_incomplete=true"), store, run)
    assert outcome.finished
    encode(label_recipe(), class_folder, store)  # it is complete: the run begins a new pass over it
    outcome = run_to(constant_steps(2), store, run)
    assert (outcome.finished, outcome.first_step) == (True, 2)
    assert head_of(run)["root_hash"] == LatentStore(store).root_hash


def test_metrics_have_their_keys_with_units_and_one_line_a_report(stores: dict[str, Path], tmp_path: Path) -> None:
    run_to(constant_steps(5, "run.log_every=2", "run.checkpoint_every=100"), stores["dit-s-4"], tmp_path / "run")
    written = lines(tmp_path / "run")
    assert [line["step"] for line in written] == [2, 4, 5]
    keys = """step num_images epoch loss grad_norm learning_rate seconds_per_step images_per_second tokens_per_second
    mfu data_wait_share gpu_busy_share memory_gib skipped_steps loss_scale loss_by_time held_out loss_terms"""
    assert all(line.keys() == set(keys.split()) for line in written)
    # 15 records in batches of 8: epochs of 8 + 7 images in some order, so 15 after two steps and 30 after four.
    assert [line["num_images"] for line in written[:2]] == [15, 30]
    assert all(0 <= line["data_wait_share"] <= 1 and line["images_per_second"] > 0 for line in written)


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Reports end as on a GPU; what is done in which order."""
    order, step = list[str](), loop.train_step
    monkeypatch.setattr(Meter, "reads_at_once", False)

    def noted(state: Any, batch: Any) -> Any:
        order.append(f"step {state.step + 1}")
        return step(state, batch)

    monkeypatch.setattr(loop, "train_step", noted)
    return order


def test_figures_of_a_gpu_are_read_after_the_next_launch_or_before_a_save(
    done: list[str], stores: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, store = constant("dit-s-4", "run.log_every=2", "run.checkpoint_every=5"), stores["dit-s-4"]
    stop, run, capture = StopRequest(), tmp_path / "late", checkpoints.capture

    def report(figures: StepReport) -> None:
        done.append(f"report {figures.step}")
        if figures.step == 2:  # while step 3 is made; its own figures are read at the stop
            stop.set()

    monkeypatch.setattr(checkpoints, "capture", lambda *args, **more: (done.append("save"), capture(*args, **more))[1])
    how = {"store_path": store, "run": run, "device": CPU, "report": report}
    assert train(recipe, **how, stop=stop).step == 3
    train(recipe, **how, stop=StopRequest())
    said = " ".join(done).replace("report", "r").replace("step", "s")
    assert said == "s 1 s 2 s 3 r 2 r 3 save s 4 s 5 r 4 r 5 save s 6 r 6 save"
    monkeypatch.undo()
    run_to(recipe, store, tmp_path / "run")
    assert bits(tmp_path / "run", 6) == bits(run, 6)


@pytest.mark.parametrize(
    ("fault", "error", "words", "reported"),
    [("nan", RunError, "step 2: the loss of records", []), ("crash", KeyboardInterrupt, None, [2])],
)
def test_what_is_read_late_is_not_lost_in_a_crash_and_is_seen_before_the_next_checkpoint(
    fault: str,
    error: type[BaseException],
    words: str | None,
    reported: list[int],
    done: list[str],
    stores: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    image_losses = step_module.image_losses

    def spoil(learner: Any, images: Any, step: int) -> dict[str, torch.Tensor]:
        if fault == "crash" and step == 3:
            raise KeyboardInterrupt
        factor = float("nan") if fault == "nan" and step == 2 else 1.0
        return {name: factor * loss for name, loss in image_losses(learner, images, step).items()}

    monkeypatch.setattr(step_module, "image_losses", spoil)
    with pytest.raises(error, match=words):
        run_to(constant("dit-s-4", "run.log_every=2"), stores["dit-s-4"], tmp_path / "run")
    assert done == ["step 1", "step 2", "step 3"]
    assert [line[0] for line in metrics(tmp_path / "run")] == reported
    assert checkpoint.find("checkpoint", tmp_path / "run") == []


SHARES = {  # kind, warm-up, last share -> share of the rate at a step of 110
    ("constant", 0, 0.0): {1: 1.0},
    ("constant", 10, 0.0): {1: 0.1, 90: 1.0},
    ("cosine", 0, 0.0): {110: 0.0},
    ("cosine", 10, 0.0): {5: 0.5, 10: 1.0, 35: 0.5 * (1 + math.cos(math.pi / 4))},
    ("cosine", 10, 0.1): {60: 0.55, 110: 0.1},
    ("linear", 10, 0.1): {35: 0.775, 110: 0.1},
}


def test_the_learning_rate_is_warm_up_then_constant_cosine_or_linear() -> None:
    for (kind, warmup, last), shares in SHARES.items():
        schedule = ScheduleSection.model_validate({"kind": kind, "warmup_steps": warmup, "final_lr_share": last})
        found = {step: learning_rate(3e-4, schedule, step, steps=110) / 3e-4 for step in shares}
        assert found == pytest.approx(shares, abs=1e-8)


def test_conditioning_is_dropped_at_its_rate(
    stores: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, drop = list[torch.Tensor](), Conditioner.drop
    monkeypatch.setattr(
        Conditioner, "drop", lambda self, given, where: (seen.append(where), drop(self, given, where))[1]
    )
    run_to(constant_steps(30, "conditioning.drop=0.3", "run.checkpoint_every=100"), stores["dit-s-4"], tmp_path / "run")
    assert torch.cat(seen).float().mean() == pytest.approx(0.3, abs=0.1)  # of 225 draws: three standard deviations


# --- Revisions of the store -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """A store as it was with one and two revisions: 6 and 9 images of 3 classes; do not change them."""
    root, stores = tmp_path_factory.mktemp("grown"), {}
    make_class_folder(root / "images", per_class=2)
    for revision in (1, 2):
        for c in range(3 if revision > 1 else 0):
            smooth_image(1000 * revision + c).save(root / f"images/n{c:03d}/{revision}x.png")
        precompute(
            label_recipe(), source_path=root / "images", store_path=root / "store", device=CPU, progress=no_progress
        )
        stores[revision] = shutil.copytree(root / "store", root / f"store-{revision}")
    return stores


def growing(steps: int, revision: int = 0, *overrides: str) -> TrainRecipe:
    """Two batches an epoch of revision 1, three of the other."""
    kept = ("schedule.kind=constant", "run.global_batch=4", EVERY, "run.keep_checkpoints=20")
    return constant_steps(steps, *kept, f"run.revision={revision}", *overrides)


def head_of(run: Path) -> dict[str, Any]:
    """What a run says of its only store."""
    (store,) = json.loads((run / "run.json").read_text())["stores"]
    return store


def test_a_run_reads_its_first_revision_and_names_a_newer_one(grown: dict[int, Path], tmp_path: Path) -> None:
    said: list[str] = []
    run_to(growing(6), grown[1], tmp_path / "whole", said=said)
    run_to(growing(3), grown[1], tmp_path / "run", said=said)
    assert said == []
    outcome = run_to(growing(6), grown[2], tmp_path / "run", said=said)
    assert (outcome.first_step, outcome.finished) == (4, True)
    assert len(said) == 1
    assert "has revision 2, this run reads 1; a new run with model.init_from=" in said[0]
    assert head_of(tmp_path / "run")["revision"] == 1
    assert_equal_bits(tmp_path / "whole", tmp_path / "run", 6)
    run_to(growing(6, 1), grown[2], tmp_path / "run", said=said)
    assert len(said) == 1  # who names the revision knows of it


def test_a_run_of_a_named_revision_is_that_of_the_store_as_it_then_was(grown: dict[int, Path], tmp_path: Path) -> None:
    said: list[str] = []
    run_to(growing(4, 1), grown[2], tmp_path / "first", said=said)
    run_to(growing(4), grown[1], tmp_path / "then", said=said)
    assert said == []
    assert_equal_bits(tmp_path / "first", tmp_path / "then", 4)


def test_a_run_refuses_other_revisions_and_root_hashes(grown: dict[int, Path], tmp_path: Path) -> None:
    for revision in (1, 2):
        run_to(growing(2), grown[revision], tmp_path / f"{revision}")
    before = tree_digest(tmp_path)
    with pytest.raises(RunError, match=r"reads revision 1 .* not 2, and keeps it.*model\.init_from="):
        run_to(growing(4, 2), grown[2], tmp_path / "1")
    with pytest.raises(RunError, match=r"reads revision 2 .* only 1 now\. Restore it"):
        run_to(growing(4), grown[1], tmp_path / "2")
    with pytest.raises(StoreError, match="no complete revision 7"):
        run_to(growing(4, 7), grown[2], tmp_path / "new")
    assert tree_digest(tmp_path) == before
    head = json.loads((tmp_path / "1/run.json").read_text())
    head["stores"][0]["root_hash"] = "0" * 64
    (tmp_path / "1/run.json").write_text(json.dumps(head))
    for revision in (0, 1):
        with pytest.raises(RunError, match="root_hash of revision 1 was '0000"):
            run_to(growing(4, revision), grown[2], tmp_path / "1")


def test_a_manifest_that_is_not_valid_is_damage(grown: dict[int, Path], tmp_path: Path) -> None:
    run_to(growing(1), grown[1], tmp_path / "run")
    for content in ("", "[]", '{"stores": [{"path": "s"}]}'):
        (tmp_path / "run/run.json").write_text(content)
        with pytest.raises(DamageError, match=r"run\.json"):
            run_to(growing(2), grown[1], tmp_path / "run")
