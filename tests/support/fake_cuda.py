"""A GPU of fake tensors: steps go up to their loss, take gradients of zeros, and update, without bytes."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from leandit.train.parallel.engine import Engine

CUDA = torch.device("cuda:0")
aten: Any = torch.ops.aten
# Their results have a size that only the device knows, or are numbers of Python.
WAITS = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.repeat_interleave, aten._unique2}
WAITS |= {aten.unique_dim, aten.unique_consecutive, aten.equal, aten.is_nonzero, aten.bincount}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
COPIES = {aten._to_copy, aten.copy_, aten.copy, aten.lift_fresh_copy}


def clear_caches() -> None:
    """Clear every ``functools`` cache of leandit and of torchao, whose 8-bit numbers are a cached table.

    Before and after steps on fake tensors: cached tables must be made anew, and no fake one may stay.
    """
    kind = type(functools.lru_cache(lambda: None))
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] in ("leandit", "torchao")]
    for cached in {value for module in modules for value in vars(module).values() if isinstance(value, kind)}:
        cached.cache_clear()


class HostWaitError(AssertionError):
    """An operation for which the host would wait for the device."""


class RefuseWaits(TorchDispatchMode):
    """Raises where an operation would make the host wait, or reads memory of the host; "cpu": operations alone."""

    def __init__(self, device_type: str = "cuda") -> None:
        super().__init__()
        self._type = device_type

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet, kwargs = func.overloadpacket, kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_device = [one for one in given if one.device.type == self._type]
        if packet in WAITS and on_device and not (packet is aten.repeat_interleave and "self_int" in str(func)):
            raise HostWaitError(f"{func}")
        if packet in INDEXING and on_device:
            indices = [index for index in args[1] if index is not None]
            if any(index.dtype in (torch.bool, torch.uint8) or index.device.type != self._type for index in indices):
                raise HostWaitError(f"{func} by {[(index.dtype, index.device) for index in indices]}")
        result = func(*args, **kwargs)
        if self._type != "cpu":
            said = kwargs.get("non_blocking", args[-1] if packet is aten.copy_ else False)
            self._check_copy(func, given, result, non_blocking=said is True)
        return result

    def _check_copy(self, func: Any, given: Sequence[Tensor], result: Any, *, non_blocking: bool) -> None:
        """Between devices only as ``non_blocking``, and only to the GPU; other operations have numbers of the host."""
        places = {(one.device.type, one.ndim == 0) for one in [*given, *(r for r in [result] if isinstance(r, Tensor))]}
        types = {kind for kind, _ in places}
        if func.overloadpacket in COPIES and len(types) == 2:
            source = given[1] if func.overloadpacket is aten.copy_ else given[0]
            if source.device.type != "cpu" or not non_blocking:
                raise HostWaitError(f"{func}: a copy from {source.device} that the host waits for")
        elif len(types) == 2 and ("cpu", False) in places:
            raise HostWaitError(f"{func}: a tensor of the host beside those of the device")


@contextlib.contextmanager
def fake_cuda(patch: pytest.MonkeyPatch, *, capability: tuple[int, int] = (9, 0)) -> Iterator[FakeTensorMode]:
    """Tensors on "cuda:0" can be made, all are fake; ``patch`` is undone by the caller, at once after the context."""
    _ensure_guard()
    generator = torch.Generator

    class FakeGenerator(generator):
        device = CUDA

    make = torch.tensor

    def tensor(data: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
        made = make(data, dtype=dtype)
        return made if device is None else made.to(device)  # waits, as the real one does

    patch.setattr(torch, "Generator", lambda device=None: FakeGenerator())
    patch.setattr(torch, "tensor", tensor)
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    patch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    patch.setattr(torch.cuda, "set_device", lambda device: None)
    patch.setattr(FakeTensorMode, "avoid_device_init", True)
    patch.setattr(nn.Module, "to", _moved)
    clear_caches()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            yield mode
    finally:
        clear_caches()


def gradients_of_zeros(patch: pytest.MonkeyPatch) -> None:
    """Replace the backward pass."""

    def backward(self: Engine, loss: Tensor) -> None:
        assert (loss.ndim, loss.dtype, loss.device.type) == (0, torch.float32, CUDA.type)
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)

    patch.setattr(Engine, "backward", backward)


def _moved(module: nn.Module, device: torch.device) -> nn.Module:
    """As ``nn.Module.to``, which cannot move fake tensors: with new tensors."""
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None:
                moved = torch.empty_like(parameter, device=device)
                each._parameters[name] = nn.Parameter(moved, requires_grad=parameter.requires_grad)
        for name, buffer in each._buffers.items():
            each._buffers[name] = None if buffer is None else torch.empty_like(buffer, device=device)
    return module


def _ensure_guard() -> None:
    """torch gives fake tensors of CUDA a guard that does nothing, but only where it was built with CUDA.

    It takes a guard without devices, as that of the lazy backend is, for such a build.
    """
    if torch.backends.cuda.is_built():
        return
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    cuda, lazy = 1, 17  # c10::DeviceType
    guards = (ctypes.c_void_p * (lazy + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    if not guards[cuda]:
        guards[cuda] = guards[lazy]
        torch._C._ensureCUDADeviceGuardSet()  # pyright: ignore[reportAttributeAccessIssue]
