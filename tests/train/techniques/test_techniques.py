"""Each loss of a technique is the formula of its paper, written as loops; a technique is one file."""

from __future__ import annotations

import math
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from forked import run_forked
from torch import Tensor

from leandit.datasets.errors import RecipeError
from leandit.train.config import load
from leandit.train.techniques.alignment import misalignment
from leandit.train.techniques.contrastive import contrast
from leandit.train.techniques.dispersive import dispersion
from leandit.train.techniques.registry import ObjectiveSection, techniques_of
from leandit.train.techniques.repa import resampled, spatially_normalized

ROOT = Path(__file__).parents[3]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))


def test_contrast_is_minus_the_error_to_the_target_of_another_image() -> None:
    velocity, target = random(3, 4, 2, 2), random(3, 4, 2, 2, seed=1)
    found = contrast(velocity, target)
    for image in range(3):
        other = (image - 1) % 3
        assert found[image].item() == pytest.approx(-((velocity[image] - target[other]) ** 2).mean().item())
    assert contrast(velocity[:1], target[:1]).tolist() == [0.0]


def test_spatial_normalization_is_over_the_tokens_of_an_image() -> None:
    tokens = random(2, 5, 3)
    for image, found in zip(tokens, spatially_normalized(tokens, 0.6), strict=True):
        for channel in range(3):
            values = image[:, channel]
            expected = (values - 0.6 * values.mean()) / (values.std() + 1e-6)
            torch.testing.assert_close(found[:, channel], expected.float(), rtol=1e-5, atol=1e-5)


CONV = ("model.name=DiT-S/2", "align.dino.projector=conv", "align.dino.block=3", "objective.kind=flow")


def test_a_convolution_needs_the_whole_grid() -> None:
    with pytest.raises(RecipeError, match="a class token has no place in the grid"):
        load("dit-s-2-256", [*CONV, "align.dino.class_weight=0.03"])
    routed = ("routing.kind=tread", "routing.first_block=2", "routing.last_block=4")
    techniques = techniques_of(load("dit-s-2-256", [*CONV, *routed]))
    (align,) = [technique for technique in techniques if technique.key == "align"]
    with pytest.raises(RecipeError, match=r"it needs the whole grid\. Use a block before 2"):
        align.check_model("DiT-S/2", 12, techniques)


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


def test_ddpm_has_no_velocity_to_compare() -> None:
    with pytest.raises(RecipeError, match="has no velocity"):
        load("dit-s-2-256", ["objective.contrastive_weight=0.1"])


REMOVED = """
import sys
import torch
for name in [name for name in sys.modules if name.partition(".")[0] == "leandit"]:
    del sys.modules[name]
from leandit.tools.plan.workload import workload_at_resolution
from leandit.tools.synthetic.batches import synthetic_batch, synthetic_run
from leandit.train import step
from leandit.train.config import load
from leandit.train.models.dit import SIZES

SIZES["S"], cpu = (2, 32, 2), torch.device("cpu")
for settings in ([], ["objective.kind=flow", *sys.argv[1:]]):
    recipe = load("dit-s-2-256", ["run.precision=fp32", "model.num_classes=3", "run.global_batch=4", *settings])
    work = workload_at_resolution(recipe, 64)
    run = synthetic_run(work.recipe, work.spec, 0, cpu, store=work.store)
    result = step.train_step(run, synthetic_batch(work.store, work.largest_bucket, 4, 0, cpu))
    print(step.__file__, sorted(result.terms), float(result.loss))
"""
OTHERS = {
    "contrastive": "objective.contrastive_weight=0.05",
    "sra": "self_align.weight=0.5",
    "routing": "routing.kind=tread",
}
BLOCKS = ("self_align.block=1", "self_align.teacher_block=2", "routing.first_block=1", "routing.last_block=1")


@pytest.mark.parametrize(
    "name",
    ["routing", *(pytest.param(one, marks=pytest.mark.slow) for one in ("contrastive", "dispersive", "repa", "sra"))],
)
def test_a_technique_is_removed_with_its_file_and_its_lines_in_the_registry(name: str, tmp_path: Path) -> None:
    package = tmp_path / "leandit"
    for folder in ("datasets", "train", "tools"):
        shutil.copytree(ROOT / folder, package / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "__init__.py", package)
    registry = package / "train/techniques/registry.py"
    lines = registry.read_text().splitlines(keepends=True)
    registry.write_text("".join(line for line in lines if not re.match(rf"\s+{name}[.,]", line)))
    (package / f"train/techniques/{name}.py").unlink()
    settings = [setting for other, setting in OTHERS.items() if other != name]
    settings += [setting for setting in BLOCKS if not (name == "routing" and setting.startswith("routing"))]
    settings = [setting for setting in settings if not (name == "sra" and setting.startswith("self_align"))]
    done = run_forked(["-c", REMOVED, *settings], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    plain, others = done.stdout.splitlines()
    assert plain.startswith(f"{package}/train/step.py [] ")
    assert len(re.findall("'", others)) == 2 * (2 - (name in ("contrastive", "sra")))
