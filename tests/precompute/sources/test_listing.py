"""The list of a source: the order of folders, keys that come again, and memory that does not grow with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from leandit.datasets.errors import ResourceError, SourceError
from leandit.precompute.sources.files.record import SourceRecord
from leandit.precompute.sources.listing import duck
from leandit.precompute.sources.listing import listing as source_listing
from leandit.precompute.sources.listing.listing import record_batches, spool
from leandit.precompute.sources.source import list_source


def test_nothing_is_left_of_a_listing_that_is_killed(tmp_path: Path) -> None:
    code = """
import os, sys, tempfile
tempfile.tempdir = sys.argv[1]
from leandit.precompute.sources.listing.listing import record_batches, spool
from leandit.precompute.sources.files.record import SourceRecord
records = (os._exit(9) if i == 40_000 else SourceRecord(str(i), "x") for i in range(50_000))
spool(record_batches(records), lambda done: None)
"""
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 9
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_for_temporary_files_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(source_listing.pa.ipc, "new_file", full)
    with pytest.raises(ResourceError, match=r"No space left.*TMPDIR"):
        spool(record_batches([SourceRecord("a", "a")]), lambda done: None)


def test_a_folder_that_cannot_be_read_is_an_error_and_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.png").touch()
    original = os.scandir

    def refuse(path: Path) -> object:  # the tests may run as root, to whom all is allowed
        if Path(path).name == "b":
            raise PermissionError(13, "Permission denied", str(path))
        return original(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(SourceError, match=r"folder 'b' cannot be read \(Permission denied\)"):
        list_source(tmp_path)


def test_sql_that_takes_too_long_is_an_error_of_resources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duck, "MAX_SECONDS", 0.1)
    with pytest.raises(ResourceError, match=r"the table: reading it took longer"), duck.database("the table") as sql:
        sql.execute("SELECT count(*) FROM range(1000000) a, range(1000000) b WHERE a.range * b.range = 7")


def test_sql_opens_no_other_file_installs_nothing_and_keeps_its_limits(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a\n1\n")
    for statement in (
        f"SELECT * FROM read_csv('{path}')",
        f"COPY (SELECT 1) TO '{path}'",
        "INSTALL httpfs",
        "SELECT * FROM read_csv('http://127.0.0.1:1/a.csv')",
        "SET enable_external_access = true",
    ):
        with pytest.raises(SourceError, match="table"), duck.database("table", str(tmp_path / "table.csv")) as sql:
            sql.execute(statement)
    assert path.read_text() == "a\n1\n"
    with duck.database("table") as sql:
        settings = ", ".join(f"current_setting('auto{what}_known_extensions')" for what in ("install", "load"))
        assert sql.sql(f"SELECT {settings}").fetchall() == [(False, False)]
