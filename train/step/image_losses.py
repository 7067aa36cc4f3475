"""The losses of a microbatch: the plain one of each image, and the terms that the recipe adds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...datasets.batches.batch import Batch
from ...datasets.format.buckets import bucket_size
from ..config import TrainRecipe
from ..models.build import dispersed_block, patch_of, routed_blocks
from ..models.conditioning import Conditioning, Extras, ModelOutput
from ..objective_recipe import SELF, AlignSection
from ..objectives.added_terms import dispersion, misalignment, resampled
from ..objectives.draws import Draws
from ..objectives.losses import PLAIN, TRAIN_STEPS, losses_per_image, on_path, velocity_error
from .attention_kernels import preferred
from .learner import Learner


class Teacher(NamedTuple):
    """An image feature of some images, on the grid of the model's tokens: (B, T, D) patches, (B, D) class tokens."""

    patches: Tensor | None
    cls: Tensor | None


class Microbatch(NamedTuple):
    """Some images of a rank's batch.

    Args:
      latents: (B, C, H, W).
      teachers: by name of the feature.
    """

    latents: Tensor
    draws: Draws
    conditioning: Conditioning
    teachers: Mapping[str, Teacher]

    def part(self, rows: slice | Tensor) -> Microbatch:
        """Some of these images, in this order."""
        teachers = {
            name: Teacher(*(None if tokens is None else tokens[rows] for tokens in teacher))
            for name, teacher in self.teachers.items()
        }
        return Microbatch(self.latents[rows], self.draws.part(rows), self.conditioning.part(rows), teachers)

    def dummy(self) -> Microbatch:
        """One image of zeros at time zero, of the same shapes."""
        zeros = [None if drawn is None else drawn.new_zeros((1, *drawn.shape[1:])) for drawn in self.draws]
        teachers = {
            name: Teacher(*(None if tokens is None else tokens.new_zeros((1, *tokens.shape[1:])) for tokens in teacher))
            for name, teacher in self.teachers.items()
        }
        image = self.latents.new_zeros((1, *self.latents.shape[1:]))
        return Microbatch(image, Draws(*zeros), self.conditioning.dummy(), teachers)  # pyright: ignore


def teachers_of(learner: Learner, batch: Batch) -> dict[str, Teacher]:
    """The features that the recipe aligns with, patches on the grid of the model's tokens."""
    found = {}
    for name, spec in learner.feature_specs.items():
        feature, patches = batch.features[name], batch.features[name].patches
        if patches is not None:
            grid = spec.grid(*bucket_size(batch.bucket))
            patches = resampled(patches, grid, token_grid(learner, batch.latents.shape))
        found[name] = Teacher(patches, feature.cls)
    return found


def token_grid(learner: Learner, shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of the model's tokens for latents of a shape (..., H, W)."""
    patch = patch_of(learner.spec)
    return shape[-2] // patch, shape[-1] // patch


def is_active(stop_step: int, step: int) -> bool:
    """Whether something that stops after a step, or never (0), is done at a step."""
    return not stop_step or step <= stop_step


def compares_images(recipe: TrainRecipe) -> bool:
    """Whether a term of the loss depends on which images share a microbatch."""
    return bool(recipe.objective.contrastive_weight or recipe.objective.dispersive_weight)


def num_routed_tokens(learner: Learner, shape: Sequence[int], step: int) -> int:
    """Tokens of an image, of latents of a shape (..., H, W), if some of them skip blocks at a step, else 0."""
    routing = learner.recipe.routing
    if routing.kind == "none" or not is_active(routing.stop_step, step):
        return 0
    return math.prod(token_grid(learner, shape))


@torch.no_grad()
def with_own_teacher(learner: Learner, images: Microbatch, parts: Sequence[slice | Tensor]) -> Microbatch:
    """The images with the tokens of the averaged model as one more teacher, computed in the same microbatches.

    Source: Jiang et al. 2025 (SRA), section 3.2: the same noise, at an earlier time.
    """
    section, tokens = learner.recipe.self_align, []
    with learner.engine.averaged(), preferred(learner.attention_kernels):
        for part in parts:
            some = images.part(part)
            some = some if len(some.latents) else some.dummy()
            assert some.draws.less_time is not None
            times = (some.draws.times - section.less_time * some.draws.less_time).clamp_min(0)
            earlier = some._replace(draws=some.draws._replace(times=times))
            extras = Extras(_noisy_class_token(learner, earlier), watched=section.teacher_block)
            noisy = on_path(some.latents, some.draws.noise, times)
            output = _forward(learner, noisy, times * TRAIN_STEPS, some.conditioning, extras)
            assert isinstance(output, ModelOutput)
            assert output.watched is not None
            tokens.append(output.watched.float())
    own = {SELF: Teacher(torch.cat(tokens)[: len(images.latents)], None)}
    return images._replace(teachers={**images.teachers, **own})


def image_losses(learner: Learner, images: Microbatch, step: int) -> dict[str, Tensor]:
    """Losses of each image of a microbatch, (B,) each: the plain one and the weighted terms that are added to it.

    A rank without images computes one zero, as collectives need all ranks.
    """
    if not len(images.latents):
        return {name: loss * 0 for name, loss in image_losses(learner, images.dummy(), step).items()}
    recipe, draws = learner.recipe, images.draws
    extras = _extras(learner, images, step)
    losses, output = _losses(learner, images, extras)
    if extras is None or output is None:
        return losses
    objective = recipe.objective
    if output.watched is not None:
        losses["dispersive"] = objective.dispersive_weight * dispersion(
            output.watched, objective.dispersive_temperature
        )
    for name, section in recipe.alignments.items():
        if is_active(section.stop_step, step):
            losses[f"align.{name}"] = section.weight * _misalignment(learner, images, output, extras, name)
        else:  # as many gradients as before, of zero
            losses[f"align.{name}"] = 0 * output.projected[name].float().flatten(1).sum(1)
        if section.class_weight:
            assert draws.class_noise is not None
            assert output.class_velocity is not None
            target = draws.class_noise - _class_token(images, name)
            losses[f"class.{name}"] = section.class_weight * velocity_error(output.class_velocity, target)
    return losses


def plain_losses(learner: Learner, images: Microbatch) -> Tensor:
    """(B,) plain loss of each image, with all tokens in all blocks."""
    class_token = _noisy_class_token(learner, images)
    losses, _ = _losses(learner, images, None if class_token is None else Extras(class_token))
    return losses[PLAIN]


def _losses(
    learner: Learner, images: Microbatch, extras: Extras | None
) -> tuple[dict[str, Tensor], ModelOutput | None]:
    """Losses of the objective, and what the model gave with extras."""
    draws, found = images.draws, list[ModelOutput]()

    def predict(noisy: Tensor, t: Tensor) -> Tensor:
        output = _forward(learner, noisy, t, images.conditioning, extras)
        if isinstance(output, Tensor):
            return output
        found.append(output)
        return output.output

    losses = losses_per_image(learner.recipe.objective, predict, images.latents, draws.noise, draws.times)
    return losses, found[0] if found else None


def _forward(
    learner: Learner, noisy: Tensor, t: Tensor, conditioning: Conditioning, extras: Extras | None
) -> Tensor | ModelOutput:
    """The model, in the precision of the run."""
    more = () if extras is None else (extras,)
    with torch.autocast(learner.device.type, learner.autocast_dtype, enabled=learner.autocast_dtype is not None):
        return learner.engine.forward(noisy, t, conditioning, *more)


def _extras(learner: Learner, images: Microbatch, step: int) -> Extras | None:
    """What the recipe asks of the model beside its output; None for nothing."""
    recipe, draws = learner.recipe, images.draws
    sections = recipe.alignments.values()
    if not (sections or recipe.objective.dispersive_weight or recipe.routing.kind != "none"):
        return None
    kept = None
    if draws.token_order is not None:
        count = max(1, round(draws.token_order.shape[1] * (1 - recipe.routing.share)))
        kept = draws.token_order.argsort(1)[:, :count].sort(1).values
    aligns = any(is_active(section.stop_step, step) for section in sections)
    watched = dispersed_block(recipe.objective, len(learner.engine.model.blocks))
    class_token = _noisy_class_token(learner, images)
    return Extras(class_token, kept, watched, None if aligns else min(1, len(sections)))


def _noisy_class_token(learner: Learner, images: Microbatch) -> Tensor | None:
    """(B, D) at the times of the images; None for a model without."""
    draws = images.draws
    if draws.class_noise is None:
        return None
    name = next(name for name, section in learner.recipe.align.items() if section.class_weight)
    return on_path(_class_token(images, name), draws.class_noise, draws.times)


def _class_token(images: Microbatch, name: str) -> Tensor:
    """(B, D) float32."""
    cls = images.teachers[name].cls
    assert cls is not None
    return cls.float()


def _misalignment(learner: Learner, images: Microbatch, output: ModelOutput, extras: Extras, name: str) -> Tensor:
    """(B,) of one feature; tokens that skip the block are left out."""
    teacher, section, projected = images.teachers[name], learner.recipe.alignments[name], output.projected[name]
    tokens = teacher.patches
    assert tokens is not None
    if extras.kept is not None and _skips(learner, section):
        tokens = tokens.gather(1, extras.kept[:, :, None].expand(-1, -1, tokens.shape[2]))
    if section.class_weight:
        tokens = torch.cat([_class_token(images, name)[:, None], tokens], dim=1)
    return misalignment(projected[:, projected.shape[1] - tokens.shape[1] :], tokens)


def _skips(learner: Learner, section: AlignSection) -> bool:
    first, last = routed_blocks(learner.recipe.routing, len(learner.engine.model.blocks))
    return first <= section.block <= last
