"""Training on a store beside training that encodes every batch again, both with the step of ``leandit train``.

    python benchmarks/caching.py dit-b-2-256 --scratch bench

Online, a batch starts as pixels in memory (decoding is not counted) and as captions, which the VAE and the T5 encode on
the same device. Captions have the encoder's maximum length, to which PixArt pads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from inputs import text_folder, vae_folder
from measuring import alternate, fresh_folder, log, machine, print_rates, timed

from leandit.datasets.batches.batch import Batch
from leandit.datasets.store import LatentStore
from leandit.precompute.config import PrecomputeRecipe, TextSection, VaeSection
from leandit.precompute.encoders.loading import Encoders, load_encoders
from leandit.tools.cli.options import Device, Overrides, torch_device
from leandit.tools.plan.workload import CLASSES
from leandit.tools.synthetic.batches import synthetic_batch, synthetic_learner
from leandit.tools.synthetic.store import make_store
from leandit.train.config import TrainRecipe, load
from leandit.train.loop import endless
from leandit.train.parallel.ranks import ALONE
from leandit.train.run.data import build_loader
from leandit.train.run.fit import model_spec
from leandit.train.step.cpu import keep_freed_memory
from leandit.train.step.train_step import train_step

CACHED, ONLINE = "cached", "online"
STORED_BATCHES = 4
WARM_STEPS = 3  # not counted: compile, fill caches, allocate


def measure_caching(
    device: str,
    scratch: str,
    recipe: str,
    side_px: int,
    settings: list[str],
    vae: str,
    text: str,
    rounds: int,
    steps: int,
) -> dict[str, list[float]]:
    """Images/s of training on a store, and of training that encodes every batch again."""
    where, folder, train_recipe = torch.device(device), Path(scratch).resolve(), load(recipe, settings)
    if where.type == "cpu":
        keep_freed_memory()  # as ``leandit train`` does
    dtype = "bfloat16" if where.type == "cuda" else "float32"
    section = VaeSection(model=str(vae_folder(vae, folder)), dtype=dtype, min_psnr=0.0)
    text_section = TextSection(kind="t5", model=str(text_folder(text, folder, where))) if text else TextSection()
    encoders = load_encoders(PrecomputeRecipe(vae=section, text=text_section), where)
    store = noise_store(train_recipe, side_px, encoders, fresh_folder(folder, "store"))
    tokens = store.spec.text.max_tokens if store.spec.text else 0
    spec = model_spec(train_recipe, store.spec, str(store.path))
    compiled = train_recipe.run.compile and where.type == "cuda"
    learner = synthetic_learner(train_recipe, spec, tokens, where, compiled=compiled)
    cached = endless(build_loader(train_recipe, [store], spec, where, log, ALONE))
    online = encoded_batches(train_recipe, side_px, encoders, section.batch_size, store, tokens, where)
    size, cells = train_recipe.run.global_batch, dict[str, Callable[[], float]]()
    for name, batches in ((CACHED, cached), (ONLINE, online)):

        def step(batches: Iterator[Batch] = batches) -> None:
            train_step(learner, next(batches))

        timed(step, WARM_STEPS, where)
        cells[name] = lambda step=step: steps * size / timed(step, steps, where)
    return alternate(cells, rounds)


def noise_store(recipe: TrainRecipe, side_px: int, encoders: Encoders, folder: Path) -> LatentStore:
    """A store of noise in the shapes that the encoders return, with captions of full length."""
    encoder = encoders.captions.get("")
    longest = [long_caption(TextSection().max_tokens)]
    _, tokens, width = encoder.encode(longest).token_rows().shape if encoder else (0, 0, 1)
    make_store(
        folder / "store",
        {f"{side_px}x{side_px}": STORED_BATCHES * recipe.run.global_batch},
        channels=encoders.image.num_channels,
        num_classes=recipe.model.num_classes or CLASSES,
        token_counts=[tokens] * 8 if tokens else (),
        text_width=width,
    )
    return LatentStore(folder / "store")


def encoded_batches(
    recipe: TrainRecipe,
    side_px: int,
    encoders: Encoders,
    vae_batch: int,
    store: LatentStore,
    tokens: int,
    device: torch.device,
) -> Iterator[Batch]:
    """Batches as the loader delivers them, of images and captions that are encoded when they are asked for."""
    size, rng = recipe.run.global_batch, np.random.default_rng(0)
    scaling = {"shift": store.spec.latent.shift, "scale": store.spec.latent.scale}
    while True:
        pixels = rng.integers(0, 256, (size, side_px, side_px, 3), np.uint8)
        rows = [encoders.image.encode(pixels[i : i + vae_batch]) for i in range(0, size, vae_batch)]
        stored = torch.from_numpy(np.concatenate(rows)).to(device)
        if encoders.image.has_posterior:
            mean, logvar = stored.chunk(2, dim=1)
            stored = mean + torch.exp(0.5 * logvar.clamp(-30, 20)) * torch.randn_like(mean)
        batch = synthetic_batch(store.spec, f"{side_px}x{side_px}", size, tokens, device)
        texts = dict(batch.texts)
        if encoder := encoders.captions.get(""):
            captions, count = [long_caption(tokens)] * size, TextSection().batch_size
            parts = [encoder.encode(captions[i : i + count]).token_rows() for i in range(0, size, count)]
            texts[""] = replace(texts[""], tokens=torch.from_numpy(np.concatenate(parts)).to(device))
        yield replace(batch, stored=stored, spec=batch.spec.model_copy(update=scaling), texts=texts).finish()


def long_caption(tokens: int) -> str:
    """A caption that the encoder truncates to its maximum length."""
    return "a " * tokens


def main(
    recipe: Annotated[str, typer.Argument(help="Name of a shipped recipe of training, or a TOML file.")],
    scratch: Annotated[Path, typer.Option(help="Folder for random encoders and the store.")],
    resolution: Annotated[int, typer.Option(min=8, help="Side of the images, in pixels.")] = 256,
    vae: Annotated[str, typer.Option(help="Folder, shipped:vae or random:sd.")] = "random:sd",
    text: Annotated[str, typer.Option(help="Folder, shipped:t5 or random:t5-xxl; else no captions.")] = "",
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Of each, in each round.")] = 10,
    device: Device = "auto",
    overrides: Overrides = None,
) -> None:
    """Compare training on a store with training that encodes every image and caption again."""
    where = str(torch_device(device))
    figures = measure_caching(where, str(scratch), recipe, resolution, overrides or [], vae, text, rounds, steps)
    print(f"{machine()}; device {where}; {recipe}, {resolution} px; {vae} {text}; medians (ranges)\n")
    print_rates("images/s", figures, CACHED)


if __name__ == "__main__":
    typer.run(main)
