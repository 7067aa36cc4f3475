"""Which file system a folder lies on, and so how files in it are read: by memory map, or by ``pread``.

A file of a network file system can vanish, or its server, while it is mapped. The next read of the map then ends the
process with SIGBUS, which no program can handle well; a failed ``pread`` is an error with a name. Maps also read such
files page by page, with a round trip for each.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

Access = Literal["auto", "map", "pread"]
"""How the shards of a store are read; "auto": by the file system that they lie on."""

# The magic numbers that statfs(2) gives as f_type, from the Linux kernel's magic.h and the sources of the file systems.
NETWORK_FILE_SYSTEMS = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB2",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x00C36400: "Ceph",
    0x65735546: "FUSE",
    0x01021997: "9p",
    0x5346414F: "AFS",
    0x19830326: "BeeGFS",
    0x20030528: "OrangeFS",
    0xAAD7AAEA: "PanFS",
    0x786F4256: "vboxsf",
}
LOCAL_FILE_SYSTEMS = {
    0xEF53: "ext4",
    0x58465342: "XFS",
    0x9123683E: "Btrfs",
    0x2FC12FC1: "ZFS",
    0x01021994: "tmpfs",
    0x794C7630: "overlayfs",
    0xF2F52010: "F2FS",
}
STATFS_BYTES = 512  # more than any system's struct statfs


class ChosenAccess(NamedTuple):
    """How files are read, and why.

    Args:
      mode: "map" or "pread".
      reason: why, such as "NFS", for a message.
    """

    mode: Literal["map", "pread"]
    reason: str

    def __str__(self) -> str:
        return f"{'mapped' if self.mode == 'map' else 'read by pread'} ({self.reason})"


def choose_access(folders: Sequence[Path], access: Access) -> ChosenAccess:
    """How the files in some folders are read.

    Args:
      folders: folders of the files; those that do not exist do not count.
      access: "auto": by ``pread`` if one of the folders lies on a network file system, else mapped.
    """
    if access != "auto":
        return ChosenAccess(access, "as asked")
    numbers = [number for number in map(file_system_number, folders) if number is not None]
    for number in numbers:
        if number in NETWORK_FILE_SYSTEMS:
            return ChosenAccess("pread", NETWORK_FILE_SYSTEMS[number])
    if not numbers:
        return ChosenAccess("map", "unknown file system")
    return ChosenAccess("map", LOCAL_FILE_SYSTEMS.get(numbers[0], f"file system {numbers[0]:#x}"))


def file_system_number(path: Path) -> int | None:
    """The magic number of the file system of a file or folder; None if this system does not tell, or nothing is there.

    Source: statfs(2); ``os.statvfs`` has no such field.
    """
    statfs = _statfs()
    if statfs is None:
        return None
    answer = ctypes.create_string_buffer(STATFS_BYTES)
    if statfs(os.fsencode(path), answer) != 0:
        return None
    width = ctypes.sizeof(ctypes.c_long)  # f_type is the first field
    return int.from_bytes(answer.raw[:width], sys.byteorder) & 0xFFFFFFFF  # a negative one is sign-extended


@functools.cache
def _statfs() -> ctypes._NamedFuncPointer | None:
    """``statfs`` of the C library; None where f_type is not its first field, as on macOS."""
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None, use_errno=True), "statfs", None)
