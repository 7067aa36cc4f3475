"""What a page of records shows, as it stands in its address."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any
from urllib.parse import urlencode

from .....datasets.errors import RecipeError

CONDITION = re.compile(r"\s*([A-Za-z0-9_-]+)\s*(>=|<=|!=|=|<|>|~)\s*(.*?)\s*")
MAX_CHARS = 1000  # of a value in an address
ORDERS = ("up", "down")


@dataclass(frozen=True)
class Condition:
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

        Raises: RecipeError: an unknown parameter, or a value that cannot be.
        """
        known = {field.name for field in fields(Query)}
        values: dict[str, Any] = {}
        for name, value in parameters.items():
            if name not in known:
                raise RecipeError(f"no parameter {name!r}. There are: {', '.join(sorted(known))}.")
            if len(value) > MAX_CHARS:
                raise RecipeError(f"{name}: {len(value)} characters, at most {MAX_CHARS} are read.")
            values[name] = value
        page = values.get("page", "1")
        if not re.fullmatch("[1-9][0-9]{0,8}", page):
            raise RecipeError(f"page {page!r}: needed a number from 1.")
        if values.get("order", "up") not in ORDERS:
            raise RecipeError(f"order {values['order']!r}: needed one of {', '.join(ORDERS)}.")
        values["page"] = int(page)
        return Query(**values)

    @property
    def conditions(self) -> list[Condition]:
        """Those of ``where``.

        Raises: RecipeError.
        """
        found = []
        for part in re.split(r"\s+and\s+", self.where.strip()) if self.where.strip() else ():
            match = CONDITION.fullmatch(part)
            if not match:
                raise RecipeError(
                    f"where {part!r}: needed COLUMN, one of = != < <= > >= ~ (contains) and a value, such as "
                    "height_px >= 512; several joined by 'and'."
                )
            found.append(Condition(*match.groups()))
        return found

    def link(self, **changes: Any) -> str:
        """The address of this page with some changes: of another page, if they are not of ``page`` itself."""
        changed = replace(self, **{"page": 1} | changes)
        values = {field.name: getattr(changed, field.name) for field in fields(Query)}
        return "?" + urlencode({name: value for name, value in values.items() if value != getattr(Query(), name)})
