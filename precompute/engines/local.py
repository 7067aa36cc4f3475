"""The engine of one device: this process."""

from __future__ import annotations

from collections.abc import Sequence

from ...datasets.format.schema import StoreSpec
from ...datasets.revisions.commits import Task
from ...datasets.revisions.writer import StoreWriter
from ..config import PrecomputeRecipe
from ..encoders.describe import describe_store
from ..encoders.text import CaptionTokenizer, TokenCount
from ..encoders.vae import Encoders
from ..images.decoders import Decoders
from ..planning.pictures import num_threads
from ..progress.clock import StageClock
from ..progress.tally import Tally
from ..progress.verdict import Power
from ..sources.source import Source
from .worker import Worker


class LocalEngine:
    """As ``Engine``."""

    def __init__(self, recipe: PrecomputeRecipe, encoders: Encoders, decoders: Decoders) -> None:
        self._recipe, self._encoders, self._decoders = recipe, encoders, decoders
        self._before = encoders.caption.computed if encoders.caption else TokenCount()
        self.power = Power(encoders.image.device.type, 1, num_threads())

    @property
    def tokenizer(self) -> CaptionTokenizer | None:
        """As ``Engine.tokenizer``."""
        return self._encoders.tokenizer

    @property
    def tokens(self) -> TokenCount:
        """As ``Engine.tokens``."""
        caption = self._encoders.caption
        return caption.computed - self._before if caption else TokenCount()

    def describe(self, source: Source, known: StoreSpec | None = None) -> StoreSpec:
        """As ``Engine.describe``."""
        return describe_store(self._recipe, source, self._encoders, known=known)

    def encode(
        self, writer: StoreWriter, missing: Sequence[Task], source: Source, *, tally: Tally, clock: StageClock
    ) -> None:
        """As ``Engine.encode``."""
        worker = Worker(self._recipe, self._encoders, self._decoders, clock)
        worker.encode(writer, missing, source, lambda event: tally.count("", event))
