"""Flow and DDPM: directions, schedule and bound against the published formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from leandit.train.config import ObjectiveSection
from leandit.train.objectives import ddpm_schedule, draw_times, loss_per_image

FLOW, DDPM = ObjectiveSection(kind="flow"), ObjectiveSection(kind="ddpm")
CPU = torch.device("cpu")
SHAPE = (5, 3, 4, 4)


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    """Latents and noise."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SHAPE, generator=generator), torch.randn(SHAPE, generator=generator)


def numpy_schedule() -> dict[str, np.ndarray]:
    """Ho et al. 2020, section 2 and 4: betas from 1e-4 to 0.02 in 1000 equal steps."""
    beta = 1e-4 + np.arange(1000) * (0.02 - 1e-4) / 999
    alpha_bar = np.array([np.prod(1 - beta[: t + 1]) for t in range(1000)])
    before = np.concatenate([[1.0], alpha_bar[:-1]])
    posterior = (1 - before) / (1 - alpha_bar) * beta
    posterior[0] = posterior[1]
    return {"beta": beta, "alpha": 1 - beta, "alpha_bar": alpha_bar, "before": before, "posterior": posterior}


def test_a_predictor_of_noise_minus_data_has_no_flow_loss(data: tuple[Tensor, Tensor]) -> None:
    x, noise = data
    loss = loss_per_image(FLOW, lambda _x_t, _t: noise - x, x, noise, torch.linspace(0, 1, len(x)))
    assert loss.shape == (len(x),)
    assert loss.abs().max() == 0
    other_way = loss_per_image(FLOW, lambda _x_t, _t: x - noise, x, noise, torch.linspace(0, 1, len(x)))
    assert other_way.min() > 1


def test_flow_starts_at_data_and_ends_at_noise(data: tuple[Tensor, Tensor]) -> None:
    x, noise = data
    t = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0])
    seen: dict[str, Tensor] = {}

    def predict(x_t: Tensor, time: Tensor) -> Tensor:
        seen.update(x_t=x_t, time=time)
        return torch.zeros_like(x_t)

    loss = loss_per_image(FLOW, predict, x, noise, t)
    assert seen["time"].tolist() == [0, 250, 500, 750, 1000]
    torch.testing.assert_close(seen["x_t"][0], x[0])
    torch.testing.assert_close(seen["x_t"][4], noise[4])
    torch.testing.assert_close(seen["x_t"][1], 0.75 * x[1] + 0.25 * noise[1])
    torch.testing.assert_close(loss, (noise - x).square().mean((1, 2, 3)))


def test_true_noise_and_posterior_variance_have_no_ddpm_loss(data: tuple[Tensor, Tensor]) -> None:
    x, noise = data
    t = torch.tensor([1.0, 2.0, 500.0, 998.0, 999.0])
    loss = loss_per_image(DDPM, lambda _x, _t: torch.cat([noise, -torch.ones_like(noise)], 1), x, noise, t)
    assert loss.abs().max() < 1e-6
    other = loss_per_image(DDPM, lambda _x, _t: torch.cat([noise, torch.ones_like(noise)], 1), x, noise, t)
    assert other[0] > 0.1  # at t = 1 beta is about twice the posterior's variance


def test_ddpm_noises_with_the_cumulative_schedule(data: tuple[Tensor, Tensor]) -> None:
    x, noise = data
    steps = [0, 1, 250, 998, 999]
    seen: dict[str, Tensor] = {}

    def predict(x_t: Tensor, time: Tensor) -> Tensor:
        seen.update(x_t=x_t, time=time)
        return torch.cat([noise, -torch.ones_like(noise)], 1)

    loss_per_image(DDPM, predict, x, noise, torch.tensor(steps).float())
    assert seen["time"].tolist() == steps
    alpha_bar = numpy_schedule()["alpha_bar"][steps][:, None, None, None]
    wanted = np.sqrt(alpha_bar) * x.double().numpy() + np.sqrt(1 - alpha_bar) * noise.double().numpy()
    np.testing.assert_allclose(seen["x_t"].numpy(), wanted, rtol=0, atol=5e-6)


def test_the_ddpm_loss_is_noise_error_plus_the_bound(data: tuple[Tensor, Tensor]) -> None:
    x, noise = data
    generator = torch.Generator().manual_seed(1)
    steps = [0, 1, 20, 500, 999]
    output = torch.cat(
        [noise + 0.1 * torch.randn(SHAPE, generator=generator), torch.rand(SHAPE, generator=generator)], 1
    )
    got = loss_per_image(DDPM, lambda _x, _t: output, x, noise, torch.tensor(steps).float())

    s, wanted = numpy_schedule(), []
    for i, t in enumerate(steps):
        clean, eps = x[i].double().numpy(), noise[i].double().numpy()
        predicted, v = (part.double().numpy() for part in output[i].chunk(2))
        a, b, before, beta = s["alpha"][t], s["alpha_bar"][t], s["before"][t], s["beta"][t]
        x_t = np.sqrt(b) * clean + np.sqrt(1 - b) * eps
        true_mean = (np.sqrt(before) * beta * clean + np.sqrt(a) * (1 - before) * x_t) / (1 - b)  # equation 7
        mean = (x_t - beta / np.sqrt(1 - b) * predicted) / np.sqrt(a)  # equation 11
        share = (v + 1) / 2
        variance = np.exp(share * np.log(beta) + (1 - share) * np.log(s["posterior"][t]))  # Nichol, Dhariwal: 15
        if t:
            true = s["posterior"][t]
            nats = 0.5 * (np.log(variance / true) + (true + (true_mean - mean) ** 2) / variance - 1)
        else:
            cdf = np.vectorize(lambda z: 0.5 * math.erfc(-z / math.sqrt(2)))
            std = np.sqrt(variance)
            upper, lower = cdf((clean + 1 / 255 - mean) / std), cdf((clean - 1 / 255 - mean) / std)
            upper, lower = np.where(clean > 0.999, 1, upper), np.where(clean < -0.999, 0, lower)
            nats = -np.log(np.maximum(upper - lower, 1e-12))
        wanted.append(((predicted - eps) ** 2).mean() + nats.mean() / math.log(2))
    np.testing.assert_allclose(got[1:].numpy(), wanted[1:], rtol=1e-4)
    np.testing.assert_allclose(got[0].numpy(), wanted[0], rtol=2e-3)  # differences of a float32 distribution function


def test_the_bound_does_not_move_the_predicted_noise(data: tuple[Tensor, Tensor]) -> None:
    x, noise = data
    output = torch.cat([0.5 * noise, torch.zeros_like(noise)], 1).requires_grad_()
    loss_per_image(DDPM, lambda _x, _t: output, x, noise, torch.full((len(x),), 3.0)).sum().backward()
    assert output.grad is not None
    epsilon, variance = output.grad.chunk(2, dim=1)
    torch.testing.assert_close(epsilon, 2 * (0.5 * noise - noise) / noise[0].numel())
    assert variance.abs().min() > 0


def test_the_schedule_is_the_published_one() -> None:
    ours, s = ddpm_schedule(CPU), numpy_schedule()
    np.testing.assert_allclose(ours["alpha_bar"], s["alpha_bar"], rtol=1e-5)
    np.testing.assert_allclose(ours["log_beta"], np.log(s["beta"]), rtol=1e-5)
    np.testing.assert_allclose(ours["log_posterior"], np.log(s["posterior"]), rtol=1e-5)
    np.testing.assert_allclose(ours["mean_x"], np.sqrt(s["before"]) * s["beta"] / (1 - s["alpha_bar"]), rtol=1e-5)
    mean_x_t = np.sqrt(s["alpha"]) * (1 - s["before"]) / (1 - s["alpha_bar"])
    np.testing.assert_allclose(ours["mean_x_t"], mean_x_t, rtol=1e-5, atol=1e-12)
    assert ours["alpha_bar"][-1] == pytest.approx(4.0358e-5, rel=1e-3)  # Ho et al.: the end is almost pure noise


@pytest.mark.parametrize(
    ("section", "low", "high"),
    [
        (DDPM, 0, 999),
        (ObjectiveSection(kind="flow", time="uniform"), 0, 1),
        (ObjectiveSection(kind="flow", time="logit_normal"), 0, 1),
        (ObjectiveSection(kind="flow", time="uniform", shift=3.0), 0, 1),
    ],
)
def test_times_stay_in_range_and_fill_it(section: ObjectiveSection, low: float, high: float) -> None:
    times = draw_times(section, 50_000, torch.Generator().manual_seed(0))
    assert times.dtype == torch.float32
    assert low <= times.min() < low + 0.05 * (high - low)
    assert high - 0.05 * (high - low) < times.max() <= high
    if section.kind == "ddpm":
        assert set(times.tolist()) == set(range(1000))


def test_logit_normal_times_have_a_standard_normal_logit() -> None:
    logits = draw_times(FLOW, 100_000, torch.Generator().manual_seed(0)).logit()
    assert logits.mean() == pytest.approx(0, abs=0.02)
    assert logits.std() == pytest.approx(1, abs=0.02)
    assert (logits < -1).float().mean() == pytest.approx(0.1587, abs=0.01)


@pytest.mark.parametrize("shift", [0.5, 1.0, 3.0])
def test_shift_moves_times_by_its_formula(shift: float) -> None:
    plain = draw_times(ObjectiveSection(kind="flow", time="uniform"), 1000, torch.Generator().manual_seed(0))
    shifted = draw_times(
        ObjectiveSection(kind="flow", time="uniform", shift=shift), 1000, torch.Generator().manual_seed(0)
    )
    torch.testing.assert_close(shifted, shift * plain / (1 + (shift - 1) * plain))
    if shift > 1:
        assert (shifted > plain).float().mean() > 0.99  # towards noise


def test_times_depend_on_the_generator_alone() -> None:
    torch.manual_seed(1)
    first = draw_times(FLOW, 10, torch.Generator().manual_seed(7))
    torch.manual_seed(2)
    assert torch.equal(first, draw_times(FLOW, 10, torch.Generator().manual_seed(7)))
