"""What has been added to a store that is not sealed: keys, captions, shards, and how far each open shard is filled.

One SQLite file in the revision's folder. It is committed after the rows that it counts are synced, so that at any time
it describes the first so many calls of ``add``, all of them whole. What a crash leaves behind a commit is not counted,
and is written again. Memory does not grow with the store.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
import xxhash

from ...errors import DamageError, ResourceError
from ..disk.hashing import canonical_json
from ..disk.spill import BATCH_ROWS
from ..format.schema import FileEntry, LatentStatistics, StoreSpec
from ..revisions.writer import WrittenShard

FILE = "added.sqlite"
CACHE_KIB = 1 << 16  # of pages in memory
TABLES = """
CREATE TABLE IF NOT EXISTS store (spec TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS records (
    position INTEGER PRIMARY KEY, key TEXT NOT NULL, is_duplicate INTEGER NOT NULL, bucket TEXT, row INTEGER NOT NULL,
    label INTEGER NOT NULL, caption_ids BLOB NOT NULL, height_px INTEGER, width_px INTEGER,
    stage TEXT, reason TEXT, detail TEXT, UNIQUE (key, is_duplicate));
CREATE TABLE IF NOT EXISTS captions (
    id INTEGER PRIMARY KEY, hash BLOB NOT NULL UNIQUE, text TEXT NOT NULL, num_tokens BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS open_shards (
    part TEXT PRIMARY KEY, shard_rows INTEGER NOT NULL, shard INTEGER NOT NULL, num_items INTEGER NOT NULL,
    files TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS shards (
    part TEXT NOT NULL, shard INTEGER NOT NULL, files TEXT NOT NULL, statistics TEXT, PRIMARY KEY (part, shard));
"""


class AddedRecord(NamedTuple):
    """A record as the journal has it: a row of its bucket, or why it was rejected (then ``bucket`` is None)."""

    key: str
    is_duplicate: bool = False
    bucket: str | None = None
    row: int = -1
    label: int = -1
    caption_ids: bytes = b""  # int32, little-endian
    height_px: int | None = None
    width_px: int | None = None
    stage: str | None = None
    reason: str | None = None
    detail: str | None = None


class AddedCaption(NamedTuple):
    """A caption: its text, and its tokens by each text encoder (int32, little-endian)."""

    text: str
    num_tokens: bytes


class OpenShard(NamedTuple):
    """How far the open shard of a part is filled.

    Args:
      shard_rows: rows of the first array in each shard of the part.
      shard: its number.
      num_items: its records or captions.
      files: bytes and XXH3-64 of what counts of each file of its rows.
    """

    shard_rows: int
    shard: int
    num_items: int
    files: list[tuple[int, str]]


class Journal:
    """The journal of a store. What is noted waits in memory until it is committed.

    Args:
      folder: of the journal, which exists.
    Raises: DamageError: its file is not readable.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self._positions: dict[str, int] = {}  # of records that wait, by key
        self._duplicates: set[str] = set()
        self._records: list[AddedRecord] = []
        self._caption_ids: dict[str, int] = {}  # of captions that wait
        self._captions: list[AddedCaption] = []
        self._shards: list[tuple[str, int, WrittenShard]] = []
        with self._named_errors():
            # Another lock keeps other writers out. SQLite's own do not work on some network file systems.
            uri = f"file:{quote(str(self.path.absolute()))}?nolock=1"
            self._sqlite = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
            self._sqlite.execute("PRAGMA journal_mode = TRUNCATE")
            self._sqlite.execute("PRAGMA synchronous = FULL")
            self._sqlite.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
            self._sqlite.executescript(TABLES)
            self._num_records = self._count("records")
            self._num_captions = self._count("captions")

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Turn an error of SQLite into one that says what to do."""
        try:
            yield
        except sqlite3.OperationalError as error:
            raise ResourceError(
                f"file '{self.path}': {error}. Check space and permissions, then run the same program again: it "
                "continues."
            ) from error
        except sqlite3.DatabaseError as error:
            raise DamageError(
                f"file '{self.path}': {error}. What was added cannot be read. Remove the store, and write it again."
            ) from error

    def _count(self, table: str) -> int:
        return self._sqlite.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0]

    def _rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._named_errors():
            return self._sqlite.execute(query, values).fetchall()

    @property
    def num_records(self) -> int:
        """Records, those that wait included."""
        return self._num_records + len(self._records)

    @property
    def num_waiting(self) -> int:
        """Records and captions that wait in memory."""
        return len(self._records) + len(self._captions)

    def close(self) -> None:
        """Close the file; what was not committed is lost."""
        self._sqlite.close()

    # Noting, until the next commit.

    def add_record(self, record: AddedRecord) -> None:
        """Note a record at the next position; of a key that was rejected as a duplicate before, no second time."""
        if record.is_duplicate:
            query = "SELECT 1 FROM records WHERE key = ? AND is_duplicate = 1"
            if record.key in self._duplicates or self._rows(query, record.key):
                return
            self._duplicates.add(record.key)
        else:
            self._positions[record.key] = self.num_records
        self._records.append(record)

    def add_caption(self, caption: AddedCaption) -> int:
        """Note a new caption. Returns: its id."""
        number = self._num_captions + len(self._captions)
        self._caption_ids[caption.text] = number
        self._captions.append(caption)
        return number

    def add_shard(self, part: str, shard: int, written: WrittenShard) -> None:
        """Note a full shard, whose files are on disk."""
        self._shards.append((part, shard, written))

    def commit(self, open_shards: Mapping[str, OpenShard]) -> None:
        """Make all that was noted last.

        Args:
          open_shards: how far the open shard of each part is filled, in synced files.
        Raises: ResourceError: nothing was committed.
        """
        first_record = self._num_records
        first_caption = self._num_captions
        with self._named_errors(), self._sqlite:
            insert = self._sqlite.executemany
            self._sqlite.execute("BEGIN")
            placeholders = ", ".join("?" * (1 + len(AddedRecord._fields)))
            records = ((position, *record) for position, record in enumerate(self._records, first_record))
            insert(f"INSERT INTO records VALUES ({placeholders})", records)
            captions = (
                (number, _text_hash(caption.text), *caption)
                for number, caption in enumerate(self._captions, first_caption)
            )
            insert("INSERT INTO captions VALUES (?, ?, ?, ?)", captions)
            insert("INSERT INTO shards VALUES (?, ?, ?, ?)", (_shard_row(*shard) for shard in self._shards))
            rows = (_open_shard_row(part, open_shard) for part, open_shard in open_shards.items())
            insert("INSERT OR REPLACE INTO open_shards VALUES (?, ?, ?, ?, ?)", rows)
        self._num_records += len(self._records)
        self._num_captions += len(self._captions)
        for waiting in (self._records, self._captions, self._shards, self._positions, self._caption_ids):
            waiting.clear()
        self._duplicates.clear()

    def declare(self, spec: StoreSpec) -> None:
        """Note what the store holds, and commit it."""
        with self._named_errors():
            self._sqlite.execute("INSERT INTO store VALUES (?)", (canonical_json(spec.model_dump()).decode(),))

    # Looking.

    def spec(self) -> StoreSpec | None:
        """What the store was declared to hold; None if that was not committed."""
        rows = self._rows("SELECT spec FROM store")
        return StoreSpec.model_validate_json(rows[0][0]) if rows else None

    def position_of(self, key: str) -> int | None:
        """Position of the record with a key; None if there is none."""
        if key in self._positions:
            return self._positions[key]
        rows = self._rows("SELECT position FROM records WHERE key = ? AND is_duplicate = 0", key)
        return rows[0][0] if rows else None

    def caption_id(self, text: str) -> int | None:
        """Id of a caption; None if it is new."""
        if text in self._caption_ids:
            return self._caption_ids[text]
        rows = self._rows("SELECT id FROM captions WHERE hash = ?", _text_hash(text))
        return rows[0][0] if rows else None

    # What is committed.

    def keys(self) -> Iterator[str]:
        """The keys of all records that are not rejected, in the order in which they were added."""
        for rows in self._batches("SELECT key FROM records WHERE bucket IS NOT NULL ORDER BY position"):
            for (key,) in rows:
                yield key

    def record_batches(self) -> Iterator[list[AddedRecord]]:
        """All records in order, BATCH_ROWS at a time."""
        columns = ", ".join(AddedRecord._fields)
        for rows in self._batches(f"SELECT {columns} FROM records ORDER BY position"):
            yield [AddedRecord(*row) for row in rows]

    def caption_batches(self) -> Iterator[list[AddedCaption]]:
        """All captions in the order of their ids, BATCH_ROWS at a time."""
        for rows in self._batches("SELECT text, num_tokens FROM captions ORDER BY id"):
            yield [AddedCaption(*row) for row in rows]

    def _batches(self, query: str) -> Iterator[list[tuple[Any, ...]]]:
        with self._named_errors():
            cursor = self._sqlite.execute(query)
            while rows := cursor.fetchmany(BATCH_ROWS):
                yield rows

    def num_stored(self) -> dict[str, int]:
        """Records of each bucket."""
        query = "SELECT bucket, COUNT(*) FROM records WHERE bucket IS NOT NULL GROUP BY bucket ORDER BY bucket"
        return dict(self._rows(query))  # pyright: ignore[reportArgumentType]

    def rejects(self) -> dict[str, int]:
        """Rejected records by reason."""
        query = "SELECT reason, COUNT(*) FROM records WHERE reason IS NOT NULL GROUP BY reason ORDER BY reason"
        return dict(self._rows(query))  # pyright: ignore[reportArgumentType]

    def open_shards(self) -> dict[str, OpenShard]:
        """The open shard of each part."""
        shards = {}
        query = "SELECT part, shard_rows, shard, num_items, files FROM open_shards"
        for part, shard_rows, shard, num_items, files in self._rows(query):
            entries = []
            for entry in files.split():
                size, digest = entry.split(":")
                entries.append((int(size), digest))
            shards[part] = OpenShard(shard_rows, shard, num_items, entries)
        return shards

    def shards(self) -> Iterator[tuple[str, int, WrittenShard]]:
        """All full shards: part, number and files."""
        for rows in self._batches("SELECT part, shard, files, statistics FROM shards ORDER BY part, shard"):
            for part, shard, files, statistics in rows:
                entries = []
                for entry in files.split():
                    size, digest, path = entry.split(":")
                    entries.append(FileEntry(path=path, bytes=int(size), xxh3_128=digest))
                of_latents = LatentStatistics.model_validate_json(statistics) if statistics else None
                yield part, shard, WrittenShard(entries, of_latents)


def _open_shard_row(part: str, open_shard: OpenShard) -> tuple[str, int, int, int, str]:
    files = " ".join(f"{size}:{digest}" for size, digest in open_shard.files)
    return part, open_shard.shard_rows, open_shard.shard, open_shard.num_items, files


def _shard_row(part: str, shard: int, written: WrittenShard) -> tuple[str, int, str, str | None]:
    files = " ".join(f"{entry.bytes}:{entry.xxh3_128}:{entry.path}" for entry in written.files)
    return part, shard, files, written.statistics.model_dump_json() if written.statistics else None


def int32_bytes(numbers: Sequence[int]) -> bytes:
    """Numbers as the journal has them."""
    return np.array(numbers, "<i4").tobytes()


def _text_hash(text: str) -> bytes:
    return xxhash.xxh3_128_digest(text.encode())
