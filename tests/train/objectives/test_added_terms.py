"""Each added term is the formula of its paper, written as loops; and recipes add them with their weights."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from leandit.train.objective_recipe import ObjectiveSection
from leandit.train.objectives.added_terms import contrast, direction_error, dispersion, misalignment, resampled
from leandit.train.objectives.losses import PLAIN, loss_per_image, losses_per_image


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))


def test_the_direction_is_compared_over_the_channels_of_each_place() -> None:
    velocity, target = random(3, 4, 2, 5), random(3, 4, 2, 5, seed=1)
    for image, error in enumerate(direction_error(velocity, target)):
        places = [(row, column) for row in range(2) for column in range(5)]
        errors = [1 - cosine(velocity[image, :, r, c], target[image, :, r, c]) for r, c in places]
        assert error.item() == pytest.approx(sum(errors) / 10)


def test_contrast_is_minus_the_error_to_the_target_of_another_image() -> None:
    velocity, target = random(3, 4, 2, 2), random(3, 4, 2, 2, seed=1)
    found = contrast(velocity, target)
    for image in range(3):
        other = (image - 1) % 3
        assert found[image].item() == pytest.approx(-((velocity[image] - target[other]) ** 2).mean().item())
    assert contrast(velocity[:1], target[:1]).tolist() == [0.0]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_dispersion_is_the_log_of_the_mean_similarity_of_all_pairs(count: int) -> None:
    tokens = random(count, 3, 4)
    similarities = [math.exp(-((a - b) ** 2).mean().item() / 0.5) for a in tokens for b in tokens]
    expected = math.log(sum(similarities) / count**2)
    torch.testing.assert_close(dispersion(tokens, 0.5), torch.full((count,), expected), rtol=1e-4, atol=1e-5)


def test_the_default_dispersion_is_that_of_the_published_code() -> None:
    tokens = random(5, 3, 4)
    flat = tokens.flatten(1)
    published = (-torch.cdist(flat, flat).square() / 12).exp().mean().log()  # there is no temperature
    found = dispersion(tokens, ObjectiveSection().dispersive_temperature)
    torch.testing.assert_close(found, published.expand(5).float(), rtol=1e-4, atol=1e-5)


def test_what_all_images_share_does_not_round_their_distances_away() -> None:
    tokens = random(5, 3, 4).float()
    torch.testing.assert_close(dispersion(tokens + 10_000, 0.5), dispersion(tokens, 0.5), rtol=1e-2, atol=0)


def test_images_that_are_alike_have_no_dispersion_and_a_gradient_that_drives_them_apart() -> None:
    tokens = random(1, 3, 4).repeat(4, 1, 1)
    assert dispersion(tokens, 0.5).abs().max() < 1e-5
    apart = (tokens + 0.1 * random(4, 3, 4, seed=1)).requires_grad_()
    dispersion(apart, 0.5).sum().backward()
    assert apart.grad is not None
    moved = (apart - 0.1 * apart.grad / apart.grad.norm()).detach()
    assert torch.cdist(moved.flatten(1), moved.flatten(1)).sum() > torch.cdist(apart.flatten(1), apart.flatten(1)).sum()


def test_misalignment_is_the_mean_of_one_minus_cosine_over_the_tokens() -> None:
    projected, feature = random(2, 3, 6), random(2, 3, 6, seed=1)
    for image, error in enumerate(misalignment(projected, 7 * feature)):  # whatever the length of a token
        errors = [1 - cosine(projected[image, token], feature[image, token]) for token in range(3)]
        assert error.item() == pytest.approx(sum(errors) / 3, rel=1e-5)


def test_tokens_of_another_grid_keep_their_places() -> None:
    rows, columns = torch.meshgrid(torch.arange(4.0), torch.arange(8.0), indexing="ij")
    feature = torch.stack([rows.flatten(), columns.flatten()], dim=1)[None]
    assert resampled(feature, (4, 8), (4, 8)) is feature
    coarse = resampled(feature, (4, 8), (2, 4)).view(2, 4, 2)
    assert coarse[0, 0, 0] < coarse[1, 0, 0]
    assert coarse[0, 0, 1] < coarse[0, 1, 1] < coarse[0, 3, 1]
    constant = resampled(torch.ones(1, 32, 3), (4, 8), (3, 5))
    torch.testing.assert_close(constant, torch.ones(1, 15, 3))


def test_a_recipe_adds_its_terms_with_their_weights_and_the_plain_loss_stays() -> None:
    x, noise, t = random(3, 4, 2, 2), random(3, 4, 2, 2, seed=1), torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    section = ObjectiveSection(kind="flow", cosine_weight=2.0, contrastive_weight=0.05)
    given = random(3, 4, 2, 2, seed=2)
    losses = losses_per_image(section, lambda _x_t, _t: given, x, noise, t)
    plain = loss_per_image(ObjectiveSection(kind="flow"), lambda _x_t, _t: given, x, noise, t)
    assert torch.equal(losses[PLAIN], plain)
    given, target = given.float(), noise - x
    torch.testing.assert_close(losses["cosine"], 2 * direction_error(given, target))
    torch.testing.assert_close(losses["contrastive"], 0.05 * contrast(given, target))
    assert losses.keys() == {PLAIN, "cosine", "contrastive"}


@pytest.mark.parametrize("key", ["cosine_weight", "contrastive_weight"])
def test_ddpm_has_no_velocity_to_compare(key: str) -> None:
    with pytest.raises(ValidationError, match="has no velocity"):
        ObjectiveSection(kind="ddpm", **{key: 0.1})  # pyright: ignore[reportArgumentType]
