"""What a report of a store says first: each warning has a rule with a limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..store_facts import MEAN_LIMIT, STD_LIMITS, StoreFacts
from ..store_text import AGAIN, share
from .page import Alert, several

FEW_OF_MEDIAN = 0.1  # of the median class's records; a class with fewer is small
SHARE_OF_ONE_CAPTION = 0.01  # of all records; a caption that more of them have is odd
MIN_EQUAL = 10  # records with one caption, in small stores
SHARE_ENLARGED = 0.01
COSINE_LIMIT = 0.99  # between a token as encoded and as stored
NUM_NAMED = 3


def find_alerts(facts: StoreFacts) -> list[Alert]:
    """The warnings about a store, the gravest first."""
    rules = (_state, _latents, _records, _captions, _quality, _classes, _sources)
    return [alert for rule in rules for alert in rule(facts)]


def _state(facts: StoreFacts) -> Iterator[Alert]:
    store, counts = facts.store, facts.records
    if not store.complete:
        missing = several(counts["num_planned"] - counts["num_stored"] - counts["num_rejected"], "record")
        yield Alert(f"The store is not complete, missing {missing}: {AGAIN}.", "records")
    elif store.unfinished_revision:
        yield Alert(f"Revision {store.unfinished_revision} is unfinished: {AGAIN}.", "identity")
    if not counts["num_stored"]:
        yield Alert("The store holds no record.", "records")


def _latents(facts: StoreFacts) -> Iterator[Alert]:
    found, check, limit = facts.latents, facts.self_check, facts.min_psnr_db
    if found["num_nonfinite"]:
        counted = f"{found['num_nonfinite']:,} of {found['num_rows_read']:,} latents that were read are not finite"
        yield Alert(f"{counted}: run leandit verify.", "latents")
    unusual = []
    for channel in facts.suspicious_channels:
        mean, std = facts.statistics.channel_mean[channel], facts.statistics.channel_std[channel]
        if not STD_LIMITS[0] <= std <= STD_LIMITS[1]:
            unusual.append(f"channel {channel}'s standard deviation is {std:.3g}, expected 1")
        if abs(mean) > MEAN_LIMIT:
            unusual.append(f"channel {channel}'s mean is {mean:.3g}, expected 0")
    if unusual:
        yield Alert(f"As the model sees the latents, {_first(unusual)}.", "latents")
    if check and limit is not None and check["median_psnr_db"] < limit:
        median = f"PSNR of {check['median_psnr_db']:.1f} dB (median)"
        yield Alert(
            f"Images came back from the autoencoder with a {median}, below the limit of {limit:g} dB.", "latents"
        )


def _records(facts: StoreFacts) -> Iterator[Alert]:
    rejected, planned = facts.records["num_rejected"], facts.records["num_planned"]
    if rejected:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in facts.records["rejects"].items())
        were = f"{several(rejected, 'image')} {'was' if rejected == 1 else 'were'} rejected"
        yield Alert(f"{were}, {share(rejected, planned)} of {planned:,}: {reasons}.", "records")


def _captions(facts: StoreFacts) -> Iterator[Alert]:
    captions, stored = facts.captions, facts.records["num_stored"]
    if not captions or not stored:
        return
    for one in facts.spec.text_encoders:
        if cut := facts.used_lengths(one)["num_truncated"]:
            distinct, of = captions["num_distinct"], f" for the encoder '{one.name}'" if one.name else ""
            counted = f"{share(cut, distinct)} of captions ({cut:,} of {distinct:,})"
            yield Alert(f"{counted} are cut at {one.spec.max_tokens} tokens{of}.", "captions")
    if captions["most_uses"] >= max(MIN_EQUAL, SHARE_OF_ONE_CAPTION * stored):
        text = captions["repeated"][0][0][:80]
        uses = f"One caption appears {captions['most_uses']:,} times in a store of {stored:,} records"
        yield Alert(f'{uses}: "{text}".', "captions")
    if captions["num_empty"]:
        yield Alert(f"{share(captions['num_empty'], captions['num_uses'])} of captions are empty.", "captions")


def _quality(facts: StoreFacts) -> Iterator[Alert]:
    texts = facts.spec.text_encoders if facts.captions else []
    measured = {f"captions {one.name}".strip(): facts.caption_quality(one) for one in texts}
    measured |= {f"feature {name}": feature for name, feature in facts.features.items()}
    for name, quality in measured.items():
        if (cosine := quality["min_cosine"]) is not None and cosine < COSINE_LIMIT:
            yield Alert(f"{name}: a stored token has a cosine of {cosine:.4f} with the encoder's.", "captions")


def _classes(facts: StoreFacts) -> Iterator[Alert]:
    if (counts := facts.classes) is None:
        return
    describe, median = facts.store.class_names.describe, float(np.median(counts))
    empty = np.flatnonzero(counts == 0).tolist()
    small = np.flatnonzero((counts > 0) & (counts < FEW_OF_MEDIAN * median))
    small = small[np.argsort(counts[small], kind="stable")].tolist()
    if empty:
        named = ", ".join(map(describe, empty[:NUM_NAMED]))
        yield Alert(f"{len(empty):,} of {len(counts):,} classes have no record: {named}.", "classes")
    if small:
        named = _first([f"{describe(label)} has {counts[label]}" for label in small])
        yield Alert(f"Classes with less than a tenth of the median's {median:g} records: {named}.", "classes")


def _sources(facts: StoreFacts) -> Iterator[Alert]:
    stored, enlarged, same = facts.records["num_stored"], facts.sources["num_enlarged"], facts.sources["num_duplicates"]
    if enlarged > SHARE_ENLARGED * stored:
        fewer = "they have fewer pixels than their bucket"
        yield Alert(f"{share(enlarged, stored)} of images were enlarged: {fewer}.", "buckets")
    if same:
        have = f"{several(same, 'image')} {'has' if same == 1 else 'have'}"
        yield Alert(f"{have} the same bytes as an earlier one.", "records")


def _first(texts: Sequence[str]) -> str:
    rest = f", and {len(texts) - NUM_NAMED} more" if len(texts) > NUM_NAMED else ""
    return f"{', '.join(texts[:NUM_NAMED])}{rest}"
