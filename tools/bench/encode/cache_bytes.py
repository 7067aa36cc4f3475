"""``leandit bench bytes``: bytes a record of the sets that image models are trained on, here and in other caches.

Nothing is encoded: ours follow from the layout of a store, the peers' from the shapes and dtypes that their code saves.
Latents and embeddings are counted; of the peers neither masks nor token ids nor the containers of their files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ....datasets.format.layout import Content, RevisionLayout
from ....datasets.format.schema import TextSpec
from ...plan.precompute_cost import array_bytes
from ...synthetic.store import DOWNSCALE, noise_spec
from ...terminal.text import aligned

RECORDS = 10_000  # of the store that is laid out: its indexes are shared among them
HALF, SINGLE = 2, 4  # bytes of a bfloat16 or float16 number, and of a float32
T5_WIDTH, CLIP_TOKENS = 4096, 77
CLIP_L, CLIP_G = 768, 1280
FLUX2_WIDTH, QWEN_WIDTH = 15360, 3584
HEAD = ("set", "cache", "latents", "text", "total", "text, of ours", "total, of ours")


class Encoder(NamedTuple):
    """A text encoder in our form.

    Args:
      width: of its tokens; 0 if only the pooled vector is stored.
      max_tokens: with padding.
      pooled_width: 0 for none.
      reads_padding: the published model was trained on what it gives for padding too.
    """

    width: int
    max_tokens: int
    pooled_width: int = 0
    reads_padding: bool = False

    @property
    def is_clip(self) -> bool:
        """All its captions have the full length."""
        return self.max_tokens == CLIP_TOKENS


class Cache(NamedTuple):
    """What a peer saves of a record.

    Args:
      latent_bytes: of a number of the latent, for all that it keeps: mean, sample, or mean and spread.
      keeps: numbers of each: 1, or 2 with the spread.
      fixed: numbers of its text, whatever the length of the caption.
      a_token: numbers of its text for each valid token.
    """

    name: str
    latent_bytes: int
    keeps: int
    fixed: int
    a_token: int = 0


@dataclass(frozen=True)
class ImageSet:
    """A set of pictures with captions, as one model is trained on it.

    Args:
      values: of a latent: channels x height x width.
      encoders: of its captions.
      caches: of the peers that can train on it.
    """

    name: str
    resolution_px: int
    channels: int
    encoders: tuple[Encoder, ...]
    caches: tuple[Cache, ...]

    @property
    def values(self) -> int:
        """Numbers of a latent, without its spread."""
        return self.channels * (self.resolution_px // DOWNSCALE) ** 2


T5 = Encoder(T5_WIDTH, 300)
SETS = (
    ImageSet(
        "PixArt-Sigma",
        1024,
        4,
        (T5,),
        (
            Cache("PixArt npz", HALF, 2, 300 * T5_WIDTH),  # before its compression
            Cache("OneTrainer", HALF, 1, 120 * T5_WIDTH),
            Cache("SimpleTuner", HALF, 1, 0, T5_WIDTH),
        ),
    ),
    ImageSet(
        "SD3",
        1024,
        16,
        (
            Encoder(T5_WIDTH, 256, reads_padding=True),
            Encoder(CLIP_L, CLIP_TOKENS, CLIP_L),
            Encoder(CLIP_G, CLIP_TOKENS, CLIP_G),
        ),
        (
            Cache("diffusion-pipe", HALF, 1, 256 * T5_WIDTH + (CLIP_TOKENS + 1) * (CLIP_L + CLIP_G)),
            Cache("OneTrainer", HALF, 1, CLIP_TOKENS * T5_WIDTH + (CLIP_TOKENS + 1) * (CLIP_L + CLIP_G)),
            # One sequence: CLIP's tokens padded to the width of T5's, then 154 of T5.
            Cache("SimpleTuner", HALF, 1, (CLIP_TOKENS + 154) * T5_WIDTH + CLIP_L + CLIP_G),
        ),
    ),
    ImageSet(
        "Flux.1",
        1024,
        16,
        (Encoder(T5_WIDTH, 512, reads_padding=True), Encoder(0, CLIP_TOKENS, CLIP_L)),
        (
            Cache("diffusion-pipe", HALF, 1, 512 * T5_WIDTH + CLIP_L),
            Cache("OneTrainer", HALF, 1, 77 * T5_WIDTH + CLIP_L),
            Cache("SimpleTuner", HALF, 1, 512 * T5_WIDTH + CLIP_L),
        ),
    ),
    ImageSet(
        "Flux.1, MLPerf",
        256,
        16,
        (Encoder(T5_WIDTH, 256, reads_padding=True), Encoder(0, CLIP_TOKENS, CLIP_L)),
        (Cache("MLPerf", HALF, 2, 256 * T5_WIDTH + CLIP_L),),
    ),
    ImageSet(
        "Flux.2",
        1024,
        32,
        (Encoder(FLUX2_WIDTH, 512, reads_padding=True),),
        (
            Cache("diffusion-pipe", SINGLE, 1, 512 * FLUX2_WIDTH),
            Cache("OneTrainer", HALF, 1, 512 * FLUX2_WIDTH),
            Cache("SimpleTuner", HALF, 1, 0, FLUX2_WIDTH),
        ),
    ),
    ImageSet(
        "Qwen-Image",
        1024,
        16,
        (Encoder(QWEN_WIDTH, 1024),),
        (
            Cache("diffusion-pipe", HALF, 1, 0, QWEN_WIDTH),
            Cache("OneTrainer", HALF, 1, 0, QWEN_WIDTH),
            Cache("SimpleTuner", HALF, 1, 0, QWEN_WIDTH),
        ),
    ),
)


def run(tokens: int) -> dict[str, Any]:
    """Bytes a record of every set and cache.

    Args:
      tokens: valid ones of each caption, by each text encoder but a CLIP.
    """
    rows = [row for one in SETS for row in rows_of(one, tokens)]
    lengths = [max(1, tokens // 2), tokens, 2 * tokens]
    by_length = {one.name: [our_bytes(one, length, keeps=1)[1] for length in lengths] for one in SETS}
    return {"tokens": tokens, "rows": rows, "lengths": lengths, "text_bytes": by_length}


def rows_of(one: ImageSet, tokens: int) -> list[dict[str, Any]]:
    """Our forms of a set, then the peers', each beside ours that keeps as many numbers of the latent."""
    ours = {keeps: our_bytes(one, tokens, keeps=keeps) for keeps in (1, 2)}
    found = [("leandit, valid tokens", 2, ours[2]), ("leandit, valid tokens, mean", 1, ours[1])]
    if any(encoder.reads_padding for encoder in one.encoders):
        found.insert(0, ("leandit, full length", 2, our_bytes(one, tokens, keeps=2, padded=True)))
    valid = min(tokens, one.encoders[0].max_tokens)
    for cache in one.caches:
        latents = one.values * cache.keeps * cache.latent_bytes
        found.append((cache.name, cache.keeps, (latents, HALF * (cache.fixed + valid * cache.a_token))))
    return [
        {
            "set": f"{one.name}, {one.resolution_px} px",
            "cache": name,
            "latent_bytes": latents,
            "text_bytes": text,
            "text_of_ours": text / ours[keeps][1],
            "total_of_ours": (latents + text) / sum(ours[keeps]),
        }
        for name, keeps, (latents, text) in found
    ]


def our_bytes(one: ImageSet, tokens: int, *, keeps: int, padded: bool = False) -> tuple[int, int]:
    """Bytes a record of latents in float16, and of text in int8, with their indexes; from the layout of a store.

    Args:
      keeps: 2 for moments, 1 for the mean.
      padded: store what encoders give for padding, where the published model reads it.
    """
    texts = {f"text_{i}": _text_spec(encoder, padded=padded) for i, encoder in enumerate(one.encoders)}
    bucket = f"{one.resolution_px}x{one.resolution_px}"
    spec = noise_spec({bucket: RECORDS}, one.channels * keeps, 0, 0, 1, 64, "none", texts=texts)
    counts = {
        name: np.full(RECORDS, text.max_tokens if text.full_length else min(tokens, text.max_tokens))
        for name, text in texts.items()
    }
    layout = RevisionLayout(spec, Content(1, {bucket: RECORDS}, counts, has_null=False))
    latents = text = 0
    for part in layout.parts.values():
        if part.captions:
            text += sum(map(array_bytes, [*part.arrays, *part.captions.index]))
        else:
            latents += sum(map(array_bytes, part.arrays))
    return latents // RECORDS, text // RECORDS


def _text_spec(encoder: Encoder, *, padded: bool) -> TextSpec:
    output = "both" if encoder.width and encoder.pooled_width else "tokens" if encoder.width else "pooled"
    return TextSpec(
        kind="clip" if encoder.is_clip else "t5",
        width=encoder.width or encoder.pooled_width,
        max_tokens=encoder.max_tokens,
        dtype="int8",
        template="",
        batch_size=64,
        output=output,
        full_length=encoder.is_clip or (padded and encoder.reads_padding),
        pooled_width=encoder.pooled_width,
    )


def render(result: dict[str, Any]) -> str:
    """A table in KB (1000 bytes), and what the length of captions changes."""
    rows = [
        (
            row["set"],
            row["cache"],
            *_kb(row["latent_bytes"], row["text_bytes"], row["latent_bytes"] + row["text_bytes"]),
            f"{row['text_of_ours']:.2f}x",
            f"{row['total_of_ours']:.2f}x",
        )
        for row in result["rows"]
    ]
    lengths = [f"{length} tokens" for length in result["lengths"]]
    texts = [(name, *_kb(*text)) for name, text in result["text_bytes"].items()]
    head = f"KB (1000 bytes) a record; a caption has {result['tokens']} valid tokens"
    return "\n".join([head, "", *_table([HEAD, *rows]), "", "text in our form", *aligned([("set", *lengths), *texts])])


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """``aligned`` with two columns of words."""
    width = max(len(row[0]) for row in rows)
    return aligned([(f"{row[0]:<{width}}  {row[1]}", *row[2:]) for row in rows])


def _kb(*sizes: float) -> list[str]:
    return [f"{size / 1000:,.1f}" for size in sizes]
