"""Where raw pictures and captions come from: an image folder, WebDataset tars, or a folder with ``metadata.jsonl``.

A source is listed, never opened: each record says where its bytes lie, so that any of them can be read at random,
later, from any thread. Keys are names only; no path is ever made from one, and nothing of a tar is ever unpacked to the
disk. What a source of others can claim is bounded before it is believed (``docs/security.md``).
"""

from __future__ import annotations

import hashlib
import json
import os
import reprlib
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from webdataset.tariterators import base_plus_ext

from ..datasets.errors import RecordRejected, SourceError
from .tar_members import TarMember, tar_members

IMAGE_EXTENSIONS = frozenset(
    [".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".avif", ".jfif"]
)
METADATA = "metadata.jsonl"
MAX_CLASSES = 1_000_000  # a larger label is a mistake, and would fill the memory with names
MAX_CAPTIONS = 256  # of one record
MAX_CAPTION_CHARS = 1 << 16  # far beyond any encoder's cut
MAX_TEXT_BYTES = 1 << 20  # of a .txt, .cls or .json of a tar
MAX_LINE_BYTES = 1 << 24  # of metadata.jsonl
MAX_KEY_CHARS = 1024
MAX_TAR_NAME = 4096  # as long as a path can be
TEXT_EXTENSIONS = ("cls", "txt", "json")


@dataclass(frozen=True)
class SourceRecord:
    """One image of a source.

    Args:
      key: unique name within the source.
      path: of the file that holds the bytes, relative to the source.
      offset, num_bytes: where the bytes lie in that file.
      mtime_ns: when that file was written.
      label: class index, or -1.
      captions: as the source gives them.
      problem: (reason, detail) where the record is already known to be unusable.
    """

    key: str
    path: str
    offset: int = 0
    num_bytes: int = 0
    mtime_ns: int = 0
    label: int = -1
    captions: tuple[str, ...] = ()
    problem: tuple[str, str] | None = None

    @property
    def place(self) -> tuple[str, int, int, int]:
        """Where the bytes lie, and since when: as long as it is the same, they are taken for the same."""
        return self.path, self.offset, self.num_bytes, self.mtime_ns


def caption_texts(record: SourceRecord) -> list[str]:
    """Captions of a record as they are encoded: without white space at their ends, no empty one, none twice."""
    return list(dict.fromkeys(text for caption in record.captions if (text := caption.strip())))


@dataclass(frozen=True)
class Source:
    """A listed source.

    Args:
      kind: "imagefolder", "webdataset" or "metadata".
      root: folder to which the records' paths are relative.
      classes: names of the classes in order of their index, or None.
      num_ignored: files that are no pictures by their extension.
    """

    kind: str
    root: Path
    records: list[SourceRecord] = field(repr=False)
    classes: list[str] | None
    num_ignored: int

    def listing_hash(self) -> str:
        """Hash of what was listed: changes when a file is added, gone, or written anew."""
        digest = hashlib.sha256()
        for r in self.records:
            values = [r.key, r.path, r.offset, r.num_bytes, r.mtime_ns, r.label, r.captions]
            digest.update(json.dumps(values).encode())
        return digest.hexdigest()


def list_source(path: Path, kind: str = "auto") -> Source:
    """List a source.

    Args:
      path: a folder, or one tar file.
      kind: "imagefolder", "webdataset", "metadata", or "auto" to look.
    Raises: SourceError: it is missing, empty, or not of this kind.
    """
    if not path.exists():
        raise SourceError(f"source '{path}': there is no such file or folder. Check --source.")
    if kind == "auto":
        kind = _guess_kind(path)
    if kind != "webdataset" and not path.is_dir():
        raise SourceError(f"source '{path}': a file; needed a folder, or a .tar of the WebDataset convention.")
    source = {"imagefolder": _list_image_folder, "webdataset": _list_webdataset, "metadata": _list_metadata}[kind](path)
    if not source.records:
        raise SourceError(
            f"source '{path}': no pictures found as {kind}. Needed: class folders of pictures, *.tar shards, "
            f"or a {METADATA} with 'file_name'; known extensions are {', '.join(sorted(IMAGE_EXTENSIONS))}."
        )
    return source


def read_record(root: Path, path: str, offset: int, num_bytes: int) -> bytes:
    """Read the bytes of one picture.

    Raises: RecordRejected: unreadable, or shorter than it was listed.
    """
    data = b""
    try:
        # Without O_NONBLOCK, opening a FIFO waits for a writer.
        with open(os.open(root / path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise RecordRejected("decode", "unreadable", f"not a regular file: {path}")
            if offset + num_bytes <= found.st_size:  # a read makes room for all that is asked for
                file.seek(offset)
                data = file.read(num_bytes)
    except OSError as error:
        raise RecordRejected("decode", "unreadable", f"{error.strerror}: {path}") from error
    if len(data) != num_bytes:
        raise RecordRejected("decode", "source_changed", f"{len(data)} bytes of {num_bytes} are left in {path}")
    return data


def _guess_kind(path: Path) -> str:
    if path.is_file():
        return "webdataset"
    if (path / METADATA).is_file():
        return "metadata"
    return "webdataset" if any(path.glob("*.tar")) else "imagefolder"


def _list_image_folder(root: Path) -> Source:
    """Pictures below class folders (label = position of the folder's sorted name, as torchvision's ImageFolder)."""
    files = sorted(_walk(root), key=lambda path: path.split("/"))
    pictures = [path for path in files if Path(path).suffix.lower() in IMAGE_EXTENSIONS]
    classes = sorted({path.split("/")[0] for path in pictures if "/" in path})
    labels = {name: i for i, name in enumerate(classes)}
    records = []
    for path in pictures:
        folder = path.split("/")[0] if "/" in path else None
        problem = ("bad_metadata", "the picture lies outside the class folders") if classes and not folder else None
        records.append(_file_record(root, path, label=labels.get(folder or "", -1), problem=problem))
    return Source("imagefolder", root, records, classes or None, len(files) - len(pictures))


def _usable_key(name: str) -> tuple[str, tuple[str, str] | None]:
    """A name that a table can hold, and the problem of a record whose own name is not one."""
    text = name.encode("utf-8", "backslashreplace").decode()
    if text != name:
        return text[:MAX_KEY_CHARS], ("bad_metadata", "the file name is not UTF-8")
    if len(text) > MAX_KEY_CHARS:
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]  # so that two of them stay two records
        return f"{text[:MAX_KEY_CHARS]}...{digest}", ("bad_metadata", f"the name is longer than {MAX_KEY_CHARS}")
    return text, None


def _walk(root: Path) -> Iterator[str]:
    """Relative paths of all files; a folder that is reached through a link is followed once."""
    seen = {os.path.realpath(root)}
    for folder, names, files in os.walk(root, followlinks=True):
        kept = []
        for name in sorted(names):
            real = os.path.realpath(os.path.join(folder, name))
            if not name.startswith(".") and real not in seen:
                seen.add(real)
                kept.append(name)
        names[:] = kept
        relative = Path(folder).relative_to(root)
        yield from ((relative / name).as_posix() for name in files if not name.startswith("."))


def _file_record(
    root: Path,
    path: str,
    *,
    label: int,
    captions: tuple[str, ...] = (),
    problem: tuple[str, str] | None = None,
) -> SourceRecord:
    key, unusable = _usable_key(path)
    if unusable:
        return SourceRecord(key, key, problem=unusable)
    record = SourceRecord(path, path, label=label, captions=captions, problem=problem)
    try:
        found = os.stat(root / path)
    except OSError as error:
        return replace(record, problem=("unreadable", f"{error.strerror}: {path}"))
    if not stat.S_ISREG(found.st_mode):  # a FIFO or a device need not come to an end
        return replace(record, problem=("unreadable", f"not a regular file: {path}"))
    return replace(record, num_bytes=found.st_size, mtime_ns=found.st_mtime_ns)


def _list_metadata(root: Path) -> Source:
    """A ``metadata.jsonl`` with ``file_name`` and ``captions`` (a list), ``caption`` or ``text``; perhaps ``label``."""
    records, largest_label, seen = [], -1, set()
    if not (root / METADATA).is_file():
        raise SourceError(f"source '{root}': there is no '{METADATA}', which source.kind \"metadata\" needs.")
    with open(root / METADATA, "rb") as lines:
        number = 0
        while line := lines.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise SourceError(
                    f"source '{root / METADATA}', line {number}: longer than {MAX_LINE_BYTES >> 20} MiB. Shorten it."
                )
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8"))
                name = row["file_name"]
                if not isinstance(name, str):
                    raise TypeError(f"'file_name' is {type(name).__name__}")
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise SourceError(
                    f"source '{root / METADATA}', line {number}: needed a JSON object with 'file_name' as text "
                    f"({reprlib.repr(error)})."
                ) from error
            record = _metadata_record(root, name, row)
            if record.key in seen:
                problem = ("duplicate_key", f"line {number} names it again")
                record = SourceRecord(record.key, record.path, problem=problem)
            seen.add(record.key)
            largest_label = max(largest_label, record.label)
            records.append(record)
    classes = [str(i) for i in range(largest_label + 1)] or None
    return Source("metadata", root, records, classes, num_ignored=0)


def _metadata_record(root: Path, name: str, row: dict[str, Any]) -> SourceRecord:
    key, unusable = _usable_key(name)
    if unusable:
        return SourceRecord(key, key, problem=unusable)
    inside = os.path.normpath(name)
    if os.path.isabs(inside) or inside.split(os.sep)[0] == "..":
        return SourceRecord(name, name, problem=("bad_metadata", "file_name leaves the source folder"))
    try:
        label, captions = _label_of(row), _captions_of(row)
    except (TypeError, ValueError) as error:
        return SourceRecord(name, inside, problem=("bad_metadata", str(error)))
    if not _exists(root / inside):
        return SourceRecord(name, inside, problem=("missing_file", f"there is no '{name}'"))
    return replace(_file_record(root, inside, label=label, captions=captions), key=name)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that is too long, or holds a NUL
        return False


def _label_of(row: dict[str, Any]) -> int:
    label = row.get("label", row.get("cls", -1))
    if isinstance(label, bool) or not isinstance(label, int) or not -1 <= label < MAX_CLASSES:
        raise ValueError(f"label {reprlib.repr(label)} is not a class index below {MAX_CLASSES}")
    return label


def _captions_of(row: dict[str, Any]) -> tuple[str, ...]:
    value = next((row[name] for name in ("captions", "caption", "text") if row.get(name) is not None), ())
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"captions {reprlib.repr(value)} are not text")
    if len(texts) > MAX_CAPTIONS:
        raise ValueError(f"{len(texts)} captions, at most {MAX_CAPTIONS} are taken")
    if longest := max((len(text) for text in texts if len(text) > MAX_CAPTION_CHARS), default=0):
        raise ValueError(f"a caption of {longest} characters, at most {MAX_CAPTION_CHARS} are taken")
    for text in texts:
        text.encode("utf-8")  # half a surrogate pair is no text
    return tuple(texts)


def _list_webdataset(path: Path) -> Source:
    """Tar shards of the WebDataset convention: members that share all up to the first dot are one record."""
    tars = [path] if path.is_file() else sorted(path.glob("*.tar"))
    root = path.parent if path.is_file() else path
    records, ignored, largest_label = [], 0, -1
    for tar in tars:
        found, skipped = _list_tar(root, tar)
        records += found
        ignored += skipped
        largest_label = max([largest_label, *(record.label for record in found)])
    classes = [str(i) for i in range(largest_label + 1)] or None
    return Source("webdataset", root, records, classes, ignored)


@dataclass
class _TarRecord:
    """The members of one key, as they come."""

    images: dict[str, TarMember] = field(default_factory=dict)
    texts: dict[str, bytes] = field(default_factory=dict)
    problem: str = ""


def _list_tar(root: Path, tar: Path) -> tuple[list[SourceRecord], int]:
    groups: dict[str, _TarRecord] = {}
    ignored = 0
    with open(tar, "rb") as file:
        for member in tar_members(file, tar):
            prefix, extension = base_plus_ext(member.name) if len(member.name) <= MAX_TAR_NAME else ("", "")
            extension = (extension or "").lower()
            is_image = f".{extension.split('.')[-1]}" in IMAGE_EXTENSIONS
            if not prefix or not (is_image or extension in TEXT_EXTENSIONS):
                ignored += 1  # never opened, whatever it is
                continue
            group = groups.setdefault(prefix, _TarRecord())
            if extension in (group.images if is_image else group.texts):
                group.problem = f"the key has more than one .{extension[:40]}"
            elif is_image:
                if len(group.images) < 2:  # two are one too many already
                    group.images[extension] = member
            elif member.size > MAX_TEXT_BYTES:
                group.problem = f".{extension} has {member.size} bytes, at most {MAX_TEXT_BYTES} are read"
            else:
                file.seek(member.offset)
                group.texts[extension] = file.read(member.size)
        mtime_ns = os.fstat(file.fileno()).st_mtime_ns
    path = tar.relative_to(root).as_posix()
    # A prefix is no path: it often starts again in every tar, so the tar's name stands before it.
    found = [_tar_record(f"{tar.stem}/{prefix}", path, mtime_ns, group) for prefix, group in groups.items()]
    return [record for record in found if record], ignored


def _tar_record(key: str, path: str, mtime_ns: int, group: _TarRecord) -> SourceRecord | None:
    """The record of one key; None where it has no picture."""
    if not group.images:
        return None
    key, problem = _usable_key(key)
    image = next(iter(group.images.values()))
    label, captions = -1, ()
    try:
        label, captions = _tar_texts(group.texts)
    except (ValueError, TypeError, RecursionError) as error:
        problem = problem or ("bad_metadata", str(error))
    if len(group.images) > 1:
        problem = ("bad_metadata", f"several pictures for one key: {', '.join(e[:40] for e in group.images)}")
    if group.problem:
        problem = ("bad_metadata", group.problem)
    if image.is_sparse:
        problem = ("bad_metadata", "a sparse member, whose bytes do not lie together")
    return SourceRecord(key, path, image.offset, image.size, mtime_ns, label, captions, problem)


def _tar_texts(members: dict[str, bytes]) -> tuple[int, tuple[str, ...]]:
    """Label and captions of a record: ``.cls`` and ``.txt``, else what ``.json`` says."""
    row = json.loads(members["json"]) if "json" in members else {}
    if not isinstance(row, dict):
        raise ValueError(".json is not an object")
    label = _label_of({"label": int(members["cls"])} if "cls" in members else row)
    captions = _captions_of({"text": members["txt"].decode("utf-8")} if "txt" in members else row)
    return label, captions
