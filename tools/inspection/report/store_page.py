"""``leandit report STORE``: what a store holds, and what is unusual about it, on one page."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ....datasets.errors import EncoderError
from ....datasets.format.table_schemas import REJECT_REASONS
from ....datasets.order.slices import spread
from ....datasets.recipe import flatten
from ....datasets.store import LatentStore
from ..images import shown_records
from ..store_facts import StoreFacts
from ..templating import rows_of
from .page import Thumbnail, latent_pixels, render_page, thumbnail, write_page
from .rules import alerts_of, rules_of
from .store_charts import store_charts

Progress = Callable[[str, int, int], None]
TITLES = ("Identity", "Records", "Buckets", "Images", "Captions", "Features", "Classes", "Latents", "Bytes", "Rules")
MAX_IMAGES = 160  # of a report: decoding takes seconds for each on a CPU
MAX_BUCKETS = 60
MANY = 120  # images, beyond which each is smaller
LARGE_PX, SMALL_PX = 192, 128
PAGE_BYTES = 3_200_000  # of all images of a report
LISTED: dict[str, Any] = {"max_rejects": 200, "num_extremes": 10}  # of rejects; of smallest and of largest classes


def report_store(
    target: str, out: Path, *, vae: str | None = None, count: int = 8, progress: Progress
) -> list[tuple[str, str]]:
    """Write the report of a store.

    Args:
      target: folder or URL.
      out: the HTML file.
      vae: folder or hub id of the decoder; None: the store's own.
      count: images of each bucket; 0: none.
    Returns: rows for the user.
    Raises: as ``LatentStore``; EncoderError: of ``vae``.
    """
    facts = StoreFacts(LatentStore(target, allow_incomplete=True, access="pread"))
    sheets, note = bucket_sheets(facts.store, count, vae, progress=progress)
    alerts = alerts_of("store", facts)
    absent = {
        "Images": not sheets,
        "Captions": not facts.captions,
        "Features": not facts.spec.groups,
        "Classes": not facts.store.num_classes,
    }
    html = render_page(
        "store.html",
        title=facts.path,
        alerts=alerts,
        sections={title.lower(): title for title in TITLES if not absent.get(title)},
        facts=facts,
        sheets=sheets,
        note=note,
        recipe=[f"{key} = {json.dumps(v, ensure_ascii=False)}" for key, v in flatten(facts.spec.recipe).items()],
        rows=rows_of("store.txt", facts=facts),
        charts=store_charts(facts),
        meanings=REJECT_REASONS,
        rules=rules_of("store"),
        **LISTED,
    )
    return write_page(out, html, alerts)


class Sheet(NamedTuple):
    """Images of a bucket."""

    bucket: str
    thumbnails: list[Thumbnail]


def bucket_sheets(store: LatentStore, count: int, vae: str | None, *, progress: Progress) -> tuple[list[Sheet], str]:
    """Images of each bucket, spread evenly over it, and a note: what decoded them, or why they could not be decoded.

    Without a decoder, the images are the first channels of the latents.
    """
    largest = sorted(store.buckets, key=lambda bucket: -store.buckets[bucket])[:MAX_BUCKETS]
    buckets = [bucket for bucket in store.buckets if bucket in largest and store.buckets[bucket]]
    if not count or not buckets:
        return [], ""
    each = max(1, min(count, MAX_IMAGES // len(buckets)))
    total = each * len(buckets)
    size = {"side_px": LARGE_PX if total <= MANY else SMALL_PX, "most_bytes": PAGE_BYTES // total}
    decode, note = _decoder(store, vae)
    records = shown_records(store, {name: spread(len(store.index(name)), each) for name in buckets})
    sheets = list[Sheet]()
    for bucket, group in itertools.groupby(records, key=lambda record: record.bucket):
        progress("decode", len(sheets), len(buckets))
        sheets.append(Sheet(bucket, []))
        for record in group:
            pixels = decode(store.latents(bucket).take(np.array([record.row]))[0])
            sheets[-1].thumbnails.append(thumbnail(pixels, key=record.key, text=record.caption, **size))
    progress("decode", len(buckets), len(buckets))
    if len(store.buckets) > len(buckets):
        note += f" The {len(buckets)} buckets with the most records are shown, of {len(store.buckets)}."
    return sheets, note


def _decoder(store: LatentStore, vae: str | None) -> tuple[Callable[[np.ndarray], np.ndarray], str]:
    """What makes an image of a stored row, and a note about it."""
    try:
        import torch

        from ..images import LatentDecoder

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
