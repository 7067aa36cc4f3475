"""The child process that reads and decodes untrusted images; ``decoders.py`` controls it.

A decoder written in C may crash, hang or exhaust memory on hostile bytes: here that costs one image. Neither side
unpickles anything: a message is JSON, or the raw bytes of the pixels. Only the decoders are imported, so a child starts
in a fraction of a second.

    python -m leandit.precompute.images.decoder_child SOCKET TIMEOUT_SECONDS MEMORY_MIB PARENT_PID
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import xxhash
from PIL import Image

from ...datasets.disk.faults import is_fault
from ...errors import RecordRejected
from .faults import open_regular
from .opening import MAX_MEGAPIXELS
from .pixels import decode_image, read_size

READY = b"ready"
# Events that are sent to the parent. By the first two it tells a stalled disk from a decoder that hangs.
READING = b"reading"
READ = b"read"
LARGE = b"large "  # with a factor: the image has that many times the pixels that the time limit is for
TIMED_PIXELS = 32_000_000
PARENT_CHECK_SECONDS = 5.0
HEADER_BYTES = 1 << 16  # of a JPEG; they nearly always contain its size
JPEG_BEGIN = b"\xff\xd8\xff"

Answer = tuple[dict[str, Any], np.ndarray | None]
"""Metadata of an image, and its pixels if requested."""


def read_bytes(path: str, offset: int, num_bytes: int, stage: str, *, at_most: int | None = None) -> bytes:
    """Read the bytes of one image, from a regular file alone.

    Args:
      at_most: read at most this many bytes from its beginning.
    Raises: RecordRejected: unreadable, or shorter than listed. OSError: a fault, as in ``is_fault``.
    """
    name = os.path.basename(path)
    num_read = num_bytes if at_most is None else min(num_bytes, at_most)
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if offset == 0 and size > num_bytes:  # an image in a tar never lies at its beginning
                raise RecordRejected(stage, "source_changed", f"{name} has {size} bytes, {num_bytes} were planned")
            if offset + num_bytes > size:  # checked first, because read() allocates all requested bytes
                left = max(0, size - offset)
                raise RecordRejected(stage, "source_changed", f"{left} bytes of {num_bytes} are left in {name}")
            file.seek(offset)
            data = file.read(num_read)
    except OSError as error:
        if is_fault(error):
            raise
        detail = f"{error.strerror}: {name}" if error.strerror else str(error)
        raise RecordRejected(stage, "unreadable", detail) from error
    except ValueError as error:  # a NUL in the name
        raise RecordRejected(stage, "unreadable", f"{error}: {name!r}") from error
    if len(data) != num_read:
        raise RecordRejected(stage, "source_changed", f"{len(data)} bytes of {num_bytes} are left in {name}")
    return data


def size_of_head(head: bytes, num_bytes: int, max_megapixels: int = MAX_MEGAPIXELS) -> tuple[int, int] | None:
    """Height and width in pixels of an image whose first bytes are at hand; None if more of them are needed.

    Args:
      head: at least the first HEADER_BYTES, or all of ``num_bytes``.
    Raises: RecordRejected: all bytes are at hand, and they are no image.
    """
    if len(head) == num_bytes:
        return read_size(head, max_megapixels=max_megapixels)
    if head.startswith(JPEG_BEGIN):  # its size and orientation precede the pixels
        with contextlib.suppress(RecordRejected):
            return read_size(head, max_megapixels=max_megapixels)
    return None


def size_in_file(
    path: str,
    offset: int,
    num_bytes: int,
    *,
    send_event: Callable[[bytes], None] = lambda _: None,
    max_megapixels: int = MAX_MEGAPIXELS,
) -> tuple[int, int]:
    """Height and width in pixels of an image in a file; of a JPEG usually only the first bytes are read.

    Args:
      send_event: called with READ after each read, and with READING before the second.
    Raises: as ``read_bytes``.
    """
    head = read_bytes(path, offset, num_bytes, "scan", at_most=HEADER_BYTES)
    send_event(READ)
    size = size_of_head(head, num_bytes, max_megapixels)
    if size:
        return size
    send_event(READING)
    data = read_bytes(path, offset, num_bytes, "scan")
    send_event(READ)
    return read_size(data, max_megapixels=max_megapixels)


def answer_sizes(places: list[tuple[str, int, int]], seconds: float, max_megapixels: int = MAX_MEGAPIXELS) -> Answer:
    """Read the headers of many images: as many as fit into the time limit, but at least one.

    Returns: "sizes": for each (height_px, width_px), or (stage, reason, detail) of a reject; those before a fault
      or a bug in leandit.
    Raises: OSError: a fault at the first. Whatever else is raised at the first.
    """
    sizes: list[tuple[int, int] | tuple[str, str, str]] = []
    end = time.monotonic() + seconds
    for place in places:
        if sizes and time.monotonic() > end:
            break
        try:
            sizes.append(size_in_file(*place, max_megapixels=max_megapixels))
        except RecordRejected as reject:
            sizes.append((reject.stage, reject.reason, reject.detail))
        except Exception:
            if not sizes:
                raise
            break  # the next message begins with this one, so that an error names it
    return {"sizes": sizes}, None


def answer(job: dict[str, Any]) -> Answer:
    """Handle one job.

    Args:
      job: stage "scan" or "decode"; of many images their places (path, offset, num_bytes) and seconds for all of them;
        of one image path, offset, num_bytes, or its data; send_event as for ``size_in_file``; max_megapixels as for
        ``read_size``; for "decode" the "how" of ``decode_image``.
    Returns: "sizes"; or "size" (height_px, width_px), "head" if only the data's beginning was sent; of a decoded image
      also "checksum", "seconds" (reading, decoding), "notes" and its pixels.
    Raises: as ``read_bytes``.
    """
    send_event: Callable[[bytes], None] = job.get("send_event", lambda _: None)
    max_megapixels = job.get("max_megapixels", MAX_MEGAPIXELS)
    if "places" in job:
        return answer_sizes(job["places"], job["seconds"], max_megapixels)
    start = time.perf_counter()
    data = job.get("data")
    if job["stage"] == "scan":
        if data is not None:
            return {"size": size_of_head(data, job["num_bytes"], max_megapixels)}, None
        size = size_in_file(
            job["path"], job["offset"], job["num_bytes"], send_event=send_event, max_megapixels=max_megapixels
        )
        return {"size": size}, None
    if data is None:
        data = read_bytes(job["path"], job["offset"], job["num_bytes"], "decode")
        send_event(READ)
    read_seconds = time.perf_counter() - start

    def ask_for_time(num_pixels: int) -> None:
        if num_pixels > TIMED_PIXELS:
            send_event(LARGE + str(math.ceil(num_pixels / TIMED_PIXELS)).encode())

    notes = list[str]()
    pixels, size = decode_image(data, max_megapixels=max_megapixels, notes=notes, on_header=ask_for_time, **job["how"])
    seconds = read_seconds, time.perf_counter() - start - read_seconds
    checksum = xxhash.xxh3_64_intdigest(data)
    return {"size": size, "checksum": checksum, "seconds": seconds, "notes": notes}, pixels


def serve(
    connection: Connection, timeout_seconds: float, parent: int, answer: Callable[[dict[str, Any]], Answer]
) -> None:
    """Answer jobs until the parent is gone."""
    connection.send_bytes(READY)
    while True:
        # A sibling may have inherited the parent's end of the socket and so hide its closing.
        while not connection.poll(PARENT_CHECK_SECONDS):
            if os.getppid() != parent:
                return
        job = json.loads(connection.recv_bytes())
        signal.alarm(math.ceil(2 * timeout_seconds))  # if the child hangs and the parent is dead

        def send_event(message: bytes) -> None:
            if message.startswith(LARGE):
                signal.alarm(math.ceil(2 * timeout_seconds) * int(message.removeprefix(LARGE)))
            connection.send_bytes(message)

        job["send_event"] = send_event
        if job["is_sent"]:
            job["data"] = connection.recv_bytes()
        head: dict[str, Any]
        pixels: np.ndarray | None = None
        try:
            head, pixels = answer(job)
        except RecordRejected as reject:
            head = {"reject": (reject.stage, reject.reason, reject.detail)}
        except MemoryError:
            head = {"reject": (job["stage"], "too_large", "more memory than a decoder may use")}
        except OSError as error:
            head = {"fault": (error.errno, error.strerror)} if is_fault(error) else {"error": traceback.format_exc()}
        except Exception:  # noqa: BLE001 - a bug in leandit, which the parent reports with the name of the file
            head = {"error": traceback.format_exc()}
        head["shape"] = None if pixels is None else pixels.shape
        connection.send_bytes(json.dumps(head).encode())
        if pixels is not None:
            connection.send_bytes(np.ascontiguousarray(pixels).data.cast("B"))
        signal.alarm(0)


def limit(memory_mib: int) -> None:
    """Limit the memory of this process, disable core files and ignore stop signals."""
    for kind, largest in ((resource.RLIMIT_AS, memory_mib << 20), (resource.RLIMIT_CORE, 0)):
        _, hard = resource.getrlimit(kind)
        if hard == resource.RLIM_INFINITY:
            resource.setrlimit(kind, (largest, largest))
        else:
            resource.setrlimit(kind, (min(largest, hard), hard))
    # Schedulers signal all processes of a job, but the parent still waits for images.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    Image.MAX_IMAGE_PIXELS = None  # ``open_image`` checks the recipe's limit
    warnings.simplefilter("ignore")  # of broken metadata


def main(answer: Callable[[dict[str, Any]], Answer] = answer) -> None:
    """Serve the socket that the command line names."""
    descriptor, timeout_seconds, memory_mib, parent = sys.argv[1:]
    limit(int(memory_mib))
    with contextlib.suppress(EOFError, ConnectionError):  # the parent closed the socket
        serve(Connection(int(descriptor)), float(timeout_seconds), int(parent), answer)


if __name__ == "__main__":
    main()
