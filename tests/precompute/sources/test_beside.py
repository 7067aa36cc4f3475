"""What lies beside an image: captions under any name that people give them, labels of detectors, masks, controls."""

from __future__ import annotations

import json
import shlex
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_files import encoded
from making import caption_recipe, encode, gray_mask, image_bytes, make_image_folder, write_file

from leandit.datasets.store import LatentStore
from leandit.errors import SourceError
from leandit.precompute.config import SourceSection
from leandit.precompute.sources.source import Source, list_source

NFC, NFD = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
BOXES = "0 0.716797 0.395833 0.216406 0.147222\n1 0.5 0.5 0.1 .2\n"
LARGE = json.dumps({"version": "5", "imageData": "A" * (2 << 20)})


def fill(root: Path, files: dict[str, str]) -> Path:
    """A folder of texts, and of images where a name has the extension of one."""
    for name, content in files.items():
        if name.endswith((".jpg", ".png")):
            make_image_folder(root, name)
        else:
            write_file(root / name, content)
    return root


def listed(root: Path, companions: dict[str, str] | None = None, **settings: Any) -> Source:
    return list_source(root, SourceSection(**settings), companions or {}, needs_labels=False)


def captions_or_reasons(source: Source) -> dict[str, str]:
    return {r.key: r.problem[0] if r.problem else " / ".join(r.captions) for r in source.records}


def images(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "")


@pytest.mark.parametrize(
    ("files", "expected"),
    {
        "upper case": (
            images("a.jpg", "b.jpg") | {"a.TXT": "one", "b.Caption": "two"},
            {"a.jpg": "one", "b.jpg": "two"},
        ),
        "the whole name of the image": (images("a.jpg") | {"a.jpg.txt": "one"}, {"a.jpg": "one"}),
        "whole names of two formats": (
            images("a.jpg", "a.png") | {"a.jpg.txt": "one", "a.png.txt": "two"},
            {"a.jpg": "one", "a.png": "two"},
        ),
        "one text of two formats": (images("a.jpg", "a.png") | {"a.txt": "one"}, {"a.jpg": "one", "a.png": "one"}),
        "dots and spaces": (images("v1.5 photo.jpg") | {"v1.5 photo.txt": "one"}, {"v1.5 photo.jpg": "one"}),
        "an image that macOS named": (images(f"{NFD}.jpg") | {f"{NFC}.txt": "one"}, {f"{NFD}.jpg": "one"}),
        "a text that macOS named": (images(f"{NFC}.jpg") | {f"{NFD}.txt": "one"}, {f"{NFC}.jpg": "one"}),
        "an empty .caption": (images("a.jpg") | {"a.caption": " \n", "a.txt": "one"}, {"a.jpg": "one"}),
        "a list beside a text": (images("a.jpg") | {"a.txt": "one", "a.json": '[{"box": [1, 2]}]'}, {"a.jpg": "one"}),
        "a large file beside a text": (images("a.jpg") | {"a.txt": "one", "a.json": LARGE}, {"a.jpg": "one"}),
        "a large file alone": (images("a.jpg") | {"a.json": LARGE}, {"a.jpg": "bad_metadata"}),
        "a text in a folder of texts": (
            images("images/x/a.jpg", "images/b.jpg") | {"captions/x/a.TXT": "one", "images/b.txt": "two"},
            {"images/b.jpg": "two", "images/x/a.jpg": "one"},
        ),
        "boxes beside a caption": (images("a.jpg") | {"a.txt": BOXES, "a.caption": "one"}, {"a.jpg": "one"}),
        "numbers in words": (images("a.jpg") | {"a.txt": "1 2 3\n4 cats 5 6 7 8"}, {"a.jpg": "1 2 3 / 4 cats 5 6 7 8"}),
        "caches and system files": (
            images("a.jpg") | {"a.txt": "one", "a_0064x0064_flux.npz": "", "Thumbs.db": "", "classes.txt": "cat\ndog"},
            {"a.jpg": "one"},
        ),
    }.values(),
)
def test_texts_are_found_under_the_names_that_people_give_them(
    files: dict[str, str], expected: dict[str, str], tmp_path: Path
) -> None:
    assert captions_or_reasons(listed(fill(tmp_path, files), text_file="lines")) == expected


@pytest.mark.parametrize(
    "unused",
    {
        "beside the images": ["images/b.txt", "images/x/b.caption"],
        "in the folder of texts": ["captions/b.txt", "captions/x/b.json"],
        "in a folder without images": ["captions/y/a.txt", "captions/y/b.TXT"],
    }.values(),
)
def test_texts_without_an_image_are_counted(unused: list[str], tmp_path: Path) -> None:
    used = {"captions/a.txt": "one", "captions/x/a.txt": "two", "images/x/a.txt": "three"}
    files = images("images/a.jpg", "images/x/a.jpg") | used | dict.fromkeys(unused, "text")
    source = listed(fill(tmp_path, files))
    assert captions_or_reasons(source) == {"images/a.jpg": "one", "images/x/a.jpg": "two"}
    assert source.ignored.num_files == 2


def test_rows_of_numbers_are_no_captions_and_are_counted(tmp_path: Path) -> None:
    files = images("images/train/a.jpg", "images/train/b.jpg")
    files |= {"labels/train/a.txt": BOXES, "labels/train/b.txt": BOXES, "data.yaml": "nc: 2"}
    source = listed(fill(tmp_path, files))
    assert captions_or_reasons(source) == {"images/train/a.jpg": "", "images/train/b.jpg": ""}
    notes = "\n".join(source.notes)
    assert "not captions: 2 texts of rows of numbers, as YOLO's labels, such as 'labels/train/a.txt'" in notes


def test_hidden_images_are_counted(tmp_path: Path) -> None:
    root = fill(tmp_path, images("a.jpg", "._a.jpg", ".trash.png") | {"a.txt": "one", ".DS_Store": ""})
    source = listed(root)
    assert [r.key for r in source.records] == ["a.jpg"]
    (line,) = source.ignored.lines()
    assert line.startswith("2 hidden files with the extension of an image, such as .")


TEXTS = {"a.txt": "one", "b.txt": "two"}
MASKS: dict[str, tuple[tuple[str, ...], str]] = {  # names of masks of a and b, and the column that is offered
    "OneTrainer": (("a-masklabel.png", "b-masklabel.png"), "masklabel"),
    "OneTrainer's condition": (("a-condlabel.png", "b-condlabel.png"), "condlabel"),
    "an ending with an underscore": (("a_mask.png", "b_mask.png"), "mask"),
    "an ending with a dot": (("a.mask.png", "b.mask.png"), "mask"),
    "a folder": (("mask/a.png", "mask/b.png"), "mask"),
    "a folder of several": (("masks/a.jpg", "masks/b.png"), "masks"),
    "endings in a folder": (("masks/a_mask.png", "masks/b_mask.png"), "masks"),
    "control images": (("control/a.jpg", "control/b.jpg"), "control"),
    "conditioning images": (("conditioning_images/a.png", "conditioning_images/b.png"), "conditioning_images"),
    "thumbnails": (("thumbnails/a.jpg", "thumbnails/b.jpg"), "thumbnails"),
}


@pytest.mark.parametrize("with_texts", [True, False])
@pytest.mark.parametrize("case", MASKS)
def test_masks_of_other_trainers_are_no_images_but_companions(case: str, with_texts: bool, tmp_path: Path) -> None:
    masks, name = MASKS[case]
    root = fill(tmp_path, images("a.jpg", "b.jpg", *masks) | (TEXTS if with_texts else {}))
    source = listed(root)
    captions = TEXTS if with_texts else {"a.txt": "", "b.txt": ""}
    assert captions_or_reasons(source) == {"a.jpg": captions["a.txt"], "b.jpg": captions["b.txt"]}
    assert (source.classes, source.ignored.num_files) == (None, 0)
    notes = "\n".join(source.notes)
    assert "left out: 2 images" in notes
    assert f"--set companions.{name}.kind={'mask' if 'mask' in name else 'image'}" in notes
    source = listed(root, {name: name})
    assert not any("left out" in note for note in source.notes)
    assert [[place[0] for place in r.companions] for r in source.records] == [[mask] for mask in masks]


@pytest.mark.parametrize(
    ("names", "expected"),
    {
        "images and masks in folders": (
            ("images/10_dog/a.jpg", "images/10_dog/b.jpg", "masks/10_dog/a.png", "masks/10_dog/b.png"),
            ["images/10_dog/a.jpg", "images/10_dog/b.jpg"],
        ),
        "masks in each folder": (
            ("10_dog/a.jpg", "10_dog/mask/a.png", "5_cat/b.jpg", "5_cat/mask/b.png"),
            ["10_dog/a.jpg", "5_cat/b.jpg"],
        ),
        "a class that is called so": (
            ("mask/0.jpg", "mask/1.jpg", "no_mask/0.jpg", "no_mask/1.jpg"),
            ["mask/0.jpg", "mask/1.jpg", "no_mask/0.jpg", "no_mask/1.jpg"],
        ),
        "names that only end so": (("party-mask.jpg", "flight_control.jpg"), ["flight_control.jpg", "party-mask.jpg"]),
        "a folder of other images": (("0.jpg", "1.jpg", "control/x.jpg"), ["0.jpg", "1.jpg", "control/x.jpg"]),
    }.values(),
)
def test_a_mask_is_what_has_the_name_of_another_image(
    names: tuple[str, ...], expected: list[str], tmp_path: Path
) -> None:
    source = listed(fill(tmp_path, images(*names)), labels="none")
    assert [r.key for r in source.records] == expected


def test_masks_are_no_class_and_do_not_take_labels(tmp_path: Path) -> None:
    root = fill(tmp_path, images("cat/a.jpg", "cat/a_mask.png", "dog/b.jpg", "dog/masks/b.png"))
    source = listed(root)
    assert source.classes == ["cat", "dog"]
    assert [(r.key, r.label) for r in source.records] == [("cat/a.jpg", 0), ("dog/b.jpg", 1)]


def test_a_mask_of_a_folder_is_stored_with_its_image(tmp_path: Path) -> None:
    masks = {key: gray_mask(i, 64, 64) for i, key in enumerate("ab")}
    for i, key in enumerate("abc"):
        write_file(tmp_path / f"source/{key}.png", image_bytes(i, 64, 64))
        write_file(tmp_path / f"source/{key}.txt", f"of {key}")
    for key, mask in masks.items():
        write_file(tmp_path / f"source/{key}-masklabel.png", encoded(mask, "PNG"))
    recipe = caption_recipe("companions.masklabel.kind=mask", "source.max_reject_share=1")
    encode(recipe, tmp_path / "source", tmp_path / "store")
    store = LatentStore(tmp_path / "store")
    assert (store.record("c.png").reason, len(store)) == ("missing_file", 2)
    downscale = store.spec.latent.downscale
    for key, mask in masks.items():
        record = store.record(f"{key}.png")
        blocks = np.asarray(mask, np.float64).reshape(64 // downscale, downscale, -1, downscale)
        expected = np.floor(blocks.mean((1, 3)) + 0.5)
        np.testing.assert_array_equal(store.companion("masklabel", record.bucket)[record.row], expected)
    with pytest.raises(SourceError, match=r"\[companions\.depth\] needs .* 'NAME-depth\.png' beside 'NAME\.jpg'"):
        listed(tmp_path / "source", {"depth": "depth"})


def test_masks_in_a_tar_are_fields(tmp_path: Path) -> None:
    import webdataset

    with webdataset.TarWriter(str(tmp_path / "0.tar")) as tar:
        for key in "ab":
            tar.write({"__key__": key, "png": image_bytes(0, 8, 8), "txt": f"of {key}"})
            tar.write({"__key__": f"{key}-masklabel", "png": image_bytes(1, 8, 8)})
    source = listed(tmp_path)
    assert captions_or_reasons(source) == {"0/a": "of a", "0/b": "of b"}
    assert any("left out: 2 images 'masklabel.png'" in note for note in source.notes)
    assert len(listed(tmp_path, {"mask": "masklabel.png"}).records[0].companions) == 1


@pytest.mark.parametrize(
    ("names", "expected"),
    {
        "masks of each class": (
            ("cat/a.jpg", "dog/b.jpg", "masks/cat/a.png", "masks/dog/b.png", "zebra/c.jpg"),
            {"cat/a.jpg": "cat", "dog/b.jpg": "dog", "zebra/c.jpg": "zebra"},
        ),
        "masks of images": (
            ("images/x/a.jpg", "masks/x/a.png"),
            {"images/x/a.jpg": "images"},
        ),
        "a class that is called so": (
            ("cat/a.jpg", "mask/cat/x.jpg", "mask/y.jpg"),
            {"cat/a.jpg": "cat", "mask/cat/x.jpg": "mask", "mask/y.jpg": "mask"},
        ),
    }.values(),
)
def test_a_folder_of_masks_is_no_class(names: tuple[str, ...], expected: dict[str, str], tmp_path: Path) -> None:
    source = listed(fill(tmp_path, images(*names)))
    assert source.classes == sorted(set(expected.values()))
    assert {r.key: source.classes[r.label] for r in source.records} == expected


@pytest.mark.parametrize("column", ["mask", "Mask", "image mask", "conditioning_image"])
def test_the_options_that_are_offered_for_a_column_of_a_table_store_it(column: str, tmp_path: Path) -> None:
    root = fill(tmp_path, images("a.jpg", "x/a.png"))
    write_file(root / "metadata.jsonl", json.dumps({"file_name": "a.jpg", "text": "one", column: "x/a.png"}))
    (note,) = [note for note in listed(root).notes if "--set companions." in note]
    options = shlex.split(note[note.index("--set") : note.index(" stores ")])
    recipe = caption_recipe(*(option for option in options if option != "--set"))
    (name,) = recipe.companions
    assert (recipe.companions[name].kind == "mask") == ("mask" in column.lower())
    (record,) = listed(root, recipe.companion_columns).records
    assert [place[0] for place in record.companions] == ["x/a.png"]
