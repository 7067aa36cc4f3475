"""Stores with captions of three text encoders, as Stable Diffusion 3 reads them: of noise, or of tiny models."""

from __future__ import annotations

from pathlib import Path

from making import caption_recipe

from leandit.datasets.format.schema import TextSpec
from leandit.datasets.store import LatentStore
from leandit.precompute.config import PrecomputeRecipe
from leandit.tools.synthetic.store import make_store

FOUR_STAGES = {"block_out_channels": (8, 8, 8, 8), "layers_per_block": 1, "norm_num_groups": 4, "latent_channels": 16}


def text_spec(kind: str, tokens: int, width: int, pooled_width: int = 0, *, full_length: bool = True) -> TextSpec:
    return TextSpec(
        kind=kind,  # pyright: ignore[reportArgumentType]
        width=width,
        max_tokens=tokens,
        dtype="float16",
        template="",
        batch_size=1,
        output="both" if pooled_width else "tokens",
        full_length=full_length,
        attend_padding=full_length and kind == "t5",
        pooled_width=pooled_width,
    )


TEXTS = {"clip_l": text_spec("clip", 7, 8, 6), "clip_g": text_spec("clip", 7, 12, 10), "t5": text_spec("t5", 9, 32)}


def noise_store(path: Path, *, channels: int = 4, texts: dict[str, TextSpec] = TEXTS) -> LatentStore:
    """15 records of 64 px in two buckets, with five captions."""
    buckets = {"64x64": 9, "48x80": 6}
    make_store(path, buckets, channels=channels, num_classes=0, token_counts=[9] * 5, text_width=0, texts=texts, seed=3)
    return LatentStore(path)


def encoder_recipe(models: Path) -> PrecomputeRecipe:
    """Tiny encoders in a folder, and the recipe with them."""
    from tiny_autoencoders import save_autoencoder  # they import models for seconds
    from tiny_models import save_clip, save_t5

    save_clip(models / "clip_l", projected=True)
    save_clip(models / "clip_g", projected=True, pad="!", seed=9)
    save_t5(models / "t5")
    save_autoencoder(
        models / "vae",
        "kl",
        **FOUR_STAGES,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        scaling_factor=1.5305,
        shift_factor=0.0609,
    )
    places = ("subfolder=text_encoder", "tokenizer_subfolder=tokenizer", "full_length=true", "dtype=float32")
    of_each = {
        "clip_l": ("kind=clip", "output=both", "max_tokens=77"),
        "clip_g": ("kind=clip", "output=both", "max_tokens=77"),
        "t5": ("kind=t5", "attend_padding=true", "max_tokens=24"),
    }
    texts = [
        f"text.{name}.{setting}"
        for name, settings in of_each.items()
        for setting in (f"model={models / name}", *places, *settings)
    ]
    vae = (f"vae.model={models / 'vae'}", "vae.dtype=float32")
    return caption_recipe("text.kind=none", *vae, *texts, "store.text_dtype=float32")
