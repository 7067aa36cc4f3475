"""The layout of a store: paths, arrays with their shard and chunk sizes, and the list of shard tasks. Pure functions.

A store grows in revisions. The first is at the root, each later one in a folder of its own with the same layout, so
files of an earlier revision never change.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..disk.cached import cached_property
from ..disk.hashing import canonical_json
from .caption_layout import CAPTION_PART, NULL_PART, CaptionLayout, caption_arrays, caption_folder
from .row_layout import LATENTS, bucket_part, row_arrays, row_layouts
from .schema import StoreSpec
from .zarr_shard import ArrayLayout, pack_shard

MANIFEST = "manifest.json"
GROUP = "zarr.json"
RECORDS = "records.parquet"
CAPTIONS = "captions.parquet"
PLAN = "plan"
PLAN_FILE = "plan.json"
COMMITS = "commits"
REVISIONS = "revisions"
LEASES = "leases"
ADDED = "added"  # first folder of the parts that complete earlier revisions
REMOTE_ABOUT = "about.json"  # next to the local part of a store at a URL
# What a repository of a hub holds beside a store, and where a download of it keeps its own notes; not of the store.
HUB_FILES = frozenset(["README.md", "contact-sheet.png", ".gitattributes"])
HUB_CACHE = ".cache/huggingface/"


def revision_prefix(revision: int) -> str:
    """Folder of a revision within the store, with a slash at its end; empty for the first."""
    return "" if revision == 1 else f"{REVISIONS}/{revision:06d}/"


def revisions_with(root: Path, name: str, is_there: Callable[[Path], bool] = Path.is_file) -> list[int]:
    """Revisions of a store that have a file, or a folder, in order."""
    numbers = [1] if is_there(root / name) else []
    for path in root.glob(f"{REVISIONS}/*/{name}"):
        number = path.relative_to(root / REVISIONS).parts[0]
        if (
            re.fullmatch(r"[0-9]{6,9}", number)
            and int(number) > 1
            and path == root / revision_prefix(int(number)) / name
            and is_there(path)
        ):
            numbers.append(int(number))
    return sorted(numbers)


def group_json(spec: StoreSpec) -> bytes:
    """Metadata of a revision's root group."""
    attributes = {"leandit": spec.model_dump()}
    return canonical_json({"zarr_format": 3, "node_type": "group", "attributes": attributes})


def commit_path(revision: int, part: str, shard: int) -> str:
    """Path of a shard task's commit record within the store."""
    return f"{revision_prefix(revision)}{COMMITS}/{part}/{shard:06d}.json"


Task = tuple[str, int]
"""A part of a revision, and the number of a shard in it."""


class Part(NamedTuple):
    """Arrays of which each task writes one shard.

    Args:
      name: of the part, a path.
      revision: whose rows or captions it holds: an earlier one, if the part adds features to it.
      captions: layout of a text encoder; None for pictures.
      is_null: it holds the null caption.
      bucket: of pictures; empty for captions.
      groups: arrays of records: the latents by "", each feature and companion picture by its name. Each
        group has checksums of its own.
    """

    name: str
    revision: int
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
        return [(self.name, shard) for shard in range(self.arrays[0].num_shards)]


class Content(NamedTuple):
    """Rows and captions of one revision, to which arrays are laid out.

    Args:
      revision: its number, from 1.
      bucket_rows: rows of each bucket.
      num_tokens: (num_captions,) stored tokens of each of its captions, by text encoder.
      has_null: it has the null captions; later revisions of a stack use the first one's.
      groups: of each bucket: "" for the latents, and names of features and companion pictures.
    """

    revision: int
    bucket_rows: Mapping[str, int]
    num_tokens: Mapping[str, np.ndarray]
    has_null: bool
    groups: Sequence[str] = ("",)


@dataclass(frozen=True)
class RevisionLayout:
    """The layout of everything that one revision adds to a store.

    Args:
      spec: of the revision.
      own: its own rows and captions.
      added: earlier revisions that it completes by text encoders, features and pictures. Their arrays lie in the
        folders of those revisions, as if they had always been there.
    """

    spec: StoreSpec
    own: Content
    added: Sequence[Content] = ()

    @property
    def revision(self) -> int:
        """Number of the revision."""
        return self.own.revision

    @property
    def prefix(self) -> str:
        """Folder within the store, with a slash at its end; empty for the first revision."""
        return revision_prefix(self.revision)

    @property
    def bucket_rows(self) -> Mapping[str, int]:
        """Rows that it adds to each bucket."""
        return self.own.bucket_rows

    @cached_property
    def parts(self) -> dict[str, Part]:
        """All parts by name, in the order in which they are done: one text encoder after the other, then pictures."""
        parts = []
        for content in (self.own, *self.added):
            place = "" if content is self.own else f"{ADDED}/{content.revision:06d}/"
            prefix = revision_prefix(content.revision)
            for name, num_tokens in content.num_tokens.items():
                spec = self.spec.text_encoder_of(name).spec
                layout = CaptionLayout(prefix, name, spec, num_tokens, self.spec.shard_mib, self.spec.codec)
                suffix = f"/{name}" if name else ""
                if content.has_null:
                    parts.append(Part(f"{place}{NULL_PART}{suffix}", content.revision, layout, is_null=True))
                if len(num_tokens):
                    parts.append(Part(f"{place}{CAPTION_PART}{suffix}", content.revision, layout))
        order = {one.name: i for i, one in enumerate(self.spec.text_encoders)}
        parts.sort(key=lambda part: order[part.captions.name] if part.captions else 0)
        for content in (self.own, *self.added):
            place = "" if content is self.own else f"{ADDED}/{content.revision:06d}/"
            for bucket, rows in content.bucket_rows.items() if content.groups else ():
                groups = row_layouts(self.spec, bucket, rows, content.groups, prefix=revision_prefix(content.revision))
                parts.append(Part(place + bucket_part(bucket), content.revision, bucket=bucket, groups=groups))
        return {part.name: part for part in parts}

    @cached_property
    def arrays(self) -> dict[str, ArrayLayout]:
        """All arrays, by their path within the store."""
        layouts = [layout for part in self.parts.values() for layout in part.arrays]
        layouts += [layout for captions in self._indexed for layout in captions.index]
        return {layout.path: layout for layout in layouts}

    @property
    def _indexed(self) -> list[CaptionLayout]:
        """Layouts of captions that have an index."""
        return [part.captions for part in self.parts.values() if part.captions and not part.is_null]

    def task_of(self, path: str) -> Task | None:
        """The task that writes a file; None if it is no shard of a part of this revision."""
        array, _, key = path.partition("/c/")
        if array not in self._part_names or not (number := key.partition("/")[0]).isdecimal():
            return None
        return self._part_names[array], int(number)

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

    def captions_of(self, part: str, shard: int) -> range:
        """Captions of a shard of a text encoder, counted within the revision whose captions they are."""
        captions = self.parts[part].captions
        assert captions is not None, "only parts of captions have captions"
        return captions.captions_of(shard)

    def num_items(self, part: str, shard: int) -> int:
        """Records of a task of pictures, captions of a task of captions, 1 for a null caption."""
        one = self.parts[part]
        if one.is_null:
            return 1
        return len(self.captions_of(part, shard) if one.captions else self.rows_of(part, shard))

    def static_files(self) -> dict[str, bytes]:
        """Files that follow from the plan alone: the metadata of all groups and arrays, and the caption indexes."""
        group: dict[str, Any] = {"zarr_format": 3, "node_type": "group"}
        files = {self.prefix + GROUP: group_json(self.spec)}
        paths = {REVISIONS} if self.prefix else set()
        for array in self.arrays:  # every folder between the root group of its revision and an array is a group
            folders = array.split("/")[:-1]
            depth = 2 if folders[0] == REVISIONS else 0
            paths |= {"/".join(folders[:end]) for end in range(depth + 1, len(folders) + 1)}
        files |= {f"{path}/{GROUP}": canonical_json(group | {"attributes": {}}) for path in sorted(paths)}
        for path, layout in self.arrays.items():
            files[f"{path}/{GROUP}"] = canonical_json(layout.metadata())
        for captions in self._indexed:
            if captions.index:
                for layout, values in zip(captions.index, (captions.offsets, captions.num_tokens), strict=True):
                    files[layout.shard_path(0)] = b"".join(pack_shard(layout, values))
        return files


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
