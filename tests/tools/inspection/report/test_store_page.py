"""What stands in the page of a store that has everything a page can show, against the store's own arrays and tables."""

from __future__ import annotations

import json
import shutil
from collections import Counter

import numpy as np
import pytest
from html_elements import Elements
from making import CPU, caption_recipe, make_caption_folder, no_progress

from leandit.datasets.store import LatentStore
from leandit.precompute.pipeline import precompute
from leandit.tools.inspection.report.stores.report import report_stores
from leandit.tools.inspection.report.stores.sheets import SheetOptions

NUM_COPIES = 3


class Page:
    """The text of each section of a report, without line breaks."""

    def __init__(self, html: str) -> None:
        self.html = html
        self.sections: dict[str, str] = {}
        for part in html.split("<section")[1:]:
            name = part.partition('id="')[2].partition('"')[0]
            self.sections[name] = " ".join(" ".join(Elements(f"<section{part}").text).split())


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> tuple[LatentStore, Page]:
    """A store with narrowed captions, rejects, copies, and a caption that stands often; and its page."""
    root = tmp_path_factory.mktemp("full")
    source = make_caption_folder(root / "source")
    lines = [json.loads(line) for line in (source / "metadata.jsonl").read_text().splitlines()]
    for number in range(NUM_COPIES):
        shutil.copy(source / "images/0.png", source / f"images/copy{number}.png")
        lines.append({"file_name": f"images/copy{number}.png", "captions": ["a red circle", "word " * 30]})
    whole = (source / "images/0.png").read_bytes()
    for number, content in enumerate([b"no picture", whole[: len(whole) // 2]]):
        (source / f"images/broken{number}.png").write_bytes(content)
        lines.append({"file_name": f"images/broken{number}.png", "captions": [f"broken {number}"]})
    (source / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    precompute(
        caption_recipe("store.text_dtype=int8"),
        source_path=source,
        store_path=root / "store",
        device=CPU,
        progress=no_progress,
    )
    report_stores([str(root / "store")], root / "report.html", SheetOptions(source=[str(source)]), progress=no_progress)
    return LatentStore(root / "store"), Page((root / "report.html").read_text())


def test_rejects_have_a_name_a_reason_and_a_place_for_their_picture(full: tuple[LatentStore, Page]) -> None:
    _, page = full
    assert "planned 19 stored 17 rejected 2 (11 %)" in page.sections["records"]
    assert "rejected for pictures which means not_an_image 1 the bytes" in page.sections["records"]
    assert "images/broken0.png not_an_image" in page.sections["records"]
    assert "images/broken1.png truncated" in page.sections["records"]
    assert page.html.count('class="no-picture"') == 2


def test_pictures_with_the_same_bytes_are_counted_and_named(full: tuple[LatentStore, Page]) -> None:
    _, page = full
    assert f"copies of an earlier picture {NUM_COPIES}" in page.sections["records"]
    assert "4 images/0.png, images/copy0.png, images/copy1.png, images/copy2.png" in page.sections["records"]
    assert f"{NUM_COPIES} pictures have the same bytes as an earlier one." in page.sections["warnings"]


def test_longest_and_most_repeated_captions_are_those_of_the_source(full: tuple[LatentStore, Page]) -> None:
    store, page = full
    text, uses = page.sections["captions"], Counter[str]()
    ids = [store.index(bucket).caption_ids for bucket in store.buckets]
    for number in np.concatenate(ids):
        uses[store.captions["text"][int(number)].as_py()] += 1
    (first, most), (second, fewer) = uses.most_common(2)
    assert most > fewer
    assert f"Most repeated uses caption {most} {first} {fewer} {second}" in text
    longest = max(uses, key=len)
    assert f"Longest characters caption {len(longest)} {longest.strip()}" in text
    assert f"captions of records {uses.total()} distinct {len(uses)} (" in text
    assert "of rejected pictures alone 1 empty" in text  # the truncated one's: the other was not planned
    assert f"{len(uses)} distinct captions" in " ".join(Elements(page.html).text).replace("\n", "")
    cut = [row["truncated"] for row in store.captions.to_pylist() if row["text"] in uses]
    assert f"tokens {sum(cut)} ({100 / len(cut):.2g} %)" in text.partition("cut at ")[2]
    assert f"({sum(cut)} of {len(cut)}) are cut at" in page.sections["warnings"]


def test_the_quality_of_narrowed_embeddings_is_told(full: tuple[LatentStore, Page]) -> None:
    store, page = full
    cosines = store.captions["min_cosine"].to_numpy()
    expected = f"at least {cosines.min():.6f}, median {np.median(cosines):.6f}"
    assert f"cosine with the encoder's {expected}" in page.sections["captions"]


def test_channels_have_their_statistics_beside_what_is_expected(full: tuple[LatentStore, Page]) -> None:
    store, page = full
    spec, text = store.spec.latent, page.sections["latents"]
    assert spec.kind == "mean_logvar"
    values = [store.latents(bucket).take(store.index(bucket).rows).astype(np.float64) for bucket in store.buckets]
    for channel in range(spec.channels):
        numbers = np.concatenate([rows[:, channel].ravel() for rows in values])
        noise = np.concatenate([np.exp(rows[:, spec.channels + channel]).ravel() for rows in values])
        mean = (numbers.mean() - spec.shift[channel]) * spec.scale[channel]
        std = np.sqrt(numbers.var() + noise.mean()) * spec.scale[channel]  # of what is drawn from the posterior
        assert f"{channel} {mean:.3f} 0 {std:.3f} 1" in text
    assert "statistics of all 17 records" in text


def test_bytes_stand_beside_those_of_a_file_for_each_record(full: tuple[LatentStore, Page]) -> None:
    store, page = full
    sizes = {"latents": 0, "captions": 0}
    for path in store.path.rglob("c/**/*"):
        part = "latents" if "buckets" in path.relative_to(store.path).parts else "captions"
        if path.is_file() and not {"offsets", "lengths"} & set(path.parts):
            sizes[part] += path.stat().st_size
    text = page.sections["bytes"]
    for part, size in sizes.items():
        assert f"{part} {size / 1024:.1f} KiB (" in text
    assert "as a file for each record" in text
    assert "times as much" in text
    assert "Bytes of each part, beside a file for each record" in text


def test_time_is_told_by_stage(full: tuple[LatentStore, Page]) -> None:
    _, page = full
    stages = page.sections["identity"].partition("time by stage, with pauses ")[2].split(" encoder ")[0].split(", ")
    names = [stage.rsplit(" ", 2)[0] for stage in stages]
    assert names == ["captions", "first pictures", "other pictures", "sealing"]
    assert all(float(stage.split(" ")[-2]) >= 0 for stage in stages)
