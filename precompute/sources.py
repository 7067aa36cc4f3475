"""Where raw pictures and captions come from: an image folder, WebDataset tars, or a folder with ``metadata.jsonl``.

A source is listed, never opened: each record says where its bytes lie, so that any of them can be read at random,
later, from any thread. Keys are names only; no path is ever made from one.
"""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from webdataset.tariterators import base_plus_ext

from ..datasets.errors import RecordRejected, SourceError

IMAGE_EXTENSIONS = frozenset(
    [".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".avif", ".jfif"]
)
METADATA = "metadata.jsonl"
MAX_CLASSES = 1_000_000  # a larger label is a mistake, and would fill the memory with names


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
    try:
        with open(root / path, "rb") as file:
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


def _is_text(name: str) -> bool:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


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
    if not _is_text(path):
        name = path.encode("utf-8", "backslashreplace").decode()
        return SourceRecord(name, name, problem=("bad_metadata", "the file name is not UTF-8"))
    record = SourceRecord(path, path, label=label, captions=captions, problem=problem)
    try:
        found = os.stat(root / path)
    except OSError as error:
        return replace(record, problem=("unreadable", f"{error.strerror}: {path}"))
    if not os.path.isfile(root / path):
        return replace(record, problem=("unreadable", f"not a regular file: {path}"))
    return replace(record, num_bytes=found.st_size, mtime_ns=found.st_mtime_ns)


def _list_metadata(root: Path) -> Source:
    """A ``metadata.jsonl`` with ``file_name`` and ``captions`` (a list), ``caption`` or ``text``; perhaps ``label``."""
    records, largest_label, seen = [], -1, set()
    if not (root / METADATA).is_file():
        raise SourceError(f"source '{root}': there is no '{METADATA}', which source.kind \"metadata\" needs.")
    with open(root / METADATA, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8"))
                name = row["file_name"]
            except (ValueError, KeyError, TypeError) as error:
                raise SourceError(
                    f"source '{root / METADATA}', line {number}: needed a JSON object with 'file_name' ({error!r})."
                ) from error
            record = _metadata_record(root, str(name), row)
            if record.key in seen:
                problem = ("duplicate_key", f"line {number} names it again")
                record = SourceRecord(record.key, record.path, problem=problem)
            seen.add(record.key)
            largest_label = max(largest_label, record.label)
            records.append(record)
    classes = [str(i) for i in range(largest_label + 1)] or None
    return Source("metadata", root, records, classes, num_ignored=0)


def _metadata_record(root: Path, name: str, row: dict[str, Any]) -> SourceRecord:
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
        raise ValueError(f"label {label!r} is not a class index below {MAX_CLASSES}")
    return label


def _captions_of(row: dict[str, Any]) -> tuple[str, ...]:
    value = next((row[name] for name in ("captions", "caption", "text") if row.get(name) is not None), ())
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"captions {value!r} are not text")
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


def _list_tar(root: Path, tar: Path) -> tuple[list[SourceRecord], int]:
    groups: dict[str, dict[str, tuple[int, int]]] = {}
    texts: dict[str, dict[str, bytes]] = {}
    ignored = 0
    try:
        with tarfile.open(tar, "r:") as archive:
            for member in archive:
                prefix, extension = base_plus_ext(member.name)
                if not member.isfile() or prefix is None or extension is None:
                    continue
                extension = extension.lower()
                if f".{extension.split('.')[-1]}" in IMAGE_EXTENSIONS:
                    groups.setdefault(prefix, {})[extension] = (member.offset_data, member.size)
                elif extension in ("cls", "txt", "json"):
                    extracted = archive.extractfile(member)
                    assert extracted is not None
                    texts.setdefault(prefix, {})[extension] = extracted.read()
                else:
                    ignored += 1
    except (tarfile.TarError, OSError, EOFError) as error:
        raise SourceError(
            f"source '{tar}': not a readable, uncompressed tar file ({error}). Restore or remove it."
        ) from error
    mtime_ns = tar.stat().st_mtime_ns
    records = []
    path = tar.relative_to(root).as_posix()
    for prefix, images in groups.items():
        key = f"{tar.stem}/{prefix}"  # prefixes often start again in every tar
        extension, (offset, size) = next(iter(images.items()))
        label, captions, problem = -1, (), None
        try:
            label, captions = _tar_texts(texts.get(prefix, {}))
        except (ValueError, TypeError) as error:
            problem = ("bad_metadata", str(error))
        if len(images) > 1:
            problem = ("bad_metadata", f"several pictures for one key: {', '.join(images)}")
        records.append(SourceRecord(key, path, offset, size, mtime_ns, label, captions, problem))
    return records, ignored


def _tar_texts(members: dict[str, bytes]) -> tuple[int, tuple[str, ...]]:
    """Label and captions of a record: ``.cls`` and ``.txt``, else what ``.json`` says."""
    row = json.loads(members["json"]) if "json" in members else {}
    if not isinstance(row, dict):
        raise ValueError(".json is not an object")
    label = _label_of({"label": int(members["cls"])} if "cls" in members else row)
    captions = (members["txt"].decode("utf-8"),) if "txt" in members else _captions_of(row)
    return label, captions
