"""The shift of the times of a model: in training by its objective, in sampling by the scheduler of its weights."""

from __future__ import annotations

from ..data_recipe import Objective, SampleShift
from ..models.build import FAMILIES, family_of
from ..models.spec import ModelSpec
from ..objectives.shift import TimeShift, scheduler_shift

PIPELINE_STEPS = 50  # of FLUX.2's pipelines by default; training has no steps of a solver


def resolution_shift(spec: ModelSpec) -> TimeShift | None:
    """The shift that the pipeline of a model computes from the size of an image; None: it computes none.

    That of the scheduler that the weights came with, if it shifts by size, else the published one of the family.
    """
    family = family_of(spec.name)
    published = FAMILIES[family].resolution_shift if family else None
    if published is not None and spec.scheduler.get("use_dynamic_shifting"):
        return scheduler_shift(spec.scheduler, published)
    return published


def training_shift(spec: ModelSpec, objective: Objective) -> TimeShift:
    """The shift that ``objective.shift`` asks for; "resolution" only where ``resolution_shift`` is not None."""
    if objective.shift != "resolution":
        return TimeShift(constant=objective.shift)
    shift = resolution_shift(spec)
    assert shift is not None, "check_fit refuses it"
    return shift


def objective_at(spec: ModelSpec, objective: Objective, tokens: int) -> Objective:
    """The objective with its shift as a number, for images of so many tokens."""
    if objective.shift != "resolution":
        return objective
    shift = training_shift(spec, objective).at(tokens, PIPELINE_STEPS)
    return objective.model_copy(update={"shift": shift})


def sampling_shift(spec: ModelSpec, objective: Objective, sample_shift: SampleShift) -> TimeShift:
    """The shift of the times that latents are drawn at.

    Args:
      sample_shift: ``run.sample_shift``; "auto" is that of the scheduler that the weights came with, else of training.
    """
    if isinstance(sample_shift, float | int):
        return TimeShift(constant=float(sample_shift))
    if sample_shift == "resolution":
        shift = resolution_shift(spec)
        assert shift is not None, "check_fit refuses it"
        return shift
    return scheduler_shift(spec.scheduler, resolution_shift(spec)) or training_shift(spec, objective)
