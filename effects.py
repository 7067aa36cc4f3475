"""Keys of a recipe that its other settings leave without effect: refused where the command sets them, else announced.

A recipe file may hold keys for a feature that an override turns off, so these are announced; an override that changes
nothing is a mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel

from .errors import RecipeError


class Condition(NamedTuple):
    """When a key of a recipe is read.

    Args:
      key: with its sections as ``recipe_keys`` lists it, so NAME stands for the name of a table.
      is_read: whether it is read, by the recipe and the section of the key.
      needs: what it needs, a phrase for messages.
      is_refused: an override of an unread key is an error; otherwise it is announced, because many recipes carry it.
      switches: keys that turn the feature on and off; a command that sets one as well knows that the feature is off.
    """

    key: str
    is_read: Callable[[Any, Any], bool]
    needs: str
    is_refused: bool = True
    switches: tuple[str, ...] = ()


class UnreadKey(NamedTuple):
    """A key with another value than its default that is not read.

    Args:
      key: as ``--set`` takes it.
      condition: that does not hold.
    """

    key: str
    condition: Condition

    def __str__(self) -> str:
        return f"{self.key} has no effect: it needs {self.condition.needs}"


def unread_keys(recipe: BaseModel, conditions: Sequence[Condition]) -> list[UnreadKey]:
    """The keys of a recipe that are set and not read."""
    unread = []
    for condition in conditions:
        *sections, field = condition.key.split(".")
        for name, section in _sections(recipe, sections):
            default = type(section).model_fields[field].get_default(call_default_factory=True)
            if getattr(section, field) != default and not condition.is_read(recipe, section):
                unread.append(UnreadKey(f"{name}.{field}", condition))
    return unread


def _sections(value: Any, names: Sequence[str], path: str = "") -> Iterator[tuple[str, BaseModel]]:
    """The sections below a value, by their dotted names."""
    if isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _sections(inner, names, f"{path}.{number}")
    elif isinstance(value, dict):
        for name, inner in value.items():
            # The section without a name, [text], has its keys beside the tables [text.NAME], which have the same.
            below = names[1:] if names[:1] == ["NAME"] else names
            yield from _sections(inner, below, f"{path}.{name}" if name else path)
    elif not names:
        yield path.removeprefix("."), value
    else:
        yield from _sections(getattr(value, names[0]), names[1:], f"{path}.{names[0]}")


def check_overrides(recipe: BaseModel, conditions: Sequence[Condition], overrides: Sequence[str]) -> None:
    """Raise if an override sets a key that is not read.

    Args:
      overrides: as ``load_recipe`` takes them.
    Raises: RecipeError: names the first of them.
    """
    names = {override.partition("=")[0].strip() for override in overrides}
    for unread in unread_keys(recipe, conditions):
        if unread.key in names and unread.condition.is_refused and not names.intersection(unread.condition.switches):
            raise RecipeError(f"{unread}, and this command sets it. Leave it out.")


def unread_notes(recipe: BaseModel, conditions: Sequence[Condition]) -> list[str]:
    """A sentence for each key that is set and not read."""
    return [f"recipe: {unread}" for unread in unread_keys(recipe, conditions)]
