"""What ``leandit bench precompute`` measures in each round: a cell a rate, on the same pictures, weights and device."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from ....datasets.format.buckets import resize_filter
from ....datasets.format.token_dtypes import token_bytes
from ....datasets.store import LatentStore
from ....precompute.config import PrecomputeRecipe
from ....precompute.encoders.model_files import (
    CONFIG,
    TEXT_WEIGHTS,
    TOKENIZER_FILES,
    VAE_WEIGHTS,
    resolve_model,
    weight_names,
)
from ....precompute.encoders.vae import ImageEncoder
from ....precompute.images.decoders import Decoders
from ....precompute.pipeline import Report, precompute
from ....precompute.planning.pictures import num_threads
from ....precompute.sources.files.record import SourceRecord, caption_texts
from ..harness.scratch import fresh_folder
from .extract import PIXART_TOKENS, caption_rate, fast_dit, load_text, load_vae, pixart_pictures, steady_rate

STORE = "store"
ENCODER, DECODER, OURS, FAST_DIT, PIXART = "bare encoder", "bare decode", "leandit", "fast-DiT", "PixArt"
OUR_CAPTIONS, PIXART_CAPTIONS = "leandit captions", "PixArt captions"


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


def cells_of(work: Work, captions: dict[str, float]) -> dict[str, Callable[[list[Report]], float]]:
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
        list(pool.map(lambda number: decode(work, decoders, number), numbers[: 2 * num_threads()]))  # starts them
        start = time.perf_counter()
        for _ in pool.map(lambda number: decode(work, decoders, number), numbers):
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
    report = precompute_anew(work, work.recipe)
    reports.append(report)
    return report.num_encoded / (report.total_seconds - report.seconds["load"])


def _own_caption_rate(work: Work, found: dict[str, float]) -> float:
    """Captions a second; and how they are padded, into ``found``: the same in each round."""
    assert work.text_recipe is not None
    report = precompute_anew(work, work.text_recipe)
    text = LatentStore(work.request.scratch / STORE).spec.text
    assert text is not None
    found.update(caption_figures(report, text.width))
    return report.tokens.num_captions / (report.seconds["text"] + report.seconds["write"])


def precompute_anew(work: Work, recipe: PrecomputeRecipe) -> Report:
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
    folder, _ = resolve_model(
        section.model, section.subfolder, section.revision, files=(CONFIG, *weight_names(VAE_WEIGHTS)), what="--vae"
    )
    vae = load_vae(folder, work.request.device)
    if name == FAST_DIT:
        labels, side_px = [record.label for record in work.records], work.recipe.images.resolution
        return steady_rate(fast_dit(work.paths, labels, side_px, vae=vae, out=out), work.request.seconds)
    return steady_rate(pixart_pictures(work.paths, work.buckets, vae=vae, out=out), work.request.seconds)


def _peer_caption_rate(work: Work) -> float:
    assert work.text_recipe is not None
    section = work.text_recipe.text
    folder, _ = resolve_model(
        section.model,
        section.subfolder,
        section.revision,
        files=(CONFIG, *weight_names(TEXT_WEIGHTS), *TOKENIZER_FILES),
        what="--text",
    )
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


def decode(work: Work, decoders: Decoders, number: int) -> np.ndarray:
    """Decode a picture for its bucket; (height_px, width_px, 3) uint8."""
    record, images = work.records[number], work.recipe.images
    return decoders.picture(
        work.sample / record.path,
        record.offset,
        record.num_bytes,
        bucket=work.buckets[number],
        crop=images.crop,
        resize_filter=resize_filter(images.buckets, images.resolution),
        exif_orientation=images.exif_orientation,
    ).pixels
