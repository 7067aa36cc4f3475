"""``leandit bench precompute``: stage 1 beside its own encoder alone, and beside the peers' extraction, in one run.

Every cell is measured once a round, in alternating order, on the same pictures, weights and device; medians over the
rounds are told with their ranges, and a ratio is of two figures of the same round. What is measured:

- the bare encoder, on the plan's batches, decoded and in memory; bare decoding, with the encoder idle;
- a whole ``precompute`` into a fresh store: listing, planning, decoding, encoding, writing, sealing; not the loading
  of the models, which peers are not charged with either;
- the loops of fast-DiT and PixArt (``bench_extract.py``);
- captions: the text stage of a precompute with its writing; and what they take on disk, in a float16 and an int8 store.
"""

from __future__ import annotations

import gc
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..datasets.buckets import resize_filter
from ..datasets.errors import RecipeError
from ..datasets.layout import CAPTION_PART, NULL_EMBEDDING, NULL_SCALES
from ..datasets.store import LatentStore
from ..datasets.text_dtypes import token_bytes
from ..precompute.config import PrecomputeRecipe, load
from ..precompute.decoder import Decoders
from ..precompute.encoders import ImageEncoder
from ..precompute.model_files import resolve_model
from ..precompute.picture_plan import num_threads, plan_pictures
from ..precompute.pipeline import Report, precompute
from ..precompute.source_record import SourceRecord, caption_texts
from ..precompute.sources import list_source
from .bench_extract import (
    PIXART_TOKENS,
    caption_rate,
    fast_dit,
    load_text,
    load_vae,
    pixart_pictures,
    steady_rate,
)
from .bench_goals import goals_of
from .bench_inputs import text_model, vae_model, write_sample
from .bench_memory import peak_mb
from .bench_meters import files_below, hardware
from .bench_scratch import fresh_folder, own_folder

BASE_RECIPE = "imagenet-256"
OWN_FOLDER, STORE = "bench-precompute", "store"
CAPTION_DTYPES = ("float16", "int8")
MOST_BATCHES = 4  # decoded, for the bare encoder
# Captions are encoded with small pictures, whose time is not counted.
SMALL_PICTURES = ["vae.model=shipped:vae", "images.resolution=32", "images.crop=adm", "images.buckets=square"]
ENCODER, DECODER, OURS, FAST_DIT, PIXART = "bare encoder", "bare decode", "leandit", "fast-DiT", "PixArt"
OUR_CAPTIONS, PIXART_CAPTIONS = "leandit captions", "PixArt captions"
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Request:
    """What to measure.

    Args:
      source: of pictures, and captions if any; all who are compared read a sample of it.
      scratch: folder in which a folder of its own holds the sample, random encoders, stores and the peers' files.
      vae, text: hub id, folder, or "random:SHAPE"; no text: captions are not measured.
      tokenizer: folder, of a random text encoder.
      records: pictures of the sample.
      rounds: times that everything is measured.
      seconds: that a loop is measured each time, at least.
      overrides: of the recipe.
      command: what was typed.
    """

    source: str
    scratch: Path
    device: torch.device
    vae: str = "random:sd"
    text: str | None = None
    tokenizer: Path | None = None
    records: int = 256
    rounds: int = 3
    seconds: float = 5.0
    overrides: Sequence[str] = ()
    command: str = field(default_factory=lambda: shlex.join(["leandit", *sys.argv[1:]]))


@dataclass(frozen=True)
class Work:
    """What all cells share."""

    request: Request
    recipe: PrecomputeRecipe
    text_recipe: PrecomputeRecipe | None
    sample: Path
    records: list[SourceRecord]
    buckets: list[tuple[int, int]]
    batches: list[np.ndarray]

    @property
    def paths(self) -> list[Path]:
        """Of the pictures."""
        return [self.sample / record.path for record in self.records]

    @property
    def captions(self) -> list[str]:
        """Distinct ones, in the order of the records."""
        return list(dict.fromkeys(text for record in self.records for text in caption_texts(record)))


def run(request: Request, progress: Progress) -> dict[str, Any]:
    """Measure everything; one JSON object.

    Raises: LeanditError: of the source, of an encoder, of a precompute, or of a scratch folder that is not its own.
    """
    request = replace(request, scratch=own_folder(request.scratch, OWN_FOLDER))
    work = _prepare(request)
    captions: dict[str, float] = {}
    cells = _cells(work, captions)
    measured: dict[str, list[float]] = defaultdict(list)
    reports: list[Report] = []
    done, total = 0, request.rounds * len(cells)
    for number in range(request.rounds):
        for name, measure in list(cells.items())[:: -1 if number % 2 else 1]:
            measured[name].append(measure(reports))
            gc.collect()
            torch.cuda.empty_cache()  # of what is not there, it does nothing
            done += 1
            progress(name, done, total)
    figures: dict[str, Any] = {"rates": dict(measured), "memory_mb": _memory(work, progress)}
    figures["encode_share"] = [
        report.seconds["encode"] / (report.total_seconds - report.seconds["load"]) for report in reports
    ]
    if work.text_recipe:
        figures["captions"] = captions | _caption_bytes(work, work.text_recipe, progress)
    return {
        "command": request.command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware() | {"device": _device_name(request.device)},
        "versions": {name: metadata.version(name) for name in ("leandit", "torch", "diffusers", "transformers")},
        "rounds": request.rounds,
        "vae": request.vae,
        "text": request.text,
        "recipe": work.recipe.model_dump(),
        "records": len(work.records),
        "buckets": sorted({"{}x{}".format(*bucket) for bucket in work.buckets}),
        "stages": [{time.name: time.seconds for time in report.times} for report in reports],
        **figures,
        "goals": goals_of(figures, on_cpu=request.device.type == "cpu"),
    }


def _prepare(request: Request) -> Work:
    """Sample the source, make the encoders, plan and decode.

    Raises: RecipeError: captions are asked for, and the source has none; or no size of a batch.
    """
    sample = fresh_folder(request.scratch, "sample")
    records = write_sample(request.source, sample, request.records)
    models = [f"vae.model={vae_model(request.vae, request.scratch)}", "text.kind=none"]
    recipe = load(BASE_RECIPE, [*request.overrides, *models])
    if not recipe.vae.batch_size:
        raise RecipeError("vae.batch_size 0: the encoder alone needs the same batches. Say how many pictures.")
    text_recipe = None
    if request.text:
        if not any(record.captions for record in records):
            raise RecipeError(f"--text '{request.text}': source '{request.source}' has no captions. Leave --text out.")
        model = text_model(request.text, request.tokenizer, request.scratch, request.device)
        said = [*request.overrides, "text.kind=t5", f"text.model={model}", *SMALL_PICTURES]
        text_recipe = load(BASE_RECIPE, said)
    with Decoders(num_threads()) as decoders:
        source = list_source(sample)
        planned = plan_pictures(source, source.records, recipe, decoders, progress=lambda done: None)
        kept = [(r, p.bucket) for r, p in zip(records, chain.from_iterable(planned), strict=True) if p.bucket]
        work = Work(request, recipe, text_recipe, sample, [r for r, _ in kept], [b for _, b in kept], [])
        work.batches.extend(_decoded_batches(work, decoders))
    return work


def _decoded_batches(work: Work, decoders: Decoders) -> Iterator[np.ndarray]:
    """Some batches of the recipe's size, of one bucket each, full ones first; (B, height_px, width_px, 3) uint8."""
    by_bucket: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, bucket in enumerate(work.buckets):
        by_bucket[bucket].append(number)
    size = work.recipe.vae.batch_size
    batches = [rows[i : i + size] for rows in by_bucket.values() for i in range(0, len(rows), size)]
    for rows in sorted(batches, key=len, reverse=True)[:MOST_BATCHES]:
        yield np.stack([_decode(work, decoders, number) for number in rows])


def _decode(work: Work, decoders: Decoders, number: int) -> np.ndarray:
    record, images = work.records[number], work.recipe.images
    return decoders.picture(
        work.sample / record.path,
        record.offset,
        record.num_bytes,
        bucket=work.buckets[number],
        crop=images.crop,
        resize_filter=resize_filter(images.buckets, images.resolution),
    ).pixels


def _cells(work: Work, captions: dict[str, float]) -> dict[str, Callable[[list[Report]], float]]:
    """What is measured in each round: each gives a rate, in pictures or captions a second."""
    cells: dict[str, Callable[[list[Report]], float]] = {
        ENCODER: lambda _: _encoder_rate(work),
        DECODER: lambda _: _decoder_rate(work),
        OURS: lambda reports: _own_rate(work, reports),
        PIXART: lambda _: _peer_rate(work, PIXART),
    }
    if work.recipe.images.crop == "adm":  # fast-DiT knows no other
        cells[FAST_DIT] = lambda _: _peer_rate(work, FAST_DIT)
    if work.text_recipe:
        cells[OUR_CAPTIONS] = lambda _: _own_caption_rate(work, captions)
        cells[PIXART_CAPTIONS] = lambda _: _peer_caption_rate(work)
    return cells


def _encoder_rate(work: Work) -> float:
    encoder = ImageEncoder(work.recipe.vae, work.request.device)
    encoder.encode(work.batches[0])  # what is chosen or compiled once

    def pictures() -> Iterator[int]:
        while True:
            for batch in work.batches:
                encoder.encode(batch)
                yield len(batch)

    return _rate(pictures(), work.request.seconds)


def _decoder_rate(work: Work) -> float:
    numbers = [i % len(work.records) for i in range(max(len(work.records), 8 * num_threads()))]
    with Decoders(num_threads()) as decoders, ThreadPoolExecutor(num_threads()) as pool:
        list(pool.map(lambda number: _decode(work, decoders, number), numbers[: 2 * num_threads()]))  # starts them
        start = time.perf_counter()
        for _ in pool.map(lambda number: _decode(work, decoders, number), numbers):
            pass
        return len(numbers) / (time.perf_counter() - start)


def _rate(counts: Iterator[int], seconds: float) -> float:
    start, done = time.perf_counter(), 0
    for count in counts:
        done += count
        if time.perf_counter() - start >= seconds:
            break
    return done / (time.perf_counter() - start)


def _own_rate(work: Work, reports: list[Report]) -> float:
    report = _precompute(work, work.recipe)
    reports.append(report)
    return report.num_encoded / (report.total_seconds - report.seconds["load"])


def _own_caption_rate(work: Work, found: dict[str, float]) -> float:
    """Captions a second; and how they are padded, into ``found``: the same in each round."""
    assert work.text_recipe is not None
    report = _precompute(work, work.text_recipe)
    text = LatentStore(work.request.scratch / STORE).spec.text
    assert text is not None
    found.update(caption_figures(report, text.width))
    return report.tokens.num_captions / (report.seconds["text"] + report.seconds["write"])


def _caption_bytes(work: Work, recipe: PrecomputeRecipe, progress: Progress) -> dict[str, float]:
    """Bytes a caption in stores of both dtypes, each made for this alone."""
    found: dict[str, float] = {}
    for number, dtype in enumerate(CAPTION_DTYPES):
        progress("captions on disk", number, len(CAPTION_DTYPES))
        narrowed = recipe.store.model_copy(update={"text_dtype": dtype})
        _precompute(work, recipe.model_copy(update={"store": narrowed}))
        found[dtype] = caption_bytes_on_disk(work.request.scratch / STORE)
    progress("captions on disk", len(CAPTION_DTYPES), len(CAPTION_DTYPES))
    return found


def caption_bytes_on_disk(store: Path) -> float:
    """Bytes a caption of the files of ``captions/``: tokens, fill of chunks, shard indexes, where each caption lies.

    The null caption is left out: a store has one, whatever the number of its captions.
    """
    folder = store / CAPTION_PART
    manifest = LatentStore(store).manifest
    assert manifest is not None, "a precompute that returns has sealed its store"
    nulls = {(store / path).name for path in (NULL_EMBEDDING, NULL_SCALES)}
    files = [path for path in files_below(folder) if path.relative_to(folder).parts[0] not in nulls]
    return sum(path.stat().st_size for path in files) / manifest.num_captions


def _precompute(work: Work, recipe: PrecomputeRecipe) -> Report:
    """Into a fresh store."""
    store = fresh_folder(work.request.scratch, STORE, make=False)
    return precompute(
        recipe,
        source_path=work.sample,
        store_path=store,
        device=work.request.device,
        progress=lambda stage, done, total: None,
    )


def _peer_rate(work: Work, name: str) -> float:
    section, out = work.recipe.vae, fresh_folder(work.request.scratch, "peer")
    folder, _ = resolve_model(section.model, section.subfolder, section.revision, what="--vae")
    vae = load_vae(folder, work.request.device)
    if name == FAST_DIT:
        labels, side_px = [record.label for record in work.records], work.recipe.images.resolution
        return steady_rate(fast_dit(work.paths, labels, side_px, vae=vae, out=out), work.request.seconds)
    return steady_rate(pixart_pictures(work.paths, work.buckets, vae=vae, out=out), work.request.seconds)


def _peer_caption_rate(work: Work) -> float:
    assert work.text_recipe is not None
    section = work.text_recipe.text
    folder, _ = resolve_model(section.model, section.subfolder, section.revision, what="--text")
    model, tokenizer = load_text(folder, work.request.device)
    out, seconds = fresh_folder(work.request.scratch, "peer"), work.request.seconds
    return caption_rate(work.captions, model=model, tokenizer=tokenizer, out=out, seconds=seconds)


def caption_figures(report: Report, width: int) -> dict[str, float]:
    """Tokens of a caption and the share of padding, as measured; and bytes as PixArt pads it, computed from 300 tokens.

    Args:
      width: of an embedding.
    """
    manifest = report.manifest
    assert manifest is not None
    return {
        "padded": PIXART_TOKENS * token_bytes(width, "float16"),  # before its compression
        "num_captions": manifest.num_captions,
        "tokens_per_caption": manifest.num_caption_tokens / manifest.num_captions,
        "padding_share": report.tokens.num_padding / report.tokens.num_tokens,
    }


def _memory(work: Work, progress: Progress) -> dict[str, float]:
    """Peak of the encoder alone and of a whole run, each in a process of its own."""
    progress("memory", 0, 2)
    job = {
        "recipe": work.recipe.model_dump(),
        "device": str(work.request.device),
        "batch": work.batches[0].shape[:3],
    }
    alone = peak_mb(job)
    store = fresh_folder(work.request.scratch, STORE, make=False)
    whole = peak_mb(job | {"source": str(work.sample), "store": str(store)})
    progress("memory", 2, 2)
    return {"encoder": alone, "run": whole}


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
