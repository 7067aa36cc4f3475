"""Plans that go by in batches: the same bytes whatever their size, in memory that does not grow with it."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forked import run_forked
from hypothesis import given
from hypothesis import strategies as st
from making import SUPPORT, caption_recipe, encode, image_bytes, smooth_image

from leandit.datasets.disk.hashing import sha256_of, xxh3_parts
from leandit.datasets.disk.spill import one_chunk
from leandit.datasets.errors import RecordRejected
from leandit.datasets.format import tables
from leandit.datasets.format.layout import Part
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
from leandit.datasets.store import LatentStore
from leandit.precompute.config import PrecomputeRecipe, SourceSection
from leandit.precompute.encoders.text.tokenizer import CaptionTokenizer
from leandit.precompute.images import decoder_child
from leandit.precompute.images.decoders import Decoders
from leandit.precompute.planning import captions as caption_plan
from leandit.precompute.planning import images as image_plan
from leandit.precompute.planning import records as plan
from leandit.precompute.planning.compare import all_fresh
from leandit.precompute.run.rejects import RejectLimits
from leandit.precompute.sources.files.files import LocalFiles
from leandit.precompute.sources.files.record import SourceRecord
from leandit.precompute.sources.listing import listing
from leandit.precompute.sources.source import Source
from leandit.tools.synthetic.store import noise_spec

MAX_TOKENS = 6
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
        for module in (listing, plan, image_plan, caption_plan, tables):
            patch.setattr(module, "BATCH_ROWS", rows)
        patch.setattr(caption_plan, "TOKENIZE_BATCH", rows)
        patch.setattr(image_plan, "ASKED", rows)
        yield


@pytest.fixture(scope="module")
def recipe() -> PrecomputeRecipe:
    return caption_recipe(f"text.max_tokens={MAX_TOKENS}", "source.sizes=manifest", "source.max_reject_share=1")


@pytest.fixture(scope="module")
def tokenizer(recipe: PrecomputeRecipe) -> CaptionTokenizer:
    return CaptionTokenizer(recipe.text[""])


def planned(
    records: Sequence[SourceRecord], recipe: PrecomputeRecipe, tokenizer: CaptionTokenizer, known: pa.Table | None
) -> tuple[pa.Table, pa.Table]:
    """The tables of a plan, as the real planner makes them."""
    listed = listing.spool(listing.record_batches(records), lambda done: None)
    source = Source(SourceSection(kind="manifest"), LocalFiles(Path()), listed, None, 0)
    comparison = all_fresh(source.records)
    with Decoders(1) as decoders:  # none is started: nothing is opened
        limits = RejectLimits(recipe.source, len(source.records), is_planning=True)
        images = image_plan.plan_images(source, source.records, recipe, decoders, limits)
    texts = plan.planned_texts(comparison, images)
    captions, ids = caption_plan.plan_captions(
        texts, [caption_plan.CaptionCounts("", tokenizer, MAX_TOKENS)], revision=2, known=known
    )
    return plan.plan_records(comparison, images, ids, revision=2), captions


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
def test_a_plan_in_batches_is_the_plan_in_one_piece_to_the_byte(
    made: list, rows: int, num_known: int, recipe: PrecomputeRecipe, tokenizer: CaptionTokenizer
) -> None:
    records = [
        SourceRecord(f"key-{key}", f"{i}.jpg", i, i + 9, i, key % 3, tuple(texts), problem, *size)
        for i, (key, texts, size, problem) in enumerate(made)
    ]
    texts = ["a circle", "nobody says this", "red", "nor this"][:num_known]
    known = {
        "text": texts,
        "revision": [1] * num_known,
        "num_tokens": [3] * num_known,
        "truncated": [False] * num_known,
    }
    nothing = dict.fromkeys((CAPTION_START, *CAPTION_RESULTS), [None] * num_known)
    before = pa.table(known | nothing, schema=CAPTIONS_SCHEMA)
    whole = planned(records, recipe, tokenizer, before)
    with batches_of(rows):
        batched = planned(records, recipe, tokenizer, before)
    for found, wanted in zip(batched, whole, strict=True):
        assert found.to_pylist() == wanted.to_pylist()
        assert bytes(parquet_file(found)) == table_bytes(wanted.combine_chunks())


@pytest.mark.parametrize(
    ("size", "reason"),
    [((10, 45), None), ((10, 46), "aspect"), ((45, 10), None), ((46, 10), "aspect"), ((1, 200), "aspect")],
)
def test_a_ratio_beyond_four_and_a_half_is_rejected(
    size: tuple[int, int], reason: str | None, recipe: PrecomputeRecipe
) -> None:
    placed = image_plan.place_image(*size, recipe.images)
    assert (placed.reason if isinstance(placed, RecordRejected) else None) == reason


def frozen_plan(records: pa.Table, captions: pa.Table) -> FrozenPlan:
    spec = noise_spec({"64x64": 1, "48x80": 1, "80x48": 1}, 4, 0, MAX_TOKENS, 8, 64, "none")
    return FrozenPlan(spec, 2, "", False, "", records, captions)


def some_plan(recipe: PrecomputeRecipe, tokenizer: CaptionTokenizer, count: int = 50) -> FrozenPlan:
    records = [
        SourceRecord(f"{i}", f"{i}.jpg", captions=(f"a circle {i % 7}",), height_px=size[0], width_px=size[1])
        for i, size in ((i, SIZES[i * i % 4]) for i in range(count))
    ]
    return frozen_plan(*planned(records, recipe, tokenizer, None))


def test_the_hash_of_a_plan_is_that_of_its_tables_in_one_piece(
    recipe: PrecomputeRecipe, tokenizer: CaptionTokenizer
) -> None:
    # It stands in every commit record: if it changes, no unfinished store can be gone on with.
    made = some_plan(recipe, tokenizer)
    whole = [made.records.drop_columns(["source_mtime_ns"]).combine_chunks(), made.captions.combine_chunks()]
    tables = [xxh3_parts([table_bytes(table)])[1] for table in whole]
    assert made.hash == sha256_of([made.spec.fingerprint, 2, "", False, *tables])


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
    assert cut["text"].num_chunks > 1
    assert bytes(parquet_file(cut)) == table_bytes(whole)
    assert one_chunk(cut["text"]).equals(whole["text"])
    empty = whole.slice(0, 0)
    assert bytes(parquet_file(empty)) == table_bytes(empty)


def write(path: Path, content: bytes) -> tuple[str, int, int]:
    path.write_bytes(content)
    return str(path), 0, len(content)


def size_or_reject(read: Callable[[], object]) -> object:
    try:
        return read()
    except RecordRejected as reject:
        return str(reject)


def encoded(kind: str, height_px: int, width_px: int, **options: object) -> bytes:
    return image_bytes(3, height_px, width_px, kind, **options)


def turned(image_format: str, height_px: int, width_px: int, **options: object) -> bytes:
    exif = smooth_image(0).getexif()
    exif[0x0112] = 6
    return encoded(image_format, height_px, width_px, exif=exif.tobytes(), **options)


def test_the_size_of_a_large_file_is_that_of_all_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = 4096
    late = turned("JPEG", 90, 120)
    pad = b"".join(b"\xff\xed" + (60_000).to_bytes(2, "big") + bytes(59_998) for _ in range(2))
    cases = {
        "plain": encoded("JPEG", 300, 200, quality=95),
        "turned": turned("JPEG", 300, 200, quality=95),
        "late": late[:2] + pad + late[2:],
        "png": encoded("PNG", 300, 200),
        "turned png": turned("PNG", 300, 200),
        "noise": b"\xff\xd8\xff" + bytes(9999),
    }
    monkeypatch.setattr(decoder_child, "HEADER_BYTES", head)
    for name, content in cases.items():
        assert len(content) > head
        place = write(tmp_path / name, content)
        found = size_or_reject(lambda place=place: decoder_child.size_in_file(*place))
        assert found == size_or_reject(lambda content=content: decoder_child.read_size(content)), name


def test_a_manifest_that_lies_of_a_size_costs_that_record_alone(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    lines = []
    for i in range(6):
        smooth_image(i, 64, 64).save(source / f"{i}.png")
        lines.append({"file_name": f"{i}.png", "height": 60 if i == 2 else 64, "width": 64})
    del lines[4]["height"]  # not said: then its header is read
    (source / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = caption_recipe("text.kind=none", "source.sizes=manifest")
    encode(recipe, source, tmp_path / "store")
    rows = LatentStore(tmp_path / "store").records.to_pylist()
    assert [(row["key"], row["reason"]) for row in rows if row["status"] != "stored"] == [("2.png", "wrong_size")]
    assert [row["height_px"] for row in rows] == [64, 64, 60, 64, 64, 64]
    lines[2]["height"] = 64  # mended: it is tried again
    (source / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    encode(recipe, source, tmp_path / "store")
    assert LatentStore(tmp_path / "store").records["status"].to_pylist() == ["stored"] * 6


MEMORY = """

from dataclasses import replace
from pathlib import Path
import pyarrow as pa
from making import caption_recipe
from test_plan_scale import frozen_plan
from leandit.precompute.config import SourceSection
from leandit.datasets.revisions.plan import freeze_plan, read_plan
from leandit.precompute.images.decoders import Decoders
from leandit.precompute.planning import captions as caption_plan, images as image_plan, records as plan
from leandit.datasets.disk.spill import map_table
from leandit.precompute.planning.compare import Options, all_fresh, compare
from leandit.precompute.run.rejects import RejectLimits
from leandit.precompute.sources.files.files import LocalFiles
from leandit.precompute.sources.files.record import SourceRecord
from leandit.precompute.sources.listing.listing import record_batches, spool
from leandit.precompute.sources.source import Source

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
    records = spool(record_batches(records), lambda done: None)
    return Source(SourceSection(kind="manifest"), LocalFiles(Path()), records, None)

def stored(records):
    for batch in records.to_batches():
        status = pa.array(["stored"] * batch.num_rows)
        yield batch.set_column(batch.schema.names.index("status"), "status", status)

def make(count, store):
    source = listed(count, 1)
    comparison, recipe = all_fresh(source.records), caption_recipe("source.sizes=manifest")
    with Decoders(1) as decoders:
        limits = RejectLimits(recipe.source, len(source.records), is_planning=True)
        images = image_plan.plan_images(source, source.records, recipe, decoders, limits)
    counts = [caption_plan.CaptionCounts("", Words(), 6)]
    captions, ids = caption_plan.plan_captions(plan.planned_texts(comparison, images), counts)
    made = frozen_plan(plan.plan_records(comparison, images, ids, revision=2), captions)
    freeze_plan(store, made)
    found = read_plan(store, 2)
    assert len(found.positions_of(found.layout.parts["buckets/64x64"])) == count
    records = map_table(made.records.schema, stored(made.records), "records")
    base = replace(made, records=records)
    grown = compare(listed(count, 2), base, Options(), recipe, num_threads=1, progress=lambda done: None)
    assert (len(grown.fresh), grown.num_changed, grown.num_described) == (count // 100, count // 100, count // 100)
    return source, made, found, grown  # all of it is held

store = Path(sys.argv[1])
small = make(10_000, store / "small")
before, allocated = anonymous_mb(), pa.total_allocated_bytes()
large = make(40_000, store / "large")
print(pa.total_allocated_bytes() - allocated, anonymous_mb() - before)
"""


def test_the_memory_of_a_plan_and_of_a_comparison_does_not_grow_with_the_records(tmp_path: Path) -> None:
    paths = [str(SUPPORT), str(Path(__file__).parent)]
    ran = run_forked(["-c", f"import sys; sys.path[:0] = {paths}\n" + MEMORY, tmp_path])
    assert ran.returncode == 0, ran.stderr[-2000:]
    # 30,000 records more are 7 MB of tables, each held twice. They are mapped: Arrow has next to nothing of them in
    # memory of its own; what else there is are the buffers of one batch, and what allocators keep.
    allocated, anonymous_mb = ran.stdout.split()
    assert int(allocated) < 1 << 20
    assert float(anonymous_mb) < 60


# Seals: the tables of a revision and its commit records, joined a few rows at a time.


def drawn(rng: np.random.Generator, part: Part, num_rows: int, *, narrowed: bool) -> np.ndarray:
    """Results of rows that are all stored."""
    results = new_results(part, num_rows)
    results["state"] = STORED
    results["checksum"] = rng.integers(0, 2**63, results.shape)
    if part.captions is None:
        results["source_checksum"] = rng.integers(1, 2**63, results.shape)
    if narrowed:
        results["min_cosine"], results["max_error"] = rng.random(results.shape), rng.random(results.shape)
    return results


def test_a_large_merge_takes_no_memory_for_each_record_and_keeps_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, count = np.random.default_rng(0), 150_000  # more than a page of numbers
    rows = pa.table(
        {
            "key": [f"{i}" for i in range(count)],
            **{name: pa.nulls(count, PLAN_SCHEMA.field(name).type) for name in PLAN_SCHEMA.names if name != "key"},
        }
    )
    for name, value in (("revision", 1), ("label", -1), ("attempts", 1), ("status", "planned"), ("bucket", "32x32")):
        rows = rows.set_column(rows.column_names.index(name), name, pa.array([value] * count))
    rows = rows.set_column(rows.column_names.index("row"), "row", pa.array(np.arange(count)))
    spec = noise_spec({"32x32": 1}, 4, 0, 0, 8, 1, "none")
    monkeypatch.setattr("leandit.datasets.format.row_layout.MAX_SHARD_ROWS", 1024)
    rows = rows.select(PLAN_SCHEMA.names).cast(PLAN_SCHEMA).combine_chunks()
    rows = pa.Table.from_batches(rows.to_batches(max_chunksize=tables.BATCH_ROWS))  # as the plan of a store comes
    plan = first_plan(spec, "", rows, texts=[], num_tokens=[])
    tasks = plan.layout.tasks()
    tracemalloc.start()
    done = merge.Merge(plan)
    for part, shard in tasks:
        found = drawn(rng, plan.layout.parts[part], len(plan.layout.parts[part].items(shard)), narrowed=False)
        done.add((part, shard), CommitRecord.model_construct(rejects=[], fallbacks=[]), found)
    content = tables.parquet_of_groups(RECORDS_SCHEMA, done.records())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 60 * count  # what a shard and a batch take; with all rows in memory it was more than 200 B a record
    whole = pa.concat_tables(done.records())
    results = ("status", "stage", "reason", "detail", "checksum", "source_checksum", "fallback")
    columns = {name: whole[name].combine_chunks() for name in results}
    planned = {name: plan.records[name].combine_chunks() for name in RECORDS_SCHEMA.names}
    assert bytes(content) == table_bytes(pa.table(planned | columns, schema=RECORDS_SCHEMA))  # whatever the chunks
    assert plan.records["row"].num_chunks > 1
