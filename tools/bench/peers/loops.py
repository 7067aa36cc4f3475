"""How peers are driven: through torch's DataLoader, sample by sample or a batch at once, or in threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from ..harness.work import SCALES, Epochs, Planned, Served, Workload

ALIGNMENT = 64  # bytes of a cache line: numpy copies a fifth slower into unaligned memory
Sample = tuple[Any, int, Any] | tuple[Any, int, Any, dict[str, Any]]
"""An item of a map-style dataset: latent (C, H, W), label, text (L, D) or None, and what the workload has beside."""


class PlannedOrder:
    """Sampler that gives the batches of an epoch, either whole or as lists of (bucket, row)."""

    def __init__(self, workload: Workload, seed: int, *, whole: bool) -> None:
        self.epoch, self._workload, self._seed, self._whole = 0, workload, seed, whole

    def __iter__(self) -> Iterator[Any]:
        for planned in self._workload.plan(self.epoch, self._seed):
            yield planned if self._whole else [(planned.bucket, row) for row in planned.rows.tolist()]


def by_sample(dataset: Dataset, workload: Workload, seed: int, workers: int, start: str | None = None) -> Epochs:
    """A map-style dataset of samples, keyed by (bucket, row), behind a DataLoader.

    Args:
      start: start method of worker processes, as "spawn"; None for the platform's default.
    """
    order = PlannedOrder(workload, seed, whole=False)
    return _epochs(order, workers, start, dataset=dataset, batch_sampler=order, collate_fn=collate)


def by_batch(dataset: Dataset, workload: Workload, seed: int, workers: int, start: str | None = None) -> Epochs:
    """A dataset of whole batches, keyed by ``Planned``, behind a DataLoader."""
    order = PlannedOrder(workload, seed, whole=True)
    return _epochs(order, workers, start, dataset=dataset, sampler=order, batch_size=None, collate_fn=_as_it_is)


def _epochs(order: PlannedOrder, workers: int, start: str | None, **how: Any) -> Epochs:
    context = start if workers else None
    loader = DataLoader(num_workers=workers, persistent_workers=workers > 0, multiprocessing_context=context, **how)

    def epoch(number: int) -> Iterator[Served]:
        order.epoch = number
        return iter(loader)

    return epoch


def in_threads(read: Callable[[Planned], Served], workload: Workload, seed: int, threads: int) -> Epochs:
    """Whole batches, read in this thread, or ahead by a pool: one batch for each thread."""

    def epoch(number: int) -> Iterator[Served]:
        plan = workload.plan(number, seed)
        if not threads:
            yield from map(read, plan)
            return
        ahead: deque[Future[Served]] = deque()
        with ThreadPoolExecutor(threads) as pool:
            for planned in plan:
                ahead.append(pool.submit(read, planned))
                if len(ahead) > threads:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()

    return epoch


def collate(samples: list[Sample]) -> Served:
    """A batch of samples: latents stacked, text one after the other."""
    latents, labels = (
        default_collate([sample[0] for sample in samples]),
        torch.tensor([sample[1] for sample in samples]),
    )
    if samples[0][2] is None:
        return Served(latents, labels)
    texts = [torch.as_tensor(sample[2]) for sample in samples]
    beside = {}
    for name in _beside(samples[0]):
        arrays = [_beside(sample)[name] for sample in samples]
        beside[name] = torch.cat(arrays) if name == SCALES else torch.stack(arrays)
    return Served(latents, labels, torch.cat(texts), torch.tensor([len(text) for text in texts]), beside or None)


def _beside(sample: Sample) -> dict[str, Any]:
    return sample[3] if len(sample) == 4 else {}


def packed(latents: Any, labels: Any, texts: list[np.ndarray] | None) -> Served:
    """A batch from arrays: latents (B, C, H, W), labels (B,), and texts (L, D) where there are captions."""
    if texts is None:
        return Served(latents, labels)
    return Served(latents, labels, np.concatenate(texts), np.array([len(text) for text in texts]))


def aligned(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """An empty array that starts on a cache line."""
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


def _as_it_is(batch: Any) -> Any:
    return batch
