"""A stand-in of the hub for the tests of the tools."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import Hub, hub_server


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with hub_server() as server:
        yield server
