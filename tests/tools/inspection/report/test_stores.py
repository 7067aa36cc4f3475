"""The report of stores: numbers, each warning by its rule, pictures, several side by side, text that does no harm."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from html_elements import Elements
from making import CPU, caption_recipe, label_recipe, make_class_folder, no_progress, picture

from leandit.datasets.errors import EncoderError, RecipeError, StoreNotFound
from leandit.datasets.format.schema import CheckedPicture, FeatureSpec, LatentStatistics, SelfCheck
from leandit.datasets.store import LatentStore
from leandit.precompute.pipeline import precompute
from leandit.tools.inspection.report.page import mib
from leandit.tools.inspection.report.stores import sheets
from leandit.tools.inspection.report.stores.alerts import find_alerts, share
from leandit.tools.inspection.report.stores.facts import ASPECT_EDGES, StoreFacts, read_facts, written_at
from leandit.tools.inspection.report.stores.report import duration, report_stores, short_names
from leandit.tools.inspection.report.stores.sheets import SheetOptions, choose_rows
from leandit.tools.synthetic.store import make_store

FEW = SheetOptions(count=2)
HOSTILE = (
    "<img src=x onerror=alert(1)><b>\u202etxt.exe\x1b[31m\u0007 \u05e9\u05dc\u05d5\u05dd "
    "</script><script>alert(2)</script>"
)


def page_of(*stores: Path | LatentStore, out: Path, options: SheetOptions = FEW) -> str:
    """The page of some stores."""
    targets = [str(store.path if isinstance(store, LatentStore) else store) for store in stores]
    report_stores(targets, out / "report.html", options, progress=no_progress)
    return (out / "report.html").read_text()


@pytest.fixture(scope="module")
def hostile_store(tmp_path_factory: pytest.TempPathFactory) -> LatentStore:
    """A store whose captions, keys and rejects hold markup and marks that change the direction of writing."""
    root = tmp_path_factory.mktemp("hostile")
    (root / "pictures").mkdir()
    names = ["<b>bold<", "\u202egnp.exe", "plain", "\u05e9\u05dc\u05d5\u05dd"]
    lines = []
    for i, name in enumerate(names):
        picture(i, 64, 64).save(root / f"pictures/{name}.png")
        lines.append(json.dumps({"file_name": f"{name}.png", "text": f"{HOSTILE} a red circle {i}"}))
    (root / "pictures/<i>broken.png").write_text("no picture")
    lines.append(json.dumps({"file_name": "<i>broken.png", "text": HOSTILE}))
    (root / "pictures/metadata.jsonl").write_text("\n".join(lines))
    recipe = caption_recipe()
    precompute(recipe, source_path=root / "pictures", store_path=root / "<u>store", device=CPU, progress=no_progress)
    return LatentStore(root / "<u>store")


def test_text_of_a_store_makes_no_element(hostile_store: LatentStore, tmp_path: Path) -> None:
    options = SheetOptions(count=8, source=[str(hostile_store.path.parent / "pictures")])
    html = page_of(hostile_store, hostile_store, out=tmp_path, options=options)
    elements = Elements(html)
    assert not {"script", "b ", "i", "u", "iframe", "link"} & set(elements.names)
    assert not [name for name, _ in elements.attributes if name.startswith("on")]
    # Each of the tiles has one <b> of the template; a caption that made one would add to them.
    tiles = html.count('<div class="tiles">')
    assert elements.names.count("b") == sum(block.count("<b>") for block in html.split('<div class="tiles">')[1:])
    assert tiles == 2
    assert [character for character in html if not character.isprintable() and character != "\n"] == []
    text = "".join(elements.text)
    assert "<b>bold<" in text
    assert r"\u202etxt.exe\x1b[31m" in text
    assert "\u05e9\u05dc\u05d5\u05dd" in text
    links = [value for name, value in elements.attributes if name in ("src", "href", "xlink:href")]
    assert len(links) > 8
    assert [link for link in links if not link.startswith(("data:image/", "#"))] == []


@pytest.mark.parametrize("name", ["label_store", "caption_store", "three_text_store"])
def test_a_page_shows_the_numbers_of_a_store(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    store: LatentStore = request.getfixturevalue(name)
    html = page_of(store, out=tmp_path)
    text = " ".join(" ".join(Elements(html).text).split())
    assert store.root_hash
    assert store.root_hash in text
    assert store.spec.fingerprint in text
    assert f"{len(store)} records stored" in text
    for bucket, num in store.buckets.items():
        assert f"{bucket}: {num} record" in text
    for identity in (store.spec.vae, *(one.encoder for one in store.spec.text_encoders)):
        assert identity.weights_sha256 in text
    assert 'vae.model = "' in text
    present = {value for name, value in Elements(html).attributes if name == "id" and "-" not in value}
    expected = {"identity", "records", "buckets", "pictures", "latents", "bytes", "warnings"}
    expected |= {"captions"} if store.texts else set()
    assert present - {"classes"} == expected
    assert ("classes" in present) == bool(store.num_classes)
    linked = {value for name, value in Elements(html).attributes if name == "href"}
    assert {f"#{id}" for id in present - {"warnings"}} <= linked
    assert len(html) < 600_000


def test_the_same_store_makes_the_same_page(caption_store: LatentStore, tmp_path: Path) -> None:
    assert page_of(caption_store, out=tmp_path / "a") == page_of(caption_store, out=tmp_path / "b")


def test_several_stores_share_charts_and_have_columns(
    caption_store: LatentStore, label_store: LatentStore, tmp_path: Path
) -> None:
    shutil.copytree(caption_store.path, tmp_path / "one")
    shutil.copytree(label_store.path, tmp_path / "two")
    html = page_of(tmp_path / "one", tmp_path / "two", out=tmp_path)
    elements = Elements(html)
    assert "one and two" in elements.text
    assert elements.text.count("Records of each bucket") == 1
    assert elements.text.count("Shapes of the source pictures") == 1
    row = html[html.index("<bdi>root hash</bdi>") :].split("</tr>")[0]
    assert caption_store.root_hash in row
    assert label_store.root_hash in row


def test_an_incomplete_store_is_reported_with_what_is_missing(label_store: LatentStore, tmp_path: Path) -> None:
    path = Path(shutil.copytree(label_store.path, tmp_path / "store"))
    (path / "manifest.json").unlink()
    (path / "commits/buckets/32x32/000000.json").unlink()
    html = page_of(path, out=tmp_path)
    assert "The store is not complete: 15 records are missing." in html


def test_what_is_no_store_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFound):
        page_of(tmp_path / "nope", out=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_rejects_are_counted_and_shown_where_the_source_is_given(tmp_path: Path) -> None:
    source = make_class_folder(tmp_path / "train")
    whole = (source / "n001/2.png").read_bytes()
    (source / "n001/2.png").write_bytes(whole[: len(whole) // 2])
    (source / "n002/3.png").write_bytes(b"no picture")
    precompute(label_recipe(), source_path=source, store_path=tmp_path / "s", device=CPU, progress=no_progress)
    without = page_of(tmp_path / "s", out=tmp_path)
    assert "2 pictures were rejected, 13 % of 15:" in without
    assert "not_an_image 1" in without
    assert "n002/3.png" in without
    assert 'class="no-picture"' not in without
    shown = page_of(tmp_path / "s", out=tmp_path, options=SheetOptions(count=2, source=[str(source)]))
    assert shown.count('class="no-picture"') == 2


def facts_of(facts: StoreFacts, **summary: Any) -> StoreFacts:
    """The facts with other values in the summary."""
    return dataclasses.replace(facts, summary=facts.summary | summary)


@pytest.fixture(scope="module")
def facts(caption_store: LatentStore) -> StoreFacts:
    """Facts of a store that gives no warning but those that a test causes."""
    found = read_facts(caption_store, "store")
    channels = LatentStatistics(count=9, channel_mean=[0.0] * 4, channel_std=[1.0] * 4)
    return dataclasses.replace(found, channels=channels, num_enlarged=0, num_copies=0)


def test_a_store_without_faults_has_no_warning(facts: StoreFacts) -> None:
    assert find_alerts(facts) == []


def spoiled_channels(facts: StoreFacts) -> StoreFacts:
    stats = LatentStatistics(count=9, channel_mean=[0, 0.7, 0, 0], channel_std=[1, 1, 1, 0.61])
    return dataclasses.replace(facts, channels=stats)


def with_tokens(facts: StoreFacts) -> StoreFacts:
    one = dataclasses.replace(facts.tokens[0], max_tokens=300, tokens=np.full(1000, 300), num_truncated=4)
    return dataclasses.replace(facts, tokens=[one])


def with_one_caption(facts: StoreFacts) -> StoreFacts:
    assert facts.captions
    return dataclasses.replace(
        facts, captions=dataclasses.replace(facts.captions, most_records=12, repeated=[("a cat", 12)], num_empty=3)
    )


def with_classes(facts: StoreFacts) -> StoreFacts:
    return dataclasses.replace(facts, classes=np.array([100, 3, 0, 120, 90]))


def with_self_check(facts: StoreFacts) -> StoreFacts:
    check = SelfCheck(
        pictures=[CheckedPicture(key="k", psnr_db=12.25)], channel_mean=[0.0] * 4, channel_std=[1.0] * 4
    ).model_dump()
    return facts_of(facts, self_check=check | {"median_psnr_db": 12.25})


@pytest.mark.parametrize(
    ("spoil", "section", "sentences"),
    [
        (lambda f: facts_of(f, complete=False, num_planned=20), "records", ["not complete: 6 records are missing."]),
        (lambda f: facts_of(f, unfinished_revision=3), "identity", ["Revision 3 is unfinished."]),
        (
            lambda f: facts_of(f, num_planned=26, num_rejected=12, rejects={"truncated": 12}),
            "records",
            ["12 pictures were rejected, 46 % of 26: truncated 12."],
        ),
        (spoiled_channels, "latents", ["channel 1's mean is 0.7, expected 0, channel 3's standard deviation is 0.61,"]),
        (with_tokens, "captions", ["0.4 % of captions (4 of 1,000) are cut at 300 tokens."]),
        (
            with_one_caption,
            "captions",
            ['One caption stands 12 times, in a store of 14 records: "a cat".', "are empty"],
        ),
        (with_classes, "classes", ["1 of 5 classes have no record: 2.", "median's 90 records: 1 has 3."]),
        (with_self_check, "latents", ["PSNR of 12.2 dB (median), below the limit of 15 dB."]),
        (lambda f: dataclasses.replace(f, num_copies=2), "records", ["2 pictures have the same bytes"]),
        (lambda f: dataclasses.replace(f, num_enlarged=7), "buckets", ["50 % of pictures were enlarged"]),
    ],
)
def test_each_rule_warns(
    spoil: Callable[[StoreFacts], StoreFacts], section: str, sentences: list[str], facts: StoreFacts
) -> None:
    facts.store.spec.recipe.setdefault("vae", {})["min_psnr"] = 15.0
    alerts = find_alerts(spoil(facts))
    assert [alert.section for alert in alerts] == [section] * len(sentences)
    for alert, sentence in zip(alerts, sentences, strict=True):
        assert sentence in alert.text


def test_numbers_come_from_the_columns(tmp_path: Path) -> None:
    source = make_class_folder(tmp_path / "train")
    picture(7, 20, 60).save(source / "n000/wide.png")  # fewer pixels than its bucket
    shutil.copy(source / "n001/1.png", source / "n002/copy.png")
    precompute(label_recipe(), source_path=source, store_path=tmp_path / "s", device=CPU, progress=no_progress)
    facts = read_facts(LatentStore(tmp_path / "s"), "s")
    assert (facts.num_copies, facts.num_enlarged) == (1, 1)
    assert facts.copies == [(2, ["n001/1.png", "n002/copy.png"])]
    assert facts.classes is not None
    assert facts.classes.tolist() == [6, 5, 6]
    assert facts.aspects is not None
    assert facts.aspects.sum() == 17
    place = int(np.searchsorted(ASPECT_EDGES, 20 / 60)) - 1
    assert facts.aspects[place] == 1
    assert facts.is_sealed
    assert list(facts.written) == ["planned", "pictures", "sealing"]


def test_captions_are_counted_by_their_uses(caption_store: LatentStore) -> None:
    captions = read_facts(caption_store, "s").captions
    assert captions
    assert (captions.num_uses, len(captions.characters)) == (28, 9)
    texts = caption_store.captions["text"].to_pylist()
    ids = np.concatenate([caption_store.index(bucket).caption_ids for bucket in caption_store.buckets])
    counted = sorted(((int(n), texts[i]) for i, n in enumerate(np.bincount(ids))), key=lambda pair: -pair[0])
    assert [n for _, n in captions.repeated] == [n for n, _ in counted if n > 1]
    assert captions.longest[0][1] == max(map(len, texts))


def test_dates_of_a_copy_are_not_taken_for_those_of_the_run(label_store: LatentStore, tmp_path: Path) -> None:
    path = Path(shutil.copytree(label_store.path, tmp_path / "store", copy_function=shutil.copy))
    later = (path / "manifest.json").stat().st_mtime + 100
    os.utime(path / "plan/plan.json", (later, later))
    assert written_at(LatentStore(path)) == {}


def test_bytes_of_separate_files_are_those_of_padded_captions_in_whole_blocks(caption_store: LatentStore) -> None:
    facts = read_facts(caption_store, "s")
    text = caption_store.spec.text
    assert text
    caption_bytes = text.max_tokens * text.width * 2
    parts, total = facts.separate_bytes, 0
    for bucket in caption_store.buckets:
        row_bytes, index = caption_store.latents(bucket).row_bytes, caption_store.index(bucket)
        for uses in np.diff(index.caption_starts):
            total += -(-(row_bytes + int(uses) * caption_bytes) // 4096) * 4096
    assert parts["captions"] == 28 * caption_bytes
    assert parts["total"] == total
    assert sum(size for name, size in parts.items() if name != "total") == total


def test_pictures_are_spread_over_a_score_or_drawn_by_seed(label_store: LatentStore) -> None:
    index = label_store.index("32x32")
    scores = np.full(len(label_store.checksums), np.nan)
    scores[index.records[3:]] = np.arange(len(index) - 3)[::-1]
    chosen = choose_rows(label_store, "32x32", 3, scores, 0)
    assert scores[index.records[chosen]].tolist() == [0, 6, 11]
    random = [choose_rows(label_store, "32x32", 5, None, seed).tolist() for seed in (0, 0, 1)]
    assert random[0] == random[1] != random[2]
    assert len(set(random[0])) == 5
    assert len(choose_rows(label_store, "32x32", 99, None, 0)) == len(index)


def test_scores_come_from_a_table_and_stand_at_the_pictures(label_store: LatentStore, tmp_path: Path) -> None:
    keys = label_store.records["key"].to_pylist()
    table = pa.table({"key": keys, "aesthetic": np.arange(len(keys)) + 0.25})
    pq.write_table(table, tmp_path / "scores.parquet")
    options = SheetOptions(count=3, scores=str(tmp_path / "scores.parquet"), score="aesthetic")
    html = page_of(label_store, out=tmp_path, options=options)
    assert re.findall(r"<bdi>([0-9.]+): n0", html) == ["0.25", "7.25", "14.25"]
    with pytest.raises(RecipeError, match="no column 'beauty'"):
        page_of(label_store, out=tmp_path, options=dataclasses.replace(options, score="beauty"))


def test_without_its_autoencoder_a_store_shows_channels_and_says_so(label_store: LatentStore, tmp_path: Path) -> None:
    path = Path(shutil.copytree(label_store.path, tmp_path / "store"))
    attributes = json.loads((path / "zarr.json").read_text())
    attributes["attributes"]["leandit"]["recipe"]["vae"]["model"] = str(tmp_path / "gone")
    (path / "zarr.json").write_text(json.dumps(attributes, sort_keys=True, indent=1) + "\n")
    (path / "manifest.json").unlink()  # whose hash of zarr.json no longer fits
    html = page_of(path, out=tmp_path)
    assert "the first channels of the latents, not pictures" in html
    assert html.count("data:image/webp") == 2
    with pytest.raises(EncoderError, match="gone"):
        page_of(label_store, out=tmp_path, options=SheetOptions(count=2, vae=str(tmp_path / "gone")))


def test_no_pictures_are_decoded_where_none_are_wanted(
    label_store: LatentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sheets, "_decoder", lambda *_: pytest.fail("loaded"))
    html = page_of(label_store, out=tmp_path, options=SheetOptions(count=0))
    assert "data:image/webp" not in html
    assert 'id="pictures"' not in html


def test_many_buckets_share_the_pictures_of_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sheets, "MAX_PICTURES", 12)
    monkeypatch.setattr(sheets, "MAX_BUCKETS", 5)
    monkeypatch.setattr(sheets, "_decoder", lambda *_: (lambda rows: [np.zeros((8, 8, 3), np.uint8)] * len(rows), ""))
    make_store(tmp_path / "s", {f"{64 + 8 * i}x64": 3 + i for i in range(8)}, num_classes=50)
    html = page_of(tmp_path / "s", out=tmp_path, options=SheetOptions(count=8))
    assert html.count("data:image/webp") == 5 * 2
    assert "The 5 buckets with the most records are shown, of 8." in html
    assert "Records of each class, the largest first" in html


def test_short_names_tell_stores_apart() -> None:
    assert short_names(["/a/x/", "/b/y"]) == ["x", "y"]
    assert short_names(["/a/store", "/b/store"]) == ["a/store", "b/store"]
    assert short_names(["s", "s"]) == ["s (1)", "s (2)"]


def test_shares_and_durations_are_short() -> None:
    assert [share(*pair) for pair in ((0, 9), (4, 1000), (1, 300000), (1, 2), (1, 0))] == [
        *("0 %", "0.4 %", "0.00033 %", "50 %", "100 %")
    ]
    assert [duration(s) for s in (3.21, 119, 840, 19200)] == ["3.2 s", "119.0 s", "14 min", "5 h 20 min"]


def test_without_torch_a_store_is_reported_all_the_same(
    label_store: LatentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    html = page_of(label_store, out=tmp_path)
    assert "the autoencoder cannot be loaded. torch is not installed" in html
    assert html.count("data:image/webp") == 2


def test_features_have_their_model_shape_and_bytes(tmp_path: Path) -> None:
    spec = FeatureSpec(
        output="patches", layer=-1, width=24, patch_px=16, resolution_px=64, images_px=64, dtype="float16"
    )
    make_store(tmp_path / "s", {"64x64": 5}, features={"dino": spec})
    html = page_of(tmp_path / "s", out=tmp_path)
    text = " ".join(Elements(html.split('id="features"')[1]).text)
    assert "4 x 4 patches, 24 wide" in " ".join(text.split())
    shards = [path for path in (tmp_path / "s/features").rglob("c/**/*") if path.is_file()]
    shards += [path for path in (tmp_path / "s/buckets").rglob("features/**/c/**/*") if path.is_file()]
    each = sum(path.stat().st_size for path in shards) / 5  # 16 patches of 24 numbers of 2 bytes, and of the index
    assert each > 16 * 24 * 2
    assert f"float16 {mib(each)} -" in " ".join(text.split())


def test_every_revision_is_listed(tmp_path: Path) -> None:
    source = make_class_folder(tmp_path / "train", classes=2, per_class=2)
    hashes = []
    for number in (1, 2):
        picture(50 + number).save(source / f"n000/new{number}.png")
        precompute(label_recipe(), source_path=source, store_path=tmp_path / "s", device=CPU, progress=no_progress)
        hashes.append(LatentStore(tmp_path / "s").root_hash)
    html = page_of(tmp_path / "s", out=tmp_path)
    rows = re.findall(r"<tr><td><bdi>(\d)</bdi></td><td><bdi>(\d)</bdi></td>.*?<bdi>([0-9a-f]{64})</bdi>", html)
    assert rows == [("1", "5", hashes[0]), ("2", "6", hashes[1])]
