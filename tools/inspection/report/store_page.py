"""``leandit report STORE...``: what stores hold, and what is unusual about it, on one page."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ....datasets.format.table_schemas import REJECT_REASONS
from ....datasets.order.filters import ScoreTable
from ....datasets.recipe import flatten
from ....datasets.store import LatentStore
from ....datasets.units import readable_size
from .. import store_text
from ..store_facts import StoreFacts
from .page import Alert, Section, render_page, write_page
from .store_alerts import find_alerts
from .store_figures import bucket_figures, byte_figures, caption_figures, class_figures, latent_figures
from .store_sheets import Progress, bucket_sheets, reject_thumbnails

MAX_REJECTS = 200  # that are listed
NUM_EXTREMES = 10  # smallest and largest classes that are listed
TITLES = ("Identity", "Records", "Buckets", "Pictures", "Captions", "Features", "Classes", "Latents", "Bytes")


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
    stores, shown = [], []
    for done, (target, name) in enumerate(zip(targets, short_names(targets), strict=True)):
        progress("read", done, len(targets))
        stores.append(StoreFacts(LatentStore(target, allow_incomplete=True, access="pread"), name))
        _ = stores[-1].latents  # the longest read
    progress("read", len(targets), len(targets))
    for facts in stores:
        sheets, note = bucket_sheets(
            facts.store, count=count, vae=vae, scores=scores, seed=seed, num_stores=len(stores), progress=progress
        )
        rejects = reject_thumbnails(facts, source) if source else []
        recipe = [
            f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in flatten(facts.spec.recipe).items()
        ]
        shown.append({"facts": facts, "sheets": sheets, "note": note, "rejects": rejects, "recipe": recipe})
    alerts = [
        Alert(f"{facts.name}: {alert.text}" if len(stores) > 1 else alert.text, alert.section)
        for facts in stores
        for alert in find_alerts(facts)
    ]
    num_bytes = write_page(out, _page(shown, alerts))
    return [("size", readable_size(num_bytes)), *[("warning", alert.text) for alert in alerts]]


def _page(shown: Sequence[dict[str, Any]], alerts: Sequence[Alert]) -> str:
    stores: list[StoreFacts] = [store["facts"] for store in shown]
    absent = {
        "Pictures": not any(store["sheets"] for store in shown),
        "Captions": not any(facts.captions for facts in stores),
        "Features": not any(facts.spec.groups for facts in stores),
        "Classes": not any(facts.store.num_classes for facts in stores),
    }
    reasons = dict.fromkeys(reason for facts in stores for reason in facts.records["rejects"])
    return render_page(
        "store.html",
        title=" and ".join(facts.name for facts in stores),
        alerts=alerts,
        sections=[Section(title.lower(), title) for title in TITLES if not absent.get(title)],
        stores=shown,
        identity=side_by_side(stores, store_text.identity),
        records=side_by_side(stores, store_text.records),
        reasons={reason: REJECT_REASONS.get(reason, "") for reason in reasons},
        captions=side_by_side(stores, store_text.captions),
        features=side_by_side(stores, store_text.features),
        latents=side_by_side(stores, store_text.latents),
        bytes=side_by_side(stores, store_text.sizes),
        figures={
            "buckets": bucket_figures(stores),
            "captions": caption_figures(stores),
            "classes": class_figures(stores),
            "latents": latent_figures(stores),
            "bytes": byte_figures(stores),
        },
        utc=store_text.utc,
        max_rejects=MAX_REJECTS,
        num_extremes=NUM_EXTREMES,
    )


def short_names(targets: Sequence[str]) -> list[str]:
    """Last parts of paths, as many as it takes to tell them apart; a path that is given twice gets its number."""
    parts = [target.rstrip("/").split("/") for target in targets]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(path[-length:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({i})" for i, name in enumerate(names, 1)]


def side_by_side(
    stores: Sequence[StoreFacts], rows_of: Callable[[StoreFacts], store_text.Rows]
) -> list[tuple[str, list[list[str]]]]:
    """The same rows of each store, in the order of the one with most: a name, and lines for each store."""
    every = [rows_of(facts) for facts in stores]
    names = dict.fromkeys(name for rows in sorted(every, key=len, reverse=True) for name in rows)
    values = {name: [rows.get(name, "-") for rows in every] for name in names}
    return [(name, [[one] if isinstance(one, str) else one for one in row]) for name, row in values.items()]
