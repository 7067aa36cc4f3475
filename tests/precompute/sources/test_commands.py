"""Sources by the command line: what ``leandit precompute`` enters, guesses, rejects and says."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from making import LABEL_RECIPE, Ended, Leandit, make_class_folder, smooth_image
from tiny_autoencoders import save_autoencoder

from leandit.datasets.store import LatentStore

Precompute = Callable[..., Ended]


@pytest.fixture
def precompute(leandit: Leandit) -> Precompute:
    """The command with the small encoders that ship with leandit."""

    def run(
        source: Path, store: Path, *overrides: str, recipe: str = "imagenet-256", flags: Sequence[str] = ()
    ) -> Ended:
        return leandit(*command(source, store, *overrides, recipe=recipe), *flags)

    return run


def command(source: Path, store: Path, *overrides: str, recipe: str = "imagenet-256") -> list[object]:
    words = [word for override in (*LABEL_RECIPE, *overrides) for word in ("--set", override)]
    return ["precompute", recipe, "--source", source, "--store", store, *words]


def facts(store: Path) -> tuple[list[str], list[int], list[str] | None]:
    """Keys, labels and classes of a store."""
    opened = LatentStore(store)
    columns = opened.records.to_pydict()
    return columns["key"], columns["label"], opened.spec.classes


def root_hash(done: Ended) -> str:
    assert done.code == 0, done.err
    found = re.search(r"root hash\s+(\w{64})", done.out)
    assert found, done.out
    return found[1]


def test_a_lone_split_folder_is_entered_and_makes_the_store_of_the_folder_itself(
    precompute: Precompute, tmp_path: Path
) -> None:
    make_class_folder(tmp_path / "imagenet/train", classes=2, per_class=2)
    (tmp_path / "imagenet/README").write_text("no image")
    inside = precompute(tmp_path / "imagenet/train", tmp_path / "inside")
    above = precompute(tmp_path / "imagenet", tmp_path / "above")
    assert root_hash(above) == root_hash(inside)
    assert facts(tmp_path / "above") == facts(tmp_path / "inside")
    assert facts(tmp_path / "above")[0] == ["n000/0.png", "n000/1.png", "n001/0.png", "n001/1.png"]
    assert "the only folder, 'train', is a split" in above.err
    assert "only folder" not in inside.err

    whole = precompute(tmp_path / "imagenet", tmp_path / "whole", "source.split=all")
    assert root_hash(whole) != root_hash(inside)
    assert facts(tmp_path / "whole")[2] == ["train"]


def test_a_link_to_itself_is_rejected_and_one_to_a_folder_around_it_is_counted(
    precompute: Precompute, tmp_path: Path
) -> None:
    source = make_class_folder(tmp_path / "imagenet/train", classes=2, per_class=15)
    (source / "n000/loop.png").symlink_to("loop.png")
    (source / "loop").symlink_to("loop")
    (source / "n001/up").symlink_to(source, target_is_directory=True)
    (source / "outside").symlink_to(source.parent, target_is_directory=True)
    done = precompute(source, tmp_path / "store")
    assert done.code == 0, done.err
    assert "31 planned = 30 stored + 1 rejected" in done.out
    assert "1 file, not images by name: 1 without extension" in done.out
    assert re.search(r"2 folders, .*linked twice: 1 (up, 1 outside|outside, 1 up)", done.out)
    records = LatentStore(tmp_path / "store").records.to_pylist()
    assert [(row["key"], row["reason"]) for row in records if row["reason"]] == [("n000/loop.png", "unreadable")]
    assert facts(tmp_path / "store")[2] == ["n000", "n001"]


LATIN = "image,text\n0.png,a cat\n1.png,café\n"


def test_a_table_in_latin_1_names_the_line_and_how_to_convert_it(precompute: Precompute, tmp_path: Path) -> None:
    source = make_class_folder(tmp_path / "source", classes=1, per_class=2) / "n000"
    (source / "list.csv").write_bytes(LATIN.encode("latin-1"))
    done = precompute(source, tmp_path / "store", "source.max_reject_share=1")
    assert "'list.csv', line 3: expected UTF-8" in done.err
    assert "iconv -f LATIN1 -t UTF-8" in done.err
    assert "codec" not in done.err
    row = LatentStore(tmp_path / "store").records.to_pylist()[1]
    assert row["reason"] == "bad_metadata"
    assert "line 3: not UTF-8" in row["detail"]

    rows = '{"file_name": "0.png"}\n\n{"file_name": "1.png", "text": "café"}\n'
    (source / "rows.jsonl").write_bytes(rows.encode("latin-1"))
    precompute(source / "rows.jsonl", tmp_path / "other", "source.max_reject_share=1")
    row = LatentStore(tmp_path / "other").records.to_pylist()[1]
    assert (row["reason"], "UTF-8" in row["detail"]) == ("bad_metadata", True)


def test_no_control_character_of_a_source_reaches_the_terminal(precompute: Precompute, tmp_path: Path) -> None:
    source = make_class_folder(tmp_path / "source", classes=2, per_class=12)
    (source / "n000").rename(source / "n\u202e000")
    (source / "n001/0.png").rename(source / "n001/\u202e\x1b[31m.png")
    (source / "n001/\u202e\x1b[31m.png").write_bytes(b"")
    (source / "n001/file.\u202egnp").write_bytes(b"")
    for flags in ([], ["--dry-run"]):
        words = ["--set", "source.max_reject_share=0.5", *flags]
        done = precompute(source, tmp_path / "store", flags=words)
        assert done.code == 0, done.err
        assert "n\\u202e000" in done.out
        assert re.findall(r"[^\n -~]", done.out + done.err) == []


WNIDS = ["n02099601", "n01440764"]
NEEDS = "it has no labels, and the recipe encodes no captions"


def flat(root: Path, *names: str) -> Path:
    root.mkdir(parents=True)
    for seed, name in enumerate(names):
        smooth_image(seed).save(root / name, "PNG")
    return root


def test_labels_of_a_flat_imagenet_are_the_wnids_of_its_file_names(precompute: Precompute, tmp_path: Path) -> None:
    names = [f"{wnid}_{number}.JPEG" for wnid in WNIDS for number in (7, 10026)]
    source, labelled = flat(tmp_path / "flat", *names), [0, 0, 1, 1]
    done = precompute(source, tmp_path / "store")
    assert done.code == 0, done.err
    assert facts(tmp_path / "store") == (sorted(names), labelled, sorted(WNIDS))
    assert "labels: the wnid at the start of 4 of 4 file names" in done.err
    assert NEEDS not in done.err
    assert "golden retriever" in done.out

    other = flat(tmp_path / "other", *names, "cat.JPEG")
    assert "4 of 5 file names" in (done := precompute(other, tmp_path / "guessed")).err
    assert "and the others have none" in done.err
    assert facts(tmp_path / "guessed")[1] == [-1, *labelled]
    done = precompute(other, tmp_path / "asked", "source.labels=wnid", "source.max_reject_share=1")
    assert done.code == 0, done.err
    assert "4 stored + 1 rejected" in done.out
    assert facts(tmp_path / "asked")[1][1:] == labelled

    done = precompute(other, tmp_path / "none", "source.labels=none")
    assert facts(tmp_path / "none")[1:] == ([-1] * 5, None)
    assert "labels:" not in done.err
    assert NEEDS not in done.err


def test_names_are_no_labels_where_the_source_has_others_or_few_begin_with_a_wnid(
    precompute: Precompute, tmp_path: Path
) -> None:
    folders = tmp_path / "folders"
    flat(folders / "a", "n01440764_1.JPEG", "n01440764_2.JPEG")
    flat(folders / "b", "n01440764_3.JPEG")
    assert precompute(folders, tmp_path / "of-folders").code == 0
    assert facts(tmp_path / "of-folders")[1:] == ([0, 0, 1], ["a", "b"])
    assert precompute(folders, tmp_path / "asked", "source.labels=wnid").code == 0
    assert facts(tmp_path / "asked")[1:] == ([0, 0, 0], ["n01440764"])

    table = flat(tmp_path / "table", "n01440764_1.JPEG", "n02099601_2.JPEG")
    (table / "metadata.csv").write_text("file_name,label\nn01440764_1.JPEG,cat\nn02099601_2.JPEG,cat\n")
    assert precompute(table, tmp_path / "of-table").code == 0
    assert facts(tmp_path / "of-table")[1:] == ([0, 0], ["cat"])
    done = precompute(table, tmp_path / "refused", "source.labels=wnid")
    assert done.code == 3
    assert 'source.labels "wnid" is for a folder of images; this is metadata' in done.err

    few = flat(tmp_path / "few", "n01440764_1.JPEG", "x.JPEG")
    done = precompute(few, tmp_path / "of-few")
    assert facts(tmp_path / "of-few")[1:] == ([-1, -1], None)
    assert NEEDS in done.err


def test_a_source_without_labels_is_warned_of_and_a_table_of_wnids_gives_them(
    precompute: Precompute, tmp_path: Path
) -> None:
    names = [f"ILSVRC2012_val_0000000{number}" for number in (1, 2, 3)]
    source = flat(tmp_path / "val", *(f"{name}.JPEG" for name in names))
    for flags in ([], ["--dry-run"]):
        done = precompute(source, tmp_path / "store", flags=flags)
        said = done.err + done.out
        assert done.code == 0, said
        assert "Write a table next to the images" in said
        assert NEEDS in said
    captions = source.with_name("captions")
    source.rename(captions)
    (captions / "metadata.csv").write_text("file_name,text\n" + "".join(f"{name}.JPEG,a cat\n" for name in names))
    assert NEEDS not in precompute(captions, tmp_path / "other", recipe="demo").err
    (captions / "metadata.csv").unlink()

    rows = zip(names, [*WNIDS, WNIDS[1]], strict=True)
    (captions / "labels.csv").write_text("image,wnid\n" + "".join(f"{name}.JPEG,{wnid}\n" for name, wnid in rows))
    done = precompute(captions, tmp_path / "labelled")
    assert done.code == 0, done.err
    assert facts(tmp_path / "labelled") == ([f"{name}.JPEG" for name in names], [1, 0, 0], sorted(WNIDS))
    assert "labels 'wnid'" in done.err
    assert NEEDS not in done.err


@pytest.mark.parametrize(("levels", "buckets"), [(4, 17), (5, 9)])
def test_buckets_of_a_small_resolution_fit_the_autoencoder(
    levels: int, buckets: int, precompute: Precompute, tmp_path: Path
) -> None:
    vae = save_autoencoder(
        tmp_path / "vae",
        "kl",
        block_out_channels=[8] * levels,
        down_block_types=["DownEncoderBlock2D"] * levels,
        up_block_types=["UpDecoderBlock2D"] * levels,
    )
    source = make_class_folder(tmp_path / "source", classes=1, per_class=1) / "n000"
    for number, size in enumerate([(300, 400), (400, 300), (300, 450), (200, 600)]):
        smooth_image(number, *size).save(source / f"{number}.png")
    images = ["images.resolution=128", "images.crop=bucket", "images.buckets=area", f"vae.model={vae}"]
    done = precompute(source, tmp_path / "store", "source.labels=none", *images)
    assert done.code == 0, done.err
    opened = LatentStore(tmp_path / "store")
    assert len(opened.spec.images.buckets) == buckets
    assert "128x128" in opened.spec.images.buckets
    assert len(set(opened.records.to_pydict()["bucket"])) >= 3
    assert "few buckets" not in done.err
    again = precompute(source, tmp_path / "store", "source.labels=none", *images)
    assert "nothing to encode" in again.out

    coarse = precompute(source, tmp_path / "coarse", "source.labels=none", *images, "images.step_px=64")
    assert coarse.code == 0, coarse.err
    assert LatentStore(tmp_path / "coarse").spec.images.buckets == ["64x256", "64x192", "128x128", "192x64", "256x64"]
    assert "few buckets" in coarse.err
