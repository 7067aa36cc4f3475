"""``leandit report STORE``: what a store holds, and what is unusual about it, on one page with charts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ....datasets.format.buckets import bucket_size
from ....datasets.format.table_schemas import REJECT_REASONS, suffixes
from ....datasets.order.slices import spread
from ....datasets.store import LatentStore
from ....errors import EncoderError
from ....recipe import flatten
from ..images import shown_records
from ..store_facts import ASPECT_EDGES, StoreFacts
from ..templating import rows_of
from .charts import DOTTED, Chart, bar_chart, chart, histogram, label
from .page import Thumbnail, latent_pixels, render_page, thumbnail, write_page
from .rules import alerts_of, rules_of

Progress = Callable[[str, int, int], None]
TITLES = ("Identity", "Records", "Buckets", "Images", "Captions", "Features", "Classes", "Latents", "Bytes", "Rules")
MAX_IMAGES = 160  # of a report: decoding takes seconds for each on a CPU
MAX_BUCKETS = 60
MANY = 120  # images, beyond which each is smaller
LARGE_PX, SMALL_PX = 192, 128
PAGE_BYTES = 3_200_000  # of all images of a report
MAX_BARS = 40
FEW_CLASSES = 40  # that have a bar each
NUM_BINS = 40
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


# -------------------------------------------------------------------------------------------------------------- charts


def store_charts(facts: StoreFacts) -> dict[str, list[Chart]]:
    """The charts by section of the page."""
    sections = {"buckets": _buckets, "captions": _captions, "classes": _classes, "latents": _latents}
    return {section: list(charts_of(facts)) for section, charts_of in sections.items()}


def _buckets(facts: StoreFacts) -> Iterator[Chart]:
    """Records of each bucket, and the shapes of the source images."""
    counts = facts.store.buckets
    largest = sorted(counts, key=lambda bucket: (-counts[bucket], bucket))[:MAX_BARS]
    shown = sorted(largest, key=lambda bucket: (np.divide(*bucket_size(bucket)), bucket_size(bucket)))
    title = "Records of each bucket" + (f", of the {MAX_BARS} largest" if len(counts) > MAX_BARS else "")
    yield bar_chart(title, "bucket, height x width in pixels", "records", shown, [counts[bucket] for bucket in shown])
    if (aspects := facts.sources["aspects"]) is not None:
        title, shape = "Shapes of the source images", "height / width (below 1: wider than high)"
        yield histogram(title, shape, "images", ASPECT_EDGES, aspects, log_x=True)


def _captions(facts: StoreFacts) -> Iterator[Chart]:
    """Lengths of the captions in tokens of each text encoder, in bins of whole numbers."""
    encoders = facts.spec.text_encoders if facts.used_captions.num_rows else []
    for one in encoders:
        lengths = facts.used_captions[f"num_tokens{suffixes(facts.spec)[one.name]}"].to_numpy()
        highest, limit = max(1, int(lengths.max())), one.spec.max_tokens
        edges = np.arange(0, highest + 1 + (step := -(-(highest + 1) // NUM_BINS)), step) - 0.5
        title = "Tokens of a caption" + (f", encoder '{one.name or 'text'}'" if len(encoders) > 1 else "")
        limit = limit if limit <= 1.5 * highest else 0
        yield histogram(title, "tokens", "distinct captions", edges, np.histogram(lengths, edges)[0], limit=limit)


def _classes(facts: StoreFacts) -> Iterator[Chart]:
    """Records of each class: bars of a few classes, a sorted curve of many."""
    if (counts := facts.classes) is None:
        return
    names = facts.store.class_names.names
    if len(names) <= FEW_CLASSES:
        yield bar_chart("Records of each class", "class", "records", names, counts.tolist())
        return

    def draw(axes: Any) -> None:
        axes.plot(np.arange(1, len(counts) + 1), np.sort(counts)[::-1])
        axes.set_ylim(bottom=0)

    title = "Records of each class, the largest first"
    yield chart(title, "classes, by their records", "records of a class", draw, wide=True)


def _latents(facts: StoreFacts) -> Iterator[Chart]:
    """Mean and standard deviation of each channel as the model sees it."""

    def draw(axes: Any) -> None:
        for name, values in (("mean", facts.statistics.channel_mean), ("deviation", facts.statistics.channel_std)):
            axes.plot(values, marker="o", markersize=3, linewidth=1.2, label=label(name))
        for expected in (0, 1):
            axes.axhline(expected, **DOTTED)

    if facts.statistics.count:
        title = "Mean and standard deviation of each latent channel; expected: 0 and 1 (dotted)"
        yield chart(title, "latent channel", "in the model's units", draw, wide=True)
