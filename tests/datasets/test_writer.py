"""``create_store``: what is added is read back, whatever interrupts the writer, and wrong input is named."""

from __future__ import annotations

import gc
import json
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faults import start
from making import Leandit, tree_digest

import leandit as package
from leandit import InvalidRecord, LatentStore, RecordWriter, create_store, make_loader, testing
from leandit.datasets import writer
from leandit.datasets.disk.files import Failpoint
from leandit.datasets.format import row_layout
from leandit.errors import DamageError, FingerprintMismatch, RecipeError, StoreError, StoreIncomplete

LATENT = {"channels": 4, "downscale": 8, "scale": 0.5, "shift": 0.25}
NULL = np.zeros((1, 6), np.float32)
TEXT = {"null": NULL, "max_tokens": 5, "dtype": "float32"}
Writer = Callable[..., RecordWriter]


def numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def add_some(store: RecordWriter, count: int = 10, first: int = 0) -> None:
    """Two sizes, three captions, three classes."""
    for i in range(first, count):
        width = 8 if i % 3 else 10
        caption = f"caption {i % 3}"
        store.add(
            f"key {i}", latent=numbers(i, 4, 8, width), label=i % 3, caption=caption, embeddings=numbers(i % 3, 2, 6)
        )


def read(store: LatentStore) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each stored record with its rows, as ``testing.check_reader`` takes them."""
    for bucket in store.buckets:
        index = store.index(bucket)
        for position, row in zip(index.records.tolist(), index.rows.tolist(), strict=True):
            record = store.record_at(position)
            rows: dict[str, Any] = {store.spec.latent.array: store.latents(bucket)[row]}
            for name in store.texts:
                folder = f"captions/{name}/" if name else "captions/"
                for number in record.caption_ids:
                    arrays = zip(("embeddings", "scales"), store.text(name).stored_rows(number), strict=False)
                    for array, values in arrays:
                        rows.setdefault(folder + array, []).append(values)
            yield record.key, rows


def test_what_is_added_is_read_back(path: Path, leandit: Leandit) -> None:
    with create_store(path, latent=LATENT, text=TEXT, classes=["ant", "bee", "cat"]) as store:
        add_some(store)
        store.add("no caption", latent=numbers(77, 4, 8, 8), label="bee", caption="")
        assert (store.num_added, store.has("key 3"), store.has("key 11")) == (11, True, False)
    assert store.manifest
    assert store.manifest.buckets == {"64x64": 7, "64x80": 4}
    whole = LatentStore(path)
    testing.check_store(path)
    testing.check_reader(path, lambda _: read(whole))
    for i in range(10):
        record = whole.record(f"key {i}")
        np.testing.assert_array_equal(
            whole.latents(record.bucket or "")[record.row], numbers(i, 4, 8, 8 if i % 3 else 10).astype(np.float16)
        )
        assert record.label == i % 3
        np.testing.assert_array_equal(whole.caption(record), numbers(i % 3, 2, 6))
    assert whole.captions["text"].to_pylist() == ["caption 0", "caption 1", "caption 2", ""]  # each once
    np.testing.assert_array_equal(whole.caption(whole.record("no caption")), NULL)
    assert whole.class_names.find("bee") == 1
    assert store.manifest.statistics
    latents = [whole.latents(bucket).take(whole.index(bucket).rows) for bucket in whole.buckets]
    channels = np.concatenate([rows.swapaxes(0, 1).reshape(4, -1) for rows in latents], axis=1).astype(np.float64)
    np.testing.assert_allclose(store.manifest.statistics.channel_mean, (channels.mean(axis=1) - 0.25) * 0.5)
    np.testing.assert_allclose(store.manifest.statistics.channel_std, channels.std(axis=1) * 0.5)
    records = [i for batch in make_loader(whole, global_batch=2, seed=0) for i in batch.records.tolist()]
    assert sorted(records) == list(range(11))
    batch = next(iter(make_loader(whole, global_batch=2, seed=0)))
    stored = batch.stored.float()
    torch.testing.assert_close(batch.latents.float(), (stored - 0.25) * 0.5)
    for command in (["verify", path], ["inspect", path]):
        assert leandit(*command).code == 0


def test_a_batch_is_its_records(path: Path, tmp_path: Path) -> None:
    keys = [f"key {i}" for i in range(6)]
    latents = numbers(1, 6, 4, 8, 8)
    declared: dict[str, Any] = {"latent": LATENT, "text": TEXT, "classes": 3}
    embeddings = [numbers(i, 1 + i % 5, 6) for i in range(6)]
    with create_store(path, **declared) as store:
        captions = [f"caption {i}" for i in range(6)]
        labels = np.arange(6) % 3
        assert store.add(keys, latent=latents, label=labels, caption=captions, embeddings=embeddings) == 6
    with create_store(tmp_path / "single", **declared) as single:
        for i, key in enumerate(keys):
            tensors = {"latent": torch.from_numpy(latents[i]), "embeddings": torch.from_numpy(embeddings[i])}
            single.add(key, **tensors, label=i % 3, caption=f"caption {i}")
    assert store.manifest == single.manifest


def test_every_kind_of_array_is_stored_for_every_view(path: Path) -> None:
    text = {
        "t5": {"null": NULL, "max_tokens": 4, "dtype": "bfloat16"},
        "small": {"null": NULL, "max_tokens": 4, "dtype": "int8"},
        "clip": {"null": (numbers(0, 3, 6), numbers(1, 7)), "full_length": True},
        "pooled": {"null": numbers(2, 5), "dtype": "float32"},
    }
    features = {
        "dino": {"width": 12, "patch_px": 16, "dtype": "int8", "output": "both"},
        "mae": {"sample": numbers(0, 9), "output": "cls"},
    }
    companions = {"depth": {"kind": "image"}, "mask": {"kind": "mask"}}
    latent = {"sample": numbers(0, 8, 4, 6), "kind": "mean_logvar", "downscale": 8, "scale": [1.0, 2.0, 3.0, 4.0]}
    declared: dict[str, Any] = {"latent": latent | {"flip": False}, "features": features, "companions": companions}
    declared["latent"]["flip"] = True
    declared["latent"]["sample"] = (numbers(0, 8, 4, 6), numbers(0, 8, 4, 6))
    sizes = [(4, 6), (4, 6), (6, 4), (2, 2)]
    with create_store(path, **declared, text=text) as store:
        for i, (height, width) in enumerate(sizes):
            patches = round(height / 2) * round(width / 2)
            embeddings = {"t5": numbers(i, 2, 6), "small": numbers(i, 4, 6), "pooled": numbers(i, 5)}
            embeddings["clip"] = (numbers(i, 3, 6), numbers(i, 7))  # pyright: ignore[reportArgumentType]
            dino = [{"patches": numbers(i + f, patches, 12), "cls": numbers(i + f, 12)} for f in range(2)]
            store.add(
                str(i),
                latent=[numbers(i, 8, height, width), numbers(i + 50, 8, height, width)],
                caption=["one", f"more {i}"],
                embeddings={name: [value, value] for name, value in embeddings.items()},
                features={"dino": dino, "mae": (numbers(i, 9), numbers(i + 1, 9))},
                companions={
                    "depth": (numbers(i + 2, 8, height, width), numbers(i + 3, 8, height, width)),
                    "mask": [np.full((height, width), 3 * i + f, np.uint8) for f in range(2)],
                },
                source_size=(480, 640),
            )
    testing.check_store(path)
    whole = LatentStore(path)
    assert whole.texts == ["t5", "small", "clip", "pooled"]
    assert whole.buckets == {"16x16": 1, "32x48": 2, "48x32": 1}
    record = whole.record("1")
    assert (record.height_px, record.width_px, record.bucket) == (480, 640, "32x48")
    row = record.row
    np.testing.assert_array_equal(whole.latents("32x48", flipped=True)[row], numbers(51, 8, 4, 6).astype(np.float16))
    np.testing.assert_array_equal(whole.companion("mask", "32x48", flipped=True)[row], np.full((4, 6), 4, np.uint8))
    np.testing.assert_allclose(whole.feature("dino", "32x48").row(row, "patches"), numbers(1, 6, 12), atol=0.02)
    np.testing.assert_allclose(whole.caption(record, 0, "t5"), numbers(0, 2, 6), rtol=2**-8)  # the first one's
    np.testing.assert_allclose(whole.caption(record, 1, "t5"), numbers(1, 2, 6), rtol=2**-8)
    np.testing.assert_allclose(whole.text("clip").pooled_vector(2), numbers(1, 7), rtol=1e-3)
    row_of_table = whole.row("records.parquet", 1)
    assert 0.999 < row_of_table["min_cosine_dino"] < 1
    assert row_of_table["max_error_dino"] > 0
    captions = whole.captions.to_pylist()
    assert all(0.99 < caption["min_cosine_small"] < 1 for caption in captions)
    assert all(caption["min_cosine_pooled"] is None for caption in captions)  # stored exactly
    batch = next(iter(make_loader(whole, global_batch=1, seed=0)))
    assert set(batch.features) == {"dino", "mae"}


@pytest.mark.parametrize("dtype", ["float16", "float32", "int8"])
def test_latents_of_every_dtype_are_those_that_were_added(path: Path, dtype: str) -> None:
    with create_store(path, latent=LATENT | {"dtype": dtype}) as store:
        store.add("a", latent=torch.from_numpy(numbers(0, 4, 8, 8)).bfloat16())
    testing.check_store(path)
    (batch,) = make_loader(LatentStore(path), global_batch=1, seed=0)
    expected = (torch.from_numpy(numbers(0, 4, 8, 8)).bfloat16().float() - 0.25) * 0.5
    torch.testing.assert_close(batch.latents[0].float(), expected, atol=0.02 if dtype == "int8" else 2e-3, rtol=0)


def test_an_array_may_be_changed_after_it_was_added(path: Path) -> None:
    buffer = numbers(0, 4, 8, 8)
    tokens = numbers(1, 2, 6)
    with create_store(path, latent=LATENT | {"dtype": "float32"}, text=TEXT) as store:
        store.add("a", latent=buffer, caption="a", embeddings=tokens)
        buffer[:] = 7
        tokens[:] = 7
    testing.check_store(path)
    np.testing.assert_array_equal(LatentStore(path).latents("64x64")[0], numbers(0, 4, 8, 8))
    np.testing.assert_array_equal(LatentStore(path).caption(0), numbers(1, 2, 6))


# --- Interruptions ----------------------------------------------------------------------------------------------------


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_layout, "MAX_SHARD_ROWS", 2)


WORDS = {"null": NULL, "max_tokens": 4}


def write_all(path: Path, count: int = 7) -> str | None:
    """A store of several shards, which is committed every few records; its root hash."""
    with create_store(path, latent=LATENT, text=WORDS, classes=3, invalid="reject", shard_mib=1) as store:
        for i in range(count):
            width = 8 if i % 3 else 10
            store.add(
                f"key {i}",
                latent=numbers(i, 4, 8, width) if i != 4 else np.full((4, 8, 8), np.nan, np.float32),
                label=i % 3,
                caption=f"caption {i // 2}",
                embeddings=numbers(i // 2, 1 + i // 2, 6),
            )
            if i % 3 == 2:
                store.flush()
        store.add("key 0", latent=numbers(0, 4, 8, 10), label=0, caption="caption 0")  # a duplicate, rejected
    return store.manifest and store.manifest.root_hash


@pytest.mark.parametrize("num_kills", [6, pytest.param(100, marks=pytest.mark.slow)])
def test_a_kill_at_any_point_costs_nothing_but_time(tmp_path: Path, small_shards: None, num_kills: int) -> None:
    undisturbed = start(lambda: write_all(tmp_path / "undisturbed")).wait()
    assert undisturbed.code == 0, undisturbed.message
    expected = LatentStore(tmp_path / "undisturbed")
    reasons = [record["reason"] for record in expected.records.to_pylist() if record["reason"]]
    assert reasons == ["nonfinite", "duplicate_key"]
    steps = len(undisturbed.operations)
    assert steps > 150
    second_manifest = max(i for i, step in enumerate(undisturbed.operations) if step == "rename manifest.json")
    points = [*range(steps // 20, steps, max(1, steps // num_kills)), second_manifest]
    for number, at in enumerate(points):
        store = tmp_path / f"killed-{number}"
        outcome = start(lambda store=store: write_all(store), failpoint=Failpoint("die", at)).wait()
        assert outcome.died, f"{at}: {outcome.message}"
        second = start(lambda store=store: write_all(store), failpoint=Failpoint("die", at // 2 + 3)).wait()
        assert second.died or second.code == 0, f"{at}: {second.message}"
        last = start(lambda store=store: write_all(store)).wait()
        assert last.code == 0, f"{undisturbed.operations[at]}: {last.message}"
        assert last.value == expected.root_hash, f"{undisturbed.operations[at]}"
        whole = {name: content for name, content in tree_digest(store).items() if not name.endswith("local.json")}
        same = tree_digest(tmp_path / "undisturbed").items()
        assert whole == {name: content for name, content in same if not name.endswith("local.json")}


@pytest.mark.slow
def test_kills_at_any_moment_cost_nothing_but_time(tmp_path: Path, small_shards: None) -> None:
    """Also in the middle of a commit of SQLite, which has no failpoint."""
    expected = start(lambda: write_all(tmp_path / "undisturbed", 40)).wait()
    rng = random.Random(0)
    num_kills = 0
    for trial in range(20):
        store = tmp_path / str(trial)
        while True:
            child = start(lambda store=store: write_all(store, 40))
            time.sleep(rng.uniform(0.01, 0.25))
            child.signal(signal.SIGKILL)
            outcome = child.wait()
            if not outcome.died:
                break
            num_kills += 1
        assert outcome.code == 0, outcome.message
        assert outcome.value == expected.value
    assert num_kills > 10


@pytest.mark.parametrize("kind", ["enospc", "eio"])
def test_a_full_or_failing_disk_loses_nothing_that_was_committed(path: Path, kind: Any, small_shards: None) -> None:
    for at in (20, 60, 90):
        outcome = start(lambda: write_all(path), failpoint=Failpoint(kind, at)).wait()
        assert "ResourceError" in outcome.error, outcome.message
    outcome = start(lambda: write_all(path)).wait()
    assert outcome.code == 0, outcome.message
    testing.check_store(path)


def test_an_error_keeps_what_was_added_and_the_same_program_continues(
    path: Path, class_folder: Path, leandit: Leandit
) -> None:
    def write(count: int) -> RecordWriter:
        with create_store(path, latent=LATENT, text=TEXT, classes=3) as store:
            add_some(store, count)
            if count < 10:
                raise KeyboardInterrupt
        return store

    with pytest.raises(KeyboardInterrupt):
        write(4)
    with pytest.raises(StoreIncomplete, match=r"a program writes it with create_store, and has not sealed it"):
        LatentStore(path)
    create = ["precompute", "demo", "--source", class_folder, "--store", path, "--set", "source.missing_caption=null"]
    for command in (["inspect", path], ["verify", path], ["compact", path, "--out", path / "new"], create):
        ended = leandit(*command)
        assert ended.code == 3
        assert "a program writes it with create_store, and has not sealed it. Run the program to its end" in ended.err
    with create_store(path, latent=LATENT, text=TEXT, classes=3) as store:
        assert list(store.committed_keys()) == [f"key {i}" for i in range(4)]
        assert [store.has(f"key {i}") for i in (0, 3, 4)] == [True, True, False]
        assert store.has_caption("caption 2")
        add_some(store)
        assert (store.num_skipped, store.num_added) == (4, 6)
    testing.check_store(path)
    again = write(10)  # of a sealed store nothing is left to do
    assert (again.num_skipped, again.num_added) == (10, 0)
    with (
        create_store(path, latent=LATENT, text=TEXT, classes=3) as store,
        pytest.raises(StoreError, match=r"it is sealed, and has no record 'new'. Write new records into another"),
    ):
        store.add("new", latent=numbers(0, 4, 8, 8), label=0, caption="")


def leave_unfinished(path: Path) -> None:
    """A store with one record that is not sealed."""
    store = create_store(path, latent=LATENT)
    store.add("a", latent=numbers(0, 4, 8, 8))
    store.__exit__(KeyboardInterrupt, None, None)


def test_what_was_added_before_is_checked(path: Path) -> None:
    leave_unfinished(path)
    file = path / "revisions/000001/journal/buckets.64x64.latents.0"
    content = bytearray(file.read_bytes())
    content[7] ^= 1
    file.write_bytes(content)
    with pytest.raises(DamageError, match=r"64x64.latents.0': it was changed. Remove the store, and write it again"):
        create_store(path, latent=LATENT)
    file.unlink()
    with pytest.raises(DamageError, match=r"64x64.latents.0': 0 bytes, expected at least 512. Remove the store"):
        create_store(path, latent=LATENT)
    (path / "revisions/000001/journal/added.sqlite").write_bytes(b"no database" * 1000)
    with pytest.raises(DamageError, match=r"added.sqlite': file is not a database. What was added cannot be read"):
        create_store(path, latent=LATENT)


def test_another_declaration_is_refused_and_named(path: Path) -> None:
    leave_unfinished(path)
    with pytest.raises(FingerprintMismatch, match=r"latent.dtype was 'float16', is 'float32'"):
        create_store(path, latent=LATENT | {"dtype": "float32"})
    with create_store(path, latent=LATENT):
        pass
    with pytest.raises(FingerprintMismatch, match=r"classes was None, is \['0', '1'\]"):
        create_store(path, latent=LATENT, classes=2)


def test_two_processes_do_not_write_one_store(path: Path) -> None:
    with create_store(path, latent=LATENT) as store:
        store.add("a", latent=numbers(0, 4, 8, 8))
        outcome = start(lambda: create_store(path, latent=LATENT) and None).wait()
        assert "another process is writing it" in outcome.message


def test_a_folder_of_other_files_is_left_alone(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("mine")
    with pytest.raises(StoreError, match=r"the folder has other files, such as 'notes.txt'. Nothing was changed"):
        create_store(path, latent=LATENT)
    assert [entry.name for entry in path.iterdir()] == ["notes.txt"]


def test_a_store_without_records_is_not_sealed(path: Path) -> None:
    store = create_store(path, latent=LATENT)
    store.reject("a", "truncated")
    with pytest.raises(StoreError, match=r"no record was stored \(rejected: 1 as truncated\), so it is not sealed"):
        store.__exit__(None, None, None)


# --- Wrong input ------------------------------------------------------------------------------------------------------

GOOD: dict[str, Any] = {
    "latent": numbers(0, 4, 8, 8),
    "label": 1,
    "caption": "new",
    "embeddings": numbers(0, 2, 6),
    "features": {"dino": numbers(0, 16, 12)},
    "companions": {"mask": np.zeros((8, 8), np.uint8)},
}
WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "a latent without channels": (
        {"latent": numbers(0, 8, 8)}, "wrong_shape", "latent of shape (8, 8); expected (4, height, width)"),
    "other channels": (
        {"latent": numbers(0, 3, 8, 8)}, "wrong_shape", "latent of shape (3, 8, 8); expected (4, height, width)"),
    "integers": (
        {"latent": np.zeros((4, 8, 8), int)}, "wrong_shape",
        "latent of dtype int64; expected floating-point numbers"),
    "NaN": ({"latent": np.full((4, 8, 8), np.nan)}, "nonfinite", "latent: NaN or infinity, as given or as stored"),
    "beyond float16": (
        {"latent": np.full((4, 8, 8), 1e5)}, "nonfinite", "latent: NaN or infinity, as given or as stored"),
    "no latent": ({"latent": None}, "wrong_shape", "latent is missing; the store was declared with it"),
    "no label": ({"label": None}, "no_label", "it has no label; the store was declared with classes"),
    "an unknown class": ({"label": "dog"}, "bad_metadata", "label 'dog' is none of the 2 classes"),
    "a label too large": ({"label": 2}, "bad_metadata", "label 2; expected 0 to 1"),
    "half a label": ({"label": 0.5}, "bad_metadata", "label 0.5; expected 0 to 1"),
    "no caption": ({"caption": None}, "no_caption", "0 captions; expected 1 to 256, or '' for none"),
    "a caption that is no text": ({"caption": [3]}, "bad_metadata", "caption of type int; expected a str"),
    "no embeddings": (
        {"embeddings": None}, "no_caption", "embeddings of caption 'new' are missing, and the store has none"),
    "embeddings of another width": (
        {"embeddings": numbers(0, 2, 7)}, "wrong_shape",
        "embeddings of shape (2, 7); expected (1 to 5 tokens, 6)"),
    "too many tokens": (
        {"embeddings": numbers(0, 6, 6)}, "wrong_shape",
        "embeddings of shape (6, 6); expected (1 to 5 tokens, 6)"),
    "embeddings of one of two captions": (
        {"caption": ["new", "newer"]}, "wrong_shape", "embeddings: expected a list, one for each of 2 captions"),
    "infinite embeddings": (
        {"embeddings": np.full((2, 6), np.inf)}, "nonfinite_caption",
        "embeddings: NaN or infinity, in float64 or as float32"),
    "no feature": (
        {"features": None}, "wrong_shape", "features['dino'] is missing; the store was declared with it"),
    "another number of patches": (
        {"features": {"dino": numbers(0, 15, 12)}}, "wrong_shape",
        "features['dino'] of shape (15, 12); expected (16, 12)"),
    "a NaN in a feature": (
        {"features": {"dino": np.full((16, 12), np.nan)}}, "nonfinite",
        "'dino': NaN or infinity, as given or as stored"),
    "a feature that was not declared": (
        {"features": {"dino": numbers(0, 16, 12), "mae": 1}}, "wrong_shape", "features['mae'] was not declared"),
    "a mask of floats": (
        {"companions": {"mask": np.zeros((8, 8))}}, "wrong_shape",
        "companions['mask'] of dtype float64; expected uint8"),
    "a caption that is a number": (
        {"caption": 5}, "bad_metadata", "caption of type int; expected a str, or a list of them"),
    "embeddings by a name": (
        {"embeddings": {"t5": 1}}, "wrong_shape", "embeddings['t5']; expected an array, not a dict"),
    "a size of text": ({"source_size": "ab"}, "bad_metadata",
        "source_size 'ab'; expected height and width in pixels"),
    "half a size": ({"source_size": [3]}, "bad_metadata", "source_size [3]; expected height and width in pixels"),
    "a key that is there": ({"key": "good"}, "duplicate_key",
        "a record with this key was added before; expected unique keys"),
}  # fmt: skip
DECLARED: dict[str, Any] = {
    "latent": LATENT,
    "text": TEXT,
    "features": {"dino": {"width": 12, "patch_px": 16}},
    "companions": {"mask": {"kind": "mask"}},
    "classes": ["ant", "bee"],
}


def test_a_wrong_record_is_named_and_nothing_of_it_is_added(path: Path) -> None:
    with create_store(path, **DECLARED) as store:
        store.add("good", **GOOD | {"caption": "good"})
        for name, (values, reason, detail) in WRONG.items():
            values = {"key": name} | GOOD | values
            with pytest.raises(InvalidRecord) as raised:
                store.add(**values)
            assert (raised.value.key, raised.value.reason, raised.value.detail) == (values["key"], reason, detail), name
            assert str(raised.value) == f"record {values['key']!r}: {detail}"
        batch = {name: [value, value] for name, value in GOOD.items() if name not in ("features", "companions")}
        batch |= {
            kind: {name: [value] * 2 for name, value in GOOD[kind].items()} for kind in ("features", "companions")
        }
        with pytest.raises(InvalidRecord, match="the batch has this key twice"):
            store.add(["x", "x"], **batch)
        with pytest.raises(InvalidRecord, match="label is 1 values, in a batch of 2 keys"):
            store.add(["x", "y"], **batch | {"label": [0]})
        with pytest.raises(InvalidRecord, match="latent of shape"):
            store.add(["x", "y"], **batch | {"latent": [GOOD["latent"], numbers(0, 4, 8)]})
        for key in ("", 3, "\ud800", "a" * 5000):
            with pytest.raises(InvalidRecord):
                store.add(key, **GOOD)  # pyright: ignore[reportArgumentType]
        with pytest.raises(RecipeError, match="reason 'ugly'; expected one of unreadable, "):
            store.reject("z", "ugly")
    assert LatentStore(path).records["key"].to_pylist() == ["good"]
    assert LatentStore(path).captions["text"].to_pylist() == ["good"]


def test_wrong_records_become_rejects_with_their_reason_on_request(path: Path) -> None:
    with create_store(path, **DECLARED, invalid="reject") as store:
        store.add("good", **GOOD | {"caption": "good"})
        for name, (values, _, _) in WRONG.items():
            store.add(**{"key": name} | GOOD | values)
        store.reject("broken", "truncated", "the file ends early")
        assert (store.num_added, store.num_rejected) == (1, len(WRONG) + 1)
        for name in ("ant", "bee"):  # one batch, of which a record is wrong
            features = {"dino": np.stack([numbers(0, 16, 12), np.full((16, 12), np.nan)])}
            masks = {"mask": np.zeros((2, 8, 8), np.uint8)}
            latents = numbers(5, 2, 4, 8, 8)
            keys = [f"{name} 0", f"{name} 1"]
            store.add(keys, latent=latents, label=[name] * 2, caption=["good"] * 2, features=features, companions=masks)
    testing.check_store(path)
    table = LatentStore(path).records.to_pylist()
    rejected = {record["key"]: (record["reason"], record["detail"]) for record in table if record["reason"]}
    for name, (values, reason, detail) in WRONG.items():
        if "key" not in values:
            assert rejected[name] == (reason, detail)
    assert rejected["broken"] == ("truncated", "the file ends early")
    assert [record["key"] for record in table if record["status"] == "stored"] == ["good", "ant 0", "bee 0"]
    assert rejected["good"] == ("duplicate_key", "the key was added before")
    np.testing.assert_array_equal(LatentStore(path).latents("64x64")[2], numbers(5, 2, 4, 8, 8)[0].astype(np.float16))


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"latent": {"channels": 4, "downscale": 8}}, r"latent: 'scale': field required"),
        ({"latent": LATENT | {"chanels": 4}}, r"latent: unknown key 'chanels', did you mean 'channels'\?"),
        ({"latent": LATENT | {"scale": [1.0, 2.0]}}, "'scale' has 2 numbers; expected one, or one for each of 4"),
        ({"latent": {"downscale": 8, "scale": 1}}, "latent: 'channels' is missing"),
        ({"latent": LATENT | {"kind": "mean_std", "dtype": "int8"}}, "int8 latents have no posterior"),
        ({"text": {"max_tokens": 5}}, "text: 'null' is missing; expected the output for the empty caption"),
        ({"text": {"null": NULL[0, 0]}}, r"text: 'null' of shape \(\)"),
        ({"text": {"null": numbers(0, 7, 6), "max_tokens": 5}}, "'null' has 7 tokens; expected at most max_tokens, 5"),
        ({"text": {"A": TEXT}}, r"text\['A'\]: "),
        ({"features": {"dino": {}}}, r"features\['dino'\]: 'width' is missing"),
        ({"companions": {"depth": {"kind": "video"}}}, r"companions\['depth'\]: 'kind'"),
        ({"features": {"a": {"width": 1}}, "companions": {"a": {"kind": "mask"}}}, "share a name"),
        ({"classes": ["a", "a"]}, "classes: .*expected different names"),
        ({"codec": "rar"}, "codec"),
        ({"shard_mib": 0}, "create_store: 'shard_mib'"),
        ({"invalid": "ignore"}, "invalid='ignore'; expected 'raise' or 'reject'"),
    ],
)  # fmt: skip
def test_a_wrong_declaration_is_named(path: Path, declared: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        create_store(path, **{"latent": LATENT} | declared)
    assert not path.exists()


@pytest.mark.parametrize("count", [16_000, pytest.param(200_000, marks=pytest.mark.slow)])
def test_a_large_store_takes_bounded_memory(path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Of records and captions that are committed, Python keeps nothing."""
    monkeypatch.setattr(writer, "COMMIT_ITEMS", count // 8)
    batch = count // 40
    latents = np.zeros((batch, 1, 1, 1), np.float32)
    embeddings = np.ones((batch, 1, 2), np.float32)
    text = {"null": embeddings[0]}
    blocks = []
    gc.collect()
    with create_store(path, latent={"channels": 1, "downscale": 8, "scale": 1.0}, text=text) as store:
        for first in range(0, count, batch):
            keys = [f"{i:06d}" for i in range(first, first + batch)]
            store.add(keys, latent=latents, caption=keys, embeddings=embeddings)
            blocks.append(sys.getallocatedblocks())
        assert store.num_added == count
    assert max(blocks[20:]) < max(blocks[:20]) + count // 4  # one block for each record would be twice that
    assert max(blocks[20:]) > min(blocks[20:]) + batch  # what waits is seen
    assert len(LatentStore(path)) == count


def test_shards_of_a_very_large_store_are_larger(path: Path) -> None:
    with create_store(path, latent=LATENT, text=TEXT, expected_records=100_000_000) as store:
        add_a = {"latent": numbers(0, 4, 8, 8), "caption": "a", "embeddings": numbers(0, 2, 6)}
        store.add("a", **add_a)
    testing.check_store(path)
    arrays = {layout.path: layout.shard_rows for layout in LatentStore(path).manifest.arrays}  # pyright: ignore
    assert arrays["buckets/64x64/latents"] == 32768  # 3,052 shards instead of 12,208
    assert arrays["captions/embeddings"] * 24 <= 512 << 20
    with create_store(path, latent=LATENT, text=TEXT) as store:
        assert store.add("a", **add_a) == 0


def test_shards_keep_their_size_when_more_records_are_expected_later(path: Path, tmp_path: Path) -> None:
    leave_unfinished(path)
    for expected_records in (0, 100_000_000):
        with create_store(path, latent=LATENT, expected_records=expected_records) as store:
            store.add("a", latent=numbers(0, 4, 8, 8))
            store.add("b", latent=numbers(1, 4, 8, 8))
    testing.check_store(path)
    assert LatentStore(path).layout("buckets/64x64/latents").shard_rows == 8192
    with pytest.raises(StoreError, match="expected a local folder"):
        create_store("s3://bucket/store", latent=LATENT)


def test_blosc_is_stored_too(path: Path) -> None:
    with create_store(path, latent=LATENT, text=TEXT, codec="blosc") as store:
        store.add("a", latent=numbers(0, 4, 8, 8), caption="a", embeddings=numbers(0, 2, 6))
    testing.check_store(path)


def test_the_public_names_are_those_of_the_package() -> None:
    assert {"create_store", "RecordWriter", "InvalidRecord", "testing"} <= set(package.__all__)


def test_a_store_that_was_written_so_cannot_be_encoded_again(path: Path, tmp_path: Path, leandit: Leandit) -> None:
    with create_store(path, latent=LATENT) as store:
        store.add("a", latent=numbers(0, 4, 8, 8))
    shard = path / "buckets/64x64/latents/c/0/0/0/0"
    shard.write_bytes(bytes(shard.stat().st_size))
    ended = leandit("verify", path, "--repair", "--source", tmp_path)
    assert ended.code == 3
    assert "was written with create_store" in ended.err


# --- The suite for others ---------------------------------------------------------------------------------------------


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)


def test_the_suite_finds_what_does_not_fit(path: Path, tmp_path: Path) -> None:
    with create_store(path, latent=LATENT, text=TEXT, classes=3) as store:
        add_some(store)
    whole = LatentStore(path)
    rows = dict(read(whole))
    with pytest.raises(AssertionError, match="the reader returns 9 of 10 records; missing: key 3"):
        testing.check_reader(path, lambda _: [item for item in rows.items() if item[0] != "key 3"])
    with pytest.raises(AssertionError, match="the reader returns the key 'key 1' twice"):
        testing.check_reader(path, lambda _: [("key 1", rows["key 1"])] * 2)
    with pytest.raises(AssertionError, match="'latents' of 'key 1' has other numbers than the store"):
        testing.check_reader(path, lambda _: [("key 1", {"latents": -rows["key 1"]["latents"]})])
    with pytest.raises(AssertionError, match="'latents' of 'key 1' has dtype float32, expected float16"):
        testing.check_reader(path, lambda _: [("key 1", {"latents": rows["key 1"]["latents"].astype(np.float32)})])
    flip_byte(path / "buckets/64x64/latents/c/0/0/0/0")
    with pytest.raises(AssertionError, match="'buckets/64x64/latents/c/0/0/0/0' differs from the manifest"):
        testing.check_store(path)
    manifest = path / "revisions/000001/manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"num_stored": 3}))
    with pytest.raises(AssertionError, match=r"manifest.json does not match its root_hash"):
        testing.check_store(path)
    with pytest.raises(AssertionError, match="has no revisions"):
        testing.check_store(tmp_path)
