"""The loader and a GPU whose streams do everything as late as they may: no batch is torn, none is used too early."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from noise_store import make_store
from torchdata.stateful_dataloader import StatefulDataLoader

from leandit.datasets.batches.batch import Batch
from leandit.datasets.batches.latents import final_latents
from leandit.datasets.batches.stream import BatchStream
from leandit.datasets.loader import make_loader
from leandit.datasets.store import LatentStore

BATCHES = 40
Work = Callable[[], Any]


class LateStream(list[Work]):
    """Work in its order, which nobody has waited for yet."""

    def __init__(self, device: Any = None) -> None:
        super().__init__()
        self.done, self._lock = 0, threading.RLock()

    def run_to(self, end: int) -> None:
        with self._lock:
            for work in self[self.done : end]:
                work()
            self.done = max(self.done, end)


class LateEvent:
    """The end of what a stream had to do when it was recorded."""

    def record(self, stream: LateStream) -> None:
        self._stream, self._end = stream, len(stream)

    def query(self) -> bool:
        return self._stream.done >= self._end

    def synchronize(self) -> None:
        self._stream.run_to(self._end)


class LateGpu:
    """What the loader uses of torch for a GPU; copies are noted: pinned, asynchronous, beside ``compute``."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.compute, self.copies, self.kept = LateStream(), list[tuple[bool, bool, bool]](), dict[int, LateStream]()
        self._pinned: list[range] = []
        self._local = threading.local()
        self._to, self._empty = torch.Tensor.to, torch.empty
        like = {"Stream": LateStream, "Event": LateEvent, "stream": self._chosen, "current_stream": self.current}
        for name, stand_in in (like | {"is_available": lambda: True}).items():
            patch.setattr(torch.cuda, name, stand_in)
        patch.setattr(torch, "empty", self._allocate)
        patch.setattr(torch.Tensor, "to", lambda tensor, *args, **how: self._copy(tensor, *args, **how))
        patch.setattr(torch.Tensor, "is_pinned", lambda tensor: self._is_pinned(tensor))
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self._keep(tensor, stream))
        patch.setattr(Batch, "finish", lambda batch: self._finish(batch))

    def current(self, device: Any = None) -> LateStream:
        return getattr(self._local, "stream", self.compute)

    @contextlib.contextmanager
    def _chosen(self, stream: LateStream) -> Iterator[None]:
        before, self._local.stream = self.current(), stream
        yield
        self._local.stream = before

    def _allocate(self, *size: Any, pin_memory: bool = False, **how: Any) -> torch.Tensor:
        made = self._empty(*size, **how)
        if pin_memory:
            self._pinned.append(range(made.data_ptr(), made.data_ptr() + made.nbytes))
        return made

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return any(tensor.data_ptr() in place for place in self._pinned)

    def _copy(self, tensor: torch.Tensor, *args: Any, non_blocking: bool = False, **how: Any) -> torch.Tensor:
        if torch.device("cuda") not in args:
            return self._to(tensor, *args, **how)
        on_gpu = torch.full_like(tensor, 99)  # what nobody must see
        is_pinned = self._is_pinned(tensor)
        self.copies.append((is_pinned, non_blocking, self.current() is not self.compute))
        if is_pinned:  # of its memory, whatever lies in it by then
            assert tensor.is_contiguous()
            address, nbytes = tensor.data_ptr(), tensor.nbytes
            self.current().append(lambda: _copy_memory(on_gpu, address, nbytes))
        else:
            on_gpu.copy_(tensor)  # CUDA stages it before the call returns
        return on_gpu

    def _keep(self, tensor: torch.Tensor, stream: LateStream) -> None:
        self.kept[tensor.data_ptr()] = stream

    def _finish(self, batch: Batch) -> Batch:
        latents = torch.full_like(batch.stored[:, : batch.spec.channels], 99, dtype=torch.float32)
        vars(batch)["latents"] = latents
        self.current().append(lambda: latents.copy_(final_latents(batch.stored, batch.spec, batch.draw_keys)))
        return batch


def _copy_memory(target: torch.Tensor, address: int, nbytes: int) -> None:
    """As a device reads memory: without a reference to it, so that nothing keeps it from being used again."""
    ctypes.memmove(target.data_ptr(), address, nbytes)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> LatentStore:
    folder = tmp_path_factory.mktemp("late") / "store"
    make_store(folder, {"64x64": 40, "48x80": 30}, token_counts=[3, 9, 5], text_width=16, num_classes=5)
    return LatentStore(folder)


def tensors_of(batch: Batch) -> dict[str, torch.Tensor]:
    text = batch.text
    assert text is not None
    found = {name: getattr(batch, name) for name in ("stored", "latents", "labels", "records", "draw_keys")}
    found |= {"tokens": text.tokens, "offsets": text.offsets, "scales": text.scales}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def torn(plain: StatefulDataLoader, loader: StatefulDataLoader, gpu: LateGpu) -> list[tuple[int, str]]:
    """Tensors of the GPU's batches that differ from the CPU's at the moment when they are handed out."""
    different = []
    for number, (wanted, batch) in enumerate(zip(islice(epochs(plain), BATCHES), epochs(loader), strict=False)):
        wanted, found = tensors_of(wanted), tensors_of(batch)
        assert wanted.keys() == found.keys()
        different += [(number, name) for name in wanted if not torch.equal(wanted[name], found[name])]
        assert all(gpu.kept.get(tensor.data_ptr()) is gpu.compute for tensor in found.values())
        gpu.kept.clear()
    return different


def epochs(loader: StatefulDataLoader) -> Iterator[Batch]:
    while True:
        yield from loader


@pytest.mark.parametrize("prefetch", [0, 4])
def test_no_batch_is_torn_or_handed_out_before_its_copy(
    prefetch: int, store: LatentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make_loader(store, global_batch=4, prefetch=prefetch)
    gpu = LateGpu(monkeypatch)
    loader = make_loader(store, global_batch=4, prefetch=prefetch, device="cuda")
    assert torn(plain, loader, gpu) == []
    pinned, asynchronous, beside = (sum(column) for column in zip(*gpu.copies, strict=True))
    assert pinned >= 2 * BATCHES  # latents and captions at least
    assert asynchronous == beside == len(gpu.copies)
    assert isinstance(loader.dataset, BatchStream)
    loader.dataset.close()
