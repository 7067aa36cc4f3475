"""Editing: a companion of the store is the image that a model sees beside the noisy one."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from making import COMPANIONS, CPU, caption_recipe, make_companion_folder, no_progress, shrink_models, train_recipe
from PIL import Image
from runs import bits, run_to
from safetensors.torch import load_file
from stores import small_shards

from leandit.datasets.batches.latents import denormalise, mean_latents
from leandit.datasets.format.buckets import bucket_size
from leandit.datasets.store import LatentStore
from leandit.errors import DamageError, LeanditError, RecipeError, RunError, SourceError
from leandit.precompute.pipeline import precompute
from leandit.tools.plan.workload import workload_of_stores
from leandit.tools.sample.request import SampleRequest
from leandit.tools.sample.sample import sample_grid, sample_set
from leandit.tools.sample.sampler import open_sampler
from leandit.train.metrics.flops import latent_size_of
from leandit.train.run.evaluation.decoding import Decoding
from leandit.train.run.evaluation.grids import choose_subjects
from leandit.train.run.evaluation.held_out import Evaluation
from leandit.train.run.state import Run
from leandit.train.sampling.guided import Solver, draw_latents
from leandit.train.sampling.snapshot import load_snapshot
from leandit.train.step import prepare

pytestmark = pytest.mark.usefixtures("tiny_models")
EDITS = ("model.reference=edit", "schedule.kind=constant", "run.steps=2", "run.checkpoint_every=1")
EDITS += ("data.holdout=0.3", "run.evaluate_every=1")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> LatentStore:
    root = tmp_path_factory.mktemp("edits")
    source = make_companion_folder(root / "source")
    with small_shards():
        recipe = caption_recipe("vae.flip=true", *COMPANIONS)
        precompute(recipe, source_path=source, store_path=root / "store", device=CPU, progress=no_progress)
    return LatentStore(root / "store")


def go(store: LatentStore, run: Path, *settings: str) -> Path:
    run_to(train_recipe("qwen-image-tiny", *EDITS, *settings), store, run)
    return run


def test_a_run_reads_the_companion_resumes_and_draws_with_it(store: LatentStore, tmp_path: Path) -> None:
    run = Run.open(train_recipe("qwen-image-tiny", *EDITS), [store], CPU, print)
    for _, batch in zip(range(4), run.loader, strict=False):
        images = prepare(run, batch, 1)
        reference = images.conditioning.reference
        assert torch.equal(reference, batch.companions["edit"])
        assert reference.shape == images.latents.shape
    assert Evaluation(run, print).evaluate().loss is not None
    go(store, tmp_path / "parts", "run.steps=1")
    for name in ("parts", "whole"):
        go(store, tmp_path / name)
    assert bits(tmp_path / "parts", 2) == bits(tmp_path / "whole", 2)
    snapshot = load_snapshot(tmp_path / "whole", CPU)
    assert snapshot.spec.reference == "edit"
    how: Any = {"size": tuple(reference.shape[2:]), "seed": 0, "solver": Solver(steps=2)}  # pyright: ignore
    other = images.conditioning._replace(reference=reference + 1)
    assert not torch.equal(draw_latents(snapshot, images.conditioning, **how), draw_latents(snapshot, other, **how))


@pytest.fixture(scope="module")
def edited(store: LatentStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that draws its grids while it trains."""
    with pytest.MonkeyPatch.context() as patch:
        shrink_models(patch)
        draws = ("run.sample_every=2", "run.sample_count=2", "run.sample_steps=2")
        return go(store, tmp_path_factory.mktemp("run") / "edited", *draws)


def test_a_grid_while_training_shows_held_out_images_beside_their_edits(
    store: LatentStore, edited: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.open(train_recipe("qwen-image-tiny", *EDITS), [store], CPU, print)
    subjects = choose_subjects(run, 2)
    held_out = run.loader.reader.order.plans[0].selection.held_out
    (bucket,) = {
        name for name in store.buckets if latent_size_of(name, store.spec.latent) == subjects.reference.shape[2:]
    }
    records = store.index(bucket).records[held_out[bucket]]
    captions = {store.captions["text"][store.record_at(int(each)).caption_ids[0]].as_py() for each in records}
    assert set(subjects.names) <= captions
    with Image.open(edited / "samples/step-2.png") as grid:
        assert grid.width > grid.height  # two frames for each image
    # The image that is edited is the companion as it is stored.
    snapshot = load_snapshot(edited, CPU)
    given = subjects.conditioning(snapshot.conditioner, CPU)
    size = subjects.reference.shape[2], subjects.reference.shape[3]
    wanted = draw_latents(snapshot, given, size=size, seed=0, solver=Solver(steps=2, guidance=4.0))
    monkeypatch.setattr(Decoding, "start", lambda _: None)
    kept = go(store, tmp_path / "kept", "run.sample_every=2", "run.sample_count=2", "run.sample_steps=2")
    file = load_file(kept / "samples/step-2.safetensors")
    torch.testing.assert_close(file["latents"], denormalise(wanted, snapshot.latent))
    torch.testing.assert_close(file["reference"], denormalise(subjects.reference, snapshot.latent))


def test_images_to_edit_are_of_a_bucket_that_the_store_trains(store: LatentStore) -> None:
    settings = ("model.reference=edit", "schedule.kind=constant", "run.steps=2")
    common = max(store.buckets, key=lambda name: store.buckets[name])
    for aspect in ("data.min_aspect=0.1", "data.min_aspect=1.2", "data.max_aspect=0.9"):
        run = Run.open(train_recipe("qwen-image-tiny", *settings, aspect), [store], CPU, print)
        counts = run.loader.reader.order.plans[0].selection.counts
        bucket = max(counts, key=lambda name: counts[name])
        subjects = choose_subjects(run, 50)
        assert len(subjects.names) == counts[bucket] > 0
        assert subjects.reference.shape[2:] == latent_size_of(bucket, store.spec.latent)
        assert (bucket == common) == (counts.get(common, 0) > 0)


def test_edits_of_records_and_of_an_own_image_are_drawn(store: LatentStore, edited: Path, tmp_path: Path) -> None:
    small: dict[str, Any] = {"steps": 2, "vae": "shipped:vae"}
    result = sample_grid(edited, SampleRequest(count=2, **small), out=tmp_path / "grid", device=CPU)
    texts = set(store.captions["text"].to_pylist())
    assert len(result["samples"]) == 2
    assert set(result["samples"]) <= texts
    sampler = open_sampler(edited, SampleRequest(count=2, **small), CPU, evenly=True)
    index = store.index(sampler.bucket)
    ends = index.rows[[0, len(index) - 1]]
    moments = store.companion("edit", sampler.bucket).take(ends)
    wanted = mean_latents(torch.from_numpy(moments), sampler.snapshot.latent)
    assert torch.equal(sampler.subjects.references([0, 1]), wanted)

    # An image of the user that is the companion's own file: the same latents as the store has.
    source = store.path.parent / "source"
    record = store.record_at(int(index.records[0]))
    rows = [json.loads(line) for line in (source / "metadata.jsonl").read_text().splitlines()]
    image = next(source / row["source image"] for row in rows if record.key.endswith(row["file_name"]))
    request = SampleRequest(captions=[sorted(texts)[0]], images=[image], bucket=sampler.bucket, count=2, **small)
    own = open_sampler(edited, request, CPU, evenly=True)
    torch.testing.assert_close(own.subjects.references([0, 1]), wanted[:1].expand(2, -1, -1, -1), rtol=0.01, atol=0.01)
    nearest = open_sampler(edited, replace(request, bucket=None), CPU, evenly=True)
    assert nearest.bucket == record.bucket
    first, second = (pixels for _, pixels in own.draw([0, 1]))
    assert not np.array_equal(first, second)

    # A set: another image is another set.
    sample_set(edited, request, out=tmp_path / "set", device=CPU, progress=no_progress)
    other = next(path for path in sorted(source.rglob("*.png")) if path.read_bytes() != image.read_bytes())
    with pytest.raises(RunError, match="image_sha256"):
        sample_set(edited, replace(request, images=[other]), out=tmp_path / "set", device=CPU, progress=no_progress)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"images": [Path("absent.png")], "captions": ["a"]}, SourceError, r"--image 'absent\.png'"),
        ({"images": [Path(__file__)], "captions": ["a"]}, SourceError, "--image"),
        ({"images": [Path(__file__)]}, LeanditError, "--caption"),
        ({"bucket": "128x128"}, RunError, "no images 'edit' to edit of 128x128 px"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    changes: dict[str, Any], error: type[LeanditError], message: str, edited: Path
) -> None:
    with pytest.raises(error, match=message):
        open_sampler(edited, SampleRequest(vae="shipped:vae", **changes), CPU)


def test_an_image_of_a_shape_that_the_run_has_not_seen_is_refused_or_warned_of(edited: Path, tmp_path: Path) -> None:
    small: dict[str, Any] = {"steps": 2, "vae": "shipped:vae", "captions": ["a"], "images": [tmp_path / "image.png"]}
    Image.new("RGB", (400, 80)).save(tmp_path / "image.png")
    with pytest.raises(SourceError, match=r"image.png': 80x400 px, expected a longer side of at most 4.5 times"):
        open_sampler(edited, SampleRequest(**small), CPU)
    Image.new("RGB", (400, 100)).save(tmp_path / "image.png")
    buckets = load_snapshot(edited, CPU).state["buckets"]
    sampler = open_sampler(edited, SampleRequest(**small), CPU)
    assert sampler.bucket == min(buckets, key=lambda name: abs(np.divide(*bucket_size(name)) - 0.25))
    assert f"of its area to the crop from 100x400 to {sampler.bucket} px" in sampler.summary()["warning"]
    Image.new("RGB", (400, 80)).save(tmp_path / "image.png")  # a shape that is asked for takes any image
    sampler = open_sampler(edited, SampleRequest(bucket="64x64", **small), CPU)
    assert "--image loses 80% of its area" in sampler.summary()["warning"]


def test_a_damaged_companion_is_never_edited(store: LatentStore, edited: Path, tmp_path: Path) -> None:
    """A byte of each row changes after its shard was opened; ``data.check`` decides, as for the rows of a batch."""
    shutil.copytree(store.path, tmp_path / "store")
    runs = {
        check: Run.open(
            train_recipe("qwen-image-tiny", *EDITS, f"data.check={check}"),
            [LatentStore(tmp_path / "store")],
            CPU,
            print,
        )
        for check in ("first", "never")
    }
    request = SampleRequest(count=2, steps=2, vae="shipped:vae", store=tmp_path / "store")
    sampler = open_sampler(edited, request, CPU)
    whole = {check: choose_subjects(run, 2).reference for check, run in runs.items()}
    sampler.subjects.references([0, 1])
    for bucket in store.buckets:
        array = store.companion("edit", bucket)
        for row in store.index(bucket).rows.tolist():
            file, offset, size = array.place(row)
            with open(tmp_path / "store" / file, "r+b") as shard:
                shard.seek(offset + size // 4)
                byte = shard.read(1)
                shard.seek(-1, os.SEEK_CUR)
                shard.write(bytes([byte[0] ^ 4]))
    with pytest.raises(DamageError, match="does not match its checksum"):
        choose_subjects(runs["first"], 2)
    assert not torch.equal(choose_subjects(runs["never"], 2).reference, whole["never"])
    with pytest.raises(DamageError, match="does not match its checksum"):
        sampler.subjects.references([0, 1])


def test_a_model_that_edits_nothing_takes_no_image(store: LatentStore, tmp_path: Path) -> None:
    run = tmp_path / "plain"
    run_to(train_recipe("qwen-image-tiny", "schedule.kind=constant", "run.steps=1"), store, run)
    image = next((store.path.parent / "source").rglob("*.png"))
    request = SampleRequest(vae="shipped:vae", images=[image], captions=["a"])
    with pytest.raises(RecipeError, match="edits no image"):
        open_sampler(run, request, CPU)
    with pytest.raises(RecipeError, match="--image: expected one image, got 2"):
        replace(request, images=[image, image])


def test_a_plan_counts_the_companion_that_is_read_alone(store: LatentStore) -> None:
    edits, plain = (workload_of_stores(train_recipe("qwen-image-tiny", *how), store.path) for how in (EDITS, ()))
    assert [one.name for one in edits.store.companions] == ["edit"]
    assert plain.store.companions == []
    assert edits.batch_bytes(4) > plain.batch_bytes(4)


@pytest.mark.parametrize(
    ("model", "settings", "error", "message"),
    [
        ("qwen-image-tiny", ["model.reference=before"], RunError, "no companion image 'before', available: copy"),
        (
            "qwen-image-tiny",
            ["model.reference=before"],
            RunError,
            r"with a table \[companions.before\] of an image makes a store",
        ),
        ("z-image-tiny", ["model.reference=edit"], RecipeError, r"model 'z-image-tiny' takes none"),
    ],
)
def test_what_cannot_be_edited_is_refused(
    model: str, settings: list[str], error: type[LeanditError], message: str, store: LatentStore
) -> None:
    with pytest.raises(error, match=message):
        Run.open(train_recipe(model, *settings), [store], CPU, print)
