"""The report of stores: numbers, each warning by its rule, images, several stores side by side, harmless text."""

from __future__ import annotations

import copy
import re
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import making
import numpy as np
import pytest
from faults import without_seal
from making import (
    caption_recipe,
    label_recipe,
    make_caption_folder,
    make_class_folder,
    read_metadata,
    smooth_image,
    write_metadata,
)
from noise_store import make_store
from stores import rewrite_recipe
from typer.testing import CliRunner
from view_sites import Elements, hostile_store

from leandit.datasets.format.schema import LatentStatistics
from leandit.datasets.store import LatentStore
from leandit.errors import EncoderError, StoreNotFound
from leandit.tools.cli.commands import app
from leandit.tools.inspection.report import store_page
from leandit.tools.inspection.report.rules import TABLE, alerts_of
from leandit.tools.inspection.store_facts import StoreFacts

NUM_COPIES = 3
SECTIONS = ("buckets", "captions", "classes", "latents")  # that have charts


class Page(NamedTuple):
    """A report: its HTML, and the text of each section in one line."""

    html: str
    sections: dict[str, str]


def page_of(store: Path | LatentStore, out: Path, options: tuple[str, ...] = ("--count", "2")) -> Page:
    """The page that ``report`` writes."""
    target = str(store.path if isinstance(store, LatentStore) else store)
    result = CliRunner().invoke(app, ["report", target, "--out", str(out / "report.html"), *options])
    if result.exception:
        raise result.exception
    html, sections = (out / "report.html").read_text(), {}
    for part in html.split("<section")[1:]:
        name = part.partition('id="')[2].partition('"')[0]
        sections[name] = " ".join(" ".join(Elements(f"<section{part}").text).split())
    return Page(html, sections)


def encode(recipe: Any, source: Path, store: Path) -> LatentStore:
    making.encode(recipe, source, store)
    return LatentStore(store)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> tuple[LatentStore, Page]:
    """A store with narrowed captions, rejects, copies, and a caption that is repeated; and its page."""
    root = tmp_path_factory.mktemp("full")
    source = make_caption_folder(root / "source")
    rows, whole = read_metadata(source), (source / "images/0.png").read_bytes()
    files = {f"copy{number}": whole for number in range(NUM_COPIES)}
    files |= {"broken0": b"no image", "broken1": whole[: len(whole) // 2]}
    for name, content in files.items():
        (source / f"images/{name}.png").write_bytes(content)
        captions = ["a red circle", "word " * 30] if "copy" in name else [name]
        rows.append({"file_name": f"images/{name}.png", "captions": captions})
    write_metadata(source, rows)
    store = encode(caption_recipe("store.text_dtype=int8"), source, root / "store")
    return store, page_of(store, out=root)


@pytest.fixture
def without_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Charts take most of the time of a page."""
    monkeypatch.setattr(store_page, "store_charts", lambda _: {key: [] for key in SECTIONS})


def test_text_of_a_store_makes_no_element(tmp_path: Path) -> None:
    store = hostile_store(tmp_path)
    html = page_of(store, out=tmp_path).html
    elements = Elements(html)
    assert not {"script", "i", "u", "iframe", "link"} & set(elements.names)
    assert not [name for name, _ in elements.attributes if name.startswith("on")]
    # Each of the tiles has one <b> of the template; a caption that made one would add to them.
    assert elements.names.count("b") == sum(tile.count("<b>") for tile in html.split('<div class="tiles">')[1:])
    assert [character for character in html if not character.isprintable() and character != "\n"] == []
    assert "<b>gone.png" in "".join(elements.text)
    links = [value for name, value in elements.attributes if name in ("src", "href", "xlink:href")]
    assert len(links) > 8
    assert [link for link in links if not link.startswith(("data:image/", "#"))] == []


@pytest.mark.parametrize("name", ["label_store", "caption_store", "three_text_store"])
def test_a_page_shows_the_numbers_of_a_store(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    store: LatentStore = request.getfixturevalue(name)
    html, sections = page_of(store, out=tmp_path)
    assert store.root_hash in sections["identity"]
    assert store.spec.fingerprint in sections["identity"]
    for identity in (store.spec.vae, *(one.encoder for one in store.spec.text_encoders)):
        assert identity.weights_sha256 in sections["identity"]
    assert 'vae.model = "' in sections["identity"]
    assert f"{len(store)} records stored" in " ".join(" ".join(Elements(html).text).split())
    for bucket, num in store.buckets.items():
        assert f"{bucket}: {num} record" in sections["images"]
    expected = {"identity", "records", "buckets", "images", "latents", "bytes", "warnings", "rules"}
    expected |= ({"captions"} if store.texts else set()) | ({"classes"} if store.num_classes else set())
    assert sections.keys() == expected
    linked = {value for name, value in Elements(html).attributes if name == "href"}
    assert {f"#{id}" for id in expected - {"warnings"}} <= linked
    assert len(html) < 600_000
    assert name != "caption_store" or page_of(store, out=tmp_path / "again").html == html


@pytest.mark.usefixtures("without_charts")
def test_an_incomplete_store_is_reported_with_what_is_missing(class_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreNotFound):
        page_of(tmp_path / "nope", out=tmp_path)
    assert list(tmp_path.iterdir()) == []
    path = tmp_path / "store"
    without_seal(lambda: making.encode(label_recipe(), class_folder, path))
    (path / "revisions/000001/commits/buckets/32x32/000000.json").unlink()
    sections = page_of(path, out=tmp_path).sections
    assert "The store is not complete, missing 15 records: run the same precompute command" in sections["warnings"]
    assert "15 planned = 0 stored + 0 rejected + 15 missing" in sections["records"]


def test_rejects_and_copies_are_counted_and_named(full: tuple[LatentStore, Page]) -> None:
    _, (_, sections) = full
    assert "records 19 planned = 17 stored + 2 rejected" in sections["records"]
    assert "rejected for images which means not_an_image 1 the bytes" in sections["records"]
    assert "images/broken0.png not_an_image" in sections["records"]
    assert "images/broken1.png truncated" in sections["records"]
    assert "2 images were rejected, 11 % of 19: not_an_image 1, truncated 1." in sections["warnings"]
    assert f"duplicates {NUM_COPIES} repeat an earlier image" in sections["records"]
    assert "4 images/0.png, images/copy0.png, images/copy1.png, images/copy2.png" in sections["records"]
    assert f"{NUM_COPIES} images have the same bytes as an earlier one." in sections["warnings"]


def test_captions_are_counted_by_their_uses(full: tuple[LatentStore, Page]) -> None:
    store, page = full
    text, texts = page.sections["captions"], store.captions["text"].to_pylist()
    uses = Counter(texts[i] for bucket in store.buckets for i in store.index(bucket).caption_ids)
    (first, most), (second, fewer) = uses.most_common(2)
    assert f"Most repeated uses caption {most} {first} {fewer} {second}" in text
    longest = max(uses, key=len)
    assert f"Longest characters caption {len(longest)} {longest.strip()}" in text
    assert f"captions of records {uses.total()}, {len(uses)} (" in text
    assert "unused 1, of no stored record" in text  # the truncated one's: the other was not planned
    cut = [row["truncated"] for row in store.captions.to_pylist() if row["text"] in uses]
    assert f"({sum(cut)} of {len(cut)}) are cut at" in page.sections["warnings"]


@pytest.fixture(scope="module")
def facts(caption_store: LatentStore) -> StoreFacts:
    """Facts of a store that gives no warning but those that a test causes."""
    found = StoreFacts(LatentStore(caption_store.path))
    found.statistics = LatentStatistics(count=9, channel_mean=[0.0] * 4, channel_std=[1.0] * 4)
    found.sources |= {"num_enlarged": 0, "num_duplicates": 0}
    found.min_psnr_db = 15.0
    return found


STATISTICS = LatentStatistics(count=9, channel_mean=[0, 3.1, 0, 0], channel_std=[1, 1, 1, 0.19])
REJECTED = {"num_planned": 26, "num_rejected": 12, "rejects": {"truncated": 12}}
REPEATED = {"most_uses": 12, "repeated": [("a cat", 12)], "num_empty": 3}
CHANNELS = "channel 1's mean is 3.1, expected 0, channel 3's standard deviation is 0.19,"
CAPTIONS = 'One caption appears 12 times in a store of 14 records: "a cat".', "11 % of captions are empty"
CLASSES = "1 of 5 classes have no record: 2.", "median's 90 records: 1 has 3."
BROKEN: list[tuple[str, Any, dict[str, str]]] = [
    ("min_psnr_db", 15.0, {}),
    ("records", REJECTED, {"rejected": "12 images were rejected, 46 % of 26: truncated 12."}),
    ("statistics", STATISTICS, {"channels": CHANNELS}),
    ("captions", REPEATED, {"repeated": CAPTIONS[0], "empty_captions": CAPTIONS[1]}),
    ("classes", np.array([100, 3, 0, 120, 90]), {"empty_classes": CLASSES[0], "small_classes": CLASSES[1]}),
    ("self_check", {"median_psnr_db": 12.25}, {"self_check": "PSNR of 12.2 dB (median), below the limit of 15 dB"}),
    ("sources", {"num_duplicates": 2}, {"copies": "2 images have the same bytes"}),
    ("sources", {"num_enlarged": 7}, {"enlarged": "50 % of images were enlarged"}),
    ("features", {"dino": {"min_cosine": 0.9}}, {"cosines": "feature dino: a stored token has a cosine of 0.9"}),
]


@pytest.mark.parametrize(("name", "value", "expected"), BROKEN)
def test_each_rule_warns(name: str, value: Any, expected: dict[str, str], facts: StoreFacts) -> None:
    spoiled = copy.copy(facts)
    known = getattr(facts, name)
    setattr(spoiled, name, known | value if isinstance(known, dict) else value)
    alerts = alerts_of("store", spoiled)
    assert [alert.section for alert in alerts] == [TABLE["store"][rule][0] for rule in expected]
    for alert, sentence in zip(alerts, expected.values(), strict=True):
        assert sentence in alert.text


@pytest.mark.usefixtures("without_charts")
def test_without_a_vae_channels_are_shown(
    label_store: LatentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(shutil.copytree(label_store.path, tmp_path / "store"))
    rewrite_recipe(path, lambda recipe: recipe["vae"].__setitem__("model", str(tmp_path / "gone")))
    page = page_of(path, out=tmp_path)
    assert "the first channels of the latents, not images" in page.sections["images"]
    assert page.html.count("data:image/webp") == 2
    with pytest.raises(EncoderError, match="gone"):
        page_of(label_store, out=tmp_path, options=("--vae", str(tmp_path / "gone")))
    monkeypatch.setitem(sys.modules, "torch", None)
    page = page_of(label_store, out=tmp_path)
    assert "the autoencoder cannot be loaded. torch is not installed" in page.sections["images"]
    assert page.html.count("data:image/webp") == 2


def test_many_buckets_share_the_images_of_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_page, "MAX_IMAGES", 12)
    monkeypatch.setattr(store_page, "MAX_BUCKETS", 5)
    monkeypatch.setattr(store_page, "_decoder", lambda *_: (lambda _row: np.zeros((8, 8, 3), np.uint8), ""))
    make_store(tmp_path / "s", {f"{64 + 8 * i}x64": 3 + i for i in range(8)}, num_classes=50)
    page = page_of(tmp_path / "s", out=tmp_path, options=())
    assert page.html.count("data:image/webp") == 5 * 2
    assert "The 5 buckets with the most records are shown, of 8." in page.sections["images"]
    assert "Records of each class, the largest first" in page.sections["classes"]
    assert "images" not in page_of(tmp_path / "s", out=tmp_path, options=("--count", "0")).sections


@pytest.mark.usefixtures("without_charts")
def test_every_revision_is_listed(tmp_path: Path) -> None:
    source = make_class_folder(tmp_path / "train", classes=2, per_class=2)
    hashes = []
    for number in (1, 2):
        smooth_image(50 + number).save(source / f"n000/new{number}.png")
        hashes.append(encode(label_recipe(), source, tmp_path / "s").root_hash)
    html = page_of(tmp_path / "s", out=tmp_path).html
    rows = re.findall(r"<tr><td>(\d)</td><td>(\d)</td>.*?<td>([0-9a-f]{64})</td>", html)
    assert rows == [("1", "5", hashes[0]), ("2", "6", hashes[1])]
