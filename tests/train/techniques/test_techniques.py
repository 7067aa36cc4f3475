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
from making import ROOT
from torch import Tensor

from leandit.errors import RecipeError
from leandit.train.config import load
from leandit.train.techniques.alignment import misalignment
from leandit.train.techniques.contrastive import contrast
from leandit.train.techniques.dispersive import dispersion
from leandit.train.techniques.registry import ObjectiveSection, routed_blocks, techniques_of
from leandit.train.techniques.repa import resampled, spatially_normalized

ROUTED = ("routing.kind=tread", "routing.first_block=2", "routing.last_block=4")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))


def test_contrast_is_minus_the_error_to_the_target_of_another_image() -> None:
    velocity, negative = random(3, 4, 2, 2), random(3, 4, 2, 2, seed=1)
    terms = contrast(velocity, negative)
    for image in range(3):
        assert terms[image].item() == pytest.approx(-((velocity[image] - negative[image]) ** 2).mean().item())


def test_spatial_normalization_is_over_the_tokens_of_an_image() -> None:
    tokens = random(2, 5, 3)
    for image, found in zip(tokens, spatially_normalized(tokens, 0.6), strict=True):
        for channel in range(3):
            values = image[:, channel]
            expected = (values - 0.6 * values.mean()) / (values.std() + 1e-6)
            torch.testing.assert_close(found[:, channel], expected.float(), rtol=1e-5, atol=1e-5)


def test_a_convolution_needs_the_whole_grid_and_contrast_a_velocity() -> None:
    conv = ("model.name=DiT-S/2", "align.dino.projector=conv", "align.dino.block=3", "objective.kind=flow")
    with pytest.raises(RecipeError, match="a class token has no place in the grid"):
        load("dit-s-2-256", [*conv, "align.dino.class_weight=0.03"])
    techniques = techniques_of(load("dit-s-2-256", [*conv, *ROUTED]))
    (align,) = [technique for technique in techniques if technique.key == "align"]
    with pytest.raises(RecipeError, match=r"it needs the whole grid\. Use a block before 2"):
        align.check_model("DiT-S/2", 12, techniques)
    with pytest.raises(RecipeError, match="has no velocity"):
        load("dit-s-2-256", ["objective.contrastive_weight=0.1"])


def test_a_route_is_where_it_is_published_unless_it_is_set() -> None:
    """Of TREAD: config of DiT-B, from the third block to the ninth, and half of the tokens."""

    def blocks(depth: int, *settings: str) -> tuple[int, int]:
        return routed_blocks(techniques_of(load("dit-s-2-256", [*settings])), depth)

    assert load("dit-s-2-256", []).routing.share == 0.5
    assert [blocks(depth, "routing.kind=tread") for depth in (12, 28)] == [(3, 9), (3, 25)]
    assert [blocks(depth, "routing.kind=sprint") for depth in (12, 28)] == [(3, 10), (3, 26)]
    assert (blocks(12, *ROUTED), blocks(12)) == ((2, 4), (0, 0))


OFFICIAL_WEIGHTS = {  # recipe -> weights of the terms in the configuration that its source publishes
    "sit-xl-2-256-repa": {"align": 0.5},
    "sit-xl-2-256-irepa": {"align": 1.0},
    "sit-xl-2-256-reg": {"align": 0.5, "class": 0.03},
    "sr-dit-b-1-256": {"align": 0.5, "class": 0.03, "contrastive": 0.05},
    "lightningdit-xl-1-256": {"cosine": 1.0},
    "sit-xl-2-256": {},
    "rae-dit-dh-xl-256": {},
    "flux1-mlperf": {},
}


@pytest.mark.parametrize("name", OFFICIAL_WEIGHTS)
def test_recipes_weigh_their_terms_as_the_official_configurations(name: str) -> None:
    recipe = load(name, [])
    weights = {
        "cosine": recipe.objective.cosine_weight,
        "contrastive": recipe.objective.contrastive_weight,
        "dispersive": recipe.objective.dispersive_weight,
        "self_align": recipe.self_align.weight,
    }
    for section in recipe.align.values():
        weights |= {"align": section.weight, "class": section.class_weight}
    assert {term: weight for term, weight in weights.items() if weight} == OFFICIAL_WEIGHTS[name]


@pytest.mark.parametrize("count", [1, 5])
def test_dispersion_is_the_log_of_the_mean_similarity_of_all_pairs(count: int) -> None:
    tokens, temperature = random(count, 3, 4), ObjectiveSection().dispersive_temperature  # of the published code: none
    for scale in (0.5, temperature):
        similarities = [math.exp(-((a - b) ** 2).mean().item() / scale) for a in tokens for b in tokens]
        expected = torch.full((count,), math.log(sum(similarities) / count**2))
        torch.testing.assert_close(dispersion(tokens, scale), expected, rtol=1e-4, atol=1e-5)
    # What all images share does not round their distances away.
    torch.testing.assert_close(dispersion(tokens.float() + 10_000, 0.5), dispersion(tokens, 0.5), rtol=1e-2, atol=0)


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


REMOVED = """
import sys
import torch
for name in [name for name in sys.modules if name.partition(".")[0] == "leandit"]:
    del sys.modules[name]
from leandit.tools.plan.workload import workload_at_resolution
from leandit.tools.plan.synthetic import synthetic_batch, synthetic_run
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
OTHERS = {"contrastive": ["objective.contrastive_weight=0.05"], "dispersive": [], "repa": []}
OTHERS["sra"] = ["self_align.weight=0.5", "self_align.block=1", "self_align.teacher_block=2"]
OTHERS["routing"] = ["routing.kind=tread", "routing.first_block=1", "routing.last_block=1"]


@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.slow] * (one != "routing")) for one in OTHERS])
def test_a_technique_is_removed_with_its_file_and_its_lines_in_the_registry(name: str, tmp_path: Path) -> None:
    package = tmp_path / "leandit"
    for folder in ("datasets", "train", "tools"):
        shutil.copytree(ROOT / folder, package / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "__init__.py", package)
    registry = package / "train/techniques/registry.py"
    lines = registry.read_text().splitlines(keepends=True)
    registry.write_text("".join(line for line in lines if not re.match(rf"\s+{name}[.,]", line)))
    (package / f"train/techniques/{name}.py").unlink()
    settings = [setting for other, its in OTHERS.items() if other != name for setting in its]
    done = run_forked(["-c", REMOVED, *settings], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    plain, others = done.stdout.splitlines()
    assert plain.startswith(f"{package}/train/step.py [] ")
    assert len(re.findall("'", others)) == 2 * (2 - (name in ("contrastive", "sra")))
