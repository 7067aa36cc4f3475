"""Stage 1 beside its bare encoder, and its captions beside the extraction loop of PixArt.

    python benchmarks/encode.py --source coco --scratch bench

Measured once a round, in alternating order, on the same images, weights and device:

- bare encoder: the VAE on up to four batches, decoded and in memory;
- bare decode: reading, decoding and cropping, with the encoder idle;
- leandit: a whole precompute into a fresh store (listing, planning, decoding, encoding, writing, sealing);
- with ``--latency-ms``: the same from a URL, each of whose requests is answered so much later;
- with ``--text``: the text stage of a precompute with its writing, and PixArt's loop, once it is seen to encode as we
  do; bytes a caption on disk.

PixArt's loop (``tools/extract_features.py``) is written from scratch after what the script does: twenty threads with a
lock around the text encoder, in float16 on a GPU, each caption padded to 300 tokens, a compressed .npz each. Nobody is
charged with loading models. A ratio is of two rates of the same round.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from threading import Lock
from typing import Annotated, Any

import fsspec
import numpy as np
import torch
import typer
from fsspec.implementations.local import LocalFileSystem
from inputs import text_folder, vae_folder, write_sample
from measuring import alternate, fresh_folder, machine, median_and_range, print_rates, print_table, ratios
from PIL import Image
from transformers import AutoTokenizer, T5EncoderModel

from leandit.datasets.disk.files import files_below
from leandit.datasets.format.buckets import bucket_size
from leandit.datasets.format.row_layout import CAPTION_PART, NULL_EMBEDDING, NULL_SCALES
from leandit.datasets.format.token_dtypes import token_bytes
from leandit.datasets.store import LatentStore
from leandit.precompute import config as precompute_config
from leandit.precompute.config import PrecomputeRecipe
from leandit.precompute.encoders.vae import ImageEncoder
from leandit.precompute.images.bucket_tables import resize_filter
from leandit.precompute.images.decoders import Decoders
from leandit.precompute.pipeline import Report, precompute
from leandit.precompute.planning.images import num_threads, place_image
from leandit.tools.cli.options import Device, Overrides, torch_device

Figures = dict[str, list[float]]
Scratch = Annotated[Path, typer.Option(help="Folder for samples, random encoders and stores.")]
Vae = Annotated[str, typer.Option(help="Folder, shipped:vae or random:sd.")]
Text = Annotated[str, typer.Option(help="Folder, shipped:t5 or random:t5-small to random:t5-xxl; else no captions.")]
ENCODER, DECODER, OURS, FAR = "bare encoder", "bare decode", "leandit", "leandit from a URL"
OUR_CAPTIONS, PIXART_CAPTIONS, PADDING, BUSY = "leandit captions", "PixArt captions", "padding", "encode stage busy"
BASE_RECIPE = "imagenet-256"
NO_CHECK = "vae.min_psnr=0"  # random VAEs would fail it, and its time is not that of encoding
SMALL_IMAGES = ("vae.model=shipped:vae", NO_CHECK, "images.resolution=32", "images.crop=adm", "images.buckets=square")
MOST_BATCHES = 4  # decoded, for the bare encoder
MAX_ERROR = 0.1  # of the norm: encoders in bfloat16 and in float16 differ by a hundredth
PIXART_THREADS, PIXART_TOKENS = 20, 300
FEWEST = 4  # captions measured, however slow


def main(
    source: Annotated[
        str, typer.Option(help="Images, with captions for --text, of which some are used; or drawn:256.")
    ],
    scratch: Scratch,
    vae: Vae = "random:sd",
    text: Text = "",
    tokenizer: Annotated[str, typer.Option(help="Tokenizer of a random T5; else that of shipped:t5.")] = "",
    records: Annotated[int, typer.Option(min=1, help="Images to encode; if the source has fewer, they repeat.")] = 256,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    seconds: Annotated[float, typer.Option(help="Least length of a measured loop.")] = 5.0,
    latency_ms: Annotated[float, typer.Option(min=0, help="Of each request of a further cell, from a URL.")] = 0.0,
    device: Device = "auto",
    overrides: Overrides = None,
) -> None:
    """Compare a precompute with its bare encoder, and its captions with the extraction loop of PixArt."""
    where = str(torch_device(device))
    shared: dict[str, Any] = {"device": where, "scratch": str(scratch.resolve()), "source": source, "records": records}
    shared |= {"rounds": rounds, "seconds": seconds, "settings": overrides or []}
    print(f"{machine()}; device {where}; VAE {vae}, text {text or 'none'}; medians of {rounds} rounds (ranges)\n")
    found = measure_precompute(vae=vae, latency_ms=latency_ms, **shared)
    print_rates("images/s", {name: found[name] for name in found if name != BUSY}, OURS)
    both = [1 / (1 / a + 1 / b) for a, b in zip(found[ENCODER], found[DECODER], strict=True)]
    facts = [
        ("encode stage busy, of the run", median_and_range(found[BUSY])),
        ("leandit, of one processor that decodes and encodes", median_and_range(ratios(found[OURS], both))),
    ]
    if latency_ms:
        facts.append(("leandit from a URL, of local", median_and_range(ratios(found[FAR], found[OURS]))))
    if text:
        found = measure_captions(text=text, tokenizer=tokenizer, with_bytes=True, **shared)
        print_rates("captions/s", {name: found[name] for name in (OUR_CAPTIONS, PIXART_CAPTIONS)}, OUR_CAPTIONS)
        facts.append(("padding computed, of all tokens", median_and_range(found[PADDING], "{:.1%}".format)))
        for dtype in ("float16", "int8"):
            times = f"{found[f'padded bytes, of ours in {dtype}'][0]:.1f}x"
            facts.append((f"bytes a caption, padded in float16, of ours in {dtype}", times))
    print_table([("", ""), *facts])


def measure_precompute(
    device: str,
    scratch: str,
    source: str,
    vae: str,
    records: int,
    rounds: int,
    seconds: float,
    settings: list[str],
    latency_ms: float = 0.0,
) -> Figures:
    """Images/s of each cell in each round, and the share of each precompute in which its encode stage is busy."""
    where, home, busy = torch.device(device), Path(scratch), list[float]()
    settings = [*settings, f"vae.model={vae_folder(vae, home)}", NO_CHECK, "text.kind=none"]
    recipe = precompute_config.load(BASE_RECIPE, settings)
    if not recipe.vae.batch_size:
        raise ValueError(
            "vae.batch_size 0: expected a fixed size, for the bare encoder too. Use --set vae.batch_size=N"
        )
    folder = fresh_folder(home, "sample")
    placed = [(path, bucket_of(path, recipe)) for path in write_sample(source, folder, records)[0]]
    paths, buckets = zip(*[(path, bucket) for path, bucket in placed if bucket], strict=True)
    images = recipe.images

    def decode(decoders: Decoders, number: int) -> np.ndarray:
        how: dict[str, Any] = {"crop": images.crop, "resize_filter": resize_filter(images.buckets, images.resolution)}
        size = paths[number].stat().st_size
        return decoders.decode(paths[number], 0, size, bucket=buckets[number], **how).pixels

    with Decoders(num_threads()) as decoders:
        batches = decoded_batches(recipe, buckets, lambda number: decode(decoders, number))

    def rate(images: Path | str) -> tuple[float, float]:
        report, _ = run_precompute(recipe, images, home, where)
        seconds_loaded = report.total_seconds - report.seconds["load"]
        return report.num_encoded / seconds_loaded, report.seconds["encode"] / seconds_loaded

    def ours() -> float:
        images_a_second, share = rate(folder)
        busy.append(share)
        return images_a_second

    cells = {
        ENCODER: lambda: encoder_rate(recipe, where, batches, seconds),
        DECODER: lambda: decoder_rate(decode, len(paths)),
        OURS: ours,
    }
    if latency_ms:
        FarAway.latency_seconds = latency_ms / 1000
        fsspec.register_implementation(FarAway.protocol, FarAway, clobber=True)
        cells[FAR] = lambda: rate(f"{FarAway.protocol}://{folder}")[0]
    return alternate(cells, rounds) | {BUSY: busy}


def measure_captions(
    device: str,
    scratch: str,
    source: str,
    text: str,
    records: int,
    rounds: int,
    seconds: float,
    settings: list[str],
    *,
    tokenizer: str = "",
    with_bytes: bool = False,
) -> Figures:
    """Captions/s of ours and of PixArt's loop in each round, and the padding that ours computed, of all its tokens.

    The precompute encodes images too, small ones, whose time is not counted.
    """
    where, home, padding = torch.device(device), Path(scratch), list[float]()
    weights = text_folder(text, home, where, tokenizer)
    settings = [*settings, "text.kind=t5", f"text.model={weights}", *SMALL_IMAGES, "vae.batch_size=64"]
    recipe, folder = precompute_config.load(BASE_RECIPE, settings), fresh_folder(home, "sample")
    _, captions = write_sample(source, folder, records)
    if not captions:
        raise ValueError(f"source '{source}': expected captions for --text, got none")

    def ours() -> float:
        report, _ = run_precompute(recipe, folder, home, where)
        tokens = report.tokens
        padding.append(tokens.num_padding / tokens.num_tokens)
        return tokens.num_captions / (report.seconds["text"] + report.seconds["write"])

    def theirs() -> float:
        models, out = load_t5(weights, where), fresh_folder(home, "extracted")
        return caption_rate(captions, seconds, out=out, **models)

    _, store = run_precompute(recipe, folder, home, where)
    out, first = fresh_folder(home, "extracted"), store.captions["text"][0].as_py()
    pixart_captions([first], out=out, **load_t5(weights, where))
    stored = store.caption_embedding(0)
    with np.load(out / "0.npz") as arrays:
        check_equal("the T5 of PixArt's loop", arrays["caption_feature"][0, : len(stored)], stored)
    figures = alternate({OUR_CAPTIONS: ours, PIXART_CAPTIONS: theirs}, rounds) | {PADDING: padding}
    for dtype in ("float16", "int8") if with_bytes else ():
        narrowed = recipe.store.model_copy(update={"text_dtype": dtype})
        _, store = run_precompute(recipe.model_copy(update={"store": narrowed}), folder, home, where)
        padded = PIXART_TOKENS * token_bytes(stored.shape[1], "float16")  # before compression
        figures[f"padded bytes, of ours in {dtype}"] = [padded / caption_bytes(store)]
    return figures


def run_precompute(
    recipe: PrecomputeRecipe, folder: Path | str, scratch: Path, device: torch.device
) -> tuple[Report, LatentStore]:
    """Run a precompute into a fresh store."""
    path = fresh_folder(scratch, "store") / "store"
    report = precompute(recipe, source_path=folder, store_path=path, device=device, progress=no_progress)
    return report, LatentStore(path)


class FarAway(LocalFileSystem):
    """A local folder whose every request is answered late, as a store of objects does.

    Each is made of another file system, because ``ls`` and ``cat_file`` of a local one ask for ``info`` too.
    """

    protocol = "faraway"
    cachable = False
    latency_seconds = 0.0
    near = LocalFileSystem()

    def ls(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """One request a folder."""
        time.sleep(self.latency_seconds)
        return self.near.ls(self._strip_protocol(path), *args, **kwargs)

    def info(self, path: str, **kwargs: Any) -> Any:
        """One request."""
        time.sleep(self.latency_seconds)
        return self.near.info(self._strip_protocol(path), **kwargs)

    def cat_file(self, path: str, *args: Any, **kwargs: Any) -> bytes:
        """One request a range."""
        time.sleep(self.latency_seconds)
        return self.near.cat_file(self._strip_protocol(path), *args, **kwargs)


def no_progress(stage: str, done: int, total: int) -> None:
    """Show no progress of a precompute."""


def bucket_of(path: Path, recipe: PrecomputeRecipe) -> tuple[int, int] | None:
    """The (height_px, width_px) bucket of an image; None if it fits none."""
    with Image.open(path) as image:
        placed = place_image(image.height, image.width, recipe.images)
        assert isinstance(placed, dict), "a recipe of a benchmark has a bucket for each of its images"
        return bucket_size(placed["bucket"])


def decoded_batches(
    recipe: PrecomputeRecipe, buckets: tuple[tuple[int, int], ...], decode: Callable[[int], np.ndarray]
) -> list[np.ndarray]:
    """Some batches of the recipe's size, full ones first; (B, height_px, width_px, 3) uint8."""
    by_bucket: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, bucket in enumerate(buckets):
        by_bucket[bucket].append(number)
    size = recipe.vae.batch_size
    batches = [rows[i : i + size] for rows in by_bucket.values() for i in range(0, len(rows), size)]
    batches.sort(key=len, reverse=True)
    return [np.stack([decode(number) for number in rows]) for rows in batches[:MOST_BATCHES]]


def pixart_captions(captions: Sequence[str], *, model: Any, tokenizer: Any, out: Path) -> float:
    """Extract all captions as PixArt does; returns the seconds."""
    lock = Lock()
    how = {"max_length": PIXART_TOKENS, "padding": "max_length", "truncation": True, "return_tensors": "pt"}

    @torch.no_grad()
    def extract(number: int) -> None:
        with lock:
            tokens = tokenizer([captions[number].strip()], **how).to(model.device)
            features = model(tokens.input_ids, attention_mask=tokens.attention_mask)[0]
        caption_feature = features.to(torch.float16).cpu().numpy()
        attention_mask = tokens.attention_mask.to(torch.int16).cpu().numpy()
        np.savez_compressed(out / f"{number}.npz", caption_feature=caption_feature, attention_mask=attention_mask)

    start = time.perf_counter()
    with ThreadPoolExecutor(PIXART_THREADS) as pool:
        list(pool.map(extract, range(len(captions))))
    return time.perf_counter() - start


def load_t5(folder: Path, device: torch.device) -> dict[str, Any]:
    """Load a T5 and its tokenizer, in float16 on a GPU, as PixArt does: "model" and "tokenizer"."""
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    model: Any = T5EncoderModel.from_pretrained(folder, dtype=dtype, use_safetensors=True)
    return {"model": model.to(device).eval(), "tokenizer": AutoTokenizer.from_pretrained(folder)}


def caption_rate(captions: Sequence[str], seconds: float, *, out: Path, **models: Any) -> float:
    """Captions a second of PixArt's loop, on captions spread over all of them, for about ``seconds``.

    Args:
      models: from ``load_t5``.
    """
    first = pixart_captions(captions[:1], out=out, **models)
    count = min(len(captions), max(FEWEST, math.ceil(seconds / first)))
    chosen = [captions[i * len(captions) // count] for i in range(count)]
    return count / pixart_captions(chosen, out=out, **models)


def check_equal(what: str, theirs: np.ndarray, ours: np.ndarray) -> None:
    """Raises: ValueError: a peer computes something else, so its time means nothing."""
    a, b = theirs.astype(np.float64), ours.astype(np.float64)
    error = np.linalg.norm(a - b) / np.linalg.norm(b)
    if not error <= MAX_ERROR:
        raise ValueError(f"{what} differs from ours by {error:.1%} of its norm, expected at most {MAX_ERROR:.0%}")


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


def decoder_rate(decode: Callable[[Decoders, int], object], num_images: int) -> float:
    """Images/s of decoding and cropping alone, in as many processes as a precompute has."""
    count = max(num_images, 8 * num_threads())
    with Decoders(num_threads()) as decoders, ThreadPoolExecutor(num_threads()) as pool:
        list(pool.map(lambda number: decode(decoders, number % num_images), range(2 * num_threads())))  # starts them
        start = time.perf_counter()
        list(pool.map(lambda number: decode(decoders, number % num_images), range(count)))
        return count / (time.perf_counter() - start)


def caption_bytes(store: LatentStore) -> float:
    """Bytes a caption of the files of ``captions/``, without the null caption, of which a store has just one."""
    nulls = store.path / NULL_EMBEDDING, store.path / NULL_SCALES
    files = [path for path in files_below(store.path / CAPTION_PART) if not any(map(path.is_relative_to, nulls))]
    return sum(path.stat().st_size for path in files) / len(store.captions)


if __name__ == "__main__":
    typer.run(main)
