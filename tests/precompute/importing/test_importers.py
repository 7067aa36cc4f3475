"""Imported features: every number of the source is in the store, it trains, resumes, and says what it refused."""

from __future__ import annotations

import hashlib
import inspect
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLQwenImage
from features import (
    COUNT,
    MAKERS,
    SIDE,
    Made,
    assert_has_null,
    assert_holds,
    imported,
    make_edm2,
    make_fast_dit,
    make_lightningdit,
    make_mds,
    make_mlperf_flux,
    make_nemo,
    make_pixart,
    noise,
    rejects,
    run_import,
    without,
)
from making import CPU, Leandit, store_digest, train_recipe, tree_digest
from safetensors.torch import save_file
from stores import checked

from leandit.datasets.batches.latents import denormalise, final_latents
from leandit.datasets.disk import files
from leandit.datasets.disk.files import Failpoint
from leandit.datasets.maintenance.verify import verify_store
from leandit.datasets.revisions.plan import read_plan
from leandit.datasets.store import LatentStore
from leandit.errors import FingerprintMismatch, RecipeError, ResourceError, SourceError
from leandit.precompute.config import load as load_precompute
from leandit.tools.export.compact import compact
from leandit.tools.inspection.store_facts import StoreFacts
from leandit.tools.inspection.store_text import render
from leandit.train.loop import train
from leandit.train.parallel.stop import StopRequest

pytestmark = pytest.mark.usefixtures("tiny_models")


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A source of one kind, imported into ``store_of`` it; do not change either."""
    return imported(tmp_path_factory.mktemp(request.param), MAKERS[request.param])[0]


def store_of(made: Made) -> Path:
    return (made.source if made.source.is_dir() else made.source.parent).parent / "store"


every_kind = pytest.mark.parametrize("made", list(MAKERS), indirect=True)


@every_kind
def test_every_number_of_the_source_is_in_the_store(made: Made, tmp_path: Path) -> None:
    store = LatentStore(store_of(made))
    assert_holds(store, made.records)
    assert_has_null(store, made)
    assert (store.spec.vae.class_name, store.spec.vae.weights_sha256) == (f"imported:{made.kind}", "unknown")
    spec = SPECS.get(made.kind, {})
    assert {name: getattr(store.spec.latent, name) for name in spec} == spec
    found = verify_store(store.path)
    assert (found.complete, found.damaged) == (True, False)
    again = run_import(made, store.path)
    assert (again.num_imported, again.manifest) == (0, store.manifest)
    run_import(made, tmp_path / "narrow", "store.dtype=float16")
    assert_holds(LatentStore(tmp_path / "narrow"), made.records, "float16")
    compact(store.path, tmp_path / "new", progress=lambda *_: None)
    assert_holds(LatentStore(tmp_path / "new"), made.records)


# As each program normalizes its latents.
SPECS: dict[str, dict[str, Any]] = {
    "mar": {"kind": "mean_logvar", "downscale": 16, "flip": True, "scale": [0.2325] * 16, "shift": [0.0] * 16},
    "edm2": {"kind": "mean_std"},
    "pixart": {"kind": "mean_std", "scale": [0.13025] * 4, "dtype": "float16"},
    "mlperf-flux": {"kind": "mean_logvar", "dtype": "float32", "shift": [0.1159] * 16, "scale": [0.3611] * 16},
}
GOLDEN = {
    "fast-dit": "2392665a5c5d17ca",
    "mar": "1ac510e1fc5ccc43",
    "lightningdit": "e477dcc963292a4a",
    "edm2": "8873d376f20b82d0",
    "pixart": "ac32921312a367ea",
    "mds": "4eb4245266b5ba41",
    "mlperf-flux": "95944c4c41885333",
    "nemo": "657b632278aae737",
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


@pytest.mark.parametrize("made", ["lightningdit", "mds"], indirect=True)
def test_an_imported_store_trains(made: Made, tmp_path: Path) -> None:
    name = "pixart-tiny" if made.null_rows is not None else "dit-s-4"
    recipe = train_recipe(name, "model.channels=0", "run.steps=2", "run.global_batch=4", "run.checkpoint_every=2")
    how: dict[str, Any] = {"device": CPU, "report": print, "stop": StopRequest()}
    outcome = train(recipe, store_path=store_of(made), run=tmp_path / "run", **how)
    assert outcome.step == 2
    assert np.isfinite(outcome.losses).all()


@pytest.mark.parametrize("made", ["mar", "pixart"], indirect=True)
def test_an_import_that_fails_anywhere_resumes_to_the_same_bytes(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leandit.datasets.format.row_layout.MAX_SHARD_ROWS", 2)
    monkeypatch.setattr(files, "failpoint", Failpoint())
    whole = run_import(made, tmp_path / "whole").manifest
    num_steps = len(files.failpoint.seen)
    assert num_steps > 50
    resumed = 0
    for at in range(3, num_steps, num_steps // 4):
        store = tmp_path / f"store-{at}"
        monkeypatch.setattr(files, "failpoint", Failpoint("eio", at))
        with pytest.raises(ResourceError, match="Input/output error"):
            run_import(made, store)
        monkeypatch.setattr(files, "failpoint", None)
        report = run_import(made, store)
        resumed += report.num_imported < COUNT
        assert report.manifest == whole
        assert store_digest(store) == store_digest(tmp_path / "whole")
    assert resumed  # how often depends on the writer threads; the last of the steps is after the last commit


def test_other_settings_another_source_and_an_encoded_store_are_refused(
    tmp_path: Path, label_store: LatentStore
) -> None:
    made = imported(tmp_path, make_fast_dit)[0]
    before = tree_digest(tmp_path / "store")
    with pytest.raises(FingerprintMismatch, match=r"store\.dtype was 'source', is 'float16'"):
        run_import(made, tmp_path / "store", "store.dtype=float16")
    with pytest.raises(FingerprintMismatch, match="encoded, not imported"):
        run_import(made, label_store.path)
    np.save(tmp_path / "source/imagenet256_features/11.npy", noise(11, 1, 4, SIDE, SIDE))
    with pytest.raises(SourceError, match="lists different files"):
        run_import(made, tmp_path / "store")
    assert tree_digest(tmp_path / "store") == before


@every_kind
def test_a_damaged_shard_is_read_again_from_the_features(made: Made, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(store_of(made), store)
    before = tree_digest(store)
    for name in [name for name in before if "/c/" in name and "/null" not in name]:
        (store / name).write_bytes(before[name][:50] + bytes([before[name][50] ^ 1]) + before[name][51:])
    assert checked(store)[0].damaged
    assert not checked(store, made.source, repair=True)[0].damaged
    assert tree_digest(store) == before
    with pytest.raises(RecipeError, match="was imported, so nothing can encode it again"):
        checked(store, made.source, deep=True)


def test_latents_are_normalised_as_their_programs_do(tmp_path: Path) -> None:
    made, store = imported(tmp_path / "lightningdit", make_lightningdit, "vae.multiplier=0.5", dtype=torch.float16)
    assert store.spec.latent.dtype == "float16"
    assert_holds(store, made.records, "float16")
    rows, statistics = torch.from_numpy(noise(3, 2, 32, SIDE, SIDE)), made.source / "latents_stats.pt"
    numbers = torch.load(statistics, weights_only=True)
    found = final_latents(rows, store.spec.latent, None)
    np.testing.assert_allclose(found, (rows - numbers["mean"]) / numbers["std"] * 0.5, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(denormalise(found, store.spec.latent), rows, rtol=1e-5, atol=1e-5)
    statistics.unlink()
    run_import(made, tmp_path / "given", "vae.shift=[0.0]", "vae.scale=[1.0]")

    spec = imported(tmp_path / "edm2", make_edm2)[1].spec  # whitened latents of images from 0 to 1
    mean, std = torch.tensor([5.81, 3.25, 0.12, -2.15]), torch.tensor([4.17, 4.62, 3.71, 3.28])
    moments = torch.cat([torch.ones(1, 4, 2, 2), torch.zeros(1, 4, 2, 2)], dim=1)
    found = final_latents(moments, spec.latent, torch.tensor([1]))
    np.testing.assert_allclose(found[0, :, 0, 0], (1 - mean) / std * 0.5, rtol=1e-5)
    np.testing.assert_allclose(denormalise(found, spec.latent), torch.ones(1, 4, 2, 2), rtol=1e-5)
    assert (spec.latent.decoding.zero_to_one, spec.vae.config["zero_to_one"]) == (True, True)

    latent = imported(tmp_path / "mds", make_mds)[1].spec.latent  # normalized already, by the scale of the command
    rows = torch.from_numpy(noise(3, 2, 4, SIDE, SIDE))
    np.testing.assert_array_equal(final_latents(rows, latent, None), rows)
    np.testing.assert_allclose(denormalise(rows, latent), rows / 0.13025, rtol=1e-6)


def test_an_unpacked_zip_gives_the_same_rows_and_without_labels_there_are_no_classes(tmp_path: Path) -> None:
    for name, folder in (("zip", False), ("folder", True)):
        made, store = imported(tmp_path / name, make_edm2, folder=folder)
        assert_holds(store, made.records)
    (tmp_path / "folder/source/dataset.json").write_text('{"labels": null}')
    run_import(made, tmp_path / "unlabelled")
    store = LatentStore(tmp_path / "unlabelled")
    assert (store.spec.classes, {*store.records["label"].to_pylist()}) == (None, {-1})


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


def test_a_caption_that_breaks_after_planning_stops_the_import_and_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_pixart(tmp_path / "source")
    monkeypatch.setattr(files, "failpoint", Failpoint())
    whole = run_import(made, tmp_path / "whole").manifest
    planned = files.failpoint.seen.index("rename plan")
    monkeypatch.setattr(files, "failpoint", Failpoint("eio", planned + 5))
    with pytest.raises(ResourceError, match="Input/output error"):
        run_import(made, tmp_path / "store")
    monkeypatch.setattr(files, "failpoint", None)
    path = made.source / "InternData/caption_features_new/set0_00000.npz"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(SourceError, match=r"record 'set0/00000\.png': its caption cannot be read"):
        run_import(made, tmp_path / "store")
    path.write_bytes(content)
    assert run_import(made, tmp_path / "store").manifest == whole


def test_the_command_imports_and_says_what_it_did(tmp_path: Path, leandit: Leandit) -> None:
    where = "--source", make_fast_dit(tmp_path / "source").source, "--store", tmp_path / "store"
    done, again, other = (leandit("import", kind, *where) for kind in ("fast-dit", "fast-dit", "slow-dit"))
    assert (done.code, again.code, other.code) == (0, 0, 2)
    assert "11 planned = 11 stored + 0 rejected" in done.out
    assert "nothing to copy, the store was already complete" in again.out
    assert "import 'slow-dit': no such kind of features. Expected one of fast-dit" in other.err


def test_the_set_of_mlperf_becomes_a_store_like_that_of_the_flux_recipe(tmp_path: Path) -> None:
    store, recipe = imported(tmp_path, make_mlperf_flux)[1], load_precompute("flux1-1024", [])
    assert store.texts == list(recipe.text)
    for one in store.spec.text_encoders:
        section, spec = recipe.text[one.name], one.spec
        said = (section.output, section.full_length, section.attend_padding)
        assert (spec.output, spec.full_length, spec.attend_padding) == said
        assert (spec.kind, spec.dtype) == ("imported", "bfloat16")
    assert (store.text("t5").spec.max_tokens, store.text("clip").spec.max_tokens) == (6, 77)
    assert store.captions.num_rows == 7  # the others have the same embeddings
    rendered = render(StoreFacts(store))
    assert "distinct captions   7, 7 tokens" in rendered
    assert "clip encoder        imported:mlperf-flux 'openai/clip-vit-large-patch14'" in rendered
    assert "captions t5         tokens, 16 wide, stored as bfloat16, all 6 tokens" in rendered


def test_captions_of_mlperf_are_named_by_a_column_or_by_their_record(tmp_path: Path) -> None:
    texts = [f"an image of {i % 5} things" for i in range(COUNT - 1)]
    columns, settings = {"txt": [*texts, None], "timestep": [0] * COUNT}, ("layout.text=txt", "store.text_dtype=int8")
    made, store = imported(tmp_path, make_mlperf_flux, *settings, "source.max_reject_share=1", columns=columns)
    assert (store.text("t5").spec.dtype, store.text("clip").pooled.dtype) == ("int8", "float16")
    captions = store.captions.to_pylist()
    assert all(0.999 < row["min_cosine_t5"] <= 1 and 0 < row["max_error_t5"] < 0.05 for row in captions)
    assert store.captions["text"].to_pylist() == list(dict.fromkeys(texts))
    assert rejects(store) == {f"{COUNT - 1:09d}": ("scan", "no_caption")}
    run_import(made, tmp_path / "unread", "text.check=mask")
    assert LatentStore(tmp_path / "unread").captions["text"].to_pylist() == [
        f"caption of {i:09d}" for i in range(COUNT)
    ]


@pytest.mark.parametrize(("model", "recipe"), [("flux", "flux1-1024"), ("qwen_image", "qwen-image-1024")])
def test_a_cache_of_nemo_becomes_a_store_like_that_of_the_recipe(model: str, recipe: str, tmp_path: Path) -> None:
    (made, store), texts = imported(tmp_path, make_nemo, model=model), load_precompute(recipe, []).text
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


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16])
@pytest.mark.parametrize("with_batch", [True, False])
def test_padding_of_a_nemo_cache_is_left_out_by_its_mask(dtype: torch.dtype, with_batch: bool, tmp_path: Path) -> None:
    """Qwen-Image reads no padding, here of noise; a mask of None and no mask at all say that there is none."""
    made = make_nemo(tmp_path / "source", "qwen_image")
    keys = list(made.records)
    for number, key in enumerate(keys):
        path = made.source / f"{key}.pt"
        content = torch.load(path, weights_only=True)
        tokens = content["prompt_embeds"]
        if number == 1:
            content["prompt_embeds_mask"] = None
        elif number > 1:
            padding = torch.full((1, 12 - tokens.shape[1], tokens.shape[2]), 9, dtype=tokens.dtype)
            content["prompt_embeds"] = torch.cat([tokens, padding], dim=1)
            mask = (torch.arange(12) < tokens.shape[1]).to(dtype)[None]
            content["prompt_embeds_mask"] = mask if with_batch else mask[0]
        torch.save(content, path)
    run_import(made, tmp_path / "store")
    assert_holds(LatentStore(tmp_path / "store"), made.records)


def test_the_padding_that_flux_reads_stays(tmp_path: Path) -> None:
    made = make_nemo(tmp_path / "source")
    for key in made.records:
        path = made.source / f"{key}.pt"
        mask = (torch.arange(6) < 2).long()[None]
        torch.save(torch.load(path, weights_only=True) | {"prompt_embeds_mask": mask}, path)
    run_import(made, tmp_path / "store")
    assert_holds(LatentStore(tmp_path / "store"), made.records)


def test_masks_of_a_nemo_cache_that_fit_no_caption_reject_it(tmp_path: Path) -> None:
    made = make_nemo(tmp_path / "source", "qwen_image")
    keys = list(made.records)
    masks: list[Any] = [torch.ones(1, 99), torch.zeros(1, 2), "text"]
    for key, mask in zip(keys, masks, strict=False):
        path = made.source / f"{key}.pt"
        content = torch.load(path, weights_only=True)
        if isinstance(mask, torch.Tensor) and mask.shape[1] == 2:
            mask = torch.zeros(content["prompt_embeds"].shape[:2])
        torch.save(content | {"prompt_embeds_mask": mask}, path)
    run_import(made, tmp_path / "store")
    store = LatentStore(tmp_path / "store")
    reasons = ["wrong_shape", "no_caption", "unreadable"]
    assert {key: reason for key, (_, reason) in rejects(store).items()} == dict(zip(keys, reasons, strict=False))
    assert_holds(store, without(made, *keys[:3]))


@pytest.mark.parametrize("model", ["flux", "qwen_image"])
def test_a_nemo_cache_may_list_crop_resolutions(model: str, tmp_path: Path) -> None:
    made = make_nemo(tmp_path / "source", model)
    for listing in made.source.glob("metadata_shard_*.json"):
        items = json.loads(listing.read_text())
        renamed = [{key.replace("bucket_res", "crop_res"): value for key, value in item.items()} for item in items]
        listing.write_text(json.dumps(renamed))
    run_import(made, tmp_path / "store")
    store = LatentStore(tmp_path / "store")
    assert_holds(store, made.records)
    assert store.buckets == {"64x64": 4, "32x96": 4, "96x32": 3}


def test_a_cache_of_flux_2_has_the_batch_norm_of_the_command(tmp_path: Path) -> None:
    shift, scale = [i / 128 for i in range(128)], [1 + i / 128 for i in range(128)]
    made, store = imported(tmp_path, make_nemo, f"vae.shift={shift}", f"vae.scale={scale}", model="flux2")
    assert_holds(store, made.records)
    latent = store.spec.latent
    assert (latent.kind, latent.channels, latent.downscale, latent.patchify) == ("mean", 128, 16, 2)
    assert (latent.decoding.shift, latent.decoding.scale) == (shift, scale)
