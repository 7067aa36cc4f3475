"""What stage 1 is measured on: drawn images, a sample of a source as plain files, and encoders with random weights.

Speed does not depend on the weights, so encoders of published shapes need no download. They are saved as folders, so
that our run and the other loops load the same files.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from PIL import Image
from transformers import T5Config, T5EncoderModel

from leandit.precompute.encoders.model_files import local_folder
from leandit.precompute.sources.files.record import encoded_texts
from leandit.precompute.sources.source import list_source
from leandit.tools.demo.scenes import COLORS, SHAPES

DRAWN = "drawn:"  # a source of images that are drawn for so many pixels a side
MAX_DRAWN = 64  # a larger sample repeats them
NOISE_CELLS, GRAIN = 16, 6.0  # coarse colors on a side, deviation of the fine noise: about 2 bits a pixel as JPEG
LARGER = 1.25  # than what is encoded, so that it is resized
MIN_TOKENS, MAX_TOKENS = 20, 120  # of a caption; 60 in the mean
WORDS = [*COLORS, *SHAPES, "a", "and", "big", "small", "tiny", "above", "below"]  # each one token of the shipped T5
SD_VAE = {  # stabilityai/sd-vae-ft-ema
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "sample_size": 256,
}
T5_SHAPES = {  # d_model, d_ff, layers, heads of T5 v1.1
    "t5-small": (512, 1024, 8, 6),
    "t5-base": (768, 2048, 12, 12),
    "t5-xl": (2048, 5120, 24, 32),
    "t5-xxl": (4096, 10240, 24, 64),
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "spiece.model")


def write_sample(source: str, folder: Path, count: int) -> tuple[list[Path], list[str]]:
    """Write images with captions and labels into an empty folder; their paths, and the distinct captions.

    Args:
      source: of which images are taken, spread over all of it; or "drawn:256".
      count: of images; if there are fewer, they repeat under other names.
    """
    if source.startswith(DRAWN):
        rows = draw_images(folder, min(count, MAX_DRAWN), int(source.removeprefix(DRAWN)))
    else:
        rows = copy_images(source, folder, count)
    for number in range(len(rows), count):
        first = rows[number % len(rows)]
        name = f"{number:07d}{Path(first['file_name']).suffix}"
        os.link(folder / first["file_name"], folder / name)
        rows.append(first | {"file_name": name})
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    captions = dict.fromkeys(caption for row in rows for caption in row["captions"])
    return [folder / row["file_name"] for row in rows], list(captions)


def copy_images(source_path: str, folder: Path, count: int) -> list[dict]:
    """Copy images of a source; the rows of a metadata.jsonl."""
    source, rows = list_source(source_path), []
    step = max(1, len(source.records) // count)
    for number, record in enumerate(list(source.records)[: step * count : step]):
        name = f"{number:07d}{Path(record.key).suffix.lower() or '.jpg'}"
        (folder / name).write_bytes(source.read(record.path, record.offset, record.num_bytes, stage="scan"))
        rows.append({"file_name": name, "captions": encoded_texts(record.captions), "label": max(0, record.label)})
    return rows


def draw_images(folder: Path, count: int, side_px: int) -> list[dict]:
    """Write JPEGs that are as large to decode as photographs; the rows of a metadata.jsonl.

    Args:
      side_px: that they are encoded at.
    """
    rng, rows, side = np.random.default_rng(0), [], round(LARGER * side_px)
    for number in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (NOISE_CELLS, NOISE_CELLS, 3), np.uint8))
        smooth = np.asarray(coarse.resize((side, side), Image.Resampling.BICUBIC), np.float32)
        pixels = smooth + rng.normal(0, GRAIN, (side, side, 1))
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{number:07d}.jpg", quality=90)
        length = round(MIN_TOKENS + (MAX_TOKENS - MIN_TOKENS) * rng.beta(2, 3))
        caption = " ".join(rng.choice(WORDS, length))
        rows.append({"file_name": f"{number:07d}.jpg", "captions": [caption], "label": number % 1000})
    return rows


def vae_folder(name: str, scratch: Path) -> Path:
    """The folder of a VAE: a folder, "shipped:vae", or "random:sd" for Stable Diffusion's with random weights."""
    if name == "random:sd":
        folder = scratch / "vae-sd"
        if not folder.is_dir():
            torch.manual_seed(0)
            _save(AutoencoderKL(**SD_VAE), folder)
        return folder
    return _local(name)


def text_folder(name: str, scratch: Path, device: torch.device, tokenizer: str = "") -> Path:
    """The folder of a T5: a folder, "shipped:t5", or "random:SHAPE" for one of ``T5_SHAPES``.

    Args:
      tokenizer: of a random one, a folder with a tokenizer.json; else the shipped one, which has a token a word.
    """
    if not name.startswith("random:"):
        return _local(name)
    shape = name.removeprefix("random:")
    folder = scratch / f"text-{shape}"
    if not folder.is_dir():
        width, inner, layers, heads = T5_SHAPES[shape]
        sizes: Any = {"d_model": width, "d_ff": inner, "d_kv": 64, "num_layers": layers, "num_heads": heads}
        before = torch.get_default_dtype()
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)  # T5-XXL takes 19 GB in float32
        try:
            with device:
                model = T5EncoderModel(T5Config(vocab_size=32128, feed_forward_proj="gated-gelu", **sizes))
        finally:
            torch.set_default_dtype(before)
        _save(model, folder)
    for file in TOKENIZER_FILES:
        if (source := _local(tokenizer or "shipped:t5") / file).is_file():
            shutil.copyfile(source, folder / file)
    return folder


def _local(name: str) -> Path:
    folder = local_folder(name)
    if folder is None:
        raise ValueError(f"model '{name}': expected a folder, shipped:NAME or random:NAME")
    return folder


def _save(model: AutoencoderKL | T5EncoderModel, folder: Path) -> None:
    """Save under another name, then rename, so that an interrupted save leaves nothing that looks like a model."""
    half = folder.with_name(f"{folder.name}.half")
    model.save_pretrained(half, safe_serialization=True)
    half.rename(folder)
