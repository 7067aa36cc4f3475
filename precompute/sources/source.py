"""Sources of images and captions: folders, tables, tars and Parquet files, local or at a URL.

A source is listed, never unpacked: each record holds the location of its bytes, so any record can be read at random
from any thread. Keys are only names; no path is ever made from one. Claims of untrusted sources are bounded before they
are used (``docs/security.md``). ``docs/sources.md`` describes the kinds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ...datasets.disk.faults import is_fault
from ...datasets.disk.hashing import sha256_of
from ...errors import RecordRejected, SourceError
from ...units import plural
from ..config import Kind, SourceSection
from ..images.decoder_child import HEADER_BYTES
from ..images.decoders import ImagePlace
from ..images.faults import fault_error
from .files.files import LocalFiles, SourceFiles, open_files, open_source_files
from .files.folders import Scan, image_folder, sidecar_folder
from .files.ignored import Ignored
from .files.labels import AMONG_NUMBERS, FIRST_NAME
from .files.record import IMAGE_EXTENSIONS, SourceRecord
from .files.splits import ALL, SHARD_ENDS, check_has_splits, tell_split
from .keys import COCO, check_keys
from .kinds import TABLES, check_file, detect_kind
from .listing.classes import names_of_classes, read_class_names
from .listing.listing import Listing, record_batches, rejected, spool, with_labels
from .listing.of_split import records_of_split
from .tables.embedded import ARROW, PARQUET, EmbeddedImages, embedded_batches
from .tables.formats import is_coco
from .tables.tables import METADATA, coco_names, root_elsewhere, table_batches
from .tars.imagenet import imagenet
from .tars.webdataset import webdataset

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

MARK = "//"  # //NAME//PATH: an image of another source than the first
MAX_SENT_BYTES = 256 << 20  # of an image that this process reads for a decoder
# Columns of the listing's hash.
LISTED = ["key", "path", "offset", "num_bytes", "mtime_ns", "label", "captions", "height_px", "width_px"]
SHARDED = (PARQUET, "webdataset", "imagenet")  # kinds of files that hold many images, whose names tell splits
EMBEDDED = (PARQUET, ARROW)  # kinds whose images are bytes in the rows of a file
# Kinds whose records may have further images.
WITH_COMPANIONS = (*TABLES, *EMBEDDED, "webdataset", "sidecars", "imagefolder")
WITH_FOLDERS = (*TABLES, "imagefolder", "sidecars", "webdataset")  # kinds whose images are in folders that tell splits
NO_COMPANIONS: Mapping[str, str] = {}
WITH_TEXTS = ("sidecars", "webdataset")  # kinds whose captions are in texts of an image
NO_LABEL = -2  # a name that is no label, until its record is rejected
NAMED = ("imagefolder", "imagenet")  # kinds whose classes always have names
RECORDS: dict[str, Callable[[SourceFiles, Scan], Iterator[SourceRecord]]] = {
    "imagefolder": image_folder,
    "sidecars": sidecar_folder,
    "webdataset": webdataset,
    "imagenet": imagenet,
}


@dataclass(frozen=True)
class OpenedSource:
    """A source whose images are read by the locations in a plan; it needs no listing.

    Args:
      settings: how to read it; its kind is never "auto".
      files: resolve the records' paths.
      others: further sources, by name (``several.py``).
      companions: column of each companion image, by name.
    """

    settings: SourceSection
    files: SourceFiles
    others: tuple[tuple[str, OpenedSource], ...] = field(default=(), kw_only=True)
    companions: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    _rows: EmbeddedImages = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_rows", EmbeddedImages(self.files, self.settings, self.companions))

    @property
    def kind(self) -> str:
        """How it is read: a kind of ``SourceSection``, never "auto"."""
        return self.settings.kind

    @property
    def name(self) -> str:
        """Path or URL, for messages."""
        return "', '".join(part.files.name for part in self.parts)

    @property
    def parts(self) -> list[OpenedSource]:
        """Each of the sources alone."""
        first = OpenedSource(self.settings, self.files, companions=self.companions)
        return [first, *(other for _, other in self.others)]

    @property
    def is_read_by_decoders(self) -> bool:
        """Decoders read the images themselves; otherwise this process sends them the bytes."""
        return all(part.kind not in EMBEDDED and isinstance(part.files, LocalFiles) for part in self.parts)

    def place(self, path: str, offset: int, num_bytes: int, *, stage: str, companion: str = "") -> ImagePlace:
        """Where a decoder finds an image: in a local file, or in bytes that this process has read.

        Args:
          companion: its name; empty for a record's own image.
        Raises: RecordRejected: gone, or changed since the listing; SourceError: the URL cannot be reached.
        """
        part, inner = self._holder(path)
        if part.kind not in EMBEDDED and isinstance(part.files, LocalFiles):
            return ImagePlace(part.files.root / inner, offset, num_bytes)
        data = self.read(path, offset, num_bytes, stage=stage, companion=companion)
        return ImagePlace(Path(inner), 0, len(data), data)

    def read(self, path: str, offset: int, num_bytes: int, *, stage: str, companion: str = "") -> bytes:
        """Read the bytes of an image. Args, Raises: as for ``place``."""
        part, path = self._holder(path)
        data = part._rows.read(path, offset, stage, companion) if part.kind in EMBEDDED else None
        size = num_bytes if data is None else len(data)
        if size > MAX_SENT_BYTES:
            raise RecordRejected(stage, "too_large", f"{size} bytes, at most {MAX_SENT_BYTES >> 20} MiB are read")
        return part.files.read(path, offset, num_bytes, stage) if data is None else data

    def read_head(self, path: str, offset: int, num_bytes: int) -> bytes | None:
        """The first HEADER_BYTES of an image, or all if it has fewer; None if they cannot be read alone."""
        part, path = self._holder(path)
        if part.kind in EMBEDDED:
            return None
        return part.files.read(path, offset, num_bytes, "scan", at_most=HEADER_BYTES)

    def _holder(self, path: str) -> tuple[OpenedSource, str]:
        """The source that a planned path belongs to, and the path in it."""
        if not path.startswith(MARK) or not (self.others or isinstance(self.files, LocalFiles)):
            return self, path
        name, _, inner = path.removeprefix(MARK).partition(MARK)
        if other := dict(self.others).get(name):
            return other, inner
        raise SourceError(
            f"source '{self.name}': the store was planned with one more source, '{name}'. Pass every --source, in "
            "the same order."
        )


@dataclass(frozen=True)
class Source(OpenedSource):
    """A listed source.

    Args:
      records: all records, in order.
      classes: class names in order of their labels, or None.
      ignored: files and folders that were skipped.
      notes: on how the source was read.
      class_names: display names of the same classes; None if the recipe names none.
      counts: records of each source, if there are several.
    """

    records: Listing = field(repr=False)
    classes: list[str] | None
    ignored: Ignored = field(default_factory=Ignored)
    notes: list[str] = field(default_factory=list)
    class_names: list[str] | None = None
    counts: tuple[int, ...] = field(default=(), kw_only=True)

    def lines(self) -> list[str]:
        """Kind, path and number of records of each source."""
        counts = zip(self.parts, self.counts or [len(self.records)], strict=True)
        return [f"{part.kind} '{part.name}', {plural(count, 'record')}" for part, count in counts]

    @property
    def has_class_names(self) -> bool:
        """Classes have names, so labels may move; otherwise a label is its own name."""
        names = self.classes or []
        return any(part.kind in NAMED for part in self.parts) or names != [str(i) for i in range(len(names))]

    def renames(self, classes: Sequence[str] | None) -> bool:
        """Whether classes are named otherwise than in a store, which may have more of them."""
        names = self.classes or []
        return names != list(classes or ())[: len(names)]

    def listing_hash(self, *, null_captions: bool = False) -> str:
        """Hash of the listing: changes if a file is added, removed or rewritten.

        Args:
          null_captions: records without a caption are stored, which is another plan of the same listing.
        """
        digest = hashlib.sha256()
        for batch in self.records.batches():
            for name in [*LISTED, *(["companions"] if self.companions else [])]:
                _hash_column(digest, batch[name])
            problems = np.flatnonzero(batch["reason"].is_valid().to_numpy(zero_copy_only=False))
            if len(problems):
                digest.update(problems.tobytes())
                for name in ("reason", "detail"):
                    _hash_column(digest, batch[name].take(pa.array(problems)))
        listing = digest.hexdigest()
        return sha256_of([listing, "missing_caption=null"]) if null_captions else listing


def _hash_column(digest: Any, column: pa.Array) -> None:
    """Hash lengths and bytes of a column without nulls, independent of its slicing."""
    if pa.types.is_list(column.type):
        digest.update(pc.list_value_length(column).to_numpy())
        column = column.flatten()
    if pa.types.is_struct(column.type):
        for child in column.flatten():
            _hash_column(digest, child)
    elif pa.types.is_string(column.type):
        digest.update(pc.binary_length(column).to_numpy())
        _, offsets, letters = column.buffers()
        first, last = np.frombuffer(offsets, np.int32)[[column.offset, column.offset + len(column)]]
        digest.update(memoryview(letters)[first:last] if letters else b"")
    else:
        digest.update(np.ascontiguousarray(column.to_numpy()))


def open_source(
    path: Path | str, asked: SourceSection | Kind = "auto", companions: Mapping[str, str] = NO_COMPANIONS
) -> OpenedSource:
    """Open a source without listing it.

    Args:
      path: a folder, one tar, one Parquet file or one manifest; or the URL of one.
      asked: how to read it, or only its kind; "auto" detects it.
      companions: column of each companion image, by name.
    Raises: SourceError: missing, or several splits; RecipeError: no file system for the URL.
    """
    return replace(_opened(path, asked).source, companions=dict(companions))


class _Opened(NamedTuple):
    """An opened source before its listing.

    Args:
      source: the source.
      files: to list; its images may be elsewhere.
      table: path of the table that names the images, or None.
      notes: on how it is read.
      is_split: the names of its folders or files told the split.
    """

    source: OpenedSource
    files: SourceFiles
    table: str | None
    notes: list[str]
    is_split: bool


def _opened(path: Path | str, asked: SourceSection | Kind) -> _Opened:
    settings = SourceSection(kind=asked) if isinstance(asked, str) else asked
    files = open_files(path)
    if files.only and settings.kind in ("auto", "webdataset", "imagenet"):
        check_file(files)
    whole = files
    kind, files, table, notes = detect_kind(files, settings)
    settings = settings.model_copy(update={"kind": kind})
    shards: list[str] = []
    if kind in SHARDED and not files.only:
        shards = [name for name in files.names() if name.endswith(SHARD_ENDS)]
    is_split = files is not whole or tell_split(shards) or tell_split(coco_names(files))
    check_keys(files.name, COCO if table and kind in TABLES and is_coco(files, table) else kind, settings, notes)
    elsewhere = root_elsewhere(files, settings.root) if settings.root else None
    images = open_source_files(elsewhere, is_folder=True) if elsewhere else files
    return _Opened(OpenedSource(settings, images), files, table, notes, is_split)


def list_source(
    path: Path | str,
    asked: SourceSection | Kind = "auto",
    companions: Mapping[str, str] = NO_COMPANIONS,
    *,
    needs_labels: bool = True,
    progress: Callable[[int], None] = lambda _: None,
) -> Source:
    """List a source.

    Args:
      path, asked, companions: as for ``open_source``.
      needs_labels: a label that is neither a class index nor a name rejects its record; otherwise it does so only if
        ``source.label`` names its column.
      progress: called with the number of records so far.
    Raises: SourceError: missing, empty, not of this kind, or several splits; RecipeError: no file system for the URL,
      or no file of class names.
    """
    opened, files, table, notes, is_split = _opened(path, asked)
    kind, settings = opened.kind, opened.settings
    scan = Scan(settings, notes=notes, companions=dict(companions), needs_labels=needs_labels)
    if companions and kind not in WITH_COMPANIONS:
        raise SourceError(
            f"source '{files.name}': [companions.{next(iter(companions))}] needs a table with a column for it (JSONL, "
            f"CSV, Parquet or Arrow), tars with a field for it, or a folder with images beside; this is {kind}."
        )
    if files.only and kind in ("imagefolder", "sidecars", "metadata", "arrow"):
        raise SourceError(f"source '{files.name}': a file; expected a folder for source.kind \"{kind}\".")
    names = read_class_names(settings.class_names) if settings.class_names else None  # before the long listing
    batches = _batches(files, opened.files, table, scan)
    records = spool(batches, progress)
    if not records and table:
        raise SourceError(f"source '{files.name}': the table '{table}' has no rows that name an image.")
    if not records:
        raise SourceError(
            f"source '{files.name}': no images found as {kind}. Expected: class folders of images, *.tar shards, "
            f"*.parquet, or a {METADATA[0]} with 'file_name'; known extensions are "
            f"{', '.join(sorted(IMAGE_EXTENSIONS))}."
        )
    records = _records_of_split(records, files, scan, is_split=is_split)
    if kind in WITH_TEXTS:
        scan.texts.check_named_fields(files.name)
    if settings.sizes == "manifest" and not records.has_sizes():
        raise SourceError(
            f"source '{files.name}': source.sizes is \"manifest\", but the table has no columns 'height' and 'width' "
            "with numbers. Leave it out: images are then measured."
        )
    records, scan.classes = _with_numbered_names(records, scan)
    scan.notes += [*scan.texts.notes(), *scan.labels.notes()]
    scan.notes += scan.further.notes()
    classes, largest = scan.classes, records.largest_label()
    if classes is None and kind not in NAMED:
        classes = [str(i) for i in range(largest + 1)] or None
    if largest >= len(classes or ()):
        raise SourceError(
            f"source '{files.name}': label {largest}, but it names {len(classes or ())} classes. Correct the labels or "
            "the names, or leave labels out with --set source.labels=none."
        )
    class_names = names_of_classes(settings.class_names, names, classes) if names else None
    return Source(
        settings=settings,
        files=opened.files,
        records=records,
        classes=classes,
        ignored=scan.ignored,
        notes=scan.notes,
        class_names=class_names,
        companions=dict(companions),
    )


def _records_of_split(records: Listing, files: SourceFiles, scan: Scan, *, is_split: bool) -> Listing:
    """The records of the split that the recipe names, as far as names of files have not told it.

    Args:
      is_split: names of folders or files of the source told the split.
    Raises: SourceError: several splits and none named; or no split of this name.
    """
    kind, asked = scan.settings.kind, scan.settings.split
    if asked != ALL and not scan.has_split_column and kind in WITH_FOLDERS:
        column = "key" if kind == "webdataset" else "path"
        records, is_chosen, notes = records_of_split(
            files.name, records, asked, is_split=is_split, is_table=kind in TABLES, column=column
        )
        scan.notes += notes
        is_split = is_split or is_chosen
    if not is_split and not scan.has_split_column:
        check_has_splits(files.name, asked)
    return records


def _with_numbered_names(records: Listing, scan: Scan) -> tuple[Listing, list[str] | None]:
    """Records whose labels are class indices, where some were names until all names were known; and the classes."""
    if not scan.labels.names:
        return records, scan.classes
    numbers, classes = scan.labels.number(scan.classes)
    final = np.array([NO_LABEL if number is None else number for number in numbers.values()], np.int32)

    def numbered_batches() -> Iterator[pa.RecordBatch]:
        for batch in records.batches():
            labels = batch["label"].to_numpy()
            is_name = labels >= FIRST_NAME
            labels = np.where(is_name, final[np.where(is_name, labels - FIRST_NAME, 0)], labels)
            is_unusable = labels == NO_LABEL
            if is_unusable.any():
                name = scan.labels.names[int(batch["label"][int(np.argmax(is_unusable))].as_py()) - FIRST_NAME]
                problem = f"label {name[:40]!r} is {AMONG_NUMBERS}"
                if scan.labels.is_required:
                    batch = rejected(batch, is_unusable, ("bad_metadata", problem))
                else:
                    scan.labels.read_unusable(problem, int(is_unusable.sum()))
            yield with_labels(batch, np.where(is_unusable, -1, labels))

    return spool(numbered_batches(), lambda _: None, check_keys=False), classes


def _batches(files: SourceFiles, images: SourceFiles, table: str | None, scan: Scan) -> Iterator[pa.RecordBatch]:
    """The records of a source in batches; faults of a disk are errors of resources."""
    kind = scan.settings.kind
    try:
        if kind in EMBEDDED:
            yield from embedded_batches(files, scan)
        elif kind in RECORDS:
            yield from record_batches(RECORDS[kind](files, scan))
        elif table is None or (kind == "metadata" and table not in METADATA):
            if kind == "metadata":
                names = " or ".join(METADATA)
            else:
                names = "manifest (*.jsonl, *.csv, *.parquet or data_info.json)"
            raise SourceError(f"source '{files.name}': there is no {names}, which source.kind \"{kind}\" needs.")
        else:
            yield from table_batches(files, images, table, scan)
    except (OSError, MemoryError) as error:
        if is_fault(error):
            raise fault_error(files.name, error) from error
        raise SourceError(
            f"source '{files.name}': it cannot be read ({error}). Check the disk or the mount."
        ) from error
