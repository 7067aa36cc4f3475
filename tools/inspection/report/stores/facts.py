"""The numbers of a store's report, computed over columns: a million records take seconds."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from .....datasets.format.layout import MANIFEST, PLAN, PLAN_FILE, revision_prefix
from .....datasets.format.schema import LatentStatistics, Manifest, TextEncoder
from .....datasets.format.table_schemas import suffixes
from .....datasets.format.token_dtypes import token_bytes
from .....datasets.revisions.catalog import sealed_revisions
from .....datasets.revisions.commits import read_manifest
from .....datasets.store import LatentStore
from ...summary import PERCENTILES, file_sizes, summarise

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them

SCAN_BYTES = 128 << 20  # of latents that are read for a report
NUM_EXTREMES = 10  # classes, captions that are listed
MAX_REJECTS = 200  # that are listed
MAX_COPY_KEYS = 6  # of records with one picture
ASPECT_EDGES = np.geomspace(1 / 4, 4, 33)  # of height / width; rounder pictures fall into the outer ones
BLOCK_BYTES = 4096  # in which a file system gives out space
HALF_BYTES = 2


@dataclass(frozen=True)
class CaptionFacts:
    """The captions of a store.

    Args:
      is_used: (captions in the table,) whether a stored record names it; others are of rejected pictures alone.
      characters: (captions,) of each distinct one that is used.
      num_uses: how often records name a caption, in all.
      repeated: the most repeated captions with their uses; those that are named once are left out.
      longest: the longest captions with their characters.
      most_records: records that have the most repeated caption which is not empty.
      num_empty: uses of the empty caption.
    """

    is_used: np.ndarray
    characters: np.ndarray
    num_uses: int
    repeated: list[tuple[str, int]]
    longest: list[tuple[str, int]]
    most_records: int
    num_empty: int


@dataclass(frozen=True)
class TokenFacts:
    """Lengths of the captions in tokens of one text encoder.

    Args:
      name: of the encoder; "" for that of ``[text]``.
      tokens: (captions,) of those that are used.
    """

    name: str
    max_tokens: int
    tokens: np.ndarray
    num_truncated: int

    @property
    def title(self) -> str:
        """The name, for a person."""
        return self.name or "text"

    @property
    def spread(self) -> tuple[int, ...]:
        """Tokens at PERCENTILES."""
        return tuple(int(value) for value in np.percentile(self.tokens, PERCENTILES, method="higher"))


@dataclass(frozen=True)
class RevisionFacts:
    """A complete revision: what its manifest says, and when its files were written."""

    number: int
    manifest: Manifest
    sealed: float


@dataclass(frozen=True)
class StoreFacts:
    """What a report shows of a store.

    Args:
      name: for headings and legends; stores of a report have different ones.
      summary: of ``summarise``.
      channels: statistics in the model's units: of all rows as the store was sealed, else of those that were read.
      is_sealed: whether they are of all rows.
      aspects: (len(ASPECT_EDGES) - 1,) pictures by height / width of the source; None if their sizes are unknown.
      num_enlarged: pictures with fewer pixels than they were resized to.
      num_copies: records whose picture has the bytes of an earlier record's.
      copies: the most repeated pictures: their records, and the keys of the first of these.
      classes: (num_classes,) records of each class; None without classes.
      rejects: the first of them: key, stage, reason, detail.
      written: when the stages of the revision ended; empty if unknown.
      separate_bytes: of the same numbers as a file for each record, captions padded, in float16.
    """

    name: str
    store: LatentStore
    summary: dict[str, Any]
    channels: LatentStatistics
    is_sealed: bool
    aspects: np.ndarray | None
    num_enlarged: int
    num_copies: int
    copies: list[tuple[int, list[str]]]
    captions: CaptionFacts | None
    tokens: list[TokenFacts]
    classes: np.ndarray | None
    rejects: list[dict[str, Any]]
    revisions: list[RevisionFacts]
    written: dict[str, float]
    separate_bytes: dict[str, int]


def read_facts(store: LatentStore, name: str) -> StoreFacts:
    """Compute what a report shows of a store."""
    summary = summarise(store, scan_bytes=SCAN_BYTES)
    aspects, num_enlarged = source_sizes(store)
    num_copies, copies = find_copies(store)
    captions = caption_facts(store)
    encoders = store.spec.text_encoders if captions and captions.num_uses else []
    channels, is_sealed = channel_statistics(store, summary["latent_statistics"])
    return StoreFacts(
        name=name,
        store=store,
        summary=summary,
        channels=channels,
        is_sealed=is_sealed,
        aspects=aspects,
        num_enlarged=num_enlarged,
        num_copies=num_copies,
        copies=copies,
        captions=captions,
        tokens=[token_facts(store, one, captions.is_used) for one in encoders] if captions else [],
        classes=class_counts(store),
        rejects=first_rejects(store) if summary["num_rejected"] else [],
        revisions=revision_facts(store),
        written=written_at(store),
        separate_bytes=bytes_as_separate_files(store),
    )


def channel_statistics(store: LatentStore, read: Mapping[str, Any]) -> tuple[LatentStatistics, bool]:
    """Statistics of all rows where the manifest has them, else those of the rows that were read; and which it is."""
    if store.manifest and store.manifest.statistics and store.manifest.statistics.count:
        return store.manifest.statistics, True
    names = ("channel_mean", "channel_std")
    return LatentStatistics(count=read["num_rows_read"], **{name: read[name] for name in names}), False


def source_sizes(store: LatentStore) -> tuple[np.ndarray | None, int]:
    """Histogram over ASPECT_EDGES of the stored pictures' sources, and how many were enlarged."""
    names = ("status", "height_px", "width_px", "resized_height_px")
    table = store.record_columns(names)
    table = table.filter(pc.equal(table["status"], "stored"))
    height_px, width_px, resized_px = (pc.fill_null(table[side], 0).to_numpy() for side in names[1:])
    known = (height_px > 0) & (width_px > 0)
    if not known.any():
        return None, 0
    ratios = np.clip(height_px[known] / width_px[known], ASPECT_EDGES[0], ASPECT_EDGES[-1])
    return np.histogram(ratios, ASPECT_EDGES)[0], int(np.count_nonzero(resized_px[known] > height_px[known]))


def find_copies(store: LatentStore) -> tuple[int, list[tuple[int, list[str]]]]:
    """Records whose picture has the same bytes as that of an earlier one, and the most repeated pictures.

    Returns: how many there are; of each listed picture its records, and the keys of the first of them.
    """
    column = store.record_columns(("source_checksum",))[0]
    records = np.flatnonzero(pc.is_valid(column).to_numpy())
    values = column.drop_null().to_numpy()
    order = np.argsort(values, kind="stable")
    starts = np.flatnonzero(np.diff(values[order], prepend=~values[order][:1]))
    uses = np.diff(starts, append=len(values))
    repeated = [group for group in np.argsort(-uses, kind="stable")[:NUM_EXTREMES] if uses[group] > 1]
    if not repeated:
        return 0, []
    keys, found = store.record_columns(("key",))["key"], []
    for group in repeated:
        places = records[order[starts[group] : starts[group] + min(uses[group], MAX_COPY_KEYS)]]
        found.append((int(uses[group]), keys.take(pa.array(places, pa.int64())).to_pylist()))
    return len(values) - len(starts), found


def caption_facts(store: LatentStore) -> CaptionFacts | None:
    """Lengths, repetitions and extremes of the captions; None without captions."""
    texts = store.captions["text"]
    if not len(texts):
        return None
    used = [store.index(bucket).caption_ids for bucket in store.buckets]
    uses = np.bincount(np.concatenate(used) if used else np.empty(0, np.int64), minlength=len(texts))
    characters = pc.utf8_length(texts.cast(pa.string())).to_numpy()
    is_empty = characters == 0
    of_words = np.where(is_empty, 0, uses)
    return CaptionFacts(
        is_used=uses > 0,
        characters=characters[uses > 0],
        num_uses=int(uses.sum()),
        repeated=[(text, n) for text, n in _highest(texts, of_words) if n > 1],
        longest=_highest(texts, np.where(uses > 0, characters, 0)),
        most_records=int(of_words.max()),
        num_empty=int(uses[is_empty].sum()),
    )


def _highest(texts: pa.ChunkedArray, numbers: np.ndarray) -> list[tuple[str, int]]:
    """Texts with the highest numbers, and these; equal ones in their order."""
    highest = np.argsort(-numbers, kind="stable")[:NUM_EXTREMES]
    return [(texts[int(i)].as_py(), int(numbers[i])) for i in highest]


def token_facts(store: LatentStore, encoder: TextEncoder, is_used: np.ndarray) -> TokenFacts:
    """Lengths of the used captions in tokens of a text encoder."""
    suffix = suffixes(store.spec)[encoder.name]
    truncated = store.captions[f"truncated{suffix}"].to_numpy()[is_used]
    tokens = store.captions[f"num_tokens{suffix}"].to_numpy()[is_used]
    return TokenFacts(encoder.name, encoder.spec.max_tokens, tokens, int(np.count_nonzero(truncated)))


def class_counts(store: LatentStore) -> np.ndarray | None:
    """(num_classes,) stored records of each class; None without classes."""
    if not store.num_classes:
        return None
    labels = [store.index(bucket).labels for bucket in store.buckets]
    every = np.concatenate(labels) if labels else np.empty(0, np.int64)
    return np.bincount(every[every >= 0], minlength=store.num_classes)


def first_rejects(store: LatentStore) -> list[dict[str, Any]]:
    """The first MAX_REJECTS rejected records: key, stage, reason, detail."""
    table = store.record_columns(("key", "status", "stage", "reason", "detail"))
    rejected = table.filter(pc.equal(table["status"], "rejected")).slice(0, MAX_REJECTS)
    return rejected.drop_columns(["status"]).to_pylist()


def revision_facts(store: LatentStore) -> list[RevisionFacts]:
    """Complete revisions up to the opened one, in order; of a store at a URL the opened one alone."""
    if store.manifest is None:
        return []
    numbers = [number for number in sealed_revisions(store.path) if number <= store.revision]
    found = []
    for number in numbers:
        manifest = store.manifest if number == store.revision else read_manifest(store.path, number)
        sealed = (store.path / f"{revision_prefix(number)}{MANIFEST}").stat().st_mtime
        found.append(RevisionFacts(number, manifest, sealed))
    return found


def written_at(store: LatentStore) -> dict[str, float]:
    """Seconds since 1970 at which stages of the revision ended, from the dates of its files.

    Returns: empty for a store at a URL, and for a copy whose files have the dates of copying.
    """
    if store.remote or not store.manifest:
        return {}
    root = store.path / revision_prefix(store.revision)
    plan, captions, pictures = root / PLAN / PLAN_FILE, _dates(root, "captions"), _dates(root, "buckets")
    if not pictures or not plan.is_file():
        return {}
    dates = {"planned": plan.stat().st_mtime}
    if captions and max(captions) <= min(pictures):
        dates |= {"captions": max(captions)}
    if min(pictures) < max(pictures):
        dates |= {"first pictures": min(pictures), "other pictures": max(pictures)}
    else:
        dates |= {"pictures": max(pictures)}
    dates |= {"sealing": (root / MANIFEST).stat().st_mtime}
    is_in_order = list(dates.values()) == sorted(dates.values())
    return dates if is_in_order and dates["sealing"] > dates["planned"] else {}


def _dates(root: Path, part: str) -> list[float]:
    """When the commit records of a revision's captions or pictures were written."""
    return [path.stat().st_mtime for path in (root / "commits" / part).rglob("*.json")]


def bytes_as_separate_files(store: LatentStore) -> dict[str, int]:
    """Bytes of the same numbers in a file for each record, in whole blocks of a disk, by part.

    Latents and features are as here; each caption of each record is padded to its encoder's limit, in float16.
    """
    encoders = store.spec.text_encoders
    numbers = sum(
        token_bytes(one.spec.width, "float16") * one.spec.max_tokens * one.spec.has_tokens for one in encoders
    )
    caption_bytes = numbers + sum(HALF_BYTES * one.spec.pooled_width for one in encoders)
    sizes = file_sizes(store)
    beside = sum(n for path, n in sizes.items() if "/c/" in path and ("/features/" in path or "/pictures/" in path))
    each_beside = beside / max(1, len(store))
    latents, captions, in_blocks = 0.0, 0, 0
    for bucket, num_records in store.buckets.items():
        arrays = 1 + store.spec.latent.flip
        row_bytes = store.latents(bucket).row_bytes * arrays
        per_record = np.diff(store.index(bucket).caption_starts) * caption_bytes
        latents += row_bytes * num_records
        captions += int(per_record.sum())
        whole = -(-(per_record + row_bytes + each_beside) // BLOCK_BYTES) * BLOCK_BYTES
        in_blocks += int(whole.sum())
    found = {"latents": int(latents), "captions": captions, "features and pictures": beside}
    return found | {"unused ends of blocks": in_blocks - sum(found.values()), "total": in_blocks}


def utc(seconds: float) -> str:
    """A date and time: "2026-03-01 14:05:09 UTC"."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
