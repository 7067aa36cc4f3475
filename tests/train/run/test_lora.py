"""Runs with adapters: what trains, what checkpoints hold, and that the frozen weights are the ones of before."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from making import CPU, train_recipe
from runs import ADAPTED as MODELS
from runs import bits, lines, run_to, runs_of_whole_models
from safetensors.torch import load_file
from torch import Tensor

from leandit.datasets.batches.captions import Captions
from leandit.datasets.store import LatentStore
from leandit.errors import LeanditError, RecipeError, RunError
from leandit.train.config import TrainRecipe
from leandit.train.loop import StopRequest, train
from leandit.train.models.build import build_model
from leandit.train.models.conditioning import Conditioning
from leandit.train.models.diffusers.adapters import DOWN, UP, trained_parameters
from leandit.train.models.spec import ModelSpec
from leandit.train.optim.posthoc_ema import combine
from leandit.train.run.checkpoints import start_or_resume
from leandit.train.run.state import Run
from leandit.train.sampling.snapshot import load_snapshot
from leandit.train.weights.init_from import initial_weights

pytestmark = pytest.mark.usefixtures("tiny_models")


@pytest.fixture(scope="module")
def bases(store_of: dict[str, LatentStore], golden: Any) -> dict[str, Path]:
    """A run of all weights of each model, and another of the first."""
    return runs_of_whole_models(golden, store_of)


def lora(base: Path, *overrides: str, model: str = "pixart-tiny") -> TrainRecipe:
    settings = ["lora.rank=4", "lora.alpha=8", f"model.init_from={base}", "run.ema_decay=0.5"]
    rate = ["optimizer.lr=1e-2", "schedule.warmup_steps=0", "optimizer.betas=[0.9, 0.99, 0.999]"]
    return train_recipe(model, *settings, *rate, *overrides)


@pytest.fixture(scope="module")
def tuned(
    bases: dict[str, Path], store_of: dict[str, LatentStore], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Six steps of adapters of each model."""
    root = tmp_path_factory.mktemp("tuned")
    for name in MODELS:
        run_to(lora(bases[name], model=name), store_of[name], root / name)
    return {name: root / name for name in MODELS}


def as_at_three(run: Path, copy: Path) -> Path:
    """A run that was killed after its third step."""
    copy.mkdir()
    shutil.copy(run / "run.json", copy)
    shutil.copytree(run / "checkpoint-3", copy / "checkpoint-3")
    return copy


def output_of(model: torch.nn.Module, spec: ModelSpec) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    captions = torch.randn((2, 5, spec.caption_width), generator=generator)
    x = torch.randn((2, spec.channels, 8, 8), generator=generator)
    pooled = torch.randn((2, spec.pooled_width), generator=generator) if spec.pooled_width else None
    given = Conditioning(captions=captions if spec.pooled_width else Captions.of(list(captions)), pooled=pooled)
    with torch.no_grad():
        return model.eval()(x, torch.tensor([10.0, 700.0]), given)


@pytest.mark.parametrize("name", MODELS)
def test_the_first_step_has_the_loss_of_the_frozen_weights_and_later_ones_learn(
    name: str, bases: dict[str, Path], tuned: dict[str, Path], store_of: dict[str, LatentStore], tmp_path: Path
) -> None:
    whole = train_recipe(name, f"model.init_from={bases[name]}", "run.steps=2")
    run_to(whole, store_of[name], tmp_path / "run")
    first, theirs = lines(tuned[name])[0]["loss"], lines(tmp_path / "run")[0]["loss"]
    assert first == pytest.approx(theirs, rel=1e-5)
    adapters = load_file(tuned[name] / "checkpoint-6/model.safetensors")
    still = [key.removesuffix(UP) for key, t in adapters.items() if key.endswith(UP) and t.abs().max() < 1e-6]
    # The gates of SD3's captions were zero at first; its last block never uses what they ask.
    assert [key for key in still if ".add_" not in key and ".to_add_" not in key] == []


@pytest.mark.parametrize("name", MODELS)
def test_checkpoints_and_snapshots_hold_adapters_alone_and_merged_they_compute_what_the_run_does(
    name: str, bases: dict[str, Path], tuned: dict[str, Path], store_of: dict[str, LatentStore]
) -> None:
    state = Run.open(lora(bases[name], model=name), [store_of[name]], CPU, print)
    start_or_resume(state, tuned[name], print)
    trained = trained_parameters(state.engine.model)
    layers = 3 * 8 - 1 if name == "sd3-tiny" else 2 * 8  # queries, keys, values, outputs, twice; but for SD3's last one
    assert len(trained) == 2 * layers
    assert all(key.endswith((DOWN, UP)) for key in trained)
    for file in ("checkpoint-6/model", "checkpoint-6/ema", "snapshot-6/model"):
        assert load_file(tuned[name] / f"{file}.safetensors").keys() == trained.keys()
    moments = load_file(tuned[name] / "checkpoint-6/optimizer.safetensors")
    assert {key.rpartition(".")[0] for key in moments} == trained.keys()
    frozen = load_file(bases[name] / "snapshot-2/model.safetensors")
    found = {key.replace(".base_layer.", "."): t for key, t in state.engine.model.state_dict().items()}
    assert all(torch.equal(found[key], tensor) for key, tensor in frozen.items())
    with state.engine.averaged():
        wanted = output_of(state.engine.model, state.spec)
    snapshot = load_snapshot(tuned[name], CPU)
    torch.testing.assert_close(output_of(snapshot.model, snapshot.spec), wanted, rtol=1e-5, atol=1e-5)
    before = output_of(load_snapshot(bases[name], CPU).model, snapshot.spec)
    assert (wanted - before).abs().max() > 1e-3
    assert not any("lora" in key for key in snapshot.model.state_dict())


@pytest.mark.parametrize(
    "optimizer", ["muon", *(pytest.param(name, marks=pytest.mark.slow) for name in ("adamw", "adamw8bit", "came"))]
)
def test_a_killed_run_resumes_bit_for_bit_and_averages_of_any_length_are_of_adapters_alone(
    optimizer: str, bases: dict[str, Path], caption_store: LatentStore, tmp_path: Path
) -> None:
    recipe = lora(bases["pixart-tiny"], f"optimizer.name={optimizer}", "ema.kind=power", "ema.keep_every=2")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_to(recipe, caption_store, whole)
    run_to(recipe, caption_store, as_at_three(whole, killed))
    assert len(bits(killed, 6)) > 3
    assert bits(killed, 6) == bits(whole, 6)
    made = combine(whole, 0.07, tmp_path / "average").path
    assert load_file(made / "model.safetensors").keys() == load_file(whole / "snapshot-6/model.safetensors").keys()
    snapshot = load_snapshot(tmp_path / "average", CPU)
    assert output_of(snapshot.model, snapshot.spec).isfinite().all()


def test_other_frozen_weights_are_refused_by_the_names_of_both_and_they_may_move(
    bases: dict[str, Path], tuned: dict[str, Path], caption_store: LatentStore, tmp_path: Path
) -> None:
    base, other, moved = bases["pixart-tiny"], bases["other"], tmp_path / "moved"
    run = as_at_three(tuned["pixart-tiny"], tmp_path / "run")
    with pytest.raises(RunError, match=rf"{base}/snapshot-2'.*{other}/snapshot-2'"):
        run_to(lora(other), caption_store, run)
    with pytest.raises(RunError, match=rf"{base}/snapshot-2'.*{other}'.*--base"):
        load_snapshot(tuned["pixart-tiny"], CPU, frozen=str(other))
    shutil.copytree(base / "snapshot-2", moved / "snapshot-2")
    run_to(lora(moved), caption_store, run)
    assert lines(run)[-1]["loss"] == lines(tuned["pixart-tiny"])[-1]["loss"]
    shutil.move(moved, tmp_path / "again")
    with pytest.raises(RunError, match=r"no such folder.*have moved, pass their path with --set model.init_from=PATH"):
        run_to(lora(moved), caption_store, run)
    with pytest.raises(RunError, match=r"moved/snapshot-2', which is not there.*--base PATH.*export .*run.*--merged"):
        load_snapshot(run, CPU)
    snapshot = load_snapshot(run, CPU, frozen=str(tmp_path / "again"))
    wanted = load_snapshot(tuned["pixart-tiny"], CPU)
    assert torch.equal(output_of(snapshot.model, snapshot.spec), output_of(wanted.model, wanted.spec))


def test_adapters_train_on_adapters(tuned: dict[str, Path], caption_store: LatentStore, tmp_path: Path) -> None:
    wanted = load_snapshot(tuned["pixart-tiny"], CPU)
    found, _ = initial_weights(str(tuned["pixart-tiny"]), build_model(wanted.spec.plain, seed=0), wanted.spec.plain)
    assert all(torch.equal(found[key], tensor) for key, tensor in wanted.model.state_dict().items())
    run_to(lora(tuned["pixart-tiny"], "run.steps=1", "lora.rank=2"), caption_store, tmp_path / "run")
    first = load_snapshot(tmp_path / "run", CPU)
    assert first.spec.adapter.rank == 2
    assert (output_of(first.model, first.spec) - output_of(wanted.model, wanted.spec)).abs().max() < 0.1


TARGETS = "lora.targets="


@pytest.mark.parametrize(
    ("model", "settings", "words"),
    [
        ("pixart-tiny", ["lora.rank=4"], "lora.rank 4: adapters need weights.*model.init_from"),
        ("dit-s-2-text", ["lora.rank=4", "model.init_from=x"], "'DiT-S/2' takes no adapters.*pixart-sigma.*sd3-tiny"),
        ("pixart-tiny", ["lora.rank=4", f"{TARGETS}['to_z']"], "'to_z': the model has no such layer.*attn1.to_out.0"),
        ("pixart-tiny", ["lora.rank=4", f"{TARGETS}['attn1']"], "'net.transformer_blocks.0.attn1' is a Attention"),
        ("pixart-tiny", ["lora.alpha=4"], "set rank above 0"),
    ],
)
def test_what_cannot_have_adapters_is_refused(
    model: str, settings: list[str], words: str, bases: dict[str, Path], caption_store: LatentStore, tmp_path: Path
) -> None:
    base = [f"model.init_from={bases['pixart-tiny']}"] if TARGETS in settings[-1] else []
    with pytest.raises(LeanditError, match=words):
        run_to(train_recipe(model, *settings, *base), caption_store, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_without_peft_the_error_names_the_extra(
    bases: dict[str, Path], caption_store: LatentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(RecipeError, match=r"'peft', which is not installed. Install leandit with its extra 'lora'"):
        run_to(lora(bases["pixart-tiny"]), caption_store, tmp_path / "run")


PLAIN = ["run.steps=1", "run.ema_decay=0.0", "schedule.kind=constant", "schedule.warmup_steps=0"]


def said_by(recipe: TrainRecipe, store: LatentStore, run: Path) -> list[str]:
    said: list[str] = []
    options = {"report": lambda _: None, "stop": StopRequest(), "say": said.append}
    train(recipe, store_path=store.path, run=run, device=CPU, **options)
    return said


def test_a_run_says_what_it_begins_from_and_what_trains(caption_store: LatentStore, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    begin, trained = said_by(train_recipe("pixart-tiny", *PLAIN), caption_store, first)
    access = f"; store '{caption_store.path}' is {caption_store.access}"
    assert begin == f"run '{first}' starts from new weights{access}"
    assert re.fullmatch("pixart-tiny: training all [0-9.]+ k parameters", trained)
    again = train_recipe("pixart-tiny", *PLAIN, "run.steps=2")
    assert said_by(again, caption_store, first)[0] == f"run '{first}' resumes after step 1{access}"
    adapters = ["lora.rank=2", "lora.alpha=8", f"model.init_from={first}", "schedule.warmup_steps=1"]
    begin, trained, short = said_by(train_recipe("pixart-tiny", *PLAIN, *adapters), caption_store, second)
    source = first / "snapshot-2"
    assert begin == f"run '{second}' starts from the averaged weights of '{source}', step 2{access}"
    # 16 matrices of 2 blocks, 32 x 32: each has 2 x 32 parameters in A and as many in B.
    assert trained.startswith("pixart-tiny: adapters of rank 2, alpha 8 train, 2.0 k of ")
    assert trained.endswith(f"parameters; '{source}' is frozen")
    assert short.startswith("schedule.warmup_steps 1: the learning rate still rises when the run ends at step 1,")
