"""The stream of batches that a loader hands out: read ahead by threads, resumed from one number.

Which records a batch holds comes from its order (``batch_plan.py``), their content from the records alone
(``reader.py``). Shards of a store at a URL are fetched ahead in the order of the batches.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from ...errors import RecipeError, RunError
from ..disk.fork_safe import reset_in_forks
from ..order.batch_plan import MAX_NUMBER, BatchPlan, changed_fields
from ..store import content_hash_of_plan
from .batch import Batch
from .reader import BatchReader

STATE_VERSION = 2
FETCH_EVERY, FETCH_AHEAD = 16, 64  # batches, of stores at a URL
RESUME = "Resume with the same store and recipe, or start a new run."


class BatchStream(IterableDataset):
    """The batches of an order, from the current position to the end of the epoch; iterate again for the next epoch.

    An order without epochs, such as a mixture, never ends. The stream is its own iterator, with one position:
    ``state_dict`` says where it is, and ``torchdata`` saves and loads it as the state of a loader.

    Args:
      reader: reads the batches.
      prefetch: batches read ahead, each by one thread; 0 reads each on request.
      device: moves batches there and computes their latents; None leaves them in memory, as stored. For a GPU the
        copy, the draw and the scaling run ahead, on a separate CUDA stream.
    Raises: RecipeError: ``prefetch`` is not a count, or torch sees no such device.
    """

    def __init__(self, reader: BatchReader, *, prefetch: int = 2, device: torch.device | None = None) -> None:
        if not isinstance(prefetch, int) or prefetch < 0:
            raise RecipeError(f"a prefetch of {prefetch!r} batches: expected a whole number, 0 or more.")
        if is_gpu(device) and not torch.cuda.is_available():
            raise RecipeError(f"device '{device}': torch {torch.__version__} sees no GPU here.")
        self.reader = reader
        self._prefetch = prefetch
        self._device = device
        self.number = 0
        self._end: int | None = None  # number of the batch after the last of the epoch; None: there is none
        self._find_end()
        self.wait_seconds = 0.0
        self._fetched = range(0)  # batches whose shards were requested, of a store at a URL
        self._remotes = [store.remote for store in dict.fromkeys(reader.stores) if store.remote is not None]
        self.reset()
        self._side = torch.cuda.Stream(self._device) if is_gpu(self._device) else None
        reset_in_forks(self)

    def reset(self) -> None:
        """Start without threads and without batches read ahead."""
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: deque[tuple[int, Future[Batch]]] = deque()

    @property
    def _plan(self) -> BatchPlan | None:
        """The plan; None for an order without epochs."""
        return self.reader.order if isinstance(self.reader.order, BatchPlan) else None

    @property
    def epoch(self) -> int:
        """Epoch of the next batch; 0 for an order without epochs."""
        return self._plan.place_of(self.number)[0] if self._plan else 0

    def __len__(self) -> int:
        """Batches in the epoch of the next batch.

        Raises: TypeError: the order has no epochs.
        """
        if self._plan is None:
            raise TypeError("a mixture has no epochs, so it has no length")
        return self._plan.batches_per_epoch

    def __iter__(self) -> BatchStream:
        if get_worker_info() is not None:
            raise RunError(
                "loader: a stream of batches reads ahead in threads and cannot be split over worker processes. Use "
                "num_workers=0, or DataLoader(stream.reader, batch_size=None, sampler=range(step, steps), ...)."
            )
        self._find_end()
        return self

    def _find_end(self) -> None:
        self._end = self._plan.batches_per_epoch * (self.epoch + 1) if self._plan else None

    def __next__(self) -> Batch:
        """The next batch; reading ahead crosses the end of the epoch."""
        if self._end is not None and self.number >= self._end:
            raise StopIteration
        start = time.perf_counter()
        if self._remotes and self.number not in self._fetched:
            self._fetched = range(self.number, self.number + FETCH_EVERY)
            self.reader.fetch_ahead(self.number, FETCH_AHEAD)
        batch = self._take_ahead() if self._prefetch else self._read(self.number)
        self.wait_seconds += time.perf_counter() - start
        if self._side is not None:
            # Otherwise its memory could be reused while the GPU still computes on it.
            batch.record_stream(torch.cuda.current_stream(self._device))
        self.number += 1
        return batch

    def _take_ahead(self) -> Batch:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._prefetch, thread_name_prefix="leandit-read")
        if self._ahead and self._ahead[0][0] != self.number:  # a state was loaded
            self._cancel()
        for number in range(self.number + len(self._ahead), self.number + self._prefetch + 1):
            self._ahead.append((number, self._pool.submit(self._read, number)))
        try:
            return self._ahead.popleft()[1].result()
        except BaseException:
            self._cancel()
            raise

    def _read(self, number: int) -> Batch:
        """Read a batch and move it to the device."""
        batch = self.reader[number]
        if self._device is None:
            return batch
        if self._side is None:
            return batch.to(self._device).finish()
        with torch.cuda.stream(self._side):
            moved = batch.to(self._device).finish()
            copied = torch.cuda.Event()
            copied.record(self._side)
        copied.synchronize()  # before the batch is handed out; only this thread waits
        return moved

    def _cancel(self) -> None:
        while self._ahead:
            self._ahead.pop()[1].cancel()

    def close(self) -> None:
        """Stop reading ahead."""
        self._stop(wait=True)

    def __del__(self) -> None:
        self._stop(wait=False)

    def _stop(self, *, wait: bool) -> None:
        if "_pool" not in vars(self):
            return  # ``__init__`` or ``__setstate__`` failed
        self._cancel()
        if self._pool is not None:
            self._pool.shutdown(wait=wait)
            self._pool = None
        if self._fetched:
            self._fetched = range(0)
            for remote in self._remotes:
                remote.prefetch([])

    def __reduce__(self) -> tuple[Any, ...]:
        position = {"number": self.number, "wait_seconds": self.wait_seconds}
        return functools.partial(BatchStream, self.reader, prefetch=self._prefetch, device=self._device), (), position

    def state_dict(self) -> dict[str, Any]:
        """Position of the stream, and everything that must be the same on resume."""
        seeds = self.reader.resolver.seeds
        passes = None
        if self._plan:
            epoch, index = self._plan.place_of(self.number)
            passes = epoch + 1 if index else epoch
        return {
            "version": STATE_VERSION,
            "number": self.number,
            "passes": passes,
            "root_hashes": [store.content_hash for store in self.reader.stores],
            "order": self.reader.order.identity(),
            "draw_seed": seeds[0] if len(set(seeds)) == 1 else seeds,
            "caption_odds": self.reader.resolver.caption_odds,
        }

    def load_state_dict(self, state: dict[str, Any], *, reseeded: bool = False) -> None:
        """Resume from a state; ranks, workers and microbatches may differ.

        A state of a store that was incomplete then, and is not any more, starts the next pass.

        Args:
          reseeded: the seed may be another one: the position stays, and the rest of the pass comes in the order of the
            new seed, so some of its records come twice in this pass and others do not come.
        Raises: RunError: the store or a setting that decides the order has changed, or the position is invalid.
        """
        if not isinstance(state, dict) or "number" not in state:
            raise RunError(f"loader state: not a state of a loader; expected what 'state_dict' returned. {RESUME}")
        current = self.state_dict()
        for name in current:
            if name not in state:
                raise RunError(f"loader state: it has no '{name}', so it is of another release. {RESUME}")
        for name in state:
            if name not in current:
                raise RunError(f"loader state: '{name}' is not known, so it is of another release. {RESUME}")
        if reseeded:
            order = _with_seeds(state["order"], current["order"])
            state = state | {"draw_seed": current["draw_seed"], "order": order}
        _check_unchanged(state, current, ("version", "draw_seed"))
        hashes_of_plans = [content_hash_of_plan(store.plan_hash) for store in self.reader.stores]
        was_incomplete = state["root_hashes"] == hashes_of_plans
        is_complete = current["root_hashes"] != hashes_of_plans
        if self._plan and was_incomplete and is_complete:
            order = state["order"] if isinstance(state["order"], dict) else {}
            _check_unchanged(order, current["order"], ("seed", "leftovers"), prefix="order.")
            number = self._plan.batches_per_epoch * _count(state, "passes")
        else:
            _check_unchanged(state, current, ("root_hashes", "order", "caption_odds"))
            number = _count(state, "number")
        self.number = number
        self._find_end()
        if self._plan and number and number == self._plan.batches_per_epoch * self.epoch:
            self._end = number  # the rest of the epoch that the state was in is empty; the next pass is the next epoch


def _with_seeds(order: Any, other: Any) -> Any:
    """The identity of an order with the seeds of another one, at the places that both have."""
    if isinstance(order, dict) and isinstance(other, dict):
        same = {key: _with_seeds(value, other.get(key)) for key, value in order.items()}
        return same | ({"seed": other["seed"]} if "seed" in order and "seed" in other else {})
    if isinstance(order, list) and isinstance(other, list) and len(order) == len(other):
        return [_with_seeds(mine, theirs) for mine, theirs in zip(order, other, strict=True)]
    return order


def _check_unchanged(state: dict[str, Any], current: dict[str, Any], names: Sequence[str], prefix: str = "") -> None:
    """Raises: RunError: a field differs; it is named."""
    for name in names:
        if changes := changed_fields(state.get(name), current.get(name), f"{prefix}{name}"):
            raise RunError(f"loader state: {changes[0]}, so the order of records would differ. {RESUME}")


def _count(state: dict[str, Any], name: str) -> int:
    """A number of batches or passes. Raises: RunError: it is not one."""
    value = state.get(name)
    if type(value) is not int or not 0 <= value < MAX_NUMBER:
        raise RunError(f"loader state: number {value!r}: expected a count of batches. Start a new run.")
    return value


def is_gpu(device: torch.device | None) -> bool:
    """Whether batches go to a GPU."""
    return device is not None and device.type == "cuda"
