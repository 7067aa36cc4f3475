"""Small features as other programs write them, and what must be found of them in a store."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import xxhash
from making import no_progress, write_file
from safetensors.torch import save_file

from leandit.datasets.store import LatentStore
from leandit.precompute.importing.pipeline import ImportReport, import_features
from leandit.precompute.importing.recipe import load

COUNT = 11
SIDE = 8  # places of a latent


@dataclass(frozen=True)
class Expected:
    """One record: its arrays in the dtype of the source, its label, its captions by text: tokens, or by encoder."""

    arrays: list[np.ndarray]
    label: int = -1
    captions: Mapping[str, np.ndarray | dict[str, np.ndarray]] = field(default_factory=dict)
    size: tuple[int, int] | None = None


@dataclass(frozen=True)
class Made:
    """A source: where it lies, its records by key in the order of import, and what the command needs for it."""

    kind: str
    source: Path
    records: dict[str, Expected]
    settings: list[str] = field(default_factory=list)
    null: str | None = None
    null_rows: np.ndarray | dict[str, np.ndarray] | None = None


def noise(seed: int, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Numbers that no two records share."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def make_fast_dit(root: Path) -> Made:
    """extract_features.py of fast-DiT: two files a record, named by its number, arrays with a batch of one."""
    for name in ("imagenet256_features", "imagenet256_labels"):
        (root / name).mkdir(parents=True)
    records = {}
    for i in range(COUNT):
        latent, label = noise(i, 1, 4, SIDE, SIDE), 7 * i % 5
        np.save(root / f"imagenet256_features/{i}.npy", latent)
        np.save(root / f"imagenet256_labels/{i}.npy", np.array([label]))
        records[str(i)] = Expected([latent[0]], label)
    return Made("fast-dit", root, records)


def make_mar(root: Path) -> Made:
    """main_cache.py of MAR: a tree of the classes, one .npz an image."""
    records = {}
    for i in range(COUNT):
        label = i * 3 // COUNT
        key = f"n0{label}/n0{label}_{100 - i}.JPEG"
        moments = [noise(2 * i + flip, 32, SIDE, SIDE) for flip in (0, 1)]
        (root / key).parent.mkdir(parents=True, exist_ok=True)
        np.savez(root / f"{key}.npz", moments=moments[0], moments_flip=moments[1])
        records[key] = Expected(moments, label)
    return Made("mar", root, dict(sorted(records.items())))


def make_lightningdit(root: Path, dtype: torch.dtype = torch.float32) -> Made:
    """extract_features.py of LightningDiT: shards of each rank, and the statistics of the channels."""
    root.mkdir(parents=True)
    records = {}
    for rank, start in enumerate(range(0, COUNT, 4)):
        rows = range(start, min(start + 4, COUNT))
        arrays = [torch.from_numpy(np.stack([noise(2 * i + f, 32, SIDE, SIDE) for i in rows])) for f in (0, 1)]
        latents, flipped = (array.to(dtype) for array in arrays)
        labels, name = torch.tensor([i % 5 for i in rows]), f"latents_rank{rank:02d}_shard000"
        save_file(
            {"latents": latents, "latents_flip": flipped, "labels": labels},
            root / f"{name}.safetensors",
            {"total_size": str(len(rows)), "dtype": str(dtype)},
        )
        for row, i in enumerate(rows):
            found = [array[row].float().numpy() for array in (latents, flipped)]
            records[f"{name}/{row}"] = Expected(found, i % 5)
    mean, std = torch.linspace(-1, 1, 32).view(1, -1, 1, 1), torch.linspace(0.5, 3, 32).view(1, -1, 1, 1)
    torch.save({"mean": mean, "std": std}, root / "latents_stats.pt")
    return Made("lightningdit", root, records)


def write_zip(path: Path, members: Mapping[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as packed:
        for name, content in members.items():
            packed.writestr(name, content)


def make_edm2(root: Path, *, folder: bool = False) -> Made:
    """dataset_tool.py encode of EDM2: members of a ZIP that is not compressed, and labels."""
    root.mkdir(parents=True)
    records, labels, members = {}, [], {}
    for i in range(COUNT):
        mean, std = noise(2 * i, 4, SIDE, SIDE), abs(noise(2 * i + 1, 4, SIDE, SIDE))
        key, stream = f"{i // 10:05d}/img-mean-std-{i:08d}", io.BytesIO()
        np.save(stream, np.concatenate([mean, std]))
        members[f"{key}.npy"] = stream.getvalue()
        labels.append([f"{key}.npy", i % 4])
        records[key] = Expected([np.concatenate([mean, std])], i % 4)
    members["dataset.json"] = json.dumps({"labels": labels}).encode()
    if folder:
        for name, content in members.items():
            write_file(root / name, content)
        return Made("edm2", root, records)
    write_zip(root / "latents.zip", members)
    return Made("edm2", root / "latents.zip", records)


def make_pixart(root: Path, *, padded: int = 12, width: int = 16) -> Made:
    """PixArt-Sigma's extract_features.py: moments by shape, embeddings padded to one length, data_info.json."""
    data = root / "InternData"
    latents, captions = data / "img_sdxl_vae_features_512resolution_ms_new", data / "caption_features_new"
    for folder in (latents, captions):
        folder.mkdir(parents=True)
    records, listed = {}, []
    for i in range(COUNT):
        height, width_places = ((8, 8), (4, 12), (12, 4))[i % 3]
        mean, std = noise(2 * i, 4, height, width_places), abs(noise(2 * i + 1, 4, height, width_places))
        moments = np.concatenate([mean, std]).astype(np.float16)
        key, text = f"set{i % 2}/{i:05d}.png", f"an image of {i % 7} things"
        feature = noise(100 + i % 7, 1, padded, width, dtype=np.float16)
        mask = (np.arange(padded) < 2 + i % 7).astype(np.int16)[None]
        stem = "_".join(key.rsplit("/", 1)).removesuffix(".png")
        np.save(latents / f"{stem}.npy", moments)
        np.savez_compressed(captions / f"{stem}.npz", caption_feature=feature, attention_mask=mask)
        size = (600 + i, 500 - i)
        listed.append({"path": key, "prompt": text, "height": size[0], "width": size[1], "ratio": size[0] / size[1]})
        records[key] = Expected([moments], -1, {text: feature[0, : 2 + i % 7]}, size)
    (data / "data_info.json").write_text(json.dumps(listed))
    null = noise(99, 1, padded, width)
    np.save(root / "null.npy", null)
    return Made("pixart", root, records, [], str(root / "null.npy"), null[0].astype(np.float16))


def make_mds(root: Path) -> Made:
    """mosaicml-streaming 0.13's layout of micro_diffusion's columns, byte by byte; compared by hand with its own."""
    root.mkdir(parents=True)
    names, sizes = ["caption", "caption_latents", "label", "latents_256", "mask"], [None, None, 8, None, None]
    encodings = ["str", "ndarray:float16", "int64", "bytes", "ndarray:int16:12"]
    shards, records = [], {}
    for number, start in enumerate(range(0, COUNT, 4)):
        samples = []
        for row, i in enumerate(range(start, min(start + 4, COUNT))):
            latent, feature = noise(i, 4, SIDE, SIDE, dtype=np.float16), noise(100 + i % 7, 12, 16, dtype=np.float16)
            text, mask = f"a picture of {i % 7} things", (np.arange(12) < 2 + i % 7).astype(np.int16)
            shape = bytes([2 << 2, *feature.shape])  # two sides, of a byte each
            values = [text.encode(), shape + feature.tobytes(), np.int64(i % 5).tobytes(), latent.tobytes()]
            values.append(mask.tobytes())
            varying = [len(value) for value, size in zip(values, sizes, strict=True) if size is None]
            samples.append(np.array(varying, np.uint32).tobytes() + b"".join(values))
            records[f"shard.{number:05d}/{row}"] = Expected([latent], i % 5, {text: feature[: 2 + i % 7]})
        about = b"whatever the writer says of itself"
        offsets = 4 * (len(samples) + 2) + len(about) + np.cumsum([0, *map(len, samples)])
        content = np.uint32(len(samples)).tobytes() + offsets.astype(np.uint32).tobytes() + about + b"".join(samples)
        name, zipped = f"shard.{number:05d}.mds", None
        if number == 1:
            zipped = {"basename": f"{name}.zstd", "bytes": 0, "hashes": {}}
            (root / f"{name}.zstd").write_bytes(pa.compress(content, "zstd", asbytes=True))
        else:
            (root / name).write_bytes(content)
        said = {"column_names": names, "column_encodings": encodings, "column_sizes": sizes, "format": "mds"}
        said |= {"compression": zipped and "zstd:3", "samples": len(samples), "version": 2, "zip_data": zipped}
        shards.append(said | {"raw_data": {"basename": name, "bytes": len(content), "hashes": {}}})
    (root / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    settings = ["vae.scale=[0.13025]", "layout.mask=mask"]
    return Made("mds", root, records, settings, "zeros", np.zeros((12, 16), np.float16))


def bfloat16(array: np.ndarray) -> torch.Tensor:
    """The nearest numbers of bfloat16."""
    return torch.from_numpy(array).to(torch.bfloat16)


def npy_of_bits(tensor: torch.Tensor) -> bytes:
    """A .npy file of the bits of bfloat16, as preprocess_flux_dataset.py of torchtitan's MLPerf branch stores it."""
    stream = io.BytesIO()
    np.save(stream, tensor.view(torch.uint16).numpy())
    return stream.getvalue()


def make_mlperf_flux(root: Path, *, columns: Mapping[str, list[Any]] | None = None) -> Made:
    """preprocess_flux_dataset.py of torchtitan's MLPerf branch, and ``save_to_disk``; a T5 of 6 tokens.

    Args:
      columns: others, as a list of the value of each record.
    """
    root.mkdir(parents=True)
    rows, records = [], {}
    for i in range(COUNT):
        mean, logvar = bfloat16(noise(2 * i, 16, SIDE, SIDE)), bfloat16(noise(2 * i + 1, 16, SIDE, SIDE))
        t5, clip = bfloat16(noise(100 + i % 7, 6, 16)), bfloat16(noise(200 + i % 7, 8))
        cells = {"t5_encodings": t5, "clip_encodings": clip, "mean": mean, "logvar": logvar}
        key = f"{i:09d}"
        rows.append({"__key__": key} | {name: npy_of_bits(tensor) for name, tensor in cells.items()})
        rows[-1] |= {name: values[i] for name, values in (columns or {}).items()}
        encoders = {"clip": clip.float().numpy(), "t5": t5.float().numpy()}
        digest = xxhash.xxh3_128(b"".join(one.tobytes() for one in encoders.values())).hexdigest()
        moments = torch.cat([mean, logvar]).float().numpy()
        records[key] = Expected([moments], -1, {f"embedding {digest}": encoders})
    table, names = pa.Table.from_pylist(rows), []
    for number, start in enumerate(range(0, COUNT, 6)):
        names.append(f"data-{number:05d}-of-00002.arrow")
        with pa.OSFile(str(root / names[-1]), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table.slice(start, 6), max_chunksize=4)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", "_format_columns": None}
    state |= {"_format_kwargs": {}, "_format_type": None, "_output_all_columns": False, "_split": "train"}
    (root / "state.json").write_text(json.dumps(state))
    empty = root / "empty_encodings"
    empty.mkdir()
    null = {"clip": noise(300, 1, 8, dtype=np.float16), "t5": noise(301, 1, 6, 16, dtype=np.float16)}
    for name, values in null.items():
        np.save(empty / f"{name}_empty.npy", values)
    # Numbers of float16 in bfloat16, as the captions.
    nulls = {name: bfloat16(values[0].astype(np.float32)).float().numpy() for name, values in null.items()}
    return Made("mlperf-flux", root, records, [], str(empty), nulls)


NEMO_SIZES = ((64, 64), (96, 32), (32, 96))  # (width_px, height_px) of buckets


def make_nemo(root: Path, model: str = "flux") -> Made:
    """preprocessing_multiprocess.py of NeMo AutoModel: a file of tensors an image, listed with absolute paths."""
    root.mkdir(parents=True)
    records, listed = {}, []
    downscale, channels = (16, 128) if model == "flux2" else (8, 16)
    for i in range(COUNT):
        width_px, height_px = NEMO_SIZES[i % 3]
        latent = noise(i, channels, height_px // downscale, width_px // downscale, dtype=np.float16)
        text, length = f"an image of {i % 7} things", 2 + i % 7 if model == "qwen_image" else 6
        tokens, pooled = bfloat16(noise(100 + i % 7, 1, length, 16)), bfloat16(noise(200 + i % 7, 1, 8))
        name, tensors = f"{width_px}x{height_px}/{i:032x}", {"latent": torch.from_numpy(latent)}
        if model == "flux":
            tensors |= {name: torch.zeros(1, 77, dtype=torch.long) for name in ("clip_tokens", "t5_tokens")}
            tensors |= {"pooled_prompt_embeds": pooled, "clip_hidden": bfloat16(noise(0, 1, 77, 8))}
        tensors |= {"prompt_embeds": tokens[0].half() if model == "flux2" else tokens}
        original = (700 + i, 500 - i)
        said = {"original_resolution": original, "bucket_resolution": (width_px, height_px), "prompt": text}
        said |= {"image_path": f"/elsewhere/{i}.png", "bucket_id": "square", "aspect_ratio": 1.0, "model_type": model}
        (root / name).parent.mkdir(exist_ok=True)
        torch.save(tensors | said | {"crop_offset": (0, 3)}, root / f"{name}.pt")
        listed.append(said | {"cache_file": f"/elsewhere/cache/{name}.pt", "pixels": width_px * height_px})
        rows = tokens[0].float().numpy().astype(np.float16 if model == "flux2" else np.float32)
        embeddings = {_NEMO_TEXTS[model]: rows}
        if model == "flux":
            embeddings = {"clip": pooled[0].float().numpy()} | embeddings
        records[name] = Expected([latent], -1, {text: embeddings}, original[::-1])
    shards = [f"metadata_shard_{number:04d}.json" for number in range(2)]
    for number, name in enumerate(shards):
        (root / name).write_text(json.dumps(listed[6 * number : 6 * number + 6], indent=2))
    about = {"processor": model, "model_name": "someone/a-model", "model_type": model, "total_items": COUNT}
    about |= {"num_shards": 2, "shard_size": 6, "shards": shards, "caption_field": "internvl", "max_pixels": 4096}
    (root / "metadata.json").write_text(json.dumps(about, indent=2))
    nulls = {name: np.zeros_like(values) for name, values in embeddings.items()}
    return Made("nemo", root, records, [], "zeros", nulls)


_NEMO_TEXTS = {"flux": "t5", "flux2": "mistral", "qwen_image": ""}


MAKERS: dict[str, Callable[[Path], Made]] = {
    "fast-dit": make_fast_dit,
    "mar": make_mar,
    "lightningdit": make_lightningdit,
    "edm2": make_edm2,
    "pixart": make_pixart,
    "mds": make_mds,
    "mlperf-flux": make_mlperf_flux,
    "nemo": make_nemo,
}


class Evil:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (open, (str(self.mark), "w"))


def rejects(store: LatentStore) -> dict[str, tuple[str, str]]:
    """Stage and reason of each reject, by key."""
    return {
        row["key"]: (row["stage"], row["reason"]) for row in store.records.to_pylist() if row["status"] == "rejected"
    }


def without(made: Made, *keys: str) -> dict[str, Expected]:
    """The records of a source but some."""
    return {key: expected for key, expected in made.records.items() if key not in keys}


def run_import(made: Made, store: Path, *overrides: str) -> ImportReport:
    """Import a source."""
    settings = load([*made.settings, *overrides])
    return import_features(
        made.kind, settings, source_path=made.source, store_path=store, progress=no_progress, null=made.null
    )


def imported(root: Path, make: Callable[..., Made], *overrides: str, **how: Any) -> tuple[Made, LatentStore]:
    """Make a source in a folder, and import it."""
    made = make(root / "source", **how)
    run_import(made, root / "store", *overrides)
    return made, LatentStore(root / "store")


def by_encoder(values: np.ndarray | dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What each text encoder gave for a caption, by its name."""
    return values if isinstance(values, dict) else {"": values}


def assert_has_null(store: LatentStore, made: Made) -> None:
    """A store holds the null caption of a source, if it has one."""
    for name, values in by_encoder(made.null_rows).items() if made.null_rows is not None else ():
        stored = store.text(name).null if values.ndim == 2 else store.text(name).null_pooled
        np.testing.assert_array_equal(stored, values)


def assert_holds(store: LatentStore, records: Mapping[str, Expected], dtype: str | None = None) -> None:
    """A store holds just these records, number for number."""
    table = store.records.to_pylist()
    assert [row["key"] for row in table if row["status"] == "stored"] == list(records)
    for row in table:
        if row["status"] != "stored":
            continue
        wanted = records[row["key"]]
        found = [store.latents(row["bucket"])[row["row"]]]
        if store.spec.latent.flip:
            found.append(store.latents(row["bucket"], flipped=True)[row["row"]])
        assert len(found) == len(wanted.arrays)
        for one, array in zip(found, wanted.arrays, strict=True):
            assert one.dtype == (dtype or array.dtype)
            np.testing.assert_array_equal(one, array.astype(one.dtype))
        assert row["label"] == wanted.label
        texts = [store.captions["text"][caption].as_py() for caption in row["caption_ids"]]
        assert texts == list(wanted.captions)
        for caption, tokens in zip(row["caption_ids"], wanted.captions.values(), strict=True):
            for name, values in by_encoder(tokens).items():
                of_encoder = store.text(name)
                stored = of_encoder[caption] if values.ndim == 2 else of_encoder.pooled_vector(caption)
                assert stored.dtype == (dtype or values.dtype)
                np.testing.assert_array_equal(stored, values.astype(stored.dtype))
        if wanted.size:
            assert (row["height_px"], row["width_px"]) == wanted.size
