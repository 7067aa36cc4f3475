"""The rates that ``leandit bench precompute`` measures in each round, on the same pictures, weights and device."""

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
class PrecomputeRequest:
    """What to measure.

    Args:
      source: of pictures, with captions for ``text``; our run and the peers read the same sample of it.
      scratch: folder for the sample, random encoders, stores and the peers' files.
      vae, text: hub id, folder, or "random:SHAPE"; without text, captions are not measured.
      tokenizer: folder of the tokenizer of a random text encoder.
      records: pictures of the sample.
      rounds: measurements of every cell.
      seconds: least time that a loop is measured.
      overrides: of the recipe.
      quick: rates alone, without memory and bytes on disk.
      command: the command line, for the report.
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
    quick: bool = False
    command: str = field(default_factory=lambda: shlex.join(["leandit", *sys.argv[1:]]))


@dataclass(frozen=True)
class BenchInputs:
    """The inputs that all cells share."""

    request: PrecomputeRequest
    recipe: PrecomputeRecipe
    text_recipe: PrecomputeRecipe | None
    sample: Path
    records: list[SourceRecord]
    buckets: list[tuple[int, int]]
    batches: list[np.ndarray]

    @property
    def paths(self) -> list[Path]:
        """Paths of the pictures."""
        return [self.sample / record.path for record in self.records]

    @property
    def captions(self) -> list[str]:
        """Distinct captions, in the order of the records."""
        return list(dict.fromkeys(text for record in self.records for text in caption_texts(record)))


def cells_of(inputs: BenchInputs, captions: dict[str, float]) -> dict[str, Callable[[list[Report]], float]]:
    """The measurements of a round; each returns pictures or captions a second."""
    cells: dict[str, Callable[[list[Report]], float]] = {
        ENCODER: lambda _: _encoder_rate(inputs),
        DECODER: lambda _: _decoder_rate(inputs),
        OURS: lambda reports: _own_rate(inputs, reports),
        PIXART: lambda _: _peer_rate(inputs, PIXART),
    }
    if inputs.recipe.images.crop == "adm":  # the only crop of fast-DiT
        cells[FAST_DIT] = lambda _: _peer_rate(inputs, FAST_DIT)
    if inputs.text_recipe:
        cells[OUR_CAPTIONS] = lambda _: _own_caption_rate(inputs, captions)
        cells[PIXART_CAPTIONS] = lambda _: _peer_caption_rate(inputs)
    return cells


def _encoder_rate(inputs: BenchInputs) -> float:
    encoder = ImageEncoder(inputs.recipe.vae, inputs.request.device)
    encoder.encode(inputs.batches[0])  # warm up: kernels are chosen and compiled

    def pictures() -> Iterator[int]:
        while True:
            for batch in inputs.batches:
                encoder.encode(batch)
                yield len(batch)

    return _rate(pictures(), inputs.request.seconds)


def _decoder_rate(inputs: BenchInputs) -> float:
    numbers = [i % len(inputs.records) for i in range(max(len(inputs.records), 8 * num_threads()))]
    with Decoders(num_threads()) as decoders, ThreadPoolExecutor(num_threads()) as pool:
        list(pool.map(lambda number: decode(inputs, decoders, number), numbers[: 2 * num_threads()]))  # starts them
        start = time.perf_counter()
        for _ in pool.map(lambda number: decode(inputs, decoders, number), numbers):
            pass
        return len(numbers) / (time.perf_counter() - start)


def _rate(counts: Iterator[int], seconds: float) -> float:
    start, done = time.perf_counter(), 0
    for count in counts:
        done += count
        if time.perf_counter() - start >= seconds:
            break
    return done / (time.perf_counter() - start)


def _own_rate(inputs: BenchInputs, reports: list[Report]) -> float:
    report = precompute_fresh(inputs, inputs.recipe)
    reports.append(report)
    return report.num_encoded / (report.total_seconds - report.seconds["load"])


def _own_caption_rate(inputs: BenchInputs, figures: dict[str, float]) -> float:
    """Captions a second; fills ``figures`` with the tokens and padding, which are equal in each round."""
    assert inputs.text_recipe is not None
    report = precompute_fresh(inputs, inputs.text_recipe)
    text = LatentStore(inputs.request.scratch / STORE).spec.text
    assert text is not None
    figures.update(caption_figures(report, text.width))
    return report.tokens.num_captions / (report.seconds["text"] + report.seconds["write"])


def precompute_fresh(inputs: BenchInputs, recipe: PrecomputeRecipe) -> Report:
    """Run a precompute into a fresh store."""
    store = fresh_folder(inputs.request.scratch, STORE, make=False)
    return precompute(
        recipe,
        source_path=inputs.sample,
        store_path=store,
        device=inputs.request.device,
        progress=lambda stage, done, total: None,
    )


def _peer_rate(inputs: BenchInputs, name: str) -> float:
    section, out = inputs.recipe.vae, fresh_folder(inputs.request.scratch, "peer")
    folder, _ = resolve_model(
        section.model, section.subfolder, section.revision, files=(CONFIG, *weight_names(VAE_WEIGHTS)), what="--vae"
    )
    vae = load_vae(folder, inputs.request.device)
    if name == FAST_DIT:
        labels, side_px = [record.label for record in inputs.records], inputs.recipe.images.resolution
        return steady_rate(fast_dit(inputs.paths, labels, side_px, vae=vae, out=out), inputs.request.seconds)
    return steady_rate(pixart_pictures(inputs.paths, inputs.buckets, vae=vae, out=out), inputs.request.seconds)


def _peer_caption_rate(inputs: BenchInputs) -> float:
    assert inputs.text_recipe is not None
    section = inputs.text_recipe.text
    folder, _ = resolve_model(
        section.model,
        section.subfolder,
        section.revision,
        files=(CONFIG, *weight_names(TEXT_WEIGHTS), *TOKENIZER_FILES),
        what="--text",
    )
    model, tokenizer = load_text(folder, inputs.request.device)
    out, seconds = fresh_folder(inputs.request.scratch, "peer"), inputs.request.seconds
    return caption_rate(inputs.captions, model=model, tokenizer=tokenizer, out=out, seconds=seconds)


def caption_figures(report: Report, width: int) -> dict[str, float]:
    """Measured tokens a caption and share of padding; bytes a caption as PixArt pads it, computed from 300 tokens.

    Args:
      width: of an embedding.
    """
    manifest = report.manifest
    assert manifest is not None
    return {
        "padded": PIXART_TOKENS * token_bytes(width, "float16"),  # before compression
        "num_captions": manifest.num_captions,
        "tokens_per_caption": manifest.num_caption_tokens / manifest.num_captions,
        "padding_share": report.tokens.num_padding / report.tokens.num_tokens,
    }


def decode(inputs: BenchInputs, decoders: Decoders, number: int) -> np.ndarray:
    """Decode a picture for its bucket; (height_px, width_px, 3) uint8."""
    record, images = inputs.records[number], inputs.recipe.images
    return decoders.picture(
        inputs.sample / record.path,
        record.offset,
        record.num_bytes,
        bucket=inputs.buckets[number],
        crop=images.crop,
        resize_filter=resize_filter(images.buckets, images.resolution),
        exif_orientation=images.exif_orientation,
    ).pixels
