"""``inspect``: its keys and numbers, what it flags, and contact sheets."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from making import caption_recipe, encode, smooth_image
from PIL import Image
from stores import copy_of
from typer.testing import CliRunner

from leandit.datasets.format.schema import LatentStatistics
from leandit.datasets.maintenance.findings import Finding
from leandit.datasets.maintenance.verify import Verification
from leandit.datasets.store import LatentStore
from leandit.errors import LeanditError, StoreIncomplete
from leandit.tools.cli.commands import app
from leandit.tools.inspection.images import (
    CELL_PX,
    FRAME,
    MARGIN_PX,
    Cell,
    draw_sheet,
    read_originals,
    reject_cells,
    write_sheet,
)
from leandit.tools.inspection.store_facts import StoreFacts
from leandit.tools.inspection.store_text import render
from leandit.tools.inspection.verify import render as render_verification

HOSTILE = "a\x1b[2J\x07\n\u202eb\x9b.png"


def text_of(store: LatentStore | Path, *arguments: str) -> str:
    """What ``inspect`` prints."""
    result = CliRunner().invoke(app, ["inspect", str(getattr(store, "path", store)), *arguments])
    assert result.exit_code == 0, result.exception
    return result.stdout


def json_of(store: LatentStore | Path, *arguments: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not valid JSON")

    return json.loads(text_of(store, *arguments, "--json"), parse_constant=refuse)


def test_the_promised_keys_hold_the_values_of_the_store(label_store: LatentStore, caption_store: LatentStore) -> None:
    labels, captions = json_of(label_store), json_of(caption_store)
    for found, store in ((labels, label_store), (captions, caption_store)):
        sealed = sum(entry.bytes for entry in store.manifest.files)
        assert found["bytes"]["total"] == sealed == sum(found["bytes"].values()) / 2
        expected = {"complete": True, "buckets": dict(store.buckets), "fingerprint": store.spec.fingerprint}
        expected |= {"root_hash": store.root_hash, "latent": store.spec.latent.model_dump()}
        assert {key: found[key] for key in expected} == expected
        shown = text_of(store)
        assert f"root hash           {store.root_hash}" in shown
        assert f"records             {len(store)} planned = {len(store)} stored + 0 rejected" in shown
    assert [labels[key] for key in ("num_planned", "num_stored", "num_rejected", "num_captions")] == [15, 15, 0, 0]
    assert (labels["num_classes"], labels["text"], labels["num_caption_tokens"]) == (3, None, 0)
    assert captions["num_captions"] == 3 + 6  # three short ones, and six pairs of shapes
    words = [text.split() for text in caption_store.captions["text"].to_pylist()]
    assert captions["num_caption_tokens"] == sum(len(w) + 1 for w in words)  # a word is a token, and an end mark


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_the_quality_of_narrowed_captions_is_shown(dtype: str, caption_folder: Path, tmp_path: Path) -> None:
    encode(caption_recipe(f"store.text_dtype={dtype}"), caption_folder, tmp_path / "store")
    store = LatentStore(tmp_path / "store")
    facts, shown, cosines = json_of(store), text_of(store), store.captions["min_cosine"].to_pylist()
    quality, size = facts["caption_quality"], 0
    for path in store.path.glob("captions/*/c/**/*"):
        size += path.stat().st_size if path.is_file() and re.search("embeddings|/scales/", str(path)) else 0
    assert quality["bytes_per_caption"] == round(size / 9, 1)
    assert quality["fewer_than_padded_float16"] == round(64 * 2 * 16 / (size / 9), 2)
    assert size < facts["bytes"]["captions"]
    if dtype == "float32":
        assert (quality["num_measured"], quality["min_cosine"], quality["max_error"]) == (0, None, None)
        assert "cosine" not in shown
        return
    assert (quality["num_measured"], quality["min_cosine"]) == (9, round(min(cosines), 8))
    assert quality["median_cosine"] == round(float(np.median(cosines)), 8) > 0.999
    assert quality["max_error"] == round(max(store.captions["max_error"].to_pylist()), 8) > 0
    assert f"cosine at least {quality['min_cosine']}" in shown


def test_an_unusual_scale_is_flagged(label_store: LatentStore) -> None:
    facts = StoreFacts(label_store)
    facts.statistics = LatentStatistics(count=15, channel_mean=[0.0, 3.1, 0.0, 0.0], channel_std=[1.0, 1.0, 1.0, 5.5])
    assert facts.latents["suspicious_channels"] == [1, 3]
    assert render(facts).count("<- unusual") == 2


def test_an_incomplete_store_says_so(unsealed_store: Path, tmp_path: Path) -> None:
    path = copy_of(unsealed_store, tmp_path / "store")
    found = json_of(path)
    assert (found["complete"], found["root_hash"], found["num_stored"]) == (False, None, 14)
    assert "INCOMPLETE" in text_of(path)
    next(path.rglob("commits/buckets/64x64/*.json")).unlink()
    with pytest.raises(StoreIncomplete, match=r"not complete; 1 of \d shards .\d of 14 images. are missing"):
        LatentStore(path)
    assert re.search(r"14 planned = \d stored \+ 0 rejected \+ \d missing", text_of(path))


def test_a_record_is_described_with_its_place(label_store: LatentStore, caption_store: LatentStore) -> None:
    record = caption_store.record_at(4)
    values = json_of(caption_store, record.key)
    texts = caption_store.captions["text"].to_pylist()
    assert [caption["text"] for caption in values["captions"]] == [texts[i] for i in record.caption_ids]
    assert values["captions"][0]["num_tokens"] == len(caption_store.caption(record))
    assert (caption_store.path / values["shard"]).is_file()
    stored = caption_store.latents(values["bucket"])[values["row"]].astype(np.float64)
    assert values["stored_shape"] == list(stored.shape)
    np.testing.assert_allclose(values["channel_mean"], stored.mean((1, 2)), atol=1e-4)
    shown = text_of(caption_store, record.key)
    assert f"key                 {record.key}" in shown
    assert f"caption             {values['captions'][0]['text']}  (" in shown
    labelled = json_of(label_store, label_store.record_at(14).key)
    assert (labelled["label"], labelled["class"]) == (2, "n002")
    assert (json_of(label_store, "--rejects"), text_of(label_store, "--rejects")) == ([], "0 rejected\n")
    unknown = CliRunner().invoke(app, ["inspect", str(label_store.path), "n001/"])
    assert "Keys that contain it: n001/0.png" in str(unknown.exception)


def test_no_control_character_of_a_key_or_caption_reaches_the_terminal(tmp_path: Path) -> None:
    source, lines = tmp_path / "source", []
    source.mkdir()
    for name in (HOSTILE, f"broken{HOSTILE}"):
        smooth_image(1, 64, 64).save(source / "p.png")
        (source / "p.png").rename(source / name)
        lines.append({"file_name": name, "caption": f"red {name}"})
    (source / f"broken{HOSTILE}").write_bytes(b"no image")
    (source / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    encode(caption_recipe(), source, tmp_path / "s")
    ledger = json_of(tmp_path / "s", "--rejects")
    assert [reject["key"] for reject in ledger] == [f"broken{HOSTILE}"]  # as it is, since JSON escapes it
    assert "\x1b" not in text_of(tmp_path / "s", "--rejects", "--json")
    finding = Finding("buckets/64x64/moments/c/0/0/0/0", "content", "differs", 1, "64x64", 0, 1, [HOSTILE])
    verification = Verification("store", "full", True, [1], findings=[finding, Finding("x\x1b", "stray", "?", 1)])
    shown = [text_of(tmp_path / "s", *arguments) for arguments in ([HOSTILE], ["--rejects"], [])]
    for text in (*shown, render_verification(verification, {})):
        assert [c for c in text.replace("\n", "") if not c.isprintable()] == []
    assert "\\x1b[2J" in shown[0]
    assert shown[1].splitlines()[1:] == ["1 rejected"]


def draw(store: LatentStore, path: Path, **asked: Any) -> tuple[str, np.ndarray]:
    """What was drawn, in words, and the pixels of the sheet."""
    drawn = write_sheet(store, path, **asked)
    with Image.open(path, formats=["PNG"]) as sheet:
        return drawn, np.asarray(sheet.convert("RGB"))


def frames_of(pixels: np.ndarray) -> int:
    """Frames of a sheet: a corner, with eight dots of the frame's colour to the right and as many down."""
    on = np.pad((pixels == FRAME).all(2), ((1, 8), (1, 8)))
    height, width = pixels.shape[:2]
    corner = ~on[1 : height + 1, :width] & ~on[:height, 1 : width + 1]
    for step in range(8):
        corner &= on[1 : height + 1, 1 + step : width + 1 + step] & on[1 + step : height + 1 + step, 1 : width + 1]
    return int(corner.sum())


@pytest.mark.parametrize(
    ("asked", "cells"),
    [({"count": 5}, 5), ({}, 15), ({"bucket": "32x32"}, 15), ({"class_name": "n001"}, 5), ({"key": "n001/2.png"}, 1)],
)
def test_a_sheet_has_a_frame_a_record(
    asked: dict[str, Any], cells: int, label_store: LatentStore, tmp_path: Path
) -> None:
    drawn, pixels = draw(label_store, tmp_path / "new/sheet.png", **asked)
    assert (drawn, frames_of(pixels)) == (f"{cells} records", cells)


@pytest.mark.parametrize("asked", [{"class_name": "n009"}, {"bucket": "1x1"}, {"key": "none.png"}, {"rejects": True}])
def test_a_sheet_of_nothing_is_refused(asked: dict[str, Any], label_store: LatentStore, tmp_path: Path) -> None:
    with pytest.raises(LeanditError):
        draw(label_store, tmp_path / "sheet.png", **asked)
    assert not (tmp_path / "sheet.png").exists()


@pytest.mark.parametrize("text", ["word " * 100, "W" * 30 + " i", ""])
def test_captions_and_keys_stay_inside_their_cell(text: str) -> None:
    pixels = np.asarray(draw_sheet([Cell(np.zeros((4, 4, 3), np.uint8), text, text.replace(" ", ""))] * 2, columns=2))
    left, right = MARGIN_PX + CELL_PX, MARGIN_PX + CELL_PX + MARGIN_PX
    assert (pixels[:, left + 1 : right - 1] == 255).all()  # nothing between two cells
    assert (pixels[:, -MARGIN_PX + 1 :] == 255).all()


def test_captions_without_glyphs_in_the_font_are_drawn_plain() -> None:
    sheets = [draw_sheet([Cell(None, text, text)]) for text in ("Füße \u2014 señor, été", "Fusse - senor, ete")]
    assert sheets[0].tobytes() == sheets[1].tobytes()


def test_originals_and_rejects_are_drawn(label_store: LatentStore, class_folder: Path, tmp_path: Path) -> None:
    key = "n001/2.png"
    pixels = draw(label_store, tmp_path / "a.png", key=key, source=str(class_folder), with_originals=True)[1]
    assert frames_of(pixels) == 2
    original = read_originals(label_store, class_folder, [key, "gone.png"])
    assert original.keys() == {key}
    drawn = pixels[MARGIN_PX + 1 : MARGIN_PX + CELL_PX - 1, MARGIN_PX + 1 : MARGIN_PX + CELL_PX - 1]
    enlarged = Image.fromarray(original[key]).resize((CELL_PX - 2, CELL_PX - 2), Image.Resampling.NEAREST)
    assert np.array_equal(drawn, np.asarray(enlarged))
    rejects = [{"key": key, "reason": "too_small", "detail": ""}, {"key": "b.png", "reason": "x", "detail": "y " * 99}]
    pixels = np.asarray(draw_sheet(reject_cells(rejects, {key: np.zeros((8, 8, 3), np.uint8)})))
    assert frames_of(pixels) == 2
    middles = [pixels[MARGIN_PX + CELL_PX // 2, i * (CELL_PX + MARGIN_PX) + MARGIN_PX + CELL_PX // 2] for i in (0, 1)]
    assert [(middle == 0).all() for middle in middles] == [True, False]
