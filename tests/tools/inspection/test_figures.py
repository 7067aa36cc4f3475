"""Every figure of a store is the same in each form: text, JSON, report, site, card, and the result of a precompute."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hub_server import Hub
from making import CAPTION_RECIPE, Leandit, caption_recipe, encode, no_progress
from stores import ImageSource, copy_of, small_shards
from view_sites import ROOT, Elements, client, site

from leandit.datasets.store import LatentStore
from leandit.tools.export.publish import publish
from leandit.tools.inspection.report import store_page

SETTINGS = ('captions.sample=["a red fox", "a red circle"]', "store.text_dtype=int8", "text.max_tokens=12")


class Figures(NamedTuple):
    """What a store holds, counted from its tables."""

    stored: int
    rejected: int
    reasons: dict[str, int]
    captions: int  # in the store
    tokens: int
    used: int  # distinct ones, of stored records
    uses: int
    lengths: list[int]  # in tokens, of used ones
    truncated: int
    min_cosine: float


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A source and its store: with rejects, replaced and dropped records, one sample caption of its own."""
    root = tmp_path_factory.mktemp("figures")
    images, store = ImageSource(root / "source"), root / "store"
    images.describe(0, " and an orange moon")
    images.write()
    with small_shards():
        encode(caption_recipe(*SETTINGS), images.root, store)
        images.drop(0)
        images.put(1, seed=101)
        images.put(20, words=" and a yellow star")
        images.write()
        encode(caption_recipe(*SETTINGS), images.root, store, drop_gone=True)
    return images.root, store


@pytest.fixture(scope="module")
def right(made: tuple[Path, Path]) -> Figures:
    store = LatentStore(made[1])
    captions, records = store.captions.to_pylist(), store.records.to_pylist()
    stored = [row for row in records if row["status"] == "stored"]
    reasons = [row["reason"] for row in records if row["status"] == "rejected"]
    uses = [number for row in stored for number in row["caption_ids"]]
    used = [captions[number] for number in sorted(set(uses))]
    assert len(used) < len(captions) - 1  # some are of dropped records alone
    return Figures(
        stored=len(stored),
        rejected=len(reasons),
        reasons={reason: reasons.count(reason) for reason in sorted(set(reasons))},
        captions=len(captions),
        tokens=sum(row["num_tokens"] for row in captions),
        used=len(used),
        uses=len(uses),
        lengths=[row["num_tokens"] for row in used],
        truncated=sum(row["truncated"] for row in used),
        min_cosine=min(row["min_cosine"] for row in used),
    )


def percentile(lengths: list[int], percent: float) -> int:
    return int(np.percentile(lengths, percent, method="higher"))


def one_line(text: str) -> str:
    return " ".join(text.split())


def assert_text(text: str, right: Figures) -> None:
    """What ``inspect`` prints and the report shows, on one line."""
    planned = right.stored + right.rejected
    assert f"records {planned} planned = {right.stored} stored + {right.rejected} rejected" in text
    for reason, count in right.reasons.items():
        assert f"{reason} {count}" in text
    assert f"distinct captions {right.captions}, {right.tokens} tokens" in text
    assert f"captions of records {right.uses}, {right.used} (" in text
    shortest, longest = min(right.lengths), max(right.lengths)
    middle, high = percentile(right.lengths, 50), percentile(right.lengths, 95)
    assert f"tokens min {shortest}, median {middle}, 95 % {high}, max {longest}" in text
    assert f"{right.truncated} (" in text.split("95 %")[1][:60]
    assert f"cosine at least {round(right.min_cosine, 8)}" in text


def test_text_and_json_say_the_same(leandit: Leandit, made: tuple[Path, Path], right: Figures) -> None:
    store = LatentStore(made[1])
    text = leandit("inspect", store.path).out
    assert_text(one_line(text), right)
    told: dict[str, Any] = json.loads(leandit("inspect", store.path, "--json").out)
    assert (told["num_stored"], told["num_rejected"], told["rejects"]) == (right.stored, right.rejected, right.reasons)
    assert (told["num_captions"], told["num_caption_tokens"]) == (right.captions, right.tokens)
    assert (told["captions"]["num_distinct"], told["captions"]["num_uses"]) == (right.used, right.uses)
    assert told["captions"]["num_samples"] == 2
    lengths = told["caption_tokens"]
    assert [lengths[name] for name in ("min", "median", "p95", "max", "num_truncated")] == [
        *(percentile(right.lengths, percent) for percent in (0, 50, 95, 100)),
        right.truncated,
    ]
    assert sum(lengths["table"].values()) == right.used
    for span, count in lengths["table"].items():
        assert re.search(rf"^{span} tokens +{count} captions$", text, re.MULTILINE)
    assert told["caption_quality"]["min_cosine"] == round(right.min_cosine, 8)
    assert told["caption_quality"]["num_measured"] == right.used
    for name in ("num_unused", "num_empty", "most_uses"):
        label = {"num_unused": "unused", "num_empty": "empty", "most_uses": "most uses of one caption"}[name]
        assert f"{label} {told['captions'][name]}" in one_line(text)
    assert f"duplicates {told['sources']['num_duplicates']} repeat" in one_line(text)
    statistics = told["latent_statistics"]
    assert statistics["count"] == store.manifest.statistics.count
    for channel, mean in enumerate(statistics["channel_mean"]):
        line = f"{channel} {mean:.3f} {statistics['channel_std'][channel]:.3f}"
        assert (line in one_line(text), f"{line} <- unusual" in one_line(text)) == (
            True,
            channel in statistics["suspicious_channels"],
        )


def test_report_site_card_and_precompute_say_the_same(
    leandit: Leandit,
    made: tuple[Path, Path],
    right: Figures,
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, store = made[0], copy_of(made[1], tmp_path / "store")
    sections = ("buckets", "captions", "classes", "latents")
    monkeypatch.setattr(store_page, "store_charts", lambda _: {key: [] for key in sections})  # they take seconds
    assert leandit("report", store, "--out", tmp_path / "r.html", "--count", 0).code == 0
    page = one_line(" ".join(Elements((tmp_path / "r.html").read_text()).text))
    assert_text(page, right)
    assert f"{right.stored} records stored" in page
    assert f"{right.used} distinct captions of records" in page
    with client(site(LatentStore(store))) as web:
        head = one_line(re.sub(r"<[^>]*>", "", web.get(f"{ROOT}/").text))
    assert f"{right.stored} stored, {right.rejected} rejected" in head
    publish(store, "hf://datasets/somebody/figures", no_progress, licence="mit", encoder_licence="mit", private=True)
    card = hub.dataset("somebody/figures").files("main")["README.md"].content.decode().replace("\\_", "_")
    planned = right.stored + right.rejected
    assert f"{planned} planned = {right.stored} stored + {right.rejected} rejected" in card
    assert f"{right.captions} distinct, {right.tokens} tokens" in card
    for reason, count in right.reasons.items():
        assert f"| {reason} | {count} |" in card
    settings = [word for setting in (*CAPTION_RECIPE, *SETTINGS) for word in ("--set", setting)]
    where = ("--source", source, "--store", made[1], "--device", "cpu", "--drop-gone")
    result = one_line(leandit("precompute", "demo", *where, *settings).out)
    assert f"records {planned} planned = {right.stored} stored + {right.rejected} rejected" in result
    assert f"captions {right.captions} distinct, {right.tokens} tokens" in result
