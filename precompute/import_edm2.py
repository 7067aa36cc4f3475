"""EDM2's dataset of latents: a ZIP of stored .npy members, or its folder, with labels in ``dataset.json``.

Members are read by their place in the file, so the directory of a million members is not kept. Nothing is unpacked to
disk, so a member's name is a key and never a path.
"""

from __future__ import annotations

import json
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..datasets.errors import RecordRejected, SourceError
from .import_arrays import MAX_ARRAY_BYTES, MAX_HEADER, checksum, npy_header, open_regular, parse_npy
from .import_source import Entry, Facts, Features, Labelled, Seen, files_below, inner_path, rejecting, size_of
from .source_record import usable_key

RAW_MEAN = (5.81, 3.25, 0.12, -2.15)  # of latents of pictures from 0 to 1, as EDM2's StabilityVAEEncoder has them
RAW_STD = (4.17, 4.62, 3.71, 3.28)
FINAL_STD = 0.5
EDM2 = Facts(
    latent="mean_std",
    is_scaled=False,
    vae="stabilityai/sd-vae-ft-mse",
    downscale=8,
    shift=RAW_MEAN,
    scale=tuple(FINAL_STD / std for std in RAW_STD),
    zero_to_one=True,
)
DESCRIPTION = "dataset.json"
MAX_DESCRIPTION = 1 << 30
LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")  # APPNOTE 6.3.10, section 4.3.7
HAS_DESCRIPTOR = 1 << 3  # of its flags: the CRC stands behind the data


class Edm2(Labelled):
    """``NAME.npy`` members (2C, H, W), mean then standard deviation, and ``{"labels": [[NAME.npy, LABEL], ...]}``.

    Raises: SourceError: it is neither a ZIP nor a folder, or its description is none.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root, EDM2)
        self._odd: dict[str, str] = {}
        self._streamed: dict[int, int] = {}  # CRC of members whose own header has none
        if not (root.is_dir() or root.is_file()):
            raise SourceError(
                f"source '{root}': no such file or folder. An import of 'edm2' needs a .zip, or its folder."
            )
        self._zip = None if root.is_dir() else os.open(root, os.O_RDONLY)
        try:
            self._labels = _labels(self._description())
        except (OSError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
            raise SourceError(f"source '{root}': '{DESCRIPTION}' cannot be read ({error}).") from error
        self.has_labels = bool(self._labels)

    def _description(self) -> Any:
        """What the source says of itself; nothing where it does not.

        Raises: OSError, ValueError, BadZipFile.
        """
        if self._zip is None:
            path = self.root / DESCRIPTION
            if not os.path.lexists(path):
                return {}
            with open_regular(path) as file:
                return json.loads(file.read(MAX_DESCRIPTION))
        with zipfile.ZipFile(self.root) as packed:
            if DESCRIPTION not in packed.namelist():
                return {}
            if packed.getinfo(DESCRIPTION).file_size > MAX_DESCRIPTION:
                raise ValueError(f"it claims more than {MAX_DESCRIPTION} bytes")
            with packed.open(DESCRIPTION) as member:
                return json.loads(member.read(MAX_DESCRIPTION))

    def entries(self) -> Iterator[Entry]:
        """Members in the order of their names, then what has a label only: each of it is a reject."""
        seen = set()
        for entry in self._members():
            seen.add(entry.path)
            yield entry
        for said in sorted(self._labels.keys() - seen):
            name, problem = usable_key(said)  # what others wrote there may be no name
            self._odd[name] = problem[1] if problem else f"it has a label in '{DESCRIPTION}', but is not there"
            yield Entry(name.removesuffix(".npy"), name)

    def _members(self) -> Iterator[Entry]:
        if self._zip is None:
            for path in sorted(files_below(self.root, ".npy")):
                name = path.relative_to(self.root).as_posix()
                yield Entry(name.removesuffix(".npy"), name, 0, size_of(self.root, name))
            return
        with zipfile.ZipFile(self.root) as packed:
            members = sorted((info for info in packed.infolist() if info.filename.endswith(".npy")), key=_by_name)
        for info in members:
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.file_size != info.compress_size:
                self._odd[info.filename] = "it is compressed or encrypted; EDM2 stores its members as they are"
            if info.flag_bits & HAS_DESCRIPTOR:
                self._streamed[info.header_offset] = info.CRC
            yield Entry(info.filename.removesuffix(".npy"), info.filename, info.header_offset, info.file_size)

    def look(self, entry: Entry) -> Seen:
        """By its header."""
        inner_path(entry.path)
        if why := self._odd.get(entry.path):
            raise RecordRejected("scan", "unreadable", f"{entry.path}: {why}")
        with rejecting(entry.path):
            shape, dtype, _, _ = npy_header(self._bytes(entry, MAX_HEADER), self._size(entry))
        if self.has_labels and entry.path not in self._labels:
            raise RecordRejected("scan", "no_label", f"'{DESCRIPTION}' has no label of {entry.path}")
        return Seen(shape, dtype.newbyteorder("=").name, label=self._labels.get(entry.path, -1))

    def read(self, entry: Entry) -> Features:
        """Mean and standard deviation."""
        with rejecting(entry.path):
            content = self._bytes(entry, MAX_ARRAY_BYTES)
            array = parse_npy(content)
        return Features([array], checksum(content))

    def _size(self, entry: Entry) -> int:
        return entry.num_bytes if self._zip is not None else (self.root / entry.path).stat().st_size

    def _bytes(self, entry: Entry, limit: int) -> bytes:
        """The first bytes of a member; of one that is read whole, the CRC is checked.

        Raises: OSError, ValueError.
        """
        if self._zip is None:
            with open_regular(self.root / entry.path) as file:
                return file.read(limit)
        head = os.pread(self._zip, LOCAL_HEADER.size, entry.offset)
        if len(head) < LOCAL_HEADER.size or not head.startswith(b"PK\x03\x04"):
            raise ValueError("there is no member where the directory says")
        _, _, _, _, _, _, crc, _, _, name_bytes, extra_bytes = LOCAL_HEADER.unpack(head)
        crc = self._streamed.get(entry.offset, crc)
        start = entry.offset + LOCAL_HEADER.size + name_bytes + extra_bytes
        content = os.pread(self._zip, min(limit, entry.num_bytes), start)
        if limit >= entry.num_bytes and zlib.crc32(content) != crc:
            raise ValueError("its CRC is not that of its bytes")
        return content


def _labels(description: Any) -> dict[str, int]:
    """Label of each member.

    Raises: ValueError: they are no class numbers.
    """
    labels = description.get("labels") if isinstance(description, dict) else None
    try:
        found = {str(name): label for name, label in labels or ()}
    except (TypeError, ValueError) as error:
        raise ValueError("its labels are no list of [name, label]") from error
    if wrong := [name for name, label in found.items() if type(label) is not int]:
        raise ValueError(f"the label of {wrong[0][:100]!r} is no class number")
    return found


def _by_name(info: zipfile.ZipInfo) -> str:
    return info.filename
