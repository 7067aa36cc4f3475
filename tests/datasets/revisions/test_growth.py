"""A store that grows: rows of earlier revisions stay where and what they are, and a hostile manifest is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from making import tree_digest
from stores import copy_of, make_grown, read_all

from leandit.datasets.disk.hashing import canonical_json, sha256_of
from leandit.datasets.maintenance.verify import verify_store
from leandit.datasets.revisions.catalog import file_entry, read_manifest
from leandit.datasets.store import LatentStore
from leandit.errors import DamageError, LeanditError

pytestmark = pytest.mark.usefixtures("small")


def test_stores_made_in_two_folders_have_one_root_hash(grown_store: Path, tmp_path: Path) -> None:
    again = make_grown(tmp_path / "some/where/else")[1]
    trees = [tree_digest(store) for store in (grown_store, again)]
    assert trees[0].keys() == trees[1].keys()
    manifests = [read_manifest(grown_store, revision) for revision in (1, 2, 3)]
    assert manifests == [read_manifest(again, revision) for revision in (1, 2, 3)]
    differing = {path.rpartition("/")[2] for path in trees[0] if trees[0][path] != trees[1][path]}
    assert differing == {"local.json", "sources.parquet"}  # when the plan and the images were made
    assert [manifest.base for manifest in manifests] == ["", *(manifest.root_hash for manifest in manifests[:2])]
    entries = [{entry.path: entry for entry in manifest.files if "/c/" in entry.path} for manifest in manifests]
    assert entries[0].items() < entries[1].items() < entries[2].items()
    assert verify_store(grown_store).findings == []


def test_a_record_of_a_row_that_does_not_exist_is_refused(grown_store: Path, tmp_path: Path) -> None:
    root, store = copy_of(grown_store, tmp_path / "store"), LatentStore(grown_store)
    layout = store.layout("buckets/48x80/moments")
    gap = int(np.flatnonzero(~layout.has_rows(np.arange(layout.shape[0])))[0])
    path, rows = "revisions/000003/index/rows.bin", store.numbers("rows").copy()
    rows[0] = gap  # of the smallest bucket
    (root / path).write_bytes(rows.tobytes())
    entry = file_entry(path, rows.tobytes()).model_dump()

    folder = root / "revisions/000003"
    manifest = json.loads((folder / "manifest.json").read_bytes())
    del manifest["root_hash"]
    manifest["files"] = [entry if one["path"] == path else one for one in manifest["files"]]
    manifest["root_hash"] = sha256_of(manifest)  # it fits
    for name in ("manifest.json", "twin/manifest.json"):
        (folder / name).write_bytes(canonical_json(manifest))
    with pytest.raises(DamageError, match=r"rows that do not exist.*verify .*--repair"):
        LatentStore(root).index("48x80")
    with pytest.raises(LeanditError):
        read_all(root)
    assert len(LatentStore(root, revision=1)) > 0  # it has a manifest of its own
