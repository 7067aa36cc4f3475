"""FORMAT.md is the norm: it names all that the writer makes, and a reader written from it alone reads a store."""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import fields
from importlib import resources
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
import zarr
from making import CPU, caption_recipe, no_progress
from page_reader import PageReader, canonical_hash, folder_of
from pydantic import BaseModel
from stores import Everything

from leandit.datasets.format.layout import RevisionLayout
from leandit.datasets.format.schema import (
    FORMAT_VERSION,
    CheckedImage,
    EncoderIdentity,
    FileEntry,
    ImageSpec,
    LatentSpec,
    LatentStatistics,
    LocalFile,
    Manifest,
    Origin,
    SelfCheck,
    StoreSpec,
    TextSpec,
)
from leandit.datasets.format.table_schemas import REJECT_REASONS
from leandit.datasets.format.zarr_shard import ArrayLayout
from leandit.datasets.maintenance.compact import compact
from leandit.datasets.store import LatentStore
from leandit.precompute.pipeline import precompute

TEXT = (resources.files("leandit.datasets") / "FORMAT.md").read_text()
_, *PARTS = re.split(r"^## (\d)\. .*$", TEXT, flags=re.MULTILINE)
SECTION = dict(zip(map(int, PARTS[::2]), PARTS[1::2], strict=True))
TREE = TEXT.split("```")[1]
OWN = "revisions/000001"


def quoted(text: str) -> set[str]:
    """All words between backticks."""
    return set(re.findall(r"`([^`\n]+)`", text))


def row_of(section: int, key: str) -> str:
    """The row of a section's table that begins with a key (or with a list that holds it)."""
    rows = [line for line in SECTION[section].splitlines() if line.startswith("|")]
    (row,) = [line for line in rows if key in quoted(line.split("|")[1])]
    return row


def paragraph(section: int, beginning: str) -> str:
    """The paragraph of a section that begins so."""
    (found,) = [p for p in SECTION[section].split("\n\n") if p.startswith(beginning)]
    return found


def keys_of(model: type[BaseModel]) -> set[str]:
    return set(model.model_fields)


def general(path: str) -> str:
    """A path of a store with its revision, bucket and names as FORMAT.md writes them."""
    path = re.sub(r"^revisions/\d{6}/", "revisions/NNNNNN/", path)
    path = re.sub(r"\b\d+x\d+\b", "HxW", path)
    path = re.sub(r"/index/[a-z_]+[.]bin", "/index/NAME.bin", path)
    return re.sub(r"/(pair|vector|llm|dino|grid|token)/", "/NAME/", path)


def tree_names() -> set[str]:
    """Paths in the tree of FORMAT.md; what is set in further lies in the folder above."""
    named, folder = set(), ""
    for line in TREE.splitlines():
        if line.startswith("    "):
            names = re.match(r"(\S+, )*\S+", line.strip())
            for name in names[0].split(", ") if names else ():
                named |= {folder + name} | ({f"{folder}{name}_flip"} if "buckets" in folder else set())
        elif line.startswith("  "):
            name = line.strip().split(" ")[0]
            named.add(name)
            folder = name if name.endswith("/") else folder
    named |= {name.replace("captions/", "captions/NAME/") for name in named if name.startswith("captions/")}
    assert "a second copy of the five files above" in TREE
    own = [name for name in named if re.fullmatch("revisions/NNNNNN/[a-z]+[.][a-z]+", name)]
    assert len(own) == 5
    return named | {name.replace("NNNNNN/", "NNNNNN/twin/") for name in own}


@pytest.fixture(scope="module")
def bfloat16_store(caption_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> LatentStore:
    path = tmp_path_factory.mktemp("narrow") / "store"
    recipe = caption_recipe("store.text_dtype=bfloat16")
    precompute(recipe, source_path=caption_folder, store_path=path, device=CPU, progress=no_progress)
    return LatentStore(path)


@pytest.fixture(scope="module")
def store_of_everything(everything: Everything) -> LatentStore:
    return LatentStore(everything.grown)


@pytest.mark.parametrize("name", ["label_store", "caption_store", "store_of_everything"])
def test_every_path_that_the_writer_makes_is_in_the_tree(name: str, request: pytest.FixtureRequest) -> None:
    root = request.getfixturevalue(name).path
    named = tree_names()
    made = {general(path.relative_to(root).as_posix()) for path in root.rglob("*") if path.is_file()}
    groups = {array.rpartition("/")[0] for array in made if "/c/" in array}
    for path in made:
        array = re.sub(r"/(zarr\.json|c/.*)$", "", path)  # the metadata and the shards of an array
        is_group = path.endswith("zarr.json") and any(f"{group}/".startswith(f"{array}/") for group in (*groups, array))
        assert path in named or array in named or is_group, path
    assert {f"revisions/NNNNNN/{copy}local.json" for copy in ("", "twin/")} <= made
    assert not any("/plan/" in path or "/commits/" in path for path in made)
    if name == "store_of_everything":
        assert {"buckets/HxW/moments_flip/zarr.json", "captions/NAME/null_pooled/zarr.json"} <= made
        assert {"captions/null/zarr.json", "buckets/HxW/features/NAME/cls_scales_flip/zarr.json"} <= made


NESTED = {"images": ImageSpec, "latent": LatentSpec, "text": TextSpec, "text_encoder": EncoderIdentity}


def test_every_key_of_the_attribute_and_of_its_parts_is_named() -> None:
    for key in keys_of(StoreSpec):
        assert key in quoted(row_of(2, key)), key
    for key, model in NESTED.items():
        assert keys_of(model) - quoted(row_of(2, key)) == set()
    assert row_of(2, "vae") == row_of(2, "text_encoder")


def test_the_store_has_the_keys_that_are_named(caption_store: LatentStore) -> None:
    found = json.loads((caption_store.path / "zarr.json").read_bytes())["attributes"]["leandit"]
    given = {"class_names", "texts", "features", "companions", "sample_captions"}  # to other stores
    assert found.keys() == keys_of(StoreSpec) - given
    assert found["format_version"] == FORMAT_VERSION
    assert TEXT.startswith(f"# The store on disk, format version {FORMAT_VERSION}\n")
    # Of further crops, of imported and patchified latents, and of unusual text encoders.
    absent = {"variants", "variant_zoom", "decoding", "patchify", "output", "full_length", "attend_padding"}
    absent |= {"instruction", "layers", "drop_prefix_tokens", "pooled_width"}
    for key, model in NESTED.items():
        assert found[key].keys() == keys_of(model) - absent


def test_every_kind_of_latent_is_explained() -> None:
    kinds = LatentSpec.model_fields["kind"].annotation.__args__  # pyright: ignore
    assert all(kind in quoted(row_of(3, kind)) for kind in kinds)


def test_the_fingerprint_is_made_of_what_is_said(caption_store: LatentStore) -> None:
    (said,) = [p for p in SECTION[2].split("\n\n") if p.startswith("The fingerprint hashes")]
    assert quoted(said) - {"model", "revision", "texts", "features", "companions"} == set(caption_store.spec.identity())
    assert caption_store.spec.with_fingerprint().fingerprint == caption_store.spec.fingerprint


ARROW_OF = {"string": pa.string(), "int64": pa.int64(), "int32": pa.int32(), "uint64": pa.uint64()}
ARROW_OF |= {"float32": pa.float32(), "bool": pa.bool_(), "list of int32": pa.list_(pa.int32())}


def test_every_column_of_the_records_is_named_with_its_type(caption_store: LatentStore) -> None:
    for field in pq.read_schema(caption_store.path / OWN / "records.parquet"):
        _, names, types, *_ = row_of(4, field.name).split("|")
        kinds = [kind.strip() for kind in types.split(",")]
        kind = kinds[min(re.findall(r"`(\w+)`", names).index(field.name), len(kinds) - 1)]
        assert ARROW_OF[kind] == field.type, field.name


def test_every_column_of_the_captions_is_named_with_its_type(caption_store: LatentStore) -> None:
    (said,) = [p for p in SECTION[4].split("\n\n") if p.startswith("`captions.parquet`")]
    said = said.replace("\n", " ")
    for field in pq.read_schema(caption_store.path / OWN / "captions.parquet"):
        kind = re.search(rf"`{field.name}` \((\w+)", said)
        assert kind, field.name
        assert ARROW_OF[kind[1]] == field.type


def test_the_reject_reasons_are_the_closed_list() -> None:
    (said,) = [p for p in SECTION[4].split("\n\n") if p.startswith("Reasons:")]
    assert quoted(said) == set(REJECT_REASONS)
    assert {"scan", "decode", "encode"} <= quoted(row_of(4, "stage"))
    assert {"stored", "rejected"} <= quoted(row_of(4, "status"))


def test_every_key_of_the_manifest_and_of_local_json_is_named(caption_store: LatentStore) -> None:
    manifest, local = quoted(paragraph(5, "`manifest.json`")), quoted(paragraph(5, "`local.json`"))
    assert keys_of(Manifest) | keys_of(FileEntry) | {field.name for field in fields(ArrayLayout)} <= manifest
    assert keys_of(LatentStatistics) <= quoted(paragraph(5, "`statistics`"))
    assert keys_of(SelfCheck) | keys_of(CheckedImage) <= quoted(paragraph(5, "`self_check`"))
    assert keys_of(LocalFile) | keys_of(Origin) <= local
    for folder in (OWN, f"{OWN}/twin"):
        root = caption_store.path / folder
        assert json.loads((root / "manifest.json").read_bytes()).keys() == keys_of(Manifest) - {"self_check"}
        said = json.loads((root / "local.json").read_bytes())
        assert said.keys() == keys_of(LocalFile)
        assert said.pop("sha256") == canonical_hash(said)
    for path in (caption_store.path / OWN / "twin").iterdir():
        assert path.read_bytes() == (path.parents[1] / path.name).read_bytes()


def test_the_places_of_the_images_are_in_the_table_that_is_named(caption_store: LatentStore) -> None:
    path = caption_store.path / OWN / "sources.parquet"
    said = " ".join(paragraph(5, "`sources.parquet`").split())
    assert set(pq.read_schema(path).names) <= quoted(said)
    assert pq.read_metadata(path).num_rows == caption_store.records.num_rows
    entry, data = json.loads((path.parent / "local.json").read_bytes())["sources"], path.read_bytes()
    assert entry.pop("path") == f"{OWN}/sources.parquet"
    assert entry == {"bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}


@pytest.mark.parametrize("name", ["caption_store", "store_of_everything"])
def test_the_root_hash_and_the_files_are_made_as_said(name: str, request: pytest.FixtureRequest) -> None:
    store: LatentStore = request.getfixturevalue(name)
    prefix = f"revisions/{store.revision:06d}/"
    content = json.loads((store.path / prefix / "manifest.json").read_bytes())
    root_hash = content.pop("root_hash")
    assert canonical_hash(content) == root_hash == store.root_hash
    listed = [entry["path"] for entry in content["files"]]
    there = {p.relative_to(store.path).as_posix() for p in store.path.rglob("*") if p.is_file()}
    own = {path for path in there if path.startswith(f"{prefix}index/")}
    own |= {f"{prefix}records.parquet", f"{prefix}captions.parquet"}
    assert listed == sorted({path for path in there if "/c/" in path} | own)
    for entry in content["files"]:
        data = (store.path / entry["path"]).read_bytes()
        assert (len(data), xxhash.xxh3_128_hexdigest(data)) == (entry["bytes"], entry["xxh3_128"])
    assert content["num_planned"] == content["num_stored"] + content["num_rejected"]
    assert [array["path"] for array in content["arrays"]] == sorted(array["path"] for array in content["arrays"])
    text = json.dumps(content)
    assert str(store.path.parent) not in text
    assert "shipped:" not in text  # nor the name that an encoder was loaded by


# The reader of tests/support/page_reader.py is written from FORMAT.md alone.


def test_a_reader_written_from_the_page_alone_reads_tokens_of_bfloat16(bfloat16_store: LatentStore) -> None:
    reader = PageReader(bfloat16_store.path)
    assert "bfloat16" in quoted(row_of(1, "bfloat16"))
    assert reader.layouts["captions/embeddings"]["dtype"] == "uint16"
    for i, caption in enumerate(reader.captions):
        tokens, _, checksum = reader.caption("", i)
        assert tokens is not None
        assert (checksum, len(tokens)) == (caption["checksum"], caption["num_tokens"])
        np.testing.assert_array_equal(tokens, bfloat16_store.caption_embedding(i))
    np.testing.assert_array_equal(reader.null("")[0], bfloat16_store.null_caption)  # pyright: ignore
    lengths = [(caption["revision"], caption["num_tokens"]) for caption in reader.captions]
    assert lengths == sorted(lengths)


def test_shards_grow_with_the_store_so_that_a_process_can_map_all(
    caption_store: LatentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later revisions keep their size, although they add little."""
    moments, embeddings, spec = "buckets/64x64/moments", "captions/embeddings", caption_store.spec
    huge = RevisionLayout(spec, 1, {"64x64": 10**9}, {"": np.array([5])}).arrays[moments]
    assert 2048 < huge.num_shards <= 4096
    assert huge.shard_rows * huge.row_bytes <= 512 << 20
    usual = RevisionLayout(spec, 1, {"64x64": 50_000}, {"": np.full(10**6, 5)}).arrays
    monkeypatch.setattr("leandit.datasets.format.row_layout.MAX_SHARDS", 3)
    large = RevisionLayout(spec, 1, {"64x64": 50_000}, {"": np.full(10**6, 5)}).arrays
    more = {"": np.full(10**6 + 7, 5)}
    grown = RevisionLayout(spec, 2, {"64x64": 5}, more, first_caption=10**6, before=large).arrays
    for path in (moments, embeddings):
        assert usual[path].shard_rows * usual[path].row_bytes == spec.shard_mib << 20
        assert usual[path].num_shards > 3 >= large[path].num_shards
        assert grown[path].shard_rows == large[path].shard_rows
        assert grown[path].num_shards == large[path].num_shards + 1


STORES = pytest.mark.parametrize("name", ["grown", "compacted"])


@pytest.fixture(scope="module")
def compacted(everything: Everything, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compact") / "compacted"
    compact(everything.grown, path, progress=no_progress)
    return path


@pytest.fixture
def root(name: str, everything: Everything, request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue("compacted") if name == "compacted" else everything.grown


def equal(found: np.ndarray | None, wanted: np.ndarray) -> None:
    assert found is not None
    assert found.shape == wanted.shape
    np.testing.assert_array_equal(found.astype(np.float32), wanted.astype(np.float32))


@STORES
def test_a_reader_written_from_the_page_alone_reads_the_latents_of_every_record(root: Path) -> None:
    store, reader = LatentStore(root), PageReader(root)
    counts = dict.fromkeys(reader.manifest["buckets"], 0)
    for record in reader.stored:
        bucket, row = record["bucket"], record["row"]
        counts[bucket] += 1
        (latents, flipped), checksum = reader.latents(record)
        assert checksum == record["checksum"]
        assert store.record(record["key"]).row == row
        equal(latents, store.latents(bucket)[row])
        equal(flipped, store.flipped_latents(bucket)[row])
    assert counts == reader.manifest["buckets"] == store.buckets


@STORES
def test_a_reader_written_from_the_page_alone_reads_the_captions_of_every_encoder(root: Path) -> None:
    store, reader = LatentStore(root), PageReader(root)
    assert list(reader.texts) == store.texts == ["", "pair", "vector", "llm"]
    assert len(reader.captions) == reader.manifest["num_captions"] == store.captions.num_rows > 4
    for name in reader.texts:
        suffix, ours = f"_{name}" if name else "", store.text(name)
        for i, caption in enumerate(reader.captions):
            tokens, pooled, checksum = reader.caption(name, i)
            assert checksum == caption[f"checksum{suffix}"]
            if name == "vector":
                assert tokens is None
            else:
                equal(tokens, ours[i])
                assert len(ours[i]) == (60 if name == "pair" else caption[f"num_tokens{suffix}"])
            if name in ("pair", "vector"):
                equal(pooled, ours.pooled_vector(i))
            else:
                assert pooled is None
        tokens, pooled = reader.null(name)
        if tokens is not None:
            equal(tokens, ours.null)
        if pooled is not None:
            equal(pooled, ours.null_pooled)
        assert (tokens is None, pooled is None) == (name == "vector", name in ("", "llm"))


@STORES
def test_the_index_has_the_numbers_of_the_tables(root: Path) -> None:
    reader, size_px = PageReader(root), lambda name: [int(side) for side in name.split("x")]
    places = sorted(
        (size_px(record["bucket"]), record["row"], position)
        for position, record in enumerate(reader.records)
        if record["status"] == "stored"
    )
    stored = [reader.records[position] for *_, position in places]
    ids, of_bucket = [record["caption_ids"] for record in stored], dict[str, list[int]]()
    for record in stored:
        of_bucket.setdefault(record["bucket"], []).append(len(record["caption_ids"]))
    wanted = {
        "rows": [row for _, row, _ in places],
        "records": [position for *_, position in places],
        "labels": [record["label"] for record in stored],
        "caption_ids": [one for some in ids for one in some],
        "caption_starts": [start for some in of_bucket.values() for start in (0, *accumulate(some))],
        "keys": [xxhash.xxh3_64_intdigest(record["key"].encode(), seed=0x686F6C64) for record in reader.records],
    }
    for name in ("checksum", *(f"checksum_{name}" for name in reader.features)):
        wanted[name] = [record[name] or 0 for record in reader.records]
    for name, spec in reader.texts.items():
        suffix = f"_{name}" if name != next(iter(reader.texts)) else ""
        starts, tokens, sums = (
            [one[f"{what}{suffix}"] for one in reader.captions] for what in ("start", "num_tokens", "checksum")
        )
        wanted[f"caption_start{suffix}"] = starts
        wanted[f"caption_length{suffix}"] = [spec["max_tokens"]] * len(tokens) if spec.get("full_length") else tokens
        wanted[f"caption_checksum{suffix}"] = [one or 0 for one in sums]
    assert {path.stem for path in folder_of(root, reader.revision).glob("index/*")} == wanted.keys()
    for name, numbers in wanted.items():
        assert reader.index(name, len(numbers)).tolist() == numbers, name


@STORES
def test_such_a_reader_reads_the_features_of_every_record(root: Path) -> None:
    store, reader = LatentStore(root), PageReader(root)
    assert list(reader.features) == store.features == ["dino", "grid", "token"]
    outputs = {"dino": {"patches", "cls"}, "grid": {"patches"}, "token": {"cls"}}
    stored = [record for record in reader.records if record["status"] == "stored"]
    assert len(stored) == len(store) >= 8
    assert len({record["revision"] for record in stored}) == {"grown": 3}.get(root.name, 1)
    for name, of_feature in outputs.items():
        for record in stored:
            found, checksum = reader.feature(name, record)
            assert found.keys() == of_feature | {f"{output}_flip" for output in of_feature}
            assert checksum == record[f"checksum_{name}"]
            ours, row = store.feature(name, record["bucket"]), store.record(record["key"]).row
            for output in of_feature:
                equal(found[output], ours.row(row, output))
                assert not np.array_equal(found[output], found[f"{output}_flip"])
            if "patches" in of_feature:
                assert len(found["patches"]) == reader.num_patches(name, record["bucket"])


def zarr_arrays(root: Path) -> dict[str, Any]:
    """All arrays below a root group by their path, as zarr-python lists them."""
    with warnings.catch_warnings():  # it wonders about tables, commit records and plans
        warnings.simplefilter("ignore")
        members = dict(zarr.open_group(root, mode="r").members(max_depth=None))
    return {path: member for path, member in members.items() if isinstance(member, zarr.Array)}


@STORES
def test_zarr_opens_the_root_group_and_lists_every_array_and_the_tables_have_their_columns(root: Path) -> None:
    reader, found = PageReader(root), zarr_arrays(root)
    assert found.keys() == reader.layouts.keys()
    assert {"captions/pair/pooled", "captions/vector/null_pooled", "captions/llm/scales"} <= found.keys()
    assert {"buckets/64x64/features/grid/patches_flip", "buckets/64x64/features/token/cls_scales"} <= found.keys()
    for path, array in found.items():  # the numbers of all rows that exist are those of the page
        layout = reader.layouts[path]
        assert (list(array.shape), array.dtype) == (layout["shape"], layout["dtype"])
        assert array.attrs.asdict() == ({"bits_of": "bfloat16"} if layout["dtype"] == "uint16" else {})
        for _, first, end in layout["ranges"]:
            np.testing.assert_array_equal(array[first:end], reader.array(path)[first:end])
    group = LatentStore(root).zarr
    assert group.read_only
    assert group.attrs.asdict() == {"leandit": reader.spec}
    folder, results = folder_of(root, reader.revision), ("checksum", "min_cosine", "max_error")
    of_features = [f"{result}_{name}" for name in ("dino", "grid", "token") for result in results]
    assert pq.read_schema(folder / "records.parquet").names[-9:] == of_features
    names, of_texts = pq.read_schema(folder / "captions.parquet").names, ("num_tokens", "truncated", "start", *results)
    assert names[:2] == ["text", "revision"]
    assert names[-18:] == [f"{column}_{name}" for name in ("pair", "vector", "llm") for column in of_texts]


def test_added_arrays_have_the_rows_of_all_revisions(everything: Everything) -> None:
    before, reader = PageReader(everything.before), PageReader(everything.grown)
    (layout, late) = (reader.layouts[f"buckets/64x64/{name}"] for name in ("moments", "features/grid/patches"))
    assert [first for first, *_ in layout["ranges"]] == [1, 2, 4]
    assert [first for first, *_ in late["ranges"]] == [3, 3, 4]
    assert [rows for _, *rows in layout["ranges"]] == [rows for _, *rows in late["ranges"]]
    for path, array in before.layouts.items():  # what an earlier revision wrote stays as it was
        ranges = reader.layouts[path]["ranges"]
        assert ranges[: len(array["ranges"])] == array["ranges"]
        assert all(first >= array["shape"][0] for _, first, _ in ranges[len(array["ranges"]) :])
    for entry in before.manifest["files"]:
        assert (everything.grown / entry["path"]).read_bytes() == (everything.before / entry["path"]).read_bytes()


@pytest.mark.parametrize("revision", [1, 2, 3])
def test_an_earlier_revision_is_read_as_it_was(revision: int, everything: Everything) -> None:
    kept = {1: everything.before, 2: everything.before, 3: everything.added}[revision]
    for open_it in (PageReader, LatentStore):
        open_it(kept, revision=revision)
    then, now = (PageReader(root, revision=revision) for root in (kept, everything.grown))
    assert now.manifest == then.manifest
    store = LatentStore(everything.grown, revision=revision)
    assert (store.root_hash, len(store)) == (then.manifest["root_hash"], len(then.stored))
    for record in then.stored:
        (row, *_), checksum = now.latents(record)
        assert checksum == record["checksum"]
        equal(row, store.latents(record["bucket"])[record["row"]])
    for name in then.texts:
        for i in range(len(then.captions)):
            if then.texts[name].get("output") != "pooled":
                equal(now.caption(name, i)[0], store.text(name)[i])
            assert now.caption(name, i)[2] == then.caption(name, i)[2]
    assert store.features == list(then.features) == (["dino"] if revision < 3 else ["dino", "grid", "token"])
