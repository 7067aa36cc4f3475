"""Sampling: the solvers recover known targets, and ``sample`` finds captions, buckets and decoders or says why not."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from making import CPU, caption_recipe, label_recipe, no_progress, train_recipe
from PIL import Image
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from leandit.datasets.errors import EncoderError, LeanditError, RecipeError, RunError
from leandit.datasets.order.shuffle import keyed_hash
from leandit.datasets.recipe import to_toml
from leandit.datasets.store import LatentStore
from leandit.precompute.encoders.model_files import local_folder
from leandit.tools.cli.preflight import check_evaluation, check_subjects
from leandit.tools.sample.sample_set import sample_set
from leandit.tools.sample.sampler import (
    SampleRequest,
    decoder_of,
    draw_pictures,
    make_conditioning,
    resolve_request,
    sample,
    subject_by_subject,
)
from leandit.train.loop import StopRequest, train
from leandit.train.models.conditioning import Conditioner, Conditioning
from leandit.train.models.spec import ModelSpec
from leandit.train.objective_recipe import ObjectiveSection
from leandit.train.objectives.losses import ddpm_schedule
from leandit.train.sampling.guided import Guided, Solver, draw_latents, float32_products
from leandit.train.sampling.schedulers import SAMPLERS, Sampler
from leandit.train.sampling.snapshot import Snapshot, load_snapshot
from leandit.train.weights.dit_checkpoints import write_official

LABELS = ModelSpec(name="DiT-S/2", channels=2, out_channels=4, num_classes=2, caption_width=0, base_size=8)
ALPHA_BAR = ddpm_schedule(CPU)["alpha_bar"].double()
MEANS = torch.tensor([0.7, -1.2, 3.0])  # of the classes 0, 1 and null


pytestmark = pytest.mark.usefixtures("tiny_models")


class Known(nn.Module):
    """The exact denoiser of latents that are Gaussian with the mean of their class.

    Args:
      objective: what it puts out: velocity, or noise or v, and a variance between the two bounds.
      std: of the latents, in each place.
    """

    def __init__(self, objective: ObjectiveSection, std: float) -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(1))
        self._kind, self._std = objective.kind, std
        self._predicts_v = objective.predict == "v"

    def forward(self, x: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        assert conditioning.labels is not None
        mean = MEANS[conditioning.labels].double()[:, None, None, None]
        if self._kind == "flow":
            b = t.double()[:, None, None, None] / 1000
            a = 1 - b
        else:
            alpha_bar = ALPHA_BAR[t.long()][:, None, None, None]
            a, b = alpha_bar.sqrt(), (1 - alpha_bar).sqrt()
        # x_t = a data + b noise; the best guesses of both, given x_t (Bishop 2006, equation 2.116).
        surprise = (x.double() - a * mean) / (a**2 * self._std**2 + b**2)
        data, noise = mean + a * self._std**2 * surprise, b * surprise
        if self._kind == "flow":
            return (noise - data).float()
        return torch.cat([a * noise - b * data if self._predicts_v else noise, torch.zeros_like(noise)], 1).float()


def snapshot_of(objective: ObjectiveSection, std: float) -> Snapshot:
    model = Known(objective, std).eval()
    return Snapshot(Path(), 0, model, LABELS, objective, None, None, Conditioner(LABELS, None), {})  # type: ignore


def draw(objective: ObjectiveSection, std: float, count: int = 2, **options: Any) -> Tensor:
    labels = torch.arange(2).repeat_interleave(count // 2)
    seed = int(options.pop("seed", 0))
    solver = Solver(**({"steps": 100, "guidance": 1.0} | options))  # type: ignore
    return draw_latents(snapshot_of(objective, std), Conditioning(labels=labels), size=(8, 8), seed=seed, solver=solver)


OBJECTIVES = [
    ObjectiveSection(kind="flow"),
    ObjectiveSection(kind="flow", shift=3.0),
    ObjectiveSection(kind="ddpm"),
    ObjectiveSection(kind="ddpm", predict="v"),
]
WAYS = [(objective, sampler) for objective in OBJECTIVES for sampler in SAMPLERS[objective.kind]]
WAYS_IDS = [f"{objective.kind}-{objective.shift:g}-{objective.predict}-{sampler}" for objective, sampler in WAYS]


@pytest.mark.parametrize(("objective", "sampler"), WAYS, ids=WAYS_IDS)
@pytest.mark.parametrize("steps", [1, 4, 50])
def test_a_constant_target_is_recovered_exactly(objective: ObjectiveSection, sampler: Sampler, steps: int) -> None:
    steps = max(steps, 2) if sampler in ("ddpm", "sde") else steps
    latents = draw(
        objective, 0.0, steps=steps, sampler=sampler, last_step="tweedie"
    )  # "mean" goes beyond by 0.04 noise
    tolerance = 1e-3 if objective.kind == "flow" else 0.02  # DDIM's first step divides by the square root of 4e-5
    torch.testing.assert_close(latents[0], torch.full((2, 8, 8), 0.7), rtol=0, atol=tolerance)
    torch.testing.assert_close(latents[1], torch.full((2, 8, 8), -1.2), rtol=0, atol=tolerance)


@pytest.mark.parametrize(("objective", "sampler"), WAYS, ids=WAYS_IDS)
@pytest.mark.parametrize("steps", [150, 250, 350])
def test_a_gaussian_target_is_recovered(objective: ObjectiveSection, sampler: Sampler, steps: int) -> None:
    latents = draw(objective, 0.5, count=64, steps=steps, sampler=sampler)
    for part, mean in ((latents[:32], 0.7), (latents[32:], -1.2)):
        assert part.mean() == pytest.approx(mean, abs=0.02)
        assert part.std() == pytest.approx(0.5, abs=0.015 if sampler not in ("ddpm", "sde") else 0.03)


@pytest.mark.parametrize(("sampler", "steps"), [("ddim", 1000), ("dpm", 999), ("ddpm", 1000)])
def test_as_many_steps_as_there_are_times_are_as_good(sampler: Sampler, steps: int) -> None:
    assert draw(OBJECTIVES[2], 0.5, steps=steps, sampler=sampler).std(dim=(1, 2, 3)) == pytest.approx(0.5, abs=0.1)
    with pytest.raises(RecipeError, match="--sampler dpm needs 999 at most"):
        draw(OBJECTIVES[2], 0.5, steps=1000, sampler="dpm")


def test_a_learned_variance_is_never_guided() -> None:
    outputs = []
    for channels in (2, 4):
        solver = Solver("ddpm", guidance=3.0, guided_channels=channels)
        labels = Conditioning(labels=torch.tensor([0, 1]))
        x = torch.randn((2, 2, 8, 8), generator=torch.Generator().manual_seed(0))
        outputs.append(Guided(snapshot_of(OBJECTIVES[2], 0.5), labels, solver, CPU, (2, 8, 8))(x, 500.0))
    assert torch.equal(*outputs)


def test_guidance_moves_away_from_null_by_its_formula() -> None:
    latents = draw(OBJECTIVES[0], 0.0, guidance=3.0)
    assert latents[0].mean() == pytest.approx(3.0 + 3 * (0.7 - 3.0), abs=1e-2)
    assert latents[1].mean() == pytest.approx(3.0 + 3 * (-1.2 - 3.0), abs=1e-2)


@pytest.mark.parametrize(("objective", "sampler"), WAYS, ids=WAYS_IDS)
def test_a_picture_depends_on_the_seed_and_its_number_alone(objective: ObjectiveSection, sampler: Sampler) -> None:
    snapshot, solver = snapshot_of(objective, 0.5), Solver(sampler, steps=5, guidance=2.0)

    def drawn(numbers: list[int], seed: int = 0) -> Tensor:
        torch.manual_seed(len(numbers))
        labels = torch.tensor(numbers) % 2
        return draw_latents(
            snapshot, Conditioning(labels=labels), size=(8, 8), seed=seed, solver=solver, numbers=numbers
        )

    alone, together = torch.cat([drawn([7]), drawn([2])]), drawn([2, 5, 7])
    torch.testing.assert_close(alone, together[[2, 0]], rtol=1e-5, atol=1e-5)
    assert (drawn([7], seed=1) - alone[:1]).abs().max() > 0.1


@pytest.mark.parametrize(("objective", "sampler"), WAYS, ids=WAYS_IDS)
def test_guidance_asks_for_null_within_its_interval_alone_and_in_one_batch(
    objective: ObjectiveSection, sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[float, list[int]]] = []
    forward = Known.forward

    def watch(self: Known, x: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        assert conditioning.labels is not None
        assert t.unique().numel() == 1
        seen.append((float(t[0]) / 1000, conditioning.labels.tolist()))
        return forward(self, x, t, conditioning)

    monkeypatch.setattr(Known, "forward", watch)
    draw(objective, 0.5, steps=10, sampler=sampler, guidance=2.0, interval=(0.3, 0.6))
    assert len(seen) == (19 if sampler == "heun" else 10)
    guided = [labels for t, labels in seen if 0.3 <= t <= 0.6]
    assert 0 < len(guided) < len(seen)
    assert all(labels == [0, 1, 2, 2] for labels in guided)
    assert all(labels == [0, 1] for t, labels in seen if not 0.3 <= t <= 0.6)


@pytest.mark.parametrize("kind", ["flow", "ddpm"])
def test_guidance_of_the_first_channels_leaves_the_others_as_they_are(kind: Any) -> None:
    objective = ObjectiveSection(kind=kind)
    plain, all_of_them, first = (
        draw(objective, 0.5, steps=8, guidance=guidance, guided_channels=channels)
        for guidance, channels in ((1.0, 0), (3.0, 0), (3.0, 1))
    )
    torch.testing.assert_close(first[:, :1], all_of_them[:, :1])
    torch.testing.assert_close(first[:, 1:], plain[:, 1:])
    assert (first[:, :1] - plain[:, :1]).abs().max() > 1


def test_the_learned_variance_is_what_the_ancestral_sampler_draws_with() -> None:
    """Between the two bounds of Nichol and Dhariwal 2021, equation 15, of the steps that are made."""
    from leandit.train.sampling.schedulers import build_scheduler

    scheduler = build_scheduler(ObjectiveSection(kind="ddpm"), "ddpm")
    scheduler.set_timesteps(250)
    assert scheduler.timesteps[0] == 999
    assert scheduler.timesteps[-1] == 0
    t, before = scheduler.timesteps[100], scheduler.timesteps[101]
    beta = 1 - ALPHA_BAR[t] / ALPHA_BAR[before]
    posterior = beta * (1 - ALPHA_BAR[before]) / (1 - ALPHA_BAR[t])
    x, generators = torch.zeros(64, 1, 16, 16), [torch.Generator().manual_seed(i) for i in range(64)]
    for value in (-1.0, 0.0, 1.0):
        output = torch.cat([torch.zeros_like(x), torch.full_like(x, value)], 1)
        drawn = scheduler.step(output, t, x, generator=generators).prev_sample
        share = (value + 1) / 2
        wanted = (share * beta.log() + (1 - share) * posterior.log()).exp().sqrt()
        assert drawn.std() == pytest.approx(float(wanted), rel=0.02)


SIT_DIFFUSION: dict[str, Callable[[float], float]] = {  # of SiT's time, 0 is noise
    "sigma": lambda s: 1 - s,
    "linear": lambda s: 1 - s,
    "constant": lambda s: 1.0,
    "decreasing": lambda s: 0.25 * (math.cos(math.pi * s) + 1) ** 2,
    "increasing-decreasing": lambda s: math.sin(math.pi * s) ** 2,
}


@pytest.mark.parametrize("diffusion", SIT_DIFFUSION)
@pytest.mark.parametrize("last_step", ["mean", "euler", "tweedie"])
def test_the_sde_is_sits_in_its_own_time(diffusion: Any, last_step: Any) -> None:
    """A loop in float64 from 0 (noise) to 1 (data), with SiT's velocity, its score, and noise drawn image by image."""
    labels, steps, numbers = Conditioning(labels=torch.tensor([0, 1, 0])), 12, (4, 1, 9)
    snapshot = snapshot_of(OBJECTIVES[0], 0.5)
    solver = Solver("sde", steps=steps, guidance=2.0, interval=(0.1, 0.9), diffusion=diffusion, last_step=last_step)
    found = draw_latents(snapshot, labels, size=(8, 8), seed=3, solver=solver, numbers=numbers)

    keys = [torch.Generator().manual_seed(keyed_hash(3, n) % 2**63) for n in numbers]
    forward = Guided(snapshot, labels, solver, CPU, (2, 8, 8))

    def draw_noise() -> Tensor:
        return torch.stack([torch.randn((2, 8, 8), generator=key) for key in keys]).double()

    x = draw_noise()
    times = [0.96 * i / (steps - 1) for i in range(steps)]
    width = times[1]
    for s in times:
        velocity = -forward(x.float(), 1000 * (1 - s)).double()
        score = (s * velocity - x) / (1 - s)
        drift = velocity + SIT_DIFFUSION[diffusion](s) * score
        if s < times[-1]:
            x = x + drift * width + math.sqrt(2 * SIT_DIFFUSION[diffusion](s) * width) * draw_noise()
        elif last_step == "tweedie":
            x = x / s + (1 - s) ** 2 / s * score
        else:
            x = x + 0.04 * (drift if last_step == "mean" else velocity)
    torch.testing.assert_close(found, x.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("diffusion", SIT_DIFFUSION)
@pytest.mark.parametrize("shift", [0.3, 1.0, 3.0])
def test_every_diffusion_has_the_marginals_of_the_flow(diffusion: str, shift: float) -> None:
    how = {"sampler": "sde", "steps": 400, "diffusion": diffusion, "shift": shift, "last_step": "tweedie"}
    latents = draw(OBJECTIVES[0], 0.5, count=64, **how)
    for part, mean in ((latents[:32], 0.7), (latents[32:], -1.2)):
        assert part.mean() == pytest.approx(mean, abs=0.03)
        assert part.std() == pytest.approx(0.5, abs=0.03)
    assert (draw(OBJECTIVES[0], 0.5, seed=1, **how) - draw(OBJECTIVES[0], 0.5, seed=1, **how)).abs().max() == 0


@pytest.mark.parametrize("sampler", SAMPLERS["flow"])
def test_the_shift_of_sampling_takes_the_place_of_that_of_training(sampler: Sampler) -> None:
    trained = ObjectiveSection(kind="flow", shift=10 / 3)
    own, asked = (
        draw(one, 0.5, steps=6, sampler=sampler, shift=s) for one, s in ((trained, None), (OBJECTIVES[0], 10 / 3))
    )
    assert torch.equal(own, asked)
    assert (draw(OBJECTIVES[0], 0.5, steps=6, sampler=sampler) - asked).abs().max() > 1e-3


def dpm_by_its_formula(x: Tensor, velocity: Callable[[Tensor, float], Tensor], steps: int, shift: float) -> Tensor:
    """DPM-Solver++ of second order, multistep, in float64 (Lu et al. 2022, algorithm 2), at Sana's times."""
    even = [1 - (1 - 1 / 1000) * i / steps for i in range(steps)]
    even = [t - 1 / 1000 for t in even]  # from just before the noise; the end, no noise at all, comes below
    sigmas = [shift * t / (1 + (shift - 1) * t) for t in even]
    x, previous, h_before = x.double(), None, 0.0
    for i, sigma in enumerate(sigmas):
        data = x - sigma * velocity(x, 1000 * sigma).double()
        if i == len(sigmas) - 1:
            return data
        after = sigmas[i + 1]
        h = math.log((1 - after) / after) - math.log((1 - sigma) / sigma)
        guess = data if previous is None else data + (data - previous) * h / (2 * h_before)
        x = after / sigma * x + (1 - after) * (1 - math.exp(-h)) * guess
        previous, h_before = data, h
    raise AssertionError("no steps")


def test_the_flow_solver_draws_as_sana_does() -> None:
    from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler

    objective, labels = ObjectiveSection(kind="flow", shift=3.0), Conditioning(labels=torch.tensor([0, 1]))
    snapshot, solver = snapshot_of(objective, 0.5), Solver("dpm", steps=20, guidance=4.5)
    found = draw_latents(snapshot, labels, size=(8, 8), seed=3, solver=solver)

    shape, keys = (2, 8, 8), [torch.Generator().manual_seed(keyed_hash(3, n) % 2**63) for n in (0, 1)]
    noise, forward = (
        torch.stack([torch.randn(shape, generator=key) for key in keys]),
        Guided(snapshot, labels, solver, CPU, (2, 8, 8)),
    )
    own = dpm_by_its_formula(noise, lambda x, t: forward(x.float(), t), 20, 3.0)
    torch.testing.assert_close(found, own.float(), rtol=1e-4, atol=1e-4)

    scheduler: Any = DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, algorithm_type="dpmsolver++"
    )
    scheduler.set_timesteps(20)
    x, rounded = noise, noise
    for t, sigma in zip(scheduler.timesteps, scheduler.sigmas, strict=False):
        x = scheduler.step(forward(x, 1000 * float(sigma)), t, x).prev_sample
    torch.testing.assert_close(found, x)
    scheduler.set_timesteps(20)
    for t in scheduler.timesteps:
        rounded = scheduler.step(forward(rounded, float(t)), t, rounded).prev_sample
    assert 1e-4 < (found - rounded).abs().max() < 0.1  # the pipeline's whole times are others


@pytest.mark.parametrize("steps", [900, 999])
def test_the_flow_solver_starts_at_its_first_time_with_any_number_of_steps(steps: int) -> None:
    latents = draw(ObjectiveSection(kind="flow", shift=6.0), 0.0, steps=steps, sampler="dpm")
    torch.testing.assert_close(latents[0], torch.full((2, 8, 8), 0.7), rtol=0, atol=1e-3)


@pytest.mark.parametrize("tf32", [False, True])
def test_products_are_in_tf32_where_asked_and_only_while_drawing(tf32: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, seen = Known.forward, set[tuple[bool, bool]]()

    def flags() -> tuple[bool, bool]:
        return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32

    def watch(self: Known, x: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        seen.add(flags())
        return forward(self, x, t, conditioning)

    monkeypatch.setattr(Known, "forward", watch)
    solver = SampleRequest(steps=2, precision="tf32" if tf32 else "fp32", guidance=1.0).solver(CPU)
    label = Conditioning(labels=torch.tensor([0]))
    with float32_products(not tf32):
        draw_latents(snapshot_of(OBJECTIVES[0], 0.5), label, size=(8, 8), seed=0, solver=solver)
        assert flags() == (not tf32, not tf32)
    assert seen == {(tf32, tf32)}


@pytest.mark.parametrize(("kind", "sampler"), [("flow", "ddim"), ("ddpm", "euler")])
def test_a_sampler_of_another_objective_is_refused(kind: Any, sampler: Sampler) -> None:
    with pytest.raises(RecipeError, match=f"--sampler {sampler}.*{kind}"):
        draw(ObjectiveSection(kind=kind), 0.5, sampler=sampler)


def test_the_ancestral_sampler_needs_both_ends_of_the_time() -> None:
    with pytest.raises(RecipeError, match=r"--steps 1.*2 at least"):
        draw(ObjectiveSection(kind="ddpm"), 0.5, sampler="ddpm", steps=1)


def test_guidance_of_one_never_asks_for_null(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    forward = Known.forward

    def watch(self: Known, x: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        assert conditioning.labels is not None
        seen.append(conditioning.labels)
        return forward(self, x, t, conditioning)

    monkeypatch.setattr(Known, "forward", watch)
    draw(OBJECTIVES[0], 0.5, steps=3)
    assert len(seen) == 3
    assert torch.stack(seen).max() == 1
    draw(OBJECTIVES[0], 0.5, steps=3, guidance=2.0)
    assert torch.stack(seen[3:]).max() == 2


def test_the_draw_depends_on_its_seed_alone() -> None:
    torch.manual_seed(1)
    first = draw(OBJECTIVES[2], 0.5, steps=5)
    torch.manual_seed(2)
    assert torch.equal(first, draw(OBJECTIVES[2], 0.5, steps=5))
    assert not torch.equal(first, draw(OBJECTIVES[2], 0.5, steps=5, seed=1))


@dataclass(frozen=True)
class Runs:
    """A trained run on labels and one on captions."""

    labels: Path
    captions: Path


@pytest.fixture(scope="module")
def runs(label_store: LatentStore, caption_store: LatentStore, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    root = tmp_path_factory.mktemp("runs")
    for name, store in (("dit-s-4", label_store), ("pixart-tiny", caption_store)):
        recipe = train_recipe(name, "run.steps=4", "run.ema_decay=0.0", "run.checkpoint_every=4", "optimizer.lr=1e-2")
        train(recipe, store_path=store.path, run=root / name, device=CPU, report=lambda _: None, stop=StopRequest())
    return Runs(root / "dit-s-4", root / "pixart-tiny")


Draw = Callable[..., dict]


@pytest.fixture
def go(tmp_path: Path) -> Draw:
    """Sample into a folder of the test."""

    def run(
        path: Path,
        request: SampleRequest,
        *,
        store: Path | None = None,
        vae: str | None = None,
        text: str | None = None,
    ) -> dict:
        return sample(path, request, out=tmp_path / "out", device=CPU, store=store, vae=vae, text=text)

    return run


def test_sampling_twice_gives_the_same_picture_and_another_seed_another(go: Draw, runs: Runs) -> None:
    grids = []
    for seed in (0, 0, 1):
        result = go(runs.labels, SampleRequest(labels=(0, 2), steps=3, seed=seed))
        grids.append(Path(result["grid"]).read_bytes())
    assert grids[0] == grids[1] != grids[2]
    assert (result["samples"], result["warning"]) == (["0: n000", "2: n002"], None)


@pytest.mark.parametrize("bucket", ["32x32", "64x32", "96x64"])
def test_other_sizes_than_those_of_the_store_work(bucket: str, go: Draw, runs: Runs) -> None:
    assert go(runs.labels, SampleRequest(labels=(1,), steps=2, bucket=bucket))["bucket"] == bucket


def test_captions_of_the_store_equal_those_encoded_live(
    go: Draw, runs: Runs, caption_store: LatentStore, tmp_path: Path
) -> None:
    captions = caption_store.captions["text"].to_pylist()[:4]
    moved = shutil.copytree(runs.captions, tmp_path / "elsewhere/run")  # from here the run does not find its store
    snapshot = load_snapshot(runs.captions, CPU)
    request = SampleRequest(captions=captions)
    stored = make_conditioning(snapshot, request, runs.captions, None, None, CPU)[1]
    live = make_conditioning(snapshot, request, moved, None, "shipped:t5", CPU)[1]
    assert stored.captions is not None
    assert live.captions is not None
    assert stored.caption_mask is not None
    assert live.caption_mask is not None
    assert torch.equal(stored.caption_mask, live.caption_mask)
    torch.testing.assert_close(stored.captions, live.captions, rtol=2e-3, atol=2e-3)  # stored as float16
    assert not torch.equal(stored.captions, live.captions)  # so they were not both read from the store


def test_any_new_caption_can_be_drawn_beside_one_of_the_store(go: Draw, runs: Runs) -> None:
    captions = ("a tiny yellow square", "a red circle", "a purple triangle and a cyan square")
    assert go(runs.captions, SampleRequest(captions=captions, steps=2))["samples"] == list(captions)


def test_without_a_wish_labels_or_captions_of_the_store_are_drawn(go: Draw, runs: Runs) -> None:
    assert go(runs.labels, SampleRequest(count=3, steps=1))["samples"] == ["0: n000", "1: n001", "2: n002"]
    assert len(go(runs.captions, SampleRequest(count=3, steps=1))["samples"]) == 3


@pytest.mark.parametrize(
    ("which", "request_", "words"),
    [
        ("labels", SampleRequest(labels=(3,)), "label: no class 3.*0 to 2"),
        ("labels", SampleRequest(labels=(-1,)), "label: no class -1"),
        ("labels", SampleRequest(labels=("m001",)), "--label: no class 'm001'. Did you mean 'n001'"),
        ("labels", SampleRequest(guidance=-1.0), "--guidance -1: needed a number from 0 to 100"),
        ("labels", SampleRequest(guidance=float("nan")), "--guidance nan"),
        ("labels", SampleRequest(guided_channels=5), "--guidance-channels 5: the latents have 4"),
        ("labels", SampleRequest(captions=("a red circle",)), "takes class labels"),
        ("captions", SampleRequest(labels=(1,)), "takes captions"),
        ("labels", SampleRequest(labels=(1,), bucket="30x32"), "30x32.*multiples"),
        ("labels", SampleRequest(labels=(1,), bucket="big"), "big.*HEIGHTxWIDTH"),
    ],
)
def test_what_the_model_cannot_draw_is_refused(
    which: str, request_: SampleRequest, words: str, go: Draw, runs: Runs
) -> None:
    with pytest.raises(RecipeError, match=words):
        go(getattr(runs, which), request_)


@pytest.mark.parametrize(
    ("run", "labels", "captions", "message"),
    [
        ("labels", ["m001"], [], "--label: no class 'm001'. Did you mean 'n001'"),
        ("labels", [], ["a red circle"], "--caption: model 'DiT-S/4' takes class labels"),
        ("captions", ["1"], [], "--label: model 'pixart-tiny' takes captions"),
    ],
)
def test_what_a_run_cannot_draw_is_refused_by_its_folder_alone(
    runs: Runs, run: str, labels: list[str], captions: list[str], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        check_subjects(getattr(runs, run), labels, captions)


def test_the_look_at_a_snapshot_leaves_what_can_be_drawn_and_what_is_damaged(runs: Runs, tmp_path: Path) -> None:
    check_subjects(runs.labels, ["n001", "2"], [])
    check_subjects(runs.captions, [], ["a red circle"])
    (tmp_path / "snapshot-4").mkdir()
    check_subjects(tmp_path, ["lion"], [])
    for content in ("{", "[]", "{}", '{"spec": {"caption_width": 0}}'):
        (tmp_path / "snapshot-4/state.json").write_text(content)
        check_subjects(tmp_path, ["lion"], [])


def test_labels_go_by_name_and_num_counts_pictures_of_each(go: Draw, runs: Runs, caption_store: LatentStore) -> None:
    named = go(runs.labels, SampleRequest(labels=("N002", "0", 1), count=2, steps=1))
    assert named["samples"] == ["2: n002"] * 2 + ["0: n000"] * 2 + ["1: n001"] * 2
    captions = caption_store.captions["text"].to_pylist()[:2]
    assert go(runs.captions, SampleRequest(captions=captions, count=3, steps=1))["samples"] == [
        *([captions[0]] * 3),
        *([captions[1]] * 3),
    ]


def test_pictures_of_one_label_differ_and_are_those_of_a_set(runs: Runs, tmp_path: Path) -> None:
    request = SampleRequest(labels=(2, 0), count=2, steps=2, guidance=1.0)
    places: dict[str, Any] = {"device": CPU, "store": None, "vae": None, "text": None}
    sample_set(runs.labels, request, out=tmp_path, progress=no_progress, **places)
    snapshot = load_snapshot(runs.labels, CPU)
    conditioning = make_conditioning(snapshot, request, runs.labels, None, None, CPU)[1]
    decoder = decoder_of(snapshot, None, CPU)
    numbers = subject_by_subject(request, 4)
    assert numbers == [0, 2, 1, 3]
    drawn = draw_pictures(snapshot, conditioning, decoder, bucket="32x32", request=request, numbers=numbers).astype(int)
    for pixels, number in zip(drawn, numbers, strict=True):
        assert np.abs(pixels - np.asarray(Image.open(tmp_path / f"{number:06d}.png")).astype(int)).max() <= 1
    assert np.abs(drawn[0] - drawn[1]).max() > 8


def test_latents_that_are_not_finite_are_no_picture(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot, request = load_snapshot(runs.labels, CPU), SampleRequest(labels=(2, 0), count=2, steps=2, guidance=1.0)
    conditioning = make_conditioning(snapshot, request, runs.labels, None, None, CPU)[1]
    decoder = decoder_of(snapshot, None, CPU)
    drawn = torch.zeros(4, snapshot.spec.channels, 4, 4)
    drawn[1, 0, 2, 3] = torch.nan
    monkeypatch.setattr("leandit.tools.sample.sampler.draw_latents", lambda *_, **__: drawn)
    with pytest.raises(RunError, match=r"snapshot-\d+': the latents of picture 2 are not finite"):
        draw_pictures(snapshot, conditioning, decoder, bucket="32x32", request=request, numbers=[0, 2, 1, 3])


def test_a_clip_score_of_classes_is_refused_before_they_are_drawn(runs: Runs, tmp_path: Path) -> None:
    how: dict[str, Any] = {"against": None, "clip": "clip.file", "features": "inception", "out": tmp_path}
    with pytest.raises(RecipeError, match=r"--clip: run .* draws classes"):
        check_evaluation(runs.labels, captions=None, **how)
    check_evaluation(runs.labels, captions=tmp_path, **how)
    check_evaluation(runs.captions, captions=None, **how)


def test_settings_of_another_sampler_are_refused_and_those_of_a_set_stay(go: Draw, runs: Runs, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="--diffusion, --last-step: they are of --sampler sde"):
        go(runs.labels, SampleRequest(labels=(0,), steps=2, guidance=1.0, diffusion="constant"))
    with pytest.raises(RecipeError, match="--shift 3: it is of flow matching"):
        go(runs.labels, SampleRequest(labels=(0,), steps=2, guidance=1.0, shift=3.0))


def test_guidance_of_a_model_that_never_saw_null_is_refused(go: Draw, runs: Runs) -> None:
    snapshot = load_snapshot(runs.labels, CPU)
    assert snapshot.state["drop"] == 0.1
    unguided = dataclasses.replace(snapshot, state=snapshot.state | {"drop": 0.0})
    with pytest.raises(RecipeError, match=r"trained with conditioning\.drop = 0"):
        resolve_request(unguided, SampleRequest(guidance=4.0))
    assert resolve_request(unguided, SampleRequest(guidance=1.0)).guidance == 1.0


def test_a_store_that_is_not_there_is_refused_when_it_is_named(go: Draw, runs: Runs, tmp_path: Path) -> None:
    with pytest.raises(LeanditError, match="nowhere"):
        go(runs.captions, SampleRequest(captions=("a red circle",), steps=1), store=tmp_path / "nowhere")


def test_a_run_without_a_snapshot_is_refused(go: Draw, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no snapshot"):
        go(tmp_path, SampleRequest())


def other_vae(folder: Path, channels: int) -> str:
    """A tiny untrained VAE of half the size each way, as the shipped one would be with other weights."""
    from diffusers import AutoencoderKL

    levels = 4
    AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=(4,) * levels,
        layers_per_block=1,
        norm_num_groups=2,
        latent_channels=channels,
        mid_block_add_attention=False,
    ).save_pretrained(folder)
    return str(folder)


def test_another_vae_is_used_with_a_warning(go: Draw, runs: Runs, tmp_path: Path) -> None:
    result = go(runs.labels, SampleRequest(labels=(0,), steps=1), vae=other_vae(tmp_path / "vae", 4))
    assert "not the VAE that the store was made with" in result["warning"]
    copy = shutil.copytree(local_folder("shipped:vae"), tmp_path / "same")  # type: ignore[arg-type]
    assert go(runs.labels, SampleRequest(labels=(0,), steps=1), vae=str(copy))["warning"] is None


def test_a_vae_of_other_channels_is_refused(go: Draw, runs: Runs, tmp_path: Path) -> None:
    with pytest.raises(
        EncoderError, match=r"decodes 8 channels of 1/\d+ of the pixels, the latents of snapshot .* have 4 of"
    ):
        go(runs.labels, SampleRequest(labels=(0,), steps=1), vae=other_vae(tmp_path / "vae", 8))


def test_compiled_blocks_draw_the_same_and_see_few_lengths(
    runs: Runs, caption_store: LatentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = set[int]()

    def compiled(forward: Any, *, dynamic: bool) -> Any:
        assert not dynamic

        def call(*args: Any, **options: Any) -> Any:
            lengths.add(options["encoder_hidden_states"].shape[1])
            return forward(*args, **options)

        return call

    monkeypatch.setattr(torch, "compile", compiled)
    drawn = []
    for snapshot in (load_snapshot(runs.captions, CPU), load_snapshot(runs.captions, CPU, compiled=True)):
        request = SampleRequest(captions=caption_store.captions["text"].to_pylist()[:2])
        given = make_conditioning(snapshot, request, runs.captions, None, None, CPU)[1]
        drawn.append(draw_latents(snapshot, given, size=(8, 8), seed=0, solver=Solver(steps=2, guidance=2.0)))
    assert lengths == {16}  # of null; a multiple of 64 would be beyond it
    torch.testing.assert_close(drawn[0], drawn[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "interval", "shapes"), [("labels", (0.0, 1.0), 1), ("captions", (0.3, 1.0), 2)])
def test_pictures_of_one_size_compile_each_kind_of_block_once_and_are_those_of_eager_blocks(
    kind: str, interval: tuple[float, float], shapes: int, runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter, real = CompileCounterWithBackend("eager"), torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **how: real(f, backend=counter, fullgraph=True, **how))
    run = getattr(runs, kind)
    request = SampleRequest(count=7, batch=3, steps=4, guidance=2.0, interval=interval)
    where: dict[str, Any] = {"device": CPU, "store": None, "vae": None, "text": None, "progress": no_progress}
    drawn = []
    torch._dynamo.reset()
    for compiled in (False, True):
        out = tmp_path / str(compiled)
        assert sample_set(run, dataclasses.replace(request, compiled=compiled), out=out, **where)["drawn"] == 7
        drawn.append(np.stack([np.asarray(Image.open(path)) for path in sorted(out.glob("*.png"))]).astype(int))
    torch._dynamo.reset()
    assert counter.frame_count == shapes
    assert np.abs(drawn[0] - drawn[1]).max() <= 2


def test_blocks_are_compiled_on_a_gpu_for_many_pictures_or_as_asked() -> None:
    gpu, set_of_many = torch.device("cuda"), SampleRequest(count=50_000)
    assert set_of_many.compiles(gpu)
    assert not set_of_many.compiles(CPU)
    assert not set_of_many.compiles(gpu, processes=64)
    assert not SampleRequest(count=256).compiles(gpu)
    assert SampleRequest(count=256, steps=250).compiles(gpu)
    assert SampleRequest(compiled=True).compiles(CPU)
    assert not dataclasses.replace(set_of_many, compiled=False).compiles(gpu)


def published_request(folder: Path, recipe: Any, encoders: Any, **options: Any) -> SampleRequest:
    for name, section in (("train.toml", recipe), ("precompute.toml", encoders)):
        (folder / name).write_text(to_toml(section))
    return SampleRequest(recipe=str(folder / "train.toml"), encoders=str(folder / "precompute.toml"), **options)


def test_a_published_dit_is_drawn_from_without_a_run(go: Draw, runs: Runs, tmp_path: Path) -> None:
    write_official(tmp_path / "DiT.safetensors", load_snapshot(runs.labels, CPU).model.state_dict())
    recipe = train_recipe("dit-s-4", "model.num_classes=3")
    given: dict[str, Any] = {"labels": (2, 0), "steps": 2, "bucket": "32x32"}
    wanted = grid_pixels(go(runs.labels, SampleRequest(**given)))
    result = go(tmp_path / "DiT.safetensors", published_request(tmp_path, recipe, label_recipe(), **given))
    assert (result["snapshot"], result["warning"]) == ("DiT.safetensors", None)
    assert np.array_equal(grid_pixels(result)[:32], wanted[:32])  # their names, below, are others


def test_a_published_pixart_is_drawn_from_without_a_run(go: Draw, runs: Runs, tmp_path: Path) -> None:
    model: Any = load_snapshot(runs.captions, CPU).model
    model.net.save_pretrained(tmp_path / "PixArt/transformer")
    recipe, encoders = train_recipe("pixart-tiny"), caption_recipe()
    given: dict[str, Any] = {"captions": ("a tiny yellow square", "a red circle"), "steps": 2, "guidance": 2.0}
    wanted = grid_pixels(go(runs.captions, SampleRequest(**given, bucket="64x64")))
    result = go(tmp_path / "PixArt", published_request(tmp_path, recipe, encoders, **given))
    assert (result["bucket"], result["warning"]) == ("64x64", None)  # of three, the square one
    found = grid_pixels(result)
    assert wanted.std() > 10
    assert np.abs(found - wanted).max() <= 6  # the store's null caption is float16, here it is float32


def grid_pixels(result: dict) -> np.ndarray:
    return np.asarray(Image.open(result["grid"])).astype(int)


def test_a_published_checkpoint_needs_both_recipes_and_classes(go: Draw, runs: Runs, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"--recipe.*--encoders"):
        go(runs.labels, SampleRequest(recipe="dit-xl-2-256"))
    with pytest.raises(RecipeError, match=r"model\.num_classes"):
        go(runs.labels, published_request(tmp_path, train_recipe("dit-s-4"), label_recipe()))
