"""Counts the bytes of storages while operations run, under torch's fake tensors or real ones."""

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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CATEGORIES = PARAMETERS, GRADIENTS, OPTIMIZER, EMA, ACTIVATIONS = (
    "parameters",
    "gradients",
    "optimizer",
    "ema",
    "activations",
)
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


def _parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that one of a subclass (8-bit states, sharded ones) is made of."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
    return [part for name in names for part in _parts(getattr(tensor, name))]
