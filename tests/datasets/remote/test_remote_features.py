"""A store of several text encoders and features at a URL: its batches are those of the local one, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from everything import Everything
from making import tree_digest
from s3_server import s3_server

from leandit.datasets.loader import make_loader
from leandit.datasets.maintenance.remote_verify import verify_remote
from leandit.datasets.remote.cache import is_shard
from leandit.datasets.store import LatentStore


def bits(value: Any) -> Any:
    """All tensors of a batch as bytes, by field."""
    if isinstance(value, torch.Tensor):
        return (value.dtype, tuple(value.shape), value.contiguous().view(torch.uint8).numpy().tobytes())
    if isinstance(value, dict):
        return {name: bits(one) for name, one in value.items()}
    if is_dataclass(value):
        return {field.name: bits(getattr(value, field.name)) for field in fields(value)}
    return value


@pytest.fixture
def url(kind: str, tmp_path: Path) -> Iterator[str]:
    """Where the store is put."""
    if kind == "file":
        yield f"file://{tmp_path}/origin"
        return
    with s3_server("everything") as bucket:
        yield f"{bucket}/store"


@pytest.mark.parametrize("kind", ["file", pytest.param("s3", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("is_tight", "text"), [(False, "padded"), (True, "packed")], ids=["roomy", "tight"])
def test_batches_of_a_store_at_a_url_have_the_features_and_texts_of_the_local_one(
    is_tight: bool, text: Any, url: str, everything: Everything, tmp_path: Path
) -> None:
    fs, root = fsspec.core.url_to_fs(url)
    for name, content in tree_digest(everything.grown).items():
        fs.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
        fs.pipe_file(f"{root}/{name}", content)
    local = LatentStore(everything.grown)
    assert local.manifest is not None
    sizes = [entry.bytes for entry in local.manifest.files if is_shard(entry)]
    capacity = 3 * max(sizes) if is_tight else 10**9
    away = LatentStore(url, remote={"folder": tmp_path / "l", "capacity_gib": capacity / 2**30})
    assert away.remote is not None
    num_batches = 0
    for batch, wanted in zip(
        *(make_loader(store, global_batch=4, seed=3, text=text) for store in (away, local)), strict=True
    ):
        assert set(batch.texts) == {"", "pair", "vector", "llm"}
        assert set(batch.features) == {"dino", "grid", "token"}
        assert bits(batch) == bits(wanted)
        for name, feature in batch.features.items():
            for output in ("patches", "cls"):
                assert bits(getattr(feature, output)) == bits(getattr(wanted.features[name], output))
        for name, captions in batch.texts.items():
            for numbers in ("embeddings", "pooled"):
                assert bits(getattr(captions, numbers)) == bits(getattr(wanted.texts[name], numbers))
        num_batches += 1
    assert num_batches >= 3
    assert bool(away.remote.num_evicted) == is_tight
    for name in local.texts:
        for ours, theirs in zip(away.text(name).stored_null_rows, local.text(name).stored_null_rows, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    away.remote.close()
    found = verify_remote(url)
    assert (found.findings, found.num_files) == ([], len(tree_digest(everything.grown)))
