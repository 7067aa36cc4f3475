"""Images of stored rows as WebP: decoded latents, one after the other in one thread; features in false color."""

from __future__ import annotations

import asyncio
import functools
import io
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from PIL import Image
from starlette.requests import Request

from ....datasets.format.row_layout import MASK
from ....datasets.format.token_dtypes import widen_latents
from ....datasets.store import LatentStore
from ....errors import EncoderError, LeanditError, StoreError
from ..report.page import RGB, latent_pixels
from .tables import StoreTables

MAX_WAITING = 72  # requests: a browser sends six at a time
CACHED = 256  # images
SMALLEST_PX = 128  # shorter sides are enlarged by a whole number, in squares

Decode = Callable[[np.ndarray], np.ndarray]
"""From rows as stored, (B, 2C, H, W) or (B, C, H, W), to images (B, height_px, width_px, 3) uint8."""


class Busy(LeanditError):
    """An image was not made: too many requests wait, or nobody waits for it."""


class ImageDecoder:
    """Decodes images of a store in a thread of its own.

    Without a decoder an image is the first three channels of its latent.

    Args:
      load: returns the decoder; called in another thread.
    """

    def __init__(self, store: LatentStore, tables: StoreTables, load: Callable[[], Decode]) -> None:
        self._store, self._tables, self._load = store, tables, load
        self._worker = ThreadPoolExecutor(1, "leandit-images")
        self._decoder: Future[Decode] = Future()
        self._turn, self._num_waiting = asyncio.Lock(), 0
        self._cached = functools.lru_cache(CACHED)(self._image)

    def start(self) -> None:
        """Load the decoder, in the thread of the images: they wait for it."""
        self._decoder = self._worker.submit(self._load)

    def stop(self) -> None:
        """Decode no further images."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    @property
    def is_ready(self) -> bool:
        """Whether the decoder is loaded, or cannot be."""
        return self._decoder.done()

    @property
    def note(self) -> str:
        """Why images are not decoded; "" if they are."""
        error = self._decoder.exception() if self.is_ready else LeanditError("the decoder is being loaded")
        if isinstance(error, ModuleNotFoundError):
            return f"{error.name} is not installed. Install it with: pip install 'leandit[precompute]'."
        if error is None or isinstance(error, LeanditError):
            return str(error or "")
        return f"the decoder cannot be loaded ({type(error).__name__}: {error})."

    async def webp_for(self, request: Request, position: int, companion: str = "") -> bytes:
        """An image as WebP, when its turn has come.

        Args:
          request: if the browser has closed it meanwhile, nothing is decoded.
          position: of a stored record in the records table.
          companion: name of a companion image; "" for the image itself.
        Raises: Busy; RowOutOfRange; StoreError: the record is not stored; LeanditError: the row cannot be read.
        """
        if self._num_waiting >= MAX_WAITING:
            raise Busy(f"{MAX_WAITING} images are waiting already.")
        self._num_waiting += 1
        try:
            async with self._turn:
                (loaded,), _ = await asyncio.wait([asyncio.wrap_future(self._decoder)])
                if not loaded.cancelled():
                    loaded.exception()  # ``note`` says it; asyncio logs one that nobody has asked for
                if await request.is_disconnected():
                    raise Busy("the browser has closed the request.")
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._worker, self._cached, position, companion)
        finally:
            self._num_waiting -= 1

    def _image(self, position: int, companion: str) -> bytes:
        record = self._tables.record(position)
        if record.status != "stored" or record.bucket is None:
            raise StoreError(f"record '{record.key}': it is {record.status}, so there is nothing to show.")
        array = self._store.companion(companion, record.bucket) if companion else self._store.latents(record.bucket)
        rows = array.take(np.array([record.row]))
        if any(spec.kind == MASK for spec in self._store.spec.companions if spec.name == companion):
            return webp(np.repeat(rows[0][..., None], RGB, axis=2))
        if self.note:
            return webp(latent_pixels(widen_latents(rows[0])[: self._store.spec.latent.channels]))
        try:
            return webp(self._decoder.result()(rows)[0])
        except LeanditError:
            raise
        except Exception as error:  # of the libraries of a decoder
            raise EncoderError(f"the image cannot be decoded ({type(error).__name__}: {error}).") from error


def webp(pixels: np.ndarray) -> bytes:
    """An image, (height, width, 3) uint8, as WebP; small ones are enlarged, so that each number is a square."""
    image = Image.fromarray(pixels)
    times = -(-SMALLEST_PX // max(image.size))
    if times > 1:
        image = image.resize((image.width * times, image.height * times), Image.Resampling.NEAREST)
    stream = io.BytesIO()
    image.save(stream, "WEBP", quality=88, method=2, lossless=times > 1)
    return stream.getvalue()


def principal_colors(tokens: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """(rows, columns, 3) uint8: the first three principal components of an image's tokens as red, green and blue.

    Args:
      tokens: (T, D), finite.
      grid: rows and columns of tokens, T in all.
    """
    centered = tokens.astype(np.float64) - tokens.mean(0, dtype=np.float64)
    left, sizes, _ = np.linalg.svd(centered, full_matrices=False)
    scores = np.zeros((len(tokens), RGB))
    scores[:, : min(RGB, len(sizes))] = (left * sizes)[:, :RGB]
    scores *= np.where(np.abs(scores.max(0)) < np.abs(scores.min(0)), -1, 1)  # a sign that does not depend on chance
    return latent_pixels(scores.T.reshape(RGB, *grid))
