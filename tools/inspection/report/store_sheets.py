"""Decoded images of a store's report, bucket by bucket."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ....datasets.errors import EncoderError
from ....datasets.order.filters import ScoreTable, read_scores
from ....datasets.store import LatentStore
from ..pictures import read_originals, reject_cells, shown_records, spread
from ..store_facts import StoreFacts
from .page import Thumbnail, latent_pixels, several, thumbnail

Progress = Callable[[str, int, int], None]
MAX_IMAGES = 160  # of a report: decoding takes seconds for each on a CPU
MAX_BUCKETS = 60
MAX_REJECTS = 24
MANY = 120  # images, beyond which each is smaller
LARGE_PX, SMALL_PX = 192, 128
PAGE_BYTES = 3_200_000  # of all images of a report


class Sheet(NamedTuple):
    """Images of a bucket; the title names it."""

    title: str
    thumbnails: list[Thumbnail]


def bucket_sheets(
    store: LatentStore,
    *,
    count: int,
    vae: str | None,
    scores: ScoreTable | None,
    seed: int,
    num_stores: int,
    progress: Progress,
) -> tuple[list[Sheet], str]:
    """Images of each bucket, and a note: what decoded them, or why they could not be decoded.

    Without a decoder, the images are the first channels of the latents.

    Args:
      count: images of each bucket; 0: none.
      vae: folder or hub id of the decoder; None: the store's own.
      scores: over whose range the images of a bucket are spread; None: they are chosen at random.
      num_stores: that share the page.
    Raises: RecipeError: the scores cannot be read.
    """
    largest = sorted(store.buckets, key=lambda bucket: -store.buckets[bucket])[:MAX_BUCKETS]
    buckets = [bucket for bucket in store.buckets if bucket in largest and store.buckets[bucket]]
    if not count or not buckets:
        return [], ""
    each = max(1, min(count, MAX_IMAGES // num_stores // len(buckets)))
    total = each * len(buckets) * num_stores
    side_px, most_bytes = LARGE_PX if total <= MANY else SMALL_PX, PAGE_BYTES // total
    decode, note = _decoder(store, vae)
    values = _read_scores(store, scores) if scores else None
    records = shown_records(store, {name: choose_rows(store, name, each, values, seed) for name in buckets})
    sheets = []
    for number, (bucket, group) in enumerate(itertools.groupby(records, key=lambda record: record.bucket)):
        progress("decode", number, len(buckets))
        thumbnails = []
        for record in group:
            pixels = decode(store.latents(bucket).take(np.array([record.row]))[0])
            text = record.caption if values is None else f"score {values[record.position]:.4g}; {record.caption}"
            thumbnails.append(thumbnail(pixels, key=record.key, text=text, side_px=side_px, most_bytes=most_bytes))
        sheets.append(Sheet(f"{bucket}: {several(store.buckets[bucket], 'record')}", thumbnails))
    progress("decode", len(buckets), len(buckets))
    if len(store.buckets) > len(buckets):
        note += f" The {len(buckets)} buckets with the most records are shown, of {len(store.buckets)}."
    how = f"spread over the quantiles of '{scores.column}', the lowest first" if scores else "chosen at random"
    return sheets, f"{note} Images of a bucket are {how}."


def choose_rows(store: LatentStore, bucket: str, count: int, scores: np.ndarray | None, seed: int) -> np.ndarray:
    """Positions in the index of a bucket: at even quantiles of the score, or at random in order of their rows.

    Args:
      scores: (records,) with NaN for none; None: at random.
    """
    records = store.index(bucket).records
    if scores is not None and (num_known := int(np.count_nonzero(~np.isnan(scores[records])))):
        return np.argsort(scores[records], kind="stable")[spread(num_known, count)]  # NaN comes last
    rng = np.random.default_rng(seed)
    return np.sort(rng.choice(len(records), min(count, len(records)), replace=False))


def reject_thumbnails(facts: StoreFacts, source: list[str]) -> list[Thumbnail]:
    """Source images of the first rejects, grey where they cannot be read.

    Raises: SourceError.
    """
    rejects = facts.rejected.slice(0, MAX_REJECTS).to_pylist()
    if not rejects:
        return []
    originals = read_originals(facts.store, source, [one["key"] for one in rejects])
    cells = reject_cells(rejects, originals)
    return [thumbnail(cell.pixels, key=cell.key, text=cell.caption, side_px=SMALL_PX) for cell in cells]


def _read_scores(store: LatentStore, scores: ScoreTable) -> np.ndarray:
    stored = np.zeros(len(store.checksums), bool)
    for bucket in store.buckets:
        stored[store.index(bucket).records] = True
    return read_scores(scores, store, stored)


def _decoder(store: LatentStore, vae: str | None) -> tuple[Callable[[np.ndarray], np.ndarray], str]:
    """What makes an image of a stored row, and a note about it."""
    try:
        import torch

        from ..pictures import LatentDecoder

        decoder = LatentDecoder.of_store(store, vae, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    except ModuleNotFoundError as error:
        reason = f"{error.name} is not installed"
    except EncoderError as error:
        if vae:
            raise
        reason = str(error)
    else:
        how = f"Decoded from the latents by {vae or store.spec.vae.model}."
        return lambda row: decoder.decode_rows(row[None])[0], how
    note = f"These are the first channels of the latents, not images: the autoencoder cannot be loaded. {reason}"
    return lambda row: latent_pixels(row[: store.spec.latent.channels]), note
