"""``inspect``: its keys and figures, what it flags, and contact sheets."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from making import CPU, caption_recipe, no_progress, picture
from PIL import Image, ImageDraw, ImageFont

from leandit.datasets.batches.latents import draw_keys, final_latents
from leandit.datasets.errors import LeanditError, StoreError, StoreIncomplete
from leandit.datasets.maintenance.findings import Finding
from leandit.datasets.maintenance.verify import Verification
from leandit.datasets.store import LatentStore
from leandit.precompute.pipeline import precompute
from leandit.tools.inspection.contact_sheet import SheetOptions, read_originals, rejects_sheet, write_sheet
from leandit.tools.inspection.grid import (
    CELL_PX,
    FONT_PX,
    FRAME,
    GAP_PX,
    KEY_COLOUR,
    LINE_PX,
    MARGIN_PX,
    Cell,
    draw_sheet,
)
from leandit.tools.inspection.render import render, render_ledger, render_record
from leandit.tools.inspection.summary import describe_record, ledger, summarise
from leandit.tools.inspection.verify import render as render_verification

PROMISED = {
    *("num_planned", "num_stored", "num_rejected", "complete", "buckets", "num_captions", "num_caption_tokens"),
    *("bytes", "fingerprint", "latent", "text", "root_hash"),
}


def test_the_promised_keys_hold_the_values_of_the_store(label_store: LatentStore, caption_store: LatentStore) -> None:
    labels, captions = summarise(label_store), summarise(caption_store)
    for summary, store in ((labels, label_store), (captions, caption_store)):
        assert PROMISED - summary.keys() == set()
        assert summary["complete"] is True
        assert summary["buckets"] == dict(store.buckets)
        assert summary["fingerprint"] == store.spec.fingerprint
        assert summary["root_hash"] == store.root_hash
        assert summary["latent"] == store.spec.latent.model_dump()
        assert store.manifest is not None
        sizes = [path.stat().st_size for path in store.path.rglob("*") if path.is_file()]
        sealed = sum(entry.bytes for entry in store.manifest.files)
        assert summary["bytes"]["total"] == sealed <= sum(sizes)
        assert sum(size for part, size in summary["bytes"].items() if part != "total") == sealed
    assert [labels[key] for key in ("num_planned", "num_stored", "num_rejected", "num_captions")] == [15, 15, 0, 0]
    assert (labels["num_classes"], labels["text"], labels["num_caption_tokens"]) == (3, None, 0)
    assert (captions["num_planned"], captions["num_stored"]) == (14, 14)
    assert captions["buckets"] == {"48x80": 5, "64x64": 5, "80x48": 4}
    assert captions["num_captions"] == 3 + 6  # three short ones, and six pairs of shapes
    words = [text.split() for text in caption_store.captions["text"].to_pylist()]
    assert captions["num_caption_tokens"] == sum(len(w) + 1 for w in words)  # a word is a token, and an end mark
    assert captions["text"]["width"] == 64


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_the_quality_of_captions_is_told_where_they_were_narrowed(
    dtype: str, caption_folder: Path, tmp_path: Path
) -> None:
    recipe = caption_recipe(f"store.text_dtype={dtype}")
    precompute(recipe, source_path=caption_folder, store_path=tmp_path / "store", device=CPU, progress=no_progress)
    store = LatentStore(tmp_path / "store")
    summary = summarise(store)
    found, columns = summary["caption_quality"], store.captions.to_pydict()
    shards = [path for path in store.path.glob("captions/*/c/**/*") if path.is_file()]
    size = sum(p.stat().st_size for p in shards if "embeddings" in str(p) or "/scales/" in str(p))
    assert found["bytes_per_caption"] == round(size / 9, 1)
    assert found["fewer_than_padded_float16"] == round(64 * 2 * 16 / (size / 9), 2)
    assert summary["bytes"]["captions"] == size + sum(p.stat().st_size for p in shards if "/null" in str(p))
    if dtype == "float32":
        assert (found["num_measured"], found["min_cosine"], found["max_error"]) == (0, None, None)
        assert "cosine" not in render(summary)
        return
    assert found["num_measured"] == 9
    assert found["min_cosine"] == round(min(columns["min_cosine"]), 8) > 0.999
    assert found["median_cosine"] == round(float(np.median(columns["min_cosine"])), 8)
    assert found["max_error"] == round(max(columns["max_error"]), 8) > 0
    assert f"cosine at least {found['min_cosine']}" in render(summary)


@pytest.mark.parametrize("name", ["label_store", "caption_store"])
def test_the_summary_is_json_and_text(name: str, request: pytest.FixtureRequest) -> None:
    summary = summarise(request.getfixturevalue(name))
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    text = render(summary)
    assert summary["root_hash"] in text
    assert f"{summary['num_stored']} stored" in text


def test_channel_statistics_are_those_of_the_latents_that_training_reads(caption_store: LatentStore) -> None:
    drawn = []
    for epoch in range(20):
        for bucket in caption_store.buckets:
            index = caption_store.index(bucket)
            stored = torch.from_numpy(caption_store.latents(bucket).take(index.rows))
            keys = draw_keys(0, np.full(len(index), epoch), index.records)
            latents = final_latents(stored, caption_store.spec.latent, keys).numpy()
            drawn.append(latents.transpose(1, 0, 2, 3).reshape(latents.shape[1], -1))
    values = np.concatenate(drawn, axis=1)
    statistics = summarise(caption_store)["latent_statistics"]
    np.testing.assert_allclose(statistics["channel_mean"], values.mean(1), atol=0.01)
    np.testing.assert_allclose(statistics["channel_std"], values.std(1), atol=0.01)
    assert (statistics["num_rows_read"], statistics["num_nonfinite"]) == (14, 0)


@pytest.fixture
def spoiled(label_store: LatentStore, tmp_path: Path) -> tuple[LatentStore, str]:
    """A copy of the store whose fourth row was overwritten with NaN, and the key of that row's record."""
    path = shutil.copytree(label_store.path, tmp_path / "store")
    layout, shard = label_store.latents("32x32").locate(3)
    with open(path / layout.shard_path(shard), "r+b") as file:
        file.seek(3 * layout.row_bytes)
        file.write(np.full(layout.shape[1:], np.nan, layout.dtype).tobytes())
    store = LatentStore(path)
    index = store.index("32x32")
    return store, store.record_at(int(index.records[list(index.rows).index(3)])).key


def test_a_row_of_nan_is_counted_and_named(spoiled: tuple[LatentStore, str]) -> None:
    summary = summarise(spoiled[0])
    statistics = summary["latent_statistics"]
    assert (statistics["num_nonfinite"], statistics["nonfinite"]) == (1, ["32x32, row 3"])
    assert np.isfinite(statistics["channel_mean"]).all()
    assert "1 rows are not finite" in render(summary)
    assert "32x32, row 3" in render(summary)


def test_a_record_of_nan_is_still_valid_json(spoiled: tuple[LatentStore, str]) -> None:
    store, key = spoiled
    values = describe_record(store, store.record(key))
    assert values["finite"] is False
    json.dumps(values, allow_nan=False)


def test_an_unusual_scale_is_flagged(label_store: LatentStore, tmp_path: Path) -> None:
    path = shutil.copytree(label_store.path, tmp_path / "store")
    attributes = json.loads((path / "zarr.json").read_text())
    latent = attributes["attributes"]["leandit"]["latent"]
    latent["scale"] = [value * 5.5 for value in latent["scale"]]
    text = json.dumps(attributes, sort_keys=True, indent=1)
    whole = (path / "zarr.json").stat().st_size
    (path / "zarr.json").write_text(text + " " * max(0, whole - len(text)))
    if (path / "manifest.json").exists():
        (path / "manifest.json").unlink()  # its sizes may differ; the commits say the same
    summary = summarise(LatentStore(path, allow_incomplete=True))
    assert summary["latent_statistics"]["suspicious_channels"] == [0, 1, 2, 3]
    assert render(summary).count("<- unusual") == 4
    usual = summarise(label_store)["latent_statistics"]
    ratio = np.array(summary["latent_statistics"]["channel_std"]) / np.array(usual["channel_std"])
    np.testing.assert_allclose(ratio, 5.5, rtol=0.01)


def test_an_incomplete_store_says_so(label_store: LatentStore, tmp_path: Path) -> None:
    path = shutil.copytree(label_store.path, tmp_path / "store")
    (path / "manifest.json").unlink()
    summary = summarise(LatentStore(path, allow_incomplete=True))
    assert (summary["complete"], summary["root_hash"], summary["num_stored"]) == (False, None, 15)
    assert "INCOMPLETE" in render(summary)
    next(path.rglob("commits/buckets/**/*.json")).unlink()
    with pytest.raises(StoreIncomplete, match="not complete; 1 of 1 shards, with 15 of 15 pictures are missing"):
        LatentStore(path)
    said = render(summarise(LatentStore(path, allow_incomplete=True)))
    assert "15 planned = 0 stored + 0 rejected + 15 missing" in said


def test_a_record_is_described_with_its_captions_and_its_place(
    label_store: LatentStore, caption_store: LatentStore
) -> None:
    record = caption_store.record_at(4)
    values = describe_record(caption_store, record)
    texts = caption_store.captions["text"].to_pylist()
    assert [caption["text"] for caption in values["captions"]] == [texts[i] for i in record.caption_ids]
    assert values["captions"][0]["num_tokens"] == len(caption_store.caption(record))
    assert (caption_store.path / values["shard"]).is_file()
    assert (caption_store.path / values["commit"]).is_file()
    stored = caption_store.latents(values["bucket"])[values["row"]].astype(np.float64)
    assert values["stored_shape"] == list(stored.shape)
    np.testing.assert_allclose(values["channel_mean"], stored.mean((1, 2)), atol=1e-4)
    text = render_record(values)
    assert record.key in text
    assert values["captions"][0]["text"] in text
    labelled = describe_record(label_store, label_store.record_at(14))
    assert (labelled["label"], labelled["class"]) == (2, "n002")


HOSTILE = "a\x1b[2J\x07\n\u202eb\x9b.png"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> LatentStore:
    """A store whose keys and captions would move the cursor, ring the bell and turn the text around."""
    root = tmp_path_factory.mktemp("hostile")
    lines = []
    for name in (HOSTILE, f"broken{HOSTILE}"):
        picture(1, 64, 64).save(root / "p.png")
        (root / "p.png").rename(root / name)
        lines.append({"file_name": name, "caption": f"red {name}"})
    (root / f"broken{HOSTILE}").write_bytes(b"no picture")
    (root / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe, store = caption_recipe(), root.parent / "hostile-store"
    precompute(recipe, source_path=root, store_path=store, device=CPU, progress=no_progress)
    return LatentStore(store)


def test_no_control_character_of_a_key_or_caption_reaches_the_terminal(hostile: LatentStore) -> None:
    record = hostile.record(HOSTILE)
    found = ledger(hostile)
    assert [reject["key"] for reject in found] == [f"broken{HOSTILE}"]  # as it is, for --json, which escapes
    shard = "buckets/64x64/moments/c/0/0/0/0"
    finding = Finding(shard, "content", "differs", 1, "64x64", 0, 1, [HOSTILE])
    verification = Verification("store", "full", True, [1], findings=[finding, Finding("x\x1b", "stray", "?", 1)])
    texts = [
        render_record(describe_record(hostile, record)),
        render_ledger(found),
        render(summarise(hostile)),
        render_verification(verification, {}),
    ]
    for text in texts:
        assert [c for c in text.replace("\n", "") if not c.isprintable()] == []
    assert "\\x1b[2J" in texts[0]
    assert texts[1].splitlines()[-1] == "1 rejected"
    assert len(texts[1].splitlines()) == 2
    assert "\x1b" not in json.dumps(found)


def test_the_ledger_lists_nothing_where_nothing_was_rejected(label_store: LatentStore) -> None:
    assert (ledger(label_store), render_ledger([])) == ([], "0 rejected")


def test_an_unknown_key_is_refused_with_the_nearest(label_store: LatentStore) -> None:
    with pytest.raises(StoreError, match="n001"):
        label_store.record("n001/")


def draw(store: LatentStore, path: Path, **asked: Any) -> tuple[str, np.ndarray]:
    """What was drawn, in words, and the pixels of the sheet."""
    drawn = write_sheet(store, path, SheetOptions(**asked))
    with Image.open(path) as sheet:
        assert sheet.format == "PNG"
        return drawn, np.asarray(sheet.convert("RGB"))


def frames_of(pixels: np.ndarray) -> int:
    """Frames of a sheet: a corner, with eight dots of the frame's colour to the right and as many down."""
    on = np.pad((pixels == FRAME).all(2), ((1, 8), (1, 8)))
    height, width = pixels.shape[:2]
    corner = ~on[1 : height + 1, :width] & ~on[:height, 1 : width + 1]
    for step in range(8):
        corner &= on[1 : height + 1, 1 + step : width + 1 + step] & on[1 + step : height + 1 + step, 1 : width + 1]
    return int(corner.sum())


@pytest.mark.parametrize(("count", "cells"), [(5, 5), (24, 14)])
def test_a_contact_sheet_has_a_frame_for_each_record(
    count: int, cells: int, caption_store: LatentStore, tmp_path: Path
) -> None:
    drawn, pixels = draw(caption_store, tmp_path / "new/sheet.png", count=count)
    assert (drawn, frames_of(pixels)) == (f"{cells} records", cells)


def test_a_sheet_of_one_class_bucket_or_record(
    label_store: LatentStore, caption_store: LatentStore, tmp_path: Path
) -> None:
    assert frames_of(draw(label_store, tmp_path / "a.png", class_name="n001")[1]) == 5
    assert frames_of(draw(caption_store, tmp_path / "b.png", bucket="80x48")[1]) == 4
    assert frames_of(draw(label_store, tmp_path / "c.png", key="n001/2.png")[1]) == 1
    for wrong in ({"class_name": "n009"}, {"bucket": "1x1"}, {"key": "none.png"}, {"rejects": True}):
        with pytest.raises(LeanditError):
            draw(label_store, tmp_path / "d.png", **wrong)
    assert not (tmp_path / "d.png").exists()


def test_originals_lie_beside_what_is_decoded(label_store: LatentStore, class_folder: Path, tmp_path: Path) -> None:
    key = "n001/2.png"
    pixels = draw(label_store, tmp_path / "a.png", key=key, source=str(class_folder), with_originals=True)[1]
    assert frames_of(pixels) == 2
    original = read_originals(label_store, class_folder, [key, "gone.png"])
    assert original.keys() == {key}
    found = pixels[MARGIN_PX + 1 : MARGIN_PX + CELL_PX - 1, MARGIN_PX + 1 : MARGIN_PX + CELL_PX - 1]
    enlarged = Image.fromarray(original[key]).resize((CELL_PX - 2, CELL_PX - 2), Image.Resampling.NEAREST)
    assert np.array_equal(found, np.asarray(enlarged))


def test_below_an_original_and_what_is_decoded_stands_which_is_which(
    label_store: LatentStore, class_folder: Path, tmp_path: Path
) -> None:
    asked = {"key": "n001/2.png", "source": str(class_folder), "with_originals": True}
    pixels = draw(label_store, tmp_path / "a.png", **asked)[1]
    top = MARGIN_PX + CELL_PX + GAP_PX
    for left, word in ((MARGIN_PX, "original"), (MARGIN_PX + CELL_PX + GAP_PX, "decoded")):
        wanted = Image.new("RGB", (CELL_PX, LINE_PX), "white")
        ImageDraw.Draw(wanted).text((0, 0), word, fill=KEY_COLOUR, font=ImageFont.load_default(FONT_PX))
        assert np.array_equal(pixels[top : top + LINE_PX, left : left + CELL_PX], np.asarray(wanted))


def test_rejects_are_drawn_with_what_can_be_read(tmp_path: Path) -> None:
    rejects = [
        {"key": "a.png", "reason": "too_small", "detail": "1 x 1"},
        {"key": "b.png", "reason": "x", "detail": ""},
        {"key": "a.png", "reason": "duplicate_key", "detail": "the first one is kept"},
    ]
    pixels = np.asarray(rejects_sheet(rejects, {"a.png": np.zeros((8, 8, 3), np.uint8)}))
    assert frames_of(pixels) == 3
    middles = [pixels[MARGIN_PX + CELL_PX // 2, i * (CELL_PX + MARGIN_PX) + MARGIN_PX + CELL_PX // 2] for i in range(3)]
    assert [(middle == 0).all() for middle in middles] == [True, False, False]


@pytest.mark.parametrize("text", ["word " * 100, "x" * 500, "", "two\nlines"])
def test_captions_and_keys_stay_inside_their_cell(text: str) -> None:
    pixels = np.asarray(draw_sheet([Cell(np.zeros((4, 4, 3), np.uint8), text, text.replace(" ", ""))] * 2, columns=2))
    left, right = MARGIN_PX + CELL_PX, MARGIN_PX + CELL_PX + MARGIN_PX
    assert (pixels[:, left + 1 : right - 1] == 255).all()  # nothing between two cells
    assert (pixels[:, -MARGIN_PX + 1 :] == 255).all()
