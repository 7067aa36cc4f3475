"""The loss of held-out records: what it is, that it is the same for any ranks, and that training does not notice it."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from making import CPU, train_recipe
from noise_store import make_store
from ranks import run_ranks
from runs import EVERY, HOLDOUT, assert_same_training, losses_held_out, run_to
from safetensors.torch import load_file

from leandit.datasets.batches.captions import captions_of
from leandit.datasets.batches.latents import final_latents, keyed_noise
from leandit.datasets.order.filters import is_held_out
from leandit.datasets.store import LatentStore
from leandit.errors import RecipeError, RunError
from leandit.train.metrics.history import HeldOutLoss
from leandit.train.objectives.losses import PLAIN, noised, objective_losses
from leandit.train.run.evaluation.decoding import Decoding
from leandit.train.run.evaluation.held_out import (
    NUM_TIMES,
    Evaluation,
    fixed_times,
    losses_at_fixed_times,
    noise_keys,
    posterior_keys,
)
from leandit.train.run.state import Run
from leandit.train.sampling.snapshot import load_snapshot

pytestmark = pytest.mark.usefixtures("tiny_models")


@pytest.mark.parametrize("name", ["dit-s-4", "pixart-tiny", pytest.param("sd3-tiny", marks=pytest.mark.slow)])
def test_training_is_the_same_to_the_bit_with_and_without_it_and_after_a_resume(
    name: str, store_of: dict[str, LatentStore], tmp_path: Path
) -> None:
    recipe = train_recipe(name, HOLDOUT, EVERY)
    run_to(train_recipe(name, HOLDOUT, "run.evaluate_every=0"), store_of[name], tmp_path / "without")
    seen = run_to(recipe, store_of[name], tmp_path / "with")
    assert_same_training(tmp_path / "without", tmp_path / "with", 6)
    assert losses_held_out(tmp_path / "without") == {}
    assert list(losses_held_out(tmp_path / "with")) == [2, 4, 6]
    run_to(recipe, store_of[name], tmp_path / "stopped", stop_at=3)
    run_to(recipe, store_of[name], tmp_path / "stopped")
    assert_same_training(tmp_path / "stopped", tmp_path / "with", 6)
    assert losses_held_out(tmp_path / "stopped") == losses_held_out(tmp_path / "with")
    assert_loss_of_snapshot(store_of[name], tmp_path / "with", seen[-1].held_out)


def assert_loss_of_snapshot(store: LatentStore, run: Path, said: HeldOutLoss | None) -> None:
    """The loss of the average is that of the snapshot, record by record."""
    snapshot = load_snapshot(run, CPU)
    hashes, losses = store.numbers("keys"), []
    for bucket in store.buckets:
        index = store.index(bucket)
        for position in np.flatnonzero(is_held_out(hashes[index.records], 0.4)):
            own = hashes[index.records[position]][None]
            stored = torch.from_numpy(store.latents(bucket).take(index.rows[[position]]))
            x = final_latents(stored, store.spec.latent, torch.from_numpy(posterior_keys(own)))
            texts = {}
            if snapshot.spec.takes_text:
                first = store.record_at(int(index.records[position])).caption_ids[0]
                texts = {text: captions_of(store.text(text), [first]) for text in store.texts}
            given = snapshot.conditioner(torch.tensor(index.labels[[position]]).long(), texts)
            times, keys = fixed_times(snapshot.objective, CPU), torch.from_numpy(noise_keys(own)[0])
            for time, key in zip(times, keys, strict=True):
                noise = keyed_noise(key[None], tuple(x.shape[1:]))
                with torch.no_grad():
                    output = snapshot.model(*noised(snapshot.objective, x, noise, time[None]), given)
                found = objective_losses(snapshot.objective, output, x, noise, time[None])[PLAIN]
                losses.append(found.item())
    assert said.num_images * NUM_TIMES == len(losses) > 8
    by_time = np.array(losses).reshape(-1, NUM_TIMES).mean(0)
    assert said.averaged_loss_by_time == pytest.approx(by_time, rel=1e-5)
    assert said.averaged_loss == pytest.approx(by_time.mean(), rel=1e-5)
    assert said.loss != said.averaged_loss


def test_times_are_whole_steps_of_ddpm_and_even_shares_of_flow_and_no_draws_share_a_key() -> None:
    ddpm, flow = (train_recipe("dit-s-4", f"objective.kind={kind}").objective for kind in ("ddpm", "flow"))
    assert fixed_times(ddpm, CPU).tolist() == [62, 187, 312, 437, 562, 687, 812, 937]
    assert fixed_times(flow, CPU).tolist() == [(2 * number + 1) / 16 for number in range(8)]
    hashes = np.arange(1000, dtype=np.uint64)
    assert len(np.unique(np.concatenate([noise_keys(hashes).ravel(), posterior_keys(hashes)]))) == 9000


def test_mlperf_has_one_time_for_each_record_in_turn_and_the_mean_over_times(caption_store: LatentStore) -> None:
    evaluations = {
        how: evaluation_of(caption_store, "sana-tiny", f"run.evaluate_times={how}") for how in ("all", "mlperf")
    }
    run, every = evaluations["mlperf"]._run, torch.arange(NUM_TIMES)
    assert fixed_times(run.recipe.objective, CPU, 0.0).tolist() == [number / 8 for number in range(8)]
    rows = []
    for group in evaluations["all"].groups:
        batch, keys = evaluations["all"].read(group), torch.from_numpy(noise_keys(group.hashes))
        rows += losses_at_fixed_times(run, batch, keys, every.expand(len(keys), -1)).tolist()
    by_time = [[row[number] for place, row in enumerate(rows) if place % NUM_TIMES == number] for number in range(8)]
    means = [float(np.mean(losses)) if losses else None for losses in by_time]
    found = evaluations["mlperf"].evaluate()
    assert found.loss_by_time == [mean and pytest.approx(mean, rel=1e-4) for mean in means]
    assert len(rows) == found.num_images
    assert found.loss == pytest.approx(np.mean([mean for mean in means if mean is not None]), rel=1e-4)


def evaluation_of(store: LatentStore, name: str, *overrides: str) -> Evaluation:
    return Evaluation(Run.open(train_recipe(name, HOLDOUT, *overrides), [store], CPU, print), print)


def test_fewer_images_are_the_first_of_more_and_records_are_those_of_their_keys(caption_store: LatentStore) -> None:
    found, hashes = [], caption_store.numbers("keys")
    for most in (2, 4, 64):
        evaluation = evaluation_of(caption_store, "pixart-tiny", f"run.evaluate_images={most}")
        groups = evaluation.groups
        found.append({value for group in groups for value in group.hashes.tolist()})
        assert len(found[-1]) <= most
        for group in groups:
            batch = evaluation.read(group)
            assert hashes[batch.records.numpy()].tolist() == group.hashes.tolist()
            lengths: Any = batch.caption_lengths
            assert lengths.tolist() == [len(caption_store.caption(record)) for record in batch.records.tolist()]
    assert len({group.bucket for group in groups}) > 1
    assert found[0] < found[1] < found[2]
    assert max(found[1]) < min(found[2] - found[1])


MIXTURE = "data.mixture=[{store='large', weight=3}, {store='small'}]"


def test_each_store_of_a_mixture_is_evaluated_by_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_store(tmp_path / "small", {"32x32": 40}, num_classes=3, seed=0)
    make_store(tmp_path / "large", {"64x64": 40}, num_classes=3, seed=1)
    tiny = ["run.global_batch=4", HOLDOUT, EVERY, "run.steps=4", "run.evaluate_images=8"]
    seen = run_to(train_recipe("dit-s-4", *tiny, MIXTURE), None, tmp_path / "run")
    assert [figures.held_out and figures.held_out.num_images for figures in seen] == [None, 8, None, 8]
    assert all(math.isfinite(seen[step].held_out.averaged_loss) for step in (1, 3))


def test_a_holdout_without_records_or_of_another_share_is_refused(label_store: LatentStore, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"data.holdout 0.0001: it holds out no record of .*store.*Raise it"):
        run_to(train_recipe("dit-s-4", "data.holdout=0.0001"), label_store, tmp_path / "none")
    assert not (tmp_path / "none").exists()
    run_to(train_recipe("dit-s-4", HOLDOUT, "run.steps=1"), label_store, tmp_path / "run")
    with pytest.raises(RunError, match=r"data.holdout was 0.4, is 0.3"):
        run_to(train_recipe("dit-s-4", "data.holdout=0.3"), label_store, tmp_path / "run")
    run_to(train_recipe("dit-s-4", HOLDOUT, "run.evaluate_every=3", "run.steps=3"), label_store, tmp_path / "run")
    assert list(losses_held_out(tmp_path / "run")) == [1, 3]


RANKS = {
    "ddp": ["parallel.strategy=ddp"],
    "gradient": ["parallel.strategy=fsdp", "parallel.shard=gradient"],
    "offload": ["parallel.strategy=fsdp", "parallel.cpu_offload=true"],
    "zero-1": ["parallel.deepspeed_config={folder}/1.json"],
    "zero-3": ["parallel.deepspeed_config={folder}/3.json"],
}
QUICK = ("ddp", "gradient")  # the others in the long form
DRAWN = ["run.sample_count=3", "run.sample_steps=2"]
MANY = ["run.steps=4", "run.microbatch=1", "run.global_batch=4", "run.evaluate_images=5"]
WITH_BOTH = [HOLDOUT, "run.evaluate_every=1", "run.sample_every=1", *DRAWN]
STILL = [*MANY, *WITH_BOTH, "optimizer.lr=1e-30", "run.steps=1"]  # weights stay as they begin


def run_with(names: Iterable[str], store: LatentStore, folder: Path) -> None:
    """The runs of two ranks, with some strategies, with and without evaluation."""
    jobs = []
    for name in names:
        own = [entry.format(folder=folder) for entry in RANKS[name]]
        for every in (0, 2):
            overrides = [*own, *MANY, HOLDOUT, *DRAWN, f"run.evaluate_every={every}", f"run.sample_every={every}"]
            jobs.append({"recipe": "dit-s-4", "set": overrides, "run": str(folder / f"{name}-{every}")})
        jobs.append({"recipe": "dit-s-4", "set": [*own, *STILL], "run": str(folder / f"{name}-still")})
    run_ranks([job | {"store": str(store.path), "keeps_latents": True} for job in jobs], 2)


@pytest.fixture(scope="module")
def runs_of(label_store: LatentStore, tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    """Where the runs are: of the quick strategies, or of those in the long form."""

    @functools.cache
    def made(quick: bool) -> Path:
        folder = tmp_path_factory.mktemp("runs")
        for stage in (1, 3):
            (folder / f"{stage}.json").write_text(json.dumps({"zero_optimization": {"stage": stage}}))
        run_with([name for name in RANKS if (name in QUICK) == quick], label_store, folder)
        return folder

    return made


@pytest.fixture(scope="module")
def of_one(label_store: LatentStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of one process, with as many threads as a rank has."""
    folder, threads = tmp_path_factory.mktemp("one"), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoding, "start", lambda _: None)
        torch.set_num_threads(1)
        try:
            run_to(train_recipe("dit-s-4", *STILL), label_store, folder / "still")
            settings = [*MANY, HOLDOUT, *DRAWN, EVERY, "run.sample_every=2"]
            run_to(train_recipe("dit-s-4", *settings), label_store, folder / "run")
        finally:
            torch.set_num_threads(threads)
    return folder


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in RANKS])
def test_two_ranks_find_and_draw_what_one_does(name: str, runs_of: Callable[[bool], Path], of_one: Path) -> None:
    of_ranks = runs_of(name in QUICK)
    drawn, still = of_ranks / f"{name}-2", of_ranks / f"{name}-still"
    assert_same_training(of_ranks / f"{name}-0", drawn, 4)
    assert losses_held_out(still) == losses_held_out(of_one / "still")
    assert list(losses_held_out(drawn)) == [2, 4]
    for step, losses in losses_held_out(of_one / "run").items():
        for one, two in zip(losses, losses_held_out(drawn)[step], strict=True):
            assert two == pytest.approx(one, rel=1e-4)
    ema, own = (load_file(drawn / f"checkpoint-4/{part}.safetensors") for part in ("ema", "model"))
    assert any(not torch.equal(ema[key], own[key]) for key in ema)
    for run, found, step in (("still", still, 1), ("run", drawn, 2), ("run", drawn, 4)):
        one, two = (load_file(each / f"samples/step-{step}.safetensors")["latents"] for each in (of_one / run, found))
        assert len(one) == 3
        assert one.std() > 0.1
        assert (two - one).abs().max() < 1e-3 * one.abs().max()
