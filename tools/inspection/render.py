"""Summaries and records of a store as text."""

from __future__ import annotations

from typing import Any

from ...datasets.units import readable_size
from ..terminal.text import printable

FALLBACKS = {
    "float32": "not finite before, so encoded again",
    "batch": "the batch ran out of memory, so fewer rows in a forward",
}


def render(summary: dict[str, Any]) -> str:
    """A store (``summary.summarise``) as aligned text."""
    encoders = (_render_encoders, _render_self_check, _render_named)
    parts = (_render_state, _render_sizes, *encoders, _render_captions, _render_latents)
    return "\n".join(printable(line) for part in parts for line in part(summary))


def _row(name: str, value: object) -> str:
    return f"{name:<20}{value}"


def _render_state(summary: dict[str, Any]) -> list[str]:
    again = "run the same precompute command again"
    lines = [_row("store", summary["store"])]
    lines.append(_row("state", "complete" if summary["complete"] else f"INCOMPLETE: {again}"))
    if summary["unfinished_revision"] and summary["complete"]:
        lines.append(_row("", f"revision {summary['unfinished_revision']} is unfinished: {again}"))
    lines.append(_row("revision", f"{summary['revision']} of {summary['newest_revision']}"))
    planned, stored, rejected = (summary[f"num_{status}"] for status in ("planned", "stored", "rejected"))
    missing = planned - stored - rejected
    counts = f"{planned:,} planned = {stored:,} stored + {rejected:,} rejected"
    lines.append(_row("records", f"{counts} + {missing:,} missing" if missing else counts))
    lines += [_row("", f"{count:,} x {reason}") for reason, count in summary["rejects"].items()]
    for fallback, count in summary["fallbacks"].items():
        lines.append(_row("", f"{count:,} stored as {fallback}: {FALLBACKS[fallback.split(':')[0]]}"))
    lines.append(_row("classes", summary["classes"]))
    lines.append(_row("fingerprint", summary["fingerprint"]))
    return [*lines, _row("root hash", summary["root_hash"] or "none yet")]


def _render_sizes(summary: dict[str, Any]) -> list[str]:
    lines = ["", _row("bucket", f"{'records':>10}")]
    lines += [_row(bucket, f"{count:>10,}") for bucket, count in summary["buckets"].items()]
    lines += ["", _row("part", f"{'size':>10}")]
    return lines + [_row(part, f"{readable_size(size):>10}") for part, size in summary["bytes"].items()]


def _render_encoders(summary: dict[str, Any]) -> list[str]:
    latent, text = summary["latent"], summary["text"]
    lines = [""]
    for role, identity in summary["encoders"].items():
        if identity:
            revision = f" at {identity['revision']}" if identity["revision"] else ""
            lines.append(_row(f"{role} encoder", f"{identity['class_name']} '{identity['model']}'{revision}"))
            weights = f"weights sha256 {identity['weights_sha256'][:16]}..."
            lines.append(_row("", f"{weights}, computed in {identity['dtype']}"))
    stored = f"{latent['kind']}, {latent['stored_channels']} channels stored as {latent['dtype']}"
    flip = "yes" if latent["flip"] else "no"
    downscale = f"1/{latent['downscale']} of the pixels"
    lines.append(_row("latents", f"{stored}, {downscale}, codec {summary['codec']}, flip {flip}"))
    if text:
        width = f"{text['width']} wide, stored as {text['dtype']}"
        lines.append(_row("captions", f"{width}, at most {text['max_tokens']} tokens"))
    return lines


def _render_self_check(summary: dict[str, Any]) -> list[str]:
    if not (check := summary["self_check"]):
        return []
    count, median = len(check["pictures"]), check["median_psnr_db"]
    each = ", ".join(f"{picture['psnr_db']:.1f}" for picture in check["pictures"])
    lines = [_row("self-check", f"{count} pictures came back from the VAE with {median:.1f} dB PSNR (median): {each}")]
    for name, word in (("channel_mean", "mean"), ("channel_std", "std")):
        low, high = min(check[name]), max(check[name])
        lines.append(_row("", f"{word} of its channels as the model sees them: {low:.2f} to {high:.2f}"))
    return lines


def _render_captions(summary: dict[str, Any]) -> list[str]:
    lines, specs = [], [summary["text"], *(text["spec"] for text in summary["texts"].values())]
    if lengths := summary["caption_tokens"]:
        max_tokens = next(spec["max_tokens"] for spec in specs if spec)  # of the first text encoder
        lines += ["", _row("caption tokens", f"{'captions':>10}")]
        lines += [_row(span, f"{count:>10,}") for span, count in lengths["table"].items()]
        lines.append(
            f"{summary['num_captions']:,} captions, {summary['num_caption_tokens']:,} tokens: min {lengths['min']}, "
            f"median {lengths['median']}, 95 % {lengths['p95']}, max {lengths['max']}; {lengths['num_truncated']:,} "
            f"cut at {max_tokens}; {lengths['padding_avoided']}x fewer tokens than padded"
        )
    if (quality := summary["caption_quality"]) and summary["text"]:  # of one with a name it stands below
        lines.append(
            f"{readable_size(quality['bytes_per_caption'])} a caption, {quality['fewer_than_padded_float16']}x fewer "
            f"than float16 padded to {summary['text']['max_tokens']} tokens"
        )
        if quality["min_cosine"] is not None and quality["max_error"] is not None:
            lines.append(
                f"stored tokens against the encoder's: cosine at least {quality['min_cosine']}, median of captions "
                f"{quality['median_cosine']}; largest error {quality['max_error']:.4g}"
            )
    return lines


def _render_named(summary: dict[str, Any]) -> list[str]:
    """Text encoders, features and pictures with a name: what is stored, how many bytes, how well."""
    lines = []
    for name, text in summary["texts"].items():
        spec, quality = text["spec"], text["caption_quality"]
        stored = {"tokens": "tokens", "pooled": "a vector", "both": "tokens and a vector"}[spec.get("output", "tokens")]
        length = "all" if spec.get("full_length") else "at most"
        kept = f"{stored}, {spec['width']} wide, stored as {spec['dtype']}, {length} {spec['max_tokens']} tokens"
        lines.append(_row(f"captions {name}", kept))
        if quality:
            lines.append(
                _row("", f"{readable_size(quality['bytes_per_caption'])} a caption{_cosines(quality, 'captions')}")
            )
    for name, feature in summary["features"].items():
        spec = feature["spec"]
        stored = {"patches": "patches", "cls": "class token", "both": "patches and class token"}[spec["output"]]
        kept = f"{stored}, {spec['width']} wide, stored as {spec['dtype']}, {spec['resolution_px']} px for the model"
        lines.append(_row(f"feature {name}", kept))
        lines.append(_row("", f"{readable_size(feature['bytes_per_record'])} a record{_cosines(feature, 'records')}"))
    for name, picture in summary["pictures"].items():
        stored = (
            "encoded as the latents" if picture["kind"] == "picture" else "a mask, uint8 at the size of the latents"
        )
        lines.append(_row(f"picture {name}", f"column '{picture['column']}', {stored}"))
        lines.append(_row("", f"{readable_size(picture['bytes_per_record'])} a record"))
    return ["", *lines] if lines else []


def _cosines(quality: dict[str, Any], of_what: str) -> str:
    if quality["min_cosine"] is None:
        return ""
    return f"; cosine at least {quality['min_cosine']}, median of {of_what} {quality['median_cosine']}"


def _render_latents(summary: dict[str, Any]) -> list[str]:
    stats, lines = summary["latent_statistics"], [""]
    if stats["num_rows_read"]:
        columns = _row("latent channel", f"{'mean':>10}{'std':>10}")
        lines.append(f"{columns}   as the model sees them; expected about 0 and 1")
        for channel, (mean, std) in enumerate(zip(stats["channel_mean"], stats["channel_std"], strict=True)):
            mark = "   <- unusual: is this the VAE's own scale?" if channel in stats["suspicious_channels"] else ""
            lines.append(f"{channel:<20}{mean:>10.3f}{std:>10.3f}{mark}")
    lines.append(f"{stats['num_nonfinite']:,} rows are not finite, of {stats['num_rows_read']:,} read")
    return lines + [f"  {row}" for row in stats["nonfinite"]]


def render_ledger(rejects: list[dict[str, Any]]) -> str:
    """Rejected records (``summary.ledger``), one a line."""
    lines = [
        f"{reject['reason']:<18}{reject['stage']:<8}{reject['key']}: {reject['detail']}"
        + (f" (tried {reject['attempts']} times)" if reject["attempts"] > 1 else "")
        for reject in rejects
    ]
    return "\n".join(printable(line) for line in [*lines, f"{len(rejects):,} rejected"])


def render_record(values: dict[str, Any]) -> str:
    """A record (``summary.describe_record``) as aligned text."""
    lines = []
    for name, value in values.items():
        if name == "captions":
            lines += [
                f"{'caption':<20}{caption['text'] or 'none: the null caption'}  ({caption['num_tokens']} tokens)"
                for caption in value
            ]
        elif value is not None:
            lines.append(f"{name:<20}{value}")
    return "\n".join(printable(line) for line in lines)
