"""``leandit report STORE...``: what stores hold, and what is unusual about it, on one page."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ....datasets.errors import EncoderError
from ....datasets.format.table_schemas import REJECT_REASONS
from ....datasets.order.filters import ScoreTable, read_scores
from ....datasets.recipe import flatten
from ....datasets.store import LatentStore
from ..pictures import read_originals, reject_cells, shown_records, spread
from ..store_facts import StoreFacts
from ..templating import rows_of, side_by_side
from .page import Thumbnail, latent_pixels, render_page, short_names, thumbnail, write_page
from .rules import alerts_of, rules_of
from .store_charts import store_charts

Progress = Callable[[str, int, int], None]
TITLES = ("Identity", "Records", "Buckets", "Pictures", "Captions", "Features", "Classes", "Latents", "Bytes", "Rules")
MAX_IMAGES = 160  # of a report: decoding takes seconds for each on a CPU
MAX_BUCKETS = 60
MAX_REJECTED_IMAGES = 24
MANY = 120  # images, beyond which each is smaller
LARGE_PX, SMALL_PX = 192, 128
PAGE_BYTES = 3_200_000  # of all images of a report
LISTED: dict[str, Any] = {"max_rejects": 200, "num_extremes": 10}  # of rejects; of smallest and of largest classes


def report_stores(
    targets: Sequence[str],
    out: Path,
    *,
    source: list[str] | None = None,
    vae: str | None = None,
    count: int = 8,
    scores: ScoreTable | None = None,
    seed: int = 0,
    progress: Progress,
) -> list[tuple[str, str]]:
    """Write a report of one store, or of several side by side.

    Args:
      targets: folders or URLs.
      out: the HTML file.
      source: the images that a store was made from, to show rejects; None: their keys only.
      vae: folder or hub id of the decoder; None: the store's own.
      count: images of each bucket; 0: none.
      scores: over whose range the images of a bucket are spread; None: they are chosen at random, by ``seed``.
    Returns: rows for the user.
    Raises: as ``LatentStore``; SourceError; RecipeError: the scores cannot be read; EncoderError: of ``vae``.
    """
    every = list[StoreFacts]()
    for target, name in zip(targets, short_names(targets), strict=True):
        progress("read", len(every), len(targets))
        every.append(StoreFacts(LatentStore(target, allow_incomplete=True, access="pread"), name))
        _ = every[-1].latents  # the longest read
    progress("read", len(targets), len(targets))
    stores = list[dict[str, Any]]()
    for facts in every:
        store, num_stores = facts.store, len(every)
        sheets, note = bucket_sheets(store, count, vae, scores, seed, num_stores=num_stores, progress=progress)
        rejects = reject_thumbnails(facts, source) if source else []
        recipe = [f"{key} = {json.dumps(v, ensure_ascii=False)}" for key, v in flatten(facts.spec.recipe).items()]
        stores.append({"facts": facts, "sheets": sheets, "note": note, "rejects": rejects, "recipe": recipe})
    alerts = alerts_of("store", every)
    rows = [rows_of("store.txt", facts=facts) for facts in every]
    sections = ("identity", "records", "captions", "features", "latents", "bytes")
    absent = {
        "Pictures": not any(store["sheets"] for store in stores),
        "Captions": not any(facts.captions for facts in every),
        "Features": not any(facts.spec.groups for facts in every),
        "Classes": not any(facts.store.num_classes for facts in every),
    }
    html = render_page(
        "store.html",
        title=" and ".join(facts.name for facts in every),
        alerts=alerts,
        sections={title.lower(): title for title in TITLES if not absent.get(title)},
        stores=stores,
        rows={section: side_by_side([one.get(section, {}) for one in rows]) for section in sections},
        charts=store_charts(every),
        meanings=REJECT_REASONS,
        rules=rules_of("store"),
        **LISTED,
    )
    return write_page(out, html, alerts)


class Sheet(NamedTuple):
    """Images of a bucket."""

    bucket: str
    thumbnails: list[Thumbnail]


def bucket_sheets(
    store: LatentStore,
    count: int,
    vae: str | None,
    scores: ScoreTable | None,
    seed: int,
    *,
    num_stores: int,
    progress: Progress,
) -> tuple[list[Sheet], str]:
    """Images of each bucket, and a note: what decoded them, or why they could not be decoded.

    Without a decoder, the images are the first channels of the latents.

    Args:
      num_stores: that share the page; the others as for ``report_stores``.
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
    values = read_scores(scores, store) if scores else None
    records = shown_records(store, {name: choose_rows(store, name, each, values, seed) for name in buckets})
    sheets = list[Sheet]()
    for bucket, group in itertools.groupby(records, key=lambda record: record.bucket):
        progress("decode", len(sheets), len(buckets))
        sheets.append(Sheet(bucket, []))
        for record in group:
            pixels = decode(store.latents(bucket).take(np.array([record.row]))[0])
            text = record.caption if values is None else f"score {values[record.position]:.4g}; {record.caption}"
            image = thumbnail(pixels, key=record.key, text=text, side_px=side_px, most_bytes=most_bytes)
            sheets[-1].thumbnails.append(image)
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
    rejects = facts.rejected.slice(0, MAX_REJECTED_IMAGES).to_pylist()
    if not rejects:
        return []
    originals = read_originals(facts.store, source, [one["key"] for one in rejects])
    cells = reject_cells(rejects, originals)
    return [thumbnail(cell.pixels, key=cell.key, text=cell.caption, side_px=SMALL_PX) for cell in cells]


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
