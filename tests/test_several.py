"""Several stores from one decode: each is the store of its own command, whatever is missing, broken or in the way."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from harness import InProcessDecoders, Scenario, assert_whole, make_small, make_source, tree
from harness import recipe as small_recipe
from making import (
    CPU,
    caption_recipe,
    label_recipe,
    loaded_encoders,
    make_caption_folder,
    no_progress,
    picture,
    tree_digest,
)
from pictures import encoded

from leandit.datasets import buckets
from leandit.datasets.errors import FingerprintMismatch, RecipeError, RecordRejected, ResourceError
from leandit.datasets.files import Failpoint
from leandit.datasets.frozen import read_plan
from leandit.datasets.store import LatentStore
from leandit.datasets.writer import StoreWriter
from leandit.precompute import lanes, opening, pipeline, several
from leandit.precompute.config import PrecomputeRecipe
from leandit.precompute.decoder import Crop, Decoded, Decoders, PicturePlace
from leandit.precompute.growth import Options
from leandit.precompute.lanes import Lane
from leandit.precompute.opening import needed_bytes
from leandit.precompute.part import Part
from leandit.precompute.several import SharedReport, Target

pytestmark = pytest.mark.usefixtures("quick", "small_shards")

SIDES = (32, 64, 48)


@pytest.fixture(autouse=True)
def _shared(decoders: Decoders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several, "load_encoders", lambda recipe, device: loaded_encoders(recipe.vae, recipe.text))
    monkeypatch.setattr(several, "Decoders", lambda num_children: contextlib.nullcontext(decoders))


@pytest.fixture(autouse=True)
def _small_tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The published tables at 128 px too."""
    monkeypatch.setattr(buckets, "PIXART_RESOLUTIONS_PX", (128, *buckets.PIXART_RESOLUTIONS_PX))
    yield
    buckets._table.cache_clear()


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several shards from few pictures, whose number differs between the resolutions' batches."""
    monkeypatch.setattr("leandit.datasets.layout.MAX_SHARD_ROWS", 5)


Recipe = Callable[..., PrecomputeRecipe]


def square(side: int, *more: str) -> PrecomputeRecipe:
    """Labelled squares; batches of three rows, which no shard of five divides."""
    return label_recipe(f"images.resolution={side}", "vae.batch_size=3", *more)


def captioned(side: int, *more: str) -> PrecomputeRecipe:
    """Captioned squares."""
    return caption_recipe("images.buckets=square", f"images.resolution={side}", "vae.batch_size=3", *more)


def area(side: int, *more: str) -> PrecomputeRecipe:
    """Buckets that hold other records at each resolution."""
    recipe = captioned(side, *more)
    return recipe.model_copy(
        update={"images": recipe.images.model_copy(update={"buckets": "area", "step_px": 16, "crop": "bucket"})}
    )


def pixart(side: int, *more: str) -> PrecomputeRecipe:
    """The published tables."""
    recipe = captioned(side, *more)
    return recipe.model_copy(
        update={"images": recipe.images.model_copy(update={"buckets": "pixart", "crop": "bucket"})}
    )


def broken(root: Path) -> Path:
    """Captioned pictures of three shapes; one is none (rejected at scan), one ends too early (rejected at decode)."""
    make_caption_folder(root)
    (root / "images/3.png").write_bytes(b"not a picture")
    whole = (root / "images/7.png").read_bytes()
    (root / "images/7.png").write_bytes(whole[: len(whole) // 2])
    return root


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """14 captioned pictures; two are broken."""
    return broken(tmp_path_factory.mktemp("several") / "pictures")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """14 captioned pictures; all are good."""
    return make_caption_folder(tmp_path_factory.mktemp("whole") / "pictures")


def together(targets: dict[Path, PrecomputeRecipe], source: Path, **how: Any) -> SharedReport:
    """Precompute several stores at once."""
    wanted = [Target(recipe, store) for store, recipe in targets.items()]
    return several.precompute_several(wanted, source_path=source, device=CPU, progress=no_progress, **how)


def alone(recipe: PrecomputeRecipe, source: Path, store: Path, **how: Any) -> pipeline.Report:
    """Precompute one store, by its own command."""
    return pipeline.precompute(recipe, source_path=source, store_path=store, device=CPU, progress=no_progress, **how)


def assert_same_trees(targets: dict[Path, PrecomputeRecipe], source: Path, own: Path, **how: Any) -> None:
    """Each store is, file by file and byte by byte, the one that its own command makes in a folder of its own."""
    for number, (store, recipe) in enumerate(targets.items()):
        alone(recipe, source, own / str(number), **how)
        here, there = tree_digest(store), tree_digest(own / str(number))
        assert sorted(here) == sorted(there)
        assert [name for name in there if here[name] != there[name]] == []


def grow(source: Path) -> None:
    """One picture is new, one is another, one is gone; one has another caption."""
    lines = [json.loads(line) for line in (source / "metadata.jsonl").read_text().splitlines()]
    picture(77, 60, 100).save(source / "images/1.png")
    picture(78, 64, 64).save(source / "images/new.png")
    lines[0]["captions"] = ["a picture described anew"]
    del lines[2]
    lines.append({"file_name": "images/new.png", "captions": ["a picture that is new"]})
    (source / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("kind", [square, captioned, area, pixart])
def test_each_store_is_that_of_its_own_command(kind: Recipe, source: Path, tmp_path: Path) -> None:
    sides = {pixart: (128, 256), captioned: (32, 64, 48)}.get(kind, (32, 64))
    recipe_of = {tmp_path / f"s{side}": kind(side) for side in sides}
    report = together(recipe_of, source)
    assert_same_trees(recipe_of, source, tmp_path / "own")
    assert report.num_encoded == len(sides) * 13  # of 14, one is rejected at scan


@pytest.mark.parametrize("kind", [square, pixart])
def test_a_picture_is_decoded_once_where_the_buckets_hold_the_same_records(
    kind: Recipe, whole: Path, tmp_path: Path
) -> None:
    report = together({tmp_path / f"s{side}": kind(side) for side in (128, 256)}, whole)
    assert (report.num_decoded, report.num_encoded) == (14, 28)


def test_what_finds_no_room_is_decoded_again(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound holds at every moment, however little it is, and the stores are the same."""
    largest, wait_for = [0], Lane.wait_for
    all_lanes: set[Lane] = set()

    def spied(self: Lane, place: int) -> lanes.Waiting:
        all_lanes.add(self)
        waiting = wait_for(self, place)
        largest[0] = max(
            largest[0], sum(3 * np.prod(lane.crop(one).bucket) for lane in all_lanes for one in lane._waiting)
        )
        return waiting

    monkeypatch.setattr(Lane, "wait_for", spied)
    found = {}
    for number, (kind, room) in enumerate([(square, 0), (square, 2 * 3 * 64 * 64), (area, 5 * 3 * 64 * 64)]):
        monkeypatch.setattr(lanes, "WAITING_BYTES", room)
        all_lanes.clear()
        largest[0] = 0
        recipe_of = {tmp_path / f"{number}-{side}": kind(side) for side in (32, 64)}
        found[number] = together(recipe_of, whole).num_decoded
        assert largest[0] <= room
        assert_same_trees(recipe_of, whole, tmp_path / f"own{number}")
    assert found[0] == 28
    assert 14 < found[1] < 28
    assert 14 <= found[2] < 28


class Unfit(InProcessDecoders):
    """Decoders that fail, in one way or another, wherever a picture of an odd number is to be cropped twice."""

    def crops(self, place: PicturePlace, crops: Sequence[Crop], *, exif_orientation: bool = True) -> list[Decoded]:
        """Fail, or decode."""
        if len(crops) > 1 and int(place.path.stem) % 2:
            raise RecordRejected("decode", "decoder_timeout", "no answer in 5 s")
        return super().crops(place, crops, exif_orientation=exif_orientation)


def test_what_cannot_be_made_together_is_made_alone(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(several, "Decoders", Unfit)
    recipe_of = {tmp_path / f"s{side}": captioned(side) for side in SIDES}
    together(recipe_of, source)
    assert_same_trees(recipe_of, source, tmp_path / "own")
    rejects = LatentStore(tmp_path / "s32").records["reason"].to_pylist()
    assert sorted(filter(None, rejects)) == ["not_an_image", "truncated"]


def test_stores_in_different_states_are_all_finished(source: Path, tmp_path: Path) -> None:
    """One is complete, one has half of its shards, one is planned only, and one is not there."""
    recipe_of = {tmp_path / f"s{side}": captioned(side) for side in (32, 48, 64, 80)}
    complete, half, planned, _ = recipe_of
    alone(recipe_of[complete], source, complete)
    alone(recipe_of[half], source, half, part=Part(1, 2))
    alone(recipe_of[planned], source, planned, part=Part(99, 99))
    report = together(recipe_of, source)
    assert_same_trees(recipe_of, source, tmp_path / "own")
    assert [one.num_encoded for one in report.reports][0::2] == [0, 13]
    assert 0 < report.reports[1].num_encoded < 13
    assert report.num_decoded <= 13 + 4  # the broken one is tried by each store, and once together
    again = together(recipe_of, source)
    assert (again.num_decoded, again.num_encoded) == (0, 0)


def test_a_store_that_was_planned_before_a_picture_changed_does_not_share_it(tmp_path: Path) -> None:
    """Also where the picture is as many bytes as before: then its size tells."""
    pictures = make_caption_folder(tmp_path / "pictures")
    recipe_of = {tmp_path / f"s{side}": square(side) for side in (32, 64)}
    (early, recipe), _ = recipe_of.items()
    padded = (pictures / "images/2.png").read_bytes()
    other = encoded(picture(79, 60, 60), "PNG")
    (pictures / "images/2.png").write_bytes(padded.ljust(len(other), b"\0"))
    for store in (early, tmp_path / "own/0"):
        alone(recipe, pictures, store, part=Part(99, 99))  # planned only
    picture(78, 64, 100).save(pictures / "images/1.png")
    (pictures / "images/2.png").write_bytes(other.ljust(len(padded), b"\0"))
    together(recipe_of, pictures)
    assert_same_trees(recipe_of, pictures, tmp_path / "own")
    store = LatentStore(early, revision=1)
    assert sorted(reason for reason in store.records["reason"].to_pylist() if reason) == [
        "source_changed",
        "wrong_size",
    ]
    assert LatentStore(early).revision == 2


def test_parts_in_any_order_end_in_the_same_stores(source: Path, tmp_path: Path) -> None:
    recipe_of = {tmp_path / f"s{side}": captioned(side) for side in (32, 64)}
    for number in (3, 1, 2):
        report = together(recipe_of, source, part=Part(number, 3))
    assert all(one.manifest for one in report.reports)
    assert_same_trees(recipe_of, source, tmp_path / "own")


@pytest.mark.parametrize("behind", [False, True])
def test_all_stores_grow(behind: bool, tmp_path: Path) -> None:
    """Each gets the revision of its own command, also where one of them is still busy with the one before."""
    pictures = broken(tmp_path / "pictures")
    recipe_of = {tmp_path / f"s{side}": captioned(side) for side in (32, 64)}
    own = {tmp_path / "own" / store.name: recipe for store, recipe in recipe_of.items()}
    for store, recipe in own.items():
        alone(recipe, pictures, store)
    together(recipe_of, pictures, **({"part": Part(1, 2)} if behind else {}))
    if behind:
        first, *_ = recipe_of
        alone(recipe_of[first], pictures, first)
    grow(pictures)
    report = together(recipe_of, pictures, options=Options(drop_gone=True))
    for store, recipe in own.items():
        if not behind or store.name == "s32":
            alone(recipe, pictures, store, options=Options(drop_gone=True))
            assert tree_digest(tmp_path / store.name) == tree_digest(store)
        assert LatentStore(tmp_path / store.name).revision >= 2
    if not behind:
        assert (report.num_decoded, report.num_encoded) == (2, 4)


def test_captions_are_encoded_once_where_the_stores_hold_the_same(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe_of = {tmp_path / f"s{side}": captioned(side) for side in (32, 64)}
    first, second = together(recipe_of, source).reports
    assert first.tokens.num_captions > 0
    assert second.tokens.num_captions == 0
    assert_same_trees(recipe_of, source, tmp_path / "own")

    # What is too long at one resolution only is rejected there only, and its caption is in the other store only.
    lines = [json.loads(line) for line in (source / "metadata.jsonl").read_text().splitlines()]
    shutil.copytree(source, tmp_path / "pictures")
    for number, line in enumerate(lines):
        line["captions"] = [f"picture number {number}"]
    (tmp_path / "pictures/metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr("leandit.precompute.picture_plan.MAX_PIXELS", 64 * 100)
    recipe_of = {
        tmp_path / f"t{side}": captioned(side, "source.max_rejects_in_a_row=99", "source.max_reject_share=1")
        for side in (32, 64)
    }
    first, second = together(recipe_of, tmp_path / "pictures").reports
    assert 0 < second.tokens.num_captions < first.tokens.num_captions
    assert_same_trees(recipe_of, tmp_path / "pictures", tmp_path / "own_t")


@pytest.mark.parametrize("step", [pytest.param(100, id="sample"), pytest.param(1, id="all", marks=pytest.mark.slow)])
def test_a_death_at_any_operation_comes_out_the_same(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so do two that run at the same time."""
    make_small(monkeypatch)
    source = make_source(tmp_path / "source")
    recipes = {"store": small_recipe(), "beside": small_recipe("images.resolution=48", "images.buckets=square")}

    def command(store: Path) -> None:
        several.load_encoders, several.Decoders = pipeline.load_encoders, InProcessDecoders
        targets = [Target(recipe, store.with_name(name)) for name, recipe in recipes.items()]
        several.precompute_several(targets, source_path=source, device=CPU, progress=no_progress)

    scenario = Scenario(tmp_path / "trials", command).undisturbed()
    for name, recipe in recipes.items():
        alone(recipe, source, tmp_path / "own" / name)
    assert scenario.whole == tree(tmp_path / "own/store")
    points = range(int(time.time() / 86400) % step, len(scenario.operations), step)
    assert len(points) >= 3
    for at in points:
        with scenario.store() as store:
            assert scenario.run(store, Failpoint("die", at)).died
            outcome = scenario.run(store)
            assert outcome.code == 0, outcome.message
            assert_whole(store, scenario, f"died at operation {at}")
    with scenario.store() as store:
        for outcome in [child.wait() for child in [scenario.start(store), scenario.start(store)]]:
            assert outcome.code == 0, outcome.message
        assert_whole(store, scenario, "two at the same time")


def test_what_cannot_be_is_refused_with_what_to_do(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "s32", tmp_path / "s64"
    with pytest.raises(RecipeError, match="named twice"):
        several.precompute_several(
            [Target(square(32), first), Target(square(64), tmp_path / "x/../s32")],
            source_path=source,
            device=CPU,
            progress=no_progress,
        )
    with pytest.raises(RecipeError, match=r"s64' lies inside of store .*s32'"):
        together({first: square(32), first / "s64": square(64)}, source)
    with pytest.raises(RecipeError, match=r"s32' lies inside of store .*s64'"):
        together({second / "s32": square(32), second: square(64)}, source)
    listed = caption_recipe("vae.batch_size=3")
    with pytest.raises(RecipeError, match="which no resolution changes"):
        together({first: listed, second: listed}, source)
    with pytest.raises(RecipeError, match="more than their images"):
        together({first: square(32), second: square(64, "vae.batch_size=4")}, source)
    assert not list(tmp_path.iterdir())

    alone(square(64, "vae.batch_size=4"), source, second)
    before = tree_digest(second)
    with pytest.raises(FingerprintMismatch, match=r"(?s)s64'.*latent\.batch_size is 4"):
        together({first: square(32), second: square(64)}, source)
    assert tree_digest(second) == before


def test_a_disk_that_holds_each_store_but_not_all_is_too_small(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe_of = {tmp_path / f"s{side}": square(side) for side in (32, 64)}
    for store, recipe in recipe_of.items():
        alone(recipe, source, store, part=Part(99, 99))  # planned only
    missing = [StoreWriter(store, read_plan(store, 1)) for store in recipe_of]
    needed = [needed_bytes(writer, writer.missing_tasks()) for writer in missing]
    for free, is_enough in ((sum(needed) - 1, False), (sum(needed), True)):
        monkeypatch.setattr(opening.shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        with contextlib.nullcontext() if is_enough else pytest.raises(ResourceError, match=r"s64'.*GiB free"):
            together(recipe_of, source)
