"""From a TOML file to a frozen, typed recipe: shipped presets, overrides, and errors that name the nearest key.

A recipe is data: no interpolation, no includes, no environment variables. The models in ``precompute/config.py`` and
``train/config.py`` document the keys.
"""

from __future__ import annotations

import copy
import difflib
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from .errors import RecipeError

STAGES = ("precompute", "train")  # packages that ship recipes
MAX_DEPTH = 16  # tables and lists inside each other
MAX_INTEGER = 2**63 - 1  # as TOML has them; Python fails to print one of more than 4,300 digits
# Of a field of tables with names: one may do without, as [text] beside [text.NAME].
UNNAMED: dict[str, Any] = {"may_be_unnamed": True}
MAX_SHOWN = 200  # characters of a value in a message
TOO_DEEP = f"tables or lists are nested more than {MAX_DEPTH} deep. Expected [SECTION] with keys."
TOO_LARGE = f"an integer is too large. Expected at most {MAX_INTEGER}."

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Caption = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


class Section(BaseModel):
    """Base of every recipe model: frozen, and an unknown key is an error."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class About(Section):
    """The section ``[about]`` of a recipe file: for readers and for the commands to run next, no setting of a run.

    Args:
      summary: what the recipe is for, in one line.
      trains: of a precompute recipe: train recipes for its store, the usual one first.
    """

    summary: str = ""
    trains: list[str] = []


class _WithAbout(Section):
    about: About = About()


RecipeT = TypeVar("RecipeT", bound=Section)


def shipped_recipes(package: str) -> dict[str, str]:
    """Names and texts of the recipes that a package ships in ``recipes/``."""
    folder = resources.files(package) / "recipes"
    found = {f.name.removesuffix(".toml"): f.read_text() for f in folder.iterdir() if f.name.endswith(".toml")}
    return dict(sorted(found.items()))


def load_recipe(name: str, model: type[RecipeT], *, package: str, overrides: Sequence[str] = ()) -> RecipeT:
    """Load a recipe by path or by the name of a shipped one, and apply ``section.key=value`` overrides.

    Precedence: default of the model < recipe file < override.

    Raises: RecipeError: unknown recipe, not TOML, unknown key (with the nearest one), wrong type or value.
    """
    values, _ = _read_recipe(name, package)
    return parse_with_overrides(name, model, values, overrides)


def about_recipe(name: str, *, package: str) -> About:
    """The section ``[about]`` of a recipe.

    Raises: as ``load_recipe``.
    """
    return _read_recipe(name, package)[1]


def _read_recipe(name: str, package: str) -> tuple[dict[str, Any], About]:
    """The plain values of a recipe file or of a shipped recipe, and its section ``[about]``, which is no setting."""
    shipped = shipped_recipes(package)
    path = Path(name)
    if name in shipped:
        text = shipped[name]
    elif path.is_file():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise RecipeError(f"recipe '{name}': not UTF-8 text ({error}). Expected a TOML file.") from error
    else:
        near = difflib.get_close_matches(name, shipped, n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        if other := next((stage for stage in STAGES if name in shipped_recipes(f"leandit.{stage}")), None):
            hint = f" It is a recipe for 'leandit {other}'."
        raise RecipeError(
            f"recipe '{name}': neither a file nor a shipped recipe.{hint} Shipped recipes: {', '.join(shipped)}."
        )
    try:
        values = _parsed(text, f"recipe '{name}'")
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"recipe '{name}': not valid TOML: {error}.") from error
    return values, parse_recipe(name, _WithAbout, {"about": values.pop("about", {})}).about


def _parsed(text: str, where: str) -> dict[str, Any]:
    """TOML to plain values of reasonable size.

    Raises: TOMLDecodeError: not TOML. RecipeError: nested too deeply, or an integer that is too large.
    """
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError as error:
        raise RecipeError(f"{where}: {TOO_DEEP}") from error
    except ValueError as error:  # Python reads at most 4,300 digits
        raise RecipeError(f"{where}: {TOO_LARGE}") from error
    _check_reasonable(values, where)
    return values


def _check_reasonable(value: Any, where: str, depth: int = 0) -> None:
    if depth > MAX_DEPTH:
        raise RecipeError(f"{where}: {TOO_DEEP}")
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise RecipeError(f"{where}: {TOO_LARGE}")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_reasonable(inner, where, depth + 1)


def parse_with_overrides(name: str, model: type[RecipeT], values: dict[str, Any], overrides: Sequence[str]) -> RecipeT:
    """Apply ``section.key=value`` overrides to plain values, and validate them against a recipe model.

    Raises: RecipeError: names every wrong key.
    """
    values = copy.deepcopy(values)
    for override in overrides:
        _apply_override(values, override, model)
    return parse_recipe(name, model, values)


def parse_recipe(name: str, model: type[RecipeT], values: dict[str, Any]) -> RecipeT:
    """Validate plain values against a recipe model.

    Raises: RecipeError: names every wrong key.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise RecipeError(f"recipe '{name}': {describe_problems(error, model)}") from error


def describe_problems(error: ValidationError, model: type[BaseModel]) -> str:
    """Every wrong key, as a sentence."""
    problems = "; ".join(_describe(problem, model) for problem in error.errors())
    return problems if problems.endswith("?") else f"{problems}."


def parse_stored(name: str, model: type[RecipeT], values: Mapping[str, Any]) -> tuple[RecipeT, dict[str, Any]]:
    """Read values that this or another release has stored: keys that are missing take their default.

    Args:
      name: of what is read, for messages.
    Returns: the model, and by its dotted name each stored key that the model does not have.
    Raises: RecipeError: a value is not valid; TypeError: the values are no mapping.
    """
    remaining, unknown = split_unknown(model, values)
    try:
        return model.model_validate(remaining), unknown
    except ValidationError as error:
        raise RecipeError(f"{name}: {describe_problems(error, model)}") from error


def split_unknown(model: type[BaseModel], values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split stored values into those whose keys a model has, and by its dotted name each other key.

    Raises: TypeError: the values are no mapping.
    """
    remaining: dict[str, Any] = copy.deepcopy(dict(values))
    unknown: dict[str, Any] = {}
    while True:
        try:
            model.model_validate(remaining)
            return remaining, unknown
        except ValidationError as error:
            extra = [problem["loc"] for problem in error.errors() if problem["type"] == "extra_forbidden"]
        if not extra:
            return remaining, unknown
        for location in extra:
            _take_key(remaining, location, unknown)


def _take_key(values: Any, location: Sequence[Any], taken: dict[str, Any]) -> None:
    """Move the key at a location of nested values, if it is there, into ``taken`` under its dotted name."""
    *outer, name = location
    for part in outer:
        if isinstance(values, list) or part in values:
            values = values[part]
    if name in values:
        value = values.pop(name)
        taken |= flatten({".".join(map(str, location)): value})


def _apply_override(values: dict[str, Any], override: str, model: type[Section]) -> None:
    key, equals, text = override.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        raise RecipeError(f"--set '{override}': expected SECTION.KEY=VALUE, as in --set optimizer.lr=2e-4.")
    if len(names) > MAX_DEPTH:
        raise RecipeError(f"--set {key.strip()[:40]}...: {TOO_DEEP}")
    section = values
    for name in names[:-1]:
        section = section.setdefault(name, {})
        if not isinstance(section, dict):
            raise RecipeError(f"--set '{override}': '{name}' is a key, not a section.")
    section[names[-1]] = _typed(text.strip(), _annotation(model, names), f"--set {key.strip()}")


def _typed(text: str, annotation: Any, where: str) -> Any:
    """Parse an override as TOML; keep plain text if the key holds text or the TOML is invalid."""
    if annotation is str and text[:1] not in ("'", '"'):
        return text
    try:
        return _parsed(f"value = {text}", where)["value"]
    except tomllib.TOMLDecodeError:
        return text


def _annotation(model: type[BaseModel], names: list[str]) -> Any:
    annotation: Any = model
    for name in names:
        if get_origin(annotation) is dict:  # of tables with names
            annotation = get_args(annotation)[1]
            if name not in getattr(annotation, "model_fields", {}):
                continue
        fields = getattr(annotation, "model_fields", {})
        if name not in fields:
            return None
        annotation = fields[name].annotation
    return annotation


def _describe(problem: Any, model: type[BaseModel]) -> str:
    location = [str(part) for part in problem["loc"] if part not in ("", "[key]")]
    key = ".".join(location)
    if problem["type"] == "extra_forbidden":
        named = [part for part in location if not part.isdigit()]  # no place in a list
        return f"unknown key '{key}'{_instead('.'.join(named), _all_keys(model, tables=named[1:-1]))}"
    got = problem["input"]
    message = problem["msg"].removeprefix("Value error, ").removesuffix(".")
    if not key:
        return message
    what = f"'{key}': {message[:1].lower()}{message[1:]}"
    is_of_section = problem["type"] == "value_error" and isinstance(got, dict)  # its message names the keys
    shown = repr(got)
    shown = shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}..."
    return what if is_of_section else f"{what} (got {shown})"


def _instead(key: str, known: Sequence[str]) -> str:
    """The most similar key, else all keys of the section, for a message."""
    section, _, name = key.rpartition(".")
    siblings = {other.rpartition(".")[2]: other for other in known if other.rpartition(".")[0] == section}
    near = [siblings[other] for other in difflib.get_close_matches(name, siblings, n=1)]
    near = near or sorted((other for other in known if other.endswith(f".{name}")), key=lambda other: other.count("."))
    if near:
        return f", did you mean '{near[0]}'?"
    return f"; [{section}] has {', '.join(siblings)}" if section else ""


def _all_keys(model: type[BaseModel], prefix: str = "", *, tables: Sequence[str] = ()) -> list[str]:
    """The keys of a model as the file has them.

    Args:
      tables: names of tables, for sections that have one for each name.
    """
    keys = []
    for name, field in model.model_fields.items():
        key, is_named = f"{prefix}{name}", get_origin(field.annotation) is dict
        folders = [f"{key}.{table}" for table in tables] if is_named else [key]
        folders += [key] if field.json_schema_extra == UNNAMED else []
        keys += [] if is_named else [key]
        for inner in (field.annotation, *get_args(field.annotation)):  # a section, or a list or tables of them
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                for folder in folders:
                    keys += _all_keys(inner, f"{folder}.")
    return keys


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested plain values by dotted key: {"a": {"b": 1}, "c": [{"d": 2}]} to {"a.b": 1, "c.0.d": 2}."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        inner = {str(i): table for i, table in enumerate(value)} if _is_tables(value) else value
        flat |= flatten(inner, f"{prefix}{key}.") if isinstance(inner, dict) else {f"{prefix}{key}": value}
    return flat


def to_toml(recipe: BaseModel) -> str:
    """Write a resolved recipe as TOML, one table per section (what ``load_recipe`` reads back)."""
    return values_to_toml(recipe.model_dump())


def values_to_toml(values: Mapping[str, Any]) -> str:
    """Write the plain values of a recipe, by section, as TOML."""
    return tomli_w.dumps(_without_inherited(values, {}))


def _without_inherited(values: Mapping[str, Any], outer: Mapping[str, Any]) -> dict[str, Any]:
    """Values without those that a table of a list has from the table around it: an override of that reaches both."""
    own: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            own[key] = _without_inherited(value, {})
        elif _is_tables(value):
            own[key] = [_without_inherited(inner, values) for inner in value]
        elif (key, value) not in outer.items():
            own[key] = value
    return own


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(inner, dict) for inner in value)
