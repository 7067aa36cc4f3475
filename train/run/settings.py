"""Which settings of a run may change when it goes on: one table. Needs no torch.

A run that resumes computes the same, so most settings are those it was started with. Some only say where and how fast
a run computes, and may change at any start. Others change how the run learns from here on while the saved state keeps
its meaning: they change with ``--continue-with`` alone. What the saved state means never changes.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from ...errors import RecipeError, RunError
from ...recipe import flatten, split_unknown
from ..config import TrainRecipe

DECAYING = {"linear", "cosine"}  # kinds of schedules that end at the last step
OPTION = "--continue-with"


class Rule(NamedTuple):
    """Whether recipe keys may change when a run goes on.

    Args:
      keys: a pattern of dotted keys, as in ``fnmatch``.
      allowed: "always", "by option" (``--continue-with``) or "never".
      reason: why it is never allowed, for a message.
    """

    keys: str
    allowed: Literal["always", "by option", "never"]
    reason: str = ""


_ORDER = "the saved position in the data is one in the order of these records"
_AVERAGES = "the saved averages have been made with it since the first step"
_OBJECTIVE = "the saved weights and averages have learned with it"
_MODEL = "the saved weights are of this model"

RULES = (  # the first one that matches decides
    Rule("run.global_batch", "never", "the saved position in the data counts batches of this size"),
    Rule("run.ema_decay", "never", _AVERAGES),
    Rule("run.seed", "by option"),
    Rule("run.grad_clip", "by option"),
    Rule("run.*", "always"),
    Rule("parallel.*", "always"),
    Rule("optimizer.name", "never", "the saved state is that of this optimizer"),
    Rule("optimizer.*", "by option"),
    Rule("schedule.*", "by option"),
    Rule("ema.keep_every", "always"),
    Rule("ema.*", "never", _AVERAGES),
    # A checkpoint holds all weights, and knows by a hash those that adapters were trained on.
    Rule("model.init_from", "always"),
    Rule("model.*", "never", _MODEL),
    Rule("lora.*", "never", _MODEL),
    Rule("latent.*", "never", "the saved weights have learned latents as it makes them"),
    Rule("conditioning.drop", "by option"),
    Rule("conditioning.*", "never", _MODEL),
    # Stores may move; they are known by their root hashes.
    Rule("data.mixture.[0-9]*.store", "always"),
    Rule("data.mixture.[0-9]*.revision", "always"),
    Rule("data.check", "always"),
    Rule("data.access", "always"),
    Rule("data.*", "never", _ORDER),
    Rule("*", "never", _OBJECTIVE),
)


def rule_of(key: str) -> Rule:
    """The rule of a dotted key."""
    return next(rule for rule in RULES if fnmatch.fnmatchcase(key, rule.keys))


@dataclass(frozen=True)
class StoredRecipe:
    """A recipe that a run has stored, as this release reads it.

    Args:
      values: nested plain values, with all keys of this release; missing ones have their defaults.
      unknown: stored keys that this release does not have, by dotted name.
    """

    values: dict[str, Any]
    unknown: dict[str, Any]

    @property
    def notice(self) -> str:
        """What to tell the user about keys that this release does not have; "": there are none."""
        if not self.unknown:
            return ""
        keys = ", ".join(f"{key} = {value!r}" for key, value in self.unknown.items())
        return f"its recipe has {keys}, which this release does not have: the run goes on without"


def read_stored_recipe(values: Mapping[str, Any]) -> StoredRecipe:
    """Read the recipe of ``run.json``, of this or another release.

    A value that this release refuses stays as it was stored.
    """
    remaining, unknown = split_unknown(TrainRecipe, values)
    try:
        return StoredRecipe(TrainRecipe.model_validate(remaining).model_dump(), unknown)
    except ValidationError:
        return StoredRecipe(remaining, unknown)


def check_continued(keys: Sequence[str]) -> None:
    """Raise RecipeError if a key of ``--continue-with`` never changes, with the reason."""
    for key in keys:
        rule = rule_of(key)
        if rule.allowed == "never":
            raise RecipeError(
                f"{OPTION} {key}: it cannot change, because {rule.reason}. Start a new run, with model.init_from for "
                "the weights of this one."
            )


def check_settings(
    run: Path, stored: StoredRecipe, recipe: TrainRecipe, continued: Sequence[str] = ()
) -> dict[str, tuple[Any, Any]]:
    """Check that a run goes on with its settings, but for those that may change.

    Args:
      continued: keys that the user has named with ``--continue-with``.
    Returns: the old and the new value of each of these that differs.
    Raises: RunError: naming all other keys that differ.
    """
    before = flatten(stored.values)
    now = flatten(recipe.model_dump())
    decays = before.get("schedule.kind") in DECAYING  # then the rate of all steps depends on the last one
    if "schedule.kind" not in continued:
        decays = decays or recipe.schedule.kind in DECAYING

    changed: list[str] = []
    refused: list[str] = []
    has_option = True  # for all refused keys
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) == now.get(key):
            continue
        allowed = rule_of(key).allowed
        if key == "run.steps" and decays:
            allowed = "by option"
        if allowed == "always":
            continue
        if allowed == "by option" and key in continued:
            changed.append(key)
        else:
            refused.append(key)
            has_option = has_option and allowed == "by option"
    if refused:
        fields = "".join(f"\n  {key} was {before.get(key)!r}, is {now.get(key)!r}" for key in refused)
        advice = ""
        if has_option:
            options = " ".join(f"{OPTION} {key}=VALUE" for key in refused)
            advice = f", or go on from its newest checkpoint with {options}"
        raise RunError(
            f"run '{run}': started with other settings. Use another --run, or resume with the settings in its "
            f"recipe.toml{advice}. They differ in:{fields}"
        )
    return {key: (before.get(key), now.get(key)) for key in changed}
