"""Captions of a run: from any of its stores, those of one that is gone are encoded."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from making import CPU

from leandit.datasets.errors import RunError
from leandit.datasets.store import LatentStore
from leandit.tools.sample.captions import Captions
from leandit.tools.synthetic.store import make_store

SNAPSHOT: Any = SimpleNamespace(state={"text_encoder": {"weights_sha256": "0" * 64}})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of three stores, of which the last is gone; the second has more captions than the first."""
    for name, lengths in (("few", [2, 3]), ("many", [4, 5, 6, 7])):
        make_store(tmp_path / name, {"32x32": 8}, token_counts=lengths, text_width=16)
    (tmp_path / "run").mkdir()
    stores = [{"path": f"../{name}", "revisions": []} for name in ("few", "many", "gone")]
    (tmp_path / "run/run.json").write_text(json.dumps({"stores": stores}))
    return tmp_path / "run"


def test_a_caption_is_read_from_the_first_store_that_has_it(run: Path) -> None:
    captions = Captions(SNAPSHOT, run, None, None, CPU)
    texts = ["noise 3", "noise 1", "noise 3"]
    few, many = (LatentStore(run.parent / name) for name in ("few", "many"))
    wanted = [many.caption_embedding(3), few.caption_embedding(1), many.caption_embedding(3)]
    for found, embedding in zip(captions.embed(texts), wanted, strict=True):
        assert found[""].tokens is not None
        assert np.array_equal(found[""].tokens, embedding.astype(np.float32))
    assert captions.store.path == run / "../few"


def test_captions_of_another_encoder_are_refused(run: Path) -> None:
    other: Any = SimpleNamespace(state={"text_encoder": {"weights_sha256": "1" * 64}})
    with pytest.raises(RunError, match=r"store '.*few': its captions come from another text encoder"):
        Captions(other, run, None, None, CPU)


def test_a_run_whose_stores_are_gone_has_no_captions_to_choose_from(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"stores": [{"path": "gone", "revisions": []}]}))
    with pytest.raises(RunError, match="its store is gone"):
        _ = Captions(SNAPSHOT, tmp_path, None, None, CPU).store
