"""The charts of a store's report. Those of several stores lie over each other, in shares where sizes differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from .....datasets.format.buckets import bucket_size
from ..charts import Curve, bar_chart, histogram, line_chart
from .alerts import MEAN_LIMIT, STD_LIMITS, min_psnr
from .facts import ASPECT_EDGES, StoreFacts, TokenFacts

MAX_BARS = 40
FEW_CLASSES = 40  # that have a bar each
NUM_BINS = 40
MIB = 1 << 20


class Figure(NamedTuple):
    """A chart of a page with its heading."""

    title: str
    chart: Markup
    wide: bool = False


def bucket_figures(stores: Sequence[StoreFacts]) -> list[Figure]:
    """Records of each bucket, and the shapes of the source pictures."""
    counts = {facts.name: facts.store.buckets for facts in stores}
    names = {name for buckets in counts.values() for name in buckets}
    largest = sorted(names, key=lambda name: (-max(b.get(name, 0) for b in counts.values()), name))[:MAX_BARS]
    shown = sorted(largest, key=lambda name: (np.divide(*bucket_size(name)), bucket_size(name)))
    title = "Records of each bucket" + (f", of the {MAX_BARS} largest" if len(names) > MAX_BARS else "")
    wide = len(shown) * len(stores) > 12
    figures = [
        Figure(
            title,
            bar_chart(
                shown,
                {name: [buckets.get(bucket, 0) for bucket in shown] for name, buckets in counts.items()},
                title=title,
                x_label="bucket, height x width in pixels",
                y_label="records",
                wide=wide,
            ),
            wide,
        )
    ]
    if aspects := {facts.name: facts.aspects for facts in stores if facts.aspects is not None}:
        title = "Shapes of the source pictures"
        figures.append(
            _histogram(
                title, ASPECT_EDGES, aspects, "height / width (below 1: wider than high)", "pictures", log_x=True
            )
        )
    return figures


def caption_figures(stores: Sequence[StoreFacts]) -> list[Figure]:
    """Lengths of the captions in characters, and in tokens of each text encoder."""
    characters = {facts.name: facts.captions.characters for facts in stores if facts.captions}
    heading = _titled("Characters of a caption", characters, stores)
    figures = [_lengths(heading, characters, "characters")] if characters else []
    encoders: dict[str, dict[str, TokenFacts]] = {}
    for facts in stores:
        for one in facts.tokens:
            encoders.setdefault(one.title, {})[facts.name] = one
    for title, of_stores in encoders.items():
        limits = {"cut at": sorted({one.max_tokens for one in of_stores.values()})}
        heading = "Tokens of a caption" + (f", encoder '{title}'" if len(encoders) > 1 else "")
        heading = _titled(heading, of_stores, stores)
        figures.append(_lengths(heading, {name: one.tokens for name, one in of_stores.items()}, "tokens", limits))
    return figures


def _lengths(
    title: str, lengths: Mapping[str, np.ndarray], unit: str, limits: Mapping[str, Sequence[float]] | None = None
) -> Figure:
    """A histogram of whole numbers, in bins of whole numbers."""
    highest = max([1, *(int(of_store.max()) for of_store in lengths.values() if len(of_store))])
    step = -(-(highest + 1) // NUM_BINS)
    edges = np.arange(0, highest + 1 + step, step) - 0.5
    counts = {name: np.histogram(of_store, edges)[0] for name, of_store in lengths.items()}
    near = {name: [at for at in places if at <= 1.5 * highest] for name, places in (limits or {}).items()}
    return _histogram(title, edges, counts, unit, "distinct captions", marks={k: v for k, v in near.items() if v})


def _histogram(
    title: str,
    edges: np.ndarray,
    counts: Mapping[str, np.ndarray],
    x_label: str,
    things: str,
    *,
    log_x: bool = False,
    marks: Mapping[str, Sequence[float]] | None = None,
) -> Figure:
    """Counts of one store, or shares of several."""
    y_label = things
    if len(counts) > 1:
        counts = {name: 100 * numbers / max(1, numbers.sum()) for name, numbers in counts.items()}
        y_label = f"share of {things} (%)"
    chart = histogram(edges, counts, title=title, x_label=x_label, y_label=y_label, log_x=log_x, marks=marks)
    return Figure(title, chart)


def class_figures(stores: Sequence[StoreFacts]) -> list[Figure]:
    """Records of each class: bars of a few classes, a sorted curve of many."""
    counts = {facts.name: facts.classes for facts in stores if facts.classes is not None}
    if not counts:
        return []
    first = next(facts for facts in stores if facts.classes is not None)
    names = first.store.class_names.names
    is_same = all(facts.store.class_names.names == names for facts in stores if facts.classes is not None)
    if is_same and len(names) <= FEW_CLASSES:
        title, wide = _titled("Records of each class", counts, stores), len(names) > 12
        series = {name: numbers.tolist() for name, numbers in counts.items()}
        chart = bar_chart(names, series, title=title, x_label="class", y_label="records", wide=wide)
        return [Figure(title, chart, wide)]
    title = _titled("Records of each class, the largest first", counts, stores)
    curves = [
        Curve(name if len(counts) > 1 else "", np.arange(1, len(n) + 1), np.sort(n)[::-1]) for name, n in counts.items()
    ]
    top = 1.08 * max(1, *(int(numbers.max()) for numbers in counts.values()))
    labels: Any = {"x_label": "classes, by their records", "y_label": "records of a class"}
    return [Figure(title, line_chart(curves, title=title, y_range=(0, top), wide=True, **labels), True)]


def latent_figures(stores: Sequence[StoreFacts]) -> list[Figure]:
    """Mean and standard deviation of each channel as the model sees it, and the PSNR of the self-check."""
    figures = []
    for key, title, expected, usual in (
        ("channel_mean", "Mean of each latent channel", 0.0, (-MEAN_LIMIT, MEAN_LIMIT)),
        ("channel_std", "Standard deviation of each latent channel", 1.0, (0, STD_LIMITS[1])),
    ):
        values = {_name(facts, stores): getattr(facts.channels, key) for facts in stores if facts.channels.count}
        curves = [Curve(name, np.arange(len(of_store)), of_store, dots=True) for name, of_store in values.items()]
        every = np.concatenate([*values.values(), usual])
        room = 0.05 * np.ptp(every)
        if curves:
            chart = line_chart(
                curves,
                title=title,
                x_label="latent channel",
                y_label="in the model's units",
                expected=[expected],
                y_range=(float(every.min() - room * (every.min() < 0)), float(every.max() + room)),
            )
            figures.append(Figure(f"{title}; the dotted line is expected", chart))
    checks = [(facts, facts.summary["self_check"]) for facts in stores if facts.summary["self_check"]]
    if checks:
        title = "PSNR of encoded and decoded pictures"
        curves = [
            Curve(_name(facts, stores), range(1, len(check["pictures"]) + 1), sorted(_decibels(check)), dots=True)
            for facts, check in checks
        ]
        limits = sorted({limit for facts, _ in checks if (limit := min_psnr(facts)) is not None})
        labels: Any = {"x_label": "picture of the self-check, by its PSNR", "y_label": "PSNR (dB)"}
        figures.append(
            Figure(
                f"{title}; the dotted line is the limit" if limits else title,
                line_chart(curves, title=title, expected=limits, **labels),
            )
        )
    return figures


def _titled(title: str, series: Mapping[str, Any], stores: Sequence[StoreFacts]) -> str:
    """The heading of a chart, with the name of the store if it is the only one of several that is drawn."""
    return f"{title}: {next(iter(series))}" if len(series) == 1 < len(stores) else title


def _decibels(check: Mapping[str, Any]) -> list[float]:
    return [picture["psnr_db"] for picture in check["pictures"]]


def _name(facts: StoreFacts, stores: Sequence[StoreFacts]) -> str:
    """The name of a curve; none where there is one store."""
    return facts.name if len(stores) > 1 else ""


def byte_figures(stores: Sequence[StoreFacts]) -> list[Figure]:
    """Bytes of each part, beside those of a file for each record."""
    title = "Bytes of each part, beside a file for each record"
    bars: dict[str, dict[str, float]] = {}
    for facts in stores:
        here, apart = ("this store", "a file for each record")
        if len(stores) > 1:
            here, apart = facts.name, f"{facts.name}, in files"
        bars[here], bars[apart] = parts_of(facts.summary["bytes"]), parts_of(facts.separate_bytes)
    names = list(dict.fromkeys(part for parts in bars.values() for part in parts))
    series = {name: [parts.get(part, 0) / MIB for part in names] for name, parts in bars.items()}
    return [Figure(title, bar_chart(names, series, title=title, x_label="part", y_label="MiB", wide=True), True)]


def parts_of(sizes: Mapping[str, int]) -> dict[str, float]:
    """Bytes by latents, captions and what else there is, in the same words for a store and for separate files."""
    parts: dict[str, float] = {"latents": 0, "captions": 0, "features and pictures": 0, "other": 0}
    for name, size in sizes.items():
        if name != "total":
            kind = "features and pictures" if name.startswith(("feature", "picture")) else name.split(" ")[0]
            parts[kind if kind in parts else "other"] += size
    return {"total": sizes["total"]} | {name: size for name, size in parts.items() if size}
