"""Recognize files that are not sources by their first bytes and name, for the error message."""

from __future__ import annotations

import zlib

HEAD_BYTES = 1024
KINDS = (
    "a folder of pictures (class folders, texts beside, or a table that names them), a table (.jsonl, .json, .csv, "
    ".tsv, .txt, .parquet), a .tar or a folder of them, a folder of .parquet"
)
UNPACK = "Unpack it, and give the folder."
PICTURE = "Give the folder that it lies in."
SIGNATURES: tuple[tuple[bytes, str, str], ...] = (
    (b"PK\x03\x04", "a ZIP archive", UNPACK),
    (b"Rar!", "a RAR archive", UNPACK),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", UNPACK),
    (b"BZh", "compressed with bzip2", UNPACK),
    (b"\xfd7zXZ\0", "compressed with xz", UNPACK),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", UNPACK),
    (b"\xff\xd8\xff", "a JPEG picture", PICTURE),
    (b"\x89PNG\r\n\x1a\n", "a PNG picture", PICTURE),
    (b"GIF8", "a GIF picture", PICTURE),
    (b"BM", "a BMP picture", PICTURE),
    (b"II*\0", "a TIFF picture", PICTURE),
    (b"MM\0*", "a TIFF picture", PICTURE),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", "Write its pictures to files, or to Parquet."),
    (b"\x93NUMPY", "a NumPy array", "Write its pictures to files, or to Parquet."),
    (b"ARROW1", "an Arrow file", "Write it as Parquet."),
    (b"SQLite format 3\0", "an SQLite database", "Write its pictures to files, or to Parquet."),
    (b"%PDF", "a PDF", ""),
    (b"\x1a\x45\xdf\xa3", "a video", "Write its frames to files."),
    (b"version https://git-lfs", "a pointer of Git LFS, not the file itself", "Fetch it with 'git lfs pull'."),
    (b"PAR1", "a Parquet file by another name", "Rename it to .parquet."),
)
EXTENSIONS = {
    ".pt": ("a file of torch", "It may hold a pickle, which is never opened."),
    ".pth": ("a file of torch", "It may hold a pickle, which is never opened."),
    ".ckpt": ("a checkpoint", "It may hold a pickle, which is never opened."),
    ".pkl": ("a pickle", "It is never opened, because it may run code."),
    ".safetensors": ("a file of tensors", "Features that another program has encoded go through 'leandit import'."),
    ".tfrecord": ("a TFRecord file", "Write its pictures to tars or to Parquet."),
    ".mdb": ("an LMDB database", "Write its pictures to files, or to Parquet."),
    ".mds": ("a shard of MDS", "Features in MDS go through 'leandit import mds'."),
    ".beton": ("a file of FFCV", "Give the pictures that it was made of."),
}
TABLE_EXTENSIONS = (".jsonl", ".json", ".csv", ".tsv", ".txt", ".token", ".parquet")


def not_a_source(name: str, head: bytes) -> str | None:
    """Why a file cannot be a source, and what to do; None for a tar or a table.

    Args:
      name: of the file.
      head: its first HEAD_BYTES, or fewer.
    """
    kind, advice = _recognized(name, head)
    if kind is None:
        return None
    return f"{kind}. {advice} Sources are {KINDS}.".replace("  ", " ")


def _recognized(name: str, head: bytes) -> tuple[str | None, str]:
    lower = name.lower()
    extension = "." + lower.rpartition(".")[2] if "." in lower else ""
    if head.startswith(b"\x1f\x8b"):
        return _compressed(name, head)
    if found := next(((kind, advice) for start, kind, advice in SIGNATURES if head.startswith(start)), None):
        is_table = extension == ".parquet" and head.startswith(b"PAR1")
        is_text = extension in TABLE_EXTENSIONS and head.startswith((b"BM", b"BZh", b"GIF8"))  # letters too
        return (None, "") if is_table or is_text else found
    if head[4:8] == b"ftyp":
        is_picture = head[8:12] in (b"heic", b"heix", b"mif1", b"msf1", b"avif", b"avis")
        return ("a HEIF or AVIF picture", PICTURE) if is_picture else ("a video", "Write its frames to files.")
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "a WebP picture", PICTURE
    if head[257:262] == b"ustar" or extension in (".tar", *TABLE_EXTENSIONS):
        return None, ""
    if not head:
        return "an empty file", ""
    if len(head) > 1 and head[0] == 0x80 and 2 <= head[1] <= 5:
        return EXTENSIONS[".pkl"]
    if extension in EXTENSIONS:
        return EXTENSIONS[extension]
    if head.lstrip()[:14].lower().startswith((b"<!doctype html", b"<html")):
        return "a web page, as a download leaves that has failed", "Look at it in a browser."
    what = "binary data" if b"\0" in head else "text"
    return f"{what} of no known kind" + (f", by its name {extension}" if extension else ""), ""


def _compressed(name: str, head: bytes) -> tuple[str, str]:
    """Describe a gzip file, which may be a tar."""
    try:
        begin = zlib.decompressobj(wbits=31).decompress(head, 512)
    except zlib.error:
        begin = b""
    if begin[257:262] != b"ustar" and not name.lower().endswith((".tar.gz", ".tgz")):
        return "compressed with gzip", "Unpack it with gunzip."
    return (
        "a tar compressed with gzip, whose pictures cannot be read one by one",
        f"Unpack it once: 'gunzip --keep {name}' for WebDataset shards, 'tar -xzf {name}' for folders of pictures.",
    )
