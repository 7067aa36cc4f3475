"""Decoded pictures of a store's report, bucket by bucket, and the source pictures of rejects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from .....datasets.errors import EncoderError
from .....datasets.order.filters import ScoreTable, read_scores
from .....datasets.store import LatentStore
from ..page import Thumbnail, latent_pixels, several, thumbnail

Progress = Callable[[str, int, int], None]
MAX_PICTURES = 160  # of a report: decoding takes seconds for each on a CPU
MAX_BUCKETS = 60
MAX_REJECTS = 24
MANY = 120  # pictures, beyond which each is smaller
LARGE_PX, SMALL_PX = 192, 128
PAGE_BYTES = 3_200_000  # of all pictures of a report


@dataclass(frozen=True)
class Sheet:
    """Pictures of a bucket; the title names it."""

    title: str
    thumbnails: list[Thumbnail]


@dataclass(frozen=True)
class SheetOptions:
    """Which pictures a report shows.

    Args:
      source: the pictures that a store was made from, for rejects; None: their keys alone.
      vae: folder or hub id of the decoder; None: the store's own.
      count: pictures of each bucket; 0: none.
      scores: Parquet file with a score for each key, over whose range the pictures of a bucket are spread.
      score: its column.
      seed: of the choice without scores.
    """

    source: list[str] | None = None
    vae: str | None = None
    count: int = 8
    scores: str | None = None
    score: str = "score"
    seed: int = 0


def bucket_sheets(
    store: LatentStore, options: SheetOptions, *, num_stores: int, progress: Progress
) -> tuple[list[Sheet], str]:
    """Pictures of each bucket, and a note: what decoded them, or why none could be.

    Without a decoder, the pictures are the first channels of the latents.

    Args:
      num_stores: that share the page.
    Raises: RecipeError: the scores cannot be read.
    """
    buckets = sorted(store.buckets, key=lambda bucket: -store.buckets[bucket])[:MAX_BUCKETS]
    buckets = [bucket for bucket in store.buckets if bucket in buckets and store.buckets[bucket]]
    if not options.count or not buckets:
        return [], ""
    each = max(1, min(options.count, MAX_PICTURES // num_stores // len(buckets)))
    decode, note = _decoder(store, options.vae)
    scores = _scores(store, options)
    side_px = LARGE_PX if each * len(buckets) * num_stores <= MANY else SMALL_PX
    most_bytes = PAGE_BYTES // (each * len(buckets) * num_stores)
    chosen = {bucket: choose_rows(store, bucket, each, scores, options.seed) for bucket in buckets}
    keys, sheets = _keys(store, chosen), []
    for number, (bucket, places) in enumerate(chosen.items()):
        progress("decode", number, len(buckets))
        pixels = decode(store.latents(bucket).take(store.index(bucket).rows[places]))
        thumbnails = []
        for one, place in zip(pixels, places, strict=True):
            text, key = describe(store, bucket, int(place), scores), keys[bucket, int(place)]
            thumbnails.append(thumbnail(one, key=key, text=text, side_px=side_px, most_bytes=most_bytes))
        sheets.append(Sheet(f"{bucket}: {several(store.buckets[bucket], 'record')}", thumbnails))
    progress("decode", len(buckets), len(buckets))
    if len(store.buckets) > len(buckets):
        note += f" The {len(buckets)} buckets with the most records are shown, of {len(store.buckets)}."
    how = (
        f"spread over the quantiles of '{options.score}', the lowest first"
        if scores is not None
        else "chosen at random"
    )
    return sheets, f"{note} Pictures of a bucket are {how}."


def choose_rows(store: LatentStore, bucket: str, number: int, scores: np.ndarray | None, seed: int) -> np.ndarray:
    """Positions in the index of a bucket: at even quantiles of the score, or at random in order of their rows.

    Args:
      scores: (records,) with NaN for none; None: at random.
    """
    records = store.index(bucket).records
    if scores is not None and np.any(known := ~np.isnan(scores[records])):
        order = np.argsort(np.where(known, scores[records], np.inf), kind="stable")[: np.count_nonzero(known)]
        return order[np.unique(np.linspace(0, len(order) - 1, min(number, len(order))).round().astype(int))]
    rng = np.random.default_rng(seed)
    return np.sort(rng.choice(len(records), min(number, len(records)), replace=False))


def reject_thumbnails(store: LatentStore, rejects: Sequence[Mapping[str, Any]], source: list[str]) -> list[Thumbnail]:
    """Source pictures of the first rejects, grey where they cannot be read. Raises: SourceError."""
    from ...contact_sheet import read_originals, reject_picture

    shown = rejects[:MAX_REJECTS]
    originals = read_originals(store, source, [one["key"] for one in shown])
    return [
        thumbnail(
            reject_picture(one, originals),
            key=one["key"],
            text=f"{one['reason']}: {one['detail'] or ''}",
            side_px=SMALL_PX,
        )
        for one in shown
    ]


def _scores(store: LatentStore, options: SheetOptions) -> np.ndarray | None:
    if not options.scores:
        return None
    stored = np.zeros(len(store.checksums), bool)
    for bucket in store.buckets:
        stored[store.index(bucket).records] = True
    return read_scores(ScoreTable(options.scores, options.score, 0.0), store, stored)


def _keys(store: LatentStore, chosen: Mapping[str, np.ndarray]) -> dict[tuple[str, int], str]:
    """Keys of records, by bucket and position in its index."""
    places = [(bucket, int(place)) for bucket, of_bucket in chosen.items() for place in of_bucket]
    positions = [int(store.index(bucket).records[place]) for bucket, place in places]
    keys = store.record_columns(("key",))["key"].take(pa.array(positions, pa.int64())).to_pylist()
    return dict(zip(places, keys, strict=True))


def describe(store: LatentStore, bucket: str, place: int, scores: np.ndarray | None) -> str:
    """The score and the first caption of a record, else its class.

    Args:
      place: position in the index of the bucket.
    """
    index = store.index(bucket)
    text, label = "", int(index.labels[place])
    if index.caption_starts[place] < index.caption_starts[place + 1]:
        text = store.captions["text"][int(index.caption_ids[index.caption_starts[place]])].as_py()
    elif label >= 0 and store.num_classes:
        text = store.class_names.describe(label)
    return text if scores is None else f"{scores[index.records[place]]:.4g}: {text}"


def _decoder(store: LatentStore, vae: str | None) -> tuple[Callable[[np.ndarray], Sequence[np.ndarray]], str]:
    """What makes pictures of stored rows, and a note about it."""
    try:
        import torch

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        from ...decoder import LatentDecoder

        decoder = LatentDecoder.of_store(store, vae, device)
    except ModuleNotFoundError as error:
        reason = f"{error.name} is not installed"
    except EncoderError as error:
        if vae:
            raise
        reason = str(error)
    else:
        how = f"Decoded from the latents by {vae or store.spec.vae.model}."
        return lambda stored: [decoder.decode_rows(row[None])[0] for row in stored], how
    note = f"These are the first channels of the latents, not pictures: the autoencoder cannot be loaded. {reason}"
    return lambda stored: [latent_pixels(row[: store.spec.latent.channels]) for row in stored], note
