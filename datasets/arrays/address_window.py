"""Maps many shard files into one address range, so that a batch with rows of all of them is one gather.

Files are mapped at equal distances, a multiple of both the row size and the page size. All rows are then rows of one
array, with gaps between the shards that must not be read: ``sharded_array.py`` checks every row number.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import os
import sys
import weakref
from typing import Any

import numpy as np

PROT_NONE = 0
MAP_FIXED = 0x10  # the same on Linux and macOS
MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0x40
MAP_FAILED = ctypes.c_void_p(-1).value
MAX_WINDOW_BYTES = 1 << 45  # of the 2^47 that a process has
DEFAULT_MAX_MAPS = 65530  # Linux: vm.max_map_count

# Slots of each window by its address. Single operations of a dict need no lock, which a fork could inherit locked.
_slots: dict[int, int] = {}


class AddressWindow:
    """Slots of equal size in one address range; a file is mapped into its slot when it is first needed.

    Args:
      num_slots: number of files.
      row_bytes: size of a row; the rows of all slots form one grid.
      shard_bytes: size of the rows of a full shard; the index that follows them in the file is not mapped.
    Raises: OSError: the range is too large, or the process has mapped too many files.
    """

    def __init__(self, num_slots: int, row_bytes: int, shard_bytes: int) -> None:
        grid = math.lcm(row_bytes, mmap.PAGESIZE)
        self.slot_bytes = -(-shard_bytes // grid) * grid
        self.slot_rows = self.slot_bytes // row_bytes
        total, left = num_slots * self.slot_bytes, max_maps() - sum(list(_slots.values()))
        if total > MAX_WINDOW_BYTES:
            raise OSError(f"{num_slots} files of {self.slot_bytes} bytes do not fit into one address range")
        if num_slots > left:
            raise OSError(f"cannot map {num_slots} more files, the limit allows {left}")
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self._address = _map(None, total, PROT_NONE, flags, -1)
        _slots[self._address] = num_slots
        # The range lives as long as any view of it, even during interpreter shutdown.
        memory = (ctypes.c_ubyte * total).from_address(self._address)
        weakref.finalize(memory, _unmap, self._address, total).atexit = False
        self.bytes = np.frombuffer(memoryview(memory).toreadonly(), np.uint8)

    def map_file(self, slot: int, file: int, size: int) -> None:
        """Map a file into its slot, read-only.

        Args:
          file: descriptor; it may be closed afterwards.
          size: bytes from the beginning of the file, at most those of a slot.
        Raises: OSError: the process has too many maps.
        """
        assert 0 < size <= self.slot_bytes
        address = self._address + slot * self.slot_bytes
        _map(address, size, mmap.PROT_READ, mmap.MAP_SHARED | MAP_FIXED, file)


@functools.cache
def max_maps() -> int:
    """The most files that a process should map: half of the system's limit."""
    try:
        with open("/proc/sys/vm/max_map_count") as file:
            return int(file.read()) // 2
    except (OSError, ValueError):
        return DEFAULT_MAX_MAPS // 2


def _map(address: int | None, length: int, protection: int, flags: int, file: int) -> int:
    mapped = _libc().mmap(address, length, protection, flags, file, 0)
    if mapped == MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"mmap of {length} bytes: {os.strerror(number)}")
    return mapped


def _unmap(address: int, length: int) -> None:
    del _slots[address]  # first: the next window may get the same address
    _libc().munmap(address, length)


@functools.cache
def _libc() -> Any:
    """The C library of this process; the module ``mmap`` cannot choose the address of a map.

    Raises: OSError: there is none, as on Windows.
    """
    if sys.platform == "win32":
        raise OSError("this system has no mmap")
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    int_types = [ctypes.c_int] * 3
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *int_types, ctypes.c_int64]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return library
