"""The charts of a store's report. Those of several stores lie over each other, in shares where sizes differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute
from markupsafe import Markup

from ....datasets.format.buckets import bucket_size
from ....datasets.format.table_schemas import suffixes
from ..store_facts import ASPECT_EDGES, MEAN_LIMIT, STD_LIMITS, StoreFacts
from .charts import Curve, bar_chart, histogram, line_chart

pc: Any = pyarrow.compute  # defined at run time, so type checkers do not know its functions

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
    """Records of each bucket, and the shapes of the source images."""
    counts = {facts.name: facts.store.buckets for facts in stores}
    names = {name for buckets in counts.values() for name in buckets}
    largest = sorted(names, key=lambda name: (-max(b.get(name, 0) for b in counts.values()), name))[:MAX_BARS]
    shown = sorted(largest, key=lambda name: (np.divide(*bucket_size(name)), bucket_size(name)))
    title = "Records of each bucket" + (f", of the {MAX_BARS} largest" if len(names) > MAX_BARS else "")
    series = {name: [buckets.get(bucket, 0) for bucket in shown] for name, buckets in counts.items()}
    figures = [_bars(title, shown, series, "bucket, height x width in pixels", "records")]
    if aspects := {facts.name: facts.sources["aspects"] for facts in stores if facts.sources["aspects"] is not None}:
        label = "height / width (below 1: wider than high)"
        figures.append(_histogram("Shapes of the source images", ASPECT_EDGES, aspects, label, "images", log_x=True))
    return figures


def caption_figures(stores: Sequence[StoreFacts]) -> list[Figure]:
    """Lengths of the captions in characters, and in tokens of each text encoder."""
    used = {facts.name: facts.used_captions for facts in stores if facts.used_captions.num_rows}
    lengths = {"Characters of a caption": {name: table["characters"] for name, table in used.items()}}
    limits: dict[str, set[int]] = {}
    several = len({one.name for facts in stores for one in facts.spec.text_encoders}) > 1
    for facts in stores:
        for one in facts.spec.text_encoders if facts.name in used else ():
            title = "Tokens of a caption" + (f", encoder '{one.name or 'text'}'" if several else "")
            column = f"num_tokens{suffixes(facts.spec)[one.name]}"
            lengths.setdefault(title, {})[facts.name] = used[facts.name][column]
            limits.setdefault(title, set()).add(one.spec.max_tokens)
    return [
        _lengths(_titled(title, series, stores), series, title.split()[0].lower(), sorted(limits.get(title, ())))
        for title, series in lengths.items()
        if series
    ]


def class_figures(stores: Sequence[StoreFacts]) -> list[Figure]:
    """Records of each class: bars of a few classes, a sorted curve of many."""
    counts = {facts.name: facts.classes for facts in stores if facts.classes is not None}
    names = [facts.store.class_names.names for facts in stores if facts.classes is not None]
    if not counts:
        return []
    if all(one == names[0] for one in names) and len(names[0]) <= FEW_CLASSES:
        series = {name: numbers.tolist() for name, numbers in counts.items()}
        return [_bars(_titled("Records of each class", counts, stores), names[0], series, "class", "records")]
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
        values = {_name(facts, stores): getattr(facts.statistics, key) for facts in stores if facts.statistics.count}
        curves = [Curve(name, np.arange(len(of_store)), of_store, dots=True) for name, of_store in values.items()]
        every = np.concatenate([*values.values(), usual])
        room = 0.05 * np.ptp(every)
        if curves:
            y_range = float(every.min() - room * (every.min() < 0)), float(every.max() + room)
            labels: Any = {"x_label": "latent channel", "y_label": "in the model's units"}
            chart = line_chart(curves, title=title, expected=[expected], y_range=y_range, **labels)
            figures.append(Figure(f"{title}; the dotted line is expected", chart))
    curves, limits = [], set[float]()
    for facts in stores:
        if check := facts.self_check:
            decibels = sorted(image["psnr_db"] for image in check["pictures"])
            curves.append(Curve(_name(facts, stores), range(1, len(decibels) + 1), decibels, dots=True))
            limits |= {facts.min_psnr_db} if facts.min_psnr_db is not None else set()
    if curves:
        title = "PSNR of encoded and decoded images"
        labels = {"x_label": "image of the self-check, by its PSNR", "y_label": "PSNR (dB)"}
        chart = line_chart(curves, title=title, expected=sorted(limits), **labels)
        figures.append(Figure(f"{title}; the dotted line is the limit" if limits else title, chart))
    return figures


def byte_figures(stores: Sequence[StoreFacts]) -> list[Figure]:
    """Bytes of each part, beside those of a file for each record."""
    bars: dict[str, dict[str, float]] = {}
    for facts in stores:
        here, apart = ("this store", "a file for each record")
        if len(stores) > 1:
            here, apart = facts.name, f"{facts.name}, in files"
        bars[here], bars[apart] = _parts(facts.files.parts), _parts(facts.files.separate)
    names = list(dict.fromkeys(part for parts in bars.values() for part in parts))
    series = {name: [parts.get(part, 0) / MIB for part in names] for name, parts in bars.items()}
    return [_bars("Bytes of each part, beside a file for each record", names, series, "part", "MiB", wide=True)]


def _parts(sizes: Mapping[str, int]) -> dict[str, float]:
    """Bytes by latents, captions and what else there is, in the same words for a store and for separate files."""
    parts: dict[str, float] = {"latents": 0, "captions": 0, "features and pictures": 0, "other": 0}
    for name, size in sizes.items():
        if name != "total":
            kind = "features and pictures" if name.startswith(("feature", "picture")) else name.split(" ")[0]
            parts[kind if kind in parts else "other"] += size
    return {"total": sizes["total"]} | {name: size for name, size in parts.items() if size}


def _bars(
    title: str,
    names: Sequence[str],
    series: Mapping[str, Sequence[float]],
    x_label: str,
    y_label: str,
    *,
    wide: bool = False,
) -> Figure:
    """A group of bars for each name, over the whole width if there are many."""
    wide = wide or len(names) * len(series) > 12
    return Figure(title, bar_chart(names, series, title=title, x_label=x_label, y_label=y_label, wide=wide), wide)


def _lengths(title: str, lengths: Mapping[str, pa.ChunkedArray], unit: str, limits: Sequence[int]) -> Figure:
    """A histogram of whole numbers, in bins of whole numbers."""
    highest = max([1, *(pc.max(column).as_py() or 0 for column in lengths.values())])
    step = -(-(highest + 1) // NUM_BINS)
    edges = np.arange(0, highest + 1 + step, step) - 0.5
    counts = {name: np.histogram(column.to_numpy(), edges)[0] for name, column in lengths.items()}
    near = [limit for limit in limits if limit <= 1.5 * highest]
    return _histogram(title, edges, counts, unit, "distinct captions", marks={"cut at": near} if near else None)


def _histogram(
    title: str, edges: np.ndarray, counts: Mapping[str, np.ndarray], x_label: str, things: str, **options: Any
) -> Figure:
    """Counts of one store, or shares of several."""
    y_label = things
    if len(counts) > 1:
        counts = {name: 100 * numbers / max(1, numbers.sum()) for name, numbers in counts.items()}
        y_label = f"share of {things} (%)"
    return Figure(title, histogram(edges, counts, title=title, x_label=x_label, y_label=y_label, **options))


def _titled(title: str, series: Mapping[str, Any], stores: Sequence[StoreFacts]) -> str:
    """The heading of a chart, with the name of the store if it is the only one of several that is drawn."""
    return f"{title}: {next(iter(series))}" if len(series) == 1 < len(stores) else title


def _name(facts: StoreFacts, stores: Sequence[StoreFacts]) -> str:
    """The name of a curve; none where there is one store."""
    return facts.name if len(stores) > 1 else ""
