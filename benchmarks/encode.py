"""Stage 1 beside its bare encoder and the extraction loops of others, and what its store saves a training.

    python benchmarks/encode.py precompute --source coco --scratch bench
    python benchmarks/encode.py caching dit-b-2-256 --scratch bench

**precompute** measures once a round, in alternating order, on the same images, weights and device:

- bare encoder: the VAE on up to four of the plan's batches, decoded and in memory;
- bare decode: reading, decoding and cropping, with the encoder idle;
- leandit: a whole precompute into a fresh store (listing, planning, decoding, encoding, writing, sealing);
- fast-DiT, PixArt: their loops (``extraction.py``);
- with ``--text``: the text stage of a precompute with its writing, and PixArt's loop; bytes a caption on disk.

Nobody is charged with loading models. A ratio is of two rates of the same round. Host memory is the peak of a process
that runs a precompute, less that of a process that encodes the same batches alone.

**caching** trains on a store beside training that encodes every batch again, both with the step of ``leandit train``.
Online, a batch starts as pixels in memory (decoding is not counted) and as captions, which the VAE and the T5 encode on
the same device. Captions have the encoder's maximum length, to which PixArt pads.
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain, cycle
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from extraction import PIXART_TOKENS, caption_rate, fast_dit, load_t5, load_vae, pixart_images, steady_rate
from inputs import draw_images, sample_source, text_model, vae_model
from measuring import (
    PeakMemory,
    alternating_rounds,
    fresh_folder,
    log,
    machine,
    measure_in_child,
    median_and_range,
    print_table,
    ratios,
    timed,
)

from leandit.datasets.batches.batch import Batch
from leandit.datasets.disk.files import files_below
from leandit.datasets.format.buckets import resize_filter
from leandit.datasets.format.caption_layout import CAPTION_PART, NULL_EMBEDDING, NULL_SCALES
from leandit.datasets.format.token_dtypes import token_bytes
from leandit.datasets.store import LatentStore
from leandit.precompute import config as precompute_config
from leandit.precompute.config import PrecomputeRecipe, TextSection, VaeSection
from leandit.precompute.encoders.loading import Encoders, load_encoders
from leandit.precompute.encoders.model_files import CONFIG, TEXT_WEIGHTS, VAE_WEIGHTS, resolve_model, weight_names
from leandit.precompute.encoders.model_files import TOKENIZER_FILES as TOKENIZER_NAMES
from leandit.precompute.encoders.vae import ImageEncoder
from leandit.precompute.images.decoders import Decoders
from leandit.precompute.pipeline import Report, precompute
from leandit.precompute.planning.pictures import num_threads, plan_pictures
from leandit.precompute.sources.files.record import SourceRecord, caption_texts
from leandit.precompute.sources.source import list_source
from leandit.tools.cli.options import Device, Overrides, torch_device
from leandit.tools.plan.workload import CLASSES
from leandit.tools.synthetic.batches import synthetic_batch, synthetic_learner
from leandit.tools.synthetic.store import make_store
from leandit.train import config as train_config
from leandit.train.config import TrainRecipe
from leandit.train.loop import endless
from leandit.train.parallel.ranks import ALONE
from leandit.train.run.data import build_loader
from leandit.train.run.model_for_store import model_spec
from leandit.train.step.cpu import keep_freed_memory
from leandit.train.step.train_step import train_step

Result = dict[str, Any]
Scratch = Annotated[Path, typer.Option(help="Folder for samples, random encoders and stores.")]
Vae = Annotated[str, typer.Option(help="Hub id, folder, or random:sd.")]
Text = Annotated[
    str | None, typer.Option(help="Hub id, folder, or random:t5-small to random:t5-xxl; else no captions.")
]
app = typer.Typer(no_args_is_help=True, add_completion=False)

# ----------------------------------------------------------------------------------------------------------- precompute

ENCODER, DECODER, OURS, FAST_DIT, PIXART = "bare encoder", "bare decode", "leandit", "fast-DiT", "PixArt"
OUR_CAPTIONS, PIXART_CAPTIONS = "leandit captions", "PixArt captions"
BASE_RECIPE = "imagenet-256"
NO_CHECK = "vae.min_psnr=0"  # random VAEs would fail it, and its time is not that of encoding
SMALL_IMAGES = ("vae.model=shipped:vae", NO_CHECK, "images.resolution=32", "images.crop=adm", "images.buckets=square")
DRAWN = 64  # images at most; a larger sample repeats them
MOST_BATCHES = 4  # decoded, for the bare encoder


@app.command("precompute")
def precompute_command(
    source: Annotated[str, typer.Option(help="Images, with captions for --text; a sample of them is used.")],
    scratch: Scratch,
    vae: Vae = "random:sd",
    text: Text = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Tokenizer of a random T5; else that of shipped:t5.")] = None,
    records: Annotated[int, typer.Option(min=1, help="Images to encode; if the source has fewer, they repeat.")] = 256,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    seconds: Annotated[float, typer.Option(help="Least length of a measured loop.")] = 5.0,
    device: Device = "auto",
    overrides: Overrides = None,
) -> None:
    """Compare a precompute with its bare encoder and with the extraction loops of fast-DiT and PixArt."""
    where = torch_device(device)
    request = Request(source, scratch.resolve(), where, records, rounds, seconds, overrides or [])
    print(f"{machine()}; device {where}; VAE {vae}, text {text}; medians of {rounds} rounds (ranges)\n")
    images = compare_images(request, vae, with_memory=True)
    rates = images["rates"]
    print_rates("images/s", rates, OURS)
    facts = {
        "leandit, of the slower of encoder and decode": median_and_range(
            ratios(rates[OURS], list(map(min, rates[ENCODER], rates[DECODER])))
        ),
        "encode stage busy, of the run": median_and_range(images["encode_share"]),
        "host memory beyond the encoder, MiB": f"{images['memory_beyond_mib']:.0f}",
    }
    if where.type == "cpu":  # the cores decode and encode, so an image takes the time of both
        both = [1 / (1 / a + 1 / b) for a, b in zip(rates[ENCODER], rates[DECODER], strict=True)]
        facts["leandit, of what the cores do of both"] = median_and_range(ratios(rates[OURS], both))
    if text:
        result = compare_captions(request, text, tokenizer, with_bytes=True)
        print_rates("captions/s", result["rates"], OUR_CAPTIONS)
        captions = result["captions"]
        facts["padding computed, of all tokens"] = f"{captions['padding_share']:.1%}"
        facts |= {
            f"bytes a caption, padded in float16, of ours in {dtype}": f"{captions['padded_bytes'] / size:.1f}x"
            for dtype, size in captions["bytes"].items()
        }
    print_table([("", ""), *facts.items()])


def print_rates(unit: str, rates: dict[str, list[float]], ours: str) -> None:
    """A table of rates, and of our rate as a multiple of each."""
    rows = [
        (name, median_and_range(values, "{:.2f}"), median_and_range(ratios(rates[ours], values), "{:.3g}x"))
        for name, values in rates.items()
    ]
    print_table([("", unit, f"{ours}, of it"), *rows])
    print()


def measure_precompute(
    device: str, scratch: str, side_px: int, records: int, batch: int, vae: str, rounds: int, seconds: float
) -> Result:
    """A precompute of drawn images beside its bare encoder and the loops of fast-DiT and PixArt."""
    where, folder = torch.device(device), Path(scratch)
    source = draw_images(fresh_folder(folder, "source"), min(records, DRAWN), side_px)
    overrides = [f"images.resolution={side_px}", f"vae.batch_size={batch}", f"vae.dtype={vae_dtype(where)}"]
    return compare_images(Request(str(source), folder, where, records, rounds, seconds, overrides), vae)


def measure_captions(device: str, scratch: str, text: str, records: int, rounds: int, seconds: float) -> Result:
    """The captions of a precompute of drawn images beside PixArt's loop."""
    source = draw_images(fresh_folder(Path(scratch), "source"), records, 32)
    request = Request(str(source), Path(scratch), torch.device(device), records, rounds, seconds, [])
    return compare_captions(request, text)


@dataclass(frozen=True)
class Request:
    """What to measure: ``records`` images of a source, each cell ``rounds`` times, loops for ``seconds`` at least.

    Args:
      scratch: folder for the sample, encoders, stores and extracted files.
      overrides: of the recipe.
    """

    source: str
    scratch: Path
    device: torch.device
    records: int
    rounds: int
    seconds: float
    overrides: list[str]

    def sample(self) -> tuple[Path, list[SourceRecord]]:
        """Copy the images; their folder and records."""
        folder = fresh_folder(self.scratch, "sample")
        return folder, sample_source(self.source, folder, self.records)

    def precompute(self, recipe: PrecomputeRecipe, folder: Path) -> tuple[Report, LatentStore]:
        """Run a precompute into a fresh store."""
        path = fresh_folder(self.scratch, "store") / "store"
        report = precompute(recipe, source_path=folder, store_path=path, device=self.device, progress=no_progress)
        return report, LatentStore(path)


@dataclass(frozen=True)
class Sample:
    """Images on a local disk that fit a bucket of a recipe, and their (height_px, width_px) buckets."""

    folder: Path
    recipe: PrecomputeRecipe
    records: list[SourceRecord]
    buckets: list[tuple[int, int]]

    @property
    def paths(self) -> list[Path]:
        """Paths of the images."""
        return [self.folder / record.path for record in self.records]

    def decode(self, decoders: Decoders, number: int) -> np.ndarray:
        """Decode an image for its bucket; (height_px, width_px, 3) uint8."""
        record, images = self.records[number], self.recipe.images
        return decoders.picture(
            self.folder / record.path,
            record.offset,
            record.num_bytes,
            bucket=self.buckets[number],
            crop=images.crop,
            resize_filter=resize_filter(images.buckets, images.resolution),
            exif_orientation=images.exif_orientation,
        ).pixels

    def batches(self, decoders: Decoders) -> list[np.ndarray]:
        """Some decoded batches of the recipe's size, full ones first; (B, height_px, width_px, 3) uint8."""
        by_bucket: dict[tuple[int, int], list[int]] = defaultdict(list)
        for number, bucket in enumerate(self.buckets):
            by_bucket[bucket].append(number)
        size = self.recipe.vae.batch_size
        batches = [rows[i : i + size] for rows in by_bucket.values() for i in range(0, len(rows), size)]
        batches.sort(key=len, reverse=True)
        return [np.stack([self.decode(decoders, number) for number in rows]) for rows in batches[:MOST_BATCHES]]


def compare_images(request: Request, vae: str, *, with_memory: bool = False) -> Result:
    """Images/s of each cell in each round, and the share of each precompute in which its encode stage is busy."""
    scratch, device, seconds = request.scratch, request.device, request.seconds
    settings = [*request.overrides, f"vae.model={vae_model(vae, scratch)}", NO_CHECK, "text.kind=none"]
    recipe = precompute_config.load(BASE_RECIPE, settings)
    if not recipe.vae.batch_size:
        raise ValueError(
            "vae.batch_size 0: expected a fixed size, for the bare encoder too. Add --set vae.batch_size=N"
        )
    folder, found = request.sample()
    with Decoders(num_threads()) as decoders:
        listed = list_source(folder)
        planned = plan_pictures(listed, listed.records, recipe, decoders, progress=lambda done: None)
        kept = [(r, p.bucket) for r, p in zip(found, chain.from_iterable(planned), strict=True) if p.bucket]
        sample = Sample(folder, recipe, [record for record, _ in kept], [bucket for _, bucket in kept])
        batches = sample.batches(decoders)
    section, encode_share = recipe.vae, []
    files = (CONFIG, *weight_names(VAE_WEIGHTS))
    vae_folder, _ = resolve_model(section.model, section.subfolder, section.revision, files=files, what="vae.model")

    def ours() -> float:
        report, _ = request.precompute(recipe, folder)
        seconds_loaded = report.total_seconds - report.seconds["load"]
        encode_share.append(report.seconds["encode"] / seconds_loaded)
        return report.num_encoded / seconds_loaded

    def extraction(loop: Callable[..., Any], *arguments: Any) -> float:
        out = fresh_folder(scratch, "extracted")
        return steady_rate(loop(sample.paths, *arguments, vae=load_vae(vae_folder, device), out=out), seconds)

    cells: dict[str, Callable[[], float]] = {
        ENCODER: lambda: encoder_rate(recipe, device, batches, seconds),
        DECODER: lambda: decoder_rate(sample),
        OURS: ours,
        PIXART: lambda: extraction(pixart_images, sample.buckets),
    }
    if recipe.images.crop == "adm":  # the only crop of fast-DiT
        cells[FAST_DIT] = lambda: extraction(fast_dit, recipe.images.resolution)
    result = {"rates": measure_rounds(cells, request.rounds), "encode_share": encode_share}
    if with_memory:
        how = {"recipe": recipe.model_dump(), "device": str(device)}
        alone = measure_in_child("encode", "encoder_memory_mb", batch=batches[0].shape[:3], **how)
        store = fresh_folder(scratch, "store") / "store"
        whole = measure_in_child("encode", "precompute_memory_mb", source=str(folder), store=str(store), **how)
        result["memory_beyond_mib"] = (whole - alone) * 1e6 / 2**20
    return result


def compare_captions(request: Request, text: str, tokenizer: Path | None = None, *, with_bytes: bool = False) -> Result:
    """Captions/s of ours and of PixArt's loop in each round, and their padding and bytes.

    The precompute encodes images too, small ones, whose time is not counted.
    """
    model = text_model(text, request.scratch, request.device, tokenizer)
    settings = [*request.overrides, "text.kind=t5", f"text.model={model}", *SMALL_IMAGES, "vae.batch_size=64"]
    recipe = precompute_config.load(BASE_RECIPE, settings)
    folder, found = request.sample()
    captions = list(dict.fromkeys(caption for record in found for caption in caption_texts(record)))
    if not captions:
        raise ValueError(f"source '{request.source}': expected captions for --text, got none")
    files = (CONFIG, *weight_names(TEXT_WEIGHTS), *TOKENIZER_NAMES)
    section = recipe.text
    t5_folder, _ = resolve_model(section.model, section.subfolder, section.revision, files=files, what="text.model")
    made: list[tuple[Report, LatentStore]] = []

    def ours() -> float:
        made.append(request.precompute(recipe, folder))
        report, _ = made[-1]
        return report.tokens.num_captions / (report.seconds["text"] + report.seconds["write"])

    def theirs() -> float:
        models, out = load_t5(t5_folder, request.device), fresh_folder(request.scratch, "extracted")
        return caption_rate(captions, request.seconds, out=out, **models)

    rates = measure_rounds({OUR_CAPTIONS: ours, PIXART_CAPTIONS: theirs}, request.rounds)
    text_spec, tokens = made[-1][1].spec.text, made[-1][0].tokens
    assert text_spec is not None, "the recipe has [text]"
    figures: Result = {
        "padding_share": tokens.num_padding / tokens.num_tokens,
        "padded_bytes": PIXART_TOKENS * token_bytes(text_spec.width, "float16"),  # before compression
    }
    if with_bytes:
        figures["bytes"] = {}
        for dtype in ("float16", "int8"):
            narrowed = recipe.store.model_copy(update={"text_dtype": dtype})
            _, store = request.precompute(recipe.model_copy(update={"store": narrowed}), folder)
            figures["bytes"][dtype] = caption_bytes_on_disk(store)
    return {"rates": rates, "captions": figures}


def measure_rounds(cells: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """The rate of each cell in each round."""
    rates: dict[str, list[float]] = defaultdict(list)
    for number, name in alternating_rounds(list(cells), rounds):
        rates[name].append(cells[name]())
        log(f"round {number + 1} of {rounds}: {name} {rates[name][-1]:.2f}/s")
        gc.collect()
        torch.cuda.empty_cache()  # without CUDA it does nothing
    return dict(rates)


def encoder_rate(recipe: PrecomputeRecipe, device: torch.device, batches: list[np.ndarray], seconds: float) -> float:
    """Images/s of the VAE alone, from arrays in memory to arrays in memory."""
    encoder = ImageEncoder(recipe.vae, device)
    encoder.encode(batches[0])  # warm up: kernels are chosen and compiled
    start, count = time.perf_counter(), 0
    for batch in cycle(batches):
        encoder.encode(batch)
        count += len(batch)
        if time.perf_counter() - start >= seconds:
            break
    return count / (time.perf_counter() - start)


def decoder_rate(sample: Sample) -> float:
    """Images/s of decoding and cropping alone, in as many processes as a precompute has."""
    count = max(len(sample.records), 8 * num_threads())
    with Decoders(num_threads()) as decoders, ThreadPoolExecutor(num_threads()) as pool:

        def decode(number: int) -> None:
            sample.decode(decoders, number % len(sample.records))

        list(pool.map(decode, range(2 * num_threads())))  # starts the processes
        start = time.perf_counter()
        list(pool.map(decode, range(count)))
        return count / (time.perf_counter() - start)


def caption_bytes_on_disk(store: LatentStore) -> float:
    """Bytes a caption of the files of ``captions/``, without the null caption, of which a store has just one."""
    nulls = store.path / NULL_EMBEDDING, store.path / NULL_SCALES
    files = [path for path in files_below(store.path / CAPTION_PART) if not any(map(path.is_relative_to, nulls))]
    return sum(path.stat().st_size for path in files) / len(store.captions)


def encoder_memory_mb(recipe: dict, device: str, batch: list[int]) -> float:
    """Peak host memory of this process while the VAE encodes batches (B, height_px, width_px)."""
    with PeakMemory() as peak:
        encoder = ImageEncoder(PrecomputeRecipe.model_validate(recipe).vae, torch.device(device))
        for _ in range(2):
            encoder.encode(np.zeros((*batch, 3), np.uint8))
    return peak.mb


def precompute_memory_mb(recipe: dict, device: str, source: str, store: str) -> float:
    """Peak host memory of this process and its decoders during a precompute."""
    validated, where = PrecomputeRecipe.model_validate(recipe), torch.device(device)
    with PeakMemory() as peak:
        precompute(validated, source_path=source, store_path=Path(store), device=where, progress=no_progress)
    return peak.mb


def no_progress(stage: str, done: int, total: int) -> None:
    """Show no progress of a precompute."""


def vae_dtype(device: torch.device) -> str:
    """bfloat16 on a GPU, float32 on a CPU."""
    return "bfloat16" if device.type == "cuda" else "float32"


# -------------------------------------------------------------------------------------------------------------- caching

CACHED, ONLINE = "cached", "online"
STORED_BATCHES = 4
WARM_STEPS = 3  # not counted: compile, fill caches, allocate


@app.command("caching")
def caching_command(
    recipe: Annotated[str, typer.Argument(help="Name of a shipped recipe of training, or a TOML file.")],
    scratch: Scratch,
    resolution: Annotated[int, typer.Option(min=8, help="Side of the images, in pixels.")] = 256,
    vae: Vae = "random:sd",
    text: Text = None,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Of each, in each round.")] = 10,
    device: Device = "auto",
    overrides: Overrides = None,
) -> None:
    """Compare training on a store with training that encodes every image and caption again."""
    where = str(torch_device(device))
    result = measure_caching(where, str(scratch), recipe, resolution, overrides or [], vae, text, rounds, steps)
    print(f"{machine()}; device {where}; {result['model']}, {resolution} px, batch {result['batch']}; {vae}", end="")
    print(f"; {text} of {result['caption_tokens']} tokens" if text else "", end="; medians (ranges)\n\n")
    print_rates("images/s", result["images_per_second"], CACHED)


def measure_caching(
    device: str,
    scratch: str,
    recipe: str,
    side_px: int,
    settings: list[str],
    vae: str,
    text: str | None,
    rounds: int,
    steps: int,
) -> Result:
    """Images/s of training on a store, and of training that encodes every batch again."""
    where, folder, train_recipe = torch.device(device), Path(scratch).resolve(), train_config.load(recipe, settings)
    if where.type == "cpu":
        keep_freed_memory()  # as ``leandit train`` does
    section = VaeSection(model=vae_model(vae, folder), dtype=vae_dtype(where), min_psnr=0.0)
    text_section = TextSection(kind="t5", model=text_model(text, folder, where)) if text else TextSection()
    encoders = load_encoders(PrecomputeRecipe(vae=section, text=text_section), where)
    store = noise_store(train_recipe, side_px, encoders, fresh_folder(folder, "store"))
    spec, tokens = model_spec(train_recipe, store.spec, str(store.path)), num_tokens(store)
    compiled = train_recipe.run.compile and where.type == "cuda"
    learner = synthetic_learner(train_recipe, spec, tokens, where, compiled=compiled)
    cached = endless(build_loader(train_recipe, [store], spec, where, log, ALONE))
    online = encoded_batches(train_recipe, side_px, encoders, section.batch_size, store, where)
    cells = {
        CACHED: lambda: train_step(learner, next(cached)),
        ONLINE: lambda: train_step(learner, next(online)),
    }
    for step in cells.values():
        timed(step, WARM_STEPS, where)
    size = train_recipe.run.global_batch
    rates = measure_rounds(
        {name: lambda step=step: steps * size / timed(step, steps, where) for name, step in cells.items()}, rounds
    )
    return {"model": spec.name, "batch": size, "caption_tokens": tokens, "images_per_second": rates}


def noise_store(recipe: TrainRecipe, side_px: int, encoders: Encoders, folder: Path) -> LatentStore:
    """A store of noise in the shapes that the encoders return, with captions of full length."""
    encoder = encoders.captions.get("")
    longest = [long_caption(TextSection().max_tokens)]
    _, tokens, width = encoder.encode(longest).token_rows().shape if encoder else (0, 0, 1)
    make_store(
        folder / "store",
        {f"{side_px}x{side_px}": STORED_BATCHES * recipe.run.global_batch},
        channels=encoders.image.num_channels,
        num_classes=recipe.model.num_classes or CLASSES,
        token_counts=[tokens] * 8 if tokens else (),
        text_width=width,
    )
    return LatentStore(folder / "store")


def encoded_batches(
    recipe: TrainRecipe, side_px: int, encoders: Encoders, vae_batch: int, store: LatentStore, device: torch.device
) -> Iterator[Batch]:
    """Batches as the loader delivers them, of images and captions that are encoded when they are asked for."""
    size, tokens, rng = recipe.run.global_batch, num_tokens(store), np.random.default_rng(0)
    spec = {"shift": store.spec.latent.shift, "scale": store.spec.latent.scale}
    while True:
        pixels = rng.integers(0, 256, (size, side_px, side_px, 3), np.uint8)
        rows = [encoders.image.encode(pixels[i : i + vae_batch]) for i in range(0, size, vae_batch)]
        stored = torch.from_numpy(np.concatenate(rows)).to(device)
        if encoders.image.has_posterior:
            mean, logvar = stored.chunk(2, dim=1)
            stored = mean + torch.exp(0.5 * logvar.clamp(-30, 20)) * torch.randn_like(mean)
        batch = synthetic_batch(store.spec, f"{side_px}x{side_px}", size, tokens, device)
        texts = dict(batch.texts)
        if encoder := encoders.captions.get(""):
            captions, count = [long_caption(tokens)] * size, TextSection().batch_size
            parts = [encoder.encode(captions[i : i + count]).token_rows() for i in range(0, size, count)]
            texts[""] = replace(texts[""], tokens=torch.from_numpy(np.concatenate(parts)).to(device))
        yield replace(batch, stored=stored, spec=batch.spec.model_copy(update=spec), texts=texts).finish()


def num_tokens(store: LatentStore) -> int:
    """Tokens of the longest caption; 0 without captions."""
    return store.spec.text.max_tokens if store.spec.text else 0


def long_caption(tokens: int) -> str:
    """A caption that the encoder truncates to its maximum length."""
    return "a " * tokens


if __name__ == "__main__":
    app()
