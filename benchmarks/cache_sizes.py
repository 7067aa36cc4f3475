"""Disk of captions: in a store, and in a cache of one file a caption, padded, in bfloat16, as other trainers write it.

    python benchmarks/cache_sizes.py --scratch bench

Captions are noise of random lengths; widths and lengths are those of the published models, so sizes are real. The other
cache is what ``torch.save`` writes of the embeddings and mask that the model's pipeline of diffusers pads to.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import torch
import typer
from measuring import fresh_folder, machine, print_table
from noise_store import make_store
from scale import Scratch

from leandit.datasets.format.schema import TextSpec

app = typer.Typer(add_completion=False)


class Model(NamedTuple):
    """Captions of a model: the width of a token, the tokens of its pipeline, and whether it reads padding."""

    width: int
    tokens: int
    reads_padding: bool = False


MODELS = {
    "PixArt-Sigma": Model(4096, 300),
    "Sana": Model(2304, 300),
    "Z-Image": Model(2560, 512),
    "Qwen-Image": Model(3584, 512),
    "FLUX.2 [klein] 4B": Model(7680, 512, reads_padding=True),
    "FLUX.2 [dev]": Model(15360, 512, reads_padding=True),
}


@app.command()
def sizes(
    scratch: Scratch,
    captions: Annotated[int, typer.Option(min=8, help="Captions of each model.")] = 128,
    tokens: Annotated[int, typer.Option(min=2, max=290, help="Mean tokens of a caption, template included.")] = 100,
) -> None:
    """Measure the bytes of a caption in both."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.normal(tokens, tokens / 3, captions).round().astype(int), 2, 300).tolist()
    rows = []
    for name, model in MODELS.items():
        folder = fresh_folder(scratch, "cache-sizes")
        padded = _padded_files(folder / "files", model, min(captions, 8))
        stored = {dtype: _stored(folder / dtype, model, lengths, dtype) for dtype in ("float16", "int8")}
        ratio = padded / stored["int8"]
        rows.append([name, *(f"{size / 1024:,.0f}" for size in (padded, *stored.values())), f"{ratio:.1f}"])
    print(f"{captions:,} captions of {np.mean(lengths):.0f} tokens on average, KiB a caption. {machine()}\n")
    print_table([["model", "padded bf16, a file each", "store, float16", "store, int8", "padded / int8"], *rows])


def _padded_files(folder: Path, model: Model, count: int) -> float:
    """Bytes of a caption in files of its own."""
    folder.mkdir(parents=True)
    for number in range(count):
        embeddings = torch.zeros(1, model.tokens, model.width, dtype=torch.bfloat16)
        torch.save(
            {"embeddings": embeddings, "mask": torch.ones(1, model.tokens, dtype=torch.int64)}, folder / f"{number}.pt"
        )
    return sum(path.stat().st_size for path in folder.iterdir()) / count


def _stored(root: Path, model: Model, lengths: list[int], dtype: str) -> float:
    """Bytes of a caption in a store: its rows, scales and indexes, not the null caption."""
    full = {"kind": "causal_lm", "template": "", "batch_size": 1, "full_length": True, "max_tokens": model.tokens}
    texts = {"text": TextSpec(**full, width=model.width, dtype=dtype)} if model.reads_padding else {}
    width = 0 if texts else model.width
    counts = [model.tokens] * len(lengths) if texts else lengths
    make_store(
        root,
        {"64x64": len(lengths)},
        num_classes=0,
        token_counts=counts,
        text_width=width,
        text_dtype=dtype,
        texts=texts,
    )
    arrays = [path for name in ("embeddings", "scales") for path in root.glob(f"captions/**/{name}/c/**/*")]
    return sum(path.stat().st_size for path in arrays if path.is_file()) / len(lengths)


if __name__ == "__main__":
    app()
