"""The charts of a store's report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ....datasets.format.buckets import bucket_size
from ....datasets.format.table_schemas import suffixes
from ..store_facts import ASPECT_EDGES, StoreFacts
from .charts import DOTTED, Chart, bar_chart, chart, histogram, label

MAX_BARS = 40
FEW_CLASSES = 40  # that have a bar each
NUM_BINS = 40


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
