"""The interface of engines, which encode the shards of a revision.

An engine is this process (``local.py``), one process for each device (``processes.py``) or a Ray cluster
(``cluster.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ...datasets.format.schema import StoreSpec
from ...datasets.revisions.commits import Task
from ...datasets.revisions.writer import StoreWriter
from ..encoders.text import CaptionTokenizer, TokenCount
from ..progress.clock import StageClock
from ..progress.tally import Tally
from ..progress.verdict import Power
from ..sources.source import Source


class Engine(Protocol):
    """Encodes shards for the process that plans and seals.

    Attributes:
      power: devices and threads that it encodes with.
    """

    power: Power

    @property
    def tokenizer(self) -> CaptionTokenizer | None:
        """Of the caption encoder, for planning; None without text."""
        ...

    @property
    def tokens(self) -> TokenCount:
        """Tokens that went through the caption encoders so far."""
        ...

    def describe(self, source: Source, known: StoreSpec | None = None) -> StoreSpec:
        """The spec of a store that its encoders make; as ``describe_store``."""
        ...

    def encode(
        self, writer: StoreWriter, missing: Sequence[Task], source: Source, *, tally: Tally, clock: StageClock
    ) -> None:
        """Encode the missing shards of a revision; returns when all are committed, by any process.

        Args:
          writer: of the revision.
          source: of the pictures.
          tally: receives the workers' events.
          clock: gets the seconds of each stage, summed over all workers.
        Raises: LeanditError: its class tells what to fix.
        """
        ...
