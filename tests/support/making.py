"""Small sources, recipes, arrays and models; stores are made of them by the real code with the shipped encoders."""

from __future__ import annotations

import functools
import json
import os
import resource
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import zarr
from image_files import encoded
from PIL import Image

from leandit.datasets.arrays.shard_folder import ShardFolder
from leandit.datasets.arrays.sharded_array import ShardedArray
from leandit.datasets.disk.files import write_atomic
from leandit.datasets.disk.hashing import canonical_json
from leandit.datasets.format.schema import POSTERIORS, LatentSpec
from leandit.datasets.format.zarr_shard import CODECS, ArrayLayout, pack_shard
from leandit.precompute.config import PrecomputeRecipe, TextSection, VaeSection
from leandit.precompute.config import load as load_precompute
from leandit.precompute.encoders.loading import Encoders, load_encoders
from leandit.precompute.pipeline import Report, precompute
from leandit.precompute.planning.compare import Options
from leandit.precompute.run.clock import Progress
from leandit.precompute.sharing.leases import ALL_SHARDS
from leandit.precompute.sources.files.record import SourceRecord
from leandit.precompute.sources.several import SourcePaths
from leandit.precompute.sources.source import Source
from leandit.train.config import TrainRecipe
from leandit.train.config import load as load_train
from leandit.train.models import dit_dh
from leandit.train.models.build import build_model
from leandit.train.models.diffusers import flux1, flux2, pixart, qwen_image, sana, sd3, z_image
from leandit.train.models.dit import SIZES as DIT_SIZES
from leandit.train.models.spec import ModelSpec

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]
CPU = torch.device("cpu")
SIZES = ((64, 64), (60, 100), (100, 60))  # height and width in px of the images of captioned sources, in turn
NO_CHECK = "vae.min_psnr=0"  # random images, and random VAEs
SHIPPED = ["vae.model=shipped:vae", "vae.dtype=float32", "vae.batch_size=8", NO_CHECK]
LABEL_RECIPE = ["images.resolution=32", *SHIPPED]
CAPTION_RECIPE = ['images.buckets=["48x80", "64x64", "80x48"]', "vae.batch_size=8", "text.batch_size=8", NO_CHECK]
TINY_SD3 = sd3.size(3, 2, 16, positions=16, dual=1)  # a block of each shape
FLOW = "objective.kind=flow"
ADAMW = "optimizer.name=adamw"  # as nearly all recipes; that of the demo takes Muon
TRAIN_RECIPE = ["run.steps=6", "run.global_batch=8", "run.precision=fp32", "run.log_every=1", "run.checkpoint_every=3"]
TRAIN_RECIPE += ["run.ema_decay=0.9", "optimizer.lr=1e-3"]


def smooth_image(seed: int, height_px: int = 40, width_px: int = 56) -> Image.Image:
    """A smooth random image, RGB."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (4, 5, 3), np.uint8))
    return coarse.resize((width_px, height_px), Image.Resampling.BICUBIC)


def image_bytes(seed: int = 0, height_px: int = 40, width_px: int = 56, kind: str = "PNG", **options: Any) -> bytes:
    """The file of a smooth random image."""
    return encoded(smooth_image(seed, height_px, width_px), kind, **options)


def make_class_folder(root: Path, *, classes: int = 3, per_class: int = 5) -> Path:
    """An image folder of PNGs."""
    for c in range(classes):
        folder = root / f"n{c:03d}"
        folder.mkdir(parents=True)
        for i in range(per_class):
            smooth_image(100 * c + i).save(folder / f"{i}.png")
    return root


def make_caption_folder(root: Path, *, count: int = 14) -> Path:
    """Images of three aspect ratios with a metadata.jsonl, two captions each, some captions shared."""
    (root / "images").mkdir(parents=True)
    shapes = ("circle", "square", "triangle")
    rows = []
    for i in range(count):
        smooth_image(i, *SIZES[i % 3]).save(root / f"images/{i}.png")
        captions = [f"a red {shapes[i % 3]}", f"a big blue {shapes[i % 3]} above a tiny green {shapes[i % 2]}"]
        rows.append({"file_name": f"images/{i}.png", "captions": captions})
    write_metadata(root, rows)
    return root


def read_metadata(root: Path) -> list[dict[str, Any]]:
    """The rows of the metadata.jsonl of a source."""
    return [json.loads(line) for line in (root / "metadata.jsonl").read_text().splitlines()]


def write_metadata(root: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Replace the metadata.jsonl of a source."""
    (root / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def add_image(root: Path, name: str, image: Image.Image, **row: Any) -> None:
    """Put an image into a source with a metadata.jsonl, and list it."""
    image.save(root / name)
    write_metadata(root, [*read_metadata(root), {"file_name": name} | row])


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


Leandit = Callable[..., Ended]


def no_progress(stage: str, done: int, total: int) -> None:
    """A progress callback that shows nothing."""


def label_recipe(*overrides: str) -> PrecomputeRecipe:
    """imagenet-256 at 32 px with the shipped VAE."""
    return load_precompute("imagenet-256", [*LABEL_RECIPE, *overrides])


def caption_recipe(*overrides: str) -> PrecomputeRecipe:
    """The demo's recipe with small batches."""
    return load_precompute("demo", [*CAPTION_RECIPE, *overrides])


def encode(
    recipe: PrecomputeRecipe,
    source: SourcePaths,
    store: Path,
    *,
    part: slice = ALL_SHARDS,
    progress: Progress = no_progress,
    **options: bool,
) -> Report:
    """Precompute a source into a store on a CPU, or let the store grow; ``options`` are those of growth."""
    where = {"source_path": source, "store_path": store, "device": CPU, "part": part}
    return precompute(recipe, **where, progress=progress, options=Options(**options))


def loaded_encoders(vae: VaeSection, text: Mapping[str, TextSection]) -> Encoders:
    """The encoders of a recipe, loaded once: that is most of a small precompute's second."""
    return load_once(PrecomputeRecipe(vae=vae, text=dict(text)).model_dump_json())


@functools.cache
def load_once(recipe: str) -> Encoders:
    """The encoders of a recipe in JSON."""
    return load_encoders(PrecomputeRecipe.model_validate_json(recipe), CPU)


FLOW_MODELS = ("flux1-tiny", "flux2-tiny", "qwen-image-tiny", "z-image-tiny")


def shrink_models(patch: pytest.MonkeyPatch) -> None:
    """Shrink DiT-S and the "-tiny" models to milliseconds a step."""
    patch.setitem(DIT_SIZES, "S", (2, 32, 2))
    patch.setattr(dit_dh, "HEAD", (1, 48, 2))
    patch.setitem(pixart.PixArt.sizes, "pixart-tiny", pixart.size(2, 2, 16))
    patch.setitem(sana.Sana.sizes, "sana-tiny", sana.size(2, 2, 16, 2, 16))
    patch.setitem(sd3.SD3.sizes, "sd3-tiny", TINY_SD3)
    patch.setitem(flux1.Flux1.sizes, "flux1-tiny", flux1.size(2, 2, 2, (4, 6, 6)))
    patch.setitem(flux2.Flux2.sizes, "flux2-tiny", flux1.size(2, 2, 2, (4, 4, 4, 4)))
    patch.setitem(qwen_image.QwenImage.sizes, "qwen-image-tiny", qwen_image.size(2, 2, (4, 6, 6)))
    patch.setitem(z_image.ZImage.sizes, "z-image-tiny", z_image.size(2, 2, (4, 6, 6), refiners=1))


def train_recipe(name: str = "dit-s-4", *overrides: str) -> TrainRecipe:
    """A recipe that trains in a second: a DiT with few tokens, or a small model of captions."""
    base = {
        "dit-s-4": ("dit-s-2-256", ["model.name=DiT-S/4", "model.num_classes=0", "run.compile=false"]),
        "dit-dh-s": ("dit-s-2-256", ["model.name=DiTDH-S/1", "model.num_classes=0", "run.compile=false", FLOW]),
        "pixart-tiny": ("demo", [ADAMW]),
        "sana-tiny": ("demo", [ADAMW, "model.name=sana-tiny"]),
        "sd3-tiny": ("demo", [ADAMW, "model.name=sd3-tiny"]),
        **{name: ("demo", [ADAMW, f"model.name={name}"]) for name in FLOW_MODELS},
        "dit-s-2-text": ("demo", [ADAMW, "model.name=DiT-S/2", "conditioning.kind=caption"]),
    }[name]
    return load_train(base[0], [*base[1], *TRAIN_RECIPE, *overrides])


def tree_digest(root: Path) -> dict[str, bytes]:
    """All files below a folder, by relative path."""
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def store_digest(root: Path) -> dict[str, bytes]:
    """All files of a store, by relative path, but those that differ between machines and moments."""
    return {name: content for name, content in tree_digest(root).items() if not name.endswith("/local.json")}


def lasting_digest(root: Path) -> dict[str, bytes]:
    """All files of a store that no later revision changes: all but ``zarr.json``, which tells the size of an array."""
    return {name: content for name, content in tree_digest(root).items() if not name.endswith("zarr.json")}


def latent_spec(kind: Any, dtype: str = "float16", *, shift: list[float], scale: list[float]) -> LatentSpec:
    """A spec of unflipped latents of 8 px, of one channel for each shift."""
    posterior, channels = kind in POSTERIORS, len(shift)
    stored = {"array": "moments", "stored_channels": 2 * channels} if posterior else {"array": "latents"}
    plain: dict[str, Any] = {"downscale": 8, "flip": False, "batch_size": 1, "tile_px": 0, "stored_channels": channels}
    return LatentSpec(**plain | stored, kind=kind, channels=channels, dtype=dtype, shift=shift, scale=scale)


SHARD_ROWS = 4  # of the arrays below
ARRAY_LAYOUTS = [
    ArrayLayout("a/b", (rows, 2, 3, 5), dtype, SHARD_ROWS, chunk_rows, codec)
    for codec in CODECS
    for dtype in ("float16", "float32")
    for rows in (8, 9, 3)  # full last shard, one row in the last, less than a shard
    for chunk_rows in (1, 2)
]
ARRAY_LAYOUTS += [
    ArrayLayout("n", (7,), "float32", 7, 7),
    ArrayLayout("n", (7, 3), "float16", 8, 4),
    ArrayLayout("n", (7, 3), "uint16", 8, 4),
    ArrayLayout("n", (7, 3), "int8", 8, 4),
    ArrayLayout("n", (7, 2, 3), "uint8", 8),
]


def small_array(codec: str = "none", rows: int = 10, chunk_rows: int = 1) -> ArrayLayout:
    """Layout of an array of three shards of four rows."""
    return ArrayLayout("a", (rows, 2, 3), "float16", SHARD_ROWS, chunk_rows, codec)


def array_values(layout: ArrayLayout) -> np.ndarray:
    """Numbers with a zero row and a row of the fill value, which a careless writer drops."""
    values = (100 * np.random.default_rng(0).standard_normal(layout.shape)).astype(layout.dtype)
    if len(values) > 2 and values.dtype.kind == "f":
        values[1], values[2] = 0, np.nan
    return values


def write_array(root: Path, layout: ArrayLayout, values: np.ndarray) -> ShardedArray:
    """Write an array as the store does."""
    write_atomic(root / layout.path / "zarr.json", canonical_json(layout.metadata()))
    for shard in layout.shards.tolist():
        rows = layout.rows_of(shard)
        write_atomic(root / layout.shard_path(shard), pack_shard(layout, values[rows.start : rows.stop]))
    return ShardedArray(ShardFolder(root), layout)


def write_array_with_zarr(
    root: Path, layout: ArrayLayout, values: np.ndarray, *, write_empty_chunks: bool = True
) -> None:
    """Let zarr-python write the same array, from the same zarr.json."""
    write_atomic(root / layout.path / "zarr.json", canonical_json(layout.metadata()))
    with zarr.config.set({"array.write_empty_chunks": write_empty_chunks}):
        array: Any = zarr.open_array(root / layout.path, mode="r+")
        array[:] = values


def crc32c(data: bytes) -> bytes:
    """By its definition (RFC 3720), bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return (crc ^ 0xFFFFFFFF).to_bytes(4, "little")


def all_commands(group: Any) -> dict[str, Any]:
    """Commands of a typer group by name, those of its sub-groups as "GROUP COMMAND"."""
    found = dict(group.commands)
    for name, command in group.commands.items():
        inner = all_commands(command) if hasattr(command, "commands") else {}
        found |= {f"{name} {inner_name}": each for inner_name, each in inner.items()}
    return found


def shaken(spec: ModelSpec, seed: int = 0) -> Any:
    """A model whose weights are moved."""
    return shake(build_model(spec, seed=seed), seed)


def shake(model: Any, seed: int = 0) -> Any:
    """A new model puts out zero; move its weights so that it does not."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


COMPANIONS = ("companions.copy.kind=image", "companions.edit.column=source image", "companions.mask.kind=mask")


def gray_mask(seed: int, height_px: int, width_px: int) -> Image.Image:
    """A mask of random greys, so that no two places of it are equal by chance."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height_px, width_px), np.uint8))


def make_companion_folder(root: Path, *, count: int = 8) -> Path:
    """``copy`` has the bytes of the image, ``source image`` twice its size, ``mask`` 3/4 of it."""
    make_caption_folder(root, count=count)
    for folder in ("copies", "edits", "masks"):
        (root / folder).mkdir()
    rows = read_metadata(root)
    for i, row in enumerate(rows):
        height_px, width_px = SIZES[i % 3]
        shutil.copyfile(root / f"images/{i}.png", root / f"copies/{i}.png")
        smooth_image(100 + i, 2 * height_px, 2 * width_px).save(root / f"edits/{i}.png")
        gray_mask(200 + i, height_px * 3 // 4, width_px * 3 // 4).save(root / f"masks/{i}.png")
        row |= {"copy": f"copies/{i}.png", "source image": f"edits/{i}.png", "mask": f"masks/{i}.png"}
    write_metadata(root, rows)
    return root


def cut(path: Path, num_bytes: int = 1) -> None:
    """Cut some bytes off the end of a file."""
    os.truncate(path, path.stat().st_size - num_bytes)


IMAGE_NAMES = ("a.jpg", "b.jpg", "c.jpg")


def write_file(path: Path, content: bytes | str = b"") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def make_image_folder(folder: Path, *names: str) -> Path:
    for i, name in enumerate(names or IMAGE_NAMES):
        write_file(folder / name, image_bytes(i, 8, 8, "JPEG"))
    return folder


def bytes_of(source: Source, record: SourceRecord) -> bytes:
    """The file of a record's image."""
    return source.read(record.path, record.offset, record.num_bytes, stage="decode")


@contextmanager
def no_free_files() -> Iterator[None]:
    """No further file can be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # those below are open already
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def set_json(name: str, **values: Any) -> Callable[[Path], Any]:
    """A change of a folder: other values in a JSON file; ``...`` leaves one out."""

    def change(folder: Path) -> None:
        said = json.loads((folder / name).read_text()) | values
        (folder / name).write_text(json.dumps({key: value for key, value in said.items() if value is not ...}))

    return change


def drop_files(*names: str) -> Callable[[Path], Any]:
    """A change of a folder: some files are gone."""
    return lambda folder: [(folder / name).unlink() for name in names]


def summary_of(source: Source) -> list[tuple[str, str, int, tuple[str, ...]]]:
    """Key, path, label and captions of the good records, or the reason of a reject."""
    return [
        (r.key, r.problem[0], -1, ()) if r.problem else (r.key, r.path, r.label, r.captions) for r in source.records
    ]


def write_tar(path: Path, *samples: dict[str, Any]) -> Path:
    import webdataset

    with webdataset.TarWriter(str(path)) as tar:
        for sample in samples:
            tar.write(sample)
    return path
