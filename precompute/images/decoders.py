"""Decode pictures in child processes with a time limit and a memory limit.

Pictures are untrusted, and decoders are large C libraries. If a picture crashes, hangs or bloats its decoder, the child
dies, the picture is rejected with a reason, and the next picture gets a new child (``decoder_child.py``). This is not a
sandbox: a child may read whatever its user may read.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...datasets.errors import RecordRejected, ResourceError
from .decoder_process import RETRY_PATIENCE, DecoderProcess
from .faults import retried

LOG = logging.getLogger(__name__)
CHILD_MODULE = f"{__package__}.decoder_child"


class PicturePlace(NamedTuple):
    """Where the bytes of a picture are: in a file that a child reads, or in memory, to be sent to it.

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
    """A decoded picture.

    Args:
      pixels: (H, W, 3) uint8, of the bucket's size; of a mask (H, W), of the latents' size; read-only.
      height_px, width_px: of the source picture, upright.
      source_checksum: XXH3-64 of the encoded bytes.
      read_seconds: of the child's read; 0 for bytes that were sent.
      decode_seconds: of the rest.
      companions: other pictures of the same record, by name.
    """

    pixels: np.ndarray
    height_px: int
    width_px: int
    source_checksum: int
    read_seconds: float = 0.0
    decode_seconds: float = 0.0
    companions: Mapping[str, Decoded] = field(default_factory=dict)


class Decoders:
    """Child processes that decode pictures; a context manager.

    Any number of threads may call it: each borrows one child. Children start on first use and end with the context. Use
    it only in the process that made it.

    Args:
      num_children: maximum number of processes, and so of concurrent pictures.
      timeout_seconds: for reading and decoding one picture. After a crash or time-out a new child tries once more with
        a longer limit: the machine may have been at fault.
      memory_mib: address space of one child.
    """

    def __init__(
        self,
        num_children: int,
        *,
        timeout_seconds: float = 5.0,
        memory_mib: int = 4096,
        _child_module: str = CHILD_MODULE,
    ) -> None:
        if num_children < 1:
            raise ValueError(f"num_children is {num_children}; needed at least 1")
        self._timeout_seconds = timeout_seconds
        self._owner, self._closed = os.getpid(), threading.Event()
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
        """Number of concurrent pictures."""
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

    def size(
        self, path: Path, offset: int, num_bytes: int, data: bytes | None = None, *, exif_orientation: bool = True
    ) -> tuple[int, int]:
        """Height and width in pixels of a picture, from its header.

        Args:
          path, offset, num_bytes, data: as in ``PicturePlace``.
          exif_orientation: as of ``pixels.read_size``.
        Raises:
          RecordRejected: stage "scan"; not a picture, too large, unreadable, or it crashed its child.
          ResourceError: a child cannot be started, or the disk or this machine fails, after some tries.
          RuntimeError: a bug in the decoder, or this is closed.
        """
        job = {"stage": "scan", "path": str(path), "offset": offset, "num_bytes": num_bytes}
        head, _ = self._ask(job | {"exif_orientation": exif_orientation}, data)
        height_px, width_px = head["size"]
        return height_px, width_px

    def sizes(
        self, places: Sequence[PicturePlace], *, exif_orientation: bool = True
    ) -> list[tuple[int, int] | RecordRejected]:
        """As ``size`` for many pictures in one message, which is much faster; rejects are returned, not raised.

        If a child crashes or hangs, each picture is tried alone, so that only the culprit is rejected.

        Raises: ResourceError, RuntimeError: as ``size``.
        """
        if any(place.data is not None for place in places):
            return [self._size_or_reject(place, exif_orientation) for place in places]
        found: list[tuple[int, int] | RecordRejected] = []
        while rest := [(str(path), offset, size) for path, offset, size, _ in places[len(found) :]]:
            try:
                job = {"stage": "scan", "places": rest, "seconds": self._timeout_seconds / 2}
                job["exif_orientation"] = exif_orientation
                head, _ = self._ask(job, None, patience=(1,))
            except RecordRejected:
                return found + [self._size_or_reject(place, exif_orientation) for place in places[len(found) :]]
            found += [RecordRejected(*one) if len(one) == 3 else (one[0], one[1]) for one in head["sizes"]]
        return found

    def _size_or_reject(self, place: PicturePlace, exif_orientation: bool) -> tuple[int, int] | RecordRejected:
        try:
            return self.size(*place, exif_orientation=exif_orientation)
        except RecordRejected as reject:
            return reject

    def picture(
        self,
        path: Path,
        offset: int,
        num_bytes: int,
        data: bytes | None = None,
        *,
        bucket: tuple[int, int],
        crop: str,
        resize_filter: str = "bicubic",
        exif_orientation: bool = True,
        beside: tuple[int, int] | None = None,
        mask_px: int = 0,
    ) -> Decoded:
        """Decode a picture and fit it into its bucket.

        Args:
          path, offset, num_bytes, data: as in ``PicturePlace``.
          bucket, crop, resize_filter, beside, mask_px: as of ``pixels.decode_picture``.
          exif_orientation: as of ``size``.
        Raises: as ``size``, with the stage "decode".
        """
        job = {"stage": "decode", "path": str(path), "offset": offset, "num_bytes": num_bytes, "bucket": bucket}
        job |= {"crop": crop, "resize_filter": resize_filter, "exif_orientation": exif_orientation}
        job |= {"beside": beside, "mask_px": mask_px} if beside else {}
        head, pixels = self._ask(job, data)
        assert pixels is not None, "a child answers a decode with pixels"
        height_px, width_px = head["size"]
        return Decoded(pixels, height_px, width_px, head["checksum"], *head["seconds"])

    def _ask(
        self, job: dict[str, Any], data: bytes | None, *, patience: tuple[int, ...] = (1, RETRY_PATIENCE)
    ) -> tuple[dict[str, Any], np.ndarray | None]:
        """Send a job to a child; ``patience`` holds a factor of the time-out for each try. Faults are retried."""
        path = job.get("path") or job["places"][0][0]
        return retried(lambda: self._try(job, data, patience), path, pause=self._closed.wait)

    def _try(
        self, job: dict[str, Any], data: bytes | None, patience: tuple[int, ...]
    ) -> tuple[dict[str, Any], np.ndarray | None]:
        """As ``_ask``; raises OSError at a fault."""
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
                LOG.info("picture '%s' ended its decoder (%s): another tries once more", job.get("path"), error)
                head, pixels = child.ask(job, data, patience=patience[1])
        except (RecordRejected, ResourceError) as error:
            was_killed = isinstance(error, ResourceError) or error.reason == "decoder_crash"  # starting, or working
            if was_killed and self._closed.is_set():
                raise RuntimeError("the decoders were closed while a picture was being decoded") from error
            raise
        finally:
            self._idle.put(child)
        if "reject" in head:
            raise RecordRejected(*head["reject"])
        if "fault" in head:
            raise OSError(*head["fault"])
        if "error" in head:
            first = job.get("path") or job["places"][0][0]
            raise RuntimeError(f"picture '{first}': a bug in the decoder\n{head['error']}")
        return head, pixels
