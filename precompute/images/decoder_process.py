"""A decoder child process, as its parent sees it: started on demand, killed if it does not answer."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from ...datasets.errors import RecordRejected, ResourceError
from .decoder_child import READ, READING, READY

START_SECONDS = 600.0  # until a living child counts as hung: a cold interpreter, a network disk, a busy machine
ALIVE_SECONDS = 1.0  # between two looks at a child that starts
END_SECONDS = 2.0  # from the end of a socket to the end of its process
MAX_HEAD_BYTES = 1 << 20
RETRY_PATIENCE = 4  # times the time-out, for a large picture on a busy machine


class DecoderProcess:
    """A lazily started process and its socket; used by one thread at a time."""

    def __init__(self, module: str, timeout_seconds: float, memory_mib: int) -> None:
        self._module, self._timeout_seconds, self._memory_mib = module, timeout_seconds, memory_mib
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
        answered, is_reading = False, data is None and "places" not in job
        try:
            connection = self._connection or self._start()
            connection.send_bytes(json.dumps({**job, "is_sent": data is not None}).encode())
            if data is not None:
                connection.send_bytes(data)
            end = time.monotonic() + self._timeout_seconds * patience
            message = READ
            while message in (READ, READING):
                if (left := end - time.monotonic()) <= 0 or not connection.poll(left):
                    raise BlockingIOError
                message = connection.recv_bytes(MAX_HEAD_BYTES)
                is_reading = message == READING or (is_reading and message != READ)
            head = json.loads(message)
            shape = head.get("shape")
            pixels = None if shape is None else np.frombuffer(connection.recv_bytes(), np.uint8).reshape(shape)
            answered = True
        except BlockingIOError as error:
            detail = f"no answer in {self._timeout_seconds * patience:g} s"
            if is_reading:
                raise TimeoutError(errno.ETIMEDOUT, f"no bytes in {self._timeout_seconds * patience:g} s") from error
            raise RecordRejected(job["stage"], "decoder_timeout", detail) from error
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
                for kind in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # if it stops in the middle of an answer
                    ours.setsockopt(socket.SOL_SOCKET, kind, _timeval(self._timeout_seconds))
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
                f"picture decoder '{self._module}': the process does not start ({how}). Needed: memory, two free file "
                f"descriptors, and the picture libraries. '{sys.executable} -m {self._module}' shows what is missing."
            ) from error
        return self._connection

    def _how_it_ended(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return "the decoder's answer is not valid"
        if code >= 0:
            return f"the decoder ended with status {code}"
        return f"the decoder was ended by signal {-code} ({signal.strsignal(-code)})"


def _timeval(seconds: float) -> bytes:
    whole = int(seconds)
    return struct.pack("@ll", whole, int((seconds - whole) * 1e6))


def _environment() -> dict[str, str]:
    """This process's environment and module path, with single-threaded libraries: the children are the threads."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**os.environ, **threads, "PYTHONPATH": path}
