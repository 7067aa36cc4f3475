"""What a report of a store says first: each warning has a rule with a limit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..page import Alert, count, number
from .facts import StoreFacts

FEW_OF_MEDIAN = 0.1  # of the median class's records; a class with fewer is small
SHARE_OF_ONE_CAPTION = 0.01  # of all records; a caption that more of them have is odd
MIN_EQUAL = 10  # records with one caption, in small stores
SHARE_ENLARGED = 0.01
MEAN_LIMIT, STD_LIMITS = 0.5, (2 / 3, 1.5)  # of a channel as the model sees it, where 0 and 1 are expected
COSINE_LIMIT = 0.99  # between a token as encoded and as stored
NUM_NAMED = 3


def find_alerts(facts: StoreFacts) -> list[Alert]:
    """The warnings about a store, the gravest first."""
    rules = (_state, _latents, _self_check, _rejects, _captions, _quality, _classes, _pictures)
    return [alert for rule in rules for alert in rule(facts)]


def _state(facts: StoreFacts) -> Iterator[Alert]:
    summary, again = facts.summary, "Run the same precompute command again."
    if not summary["complete"]:
        missing = summary["num_planned"] - summary["num_stored"] - summary["num_rejected"]
        yield Alert(f"The store is not complete: {count(missing)} records are missing. {again}", "records")
    elif summary["unfinished_revision"]:
        yield Alert(f"Revision {summary['unfinished_revision']} is unfinished. {again}", "identity")
    if not summary["num_stored"]:
        yield Alert("The store holds no record.", "records")


def _latents(facts: StoreFacts) -> Iterator[Alert]:
    stats = facts.summary["latent_statistics"]
    if stats["num_nonfinite"]:
        yield Alert(
            f"{count(stats['num_nonfinite'])} of {count(stats['num_rows_read'])} latents that were read are not "
            "finite: run leandit verify.",
            "latents",
        )
    if not facts.channels.count:
        return
    lines = []
    for channel, (mean, std) in enumerate(zip(facts.channels.channel_mean, facts.channels.channel_std, strict=True)):
        if not STD_LIMITS[0] <= std <= STD_LIMITS[1]:
            lines.append(f"channel {channel}'s standard deviation is {number(std, 3)}, expected 1")
        if abs(mean) > MEAN_LIMIT:
            lines.append(f"channel {channel}'s mean is {number(mean, 3)}, expected 0")
    if lines:
        rest = f", and {len(lines) - NUM_NAMED} more like it" if len(lines) > NUM_NAMED else ""
        yield Alert(f"As the model sees the latents, {', '.join(lines[:NUM_NAMED])}{rest}.", "latents")


def _self_check(facts: StoreFacts) -> Iterator[Alert]:
    check, limit = facts.summary["self_check"], min_psnr(facts)
    if check and limit is not None and check["median_psnr_db"] < limit:
        yield Alert(
            f"Pictures came back from the autoencoder with a PSNR of {check['median_psnr_db']:.1f} dB (median), below "
            f"the limit of {limit:g} dB.",
            "latents",
        )


def min_psnr(facts: StoreFacts) -> float | None:
    """The limit of the self-check in the store's recipe, in dB; None without one."""
    section = facts.store.spec.recipe.get("vae")
    limit = section.get("min_psnr") if isinstance(section, dict) else None
    return float(limit) if isinstance(limit, int | float) and limit > 0 else None


def _rejects(facts: StoreFacts) -> Iterator[Alert]:
    summary = facts.summary
    if num := summary["num_rejected"]:
        reasons = ", ".join(f"{reason} {count(n)}" for reason, n in summary["rejects"].items())
        pictures, planned = "picture was" if num == 1 else "pictures were", summary["num_planned"]
        yield Alert(
            f"{count(num)} {pictures} rejected, {share(num, planned)} of {count(planned)}: {reasons}.", "records"
        )


def _captions(facts: StoreFacts) -> Iterator[Alert]:
    for one in facts.tokens:
        if one.num_truncated:
            of = f" for the encoder '{one.name}'" if one.name else ""
            yield Alert(
                f"{share(one.num_truncated, len(one.tokens))} of captions ({count(one.num_truncated)} of "
                f"{count(len(one.tokens))}) are cut at {one.max_tokens} tokens{of}.",
                "captions",
            )
    captions, num_stored = facts.captions, facts.summary["num_stored"]
    if captions and captions.most_records >= max(MIN_EQUAL, SHARE_OF_ONE_CAPTION * num_stored):
        yield Alert(
            f"One caption stands {count(captions.most_records)} times, in a store of {count(num_stored)} records: "
            f'"{captions.repeated[0][0][:80]}".',
            "captions",
        )
    if captions and captions.num_empty:
        yield Alert(f"{share(captions.num_empty, captions.num_uses)} of captions are empty.", "captions")


def _quality(facts: StoreFacts) -> Iterator[Alert]:
    summary = facts.summary
    measured = {f"captions {name}": text["caption_quality"] for name, text in summary["texts"].items()}
    if summary["text"]:
        measured["captions"] = summary["caption_quality"]
    measured |= {f"feature {name}": feature for name, feature in summary["features"].items()}
    for name, quality in measured.items():
        cosine = quality and quality["min_cosine"]
        if cosine is not None and cosine < COSINE_LIMIT:
            yield Alert(f"{name}: a stored token has a cosine of {cosine:.4f} with the encoder's.", "captions")


def _classes(facts: StoreFacts) -> Iterator[Alert]:
    counts, names = facts.classes, facts.store.class_names
    if counts is None:
        return
    if num_empty := int(np.count_nonzero(counts == 0)):
        first = ", ".join(names.describe(int(label)) for label in np.flatnonzero(counts == 0)[:NUM_NAMED])
        yield Alert(f"{count(num_empty)} of {count(len(counts))} classes have no record: {first}.", "classes")
    median = float(np.median(counts))
    small = np.flatnonzero((counts > 0) & (counts < FEW_OF_MEDIAN * median))
    if len(small):
        lines = [f"{names.describe(int(i))} has {counts[i]}" for i in small[np.argsort(counts[small], kind="stable")]]
        rest = f", and {len(lines) - NUM_NAMED} more are as small" if len(lines) > NUM_NAMED else ""
        yield Alert(
            f"Classes with less than a tenth of the median's {median:g} records: {', '.join(lines[:NUM_NAMED])}{rest}.",
            "classes",
        )


def _pictures(facts: StoreFacts) -> Iterator[Alert]:
    num_stored = facts.summary["num_stored"]
    if facts.num_enlarged > SHARE_ENLARGED * num_stored:
        yield Alert(
            f"{share(facts.num_enlarged, num_stored)} of pictures were enlarged: they have fewer pixels than their "
            "bucket.",
            "buckets",
        )
    if facts.num_copies:
        have = "picture has" if facts.num_copies == 1 else "pictures have"
        yield Alert(f"{count(facts.num_copies)} {have} the same bytes as an earlier one.", "records")


def share(part: int, whole: int) -> str:
    """A share in percent, with two digits: "0.4 %"."""
    percent = 100 * part / max(1, whole)
    return f"{percent:.0f} %" if percent >= 10 or not part else f"{percent:.2g} %"
