"""One split is stored, never several by accident; what no person made is no class; classes have names for people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset
from making import bytes_of, encode, image_bytes, label_recipe

from leandit.datasets.format.class_names import imagenet_names
from leandit.datasets.store import LatentStore
from leandit.errors import RecipeError, SourceError
from leandit.precompute.config import SourceSection
from leandit.precompute.pipeline import Report
from leandit.precompute.sources.source import Source, list_source, open_source
from leandit.tools.terminal.outcome import precompute_rows


def png(seed: int = 0) -> bytes:
    return image_bytes(seed, 40, 40)


def fill(root: Path, *names: str) -> Path:
    """A file for each name: an image, a Parquet file or a tar of one, or text."""
    for seed, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            pq.write_table(pa.table({"image": [png(seed)], "label": [seed % 2]}), path)
        elif name.endswith(".tar"):
            with webdataset.TarWriter(str(path)) as tar:
                tar.write({"__key__": "0", "png": png(seed)})
        else:
            path.write_bytes(png(seed) if name.endswith(".png") else b"text")
    return root


def listed(root: Path, **settings: Any) -> Source:
    return list_source(root, SourceSection(**settings))


def keys(root: Path, **settings: Any) -> list[str]:
    return [record.key for record in listed(root, **settings).records]


@pytest.mark.parametrize("folder", ["", "my-config/"])
def test_several_splits_of_parquet_are_refused_and_listed_and_one_is_taken_by_name(tmp_path: Path, folder: str) -> None:
    names = [f"train-0000{i}-of-00002" for i in range(2)] + ["validation-00000-of-00001"]
    root = fill(tmp_path, "README.md", *(f"{folder}{name}.parquet" for name in names))
    with pytest.raises(SourceError, match=r"train \(2 files\), validation \(1 file\).*source\.split=train"):
        listed(root)
    assert keys(root, split="train") == [f"{name}/0" for name in names[:2]]
    assert keys(root, split="validation") == keys(root, split="val") == [f"{names[2]}/0"]
    assert len(keys(root, split="all")) == 3
    with pytest.raises(SourceError, match=r"no split 'test'.*train \(2 files\)"):
        listed(root, split="test")


def test_shards_in_folders_of_splits_and_configurations(tmp_path: Path) -> None:
    root = fill(tmp_path / "a", "train/0000.parquet", "train/0001.parquet", "test/0000.parquet")
    with pytest.raises(SourceError, match=r"test \(1 item\), train \(2 items\)"):
        listed(root)
    assert keys(root, split="train") == keys(root / "train", split="train") == ["0000/0", "0001/0"]
    with pytest.raises(SourceError, match=r"folders of shards, which make one store each"):
        listed(root, split="all")
    root = fill(tmp_path / "b", "plain/train/0000.parquet", "plain/test/0000.parquet")
    assert keys(root, split="test") == ["0000/0"]
    with pytest.raises(SourceError, match=r"several configurations: a, b"):
        listed(fill(tmp_path / "c", "a/train-0.parquet", "b/train-0.parquet"))
    root = fill(tmp_path / "d", "0.parquet", "trains.parquet", "latest.parquet")  # names that tell no split
    assert keys(root) == ["0/0", "latest/0", "trains/0"]


FOLDERS = ("train/cat/0.png", "train/dog/1.png", "val/cat/2.png", "val/dog/3.png", "annotations/a.json")


def test_folders_of_splits_are_no_classes_unless_the_user_says_so(tmp_path: Path) -> None:
    root = fill(tmp_path, *FOLDERS)
    with pytest.raises(SourceError, match=r"several splits: train \(2 items\), val \(2 items\)"):
        listed(root)
    source = listed(root, split="train")
    assert ([record.key for record in source.records], source.classes) == (["cat/0.png", "dog/1.png"], ["cat", "dog"])
    assert source.notes == ["split 'train' of train, val"]
    assert listed(root, split="all").classes == ["annotations", "train", "val"]
    opened = open_source(root, source.settings)  # as a worker does
    assert bytes_of(opened, source.records[0]) == png(0)
    root = fill(tmp_path / "classes", "train/0.png", "test/1.png", "bus/2.png")  # a class that is called like a split
    assert listed(root).classes == ["bus", "test", "train"]
    with pytest.raises(SourceError, match="no split 'train'"):
        listed(root, split="train")


def test_a_folder_beside_those_of_two_splits_is_a_split_too(tmp_path: Path) -> None:
    """Otherwise train, val and extra would be three classes, with the images of the test set in one of them."""
    source = fill(tmp_path, "train/cat/0.png", "val/cat/1.png", "extra/cat/2.png")
    (source / "notes").mkdir()
    with pytest.raises(
        SourceError, match=r"extra \(1 item\), train \(1 item\), val \(1 item\)\. .*source\.split=train"
    ):
        listed(source)
    for split in ("train", "val", "extra"):
        assert listed(source, split=split).classes == ["cat"]
    assert keys(source, split="extra") == ["cat/2.png"]
    assert listed(source, split="all").classes == ["extra", "notes", "train", "val"]


def test_what_a_system_made_is_no_class_and_loose_images_are_taken_without_labels(tmp_path: Path) -> None:
    system = ("__MACOSX", ".ipynb_checkpoints", "@eaDir", "$RECYCLE.BIN", "lost+found", ".hidden")
    root = fill(tmp_path, "b/0.png", "a/0.png", "a/notes.txt", "a/@eaDir/0.png", *(f"{name}/0.png" for name in system))
    source = listed(root)
    assert source.classes == ["a", "b"]
    assert [(record.key, record.label) for record in source.records] == [("a/0.png", 0), ("b/0.png", 1)]
    assert source.ignored.folders == dict.fromkeys(system, 1) | {"@eaDir": 2}
    files, folders = source.ignored.lines()
    assert files == "1 file, not images by name: 1 .txt"
    assert folders.startswith("7 folders, hidden, system or linked twice: 2 @eaDir, 1 ")
    fill(root, "loose.png")
    problem = next(record.problem for record in listed(root).records if record.key == "loose.png")
    assert 'source.labels = "none"' in problem[1]
    source = listed(root, labels="none")
    assert {(record.label, record.problem) for record in source.records} == {(-1, None)}
    assert (len(source.records), source.classes) == (3, None)


def test_imagenets_names_fit_wnids_and_numbers_and_nothing_else(tmp_path: Path) -> None:
    wnids = list(imagenet_names())
    root = fill(tmp_path / "wnids", f"{wnids[207]}/0.png", f"{wnids[388]}/0.png")
    assert listed(root, class_names="imagenet").class_names == ["golden retriever", "giant panda"]
    numbers = fill(tmp_path / "numbers", "0.parquet", "1.parquet")
    assert listed(numbers, class_names="imagenet").class_names == ["tench", "goldfish"]
    with pytest.raises(SourceError, match="no name for 2 of 2 classes: cat, dog"):
        listed(fill(tmp_path / "others", "cat/0.png", "dog/0.png"), class_names="imagenet")


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (None, RecipeError, "No such file"),
        ("Cat\n", SourceError, "no name for 1 of 2 classes: n2"),
        ("Cat\n" + "x" * 1001, RecipeError, r"names\.txt': line 2 is .*at most 1000 characters"),
        ("\n", RecipeError, "names nothing"),
    ],
)
def test_names_of_classes_are_read_from_a_file_and_refused_where_they_cannot_be_used(
    content: str | None, error: type[Exception], message: str, tmp_path: Path
) -> None:
    root = fill(tmp_path / "source", "n1/0.png", "n2/0.png")
    for names in ("Cat\n\nDog\n", "n2\tDog\nn1\tCat\n", "1\tDog\n0\tCat\n"):
        (tmp_path / "names.txt").write_text(names)
        assert listed(root, class_names=str(tmp_path / "names.txt")).class_names == ["Cat", "Dog"]
    (tmp_path / "names.txt").unlink()
    if content is not None:
        (tmp_path / "names.txt").write_text(content)
    with pytest.raises(error, match=message):
        listed(root, class_names=str(tmp_path / "names.txt"))
    with pytest.raises(SourceError, match="no classes to name"):
        listed(fill(tmp_path / "flat", "0.png"), class_names="imagenet")


@pytest.mark.usefixtures("quick")
def test_a_store_gets_names_later_without_encoding_and_keeps_them(tmp_path: Path) -> None:
    root, store = fill(tmp_path / "source", "n1/0.png", "n2/0.png", "__MACOSX/0.png"), tmp_path / "store"
    (tmp_path / "names.txt").write_text("Cat\nDog\n")

    def make(*overrides: str) -> Report:
        return encode(label_recipe(*overrides), root, store)

    rows = dict(precompute_rows(make(), store))
    assert rows["classes"] == "2: n1 ... n2"
    assert rows["ignored"] == "1 folder, hidden, system or linked twice: 1 __MACOSX"
    first = LatentStore(store)
    assert "class_names" not in json.loads((store / "zarr.json").read_bytes())["attributes"]["leandit"]
    report = make(f"source.class_names={tmp_path / 'names.txt'}")
    named = LatentStore(store)
    assert (report.num_encoded, named.revision, named.spec.fingerprint) == (0, 2, first.spec.fingerprint)
    assert (named.class_names.find("dog"), named.class_names.describe(0)) == (1, "Cat (n1)")
    fill(root, "n0/0.png")
    make()
    grown = LatentStore(store)
    assert (grown.spec.classes, grown.class_names.names) == (["n0", "n1", "n2"], ["n0", "Cat", "Dog"])


NAMES = ("train/0.png", "train/1.png", "test/0.png", "test/1.png")


def write_table(root: Path, name: str, rows: list[dict[str, Any]]) -> Path:
    """A table of any format, by its name."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif name.endswith((".csv", ".tsv")):
        mark = "," if name.endswith("csv") else "\t"
        path.write_text("\n".join(mark.join(map(str, row)) for row in [[*rows[0]], *(row.values() for row in rows)]))
    elif "captions_" in name:
        images = [{"id": i, "file_name": row["file_name"]} for i, row in enumerate(rows)]
        texts = [{"image_id": i, "caption": row["text"]} for i, row in enumerate(rows)]
        path.write_text(json.dumps({"images": images, "annotations": texts}))
    elif name.endswith(".jsonl"):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path.write_text(json.dumps(rows))
    return path


def rows_of(*names: str) -> list[dict[str, Any]]:
    return [{"file_name": name, "text": f"of {name}"} for name in names]


TABLES = (
    *("metadata.jsonl", "metadata.csv", "metadata.tsv", "metadata.parquet", "list.json", "list.jsonl", "list.csv"),
    *("list.parquet", "annotations/captions_all.json"),
)


@pytest.mark.parametrize("table", TABLES)
def test_a_table_that_names_images_of_several_splits_stores_one_of_them(table: str, tmp_path: Path) -> None:
    root = fill(tmp_path, *NAMES)
    path = write_table(root, table, rows_of(*NAMES))
    source = path if table.startswith("list") else root
    with pytest.raises(SourceError, match=r"train \(2 images\), test \(2 images\).*source\.split=train"):
        listed(source)
    assert keys(source, split="train") == ["train/0.png", "train/1.png"]
    assert keys(source, split="eval") == ["test/0.png", "test/1.png"]
    assert keys(source, split="all") == list(NAMES)
    with pytest.raises(SourceError, match=r"no split 'val'\. It holds: train \(2 images\), test \(2 images\)"):
        listed(source, split="val")


@pytest.mark.parametrize(
    ("names", "expected"),
    {
        "years": (("train2017/0.png", "val2017/1.png"), {"train": ["train2017/0.png"], "dev": ["val2017/1.png"]}),
        "images of the hub": (("train_images/0.png", "test_images/1.png"), {"train": ["train_images/0.png"]}),
        "no folder beside one": (("0.png", "test/1.png"), {"train": ["0.png"], "unnamed": ["0.png"]}),
        "classes with both": (
            ("cat/train/0.png", "cat/test/1.png", "dog/train/2.png"),
            {"train": ["cat/train/0.png", "dog/train/2.png"], "test": ["cat/test/1.png"]},
        ),
        "below a folder of a split": (("test/train/0.png", "test/val/1.png"), {"train": ["test/train/0.png"]}),
        "three of them": (("eval/0.png", "dev/0.png", "training/0.png"), {"test": ["eval/0.png"]}),
    }.values(),
)
def test_folders_of_a_table_are_splits_by_their_names(
    names: tuple[str, ...], expected: dict[str, list[str]], tmp_path: Path
) -> None:
    root = fill(tmp_path, *names)
    write_table(root, "metadata.jsonl", rows_of(*names))
    with pytest.raises(SourceError, match="several splits"):
        listed(root)
    for split, chosen in expected.items():
        assert keys(root, split=split) == chosen


@pytest.mark.parametrize(
    "names", [("train/0.png", "more/1.png"), ("test/0.png", "test/1.png"), ("a/latest/0.png", "a/testing ground/1.png")]
)
def test_a_table_of_one_split_or_none_is_stored_as_it_is(names: tuple[str, ...], tmp_path: Path) -> None:
    root = fill(tmp_path, *names)
    write_table(root, "metadata.jsonl", rows_of(*names))
    assert keys(root) == list(names)


@pytest.mark.parametrize("row", ["no,such,row", ",a text", '"train/9.png'])
def test_a_row_that_cannot_be_read_is_a_reject_of_every_split_and_none_of_its_own(row: str, tmp_path: Path) -> None:
    names = ["val/0.png", "val/1.png", "train/2.png"]
    root = fill(tmp_path, *names)
    table = root / "metadata.csv"
    table.write_text(f"file_name,text\nval/0.png,a\nval/1.png,b\n{row}\n")
    reasons = {record.key: record.problem[0] if record.problem else "" for record in listed(root).records}
    assert sorted(reasons.values()) == ["", "", "bad_metadata"]
    table.write_text(f"file_name,text\nval/0.png,a\ntrain/2.png,b\n{row}\n")
    with pytest.raises(SourceError, match=r"validation \(1 image\), train \(1 image\)\. Name"):
        listed(root)
    reasons = {
        record.key: record.problem[0] if record.problem else "" for record in listed(root, split="train").records
    }
    assert sorted(reasons.values()) == ["", "bad_metadata"]


@pytest.mark.parametrize("table", [name for name in TABLES if "captions_" not in name])
def test_a_column_of_splits_tells_them_rather_than_folders(table: str, tmp_path: Path) -> None:
    names = [f"val2014/{i}.png" for i in range(4)]
    root = fill(tmp_path, *names)
    splits = ("train", "Test", "train", "restval")
    rows = [row | {"label": f"class {i}", "split": splits[i]} for i, row in enumerate(rows_of(*names))]
    path = write_table(root, table, rows)
    source = path if table.startswith("list") else root
    with pytest.raises(SourceError, match=r"several splits: .*train \(2 rows\).*source\.split=train"):
        listed(source)
    assert keys(source, split="train") == [names[0], names[2]]
    assert keys(source, split="test") == [names[1]]
    assert keys(source, split="restval") == [names[3]]
    assert listed(source, split="test").classes == [
        f"class {i}" for i in range(4)
    ]  # the labels of all splits are equal
    assert keys(source, split="all") == names


@pytest.mark.parametrize("values", [("train2014", "val2014"), ("train_set", "test_set"), ("Training", "Valid")])
def test_a_column_of_splits_may_have_years_and_the_word_set(values: tuple[str, str], tmp_path: Path) -> None:
    names = ["0.png", "1.png"]
    rows = [row | {"split": value} for row, value in zip(rows_of(*names), values, strict=True)]
    source = fill(tmp_path, *names)
    write_table(source, "metadata.jsonl", rows)
    with pytest.raises(SourceError, match="several splits"):
        listed(source)
    for split in ("train", values[0]):
        assert keys(source, split=split) == ["0.png"]
    assert keys(source, split=values[1]) == ["1.png"]


@pytest.mark.parametrize("names", [("trainset-0.tar", "testset-0.tar"), ("my_trainset.parquet", "my_testset.parquet")])
def test_names_of_shards_may_have_the_word_set(names: tuple[str, str], tmp_path: Path) -> None:
    fill(tmp_path, *names)
    with pytest.raises(SourceError, match="several splits"):
        listed(tmp_path)
    assert keys(tmp_path, split="train") == [f"{names[0].rpartition('.')[0]}/0"]


def test_a_column_of_splits_beside_the_images(tmp_path: Path) -> None:
    for number, splits in enumerate((["train", "test"], ["val", None])):
        columns = {"image": [png(0), png(1)], "split": splits, "text": ["one", "two"]}
        pq.write_table(pa.table(columns), tmp_path / f"part-{number}.parquet")
    with pytest.raises(SourceError, match=r"train \(1 row\), test \(1 row\), validation \(1 row\), unnamed \(1 row\)"):
        listed(tmp_path)
    for split, key in {"train": "part-0/0", "test": "part-0/1", "val": "part-1/0", "unnamed": "part-1/1"}.items():
        assert keys(tmp_path, split=split) == [key]
    assert len(keys(tmp_path, split="all")) == 4
    columns = {"image": [png(0), png(1)], "split": ["left", "right"]}  # no splits of a data set
    (tmp_path / "other").mkdir()
    pq.write_table(pa.table(columns), tmp_path / "other/0.parquet")
    assert len(keys(tmp_path / "other")) == 2


@pytest.mark.parametrize(
    ("names", "listed_splits"),
    {
        "tars": (("00000.tar", "00001.tar", "val-00000.tar"), r"val \(1 file\), unnamed \(2 files\)"),
        "parts": (
            ("a.parquet", "b.parquet", "test-00000-of-00001.parquet"),
            r"test \(1 file\), unnamed \(2 files\)",
        ),
        "evaluation": (("x0.tar", "x1.tar", "x-eval.tar"), r"eval \(1 file\), unnamed \(2 files\)"),
    }.values(),
)
def test_shards_without_a_split_beside_those_of_one_are_a_split_too(
    names: tuple[str, ...], listed_splits: str, tmp_path: Path
) -> None:
    root = fill(tmp_path, *names)
    stems = [name.rpartition(".")[0] for name in names]
    with pytest.raises(SourceError, match=rf"{listed_splits}.*source\.split=unnamed"):
        listed(root)
    for split in ("train", "unnamed"):
        assert keys(root, split=split) == [f"{stem}/0" for stem in stems[:2]]
    assert len(keys(root, split="all")) == 3
    fill(root, f"train-0{names[0][-8:]}" if names[0].endswith("parquet") else "train-0.tar")
    assert len(keys(root, split="train")) == 1
    assert len(keys(root, split="unnamed")) == 2


@pytest.mark.parametrize(
    ("names", "expected"),
    {
        "a tree of texts": (
            ("images/train/0.png", "images/test/1.png", "captions/train/0.txt", "captions/test/1.txt"),
            {"train": ["images/train/0.png"], "test": ["images/test/1.png"]},
        ),
        "texts beside": (("0.png", "0.txt", "test/1.png", "test/1.txt"), {"train": ["0.png"], "test": ["test/1.png"]}),
        "classes": (
            ("cat/train/0.png", "cat/test/1.png", "dog/train/2.png", "dog/test/3.png"),
            {"train": ["cat/train/0.png", "dog/train/2.png"]},
        ),
    }.values(),
)
def test_splits_deep_in_a_tree_are_refused_and_chosen(
    names: tuple[str, ...], expected: dict[str, list[str]], tmp_path: Path
) -> None:
    root = fill(tmp_path, *names)
    with pytest.raises(SourceError, match="several splits"):
        listed(root)
    for split, chosen in expected.items():
        assert keys(root, split=split) == chosen
    assert len(keys(root, split="all")) == sum(name.endswith("png") for name in names)


def test_folders_inside_of_tars_are_splits(tmp_path: Path) -> None:
    with webdataset.TarWriter(str(tmp_path / "all.tar")) as tar:
        for i, name in enumerate(("train/a", "train/b", "test/c")):
            tar.write({"__key__": name, "png": png(i)})
    for source in (tmp_path, tmp_path / "all.tar"):
        with pytest.raises(SourceError, match=r"train \(2 images\), test \(1 image\)"):
            listed(source)
        assert keys(source, split="train") == ["all/train/a", "all/train/b"]
        with pytest.raises(SourceError, match="no split 'val'"):
            listed(source, split="val")


def test_splits_at_a_url_are_those_of_the_folder(tmp_path: Path) -> None:
    url = f"memory://splits/{tmp_path.name}"
    fs, top = fsspec.core.url_to_fs(url)
    root = fill(tmp_path, *NAMES)
    write_table(root, "metadata.jsonl", rows_of(*NAMES))
    for path in root.rglob("*.*"):
        fs.pipe_file(f"{top}/{path.relative_to(root)}", path.read_bytes())
    with pytest.raises(SourceError, match=r"train \(2 images\), test \(2 images\)"):
        list_source(url)
    assert [r.key for r in list_source(url, SourceSection(split="test")).records] == ["test/0.png", "test/1.png"]
