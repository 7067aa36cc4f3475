"""Every figure that needs a GPU, the most valuable first, by one command that may be cut at any second.

    python benchmarks/gpu.py run --minutes 40 --out leandit-gpu
    python benchmarks/gpu.py table leandit-gpu

Each cell runs in a process of its own. One that crashes or takes too long costs itself alone: it is recorded with its
message, and the next one runs. The same command goes on where it was cut.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import gpu_cells as cells
import typer
from gpu_cells import FUNCTIONS, NEEDS_SCRATCH, REAL, TINY, Cell
from measuring import fresh_folder, hardware, in_child, log, median_and_range, print_table, ratios

FILE, MISSING, GIB = "cells.jsonl", "not yet measured", 2**30
Record = dict[str, Any]
Column = tuple[str, Callable[[Any], str]]
app = typer.Typer(no_args_is_help=True, add_completion=False, help="All figures that need a GPU.")

# --------------------------------------------------------------------------------------------------------- the command


@app.command()
def run(
    out: Annotated[Path, typer.Option(help="Folder of the results; the same command goes on where it was cut.")],
    minutes: Annotated[float, typer.Option(help="For all; a cell that might not end by then is not begun.")] = 40,
    scratch: Annotated[Path | None, typer.Option(help="Folder for stores and random encoders, 60 GB.")] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Tiny sizes, to see that everything works.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Try cells again that failed or were skipped.")] = False,
    fast_dit: Annotated[Path | None, typer.Option(help="Checkout of github.com/chuanyangjin/fast-DiT.")] = None,
    device: Annotated[str, typer.Option(help="cuda:N, or cpu with --tiny.")] = "cuda:0",
) -> None:
    """Run all cells that are not finished; those that were cut before come last."""
    if device == "cpu" and not tiny:
        raise typer.BadParameter("--device cpu: the real sizes need a GPU. Add --tiny.")
    run_cells(TINY if tiny else REAL, out, (scratch or out / "scratch").resolve(), device, minutes, again, fast_dit)
    log(f"next: python benchmarks/gpu.py table {out}")


@app.command()
def table(results: Annotated[Path, typer.Argument(help="What 'run' has measured.")]) -> None:
    """Print the results as tables in Markdown."""
    print_results(read_results(results))


def run_cells(
    todo: Sequence[Cell],
    out: Path,
    scratch: Path,
    device: str,
    minutes: float,
    again: bool = False,
    fast_dit: Path | None = None,
) -> None:
    """Run cells within a budget of time, and append a record of each to ``out``."""
    end, machine = time.monotonic() + 60 * minutes, hardware() | {"torch": metadata.version("torch")}
    out.mkdir(parents=True, exist_ok=True)
    found = read_results(out)
    remaining = [cell for cell in todo if not _is_finished(cell, found.get(cell.name), again)]
    log(f"{len(todo) - len(remaining)} of {len(todo)} cells are finished, {minutes:g} minutes for the others")
    for cell in sorted(remaining, key=lambda cell: found.get(cell.name, {}).get("status") == "cut"):
        left = end - time.monotonic()
        if left < cell.limit_seconds:
            log(f"{cell.name}: not begun, {max(0, left):.0f} s are left and it may take {cell.limit_seconds:.0f} s")
            continue
        record = _run_cell(cell, device, scratch, fast_dit)
        record |= {"machine": machine, "command": shlex.join(sys.argv), "arguments": cell.arguments}
        append_result(out, record)
        log(f"{cell.name}: {record['status']} in {record['seconds']:.0f} s. {record['message']}".rstrip())


def _run_cell(cell: Cell, device: str, scratch: Path, fast_dit: Path | None) -> Record:
    record = {"cell": cell.name, "date": datetime.now(UTC).isoformat(timespec="seconds"), "seconds": 0.0}
    arguments = {"device": device} | cell.arguments
    if cell.table == cells.FAST_DIT:
        if fast_dit is None:
            message = "clone github.com/chuanyangjin/fast-DiT, and give --fast-dit DIR and --again"
            return record | {"status": "skipped", "message": message, "result": None}
        arguments["fast_dit"] = str(fast_dit.resolve())
    if cell.table in NEEDS_SCRATCH:
        arguments["scratch"], environment = str(scratch), {}
    else:  # temporary stores, which a killed cell leaves; not where workers need a short path for their sockets
        environment = {"TMPDIR": str(fresh_folder(scratch, "tmp"))}
    outcome = in_child(*FUNCTIONS[cell.table], arguments, limit_seconds=cell.limit_seconds, environment=environment)
    record |= {"seconds": round(outcome.seconds, 1), "message": outcome.message}
    if outcome.status == "done" and (reason := outcome.result.get("skipped")):
        return record | {"status": "skipped", "message": reason, "result": None}
    return record | {"status": outcome.status, "result": outcome.result}


# --------------------------------------------------------------------------------------------------------- the results


def read_results(out: Path) -> dict[str, Record]:
    """The last record of each cell, by its name; a line that was cut while it was written counts for nothing."""
    path, records = out / FILE, {}
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        records[record["cell"]] = record
    return records


def append_result(out: Path, record: Mapping[str, Any]) -> None:
    """Add a line and wait until it is on the disk; a torn line before it stays a line of its own."""
    with (out / FILE).open("ab") as file:
        file.write(b"\n" + json.dumps(record).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _is_finished(cell: Cell, record: Record | None, again: bool) -> bool:
    """Whether a cell need not run: it is done with the same arguments, or has failed and is not to be tried again."""
    if record is None or record["arguments"] != cell.arguments:
        return False
    return record["status"] == "done" or (record["status"] in ("failed", "skipped") and not again)


def _rate(name: str, key: str = "images_per_second") -> Column:
    return name, lambda result: median_and_range(result[key][name], "{:.1f}")


def _ratio(one: str, other: str, title: str = "ratio", key: str = "images_per_second") -> Column:
    def show(result: Any) -> str:
        return median_and_range(ratios(result[key][one], result[key][other]), "{:.3g}x")

    return title, show


def _milliseconds(kernel: str) -> Column:
    def show(result: Any) -> str:
        seconds = result["seconds"].get(kernel)
        return "not supported" if seconds is None else f"{1000 * seconds:.1f}"

    return kernel, show


def _mfu(result: Any) -> str:
    return "unknown" if None in result["mfu"] else f"{median(result['mfu']):.1%}"


TABLES: dict[str, tuple[str, tuple[Column, ...]]] = {
    cells.TRAIN: (
        "Training, on a store of noise",
        (
            ("images/s", lambda r: median_and_range(r["images_per_second"]["store"], "{:.1f}")),
            ("MFU", _mfu),
            _ratio("store", "synthetic", "of one synthetic batch"),
            ("waits for data", lambda r: f"{median(r['data_wait_share']):.2%}"),
            ("peak GiB", lambda r: f"{max(r['peak_gib']):.1f}"),
            ("batch, precision", lambda r: f"{r['batch']}, {r['precision']}"),
        ),
    ),
    cells.BESIDE: (
        "Our step and the usual loop around diffusers' model, images/s",
        (_rate("leandit"), _rate("diffusers"), _ratio("leandit", "diffusers")),
    ),
    cells.FAST_DIT: (
        "Our step and that of fast-DiT, images/s",
        (_rate("leandit"), _rate("fast-DiT"), _ratio("leandit", "fast-DiT")),
    ),
    cells.PLANNER: (
        "Peak memory that the planner predicts, and of real steps, GiB",
        (
            ("predicted", lambda r: f"{r['predicted'] / GIB:.2f}"),
            ("measured", lambda r: f"{r['measured'] / GIB:.2f}"),
            ("ratio", lambda r: f"{r['ratio']:.3f}"),
        ),
    ),
    cells.ENCODE: (
        "Precompute of images, SD-VAE, images/s",
        (
            _rate("bare encoder", "rates"),
            _rate("leandit", "rates"),
            _ratio("leandit", "bare encoder", "of the bare encoder", "rates"),
            _rate("bare decode", "rates"),
            _ratio("leandit", "fast-DiT", "of fast-DiT", "rates"),
            _ratio("leandit", "PixArt", "of PixArt", "rates"),
        ),
    ),
    cells.CAPTIONS: (
        "Precompute of captions, 20 to 120 tokens, captions/s",
        (
            _rate("leandit captions", "rates"),
            _rate("PixArt captions", "rates"),
            _ratio("leandit captions", "PixArt captions", key="rates"),
            ("padding computed", lambda r: f"{r['captions']['padding_share']:.1%}"),
        ),
    ),
    cells.CACHING: (
        "Training on a store, and with the encoders in every step, images/s",
        (_rate("cached"), _rate("online"), _ratio("cached", "online")),
    ),
    cells.ATTENTION: (
        "Attention of a forward and backward of 32 images, ms",
        tuple(_milliseconds(name) for name in ("cudnn", "flash", "flash3", "efficient")),
    ),
    cells.CHECKPOINTS: (
        "A step, and what it takes longer after a checkpoint",
        (
            ("checkpoint, GB", lambda r: f"{r['bytes'] / 1e9:.2f}"),
            ("step, s", lambda r: f"{r['step_seconds']:.3f}"),
            ("longer by, s", lambda r: median_and_range(r["stalls"], "{:.3f}")),
        ),
    ),
}


def print_results(records: Mapping[str, Record]) -> None:
    """All tables; a cell without a record is not yet measured, and the last table says which cells failed and why."""
    is_tiny = any(cell.name in records for cell in TINY)
    if is_tiny:
        print("**Tiny sizes: these figures show that the command works, and nothing else.**\n")
    machines: dict[str, set[str]] = {}
    for record in records.values():
        machine = record["machine"]
        about = f"{machine['gpu'] or 'no GPU'}; {machine['cpu']}, {machine['cores']} cores; torch {machine['torch']}"
        machines.setdefault(about, set()).add(record["date"][:10])
    for about, days in machines.items():
        print(f"{about}; {', '.join(sorted(days))}.\n")
    for name, (title, columns) in TABLES.items():
        of_table = [cell for cell in (TINY if is_tiny else REAL) if cell.table == name]
        goal = ["goal"] if any(cell.goal for cell in of_table) else []
        rows = [["", *(column for column, _ in columns), *goal]]
        for cell in of_table:
            rows.append([cell.row, *_values(columns, records.get(cell.name)), *([cell.goal] if goal else [])])
        print(f"**{title}**\n")
        print_table(rows)
        print()
    if not_done := [record for record in records.values() if record["status"] != "done"]:
        print("**Not done**\n")
        print_table([["cell", "", ""], *([one["cell"], one["status"], one["message"]] for one in not_done)])


def _values(columns: Sequence[Column], record: Record | None) -> list[str]:
    if record is None or record["status"] == "cut":
        return [MISSING] * len(columns)
    if record["status"] != "done":
        return [record["status"]] * len(columns)
    return [show(record["result"]) for _, show in columns]


if __name__ == "__main__":
    app()
