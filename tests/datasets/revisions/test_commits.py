"""A revision is sealed only if each planned record is stored or rejected, exactly once."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from faults import flip, without_seal
from making import caption_recipe, cut, encode, label_recipe, make_class_folder, store_digest
from stores import copy_of

from leandit.datasets.disk.hashing import canonical_json, read_json
from leandit.datasets.format.schema import CommitRecord, Manifest, Reject
from leandit.datasets.format.table_schemas import REJECTED, ROW_RESULTS, STORED
from leandit.datasets.revisions import plan as plan_module
from leandit.datasets.revisions.catalog import file_entry
from leandit.datasets.revisions.commits import read_commit
from leandit.datasets.revisions.plan import read_plan
from leandit.datasets.revisions.writer import StoreWriter
from leandit.errors import DamageError, StoreError
from leandit.precompute.planning import planner

pytestmark = pytest.mark.usefixtures("small", "quick")
COMMIT = "revisions/000001/commits/buckets/32x32/000001.json"
ROWS = COMMIT.replace(".json", ".rows")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four images, in two shards of a bucket; the last one cannot be decoded."""
    root = make_class_folder(tmp_path_factory.mktemp("commits") / "source", classes=1, per_class=4)
    path = root / "n000/3.png"
    path.write_bytes(path.read_bytes()[:-200])
    return root


@pytest.fixture(scope="module")
def sealed(source: Path) -> Path:
    run(source, source.parent / "sealed")
    return source.parent / "sealed"


@pytest.fixture(scope="module")
def not_sealed(source: Path) -> Path:
    without_seal(lambda: run(source, source.parent / "unfinished"))
    return source.parent / "unfinished"


@pytest.fixture
def store(not_sealed: Path, tmp_path: Path) -> Path:
    """A store of which all is committed and nothing sealed."""
    return copy_of(not_sealed, tmp_path / "store")


def run(source: Path, store: Path) -> Manifest:
    return encode(label_recipe("source.max_reject_share=0.5"), source, store).manifest


REJECT = Reject(row=3, key="n000/3.png", stage="decode", reason="truncated", detail="")
FORGED = {
    "neither": ([], REJECTED, "row 3 (record 'n000/3.png') has 0 of 1 checksums and 0 rejects"),
    "both": ([REJECT], STORED, "row 3 (record 'n000/3.png') has 1 of 1 checksums and 1 rejects"),
    "no checksum": ([], STORED, "row 3 (record 'n000/3.png') has 0 of 1 checksums and 0 rejects"),
    "twice": ([REJECT, REJECT], REJECTED, "row 3 (record 'n000/3.png') has 0 of 1 checksums and 2 rejects"),
}


@pytest.mark.parametrize("how", FORGED)
def test_a_row_that_is_not_counted_once_is_not_sealed(how: str, source: Path, store: Path, sealed: Path) -> None:
    rejects, state, said = FORGED[how]
    results = np.fromfile(store / ROWS, ROW_RESULTS)
    assert results["state"].tolist() == [STORED, REJECTED]
    results["state"][1], results["checksum"][1] = state, how == "both"
    results.tofile(store / ROWS)
    files = CommitRecord.model_validate(read_json(store / COMMIT)).files
    change_record(store, rejects=rejects, files=[*files[:-1], file_entry(ROWS, results.tobytes())])
    with pytest.raises(DamageError) as raised:
        run(source, store)
    assert raised.value.exit_code == 4
    assert f"store '{store}': revision 1, 'buckets/32x32', shard 1, {said}" in str(raised.value)
    assert f"Remove '{COMMIT}' and run the same command again" in str(raised.value)
    assert not list(store.rglob("manifest.json"))
    (store / COMMIT).unlink()
    manifest = run(source, store)
    assert (manifest.num_stored, manifest.num_rejected) == (3, 1)
    assert store_digest(store) == store_digest(sealed)


def change_record(store: Path, **changed: Any) -> None:
    record = CommitRecord.model_validate(read_json(store / COMMIT))
    (store / COMMIT).write_bytes(canonical_json(record.model_copy(update=changed).with_hash().model_dump()))


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "rows cut": lambda store: cut(store / ROWS),
    "rows flipped": lambda store: flip(store / ROWS, 2),
    "shard cut": lambda store: cut(store / "buckets/32x32/moments/c/1/0/0/0"),
    "other plan": lambda store: change_record(store, plan="0" * 64),
    "other shard": lambda store: change_record(store, shard=0),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_shard_whose_commit_record_does_not_fit_is_encoded_again(
    damage: Callable[[Path], Any], source: Path, store: Path, sealed: Path
) -> None:
    damage(store)
    plan = read_plan(store, 1)
    assert read_commit(store, plan, "buckets/32x32", 0, check_bytes=True) is not None
    assert read_commit(store, plan, "buckets/32x32", 1, check_bytes=True) is None
    run(source, store)
    assert store_digest(store) == store_digest(sealed)


@pytest.mark.parametrize("seen", ["plan.json", "records.parquet"])
def test_a_plan_that_another_process_seals_while_it_is_read(
    seen: str, store: Path, sealed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "_read_plan_file" if seen == "plan.json" else "map_parquet"
    read = getattr(plan_module, name)

    def read_late(*args: Any) -> Any:
        monkeypatch.setattr(plan_module, name, read)
        shutil.rmtree(store)
        shutil.copytree(sealed, store)
        return read(*args)

    monkeypatch.setattr(plan_module, name, read_late)
    assert read_plan(store, 1).records.num_rows == 4


def test_a_store_without_any_one_commit_record_is_not_sealed(caption_folder: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    without_seal(lambda: encode(caption_recipe(), caption_folder, store))
    records = sorted(
        (store / "revisions/000001/commits").rglob("*.json"), key=lambda path: "captions" not in path.parts
    )
    assert "captions" in records[0].parts  # of the others the merge itself would see that they are missing
    for path in records:
        content = path.read_bytes()
        path.unlink()
        said = rf"1 of {len(records)} shards are not committed, the first is {int(path.stem)} of '.*{path.parent.name}'"
        with pytest.raises(StoreError, match=said):
            StoreWriter(store, read_plan(store, 1)).seal()
        assert not list(store.rglob("manifest.json"))
        path.write_bytes(content)


def test_a_planned_record_in_no_shard_is_not_sealed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    freeze = planner.freeze_plan

    def lose_the_last_row(root: Path, plan: Any) -> Any:
        rows = [*plan.records["row"].to_pylist()[:-1], -1]
        at = plan.records.column_names.index("row")
        records = plan.records.set_column(at, plan.records.schema.field(at), pa.array(rows, pa.int64()))
        return freeze(root, replace(plan, records=records))

    monkeypatch.setattr(planner, "freeze_plan", lose_the_last_row)
    with pytest.raises(DamageError, match=r"record 'n000/3.png'\) is 'planned', and in no shard") as raised:
        run(source, tmp_path / "store")
    assert raised.value.exit_code == 4
    assert not list((tmp_path / "store").rglob("manifest.json"))
