"""The loader benchmark: peers hand over what was written, the check finds what they do not, and the report says so.

No time is asserted: how fast a peer is, is what the benchmark is for.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import run_forked

from leandit.datasets.errors import RecipeError, ResourceError
from leandit.datasets.maintenance.verify import verify_store
from leandit.datasets.store import LatentStore
from leandit.tools.bench.harness.meters import disk_bytes, hardware
from leandit.tools.bench.harness.work import (
    STORE,
    Served,
    Workload,
    aligned_workload,
    caption_workload,
    latent_workload,
    write_store,
)
from leandit.tools.bench.loader import bench, open
from leandit.tools.bench.loader.bench import LoaderRequest, make_request, run
from leandit.tools.bench.loader.cell import Job, endless, run_cell
from leandit.tools.bench.loader.check import Check, check_epoch
from leandit.tools.bench.loader.report import notes, render, summarise
from leandit.tools.bench.peers.loops import aligned
from leandit.tools.bench.peers.peers import LIMIT, PEERS

LATENTS = Workload("latents", {"32x32": 37}, batch=8)
CAPTIONS = Workload(
    "captions", {"32x48": 13, "48x32": 9}, batch=4, token_counts=tuple(1 + i % 5 for i in range(22)), text_width=8
)
ALIGNED = Workload(
    "aligned",
    {"32x48": 13, "48x32": 9},
    batch=4,
    token_counts=CAPTIONS.token_counts,
    text_width=8,
    text_dtype="int8",
    clip_width=4,
    feature_width=8,
)
WORKLOADS = {"latents": LATENTS, "captions": CAPTIONS, "aligned": ALIGNED}
USES = [(name, workload) for name, peer in PEERS.items() for workload in peer.workloads]
IN_WORKERS = ("npy", "memmap dataset", "webdataset", LIMIT, "leandit")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder with a store for each workload."""
    made = {name: tmp_path_factory.mktemp(name) for name in WORKLOADS}
    for name, folder in made.items():
        write_store(WORKLOADS[name], folder / STORE)
    return made


def job(kind: str, peer: str, workload: Workload, folder: Path, **how: Any) -> Job:
    return Job(kind, peer, json.loads(json.dumps(asdict(workload))), str(folder), **how)


def batches_of(name: str, workload: str, folders: dict[str, Path], workers: int = 0) -> list[Served]:
    """One epoch of a peer, copied: it may use its memory again."""
    folder, peer = folders[workload], PEERS[name]
    run_cell(job("write", name, WORKLOADS[workload], folder))
    epochs = peer.open(WORKLOADS[workload], folder / peer.files, 0, workers)
    return [copied(batch) for batch in epochs(0)]


def copied(batch: Served) -> Served:
    arrays = [None if array is None else np.asarray(array).copy() for array in batch[:4]]
    beside = {name: np.asarray(array).copy() for name, array in (batch.beside or {}).items()}
    return Served(*arrays, beside or None)


def checked(workload: str, folders: dict[str, Path], batches: list[Served]) -> Check:
    return check_epoch(LatentStore(folders[workload] / STORE), WORKLOADS[workload], batches)


@pytest.mark.parametrize(("name", "workload"), USES)
def test_a_peer_hands_over_every_record_once_and_bit_for_bit(
    name: str, workload: str, folders: dict[str, Path]
) -> None:
    if PEERS[name].missing:
        pytest.skip(f"{PEERS[name].missing} not installed")
    assert run_cell(job("write", name, WORKLOADS[workload], folders[workload]))["disk_bytes"] > 0
    found = run_cell(job("check", name, WORKLOADS[workload], folders[workload]))
    assert found["problems"] == []
    assert found["check"]["served"] == WORKLOADS[workload].num_records
    assert set(found["versions"]) == set(PEERS[name].libraries.values())


@pytest.mark.parametrize("name", IN_WORKERS)
def test_a_peer_loses_nothing_with_two_workers(name: str, folders: dict[str, Path]) -> None:
    assert checked("captions", folders, batches_of(name, "captions", folders, workers=2)).problems == []


@pytest.mark.parametrize("name", ["leandit", LIMIT, "memmap dataset"])
def test_records_keep_what_lies_beside_them_with_two_workers(name: str, folders: dict[str, Path]) -> None:
    batches = batches_of(name, "aligned", folders, workers=2)
    assert checked("aligned", folders, batches).problems == []
    assert {array: str(values.dtype) for array, values in (batches[0].beside or {}).items()} == {
        "scales": "float32",
        "clip_l": "float16",
        "patches": "int8",
        "patch_scales": "float32",
    }


@pytest.mark.parametrize("array", ["scales", "clip_l", "patches", "patch_scales"])
def test_the_check_reports_arrays_that_belong_to_other_records(array: str, folders: dict[str, Path]) -> None:
    first, *rest = batches_of(LIMIT, "aligned", folders)
    assert first.beside is not None
    faults = {
        "4 of 22 records with wrong arrays beside": first.beside | {array: np.roll(first.beside[array], 1, axis=0) + 1},
        "4 of 22 records with wrong arrays beside ": {k: v for k, v in first.beside.items() if k != array},
    }
    for said, beside in faults.items():
        problems = checked("aligned", folders, [first._replace(beside=beside), *rest]).problems
        assert problems == [said.strip()]


def test_a_store_of_noise_with_every_kind_of_array_is_whole(folders: dict[str, Path]) -> None:
    store = LatentStore(folders["aligned"] / STORE)
    assert (store.texts, store.features) == (["", "clip_l"], ["dinov2"])
    assert verify_store(store.path).findings == []
    assert store.text("clip_l").lengths.tolist() == [77] * 22
    assert store.feature("dinov2", "32x48").row(0).shape == (6, 8)
    again = write_store(ALIGNED, folders["aligned"] / STORE)
    assert again.root_hash == store.root_hash


def test_the_limit_differs_from_epoch_to_epoch_and_fills_all_but_the_last_batch(folders: dict[str, Path]) -> None:
    run_cell(job("write", LIMIT, LATENTS, folders["latents"]))
    epochs = PEERS[LIMIT].open(LATENTS, folders["latents"] / "flat", 0, 0)
    first, second = ([batch.latents.clone() for batch in epochs(number)] for number in range(2))
    assert [len(latents) for latents in first] == [8, 8, 8, 8, 5]
    assert not torch.equal(first[0], second[0])
    assert checked("latents", folders, batches_of(LIMIT, "latents", folders)).shuffle > 0.5


def flipped_bit(latents: np.ndarray) -> np.ndarray:
    latents = latents.copy()
    latents.view(np.uint16)[0, 1, 2, 3] ^= 1
    return latents


FAULTS = {
    "lost": (lambda all_: all_[1:], ["4 of 22 records lost"]),
    "doubled": (lambda all_: [*all_, all_[0]], ["4 of 22 records doubled"]),
    "altered": (
        lambda all_: [all_[0]._replace(latents=flipped_bit(all_[0].latents)), *all_[1:]],
        ["1 of 22 records lost", "1 of 22 records altered"],
    ),
    "label": (
        lambda all_: [all_[0]._replace(labels=all_[0].labels + 1), *all_[1:]],
        ["4 of 22 records with a wrong label"],
    ),
    "text": (
        lambda all_: [all_[0]._replace(text=all_[0].text[::-1]), *all_[1:]],
        ["of 22 records with a wrong caption"],
    ),
    "cut text": (
        lambda all_: [all_[0]._replace(text=all_[0].text[:-1]), *all_[1:]],
        ["4 of 22 records with a wrong caption"],
    ),
    "widened": (
        lambda all_: [batch._replace(latents=batch.latents.astype(np.float32)) for batch in all_],
        ["float16 became float32"],
    ),
    "nothing": (lambda all_: [], ["22 of 22 records lost"]),
    "another shape": (
        lambda all_: [all_[0]._replace(latents=np.zeros((4, 4, 9, 9), np.float16)), *all_[1:]],
        ["4 of 22 records lost", "4 of 22 records altered"],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_reports_what_a_peer_does_wrong(fault: str, folders: dict[str, Path]) -> None:
    change, said = FAULTS[fault]
    problems = checked("captions", folders, change(batches_of(LIMIT, "captions", folders))).problems
    assert len(problems) == len(said)
    assert all(words in problem for words, problem in zip(said, problems, strict=True)), problems


def test_the_check_tells_an_order_that_hardly_shuffles(tmp_path: Path) -> None:
    workload = Workload("latents", {"32x32": 64}, batch=8)
    store = write_store(workload, tmp_path / STORE)
    in_order = [
        Served(store.latents("32x32").take(rows), store.index("32x32").labels[rows])
        for rows in np.arange(64).reshape(8, 8)
    ]
    found = check_epoch(store, workload, in_order)
    assert found.problems == []
    assert found.shuffle < 0.25  # each batch is of one block, of 5.2 that a global shuffle touches


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells run in this process: an interpreter with torch takes seconds to start."""

    def cell(
        request: LoaderRequest, workload: Workload, folder: Path, peer: Any, kind: str, **how: Any
    ) -> dict[str, Any]:
        if request.pythons.get(peer.name) == "breaks":
            return {"failed": "exit code 1: it broke"}
        return json.loads(json.dumps(run_cell(job(kind, peer.name, workload, folder, **how))))

    monkeypatch.setattr(bench, "_cell", cell)
    monkeypatch.setattr("leandit.tools.bench.loader.cell.gc.collect", lambda: 0)  # slow beside what tests have loaded


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("rounds", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_writes_checks_times_and_reports(rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lossy(workload: Workload, folder: Path, seed: int, workers: int) -> Any:
        epochs = PEERS[LIMIT].open(workload, folder, seed, workers)
        return lambda number: itertools.islice(epochs(number), 1, None)

    def widening(workload: Workload, folder: Path, seed: int, workers: int) -> Any:
        epochs = PEERS[LIMIT].open(workload, folder, seed, workers)
        return lambda number: (batch._replace(latents=batch.latents.float()) for batch in epochs(number))

    flat = vars(PEERS[LIMIT])
    made = {
        "lossy": type(PEERS[LIMIT])(**flat | {"name": "lossy", "open": lossy}),
        "widening": type(PEERS[LIMIT])(**flat | {"name": "widening", "open": widening}),
        "absent": type(PEERS[LIMIT])(**flat | {"name": "absent", "libraries": {"no_such_module": "no-such-thing"}}),
        "broken": type(PEERS[LIMIT])(**flat | {"name": "broken"}),
    }
    monkeypatch.setattr("leandit.tools.bench.loader.cell.FIRST_EPOCH_SECONDS", 0.01)
    for name, peer in made.items():
        monkeypatch.setitem(PEERS, name, peer)
    shown: list[tuple[str, int, int]] = []
    request = LoaderRequest(
        tmp_path,
        [LATENTS, CAPTIONS],
        ["leandit", "leandit gather", *made],
        rounds,
        0.01,
        {"broken": "breaks"},
        "the command",
    )
    result = json.loads(json.dumps(run(request, lambda *stage: shown.append(stage))))

    assert {stage for stage, _, _ in shown} == {"write", "check", "time"}
    assert result["command"] == "the command"
    assert result["hardware"].keys() == {"cpu", "cores", "memory_gib", "kernel", "python"}
    assert {"leandit", "torch", "numpy"} <= result["versions"].keys()
    assert [workload["name"] for workload in result["workloads"]] == ["latents", "captions"]
    peers = {peer["name"]: peer for peer in result["workloads"][0]["peers"]}
    assert list(peers) == [LIMIT, "leandit", "leandit gather", *made]
    assert "leandit gather" not in {peer["name"] for peer in result["workloads"][1]["peers"]}
    figures = peers["leandit"]["modes"]["w0"]
    assert figures["ratio"]["min"] <= figures["ratio"]["median"] <= figures["ratio"]["max"]
    assert {"records_per_second", "limit_records_per_second", "cpu_us_per_record", "first_batch_ms"} <= figures.keys()
    assert len(peers["leandit"]["cells"]["w2"]) == rounds
    assert peers["leandit gather"]["modes"].keys() == {"w0"}
    assert peers["absent"]["missing"] == ["no-such-thing"]
    assert peers["lossy"]["checks"]["w0"]["problems"] == ["8 of 37 records lost"]
    assert peers["lossy"]["modes"].keys() == {"w0", "w2"}
    assert peers["widening"]["modes"] == {}

    assert result["workloads"][1]["left_out"] == ["leandit gather"]
    text = render(result)
    assert "  not written for captions: leandit gather" in text
    assert "latents: 37 records of 0.1 KiB, 1 bucket, batches of 8" in text
    assert "absent: not installed (no-such-thing)" in text
    assert "broken: could not be written: exit code 1: it broke" in text
    assert "* lossy, w0: 8 of 37 records lost\n" in text
    assert "* widening, w2: float16 became float32; not timed" in text
    assert "left out: ffcv: " in text
    line = next(line for line in text.splitlines() if line.startswith("leandit gather"))
    assert line.split()[0:2] == ["leandit", "gather"]

    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    again = LoaderRequest(tmp_path, [LATENTS], [LIMIT], 1, 0.01)
    run(again, lambda *stage: None)
    assert {path: path.stat().st_mtime_ns for path in written} == written  # what is there is used


def test_a_cell_is_a_process_of_its_own_and_its_failure_a_result(folders: dict[str, Path]) -> None:
    folder = folders["latents"]
    request = LoaderRequest(folder, [LATENTS], [LIMIT], pythons={"npy": "/bin/false", "safetensors": "/no/such/python"})
    found = bench._cell(request, LATENTS, folder, PEERS[LIMIT], "write")
    assert found == {"disk_bytes": disk_bytes(folder / "flat"), "versions": {}}
    assert bench._cell(request, LATENTS, folder, PEERS["npy"], "write") == {"failed": "exit code 1: no message"}
    assert "does not start" in bench._cell(request, LATENTS, folder, PEERS["safetensors"], "write")["failed"]


def test_the_options_name_workloads_and_peers() -> None:
    request = make_request(Path("x"), "both", 100, "npy, zarr", ["mosaicml=/venv/bin/python"], rounds=3, seconds=1)
    assert [(w.name, w.num_records) for w in request.workloads] == [("latents", 100), ("captions", 100)]
    every = make_request(Path("x"), "all", 100, None, [], rounds=3, seconds=1)
    assert [w.name for w in every.workloads] == ["latents", "captions", "aligned"]
    assert (request.peers, request.pythons) == (["npy", "zarr"], {"mosaicml": "/venv/bin/python"})
    for workload, peers, pythons in (("wrong", None, []), ("both", "wrong", []), ("both", None, ["wrong=x"])):
        with pytest.raises(RecipeError, match="'wrong'"):
            make_request(Path("x"), workload, None, peers, pythons)


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="GiB are free"):
        run(LoaderRequest(tmp_path, [latent_workload(10**12)], [LIMIT]), lambda *stage: None)
    assert list(tmp_path.iterdir()) == []


def test_the_workloads_are_as_large_as_they_say() -> None:
    latents, captions = latent_workload(), caption_workload()
    assert (latents.num_records, latents.record_bytes, latents.batch) == (100_000, 8192, 256)
    assert (captions.num_records, len(captions.buckets), captions.batch) == (2000, 5, 32)
    aligned = aligned_workload()
    features = 256 * (768 + 4) + 77 * 768 * 2
    tokens = sum(captions.token_counts) / 2000 * (4096 + 4)
    assert (aligned.token_counts, aligned.batch) == (captions.token_counts, 32)
    assert aligned.record_bytes == pytest.approx(8192 + features + tokens)
    lengths = np.array(captions.token_counts)
    assert 20 <= lengths.min() <= lengths.max() <= 120
    assert 58 < lengths.mean() < 62
    plan = captions.plan(epoch=0, seed=0)
    assert sum(len(planned.rows) for planned in plan) == 2000
    assert len({planned.bucket for planned in plan[:20]}) > 1  # buckets are mixed


def test_medians_leave_out_rounds_that_failed() -> None:
    cell = {
        "records_per_second": 10.0,
        "limit_records_per_second": 20.0,
        "first_epoch_records_per_second": 9.0,
        "cpu_seconds_per_record": 1e-6,
        "import_seconds": 0.1,
        "first_batch_seconds": 0.01,
        "memory_mb": None,
        "ratio": 0.5,
    }
    cells = [cell, {"failed": "gone"}, cell | {"ratio": 0.7}, cell | {"ratio": 0.1}]
    found = summarise(cells)
    assert found is not None
    assert found["ratio"] == {"median": 0.5, "min": 0.1, "max": 0.7}
    assert (found["cpu_us_per_record"], found["first_batch_ms"], found["memory_mb"]) == (1, 10, None)
    assert summarise([{"failed": "gone"}]) is None
    assert notes({"name": "x", "cells": {"w0": cells}}) == ["  * x, w0: a round failed: gone"]


def test_an_epoch_without_a_batch_does_not_go_round_for_ever() -> None:
    def epochs(number: int) -> Iterator[Served]:
        return iter([Served(np.zeros(1), np.zeros(1))] if number < 2 else [])

    batches = endless(epochs)
    assert [next(batches)[0] for _ in range(2)] == [0, 1]
    with pytest.raises(ValueError, match="epoch 2"):
        next(batches)


def test_meters_read_this_machine() -> None:
    code = (
        "import numpy as np\n"
        "from leandit.tools.bench.harness.meters import tree_anonymous_mb, tree_cpu_seconds\n"
        "seconds, memory = tree_cpu_seconds(), tree_anonymous_mb()\n"
        "block = np.ones(80_000_000, np.uint8)\n"
        "assert tree_cpu_seconds() > seconds\n"
        "assert memory is None or tree_anonymous_mb() > memory + block.nbytes / 2e6\n"
    )  # in a process without children: those of other tests come and go
    subprocess.run([sys.executable, "-c", code], check=True)
    assert hardware()["cores"] >= 1
    assert aligned((3, 5), "float16").ctypes.data % 64 == 0


def test_opening_is_measured_in_separate_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Forked: that a process may be fresh is shown by the slow form of the memory that "bench precompute" measures.
    monkeypatch.setattr("subprocess.run", lambda command, **_: run_forked(command[1:]))
    monkeypatch.setattr(open, "PLANNED_BATCHES", 64)
    result = open.run(tmp_path, 1000, rounds=2)
    assert result["open"].keys() == {"open_seconds", "open_mb", "first_batch_ms"}
    assert min(result["open"].values()) > 0
    assert list(result["plan_us_per_batch"]) == ["10000", "1281167", "1000000000"]
    assert [name for name, _ in open.render(result)] == ["machine", "open", "first batch", *["plan"] * 3]
    assert LatentStore(tmp_path / "open-1000").buckets == {"256x256": 1000}
