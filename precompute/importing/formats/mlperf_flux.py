"""MLPerf's encoded pictures and captions for Flux.1, as torchtitan's MLPerf branch writes and reads them.

The set is a dataset that Hugging Face's ``save_to_disk`` wrote: Arrow streams, which are mapped. A cell is a ``.npy``
file whose uint16 are the bits of bfloat16. There is no text: captions with the same embeddings are one, named by their
hash.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash

from ....datasets.errors import RecordRejected, SourceError
from ....datasets.format.token_dtypes import StoredTokens, widen
from ....datasets.revisions.writer import row_checksum
from ...config import TextSection
from ...sources.files.files import LocalFiles
from ...sources.files.record import MAX_CAPTION_CHARS, usable_key
from ...sources.tables.arrow import arrow_names
from .recipe import ImportRecipe
from .source import CaptionHeader, Entry, Features, FormatDefaults, Reader, RecordHeader, TextHeader, rejecting, size_of
from .untrusted.arrays import MAX_HEADER, look, open_regular, parse_npy

MODEL = "black-forest-labs/FLUX.1-schnell"
MLPERF_FLUX = FormatDefaults(
    latent="mean_logvar",
    is_scaled=False,
    vae=MODEL,
    vae_subfolder="vae",
    downscale=8,
    shift=(0.1159,),
    scale=(0.3611,),
    texts={  # in the order of the recipe flux1-1024
        "clip": TextSection(kind="clip", model="openai/clip-vit-large-patch14", output="pooled", max_tokens=77),
        "t5": TextSection(kind="t5", model="google/t5-v1_1-xxl", full_length=True, attend_padding=True),
    },
)
KEY, MEAN, LOGVAR, T5, CLIP = "__key__", "mean", "logvar", "t5_encodings", "clip_encodings"
COLUMN = {"clip": CLIP, "t5": T5}
SIDES = {MEAN: 3, LOGVAR: 3, T5: 2, CLIP: 1}  # of the array in a cell
BITS = "uint16"  # of bfloat16
OPEN_FILES = 16


class MlperfFlux(Reader):
    """A folder with ``state.json`` and Arrow files of ``__key__``, ``mean``, ``logvar``, ``t5_encodings`` and
    ``clip_encodings``; of another column only the text, if the user names it.

    Raises: SourceError: no such dataset.
    """

    kind, defaults = "mlperf-flux", MLPERF_FLUX
    has_labels = False

    def __init__(self, root: Path, recipe: ImportRecipe) -> None:
        super().__init__(root, recipe)
        self._names = arrow_names(LocalFiles(root))
        self._text = recipe.layout.text
        self._table = lru_cache(maxsize=OPEN_FILES)(self._mapped)

    def entries(self) -> Iterator[Entry]:
        """Rows of the files in order, by their keys; a key that was there before has the row's place behind it.

        Raises: SourceError: a file cannot be read, so its number of rows is unknown.
        """
        seen: set[str] = set()
        for name in self._names:
            try:
                with rejecting(name):
                    keys = self._table(name)[KEY].to_pylist()
            except RecordRejected as reject:
                raise SourceError(
                    f"source '{self.root}': file '{name}' cannot be read ({reject.detail}). Restore it."
                ) from reject
            stem, size = name.removesuffix(".arrow"), size_of(self.root, name)
            for row, given in enumerate(keys):
                key = usable_key(str(given or f"{stem}/{row}"))[0]
                key = f"{key}@{stem}/{row}" if key in seen else key
                seen.add(key)
                yield Entry(key, name, row, size)

    def look(self, entry: Entry) -> RecordHeader:
        """From the headers of its cells, and the content of the captions."""
        with rejecting(entry.key):
            (shape, dtype), of_logvar = self._look(entry, MEAN), self._look(entry, LOGVAR)
            if of_logvar != (shape, dtype):
                raise ValueError(f"'{MEAN}' {shape} of {dtype}, '{LOGVAR}' {of_logvar[0]} of {of_logvar[1]}")
            caption = self._look_caption(entry)
        channels, height, width = shape
        return RecordHeader((2 * channels, height, width), _widened(dtype), caption=caption)

    def _look_caption(self, entry: Entry) -> CaptionHeader:
        headers, digest = [], xxhash.xxh3_128()
        for name, section in self.defaults.texts.items():
            (*length, width), dtype = self._look(entry, COLUMN[name])
            num_tokens, padded = (length[0], length[0]) if length else (1, section.max_tokens)
            headers.append(TextHeader(num_tokens, padded, width, "bfloat16" if dtype == BITS else dtype))
            if self.recipe.text.check == "content":
                values = self._values(entry, COLUMN[name])
                if not np.isfinite(values).all():
                    raise RecordRejected("scan", "nonfinite", f"{entry.key}: NaN or infinity in '{COLUMN[name]}'")
                digest.update(np.ascontiguousarray(values).data)
        if self._text:
            text = self._table(entry.path)[self._text][entry.offset].as_py()
            if not isinstance(text, str) or not text.strip() or len(text) > MAX_CAPTION_CHARS:
                raise RecordRejected("scan", "no_caption", f"{entry.key}: no text in '{self._text}', or too long")
        elif self.recipe.text.check == "content":
            text = f"embedding {digest.hexdigest()}"
        else:
            text = f"caption of {entry.key}"
        return CaptionHeader(text, tuple(headers))

    def read(self, entry: Entry) -> Features:
        """Mean and log-variance, one after the other."""
        with rejecting(entry.key):
            moments = np.concatenate([self._values(entry, MEAN), self._values(entry, LOGVAR)])
        return Features([moments], row_checksum(moments))

    def read_caption(self, entry: Entry, name: str) -> np.ndarray:
        """All rows of T5, (L, D), or the vector of CLIP, (P,)."""
        with rejecting(entry.key):
            return self._values(entry, COLUMN[name])

    def _look(self, entry: Entry, column: str) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of a cell's array; raises OSError, ValueError."""
        cell = self._cell(entry, column)
        shape, dtype = look(bytes(cell[:MAX_HEADER]), len(cell))
        return _inner(shape, column), dtype

    def _values(self, entry: Entry, column: str) -> np.ndarray:
        """Numbers of a cell, bfloat16 as float32; raises OSError, ValueError."""
        array = parse_npy(bytes(self._cell(entry, column)))
        array = array.reshape(_inner(array.shape, column))
        return widen(StoredTokens(array, None), "bfloat16") if array.dtype == BITS else array

    def _cell(self, entry: Entry, column: str) -> memoryview:
        cell = self._table(entry.path)[column][entry.offset].as_buffer()
        if cell is None:
            raise ValueError(f"'{column}' is empty")
        return memoryview(cell)

    def _mapped(self, name: str) -> pa.Table:
        """A file of the set; raises OSError, ValueError."""
        path = self.root / name
        open_regular(path).close()  # anything else might never come to an end
        try:
            with pa.memory_map(str(path)) as file:
                table = pa.ipc.open_stream(file.read_buffer()).read_all()
            table.validate(full=True)
        except pa.ArrowException as error:
            raise ValueError(f"not a readable Arrow stream ({str(error)[:200]})") from error
        text = [self._text] if self._text else []
        wanted = {KEY: "string", **dict.fromkeys((MEAN, LOGVAR, T5, CLIP), "binary"), **dict.fromkeys(text, "string")}
        for column, kind in wanted.items():
            if column not in table.column_names:
                raise ValueError(f"no column '{column}' among {', '.join(table.column_names)[:200]}")
            if str(table[column].type) not in (kind, f"large_{kind}"):
                raise ValueError(f"column '{column}' of type {table[column].type}; needed {kind}")
        return table.select(list(wanted))


def _inner(shape: tuple[int, ...], column: str) -> tuple[int, ...]:
    """A shape without a leading batch of one; raises ValueError if it is not one of the column."""
    inner = shape[1:] if len(shape) == SIDES[column] + 1 and shape[0] == 1 else shape
    if len(inner) != SIDES[column] or min(inner) < 1:
        raise ValueError(f"'{column}' of shape {shape}; needed {SIDES[column]} sides")
    return inner


def _widened(dtype: str) -> str:
    return "float32" if dtype == BITS else dtype
