"""Which keys of a train recipe are read only with certain values of others: a key that is not read is not ignored."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..effects import Condition
from .techniques.registry import TECHNIQUES

if TYPE_CHECKING:
    from .config import TrainRecipe
    from .data_recipe import RecordsSection

RECORDS = ("data", "data.mixture")  # sections with keys of records
POWER, EXPONENTIAL = 'ema.kind = "power"', 'ema.kind = "exponential"'
FLOW = 'objective.kind = "flow"'
LOGIT_NORMAL = 'objective.time = "logit_normal"'
THIRD_BETA = 0.9999  # of the default
SHARDED = ("fsdp", "hsdp")


def _is_flow(recipe: TrainRecipe, _: object) -> bool:
    return recipe.objective.kind == "flow"


def _is_logit_normal(recipe: TrainRecipe, _: object) -> bool:
    return recipe.objective.kind == "flow" and recipe.objective.time == "logit_normal"


def _is_power(recipe: TrainRecipe, _: object) -> bool:
    return recipe.ema.kind == "power"


def _is_exponential(recipe: TrainRecipe, _: object) -> bool:
    return recipe.ema.kind == "exponential"


def _samples(recipe: TrainRecipe, _: object) -> bool:
    return recipe.run.sample_every > 0


def _evaluates(recipe: TrainRecipe, _: object) -> bool:
    return recipe.data.holdout > 0 and recipe.run.evaluate_every > 0


def _any_records(has: Callable[[RecordsSection], Any]) -> Callable[[TrainRecipe, RecordsSection], bool]:
    """A condition on a section of records; that of ``[data]`` also holds for each store beside it."""

    def is_read(recipe: TrainRecipe, section: RecordsSection) -> bool:
        sections = [section]
        if section is recipe.data:
            sections += recipe.data.mixture
        return any(has(records) for records in sections)

    return is_read


def _takes_captions(recipe: TrainRecipe, _: object) -> bool:
    return recipe.takes_captions


CONDITIONS = [
    Condition(
        "model.num_classes", lambda recipe, _: not recipe.takes_captions, "a model that takes labels", is_refused=False
    ),
    Condition("lora.frozen", lambda _, lora: lora.rank > 0, "lora.rank above 0", switches=("lora.rank",)),
    Condition("objective.time", _is_flow, FLOW),
    Condition("objective.time_mean", _is_logit_normal, f"{FLOW} and {LOGIT_NORMAL}"),
    Condition("objective.time_std", _is_logit_normal, f"{FLOW} and {LOGIT_NORMAL}"),
    Condition("objective.shift", _is_flow, FLOW),
    Condition(
        "optimizer.betas",
        lambda _, section: section.name == "came" or len(section.betas) < 3 or section.betas[2] == THIRD_BETA,
        'optimizer.name = "came", the only one that reads three',
        is_refused=False,
    ),
    Condition("optimizer.eps", lambda _, section: section.name != "came", 'another optimizer.name than "came"'),
    Condition("optimizer.momentum", lambda _, section: section.name == "muon", 'optimizer.name = "muon"'),
    Condition("optimizer.decay_all", lambda _, section: section.weight_decay > 0, "optimizer.weight_decay above 0"),
    Condition(
        "schedule.final_lr_share", lambda _, section: section.kind != "constant", 'schedule.kind "linear" or "cosine"'
    ),
    Condition("ema.warmup", _is_exponential, EXPONENTIAL, is_refused=False),
    Condition("ema.lengths", _is_power, POWER),
    Condition("ema.keep_every", _is_power, POWER),
    Condition("run.ema_decay", _is_exponential, EXPONENTIAL, is_refused=False),
    Condition(
        "run.global_batch", lambda recipe, _: not recipe.data.batch_tokens, "data.batch_tokens = 0", is_refused=False
    ),
    Condition(
        "run.residual", lambda _, section: section.precision == "bf16", 'run.precision = "bf16"', is_refused=False
    ),
    Condition(
        "run.evaluate_every",
        lambda recipe, section: recipe.data.holdout > 0 or section.evaluate_every == 0,
        "data.holdout above 0",
        switches=("data.holdout",),
    ),
    *(
        Condition(
            f"run.{key}",
            _evaluates,
            "data.holdout and run.evaluate_every above 0",
            switches=("data.holdout", "run.evaluate_every"),
        )
        for key in ("evaluate_images", "evaluate_times")
    ),
    *(
        Condition(f"run.{key}", _samples, "run.sample_every above 0", switches=("run.sample_every",))
        for key in ("sample_captions", "sample_count", "sample_steps", "sample_guidance")
    ),
    Condition(
        "run.sample_count", lambda _, section: not section.sample_captions, "no run.sample_captions", is_refused=False
    ),
    Condition("parallel.shard", lambda _, section: section.strategy in SHARDED, 'parallel.strategy "fsdp" or "hsdp"'),
    Condition("parallel.replicas", lambda _, section: section.strategy == "hsdp", 'parallel.strategy = "hsdp"'),
]
for _technique in TECHNIQUES:
    CONDITIONS += _technique.conditions
for _name in RECORDS:
    CONDITIONS += [
        Condition(f"{_name}.score_column", _any_records(lambda section: section.scores), "scores"),
        Condition(
            f"{_name}.score_key", _any_records(lambda section: section.scores or section.caption_scores), "scores"
        ),
        Condition(f"{_name}.min_caption_score", _any_records(lambda section: section.caption_scores), "caption_scores"),
        Condition(
            f"{_name}.caption_temperature", _any_records(lambda section: section.caption_scores), "caption_scores"
        ),
        Condition(f"{_name}.caption_scores", _takes_captions, "a model that takes captions"),
        Condition(f"{_name}.original_share", _takes_captions, "a model that takes captions"),
    ]
