"""The layout of a store: paths, arrays with their shard and chunk sizes, and the list of shard tasks. Pure functions.

All revisions share the arrays at the root: a later one adds rows in shards of its own, or arrays. The manifest and the
tables of each lie in a folder of its own.
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
from .buckets import bucket_size
from .caption_layout import (
    CAPTION_PART,
    NULL_EMBEDDING,
    NULL_PART,
    NULL_POOLED,
    CaptionLayout,
    caption_arrays,
    caption_folder,
)
from .row_layout import BUCKETS, LATENTS, bucket_part, row_arrays, row_layouts, shard_rows_of
from .schema import StoreSpec
from .zarr_shard import ArrayLayout, RowRange

MANIFEST = "manifest.json"
GROUP = "zarr.json"
RECORDS = "records.parquet"
CAPTIONS = "captions.parquet"
SOURCES = "sources.parquet"
LOCAL = "local.json"
TWIN = "twin"  # folder of the second copy of a revision's files
PLAN = "plan"  # folders that exist while a revision is made
PLAN_FILE = "plan.json"
COMMITS = "commits"
REVISIONS = "revisions"
LEASES = "leases"
REMOTE_ABOUT = "about.json"  # next to the local part of a store at a URL
# What a repository of a hub holds beside a store, and where a download of it keeps its own notes; not of the store.
HUB_FILES = frozenset(["README.md", "contact-sheet.png", ".gitattributes"])
HUB_CACHE = ".cache/huggingface/"


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


def group_json(spec: StoreSpec) -> bytes:
    """Metadata of the store's root group."""
    attributes = {"leandit": spec.model_dump()}
    return canonical_json({"zarr_format": 3, "node_type": "group", "attributes": attributes})


def commit_path(revision: int, part: str, shard: int) -> str:
    """Path of a shard task's commit record within the store."""
    return f"{revision_prefix(revision)}{COMMITS}/{part}/{shard:06d}.json"


def rows_path(revision: int, part: str, shard: int) -> str:
    """Path of the results of its rows, beside the commit record."""
    return f"{revision_prefix(revision)}{COMMITS}/{part}/{shard:06d}.rows"


Task = tuple[str, int]
"""A part of a revision, and the number of a shard in it."""


class Part(NamedTuple):
    """Arrays of which each task writes one shard.

    Args:
      name: of the part, a path.
      shards: numbers of the shards that the revision writes, in order.
      captions: layout of a text encoder; None for pictures.
      is_null: it holds the null caption.
      bucket: of pictures; empty for captions.
      groups: arrays of records: the latents by "", each feature and companion picture by its name. Each
        group has checksums of its own.
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

    @property
    def tasks(self) -> list[Task]:
        """One for each shard."""
        return [(self.name, shard) for shard in self.shards]


@dataclass(frozen=True)
class RevisionLayout:
    """What one revision adds to a store: rows and captions to the arrays of the revision before, and new arrays.

    Rows that a revision adds begin at the next shard, so shards never change. A new text encoder, feature or companion
    picture has rows for all captions or records, earlier ones too.

    Args:
      spec: of the revision.
      revision: its number, from 1.
      new_rows: records that it adds to each bucket.
      num_tokens: (num_captions,) stored tokens of all captions, by text encoder.
      first_caption: id of the first caption that it adds.
      before: arrays of the revision before, by path.
    """

    spec: StoreSpec
    revision: int
    new_rows: Mapping[str, int]
    num_tokens: Mapping[str, np.ndarray]
    first_caption: int = 0
    before: Mapping[str, ArrayLayout] = field(default_factory=dict)

    @cached_property
    def parts(self) -> dict[str, Part]:
        """All parts by name, in the order in which they are done: one text encoder after the other, then pictures."""
        parts = [part for one in self.spec.text_encoders for part in self._caption_parts(one.name)]
        parts += [part for bucket in self._buckets for part in self._bucket_parts(bucket)]
        return {part.name: part for part in parts}

    def _caption_parts(self, name: str) -> Iterator[Part]:
        """Of one text encoder: those of all captions and the null one if it is new, else of the captions added."""
        spec, suffix = self.spec.text_encoder_of(name).spec, f"/{name}" if name else ""
        is_known = any(f"{caption_folder(name)}/{null}" in self.before for null in (NULL_EMBEDDING, NULL_POOLED))
        first = self.first_caption if is_known else 0
        counts = self.num_tokens[name][first:]
        layout = CaptionLayout(
            name, spec, counts, self.spec.shard_mib, self.spec.codec, self.revision, first, self.before
        )
        if not is_known:
            yield Part(NULL_PART + suffix, [0], layout, is_null=True)
        if len(counts):
            yield Part(CAPTION_PART + suffix, _new_shards(layout.arrays[0], self.revision), layout)

    @property
    def _buckets(self) -> list[str]:
        """Of the revision before, and new ones, in order of their size."""
        return sorted({*buckets_of(self.before), *self.new_rows}, key=bucket_size)

    def _bucket_parts(self, bucket: str) -> Iterator[Part]:
        """Parts of a bucket: groups of which the revision adds the same shards are encoded together."""
        began: dict[int, list[str]] = {}
        for group in (LATENTS, *self.spec.groups):
            known = self.before.get(f"{bucket_part(bucket)}/{next(iter(row_arrays(self.spec, bucket, group)))}")
            began.setdefault(known.row_ranges[0].revision if known else self.revision, []).append(group)
        ranges, together = self.ranges_of(bucket), dict[tuple[int, ...], dict[str, list[ArrayLayout]]]()
        for revision, groups in sorted(began.items()):
            shard_rows = self._shard_rows(bucket, groups)
            of_groups = [RowRange(max(one.revision, revision), one.first, one.end) for one in ranges]
            layouts = row_layouts(self.spec, bucket, groups, of_groups, shard_rows)
            if shards := _new_shards(layouts[groups[0]][0], self.revision):
                together.setdefault((shard_rows, *shards), {}).update(layouts)
        for (_, *shards), layouts in together.items():
            first = next(iter(layouts))
            yield Part(bucket_part(bucket) + (f"/{first}" if first else ""), shards, bucket=bucket, groups=layouts)

    def _shard_rows(self, bucket: str, groups: Sequence[str]) -> int:
        """Rows of a shard of some groups: as they have them, else as many as fit, at most those of the latents."""
        first, latents = (
            self.before.get(f"{bucket_part(bucket)}/{next(iter(row_arrays(self.spec, bucket, group)))}")
            for group in (groups[0], LATENTS)
        )
        if first:
            return first.shard_rows
        fitting = shard_rows_of(self.spec, bucket, groups)
        return min(fitting, latents.shard_rows) if latents else fitting

    def ranges_of(self, bucket: str) -> list[RowRange]:
        """Rows of the latents of a bucket that each revision added."""
        latents = self.before.get(f"{bucket_part(bucket)}/{self.spec.latent.array}")
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

    def task_of(self, path: str) -> Task | None:
        """The task that writes a file; None if it is no shard that this revision writes."""
        array, _, key = path.partition("/c/")
        number = key.partition("/")[0]
        if array not in self._part_names or not number.isdecimal():
            return None
        part = self.parts[self._part_names[array]]
        return (part.name, int(number)) if int(number) in part.shards else None

    @cached_property
    def _part_names(self) -> dict[str, str]:
        """Name of the part of each array."""
        return {array.path: part.name for part in self.parts.values() for array in part.arrays}

    def part_arrays(self, part: str) -> list[ArrayLayout]:
        """Arrays of which each task of a part writes a shard."""
        return self.parts[part].arrays

    def num_bytes(self, tasks: Iterable[Task]) -> int:
        """Bytes of the shards of some tasks, uncompressed."""
        return sum(
            len(array.rows_of(shard)) * array.row_bytes for part, shard in tasks for array in self.part_arrays(part)
        )

    def tasks(self) -> list[Task]:
        """All tasks of the revision, in the order in which they are done."""
        return [task for part in self.parts.values() for task in part.tasks]

    def rows_of(self, part: str, shard: int) -> range:
        """Rows of the part's arrays that a task writes."""
        return self.part_arrays(part)[0].rows_of(shard)

    def counted_rows(self, part: str, shard: int) -> range:
        """Rows of a task of pictures as far as none before it in the revision has their records: to count each once."""
        rows, one = self.rows_of(part, shard), self.parts[part]
        if LATENTS in one.groups:
            return rows
        return range(rows.start, max(rows.start, min(rows.stop, self.first_row(one.bucket))))

    def captions_of(self, part: str, shard: int) -> range:
        """Captions of a shard of a text encoder, counted from the first one that its part has."""
        captions = self.parts[part].captions
        assert captions is not None, "only parts of captions have captions"
        return captions.captions_of(shard)

    def num_items(self, part: str, shard: int) -> int:
        """Records of a task of pictures, captions of a task of captions, 1 for a null caption."""
        one = self.parts[part]
        if one.is_null:
            return 1
        return len(self.captions_of(part, shard) if one.captions else self.rows_of(part, shard))


def buckets_of(arrays: Iterable[str]) -> set[str]:
    """Buckets that have one of some arrays, which are named by their paths."""
    return {path.split("/")[1] for path in arrays if path.startswith(f"{BUCKETS}/")}


def next_row(spec: StoreSpec, bucket: str, arrays: Mapping[str, ArrayLayout]) -> int:
    """First row that the next revision adds to a bucket: the next shard of the latents; 0 for a new bucket."""
    latents = arrays.get(f"{bucket_part(bucket)}/{spec.latent.array}")
    return -(-latents.shape[0] // latents.shard_rows) * latents.shard_rows if latents else 0


def _new_shards(array: ArrayLayout, revision: int) -> list[int]:
    """Numbers of the shards that a revision adds to an array."""
    added = [one for one in array.row_ranges if one.revision == revision]
    return [n for _, first, end in added for n in range(first // array.shard_rows, -(-end // array.shard_rows))]


def zarr_files(spec: StoreSpec, arrays: Iterable[ArrayLayout]) -> dict[str, bytes]:
    """Content of every ``zarr.json`` by path: it follows from the spec and the arrays of a store.

    leandit reads none of them: they are for zarr-python, tensorstore and other readers.
    """
    files = {GROUP: group_json(spec), f"{REVISIONS}/{GROUP}": EMPTY_GROUP}
    for layout in arrays:  # every folder between the root and an array is a group
        folders = layout.path.split("/")
        for end in range(1, len(folders)):
            files["/".join([*folders[:end], GROUP])] = EMPTY_GROUP
        files[f"{layout.path}/{GROUP}"] = canonical_json(layout.metadata())
    return files


EMPTY_GROUP = canonical_json({"zarr_format": 3, "node_type": "group", "attributes": {}})


def sharing_checksums(spec: StoreSpec, path: str) -> list[str]:
    """Arrays whose rows of a record or caption have one checksum, in its order; ``path`` is one of them.

    Args:
      path: within a revision.
    """
    folder, *inside, _ = path.split("/")
    if folder == CAPTION_PART:
        name = inside[0] if inside else ""
        return [f"{caption_folder(name)}/{array}" for array in caption_arrays(spec.text_encoder_of(name).spec)]
    group = inside[2] if len(inside) == 3 else LATENTS
    return [f"{bucket_part(inside[0])}/{array}" for array in row_arrays(spec, inside[0], group)]


def is_picture_part(part: str) -> bool:
    """Whether a part holds rows of pictures, not captions."""
    return "buckets" in part.split("/")


def is_picture_task(task: Task) -> bool:
    """Whether a task encodes pictures, not captions."""
    return is_picture_part(task[0])
