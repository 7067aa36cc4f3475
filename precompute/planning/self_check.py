"""The encoders prove themselves before a plan is frozen: images of the source go to the model's input and back.

    pixels -> stored row -> latent of the model -> raw latent -> decoder -> pixels

The round trip finds what does not cancel in it: pixels in another range, halves that do not belong together, a row that
its dtype cannot hold. Before it, outputs that are not finite or do not depend on the image are found. Shift and scale
do cancel, so mean and deviation of the model's input are printed beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pyarrow as pa
import torch
from xxhash import xxh3_64_intdigest

from ...datasets.batches.latents import denormalise, mean_latents
from ...datasets.format.buckets import bucket_size
from ...datasets.format.row_layout import LATENTS
from ...datasets.format.schema import CheckedImage, SelfCheck
from ...datasets.format.token_dtypes import INT8_RANGE
from ...datasets.revisions import latent_statistics
from ...datasets.revisions.latent_statistics import MEAN_LIMIT, STD_LIMITS
from ...datasets.revisions.plan import FrozenPlan
from ...errors import EncoderError, RecordRejected, ResourceError
from ..encoders.loading import Encoders
from ..encoders.pretrained import is_finite
from ..encoders.vae import ImageEncoder
from ..images.decoders import Decoders
from ..run.clock import StageClock
from ..run.columns import OWN, Column, EncodedBatch, encode_batch, image_columns, stored_row
from ..run.inputs import ImageReader
from ..sources.source import OpenedSource

NUM_IMAGES = 8
CANDIDATES = 4096  # planned records, evenly spread, of which those with the smallest hash are tried
ATTEMPTS = 8 * NUM_IMAGES  # some may not decode
MAX_PSNR_DB = 100.0  # of an image that comes back exactly
CLEARLY_BETTER_DB = 6.0
NAMED_CHANNELS = 16  # with more channels, only the range is printed
STD_KEYS = "scaling_factor, latents_std"  # of a VAE's config
MEAN_KEYS = "shift_factor, latents_mean"


@dataclass(frozen=True)
class EncodedImage:
    """An image of the source and what the encoders made of it.

    Args:
      bucket: its name.
      position: in the records table.
      pixels: (height_px, width_px, 3) uint8.
      encoded: outputs of each column.
    """

    key: str
    bucket: str
    position: int
    pixels: np.ndarray
    encoded: EncodedBatch

    def outputs(self, number: int) -> list[np.ndarray]:
        """(1, ...) float32 outputs of a column."""
        return self.encoded.outputs[number][0][0] or []


@dataclass(frozen=True)
class RoundTrip:
    """An image and what came back of it.

    Args:
      before, after: (height_px, width_px, 3) uint8.
      latent: (C, H, W) float32, as the model sees it.
    """

    key: str
    before: np.ndarray
    after: np.ndarray
    latent: np.ndarray


def check_encoders(
    plan: FrozenPlan,
    encoders: Encoders,
    decoders: Decoders,
    source: OpenedSource,
    *,
    min_psnr_db: float,
    say: Callable[[str], None],
    progress: Callable[[int], None],
) -> SelfCheck | None:
    """Encode images of a plan, and send them through the autoencoder and back.

    Args:
      plan: not frozen yet.
      min_psnr_db: of the median image.
      say: called with the figures, and with a warning about a channel far from mean 0 and deviation 1.
      progress: called with the number of images done.
    Returns: None if the autoencoder has no decoder, or none of the images that were tried can be decoded.
    Raises: EncoderError: an encoder gives NaN, infinity or the same for every image, or the median is below
      ``min_psnr_db``; its message says the likely mistake. ResourceError: out of memory.
    """
    columns = [column for column in image_columns(encoders, plan.spec.latent).values() if column.image == OWN]
    images: list[EncodedImage] = []
    for position in checked_positions(plan):
        image = encode_image(plan, position, columns, decoders, source)
        if image:
            images.append(image)
            progress(len(images))
        if len(images) == NUM_IMAGES:
            break
    for number, column in enumerate(columns):
        _check_outputs(column, images, number, encoders, plan)
    if not encoders.image.has_decoder:
        return None
    trips: list[RoundTrip] = []
    for image in images:
        trip = _round_trip(plan, image, columns, encoders.image)
        if trip:
            trips.append(trip)
    if not trips:
        say("self-check: none of the images tried can be decoded, so the VAE was not checked")
        return None
    check = _measure(trips)
    for line in describe(check):
        say(f"self-check: {line}")
    unusual = channel_warning(check)
    decibels = [image.psnr_db for image in check.images]
    if np.median(decibels) < min_psnr_db:
        raise EncoderError(
            f"vae.model '{plan.spec.vae.model}': images of the source are reconstructed with a PSNR "
            f"of {np.median(decibels):.1f} dB (median of {len(trips)}), expected vae.min_psnr = {min_psnr_db:g}. "
            f"Nothing was written. {unusual or _likely_mistake(trips)} If the VAE is right and has not seen such "
            "images, lower vae.min_psnr; 0 disables the check."
        )
    if unusual:
        say(f"warning: self-check: {unusual}")
    return check


def checked_positions(plan: FrozenPlan) -> Iterator[int]:
    """Positions in the records table to try: planned records, spread by a hash of their key."""
    table = plan.records
    planned = np.flatnonzero((table["revision"].to_numpy() == plan.revision) & (table["row"].to_numpy() >= 0))
    spread = np.linspace(0, len(planned) - 1, min(CANDIDATES, len(planned))).round().astype(int)
    candidates = planned[np.unique(spread)]
    keys = table["key"].take(pa.array(candidates)).to_pylist()
    hashed = sorted((xxh3_64_intdigest(key.encode("utf-8", "surrogatepass")), i) for i, key in enumerate(keys))
    yield from (int(candidates[i]) for _, i in hashed[:ATTEMPTS])


def encode_image(
    plan: FrozenPlan, position: int, columns: Sequence[Column], decoders: Decoders, source: OpenedSource
) -> EncodedImage | None:
    """One record, encoded; None if it is rejected, as it will be when the store is made."""
    row = plan.records.slice(position, 1).to_pylist()[0]
    reader = ImageReader(plan.spec.images, source, decoders, StageClock())
    place = row["source_path"], row["source_offset"], row["source_bytes"]
    image = reader.decode_planned(place, (row["height_px"], row["width_px"]), bucket_size(row["bucket"]))
    if isinstance(image, RecordRejected):
        return None
    views = {OWN: [image.pixels[None]]}
    encoded = encode_batch(views, columns, max_rows=1)
    if any(of_views[0][0] is None for of_views in encoded.outputs):  # out of memory
        return None
    return EncodedImage(row["key"], row["bucket"], position, np.asarray(image.pixels), encoded)


def _check_outputs(
    column: Column, images: Sequence[EncodedImage], number: int, encoders: Encoders, plan: FrozenPlan
) -> None:
    """Check that an encoder, and the dtype of its rows, can do at least one of the images.

    Args:
      number: of the column.
    Raises: EncoderError: it gives NaN or infinity for all of them, or the same whatever the image.
    """
    if not images:
        return
    is_latent = column.group == LATENTS
    model = encoders.image if is_latent else encoders.features[column.group]
    tried = f"all {len(images)} images of the source that were tried" if len(images) > 1 else "the image that was tried"
    outputs = [image.outputs(number) for image in images]
    if not any(map(is_finite, outputs)):
        is_exact_finite = is_finite(column.encode_exactly(images[0].pixels[None]))
        raise EncoderError(model.nonfinite_message(tried, is_finite_in_float32=is_exact_finite))
    if not model.may_be_constant and _ignores_images(images, outputs):
        raise EncoderError(model.constant_message(tried))
    positions = np.array([images[0].position])
    rows = [column.narrow(of_image, positions) for of_image in outputs]
    if not any(map(is_finite, rows)):
        largest = max(float(np.abs(output).max()) for of_image in outputs for output in of_image)
        if is_latent:
            setting = f'store.dtype = "{plan.spec.latent.dtype}"'
            wider = 'store.dtype = "float32"'
        else:
            setting = f'features.{column.group}.dtype = "{column.token_dtype}"'
            wider = f'features.{column.group}.dtype = "int8", which has scales'
        advice = "Check the weights of the model."
        if largest <= INT8_RANGE or is_latent:
            advice = f"Set {wider}, or check the weights of the model."
        raise EncoderError(
            f"{model.label}: its outputs reach {largest:.3g} for {tried}, which {setting} cannot hold. Nothing was "
            f"written. {advice}"
        )


def _ignores_images(images: Sequence[EncodedImage], outputs: Sequence[list[np.ndarray]]) -> bool:
    """Images of one size that differ all have equal outputs."""
    pairs = [
        (i, j)
        for i, j in combinations(range(len(images)), 2)
        if images[i].bucket == images[j].bucket and not np.array_equal(images[i].pixels, images[j].pixels)
    ]
    return bool(pairs) and all(
        np.array_equal(first, second) for i, j in pairs for first, second in zip(outputs[i], outputs[j], strict=True)
    )


def _round_trip(
    plan: FrozenPlan, image: EncodedImage, columns: Sequence[Column], encoder: ImageEncoder
) -> RoundTrip | None:
    """What comes back of an image; None if it is rejected, as it will be when the store is made."""
    spec = plan.spec.latent
    try:
        stored = stored_row(image.encoded, 0, {OWN: [image.pixels[None]]}, image.position, columns)
        if isinstance(stored, RecordRejected):
            return None
        latent = mean_latents(torch.from_numpy(stored.rows[0][0][None]), spec)
        after = encoder.decode(denormalise(latent, spec).numpy())[0]
    except torch.OutOfMemoryError as error:
        raise ResourceError(
            f"vae.min_psnr: the self-check decodes one image of {image.bucket} px, which does not fit into the "
            f"memory of {encoder.device}. Set vae.min_psnr = 0 for no check, or vae.tile_px."
        ) from error
    return RoundTrip(image.key, image.pixels, after, latent[0].numpy())


def _measure(trips: list[RoundTrip]) -> SelfCheck:
    values = np.concatenate([trip.latent.reshape(len(trip.latent), -1) for trip in trips], 1).astype(np.float64)
    return SelfCheck(
        images=[CheckedImage(key=trip.key, psnr_db=round(_psnr_db(trip), 2)) for trip in trips],
        channel_mean=[round(float(value), 4) for value in values.mean(1)],
        channel_std=[round(float(value), 4) for value in values.std(1)],
    )


def _psnr_db(trip: RoundTrip, gain: float = 1.0, offset: float = 0.0) -> float:
    """PSNR of an image of 8-bit pixels; the decoded ones are taken times ``gain`` plus ``offset``."""
    error = np.mean((trip.after * gain + offset - trip.before.astype(np.float64)) ** 2)
    return float(min(MAX_PSNR_DB, 10 * np.log10(255**2 / max(error, 1e-10))))


def describe(check: SelfCheck) -> list[str]:
    """The figures of a self-check, in words."""
    decibels = [image.psnr_db for image in check.images]
    each = ", ".join(f"{value:.1f}" for value in decibels)
    lines = [f"PSNR of {len(decibels)} reconstructed images: {each} dB"]
    for name, values in (("mean", check.channel_mean), ("standard deviation", check.channel_std)):
        told = ", ".join(f"{value:.2f}" for value in values)
        if len(values) > NAMED_CHANNELS:
            told = f"{min(values):.2f} to {max(values):.2f} in {len(values)} channels"
        lines.append(f"{name} of each channel as the model sees it: {told}")
    return lines


def channel_warning(check: SelfCheck) -> str:
    """What to say about channels that are far from mean 0 and deviation 1; "" if none is."""
    num_channels = len(check.channel_std)
    unusual_means, unusual_stds = latent_statistics.unusual_channels(check.channel_mean, check.channel_std)
    if unusual_stds:
        low, high = STD_LIMITS
        figures = (
            f"standard deviations of {min(check.channel_std):.2g} to {max(check.channel_std):.2g}, expected about 1 "
            f"({len(unusual_stds)} of {num_channels} channels are outside {low:g} to {high:g})"
        )
        keys = STD_KEYS
    elif unusual_means:
        figures = (
            f"means of {min(check.channel_mean):.2g} to {max(check.channel_mean):.2g}, expected about 0 "
            f"({len(unusual_means)} of {num_channels} channels are beyond {MEAN_LIMIT:g})"
        )
        keys = MEAN_KEYS
    else:
        return ""
    return f"The latents as the model sees them have {figures}: check {keys} or the batch norm of the VAE."


def _likely_mistake(trips: list[RoundTrip]) -> str:
    """What a low PSNR comes from: pixels in another range if a gain and an offset repair the images, else weights."""
    before = np.concatenate([trip.before.ravel() for trip in trips]).astype(np.float64)
    after = np.concatenate([trip.after.ravel() for trip in trips]).astype(np.float64)
    gain = float(((after - after.mean()) * (before - before.mean())).mean() / max(after.var(), 1e-10))
    offset = float(before.mean() - gain * after.mean())
    better = np.median([_psnr_db(trip, gain, offset) - _psnr_db(trip) for trip in trips])
    if better > CLEARLY_BETTER_DB:
        return (
            f"The decoded images times {gain:.2f} plus {offset:.0f} are right: the VAE takes or gives pixels in "
            "another range (0 to 1, not -1 to 1), or is not of the class that its config.json names."
        )
    return (
        "Encoder and decoder do not belong together, or one of them computes incorrectly: check that config.json and "
        "weights belong to the same model, and vae.dtype and store.dtype."
    )
