"""Pictures of records, decoded when a page asks for them: one thread, a bounded queue, a bounded cache.

Without a decoder at hand a picture is the first three channels of its latent.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .....datasets.errors import EncoderError, LeanditError, StoreError
from .....datasets.format.row_layout import MASK
from .....datasets.store import LatentStore
from ...report.pictures import latent_pixels
from .planes import webp

if TYPE_CHECKING:
    from .....precompute.encoders.vae import ImageEncoder

MOST_WAITING = 72  # pictures: three pages
BATCH, BATCH_PIXELS = 8, 8 * 256 * 256  # pictures in a forward of a GPU, and their pixels
CPU_BATCH = 1  # a CPU takes a third longer for each of several: their numbers do not fit its cache
CACHE_BYTES = 128 << 20

Load = Callable[[], "Decode"]
Decode = Callable[[np.ndarray], np.ndarray]
"""From rows as stored, (B, 2C, H, W) or (B, C, H, W), to pictures (B, height_px, width_px, 3) uint8."""


class Subject(NamedTuple):
    """What a picture shows: a stored record by its position in the table, or a companion picture of it by name."""

    record: int
    companion: str = ""


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
        self.is_ready = True
        while batch := self._next():
            subjects = list(batch)
            try:
                pictures = [webp(pixels) for pixels in self._pixels(subjects)]
            except (LeanditError, OSError, MemoryError, RuntimeError) as error:
                logging.getLogger(__name__).debug("a picture cannot be made", exc_info=True)
                for future in batch.values():
                    future.set_exception(error)
                continue
            with self._wake:
                for subject, picture in zip(subjects, pictures, strict=True):
                    self._keep(subject, picture)
            for future, picture in zip(batch.values(), pictures, strict=True):
                future.set_result(picture)

    def _next(self) -> dict[Subject, Future[bytes]]:
        """The longest waiting request, and others of its bucket; nothing at the end."""
        with self._wake:
            while not self._waiting and not self._stopped:
                self._wake.wait()
            if self._stopped:
                return {}
            kinds = {subject: self._kind(subject) for subject in self._waiting}
            first = next(iter(kinds))
            bucket = kinds[first][0] or ""
            height_px, _, width_px = bucket.partition("x")
            room = BATCH_PIXELS // (int(height_px) * int(width_px)) if bucket else 1
            alike = [subject for subject in kinds if kinds[subject] == kinds[first]][: max(1, min(self._batch, room))]
            return {subject: self._waiting.pop(subject) for subject in alike}

    def _kind(self, subject: Subject) -> tuple[str | None, str]:
        return self._record(subject.record).bucket, subject.companion

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
            return list(self._decode(rows))
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


def decoder_of(store: LatentStore, vae: str | None, device: Callable[[], Any]) -> Decode:
    """The decoder of a store, or the one that the user names.

    Args:
      vae: hub id or folder of a VAE for the same latents, such as a tiny one; None: the store's own.
      device: returns that of the decoder.
    Raises: EncoderError: it cannot be loaded, or is for other latents.
    """
    try:
        from ...contact_sheet import gives_zero_to_one, load_decoder, stored_to_latent
    except ModuleNotFoundError as error:
        raise EncoderError(
            f"{error.name} is not installed. Install it with: pip install 'leandit[precompute]'."
        ) from error
    from .....datasets.revisions.encoder_paths import encoder_section

    spec = store.spec.latent
    decoder: ImageEncoder = load_decoder(encoder_section(store.spec, "vae", store.path), vae, device())
    if decoder.num_channels != spec.channels or decoder.downscale != spec.downscale or not decoder.has_decoder:
        raise EncoderError(
            f"the VAE decodes {decoder.num_channels} channels of 1/{decoder.downscale} of the pixels, the store has "
            f"{spec.channels} of 1/{spec.downscale}. Give one for these latents with --vae."
        )
    own = _shift_and_scale(decoder) if vae and spec.decoding is None else None

    def decode(rows: np.ndarray) -> np.ndarray:
        raw = stored_to_latent(store, rows)
        if own is not None:  # by what the model sees: a tiny VAE takes latents that its large one has yet to scale
            shift, scale = (np.array(values, np.float32)[:, None, None] for values in (spec.shift, spec.scale))
            raw = (raw - shift) * scale / own[1] + own[0]
        return decoder.decode(raw.astype(np.float32), zero_to_one=gives_zero_to_one(spec))

    return decode


def _shift_and_scale(decoder: Any) -> tuple[np.ndarray, np.ndarray]:
    """Of a VAE, for (B, C, H, W)."""
    from .....precompute.config import VaeSection

    spec = decoder.latent_spec(VaeSection(), "float32")
    return tuple(np.array(values, np.float32)[:, None, None] for values in (spec.shift, spec.scale))  # pyright: ignore
