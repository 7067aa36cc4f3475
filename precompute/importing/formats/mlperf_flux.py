"""MLPerf's encoded images and captions for FLUX.1, as torchtitan's MLPerf branch writes and reads them.

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

from ....datasets.format.token_dtypes import StoredTokens, widen
from ....datasets.revisions.writer import row_checksum
from ....errors import RecordRejected
from ...config import TextSection
from ...images.faults import open_regular
from ...sources.files.files import LocalFiles
from ...sources.files.record import MAX_CAPTION_CHARS, usable_key
from ...sources.tables.embedded import arrow_names
from ..recipe import ImportRecipe
from ..source import Entry, Features, FormatDefaults, Reader, RecordHeader, TextHeader, without_batch
from ..untrusted import MAX_HEADER, Looked, look, parse_npy

MODEL = "black-forest-labs/FLUX.1-schnell"
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

    kind = "mlperf-flux"
    defaults = FormatDefaults(
        "mean_logvar",
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
    has_labels = False

    def __init__(self, root: Path, recipe: ImportRecipe) -> None:
        super().__init__(root, recipe)
        self._names = arrow_names(LocalFiles(root))
        self._text = recipe.layout.text
        self._table = lru_cache(maxsize=OPEN_FILES)(self._mapped)

    def entries(self) -> Iterator[Entry]:
        """Rows of the files in order, by their keys; a repeated key has the row's location behind it.

        Raises: SourceError: a file cannot be read, so its number of rows is unknown.
        """
        seen: set[str] = set()
        for name in self._names:
            with self.needing(name):
                keys = self._table(name)[KEY].to_pylist()
            stem, num_bytes = name.removesuffix(".arrow"), self.file_entry(name).num_bytes
            for row, given in enumerate(keys):
                key = usable_key(str(given or f"{stem}/{row}"))[0]
                key = f"{key}@{stem}/{row}" if key in seen else key
                seen.add(key)
                yield Entry(key, name, row, num_bytes)

    def _header(self, entry: Entry) -> RecordHeader:
        texts, digest, is_read = [], xxhash.xxh3_128(), self.recipe.text.check == "content"
        ((channels, *size), dtype), of_logvar = self._look(entry, MEAN), self._look(entry, LOGVAR)
        if of_logvar != ((channels, *size), dtype):
            raise ValueError(f"'{MEAN}' {channels, *size} of {dtype}, '{LOGVAR}' {of_logvar[0]} of {of_logvar[1]}")
        for name, section in self.defaults.texts.items():
            (*length, width), stored = self._look(entry, COLUMN[name])
            num_tokens, padded = (length[0], length[0]) if length else (1, section.max_tokens)
            texts.append(TextHeader(num_tokens, padded, width, "bfloat16" if stored == BITS else stored))
            if is_read:
                values = self._numbers(entry, COLUMN[name])
                if not np.isfinite(values).all():
                    raise RecordRejected("scan", "nonfinite", f"{entry.key}: NaN or infinity in '{COLUMN[name]}'")
                digest.update(np.ascontiguousarray(values).data)
        text = f"embedding {digest.hexdigest()}" if is_read else f"caption of {entry.key}"
        if self._text:
            text = self._table(entry.path)[self._text][entry.offset].as_py()
        if not isinstance(text, str) or not text.strip() or len(text) > MAX_CAPTION_CHARS:
            raise RecordRejected("scan", "no_caption", f"{entry.key}: no text in '{self._text}', or too long")
        latent_dtype = "float32" if dtype == BITS else dtype
        return RecordHeader((2 * channels, *size), latent_dtype, text=text, texts=tuple(texts))

    def _values(self, entry: Entry) -> Features:
        moments = np.concatenate([self._numbers(entry, MEAN), self._numbers(entry, LOGVAR)])
        return [moments], row_checksum(moments)

    def _caption(self, entry: Entry, name: str) -> np.ndarray:
        return self._numbers(entry, COLUMN[name])

    def _look(self, entry: Entry, column: str) -> Looked:
        """Shape and dtype of a cell's array; raises OSError, ValueError, RecordRejected."""
        cell = self._cell(entry, column)
        shape, dtype = look(bytes(cell[:MAX_HEADER]), len(cell))
        return without_batch(shape, SIDES[column]), dtype

    def _numbers(self, entry: Entry, column: str) -> np.ndarray:
        """Numbers of a cell, bfloat16 as float32; raises OSError, ValueError, RecordRejected."""
        array = parse_npy(bytes(self._cell(entry, column)))
        array = array.reshape(without_batch(array.shape, SIDES[column]))
        return widen(StoredTokens(array, None), "bfloat16") if array.dtype == BITS else array

    def _cell(self, entry: Entry, column: str) -> memoryview:
        cell = self._table(entry.path)[column][entry.offset].as_buffer()
        if cell is None:
            raise ValueError(f"'{column}' is empty")
        return memoryview(cell)

    def _mapped(self, name: str) -> pa.Table:
        """A file of the set; raises OSError, ValueError."""
        path = self.root / name
        open_regular(path).close()
        try:
            with pa.memory_map(str(path)) as file:
                table = pa.ipc.open_stream(file.read_buffer()).read_all()
            table.validate(full=True)
        except pa.ArrowException as error:
            raise ValueError(f"not a readable Arrow stream ({str(error)[:200]})") from error
        texts = [self._text] if self._text else []
        wanted = dict.fromkeys((MEAN, LOGVAR, T5, CLIP), "binary") | dict.fromkeys((KEY, *texts), "string")
        for column, kind in wanted.items():
            if column not in table.column_names:
                raise ValueError(f"no column '{column}' among {', '.join(table.column_names)[:200]}")
            if str(table[column].type) not in (kind, f"large_{kind}"):
                raise ValueError(f"column '{column}' of type {table[column].type}; expected {kind}")
        return table.select(list(wanted))
