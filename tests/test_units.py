"""Sizes and times in the units that read best."""

from __future__ import annotations

from leandit.units import readable_size, readable_time

SIZES = {0: "0 B", 3482: "3.4 KiB", 1_288_490_189: "1.2 GiB", 2**70: "1048576.0 PiB"}
TIMES = {0.0003: "0.3 ms", 0.041: "41 ms", 0.0996: "0.1 s", 59.96: "1 min", 80.4: "1 min 20 s", 3599.6: "1 h"}
TIMES |= {12_000: "3 h 20 min", 352_800: "4 d 2 h"}


def test_a_size_and_a_time_have_the_units_that_read_best() -> None:
    assert {num_bytes: readable_size(num_bytes) for num_bytes in SIZES} == SIZES
    assert {seconds: readable_time(seconds) for seconds in TIMES} == TIMES
