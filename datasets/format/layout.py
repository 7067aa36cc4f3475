"""Files of a store, and what one revision adds to it: arrays with shards and chunks, and shard tasks. Pure functions.

All revisions share the arrays at the root: a later one adds rows in shards of its own, or arrays. The manifest and the
tables of each are in its own folder. Tokens of all captions follow one another, so nothing is padded; no
caption straddles two shards, so each shard can be encoded alone, and each caption is one contiguous view.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..disk.cached import cached_property
from ..disk.hashing import canonical_json
from ..disk.spill import map_array
from .buckets import bucket_size
from .row_layout import (
    BUCKETS,
    CAPTION_PART,
    EMBEDDINGS,
    LATENTS,
    POOLED,
    Row,
    bucket_part,
    buckets_of,
    caption_folder,
    caption_rows,
    larger_shard,
    null_array,
    pooled_rows,
    row_arrays,
    row_bytes,
    shard_rows,
)
from .schema import StoreSpec, TextSpec
from .zarr_shard import ArrayLayout, RowRange

MANIFEST = "manifest.json"
GROUP = "zarr.json"
RECORDS = "records.parquet"
CAPTIONS = "captions.parquet"
SOURCES = "sources.parquet"
LOCAL = "local.json"
INDEX = "index"  # folder of the numbers that training reads
TWIN = "twin"  # folder of the second copy of a revision's files
PLAN = "plan"  # folders that exist while a revision is made
PLAN_FILE = "plan.json"
COMMITS = "commits"
JOURNAL = "journal"  # what a program has added so far with ``create_store``
REVISIONS = "revisions"
LEASES = "leases"
REMOTE_ABOUT = "about.json"  # next to the local part of a store at a URL
# What a repository of a hub holds beside a store, and where a download of it keeps its own notes; not of the store.
HUB_FILES = frozenset(["README.md", "contact-sheet.png", ".gitattributes"])
HUB_CACHE = ".cache/huggingface/"

NULL_PART = "null_caption"
TOKEN_CHUNK_BYTES = 1 << 16  # of small tokens in a Zarr chunk

Task = tuple[str, int]
"""A part of a revision, and the number of a shard in it."""


def revision_prefix(revision: int) -> str:
    """Folder of a revision's tables within the store, with a slash at its end."""
    return f"{REVISIONS}/{revision:06d}/"


def revision_of(path: str) -> int | None:
    """The revision whose folder a path is in; None outside of these folders."""
    match = re.match(rf"{REVISIONS}/([0-9]{{6,9}})/", path)
    return int(match[1]) if match and int(match[1]) and path.startswith(revision_prefix(int(match[1]))) else None


def revisions_with(root: Path, *names: str) -> list[int]:
    """Revisions of a store that have one of some files, in order."""
    paths = (path for name in names for path in root.glob(f"{REVISIONS}/*/{name}") if path.is_file())
    return sorted({n for path in paths if (n := revision_of(path.relative_to(root).as_posix()))})


def commit_path(revision: int, part: str, shard: int) -> str:
    """Path of a shard task's commit record within the store."""
    return f"{revision_prefix(revision)}{COMMITS}/{part}/{shard:06d}.json"


def rows_path(revision: int, part: str, shard: int) -> str:
    """Path of the results of its rows, beside the commit record."""
    return f"{revision_prefix(revision)}{COMMITS}/{part}/{shard:06d}.rows"


def index_path(revision: int, name: str) -> str:
    """Path of an array of a revision's index within the store."""
    return f"{revision_prefix(revision)}{INDEX}/{name}.bin"


def zarr_files(spec: StoreSpec, arrays: Iterable[ArrayLayout]) -> dict[str, bytes]:
    """Content of every ``zarr.json`` by path: it follows from the spec and the arrays of a store.

    leandit reads none of them: they are for zarr-python, tensorstore and other readers.
    """

    def group(**attributes: object) -> bytes:
        return canonical_json({"zarr_format": 3, "node_type": "group", "attributes": attributes})

    files = {GROUP: group(leandit=spec.model_dump()), f"{REVISIONS}/{GROUP}": group()}
    for layout in arrays:  # every folder between the root and an array is a group
        folders = layout.path.split("/")
        files |= {"/".join([*folders[:end], GROUP]): group() for end in range(1, len(folders))}
        files[f"{layout.path}/{GROUP}"] = canonical_json(layout.metadata())
    return files


def is_image_task(task: Task) -> bool:
    """Whether a task encodes images, not captions."""
    return task[0].startswith(f"{BUCKETS}/")


def next_row(spec: StoreSpec, bucket: str, arrays: Mapping[str, ArrayLayout]) -> int:
    """First row that the next revision adds to a bucket: the next shard of the latents; 0 for a new bucket."""
    latents = arrays.get(f"{bucket_part(bucket)}/{spec.latent.array}")
    return latents.next_shard_row() if latents else 0


def place_captions(num_tokens: np.ndarray, rows: int, first_row: int = 0) -> np.ndarray:
    """First row of each caption's tokens: consecutive, but no caption straddles two shards.

    A caption that does not fit into the rest of a shard starts the next one; the rows left over hold NaN.

    Args:
      num_tokens: (num_captions,) of each, at least one and at most ``rows``.
      rows: of a shard.
      first_row: of the first caption, which begins a shard.
    Returns: (num_captions,) int64, mapped.
    """
    starts = map_array(len(num_tokens), "int64", "places of captions")
    first, row = 0, first_row
    while first < len(starts):  # once a shard
        following = num_tokens[first : first + rows]
        ends = np.cumsum(following, dtype=np.int64)
        count = int(np.searchsorted(ends, rows, side="right"))
        assert count, f"a caption of {following[0]} tokens does not fit into a shard of {rows}"
        starts[first : first + count] = row + ends[:count] - following[:count]
        first, row = first + count, row + rows
    return starts


@dataclass(frozen=True)
class CaptionLayout:
    """The captions that a revision adds to the arrays of one text encoder.

    Args:
      name: of the text encoder; empty for that of ``[text]``.
      num_tokens: (num_captions,) stored tokens of each caption.
      shard_mib: size at which a shard is full.
      revision: that adds them.
      first_caption: id of the first one.
      before: arrays of earlier revisions, by path; empty if the text encoder is new.
      fixed_shard_rows: rows of a shard of its first array, where it was decided before the captions were known; else 0.
    """

    name: str
    spec: TextSpec
    num_tokens: np.ndarray
    shard_mib: int
    codec: str
    revision: int = 1
    first_caption: int = 0
    before: Mapping[str, ArrayLayout] = field(default_factory=dict)
    fixed_shard_rows: int = 0

    @cached_property
    def starts(self) -> np.ndarray:
        """(num_captions,) first row of each caption's tokens; of pooled vectors alone, its row."""
        if not self.spec.has_tokens:
            return self._first_row(POOLED) + np.arange(len(self.num_tokens))
        return place_captions(self.num_tokens, self._shard_rows()[0], self._first_row(EMBEDDINGS))

    @cached_property
    def arrays(self) -> list[ArrayLayout]:
        """Arrays of which a task writes a shard: tokens (rows, D) and pooled (captions, P).

        For int8 tokens also scales (rows, layers, groups).
        """
        last, layouts = self.starts[-1:], []
        for name, row in caption_rows(self.spec).items():
            end = int(last[0] + self.num_tokens[-1]) if name != POOLED else int(pooled_rows(self.spec, last)[0]) + 1
            path, added = f"{self._folder}/{name}", RowRange(self.revision, self._first_row(name), end)
            if before := self.before.get(path):
                layouts.append(before.grown(added))
            else:
                layouts.append(_layout(path, row, [added], *self._sizes(name), self.codec))
        return layouts

    @cached_property
    def null(self) -> list[ArrayLayout]:
        """The same as ``arrays`` for the null caption at full length: one shard of one chunk each."""
        counts = {name: 1 if name == POOLED else self.spec.max_tokens for name in caption_rows(self.spec)}
        return [
            _layout(f"{self._folder}/{null_array(name)}", row, [RowRange(self.revision, 0, n)], n, n, "none")
            for (name, row), n in zip(caption_rows(self.spec).items(), counts.values(), strict=True)
        ]

    def captions_of(self, shard: int) -> range:
        """Captions of a shard, counted from the first one that the revision adds."""
        rows = self.arrays[0].shard_rows
        first, last = np.searchsorted(self.starts, [shard * rows, (shard + 1) * rows])
        return range(int(first), int(last))

    def starts_of(self, caption: int) -> list[int]:
        """First row of a caption in each of ``arrays``; counted as in ``captions_of``."""
        start = self.starts[caption : caption + 1]
        pooled = int(pooled_rows(self.spec, start)[0])
        return [pooled if name == POOLED else int(start[0]) for name in caption_rows(self.spec)]

    @property
    def _folder(self) -> str:
        return caption_folder(self.name)

    def _first_row(self, name: str) -> int:
        """First row that the revision adds to an array: its next shard."""
        before = self.before.get(f"{self._folder}/{name}")
        return before.next_shard_row() if before else 0

    def _sizes(self, name: str) -> tuple[int, int]:
        """Rows of a shard and of an inner chunk of an array. Tokens and scales have the same."""
        if name != POOLED:
            return self._shard_rows()
        if self.spec.has_tokens:  # of full length: a shard has the captions of a shard of tokens
            return self._shard_rows()[0] // self.spec.max_tokens, 1
        if self.fixed_shard_rows:
            return self.fixed_shard_rows, 1
        return shard_rows(row_bytes(caption_rows(self.spec)[POOLED]), self.shard_mib, len(self.num_tokens)), 1

    def _shard_rows(self) -> tuple[int, int]:
        """Rows of a shard and of an inner chunk of the tokens."""
        if before := self.before.get(f"{self._folder}/{EMBEDDINGS}"):
            return before.shard_rows, before.chunk_rows
        num_bytes, longest = row_bytes(caption_rows(self.spec)[EMBEDDINGS]), self.spec.max_tokens
        if self.spec.full_length:  # whole captions
            if self.fixed_shard_rows:
                return self.fixed_shard_rows, longest
            return shard_rows(num_bytes * longest, self.shard_mib, len(self.num_tokens)) * longest, longest
        chunk_rows = max(1, TOKEN_CHUNK_BYTES // num_bytes)
        if self.fixed_shard_rows:
            return self.fixed_shard_rows, chunk_rows
        # At least one caption of full length fits, since no caption straddles two shards.
        rows = -(-max((self.shard_mib << 20) // num_bytes, longest) // chunk_rows) * chunk_rows
        return larger_shard(rows, num_bytes, self._num_rows), chunk_rows

    @cached_property
    def _num_rows(self) -> int:
        return int(np.sum(self.num_tokens, dtype=np.int64))


class Part(NamedTuple):
    """Arrays of which each task writes one shard.

    Args:
      name: of the part, a path.
      shards: numbers of the shards that the revision writes, in order.
      captions: layout of a text encoder; None for images.
      is_null: it holds the null caption.
      bucket: of images; empty for captions.
      groups: arrays of records: the latents by "", each feature and companion by its name. Each group has checksums
        of its own.
    """

    name: str
    shards: Sequence[int]
    captions: CaptionLayout | None = None
    is_null: bool = False
    bucket: str = ""
    groups: Mapping[str, list[ArrayLayout]] = {}

    @property
    def arrays(self) -> list[ArrayLayout]:
        """All arrays of the part."""
        if self.captions:
            return self.captions.null if self.is_null else self.captions.arrays
        return [layout for layouts in self.groups.values() for layout in layouts]

    def items(self, shard: int) -> range:
        """What a task has: rows of the bucket; captions, counted from the first of the part; 0 for a null caption."""
        if self.is_null:
            return range(1)
        return self.captions.captions_of(shard) if self.captions else self.arrays[0].rows_of(shard)


@dataclass(frozen=True)
class RevisionLayout:
    """What one revision adds to a store: rows and captions to the arrays of the revision before, and new arrays.

    Rows that a revision adds begin at the next shard, so shards never change. A new text encoder, feature or companion
    has rows for all captions or records, earlier ones too.

    Args:
      spec: of the revision.
      revision: its number, from 1.
      new_rows: records that it adds to each bucket.
      num_tokens: (num_captions,) stored tokens of all captions, by text encoder.
      first_caption: id of the first caption that it adds.
      before: arrays of the revision before, by path.
      shard_rows: rows of a shard, by path of the first array of a part, where they were decided before the number of
        records was known; all others follow from the plan.
    """

    spec: StoreSpec
    revision: int
    new_rows: Mapping[str, int]
    num_tokens: Mapping[str, np.ndarray]
    first_caption: int = 0
    before: Mapping[str, ArrayLayout] = field(default_factory=dict)
    shard_rows: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def parts(self) -> dict[str, Part]:
        """All parts by name, in the order in which they are done: one text encoder after the other, then images."""
        parts = [part for one in self.spec.text_encoders for part in self._caption_parts(one.name)]
        for bucket in sorted({*buckets_of(self.before), *self.new_rows}, key=bucket_size):
            parts += self._bucket_parts(bucket)
        return {part.name: part for part in parts}

    def _caption_parts(self, name: str) -> Iterator[Part]:
        """The parts of a text encoder: all captions and the null one if it is new, else the captions added."""
        spec, suffix = self.spec.text_encoder_of(name).spec, f"/{name}" if name else ""
        array = next(iter(caption_rows(spec)))
        null = null_array(array)
        is_known = f"{caption_folder(name)}/{null}" in self.before
        first = self.first_caption if is_known else 0
        counts = self.num_tokens[name][first:]
        sizes = self.spec.shard_mib, self.spec.codec, self.revision
        fixed_shard_rows = self.shard_rows.get(f"{caption_folder(name)}/{array}", 0)
        layout = CaptionLayout(name, spec, counts, *sizes, first, self.before, fixed_shard_rows)
        if not is_known:
            yield Part(NULL_PART + suffix, [0], layout, is_null=True)
        if len(counts):
            yield Part(CAPTION_PART + suffix, layout.arrays[0].shards_of(self.revision), layout)

    def _bucket_parts(self, bucket: str) -> Iterator[Part]:
        """Parts of a bucket: groups of which the revision adds the same shards are encoded together."""
        began: dict[int, list[str]] = {}  # groups by the revision that began them
        for group in (LATENTS, *self.spec.groups):
            known = self._known(bucket, group)
            began.setdefault(known.row_ranges[0].revision if known else self.revision, []).append(group)
        ranges, together = self._ranges_of(bucket), dict[tuple[int, ...], dict[str, list[ArrayLayout]]]()
        for revision, groups in sorted(began.items()):
            rows = self._shard_rows(bucket, groups)
            since = [RowRange(max(one.revision, revision), one.first, one.end) for one in ranges]
            layouts = {
                group: [
                    _layout(f"{bucket_part(bucket)}/{path}", row, since, rows, 1, self.spec.codec)
                    for path, row in row_arrays(self.spec, bucket, group).items()
                ]
                for group in groups
            }
            if shards := layouts[groups[0]][0].shards_of(self.revision):
                together.setdefault((rows, *shards), {}).update(layouts)
        for (_, *shards), layouts in together.items():
            first = next(iter(layouts))
            yield Part(bucket_part(bucket) + (f"/{first}" if first else ""), shards, bucket=bucket, groups=layouts)

    def _known(self, bucket: str, group: str) -> ArrayLayout | None:
        """The first array of a group, as the revision before has it."""
        return self.before.get(f"{bucket_part(bucket)}/{next(iter(row_arrays(self.spec, bucket, group)))}")

    def _shard_rows(self, bucket: str, groups: Sequence[str]) -> int:
        """Rows of a shard of groups that are written together.

        As they have them; else as many as fit ``shard_mib`` in the largest array, more for a large bucket, at most
        those of the latents. A power of two: what a later revision adds begins at a shard in every array of the bucket.
        """
        if first := self._known(bucket, groups[0]):
            return first.shard_rows
        path = next(iter(row_arrays(self.spec, bucket, groups[0])))
        if fixed := self.shard_rows.get(f"{bucket_part(bucket)}/{path}"):
            return fixed
        largest = max(row_bytes(row) for group in groups for row in row_arrays(self.spec, bucket, group).values())
        ranges, latents = self._ranges_of(bucket), self._known(bucket, LATENTS)
        fitting = shard_rows(largest, self.spec.shard_mib, ranges[-1].end if ranges else 0)
        power = 1 << (fitting.bit_length() - 1)
        return min(power, latents.shard_rows) if latents else power

    def _ranges_of(self, bucket: str) -> list[RowRange]:
        """Rows of the latents of a bucket that each revision added."""
        latents = self._known(bucket, LATENTS)
        ranges = list(latents.row_ranges) if latents else []
        if count := self.new_rows.get(bucket):
            first = self.first_row(bucket)
            ranges.append(RowRange(self.revision, first, first + count))
        return ranges

    def first_row(self, bucket: str) -> int:
        """First row that the revision adds to a bucket, as ``next_row``."""
        return next_row(self.spec, bucket, self.before)

    @cached_property
    def arrays(self) -> dict[str, ArrayLayout]:
        """All arrays of the store with this revision, by their path."""
        return {**self.before, **{layout.path: layout for part in self.parts.values() for layout in part.arrays}}

    @cached_property
    def task_of_file(self) -> dict[str, Task]:
        """The task that writes a shard, by the path of its file."""
        return {
            array.shard_path(shard): (part.name, shard)
            for part in self.parts.values()
            for shard in part.shards
            for array in part.arrays
        }

    def num_bytes(self, tasks: Iterable[Task]) -> int:
        """Bytes of the shards of some tasks, uncompressed."""
        arrays = ((array, shard) for part, shard in tasks for array in self.parts[part].arrays)
        return sum(len(array.rows_of(shard)) * array.row_bytes for array, shard in arrays)

    def tasks(self) -> list[Task]:
        """All tasks of the revision, in the order in which they are done."""
        return [(part.name, shard) for part in self.parts.values() for shard in part.shards]

    def counted_rows(self, part: str, shard: int) -> range:
        """Rows of a task whose records no other task of the revision has before it: to count each record once."""
        one = self.parts[part]
        rows = one.items(shard)
        if LATENTS in one.groups:
            return rows
        return range(rows.start, max(rows.start, min(rows.stop, self.first_row(one.bucket))))


def _layout(path: str, row: Row, ranges: Sequence[RowRange], rows: int, chunk_rows: int, codec: str) -> ArrayLayout:
    shape, dtype = row
    return ArrayLayout(path, (ranges[-1].end, *shape), dtype, rows, chunk_rows, codec, tuple(ranges))
