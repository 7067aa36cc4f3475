"""Decode images in child processes with a time limit and a memory limit.

Images are untrusted, and decoders are large C libraries. If an image crashes, hangs or bloats its decoder, the child
dies, the image is rejected with a reason, and the next image gets a new child (``decoder_child.py``). This is not a
sandbox: a child may read whatever its user may read.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...errors import RecordRejected, ResourceError
from .decoder_child import LARGE, READ, READING, READY
from .faults import retried
from .opening import MAX_MEGAPIXELS

LOG = logging.getLogger(__name__)
CHILD_MODULE = f"{__package__}.decoder_child"
START_SECONDS = 600.0  # until a living child counts as hung: a cold interpreter, a network disk, a busy machine
ALIVE_SECONDS = 1.0  # between two looks at a child that starts
END_SECONDS = 2.0  # from the end of a socket to the end of its process
MAX_HEAD_BYTES = 1 << 20
RETRY_PATIENCE = 4  # times the time-out, on a busy machine
MIN_MEMORY_MIB = 4096  # address space of a child, most of it libraries and what is never touched
MEMORY_BYTES_PER_PIXEL = 12  # RGBA as decoded, its colours, and an upright copy
LIBRARIES_MIB = 1024


class ImagePlace(NamedTuple):
    """Where the bytes of an image are: in a file that a child reads, or in memory, to be sent to it.

    Args:
      path: of the file; only a name if the bytes are sent.
      offset, num_bytes: position in the file.
      data: the bytes, if no local file holds them.
    """

    path: Path
    offset: int
    num_bytes: int
    data: bytes | None = None


@dataclass(frozen=True)
class Decoded:
    """A decoded image.

    Args:
      pixels: (H, W, 3) uint8, of the bucket's size; of a mask (H, W), of the latents' size; with variants one more
        dimension, the first, for the crops; read-only.
      size: height and width in pixels of the source image, upright.
      source_checksum: XXH3-64 of the encoded bytes.
      read_seconds: of the child's read; 0 for bytes that were sent.
      decode_seconds: of the rest.
      notes: what was not done as planned, as for ``pixels.decode_image``.
      companions: other images of the same record, by name.
    """

    pixels: np.ndarray
    size: tuple[int, int]
    source_checksum: int
    read_seconds: float = 0.0
    decode_seconds: float = 0.0
    notes: tuple[str, ...] = ()
    companions: Mapping[str, Decoded] = field(default_factory=dict)


class Decoders:
    """Child processes that decode images; a context manager.

    Any number of threads may call it: each borrows one child. Children start on first use and end with the context. Use
    it only in the process that made it.

    Args:
      num_children: maximum number of processes, and so of concurrent images.
      timeout_seconds: for reading and decoding one image; of a large one for each TIMED_PIXELS. After a crash or
        time-out a new child tries once more with a longer limit: the machine may have been at fault.
      max_megapixels: of an image; larger ones are rejected. It also decides the address space of a child.
    """

    def __init__(
        self,
        num_children: int,
        *,
        timeout_seconds: float = 5.0,
        max_megapixels: int = MAX_MEGAPIXELS,
        _child_module: str = CHILD_MODULE,
    ) -> None:
        if num_children < 1:
            raise ValueError(f"num_children is {num_children}; expected at least 1")
        self._timeout_seconds = timeout_seconds
        self._max_megapixels = max_megapixels
        self._owner = os.getpid()
        self._closed = threading.Event()
        memory_mib = max(MIN_MEMORY_MIB, LIBRARIES_MIB + (MEMORY_BYTES_PER_PIXEL * max_megapixels * 1_000_000 >> 20))
        self._children = [DecoderProcess(_child_module, timeout_seconds, memory_mib) for _ in range(num_children)]
        # Last in, first out: running children are preferred to new ones.
        self._idle: queue.LifoQueue[DecoderProcess] = queue.LifoQueue()
        for child in self._children:
            self._idle.put(child)

    def __enter__(self) -> Decoders:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_at_once(self) -> int:
        """Number of concurrent images."""
        return len(self._children)

    def close(self) -> None:
        """End all children; threads that still wait get a RuntimeError."""
        if self._closed.is_set() or os.getpid() != self._owner:
            return
        self._closed.set()
        for child in self._children:
            child.kill()  # the waiting thread returns it
        for _ in self._children:
            self._idle.get().stop()
        self._idle.put(self._children[0])  # wakes threads that wait for an idle child, one after the other

    def size(self, path: Path, offset: int, num_bytes: int, data: bytes | None = None) -> tuple[int, int] | None:
        """Height and width in pixels of an image, from its header.

        Args:
          path, offset, num_bytes: as in ``ImagePlace``.
          data: the bytes, if no local file holds them, or only the first of ``num_bytes``.
        Returns: None if the first bytes are not enough.
        Raises:
          RecordRejected: stage "scan"; not an image, too large, unreadable, or it crashed its child.
          ResourceError: a child cannot be started, or the disk or this machine fails, after some tries.
          RuntimeError: a bug in the decoder, or this is closed.
        """
        job = {"stage": "scan", "path": str(path), "offset": offset, "num_bytes": num_bytes}
        job["max_megapixels"] = self._max_megapixels
        answer, _ = self._ask(job, data)
        return answer["size"] and tuple(answer["size"])

    def sizes(self, places: Sequence[ImagePlace]) -> list[tuple[int, int] | RecordRejected]:
        """Sizes of the images in many files with one message, which is much faster; rejects are returned, not raised.

        If a child crashes or hangs, each image is tried alone, so that only the culprit is rejected.

        Raises: ResourceError, RuntimeError: as ``size``.
        """
        sizes: list[tuple[int, int] | RecordRejected] = []
        while len(sizes) < len(places):
            rest = places[len(sizes) :]
            job = {
                "stage": "scan",
                "places": [(str(place.path), place.offset, place.num_bytes) for place in rest],
                "seconds": self._timeout_seconds / 2,
                "max_megapixels": self._max_megapixels,
            }
            try:
                head, _ = self._ask(job, None, patience=(1,))
            except RecordRejected:
                return sizes + [self._size_or_reject(place) for place in rest]
            sizes += [RecordRejected(*size) if len(size) == 3 else (size[0], size[1]) for size in head["sizes"]]
        return sizes

    def _size_or_reject(self, place: ImagePlace) -> tuple[int, int] | RecordRejected:
        try:
            size = self.size(*place)
            assert size, "a file has all bytes"
            return size
        except RecordRejected as reject:
            return reject.without_traceback()

    def decode(
        self,
        path: Path,
        offset: int,
        num_bytes: int,
        data: bytes | None = None,
        **how: Any,
    ) -> Decoded:
        """Decode an image and fit it into its bucket.

        Args:
          path, offset, num_bytes, data: as in ``ImagePlace``.
          how: as for ``pixels.decode_image``.
        Raises: as ``size``, with the stage "decode".
        """
        job = {"stage": "decode", "path": str(path), "offset": offset, "num_bytes": num_bytes, "how": how}
        job["max_megapixels"] = self._max_megapixels
        head, pixels = self._ask(job, data)
        assert pixels is not None, "a child answers a decode with pixels"
        read_seconds, decode_seconds = head["seconds"]
        return Decoded(
            pixels=pixels,
            size=tuple(head["size"]),
            source_checksum=head["checksum"],
            read_seconds=read_seconds,
            decode_seconds=decode_seconds,
            notes=tuple(head["notes"]),
        )

    def _ask(
        self, job: dict[str, Any], data: bytes | None, *, patience: tuple[int, ...] = (1, RETRY_PATIENCE)
    ) -> tuple[dict[str, Any], np.ndarray | None]:
        """Send a job to a child; ``patience`` holds a factor of the time-out for each try. Faults are retried."""
        path = job.get("path") or job["places"][0][0]
        return retried(lambda: self._try(job, data, path, patience), path, pause=self._closed.wait)

    def _try(
        self, job: dict[str, Any], data: bytes | None, path: str, patience: tuple[int, ...]
    ) -> tuple[dict[str, Any], np.ndarray | None]:
        """Ask a child, and after a crash or time-out another one; raises OSError at a fault."""
        if os.getpid() != self._owner:
            raise RuntimeError(f"decoders of process {self._owner} used in process {os.getpid()}; make new ones there")
        child = self._idle.get()
        try:
            if self._closed.is_set():
                raise RuntimeError("the decoders are closed")
            try:
                head, pixels = child.ask(job, data, patience=patience[0])
            except (RecordRejected, TimeoutError) as error:
                if self._closed.is_set() or len(patience) == 1:
                    raise
                LOG.info("image '%s' crashed its decoder (%s): retrying once with another", path, error)
                head, pixels = child.ask(job, data, patience=patience[1])
        except (RecordRejected, ResourceError) as error:
            was_killed = isinstance(error, ResourceError) or error.reason == "decoder_crash"  # starting, or working
            if was_killed and self._closed.is_set():
                raise RuntimeError("the decoders were closed while an image was being decoded") from error
            raise
        finally:
            self._idle.put(child)
        if "reject" in head:
            raise RecordRejected(*head["reject"])
        if "fault" in head:
            raise OSError(*head["fault"])
        if "error" in head:
            where = f" at byte {job['offset']}" if job.get("offset") else ""
            raise RuntimeError(f"image '{path}'{where}: a bug in the decoder, please report it\n{head['error']}")
        return head, pixels


class DecoderProcess:
    """A lazily started child and its socket; used by one thread at a time, killed if it does not answer."""

    def __init__(self, module: str, timeout_seconds: float, memory_mib: int) -> None:
        self._module = module
        self._timeout_seconds = timeout_seconds
        self._memory_mib = memory_mib
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def ask(
        self, job: dict[str, Any], data: bytes | None, *, patience: float
    ) -> tuple[dict[str, Any], np.ndarray | None]:
        """Send one job, with its bytes if they are not in a file, and wait for the answer.

        Raises: RecordRejected: decoder_crash, decoder_timeout. TimeoutError: it is still reading the file.
          ResourceError: it does not start.
        """
        if self._process is not None and self._process.poll() is not None:
            self.stop()  # killed from outside while idle
        answered = False
        is_reading = data is None and "places" not in job
        try:
            connection = self._connection or self._start()
            connection.send_bytes(json.dumps({**job, "is_sent": data is not None}).encode())
            if data is not None:
                connection.send_bytes(data)
            end = time.monotonic() + self._timeout_seconds * patience
            message = READ
            while message in (READ, READING) or message.startswith(LARGE):
                if message.startswith(LARGE):
                    end += self._timeout_seconds * patience * int(message.removeprefix(LARGE))
                left = end - time.monotonic()
                if left <= 0 or not connection.poll(left):
                    raise BlockingIOError
                message = connection.recv_bytes(MAX_HEAD_BYTES)
                is_reading = message == READING or (is_reading and message != READ)
            head = json.loads(message)
            shape = head.get("shape")
            pixels = None if shape is None else np.frombuffer(connection.recv_bytes(), np.uint8).reshape(shape)
            answered = True
        except BlockingIOError as error:
            seconds = f"{self._timeout_seconds * patience:g} s"
            if is_reading:
                raise TimeoutError(errno.ETIMEDOUT, f"no bytes in {seconds}") from error
            raise RecordRejected(job["stage"], "decoder_timeout", f"no answer in {seconds}") from error
        except (EOFError, OSError, ValueError) as error:
            raise RecordRejected(job["stage"], "decoder_crash", self._how_it_ended()) from error
        finally:
            if not answered:  # also on Ctrl-C: otherwise the next job would get this answer
                self.stop()
        return head, pixels

    def kill(self) -> None:
        """Kill the process; the socket stays open for the thread that reads from it."""
        process = self._process
        if process is not None:
            process.kill()

    def stop(self) -> None:
        """Kill the process and close its socket; the next job starts a new one."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._connection = self._process = None

    def _start(self) -> Connection:
        limits = (self._timeout_seconds * RETRY_PATIENCE, self._memory_mib, os.getpid())
        try:
            ours, theirs = socket.socketpair()
            with theirs:
                whole = int(self._timeout_seconds)
                timeout = struct.pack("@ll", whole, int((self._timeout_seconds - whole) * 1e6))
                for kind in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # if it stops in the middle of an answer
                    ours.setsockopt(socket.SOL_SOCKET, kind, timeout)
                self._connection = Connection(ours.detach())
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", self._module, str(theirs.fileno()), *map(str, limits)],
                    pass_fds=[theirs.fileno()],  # only this one: an inherited copy would keep a sibling's socket open
                    env=_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,  # libtiff and others log there
                    process_group=0,  # Ctrl-C is the parent's
                )
            end = time.monotonic() + START_SECONDS
            while not self._connection.poll(ALIVE_SECONDS):  # also True at the end of the socket
                if self._process.poll() is not None:
                    raise EOFError  # a process forked meanwhile holds the socket open
                if time.monotonic() > end:
                    raise TimeoutError(f"no answer in {START_SECONDS:g} s")
            if self._connection.recv_bytes(len(READY)) != READY:
                raise OSError("its first message is wrong")
        except (EOFError, OSError) as error:
            how = self._how_it_ended() if self._process is not None and isinstance(error, EOFError) else str(error)
            raise ResourceError(
                f"image decoder '{self._module}': the process does not start ({how}). Expected: memory, two free file "
                f"descriptors, and the image libraries. '{sys.executable} -m {self._module}' shows what is missing."
            ) from error
        return self._connection

    def _how_it_ended(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return "the decoder's answer is not valid"
        if code >= 0:
            return f"the decoder exited with status {code}"
        return f"the decoder was killed by signal {-code} ({signal.strsignal(-code)})"


def _environment() -> dict[str, str]:
    """This process's environment and module path, with single-threaded libraries: the children are the threads."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**os.environ, **threads, "PYTHONPATH": path}
