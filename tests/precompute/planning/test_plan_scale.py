"""Plans that go by in batches: the same bytes whatever their size, in memory that does not grow with it."""

from __future__ import annotations

import functools
import tracemalloc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forked import run_forked
from hypothesis import given
from hypothesis import strategies as st
from image_files import exif
from making import SUPPORT, caption_recipe, image_bytes, write_file

from leandit.datasets.disk.hashing import sha256_of, xxh3_parts
from leandit.datasets.format import tables
from leandit.datasets.format.schema import CommitRecord
from leandit.datasets.format.table_schemas import (
    CAPTION_RESULTS,
    CAPTION_START,
    CAPTIONS_SCHEMA,
    PLAN_SCHEMA,
    RECORDS_SCHEMA,
    STORED,
)
from leandit.datasets.format.tables import parquet_file
from leandit.datasets.revisions import merge
from leandit.datasets.revisions.commits import new_results
from leandit.datasets.revisions.plan import FrozenPlan, first_plan
from leandit.precompute.config import SourceSection
from leandit.precompute.encoders.text.tokenizer import CaptionTokenizer
from leandit.precompute.images import decoder_child
from leandit.precompute.images.decoders import Decoders
from leandit.precompute.planning import captions as caption_plan
from leandit.precompute.planning import images as image_plan
from leandit.precompute.planning import records as record_plan
from leandit.precompute.planning.compare import all_fresh
from leandit.precompute.run.rejects import RejectLimits
from leandit.precompute.sources.files.files import LocalFiles
from leandit.precompute.sources.files.record import SourceRecord
from leandit.precompute.sources.listing import listing
from leandit.precompute.sources.source import Source
from leandit.tools.plan.noise_spec import noise_spec

MAX_TOKENS = 6
RECIPE = caption_recipe(f"text.max_tokens={MAX_TOKENS}", "source.sizes=manifest", "source.max_reject_share=1")
WORDS = st.sampled_from(
    ["red", "a circle", " a circle ", "a big blue square", "", " ", "green triangle above a square"]
)
SIZES = [(64, 64), (60, 100), (100, 60), (10, 90)]  # the last is rejected


def table_bytes(table: pa.Table) -> bytes:
    """A table as the bytes of a Parquet file, as pyarrow writes it in one go."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_statistics=True, row_group_size=tables.ROW_GROUP)
    return sink.getvalue().to_pybytes()


@contextmanager
def batches_of(rows: int) -> Iterator[None]:
    """All that is done in batches is done in very small ones."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (listing, record_plan, image_plan, caption_plan, tables):
            patch.setattr(module, "BATCH_ROWS", rows)
        patch.setattr(caption_plan, "TOKENIZE_BATCH", rows)
        patch.setattr(image_plan, "ASKED", rows)
        yield


def source_of(records: Iterable[SourceRecord]) -> Source:
    listed = listing.spool(listing.record_batches(records), lambda done: None)
    return Source(SourceSection(kind="manifest"), LocalFiles(Path()), listed, None, 0)


def planned(source: Source, tokenizer: Any, known: pa.Table | None = None) -> tuple[pa.Table, pa.Table]:
    """The tables of a plan, as the real planner makes them."""
    comparison = all_fresh(source.records)
    with Decoders(1) as decoders:  # none is started: nothing is opened
        limits = RejectLimits(RECIPE.source, len(source.records), is_planning=True)
        images = image_plan.plan_images(source, source.records, RECIPE, decoders, limits)
    counts = [caption_plan.CaptionCounts("", tokenizer, MAX_TOKENS)]
    texts = record_plan.planned_texts(comparison, images)
    captions, ids = caption_plan.plan_captions(texts, counts, num_records=len(source.records), revision=2, known=known)
    return record_plan.plan_records(comparison, images, ids, revision=2), captions


def frozen_plan(records: pa.Table, captions: pa.Table) -> FrozenPlan:
    spec = noise_spec({"64x64": 1, "48x80": 1, "80x48": 1}, 4, 0, MAX_TOKENS, 8, 64, "none")
    return FrozenPlan(spec, 2, "", False, "", records, captions)


@functools.cache
def tokenizer() -> CaptionTokenizer:
    return CaptionTokenizer(RECIPE.text[""])


records_of = st.lists(
    st.tuples(
        st.integers(0, 15),
        st.lists(WORDS, max_size=3),
        st.sampled_from(SIZES),
        st.sampled_from([None, None, None, ("missing_file", "there is no such")]),
    ),
    min_size=1,
    max_size=24,
)


@given(made=records_of, rows=st.integers(1, 9), num_known=st.integers(0, 4))
def test_a_plan_in_batches_is_the_plan_in_one_piece_to_the_byte(made: list, rows: int, num_known: int) -> None:
    records = [
        SourceRecord(f"key-{key}", f"{i}.jpg", i, i + 9, i, key % 3, tuple(texts), problem, *size)
        for i, (key, texts, size, problem) in enumerate(made)
    ]
    texts = ["a circle", "nobody says this", "red", "nor this"][:num_known]
    row = dict.fromkeys((CAPTION_START, *CAPTION_RESULTS)) | {"revision": 1, "num_tokens": 3, "truncated": False}
    before = pa.Table.from_pylist([row | {"text": text} for text in texts], CAPTIONS_SCHEMA)
    whole = planned(source_of(records), tokenizer(), before)
    with batches_of(rows):
        batched = planned(source_of(records), tokenizer(), before)
    for found, wanted in zip(batched, whole, strict=True):
        assert found.to_pylist() == wanted.to_pylist()
        assert bytes(parquet_file(found)) == table_bytes(wanted.combine_chunks())
    # Its hash stands in every commit record: if it changes, no unfinished store can be gone on with.
    plan, pieces = frozen_plan(*batched), [whole[0].drop_columns(["source_mtime_ns"]), whole[1]]
    hashes = [xxh3_parts([table_bytes(table.combine_chunks())])[1] for table in pieces]
    assert plan.hash == sha256_of([plan.spec.fingerprint, 2, "", False, *hashes])


def test_the_bytes_of_a_table_do_not_depend_on_its_chunks() -> None:
    # More than a Parquet page of each kind of column, with nulls, and chunks that do not fit its write batches.
    count, rng = 60_000, np.random.default_rng(0)
    columns = {
        "text": [None if i % 11 == 0 else f"{'é' * (i % 40)}{rng.integers(1 << 40)}" for i in range(count)],
        "ids": pa.array([[i] * (i % 4) for i in range(count)], pa.list_(pa.int32())),
        "number": rng.integers(0, 1 << 40, count),
        "nothing": pa.nulls(count, pa.string()),
    }
    whole = pa.table(columns)
    cut = pa.concat_tables([whole.slice(start, 777) for start in range(0, count, 777)])
    for table in (cut, cut.slice(0, 0)):
        assert bytes(parquet_file(table)) == table_bytes(table.combine_chunks())


MEMORY = """
from dataclasses import replace
from test_plan_scale import *
from leandit.datasets.revisions.plan import freeze_plan, read_plan
from leandit.datasets.disk.spill import map_table
from leandit.precompute.planning.compare import Options, compare

class Words:
    def count(self, texts):
        return [len(text.split()) for text in texts]

def anonymous_mb():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024

def listed(count, revision):  # one record in 100 has another time in each revision, one another caption
    records = (
        SourceRecord(f"folder/{i:09d}.jpg", f"folder/{i:09d}.jpg", 0, i, i if i % 100 else revision, height_px=64,
                     width_px=64, captions=("a caption of some words " + "x " * (i % 5) + str(i) +
                     (f" in {revision}" if i % 100 == 7 else ""),))
        for i in range(count)
    )
    return source_of(records)

def stored(records):
    for batch in records.to_batches():
        status = pa.array(["stored"] * batch.num_rows)
        yield batch.set_column(batch.schema.names.index("status"), "status", status)

def make(count, store):
    source = listed(count, 1)
    made = frozen_plan(*planned(source, Words()))
    freeze_plan(store, made)
    found = read_plan(store, 2)
    assert len(found.positions_of(found.layout.parts["buckets/64x64"])) == count
    records = map_table(made.records.schema, stored(made.records), "records")
    base = replace(made, records=records)
    grown = compare(listed(count, 2), base, Options(), RECIPE, num_threads=1, progress=lambda done: None)
    assert (len(grown.fresh), grown.num_changed, grown.num_described) == (count // 100, count // 100, count // 100)
    return source, made, found, grown  # all of it is held

store = Path(sys.argv[1])
small = make(10_000, store / "small")
before, allocated = anonymous_mb(), pa.total_allocated_bytes()
large = make(40_000, store / "large")
print(pa.total_allocated_bytes() - allocated, anonymous_mb() - before)
"""


def test_the_size_of_a_large_file_is_that_of_all_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_child, "HEADER_BYTES", 4096)
    turned = {"exif": exif(6), "quality": 95}
    late = image_bytes(3, 90, 120, "JPEG", **turned)
    pad = b"".join(b"\xff\xed" + (60_000).to_bytes(2, "big") + bytes(59_998) for _ in range(2))
    cases = [image_bytes(3, 300, 200, kind, **turned) for kind in ("JPEG", "PNG")]
    for content in (*cases, late[:2] + pad + late[2:]):
        assert len(content) > 4096
        path = write_file(tmp_path / "image", content)
        assert decoder_child.size_in_file(str(path), 0, len(content)) == decoder_child.read_size(content)


def test_the_memory_of_a_plan_and_of_a_comparison_does_not_grow_with_the_records(tmp_path: Path) -> None:
    paths = [str(SUPPORT), str(Path(__file__).parent)]
    ran = run_forked(["-c", f"import sys; sys.path[:0] = {paths}\n" + MEMORY, tmp_path])
    assert ran.returncode == 0, ran.stderr[-2000:]
    # 30,000 records more are 7 MB of tables, each held twice. They are mapped: Arrow has next to nothing of them in
    # memory of its own; what else there is are the buffers of one batch, and what allocators keep.
    allocated, anonymous_mb = ran.stdout.split()
    assert int(allocated) < 1 << 20
    assert float(anonymous_mb) < 60


def test_a_large_merge_takes_no_memory_for_each_record_and_keeps_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, count = np.random.default_rng(0), 150_000  # more than a page of numbers
    monkeypatch.setattr("leandit.datasets.format.row_layout.MAX_SHARD_ROWS", 1024)
    same = {"revision": 1, "label": -1, "attempts": 1, "status": "planned", "bucket": "32x32"}
    columns = {name: pa.array([same.get(name)] * count, PLAN_SCHEMA.field(name).type) for name in PLAN_SCHEMA.names}
    columns |= {"key": pa.array(map(str, range(count))), "row": pa.array(np.arange(count))}
    rows = pa.table(columns).cast(PLAN_SCHEMA)
    rows = pa.Table.from_batches(rows.to_batches(max_chunksize=tables.BATCH_ROWS))  # as the plan of a store comes
    plan = first_plan(noise_spec({"32x32": 1}, 4, 0, 0, 8, 1, "none"), "", rows, texts=[], num_tokens=[])
    tasks = plan.layout.tasks()
    tracemalloc.start()
    done = merge.Merge(plan)
    for part, shard in tasks:
        results = new_results(plan.layout.parts[part], len(plan.layout.parts[part].items(shard)))
        results["state"] = STORED
        for name in ("checksum", "source_checksum"):
            results[name] = rng.integers(1, 2**63, results.shape)
        done.add((part, shard), CommitRecord.model_construct(rejects=[], fallbacks=[]), results)
    content = tables.parquet_of_groups(RECORDS_SCHEMA, done.records())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 60 * count  # what a shard and a batch take; with all rows in memory it was more than 200 B a record
    whole = pa.concat_tables(done.records())
    names = ("status", "stage", "reason", "detail", "checksum", "source_checksum", "fallback")
    planned = {name: plan.records[name].combine_chunks() for name in RECORDS_SCHEMA.names}
    merged = planned | {name: whole[name].combine_chunks() for name in names}
    assert bytes(content) == table_bytes(pa.table(merged, schema=RECORDS_SCHEMA))  # whatever the chunks
