"""A revision is sealed only if each planned record is stored or rejected, exactly once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from making import CPU, label_recipe, make_class_folder, no_progress, tree_digest

from leandit.datasets.disk.hashing import canonical_json, read_json
from leandit.datasets.errors import DamageError
from leandit.datasets.format.schema import CommitRecord, Manifest, Reject
from leandit.precompute.pipeline import precompute
from leandit.precompute.planning import planner

pytestmark = pytest.mark.usefixtures("quick")
COMMIT = "commits/buckets/32x32/000001.json"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Four pictures, in two shards of a bucket; the last one cannot be decoded."""
    root = make_class_folder(tmp_path / "source", classes=1, per_class=4)
    path = root / "n000/3.png"
    path.write_bytes(path.read_bytes()[:-200])
    return root


def run(source: Path, store: Path) -> Manifest:
    recipe = label_recipe("source.max_reject_share=0.5")
    manifest = precompute(recipe, source_path=source, store_path=store, device=CPU, progress=no_progress).manifest
    assert manifest is not None
    return manifest


REJECT = Reject(row=3, key="n000/3.png", stage="decode", reason="truncated", detail="")
FORGED = {
    "neither": ({"rejects": []}, "row 3 (record 'n000/3.png') has 0 of 1 checksums and 0 rejects"),
    "both": ({"checksums": ["0" * 15 + "1"] * 2}, "row 3 (record 'n000/3.png') has 1 of 1 checksums and 1 rejects"),
    "twice": ({"rejects": [REJECT, REJECT]}, "row 3 (record 'n000/3.png') has 0 of 1 checksums and 2 rejects"),
}


@pytest.mark.parametrize("how", FORGED)
def test_a_row_that_is_not_stored_or_rejected_once_is_not_sealed(
    how: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leandit.datasets.format.row_layout.MAX_SHARD_ROWS", 2)
    store, (changed, said) = tmp_path / "store", FORGED[how]
    sealed = run(source, store)
    assert (sealed.num_stored, sealed.num_rejected) == (3, 1)
    whole = tree_digest(store)
    for name in ("manifest.json", "records.parquet"):
        (store / name).unlink()
    record = CommitRecord.model_validate(read_json(store / COMMIT)).model_copy(update=changed).with_hash()
    (store / COMMIT).write_bytes(canonical_json(record.model_dump()))
    with pytest.raises(DamageError) as raised:
        run(source, store)
    assert raised.value.exit_code == 4
    assert f"store '{store}': revision 1, bucket 32x32, shard 1, {said}" in str(raised.value)
    assert f"Remove '{COMMIT}' and run the same command again" in str(raised.value)
    assert not (store / "manifest.json").exists()
    (store / COMMIT).unlink()
    assert run(source, store) == sealed
    assert tree_digest(store) == whole


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
    assert not (tmp_path / "store/manifest.json").exists()
