"""Stage 1 as a story: list the source, load the encoders, freeze the plan, encode what is missing, seal.

Running the same command again goes on where the last one stopped: a shard with a valid commit record is never made
twice. What overlaps with what stands in ``stages.py``, what may be taken up in ``opening.py``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import __version__
from ..datasets.buckets import bucket_name, bucket_table
from ..datasets.errors import RecipeError, SourceError
from ..datasets.schema import FORMAT_VERSION, ImageSpec, Manifest, StoreSpec
from .config import PrecomputeRecipe
from .encoders import Encoders, load_encoders
from .images import COLOUR, RESIZE_FILTER
from .opening import check_disk, open_writer, sealed_manifest
from .sources import Source, list_source
from .stages import Background, Progress, StageClock, encode_captions, encode_pictures


@dataclass(frozen=True)
class Report:
    """What a precompute did.

    Args:
      manifest: of the sealed store.
      num_encoded: pictures encoded by this call; 0 where the store was complete already.
      seconds: of the whole call, and of each stage (decode and write run beside the encoder).
      num_ignored: files of the source that are no pictures by their name.
    """

    manifest: Manifest
    num_encoded: int
    total_seconds: float
    seconds: dict[str, float]
    num_ignored: int

    @property
    def bound_by(self) -> str:
        """The stage that the run waited for."""
        waits = {"decode": self.seconds.get("wait_decode", 0.0), "write": self.seconds.get("wait_write", 0.0)}
        encode = self.seconds.get("encode", 0.0) + self.seconds.get("text", 0.0)
        slowest = max(waits, key=lambda stage: waits[stage])
        return slowest if waits[slowest] > encode else "encode"


def precompute(
    recipe: PrecomputeRecipe, *, source_path: Path, store_path: Path, device: torch.device, progress: Progress
) -> Report:
    """Run every picture and caption of a source through the encoders, exactly once, into a store.

    Raises: LeanditError: of the class that says what to mend; the store then resumes with the same command.
    """
    start = time.perf_counter()
    clock = StageClock()

    # Scan: list the source, load the encoders.
    source = list_source(source_path, recipe.source.kind)
    encoders = load_encoders(recipe, device)
    spec = describe_store(recipe, source, encoders)

    # Plan: freeze it, or take up the one that is there.
    with clock.measure("plan"):
        writer = open_writer(store_path, spec, source, recipe, encoders, progress)
    missing = writer.missing_tasks()
    if not missing and (manifest := sealed_manifest(writer)):
        return Report(manifest, 0, time.perf_counter() - start, clock.seconds, source.num_ignored)
    check_disk(writer, missing)

    # Encode: decoding ahead, writing behind.
    num_encoded = 0
    with Background(writer, clock) as background:
        for shard in encode_captions(writer, encoders, missing, clock, progress):
            background.commit(shard)
        for shard in encode_pictures(writer, encoders, source, missing, clock, progress):
            background.commit(shard)
            num_encoded += len(shard.checksums)

    # Seal: merge the commit records.
    if not writer.num_stored:
        raise SourceError(
            f"source '{source.root}': not one of {len(source.records)} pictures could be encoded, so the store is not "
            f"sealed. Look at one of them; the reasons are in '{store_path / 'commits'}'."
        )
    manifest = writer.seal()
    return Report(manifest, num_encoded, time.perf_counter() - start, clock.seconds, source.num_ignored)


def describe_store(recipe: PrecomputeRecipe, source: Source, encoders: Encoders) -> StoreSpec:
    """What the store will say of itself, with its fingerprint.

    Raises: RecipeError: a bucket does not fit the VAE's downscale.
    """
    table = bucket_table(recipe.images.buckets, recipe.images.resolution)
    latent = encoders.image.latent_spec(recipe.vae, recipe.store.dtype)
    for _, height_px, width_px in table:
        if height_px % latent.downscale or width_px % latent.downscale:
            raise RecipeError(
                f"bucket '{bucket_name(height_px, width_px)}': the VAE makes one latent of {latent.downscale} px, so "
                f"both sides must be multiples of {latent.downscale}. Use another resolution, table or VAE."
            )
    return StoreSpec(
        format_version=FORMAT_VERSION,
        leandit_version=__version__,
        fingerprint="",
        images=ImageSpec(
            resolution_px=recipe.images.resolution,
            crop=recipe.images.crop,
            buckets=[bucket_name(height_px, width_px) for _, height_px, width_px in table],
            resize_filter=RESIZE_FILTER if recipe.images.crop == "adm" else "bicubic",
            colour=COLOUR,
        ),
        latent=latent,
        text=encoders.caption and encoders.caption.text_spec(recipe.text, recipe.store.dtype),
        vae=encoders.image.identity,
        text_encoder=encoders.caption and encoders.caption.identity,
        classes=source.classes,
        shard_mib=recipe.store.shard_mib,
        codec=recipe.store.codec,
        recipe=recipe.model_dump(),
    ).with_fingerprint()
