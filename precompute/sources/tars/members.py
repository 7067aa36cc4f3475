"""The members of an untrusted tar: the location of their bytes, checked against the file itself.

The standard library parses the 512 bytes of a header. The loop over members is here, because the library's own loop
reads extended headers of any size into memory and takes a damaged header for the end of the archive.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from ....errors import SourceError

BLOCK = tarfile.BLOCKSIZE
MAX_EXTENDED_BYTES = 1 << 20  # of a pax header or a long name
REGULAR = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
LINKS = (tarfile.LNKTYPE, tarfile.SYMTYPE)
SPARSE = "a sparse member, whose bytes are not contiguous"
LINK = "a link: its bytes are stored under another name, if at all"
LONG_NAMES = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)


@dataclass(frozen=True)
class TarMember:
    """A file in a tar: its name, the location of its bytes, or why they are not contiguous."""

    name: str
    offset: int
    size: int
    problem: str = ""


def tar_members(file: BinaryIO, tar: str, *, start: int = 0, stop: int | None = None) -> Iterator[TarMember]:
    """Files and links of an uncompressed tar, in order; devices, FIFOs and folders are skipped.

    The caller may read elsewhere in the file between two members.

    Args:
      tar: its name, for messages.
      start, stop: of the tar within the file, if it is a member of another tar; offsets are the file's.
    Raises: SourceError: not a tar, a damaged header, or a member reaches beyond the end.
    """
    total = file.seek(0, os.SEEK_END) if stop is None else stop
    extended: dict[str, str] = {}
    position = start
    while position < total or position == start:
        file.seek(position)
        block = file.read(min(BLOCK, total - position))
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.TarError as error:
            if position > start and isinstance(error, tarfile.EOFHeaderError):  # pyright: ignore[reportAttributeAccessIssue]
                _check_end(file, position, total, tar)
                return
            raise _unreadable(tar, f"at byte {position}: {error}") from error
        data = position + BLOCK
        if header.type == tarfile.GNUTYPE_SPARSE:  # blocks that say where its parts belong follow while a flag says so
            more = block[482]
            while more and data < total:
                more, data = file.read(BLOCK).ljust(BLOCK, b"\0")[504], data + BLOCK
        size = header.size
        if header.type not in (tarfile.XGLTYPE, tarfile.XHDTYPE, *LONG_NAMES):
            size = _pax_size(extended, size, tar, position)
        end = data + -(-size // BLOCK) * BLOCK
        if size < 0 or end > total:
            raise _unreadable(tar, f"at byte {position}: a member of {size} bytes, but only {total - data} are left")
        position = end
        if header.type in (tarfile.XGLTYPE, tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, *LONG_NAMES):
            if size > MAX_EXTENDED_BYTES:
                raise _unreadable(tar, f"at byte {data}: an extended header of {size} bytes")
            content = file.read(size)
            if header.type == tarfile.GNUTYPE_LONGNAME:
                extended["path"] = content.split(b"\0")[0].decode("utf-8", "surrogateescape")
            elif header.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE):
                extended |= _pax_values(content, tar, data)
            continue  # what a global header says of all members (a comment, a commit) is of no use here
        is_sparse = header.type == tarfile.GNUTYPE_SPARSE or any(key.startswith("GNU.sparse.") for key in extended)
        if header.type in (*REGULAR, *LINKS) or is_sparse:
            name = extended.get("path", header.name)
            problem = LINK if header.type in LINKS else SPARSE if is_sparse else ""
            if not (header.type == tarfile.AREGTYPE and name.endswith("/")):  # a folder, in the oldest tars
                yield TarMember(extended.get("GNU.sparse.name", name), data, size, problem)
        extended = {}
    if position > start:
        raise _unreadable(tar, f"at byte {position}: it stops between two members, without the zeros at its end")


def _check_end(file: BinaryIO, position: int, total: int, tar: str) -> None:
    """Raise if anything but zeros follows the end, as in two concatenated tars."""
    file.seek(position)
    while position < total:
        block = file.read(min(1 << 20, total - position))
        if not block or block.strip(b"\0"):
            raise _unreadable(tar, f"at byte {position}: data follows its end")
        position += len(block)


def _unreadable(tar: str, what: str) -> SourceError:
    return SourceError(f"source '{tar}': not a readable, uncompressed tar file ({what}). Restore or remove it.")


def _pax_values(content: bytes, tar: str, position: int) -> dict[str, str]:
    """Records "LENGTH KEY=VALUE\\n" of a pax header; the length counts itself."""
    values, start = {}, 0
    while start < len(content) and content[start]:
        digits, found, _ = content[start : start + 12].partition(b" ")
        length = int(digits) if found and digits.isdigit() else 0
        record = content[start : start + length]
        key, equals, value = record[len(digits) + 1 : -1].partition(b"=")
        if len(record) != length or not equals or record[-1:] != b"\n":
            raise _unreadable(tar, f"at byte {position + start}: a damaged pax header")
        values[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        start += length
    return values


def _pax_size(extended: dict[str, str], size: int, tar: str, position: int) -> int:
    text = extended.get("size")
    if text is None:
        return size
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise _unreadable(tar, f"at byte {position}: its pax header has a size that is not a number")
    return int(text)
