"""Cost of a precompute for ``--dry-run``: bytes on disk, hours and memory, from the real pipeline on some records.

The records make a store in a temporary folder, which is removed. What is counted is scaled: arrays by their size in the
plan, tables by records and captions, time by images and tokens. Memory use does not grow with the number of records.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import disk_usage

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from ...datasets.disk.files import files_below
from ...datasets.format.zarr_shard import ArrayLayout
from ...datasets.revisions.plan import FrozenPlan
from ...errors import ResourceError
from ...precompute.config import PrecomputeRecipe
from ...precompute.encoders.loading import Encoders
from ...precompute.images.decoders import Decoders
from ...precompute.pipeline import Stage1
from ...precompute.planning.compare import Comparison, Options
from ...precompute.planning.images import num_threads
from ...precompute.run.bottleneck import DECODE, ENCODE, READ, TEXT
from ...precompute.run.tasks import Runner
from ...precompute.sharing.leases import ALL_SHARDS
from ...precompute.sources.files.record import SourceRecord
from ...precompute.sources.listing.listing import record_batches, spool
from ...precompute.sources.source import Source
from ...units import plural, readable_size, readable_time
from ..terminal.text import Rows

PROBE_RECORDS = 64  # that are encoded to measure
LATENTS, TABLES = "latents", "tables"  # labels of bytes
TABLE_MARGIN = 1.05  # of what is not arrays: names of files and dates have other lengths


@dataclass(frozen=True)
class Probe:
    """What a small store took.

    Args:
      images: number decoded and encoded.
      seconds: of all of them, decoding and writing included, without captions.
      decode_seconds, encode_seconds: of these, with all threads; they overlap.
      seconds_per_token: of captions, all text encoders together.
      memory_bytes: peak on a GPU; else of this process.
      ratios: bytes on disk of each group of arrays, relative to the size of its chunks.
      table_bytes: of everything but arrays, for each record and each caption.
    """

    images: int
    seconds: float
    decode_seconds: float
    encode_seconds: float
    seconds_per_token: float
    memory_bytes: int
    ratios: Mapping[str, float]
    table_bytes: float

    def seconds_for(self, images: int, tokens: int, num_devices: int = 1) -> float:
        """Seconds of a whole run. Devices share the cores for decoding."""
        decode, whole = (seconds / max(1, self.images) for seconds in (self.decode_seconds, self.seconds))
        return images * max(decode, whole / num_devices) + tokens * self.seconds_per_token / num_devices


def predict(
    recipe: PrecomputeRecipe,
    plan: FrozenPlan,
    source: Source,
    comparison: Comparison,
    images: pa.Table,
    encoders: Encoders,
    *,
    num_devices: int = 1,
) -> tuple[Rows, dict[str, int]]:
    """Names and values of the bytes, time and memory of a revision; and the bytes, as in ``store_bytes``.

    Args:
      comparison: its new records, and those that it carries over.
      images: the plan of each new one (IMAGES_SCHEMA).
      num_devices: that encode in parallel.
    """
    num_completed, device = completed_rows(plan), encoders.image.device
    num_devices = num_devices if device.type != "cpu" else 1
    probe = run_probe(recipe, plan, source, _choose(source, comparison, images), encoders)
    new_bytes, counts = store_bytes(plan, probe), _caption_counts(plan)
    codec = "before any codec" if plan.spec.codec == "none" else f"with codec {plan.spec.codec}, as in the probe"
    notes = {LATENTS: f" {codec}", TABLES: " at most"}
    notes |= {label: f", {captions:,} distinct, {tokens:,} tokens" for label, (captions, tokens) in counts.items()}
    rows = [(name, f"{readable_size(size):>10}{notes.get(name, '')}") for name, size in new_bytes.items()]
    num_images, num_tokens = sum(plan.new_rows.values()) + num_completed, sum(n for _, n in counts.values())
    rates = f"; decoding {probe.images / max(1e-9, probe.decode_seconds):.1f}, encoding "
    rates += f"{probe.images / max(1e-9, probe.encode_seconds):.1f} images/s, from {plural(probe.images, 'image')}"
    rates += f" each of {num_devices} devices" if num_devices > 1 else ""
    rates += "; at most: images already in the store are probed with their latents" if num_completed else ""
    rows.append(
        ("time", f"{readable_time(probe.seconds_for(num_images, num_tokens, num_devices)):>10} after startup{rates}")
    )
    place = "on the GPU, during the probe" if device.type == "cuda" else "on this machine, during the probe"
    return [*rows, ("memory", f"{readable_size(probe.memory_bytes):>10} {place}")], new_bytes


def completed_rows(plan: FrozenPlan) -> int:
    """Images of earlier revisions that get features or companions."""
    added = [part for part in plan.layout.parts.values() if part.bucket and LATENTS not in part.groups]
    rows = {part.bucket: int((plan.positions_of(part) >= 0).sum()) for part in added}
    return sum(count - plan.new_rows.get(bucket, 0) for bucket, count in rows.items() if _is_new(plan, bucket))


def _is_new(plan: FrozenPlan, bucket: str) -> bool:
    """Whether the revision adds an array to a bucket."""
    before = plan.before.layouts() if plan.before else {}
    parts = (part for part in plan.layout.parts.values() if part.bucket == bucket)
    return any(array.path not in before for part in parts for array in part.arrays)


def _caption_counts(plan: FrozenPlan) -> dict[str, tuple[int, int]]:
    """Captions and tokens that a plan encodes, by label of the text encoder."""
    counts = {_captions(one.name): (0, 0) for one in plan.spec.text_encoders}
    for part in plan.layout.parts.values():
        if (texts := part.captions) and not part.is_null:
            captions, tokens = counts[_captions(texts.name)]
            counts[_captions(texts.name)] = captions + len(texts.num_tokens), tokens + int(texts.num_tokens.sum())
    return counts


def _captions(encoder: str) -> str:
    return f"captions {encoder}".strip()


def _choose(source: Source, comparison: Comparison, images: pa.Table) -> list[SourceRecord]:
    """Records for the probe, spread evenly over the new ones; over those that are carried over if there are none."""
    chosen, records = np.flatnonzero(images["row"].to_numpy() >= 0), comparison.fresh
    if not len(chosen):
        carried = comparison.carried.select(["status", "position"]).filter(pc.field("status") == "stored")
        positions = carried["position"].to_numpy()
        chosen, records = positions[positions >= 0], source.records
    return [records[i] for i in chosen[:: max(1, len(chosen) // PROBE_RECORDS)][:PROBE_RECORDS].tolist()]


def run_probe(
    recipe: PrecomputeRecipe, plan: FrozenPlan, source: Source, chosen: Sequence[SourceRecord], encoders: Encoders
) -> Probe:
    """Make stores of some records twice, and measure the second.

    Starting decoders and compiling an encoder do not matter in a run of hours.
    """
    settings = recipe.model_copy(
        update={
            "vae": recipe.vae.model_copy(update={"batch_size": plan.spec.latent.batch_size, "min_psnr": 0}),
            "source": recipe.source.model_copy(
                update={"max_reject_share": 1.0, "max_rejects_in_a_row": len(chosen) + 1}
            ),
        }
    )
    listed = replace(source, records=spool(record_batches(chosen), lambda _: None, check_keys=False))
    device = encoders.image.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    limit = recipe.images.max_megapixels
    with (
        tempfile.TemporaryDirectory(prefix="leandit-probe-") as folder,
        Decoders(num_threads(), max_megapixels=limit) as decoders,
    ):
        for name in ("first", "second"):
            runner, root = Runner(encoders, decoders, listed), Path(folder) / name
            stage = Stage1(root, settings, "", runner, lambda *_: None, lambda _: None, ALL_SHARDS, Options(), listed)
            of_probe = stage.next_plan(0)
            assert of_probe, "a new store has a plan"
            start = time.perf_counter()
            stage.finish(of_probe)
            seconds = time.perf_counter() - start
        num_written = {
            label: sum(path.stat().st_size for array in arrays for path in files_below(root / array.path))
            for label, arrays in _arrays(of_probe).items()
        }
        others = sum(path.stat().st_size for path in files_below(root)) - sum(num_written.values())
    measured = runner.clock.seconds
    text = measured.get(TEXT, 0.0)
    return Probe(
        images=runner.num_encoded,
        seconds=max(0.0, seconds - text),
        decode_seconds=(measured.get(READ, 0.0) + measured.get(DECODE, 0.0)) / num_threads(),
        encode_seconds=measured.get(ENCODE, 0.0),
        seconds_per_token=text / max(1, sum(tokens for _, tokens in _caption_counts(of_probe).values())),
        memory_bytes=_peak_bytes(device),
        ratios={label: num_written[label] / size for label, size in _chunk_bytes(of_probe).items() if size},
        table_bytes=others / (of_probe.records.num_rows + of_probe.captions.num_rows),
    )


def store_bytes(plan: FrozenPlan, probe: Probe) -> dict[str, int]:
    """Bytes of a plan on disk: of each group of ``_arrays``, and of the tables."""
    sizes = {label: round(size * probe.ratios.get(label, 1.0)) for label, size in _chunk_bytes(plan).items()}
    rows = plan.records.num_rows + plan.captions.num_rows
    return sizes | {TABLES: round(TABLE_MARGIN * probe.table_bytes * rows)}


def _arrays(plan: FrozenPlan) -> dict[str, list[ArrayLayout]]:
    """Arrays of a revision: "latents", "feature NAME", "companion NAME" and "captions NAME"."""
    spec, features = plan.spec, {one.name for one in plan.spec.features}
    labels = {name: f"{'feature' if name in features else 'companion'} {name}" for name in spec.groups}
    known = (LATENTS, *labels.values(), *(_captions(one.name) for one in spec.text_encoders))
    found: dict[str, list[ArrayLayout]] = {label: [] for label in known}
    for part in plan.layout.parts.values():
        if part.captions:
            found[_captions(part.captions.name)].extend(part.arrays)
        for group, arrays in part.groups.items():
            found[labels.get(group, LATENTS)].extend(arrays)
    return found


def _chunk_bytes(plan: FrozenPlan) -> dict[str, int]:
    """Bytes of the chunks that a revision adds to each group, before their codec; the last chunk is padded."""
    return {
        label: sum(
            -(-(end - first) // array.chunk_rows) * array.chunk_bytes
            for array in arrays
            for revision, first, end in array.row_ranges
            if revision == plan.revision
        )
        for label, arrays in _arrays(plan).items()
    }


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def check_room(store: Path, num_bytes: int) -> None:
    """Check that the disk can hold the rest of a store.

    Args:
      num_bytes: of the whole store, existing bytes included.
    Raises: ResourceError.
    """
    folder = next(folder for folder in (store.absolute(), *store.absolute().parents) if folder.exists())
    written = sum(path.stat().st_size for path in files_below(store)) if store.is_dir() else 0
    free, missing = disk_usage(folder).free, num_bytes - written
    if missing > free:
        raise ResourceError(
            f"store '{store}': the disk has {readable_size(free)} free, {readable_size(missing)} more are needed. Free "
            "some space, pass a --store on another disk, or make it smaller (store.dtype, store.text_dtype, vae.flip)."
        )
