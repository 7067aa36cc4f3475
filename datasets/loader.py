"""The torch side of a store: whole batches through a ``torchdata`` ``StatefulDataLoader``.

    for batch in make_loader(store, global_batch=256, seed=0):      # one epoch
        ...                                                         # batch.latents, .labels, .captions

Which records a batch holds comes from its order (``batch_plan.py``), what it holds from its records alone
(``reader.py``). The state is one number, and what must not have changed. Reading ahead happens in threads: worker
processes make a cheap loader ten times slower, so there are none. Who must have them reads by number, in any order, on
any rank:

    DataLoader(BatchReader([store], plan), batch_size=None, sampler=range(step, steps), num_workers=4)
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from .batches.reader import PLANNED_AHEAD, Batch, BatchReader, TextForm
from .disk.fork_safe import reset_in_forks
from .errors import RecipeError, RunError
from .order.batch_plan import BatchPlan, Leftovers
from .order.caption_odds import CaptionOdds
from .order.filters import Selection
from .order.order import changed_fields
from .order.planned import MAX_NUMBER
from .order.shuffle import ShardWindow
from .store import LatentStore

STATE_VERSION = 2
BRING_EVERY, BRING_AHEAD = 16, 64  # batches, of stores at a URL
RESUME = "Resume with the same store and recipe, or start a new run."


class BatchStream(IterableDataset):
    """The batches of an order, from where the state stands to the end of its epoch; iterate again for the next one.

    An order without epochs, as a mixture, does not end.

    Args:
      reader: of the batches.
      prefetch: batches read ahead, each by one thread; 0 reads them when they are asked for.
      device: where batches are handed out, with their latents ready; None leaves them in memory, as stored. On a GPU
        the copy, the draw and the scaling happen ahead, on a stream of their own.
    Raises: RecipeError: no such number of batches, or no such device.
    """

    def __init__(self, reader: BatchReader, *, prefetch: int = 2, device: torch.device | None = None) -> None:
        if not isinstance(prefetch, int) or prefetch < 0:
            raise RecipeError(f"a prefetch of {prefetch!r} batches: needed a whole number, 0 or more.")
        if _is_gpu(device) and not torch.cuda.is_available():
            raise RecipeError(f"device '{device}': torch {torch.__version__} sees no GPU here.")
        self.reset()
        self.reader, self._prefetch, self._device = reader, prefetch, device
        self.number = 0
        self._moves = 0  # how often a state was loaded
        self.wait_seconds = 0.0
        self._brought = range(0)  # numbers for which shards of a store at a URL were asked for
        self._side = torch.cuda.Stream(device) if _is_gpu(device) else None
        reset_in_forks(self)

    def reset(self) -> None:
        """Nothing is read ahead, and no thread is there that would."""
        self._pools: tuple[ThreadPoolExecutor, ThreadPoolExecutor] | None = None
        self._ahead: deque[tuple[int, Future[Batch]]] = deque()

    @property
    def epoch(self) -> int:
        """The epoch of the next batch; of an order without epochs 0."""
        return self._plan.place_of(self.number)[0] if self._plan else 0

    @property
    def _plan(self) -> BatchPlan | None:
        """The plan, where the order has epochs."""
        return self.reader.order if isinstance(self.reader.order, BatchPlan) else None

    @property
    def num_batches(self) -> int:
        """Batches of the epoch that the next batch is of.

        Raises: TypeError: the order has no epochs.
        """
        if self._plan is None:
            raise TypeError("a mixture or stages have no epochs, so they have no length")
        return self._plan.num_batches(self.epoch)

    def __iter__(self) -> Iterator[Batch]:
        if get_worker_info() is not None:
            raise RunError(
                "loader: a stream of batches reads ahead in threads and cannot be split over worker processes. Use "
                "num_workers=0, or DataLoader(stream.reader, batch_size=None, sampler=range(step, steps), ...)."
            )
        moves, end = self._moves, self._end_of_epoch()
        while end is None or self.number < end:
            batch = self._next()
            self.number += 1  # before it is handed out, so that the state counts what was
            yield batch
            if moves != self._moves:  # a state was loaded meanwhile: on from there, to the end of its epoch
                moves, end = self._moves, self._end_of_epoch()

    def _end_of_epoch(self) -> int | None:
        return self._plan.batches_before(self.epoch + 1) if self._plan else None

    def _next(self) -> Batch:
        """The next batch, and reading ahead of it; also beyond the end of the epoch."""
        start = time.perf_counter()
        if self.number not in self._brought:
            self._brought = range(self.number, self.number + BRING_EVERY)
            if any(store.remote is not None for store in self.reader.stores):
                self.reader.bring_ahead(self.number, BRING_AHEAD)
        batch = self._take_ahead() if self._prefetch else self._read(self.number)
        self.wait_seconds += time.perf_counter() - start
        if self._side is not None:
            # Else its memory could be used for the next one while the GPU still computes on it.
            batch.record_stream(torch.cuda.current_stream(self._device))
        return batch

    def _take_ahead(self) -> Batch:
        if self._pools is None:
            readers = ThreadPoolExecutor(self._prefetch, thread_name_prefix="leandit-read")
            self._pools = readers, ThreadPoolExecutor(1, thread_name_prefix="leandit-plan")
        readers, planner = self._pools
        if self._ahead and self._ahead[0][0] != self.number:  # the state was moved
            self._cancel()
        if self.number % PLANNED_AHEAD == PLANNED_AHEAD // 2:
            planner.submit(self.reader.plan_ahead, self.number + PLANNED_AHEAD)
        first = self.number + len(self._ahead)
        for number in range(first, self.number + self._prefetch + 1):
            self._ahead.append((number, readers.submit(self._read, number)))
        try:
            return self._ahead.popleft()[1].result()
        except BaseException:
            self._cancel()
            raise

    def _read(self, number: int) -> Batch:
        """Read a batch and bring it to the device."""
        batch = self.reader[number]
        if self._device is None:
            return batch
        if self._side is None:
            return batch.to(self._device).finish()
        with torch.cuda.stream(self._side):
            moved = batch.to(self._device).finish()
            copied = torch.cuda.Event()
            copied.record(self._side)
        copied.synchronize()  # before the pinned memory is used again; only this thread waits
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
        if "_pools" not in vars(self):
            return  # a copy that was not made whole
        self._cancel()
        if self._pools is not None:
            for pool in self._pools:
                pool.shutdown(wait=wait)
            self._pools = None
        if self._brought:
            self._brought = range(0)
            for store in self.reader.stores:
                if store.remote is not None:
                    store.remote.prefetch([])

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_pools", "_ahead", "_side")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.reset()
        self._side = torch.cuda.Stream(self._device) if _is_gpu(self._device) else None
        reset_in_forks(self)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, and what must not have changed when it goes on."""
        plan = self._plan
        return {
            "version": STATE_VERSION,
            "number": self.number,
            "passes": plan.place_of(self.number)[0] + bool(plan.place_of(self.number)[1]) if plan else None,
            "root_hashes": [content_hash(store.root_hash, store.plan_hash) for store in self.reader.stores],
            "order": self.reader.order.identity(),
            "draw_seed": self.reader.seed,
        }

    def load_state_dict(self, state: dict[str, Any], earlier: Collection[str] = ()) -> None:
        """Go on from a state; ranks, workers and microbatches may be others.

        Args:
          earlier: ``content_hash`` of what was read before; a state of one of these begins the next pass, over this
            store.
        Raises: RunError: the store, or what decides the order, is another, or there is no such place.
        """
        if not isinstance(state, dict) or "number" not in state:
            raise RunError(f"loader state: no state of a loader; needed what 'state_dict' gave. {RESUME}")
        here = self.state_dict()
        was = state.get("root_hashes")
        moved = self._plan is not None and was != here["root_hashes"] and was in [[root] for root in earlier]
        fixed = ("version", "draw_seed", *(("root_hashes", "order") if not moved else ()))
        for name in fixed:
            if changes := changed_fields(state.get(name), here[name], name):
                raise RunError(f"loader state: {changes[0]}, so the order of records would be another. {RESUME}")
        place = state.get("passes" if moved else "number")
        if type(place) is not int or not 0 <= place < MAX_NUMBER:
            raise RunError(f"loader state: number {place!r}: needed a count of batches. Start a new run.")
        if moved:
            assert self._plan is not None
            was_order = state.get("order")
            if changes := changed_fields(_kept(was_order), _kept(here["order"]), "order"):
                raise RunError(f"loader state: {changes[0]}, so the order of records would be another. {RESUME}")
            place = self._plan.batches_before(place)
        self.number, self._moves = place, self._moves + 1


def content_hash(root_hash: str | None, plan_hash: str) -> str:
    """What stands for the records of a store in a state: its root hash, while it is incomplete that of its plan."""
    return root_hash or f"plan {plan_hash}"


def _kept(order: Any) -> Any:
    """What must be the same of an order when its store has grown."""
    return {name: order.get(name) for name in ("seed", "leftovers")} if isinstance(order, dict) else order


class BatchLoader(StatefulDataLoader):
    """``StatefulDataLoader`` over a ``BatchStream``; its length is the number of batches of an epoch.

    Its state is the stream's, and it hands the stream's batches on as they are: what torchdata does between for each
    batch, for worker processes and profilers, would take a seventh of the time of a batch of small latents.
    """

    dataset: BatchStream

    def __iter__(self) -> Iterator[Batch]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return iter(self.dataset)

    def state_dict(self) -> dict[str, Any]:
        """See ``BatchStream``."""
        return self.dataset.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See ``BatchStream``."""
        self.dataset.load_state_dict(state_dict)

    def __len__(self) -> int:
        return self.dataset.num_batches


def make_loader(
    store: LatentStore,
    *,
    global_batch: int | Mapping[str, int],
    seed: int = 0,
    leftovers: Leftovers = "short",
    window: ShardWindow | None = None,
    selection: Selection | None = None,
    rank: int = 0,
    world_size: int = 1,
    text: TextForm = "padded",
    prefetch: int = 2,
    device: torch.device | str | None = None,
    caption_odds: CaptionOdds | None = None,
) -> BatchLoader:
    """Loader over a store: each pass is one epoch, ``state_dict()`` resumes at any batch.

    Args:
      store: an open store.
      global_batch: records in a full batch, over all ranks; one number, or one for each bucket.
      seed: of the order, the posterior draw, and the choice of caption and flip.
      leftovers: what becomes of the records of a bucket that fill no batch (``BatchPlan``).
      window: a shuffle for slow disks (``ShardWindow``).
      selection: the records that train (``RecordFilter.select``); None for all.
      rank, world_size: this process reads its slice of every global batch.
      text: captions "padded" to the longest of the batch, "packed" one after the other, or "none" of them.
      prefetch: batches read ahead.
      device: where batches are handed out, with their latents ready; None leaves them in memory, as stored.
      caption_odds: how often each caption of a record is drawn; None: all alike.
    Raises: RunError: the store has no records; RecipeError: the selection is of another store, or an argument is none.
    """
    device = None if device is None else torch.device(device)
    buckets = selection.counts if selection else store.buckets
    plan = BatchPlan(buckets, global_batch, seed, leftovers=leftovers, window=window, selection=selection)
    reader = BatchReader(
        [store], plan, rank=rank, world_size=world_size, text=text, pin=_is_gpu(device), caption_odds=caption_odds
    )
    return loader_of(BatchStream(reader, prefetch=prefetch, device=device))


def shard_window(store: LatentStore, shards: int, selection: Selection | None = None) -> ShardWindow:
    """A window of so many shards of each bucket; of one that a selection cuts, its blocks have fewer records."""
    rows = {}
    for bucket, count in store.buckets.items():
        trains = selection.counts[bucket] if selection else count
        rows[bucket] = max(1, round(store.latents(bucket).shard_rows * trains / max(1, count)))
    return ShardWindow(shards, rows)


def loader_of(stream: BatchStream) -> BatchLoader:
    """A ``torchdata`` loader over a stream, as of a mixture of stores.

    Raises: RunError: there are no records.
    """
    if not all(plan.num_records for plan in stream.reader.order.plans):
        path = stream.reader.stores[0].path
        raise RunError(f"store '{path}': it holds no records, so there is nothing to train on.")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata 0.11 calls it, torch 2.13 warns
        return BatchLoader(stream, batch_size=None, num_workers=0, collate_fn=_as_it_is)


def _is_gpu(device: torch.device | None) -> bool:
    return device is not None and device.type == "cuda"


def _as_it_is(batch: Any) -> Any:
    return batch
