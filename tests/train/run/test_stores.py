"""Runs over several stores, as the recipe names them: shares, resuming, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from making import CPU, TRAIN_RECIPE, caption_recipe, encode
from noise_store import make_store
from runs import bits
from stores import ImageSource

from leandit.datasets.format.schema import UNKNOWN, FeatureEncoder, FeatureSpec, StoreSpec
from leandit.datasets.order.alike import check_alike
from leandit.datasets.store import LatentStore
from leandit.errors import RecipeError, RunError
from leandit.recipe import parse_recipe, to_toml
from leandit.tools.plan.dry_run import describe_train
from leandit.tools.plan.workload import workload_of_stores
from leandit.train import loop
from leandit.train.config import TrainRecipe, load
from leandit.train.loop import Outcome, StopRequest, train
from leandit.train.weights import checkpoint

pytestmark = pytest.mark.usefixtures("tiny_models")

BASE = ["model.name=DiT-S/4", "model.num_classes=0", "run.compile=false", *TRAIN_RECIPE, "run.global_batch=4"]
MIXTURE = """
[[data.mixture]]
store = "photos"
weight = 0.7

[[data.mixture]]
store = "art"
weight = 0.3
"""
SIZES_MIXTURE = '[data]\nmixture = [{ store = "photos" }, { store = "large", weight = 3 }]\n'
BUCKETS = {"photos": {"32x32": 24}, "art": {"32x32": 6, "32x64": 9}, "large": {"64x64": 10}}


@pytest.fixture
def here(golden: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with three stores, "photos", "art" and "large"."""

    def make(folder: Path) -> None:
        for seed, (name, buckets) in enumerate(BUCKETS.items()):
            make_store(folder / name, buckets, num_classes=3, seed=seed)

    for path in golden("mixed stores", make).iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recipe_of(text: str, *overrides: str) -> TrainRecipe:
    Path("recipe.toml").write_text(text)
    return load("recipe.toml", [*BASE, *overrides])


def run_to(
    recipe: TrainRecipe, run: str = "run", said: list[str] | None = None
) -> tuple[Outcome, list[tuple[int, str]]]:
    """Train; returns the store and the bucket of each step too."""
    seen, take, warn = list[tuple[int, str]](), loop.train_step, [].append if said is None else said.append
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", lambda it, of: (seen.append((of.store, of.bucket)), take(it, of))[1])
        outcome = train(recipe, run=Path(run), device=CPU, report=lambda _: None, stop=StopRequest(), warn=warn)
    return outcome, seen


def assert_equal_bits(one: str, other: str, step: int) -> None:
    assert bits(Path(one), step) == bits(Path(other), step)
    states = [checkpoint.read(Path(f"{run}/checkpoint-{step}")).state for run in (one, other)]
    assert states[0] == states[1]


def test_the_snapshots_of_a_mixture_know_the_buckets_of_all_stores(here: Path) -> None:
    outcome, seen = run_to(recipe_of(MIXTURE, "run.steps=10", "run.checkpoint_every=5"))
    assert outcome.finished
    assert Counter(store for store, _ in seen) == {0: 7, 1: 3}
    for step in (5, 10):
        buckets = checkpoint.read(Path(f"run/snapshot-{step}")).state["buckets"]
        assert buckets == {"32x32": 24 + 6, "32x64": 9}


def test_the_model_is_made_for_the_largest_images_whichever_store_they_are_in(here: Path) -> None:
    for side_px in (32, 64):
        make_store(Path(f"{side_px}"), {f"{side_px}x{side_px}": 8}, num_classes=3, resolution_px=side_px)
    for first, second in (("32", "64"), ("64", "32")):
        mixture = f"data.mixture=[{{store='{first}'}}, {{store='{second}'}}]"
        _, seen = run_to(recipe_of("", mixture, "run.steps=2"), f"run-{first}")
        assert {bucket for _, bucket in seen} == {"32x32", "64x64"}
        assert json.loads(Path(f"run-{first}/run.json").read_text())["spec"]["base_size"] == 64 // 8


def test_one_store_in_the_recipe_is_as_on_the_command_line(here: Path) -> None:
    run_to(recipe_of('[[data.mixture]]\nstore = "photos"\nlabels = [0]', "run.checkpoint_every=6"), "named")
    given = recipe_of("[data]\nlabels = [0]", "run.checkpoint_every=6")
    train(given, store_path="photos", run=Path("given"), device=CPU, report=print, stop=StopRequest())
    assert_equal_bits("named", "given", 6)


def test_a_store_has_the_filter_that_stands_with_it_else_that_of_the_section(here: Path) -> None:
    recipe, said = recipe_of("[data]\nlabels = [0]\n" + MIXTURE + "labels = [1, 2]\n", "run.steps=10"), list[str]()
    run_to(recipe, said=said)
    counts = [Counter(LatentStore(name).record_columns(("label",))["label"].to_pylist()) for name in ("photos", "art")]
    assert [line.split(": ")[1] for line in said] == [
        f"{counts[0][0]} of 24 records are used; filtered out",
        f"{counts[1][1] + counts[1][2]} of 15 records are used; filtered out",
    ]


def test_a_resolved_recipe_is_read_back_as_it_was(here: Path) -> None:
    for text in ("[data]\nmax_aspect = 2.0\n" + MIXTURE, SIZES_MIXTURE):
        recipe = recipe_of(text, "data.min_aspect=0.5")
        assert {section.min_aspect for section in recipe.store_sections(None)} == {0.5}
        Path("again.toml").write_text(to_toml(recipe))
        assert load("again.toml", []) == recipe == parse_recipe("dumped", TrainRecipe, recipe.model_dump())
        again = load("again.toml", ["data.min_aspect=0.7"])
        assert {section.min_aspect for section in again.store_sections(None)} == {0.7}
    recipe = recipe_of("[data]\nmin_score = 2.0\n" + MIXTURE.replace("weight", 'scores = "s.parquet"\nweight'))
    assert [section.min_score for section in recipe.store_sections(None)] == [2.0, 2.0]


@pytest.mark.parametrize("step", [3, pytest.param(4, marks=pytest.mark.slow), pytest.param(7, marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_bit_for_bit(step: int, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint is up to two steps old."""
    recipe = recipe_of(MIXTURE, "run.steps=9", "run.checkpoint_every=2", "run.async_checkpoint=false")
    _, whole = run_to(recipe, "whole")
    take = loop.train_step

    def killed_after(state: Any, batch: Any) -> Any:
        if state.step == step:
            raise KeyboardInterrupt
        return take(state, batch)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", killed_after)
        with pytest.raises(KeyboardInterrupt):
            run_to(recipe)
    outcome, seen = run_to(recipe)
    assert outcome.first_step == step // 2 * 2 + 1
    assert seen == whole[step // 2 * 2 :]
    assert_equal_bits("whole", "run", 9)


def test_the_manifest_names_every_store_with_its_root_hash_and_a_store_may_move(here: Path) -> None:
    run_to(recipe_of(MIXTURE, "run.steps=3"))
    stores = json.loads(Path("run/run.json").read_text())["stores"]
    hashes = [LatentStore(name).root_hash for name in ("photos", "art")]
    assert [(s["path"], s["revision"]) for s in stores] == [("../photos", 1), ("../art", 1)]
    assert [s["root_hash"] for s in stores] == hashes
    assert checkpoint.read(Path("run/snapshot-3")).state["root_hashes"] == hashes
    Path("photos").rename("moved")
    outcome, _ = run_to(recipe_of(MIXTURE.replace("photos", "moved"), "run.steps=5"))
    assert (outcome.first_step, outcome.finished) == (4, True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("0.3", "0.4"), r"data\.mixture\.1\.weight was 0\.3, is 0\.4"),
        (('"art"', '"art"\nlabels = [1]'), r"data\.mixture\.1\.labels was \[\], is \[1\]"),
        (('"art"', '"photos"'), "started with another store: root_hash of revision 1"),
        (('[[data.mixture]]\nstore = "art"\nweight = 0.3', ""), "started with 2 stores, this recipe has 1"),
        (('"art"', '"art"\nrevision = 2'), r"no complete revision 2|reads revision 1 of store 'art', not 2"),
    ],
)
def test_a_run_refuses_other_stores_and_shares(change: tuple[str, str], message: str, here: Path) -> None:
    run_to(recipe_of(MIXTURE, "run.steps=2"))
    with pytest.raises(RunError, match=message):
        run_to(recipe_of(MIXTURE.replace(*change), "run.steps=4"))


def test_a_store_is_named_once(here: Path) -> None:
    with pytest.raises(RecipeError, match=r"--store 'art': the recipe names its own, 'photos' first"):
        train(recipe_of(MIXTURE), store_path="art", run=Path("r"), device=CPU, report=print, stop=StopRequest())
    with pytest.raises(RecipeError, match=r"no store to train on: expected --store PATH, or data\.mixture"):
        run_to(recipe_of(""))


CONTRADICTIONS = (
    (MIXTURE.replace("0.3", "0"), r"data\.mixture\.1\.weight.*greater than 0"),
    (MIXTURE.replace("weight", "wieght"), r"data\.mixture\.0\.wieght', did you mean 'data\.mixture\.weight'"),
    ("[run]\nrevision = 2\n" + MIXTURE, r"run\.revision applies to --store"),
    (MIXTURE + "min_score = 2.0", "min_score needs scores"),
)


@pytest.mark.parametrize(("text", "message"), CONTRADICTIONS)
def test_a_recipe_that_contradicts_itself_is_refused(text: str, message: str, here: Path) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe_of(text)


def test_stores_that_do_not_go_together_are_refused(here: Path) -> None:
    for name, how in (("wide", {"channels": 16}), ("other", {"num_classes": 4})):
        make_store(Path(name), {"32x32": 8}, **{"num_classes": 3} | how)
    cached = (
        MIXTURE.replace('"photos"', '"s3://a/photos"').replace('"art"', '"s3://a/art"') + "[run]\nremote_folder='c'"
    )
    for text, message in (
        (MIXTURE.replace("art", "wide"), "stores 'photos' and 'wide' cannot be mixed: latent channels 4 and 16"),
        (MIXTURE.replace("art", "other"), "stores 'photos' and 'other' cannot be mixed: number of classes 3 and 4"),
        (MIXTURE.replace("0.7", "0.70001"), "Weights close to them: 700, 300"),
        (cached, r"run\.remote_folder 'c': it is for one store, not 2"),
    ):
        with pytest.raises(RecipeError, match=message):
            run_to(recipe_of(text))
    assert not Path("run/run.json").exists()


@pytest.mark.parametrize("order", [(1, 2), (2, 1), (1, 2, 1)])
def test_each_revision_of_a_store_must_fit_the_model(order: tuple[int, ...], quick: None, here: Path) -> None:
    images = ImageSource(Path("source"), 2, sizes=[(64, 64)] * 5 + [(60, 100)])
    encode(caption_recipe("source.max_reject_share=1"), images.root, Path("grown"))
    images.put(5)  # its bucket, 48x80, is not divisible by the 32 px of a token
    images.write()
    encode(caption_recipe("source.max_reject_share=1"), images.root, Path("grown"))
    parts = "".join(f"[[data.mixture]]\nstore = 'grown'\nrevision = {revision}\n" for revision in order)
    with pytest.raises(RunError, match=r"store 'grown' \(revision 2\): bucket '48x80' is not divisible") as refused:
        run_to(recipe_of(parts, "conditioning.kind=caption"))
    assert "(revision 1)" not in str(refused.value)
    run_to(recipe_of(parts.replace("revision = 2", "revision = 1"), "conditioning.kind=caption", "run.steps=1"))


ONES, SIZES = {"weights_sha256": "1" * 64}, {"width": 8, "patch_px": 14, "resolution_px": 28, "images_px": 32}
DIFFERENCES = (
    ("classes", ["0000", "a dog", "0002"], "class 1 0001 and a dog"),
    ("vae", ONES, "VAE weights 000000000000 and 111111111111"),
    ("text", {"max_tokens": 9}, "tokens of the longest caption 8 and 9"),
    ("text", {"template": "[{caption}]"}, r"template '' and '\[\{caption\}\]'"),
    ("text", {"layers": [-2]}, r"layers \[\] and \[-2\]"),
    ("text", {"full_length": True}, "full length False and True"),
    ("text_encoder", ONES, "text encoder weights 0+ and 1+"),
)


def test_stores_of_other_encoders_or_classes_are_refused_where_they_are_read(here: Path) -> None:
    make_store(Path("captioned"), {"32x32": 8}, num_classes=3, token_counts=[3, 8], text_width=16)
    spec = LatentStore("captioned").spec
    check_alike([("'a'", spec), ("'b'", spec)], captions=True, classes=True)

    def changed(name: str, value: Any) -> StoreSpec:
        old = getattr(spec, name)
        return spec.model_copy(update={name: old.model_copy(update=value) if isinstance(value, dict) else value})

    for name, value, message in DIFFERENCES:
        stores = [("'a'", spec), ("'b'", changed(name, value))]
        with pytest.raises(RecipeError, match=f"stores 'a' and 'b' cannot be mixed: {message}"):
            check_alike(stores, captions=True, classes=True)
        if name != "vae":  # a model reads captions or labels
            check_alike(stores, captions=name == "classes", classes=name != "classes")
    imported = [("'b'", changed("vae", {"weights_sha256": UNKNOWN})), ("'a'", spec)]  # nothing is known of its encoder
    check_alike(imported, captions=False)
    with pytest.raises(RecipeError, match="stores 'a' and 'c' cannot be mixed: VAE weights"):
        check_alike([*imported, ("'c'", changed("vae", ONES))], captions=False)
    dino = FeatureSpec(output="patches", layer=8, dtype="int8", **SIZES)
    features = [dino.model_copy(update=change) for change in ({}, {"dtype": "float16"}, {"layer": -1})]
    encoders = [FeatureEncoder(name="dino", spec=feature, encoder=spec.vae) for feature in features]
    stores = [(f"'{name}'", changed("features", [one])) for name, one in zip("abc", encoders, strict=True)]
    check_alike(stores[:2], captions=False, features=["dino"])
    check_alike(stores, captions=False)
    with pytest.raises(RecipeError, match="stores 'a' and 'c' cannot be mixed: layer of feature 'dino' 8 and -1"):
        check_alike(stores, captions=False, features=["dino"])


def test_the_memory_is_planned_for_the_largest_bucket_and_the_time_for_all(here: Path) -> None:
    workload = workload_of_stores(recipe_of(SIZES_MIXTURE, "run.steps=10"), None)
    assert workload.largest_bucket == "64x64"
    assert workload.buckets == {"32x32": 24, "64x64": 10}
    assert workload.shares == pytest.approx({"32x32": 2.5, "64x64": 7.5})
    alone = {name: workload_of_stores(recipe_of("", "run.steps=10"), name) for name in ("photos", "large")}
    assert workload.flops == pytest.approx(alone["photos"].flops / 4 + alone["large"].flops * 3 / 4)


def test_a_dry_run_says_what_each_store_has_of_the_batches(here: Path) -> None:
    lines = describe_train(recipe_of(SIZES_MIXTURE, "run.steps=10"), None, CPU).splitlines()
    stores = [line.removeprefix("store").strip() for line in lines if line.startswith("store  ")]
    assert stores == [
        "'photos', 24 records, 0.25 of the batches: 0.4 epochs",
        "'large', 10 records, 0.75 of the batches: 3.0 epochs",
    ]
    assert "epochs" not in describe_train(recipe_of(SIZES_MIXTURE, "run.steps=10", "data.labels=[0]"), None, CPU)
