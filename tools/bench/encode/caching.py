"""``leandit bench caching``: training on a store compared with training that encodes every batch again.

Both run the training step of ``leandit train``. Online, each batch starts as decoded pixels in memory (decoding is not
counted) and as captions, which the VAE and the T5 encode on the same device; cached, the loader reads it from a store.
Both have captions of the encoder's maximum length, to which PixArt pads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ....datasets.batches.batch import Batch
from ....datasets.store import LatentStore
from ....precompute.config import PrecomputeRecipe, TextSection, VaeSection
from ....precompute.encoders.loading import Encoders, load_encoders
from ....train.config import TrainRecipe
from ....train.loop import endless
from ....train.parallel.ranks import ALONE
from ....train.run.data import build_loader
from ....train.run.model_for_store import model_spec
from ....train.step.learner import Learner
from ....train.step.train_step import train_step
from ...plan.workload import CLASSES
from ...synthetic.batches import synthetic_batch, synthetic_learner
from ...synthetic.store import make_store
from ...terminal.cpu_memory import keep_freed_memory
from ...terminal.progress import ProgressLine
from ..harness.meters import hardware
from ..harness.rounds import alternating_rounds, median_and_range, ratios
from ..harness.scratch import benchmark_folder, fresh_folder
from ..training.steps import WARM_STEPS, device_name, timed
from .inputs import text_model, vae_model

CACHED, ONLINE = "cached", "online"
BATCHES = 4  # of the store


@dataclass(frozen=True)
class CachingRequest:
    """What to measure.

    Args:
      vae, text: hub id, folder, or "random:SHAPE" (``inputs.py``); no text for a model of labels.
      tokenizer: folder of the tokenizer of a random text encoder.
      scratch: folder for the store and the random encoders.
    """

    recipe: TrainRecipe
    resolution_px: int
    vae: str
    text: str | None
    tokenizer: Path | None
    scratch: Path
    device: torch.device
    rounds: int
    steps: int


def run(request: CachingRequest, progress: ProgressLine) -> dict[str, Any]:
    """Measure both in alternating rounds.

    Raises: EncoderError, RecipeError: an encoder cannot be loaded, or does not fit the model.
    """
    device, size = request.device, request.recipe.run.global_batch
    scratch = benchmark_folder(request.scratch, "caching")
    if device.type == "cpu":
        keep_freed_memory()  # as the command 'train' does
    encoders = load_encoders(_encoder_recipe(request, scratch), device)
    store = _store(request, encoders, fresh_folder(scratch, "store", make=False))
    request.recipe.turns(store.path)  # raises where the recipe names other stores
    spec = model_spec(request.recipe, store.spec, str(store.path))
    tokens = store.spec.text.max_tokens if store.spec.text else 0
    compiled = request.recipe.run.compile and _is_gpu(device)
    learner = synthetic_learner(request.recipe, spec, tokens, device, compiled=compiled)
    batches = endless(build_loader(request.recipe, [store], spec, device, lambda message: None, ALONE))
    cells: dict[str, Callable[[], object]] = {
        CACHED: lambda: train_step(learner, next(batches)),
        ONLINE: lambda: train_step(learner, online_batch(request, encoders, store, learner)),
    }
    rates: dict[str, list[float]] = {name: [] for name in cells}
    for step in cells.values():
        timed(step, WARM_STEPS, device)
    for number, name in alternating_rounds(list(cells), request.rounds):
        rates[name].append(request.steps * size / timed(cells[name], request.steps, device))
        progress("caching", number + 1, request.rounds, f"{name}: {rates[name][-1]:.2f} images/s")
    return {
        "model": spec.name,
        "resolution_px": request.resolution_px,
        "vae": request.vae,
        "text": request.text,
        "caption_tokens": tokens,
        "batch": size,
        "device": device_name(device),
        "hardware": hardware(),
        "torch": torch.__version__,
        "images_per_second": rates,
    }


def render(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Name and value of each line: medians and ranges over the rounds."""
    rates = result["images_per_second"]
    text = f", {result['text']} of {result['caption_tokens']} tokens" if result["caption_tokens"] else ""
    rows = [
        ("machine", f"{result['device']}, torch {result['torch']}"),
        ("model", f"{result['model']}, {result['resolution_px']} px, batch {result['batch']}; {result['vae']}{text}"),
    ]
    rows += [("", f"{name:<8}  {median_and_range(values, '{:.2f}')} images/s") for name, values in rates.items()]
    gains = ratios(rates[CACHED], rates[ONLINE])
    return [*rows, ("", f"caching gains {median_and_range(gains, '{:.2f}x')}")]


def online_batch(request: CachingRequest, encoders: Encoders, store: LatentStore, learner: Learner) -> Batch:
    """A batch as the loader would deliver it, encoded now."""
    size, side, latent = request.recipe.run.global_batch, request.resolution_px, store.spec.latent
    rng = np.random.default_rng(learner.step)
    pixels = rng.integers(0, 256, (size, side, side, 3), np.uint8)
    step = max(1, request_vae(request).batch_size)
    rows = np.concatenate([encoders.image.encode(pixels[i : i + step]) for i in range(0, size, step)])
    stored = torch.from_numpy(rows).to(learner.device)
    if encoders.image.has_posterior:
        mean, logvar = stored.chunk(2, dim=1)
        stored = mean + torch.exp(0.5 * logvar.clamp(-30, 20)) * torch.randn_like(mean)
    tokens = store.spec.text.max_tokens if store.spec.text else 0
    bucket = f"{side}x{side}"
    batch = synthetic_batch(store.spec, bucket, size, tokens, learner.device, number=learner.step)
    shifts = {"shift": latent.shift, "scale": latent.scale}
    texts = dict(batch.texts)
    if encoder := encoders.captions.get(""):
        count = TextSection().batch_size
        captions = [long_caption(tokens)] * size
        parts = [encoder.encode(captions[i : i + count]).token_rows() for i in range(0, size, count)]
        texts[""] = replace(texts[""], tokens=torch.from_numpy(np.concatenate(parts)).to(learner.device))
    spec = batch.spec.model_copy(update=shifts)
    return replace(batch, stored=stored, spec=spec, texts=texts).finish()


def long_caption(tokens: int) -> str:
    """A caption that the encoder truncates to its maximum length."""
    return "a " * tokens


def request_vae(request: CachingRequest) -> VaeSection:
    """Settings of the VAE: bfloat16 on a GPU, float32 on a CPU."""
    return VaeSection(model=request.vae, dtype="bfloat16" if _is_gpu(request.device) else "float32")


def _encoder_recipe(request: CachingRequest, scratch: Path) -> PrecomputeRecipe:
    vae = request_vae(request).model_copy(update={"model": vae_model(request.vae, scratch), "min_psnr": 0.0})
    if request.text is None:
        return PrecomputeRecipe(vae=vae)
    model = text_model(request.text, request.tokenizer, scratch, request.device)
    return PrecomputeRecipe(vae=vae, text=TextSection(kind="t5", model=model))


def _store(request: CachingRequest, encoders: Encoders, path: Path) -> LatentStore:
    """A store of noise in the encoders' shapes."""
    encoder = encoders.captions.get("")
    longest = [long_caption(TextSection().max_tokens)]
    _, tokens, width = encoder.encode(longest).token_rows().shape if encoder else (0, 0, 1)
    side = request.resolution_px
    make_store(
        path,
        {f"{side}x{side}": BATCHES * request.recipe.run.global_batch},
        channels=encoders.image.num_channels,
        num_classes=request.recipe.model.num_classes or CLASSES,
        token_counts=[tokens] * 8 if tokens else (),
        text_width=width,
    )
    return LatentStore(path)


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"
