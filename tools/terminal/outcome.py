"""What a command prints when it has ended: its results as rows on stdout, and on stderr the commands to run next."""

from __future__ import annotations

import contextlib
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ...datasets.disk.hashing import read_json
from ...datasets.format.buckets import bucket_size
from ...datasets.format.class_names import ClassNames
from ...errors import RecipeError
from ...precompute.run.bottleneck import DECODE, ENCODE, advice, before_stages, bound_by
from ...train.weights.folders import SNAPSHOT, STATE, find, knows_null
from ...units import plural, readable_time
from .text import Rows, is_quiet, printable

if TYPE_CHECKING:  # they load torch, or take half of a second
    import torch

    from ...datasets.format.schema import Manifest
    from ...precompute.importing.pipeline import ImportReport
    from ...precompute.pipeline import Report
    from ...precompute.planning.compare import Comparison
    from ...precompute.sources.source import Source

Command = list[object]  # words after "leandit"; placeholders in capitals are for the user to fill in

NOTHING_TO_DO = "nothing to encode, the store is complete"


def precompute_rows(report: Report, store: Path) -> Rows:
    """Results of a precompute: the store if it is complete, then what this call has encoded, and how fast."""
    if report.manifest is None:
        left = f"{store}: not complete; {report.num_left} shards are left to other parts"
        rows, nothing = [("store", left)], "nothing to encode, this part is complete"
    else:
        source = _source_rows(report.source) + (change_rows(report.changes) if report.changes else [])
        has_other_work = report.tokens.num_captions or report.changes or report.seconds.get(DECODE)
        rows = _store_rows(report.manifest, store, source)
        nothing = "no image was encoded" if has_other_work or not report.manifest.num_stored else NOTHING_TO_DO
    if (tokens := report.tokens).num_captions:
        share = f"{tokens.num_padding / tokens.num_tokens:.1%} padding"
        rows.append(("encoded", f"{tokens.num_tokens:,} tokens of {plural(tokens.num_captions, 'caption')}, {share}"))
    if report.num_low_quality:
        captions = plural(report.num_low_quality, "caption")
        rows.append(("quality", f"{captions} of low quality (store.min_text_cosine); see 'leandit inspect'"))
    if not report.num_encoded:
        return [*rows, ("this run", nothing)]
    rows.append(("this run", _rate(report.num_encoded, "image", report.total_seconds)))
    if report.num_ignored_profiles:
        images = plural(report.num_ignored_profiles, "image")
        rows.append(("profiles", f"{images} stored without a color profile: it is broken, or of other pixels"))
    if before := before_stages(report.seconds):
        rows.append(("startup", f"{before}; the stages overlap"))
    if not report.seconds.get(ENCODE):  # every image was rejected
        return rows
    rows.append(("stages", f"{'':<8}{'busy':>13}{'threads':>9}{'images/s':>10}  standalone rate"))
    for time in report.times:
        rate = f"{time.images_per_second:,.1f}" if time.images_per_second else "-"
        rows.append(("", f"{time.name:<8}{readable_time(time.seconds):>13}{time.threads:>9}{rate:>10}"))
    tip = advice(report.times, on_cpu=report.device == "cpu", codec=report.codec)
    return [*rows, ("bound by", f"{bound_by(report.times)}: {tip}")]


def unchanged_rows(manifest: Manifest, source: Source | None, store: Path) -> Rows:
    """Results of a precompute that had nothing to do."""
    return [*_store_rows(manifest, store, _source_rows(source)), ("this run", NOTHING_TO_DO)]


def import_rows(report: ImportReport, store: Path) -> Rows:
    """Results of an import."""
    latent, this_run = report.spec.latent, "nothing to copy, the store was already complete"
    if report.num_imported:
        this_run = _rate(report.num_imported, "record", report.total_seconds)
    flipped = ", with flipped copies" if latent.flip else ""
    imported = [
        ("latents", f"{latent.kind}, {latent.channels} channels, {latent.dtype}{flipped}"),
        ("vae", f"assumed to be '{report.spec.vae.model}' (an import cannot verify it)"),
    ]
    return [*_store_rows(report.manifest, store, imported), ("this run", this_run)]


def change_rows(changes: Comparison) -> Rows:
    """Changes of the source since the previous revision."""
    counts = {
        "new": changes.num_added,
        "changed": changes.num_changed,
        "retried": changes.num_retried,
        "with a changed label or caption": changes.num_described,
        "missing": changes.num_gone,
    }
    changed = [f"{count:,} {what}" for what, count in counts.items() if count]
    changed += ["classes renamed"] if changes.is_renamed else []
    rows = [("source", f"since the previous revision: {', '.join(changed)}" if changed else "nothing has changed")]
    if changes.num_gone:
        fate = "left out" if changes.num_dropped else "still in the store (--drop-gone leaves them out)"
        rows.append(("", f"records missing from the source are {fate}"))
    return rows


def _store_rows(manifest: Manifest, store: Path, source: Rows) -> Rows:
    """Records, buckets, captions and root hash, with rows on the source between them."""
    counts = f"{manifest.num_stored:,} stored + {manifest.num_rejected:,} rejected"
    rows = [("store", f"{store}: complete, revision {manifest.revision}")]
    rows.append(("records", f"{manifest.num_planned:,} planned = {counts}"))
    if manifest.num_rejected:
        rows.append(("", f"reasons: leandit inspect {store} --rejects"))
    buckets = sorted(manifest.buckets.items(), key=lambda bucket: bucket_size(bucket[0]))
    rows += [*source, ("buckets", ", ".join(f"{name}: {count:,}" for name, count in buckets))]
    if manifest.num_captions:
        rows.append(("captions", f"{manifest.num_captions:,} distinct, {manifest.num_caption_tokens:,} tokens"))
    return [*rows, ("root hash", manifest.root_hash)]


def _source_rows(source: Source | None) -> Rows:
    """The classes of the source, and its ignored files; none if another process has listed it."""
    if source is None:
        return []
    rows = [("classes", ClassNames(source.classes, source.class_names).summary())] if source.classes else []
    return rows + [("ignored", line) for line in source.ignored.lines()]


def _rate(count: int, noun: str, seconds: float) -> str:
    return f"{plural(count, noun)} in {readable_time(seconds)}, {count / seconds:,.1f} {noun}s/s"


def computed_precision(precision: str, device: torch.device) -> str:
    """The precision that a training computes in, with the requested one where the device lacks it."""
    from ...train.metrics.meter import computed_in

    computed = computed_in(precision, device)
    return precision if computed == precision else f"{computed} ({precision} was requested, {device} has no fast bf16)"


# What to run next


def print_next(*commands: Command) -> None:
    """Print commands on stderr, ready to paste, unless the command is quiet."""
    if is_quiet():
        return
    sys.stdout.flush()  # so that they come last
    for words in commands:
        print(f"next: leandit {printable(shlex.join(map(str, words)))}", file=sys.stderr, flush=True)


def command_without(flag: str) -> Command:
    """The words of this command, without a flag."""
    return [word for word in sys.argv[1:] if word != flag]


def after_store(store: Path, recipe: str = "") -> list[Command]:
    """What to run when a store is complete: look at it, and train on it.

    Args:
      recipe: name or path of the precompute recipe that made it, whose ``about.trains`` names train recipes.
    """
    from ...recipe import about_recipe

    trains: list[str] = []
    with contextlib.suppress(RecipeError):  # an import has none, and a file may have changed meanwhile
        trains = about_recipe(recipe, package="leandit.precompute").trains
    if not trains:
        return [["inspect", store], ["recipes"]]
    run = f"runs/{Path(trains[0]).name.removesuffix('.toml')}"
    return [["inspect", store], ["train", trains[0], "--store", store, "--run", run]]


def sample_with(run: Path) -> Command:
    """The command that draws with a run; one that was trained without a null condition cannot be guided."""
    snapshots = find(SNAPSHOT, run)
    state = read_json(snapshots[-1] / STATE) if snapshots else None
    unguided = isinstance(state, dict) and not knows_null(state)
    return ["sample", run, "--out", f"{run}-samples", *(["--guidance", 1] if unguided else [])]
