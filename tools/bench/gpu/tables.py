"""The tables of docs/benchmarks.md in Markdown, from the records of ``leandit bench gpu``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from ..harness.rounds import median_and_range, ratios
from . import cells as kinds
from .cells import REAL, TINY, Cell
from .results import CUT, DONE, FAILED, SKIPPED, Record

MISSING, GIB, GB = "not yet measured", 2**30, 1e9
Result = dict[str, Any]
Column = tuple[str, Callable[[Result], str]]
RATES = "images_per_second"


def _rate(rates: Callable[[Result], list[float]]) -> Callable[[Result], str]:
    return lambda result: median_and_range(rates(result), "{:.1f}")


def _ratio(one: str, other: str, key: str = RATES) -> Callable[[Result], str]:
    return lambda result: median_and_range(ratios(result[key][one], result[key][other]), "{:.3g}x")


def _milliseconds(kernel: str) -> Callable[[Result], str]:
    def show(result: Result) -> str:
        seconds = result["seconds"].get(kernel)
        return "not supported" if seconds is None else f"{1000 * seconds:.1f}"

    return show


def _of(key: str, other: str) -> Callable[[Result], str]:
    """A ratio of ``bench precompute``, which has those of fast-DiT only for its crop."""

    def show(result: Result) -> str:
        return median_and_range(ratios(result["rates"][key], result["rates"][other]), "{:.3g}x")

    return show


TITLES: Mapping[str, str] = {
    kinds.SMOKE: "Smoke test",
    kinds.TRAIN: "Training, on a store of noise",
    kinds.BESIDE: "Our step and the usual loop around diffusers' model, images/s",
    kinds.FAST_DIT: "Our step and that of fast-DiT, images/s",
    kinds.PLANNER: "Peak memory that the planner says, and of real steps, GiB",
    kinds.ENCODE: "Precompute of pictures, SD-VAE, images/s",
    kinds.CAPTIONS: "Precompute of captions, 20 to 120 tokens, captions/s",
    kinds.CACHING: "Training on a store, and with the encoders in every step, images/s",
    kinds.ATTENTION: "Attention of a forward and backward of 32 images, ms",
    kinds.CHECKPOINT: "A step, and what it takes longer after a checkpoint",
}
COLUMNS: Mapping[str, tuple[Column, ...]] = {
    kinds.SMOKE: (("", lambda r: "<br>".join(f"{name}: {said}" for name, said in r["checks"].items())),),
    kinds.TRAIN: (
        ("images/s", _rate(lambda r: r[RATES]["store"])),
        ("MFU", lambda r: f"{r['mfu']['store']:.1%}" if r["mfu"] else "unknown"),
        ("of one synthetic batch", _ratio("store", "synthetic")),
        ("waits for data", lambda r: f"{median(r['data_wait_share']):.2%}"),
        ("peak GiB", lambda r: f"{r['peak_gib']:.1f}"),
        ("batch, precision", lambda r: f"{r['batch']}, {r['precision']}"),
    ),
    kinds.BESIDE: (
        ("leandit", _rate(lambda r: r[RATES]["leandit"])),
        ("diffusers", _rate(lambda r: r[RATES]["diffusers"])),
        ("ratio", _ratio("leandit", "diffusers")),
    ),
    kinds.FAST_DIT: (
        ("leandit", _rate(lambda r: r[RATES]["leandit"])),
        ("fast-DiT", _rate(lambda r: r[RATES]["fast-DiT"])),
        ("ratio", _ratio("leandit", "fast-DiT")),
    ),
    kinds.PLANNER: (
        ("predicted", lambda r: f"{r['predicted'] / GIB:.2f}"),
        ("measured", lambda r: f"{r['measured'] / GIB:.2f}"),
        ("ratio", lambda r: f"{r['ratio']:.3f}"),
    ),
    kinds.ENCODE: (
        ("bare encoder", _rate(lambda r: r["rates"]["bare encoder"])),
        ("end to end", _rate(lambda r: r["rates"]["leandit"])),
        ("of the bare encoder", _of("leandit", "bare encoder")),
        ("bare decoding", _rate(lambda r: r["rates"]["bare decode"])),
        ("of fast-DiT", _of("leandit", "fast-DiT")),
        ("of PixArt", _of("leandit", "PixArt")),
    ),
    kinds.CAPTIONS: (
        ("leandit", _rate(lambda r: r["rates"]["leandit captions"])),
        ("PixArt", _rate(lambda r: r["rates"]["PixArt captions"])),
        ("ratio", _of("leandit captions", "PixArt captions")),
        ("padding computed", lambda r: f"{r['captions']['padding_share']:.1%}"),
    ),
    kinds.CACHING: (
        ("cached", _rate(lambda r: r[RATES]["cached"])),
        ("online", _rate(lambda r: r[RATES]["online"])),
        ("ratio", _ratio("cached", "online")),
    ),
    kinds.ATTENTION: tuple((name, _milliseconds(name)) for name in ("cudnn", "flash", "flash3", "efficient")),
    kinds.CHECKPOINT: (
        ("checkpoint, GB", lambda r: f"{r['bytes'] / GB:.2f}"),
        ("step, s", lambda r: f"{r['step_seconds']:.3f}"),
        ("longer by, s", lambda r: median_and_range(r["stalls"], "{:.3f}")),
    ),
}


def render(records: Mapping[str, Record]) -> str:
    """All tables; a cell that is missing is not yet measured, and the last table says which cells failed and why.

    Args:
      records: by the name of the cell, as ``read_results`` returns them.
    """
    is_tiny = any(record["tiny"] for record in records.values())
    shown = TINY if is_tiny else REAL
    parts = [_machines(records)] if records else []
    if is_tiny:
        parts.insert(0, "**Tiny sizes: these figures show that the command works, and nothing else.**")
    for table, title in TITLES.items():
        of_table = [cell for cell in shown if cell.table == table]
        parts.append("\n".join([f"**{title}**", "", *_table(of_table, records)]))
    not_done = [record for record in records.values() if record["status"] != DONE]
    if not_done:
        lines = [f"| {one['cell']} | {one['status']} | {_plain(one['message'])} |" for one in not_done]
        parts.append("\n".join(["**Not done**", "", "| cell | | |", "|---|---|---|", *lines]))
    return "\n\n".join(parts)


def _table(shown: list[Cell], records: Mapping[str, Record]) -> list[str]:
    columns = COLUMNS[shown[0].table]
    has_goal = any(cell.goal for cell in shown)
    names = ["", *(name for name, _ in columns), *(["goal"] if has_goal else [])]
    rows = [names, ["---"] * len(names)]
    for cell in shown:
        values = _values(columns, records.get(cell.name))
        rows.append([cell.row, *values, *([cell.goal] if has_goal else [])])
    return [f"| {' | '.join(row)} |" for row in rows]


def _values(columns: tuple[Column, ...], record: Record | None) -> list[str]:
    if record is None or record["status"] == CUT:
        return [MISSING] * len(columns)
    if record["status"] in (FAILED, SKIPPED):
        return [record["status"]] * len(columns)
    return [_plain(show(record["result"])) for _, show in columns]


def _machines(records: Mapping[str, Record]) -> str:
    """Every machine of the records, with the days."""
    machines: dict[str, set[str]] = {}
    for record in records.values():
        one = record["machine"]
        said = f"{one['gpu, driver, memory'] or 'no GPU'}; {one['cpu']}, {one['cores']} cores; torch {one['torch']}"
        machines.setdefault(said, set()).add(record["date"][:10])
    return "\n".join(f"{said}; {', '.join(sorted(days))}." for said, days in machines.items())


def _plain(text: str) -> str:
    """Text that ends neither a cell nor a row."""
    return text.replace("|", "\\|").replace("\n", " ")
