"""``leandit report STORE...``: what stores hold, and what is unusual about it, on one page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ....datasets.store import LatentStore
from ..summary import summarise
from .page import Alert, Section, count, mib, render_page, write_page

Progress = Callable[[str, int, int], None]
SCAN_BYTES = 256 << 20  # of latents that are read for a report


@dataclass(frozen=True)
class StoreOptions:
    """What a report of stores shows.

    Args:
      source: the pictures that a store was made from, for thumbnails of rejects; None: keys alone.
      vae: folder or hub id of the decoder; None: the store's own.
      count: pictures of each bucket; 0: none.
    """

    source: list[str] | None = None
    vae: str | None = None
    count: int = 12


def report_stores(
    targets: Sequence[str], out: Path, options: StoreOptions, *, progress: Progress
) -> list[tuple[str, str]]:
    """Write a report of one store, or of several side by side.

    Args:
      targets: folders or URLs.
      out: the HTML file.
    Returns: rows for the user.
    Raises: as ``LatentStore``; SourceError.
    """
    summaries = []
    for number, target in enumerate(targets):
        progress("read", number, len(targets))
        summaries.append(summarise(LatentStore(target, allow_incomplete=True), scan_bytes=SCAN_BYTES))
    progress("read", len(targets), len(targets))
    alerts = [
        Alert(f"{summary['store']}: not complete; run the same precompute command again", "identity")
        for summary in summaries
        if not summary["complete"]
    ]
    identities = [
        [
            ("store", summary["store"]),
            ("revision", f"{summary['revision']} of {summary['newest_revision']}"),
            ("fingerprint", summary["fingerprint"]),
            ("root hash", summary["root_hash"] or "none yet"),
            ("records", count(summary["num_stored"])),
            ("bytes", mib(summary["bytes"]["total"])),
        ]
        for summary in summaries
    ]
    html = render_page(
        "store.html",
        title=" beside ".join(summary["store"] for summary in summaries),
        sections=[Section("identity", "Identity")],
        alerts=alerts,
        identities=identities,
    )
    return [("bytes", mib(write_page(out, html))), ("warnings", str(len(alerts)))]
