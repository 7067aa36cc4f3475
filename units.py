"""Sizes, times and counts as they read best. Machine-readable output keeps plain numbers."""

from __future__ import annotations

import math

MINUTE, HOUR, DAY = 60, 3600, 86_400  # seconds
BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def readable_size(num_bytes: float) -> str:
    """Bytes with three digits or more: "812 B", "3.4 KiB", "62.9 MiB", "1.2 GiB"."""
    power = min(len(BYTE_UNITS) - 1, int(math.log(max(1, abs(num_bytes)), 1024)))
    if power + 1 < len(BYTE_UNITS) and round(abs(num_bytes) / 1024**power, min(1, power)) >= 1024:
        power += 1  # 1023.99 KiB is 1.0 MiB
    return f"{num_bytes / 1024**power:.{min(1, power)}f} {BYTE_UNITS[power]}"


def plural(number: int, noun: str) -> str:
    """A number with its noun: "1 record", "2,000 records"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def readable_time(seconds: float) -> str:
    """A time in its two largest units: "41 ms", "3.2 s", "1 min 20 s", "3 h 20 min", "4 d 2 h"."""
    if seconds < MINUTE - 0.05:
        return f"{seconds:.1f} s" if seconds >= 0.0995 or not seconds else f"{seconds * 1000:.2g} ms"
    for (unit, name), (part, part_name) in (
        ((MINUTE, "min"), (1, "s")),
        ((HOUR, "h"), (MINUTE, "min")),
        ((DAY, "d"), (HOUR, "h")),
    ):
        whole, rest = divmod(round(seconds / part), unit // part)
        if name == "d" or whole * unit < {MINUTE: HOUR, HOUR: DAY}[unit]:
            return f"{whole} {name} {rest} {part_name}" if rest else f"{whole} {name}"
    raise AssertionError("days have no end")
