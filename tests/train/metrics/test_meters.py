"""The figures of a run are what its steps did, and reading them is the one time that the device is waited for."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from fake_cuda import RefuseWaits
from making import CPU, train_recipe

from leandit.datasets.store import LatentStore
from leandit.errors import RecipeError, RunError
from leandit.tools.plan.synthetic import synthetic_batch, synthetic_run
from leandit.tools.plan.workload import TrainingWorkload, workload_at_resolution
from leandit.tools.terminal.progress import train_note
from leandit.train.config import load
from leandit.train.metrics.history import StepReport
from leandit.train.metrics.meter import NUM_BANDS, Meter
from leandit.train.parallel.ranks import ALONE
from leandit.train.step import train_step

pytestmark = pytest.mark.usefixtures("tiny_models")
TINY = ["run.global_batch=4", "run.precision=fp32", "run.compile=false", "model.num_classes=3"]


def planned(name: str, *overrides: str) -> TrainingWorkload:
    return workload_at_resolution(load(name, [*TINY, *overrides]), 64)


def test_the_losses_by_time_are_the_means_of_their_images(monkeypatch: pytest.MonkeyPatch) -> None:
    it = planned("dit-s-2-256")
    run = synthetic_run(it.recipe, it.spec, 0, CPU)
    batch = synthetic_batch(it.store, it.largest_bucket, 4, 0, CPU)
    meter = Meter(ALONE, CPU, [], it.spec, it.store.latent, peak_flops=1e12)
    monkeypatch.setattr(Meter, "reads_at_once", False)  # as a GPU
    traces = []
    for _ in range(3):
        traces.append(train_step(run, meter.next(iter([batch]))))
        meter.add(batch, traces[-1])
    with RefuseWaits("cpu"):
        assert meter.flush(due=True, at_once=False) == []
    (figures,) = meter.flush(due=True, at_once=True)
    assert meter.flush(due=True, at_once=True) == []
    assert (figures.step, figures.num_images, figures.epoch) == (3, 12, 0)
    pairs = [
        (float(t), float(loss)) for trace in traces for t, loss in zip(trace.time_shares, trace.losses, strict=True)
    ]
    for band, mean in enumerate(figures.loss_by_time):
        inside = [loss for t, loss in pairs if int(t * NUM_BANDS) == band]
        assert mean == (pytest.approx(sum(inside) / len(inside), rel=1e-5) if inside else None)
    assert figures.loss == pytest.approx(sum(loss for _, loss in pairs) / 12, rel=1e-5)
    tokens = (64 // it.store.latent.downscale // 2) ** 2
    assert figures.tokens_per_second == pytest.approx(tokens * figures.images_per_second)
    assert figures.mfu == pytest.approx(it.flops * figures.images_per_second / 1e12)
    assert figures.gpu_busy_share is None
    assert 0.05 < figures.memory_gib < 100
    assert "MFU" in train_note(figures)


class FakeEvent:
    """An event of a GPU that is a second behind its host for each event since, until the host waits."""

    clock, waits = 0, 0

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = -1

    def record(self) -> None:
        FakeEvent.clock += 1
        self.at = FakeEvent.clock

    def query(self) -> bool:
        return FakeEvent.waits > 0

    def synchronize(self) -> None:
        FakeEvent.waits += 1

    def elapsed_time(self, end: FakeEvent) -> float:
        assert FakeEvent.waits, "an event is read before the device has passed it"
        return 1000.0 * (end.at - self.at)


def test_a_report_of_a_gpu_has_its_times_and_waits_at_its_end_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2**31)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    it = planned("dit-s-2-256")
    learner = synthetic_run(it.recipe, it.spec, 0, CPU)
    batch = synthetic_batch(it.store, it.largest_bucket, 4, 0, CPU)
    meter = Meter(ALONE, torch.device("cuda"), [], it.spec, it.store.latent, peak_flops=1e12)  # start at 1
    for step in range(1, 5):
        trace = train_step(learner, meter.next(iter([batch])))  # from 2 to 3, from 4 to 5
        meter.add(batch, trace)
        if step == 2:
            assert meter.flush(due=True, at_once=False) == []  # end at 6
    assert FakeEvent.waits == 0
    (figures,) = meter.flush(due=False, at_once=False)
    assert (figures.step, figures.seconds_per_step, figures.images_per_second) == (2, 2.5, 1.6)
    assert (figures.gpu_busy_share, figures.memory_gib) == (2 / 5, 2.0)
    assert [figures.step for figures in meter.flush(due=True, at_once=True)] == [4]


def run_to(store: LatentStore, run: Path, *overrides: str) -> list[StepReport]:
    return runs.run_to(train_recipe("dit-s-4", *overrides), store, run)


def test_tensorboard_has_every_figure_that_is_known(label_store: LatentStore, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    seen = run_to(label_store, tmp_path / "run", "data.holdout=0.4", "run.evaluate_every=4", "run.log_every=5")
    assert [line.step for line in seen] == [3, 4, 5, 6]  # a checkpoint, an evaluation, a line, the end
    first = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])
    assert (first["mfu"], first["gpu_busy_share"], len(first["loss_by_time"])) == (None, None, NUM_BANDS)
    accumulator = EventAccumulator(str(tmp_path / "run/tensorboard"))
    accumulator.Reload()
    tags = set(accumulator.Tags()["scalars"])
    known = {f"loss_by_time/{band / NUM_BANDS:g}" for line in seen for band, x in enumerate(line.loss_by_time) if x}
    known |= {f"held_out/{kind}_by_time/{(2 * i + 1) / 16:g}" for kind in ("loss", "averaged_loss") for i in range(8)}
    known |= {f"held_out/{name}" for name in ("loss", "averaged_loss", "num_images", "seconds", "share")}
    known |= {"num_images", "epoch", "loss", "grad_norm", "learning_rate", "seconds_per_step", "images_per_second"}
    assert tags == known | {"tokens_per_second", "data_wait_share", "memory_gib", "skipped_steps"}
    losses = [(line.step, line.held_out.averaged_loss) for line in seen if line.held_out]
    for tag, values in (("loss", [(line.step, line.loss) for line in seen]), ("held_out/averaged_loss", losses)):
        events = accumulator.Scalars(tag)
        assert [event.step for event in events] == [step for step, _ in values]
        assert [event.value for event in events] == pytest.approx([value for _, value in values])
    assert "held out" in train_note(seen[-1])


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in (("MODE", "offline"), ("CACHE_DIR", "cache"), ("CONFIG_DIR", "config"), ("DATA_DIR", "data")):
        monkeypatch.setenv(f"WANDB_{name}", value if name == "MODE" else str(tmp_path / value))


@pytest.mark.usefixtures("offline")
def test_wandb_is_told_and_goes_on_with_the_run_it_began(label_store: LatentStore, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run, ids = tmp_path / "run", []
    for steps in (1, 2):
        run_to(label_store, run, f"run.steps={steps}", "run.wandb=lean", "data.holdout=0.4")
        ids.append((run / "wandb_id").read_text())
    assert ids[0] == ids[1]
    folders = sorted((run / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    assert all(ids[0] in folder.name for folder in folders)
    written = b"".join(path.read_bytes() for folder in folders for path in folder.glob("*.wandb"))
    assert b"tokens_per_second" in written
    assert b"held_out/averaged_loss_by_time/0.4375" in written
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_missing_wandb_is_named(label_store: LatentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None)
    with pytest.raises(RecipeError, match="extra 'wandb'"):
        run_to(label_store, tmp_path / "run", "run.wandb=lean")
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("offline")
def test_a_refusal_of_wandb_is_an_error(
    label_store: LatentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")

    def refuse(**_: Any) -> None:
        raise wandb.errors.UsageError("api_key not configured")

    monkeypatch.setattr(sys.modules["wandb"], "init", refuse)
    with pytest.raises(RunError, match="wandb login"):
        run_to(label_store, tmp_path / "run", "run.wandb=lean")
