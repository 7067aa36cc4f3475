"""Evaluating and drawing with several ranks: what one process finds, and the same training to the bit."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from making import train_recipe
from ranks import run_ranks
from runs import EVERY, HOLDOUT, assert_same_training, losses_held_out, run_to
from safetensors.torch import load_file

from leandit.datasets.store import LatentStore
from leandit.train.run.evaluation.decoding import Decoding

pytestmark = pytest.mark.usefixtures("tiny_models")

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
def test_training_is_the_same_to_the_bit_and_two_ranks_find_and_draw_what_one_does(
    name: str, runs_of: Callable[[bool], Path], of_one: Path
) -> None:
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
