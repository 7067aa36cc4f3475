"""Sampling: the solvers recover known targets, with the guidance and the noise of their formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, SanaPipeline
from making import CPU, shaken
from torch import Tensor, nn

from leandit.datasets.batches.captions import Captions
from leandit.datasets.order.shuffle import keyed_hash
from leandit.errors import RecipeError
from leandit.train.models.build import diffusers_config, transformer_class
from leandit.train.models.conditioning import Conditioner, Conditioning
from leandit.train.models.spec import ModelSpec
from leandit.train.objectives.losses import ddpm_schedule
from leandit.train.sampling.guided import SamplingModel, Solver, draw_latents, float32_products, guided
from leandit.train.sampling.schedulers import SAMPLERS, Sampler, build_scheduler
from leandit.train.techniques.registry import ObjectiveSection

LABELS = ModelSpec(name="DiT-S/2", channels=2, out_channels=4, num_classes=2, caption_width=0, base_size=8)
ALPHA_BAR = ddpm_schedule(CPU)["alpha_bar"].double()
MEANS = torch.tensor([0.7, -1.2, 3.0])  # of the classes 0, 1 and null


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


def snapshot_of(objective: ObjectiveSection, std: float) -> SamplingModel:
    return SamplingModel(Known(objective, std).eval(), LABELS, objective, Conditioner(LABELS, None))


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
    # The last step "mean" goes beyond by 0.04 noise.
    latents = draw(objective, 0.0, steps=steps, sampler=sampler, last_step="tweedie")
    tolerance = 1e-3 if objective.kind == "flow" else 0.02  # DDIM's first step divides by the square root of 4e-5
    for found, mean in zip(latents, (0.7, -1.2), strict=True):
        torch.testing.assert_close(found, torch.full((2, 8, 8), mean), rtol=0, atol=tolerance)


@pytest.mark.parametrize(("objective", "sampler"), WAYS, ids=WAYS_IDS)
def test_a_gaussian_target_is_recovered(objective: ObjectiveSection, sampler: Sampler) -> None:
    # The published last step "mean" begins at 0.11 with a shift of 3, and smooths more the earlier it begins.
    last_step = "euler" if sampler == "sde" and objective.shift > 1 else "mean"
    latents = draw(objective, 0.5, count=64, steps=250, sampler=sampler, last_step=last_step)
    for part, mean in ((latents[:32], 0.7), (latents[32:], -1.2)):
        assert part.mean() == pytest.approx(mean, abs=0.02)
        assert part.std() == pytest.approx(0.5, abs=0.015 if sampler not in ("ddpm", "sde") else 0.03)


def test_a_learned_variance_is_never_guided() -> None:
    outputs = []
    for channels in (2, 4):
        solver = Solver("ddpm", guidance=3.0, guided_channels=channels)
        labels = Conditioning(labels=torch.tensor([0, 1]))
        x = torch.randn((2, 128), generator=torch.Generator().manual_seed(0))
        outputs.append(guided(snapshot_of(OBJECTIVES[2], 0.5), labels, solver, (8, 8))(x, 500.0))
    assert torch.equal(*outputs)


@pytest.mark.parametrize(("objective", "sampler"), WAYS, ids=WAYS_IDS)
def test_an_image_depends_on_the_seed_and_its_number_alone(objective: ObjectiveSection, sampler: Sampler) -> None:
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


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, list[int]]]:
    """Time and labels of each forward."""
    seen: list[tuple[float, list[int]]] = []
    forward = Known.forward

    def watch(self: Known, x: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        assert t.unique().numel() == 1
        seen.append((float(t[0]) / 1000, conditioning.labels.tolist()))
        return forward(self, x, t, conditioning)

    monkeypatch.setattr(Known, "forward", watch)
    return seen


@pytest.mark.parametrize(("objective", "sampler"), WAYS, ids=WAYS_IDS)
def test_guidance_asks_for_null_within_its_interval_alone_and_in_one_batch(
    objective: ObjectiveSection, sampler: Sampler, forwards: list[tuple[float, list[int]]]
) -> None:
    draw(objective, 0.5, steps=10, sampler=sampler, guidance=2.0, interval=(0.3, 0.6))
    assert len(forwards) == (19 if sampler == "heun" else 10)
    guided = [labels for t, labels in forwards if 0.3 <= t <= 0.6]
    assert 0 < len(guided) < len(forwards)
    assert all(labels == [0, 1, 2, 2] for labels in guided)
    assert all(labels == [0, 1] for t, labels in forwards if not 0.3 <= t <= 0.6)
    forwards.clear()
    draw(objective, 0.5, steps=3, sampler=sampler)
    assert all(labels == [0, 1] for _, labels in forwards)  # guidance of 1 needs no null


@pytest.mark.parametrize("kind", ["flow", "ddpm"])
def test_guidance_of_the_first_channels_leaves_the_others_as_they_are(kind: Any) -> None:
    objective = ObjectiveSection(kind=kind)
    how = ({"guidance": 1.0}, {"guidance": 3.0}, {"guidance": 3.0, "guided_channels": 1})
    plain, all_of_them, first = (draw(objective, 0.5, steps=8, **one) for one in how)
    for image, mean in enumerate((0.7, -1.2)):  # away from null by its formula
        found = draw(OBJECTIVES[0], 0.0, guidance=3.0)[image].mean()
        assert found == pytest.approx(3.0 + 3 * (mean - 3.0), abs=1e-2)
    torch.testing.assert_close(first[:, :1], all_of_them[:, :1])
    torch.testing.assert_close(first[:, 1:], plain[:, 1:])
    assert (first[:, :1] - plain[:, :1]).abs().max() > 1


def test_captions_are_guided_away_from_the_null_caption() -> None:
    def model(x: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        captions = conditioning.valid_captions
        means = [tokens.mean() for tokens in captions.embeddings.split(captions.lengths)]
        return torch.stack(means)[:, None, None, None].expand_as(x)

    spec, captions = LABELS.model_copy(update={"caption_width": 1}), Captions.of([torch.ones(2, 1), -torch.ones(3, 1)])
    drawn = SamplingModel(model, spec, OBJECTIVES[0], Conditioner(spec, torch.full((4, 1), 3.0)))
    forward = guided(drawn, Conditioning(captions=captions), Solver(guidance=3.0), (8, 8))
    assert forward(torch.zeros(2, 128), 500.0).mean(1).tolist() == [3 + 3 * (1 - 3), 3 + 3 * (-1 - 3)]


def test_the_learned_variance_is_what_the_ancestral_sampler_draws_with() -> None:
    """Between the two bounds of Nichol and Dhariwal 2021, equation 15, of the steps that are made."""
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
    forward = guided(snapshot, labels, solver, (8, 8))

    def draw_noise() -> Tensor:
        return torch.stack([torch.randn(128, generator=key) for key in keys]).double()

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
    torch.testing.assert_close(found.flatten(1), x.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("diffusion", "shift"), [*((name, 1.0) for name in SIT_DIFFUSION), *((min(SIT_DIFFUSION), by) for by in (0.3, 3.0))]
)
def test_every_diffusion_has_the_marginals_of_the_flow(diffusion: str, shift: float) -> None:
    how = {"sampler": "sde", "steps": 400, "diffusion": diffusion, "shift": shift, "last_step": "tweedie"}
    latents = draw(OBJECTIVES[0], 0.5, count=64, **how)
    for part, mean in ((latents[:32], 0.7), (latents[32:], -1.2)):
        assert part.mean() == pytest.approx(mean, abs=0.03)
        assert part.std() == pytest.approx(0.5, abs=0.03)
    assert (draw(OBJECTIVES[0], 0.5, seed=1, **how) - draw(OBJECTIVES[0], 0.5, seed=1, **how)).abs().max() == 0


@pytest.mark.parametrize("shift", [1.0, 2**0.5, 3.0, 0.3])
def test_the_sde_shifts_times_from_1_to_0_04_as_published(shift: float) -> None:
    """SR-DiT's code, whose shift is sqrt(2): the last step begins at 0.0556."""
    scheduler = build_scheduler(ObjectiveSection(kind="flow", shift=shift), "sde")
    scheduler.set_timesteps(5)
    even = [1.0, 0.76, 0.52, 0.28, 0.04]
    expected = [1000 * shift * t / (1 + (shift - 1) * t) for t in even]
    assert scheduler.timesteps.tolist() == pytest.approx(expected)


@pytest.mark.usefixtures("tiny_models")
def test_dpm_draws_what_sanas_pipeline_draws() -> None:
    """diffusers' pipeline with its published scheduler, 20 steps and guidance 4.5; it rounds the model's times."""
    spec = ModelSpec(name="sana-tiny", channels=4, out_channels=4, num_classes=0, caption_width=6, base_size=8)
    model = shaken(spec)
    captions, null = torch.randn(2, 5, 6), torch.randn(5, 6)
    drawn = SamplingModel(model, spec, ObjectiveSection(kind="flow", shift=3.0), Conditioner(spec, null))
    conditioning = Conditioning(captions=Captions.of([*captions]))
    solver = Solver("dpm", steps=20, guidance=4.5)
    ours = draw_latents(drawn, conditioning, size=(8, 8), seed=3, solver=solver)

    scheduler = DPMSolverMultistepScheduler(
        algorithm_type="dpmsolver++",
        solver_order=2,
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=3.0,
    )
    transformer = transformer_class("sana")(**diffusers_config(spec)).eval()
    transformer.load_state_dict(model.net.state_dict())
    parts: dict[str, Any] = {"tokenizer": None, "text_encoder": None, "vae": None}
    pipeline = SanaPipeline(transformer=transformer, scheduler=scheduler, **parts)  # pyright: ignore
    pipeline.set_progress_bar_config(disable=True)
    keys = [torch.Generator().manual_seed(keyed_hash(3, number) % 2**63) for number in range(2)]
    theirs = pipeline(
        negative_prompt=None,
        prompt_embeds=captions,
        prompt_attention_mask=torch.ones(2, 5),
        negative_prompt_embeds=null.expand(2, -1, -1),
        negative_prompt_attention_mask=torch.ones(2, 5),
        latents=torch.stack([torch.randn(4, 8, 8, generator=key) for key in keys]),
        num_inference_steps=20,
        guidance_scale=4.5,
        height=256,
        width=256,
        use_resolution_binning=False,
        output_type="latent",
    )[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("sampler", SAMPLERS["flow"])
def test_the_shift_of_sampling_takes_the_place_of_that_of_training(sampler: Sampler) -> None:
    how: dict[str, Any] = {"steps": 6, "sampler": sampler}
    own = draw(ObjectiveSection(kind="flow", shift=10 / 3), 0.5, **how)
    asked, plain = draw(OBJECTIVES[0], 0.5, shift=10 / 3, **how), draw(OBJECTIVES[0], 0.5, **how)
    assert torch.equal(own, asked)
    assert (plain - asked).abs().max() > 1e-3


@pytest.mark.parametrize("tf32", [False, True])
def test_products_are_in_tf32_where_asked_and_only_while_drawing(tf32: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, seen = Known.forward, set[tuple[bool, bool]]()

    def flags() -> tuple[bool, bool]:
        return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32

    monkeypatch.setattr(Known, "forward", lambda *given: (seen.add(flags()), forward(*given))[1])
    with float32_products(not tf32):
        draw(OBJECTIVES[0], 0.5, steps=2, tf32=tf32)
        assert flags() == (not tf32, not tf32)
    assert seen == {(tf32, tf32)}


def test_samplers_of_another_objective_are_refused() -> None:
    cases: list[Any] = [("flow", "ddim", 50, "--sampler ddim.*flow"), ("ddpm", "euler", 50, "--sampler euler.*ddpm")]
    cases += [("ddpm", "ddpm", 1, r"--steps 1.*at least 2"), ("ddpm", "dpm", 1000, "--sampler dpm takes at most 999")]
    for kind, sampler, steps, words in cases:
        with pytest.raises(RecipeError, match=words):
            draw(ObjectiveSection(kind=kind), 0.5, sampler=sampler, steps=steps)
