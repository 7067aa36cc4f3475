"""DuckDB for untrusted tables: bounded in memory, threads and time, without network, extensions or other files.

No SQL of a user is run: text of a user is a parameter, a name of a column a quoted identifier. What does not fit into
the memory is written to a folder in ``tempfile``'s folder (TMPDIR), which is made only then.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa

from ....datasets.disk.faults import FAULTS
from ....datasets.disk.spill import named_errors
from ....errors import ResourceError, SourceError
from ..files.files import SourceFiles

MEMORY_MIB = 512
MAX_THREADS = 4
MAX_SECONDS = 6 * 3600.0  # after which it is interrupted
SPILL_PREFIX = "leandit-sql-"
OLD_SECONDS = 86400.0  # a folder of a process that was killed is removed when it is this old
RESOURCE_ERRNOS = (*FAULTS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def database(where: str, *paths: str, memory_mib: int = MEMORY_MIB) -> Iterator[duckdb.DuckDBPyConnection]:
    """An empty database in memory, which spills to temporary files.

    Args:
      where: what is read, for errors.
      paths: the only files that it may open.
      memory_mib: what it holds in memory at most.
    Raises: SourceError: a file is damaged or of another kind; ResourceError: memory, disk or time do not suffice.
    """
    _remove_old_spills()
    spill = Path(tempfile.gettempdir()) / f"{SPILL_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:8]}"
    connection = duckdb.connect(
        config={
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
            "memory_limit": f"{memory_mib}MiB",
            "threads": min(MAX_THREADS, os.cpu_count() or 1),
            "temp_directory": str(spill),
        }
    )
    limit = threading.Timer(MAX_SECONDS, connection.interrupt)
    limit.daemon = True
    limit.start()
    try:
        connection.execute("SET enable_progress_bar = false")  # it writes to stdout
        connection.execute(f"SET allowed_paths = [{', '.join(map(literal, paths))}]")
        connection.execute("SET enable_external_access = false")
        connection.execute("SET lock_configuration = true")
        yield connection
    except duckdb.Error as error:
        text = re.split("\nLINE |\nTry setting ", str(error))[0]  # its SQL, and options of it
        text = " ".join(re.sub(' in file "/proc/self/fd/[0-9]+",?', "", text).split())
        if isinstance(error, duckdb.InterruptException):
            raise ResourceError(
                f"{where}: reading it took longer than {MAX_SECONDS / 3600:g} hours. Split it, or use a faster disk."
            ) from error
        if isinstance(error, duckdb.OutOfMemoryException) or any(os.strerror(n) in text for n in RESOURCE_ERRNOS):
            raise ResourceError(
                f"{where}: listing it needs more memory or disk ({text[:300]}). Free some space in "
                f"'{tempfile.gettempdir()}', or set TMPDIR to another folder."
            ) from error
        raise SourceError(f"{where}: it cannot be read as a table ({text[:300]}). Restore or convert it.") from error
    finally:
        limit.cancel()
        connection.close()
        shutil.rmtree(spill, ignore_errors=True)


def _remove_old_spills() -> None:
    """Remove folders of processes that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{SPILL_PREFIX}*"):
        with suppress(OSError, ValueError):
            process = int(folder.name.removeprefix(SPILL_PREFIX).partition("-")[0])
            is_old = time.time() - folder.stat().st_mtime > OLD_SECONDS
            if is_old and folder.stat().st_uid == os.getuid() and not Path(f"/proc/{process}").exists():
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def readable_path(files: SourceFiles, path: str) -> Iterator[str]:
    """A path by which DuckDB can open a file of a source; one at a URL is copied to a temporary file.

    Raises: SourceError: not a regular file.
    """
    with files.open(path) as file:
        try:
            number = file.fileno()
        except OSError:  # at a URL
            with tempfile.TemporaryFile(prefix="leandit-table-") as copy:
                with named_errors(f"'{path}'"):
                    shutil.copyfileobj(file, copy, 1 << 20)
                    copy.flush()
                yield f"/proc/self/fd/{copy.fileno()}"
            return
        yield f"/proc/self/fd/{number}"


def numbered(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> pa.RecordBatchReader:
    """Batches as DuckDB reads them, with the ``position`` of each row."""
    schema = schema.append(pa.field("position", pa.int64()))

    def positioned() -> Iterator[pa.RecordBatch]:
        start = 0
        for batch in batches:
            positions = pa.array(np.arange(start, start := start + batch.num_rows))
            yield pa.RecordBatch.from_arrays([*batch.columns, positions], schema=schema)

    return pa.RecordBatchReader.from_batches(schema, positioned())


def literal(text: str) -> str:
    """Text as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"


def identifier(name: str) -> str:
    """Name of a column as a quoted identifier."""
    return '"' + name.replace('"', '""') + '"'


def coalesced(expressions: Sequence[str]) -> str:
    """The first value that is not null; null without any."""
    return f"coalesce({', '.join([*expressions, 'NULL'])})"
