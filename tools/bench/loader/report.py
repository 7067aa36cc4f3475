"""The report of the loader benchmark: medians over the rounds, as a text table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from ...terminal.text import aligned, column_widths, printable
from ..peers.peers import IN_PROCESS, WORKERS

FIGURES = {  # of a mode, from the fields of its cells
    "records_per_second": ("records_per_second", 1),
    "limit_records_per_second": ("limit_records_per_second", 1),
    "first_epoch_records_per_second": ("first_epoch_records_per_second", 1),
    "cpu_us_per_record": ("cpu_seconds_per_record", 1e6),
    "import_ms": ("import_seconds", 1e3),
    "first_batch_ms": ("first_batch_seconds", 1e3),
    "memory_mb": ("memory_mb", 1),
}
IN_PROCESS_COLUMNS, WORKER_COLUMNS = ("ratio", "range", "records/s", "CPU us"), ("ratio", "range", "records/s")
HEAD = ("peer", *IN_PROCESS_COLUMNS, *WORKER_COLUMNS, "first ms", "MB", "KiB", "shuffle")
GROUPS = ((1, "in process"), (5, "2 workers"))  # first column of each group


def summarise(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Medians over the rounds of one peer in one mode, and the range of its ratio; None if every round failed."""
    good = [cell for cell in cells if "failed" not in cell]
    if not good:
        return None
    ratios = [cell["ratio"] for cell in good]
    figures: dict[str, Any] = {"ratio": {"median": median(ratios), "min": min(ratios), "max": max(ratios)}}
    for name, (key, unit) in FIGURES.items():
        values = [cell[key] * unit for cell in good if cell[key] is not None]
        figures[name] = median(values) if values else None
    return figures


def render(result: Mapping[str, Any]) -> str:
    """The tables of all workloads, with the hardware and the peers that are left out."""
    machine = result["hardware"]
    head = [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['kernel']}, "
        f"Python {machine['python']}; {result['date']}",
        f"Medians of {result['rounds']} rounds. Ratio: to one gather a batch from a flat mapped file, in its process.",
    ]
    blocks = [_workload(workload) for workload in result["workloads"]]
    left_out = [f"left out: {name}: {why}" for name, why in result["left_out"].items()]
    return "\n\n".join(["\n".join(head), *blocks, "\n".join(left_out)])


def _workload(workload: Mapping[str, Any]) -> str:
    records, buckets = sum(workload["buckets"].values()), len(workload["buckets"])
    title = (
        f"{workload['name']}: {records:,} records of {workload['record_bytes'] / 1024:.1f} KiB, {buckets} "
        f"bucket{'s' if buckets > 1 else ''}, batches of {workload['batch']}"
    )
    peers = sorted((peer for peer in workload["peers"] if peer.get("modes")), key=best_ratio, reverse=True)
    rows = [_row(peer) for peer in peers]
    widths = column_widths([HEAD, *rows])
    groups, place = "", [sum(widths[:i]) + 2 * i for i in range(len(widths))]
    for column, name in GROUPS:
        groups = groups.ljust(place[column]) + name
    lines = [title, groups, *aligned([HEAD, *rows])]
    lines += [printable(note) for peer in workload["peers"] for note in notes(peer)]
    if workload["left_out"]:
        lines.append(f"  not written for {workload['name']}: {', '.join(workload['left_out'])}")
    return "\n".join(lines)


def _row(peer: Mapping[str, Any]) -> tuple[str, ...]:
    alone, helped = (peer["modes"].get(mode) for mode in (IN_PROCESS, WORKERS))
    either = alone or helped
    shuffle = [checked["check"]["shuffle"] for checked in peer["checks"].values() if "check" in checked]
    return (
        peer["name"] + (" *" if notes(peer) else ""),
        *_ratio(alone),
        _number(alone and alone["cpu_us_per_record"], 1),
        *_ratio(helped),
        _number(either["first_batch_ms"], 0),
        "/".join(_number(figures["memory_mb"], 0) for figures in (alone, helped) if figures),
        _number(peer["disk_bytes_per_record"] / 1024, 2),
        _number(min(shuffle), 2) if shuffle else "-",
    )


def _ratio(figures: Mapping[str, Any] | None) -> tuple[str, str, str]:
    if not figures:
        return "-", "", "-"
    low, middle, high = (_significant(figures["ratio"][name]) for name in ("min", "median", "max"))
    return middle, f"{low}..{high}", f"{figures['records_per_second']:,.0f}"


def _significant(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}" if value >= 0.001 else f"{value:.4f}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def best_ratio(peer: Mapping[str, Any]) -> float:
    """The higher of a peer's median ratios."""
    return max(figures["ratio"]["median"] for figures in peer["modes"].values())


def notes(peer: Mapping[str, Any]) -> list[str]:
    """Remarks on a peer: not installed, failed, or faulty batches."""
    name = peer["name"]
    if "missing" in peer:
        return [f"  {name}: not installed ({', '.join(peer['missing'])})"]
    if "failed" in peer:
        return [f"  {name}: could not be written: {peer['failed']}"]
    remarks = []
    for mode, checked in peer.get("checks", {}).items():
        untimed = "" if mode in peer.get("modes", {}) else "; not timed"
        if "failed" in checked:
            remarks.append(f"  * {name}, {mode}: {checked['failed']}{untimed}")
        elif checked["problems"]:
            remarks.append(f"  * {name}, {mode}: {'; '.join(checked['problems'])}{untimed}")
    for mode, cells in peer.get("cells", {}).items():
        reasons = sorted({cell["failed"] for cell in cells if "failed" in cell})
        remarks += [f"  * {name}, {mode}: a round failed: {reason}" for reason in reasons]
    return remarks
