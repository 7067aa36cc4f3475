"""``--dry-run``: the resolved recipe, what would be read, fetched and written, and for how long. Nothing is changed."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from ..datasets.buckets import bucket_name, bucket_size, resize_filter
from ..datasets.errors import RecipeError, RecordRejected
from ..datasets.layout import latent_layouts
from ..datasets.recipe import to_toml
from ..datasets.store import LatentStore
from ..datasets.text_dtypes import token_bytes
from ..precompute.caption_plan import plan_captions
from ..precompute.config import PrecomputeRecipe
from ..precompute.decoder import Decoders
from ..precompute.encoders import Encoders, load_encoders
from ..precompute.model_files import local_folder
from ..precompute.pipeline import describe_store
from ..precompute.plan import PlannedPicture, num_threads, plan_pictures
from ..precompute.source_record import caption_texts
from ..precompute.sources import Source, list_source
from ..train.config import TrainRecipe
from ..train.models import build_model, check_model_name, check_sizes, model_spec
from ..train.state import autocast_dtype, check_recipe
from .progress import ProgressLine

PROBE_RECORDS = 64  # encoded to estimate the time
NO_LIMIT = {"max_reject_share": 1.0, "max_rejects_in_a_row": 1 << 62}  # a dry run counts all rejects


def describe_precompute(recipe: PrecomputeRecipe, source_path: Path | str | None, device: torch.device) -> str:
    """What a precompute would do.

    Args:
      source_path: is scanned if given; without it, only the recipe is shown.
    """
    lines = [to_toml(recipe), *encoder_lines(recipe)]
    if source_path is None:
        return "\n".join([*lines, "give --source to count its pictures"])
    with ProgressLine() as progress:
        source = list_source(source_path, recipe.source.kind, progress=lambda done: progress("list", done, 0))
    everything = recipe.model_copy(update={"source": recipe.source.model_copy(update=NO_LIMIT)})
    with ProgressLine() as progress, Decoders(num_threads()) as decoders:
        total = len(source.records)
        looked_at = plan_pictures(
            source, source.records, everything, decoders, progress=lambda done: progress("scan", done, total)
        )
        pictures = list(looked_at)
    rejects = Counter(picture.reject.reason for picture in pictures if picture.reject)
    buckets = Counter(bucket_name(*picture.bucket) for picture in pictures if picture.bucket)
    lines += ["", f"{'source':<20}{source.kind} '{source_path}', {len(source.records)} records"]
    lines += [f"{'would reject':<20}{count} x {reason}" for reason, count in sorted(rejects.items())]
    lines += ["", f"{'bucket':<20}{'records':>10}"]
    lines += [f"{name:<20}{buckets[name]:>10}" for name in sorted(buckets, key=bucket_size)]
    wanted = [recipe.vae.model] + ([recipe.text.model] if recipe.text.kind != "none" else [])
    if any(local_folder(model) is None for model in wanted):
        return "\n".join([*lines, "", "bytes and time are known once the encoders are here"])
    encoders = load_encoders(recipe, device)
    return "\n".join([*lines, "", *size_lines(recipe, source, pictures, buckets, encoders)])


def encoder_lines(recipe: PrecomputeRecipe) -> list[str]:
    """Where each encoder comes from."""
    wanted = [("vae", recipe.vae.model, recipe.vae.subfolder)]
    if recipe.text.kind != "none":
        wanted.append(("text encoder", recipe.text.model, recipe.text.subfolder))
    lines = []
    for role, model, subfolder in wanted:
        folder = local_folder(model)
        where = f"{model}/{subfolder}" if subfolder else model
        if folder is None:
            lines.append(f"{role:<20}'{where}': would be fetched from the hub (safetensors), or taken from its cache")
        else:
            state = "a folder here" if folder.is_dir() else "a folder that is MISSING"
            lines.append(f"{role:<20}'{where}': {state}")
    return lines


def size_lines(
    recipe: PrecomputeRecipe,
    source: Source,
    pictures: list[PlannedPicture],
    buckets: Counter[str],
    encoders: Encoders,
) -> list[str]:
    """Bytes on disk, and hours from a probe of some records."""
    spec = describe_store(recipe, source, encoders)
    latent_bytes = sum(
        layout.row_bytes * layout.shape[0] for name, n in buckets.items() for layout in latent_layouts(spec, name, n)
    )
    lines = [f"{'latents':<20}{latent_bytes / 2**20:>10.1f} MiB before any codec"]
    if spec.text:
        texts = [
            [] if picture.reject else caption_texts(record)
            for record, picture in zip(source.records, pictures, strict=True)
        ]
        captions, _ = plan_captions(texts, encoders.tokenizer, recipe.text.max_tokens)
        tokens = int(captions["num_tokens"].to_numpy().sum())
        size = tokens * token_bytes(spec.text.width, spec.text.dtype)
        lines.append(f"{'captions':<20}{size / 2**20:>10.1f} MiB, {captions.num_rows} distinct, {tokens} tokens")
    seconds, probed = probe_seconds(recipe, source, pictures, encoders)
    if probed:
        hours = seconds / probed * sum(buckets.values()) / 3600
        lines.append(f"{'time':<20}{hours:>10.2f} h for the pictures, from {probed} of them, one after the other")
    return lines


def probe_seconds(
    recipe: PrecomputeRecipe, source: Source, pictures: list[PlannedPicture], encoders: Encoders
) -> tuple[float, int]:
    """Seconds to decode and encode some records, and how many they were."""
    planned = [(record, picture.bucket) for record, picture in zip(source.records, pictures, strict=True)]
    probe = [(record, bucket) for record, bucket in planned if bucket][:PROBE_RECORDS]
    images, start, done = recipe.images, time.perf_counter(), 0
    how = resize_filter(images.buckets, images.resolution)
    with Decoders(1) as decoders:
        for record, bucket in probe:
            try:
                place = source.place(record.path, record.offset, record.num_bytes, stage="decode")
                picture = decoders.picture(*place, bucket=bucket, crop=images.crop, resize_filter=how)
            except RecordRejected:
                continue
            encoders.image.encode(picture.pixels[None])
            done += 1
    return time.perf_counter() - start, done


def describe_train(recipe: TrainRecipe, store_path: Path | str | None, device: torch.device) -> str:
    """What a training run would do.

    Args:
      store_path: is opened if given; without it, only the recipe is shown.
    """
    lines = [to_toml(recipe)]
    asked = recipe.run.precision
    actual = asked if asked != "bf16" or autocast_dtype(asked, device) else "fp32, this device has no fast bf16"
    lines.append(f"{'device':<20}{device}, {actual}, {os.cpu_count()} cores")
    blocked = _refusal(lambda: check_model_name(recipe.model.name)) or _refusal(lambda: check_recipe(recipe))
    if blocked:
        return "\n".join([*lines, f"{'cannot run yet':<20}{blocked}"])
    if store_path is None:
        return "\n".join([*lines, "give --store to check that the model fits it"])
    store = LatentStore(store_path, allow_incomplete=recipe.run.allow_incomplete)
    spec = model_spec(recipe, store.spec, str(store_path))
    check_sizes(spec, store.spec.latent, list(store.buckets))
    with torch.device("meta"):
        parameters = sum(p.numel() for p in build_model(spec, seed=0).parameters())
    records = sum(store.buckets.values())
    epochs = recipe.run.steps * recipe.run.global_batch / max(records, 1)
    lines += [
        f"{'model':<20}{spec.name}, {parameters / 1e6:.1f} M parameters, {spec.channels} latent channels",
        f"{'memory':<20}{parameters * 20 / 2**30:.2f} GiB of weights, gradients, AdamW and EMA; plus activations",
        f"{'store':<20}'{store_path}', {records} records",
        f"{'run':<20}{recipe.run.steps} steps of {recipe.run.global_batch} images: {epochs:.1f} epochs",
        "",
        f"{'bucket':<20}{'records':>10}",
    ]
    return "\n".join([*lines, *(f"{name:<20}{count:>10}" for name, count in store.buckets.items())])


def _refusal(check: Callable[[], None]) -> str | None:
    """Message of a check that refuses, else None."""

    try:
        check()
    except RecipeError as error:
        return str(error)
    return None
