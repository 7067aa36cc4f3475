"""A property that is computed once per object, without a lock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class cached_property(Generic[T]):  # noqa: N801 (used like "property")
    """``functools.cached_property`` as of Python 3.12.

    Python 3.11 holds a lock for all objects of a class while it computes. A fork may inherit it locked by a thread that
    the child does not have, and it can deadlock with other locks. Here concurrent threads may compute twice; all of
    them get the first result.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute, self.__doc__ = compute, compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> cached_property[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> cached_property[T] | T:
        if instance is None:
            return self
        # The instance attribute shadows this descriptor from now on, because it has no ``__set__``.
        return vars(instance).setdefault(self._name, self._compute(instance))
