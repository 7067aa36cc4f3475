"""Damaged and hostile features: a bad record is a reject with its reason, a bad source is refused, nothing is run."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import struct
import zipfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from faults import flip
from features import (
    MAKERS,
    SIDE,
    Evil,
    Made,
    assert_holds,
    make_edm2,
    make_nemo,
    noise,
    npy_of_bits,
    rejects,
    run_import,
    without,
    write_zip,
)
from safetensors.torch import load_file, save_file

from leandit.datasets.store import LatentStore
from leandit.errors import LeanditError, RecipeError, RecordRejected, ResourceError, SourceError
from leandit.precompute.importing.formats import mds
from leandit.precompute.importing.source import rejecting
from leandit.precompute.importing.untrusted import MAX_ARRAY_BYTES, parse_npy

METADATA, MISSING, NO_CAPTION, NO_LABEL, NONFINITE, SHAPE, UNREADABLE = (
    ("scan", reason)
    for reason in ("bad_metadata", "missing_file", "no_caption", "no_label", "nonfinite", "wrong_shape", "unreadable")
)
KINDS: dict[str, Callable[[Path], Made]] = MAKERS | {
    "edm2 folder": partial(make_edm2, folder=True),
    "flux2": partial(make_nemo, model="flux2"),
    "mds without a scale": lambda root: replace(MAKERS["mds"](root), settings=["layout.mask=mask"]),
}
Rejects = dict[str, tuple[str, str]]
"""Stage and reason, by key."""


def npy(header: str, body: bytes = b"") -> bytes:
    """A .npy file with any header."""
    padded = header.encode() + b" " * (-(10 + len(header) + 1) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(padded)) + padded + body


PICKLED = npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", b"cos\nsystem\n(S'true'\ntR.")


def cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:num_bytes])


# A record that is broken. Each function damages a source and returns what becomes of its records.


def break_fast_dit(made: Made) -> Rejects:
    features, labels = made.source / "imagenet256_features", made.source / "imagenet256_labels"
    cut(features / "1.npy", -4)
    (features / "2.npy").write_bytes(b"")
    # Two good records of the same shape beside these decide what the others must be.
    np.save(features / "3.npy", noise(0, 1, 4, SIDE, 2 * SIDE))
    np.save(features / "4.npy", noise(0, 1, 4, SIDE, SIDE, dtype=np.float16))
    np.save(features / "5.npy", np.full((1, 4, SIDE, SIDE), np.inf, np.float32))
    (labels / "6.npy").unlink()
    np.save(labels / "7.npy", np.array([0.5]))
    np.save(labels / "8.npy", np.array([-1]))
    np.save(features / "9.npy", np.array([{"a": 1}], object), allow_pickle=True)
    found = {"1": UNREADABLE, "2": UNREADABLE, "3": SHAPE, "4": SHAPE, "5": ("decode", "nonfinite")}
    return found | dict.fromkeys("678", NO_LABEL) | {"9": UNREADABLE}


def lose_features(made: Made) -> Rejects:
    """A record has a label, but no file."""
    gone = list(made.records)[3]
    if made.source.is_file():
        with zipfile.ZipFile(made.source) as packed:
            kept = {name: packed.read(name) for name in packed.namelist() if name != f"{gone}.npy"}
        write_zip(made.source, kept)
    else:
        next(path for path in made.source.rglob(f"{Path(gone).name}.npy") if "labels" not in path.parent.name).unlink()
    return {gone: MISSING}


def break_mar(made: Made) -> Rejects:
    paths = [made.source / f"{key}.npz" for key in made.records]
    arrays = dict(np.load(paths[0]))
    np.savez(paths[0], moments=arrays["moments"])
    np.savez(paths[1], moments=arrays["moments"], moments_flip=arrays["moments_flip"][:, :4])
    np.savez(paths[2], other=arrays["moments"])
    flip(paths[3], 8 * (paths[3].stat().st_size // 3))  # among the numbers of the first array
    cut(paths[4], 5000)
    return dict(zip(made.records, [SHAPE, SHAPE, SHAPE, ("decode", "unreadable"), UNREADABLE], strict=False))


def unpack_to_more_than_it_claims(made: Made) -> Rejects:
    key = next(iter(made.records))
    path = made.source / f"{key}.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("moments.npy", bytes(MAX_ARRAY_BYTES // 4))
    liar = path.read_bytes()
    at = liar.rindex(b"PK\x01\x02")
    path.write_bytes(liar[: at + 24] + struct.pack("<I", 9000) + liar[at + 28 :])  # the size that it unpacks to
    return {key: UNREADABLE}


def drop_labels_of_a_shard(made: Made) -> Rejects:
    path = max(made.source.glob("*.safetensors"))
    save_file({name: values for name, values in load_file(path).items() if name != "labels"}, path)
    return {key: NO_LABEL for key in made.records if path.stem in key}


def break_edm2(made: Made) -> Rejects:
    keys, stream = list(made.records), io.BytesIO()
    np.save(stream, made.records[keys[0]].arrays[0])
    with zipfile.ZipFile(made.source, "a") as packed:
        for name in ("../../outside.npy", "/absolute.npy", "unlabelled.npy"):
            packed.writestr(name, stream.getvalue())
        packed.writestr("bomb.npy", bytes(1 << 22), zipfile.ZIP_DEFLATED)  # its 4 MB are no array
        packed.writestr("00000/object.npy", PICKLED)
    flip(made.source, 8 * (made.source.read_bytes().index(made.records[keys[2]].arrays[0].tobytes()) + 100))
    hostile = {"../../outside": METADATA, "/absolute": METADATA, "bomb": UNREADABLE, "00000/object": UNREADABLE}
    return hostile | {"unlabelled": NO_LABEL, keys[2]: UNREADABLE}


def break_pixart(made: Made) -> Rejects:
    data, keys = made.source / "InternData", list(made.records)
    stems = ["_".join(key.rsplit("/", 1)).removesuffix(".png") for key in keys]
    paths = [data / f"caption_features_new/{stem}.npz" for stem in stems]
    feature, mask = noise(0, 1, 12, 16, dtype=np.float16), np.ones((1, 12), np.int16)
    paths[0].unlink()
    np.savez(paths[1], caption_feature=feature, attention_mask=mask[:, :5])
    np.savez(paths[2], caption_feature=feature[:, :7], attention_mask=mask[:, :7])
    np.savez(paths[3], caption_feature=feature, attention_mask=0 * mask)
    np.savez(paths[4], caption_feature=feature * np.float16(np.nan), attention_mask=mask)
    (data / f"img_sdxl_vae_features_512resolution_ms_new/{stems[5]}.npy").unlink()
    listed = json.loads((data / "data_info.json").read_text())
    hostile = [{"path": "../../outside.png", "prompt": "x"}, {"path": "/etc/passwd", "prompt": "x"}, {"path": 3}, 7]
    no_text, twice = {"path": "a.png", "prompt": " "}, dict(listed[6])
    (data / "data_info.json").write_text(json.dumps([*listed, *hostile, no_text, twice]))
    broken = [NO_CAPTION, UNREADABLE, SHAPE, NO_CAPTION, NONFINITE, MISSING]
    return dict(zip(keys, broken, strict=False)) | {f"data_info.json:{i}": METADATA for i in range(11, 17)}


def share_a_caption_file(made: Made) -> Rejects:
    """Where caption files have bare names, images of one name in two folders would have one."""
    data = made.source / "InternData"
    (latents,), (captions,) = data.glob("img_*"), data.glob("caption_*")
    (captions / "set0_00000.npz").rename(captions / "00000.npz")
    shutil.copy(latents / "set0_00000.npy", latents / "elsewhere_00000.npy")
    items = json.loads((data / "data_info.json").read_text())
    again = {**items[0], "path": "elsewhere/00000.png", "prompt": "another prompt"}
    (data / "data_info.json").write_text(json.dumps([*items, again]))
    return {again["path"]: METADATA}


def break_mds(made: Made) -> Rejects:
    path = made.source / "shard.00000.mds"
    content = path.read_bytes()
    path.write_bytes(content[:4] + (1 << 31).to_bytes(4, "little") + content[8:])  # where the first sample begins
    (made.source / "shard.00002.mds").unlink()
    return {"shard.00000/0": UNREADABLE} | {key: MISSING for key in made.records if "00002" in key}


def break_mlperf(made: Made) -> Rejects:
    path = made.source / "data-00000-of-00002.arrow"
    with pa.OSFile(str(path)) as file:
        rows = pa.ipc.open_stream(file).read_all().to_pylist()
    rows[0]["mean"] = PICKLED
    rows[1]["t5_encodings"] = npy_of_bits(torch.full((6, 16), torch.nan, dtype=torch.bfloat16))
    rows[2]["clip_encodings"] = rows[2]["clip_encodings"][:-2]
    rows[3]["logvar"] = None
    rows[4]["t5_encodings"] = npy_of_bits(torch.zeros(5, 16, dtype=torch.bfloat16))
    rows[5]["__key__"] = rows[4]["__key__"] = "twice"  # a repeated key is told apart by its place
    renamed = {"000000004": "twice", "000000005": "twice@data-00000-of-00002/5"}
    records = {renamed.get(key, key): record for key, record in made.records.items()}
    made.records.clear()
    made.records.update(records)
    write_arrow(path, pa.Table.from_pylist(rows))
    return dict(zip(made.records, [UNREADABLE, NONFINITE, UNREADABLE, UNREADABLE, SHAPE], strict=False))


def write_arrow(path: Path, table: pa.Table) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)


def break_nemo(made: Made) -> Rejects:
    keys = list(made.records)
    paths = [made.source / f"{key}.pt" for key in keys]
    whole = torch.load(paths[4], weights_only=True)
    torch.save({"latent": Evil(made.source.parent / "mark")}, paths[0])
    cut(paths[1], -100)
    paths[2].unlink()
    with zipfile.ZipFile(paths[3], "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("archive/data.pkl", bytes(1 << 20))
    torch.save(whole | {"prompt_embeds": torch.full((1, 6, 16), torch.nan)}, paths[4])
    torch.save(whole | {"latent": torch.zeros(1).expand(16, 1 << 14, 1 << 14)}, paths[5])
    torch.save(whole | {"latent": torch.zeros(16, 8, 4)}, paths[6])
    listing = made.source / "metadata_shard_0001.json"
    listed = json.loads(listing.read_text())
    hostile = [{"cache_file": "/a/../b.pt", "prompt": "x"}, {"cache_file": 3}, 7, listed[-1]]
    hostile.append(listed[1] | {"prompt": " ", "cache_file": "/elsewhere/cache/64x64/unlisted.pt"})
    listing.write_text(json.dumps([*listed, *hostile]))
    broken = [UNREADABLE, UNREADABLE, MISSING, UNREADABLE, NONFINITE, UNREADABLE, SHAPE]
    lost = [f"metadata_shard_0001.json:{i}" for i in (5, 6, 7, 8)]
    return dict(zip(keys, broken, strict=False)) | dict.fromkeys([*lost, "64x64/unlisted"], METADATA)


BROKEN: dict[str, tuple[str, Callable[[Made], Rejects]]] = {
    "fast-dit": ("fast-dit", break_fast_dit),
    "fast-dit without features": ("fast-dit", lose_features),
    "mar": ("mar", break_mar),
    "mar's zip bomb": ("mar", unpack_to_more_than_it_claims),
    "lightningdit without labels": ("lightningdit", drop_labels_of_a_shard),
    "edm2": ("edm2", break_edm2),
    "edm2 without features": ("edm2", lose_features),
    "edm2's folder without features": ("edm2 folder", lose_features),
    "pixart": ("pixart", break_pixart),
    "pixart's shared caption": ("pixart", share_a_caption_file),
    "mds": ("mds", break_mds),
    "mlperf-flux": ("mlperf-flux", break_mlperf),
    "nemo": ("nemo", break_nemo),
}


@pytest.mark.parametrize(("kind", "damage"), BROKEN.values(), ids=BROKEN)
def test_what_is_broken_is_rejected_with_its_reason_and_the_rest_is_stored(
    kind: str, damage: Callable[[Made], Rejects], tmp_path: Path
) -> None:
    made = KINDS[kind](tmp_path / "source")
    wanted = damage(made)
    run_import(made, tmp_path / "store", "source.max_reject_share=1.0")
    store = LatentStore(tmp_path / "store")
    assert rejects(store) == wanted
    assert_holds(store, without(made, *wanted))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "store"]  # and nothing was unpickled


def test_too_many_rejects_stop_an_import_before_anything_is_written(tmp_path: Path) -> None:
    made = MAKERS["fast-dit"](tmp_path / "source")
    break_fast_dit(made)
    with pytest.raises(SourceError, match="3 records or captions in a row are rejected"):
        run_import(made, tmp_path / "store", "source.max_rejects_in_a_row=3")
    for path in (made.source / "imagenet256_features").iterdir():
        path.write_bytes(b"no array")
    with pytest.raises(SourceError, match="none of 11 records can be imported"):
        run_import(made, tmp_path / "store")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_links_to_nothing_fifos_and_folders_in_place_of_files_are_told_and_not_waited_for(
    make: Callable[[Path], Made], tmp_path: Path
) -> None:
    made = make(tmp_path / "whole" / "source")
    whole, copied, store = tmp_path / "whole", tmp_path / "copied", tmp_path / "store"
    for name in {path.suffix: path.relative_to(whole) for path in sorted(whole.rglob("*")) if path.is_file()}.values():
        for put in (lambda path: path.symlink_to("gone"), os.mkfifo, os.mkdir):
            shutil.copytree(whole, copied)
            (copied / name).unlink()
            put(copied / name)
            null = made.null and made.null.replace(str(whole), str(copied))
            odd = replace(made, source=copied / made.source.relative_to(whole), null=null)
            try:
                run_import(odd, store, "source.max_reject_share=1.0")
            except LeanditError:
                assert not store.exists(), name
            else:
                assert put is os.mkdir or rejects(LatentStore(store)), name  # a folder of any name is a folder
                shutil.rmtree(store)
            shutil.rmtree(copied)


# A source that is broken as a whole.


def write(name: str, content: str | None) -> Callable[[Made], None]:
    """Replace a file; None removes it."""

    def damage(made: Made) -> None:
        (made.source / name).unlink()
        if content is not None:
            (made.source / name).write_text(content)

    return damage


def change(name: str, before: str, after: str) -> Callable[[Made], None]:
    """Replace a text in a file."""

    def damage(made: Made) -> None:
        text = (made.source / name).read_text()
        assert before in text
        (made.source / name).write_text(text.replace(before, after))

    return damage


STATISTICS, SAFETENSORS = "latents_stats.pt", "latents_rank00_shard000.safetensors"
ARROW, INDEX, NEMO, DATASET = "data-00001-of-00002.arrow", "index.json", "metadata.json", "dataset.json"
NO_STATISTICS = r"latents_stats\.pt.*vae\.shift"
NO_ARROW = rf"'{ARROW}' cannot be read"
OUTSIDE = "does not stay below its folder"
REFUSED: list[tuple[str, Callable[[Made], Any], str]] = [
    # Unpickled, it would leave a mark.
    (
        "lightningdit",
        lambda made: torch.save(Evil(made.source.parent / "mark"), made.source / STATISTICS),
        NO_STATISTICS,
    ),
    ("lightningdit", lambda made: cut(made.source / SAFETENSORS, 5000), rf"'{SAFETENSORS}' cannot be read"),
    ("edm2 folder", write(DATASET, "["), DATASET),
    ("edm2 folder", write(DATASET, '{"labels": [1]}'), DATASET),
    ("edm2 folder", write(DATASET, '{"labels": [["a.npy", "cat"]]}'), DATASET),
    ("mds", change(INDEX, '"shard.00000.mds"', '"../shard.00000.mds"'), OUTSIDE),
    ("mds", change(INDEX, '"column_names": ["caption"', '"column_names": [5'), "not text"),
    ("mds", change(INDEX, '"zstd:3"', '"br:3"'), "compression 'br:3'"),
    ("mds", change(INDEX, '"format": "mds"', '"format": "jsonl"'), "expected mds"),
    ("mds", change(INDEX, '"bytes", "nd', '"pkl", "nd'), "pickled ones are refused"),
    ("mds", change(INDEX, '"latents_256"', '"other"'), r"layout\.latents"),
    ("mlperf-flux", lambda made: cut(made.source / ARROW, 5000), NO_ARROW),
    ("mlperf-flux", write(ARROW, "no Arrow stream at all"), NO_ARROW),
    (
        "mlperf-flux",
        lambda made: write_arrow(made.source / ARROW, pa.table({"__key__": ["x"]})),
        "no column '.*__key__",
    ),
    (
        "mlperf-flux",
        lambda made: np.save(made.source / "empty_encodings/t5_empty.npy", noise(0, 1, 5, 16)),
        r"t5_empty\.npy.*shape \(5, 16\).*shape \(6, 16\)",
    ),
    ("nemo", write(NEMO, None), r"'metadata\.json' cannot be read.*when all images are done"),
    ("nemo", write(NEMO, '{"model_type": "wan", "shards": []}'), "model_type 'wan'.*flux, flux2, qwen_image"),
    ("nemo", write(NEMO, '{"model_type": "flux", "shards": 3}'), "needs 'shards'"),
    ("nemo", write(NEMO, '{"model_type": "flux", "shards": ["../m.json"]}'), OUTSIDE),
    ("nemo", write("metadata_shard_0000.json", "{}"), "needs a list"),
]


@pytest.mark.parametrize(("kind", "damage", "match"), REFUSED)
def test_a_source_that_cannot_be_read_is_refused_and_nothing_is_written(
    kind: str, damage: Callable[[Made], Any], match: str, tmp_path: Path
) -> None:
    made = KINDS[kind](tmp_path / "source")
    damage(made)
    with pytest.raises(SourceError, match=match):
        run_import(made, tmp_path / "store")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("kind", "settings", "match"),
    [
        ("fast-dit", ["vae.scal=[1]"], "did you mean 'vae.scale'"),
        ("fast-dit", ["vae.scale=[0.0]"], "a scale of 0"),
        ("fast-dit", ["vae.scale=[1.0, 2.0]"], "has 2 numbers, the latents have 4 channels"),
        ("mlperf-flux", ["text.model=google/t5-v1_1-xxl"], r"2 text encoders: clip, t5.*Leave text\.model out"),
        ("flux2", [], r"a cache of 'flux2' lacks.*vae\.shift=\[running_mean"),
        ("mds without a scale", [], r"vae\.scale is unknown for this"),
    ],
)
def test_settings_that_cannot_be_are_refused(kind: str, settings: list[str], match: str, tmp_path: Path) -> None:
    made = KINDS[kind](tmp_path / "source")
    with pytest.raises((RecipeError, SourceError), match=match):
        run_import(made, tmp_path / "store", *settings)
    assert not (tmp_path / "store").exists()


NULLS: dict[str, tuple[Any, str]] = {
    "none": (None, r"replaces some by a null caption of shape \(12, 16\).*--null"),
    "short": (noise(0, 5, 16), r"shape \(5, 16\); expected finite numbers of shape \(12, 16\)"),
    "evil": (Evil, "objects other than tensors"),
    "a tensor": (torch.zeros(12, 16), "0 tensors whose name ends in 'y_embedding'"),
}


@pytest.mark.parametrize(("content", "match"), NULLS.values(), ids=NULLS)
def test_what_is_no_null_caption_is_refused_and_never_unpickled(content: Any, match: str, tmp_path: Path) -> None:
    path, mark = tmp_path / ("null.npy" if isinstance(content, np.ndarray) else "null.pth"), tmp_path / "mark"
    if isinstance(content, np.ndarray):
        np.save(path, content)
    else:
        torch.save({"y_embedding": Evil(mark)} if content is Evil else content, path)
    made = replace(MAKERS["pixart"](tmp_path / "source"), null=None if content is None else str(path))
    with pytest.raises(SourceError, match=match):
        run_import(made, tmp_path / "store")
    assert not mark.exists()
    assert not (tmp_path / "store").exists()


# Arrays, and what the machine lacks.


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x93NUMPY\x03\x00" + b"\0" * 100,
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }", b"\0" * 64),
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 16), }", b"\0" * 64),
        PICKLED,
        npy("{'descr': [('a', '|O')], 'fortran_order': False, 'shape': (1,), }", b"cos\nsystem\n"),
        npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1,), }", b"\0" * 8),
        npy("__import__('os').system('true')"),
        npy("(" * 5000),
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (4,), }", b"\0" * 17),
    ],
    ids=range(10),
)
def test_a_hostile_array_is_refused_before_memory_is_asked_for(content: bytes) -> None:
    with pytest.raises((ValueError, EOFError, MemoryError, RecursionError)) as caught:
        parse_npy(content)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(("order", "dtype"), [("C", ">f4"), ("F", "<f2"), ("F", "<i8")])
def test_arrays_are_read_as_numpy_reads_them(order: Any, dtype: str) -> None:
    array, stream = np.asarray(100 * noise(1, 2, 3, 4), dtype, order=order), io.BytesIO()
    np.save(stream, array)
    found = parse_npy(stream.getvalue())
    assert found.dtype == array.dtype.newbyteorder("=")
    np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError(errno.EMFILE, "Too many open files"), ResourceError),
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
    def full(prefix: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(mds.tempfile, "NamedTemporaryFile", full)
    with pytest.raises(ResourceError, match="TMPDIR"):
        run_import(MAKERS["mds"](tmp_path / "source"), tmp_path / "store")
