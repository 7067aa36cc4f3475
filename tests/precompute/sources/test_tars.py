"""WebDataset tars as people have them: every image is a record or one reject, whatever dots its name has."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_files import encoded
from making import bytes_of, caption_recipe, encode, gray_mask, image_bytes, write_file

from leandit.datasets.store import LatentStore
from leandit.errors import SourceError
from leandit.precompute.config import SourceSection
from leandit.precompute.sources.source import Source, list_source

Members = list[tuple[str, bytes | str]]
JPEGS = [image_bytes(i, 8, 8, "JPEG") for i in range(6)]


def tar_of(members: Members) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in members:
            data = content.encode() if isinstance(content, str) else content
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def images(*names: str) -> Members:
    return [(name, JPEGS[i]) for i, name in enumerate(names)]


def listed(tmp_path: Path, members: Members, companions: dict[str, str] | None = None, **settings: Any) -> Source:
    write_file(tmp_path / "source/0.tar", tar_of(members))
    return list_source(tmp_path / "source", SourceSection(**settings), companions or {})


def captions_or_reasons(source: Source) -> dict[str, str]:
    """Caption of each record by its key, or the reason of a reject."""
    return {r.key: r.problem[0] if r.problem else " / ".join(r.captions) for r in source.records}


DATES = [f"IMG 2021.05.03 12.0{i}" for i in range(3)]


@pytest.mark.parametrize(
    ("members", "expected"),
    {
        "a version in the names": (
            [*images("a.v2.jpg", "b.jpg"), ("a.v2.txt", "of a"), ("b.txt", "of b")],
            {"0/a.v2": "of a", "0/b": "of b"},
        ),
        "dates": (
            [*images(*(f"{name}.jpg" for name in DATES)), *((f"{name}.txt", f"of {name}") for name in DATES)],
            {f"0/{name}": f"of {name}" for name in DATES},
        ),
        "dates without texts": (images(*(f"{name}.JPG" for name in DATES)), {f"0/{name}": "" for name in DATES}),
        "dates with parts": (
            [*images(f"{DATES[0]}.jpg", f"{DATES[0]}.seg.png"), (f"{DATES[0]}.txt", "one")],
            {f"0/{DATES[0]}": "one"},
        ),
        "a part": ([*images("a.jpg", "a.seg.png"), ("a.txt", "of a")], {"0/a": "of a"}),
        "a part without texts": (images("a.jpg", "a.seg.png", "b.jpg", "b.seg.png"), {"0/a": "", "0/b": ""}),
        "a text with parts": ([*images("a.jpg"), ("a.txt", "of a"), ("a.boxes.json", "[1, 2]")], {"0/a": "of a"}),
        "folders and their dots": (
            [*images("./v1.0/a.jpg", "v1.5/x.jpg"), ("./v1.0/a.txt", "of a"), ("v1.5/x.txt", "of x")],
            {"0/./v1.0/a": "of a", "0/v1.5/x": "of x"},
        ),
        "only one image, in a field of two parts": ([*images("a.left.jpg"), ("a.txt", "of a")], {"0/a": "of a"}),
        "two images of one rank": (
            [*images("a.left.jpg", "a.right.jpg", "b.left.jpg", "b.right.jpg"), ("a.txt", "of a"), ("b.txt", "of b")],
            {f"0/{key}.{side}.jpg": "bad_metadata" for key in "ab" for side in ("left", "right")},
        ),
        "two formats of one name": (
            [*images("a.jpg", "a.png"), ("a.txt", "of a")],
            {"0/a.jpg": "bad_metadata", "0/a.png": "bad_metadata"},
        ),
        "a folder of masks": (
            [*images("images/a.jpg", "masks/a.png"), ("images/a.txt", "of a")],
            {"0/images/a": "of a"},
        ),
        "a folder of masks with an ending": (
            images("images/a.jpg", "images/b.jpg", "masks/a_mask.png", "masks/b-mask.png"),
            {"0/images/a": "", "0/images/b": ""},
        ),
        "a folder of images in upper case": (
            images("Images/x/a.jpg", "Masks/x/a.png"),
            {"0/Images/x/a": ""},
        ),
        "masks in a folder beside images": (
            images("a.jpg", "masks/a.png", "masks/b.png"),
            {"0/a": "", "0/masks/b": ""},
        ),
        "texts of kohya": ([*images("a.jpg"), ("a.caption", "of a")], {"0/a": "of a"}),
        "a caption beside a large list": (
            [*images("a.jpg"), ("a.txt", "of a"), ("a.json", json.dumps({"imageData": "A" * (2 << 20)}))],
            {"0/a": "of a"},
        ),
    }.values(),
)
def test_every_image_of_a_tar_is_a_record_or_one_reject(
    members: Members, expected: dict[str, str], tmp_path: Path
) -> None:
    assert captions_or_reasons(listed(tmp_path, members)) == expected


def test_the_rule_is_printed_and_the_choice_of_one_tar_does_not_depend_on_others(tmp_path: Path) -> None:
    write_file(tmp_path / "source/1.tar", tar_of([*images("a.jpg", "a.seg.png"), ("a.txt", "of a")]))
    source = listed(tmp_path, [*images("a.v2.jpg"), ("a.v2.txt", "of a")])
    assert captions_or_reasons(source) == {"0/a.v2": "of a", "1/a": "of a"}
    notes = "\n".join(source.notes)
    assert "the first in 1 tar, the last in 1 tar" in notes
    assert "left out: 1 image 'seg.png'" in notes
    assert "--set companions.seg.kind=mask --set companions.seg.column=seg.png" in notes
    plain = list_source(write_file(tmp_path / "plain.tar", tar_of([*images("a.jpg"), ("a.txt", "of a")])))
    assert plain.notes == []
    other = list_source(write_file(tmp_path / "other.tar", tar_of(images("a.jpg", "a.png"))))
    for record in other.records:
        assert record.problem
        assert "first dot" in record.problem[1]
        assert "--set source.image=jpg" in record.problem[1]


PAIRS: Members = [
    *((f"{key}.{side}.png", image_bytes(i, 64, 64)) for i, (key, side) in enumerate([("a", "left"), ("a", "right")])),
    *((f"b.{side}.png", image_bytes(i, 64, 64)) for i, side in enumerate(["left", "right"], 2)),
    ("c.left.png", image_bytes(5, 64, 64)),
    *((f"{key}.txt", f"of {key}") for key in "abc"),
]


@pytest.mark.parametrize("field", ["right.png", "right", ".RIGHT.png"])
def test_a_field_of_several_is_the_image_where_the_recipe_names_it(field: str, tmp_path: Path) -> None:
    source = listed(tmp_path, PAIRS, image=field)
    assert captions_or_reasons(source) == {"0/a": "of a", "0/b": "of b", "0/c": "bad_metadata"}
    assert bytes_of(source, source.records[1]) == dict(PAIRS)["b.right.png"]
    with pytest.raises(SourceError, match=r"source\.image 'top\.png': no key.*left\.png \(3\), right\.png \(2\)"):
        listed(tmp_path, PAIRS, image="top.png")


@pytest.mark.parametrize("column", ["mask", "-mask", "_MASK", ".mask.png"])
def test_a_column_names_a_field_of_a_tar_with_and_without_a_separator(column: str, tmp_path: Path) -> None:
    source = listed(tmp_path, images("a.jpg", "a_mask.png"), {"mask": column})
    (record,) = source.records
    assert len(record.companions) == 1
    path, offset, num_bytes, _ = record.companions[0]
    assert source.read(path, offset, num_bytes, stage="decode") == JPEGS[1]


def test_a_field_of_a_tar_can_be_a_companion(tmp_path: Path) -> None:
    masks = {key: gray_mask(i, 64, 64) for i, key in enumerate("ab")}
    members: Members = [
        *((f"{key}.png", image_bytes(i, 64, 64)) for i, key in enumerate("abc")),
        *((f"{key}.seg.png", encoded(mask, "PNG")) for key, mask in masks.items()),
        *((f"{key}.txt", f"of {key}") for key in "abc"),
    ]
    write_file(tmp_path / "source/0.tar", tar_of(members))
    recipe = caption_recipe("companions.seg.kind=mask", "source.max_reject_share=1")
    encode(recipe, tmp_path / "source", tmp_path / "store")
    store = LatentStore(tmp_path / "store")
    assert (store.record("0/c").reason, len(store)) == ("missing_file", 2)
    downscale = store.spec.latent.downscale
    for key, mask in masks.items():
        record = store.record(f"0/{key}")
        blocks = np.asarray(mask, np.float64).reshape(64 // downscale, downscale, -1, downscale)
        expected = np.floor(blocks.mean((1, 3)) + 0.5)
        np.testing.assert_array_equal(store.companion("seg", record.bucket)[record.row], expected)
    assert encode(recipe, tmp_path / "source", tmp_path / "store").num_encoded == 0
    with pytest.raises(SourceError, match=r"companions\.depth\.column 'depth': no key of its tars"):
        list_source(tmp_path / "source", companions={"depth": "depth"})


@pytest.mark.parametrize(
    ("members", "expected"),
    {
        "plain": ([*images("a.jpg"), ("a.jpg.txt", "own"), ("a.txt", "of any image a")], {"0/a": "own"}),
        "upper case": ([*images("a.jpg"), ("a.JPG.TXT", "own")], {"0/a": "own"}),
        "before the image": ([("a.jpg.txt", "own"), *images("a.jpg")], {"0/a": "own"}),
        "names with dots": (
            [*images("b 1.5.jpg", "b 1.6.jpg"), ("b 1.5.jpg.txt", "first"), ("b 1.6.jpg.txt", "second")],
            {"0/b 1.5": "first", "0/b 1.6": "second"},
        ),
        "of a mask": (
            [*images("d.jpg", "d.seg.png"), ("d.txt", "own"), ("d.seg.png.txt", "of the mask")],
            {"0/d": "own"},
        ),
    }.values(),
)
def test_a_text_with_the_whole_name_of_an_image_is_that_of_the_image_alone(
    members: Members, expected: dict[str, str], tmp_path: Path
) -> None:
    """As beside images."""
    assert captions_or_reasons(listed(tmp_path, members)) == expected
