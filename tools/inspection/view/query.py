"""What a page of records shows, as its address says it; parsed before any of it reaches the database."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple
from urllib.parse import urlencode

from ....datasets.errors import RecipeError

CONDITION = re.compile(r"\s*([A-Za-z0-9_-]+)\s*(>=|<=|!=|=|<|>|~)\s*(.*?)\s*")
WORD = re.compile(r'"([^"]*)"|([^\s"]+)')
MAX_CHARS, MAX_WORDS = 1000, 32  # of a value in an address; of a search
ORDERS = ("up", "down")


class Condition(NamedTuple):
    """One comparison of a column: ``height_px >= 512``; "~" means contains."""

    column: str
    operator: str
    value: str


@dataclass(frozen=True)
class Query:
    """Which records, in which order.

    Args:
      q: words that one caption, the class name or the key contains.
      where: conditions joined by "and".
      bucket, class_, status, reason: values of these; "" for any.
      sort: a column; "" for the order of the table.
      order: "up" or "down".
      page: from 1.
    """

    q: str = ""
    where: str = ""
    bucket: str = ""
    class_: str = ""
    status: str = ""
    reason: str = ""
    sort: str = ""
    order: str = "up"
    page: int = 1

    @staticmethod
    def parse(parameters: Mapping[str, str]) -> Query:
        """Read the parameters of an address.

        Raises: RecipeError: an unknown parameter, or an invalid value.
        """
        known = {field.name for field in fields(Query)}
        values: dict[str, Any] = {}
        for name, value in parameters.items():
            if name not in known:
                raise RecipeError(f"no parameter {name!r}. There are: {', '.join(sorted(known))}.")
            if len(value) > MAX_CHARS:
                raise RecipeError(f"{name}: {len(value)} characters, expected at most {MAX_CHARS}.")
            values[name] = value
        page = values.get("page", "1")
        if not re.fullmatch("[1-9][0-9]{0,8}", page):
            raise RecipeError(f"page {page!r}: expected a number from 1.")
        if values.get("order", "up") not in ORDERS:
            raise RecipeError(f"order {values['order']!r}: expected one of {', '.join(ORDERS)}.")
        values["page"] = int(page)
        return Query(**values)

    @property
    def words(self) -> list[str]:
        """Those of ``q``; "several words" in quotes are one.

        Raises: RecipeError: too many.
        """
        words = [quoted or word for quoted, word in WORD.findall(self.q)]
        words = list(dict.fromkeys(word for word in words if word.strip()))
        if len(words) > MAX_WORDS:
            raise RecipeError(f"search: {len(words)} words, expected at most {MAX_WORDS}.")
        return words

    @property
    def conditions(self) -> list[Condition]:
        """Those of ``where``.

        Raises: RecipeError.
        """
        conditions = []
        for part in re.split(r"\s+and\s+", self.where.strip()) if self.where.strip() else ():
            match = CONDITION.fullmatch(part)
            if not match:
                raise RecipeError(
                    f"where {part!r}: expected COLUMN, one of = != < <= > >= ~ (contains) and a value, such as "
                    "height_px >= 512; several joined by 'and'."
                )
            conditions.append(Condition(*match.groups()))
        return conditions

    def link(self, **changes: Any) -> str:
        """The address of this query with some changes; page 1 unless ``page`` is one of them."""
        changed = replace(self, **{"page": 1} | changes)
        values = {field.name: getattr(changed, field.name) for field in fields(Query)}
        return "?" + urlencode({name: value for name, value in values.items() if value != getattr(Query(), name)})
