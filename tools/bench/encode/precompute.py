"""``leandit bench precompute``: stage 1 compared with its bare encoder and with the peers' extraction loops.

Every cell is measured once a round, in alternating order, on the same pictures, weights and device. The report has
medians and ranges over the rounds; a ratio is of two rates of the same round. Measured are:

- the bare encoder, on the plan's batches, decoded and in memory; bare decoding, with the encoder idle;
- a whole ``precompute`` into a fresh store: listing, planning, decoding, encoding, writing, sealing; not the loading
  of the models, which peers are not charged with either;
- the loops of fast-DiT and PixArt (``extract.py``);
- captions: the text stage of a precompute with its writing; and their bytes on disk, in a float16 and an int8 store.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ....datasets.disk.files import files_below
from ....datasets.errors import RecipeError
from ....datasets.format.caption_layout import CAPTION_PART, NULL_EMBEDDING, NULL_SCALES
from ....datasets.store import LatentStore
from ....precompute.config import PrecomputeRecipe, load
from ....precompute.images.decoders import Decoders
from ....precompute.pipeline import Report
from ....precompute.planning.pictures import num_threads, plan_pictures
from ....precompute.progress.clock import Progress
from ....precompute.sources.source import list_source
from ..harness.meters import hardware
from ..harness.rounds import alternating_rounds
from ..harness.scratch import benchmark_folder, fresh_folder
from .inputs import text_model, vae_model, write_sample
from .memory import peak_mb
from .rates import STORE, BenchInputs, PrecomputeRequest, cells_of, decode, precompute_fresh
from .ratios import ratios_of

BASE_RECIPE = "imagenet-256"
OWN_FOLDER = "bench-precompute"
CAPTION_DTYPES = ("float16", "int8")
MOST_BATCHES = 4  # decoded, for the bare encoder
# A precompute of captions needs pictures too: small ones, whose time is not counted.
NO_CHECK = "vae.min_psnr=0"  # of random VAEs, and its time is not that of encoding
SMALL_PICTURES = ["vae.model=shipped:vae", NO_CHECK, "images.resolution=32", "images.crop=adm", "images.buckets=square"]


def run(request: PrecomputeRequest, progress: Progress) -> dict[str, Any]:
    """Measure everything; one JSON object.

    Raises: LeanditError: the source, an encoder or a precompute fails, or no benchmark made its folder.
    """
    request = replace(request, scratch=benchmark_folder(request.scratch, OWN_FOLDER))
    inputs = _prepare(request)
    captions: dict[str, float] = {}
    cells = cells_of(inputs, captions)
    measured: dict[str, list[float]] = defaultdict(list)
    reports: list[Report] = []
    total = request.rounds * len(cells)
    for done, (_, name) in enumerate(alternating_rounds(list(cells), request.rounds)):
        measured[name].append(cells[name](reports))
        gc.collect()
        torch.cuda.empty_cache()  # without CUDA it does nothing
        progress(name, done + 1, total)
    figures: dict[str, Any] = {"rates": dict(measured)}
    if not request.quick:
        figures["memory_mb"] = _memory(inputs, progress)
    figures["encode_share"] = [
        report.seconds["encode"] / (report.total_seconds - report.seconds["load"]) for report in reports
    ]
    if inputs.text_recipe:
        on_disk = {} if request.quick else _caption_bytes(inputs, inputs.text_recipe, progress)
        figures["captions"] = captions | on_disk
    return {
        "command": request.command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware() | {"device": _device_name(request.device)},
        "versions": {name: metadata.version(name) for name in ("leandit", "torch", "diffusers", "transformers")},
        "rounds": request.rounds,
        "vae": request.vae,
        "text": request.text,
        "recipe": inputs.recipe.model_dump(),
        "records": len(inputs.records),
        "buckets": sorted({"{}x{}".format(*bucket) for bucket in inputs.buckets}),
        "stages": [{time.name: time.seconds for time in report.times} for report in reports],
        **figures,
        "ratios": ratios_of(figures, on_cpu=request.device.type == "cpu"),
    }


def _prepare(request: PrecomputeRequest) -> BenchInputs:
    """Sample the source, make the encoders, plan and decode.

    Raises: RecipeError: ``text`` for a source without captions, or no batch size.
    """
    sample = fresh_folder(request.scratch, "sample")
    records = write_sample(request.source, sample, request.records)
    models = [f"vae.model={vae_model(request.vae, request.scratch)}", NO_CHECK, "text.kind=none"]
    recipe = load(BASE_RECIPE, [*request.overrides, *models])
    if not recipe.vae.batch_size:
        raise RecipeError(
            "vae.batch_size 0: needed a fixed size, for the bare encoder too. Add --set vae.batch_size=N."
        )
    text_recipe = None
    if request.text:
        if not any(record.captions for record in records):
            raise RecipeError(f"--text '{request.text}': source '{request.source}' has no captions. Leave --text out.")
        model = text_model(request.text, request.tokenizer, request.scratch, request.device)
        settings = [*request.overrides, "text.kind=t5", f"text.model={model}", *SMALL_PICTURES]
        text_recipe = load(BASE_RECIPE, settings)
    with Decoders(num_threads()) as decoders:
        source = list_source(sample)
        planned = plan_pictures(source, source.records, recipe, decoders, progress=lambda done: None)
        kept = [(r, p.bucket) for r, p in zip(records, chain.from_iterable(planned), strict=True) if p.bucket]
        inputs = BenchInputs(request, recipe, text_recipe, sample, [r for r, _ in kept], [b for _, b in kept], [])
        inputs.batches.extend(_decoded_batches(inputs, decoders))
    return inputs


def _decoded_batches(inputs: BenchInputs, decoders: Decoders) -> Iterator[np.ndarray]:
    """Some batches of the recipe's size, of one bucket each, full ones first; (B, height_px, width_px, 3) uint8."""
    by_bucket: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, bucket in enumerate(inputs.buckets):
        by_bucket[bucket].append(number)
    size = inputs.recipe.vae.batch_size
    batches = [rows[i : i + size] for rows in by_bucket.values() for i in range(0, len(rows), size)]
    for rows in sorted(batches, key=len, reverse=True)[:MOST_BATCHES]:
        yield np.stack([decode(inputs, decoders, number) for number in rows])


def _caption_bytes(inputs: BenchInputs, recipe: PrecomputeRecipe, progress: Progress) -> dict[str, float]:
    """Bytes a caption in a float16 and in an int8 store, both made for this measurement."""
    bytes_each: dict[str, float] = {}
    for number, dtype in enumerate(CAPTION_DTYPES):
        progress("captions on disk", number, len(CAPTION_DTYPES))
        narrowed = recipe.store.model_copy(update={"text_dtype": dtype})
        precompute_fresh(inputs, recipe.model_copy(update={"store": narrowed}))
        bytes_each[dtype] = caption_bytes_on_disk(inputs.request.scratch / STORE)
    progress("captions on disk", len(CAPTION_DTYPES), len(CAPTION_DTYPES))
    return bytes_each


def caption_bytes_on_disk(store: Path) -> float:
    """Bytes a caption of the files of ``captions/``: tokens, fill of chunks, shard indexes, offsets and lengths.

    The null caption is left out: a store has just one.
    """
    folder = store / CAPTION_PART
    manifest = LatentStore(store).manifest
    assert manifest is not None, "a precompute that returns has sealed its store"
    nulls = {(store / path).name for path in (NULL_EMBEDDING, NULL_SCALES)}
    files = [path for path in files_below(folder) if path.relative_to(folder).parts[0] not in nulls]
    return sum(path.stat().st_size for path in files) / manifest.num_captions


def _memory(inputs: BenchInputs, progress: Progress) -> dict[str, float]:
    """Peak of the bare encoder and of a whole run, in MB, each in a fresh process."""
    progress("memory", 0, 2)
    job = {
        "recipe": inputs.recipe.model_dump(),
        "device": str(inputs.request.device),
        "batch": inputs.batches[0].shape[:3],
    }
    alone = peak_mb(job)
    store = fresh_folder(inputs.request.scratch, STORE, make=False)
    whole = peak_mb(job | {"source": str(inputs.sample), "store": str(store)})
    progress("memory", 2, 2)
    return {"encoder": alone, "run": whole}


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
