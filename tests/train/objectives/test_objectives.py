"""Flow and DDPM: directions, schedule and bound against the published formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from leandit.train.objectives.losses import (
    PLAIN,
    ddpm_schedule,
    direction_error,
    draw,
    draw_times,
    noised,
    objective_losses,
)
from leandit.train.techniques.registry import ObjectiveSection

FLOW, DDPM = ObjectiveSection(kind="flow"), ObjectiveSection(kind="ddpm")
CPU = torch.device("cpu")
SHAPE = (5, 3, 4, 4)


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    """Latents and noise."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SHAPE, generator=generator), torch.randn(SHAPE, generator=generator)


def loss_of(section: ObjectiveSection, output: Tensor, x: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    return objective_losses(section, output, x, noise, t)[PLAIN]


def numpy_schedule() -> dict[str, np.ndarray]:
    """Ho et al. 2020, section 2 and 4: betas from 1e-4 to 0.02 in 1000 equal steps."""
    beta = 1e-4 + np.arange(1000) * (0.02 - 1e-4) / 999
    alpha_bar = np.array([np.prod(1 - beta[: t + 1]) for t in range(1000)])
    before = np.concatenate([[1.0], alpha_bar[:-1]])
    posterior = (1 - before) / (1 - alpha_bar) * beta
    posterior[0] = posterior[1]
    return {"beta": beta, "alpha": 1 - beta, "alpha_bar": alpha_bar, "before": before, "posterior": posterior}


def test_the_velocity_is_noise_minus_data(data: tuple[Tensor, Tensor]) -> None:
    x, noise = data
    t = torch.linspace(0, 1, len(x))
    assert loss_of(FLOW, noise - x, x, noise, t).tolist() == [0.0] * len(x)
    torch.testing.assert_close(loss_of(FLOW, 0 * x, x, noise, t), (noise - x).square().mean((1, 2, 3)))


def test_ddpm_noises_with_the_cumulative_schedule(data: tuple[Tensor, Tensor]) -> None:
    x, noise = data
    steps = [0, 1, 250, 998, 999]
    x_t, time = noised(DDPM, x, noise, torch.tensor(steps).float())
    assert time.tolist() == steps
    alpha_bar = numpy_schedule()["alpha_bar"][steps][:, None, None, None]
    wanted = np.sqrt(alpha_bar) * x.double().numpy() + np.sqrt(1 - alpha_bar) * noise.double().numpy()
    np.testing.assert_allclose(x_t.numpy(), wanted, rtol=0, atol=5e-6)


def test_the_ddpm_loss_is_noise_error_plus_the_bound(data: tuple[Tensor, Tensor]) -> None:
    x, noise = data
    generator = torch.Generator().manual_seed(1)
    steps = [0, 1, 20, 500, 999]
    predicted = noise + 0.1 * torch.randn(SHAPE, generator=generator)
    output = torch.cat([predicted, torch.rand(SHAPE, generator=generator)], 1)
    got = loss_of(DDPM, output, x, noise, torch.tensor(steps).float())

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
    loss_of(DDPM, output, x, noise, torch.full((len(x),), 3.0)).sum().backward()
    epsilon, variance = output.grad.chunk(2, dim=1)
    torch.testing.assert_close(epsilon, 2 * (0.5 * noise - noise) / noise[0].numel())
    assert variance.abs().min() > 0


def test_the_schedule_is_the_published_one() -> None:
    ours, s = ddpm_schedule(CPU), numpy_schedule()
    mean_x_t = np.sqrt(s["alpha"]) * (1 - s["before"]) / (1 - s["alpha_bar"])
    expected = {"noise_share": np.sqrt(1 - s["alpha_bar"]), "signal": np.sqrt(s["alpha_bar"]), "mean_x_t": mean_x_t}
    expected |= {"snr": s["alpha_bar"] / (1 - s["alpha_bar"]), "alpha_bar": s["alpha_bar"]}
    expected |= {"log_beta": np.log(s["beta"]), "log_posterior": np.log(s["posterior"])}
    expected |= {"mean_x": np.sqrt(s["before"]) * s["beta"] / (1 - s["alpha_bar"])}
    for name, values in expected.items():
        rtol = 1e-7 if name in ("noise_share", "signal", "snr") else 1e-5
        np.testing.assert_allclose(ours[name], values, rtol=rtol, atol=1e-12, err_msg=name)
    assert ours["alpha_bar"][-1] == pytest.approx(4.0358e-5, rel=1e-3)  # Ho et al.: the end is almost pure noise


def ddpm_section(predict: str = "epsilon", variance: str = "fixed", gamma: float = 0.0) -> ObjectiveSection:
    return ObjectiveSection.model_validate({"predict": predict, "variance": variance, "min_snr_gamma": gamma})


@pytest.mark.parametrize("predict", ["epsilon", "v"])
@pytest.mark.parametrize("gamma", [0.0, 5.0])
def test_error_and_weight_are_those_of_the_papers(data: tuple[Tensor, Tensor], predict: str, gamma: float) -> None:
    x, noise = data
    steps = [0, 3, 150, 500, 999]
    output = torch.randn(SHAPE, generator=torch.Generator().manual_seed(3))
    got = loss_of(ddpm_section(predict, gamma=gamma), output, x, noise, torch.tensor(steps).float())
    b = numpy_schedule()["alpha_bar"][steps][:, None, None, None]
    clean, eps = x.double().numpy(), noise.double().numpy()
    target = eps if predict == "epsilon" else np.sqrt(b) * eps - np.sqrt(1 - b) * clean  # Salimans, Ho: appendix D
    error = ((output.double().numpy() - target) ** 2).mean((1, 2, 3))
    snr = (b / (1 - b)).ravel()
    weight = np.minimum(snr, gamma) / (snr if predict == "epsilon" else snr + 1) if gamma else 1
    np.testing.assert_allclose(got.numpy(), error * weight, rtol=2e-6)


def test_the_variance_learns_the_same_with_every_prediction_and_weight(data: tuple[Tensor, Tensor]) -> None:
    x, noise = data
    t = torch.tensor([1.0, 20.0, 300.0, 700.0, 999.0])
    signal, share = (ddpm_schedule(CPU)[name][t.long()][:, None, None, None] for name in ("signal", "noise_share"))
    gradients = []
    for predict, gamma in (("epsilon", 0.0), ("epsilon", 5.0), ("v", 0.0), ("v", 5.0)):
        variance = torch.zeros(SHAPE, requires_grad=True)
        guess = 0.9 * noise if predict == "epsilon" else (0.9 * noise - share * (signal * x + share * noise)) / signal
        output = torch.cat([guess, variance], 1)
        loss_of(ddpm_section(predict, "learned", gamma), output, x, noise, t).sum().backward()
        gradients.append(variance.grad)
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=1e-3, atol=1e-6)


def test_times_of_ddpm_are_all_steps_and_those_of_flow_uniform_or_logit_normal_as_the_recipe_says() -> None:
    def times(count: int = 100_000, **how: object) -> Tensor:
        return draw_times(ObjectiveSection.model_validate(how), count, torch.Generator().manual_seed(0))

    assert set(times(kind="ddpm").tolist()) == set(range(1000))
    uniform = times(kind="flow", time="uniform")
    assert torch.histc(uniform, 10, 0, 1).tolist() == pytest.approx([10_000] * 10, rel=0.05)
    for how, mean, std in (({}, 0, 1), ({"time_mean": -0.5, "time_std": 0.7}, -0.5, 0.7)):
        logits = times(kind="flow", **how).logit()
        assert (logits.mean(), logits.std()) == (pytest.approx(mean, abs=0.02), pytest.approx(std, abs=0.02))
    for shift in (0.5, 3.0):
        shifted = times(kind="flow", time="uniform", shift=shift)
        torch.testing.assert_close(shifted, shift * uniform / (1 + (shift - 1) * uniform))
    assert (shifted > uniform).float().mean() > 0.99  # towards noise


def test_the_direction_is_compared_over_the_channels_of_each_place(data: tuple[Tensor, Tensor]) -> None:
    x, noise = data
    section = ObjectiveSection(kind="flow", cosine_weight=2.0)
    losses = objective_losses(section, x, x, noise, torch.full((len(x),), 0.5))
    for image, error in enumerate(losses["cosine"]):
        places = [(row, column) for row in range(4) for column in range(4)]
        pairs = [(x[image, :, r, c], (noise - x)[image, :, r, c]) for r, c in places]
        errors = [1 - a @ b / (a.norm() * b.norm()) for a, b in pairs]
        assert error.item() == pytest.approx(2 * float(sum(errors)) / 16, rel=1e-5)
    assert torch.equal(losses[PLAIN], loss_of(FLOW, x, x, noise, torch.full((len(x),), 0.5)))
    assert losses.keys() == {PLAIN, "cosine"}
    assert direction_error(x, 7 * x).abs().max() < 1e-6
    with pytest.raises(ValidationError, match="has no velocity"):
        ObjectiveSection(kind="ddpm", cosine_weight=0.1)
    with pytest.raises(ValidationError, match="keys of kind"):
        ObjectiveSection(kind="flow", min_snr_gamma=5.0)


def test_draws_of_an_image_depend_neither_on_its_rank_nor_on_what_a_recipe_adds() -> None:
    how = {"seed": 3, "step": 5, "device": CPU}
    shape, more = (4, 4, 4), {"class_noise": ("normal", (6,)), "order": ("uniform", (16,)), "less": ("uniform", ())}
    plain = draw(FLOW, shape, {}, rows=slice(3, 30), **how)
    whole = draw(FLOW, shape, more, rows=slice(3, 30), **how)
    part = draw(FLOW, shape, more, rows=slice(20, 22), **how)
    assert plain.keys() == {"noise", "times", "drop"}
    assert all(torch.equal(tensor, whole[name]) for name, tensor in plain.items())
    assert whole["class_noise"].shape == (27, 6)
    assert all(torch.equal(tensor, whole[name][17:19]) for name, tensor in part.items())
    assert draw(FLOW, shape, more, rows=slice(5, 5), **how)["noise"].shape == (0, *shape)
