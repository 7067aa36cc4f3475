"""``leandit bench open``: how long a store takes to open, what it holds in memory, and what a batch costs to plan.

The store holds noise. It is opened in fresh processes, with its files in the page cache; medians are reported.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from ....datasets.batches.reader import PLANNED_AHEAD
from ....datasets.loader import make_loader
from ....datasets.order.batch_plan import BatchPlan
from ....datasets.store import LatentStore
from ...synthetic.store import make_store
from ..harness.fresh_process import run_in_fresh_process
from ..harness.meters import hardware, tree_anonymous_mb

BUCKET, BATCH = "256x256", 256
PLANNED_SIZES = (10_000, 1_281_167, 1_000_000_000)
PLANNED_BATCHES = 4096


def run(scratch: Path, records: int, rounds: int) -> dict[str, Any]:
    """Make the store if it is missing, and measure.

    Raises: ResourceError: a measurement failed.
    """
    store = scratch / f"open-{records}"
    make_store(store, {BUCKET: records})
    opened = [run_in_fresh_process(__name__, str(store), command="bench open") for _ in range(rounds)]
    return {
        "records": records,
        "hardware": hardware(),
        "open": {name: median(one[name] for one in opened) for name in opened[0]},
        "plan_us_per_batch": {str(size): round(_plan_seconds(size) * 1e6, 1) for size in PLANNED_SIZES},
    }


def measure(store_path: str) -> dict[str, float]:
    """Open a store and read its first batches, in this process."""
    before, start = tree_anonymous_mb() or 0.0, time.perf_counter()
    store = LatentStore(store_path)
    for bucket in store.buckets:
        store.index(bucket)
    opened = time.perf_counter()
    memory = (tree_anonymous_mb() or 0.0) - before
    counted = time.perf_counter()
    batches = iter(make_loader(store, global_batch=BATCH, prefetch=2))
    next(batches)
    return {
        "open_seconds": opened - start,
        "open_mb": memory,
        "first_batch_ms": (time.perf_counter() - counted) * 1e3,
    }


def render(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Name and value of each line."""
    opened, machine = result["open"], result["hardware"]
    return [
        ("machine", f"{machine['cpu']}, {machine['cores']} cores"),
        ("open", f"{opened['open_seconds']:.2f} s, {opened['open_mb']:.0f} MB for {result['records']} records"),
        ("first batch", f"{opened['first_batch_ms']:.0f} ms after that"),
        *(("plan", f"{us:.1f} us a batch of {BATCH} of {size}") for size, us in result["plan_us_per_batch"].items()),
    ]


def _plan_seconds(size: int) -> float:
    """Seconds to plan one batch as the loader does, averaged over many."""
    plan = BatchPlan({BUCKET: size}, BATCH, seed=0)
    plan.batches(0, PLANNED_AHEAD)
    start = time.perf_counter()
    for first in range(0, PLANNED_BATCHES, PLANNED_AHEAD):
        plan.batches(first, PLANNED_AHEAD)
    return (time.perf_counter() - start) / PLANNED_BATCHES


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
