"""The peers' extraction loops, rewritten from their scripts: one picture at a time, one padded caption at a time.

fast-DiT (``extract_features.py``): a DataLoader of four workers and batches of one, ADM's crop, a random flip, one draw
of the posterior, scaled, one .npy for it and one for the label. PixArt (``tools/extract_features.py``): batches of one
in the several-ratio form, thirteen workers, squashed into the bucket, mean and deviation, one .npy a picture; for
captions twenty threads and a lock around the text encoder, each caption padded to 300 tokens, a compressed .npz each.
A GPU computes in their dtypes (float32 with TF32; automatic float16; a T5 in float16), a CPU in float32, as ours does.
Only the steady loop is timed, without loading models or starting workers.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

import diffusers
import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from transformers import AutoTokenizer, T5EncoderModel

from ....precompute.encoders.model_files import read_config

FAST_DIT_WORKERS, PIXART_WORKERS = 4, 13
PIXART_THREADS, PIXART_TOKENS = 20, 300
FEWEST = 4  # items measured, however slow
SCALE = 0.18215  # fast-DiT's own constant

Transform = Callable[[Image.Image], torch.Tensor]


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    """Picture files, opened with Pillow and transformed; an item is (picture, number of the file)."""

    def __init__(self, paths: Sequence[Path], transforms: Sequence[Transform]) -> None:
        self._paths, self._transforms = paths, transforms

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        with Image.open(self._paths[number]) as picture:
            return self._transforms[number](picture.convert("RGB")), number


def to_tensor(picture: Image.Image) -> torch.Tensor:
    """(3, height_px, width_px) float32 in -1..1."""
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255
    return (pixels - 0.5) / 0.5


def adm_square(picture: Image.Image, side_px: int) -> Image.Image:
    """ADM's crop (guided-diffusion): halve with a box while twice as large, resize bicubically, crop the centre."""
    while min(picture.size) >= 2 * side_px:
        picture = picture.resize((picture.width // 2, picture.height // 2), Image.Resampling.BOX)
    scale = side_px / min(picture.size)
    picture = picture.resize((round(picture.width * scale), round(picture.height * scale)), Image.Resampling.BICUBIC)
    left, top = (picture.width - side_px) // 2, (picture.height - side_px) // 2
    return picture.crop((left, top, left + side_px, top + side_px))


def squash(picture: Image.Image, height_px: int, width_px: int) -> Image.Image:
    """Resize to exactly the bucket, ignoring the aspect ratio."""
    return picture.resize((width_px, height_px), Image.Resampling.BICUBIC)


class FlippedAtRandom:
    """fast-DiT's transform: ADM's crop, then a random flip."""

    def __init__(self, side_px: int) -> None:
        self._side_px = side_px

    def __call__(self, picture: Image.Image) -> torch.Tensor:
        tensor = to_tensor(adm_square(picture, self._side_px))
        return tensor.flip(2) if torch.rand(1).item() < 0.5 else tensor


class Squashed:
    """PixArt's transform into a bucket."""

    def __init__(self, height_px: int, width_px: int) -> None:
        self._size = height_px, width_px

    def __call__(self, picture: Image.Image) -> torch.Tensor:
        return to_tensor(squash(picture, *self._size))


def fast_dit(
    paths: Sequence[Path], labels: Sequence[int], side_px: int, *, vae: Any, out: Path, workers: int = FAST_DIT_WORKERS
) -> Iterator[int]:
    """Extract one picture after another; yields the number of each.

    Args:
      vae: a diffusers autoencoder, from ``load_vae``.
      out: folder of the features.
    """
    for name in ("features", "labels"):
        (out / name).mkdir(parents=True, exist_ok=True)
    pictures = Pictures(paths, [FlippedAtRandom(side_px)] * len(paths))
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        for batch, numbers in _one_by_one(pictures, workers, vae):
            with torch.no_grad():
                encoded = vae.encode(batch.to(vae.device))
                latent = encoded.latent_dist.sample() if hasattr(encoded, "latent_dist") else _only(encoded)
                latent = latent.mul_(SCALE)
            number = int(numbers[0])
            np.save(out / "features" / f"{number}.npy", latent.cpu().numpy())
            np.save(out / "labels" / f"{number}.npy", np.array([labels[number]]))
            yield number
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def pixart_pictures(
    paths: Sequence[Path], buckets: Sequence[tuple[int, int]], *, vae: Any, out: Path, workers: int = PIXART_WORKERS
) -> Iterator[int]:
    """Extract one picture after another; yields the number of each.

    Args:
      buckets: (height_px, width_px) of each.
    """
    out.mkdir(parents=True, exist_ok=True)
    pictures = Pictures(paths, [Squashed(*bucket) for bucket in buckets])
    for batch, numbers in _one_by_one(pictures, workers, vae):
        with torch.no_grad(), torch.autocast("cuda", torch.float16, enabled=_pins(vae)):
            encoded = vae.encode(batch.to(vae.device))
            if hasattr(encoded, "latent_dist"):
                latents = torch.cat([encoded.latent_dist.mean, encoded.latent_dist.std], dim=1)
            else:
                latents = _only(encoded)
        for latent, number in zip(latents.cpu().numpy(), numbers.tolist(), strict=True):
            np.save(out / f"{number}.npy", latent)
            yield number


def pixart_captions(captions: Sequence[str], *, model: Any, tokenizer: Any, out: Path) -> float:
    """Extract all captions with twenty threads; returns the seconds."""
    out.mkdir(parents=True, exist_ok=True)
    lock = Lock()

    def job(number: int) -> None:
        with torch.no_grad():
            with lock:
                tokens = tokenizer(
                    [captions[number].strip()],
                    max_length=PIXART_TOKENS,
                    padding="max_length",
                    truncation=True,
                    return_tensors="pt",
                ).to(model.device)
                features = model(tokens.input_ids, attention_mask=tokens.attention_mask)[0]
            arrays = {
                "caption_feature": features.to(torch.float16).cpu().numpy(),
                "attention_mask": tokens.attention_mask.to(torch.int16).cpu().numpy(),
            }
            np.savez_compressed(out / f"{number}.npz", **arrays)

    start = time.perf_counter()
    with ThreadPoolExecutor(PIXART_THREADS) as pool:
        for _ in pool.map(job, range(len(captions))):
            pass
    return time.perf_counter() - start


def load_vae(folder: Path, device: torch.device) -> Any:
    """Load the VAE in float32, as both peers do."""
    name = read_config(folder, what="--vae")["_class_name"]
    model = getattr(diffusers, name).from_pretrained(folder, use_safetensors=True, low_cpu_mem_usage=False)
    return model.to(device).eval()


def load_text(folder: Path, device: torch.device) -> tuple[Any, Any]:
    """Load the T5 and its tokenizer, in float16 on a GPU, as PixArt does."""
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    model: Any = T5EncoderModel.from_pretrained(folder, dtype=dtype, use_safetensors=True)
    return model.to(device).eval(), AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def steady_rate(loop: Iterator[int], seconds: float) -> float:
    """Items a second of a loop after its first item, over ``seconds`` and at least ``FEWEST`` items."""
    try:
        next(loop)
        start, done = time.perf_counter(), 0
        for _ in loop:
            done += 1
            if done >= FEWEST and time.perf_counter() - start >= seconds:
                break
        return done / (time.perf_counter() - start)
    finally:
        getattr(loop, "close", lambda: None)()  # ends a generator's workers


def caption_rate(captions: Sequence[str], *, model: Any, tokenizer: Any, out: Path, seconds: float) -> float:
    """Captions a second of PixArt's loop, over about ``seconds``."""
    one = pixart_captions(captions[:1], model=model, tokenizer=tokenizer, out=out)
    count = min(len(captions), max(FEWEST, math.ceil(seconds / one)))
    step = len(captions) // count
    chosen = [captions[i * step] for i in range(count)]
    return count / pixart_captions(chosen, model=model, tokenizer=tokenizer, out=out)


def _one_by_one(pictures: Pictures, workers: int, vae: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about more workers than cores: the peers' own setting
        return iter(DataLoader(pictures, batch_size=1, num_workers=workers, pin_memory=_pins(vae)))


def _pins(vae: Any) -> bool:
    return vae.device.type == "cuda"


def _only(encoded: Any) -> torch.Tensor:
    """The latents of an autoencoder without posterior."""
    return encoded.latents if hasattr(encoded, "latents") else encoded.latent
