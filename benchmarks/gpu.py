"""Every figure that needs a GPU, the most valuable first, by one command that may be cut at any second.

    python benchmarks/gpu.py run --minutes 40 --out leandit-gpu
    python benchmarks/gpu.py table leandit-gpu

A cell is a call of a function of this folder in a process of its own. One that crashes or takes too long costs itself
alone: it is recorded with its message, and the next one runs. The same command goes on where it was cut.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from measuring import fresh_folder, in_child, log, machine, median_and_range, print_table, ratios

FILE, MISSING = "cells.jsonl", "not yet measured"
Record = dict[str, Any]
app = typer.Typer(no_args_is_help=True, add_completion=False, help="All figures that need a GPU.")

# -------------------------------------------------------------------------------------------------- tables, their cells


Column = tuple[str | tuple[str, str], Callable[[Any], str]]
"""Key of a cell's result, or two keys, whose ratio in each round is shown; and how a value is shown."""


class Table(NamedTuple):
    """A table of results, a row for each cell.

    Args:
      function: its module and name; it returns lists with a value for each round, by key.
      needs_scratch: the function takes the folder ``scratch``, for encoders that several cells load.
    """

    title: str
    function: tuple[str, str]
    columns: dict[str, Column]
    needs_scratch: bool = False


class Cell(NamedTuple):
    """One measurement.

    Args:
      table: key of ``TABLES``.
      limit_seconds: after which its process is killed; about twice what is expected.
      arguments: of the function, without the device.
      goal: that the table shows.
    """

    table: str
    row: str
    limit_seconds: float
    arguments: dict[str, Any]
    goal: str = ""

    @property
    def name(self) -> str:
        """Unique, for people and for the results."""
        return f"{self.table}: {self.row}"


RATE, TIMES, PERCENT, THREE_DIGITS = "{:.1f}".format, "{:.3g}x".format, "{:.2%}".format, "{:.3f}".format


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f}"


def _two(one: str, other: str, suffix: str = "") -> dict[str, Column]:
    """Columns of two rates and their ratio."""
    keys = one + suffix, other + suffix
    return {one: (keys[0], RATE), other: (keys[1], RATE), "ratio": (keys, TIMES)}


TABLES = {
    "train": Table(
        "Training, on a store of noise",
        ("training", "measure_store"),
        {
            "images/s": ("images_per_second", RATE),
            "MFU": ("mfu", "{:.1%}".format),
            "of one synthetic batch": (("images_per_second", "synthetic"), TIMES),
            "waits for data": ("data_wait_share", PERCENT),
            "peak GiB": ("peak_gib", RATE),
            "batch, precision": ("size", str),
        },
    ),
    "beside": Table(
        "Our step and the usual loop around diffusers' model, images/s",
        ("training", "measure_beside"),
        _two("leandit", "diffusers"),
    ),
    "fast_dit": Table(
        "Our step and that of fast-DiT, images/s", ("training", "measure_beside"), _two("leandit", "fast-DiT")
    ),
    "planner": Table(
        "Peak memory that the planner predicts, and of real steps, GiB",
        ("planner", "measure_planner"),
        {"predicted": ("predicted", _gib), "measured": ("measured", _gib), "ratio": ("ratio", THREE_DIGITS)},
    ),
    "precompute": Table(
        "Precompute of images, SD-VAE, images/s",
        ("encode", "measure_precompute"),
        {
            "bare encoder": ("bare encoder", RATE),
            "leandit": ("leandit", RATE),
            "of the bare encoder": (("leandit", "bare encoder"), TIMES),
            "bare decode": ("bare decode", RATE),
        },
        needs_scratch=True,
    ),
    "captions": Table(
        "Precompute of captions, 20 to 120 tokens, captions/s",
        ("encode", "measure_captions"),
        _two("leandit", "PixArt", " captions") | {"padding computed": ("padding", PERCENT)},
        needs_scratch=True,
    ),
}

XL, XL_512, B, PIXART = "DiT-XL/2, 256 px", "DiT-XL/2, 512 px", "DiT-B/2, 256 px", "PixArt-Sigma, 512 px"
SANA, SD3 = "Sana 1.6B, 1024 px", "SD3.5 Medium, 512 px"


def _recipe(name: str, side_px: int, batch: int, microbatch: int) -> dict[str, Any]:
    sizes = [f"run.global_batch={batch}", f"run.microbatch={microbatch}"]
    return {"recipe": name, "side_px": side_px, "settings": sizes}


# Each microbatch fits a GPU of 80 GB.
RECIPES = {
    XL: _recipe("dit-xl-2-256", 256, 256, 64),
    XL_512: _recipe("dit-xl-2-512", 512, 64, 16),
    B: _recipe("dit-b-2-256", 256, 256, 128),
    PIXART: _recipe("pixart-sigma-512", 512, 64, 32),
    SANA: _recipe("sana-1600m-1024", 1024, 32, 16),
    SD3: _recipe("sd3.5-medium-512", 512, 32, 8),
}
ADAMW = "optimizer.name=adamw"  # beside the usual loops around models with text, which have no other


def _train(row: str, limit: float, goal: str = "") -> Cell:
    return Cell("train", row, limit, RECIPES[row] | {"rounds": 2, "steps": 20}, goal)


def _beside(row: str, limit: float, *changes: str, goal: str = "", steps: int = 4) -> Cell:
    settings = {"settings": [*RECIPES[row]["settings"], *changes], "rounds": 3, "steps": steps}
    return Cell("beside", row, limit, RECIPES[row] | settings, goal)


def _planner(recipe: str, side_px: int, microbatch: int, count: int = 1, *changes: str) -> Cell:
    case = {
        "recipe": recipe,
        "side_px": side_px,
        "microbatch": microbatch,
        "microbatches": count,
        "changes": list(changes),
    }
    row = " ".join([f"{recipe}, {count} x {microbatch} images", *changes])
    return Cell("planner", row, 120, {"case": case}, "0.97 to 1.05")


def _encode(side_px: int, limit: float) -> Cell:
    settings = [f"images.resolution={side_px}", f"vae.batch_size={8192 // side_px}", "vae.dtype=bfloat16"]
    images = {"source": f"drawn:{side_px}", "records": 2**20 // side_px, "settings": settings, "vae": "random:sd"}
    return Cell("precompute", f"{side_px} px", limit, images | {"rounds": 2, "seconds": 5.0}, "0.95")


def _captions(text: str, records: int) -> dict[str, Any]:
    return {"source": "drawn:32", "text": text, "records": records, "settings": []}


REAL = (
    _train(XL, 300, "40 % MFU"),
    _train(XL_512, 300, "38 % MFU"),
    _train(B, 200, "32 % MFU"),
    _beside(XL, 240, goal="1.5x"),
    Cell("fast_dit", XL, 300, RECIPES[XL] | {"rounds": 3, "steps": 4}, "2.5x"),
    _train(PIXART, 300, "38 % MFU"),
    _planner("dit-xl-2-256", 256, 64),
    _encode(256, 270),
    Cell("captions", "T5-XXL", 420, _captions("random:t5-xxl", 1024) | {"rounds": 2, "seconds": 5.0}, "4x"),
    _beside(PIXART, 300, ADAMW, steps=2),
    _planner("dit-s-2-256", 256, 256),
    _planner("dit-b-2-256", 256, 128),
    _planner("dit-b-2-256", 256, 128, 2),
    _planner("dit-xl-2-256", 256, 64, 2, "run.activation_checkpointing=blocks"),
    _planner("dit-xl-2-512", 512, 16),
    _planner("pixart-sigma-512", 512, 16),
    _encode(512, 270),
    _train(SD3, 300),
    _train(SANA, 300),
    _beside(SANA, 300, ADAMW, steps=2),
    _beside(B, 200, goal="1.5x"),
    _encode(1024, 300),
    _beside(SD3, 300, ADAMW, steps=2),  # two models of 2.2 B parameters, with all that trains them: 100 GB
)

# One of each kind in seconds on a CPU, to see that all of it works: no figure of it means anything.
_PLAIN = ["run.global_batch=2", "run.precision=fp32", "run.compile=false"]
_DIT = {"recipe": "dit-s-2-256", "side_px": 64, "settings": ["model.name=DiT-Ti/4", *_PLAIN]}
_TEXT = {"recipe": "pixart-sigma-512", "side_px": 64, "settings": ["model.name=pixart-tiny", ADAMW, *_PLAIN]}
_FAST_DIT = _DIT | {"settings": ["model.name=DiT-S/8", *_PLAIN]}  # it has no smaller one
_CASE = {"recipe": "dit-s-2-256", "side_px": 64, "microbatch": 2, "microbatches": 1, "changes": ["model.name=DiT-Ti/4"]}
_IMAGES = {"source": "drawn:32", "records": 4, "settings": ["images.resolution=32", "vae.batch_size=2"]}
_IMAGES |= {"vae": "shipped:vae"}
_ONCE, _SHORT = {"rounds": 1, "steps": 1}, {"rounds": 1, "seconds": 0.01}
TINY = (
    Cell("train", "DiT-Ti/4, 64 px", 120, _DIT | _ONCE),
    Cell("beside", "DiT-Ti/4, 64 px", 120, _DIT | _ONCE),
    Cell("beside", "PixArt, 64 px", 120, _TEXT | _ONCE),
    Cell("fast_dit", "DiT-S/8, 64 px", 120, _FAST_DIT | _ONCE),
    Cell("planner", "DiT-Ti/4, 1 x 2 images", 120, {"case": _CASE}),
    Cell("precompute", "32 px", 120, _IMAGES | _SHORT),
    Cell("captions", "T5", 120, _captions("shipped:t5", 4) | _SHORT),
)

# --------------------------------------------------------------------------------------------------------- the commands


@app.command()
def run(
    out: Annotated[Path, typer.Option(help="Folder of the results; the same command goes on where it was cut.")],
    minutes: Annotated[float, typer.Option(help="For all; a cell that might not end by then is not begun.")] = 40,
    scratch: Annotated[Path | None, typer.Option(help="Folder for stores and random encoders, 60 GB.")] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Tiny sizes, to see that everything works.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Try cells again that failed.")] = False,
    fast_dit: Annotated[Path | None, typer.Option(help="Checkout of github.com/chuanyangjin/fast-DiT.")] = None,
    device: Annotated[str, typer.Option(help="cuda:N, or cpu with --tiny.")] = "cuda:0",
) -> None:
    """Run all cells that are not finished; those that were cut before come last."""
    if device == "cpu" and not tiny:
        raise typer.BadParameter("--device cpu: the real sizes need a GPU. Add --tiny.")
    end, about, cells = time.monotonic() + 60 * minutes, machine(), TINY if tiny else REAL
    scratch = (scratch or out / "scratch").resolve()
    out.mkdir(parents=True, exist_ok=True)
    results = read_results(out)
    left = [cell for cell in cells if not is_finished(cell, results.get(cell.name), again=again)]
    log(f"{len(cells) - len(left)} of {len(cells)} cells are finished, {minutes:g} minutes for the others")
    for cell in sorted(left, key=lambda cell: results.get(cell.name, {}).get("status") == "cut"):
        seconds = end - time.monotonic()
        if seconds < cell.limit_seconds:
            log(f"{cell.name}: not begun, {max(0, seconds):.0f} s are left; it may take {cell.limit_seconds:.0f} s")
            continue
        if cell.table == "fast_dit" and fast_dit is None:
            log(f"{cell.name}: skipped. Clone github.com/chuanyangjin/fast-DiT and pass --fast-dit DIR")
            continue
        log(f"{cell.name}: begins")
        record = run_cell(cell, device, scratch, fast_dit)
        append_result(out, record | {"machine": about, "command": shlex.join(sys.argv)})
        log(f"{cell.name}: {record['status']} in {record['seconds']:.0f} s. {record['message']}".rstrip())
    log(f"next: python benchmarks/gpu.py table {out}")


def is_finished(cell: Cell, record: Record | None, *, again: bool) -> bool:
    """Whether a cell need not run: it is done with the same arguments, or has failed and is not to be tried again."""
    if record is None or record["arguments"] != cell.arguments:
        return False
    return record["status"] == "done" or (record["status"] == "failed" and not again)


def run_cell(cell: Cell, device: str, scratch: Path, fast_dit: Path | None) -> Record:
    """Run a cell; what became of it."""
    date, how, environment = datetime.now(UTC).isoformat(timespec="seconds"), {"device": device}, {}
    if cell.table == "fast_dit":
        how["fast_dit"] = str(fast_dit and fast_dit.resolve())
    if TABLES[cell.table].needs_scratch:
        how["scratch"] = str(scratch)
    else:  # temporary stores, which a killed cell leaves; those above start workers, whose sockets need a short path
        environment["TMPDIR"] = str(fresh_folder(scratch, "tmp"))
    arguments, limit = cell.arguments | how, cell.limit_seconds
    outcome = in_child(*TABLES[cell.table].function, arguments, limit_seconds=limit, environment=environment)
    return {"cell": cell.name, "date": date, "arguments": cell.arguments} | outcome._asdict()


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


@app.command()
def table(out: Annotated[Path, typer.Argument(metavar="RESULTS", help="What 'run' has measured.")]) -> None:
    """Print the results as tables in Markdown; the last one says which cells are not done, and why."""
    records = read_results(out)
    is_tiny = any(cell.name in records for cell in TINY)
    if is_tiny:
        print("**Tiny sizes: these figures show that the command works, and nothing else.**\n")
    for about in dict.fromkeys(record["machine"] for record in records.values()):
        print(f"{about}.\n")
    for name, (title, _, columns, _) in TABLES.items():
        rows = [["", *columns, "goal"]]
        for cell in (cell for cell in (TINY if is_tiny else REAL) if cell.table == name):
            record = records.get(cell.name, {"status": MISSING})
            if record["status"] == "done":
                figures = [show(record["result"], column) for column in columns.values()]
            else:
                figures = [record["status"]] * len(columns)
            rows.append([cell.row, *figures, cell.goal])
        print(f"**{title}**\n")
        print_table(rows)
        print()
    if not_done := [record for record in records.values() if record["status"] != "done"]:
        print("**Not done**\n")
        print_table([["cell", "", ""], *([one["cell"], one["status"], one["message"]] for one in not_done)])


def show(result: Mapping[str, Any], column: Column) -> str:
    """Median and range over the rounds; "-" where a kernel, or the peak of a device, is unknown."""
    keys, form = column
    series: list[Any] = [result.get(key) for key in ([keys] if isinstance(keys, str) else keys)]
    if any(not values or None in values for values in series):
        return "-"
    return median_and_range(ratios(*series) if len(series) == 2 else series[0], form)


if __name__ == "__main__":
    app()
