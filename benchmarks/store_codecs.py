"""Size and decode speed of a store's rows in every codec: none, blosc at several levels, and plain zstd.

    leandit precompute RECIPE --source PHOTOS --store bench/store --set store.codec=none
    python benchmarks/store_codecs.py bench/store

Each array is packed in its own chunks and decoded chunk by chunk, checksum included, as the store does, into memory
that is reused; "none" is a copy. The codecs alternate in one process; speeds are per second of CPU time, and relative
to "none".
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import google_crc32c
import numcodecs
import numcodecs.blosc
import numpy as np
import typer
from measuring import alternate, machine, print_table

from leandit.datasets.store import LatentStore

app = typer.Typer(add_completion=False)


@app.command()
def codecs(
    store: Annotated[Path, typer.Argument(help="A store without a codec.")],
    levels: Annotated[str, typer.Option(help="Levels of blosc, separated by commas.")] = "1,3,5,7,9",
    rounds: Annotated[int, typer.Option(min=2, help="Rounds; every codec once in each.")] = 7,
    mib: Annotated[int, typer.Option(min=1, help="Most MiB of an array.")] = 32,
    min_kib: Annotated[int, typer.Option(min=1, help="Smaller arrays are left out.")] = 1024,
) -> None:
    """Print a table for every array."""
    opened = LatentStore(store)
    if opened.manifest is None or opened.spec.codec != "none":
        raise typer.BadParameter(f"'{store}' is not complete, or has a codec: expected a store made with codec none")
    numcodecs.blosc.use_threads = False  # one thread, as in the store
    packers = _packers([int(level) for level in levels.split(",")])
    for layout in opened.manifest.arrays:
        array = opened.array(layout.path)
        rows = array.take(np.flatnonzero(layout.has_rows(np.arange(min(len(array), (mib << 20) // layout.row_bytes)))))
        if rows.nbytes < min_kib << 10:
            continue
        chunk_rows = layout.chunk_rows
        print(f"{layout.path}: {layout.dtype} {rows.shape}, {chunk_rows} rows a chunk. {machine()}\n")
        print_table(
            [
                ["codec", "bytes", "encoded MB per CPU second", "decoded GB per CPU second", "relative to none"],
                *_measure(rows, chunk_rows, packers, rounds),
            ]
        )
        print()


def _packers(levels: list[int]) -> dict[str, Any]:
    """The codecs of numcodecs by name; None for no codec."""
    packers: dict[str, Any] = {"none": None, "zstd 3": numcodecs.Zstd(level=3)}
    for level in levels:
        packers[f"blosc {level}"] = numcodecs.Blosc(cname="zstd", clevel=level, shuffle=numcodecs.Blosc.BITSHUFFLE)
    return packers


def _measure(rows: np.ndarray, chunk_rows: int, packers: dict[str, Any], rounds: int) -> list[list[str]]:
    """A row of the table for each codec.

    Args:
      rows: (N, ...) of an array.
    """
    chunks = [rows[first : first + chunk_rows] for first in range(0, len(rows) // chunk_rows * chunk_rows, chunk_rows)]
    num_bytes = sum(chunk.nbytes for chunk in chunks)
    sizes: dict[str, int] = {}
    encode_seconds: dict[str, float] = {}
    cells: dict[str, Callable[[], float]] = {}
    for name, packer in packers.items():
        start = time.thread_time()
        packed = [bytes(packer.encode(np.ascontiguousarray(chunk))) if packer else chunk for chunk in chunks]
        encode_seconds[name] = max(time.thread_time() - start, 1e-9)
        sizes[name] = sum(len(chunk) + 4 for chunk in packed) if packer else num_bytes
        cells[name] = partial(_decode_seconds, packed, packer, np.empty_like(chunks[0]))
    seconds = alternate(cells, rounds)
    table = []
    for name, times in seconds.items():
        ratios = [plain / own for plain, own in zip(seconds["none"], times, strict=True)]
        size = f"{sizes[name] / num_bytes:.1%}"
        decoded = f"{num_bytes / median(times) / 1e9:.2f}"
        encoded = f"{num_bytes / encode_seconds[name] / 1e6:.0f}" if packers[name] else "-"
        table.append([name, size, encoded, decoded, f"{median(ratios):.3f}"])
    return table


def _decode_seconds(packed: list[Any], packer: Any, out: np.ndarray) -> float:
    """CPU seconds to decode all chunks, each into ``out``."""
    start = time.thread_time()
    for chunk in packed:
        if packer is None:
            np.copyto(out, chunk)
        else:
            google_crc32c.value(chunk)
            packer.decode(chunk, out=out)
    return max(time.thread_time() - start, 1e-9)


if __name__ == "__main__":
    app()
