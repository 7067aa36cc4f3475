"""``leandit bench``: the figures of a small store, and of a few steps. No time is asserted."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from forked import run_forked
from making import tree_digest
from noise_store import make_store

from leandit.datasets.store import LatentStore
from leandit.tools.cli.main import main

FIGURES = {"first_batch_ms", "records_per_second", "limit_records_per_second", "ratio"}
Bench = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Bench:
    """Run the command: exit code, stdout, stderr."""

    def run(store: Path | str, *options: object) -> tuple[int, str, str]:
        words = ["leandit", "bench", "loader", str(store), "--seconds", "0.01", "--batch", "4", *map(str, options)]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as end:
            main()
        return int(end.value.code or 0), *capsys.readouterr()

    return run


def test_a_store_is_read_beside_a_gather_of_its_bytes(bench: Bench, label_store: LatentStore, tmp_path: Path) -> None:
    before = tree_digest(label_store.path)
    code, out, _ = bench(label_store.path, "--json", "--scratch", tmp_path / "scratch")
    result = json.loads(out)
    assert code == 0
    assert result.keys() == {"store", "records", "record_bytes", "batch", "warm"}
    assert (result["records"], result["batch"]) == (15, 4)
    latents = label_store.latents("32x32")
    assert result["record_bytes"] == latents.row_bytes
    warm = result["warm"]
    assert warm.keys() == FIGURES | {"sample_records", "min_ratio", "max_ratio"}
    assert warm["sample_records"] == 15
    assert min(warm.values()) > 0
    assert warm["min_ratio"] <= warm["ratio"] <= warm["max_ratio"]
    assert list(tmp_path.rglob("*")) == [tmp_path / "scratch"]  # the copy is gone
    assert tree_digest(label_store.path) == before


@pytest.mark.parametrize("kind", ["captions", "three texts", "compressed"])
def test_whatever_a_store_holds_is_read(
    kind: str, bench: Bench, caption_store: LatentStore, three_text_store: LatentStore, tmp_path: Path
) -> None:
    stores = {"captions": caption_store.path, "three texts": three_text_store.path, "compressed": tmp_path / "blosc"}
    make_store(tmp_path / "blosc", {"64x64": 9, "48x80": 6}, token_counts=[3, 5, 8], text_width=16, codec="blosc")
    code, out, _ = bench(stores[kind], "--json", "--cold")
    assert code == 0
    assert all(min(json.loads(out)[measured][figure] for figure in FIGURES) > 0 for measured in ("warm", "cold"))


def test_cold_reads_come_from_the_disk(bench: Bench, tmp_path: Path) -> None:
    store = tmp_path / "store"
    make_store(store, {"256x256": 256})
    code, out, _ = bench(store, "--json", "--cold")
    cold = json.loads(out)["cold"]
    assert code == 0
    assert cold.keys() == FIGURES | {"disk_mb", "from_disk"}
    on_disk = cold["disk_mb"] > 0  # not on a memory file system
    assert cold["from_disk"] is on_disk
    _, text, _ = bench(store, "--cold")
    words = {line.split()[0] for line in text.splitlines()}
    assert {"store", "read", "cold", "warm", "page"} <= words
    assert "posix_fadvise" in text
    assert ("NOT COLD" in text) is not on_disk


def test_what_cannot_be_read_is_an_error_with_a_way_out(bench: Bench, tmp_path: Path) -> None:
    code, _, error = bench(tmp_path / "none")
    assert (code, "leandit precompute" in error) == (3, True)
    code, _, error = bench("s3://bucket/store")
    assert (code, "is a URL" in " ".join(error.replace("│", "").split())) == (2, True)


MAIN = "from leandit.tools.cli.main import main; main()"
TINY = ["--set", "model.name=DiT-Ti/4", "--set", "run.global_batch=2", "--set", "run.precision=bf16"]


def test_a_recipe_is_measured_on_a_store(label_store: LatentStore) -> None:
    how = [
        "--store",
        label_store.path,
        "--rounds",
        "2",
        "--steps",
        "1",
        "--device",
        "cpu",
        "--set",
        "data.access=pread",
    ]
    ended = run_forked(["-c", MAIN, "bench", "train", "dit-s-2-256", *map(str, how), *TINY, "--json"])
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert [len(found[name]) for name in ("images_per_second", "step_seconds", "peak_gib")] == [2, 2, 2]
    assert min(found["images_per_second"] + found["step_seconds"] + found["peak_gib"]) > 0
    assert all(0 <= share <= 1 for share in found["data_wait_share"])
    assert found["mfu"] == [None, None]
    assert found["access"] == [f"store '{label_store.path}' is read by pread (as asked)"]
    assert found["batch"] == 2
    assert found["precision"].startswith("fp32 (bf16 was requested, cpu has no fast bf16")
