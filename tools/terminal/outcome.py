"""Results of a precompute or an import, as rows of text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...datasets.format.buckets import bucket_size
from ...datasets.format.class_names import ClassNames
from ...datasets.format.schema import Manifest
from ...datasets.units import readable_time
from ...precompute.planning.compare import Comparison
from ...precompute.progress.verdict import DECODE, ENCODE, advice, before_stages, bound_by
from .text import Rows

if TYPE_CHECKING:  # they load torch
    from ...precompute.importing.pipeline import ImportReport
    from ...precompute.pipeline import Report
    from ...precompute.sources.files.ignored import Ignored
    from ...precompute.unchanged import Unchanged

NOTHING_TO_DO = "no picture to encode, they are there"


def precompute_rows(report: Report, store: Path) -> Rows:
    """Results of a precompute: name and value of each line."""
    if report.manifest is None:
        left = f"{store}: not complete; {report.num_left} shards are left to other parts"
        return [("store", left), *_run_rows(report)]
    source = _source_rows(report.classes, report.ignored) + (change_rows(report.changes) if report.changes else [])
    return _store_rows(report.manifest, store, source) + _run_rows(report)


def unchanged_rows(found: Unchanged, store: Path) -> Rows:
    """Results of a precompute that had nothing to do."""
    rows = _store_rows(found.manifest, store, _source_rows(found.classes, found.ignored))
    return [*rows, ("this run", NOTHING_TO_DO)]


def import_rows(report: ImportReport, store: Path) -> Rows:
    """Results of an import: name and value of each line."""
    latent, this_run = report.spec.latent, "nothing to copy, the store was complete"
    if report.num_imported:
        this_run = _rate(report.num_imported, "records", report.total_seconds, "records/s")
    flipped = ", with flipped copies" if latent.flip else ""
    imported = [
        ("latents", f"{latent.kind}, {latent.channels} channels, {latent.dtype}{flipped}"),
        ("vae", f"said to be '{report.spec.vae.model}': an import cannot prove it"),
    ]
    return [*_store_rows(report.manifest, store, imported), ("this run", this_run)]


def change_rows(changes: Comparison) -> Rows:
    """Changes of the source since the previous revision."""
    counts = {
        "new": changes.num_added,
        "changed": changes.num_changed,
        "tried again": changes.num_retried,
        "with another label or caption": changes.num_described,
        "gone": changes.num_gone,
    }
    changed = [f"{count:,} {what}" for what, count in counts.items() if count]
    changed += ["classes renamed"] if changes.is_renamed else []
    rows = [("source", f"since the revision before: {', '.join(changed)}" if changed else "nothing has changed")]
    if changes.num_gone:
        fate = "left out" if changes.num_dropped else "still in the store (--drop-gone leaves them out)"
        rows.append(("", f"what is gone from the source is {fate}"))
    return rows


def _store_rows(manifest: Manifest, store: Path, source: Rows) -> Rows:
    """Records, buckets, captions and root hash, with rows on the source between them."""
    counts = f"{manifest.num_stored:,} stored + {manifest.num_rejected:,} rejected"
    rows = [("store", f"{store}: complete, revision {manifest.revision}")]
    rows.append(("records", f"{manifest.num_planned:,} planned = {counts}"))
    if manifest.num_rejected:
        rows.append(("", f"why: 'leandit inspect {store} --rejects' names each, with its reason"))
    buckets = sorted(manifest.buckets.items(), key=lambda bucket: bucket_size(bucket[0]))
    rows += [*source, ("buckets", ", ".join(f"{name}: {count:,}" for name, count in buckets))]
    if manifest.num_captions:
        rows.append(("captions", f"{manifest.num_captions:,} distinct, {manifest.num_caption_tokens:,} tokens"))
    return [*rows, ("root hash", manifest.root_hash)]


def _source_rows(classes: ClassNames, ignored: Ignored) -> Rows:
    """The classes of the source, and its ignored files."""
    rows = [("classes", classes.summary())] if len(classes) else []
    return rows + [("ignored", line) for line in ignored.lines()]


def _run_rows(report: Report) -> Rows:
    """What this call has encoded, and how fast."""
    rows, tokens = list[tuple[str, str]](), report.tokens
    if tokens.num_captions:
        share = f"{tokens.num_padding / tokens.num_tokens:.1%} padding"
        rows.append(("encoded", f"{tokens.num_tokens:,} tokens of {tokens.num_captions:,} captions, {share}"))
    if report.num_encoded:
        rows.append(("this run", _rate(report.num_encoded, "pictures", report.total_seconds, "images/s")))
        if before := before_stages(report.seconds, report.power):
            rows.append(("before", f"{before}; the stages overlap"))
        return rows + _stage_rows(report)
    if report.manifest is None:
        return [*rows, ("this run", "no picture to encode, those of this part are there")]
    others = tokens.num_captions or report.changes or report.seconds.get(DECODE) or not report.manifest.num_stored
    return [*rows, ("this run", "no picture was encoded" if others else NOTHING_TO_DO)]


def _stage_rows(report: Report) -> Rows:
    """Time and rate of each stage, the bottleneck, and advice; empty if every picture was rejected."""
    if not report.seconds.get(ENCODE):
        return []
    rows = [("stages", f"{'':<8}{'busy':>13}{'threads':>9}{'images/s':>10}  that it could do alone")]
    for time in report.times:
        rate = f"{time.images_per_second:,.1f}" if time.images_per_second else "-"
        rows.append(("", f"{time.name:<8}{readable_time(time.seconds):>13}{time.threads:>9}{rate:>10}"))
    tip = advice(report.times, on_cpu=report.power.device == "cpu", codec=report.codec)
    return [*rows, ("bound by", f"{bound_by(report.times)}: {tip}")]


def _rate(count: int, what: str, seconds: float, unit: str) -> str:
    return f"{count:,} {what} in {readable_time(seconds)}, {count / seconds:,.1f} {unit}"
