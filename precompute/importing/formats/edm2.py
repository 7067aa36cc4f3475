"""EDM2's dataset of latents: a ZIP of stored .npy members, or its folder, with labels in ``dataset.json``.

Members are read by their offset, so the directory of a million members is not kept. Nothing is unpacked to disk: a
member's name is a key, never a path.
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

from ....datasets.errors import RecordRejected, SourceError
from ...sources.files.record import usable_key
from .recipe import ImportRecipe
from .source import Entry, FormatDefaults, Reader, RecordHeader, files_below, inner_path, rejecting
from .untrusted.arrays import MAX_ARRAY_BYTES, MAX_HEADER, look, look_npy, open_regular, read_file

RAW_MEAN = (5.81, 3.25, 0.12, -2.15)  # of latents of pictures from 0 to 1, as EDM2's StabilityVAEEncoder has them
RAW_STD = (4.17, 4.62, 3.71, 3.28)
FINAL_STD = 0.5
EDM2 = FormatDefaults(
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


class Edm2(Reader):
    """``NAME.npy`` members (2C, H, W), mean then standard deviation, and ``{"labels": [[NAME.npy, LABEL], ...]}``.

    Raises: SourceError: its description, or the directory of the ZIP, cannot be read.
    """

    kind, defaults = "edm2", EDM2

    def __init__(self, root: Path, recipe: ImportRecipe) -> None:
        super().__init__(root, recipe)
        self._unusable: dict[str, str] = {}
        self._streamed: dict[int, int] = {}  # CRC of members whose own header has none
        self._zip = None if root.is_dir() else open_regular(root)
        try:
            self._labels = _labels(self._description())
        except (OSError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
            raise SourceError(f"source '{root}': '{DESCRIPTION}' cannot be read ({error}).") from error
        self.has_labels = bool(self._labels)

    def _description(self) -> Any:
        """The content of ``dataset.json``, or {}; raises OSError, ValueError, BadZipFile."""
        if self._zip is None:
            path = self.root / DESCRIPTION
            return json.loads(read_file(path, MAX_DESCRIPTION)) if os.path.lexists(path) else {}
        with zipfile.ZipFile(self._zip) as packed:
            if DESCRIPTION not in packed.namelist():
                return {}
            if packed.getinfo(DESCRIPTION).file_size > MAX_DESCRIPTION:
                raise ValueError(f"it claims more than {MAX_DESCRIPTION} bytes")
            with packed.open(DESCRIPTION) as member:
                return json.loads(member.read(MAX_DESCRIPTION))

    def entries(self) -> Iterator[Entry]:
        """Members in the order of their names, then labels without members, which are rejects."""
        listed = set()
        for entry in self._members():
            listed.add(entry.path)
            yield entry
        for label_name in sorted(self._labels.keys() - listed):
            name, problem = usable_key(label_name)
            self._unusable[name] = problem[1] if problem else f"it has a label in '{DESCRIPTION}', but is not there"
            yield Entry(name.removesuffix(".npy"), name)

    def _members(self) -> Iterator[Entry]:
        if self._zip is None:
            for path in sorted(files_below(self.root, ".npy")):
                yield self.file_entry(path.relative_to(self.root).as_posix())
            return
        with zipfile.ZipFile(self._zip) as packed:
            members = [info for info in packed.infolist() if info.filename.endswith(".npy")]
        for info in sorted(members, key=lambda info: info.filename):
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.file_size != info.compress_size:
                self._unusable[info.filename] = "it is compressed or encrypted; EDM2 stores its members as they are"
            if info.flag_bits & HAS_DESCRIPTOR:
                self._streamed[info.header_offset] = info.CRC
            yield Entry(info.filename.removesuffix(".npy"), info.filename, info.header_offset, info.file_size)

    def look(self, entry: Entry) -> RecordHeader:
        """From its header."""
        inner_path(entry.path)
        if why := self._unusable.get(entry.path):
            raise RecordRejected("scan", "unreadable", f"{entry.path}: {why}")
        with rejecting(entry.path):
            if self._zip is None:
                shape, dtype = look_npy(self.root / entry.path)
            else:
                shape, dtype = look(self._member(entry, MAX_HEADER), entry.num_bytes)
        if self.has_labels and entry.path not in self._labels:
            raise RecordRejected("scan", "no_label", f"'{DESCRIPTION}' has no label of {entry.path}")
        return RecordHeader(shape, dtype, label=self._labels.get(entry.path, -1))

    def content(self, entry: Entry) -> bytes:
        """A member, or a file."""
        return super().content(entry) if self._zip is None else self._member(entry, MAX_ARRAY_BYTES)

    def _member(self, entry: Entry, limit: int) -> bytes:
        """The first bytes of a member; a whole one's CRC is checked. Raises OSError, ValueError."""
        assert self._zip, "a folder has no members"
        head = os.pread(self._zip.fileno(), LOCAL_HEADER.size, entry.offset)
        if len(head) < LOCAL_HEADER.size or not head.startswith(b"PK\x03\x04"):
            raise ValueError("there is no member where the directory says")
        _, _, _, _, _, _, crc, _, _, name_bytes, extra_bytes = LOCAL_HEADER.unpack(head)
        start = entry.offset + LOCAL_HEADER.size + name_bytes + extra_bytes
        content = os.pread(self._zip.fileno(), min(limit, entry.num_bytes), start)
        if limit >= entry.num_bytes and zlib.crc32(content) != self._streamed.get(entry.offset, crc):
            raise ValueError("its CRC is not that of its bytes")
        return content


def _labels(description: Any) -> dict[str, int]:
    """Label of each member; raises ValueError if they are not class numbers."""
    labels = description.get("labels") if isinstance(description, dict) else None
    try:
        label_of = {str(name): label for name, label in labels or ()}
    except (TypeError, ValueError) as error:
        raise ValueError("its labels are no list of [name, label]") from error
    if wrong := [name for name, label in label_of.items() if type(label) is not int]:
        raise ValueError(f"the label of {wrong[0][:100]!r} is no class number")
    return label_of
