"""A Ray cluster of two local nodes: the bytes of one process, while decoders, actors and the command are killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults import descendants_of
from forked import ForkedPython
from making import NO_CHECK, Leandit, caption_recipe, encode, make_caption_folder, smooth_image, store_digest

from leandit.datasets.store import LatentStore
from leandit.errors import RecipeError, ResourceError
from leandit.precompute.engines.cluster import plan_tasks
from leandit.precompute.images.decoders import Decoders

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
cluster_utils: Any = pytest.importorskip("ray.cluster_utils")

pytestmark = pytest.mark.timeout(900)
LEANDIT = ["-c", "from leandit.tools.cli.main import main; main()"]
SIDES = range(32, 96, 8)
BUCKETS = [f"{height}x{width}" for height in SIDES for width in SIDES if height == 64 or width == 64]
# A bucket is a shard at least, so many buckets make many shards of few images.
SETTINGS = [f"images.buckets={BUCKETS}".replace("'", '"'), "vae.batch_size=4", "text.batch_size=8", NO_CHECK]
POISON = "images/7.png"  # whoever decodes it is killed
POISONED_CHILD = f"""
import os, signal
from leandit.precompute.images import decoder_child

def answer(job):
    if job["stage"] == "decode" and job["path"].endswith("{POISON}"):
        os.kill(os.getpid(), signal.SIGKILL)
    return decoder_child.answer(job)

decoder_child.main(answer)
"""
EXCHANGE = """
import os, sys
words = sys.orig_argv
if "leandit.precompute.images.decoder_child" in words:
    at = words.index("leandit.precompute.images.decoder_child")
    os.execv(sys.executable, [*words[:at], "poisoned_child", *words[at + 1 :]])
"""


@pytest.fixture(scope="module")
def poison(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Decoders here, and those of processes started while this holds, die of the poisoned image."""
    folder = tmp_path_factory.mktemp("poison")
    (folder / "poisoned_child.py").write_text(POISONED_CHILD)
    (folder / "sitecustomize.py").write_text(EXCHANGE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])))
        patch.setitem(Decoders.__init__.__kwdefaults__, "_child_module", "poisoned_child")
        yield


@pytest.fixture(scope="module")
def address(poison: None) -> Iterator[str]:
    """Two nodes of one CPU each."""
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    yield cluster.address
    cluster.shutdown()


def make_source(root: Path, count: int) -> Path:
    """Images of all shapes; one ends too early, and is rejected when it is decoded."""
    make_caption_folder(root, count=count)
    for number in range(count):
        height_px, width_px = map(int, BUCKETS[number % len(BUCKETS)].split("x"))
        smooth_image(number, height_px, width_px).save(root / f"images/{number}.png")
    whole = (root / "images/5.png").read_bytes()
    (root / "images/5.png").write_bytes(whole[: len(whole) * 2 // 3])
    return root


def busy_actors() -> list[int]:
    """Processes of actors of this test's cluster that are encoding; Ray names its processes after what they do."""
    found = []
    for pid in descendants_of(os.getpid()):
        try:
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::_encode"):
                found.append(pid)
        except OSError:
            continue
    return found


def start(address: str, source: Path, store: Path) -> ForkedPython:
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    where = ["--source", str(source), "--store", str(store)]
    engine = ["--engine", "ray", "--address", address, "--device", "cpu,cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # as the tests' own process, for the same bits on a CPU
    words = [*LEANDIT, "precompute", "demo", *where, *engine, *settings]
    return ForkedPython(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)


@pytest.mark.parametrize(
    ("plan", "count"),
    [("a", 45), pytest.param("aAd" * 6 + "ad", 900, marks=pytest.mark.slow)],  # 900 are 17 shards
)
def test_killed_decoders_actors_and_drivers_leave_the_bytes_of_one_process(
    plan: str, count: int, address: str, tmp_path: Path
) -> None:
    """ "a" kills an actor, "d" the driver, each after another commit; "A" an actor as soon as one encodes."""
    source, store = make_source(tmp_path / "images", count), tmp_path / "store"
    encode(caption_recipe(*SETTINGS), source, tmp_path / "whole")

    def num_commits() -> int:
        return len(list(store.glob("revisions/*/commits/**/*.json")))

    command = start(address, source, store)
    printed = ""  # by all drivers
    for what in plan:
        known = -1 if what == "A" else num_commits()
        while num_commits() <= known or not busy_actors():
            assert command.poll() is None, "it ended before all kills"
            time.sleep(0.02)
        if what == "d":
            command.kill()
            printed += "".join(command.communicate())
            while busy_actors():  # they end with their driver
                time.sleep(0.05)
            command = start(address, source, store)
        else:
            for pid in busy_actors()[:1]:
                os.kill(pid, signal.SIGKILL)
    out, err = command.communicate(timeout=600)
    said = out + err
    assert command.returncode == 0, err
    assert store_digest(store) == store_digest(tmp_path / "whole")
    assert re.search(r"task \d+\) died: .*Restarting it", printed + said)
    assert "RayTaskError" not in said
    assert "Traceback" not in said
    assert re.search(rf"{count} planned = {count - 2} stored \+ 2 rejected", said)
    reasons = {row["key"]: row["reason"] for row in LatentStore(store).records.to_pylist() if row["reason"]}
    assert reasons == {"images/5.png": "truncated", POISON: "decoder_crash"}


def test_where_no_cluster_is_the_command_says_so(tmp_path: Path, leandit: Leandit) -> None:
    where = "--source", make_source(tmp_path / "images", 6), "--store", tmp_path / "store"
    done = leandit("precompute", "demo", *where, "--engine", "ray", "--address", "127.0.0.1:9")
    assert done.code == 5
    assert "no cluster answers at '127.0.0.1:9'" in done.err


@pytest.mark.parametrize(
    ("devices", "nodes", "planned"),
    [
        ("auto", [(2, 0), (4, 0)], ("cpu", 2, {"num_cpus": 2})),
        ("cpu,cpu,cpu", [(8, 0), (16, 0)], ("cpu", 3, {"num_cpus": 4})),
        ("cpu,cpu,cpu", [(2, 0)], ("cpu", 3, {"num_cpus": 0})),
        ("auto", [(32, 4)], ("cuda", 4, {"num_gpus": 1, "num_cpus": 8})),
        ("cuda", [(16, 4), (16, 8)], ("cuda", 12, {"num_gpus": 1, "num_cpus": 2})),
        ("cuda", [(4, 0)], "has no GPUs"),
        ("cpu", [(0, 0)], "has no CPUs"),
        ("cuda:1", [(4, 4)], "expected auto, cuda, cpu or cpu,cpu"),
    ],
)
def test_a_gpu_or_a_machine_has_a_process_each_with_its_share_of_the_cpus(
    devices: str, nodes: list[tuple[int, int]], planned: object
) -> None:
    listed = [{"Alive": True, "Resources": {"CPU": cpus, "GPU": gpus}} for cpus, gpus in nodes]
    listed.append({"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}})
    if isinstance(planned, str):
        with pytest.raises((ResourceError, RecipeError), match=planned):
            plan_tasks(listed, "auto", devices)
    else:
        assert plan_tasks(listed, "auto", devices) == planned
