"""Forwards: a batch that does not fit is halved, a latent that is not finite made again, and each row tells it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from making import label_recipe, loaded_encoders, make_class_folder, smooth_image, store_digest, tree_digest
from PIL import Image
from stores import checked, deep

from leandit.datasets.store import LatentStore
from leandit.errors import ResourceError, SourceError
from leandit.precompute.encoders.vae import ImageEncoder
from leandit.tools.export.compact import compact
from leandit.tools.inspection.store_facts import StoreFacts
from leandit.tools.inspection.store_text import render

pytestmark = pytest.mark.usefixtures("quick")
Encode = Callable[..., object]
Forward = Callable[[ImageEncoder, np.ndarray], np.ndarray]
FORWARD: Forward = ImageEncoder.encode


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leandit.datasets.format.row_layout.MAX_SHARD_ROWS", 8)  # of 15 images: shards of 8 and 7
    load = "leandit.precompute.encoders.loading.load_encoders"  # of a verification
    monkeypatch.setattr(load, lambda recipe, device: loaded_encoders(recipe.vae, recipe.text))
    loaded_encoders(label_recipe().vae, label_recipe().text)  # which encodes one image


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Give the encoder a memory for so many images, and tell the forwards that were tried."""

    def limit(most: int, *, without: np.ndarray | None = None) -> list[int]:
        tried: list[int] = []

        def forward(self: ImageEncoder, pixels: np.ndarray) -> np.ndarray:
            tried.append(len(pixels))
            if len(pixels) > most or (without is not None and any(np.array_equal(one, without) for one in pixels)):
                raise torch.OutOfMemoryError("CUDA out of memory")
            return FORWARD(self, pixels)

        monkeypatch.setattr(ImageEncoder, "encode", forward)
        return tried

    return limit


def crop(path: Path) -> np.ndarray:
    """An image of 40x56 px as ADM's crop to 32 px has it."""
    return np.asarray(Image.open(path).resize((45, 32), Image.Resampling.BICUBIC))[:, 6:38]


def fallbacks(store: Path) -> list[str | None]:
    return LatentStore(store).records["fallback"].to_pylist()


def latents(store: Path) -> np.ndarray:
    return LatentStore(store).latents("32x32").read(0, 15)


def test_a_batch_that_does_not_fit_is_halved_and_each_row_tells_it(
    encode: Encode, class_folder: Path, tmp_path: Path, sizes: Callable[..., list[int]]
) -> None:
    tried = sizes(2)
    encode(label_recipe(), class_folder, tmp_path / "store")
    # Shards of 8 and 7 in batches of 8: 8 and 4 fail, then twos; the next shard tries anew.
    assert sorted(tried) == sorted([8, 4, 2, 2, 2, 2, 7, 4, 2, 2, 2, 1])
    assert fallbacks(tmp_path / "store") == ["batch:2"] * 15
    encode(label_recipe("vae.batch_size=2"), class_folder, tmp_path / "twos")
    np.testing.assert_array_equal(latents(tmp_path / "store"), latents(tmp_path / "twos"))
    encode(label_recipe(), class_folder, tmp_path / "again")
    assert store_digest(tmp_path / "again") == store_digest(tmp_path / "store")
    shown = render(StoreFacts(LatentStore(tmp_path / "store")))
    assert "stored as batch:2   15: out of memory, encoded in smaller batches" in shown


def test_an_image_that_does_not_fit_alone_is_rejected_and_its_neighbours_are_stored(
    encode: Encode, class_folder: Path, tmp_path: Path, sizes: Callable[..., list[int]]
) -> None:
    sizes(8, without=crop(class_folder / "n001/1.png"))
    encode(label_recipe("source.max_reject_share=0.5"), class_folder, tmp_path / "store")
    store = LatentStore(tmp_path / "store")
    record = store.record("n001/1.png")
    assert (record.status, record.stage, record.reason) == ("rejected", "encode", "out_of_memory")
    assert "vae.tile_px" in str(record.detail)
    assert np.isnan(store.latents("32x32")[6]).all()
    assert fallbacks(tmp_path / "store") == ["batch:1"] * 6 + [None] + ["batch:1"] + [None] * 7
    assert store.buckets == {"32x32": 14}


def test_where_nothing_fits_the_run_stops_and_says_why(
    encode: Encode, tmp_path: Path, sizes: Callable[..., list[int]]
) -> None:
    source = make_class_folder(tmp_path / "train", classes=1, per_class=12)
    sizes(0)
    with pytest.raises(SourceError, match=r"\d+ of 12.*\d+ x out_of_memory"):
        encode(label_recipe(), source, tmp_path / "store")


def test_a_latent_that_is_not_finite_is_made_again_and_told(
    encode: Encode, class_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marked = [crop(class_folder / f"n00{i}/2.png") for i in range(3)]

    def forward(self: ImageEncoder, pixels: np.ndarray) -> np.ndarray:
        moments = FORWARD(self, pixels)
        for i, one in enumerate(pixels):
            if len(pixels) > 1 and any(np.array_equal(one, other) for other in marked):
                moments[i] = np.nan
        return moments

    monkeypatch.setattr(ImageEncoder, "encode", forward)
    encode(label_recipe("vae.flip=true"), class_folder, tmp_path / "store")
    store = LatentStore(tmp_path / "store")
    assert store.buckets == {"32x32": 15}
    assert np.isfinite(latents(tmp_path / "store").astype(float)).all()
    assert np.flatnonzero([how == "float32" for how in fallbacks(tmp_path / "store")]).tolist() == [2, 7, 12]
    assert StoreFacts(store).records["fallbacks"] == {"float32": 3}
    assert store.record("n000/2.png").fallback == "float32"


def test_what_is_encoded_again_is_halved_as_it_was(
    encode: Encode, class_folder: Path, tmp_path: Path, sizes: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "store"
    sizes(3)
    encode(label_recipe("vae.batch_size=6"), class_folder, root)
    whole = tree_digest(root)
    assert set(fallbacks(root)) == {"batch:3", None}  # what is left of a shard fits at once
    tried = sizes(100)  # now all fits
    assert deep(root, class_folder).num_exact == 15
    assert max(tried) == 3
    tried.clear()
    shutil.rmtree(root / "buckets/32x32/moments/c")
    assert checked(root, class_folder, repair=True)[0].findings == []
    assert tree_digest(root) == whole
    assert max(tried) == 3
    compact(root, tmp_path / "new", progress=lambda *_: None)
    assert fallbacks(tmp_path / "new") == fallbacks(root)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder says that it stands on a GPU; it computes where it is."""
    monkeypatch.setattr(ImageEncoder, "device", torch.device("cuda"))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("memory", "side_px", "found"), [(1, 32, 1), (5, 32, 4), (64, 32, 64), (9, 2048, 8)])
def test_the_largest_batch_is_the_last_doubling_that_fits(
    memory: int, side_px: int, found: int, sizes: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = loaded_encoders(label_recipe().vae, label_recipe().text).image
    tried = sizes(memory)
    limited = ImageEncoder.encode
    small = np.zeros((1, 32, 32, 3), np.uint8)
    monkeypatch.setattr(
        ImageEncoder, "encode", lambda self, pixels: limited(self, small.repeat(len(pixels), 0))
    )  # of large images only the number counts here
    assert encoder.largest_batch(side_px, side_px) == found
    assert tried == [2**i for i in range(len(tried))]
    assert tried[-1] in (found, 2 * found)


@pytest.mark.usefixtures("gpu")
def test_where_not_one_image_fits_nothing_is_planned(
    encode: Encode, class_folder: Path, tmp_path: Path, sizes: Callable[..., list[int]]
) -> None:
    recipe = label_recipe("vae.batch_size=0")
    loaded_encoders(recipe.vae, recipe.text)
    sizes(0)
    with pytest.raises(ResourceError, match=r"vae\.batch_size 0: one image of 32x32 px.*vae\.tile_px"):
        encode(recipe, class_folder, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_a_found_batch_is_kept_by_the_store_whatever_fits_later(
    encode: Encode, class_folder: Path, tmp_path: Path, sizes: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, root = label_recipe("vae.batch_size=0"), tmp_path / "store"
    source = Path(shutil.copytree(class_folder, tmp_path / "train"))
    loaded_encoders(recipe.vae, recipe.text)
    monkeypatch.setattr(ImageEncoder, "device", torch.device("cuda"))
    tried = sizes(5)
    encode(recipe, source, root)
    assert (tried[:4], sorted(tried[4:])) == ([1, 2, 4, 8], [3, 4, 4, 4])
    assert LatentStore(root).spec.latent.batch_size == 4
    tried = sizes(100)
    encode(recipe, source, root)
    smooth_image(77).save(source / "n000/9.png")
    encode(recipe, source, root)
    assert (tried, LatentStore(root).revision, LatentStore(root).spec.latent.batch_size) == ([1], 2, 4)
    assert deep(root, source).num_exact == 16
    encode(label_recipe("vae.batch_size=4"), source, root)  # the same as with the number said
