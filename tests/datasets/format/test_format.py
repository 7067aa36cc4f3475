"""FORMAT.md is the norm: it names all that the writer makes, and a reader written from it alone reads a store."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from importlib import resources
from typing import get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from pydantic import BaseModel
from stores import Everything

from leandit.datasets.format import schema
from leandit.datasets.format.layout import RevisionLayout
from leandit.datasets.format.table_schemas import REJECT_REASONS
from leandit.datasets.format.token_dtypes import narrow, widen
from leandit.datasets.format.zarr_shard import ArrayLayout
from leandit.datasets.store import LatentStore
from leandit.testing import PageReader, canonical_hash

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


NESTED = {
    "images": schema.ImageSpec,
    "latent": schema.LatentSpec,
    "text": schema.TextSpec,
    "text_encoder": schema.EncoderIdentity,
}


def test_every_key_of_the_spec_is_named_and_those_of_a_plain_store_are_there(caption_store: LatentStore) -> None:
    for key in keys_of(schema.StoreSpec):
        assert key in quoted(row_of(2, key)), key
    for key, model in NESTED.items():
        assert keys_of(model) - quoted(row_of(2, key)) == set()
    assert row_of(2, "vae") == row_of(2, "text_encoder")
    assert all(kind in quoted(row_of(3, kind)) for kind in get_args(schema.LatentSpec.model_fields["kind"].annotation))
    found = json.loads((caption_store.path / "zarr.json").read_bytes())["attributes"]["leandit"]
    given = {"class_names", "texts", "features", "companions", "sample_captions"}  # to other stores
    assert found.keys() == keys_of(schema.StoreSpec) - given
    assert found["format_version"] == schema.FORMAT_VERSION
    assert TEXT.startswith(f"# The store on disk, format version {schema.FORMAT_VERSION}\n")
    # Of further crops, of imported and patchified latents, and of unusual text encoders.
    absent = {"variants", "variant_zoom", "decoding", "patchify", "output", "full_length", "attend_padding"}
    absent |= {"instruction", "layers", "drop_prefix_tokens", "pooled_width"}
    for key, model in NESTED.items():
        assert found[key].keys() == keys_of(model) - absent
    (said,) = [p for p in SECTION[2].split("\n\n") if p.startswith("The fingerprint hashes")]
    assert quoted(said) - {"model", "revision", "texts", "features", "companions"} == set(caption_store.spec.identity())


ARROW_OF = {"string": pa.string(), "int64": pa.int64(), "int32": pa.int32(), "uint64": pa.uint64()}
ARROW_OF |= {"float32": pa.float32(), "bool": pa.bool_(), "list of int32": pa.list_(pa.int32())}


@pytest.mark.parametrize(("width", "num_layers"), [(40, 1), (128, 1), (100, 1), (300, 3), (15360, 3)])
def test_the_code_for_int8_tokens_gives_their_numbers(width: int, num_layers: int) -> None:
    """As a reader in another language would, from the page alone."""
    (code,) = re.findall(r"```python\n(.*?)```", SECTION[1], flags=re.DOTALL)
    tokens = np.random.default_rng(0).normal(size=(5, width)).astype(np.float32)
    stored = narrow(tokens, "int8", num_layers)
    names = {"embeddings": stored.rows, "scales": stored.scales, "numpy": np}
    exec(code, names)
    np.testing.assert_array_equal(names["tokens"], widen(stored, "int8"))
    np.testing.assert_allclose(names["tokens"], tokens, atol=0.02)


def test_every_column_of_the_tables_is_named_with_its_type(caption_store: LatentStore) -> None:
    for field in pq.read_schema(caption_store.path / OWN / "records.parquet"):
        _, names, types, *_ = row_of(4, field.name).split("|")
        kinds = [kind.strip() for kind in types.split(",")]
        kind = kinds[min(re.findall(r"`(\w+)`", names).index(field.name), len(kinds) - 1)]
        assert ARROW_OF[kind] == field.type, field.name
    said = paragraph(4, "`captions.parquet`").replace("\n", " ")
    for field in pq.read_schema(caption_store.path / OWN / "captions.parquet"):
        kind = re.search(rf"`{field.name}` \((\w+)", said)
        assert kind, field.name
        assert ARROW_OF[kind[1]] == field.type
    assert quoted(paragraph(4, "Reasons:")) == set(REJECT_REASONS)
    assert {"scan", "decode", "encode"} <= quoted(row_of(4, "stage"))
    assert {"stored", "rejected"} <= quoted(row_of(4, "status"))


def test_every_key_of_the_files_of_a_revision_is_named(caption_store: LatentStore) -> None:
    manifest, local = quoted(paragraph(5, "`manifest.json`")), quoted(paragraph(5, "`local.json`"))
    assert (
        keys_of(schema.Manifest) | keys_of(schema.FileEntry) | {field.name for field in fields(ArrayLayout)} <= manifest
    )
    assert keys_of(schema.LatentStatistics) <= quoted(paragraph(5, "`statistics`"))
    assert keys_of(schema.SelfCheck) | keys_of(schema.CheckedImage) <= quoted(paragraph(5, "`self_check`"))
    assert keys_of(schema.LayerQuality) <= quoted(paragraph(5, "`quality`"))
    assert keys_of(schema.LocalFile) | keys_of(schema.Origin) <= local
    root = caption_store.path / OWN
    assert json.loads((root / "manifest.json").read_bytes()).keys() == keys_of(schema.Manifest) - {
        "self_check",
        "quality",
    }
    said = json.loads((root / "local.json").read_bytes())
    assert said.keys() == keys_of(schema.LocalFile)
    assert said.pop("sha256") == canonical_hash(said)
    for path in (root / "twin").iterdir():
        assert path.read_bytes() == (root / path.name).read_bytes()
    entry, data = said["sources"], (root / "sources.parquet").read_bytes()
    assert entry.pop("path") == f"{OWN}/sources.parquet"
    assert entry == {"bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}
    assert set(pq.read_schema(root / "sources.parquet").names) <= quoted(
        " ".join(paragraph(5, "`sources.parquet`").split())
    )
    assert pq.read_metadata(root / "sources.parquet").num_rows == caption_store.records.num_rows


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
    for revision, kept in ((1, everything.before), (2, everything.before), (3, everything.added)):
        now, then = (PageReader(root, revision=revision) for root in (everything.grown, kept))
        assert now.manifest == then.manifest
    for entry in before.manifest["files"]:
        assert (everything.grown / entry["path"]).read_bytes() == (everything.before / entry["path"]).read_bytes()
