"""One range of addresses over many shard files, so that a batch from all of them is one gather.

Every file is mapped at the same distance from the one before, a multiple of the row and of the page. Rows of the store
are then rows of one array, with gaps between the shards that nobody may touch: ``sharded_array.py`` checks every row.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
import threading
import weakref
from typing import Any

import numpy as np

from ..disk.fork_safe import reset_in_forks

PROT_NONE = 0
MAP_FIXED = 0x10  # the same on Linux and macOS
MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0x40
MAP_FAILED = ctypes.c_void_p(-1).value
MAX_WINDOW_BYTES = 1 << 45  # of the 2^47 that a process has
DEFAULT_MAX_MAPS = 65530  # Linux: vm.max_map_count


class AddressWindow:
    """Slots of equal size in one range of addresses; a file is mapped into each when it is wanted.

    Args:
      num_slots: of files.
      row_bytes: of a row; rows of every slot lie on one grid.
      shard_bytes: of the rows of a full shard; what a file has behind them, its index, is not mapped.
    Raises: OSError: the system has no such range, or this process maps so many files already.
    """

    def __init__(self, num_slots: int, row_bytes: int, shard_bytes: int) -> None:
        grid = math.lcm(row_bytes, mmap.PAGESIZE)
        self.slot_bytes = -(-shard_bytes // grid) * grid
        self.slot_rows = self.slot_bytes // row_bytes
        total = num_slots * self.slot_bytes
        if total > MAX_WINDOW_BYTES:
            raise OSError(f"{num_slots} files of {self.slot_bytes} bytes do not fit into one range of addresses")
        _maps.take(num_slots)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        try:
            self._address = _map(None, total, PROT_NONE, flags, -1)
        except OSError:
            _maps.give_back(num_slots)
            raise
        # The range lives as long as any view of it, also while the process ends.
        memory = (ctypes.c_ubyte * total).from_address(self._address)
        weakref.finalize(memory, _unmap, self._address, total, num_slots).atexit = False
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


class _Maps:
    """How many more files this process may map."""

    def __init__(self, left: int) -> None:
        self.left = left
        self.reset()
        reset_in_forks(self)

    def reset(self) -> None:
        """Another lock."""
        self._lock = threading.RLock()  # a finalizer may run while it is held

    def take(self, count: int) -> None:
        """Raises: OSError: so many are not left."""
        with self._lock:
            if count > self.left:
                raise OSError(f"{count} more files are too many to be mapped at once")
            self.left -= count

    def give_back(self, count: int) -> None:
        """They are mapped no more."""
        with self._lock:
            self.left += count


def _max_maps() -> int:
    """How many files a process should map at most: half of what the system allows it."""
    try:
        with open("/proc/sys/vm/max_map_count") as file:
            return int(file.read()) // 2
    except (OSError, ValueError):
        return DEFAULT_MAX_MAPS // 2


def _map(address: int | None, length: int, protection: int, flags: int, file: int) -> int:
    found = _libc().mmap(address, length, protection, flags, file, 0)
    if found == MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"mmap of {length} bytes: {os.strerror(number)}")
    return found


def _unmap(address: int, length: int, num_slots: int) -> None:
    _libc().munmap(address, length)
    _maps.give_back(num_slots)


def _libc() -> Any:
    """The C library of this process; the module ``mmap`` cannot place a map.

    Raises: OSError: there is none, as on Windows.
    """
    global _library
    if _library is None:
        if sys.platform == "win32":
            raise OSError("this system has no mmap")
        library = ctypes.CDLL(None, use_errno=True)
        library.mmap.restype = ctypes.c_void_p
        library.mmap.argtypes = [
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_int64,
        ]
        library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        _library = library
    return _library


_library: Any = None
_maps = _Maps(_max_maps())
