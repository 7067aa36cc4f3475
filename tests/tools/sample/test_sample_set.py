"""Sets of images: any processes and batches draw the same, nothing is drawn twice, ADM's reader reads them."""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import ForkedPython
from making import CPU, no_progress
from PIL import Image

from leandit.datasets.disk.files import EXIT_DIED, FAILPOINT_VARIABLE, TEMPORARY_PREFIX
from leandit.datasets.disk.hashing import read_json
from leandit.errors import DamageError, LeanditError, RunError
from leandit.tools.sample.npz import Rows, npz_parts
from leandit.tools.sample.request import SampleRequest
from leandit.tools.sample.sample import sample_set
from leandit.tools.sample.subjects import Subjects
from leandit.train.parallel.ranks import Ranks
from leandit.train.sampling.snapshot import load_snapshot

pytestmark = pytest.mark.usefixtures("tiny_models")

COUNT = 11
TINY_LEANDIT = """
import torch
from leandit.tools.cli.main import main
from leandit.train.models.dit import SIZES
SIZES["S"] = (2, 32, 2)
torch.set_num_threads(1)
main()
"""


@pytest.fixture(scope="module")
def run(runs: Any) -> Path:
    """A trained run on labels."""
    return runs.labels


def request(**options: Any) -> SampleRequest:
    return SampleRequest(**({"count": COUNT, "steps": 2, "guidance": 2.0, "batch": 4} | options))


def go(run: Path, out: Path, ranks: Ranks | None = None, **options: Any) -> dict:
    return sample_set(run, request(**options), out=out, ranks=ranks or Ranks(), device=CPU, progress=no_progress)


def images_of(out: Path, count: int = COUNT) -> np.ndarray:
    return np.stack([np.asarray(Image.open(out / f"{i:06d}.png")) for i in range(count)]).astype(int)


def same_up_to_rounding(one: Path, other: Path, count: int = COUNT) -> None:
    """Other batches round otherwise, by one of 256 levels at most here."""
    difference = np.abs(images_of(one, count) - images_of(other, count))
    assert difference.max() <= 1
    assert difference.mean() < 0.01


def test_a_set_is_pngs_and_an_npz_as_adms_evaluator_reads_it(run: Path, tmp_path: Path) -> None:
    made = go(run, tmp_path)
    assert (made["drawn"], made["there"], made["of"]) == (COUNT, COUNT, COUNT)
    assert Path(made["npz"]).name == f"samples_{COUNT}x32x32x3.npz"
    with np.load(made["npz"], allow_pickle=False) as found:
        assert found.files == ["arr_0", "arr_1"]
        assert (found["arr_0"].dtype, found["arr_0"].shape) == (np.uint8, (COUNT, 32, 32, 3))
        assert np.array_equal(found["arr_0"], images_of(tmp_path))
        assert (found["arr_1"].dtype, found["arr_1"].shape) == (np.int64, (COUNT,))
        labels = found["arr_1"].tolist()
    assert set(labels) == {0, 1, 2}
    assert read_json(tmp_path / "samples.json")["samples"] == list(map(str, labels))
    with zipfile.ZipFile(made["npz"]) as archive, archive.open("arr_0.npy") as member:
        assert np.lib.format.read_magic(member) == (1, 0)  # ADM's evaluator reads this version alone


def test_classes_are_drawn_uniformly_and_by_number(run: Path) -> None:
    snapshot = load_snapshot(run, CPU)
    subjects = Subjects(snapshot, run, request(seed=3, count=3000), CPU, evenly=False, bucket="32x32")
    labels = np.array([subjects[number] for number in range(3000)])
    assert np.bincount(labels).tolist() == pytest.approx([1000] * 3, abs=100)
    assert (labels[:-1] == labels[1:]).mean() == pytest.approx(1 / 3, abs=0.05)
    requested = Subjects(snapshot, run, request(labels=["2", "0"]), CPU, evenly=False, bucket="32x32")
    assert [requested[i] for i in range(5)] == [2, 0, 2, 0, 2]


@pytest.mark.parametrize(("world", "batch"), [(2, 4), (1, 11), (5, 1)])
def test_any_processes_and_batches_draw_the_same(run: Path, world: int, batch: int, tmp_path: Path) -> None:
    go(run, tmp_path / "one")
    made = [go(run, tmp_path / "many", Ranks(rank, world), batch=batch) for rank in reversed(range(world))]
    assert [it["drawn"] for it in made] == [len(range(rank, COUNT, world)) for rank in reversed(range(world))]
    assert [bool(it["npz"]) for it in made] == [False] * (world - 1) + [True]
    same_up_to_rounding(tmp_path / "one", tmp_path / "many")


def test_what_is_there_is_not_drawn_again_and_a_set_grows(run: Path, tmp_path: Path) -> None:
    go(run, tmp_path / "a")
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "a").glob("*.png")}
    for number in (3, 7):
        (tmp_path / "a" / f"{number:06d}.png").unlink()
    (tmp_path / "a" / f"samples_{COUNT}x32x32x3.npz").unlink()
    assert go(run, tmp_path / "a")["drawn"] == 2
    now = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "a").glob("*.png")}
    assert {name for name in now if now[name] != times[name]} == {"000003.png", "000007.png"}
    assert go(run, tmp_path / "a", count=COUNT + 3)["drawn"] == 3
    go(run, tmp_path / "b", count=COUNT + 3)
    same_up_to_rounding(tmp_path / "a", tmp_path / "b", COUNT + 3)


def test_another_set_is_refused_and_nothing_written(run: Path, tmp_path: Path) -> None:
    go(run, tmp_path / "set", count=2)
    others = {"seed": 1, "steps": 3, "guidance": 1.0, "guidance_times": "0,0.5", "labels": ["1"]}
    for key, value in others.items():
        named = "interval" if key == "guidance_times" else key
        with pytest.raises(RunError, match=f"generated with {named}.*another --out"):
            go(run, tmp_path / "set", **{"count": 2, key: value})
    for wrong in ({"labels": ["3"]}, {"captions": ["a red circle"]}, {"bucket": "30x32"}):
        with pytest.raises(LeanditError):
            go(run, tmp_path / "out", **wrong)
    assert not (tmp_path / "out").exists()


def test_the_noise_of_an_sde_is_of_the_image_and_its_settings_are_of_the_set(runs: Any, tmp_path: Path) -> None:
    how: dict[str, Any] = {"sampler": "sde", "steps": 3, "shift": 2.0, "diffusion": "constant"}
    go(runs.captions, tmp_path / "one", **how)
    assert len(set(read_json(tmp_path / "one/samples.json")["samples"])) > 1
    with np.load(next((tmp_path / "one").glob("*.npz"))) as found:
        assert found.files == ["arr_0"]
    for rank in range(3):
        go(runs.captions, tmp_path / "many", Ranks(rank, 3), batch=3, **how)
    same_up_to_rounding(tmp_path / "one", tmp_path / "many")
    assert {"sampler": "sde", "shift": 2.0, "diffusion": "constant", "last_step": "mean"}.items() <= (
        read_json(tmp_path / "one/set.json").items()
    )
    for key, other in (("shift", None), ("shift", 3.0), ("diffusion", "sigma"), ("last_step", "euler")):
        with pytest.raises(RunError, match=f"generated with {key}.*another --out"):
            go(runs.captions, tmp_path / "one", **how | {key: other})


def test_other_images_in_the_folder_are_refused_and_a_damaged_one_is_named(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    shutil.copy(Image.__file__, tmp_path / "mine/cat.png")
    with pytest.raises(RunError, match="not a set generated by leandit"):
        go(run, tmp_path / "mine")
    go(run, tmp_path / "set", Ranks(0, 2))
    (tmp_path / "set/000002.png").write_bytes(b"no image")
    with pytest.raises(DamageError, match="000002"):
        go(run, tmp_path / "set", Ranks(1, 2))
    (tmp_path / "set/000002.png").unlink()
    assert go(run, tmp_path / "set")["npz"]


def test_the_archive_is_made_without_holding_the_images(tmp_path: Path) -> None:
    shape = (300, 64, 64, 3)
    images = (np.full(shape[1:], i % 251, np.uint8) for i in range(shape[0]))
    parts = list(npz_parts({"arr_0": Rows(shape, "|u1", images)}))
    assert max(map(len, parts)) < 2 * 64 * 64 * 3
    (tmp_path / "a.npz").write_bytes(b"".join(parts))
    with np.load(tmp_path / "a.npz") as found:
        assert (found["arr_0"][:, 5, 5, 1] == np.arange(300) % 251).all()


def start(run: Path, out: Path, *, rank: int, **environment: str) -> ForkedPython:
    place_of = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    command = ["sample", run, "--out", out, "--num", COUNT, "--steps", 2, "--guidance", 2, "--batch", 2]
    return ForkedPython(
        ["-c", TINY_LEANDIT, *command, "--device", "cpu"],
        env=os.environ | place_of | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_two_processes_of_which_one_is_killed_and_started_again_draw_what_one_draws(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    go(run, out, Ranks(0, 2), count=1)  # so that the set is there, and operation 7 is the sync of the second image
    other = start(run, out, rank=1, **{FAILPOINT_VARIABLE: "die@7"})
    go(run, out, Ranks(0, 2), batch=2)
    said = other.communicate(timeout=200)
    assert other.returncode == EXIT_DIED, said
    assert len(list(out.glob("0*.png"))) == 7
    (out / "samples_1x32x32x3.npz").unlink()
    assert any(path.name.startswith(TEMPORARY_PREFIX) for path in out.iterdir())
    made = go(run, out, Ranks(1, 2), batch=2)
    assert made["drawn"] == 4
    assert made["npz"]
    assert not any(path.name.startswith(TEMPORARY_PREFIX) for path in out.iterdir())
    go(run, tmp_path / "one")
    same_up_to_rounding(tmp_path / "one", out)
    with np.load(next(out.glob("*.npz"))) as found:
        assert np.array_equal(found["arr_0"], images_of(out))
