"""``--dry-run`` of a precompute: its bytes are those of the store, and a disk that is too small is refused."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path

import pytest
import torch
from making import CPU, caption_recipe, no_progress

from leandit.datasets.errors import ResourceError
from leandit.precompute.pipeline import precompute
from leandit.tools import prediction
from leandit.tools.dry_run import describe_precompute
from leandit.tools.prediction import Probe, check_room

Usage = namedtuple("Usage", "total used free")


def test_the_predicted_bytes_are_those_of_the_store(caption_folder: Path, tmp_path: Path) -> None:
    recipe, store = caption_recipe(), tmp_path / "store"
    text, found = describe_precompute(recipe, caption_folder, CPU)
    assert found is not None
    precompute(recipe, source_path=caption_folder, store_path=store, device=CPU, progress=no_progress)
    small, large = 16 << 10, 256 << 10  # zarr.json of each array; of captions also offsets, and the shards' indexes
    for name, predicted, more in (("buckets", found.latents, small), ("captions", found.captions, large)):
        written = sum(path.stat().st_size for path in (store / name).rglob("*") if path.is_file())
        assert predicted <= written <= predicted + more
    for words in ("MiB before any codec", "9 distinct", "from 14 pictures", "GiB of this machine", "h; decoding"):
        assert words in text


def test_a_disk_that_is_too_small_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction.shutil, "disk_usage", lambda path: Usage(0, 0, 1000))
    store = tmp_path / "not" / "there"
    check_room({store: 1000})
    with pytest.raises(ResourceError, match=r"the disk has 0\.0 GiB free, .* more are needed"):
        check_room({store: 1001})
    store.mkdir(parents=True)
    (store / "shard").write_bytes(bytes(500))
    check_room({store: 1500})  # half of it is written
    with pytest.raises(ResourceError):
        check_room({store: 1501})
    with pytest.raises(ResourceError):  # another one on the same disk
        check_room({store: 1500, tmp_path / "other": 1})


@pytest.mark.parametrize(("on_cpu", "seconds"), [(True, 350.0), (False, 250.0)])
def test_on_a_gpu_decoding_runs_beside_the_encoder(on_cpu: bool, seconds: float) -> None:
    probe = Probe(10, decode_seconds=10.0, encode_seconds=20.0, seconds_per_token=0.5, memory_bytes=0)
    assert probe.seconds_for(100, 100, on_cpu=on_cpu) == seconds


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_its_own_memory_is_told(caption_folder: Path) -> None:
    text, _ = describe_precompute(caption_recipe(), caption_folder, torch.device("cuda"))
    assert "GiB of the GPU" in text
