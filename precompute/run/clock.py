"""How long each stage of stage 1 took."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total) whenever something was done; a total that is not known is 0.

With REJECTED, ``done`` is how many records the revision has rejected so far.
"""
REJECTED = "rejected"


@dataclass
class StageClock:
    """Seconds spent in each stage, summed over threads."""

    seconds: dict[str, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Add the time of the block to a stage."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add({stage: time.perf_counter() - start})

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add to stages what was measured elsewhere."""
        with self._lock:
            for stage, more in seconds.items():
                self.seconds[stage] = self.seconds.get(stage, 0.0) + more
