"""``leandit bench loader``: this store and its peers, side by side on the same bytes, in one run.

The limit is one gather a batch from a flat mapped file. Every cell is a fresh process that warms the page cache, times
its peer, and then times the limit, so that a ratio is of two figures taken seconds apart; rounds go through the cells
in alternating order, and the median over the rounds is reported with its range. A peer is checked before it is timed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from ....datasets.errors import RecipeError, ResourceError
from ....precompute.progress.clock import Progress
from ..harness.meters import hardware
from ..harness.rounds import alternating_rounds
from ..harness.work import STORE, Workload, aligned_workload, caption_workload, latent_workload, write_store
from ..peers.peers import LEFT_OUT, LIMIT, PEERS, Peer
from .cell import Job
from .report import summarise

WORKLOADS: dict[str, Callable[..., Workload]] = {
    "latents": latent_workload,
    "captions": caption_workload,
    "aligned": aligned_workload,
}
SEVERAL = {"both": ["latents", "captions"], "all": list(WORKLOADS)}
CELL_SECONDS = 900  # time limit of a cell, plus a second for every MB: some peers hang when they fail
FILE_OVERHEAD = 2.0  # most bytes on disk per byte of data: .npy rounds 8 KiB up to 16
# Faults of a peer that does other work, so that its time means nothing.
ALTERED = ("altered", "wrong_labels", "wrong_texts", "wrong_beside", "dtypes")


@dataclass(frozen=True)
class LoaderRequest:
    """What to measure.

    Args:
      scratch: folder for the store and the peers' files, which are kept for the next run.
      peers: names of ``PEERS``.
      rounds: measurements of every cell.
      seconds: length of a measured window.
      pythons: interpreter of each peer that is installed in another environment.
      command: the command line, for the report.
    """

    scratch: Path
    workloads: Sequence[Workload]
    peers: Sequence[str]
    rounds: int = 5
    seconds: float = 1.0
    pythons: Mapping[str, str] = field(default_factory=dict)
    command: str = "leandit bench loader"


def make_request(
    scratch: Path, workload: str, records: int | None, peers: str | None, pythons: Sequence[str], **how: Any
) -> LoaderRequest:
    """Read the options of the command line.

    Raises: RecipeError: an unknown workload or peer.
    """
    names = SEVERAL.get(workload, [workload])
    if unknown := set(names) - set(WORKLOADS):
        raise RecipeError(f"--workload '{unknown.pop()}': needed one of {', '.join([*WORKLOADS, *SEVERAL])}.")
    chosen = [name.strip() for name in peers.split(",")] if peers else list(PEERS)
    interpreters = {name: path for name, _, path in (entry.partition("=") for entry in pythons)}
    for option, values in (("--peers", chosen), ("--python", interpreters)):
        if unknown := set(values) - set(PEERS):
            raise RecipeError(f"{option} '{min(unknown)}': unknown peer. Needed one of {', '.join(PEERS)}.")
    loads = [WORKLOADS[name](records) if records else WORKLOADS[name]() for name in names]
    return LoaderRequest(
        scratch.resolve(), loads, chosen, pythons=interpreters, command=shlex.join(["leandit", *sys.argv[1:]]), **how
    )


def run(request: LoaderRequest, progress: Progress) -> dict[str, Any]:
    """Write, check and time every peer; one JSON object with everything.

    Raises: ResourceError: the disk is too small.
    """
    request.scratch.mkdir(parents=True, exist_ok=True)
    results = [_run_workload(request, workload, progress) for workload in request.workloads]
    peers = [peer for workload in results for peer in workload["peers"]]
    versions = {name: metadata.version(name) for name in ("leandit", "torch", "numpy")}
    return {
        "command": request.command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "versions": versions | {name: v for peer in peers for name, v in peer.get("versions", {}).items()},
        "rounds": request.rounds,
        "seconds": request.seconds,
        "workloads": results,
        "left_out": LEFT_OUT,
    }


def _run_workload(request: LoaderRequest, workload: Workload, progress: Progress) -> dict[str, Any]:
    folder = request.scratch / f"{workload.name}-{workload.num_records}"
    peers = [PEERS[name] for name in dict.fromkeys([LIMIT, *request.peers]) if workload.name in PEERS[name].workloads]
    _check_room(folder, workload, peers)
    write_store(workload, folder / STORE)
    states = {peer.name: _write(request, workload, folder, peer) for peer in _with_progress(peers, progress, "write")}

    cells = [(peer, mode) for peer in peers for mode in peer.modes if "missing" not in states[peer.name]]
    cells = [cell for cell in cells if "failed" not in states[cell[0].name]]
    for peer, mode in _with_progress(cells, progress, "check"):
        checked = _cell(request, workload, folder, peer, "check", mode=mode)
        states[peer.name].setdefault("checks", {})[mode] = checked
    cells = [cell for cell in cells if _may_be_timed(states[cell[0].name]["checks"][cell[1]])]

    for number, (peer, mode) in _with_progress(list(alternating_rounds(cells, request.rounds)), progress, "time"):
        timed = _cell(request, workload, folder, peer, "time", mode=mode, seed=number, seconds=request.seconds)
        states[peer.name].setdefault("cells", {}).setdefault(mode, []).append(timed)
    for state in states.values():
        modes = {mode: summarise(cells) for mode, cells in state.get("cells", {}).items()}
        state["modes"] = {mode: figures for mode, figures in modes.items() if figures}
    return {
        "name": workload.name,
        "buckets": dict(workload.buckets),
        "batch": workload.batch,
        "record_bytes": workload.record_bytes,
        "caption_tokens": sum(workload.token_counts),
        "left_out": [name for name in dict.fromkeys(request.peers) if workload.name not in PEERS[name].workloads],
        "peers": [{"name": peer.name, "how": peer.how} | states[peer.name] for peer in peers],
    }


def _with_progress(things: Sequence[Any], progress: Progress, stage: str) -> Any:
    for done, thing in enumerate(things):
        progress(stage, done, len(things))
        yield thing
    progress(stage, len(things), len(things))


def _write(request: LoaderRequest, workload: Workload, folder: Path, peer: Peer) -> dict[str, Any]:
    written = _cell(request, workload, folder, peer, "write")
    if "disk_bytes" in written:
        written["disk_bytes_per_record"] = written.pop("disk_bytes") / workload.num_records
    return written


def _may_be_timed(checked: Mapping[str, Any]) -> bool:
    """Whether a peer delivers the stored bytes; lost and doubled records are reported, but do not change its rate."""
    if "check" not in checked:
        return False
    check = checked["check"]
    return check["served"] > 0 and not any(check[name] for name in ALTERED)


def _cell(request: LoaderRequest, workload: Workload, folder: Path, peer: Peer, job: str, **how: Any) -> dict[str, Any]:
    """Run a job in a fresh process: its result, or {"failed": why}, or {"missing": [what is not installed]}."""
    asked = Job(job, peer.name, asdict(workload) | {"buckets": dict(workload.buckets)}, str(folder), **how)
    python = request.pythons.get(peer.name, sys.executable)
    timeout = CELL_SECONDS + workload.num_records * workload.record_bytes / 1e6
    try:
        child = subprocess.Popen(
            [python, "-m", "leandit.tools.bench.loader.cell"],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"},
            start_new_session=True,  # so that its workers are killed with it
        )
    except OSError as error:
        return {"failed": f"'{python}' does not start: {error.strerror}"}
    try:
        out, errors = child.communicate(json.dumps(asdict(asked)), timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"failed": f"no answer within {timeout:.0f} s"}
    finally:
        _kill_group(child)
    lines = out.strip().splitlines()
    if child.returncode or not lines:
        why = (errors.strip().splitlines() or ["no message"])[-1]
        return {"failed": f"exit code {child.returncode}: {why}"}
    return json.loads(lines[-1])


def _kill_group(child: subprocess.Popen[str]) -> None:
    """Kill a process and the workers that it left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _check_room(folder: Path, workload: Workload, peers: Sequence[Peer]) -> None:
    """Raises: ResourceError: the disk is too small for the files that are still to be written."""
    missing = {peer.files for peer in peers if not (folder / peer.files).exists()} | {STORE}
    needed = int(len(missing) * workload.num_records * workload.record_bytes * FILE_OVERHEAD)
    free = shutil.disk_usage(folder.parent).free
    if needed > free:
        raise ResourceError(
            f"folder '{folder.parent}': {free / 2**30:.1f} GiB are free, the files of {len(missing)} peers may take "
            f"{needed / 2**30:.1f}. Take another --scratch, fewer --records, or some of the --peers."
        )
