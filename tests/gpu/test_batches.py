"""Batches on a GPU that is busy: none is torn, and reading them makes nobody wait but the thread that reads."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from noise_store import make_store

from leandit.datasets.batches.batch import Batch
from leandit.datasets.loader import make_loader
from leandit.datasets.store import LatentStore
from leandit.train.run.data import endless

BATCHES, AHEAD = 60, 4
BUSY_CYCLES = 20_000_000  # about ten milliseconds of a GPU


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> LatentStore:
    """Batches of about 2 MiB in two buckets, with captions of many lengths in int8."""
    folder = tmp_path_factory.mktemp("batches") / "store"
    make_store(
        folder,
        {"256x256": 300, "192x320": 200},
        token_counts=[3, 40, 17, 120],
        text_width=64,
        text_dtype="int8",
        num_classes=7,
    )
    return LatentStore(folder)


def tensors_of(batch: Batch) -> list[torch.Tensor]:
    text = batch.text
    assert text is not None
    found = [batch.stored, batch.latents, batch.labels, batch.records, text.tokens, text.scales, text.offsets]
    return [one for one in found if one is not None]


@pytest.mark.parametrize("prefetch", [0, AHEAD])
def test_batches_have_the_bits_of_a_cpus_while_the_gpu_is_busy(
    prefetch: int, store: LatentStore, device: torch.device
) -> None:
    here, there = (make_loader(store, global_batch=32, prefetch=prefetch, device=one) for one in (device, "cpu"))
    kept = []
    for batch in islice(endless(here), BATCHES):
        if device.type == "cuda":
            torch.cuda._sleep(BUSY_CYCLES)
        # What the step reads late: copies that come after the wait, of memory that may be given back before.
        kept.append([tensor.clone() for tensor in tensors_of(batch)])
        del batch
    for copies, batch in zip(kept, islice(endless(there), BATCHES), strict=True):
        for copied, wanted in zip(copies, tensors_of(batch), strict=True):
            assert torch.equal(copied.cpu(), wanted)


def test_taking_a_batch_does_not_wait_for_the_gpu(store: LatentStore, gpu: torch.device, no_waits: Any) -> None:
    loader = iter(endless(make_loader(store, global_batch=32, prefetch=AHEAD, device=gpu)))
    next(loader)
    sums = []
    with no_waits():
        for batch in islice(loader, 20):
            torch.cuda._sleep(BUSY_CYCLES)
            sums.append(batch.latents.sum())
    assert torch.stack(sums).isfinite().all()


def test_a_batch_that_is_moved_by_hand_may_be_dropped_at_once(store: LatentStore, gpu: torch.device) -> None:
    loader = make_loader(store, global_batch=32, prefetch=0, device=gpu)
    reader, moved = loader.dataset.reader, []
    for number in range(40):
        torch.cuda._sleep(BUSY_CYCLES)
        moved.append(reader[number].to(gpu).stored)
    for number, stored in enumerate(moved):
        assert torch.equal(stored.cpu(), reader[number].stored)


def test_memory_of_batches_is_page_locked(store: LatentStore, gpu: torch.device, tmp_path: Path) -> None:
    reader = make_loader(store, global_batch=8, device=gpu).dataset.reader
    assert reader[0].stored.is_pinned()
