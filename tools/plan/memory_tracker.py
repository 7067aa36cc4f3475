"""Counts the bytes of storages while operations run, under torch's fake tensors or real ones."""

from __future__ import annotations

import functools
import math
import sys
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
Cached = type(functools.lru_cache(lambda: None))
STATES = CATEGORIES[:-1]  # of a size that the microbatch does not change


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes of all storages that operations make, from birth to death.

    Args:
      round_to: bytes that each storage is rounded up to.
    """

    def __init__(self, round_to: int = 1) -> None:
        super().__init__()
        self.live: Counter[str] = Counter()
        self.moments: list[tuple[int, ...]] = []  # bytes of each category after each birth
        self._round_to = round_to
        self._known: dict[int, tuple[Any, str, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a tensor made of others does with them what it has to do, and that is counted
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 0  # what an optimizer that is not fused asks for: whether the update is left out
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        return result

    def assign(self, category: str, tensors: Iterable[Tensor]) -> None:
        """Say what some tensors are; what nobody has named is an activation."""
        for tensor in tensors:
            for part in _parts(tensor):
                storage = part.untyped_storage()
                if id(storage) not in self._known:
                    self._see(part)
                reference, before, num_bytes = self._known[id(storage)]
                self.live[before] -= num_bytes
                self.live[category] += num_bytes
                self._known[id(storage)] = (reference, category, num_bytes)

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._known:
            return
        num_bytes = math.ceil(storage.nbytes() / self._round_to) * self._round_to
        reference = weakref.ref(storage, functools.partial(self._die, key))
        self._known[key] = (reference, ACTIVATIONS, num_bytes)
        self.live[ACTIVATIONS] += num_bytes
        self.moments.append(tuple(self.live[name] for name in CATEGORIES))

    def _die(self, key: int, _: Any) -> None:
        _, category, num_bytes = self._known.pop(key)
        self.live[category] -= num_bytes


class HostCounter:
    """Counts what would wait in the host's memory from forward to backward. On the device it dies, and comes again."""

    def __init__(self) -> None:
        self.most = self._live = 0

    def hooks(self) -> saved_tensors_hooks:
        """In the place of ``save_on_cpu``."""
        return saved_tensors_hooks(self._take, self._give_back)

    def _take(self, tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
        self._live += tensor.nbytes
        self.most = max(self.most, self._live)
        return tensor.size(), tensor.dtype, tensor.device

    def _give_back(self, taken: tuple[torch.Size, torch.dtype, torch.device]) -> Tensor:
        size, dtype, device = taken
        tensor = torch.empty(size, dtype=dtype, device=device)
        self._live -= tensor.nbytes
        return tensor


def _parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that one of a subclass (8-bit states, sharded ones) is made of."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
    return [part for name in names for part in _parts(getattr(tensor, name))]


def clear_caches() -> None:
    """Empty every ``functools`` cache of this package: a table that is kept there must be neither fake afterwards, nor
    have been made before the tracker looked."""
    package = __name__.partition(".")[0]
    ours = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == package]
    for cached in {value for module in ours for value in vars(module).values() if isinstance(value, Cached)}:
        cached.cache_clear()
