"""What stage 1 is measured on: drawn images, a sample of a source as plain files, and encoders with random weights.

Speed does not depend on the weights, so encoders of published shapes need no download. They are saved as folders, so
that our run and the other loops load the same files.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from PIL import Image
from transformers import T5Config, T5EncoderModel

from leandit.datasets.errors import RecordRejected
from leandit.precompute.encoders.model_files import local_folder
from leandit.precompute.sources.files.record import SourceRecord, caption_texts
from leandit.precompute.sources.source import Source, list_source
from leandit.tools.demo.scenes import COLORS, SHAPES

# ------------------------------------------------------------------------------------------------------- drawn images

NOISE_CELLS, GRAIN = 16, 6.0  # coarse colors on a side, deviation of the fine noise: about 2 bits a pixel as JPEG
LARGER = 1.25  # than what is encoded, so that it is resized
MIN_TOKENS, MAX_TOKENS = 20, 120  # of a caption; 60 in the mean
WORDS = [*COLORS, *SHAPES, "a", "and", "big", "small", "tiny", "above", "below"]  # each one token of the shipped T5


def draw_images(folder: Path, count: int, side_px: int) -> Path:
    """Write JPEGs that are as large to decode as photographs, each with a label and a caption of its own.

    Args:
      folder: empty.
      side_px: that they are encoded at.
    Returns: the folder.
    """
    rng, rows, side = np.random.default_rng(0), [], round(LARGER * side_px)
    for number in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (NOISE_CELLS, NOISE_CELLS, 3), np.uint8))
        smooth = np.asarray(coarse.resize((side, side), Image.Resampling.BICUBIC), np.float32)
        pixels = smooth + rng.normal(0, GRAIN, (side, side, 1))
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{number:05d}.jpg", quality=90)
        length = round(MIN_TOKENS + (MAX_TOKENS - MIN_TOKENS) * rng.beta(2, 3))
        caption = " ".join(rng.choice(WORDS, length))
        rows.append({"file_name": f"{number:05d}.jpg", "captions": [caption], "label": number % 1000})
    _write_metadata(folder, rows)
    return folder


# ------------------------------------------------------------------------------------------------- a sample of a source


def sample_source(source_path: Path | str, folder: Path, count: int) -> list[SourceRecord]:
    """Copy images of a source, spread over all of it, as files with a metadata.jsonl.

    Args:
      folder: empty.
      count: of images; if the source has fewer, they repeat under other names.
    Returns: the records of the sample, in its order.
    """
    source = list_source(source_path)
    step = max(1, len(source.records) // count)
    chosen = [source.records[i * step] for i in range(min(count, len(source.records)))]
    rows = [row for i, record in enumerate(chosen) if (row := _copy(source, record, folder, i))]
    if not rows:
        raise ValueError(f"source '{source_path}': none of {len(chosen)} images can be read")
    for i in range(len(rows), count):
        first = rows[i % len(rows)]
        name = f"{i:07d}{Path(first['file_name']).suffix}"
        os.link(folder / first["file_name"], folder / name)
        rows.append(first | {"file_name": name})
    _write_metadata(folder, rows)
    return list(list_source(folder).records)


def _copy(source: Source, record: SourceRecord, folder: Path, number: int) -> dict | None:
    name = f"{number:07d}{Path(record.key).suffix.lower() or '.jpg'}"
    try:
        if record.problem:
            return None
        (folder / name).write_bytes(source.read(record.path, record.offset, record.num_bytes, stage="scan"))
    except RecordRejected:
        return None
    return {"file_name": name, "captions": caption_texts(record), "label": max(0, record.label)}


def _write_metadata(folder: Path, rows: list[dict]) -> None:
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


# ----------------------------------------------------------------------------------------- encoders with random weights

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
    "t5-large": (1024, 2816, 24, 16),
    "t5-xl": (2048, 5120, 24, 32),
    "t5-xxl": (4096, 10240, 24, 64),
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "spiece.model")


def vae_model(name: str, scratch: Path) -> str:
    """The recipe's ``vae.model``: the folder of a random VAE for "random:sd", else the name itself."""
    if name != "random:sd":
        return name
    folder = scratch / "vae-sd"
    if not folder.is_dir():
        torch.manual_seed(0)
        _save(AutoencoderKL(**SD_VAE), folder)
    return str(folder)


def text_model(name: str, scratch: Path, device: torch.device, tokenizer: Path | None = None) -> str:
    """The recipe's ``text.model``: the folder of a random T5 for "random:SHAPE", else the name itself.

    Args:
      tokenizer: folder with the tokenizer.json of a T5; None takes the shipped one, which has a token a word.
    """
    if not name.startswith("random:"):
        return name
    shape, tokenizer = name.removeprefix("random:"), tokenizer or local_folder("shipped:t5")
    assert tokenizer is not None
    folder = scratch / f"text-{shape}"
    if not folder.is_dir():
        width, inner, layers, heads = T5_SHAPES[shape]
        sizes = {"d_model": width, "d_ff": inner, "d_kv": 64, "num_layers": layers, "num_heads": heads}
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
        if (tokenizer / file).is_file():
            shutil.copyfile(tokenizer / file, folder / file)
    return str(folder)


def _save(model: AutoencoderKL | T5EncoderModel, folder: Path) -> None:
    """Save under another name, then rename, so that an interrupted save leaves nothing that looks like a model."""
    half = folder.with_name(f"{folder.name}.half")
    model.save_pretrained(half, safe_serialization=True)
    half.rename(folder)
