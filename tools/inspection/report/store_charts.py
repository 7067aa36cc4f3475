"""The charts of a store's report. Those of several stores lie over each other, in shares where sizes differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ....datasets.format.buckets import bucket_size
from ....datasets.format.table_schemas import suffixes
from ..store_facts import ASPECT_EDGES, StoreFacts
from .charts import DOTTED, Chart, bar_chart, chart, histogram, label

MAX_BARS = 40
FEW_CLASSES = 40  # that have a bar each
NUM_BINS = 40


def store_charts(stores: Sequence[StoreFacts]) -> dict[str, list[Chart]]:
    """The charts by section of the page."""
    named = {facts.name if len(stores) > 1 else "": facts for facts in stores}
    sections = {"buckets": _buckets, "captions": _captions, "classes": _classes, "latents": _latents}
    return {section: list(charts_of(named)) for section, charts_of in sections.items()}


def _buckets(stores: dict[str, StoreFacts]) -> Iterator[Chart]:
    """Records of each bucket, and the shapes of the source images."""
    counts = {name: facts.store.buckets for name, facts in stores.items()}
    every = {bucket for buckets in counts.values() for bucket in buckets}
    largest = sorted(every, key=lambda bucket: (-max(b.get(bucket, 0) for b in counts.values()), bucket))[:MAX_BARS]
    shown = sorted(largest, key=lambda bucket: (np.divide(*bucket_size(bucket)), bucket_size(bucket)))
    title = "Records of each bucket" + (f", of the {MAX_BARS} largest" if len(every) > MAX_BARS else "")
    heights = {name: [buckets.get(bucket, 0) for bucket in shown] for name, buckets in counts.items()}
    yield bar_chart(title, "bucket, height x width in pixels", "records", shown, heights)
    known = {name: aspects for name, facts in stores.items() if (aspects := facts.sources["aspects"]) is not None}
    if known:
        title, shape = "Shapes of the source images", "height / width (below 1: wider than high)"
        yield histogram(title, shape, "images", ASPECT_EDGES, known, log_x=True)


def _captions(stores: dict[str, StoreFacts]) -> Iterator[Chart]:
    """Lengths of the captions in tokens of each text encoder, in bins of whole numbers."""
    used = {name: facts for name, facts in stores.items() if facts.used_captions.num_rows}
    encoders = dict.fromkeys(one.name for facts in used.values() for one in facts.spec.text_encoders)
    for encoder in encoders:
        lengths, limits = dict[str, np.ndarray](), set[int]()
        for name, facts in used.items():
            for one in (one for one in facts.spec.text_encoders if one.name == encoder):
                lengths[name] = facts.used_captions[f"num_tokens{suffixes(facts.spec)[encoder]}"].to_numpy()
                limits.add(one.spec.max_tokens)
        highest = max(1, *(int(numbers.max()) for numbers in lengths.values()))
        edges = np.arange(0, highest + 1 + (step := -(-(highest + 1) // NUM_BINS)), step) - 0.5
        counts = {name: np.histogram(numbers, edges)[0] for name, numbers in lengths.items()}
        title = "Tokens of a caption" + (f", encoder '{encoder or 'text'}'" if len(encoders) > 1 else "")
        near = sorted(limit for limit in limits if limit <= 1.5 * highest)
        yield histogram(title, "tokens", "distinct captions", edges, counts, limits=near)


def _classes(stores: dict[str, StoreFacts]) -> Iterator[Chart]:
    """Records of each class: bars of a few classes, a sorted curve of many."""
    counts = {name: facts.classes for name, facts in stores.items() if facts.classes is not None}
    names = [facts.store.class_names.names for facts in stores.values() if facts.classes is not None]
    if not counts:
        return
    if all(one == names[0] for one in names) and len(names[0]) <= FEW_CLASSES:
        heights = {name: numbers.tolist() for name, numbers in counts.items()}
        yield bar_chart("Records of each class", "class", "records", names[0], heights)
        return

    def draw(axes: Any) -> None:
        for name, numbers in counts.items():
            axes.plot(np.arange(1, len(numbers) + 1), np.sort(numbers)[::-1], label=label(name))
        axes.set_ylim(bottom=0)

    title = "Records of each class, the largest first"
    yield chart(title, "classes, by their records", "records of a class", draw, wide=True)


def _latents(stores: dict[str, StoreFacts]) -> Iterator[Chart]:
    """Mean and standard deviation of each channel as the model sees it."""
    read = {name: facts.statistics for name, facts in stores.items() if facts.statistics.count}

    def draw(axes: Any) -> None:
        for name, statistics in read.items():
            for part, values in (("mean", statistics.channel_mean), ("deviation", statistics.channel_std)):
                text = ": ".join(filter(None, (name, part)))
                axes.plot(values, marker="o", markersize=3, linewidth=1.2, label=label(text))
        for expected in (0, 1):
            axes.axhline(expected, **DOTTED)

    if read:
        title = "Mean and deviation of each latent channel; expected: 0 and 1 (dotted)"
        yield chart(title, "latent channel", "in the model's units", draw, wide=True)
