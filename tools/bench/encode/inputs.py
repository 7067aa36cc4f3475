"""What the precompute benchmark reads: a sample of the source as plain files, and encoders of random weights.

Speed does not depend on the weights, so encoders of published shapes are made here without a download. They are saved
as folders, so that our run and the peers load the same files.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from transformers import T5Config, T5EncoderModel

from ....datasets.errors import RecipeError, RecordRejected
from ....precompute.sources.files.record import SourceRecord, caption_texts
from ....precompute.sources.source import Source, list_source

RANDOM = "random:"
DOWN, UP = "DownEncoderBlock2D", "UpDecoderBlock2D"
VAES = {  # arguments of AutoencoderKL; "sd" is stabilityai/sd-vae-ft-ema
    "sd": {
        "down_block_types": (DOWN,) * 4,
        "up_block_types": (UP,) * 4,
        "block_out_channels": (128, 256, 512, 512),
        "layers_per_block": 2,
        "latent_channels": 4,
        "norm_num_groups": 32,
        "sample_size": 256,
        "scaling_factor": 0.18215,
    },
}
TEXTS = {  # d_model, d_ff, layers, heads of T5 v1.1
    "t5-small": (512, 1024, 8, 6),
    "t5-base": (768, 2048, 12, 12),
    "t5-large": (1024, 2816, 24, 16),
    "t5-xl": (2048, 5120, 24, 32),
    "t5-xxl": (4096, 10240, 24, 64),
}
T5_VOCABULARY, T5_HEAD = 32128, 64
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "spiece.model")


def write_sample(source_path: Path | str, folder: Path, count: int) -> list[SourceRecord]:
    """Write pictures of a source, spread over all of it, as files with a metadata.jsonl.

    Args:
      folder: must be empty.
      count: of pictures; if the source has fewer, they repeat under other names.
    Returns: the records of the sample, in its order.
    """
    source = list_source(source_path)
    (folder / "images").mkdir(parents=True)
    step = max(1, len(source.records) // count)
    chosen = [source.records[i * step] for i in range(min(count, len(source.records)))]
    rows = [row for i, record in enumerate(chosen) if (row := _copied(source, record, folder, i))]
    if not rows:
        raise RecipeError(
            f"--source '{source_path}': none of {len(chosen)} pictures can be read. Needed one; name another --source."
        )
    num_read = len(rows)
    for i in range(num_read, count):  # links to the same bytes take no disk space
        first = rows[i % num_read]
        name = f"images/{i:07d}{Path(first['file_name']).suffix}"
        os.link(folder / first["file_name"], folder / name)
        rows.append(first | {"file_name": name})
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(list_source(folder).records)


def _copied(source: Source, record: SourceRecord, folder: Path, number: int) -> dict | None:
    name = f"images/{number:07d}{Path(record.key).suffix.lower() or '.jpg'}"
    try:
        if record.problem:
            return None
        (folder / name).write_bytes(source.read(record.path, record.offset, record.num_bytes, stage="scan"))
    except RecordRejected:
        return None
    return {"file_name": name, "captions": caption_texts(record), "label": max(0, record.label)}


def vae_model(name: str, scratch: Path) -> str:
    """The recipe's ``vae.model``: the name itself, or the folder of a random VAE, made if missing.

    Raises: RecipeError: unknown shape.
    """
    if not name.startswith(RANDOM):
        return name
    shape = name.removeprefix(RANDOM)
    if shape not in VAES:
        raise RecipeError(f"--vae '{name}': needed a folder, a hub id, or {_shapes(VAES)}.")
    folder = scratch / f"vae-{shape}"
    if not folder.is_dir():
        torch.manual_seed(0)
        _save(AutoencoderKL(in_channels=3, out_channels=3, **VAES[shape]), folder)
    return str(folder)


def text_model(name: str, tokenizer: Path | None, scratch: Path, device: torch.device) -> str:
    """The recipe's ``text.model``: the name itself, or the folder of a random T5 with the tokenizer, made if missing.

    Raises: RecipeError: unknown shape, or no tokenizer.
    """
    if not name.startswith(RANDOM):
        return name
    shape = name.removeprefix(RANDOM)
    if shape not in TEXTS:
        raise RecipeError(f"--text '{name}': needed a folder, a hub id, or {_shapes(TEXTS)}.")
    if tokenizer is None or not (tokenizer / TOKENIZER_FILES[0]).is_file():
        raise RecipeError(f"--text '{name}': needed --tokenizer FOLDER with the tokenizer.json of a T5.")
    folder = scratch / f"text-{shape}"
    if not folder.is_dir():
        width, inner, layers, heads = TEXTS[shape]
        config = T5Config(
            vocab_size=T5_VOCABULARY,
            d_model=width,
            d_ff=inner,
            d_kv=T5_HEAD,
            num_layers=layers,
            num_heads=heads,
            feed_forward_proj="gated-gelu",
        )
        torch.manual_seed(0)
        usual = torch.get_default_dtype()
        try:
            torch.set_default_dtype(torch.bfloat16)  # T5-XXL takes 19 GB in float32
            with device:
                model = T5EncoderModel(config)
        finally:
            torch.set_default_dtype(usual)
        _save(model, folder)
        for file in TOKENIZER_FILES:
            if (tokenizer / file).is_file():
                shutil.copyfile(tokenizer / file, folder / file)
    return str(folder)


def _shapes(known: dict) -> str:
    return "one of " + ", ".join(f"{RANDOM}{name}" for name in known)


def _save(model: AutoencoderKL | T5EncoderModel, folder: Path) -> None:
    """Save under another name, then rename: an interrupted save leaves no folder that looks like a model."""
    half = folder.with_name(f"{folder.name}.half")
    model.save_pretrained(half, safe_serialization=True)
    half.rename(folder)
