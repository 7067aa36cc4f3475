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

if TYPE_CHECKING:  # they load torch
    from ...precompute.importing.pipeline import ImportReport
    from ...precompute.pipeline import Report
    from ...precompute.sources.files.ignored import Ignored
    from ...precompute.unchanged import Unchanged

NOTHING_TO_DO = "no picture to encode, they are there"


def precompute_rows(report: Report, store: Path) -> list[tuple[str, str]]:
    """Results of a precompute: name and value of each line."""
    manifest = report.manifest
    if manifest is None:
        left = f"{store}: not complete; {report.num_left} shards are left to other parts"
        return [("store", left), *_run_rows(report)]
    rows = count_rows(manifest, store) + source_rows(report.classes, report.ignored)
    if report.changes:
        rows += change_rows(report.changes)
    rows += content_rows(manifest)
    return rows + _run_rows(report)


def unchanged_rows(found: Unchanged, store: Path) -> list[tuple[str, str]]:
    """Results of a precompute that had nothing to do."""
    rows = count_rows(found.manifest, store) + source_rows(found.classes, found.ignored) + content_rows(found.manifest)
    return [*rows, ("this run", NOTHING_TO_DO)]


def source_rows(classes: ClassNames, ignored: Ignored) -> list[tuple[str, str]]:
    """The classes of the source, and its ignored files."""
    rows = [("classes", classes.summary())] if len(classes) else []
    return rows + [("ignored", line) for line in ignored.lines()]


def _run_rows(report: Report) -> list[tuple[str, str]]:
    rows, tokens = [], report.tokens
    if tokens.num_captions:
        share = f"{tokens.num_padding / tokens.num_tokens:.1%} padding"
        rows.append(("encoded", f"{tokens.num_tokens:,} tokens of {tokens.num_captions:,} captions, {share}"))
    if report.num_encoded:
        rate = report.num_encoded / report.total_seconds
        took = f"{report.num_encoded:,} pictures in {readable_time(report.total_seconds)}"
        rows.append(("this run", f"{took}, {rate:,.1f} images/s"))
        if before := before_stages(report.seconds, report.power):
            rows.append(("before", f"{before}; the stages overlap"))
        rows += stage_rows(report)
    elif report.manifest is None:
        rows.append(("this run", "no picture to encode, those of this part are there"))
    else:
        others = tokens.num_captions or report.changes or report.seconds.get(DECODE) or not report.manifest.num_stored
        rows.append(("this run", "no picture was encoded" if others else NOTHING_TO_DO))
    return rows


def stage_rows(report: Report) -> list[tuple[str, str]]:
    """Time and rate of each stage, the bottleneck, and advice; empty if nothing was encoded."""
    if not report.seconds.get(ENCODE):
        return []  # every picture was rejected
    rows = [("stages", f"{'':<8}{'busy':>13}{'threads':>9}{'images/s':>10}  that it could do alone")]
    for time in report.times:
        rate = f"{time.images_per_second:,.1f}" if time.images_per_second else "-"
        rows.append(("", f"{time.name:<8}{readable_time(time.seconds):>13}{time.threads:>9}{rate:>10}"))
    bound = bound_by(report.times)
    tip = advice(report.times, on_cpu=report.power.device == "cpu", codec=report.codec)
    return [*rows, ("bound by", f"{bound}: {tip}")]


def import_rows(report: ImportReport, store: Path) -> list[tuple[str, str]]:
    """Results of an import: name and value of each line."""
    rows, latent = count_rows(report.manifest, store), report.spec.latent
    flipped = ", with flipped copies" if latent.flip else ""
    rows.append(("latents", f"{latent.kind}, {latent.channels} channels, {latent.dtype}{flipped}"))
    rows.append(("vae", f"said to be '{report.spec.vae.model}': an import cannot prove it"))
    rows += content_rows(report.manifest)
    if report.num_imported:
        rate = report.num_imported / report.total_seconds
        took = f"{report.num_imported:,} records in {readable_time(report.total_seconds)}"
        took += f", {rate:,.1f} records/s"
        return [*rows, ("this run", took)]
    return [*rows, ("this run", "nothing to copy, the store was complete")]


def count_rows(manifest: Manifest, store: Path) -> list[tuple[str, str]]:
    """Numbers of records, and the command that lists the rejected ones."""
    rejected = f"{manifest.num_stored:,} stored + {manifest.num_rejected:,} rejected"
    rows = [("store", f"{store}: complete, revision {manifest.revision}")]
    rows.append(("records", f"{manifest.num_planned:,} planned = {rejected}"))
    if manifest.num_rejected:
        rows.append(("", f"why: 'leandit inspect {store} --rejects' names each, with its reason"))
    return rows


def content_rows(manifest: Manifest) -> list[tuple[str, str]]:
    """Buckets, captions and root hash."""
    buckets = sorted(manifest.buckets.items(), key=lambda entry: bucket_size(entry[0]))
    rows = [("buckets", ", ".join(f"{name}: {count:,}" for name, count in buckets))]
    if manifest.num_captions:
        rows.append(("captions", f"{manifest.num_captions:,} distinct, {manifest.num_caption_tokens:,} tokens"))
    return [*rows, ("root hash", manifest.root_hash)]


def change_rows(changes: Comparison) -> list[tuple[str, str]]:
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
    text = f"since the revision before: {', '.join(changed)}" if changed else "nothing has changed"
    rows = [("source", text)]
    if changes.num_gone:
        fate = "left out" if changes.num_dropped else "still in the store (--drop-gone leaves them out)"
        rows.append(("", f"what is gone from the source is {fate}"))
    return rows
