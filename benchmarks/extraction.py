"""The extraction loops of fast-DiT and PixArt, written from scratch after what their scripts do.

fast-DiT (``extract_features.py``): a DataLoader of four workers and batches of one, ADM's crop, a random flip, one
scaled draw of the posterior, two .npy an image. PixArt (``tools/extract_features.py``): batches of one in the
several-ratio form, thirteen workers, the image squashed into its bucket, mean and deviation, one .npy an image; for
captions twenty threads with a lock around the text encoder, each caption padded to 300 tokens, a compressed .npz each.
A GPU computes in their dtypes (float32 with TF32; automatic float16; a T5 in float16), a CPU in float32. Only the
steady loop is timed, without loading models or starting workers.
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import diffusers
import numpy as np
import torch
from measuring import tf32
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from transformers import AutoTokenizer, T5EncoderModel

from leandit.precompute.encoders.model_files import read_config

FAST_DIT_WORKERS, PIXART_WORKERS = 4, 13
PIXART_THREADS, PIXART_TOKENS = 20, 300
SCALE = 0.18215  # fast-DiT's own constant
FEWEST = 4  # items measured, however slow


class ImageFiles(Dataset[tuple[torch.Tensor, int]]):
    """Image files, opened with Pillow and transformed; an item is (3, height_px, width_px) in -1..1, and its number."""

    def __init__(self, paths: Sequence[Path], transforms: Sequence[Callable[[Image.Image], Image.Image]]) -> None:
        self._paths, self._transforms = paths, transforms

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        with Image.open(self._paths[number]) as file:
            image = self._transforms[number](file.convert("RGB"))
        return to_model(np.array(image)), number

    def batches(self, workers: int, device: torch.device) -> Iterator[tuple[torch.Tensor, int]]:
        """Each image as a batch on the device, with its number."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about more workers than cores: the loops' own setting
            loader = iter(DataLoader(self, batch_size=1, num_workers=workers, pin_memory=device.type == "cuda"))
        for images, numbers in loader:
            yield images.to(device), int(numbers[0])


def to_model(pixels: np.ndarray) -> torch.Tensor:
    """(height_px, width_px, 3) uint8 to (3, height_px, width_px) float32 in -1..1."""
    return torch.from_numpy(pixels).permute(2, 0, 1).float() / 127.5 - 1


def adm_square(image: Image.Image, side_px: int, *, flips: bool = False) -> Image.Image:
    """ADM's crop (guided-diffusion): halve with a box while twice as large, resize bicubically, crop the center."""
    while min(image.size) >= 2 * side_px:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = side_px / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    left, top = (image.width - side_px) // 2, (image.height - side_px) // 2
    image = image.crop((left, top, left + side_px, top + side_px))
    is_flipped = flips and torch.rand(1).item() < 0.5
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if is_flipped else image


def posterior_of(vae: Any, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and deviation of each latent; the deviation of an autoencoder without a posterior is 0."""
    encoded = vae.encode(images)
    if hasattr(encoded, "latent_dist"):
        return encoded.latent_dist.mean, encoded.latent_dist.std
    latents = encoded.latents if hasattr(encoded, "latents") else encoded.latent
    return latents, torch.zeros_like(latents)


def fast_dit(paths: Sequence[Path], side_px: int, *, vae: Any, out: Path) -> Generator[int]:
    """Extract one image after another; yields the number of each.

    Args:
      vae: from ``load_vae``.
    """
    files = ImageFiles(paths, [partial(adm_square, side_px=side_px, flips=True)] * len(paths))
    for images, number in files.batches(FAST_DIT_WORKERS, vae.device):
        with torch.no_grad(), tf32():
            mean, deviation = posterior_of(vae, images)
            latent = mean + deviation * torch.randn_like(mean)
        np.save(out / f"{number}-features.npy", latent.mul_(SCALE).cpu().numpy())
        np.save(out / f"{number}-label.npy", np.array([0]))
        yield number


def pixart_images(paths: Sequence[Path], buckets: Sequence[tuple[int, int]], *, vae: Any, out: Path) -> Generator[int]:
    """Extract one image after another; yields the number of each.

    Args:
      buckets: (height_px, width_px) of each, to which it is resized, whatever its aspect ratio.
    """
    transforms = [partial(Image.Image.resize, size=(w, h), resample=Image.Resampling.BICUBIC) for h, w in buckets]
    for images, number in ImageFiles(paths, transforms).batches(PIXART_WORKERS, vae.device):
        with torch.no_grad(), torch.autocast("cuda", torch.float16, enabled=vae.device.type == "cuda"):
            moments = torch.cat(posterior_of(vae, images), dim=1)
        np.save(out / f"{number}.npy", moments[0].cpu().numpy())
        yield number


def pixart_captions(captions: Sequence[str], *, model: Any, tokenizer: Any, out: Path) -> float:
    """Extract all captions; returns the seconds."""
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


def load_vae(folder: Path, device: torch.device) -> Any:
    """Load an autoencoder of diffusers in float32, as both projects do."""
    model_class = getattr(diffusers, read_config(folder, what="vae.model")["_class_name"])
    return model_class.from_pretrained(folder, use_safetensors=True, low_cpu_mem_usage=False).to(device).eval()


def load_t5(folder: Path, device: torch.device) -> dict[str, Any]:
    """Load a T5 and its tokenizer, in float16 on a GPU, as PixArt does: "model" and "tokenizer"."""
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    model: Any = T5EncoderModel.from_pretrained(folder, dtype=dtype, use_safetensors=True)
    return {"model": model.to(device).eval(), "tokenizer": AutoTokenizer.from_pretrained(folder)}


def steady_rate(loop: Generator[int], seconds: float) -> float:
    """Items a second of a loop after its first item, over ``seconds`` and at least ``FEWEST`` items."""
    with contextlib.closing(loop):  # ends its workers
        next(loop)
        start, count = time.perf_counter(), 0
        for _ in loop:
            count += 1
            if count >= FEWEST and time.perf_counter() - start >= seconds:
                break
        return count / (time.perf_counter() - start)


def caption_rate(captions: Sequence[str], seconds: float, *, out: Path, **models: Any) -> float:
    """Captions a second of PixArt's loop, on captions spread over all of them, for about ``seconds``.

    Args:
      models: from ``load_t5``.
    """
    first = pixart_captions(captions[:1], out=out, **models)
    count = min(len(captions), max(FEWEST, math.ceil(seconds / first)))
    chosen = [captions[i * len(captions) // count] for i in range(count)]
    return count / pixart_captions(chosen, out=out, **models)
