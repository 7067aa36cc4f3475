"""Counts the bytes of live storages while operations run, on fake or real tensors."""

from __future__ import annotations

import functools
import math
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CATEGORIES = PARAMETERS, GRADIENTS, OPTIMIZER, EMA, ACTIVATIONS = (
    "parameters",
    "gradients",
    "optimizer",
    "ema",
    "activations",
)
STATES = CATEGORIES[:-1]


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes of every storage from its allocation until it is freed.

    Args:
      round_to: each storage counts as a multiple of this many bytes.
    """

    def __init__(self, round_to: int = 1) -> None:
        super().__init__()
        self.live: Counter[str] = Counter()
        self.moments: list[tuple[int, ...]] = []  # bytes of each category after each allocation
        self._round_to = round_to
        self._known: dict[int, tuple[Any, str, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # its inner tensors are dispatched, and counted
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 0  # an optimizer that is not fused reads found_inf
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._record(leaf)
        return result

    def assign(self, category: str, tensors: Iterable[Tensor]) -> None:
        """Set the category of some tensors; all others are activations."""
        for tensor in tensors:
            for part in _parts(tensor):
                storage = part.untyped_storage()
                if id(storage) not in self._known:
                    self._record(part)
                reference, previous, num_bytes = self._known[id(storage)]
                self.live[previous] -= num_bytes
                self.live[category] += num_bytes
                self._known[id(storage)] = (reference, category, num_bytes)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage again whose size has changed."""
        if known := self._known.get(id(storage)):
            reference, category, previous = known
            num_bytes = self._rounded(storage)
            self._known[id(storage)] = (reference, category, num_bytes)
            self.live[category] += num_bytes - previous
            self._note()

    def _rounded(self, storage: torch.UntypedStorage) -> int:
        return math.ceil(storage.nbytes() / self._round_to) * self._round_to

    def _note(self) -> None:
        self.moments.append(tuple(self.live[name] for name in CATEGORIES))

    def _record(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._known:
            return
        num_bytes = self._rounded(storage)
        reference = weakref.ref(storage, functools.partial(self._freed, key))
        self._known[key] = (reference, ACTIVATIONS, num_bytes)
        self.live[ACTIVATIONS] += num_bytes
        self._note()

    def _freed(self, key: int, _: Any) -> None:
        _, category, num_bytes = self._known.pop(key)
        self.live[category] -= num_bytes


class HostCounter:
    """Counts saved tensors as if host memory held them; backward allocates each on the device again."""

    def __init__(self) -> None:
        self.peak = self._live = 0

    def reset(self) -> None:
        """Begin a step: what is saved and never read again is gone."""
        self.peak = self._live = 0

    def hooks(self) -> saved_tensors_hooks:
        """Replaces ``save_on_cpu``."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
        self._live += tensor.nbytes
        self.peak = max(self.peak, self._live)
        return tensor.size(), tensor.dtype, tensor.device

    def _unpack(self, packed: tuple[torch.Size, torch.dtype, torch.device]) -> Tensor:
        size, dtype, device = packed
        tensor = torch.empty(size, dtype=dtype, device=device)
        self._live -= tensor.nbytes
        return tensor


def _parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors inside a tensor subclass (8-bit states, sharded tensors)."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
    inner = [getattr(tensor, name) for name in names]  # a sharded tensor names its mesh too
    return [part for one in inner if isinstance(one, Tensor) for part in _parts(one)]
