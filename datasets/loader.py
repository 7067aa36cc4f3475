"""The torch side of a store: whole batches through a ``torchdata`` ``StatefulDataLoader``.

    for batch in make_loader(store, global_batch=256, seed=0):      # one epoch
        ...                                                         # batch.latents, .labels, .captions

The order comes from ``BatchPlan``; the state is (epoch, batch) and what must not have changed. Reading ahead happens in
threads: worker processes make a cheap loader ten times slower, so there are none.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from .batches import PURPOSE_CAPTION, PURPOSE_FLIP, BatchPlan, keyed_choice
from .errors import RunError
from .latents import final_latents
from .store import LatentStore

STATE_VERSION = 1


@dataclass(frozen=True)
class Batch:
    """One global batch of one bucket.

    Args:
      latents: (B, C, H, W) float32, drawn, shifted and scaled: the model's input at t = 0.
      labels: (B,) int64 class index, -1 for none.
      captions: (B, L, D) in the store's dtype, padded with zeros to the longest, or None.
      caption_lengths: (B,) int64 valid tokens, or None.
      records: (B,) int64 positions in the records table.
      bucket: "HxW" in pixels.
      epoch, index: the batch's place in the plan.
    """

    latents: torch.Tensor
    labels: torch.Tensor
    captions: torch.Tensor | None
    caption_lengths: torch.Tensor | None
    records: torch.Tensor
    bucket: str
    epoch: int
    index: int

    def __len__(self) -> int:
        return len(self.latents)

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory."""
        return self._map(lambda tensor: tensor.pin_memory())

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device, copied asynchronously from pinned memory."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def _map(self, move: Any) -> Batch:
        values = vars(self)
        return Batch(**{k: move(v) if isinstance(v, torch.Tensor) else v for k, v in values.items()})


class BatchStream(IterableDataset):
    """The batches of a plan, from where the state stands to the end of its epoch; iterate again for the next epoch.

    Args:
      store: an open store.
      plan: which records when.
      prefetch: batches read ahead, each by one thread.
      pin: hand out page-locked memory, for a copy to the GPU that does not wait.
    """

    def __init__(self, store: LatentStore, plan: BatchPlan, *, prefetch: int = 2, pin: bool = False) -> None:
        self._store, self._plan, self._prefetch, self._pin = store, plan, prefetch, pin
        self._epoch, self._index = 0, 0

    @property
    def num_batches(self) -> int:
        """Batches of an epoch."""
        return self._plan.batches_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        epoch, ahead = self._epoch, deque[Future[Batch]]()
        with ThreadPoolExecutor(self._prefetch, thread_name_prefix="leandit-read") as pool:
            try:
                for index in range(self._index, self.num_batches):
                    ahead.append(pool.submit(self.read, epoch, index))
                    if len(ahead) > self._prefetch:
                        yield self._deliver(ahead.popleft())
                while ahead:
                    yield self._deliver(ahead.popleft())
            finally:
                for future in ahead:
                    future.cancel()

    def _deliver(self, future: Future[Batch]) -> Batch:
        """Wait for a batch and move the position past it, so that the state counts only what was handed out."""
        batch = future.result()
        last = batch.index + 1 == self.num_batches
        self._epoch, self._index = (batch.epoch + 1, 0) if last else (batch.epoch, batch.index + 1)
        return batch

    def read(self, epoch: int, index: int) -> Batch:
        """Read one batch of the plan; the result depends on nothing else."""
        store, seed = self._store, self._plan.seed
        planned = self._plan.batch(epoch, index)
        bucket = store.index(planned.bucket)
        rows, records = bucket.rows[planned.positions], bucket.records[planned.positions]
        stored = store.latents(planned.bucket).take(rows)
        if store.spec.latent.flip:
            both = np.full(len(records), 2)
            flip = keyed_choice(both, seed=seed, epoch=epoch, records=records, purpose=PURPOSE_FLIP) == 1
            stored[flip] = store.flipped_latents(planned.bucket).take(rows[flip])
        latents = final_latents(stored, store.spec.latent, seed=seed, epoch=epoch, records=records)
        captions = lengths = None
        if store.spec.text:
            starts = bucket.caption_starts[planned.positions]
            choices = bucket.caption_starts[planned.positions + 1] - starts
            which = keyed_choice(choices, seed=seed, epoch=epoch, records=records, purpose=PURPOSE_CAPTION)
            captions, lengths = pad_captions(store, bucket.caption_ids[starts + which])
        batch = Batch(
            latents=torch.from_numpy(latents),
            labels=torch.from_numpy(bucket.labels[planned.positions]),
            captions=captions,
            caption_lengths=lengths,
            records=torch.from_numpy(records),
            bucket=planned.bucket,
            epoch=epoch,
            index=index,
        )
        return batch.pin_memory() if self._pin else batch

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, and what must not have changed when it goes on."""
        return {
            "version": STATE_VERSION,
            "root_hash": self._store.root_hash,
            "buckets": dict(self._plan.buckets),  # while a store is incomplete it has no root hash, but it grows
            "seed": self._plan.seed,
            "global_batch": self._plan.global_batch,
            "epoch": self._epoch,
            "index": self._index,
        }

    def load_state_dict(self, state: dict[str, Any], earlier: Collection[str | None] = ()) -> None:
        """Go on from a state.

        Args:
          earlier: root hashes of what was read before; a state of one of these begins the next pass, over this store.
        Raises: RunError: the store, the seed or the batch size is another, or there is no such place.
        """
        here = self.state_dict()
        moved = state.get("root_hash") != here["root_hash"] and state.get("root_hash") in earlier
        fixed = ("version", "seed", "global_batch", *(() if moved else ("root_hash", "buckets")))
        for name in fixed:
            if state.get(name) != here[name]:
                raise RunError(
                    f"loader state: {name} was {state.get(name)!r}, here it is {here[name]!r}, so the order of records "
                    "would be another. Resume with the same store and recipe, or start a new run."
                )
        epoch, index = state.get("epoch"), state.get("index")
        if not (isinstance(epoch, int) and isinstance(index, int) and min(epoch, index) >= 0):
            raise RunError(f"loader state: epoch {epoch!r}, batch {index!r}: needed two counts. Start a new run.")
        if moved:
            epoch, index = (epoch + 1, 0) if index else (epoch, 0)
        elif index >= self.num_batches:
            raise RunError(
                f"loader state: batch {index} of an epoch that has {self.num_batches}. Start a new run, or restore an "
                "older checkpoint."
            )
        self._epoch, self._index = epoch, index


def pad_captions(store: LatentStore, caption_ids: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather caption embeddings, padded with zeros to the longest.

    Returns: (B, L, D) in the store's dtype and (B,) int64 lengths.
    """
    assert store.spec.text is not None
    lengths = store.caption_lengths[caption_ids]
    padded = np.zeros((len(caption_ids), int(lengths.max()), store.spec.text.width), store.spec.text.dtype)
    for i, caption_id in enumerate(caption_ids):
        padded[i, : lengths[i]] = store.caption_embedding(int(caption_id))
    return torch.from_numpy(padded), torch.from_numpy(lengths.astype(np.int64))


class BatchLoader(StatefulDataLoader):
    """``StatefulDataLoader`` over a ``BatchStream``; its length is the number of batches of an epoch.

    torchdata's own length, of an iterable dataset, warns after a resume, because it counts on from the state.
    """

    dataset: BatchStream

    def __len__(self) -> int:
        return self.dataset.num_batches


def make_loader(
    store: LatentStore, *, global_batch: int, seed: int = 0, prefetch: int = 2, pin: bool = False
) -> BatchLoader:
    """Loader over a store: each pass is one epoch, ``state_dict()`` resumes at any batch.

    Args:
      store: an open store.
      global_batch: records in a full batch.
      seed: of the order, the posterior draw, and the choice of caption and flip.
      prefetch: batches read ahead.
      pin: hand out page-locked memory.
    Raises: RunError: the store has no records.
    """
    plan = BatchPlan(store.buckets, global_batch, seed)
    if not plan.num_records:
        raise RunError(f"store '{store.path}': it holds no records, so there is nothing to train on.")
    stream = BatchStream(store, plan, prefetch=prefetch, pin=pin)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata 0.11 calls it, torch 2.13 warns
        return BatchLoader(stream, batch_size=None, num_workers=0, collate_fn=_as_it_is)


def _as_it_is(batch: Any) -> Any:
    return batch
