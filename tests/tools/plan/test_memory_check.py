"""A training that will not fit into the memory of a CPU is warned of before its first step, with what would fit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from making import train_recipe

from leandit.datasets.store import LatentStore
from leandit.tools.cli.verbs import train
from leandit.tools.plan import memory_check
from leandit.tools.plan.memory_check import available_bytes, memory_warning
from leandit.tools.plan.step_memory import Traced
from leandit.train.metrics import flops
from leandit.train.parallel.ranks import ALONE

MIB, GIB = 2**20, 2**30
MANY = ("run.global_batch=5000", "data.leftovers=carry", "run.prefetch=0", "run.async_checkpoint=false")


@pytest.fixture(autouse=True, scope="module")
def _traced_once() -> Iterator[None]:
    """The trace once: neither the batch nor the microbatch is in it. It is of the real size, as its process has it."""
    flops.meta_model.cache_clear()  # other modules of tests shrink the models
    traces, trace = dict[str, Traced](), memory_check.trace_steps

    def traced(*args: Any, **options: Any) -> dict[str, Traced]:
        if not traces:
            traces.update(trace(*args, **options))
        return traces

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_check, "trace_steps", traced)
        yield
    flops.meta_model.cache_clear()


def test_a_step_that_does_not_fit_is_told_with_a_microbatch_that_does(label_store: LatentStore) -> None:
    def warning(available: int, *changes: str, ranks: int = 1) -> str | None:
        recipe = train_recipe("dit-s-4", *MANY, *changes)
        return memory_warning(recipe, str(label_store.path), available, num_ranks=ranks, local_ranks=ranks)

    says = warning(2 * GIB)
    assert says is not None
    assert "a step of 5000 images needs about" in says
    assert "2.00 GiB are available" in says
    proposed = re.search(r"--set run\.microbatch=(\d+)", says)
    assert proposed
    assert 8 <= int(proposed[1]) < 5000
    assert warning(2 * GIB, f"run.microbatch={proposed[1]}") is None
    assert warning(2**40) is None
    assert warning(2 * GIB, "data.leftovers=short") is None  # the store has 15 records, so no step has more
    half = warning(3 * GIB, ranks=2)
    assert half is not None
    assert "a step of 2500 images" in half  # two processes share the machine
    assert "Not even one image" in (warning(MIB // 4) or "")


def test_the_command_warns_and_lets_the_training_speak_of_its_own_errors(
    label_store: LatentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory_check, "available_bytes", lambda: 2 * GIB)
    train._warn_of_memory(train_recipe("dit-s-4", *MANY), str(label_store.path), ALONE)
    assert re.match(r"leandit: a step of 5000 .*run\.microbatch=\d+", capsys.readouterr().err)
    train._warn_of_memory(train_recipe("dit-s-4", *MANY), str(tmp_path / "none"), ALONE)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("version", [1, 2])
def test_the_memory_of_a_container_counts_where_it_has_less_than_the_machine(version: int, tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal:  900 kB\nMemAvailable:     800 kB\n")
    assert available_bytes(proc, groups) == 800 * 1024
    line, top = ("4:memory:/outer/inner", groups / "memory") if version == 1 else ("0::/outer/inner", groups)
    (proc / "self/cgroup").write_text(f"5:cpu:/x\n{line}\n")
    assert available_bytes(proc, groups) == 800 * 1024
    names = memory_check.GROUP_FILES[2 - version]
    key = "total_inactive_file" if version == 1 else "inactive_file"

    def group(folder: Path, limit: object, usage: int, cache: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in zip(names, (limit, usage), strict=True):
            (folder / name).write_text(f"{value}\n")
        (folder / "memory.stat").write_text(f"anon 5\n{key} {cache}\n")

    group(top / "outer/inner", "max", 100, 10)
    group(top / "outer", 500_000, 200_000, 50_000)
    assert available_bytes(proc, groups) == 350_000
    group(top / "outer/inner", 300_000, 200_000, 0)
    assert available_bytes(proc, groups) == 100_000
    assert available_bytes(tmp_path / "mac", groups) is None
