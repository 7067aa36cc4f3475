"""Bytes a record of a store, beside what other trainers cache; computed from the formats, nothing is encoded.

python benchmarks/record_bytes.py --tokens 120
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import numpy as np
import typer
from measuring import print_table

from leandit.datasets.format.layout import Content, RevisionLayout
from leandit.datasets.format.schema import TextSpec
from leandit.tools.plan.precompute_cost import chunk_bytes
from leandit.tools.synthetic.store import DOWNSCALE, noise_spec

LAID_OUT = 10_000  # records of the store that is laid out: its indexes are shared among them
T5, CLIP_TOKENS, CLIP_L, CLIP_G, FLUX2, QWEN = 4096, 77, 768, 1280, 15360, 3584
CLIPS = (CLIP_TOKENS + 1) * (CLIP_L + CLIP_G)  # numbers of the tokens and pooled vectors of both
CLIP_POOLED = (0, CLIP_TOKENS, CLIP_L)


class ImageSet(NamedTuple):
    """Images with captions, as one model is trained on them.

    Args:
      reads_padding: the published model was trained on the embeddings of padding too.
      encoders: width of a token (0: only the pooled vector is stored), most tokens, width of the pooled vector.
    """

    side_px: int
    channels: int
    reads_padding: bool
    encoders: tuple[tuple[int, int, int], ...]


class Cache(NamedTuple):
    """What another trainer saves of a record of an image set.

    Args:
      keeps: numbers for each of the latent: 1, or 2 with the spread.
      fixed: 16-bit numbers of its text, whatever the length of the caption.
      a_token: 16-bit numbers of its text for each valid token.
      latent_bytes: of a number of the latent.
    """

    images: str
    name: str
    keeps: int
    fixed: int
    a_token: int = 0
    latent_bytes: int = 2


SETS = {
    "PixArt-Sigma": ImageSet(1024, 4, False, ((T5, 300, 0),)),
    "SD3": ImageSet(1024, 16, True, ((T5, 256, 0), (CLIP_L, CLIP_TOKENS, CLIP_L), (CLIP_G, CLIP_TOKENS, CLIP_G))),
    "Flux.1": ImageSet(1024, 16, True, ((T5, 512, 0), CLIP_POOLED)),
    "Flux.1, MLPerf": ImageSet(256, 16, True, ((T5, 256, 0), CLIP_POOLED)),
    "Flux.2": ImageSet(1024, 32, True, ((FLUX2, 512, 0),)),
    "Qwen-Image": ImageSet(1024, 16, False, ((QWEN, 1024, 0),)),
}
CACHES = (
    Cache("PixArt-Sigma", "PixArt npz", 2, 300 * T5),  # before its compression
    Cache("PixArt-Sigma", "OneTrainer", 1, 120 * T5),
    Cache("PixArt-Sigma", "SimpleTuner", 1, 0, T5),
    Cache("SD3", "diffusion-pipe", 1, 256 * T5 + CLIPS),
    Cache("SD3", "OneTrainer", 1, CLIP_TOKENS * T5 + CLIPS),
    # One sequence: CLIP's tokens padded to the width of T5's, then 154 of T5.
    Cache("SD3", "SimpleTuner", 1, (CLIP_TOKENS + 154) * T5 + CLIP_L + CLIP_G),
    Cache("Flux.1", "diffusion-pipe", 1, 512 * T5 + CLIP_L),
    Cache("Flux.1", "OneTrainer", 1, 77 * T5 + CLIP_L),
    Cache("Flux.1", "SimpleTuner", 1, 512 * T5 + CLIP_L),
    Cache("Flux.1, MLPerf", "MLPerf", 2, 256 * T5 + CLIP_L),
    Cache("Flux.2", "diffusion-pipe", 1, 512 * FLUX2, latent_bytes=4),
    Cache("Flux.2", "OneTrainer", 1, 512 * FLUX2),
    Cache("Flux.2", "SimpleTuner", 1, 0, FLUX2),
    *(Cache("Qwen-Image", name, 1, 0, QWEN) for name in ("diffusion-pipe", "OneTrainer", "SimpleTuner")),
)


def our_bytes(images: ImageSet, tokens: int, *, keeps: int, padded: bool = False) -> tuple[int, int]:
    """Bytes of the latent and of the text of a store, indexes included: float16, and int8 with scales."""
    texts = {f"text_{i}": text_spec(*encoder, padded=padded) for i, encoder in enumerate(images.encoders)}
    bucket = {f"{images.side_px}x{images.side_px}": LAID_OUT}
    spec = noise_spec(bucket, images.channels * keeps, 0, 0, 1, 64, "none", texts=texts)
    lengths = {n: one.max_tokens if one.full_length else min(tokens, one.max_tokens) for n, one in texts.items()}
    counts = {name: np.full(LAID_OUT, length) for name, length in lengths.items()}
    latents = text = 0
    for part in RevisionLayout(spec, Content(1, bucket, counts, has_null=False)).parts.values():
        if part.captions:
            text += sum(map(chunk_bytes, [*part.arrays, *part.captions.index]))
        else:
            latents += sum(map(chunk_bytes, part.arrays))
    return latents // LAID_OUT, text // LAID_OUT


def text_spec(width: int, max_tokens: int, pooled_width: int, *, padded: bool) -> TextSpec:
    """An encoder in our form; captions of a CLIP always have the full length."""
    is_clip = max_tokens == CLIP_TOKENS
    return TextSpec(
        kind="clip" if is_clip else "t5",
        width=width or pooled_width,
        max_tokens=max_tokens,
        dtype="int8",
        template="",
        batch_size=64,
        output="both" if width and pooled_width else "tokens" if width else "pooled",
        full_length=is_clip or padded,
        pooled_width=pooled_width,
    )


def main(tokens: Annotated[int, typer.Option(min=1, help="Valid tokens of each caption.")] = 60) -> None:
    """Compute bytes a record of our layout, and of what other trainers save; nothing is encoded."""
    rows: list[tuple[str, ...]] = [("set", "cache", "latents", "text", "total", "text, of ours", "total, of ours")]
    for name, images in SETS.items():
        ours = {keeps: our_bytes(images, tokens, keeps=keeps) for keeps in (1, 2)}
        forms = [("leandit, valid tokens", 2, *ours[2]), ("leandit, valid tokens, mean", 1, *ours[1])]
        if images.reads_padding:
            forms.insert(0, ("leandit, full length", 2, *our_bytes(images, tokens, keeps=2, padded=True)))
        for cache in (cache for cache in CACHES if cache.images == name):
            numbers = cache.keeps * images.channels * (images.side_px // DOWNSCALE) ** 2
            text = cache.fixed + min(tokens, images.encoders[0][1]) * cache.a_token
            forms.append((cache.name, cache.keeps, numbers * cache.latent_bytes, 2 * text))
        for form, keeps, latents, text in forms:  # each beside ours that keeps as many numbers of the latent
            sizes = [f"{size / 1000:,.1f}" for size in (latents, text, latents + text)]
            of_ours = [f"{text / ours[keeps][1]:.2f}x", f"{(latents + text) / sum(ours[keeps]):.2f}x"]
            rows.append((f"{name}, {images.side_px} px", form, *sizes, *of_ours))
    print(f"KB (1000 bytes) a record; a caption has {tokens} valid tokens\n")
    print_table(rows)


if __name__ == "__main__":
    typer.run(main)
