"""What ``inspect`` prints and a report shows of a store: names and values, in words."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from ...datasets.units import readable_size, readable_time
from ..terminal.text import printable
from .store_facts import StoreFacts

Rows = dict[str, str | list[str]]
"""Values by name; a list has a line each."""

AGAIN = "run the same precompute command again"
FALLBACKS = {
    "float32": "not finite before, so encoded again",
    "batch": "the batch ran out of memory, so fewer rows in a forward",
}
NAME_WIDTH = 19  # characters of the first column


def identity(facts: StoreFacts) -> Rows:
    """What the store is, and what made it when."""
    store, spec, latent, images = facts.store, facts.spec, facts.spec.latent, facts.spec.images
    unfinished = store.unfinished_revision if store.complete else 0
    rows: Rows = {
        "store": facts.path,
        "state": ["complete" if store.complete else f"INCOMPLETE: {AGAIN}"]
        + ([f"revision {unfinished} is unfinished: {AGAIN}"] if unfinished else []),
        "revision": f"{store.revision} of {store.newest_revision}",
        "fingerprint": spec.fingerprint,
        "root hash": store.root_hash or "none yet",
        "made by": f"leandit {spec.leandit_version}" + (", imported from another program" if spec.is_imported else ""),
        "classes": store.class_names.summary(),
        "images": f"{images.crop} crop, {images.resolution_px} px, {images.resize_filter}",
        "latents": f"{latent.kind}, {latent.channels} channels at 1/{latent.downscale} of the pixels, "
        f"{latent.stored_channels} stored as {latent.dtype}, codec {spec.codec}, flip {'yes' if latent.flip else 'no'}",
    }
    if stages := facts.files.stages:
        spans = (
            f"{name} {readable_time(end - start)}" for (_, start), (name, end) in itertools.pairwise(stages.items())
        )
        rows |= {"sealed": utc(stages["sealing"]), "time by stage": f"{', '.join(spans)}, pauses included"}
    for role, encoder in facts.encoders.items():
        if encoder:
            revision = f" at {encoder['revision']}" if encoder["revision"] else ""
            libraries = ", ".join(f"{name} {version}" for name, version in encoder["libraries"].items())
            computed = f"computed in {encoder['dtype']}" + (f" with {libraries}" if libraries else "")
            rows[f"{role} encoder"] = [
                f"{encoder['class_name']} '{encoder['model']}'{revision}, {computed}",
                f"weights SHA-256 {encoder['weights_sha256']}",
                *([f"tokenizer SHA-256 {encoder['tokenizer_sha256']}"] if encoder["tokenizer_sha256"] else []),
            ]
    return rows


def records(facts: StoreFacts) -> Rows:
    """Planned, stored and rejected records, and what is unusual about some."""
    counts, sources = facts.records, facts.sources
    planned, stored, rejected = (counts[f"num_{status}"] for status in ("planned", "stored", "rejected"))
    missing = planned - stored - rejected
    reconciled = f"{planned:,} planned = {stored:,} stored + {rejected:,} rejected"
    rows: Rows = {"records": reconciled + (f" + {missing:,} missing" if missing else "")}
    if rejected:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in counts["rejects"].items())
        rows["rejected"] = f"{counted(rejected, planned)}: {reasons}"
    for how, count in counts["fallbacks"].items():
        rows[f"stored as {how}"] = f"{count:,}: {FALLBACKS[how.split(':')[0]]}"
    rows["duplicates"] = f"{sources['num_duplicates']:,} of an earlier image"
    if sources["aspects"] is not None:
        rows["enlarged"] = counted(sources["num_enlarged"], stored)
    return rows


def captions(facts: StoreFacts) -> Rows:
    """Uses of captions, and of each text encoder what is stored of them and how well."""
    if not (found := facts.captions):
        return {}
    num_distinct = found["num_distinct"] or facts.store.captions.num_rows  # of ``used_lengths``
    rows: Rows = {
        "distinct captions": f"{facts.store.captions.num_rows:,}, {facts.num_caption_tokens:,} tokens",
        "captions of records": f"{found['num_uses']:,}, {counted(found['num_distinct'], found['num_uses'])} distinct",
        "not in use": f"{found['num_unused']:,}, of rejected or missing images alone",
        "empty": f"{found['num_empty']:,}",
        "uses of one at most": f"{found['most_uses']:,}",
    }
    for encoder in facts.spec.text_encoders:
        spec, quality, lengths = encoder.spec, facts.caption_quality(encoder), facts.used_lengths(encoder)
        stored = {"tokens": "tokens", "pooled": "a vector", "both": "tokens and a vector"}[spec.output]
        limit = f"{'all' if spec.full_length else 'at most'} {spec.max_tokens} tokens"
        rows[f"captions {encoder.name}".strip()] = [
            f"{stored}, {spec.width} wide, stored as {spec.dtype}, {limit}",
            *_caption_bytes(quality, spec.max_tokens),
            *_error(quality, "captions"),
        ]
        rows[f"tokens {encoder.name}".strip()] = [
            f"min {lengths['min']}, median {lengths['median']}, 95 % {lengths['p95']}, max {lengths['max']}",
            f"{counted(lengths['num_truncated'], num_distinct)} cut at {spec.max_tokens} tokens",
            f"{lengths['padding_avoided']:g} times fewer than padded",
        ]
    return rows


def features(facts: StoreFacts) -> Rows:
    """Image features and companion images: what is stored of a record, its bytes, and how well."""
    rows: Rows = {}
    bucket = next(iter(facts.store.buckets), "")
    for one in facts.spec.features:
        spec, feature = one.spec, facts.features[one.name]
        grid = " x ".join(map(str, spec.grid(spec.images_px, spec.images_px)))
        stored = {"patches": f"{grid} patches", "cls": "class token", "both": f"{grid} patches and class token"}
        rows[f"feature {one.name}"] = [
            f"{stored[spec.output]}, {spec.width} wide, stored as {spec.dtype}, {spec.resolution_px} px for the model",
            f"{readable_size(feature['bytes_per_record'])} a record",
            *_error(feature, "records"),
        ]
    for name, companion in facts.companions.items():
        stored = "a mask, uint8" if companion["kind"] == "mask" else "encoded as the latents"
        shape = f", {' x '.join(map(str, companion['row_shape']))} in {bucket}" if bucket else ""
        size = readable_size(companion["bytes_per_record"])
        rows[f"picture {name}"] = [f"column '{companion['column']}', {stored}{shape}", f"{size} a record"]
    return rows


def latents(facts: StoreFacts) -> Rows:
    """Which latents the statistics are of, those that are not finite, and the self-check."""
    found, check, stored = facts.latents, facts.self_check, facts.records["num_stored"]
    read = f"{found['num_rows_read']:,} of {stored:,} records"
    rows: Rows = {"statistics of": f"all {stored:,} records, as the store was sealed" if facts.is_sealed else read}
    rows["not finite"] = [f"{found['num_nonfinite']:,} of {found['num_rows_read']:,} rows read", *found["nonfinite"]]
    if not check:
        return rows | {"self-check": "none"}
    each = ", ".join(f"{image['psnr_db']:.1f}" for image in check["pictures"])
    median = f"{check['median_psnr_db']:.1f} dB PSNR (median)"
    rows["self-check"] = [f"{len(check['pictures'])} images came back from the VAE with {median}: {each}"]
    if facts.min_psnr_db is not None:
        rows["self-check"].append(f"limit {facts.min_psnr_db:g} dB")
    for name, word in (("channel_mean", "mean"), ("channel_std", "std")):
        low, high = min(check[name]), max(check[name])
        rows["self-check"].append(f"{word} of its channels as the model sees them: {low:.2f} to {high:.2f}")
    return rows


def sizes(facts: StoreFacts) -> Rows:
    """Bytes on disk of each part, beside a file for each record."""
    total, separate = facts.files.parts["total"], facts.files.separate["total"]
    parts: Rows = {
        part: f"{readable_size(size)} ({share(size, total)})" for part, size in facts.files.parts.items() if size
    }
    return parts | {
        "total": readable_size(total),
        "a record": readable_size(total / max(1, len(facts.store))),
        "in separate files": f"{readable_size(separate)}, {separate / max(1, total):.2f} times as much",
    }


def render(facts: StoreFacts) -> str:
    """A store as aligned text."""
    spans = facts.used_lengths(facts.spec.text_encoders[0])["table"] if facts.captions and facts.store.texts else {}
    marks = dict.fromkeys(facts.suspicious_channels, "   <- unusual: is this the VAE's own scale?")
    blocks: list[Sequence[str]] = [
        [*_lines(identity(facts)), *_lines(records(facts))],
        [_line("bucket", f"{'records':>10}"), *(_line(b, f"{n:>10,}") for b, n in facts.store.buckets.items())],
        _lines(sizes(facts)),
        _lines(captions(facts)),
        _lines({f"{span} tokens": f"{count:>10,} captions" for span, count in spans.items()}),
        _lines(features(facts)),
        _lines(latents(facts)),
    ]
    if facts.statistics.count:
        channels = enumerate(zip(facts.statistics.channel_mean, facts.statistics.channel_std, strict=True))
        head = _line("latent channel", "      mean       std   as the model sees them; expected about 0 and 1")
        rows = (_line(str(i), f"{mean:>10.3f}{std:>10.3f}{marks.get(i, '')}") for i, (mean, std) in channels)
        blocks.append([head, *rows])
    return "\n\n".join("\n".join(map(printable, block)) for block in blocks if block)


def render_ledger(rejects: list[dict[str, Any]]) -> str:
    """Rejected records (``StoreFacts.rejected``), one a line."""
    lines = [
        f"{reject['reason']:<18}{reject['stage']:<8}{reject['key']}: {reject['detail']}"
        + (f" (tried {reject['attempts']} times)" if reject["attempts"] > 1 else "")
        for reject in rejects
    ]
    return "\n".join(printable(line) for line in [*lines, f"{len(rejects):,} rejected"])


def render_record(values: dict[str, Any]) -> str:
    """A record (``store_facts.describe_record``) as aligned text."""
    lines = []
    for name, value in values.items():
        if name == "captions":
            texts = ((one["text"] or "none: the null caption", one["num_tokens"]) for one in value)
            lines += [_line("caption", f"{text}  ({num_tokens} tokens)") for text, num_tokens in texts]
        elif value is not None:
            lines.append(_line(name, value))
    return "\n".join(map(printable, lines))


def counted(part: int, whole: int) -> str:
    """A count with its share: "12 (0.4 %)"."""
    return f"{part:,} ({share(part, whole)})" if part else "0"


def share(part: int, whole: int) -> str:
    """A share in percent, with two digits: "0.4 %"."""
    percent = 100 * part / max(1, whole)
    return f"{percent:.0f} %" if percent >= 10 or not part else f"{percent:.2g} %"


def utc(seconds: float) -> str:
    """A date and time: "2026-03-01 14:05:09 UTC"."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _caption_bytes(quality: Mapping[str, Any], max_tokens: int) -> list[str]:
    """Bytes of a caption; none where no caption is encoded yet."""
    if not quality["bytes_per_caption"]:
        return []
    size, times = readable_size(quality["bytes_per_caption"]), quality["fewer_than_padded_float16"]
    return [f"{size} a caption, {times:g} times fewer than float16 padded to {max_tokens} tokens"]


def _error(quality: Mapping[str, Any], of_what: str) -> list[str]:
    if quality["min_cosine"] is None or quality["max_error"] is None:
        return []
    cosines = f"cosine at least {quality['min_cosine']}, median of {of_what} {quality['median_cosine']}"
    return [f"against the encoder's: {cosines}; largest error {quality['max_error']:.4g}"]


def _line(name: str, value: object) -> str:
    return f"{name:<{NAME_WIDTH}} {value}"


def _lines(rows: Rows) -> list[str]:
    values = {name: [value] if isinstance(value, str) else value for name, value in rows.items()}
    return [_line("" if i else name, line) for name, lines in values.items() for i, line in enumerate(lines)]
