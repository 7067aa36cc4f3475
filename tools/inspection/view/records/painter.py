"""Pictures of records, decoded when a page asks for them: one thread, a bounded queue, a bounded cache.

Without a decoder at hand a picture is the first three channels of its latent.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from .....datasets.errors import EncoderError, LeanditError, StoreError
from .....datasets.format.buckets import bucket_size
from .....datasets.format.row_layout import MASK
from .....datasets.store import LatentStore
from ...report.page import latent_pixels
from .decoder import Decode, preview_divisor
from .planes import webp

MOST_WAITING = 72  # pictures: three pages
BATCH, BATCH_PIXELS = 8, 8 * 256 * 256  # pictures in a forward of a GPU, and their pixels
CPU_BATCH = 1  # a CPU takes a third longer for each of several: their numbers do not fit its cache
CACHE_BYTES = 128 << 20

Load = Callable[[], Decode]


class Subject(NamedTuple):
    """What a picture shows: a stored record by its position in the table, or a companion picture of it by name.

    A preview is decoded from a smaller latent, the mean of neighbouring positions: a quarter of the work or less, and
    blurred, so it is shown only until the picture itself comes.
    """

    record: int
    companion: str = ""
    is_preview: bool = False


class Dropped(LeanditError):
    """A picture was not made, because newer requests have filled the queue."""


class Painter:
    """Makes pictures of records in a thread of its own.

    Args:
      store: whose records are shown.
      load: returns the decoder; called in the thread.
      batch: pictures of one bucket that are decoded together, at most.
    """

    def __init__(self, store: LatentStore, load: Load, *, batch: int = CPU_BATCH) -> None:
        self._store, self._load, self._batch = store, load, batch
        self._record = functools.lru_cache(4 * MOST_WAITING)(store.record_at)
        self._decode: Decode | None = None
        self.note = "the decoder is being loaded"
        self.is_ready = False
        self._wake = threading.Condition()
        self._waiting: OrderedDict[Subject, Future[bytes]] = OrderedDict()
        self._at_work: dict[Subject, Future[bytes]] = {}
        self._made: OrderedDict[Subject, bytes] = OrderedDict()
        self._made_bytes, self._stopped = 0, False
        self._thread = threading.Thread(target=self._work, name="leandit-painter", daemon=True)

    def start(self) -> None:
        """Load the decoder and wait for requests."""
        self._thread.start()

    def stop(self) -> None:
        """Make no further pictures; who waits for one gets ``Dropped``."""
        with self._wake:
            self._stopped = True
            while self._waiting:
                self._drop()
            self._wake.notify()

    def paint(self, subject: Subject) -> Future[bytes]:
        """The picture as WebP, now or later.

        Raises: RowOutOfRange. The future: Dropped; LeanditError: the row cannot be read.
        """
        _ = self._kind(subject)  # read before the lock
        with self._wake:
            if subject in self._made:
                self._made.move_to_end(subject)
                done: Future[bytes] = Future()
                done.set_result(self._made[subject])
                return done
            if future := self._at_work.get(subject):
                return future
            if subject not in self._waiting:
                self._waiting[subject] = Future()
                if len(self._waiting) > MOST_WAITING or self._stopped:
                    self._drop()
                self._wake.notify()
            return self._waiting.get(subject) or _dropped()

    def _drop(self) -> None:
        _, future = self._waiting.popitem(last=False)
        future.set_exception(Dropped("newer pictures were asked for."))

    def _work(self) -> None:
        try:
            self._decode = self._load()
            self.note = ""
        except LeanditError as error:
            self.note = str(error)
        except Exception as error:  # noqa: BLE001 - of any library; else pictures would be waited for forever
            self.note = f"the decoder cannot be loaded ({type(error).__name__}: {error})."
        self.is_ready = True
        while batch := self._next():
            self._make(batch)

    def _make(self, batch: dict[Subject, Future[bytes]]) -> None:
        """Make pictures of one bucket; where one of them cannot be made, the others are."""
        try:
            made = dict(zip(batch, map(webp, self._pixels(list(batch))), strict=True))
        except Exception as error:  # of the libraries of a decoder
            logging.getLogger(__name__).debug("a picture cannot be made", exc_info=True)
            if len(batch) > 1:
                for subject, future in batch.items():
                    self._make({subject: future})
                return
            if not isinstance(error, LeanditError):
                error = EncoderError(f"the picture cannot be made ({type(error).__name__}: {error}).")
            self._finish(batch, {}, error)
        else:
            self._finish(batch, made, None)

    def _finish(self, batch: dict[Subject, Future[bytes]], made: dict[Subject, bytes], error: Exception | None) -> None:
        with self._wake:
            for subject in batch:
                del self._at_work[subject]
                if error is None:
                    self._keep(subject, made[subject])
        for subject, future in batch.items():
            if error is None:
                future.set_result(made[subject])
            else:
                future.set_exception(error)

    def _next(self) -> dict[Subject, Future[bytes]]:
        """The longest waiting request, of previews if there are any, and others of its bucket; nothing at the end."""
        with self._wake:
            while not self._waiting and not self._stopped:
                self._wake.wait()
            if self._stopped:
                return {}
            kinds = {subject: self._kind(subject) for subject in self._waiting}
            first = min(kinds, key=lambda subject: not subject.is_preview)  # previews first, else who waits longest
            bucket = kinds[first][0] or ""
            room = BATCH_PIXELS // math.prod(bucket_size(bucket)) if bucket else 1
            alike = [subject for subject in kinds if kinds[subject] == kinds[first]][: max(1, min(self._batch, room))]
            batch = {subject: self._waiting.pop(subject) for subject in alike}
            self._at_work |= batch
            return batch

    def _kind(self, subject: Subject) -> tuple[str | None, str, bool]:
        return self._record(subject.record).bucket, subject.companion, subject.is_preview

    def _pixels(self, subjects: list[Subject]) -> list[np.ndarray]:
        """(height, width, 3) uint8 of each; all of one bucket and companion."""
        records = [self._record(subject.record) for subject in subjects]
        for record in records:
            if record.status != "stored" or record.bucket is None:
                raise StoreError(f"record '{record.key}': it is {record.status}, so there is nothing to show.")
        bucket, name = records[0].bucket, subjects[0].companion
        assert bucket is not None
        array = self._store.picture(name, bucket) if name else self._store.latents(bucket)
        rows = array.take(np.array([record.row for record in records]))
        if any(one.kind == MASK for one in self._store.spec.pictures if one.name == name):
            return [np.repeat(row[..., None], 3, axis=2) for row in rows]
        if self._decode:
            divisor = preview_divisor(self._store, bucket) if subjects[0].is_preview else 1
            return list(self._decode(rows, divisor))
        return [latent_pixels(row[: self._store.spec.latent.channels]) for row in rows]

    def _keep(self, subject: Subject, picture: bytes) -> None:
        self._made[subject] = picture
        self._made_bytes += len(picture)
        while self._made_bytes > CACHE_BYTES and len(self._made) > 1:
            _, old = self._made.popitem(last=False)
            self._made_bytes -= len(old)


def _dropped() -> Future[bytes]:
    future: Future[bytes] = Future()
    future.set_exception(Dropped("newer pictures were asked for."))
    return future
