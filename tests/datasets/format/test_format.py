"""FORMAT.md is the norm: it names all that the writer makes, and a reader written from it alone reads a store."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from everything import Everything
from making import CPU, caption_recipe, make_caption_folder, no_progress, picture
from page_reader import canonical_hash, folder_of, open_by_the_page, read_rows
from pydantic import BaseModel

from leandit.datasets.format.caption_layout import OFFSETS
from leandit.datasets.format.schema import (
    FORMAT_VERSION,
    CommitRecord,
    EncoderIdentity,
    Fallback,
    FileEntry,
    ImageSpec,
    LatentSpec,
    Manifest,
    Reject,
    StoreSpec,
    TextSpec,
)
from leandit.datasets.format.table_schemas import RECORDS_SCHEMA, REJECT_REASONS
from leandit.datasets.format.zarr_shard import CODECS
from leandit.datasets.maintenance.compact import compact
from leandit.datasets.store import LatentStore
from leandit.precompute.pipeline import precompute
from leandit.precompute.planning.compare import Options

TEXT = (resources.files("leandit.datasets") / "FORMAT.md").read_text()
_, *PARTS = re.split(r"^## (\d)\. .*$", TEXT, flags=re.MULTILINE)
SECTION = dict(zip(map(int, PARTS[::2]), PARTS[1::2], strict=True))
TREE = TEXT.split("```")[1]


def quoted(text: str) -> set[str]:
    """All words between backticks."""
    return set(re.findall(r"`([^`\n]+)`", text))


def row_of(section: int, key: str) -> str:
    """The row of a section's table that begins with a key (or with a list that holds it)."""
    rows = [line for line in SECTION[section].splitlines() if line.startswith("|")]
    (row,) = [line for line in rows if key in quoted(line.split("|")[1])]
    return row


def paragraph_of(name: str) -> str:
    """The paragraph of section 5 that begins with "A/The **name**"."""
    (found,) = [p for p in SECTION[5].split("\n\n") if re.match(rf"\w+ \*\*{name}\*\*", p)]
    return found


def keys_of(model: type[BaseModel]) -> set[str]:
    return set(model.model_fields)


def general(path: str) -> str:
    """A path of a store with its bucket, part and shard number as FORMAT.md writes them."""
    path = re.sub(r"^revisions/\d{6}/", "", path)  # laid out like the root
    path = re.sub(r"\b\d+x\d+\b", "HxW", path)
    path = re.sub(r"/(pair|vector|llm|dino|grid|token)/", "/NAME/", path)
    return re.sub(r"commits/.*/\d{6}", "commits/PART/NNNNNN", path)


def tree_names() -> set[str]:
    """Paths in the tree of FORMAT.md; what is set in further lies in the folder above."""
    named, folder = set(), ""
    for line in TREE.splitlines():
        name = line.strip().split(" ")[0].strip(",")
        if line.startswith("    "):
            named |= {folder + name} | ({f"{folder}{name}_flip"} if "buckets" in folder else set())
        elif line.startswith("  "):
            named.add(name)
            folder = name if name.endswith("/") else folder
    return named | {name.replace("captions/", "captions/NAME/") for name in named if name.startswith("captions/")}


@pytest.fixture(scope="module")
def flipped_store(caption_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> LatentStore:
    path = tmp_path_factory.mktemp("flipped") / "store"
    precompute(
        caption_recipe("vae.flip=true"),
        source_path=caption_folder,
        store_path=path,
        device=CPU,
        progress=no_progress,
    )
    return LatentStore(path)


@pytest.fixture(scope="module")
def grown_store(tmp_path_factory: pytest.TempPathFactory) -> LatentStore:
    """Two revisions: the second has a changed picture, one in another bucket, a new one, a new caption, one dropped."""
    root = tmp_path_factory.mktemp("grown")
    source = make_caption_folder(root / "source", count=9)

    def run() -> None:
        precompute(
            caption_recipe("vae.flip=true"),
            source_path=source,
            store_path=root / "store",
            device=CPU,
            progress=no_progress,
            options=Options(drop_gone=True),
        )

    run()
    picture(70, 64, 64).save(source / "images/0.png")
    picture(71, 64, 64).save(source / "images/1.png")
    picture(72, 60, 100).save(source / "images/9.png")
    rows = [json.loads(line) for line in (source / "metadata.jsonl").read_text().splitlines()]
    rows[3]["captions"].append("a caption that was not there")
    del rows[4]
    rows.append({"file_name": "images/9.png", "caption": "a new picture"})
    (source / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run()
    store = LatentStore(root / "store")
    assert (store.revision, store.records["revision"].to_pylist()) == (2, [1] * 6 + [2] * 3)
    return store


def narrow_store(dtype: str, source: Path, root: Path) -> LatentStore:
    recipe = caption_recipe(f"store.text_dtype={dtype}")
    precompute(recipe, source_path=source, store_path=root / dtype, device=CPU, progress=no_progress)
    return LatentStore(root / dtype)


@pytest.fixture(scope="module")
def bfloat16_store(caption_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> LatentStore:
    return narrow_store("bfloat16", caption_folder, tmp_path_factory.mktemp("narrow"))


@pytest.fixture(scope="module")
def int8_store(caption_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> LatentStore:
    return narrow_store("int8", caption_folder, tmp_path_factory.mktemp("narrow"))


@pytest.fixture(scope="module")
def store_of_everything(everything: Everything) -> LatentStore:
    return LatentStore(everything.grown)


@pytest.mark.parametrize("name", ["label_store", "flipped_store", "grown_store", "int8_store", "store_of_everything"])
def test_every_path_that_the_writer_makes_is_in_the_tree(name: str, request: pytest.FixtureRequest) -> None:
    root = request.getfixturevalue(name).path
    named = tree_names()
    plan = next(line for line in TREE.splitlines() if line.startswith("  plan/"))
    assert {"leases/", "revisions/zarr.json", "revisions/NNNNNN/"} <= named
    assert "plan.json, records.parquet, captions.parquet" in plan
    named |= {"plan/plan.json", "plan/records.parquet", "plan/captions.parquet"}
    made = {general(path.relative_to(root).as_posix()) for path in root.rglob("*") if path.is_file()}
    for path in made:
        array = re.sub(r"/(zarr\.json|c/.*)$", "", path)  # the metadata and the shards of an array
        assert path in named or array in named, path
    if name == "flipped_store":
        assert {"buckets/HxW/moments_flip/zarr.json", "captions/null/zarr.json"} <= made
    if name == "store_of_everything":
        assert {"captions/NAME/null_pooled/zarr.json", "buckets/HxW/features/NAME/cls_scales_flip/zarr.json"} <= made


def test_both_names_of_the_latents_are_in_the_table_of_arrays() -> None:
    assert {"moments", "latents", "_flip"} <= quoted(row_of(1, "moments"))
    for name in ("embeddings", "scales", "null", "null_scales", OFFSETS, "lengths"):
        assert name in quoted(row_of(1, name))
    assert set(CODECS) - {"none"} <= quoted(SECTION[1])


def test_every_key_of_the_attribute_is_named() -> None:
    for key in keys_of(StoreSpec):
        assert key in quoted(row_of(2, key)), key


@pytest.mark.parametrize(
    ("key", "model"),
    [("images", ImageSpec), ("latent", LatentSpec), ("text", TextSpec), ("vae", EncoderIdentity)],
)
def test_every_nested_key_of_the_attribute_is_named_in_its_row(key: str, model: type[BaseModel]) -> None:
    assert keys_of(model) - quoted(row_of(2, key)) == set()
    assert row_of(2, "vae") == row_of(2, "text_encoder")


# Of imported, compiled and patchified latents, and of text encoders that are not used in the usual way.
ABSENT = {
    "decoding",
    "compiled",
    "patchify",
    "output",
    "full_length",
    "attend_padding",
    "layers",
    "drop_prefix_tokens",
    "pooled_width",
}


def test_the_store_has_the_keys_that_are_named(caption_store: LatentStore) -> None:
    found = json.loads((caption_store.path / "zarr.json").read_bytes())["attributes"]["leandit"]
    assert found.keys() == keys_of(StoreSpec) - {
        "class_names",
        "texts",
        "features",
        "pictures",
    }  # of a store that was given some
    assert found["format_version"] == FORMAT_VERSION
    assert TEXT.startswith(f"# The store on disk, format version {FORMAT_VERSION}\n")
    for key, model in (
        ("images", ImageSpec),
        ("latent", LatentSpec),
        ("text", TextSpec),
        ("text_encoder", EncoderIdentity),
    ):
        assert found[key].keys() == keys_of(model) - ABSENT


def test_every_kind_of_latent_is_explained() -> None:
    kinds = LatentSpec.model_fields["kind"].annotation.__args__  # pyright: ignore
    assert all(kind in quoted(row_of(3, kind)) for kind in kinds)


def test_the_fingerprint_is_made_of_what_is_said(caption_store: LatentStore) -> None:
    (said,) = [p for p in SECTION[2].split("\n\n") if p.startswith("The fingerprint hashes")]
    assert quoted(said) - {"model", "revision", "texts", "features", "pictures"} == set(caption_store.spec.identity())
    assert caption_store.spec.with_fingerprint().fingerprint == caption_store.spec.fingerprint


ARROW_OF = {"string": pa.string(), "int64": pa.int64(), "int32": pa.int32(), "uint64": pa.uint64()}
ARROW_OF |= {"float32": pa.float32(), "bool": pa.bool_(), "list of int32": pa.list_(pa.int32())}


def test_every_column_of_the_records_is_named_with_its_type(caption_store: LatentStore) -> None:
    for field in pq.read_schema(caption_store.path / "records.parquet"):
        _, names, types, *_ = row_of(4, field.name).split("|")
        kinds = [kind.strip() for kind in types.split(",")]
        kind = kinds[min(re.findall(r"`(\w+)`", names).index(field.name), len(kinds) - 1)]
        assert ARROW_OF[kind] == field.type, field.name


def test_every_column_of_the_captions_is_named_with_its_type(caption_store: LatentStore) -> None:
    (said,) = [p for p in SECTION[4].split("\n\n") if p.startswith("`captions.parquet`")]
    said = said.replace("\n", " ")
    for field in pq.read_schema(caption_store.path / "captions.parquet"):
        kind = re.search(rf"`{field.name}` \((\w+)", said)
        assert kind, field.name
        assert ARROW_OF[kind[1]] == field.type


def test_the_reject_reasons_are_the_closed_list() -> None:
    (said,) = [p for p in SECTION[4].split("\n\n") if p.startswith("Reasons:")]
    assert quoted(said) == set(REJECT_REASONS)
    assert {"scan", "decode", "encode"} <= quoted(row_of(4, "stage"))
    assert {"stored", "rejected"} <= quoted(row_of(4, "status"))


def test_every_key_of_a_commit_record_and_of_the_manifest_is_named(caption_store: LatentStore) -> None:
    commit, manifest = quoted(paragraph_of("commit record")), quoted(paragraph_of("manifest"))
    assert keys_of(CommitRecord) | keys_of(FileEntry) | keys_of(Reject) | keys_of(Fallback) <= commit
    assert keys_of(Manifest) <= manifest
    assert json.loads((caption_store.path / "manifest.json").read_bytes()).keys() == keys_of(Manifest) - {"self_check"}
    for path in (caption_store.path / "commits").rglob("*.json"):
        content = json.loads(path.read_bytes())
        absent = {"features"} if path.parts[-3] == "buckets" else {"features", "statistics"}
        assert content.keys() == keys_of(CommitRecord) - absent
        assert content.pop("record_hash") == canonical_hash(content)


@pytest.mark.parametrize("revision", [1, 2])
def test_every_key_of_the_plan_is_named_and_made_as_said(revision: int, grown_store: LatentStore) -> None:
    folder = grown_store.path / ("plan" if revision == 1 else "revisions/000002/plan")
    head = json.loads((folder / "plan.json").read_bytes())
    named = quoted(SECTION[7])
    assert head.keys() <= named
    assert {path.name for path in folder.iterdir()} == {"plan.json", "records.parquet", "captions.parquet"} <= named
    assert head.pop("sha256") == canonical_hash(head)
    manifest = json.loads((folder.parent / "manifest.json").read_bytes())
    for key in ("format_version", "revision", "base", "copies", "plan"):
        assert head[key] == manifest[key]
    assert [*head["stack"], revision] == manifest["stack"]
    assert [entry for entry in manifest["files"] if entry in head["carried"]] == head["carried"]
    assert head["spec"] == json.loads((folder.parent / "zarr.json").read_bytes())["attributes"]["leandit"]
    for entry in head["files"]:
        assert xxhash.xxh3_128_hexdigest((folder / entry["path"]).read_bytes()) == entry["xxh3_128"]
    extra = set(pq.read_schema(folder / "records.parquet").names) - set(RECORDS_SCHEMA.names)
    assert extra == {"source_path", "source_offset", "source_bytes", "source_mtime_ns"} <= named


@pytest.mark.parametrize("name", ["caption_store", "grown_store"])
def test_the_root_hash_and_the_files_are_made_as_said(name: str, request: pytest.FixtureRequest) -> None:
    store: LatentStore = request.getfixturevalue(name)
    prefix = "revisions/000002/" if name == "grown_store" else ""
    content = json.loads((store.path / prefix / "manifest.json").read_bytes())
    root_hash = content.pop("root_hash")
    assert canonical_hash(content) == root_hash == store.root_hash
    listed = [entry["path"] for entry in content["files"]]
    there = {p.relative_to(store.path).as_posix() for p in store.path.rglob("*") if p.is_file()}
    unread = ("records.parquet", "captions.parquet", "commits/", "manifest.json") if prefix else ("manifest.json",)
    outside = {path for path in there if path.startswith((*unread, "plan/", f"{prefix}plan/"))}
    assert listed == sorted(there - outside - {f"{prefix}manifest.json"})
    for entry in content["files"]:
        data = (store.path / entry["path"]).read_bytes()
        assert (len(data), xxhash.xxh3_128_hexdigest(data)) == (entry["bytes"], entry["xxh3_128"])
    assert content["num_planned"] == content["num_stored"] + content["num_rejected"]


# The reader of tests/support/page_reader.py is written from FORMAT.md alone.


def test_a_reader_written_from_the_page_alone_reads_every_row(flipped_store: LatentStore) -> None:
    root = flipped_store.path
    attribute = json.loads((root / "zarr.json").read_bytes())["attributes"]["leandit"]
    manifest = json.loads((root / "manifest.json").read_bytes())
    assert manifest["buckets"] == dict(flipped_store.buckets)
    for bucket, count in manifest["buckets"].items():
        ours: dict[str, Any] = {"": flipped_store.latents(bucket), "_flip": flipped_store.flipped_latents(bucket)}
        for suffix, array in ours.items():
            rows = np.stack(list(read_rows(root, f"buckets/{bucket}/{attribute['latent']['array']}{suffix}")))
            assert len(rows) == count
            np.testing.assert_array_equal(rows, array.read(0, count))
    tokens = np.stack(list(read_rows(root, "captions/embeddings")))
    offsets, lengths = (np.stack(list(read_rows(root, f"captions/{name}"))) for name in ("offsets", "lengths"))
    for i, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        np.testing.assert_array_equal(tokens[offset : offset + length], flipped_store.caption_embedding(i))
    np.testing.assert_array_equal(np.stack(list(read_rows(root, "captions/null"))), flipped_store.null_caption)


@pytest.mark.parametrize("name", ["bfloat16_store", "int8_store"])
def test_a_reader_written_from_the_page_alone_reads_narrow_tokens(name: str, request: pytest.FixtureRequest) -> None:
    store: LatentStore = request.getfixturevalue(name)
    root = store.path
    attribute = json.loads((root / "zarr.json").read_bytes())["attributes"]["leandit"]
    assert attribute["text"]["dtype"] in quoted(row_of(1, attribute["text"]["dtype"]))

    def numbers(name: str, scales: str) -> np.ndarray:
        tokens = np.stack(list(read_rows(root, f"captions/{name}")))
        if attribute["text"]["dtype"] == "int8":
            assert tokens.dtype == np.int8
            return tokens * np.stack(list(read_rows(root, f"captions/{scales}")))[:, None]
        said = json.loads((root / "captions" / name / "zarr.json").read_bytes())["attributes"]
        assert said == {"bits_of": attribute["text"]["dtype"]}
        return np.array([[struct.unpack("<f", b"\0\0" + n.tobytes())[0] for n in row] for row in tokens], np.float32)

    tokens = numbers("embeddings", "scales")
    offsets, lengths = (np.stack(list(read_rows(root, f"captions/{name}"))) for name in ("offsets", "lengths"))
    for i, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        np.testing.assert_array_equal(tokens[offset : offset + length], store.caption_embedding(i))
    np.testing.assert_array_equal(numbers("null", "null_scales"), store.null_caption)


def test_such_a_reader_reads_an_array_of_several_shards(
    encode: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leandit.datasets.format.row_layout.MAX_SHARD_ROWS", 2)
    encode(caption_recipe(), make_caption_folder(tmp_path / "source", count=13), tmp_path / "store")
    store = LatentStore(tmp_path / "store")
    rows = np.stack(list(read_rows(store.path, "buckets/64x64/moments")))
    assert len(list((store.path / "buckets/64x64/moments/c").iterdir())) == 3
    np.testing.assert_array_equal(rows, store.latents("64x64").read(0, 5))


@pytest.mark.parametrize("name", ["caption_store", "grown_store", "compacted"])
def test_such_a_reader_reads_every_record_of_the_newest_revision(
    name: str, grown_store: LatentStore, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if name == "compacted":
        compact(grown_store.path, tmp_path / "new", progress=no_progress)
        ours = LatentStore(tmp_path / "new")
    else:
        ours = request.getfixturevalue(name)
    root = ours.path
    revision, manifest = open_by_the_page(root)
    records = pq.read_table(folder_of(root, revision) / "records.parquet").to_pylist()
    captions = pq.read_table(folder_of(root, revision) / "captions.parquet").to_pylist()
    attribute = json.loads((folder_of(root, revision) / "zarr.json").read_bytes())["attributes"]["leandit"]
    arrays = [f"{attribute['latent']['array']}{suffix}" for suffix in ("", "_flip")[: 1 + attribute["latent"]["flip"]]]

    def rows_of(number: int, path: str) -> np.ndarray:
        assert number in manifest["stack"]
        return np.stack(list(read_rows(folder_of(root, number), path)))

    def length_of(number: int, path: str) -> int:
        metadata = folder_of(root, number) / path / "zarr.json"
        return json.loads(metadata.read_bytes())["shape"][0] if metadata.exists() else 0

    count = dict.fromkeys(manifest["buckets"], 0)
    for record in records:
        assert record["status"] == "stored"
        count[record["bucket"]] += 1
        stored = [rows_of(record["revision"], f"buckets/{record['bucket']}/{a}")[record["row"]] for a in arrays]
        digest = xxhash.xxh3_64()
        for row in stored:
            digest.update(row.tobytes())
        assert digest.intdigest() == record["checksum"]
        np.testing.assert_array_equal(stored[0], ours.latents(record["bucket"])[ours.record(record["key"]).row])
        # The same row in one long array.
        before = manifest["stack"][: manifest["stack"].index(record["revision"])]
        path = f"buckets/{record['bucket']}/{arrays[0]}"
        stacked = record["row"] + sum(length_of(number, path) for number in before)
        assert stacked == ours.record(record["key"]).row
    assert count == manifest["buckets"]

    first = 0
    for number in manifest["stack"]:
        offsets, lengths = (rows_of(number, f"captions/{name}") for name in ("offsets", "lengths"))
        tokens = rows_of(number, "captions/embeddings")
        for i, caption in enumerate(captions[first : first + len(offsets)]):
            embedding = tokens[offsets[i] : offsets[i] + lengths[i]]
            assert (caption["revision"], caption["num_tokens"]) == (number, lengths[i])
            assert xxhash.xxh3_64_intdigest(embedding.tobytes()) == caption["checksum"]
            np.testing.assert_array_equal(embedding, ours.caption_embedding(first + i))
        first += len(offsets)
    assert first == len(captions) == manifest["num_captions"]
    null = rows_of(manifest["stack"][0], "captions/null")
    np.testing.assert_array_equal(null, ours.null_caption)
    texts = {record["key"]: [captions[i]["text"] for i in record["caption_ids"]] for record in records}
    if name != "caption_store":
        assert "a caption that was not there" in texts["images/3.png"]
        assert texts["images/9.png"] == ["a new picture"]
        assert "images/4.png" not in texts
