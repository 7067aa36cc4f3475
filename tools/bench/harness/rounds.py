"""Rounds of measurements in alternating order, and the ratios and ranges that are reported of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import TypeVar

Cell = TypeVar("Cell")


def alternating_rounds(cells: Sequence[Cell], count: int) -> Iterator[tuple[int, Cell]]:
    """Every cell once a round, with the round's number; every second round goes backwards.

    So what warms up or slows down during a round affects all cells alike.
    """
    for number in range(count):
        for cell in cells if number % 2 == 0 else reversed(cells):
            yield number, cell


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """The quotient of two rates in each round."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def median_and_range(values: Sequence[float], form: str) -> str:
    """Such as "1.88x (1.80x to 2.01x)".

    Args:
      form: format of one value, as "{:.2f}x".
    """
    low, middle, high = (form.format(value) for value in (min(values), median(values), max(values)))
    return f"{middle} ({low} to {high})"
