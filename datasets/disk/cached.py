"""A property that is computed once per object, without a lock."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from functools import cached_property
else:

    class cached_property:  # noqa: N801 (used like "property")
        """``functools.cached_property`` of Python 3.12.

        Python 3.11 holds one lock for all objects of a class while it computes: a fork may inherit it locked, and it
        can deadlock with other locks. Here concurrent threads may compute twice; all of them get the first result.
        """

        def __init__(self, compute: Callable[[Any], Any]) -> None:
            self._compute, self.__doc__ = compute, compute.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self._name = name

        def __get__(self, instance: object, owner: type) -> Any:
            # The instance attribute shadows this descriptor, because it has no ``__set__``.
            return self if instance is None else vars(instance).setdefault(self._name, self._compute(instance))
