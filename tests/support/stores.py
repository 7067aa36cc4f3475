"""Stores for tests and what is in them: of one or several revisions, of several encoders, of noise."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from making import (
    CPU,
    SIZES,
    caption_recipe,
    cut,
    encode,
    load_once,
    loaded_encoders,
    no_progress,
    smooth_image,
    write_metadata,
)
from noise_store import make_store

from leandit.datasets.disk.hashing import canonical_json
from leandit.datasets.format.layout import CaptionLayout
from leandit.datasets.format.schema import TextSpec
from leandit.datasets.loader import make_loader
from leandit.datasets.maintenance.verify import Verification
from leandit.datasets.revisions.local import read_local_file
from leandit.datasets.store import LatentStore
from leandit.precompute.config import PrecomputeRecipe
from leandit.precompute.remake import DeepReport, deep_check
from leandit.precompute.sources.several import SourcePaths
from leandit.tools.inspection.verify import check, loaded_runner

SHARD_ROWS = 2  # so that a store of a dozen images has a dozen shards


@contextmanager
def small_shards() -> Iterator[None]:
    """Shards of two rows, encoders that are loaded once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("leandit.datasets.format.row_layout.MAX_SHARD_ROWS", SHARD_ROWS)
        for module in ("pipeline", "encoders.loading"):
            patch.setattr(f"leandit.precompute.{module}.load_encoders", _cached_encoders)
        yield


def _cached_encoders(recipe: PrecomputeRecipe, _device: object) -> Any:
    if not (any(recipe.text) or recipe.features or recipe.companions):
        return loaded_encoders(recipe.vae, recipe.text)
    return load_once(recipe.model_dump_json())


class ImageSource:
    """A source of captioned images that can be changed; two of its records are rejected, at scan and at decode.

    Args:
      count: of good images.
      sizes: height and width in px of the images, in turn.
    """

    def __init__(self, root: Path, count: int = 10, sizes: Sequence[tuple[int, int]] = SIZES) -> None:
        self.root, self._lines, self._sizes = root, {}, sizes
        (root / "images").mkdir(parents=True)
        for i in range(count + 2):
            self.put(i)
        (root / f"images/{count}.png").write_bytes(b"no image")
        cut(root / f"images/{count + 1}.png", (root / f"images/{count + 1}.png").stat().st_size // 2)
        self.write()

    def put(self, i: int, *, seed: int | None = None, words: str = "") -> None:
        """Add an image, or change it or its captions."""
        smooth_image(i if seed is None else seed, *self._sizes[i % len(self._sizes)]).save(
            self.root / f"images/{i}.png"
        )
        self.describe(i, words)

    def describe(self, i: int, words: str) -> None:
        """Change the captions of an image."""
        self._lines[i] = [f"a red {('circle', 'square')[i % 2]}", f"a big blue circle above a tiny green square{words}"]

    def drop(self, i: int) -> None:
        """Remove an image."""
        (self.root / f"images/{i}.png").unlink()
        del self._lines[i]

    def write(self) -> None:
        """Write the metadata."""
        rows = ({"file_name": f"images/{i}.png", "captions": texts} for i, texts in self._lines.items())
        write_metadata(self.root, rows)


def make_plain(root: Path, *overrides: str) -> tuple[ImageSource, Path]:
    """A source and its store of one revision."""
    images = ImageSource(root / "source")
    encode(caption_recipe(*overrides), images.root, root / "store")
    return images, root / "store"


def make_grown(root: Path, *overrides: str) -> tuple[ImageSource, Path]:
    """A source and its store of three revisions: new, changed and dropped images, other captions."""
    images, store = make_plain(root, *overrides)
    images.drop(0)
    images.put(1, seed=101)
    for i in (20, 21, 22):
        images.put(i, words=" and a yellow star")
    images.write()
    encode(caption_recipe(*overrides), images.root, store, drop_gone=True)
    images.put(3, words=" and a white triangle")
    images.put(23)
    images.drop(4)
    images.write()
    encode(caption_recipe(*overrides), images.root, store, drop_gone=True)
    return images, store


def make_added(root: Path, *overrides: str) -> tuple[ImageSource, Path]:
    """A source and its store of three revisions, of which every image is still there."""
    images, store = make_plain(root, *overrides)
    for first in (20, 30):
        for i in range(first, first + 3):
            images.put(i, words=f" and {first} yellow stars")
        images.write()
        encode(caption_recipe(*overrides), images.root, store)
    return images, store


def rewrite_recipe(store: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the recipe that a store of one revision names, in ``local.json`` and its second copy."""
    folder = store / "revisions/000001"
    local = read_local_file(store, 1)
    change(local.recipe)
    for path in (folder / "local.json", folder / "twin/local.json"):
        path.write_bytes(canonical_json(local.with_hash().model_dump()))


def copy_of(store: Path, to: Path) -> Path:
    """A copy of a store, in place of what is there."""
    shutil.rmtree(to, ignore_errors=True)
    return shutil.copytree(store, to)


def files_of(root: Path) -> list[str]:
    """Relative paths of all files, sorted."""
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def checked(
    root: Path, source: SourcePaths | None = None, *overrides: str, deep: bool = False, repair: bool = False
) -> tuple[Verification, dict[str, Any]]:
    """``leandit verify``, with --deep or --repair, on a CPU."""
    how: dict[str, Any] = {"quick": False, "device": lambda: CPU, "overrides": list(overrides), "progress": no_progress}
    return check(root, deep=deep, repair=repair, source=source, **how)


def deep(root: Path, source: SourcePaths, **options: int) -> DeepReport:
    """What a deep check finds; of a small store, every record."""
    with loaded_runner(root, source, CPU, []) as runner:
        return deep_check(root, runner, **{"num_records": 64, "seed": 0} | options)


def content(store: LatentStore) -> dict[str, Any]:
    """All that a store says and holds of its records, by key, but revisions and rows."""
    found = {}
    texts = store.captions["text"].to_pylist() if store.spec.text_encoders else []
    for i, row in enumerate(store.records.to_pylist()):
        record, rows = store.record_at(i), {}
        if record.status == "stored":
            paths = [path for path in store.layouts if path.startswith(f"buckets/{record.bucket}/")]
            rows = {path: store.array(path)[record.row].tobytes() for path in paths}
        said = {k: v for k, v in row.items() if k not in ("revision", "row", "caption_ids")}
        found[record.key] = said, rows, {texts[j]: embeddings(store, j) for j in record.caption_ids}
    return found


def bytes_in(part: Any) -> Iterator[bytes]:
    """The bytes of every tensor of a batch."""
    if isinstance(part, torch.Tensor):
        yield part.contiguous().view(torch.uint8).numpy().tobytes() if part.numel() else b""
    elif isinstance(part, dict):
        for one in part.values():
            yield from bytes_in(one)
    elif is_dataclass(part):
        for one in fields(part):
            yield from bytes_in(getattr(part, one.name))


def embeddings(store: LatentStore, caption: int) -> list[bytes]:
    """What each text encoder gave for a caption: tokens, a pooled vector, or both."""
    found: list[bytes] = []
    for one in store.spec.text_encoders:
        text = store.text(one.name)
        found += [text[caption].tobytes()] if one.spec.output != "pooled" else []
        found += [text.pooled_vector(caption).tobytes()] if one.spec.output != "tokens" else []
    return found


def read_all(root: Path) -> dict[str, Any]:
    """Read a store as training does, and as tools do: all records, the null caption, a loader over an epoch."""
    store = LatentStore(root)
    loader = make_loader(store, global_batch=4, seed=1)
    with closing(loader.dataset):  # no thread reads on in what is cut next
        read = [(batch.latents, batch.labels, batch.captions, batch.caption_lengths) for batch in loader]
    batches = [tuple(part.numpy().tobytes() for part in parts) for parts in read]
    null = store.null_caption.tobytes() if store.spec.text else b""
    return {"content": content(store), "null": null, "batches": batches, "buckets": store.buckets}


BASE = ("vae.flip=true", "vae.batch_size=4", "store.text_dtype=int8")


class Everything(NamedTuple):
    """A source and stores of it: of two revisions, with encoders added, grown; ``source_then``: before it grew."""

    source: Path
    source_then: Path
    before: Path
    added: Path
    grown: Path
    first: PrecomputeRecipe
    recipe: PrecomputeRecipe


@contextmanager
def several_shards() -> Iterator[None]:
    """Shards of two images, of two captions of full length, and of 32 tokens of other ones."""
    shard_rows = CaptionLayout._shard_rows

    def small(self: CaptionLayout) -> tuple[int, int]:
        return shard_rows(self) if self.spec.full_length else (32, 8)

    with small_shards(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(CaptionLayout, "_shard_rows", small)
        yield


def make_models(root: Path) -> None:
    """Tiny random models, each in a folder of its name."""
    from tiny_models import make_dinov2, save_clip, save_qwen3  # their classes take seconds to import

    save_clip(root / "clip", projected=True)
    save_qwen3(root / "qwen3")
    make_dinov2(root / "dinov2")
    make_dinov2(root / "wide", width=12)


def recipes(models: Path, *overrides: str) -> tuple[PrecomputeRecipe, PrecomputeRecipe]:
    """Two recipes: T5, tokens and pooled vectors of a CLIP, and DINOv2 in int8; with three kinds of each more.

    The second adds a CLIP's pooled vectors alone, a language model's tokens, patches in float16, class tokens in int8.
    """
    folders = ("subfolder=text_encoder", "tokenizer_subfolder=tokenizer")

    def text(name: str, kind: str, model: str, *settings: str) -> list[str]:
        return [f"text.{name}.{one}" for one in (f"kind={kind}", f"model={models / model}", *folders, *settings)]

    def feature(name: str, model: str, output: str, dtype: str, *settings: str) -> list[str]:
        found = (f"model={models / model}", f"output={output}", f"dtype={dtype}", *settings)
        return [f"features.{name}.{one}" for one in found]

    first = [
        *BASE,
        *text("pair", "clip", "clip", "output=both", "full_length=true", "max_tokens=60"),
        *feature("dino", "dinov2", "both", "int8"),
    ]
    more = [
        *text("vector", "clip", "clip", "output=pooled", "max_tokens=60"),
        *text("llm", "causal_lm", "qwen3", "max_tokens=24", "layers=[-2]"),
        *feature("grid", "wide", "patches", "float16", "layer=1"),
        *feature("token", "dinov2", "cls", "int8"),
    ]
    return caption_recipe(*first, *overrides), caption_recipe(*first, *more, *overrides)


def everything_in(root: Path, *overrides: str) -> Everything:
    """What ``make_everything`` made in a folder."""
    stores = root / "stores"  # not beside the models, so that a copy elsewhere finds them
    paths = root / "source", root / "source then", stores / "before", stores / "added", stores / "grown"
    return Everything(*paths, *recipes(root / "models", *overrides))


def make_everything(root: Path, *overrides: str, count: int = 7) -> Everything:
    """Make the source and the stores, of several shards each."""
    made = everything_in(root, *overrides)
    first, recipe, stores = made.first, made.recipe, made.added.parent
    make_models(root / "models")
    with several_shards():
        images = ImageSource(root / "source", count)
        for i in range(count):
            images.put(i, words=(" by the sea", " and a cat", " and two dogs")[i % 3])
        images.write()
        encode(first, images.root, stores / "before")
        images.put(1, seed=101)
        for i in (20, 21):
            images.put(i, words=" and a yellow star")
        images.write()
        encode(first, images.root, stores / "before")
        shutil.copytree(images.root, root / "source then", copy_function=shutil.copy2)
        shutil.copytree(stores / "before", stores / "added")
        encode(recipe, images.root, stores / "added")
        shutil.copytree(stores / "added", stores / "grown")
        images.put(0, seed=100)
        images.put(22, words=" and a white star")
        images.drop(3)
        images.write()
        encode(recipe, images.root, stores / "grown", drop_gone=True)
    return made


FOUR_STAGES = {"block_out_channels": (8, 8, 8, 8), "layers_per_block": 1, "norm_num_groups": 4, "latent_channels": 16}


def text_spec(kind: str, tokens: int, width: int, pooled_width: int = 0, *, full_length: bool = True) -> TextSpec:
    plain: dict[str, Any] = {"kind": kind, "dtype": "float16", "template": "", "batch_size": 1}
    plain |= {"output": "both" if pooled_width else "tokens", "pooled_width": pooled_width}
    plain |= {"full_length": full_length, "attend_padding": full_length and kind == "t5"}
    return TextSpec(width=width, max_tokens=tokens, **plain)


TEXTS = {"clip_l": text_spec("clip", 7, 8, 6), "clip_g": text_spec("clip", 7, 12, 10), "t5": text_spec("t5", 9, 32)}


def noise_store(path: Path, *, channels: int = 4, texts: dict[str, TextSpec] = TEXTS) -> LatentStore:
    """15 records of 64 px in two buckets, with five captions."""
    buckets = {"64x64": 9, "48x80": 6}
    make_store(path, buckets, channels=channels, num_classes=0, token_counts=[9] * 5, text_width=0, texts=texts, seed=3)
    return LatentStore(path)


def encoder_recipe(models: Path) -> PrecomputeRecipe:
    """Tiny encoders in a folder, and the recipe with them."""
    from tiny_autoencoders import save_autoencoder  # they import models for seconds
    from tiny_models import save_clip, save_t5

    save_clip(models / "clip_l", projected=True)
    save_clip(models / "clip_g", projected=True, pad="!", seed=9)
    save_t5(models / "t5")
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    save_autoencoder(models / "vae", "kl", **FOUR_STAGES, **blocks, scaling_factor=1.5305, shift_factor=0.0609)
    places = ("subfolder=text_encoder", "tokenizer_subfolder=tokenizer", "full_length=true", "dtype=float32")
    of_each = {
        "clip_l": ("kind=clip", "output=both", "max_tokens=77"),
        "clip_g": ("kind=clip", "output=both", "max_tokens=77"),
        "t5": ("kind=t5", "attend_padding=true", "max_tokens=24"),
    }
    settings = {name: (f"model={models / name}", *places, *own) for name, own in of_each.items()}
    texts = [f"text.{name}.{setting}" for name, own in settings.items() for setting in own]
    vae = (f"vae.model={models / 'vae'}", "vae.dtype=float32")
    return caption_recipe("text.kind=none", *vae, *texts, "store.text_dtype=float32")
