"""Detects the kind of a source by its files, and refuses what is no source, with what to do instead."""

from __future__ import annotations

from ...errors import SourceError
from ..config import SourceSection
from .files.files import SourceFiles
from .files.folders import has_sidecars
from .files.record import is_image
from .files.splits import folder_of_split, shard_names
from .tables.embedded import holds_images, is_saved_dataset, is_saved_dict, saved_split
from .tables.tables import METADATA, find_caption_table, find_table
from .tars.imagenet import is_imagenet
from .tars.webdataset import tar_names

TABLES = ("metadata", "manifest")  # kinds whose records are rows that name images
HEAD_BYTES = 512  # the header of a tar's first member
TAR_MAGIC = b"ustar"
TABLE_EXTENSIONS = (".jsonl", ".json", ".csv", ".tsv", ".txt", ".token", ".parquet")
PACKED = (b"PK\x03\x04", b"Rar!", b"7z\xbc\xaf", b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
LFS_POINTER = b"version https://git-lfs"
KINDS = (
    "a folder of images (class folders, texts beside, or a table that names them), a table (.jsonl, .json, .csv, "
    ".tsv, .txt, .parquet), a .tar or a folder of them, a folder of .parquet"
)


def check_file(files: SourceFiles) -> None:
    """Raise SourceError if the file of a source is neither a tar nor a table: what it is, and what to do."""
    assert files.only
    with files.open(files.only, ahead=False) as file:
        head = file.read(HEAD_BYTES)
    if what := _not_a_source(files.only, head):
        raise SourceError(f"source '{files.name}': {what}")


def _not_a_source(name: str, head: bytes) -> str:
    if not head:
        return f"an empty file. Sources are {KINDS}."
    if head.startswith(LFS_POINTER):
        return f"a Git LFS pointer, not the file itself. Fetch it with 'git lfs pull'. Sources are {KINDS}."
    if head.startswith(PACKED) and not name.lower().endswith(TABLE_EXTENSIONS):
        return (
            "an archive, or compressed: its images cannot be read one by one. Unpack it once: 'gunzip --keep FILE' "
            f"for WebDataset shards, 'tar -xf FILE' or 'unzip FILE' for folders of images. Sources are {KINDS}."
        )
    if is_image(name):
        return f"an image. Pass its folder. Sources are {KINDS}."
    if head[257:262] == TAR_MAGIC or name.lower().endswith((".tar", *TABLE_EXTENSIONS)):
        return ""
    return (
        "of no known kind. Features encoded by another program go through 'leandit import'; a pickle is never "
        f"opened. Write other images to files, or to Parquet. Sources are {KINDS}."
    )


def detect_kind(files: SourceFiles, settings: SourceSection) -> tuple[str, SourceFiles, str | None, list[str]]:
    """Kind, files of the split, path of the table that names the images (or None), and notes."""
    if settings.kind in ("auto", "arrow") and is_saved_dict(files):
        files, notes = saved_split(files, settings.split)
        return "arrow", files, None, notes
    table = find_table(files, settings)
    notes: list[str] = []
    captions = None if table else find_caption_table(files, settings, notes)
    if not (table or captions or settings.kind in TABLES):
        whole = files
        files, of_split = folder_of_split(files, settings)
        if files is not whole:
            notes = []
            table = find_table(files, settings)
            captions = None if table else find_caption_table(files, settings, notes)
        notes = [*of_split, *notes]
    kind = _guess_kind(files, settings, table, captions) if settings.kind == "auto" else settings.kind
    return kind, files, table or captions, notes


def _guess_kind(files: SourceFiles, settings: SourceSection, table: str | None, captions: str | None) -> str:
    """The kind of a source.

    Args:
      table: with a known name.
      captions: else a text table of images.
    """
    if is_saved_dataset(files):
        return "arrow"
    if table and table.endswith(".parquet") and holds_images(files, table):
        return "parquet"
    if table:
        return "metadata" if table in METADATA and not files.only else "manifest"
    tars = tar_names(files, settings.split)
    parquet = [] if files.only else shard_names(files, ".parquet", settings.split)
    # Beside tars, or folders of images and texts, Parquet files may hold none, as img2dataset writes them.
    has_others = bool(tars) or (bool(parquet) and has_sidecars(files))
    if parquet and (not has_others or holds_images(files, parquet[0])):
        return "parquet"
    if tars:
        return "imagenet" if is_imagenet(files, tars) else "webdataset"
    return "manifest" if captions else "sidecars" if has_sidecars(files) else "imagefolder"
