"""Refuse a file that is not a source, by its name and first bytes, and say what to do instead."""

from __future__ import annotations

from ..files.record import is_picture

HEAD_BYTES = 512  # the header of a tar's first member
TAR_MAGIC = b"ustar"
TABLE_EXTENSIONS = (".jsonl", ".json", ".csv", ".tsv", ".txt", ".token", ".parquet")
PACKED = (b"PK\x03\x04", b"Rar!", b"7z\xbc\xaf", b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
LFS_POINTER = b"version https://git-lfs"
KINDS = (
    "a folder of pictures (class folders, texts beside, or a table that names them), a table (.jsonl, .json, .csv, "
    ".tsv, .txt, .parquet), a .tar or a folder of them, a folder of .parquet"
)


def not_a_source(name: str, head: bytes) -> str | None:
    """Why a file cannot be a source, and what to do; None for a tar or a table.

    Args:
      name: of the file.
      head: its first HEAD_BYTES, or fewer.
    """
    if not head:
        return f"an empty file. Sources are {KINDS}."
    if head.startswith(LFS_POINTER):
        return f"a pointer of Git LFS, not the file itself. Fetch it with 'git lfs pull'. Sources are {KINDS}."
    if head.startswith(PACKED) and not name.lower().endswith(TABLE_EXTENSIONS):
        return (
            "an archive, or compressed: its pictures cannot be read one by one. Unpack it once: 'gunzip --keep FILE' "
            f"for WebDataset shards, 'tar -xf FILE' or 'unzip FILE' for folders of pictures. Sources are {KINDS}."
        )
    if is_picture(name):
        return f"a picture. Give the folder that it lies in. Sources are {KINDS}."
    if head[257:262] == TAR_MAGIC or name.lower().endswith((".tar", *TABLE_EXTENSIONS)):
        return None
    return (
        "of no known kind. Features that another program has encoded go through 'leandit import'; a pickle is never "
        f"opened. Write other pictures to files, or to Parquet. Sources are {KINDS}."
    )
