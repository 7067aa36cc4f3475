"""Shifts of times by size: those of the pipelines, in training, in grids and in ``leandit sample``."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu
from features import make_nemo, run_import
from making import CPU, train_recipe
from runs import run_to

from leandit.datasets.store import LatentStore
from leandit.errors import RecipeError, RunError
from leandit.tools.export.export import export
from leandit.tools.sample.request import SampleRequest
from leandit.tools.sample.sample import sample_grid
from leandit.train.config import load
from leandit.train.models.conditioning import Conditioner
from leandit.train.models.spec import ModelSpec
from leandit.train.run.state import Run
from leandit.train.sampling.guided import SamplingModel, Solver, draw_latents
from leandit.train.sampling.snapshot import load_snapshot
from leandit.train.step import prepare

pytestmark = pytest.mark.usefixtures("tiny_models")
FLUX_1 = {"shift": 3.0, "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15}
QWEN = FLUX_1 | {"shift": 1.0, "max_shift": 0.9, "max_image_seq_len": 8192, "shift_terminal": 0.02}
EULER = {"_class_name": "FlowMatchEulerDiscreteScheduler"}


def linear_mu(tokens: int, config: dict[str, Any]) -> float:
    """As ``calculate_shift`` of diffusers' pipelines."""
    slope = (config["max_shift"] - config["base_shift"]) / (config.get("max_image_seq_len", 4096) - 256)
    return config["base_shift"] + slope * (tokens - 256)


def times_drawn(
    name: str, scheduler: dict[str, Any], size: tuple[int, int], solver: Solver, **more: Any
) -> list[float]:
    """The times, 0 to 1, at which a model is asked for its velocity."""
    sizes = {"channels": 4, "out_channels": 4, "num_classes": 3, "caption_width": 0, "base_size": 8}
    spec, asked = ModelSpec(name=name, scheduler=scheduler, **sizes), list[float]()

    def model(x: torch.Tensor, t: torch.Tensor, _: Any) -> torch.Tensor:
        asked.append(float(t[0]) / 1000)
        return torch.zeros_like(x)

    objective = load("sd3.5-medium-512", ["objective.shift=1.0"]).objective
    conditioner = Conditioner(spec, None)
    drawn = SamplingModel(model, spec, objective, conditioner, **more)
    draw_latents(drawn, conditioner(torch.tensor([0]), {}), size=size, seed=0, solver=solver)
    return asked


@pytest.mark.parametrize(
    ("name", "config", "size", "factor"),
    [
        ("flux1-dev", FLUX_1, (128, 128), 3.1582),
        ("flux1-dev", FLUX_1, (64, 64), 1.8776),
        ("flux2-klein-4b", FLUX_1, (64, 64), 8.5969),
        ("qwen-image", QWEN, (128, 128), 2.0008),
        ("qwen-image", QWEN, (64, 96), 1.7433),
        ("z-image", {"shift": 6.0}, (128, 128), 6.0),
    ],
)
@pytest.mark.parametrize("steps", [28, 4])
def test_times_are_those_of_the_pipeline_of_the_weights(
    name: str, config: dict[str, Any], size: tuple[int, int], factor: float, steps: int
) -> None:
    theirs = FlowMatchEulerDiscreteScheduler(**config)
    tokens = math.prod(size) // (1 if name.startswith("flux2") else 4)
    mu = compute_empirical_mu(tokens, steps) if name.startswith("flux2") else linear_mu(tokens, FLUX_1 | config)
    theirs.set_timesteps(sigmas=np.linspace(1, theirs.sigma_min, steps).tolist(), mu=mu)
    asked = times_drawn(name, config | EULER, size, Solver(steps=steps, guidance=1.0))
    np.testing.assert_allclose(asked, theirs.sigmas[:-1].numpy(), rtol=1e-5)
    if (
        steps == 28 and config is not QWEN and name != "z-image"
    ):  # whose times are stretched, or shifted twice at the end
        base = np.linspace(1, 1e-3, steps)
        np.testing.assert_allclose(asked, factor * base / (1 + (factor - 1) * base), rtol=1e-4)
    if config is QWEN:
        assert asked[-1] == pytest.approx(0.02, abs=1e-6)


def test_a_number_replaces_the_scheduler_of_the_weights_and_every_sampler_takes_its_shift() -> None:
    size, config = (128, 128), FLUX_1 | EULER
    for more, solver in (
        ({}, Solver(steps=3, guidance=1.0, shift=2.0)),
        ({"sample_shift": 2.0}, Solver(steps=3, guidance=1.0)),
    ):
        asked = times_drawn("flux1-dev", config, size, solver, **more)
        theirs = FlowMatchEulerDiscreteScheduler(shift=2.0)
        theirs.set_timesteps(3)
        np.testing.assert_allclose(asked, theirs.sigmas[:-1].numpy(), rtol=1e-6)
    for sampler in ("heun", "dpm", "sde"):
        asked = times_drawn("flux1-dev", config, size, Solver(sampler=sampler, steps=20, guidance=1.0))
        plain = times_drawn("flux1-dev", {}, size, Solver(sampler=sampler, steps=20, guidance=1.0))
        assert np.mean(np.array(asked) > 0.5) > 0.7 > np.mean(np.array(plain) > 0.5)
    sana = {"_class_name": "DPMSolverMultistepScheduler", "use_flow_sigmas": True, "flow_shift": 3.0}
    theirs = FlowMatchEulerDiscreteScheduler(shift=3.0)
    theirs.set_timesteps(5)
    asked = times_drawn("sana-600m", sana, (16, 16), Solver(steps=5, guidance=1.0))
    np.testing.assert_allclose(asked, theirs.sigmas[:-1].numpy(), rtol=1e-6)


def flux(store_settings: tuple[str, ...] = ()) -> Any:
    return train_recipe("qwen-image-tiny", *store_settings)


def test_training_shifts_each_bucket_by_its_size(caption_store: LatentStore) -> None:
    plain = Run.open(flux(), [caption_store], CPU, print)
    shifted = Run.open(flux(("objective.shift=resolution",)), [caption_store], CPU, print)
    seen = set[int]()
    for batch in plain.loader:
        times, by_size = (prepare(run, batch, 1).times for run in (plain, shifted))
        tokens = math.prod(plain.token_grid(batch.latents))
        factor = math.exp(linear_mu(tokens, QWEN))
        torch.testing.assert_close(by_size, factor * times / (1 + (factor - 1) * times))
        seen.add(tokens)
    assert len(seen) > 1


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("dit-s-4", ["objective.kind=flow", "objective.shift=resolution"], "computes no shift .*flux1, flux2"),
        ("sana-tiny", ["run.sample_shift=resolution"], r"run\.sample_shift 'resolution'.*computes no shift"),
        ("dit-s-4", ["run.sample_shift=2.0"], r"run\.sample_shift is for objective\.kind = .flow."),
        ("dit-s-4", ["objective.shift=resolution"], r"shift is a key of kind = .flow."),
    ],
)
def test_a_shift_that_the_model_does_not_have_is_refused(
    name: str, settings: list[str], words: str, store_of: dict[str, LatentStore]
) -> None:
    with pytest.raises(RecipeError, match=words):
        Run.open(train_recipe(name, *settings), [store_of[name]], CPU, print)


@pytest.fixture
def qwen_store(tmp_path: Path) -> LatentStore:
    """Latents and captions of Qwen-Image."""
    run_import(make_nemo(tmp_path / "cache", "qwen_image"), tmp_path / "store")
    return LatentStore(tmp_path / "store")


@pytest.fixture(scope="module")
def weights(caption_store: LatentStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformer in a pipeline's folder, with a scheduler that shifts by 6."""
    root = tmp_path_factory.mktemp("weights")
    run_to(train_recipe("sana-tiny", "run.steps=1"), caption_store, root / "run")
    model: Any = load_snapshot(root / "run", CPU).model
    model.net.save_pretrained(root / "pipeline/transformer")
    DPMSolverMultistepScheduler(
        use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=6.0, solver_order=3
    ).save_pretrained(root / "pipeline/scheduler")
    return root / "pipeline"


@pytest.mark.parametrize("source", ["", "transformer"])
def test_a_run_keeps_the_scheduler_of_its_weights_in_sample_export_and_the_runs_that_begin_with_it(
    source: str, weights: Path, caption_store: LatentStore, tmp_path: Path
) -> None:
    begins = f"model.init_from={weights / source}"
    run_to(train_recipe("sana-tiny", begins, "run.steps=1", "objective.shift=3.0"), caption_store, tmp_path / "run")
    request = SampleRequest(count=1, steps=1, guidance=1.0)
    assert sample_grid(tmp_path / "run", request, out=tmp_path / "grid", device=CPU)["shift"] == 6.0
    again = f"model.init_from={tmp_path / 'run'}"
    run_to(train_recipe("sana-tiny", again, "run.steps=1"), caption_store, tmp_path / "again")
    assert load_snapshot(tmp_path / "again", CPU).spec.scheduler["flow_shift"] == 6.0
    export(tmp_path / "again", tmp_path / "out")
    exported = json.loads((tmp_path / "out/scheduler/scheduler_config.json").read_text())
    assert (exported["_class_name"], exported["solver_order"]) == ("DPMSolverMultistepScheduler", 3)
    assert json.loads((tmp_path / "out/model_index.json").read_text())["scheduler"][1] == exported["_class_name"]


def test_sample_shift_replaces_the_scheduler_of_the_weights_in_sample_and_export(
    weights: Path, caption_store: LatentStore, tmp_path: Path
) -> None:
    settings = (f"model.init_from={weights}", "run.steps=1", "run.sample_shift=2.0")
    run_to(train_recipe("sana-tiny", *settings), caption_store, tmp_path / "run")
    request = SampleRequest(count=1, steps=1, guidance=1.0)
    assert sample_grid(tmp_path / "run", request, out=tmp_path / "grid", device=CPU)["shift"] == 2.0
    export(tmp_path / "run", tmp_path / "out")
    exported = json.loads((tmp_path / "out/scheduler/scheduler_config.json").read_text())
    assert (exported["_class_name"], exported["shift"]) == ("FlowMatchEulerDiscreteScheduler", 2.0)


def test_a_run_of_new_weights_that_trains_by_size_draws_and_exports_by_size(
    qwen_store: LatentStore, tmp_path: Path
) -> None:
    recipe = train_recipe("qwen-image-tiny", "objective.shift=resolution", "run.steps=1", "model.channels=16")
    run_to(recipe, qwen_store, tmp_path / "run")
    assert load_snapshot(tmp_path / "run", CPU).shift_of(Solver(steps=3)).at(4096, 3) == pytest.approx(2.0008, abs=1e-4)
    export(tmp_path / "run", tmp_path / "out")
    exported = json.loads((tmp_path / "out/scheduler/scheduler_config.json").read_text())
    names = ("use_dynamic_shifting", "base_shift", "max_shift", "max_image_seq_len", "shift_terminal")
    assert [exported[name] for name in names] == [True, 0.5, 0.9, 8192, 0.02]


@pytest.mark.parametrize(
    ("change", "words"),
    [({"flow_shift": "many"}, "flow_shift is 'many'"), ({"_class_name": "os.system"}, "expected a scheduler")],
    ids=str,
)
def test_a_scheduler_that_cannot_be_read_is_refused(
    change: dict[str, Any], words: str, weights: Path, caption_store: LatentStore, tmp_path: Path
) -> None:
    path = tmp_path / "scheduler/scheduler_config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(json.loads((weights / "scheduler/scheduler_config.json").read_text()) | change))
    (tmp_path / "transformer").symlink_to(weights / "transformer")
    with pytest.raises(RunError, match=words):
        Run.open(train_recipe("sana-tiny", f"model.init_from={tmp_path}"), [caption_store], CPU, print)
