"""What ``inspect``, ``report``, ``view`` and cards say about a store, each fact computed once. Needs no torch."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ...datasets.disk.cached import cached_property
from ...datasets.format.layout import MANIFEST, revision_prefix
from ...datasets.format.row_layout import CAPTION_PART, COMPANIONS, FEATURES, caption_folder, caption_rows
from ...datasets.format.schema import LatentStatistics, Manifest, TextEncoder
from ...datasets.format.table_schemas import suffixes
from ...datasets.format.token_dtypes import MIN_TEXT_COSINE, token_bytes, widen_latents
from ...datasets.revisions.catalog import read_manifest, sealed_revisions
from ...datasets.revisions.latent_statistics import statistics_of, unusual_channels
from ...datasets.store import LatentStore, Record

pc: Any = pyarrow.compute  # defined at run time, so type checkers do not know its functions

PERCENTILES = (0, 50, 95, 100)
TOKEN_EDGES = (0, 8, 16, 32, 64, 128, 256, 512, 4096)
NUM_EXTREMES = 10  # captions and duplicates that are listed
MAX_KEYS = 6  # of records with one image
ASPECT_EDGES = np.geomspace(1 / 4, 4, 33)  # of height / width; more extreme images are clipped to the outer bins
CAPTION_COUNTS = ("num_uses", "num_distinct", "num_unused", "num_samples", "num_empty", "most_uses")
LEDGER = ("key", "stage", "reason", "detail", "attempts", "revision")


class StoreFacts:
    """What a store holds, from its tables and manifest. No latent is read."""

    def __init__(self, store: LatentStore) -> None:
        self.store, self.spec = store, store.spec
        self.path = store.remote.url if store.remote else str(store.path)

    def to_json(self) -> dict[str, Any]:
        """The facts of ``leandit inspect --json``, as plain values."""
        store, spec = self.store, self.spec
        of_store = ("complete", "revision", "newest_revision", "unfinished_revision", "root_hash", "num_classes")
        texts = {one.name: self.text_facts(one) for one in spec.text_encoders}
        return {
            "store": self.path,
            **{name: getattr(store, name) for name in of_store},
            **{name: getattr(spec, name) for name in ("format_version", "fingerprint", "codec")},
            **self.records,
            "buckets": store.buckets,
            "classes": store.class_names.summary(),
            "sources": {name: self.sources[name] for name in ("num_duplicates", "num_enlarged")},
            "num_captions": store.captions.num_rows,
            "num_caption_tokens": self.num_caption_tokens,
            "captions": self.captions and {name: self.captions[name] for name in CAPTION_COUNTS},
            **next(iter(texts.values()), dict.fromkeys(("caption_tokens", "caption_quality"))),
            "bytes": self.part_bytes,
            "images": spec.images.model_dump(),
            "latent": spec.latent.model_dump(),
            "text": spec.text and spec.text.model_dump(),
            "texts": {one.name: {"spec": one.spec.model_dump(), **texts[one.name]} for one in spec.texts},
            "features": self.features,
            "companions": self.companions,
            "encoders": self.encoders,
            "self_check": self.self_check,
            "quality": self.quality,
            "latent_statistics": self.latents,
        }

    @cached_property
    def records(self) -> dict[str, Any]:
        """Planned, stored and rejected records, rejects by reason, and those that were encoded in another way."""
        table = self.store.record_columns(("status", "reason", "fallback"))
        statuses = value_counts(table["status"])
        return {
            "num_planned": table.num_rows,
            "num_stored": statuses.get("stored", 0),
            "num_rejected": statuses.get("rejected", 0),
            "rejects": value_counts(table.filter(pc.equal(table["status"], "rejected"))["reason"]),
            "fallbacks": value_counts(table["fallback"]),
        }

    @property
    def num_missing(self) -> int:
        """Planned records that are neither stored nor rejected yet."""
        counts = self.records
        return counts["num_planned"] - counts["num_stored"] - counts["num_rejected"]

    @cached_property
    def rejected(self) -> pa.Table:
        """Every rejected record: the columns ``LEDGER``."""
        table = self.store.record_columns((*LEDGER, "status"))
        return table.filter(pc.equal(table["status"], "rejected")).select(LEDGER)

    @cached_property
    def classes(self) -> np.ndarray | None:
        """(num_classes,) stored records of each class; None without classes."""
        if not self.store.num_classes:
            return None
        labels = np.concatenate([np.empty(0, np.int64), *(self.store.index(b).labels for b in self.store.buckets)])
        return np.bincount(labels[labels >= 0], minlength=self.store.num_classes)

    @cached_property
    def sources(self) -> dict[str, Any]:
        """The source images of stored records.

        Returns: ``aspects``: histogram over ASPECT_EDGES of height / width, None if no size is known; ``num_enlarged``:
        images with fewer pixels than they were resized to; ``num_duplicates``: records whose image has the bytes of an
        earlier one; ``duplicates``: the most repeated images, with the keys of their first records.
        """
        sides = ("height_px", "width_px", "resized_height_px")
        table = self.store.record_columns((*sides, "status", "source_checksum"))
        table = table.filter(pc.equal(table["status"], "stored"))
        height_px, width_px, resized_px = (pc.fill_null(table[side], 0).to_numpy() for side in sides)
        known = (height_px > 0) & (width_px > 0)
        ratios = np.clip(height_px[known] / width_px[known], ASPECT_EDGES[0], ASPECT_EDGES[-1])
        images = pa.Table.from_struct_array(table["source_checksum"].drop_null().value_counts())
        repeated = images.filter(pc.greater(images["counts"], 1)).sort_by([("counts", "descending")])[:NUM_EXTREMES]
        keys = self.store.record_columns(("key", "source_checksum")) if repeated.num_rows else images
        return {
            "aspects": np.histogram(ratios, ASPECT_EDGES)[0] if known.any() else None,
            "num_enlarged": int(np.count_nonzero(resized_px[known] > height_px[known])),
            "num_duplicates": (pc.sum(images["counts"]).as_py() or 0) - images.num_rows,
            "duplicates": [
                {
                    "num_records": count.as_py(),
                    "keys": keys["key"].filter(pc.equal(keys["source_checksum"], checksum))[:MAX_KEYS].to_pylist(),
                }
                for checksum, count in zip(*repeated.columns, strict=True)
            ],
        }

    # Files

    @cached_property
    def file_sizes(self) -> dict[str, int]:
        """Bytes of every file of the store."""
        if self.store.manifest:
            return {entry.path: entry.bytes for entry in self.store.manifest.files}
        files = (path for path in self.store.path.rglob("*") if path.is_file())
        return {path.relative_to(self.store.path).as_posix(): path.stat().st_size for path in files}

    @cached_property
    def part_bytes(self) -> dict[str, int]:
        """Bytes on disk of each part of the store, and in total."""
        store = self.store
        groups = [*(f"feature {name}" for name in store.features), *(f"companion {name}" for name in store.companions)]
        texts = [f"captions {name}".strip() for name in store.texts or [""]]
        parts = dict.fromkeys(["latents", *groups, *texts, "tables and metadata"], 0)
        for path, size in self.file_sizes.items():
            parts[_part_of(path)] += size
        return parts | {"total": sum(self.file_sizes.values())}

    def array_bytes(self, part: str) -> int:
        """Bytes of the shards whose path contains a part."""
        return sum(size for path, size in self.file_sizes.items() if part in path and "/c/" in path)

    def bytes_per_record(self, part: str) -> float:
        """Bytes of the shards whose path contains a part, over the number of stored records."""
        return round(self.array_bytes(part) / max(1, len(self.store)), 1)

    @cached_property
    def revisions(self) -> list[tuple[Manifest, float]]:
        """Complete revisions up to the opened one, in order, and the date of each seal in seconds since 1970."""
        path, newest = self.store.path, self.store.revision if self.store.manifest else 0
        numbers = [number for number in sealed_revisions(path) if number <= newest] if newest else []
        return [
            (read_manifest(path, number), (path / f"{revision_prefix(number)}{MANIFEST}").stat().st_mtime)
            for number in numbers
        ]

    # Captions

    @cached_property
    def used_captions(self) -> pa.Table:
        """Captions that a stored record names, with their ``uses`` and ``characters``."""
        table = self.store.captions
        ids = [self.store.index(bucket).caption_ids for bucket in self.store.buckets]  # which are checked
        uses = np.bincount(np.concatenate([np.empty(0, np.int64), *ids]), minlength=table.num_rows)
        table = table.append_column("uses", pa.array(uses))
        table = table.append_column("characters", pc.utf8_length(table["text"].cast(pa.string())))
        return table.filter(pc.greater(table["uses"], 0))

    @cached_property
    def captions(self) -> dict[str, Any] | None:
        """How often captions are used, and the most repeated and longest ones; None without captions."""
        if not self.store.captions.num_rows:
            return None
        used = self.used_captions
        written = used.filter(pc.greater(used["characters"], 0))
        samples = pa.array(self.spec.sample_captions, pa.string())
        num_shown = pc.sum(pc.is_in(used["text"].cast(pa.string()), samples)).as_py() or 0
        num_uses = pc.sum(used["uses"]).as_py() or 0
        most_uses = pc.max(written["uses"]).as_py() or 0
        return {
            "num_uses": num_uses,
            "num_distinct": used.num_rows,
            # By records that are not stored alone; sample captions have no record.
            "num_unused": self.store.captions.num_rows - used.num_rows - (len(samples) - num_shown),
            "num_samples": len(samples),
            "num_empty": num_uses - (pc.sum(written["uses"]).as_py() or 0),
            "most_uses": most_uses,
            "repeated": _highest(written.filter(pc.greater(written["uses"], 1)), "uses"),
            "longest": _highest(used, "characters"),
        }

    @cached_property
    def num_caption_tokens(self) -> int:
        """Tokens of all captions, of the first text encoder."""
        return pc.sum(self.store.captions["num_tokens"]).as_py() or 0

    def text_facts(self, encoder: TextEncoder) -> dict[str, Any]:
        """Lengths and quality of the captions of a text encoder; None each without captions."""
        if not self.store.captions.num_rows:
            return {"caption_tokens": None, "caption_quality": None}
        return {"caption_tokens": self.caption_lengths(encoder), "caption_quality": self.caption_quality(encoder)}

    @cached_property
    def _described_captions(self) -> pa.Table:
        """The captions that lengths and quality describe: those that stored records name; all while there are none."""
        return self.used_captions if self.used_captions.num_rows else self.store.captions

    def caption_lengths(self, encoder: TextEncoder) -> dict[str, Any]:
        """Lengths in tokens of the captions that stored records name; of all while no record is stored."""
        captions = self._described_captions
        suffix = suffixes(self.spec)[encoder.name]
        tokens = captions[f"num_tokens{suffix}"].to_numpy()
        counts, _ = np.histogram(tokens, bins=[edge + 0.5 for edge in TOKEN_EDGES])
        spans = zip(itertools.pairwise(TOKEN_EDGES), counts.tolist(), strict=True)
        percentiles = np.percentile(tokens, PERCENTILES, method="higher").tolist()
        return {
            **dict(zip(("min", "median", "p95", "max"), percentiles, strict=True)),
            "table": {f"{first + 1}-{last}": count for (first, last), count in spans if count},
            "num_truncated": pc.sum(captions[f"truncated{suffix}"]).as_py() or 0,
            # Times fewer tokens than padded to max_tokens.
            "padding_avoided": round(len(tokens) * encoder.spec.max_tokens / max(1, int(tokens.sum())), 2),
        }

    def caption_quality(self, encoder: TextEncoder) -> dict[str, Any]:
        """Error and saving of storing captions, of which there are some, in a narrower dtype.

        The error is of the captions that stored records name, the bytes are a share of all shards. The cosine of a
        caption is the smallest cosine between one of its tokens as encoded and as stored, without its largest 1 %.
        """
        captions, folder = self._described_captions, caption_folder(encoder.name)
        suffix = suffixes(self.spec)[encoder.name]
        shards = sum(self.array_bytes(f"{folder}/{array}/c/") for array in caption_rows(encoder.spec))
        each, cosines = shards / self.store.captions.num_rows, captions[f"min_cosine{suffix}"]
        return {
            "num_measured": len(cosines) - cosines.null_count,
            "num_low_quality": pc.sum(pc.less(cosines, self.min_text_cosine)).as_py() or 0,
            **_quality(cosines, captions[f"max_error{suffix}"]),
            "bytes_per_caption": round(each, 1),
            "fewer_than_padded_float16": round(padded_bytes(encoder) / max(each, 1), 2),
        }

    # Encoders, features and companions

    @cached_property
    def encoders(self) -> dict[str, dict[str, Any] | None]:
        """What encoded the store, by role: "vae", "text" or None, then texts and features by their names."""
        named = {one.name: one.encoder for one in (*self.spec.texts, *self.spec.features)}
        roles = {"vae": self.spec.vae, "text": self.spec.text_encoder} | named
        return {role: one and one.model_dump(exclude={"config"}) for role, one in roles.items()}

    @cached_property
    def features(self) -> dict[str, dict[str, Any]]:
        """For each feature its spec, bytes a record, and the error of storing its tokens in a narrower dtype."""
        return {
            one.name: {
                "spec": one.spec.model_dump(),
                "bytes_per_record": self.bytes_per_record(f"/{FEATURES}/{one.name}/"),
                **_quality(*self.store.record_columns((f"min_cosine_{one.name}", f"max_error_{one.name}"))),
            }
            for one in self.spec.features
        }

    @cached_property
    def companions(self) -> dict[str, dict[str, Any]]:
        """Companion images: column and kind, the shape of a row in the first bucket, bytes."""
        bucket = next(iter(self.store.buckets), None)
        return {
            one.name: {
                "column": one.column,
                "kind": one.kind,
                "row_shape": list(self.store.companion(one.name, bucket).row_shape) if bucket else None,
                "bytes_per_record": self.bytes_per_record(f"/{COMPANIONS}/{one.name}/"),
            }
            for one in self.spec.companions
        }

    # Latents

    @cached_property
    def self_check(self) -> dict[str, Any] | None:
        """How the VAE reconstructed images before the store was planned; None without a check."""
        check = self.store.manifest and self.store.manifest.self_check
        if not check:
            return None
        median = float(np.median([image.psnr_db for image in check.images]))
        return check.model_dump() | {"median_psnr_db": round(median, 2)}

    @cached_property
    def quality(self) -> list[dict[str, Any]]:
        """What int8 cost each layer of a sample, in groups of arrays; empty without int8."""
        manifest = self.store.manifest
        return [layer.model_dump() for layer in manifest.quality] if manifest else []

    def layer_quality(self, group: str) -> list[dict[str, Any]]:
        """``quality`` of the layers of "captions", "captions/NAME", "features/NAME" or "latents"."""
        return [layer for layer in self.quality if layer["group"] == group]

    @cached_property
    def min_text_cosine(self) -> float:
        """The bound of the store's recipe, below which a caption is of low quality."""
        section = self.spec.recipe.get("store")
        bound = section.get("min_text_cosine") if isinstance(section, dict) else None
        return float(bound) if isinstance(bound, int | float) else MIN_TEXT_COSINE

    @cached_property
    def min_psnr_db(self) -> float | None:
        """The limit of the self-check in the store's recipe; None without one."""
        section = self.spec.recipe.get("vae")
        limit = section.get("min_psnr") if isinstance(section, dict) else None
        return float(limit) if isinstance(limit, int | float) and limit > 0 else None

    @cached_property
    def statistics(self) -> LatentStatistics:
        """Mean and std of each channel as a model sees it, of stored records; of none before the store is sealed."""
        sealed = self.store.manifest and self.store.manifest.statistics
        return sealed or statistics_of([], self.spec.latent)

    @cached_property
    def suspicious_channels(self) -> list[int]:
        """Channels whose mean or deviation is beyond the limits."""
        if not self.statistics.count:
            return []
        unusual_means, unusual_stds = unusual_channels(self.statistics.channel_mean, self.statistics.channel_std)
        return sorted({*unusual_means, *unusual_stds})

    @cached_property
    def latents(self) -> dict[str, Any]:
        """Statistics of the latents."""
        return {
            "count": self.statistics.count,
            "channel_mean": [round(value, 4) for value in self.statistics.channel_mean],
            "channel_std": [round(value, 4) for value in self.statistics.channel_std],
            "suspicious_channels": self.suspicious_channels,
        }


def padded_bytes(encoder: TextEncoder) -> int:
    """Bytes of a caption of a text encoder at its largest length, in float16."""
    spec = encoder.spec
    tokens = token_bytes(spec.width, "float16") * spec.max_tokens if spec.has_tokens else 0
    return tokens + token_bytes(spec.pooled_width, "float16")


def _part_of(path: str) -> str:
    """The part of a store that a file belongs to, for a person."""
    folder, _, key = path.partition("/c/")
    names = folder.split("/")
    if not key:
        return "tables and metadata"
    for parent, part in ((FEATURES, "feature"), (COMPANIONS, "companion")):
        if parent in names:
            return f"{part} {names[-2]}"
    if "buckets" in names:
        return "latents"
    return "captions" if names[-2] == CAPTION_PART else f"captions {names[-2]}"


def describe_record(store: LatentStore, record: Record) -> dict[str, Any]:
    """All fields of a record, its captions, and statistics of its latent."""
    values: dict[str, Any] = asdict(record) | {"caption_ids": list(record.caption_ids)}
    if store.spec.classes and record.label >= 0:
        values["class"] = store.spec.classes[record.label]
        values["class_name"] = store.class_names.names[record.label]
    if record.caption_ids:
        values["captions"] = store.captions.select(["text", "num_tokens"]).take(list(record.caption_ids)).to_pylist()
    if record.status != "stored" or record.bucket is None:
        return values
    array = store.latents(record.bucket)
    stored = array[record.row]
    row = widen_latents(stored).astype(np.float64)
    return values | {
        "shard": array.shard_paths(np.array([record.row]))[0],
        "stored_shape": list(stored.shape),
        "finite": bool(np.isfinite(row).all()),
        "channel_mean": [_rounded(value) for value in row.mean(axis=(1, 2))],
        "channel_std": [_rounded(value) for value in row.std(axis=(1, 2))],
    }


def value_counts(column: pa.ChunkedArray) -> dict[str, int]:
    """Number of times that each text occurs in a column, in alphabetical order; without nulls."""
    counts = {entry["values"]: entry["counts"] for entry in column.value_counts().to_pylist()}
    return {text: counts[text] for text in sorted(text for text in counts if text is not None)}


def _highest(captions: pa.Table, column: str) -> list[tuple[str, int]]:
    """Captions with the highest numbers in a column, and these; equal ones in their order."""
    order = pc.sort_indices(captions[column], sort_keys=[("", "descending")])[:NUM_EXTREMES]
    return [(one["text"], one[column]) for one in captions.take(order).to_pylist()]


def _quality(cosines: pa.ChunkedArray, errors: pa.ChunkedArray) -> dict[str, float | None]:
    measured, error = cosines.drop_null().to_numpy(), pc.max(errors).as_py()
    return {
        "min_cosine": _rounded(measured.min(), 8) if len(measured) else None,
        "median_cosine": _rounded(np.median(measured), 8) if len(measured) else None,
        "max_error": None if error is None else _rounded(error, 8),
    }


def _rounded(value: float, digits: int = 4) -> float | None:
    """The rounded value; None if it is not finite, which JSON cannot hold."""
    return round(float(value), digits) if np.isfinite(value) else None
