"""Imported features: every number of the source is in the store, it trains, resumes, and says what it refused."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import shutil
import struct
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from features import (
    COUNT,
    MAKERS,
    SIDE,
    Evil,
    Made,
    assert_has_null,
    assert_holds,
    make_edm2,
    make_fast_dit,
    make_lightningdit,
    make_mar,
    make_mds,
    make_pixart,
    noise,
    rejects,
    run_import,
    without,
)
from making import CPU, no_progress, store_digest, train_recipe, tree_digest
from safetensors.torch import load_file, save_file

from leandit.datasets.batches.latents import denormalise, final_latents
from leandit.datasets.disk import files
from leandit.datasets.disk.files import Failpoint
from leandit.datasets.errors import (
    FingerprintMismatch,
    LeanditError,
    RecipeError,
    RecordRejected,
    ResourceError,
    SourceError,
)
from leandit.datasets.loader import make_loader
from leandit.datasets.maintenance.compact import compact
from leandit.datasets.maintenance.verify import verify_store
from leandit.datasets.revisions.plan import read_plan
from leandit.datasets.store import LatentStore
from leandit.precompute.importing.formats import mds
from leandit.precompute.importing.source import rejecting
from leandit.precompute.importing.untrusted import MAX_ARRAY_BYTES, npy_header, parse_npy
from leandit.tools.cli.main import main
from leandit.tools.inspection.verify import check
from leandit.train.loop import train
from leandit.train.parallel.stop import StopRequest

pytestmark = pytest.mark.usefixtures("tiny_models")


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A source of one kind, imported into ``store_of`` it; do not change either."""
    made = MAKERS[request.param](tmp_path_factory.mktemp(request.param) / "source")
    run_import(made, store_of(made))
    return made


def store_of(made: Made) -> Path:
    return (made.source if made.source.is_dir() else made.source.parent).parent / "store"


every_kind = pytest.mark.parametrize("made", list(MAKERS), indirect=True)


@every_kind
def test_every_number_of_the_source_is_in_the_store(made: Made, tmp_path: Path) -> None:
    store = LatentStore(store_of(made))
    assert_holds(store, made.records)
    assert_has_null(store, made)
    assert (store.spec.vae.class_name, store.spec.vae.weights_sha256) == (f"imported:{made.kind}", "unknown")
    found = verify_store(store.path)
    assert (found.complete, found.damaged) == (True, False)
    again = run_import(made, store.path)
    assert (again.num_imported, again.manifest) == (0, store.manifest)
    run_import(made, tmp_path / "narrow", "store.dtype=float16")
    assert_holds(LatentStore(tmp_path / "narrow"), made.records, "float16")


GOLDEN = {
    "fast-dit": "2392665a5c5d17ca",
    "mar": "1ac510e1fc5ccc43",
    "lightningdit": "e477dcc963292a4a",
    "edm2": "8873d376f20b82d0",
    "pixart": "05323f39ecf10b61",
    "mds": "c12f440cefb89c5c",
    "mlperf-flux": "18e3d47f3d0cffa8",
    "nemo": "b6775b9a0c299aae",
}


@every_kind
def test_the_same_features_make_the_same_bytes_in_every_version(made: Made) -> None:
    plan = read_plan(store_of(made), 1)
    listing = "" if made.kind == "nemo" else plan.listing  # the size of a .pt file is that of torch's version
    digest = hashlib.sha256(f"{plan.spec.fingerprint} {listing}".encode())
    for name, content in sorted(tree_digest(store_of(made)).items()):
        if "/c/" in name:  # tables have the versions of other packages in them
            digest.update(name.encode() + content)
    assert digest.hexdigest()[:16] == GOLDEN[made.kind]


@pytest.mark.parametrize("made", ["lightningdit", "mds", "mlperf-flux"], indirect=True)
def test_an_imported_store_trains_and_compacts(made: Made, tmp_path: Path) -> None:
    compact(store_of(made), tmp_path / "new", progress=lambda *_: None)
    assert_holds(LatentStore(tmp_path / "new"), made.records)
    if isinstance(made.null_rows, dict):  # no model here takes several text encoders
        batch = next(iter(make_loader(LatentStore(tmp_path / "new"), global_batch=4)))
        assert sorted(batch.texts) == sorted(made.null_rows)
        return
    name = "pixart-tiny" if made.null_rows is not None else "dit-s-4"
    recipe = train_recipe(name, "model.channels=0", "run.steps=2", "run.global_batch=4", "run.checkpoint_every=2")
    stop = StopRequest()
    outcome = train(recipe, store_path=tmp_path / "new", run=tmp_path / "run", device=CPU, report=print, stop=stop)
    assert outcome.step == 2
    assert np.isfinite(outcome.losses).all()


@pytest.mark.parametrize("made", ["mar", "pixart"], indirect=True)
def test_an_import_that_fails_anywhere_resumes_to_the_same_bytes(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leandit.datasets.format.row_layout.MAX_SHARD_ROWS", 2)
    monkeypatch.setattr(files, "failpoint", Failpoint())
    whole = run_import(made, tmp_path / "whole").manifest
    num_steps = len(files.failpoint.seen)  # pyright: ignore[reportOptionalMemberAccess]
    assert num_steps > 50
    resumed = 0
    for at in range(3, num_steps, num_steps // 4):
        store = tmp_path / f"store-{at}"
        monkeypatch.setattr(files, "failpoint", Failpoint("eio", at))
        with pytest.raises(OSError, match="Input/output error"):
            run_import(made, store)
        monkeypatch.setattr(files, "failpoint", None)
        report = run_import(made, store)
        resumed += report.num_imported < COUNT
        assert report.manifest == whole
        assert store_digest(store) == store_digest(tmp_path / "whole")
    assert resumed  # how often depends on the writer threads; the last of the steps is after the last commit


def test_other_settings_or_another_source_are_refused(tmp_path: Path) -> None:
    made = make_fast_dit(tmp_path / "source")
    run_import(made, tmp_path / "store")
    before = tree_digest(tmp_path / "store")
    with pytest.raises(FingerprintMismatch, match=r"store\.dtype was 'source', is 'float16'"):
        run_import(made, tmp_path / "store", "store.dtype=float16")
    np.save(tmp_path / "source/imagenet256_features/11.npy", noise(11, 1, 4, SIDE, SIDE))
    with pytest.raises(SourceError, match="lists other files"):
        run_import(made, tmp_path / "store")
    assert tree_digest(tmp_path / "store") == before


def test_an_encoded_store_is_not_imported_into(label_store: LatentStore, tmp_path: Path) -> None:
    with pytest.raises(FingerprintMismatch, match="encoded, not imported"):
        run_import(make_fast_dit(tmp_path / "source"), label_store.path)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (["vae.scal=[1]"], "did you mean 'vae.scale'"),
        (["vae.scale=[0.0]"], "a scale of 0"),
        (["vae.scale=[1.0, 2.0]"], "has 2 numbers, the latents have 4 channels"),
        (["store.codec=lz5"], "store.codec"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: list[str], match: str, tmp_path: Path) -> None:
    made = make_fast_dit(tmp_path / "source")
    with pytest.raises((RecipeError, SourceError), match=match):
        run_import(made, tmp_path / "store", *settings)
    assert not (tmp_path / "store").exists()


def test_raw_moments_are_scaled_when_they_are_read(tmp_path: Path) -> None:
    run_import(make_mar(tmp_path / "source"), tmp_path / "store")
    spec = LatentStore(tmp_path / "store").spec.latent
    assert (spec.kind, spec.channels, spec.downscale, spec.flip) == ("mean_logvar", 16, 16, True)
    assert (spec.scale, spec.shift, spec.decoding) == ([0.2325] * 16, [0.0] * 16, None)


# What is damaged later.


@every_kind
def test_a_damaged_shard_is_read_again_from_the_features(made: Made, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(store_of(made), store)
    before = tree_digest(store)
    for name in [name for name in before if "/c/" in name and "/null" not in name]:
        (store / name).write_bytes(before[name][:50] + bytes([before[name][50] ^ 1]) + before[name][51:])
    options: Any = {"quick": False, "device": lambda: CPU, "overrides": [], "progress": no_progress}
    damaged, _ = check(store, deep=False, repair=False, source=None, **options)
    assert damaged.damaged
    mended, _ = check(store, deep=False, repair=True, source=made.source, **options)
    assert not mended.damaged
    assert tree_digest(store) == before
    with pytest.raises(RecipeError, match="was imported, so nothing can encode it again"):
        check(store, deep=True, repair=False, source=made.source, **options)


# What is broken.


def break_files(made: Made) -> dict[str, tuple[str, str]]:
    """Damage a source of fast-DiT, record by record; what must be said of each."""
    features, labels = made.source / "imagenet256_features", made.source / "imagenet256_labels"
    content = (features / "0.npy").read_bytes()
    (features / "1.npy").write_bytes(content[:-4])
    (features / "2.npy").write_bytes(b"")
    np.save(features / "3.npy", noise(0, 1, 4, SIDE, 2 * SIDE))
    np.save(features / "4.npy", noise(0, 1, 4, SIDE, SIDE, dtype=np.float16))
    np.save(features / "5.npy", np.full((1, 4, SIDE, SIDE), np.inf, np.float32))
    (labels / "6.npy").unlink()
    np.save(labels / "7.npy", np.array([0.5]))
    np.save(labels / "8.npy", np.array([-1]))
    np.save(features / "9.npy", np.array([{"a": 1}], object), allow_pickle=True)
    unreadable, shape, label = ("scan", "unreadable"), ("scan", "wrong_shape"), ("scan", "no_label")
    found = {"1": unreadable, "2": unreadable, "3": shape, "4": shape, "5": ("decode", "nonfinite")}
    return found | {"6": label, "7": label, "8": label, "9": unreadable}


def test_what_is_broken_is_rejected_with_its_reason_and_the_rest_is_stored(tmp_path: Path) -> None:
    made = make_fast_dit(tmp_path / "source")
    # Two good ones of the same shape beside the broken ones decide what the others must be.
    wanted = break_files(made)
    run_import(made, tmp_path / "store", "source.max_reject_share=1.0")
    store = LatentStore(tmp_path / "store")
    assert rejects(store) == wanted
    assert_holds(store, without(made, *wanted))


def test_too_many_rejects_stop_an_import_before_anything_is_written(tmp_path: Path) -> None:
    made = make_fast_dit(tmp_path / "source")
    break_files(made)
    with pytest.raises(SourceError, match="3 records or captions in a row are rejected"):
        run_import(made, tmp_path / "store", "source.max_rejects_in_a_row=3")
    for path in (made.source / "imagenet256_features").iterdir():
        path.write_bytes(b"no array")
    with pytest.raises(SourceError, match="not one of 11 records can be imported"):
        run_import(made, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_a_broken_member_of_an_npz_is_rejected(tmp_path: Path) -> None:
    made = make_mar(tmp_path / "source")
    keys = list(made.records)
    paths = [made.source / f"{key}.npz" for key in keys]
    arrays = dict(np.load(paths[0]))
    np.savez(paths[0], moments=arrays["moments"])
    np.savez(paths[1], moments=arrays["moments"], moments_flip=arrays["moments_flip"][:, :4])
    np.savez(paths[2], other=arrays["moments"])
    flipped = bytearray(paths[3].read_bytes())
    flipped[len(flipped) // 3] ^= 1  # among the numbers of the first array
    paths[3].write_bytes(flipped)
    paths[4].write_bytes(paths[4].read_bytes()[:5000])
    run_import(made, tmp_path / "store", "source.max_reject_share=1.0")
    store = LatentStore(tmp_path / "store")
    shape = ("scan", "wrong_shape")
    wanted = dict(zip(keys, [shape, shape, shape, ("decode", "unreadable"), ("scan", "unreadable")], strict=False))
    assert rejects(store) == wanted
    assert_holds(store, without(made, *wanted))


def npy(header: str, body: bytes = b"") -> bytes:
    """A .npy file with a header of one's own."""
    padded = header.encode() + b" " * (-(10 + len(header) + 1) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(padded)) + padded + body


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x93NUMPY",
        b"\x93NUMPY\x03\x00" + b"\0" * 100,
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }", b"\0" * 64),
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296), }"),
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 16), }", b"\0" * 64),
        npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", b"cos\nsystem\n(S'true'\ntR."),
        npy("{'descr': [('a', '|O')], 'fortran_order': False, 'shape': (1,), }", b"cos\nsystem\n"),
        npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1,), }", b"\0" * 8),
        npy("__import__('os').system('true')"),
        npy("(" * 5000),
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (4,), }", b"\0" * 17),
    ],
    ids=range(12),
)
def test_a_hostile_array_is_refused_before_memory_is_asked_for(content: bytes) -> None:
    with pytest.raises((ValueError, EOFError, MemoryError, RecursionError)) as caught:
        parse_npy(content)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f2", "<i8"])
def test_arrays_are_read_as_numpy_reads_them(order: Any, dtype: str) -> None:
    array = np.asarray(100 * noise(1, 2, 3, 4), dtype, order=order)
    stream = io.BytesIO()
    np.save(stream, array)
    found = parse_npy(stream.getvalue())
    assert (found.dtype, found.shape) == (array.dtype.newbyteorder("="), array.shape)
    np.testing.assert_array_equal(found, array)
    assert npy_header(stream.getvalue()[:128], len(stream.getvalue()))[0] == array.shape


def test_an_npz_that_unpacks_to_more_than_it_claims_is_rejected(tmp_path: Path) -> None:
    made = make_mar(tmp_path / "source")
    key = next(iter(made.records))
    path = made.source / f"{key}.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("moments.npy", bytes(MAX_ARRAY_BYTES // 4))
    liar = path.read_bytes()
    at = liar.rindex(b"PK\x01\x02")
    path.write_bytes(liar[: at + 24] + struct.pack("<I", 9000) + liar[at + 28 :])  # the size that it unpacks to
    run_import(made, tmp_path / "store")
    assert rejects(LatentStore(tmp_path / "store")) == {key: ("scan", "unreadable")}


# LightningDiT.


def test_samples_are_normalised_with_the_sources_own_statistics(tmp_path: Path) -> None:
    made = make_lightningdit(tmp_path / "source")
    run_import(made, tmp_path / "store", "vae.multiplier=0.5")
    spec, rows = LatentStore(tmp_path / "store").spec.latent, torch.from_numpy(noise(3, 2, 32, SIDE, SIDE))
    statistics = torch.load(made.source / "latents_stats.pt", weights_only=True)
    wanted = (rows - statistics["mean"]) / statistics["std"] * 0.5
    np.testing.assert_allclose(final_latents(rows, spec, None), wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(denormalise(final_latents(rows, spec, None), spec), rows, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_samples_of_any_precision_are_kept_exactly(dtype: torch.dtype, tmp_path: Path) -> None:
    made = make_lightningdit(tmp_path / "source", dtype)
    run_import(made, tmp_path / "store")
    store = LatentStore(tmp_path / "store")
    assert store.spec.latent.dtype == ("float32" if dtype == torch.bfloat16 else "float16")
    assert_holds(store, made.records, store.spec.latent.dtype)


@pytest.mark.parametrize("content", ["evil", "none", "other", "damaged"])
def test_statistics_that_are_none_are_refused_and_never_unpickled(content: str, tmp_path: Path) -> None:
    made, path = make_lightningdit(tmp_path / "source"), tmp_path / "source/latents_stats.pt"
    if content == "none":
        path.unlink()
    elif content == "damaged":  # its first byte, so that it is read as a bare pickle
        path.write_bytes(b"Q" + path.read_bytes()[1:])
    else:
        torch.save({"mean": Evil(tmp_path / "mark")} if content == "evil" else {"mean": torch.zeros(3)}, path)
    with pytest.raises(SourceError, match=r"latents_stats\.pt.*vae\.shift"):
        run_import(made, tmp_path / "store")
    assert not (tmp_path / "mark").exists()
    run_import(made, tmp_path / "store", "vae.shift=[0.0]", "vae.scale=[1.0]")


def test_a_broken_shard_stops_the_import_and_one_without_labels_is_a_reject_each(tmp_path: Path) -> None:
    made = make_lightningdit(tmp_path / "source")
    names = sorted(path.stem for path in made.source.glob("*.safetensors"))
    broken = made.source / f"{names[0]}.safetensors"
    whole = broken.read_bytes()
    broken.write_bytes(whole[:-8])
    with pytest.raises(SourceError, match=rf"shard '{names[0]}\.safetensors' cannot be opened"):
        run_import(made, tmp_path / "store")
    broken.write_bytes(whole)
    unlabelled = made.source / f"{names[2]}.safetensors"
    save_file({name: t for name, t in load_file(unlabelled).items() if name != "labels"}, unlabelled)
    run_import(made, tmp_path / "store")
    store, lost = LatentStore(tmp_path / "store"), [key for key in made.records if names[2] in key]
    assert rejects(store) == dict.fromkeys(lost, ("scan", "no_label"))
    assert_holds(store, without(made, *lost))


def test_two_pictures_do_not_share_the_caption_of_one(tmp_path: Path) -> None:
    # Where caption files have bare names, pictures of one name in two folders have one.
    made = make_pixart(tmp_path / "source")
    data = made.source / "InternData"
    (latents,), (captions,) = data.glob("img_*"), data.glob("caption_*")
    (captions / "set0_00000.npz").rename(captions / "00000.npz")
    shutil.copy(latents / "set0_00000.npy", latents / "elsewhere_00000.npy")
    items = json.loads((data / "data_info.json").read_text())
    again = {**items[0], "path": "elsewhere/00000.png", "prompt": "another prompt"}
    (data / "data_info.json").write_text(json.dumps([*items, again]))
    run_import(made, tmp_path / "store")
    assert rejects(LatentStore(tmp_path / "store")) == {again["path"]: ("scan", "bad_metadata")}


@every_kind
@pytest.mark.timeout(60)
def test_links_to_nothing_fifos_and_folders_in_place_of_files_are_told_and_not_waited_for(
    made: Made, tmp_path: Path
) -> None:
    is_file = made.source.is_file()
    whole = made.source.parent if is_file else made.source
    for name in {path.suffix: path.relative_to(whole) for path in sorted(whole.rglob("*")) if path.is_file()}.values():
        for put in (lambda path: path.symlink_to("gone"), os.mkfifo, os.mkdir):
            copied, store = tmp_path / "copied", tmp_path / "store"
            shutil.copytree(whole, copied)
            (copied / name).unlink()
            put(copied / name)
            null = made.null and made.null.replace(str(whole), str(copied))
            odd = replace(made, source=copied / made.source.name if is_file else copied, null=null)
            try:
                run_import(odd, store, "source.max_reject_share=1.0")
            except LeanditError:
                assert not store.exists(), name
            else:
                assert put is os.mkdir or rejects(LatentStore(store)), name  # a folder of any name is a folder
                shutil.rmtree(store)
            shutil.rmtree(copied)


@pytest.mark.parametrize("make", [make_fast_dit, make_edm2, lambda root: make_edm2(root, folder=True)])
def test_what_has_a_label_but_no_features_is_a_reject(make: Callable[[Path], Made], tmp_path: Path) -> None:
    made = make(tmp_path / "source")
    gone = list(made.records)[3]
    if made.source.is_file():
        with zipfile.ZipFile(made.source) as packed:
            kept = {name: packed.read(name) for name in packed.namelist() if name != f"{gone}.npy"}
        with zipfile.ZipFile(made.source, "w", zipfile.ZIP_STORED) as packed:
            for name, content in kept.items():
                packed.writestr(name, content)
    else:
        next(path for path in made.source.rglob(f"{Path(gone).name}.npy") if "labels" not in path.parent.name).unlink()
    run_import(made, tmp_path / "store")
    store = LatentStore(tmp_path / "store")
    assert list(rejects(store)) == [gone]
    assert_holds(store, without(made, gone))


# EDM2.


def test_an_unpacked_zip_gives_the_same_rows(tmp_path: Path) -> None:
    packed, unpacked = make_edm2(tmp_path / "zip"), make_edm2(tmp_path / "folder", folder=True)
    for made in (packed, unpacked):
        run_import(made, tmp_path / f"store-{made.source.name}")
        assert_holds(LatentStore(tmp_path / f"store-{made.source.name}"), made.records)
    arrays = [tmp_path / f"store-{made.source.name}" / "buckets" for made in (packed, unpacked)]
    assert tree_digest(arrays[0]) == tree_digest(arrays[1])


def test_latents_of_pictures_from_0_to_1_are_whitened_as_edm2_does_and_said_to_be_such(tmp_path: Path) -> None:
    run_import(make_edm2(tmp_path / "source"), tmp_path / "store")
    store = LatentStore(tmp_path / "store")
    spec = store.spec.latent
    mean, std = [5.81, 3.25, 0.12, -2.15], [4.17, 4.62, 3.71, 3.28]
    wanted = [(1.0 - m) / s * 0.5 for m, s in zip(mean, std, strict=True)]
    moments = torch.cat([torch.ones(1, 4, 2, 2), torch.zeros(1, 4, 2, 2)], dim=1)
    found = final_latents(moments, spec, torch.tensor([1]))
    np.testing.assert_allclose(found[0, :, 0, 0], wanted, rtol=1e-5)
    np.testing.assert_allclose(denormalise(found, spec), torch.ones(1, 4, 2, 2), rtol=1e-5)
    assert spec.kind == "mean_std"
    assert spec.decoding is not None
    assert spec.decoding.zero_to_one
    assert store.spec.vae.config["zero_to_one"] is True


def test_members_that_are_compressed_hostile_or_without_label_are_rejected(tmp_path: Path) -> None:
    made = make_edm2(tmp_path / "source")
    keys, stream = list(made.records), io.BytesIO()
    np.save(stream, made.records[keys[0]].arrays[0])
    with zipfile.ZipFile(made.source, "a") as packed:
        packed.writestr("../../outside.npy", stream.getvalue())
        packed.writestr("/absolute.npy", stream.getvalue())
        packed.writestr("unlabelled.npy", stream.getvalue())
        packed.writestr("bomb.npy", bytes(1 << 22), zipfile.ZIP_DEFLATED)
        packed.writestr("00000/object.npy", npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", b"cos\n"))
    content = bytearray(made.source.read_bytes())
    content[content.index(made.records[keys[2]].arrays[0].tobytes()) + 100] ^= 1
    made.source.write_bytes(content)
    run_import(made, tmp_path / "store", "source.max_reject_share=1.0")
    metadata, unreadable = ("scan", "bad_metadata"), ("scan", "unreadable")
    assert rejects(LatentStore(tmp_path / "store")) == {
        "../../outside": metadata,
        "/absolute": metadata,
        "unlabelled": ("scan", "no_label"),
        "bomb": unreadable,  # its 4 MB are no array
        "00000/object": unreadable,
        keys[2]: unreadable,
    }
    assert_holds(LatentStore(tmp_path / "store"), without(made, keys[2]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "store"]


@pytest.mark.parametrize("description", ["[", '{"labels": [1]}', '{"labels": [["a.npy", "cat"]]}'])
def test_labels_that_are_no_class_numbers_are_refused(description: str, tmp_path: Path) -> None:
    made = make_edm2(tmp_path / "source", folder=True)
    (made.source / "dataset.json").write_text(description)
    with pytest.raises(SourceError, match=r"dataset\.json"):
        run_import(made, tmp_path / "store")


def test_features_without_labels_make_a_store_without_classes(tmp_path: Path) -> None:
    made = make_edm2(tmp_path / "source", folder=True)
    (made.source / "dataset.json").write_text('{"labels": null}')
    run_import(made, tmp_path / "store")
    store = LatentStore(tmp_path / "store")
    assert (store.spec.classes, set(store.records["label"].to_pylist())) == (None, {-1})


# PixArt.


def test_buckets_are_the_sizes_of_the_latents(tmp_path: Path) -> None:
    run_import(make_pixart(tmp_path / "source"), tmp_path / "store")
    store = LatentStore(tmp_path / "store")
    assert store.buckets == {"64x64": 4, "32x96": 4, "96x32": 3}
    spec = store.spec.latent
    assert (spec.kind, spec.scale, spec.dtype) == ("mean_std", [0.13025] * 4, "float16")
    text = store.spec.text
    assert text is not None
    assert (text.kind, text.width, text.max_tokens, text.dtype) == ("imported", 16, 12, "float16")
    assert store.captions.num_rows == 7


def test_captions_that_an_import_narrows_to_float16_are_measured(tmp_path: Path) -> None:
    made = make_pixart(tmp_path / "source")
    for path in (made.source / "InternData/caption_features_new").glob("*.npz"):
        with np.load(path) as held:
            feature, mask = held["caption_feature"].astype(np.float32) * 1.0001, held["attention_mask"]
        np.savez_compressed(path, caption_feature=feature, attention_mask=mask)
    run_import(made, tmp_path / "narrow", "store.dtype=float16")
    run_import(made, tmp_path / "exact")
    columns = ["min_cosine", "max_error"]
    for row in LatentStore(tmp_path / "narrow").captions.select(columns).to_pylist():
        assert 0.999 < row["min_cosine"] <= 1
        assert 0 < row["max_error"] < 0.01
    exact = LatentStore(tmp_path / "exact")
    assert exact.spec.text
    assert exact.spec.text.dtype == "float32"
    assert {tuple(row.values()) for row in exact.captions.select(columns).to_pylist()} == {(None, None)}


def test_without_a_null_caption_the_user_is_told_what_it_is_for(tmp_path: Path) -> None:
    made = make_pixart(tmp_path / "source")
    with pytest.raises(SourceError, match=r"replaces some by a null caption of shape \(12, 16\).*--null"):
        run_import(replace(made, null=None), tmp_path / "store")
    np.save(tmp_path / "short.npy", noise(0, 5, 16))
    with pytest.raises(SourceError, match=r"shape \(5, 16\); expected finite numbers of shape \(12, 16\)"):
        run_import(replace(made, null=str(tmp_path / "short.npy")), tmp_path / "store")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("suffix", ["npz", "safetensors", "pth", "zeros"])
def test_the_null_caption_comes_from_a_file_a_checkpoint_or_is_zeros(suffix: str, tmp_path: Path) -> None:
    made, rows = make_pixart(tmp_path / "source"), noise(5, 12, 16)
    path, wanted, name = tmp_path / f"null.{suffix}", rows.astype(np.float16), "y_embedder.y_embedding"
    if suffix == "npz":
        np.savez(path, caption_feature=rows[None])
    elif suffix == "safetensors":
        save_file({name: torch.from_numpy(rows), "other": torch.zeros(2)}, path)
    elif suffix == "pth":
        torch.save({"state_dict": {name: torch.from_numpy(rows)}, "epoch": 3}, path)
    else:
        path, wanted = Path("zeros"), np.zeros_like(wanted)
    run_import(replace(made, null=str(path)), tmp_path / "store")
    np.testing.assert_array_equal(LatentStore(tmp_path / "store").null_caption, wanted)


@pytest.mark.parametrize("content", ["pickled", torch.zeros(12, 16), {"y_embedding": [1.0, 2.0]}])
def test_a_checkpoint_without_the_null_caption_is_refused_and_never_unpickled(content: Any, tmp_path: Path) -> None:
    is_pickled = isinstance(content, str)
    torch.save({"y_embedding": Evil(tmp_path / "mark")} if is_pickled else content, tmp_path / "null.pth")
    match = "something else than tensors" if is_pickled else "0 tensors whose name ends in 'y_embedding'"
    with pytest.raises(SourceError, match=match):
        run_import(replace(make_pixart(tmp_path / "source"), null=str(tmp_path / "null.pth")), tmp_path / "store")
    assert not (tmp_path / "mark").exists()


def test_broken_captions_and_hostile_paths_are_rejected(tmp_path: Path) -> None:
    made = make_pixart(tmp_path / "source")
    data = made.source / "InternData"
    captions, keys = data / "caption_features_new", list(made.records)
    paths = [captions / ("_".join(key.rsplit("/", 1)).removesuffix(".png") + ".npz") for key in keys]
    feature, mask = noise(0, 1, 12, 16, dtype=np.float16), np.ones((1, 12), np.int16)
    paths[0].unlink()
    np.savez(paths[1], caption_feature=feature, attention_mask=mask[:, :5])
    np.savez(paths[2], caption_feature=feature[:, :7], attention_mask=mask[:, :7])
    np.savez(paths[3], caption_feature=feature, attention_mask=0 * mask)
    np.savez(paths[4], caption_feature=feature * np.float16(np.nan), attention_mask=mask)
    (data / "img_sdxl_vae_features_512resolution_ms_new/set1_00005.npy").unlink()
    listed = json.loads((data / "data_info.json").read_text())
    (tmp_path / "outside.npy").write_bytes(b"")
    hostile = [{"path": "../../outside.png", "prompt": "x"}, {"path": "/etc/passwd", "prompt": "x"}, {"path": 3}, 7]
    no_text, twice = {"path": "a.png", "prompt": " "}, dict(listed[6])
    (data / "data_info.json").write_text(json.dumps([*listed, *hostile, no_text, twice]))
    run_import(made, tmp_path / "store", "source.max_reject_share=1.0")
    store, metadata = LatentStore(tmp_path / "store"), ("scan", "bad_metadata")
    broken = [("scan", "no_caption"), ("scan", "unreadable"), ("scan", "wrong_shape"), ("scan", "no_caption")]
    broken += [("scan", "nonfinite"), ("scan", "missing_file")]
    wanted = dict(zip(keys, broken, strict=False)) | {f"data_info.json:{i}": metadata for i in range(11, 17)}
    assert rejects(store) == wanted
    assert_holds(store, without(made, *wanted))


def test_a_caption_that_breaks_after_planning_stops_the_import_and_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_pixart(tmp_path / "source")
    monkeypatch.setattr(files, "failpoint", Failpoint())
    whole = run_import(made, tmp_path / "whole").manifest
    planned = files.failpoint.seen.index("rename plan")  # pyright: ignore[reportOptionalMemberAccess]
    monkeypatch.setattr(files, "failpoint", Failpoint("eio", planned + 5))
    with pytest.raises(OSError, match="Input/output error"):
        run_import(made, tmp_path / "store")
    monkeypatch.setattr(files, "failpoint", None)
    path = made.source / "InternData/caption_features_new/set0_00000.npz"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(SourceError, match=r"record 'set0/00000\.png': its caption cannot be read"):
        run_import(made, tmp_path / "store")
    path.write_bytes(content)
    assert run_import(made, tmp_path / "store").manifest == whole


# MDS.


def test_samples_of_an_unknown_vae_need_its_scale(tmp_path: Path) -> None:
    made = make_mds(tmp_path / "source")
    with pytest.raises(SourceError, match=r"vae\.scale is unknown for this kind of features"):
        run_import(replace(made, settings=made.settings[1:]), tmp_path / "store")
    run_import(made, tmp_path / "store")
    spec = LatentStore(tmp_path / "store").spec.latent
    rows = torch.from_numpy(noise(3, 2, 4, SIDE, SIDE))
    np.testing.assert_array_equal(final_latents(rows, spec, None), rows)
    np.testing.assert_allclose(denormalise(rows, spec), rows / 0.13025, rtol=1e-6)


def test_broken_shards_and_samples_are_rejected(tmp_path: Path) -> None:
    made = make_mds(tmp_path / "source")
    path = made.source / "shard.00000.mds"
    content = bytearray(path.read_bytes())
    content[4:8] = (1 << 31).to_bytes(4, "little")  # where the first sample begins
    path.write_bytes(content)
    (made.source / "shard.00002.mds").unlink()
    run_import(made, tmp_path / "store", "source.max_reject_share=1.0")
    store = LatentStore(tmp_path / "store")
    gone = [key for key in made.records if "00002" in key]
    wanted = {"shard.00000/0": ("scan", "unreadable"), **dict.fromkeys(gone, ("scan", "missing_file"))}
    assert rejects(store) == wanted
    assert_holds(store, without(made, *wanted))


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError(errno.EMFILE, "Too many open files"), ResourceError),
        (OSError(errno.ENOSPC, "No space left on device"), ResourceError),
        (MemoryError(), ResourceError),
        (OSError(errno.EIO, "Input/output error"), ResourceError),
        (OSError(errno.EACCES, "Permission denied"), RecordRejected),
        (OSError("not a regular file"), RecordRejected),
    ],
)
def test_what_the_machine_lacks_is_no_reject(error: Exception, raised: type[Exception]) -> None:
    with pytest.raises(raised, match=r"7\.npy"), rejecting("7.npy"):
        raise error


def test_where_a_packed_shard_finds_no_room_it_is_no_reject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_mds(tmp_path / "source")

    def full(prefix: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(mds.tempfile, "NamedTemporaryFile", full)
    with pytest.raises(ResourceError, match="TMPDIR"):
        run_import(made, tmp_path / "store")


@pytest.mark.parametrize(
    ("before", "after", "match"),
    [
        ('"shard.00000.mds"', '"../shard.00000.mds"', "does not stay below its folder"),
        ('"zstd:3"', '"br:3"', "compression 'br:3'"),
        ('"format": "mds"', '"format": "jsonl"', "expected mds"),
        ('"bytes"', '"pkl"', "pickled ones are refused"),
        ('"latents_256"', '"other"', r"layout\.latents"),
        ('"column_names": ["caption"', '"column_names": [5', "no text"),
        ('"column_encodings": ["str"', '"column_encodings": [5', "no text"),
    ],
)
def test_an_index_that_cannot_be_is_refused(before: str, after: str, match: str, tmp_path: Path) -> None:
    made = make_mds(tmp_path / "source")
    index = made.source / "index.json"
    text = index.read_text()
    assert before in text
    replaced = text.replace(f"[{before}]", f"[{after}]").replace(f", {before},", f", {after},")
    index.write_text(replaced if before in ('"bytes"', '"latents_256"') else text.replace(before, after))
    with pytest.raises(SourceError, match=match):
        run_import(made, tmp_path / "store")
    assert not (tmp_path / "store").exists()


# The command.


def test_the_command_imports_and_says_what_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make_fast_dit(tmp_path / "source")
    words = ["leandit", "import", "fast-dit", "--source", str(made.source), "--store", str(tmp_path / "store")]
    for arguments, code in ((words, 0), (words, 0), ([*words[:2], "slow-dit", *words[3:]], 2)):
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit) as end:
            main()
        assert int(end.value.code or 0) == code
    said = capsys.readouterr()
    assert "11 planned = 11 stored + 0 rejected" in said.out
    assert "nothing to copy, the store was complete" in said.out
    assert "import 'slow-dit': no such kind of features. Expected one of fast-dit" in said.err
