"""Sources as ``leandit precompute`` enters, guesses and rejects them, and what it says of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from making import LABEL_RECIPE, Ended, Leandit, make_class_folder, smooth_image

from leandit.datasets.store import LatentStore
from leandit.errors import SourceError
from leandit.precompute.config import SourceSection
from leandit.precompute.sources.source import Source, list_source

Precompute = Callable[..., Ended]
WNIDS = ["n02099601", "n01440764"]
NEEDS = "it has no labels, and the recipe encodes no captions"


@pytest.fixture
def precompute(leandit: Leandit) -> Precompute:
    """The command with the small encoders that ship with leandit."""

    def run(
        source: Path, store: Path, *overrides: str, flags: Sequence[str] = (), recipe: str = "imagenet-256"
    ) -> Ended:
        words = [word for override in (*LABEL_RECIPE, *overrides) for word in ("--set", override)]
        done = leandit("precompute", recipe, "--source", source, "--store", store, *words, *flags)
        assert done.code == 0, done.err
        return done

    return run


def listed(root: Path, **settings: Any) -> Source:
    return list_source(root, SourceSection(**settings))


def labels(source: Source) -> tuple[list[int], list[str] | None]:
    return [record.label for record in source.records], source.classes


def test_a_lone_split_folder_is_entered_and_lists_what_the_folder_itself_does(tmp_path: Path) -> None:
    make_class_folder(tmp_path / "imagenet/train", classes=2, per_class=2)
    (tmp_path / "imagenet/README").write_text("no image")
    inside, above = listed(tmp_path / "imagenet/train"), listed(tmp_path / "imagenet")
    assert (above.listing_hash(), labels(above)) == (inside.listing_hash(), labels(inside))
    assert [r.key for r in above.records] == ["n000/0.png", "n000/1.png", "n001/0.png", "n001/1.png"]
    assert "the only folder, 'train', is a split" in above.notes[0]
    assert inside.notes == []
    assert listed(tmp_path / "imagenet", split="all").classes == ["train"]


def test_a_link_to_itself_is_rejected_and_one_to_a_folder_around_it_is_counted(
    precompute: Precompute, tmp_path: Path
) -> None:
    source = make_class_folder(tmp_path / "imagenet/train", classes=2, per_class=15)
    (source / "n000/loop.png").symlink_to("loop.png")
    (source / "loop").symlink_to("loop")
    (source / "n001/up").symlink_to(source, target_is_directory=True)
    (source / "outside").symlink_to(source.parent, target_is_directory=True)
    done = precompute(source, tmp_path / "store")
    assert "31 planned = 30 stored + 1 rejected" in done.out
    assert "1 file, not images by name: 1 without extension" in done.out
    assert re.search(r"2 folders, .*linked twice: 1 (up, 1 outside|outside, 1 up)", done.out)
    store = LatentStore(tmp_path / "store")
    assert store.record("n000/loop.png").reason == "unreadable"
    assert store.spec.classes == ["n000", "n001"]


def test_a_table_in_latin_1_names_the_line_and_how_to_convert_it(tmp_path: Path) -> None:
    source = make_class_folder(tmp_path / "source", classes=1, per_class=2) / "n000"
    (source / "list.csv").write_bytes("image,text\n0.png,a cat\n1.png,café\n".encode("latin-1"))
    table = listed(source)
    assert re.search(r"'list.csv', line 3: expected UTF-8.*iconv -f LATIN1 -t UTF-8", "\n".join(table.notes))
    rows = '{"file_name": "0.png"}\n\n{"file_name": "1.png", "text": "café"}\n'
    (source / "rows.jsonl").write_bytes(rows.encode("latin-1"))
    for record, words in ((table.records[1], "line 3: not UTF-8"), (listed(source / "rows.jsonl").records[1], "UTF-8")):
        assert record.problem[0] == "bad_metadata"
        assert words in record.problem[1]


def test_no_control_character_of_a_source_reaches_the_terminal(precompute: Precompute, tmp_path: Path) -> None:
    source = make_class_folder(tmp_path / "source", classes=2, per_class=12)
    (source / "n000").rename(source / "n\u202e000")
    (source / "n001/0.png").rename(source / "n001/\u202e\x1b[31m.png")
    (source / "n001/\u202e\x1b[31m.png").write_bytes(b"")
    (source / "n001/file.\u202egnp").write_bytes(b"")
    for flags in ([], ["--dry-run"]):
        done = precompute(source, tmp_path / "store", "source.max_reject_share=0.5", flags=flags)
        assert "n\\u202e000" in done.out
        assert re.findall(r"[^\n -~]", done.out + done.err) == []


def flat(root: Path, *names: str) -> Path:
    root.mkdir(parents=True)
    for seed, name in enumerate(names):
        smooth_image(seed).save(root / name, "PNG")
    return root


def test_labels_of_a_flat_imagenet_are_the_wnids_of_its_file_names(precompute: Precompute, tmp_path: Path) -> None:
    names = [f"{wnid}_{number}.JPEG" for wnid in WNIDS for number in (7, 10026)]
    done = precompute(flat(tmp_path / "flat", *names), tmp_path / "store")
    assert labels(listed(tmp_path / "flat")) == ([0, 0, 1, 1], sorted(WNIDS))
    assert "labels: the wnid at the start of 4 of 4 file names" in done.err
    assert NEEDS not in done.err
    assert "golden retriever" in done.out

    other = flat(tmp_path / "other", *names, "cat.JPEG")
    guessed = listed(other)
    assert labels(guessed)[0] == [-1, 0, 0, 1, 1]
    assert re.search("4 of 5 file names.* and the others have none", "\n".join(guessed.notes))
    assert [r.problem is None for r in listed(other, labels="wnid").records] == [False, True, True, True, True]
    unlabelled = listed(other, labels="none")
    assert (labels(unlabelled), unlabelled.notes) == (([-1] * 5, None), [])


def test_names_are_no_labels_where_the_source_has_others_or_few_begin_with_a_wnid(tmp_path: Path) -> None:
    folders = tmp_path / "folders"
    flat(folders / "a", "n01440764_1.JPEG", "n01440764_2.JPEG")
    flat(folders / "b", "n01440764_3.JPEG")
    assert labels(listed(folders)) == ([0, 0, 1], ["a", "b"])
    assert labels(listed(folders, labels="wnid")) == ([0, 0, 0], ["n01440764"])
    table = flat(tmp_path / "table", "n01440764_1.JPEG", "n02099601_2.JPEG")
    (table / "metadata.csv").write_text("file_name,label\nn01440764_1.JPEG,cat\nn02099601_2.JPEG,cat\n")
    assert labels(listed(table)) == ([0, 0], ["cat"])
    with pytest.raises(SourceError, match=r'source\.labels "wnid" is for a folder of images; this is metadata'):
        listed(table, labels="wnid")
    assert labels(listed(flat(tmp_path / "few", "n01440764_1.JPEG", "x.JPEG"))) == ([-1, -1], None)


def test_a_source_without_labels_is_warned_of_and_a_table_of_wnids_gives_them(
    precompute: Precompute, tmp_path: Path
) -> None:
    names = [f"ILSVRC2012_val_0000000{number}.JPEG" for number in (1, 2, 3)]
    source = flat(tmp_path / "val", *names)
    for flags in ([], ["--dry-run"]):
        done = precompute(source, tmp_path / "store", flags=flags)
        assert "Write a table next to the images" in done.err + done.out
        assert NEEDS in done.err + done.out
    (source / "metadata.csv").write_text("file_name,text\n" + "".join(f"{name},a cat\n" for name in names))
    assert NEEDS not in precompute(source, tmp_path / "other", recipe="demo").err
    (source / "metadata.csv").unlink()
    rows = zip(names, [*WNIDS, WNIDS[1]], strict=True)
    (source / "labels.csv").write_text("image,wnid\n" + "".join(f"{name},{wnid}\n" for name, wnid in rows))
    done = precompute(source, tmp_path / "labelled")
    assert labels(listed(source)) == ([1, 0, 0], sorted(WNIDS))
    assert "labels 'wnid'" in done.err
    assert NEEDS not in done.err
