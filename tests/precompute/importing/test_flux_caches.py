"""Imports of caches for Flux and its like: MLPerf's set, and NeMo AutoModel's files."""

from __future__ import annotations

import inspect
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from diffusers import AutoencoderKLQwenImage
from features import (
    COUNT,
    SIDE,
    Evil,
    assert_holds,
    make_mlperf_flux,
    make_nemo,
    noise,
    npy_of_bits,
    rejects,
    run_import,
    without,
)
from making import CPU, no_progress, tree_digest

from leandit.datasets.batches.latents import denormalise, final_latents
from leandit.datasets.errors import SourceError
from leandit.datasets.store import LatentStore
from leandit.precompute.config import load as load_precompute
from leandit.tools.inspection.store_facts import StoreFacts
from leandit.tools.inspection.store_text import render
from leandit.tools.inspection.verify import check

# MLPerf's set for Flux.1.


def test_the_set_of_mlperf_becomes_a_store_like_that_of_the_flux_recipe(tmp_path: Path) -> None:
    made = make_mlperf_flux(tmp_path / "source")
    run_import(made, tmp_path / "store")
    store = LatentStore(tmp_path / "store")
    latent, recipe = store.spec.latent, load_precompute("flux1-1024", [])
    assert (latent.kind, latent.channels, latent.dtype, latent.downscale) == ("mean_logvar", 16, "float32", 8)
    assert (latent.shift, latent.scale) == ([0.1159] * 16, [0.3611] * 16)
    assert store.texts == list(recipe.texts)
    for one in store.spec.text_encoders:
        section, spec = recipe.texts[one.name], one.spec
        said = (section.output, section.full_length, section.attend_padding)
        assert (spec.output, spec.full_length, spec.attend_padding) == said
        assert (spec.kind, spec.dtype) == ("imported", "bfloat16")
    assert (store.text("t5").spec.max_tokens, store.text("clip").spec.max_tokens) == (6, 77)
    assert store.captions.num_rows == 7  # the others have the same embeddings
    rendered = render(StoreFacts(store))
    assert "distinct captions   7, 7 tokens" in rendered
    assert "clip encoder        imported:mlperf-flux 'openai/clip-vit-large-patch14'" in rendered
    assert "captions t5         tokens, 16 wide, stored as bfloat16, all 6 tokens" in rendered


def test_captions_of_mlperf_may_be_stored_in_eight_bits_with_their_quality(tmp_path: Path) -> None:
    made = make_mlperf_flux(tmp_path / "source")
    run_import(made, tmp_path / "store", "store.text_dtype=int8", "store.dtype=float16")
    store = LatentStore(tmp_path / "store")
    assert (store.spec.latent.dtype, store.text("t5").spec.dtype, store.text("clip").pooled.dtype) == (
        "float16",
        "int8",
        "float16",
    )
    captions = store.captions.to_pylist()
    assert all(0.999 < row["min_cosine_t5"] <= 1 and 0 < row["max_error_t5"] < 0.05 for row in captions)
    (embeddings,) = next(iter(made.records.values())).captions.values()
    assert isinstance(embeddings, dict)
    first = store.record("000000000").caption_ids[0]
    np.testing.assert_allclose(store.caption_embedding(first, "t5"), embeddings["t5"], atol=0.05)
    before = tree_digest(tmp_path / "store")
    for name in [name for name in before if name.startswith("captions/") and "/c/" in name and "null" not in name]:
        (tmp_path / "store" / name).write_bytes(before[name][:9] + bytes([before[name][9] ^ 1]) + before[name][10:])
    options: Any = {"quick": False, "device": lambda: CPU, "overrides": [], "progress": no_progress}
    mended, _ = check(tmp_path / "store", deep=False, repair=True, source=made.source, **options)
    assert not mended.damaged
    assert tree_digest(tmp_path / "store") == before


def test_captions_of_mlperf_are_named_by_a_column_or_by_their_record(tmp_path: Path) -> None:
    texts = [f"a picture of {i % 5} things" for i in range(COUNT - 1)]
    made = make_mlperf_flux(tmp_path / "source", columns={"txt": [*texts, None], "timestep": [0] * COUNT})
    run_import(made, tmp_path / "store", "layout.text=txt", "source.max_reject_share=1.0")
    store = LatentStore(tmp_path / "store")
    assert store.captions["text"].to_pylist() == list(dict.fromkeys(texts))
    assert rejects(store) == {f"{COUNT - 1:09d}": ("scan", "no_caption")}
    run_import(made, tmp_path / "unread", "text.check=mask")
    assert LatentStore(tmp_path / "unread").captions["text"].to_pylist() == [
        f"caption of {i:09d}" for i in range(COUNT)
    ]


def test_broken_cells_of_mlperf_are_rejected_and_repeated_keys_are_kept_apart(tmp_path: Path) -> None:
    whole = make_mlperf_flux(tmp_path / "whole")
    stream = io.BytesIO()
    np.save(stream, np.array([{"a": 1}], object), allow_pickle=True)
    nan = npy_of_bits(torch.full((6, 16), torch.nan, dtype=torch.bfloat16))
    with pa.OSFile(str(whole.source / "data-00000-of-00002.arrow")) as file:
        rows = pa.ipc.open_stream(file).read_all().to_pylist()
    rows[0]["mean"] = stream.getvalue()
    rows[1]["t5_encodings"] = nan
    rows[2]["clip_encodings"] = rows[2]["clip_encodings"][:-2]
    rows[3]["logvar"] = None
    rows[4]["t5_encodings"] = npy_of_bits(torch.zeros(5, 16, dtype=torch.bfloat16))
    rows[5]["__key__"] = rows[4]["__key__"] = "twice"
    table = pa.Table.from_pylist(rows)
    path = str(whole.source / "data-00000-of-00002.arrow")
    with pa.OSFile(path, "wb") as file, pa.ipc.new_stream(file, table.schema) as written:
        written.write_table(table)
    run_import(whole, tmp_path / "store", "source.max_reject_share=1.0")
    store, unreadable = LatentStore(tmp_path / "store"), ("scan", "unreadable")
    keys = [f"{i:09d}" for i in range(4)]
    wanted = dict(zip(keys, [unreadable, ("scan", "nonfinite"), unreadable, unreadable], strict=True))
    assert rejects(store) == wanted | {"twice": ("scan", "wrong_shape")}
    assert store.record("twice@data-00000-of-00002/5").status == "stored"


@pytest.mark.parametrize("broken", ["truncated", "other", "column", "state", "null"])
def test_a_set_of_mlperf_that_cannot_be_read_is_refused_by_name(broken: str, tmp_path: Path) -> None:
    made = make_mlperf_flux(tmp_path / "source")
    path, match = made.source / "data-00001-of-00002.arrow", r"file 'data-00001-of-00002\.arrow' cannot be read"
    if broken == "truncated":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif broken == "other":
        path.write_bytes(b"no Arrow stream at all")
    elif broken == "column":
        with pa.OSFile(str(path)) as file:
            table = pa.ipc.open_stream(file).read_all().drop_columns(["logvar"])
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
        match = "no column 'logvar' among __key__"
    elif broken == "state":
        (made.source / "state.json").unlink()
        match = r"state\.json.*missing"
    else:
        np.save(made.source / "empty_encodings/t5_empty.npy", noise(0, 1, 5, 16))
        match = r"t5_empty\.npy.*shape \(5, 16\).*shape \(6, 16\)"
    with pytest.raises(SourceError, match=match):
        run_import(made, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_one_name_for_several_text_encoders_is_refused(tmp_path: Path) -> None:
    made = make_mlperf_flux(tmp_path / "source")
    with pytest.raises(SourceError, match=r"these features have 2 text encoders: clip, t5.*Leave text\.model out"):
        run_import(made, tmp_path / "store", "text.model=google/t5-v1_1-xxl")


# NeMo AutoModel.


@pytest.mark.parametrize(("model", "recipe"), [("flux", "flux1-1024"), ("qwen_image", "qwen-image-1024")])
def test_a_cache_of_nemo_becomes_a_store_like_that_of_the_recipe(model: str, recipe: str, tmp_path: Path) -> None:
    made, texts = make_nemo(tmp_path / "source", model), load_precompute(recipe, []).text_sections
    run_import(made, tmp_path / "store")
    store = LatentStore(tmp_path / "store")
    assert_holds(store, made.records)
    assert store.buckets == {"64x64": 4, "32x96": 4, "96x32": 3}
    latent = store.spec.latent
    assert (latent.kind, latent.channels, latent.downscale, latent.dtype) == ("sample", 16, 8, "float16")
    assert store.spec.vae.model == "someone/a-model"
    assert store.texts == list(texts)
    for one in store.spec.text_encoders:
        said = (texts[one.name].output, texts[one.name].full_length, texts[one.name].attend_padding)
        assert (one.spec.output, one.spec.full_length, one.spec.attend_padding) == said
        assert one.spec.dtype == "bfloat16"
    rows = torch.from_numpy(noise(3, 2, 16, SIDE, SIDE))
    np.testing.assert_array_equal(final_latents(rows, latent, None), rows)
    vae = AutoencoderKLQwenImage if model == "qwen_image" else None
    defaults = inspect.signature(vae).parameters if vae else {}
    shift = torch.tensor(defaults["latents_mean"].default if vae else [0.1159] * 16)[:, None, None]
    std = torch.tensor(defaults["latents_std"].default if vae else [1 / 0.3611] * 16)[:, None, None]
    np.testing.assert_allclose(denormalise(rows, latent), rows * std + shift, rtol=1e-5, atol=1e-6)


def test_a_cache_of_flux_2_needs_the_batch_norm_of_its_vae(tmp_path: Path) -> None:
    made = make_nemo(tmp_path / "source", "flux2")
    with pytest.raises(SourceError, match=r"a cache of 'flux2' lacks.*vae\.shift=\[running_mean"):
        run_import(made, tmp_path / "store")
    shift, scale = [i / 128 for i in range(128)], [1 + i / 128 for i in range(128)]
    run_import(made, tmp_path / "store", f"vae.shift={shift}", f"vae.scale={scale}")
    store = LatentStore(tmp_path / "store")
    assert_holds(store, made.records)
    latent = store.spec.latent
    assert (latent.kind, latent.channels, latent.downscale, latent.patchify) == ("mean", 128, 16, 2)
    assert latent.decoding
    assert (latent.decoding.shift, latent.decoding.scale) == (shift, scale)


def test_broken_files_of_nemo_are_rejected_and_never_unpickled(tmp_path: Path) -> None:
    made = make_nemo(tmp_path / "source")
    keys = list(made.records)
    paths = [made.source / f"{key}.pt" for key in keys]
    whole = torch.load(paths[4], weights_only=True)
    torch.save({"latent": Evil(tmp_path / "mark")}, paths[0])
    paths[1].write_bytes(paths[1].read_bytes()[:-100])
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
    run_import(made, tmp_path / "store", "source.max_reject_share=1.0")
    unreadable, metadata = ("scan", "unreadable"), ("scan", "bad_metadata")
    found = [unreadable, unreadable, ("scan", "missing_file"), unreadable, ("scan", "nonfinite"), unreadable]
    wanted = dict(zip(keys, [*found, ("scan", "wrong_shape")], strict=False))
    lost = [f"metadata_shard_0001.json:{i}" for i in (5, 6, 7, 8)]
    store = LatentStore(tmp_path / "store")
    assert rejects(store) == wanted | dict.fromkeys([*lost, "64x64/unlisted"], metadata)
    assert_holds(store, without(made, *wanted))
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("metadata.json", None, r"'metadata\.json' cannot be read.*when all images are done"),
        ("metadata.json", "[", r"'metadata\.json' cannot be read"),
        ("metadata.json", '{"model_type": "wan", "shards": []}', "model_type 'wan'.*flux, flux2, qwen_image"),
        ("metadata.json", '{"model_type": "flux", "shards": 3}', "needs 'shards'"),
        ("metadata.json", '{"model_type": "flux", "shards": ["../m.json"]}', "does not stay below its folder"),
        ("metadata_shard_0000.json", "{}", "needs a list"),
        ("metadata_shard_0001.json", None, r"'metadata_shard_0001\.json' cannot be read"),
    ],
)
def test_a_listing_of_nemo_that_cannot_be_is_refused(
    name: str, content: str | None, match: str, tmp_path: Path
) -> None:
    made = make_nemo(tmp_path / "source")
    (made.source / name).unlink()
    if content is not None:
        (made.source / name).write_text(content)
    with pytest.raises(SourceError, match=match):
        run_import(made, tmp_path / "store")
    assert not (tmp_path / "store").exists()
