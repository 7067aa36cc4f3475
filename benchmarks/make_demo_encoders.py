"""Build the two small encoders that the demo ships: a tiny ``AutoencoderKL`` and a tiny T5 with its tokenizer.

    python benchmarks/make_demo_encoders.py --out precompute/demo_encoders

The VAE trains on the demo's images for some minutes. The T5 trains for one minute to predict the content of the whole
caption at every token, so the embedding of "red" shows whether it is the main object's color, as in a pretrained T5.
Both are saved in the layout of the hub, so the demo loads them with the code that loads full-size encoders. Seeds are
fixed, and all of it runs on a CPU.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

from leandit.tools.demo.scenes import COLORS, RELATIONS, SHAPES, draw_scene, make_scenes

DOWNSCALE = 2  # the VAE learns the images at the size the demo encodes: 64x64, 48x80, 80x48
VAE_LR = 2e-3
MSE_WEIGHT = 2.0  # beside the L1 loss
KL_WEIGHT = 1e-6  # as LDM (Rombach et al. 2022, appendix G)
# Three latent channels are drawn towards the image itself, eight times smaller: latents that look like it are far
# easier to learn for a small transformer in the few minutes of the demo. The fourth is free for what edges need; its
# mean and deviation are held near these, so that noise has a scale.
ANCHOR_WEIGHT = 1.0
FREE_WEIGHT, FREE_DEVIATION = 0.1, 0.5
# Noise on the latents, up to so many standard deviations of a channel, while encoder and decoder learn: shapes must
# survive the error that the transformer still makes, and what tells a square from a circle must stand out from noise
# as a color does. As l-DeTok (Yang et al. 2025, "Latent Denoising Makes Good Tokenizers").
LATENT_NOISE = 0.8


def train_t5(out: Path, *, steps: int, batch_size: int) -> None:
    """Train the T5 encoder on captions and save it with a word-level tokenizer of the demo's words."""
    words = {"a", "and", "big", "small", "tiny", *COLORS, *SHAPES, *" ".join(RELATIONS).split()}
    vocabulary = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *sorted(words)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=64
    )
    wrapped.save_pretrained(out)
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=len(vocabulary),
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        is_encoder_decoder=False,
        use_cache=False,
    )
    t5 = T5EncoderModel(config)
    captions = [caption for scene in make_scenes(6000, seed=1) for caption in scene.captions]
    tokens = wrapped(captions, padding=True, return_tensors="pt")
    facts = torch.tensor([[vocabulary.get(word, 0) for word in _facts(text)] for text in captions])  # (N, facts)
    heads = torch.nn.Linear(config.d_model, facts.shape[1] * len(vocabulary))
    optimizer = torch.optim.AdamW([*t5.parameters(), *heads.parameters()], lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    for step in range(steps):
        rows = torch.randint(len(captions), (batch_size,))
        mask = tokens["attention_mask"][rows]
        states = t5(input_ids=tokens["input_ids"][rows], attention_mask=mask).last_hidden_state  # (B, L, D)
        logits = heads(states).unflatten(2, (facts.shape[1], -1))  # (B, L, facts, words)
        wanted = facts[rows][:, None].expand(logits.shape[:3])
        loss = F.cross_entropy(logits[mask.bool()].flatten(0, 1), wanted[mask.bool()].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"t5 step {step:5d}  loss {loss.item():.4f}", flush=True)
    t5.eval().save_pretrained(out)


def train_vae(out: Path, *, steps: int, batch_size: int, num_images: int) -> None:
    """Train the VAE on the demo's images and save it with the mean and deviation that whiten each latent channel.

    The noise on its latents grows over the first quarter of the steps.
    """
    images = _images_by_size(num_images)
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    shape: dict[str, Any] = {
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "block_out_channels": (8, 16, 32, 64),
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "latent_channels": 4,
        "mid_block_add_attention": False,
    }
    vae: Any = AutoencoderKL(**shape)
    vae.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=VAE_LR, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=VAE_LR, total_steps=steps, pct_start=0.1)
    start = time.monotonic()
    for step in range(steps):
        group = images[step % len(images)]
        batch = group[torch.from_numpy(rng.choice(len(group), batch_size, replace=False))].float() / 127.5 - 1
        posterior = vae.encode(batch.contiguous(memory_format=torch.channels_last)).latent_dist
        strength = LATENT_NOISE * torch.rand(batch_size, 1, 1, 1) * min(1.0, 4 * step / steps)
        latents = posterior.sample()
        deviations = latents.detach().std((0, 2, 3), keepdim=True)
        decoded = vae.decode(latents + strength * deviations * torch.randn_like(latents)).sample
        free = posterior.mean[:, 3:]
        loss = F.l1_loss(decoded, batch) + MSE_WEIGHT * F.mse_loss(decoded, batch) + KL_WEIGHT * posterior.kl().mean()
        loss = loss + ANCHOR_WEIGHT * F.mse_loss(posterior.mean[:, :3], F.avg_pool2d(batch, 8))
        loss = loss + FREE_WEIGHT * (free.mean((0, 2, 3)) ** 2 + (free.std((0, 2, 3)) - FREE_DEVIATION) ** 2).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step:5d}  loss {loss.item():.4f}  {time.monotonic() - start:.0f} s", flush=True)
    vae.eval()
    with torch.no_grad():
        latents = [vae.encode(group[:512].float() / 127.5 - 1).latent_dist.sample() for group in images]
    channels = torch.cat([latent.transpose(0, 1).flatten(1) for latent in latents], dim=1)  # (C, values)
    vae.register_to_config(
        latents_mean=[round(value, 4) for value in channels.mean(1).tolist()],
        latents_std=[round(value, 4) for value in channels.std(1).tolist()],
        scaling_factor=1.0,
    )
    vae.half().save_pretrained(out)


def _facts(caption: str) -> list[str]:
    """Size, relation, colors and shapes in a caption; "" for what it does not mention."""
    words = caption.split()
    said = [
        [w for w in words if w in kind] for kind in (("big", "small"), {relation.split()[0] for relation in RELATIONS})
    ]
    of_objects = [[w for w in words if w in kind] for kind in (COLORS, SHAPES)]
    return [[*group, ""][0] for group in said] + [word for group in of_objects for word in [*group, ""][:2]]


def _images_by_size(num_images: int) -> list[torch.Tensor]:
    """The demo's images at half size, one (N, 3, H, W) uint8 tensor per aspect ratio."""
    groups: dict[tuple[int, int], list[np.ndarray]] = {}
    for scene in make_scenes(num_images, seed=1):  # another seed than the demo's own images
        image = draw_scene(scene).resize((scene.width_px // DOWNSCALE, scene.height_px // DOWNSCALE), resample=3)
        groups.setdefault((scene.height_px, scene.width_px), []).append(np.asarray(image))
    return [torch.from_numpy(np.stack(group)).permute(0, 3, 1, 2) for group in groups.values()]


def main() -> None:
    """Parse the command line and build both encoders."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder that gets vae/ and t5/")
    parser.add_argument("--steps", type=int, default=2400, help="updates of the VAE")
    args = parser.parse_args()
    torch.set_num_threads(1)  # with another number, the sums of a convolution round differently
    train_t5(args.out / "t5", steps=800, batch_size=64)
    train_vae(args.out / "vae", steps=args.steps, batch_size=8, num_images=3000)


if __name__ == "__main__":
    main()
