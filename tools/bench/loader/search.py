"""``leandit bench search``: how long ``leandit view`` searches the records of a large store.

The tables are made in memory: captions of words whose frequencies fall as those of a language do (Zipf's law), keys in
folders of classes. Every query is asked once; none is answered from what an earlier one has found.
"""

from __future__ import annotations

import time
from statistics import median, quantiles
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ....datasets.format.class_names import ClassNames
from ....datasets.format.table_schemas import CAPTIONS_SCHEMA, RECORDS_SCHEMA
from ...inspection.view.records.query import Query
from ...inspection.view.records.search import RecordSearch
from ..harness.meters import hardware

pc: Any = pyarrow.compute  # its functions are made at run time, no type checker sees them
VOCABULARY, WORDS, CLASSES = 20_000, 10, 1000  # words of a caption
BUCKETS = ["256x256", "208x304", "304x208"]
ELAPSED = ("elapsed", "processor")
LETTERS = list("etaoinshrdlcumwfgypbvk")


def run(records: int) -> dict[str, Any]:
    """Make the tables, prepare the search, and ask."""
    rng = np.random.default_rng(0)
    words = _vocabulary(rng)
    captions = _captions(rng, words, records)
    names = [f"n{number:08d}" for number in range(CLASSES)]
    start = time.perf_counter()
    search = RecordSearch(_records(rng, records), captions, ClassNames(names, None))
    search.prepare()
    prepared = time.perf_counter() - start
    milliseconds, cpu_milliseconds = [], []
    for query in _queries(words):
        start, cpu_start = time.perf_counter(), time.process_time()
        search.find(query)
        milliseconds.append((time.perf_counter() - start) * 1e3)
        cpu_milliseconds.append((time.process_time() - cpu_start) * 1e3)
    return {
        "records": records,
        "queries": len(milliseconds),
        "hardware": hardware(),
        "prepare_seconds": prepared,
        "elapsed": _figures(milliseconds),
        "processor": _figures(cpu_milliseconds),  # of all threads together
    }


def render(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Name and value of each line."""
    machine = result["hardware"]
    return [
        ("machine", f"{machine['cpu']}, {machine['cores']} cores"),
        ("prepared", f"{result['prepare_seconds']:.1f} s, in the background, for {result['records']} records"),
        ("queries", f"{result['queries']}, all different"),
        *((kind, ", ".join(f"{name} {ms:.0f} ms" for name, ms in result[kind].items())) for kind in ELAPSED),
    ]


def _figures(milliseconds: list[float]) -> dict[str, float]:
    return {"median": median(milliseconds), "p95": quantiles(milliseconds, n=20)[-1], "max": max(milliseconds)}


def _vocabulary(rng: np.random.Generator) -> list[str]:
    lengths = rng.integers(2, 11, VOCABULARY)
    return ["".join(rng.choice(LETTERS, length)) for length in lengths]


def _captions(rng: np.random.Generator, words: list[str], count: int) -> pa.Table:
    shares = 1 / np.arange(1, VOCABULARY + 1)
    chosen = rng.choice(VOCABULARY, count * WORDS, p=shares / shares.sum())
    offsets = np.arange(0, len(chosen) + 1, WORDS, dtype=np.int32)
    lists = pa.ListArray.from_arrays(pa.array(offsets), pa.array(words).take(pa.array(chosen)))
    texts = {"text": pc.binary_join(lists, " ")}
    return pa.table({field.name: texts.get(field.name, pa.nulls(count, field.type)) for field in CAPTIONS_SCHEMA})


def _records(rng: np.random.Generator, count: int) -> pa.Table:
    numbers, labels = np.arange(count), rng.integers(0, CLASSES, count)
    sides = rng.integers(200, 1600, (2, count)).astype(np.int32)
    ids = pa.ListArray.from_arrays(np.arange(count + 1, dtype=np.int32), pa.array(numbers.astype(np.int32)))
    columns = {
        "key": [f"n{label:08d}/n{label:08d}_{number}.JPEG" for number, label in enumerate(labels.tolist())],
        "bucket": pa.array(BUCKETS).take(pa.array(numbers % len(BUCKETS))),
        "label": labels,
        "caption_ids": ids,
        "height_px": sides[0],
        "width_px": sides[1],
        "status": pa.array(["stored", "rejected"]).take(pa.array((numbers % 100 == 7).astype(int))),
    }
    arrays = [pa.array(columns.get(field.name, pa.nulls(count)), field.type) for field in RECORDS_SCHEMA]
    return pa.table(arrays, schema=RECORDS_SCHEMA)


def _queries(words: list[str]) -> list[Query]:
    """50 of them: words from the most to the least frequent, parts, several, phrases, keys, columns, orders."""
    often, rare = words[:12], words[1000:20_000:1900]
    found = [Query(q=word) for word in [*often, *rare]]  # 22
    found += [Query(q=f"{a} {b}") for a, b in zip(often[:6], rare[:6], strict=True)]
    found += [Query(q=f'"{a} {b}"') for a, b in zip(often[:4], often[4:8], strict=True)]
    found += [Query(q=letter) for letter in "ek"]
    found += [Query(q=part) for part in ("n00000123", "n00000007/", "_99.jpeg", "7_1234")]
    found += [
        Query(q=often[3], bucket=BUCKETS[1], status="stored"),
        Query(status="rejected"),
        Query(class_="n00000011"),
    ]
    found += [Query(where=where) for where in ("height_px >= 1200", "width_px < 300 and height_px < 300", "key ~ _77")]
    found += [Query(sort=sort, order=order) for sort in ("height_px", "width_px") for order in ("up", "down")]
    return [*found, Query(q=rare[7], sort="height_px"), Query(q=often[9], sort="width_px", order="down")]
